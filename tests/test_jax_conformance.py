"""What the suite requires of transforms must find these faults, each of a backend on JAX arrays.

The mutants of `plsh.testing` compute in NumPy, which has no transforms.
"""

from dataclasses import replace

import jax
import plsh_jax
import pytest

import plsh
from plsh.backend import AttentionOutput
from plsh.conformance import runner

SLOW = pytest.mark.slow


class Faulty(type(plsh_jax.BACKEND)):
    """The JAX backend with one fault, which its docstring tells."""

    name = "plsh_jax_faulty"

    def given(self, q, k, v, request):
        """Return the output of the sound backend."""
        return tuple(super().attend(q, k, v, request))

    def attend(self, q, k, v, request):
        return AttentionOutput(*self.given(q, k, v, request))


class OffsetBakedIn(Faulty):
    """Under jit an offset keeps the value that it had when the program was traced, or 0."""

    def given(self, q, k, v, request):
        at = request.arrays.q_offset
        if isinstance(at, jax.core.Tracer):
            request = replace(request, arrays=replace(request.arrays, q_offset=0))
        return super().given(q, k, v, request)


class KeysOfTheFirst(Faulty):
    """Under vmap all calls have the keys of the first."""

    def given(self, q, k, v, request):
        def plain(q, k, v):
            return super(KeysOfTheFirst, self).given(q, k, v, request)

        call = jax.custom_batching.custom_vmap(plain)

        @call.def_vmap
        def rule(size, mapped, q, k, v):
            first = k[0] if mapped[1] else k
            axes = tuple(0 if m else None for m in (mapped[0], False, mapped[2]))
            many = jax.vmap(plain, in_axes=axes, axis_size=size)
            return many(q, first, v), (True, True)

        return call(q, k, v)


class LseWithoutTangent(Faulty):
    """The lse carries no derivative forward."""

    def given(self, q, k, v, request):
        out, lse = super().given(q, k, v, request)
        return out, jax.lax.stop_gradient(lse)


class OnceDifferentiable(Faulty):
    """The gradient's own derivative takes its inputs for constants."""

    def given(self, q, k, v, request):
        def plain(q, k, v):
            return super(OnceDifferentiable, self).given(q, k, v, request)

        def back(saved, cotangents):
            return jax.vjp(plain, *map(jax.lax.stop_gradient, saved))[1](cotangents)

        call = jax.custom_vjp(plain)
        call.defvjp(lambda *x: (plain(*x), x), back)
        return call(q, k, v)


@pytest.mark.parametrize(
    ("requirement", "fault"),
    [
        pytest.param("TRF-1", OffsetBakedIn, marks=SLOW),
        pytest.param("TRF-2", KeysOfTheFirst, marks=SLOW),
        ("TRF-3", LseWithoutTangent),
        pytest.param("TRF-4", OnceDifferentiable, marks=SLOW),
    ],
)
def test_a_fault_under_a_transform_is_found(requirement, fault):
    """CNF-2."""
    plsh.register_backend(fault())
    report = runner.run(Faulty.name, only=(requirement,), until_failed=True)
    (row,) = report.rows
    assert row.status == "fail"
    assert "difference" in row.failures[0][1], "a call fails, instead of giving other values"


@SLOW
def test_the_sound_backend_passes():
    """So that it is the fault that is found."""
    requirements = ["TRF-1", "TRF-2", "TRF-3", "TRF-4"]
    assert runner.run("jax", only=requirements).ids("pass") == requirements

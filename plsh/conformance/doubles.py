"""What tests of the contract share: a backend that records, an array without values, calls."""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Never
from unittest import mock

from .. import registry
from ..attention import attention
from ..backend import (
    SPEC_VERSION,
    AttentionOutput,
    Availability,
    Backend,
    Capabilities,
    Gradients,
    Harness,
    Request,
)
from ..compat import Array
from ..methods import Exact, PositionalLSH, Window
from ..testing import harness_for, make_inputs
from .subject import Subject

__all__ = [
    "DTYPES",
    "METHODS",
    "OBJECTS",
    "SLOPES",
    "Recorder",
    "Unreadable",
    "accumulation",
    "everything",
    "handed",
    "problem",
    "registered",
    "widest",
]


class Recorder:
    """A backend that keeps what it is asked and lets another one answer.

    Parameters
    ----------
    inner : Backend, optional
        Who answers. None: being asked to compute is an error.
    name : str, default "plsh_recorder"
    capabilities : Capabilities, optional
        What is declared. None: what `inner` declares, or everything.
    available : Availability, default yes
    refusal : str, optional
        What `can_run` says. None: what `inner` says.
    spec_version : str, default that of the core

    Attributes
    ----------
    asked : list of Request
        By `can_run`.
    calls : list of tuple
        Arguments of `attend`.
    """

    def __init__(
        self,
        inner: Backend | None = None,
        name: str = "plsh_recorder",
        *,
        capabilities: Capabilities | None = None,
        available: Availability | None = None,
        refusal: str | None = None,
        spec_version: str = SPEC_VERSION,
    ) -> None:
        everything = Capabilities(("numpy", "torch", "jax", "cupy", "array-api"), gradients="vjp")
        self.inner, self.name, self.spec_version = inner, name, spec_version
        self.declared = capabilities or (inner.capabilities() if inner else everything)
        self.available, self.refusal = available or Availability(True), refusal
        self.asked: list[Request] = []
        self.calls: list[tuple[Any, ...]] = []

    def availability(self) -> Availability:
        """Say what the test wants."""
        return self.available

    def capabilities(self) -> Capabilities:
        """Declare what the test wants."""
        return self.declared

    def can_run(self, request: Request) -> str | None:
        """Keep the request."""
        self.asked.append(request)
        return self.refusal or (self.inner.can_run(request) if self.inner else None)

    def attend(self, q: Array, k: Array, v: Array, request: Request) -> AttentionOutput:
        """Keep the arguments, and pass them on."""
        self.calls.append((q, k, v, request))
        if self.inner is None:
            raise AssertionError(f"backend {self.name!r} must not be asked to compute")
        return self.inner.attend(q, k, v, request)

    def vjp(self, *arguments: Any) -> Gradients:
        """Keep the arguments, and pass them on."""
        self.calls.append(arguments)
        if self.inner is None:
            raise AssertionError(f"backend {self.name!r} must not be asked to compute")
        found: Gradients = self.inner.vjp(*arguments)  # type: ignore[attr-defined]
        return found

    def harness(self) -> Harness:
        """Return the harness of the first kind of arrays."""
        return self.inner.harness() if self.inner else harness_for(self.declared.arrays[0])


@contextlib.contextmanager
def registered(*backends: Backend, without: Sequence[str] = ()) -> Iterator[None]:
    """Register backends, and take others out, for a while."""
    with mock.patch.dict(registry._REGISTRY):
        for name in without:
            registry._REGISTRY.pop(name, None)
        for backend in backends:
            registry.register_backend(backend)
        yield


class Unreadable:
    """What is known of an array that is traced: kind "array-api", shape, dtype, device; no value.

    Parameters
    ----------
    shape : sequence of int
    dtype : str, default "float32"
    """

    device = "nowhere"

    def __init__(self, shape: Sequence[int], dtype: str = "float32") -> None:
        self.shape, self.dtype = tuple(shape), SimpleNamespace(name=dtype)
        self.ndim = len(self.shape)

    def _read(self, *arguments: Any, **keywords: Any) -> Never:
        raise AssertionError("the values of an array were asked for")

    __array_namespace__ = __getitem__ = __iter__ = __array__ = __dlpack__ = _read
    __bool__ = __int__ = __float__ = __index__ = __lt__ = __ge__ = _read
    tolist = item = _read


def widest(subject: Subject) -> str:
    """Return the declared dtype with the most bits, in which faults show best."""
    order = ("float64", "float32", "float16", "bfloat16")
    return next(name for name in order if name in subject.capabilities.dtypes)


METHODS = ("exact", "window", "lsh")
DTYPES = ("float16", "bfloat16", "float32", "float64")
SLOPES = (0.5, 0.25, 0.125, 0.0)
OBJECTS: dict[str, Any] = {
    "exact": Exact(),
    "window": Window((9, 3, 30, 0)),
    "lsh": PositionalLSH(5, seed=2),
}


def accumulation(dtype: str) -> str:
    """Return the accumulation dtype."""
    return "float64" if dtype == "float64" else "float32"


def problem(
    subject: Subject,
    dtype: str,
    n: int = 21,
    seed: int = 0,
    shape: tuple[int, int, int] = (2, 4, 2),
    dims: tuple[int, int] = (4, 4),
) -> list[Array]:
    """Return q, k, v, grad_out and grad_lse of the backend's kind; `shape` is (B, H, Hkv)."""
    *arrays, by_lse = make_inputs(*shape, n, None, *dims, dtype, seed)
    made = [subject.array(x, dtype) for x in arrays]
    return [*made, subject.array(by_lse, accumulation(dtype))]


def everything(subject: Subject, arrays: Sequence[Array], **options: Any) -> list[Array]:
    """Return output, lse, and the gradients that there are, as a list of arrays.

    Without gradients in JAX: its arrays have no memory that a program could see.
    """
    q, k, v, grad_out, grad_lse = arrays
    if not subject.differentiates or subject.kind == "jax":
        return list(subject.attention(q, k, v, return_lse=True, **options))
    output, grads = subject.gradients(q, k, v, grad_out, grad_lse, **options)
    return [*output, *(x for x in grads if x is not None)]


def handed(subject: Subject, q: Array, k: Array, v: Array, **options: Any) -> tuple[Any, ...]:
    """Return what `attend` of the backend is handed by a call."""
    recorder = Recorder(subject.backend)
    with registered(recorder):
        attention(q, k, v, backend=recorder.name, **options)
    (call,) = recorder.calls
    return call

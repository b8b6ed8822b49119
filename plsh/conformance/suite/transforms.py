"""What a user may apply to `attention` where the backend declares it."""

import functools

import numpy as np
import pytest

from plsh.attention import attention
from plsh.backend import AttentionOutput
from plsh.conformance.suite.common import METHODS, SLOPES, assert_same, make, wide
from plsh.methods import Window
from plsh.testing import assert_equal_to_rounding, oracle

METHOD = pytest.mark.parametrize("method", METHODS)
N = 12
IDS = np.array([[0] * 5 + [1] * 4 + [-1] * 3, [0] * N], np.int32)


def _small(subject, method, **options):
    """Return a problem of two heads that share a key head."""
    shape = {"heads": 2, "kv_heads": 1, "dims": (4, 3), "slopes": SLOPES[:2]}
    problem = make(subject, N, method=method, causal=True, **{**shape, **options})
    return problem.but(method=Window((4, 7))) if method == "window" else problem


def _call(subject, problem, **more):
    """Return attention as a function of q, k and v to (out, lse)."""
    keywords = {**problem.keywords(subject), **more}

    def f(q, k, v, **operands):
        return tuple(
            attention(q, k, v, return_lse=True, backend=subject.name, **{**keywords, **operands})
        )

    return f


def _host(subject, found):
    return AttentionOutput(*map(subject.host, found))


def _operands(subject, problem):
    """Return the operands that may be traced, by name, each with another value."""
    ids = subject.array(IDS, "int32")
    found = {"segment_ids": (ids, subject.array(IDS[::-1].copy(), "int32"))}
    if problem.is_decay:
        at = [subject.array(np.array(x), "int32") for x in ((3, 5), (4, 3))]
        slopes = [subject.array(np.array(x), wide(problem.dtype)) for x in ((0.5, 0.0), (0.25, 2))]
        found |= {"q_offset": tuple(at), "slopes": tuple(slopes)}
    return found


# --- jit and compile ------------------------------------------------------------------------------


@pytest.mark.requirement("TRF-1")
@pytest.mark.needs("transform:jit")
@METHOD
def test_jit_gives_what_the_plain_call_gives(method, subject):
    problem = _small(subject, method)
    f = _call(subject, problem)
    traces = []

    def counted(q, k, v):
        traces.append(None)
        return f(q, k, v)

    fast = subject.harness.jit(counted)
    for seed in (0, 1):
        other = _small(subject, method, seed=seed)
        inputs = other.arrays(subject)
        got, expected = fast(*inputs), f(*inputs)
        assert_same(subject, problem.dtype, _host(subject, got), _host(subject, expected))
    assert len(traces) == 1, "the second call was traced again"


@pytest.mark.requirement("TRF-1", "CNV-7")
@pytest.mark.needs("transform:jit")
@METHOD
def test_operands_may_be_traced_under_jit(method, subject):
    problem = _small(subject, method)
    f, inputs = _call(subject, problem), problem.arrays(subject)
    for name, values in _operands(subject, problem).items():
        fast = subject.harness.jit(lambda q, k, v, x, name=name: f(q, k, v, **{name: x}))
        for value in values:
            got, expected = fast(*inputs, value), f(*inputs, **{name: value})
            assert_same(subject, problem.dtype, _host(subject, got), _host(subject, expected))


@pytest.mark.requirement("TRF-1", "CNV-7")
@pytest.mark.needs("transform:jit")
@pytest.mark.may_refuse
@pytest.mark.parametrize("method", ["lsh"])
def test_offsets_may_be_traced_under_lsh(method, subject):
    problem = _small(subject, method)
    f, inputs = _call(subject, problem), problem.arrays(subject)
    at = subject.array(np.array(7), "int32")
    got = subject.harness.jit(lambda q, k, v, at: f(q, k, v, q_offset=at, k_offset=at))(*inputs, at)
    expected = f(*inputs, q_offset=7, k_offset=7)
    assert_same(subject, problem.dtype, _host(subject, got), _host(subject, expected))


@pytest.mark.requirement("TRF-1", "TRF-5")
@pytest.mark.needs("transform:jit", "autograd")
@METHOD
def test_gradients_under_jit(method, subject):
    problem = _small(subject, method, segment_ids=IDS)
    f, inputs = _call(subject, problem), problem.arrays(subject)
    cotangents = problem.cotangents(subject)
    pull = functools.partial(_pull, subject, f)
    got = subject.harness.jit(lambda *x: pull(x, cotangents))(*inputs)
    expected = problem.gradients(subject)[:3]
    assert_same(subject, problem.dtype, tuple(map(subject.host, got)), expected)


@pytest.mark.requirement("TRF-5")
@pytest.mark.needs("transform:compile")
@METHOD
@pytest.mark.parametrize("segments", [None, IDS], ids=["one", "segments"])
def test_compile_gives_what_the_plain_call_gives(method, segments, subject):
    problem = _small(subject, method, segment_ids=segments)
    f, inputs = _call(subject, problem), problem.arrays(subject)
    got, expected = subject.harness.compile(f)(*inputs), f(*inputs)
    assert_same(subject, problem.dtype, _host(subject, got), _host(subject, expected))


@pytest.mark.requirement("TRF-5")
@pytest.mark.needs("transform:compile", "autograd")
@METHOD
def test_gradients_under_compile(method, subject):
    problem = _small(subject, method)
    f = subject.harness.compile(_call(subject, problem))
    got = subject.vjp(f, problem.arrays(subject), problem.cotangents(subject))
    expected = problem.gradients(subject)[:3]
    assert_same(subject, problem.dtype, tuple(map(subject.host, got)), expected)


# --- vmap -----------------------------------------------------------------------------------------


@pytest.mark.requirement("TRF-2")
@pytest.mark.needs("transform:vmap")
@METHOD
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (0, 0, 0), (1, None, 0)], ids=str)
def test_vmap_gives_what_the_calls_one_by_one_give(method, axes, subject):
    problem = _small(subject, method)
    f, inputs, several = _call(subject, problem), [], []
    for x, axis in zip((problem.q, problem.k, problem.v), axes, strict=True):
        values = [x, x[::-1].copy(), -x] if axis is not None else [x] * 3
        several.append([subject.array(value, problem.dtype) for value in values])
        made = x if axis is None else np.stack(values, axis=axis)
        inputs.append(subject.array(made, problem.dtype))
    out, lse = subject.harness.vmap(f, in_axes=axes)(*inputs)
    for c in range(3):
        got = AttentionOutput(subject.host(out)[c], subject.host(lse)[c])
        assert_same(subject, problem.dtype, got, _host(subject, f(*(x[c] for x in several))))


@pytest.mark.requirement("TRF-2", "CNV-7")
@pytest.mark.needs("transform:vmap")
@METHOD
def test_operands_may_be_mapped(method, subject):
    problem = _small(subject, method)
    f, inputs = _call(subject, problem), problem.arrays(subject)
    for name, values in _operands(subject, problem).items():
        host = [subject.host(x) for x in values]
        stacked = subject.array(np.stack(host), str(host[0].dtype))
        mapped = subject.harness.vmap(lambda x, name=name: f(*inputs, **{name: x}), in_axes=0)
        out, lse = mapped(stacked)
        for c, value in enumerate(values):
            got = AttentionOutput(subject.host(out)[c], subject.host(lse)[c])
            expected = _host(subject, f(*inputs, **{name: value}))
            assert_same(subject, problem.dtype, got, expected)


@pytest.mark.requirement("TRF-2")
@pytest.mark.needs("transform:vmap", "autograd")
@METHOD
def test_gradients_may_be_mapped(method, subject):
    problem = _small(subject, method, segment_ids=IDS)
    f = _call(subject, problem)
    cotangents = problem.cotangents(subject)
    _, k, v = problem.arrays(subject)
    stacked = subject.array(np.stack([problem.q, 2 * problem.q]), problem.dtype)
    mapped = subject.harness.vmap(
        lambda x: tuple(_pull(subject, f, (x, k, v), cotangents)), in_axes=0
    )(stacked)
    for c, times in enumerate((1, 2)):
        expected = problem.but(q=times * problem.q).gradients(subject)[:3]
        got = tuple(subject.host(x)[c] for x in mapped)
        assert_same(subject, problem.dtype, got, expected)


def _pull(subject, f, inputs, cotangents):
    """Apply the library's functional vjp, which nests in its transforms."""
    if subject.kind == "torch":
        import torch

        return torch.func.vjp(f, *inputs)[1](tuple(cotangents))
    if subject.kind == "jax":
        import jax

        return jax.vjp(f, *inputs)[1](tuple(cotangents))
    return tuple(subject.vjp(f, inputs, cotangents))


# --- derivatives ----------------------------------------------------------------------------------


@pytest.mark.requirement("TRF-3")
@pytest.mark.needs("transform:jvp")
@METHOD
def test_jvp_is_the_derivative_in_a_direction(method, subject):
    """Each element of it is a gradient of the oracle, times the tangents."""
    problem = _small(subject, method, batch=1)
    tangents = _tangents(problem)
    _, got = subject.harness.jvp(
        _call(subject, problem),
        problem.arrays(subject),
        [subject.array(x, problem.dtype) for x in tangents],
    )
    expected = _derivative(problem, tangents)
    assert_same(subject, problem.dtype, _host(subject, got), expected)


@pytest.mark.requirement("TRF-3")
@pytest.mark.needs("transform:jvp", "gradients")
@METHOD
def test_jvp_agrees_with_the_gradients(method, subject):
    problem = _small(subject, method, segment_ids=IDS)
    tangents = _tangents(problem)
    _, forward = subject.harness.jvp(
        _call(subject, problem),
        problem.arrays(subject),
        [subject.array(x, problem.dtype) for x in tangents],
    )
    along = sum(
        np.vdot(c.astype(float), subject.host(x).astype(float))
        for c, x in zip((problem.grad_out, problem.grad_lse), forward, strict=True)
    )
    back = sum(
        np.vdot(g.astype(float), t.astype(float))
        for g, t in zip(problem.gradients(subject)[:3], tangents, strict=True)
    )
    like = wide(problem.dtype)
    terms = np.sqrt(problem.q.size)  # a sum of that many; each has the rounding of its own
    scale = 1 / max(1.0, float(terms))
    assert_equal_to_rounding(
        subject.array(np.array(along * scale), like), subject.array(np.array(back * scale), like)
    )


@pytest.mark.requirement("TRF-3", "NUM-9")
@pytest.mark.needs("transform:jvp", "method:exact")
def test_jvp_by_the_slopes(subject):
    problem = _small(subject, "exact", batch=1)
    f, own = _call(subject, problem), wide(problem.dtype)
    inputs = problem.arrays(subject)
    slopes, way = (np.array(x) for x in (problem.slopes, (1.0, -0.5)))
    _, got = subject.harness.jvp(
        lambda m: f(*inputs, slopes=m), [subject.array(slopes, own)], [subject.array(way, own)]
    )
    zero = [0 * x for x in (problem.q, problem.k, problem.v)]
    assert_same(subject, problem.dtype, _host(subject, got), _derivative(problem, zero, way))


def _tangents(problem):
    rng = np.random.default_rng(2)
    return [rng.choice([-1.0, -0.5, 0.5, 1.0], x.shape) for x in (problem.q, problem.k, problem.v)]


def _derivative(problem, tangents, by_slopes=None):
    """Return the derivative of (out, lse) by the oracle: each output is a batch row of its own."""
    shapes = problem.grad_out.shape[1:], problem.grad_lse.shape[1:]
    sizes = [int(np.prod(shape)) for shape in shapes]
    rows = sum(sizes)
    one = np.eye(rows)
    call = problem._weight()
    if "slopes" in call:
        call["slopes"] = np.tile(call["slopes"], (rows, 1))
    found = oracle(
        *(np.repeat(x, rows, axis=0) for x in (problem.q, problem.k, problem.v)),
        **call,
        causal=problem.causal,
        grad_out=one[:, : sizes[0]].reshape(rows, *shapes[0]),
        grad_lse=one[:, sizes[0] :].reshape(rows, *shapes[1]),
    )
    parts = zip((found.q, found.k, found.v), tangents, strict=True)
    along = sum((g * t).sum(axis=(1, 2, 3)) for g, t in parts)
    if by_slopes is not None:
        along = along + found.slopes @ by_slopes
    return AttentionOutput(
        along[: sizes[0]].reshape(1, *shapes[0]), along[sizes[0] :].reshape(1, *shapes[1])
    )


@pytest.mark.requirement("TRF-4")
@pytest.mark.needs("gradients", "autograd")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@METHOD
def test_a_second_derivative_is_right_or_refused(method, dtype, subject):
    problem = _small(subject, method, dtype=dtype)
    tangents = _tangents(problem)
    if "second_order" not in subject.capabilities.transforms:
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            _second(subject, problem, tangents)
        return
    got = _second(subject, problem, tangents)
    assert_same(subject, dtype, tuple(map(subject.host, got)), _curvature(problem, tangents))


def _second(subject, problem, tangents):
    """Return the gradient by q, k, v of <gradients, tangents>."""
    f, inputs = _call(subject, problem), problem.arrays(subject)
    cotangents = problem.cotangents(subject)
    along = [subject.array(x, problem.dtype) for x in tangents]
    if subject.kind == "torch":
        import torch

        leaves = [x.clone().requires_grad_() for x in inputs]
        first = torch.autograd.grad(f(*leaves), leaves, cotangents, create_graph=True)
        return torch.autograd.grad(first, leaves, along)

    def first(*inputs):
        return tuple(_pull(subject, f, inputs, cotangents))

    return _pull(subject, first, inputs, along)


def _curvature(problem, tangents):
    """Return the same by differences of the oracle's gradients, of eighth order in the step."""
    inputs = [x.astype(np.float64) for x in (problem.q, problem.k, problem.v)]
    call = {
        **problem._weight(),
        "causal": problem.causal,
        "grad_out": problem.grad_out,
        "grad_lse": problem.grad_lse,
    }
    found = [np.zeros_like(x) for x in inputs]
    step = 2.0**-6
    for times, weight in ((1, 4 / 5), (2, -1 / 5), (3, 4 / 105), (4, -1 / 280)):
        for sign in (1, -1):
            moved = (x + sign * times * step * t for x, t in zip(inputs, tangents, strict=True))
            grads = oracle(*moved, **call)
            for total, g in zip(found, (grads.q, grads.k, grads.v), strict=True):
                total += sign * weight / step * g
    return tuple(found)

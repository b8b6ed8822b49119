"""What `attend` and `vjp` give back, and what they do to memory and global state."""

import random
import sys

import numpy as np
import pytest

from plsh import attention_vjp, compat, testing
from plsh.backend import AttentionOutput, Gradients
from plsh.conformance.doubles import (
    DTYPES,
    METHODS,
    OBJECTS,
    SLOPES,
    accumulation,
    everything,
    handed,
    problem,
    widest,
)


def hosts(subject, arrays):
    return [subject.host(x) for x in arrays]


def assert_form(x, like, shape, dtype, name):
    assert compat.kind(x) == compat.kind(like), name
    assert compat.dtype_name(x) == dtype, name
    assert tuple(x.shape) == tuple(shape), name
    assert compat.same_device(x, like), name


@pytest.mark.requirement("BCK-10", "ATT-6", "ATT-7", "CNF-3")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_attend_returns_output_and_lse_of_the_right_form(method, dtype, subject):
    """Asked directly: the core does not mend it."""
    for n, dims in ((21, (4, 6)), (1, (3, 1)), (0, (2, 2))):
        arrays = problem(subject, dtype, n, dims=dims)[:3]
        q, k, v, request = handed(subject, *arrays, method=OBJECTS[method], slopes=SLOPES)
        output = subject.backend.attend(q, k, v, request)
        assert isinstance(output, AttentionOutput)
        assert_form(output.out, q, (2, 4, n, dims[1]), dtype, "out")
        assert_form(output.lse, q, (2, 4, n), accumulation(dtype), "lse")


@pytest.mark.requirement("BCK-11", "ATT-26", "CNF-3")
@pytest.mark.needs("vjp")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_vjp_returns_gradients_of_the_right_form(method, dtype, subject):
    q, k, v, grad_out, grad_lse = problem(subject, dtype)
    wide = accumulation(dtype)
    tall = (SLOPES, SLOPES)
    for slopes in (SLOPES,) if method == "lsh" else (SLOPES, tall):
        call = handed(subject, q, k, v, method=OBJECTS[method], slopes=slopes)
        output = subject.backend.attend(*call)
        for by_lse in (grad_lse, None):
            found = subject.backend.vjp(*call[:3], output, grad_out, by_lse, call[3])
            assert isinstance(found, Gradients)
            for name, x in zip("qkv", (q, k, v), strict=True):
                assert_form(getattr(found, name), q, x.shape, dtype, f"gradient by {name}")
            if method == "lsh":
                assert found.slopes is None
            else:
                assert_form(found.slopes, q, np.shape(slopes), wide, "gradient by slopes")


VIEWS = {
    "every second": lambda x, xp: xp.repeat(x, 2, axis=-1)[..., ::2],
    "heads last": lambda x, xp: swap(xp.asarray(swap(x, xp, 1, 2), copy=True), xp, 1, 2),
    "dims first": lambda x, xp: swap(xp.asarray(swap(x, xp, 2, -1), copy=True), xp, 2, -1),
    "reversed": lambda x, xp: xp.flip(xp.asarray(xp.flip(x), copy=True)),
    "inside": lambda x, xp: xp.concat([x, x, x], axis=2)[:, :, x.shape[2] : 2 * x.shape[2], ...],
    "every second row": lambda x, xp: xp.repeat(x, 2, axis=0)[::2, ...],
}


def swap(x, xp, a, b):
    axes = list(range(x.ndim))
    axes[a], axes[b] = axes[b], axes[a]
    return xp.permute_dims(x, tuple(axes))


def contiguous(x, xp):
    """Return the same values in memory of their own, in order."""
    return xp.reshape(xp.concat([x, x], axis=0), (2, *x.shape))[0, ...]


def same_for_all(subject, arrays, *others, **options):
    """Assert that arrays of equal values give equal results, whatever their memory is like."""
    want = everything(subject, arrays, **options)
    for changed in others:
        for x, y in zip(want, everything(subject, changed, **options), strict=True):
            testing.assert_equal_to_rounding(y, x)


@pytest.mark.requirement("BCK-10", "BCK-11")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("method", METHODS)
def test_memory_of_any_order_gives_the_same(method, view, subject):
    arrays = problem(subject, widest(subject))
    xp, options = compat.namespace(arrays[0]), {"method": OBJECTS[method], "slopes": SLOPES}
    change = VIEWS[view]
    changed = [change(x, xp) for x in arrays]
    mixed = [changed[0], arrays[1], changed[2], arrays[3], changed[4]]
    same_for_all(subject, arrays, changed, mixed, **options)


@pytest.mark.requirement("BCK-10", "BCK-11")
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_broadcast_memory_gives_the_same(method, axes, subject):
    """Stride 0, where writing one element writes many."""
    arrays = problem(subject, widest(subject))
    xp = compat.namespace(arrays[0])
    index = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(3))
    spread = [xp.broadcast_to(x[(*index, ...)], x.shape) for x in arrays]
    plain = [contiguous(x, xp) for x in spread]
    same_for_all(subject, plain, spread, method=OBJECTS[method], slopes=SLOPES)


@pytest.mark.requirement("BCK-10", "ATT-19")
@pytest.mark.parametrize("method", METHODS)
def test_operands_may_be_views(method, subject):
    arrays, rng = problem(subject, widest(subject)), np.random.default_rng(1)
    xp, ids = compat.namespace(arrays[0]), rng.integers(-1, 2, (2, 21))
    wide = subject.array(np.stack([ids, 1 - ids], axis=-1), "int32")
    options = {"method": OBJECTS[method], "slopes": SLOPES}
    want = everything(subject, arrays, segment_ids=subject.array(ids, "int32"), **options)
    if method != "lsh" and subject.capabilities.gradients != "autograd":
        options["slopes"] = xp.flip(subject.array(np.array(SLOPES[::-1]), "float32"))
        options["slopes"] = xp.astype(options["slopes"], arrays[4].dtype)
    for x, y in zip(
        want, everything(subject, arrays, segment_ids=wide[..., 0], **options), strict=True
    ):
        testing.assert_equal_to_rounding(y, x)


def unaligned(x):
    return np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape)


@pytest.mark.requirement("BCK-10", "BCK-11")
@pytest.mark.needs("kind:numpy")
@pytest.mark.parametrize("change", [np.asfortranarray, unaligned], ids=["fortran", "unaligned"])
@pytest.mark.parametrize("method", METHODS)
def test_read_only_numpy_memory_gives_the_same(method, change, subject):
    arrays = problem(subject, widest(subject))
    changed = [change(x) for x in arrays]
    for x in changed:
        x.flags.writeable = False
    same_for_all(subject, arrays, changed, method=OBJECTS[method], slopes=SLOPES)


@pytest.mark.requirement("BCK-10", "BCK-11", "ATT-20")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_that_is_given_is_written_to(method, dtype, subject):
    """Not even padding."""
    arrays = problem(subject, dtype)
    ids = subject.array(np.repeat([[-1] * 4 + [0] * 9 + [1] * 6 + [-1] * 2], 2, axis=0), "int32")
    options = {"method": OBJECTS[method], "slopes": SLOPES, "segment_ids": (ids, ids)}
    if method != "lsh":
        options["slopes"] = subject.array(np.array(SLOPES), accumulation(dtype))
        arrays_given = [*arrays, ids, options["slopes"]]
    else:
        arrays_given = [*arrays, ids]
    output = subject.attention(*arrays[:3], return_lse=True, causal=True, **options)
    arrays_given += output
    before = [x.tobytes() for x in hosts(subject, arrays_given)]
    everything(subject, arrays, causal=True, **options)
    if subject.capabilities.gradients == "vjp":
        attention_vjp(
            *arrays[:3], output, *arrays[3:], causal=True, backend=subject.name, **options
        )
    assert before == [x.tobytes() for x in hosts(subject, arrays_given)]


@pytest.mark.requirement("BCK-10", "BCK-11", "NUM-11", "MEM-2")
@pytest.mark.parametrize("n", [1, 21])
@pytest.mark.parametrize("method", METHODS)
def test_results_are_memory_of_their_own(method, n, subject):
    """Neither an input's, nor one that the next call writes to; with one token, out is v."""
    dtype, options = widest(subject), {"method": OBJECTS[method], "slopes": SLOPES}
    shape = (2, 4, 4)
    arrays = problem(subject, dtype, n, shape=shape)
    found = everything(subject, arrays, **options)
    held = [x.copy() for x in hosts(subject, found)]
    other = everything(subject, problem(subject, dtype, n, 7, shape), **options)
    for x, y in zip(hosts(subject, found), held, strict=True):
        np.testing.assert_array_equal(x, y, err_msg="the next call overwrites a result")
    if subject.kind == "jax":
        return  # its arrays can't be written to
    for x in arrays:
        x[...] = 3.0
    for x, y in zip(hosts(subject, found), held, strict=True):
        np.testing.assert_array_equal(x, y, err_msg="a result is an input's memory")
    for i, x in enumerate(found):
        x[...] = float(i)
    for i, x in enumerate(hosts(subject, found)):
        assert np.all(x == i), "two results share memory"
    again = everything(subject, problem(subject, dtype, n, 7, shape), **options)
    for x, y in zip(again, other, strict=True):
        testing.assert_equal_to_rounding(x, y)


def random_states(subject):
    """Return the states of the global generators of random numbers."""
    found = [random.getstate(), str(np.random.get_state())]  # noqa: NPY002
    if "torch" in sys.modules:
        found.append(sys.modules["torch"].get_rng_state().tolist())
    if subject.kind == "cupy":
        found.append(len(sys.modules["cupy"].random.generator._random_states))
    return found


@pytest.mark.requirement("NUM-11", "BCK-15", "HSH-2")
@pytest.mark.parametrize("method", METHODS)
def test_global_generators_are_neither_used_nor_disturbed(method, subject, capfd):
    """And nothing is printed."""
    arrays, options = problem(subject, widest(subject)), {"method": OBJECTS[method]}
    with np.errstate():
        settings = np.geterr()
        random.seed(1)
        first = everything(subject, arrays, **options)
        random.seed(2)
        np.random.seed(3)  # noqa: NPY002 — the global one is meant
        before = random_states(subject)
        second = everything(subject, arrays, **options)
        assert random_states(subject) == before
        assert np.geterr() == settings
    for x, y in zip(first, second, strict=True):
        testing.assert_equal_to_rounding(x, y)
    assert capfd.readouterr() == ("", "")

"""Merging of outputs over shards of the keys, and segment ids from lengths."""

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import plsh
from plsh import compat, testing
from plsh.backend import AttentionOutput
from plsh.conformance.doubles import Unreadable, widest

METHODS = ("exact", "window", "lsh")
DTYPES = ("float16", "bfloat16", "float32", "float64")
SLOPES = (0.5, 0.125, 0.03125, 0.0)
OBJECTS = {
    "exact": plsh.Exact(),
    "window": plsh.Window((9, 4, 30, 0)),
    "lsh": plsh.PositionalLSH(5, seed=5),
}
N, CUTS = 37, (0, 5, 5, 20, 36, 37)
"""Shards of the keys: of several sizes, one empty, one of one key."""


def wide(dtype):
    return "float64" if dtype == "float64" else "float32"


def options(method, causal=False):
    return {"method": OBJECTS[method], "slopes": SLOPES, "causal": causal}


def problem(subject, dtype, n=N):
    made = testing.make_inputs(2, 4, 2, n, head_dim=4, value_dim=6, dtype=dtype)
    return made, [subject.array(x, dtype) for x in made[:3]]


def shards(attend, k, v, cuts=CUTS):
    """Return the outputs over the shards of the keys."""
    parts = []
    for low, high in itertools.pairwise(cuts):
        own = k[:, :, low:high, :], v[:, :, low:high, :]
        parts.append(attend(*own, q_offset=3, k_offset=3 + low))
    return parts


@pytest.mark.requirement("ATT-27", "ATT-18", "NUM-7")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_merged_shards_of_the_keys_equal_the_whole(method, dtype, causal, subject):
    _, (q, k, v) = problem(subject, dtype)
    given = options(method, causal)

    def attend(k, v, **offsets):
        return subject.attention(q, k, v, return_lse=True, **offsets, **given)

    whole = attend(k, v, q_offset=3, k_offset=3)
    parts = shards(attend, k, v)
    for order in (parts, parts[::-1], [plsh.merge(parts[:2]), plsh.merge(parts[2:])]):
        found = plsh.merge(order)
        assert isinstance(found, AttentionOutput)
        testing.assert_equal_to_rounding(found.out, whole.out)
        testing.assert_equal_to_rounding(found.lse, whole.lse, name="lse")


@pytest.mark.requirement("ATT-27", "ATT-5")
@pytest.mark.parametrize("method", METHODS)
def test_merge_keeps_the_layout_and_an_absent_batch_axis(method, subject):
    _, (q, k, v) = problem(subject, widest(subject), 9)
    given = options(method)
    whole = subject.attention(q, k, v, return_lse=True, q_offset=0, **given)
    turned = [compat.swap_heads(x[0, ...]) for x in (q, k, v)]
    parts = [
        subject.attention(
            turned[0], *(x[low:high, ...] for x in turned[1:]), layout="bshd", return_lse=True,
            q_offset=0, k_offset=low, **given,
        )
        for low, high in ((0, 4), (4, 9))
    ]  # fmt: skip
    found = plsh.merge(parts, layout="bshd")
    testing.assert_equal_to_rounding(compat.swap_heads(found.out), whole.out[0, ...])
    testing.assert_equal_to_rounding(found.lse, whole.lse[0, ...])


def output(subject, out, lse, dtype):
    """Make an AttentionOutput of ``(1, 1, n, 1)`` and ``(1, 1, n)``."""
    shape = (1, 1, len(lse))
    rows = subject.array(np.reshape(out, (*shape, 1)), dtype)
    return AttentionOutput(rows, subject.array(np.reshape(lse, shape), wide(dtype)))


@pytest.mark.requirement("ATT-27", "NUM-4", "NUM-5", "ATT-21")
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_of_extreme_shares(dtype, subject):
    """Sums far beyond the range of exponentials; rows that no shard sees; one that one does."""
    far, dead = 1e4, -np.inf
    parts = [
        output(subject, [1, 1, 1, 0, 0, 1], [far, -far, far, dead, dead, 0], dtype),
        output(subject, [3, 3, 3, 2, 0, 3], [far, -far, -far, -7, dead, np.log(3)], dtype),
    ]
    for order in (parts, parts[::-1]):
        found = plsh.merge(order)
        lse = subject.host(found.lse)[0, 0]
        want = [far + np.log(2), -far + np.log(2), far, -7, dead, np.log(4)]
        testing.assert_equal_to_rounding(
            found.out, output(subject, [2, 2, 1, 2, 0, 2.5], want, dtype).out
        )
        np.testing.assert_allclose(lse, np.array(want, lse.dtype), rtol=2.0**-22)


@pytest.mark.requirement("ATT-27", "NUM-1")
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_sums_in_the_dtype_of_the_lse(dtype, subject):
    """Of 999 small shares none is lost beside a large one; rounded once, at the end."""
    big, small = 256.0, 0.25
    parts = [output(subject, [big], [0.0], dtype)]
    parts += [output(subject, [small], [0.0], dtype)] * 999
    found = plsh.merge(parts)
    assert compat.dtype_name(found.out) == dtype
    assert compat.dtype_name(found.lse) == wide(dtype)
    want = output(subject, [(big + 999 * small) / 1000], [np.log(1000)], dtype)
    testing.assert_equal_to_rounding(found.out, want.out, units=2)
    testing.assert_equal_to_rounding(found.lse, want.lse, units=32)


@pytest.mark.requirement("ATT-27")
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_of_one_part_is_that_part(dtype, subject):
    part = output(subject, [0.1, -3, 0], [0.3, -9, -np.inf], dtype)
    given: Any
    for given in ([part], (part,), iter([part]), [tuple(part)]):
        found = plsh.merge(given)
        testing.assert_equal_to_rounding(found.out, part.out)
        testing.assert_equal_to_rounding(found.lse, part.lse)


@pytest.mark.requirement("ATT-27", "ERR-4")
def test_merge_refuses_what_is_no_output(subject):
    dtype = widest(subject)
    part = output(subject, [1, 2], [3, 4], dtype)
    other = "float32" if dtype != "float32" else "float64"
    longer, cast = output(subject, [1], [3], dtype), output(subject, [1, 2], [3, 4], other)
    alien: Any = (Unreadable((1, 1, 2, 1), dtype), Unreadable((1, 1, 2), wide(dtype)))
    if subject.kind == "array-api":
        alien = (np.ones((1, 1, 2, 1), dtype), np.ones((1, 1, 2), wide(dtype)))
    parts: Any
    for parts, error, words in (
        ([], ValueError, "at least one"),
        ([part.out], TypeError, "AttentionOutput"),
        ([part, part.out], TypeError, "AttentionOutput"),
        ([(part.out, None)], TypeError, "AttentionOutput"),
        ([part, longer], ValueError, "shape"),
        ([part, cast], ValueError, "dtype"),
        ([part, alien], TypeError, "kind"),
        ([(part.out, part.lse[..., :1])], ValueError, "lse"),
        ([(part.out, part.out)], ValueError, "lse"),
    ):
        with pytest.raises(error, match=words):
            plsh.merge(parts)
    with pytest.raises(ValueError, match="layout"):
        plsh.merge([part], layout="bnhd")


@pytest.mark.requirement("ATT-27", "NUM-8")
@pytest.mark.needs("autograd")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_go_through_merge(method, dtype, subject):
    """Those of the whole row, by out and lse: the shares depend on q and k, too."""
    made, (q, k, v) = problem(subject, dtype)
    given = options(method, True)
    cotangents = subject.array(made.grad_out, dtype), subject.array(made.grad_lse, wide(dtype))
    _, want = subject.gradients(q, k, v, *cotangents, q_offset=3, k_offset=3, **given)

    def f(q, k, v):
        def attend(k, v, **offsets):
            return plsh.attention(
                q, k, v, return_lse=True, backend=subject.name, **offsets, **given
            )

        return tuple(plsh.merge(shards(attend, k, v, (0, 5, 20, 37))))

    found = subject.vjp(f, [q, k, v], cotangents)
    for x, y in zip(found, want[:3], strict=True):
        testing.assert_equal_to_rounding(x, y)


# --- segment ids from lengths ---------------------------------------------------------------------


def ids_of(rows, n):
    """Return the segment ids by counting, token by token."""
    found = []
    for row in rows:
        ids = [document for document, length in enumerate(row) for _ in range(length)]
        found.append(ids + [-1] * (n - len(ids)))
    return np.array(found, dtype=np.int32).reshape(len(rows), n)


LENGTHS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=3)


@pytest.mark.requirement("ATT-28")
def test_segments_number_the_documents_of_a_row(subject):
    @hypothesis.settings(max_examples=200 if subject.full else 15)
    @hypothesis.given(LENGTHS, st.integers(0, 3))
    def check(rows, spare):
        n = max((sum(row) for row in rows), default=0) + spare
        want = ids_of(rows, n)
        found = plsh.segments_from_lengths(rows, n)
        assert type(found) is np.ndarray
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, want)
        np.testing.assert_array_equal(plsh.segments_from_lengths(tuple(map(tuple, rows)), n), want)

    check()


@pytest.mark.requirement("ATT-28")
@pytest.mark.parametrize("dtype_of_lengths", ["int32", "int64", "uint8"])
def test_segments_are_of_the_kind_and_device_of_the_lengths(dtype_of_lengths, subject):
    for lengths, rows in (
        ([[2, 1, 0], [4, 0, 1]], [[2, 1], [4, 0, 1]]),
        ([[0, 3], [0, 0]], [[0, 3], []]),
        ([3, 0], [[3], []]),
        ([5, 1], [[5], [1]]),
    ):
        given = subject.array(np.array(lengths), dtype_of_lengths)
        found = plsh.segments_from_lengths(given, 5)
        assert compat.kind(found) == subject.kind
        assert compat.dtype_name(found) == "int32"
        assert compat.same_device(found, given)
        np.testing.assert_array_equal(subject.host(found), ids_of(rows, 5))
    np.testing.assert_array_equal(plsh.segments_from_lengths([3, 0], 4), ids_of([[3], []], 4))
    example = [[0, 0, 1, -1, -1], [0, 0, 0, 0, -1]]
    assert plsh.segments_from_lengths([[2, 1], [4]], 5).tolist() == example


@pytest.mark.requirement("ATT-28", "CNV-4", "ERR-4")
def test_segments_refuse_wrong_lengths(subject):
    n: Any
    for lengths, n, error, words in (
        ([3], 2, ValueError, "3"),
        ([[2, 2]], 3, ValueError, "4"),
        ([-1], 5, ValueError, "-1"),
        ([[3, -1]], 5, ValueError, "-1"),
        (np.array([-1]), 5, ValueError, "-1"),
        ([1.0], 5, TypeError, r"1\.0"),
        ([True], 5, TypeError, "True"),
        (np.array([True]), 5, TypeError, "True"),
        (np.array([1.5]), 5, TypeError, r"1\.5"),
        (["2"], 5, TypeError, "2"),
        (3, 5, TypeError, "3"),
        ("3", 5, TypeError, "3"),
        (np.ones((1, 1, 1), int), 5, ValueError, "shape"),
        ([1], 5.0, TypeError, r"n must be an integer, got 5\.0"),
        ([1], True, TypeError, "n must be"),
        ([1], -1, ValueError, "n must be"),
    ):
        with pytest.raises(error, match=words):
            plsh.segments_from_lengths(lengths, n)
    if subject.kind != "numpy":
        for made, error in (
            (subject.array(np.ones(2), "float32"), TypeError),
            (subject.array(np.ones((1, 1, 1)), "int32"), ValueError),
        ):
            with pytest.raises(error, match="lengths"):
                plsh.segments_from_lengths(made, 5)


@pytest.mark.requirement("ATT-28", "ATT-19", "ATT-18")
@pytest.mark.parametrize("method", ["exact", "window"])
def test_packed_documents_equal_separate_calls(method, subject):
    """Under a decay, which knows distances only: each document anywhere, alone."""
    dtype = widest(subject)
    _, (q, k, v) = problem(subject, dtype)
    lengths = [[12, 0, 20], [3, 30, 4]]
    given = options(method, True)
    ids = plsh.segments_from_lengths(subject.array(np.array(lengths), "int32"), N)
    whole = subject.attention(q, k, v, segment_ids=ids, return_lse=True, **given)
    for b, row in enumerate(lengths):
        first = 0
        for length in row:
            own = [x[b : b + 1, :, first : first + length, :] for x in (q, k, v)]
            alone = subject.attention(*own, return_lse=True, **given)
            here = slice(first, first + length)
            testing.assert_equal_to_rounding(whole.out[b : b + 1, :, here, :], alone.out)
            testing.assert_equal_to_rounding(whole.lse[b : b + 1, :, here], alone.lse)
            first += length
        rest = subject.host(whole.out[b, :, first:, :])
        assert not np.any(rest)

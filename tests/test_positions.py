"""Positions: decoding, chunks and shards equal the whole call, under every method."""

import itertools

import numpy as np
import pytest
from laws import LSH, METHODS, NAMES, SLOPES, assert_same, attend, inputs, rows

import plsh
from plsh import testing
from plsh.partition import PartitionSet

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
METHOD = pytest.mark.parametrize("method", NAMES)


def concat(parts):
    return plsh.AttentionOutput(
        np.concatenate([p.out for p in parts], axis=-2),
        np.concatenate([p.lse for p in parts], axis=-1),
    )


def check_decoding(method, steps):
    q, k, v = inputs(steps)
    whole = attend(q, k, v, method, causal=True)
    parts = [
        attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], method, q_offset=t)
        for t in range(steps)
    ]
    assert_same(concat(parts), whole)


@METHOD
def test_decoding_equals_prefill(method):
    """One query at a time against a growing cache; U113, U026."""
    check_decoding(method, 40)


@pytest.mark.parametrize("method", LSH)
def test_two_hundred_decoding_steps_equal_prefill(method):
    """U113: the blocks are functions of the position alone."""
    check_decoding(method, 200)


@METHOD
@CAUSAL
def test_chunks_of_queries_equal_the_whole(method, causal):
    """U114: n = 300 in chunks of 100, 1 and 199, with the cache that each needs."""
    cuts = (0, 100, 101, 300)
    q, k, v = inputs(cuts[-1])
    whole = attend(q, k, v, method, causal=causal)
    parts = []
    for start, stop in itertools.pairwise(cuts):
        keys = slice(0, stop if causal else None)
        parts.append(
            attend(
                q[:, :, start:stop], k[:, :, keys], v[:, :, keys], method,
                causal=causal, q_offset=start,
            )
        )  # fmt: skip
    assert_same(concat(parts), whole)


@METHOD
@CAUSAL
def test_merged_shards_of_keys_equal_the_whole(method, causal):
    """U105: split at odd points, one part empty, with a `k_offset` each."""
    cuts = (0, 7, 7, 40, 61)
    q, k, v = inputs(61)
    whole = attend(q, k, v, method, causal=causal)
    parts = [
        attend(q, k[:, :, a:b], v[:, :, a:b], method, causal=causal, q_offset=0, k_offset=a)
        for a, b in itertools.pairwise(cuts)
    ]
    assert np.all(parts[1].lse == -np.inf)  # the empty part
    assert_same(plsh.merge(parts), whole)
    assert_same(plsh.merge(parts[::-1]), whole)


def test_merge_in_low_precision():
    """U105 at float16 and float32: the parts are rounded, so the merge is to a few eps."""
    for dtype in ("float16", "float32"):
        q, k, v = inputs(61, dtype=dtype)
        whole = attend(q, k, v, "exact")
        parts = [
            attend(q, k[:, :, a:b], v[:, :, a:b], "exact", q_offset=0, k_offset=a)
            for a, b in ((0, 7), (7, 7), (7, 61))
        ]
        assert_same(plsh.merge(parts), whole)


@pytest.mark.parametrize("order", ["ring", "zigzag"])
@METHOD
def test_context_parallel_equals_the_whole(method, order):
    """U106: queries and keys in four shards each, merged by their lse in any order."""
    q, k, v = inputs(64)
    whole = attend(q, k, v, method, causal=True)
    shards = [slice(a, a + 16) for a in range(0, 64, 16)]
    for turn, mine in enumerate(shards):
        visits = shards[turn:] + shards[:turn] if order == "ring" else shards[::2] + shards[1::2]
        parts = [
            attend(
                q[:, :, mine], k[:, :, s], v[:, :, s], method,
                causal=True, q_offset=mine.start, k_offset=s.start,
            )
            for s in visits
        ]  # fmt: skip
        assert_same(plsh.merge(parts), rows(whole, mine))


@METHOD
def test_a_merge_of_one_changes_nothing(method):
    q, k, v = inputs(20)
    whole = attend(q, k, v, method)
    assert_same(plsh.merge([whole]), whole, units=2)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (None, "outputs must be a sequence of AttentionOutputs, got NoneType"),
        (3, "outputs must be a sequence of AttentionOutputs, got int"),
        ([(np.ones((1, 2, 3), int), np.ones((1, 2)))], "out must have a dtype of .*, got int64"),
        ([(np.ones((1, 2, 3), bool), np.ones((1, 2)))], "out must have a dtype of .*, got bool"),
    ],
)
def test_what_no_call_returned_is_not_merged(outputs, words):
    with pytest.raises(TypeError, match=words):
        plsh.merge(outputs)


@pytest.mark.parametrize("method", ["exact", "window"])
@CAUSAL
@pytest.mark.parametrize("shift", [1, 1000, 2**30 - 40, -17])
def test_exact_methods_depend_on_relative_positions_only(method, causal, shift):
    """U035: bit for bit, up to the ends of the axis."""
    q, k, v = inputs(20, 33)
    near = attend(q, k, v, method, causal=causal, q_offset=5)
    far = attend(q, k, v, method, causal=causal, q_offset=5 + shift, k_offset=shift)
    testing.assert_identical(far.out, near.out)
    testing.assert_identical(far.lse, near.lse)


@CAUSAL
def test_partitions_that_move_with_the_tokens_give_the_same(causal):
    shift = 1000
    q, k, v = inputs(33)
    blocks = METHODS["set"].labels(0, 33)
    moved = PartitionSet(blocks + shift, start=shift)
    here = plsh.attention(q, k, v, method=PartitionSet(blocks), causal=causal, backend="reference")
    there = plsh.attention(
        q, k, v, method=moved, causal=causal, backend="reference", k_offset=shift
    )  # fmt: skip
    testing.assert_identical(there, here)


def test_lsh_depends_on_absolute_positions():
    """Positions enter the hash: moved tokens fall into other blocks."""
    q, k, v = inputs(33)
    here, there = (attend(q, k, v, "lsh", k_offset=first).out for first in (0, 1000))
    assert np.max(np.abs(here[:, :3] - there[:, :3])) > 1e-2
    testing.assert_equal_to_rounding(there[:, 3], here[:, 3])  # slope 0: one block


@pytest.mark.parametrize("method", ["exact", "window"])
def test_reversal_commutes_with_attention(method):
    """U043: the bias is -slope * |i - j| on both sides, not slope * column."""
    q, k, v = inputs(33)
    flip = np.s_[:, :, ::-1]
    back = attend(q[flip], k[flip], v[flip], method)
    assert_same(plsh.AttentionOutput(back.out[flip], back.lse[flip]), attend(q, k, v, method))


def test_column_bias_is_the_same_under_a_causal_mask_only():
    """U043: the original code adds slope * column; a row constant tells them apart."""
    q, k, v = inputs(40)
    column = np.array(SLOPES)[:, None, None] * np.arange(40)

    def with_column_bias(causal):
        keys = np.repeat(k, 2, axis=1)
        logits = q @ keys.swapaxes(-1, -2) * 8**-0.5 + column
        if causal:
            logits = np.where(np.tri(40, dtype=bool), logits, -np.inf)
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return p / p.sum(axis=-1, keepdims=True) @ np.repeat(v, 2, axis=1)

    got = [attend(q, k, v, "exact", causal=causal).out for causal in (False, True)]
    testing.assert_equal_to_rounding(with_column_bias(True), got[1])
    assert np.max(np.abs(with_column_bias(False) - got[0])) > 1


def test_both_corners_of_the_causal_mask():
    """U026: v = identity shows which keys a row sees, and with which distance."""
    q, k = np.zeros((1, 2, 4)), np.zeros((1, 5, 4))
    v = np.eye(5)[None]
    call = {"method": "exact", "causal": True, "backend": "reference"}
    corner = plsh.attention(q, k, v, slopes=[0.0], q_offset=3, **call)[0]
    np.testing.assert_allclose(corner, [[0.25] * 4 + [0], [0.2] * 5])
    top = plsh.attention(q, k, v, slopes=[0.0], q_offset=0, **call)[0]
    np.testing.assert_allclose(top, [[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]])
    for offset, distance in ((3, [[3, 2, 1, 0], [4, 3, 2, 1, 0]]), (0, [[0], [1, 0]])):
        biased = plsh.attention(q, k, v, slopes=[0.5], q_offset=offset, **call)[0]
        for row, far in zip(biased, distance, strict=True):
            w = np.exp(-0.5 * np.array(far))
            np.testing.assert_allclose(row[: len(far)], w / w.sum())
            assert not np.any(row[len(far) :])


@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_queries_before_every_key_see_nothing(method):
    """U027: five queries, two keys, bottom-right: the first three rows are dead, under lsh too."""
    q, k, v = inputs(5, 2)
    got = attend(q, k, v, method, causal=True, q_offset=-3)
    assert not np.any(got.out[:, :, :3])
    assert np.all(got.lse[:, :, :3] == -np.inf)
    np.testing.assert_allclose(got.out[:, :, 3], np.repeat(v[:, :, 0], 2, axis=1), rtol=1e-12)
    for key in (0, 1):  # slope 0: row 4 mixes both
        assert np.all(np.abs(got.out[:, 3, 4] - v[:, 1, key]).max(axis=-1) > 0.01)


@METHOD
def test_a_lone_last_query_sees_the_whole_cache(method):
    """U108: one query, eight keys, causal, at the last position."""
    q, k, v = inputs(8)
    whole = attend(q, k, v, method, causal=True)
    last = attend(q[:, :, 7:], k, v, method, causal=True, q_offset=7)
    assert_same(last, rows(whole, slice(7, None)))
    first = attend(q[:, :, 7:], k, v, "exact", causal=True, q_offset=0)
    assert np.max(np.abs(first.out - last.out)) > 0.1


@METHOD
def test_cross_attention_has_one_definition_of_distance(method):
    """U110: 7 queries on 13 keys: at once, padded, packed, and step by step agree."""
    q, k, v = inputs(7, 13, batch=1)
    whole = attend(q, k, v, method, q_offset=2)
    steps = [attend(q[:, :, t : t + 1], k, v, method, q_offset=2 + t) for t in range(7)]
    assert_same(concat(steps), whole)

    pad = np.full((1, 4, 4, 8), np.nan)
    ids = np.array([[0] * 7 + [-1] * 4]), np.zeros((1, 13), int)
    padded = attend(np.concatenate([q, pad], axis=2), k, v, method, q_offset=2, segment_ids=ids)
    assert_same(rows(padded, slice(0, 7)), whole)

    other_k, other_v = (x[:, :, :5] for x in inputs(5, 5, batch=1, seed=9)[1:])
    ids = np.full((1, 7), 3), np.array([[3] * 13 + [4] * 5])
    packed = attend(
        q,
        np.concatenate([k, other_k], axis=2),
        np.concatenate([v, other_v], axis=2),
        method,
        q_offset=2,
        segment_ids=ids,
    )
    assert_same(packed, whole)


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (9, 3), (7, 1), (40, 8)])
@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_decoding_at_any_head_ratio(heads, kv_heads, method):
    """U111: groups that are not a power of two."""
    q, k, v = inputs(1, 20, heads=heads, kv_heads=kv_heads)
    slopes = [0.3 / (1 + h) for h in range(heads)]
    group = heads // kv_heads
    got = attend(q, k, v, method, slopes=slopes, q_offset=19)
    wide = (np.repeat(x, group, axis=1) for x in (k, v))
    assert_same(got, attend(q, *wide, method, slopes=slopes, q_offset=19), units=4)


def check_offsets_per_batch_row(method):
    """Rows at positions of their own equal separate calls."""
    q, k, v = inputs(9, 17, batch=3)
    q_at, k_at = (8, 30, 3), (0, 25, 10)
    got = attend(q, k, v, method, causal=True, q_offset=q_at, k_offset=k_at)
    for b in range(3):
        one = attend(
            *(x[b : b + 1] for x in (q, k, v)), method,
            causal=True, q_offset=q_at[b], k_offset=k_at[b],
        )  # fmt: skip
        testing.assert_identical(got.out[b : b + 1], one.out)
        testing.assert_identical(got.lse[b : b + 1], one.lse)


@METHOD
def test_offsets_per_batch_row_equal_separate_calls(method):
    check_offsets_per_batch_row(method)


@METHOD
def test_one_offset_per_row_may_be_an_array_of_any_integer_dtype(method):
    q, k, v = inputs(9)
    want = attend(q, k, v, method, q_offset=(3, 4), k_offset=(3, 4))
    for offsets in (np.array([3, 4], np.int16), np.array([3, 4], np.uint64), [3, 4]):
        got = attend(q, k, v, method, q_offset=offsets, k_offset=offsets)
        testing.assert_identical(got.out, want.out)

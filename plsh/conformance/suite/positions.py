"""Positions: causality, offsets, and calls in parts that equal the whole."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsh.backend import AttentionOutput
from plsh.conformance.suite.common import (
    METHODS,
    NAMES,
    assert_same,
    join,
    make,
    rows,
    wide,
)
from plsh.partition import PartitionSet
from plsh.reduction import merge

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
METHOD = pytest.mark.parametrize("method", NAMES)
DECAY = pytest.mark.parametrize("method", ["exact", "window"])

# --- causality and offsets ------------------------------------------------------------------------


@pytest.mark.requirement("ATT-12", "ATT-14", "CNV-1")
@METHOD
@pytest.mark.parametrize(
    ("lengths", "offsets"),
    [
        ((33, 33), (0, 0)),
        ((7, 40), (33, 0)),  # queries at the end of the keys
        ((7, 40), (0, 0)),  # at their beginning
        ((40, 7), (0, 33)),  # most queries before every key
        ((20, 20), (3, 11)),
        ((20, 20), (16, 3)),
        ((1, 40), (39, 0)),
        ((1, 40), (38, 0)),
    ],
    ids=str,
)
def test_causality_is_a_matter_of_positions(method, lengths, offsets, subject):
    problem = make(
        subject, *lengths, method=method, causal=True, q_offset=offsets[0], k_offset=offsets[1]
    )
    problem.check_output(subject)


@pytest.mark.requirement("ATT-12", "NUM-4")
@METHOD
@pytest.mark.parametrize("cut", [15, 16, 17, 20])
def test_later_keys_change_no_earlier_row(method, cut, subject):
    problem = make(subject, 40, method=method, causal=True)
    before = problem.output(subject)
    k, v = problem.k.copy(), problem.v.copy()
    k[:, :, cut:], v[:, :, cut:] = 50, 1e4
    after = problem.but(k=k, v=v).output(subject)
    assert_same(subject, problem.dtype, rows(after, slice(cut)), rows(before, slice(cut)))
    assert np.max(np.abs(after.out[:, :, cut:] - before.out[:, :, cut:])) > 1


@pytest.mark.requirement("ATT-14", "CNV-1", "NUM-2")
@DECAY
@CAUSAL
@pytest.mark.parametrize("shift", [1, 16, 1000, 2**29 + 1, 2**30 - 60, -17])
def test_a_common_shift_changes_no_decay(method, causal, shift, subject):
    problem = make(subject, 20, 40, method=method, causal=causal, q_offset=13)
    moved = problem.but(q_offset=13 + shift, k_offset=shift)
    assert_same(subject, problem.dtype, moved.output(subject), problem.output(subject))


@pytest.mark.requirement("ATT-14", "NUM-2", "CNV-1")
@pytest.mark.parametrize("method", ["lsh", "lsh-iid"])
@CAUSAL
@pytest.mark.parametrize("first", [1, 17, 1000, 2**24 + 1, 2**30 - 40])
def test_blocks_lie_at_absolute_positions(method, causal, first, subject):
    problem = make(
        subject, 20, 40, method=method, causal=causal, q_offset=first + 15, k_offset=first
    )
    problem.check_output(subject)
    here = problem.but(q_offset=15, k_offset=0).output(subject)
    assert np.max(np.abs(problem.output(subject).out[:, 0] - here.out[:, 0])) > 0.01


@pytest.mark.requirement("ATT-14", "MTH-6")
@pytest.mark.parametrize("method", [pytest.param("set", marks=pytest.mark.may_refuse)])
@CAUSAL
def test_partitions_that_move_with_the_tokens_give_the_same(method, causal, subject):
    problem = make(subject, 33, method=method, causal=causal)
    labels = problem.method.labels(0, 33)
    moved = problem.but(
        method=PartitionSet(labels + 1000, start=1000), q_offset=1000, k_offset=1000
    )
    assert_same(subject, problem.dtype, moved.output(subject), problem.output(subject))


@pytest.mark.requirement("ATT-14", "ATT-15")
@METHOD
@pytest.mark.may_refuse
def test_an_offset_per_batch_row_is_that_of_a_call_alone(method, subject):
    problem = make(
        subject,
        9,
        17,
        method=method,
        batch=3,
        causal=True,
        q_offset=(8, 30, 3),
        k_offset=(0, 25, 7),
    )
    together = problem.output(subject)
    alone = [problem.row(b).output(subject) for b in range(3)]
    expected = AttentionOutput(
        np.concatenate([x.out for x in alone]), np.concatenate([x.lse for x in alone])
    )
    assert_same(subject, problem.dtype, together, expected)


@pytest.mark.requirement("ATT-14", "ATT-15", "BCK-14")
@METHOD
@pytest.mark.may_refuse
def test_offsets_may_be_arrays(method, subject):
    problem = make(subject, 9, 17, method=method, causal=True, q_offset=30, k_offset=25)
    q, k, v = problem.arrays(subject)
    keywords = problem.keywords(subject)
    for q_offset, k_offset in (
        (np.array(30), np.array([25, 25])),
        (subject.array(np.array(30), "int32"), subject.array(np.array([25, 25]), "int32")),
        ([30, 30], 25),
    ):
        keywords.update(q_offset=q_offset, k_offset=k_offset)
        found = subject.attention(q, k, v, return_lse=True, **keywords)
        got = AttentionOutput(*map(subject.host, found))
        assert_same(subject, problem.dtype, got, problem.output(subject))


@pytest.mark.requirement("ATT-14")
@pytest.mark.parametrize("method", METHODS)
def test_positions_do_not_restart_at_a_segment(method, subject):
    ids = np.array([[0] * 11 + [1] * 22, [4] * 30 + [5] * 3], np.int32)
    make(subject, 33, method=method, causal=True, segment_ids=ids).check_output(subject)
    # Queries of the second document against its keys alone, which stand elsewhere in the row.
    pair = (np.array([[1] * 5] * 2, np.int32), ids)
    make(subject, 5, 33, method=method, segment_ids=pair, q_offset=20).check_output(subject)


@pytest.mark.requirement("ATT-14", "ATT-1")
@DECAY
def test_a_decay_is_the_same_on_both_sides(method, subject):
    problem = make(subject, 33, method=method)
    flipped = problem.but(**{x: getattr(problem, x)[:, :, ::-1] for x in ("q", "k", "v")})
    assert_same(
        subject,
        problem.dtype,
        rows(flipped.output(subject), slice(None, None, -1)),
        problem.output(subject),
    )


# --- negative positions ---------------------------------------------------------------------------


@pytest.mark.requirement("ATT-17", "ATT-20")
@METHOD
@CAUSAL
@pytest.mark.parametrize("padding", [1, 3, 16, 21])
def test_left_padding_changes_nothing(method, causal, padding, subject):
    problem = make(subject, 20, method=method, causal=causal)
    padded = _padded(problem, padding)
    got = padded.output(subject)
    assert_same(subject, problem.dtype, rows(got, slice(padding, None)), problem.output(subject))
    assert not np.any(got.out[:, :, :padding])
    assert np.all(got.lse[:, :, :padding] == -np.inf)


@pytest.mark.requirement("ATT-17", "ATT-20")
@pytest.mark.needs("gradients")
@METHOD
def test_left_padding_changes_no_gradient(method, subject):
    problem = make(subject, 20, method=method, causal=True)
    plain, padded = (p.gradients(subject) for p in (problem, _padded(problem, 5)))
    assert_same(
        subject,
        problem.dtype,
        (*(x[:, :, 5:] for x in padded[:3]), padded.slopes),
        tuple(plain),
    )
    assert not any(np.any(x[:, :, :5]) for x in padded[:3])


def _padded(problem, n):
    """Return the problem with n tokens of NaN before the others, below position 0."""

    def fill(x):
        return np.pad(x, [(0, 0), (0, 0), (n, 0), (0, 0)], constant_values=np.nan)

    return problem.but(
        **{name: fill(getattr(problem, name)) for name in ("q", "k", "v")},
        grad_out=np.pad(problem.grad_out, [(0, 0), (0, 0), (n, 0), (0, 0)], constant_values=1.0),
        grad_lse=np.pad(problem.grad_lse, [(0, 0), (0, 0), (n, 0)], constant_values=1.0),
        q_offset=-n,
        k_offset=-n,
        segment_ids=np.array([[-1] * n + [0] * problem.q.shape[2]] * 2, np.int32),
    )


@pytest.mark.requirement("ATT-17")
@METHOD
@pytest.mark.may_refuse
def test_rows_padded_by_different_lengths_equal_calls_alone(method, subject):
    pads, n = (5, 2), 24
    ids = np.where(np.arange(n) < np.array(pads)[:, None], -1, 0).astype(np.int32)
    at = tuple(-p for p in pads)
    problem = make(subject, n, method=method, q_offset=at, k_offset=at, segment_ids=ids)
    got = problem.output(subject)
    for b, p in enumerate(pads):
        tokens = slice(p, None)
        alone = problem.row(b).cut(tokens, tokens).but(segment_ids=None).output(subject)
        own = AttentionOutput(got.out[b : b + 1, :, tokens], got.lse[b : b + 1, :, tokens])
        assert_same(subject, problem.dtype, own, alone)


@pytest.mark.requirement("ATT-17")
@pytest.mark.parametrize("method", [pytest.param("set", marks=pytest.mark.may_refuse)])
def test_padding_may_lie_outside_the_range_of_a_partition_set(method, subject):
    problem = make(subject, 30, method=method, q_offset=100, k_offset=100)
    ids = np.array([[-1] * 4 + [0] * 20 + [-1] * 6] * 2, np.int32)
    narrow = PartitionSet(problem.method.labels(104, 124), start=104)
    got = problem.but(method=narrow, segment_ids=ids).output(subject)
    tokens = slice(4, 24)
    alone = problem.cut(tokens, tokens).output(subject)
    assert_same(subject, problem.dtype, rows(got, tokens), alone)


@pytest.mark.requirement("ATT-17")
@DECAY
@CAUSAL
def test_decays_take_any_position(method, causal, subject):
    make(subject, 20, 33, method=method, causal=causal, q_offset=-90, k_offset=-100).check_output(
        subject
    )


# --- parts equal the whole ------------------------------------------------------------------------


@pytest.mark.requirement("ATT-18")
@METHOD
def test_decoding_token_by_token_equals_prefill(method, subject):
    n = 200 if subject.full else 36
    problem = make(subject, n, method=method, causal=True)
    steps = [problem.cut(slice(t, t + 1), slice(0, t + 1)).output(subject) for t in range(n)]
    assert_same(subject, problem.dtype, join(steps), problem.output(subject))


@pytest.mark.requirement("ATT-18")
@METHOD
def test_a_step_of_decoding_needs_no_causal(method, subject):
    """The last query sees all of the cache; one earlier, or later, changes the distances."""
    problem = make(subject, 1, 40, method=method, q_offset=39)
    problem.check_output(subject)
    assert_same(
        subject,
        problem.dtype,
        problem.but(causal=True).output(subject),
        problem.output(subject),
    )


@pytest.mark.requirement("ATT-18")
@METHOD
@CAUSAL
def test_chunks_of_queries_equal_the_whole(method, causal, subject):
    cuts = (0, 31, 32, 90) if not subject.full else (0, 100, 101, 300)
    problem = make(subject, cuts[-1], method=method, causal=causal)
    chunks = [
        problem.cut(slice(a, b), slice(0, b if causal else None)).output(subject)
        for a, b in itertools.pairwise(cuts)
    ]
    assert_same(subject, problem.dtype, join(chunks), problem.output(subject))


@pytest.mark.requirement("ATT-18", "ATT-27")
@METHOD
@CAUSAL
def test_merged_chunks_of_keys_equal_the_whole(method, causal, subject):
    problem = make(subject, 61, method=method, causal=causal)
    parts = [problem.cut(keys=slice(a, b)) for a, b in itertools.pairwise((0, 7, 7, 40, 61))]
    outputs = [part.output(subject) for part in parts]
    whole = problem.output(subject)
    for order in (outputs, outputs[::-1]):
        assert_same(subject, problem.dtype, _merged(subject, problem.dtype, order), whole)


def _merged(subject, dtype, outputs):
    parts = [
        AttentionOutput(subject.array(x.out, dtype), subject.array(x.lse, wide(dtype)))
        for x in outputs
    ]
    return AttentionOutput(*map(subject.host, merge(parts)))


@pytest.mark.requirement("ATT-18")
@METHOD
@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 50])
def test_a_causal_call_on_a_prefix_equals_the_first_rows(method, n, subject):
    problem = make(subject, 70, method=method, causal=True)
    part = problem.cut(slice(n), slice(n))
    whole = problem.output(subject)
    assert_same(subject, problem.dtype, part.output(subject), rows(whole, slice(n)))


@pytest.mark.requirement("ATT-18")
@pytest.mark.parametrize("method", METHODS)
@CAUSAL
def test_any_shards_of_queries_and_keys_equal_the_whole(method, causal, subject):
    cuts = st.lists(st.integers(0, 50), max_size=2).map(lambda x: sorted({0, 50, *x}))

    @given(cuts, cuts, st.integers(0, 500))
    @settings(max_examples=60 if subject.full else 6)
    def check(of_queries, of_keys, first):
        problem = make(subject, 50, method=method, causal=causal, q_offset=first, k_offset=first)
        done = []
        for a, b in itertools.pairwise(of_queries):
            parts = [
                problem.cut(slice(a, b), slice(x, y)).output(subject)
                for x, y in itertools.pairwise(of_keys)
            ]
            done.append(_merged(subject, problem.dtype, parts))
        assert_same(subject, problem.dtype, join(done), problem.output(subject))

    check()

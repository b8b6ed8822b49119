"""Partitions: what their constructors take, and that every view of one agrees."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plsh
from plsh import Partition, PartitionSet, testing

LIMIT = 2**30


@st.composite
def partitions(draw, start=None, stop=None):
    """Any partition; the first block may begin before the range."""
    start = draw(st.integers(0, 30)) if start is None else start
    stop = draw(st.integers(start, start + 25)) if stop is None else stop
    if start == stop:
        return Partition(start, stop, [stop])
    first = draw(st.integers(max(0, start - 5), start))
    inner = draw(st.sets(st.integers(start + 1, stop - 1))) if stop - start > 1 else set()
    return Partition(start, stop, [first, *sorted(inner), stop])


# --- one partition --------------------------------------------------------------------------------


@pytest.mark.requirement("PAR-2", "PAR-1")
@settings(max_examples=25)
@given(partitions())
def test_every_view_of_a_partition_agrees(p):
    n = p.stop - p.start
    expected = [max(e for e in p.edges.tolist() if e <= i) for i in range(p.start, p.stop)]
    labels, sizes, mask = p.labels(), p.sizes(), p.mask()
    assert (p.edges.dtype, labels.dtype, sizes.dtype, mask.dtype) == (
        np.int32,
        np.int32,
        np.int64,
        np.bool_,
    )
    assert labels.tolist() == expected
    assert sizes.tolist() == [expected.count(e) for e in p.edges.tolist()[:-1]]
    assert len(p) == len(sizes) == len(set(expected))
    assert mask.shape == (n, n)
    assert mask.tolist() == [[a == b for b in expected] for a in expected]
    with pytest.raises(ValueError, match="read-only"):
        p.edges[:] = 0


@pytest.mark.requirement("PAR-2")
@settings(max_examples=25)
@given(st.data())
def test_an_intersection_is_the_coarsest_that_refines_both(data):
    p = data.draw(partitions())
    other = data.draw(partitions(p.start, p.stop))
    both = p.intersect(other)
    assert (both.start, both.stop) == (p.start, p.stop)
    assert (both.mask() == (p.mask() & other.mask())).all()
    assert both == other.intersect(p)
    assert p.intersect(p) == p
    with pytest.raises(ValueError, match="range"):
        p.intersect(Partition(p.start, p.stop + 1, [p.start, p.stop + 1]))


@pytest.mark.requirement("PAR-1")
@settings(max_examples=25)
@given(partitions(), partitions())
def test_partitions_are_equal_when_range_and_edges_are(p, other):
    again = Partition(p.start, p.stop, p.edges.tolist())
    assert again == p
    assert hash(again) == hash(p)
    assert pickle.loads(pickle.dumps(p)) == p
    same = (p.start, p.stop, p.edges.tolist()) == (other.start, other.stop, other.edges.tolist())
    assert (p == other) == same
    assert p != p.edges.tolist()
    with pytest.raises(AttributeError):
        p.start = 3


@pytest.mark.requirement("PAR-1", "CNV-4")
@pytest.mark.parametrize(
    ("start", "stop", "edges", "error"),
    [
        (-1, 4, [0, 4], ValueError),
        (5, 4, [4], ValueError),
        (0, LIMIT + 1, [0, LIMIT + 1], ValueError),
        (0, 4, [], ValueError),
        (0, 4, [0, 3], ValueError),
        (0, 4, [4], ValueError),
        (0, 4, [1, 4], ValueError),
        (2, 6, [0, 2, 6], ValueError),
        (2, 6, [0, 1, 6], ValueError),
        (0, 6, [0, 4, 3, 6], ValueError),
        (0, 6, [0, 4, 4, 6], ValueError),
        (0, 6, [0, 6, 6], ValueError),
        (2, 6, [-1, 6], ValueError),
        (3, 3, [0, 3], ValueError),
        (0, 4, [[0, 4]], ValueError),
        (0, 4, [0.0, 4.0], TypeError),
        (0, 1, [False, True], TypeError),
        (0.0, 4, [0, 4], TypeError),
        (0, "4", [0, 4], TypeError),
        (False, 4, [0, 4], TypeError),
        (0, True, [0, 1], TypeError),
    ],
)
def test_what_is_no_partition_is_refused(start, stop, edges, error):
    with pytest.raises(error):
        Partition(start, stop, edges)


@pytest.mark.requirement("PAR-1", "PAR-2")
def test_the_worked_example_of_a_partition():
    p = Partition(2, 7, [0, 4, 5, 7])
    assert (p.labels().tolist(), p.sizes().tolist()) == ([0, 0, 4, 5, 5], [2, 1, 2])
    end = Partition(LIMIT - 2, LIMIT, np.array([5, LIMIT - 1, LIMIT]))
    assert end.labels().tolist() == [5, LIMIT - 1]
    assert (len(Partition(9, 9, [9])), Partition(9, 9, [9]).mask().shape) == (0, (0, 0))


# --- sets -----------------------------------------------------------------------------------------


@st.composite
def tables(draw):
    """Labels (heads, s, n) and their start, row by row from partitions of one range."""
    start = draw(st.integers(0, 20))
    stop = draw(st.integers(start, start + 12))
    heads, samples = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = [[draw(partitions(start, stop)) for _ in range(samples)] for _ in range(heads)]
    labels = np.array([[p.labels() for p in row] for row in rows])
    return labels, start, rows


@pytest.mark.requirement("PAR-3", "PAR-4", "PAR-5")
@settings(max_examples=25)
@given(tables())
def test_every_view_of_a_set_agrees_with_its_partitions(drawn):
    labels, start, rows = drawn
    heads, samples, n = labels.shape
    chosen = PartitionSet(labels, start)
    assert (chosen.heads, chosen.samples, chosen.start, chosen.stop) == (
        heads,
        samples,
        start,
        start + n,
    )
    assert chosen.labels().dtype == np.int32
    assert chosen.labels().tolist() == labels.tolist()
    for first in range(start, start + n + 1):
        for last in range(first, start + n + 1):
            part = chosen.labels(first, last)
            assert part.shape == (heads, samples, last - first)
            assert part.tolist() == labels[..., first - start : last - start].tolist()
    assert chosen.labels(stop=start).shape == (heads, samples, 0)
    bandwidth = chosen.bandwidth()
    assert (bandwidth.dtype, bandwidth.shape) == (np.int64, (heads,))
    for h, row in enumerate(rows):
        assert [chosen[h, r] for r in range(samples)] == row
        assert bandwidth[h] == max((p.sizes().max(initial=1) - 1 for p in row), default=0)
        mean = chosen.mean_mask(h)
        assert mean.dtype == np.float64
        assert mean.tolist() == (sum(p.mask().astype(float) for p in row) / samples).tolist()


@pytest.mark.requirement("PAR-4")
def test_ranges_outside_a_set_are_refused_and_it_does_not_iterate():
    chosen = plsh.RandomBinning(3.0).sample(2, 8, start=10)
    for first, last in ((9, 12), (10, 19), (14, 12), (0, 0), (None, 9), (19, None)):
        with pytest.raises(ValueError, match="start and stop"):
            chosen.labels(first, last)
    with pytest.raises(TypeError):
        iter(chosen)
    with pytest.raises(TypeError):
        list(chosen)
    for index in ((1, 0), (0, 2)):
        with pytest.raises(IndexError):
            chosen[index]
    with pytest.raises(TypeError):
        chosen.labels(True, 12)


@pytest.mark.requirement("PAR-3")
@settings(max_examples=15)
@given(tables())
def test_sets_are_immutable_values(drawn):
    labels, start, _ = drawn
    chosen = PartitionSet(labels, start)
    same = PartitionSet(labels.astype(np.int16), start)
    assert chosen == same
    assert hash(chosen) == hash(same)
    assert pickle.loads(pickle.dumps(chosen)) == chosen
    if start or labels.shape[-1]:
        later = PartitionSet(np.concatenate([labels, labels[:, :1]], axis=1), start)
        assert chosen != later
    before = chosen.labels().tolist()
    labels[...] = 0
    assert chosen.labels().tolist() == before
    with pytest.raises(AttributeError):
        chosen.start = 3
    with pytest.raises(ValueError, match="read-only"):
        chosen.labels()[...] = 0
    empty = labels[..., :0]
    assert PartitionSet(empty, 3) == PartitionSet(empty, 3) != PartitionSet(empty, 4)


@pytest.mark.requirement("PAR-3", "CNV-4")
@pytest.mark.parametrize(
    ("labels", "start", "error"),
    [
        ([[[0, 0, 1]]], 0, ValueError),
        ([[[0, 1, 0]]], 0, ValueError),
        ([[[0, 2, 2]]], 0, ValueError),
        ([[[1, 1]]], 0, ValueError),
        ([[[-1, 1]]], 0, ValueError),
        ([[[0, 6]]], 4, ValueError),
        ([[[4, 4, 5]]], 4, ValueError),
        ([[0, 0]], 0, ValueError),
        ([[]], 0, ValueError),
        (np.zeros((1, 0, 3), int), 0, ValueError),
        ([[[0, 0]]], -1, ValueError),
        ([[[0, 0]]], LIMIT - 1, ValueError),
        ([[[0.0, 0.0]]], 0, TypeError),
        ([[[False, True]]], 0, TypeError),
        ([[["0"]]], 0, TypeError),
        ([[[0, 0]]], 0.0, TypeError),
        ([[[0, 0]]], True, TypeError),
    ],
)
def test_what_is_no_set_of_partitions_is_refused(labels, start, error):
    with pytest.raises(error):
        PartitionSet(labels, start)


@pytest.mark.requirement("PAR-3", "PAR-4", "PAR-5")
def test_the_worked_example_of_a_set():
    chosen = PartitionSet([[[0, 0, 2, 2], [0, 1, 1, 3]]])
    assert chosen.bandwidth().tolist() == [1]
    assert [chosen[0, r].edges.tolist() for r in (0, 1)] == [[0, 2, 4], [0, 1, 3, 4]]
    assert chosen.mean_mask(0).tolist() == [
        [1.0, 0.5, 0.0, 0.0],
        [0.5, 1.0, 0.5, 0.0],
        [0.0, 0.5, 1.0, 0.5],
        [0.0, 0.0, 0.5, 1.0],
    ]


@pytest.mark.requirement("PAR-5")
def test_bandwidth_is_that_of_the_range():
    """A block that begins before the range counts from the range's first position."""
    chosen = PartitionSet([[[2, 2, 2, 13]], [[10, 11, 12, 13]]], 10)
    assert chosen.bandwidth().tolist() == [2, 0]
    assert PartitionSet(np.zeros((2, 3, 0), int), 7).bandwidth().tolist() == [0, 0]


@pytest.mark.requirement("PAR-6", "PAR-5", "CNV-7")
def test_a_set_is_rebuilt_from_its_leaves(subject):
    """From labels of any kind, with the bandwidth that was given."""
    made = plsh.RandomBinning((3.0, 9.0)).sample(4, 30, start=5, seed=1)
    range_ = made.start, made.stop, made.samples
    again = PartitionSet.unchecked(made.labels(), *range_)
    assert again == made
    assert again.bandwidth().tolist() == made.bandwidth().tolist()
    labels = subject.array(made.labels(), "int32")
    given_ = PartitionSet.unchecked(labels, *range_, bandwidth=(29, 29))
    assert given_.bandwidth().tolist() == [29, 29]
    assert (given_.heads, given_.samples, given_.start, given_.stop) == (2, 4, 5, 35)
    part = given_.labels(7, 20)
    assert type(part) is type(labels)
    assert subject.host(part).tolist() == made.labels(7, 20).tolist()


@pytest.mark.requirement("PAR-6", "MTH-6", "BCK-13")
@pytest.mark.needs("method:lsh")
@pytest.mark.may_refuse
def test_a_bandwidth_may_be_larger_than_the_largest_block(subject):
    made = plsh.RandomBinning((3.0, 9.0)).sample(4, 60, seed=1)
    loose = PartitionSet.unchecked(made.labels(), 0, 60, 4, bandwidth=(59, 2**20))
    dtype = subject.capabilities.dtypes[-1]
    rng = np.random.default_rng(0)
    q, k, v = (subject.array(rng.normal(size=(1, 2, 60, 8)), dtype) for _ in range(3))
    out = [subject.attention(q, k, v, method=chosen) for chosen in (made, loose)]
    testing.assert_equal_to_rounding(*out)

"""Partition and PartitionSet: invariants, products of masks, bandwidths, values."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plsh
from plsh import Partition, PartitionSet
from plsh.partition import extend_labels


@st.composite
def partitions(draw, start=None, stop=None) -> Partition:
    """Any partition; the first block may begin before the range."""
    start = draw(st.integers(0, 30)) if start is None else start
    stop = draw(st.integers(start, start + 25)) if stop is None else stop
    if start == stop:
        return Partition(start, stop, [stop])
    first = draw(st.integers(max(0, start - 5), start))
    inner = draw(st.sets(st.integers(start + 1, stop - 1))) if stop - start > 1 else set()
    return Partition(start, stop, [first, *sorted(inner), stop])


# --- one partition --------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(partitions())
def test_labels_sizes_edges_and_mask_describe_one_partition(p):
    labels, sizes = p.labels(), p.sizes()
    n = p.stop - p.start
    assert labels.dtype == p.edges.dtype == np.int32
    assert sizes.dtype == np.int64
    assert labels.shape == (n,)
    assert sizes.sum() == n
    assert (sizes >= 1).all()
    assert len(p) == sizes.size == np.unique(labels).size
    expected = [max(e for e in p.edges if e <= i) for i in range(p.start, p.stop)]
    assert labels.tolist() == expected
    mask = p.mask()
    assert mask.dtype == np.bool_
    assert (mask == [[a == b for b in expected] for a in expected]).all()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mask_of_an_intersection_is_the_product_of_the_masks(data):
    p = data.draw(partitions())
    other = data.draw(partitions(p.start, p.stop))
    both = p.intersect(other)
    assert (both.mask() == p.mask() & other.mask()).all()
    assert both == other.intersect(p)
    assert both.intersect(p) == both
    assert p.intersect(p) == p
    # The first block begins where the later of the two does.
    assert both.edges[0] == max(p.edges[0], other.edges[0])


@pytest.mark.parametrize(
    ("start", "stop", "edges", "error", "message"),
    [
        (-1, 4, [0, 4], ValueError, "0 <= start <= stop"),
        (5, 4, [4], ValueError, "0 <= start <= stop"),
        (0, (1 << 30) + 1, [0, (1 << 30) + 1], ValueError, "0 <= start <= stop"),
        (0, 4, [], ValueError, "edges must end with stop = 4"),
        (0, 4, [0, 3], ValueError, "edges must end with stop = 4"),
        (0, 4, [4], ValueError, "edges must begin at or before start = 0"),
        (0, 4, [1, 4], ValueError, "edges must begin at or before start = 0"),
        (2, 6, [0, 2, 6], ValueError, "only the first edge may be <= start = 2"),
        (2, 6, [0, 1, 6], ValueError, "only the first edge may be <= start = 2"),
        (0, 6, [0, 4, 3, 6], ValueError, "edges must increase"),
        (0, 6, [0, 4, 4, 6], ValueError, "edges must increase"),
        (0, 6, [0, 6, 6], ValueError, "edges must increase"),
        (2, 6, [-1, 6], ValueError, "edges must lie in"),
        (3, 3, [0, 3], ValueError, "an empty range has edges"),
        (0, 4, [[0, 4]], ValueError, "edges must have 1 axes"),
        (0, 4, [0.0, 4.0], TypeError, "edges must be integers"),
        (0, 4, [False, True], TypeError, "edges must be integers"),
        (0.0, 4, [0, 4], TypeError, "integer"),
        (0, "4", [0, 4], TypeError, "integer"),
    ],
)
def test_broken_partitions_are_refused(start, stop, edges, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Partition(start, stop, edges)


def test_an_empty_range_has_no_block():
    p = Partition(7, 7, [7])
    assert p.labels().shape == p.sizes().shape == (0,)
    assert p.mask().shape == (0, 0)
    assert len(p) == 0
    assert p.intersect(p) == p


def test_a_first_block_may_begin_before_the_range():
    p = Partition(5, 9, [2, 7, 9])
    assert p.labels().tolist() == [2, 2, 7, 7]
    assert p.sizes().tolist() == [2, 2]


def test_partitions_of_different_ranges_do_not_intersect():
    with pytest.raises(ValueError, match="same range"):
        Partition(0, 4, [0, 4]).intersect(Partition(1, 4, [1, 4]))


@settings(max_examples=50, deadline=None)
@given(partitions())
def test_partitions_are_values(p):
    printed = eval(repr(p), {"Partition": Partition}) if p.edges.size <= 12 else p
    for other in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p), printed):
        assert other == p
        assert hash(other) == hash(p)
        assert not other.edges.flags.writeable
    assert p != (p.start, p.stop)


def test_partitions_that_differ_are_unequal():
    p = Partition(2, 6, [1, 4, 6])
    others = [Partition(2, 6, [2, 4, 6]), Partition(2, 6, [1, 6]), Partition(1, 6, [1, 4, 6])]
    assert all(p != other for other in others)
    assert len({p, *others, Partition(2, 6, np.array([1, 4, 6]))}) == 4


def test_partition_is_immutable_and_keeps_no_view_of_its_argument():
    edges = np.array([0, 3, 5], dtype=np.int32)
    p = Partition(0, 5, edges)
    edges[1] = 4
    assert p.edges.tolist() == [0, 3, 5]
    with pytest.raises(ValueError, match="read-only"):
        p.edges[1] = 2
    with pytest.raises(AttributeError):
        p.start = 1


def test_a_long_repr_is_shortened():
    assert repr(Partition(0, 4, [0, 1, 4])) == "Partition(0, 4, [0, 1, 4])"
    assert len(repr(Partition(0, 5000, np.arange(5001)))) < 100


# --- a set ----------------------------------------------------------------------------------------


def drawn(heads=3, samples=5, n=60, start=0, seed=0) -> PartitionSet:
    sigma = np.linspace(2.0, 15.0, heads)
    return plsh.RandomBinning(sigma).sample(samples, n, start=start, seed=seed)


@pytest.mark.parametrize("start", [0, 1000])
def test_items_rows_masks_and_bandwidths_agree(start):
    ps = drawn(start=start)
    assert (ps.heads, ps.samples, ps.start, ps.stop) == (3, 5, start, start + 60)
    labels = ps.labels()
    assert labels.dtype == np.int32
    assert labels.shape == (3, 5, 60)
    for h in range(3):
        masks = []
        for r in range(5):
            assert (ps[h, r].labels() == labels[h, r]).all()
            assert (ps[h, r].start, ps[h, r].stop) == (start, start + 60)
            masks.append(ps[h, r].mask())
        mean = ps.mean_mask(h)
        assert mean.dtype == np.float64
        np.testing.assert_allclose(mean, np.mean(masks, axis=0), atol=1e-15)
        assert (np.diag(mean) == 1.0).all()
        i, j = np.nonzero(mean)
        assert (
            ps.bandwidth()[h]
            == np.abs(i - j).max()
            == max(ps[h, r].sizes().max() for r in range(5)) - 1
        )
    assert ps.bandwidth().dtype == np.int64
    assert ps.bandwidth().shape == (3,)


def test_first_block_before_the_range_counts_inside_it_alone():
    ps = PartitionSet([[[2, 2, 7, 7]]], start=5)
    assert ps.bandwidth().tolist() == [1]
    assert ps[0, 0] == Partition(5, 9, [2, 7, 9])


def test_labels_of_a_range_are_a_slice():
    ps = drawn(start=100)
    assert (ps.labels(110, 130) == ps.labels()[..., 10:30]).all()
    assert (ps.labels(stop=103) == ps.labels()[..., :3]).all()
    assert (ps.labels(157) == ps.labels()[..., 57:]).all()
    assert ps.labels(120, 120).shape == (3, 5, 0)
    assert ps.labels(np.int64(110), np.int64(111)).shape == (3, 5, 1)


@pytest.mark.parametrize("limits", [(99, 120), (120, 161), (130, 120), (None, 161), (99, None)])
def test_labels_outside_the_range_are_refused(limits):
    with pytest.raises(ValueError, match=r"start and stop must lie inside \[100, 160\)"):
        drawn(start=100).labels(*limits)


def test_labels_at_extends_the_ends():
    ps = drawn(start=100)
    labels, wider = ps.labels(), ps.labels_at(96, 165)
    assert (wider[..., 4:64] == labels).all()
    assert (wider[..., :4] == labels[..., :1]).all()
    assert (wider[..., 64:] == labels[..., -1:]).all()
    assert (ps.labels_at(101, 104) == labels[..., 1:4]).all()
    assert (ps.labels_at(-3, 2) == labels[..., :1]).all()
    assert ps.labels_at(-3, 2).shape == (3, 5, 5)
    table = torch.tensor(labels)
    assert torch.equal(extend_labels(table, 100, 96, 165), torch.tensor(wider))


@pytest.mark.parametrize(
    ("labels", "start", "error", "message"),
    [
        ([[0, 1]], 0, ValueError, "labels must have 3 axes"),
        ([[[0.0, 1.0]]], 0, TypeError, "labels must be integers"),
        ([[[False, True]]], 0, TypeError, "labels must be integers"),
        ([[[-1, 0]]], 0, ValueError, "labels must lie in"),
        ([[[1, 1]]], 0, ValueError, "labels must not exceed their positions"),
        ([[[0, 2, 2]]], 0, ValueError, "labels must not exceed their positions"),
        ([[[0, 1, 0]]], 0, ValueError, "labels must equal the position wherever they change"),
        ([[[0, 0, 1]]], 0, ValueError, "labels must equal the position wherever they change"),
        ([[[4, 5, 5]]], 3, ValueError, "labels must not exceed their positions"),
        (np.zeros((2, 0, 3), int), 0, ValueError, "labels must hold at least one sample"),
        ([[[0]]], -1, ValueError, "0 <= start"),
        ([[[0, 0]]], (1 << 30) - 1, ValueError, "0 <= start"),
        ([[[0]]], 0.0, TypeError, "integer"),
    ],
)
def test_broken_sets_are_refused(labels, start, error, message):
    with pytest.raises(error, match=re.escape(message)):
        PartitionSet(labels, start)


def test_every_draw_passes_the_checked_constructor():
    ps = drawn(start=37)
    assert PartitionSet(ps.labels(), 37) == ps
    assert PartitionSet(ps.labels().tolist(), np.int64(37)) == ps
    assert PartitionSet(ps.labels().astype(np.uint16), 37).labels().dtype == np.int32


def test_an_empty_range_and_no_heads():
    ps = drawn(n=0, start=9)
    assert ps.labels().shape == (3, 5, 0)
    assert ps[2, 4] == Partition(9, 9, [9])
    assert ps.bandwidth().tolist() == [0, 0, 0]
    assert ps.mean_mask(0).shape == (0, 0)
    none = PartitionSet(np.zeros((0, 2, 6), dtype=int))
    assert none.heads == 0
    assert none.bandwidth().shape == (0,)


def test_sets_are_values():
    ps = drawn(start=20)
    for other in (pickle.loads(pickle.dumps(ps)), copy.deepcopy(ps), drawn(start=20)):
        assert other == ps
        assert hash(other) == hash(ps)
        assert (other.bandwidth() == ps.bandwidth()).all()
    assert ps != drawn(start=20, seed=1)
    assert ps != drawn(start=21)
    assert ps != drawn(start=20, n=59)
    assert ps != "x"
    assert repr(ps) == "<PartitionSet: 3 heads, 5 samples, positions [20, 80)>"


def test_sets_are_immutable_also_after_a_pickle():
    given_ = np.array([[[0, 0, 2]]])
    ps = PartitionSet(given_)
    given_[0, 0, 1] = 1
    assert ps.labels().tolist() == [[[0, 0, 2]]]
    for one in (ps, drawn(), pickle.loads(pickle.dumps(ps)), copy.deepcopy(drawn())):
        with pytest.raises(ValueError, match="read-only"):
            one.labels()[0, 0, 0] = 1


def test_sets_are_indexed_by_head_and_sample_and_do_not_iterate():
    ps = drawn()
    assert ps[-1, -1] == ps[2, 4]
    assert ps[np.int64(1), 0] == ps[1, 0]
    for index in ((3, 0), (0, 5)):
        with pytest.raises(IndexError):
            ps[index]
    with pytest.raises(TypeError, match=r"\[head, sample\]"):
        iter(ps)


def test_unchecked_constructor_takes_any_array_and_a_bound():
    """For frameworks that rebuild a set from its leaves."""
    labels = torch.tensor([[[0, 0, 2, 2]]], dtype=torch.int32)
    ps = PartitionSet.unchecked(labels, 0, 4, 1, (16,))
    assert torch.equal(ps.labels(1, 3), labels[..., 1:3])
    assert torch.equal(
        ps.labels_at(-1, 6), torch.tensor([[[0, 0, 0, 2, 2, 2, 2]]], dtype=torch.int32)
    )
    assert ps.bandwidth().tolist() == [16]
    assert (ps.heads, ps.samples) == (1, 1)
    leaf = object()
    assert PartitionSet.unchecked(leaf, 0, 4, 3, (1,)).samples == 3
    without = PartitionSet.unchecked(labels.numpy(), 0, 4, 1)
    assert without.bandwidth().tolist() == [1]


def test_one_head_in_a_set_serves_all():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 3, 20, 4)) for _ in range(3))
    one = plsh.RandomBinning(6.0).sample(4, 20)
    three = PartitionSet(np.repeat(one.labels(), 3, axis=0))
    assert (plsh.attention(q, k, v, method=one) == plsh.attention(q, k, v, method=three)).all()
    with pytest.raises(ValueError, match="1 or 3 heads, got 2"):
        plsh.attention(q, k, v, method=PartitionSet(np.repeat(one.labels(), 2, axis=0)))

"""The tile schedule: every pair of positive weight once, chunks that batch, the pivot lemma."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plsh
from plsh.tiles import Chunk, Reach, Schedule, decay_reach, gap, step_reach

UNLIMITED = (1 << 31) - 1

GRIDS = st.fixed_dictionaries(
    {
        "first": st.integers(-40, 60),
        "tiles": st.integers(1, 6),
        "rows": st.sampled_from([1, 2, 4, 8]),
        "columns": st.integers(1, 12),
        "keys": st.tuples(st.integers(-10, 40), st.integers(0, 70)),
        "causal": st.booleans(),
        "most": st.integers(1, 2000),
    }
)


def firsts(grid):
    return grid["first"] + grid["rows"] * np.arange(grid["tiles"])


def key_range(grid):
    start, length = grid["keys"]
    return range(start, start + length)


def visits(schedule, most):
    """Return, for each tile, the positions of the keys that its chunk visits, in memory order."""
    found = {}
    for chunk in schedule.chunks(most):
        for tile in range(chunk.tile, chunk.tile + chunk.tiles):
            assert tile not in found
            found[tile] = [
                int(schedule.first[tile]) + begin + column
                for begin, blocks, columns in chunk.sides
                for column in range(blocks * columns)
            ]
    return found


def check_schedule(grid, reach, weight):
    """Every pair of positive weight is visited once; what is visited exceeds the reach by little.

    `weight(i, j)` is that of a query at i and a key at j.
    """
    first, keys = firsts(grid), key_range(grid)
    rows, columns = grid["rows"], grid["columns"]
    schedule = Schedule.of(first, rows, columns, reach)
    found = visits(schedule, grid["most"])
    assert sorted(found) == list(range(len(first)))
    for tile, visited in found.items():
        assert len(set(visited)) == len(visited)
        begin = int(first[tile])
        needed = {
            j
            for i in range(begin, begin + rows)
            for j in keys
            if weight(i, j) and not (grid["causal"] and j > i)
        }
        assert needed <= set(visited)
        before = max((begin - j for j in needed if j < begin), default=0)
        after = max((j - begin - rows + 1 for j in needed), default=0)
        assert reach.before[tile] >= before
        assert reach.after[tile] >= max(after, 0)
        assert schedule.left[tile] == -(-reach.before[tile] // columns)
        assert schedule.right[tile] == -(-reach.after[tile] // columns)


@given(GRIDS, st.one_of(st.integers(0, 50), st.just(UNLIMITED)))
def test_a_width_is_covered_once(grid, width):
    reach = decay_reach(firsts(grid), grid["rows"], width, grid["causal"], key_range(grid))
    check_schedule(grid, reach, lambda i, j: abs(i - j) <= width)


@st.composite
def partitions(draw, low=-40, high=120):
    """Labels ``(s, high - low)``: the first position of each position's block, and their start."""
    labels = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = draw(st.lists(st.integers(low, high - 1), max_size=12))
        begins = np.unique([low, *cuts])
        at = np.arange(low, high)
        labels.append(begins[np.searchsorted(begins, at, side="right") - 1])
    return np.array(labels), low


@given(GRIDS, partitions())
def test_blocks_are_covered_once(grid, drawn):
    labels, start = drawn
    first, rows = firsts(grid), grid["rows"]
    begins = labels[:, first - start].min(axis=0)
    last = labels[:, first + rows - 1 - start]  # (s, tiles)
    ends = np.array(
        [
            max(
                start + np.flatnonzero(row == label)[-1] + 1
                for row, label in zip(labels, own, strict=True)
            )
            for own in last.T
        ]
    )
    reach = step_reach(first, rows, begins, ends, grid["causal"], key_range(grid))
    check_schedule(grid, reach, lambda i, j: np.any(labels[:, i - start] == labels[:, j - start]))


@given(GRIDS, st.integers(0, 50))
def test_reach_goes_to_the_farthest_key_and_no_farther(grid, width):
    first, rows, keys = firsts(grid), grid["rows"], key_range(grid)
    reach = decay_reach(first, rows, width, grid["causal"], keys)
    assert reach.before.dtype == reach.after.dtype == np.int64
    for tile, begin in enumerate(first.tolist()):
        end = begin + rows
        before = [begin - j for j in keys if begin - width <= j < begin]
        after = [j - end + 1 for j in keys if end <= j < end + width and not grid["causal"]]
        for got, needed in ((reach.before[tile], before), (reach.after[tile], after)):
            assert got == max(needed) if needed else 0 <= got <= width


@given(GRIDS)
def test_a_gap_is_the_positions_between_tiles_and_keys(grid):
    """Moved by it, keys that lie on one side touch the tiles."""
    first, keys = firsts(grid), key_range(grid)
    own, found = range(int(first[0]), int(first[-1]) + grid["rows"]), gap(first, grid["rows"], keys)
    if keys.stop <= own.start:
        assert keys.stop + found == own.start
    elif keys.start >= own.stop:
        assert keys.start + found == own.stop
    else:
        assert found == 0


@given(GRIDS, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=6, max_size=6))
def test_chunks_cover_all_tiles_once_within_their_bound(grid, wanted):
    first, most = firsts(grid), grid["most"]
    before, after = np.array(wanted[: first.size]).T
    schedule = Schedule.of(first, grid["rows"], grid["columns"], Reach(before, after))
    chunks = list(schedule.chunks(most))
    assert [t for c in chunks for t in range(c.tile, c.tile + c.tiles)] == list(range(first.size))
    for chunk in chunks:
        own = slice(chunk.tile, chunk.tile + chunk.tiles)
        assert chunk.left == schedule.left[own].max()
        assert chunk.right == schedule.right[own].max()
        assert chunk.tiles == 1 or chunk.tiles * chunk.pairs <= most
    for chunk, after_it in itertools.pairwise(chunks):  # none could take another tile
        both = Chunk(
            chunk.tile, chunk.tiles + 1, chunk.rows, chunk.columns,
            max(chunk.left, int(schedule.left[after_it.tile])),
            max(chunk.right, int(schedule.right[after_it.tile])),
        )  # fmt: skip
        assert both.tiles * both.pairs > most
    for tile in range(first.size):
        wide = int(schedule.left[tile]), int(schedule.right[tile])
        assert schedule.one(tile) == (tile, 1, grid["rows"], grid["columns"], *wide)
    widest = schedule.widest
    assert (widest.tiles, widest.left, widest.right) == (
        1, schedule.left.max(), schedule.right.max()
    )  # fmt: skip


@pytest.mark.parametrize(("left", "right"), [(0, 0), (3, 0), (0, 2), (2, 3)])
def test_split_lays_out_left_diagonal_right(left, right):
    """Blocks from far to near, the diagonal, from near to far, each (rows, columns); views."""
    chunk = Chunk(tile=5, tiles=2, rows=4, columns=3, left=left, right=right)
    assert chunk.pairs == 4 * (3 * (left + right) + 4)
    x = np.arange(2 * chunk.pairs).reshape(2, chunk.pairs)
    parts = chunk.split(x)
    assert [p.shape for p in parts] == [(2, left, 4, 3), (2, 1, 4, 4), (2, right, 4, 3)]
    in_order = np.concatenate([p.reshape(2, -1) for p in parts], axis=1)
    np.testing.assert_array_equal(in_order, x)
    for part in parts:
        part[...] = -1
    assert (x == -1).all()
    positions = [
        begin + column
        for begin, blocks, columns in chunk.sides
        for column in range(blocks * columns)
    ]
    assert positions == list(range(-3 * left, 4 + 3 * right))


@given(partitions(0, 60), st.integers(0, 59))
def test_pivot_lemma(drawn, pivot):
    """For j <= p <= i the count is a product of 0/1 matrices, in ends and in labels."""
    labels, _ = drawn
    at = np.arange(60)
    i, j = at[at >= pivot], at[at <= pivot]
    count = (labels[:, i, None] == labels[:, None, j]).sum(axis=0)
    begin = labels[:, pivot]
    end = np.array([np.flatnonzero(row == b)[-1] + 1 for row, b in zip(labels, begin, strict=True)])
    far = (j >= begin[:, None]).astype(int)  # (s, keys)
    near = (i < end[:, None]).astype(int)
    np.testing.assert_array_equal(near.T @ far, count)
    by_label = (labels[:, i] <= pivot).astype(int)  # i's block begins at or before p
    np.testing.assert_array_equal(by_label.T @ far, count)


def test_pivot_lemma_holds_for_drawn_blocks():
    """The labels of every family, in the form in which the kernels use them."""
    families = (
        plsh.RandomBinning(9.0), plsh.PowerLawBinning(2.0, 0.2), plsh.IndependentCuts(7.0),
        plsh.FixedBlocks(5.5),
    )  # fmt: skip
    for family in families:
        labels = family.sample(7, 200, seed=3).labels()[0]
        for pivot in (0, 1, 63, 64, 128, 199):
            near = (labels[:, pivot:] <= pivot).astype(int)
            far = (np.arange(pivot + 1) >= labels[:, pivot, None]).astype(int)
            count = (labels[:, pivot:, None] == labels[:, None, : pivot + 1]).sum(axis=0)
            np.testing.assert_array_equal(near.T @ far, count)

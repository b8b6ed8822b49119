"""The tile schedule of a single-pass band kernel: which keys each tile of queries must visit.

Neutral: integers of the host only, for any backend. A tile holds `rows` consecutive queries. The
keys it visits are its diagonal, the keys at the tile's own positions, and blocks of `columns` keys
before it and (unless causal) after it, as many as its weight reaches.

The pivot lemma makes counts cheap there: for ``j <= p <= i`` the number of partitions in which i
and j share a block is ``sum_r [i < end_r(p)] * [j >= start_r(p)]``, a product of 0/1 matrices of
inner size s. A tile and the keys before it have one pivot, the tile's first position; a tile and
the keys after it have another, its last. In terms of labels: i is in p's block or an earlier one
iff ``label(i) <= p``, and p's block begins at ``label(p)``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Chunk", "Reach", "Schedule", "decay_reach", "gap", "step_reach"]

Integers = npt.NDArray[np.int64]


class Reach(NamedTuple):
    """How many keys each tile reaches before its first and after its last position.

    Both ``(tiles,)`` int64, >= 0, clipped to the keys that exist.
    """

    before: Integers
    after: Integers


def gap(first: Integers, rows: int, keys: range) -> int:
    """Return how many positions lie between tiles and keys that are all on one side of them.

    Positive if the keys are before, negative if they are after, 0 if they touch or overlap. Moved
    by that much the keys touch the tiles, so that a kernel need not visit the positions between.
    """
    before, after = int(first[0]) - keys.stop, keys.start - int(first[-1]) - rows
    return max(before, 0) - max(after, 0)


def decay_reach(first: Integers, rows: int, width: int, causal: bool, keys: range) -> Reach:
    """Return the reach of tiles that begin at positions `first`, under a width in tokens.

    `keys` is the range of positions that hold a key.
    """
    return _clip(first, rows, first - width, first + rows + width, causal, keys)


def step_reach(
    first: Integers,
    rows: int,
    begins: npt.NDArray[Any],
    ends: npt.NDArray[Any],
    causal: bool,
    keys: range,
) -> Reach:
    """Return the reach of tiles that begin at positions `first`, under partitions.

    `begins` ``(tiles,)`` holds where the longest block at each tile's first position begins, `ends`
    where the longest block at its last position ends (unused if causal).
    """
    return _clip(first, rows, begins, ends, causal, keys)


def _clip(first: Integers, rows: int, low: Any, high: Any, causal: bool, keys: range) -> Reach:
    # A tile before (after) all keys has none before (after) it.
    before = np.where(first > keys.start, first - np.maximum(low, keys.start), 0)
    if causal:
        return Reach(np.maximum(before, 0), np.zeros_like(first))
    last = first + rows
    after = np.where(last < keys.stop, np.minimum(high, keys.stop) - last, 0)
    return Reach(np.maximum(before, 0), np.maximum(after, 0))


class Chunk(NamedTuple):
    """Neighbouring tiles that visit the same number of blocks, so that they batch.

    The pairs of one tile lie in one row of memory: the blocks before it from far to near, the
    diagonal, the blocks after it from near to far, each block a matrix ``(rows, columns)``.
    """

    tile: int  # index of the first
    tiles: int
    rows: int
    columns: int
    left: int
    right: int

    @property
    def pairs(self) -> int:
        """Pairs of one tile."""
        return self.rows * (self.columns * (self.left + self.right) + self.rows)

    @property
    def sides(self) -> tuple[tuple[int, int, int], ...]:
        """For left, diagonal and right: first key from the tile's first, blocks, columns."""
        return (
            (-self.left * self.columns, self.left, self.columns),
            (0, 1, self.rows),
            (self.rows, self.right, self.columns),
        )

    def split(self, x: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """View ``(…, pairs)`` as left, diagonal and right blocks ``(…, blocks, rows, columns)``."""
        views, at = [], 0
        for _, blocks, columns in self.sides:
            size = blocks * self.rows * columns
            part = x[..., at : at + size]
            views.append(part.reshape(*x.shape[:-1], blocks, self.rows, columns))
            at += size
        return views


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tiles of a range of queries and the blocks of keys that each visits.

    Attributes
    ----------
    first : ndarray of int64, shape (tiles,)
        Position of each tile's first query; consecutive tiles are `rows` apart.
    rows, columns : int
        Queries of a tile, keys of a block.
    left, right : ndarray of int64, shape (tiles,)
        Blocks visited before and after each tile.
    """

    first: Integers
    rows: int
    columns: int
    left: Integers
    right: Integers

    @classmethod
    def of(cls, first: Integers, rows: int, columns: int, reach: Reach) -> "Schedule":
        """Cover a reach by whole blocks."""
        return cls(first, rows, columns, -(-reach.before // columns), -(-reach.after // columns))

    @property
    def widest(self) -> Chunk:
        """One tile with the most blocks of all on either side."""
        return Chunk(0, 1, self.rows, self.columns, int(self.left.max()), int(self.right.max()))

    def one(self, tile: int) -> Chunk:
        """Return the chunk of one tile."""
        left, right = int(self.left[tile]), int(self.right[tile])
        return Chunk(tile, 1, self.rows, self.columns, left, right)

    def chunks(self, most: int) -> Iterator[Chunk]:
        """Batch neighbouring tiles while their pairs, padded to the widest, are at most `most`."""

        def fit(left: int, right: int) -> int:
            return most // (self.rows * (self.rows + self.columns * (left + right)))

        left = right = begin = 0
        room = fit(0, 0)
        for t, own in enumerate(zip(self.left.tolist(), self.right.tolist(), strict=True)):
            if own[0] > left or own[1] > right or t - begin >= room:
                wide = (max(left, own[0]), max(right, own[1]))
                room = fit(*wide)
                if t > begin and t - begin >= room:
                    yield Chunk(begin, t - begin, self.rows, self.columns, left, right)
                    begin, wide, room = t, own, fit(*own)
                left, right = wide
        yield Chunk(begin, len(self.first) - begin, self.rows, self.columns, left, right)

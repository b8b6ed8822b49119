"""Positional weights of G heads that share a schedule, chunk by chunk, as the kernel applies them.

A chunk's pairs are ``(G, tiles, blocks, rows, rows)``. A weight gives a ``bias``, added to the
logits in units of log2, and ``factors``, multiplied onto the exponentials of some of the blocks.
A decay is a bias, and factors of 0 or 1 where a block has hidden pairs: as a factor it would
underflow, as a bias it would not hide a pair. A step weight is its count alone, and
``normaliser``, ln s, completes the mean.
"""

import math
from typing import Any, TypeAlias

import numpy as np

from plsh.tiles import Chunk, Integers, Reach, Schedule, decay_reach, step_reach

from ._scratch import AnyArray, Scratch

LOG2E = 1 / math.log(2)
PIECE = 1 << 15
"""Pairs of the diagonals that are counted at once: what is fresh each time stays small."""

Factors: TypeAlias = list[tuple[slice, AnyArray]]
"""Some of a chunk's blocks, and what their pairs are multiplied by, in full or to broadcast."""


class Decay:
    """``exp(-slope * distance)`` within a width.

    `slopes` is ``(batch rows or 1, G)``, `widths` ``(G,)``; `keys` is the range of positions that
    hold a key.
    """

    samples = 1
    normaliser = 0.0

    def __init__(
        self, slopes: AnyArray, widths: AnyArray, causal: bool, keys: range, dtype: np.dtype[Any]
    ) -> None:
        # Larger slopes cut just as sharply, and their products with a distance stay in range.
        self._slopes = np.minimum(slopes, float(np.finfo(dtype).max) / 2**31) * LOG2E
        self._widths, self._causal, self._keys, self._dtype = widths, causal, keys, dtype
        self.steepest = float(self._slopes.max(initial=0.0))
        self.width = int(widths.max())

    def reach(self, first: Integers, rows: int) -> Reach:
        """Return how far tiles that begin at positions `first` see."""
        return decay_reach(first, rows, self.width, self._causal, self._keys)

    def prepare(self, schedule: Schedule) -> None:
        """Make the tables of the widest tile; every other tile's are a slice of them."""
        self._schedule, self._widest = schedule, schedule.widest
        block, row = _blocks(self._widest), np.arange(schedule.rows, dtype=np.int32)
        # Query less key position, (blocks, rows, rows)
        apart = row[:, None] - row - schedule.rows * block.astype(np.int32)[:, None, None]
        distance = np.abs(apart)
        seen = distance <= self._widths[:, None, None, None]  # (G, blocks, rows, rows)
        if self._causal:
            seen &= apart >= 0
        some = np.flatnonzero(~seen.all(axis=(0, 2, 3)))  # blocks with hidden pairs
        runs = np.split(some, np.flatnonzero(np.diff(some) > 1) + 1) if some.size else []
        self._seen = [
            (int(run[0]), seen[:, None, run[0] : run[-1] + 1].astype(self._dtype)) for run in runs
        ]
        self._distance = distance.astype(self._dtype)
        self._bias = np.multiply.outer(-self._slopes.astype(self._dtype), self._distance)

    def _slice(self, chunk: Chunk) -> slice:
        return slice(self._widest.left - chunk.left, self._widest.left + 1 + chunk.right)

    def bias(self, chunk: Chunk) -> AnyArray:
        """Return -slope * distance in units of log2, ``(batch rows or 1, G, 1, blocks, …)``."""
        bias: AnyArray = self._bias[:, :, None, self._slice(chunk)]
        return bias

    def distance(self, chunk: Chunk) -> AnyArray:
        """Return the distance of each pair of a tile, ``(blocks, rows, rows)``."""
        distance: AnyArray = self._distance[self._slice(chunk)]
        return distance

    def factors(self, chunk: Chunk, scratch: Scratch) -> Factors:
        """Return 1 where a pair is in the band and the key exists, for blocks not all 1."""
        own, parts = self._slice(chunk), []
        for begin, seen in self._seen:
            low, high = max(begin, own.start), min(begin + seen.shape[2], own.stop)
            if low < high:
                part = seen[:, :, low - begin : high - begin]
                parts.append((slice(low - own.start, high - own.start), part))
        return parts + _exist(self._schedule, chunk, self._keys, self._dtype)


class Steps:
    """Counts of the partitions in which a pair shares a block.

    `labels` ``(G, s, positions)`` begin at position `start` and cover all tiles and keys in reach;
    `width` is a distance that no block exceeds.
    """

    steepest = 0.0

    def __init__(
        self,
        labels: AnyArray,
        start: int,
        width: int,
        causal: bool,
        keys: range,
        dtype: np.dtype[Any],
    ) -> None:
        self._labels, self._start, self.width = labels, start, width
        self._causal, self._keys, self._dtype = causal, keys, dtype
        self.samples = labels.shape[1]
        self.normaliser = math.log(self.samples)

    def reach(self, first: Integers, rows: int) -> Reach:
        """Return how far tiles that begin at positions `first` see."""
        begins = self._labels[:, :, first - self._start]  # (G, s, tiles)
        low = high = begins.min(axis=(0, 1))
        if not self._causal:  # a block ends where labels exceed the positions in it
            last = first + rows - 1
            found = [
                [np.searchsorted(x, last, side="right") for x in head] for head in self._labels
            ]
            self._found = np.array(found) + self._start  # ends of blocks, (G, s, tiles)
            high = self._found.max(axis=(0, 1))
        return step_reach(first, rows, low, high, self._causal, self._keys)

    def prepare(self, schedule: Schedule) -> None:
        """Count the pairs of every diagonal, and make the near operands of the other counts."""
        self._schedule, rows, tiles = schedule, schedule.rows, schedule.first.size
        at, first = int(schedule.first[0]) - self._start, schedule.first.astype(np.int32)
        own = self._labels[:, :, at : at + tiles * rows]
        labels = own.reshape(*own.shape[:2], tiles, rows).swapaxes(1, 2) - first[:, None, None]
        self._diagonals = self._count_diagonals(labels)  # of labels (G, tiles, s, rows)
        # Row b of the table is 0 before column b, 1 from there on.
        self._step = 1 - np.tri(rows + 1, rows, -1, dtype=self._dtype)
        # Left of a tile the pivot is its first position, right of it its last.
        self._begins, self._left = labels[..., 0], (labels <= 0).astype(self._dtype)
        if not self._causal:
            self._ends = self._found.swapaxes(1, 2) - first[:, None]  # (G, tiles, s)
            self._right = self._step.take(labels[..., -1], axis=0, mode="clip")

    def _count_diagonals(self, labels: AnyArray) -> AnyArray:
        """Return the counts of tiles with the keys at their positions, ``(G, tiles, rows, rows)``.

        `labels` ``(G, tiles, s, rows)`` are relative to the tile.
        """
        # For j <= i a partition counts iff i's block begins at or before j: a histogram of block
        # begins among the tile's columns, then its running sum. The rest is symmetric. Padding
        # below position 0 is labelled after itself.
        heads, tiles, _, rows = labels.shape
        counts = np.empty((heads, tiles, rows, rows), dtype=self._dtype)
        lower = np.tri(rows, dtype=self._dtype)
        step = max(1, PIECE // (heads * rows * rows))
        line = rows * np.arange(heads * step * rows, dtype=np.int32)
        for tile in range(0, tiles, step):
            piece = counts[:, tile : tile + step]
            begins = np.clip(labels[:, tile : tile + step], 0, rows - 1)
            begins += line[: piece.size // rows].reshape(heads, -1, 1, rows)
            found = np.bincount(begins.ravel(), minlength=piece.size).astype(self._dtype)
            # A product with a triangle sums along the rows at a third of the cost of cumsum.
            np.matmul(found.reshape(piece.shape), lower.T, out=piece)
        counts *= lower
        if not self._causal:
            counts += np.tril(counts, -1).swapaxes(-1, -2)
        return counts

    def bias(self, chunk: Chunk) -> None:
        """Return None: the counts say it all."""

    def factors(self, chunk: Chunk, scratch: Scratch) -> Factors:
        """Return the counts."""
        own, blocks, rows = slice(chunk.tile, chunk.tile + chunk.tiles), _blocks(chunk), chunk.rows
        shape = (len(self._labels), chunk.tiles, blocks.size, rows, rows)
        out = scratch.get("counts", shape, self._dtype)
        out[:, :, chunk.left] = self._diagonals[:, own]
        if chunk.left:
            far = self._steps(self._begins[:, own], blocks[: chunk.left], scratch)
            _product(self._left[:, own], far, out[:, :, : chunk.left])
        if chunk.right:
            far = self._steps(self._ends[:, own], blocks[chunk.left + 1 :], scratch)
            np.subtract(1, far, out=far)
            _product(self._right[:, own], far, out[:, :, chunk.left + 1 :])
        whole: Factors = [(slice(None), out)]
        return whole + _exist(self._schedule, chunk, self._keys, self._dtype)

    def _steps(self, at: AnyArray, blocks: Integers, scratch: Scratch) -> AnyArray:
        """Return far operands ``(G, tiles, blocks, s, rows)``: 1 from ``at (G, tiles, s)`` on."""
        rows = self._schedule.rows
        index = at[:, :, None] - rows * blocks[:, None]
        out = scratch.get("far", (*index.shape, rows), self._dtype)
        return self._step.take(index, axis=0, out=out, mode="clip")


def _product(near: AnyArray, far: AnyArray, out: AnyArray) -> None:
    """Multiply ``(G, tiles, s, rows)`` and ``(G, tiles, blocks, s, rows)`` over s."""
    np.matmul(near.swapaxes(-1, -2)[:, :, None], far, out=out)


def _blocks(chunk: Chunk) -> Integers:
    """Return the blocks that a chunk's tiles visit, counted from the tile's own."""
    return np.arange(-chunk.left, chunk.right + 1)


def _exist(schedule: Schedule, chunk: Chunk, keys: range, dtype: np.dtype[Any]) -> Factors:
    """Return factors of 0 where a key does not exist."""
    first = schedule.first[chunk.tile : chunk.tile + chunk.tiles]
    rows, low, high = chunk.rows, int(first[0]), int(first[-1]) + chunk.rows
    if keys.start <= low - rows * chunk.left and high + rows * chunk.right <= keys.stop:
        return []
    blocks = _blocks(chunk)
    some = np.flatnonzero((low + rows * blocks < keys.start) | (high + rows * blocks > keys.stop))
    held = slice(int(some[0]), int(some[-1]) + 1)
    at = first[:, None, None] + rows * blocks[held, None] + np.arange(rows)
    exist = ((at >= keys.start) & (at < keys.stop)).astype(dtype)  # (tiles, blocks, rows)
    return [(held, exist[None, :, :, None])]

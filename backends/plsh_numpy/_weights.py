"""Positional weights of G heads that share a schedule, chunk by chunk, as the kernel applies them.

A weight gives a ``bias``, added to the logits in units of log2, ``(batch rows or 1, G, 1, pairs)``
or None, and a ``factor``, multiplied onto the exponentials, ``(G, tiles or 1, pairs)``. A decay is
a bias and a factor of 0 or 1: as a factor it would underflow, as a bias it would not hide a pair.
A step weight is its count alone, and ``normaliser``, ln s, completes the mean.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from plsh.tiles import Chunk, Integers, Reach, Schedule, decay_reach, step_reach

from ._scratch import AnyArray, Scratch

_BOOL: np.dtype[Any] = np.dtype(bool)
LOG2E = 1 / math.log(2)


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

    def reach(self, first: Integers, rows: int) -> Reach:
        """Return how far tiles that begin at positions `first` see."""
        return decay_reach(first, rows, int(self._widths.max()), self._causal, self._keys)

    def prepare(self, schedule: Schedule) -> None:
        """Make the tables of the widest tile; every other tile's are a slice of them."""
        self._schedule, self._widest = schedule, schedule.widest
        apart = np.empty(self._widest.pairs, dtype=np.int32)  # query less key position
        row = np.arange(schedule.rows, dtype=np.int32)[:, None]
        for view, (begin, blocks, columns) in zip(
            self._widest.split(apart), self._widest.sides, strict=True
        ):
            key = begin + np.arange(blocks * columns, dtype=np.int32).reshape(blocks, 1, columns)
            np.subtract(row, key, out=view)
        seen = np.abs(apart) <= self._widths[:, None]  # (G, pairs)
        if self._causal:
            seen &= apart >= 0
        self._seen = seen.astype(self._dtype)
        self._distance = np.abs(apart, out=apart).astype(self._dtype)
        self._bias = np.multiply.outer(-self._slopes.astype(self._dtype), self._distance)

    def _slice(self, chunk: Chunk) -> slice:
        begin = chunk.rows * chunk.columns * (self._widest.left - chunk.left)
        return slice(begin, begin + chunk.pairs)

    def bias(self, chunk: Chunk) -> AnyArray:
        """Return -slope * distance in units of log2, ``(batch rows or 1, G, 1, pairs)``."""
        bias: AnyArray = self._bias[:, :, None, self._slice(chunk)]
        return bias

    def distance(self, chunk: Chunk) -> AnyArray:
        """Return the distance of each pair of a tile, ``(pairs,)``."""
        return self._distance[self._slice(chunk)]

    def factor(self, chunk: Chunk, scratch: Scratch) -> AnyArray:
        """Return 1 where a pair is in the band and the key exists, ``(G, tiles or 1, pairs)``."""
        seen = self._seen[:, None, self._slice(chunk)]
        first = self._schedule.first[chunk.tile : chunk.tile + chunk.tiles]
        if _all_exist(first, chunk, self._keys):
            return seen
        out = scratch.get("factor", (len(seen), chunk.tiles, chunk.pairs), self._dtype)
        out[...] = seen
        _hide_missing(chunk.split(out), first, chunk, self._keys)
        return out


class Steps:
    """Counts of the partitions in which a pair shares a block.

    `labels` ``(G, s, positions)`` begin at position `start` and cover all tiles and keys in reach.
    """

    steepest = 0.0

    def __init__(
        self, labels: AnyArray, start: int, causal: bool, keys: range, dtype: np.dtype[Any]
    ) -> None:
        self._labels, self._start = labels, start
        self._causal, self._keys, self._dtype = causal, keys, dtype
        self.samples = labels.shape[1]
        self.normaliser = math.log(self.samples)

    def reach(self, first: Integers, rows: int) -> Reach:
        """Return how far tiles that begin at positions `first` see."""
        begins = self._labels[:, :, first - self._start].min(axis=(0, 1))
        ends = first + rows
        if not self._causal:  # a block ends where labels exceed the positions in it
            last = first + rows - 1
            rows_of = self._labels.reshape(-1, self._labels.shape[-1])
            found = [np.searchsorted(row, last, side="right") for row in rows_of]
            ends = np.max(found, axis=0) + self._start
        return step_reach(first, rows, begins, ends, self._causal, self._keys)

    def prepare(self, schedule: Schedule) -> None:
        """Count the pairs of every diagonal; the other counts are made chunk by chunk."""
        self._schedule, rows, tiles = schedule, schedule.rows, schedule.first.size
        at = int(schedule.first[0]) - self._start
        heads, samples = self._labels.shape[:2]
        own = self._labels[:, :, at : at + tiles * rows]
        self._tiles = own.reshape(heads, samples, tiles, rows)
        # For j <= i a partition counts iff i's block begins at or before j: a histogram of block
        # begins among the tile's columns, then its running sum. The rest is symmetric. Padding
        # below position 0 is labelled after itself.
        line = rows * np.arange(heads * tiles * rows).reshape(heads, 1, tiles, rows)
        begins = np.clip(self._tiles - schedule.first[:, None], 0, rows - 1) + line
        found = np.bincount(begins.ravel(), minlength=line.size * rows)
        lower = np.tri(rows, dtype=self._dtype)
        # A product with a triangle sums along the rows at a third of the cost of cumsum.
        counts = found.reshape(heads, tiles, rows, rows).astype(self._dtype) @ lower.T
        counts *= lower
        if not self._causal:
            counts += np.tril(counts, -1).swapaxes(-1, -2)
        self._diagonals = counts

    def bias(self, chunk: Chunk) -> None:
        """Return None: the counts say it all."""

    def factor(self, chunk: Chunk, scratch: Scratch) -> AnyArray:
        """Return the counts, ``(G, tiles, pairs)``."""
        shape = (self._labels.shape[0], chunk.tiles, chunk.pairs)
        out = scratch.get("factor", shape, self._dtype)
        left, diagonal, right = chunk.split(out)
        own = slice(chunk.tile, chunk.tile + chunk.tiles)
        first, labels = self._schedule.first[own], self._tiles[:, :, own]  # (G, s, tiles, rows)
        if chunk.left:  # pivot: the tile's first position
            near = (labels <= first[:, None]).transpose(0, 2, 3, 1).astype(self._dtype)
            begins = labels[..., 0].swapaxes(1, 2)[:, :, None, :, None]  # (G, tiles, 1, s, 1)
            keys = self._positions(first, chunk, 0)
            shape = (len(begins), *keys.shape[:2], self.samples, chunk.columns)
            far = scratch.get("far", shape, self._dtype)
            np.copyto(far, np.greater_equal(keys, begins, out=scratch.get("bits", shape, _BOOL)))
            # (G, tiles, 1, rows, s) @ (G, tiles, blocks, s, columns)
            np.matmul(near[:, :, None], far, out=left)
        if chunk.right:  # pivot: the tile's last position
            begins = labels[..., -1].swapaxes(1, 2)[:, :, None]  # (G, tiles, 1, s)
            at = first[:, None, None] + np.arange(chunk.rows)[:, None]  # (tiles, rows, 1)
            near = (at >= begins).astype(self._dtype)
            keys = self._positions(first, chunk, 2)[:, :, 0]  # (tiles, blocks, columns)
            index = np.clip(keys - self._start, 0, self._labels.shape[2] - 1)
            last = first + chunk.rows - 1
            shared = self._labels[:, :, index] <= last[:, None, None]
            far = (shared & (keys >= 0)).transpose(0, 2, 3, 1, 4).astype(self._dtype)
            np.matmul(near[:, :, None], far, out=right)
        diagonal[:, :, 0] = self._diagonals[:, own]
        if first[0] < self._keys.start or first[-1] + chunk.rows > self._keys.stop:
            alone = chunk._replace(left=0, right=0)
            _hide_missing([left[:, :, :0], diagonal, right[:, :, :0]], first, alone, self._keys)
        return out

    def _positions(self, first: Integers, chunk: Chunk, side: int) -> npt.NDArray[np.int32]:
        """Return the positions of one side's keys ``(tiles, blocks, 1, columns)``, -1 for none."""
        begin, blocks, columns = chunk.sides[side]
        at = first[:, None, None] + begin + np.arange(blocks * columns).reshape(blocks, columns)
        if at[0, 0, 0] < self._keys.start or at[-1, -1, -1] >= self._keys.stop:
            at = np.where((at >= self._keys.start) & (at < self._keys.stop), at, -1)
        return at[:, :, None].astype(np.int32)


def _all_exist(first: Integers, chunk: Chunk, keys: range) -> bool:
    """Whether every key that a chunk visits exists."""
    low = int(first[0]) - chunk.left * chunk.columns
    high = int(first[-1]) + chunk.rows + chunk.right * chunk.columns
    return keys.start <= low and high <= keys.stop


def _hide_missing(parts: list[AnyArray], first: Integers, chunk: Chunk, keys: range) -> None:
    """Set pairs whose key does not exist to 0; `parts` as `Chunk.split` gives them."""
    for view, (begin, blocks, columns) in zip(parts, chunk.sides, strict=True):
        at = first[:, None, None] + begin + np.arange(blocks * columns).reshape(blocks, columns)
        exists = (at >= keys.start) & (at < keys.stop)  # (tiles, blocks, columns)
        view *= exists[:, :, None, :]

"""Positional weights of G heads that share a schedule, chunk by chunk, as the kernel applies them.

A chunk's pairs are ``(G, tiles, blocks, rows, rows)``. A weight gives a ``bias``, added to the
logits in units of log2, and ``factors``, multiplied onto the exponentials of some of the blocks.
A decay is a bias, and factors of 0 or 1 where a block has hidden pairs: as a factor it would
underflow, as a bias it would not hide a pair. A step weight is its count alone, and
``normaliser``, ln s, completes the mean.

Keys that are all at a distance from the queries are placed next to them (`plsh.tiles.gap`), and a
weight knows the distance: a decay over it is one factor, which completes its ``normaliser``.
"""

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import numpy as np

from plsh.tiles import Chunk, Integers, Schedule, decay_reach, step_reach

from ._scratch import AnyArray, Scratch

LOG2E = 1 / math.log(2)
PIECE = 1 << 15
"""Pairs of the diagonals that are counted at once: what is fresh each time stays small."""
COUNTED = 1 << 25
"""Bytes of counts of diagonals that are kept for the backward pass and the next call, at most."""

Factors: TypeAlias = list[tuple[slice, AnyArray]]
"""Some of a chunk's blocks, and what their pairs are multiplied by, in full or to broadcast."""


class Decay:
    """``exp(-slope * distance)`` within a width.

    `slopes` is ``(batch rows or 1, G)``, `widths` ``(G,)``.
    """

    samples = 1

    def __init__(
        self, slopes: AnyArray, widths: AnyArray, causal: bool, dtype: np.dtype[Any]
    ) -> None:
        # Larger slopes cut just as sharply, and their products with a distance stay in range.
        self._slopes = np.minimum(slopes, float(np.finfo(dtype).max) / 2**31)
        self._widths, self._causal, self._dtype = widths, causal, dtype
        self.steepest = float(self._slopes.max(initial=0.0)) * LOG2E
        self.width = int(widths.max())

    def schedule(self, first: Integers, rows: int, keys: range, move: int) -> Schedule:
        """Return the blocks that tiles see, and make the tables of the widest of them.

        The tiles begin at positions `first`; `keys` is the range of positions in which keys are
        placed, by `move` after their own. Every other tile's tables are a slice of the widest's.
        """
        gap = self._gap = abs(move)
        reach = decay_reach(first, rows, self.width - gap, self._causal, keys)
        schedule = self._schedule = Schedule.of(first, rows, rows, reach)
        self._keys, self._widest = keys, schedule.widest
        self.normaliser = (self._slopes * gap)[:, :, None]  # (batch rows or 1, G, 1)
        # Key less query position, as placed: all that a table depends on.
        apart = np.arange(1 - rows * (1 + self._widest.left), rows * (1 + self._widest.right))
        self._apart = np.abs(apart)
        seen = self._apart <= self._widths[:, None] - gap  # (G, positions)
        if self._causal:
            seen &= apart <= 0
        every = np.logical_and.reduce(seen, axis=0)
        some = np.flatnonzero(~_squares(every, rows).all(axis=(1, 2)))  # blocks with hidden pairs
        runs = np.split(some, np.flatnonzero(np.diff(some) > 1) + 1) if some.size else []
        table = _squares(seen, rows)  # (G, blocks, rows, rows)
        self._seen = [
            (int(run[0]), table[:, None, run[0] : run[-1] + 1].astype(self._dtype)) for run in runs
        ]
        slopes = (-LOG2E * self._slopes).astype(self._dtype)
        bias = np.multiply.outer(slopes, self._apart.astype(self._dtype))
        self._bias = np.ascontiguousarray(_squares(bias, rows))
        return schedule

    def _slice(self, chunk: Chunk) -> slice:
        return slice(self._widest.left - chunk.left, self._widest.left + 1 + chunk.right)

    def bias(self, chunk: Chunk) -> AnyArray:
        """Return -slope * distance as placed, in log2: ``(batch rows or 1, G, 1, blocks, …)``."""
        bias: AnyArray = self._bias[:, :, None, self._slice(chunk)]
        return bias

    def distance(self, chunk: Chunk) -> AnyArray:
        """Return the true distance of each pair of a tile, ``(blocks, rows, rows)``."""
        return self._distance[self._slice(chunk)]

    @functools.cached_property
    def _distance(self) -> AnyArray:
        distance = (self._apart + self._gap).astype(self._dtype)
        return np.ascontiguousarray(_squares(distance, self._schedule.rows))

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

    ``labels(start, stop)`` gives those of a range of positions, ``(G, samples, positions)``;
    `width` is a distance that no block exceeds. What has the same `recipe` has the same labels;
    None is like no other.
    """

    steepest = 0.0

    def __init__(
        self,
        labels: Callable[[int, int], AnyArray],
        samples: int,
        width: int,
        causal: bool,
        dtype: np.dtype[Any],
        recipe: Hashable = None,
    ) -> None:
        self._labels, self.samples, self.width, self._recipe = labels, samples, width, recipe
        self._causal, self._dtype = causal, dtype
        self.normaliser = math.log(samples)

    def schedule(self, first: Integers, rows: int, keys: range, move: int) -> Schedule:
        """Return the blocks that tiles see; count their diagonals, make the other near operands.

        The tiles begin at positions `first`; `keys` is the range of positions in which keys are
        placed, by `move` after their own.
        """
        tiles, start, stop = first.size, int(first[0]), int(first[-1]) + rows
        own = self._labels(start, stop)
        labels = own.reshape(*own.shape[:2], tiles, rows).swapaxes(1, 2)  # (G, tiles, s, rows)
        self._keys = keys
        begin = first.astype(np.int32)[:, None]
        # Left of a tile the pivot is its first position, right of it its last.
        self._begins = (labels[..., 0] - begin).astype(np.int64) + move
        self._left = (labels <= begin[:, None]).astype(self._dtype)
        self._step = _step_table(rows, self._dtype)
        low = high = first + self._begins.min(axis=(0, 2))
        if not self._causal:
            # A block ends where labels exceed the positions in it. Keys follow the tiles at once.
            far = range(max(stop, keys.start), min(stop + self.width + move, keys.stop))
            if far:
                after = self._labels(far.start - move, far.stop - move)
                own = np.concatenate((own, after), axis=2)
            last = first + rows - 1
            found = [[np.searchsorted(x, last, side="right") for x in head] for head in own]
            ends = np.array(found).swapaxes(1, 2) + start  # (G, tiles, s)
            high = ends.max(axis=(0, 2))
            self._ends = ends - first[:, None]
            self._right = self._step.take(labels[..., -1] - begin, axis=0, mode="clip")
        key = self._recipe and (self._recipe, self._causal, start, tiles, rows)
        self._diagonals = _DIAGONALS.get(key, lambda: self._count_diagonals(labels, begin))
        reach = step_reach(first, rows, low, high, self._causal, keys)
        self._schedule = Schedule.of(first, rows, rows, reach)
        return self._schedule

    def _count_diagonals(self, labels: AnyArray, begin: AnyArray) -> AnyArray:
        """Return the counts of tiles with the keys at their positions, ``(G, tiles, rows, rows)``.

        `labels` are ``(G, tiles, s, rows)``, `begin` the tiles' first positions ``(tiles, 1)``. The
        counts are small integers.
        """
        # For j <= i a partition counts iff i's block begins at or before j: a histogram of block
        # begins among the tile's columns, then its running sum. The rest is symmetric. Padding
        # below position 0 is labelled after itself.
        heads, tiles, _, rows = labels.shape
        counts = np.empty((heads, tiles, rows, rows), dtype=np.min_scalar_type(self.samples))
        upper = np.tri(rows, dtype=self._dtype).T
        step = max(1, PIECE // (heads * rows * rows))
        line = rows * np.arange(heads * step * rows, dtype=np.int32)
        for tile in range(0, tiles, step):
            own = slice(tile, tile + step)
            piece = counts[:, own]  # counts are exact in any dtype
            begins = np.clip(labels[:, own] - begin[own, None], 0, rows - 1)
            begins += line[: piece.size // rows].reshape(heads, -1, 1, rows)
            found = np.bincount(begins.ravel(), minlength=piece.size).astype(self._dtype)
            # A product with a triangle sums along the rows at a third of the cost of cumsum.
            piece[...] = np.matmul(found.reshape(piece.shape), upper)
        counts *= np.tri(rows, dtype=counts.dtype)
        if not self._causal:
            counts += np.tril(counts, -1).swapaxes(-1, -2)
        return counts

    def bias(self, chunk: Chunk) -> None:
        """Return None: the counts say it all."""

    def factors(self, chunk: Chunk, scratch: Scratch) -> Factors:
        """Return the counts."""
        own, blocks, rows = slice(chunk.tile, chunk.tile + chunk.tiles), _blocks(chunk), chunk.rows
        shape = (len(self._left), chunk.tiles, blocks.size, rows, rows)
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


class _Kept:
    """Arrays lately made, least recently used out first, bounded in bytes; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, AnyArray] = OrderedDict()
        self.nbytes = 0

    def get(self, key: Hashable, make: Callable[[], AnyArray]) -> AnyArray:
        """Return what is held under a key, or make it; a key of None is never held."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        made = make()  # outside the lock: two threads may both make it
        if key is None or self._cost(made) > COUNTED:
            return made
        with self._lock:
            if key not in self._held:
                self._held[key] = made
                self.nbytes += self._cost(made)
            while self.nbytes > COUNTED:
                self.nbytes -= self._cost(self._held.popitem(last=False)[1])
        return made

    @staticmethod
    def _cost(x: AnyArray) -> int:
        return x.nbytes + 1024  # with the key and the array's own header


_DIAGONALS = _Kept()


@functools.lru_cache(maxsize=32)
def _step_table(rows: int, dtype: np.dtype[Any]) -> AnyArray:
    """Return ``(rows + 1, rows)``; row b is 0 before column b, 1 from there on."""
    table = 1 - np.tri(rows + 1, rows, -1, dtype=dtype)
    table.flags.writeable = False
    return table


def _product(near: AnyArray, far: AnyArray, out: AnyArray) -> None:
    """Multiply ``(G, tiles, s, rows)`` and ``(G, tiles, blocks, s, rows)`` over s."""
    np.matmul(near.swapaxes(-1, -2)[:, :, None], far, out=out)


def _squares(line: AnyArray, rows: int) -> AnyArray:
    """View ``line[…, rows - 1 + rows * block + column - row]``: ``(…, blocks, rows, columns)``."""
    every = np.lib.stride_tricks.sliding_window_view(line, rows, axis=-1)
    return every.reshape(*line.shape[:-1], -1, rows, rows)[..., ::-1, :]


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

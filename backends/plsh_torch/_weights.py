"""Positional weights of one head, piece by piece, as the kernel applies them.

A *piece* is a run of key blocks, ``begin … end`` in blocks from the tile's own (the diagonal is
block 0), of all tiles of a chunk at once. A weight starts the logits (`start`) and gives a factor
of the exponentials (`factor`). A decay is a start alone where logits are bounded, with -inf where
the weight is 0; elsewhere its start is finite and its factor 0 or 1, so that hidden infinities do
no harm. A step weight is its count alone, and ``normaliser``, ln s, completes the mean.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plsh.tiles import Chunk, Integers, Reach, Schedule, decay_reach, step_reach

from ._cache import TABLES
from ._scratch import Scratch

LOG2E = 1 / math.log(2)
NEAR = 1 << 20
"""Bytes, about, of the tables of the blocks next to the diagonal, of which pieces take slices."""
FAR = 1 << 24
"""Block bounds further off than this are as far as any; float32 holds them exactly."""

Labels: TypeAlias = npt.NDArray[np.int32]


class Piece(NamedTuple):
    """Key blocks ``begin … end`` of the tiles of a chunk, counted from each tile's own block."""

    begin: int
    end: int

    @property
    def blocks(self) -> int:
        """Blocks of a window."""
        return self.end - self.begin


class Decay:
    """``exp(-slope * distance)`` within a width, for tiles of `rows` queries."""

    samples = 1
    normaliser = 0.0

    def __init__(self, slope: float, width: int, causal: bool, dtype: torch.dtype) -> None:
        self.slope = gentle(slope, dtype)
        self._width, self._causal, self._dtype = width, causal, dtype

    def reach(self, first: Integers, rows: int, keys: range) -> Reach:
        """Return how far tiles that begin at positions `first` see."""
        return decay_reach(first, rows, self._width, self._causal, keys)

    def prepare(self, schedule: Schedule) -> None:
        """Choose the blocks whose tables serve most pieces."""
        self._rows, widest = schedule.rows, schedule.widest
        most = NEAR // (self._rows**2 * self._dtype.itemsize)
        self._near = Piece(-min(most, widest.left), min(most, widest.right) + 1)

    def start(self, p: Tensor, piece: Piece, bounded: bool) -> float:
        """Fill ``(1, T, rows, columns)``; return what the product must scale it by."""
        if self._is_plain(piece):
            sign = 1 if piece.begin < 0 else -1
            begin = torch.full((), -sign * piece.begin * self._rows, dtype=p.dtype, device="cpu")
            torch.add(begin.expand(p.shape), self._apart(piece.blocks), alpha=sign, out=p)
            return -self.slope * LOG2E
        p.copy_(self._bias(piece, bounded))
        return 1.0

    def start_exactly(self, p: Tensor, piece: Piece) -> float:
        """As `start`, in units of e: distances as integers, rounded once."""
        p.copy_(self.distance(piece))
        return -self.slope

    def factor(self, chunk: Chunk, piece: Piece, bounded: bool, scratch: Scratch) -> Tensor | None:
        """Return 1 where a pair is in the band, ``(rows, columns)``; None where all are."""
        return None if bounded or self._is_plain(piece) else self._seen(piece)

    def distance(self, piece: Piece) -> Tensor:
        """Return the distance of each pair of a tile, ``(rows, columns)``."""
        return self._table("distance", piece, lambda x: self._offsets(x).abs_())

    def _is_plain(self, piece: Piece) -> bool:
        """Whether all pairs are seen, and on one side."""
        if piece.begin <= 0 < piece.end:
            return False
        blocks = piece.end if piece.begin > 0 else 1 - piece.begin
        return (piece.end <= 0 or not self._causal) and blocks * self._rows - 1 <= self._width

    def _table(self, name: str, piece: Piece, make: Callable[[Piece], Tensor], *key: Any) -> Tensor:
        """Return a table of a piece, ``(rows, columns)``: a slice of a wider one if near."""
        near = self._near
        whole = near if near.begin <= piece.begin and piece.end <= near.end else piece
        table = TABLES.get((name, whole, self._rows, self._dtype, *key), lambda: make(whole))
        begin = (piece.begin - whole.begin) * self._rows
        return table[:, begin : begin + piece.blocks * self._rows]

    def _bias(self, piece: Piece, bounded: bool) -> Tensor:
        def make(piece: Piece) -> Tensor:
            bias = self.distance(piece) * (-self.slope * LOG2E)
            return bias.masked_fill_(self._seen(piece) == 0, -math.inf) if bounded else bias

        seen = (self._width, self._causal) if bounded else ()
        return self._table("bias", piece, make, self.slope, *seen)

    def _seen(self, piece: Piece) -> Tensor:
        def make(piece: Piece) -> Tensor:
            apart = self._offsets(piece)
            seen = apart.abs() <= self._width
            return (seen & (apart >= 0) if self._causal else seen).to(self._dtype)

        return self._table("seen", piece, make, self._width, self._causal)

    def _offsets(self, piece: Piece) -> Tensor:
        """Return query less key position, ``(rows, columns)``."""
        return self._apart(piece.blocks) - piece.begin * self._rows

    def _apart(self, blocks: int) -> Tensor:
        key = ("apart", blocks, self._rows, self._dtype)
        return TABLES.get(key, lambda: apart(self._rows, blocks, self._dtype))


def gentle(slope: float, dtype: torch.dtype) -> float:
    """Return a slope whose products are finite; larger ones cut as sharply."""
    return min(slope, torch.finfo(dtype).max / 2**32)


def apart(rows: int, blocks: int, dtype: torch.dtype) -> Tensor:
    """Return row less column, ``(rows, blocks * rows)``."""
    row, column = (torch.arange(n, dtype=dtype, device="cpu") for n in (rows, blocks * rows))
    return row[:, None] - column


class Blocks(NamedTuple):
    """The blocks at some positions: first position, and position after the last, ``(…, s, n)``."""

    begins: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int32]


class Steps:
    """Counts of the partitions in which a pair shares a block.

    `labels` ``(s, positions)`` are those of the tiles, `at_first` and `at_last` ``(s, T)`` the
    blocks at each tile's first and last position; `key` names them all for the cache, None for no
    caching.
    """

    def __init__(
        self,
        labels: Labels,
        at_first: Blocks,
        at_last: Blocks,
        causal: bool,
        dtype: torch.dtype,
        key: Any,
    ) -> None:
        self._labels, self._at_first, self._at_last = labels, at_first, at_last
        self._causal, self._dtype, self._key = causal, dtype, key
        self.samples = labels.shape[0]
        self.normaliser = math.log(self.samples)

    def reach(self, first: Integers, rows: int, keys: range) -> Reach:
        """Return how far tiles that begin at positions `first` see."""
        begins, ends = self._at_first.begins.min(axis=0), self._at_last.ends.max(axis=0)
        return step_reach(first, rows, begins, ends, self._causal, keys)

    def prepare(self, schedule: Schedule) -> None:
        """Count the pairs of every diagonal."""
        first, rows = schedule.first, schedule.rows

        def make() -> Tensor:
            own = self._labels.reshape(self.samples, -1, rows)
            return diagonal_counts(own - first[:, None].astype(np.int32), self._causal)

        key = (self._key, int(first[0]), first.size, rows, self._causal)
        self._diagonals = make() if self._key is None else TABLES.get(key, make)
        self._rows = rows
        self._left, self._right = (
            tuple(torch.from_numpy(np.ascontiguousarray((x - first).T)) for x in blocks)
            for blocks in (self._at_first, self._at_last)
        )
        query = torch.arange(rows, dtype=self._dtype, device="cpu")[:, None]
        sides = 1 if self._causal else 2
        self._near = torch.empty(
            (first.size, rows, sides * self.samples), dtype=self._dtype, device="cpu"
        )
        # Whether a query is in a block at its tile's first position, or its last.
        torch.lt(
            query, self._bounds(self._left[1], 0)[:, None], out=self._near[..., : self.samples]
        )
        if not self._causal:
            before = self._bounds(self._right[0], 0)[:, None]
            torch.ge(query, before, out=self._near[..., self.samples :])

    def _bounds(self, bounds: Tensor, at: int) -> Tensor:
        """Return bounds from position `at` on as floats, which hold them exactly or as far."""
        return (bounds - at).clamp_(-FAR, FAR).to(self._dtype)

    def start(self, p: Tensor, piece: Piece, bounded: bool) -> float:
        """Return 0: the counts say it all."""
        return 0.0

    def start_exactly(self, p: Tensor, piece: Piece) -> float:
        """Return 0."""
        return 0.0

    def factor(self, chunk: Chunk, piece: Piece, bounded: bool, scratch: Scratch) -> Tensor:
        """Return the counts, ``(T, rows, columns)``."""
        rows, tiles = self._rows, slice(chunk.tile, chunk.tile + chunk.tiles)
        columns = piece.blocks * rows
        left, right = piece.begin < 0, piece.end > 1
        out = scratch.get("factor", (chunk.tiles, rows, columns), self._dtype)
        at = piece.begin * rows  # of keys, from a tile's first position
        if left or right:
            inner = slice(0 if left else self.samples, self.samples * (2 if right else 1))
            near = self._near[tiles, :, inner]
            far = scratch.get("far", (chunk.tiles, near.shape[2], columns), self._dtype)
            key = torch.arange(columns, dtype=self._dtype, device="cpu")
            if left:  # pivot: the tile's first position
                begins = self._bounds(self._left[0][tiles], at)[:, :, None]
                torch.ge(key, begins, out=far[:, : self.samples])
            if right:  # pivot: the tile's last position
                ends = self._bounds(self._right[1][tiles], at)[:, :, None]
                torch.lt(key, ends, out=far[:, -self.samples :])
            if left and right:  # each for its own side
                far[:, : self.samples, -at:] = 0
                far[:, self.samples :, : rows - at] = 0
            torch.bmm(near, far, out=out)
        if piece.begin <= 0 < piece.end:
            out[..., -at : rows - at] = self._diagonals[tiles]
        return out


def diagonal_counts(labels: npt.NDArray[Any], causal: bool) -> Tensor:
    """Count the shared blocks of the pairs of tiles, from labels ``(s, T, rows)`` less `first`.

    For j <= i a partition counts iff i's block begins at or before j: a histogram of block begins
    among the tile's columns, then its running sum. The rest is symmetric. Padding below position 0
    is labelled after itself.
    """
    samples, tiles, rows = labels.shape
    line = rows * np.arange(tiles * rows).reshape(tiles, rows)
    begins = np.clip(labels, 0, rows - 1) + line
    found = np.bincount(begins.ravel(), minlength=line.size * rows).astype(np.float32)
    lower = torch.ones(rows, rows, dtype=torch.float32, device="cpu").tril_()
    # A product with a triangle sums along the rows.
    counts = torch.from_numpy(found).view(tiles * rows, rows) @ lower.T
    counts = counts.view(tiles, rows, rows).mul_(lower)
    if not causal:
        counts += counts.tril(-1).mT
    return counts.to(torch.uint8 if samples < 256 else torch.float32)  # both hold them exactly

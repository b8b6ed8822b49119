"""Tiles: neighbouring queries of one head and batch row, with the windows that they visit."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plsh.tiles import Chunk, Schedule

from ._scratch import Scratch
from ._weights import Decay, Piece, Steps

PAIRS = 1 << 19
"""Pairs of a chunk and piece, about: fewer cost more calls, in each of which threads may wait for
the interpreter, more cost memory."""
COLUMNS = 1 << 11
"""Keys of a piece, about."""
NARROW = 128
"""Bandwidth from which tiles are twice as long."""
WASTE = 1 << 16
"""Pairs that a chunk may visit in vain, to save the calls of another."""


class Tokens(NamedTuple):
    """The tokens of a call, whose batch rows share their positions."""

    q: Tensor  # (B, H, Nq, D)
    k: Tensor  # (B, Hkv, Nk, D)
    v: Tensor  # (B, Hkv, Nk, Dv)
    ids: tuple[Tensor, Tensor] | None  # segment ids (B, Nq), (B, Nk) as floats; padding is -1
    q_start: int  # position of query 0
    k_start: int
    acc: torch.dtype
    group: int  # query heads of a key head


class Sum(NamedTuple):
    """Where products by key are added up, of some batch rows and key heads."""

    x: Tensor  # (rows, heads, Nk, D), of the accumulation dtype
    row: int  # the first batch row
    head: int  # the first key head


class Shared:
    """What the chunks of one head, batch row and segment of queries share.

    `spans` are the indices of queries and keys among which all their rows are.
    """

    def __init__(self, schedule: Schedule, begin: int, first: int, count: int) -> None:
        length, widest = schedule.first.size * schedule.rows, schedule.widest
        # No piece begins further off the keys that exist.
        low = max(first - widest.left * schedule.rows, -length)
        high = min(first + length + widest.right * schedule.rows, count + length)
        self.spans = (range(begin, begin + length), range(low, max(low, high)))
        self.views: dict[str, Tensor] = {}
        self.copies: dict[str, Tensor] = {}


class Tiles:
    """A chunk of tiles of one head and batch row: ``N`` products of ``(rows, D)`` by ``(W, D)``.

    Their queries begin at index `begin`.
    """

    def __init__(
        self,
        tokens: Tokens,
        head: tuple[int, int],
        weight: Decay | Steps,
        chunk: Chunk,
        begin: int,
        shared: Shared,
        scratch: Scratch,
    ) -> None:
        self.acc, self.scratch, self.weight = tokens.acc, scratch, weight
        self._tokens, self._chunk, self._shared = tokens, chunk, shared
        self._batch, self._head = head
        self._rows = range(begin, begin + chunk.tiles * chunk.rows)
        self._first = tokens.q_start + begin - tokens.k_start  # as an index of keys
        self.pieces = list(pieces(chunk, self._first, tokens.k.shape[2]))

    # --- tokens in ---

    def queries(self, name: str, x: Tensor) -> Tensor:
        """Return the rows of ``(B, H, Nq, D)``, zero where there is none: ``(N, R, D)``."""
        own = self._own(name, x, self._head)
        return self._tiled(*self._take(name, own, self._rows, 0), self._chunk.rows)

    def keys(self, name: str, x: Tensor, piece: Piece) -> Tensor:
        """Return a piece's windows of ``(B, Hkv, Nk, D)``, which overlap: ``(N, W, D)``."""
        own = self._own(name, x, self._head // self._tokens.group)
        taken = self._take(name, own, self._visited(piece), 1)
        return self._tiled(*taken, piece.blocks * self._chunk.rows)

    def _own(self, name: str, x: Tensor, head: int) -> Tensor:
        """View a head ``(n, D)``."""
        own = self._shared.views.get(name)
        if own is None:
            own = self._shared.views[name] = x[self._batch, head]
        return own

    def _take(self, name: str, x: Tensor, at: range, side: int) -> tuple[Tensor, int]:
        """Return what holds rows of ``(n, D)``, a copy unless itself, and where they begin."""
        key, dim = x.stride()
        fit = x.dtype == self.acc and dim == 1 and key >= x.shape[1] and self._tokens.ids is None
        if fit and at.start >= 0 and at.stop <= x.shape[0]:
            return x, int(x.storage_offset()) + at.start * key
        span, copies = self._shared.spans[side], self._shared.copies
        if fit or at.start < span.start or at.stop > span.stop:  # at the edge, or without a key
            copies.pop(name, None)
            return self._copy(name, x, at, side), 0
        if name not in copies:  # once, as windows overlap
            copies[name] = self._copy(name, x, span, side)
        return copies[name], (at.start - span.start) * x.shape[1]

    def _copy(self, name: str, x: Tensor, at: range, side: int) -> Tensor:
        """Copy rows, zero where there is none."""
        out = self.scratch.get(name, (len(at), x.shape[1]), self.acc)
        here, there = overlap(at, x.shape[0])
        out[: here.start] = 0
        out[here.stop :] = 0
        out[here] = x[there]
        if self._tokens.ids is not None:  # what stands in padding must not spread
            ids = self._tokens.ids[side]
            out[here].masked_fill_((ids[self._batch, there] < 0)[:, None], 0)
        return out

    def _visited(self, piece: Piece) -> range:
        """Return the indices of the keys in all windows of a piece; some may not exist."""
        blocks = self._chunk.tiles - 1 + piece.blocks
        begin = self._first + piece.begin * self._chunk.rows
        return range(begin, begin + blocks * self._chunk.rows)

    def _tiled(self, x: Tensor, begin: int, count: int) -> Tensor:
        """View `count` rows of ``(n, …)`` for each tile, from its own first on."""
        key, *dim = x.stride()
        shape = (self._chunk.tiles, count, *x.shape[1:])
        return x.as_strided(shape, (self._chunk.rows * key, key, *dim), begin)

    def _windows(self, x: Tensor, piece: Piece) -> Tensor:
        return self._tiled(x, 0, piece.blocks * self._chunk.rows)

    # --- weights ---

    def pairs(self, p: Tensor) -> Tensor:
        """View products ``(N, R, W)`` as the weight sees them."""
        return p

    def start(self, p: Tensor, piece: Piece, bounded: bool) -> float:
        """Fill pairs with the weight's start; return what the product must scale it by."""
        return self.weight.start(p, piece, bounded)

    def start_exactly(self, p: Tensor, piece: Piece) -> float:
        """As `start`, in units of e."""
        return self.weight.start_exactly(p, piece)

    def factor(self, piece: Piece, bounded: bool) -> Tensor | None:
        """Return the weight's factor of a piece; None for 1."""
        return self.weight.factor(self._chunk, piece, bounded, self.scratch)

    def mask(self, piece: Piece) -> Tensor | None:
        """Return 1 where the key exists and is of the query's segment, else 0; None for all 1."""
        count, ids, at = self._tokens.k.shape[2], self._tokens.ids, self._visited(piece)
        here, there = overlap(at, count)
        if ids is None:
            if len(at) == here.stop - here.start:
                return None
            exists = self.scratch.get("flags", (len(at),), self.acc).zero_()
            exists[here] = 1
            return self._windows(exists, piece)[:, None]  # (N, 1, W)
        keys = self.scratch.get("flags", (len(at),), self.acc).fill_(-2)
        keys[here] = ids[1][self._batch, there]
        keys.masked_fill_(keys < 0, -2)  # padding matches nothing
        queries = self.scratch.get("own flags", (len(self._rows),), self.acc).fill_(-1)
        here, there = overlap(self._rows, self._tokens.q.shape[2])
        queries[here] = ids[0][self._batch, there]
        shape = (self._chunk.tiles, self._chunk.rows, piece.blocks * self._chunk.rows)
        out = self.scratch.get("mask", shape, self.acc)
        queries = queries.view(self._chunk.tiles, -1, 1)
        return torch.eq(queries, self._windows(keys, piece)[:, None], out=out)

    def distance_sum(self, ds: Tensor, piece: Piece) -> Tensor:
        """Sum ``(N, R, W)`` times distance, to be added to a view by `add_by_slope`."""
        distance = self.weight.distance(piece)  # type: ignore[union-attr]
        return (ds.sum(dim=0) * distance).sum(dtype=torch.float64)

    # --- results out ---

    def per_head(self, x: Tensor) -> Tensor:
        """View what belongs to this head of ``(B, H)``."""
        return x[self._batch, self._head]

    def place(self, to: Tensor) -> Tensor | None:
        """View the rows of ``(B, H, Nq, D)`` as ``(N, R, D)``; None where they do not fit."""
        if to.dtype != self.acc or self._rows.stop > to.shape[2]:
            return None
        own = self._own("to", to, self._head)
        begin = int(own.storage_offset()) + self._rows.start * own.stride(0)
        return self._tiled(own, begin, self._chunk.rows)

    def put(self, to: Tensor, x: Tensor) -> None:
        """Write ``(N, R, …)`` to the rows of ``(B, H, Nq, …)``."""
        rows = x.flatten(0, 1)
        own = to[self._batch, self._head, self._rows.start : self._rows.stop]
        own.copy_(rows if own.shape[0] == rows.shape[0] else rows[: own.shape[0]])

    def add_to_keys(self, to: Sum, piece: Piece, pairs: Tensor, x: Tensor, scale: float) -> None:
        """Add ``scale * pairs^T x``; pairs ``(N, R, W)``, x ``(N, R, D)``.

        Windows overlap: of few tiles each is a product of its own, of many those of every m-th
        tile, which follow one another, are one batched product.
        """
        head = to.x[self._batch - to.row, self._head // self._tokens.group - to.head]
        at, count = self._visited(piece), head.shape[0]
        inside = at.start >= 0 and at.stop <= count
        if inside:
            total = head[at.start : at.stop]
        else:
            total = self.scratch.get("add", (len(at), head.shape[1]), self.acc).zero_()
        rows, step = self._chunk.rows, piece.blocks
        if step >= self._chunk.tiles:
            windows = self._tiled(total, int(total.storage_offset()), step * rows)
            for own, left, right in zip(
                windows.unbind(), pairs.mT.unbind(), x.unbind(), strict=True
            ):
                own.addmm_(left, right, alpha=scale)
        else:
            for tile in range(step):
                left, right = pairs[tile::step], x[tile::step]
                own = total[tile * rows : (tile + step * left.shape[0]) * rows]
                own = own.view(left.shape[0], step * rows, head.shape[1])
                own.baddbmm_(left.mT, right, alpha=scale)
        if not inside:
            here, there = overlap(at, count)
            head[there] += total[here]


def overlap(at: range, count: int) -> tuple[slice, slice]:
    """Return which of the indices `at` are in ``[0, count)``: within `at`, and as indices."""
    low = min(max(at.start, 0), count)
    high = max(low, min(at.stop, count))
    if low == high:
        return slice(0, 0), slice(low, low)
    return slice(low - at.start, high - at.start), slice(low, high)


def chunks(schedule: Schedule) -> Iterator[Chunk]:
    """Batch neighbouring tiles, padded to the widest, while that wastes little."""
    rows, most = schedule.rows, max(1, COLUMNS // schedule.rows)
    fit, spare = max(1, PAIRS // rows**2), WASTE // rows**2  # in blocks
    begin = left = right = own = 0
    for tile, (before, after) in enumerate(
        zip(schedule.left.tolist(), schedule.right.tolist(), strict=True)
    ):
        wide_left = before if before > left else left
        wide_right = after if after > right else right
        blocks, tiles = 1 + wide_left + wide_right, tile + 1 - begin
        mine = 1 + before + after
        full = tiles * (blocks if blocks < most else most) > fit
        if tile > begin and (full or tiles * blocks - own - mine > spare):
            yield Chunk(begin, tile - begin, rows, rows, left, right)
            begin, own, wide_left, wide_right = tile, 0, before, after
        left, right, own = wide_left, wide_right, own + mine
    yield Chunk(begin, len(schedule.first) - begin, rows, rows, left, right)


def pieces(chunk: Chunk, first: int, count: int) -> Iterator[Piece]:
    """Cut the blocks that a chunk visits and that hold keys into pieces, the diagonal's first.

    The first tile begins at key `first`, of `count` that exist.
    """
    rows, most = chunk.rows, max(1, COLUMNS // chunk.rows)
    low = max(-chunk.left, -((first + chunk.tiles * rows - 1) // rows))
    high = min(chunk.right, (count - 1 - first) // rows)
    if low > high:  # no key exists; the mask says so
        yield Piece(0, 1)
        return
    near = Piece(low, low)
    if low <= 0 <= high:
        near = Piece(max(low, -most), min(high, most) + 1)
        yield near
    elif high < 0:
        near = Piece(high + 1, high + 1)
    for end in range(near.begin, low, -most):
        yield Piece(max(low, end - most), end)
    for begin in range(near.end, high + 1, most):
        yield Piece(begin, min(high + 1, begin + most))


def tile_rows(count: int, bandwidth: int) -> int:
    """Choose the queries of a tile: few waste few pairs, many make few and fast products."""
    rows = 32 if bandwidth < NARROW else 64
    return min(rows, 1 << max(count - 1, 0).bit_length())


def first_positions(
    start: int, count: int, rows: int
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return the position of each tile's first query."""
    return start + rows * np.arange(-(-count // rows), dtype=np.int64)

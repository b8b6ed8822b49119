"""A segment of G heads' queries with the keys in their reach, laid out for batched products.

Tiles and blocks are squares of one size, so that a tile and all keys that it visits, its own
included, are one stack of equal products.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from plsh.tiles import Chunk, gap

from ._scratch import AnyArray, Scratch
from ._weights import LOG2E, Decay, Steps

PRODUCT = 1 << 18
"""Most multiply-adds of one product. Above, OpenBLAS wakes its threads, which tiles pay dearly."""
WIDE = 1 << 9
"""Reach in keys from which tiles of twice the rows pay: more pairs, but fewer sums over keys."""


class Size(NamedTuple):
    """The size of tiles and chunks in one direction; measured."""

    rows: int
    """Queries of a tile that reaches far."""
    pairs: int
    """Pairs of a chunk: fewer cost more calls, more leave the second-level cache."""


FORWARD = Size(64, 1 << 19)
BACKWARD = Size(64, 1 << 18)


class Job(NamedTuple):
    """A segment of G heads that share a schedule, for batch rows that share their positions."""

    q: AnyArray  # (B, G, Nq, D), of the whole heads
    k: AnyArray  # (B, G, Nk, D)
    v: AnyArray  # (B, G, Nk, Dv)
    ids: tuple[AnyArray, AnyArray] | None  # segment ids (B, Nq), (B, Nk)
    weight: Decay | Steps
    scale: float
    q_start: int  # position of query 0
    keys: range  # positions of the keys
    rows: range  # queries of this segment


def tile_rows(queries: int, reach: int, inner: int, most: int) -> int:
    """Choose the queries of a tile, which are the keys of a block too."""
    rows = most if reach >= WIDE else most // 2
    rows = min(rows, -(-queries // 8) * 8)
    limit = math.isqrt(PRODUCT // inner)
    return rows if rows <= limit else max(1, limit // 16 * 16 or limit)


class Segment:
    """Copies of a segment's tokens, in order and zero where there is none, and views of them.

    Block 0 of the keys begins at position `origin`. `size` bounds tiles and chunks. Keys for the
    logits and queries have room for `extra` numbers more, 1 in the keys.
    """

    def __init__(
        self, job: Job, scratch: Scratch, acc: np.dtype[Any], size: Size, extra: int = 0
    ) -> None:
        self.job, self.acc, self.scratch, self.size, self.extra = job, acc, scratch, size, extra
        self.batch, self.heads = job.q.shape[:2]
        inner = max(job.q.shape[3] + extra, job.v.shape[3] + extra, job.weight.samples)
        reach = min(job.weight.width, len(job.keys))
        self.rows = rows = tile_rows(len(job.rows), reach, inner, size.rows)
        self.count = tiles = -(-len(job.rows) // rows)
        first = job.q_start + job.rows.start + rows * np.arange(tiles)
        move = gap(first, rows, job.keys)  # far keys are placed next to the tiles
        keys = range(job.keys.start + move, job.keys.stop + move)
        self.schedule = job.weight.schedule(first, rows, keys, move)
        self.widest = self.schedule.widest
        self.blocks = self.widest.left + tiles + self.widest.right
        origin = int(first[0]) - self.widest.left * rows
        end = origin + self.blocks * rows
        low = min(max(origin, keys.start), end)
        high = max(low, min(end, keys.stop))
        self.held = slice(low - origin, high - origin)  # of the blocks' positions, with keys
        self.source = slice(low - keys.start, high - keys.start)  # of the keys
        self._ids = None if job.ids is None else self._copy_ids(*job.ids)
        self.q = self.copy_queries("q", job.q)
        self.kt = self.copy_transposed("kt", job.k)
        dims = job.q.shape[3]
        self.kt[..., :dims, :] *= acc.type(job.scale * LOG2E)
        # Of the logits, (B, G)
        self.bounds = _norm(self.q[..., :dims]) * _norm(self.kt[..., :dims, :].swapaxes(-1, -2))
        self.bound = float(self.bounds.max(initial=0))
        farthest = rows * max(self.widest.left + 1, self.widest.right + 1)
        self.slant = job.weight.steepest * farthest  # of the bias

    @functools.cached_property
    def v(self) -> AnyArray:
        """The values, ``(B, G, blocks, rows, Dv)``; the backward pass needs them transposed."""
        return self.copy_keys("v", self.job.v)

    def copy_queries(self, name: str, x: AnyArray) -> AnyArray:
        """Copy ``(B, G, Nq, D)`` to the segment's tiles ``(B, G, tiles, rows, D + extra)``."""
        own = slice(self.job.rows.start, self.job.rows.stop)
        shape = (self.batch, self.heads, self.count, self.rows, x.shape[3] + self.extra)
        out = self.scratch.get(name, shape, self.acc)
        self._copy(out[..., : x.shape[3]], x, own, slice(0, len(self.job.rows)), 0)
        return out

    def copy_keys(self, name: str, x: AnyArray) -> AnyArray:
        """Copy ``(B, G, Nk, D)`` to the segment's blocks ``(B, G, blocks, rows, D)``."""
        shape = (self.batch, self.heads, self.blocks, self.rows, x.shape[3])
        out = self.scratch.get(name, shape, self.acc)
        self._copy(out, x, self.source, self.held, 1)
        return out

    def copy_transposed(self, name: str, x: AnyArray) -> AnyArray:
        """Copy ``(B, G, Nk, D)`` to transposed blocks ``(B, G, blocks, D + extra, rows)``.

        A product with a transposed view would take half as long again.
        """
        dims = x.shape[3]
        shape = (self.batch, self.heads, self.blocks, dims + self.extra, self.rows)
        out = self.scratch.get(name, shape, self.acc)
        self._copy(out[..., :dims, :].swapaxes(-1, -2), x, self.source, self.held, 1)
        out[..., dims:, :] = 1
        return out

    def _copy(self, out: AnyArray, x: AnyArray, source: slice, held: slice, side: int) -> None:
        """Fill ``(B, G, blocks, rows, D)``, zero outside the positions `held`."""
        x, rows = x[:, :, source], self.rows
        if self.job.ids is not None:  # what stands in padding must not spread
            padding = self.job.ids[side][:, None, source, None] < 0
            x = np.where(padding, np.zeros((), x.dtype), x)
        out[:, :, : held.start // rows] = 0
        out[:, :, -(-held.stop // rows) :] = 0
        low, high = -(-held.start // rows), held.stop // rows  # whole blocks
        if low < high:
            whole = x[:, :, low * rows - held.start : high * rows - held.start]
            out[:, :, low:high] = whole.reshape(*x.shape[:2], high - low, rows, x.shape[3])
        for block in {held.start // rows, held.stop // rows}:
            if not low <= block < high and block < out.shape[2]:  # partly held
                begin = max(held.start - block * rows, 0)
                end = min(held.stop - block * rows, rows)
                at = block * rows - held.start
                out[:, :, block] = 0
                out[:, :, block, begin:end] = x[:, :, at + begin : at + end]

    def _copy_ids(self, ids_q: AnyArray, ids_k: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Copy segment ids to ``(B, 1, tiles, rows, 1)`` and ``(B, 1, blocks, 1, rows)``.

        A negative one, which is padding, and one of no token become numbers that match nothing.
        """
        queries = np.full((self.batch, self.count * self.rows), -1, dtype=np.int64)
        own = slice(self.job.rows.start, self.job.rows.stop)
        queries[:, : len(self.job.rows)] = ids_q[:, own]  # of any integer dtype
        keys = np.full((self.batch, self.blocks * self.rows), -2, dtype=np.int64)
        keys[:, self.held] = ids_k[:, self.source]
        queries[queries < 0], keys[keys < 0] = -1, -2
        return (
            queries.reshape(self.batch, 1, -1, self.rows, 1),
            keys.reshape(self.batch, 1, -1, 1, self.rows),
        )

    def chunks(self) -> list[Chunk]:
        """Batch neighbouring tiles; the largest chunk comes first, so that memory is made once."""
        chunks = list(self.schedule.chunks(self.size.pairs))
        largest = max(chunks, key=lambda chunk: chunk.tiles * chunk.pairs)
        chunks.remove(largest)
        return [largest, *chunks]

    def batches(self, chunk: Chunk) -> Iterator[slice]:
        """Cut the batch rows so that a step stays at the size of a chunk."""
        step = max(1, self.size.pairs // (self.heads * chunk.tiles * chunk.pairs))
        for b in range(0, self.batch, step):
            yield slice(b, min(b + step, self.batch))

    def shape(self, chunk: Chunk, batch: slice) -> tuple[int, ...]:
        """Return the shape of a chunk's pairs: ``(b, G, tiles, blocks, rows, rows)``."""
        blocks = chunk.left + 1 + chunk.right
        return (batch.stop - batch.start, self.heads, chunk.tiles, blocks, self.rows, self.rows)

    def tiles(self, x: AnyArray, chunk: Chunk, batch: slice) -> AnyArray:
        """View a chunk's tiles of ``(B, G, tiles, rows, D)``: ``(b, G, tiles, 1, rows, D)``."""
        return x[batch, :, chunk.tile : chunk.tile + chunk.tiles, None]

    def keys(self, x: AnyArray, chunk: Chunk, batch: slice) -> AnyArray:
        """View what a chunk visits of ``(B, G, blocks, …)``: ``(b, G, tiles, blocks, …)``."""
        blocks = chunk.left + 1 + chunk.right
        return window(x, batch, self._block(chunk), chunk.tiles, blocks)

    def _block(self, chunk: Chunk) -> int:
        return chunk.tile + self.widest.left - chunk.left

    def add_to_keys(self, total: AnyArray, add: AnyArray, chunk: Chunk) -> None:
        """Add ``(b, G, tiles, blocks, rows, D)`` to ``(b, G, all blocks, rows, D)``.

        Neighbouring tiles share blocks: one tile at a time, or one block of all, whichever takes
        less time; a tile's are contiguous.
        """
        begin, (tiles, blocks) = self._block(chunk), add.shape[2:4]
        if tiles <= 4 * blocks:
            for tile in range(tiles):
                total[:, :, begin + tile : begin + tile + blocks] += add[:, :, tile]
        else:
            for block in range(blocks):
                total[:, :, begin + block : begin + block + tiles] += add[:, :, :, block]

    def scores(self, chunk: Chunk, batch: slice, out: AnyArray) -> None:
        """Fill ``(b, G, tiles, blocks, rows, rows)`` with logits in units of log2, with bias."""
        np.matmul(self.tiles(self.q, chunk, batch), self.keys(self.kt, chunk, batch), out=out)
        bias = self.job.weight.bias(chunk)
        if bias is not None:
            out += bias if bias.shape[0] == 1 else bias[batch]

    def hide_segments(self, p: AnyArray, chunk: Chunk, batch: slice) -> None:
        """Set a chunk's pairs of unequal segments, and of padding, to 0."""
        if self._ids is not None:
            queries, keys = self._ids
            p *= self.tiles(queries, chunk, batch) == self.keys(keys, chunk, batch)


def flat(x: AnyArray) -> AnyArray:
    """View ``(B, G, blocks, rows, D)`` as tokens ``(B, G, blocks * rows, D)``."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def window(x: AnyArray, batch: slice, begin: int, tiles: int, blocks: int) -> AnyArray:
    """View contiguous ``(B, G, n, …)`` as overlapping windows ``(b, G, tiles, blocks, …)``.

    What numpy's ``as_strided`` does, which takes ten times as long.
    """
    shape = (batch.stop - batch.start, x.shape[1], tiles, blocks, *x.shape[3:])
    if x.size == 0:
        return np.zeros(shape, x.dtype)
    offset = batch.start * x.strides[0] + begin * x.strides[2]
    return np.ndarray(shape, x.dtype, x, offset, (*x.strides[:3], *x.strides[2:]))


def _norm(x: AnyArray) -> AnyArray:
    """Return the largest norm in each row and head of ``(B, G, n, rows, D)``; NaN and inf stay."""
    norms: AnyArray = np.sqrt(np.einsum("bhnrd,bhnrd->bhnr", x, x).max(axis=(2, 3), initial=0))
    return norms

"""A segment of G heads' queries with the keys in their reach, laid out for batched products."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from plsh.tiles import Chunk, Schedule

from ._scratch import AnyArray, Scratch
from ._weights import LOG2E, Decay, Steps

PRODUCT = 1 << 18
"""Most multiply-adds of one product. Above, OpenBLAS wakes its threads, which tiles pay dearly."""


class Size(NamedTuple):
    """The size of tiles and chunks in one direction; measured."""

    rows: int
    """Queries of a tile: fewer visit fewer pairs, more add up fewer sums over keys."""
    pairs: int
    """Pairs of a chunk: fewer cost more calls, more leave the second-level cache."""


FORWARD = Size(32, 1 << 19)
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
    k_start: int
    rows: range  # queries of this segment


def block_columns(rows: int, reach: int, inner: int) -> int:
    """Choose the keys of a block: products below the limit, hardly wider than the reach."""
    most = max(8, PRODUCT // (max(inner, rows) * rows))
    return max(8, min(most, 256, -(-reach // 8) * 8))


class Segment:
    """Copies of a segment's tokens, in order and zero where there is none, and views of them.

    Column c of the key copies is position ``origin + c``. `size` bounds tiles and chunks.
    """

    def __init__(self, job: Job, scratch: Scratch, acc: np.dtype[Any], size: Size) -> None:
        self.job, self.acc, self.scratch, self.size = job, acc, scratch, size
        (self.batch, self.heads), count = job.q.shape[:2], len(job.rows)
        rows = min(size.rows, 1 << max(count - 1, 0).bit_length())
        tiles = -(-count // rows)
        first = job.q_start + job.rows.start + rows * np.arange(tiles)
        reach = job.weight.reach(first, rows)
        farthest = int(max(reach.before.max(), reach.after.max()))
        inner = max(job.q.shape[-1], job.v.shape[-1], job.weight.samples)
        self.schedule = Schedule.of(first, rows, block_columns(rows, farthest, inner), reach)
        job.weight.prepare(self.schedule)

        widest = self.schedule.widest
        self.origin = int(first[0]) - widest.left * widest.columns
        self.keys = tiles * rows + (widest.left + widest.right) * widest.columns
        low = max(self.origin, job.k_start)
        high = max(low, min(self.origin + self.keys, job.k_start + job.k.shape[2]))
        self.held = slice(low - self.origin, high - self.origin)  # columns that hold a key
        self.source = slice(low - job.k_start, high - job.k_start)
        self.k, self.v = self.copy_keys("k", job.k), self.copy_keys("v", job.v)
        self.q = self.copy_queries("q", job.q)
        self.q *= acc.type(job.scale * LOG2E)
        # Products run faster against a transposed copy than against a transposed view; a few rows
        # do not earn it.
        self.kt = self.transpose("kt", self.k) if tiles > 1 else self.k.swapaxes(-1, -2)
        self.bounds = _norm(self.q) * _norm(self.k)  # of the logits, (B, G)
        self.bound = float(self.bounds.max(initial=0))
        self.slant = job.weight.steepest * (farthest + rows)  # of the bias

    def copy_keys(self, name: str, x: AnyArray) -> AnyArray:
        """Copy ``(B, G, Nk, D)`` to the segment's columns ``(B, G, keys, D)``."""
        return self._copy(name, x, self.source, self.keys, self.held, 1)

    def copy_queries(self, name: str, x: AnyArray) -> AnyArray:
        """Copy ``(B, G, Nq, D)`` to the segment's rows, the last tile filled up."""
        own = slice(self.job.rows.start, self.job.rows.stop)
        size = self.schedule.first.size * self.schedule.rows
        return self._copy(name, x, own, size, slice(0, len(self.job.rows)), 0)

    def _copy(
        self, name: str, x: AnyArray, source: slice, size: int, held: slice, side: int
    ) -> AnyArray:
        out = self.scratch.get(name, (self.batch, self.heads, size, x.shape[3]), self.acc)
        out[:, :, : held.start] = 0
        out[:, :, held.stop :] = 0
        out[:, :, held] = x[:, :, source]
        if self.job.ids is not None:  # what stands in padding must not spread
            padding = self.job.ids[side][:, source] < 0
            out.swapaxes(1, 2)[:, held][padding] = 0
        return out

    def transpose(self, name: str, x: AnyArray) -> AnyArray:
        """Copy ``(B, G, keys, D)`` to ``(B, G, D, keys)``."""
        # A row length off the powers of two keeps the columns out of one another's cache sets, and
        # a piece at a time its rows in the first-level cache.
        shape = (self.batch, self.heads, x.shape[3], x.shape[2] + 16)
        out = self.scratch.get(name, shape, self.acc)[..., : x.shape[2]]
        for key in range(0, x.shape[2], 128):
            out[..., key : key + 128] = x[:, :, key : key + 128].swapaxes(-1, -2)
        return out

    def tiles(self, x: AnyArray, chunk: Chunk, batch: slice) -> AnyArray:
        """View a chunk's rows of ``(B, G, queries, D)``: ``(b, G, tiles, rows, D)``."""
        own = slice(chunk.tile * chunk.rows, (chunk.tile + chunk.tiles) * chunk.rows)
        part = x[batch, :, own]
        return part.reshape(*part.shape[:2], chunk.tiles, chunk.rows, x.shape[3])

    def chunks(self) -> Iterator[Chunk]:
        """Batch neighbouring tiles."""
        return self.schedule.chunks(self.size.pairs)

    def batches(self, chunk: Chunk) -> Iterator[slice]:
        """Cut the batch rows so that a step stays at the size of a chunk."""
        step = max(1, self.size.pairs // (self.heads * chunk.tiles * chunk.pairs))
        for b in range(0, self.batch, step):
            yield slice(b, min(b + step, self.batch))

    def shape(self, chunk: Chunk, batch: slice) -> tuple[int, ...]:
        """Return the shape of a chunk's pairs: ``(b, G, tiles, pairs)``."""
        return (batch.stop - batch.start, self.heads, chunk.tiles, chunk.pairs)

    def rows(self, chunk: Chunk) -> slice:
        """Return the queries of a chunk, as indices of the whole head."""
        begin = self.job.rows.start + chunk.tile * chunk.rows
        return slice(begin, min(begin + chunk.tiles * chunk.rows, self.job.rows.stop))

    def window(self, x: AnyArray, chunk: Chunk, side: int, batch: slice) -> AnyArray:
        """View one side's keys of ``(B, G, keys, D)``: ``(b, G, tiles, blocks, columns, D)``.

        The windows of neighbouring tiles overlap.
        """
        begin, blocks, columns = chunk.sides[side]
        part = x[batch, :, self._column(chunk) + begin :]
        b, head, key, dim = x.strides
        return strided(
            part,
            (*part.shape[:2], chunk.tiles, blocks, columns, x.shape[3]),
            (b, head, chunk.rows * key, columns * key, key, dim),
        )

    def _column(self, chunk: Chunk) -> int:
        return int(self.schedule.first[chunk.tile]) - self.origin

    def add_to_keys(self, total: AnyArray, add: AnyArray, chunk: Chunk, side: int) -> None:
        """Add ``(b, G, tiles, blocks, columns, D)`` to one side's keys of ``(b, G, keys, D)``.

        Overlapping windows are added tile by tile, or `rows` keys at a time for all tiles at once,
        whichever takes fewer steps.
        """
        begin = self._column(chunk) + chunk.sides[side][0]
        size = add.shape[3] * add.shape[4]
        add = add.reshape(*add.shape[:3], size, add.shape[-1])
        pieces = range(0, size, chunk.rows)
        if chunk.tiles <= len(pieces):
            for tile in range(chunk.tiles):
                at = begin + tile * chunk.rows
                total[:, :, at : at + size] += add[:, :, tile]
            return
        b, head, key, dim = total.strides
        for piece in pieces:
            width = min(chunk.rows, size - piece)
            shape = (*total.shape[:2], chunk.tiles, width, total.shape[3])
            strides = (b, head, chunk.rows * key, key, dim)
            part = strided(total[:, :, begin + piece :], shape, strides)
            part += add[:, :, :, piece : piece + width]

    def scores(self, chunk: Chunk, batch: slice, out: AnyArray) -> None:
        """Fill ``(b, G, tiles, pairs)`` with logits in units of log2, bias included."""
        q = self.tiles(self.q, chunk, batch)[:, :, :, None]
        keys = self.kt.swapaxes(-1, -2)
        for side, view in enumerate(chunk.split(out)):
            if view.size:
                np.matmul(q, self.window(keys, chunk, side, batch).swapaxes(-1, -2), out=view)
        bias = self.job.weight.bias(chunk)
        if bias is not None:
            out += bias if bias.shape[0] == 1 else bias[batch]

    def factor(self, chunk: Chunk, scratch: Scratch) -> AnyArray:
        """Return the weight's factor of a chunk, ``(G, …)``, shared by the batch rows."""
        return self.job.weight.factor(chunk, scratch)

    def hide_segments(self, p: AnyArray, chunk: Chunk, batch: slice) -> None:
        """Set pairs ``(b, G, tiles, pairs)`` of unequal segments, and of padding, to 0."""
        if self.job.ids is None:
            return
        ids_q, ids_k = self.job.ids
        queries = np.full((p.shape[0], chunk.tiles * chunk.rows), -1, dtype=np.int64)
        own = ids_q[batch, self.rows(chunk)]
        queries[:, : own.shape[1]] = own  # of any integer dtype, unsigned too
        np.maximum(queries, -1, out=queries)
        keys = np.full((p.shape[0], 1, self.keys, 1), -2, dtype=np.int64)
        keys[:, 0, self.held, 0] = ids_k[batch, self.source]
        keys[keys < 0] = -2  # padding matches nothing
        ids = queries.reshape(p.shape[0], 1, chunk.tiles, 1, chunk.rows, 1)
        for side, view in enumerate(chunk.split(p)):
            if view.size:
                view *= ids == self.window(keys, chunk, side, slice(None)).swapaxes(-1, -2)


def strided(x: AnyArray, shape: tuple[int, ...], strides: tuple[int, ...]) -> AnyArray:
    """View the memory from `x` on: numpy's ``as_strided``, which takes five times as long."""
    if x.size == 0:
        return np.zeros(shape, x.dtype)
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    offset = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return np.ndarray(shape, x.dtype, base, offset, strides)


def _norm(x: AnyArray) -> AnyArray:
    """Return the largest norm in each row and head of ``(B, G, n, D)``; NaN and inf stay."""
    square = np.einsum("bhnd,bhnd->bhn", x, x)
    norms: AnyArray = np.sqrt(square.max(axis=-1, initial=0))
    return norms

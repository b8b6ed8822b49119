"""The single-pass band kernel: every pair in the band is scored once.

For each chunk of tiles, each step one batched product or one pass over contiguous memory:

    S = q k^T + bias        E = exp2(S - shift)        P = E * factors        out = P v / sum(P)

Logits are in units of log2, whose exponential takes half the time. The shift is one number a
tile, the largest logit there, hidden pairs included; it is left out where the norms of q and k
bound the logits. A row whose sum then underflows is done again from its own visible maximum.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from plsh.tiles import Chunk

from ._scratch import AnyArray, Scratch
from ._segment import BACKWARD, FORWARD, Job, Segment, flat
from ._weights import LOG2E, Decay

LN2 = math.log(2)
FOLD = 8
"""Most blocks that are summed one after another."""


class Limits(NamedTuple):
    """Exponents of 2 between which an accumulation dtype is safe."""

    bound: float  # logits within need no shift
    floor: float  # below, exponentials go denormal, which costs a hundred times as much
    least: float  # a row's sum below has lost digits


LIMITS = {
    np.dtype(np.float32): Limits(60.0, -120.0, 2.0**-80),
    np.dtype(np.float64): Limits(500.0, -1000.0, 2.0**-900),
}


def forward(job: Job, scratch: Scratch, acc: np.dtype[Any], out: AnyArray, lse: AnyArray) -> None:
    """Write a job's rows of ``out (B, G, Nq, Dv)`` and ``lse (B, G, Nq)``."""
    segment, limits = Segment(job, scratch, acc, FORWARD), LIMITS[acc]
    large = ~(segment.bounds < limits.bound)[:, :, None]  # NaN too
    shifted = bool(large.any())
    clamped = shifted or segment.bound + segment.slant > -limits.floor
    shape = (*segment.q.shape[:4], job.v.shape[3])  # (B, G, tiles, rows, Dv)
    o, total = scratch.get("o", shape, acc), np.empty(shape[:4], dtype=acc)
    shift = np.zeros((*shape[:3], 1), dtype=acc)
    for chunk in segment.chunks():
        own = slice(chunk.tile, chunk.tile + chunk.tiles)
        factors = job.weight.factors(chunk, scratch)
        for batch in segment.batches(chunk):
            p = scratch.get("p", segment.shape(chunk, batch), acc)
            segment.scores(chunk, batch, p)
            if shifted:
                # 0 in a small row, so that it does not depend on its mates.
                top = np.fmax.reduce(p, axis=(3, 4, 5))  # (b, G, tiles)
                shift[batch, :, own, 0] = np.where(large[batch], top, 0)
                p -= shift[batch, :, own, :, None, None]
            if clamped:
                np.clip(p, acc.type(limits.floor), acc.type(np.inf), out=p)
            np.exp2(p, out=p)
            for blocks, factor in factors:
                p[:, :, :, blocks] *= factor
            segment.hide_segments(p, chunk, batch)
            _sum(segment, p, chunk, batch, total[batch, :, own], o[batch, :, own])
    log = _log(total, shift)
    sums = np.matmul(o, np.ones((shape[4], 1), acc))[..., 0]
    right = ((total >= limits.least) | (total == 0)) & np.isfinite(sums)
    rows, size = slice(job.rows.start, job.rows.stop), len(job.rows)
    divisor = np.where(total == 0, 1, total).reshape(*total.shape[:2], -1, 1)
    np.divide(flat(o)[:, :, :size], divisor[:, :, :size], out=out[:, :, rows], casting="unsafe")
    for b, h, tile in np.argwhere(~right.all(axis=-1)):  # lost digits, NaN, or past the range
        o[b, h, tile], log[b, h, tile] = _by_row(segment, int(tile), slice(b, b + 1), int(h))
        again = slice(tile * segment.rows, min((tile + 1) * segment.rows, size))
        out[b, h, rows][again] = flat(o)[b, h, again]
    lse[:, :, rows] = log.reshape(*log.shape[:2], -1)[:, :, :size] - job.weight.normaliser


def _sum(
    segment: Segment, p: AnyArray, chunk: Chunk, batch: slice, total: AnyArray, out: AnyArray
) -> None:
    """Fill in the sums of P ``(b, G, tiles, rows)`` and of P v ``(b, G, tiles, rows, Dv)``."""
    _sum_blocks(np.matmul(p, np.ones((segment.rows, 1), p.dtype))[..., 0], total)
    values = segment.keys(segment.v, chunk, batch)
    _sum_blocks(_product(p, values, segment.scratch), out)


def _log(total: AnyArray, shift: AnyArray) -> AnyArray:
    """Return the natural log of the sums in float64, -inf in a row that sees no key."""
    dead = total == 0
    log = np.log2(np.where(dead, 1, total), dtype=np.float64) + shift
    return np.where(dead, -np.inf, log * LN2)


def _by_row(segment: Segment, tile: int, batch: slice, head: int) -> tuple[AnyArray, AnyArray]:
    """One tile again, each row from its own largest visible logit: ``(rows, Dv), (rows,)``."""
    chunk = segment.schedule.one(tile)
    x = np.empty(segment.shape(chunk, batch), dtype=segment.acc)  # (1, G, 1, blocks, rows, rows)
    segment.scores(chunk, batch, x)
    weight = np.ones_like(x)
    for blocks, factor in segment.job.weight.factors(chunk, segment.scratch):
        weight[:, :, :, blocks] *= factor
    segment.hide_segments(weight, chunk, batch)
    seen = weight > 0
    x[seen] += np.log2(weight[seen])
    x[~seen] = -np.inf
    top = x.max(axis=(3, 5), keepdims=True)
    top = np.where(np.isneginf(top), 0, top)  # (1, G, 1, 1, rows, 1)
    p = np.exp2(x - top)
    total = p.sum(axis=(3, 5), keepdims=True)
    p /= np.where(total == 0, 1, total)  # first: a mean of values is within their range
    out = np.empty((*total.shape[:3], segment.rows, segment.v.shape[-1]), dtype=p.dtype)
    _sum(segment, p, chunk, batch, np.empty(out.shape[:4], dtype=p.dtype), out)
    log = _log(total[:, :, :, 0, :, 0], top[:, :, :, 0, :, 0])
    return out[0, head, 0], log[0, head, 0]


class Given(NamedTuple):
    """What the backward pass is given of the job's heads."""

    out: AnyArray  # (B, G, Nq, Dv)
    lse: AnyArray  # (B, G, Nq)
    grad_out: AnyArray  # (B, G, Nq, Dv)
    grad_lse: AnyArray | None  # (B, G, Nq)


def backward(
    job: Job,
    scratch: Scratch,
    acc: np.dtype[Any],
    given: Given,
    dq: AnyArray,
    dk: AnyArray,
    dv: AnyArray,
    key_heads: list[int],
) -> AnyArray:
    """Write a job's rows of ``dq (B, G, Nq, D)``, add to ``dk`` and ``dv (B, Hkv, Nk, …)``.

    With the merged output O and P normalised by the merged lse, ``dS = P * (dP - rowsum(dO * O) +
    dlse)``. `key_heads` names the key head of each head. Returns the gradient by the slopes,
    ``(B, G)`` float64, zeros under a step weight.
    """
    # Two terms ride in an extra number of each row: q k^T - lse, and dO v^T - rowsum(...).
    segment, limits = Segment(job, scratch, acc, BACKWARD, extra=1), LIMITS[acc]
    dims, dims_v = job.q.shape[3], job.v.shape[3]
    k, vt = segment.copy_keys("k", job.k), segment.copy_transposed("vt", job.v)
    do = segment.copy_queries("do", given.grad_out)
    lse, base = _row_terms(segment, given, do[..., :dims_v])
    np.negative(lse, out=segment.q[..., dims])
    np.negative(base, out=do[..., dims_v])
    by_query = scratch.get("dq", (*segment.q.shape[:4], dims), acc)
    by_key, by_value = (
        scratch.get(name, (*k.shape[:4], d), acc) for name, d in (("dk", dims), ("dv", dims_v))
    )
    by_key[...], by_value[...] = 0, 0
    by_slope = np.zeros((segment.batch, segment.heads))
    # A visible pair's exponent is at most 0; a hidden one's may be anything, within these.
    spread = segment.bound + segment.slant + float(np.abs(lse).max(initial=0))
    clamped = not spread < -limits.floor
    for chunk in segment.chunks():
        factors = job.weight.factors(chunk, scratch)
        for batch in segment.batches(chunk):
            p, ds = (scratch.get(x, segment.shape(chunk, batch), acc) for x in ("p", "ds"))
            q, go = (segment.tiles(x, chunk, batch) for x in (segment.q, do))
            segment.scores(chunk, batch, p)
            if clamped:
                np.clip(p, acc.type(limits.floor), acc.type(1), out=p)
            np.exp2(p, out=p)
            for blocks, factor in factors:
                p[:, :, :, blocks] *= factor
            segment.hide_segments(p, chunk, batch)
            np.matmul(go, segment.keys(vt, chunk, batch), out=ds)
            ds *= p
            own = by_query[batch, :, chunk.tile : chunk.tile + chunk.tiles]
            keys = segment.keys(k, chunk, batch)
            _sum_blocks(_product(ds, keys, scratch), own)
            pairs = ((by_key, ds, q[..., :dims]), (by_value, p, go[..., :dims_v]))
            for total, left, right in pairs:
                add = _product(left.swapaxes(-1, -2), right, scratch)
                segment.add_to_keys(total[batch], add, chunk)
            if isinstance(job.weight, Decay):
                by_slope[batch] -= _dot(ds, job.weight.distance(chunk))
    rows = slice(job.rows.start, job.rows.stop)
    by_query *= acc.type(job.scale)
    dq[:, :, rows] = flat(by_query)[:, :, : len(job.rows)]
    by_key *= acc.type(job.scale)
    for h, g in enumerate(key_heads):
        dk[:, g, segment.source] += flat(by_key)[:, h, segment.held]
        dv[:, g, segment.source] += flat(by_value)[:, h, segment.held]
    return by_slope


def _product(left: AnyArray, right: AnyArray, scratch: Scratch) -> AnyArray:
    """Multiply matrices into scratch memory, valid until the next product."""
    shape = (*left.shape[:-1], right.shape[-1])
    return np.matmul(left, right, out=scratch.get("product", shape, left.dtype))


def _sum_blocks(x: AnyArray, out: AnyArray) -> None:
    """Sum ``(b, G, tiles, blocks, …)`` over blocks; halves onto halves, to lose no digits."""
    blocks = x.shape[3]
    while blocks > FOLD:
        half = blocks // 2
        x[:, :, :, :half] += x[:, :, :, blocks - half : blocks]
        blocks -= half
    np.add.reduce(x[:, :, :, :blocks], axis=3, out=out)


def _dot(x: AnyArray, y: AnyArray) -> AnyArray:
    """Sum the products of ``(b, G, tiles, blocks, rows, rows)`` and ``(blocks, rows, rows)``."""
    # Block by block: OpenBLAS wakes its threads for longer ones.
    products = np.matmul(x.reshape(*x.shape[:4], 1, -1), y.reshape(y.shape[0], -1, 1))
    total: AnyArray = products.sum(axis=(2, 3, 4, 5), dtype=np.float64)
    return total


def _row_terms(segment: Segment, given: Given, do: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Return the lse in units of log2 and rowsum(dO * O) - dlse, ``(B, G, tiles, rows)``.

    A row that saw no key, and what its cotangents hold, is zeroed.
    """
    job, count = segment.job, len(segment.job.rows)
    rows, tokens = slice(job.rows.start, job.rows.stop), (*do.shape[:2], do.shape[2] * do.shape[3])
    known = given.lse[:, :, rows]
    dead = np.zeros(tokens, dtype=bool)
    dead[:, :, :count] = np.isneginf(known)
    lse: AnyArray = np.zeros(tokens, dtype=segment.acc)
    lse[:, :, :count] = (known + job.weight.normaliser) * LOG2E
    do[dead.reshape(do.shape[:4])] = 0
    # In one order of memory, so that sums are made in one order.
    out = given.out[:, :, rows].astype(segment.acc, order="C", copy=False)
    base = np.zeros(tokens, dtype=segment.acc)
    base[:, :, :count] = np.einsum("bhnd,bhnd->bhn", flat(do)[:, :, :count], out)
    if given.grad_lse is not None:
        base[:, :, :count] -= given.grad_lse[:, :, rows]
    lse[dead], base[dead] = 0, 0
    return lse.reshape(do.shape[:4]), base.reshape(do.shape[:4])

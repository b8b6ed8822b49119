"""The single-pass band kernel: every pair in the band is scored once.

For each chunk of tiles, each step one batched product or one pass over contiguous memory:

    S = q k^T + bias        E = exp2(S - shift)        P = E * factor        out = P v / sum(P)

Logits are in units of log2, whose exponential takes half the time. The shift is one number a
tile, the largest logit there, hidden pairs included; it is left out where the norms of q and k
bound the logits. A row whose sum then underflows is done again from its own visible maximum.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from plsh.tiles import Chunk

from ._scratch import AnyArray, Scratch
from ._segment import BACKWARD, FORWARD, Job, Segment
from ._weights import LOG2E, Decay

LN2 = math.log(2)


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
    large = ~(segment.bounds < limits.bound)[..., None, None]  # NaN too
    shifted = bool(large.any())
    clamped = shifted or segment.bound + segment.slant > -limits.floor
    for chunk in segment.chunks():
        factor = segment.factor(chunk, scratch)
        for batch in segment.batches(chunk):
            p = scratch.get("p", segment.shape(chunk, batch), acc)
            segment.scores(chunk, batch, p)
            shift: Any = 0.0
            if shifted:
                # 0 in a small row, so that it does not depend on its mates.
                top = np.fmax.reduce(p, axis=-1, keepdims=True)  # (b, G, tiles, 1)
                shift = np.where(large[batch], top, 0)
                p -= shift
            if clamped:
                np.maximum(p, scratch.full(limits.floor, p.shape, acc), out=p)
            np.exp2(p, out=p)
            p *= factor
            segment.hide_segments(p, chunk, batch)
            total, o = _weighted_sum(segment, p, chunk, batch, scratch)
            o /= np.where(total == 0, 1, total)[..., None]
            log = _lse(total, shift, job)
            right = ((total >= limits.least) | (total == 0)) & np.isfinite(o).all(axis=-1)
            bad = ~right.all(axis=-1)  # lost digits, NaN, or sums past the range
            for i, h, tile in np.argwhere(bad):
                here = slice(batch.start + int(i), batch.start + int(i) + 1)
                part = _by_row(segment, chunk.one(int(tile)), here, int(h))
                o[i, h, tile], log[i, h, tile] = part
            rows = segment.rows(chunk)
            size, whole = rows.stop - rows.start, chunk.tiles * chunk.rows
            out[batch, :, rows] = o.reshape(*o.shape[:2], whole, o.shape[-1])[:, :, :size]
            lse[batch, :, rows] = log.reshape(*log.shape[:2], whole)[:, :, :size]


def _weighted_sum(
    segment: Segment, p: AnyArray, chunk: Chunk, batch: slice, scratch: Scratch
) -> tuple[AnyArray, AnyArray]:
    """Return the sums of P ``(b, G, tiles, rows)`` and of P v ``(b, G, tiles, rows, Dv)``."""
    total = np.zeros((*p.shape[:3], chunk.rows), dtype=p.dtype)
    out = np.zeros((*total.shape, segment.v.shape[-1]), dtype=p.dtype)
    for side, view in enumerate(chunk.split(p)):
        if view.size:
            ones = scratch.full(1.0, (view.shape[-1], 1), p.dtype)
            total += np.matmul(view, ones)[..., 0].sum(axis=3)
            values = segment.window(segment.v, chunk, side, batch)
            out += _product(view, values, scratch).sum(axis=3)
    return total, out


def _lse(total: AnyArray, shift: Any, job: Job) -> AnyArray:
    """Return the log of the sums, -inf in a row that sees no key."""
    dead = total == 0
    log = np.log2(np.where(dead, 1, total), dtype=np.float64) + shift
    return np.where(dead, -np.inf, log * LN2 - job.weight.normaliser)


def _by_row(segment: Segment, chunk: Chunk, batch: slice, head: int) -> tuple[AnyArray, AnyArray]:
    """One tile again, each row from its own largest visible logit: ``(rows, Dv), (rows,)``."""
    own = Scratch()  # the chunk's factor is still in use
    x = np.empty(segment.shape(chunk, batch), dtype=segment.acc)  # (1, G, 1, pairs)
    segment.scores(chunk, batch, x)
    weight = np.array(np.broadcast_to(segment.factor(chunk, own), x.shape))
    segment.hide_segments(weight, chunk, batch)
    seen = weight > 0
    x[seen] += np.log2(weight[seen])
    x[~seen] = -np.inf
    parts = chunk.split(x)
    top = np.max([part.max(axis=(3, 5), initial=-np.inf) for part in parts], axis=0)
    top = np.where(np.isneginf(top), 0, top)  # (1, G, 1, rows)
    for part in parts:
        part -= top[:, :, :, None, :, None]
    p = np.exp2(x)
    total = np.sum([part.sum(axis=(3, 5)) for part in chunk.split(p)], axis=0)
    for part in chunk.split(p):  # normalised first: a mean of values is within their range
        part /= np.where(total == 0, 1, total)[:, :, :, None, :, None]
    out = _weighted_sum(segment, p, chunk, batch, own)[1]
    log = _lse(total, top, segment.job)
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
    segment, limits = Segment(job, scratch, acc, BACKWARD), LIMITS[acc]
    vt = segment.transpose("vt", segment.v)
    do = segment.copy_queries("do", given.grad_out)
    lse, base = _row_terms(segment, given, do)
    by_key, by_value = (
        scratch.get(name, x.shape, acc) for name, x in (("dk", segment.k), ("dv", segment.v))
    )
    by_key[...], by_value[...] = 0, 0
    by_slope = np.zeros((segment.batch, segment.heads))
    # A visible pair's exponent is at most 0; a hidden one's may be anything, within these.
    spread = segment.bound + segment.slant + float(np.abs(lse).max(initial=0))
    clamped = not spread < -limits.floor
    for chunk in segment.chunks():
        factor = segment.factor(chunk, scratch)
        for batch in segment.batches(chunk):
            p, ds = (scratch.get(x, segment.shape(chunk, batch), acc) for x in ("p", "ds"))
            q, go, row_lse, row_base = (
                segment.tiles(x, chunk, batch)[:, :, :, None] for x in (segment.q, do, lse, base)
            )
            segment.scores(chunk, batch, p)
            for view in chunk.split(p):
                view -= row_lse
            if clamped:
                np.maximum(p, scratch.full(limits.floor, p.shape, acc), out=p)
                np.minimum(p, scratch.full(1.0, p.shape, acc), out=p)
            np.exp2(p, out=p)
            p *= factor
            segment.hide_segments(p, chunk, batch)
            by_query = np.zeros(q[:, :, :, 0].shape, dtype=acc)
            for side, (view, grad) in enumerate(zip(chunk.split(p), chunk.split(ds), strict=True)):
                if not view.size:
                    continue
                values = segment.window(vt.swapaxes(-1, -2), chunk, side, batch)
                np.matmul(go, values.swapaxes(-1, -2), out=grad)
                grad -= row_base
                grad *= view
                keys = segment.window(segment.k, chunk, side, batch)
                by_query += _product(grad, keys, scratch).sum(axis=3)
                for total, left, right in ((by_key, grad, q), (by_value, view, go)):
                    add = _product(left.swapaxes(-1, -2), right, scratch)
                    segment.add_to_keys(total[batch], add, chunk, side)
            if isinstance(job.weight, Decay):
                by_slope[batch] -= (ds @ job.weight.distance(chunk)).sum(axis=2, dtype=np.float64)
            rows = segment.rows(chunk)
            by_query *= acc.type(job.scale)
            flat = by_query.reshape(*by_query.shape[:2], -1, by_query.shape[-1])
            dq[batch, :, rows] = flat[:, :, : rows.stop - rows.start]
    by_key *= acc.type(LN2)  # the queries carried scale * log2(e)
    for h, g in enumerate(key_heads):
        dk[:, g, segment.source] += by_key[:, h, segment.held]
        dv[:, g, segment.source] += by_value[:, h, segment.held]
    return by_slope


def _product(left: AnyArray, right: AnyArray, scratch: Scratch) -> AnyArray:
    """Multiply matrices into scratch memory, valid until the next product."""
    shape = (*left.shape[:-1], right.shape[-1])
    return np.matmul(left, right, out=scratch.get("product", shape, left.dtype))


def _row_terms(segment: Segment, given: Given, do: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Return the lse in units of log2 and rowsum(dO * O) - dlse, ``(B, G, queries, 1)``.

    A row that saw no key, and what its cotangents hold, is zeroed.
    """
    rows = slice(segment.job.rows.start, segment.job.rows.stop)
    own = slice(0, rows.stop - rows.start)
    lse, base = (np.zeros((*do.shape[:3], 1), dtype=segment.acc) for _ in range(2))
    dead = np.isneginf(given.lse[:, :, rows])
    do[:, :, own][dead] = 0
    out = given.out[:, :, rows].astype(segment.acc)  # ml_dtypes does not mix
    out[dead] = 0
    known = np.where(dead, 0, given.lse[:, :, rows] + segment.job.weight.normaliser)
    lse[:, :, own, 0] = known * LOG2E
    base[:, :, own, 0] = np.einsum("bhnd,bhnd->bhn", do[:, :, own], out, dtype=np.float64)
    if given.grad_lse is not None:
        base[:, :, own, 0] -= np.where(dead, 0, given.grad_lse[:, :, rows])
    return lse, base

"""Kernel `forward`: attention under a positional weight, one pass over the band.

A program owns ROWS queries of one head and batch row, whose out and lse no other writes. Logits are
in units of log2. Spec: ATT-1, ATT-7, ATT-20, ATT-21, NUM-1 to NUM-6.
"""

import triton
import triton.language as tl

from ._band import (
    FAR,
    LN2,
    LOG2E,
    band_of,
    count_tile,
    distances,
    ids_of,
    load_tile,
    offset_of,
    partial_tile,
    pivots_of,
    place_of,
    reach_of,
    real,
    slope_of,
    visible,
    whole_tile,
)


@triton.jit
def _attend(
    acc, total, top, q_tile, t, keys, values, first,
    k_n, k_d, v_n, v_d, len_k, dim, value_dim, k_ids, ids_b, ids_n, b, own_ids,
    rows, columns, own_at, bandwidth, slope, after, unit,
    diagonal, own_before, before, own_after, past, h,
    width, shift, labels, label_head, label_sample, label_start, label_count, label_steps, samples,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, STEP: tl.constexpr, SEGMENTED: tl.constexpr, SAMPLES: tl.constexpr,
    CHUNKED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, APART: tl.constexpr,
    SPREAD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add tile t to a softmax: its sums `acc` and `total`, in units of ``2**top / unit``."""
    other_ids = columns
    if SEGMENTED:
        other_ids = ids_of(k_ids, ids_b, ids_n, b, first, columns, len_k)
    k = load_tile(keys, first, columns, k_n, k_d, len_k, dim, other_ids, DIM, MASKED, SEGMENTED)
    x = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION, out_dtype=ACC) * after
    if STEP:
        counts = count_tile(
            rows, columns, t, own_at, diagonal, own_before, before, own_after, past, h,
            width, shift, labels, label_head, label_sample, label_start, label_count, label_steps,
            samples, ROWS, COLUMNS, SAMPLES, CHUNKED, MASKED, CAUSAL, True, ACC)  # fmt: skip
        seen = counts > 0
    else:
        x = tl.fma(distances(rows, columns, t, COLUMNS, ACC), -slope, x)
        seen = tl.full((ROWS, COLUMNS), 1, tl.int1)
    if MASKED:
        seen = seen & visible(rows, columns, t, first, len_k, bandwidth, own_ids, other_ids,
                              COLUMNS, CAUSAL, True, STEP, SEGMENTED)  # fmt: skip
    if MASKED or STEP:
        x = tl.where(seen, x, -float("inf"))
    most = tl.maximum(top, tl.max(x, axis=1))
    base = tl.where(most == -float("inf"), 0.0, most)
    fade = tl.exp2(top - base)
    p = tl.exp2(x - base[:, None])
    if STEP:
        p = p * (counts * unit)
    elif SPREAD:
        p = p * unit
    v = load_tile(values, first, columns, v_n, v_d, len_k, value_dim, other_ids, VALUE_DIM, MASKED,
                  SEGMENTED)  # fmt: skip
    total = total * fade + tl.sum(p, axis=1)
    if APART:  # a tile is added up first: sums of thousands lose digits
        part = tl.dot(p.to(v.dtype), v, input_precision=PRECISION, out_dtype=ACC)
        acc = tl.fma(acc, tl.broadcast_to(fade[:, None], (ROWS, VALUE_DIM)), part)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], out_dtype=ACC)
    return acc, total, most


@triton.jit(do_not_specialize=[
    "first_rank", "tiles", "batch", "heads", "group", "len_q", "len_k", "samples", "q_start",
    "k_start", "label_start", "label_count", "label_steps", "factor", "after", "unit",
    "mean",
])  # fmt: skip
def forward(
    q, k, v, out, lse, q_ids, k_ids, q_offsets, k_offsets, slopes, bandwidths, width, shift, labels,
    diagonals, order,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    q_ids_b, q_ids_n, k_ids_b, k_ids_n, q_offsets_b, k_offsets_b, slopes_b, slopes_h,
    label_head, label_sample, diagonals_b,
    first_rank, tiles, batch, heads, group, len_q, len_k, dim, value_dim, samples,
    q_start, k_start, label_start, label_count, label_steps,
    factor, after, unit, mean,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, STEP: tl.constexpr, SEGMENTED: tl.constexpr, SAMPLES: tl.constexpr,
    CHUNKED: tl.constexpr, PRECISION: tl.constexpr, APART: tl.constexpr, FACTORED: tl.constexpr,
    SPREAD: tl.constexpr, COUNTED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write out ``(B, H, Nq, Dv)`` and lse ``(B, H, Nq)``, both contiguous."""
    tile, b, h = place_of(order, first_rank, batch, tiles)
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest bands first
    own_first = tile * ROWS
    own_at = own_first + offset_of(q_offsets, q_offsets_b, q_start, b)
    other_at = offset_of(k_offsets, k_offsets_b, k_start, b)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    own_ids = rows
    if SEGMENTED:
        own_ids = ids_of(q_ids, q_ids_b, q_ids_n, b, own_first, rows, len_q)
    q_tile = load_tile(q + b * q_b + h * q_h, own_first, rows, q_n, q_d, len_q, dim, own_ids, DIM,
                       True, SEGMENTED)  # fmt: skip
    if FACTORED:  # a power of 2
        q_tile = (q_tile.to(ACC) * real(factor, ACC)).to(q_tile.dtype)

    slope = real(after, ACC)
    diagonal = order
    own_before, before, own_after, past = columns, columns, columns, columns
    if STEP:
        bandwidth = FAR
        low, high = reach_of(own_at, h, width, shift, labels, label_head, label_sample, label_start,
                             label_count, label_steps, samples, ROWS, SAMPLES)  # fmt: skip
        own_before, before, own_after, past = pivots_of(
            own_at, rows, 0, h, width, shift, labels, label_head, label_sample, label_start,
            label_count, label_steps, samples, ROWS, SAMPLES, COUNTED)  # fmt: skip
        rank = tl.program_id(0).to(tl.int64) // tiles // batch
        diagonal = diagonals + b * diagonals_b + (rank * tiles + tile) * (ROWS * ROWS)
    else:
        bandwidth = tl.load(bandwidths + h).to(tl.int64)
        low, high = own_at - bandwidth, own_at + ROWS + bandwidth
        slope = slope_of(slopes, slopes_b, slopes_h, b, h, ACC)
    begin, left, left_end, right, right_end, end = band_of(
        low, high, own_at, other_at, len_k, bandwidth, ROWS, COLUMNS, CAUSAL, True, SEGMENTED
    )

    acc = tl.zeros((ROWS, VALUE_DIM), ACC)
    total = tl.zeros((ROWS,), ACC)
    top = tl.full((ROWS,), -float("inf"), ACC)
    after_ = (real(after, tl.float64) * LOG2E).to(ACC)
    unit_ = real(unit, ACC)
    keys, values = k + b * k_b + h // group * k_h, v + b * v_b + h // group * v_h
    for u in range((left_end - left + right_end - right).to(tl.int32)):
        t = whole_tile(u, left, left_end, right)
        acc, total, top = _attend(
            acc, total, top, q_tile, t, keys, values, own_at + COLUMNS * t - other_at,
            k_n, k_d, v_n, v_d, len_k, dim, value_dim, k_ids, k_ids_b, k_ids_n, b, own_ids,
            rows, columns, own_at, bandwidth, slope, after_, unit_,
            diagonal, own_before, before, own_after, past, h,
            width, shift, labels, label_head, label_sample, label_start, label_count, label_steps,
            samples, ROWS, COLUMNS, DIM, VALUE_DIM, CAUSAL, STEP, SEGMENTED, SAMPLES, CHUNKED,
            PRECISION, False, APART, SPREAD, ACC)  # fmt: skip
    for u in range((left - begin + right - left_end + end - right_end).to(tl.int32)):
        t = partial_tile(u, begin, left, left_end, right, right_end)
        acc, total, top = _attend(
            acc, total, top, q_tile, t, keys, values, own_at + COLUMNS * t - other_at,
            k_n, k_d, v_n, v_d, len_k, dim, value_dim, k_ids, k_ids_b, k_ids_n, b, own_ids,
            rows, columns, own_at, bandwidth, slope, after_, unit_,
            diagonal, own_before, before, own_after, past, h,
            width, shift, labels, label_head, label_sample, label_start, label_count, label_steps,
            samples, ROWS, COLUMNS, DIM, VALUE_DIM, CAUSAL, STEP, SEGMENTED, SAMPLES, CHUNKED,
            PRECISION, True, APART, SPREAD, ACC)  # fmt: skip

    dead = total == 0
    full = tl.where(dead, 1.0, total)
    result = acc / full[:, None]
    log = (tl.log2(full * real(mean, ACC)) + top) * LN2
    token = own_first + rows
    here = token < len_q
    line = (b * heads + h) * len_q + token
    tl.store(lse + line, tl.where(dead, -float("inf"), log), mask=here)
    d = tl.arange(0, VALUE_DIM)
    where = out + line[:, None] * value_dim + d[None, :]
    tl.store(where, result.to(q_tile.dtype), mask=here[:, None] & (d < value_dim)[None, :])

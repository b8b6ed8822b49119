"""Kernels `by_query` and `by_key`: the gradients, by tile of queries and by tile of keys.

Each writes rows that no other program writes, so that the order of programs does not matter. With
the merged output and P normalised by the merged lse, ``dS = P * (dP - terms)``; see `row_terms`.
Spec: NUM-8 to NUM-11, ATT-21.
"""

import triton
import triton.language as tl

from ._band import (
    FAR,
    LOG2E,
    band_of,
    count_tile,
    distances,
    exist,
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
def _rows_of(logs, terms, line, first, at, length, ids, SEGMENTED: tl.constexpr):
    """Return (lse in units of log2, term, ids by which to read q and dO) of queries.

    A query that saw no key, or does not exist, has the lse inf, so that its weights are 0.
    """
    here = exist(first, at, length)
    if SEGMENTED:
        here = here & (ids >= 0)
    where = line + first + at
    log = tl.load(logs + where, mask=here, other=float("inf"))
    term = tl.load(terms + where, mask=here, other=0.0)
    return log, term, tl.where(log != float("inf"), 0, -1)


@triton.jit
def _add(acc, left, right, PRECISION: tl.constexpr, APART: tl.constexpr, ACC: tl.constexpr):
    """Return ``acc + left @ right``."""
    if APART:  # a tile is added up first: sums of thousands lose digits
        part = tl.dot(left, right, input_precision=PRECISION, out_dtype=ACC)
        return tl.fma(part, tl.full(acc.shape, 1.0, ACC), acc)
    return tl.dot(left, right, acc, out_dtype=ACC)


@triton.jit
def _query_tile(
    dq, moved, q_tile, do_tile, log, term, t, keys, values, first,
    k_n, k_d, v_n, v_d, len_k, dim, value_dim, k_ids, ids_b, ids_n, b, own_ids,
    rows, columns, own_at, bandwidth, slope, after,
    diagonal, own_before, before, own_after, past, h,
    width, shift, labels, label_head, label_sample, label_start, label_count, label_steps, samples,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, STEP: tl.constexpr, SEGMENTED: tl.constexpr, SAMPLES: tl.constexpr,
    CHUNKED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, APART: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Add tile t of keys to dq, and to the sums of distance times dS."""
    other_ids = columns
    if SEGMENTED:
        other_ids = ids_of(k_ids, ids_b, ids_n, b, first, columns, len_k)
    k = load_tile(keys, first, columns, k_n, k_d, len_k, dim, other_ids, DIM, MASKED, SEGMENTED)
    v = load_tile(values, first, columns, v_n, v_d, len_k, value_dim, other_ids, VALUE_DIM, MASKED,
                  SEGMENTED)  # fmt: skip
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
    p = tl.exp2(x - log[:, None])
    if STEP:
        p = p * counts
    dp = tl.dot(do_tile, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
    ds = p * (dp - term[:, None])
    if MASKED or STEP:
        ds = tl.where(seen, ds, 0.0)
    if not STEP:
        apart = distances(rows, columns, t, COLUMNS, ACC)
        moved += tl.sum(ds * apart, axis=1).to(tl.float64)
    return _add(dq, ds.to(k.dtype), k, PRECISION, APART, ACC), moved


@triton.jit(do_not_specialize=[
    "first_rank", "tiles", "batch", "heads", "group", "len_q", "len_k", "samples", "q_start",
    "k_start", "label_start", "label_count", "label_steps", "factor", "after", "scale",
])  # fmt: skip
def by_query(
    q, k, v, logs, terms, grad_out, grad_q, by_slope, q_ids, k_ids, q_offsets, k_offsets, slopes,
    bandwidths, width, shift, labels, diagonals, order,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, do_b, do_h, do_n, do_d,
    q_ids_b, q_ids_n, k_ids_b, k_ids_n, q_offsets_b, k_offsets_b, slopes_b, slopes_h,
    label_head, label_sample, diagonals_b,
    first_rank, tiles, batch, heads, group, len_q, len_k, dim, value_dim, samples,
    q_start, k_start, label_start, label_count, label_steps,
    factor, after, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, STEP: tl.constexpr, SEGMENTED: tl.constexpr, SAMPLES: tl.constexpr,
    CHUNKED: tl.constexpr, PRECISION: tl.constexpr, APART: tl.constexpr, FACTORED: tl.constexpr,
    DEAD: tl.constexpr, COUNTED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write grad_q ``(B, H, Nq, D)``, and under a decay each tile's part of the slope's gradient.

    ``by_slope (B, H, tiles)`` in float64. The logs, terms and results are contiguous.
    """
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
    log, term, read = _rows_of(logs, terms, (b * heads + h) * len_q, own_first, rows, len_q,
                               own_ids, SEGMENTED)  # fmt: skip
    q_tile = load_tile(q + b * q_b + h * q_h, own_first, rows, q_n, q_d, len_q, dim, own_ids, DIM,
                       True, SEGMENTED)  # fmt: skip
    if FACTORED:  # a power of 2
        q_tile = (q_tile.to(ACC) * real(factor, ACC)).to(q_tile.dtype)
    # A row that saw no key is not read.
    do_tile = load_tile(grad_out + b * do_b + h * do_h, own_first, rows, do_n, do_d, len_q,
                        value_dim, read, VALUE_DIM, True, True)  # fmt: skip

    slope = real(scale, ACC)
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

    dq = tl.zeros((ROWS, DIM), ACC)
    moved = tl.zeros((ROWS,), tl.float64)
    after_ = (real(after, tl.float64) * LOG2E).to(ACC)
    keys, values = k + b * k_b + h // group * k_h, v + b * v_b + h // group * v_h
    for u in range((left_end - left + right_end - right).to(tl.int32)):
        t = whole_tile(u, left, left_end, right)
        dq, moved = _query_tile(
            dq, moved, q_tile, do_tile, log, term, t, keys, values, own_at + COLUMNS * t - other_at,
            k_n, k_d, v_n, v_d, len_k, dim, value_dim, k_ids, k_ids_b, k_ids_n, b, own_ids,
            rows, columns, own_at, bandwidth, slope, after_,
            diagonal, own_before, before, own_after, past, h,
            width, shift, labels, label_head, label_sample, label_start, label_count, label_steps,
            samples, ROWS, COLUMNS, DIM, VALUE_DIM, CAUSAL, STEP, SEGMENTED, SAMPLES, CHUNKED,
            PRECISION, False, APART, ACC)  # fmt: skip
    for u in range((left - begin + right - left_end + end - right_end).to(tl.int32)):
        t = partial_tile(u, begin, left, left_end, right, right_end)
        dq, moved = _query_tile(
            dq, moved, q_tile, do_tile, log, term, t, keys, values, own_at + COLUMNS * t - other_at,
            k_n, k_d, v_n, v_d, len_k, dim, value_dim, k_ids, k_ids_b, k_ids_n, b, own_ids,
            rows, columns, own_at, bandwidth, slope, after_,
            diagonal, own_before, before, own_after, past, h,
            width, shift, labels, label_head, label_sample, label_start, label_count, label_steps,
            samples, ROWS, COLUMNS, DIM, VALUE_DIM, CAUSAL, STEP, SEGMENTED, SAMPLES, CHUNKED,
            PRECISION, True, APART, ACC)  # fmt: skip

    token = own_first + rows
    d = tl.arange(0, DIM)
    where = grad_q + ((b * heads + h) * len_q + token)[:, None] * dim + d[None, :]
    tl.store(where, (dq * real(scale, ACC)).to(q_tile.dtype),
             mask=(token < len_q)[:, None] & (d < dim)[None, :])  # fmt: skip
    if not STEP:
        tl.store(by_slope + (b * heads + h) * tiles + tile, -tl.sum(moved, axis=0))


@triton.jit
def _key_tile(
    dk, dv, k_tile, v_tile, t, queries, grads, first, logs, terms, line,
    q_n, q_d, do_n, do_d, len_q, dim, value_dim, q_ids, ids_b, ids_n, b, own_ids,
    rows, columns, own_at, bandwidth, slope, after,
    diagonal, own_before, before, own_after, past, h,
    width, shift, labels, label_head, label_sample, label_start, label_count, label_steps, samples,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, STEP: tl.constexpr, SEGMENTED: tl.constexpr, SAMPLES: tl.constexpr,
    CHUNKED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, APART: tl.constexpr,
    DEAD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add tile t of queries to dk and dv."""
    other_ids = columns
    if SEGMENTED:
        other_ids = ids_of(q_ids, ids_b, ids_n, b, first, columns, len_q)
    # A query that saw no key is not read, and has no weight.
    log, term, read = _rows_of(logs, terms, line, first, columns, len_q, other_ids, SEGMENTED)
    q = load_tile(queries, first, columns, q_n, q_d, len_q, dim, read, DIM, MASKED, DEAD)
    do = load_tile(grads, first, columns, do_n, do_d, len_q, value_dim, read, VALUE_DIM, MASKED,
                   DEAD)  # fmt: skip
    x = tl.dot(k_tile, tl.trans(q), input_precision=PRECISION, out_dtype=ACC) * after
    if STEP:
        counts = count_tile(
            rows, columns, t, own_at, diagonal, own_before, before, own_after, past, h,
            width, shift, labels, label_head, label_sample, label_start, label_count, label_steps,
            samples, ROWS, COLUMNS, SAMPLES, CHUNKED, MASKED, CAUSAL, False, ACC)  # fmt: skip
        seen = counts > 0
    else:
        x = tl.fma(distances(rows, columns, t, COLUMNS, ACC), -slope, x)
        seen = tl.full((ROWS, COLUMNS), 1, tl.int1)
    if MASKED:
        seen = seen & visible(rows, columns, t, first, len_q, bandwidth, own_ids, other_ids,
                              COLUMNS, CAUSAL, False, STEP, SEGMENTED)  # fmt: skip
    p = tl.exp2(x - log[None, :])
    if STEP:
        p = p * counts
    if MASKED or STEP:
        p = tl.where(seen, p, 0.0)
    dv = _add(dv, p.to(do.dtype), do, PRECISION, APART, ACC)
    dp = tl.dot(v_tile, tl.trans(do), input_precision=PRECISION, out_dtype=ACC)
    ds = p * (dp - term[None, :])
    if MASKED or STEP:
        ds = tl.where(seen, ds, 0.0)
    return _add(dk, ds.to(q.dtype), q, PRECISION, APART, ACC), dv


@triton.jit(do_not_specialize=[
    "first_rank", "tiles", "batch", "heads", "group", "len_q", "len_k", "samples", "q_start",
    "k_start", "label_start", "label_count", "label_steps", "factor", "after", "scale",
])  # fmt: skip
def by_key(
    q, k, v, logs, terms, grad_out, grad_k, grad_v, q_ids, k_ids, q_offsets, k_offsets, slopes,
    bandwidths, width, shift, labels, diagonals, order,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, do_b, do_h, do_n, do_d,
    q_ids_b, q_ids_n, k_ids_b, k_ids_n, q_offsets_b, k_offsets_b, slopes_b, slopes_h,
    label_head, label_sample, diagonals_b,
    first_rank, tiles, batch, heads, group, len_q, len_k, dim, value_dim, samples,
    q_start, k_start, label_start, label_count, label_steps,
    factor, after, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, STEP: tl.constexpr, SEGMENTED: tl.constexpr, SAMPLES: tl.constexpr,
    CHUNKED: tl.constexpr, PRECISION: tl.constexpr, APART: tl.constexpr, FACTORED: tl.constexpr,
    DEAD: tl.constexpr, COUNTED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write grad_k ``(B, Hkv, Nk, D)`` and grad_v ``(B, Hkv, Nk, Dv)``, both contiguous.

    Summed over the query heads that read a key head. `order` is of key heads.
    """
    tile, b, kv = place_of(order, first_rank, batch, tiles)
    own_first = tile * ROWS
    own_at = own_first + offset_of(k_offsets, k_offsets_b, k_start, b)
    other_at = offset_of(q_offsets, q_offsets_b, q_start, b)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    own_ids = rows
    if SEGMENTED:
        own_ids = ids_of(k_ids, k_ids_b, k_ids_n, b, own_first, rows, len_k)
    k_tile = load_tile(k + b * k_b + kv * k_h, own_first, rows, k_n, k_d, len_k, dim, own_ids, DIM,
                       True, SEGMENTED)  # fmt: skip
    if FACTORED:  # a power of 2
        k_tile = (k_tile.to(ACC) * real(factor, ACC)).to(k_tile.dtype)
    v_tile = load_tile(v + b * v_b + kv * v_h, own_first, rows, v_n, v_d, len_k, value_dim, own_ids,
                       VALUE_DIM, True, SEGMENTED)  # fmt: skip
    dk = tl.zeros((ROWS, DIM), ACC)
    dv = tl.zeros((ROWS, VALUE_DIM), ACC)
    after_ = (real(after, tl.float64) * LOG2E).to(ACC)
    for member in range(group):
        h = kv * group + member
        slope = after_
        diagonal = order
        own_before, before, own_after, past = columns, columns, columns, columns
        if STEP:
            bandwidth = FAR
            low, high = reach_of(
                own_at, h, width, shift, labels, label_head, label_sample, label_start, label_count,
                label_steps, samples, ROWS, SAMPLES)  # fmt: skip
            own_before, before, own_after, past = pivots_of(
                own_at, rows, 0, h, width, shift, labels, label_head, label_sample, label_start,
                label_count, label_steps, samples, ROWS, SAMPLES, COUNTED)  # fmt: skip
            rank = tl.program_id(0).to(tl.int64) // tiles // batch * group + member
            diagonal = diagonals + b * diagonals_b + (rank * tiles + tile) * (ROWS * ROWS)
        else:
            bandwidth = tl.load(bandwidths + h).to(tl.int64)
            low, high = own_at - bandwidth, own_at + ROWS + bandwidth
            slope = slope_of(slopes, slopes_b, slopes_h, b, h, ACC)
        begin, left, left_end, right, right_end, end = band_of(
            low, high, own_at, other_at, len_q, bandwidth, ROWS, COLUMNS, CAUSAL, False, SEGMENTED
        )
        queries, grads = q + b * q_b + h * q_h, grad_out + b * do_b + h * do_h
        line = (b * heads + h) * len_q
        for u in range((left_end - left + right_end - right).to(tl.int32)):
            t = whole_tile(u, left, left_end, right)
            dk, dv = _key_tile(
                dk, dv, k_tile, v_tile, t, queries, grads, own_at + COLUMNS * t - other_at,
                logs, terms, line,
                q_n, q_d, do_n, do_d, len_q, dim, value_dim, q_ids, q_ids_b, q_ids_n, b, own_ids,
                rows, columns, own_at, bandwidth, slope, after_,
                diagonal, own_before, before, own_after, past, h,
                width, shift, labels, label_head, label_sample, label_start, label_count,
                label_steps, samples, ROWS, COLUMNS, DIM, VALUE_DIM, CAUSAL, STEP, SEGMENTED,
                SAMPLES, CHUNKED, PRECISION, False, APART, DEAD,
                ACC)  # fmt: skip
        for u in range((left - begin + right - left_end + end - right_end).to(tl.int32)):
            t = partial_tile(u, begin, left, left_end, right, right_end)
            dk, dv = _key_tile(
                dk, dv, k_tile, v_tile, t, queries, grads, own_at + COLUMNS * t - other_at,
                logs, terms, line,
                q_n, q_d, do_n, do_d, len_q, dim, value_dim, q_ids, q_ids_b, q_ids_n, b, own_ids,
                rows, columns, own_at, bandwidth, slope, after_,
                diagonal, own_before, before, own_after, past, h,
                width, shift, labels, label_head, label_sample, label_start, label_count,
                label_steps, samples, ROWS, COLUMNS, DIM, VALUE_DIM, CAUSAL, STEP, SEGMENTED,
                SAMPLES, CHUNKED, PRECISION, True, APART, DEAD,
                ACC)  # fmt: skip

    token = own_first + rows
    here = (token < len_k)[:, None]
    line = (b * tl.cdiv(heads, group) + kv) * len_k + token
    d, e = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    where = grad_k + line[:, None] * dim + d[None, :]
    tl.store(where, (dk * real(scale, ACC)).to(k_tile.dtype), mask=here & (d < dim)[None, :])
    where = grad_v + line[:, None] * value_dim + e[None, :]
    tl.store(where, dv.to(k_tile.dtype), mask=here & (e < value_dim)[None, :])

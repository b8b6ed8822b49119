"""Kernels `diagonals` and `row_terms`: what the others read of each owned tile, and of each row."""

import triton
import triton.language as tl

from ._band import LOG2E, bounds_of, offset_of, real


@triton.jit(do_not_specialize=[
    "first_rank", "tiles", "batch", "length", "samples", "start", "label_start", "label_count",
    "label_steps",
])  # fmt: skip
def diagonals(
    counts, offsets, width, shift, labels, order, offsets_b, label_head, label_sample, counts_b,
    first_rank, tiles, batch, samples, start, label_start, label_count, label_steps,
    ROWS: tl.constexpr, BAND: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """Write the samples in which the pairs of each tile share a block.

    ``(rows of positions, ranks, tiles, ROWS, ROWS)``, the owned token first. No one pivot lies
    between these pairs: the block of the later token begins at or before the earlier one, or it
    does not. A program writes BAND rows of a tile. Only pairs whose first token is the later one
    (LOWER), or the earlier one (UPPER), are counted; others are 0.
    """
    index = tl.program_id(0).to(tl.int64)
    part, place = index % (ROWS // BAND), index // (ROWS // BAND)
    tile, b = place % tiles, place // tiles % batch
    rank = place // tiles // batch
    h = tl.load(order + first_rank + rank).to(tl.int64)
    at = offset_of(offsets, offsets_b, start, b) + tile * ROWS
    rows, columns = (part * BAND).to(tl.int32) + tl.arange(0, BAND), tl.arange(0, ROWS)
    # Begins are relative to the tile; the first block of all, which takes in positions below 0,
    # begins before every token.
    found = tl.zeros((BAND, ROWS), tl.int32)
    lower = rows[:, None] >= columns[None, :]
    for r in range(samples):
        if LOWER:
            begin, _ = bounds_of(at + rows, r, h, width, shift, labels, label_head, label_sample,
                                 label_start, label_count, label_steps, samples)  # fmt: skip
            begin = tl.where(begin > 0, begin - at, -1)
            found += (lower & (begin[:, None] <= columns[None, :])).to(tl.int32)
        if UPPER:
            begin, _ = bounds_of(at + columns, r, h, width, shift, labels, label_head, label_sample,
                                 label_start, label_count, label_steps, samples)  # fmt: skip
            begin = tl.where(begin > 0, begin - at, -1)
            here = rows[:, None] <= columns[None, :]
            if LOWER:
                here = rows[:, None] < columns[None, :]
            found += (here & (begin[None, :] <= rows[:, None])).to(tl.int32)
    where = counts + b * counts_b + (rank * tiles + tile) * (ROWS * ROWS)
    tl.store(where + rows[:, None] * ROWS + columns[None, :], found.to(counts.dtype.element_ty))


@triton.jit(do_not_specialize=["heads", "len_q", "every_row", "normaliser"])
def row_terms(
    out, lse, grad_out, grad_lse, logs, terms, do_b, do_h, do_n, do_d, heads, len_q, value_dim,
    every_row, normaliser, ROWS: tl.constexpr, VALUE_DIM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the lse in units of log2, and ``rowsum(dO * O) - dlse``, of each row, ``(B, H, Nq)``.

    For one that saw no key inf and 0. All but `grad_out` are contiguous. Spec: NUM-8.
    """
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = line < every_row
    given = tl.load(lse + line, mask=here, other=0.0)
    live = here & (given != -float("inf"))
    log = tl.where(live, (given + real(normaliser, ACC)) * LOG2E, float("inf"))
    tl.store(logs + line, log, mask=here)
    d = tl.arange(0, VALUE_DIM)
    mask = live[:, None] & (d < value_dim)[None, :]
    o = tl.load(out + line[:, None] * value_dim + d[None, :], mask=mask, other=0.0).to(ACC)
    head = line // len_q
    where = grad_out + head // heads * do_b + head % heads * do_h + line % len_q * do_n
    do = tl.load(where[:, None] + d[None, :] * do_d, mask=mask, other=0.0).to(ACC)
    term = tl.sum(o * do, axis=1) - tl.load(grad_lse + line, mask=live, other=0.0)
    tl.store(terms + line, term, mask=here)

"""The band of one owned tile, for every kernel: which tiles it visits, and which pairs count.

A program owns a tile of ROWS tokens, of one head and batch row, and visits tiles of COLUMNS tokens
of the other side on its own grid of positions: tile t holds the positions from ``own_at + COLUMNS *
t`` on. Tiles 0 to ROWS / COLUMNS - 1 are the diagonal, and every other lies wholly before or after
the owned positions. Spec: ATT-12, ATT-14, ATT-19, MEM-3.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LAST = tl.constexpr(1 << 30)
"""Position after the last that any token has."""
FAR = tl.constexpr(1 << 40)
STEEPEST = tl.constexpr(2.0**95)
STEEPEST_DOUBLE = tl.constexpr(2.0**991)


@triton.jit
def real(bits, ACC: tl.constexpr):
    """Return a number that came as the bits of a double, which as an argument would be cut."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(ACC)


@triton.jit
def place_of(order, first_rank, batch, tiles):
    """Return what a program owns, (tile, batch row, head): heads in `order`, tiles fastest."""
    index = tl.program_id(0).to(tl.int64)
    row = index // tiles
    head = tl.load(order + first_rank + row // batch).to(tl.int64)
    return index % tiles, row % batch, head


@triton.jit
def offset_of(offsets, stride, start, b):
    """Return the position of token 0 of a batch row."""
    return (start if offsets is None else tl.load(offsets + b * stride)).to(tl.int64)


@triton.jit
def floor_of(x, n: tl.constexpr):
    """Return ``floor(x / n)``; division rounds to 0."""
    quotient = x // n
    return quotient - (quotient * n > x).to(tl.int64)


@triton.jit
def clamp(x, low, high):
    """Return x, or the bound that it passes; the upper one if they cross."""
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def near(x):
    """Return a position or index as int32, or as far as any: tokens are less than 2^30 apart."""
    return clamp(x, -LAST, LAST).to(tl.int32)


@triton.jit
def exist(first, at, length):
    """Return whether tokens ``first + at`` exist."""
    return (at >= near(-first)) & (at < near(length - first))


@triton.jit
def band_of(
    low, high, own_at, other_at, other_length, bandwidth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, QUERIES: tl.constexpr,
    SEGMENTED: tl.constexpr,
):  # fmt: skip
    """Return the tiles that hold positions [low, high), as far as there are tokens to see.

    Six numbers: from the first on up to the last tiles are visited; those between the second and
    third, and between the fourth and fifth, are whole: every pair of them is seen.
    """
    if CAUSAL:
        if QUERIES:
            high = tl.minimum(high, own_at + ROWS)
        else:
            low = tl.maximum(low, own_at)
    low = tl.maximum(low, other_at)
    high = tl.minimum(high, other_at + other_length)
    begin = floor_of(low - own_at, COLUMNS)
    end = tl.where(low < high, floor_of(high - own_at + COLUMNS - 1, COLUMNS), begin)
    if SEGMENTED:
        return begin, begin, begin, begin, begin, end
    # Whole: all its tokens exist, and its farthest pair is in the band.
    first = -floor_of(own_at - other_at, COLUMNS)
    last = floor_of(other_at + other_length - own_at, COLUMNS)
    left = clamp(tl.maximum(first, -floor_of(bandwidth - ROWS + 1, COLUMNS)), begin, end)
    left_end = tl.maximum(left, clamp(last, begin, tl.minimum(end, 0)))
    right = tl.maximum(left_end, clamp(tl.maximum(first, ROWS // COLUMNS), begin, end))
    right_end = clamp(tl.minimum(last, floor_of(bandwidth + 1, COLUMNS)), right, end)
    return begin, left, left_end, right, right_end, end


@triton.jit
def whole_tile(u, left, left_end, right):
    """Return the u-th whole tile."""
    t = left + u
    return tl.where(t >= left_end, t + (right - left_end), t)


@triton.jit
def partial_tile(u, begin, left, left_end, right, right_end):
    """Return the u-th tile that is not whole."""
    t = begin + u
    t = tl.where(t >= left, t + (left_end - left), t)
    return tl.where(t >= right, t + (right_end - right), t)


@triton.jit
def ids_of(ids, stride_b, stride_n, b, first, at, length):
    """Return the segment ids of tokens ``first + at``, -1 where there is no token."""
    here = exist(first, at, length)
    return tl.load(ids + b * stride_b + (first + at) * stride_n, mask=here, other=-1).to(tl.int64)


@triton.jit
def load_tile(
    x, first, at, stride_n, stride_d, length, dim, ids,
    DIM: tl.constexpr, MASKED: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    """Load tokens ``first + at`` of one head, ``(tokens, DIM)``; zeros where there is none.

    What stands in padding (id < 0) is not read.
    """
    d = tl.arange(0, DIM)
    where = x + first * stride_n
    where += at.to(tl.int64)[:, None] * stride_n + d[None, :] * stride_d
    mask = d[None, :] < dim
    if SEGMENTED:
        return tl.load(where, mask=mask & (ids >= 0)[:, None], other=0.0)
    if MASKED:
        return tl.load(where, mask=mask & exist(first, at, length)[:, None], other=0.0)
    return tl.load(where, mask=mask, other=0.0)


@triton.jit
def visible(
    rows, columns, t, first, length, bandwidth, own_ids, other_ids,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, STEP: tl.constexpr,
    SEGMENTED: tl.constexpr,
):  # fmt: skip
    """Return which pairs of tile t are seen, but for what a step weight hides."""
    apart = rows[:, None] - columns[None, :]
    at = COLUMNS * t  # less than apart: the query, or the key, is later
    seen = exist(first, columns, length)[None, :] & (apart == apart)
    if CAUSAL:
        lead = near(at)
        seen = seen & ((apart >= lead) if QUERIES else (apart <= lead))
    if not STEP:
        most = near(at + bandwidth)
        least = near(at - bandwidth)
        seen = seen & (apart <= most) & (apart >= least)
    if SEGMENTED:
        seen = seen & (own_ids[:, None] == other_ids[None, :]) & (own_ids >= 0)[:, None]
    return seen


@triton.jit
def distances(rows, columns, t, COLUMNS: tl.constexpr, ACC: tl.constexpr):
    """Return how far apart the pairs of tile t are."""
    other = columns.to(ACC) + (COLUMNS * t).to(ACC)
    return tl.abs(rows.to(ACC)[:, None] - other[None, :])


@triton.jit
def slope_of(slopes, stride_b, stride_h, b, h, ACC: tl.constexpr):
    """Return a slope in units of log2 whose products are finite; larger ones cut as sharply."""
    slope = tl.load(slopes + b * stride_b + h * stride_h).to(ACC)
    return tl.minimum(slope, STEEPEST_DOUBLE if ACC.is_fp64() else STEEPEST) * LOG2E


@triton.jit
def bounds_of(
    at, r, h, width, shift, labels, label_head, label_sample, label_start, label_count,
    label_steps, samples,
):  # fmt: skip
    """Return (first position, position after the last) of the blocks at some positions, int32.

    `at` int64 and the samples `r` broadcast. A sample that does not exist has no position.
    """
    here = (r < samples) & (at == at)
    at = clamp(at, 0, 2 * LAST)  # padding counts as 0
    if labels is None:
        w = tl.load(width + h * samples + r, mask=r < samples, other=1)
        s = tl.load(shift + h * samples + r, mask=r < samples, other=0)
        above = (at << 24) - s
        index = above // w
        index -= (index * w > above).to(tl.int64)  # division rounds to 0, blocks down
        unit = (1 << 24) - 1
        begin = (index * w + s + unit) >> 24
        end = ((index + 1) * w + s + unit) >> 24
        begin, end = clamp(begin, 0, LAST), clamp(end, 0, LAST)
    else:
        row = labels + h * label_head + r * label_sample
        low = clamp(at - label_start, 0, label_count - 1)
        begin = tl.load(row + low, mask=here, other=0).to(tl.int64)
        own = label_start + low
        # The first label beyond the position ends its block.
        low += 1
        high = tl.zeros_like(low) + label_count
        for _ in range(label_steps):
            middle = (low + high) // 2
            left = low < high
            beyond = tl.load(row + middle, mask=left & here, other=0) > own
            high = tl.where(left & beyond, middle, high)
            low = tl.where(left & (beyond == 0), middle + 1, low)
        end = label_start + low
    begin, end = tl.where(here, begin, LAST), tl.where(here, end, 0)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def reach_of(
    own_at, h, width, shift, labels, label_head, label_sample, label_start, label_count,
    label_steps, samples, ROWS: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Return positions [low, high) that share a block with a tile.

    From the earliest begin of the blocks at its first position to the latest end at its last.
    """
    low = tl.full((), LAST, tl.int32)
    high = tl.full((), 0, tl.int32)
    for first_sample in range(0, samples, SAMPLES):
        r = first_sample + tl.arange(0, SAMPLES)
        begin, _ = bounds_of(own_at, r, h, width, shift, labels, label_head, label_sample,
                             label_start, label_count, label_steps, samples)  # fmt: skip
        _, end = bounds_of(own_at + ROWS - 1, r, h, width, shift, labels, label_head, label_sample,
                           label_start, label_count, label_steps, samples)  # fmt: skip
        low = tl.minimum(low, tl.min(begin, axis=0))
        high = tl.maximum(high, tl.max(end, axis=0))
    # Positions below 0 are in the block of position 0.
    return tl.where(low > 0, low.to(tl.int64), -FAR), high.to(tl.int64)


@triton.jit
def pivots_of(
    own_at, rows, first_sample, h, width, shift, labels, label_head, label_sample, label_start,
    label_count, label_steps, samples, ROWS: tl.constexpr, SAMPLES: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Return what the pivot lemma needs of some samples, for tiles before and after the owned one.

    With a position between them, two tokens share a block iff both share it with that: the first
    owned position for a tile before it, the last for one after it. Returned are whether an owned
    token shares a block with the pivot, ``(ROWS, SAMPLES)``, and where that block ends on the
    other side; first of tiles before, then of tiles after.
    """
    r = first_sample + tl.arange(0, SAMPLES)
    begin, end = bounds_of(own_at, r, h, width, shift, labels, label_head, label_sample,
                           label_start, label_count, label_steps, samples)  # fmt: skip
    row_at = tl.maximum(near(own_at) + rows, 0)[:, None]
    own_before, before = (row_at < end[None, :]).to(COUNTED), begin
    begin, end = bounds_of(own_at + ROWS - 1, r, h, width, shift, labels, label_head, label_sample,
                           label_start, label_count, label_steps, samples)  # fmt: skip
    return own_before, before, (row_at >= begin[None, :]).to(COUNTED), end


@triton.jit
def shared_with(
    column_at, is_before, own_before, before, own_after, after, counts,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Add the samples in which pairs share a block: one 0/1 matrix product, exact in any dtype."""
    column_at = column_at[None, :]
    if CAUSAL and own_before.dtype == tl.float16:  # without tensor cores it would cost registers
        if QUERIES:
            own, other = own_before, column_at >= before[:, None]
        else:
            own, other = own_after, column_at < after[:, None]
    else:
        own = tl.where(is_before, own_before, own_after)
        bound = tl.where(is_before, before, after)[:, None]
        other = (column_at < bound) != is_before
    return tl.dot(own, other.to(own.dtype), counts, input_precision="ieee")


@triton.jit
def count_tile(
    rows, columns, t, own_at, diagonal, own_before, before, own_after, after, h,
    width, shift, labels, label_head, label_sample, label_start, label_count, label_steps, samples,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SAMPLES: tl.constexpr, CHUNKED: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return the samples in which the pairs of tile t share a block, ``(ROWS, COLUMNS)``.

    `diagonal` points at the owned tile's own counts; `own_before` and so on are those of
    `pivots_of`, of all samples unless these are chunked.
    """
    column_at = tl.maximum(near(own_at + COLUMNS * t) + columns, 0)
    counts = tl.zeros((ROWS, COLUMNS), tl.float32)
    across = True
    if MASKED:
        across = (t < 0) | (t >= ROWS // COLUMNS)
        if across == 0:
            where = rows[:, None] * ROWS + (COLUMNS * t).to(tl.int32) + columns[None, :]
            counts = tl.load(diagonal + where).to(tl.float32)
    if across:
        if CHUNKED:
            for first_sample in range(0, samples, SAMPLES):
                own_before, before, own_after, after = pivots_of(
                    own_at, rows, first_sample, h, width, shift, labels, label_head, label_sample,
                    label_start, label_count, label_steps, samples, ROWS, SAMPLES,
                    own_before.dtype)  # fmt: skip
                counts = shared_with(column_at, t < 0, own_before, before, own_after, after, counts,
                                     CAUSAL, QUERIES)  # fmt: skip
        else:
            counts = shared_with(column_at, t < 0, own_before, before, own_after, after, counts,
                                 CAUSAL, QUERIES)  # fmt: skip
    return counts.to(ACC)

// The positional weight: what is added to a logit, and what multiplies its exponential. The latter
// is 0 for a pair that is hidden, for whatever reason.
//
// PLSH_STEP 0: exp(-slope * distance) within a bandwidth. PLSH_STEP 1: the number of partitions in
// which a pair shares a block, whose logarithm less ln(samples) is the weight of the lse. The
// header of products, included before this one, has add_shared, which counts.
//
// Spec: BCK-13, NUM-2, NUM-3, NUM-6.
#ifndef PLSH_WEIGHT_CUH
#define PLSH_WEIGHT_CUH

#include <band.cuh>

#if !PLSH_STEP

struct Weight {
    Acc slope;
    int64 bandwidth;

    __device__ Weight(Arena&) {}

    __device__ void begin(const Params& p, int64 b, int64 h, Band& band) {
        const double given = read_real(p.slopes.at(b, h, 0), p.slopes_kind);
        slope = (Acc)(given < PLSH_STEEPEST ? given : PLSH_STEEPEST);
        bandwidth = read<int>(p.bandwidth.at(0, h, 0));
        band.visit(band.own_at - bandwidth, band.own_at + ROWS + bandwidth);
    }

    __device__ Acc bias(int distance) const { return -slope * (Acc)distance; }

    // The weights of tile t, of COUNT columns from number `first` of the thread's on.
    template <int COUNT>
    __device__ void weigh(Acc (&weight)[M][COUNT], const Params&, const Band&, int64,
                          unsigned seen, int first = 0) {
        seen >>= first;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < COUNT; ++n) weight[m][n] = (Acc)(seen >> (N * m + n) & 1);
    }

    __device__ Acc normaliser(const Params&) const { return 0; }
};

#else

// The block of partition r that holds a position: [begin, end).
struct Bounds {
    int begin, end;
};

constexpr int WORD = 32;  // samples whose bits share a word
constexpr int LABELS = 16;  // samples of the diagonal whose labels are held at a time
constexpr int SPAN = DIAGONALS * COLUMNS;  // positions of the diagonal

__device__ inline Bounds bounds_of(const Params& p, int64 h, int64 r, int64 position) {
    const int64 most = 1LL << 30, at = position > 0 ? position : 0;  // padding counts as 0
    if (p.labels.data == nullptr) {
        const int64 width = read<int64>(p.width.at(0, h, 0) + r * p.width.dim);
        const int64 shift = read<int64>(p.shift.at(0, h, 0) + r * p.shift.dim);
        const int64 above = (at << 24) - shift, unit = (1LL << 24) - 1;
        int64 index = above / width;
        if (above - index * width < 0) index -= 1;  // division rounds to 0, blocks down
        const int64 begin = (index * width + shift + unit) >> 24;
        const int64 end = ((index + 1) * width + shift + unit) >> 24;
        return {(int)(begin > 0 ? begin : 0), (int)(end < most ? end : most)};
    }
    // A table of labels: the first label beyond the position ends its block.
    const char* row = p.labels.at(0, h, 0) + r * p.labels.dim;
    int64 low = at - p.label_start;
    low = low < 0 ? 0 : low < p.label_count ? low : p.label_count - 1;
    const int begin = read<int>(row + low * p.labels.token);
    const int64 own = p.label_start + low;
    int64 high = p.label_count;
    for (low += 1; low < high;) {
        const int64 middle = (low + high) / 2;
        if (read<int>(row + middle * p.labels.token) > own)
            high = middle;
        else
            low = middle + 1;
    }
    return {begin, (int)(p.label_start + low)};
}

struct Weight {
    static constexpr int64 bandwidth = 1LL << 32;  // the blocks bound the band
    Shared<int> begins, ends, labels, limits;
    Shared<unsigned> own_bits, other_bits;
    int64 h;
    int held;  // the side whose pivot own_bits are of: -1, 1, or 0 for none
    bool labelled;  // whether labels are those of this head's diagonal

    __device__ Weight(Arena& arena) {
        begins = arena.take<int>(WORD);
        ends = arena.take<int>(WORD);
        labels = arena.take<int>(LABELS * SPAN);
        limits = arena.take<int>(2 * THREADS / 32);
        own_bits = arena.take<unsigned>(ROWS);
        other_bits = arena.take<unsigned>(COLUMNS);
    }

    // The band reaches from the earliest begin of the blocks at the first owned position to the
    // latest end of those at the last.
    __device__ void begin(const Params& p, int64, int64 head, Band& band) {
        h = head;
        held = 0;
        labelled = false;
        int low = 1 << 30, high = 0;
        for (int r = threadIdx.x; r < p.samples; r += THREADS) {
            const Bounds first = bounds_of(p, h, r, band.own_at);
            const Bounds last = bounds_of(p, h, r, band.own_at + ROWS - 1);
            low = first.begin < low ? first.begin : low;
            high = last.end > high ? last.end : high;
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            const int other_low = __shfl_xor_sync(0xffffffffu, low, step);
            const int other_high = __shfl_xor_sync(0xffffffffu, high, step);
            low = other_low < low ? other_low : low;
            high = other_high > high ? other_high : high;
        }
        __syncthreads();  // limits of an earlier head are read
        if (threadIdx.x % 32 == 0) {
            limits[threadIdx.x / 32 * 2] = low;
            limits[threadIdx.x / 32 * 2 + 1] = high;
        }
        __syncthreads();
        for (int warp = 0; warp < THREADS / 32; ++warp) {
            low = limits[2 * warp] < low ? limits[2 * warp] : low;
            high = limits[2 * warp + 1] > high ? limits[2 * warp + 1] : high;
        }
        // Positions below 0 are in the block of position 0.
        band.visit(low > 0 ? (int64)low : -(1LL << 40), high);
    }

    __device__ Acc bias(int) const { return 0; }

    template <int COUNT>
    __device__ void weigh(Acc (&weight)[M][COUNT], const Params& p, const Band& band, int64 t,
                          unsigned seen, int first = 0) {
        Count count[M][COUNT] = {};
        if (band.diagonal(t))
            count_diagonal(count, p, band, (int)t * COLUMNS + first * LANES);
        else
            count_by_pivot(count, p, band, t, first * LANES);
        seen >>= first;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
                weight[m][n] = (Acc)(count[m][n] * (Count)(seen >> (N * m + n) & 1));
    }

    __device__ Acc normaliser(const Params& p) const { return logarithm((Acc)p.samples); }

  private:
    // The pivot lemma: with a position between them, two tokens share a block if and only if both
    // share it with the pivot, the owned position nearest to the tile. A bit a sample and token.
    template <int COUNT>
    __device__ void count_by_pivot(Count (&count)[M][COUNT], const Params& p, const Band& band,
                                   int64 t, int from) {
        const int side = t < 0 ? -1 : 1;
        const int64 pivot = t < 0 ? band.own_at : band.own_at + ROWS - 1;
        const bool fresh = side != held || p.samples > WORD;
        for (int64 first = 0; first < p.samples; first += WORD) {
            if (fresh) {
                if (threadIdx.x < WORD) {
                    const int64 r = first + threadIdx.x;
                    const Bounds held_by =
                        r < p.samples ? bounds_of(p, h, r, pivot) : Bounds{1, 0};
                    begins[threadIdx.x] = held_by.begin;
                    ends[threadIdx.x] = held_by.end;
                }
                __syncthreads();
                if (threadIdx.x >= COLUMNS && threadIdx.x < COLUMNS + ROWS)
                    own_bits[threadIdx.x - COLUMNS] =
                        bits_of(band.own_at + threadIdx.x - COLUMNS);
            }
            const int column = from + threadIdx.x;
            if (threadIdx.x < COUNT * LANES)
                other_bits[column] = bits_of(band.own_at + COLUMNS * t + column);
            __syncthreads();
            const int64 here = p.samples - first;
            add_shared(count, own_bits, other_bits + from, (int)(here < WORD ? here : WORD));
        }
        held = side;
    }

    __device__ unsigned bits_of(int64 position) const {
        const int at = (int)(position > 0 ? position : 0);
        unsigned bits = 0;
#pragma unroll 2
        for (int r = 0; r < WORD; ++r)
            bits |= (unsigned)(begins[r] <= at && at < ends[r]) << r;
        return bits;
    }

    // No one pivot lies between the pairs of the diagonal: their blocks begin at the same place, or
    // they do not. Begins are held relative to the owned tile, as one where they lie before it.
    template <int COUNT>
    __device__ void count_diagonal(Count (&count)[M][COUNT], const Params& p, const Band& band,
                                   int from) {
        const bool fresh = !labelled || p.samples > LABELS;
        for (int64 first = 0; first < p.samples; first += LABELS) {
            const int here = (int)(p.samples - first < LABELS ? p.samples - first : LABELS);
            if (first > 0) __syncthreads();
            if (fresh) {
                for (int e = threadIdx.x; e < here * SPAN; e += THREADS) {
                    const int64 begin =
                        bounds_of(p, h, first + e / SPAN, band.own_at + e % SPAN).begin;
                    labels[e] = begin > 0 && begin > band.own_at ? (int)(begin - band.own_at) : -1;
                }
                __syncthreads();
            }
#pragma unroll 1
            for (int r = 0; r < here; ++r) {
                int of_column[COUNT];
#pragma unroll
                for (int n = 0; n < COUNT; ++n)
                    of_column[n] = labels[r * SPAN + from + column_of(n)];
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    const int of_row = labels[r * SPAN + row_of(m)];
#pragma unroll
                    for (int n = 0; n < COUNT; ++n)
                        count[m][n] += (Count)(of_row == of_column[n]);
                }
            }
        }
        labelled = true;
    }
};

#endif
#endif

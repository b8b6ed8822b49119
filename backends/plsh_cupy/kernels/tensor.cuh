// Tiles and their products on tensor cores, for 16-bit numbers whose dims lie together.
//
// A tile is ROWS or COLUMNS tokens in shared memory as they come, PITCH numbers apart: 16 bytes
// more than a multiple of 32, so that the eight rows that one load takes meet in no bank. Dims from
// D to the next multiple of 16 are zeros, further ones are not there.
#ifndef PLSH_TENSOR_CUH
#define PLSH_TENSOR_CUH

#include <layout.cuh>
#include <mma.cuh>

constexpr int STEP = 16, PITCH = DIM + 8, PIECE = 8;  // dims of a product, of a row, of a copy
constexpr int PIECES = DIM / PIECE;  // of a token

static_assert(sizeof(Float) == 2 && DIM % STEP == 0, "whole steps of 16-bit numbers");
static_assert(THREADS % PIECES == 0, "a thread copies the same dims of several tokens");

// Begin to copy TOKENS tokens from `first` on: those for which exists(index in the tile), zeros
// else. `base` is the address of token 0, each piece of 16 bytes aligned.
template <int TOKENS = COLUMNS, typename Exists>
__device__ inline void copy_tile(Shared<Float> to, const View& x, const char* base, int64 first,
                                 int64 dim, Exists exists) {
    const int thread = thread_afresh(), d = thread % PIECES * PIECE;
    if (d >= (dim + STEP - 1) / STEP * STEP) return;
    const char* from = base + (first + thread / PIECES) * x.token + d * (int)sizeof(Float);
#pragma unroll 1
    for (int token = thread / PIECES; token < TOKENS; token += THREADS / PIECES) {
        const bool there = d < dim && exists(token);
        copy_later<Float>(to + (token * PITCH + d), there ? from : base, there);
        from += THREADS / PIECES * x.token;
    }
}

// Multiply what this thread has copied of the owned tile, and waited for, by a power of two.
__device__ inline void scale_tile(Shared<Float> tile, int64 dim, Acc factor) {
    if (factor == 1) return;
    for (int e = threadIdx.x * PIECE; e < ROWS * DIM; e += THREADS * PIECE)
        for (int d = e % DIM; d < e % DIM + PIECE && d < dim; ++d) {
            const int at = e / DIM * PITCH + d;
            tile[at] = Narrow<Float>::of(widen((Float)tile[at]) * factor);
        }
}

// The 16 dims from d on of the rows of this warp, as operand A.
__device__ inline void load_rows(unsigned (&a)[4], Shared<const Float> tile, int d) {
    const int l = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + l % 16;
    load_matrices<Float>(a, tile + (row * PITCH + d + l / 16 * 8));
}

// sum[m][n] += row m of `rows` . row column_of(n) of `columns`.
template <int COUNT>
__device__ inline void add_dots(Acc (&sum)[M][COUNT], Shared<const Float> rows,
                                Shared<const Float> columns, int64 dim) {
    const int l = threadIdx.x % 32, column = l / 16 * 8 + l % 8, right = l / 8 % 2 * 8;
#pragma unroll
    for (int d = 0; d < DIM; d += STEP) {
        if (d >= dim) break;
        unsigned a[4], b[4];
        load_rows(a, rows, d);
#pragma unroll
        for (int n = 0; n < COUNT; n += 4) {  // 16 columns
            load_matrices<Float>(b, columns + ((column + 4 * n) * PITCH + d + right));
            mma<Float>(sum[0][n], sum[0][n + 1], sum[1][n], sum[1][n + 1], a, b[0], b[1]);
            mma<Float>(sum[0][n + 2], sum[0][n + 3], sum[1][n + 2], sum[1][n + 3], a, b[2], b[3]);
        }
    }
}

// sum[m][slot] += sum of pairs[m][n] times dim dim_of(slot) of token column_of(n) of `columns`. The
// pairs, rounded, are in place already: a sum of 16 x 8 is laid out as half of an operand A.
template <int COUNT>
__device__ inline void add_product(Acc (&sum)[M][SLOTS], const Acc (&pairs)[M][COUNT],
                                   Shared<const Float> columns, int64 dim) {
    const int l = threadIdx.x % 32, token = l % 16, right = l / 16 * 8;
#pragma unroll
    for (int n = 0; n < COUNT; n += 4) {  // 16 tokens
        const unsigned a[4] = {pack<Float>(pairs[0][n], pairs[0][n + 1]),
                               pack<Float>(pairs[1][n], pairs[1][n + 1]),
                               pack<Float>(pairs[0][n + 2], pairs[0][n + 3]),
                               pack<Float>(pairs[1][n + 2], pairs[1][n + 3])};
        unsigned b[4];
#pragma unroll
        for (int d = 0; d < DIM; d += STEP) {
            if (d >= dim) break;
            const int s = d / LANES;
            load_transposed<Float>(b, columns + ((token + 4 * n) * PITCH + d + right));
            mma<Float>(sum[0][s], sum[0][s + 1], sum[1][s], sum[1][s + 1], a, b[0], b[1]);
            mma<Float>(sum[0][s + 2], sum[0][s + 3], sum[1][s + 2], sum[1][s + 3], a, b[2], b[3]);
        }
    }
}

// Whether a number's range, of 2^-14 to 2^16 with all digits, is less than that of sums.
template <typename T> constexpr bool NARROW = false;
template <> constexpr bool NARROW<Half> = true;

// What a weight of 1 is as a pair, so that weights down to 2^-29 keep their digits.
constexpr Acc PEAK = NARROW<Float> ? 32768 : 1;

// What the pairs of each row are multiples of, so that numbers of 16 bits hold them: a power of two
// that grows with the largest pair of the row so far, or 1 where the range is that of sums. It
// belongs to a row of the result: what is added up there has one unit, be it of queries or of keys.
struct Units {
    Acc unit[M];

    __device__ Units() {
#pragma unroll
        for (int m = 0; m < M; ++m) unit[m] = NARROW<Float> ? 0x1p-100f : 1;
    }

    // Turn pairs into multiples, and the sums of earlier pairs into those of a unit that grows.
    template <int COUNT> __device__ void divide(Acc (&pairs)[M][COUNT], Acc (&sum)[M][SLOTS]) {
        if constexpr (NARROW<Float>) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
                Acc most = 0;
#pragma unroll
                for (int n = 0; n < COUNT; ++n) {
                    const Acc size = pairs[m][n] < 0 ? -pairs[m][n] : pairs[m][n];
                    most = size > most ? size : most;
                }
                const Acc wanted = binade(max_lanes(most)) * 0x1p-14f;
                if (wanted > unit[m]) {
                    const Acc fade = unit[m] * inverse_power(wanted);
                    unit[m] = wanted;
#pragma unroll
                    for (int slot = 0; slot < SLOTS; ++slot) sum[m][slot] *= fade;
                }
                const Acc factor = inverse_power(unit[m]);
#pragma unroll
                for (int n = 0; n < COUNT; ++n) pairs[m][n] *= factor;
            }
        }
    }
};

template <typename T> constexpr unsigned ONE = 0;  // the number 1
template <> constexpr unsigned ONE<Half> = 0x3c00;
template <> constexpr unsigned ONE<BFloat16> = 0x3f80;

// Bits `at` and `at` + 1 as two numbers, 0 or 1.
__device__ inline unsigned two_bits(unsigned bits, int at) {
    const unsigned two = bits >> at & 3;
    return ((two | two << 15) & 0x10001u) * ONE<Float>;
}

// count[m][n] += bits that row m and column n share, of the lowest `bits`: a product of zeros and
// ones, exact in float32.
template <int COUNT>
__device__ inline void add_shared(Count (&count)[M][COUNT], Shared<const unsigned> rows,
                                  Shared<const unsigned> columns, int bits) {
    const unsigned first = rows[row_of(0)], second = rows[row_of(1)];
#pragma unroll 1
    for (int at = 2 * lane(); at < bits + 2 * lane(); at += STEP) {
        const unsigned a[4] = {two_bits(first, at), two_bits(second, at), two_bits(first, at + 8),
                               two_bits(second, at + 8)};
#pragma unroll
        for (int n = 0; n < COUNT; n += 2) {
            const unsigned column = columns[4 * n + threadIdx.x % 32 / LANES];
            mma<Float>(count[0][n], count[0][n + 1], count[1][n], count[1][n + 1], a,
                       two_bits(column, at), two_bits(column, at + 8));
        }
    }
}

// Write row m of the result, times `factor`, for the owned tokens that exist.
__device__ inline void store_rows(const Acc (&sum)[M][SLOTS], const View& x, int64 b, int64 h,
                                  int64 first, int64 length, int64 dim, const Acc (&factor)[M]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const int64 i = first + row_of(m);
        if (i >= length) continue;
        char* to = x.at(b, h, i);
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot += 2)
            if (dim_of(slot) < dim)
                write<unsigned>(to + dim_of(slot) * (int)sizeof(Float),
                                pack<Float>(sum[m][slot] * factor[m],
                                            sum[m][slot + 1] * factor[m]));
    }
}

#endif

// Tiles and their two products, for a block of THREADS threads.
//
// A block owns a tile of ROWS tokens and visits tiles of COLUMNS tokens of the other side. Of the
// ROWS x COLUMNS pairs a thread holds M x N in registers: rows group() * M + m, columns lane() +
// LANES * n. The LANES threads that share rows are neighbours in one warp. Inner products go in
// chunks of CHUNK dims, so that a visited tile needs shared memory for one chunk only.
#ifndef PLSH_TILE_CUH
#define PLSH_TILE_CUH

#include <params.cuh>

// The instance: PLSH_FLOAT is the type of q, k and v, PLSH_ACCUMULATOR that of sums, PLSH_ROWS the
// size of the owned tile, PLSH_DIM the largest of D and Dv that it serves.
typedef PLSH_FLOAT Float;
typedef PLSH_ACCUMULATOR Acc;

constexpr int THREADS = 256, LANES = 16, GROUPS = THREADS / LANES;
constexpr int ROWS = PLSH_ROWS, COLUMNS = 64, CHUNK = 32, DIM = PLSH_DIM;
constexpr int M = ROWS / GROUPS, N = COLUMNS / LANES;
constexpr int SLOTS = DIM / LANES, PER_CHUNK = CHUNK / LANES;
// Four more than a power of two: rows stay 16-byte aligned, and lanes meet in no bank.
constexpr int CHUNK_PITCH = CHUNK + 4, PAIR_PITCH = COLUMNS + 4;

static_assert(ROWS % GROUPS == 0 && ROWS <= COLUMNS, "a diagonal tile covers the owned one");
static_assert(M * N <= 32, "one bit a pair in an unsigned");
static_assert(DIM % CHUNK == 0, "whole chunks");
static_assert(COLUMNS == 64, "Band::visit shifts by 6");

__device__ inline int lane() { return threadIdx.x % LANES; }
__device__ inline int group() { return threadIdx.x / LANES; }
__device__ inline int row_of(int m) { return group() * M + m; }
__device__ inline int column_of(int n) { return lane() + LANES * n; }

__device__ inline int round_up(int64 dim) { return (int)(dim + CHUNK - 1) / CHUNK * CHUNK; }
__device__ inline int resident_pitch(int64 dim) { return round_up(dim) + 4; }

// Sum, or maximum, over the lanes that share rows; every lane gets it.
template <typename T> __device__ inline T sum_lanes(T x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ inline Acc max_lanes(Acc x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        Acc other = __shfl_xor_sync(0xffffffffu, x, step);
        x = other > x ? other : x;
    }
    return x;
}

// Load dims [begin, begin + CHUNK) of `count` tokens from `first` on into rows of `pitch`, times
// `factor`. What stands in padding or beyond the end (id < 0) is not read: zeros.
__device__ inline void load_chunk(Shared<Acc> to, int pitch, const View& x, const char* base,
                                  int64 first, Shared<int64> ids, int count, int begin, int64 dim,
                                  Acc factor) {
#pragma unroll 2
    for (int e = threadIdx.x; e < count * CHUNK; e += THREADS) {
        int token = e / CHUNK, d = e % CHUNK;
        Acc value = 0;
        if (begin + d < dim && ids[token] >= 0)
            value = widen(read<Float>(base + (first + token) * x.token + (begin + d) * x.dim));
        to[token * pitch + d] = value * factor;
    }
}

__device__ inline void load_tile(Shared<Acc> to, const View& x, const char* base, int64 first,
                                 Shared<int64> ids, int64 dim, Acc factor) {
    for (int begin = 0; begin < dim; begin += CHUNK)
        load_chunk(to + begin, resident_pitch(dim), x, base, first, ids, ROWS, begin, dim, factor);
}

// sum[m][n] += row m . column n, over one chunk of dims, which is added up first: so that rounding
// grows with CHUNK and the number of chunks, not with their product.
__device__ inline void add_dots(Acc (&sum)[M][N], Shared<const Acc> rows, int pitch,
                                Shared<const Acc> columns) {
    Acc part[M][N] = {};
#pragma unroll 1
    for (int d = 0; d < CHUNK; d += 4) {
        Four<Acc> a[M], b[N];
#pragma unroll
        for (int m = 0; m < M; ++m) a[m] = load_four<Acc>(rows + row_of(m) * pitch + d);
#pragma unroll
        for (int n = 0; n < N; ++n) b[n] = load_four<Acc>(columns + column_of(n) * CHUNK_PITCH + d);
#pragma unroll
        for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < N; ++n) part[m][n] += a[m].v[u] * b[n].v[u];
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n) sum[m][n] += part[m][n];
}

// sum[m][.] += pairs of row m . visited tokens, for the dims of one chunk: slots of dims lane() +
// LANES * slot. A tile is added up first, so that the rounding of thousands of tokens is that of
// COLUMNS and of the number of tiles.
__device__ inline void add_product(Acc (&sum)[M][SLOTS], int chunk, Shared<const Acc> pairs,
                                   Shared<const Acc> columns) {
    Acc part[M][PER_CHUNK] = {};
#pragma unroll 1
    for (int j = 0; j < COLUMNS; j += 4) {
        Four<Acc> a[M];
#pragma unroll
        for (int m = 0; m < M; ++m) a[m] = load_four<Acc>(pairs + row_of(m) * PAIR_PITCH + j);
#pragma unroll
        for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int slot = 0; slot < PER_CHUNK; ++slot) {
                Acc b = columns[(j + u) * CHUNK_PITCH + lane() + LANES * slot];
#pragma unroll
                for (int m = 0; m < M; ++m) part[m][slot] += a[m].v[u] * b;
            }
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int slot = 0; slot < PER_CHUNK; ++slot)
            sum[m][chunk * PER_CHUNK + slot] += part[m][slot];
}

__device__ inline void store_pairs(Shared<Acc> to, const Acc (&pairs)[M][N]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n) to[row_of(m) * PAIR_PITCH + column_of(n)] = pairs[m][n];
}

// Write row m of the result, times `factor`, for the owned tokens that exist.
__device__ inline void store_rows(const Acc (&sum)[M][SLOTS], const View& x, int64 b, int64 h,
                                  int64 first, int64 length, int64 dim, const Acc (&factor)[M]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
        int64 i = first + row_of(m);
        if (i >= length) continue;
        char* to = x.at(b, h, i);
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
            int d = lane() + LANES * slot;
            if (d < dim) write<Float>(to + d * x.dim, Narrow<Float>::of(sum[m][slot] * factor[m]));
        }
    }
}

#endif

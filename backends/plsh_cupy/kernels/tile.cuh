// Tiles and their two products on the cores of float32 and float64, for any dims and strides.
//
// Inner products go in chunks of CHUNK dims, so that a visited tile needs shared memory for one
// chunk only.
#ifndef PLSH_TILE_CUH
#define PLSH_TILE_CUH

#include <layout.cuh>

constexpr int CHUNK = 32, PER_CHUNK = CHUNK / LANES;
// Four more than a power of two: rows stay 16-byte aligned, and lanes meet in no bank.
constexpr int CHUNK_PITCH = CHUNK + 4, PAIR_PITCH = COLUMNS + 4;

static_assert(DIM % CHUNK == 0, "whole chunks");

__device__ inline int round_up(int64 dim) { return (int)(dim + CHUNK - 1) / CHUNK * CHUNK; }
__device__ inline int resident_pitch(int64 dim) { return round_up(dim) + 4; }

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
                Acc b = columns[(j + u) * CHUNK_PITCH + dim_of(slot)];
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

// count[m][n] += bits that row m and column n share.
__device__ inline void add_shared(Count (&count)[M][N], Shared<const unsigned> rows,
                                  Shared<const unsigned> columns, int) {
    unsigned of_column[N];
#pragma unroll
    for (int n = 0; n < N; ++n) of_column[n] = columns[column_of(n)];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const unsigned of_row = rows[row_of(m)];
#pragma unroll
        for (int n = 0; n < N; ++n) count[m][n] += count_bits(of_row & of_column[n]);
    }
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
            int d = dim_of(slot);
            if (d < dim) write<Float>(to + d * x.dim, Narrow<Float>::of(sum[m][slot] * factor[m]));
        }
    }
}

#endif

// Which pairs and results a thread holds, of a block of THREADS threads.
//
// A block owns a tile of ROWS tokens and visits tiles of COLUMNS tokens of the other side. Of the
// ROWS x COLUMNS pairs a thread holds M x N in registers, pair (m, n) being that of row row_of(m)
// and column column_of(n), and of the results of its rows the SLOTS dims dim_of(slot). The LANES
// threads that share rows are neighbours in one warp.
#ifndef PLSH_LAYOUT_CUH
#define PLSH_LAYOUT_CUH

#include <params.cuh>

// The instance: PLSH_FLOAT is the type of q, k and v, PLSH_ACCUMULATOR that of sums, PLSH_ROWS the
// size of the owned tile, PLSH_DIM the largest of D and Dv that it serves, PLSH_TENSOR 1 where
// products are those of tensor cores.
typedef PLSH_FLOAT Float;
typedef PLSH_ACCUMULATOR Acc;

constexpr int ROWS = PLSH_ROWS, COLUMNS = 64, DIM = PLSH_DIM;

#if PLSH_TENSOR

// A warp owns 16 rows. Of a product of 16 x 8 numbers a thread holds two neighbours of two rows.
constexpr int THREADS = 2 * ROWS, LANES = 4, M = 2;
typedef Acc Count;

static_assert(THREADS % 32 == 0 && THREADS >= ROWS + COLUMNS, "whole warps, a token a thread");

__device__ inline int lane() { return threadIdx.x % LANES; }
__device__ inline int row_of(int m) {
    return threadIdx.x / 32 * 16 + threadIdx.x % 32 / LANES + 8 * m;
}
__device__ inline int column_of(int n) { return 8 * (n / 2) + 2 * lane() + n % 2; }
__device__ inline int dim_of(int slot) { return column_of(slot); }

#else

constexpr int THREADS = 256, LANES = 16, M = ROWS * LANES / THREADS;
typedef int Count;

static_assert(ROWS * LANES % THREADS == 0, "whole rows a group");

__device__ inline int lane() { return threadIdx.x % LANES; }
__device__ inline int row_of(int m) { return threadIdx.x / LANES * M + m; }
__device__ inline int column_of(int n) { return lane() + LANES * n; }
__device__ inline int dim_of(int slot) { return lane() + LANES * slot; }

#endif

constexpr int DIAGONALS = ROWS > COLUMNS ? ROWS / COLUMNS : 1;
constexpr int GROUPS = THREADS / LANES, N = COLUMNS / LANES, SLOTS = DIM / LANES;

static_assert(ROWS <= DIAGONALS * COLUMNS, "diagonal tiles cover the owned one");
static_assert(M * N <= 32, "one bit a pair in an unsigned");
static_assert(COLUMNS == 64, "Band::visit shifts by 6");

__device__ inline int group() { return threadIdx.x / LANES; }

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

#endif

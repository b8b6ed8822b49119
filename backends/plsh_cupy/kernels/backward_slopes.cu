// plsh_backward_slopes: the gradient by slopes, from the parts of plsh_backward_queries.
//
// Grid    one block a slope: a head, or a batch row and head where slopes are given per row.
// Block   THREADS threads; each sums every THREADS-th part, in order.
// Shared  dynamic: one sum a thread.
// Reads   by_slope of its head, over tiles, and over batch rows unless slopes are per row.
// Writes  its entry of grad_slopes, which no other block writes.
// Spec    NUM-9, NUM-11.
#include <tile.cuh>

extern "C" __global__ void __launch_bounds__(THREADS, 1) plsh_backward_slopes(const Params p) {
    Arena arena;
    Shared<double> sums = arena.take<double>(THREADS);
    const int64 index = p.first_block + blockIdx.x, h = index % p.heads, b = index / p.heads;
    const int64 rows = p.grad_slopes.batch == 0 ? p.batch : 1;
    double sum = 0;
    for (int64 e = threadIdx.x; e < rows * p.tiles; e += THREADS)
        sum += read<double>(p.by_slope.at(b + e / p.tiles, h, e % p.tiles));
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    sum = 0;
    for (int i = 0; i < THREADS; ++i) sum += sums[i];
    char* to = p.grad_slopes.at(b, h, 0);
    switch (p.grad_slopes_kind) {
    case FLOAT16: return write<Half>(to, Narrow<Half>::of((float)-sum));
    case BFLOAT16: return write<BFloat16>(to, Narrow<BFloat16>::of((float)-sum));
    case FLOAT32: return write<float>(to, (float)-sum);
    default: return write<double>(to, -sum);
    }
}

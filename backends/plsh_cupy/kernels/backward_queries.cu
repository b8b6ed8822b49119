// plsh_backward_queries: the gradients by q, and by slopes in parts, by tile of queries.
//
// Grid    one block a tile of ROWS queries, batch row and query head (place_of).
// Block   THREADS threads; thread (group, lane) holds M query rows by N keys, and M rows by SLOTS
//         dims of the gradient.
// Shared  dynamic, in this order: q (ROWS x D), grad_out (ROWS x Dv), keys or values (COLUMNS x
//         CHUNK), pairs (ROWS x COLUMNS), segment ids of both sides, the slopes' sums of the
//         groups, and what the weight takes; see `shared_bytes` of _plan.py.
// Reads   q, out, lse, grad_out and grad_lse of its rows; k, v and segment ids in its band.
// Writes  grad_q and delta of its rows and its own entry of by_slope: no other block does.
// Spec    NUM-8 to NUM-10, ATT-21.
#include <tile.cuh>
#include <weight.cuh>

constexpr double LOG2E = 1.4426950408889634;

extern "C" __global__ void __launch_bounds__(THREADS, 1) plsh_backward_queries(const Params p) {
    Arena arena;
    const int pitch = resident_pitch(p.dim), value_pitch = resident_pitch(p.value_dim);
    Shared<Acc> q = arena.take<Acc>(ROWS * pitch);
    Shared<Acc> grad = arena.take<Acc>(ROWS * value_pitch);
    Shared<Acc> visited = arena.take<Acc>(COLUMNS * CHUNK_PITCH);
    Shared<Acc> pairs = arena.take<Acc>(ROWS * PAIR_PITCH);
    Shared<int64> own_ids = arena.take<int64>(ROWS);
    Shared<int64> other_ids = arena.take<int64>(COLUMNS);
    Shared<double> sums = arena.take<double>(GROUPS);
    Weight weight(arena);

    const Place place = place_of(p);
    const int64 kv = place.h / (p.heads / p.kv_heads);
    Band band(p, place, true);
    load_ids(own_ids, p.q_ids, p.q_ids_kind, place.b, band.own_first, p.len_q, ROWS);
    __syncthreads();
    load_tile(q, p.q, p.q.at(place.b, place.h, 0), band.own_first, own_ids, p.dim,
              (Acc)p.factor);
    load_tile(grad, p.grad_out, p.grad_out.at(place.b, place.h, 0), band.own_first, own_ids,
              p.value_dim, 1);
    weight.begin(p, place.b, place.h, band);
    __syncthreads();

    // A row that sees no key has the lse +inf here, so that its weights are 0, and a delta of 0.
    Acc by_query[M][SLOTS] = {}, lse[M], delta[M];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const int64 i = band.own_first + row_of(m);
        lse[m] = infinity(Acc());
        delta[m] = 0;
        bool live = own_ids[row_of(m)] >= 0;
        if (live) {
            const Acc given = read<Acc>(p.lse.at(place.b, place.h, i));
            live = given != -infinity(Acc());
            if (live) lse[m] = given + weight.normaliser(p);
        }
        const char* out = p.out.at(place.b, place.h, i);
        for (int d = lane(); live && d < p.value_dim; d += LANES)
            delta[m] += grad[row_of(m) * value_pitch + d] * widen(read<Float>(out + d * p.out.dim));
        delta[m] = sum_lanes(delta[m]);
        if (live && p.grad_lse.data != nullptr)
            delta[m] -= read<Acc>(p.grad_lse.at(place.b, place.h, i));
        if (lane() == 0 && i < p.len_q) write<Acc>(p.delta.at(place.b, place.h, i), delta[m]);
    }

    double by_slope = 0;
    for (int64 t = band.begin; t < band.end; ++t) {
        const int64 first = band.other_first(t);
        load_ids(other_ids, p.k_ids, p.k_ids_kind, place.b, first, p.len_k, COLUMNS);
        __syncthreads();
        unsigned seen = 0xffffffffu;
        if (!band.whole(t, weight.bandwidth)) {
            seen = band.visible(t, weight.bandwidth, own_ids, other_ids);
            if (!__syncthreads_or(seen != 0)) continue;
        }
        const char* keys = p.k.at(place.b, kv, 0);
        const char* values = p.v.at(place.b, kv, 0);
        Acc x[M][N] = {}, ds[M][N] = {};
        for (int begin = 0; begin < p.dim; begin += CHUNK) {
            if (begin > 0) __syncthreads();
            load_chunk(visited, CHUNK_PITCH, p.k, keys, first, other_ids, COLUMNS, begin, p.dim,
                       1);
            __syncthreads();
            add_dots(x, q + begin, pitch, visited);
        }
        for (int begin = 0; begin < p.value_dim; begin += CHUNK) {
            __syncthreads();
            load_chunk(visited, CHUNK_PITCH, p.v, values, first, other_ids, COLUMNS, begin,
                       p.value_dim, 1);
            __syncthreads();
            add_dots(ds, grad + begin, value_pitch, visited);
        }
        Acc count[M][N];
        weight.weigh(count, p, band, t, seen);
        Acc moved = 0;  // sum of distance * dS
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int d = band.apart(t) + row_of(m) - column_of(n);
                const int distance = d < 0 ? -d : d;
                const Acc power = (x[m][n] * (Acc)p.after + weight.bias(distance) - lse[m]);
                const Acc weighed = power_of_two(power * (Acc)LOG2E) * count[m][n];
                const bool here = count[m][n] > 0;
                ds[m][n] = here ? weighed * (ds[m][n] - delta[m]) : 0;
                moved += ds[m][n] * (Acc)distance;
            }
        by_slope += moved;
        store_pairs(pairs, ds);
#pragma unroll
        for (int chunk = 0; chunk < DIM / CHUNK; ++chunk) {
            if (chunk * CHUNK >= p.dim) break;
            __syncthreads();
            load_chunk(visited, CHUNK_PITCH, p.k, keys, first, other_ids, COLUMNS, chunk * CHUNK,
                       p.dim, 1);
            __syncthreads();
            add_product(by_query, chunk, pairs, visited);
        }
    }
    Acc scale[M];
#pragma unroll
    for (int m = 0; m < M; ++m) scale[m] = (Acc)p.scale;
    store_rows(by_query, p.grad_q, place.b, place.h, band.own_first, p.len_q, p.dim, scale);

    if (p.by_slope.data == nullptr) return;
    by_slope = sum_lanes(by_slope);
    if (lane() == 0) sums[group()] = by_slope;
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int g = 0; g < GROUPS; ++g) sum += sums[g];
        write<double>(p.by_slope.at(place.b, place.h, place.tile), sum);
    }
}

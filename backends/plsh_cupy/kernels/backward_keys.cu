// plsh_backward_keys: the gradients by k and v, by tile of keys, after plsh_backward_queries.
//
// Grid    one block a tile of ROWS keys, batch row and key head (place_of).
// Block   THREADS threads; thread (group, lane) holds M key rows by N queries, and M rows by SLOTS
//         dims of either gradient, summed over the query heads that read the key head.
// Shared  dynamic, in this order: k (ROWS x D), v (ROWS x Dv), queries or grad_out (COLUMNS x
//         CHUNK), pairs (ROWS x COLUMNS), segment ids of both sides, lse and delta of the visited
//         queries, and what the weight takes; see `shared_bytes` of _plan.py.
// Reads   k and v of its rows; q, grad_out, lse, delta and segment ids in its band.
// Writes  grad_k and grad_v of its rows, which no other block writes.
// Spec    NUM-8, NUM-10, NUM-11, ATT-21.
#include <tile.cuh>
#include <weight.cuh>

constexpr double LOG2E = 1.4426950408889634;

extern "C" __global__ void __launch_bounds__(THREADS, 1) plsh_backward_keys(const Params p) {
    Arena arena;
    const int pitch = resident_pitch(p.dim), value_pitch = resident_pitch(p.value_dim);
    Shared<Acc> k = arena.take<Acc>(ROWS * pitch);
    Shared<Acc> v = arena.take<Acc>(ROWS * value_pitch);
    Shared<Acc> visited = arena.take<Acc>(COLUMNS * CHUNK_PITCH);
    Shared<Acc> pairs = arena.take<Acc>(ROWS * PAIR_PITCH);
    Shared<int64> own_ids = arena.take<int64>(ROWS);
    Shared<int64> other_ids = arena.take<int64>(COLUMNS);
    Shared<Acc> lse = arena.take<Acc>(COLUMNS);
    Shared<Acc> delta = arena.take<Acc>(COLUMNS);
    Weight weight(arena);

    const Place place = place_of(p);
    const int64 heads = p.heads / p.kv_heads;
    Band band(p, place, false);
    load_ids(own_ids, p.k_ids, p.k_ids_kind, place.b, band.own_first, p.len_k, ROWS);
    __syncthreads();
    load_tile(k, p.k, p.k.at(place.b, place.h, 0), band.own_first, own_ids, p.dim, 1);
    load_tile(v, p.v, p.v.at(place.b, place.h, 0), band.own_first, own_ids, p.value_dim, 1);

    Acc by_key[M][SLOTS] = {}, by_value[M][SLOTS] = {};
    for (int64 h = place.h * heads; h < (place.h + 1) * heads; ++h) {
        weight.begin(p, place.b, h, band);
        const char* queries = p.q.at(place.b, h, 0);
        const char* grads = p.grad_out.at(place.b, h, 0);
        for (int64 t = band.begin; t < band.end; ++t) {
            const int64 first = band.other_first(t);
            load_ids(other_ids, p.q_ids, p.q_ids_kind, place.b, first, p.len_q, COLUMNS);
            // A query that sees no key is as one that does not exist: not read, of weight 0.
            for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
                lse[i] = infinity(Acc());
                delta[i] = 0;
                if (other_ids[i] < 0) continue;
                const Acc given = read<Acc>(p.lse.at(place.b, h, first + i));
                if (given == -infinity(Acc())) {
                    other_ids[i] = -1;
                } else {
                    lse[i] = given + weight.normaliser(p);
                    delta[i] = read<Acc>(p.delta.at(place.b, h, first + i));
                }
            }
            __syncthreads();
            unsigned seen = 0xffffffffu;
            if (!band.whole(t, weight.bandwidth)) {
                seen = band.visible(t, weight.bandwidth, own_ids, other_ids);
                if (!__syncthreads_or(seen != 0)) continue;
            }
            Acc x[M][N] = {}, ds[M][N] = {};
            for (int begin = 0; begin < p.dim; begin += CHUNK) {
                if (begin > 0) __syncthreads();
                load_chunk(visited, CHUNK_PITCH, p.q, queries, first, other_ids, COLUMNS, begin,
                           p.dim, (Acc)p.factor);
                __syncthreads();
                add_dots(x, k + begin, pitch, visited);
            }
            Acc count[M][N];
            weight.weigh(count, p, band, t, seen);
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const int d = band.apart(t) + row_of(m) - column_of(n);
                    const Acc power = x[m][n] * (Acc)p.after + weight.bias(d < 0 ? -d : d) -
                                      lse[column_of(n)];
                    const bool here = count[m][n] > 0;
                    x[m][n] = here ? power_of_two(power * (Acc)LOG2E) * count[m][n] : 0;
                }
            store_pairs(pairs, x);
            // Each chunk of grad_out serves dP = v . dO and dV = P^T dO at once.
#pragma unroll
            for (int chunk = 0; chunk < DIM / CHUNK; ++chunk) {
                if (chunk * CHUNK >= p.value_dim) break;
                __syncthreads();
                load_chunk(visited, CHUNK_PITCH, p.grad_out, grads, first, other_ids, COLUMNS,
                           chunk * CHUNK, p.value_dim, 1);
                __syncthreads();
                add_dots(ds, v + chunk * CHUNK, value_pitch, visited);
                add_product(by_value, chunk, pairs, visited);
            }
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < N; ++n)
                    ds[m][n] = x[m][n] > 0 ? x[m][n] * (ds[m][n] - delta[column_of(n)]) : 0;
            __syncthreads();
            store_pairs(pairs, ds);
#pragma unroll
            for (int chunk = 0; chunk < DIM / CHUNK; ++chunk) {
                if (chunk * CHUNK >= p.dim) break;
                if (chunk > 0) __syncthreads();
                load_chunk(visited, CHUNK_PITCH, p.q, queries, first, other_ids, COLUMNS,
                           chunk * CHUNK, p.dim, 1);
                __syncthreads();
                add_product(by_key, chunk, pairs, visited);
            }
        }
    }
    Acc scale[M], one[M];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        scale[m] = (Acc)p.scale;
        one[m] = 1;
    }
    store_rows(by_key, p.grad_k, place.b, place.h, band.own_first, p.len_k, p.dim, scale);
    store_rows(by_value, p.grad_v, place.b, place.h, band.own_first, p.len_k, p.value_dim, one);
}

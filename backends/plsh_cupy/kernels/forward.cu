// plsh_forward: attention under a positional weight, one pass over the band.
//
// Grid    one block a tile of ROWS queries, batch row and query head (place_of).
// Block   THREADS threads; thread (group, lane) holds M query rows by N keys, and M rows by SLOTS
//         dims of the output.
// Shared  dynamic, in this order: q (ROWS x D), keys or values (COLUMNS x CHUNK), pairs (ROWS x
//         COLUMNS), segment ids of both sides, and what the weight takes; see `shared_bytes` of
//         _plan.py.
// Reads   q of its rows; k, v and segment ids in its band; slopes or blocks.
// Writes  out and lse of its rows, which no other block writes.
// Spec    ATT-1, ATT-7, ATT-20, ATT-21, NUM-1 to NUM-6.
#include <tile.cuh>
#include <softmax.cuh>

extern "C" __global__ void __launch_bounds__(THREADS, 1) plsh_forward(const Params p) {
    Arena arena;
    const int pitch = resident_pitch(p.dim);
    Shared<Acc> q = arena.take<Acc>(ROWS * pitch);
    Shared<Acc> visited = arena.take<Acc>(COLUMNS * CHUNK_PITCH);
    Shared<Acc> pairs = arena.take<Acc>(ROWS * PAIR_PITCH);
    Shared<int64> own_ids = arena.take<int64>(ROWS);
    Shared<int64> other_ids = arena.take<int64>(COLUMNS);
    Weight weight(arena);

    const Place place = place_of(p);
    const int64 kv = place.h / (p.heads / p.kv_heads);
    Band band(p, place, true);
    load_ids(own_ids, p.q_ids, p.q_ids_kind, place.b, band.own_first, p.len_q, ROWS);
    __syncthreads();
    load_tile(q, p.q, p.q.at(place.b, place.h, 0), band.own_first, own_ids, p.dim,
              (Acc)p.factor);
    weight.begin(p, place.b, place.h, band);

    Acc out[M][SLOTS];
    Softmax softmax;
    for (int round = 0;; ++round) {
        softmax.begin(out);
        for (int64 t = band.begin; t < band.end; ++t) {
            const int64 first = band.other_first(t);
            load_ids(other_ids, p.k_ids, p.k_ids_kind, place.b, first, p.len_k, COLUMNS);
            __syncthreads();
            unsigned seen = 0xffffffffu;
            if (!band.whole(t, weight.bandwidth)) {
                seen = band.visible(t, weight.bandwidth, own_ids, other_ids);
                if (!__syncthreads_or(seen != 0)) continue;
            }
            Acc x[M][N] = {};
            const char* keys = p.k.at(place.b, kv, 0);
            for (int begin = 0; begin < p.dim; begin += CHUNK) {
                if (begin > 0) __syncthreads();
                load_chunk(visited, CHUNK_PITCH, p.k, keys, first, other_ids, COLUMNS, begin,
                           p.dim, 1);
                __syncthreads();
                add_dots(x, q + begin, pitch, visited);
            }
            Acc count[M][N];
            weight.weigh(count, p, band, t, seen);
            softmax.absorb(x, count, out, weight, band, t, (Acc)p.after);
            store_pairs(pairs, x);
            const char* values = p.v.at(place.b, kv, 0);
#pragma unroll
            for (int chunk = 0; chunk < DIM / CHUNK; ++chunk) {
                if (chunk * CHUNK >= p.value_dim) break;
                __syncthreads();
                load_chunk(visited, CHUNK_PITCH, p.v, values, first, other_ids, COLUMNS,
                           chunk * CHUNK, p.value_dim, 1);
                __syncthreads();
                add_product(out, chunk, pairs, visited);
            }
        }
        const bool again = softmax.end(out, weight, p, place, band, round);
        if (round == 1 || !__syncthreads_or(again)) break;
    }
    store_rows(out, p.out, place.b, place.h, band.own_first, p.len_q, p.value_dim, softmax.norm);
}

// plsh_forward_tensor: plsh_forward on tensor cores, for 16-bit numbers whose dims lie together.
//
// Grid    one block a tile of ROWS queries, batch row and query head (place_of).
// Block   THREADS threads; a warp owns 16 rows, see layout.cuh.
// Shared  dynamic, in this order: q (ROWS x PITCH), keys and values (COLUMNS x PITCH each), segment
//         ids of both sides, and what the weight takes; see `shared_bytes` of _plan.py. Keys are
//         copied while the tile before is weighed, values while keys are multiplied.
// Reads   q of its rows; k, v and segment ids in its band; slopes or blocks.
// Writes  out and lse of its rows, which no other block writes.
// Spec    ATT-1, ATT-7, ATT-20, ATT-21, NUM-1 to NUM-6.
#include <tensor.cuh>
#include <softmax.cuh>

// Warps that a multiprocessor is to hold: as many as registers allow without spills.
constexpr int WARPS = DIM <= 64 && !PLSH_STEP ? 12 : 8;

extern "C" __global__ void __launch_bounds__(THREADS, 32 * WARPS / THREADS)
plsh_forward_tensor(const Params p) {
    Arena arena;
    Shared<Float> q = arena.take<Float>(ROWS * PITCH);
    Shared<Float> keys = arena.take<Float>(COLUMNS * PITCH);
    Shared<Float> values = arena.take<Float>(COLUMNS * PITCH);
    Shared<int64> own_ids = arena.take<int64>(ROWS);
    Shared<int64> other_ids = arena.take<int64>(COLUMNS);
    Weight weight(arena);

    const Place place = place_of(p);
    const int64 kv = place.h / (p.heads / p.kv_heads);
    Band band(p, place, true);
    load_ids(own_ids, p.q_ids, p.q_ids_kind, place.b, band.own_first, p.len_q, ROWS);
    __syncthreads();
    copy_tile<ROWS>(q, p.q, p.q.at(place.b, place.h, 0), band.own_first, p.dim,
                    [&](int i) { return own_ids[i] >= 0; });
    commit_copies();
    weight.begin(p, place.b, place.h, band);
    wait_copies(0);
    scale_tile(q, p.dim, (Acc)p.factor);

    // What stands in the padding of keys is masked; that of values is not read.
    const auto copy_keys = [&](int64 t) {
        const int64 first = band.other_first(t);
        copy_tile(keys, p.k, p.k.at(place.b, kv, 0), first, p.dim,
                  [&](int i) { return first + i >= 0 && first + i < p.len_k; });
        commit_copies();
    };
    Acc out[M][SLOTS];
    Softmax softmax;
    for (int round = 0;; ++round) {
        softmax.begin(out);
        if (band.begin < band.end) copy_keys(band.begin);
        for (int64 t = band.begin; t < band.end; ++t) {
            const int64 first = band.other_first(t);
            load_ids(other_ids, p.k_ids, p.k_ids_kind, place.b, first, p.len_k, COLUMNS);
            __syncthreads();
            unsigned seen = 0xffffffffu;
            if (!band.whole(t, weight.bandwidth)) {
                seen = band.visible(t, weight.bandwidth, own_ids, other_ids);
                if (!__syncthreads_or(seen != 0)) {
                    wait_copies(0);
                    if (t + 1 < band.end) copy_keys(t + 1);
                    continue;
                }
            }
            copy_tile(values, p.v, p.v.at(place.b, kv, 0), first, p.value_dim,
                      [&](int i) { return other_ids[i] >= 0; });
            commit_copies();
            Acc x[M][N] = {}, count[M][N];
            weight.weigh(count, p, band, t, seen);
            wait_copies(1);
            __syncthreads();
            add_dots(x, q, keys, p.dim);
            __syncthreads();
            if (t + 1 < band.end) copy_keys(t + 1);
            softmax.absorb(x, count, out, weight, band, t, (Acc)p.after);
            wait_copies(t + 1 < band.end);
            __syncthreads();
            add_product(out, x, values, p.value_dim);
        }
        const bool again = softmax.end(out, weight, p, place, band, round);
        if (round == 1 || !__syncthreads_or(again)) break;
    }
    store_rows(out, p.out, place.b, place.h, band.own_first, p.len_q, p.value_dim, softmax.norm);
}

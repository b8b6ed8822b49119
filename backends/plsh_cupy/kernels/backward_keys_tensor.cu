// plsh_backward_keys_tensor: plsh_backward_keys on tensor cores, for 16-bit numbers whose dims lie
// together.
//
// Grid    one block a tile of ROWS keys, batch row and key head (place_of).
// Block   THREADS threads; a warp owns 16 rows, see layout.cuh.
// Shared  dynamic, in this order: k and v (ROWS x PITCH each), two tiles of queries and grad_out in
//         turn (COLUMNS x PITCH each), segment ids of the rows and of two visited tiles, lse and
//         delta of their queries, and what the weight takes; see `shared_bytes` of _plan.py.
//         grad_out is copied while queries are multiplied, the next queries, into the place of
//         grad_out that is done with, while the gradient by k is.
// Reads   k and v of its rows; q, grad_out, lse, delta and segment ids in its band.
// Writes  grad_k and grad_v of its rows, which no other block writes.
// Spec    NUM-1, NUM-8, NUM-10, NUM-11, ATT-21.
#include <tensor.cuh>
#include <weight.cuh>

constexpr double LOG2E = 1.4426950408889634;

// Warps that a multiprocessor is to hold, and columns of pairs that a thread holds at a time: as many
// as registers allow without spills.
constexpr int WARPS = 8, PART = DIM <= 64 ? N : N / 2;

extern "C" __global__ void __launch_bounds__(THREADS, 32 * WARPS / THREADS)
plsh_backward_keys_tensor(const Params p) {
    Arena arena;
    Shared<Float> k = arena.take<Float>(ROWS * PITCH);
    Shared<Float> v = arena.take<Float>(ROWS * PITCH);
    Shared<Float> tiles = arena.take<Float>(2 * COLUMNS * PITCH);
    Shared<int64> own_ids = arena.take<int64>(ROWS);
    Shared<int64> other_ids = arena.take<int64>(2 * COLUMNS);
    Shared<Acc> lses = arena.take<Acc>(2 * COLUMNS);
    Shared<Acc> deltas = arena.take<Acc>(2 * COLUMNS);
    Weight weight(arena);

    const Place place = place_of(p);
    const int64 heads = p.heads / p.kv_heads;
    Band band(p, place, false);
    load_ids(own_ids, p.k_ids, p.k_ids_kind, place.b, band.own_first, p.len_k, ROWS);
    __syncthreads();
    const auto own = [&](int i) { return own_ids[i] >= 0; };
    copy_tile(k, p.k, p.k.at(place.b, place.h, 0), band.own_first, p.dim, own);
    copy_tile(v, p.v, p.v.at(place.b, place.h, 0), band.own_first, p.value_dim, own);
    commit_copies();
    wait_copies(0);
    scale_tile(k, p.dim, (Acc)p.factor);

    Acc by_key[M][SLOTS] = {}, by_value[M][SLOTS] = {};
    Units units;
    int at = 0;  // where queries are in `tiles`; grad_out is in the other half
    for (int64 h = place.h * heads; h < (place.h + 1) * heads; ++h) {
        weight.begin(p, place.b, h, band);
        const auto slot_of = [](int64 t) { return (int)(t & 1) * COLUMNS; };
        const auto load_others = [&](int64 t) {
            const int64 first = band.other_first(t);
            const Shared<int64> ids = other_ids + slot_of(t);
            const Shared<Acc> lse = lses + slot_of(t), delta = deltas + slot_of(t);
            load_ids(ids, p.q_ids, p.q_ids_kind, place.b, first, p.len_q, COLUMNS);
            // A query that sees no key is as one that does not exist: not read, of weight 0.
            for (int i = thread_afresh(); i < COLUMNS; i += THREADS) {
                lse[i] = infinity(Acc());
                delta[i] = 0;
                if (ids[i] < 0) continue;
                const Acc given = read<Acc>(p.lse.at(place.b, h, first + i));
                if (given == -infinity(Acc())) {
                    ids[i] = -1;
                } else {
                    lse[i] = given + weight.normaliser(p);
                    delta[i] = read<Acc>(p.delta.at(place.b, h, first + i));
                }
            }
        };
        const auto copy = [&](Shared<Float> to, const View& x, int64 t, int64 dim) {
            const Shared<int64> ids = other_ids + slot_of(t);
            copy_tile(to, x, x.at(place.b, h, 0), band.other_first(t), dim,
                      [&](int i) { return ids[i] >= 0; });
            commit_copies();
        };
        if (band.begin < band.end) load_others(band.begin);
        __syncthreads();
        if (band.begin < band.end) copy(tiles + at, p.q, band.begin, p.dim);
        for (int64 t = band.begin; t < band.end; ++t) {
            if (t + 1 < band.end) load_others(t + 1);
            const Shared<Float> queries = tiles + at, grads = tiles + (COLUMNS * PITCH - at);
            unsigned seen = 0xffffffffu;
            if (band.whole(t, weight.bandwidth)) {
                __syncthreads();
            } else {
                seen = band.visible(t, weight.bandwidth, own_ids, other_ids + slot_of(t));
                if (!__syncthreads_or(seen != 0)) {
                    wait_copies(0);
                    if (t + 1 < band.end) copy(queries, p.q, t + 1, p.dim);
                    continue;
                }
            }
            copy(grads, p.grad_out, t, p.value_dim);
            wait_copies(1);
            __syncthreads();
            const Shared<Acc> lse = lses + slot_of(t), delta = deltas + slot_of(t);
#pragma unroll
            for (int part = 0; part < N; part += PART) {
                const int from = part * LANES;
                Acc x[M][PART] = {}, count[M][PART], ds[M][PART] = {};
                weight.weigh(count, p, band, t, seen, part);
                add_dots(x, k, queries + from * PITCH, p.dim);
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int n = 0; n < PART; ++n) {
                        const int column = from + column_of(n);
                        const int d = band.apart(t) + row_of(m) - column;
                        const Acc power = x[m][n] * (Acc)p.after + weight.bias(d < 0 ? -d : d) -
                                          lse[column];
                        const Acc most = count[m][n] * PEAK;
                        x[m][n] = most > 0 ? power_of_two(power * (Acc)LOG2E) * most : 0;
                    }
                if (part == 0) {
                    wait_copies(0);
                    __syncthreads();
                }
                add_product(by_value, x, grads + from * PITCH, p.value_dim);
                add_dots(ds, v, grads + from * PITCH, p.value_dim);
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int n = 0; n < PART; ++n) {
                        const Acc moved = ds[m][n] - delta[from + column_of(n)];
                        ds[m][n] = x[m][n] != 0 ? x[m][n] * moved : 0;
                    }
                if (part + PART == N) {
                    __syncthreads();
                    if (t + 1 < band.end) copy(grads, p.q, t + 1, p.dim);
                }
                units.divide(ds, by_key);
                add_product(by_key, ds, queries + from * PITCH, p.dim);
            }
            at = COLUMNS * PITCH - at;
        }
    }
    Acc by_k[M], by_v[M];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        by_k[m] = (Acc)p.scale * units.unit[m] / PEAK;
        by_v[m] = 1 / PEAK;
    }
    store_rows(by_key, p.grad_k, place.b, place.h, band.own_first, p.len_k, p.dim, by_k);
    store_rows(by_value, p.grad_v, place.b, place.h, band.own_first, p.len_k, p.value_dim, by_v);
}

// plsh_backward_queries_tensor: plsh_backward_queries on tensor cores, for 16-bit numbers whose dims
// lie together.
//
// Grid    one block a tile of ROWS queries, batch row and query head (place_of).
// Block   THREADS threads; a warp owns 16 rows, see layout.cuh.
// Shared  dynamic, in this order: q and grad_out (ROWS x PITCH each), two tiles of keys and values
//         in turn (COLUMNS x PITCH each), segment ids of the rows and of two visited tiles, the
//         slopes' sums of the groups, and what the weight takes; see `shared_bytes` of _plan.py.
//         Values are copied while keys are multiplied, the next keys, into the place of values
//         that are done with, while the gradient is.
// Reads   q, out, lse, grad_out and grad_lse of its rows; k, v and segment ids in its band.
// Writes  grad_q and delta of its rows and its own entry of by_slope: no other block does.
// Spec    NUM-1, NUM-8 to NUM-10, ATT-21.
#include <tensor.cuh>
#include <weight.cuh>

constexpr double LOG2E = 1.4426950408889634;

// Warps that a multiprocessor is to hold, and columns of dS that a thread holds at a time, beside
// the weights of all: as many as registers allow without spills.
constexpr int WARPS = DIM <= 64 && !PLSH_STEP ? 12 : 8, PART = N / 2;

extern "C" __global__ void __launch_bounds__(THREADS, 32 * WARPS / THREADS)
plsh_backward_queries_tensor(const Params p) {
    Arena arena;
    Shared<Float> q = arena.take<Float>(ROWS * PITCH);
    Shared<Float> grad = arena.take<Float>(ROWS * PITCH);
    Shared<Float> tiles = arena.take<Float>(2 * COLUMNS * PITCH);
    Shared<int64> own_ids = arena.take<int64>(ROWS);
    Shared<int64> other_ids = arena.take<int64>(2 * COLUMNS);
    Shared<double> sums = arena.take<double>(GROUPS);
    Weight weight(arena);

    const Place place = place_of(p);
    const int64 kv = place.h / (p.heads / p.kv_heads);
    Band band(p, place, true);
    load_ids(own_ids, p.q_ids, p.q_ids_kind, place.b, band.own_first, p.len_q, ROWS);
    __syncthreads();
    const auto own = [&](int i) { return own_ids[i] >= 0; };
    copy_tile(q, p.q, p.q.at(place.b, place.h, 0), band.own_first, p.dim, own);
    copy_tile(grad, p.grad_out, p.grad_out.at(place.b, place.h, 0), band.own_first, p.value_dim,
              own);
    commit_copies();
    weight.begin(p, place.b, place.h, band);

    const auto ids_of = [&](int64 t) { return other_ids + (t & 1) * COLUMNS; };
    const auto load_others = [&](int64 t) {
        load_ids(ids_of(t), p.k_ids, p.k_ids_kind, place.b, band.other_first(t), p.len_k, COLUMNS);
    };
    const auto copy = [&](Shared<Float> to, const View& x, int64 t, int64 dim) {
        const Shared<int64> ids = ids_of(t);
        copy_tile(to, x, x.at(place.b, kv, 0), band.other_first(t), dim,
                  [&](int i) { return ids[i] >= 0; });
        commit_copies();
    };
    if (band.begin < band.end) load_others(band.begin);
    wait_copies(0);
    scale_tile(q, p.dim, (Acc)p.factor);
    __syncthreads();
    int at = 0;  // where keys are in `tiles`; values are in the other half
    if (band.begin < band.end) copy(tiles + at, p.k, band.begin, p.dim);

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
            delta[m] += widen((Float)grad[row_of(m) * PITCH + d]) *
                        widen(read<Float>(out + d * p.out.dim));
        delta[m] = sum_lanes(delta[m]);
        if (live && p.grad_lse.data != nullptr)
            delta[m] -= read<Acc>(p.grad_lse.at(place.b, place.h, i));
        if (lane() == 0 && i < p.len_q) write<Acc>(p.delta.at(place.b, place.h, i), delta[m]);
    }

    Units units;
    double by_slope = 0;
    for (int64 t = band.begin; t < band.end; ++t) {
        if (t + 1 < band.end) load_others(t + 1);
        const Shared<Float> keys = tiles + at, values = tiles + (COLUMNS * PITCH - at);
        unsigned seen = 0xffffffffu;
        if (band.whole(t, weight.bandwidth)) {
            __syncthreads();
        } else {
            seen = band.visible(t, weight.bandwidth, own_ids, ids_of(t));
            if (!__syncthreads_or(seen != 0)) {
                wait_copies(0);
                if (t + 1 < band.end) copy(keys, p.k, t + 1, p.dim);
                continue;
            }
        }
        copy(values, p.v, t, p.value_dim);
        wait_copies(1);
        __syncthreads();
        Acc x[M][N] = {};
        add_dots(x, q, keys, p.dim);
        {
            Acc count[M][N];
            weight.weigh(count, p, band, t, seen);
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const int d = band.apart(t) + row_of(m) - column_of(n);
                    const Acc power =
                        x[m][n] * (Acc)p.after + weight.bias(d < 0 ? -d : d) - lse[m];
                    const bool here = count[m][n] > 0;
                    x[m][n] = here ? power_of_two(power * (Acc)LOG2E) * count[m][n] : 0;
                }
        }
        wait_copies(0);
        __syncthreads();
        Acc moved = 0;  // sum of distance * dS
#pragma unroll
        for (int part = 0; part < N; part += PART) {
            const int from = part * LANES;
            Acc ds[M][PART] = {};
            add_dots(ds, grad, values + from * PITCH, p.value_dim);
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < PART; ++n) {
                    const int d = band.apart(t) + row_of(m) - from - column_of(n);
                    const Acc pair = x[m][part + n];
                    ds[m][n] = pair != 0 ? pair * (ds[m][n] - delta[m]) : 0;
                    moved += ds[m][n] * (Acc)(d < 0 ? -d : d);
                }
            if (part + PART == N) {
                __syncthreads();
                if (t + 1 < band.end) copy(values, p.k, t + 1, p.dim);
            }
            units.divide(ds, by_query);
            add_product(by_query, ds, keys + from * PITCH, p.dim);
        }
        by_slope += moved;
        at = COLUMNS * PITCH - at;
    }
    Acc scale[M];
#pragma unroll
    for (int m = 0; m < M; ++m) scale[m] = (Acc)p.scale * units.unit[m];
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

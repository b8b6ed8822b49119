// The band of one owned tile: which tiles of the other side it visits, and which pairs count.
//
// The visited tiles lie on the owned tile's own grid: tile t holds the COLUMNS positions from
// own_at + COLUMNS * t on, so that the first DIAGONALS from tile 0 on, the diagonal, cover the owned
// positions, and every other tile lies wholly before or after them. Spec: ATT-12, ATT-14, ATT-19,
// MEM-3.
#ifndef PLSH_BAND_CUH
#define PLSH_BAND_CUH

#include <layout.cuh>

// What a block owns: a tile of tokens of one head in one batch row.
struct Place {
    int64 tile, b, h;
};

// Blocks count tiles first, then batch rows, then heads in the order given.
__device__ inline Place place_of(const Params& p) {
    int64 index = p.first_block + blockIdx.x, row = index / p.tiles;
    const int rank = (int)(row / p.batch);
    return {index % p.tiles, row % p.batch, read<int>(p.order.at(0, rank, 0))};
}

struct Band {
    int64 own_first, own_length, own_at;  // index of the first owned token, tokens, its position
    int64 other_at, other_length;         // position of the other side's token 0, tokens
    int64 begin, end;                     // tiles visited
    bool own_queries, causal, segmented;

    __device__ Band(const Params& p, const Place& place, bool queries) {
        const int64 q_at = read_offset(p.q_offset, p.q_offset_kind, p.q_start, place.b);
        const int64 k_at = read_offset(p.k_offset, p.k_offset_kind, p.k_start, place.b);
        own_queries = queries;
        causal = p.causal;
        segmented = p.q_ids.data != nullptr;
        own_first = place.tile * ROWS;
        own_length = queries ? p.len_q : p.len_k;
        other_length = queries ? p.len_k : p.len_q;
        own_at = own_first + (queries ? q_at : k_at);
        other_at = queries ? k_at : q_at;
        begin = end = 0;
    }

    // Visit the positions [low, high) as far as there are tokens and causality allows.
    __device__ void visit(int64 low, int64 high) {
        if (causal && own_queries && high > own_at + ROWS) high = own_at + ROWS;
        if (causal && !own_queries && low < own_at) low = own_at;
        if (low < other_at) low = other_at;
        if (high > other_at + other_length) high = other_at + other_length;
        // Arithmetic shifts round down, which division does not. COLUMNS is 64.
        begin = (low - own_at) >> 6;
        end = low < high ? (high - own_at + COLUMNS - 1) >> 6 : begin;
    }

    // Index of the other side's token in column 0 of tile t; may be negative.
    __device__ int64 other_first(int64 t) const { return own_at + COLUMNS * t - other_at; }

    // Own position less other position, of row 0 and column 0 of tile t.
    __device__ int apart(int64 t) const { return -(int)(COLUMNS * t); }

    // Whether tile t holds owned positions.
    __device__ bool diagonal(int64 t) const { return t >= 0 && t < DIAGONALS; }

    // Whether every pair of tile t is visible, by position alone, to owned tokens that exist.
    __device__ bool whole(int64 t, int64 bandwidth) const {
        const int64 before = ROWS - 1 - COLUMNS * t, after = COLUMNS * (t + 1) - 1;
        const int64 first = other_first(t), farthest = before > after ? before : after;
        return !segmented && !(causal && diagonal(t)) && first >= 0 &&
               first + COLUMNS <= other_length && farthest <= bandwidth;
    }

    // One bit a pair, N * m + n: whether causality, segments and the bandwidth let it be seen.
    __device__ unsigned visible(int64 t, int64 bandwidth, Shared<const int64> own_ids,
                                Shared<const int64> other_ids) const {
        unsigned seen = 0;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const int64 id = own_ids[row_of(m)];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int d = apart(t) + row_of(m) - column_of(n);
                const int lead = own_queries ? d : -d;  // query less key position
                const bool here = id >= 0 && id == other_ids[column_of(n)] &&
                                  (!causal || lead >= 0) && d <= bandwidth && -d <= bandwidth;
                seen |= (unsigned)here << (N * m + n);
            }
        }
        return seen;
    }
};

// Load segment ids of `count` tokens from `first` on; without segments 0, and -1 where there is no
// token.
__device__ inline void load_ids(Shared<int64> to, const View& x, int kind, int64 b, int64 first,
                                int64 length, int count) {
    for (int i = thread_afresh(); i < count; i += THREADS) {
        int64 id = -1;
        if (first + i >= 0 && first + i < length)
            id = x.data == nullptr ? 0 : read_integer(x.at(b, 0, first + i), kind);
        to[i] = id;
    }
}

#endif

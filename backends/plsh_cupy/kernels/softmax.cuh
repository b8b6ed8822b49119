// The softmax of owned rows as tiles go by, shifted by the largest logit of visible pairs so far.
// Spec: NUM-1 to NUM-6.
#ifndef PLSH_SOFTMAX_CUH
#define PLSH_SOFTMAX_CUH

#include <weight.cuh>

constexpr double LOG2E = 1.4426950408889634;

struct Softmax {
    Acc top[M], total[M], norm[M];  // largest logit, sum of weights, what multiplies weights

    __device__ Softmax() {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            top[m] = -infinity(Acc());
            norm[m] = 1;
        }
    }

    // Begin a round over all tiles, with sums of nothing.
    __device__ void begin(Acc (&out)[M][SLOTS]) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            total[m] = 0;
#pragma unroll
            for (int slot = 0; slot < SLOTS; ++slot) out[m][slot] = 0;
        }
    }

    // Turn the products x of tile t into weights, and fade the sums `out` of earlier tiles.
    __device__ void absorb(Acc (&x)[M][N], const Acc (&count)[M][N], Acc (&out)[M][SLOTS],
                           const Weight& weight, const Band& band, int64 t, Acc scale) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            Acc most = top[m];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int d = band.apart(t) + row_of(m) - column_of(n);
                const bool here = count[m][n] > 0;
                x[m][n] = here ? x[m][n] * scale + weight.bias(d < 0 ? -d : d) : -infinity(Acc());
                most = x[m][n] > most ? x[m][n] : most;
            }
            most = max_lanes(most);
            const Acc shift = most == -infinity(Acc()) ? 0 : most;
            const Acc fade = power_of_two((top[m] - shift) * (Acc)LOG2E);
            top[m] = most;
            Acc part = 0;
#pragma unroll
            for (int slot = 0; slot < SLOTS; ++slot) out[m][slot] *= fade;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                x[m][n] = power_of_two((x[m][n] - shift) * (Acc)LOG2E) * count[m][n] * norm[m];
                part += x[m][n];
            }
            total[m] = total[m] * fade + part;
        }
    }

    // End a round: write the lse of the rows after the first, and set what `out` is to be
    // multiplied with. Returns whether a result is not finite: sums of weights times values may
    // pass the range where their mean does not. Then another round goes, with the weights
    // normalised first.
    __device__ bool end(const Acc (&out)[M][SLOTS], const Weight& weight, const Params& p,
                        const Place& place, const Band& band, int round) {
        Acc residue = 0;  // of numbers less themselves: 0, or NaN for one that is not finite
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const Acc sum = sum_lanes(total[m]);
            const int64 i = band.own_first + row_of(m);
            if (round == 0) {
                if (lane() == 0 && i < p.len_q)
                    write<Acc>(p.lse.at(place.b, place.h, i),
                               sum == 0 ? -infinity(Acc())
                                        : top[m] + (logarithm(sum) - weight.normaliser(p)));
                norm[m] = sum == 0 ? 0 : 1 / sum;
            } else {
                norm[m] = 1;
            }
#pragma unroll
            for (int slot = 0; slot < SLOTS; ++slot) {
                const Acc y = out[m][slot] * norm[m];
                residue += y - y;
            }
        }
        return residue != 0;
    }
};

#endif

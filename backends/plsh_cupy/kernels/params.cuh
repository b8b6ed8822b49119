// The one argument of every kernel, mirrored field by field in _params.py.
#ifndef PLSH_PARAMS_CUH
#define PLSH_PARAMS_CUH

#include <device.cuh>

// An array (batch, head, token, dim); strides in bytes, of any sign. No data: it is absent.
struct View {
    char* data;
    int64 batch, head, token, dim;

    __device__ char* at(int64 b, int64 h, int64 i) const {
        return data + b * batch + h * head + i * token;
    }
};

struct Params {
    View q, k, v, out, lse, grad_out, grad_lse, grad_q, grad_k, grad_v;
    View q_ids, k_ids;        // (batch, token) integers
    View q_offset, k_offset;  // (batch) integers, else q_start and k_start
    View slopes;              // (batch, head)
    View labels;              // (head, sample as dim, token) int32, else the two below
    View width, shift;        // (head, sample as dim) int64 in units of 2^-24 token
    View order;               // (head) int32: heads by descending bandwidth
    View bandwidth;           // (head) int32
    View delta;               // (batch, head, token): rowsum(dO * O) - dlse
    View by_slope;            // (batch, head, tile as token) float64: partial sums of distance * dS
    View grad_slopes;         // (batch, head)
    int64 first_block, tiles, batch, heads, kv_heads, len_q, len_k, dim, value_dim;
    int64 samples, q_start, k_start, label_start, label_count;
    double scale, factor, after;  // scale = factor * after, see load_queries
    int causal, q_ids_kind, k_ids_kind, q_offset_kind, k_offset_kind, slopes_kind;
    int grad_slopes_kind;
};

static_assert(sizeof(Params) == PLSH_PARAMS_BYTES, "_params.py must mirror Params");

// Kinds of operands: bytes of a signed integer, 16 more for an unsigned one; 32 and up are floats.
enum Kind { INT8 = 1, INT16 = 2, INT32 = 4, INT64 = 8, UINT8 = 17, UINT16 = 18, UINT32 = 20,
            UINT64 = 24, FLOAT16 = 32, BFLOAT16 = 33, FLOAT32 = 34, FLOAT64 = 35 };

__device__ inline int64 read_integer(const char* from, int kind) {
    switch (kind) {
    case INT8: return read<signed char>(from);
    case INT16: return read<short>(from);
    case INT32: return read<int>(from);
    case UINT8: return read<unsigned char>(from);
    case UINT16: return read<unsigned short>(from);
    case UINT32: return read<unsigned>(from);
    default: return read<int64>(from);  // INT64, and UINT64 of values below 2^63
    }
}

__device__ inline double read_real(const char* from, int kind) {
    switch (kind) {
    case FLOAT16: return widen(read<Half>(from));
    case BFLOAT16: return widen(read<BFloat16>(from));
    case FLOAT32: return read<float>(from);
    case FLOAT64: return read<double>(from);
    default: return (double)read_integer(from, kind);
    }
}

// An offset by value or from memory. Values in memory are unchecked: what lies outside the range
// of positions is held at its ends, so that arithmetic with it stays in range.
__device__ inline int64 read_offset(const View& x, int kind, int64 value, int64 b) {
    if (x.data == nullptr) return value;
    const int64 most = 1LL << 30;
    int64 at = read_integer(x.at(b, 0, 0), kind);
    return at > most ? most : at < -most ? -most : at;
}

#endif

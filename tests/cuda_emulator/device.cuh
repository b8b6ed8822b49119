// The twin of the kernels' device.cuh for a CPU: the same names, on the emulator.
#ifndef PLSH_DEVICE_CUH
#define PLSH_DEVICE_CUH

#include <cmath>
#include <cstring>

#include "emulator.h"

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define __syncthreads() emulator::barrier(__FILE__, __LINE__)
#define __syncthreads_or(value) emulator::barrier_or(value, __FILE__, __LINE__)
#define __shfl_xor_sync(lanes, value, mask) emulator::shuffle_xor(value, mask, __FILE__, __LINE__)
#define __ballot_sync(lanes, value) emulator::ballot(value, __FILE__, __LINE__)

typedef long long int64;
typedef unsigned long long uint64;

struct Half {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};

// --- numbers --------------------------------------------------------------------------------

inline unsigned bits_of_float(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) {
    unsigned bits = (unsigned)x.bits << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
inline float widen(Half x) {
    const unsigned bits = (unsigned)(x.bits & 0x7fff) << 13;
    float size;
    std::memcpy(&size, &bits, 4);
    size *= 0x1p112f;  // between the exponents' zeros, exact for subnormal numbers too
    if (bits >= 31u << 23) size = bits == 31u << 23 ? INFINITY : NAN;
    return x.bits >> 15 ? -size : size;
}

template <typename T> struct Narrow {
    template <typename A> static T of(A x) { return (T)x; }
};
template <> struct Narrow<Half> {
    static Half of(float x) {
        const unsigned short sign = (unsigned short)(bits_of_float(x) >> 16 & 0x8000);
        const float size = std::fabs(x);
        if (size != size) return {(unsigned short)0x7fff};
        if (size == 0) return {sign};
        if (size >= 65520.0f) return {(unsigned short)(sign | 0x7c00)};
        int exponent = 0;
        std::frexp(size, &exponent);
        exponent = exponent < -13 ? -13 : exponent;  // subnormal below 2^-14
        // In units of the last place, to even; a carry moves into the exponent by itself.
        const int units = (int)std::nearbyint(std::ldexp(size, 11 - exponent));
        return {(unsigned short)(sign | (((exponent + 13) << 10) + units))};
    }
};
template <> struct Narrow<BFloat16> {
    static BFloat16 of(float x) {
        const unsigned bits = bits_of_float(x);
        if (x != x) return {(unsigned short)0x7fc0};
        return {(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    }
};

inline float infinity(float) { return INFINITY; }
inline double infinity(double) { return INFINITY; }
inline float power_of_two(float x) { return std::exp2(x); }
inline double power_of_two(double x) { return std::exp2(x); }
inline float logarithm(float x) { return std::log(x); }
inline double logarithm(double x) { return std::log(x); }
inline int count_bits(unsigned x) { return __builtin_popcount(x); }
inline float binade(float x) {
    const unsigned bits = bits_of_float(x) & 0x7f800000u;
    float power;
    std::memcpy(&power, &bits, 4);
    return power;
}
inline float inverse_power(float x) { return 1 / x; }

// --- threads ---------------------------------------------------------------------------------

inline int thread_afresh() { return (int)threadIdx.x; }

// --- global memory --------------------------------------------------------------------------

template <typename T> inline T read(const char* from) {
    emulator::check_global((uint64_t)from, sizeof(T), false);
    T x;
    std::memcpy(&x, from, sizeof(T));
    return x;
}
template <typename T> inline void write(char* to, T x) {
    emulator::check_global((uint64_t)to, sizeof(T), true);
    std::memcpy(to, &x, sizeof(T));
}

// --- shared memory --------------------------------------------------------------------------

template <typename T> struct SharedItem {
    int at, begin, end;

    operator T() const {
        T x;
        std::memcpy(&x, emulator::check_shared(at, begin, end, sizeof(T), false), sizeof(T));
        return x;
    }
    const SharedItem& operator=(T x) const {
        std::memcpy(emulator::check_shared(at, begin, end, sizeof(T), true), &x, sizeof(T));
        return *this;
    }
    // From another item: its value, which the compiler's own assignment would not copy.
    SharedItem(int at, int begin, int end) : at(at), begin(begin), end(end) {}
    SharedItem(const SharedItem&) = default;
    const SharedItem& operator=(const SharedItem& other) const { return *this = (T)other; }
};

template <typename T> struct Shared {
    int at, begin, end;

    SharedItem<T> operator[](int64 i) const {
        return {at + (int)i * (int)sizeof(T), begin, end};
    }
    Shared operator+(int64 i) const { return {at + (int)i * (int)sizeof(T), begin, end}; }
    operator Shared<const T>() const { return {at, begin, end}; }
};
template <typename T> struct Shared<const T> {
    int at, begin, end;

    T operator[](int64 i) const {
        return SharedItem<T>{at + (int)i * (int)sizeof(T), begin, end};
    }
    Shared operator+(int64 i) const { return {at + (int)i * (int)sizeof(T), begin, end}; }
};

template <typename T> struct alignas(16) Four {
    T v[4];
};

template <typename T> inline Four<T> load_four(Shared<const T> from) {
    Four<T> x;
    const char* bytes = emulator::check_shared(from.at, from.begin, from.end, sizeof(x), false);
    std::memcpy(&x, bytes, sizeof(x));
    return x;
}

struct Arena {
    int used = 0;

    template <typename T> Shared<T> take(int count) {
        const int bytes = count * (int)sizeof(T);
        Shared<T> piece = {used, used, used + bytes};
        used += (bytes + 15) / 16 * 16;
        if (used > emulator::shared_bytes())
            emulator::fault("%d bytes of shared memory taken, %d were asked for", used,
                            emulator::shared_bytes());
        return piece;
    }
};

#endif

// What the kernels ask of the device beyond plain C++: widths of integers, 16-bit floats, memory.
//
// The kernels name nothing else of CUDA but threadIdx, blockIdx, barriers and warp shuffles, so a
// twin of this one header runs the same files on a CPU. No header is included: run-time compilers
// have none. Spec: CNV-3, BCK-12.
#ifndef PLSH_DEVICE_CUH
#define PLSH_DEVICE_CUH

typedef long long int64;
typedef unsigned long long uint64;

struct Half {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};

// --- numbers --------------------------------------------------------------------------------

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(BFloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float widen(Half x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}

// Round to nearest, ties to even; out of range to infinity.
template <typename T> struct Narrow {
    template <typename A> static __device__ T of(A x) { return (T)x; }
};
template <> struct Narrow<Half> {
    static __device__ Half of(float x) {
        Half narrow;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
        return narrow;
    }
};
template <> struct Narrow<BFloat16> {
    static __device__ BFloat16 of(float x) {
        unsigned bits = __float_as_uint(x);
        BFloat16 narrow;
        if ((bits & 0x7fffffffu) > 0x7f800000u)
            narrow.bits = 0x7fc0;
        else
            narrow.bits = (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
        return narrow;
    }
};

__device__ inline float infinity(float) { return __int_as_float(0x7f800000); }
__device__ inline double infinity(double) { return __longlong_as_double(0x7ff0000000000000LL); }
__device__ inline float power_of_two(float x) { return exp2f(x); }
__device__ inline double power_of_two(double x) { return exp2(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline int count_bits(unsigned x) { return __popc(x); }
// The power of two of a normal number x > 0: the largest that is not above it.
__device__ inline float binade(float x) {
    return __uint_as_float(__float_as_uint(x) & 0x7f800000u);
}
// 1 / x, of a power of two from 2^-126 to 2^126.
__device__ inline float inverse_power(float x) {
    return __uint_as_float(0x7f000000u - __float_as_uint(x));
}

// --- threads ---------------------------------------------------------------------------------

// threadIdx.x, read where it stands: what is made of it is made there too, and not kept in registers
// from one place to another.
__device__ inline int thread_afresh() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// --- global memory --------------------------------------------------------------------------

template <typename T> __device__ inline T read(const char* from) {
    return *reinterpret_cast<const T*>(from);
}
template <typename T> __device__ inline void write(char* to, T x) {
    *reinterpret_cast<T*>(to) = x;
}

// --- shared memory --------------------------------------------------------------------------

template <typename T> using Shared = T*;

template <typename T> struct __align__(16) Four {
    T v[4];
};

// Four neighbours at once, 16-byte aligned.
template <typename T> __device__ inline Four<T> load_four(Shared<const T> from) {
    return *reinterpret_cast<const Four<T>*>(from);
}
// Hands out the dynamic shared memory of the block from its start, in pieces of 16 bytes.
struct Arena {
    int used = 0;

    template <typename T> __device__ Shared<T> take(int count) {
        extern __shared__ __align__(16) char memory[];
        Shared<T> piece = reinterpret_cast<T*>(memory + used);
        used += (count * (int)sizeof(T) + 15) / 16 * 16;
        return piece;
    }
};

#endif

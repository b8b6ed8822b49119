// Tensor cores and copies in the background, of compute capability 8.0 and later: each function is
// one instruction, and nothing is decided here. A twin of this header runs on a CPU.
//
// Thread l of a warp holds of a 16 x 16 operand A the neighbours (l / 4, 2 (l % 4)), then those 8
// rows below, 8 columns to the right, and both; of a 16 x 8 operand B (2 (l % 4), l / 4), one below
// the other, then those 8 rows below; of a 16 x 8 sum the neighbours (l / 4, 2 (l % 4)), then those
// 8 rows below.
#ifndef PLSH_MMA_CUH
#define PLSH_MMA_CUH

#include <device.cuh>

// Two numbers of 16 bits in one register, the first in its lower half; rounded to nearest even.
template <typename T> __device__ unsigned pack(float first, float second);
template <> __device__ inline unsigned pack<Half>(float first, float second) {
    unsigned two;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
    return two;
}
template <> __device__ inline unsigned pack<BFloat16>(float first, float second) {
    unsigned two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
    return two;
}

// sum += A B, for all lanes of a warp at once.
template <typename T>
__device__ void mma(float& s0, float& s1, float& s2, float& s3, const unsigned (&a)[4], unsigned b0,
                    unsigned b1);
template <>
__device__ inline void mma<Half>(float& s0, float& s1, float& s2, float& s3,
                                 const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(s0), "+f"(s1), "+f"(s2), "+f"(s3)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma<BFloat16>(float& s0, float& s1, float& s2, float& s3,
                                     const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(s0), "+f"(s1), "+f"(s2), "+f"(s3)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit numbers, matrix i of rows at the addresses that lanes 8 i to 8 i +
// 7 give. Lane l gets of each the neighbours (l / 4, 2 (l % 4)); transposed, of the transpose.
template <typename T>
__device__ inline void load_matrices(unsigned (&x)[4], Shared<const T> row) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
template <typename T>
__device__ inline void load_transposed(unsigned (&x)[4], Shared<const T> row) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

// Begin to copy 16 bytes, or zeros where they are not `there`. They land at the latest when this
// thread has waited for the group that its next commit makes of its copies so far.
template <typename T>
__device__ inline void copy_later(Shared<T> to, const char* from, bool there) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait for all groups of this thread but the latest `pending`, 0 or 1.
__device__ inline void wait_copies(int pending) {
    if (pending == 0)
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    else
        asm volatile("cp.async.wait_group 1;" ::: "memory");
}

#endif

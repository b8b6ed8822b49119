// The twin of the kernels' mma.cuh for a CPU: the same names, on the emulator.
#ifndef PLSH_MMA_CUH
#define PLSH_MMA_CUH

#include <device.cuh>

// Where a function is called, for the message of a fault.
#define CALLED const char *file = __builtin_FILE(), int line = __builtin_LINE()

template <typename T> inline unsigned pack(float first, float second) {
    return Narrow<T>::of(first).bits | (unsigned)Narrow<T>::of(second).bits << 16;
}

template <typename T> inline void unpack(float* two, unsigned bits) {
    two[0] = widen(T{(unsigned short)bits});
    two[1] = widen(T{(unsigned short)(bits >> 16)});
}

template <typename T>
inline void mma(float& s0, float& s1, float& s2, float& s3, const unsigned (&a)[4], unsigned b0,
                unsigned b1, CALLED) {
    struct Operands {
        float a[8], b[4];
    } mine;
    for (int i = 0; i < 4; ++i) unpack<T>(mine.a + 2 * i, a[i]);
    unpack<T>(mine.b, b0);
    unpack<T>(mine.b + 2, b1);
    const int slot = emulator::give(&mine, sizeof(mine), file, line);
    const auto of = [&](unsigned lane) {
        return static_cast<const Operands*>(emulator::given(lane, slot));
    };
    const unsigned own = threadIdx.x % 32;
    for (int k = 0; k < 16; ++k) {
        // Column k of A is with lane k / 2 % 4 of a row, row k of B with that lane of a column.
        const unsigned lane = k / 2 % 4;
        const float* row = of(own / 4 * 4 + lane)->a + k % 2 + k / 8 * 4;
        const float left = of(own % 4 * 8 + lane)->b[k % 2 + k / 8 * 2];
        const float right = of(own % 4 * 8 + 4 + lane)->b[k % 2 + k / 8 * 2];
        s0 += row[0] * left;
        s1 += row[0] * right;
        s2 += row[2] * left;
        s3 += row[2] * right;
    }
}

// The rows of one matrix must lie in eight different quarters of 16 bytes of the 32 banks.
template <typename T>
inline void load_eights(unsigned (&x)[4], const Shared<const T>& row, bool transposed,
                        const char* file, int line) {
    const int slot = emulator::give(&row, sizeof(row), file, line);
    const auto of = [&](unsigned lane) {
        return *static_cast<const Shared<const T>*>(emulator::given(lane, slot));
    };
    const unsigned own = threadIdx.x % 32;
    for (unsigned i = 0; i < 4; ++i) {
        unsigned banks = 0;
        for (unsigned lane = 8 * i; lane < 8 * i + 8; ++lane) {
            if (of(lane).at % 16 != 0)
                emulator::fault("misaligned matrix row at byte %d of shared memory", of(lane).at);
            banks |= 1u << of(lane).at / 16 % 8;
        }
        if (banks != 0xff) emulator::fault("bank conflict: rows of a matrix at %s:%d", file, line);
        const unsigned major = own / 4, minor = own % 4 * 2;
        const T first = transposed ? of(8 * i + minor)[major] : of(8 * i + major)[minor];
        const T second = transposed ? of(8 * i + minor + 1)[major] : of(8 * i + major)[minor + 1];
        x[i] = first.bits | (unsigned)second.bits << 16;
    }
}
template <typename T>
inline void load_matrices(unsigned (&x)[4], Shared<const T> row, CALLED) {
    load_eights<T>(x, row, false, file, line);
}
template <typename T>
inline void load_transposed(unsigned (&x)[4], Shared<const T> row, CALLED) {
    load_eights<T>(x, row, true, file, line);
}

template <typename T> inline void copy_later(Shared<T> to, const char* from, bool there) {
    emulator::copy_later(to.at, to.begin, to.end, there ? (uint64_t)from : 0);
}
inline void commit_copies() { emulator::commit_copies(); }
inline void wait_copies(int pending, CALLED) { emulator::wait_copies(pending, file, line); }

#undef CALLED
#endif

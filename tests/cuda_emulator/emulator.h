// A CPU stand-in for one CUDA device: blocks one after another, a fibre a thread, every access
// checked. Test-only; `device.cuh` beside it gives the kernels their vocabulary on top.
//
// Found, each with the block and thread: a barrier or shuffle that not all threads reach, two
// threads that touch shared memory without a barrier between them (one of them writing), shared
// memory read before it is written, access outside of an array or of a piece of shared memory,
// misaligned access, writes to what is read-only, two blocks that write, or write and read, the
// same place, and shared memory used while a copy to it is in flight: it lands at the wait.
#ifndef EMULATOR_H
#define EMULATOR_H

#include <cstdint>

namespace emulator {

struct Index {
    unsigned x, y, z;
};

extern Index thread_index, block_index;  // of the fibre that runs

// An array on the device: bytes [begin, end), and whether kernels may write there.
struct Range {
    uint64_t begin, end;
    int writable;
};

struct Launch {
    unsigned grid, block;
    int shared_bytes;
    uint64_t order;  // seed of the order in which threads take turns; 0 is ascending
    const char* skipped_file;  // a barrier to ignore, by file name and line; null for none
    int skipped_line;
};

constexpr int WARP = 32;

[[noreturn]] void fault(const char* format, ...);
void barrier(const char* file, int line);
bool barrier_or(bool value, const char* file, int line);
// Exchange `bytes` of each lane; returns what lane `source` of the warp gave.
const void* exchange(const void* mine, int bytes, int source, const char* file, int line);

// What the fibre that runs is checked against. A tag says which thread touched four bytes of shared
// memory, and in which epoch (number of barriers passed): epoch << TAG | thread + 1, or SEVERAL.
struct Now {
    char* shared;
    unsigned *writers, *readers;  // tags of each four bytes; 0 is never
    unsigned own, several;        // tags of this thread, and of several, in this epoch
    uint64_t begin, end;          // of the read-only array that was read last
};

constexpr unsigned TAG = 11, SEVERAL = (1u << TAG) - 1;

extern Now now;

void examine_global(uint64_t address, int bytes, bool writing);
void examine_shared(int at, int begin, int end, int bytes, bool writing);

// Both checks are quick where a check since the last barrier found nothing, and a further access
// of the kind can change nothing.
inline void check_global(uint64_t address, int bytes, bool writing) {
    if (writing || address % bytes != 0 || address < now.begin || address + bytes > now.end)
        examine_global(address, bytes, writing);
}

// The bytes of shared memory at `at`, inside [begin, end), for one access.
inline char* check_shared(int at, int begin, int end, int bytes, bool writing) {
    const unsigned* tags = (writing ? now.writers : now.readers) + at / 4;
    unsigned by_others = at < begin || at + bytes > end || at % (bytes < 16 ? bytes : 16) != 0;
    unsigned by_one = by_others | writing;
    if (by_others == 0)
        for (int word = 0; word < (bytes + 3) / 4; ++word) {
            by_others |= tags[word] ^ now.own;
            by_one |= tags[word] ^ now.several;
        }
    if (by_others != 0 && by_one != 0) examine_shared(at, begin, end, bytes, writing);
    return now.shared + at;
}

// The same in two steps: give to the warp, then take what a lane gave into that slot.
int give(const void* mine, int bytes, const char* file, int line);
const void* given(int lane, int slot);

// Copies of 16 bytes to shared memory, or of zeros from 0: begun, grouped, waited for.
void copy_later(int at, int begin, int end, uint64_t from);
void commit_copies();
void wait_copies(int pending, const char* file, int line);

// One bit a lane of the warp: whether it votes for.
unsigned ballot(bool mine, const char* file, int line);

int shared_bytes();

// Run a kernel. Returns 0, or 1 with the fault's text in `report`.
int launch(void (*kernel)(const void*), const void* params, const Launch& how,
           const Range* ranges, int count, char* report, int report_size);

template <typename T> T shuffle_xor(T mine, int mask, const char* file, int line) {
    const int lane = thread_index.x % WARP;
    return *static_cast<const T*>(exchange(&mine, sizeof(T), lane ^ mask, file, line));
}

}  // namespace emulator

#endif

#include "emulator.h"

#include <algorithm>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <vector>

// --- switching stacks ---------------------------------------------------------------------------

#if defined(__x86_64__) && !defined(PLSH_PORTABLE)

typedef void* Context;  // the top of a stack that holds the registers of its owner

extern "C" void plsh_switch(Context* from, Context to);
asm(R"(
    .text
    .hidden plsh_switch
    .globl plsh_switch
    .type plsh_switch, @function
plsh_switch:
    endbr64
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size plsh_switch, . - plsh_switch
)");

static void switch_to(Context& from, Context& to) { plsh_switch(&from, to); }

static void make_context(Context& context, char* stack, size_t size, void (*begin)()) {
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + size) / 16 * 16);
    *--top = nullptr;  // where `begin` would return to
    *--top = reinterpret_cast<void*>(begin);
    context = top - 6;  // six registers, of any value
}

#else

typedef ucontext_t Context;

static void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }

static void make_context(Context& context, char* stack, size_t size, void (*begin)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = size;
    context.uc_link = nullptr;
    makecontext(&context, begin, 0);
}

#endif

namespace emulator {

Index thread_index, block_index;
Now now;

namespace {

constexpr int STACK = 1 << 18;
constexpr unsigned EPOCHS = (1u << (32 - TAG)) - 1;

enum State { RUNNABLE, AT_BARRIER, AT_SHUFFLE, DONE };

// A copy in the background, and the number of its thread's commits before it.
struct Copy {
    int at;
    uint64_t from;
    int group;
};

constexpr int SLOT = 64;

struct Fibre {
    std::unique_ptr<char[]> stack{new char[STACK]};
    Context at;
    State state;
    const char* file;  // of the barrier or shuffle that it waits at
    int line;
    bool vote;
    long shuffles;
    alignas(16) char slot[2][SLOT];
    std::vector<Copy> copies;  // those not waited for
    int groups;                // committed
};

std::vector<Fibre> fibres;
std::vector<char> memory;
std::vector<unsigned> shared_writers, shared_readers;
std::vector<unsigned> in_flight;  // thread + 1 whose copy to each four bytes has not landed
std::vector<Range> arrays;
std::vector<std::vector<int>> writers, readers;  // of each byte of a writable array: block + 1
const Launch* how;
void (*entry)(const void*);
const void* argument;
int current, votes;
unsigned epoch;
Context scheduler;
char* text;
int text_size;
uint64_t random_state;

uint64_t random_word() {
    random_state += 0x9e3779b97f4a7c15ULL;
    uint64_t z = random_state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

bool is_skipped(const char* file, int line) {
    if (how->skipped_file == nullptr || line != how->skipped_line) return false;
    const char* name = std::strrchr(file, '/');
    return std::strcmp(name == nullptr ? file : name + 1, how->skipped_file) == 0;
}

const char* base(const char* file) {
    const char* name = std::strrchr(file, '/');
    return name == nullptr ? file : name + 1;
}

void wait(State state, const char* file, int line) {
    Fibre& own = fibres[current];
    own.state = state;
    own.file = file;
    own.line = line;
    switch_to(own.at, scheduler);
}

void begin_fibre() {
    entry(argument);
    if (!fibres[current].copies.empty()) fault("ends with copies that were not waited for");
    fibres[current].state = DONE;
    switch_to(fibres[current].at, scheduler);
}

void run(int i) {
    current = i;
    thread_index.x = i;
    now.own = epoch << TAG | (i + 1);
    switch_to(scheduler, fibres[i].at);
}

// Let the warps go on whose threads have all come to one shuffle.
bool release_warps() {
    bool any = false;
    const int count = static_cast<int>(how->block);
    for (int first = 0; first < count; first += WARP) {
        bool all = true;
        for (int i = first; i < first + WARP && i < count; ++i)
            all = all && fibres[i].state == AT_SHUFFLE;
        if (!all) continue;
        for (int i = first; i < first + WARP && i < count; ++i) {
            if (fibres[i].line != fibres[first].line || fibres[i].file != fibres[first].file)
                fault("shuffle divergence: threads %d and %d are at %s:%d and %s:%d", first, i,
                      base(fibres[first].file), fibres[first].line, base(fibres[i].file),
                      fibres[i].line);
            fibres[i].state = RUNNABLE;
        }
        any = true;
    }
    return any;
}

void begin_epoch(unsigned number) {
    epoch = number;
    now.several = epoch << TAG | SEVERAL;
}

bool release_barrier() {
    int waiting = -1;
    for (unsigned i = 0; i < how->block; ++i)
        if (fibres[i].state != DONE) waiting = static_cast<int>(i);
    if (waiting < 0) return false;
    const Fibre& one = fibres[waiting];
    for (unsigned i = 0; i < how->block; ++i) {
        const Fibre& other = fibres[i];
        if (other.state == DONE)
            fault("barrier divergence: thread %d waits at %s:%d and thread %u has ended", waiting,
                  base(one.file), one.line, i);
        if (other.state != one.state || other.line != one.line || other.file != one.file)
            fault("barrier divergence: threads %d and %u wait at %s:%d and %s:%d", waiting, i,
                  base(one.file), one.line, base(other.file), other.line);
    }
    votes = 0;
    for (unsigned i = 0; i < how->block; ++i) {
        votes += fibres[i].vote;
        fibres[i].state = RUNNABLE;
    }
    if (epoch == EPOCHS) fault("%u barriers passed: does it end?", epoch);
    begin_epoch(epoch + 1);
    return true;
}

void run_block() {
    const int count = static_cast<int>(how->block);
    std::memset(memory.data(), 0xff, memory.size());
    std::fill(shared_writers.begin(), shared_writers.end(), 0);
    std::fill(shared_readers.begin(), shared_readers.end(), 0);
    std::fill(in_flight.begin(), in_flight.end(), 0);
    begin_epoch(1);
    std::vector<int> turn(count);
    for (int i = 0; i < count; ++i) {
        Fibre& fibre = fibres[i];
        turn[i] = i;
        fibre.state = RUNNABLE;
        fibre.shuffles = 0;
        fibre.copies.clear();
        fibre.groups = 0;
        // Stacks begin at different places of their pages, which would share cache lines else.
        make_context(fibre.at, fibre.stack.get(), STACK - i % 16 * 256, begin_fibre);
    }
    do {
        if (how->order != 0)
            for (int i = count - 1; i > 0; --i) std::swap(turn[i], turn[random_word() % (i + 1)]);
        do {
            for (int i : turn)
                if (fibres[i].state == RUNNABLE) run(i);
        } while (release_warps());
    } while (release_barrier());
}

jmp_buf failed;

}  // namespace

void fault(const char* format, ...) {
    int used = std::snprintf(text, text_size, "block %u, thread %u: ", block_index.x,
                             thread_index.x);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text + used, text_size - used, format, arguments);
    va_end(arguments);
    _longjmp(failed, 1);
}

void barrier(const char* file, int line) {
    if (is_skipped(file, line)) return;
    fibres[current].vote = false;
    wait(AT_BARRIER, file, line);
}

bool barrier_or(bool value, const char* file, int line) {
    if (is_skipped(file, line)) return value;
    fibres[current].vote = value;
    wait(AT_BARRIER, file, line);
    return votes > 0;
}

int give(const void* mine, int bytes, const char* file, int line) {
    Fibre& own = fibres[current];
    // Two slots in turn: no lane is two shuffles ahead of another.
    const int slot = own.shuffles++ % 2;
    std::memcpy(own.slot[slot], mine, bytes);
    wait(AT_SHUFFLE, file, line);
    return slot;
}

const void* given(int lane, int slot) { return fibres[current / WARP * WARP + lane].slot[slot]; }

const void* exchange(const void* mine, int bytes, int source, const char* file, int line) {
    return given(source, give(mine, bytes, file, line));
}

void copy_later(int at, int begin, int end, uint64_t from) {
    if (from != 0) check_global(from, 16, false);
    examine_shared(at, begin, end, 16, true);
    std::memset(memory.data() + at, 0xff, 16);
    for (int word = at / 4; word < at / 4 + 4; ++word) {
        in_flight[word] = current + 1;
        // Of no one thread, so that every access before it lands is examined.
        shared_writers[word] = now.several;
        shared_readers[word] = 0;
    }
    fibres[current].copies.push_back({at, from, fibres[current].groups});
}

void commit_copies() { ++fibres[current].groups; }

void wait_copies(int pending, const char* file, int line) {
    if (is_skipped(file, line)) return;
    Fibre& own = fibres[current];
    const auto landed = [&](const Copy& copy) {
        if (copy.group >= own.groups - pending) return false;
        char* to = memory.data() + copy.at;
        if (copy.from == 0)
            std::memset(to, 0, 16);
        else
            std::memcpy(to, reinterpret_cast<const void*>(copy.from), 16);
        for (int word = copy.at / 4; word < copy.at / 4 + 4; ++word) {
            in_flight[word] = 0;
            shared_writers[word] = now.own;
        }
        return true;
    };
    own.copies.erase(std::remove_if(own.copies.begin(), own.copies.end(), landed),
                     own.copies.end());
}

unsigned ballot(bool mine, const char* file, int line) {
    const int slot = give(&mine, 1, file, line);
    unsigned bits = 0;
    for (int lane = 0; lane < WARP; ++lane)
        bits |= unsigned(*static_cast<const char*>(given(lane, slot))) << lane;
    return bits;
}

void examine_global(uint64_t address, int bytes, bool writing) {
    if (address % bytes != 0)
        fault("misaligned %s of %d bytes at %#llx", writing ? "write" : "read", bytes,
              static_cast<unsigned long long>(address));
    size_t i = 0;
    while (i < arrays.size() && (address < arrays[i].begin || address + bytes > arrays[i].end)) ++i;
    if (i == arrays.size())
        fault("%s of %d bytes at %#llx, outside of every array", writing ? "write" : "read", bytes,
              static_cast<unsigned long long>(address));
    if (!arrays[i].writable) {
        if (writing) fault("write to array %d, which is read-only", static_cast<int>(i));
        now.begin = arrays[i].begin;
        now.end = arrays[i].end;
        return;
    }
    const int own = static_cast<int>(block_index.x) + 1;
    const uint64_t at = address - arrays[i].begin;
    int &writer = writers[i][at], &reader = readers[i][at];
    if (writer != 0 && writer != own)
        fault("%s of array %d where block %d wrote", writing ? "write" : "read",
              static_cast<int>(i), writer - 1);
    if (writing && reader != 0 && reader != own)
        fault("write to array %d where block %d read", static_cast<int>(i), reader - 1);
    if (writing)
        writer = own;
    else
        reader = reader == 0 || reader == own ? own : -1;
}

void examine_shared(int at, int begin, int end, int bytes, bool writing) {
    if (at < begin || at + bytes > end)
        fault("%s of shared memory at byte %d, outside of its piece [%d, %d)",
              writing ? "write" : "read", at, begin, end);
    if (at % (bytes < 16 ? bytes : 16) != 0)
        fault("misaligned %s of %d bytes of shared memory at byte %d", writing ? "write" : "read",
              bytes, at);
    const auto by_others = [](unsigned tag) { return tag >> TAG == epoch && tag != now.own; };
    for (int word = at / 4; word < (at + bytes + 3) / 4; ++word) {
        unsigned &writer = shared_writers[word], &reader = shared_readers[word];
        if (in_flight[word] != 0)
            fault("%s of shared memory at byte %d, where the copy of thread %u is in flight",
                  writing ? "write" : "read", at, in_flight[word] - 1);
        if (by_others(writer))
            fault("race: %s of shared memory at byte %d, which thread %u wrote since the last "
                  "barrier", writing ? "write" : "read", at, (writer & SEVERAL) - 1);
        if (writing) {
            if (by_others(reader))
                fault("race: write of shared memory at byte %d, which another thread read since "
                      "the last barrier", at);
            writer = now.own;
        } else {
            if (writer == 0)
                fault("read of shared memory at byte %d, which was never written", at);
            reader = by_others(reader) ? now.several : now.own;
        }
    }
}

int shared_bytes() { return how->shared_bytes; }

int launch(void (*kernel)(const void*), const void* params, const Launch& launch,
           const Range* ranges, int count, char* report, int report_size) {
    entry = kernel;
    argument = params;
    how = &launch;
    text = report;
    text_size = report_size;
    random_state = launch.order;
    arrays.assign(ranges, ranges + count);
    writers.assign(count, {});
    readers.assign(count, {});
    for (int i = 0; i < count; ++i)
        if (arrays[i].writable) {
            writers[i].assign(arrays[i].end - arrays[i].begin, 0);
            readers[i].assign(arrays[i].end - arrays[i].begin, 0);
        }
    memory.resize(launch.shared_bytes + 16);
    shared_writers.resize(launch.shared_bytes / 4 + 8);
    shared_readers.resize(launch.shared_bytes / 4 + 8);
    in_flight.resize(launch.shared_bytes / 4 + 8);
    now = {memory.data(), shared_writers.data(), shared_readers.data(), 0, 0, 0, 0};
    thread_index = {0, 0, 0};
    if (fibres.size() < launch.block) fibres = std::vector<Fibre>(launch.block);
    if (_setjmp(failed) != 0) return 1;
    for (unsigned i = 0; i < launch.grid; ++i) {
        block_index = {i, 0, 0};
        run_block();
    }
    return 0;
}

}  // namespace emulator

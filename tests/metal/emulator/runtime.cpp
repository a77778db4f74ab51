// Runs a grid of threads as fibers of one thread of the system. A fiber runs until it waits (a barrier, an exchange between the
// lanes of its simdgroup) or ends: the worst order for a barrier that is missing. A seed shuffles groups and threads.
// No C++ library beside the headers: the wheel ziglang would have to build one first.
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef unsigned int uint;
struct msl_thread {
    uint in_grid[3], in_group[3], group[3], group_size[3], whole_group_size[3], groups[3], grid[3];
    uint index, lane, simdgroup, simdgroups;
};
struct msl_kernel { const char* name; void (*run)(void** buffers, const msl_thread& t); uint most_threads, buffers; };
extern "C" const msl_kernel msl_kernels[];
extern "C" const int msl_kernel_count;

#if TSAN        // this file itself is compiled without the sanitizers, which would see its own work as races
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#endif
#if ASAN
extern "C" void __asan_poison_memory_region(const volatile void*, size_t);
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t);
#endif

// --- a fiber's switch: 15 instructions on x86-64, the C library's (nine times slower) elsewhere
extern "C" void msl_body();
#if defined(__x86_64__) && !defined(MSL_UCONTEXT)
typedef void* Context;                  // the stack pointer, on a stack that holds the registers a function keeps
extern "C" void msl_switch(Context* from, Context* to);
asm(R"(
.globl msl_switch
msl_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");
static void begin(Context* context, char* stack, size_t bytes) {
    void** top = (void**)(stack + bytes);
    *--top = nullptr;                   // where msl_body would return to; keeps the stack aligned
    *--top = (void*)msl_body;
    *context = top - 6;
}
#else
#include <ucontext.h>
typedef ucontext_t Context;
static void msl_switch(Context* from, Context* to) { swapcontext(from, to); }
static void begin(Context* context, char* stack, size_t bytes) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = bytes;
    context->uc_link = nullptr;
    makecontext(context, msl_body, 0);
}
#endif

namespace {
constexpr size_t STACK = 256 << 10, THREADGROUP_BYTES = 32768, GAP = ASAN ? 64 : 0;
enum State { READY, AT_BARRIER, AT_EXCHANGE, DONE };

struct Fiber {
    Context context{};
    char* stack = nullptr;
    State state = READY;
    int line = 0;
    int exchanges = 0, barriers = 0, simdgroup_barriers = 0;
    msl_thread at{};
    void* tsan = nullptr;
};
struct alignas(64) Slots { char lane[2][32][64]; };     // two, so that a lane that runs ahead disturbs none that still reads
struct alignas(64) Tag { char x[64]; };                 // for the thread sanitizer, each in a place of its own

Fiber fibers[1024];
uint count;                             // of them, in this group
Slots slots[32];
struct { const void* where; void* at; } declared[64];      // the threadgroup's arrays
int declarations;
char* arena;
size_t arena_used;
Tag* barrier_tags;
Tag finish_tag;
Fiber* now;
Context scheduler;
void* scheduler_tsan;
const msl_kernel* running;
void** buffers;
char problem[1024];

uint least(uint a, uint b) { return a < b ? a : b; }

void say(const char* format, ...) {
    va_list args;
    va_start(args, format);
    if (!problem[0]) vsnprintf(problem, sizeof(problem), format, args);
    va_end(args);
}

void fill(void* at, size_t bytes) {         // with what is no number in any format; no memset, as below
    for (size_t i = 0; i < bytes / 8; i++) ((volatile uint64_t*)at)[i] = ~(uint64_t)0;
}

void copy(char* to, const char* from, size_t bytes) {       // no memcpy, which a sanitizer would see
    for (size_t i = 0; i < bytes; i++) *(volatile char*)(to + i) = from[i];
}

void to_scheduler() {
    Fiber* me = now;
#if TSAN
    __tsan_switch_to_fiber(scheduler_tsan, 1);      // 1: this orders nothing
#endif
    msl_switch(&me->context, &scheduler);
}

void prepare(Fiber& f) {
    if (!f.stack) {
        f.stack = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        mprotect(f.stack, 4096, PROT_NONE);     // too deep a stack ends the process rather than a neighbour's data
    }
    begin(&f.context, f.stack, STACK);
#if TSAN
    f.tsan = __tsan_create_fiber(0);
#endif
}

void run(Fiber& f) {
    now = &f;
#if TSAN
    __tsan_switch_to_fiber(f.tsan, 1);
#endif
    msl_switch(&scheduler, &f.context);
}

void wait(State state, int line) {
    now->state = state;
    now->line = line;
    to_scheduler();
}

void say_where(char* to, size_t room, const Fiber& f) {
    const char* what[] = {"runs", "is at the barrier of line %d", "is at its simdgroup's operation of line %d", "has ended"};
    int n = snprintf(to, room, "thread %u ", f.at.index);
    snprintf(to + n, room - n, what[f.state], f.line);
}

/* Whether fibers first .. last are all in this state, at one line; with `aloud` it says which two are not. */
bool together(uint first, uint last, State state, bool aloud = false) {
    for (uint i = first; i < last; i++) {
        Fiber &a = fibers[first], &b = fibers[i];
        if (b.state == a.state && (b.state == DONE || b.line == a.line)) continue;
        char one[100], other[100];
        say_where(one, sizeof(one), a);
        say_where(other, sizeof(other), b);
        if (aloud) say("threads of a group went apart: %s, %s", one, other);
        return false;
    }
    return fibers[first].state == state;
}

void release(uint first, uint last) {
    for (uint i = first; i < last; i++) fibers[i].state = READY;
}

/* Each simdgroup in turn as far as it comes, its lanes in the order given. */
void run_group(const uint* simdgroups, const uint* lanes) {
    while (!problem[0]) {
        for (uint i = 0; 32 * i < count; i++) {
            uint first = 32 * simdgroups[i], last = least(first + 32, count);
            for (;;) {
                for (uint j = first; j < last && !problem[0]; j++)
                    if (fibers[first + lanes[j]].state == READY) run(fibers[first + lanes[j]]);
                if (problem[0] || !together(first, last, AT_EXCHANGE)) break;
                release(first, last);
            }
        }
        if (together(0, count, AT_BARRIER)) release(0, count);
        else if (together(0, count, DONE, true)) return;
    }
}

/* 0 .. n-1, shuffled by a state that is not 0 (xorshift). */
void number(uint* order, uint n, uint64_t& state) {
    for (uint i = 0; i < n; i++) order[i] = i;
    for (uint i = n; state && i > 1; i--) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        uint j = state % i, x = order[i - 1];
        order[i - 1] = order[j];
        order[j] = x;
    }
}

/* What was written before is seen behind, unless the flags are mem_none. For the thread sanitizer alone: two tags take turns,
   so that a thread which is late to see one barrier does not look as if it had seen the next. */
void ordered_wait(State state, int flags, int line, Tag* tags, int& turn) {
#if TSAN
    Tag* tag = tags + (turn++ & 1);
    if (flags) __tsan_release(tag);
#endif
    wait(state, line);
#if TSAN
    if (flags) __tsan_acquire(tag);
#endif
    (void)flags, (void)tags, (void)turn;
}
}  // namespace

extern "C" void msl_body() {
    running->run(buffers, now->at);
    now->state = DONE;
#if TSAN
    __tsan_release(&finish_tag);
#endif
    to_scheduler();
}

extern "C" void msl_barrier(int flags, int line) { ordered_wait(AT_BARRIER, flags, line, barrier_tags, now->barriers); }

extern "C" void msl_simdgroup_barrier(int flags, int line) {
    ordered_wait(AT_EXCHANGE, flags, line, barrier_tags + 2 + 2 * now->at.simdgroup, now->simdgroup_barriers);
}

extern "C" const char* msl_exchange(const void* value, size_t bytes, int line) {
    auto& two = slots[now->at.simdgroup].lane[now->exchanges++ & 1];
    copy(two[now->at.lane], (const char*)value, bytes);
    wait(AT_EXCHANGE, line);
    return two[0];
}

extern "C" uint msl_lane() { return now->at.lane; }

extern "C" uint msl_lanes() {
    uint first = now->at.simdgroup * 32;
    return least(count - first, 32);
}

extern "C" void* msl_threadgroup(const void* declaration, size_t bytes, size_t align) {
    for (int i = 0; i < declarations; i++)
        if (declared[i].where == declaration) return declared[i].at;
    size_t at = (arena_used + GAP + align - 1) / align * align;
    if (at + bytes - GAP * (declarations + 1) > THREADGROUP_BYTES || declarations == 64) {
        say("threadgroup memory: %zu bytes in %d arrays, a group has %zu", at + bytes, declarations + 1, THREADGROUP_BYTES);
        to_scheduler();
    }
    arena_used = at + bytes;
#if ASAN
    __asan_unpoison_memory_region(arena + at, bytes);
#endif
    declared[declarations++] = {declaration, arena + at};
    return arena + at;
}

extern "C" size_t msl_threadgroup_bytes() { return arena_used - GAP * declarations; }       // of the last launch

/* Runs kernel k over threads[3] in groups of group[3]. Returns 0, or 1 with the reason in message. */
extern "C" int msl_launch(int k, void** given, const uint* threads, const uint* group, uint64_t seed, char* message, int room) {
    running = msl_kernels + k;
    buffers = given;
    problem[0] = 0;
    uint64_t random = seed * 0x9e3779b97f4a7c15;
    uint groups[3];
    for (int d = 0; d < 3; d++) groups[d] = (threads[d] + group[d] - 1) / group[d];
    uint all = groups[0] * groups[1] * groups[2], simdgroups[32], lanes[1024];
    uint* which = (uint*)malloc(all * sizeof(uint));
    number(which, all, random);
    constexpr size_t room_for_all = THREADGROUP_BYTES + 64 * 64;
#if TSAN
    scheduler_tsan = __tsan_get_current_fiber();
#endif
    for (uint w = 0; w < all && !problem[0]; w++) {
        uint g = which[w], at[3] = {g % groups[0], g / groups[0] % groups[1], g / groups[0] / groups[1]}, size[3];
        for (int d = 0; d < 3; d++) size[d] = least(group[d], threads[d] - at[d] * group[d]);
        count = size[0] * size[1] * size[2];
        if (TSAN || !arena) {           // the thread sanitizer remembers addresses: each group has new ones
            arena = (char*)mmap(nullptr, room_for_all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            barrier_tags = (Tag*)aligned_alloc(64, 66 * sizeof(Tag));
            for (Fiber& f : fibers) f.stack = TSAN ? nullptr : f.stack;
        }
#if ASAN
        __asan_unpoison_memory_region(arena, room_for_all);
#endif
        fill(arena, room_for_all);
#if ASAN
        __asan_poison_memory_region(arena, room_for_all);
#endif
        for (uint i = count; i % 32; i++)       // lanes that do not exist
            for (auto& slot : slots[i / 32].lane) fill(slot[i % 32], sizeof(slot[0]));
        declarations = 0;
        arena_used = 0;
        number(simdgroups, (count + 31) / 32, random);
        for (uint first = 0; first < count; first += 32) number(lanes + first, least(count - first, 32), random);
        for (uint i = 0; i < count; i++) {
            Fiber& f = fibers[i];
            f.state = READY;
            f.line = f.exchanges = f.barriers = f.simdgroup_barriers = 0;
            uint in[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
            for (int d = 0; d < 3; d++) {
                f.at.in_group[d] = in[d];
                f.at.group[d] = at[d];
                f.at.in_grid[d] = at[d] * group[d] + in[d];
                f.at.group_size[d] = size[d];
                f.at.whole_group_size[d] = group[d];
                f.at.groups[d] = groups[d];
                f.at.grid[d] = threads[d];
            }
            f.at.index = i;
            f.at.lane = i % 32;
            f.at.simdgroup = i / 32;
            f.at.simdgroups = (count + 31) / 32;
            prepare(f);
        }
        run_group(simdgroups, lanes);
#if TSAN
        for (uint i = 0; i < count; i++) __tsan_destroy_fiber(fibers[i].tsan);
#endif
    }
    free(which);
#if TSAN
    __tsan_acquire(&finish_tag);
#endif
    snprintf(message, room, "%s", problem);
    return problem[0] != 0;
}

// libgcc before 13 lacks it: a float rounded to the nearest bfloat, ties to even
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float x) {
    uint32_t bits = __builtin_bit_cast(uint32_t, x);
    bits = x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    return __builtin_bit_cast(__bf16, (uint16_t)(bits >> 16));
}

#ifdef MSL_MAIN
/* A launch in a process of its own, for the sanitizers: kernel, threads, group, seed and buffers from a file, the buffers back
   into it. Before each buffer stand its size and how far off 16 bytes it is to be. */
int main(int, char** argv) {
    FILE* file = fopen(argv[1], "r+b");
    uint64_t head[9], shape[2];
    if (!file || fread(head, 8, 9, file) != 9) return 2;
    uint threads[3] = {(uint)head[1], (uint)head[2], (uint)head[3]}, group[3] = {(uint)head[4], (uint)head[5], (uint)head[6]};
    char* given[31];
    long at[31];
    uint64_t sizes[31];
    for (uint64_t i = 0; i < head[8]; i++) {
        if (fread(shape, 8, 2, file) != 2) return 2;
        at[i] = ftell(file);
        sizes[i] = shape[0];
        given[i] = (char*)malloc(shape[0] + shape[1]) + shape[1];
        if (fread(given[i], 1, shape[0], file) != shape[0]) return 2;
    }
    char message[1024];
    int failed = msl_launch((int)head[0], (void**)given, threads, group, head[7], message, sizeof(message));
    if (failed) fprintf(stderr, "%s\n", message);
    for (uint64_t i = 0; i < head[8]; i++) {
        fseek(file, at[i], SEEK_SET);
        fwrite(given[i], 1, sizes[i], file);
    }
    fclose(file);
    return failed;
}
#endif

// The machine of simt.h. Every build compiles it without instrumentation: a sanitizer then sees the memory accesses of
// the shaders and not those of the scheduler. SIMT_ASAN and SIMT_TSAN tell the sanitizer's runtime about the fibers.
//
// Race detection (SIMT_TSAN): each GPU thread is a fiber of ThreadSanitizer. A switch of fibers orders nothing. A
// barrier with a memory flag orders its own scope only. Threadgroups run on two sets of fibers, which meet only at the
// end of the grid: writes of two threadgroups to one place are then races too. The parity of the bits of the
// threadgroup's number selects the set: for every distance, some pairs of threadgroups at that distance are on
// different sets.
#include "simt.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <utility>
#include <vector>

#ifdef SIMT_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef SIMT_TSAN
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
}
#endif

// Saves the callee-saved registers and the stack pointer in *save, and continues on stack `to`.
extern "C" void simt_switch(void **save, void *to);
#ifdef __APPLE__
#define SIMT_SYMBOL "_simt_switch"
#else
#define SIMT_SYMBOL "simt_switch"
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
static uint64_t float_mode() { return _mm_getcsr(); }
static void set_float_mode(uint64_t mode) { _mm_setcsr((unsigned)mode); }
static const uint64_t flushing_mode = 0x8040; // results and operands
static const size_t saved_words = 6;
asm(".text\n.globl " SIMT_SYMBOL "\n" SIMT_SYMBOL ":\n"
    "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
    "  mov %rsp,(%rdi)\n  mov %rsi,%rsp\n"
    "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n  ret\n");
#elif defined(__aarch64__)
static uint64_t float_mode()
{
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
static const uint64_t flushing_mode = 1u << 24;
static const size_t saved_words = 20;
asm(".text\n.globl " SIMT_SYMBOL "\n.p2align 2\n" SIMT_SYMBOL ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
#else
#error "simt.cpp has a stack switch for x86-64 and arm64"
#endif

namespace simt
{

thread_state *current;
const constant_values *constants;
static const kernel *kernels;
static uint64_t n_widened_halves;

namespace
{

enum fiber_state { ready, at_simd_operation, at_simdgroup_barrier, at_threadgroup_barrier, finished };
const char *const state_names[] = {"ready", "a simdgroup operation", "simdgroup_barrier", "threadgroup_barrier",
                                   "the end"};

struct fiber {
    thread_state t;
    void *stack_pointer;
    char *stack;
    fiber_state state;
    const char *file;
    int line;
    unsigned exchanges;
    void *asan_stack, *tsan_fiber;
};

// The point where the lanes of one simdgroup, or all threads of a threadgroup, wait for each other.
struct meeting {
    unsigned arrived;
    const char *operation, *file;
    int line;
};

struct simdgroup {
    slot slots[2][simd_width]; // two: a fast lane must not overwrite what a slow lane still reads
    meeting point;
};

struct machine {
    const kernel *k;
    std::vector<fiber> fibers;
    std::vector<simdgroup> simdgroups;
    meeting group;
    fiber *running;
    std::vector<unsigned> turns; // the order of the fibers in a round
    unsigned turn, finished;     // the next one; fibers that are done
    bool moved;                  // a fiber has run in this round
    lane_order order;
    uint64_t random;
    void *first_stack; // of what launches
    std::string failure;
    unsigned parity; // of the threadgroup that runs
    void *asan_stack, *tsan_fiber;
    const void *asan_bottom;
    size_t asan_size;
};

machine *m;
const size_t stack_size = 2048 * 1024; // what llc -O0 makes of a kernel takes more than 256 KiB
// One for each set of fibers. They stay from launch to launch: mapping a stack costs more than a small kernel.
std::vector<char *> stacks[2];
#ifdef SIMT_TSAN
std::vector<void *> tsan_fibers[2];
char grid_start, grid_end;
#endif

std::string text(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char *format, ...)
{
    char buffer[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    return buffer;
}

uint64_t next_random(uint64_t &x) // xorshift64
{
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return x;
}

// The next fiber that can run, in rounds whose order is that of the schedule, or null: all are done, or wait.
fiber *next_fiber()
{
    unsigned n = (unsigned)m->turns.size();
    for (;;) {
        while (m->turn < n) {
            fiber *f = &m->fibers[m->turns[m->turn++]];
            if (f->state != ready) continue;
            m->moved = true;
            return f;
        }
        if (!m->moved || m->finished == n) return nullptr;
        m->turn = 0;
        m->moved = false;
        if (m->order == shuffled)
            for (unsigned i = n - 1; i > 0; i--) std::swap(m->turns[i], m->turns[next_random(m->random) % (i + 1)]);
    }
}

// From one fiber to another; null for either is what launches. All fibers switch here, so that processors predict the returns.
void switch_fibers(fiber *from, fiber *to)
{
    m->running = to;
    if (to) current = &to->t;
#ifdef SIMT_ASAN
    bool dying = from && (from->state == finished || !m->failure.empty());
    __sanitizer_start_switch_fiber(dying  ? nullptr
                                   : from ? &from->asan_stack
                                          : &m->asan_stack,
                                   to ? to->stack : m->asan_bottom, to ? stack_size : m->asan_size);
#endif
#ifdef SIMT_TSAN
    if (from) __tsan_release(&grid_end); // a launch that fails ends wherever its threads wait
    __tsan_switch_to_fiber(to ? to->tsan_fiber : m->tsan_fiber, 1);
#endif
    simt_switch(from ? &from->stack_pointer : &m->first_stack, to ? to->stack_pointer : m->first_stack);
#ifdef SIMT_ASAN
    __sanitizer_finish_switch_fiber(from ? from->asan_stack : m->asan_stack, nullptr, nullptr);
#endif
}

// Ends the launch. Does not return to the running fiber.
[[noreturn]] void fail(const std::string &message)
{
    if (m->failure.empty()) m->failure = message;
    switch_fibers(m->running, nullptr);
    abort();
}

void start()
{
#ifdef SIMT_ASAN
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!m->asan_bottom) m->asan_bottom = bottom, m->asan_size = size;
#endif
#ifdef SIMT_TSAN
    __tsan_acquire(&grid_start);
#endif
    fiber *f = m->running;
    m->k->body(f->t);
    f->state = finished;
    m->finished++;
    switch_fibers(f, next_fiber());
    abort();
}

typedef uint32_t word __attribute__((may_alias));

bool differ(const char *a, const char *b) { return a != b && strcmp(a, b); }

// The running lane arrives at a meeting of `expected` threads. The last one to arrive wakes all, which are those from
// `first` on.
void meet(meeting &point, unsigned expected, unsigned first, fiber_state waiting, const char *operation,
          const char *file, int line)
{
    fiber *f = m->running;
    f->file = file;
    f->line = line;
    if (point.arrived == 0) {
        point.operation = operation;
        point.file = file;
        point.line = line;
    } else if (point.line != line || differ(point.operation, operation) || differ(point.file, file)) {
        fail(text("%s: divergent: thread %u is at %s (%s:%d), others of its %s at %s (%s:%d)", m->k->name,
                  f->t.thread_index_in_threadgroup, operation, file, line,
                  waiting == at_threadgroup_barrier ? "threadgroup" : "simdgroup", point.operation, point.file,
                  point.line));
    }
    if (++point.arrived < expected) {
        f->state = waiting;
        switch_fibers(f, next_fiber());
        return;
    }
    point.arrived = 0;
    for (unsigned i = 0; i < expected; i++) m->fibers[first + i].state = ready;
}

void prepare_fiber(unsigned index, extent group, const launch &l, void *const *threadgroup)
{
    fiber &f = m->fibers[index];
    thread_state &t = f.t;
    t.thread_index_in_threadgroup = index;
    t.thread_index_in_simdgroup = index % simd_width;
    t.simdgroup_index_in_threadgroup = index / simd_width;
    t.simdgroups_per_threadgroup = (unsigned)m->simdgroups.size();
    t.threadgroup_position_in_grid = group;
    t.buffers = l.buffers;
    t.threadgroup_arguments = threadgroup;
    f.state = ready;
    f.exchanges = 0;
    f.stack = stacks[m->parity][index];
    // Tops at one place of their pages would share a few lines of the cache.
    void **sp = (void **)(f.stack + stack_size - index % 64 * (4096 + 320));
#if defined(__x86_64__)
    *--sp = nullptr; // the return address of `start`: aligns the stack as after a call
    *--sp = (void *)start;
    for (size_t i = 0; i < saved_words; i++) *--sp = nullptr;
#else
    sp -= saved_words;
    memset(sp, 0, saved_words * sizeof *sp);
    sp[11] = (void *)start; // x30
#endif
    f.stack_pointer = sp;
#ifdef SIMT_TSAN
    f.tsan_fiber = tsan_fibers[m->parity][index];
#endif
}

std::string describe_waiting()
{
    unsigned waiting = 0, shown = 0;
    std::string list;
    for (const fiber &f : m->fibers) {
        if (f.state == finished) continue;
        waiting++;
        if (shown++ < 2)
            list += text(" thread %u at %s (%s:%d);", f.t.thread_index_in_threadgroup, state_names[f.state], f.file,
                         f.line);
    }
    return text("%s: divergent: %zu threads have ended while %u wait:%s", m->k->name, m->fibers.size() - waiting,
                waiting, list.c_str());
}

// Runs the prepared fibers until all have finished.
void run_threadgroup()
{
    unsigned n = (unsigned)m->fibers.size();
    m->turns.resize(n);
    for (unsigned i = 0; i < n; i++) m->turns[i] = m->order == descending ? n - 1 - i : i;
    m->turn = n;
    m->finished = 0;
    m->moved = true;
    switch_fibers(nullptr, next_fiber());
    if (m->failure.empty() && m->finished < n) m->failure = describe_waiting();
}

std::string check_launch(const kernel &k, const launch &l)
{
    uint64_t threads = (uint64_t)l.threads.x * l.threads.y * l.threads.z;
    if (threads == 0 || threads > max_threads || threads % simd_width)
        return text("%s: %llu threads a threadgroup: not a multiple of 32 up to 1024", k.name,
                    (unsigned long long)threads);
    for (unsigned i = 0; i < max_buffers; i++)
        if ((k.buffers >> i & 1) && !l.buffers[i]) return text("%s: buffer %u is not bound", k.name, i);
    size_t total = 0;
    for (unsigned i = 0; i < max_threadgroup_arguments; i++) {
        if ((k.threadgroup >> i & 1) && !l.threadgroup_bytes[i])
            return text("%s: threadgroup memory %u has no length", k.name, i);
        if (l.threadgroup_bytes[i] % 16) return text("%s: threadgroup memory %u: not a multiple of 16", k.name, i);
        total += l.threadgroup_bytes[i];
    }
    if (total > 32768) return text("%s: %zu bytes of threadgroup memory: more than 32 KiB", k.name, total);
    for (unsigned i = 0; i < max_constants; i++)
        if ((k.constants >> i & 1) && !l.constants.set[i])
            return text("%s: function constant %u is not set: there is no such pipeline", k.name, i);
    return "";
}

char *new_stack()
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *stack = mmap(nullptr, stack_size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stack == MAP_FAILED) abort();
    mprotect(stack, 4096, PROT_NONE); // an overflow faults
    return (char *)stack;
}

void prepare_machine(machine &machine, const kernel &k, unsigned threads)
{
    m = &machine;
    m->k = &k;
    m->fibers.resize(threads);
    m->simdgroups.resize(threads / simd_width);
    m->group.arrived = 0;
    for (auto &set : stacks)
        while (set.size() < threads) set.push_back(new_stack());
#ifdef SIMT_TSAN
    m->tsan_fiber = __tsan_get_current_fiber();
    for (auto &set : tsan_fibers)
        while (set.size() < threads) set.push_back(__tsan_create_fiber(0));
#endif
}

} // namespace

registration::registration(const char *name, uint32_t buffers, uint32_t threadgroup, uint64_t used,
                           void (*body)(thread_state &))
    : k{name, buffers, threadgroup, used, body, kernels}
{
    kernels = &k;
}

const kernel *first_kernel() { return kernels; }
const kernel *find_kernel(const char *name)
{
    for (const kernel *k = kernels; k; k = k->next)
        if (!strcmp(k->name, name)) return k;
    return nullptr;
}

matrix_place matrix_places[simd_width] = {{0, 0}, {0, 2}, {1, 0}, {1, 2}, {2, 0}, {2, 2}, {3, 0}, {3, 2},
                                          {0, 4}, {0, 6}, {1, 4}, {1, 6}, {2, 4}, {2, 6}, {3, 4}, {3, 6},
                                          {4, 0}, {4, 2}, {5, 0}, {5, 2}, {6, 0}, {6, 2}, {7, 0}, {7, 2},
                                          {4, 4}, {4, 6}, {5, 4}, {5, 6}, {6, 4}, {6, 6}, {7, 4}, {7, 6}};

unsigned char matrix_lanes[8][4];

uint64_t widened_halves() { return n_widened_halves; }
void count_half() { n_widened_halves++; }

const slot *exchange(const void *value, size_t size, const char *operation, const char *file, int line)
{
    fiber *f = m->running;
    simdgroup &s = m->simdgroups[f->t.simdgroup_index_in_threadgroup];
    unsigned parity = f->exchanges++ & 1;
    volatile unsigned char *to = s.slots[parity][f->t.thread_index_in_simdgroup].bytes; // a sanitizer would see memcpy
    if (size % sizeof(word) == 0)
        for (size_t i = 0; i < size / sizeof(word); i++) ((volatile word *)to)[i] = ((const word *)value)[i];
    else
        for (size_t i = 0; i < size; i++) to[i] = ((const unsigned char *)value)[i];
    meet(s.point, simd_width, f->t.simdgroup_index_in_threadgroup * simd_width, at_simd_operation, operation, file,
         line);
    return s.slots[parity];
}

void barrier(barrier_scope scope, bool orders_memory, const char *file, int line)
{
    fiber *f = m->running;
    unsigned group = f->t.simdgroup_index_in_threadgroup;
    meeting &point = scope == simdgroup_scope ? m->simdgroups[group].point : m->group;
    (void)orders_memory;
#ifdef SIMT_TSAN
    char *order = (char *)&point + m->parity; // one for each set of fibers: a barrier orders its own threadgroup only
    if (orders_memory) __tsan_release(order);
#endif
    if (scope == simdgroup_scope)
        meet(point, simd_width, group * simd_width, at_simdgroup_barrier, "simdgroup_barrier", file, line);
    else
        meet(point, (unsigned)m->fibers.size(), 0, at_threadgroup_barrier, "threadgroup_barrier", file, line);
#ifdef SIMT_TSAN
    if (orders_memory) __tsan_acquire(order);
#endif
}

void unset_constant(const char *name, int index)
{
    fail(text("%s: function constant %s (%d) is not set", m->k->name, name, index));
}

void bad_lane(const char *operation, unsigned lane, const char *file, int line)
{
    fail(text("%s: %s of lane %u (%s:%d)", m->k->name, operation, lane, file, line));
}

std::string run(const kernel &k, const launch &l, const schedule &s)
{
    std::string wrong = check_launch(k, l);
    if (!wrong.empty()) return wrong;
    const uint64_t mode = float_mode();
    if (s.flush_subnormals) set_float_mode(mode | flushing_mode);
    unsigned threads = l.threads.x * l.threads.y * l.threads.z;
    machine machine = {};
    prepare_machine(machine, k, threads);
    constants = &l.constants;
    for (unsigned i = 0; i < simd_width; i++)
        matrix_lanes[matrix_places[i].row][matrix_places[i].column / 2] = (unsigned char)i;
    m->order = s.order;
    m->random = s.seed | 1;
    uint64_t index = 0;
    std::vector<void *> memory; // new for each threadgroup and freed at the end: no threadgroup sees that of another
    for (unsigned z = 0; z < l.threadgroups.z; z++)
        for (unsigned y = 0; y < l.threadgroups.y; y++)
            for (unsigned x = 0; x < l.threadgroups.x && m->failure.empty(); x++) {
                m->parity = (unsigned)__builtin_parityll(index++);
                void *threadgroup[max_threadgroup_arguments] = {};
                for (unsigned i = 0; i < max_threadgroup_arguments; i++) {
                    if (!l.threadgroup_bytes[i]) continue;
                    threadgroup[i] = malloc(l.threadgroup_bytes[i]);
                    memset(threadgroup[i], s.poison, l.threadgroup_bytes[i]);
                    memory.push_back(threadgroup[i]);
                }
                for (simdgroup &g : m->simdgroups) g.point.arrived = 0;
                for (unsigned i = 0; i < threads; i++) prepare_fiber(i, {x, y, z}, l, threadgroup);
#ifdef SIMT_TSAN
                __tsan_release(&grid_start);
#endif
                run_threadgroup();
            }
#ifdef SIMT_TSAN
    __tsan_acquire(&grid_end);
#endif
    for (void *p : memory) free(p);
    set_float_mode(mode);
    return m->failure;
}

} // namespace simt

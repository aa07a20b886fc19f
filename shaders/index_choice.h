// The choice of blocks by their scores: exact, by digits of the scores' bits from the highest on. Each says more of the
// k-th best score. One threadgroup does it alone where a row is short. Else there are three dispatches: chunks of the
// row count the first digits of their blocks; each gathers its blocks whose digit is that of the k-th best or a better
// one; one threadgroup chooses among those.
#ifndef TQKV_INDEX_CHOICE_H
#define TQKV_INDEX_CHOICE_H
#include "index.h"
#include "scan.h"

#define CHOOSE_DIGITS 3
#define CHOOSE_BLOCKS 4 // that a thread takes at a time

// What the digits so far say of the k-th best score: its upper bits, and how many with these bits are to be chosen.
struct choice {
    uint bits, wanted;
};

// What a threadgroup works on, and the place of this thread in it.
struct choose_task {
    device const float *scores; // [n_blocks], of the query
    device uint *counts;        // [n_chunks][TQKV__CHOOSE_COUNTS] of the query
    device uint *sums;          // [n_chunks][TQKV__CHOOSE_SUMS]: of as many neighbouring counts each
    device uint *header;        // gathered blocks, bits and wanted
    device uint *gathered;      // [TQKV__CHOOSE_ROOM][2]: a block and its key
    device int *list;           // [k]
    threadgroup uint *bins;     // [TQKV__CHOOSE_COUNTS]
    threadgroup uint *shared;   // [2][TQKV__CHOOSE_SUMS]
    uint chunk, seen;           // seen: blocks up to the last that the query sees some key of
    uint first, n;              // blocks of the threadgroup, or gathered ones
    scan_place at;              // its memory has room for four more numbers
};

inline uint thread_of(thread const choose_task &task) { return task.at.simdgroup * 32u + task.at.lane; }
inline uint threads_of(thread const choose_task &task) { return task.at.n_simdgroups * 32u; }

// Digits of 12, 12 and 8 bits: the lowest bit of one, and what keeps the bits above it.
inline uint digit_shift(uint digit) { return digit == 0 ? 20u : digit == 1 ? 8u : 0u; }
inline uint bits_before(uint digit) { return digit == 0 ? 0u : ~0u << digit_shift(digit - 1u); }

// A score as a number that ascends with it; 0 is never chosen. Zeros of both signs are equal.
inline uint key_of_block(constant tqkv__choose_args &args, thread const choose_task &task, uint block)
{
    uint bits = as_type<uint>(task.scores[block]);
    bool always = block < uint(args.first) || block + uint(args.newest) >= task.seen;
    if (bits == 0xff800000u || block < uint(args.from) || block >= task.seen) return 0u; // -INFINITY
    if (always) return ~0u;
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0u;
    if (bits == 0x80000000u) bits = 0u;
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

// Key of number i of the threadgroup's blocks; 0 behind the last.
inline uint key_at(constant tqkv__choose_args &args, thread const choose_task &task, uint i)
{
    if (i >= task.n) return 0u;
    return args.step == TQKV__CHOOSE_AMONG ? task.gathered[2u * i + 1u] : key_of_block(args, task, task.first + i);
}

// Counts a digit of the blocks whose upper bits are those so far. A barrier follows.
inline void count_digits(constant tqkv__choose_args &args, thread const choose_task &task, uint digit, choice made)
{
    threadgroup uint *bins = task.bins;
    threadgroup atomic_uint *counters = (threadgroup atomic_uint *)bins;
    uint n_threads = threads_of(task), mask = digit + 1u == uint(CHOOSE_DIGITS) ? 255u : 4095u;
    for (uint i = thread_of(task); i < uint(TQKV__CHOOSE_COUNTS); i += n_threads) bins[i] = 0u;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint first = thread_of(task); first < task.n; first += n_threads * uint(CHOOSE_BLOCKS)) {
        uint keys[CHOOSE_BLOCKS];
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++) keys[i] = key_at(args, task, first + uint(i) * n_threads);
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++)
            if (keys[i] != 0u && ((keys[i] ^ made.bits) & bits_before(digit)) == 0u)
                atomic_fetch_add_explicit(&counters[(keys[i] >> digit_shift(digit)) & mask], 1u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Sums of neighbouring bins, to `shared`. A barrier follows.
inline void sum_bins(thread const choose_task &task)
{
    const uint each = uint(TQKV__CHOOSE_COUNTS / TQKV__CHOOSE_SUMS);
    for (uint s = task.at.simdgroup; s < uint(TQKV__CHOOSE_SUMS); s += task.at.n_simdgroups) {
        uint sum = sum_of_lanes(task.bins[s * each + task.at.lane] + task.bins[s * each + 32u + task.at.lane]);
        if (task.at.lane == 0) task.shared[s] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A number, and the sum before it.
struct reached {
    uint number, before;
};

// The number at which a sum over the TQKV__CHOOSE_SUMS numbers from the last one on, which begins with `before`,
// reaches `wanted`; number 0 if it never does. All lanes of the simdgroup must come here together.
inline reached find_number(threadgroup const uint *numbers, uint lane, uint before, uint wanted)
{
    uint last = 63u - 2u * lane, upper = numbers[last], both = upper + numbers[last - 1u];
    uint to_lane = before + sum_to_lane(both, lane), to_upper = to_lane - both + upper;
    bool here = to_lane - both < wanted && (to_lane >= wanted || lane == 31u), in_upper = to_upper >= wanted;
    reached found;
    found.number = sum_of_lanes(here ? last - (in_upper ? 0u : 1u) : 0u);
    found.before = sum_of_lanes(here ? (in_upper ? to_lane - both : to_upper) : 0u);
    return found;
}

// What the bins say. Every thread has the result.
inline choice narrow(thread const choose_task &task, uint digit, choice made)
{
    threadgroup uint *result = task.at.shared + 32;
    sum_bins(task);
    if (task.at.simdgroup == 0) {
        reached group = find_number(task.shared, task.at.lane, 0u, made.wanted);
        reached found = find_number(task.bins + group.number * 64u, task.at.lane, group.before, made.wanted);
        if (task.at.lane == 0) {
            result[0] = group.number * 64u + found.number;
            result[1] = found.before;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    made.bits |= result[0] << digit_shift(digit);
    made.wanted -= result[1];
    threadgroup_barrier(mem_flags::mem_threadgroup); // before the bins and the result are overwritten
    return made;
}

// ---- Chunks ----

inline void count_chunk(constant tqkv__choose_args &args, thread const choose_task &task)
{
    choice made = {0u, uint(args.k)};
    count_digits(args, task, 0u, made);
    sum_bins(task);
    device uint *counts = task.counts + task.chunk * uint(TQKV__CHOOSE_COUNTS),
                *sums = task.sums + task.chunk * uint(TQKV__CHOOSE_SUMS);
    for (uint i = thread_of(task); i < uint(TQKV__CHOOSE_COUNTS); i += threads_of(task)) counts[i] = task.bins[i];
    for (uint i = thread_of(task); i < uint(TQKV__CHOOSE_SUMS); i += threads_of(task)) sums[i] = task.shared[i];
}

// TQKV__CHOOSE_SUMS numbers of each chunk, `stride` apart, added up over all chunks and over those before the
// threadgroup's:
// to `shared`. A barrier follows.
inline void sum_chunks(constant tqkv__choose_args &args, thread const choose_task &task, device const uint *numbers,
                       uint stride)
{
    threadgroup uint *shared = task.shared;
    threadgroup atomic_uint *sums = (threadgroup atomic_uint *)shared;
    uint lane = task.at.lane, n_chunks = uint(args.n_chunks), all[2], before[2];
    for (uint i = thread_of(task); i < 2u * uint(TQKV__CHOOSE_SUMS); i += threads_of(task)) shared[i] = 0u;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    TQKV_UNROLL
    for (int i = 0; i < 2; i++) all[i] = before[i] = 0u;
    for (uint first = task.at.simdgroup; first < n_chunks; first += task.at.n_simdgroups * 4u) {
        uint x[4][2];
        TQKV_UNROLL
        for (int c = 0; c < 4; c++) {
            uint chunk = first + uint(c) * task.at.n_simdgroups, row = min(chunk, n_chunks - 1u) * stride + lane;
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) x[c][i] = chunk < n_chunks ? numbers[row + uint(i) * 32u] : 0u;
        }
        TQKV_UNROLL
        for (int c = 0; c < 4; c++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) {
                all[i] += x[c][i];
                before[i] += first + uint(c) * task.at.n_simdgroups < task.chunk ? x[c][i] : 0u;
            }
        }
    }
    TQKV_UNROLL
    for (int i = 0; i < 2; i++) {
        atomic_fetch_add_explicit(&sums[lane + uint(i) * 32u], all[i], memory_order_relaxed);
        atomic_fetch_add_explicit(&sums[uint(TQKV__CHOOSE_SUMS) + lane + uint(i) * 32u], before[i],
                                  memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The sum of those numbers from number `first` on.
inline uint sum_from(threadgroup const uint *numbers, uint lane, uint first)
{
    return sum_of_lanes((lane >= first ? numbers[lane] : 0u) + (lane + 32u >= first ? numbers[lane + 32u] : 0u));
}

// What the chunks' counts say of the first digit. To `shared` of `at`: digit, blocks with better ones, blocks that are
// gathered by the chunks before and by all. A barrier follows.
inline void find_digit_of_chunks(constant tqkv__choose_args &args, thread const choose_task &task)
{
    threadgroup uint *result = task.at.shared + 32, *all = task.shared, *early = all + TQKV__CHOOSE_SUMS;
    reached group = {0u, 0u};
    uint gathered = 0u, before = 0u;
    for (int level = 0; level < 2; level++) {
        bool fine = level == 1;
        uint first = fine ? result[0] * uint(TQKV__CHOOSE_SUMS) : 0u;
        sum_chunks(args, task, fine ? task.counts + first : task.sums,
                   uint(fine ? TQKV__CHOOSE_COUNTS : TQKV__CHOOSE_SUMS));
        if (task.at.simdgroup == 0) {
            uint from = fine ? 0u : 1u;
            group = find_number(all, task.at.lane, group.before, uint(args.k));
            gathered += sum_from(all, task.at.lane, group.number + from);
            before += sum_from(early, task.at.lane, group.number + from);
            if (task.at.lane == 0) {
                result[0] = first + group.number;
                result[1] = group.before;
                result[2] = before;
                result[3] = gathered;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

inline void load_keys(constant tqkv__choose_args &args, thread const choose_task &task, uint first,
                      thread uint (&keys)[CHOOSE_BLOCKS])
{
    TQKV_UNROLL
    for (int i = 0; i < CHOOSE_BLOCKS; i++) keys[i] = key_at(args, task, first + uint(i));
}

// Gathers the chunk's blocks that may be chosen, ascending, where those of the chunks before end.
inline void gather_chunk(constant tqkv__choose_args &args, thread const choose_task &task)
{
    uint own = thread_of(task) * uint(CHOOSE_BLOCKS), keys[CHOOSE_BLOCKS];
    load_keys(args, task, own, keys); // under way while the digit is looked for
    find_digit_of_chunks(args, task);
    threadgroup const uint *result = task.at.shared + 32;
    uint least = max(result[0] << digit_shift(0u), 1u), to = result[2];
    if (task.chunk == 0 && thread_of(task) == 0) {
        task.header[0] = result[3];
        task.header[1] = result[0] << digit_shift(0u);
        task.header[2] = uint(args.k) - result[1];
    }
    for (uint first = own; first - own < task.n; first += threads_of(task) * uint(CHOOSE_BLOCKS)) {
        uint n = 0u;
        if (first != own) load_keys(args, task, first, keys);
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++) n += keys[i] >= least ? 1u : 0u;
        scanned place = sum_to_thread(task.at, n);
        uint at = to + place.before;
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++) {
            if (keys[i] < least) continue;
            task.gathered[2u * at] = task.first + first + uint(i);
            task.gathered[2u * at + 1u] = keys[i];
            at++;
        }
        to += place.all;
    }
}

// ---- The choice by one threadgroup ----

// Writes those blocks that are chosen, and -1 behind them.
inline void write_list(constant tqkv__choose_args &args, thread const choose_task &task, choice made)
{
    uint2 before;
    before.x = before.y = 0u;
    for (uint first = 0; first < task.n; first += threads_of(task) * uint(CHOOSE_BLOCKS)) {
        uint keys[CHOOSE_BLOCKS], counts = 0u; // better ones, and equal ones in the upper half
        uint own = first + thread_of(task) * uint(CHOOSE_BLOCKS);
        load_keys(args, task, own, keys);
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++)
            counts += keys[i] > made.bits ? 1u : keys[i] == made.bits && keys[i] != 0u ? 0x10000u : 0u;
        scanned sums = sum_to_thread(task.at, counts);
        uint better = before.x + (sums.before & 0xffffu), equal = before.y + (sums.before >> 16);
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++) {
            bool is_equal = keys[i] == made.bits && keys[i] != 0u;
            uint to = better + min(equal, made.wanted), number = own + uint(i);
            if (keys[i] > made.bits || (is_equal && equal < made.wanted))
                task.list[to] = int(args.step == TQKV__CHOOSE_AMONG ? task.gathered[2u * number] : task.first + number);
            better += keys[i] > made.bits ? 1u : 0u;
            equal += is_equal ? 1u : 0u;
        }
        before.x += sums.all & 0xffffu;
        before.y += sums.all >> 16;
    }
    for (uint i = before.x + min(before.y, made.wanted) + thread_of(task); i < uint(args.k); i += threads_of(task))
        task.list[i] = -1;
}

inline void choose_alone(constant tqkv__choose_args &args, thread const choose_task &task, uint digit, choice made)
{
    for (; digit < uint(CHOOSE_DIGITS); digit++) {
        count_digits(args, task, digit, made);
        made = narrow(task, digit, made);
    }
    write_list(args, task, made);
}

inline void choose_blocks(constant tqkv__choose_args &args, thread choose_task &task)
{
    choice made = {0u, uint(args.k)};
    task.first = uint(args.from) + task.chunk * uint(args.chunk);
    task.n = min(uint(args.chunk), uint(args.n_blocks) - task.first);
    if (args.step == TQKV__CHOOSE_COUNT) return count_chunk(args, task);
    if (args.step == TQKV__CHOOSE_GATHER) return gather_chunk(args, task);
    if (args.step == TQKV__CHOOSE_AMONG) {
        task.n = task.header[0];
        made.bits = task.header[1];
        made.wanted = task.header[2];
    }
    choose_alone(args, task, args.step == TQKV__CHOOSE_AMONG ? 1u : 0u, made);
}

#endif

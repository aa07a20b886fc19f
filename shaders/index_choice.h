// The choice of blocks by their scores: exact, by digits of the scores' bits from the highest on. Each of three passes counts
// the digits of those scores that agree with the k-th best so far; a fourth writes. Where a row is short one threadgroup does
// all four. Else its chunks have a threadgroup each and the passes are dispatches, which hand on their counts in scratch.
#ifndef TQKV_INDEX_CHOICE_H
#define TQKV_INDEX_CHOICE_H
#include "index.h"
#include "scan.h"

#define CHOOSE_PASSES 3

// What the passes know of the k-th best score: its upper bits, and how many with these bits are to be chosen.
struct choice {
    uint bits, wanted;
};

// What a threadgroup works on, and the place of this thread in it.
struct choose_task {
    device const float *scores; // [n_blocks], of the query
    device uint *counts;    // [CHOOSE_PASSES][n_chunks][TQKV__CHOOSE_COUNTS]: of the query. Behind them a choice a pass
    device int *list;       // [k]
    threadgroup uint *bins; // [TQKV__CHOOSE_COUNTS]
    uint chunk, seen;       // seen: blocks up to the last that the query sees some key of
    scan_place at;          // its memory has room for two more numbers
};

inline uint thread_of(thread const choose_task &task) { return task.at.simdgroup * 32u + task.at.lane; }

// Lowest bit of the digit of a pass, and what keeps the bits of the passes before.
inline uint digit_shift(uint pass) { return pass == 0 ? 21u : pass == 1 ? 10u : 0u; }
inline uint digit_mask(uint pass) { return pass == 2 ? 1023u : 2047u; }
inline uint bits_before(uint pass) { return pass == 0 ? 0u : ~0u << digit_shift(pass - 1u); }

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

inline device uint *counts_of(constant tqkv__choose_args &args, thread const choose_task &task, uint pass, uint chunk)
{
    return task.counts + (pass * uint(args.n_chunks) + chunk) * uint(TQKV__CHOOSE_COUNTS);
}

inline device uint *choice_after(constant tqkv__choose_args &args, thread const choose_task &task, uint pass)
{
    return counts_of(args, task, uint(CHOOSE_PASSES), 0u) + pass * 2u;
}

inline uint end_of_chunk(constant tqkv__choose_args &args, uint chunk)
{
    return min((chunk + 1u) * uint(args.chunk), uint(args.n_blocks));
}

// Counts the digits of a pass in the threadgroup's chunk.
inline void count_digits(constant tqkv__choose_args &args, thread const choose_task &task, uint pass, choice made)
{
    threadgroup uint *bins = task.bins;
    threadgroup atomic_uint *counters = (threadgroup atomic_uint *)bins;
    uint n_threads = task.at.n_simdgroups * 32u;
    for (uint i = thread_of(task); i < uint(TQKV__CHOOSE_COUNTS); i += n_threads) bins[i] = 0u;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint b = task.chunk * uint(args.chunk) + thread_of(task); b < end_of_chunk(args, task.chunk); b += n_threads) {
        uint key = key_of_block(args, task, b);
        if (key == 0u || ((key ^ made.bits) & bits_before(pass)) != 0u) continue;
        atomic_fetch_add_explicit(&counters[(key >> digit_shift(pass)) & digit_mask(pass)], 1u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (args.n_chunks == 1) return;
    device uint *to = counts_of(args, task, pass, task.chunk);
    for (uint i = thread_of(task); i < uint(TQKV__CHOOSE_COUNTS); i += n_threads) to[i] = bins[i];
}

// Of all chunks, into the bins.
inline void sum_counts(constant tqkv__choose_args &args, thread const choose_task &task, uint pass)
{
    for (uint i = thread_of(task); i < uint(TQKV__CHOOSE_COUNTS); i += task.at.n_simdgroups * 32u) {
        uint sum = 0u;
        for (uint c = 0; c < uint(args.n_chunks); c++) sum += counts_of(args, task, pass, c)[i];
        task.bins[i] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The bin in which a count from the last one on reaches `wanted`, and the count before it; bin 0 if none does. Each lane adds
// up its share of the bins, then two bins of the share in which it is reached: the first lanes have the last ones.
inline choice find_digit(thread const choose_task &task, uint wanted)
{
    const uint each = uint(TQKV__CHOOSE_COUNTS) / 32u;
    uint lane = task.at.lane, own = 0u, first = (31u - lane) * each;
    for (uint i = 0; i < each; i++) own += task.bins[first + ((i + lane) & (each - 1u))]; // each lane another bank
    uint to_lane = sum_to_lane(own, lane);
    bool reached = to_lane >= wanted && to_lane - own < wanted;
    choice found = {0u, 0u};
    if (!simd_any(reached)) {
        found.wanted = sum_of_lanes(own) - task.bins[0];
        return found;
    }
    uint before = sum_of_lanes(reached ? to_lane - own : 0u), last = sum_of_lanes(reached ? first : 0u) + each - 1u;
    uint upper = task.bins[last - 2u * lane], both = upper + task.bins[last - 2u * lane - 1u];
    to_lane = sum_to_lane(both, lane) + before;
    reached = to_lane >= wanted && to_lane - both < wanted;
    bool in_upper = to_lane - both + upper >= wanted;
    found.bits = sum_of_lanes(reached ? last - 2u * lane - (in_upper ? 0u : 1u) : 0u);
    found.wanted = sum_of_lanes(reached ? to_lane - both + (in_upper ? 0u : upper) : 0u);
    return found;
}

// What the counts of a pass say. Every thread has the result.
inline choice narrow(constant tqkv__choose_args &args, thread const choose_task &task, uint pass, choice made)
{
    if (args.n_chunks > 1) sum_counts(args, task, pass);
    if (task.at.simdgroup == 0) {
        choice found = find_digit(task, made.wanted);
        if (task.at.lane == 0) {
            task.at.shared[32] = found.bits;
            task.at.shared[33] = found.wanted;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    made.bits |= task.at.shared[32] << digit_shift(pass);
    made.wanted -= task.at.shared[33];
    if (args.n_chunks > 1 && task.chunk == 0 && thread_of(task) == 0) {
        device uint *to = choice_after(args, task, pass);
        to[0] = made.bits;
        to[1] = made.wanted;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); // before the bins and `shared` are overwritten
    return made;
}

// How many blocks of the chunks before are better than the k-th best, and how many as good, in the upper half.
inline uint2 before_chunk(constant tqkv__choose_args &args, thread const choose_task &task, choice made)
{
    uint n_threads = task.at.n_simdgroups * 32u, better = 0u, equal = 0u;
    for (uint pass = 0; pass < uint(CHOOSE_PASSES); pass++) {
        uint digit = (made.bits >> digit_shift(pass)) & digit_mask(pass);
        for (uint c = 0; c < task.chunk; c++) {
            device const uint *counts = counts_of(args, task, pass, c);
            for (uint i = digit + thread_of(task); i <= digit_mask(pass); i += n_threads) {
                if (i > digit) better += counts[i];
                if (i == digit && pass + 1u == uint(CHOOSE_PASSES)) equal += counts[i];
            }
        }
    }
    uint2 result;
    result.x = sum_to_thread(task.at, better).all;
    result.y = sum_to_thread(task.at, equal).all;
    return result;
}

// Blocks that a thread writes at a time.
#define CHOOSE_BLOCKS 4

// Writes the chosen blocks of the chunk where those before end. Behind the last chunk's, -1.
inline void write_list(constant tqkv__choose_args &args, thread const choose_task &task, choice made)
{
    uint n_threads = task.at.n_simdgroups * 32u, end = end_of_chunk(args, task.chunk);
    uint2 before;
    before.x = before.y = 0u;
    if (args.n_chunks > 1) before = before_chunk(args, task, made);
    for (uint first = task.chunk * uint(args.chunk); first < end; first += n_threads * uint(CHOOSE_BLOCKS)) {
        uint keys[CHOOSE_BLOCKS], counts = 0u; // better ones, and equal ones in the upper half
        uint block = first + thread_of(task) * uint(CHOOSE_BLOCKS);
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++) {
            keys[i] = block + uint(i) < end ? key_of_block(args, task, block + uint(i)) : 0u;
            counts += keys[i] > made.bits ? 1u : keys[i] == made.bits && keys[i] != 0u ? 0x10000u : 0u;
        }
        scanned sums = sum_to_thread(task.at, counts);
        uint better = before.x + (sums.before & 0xffffu), equal = before.y + (sums.before >> 16);
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++) {
            bool is_equal = keys[i] == made.bits && keys[i] != 0u;
            uint to = better + min(equal, made.wanted);
            if (keys[i] > made.bits || (is_equal && equal < made.wanted)) task.list[to] = int(block) + i;
            better += keys[i] > made.bits ? 1u : 0u;
            equal += is_equal ? 1u : 0u;
        }
        before.x += sums.all & 0xffffu;
        before.y += sums.all >> 16;
    }
    if (task.chunk + 1u < uint(args.n_chunks)) return;
    for (uint i = before.x + min(before.y, made.wanted) + thread_of(task); i < uint(args.k); i += n_threads)
        task.list[i] = -1;
}

inline void choose_blocks(constant tqkv__choose_args &args, thread const choose_task &task)
{
    choice made = {0u, uint(args.k)};
    if (args.first_pass > 1) {
        device const uint *from = choice_after(args, task, uint(args.first_pass) - 2u);
        made.bits = from[0];
        made.wanted = from[1];
    }
    for (uint pass = uint(args.first_pass); pass <= uint(args.last_pass); pass++) {
        if (pass > 0u) made = narrow(args, task, pass - 1u, made);
        if (pass < uint(CHOOSE_PASSES)) count_digits(args, task, pass, made);
    }
    if (args.last_pass == CHOOSE_PASSES) write_list(args, task, made);
}

#endif

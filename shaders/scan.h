// Sums and maxima over the threads up to one, in a fixed order.
#ifndef TQKV_SCAN_H
#define TQKV_SCAN_H
#include "common.h"

// The sum over this lane and those before it.
inline uint sum_to_lane(uint x, uint lane)
{
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2) {
        uint other = simd_shuffle(x, ushort(lane >= distance ? lane - distance : lane));
        x += lane >= distance ? other : 0u;
    }
    return x;
}

inline uint max_to_lane(uint x, uint lane)
{
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2)
        x = max(x, simd_shuffle(x, ushort(lane >= distance ? lane - distance : lane)));
    return x;
}

inline uint sum_of_lanes(uint x)
{
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2) x += simd_shuffle_xor(x, ushort(distance));
    return x;
}

// A thread among those of its threadgroup, and memory for a number of each simdgroup.
struct scan_place {
    uint lane, simdgroup, n_simdgroups;
    threadgroup uint *shared; // [32]
};

// Over all threads before this one, and over all.
struct scanned {
    uint before, all;
};

inline scanned sum_to_thread(thread const scan_place &at, uint x)
{
    scanned result = {0u, 0u};
    uint to_lane = sum_to_lane(x, at.lane);
    if (at.lane == 31u) at.shared[at.simdgroup] = to_lane;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint s = 0; s < at.n_simdgroups; s++) {
        uint sum = at.shared[s];
        result.before += s < at.simdgroup ? sum : 0u;
        result.all += sum;
    }
    result.before += to_lane - x;
    threadgroup_barrier(mem_flags::mem_threadgroup); // before others are stored
    return result;
}

// The largest; 0 before the first.
inline scanned max_to_thread(thread const scan_place &at, uint x)
{
    scanned result = {0u, 0u};
    uint to_lane = max_to_lane(x, at.lane);
    uint before_lane = simd_shuffle(to_lane, ushort(at.lane > 0u ? at.lane - 1u : 0u));
    if (at.lane == 31u) at.shared[at.simdgroup] = to_lane;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint s = 0; s < at.n_simdgroups; s++) {
        uint largest = at.shared[s];
        result.before = s < at.simdgroup ? max(result.before, largest) : result.before;
        result.all = max(result.all, largest);
    }
    result.before = at.lane > 0u ? max(result.before, before_lane) : result.before;
    threadgroup_barrier(mem_flags::mem_threadgroup); // likewise
    return result;
}

#endif

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
    uint sum = at.lane < at.n_simdgroups ? at.shared[at.lane] : 0u, to_simdgroup = sum_to_lane(sum, at.lane);
    result.all = simd_shuffle(to_simdgroup, ushort(31));
    result.before = simd_shuffle(to_simdgroup - sum, ushort(at.simdgroup)) + to_lane - x;
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
    uint to_simdgroup = max_to_lane(at.lane < at.n_simdgroups ? at.shared[at.lane] : 0u, at.lane);
    uint before = simd_shuffle(to_simdgroup, ushort(at.simdgroup > 0u ? at.simdgroup - 1u : 0u));
    result.all = simd_shuffle(to_simdgroup, ushort(31));
    result.before = at.simdgroup > 0u ? before : 0u;
    result.before = at.lane > 0u ? max(result.before, before_lane) : result.before;
    threadgroup_barrier(mem_flags::mem_threadgroup); // likewise
    return result;
}

#endif

// The end of attention for one query row: the splits' sums brought to one maximum and added, the sink, the division,
// and the way back from the rotated basis. One threadgroup a row: its simdgroups share out the splits.
#ifndef TQKV_MERGE_H
#define TQKV_MERGE_H
#include "rotate.h"
#include "softmax.h"

// The largest score of all splits and the sink. A split a lane: one after the other they would each wait for memory.
inline float merged_maximum(constant tqkv__merge_args &args, device const float *partial_state, uint row, float sink,
                            uint lane)
{
    float most = sink;
    for (uint s = lane; s < uint(args.n_splits); s += 32u)
        most = max(most, partial_state[(row_offset(s, uint(args.n_rows)) + row) * 2u]);
    return simd_max(most);
}

// Rows of that many splits are on their way at a time. More save no time, and their code takes longer to fetch.
#define MERGE_BATCH(D) ((D) <= 512 ? 4 : 2)

// Rows of every n_simdgroups-th split from `first` on; beyond the last split, its row again.
template <int D>
inline void load_splits(constant tqkv__merge_args &args, device const float *partial_out, uint row, uint first,
                        uint lane, uint n_simdgroups, thread float (&part)[MERGE_BATCH(D)][TQKV_LANE_VALUES(D)])
{
    TQKV_UNROLL
    for (int i = 0; i < MERGE_BATCH(D); i++) {
        uint split = min(first + uint(i) * n_simdgroups, uint(args.n_splits) - 1u);
        load_row<D>(partial_out + (row_offset(split, uint(args.n_rows)) + row) * ulong(D), lane, part[i]);
    }
}

// x and sum: the splits loaded, each by its share of the whole.
template <int D>
inline void add_splits(constant tqkv__merge_args &args, device const float *partial_state, uint row, uint first,
                       float most, uint n_simdgroups, thread const float (&part)[MERGE_BATCH(D)][TQKV_LANE_VALUES(D)],
                       thread float *x, thread float &sum)
{
    TQKV_UNROLL
    for (int i = 0; i < MERGE_BATCH(D); i++) {
        uint split = first + uint(i) * n_simdgroups;
        if (split >= uint(args.n_splits)) continue;
        ulong at = (row_offset(split, uint(args.n_rows)) + row) * 2u;
        float share = share_of(partial_state[at], most);
        if (share == 0.0f) continue;
        sum = fma(share, partial_state[at + 1u], sum);
        TQKV_UNROLL
        for (int e = 0; e < TQKV_LANE_VALUES(D); e++) x[e] = fma(share, part[i][e], x[e]);
    }
}

// sink: in powers of two, -INFINITY for none. It joins the denominator alone. shared: [n_simdgroups][D + 4], the sums and
// their weight.
template <int D>
inline void merge_row(constant tqkv__merge_args &args, device const float *partial_out,
                      device const float *partial_state, uint row, float sink, bool unrotate, uint lane, uint simdgroup,
                      uint n_simdgroups, threadgroup float *shared, device float *out)
{
    const int E = TQKV_LANE_VALUES(D), B = MERGE_BATCH(D);
    float part[B][E], x[E], sum = 0.0f;
    load_splits<D>(args, partial_out, row, simdgroup, lane, n_simdgroups, part);
    uint signs = unrotate ? lane_signs<D, 32, E>(lane) : 0u;
    float most = merged_maximum(args, partial_state, row, sink, lane);
    TQKV_UNROLL
    for (int i = 0; i < E; i++) x[i] = 0.0f;
    for (uint first = simdgroup; first < uint(args.n_splits); first += uint(B) * n_simdgroups) {
        if (first != simdgroup) load_splits<D>(args, partial_out, row, first, lane, n_simdgroups, part);
        add_splits<D>(args, partial_state, row, first, most, n_simdgroups, part, x, sum);
    }
    threadgroup float *own = shared + simdgroup * uint(D + 4);
    TQKV_UNROLL
    for (int i = 0; i < E; i++) own[int(lane) * E + i] = x[i];
    if (lane == 0) own[D] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup != 0) return;
    sum += share_of(sink, most);
    for (uint s = 1; s < n_simdgroups; s++) {
        threadgroup const float *other = shared + s * uint(D + 4);
        sum += other[D];
        TQKV_UNROLL
        for (int i = 0; i < E; i++) x[i] += other[int(lane) * E + i];
    }
    TQKV_UNROLL
    for (int i = 0; i < E; i++) x[i] = sum == 0.0f ? 0.0f : x[i] / sum;
    if (unrotate) unrotate_values<D, 32, E>(x, lane, signs);
    store_row_values<D>(x, lane, out + row_offset(row, D));
}

#endif

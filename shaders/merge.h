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

// x and sum: every n_simdgroups-th split, four at a time so that their loads overlap.
template <int D>
inline void add_splits(constant tqkv__merge_args &args, device const float *partial_out,
                       device const float *partial_state, uint row, float most, uint lane, uint simdgroup,
                       uint n_simdgroups, thread float *x, thread float &sum)
{
    const int E = TQKV_LANE_VALUES(D);
    for (uint first = simdgroup; first < uint(args.n_splits); first += 4u * n_simdgroups) {
        float part[4][E], state[4][2];
        TQKV_UNROLL
        for (int i = 0; i < 4; i++) {
            uint split = min(first + uint(i) * n_simdgroups, uint(args.n_splits) - 1u);
            ulong at = row_offset(split, uint(args.n_rows)) + row;
            state[i][0] = partial_state[at * 2u];
            state[i][1] = partial_state[at * 2u + 1u];
            load_row<D>(partial_out + at * ulong(D), lane, part[i]);
        }
        TQKV_UNROLL
        for (int i = 0; i < 4; i++) {
            float share = share_of(state[i][0], most);
            if (first + uint(i) * n_simdgroups >= uint(args.n_splits) || share == 0.0f) continue;
            sum = fma(share, state[i][1], sum);
            TQKV_UNROLL
            for (int e = 0; e < E; e++) x[e] = fma(share, part[i][e], x[e]);
        }
    }
}

// sink: in powers of two, -INFINITY for none. It joins the denominator alone. shared: [n_simdgroups][D + 4], the sums and their weight.
template <int D>
inline void merge_row(constant tqkv__merge_args &args, device const float *partial_out,
                      device const float *partial_state, uint row, float sink, bool unrotate, uint lane, uint simdgroup,
                      uint n_simdgroups, threadgroup float *shared, device float *out)
{
    const int E = TQKV_LANE_VALUES(D);
    float most = merged_maximum(args, partial_state, row, sink, lane), x[E], sum = 0.0f;
    TQKV_UNROLL
    for (int i = 0; i < E; i++) x[i] = 0.0f;
    add_splits<D>(args, partial_out, partial_state, row, most, lane, simdgroup, n_simdgroups, x, sum);
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
    if (unrotate) unrotate_row<D>(x, lane);
    store_row_values<D>(x, lane, out + row_offset(row, D));
}

#endif

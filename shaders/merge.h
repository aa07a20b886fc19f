// The end of attention for one query row: brings the sums of the splits to one maximum, adds them and the sink,
// divides, and turns the result back from the rotated basis. One threadgroup a row: its simdgroups share the splits.
#ifndef TQKV_MERGE_H
#define TQKV_MERGE_H
#include "rotate.h"
#include "softmax.h"

// What a threadgroup works on, and the place of this thread in it.
struct merge_task {
    device const float *partial_out;   // [n_splits][n_rows][D]
    device const float *partial_state; // [n_splits][n_rows][2]: maximum (in powers of two), sum of the weights
    device float *out;                 // [n_rows][D]
    threadgroup float *shared;         // [n_simdgroups][D + 4]: an output, then the sum of its weights
    uint row;
    float sink; // in powers of two; -INFINITY: none. It is added to the denominator only
    bool unrotate;
    uint lane, simdgroup, n_simdgroups;
};

// The task's row of a split, in rows of partial_out and partial_state.
inline ulong row_of_split(constant tqkv__merge_args &args, thread const merge_task &task, uint split)
{
    return row_offset(split, uint(args.n_rows)) + task.row;
}

// The largest score of all splits and the sink. Each lane takes other splits, so their loads overlap.
inline float merged_maximum(constant tqkv__merge_args &args, thread const merge_task &task)
{
    float largest = task.sink;
    for (uint s = task.lane; s < uint(args.n_splits); s += 32u)
        largest = max(largest, task.partial_state[row_of_split(args, task, s) * 2u]);
    return simd_max(largest);
}

// Splits that a simdgroup loads at a time. More save no time, and their code takes longer to fetch.
#define MERGE_BATCH(D) ((D) <= 512 ? 4 : 2)

// Outputs of every n_simdgroups-th split from `first` on. A split beyond the last one repeats the last one.
template <int D>
inline void load_splits(constant tqkv__merge_args &args, thread const merge_task &task, uint first,
                        thread float (&part)[MERGE_BATCH(D)][TQKV_LANE_VALUES(D)])
{
    TQKV_UNROLL
    for (int i = 0; i < MERGE_BATCH(D); i++) {
        uint split = min(first + uint(i) * task.n_simdgroups, uint(args.n_splits) - 1u);
        load_row<D>(task.partial_out + row_of_split(args, task, split) * ulong(D), task.lane, part[i]);
    }
}

// Adds the loaded splits to x and sum, each scaled to the largest maximum.
template <int D>
inline void add_splits(constant tqkv__merge_args &args, thread const merge_task &task, uint first, float largest,
                       thread const float (&part)[MERGE_BATCH(D)][TQKV_LANE_VALUES(D)], thread float *x,
                       thread float &sum)
{
    TQKV_UNROLL
    for (int i = 0; i < MERGE_BATCH(D); i++) {
        uint split = first + uint(i) * task.n_simdgroups;
        if (split >= uint(args.n_splits)) continue;
        ulong at = row_of_split(args, task, split) * 2u;
        float share = share_of(task.partial_state[at], largest);
        if (share == 0.0f) continue;
        sum = fma(share, task.partial_state[at + 1u], sum);
        TQKV_UNROLL
        for (int e = 0; e < TQKV_LANE_VALUES(D); e++) x[e] = fma(share, part[i][e], x[e]);
    }
}

template <int D>
inline void merge_row(constant tqkv__merge_args &args, thread const merge_task &task)
{
    const int E = TQKV_LANE_VALUES(D), B = MERGE_BATCH(D);
    uint lane = task.lane, n_simdgroups = task.n_simdgroups;
    float part[B][E], x[E], sum = 0.0f;
    load_splits<D>(args, task, task.simdgroup, part);
    uint signs = task.unrotate ? lane_signs<D, 32, E>(lane) : 0u;
    float largest = merged_maximum(args, task);
    TQKV_UNROLL
    for (int i = 0; i < E; i++) x[i] = 0.0f;
    for (uint first = task.simdgroup; first < uint(args.n_splits); first += uint(B) * n_simdgroups) {
        if (first != task.simdgroup) load_splits<D>(args, task, first, part);
        add_splits<D>(args, task, first, largest, part, x, sum);
    }
    threadgroup float *own = task.shared + task.simdgroup * uint(D + 4);
    TQKV_UNROLL
    for (int i = 0; i < E; i++) own[int(lane) * E + i] = x[i];
    if (lane == 0) own[D] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (task.simdgroup != 0) return;
    sum += share_of(task.sink, largest);
    for (uint s = 1; s < n_simdgroups; s++) {
        threadgroup const float *other = task.shared + s * uint(D + 4);
        sum += other[D];
        TQKV_UNROLL
        for (int i = 0; i < E; i++) x[i] += other[int(lane) * E + i];
    }
    TQKV_UNROLL
    for (int i = 0; i < E; i++) x[i] = sum == 0.0f ? 0.0f : x[i] / sum;
    if (task.unrotate) unrotate_values<D, 32, E>(x, lane, signs);
    store_row<D>(x, lane, task.out + row_offset(task.row, D));
}

#endif

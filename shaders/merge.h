// The end of attention for one query row: the splits' sums brought to one maximum and added, the sink, the division,
// and the way back from the rotated basis. One simdgroup a row.
#ifndef TQKV_MERGE_H
#define TQKV_MERGE_H
#include "rotate.h"
#include "softmax.h"

// sink: -INFINITY for none. It joins the denominator alone.
template <int D>
inline void merge_row(constant tqkv__merge_args &args, device const float *partial_out,
                      device const float *partial_state, uint row, float sink, bool unrotate, uint lane,
                      device float *out)
{
    float most = sink;
    for (uint s = 0; s < uint(args.n_splits); s++)
        most = max(most, partial_state[row_offset(s, uint(args.n_rows)) * 2u + row * 2u]);
    float x[TQKV_LANE_VALUES(D)], sum = share_of(sink, most);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = 0.0f;
    for (uint s = 0; s < uint(args.n_splits); s++) {
        ulong at = row_offset(s, uint(args.n_rows)) + row;
        float share = share_of(partial_state[at * 2u], most);
        if (share == 0.0f) continue;
        sum = fma(share, partial_state[at * 2u + 1u], sum);
        float part[TQKV_LANE_VALUES(D)];
        load_row<D>(partial_out + at * ulong(D), lane, part);
        TQKV_UNROLL
        for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = fma(share, part[i], x[i]);
    }
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = sum == 0.0f ? 0.0f : x[i] / sum;
    if (unrotate) unrotate_row<D>(x, lane);
    store_row_values<D>(x, lane, out + row_offset(row, D));
}

#endif

// rotate: rows of queries or outputs in place, into the rotated basis or back. One simdgroup a row.
#include "rotate.h"

constant bool unrotate [[function_constant(TQKV_FC_UNROTATE)]];

template <int D>
inline void turn_row(device float *at, uint lane)
{
    float x[TQKV_LANE_VALUES(D)];
    load_row<D>(at, lane, x);
    if (unrotate)
        unrotate_row<D>(x, lane);
    else
        rotate_row<D>(x, lane);
    store_row_values<D>(x, lane, at);
}

// rows: [n_rows][D]
// clang-format off
#define ROTATE(D) \
    kernel void tqkv_rotate_d##D( \
        constant tqkv__rotate_args &args [[buffer(0)]], \
        device float *rows [[buffer(1)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        uint row = group.x * n_simdgroups + simdgroup; \
        if (row < uint(args.n_rows)) turn_row<D>(rows + row_offset(row, D), lane); \
    }
// clang-format on

ROTATE(32)
ROTATE(64)
ROTATE(128)
ROTATE(256)
ROTATE(512)
ROTATE(1024)

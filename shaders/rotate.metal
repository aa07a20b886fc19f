// rotate: turns rows of queries or outputs into the rotated basis or back, in place. One simdgroup a row.
#include "rotate.h"

constant bool unrotate [[function_constant(TQKV_FC_UNROTATE)]];

template <int D>
inline void rotate_in_place(device float *row, uint lane)
{
    float x[TQKV_LANE_VALUES(D)];
    load_row<D>(row, lane, x);
    if (unrotate)
        unrotate_row<D>(x, lane);
    else
        rotate_row<D>(x, lane);
    store_row<D>(x, lane, row);
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
        if (row < uint(args.n_rows)) rotate_in_place<D>(rows + row_offset(row, D), lane); \
    }
// clang-format on

ROTATE(32)
ROTATE(64)
ROTATE(128)
ROTATE(256)
ROTATE(512)
ROTATE(1024)

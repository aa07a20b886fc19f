// rotate: turns rows of queries or outputs into the rotated basis or back, in place. TQKV_ROWS(D) rows a simdgroup.
#include "rotate.h"

constant bool unrotate [[function_constant(TQKV_FC_UNROTATE)]];

template <int D>
inline void rotate_in_place(constant tqkv__rotate_args &args, device uchar *rows, uint first_row, uint lane)
{
    float x[TQKV_LANE_VALUES(D)];
    uint n_rows = uint(args.n_rows), own = first_row + lane / uint(TQKV__ROW_LANES(D)), part = lane_of_row<D>(lane);
    if (first_row >= n_rows) return;
    ulong first = row_offset(own, D);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = 0.0f;
    if (own < n_rows) load_typed_row<D>(TQKV_TYPE_F32, rows, first, part, x);
    if (unrotate)
        unrotate_row<D>(x, part, signs_of_row<D>(part));
    else
        rotate_row<D>(x, part);
    if (own < n_rows) store_typed_row<D>(TQKV_TYPE_F32, x, part, rows, first);
}

// rows: [n_rows][D]
// clang-format off
#define ROTATE(D) \
    kernel void tqkv_rotate_d##D( \
        constant tqkv__rotate_args &args [[buffer(0)]], \
        device uchar *rows [[buffer(1)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        rotate_in_place<D>(args, rows, (group.x * n_simdgroups + simdgroup) * uint(TQKV_ROWS(D)), lane); \
    }
// clang-format on

ROTATE(32)
ROTATE(48)
ROTATE(64)
ROTATE(80)
ROTATE(96)
ROTATE(128)
ROTATE(192)
ROTATE(256)
ROTATE(448)
ROTATE(512)
ROTATE(1024)

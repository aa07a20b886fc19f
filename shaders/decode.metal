// decode: a range of positions to rows, in the stored basis or in the original one. TQKV_ROWS(D) rows a simdgroup.
#include "decode.h"

constant uint stream_format [[function_constant(TQKV_FC_FORMAT)]];
constant bool unrotate [[function_constant(TQKV_FC_UNROTATE)]];
constant bool centered [[function_constant(TQKV_FC_CENTER)]];
constant bool with_scale [[function_constant(TQKV_FC_SCALED)]];
constant bool center_scaled [[function_constant(TQKV_FC_CENTER_SCALED)]];
constant bool rotate_center [[function_constant(TQKV_FC_ROTATED)]];
constant uint row_type [[function_constant(TQKV_FC_TYPE)]];
constant bool paged [[function_constant(TQKV_FC_PAGES)]];

// clang-format off
#define DECODE(D) \
    kernel void tqkv_decode_d##D( \
        constant tqkv__rows_args &args [[buffer(0)]], \
        device const uchar *codes [[buffer(1)]], \
        device const float *norms [[buffer(2)]], \
        device uchar *out [[buffer(3)]], \
        device const float *center [[buffer(4)]], \
        device const int *pages [[buffer(5)]], \
        device const float *scale [[buffer(6)]], \
        threadgroup float *table [[threadgroup(0)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint thread_index [[thread_index_in_threadgroup]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        load_codebook(stream_format, table, thread_index, n_simdgroups * 32u); \
        threadgroup_barrier(mem_flags::mem_threadgroup); \
        decode_task task = {stream_format, row_type, unrotate, with_scale, centered, rotate_center, center_scaled, codes, norms, \
                            out, center, scale, paged, pages, open_codebook(stream_format, table, lane)}; \
        decode_rows<D>(args, task, (group.x * n_simdgroups + simdgroup) * uint(TQKV_ROWS(D)), lane); \
    }
// clang-format on

DECODE(32)
DECODE(48)
DECODE(64)
DECODE(80)
DECODE(96)
DECODE(128)
DECODE(192)
DECODE(256)
DECODE(448)
DECODE(512)
DECODE(1024)

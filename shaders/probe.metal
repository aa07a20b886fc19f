// probe: the rotated and scaled values that encode compares with the codebook. Threadgroups along x,
// TQKV__ENCODE_ROWS(D) rows a simdgroup.
#include "encode.h"

constant uint stream_format [[function_constant(TQKV_FC_FORMAT)]];
constant bool rotated [[function_constant(TQKV_FC_ROTATED)]];
constant bool centered [[function_constant(TQKV_FC_CENTER)]];
constant bool with_scale [[function_constant(TQKV_FC_SCALED)]];
constant uint row_type [[function_constant(TQKV_FC_TYPE)]];

// clang-format off
#define PROBE(D) \
    kernel void tqkv_probe_d##D( \
        constant tqkv__rows_args &args [[buffer(0)]], \
        device const uchar *rows [[buffer(1)]], \
        device float *scaled [[buffer(2)]], \
        device atomic_uint *not_finite [[buffer(3)]], \
        device const float *center [[buffer(4)]], \
        device const float *scale [[buffer(5)]], \
        threadgroup float *space [[threadgroup(0)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        encode_source source = {stream_format, row_type, rotated, centered, with_scale, args.has_flag != 0, rows, center, \
                                scale, space_of_simdgroup<D>(space, simdgroup), not_finite}; \
        probe_rows<D>(args, source, group.x * n_simdgroups + simdgroup, lane, scaled); \
    }
// clang-format on

PROBE(32)
PROBE(48)
PROBE(64)
PROBE(80)
PROBE(96)
PROBE(128)
PROBE(192)
PROBE(256)
PROBE(448)
PROBE(512)
PROBE(1024)

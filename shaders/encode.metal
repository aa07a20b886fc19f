// encode: rows of one stream into its store. Threadgroups along x, TQKV__ENCODE_ROWS(D) rows a simdgroup.
#include "encode.h"

constant uint stream_format [[function_constant(TQKV_FC_FORMAT)]];
constant bool rotated [[function_constant(TQKV_FC_ROTATED)]];
constant bool centered [[function_constant(TQKV_FC_CENTER)]];
constant bool with_scale [[function_constant(TQKV_FC_SCALED)]];
constant uint row_type [[function_constant(TQKV_FC_TYPE)]];
constant bool paged [[function_constant(TQKV_FC_PAGES)]];

// clang-format off
#define ENCODE(D) \
    kernel void tqkv_encode_d##D( \
        constant tqkv__rows_args &args [[buffer(0)]], \
        device const uchar *rows [[buffer(1)]], \
        device uchar *codes [[buffer(2)]], \
        device float *norms [[buffer(3)]], \
        device atomic_uint *not_finite [[buffer(4)]], \
        device const float *center [[buffer(5)]], \
        device const int *pages [[buffer(6)]], \
        device const float *scale [[buffer(7)]], \
        threadgroup uint2 *cells [[threadgroup(0)]], \
        threadgroup float *space [[threadgroup(1)]], \
        threadgroup float *centroids [[threadgroup(2)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint thread_index [[thread_index_in_threadgroup]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        load_cells(stream_format, cells, thread_index, n_simdgroups * 32u); \
        load_codebook(stream_format, centroids, thread_index, n_simdgroups * 32u); \
        load_crossings<D>(stream_format, cells, thread_index, n_simdgroups * 32u); \
        threadgroup_barrier(mem_flags::mem_threadgroup); \
        encode_source source = {stream_format, row_type, rotated, centered, with_scale, args.has_flag != 0, rows, center, \
                                scale, space_of_simdgroup<D>(space, simdgroup), not_finite}; \
        encode_target target = {codes, norms, open_encoder<D>(stream_format, cells, centroids, lane), paged, pages}; \
        encode_rows<D>(args, source, target, group.x * n_simdgroups + simdgroup, lane); \
    }
// clang-format on

ENCODE(32)
ENCODE(48)
ENCODE(64)
ENCODE(80)
ENCODE(96)
ENCODE(128)
ENCODE(192)
ENCODE(256)
ENCODE(448)
ENCODE(512)
ENCODE(1024)

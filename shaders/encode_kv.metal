// encode_kv: keys and values, or keys and their tail, of the same tokens in one dispatch, each with its own format and
// type. Threadgroups along x for the rows as in encode; z = 0 for keys and 1 for values.
#include "encode.h"

constant uint key_format [[function_constant(TQKV_FC_FORMAT)]];
constant uint value_format [[function_constant(TQKV_FC_VALUE_FORMAT)]];
constant bool key_rotated [[function_constant(TQKV_FC_ROTATED)]];
constant bool value_rotated [[function_constant(TQKV_FC_VALUE_ROTATED)]];
constant bool key_centered [[function_constant(TQKV_FC_CENTER)]];
constant bool value_centered [[function_constant(TQKV_FC_VALUE_CENTER)]];
constant bool key_scaled [[function_constant(TQKV_FC_SCALED)]];
constant bool value_scaled [[function_constant(TQKV_FC_VALUE_SCALED)]];
constant uint row_type [[function_constant(TQKV_FC_TYPE)]];
constant uint value_type [[function_constant(TQKV_FC_VALUE_TYPE)]];
constant bool paged [[function_constant(TQKV_FC_PAGES)]];
constant bool value_paged [[function_constant(TQKV_FC_VALUE_PAGES)]];

// keys: [n_tokens][n_kv_heads][D], values: [n_tokens][n_kv_heads][V]. NAME: D, or D_V where V differs
// clang-format off
#define ENCODE_KV(NAME, D, V) \
    kernel void tqkv_encode_kv_d##NAME( \
        constant tqkv__rows_args &key_args [[buffer(0)]], \
        device const uchar *keys [[buffer(1)]], \
        device uchar *key_codes [[buffer(2)]], \
        device float *key_norms [[buffer(3)]], \
        constant tqkv__rows_args &value_args [[buffer(4)]], \
        device const uchar *values [[buffer(5)]], \
        device uchar *value_codes [[buffer(6)]], \
        device float *value_norms [[buffer(7)]], \
        device atomic_uint *not_finite [[buffer(8)]], \
        device const float *key_center [[buffer(9)]], \
        device const float *value_center [[buffer(10)]], \
        device const int *key_pages [[buffer(11)]], \
        device const int *value_pages [[buffer(12)]], \
        device const float *key_scale [[buffer(13)]], \
        device const float *value_scale [[buffer(14)]], \
        threadgroup uint2 *cells [[threadgroup(0)]], \
        threadgroup float *space [[threadgroup(1)]], \
        threadgroup float *centroids [[threadgroup(2)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint thread_index [[thread_index_in_threadgroup]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        uint number = group.x * n_simdgroups + simdgroup; \
        load_cells(group.z == 0 ? key_format : value_format, cells, thread_index, n_simdgroups * 32u); \
        load_codebook(group.z == 0 ? key_format : value_format, centroids, thread_index, n_simdgroups * 32u); \
        if (group.z == 0) load_crossings<D>(key_format, cells, thread_index, n_simdgroups * 32u); \
        else load_crossings<V>(value_format, cells, thread_index, n_simdgroups * 32u); \
        threadgroup_barrier(mem_flags::mem_threadgroup); \
        if (group.z == 0) { \
            encode_source source = {key_format, row_type, key_rotated, key_centered, key_scaled, key_args.has_flag != 0, keys, \
                                    key_center, key_scale, space_of_simdgroup<D>(space, simdgroup), not_finite}; \
            encode_target target = {key_codes, key_norms, open_encoder<D>(key_format, cells, centroids, lane), paged, key_pages}; \
            encode_rows<D>(key_args, source, target, number, lane); \
        } else { \
            encode_source source = {value_format, value_type, value_rotated, value_centered, value_scaled, value_args.has_flag != 0, \
                                    values, value_center, value_scale, space_of_simdgroup<V>(space, simdgroup), not_finite}; \
            encode_target target = {value_codes, value_norms, open_encoder<V>(value_format, cells, centroids, lane), value_paged, value_pages}; \
            encode_rows<V>(value_args, source, target, number, lane); \
        } \
    }
// clang-format on

ENCODE_KV(32, 32, 32)
ENCODE_KV(48, 48, 48)
ENCODE_KV(64, 64, 64)
ENCODE_KV(80, 80, 80)
ENCODE_KV(96, 96, 96)
ENCODE_KV(128, 128, 128)
ENCODE_KV(192, 192, 192)
ENCODE_KV(256, 256, 256)
ENCODE_KV(448, 448, 448)
ENCODE_KV(512, 512, 512)
ENCODE_KV(1024, 1024, 1024)
ENCODE_KV(192_128, 192, 128)
ENCODE_KV(448_64, 448, 64)
ENCODE_KV(512_64, 512, 64)

// encode_kv: keys and values of the same tokens in one dispatch, each with its own format. Threadgroups along x for the
// rows as in encode; z = 0 for keys and 1 for values.
#include "encode.h"

constant uint key_format [[function_constant(TQKV_FC_FORMAT)]];
constant uint value_format [[function_constant(TQKV_FC_VALUE_FORMAT)]];
constant bool key_rotated [[function_constant(TQKV_FC_ROTATED)]];
constant bool value_rotated [[function_constant(TQKV_FC_VALUE_ROTATED)]];
constant bool key_centered [[function_constant(TQKV_FC_CENTER)]];
constant bool value_centered [[function_constant(TQKV_FC_VALUE_CENTER)]];

// keys, values: [n_tokens][n_kv_heads][D]
// clang-format off
#define ENCODE_KV(D) \
    kernel void tqkv_encode_kv_d##D( \
        constant tqkv__rows_args &key_args [[buffer(0)]], \
        device const float *keys [[buffer(1)]], \
        device uchar *key_codes [[buffer(2)]], \
        device float *key_norms [[buffer(3)]], \
        constant tqkv__rows_args &value_args [[buffer(4)]], \
        device const float *values [[buffer(5)]], \
        device uchar *value_codes [[buffer(6)]], \
        device float *value_norms [[buffer(7)]], \
        device atomic_uint *not_finite [[buffer(8)]], \
        device const float *key_center [[buffer(9)]], \
        device const float *value_center [[buffer(10)]], \
        threadgroup uint2 *cells [[threadgroup(0)]], \
        threadgroup float *signs [[threadgroup(1)]], \
        threadgroup float *squares [[threadgroup(2)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint thread_index [[thread_index_in_threadgroup]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        uint row = (group.x * n_simdgroups + simdgroup) * uint(TQKV__ENCODE_ROWS(D)); \
        load_cells(group.z == 0 ? key_format : value_format, cells, thread_index, n_simdgroups * 32u); \
        load_squares(group.z == 0 ? key_format : value_format, squares, thread_index, n_simdgroups * 32u); \
        load_signs<D>(signs, thread_index, n_simdgroups * 32u); \
        threadgroup_barrier(mem_flags::mem_threadgroup); \
        if (group.z == 0) { \
            encode_source source = {key_format, key_rotated, key_centered, keys, key_center, signs, not_finite}; \
            encode_target target = {key_codes, key_norms, cells, squares}; \
            encode_rows<D>(key_args, source, target, row, lane); \
        } else { \
            encode_source source = {value_format, value_rotated, value_centered, values, value_center, signs, \
                                    not_finite}; \
            encode_target target = {value_codes, value_norms, cells, squares}; \
            encode_rows<D>(value_args, source, target, row, lane); \
        } \
    }
// clang-format on

ENCODE_KV(32)
ENCODE_KV(64)
ENCODE_KV(128)
ENCODE_KV(256)
ENCODE_KV(512)
ENCODE_KV(1024)

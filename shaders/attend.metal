// attend: partial attention of each split of the context; attend_merge makes the result of them. Threadgroups: x KV
// heads, y blocks of query rows, z splits.
#include "attend.h"

// q: [n_queries][n_heads][D]; codes: [n_kv_heads][capacity][row_bytes]; norms: [n_kv_heads][capacity][norms]
// clang-format off
#define ATTEND(D) \
    kernel void tqkv_attend_d##D( \
        constant tqkv__attend_args &args [[buffer(0)]], \
        device const float *q [[buffer(1)]], \
        device const uchar *key_codes [[buffer(2)]], \
        device const float *key_norms [[buffer(3)]], \
        device const uchar *value_codes [[buffer(4)]], \
        device const float *value_norms [[buffer(5)]], \
        device float *partial_out [[buffer(6)]], \
        device float *partial_state [[buffer(7)]], \
        threadgroup float *tables [[threadgroup(0)]], \
        threadgroup float *queries [[threadgroup(1)]], \
        threadgroup float *weights [[threadgroup(2)]], \
        threadgroup float *state [[threadgroup(3)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        stream_rows keys = open_stream<D>(key_format, key_codes, key_norms, args.key_capacity, group.x); \
        stream_rows values = open_stream<D>(value_format, value_codes, value_norms, args.value_capacity, group.x); \
        if (main_bits(key_format) == 4) \
            attend_with_keys<D, 4>(args, q, keys, values, partial_out, partial_state, tables, queries, weights, state, \
                                   group, lane, simdgroup, n_simdgroups); \
        if (main_bits(key_format) == 8) \
            attend_with_keys<D, 8>(args, q, keys, values, partial_out, partial_state, tables, queries, weights, state, \
                                   group, lane, simdgroup, n_simdgroups); \
        if (main_bits(key_format) == 16) \
            attend_with_keys<D, 16>(args, q, keys, values, partial_out, partial_state, tables, queries, weights, \
                                    state, group, lane, simdgroup, n_simdgroups); \
    }
// clang-format on

ATTEND(32)
ATTEND(64)
ATTEND(128)
ATTEND(256)
ATTEND(512)
ATTEND(1024)

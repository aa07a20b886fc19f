// attend_matrix: what attend does, by products of matrices. Threadgroups: x KV heads, y blocks of query rows, z splits
// of the context.
#include "attend_long.h"

// clang-format off
#define ATTEND_MATRIX(D) \
    kernel void tqkv_attend_matrix_d##D(ATTEND_ARGUMENTS) \
    { \
        ATTEND_TASK(D, D) \
        task.weights = queries + TQKV__MATRIX_QUERY_BYTES(D) / 4 * TQKV__MATRICES(int(columns)); \
        task.sums = args.sections_each == 0 ? queries : task.weights; \
        task.states = states + TQKV__COLUMN_BYTES(8 * TQKV__MATRICES(int(columns))) / 4; \
        if (TQKV_SHARED_MATRIX_SLOTS) open_slots(8u * uint(TQKV__MATRICES(int(columns))), task); \
        TQKV_LONG_CALL(attend_with_matrices<D>(args, task)); \
    }
// Rows whose sums several simdgroups share: TQKV__LONG_SIMDGROUPS a threadgroup, no more and no fewer.
#define ATTEND_LONG_MATRIX(D) \
    kernel void tqkv_attend_matrix_d##D(ATTEND_ARGUMENTS) \
    { \
        ATTEND_TASK(D, D) \
        task.tail_queries = queries + TQKV__MATRIX_QUERY_BYTES(D) / 4 * TQKV__MATRICES(int(columns)); \
        task.weights = queries + TQKV__MATRIX_QUERY_BYTES(D + int(tail_values<D>())) / 4 * TQKV__MATRICES(int(columns)); \
        task.tail_table = states + TQKV__COLUMN_BYTES(8 * TQKV__MATRICES(int(columns))) / 4; \
        task.states = task.tail_table + (tail_values<D>() != 0 ? TQKV__TABLE_BYTES / 4 : 0); \
        if (TQKV_SHARED_MATRIX_SLOTS) open_round_slots(8u * uint(TQKV__MATRICES(int(columns))), task); \
        TQKV_LONG_CALL(attend_long_rows<D>(args, task)); \
    }
// clang-format on

ATTEND_MATRIX(64)
ATTEND_MATRIX(128)
ATTEND_MATRIX(256)
ATTEND_LONG_MATRIX(448)
ATTEND_LONG_MATRIX(512)

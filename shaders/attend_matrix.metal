// attend_matrix: what attend does, by products of matrices. Threadgroups: x KV heads, y blocks of query rows, z splits of
// the context.
#include "attend_matrix.h"

// codes: [n_kv_heads][capacity][row_bytes], norms: [n_kv_heads][capacity][norms of a row]
// clang-format off
#define ATTEND_MATRIX(D) \
    kernel void tqkv_attend_matrix_d##D( \
        constant tqkv__attend_args &call [[buffer(0)]], \
        device const uchar *q [[buffer(1)]], \
        device const uchar *key_codes [[buffer(2)]], \
        device const float *key_norms [[buffer(3)]], \
        device const uchar *value_codes [[buffer(4)]], \
        device const float *value_norms [[buffer(5)]], \
        device float *partial_out [[buffer(6)]], \
        device float *partial_state [[buffer(7)]], \
        device const float *key_center [[buffer(8)]], \
        device const int *key_pages [[buffer(9)]], \
        device const int *value_pages [[buffer(10)]], \
        device const uint *tree [[buffer(11)]], \
        constant tqkv__batch_item *items [[buffer(12)]], \
        threadgroup float *tables [[threadgroup(0)]], \
        threadgroup float *queries [[threadgroup(1)]], \
        threadgroup float *states [[threadgroup(3)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        uint item = batch ? item_of(items, group.z, false) : 0u; \
        constant tqkv__attend_args &args = batch ? items[item].attend : call; \
        if (batch && args.kv_len == 0) return; \
        attend_task task; \
        task.q = q; \
        task.keys = stream_of_head<D>(key_format, key_codes, key_norms, args.key_slots, group.x); \
        task.values = stream_of_head<D>(value_format, value_codes, value_norms, args.value_slots, group.x); \
        task.partial_out = partial_out; \
        task.partial_state = partial_state; \
        task.center = key_center; \
        task.pages.keys = key_pages; \
        task.pages.values = value_pages; \
        task.tree = tree; \
        task.tables = tables; \
        task.queries = queries; \
        task.weights = queries + TQKV__MATRIX_QUERY_BYTES(D) / 4 * TQKV__MATRICES(int(columns)); \
        task.sums = args.sections_each == 0 ? queries : task.weights; \
        task.kept = states; \
        task.states = states + TQKV__MATRIX_KEPT_BYTES(TQKV__MATRICES(int(columns))) / 4; \
        task.kv_head = group.x; \
        task.lane = lane; \
        task.simdgroup = simdgroup; \
        task.n_simdgroups = n_simdgroups; \
        if (batch) \
            open_item(items[item], group.z, task); \
        else \
            open_place(args, group.y, group.z, task); \
        attend_with_matrices<D>(args, task); \
    }
// clang-format on

ATTEND_MATRIX(64)
ATTEND_MATRIX(128)
ATTEND_MATRIX(256)

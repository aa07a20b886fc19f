// index_scores: what index_choice takes. Threadgroups: x ranges of blocks, y queries.
#include "index_scores.h"

// q: [n_queries][n_heads][D], codes: [capacity][row_bytes], norms: [capacity], weights: [n_queries][n_heads], out:
// [n_queries][n_blocks], center, scale: [D]
// clang-format off
#define INDEX_SCORES(D) \
    kernel void tqkv_index_scores_d##D( \
        constant tqkv__index_args &call [[buffer(0)]], \
        device const uchar *q [[buffer(1)]], \
        device const uchar *codes [[buffer(2)]], \
        device const float *norms [[buffer(3)]], \
        device const float *weights [[buffer(4)]], \
        device float *out [[buffer(5)]], \
        device const float *center [[buffer(6)]], \
        device const int *pages [[buffer(7)]], \
        device const float *scale [[buffer(8)]], \
        threadgroup float *tables [[threadgroup(0)]], \
        threadgroup float *queries [[threadgroup(1)]], \
        threadgroup float *scores [[threadgroup(2)]], \
        threadgroup float *states [[threadgroup(3)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        attend_task task; \
        index_task index; \
        task.q = q; \
        task.keys.codes = codes; \
        task.keys.norms = norms; \
        task.center = center; \
        task.scale = scale; \
        task.pages.keys = pages; \
        task.pages.lane = lane; \
        task.pages.shared = task.pages.shared_values = false; \
        task.tables = tables; \
        task.queries = queries; \
        task.kept = states; \
        task.kv_head = 0u; \
        task.end_column = (group.y + 1u) * uint(call.keys.group); \
        task.lane = lane; \
        task.simdgroup = simdgroup; \
        task.n_simdgroups = n_simdgroups; \
        open_index(call, group.x, group.y, weights, out, scores, index); \
        score_index_blocks<D>(call, task, index); \
    }
// clang-format on

INDEX_SCORES(64)
INDEX_SCORES(128)

// attend_merge: one result of attention from partial ones, or slices. One threadgroup a query row, along x.
#include "merge.h"

constant bool unrotate [[function_constant(TQKV_FC_UNROTATE)]];
constant bool has_sinks [[function_constant(TQKV_FC_SINKS)]];
constant bool key_centered [[function_constant(TQKV_FC_CENTER)]];
constant bool value_centered [[function_constant(TQKV_FC_VALUE_CENTER)]];
constant bool value_scaled [[function_constant(TQKV_FC_VALUE_SCALED)]];
constant bool center_scaled [[function_constant(TQKV_FC_CENTER_SCALED)]];
constant bool value_rotated [[function_constant(TQKV_FC_VALUE_ROTATED)]];
constant uint row_type [[function_constant(TQKV_FC_TYPE)]];
constant bool batch [[function_constant(TQKV_FC_BATCH)]];
constant bool rotate_center [[function_constant(TQKV_FC_ROTATED)]];
constant bool from_slice [[function_constant(TQKV_FC_FROM_SLICE)]];
constant bool to_slice [[function_constant(TQKV_FC_TO_SLICE)]];

// partial_out: [n_partials][n_rows][D], partial_state: [1 + n_partials][n_rows][2], sinks: [n_heads],
// out: [n_queries][n_heads][D], with strides, max to src_sum: [n_rows]
// clang-format off
#define ATTEND_MERGE(D) \
    kernel void tqkv_attend_merge_d##D( \
        constant tqkv__merge_args &call [[buffer(0)]], \
        device const float *partial_out [[buffer(1)]], \
        device const float *partial_state [[buffer(2)]], \
        device const float *sinks [[buffer(3)]], \
        device uchar *out [[buffer(4)]], \
        device const float *center [[buffer(5)]], \
        constant tqkv__batch_item *items [[buffer(6)]], \
        device float *max [[buffer(7)]], \
        device float *sum [[buffer(8)]], \
        device const float *src_max [[buffer(9)]], \
        device const float *src_sum [[buffer(10)]], \
        device const float *scale [[buffer(11)]], \
        threadgroup float *shared [[threadgroup(0)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        uint item = batch ? item_of(items, group.x, TQKV_BY_ROW) : 0u; \
        constant tqkv__merge_args &args = batch ? items[item].merge : call; \
        merge_task task; \
        task.partial_out = partial_out; \
        task.partial_state = partial_state; \
        task.out = out; \
        task.shared = shared; \
        task.row = group.x; \
        task.type = row_type; \
        task.max = max; \
        task.sum = sum; \
        task.src_max = src_max; \
        task.src_sum = src_sum; \
        task.from_slice = from_slice; \
        task.to_slice = to_slice; \
        task.rotate = rotate_center; \
        task.unrotate = unrotate; \
        task.shifted = key_centered; \
        task.centered = value_centered; \
        task.scaled = value_scaled; \
        task.rotated = value_rotated; \
        task.center_scaled = center_scaled; \
        task.scale = scale; \
        task.center = center; \
        task.lane = lane; \
        task.part = lane % uint(MERGE_LANES(D)); \
        task.simdgroup = simdgroup; \
        task.n_simdgroups = n_simdgroups; \
        if (batch) open_merge_item(items[item], task); \
        task.sink = has_sinks ? sinks[task.row % uint(args.n_heads)] * TQKV_LOG2E : -INFINITY; \
        merge_row<D>(args, task); \
    }
// clang-format on

ATTEND_MERGE(32)
ATTEND_MERGE(48)
ATTEND_MERGE(64)
ATTEND_MERGE(80)
ATTEND_MERGE(96)
ATTEND_MERGE(128)
ATTEND_MERGE(192)
ATTEND_MERGE(256)
ATTEND_MERGE(448)
ATTEND_MERGE(512)
ATTEND_MERGE(1024)

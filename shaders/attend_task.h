// What a threadgroup of attention works on: function constants, the arrays of its KV head and its part of the call,
// norms of stored rows, and what a lane keeps of each column. Letters: as in attend.h.
#ifndef TQKV_ATTEND_TASK_H
#define TQKV_ATTEND_TASK_H
#include "codec.h"
#include "tiles.h"

constant uint key_format [[function_constant(TQKV_FC_FORMAT)]];
constant uint value_format [[function_constant(TQKV_FC_VALUE_FORMAT)]];
constant bool rotate_queries [[function_constant(TQKV_FC_ROTATE_QUERIES)]];
constant bool softcap [[function_constant(TQKV_FC_SOFTCAP)]];
constant bool key_centered [[function_constant(TQKV_FC_CENTER)]];
constant bool key_scaled [[function_constant(TQKV_FC_SCALED)]];
constant bool center_scaled [[function_constant(TQKV_FC_CENTER_SCALED)]];
constant bool rotate_center [[function_constant(TQKV_FC_ROTATED)]];
constant uint row_type [[function_constant(TQKV_FC_TYPE)]];
constant uint tail_format [[function_constant(TQKV_FC_TAIL_FORMAT)]];
constant bool rotate_tail [[function_constant(TQKV_FC_ROTATE_TAIL)]];
constant bool tail_centered [[function_constant(TQKV_FC_TAIL_CENTER)]];
constant bool tail_scaled [[function_constant(TQKV_FC_TAIL_SCALED)]];
constant bool scale_tail_center [[function_constant(TQKV_FC_TAIL_CENTER_SCALED)]];
constant bool rotate_tail_center [[function_constant(TQKV_FC_TAIL_ROTATED)]];

// A loop over columns runs to the constant maximum and tests inside. It unrolls into registers, and the iterations
// beyond `columns` disappear when the pipeline is built.
#define FOR_COLUMNS(c) \
    TQKV_UNROLL \
    for (int c = 0; c < C; c++) \
        if (uint(c) < columns)

// The running maximum starts here, below every score. It is finite, so a masked score minus it is -INFINITY, not NaN.
#define NOTHING_SEEN (-3.0e38f)

// Output values of a column that a lane keeps: pieces of 8 values, several where 32 lanes do not span the row. Pieces
// lie LANE_SPAN(D) * 8 values apart: so many lanes have values.
#define LANE_SUMS(D) ((D) <= 256 ? 8 : ((D) + 511) / 512 * 16)
#define LANE_SPAN(D) ((D) / LANE_SUMS(D))

// Whether all scores of a query lack the same number, in column_memory.
inline bool has_shifts() { return key_centered || tail_centered; }

// The codes and norms of one KV head.
struct stream_rows {
    device const uchar *codes;
    device const float *norms;
};

// What a threadgroup works on, and the place of this thread in it. n_heads is n_kv_heads * group.
struct attend_task {
    device const uchar *q;          // [n_queries][n_heads][KD + T], with strides
    stream_rows keys, values, tail; // of the KV head; tail: if there is one
    device float *partial_out;      // [n_partials][n_queries][n_heads][VD]: sum of weight * value
    // [1 + n_partials][n_queries][n_heads][2]: the centre's score, unused; then maximum (in powers of two), sum of the
    // weights
    device float *partial_state;
    device const float *center, *tail_center; // [n_kv_heads][KD]: of the keys; [n_kv_heads][T]
    device const float *scale, *tail_scale;   // the same, of the channels
    page_tables pages;
    device const int *list_rows;     // [n_queries][list_heads][list_row]: of attend_list
    device const uint *tree;         // [n_queries][2]
    threadgroup float *tables;       // [2][256]: codebooks of keys and values
    threadgroup float *tail_table;   // [256]: of the tail
    threadgroup float *queries;      // [columns][padded KD]
    threadgroup float *tail_queries; // [columns][padded T]
    threadgroup float *sums;         // of attend_matrix, for a pass of columns
    threadgroup float *weights; // a tile's weights and, for a pass of columns, sums: [n_simdgroups][ATTEND_SUM_FLOATS]
    threadgroup float *kept;    // of columns.h
    threadgroup float *states;  // [n_simdgroups][C][2]: maximum and sum
    uint kv_head, first_column, split;
    uint end_column; // of those columns that there are
    uint lane, simdgroup, n_simdgroups;
};

// What a lane keeps of each column. D: of the values
template <int D>
struct column_state {
    float shift[TQKV__MAX_COLUMNS(D)];             // of scores, under softcap: the centre's score
    int newest[TQKV__MAX_COLUMNS(D)];              // position that the column's query sees; negative: none
    float maximum[TQKV__MAX_COLUMNS(D)];           // subtracted from scores: weigh_tile says how it is raised
    float sum[TQKV__MAX_COLUMNS(D)];               // of the weights
    float out[TQKV__MAX_COLUMNS(D)][LANE_SUMS(D)]; // sum of weight * value
};

inline uint blocks_of_rows(constant tqkv__attend_args &args)
{
    uint each = max(uint(columns), 1u); // 0 where shaders are only checked
    if (has_list) return uint(args.n_queries) * ((uint(args.group) + each - 1u) / each); // of one query each
    return (uint(args.n_queries) * uint(args.group) + each - 1u) / each;
}

// Gives the simdgroups their memory of slots, behind the states of C columns each.
inline void open_slots(uint C, thread attend_task &task)
{
    threadgroup float *behind = task.states + task.n_simdgroups * uint(TQKV__STATE_BYTES(C) / 4);
    task.pages.shared = task.pages.shared_values = true;
    task.pages.slots = (threadgroup uint *)behind;
}

// Blocks of rows and splits count from the last. Those have the most to do, and none begins when the others are done.
inline void open_place(constant tqkv__attend_args &args, uint block, uint split, thread attend_task &task)
{
    uint number = blocks_of_rows(args) - 1u - block, group = uint(args.group);
    task.first_column = number * columns;
    task.end_column = uint(args.n_queries) * group;
    task.split = uint(args.n_splits) - 1u - split;
    if (!has_list) return;
    uint blocks = blocks_of_rows(args) / uint(args.n_queries), query = number / blocks;
    task.first_column = query * group + number % blocks * columns;
    task.end_column = (query + 1u) * group;
    open_list(args, task.list_rows, query, task.kv_head, task.pages.list);
}

// The arrays of an item of a batch, and its threadgroup `number` of the batch.
inline void open_item(constant tqkv__batch_item &item, uint number, thread attend_task &task)
{
    uint own = number - uint(item.first_group), blocks = blocks_of_rows(item.attend);
    device const float *scratch = task.partial_out;
    if (has_list) task.list_rows = (device const int *)scratch + item.list_rows;
    open_place(item.attend, own % blocks, own / blocks, task);
    task.q += row_offset(item.q, TQKV__ROWS_UNIT);
    task.keys.codes += row_offset(item.key_codes, TQKV__CODES_UNIT);
    task.keys.norms += item.key_norms;
    task.values.codes += row_offset(item.value_codes, TQKV__CODES_UNIT);
    task.values.norms += item.value_norms;
    task.partial_state = task.partial_out + item.partial_state;
    task.partial_out += item.partial_out;
    task.center += item.key_center;
    task.tail.codes += row_offset(item.tail_codes, TQKV__CODES_UNIT);
    task.tail.norms += item.tail_norms;
    task.tail_center += item.tail_center;
    task.scale += item.key_scale;
    task.tail_scale += item.tail_scale;
    task.pages.keys += item.key_pages;
    task.pages.values += item.value_pages;
    task.tree += item.tree;
}

template <int D>
inline stream_rows stream_of_head(uint format, device const uchar *codes, device const float *norms, int slots,
                                  uint kv_head)
{
    ulong first = ulong(kv_head) * ulong(slots);
    stream_rows rows;
    rows.codes = codes + first * ulong(row_bytes<D>(format));
    rows.norms = norms + first * ulong(uint(D) / norm_block<D>(format));
    return rows;
}

// Norm of block `block` at a slot, and the factor of its codes.
template <int D>
inline float stored_norm(uint format, stream_rows rows, uint slot, uint block)
{
    return rows.norms[ulong(slot) * ulong(uint(D) / norm_block<D>(format)) + block];
}

template <int D>
inline float stored_scale(uint format, stream_rows rows, uint slot, uint block, float block_scale)
{
    if (!has_norms(format)) return 1.0f;
    return code_scale<D>(format, stored_norm<D>(format, rows, slot, block), block_scale);
}

template <int D>
inline bool one_norm(uint format)
{
    return norm_block<D>(format) == uint(D);
}

// Factor of the codes at a slot; 1 where a row has several norms.
template <int D>
inline float row_scale(uint format, stream_rows rows, uint slot, float block_scale)
{
    return one_norm<D>(format) ? stored_scale<D>(format, rows, slot, 0u, block_scale) : 1.0f;
}

#endif

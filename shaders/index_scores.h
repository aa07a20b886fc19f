// Scores of an index: the heads of a query over one key are the columns of a product of matrices, whose elements are weighted
// and added up in place. Keys are decoded as in attend_matrix.h, each tile 32 neighbouring keys whose slots the lanes look up.
//
// Letters: D head_dim, F matrices side by side that hold the heads of a pass.
#ifndef TQKV_INDEX_SCORES_H
#define TQKV_INDEX_SCORES_H
#include "attend_matrix.h"
#include "index.h"

// What a threadgroup works on besides its attend_task: some blocks of one query, with the keys [from, to) that it sees.
struct index_task {
    device const float *weights; // [n_heads] or, without, unused
    device float *out;           // [n_blocks]
    threadgroup float *scores;   // [TQKV__INDEX_KEYS]
    uint query, first_block, end_block, from, to;
};

inline void open_index(constant tqkv__index_args &call, uint range, uint query, device const float *weights,
                       device float *out, threadgroup float *scores, thread index_task &index)
{
    uint each = uint(call.blocks_each), seen = keys_seen(call.seen, call.seen_rest, call.ratio, call.end, query);
    index.weights = weights + row_offset(query, uint(call.keys.group));
    index.out = out + row_offset(query, uint(call.n_blocks));
    index.scores = scores;
    index.query = query;
    index.first_block = range * each;
    index.end_block = min(index.first_block + each, uint(call.n_blocks));
    index.from = max(index.first_block * uint(call.block), uint(call.first_key));
    index.to = min(index.end_block * uint(call.block), seen);
}

// What a lane needs of its columns.
template <int F>
struct index_columns {
    float factor[F][2], shift[F][2], weight[F][2];
};

// Memory of the key with the lane's number in a tile that begins with key `first`; of some key where there is none.
inline uint slot_of_key(constant tqkv__index_args &call, thread const attend_task &task, uint first)
{
    constant tqkv__attend_args &args = call.keys;
    uint key = min(first + task.lane - uint(call.first_key), uint(args.kv_len) - 1u);
    uint slot = uint(args.key_oldest_slot) + key;
    slot = slot < uint(args.key_capacity) ? slot : slot - uint(args.key_capacity);
    return paged ? find_row(args, task.pages, slot).keys : slot;
}

// The sum over the lanes that have the same row of a matrix. Every lane gets it.
inline float sum_of_row(float x)
{
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2)
        if (TQKV__MATRIX_ROW(distance) == 0) x += simd_shuffle_xor(x, ushort(distance));
    return x;
}

// The heads of a pass: queries in threadgroup memory, factors and weights. A barrier must precede it.
template <int D, int F>
inline void open_heads(constant tqkv__index_args &call, thread const attend_task &task, thread const index_task &index,
                       uint head, column_memory memory, thread index_columns<F> &heads)
{
    uint thread_index = task.simdgroup * 32u + task.lane, n_heads = uint(call.keys.group);
    load_matrix_queries<D, F>(call.keys, task, first_part(call.keys, task), memory);
    for (uint c = thread_index; c < uint(8 * F); c += task.n_simdgroups * 32u) {
        bool used = c < columns && head + c < n_heads;
        memory.totals[c] = !used ? 0.0f : call.has_weights != 0 ? index.weights[head + c] : 1.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane), loaded = min(c, columns - 1u);
            heads.weight[f][i] = memory.totals[c];
            heads.factor[f][i] = memory.factors[loaded];
            heads.shift[f][i] = key_centered ? memory.shifts[loaded] * (1.0f / TQKV_LOG2E) : 0.0f;
        }
    }
}

// Adds the weighted scores of a pass to those of the tile's keys, in threadgroup memory.
template <int D, int F>
inline void add_heads(constant tqkv__index_args &call, thread const attend_task &task, bool first_pass, uint base,
                      thread const index_columns<F> &heads, thread const sum_matrix (&score)[4][F],
                      threadgroup float *scores)
{
    float norms[4], least = call.relu != 0 ? 0.0f : -INFINITY;
    load_norms<D>(call.keys, key_format, task.keys, base, task.lane, norms);
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        float scale = scale_of_norm<D>(key_format, norms[p], call.keys.key_block_scale), sum = 0.0f;
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) {
                float own = fma(score[p][f].elements[i] * scale, heads.factor[f][i], heads.shift[f][i]);
                sum = fma(heads.weight[f][i], max(own, least), sum);
            }
        }
        sum = sum_of_row(sum);
        uint row = tile_row(p, TQKV__MATRIX_ROW(task.lane));
        if (TQKV__MATRIX_COLUMN(task.lane) == 0) scores[row] = first_pass ? sum : scores[row] + sum;
    }
}

// Scores of the n keys from key `first` on.
template <int D, int F>
inline void score_keys(constant tqkv__index_args &call, thread attend_task &task, thread const index_task &index,
                       column_memory memory, thread const value_book &book, uint first, uint n)
{
    uint n_heads = uint(call.keys.group), tiles = (n + 31u) / 32u;
    for (uint head = 0; head < n_heads; head += columns) {
        index_columns<F> heads;
        any_key_batch<D, F> keys;
        uint base = slot_of_key(call, task, first + task.simdgroup * 32u);
        task.first_column = index.query * n_heads + head;
        open_key_batch<D, F>(call.keys, task, first_part(call.keys, task), base, keys);
        threadgroup_barrier(mem_flags::mem_threadgroup); // before the queries of the last pass are overwritten
        open_heads<D, F>(call, task, index, head, memory, heads);
        for (uint tile = task.simdgroup; tile < tiles; tile += task.n_simdgroups) {
            sum_matrix score[4][F];
            uint next = slot_of_key(call, task, first + (tile + task.n_simdgroups) * 32u);
            score_any_matrix_tile<D, F>(call.keys, task, first_part(call.keys, task), base, next, book, keys, score);
            add_heads<D, F>(call, task, head == 0, base, heads, score, index.scores + tile * 32u);
            base = next;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The largest score and the sum of scores of a block.
struct pooled {
    float largest, sum;
};

inline float larger_score(float x, float y) { return y > x || y != y ? y : x; }

inline void add_score(float x, thread pooled &block)
{
    block.largest = larger_score(block.largest, x);
    block.sum += x;
}

inline void store_block(constant tqkv__index_args &call, thread const index_task &index, uint block,
                        thread const pooled &found)
{
    uint begin = block * uint(call.block), first = max(begin, index.from),
         end = min(begin + uint(call.block), index.to);
    index.out[block] = call.pool == TQKV__POOL_MEAN ? found.sum / float(end - first) : found.largest;
}

// Pools the n keys from key `first` on: small blocks a thread each, others a simdgroup each, whose lanes take turns. A block
// of more keys than TQKV__INDEX_KEYS comes in pieces, and `found` stays from one to the next.
inline void pool_keys(constant tqkv__index_args &call, thread const attend_task &task, thread const index_task &index,
                      uint first, uint n, thread pooled &found)
{
    uint size = uint(call.block), end = first + n;
    bool narrow = size <= 32u;
    uint number = narrow ? task.simdgroup * 32u + task.lane : task.simdgroup, lane = narrow ? 0u : task.lane;
    uint n_workers = narrow ? task.n_simdgroups * 32u : task.n_simdgroups, n_lanes = narrow ? 1u : 32u;
    for (uint block = index.first_block + number; block < index.end_block; block += n_workers) {
        uint begin = block * size, last = min(begin + size, end);
        if (begin >= first || first == index.from) {
            found.largest = -INFINITY;
            found.sum = 0.0f;
        }
        if (begin >= end || begin + size <= first) {
            if (lane == 0u) index.out[block] = -INFINITY;
            continue;
        }
        uint skipped = begin < first ? (first - begin + n_lanes - 1u - lane) / n_lanes : 0u;
        for (uint key = begin + lane + skipped * n_lanes; key < last; key += n_lanes)
            add_score(index.scores[key - first], found);
        if (begin + size > end && end < index.to) continue; // the next piece goes on
        pooled all = found;
        TQKV_UNROLL
        for (uint distance = 1; distance < 32; distance *= 2) {
            if (narrow) continue;
            all.largest = larger_score(all.largest, simd_shuffle_xor(all.largest, ushort(distance)));
            all.sum += simd_shuffle_xor(all.sum, ushort(distance));
        }
        if (lane == 0u) store_block(call, index, block, all);
    }
}

template <int D, int F>
inline void score_index(constant tqkv__index_args &call, thread attend_task &task, thread const index_task &index)
{
    uint thread_index = task.simdgroup * 32u + task.lane, n_threads = task.n_simdgroups * 32u;
    threadgroup float *table_memory = task.tables;
    threadgroup code_value *table = (threadgroup code_value *)table_memory;
    threadgroup uchar *pairs = (threadgroup uchar *)(table_memory + 256);
    column_memory memory = column_memory_of<F>(task.kept);
    pooled found = {-INFINITY, 0.0f};
    if (index.from >= index.to) {
        for (uint b = index.first_block + thread_index; b < index.end_block; b += n_threads) index.out[b] = -INFINITY;
        return;
    }
    load_value_book(key_format, false, table, thread_index, n_threads);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value_book book = open_value_book(key_format, table, pairs, task.lane);
    if (has_pairs(key_format)) load_pairs(table, false, thread_index, n_threads, pairs);
    for (uint first = index.from; first < index.to; first += uint(TQKV__INDEX_KEYS)) {
        uint n = min(index.to - first, uint(TQKV__INDEX_KEYS));
        score_keys<D, F>(call, task, index, memory, book, first, n);
        pool_keys(call, task, index, first, n, found);
        threadgroup_barrier(mem_flags::mem_threadgroup); // before the scores are overwritten
    }
}

// How many heads there are chooses the code here and nowhere else.
template <int D>
inline void score_index_blocks(constant tqkv__index_args &call, thread attend_task &task,
                               thread const index_task &index)
{
    if (columns <= 8)
        score_index<D, 1>(call, task, index);
    else if (columns <= 16)
        score_index<D, 2>(call, task, index);
    else
        score_index<D, 4>(call, task, index);
}

#endif

// Scores of an index: the heads of a query over one key are the columns of a product of matrices, whose elements are
// weighted and added up in place. Keys are decoded as in attend_matrix.h,
// each tile 32 neighbouring keys whose slots the lanes look up.
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

// Memory of the key with the lane's number in a tile that begins with key `first`; of some key where there is none.
inline uint slot_of_key(constant tqkv__index_args &call, thread const attend_task &task, uint first)
{
    constant tqkv__attend_args &args = call.keys;
    uint key = min(first + task.lane - uint(call.first_key), uint(args.kv_len) - 1u);
    uint slot = uint(args.key_oldest_slot) + key;
    slot = slot < uint(args.key_capacity) ? slot : slot - uint(args.key_capacity);
    return paged ? find_row(args, task.pages, slot, slot % 32u).keys : slot;
}

// The sum over the lanes that have the same row of a matrix. Every lane gets it.
inline float sum_of_row(float x)
{
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2)
        if (TQKV__MATRIX_ROW(distance) == 0) x += simd_shuffle_xor(x, ushort(distance));
    return x;
}

// Heads whose queries a simdgroup loads at a time.
#define INDEX_ROWS 4

// The heads of a pass: their queries as pairs of right factors, [F][D / 16][32 lanes], their factors, shifts and
// weights. Columns that are not used are 0. A barrier must precede and follow it.
template <int D, int F>
inline void load_heads(constant tqkv__index_args &call, thread const attend_task &task, thread const index_task &index,
                       uint head, column_memory memory)
{
    const int C = TQKV_LANE_VALUES(D);
    const uint N = uint(BY_CODE_WIDTH(key_format, MATRIX_KEY_VALUES, D));
    key_part part = first_part(call.keys, task);
    uint n_used = min(uint(columns), uint(call.keys.group) - head);
    threadgroup float *queries = part.queries;
    threadgroup right_pair *pairs = (threadgroup right_pair *)queries;
    for (uint c = task.simdgroup * 32u + task.lane; c < uint(8 * F); c += task.n_simdgroups * 32u)
        memory.totals[c] = c >= n_used ? 0.0f : call.has_weights != 0 ? index.weights[head + c] : 1.0f;
    for (uint first = task.simdgroup * uint(INDEX_ROWS); first < uint(8 * F);
         first += task.n_simdgroups * uint(INDEX_ROWS)) {
        float x[INDEX_ROWS][C];
        TQKV_UNROLL
        for (int r = 0; r < INDEX_ROWS; r++)
            load_query<D>(call.keys, task, part, index.query, head + min(first + uint(r), n_used - 1u), x[r]);
        TQKV_UNROLL
        for (int r = 0; r < INDEX_ROWS; r++) {
            uint c = first + uint(r);
            float shift = part.with_center ? score_of_center<D>(call.keys, task, part, x[r]) : 0.0f;
            turn_query<D>(task, part, x[r]);
            float size = size_of_row<D>(x[r]), inverse = c < n_used ? 1.0f / size : 0.0f;
            TQKV_UNROLL
            for (int i = 0; i < C; i += 2) { // neighbours, as in query_value
                uint value = task.lane * uint(C) + uint(i), s = value / (4u * N) * (N / 2u) + value % N / 2u;
                store_right(pairs + (c / 8u * uint(D / 16) + s / 2u) * 32u, value % (4u * N) / N * 2u, c % 8u, s % 2u,
                            x[r][i] * inverse, x[r][i + 1] * inverse);
            }
            if (task.lane != 0) continue;
            memory.shifts[c] = shift * (1.0f / TQKV_LOG2E);
            memory.factors[c] = size;
        }
    }
}

// Adds the weighted scores of a pass to those of the tile's keys, in threadgroup memory.
template <int D, int F>
inline void add_heads(constant tqkv__index_args &call, thread const attend_task &task, bool first_pass,
                      thread const float (&norms)[4], column_memory memory, thread const sum_matrix (&score)[4][F],
                      threadgroup float *scores)
{
    float least = call.relu != 0 ? 0.0f : -INFINITY, sum[4], scale[4];
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        scale[p] = scale_of_norm<D>(key_format, norms[p], call.keys.key_block_scale);
        sum[p] = 0.0f;
    }
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            float factor = memory.factors[c], shift = key_centered ? memory.shifts[c] : 0.0f;
            float weight = key_centered ? memory.totals[c] : memory.totals[c] * factor;
            TQKV_UNROLL
            for (int p = 0; p < 4; p++) {
                float own = score[p][f].elements[i] * scale[p];
                if (key_centered) own = fma(own, factor, shift);
                sum[p] = fma(weight, max(own, least), sum[p]);
            }
        }
    }
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        float all = sum_of_row(sum[p]);
        uint row = tile_row(p, TQKV__MATRIX_ROW(task.lane));
        if (TQKV__MATRIX_COLUMN(task.lane) == 0) scores[row] = first_pass ? all : scores[row] + all;
    }
}

// Codes that a lane loads ahead: two chunks, of two tiles where a row is one chunk.
#define INDEX_CHUNKS(D, W) ((D) / (4 * MATRIX_KEY_VALUES(D, W)))
template <int D, int W>
struct ahead {
    key_chunk<D, W> chunks[2];
};
struct tile_slots {
    uint now, next, second; // of the keys of this tile, of the simdgroup's next and the one after it
};

template <int D, int W>
inline void load_ahead(constant tqkv__index_args &call, thread const attend_task &task, tile_slots slots,
                       thread ahead<D, W> &keys)
{
    const bool one = INDEX_CHUNKS(D, W) == 1;
    load_key_chunk<D, W>(call.keys, task, first_part(call.keys, task), slots.now, 0u, keys.chunks[0]);
    load_key_chunk<D, W>(call.keys, task, first_part(call.keys, task), one ? slots.next : slots.now, one ? 0u : 1u,
                         keys.chunks[1]);
}

// score = q . k of a tile without the factor of rows: at these head sizes each has one norm. `turn`: which chunk is
// first, if a row has but one.
template <int D, int W, int F>
inline void score_index_tile(constant tqkv__index_args &call, thread const attend_task &task, tile_slots slots,
                             thread const value_book &book, int turn, thread ahead<D, W> &keys,
                             thread sum_matrix (&score)[4][F])
{
    const int chunks = INDEX_CHUNKS(D, W);
    key_part part = first_part(call.keys, task);
    clear_scores<F>(score);
    TQKV_UNROLL
    for (int j = 0; j < chunks; j++) {
        int own = chunks == 1 ? turn : j % 2;
        multiply_chunk<D, W, F>(task, part, uint(j), keys.chunks[own], book, score);
        uint slot = chunks == 1 ? slots.second : j + 2 < chunks ? slots.now : slots.next;
        load_key_chunk<D, W>(call.keys, task, part, slot, uint((j + 2) % chunks), keys.chunks[own]);
    }
}

template <int D, int W, int F>
inline void score_tiles(constant tqkv__index_args &call, thread const attend_task &task, bool first_pass, uint first,
                        uint tiles, thread const value_book &book, column_memory memory, tile_slots slots,
                        thread ahead<D, W> &keys, threadgroup float *scores)
{
    const int turns = INDEX_CHUNKS(D, W) == 1 ? 2 : 1;
    uint step = task.n_simdgroups;
    for (uint round = task.simdgroup; round < tiles; round += uint(turns) * step) {
        TQKV_UNROLL
        for (int turn = 0; turn < turns; turn++) {
            uint tile = round + uint(turn) * step;
            if (tile >= tiles) continue;
            sum_matrix score[4][F];
            float norms[4];
            load_norms<D>(call.keys, task.pages, key_format, rows_apart(), task.keys, slots.now, norms);
            score_index_tile<D, W, F>(call, task, slots, book, turn, keys, score);
            add_heads<D, F>(call, task, first_pass, norms, memory, score, scores + tile * 32u);
            slots.now = slots.next;
            slots.next = slots.second;
            slots.second = slot_of_key(call, task, first + (tile + 3u * step) * 32u);
        }
    }
}

// As any_keys of attend.h.
template <int D>
struct any_ahead {
    ahead<D, 4> of_4;
    ahead<D, 8> of_8;
    ahead<D, 16> of_16;
};

template <int D>
inline void open_ahead(constant tqkv__index_args &call, thread const attend_task &task, tile_slots slots,
                       thread any_ahead<D> &keys)
{
    WITH_CODES(key_format, keys, load_ahead<D, W>(call, task, slots, codes));
}

template <int D, int F>
inline void score_any_tiles(constant tqkv__index_args &call, thread const attend_task &task, bool first_pass,
                            uint first, uint tiles, thread const value_book &book, column_memory memory,
                            tile_slots slots, thread any_ahead<D> &keys, threadgroup float *scores)
{
    WITH_CODES(key_format, keys,
               score_tiles<D, W, F>(call, task, first_pass, first, tiles, book, memory, slots, codes, scores));
}

// Scores of the n keys from key `first` on.
template <int D, int F>
inline void score_keys(constant tqkv__index_args &call, thread attend_task &task, thread const index_task &index,
                       column_memory memory, thread const value_book &book, uint first, uint n)
{
    uint n_heads = uint(call.keys.group), tiles = (n + 31u) / 32u;
    for (uint head = 0; head < n_heads; head += columns) {
        any_ahead<D> keys;
        tile_slots slots;
        slots.now = slot_of_key(call, task, first + task.simdgroup * 32u);
        slots.next = slot_of_key(call, task, first + (task.simdgroup + task.n_simdgroups) * 32u);
        slots.second = slot_of_key(call, task, first + (task.simdgroup + 2u * task.n_simdgroups) * 32u);
        open_ahead<D>(call, task, slots, keys);
        if (n_heads > columns || first == index.from) {
            threadgroup_barrier(mem_flags::mem_threadgroup); // before the queries of the last pass are overwritten
            load_heads<D, F>(call, task, index, head, memory);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        score_any_tiles<D, F>(call, task, head == 0, first, tiles, book, memory, slots, keys, index.scores);
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

// Pools the n keys from key `first` on: small blocks a thread each, others a simdgroup each, whose lanes take turns. A
// block of more keys than TQKV__INDEX_KEYS comes in pieces, and `found` stays from one to the next.
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
    column_memory memory = column_memory_of(task.kept, uint(8 * F));
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
    else if (TQKV__INDEX_COLUMNS <= 32 || columns <= 32)
        score_index<D, 4>(call, task, index);
    else
        score_index<D, 8>(call, task, index);
}

#endif

// A strand of a stretch by matrices: strand.h says what it is. Each simdgroup has the scores of one tile as in
// attend_matrix.h, makes right factors of its weights, and multiplies its part of the values of all four tiles by them.
// Then the kernel attend_matrix, of strands and of stretches.
//
// Letters: as in attend_matrix.h; P values of a row that a simdgroup has sums of, N of each lane.
#ifndef TQKV_MATRIX_STRAND_H
#define TQKV_MATRIX_STRAND_H
#include "attend_matrix.h"
#include "strand.h"

// ---- Threadgroup memory, in the place of queries: TQKV__MATRIX_STRAND_BYTES ----

// Right factors of half h of a tile, for the values of a norm: [blocks][tiles][2][F][32]
template <int F>
inline threadgroup right_pair *strand_rights(thread const attend_task &task, uint block, uint number, uint h, int f)
{
    threadgroup float *memory = task.sums;
    uint at = ((block * uint(TQKV__STRANDS) + number) * 2u + h) * uint(F) + uint(f);
    return (threadgroup right_pair *)memory + (at * 32u + task.lane);
}

// Behind them the weights without norms: weights_at.
template <int D, int F>
inline threadgroup float *strand_weights(thread const attend_task &task)
{
    return task.sums + TQKV__STRAND_BLOCKS(D) * TQKV__STRANDS * 2 * F * 32 * 4;
}

// ---- Softmax ----

// Of element i of matrix f. A barrier must follow store_maxima.
template <int F>
inline tile_maxima maxima_of_column(thread const attend_task &task, int f, int i)
{
    tile_maxima maxima = {task.states + (uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane)), uint(8 * F)};
    return maxima;
}

// Scores to weights, and these to right factors in threadgroup memory. A barrier must follow.
template <int D, int P, int F>
inline void store_strand_weights(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                                 thread const tile_norms &norms, thread sum_matrix (&score)[4][F],
                                 thread matrix_state<P, F> &state)
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            state.maximum[f][i] = maximum_after(maxima_of_column<F>(task, f, i), task.simdgroup + 1u);
        }
    }
    weigh_scores(score, state);
    store_tile_weights<F>(task, strand_weights<D, F>(task), score);
    TQKV_UNROLL
    for (int b = 0; b < TQKV__STRAND_BLOCKS(D); b++) {
        if (uint(b) >= uint(D) / norm_block<D>(value_format)) continue;
        right_pair right[2][F];
        scale_weights<D, F>(args, task, base, uint(b), norms, score, right);
        TQKV_UNROLL
        for (int i = 0; i < 2 * F; i++)
            *strand_rights<F>(task, uint(b), task.simdgroup, uint(i / F), i % F) = right[i / F][i % F];
    }
}

// Maxima and sums of the columns, which simdgroup f has of matrix f, in attend_matrix's order.
template <int D, int F>
inline void store_strand_sums(constant tqkv__attend_args &args, thread const attend_task &task, uint used,
                              column_memory memory)
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        if (task.simdgroup != uint(f)) continue;
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            const uint c = uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            tile_maxima maxima = maxima_of_column<F>(task, f, i);
            float sum = 0.0f, maximum = maximum_after(maxima, uint(TQKV__STRANDS));
            TQKV_UNROLL
            for (int t = 0; t < TQKV__STRANDS; t++) {
                sum *= shrink_before(maxima, t);
                TQKV_UNROLL
                for (int p = 0; p < 4; p++) {
                    float2 two = *weights_at<F>(strand_weights<D, F>(task), task.lane, uint(t), p, f);
                    sum += i == 0 ? two.x : two.y;
                }
            }
            sum = sum_of_column(sum);
            if (TQKV__MATRIX_ROW(task.lane) == 0 && c < used)
                store_column(args, task, task.split, c, memory, maximum == NOTHING_SEEN ? -INFINITY : maximum, sum);
        }
    }
}

// ---- Values ----

#define STRAND_PART(D)    ((D) / TQKV__STRANDS)                     // values of a simdgroup
#define STRAND_NUMBERS(D) (STRAND_PART(D) / 8)                      // and of a lane
#define STRAND_TILE(D, W) (8 * (((W)*STRAND_NUMBERS(D) + 31) / 32)) // words of a tile that a lane loads
#define STRAND_AHEAD(D, W) \
    (4 * STRAND_TILE(D, W) <= TQKV_STRAND_WORDS ? 4 : 2 * STRAND_TILE(D, W) <= TQKV_STRAND_WORDS ? 2 : 1)

// The codes of a simdgroup's part of the next tiles, two halves each.
template <int D, int W>
struct strand_chunks {
    value_chunk<D, W, STRAND_NUMBERS(D)> half_tile[STRAND_AHEAD(D, W)][2];
};

template <int D>
struct any_strand_chunks {
    strand_chunks<D, 4> of_4;
    strand_chunks<D, 8> of_8;
    strand_chunks<D, 16> of_16;
};

template <int D, int W>
inline void load_strand_chunks(constant tqkv__attend_args &args, thread const attend_task &task,
                               thread const strand_slots &slots, thread strand_chunks<D, W> &values)
{
    TQKV_UNROLL
    for (int i = 0; i < 2 * STRAND_AHEAD(D, W); i++)
        load_value_chunk(args, task, slots.base[i / 2], task.simdgroup, uint(i % 2), values.half_tile[i / 2][i % 2]);
}

template <int P, int F>
inline void shrink_matrices(thread const attend_task &task, int tile, thread matrix_state<P, F> &state)
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            float shrink = shrink_before(maxima_of_column<F>(task, f, i), tile);
            TQKV_UNROLL
            for (int b = 0; b < P / 8; b++) state.out[b][f].elements[i] *= shrink;
        }
    }
}

// The simdgroup's part of all tiles. Of a tile that does not exist norms, and so right factors, may be NaN.
template <int D, int W, int F>
inline void add_strand_chunks(constant tqkv__attend_args &args, thread const attend_task &task,
                              thread const strand_tiles &tiles, thread const strand_slots &slots, newest_range newest,
                              thread const value_book &book, thread strand_chunks<D, W> &values,
                              thread matrix_state<STRAND_PART(D), F> &state)
{
    const int ahead = STRAND_AHEAD(D, W);
    const uint block = task.simdgroup * uint(STRAND_PART(D)) / norm_block<D>(value_format);
    TQKV_UNROLL
    for (int t = 0; t < TQKV__STRANDS; t++) {
        uint tile = tiles.first + uint(t * TQKV__STRANDS);
        bool exists = has_tile(tiles, tile), whole = sees_whole_tile(args, tile, newest);
        if (t > 0) shrink_matrices(task, t, state);
        TQKV_UNROLL
        for (int h = 0; h < 2; h++) {
            thread value_chunk<D, W, STRAND_NUMBERS(D)> &own = values.half_tile[t % ahead][h];
            right_pair right[F];
            TQKV_UNROLL
            for (int f = 0; f < F; f++) right[f] = *strand_rights<F>(task, block, uint(t), uint(h), f);
            if (W == 16 && !whole) clear_not_finite<W, STRAND_NUMBERS(D)>(own.raw);
            if (exists) multiply_values(0, own, book, right, state);
            if (t + ahead < TQKV__STRANDS)
                load_value_chunk(args, task, slots.base[t + ahead], task.simdgroup, uint(h), own);
        }
    }
}

template <int D, int F>
inline void store_strand_parts(constant tqkv__attend_args &args, thread const attend_task &task, uint used,
                               column_memory memory, thread const matrix_state<STRAND_PART(D), F> &state)
{
    const uint n_rows = uint(args.n_queries) * uint(args.n_kv_heads) * uint(args.group);
    const uint value = task.simdgroup * uint(STRAND_PART(D)) + TQKV__MATRIX_ROW(task.lane) * uint(STRAND_NUMBERS(D));
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            if (c >= used) continue;
            ulong row = row_offset(task.split, n_rows) + ulong(memory.rows[c]);
            device float *to = task.partial_out + (row * ulong(D) + ulong(value));
            TQKV_UNROLL
            for (int b = 0; b < STRAND_NUMBERS(D); b++) to[b] = state.out[b][f].elements[i];
        }
    }
}

// ---- The strand ----

template <int D, int F>
inline void attend_matrix_strand(constant tqkv__attend_args &args, thread const attend_task &task,
                                 thread const strand_tiles &tiles, thread const value_book &key_book,
                                 thread const value_book &out_book, column_memory memory,
                                 thread matrix_walk<D, F> &walk)
{
    const uint tile = walk.steps.tile, used = min(uint(columns), end_of_columns(args, task) - task.first_column);
    const bool exists = has_tile(tiles, tile), whole = sees_whole_tile(args, tile, walk.newest);
    const strand_slots slots = find_strand(args, task, tiles);
    tile_memory base = walk.base;
    matrix_state<STRAND_PART(D), F> state;
    tile_norms norms;
    any_strand_chunks<D> values;
    sum_matrix score[4][F];
    load_tile_norms<D>(args, task, base, norms);
    WITH_CODES(value_format, values, load_strand_chunks<D, W>(args, task, slots, codes));
    open_columns(args, task, memory, state);
    clear_matrices(state);
    score_any_matrix_tile<D, F>(args, task, first_part(args, task), base.keys, base.keys, key_book, walk.keys, score);
    finish_scores<D>(args, task, tile, base, whole, state, norms, score);
    if (!exists) clear_to_nothing(score);
    store_maxima<F>(task, score);
    threadgroup_barrier(mem_flags::mem_threadgroup); // and the queries are used
    store_strand_weights<D>(args, task, base.values, norms, score, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    WITH_CODES(value_format, values,
               add_strand_chunks<D, W, F>(args, task, tiles, slots, walk.newest, out_book, codes, state));
    store_strand_parts<D, F>(args, task, used, memory, state);
    store_strand_sums<D, F>(args, task, used, memory);
}

// ---- The kernel ----

template <int D, int F>
inline void attend_by_matrices(constant tqkv__attend_args &args, thread const attend_task &task)
{
    uint thread_index = task.simdgroup * 32u + task.lane, n_threads = task.n_simdgroups * 32u, partial = 0u;
    threadgroup float *table_memory = task.tables;
    threadgroup code_value *tables = (threadgroup code_value *)table_memory;
    column_memory memory = column_memory_of(task.kept, uint(8 * F));
    tile_range seen = tiles_seen(args, task.first_column, task.pages.list);
    threadgroup_tiles tiles = open_threadgroup(args, task, seen, F <= 2);
    matrix_state<D, F> state;
    matrix_walk<D, F> walk;
    walk.base = find_begin(args, task, seen, tiles, walk.steps, walk.search);
    walk.newest = newest_of_columns(args, task.first_column);
    open_key_batch<D, F>(args, task, first_part(args, task), walk.base.keys, walk.keys);
    if (HOLDS_NORMS(F)) load_tile_norms<D>(args, task, walk.base, walk.norms);
    load_value_book(key_format, false, tables, thread_index, n_threads);
    load_value_book(value_format, true, tables + 256, thread_index, n_threads);
    load_matrix_queries<D, F>(args, task, first_part(args, task), memory);
    threadgroup uchar *pairs = (threadgroup uchar *)(table_memory + 256 + max(1u << codebook_bits(value_format), 4u));
    value_book key_book = open_value_book(key_format, tables, pairs, task.lane);
    value_book out_book = open_value_book(value_format, tables + 256, pairs, task.lane);
    if (has_pairs(key_format)) load_pairs(tables, false, thread_index, n_threads, pairs);
    if (has_pairs(value_format)) load_pairs(tables + 256, true, thread_index, n_threads, pairs);
    open_columns(args, task, memory, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tiles.alone) {
        attend_matrix_strand<D, F>(args, task, tiles.strand, key_book, out_book, memory, walk);
        return;
    }
    for (uint stretch = tiles.own.begin; stretch < tiles.own.end; stretch++) {
        clear_matrices(state);
        uint end = min(seen.end, first_tile_of_stretch(args, stretch + 1u));
        add_matrix_tiles<D, F>(args, task, tiles.idle ? 0u : end, key_book, out_book, walk, state);
        partial = keep_columns<D, F>(args, task, tiles.own, stretch, memory, state);
    }
    store_columns(args, task, partial, memory);
}

// How many columns there are chooses the code here and nowhere else.
template <int D>
inline void attend_with_matrices(constant tqkv__attend_args &args, thread const attend_task &task)
{
    const int most = TQKV__MOST_MATRIX_COLUMNS(D) / 8;
    if (most == 1 || columns <= 8)
        attend_by_matrices<D, 1>(args, task);
    else if (most == 2 || columns <= 16)
        attend_by_matrices<D, 2>(args, task);
    else
        attend_by_matrices<D, most>(args, task);
}

#endif

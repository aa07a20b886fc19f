// A strand of a stretch by lanes: strand.h says what it is. Each simdgroup has the scores of one tile as in attend.h,
// and adds up its part of the values of all four. Then the kernel attend, of strands and of stretches.
//
// Letters: as in attend.h.
#ifndef TQKV_ATTEND_STRAND_H
#define TQKV_ATTEND_STRAND_H
#include "strand.h"

// ---- Softmax: the maxima of the tiles, one after another, as if one simdgroup had them all ----

// The largest score of each column in the simdgroup's tile: [C][TQKV__STRANDS]. A barrier must follow.
template <int C>
inline void store_tile_maxima(thread const attend_task &task, thread const float *score)
{
    FOR_COLUMNS(c)
    {
        float largest = rint(simd_max(score[c]));
        if (task.lane == 0) task.states[uint(c * TQKV__STRANDS) + task.simdgroup] = largest;
    }
}

inline tile_maxima maxima_of_column(thread const attend_task &task, uint c)
{
    tile_maxima maxima = {task.states + c * uint(TQKV__STRANDS), 1u};
    return maxima;
}

// ---- Weights of the tiles, and their sums: behind a tile's weights what its lanes add to the sums, [C][32] ----

template <int D>
inline threadgroup float *weights_of_tile(thread const attend_task &task, uint number)
{
    return task.weights + number * ATTEND_SUM_FLOATS(D);
}

inline uint shares_after_weights() { return columns <= 2 ? 64u : (columns + 3u) / 4u * 128u; }

template <int D>
inline void weigh_strand_tile(thread const attend_task &task, uint row, float value_scale, thread const float *score,
                              thread const bool *seen, thread column_state<D> &state)
{
    const int C = TQKV__MAX_COLUMNS(D);
    threadgroup float *weights = weights_of_tile<D>(task, task.simdgroup), *shares = weights + shares_after_weights();
    FOR_COLUMNS(c) { state.maximum[c] = maximum_after(maxima_of_column(task, uint(c)), task.simdgroup + 1u); }
    store_tile_weights(row, value_scale, score, seen, state, weights);
    FOR_COLUMNS(c) shares[uint(c) * 32u + task.lane] = state.sum[c];
}

// Maximum and sum of a strand's columns, for attend_merge: each simdgroup has its own columns.
template <int D>
inline void store_strand_states(constant tqkv__attend_args &args, thread const attend_task &task, uint used,
                                column_memory memory)
{
    for (uint c = task.simdgroup; c < used; c += uint(TQKV__STRANDS)) {
        tile_maxima maxima = maxima_of_column(task, c);
        float sum = 0.0f, maximum = maximum_after(maxima, uint(TQKV__STRANDS));
        TQKV_UNROLL
        for (int i = 0; i < TQKV__STRANDS; i++) {
            float own = weights_of_tile<D>(task, uint(i))[shares_after_weights() + c * 32u + task.lane];
            sum = sum * shrink_before(maxima, i) + own;
        }
        sum = simd_sum(sum);
        if (task.lane == 0)
            store_column(args, task, task.split, c, memory, maximum == NOTHING_SEEN ? -INFINITY : maximum, sum);
    }
}

// ---- Values: the lanes lie across a row as in attend_values.h, but four of them have the 8 values of one there ----

#define STRAND_VALUES   2                                // a lane has of a piece
#define STRAND_STEPS(D) (TQKV__STRANDS * VALUE_LANES(D)) // of all tiles
#define STRAND_BATCH(D) \
    (TQKV_STRAND_WORDS / VALUE_PIECES(D) < 2 * VALUE_LANES(D) ? TQKV_STRAND_WORDS / VALUE_PIECES(D) \
                                                              : 2 * VALUE_LANES(D))
#define STRAND_SUMS(D)  (STRAND_VALUES * VALUE_PIECES(D))
#define STRAND_QUADS(D) uint(VALUE_LANES(D) / TQKV__STRANDS) // of four lanes, of a simdgroup and row

// The lane of attend_values.h whose values the lane has a part of: it may have none.
template <int D>
inline uint strand_part(thread const attend_task &task)
{
    return task.simdgroup * STRAND_QUADS(D) + task.lane / 4u % STRAND_QUADS(D);
}

template <int D, int W>
struct strand_steps {
    value_step<D, W, STRAND_VALUES> step[STRAND_BATCH(D)];
};

template <int D>
struct any_strand_steps {
    strand_steps<D, 4> of_4;
    strand_steps<D, 8> of_8;
    strand_steps<D, 16> of_16;
};

// Steps count through all tiles.
template <int D, int W>
inline void load_strand_step(constant tqkv__attend_args &args, thread const attend_task &task,
                             thread const strand_slots &slots, int number, uint value,
                             thread value_step<D, W, STRAND_VALUES> &step)
{
    const int L = VALUE_LANES(D);
    load_value_step(args, task, slots.base[number / L], uint(number % L), value, step);
}

template <int D, int W>
inline void load_strand_steps(constant tqkv__attend_args &args, thread const attend_task &task,
                              thread const strand_slots &slots, uint value, thread strand_steps<D, W> &steps)
{
    TQKV_UNROLL
    for (int b = 0; b < STRAND_BATCH(D); b++) load_strand_step(args, task, slots, b, value, steps.step[b]);
}

// The sums of the tiles before tile i, brought to its maxima.
template <int D>
inline void shrink_sums(thread const attend_task &task, int i,
                        thread float (&out)[TQKV__MAX_COLUMNS(D)][STRAND_SUMS(D)])
{
    const int C = TQKV__MAX_COLUMNS(D);
    FOR_COLUMNS(c)
    {
        float shrink = shrink_before(maxima_of_column(task, uint(c)), i);
        TQKV_UNROLL
        for (int v = 0; v < STRAND_SUMS(D); v++) out[c][v] *= shrink;
    }
}

// `steps` holds the first ones. Each later one is loaded as soon as an earlier one makes room.
template <int D, int W>
inline void add_strand_values(constant tqkv__attend_args &args, thread const attend_task &task,
                              thread const strand_slots &slots, uint value, thread const codebook &book,
                              thread strand_steps<D, W> &steps,
                              thread float (&out)[TQKV__MAX_COLUMNS(D)][STRAND_SUMS(D)])
{
    const int L = VALUE_LANES(D), B = STRAND_BATCH(D);
    TQKV_UNROLL
    for (int i = 0; i < TQKV__STRANDS; i++) {
        if (i > 0) shrink_sums<D>(task, i, out);
        TQKV_UNROLL
        for (int s = 0; s < L; s++) {
            const int number = i * L + s;
            add_value_step(steps.step[number % B], uint(s), task.lane, book, weights_of_tile<D>(task, uint(i)), out);
            if (number + B < STRAND_STEPS(D))
                load_strand_step(args, task, slots, number + B, value, steps.step[number % B]);
        }
    }
}

// The sums over the lanes whose rows differ, in the order of add_lanes.
template <int D>
inline void store_strand_sums(constant tqkv__attend_args &args, thread const attend_task &task, uint used, uint value,
                              column_memory memory, thread float (&out)[TQKV__MAX_COLUMNS(D)][STRAND_SUMS(D)])
{
    const int C = TQKV__MAX_COLUMNS(D);
    const uint n_rows = uint(args.n_queries) * uint(args.n_kv_heads) * uint(args.group);
    const bool own = task.lane < uint(VALUE_LANES(D)) && strand_part<D>(task) < uint(LANE_SPAN(D));
    FOR_COLUMNS(c)
    {
        TQKV_UNROLL
        for (int v = 0; v < STRAND_SUMS(D); v++) {
            TQKV_UNROLL
            for (int distance = VALUE_LANES(D); distance < 32; distance *= 2)
                out[c][v] += simd_shuffle_xor(out[c][v], ushort(distance));
        }
        if (!own || uint(c) >= used) continue;
        ulong row = row_offset(task.split, n_rows) + ulong(memory.rows[c]);
        device float *to = task.partial_out + (row * ulong(D) + ulong(value));
        TQKV_UNROLL
        for (int v = 0; v < STRAND_SUMS(D); v++)
            to[v / STRAND_VALUES * LANE_SPAN(D) * 8 + v % STRAND_VALUES] = out[c][v];
    }
}

// ---- The strand ----

template <int KD, int VD>
inline void attend_strand(constant tqkv__attend_args &args, thread const attend_task &task,
                          thread const strand_tiles &tiles, thread const codebooks &books, column_memory memory,
                          thread tile_walk<KD> &walk, thread column_state<VD> &state)
{
    const int C = TQKV__MAX_COLUMNS(VD), T = TQKV__TAIL_DIM(KD);
    const uint used = min(uint(columns), end_of_columns(args, task) - task.first_column);
    const uint value = min(strand_part<VD>(task), uint(LANE_SPAN(VD)) - 1u) * 8u + task.lane % 4u * uint(STRAND_VALUES);
    const strand_slots slots = find_strand(args, task, tiles);
    tile_place at = walk.next;
    float score[C], out[C][STRAND_SUMS(VD)];
    bool seen[C];
    clear_sums(state);
    if (!has_tile(tiles, walk.steps.tile)) at.position = 0x7fffffff;
    float key_scale = row_scale<KD>(
        key_format, task.keys, key_slot(args, task.pages, rows_apart(), at.base.keys, at.row), args.key_block_scale);
    float value_scale = row_scale<VD>(value_format, task.values, value_slot(args, task.pages, at.base.values, at.row),
                                      args.value_block_scale);
    any_strand_steps<VD> steps;
    WITH_CODES(value_format, steps, load_strand_steps<VD, W>(args, task, slots, value, codes));
    score_any_tile<KD, C>(args, task, first_part(args, task), at.base.keys, at.base.keys, books.keys, walk.keys, score);
    add_tail<KD, T, C>(args, task, at.base.tail, at.base.tail, at.row, books.tail, walk.tail, key_scale, score);
    mask_scores(args, task, at, key_scale, state, score, seen);
    store_tile_maxima<C>(task, score);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    weigh_strand_tile(task, at.row, value_scale, score, seen, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    TQKV_UNROLL
    for (int c = 0; c < C; c++) {
        TQKV_UNROLL
        for (int v = 0; v < STRAND_SUMS(VD); v++) out[c][v] = 0.0f;
    }
    WITH_CODES(value_format, steps, add_strand_values<VD, W>(args, task, slots, value, books.values, codes, out));
    store_strand_sums<VD>(args, task, used, value, memory, out);
    store_strand_states<VD>(args, task, used, memory);
}

// ---- The kernel ----

template <int KD, int VD>
inline void attend(constant tqkv__attend_args &args, thread const attend_task &task)
{
    const int C = TQKV__MAX_COLUMNS(VD);
    const uint n_threads = task.n_simdgroups * 32u;
    uint thread_index = task.simdgroup * 32u + task.lane, partial = 0u;
    column_memory memory = column_memory_of(task.kept, uint(C));
    tile_range seen = tiles_seen(args, task.first_column, task.pages.list);
    threadgroup_tiles tiles = open_threadgroup(args, task, seen, true);
    column_state<VD> state;
    tile_walk<KD> walk;
    tile_memory base = find_begin(args, task, seen, tiles, walk.steps, walk.search);
    walk.next = open_tile(args, base, walk.steps.tile, row_of_lane<KD>(key_format, task.lane));
    open_keys<KD>(args, task, first_part(args, task), walk.next.base.keys, walk.keys);
    open_tail<KD, TQKV__TAIL_DIM(KD)>(args, task, walk.next.base.tail, walk.tail);
    load_codebook(key_format, task.tables, thread_index, n_threads);
    load_codebook(value_format, task.tables + 256, thread_index, n_threads);
    if (tail_values<KD>() != 0) load_codebook(tail_format, task.tail_table, thread_index, n_threads);
    load_queries<KD>(args, task, memory);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    codebooks books = open_codebooks(task);
    find_newest<VD>(args, task.first_column, state);
    FOR_COLUMNS(c) state.shift[c] = has_shifts() ? memory.shifts[c] : 0.0f;
    if (tiles.alone) {
        attend_strand<KD, VD>(args, task, tiles.strand, books, memory, walk, state);
        return;
    }
    for (uint stretch = tiles.own.begin; stretch < tiles.own.end; stretch++) {
        clear_sums<VD>(state);
        uint end = min(seen.end, first_tile_of_stretch(args, stretch + 1u));
        add_tiles<KD, VD>(args, task, tiles.idle ? 0u : end, books, walk, state);
        partial = keep_stretch<VD>(args, task, tiles.own, stretch, memory, state);
    }
    store_columns(args, task, partial, memory);
}

#endif

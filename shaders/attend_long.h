// attend_matrix for rows too long for the sums of one simdgroup: head_dim 448 and 512, which latent caches have. The
// simdgroups of a threadgroup go through the context together, in rounds of one tile each.
//
// Within a round
//   scores   each simdgroup has those of its own tile, as in attend_matrix.h, and adds those of the tail
//   softmax  they agree on the maxima of the columns; each turns its own scores into weights, in threadgroup memory
//   values   each simdgroup adds up its own part of the rows, over all tiles of the round
// So a threadgroup fetches a row once, and a simdgroup has registers for the sums of its part.
//
// Letters: as in attend_matrix.h; T head_dim of a tail.
#ifndef TQKV_ATTEND_LONG_H
#define TQKV_ATTEND_LONG_H
#include "attend_matrix.h"

// The rounds of a stretch: `tiles` of them from tile `first` on. Tiles outside [begin, end) and in the gap are left
// out.
struct long_rounds {
    uint first, begin, end, gap_begin, gap_end;
};

inline long_rounds open_rounds(constant tqkv__attend_args &args, tile_range seen, uint stretch)
{
    long_rounds rounds;
    rounds.first = first_tile_of_stretch(args, stretch);
    rounds.begin = max(seen.begin, rounds.first);
    rounds.end = min(seen.end, first_tile_of_stretch(args, stretch + 1u));
    rounds.gap_begin = seen.gap_begin;
    rounds.gap_end = seen.gap_end;
    return rounds;
}

inline bool has_tile(long_rounds rounds, uint tile)
{
    return tile >= rounds.begin && tile < rounds.end && (tile < rounds.gap_begin || tile >= rounds.gap_end);
}

// The first tile of the round that has a tile.
inline uint round_of(long_rounds rounds, uint tile)
{
    const uint n = uint(TQKV__LONG_SIMDGROUPS);
    return tile - (tile - rounds.first) % n;
}

inline uint next_round(long_rounds rounds, uint round)
{
    uint next = round + uint(TQKV__LONG_SIMDGROUPS);
    bool inside = next >= rounds.gap_begin && next + uint(TQKV__LONG_SIMDGROUPS) <= rounds.gap_end;
    return inside ? round_of(rounds, rounds.gap_end) : next;
}

// ---- Slots: where rows lie apart, those of all values of a round, which each simdgroup reads ----

// Behind the states: [n_simdgroups][2][32], of two rounds in turns.
inline void open_round_slots(uint C, thread attend_task &task)
{
    threadgroup float *behind = task.states + task.n_simdgroups * uint(TQKV__STATE_BYTES(C) / 4);
    task.pages.slots = (threadgroup uint *)behind;
    task.pages.shared_values = rows_apart();
}

inline uint shared_slots(uint number, uint parity) { return (number * 2u + parity) * 32u; }

// Stores what the lanes found of the simdgroup's own tile. A barrier must follow, and one precede so that the round
// before that one is done.
inline void share_round(thread const attend_task &task, tile_memory found, uint parity)
{
    if (task.pages.shared_values) task.pages.slots[shared_slots(task.simdgroup, parity) + task.lane] = found.values;
}

// Where the values of tile number `number` of a round are, as in tile_memory: of the last one also behind it.
inline uint values_of_tile(constant tqkv__attend_args &args, thread const attend_task &task, uint round, uint parity,
                           uint number)
{
    if (task.pages.shared_values) return shared_slots(min(number, uint(TQKV__LONG_SIMDGROUPS) - 1u), parity);
    return find_tile(args, task.pages, round + number).values;
}

// ---- Scores ----

struct value_books {
    value_book keys, values, tail;
};

// What a lane loads of a tile's tail before it is used: its first codes, and its norms.
template <int T, int F>
struct tail_codes {
    any_key_batch<T, F> codes;
    float norms[4];
};

template <int D, int T, int F>
inline void open_tail(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                      thread tail_codes<T, F> &keys)
{
    open_key_batch<T, F>(args, task, tail_part<D>(task), base, keys.codes);
    load_norms<T>(args, task.pages, tail_format, tail_rows_apart(), task.tail, base, keys.norms);
}

// Scores of the tail, times what makes them as large as those of the keys, which get their own factors.
template <int D, int T, int F>
inline void add_matrix_tail(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                            thread const value_book &book, column_memory memory, thread float (&norms)[4],
                            thread tail_codes<T, F> &keys, thread sum_matrix (&score)[4][F])
{
    sum_matrix tail[4][F];
    score_any_matrix_tile<T, F>(args, task, tail_part<D>(task), base, base, book, keys.codes, tail);
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = min(uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane), columns - 1u);
            float factor = memory.tails[c];
            TQKV_UNROLL
            for (int p = 0; p < 4; p++) {
                float own = tail[p][f].elements[i] * (factor * scale_of_norm<T>(tail_format, keys.norms[p], 1.0f));
                float scale = scale_of_norm<D>(key_format, norms[p], args.key_block_scale);
                score[p][f].elements[i] = fma(score[p][f].elements[i], scale, own);
            }
        }
    }
}

// What a simdgroup carries from round to round: the first codes of its next tile.
template <int D, int F>
struct long_walk {
    newest_range newest;
    tile_memory base;
    any_key_batch<D, F> keys;
};

template <int D, int F>
inline void open_walk(constant tqkv__attend_args &args, thread const attend_task &task, uint round,
                      thread long_walk<D, F> &walk)
{
    walk.base = find_tile(args, task.pages, round + task.simdgroup);
    open_key_batch<D, F>(args, task, first_part(args, task), walk.base.keys, walk.keys);
}

// Scores in powers of two of the simdgroup's tile of a round; next: the next round.
template <int D, int F>
inline void score_long_tile(constant tqkv__attend_args &args, thread const attend_task &task, long_rounds rounds,
                            uint round, uint next, thread const value_books &books, column_memory memory,
                            thread const matrix_state<TQKV__LONG_VALUES, F> &state, thread long_walk<D, F> &walk,
                            thread sum_matrix (&score)[4][F])
{
    const int T = TQKV__TAIL_DIM(D);
    const uint tile = round + task.simdgroup;
    const bool exists = has_tile(rounds, tile), whole = sees_whole_tile(args, tile, walk.newest);
    tile_memory base = walk.base;
    tile_norms norms; // none of the values: their scales come with the weights
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) norms.keys[p] = norms.values[p] = 0.0f;
    load_norms<D>(args, task.pages, key_format, rows_apart(), task.keys, base.keys, norms.keys);
    tail_codes<T, F> tail;
    if (tail_format != 0) open_tail<D, T, F>(args, task, base.tail, tail);
    walk.base = find_tile(args, task.pages, next + task.simdgroup);
    score_any_matrix_tile<D, F>(args, task, first_part(args, task), base.keys, walk.base.keys, books.keys, walk.keys,
                                score);
    if (tail_format != 0) add_matrix_tail<D, T, F>(args, task, base.tail, books.tail, memory, norms.keys, tail, score);
    finish_scores<D>(args, task, tile, base, whole, state, norms, score);
    if (!exists) clear_to_nothing(score);
}

// ---- Softmax ----

// Raises the maxima as attend.h does it, by the scores of all tiles of the round: all simdgroups to the same.
template <int P, int F>
inline void raise_to_round(thread const attend_task &task, thread matrix_state<P, F> &state)
{
    bool raised = false;
    float shrink[F][2];
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            threadgroup const float *maxima = task.states + uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            float largest = -INFINITY, before = state.maximum[f][i];
            TQKV_UNROLL
            for (int s = 0; s < TQKV__LONG_SIMDGROUPS; s++) largest = max(largest, maxima[s * 8 * F]);
            largest = largest > before + 11.0f ? largest : before;
            shrink[f][i] = share_of(before, largest);
            state.maximum[f][i] = largest;
            raised = raised || largest != before;
        }
    }
    if (!simd_any(raised)) return;
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            state.sum[f][i] *= shrink[f][i];
            TQKV_UNROLL
            for (int b = 0; b < P / 8; b++) state.out[b][f].elements[i] *= shrink[f][i];
        }
    }
}

// ---- Values ----

// The values' norms of a block in the lane's rows of a tile. They are loaded a tile ahead: nothing is computed from
// them before.
template <int D>
inline void load_part_norms(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint block,
                            thread float (&norms)[4])
{
    if (!has_norms(value_format)) return;
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        uint slot = value_slot(args, task.pages, base, tile_row(p, TQKV__MATRIX_ROW(task.lane)));
        norms[p] = task.values.norms[ulong(slot) * ulong(uint(D) / norm_block<D>(value_format)) + block];
    }
}

// Weights of tile number `number` of the round with these norms, as right factors. Where no weight is, a norm may be
// NaN.
template <int D, int F>
inline void scale_long_weights(constant tqkv__attend_args &args, thread const attend_task &task, uint number,
                               thread const float (&norms)[4], thread right_pair (&right)[2][F])
{
    float scaled[4][F][2];
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        float scale = has_norms(value_format) ? code_scale<D>(value_format, norms[p], args.value_block_scale) : 1.0f;
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            float2 two = *weights_at<F>(task.weights, task.lane, number, p, f);
            scaled[p][f][0] = two.x * (two.x > 0.0f ? scale : 0.0f);
            scaled[p][f][1] = two.y * (two.y > 0.0f ? scale : 0.0f);
        }
    }
    TQKV_UNROLL
    for (int h = 0; h < 2; h++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++)
            right[h][f] = right_of_sums(scaled[2 * h][f][0], scaled[2 * h][f][1], scaled[2 * h + 1][f][0],
                                        scaled[2 * h + 1][f][1], has_norms(value_format));
    }
}

// ---- Weights that are right factors already ----

// Where products take right factors from threadgroup memory, the simdgroup of a tile makes them of its weights, one set
// for each norm of a row. Simdgroups that multiply together must have the same norm.
template <int D>
inline bool shares_rights()
{
    return TQKV_STORED_RIGHTS && norm_block<D>(value_format) % uint(4 * TQKV__LONG_VALUES) == 0;
}

// Those of half h of a tile: [blocks][simdgroups][2][F]
template <int F>
inline threadgroup right_pair *rights_at(thread const attend_task &task, uint block, uint simdgroup, uint h)
{
    threadgroup float *weights = task.weights;
    return (threadgroup right_pair *)weights + ((block * task.n_simdgroups + simdgroup) * 2u + h) * uint(F * 32);
}

template <int D, int F>
inline void load_weight_norms(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                              thread float (&norms)[2][4])
{
    if (!has_norms(value_format)) return;
    TQKV_UNROLL
    for (int b = 0; b < 2; b++)
        if (uint(b) < uint(D) / norm_block<D>(value_format)) load_part_norms<D>(args, task, base, uint(b), norms[b]);
}

template <int D, int F>
inline void store_rights(constant tqkv__attend_args &args, thread const attend_task &task,
                         thread const float (&norms)[2][4], thread const sum_matrix (&weight)[4][F])
{
    TQKV_UNROLL
    for (int b = 0; b < 2; b++) {
        if (uint(b) >= uint(D) / norm_block<D>(value_format)) continue;
        float scaled[4][F][2];
        TQKV_UNROLL
        for (int p = 0; p < 4; p++) {
            float scale =
                has_norms(value_format) ? code_scale<D>(value_format, norms[b][p], args.value_block_scale) : 1.0f;
            TQKV_UNROLL
            for (int f = 0; f < F; f++) {
                TQKV_UNROLL
                for (int i = 0; i < 2; i++) {
                    float x = weight[p][f].elements[i];
                    scaled[p][f][i] = x * (x > 0.0f ? scale : 0.0f);
                }
            }
        }
        TQKV_UNROLL
        for (int h = 0; h < 2; h++) {
            TQKV_UNROLL
            for (int f = 0; f < F; f++)
                store_right(rights_at<F>(task, uint(b), task.simdgroup, uint(h)) + f * 32, task.lane,
                            right_of_sums(scaled[2 * h][f][0], scaled[2 * h][f][1], scaled[2 * h + 1][f][0],
                                          scaled[2 * h + 1][f][1], has_norms(value_format)));
        }
    }
    publish_rights();
}

// As multiply_values.
template <int D, int W, int P, int F>
inline void multiply_by_rights(int chunk, thread const value_chunk<D, W> &values, thread const value_book &book,
                               threadgroup const right_pair *right, uint lane, thread matrix_state<P, F> &state)
{
    const int N = MATRIX_OUT_VALUES(D, W);
    const int G = N % 4 == 0 ? 2 : 1;
    bool exact = !has_codebook(value_format), wide = has_norms(value_format);
    TQKV_UNROLL
    for (int i = 0; i < N; i += 2 * G) {
        left_block left[G];
        decode_values<G, F>(values, i, book, left);
        multiply_stored<G, F>(left, right, 1u, lane, wide, exact, has_pairs(value_format), &state.out[chunk * N + i]);
    }
}

// Chunks of a simdgroup's part of a row.
#define LONG_CHUNKS(D, W) (TQKV__LONG_VALUES / (8 * MATRIX_OUT_VALUES(D, W)))

template <int D, int W>
inline void load_part(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint chunk,
                      thread value_chunk<D, W> (&values)[2])
{
    TQKV_UNROLL
    for (int h = 0; h < 2; h++)
        load_value_chunk<D, W>(args, task, base, task.simdgroup * uint(LONG_CHUNKS(D, W)) + chunk, uint(h), values[h]);
}

// What a lane loads ahead of a tile's values: the first chunk of the simdgroup's part, and its norms.
template <int D, int W>
struct part_values {
    value_chunk<D, W> chunk[2];
    float norms[4];
};

// The first block of the simdgroup's part of a row; of halves 0.
template <int D>
inline uint block_of_part(uint simdgroup)
{
    return simdgroup * uint(TQKV__LONG_VALUES) / norm_block<D>(value_format);
}

template <int D, int W>
inline void open_part(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                      thread part_values<D, W> &values)
{
    load_part<D, W>(args, task, base, 0u, values.chunk);
    if (!shares_rights<D>()) load_part_norms<D>(args, task, base, block_of_part<D>(task.simdgroup), values.norms);
}

// Adds the simdgroup's part of the values of a tile, which `values` was opened for.
template <int D, int W, int F>
inline void add_part(constant tqkv__attend_args &args, thread const attend_task &task, uint number, uint base,
                     bool whole, thread const value_book &book, thread part_values<D, W> &values,
                     thread matrix_state<TQKV__LONG_VALUES, F> &state)
{
    const int N = MATRIX_OUT_VALUES(D, W), chunks = LONG_CHUNKS(D, W);
    const uint block_chunks = norm_block<D>(value_format) / uint(8 * N), first = task.simdgroup * uint(chunks);
    right_pair right[2][F];
    TQKV_UNROLL
    for (int j = 0; j < chunks; j++) {
        uint chunk = first + uint(j);
        bool begins = !shares_rights<D>() && j != 0 && chunk % block_chunks == 0; // a block
        if (begins) load_part_norms<D>(args, task, base, chunk / block_chunks, values.norms);
        if (!shares_rights<D>() && (begins || j == 0))
            scale_long_weights<D, F>(args, task, number, values.norms, right);
        TQKV_UNROLL
        for (int h = 0; h < 2; h++) {
            if (W == 16 && !whole) clear_not_finite<W, N>(values.chunk[h].raw);
            if (shares_rights<D>())
                multiply_by_rights(j, values.chunk[h], book,
                                   rights_at<F>(task, block_of_part<D>(task.simdgroup), number, uint(h)), task.lane,
                                   state);
            else
                multiply_values(j, values.chunk[h], book, right[h], state);
        }
        if (j + 1 < chunks) load_part<D, W>(args, task, base, uint(j + 1), values.chunk);
    }
    // Not once a round: ptxas serialises all products of warpgroups where some are under way over a loop or a branch.
    finish_products<F>(state.out, TQKV__LONG_VALUES / 8);
}

// Word by word: Apple's modules copy no structs by a call.
template <int D, int W>
inline void copy_part(thread const part_values<D, W> &from, thread part_values<D, W> &to)
{
    const int N = MATRIX_OUT_VALUES(D, W);
    TQKV_UNROLL
    for (int i = 0; i < 8; i++) {
        TQKV_UNROLL
        for (int w = 0; w < (W * N + 31) / 32; w++)
            to.chunk[i / 4].raw[i % 4].main[w] = from.chunk[i / 4].raw[i % 4].main[w];
        TQKV_UNROLL
        for (int w = 0; w < (2 * N + 31) / 32; w++)
            to.chunk[i / 4].raw[i % 4].upper[w] = from.chunk[i / 4].raw[i % 4].upper[w];
    }
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) to.norms[p] = from.norms[p];
}

// The same for all tiles of a round.
template <int D, int W, int F>
inline void add_parts(constant tqkv__attend_args &args, thread const attend_task &task, long_rounds rounds, uint round,
                      uint parity, newest_range newest, thread const value_book &book, thread part_values<D, W> &values,
                      thread matrix_state<TQKV__LONG_VALUES, F> &state)
{
    uint base = values_of_tile(args, task, round, parity, 0u);
    for (uint s = 0; s < uint(TQKV__LONG_SIMDGROUPS); s++) {
        uint tile = round + s, next_base = values_of_tile(args, task, round, parity, s + 1u);
        part_values<D, W> next;
        open_part<D, W>(args, task, next_base, next);
        if (has_tile(rounds, tile))
            add_part<D, W, F>(args, task, s, base, sees_whole_tile(args, tile, newest), book, values, state);
        copy_part<D, W>(next, values);
        base = next_base;
    }
}

template <int D>
struct any_part_values {
    part_values<D, 4> of_4;
    part_values<D, 8> of_8;
    part_values<D, 16> of_16;
};

// The values of the first tile of a round.
template <int D>
inline void open_parts(constant tqkv__attend_args &args, thread const attend_task &task, uint round, uint parity,
                       thread any_part_values<D> &values)
{
    uint base = values_of_tile(args, task, round, parity, 0u);
    if (task.simdgroup * uint(TQKV__LONG_VALUES) >= uint(D)) return;
    WITH_CODES(value_format, values, open_part<D, W>(args, task, base, codes));
}

// ---- The end of a stretch ----

// M: 2 or 4
template <int M>
inline void store_floats(thread const float *x, device float *to)
{
    if (M == 4) return store_four(x, to);
    to[0] = x[0];
    to[1] = x[1];
}

// Adds the simdgroup's part of the sums to a partial result and, at the end of a section, to the first.
template <int D, int N, int F>
inline void store_part(thread const attend_task &task, column_memory memory, column_end how,
                       thread const matrix_state<TQKV__LONG_VALUES, F> &state)
{
    const int M = N % 4 == 0 ? 4 : 2;
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            if (c >= how.used) continue;
            float4 shares = *(threadgroup const float4 *)(memory.shares + c * 4u);
            device float *to = task.partial_out + row_offset(memory.rows[c], D) +
                               (task.simdgroup * uint(TQKV__LONG_VALUES) + TQKV__MATRIX_ROW(task.lane) * uint(N));
            TQKV_UNROLL
            for (int b = 0; b < TQKV__LONG_VALUES / 8; b += M) {
                device float *total = to + (b / N * 8 * N + b % N), *section = total + how.section;
                float own[M], kept[M], all[M];
                TQKV_UNROLL
                for (int j = 0; j < M; j++) {
                    own[j] = state.out[b + j][f].elements[i];
                    kept[j] = all[j] = 0.0f;
                }
                if (!how.copy) load_floats<M>(section, kept);
                add_floats<M>(shares.x, kept, shares.y, own);
                store_floats<M>(kept, section);
                if (!how.to_total) continue;
                if (!how.copy_to_total) load_floats<M>(total, all);
                add_floats<M>(shares.z, all, shares.w, kept);
                store_floats<M>(all, total);
            }
        }
    }
}

// As keep_stretch of attend.h.
template <int D, int F>
inline uint keep_parts(constant tqkv__attend_args &args, thread const attend_task &task, stretch_range own,
                       uint stretch, column_memory memory, thread matrix_state<TQKV__LONG_VALUES, F> &state)
{
    column_end how = open_end(args, task, own, stretch, uint(D));
    threadgroup_barrier(mem_flags::mem_threadgroup); // the states' memory holds maxima
    store_states(task, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (task.simdgroup == 0 && task.lane < uint(F * 8))
        combine_states<TQKV__LONG_SIMDGROUPS>(task, task.lane, memory, how);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (task.simdgroup * uint(TQKV__LONG_VALUES) < uint(D)) {
        if (code_width(value_format) == 4) store_part<D, MATRIX_OUT_VALUES(D, 4), F>(task, memory, how, state);
        if (code_width(value_format) == 8) store_part<D, MATRIX_OUT_VALUES(D, 8), F>(task, memory, how, state);
        if (code_width(value_format) == 16) store_part<D, MATRIX_OUT_VALUES(D, 16), F>(task, memory, how, state);
    }
    return how.to_total ? 0u : partial_of_section(args, task.split);
}

// ---- The kernel ----

template <int D, int F>
inline void add_rounds(constant tqkv__attend_args &args, thread const attend_task &task, long_rounds rounds,
                       thread const value_books &books, column_memory memory,
                       thread matrix_state<TQKV__LONG_VALUES, F> &state)
{
    long_walk<D, F> walk;
    walk.newest = newest_of_columns(args, task.first_column);
    uint round = round_of(rounds, rounds.begin), parity = 0u;
    open_walk<D, F>(args, task, round, walk);
    share_round(task, walk.base, parity);
    if (task.pages.shared_values) threadgroup_barrier(mem_flags::mem_threadgroup);
    while (round < rounds.end) {
        uint next = next_round(rounds, round);
        sum_matrix score[4][F];
        any_part_values<D> values;
        float norms[2][4];
        uint base = task.pages.shared_values ? shared_slots(task.simdgroup, parity) : walk.base.values;
        score_long_tile<D, F>(args, task, rounds, round, next, books, memory, state, walk, score);
        open_parts<D>(args, task, round, parity, values);
        if (shares_rights<D>()) load_weight_norms<D, F>(args, task, base, norms);
        store_maxima<F>(task, score);
        threadgroup_barrier(mem_flags::mem_threadgroup); // and weights and slots of the round before are used
        share_round(task, walk.base, 1u - parity);
        raise_to_round(task, state);
        weigh_scores(score, state);
        if (shares_rights<D>())
            store_rights<D, F>(args, task, norms, score);
        else
            store_tile_weights<F>(task, task.weights, score);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (task.simdgroup * uint(TQKV__LONG_VALUES) < uint(D)) {
            WITH_CODES(value_format, values,
                       add_parts<D, W, F>(args, task, rounds, round, parity, walk.newest, books.values, codes, state));
        }
        round = next;
        parity = 1u - parity;
    }
}

// The codebooks of all streams. A barrier must precede what looks values up, and the first half of it precede `pairs`.
inline void load_books(thread const attend_task &task, uint thread_index, uint n_threads)
{
    threadgroup float *tables = task.tables, *tail = task.tail_table;
    load_value_book(key_format, false, (threadgroup code_value *)tables, thread_index, n_threads);
    load_value_book(value_format, true, (threadgroup code_value *)tables + 256, thread_index, n_threads);
    if (tail_format != 0) load_value_book(tail_format, false, (threadgroup code_value *)tail, thread_index, n_threads);
}

inline value_books open_books(thread const attend_task &task, uint thread_index, uint n_threads)
{
    threadgroup float *memory = task.tables, *tail_memory = task.tail_table;
    threadgroup code_value *tables = (threadgroup code_value *)memory, *tail = (threadgroup code_value *)tail_memory;
    threadgroup uchar *pairs = (threadgroup uchar *)(memory + 256 + max(1u << codebook_bits(value_format), 4u));
    value_books books;
    books.keys = open_value_book(key_format, tables, pairs, task.lane);
    books.values = open_value_book(value_format, tables + 256, pairs, task.lane);
    books.tail = open_value_book(tail_format, tail, pairs, task.lane);
    if (has_pairs(key_format))
        load_pairs(tables, false, thread_index, n_threads, pairs);
    else if (has_pairs(tail_format)) // of the same codebook, if both are
        load_pairs(tail, false, thread_index, n_threads, pairs);
    if (has_pairs(value_format)) load_pairs(tables + 256, true, thread_index, n_threads, pairs);
    return books;
}

template <int D, int F>
inline void attend_rounds(constant tqkv__attend_args &args, thread const attend_task &task)
{
    const int T = TQKV__TAIL_DIM(D);
    uint thread_index = task.simdgroup * 32u + task.lane, n_threads = task.n_simdgroups * 32u, partial = 0u;
    column_memory memory = column_memory_of(task.kept, uint(8 * F));
    tile_range seen = tiles_seen(args, task.first_column, task.pages.list);
    stretch_range own = stretches_of_threadgroup(args, seen, task.split);
    matrix_state<TQKV__LONG_VALUES, F> state;
    load_books(task, thread_index, n_threads);
    load_matrix_queries<D, F>(args, task, first_part(args, task), memory);
    if (tail_format != 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_matrix_queries<T, F>(args, task, tail_part<D>(task), memory);
    }
    value_books books = open_books(task, thread_index, n_threads);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    open_columns(args, task, memory, state);
    for (uint stretch = own.begin; stretch < own.end; stretch++) {
        clear_matrices(state);
        add_rounds<D, F>(args, task, open_rounds(args, seen, stretch), books, memory, state);
        partial = keep_parts<D, F>(args, task, own, stretch, memory, state);
    }
    store_columns(args, task, partial, memory);
}

// As attend_with_matrices.
template <int D>
inline void attend_long_rows(constant tqkv__attend_args &args, thread const attend_task &task)
{
    const int most = TQKV__MOST_MATRIX_COLUMNS(D) / 8;
    if (most == 1 || columns <= 8)
        attend_rounds<D, 1>(args, task);
    else if (most == 2 || columns <= 16)
        attend_rounds < D, most<2 ? 1 : 2>(args, task);
    else
        attend_rounds<D, most>(args, task);
}

#endif

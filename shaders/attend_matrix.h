// Attention as attend.h, by products of 8x8 matrices: for groups of query heads that fill their columns. A product has
// a matrix unit of its own on some hardware, and shares its operands among the lanes on all. What a threadgroup works
// on and how it adds up is as in attend.h. Each simdgroup takes its own tiles of 32 slots.
//
// Within a tile
//   scores   S^T = K Q^T, [32 slots][columns]: a key is decoded into the lanes' elements of left factors
//   softmax  on the elements of S^T: a lane has the same columns in all matrices, and its own rows
//   values   O^T += V^T P^T, [D][columns]: the weights are where the scores were
// The values of a key may come in any order if those of the queries do, and so may the rows of O^T. So a lane takes
// neighbouring codes of a row, and loads up to 16 bytes at a time.
//
// Letters: D head_dim, W code width of a stored value, F matrices side by side that hold the columns, N values that a
// lane loads at a time, P values of a row that a simdgroup has sums of: all, but of long rows a part (attend_long.h).
#ifndef TQKV_ATTEND_MATRIX_H
#define TQKV_ATTEND_MATRIX_H
#include "matrix_columns.h"

// Columns whose queries are loaded at a time: of long rows as many as the memory of weights holds.
#define MATRIX_PASS(D, F) ((D) <= 256 ? 16 : 4 * (F))

// Row of a tile that is row or column k of matrix p. Lanes with column 2t of a left factor load the codes of row t for
// one element and of row t + 4 for the other: those of one load lie together.
inline uint tile_row(int p, uint k) { return uint(p) * 8u + k / 2u + k % 2u * 4u; }

// Norms of the lane's rows of a tile, where a row has one. They are loaded long before they are used: nothing is
// computed from them before that.
struct tile_norms {
    float keys[4], values[4];
};

template <int D>
inline void load_norms(constant tqkv__attend_args &args, thread const page_tables &pages, uint format, bool apart,
                       stream_rows rows, uint first, thread float (&norms)[4])
{
    if (!has_norms(format) || !one_norm<D>(format)) return;
    uint row = TQKV__MATRIX_ROW(pages.lane);
    device const float *at = rows.norms + (ulong(first) + ulong(tile_row(0, row)));
    TQKV_UNROLL
    for (int p = 0; p < 4; p++)
        norms[p] = short_store || apart ? rows.norms[key_slot(args, pages, apart, first, tile_row(p, row))] : at[8 * p];
}

template <int D>
inline void load_tile_norms(constant tqkv__attend_args &args, thread const attend_task &task, tile_memory base,
                            thread tile_norms &norms)
{
    load_norms<D>(args, task.pages, key_format, rows_apart(), task.keys, base.keys, norms.keys);
    if (same_slots || paged || has_list) {
        load_norms<D>(args, task.pages, value_format, rows_apart(), task.values, base.values, norms.values);
        return;
    }
    if (!has_norms(value_format) || !one_norm<D>(value_format)) return;
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        uint row = tile_row(p, TQKV__MATRIX_ROW(task.lane));
        norms.values[p] = task.values.norms[value_slot(args, task.pages, base.values, row)];
    }
}

// Factor of the codes of such a row; 1 where a row has several norms.
template <int D>
inline float scale_of_norm(uint format, float norm, float block_scale)
{
    return has_norms(format) && one_norm<D>(format) ? code_scale<D>(format, norm, block_scale) : 1.0f;
}

// Whether a walk holds the norms of its next tile.
#define HOLDS_NORMS(F) (TQKV_LOADS_AHEAD > 1 && (F) <= 2)

// The norms of the tile at slot `base`. If so the walk holds them, and loads those of the tile at `next_base`.
template <int D, int F>
inline void next_tile_norms(constant tqkv__attend_args &args, thread const attend_task &task, tile_memory base,
                            tile_memory next_base, thread tile_norms &held, thread tile_norms &norms)
{
    if (!HOLDS_NORMS(F)) {
        load_tile_norms<D>(args, task, base, norms);
        return;
    }
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        norms.keys[p] = held.keys[p];
        norms.values[p] = held.values[p];
    }
    load_tile_norms<D>(args, task, next_base, held);
}

// ---- Queries ----

// A power of two near the largest |x| of the simdgroup. Divided by it, all are below 2.
template <int D>
inline float size_of_row(thread const float *x)
{
    float largest = 0.0f;
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) largest = max(largest, fabs(x[i]));
    uint exponent = as_type<uint>(simd_max(largest)) & 0x7f800000u;
    return exponent == 0 || exponent > 0x7e800000u ? 1.0f : as_type<float>(exponent);
}

// Place of a value in row `row` of a pass. Lanes that store neighbours of one row, or load one value in 16 or 32 of
// several rows, meet in few banks.
inline uint staged_value(uint row, uint D, uint value)
{
    return row * D + (value ^ (((value >> 5) & 3u) << 3 ^ ((value >> 7) & 3u) << 1 ^ (row & 7u)));
}

// Rows of a pass as floats: [columns][D], in task.weights: there are no weights in memory here.
template <int D, int F>
inline void load_query_rows(constant tqkv__attend_args &args, thread const attend_task &task,
                            thread const key_part &keys, uint first, column_memory memory)
{
    const int L = TQKV__ROW_LANES(D), C = TQKV_ROW_PIECE(D);
    uint end = min(first + uint(MATRIX_PASS(D, F)), uint(columns)), part = lane_of_row<D>(task.lane);
    for (uint c = first + task.simdgroup; c < end; c += task.n_simdgroups) {
        query_row row = row_of_column(args, min(task.first_column + c, end_of_columns(args, task) - 1u));
        uint head = task.kv_head * uint(args.group) + uint(row.head);
        float x[TQKV_LANE_VALUES(D)];
        load_query<D>(args, task, keys, uint(row.query), head, x);
        float shift = keys.with_center ? score_of_center<D>(args, task, keys, x) : 0.0f;
        turn_query<D>(task, keys, x);
        float size = size_of_row<D>(x), inverse = 1.0f / size; // powers of two: both products are exact
        TQKV_UNROLL
        for (int i = 0; i < TQKV_LANE_VALUES(D); i++)
            if (task.lane < uint(L))
                task.weights[staged_value(c - first, uint(D), value_of_lane<L, C>(part, i))] = x[i] * inverse;
        if (task.lane != 0) continue;
        if (keys.first == 0) {
            memory.shifts[c] = shift;
            memory.factors[c] = size;
            memory.rows[c] = partial_row(args, row, head);
        } else {
            memory.shifts[c] += shift;
            memory.tails[c] = size / memory.factors[c];
        }
    }
}

// Number of the value of a query at row k of right factor s.
template <int D>
inline uint query_value(uint format, uint s, uint k)
{
    const uint N = uint(BY_CODE_WIDTH(format, MATRIX_KEY_VALUES, D));
    return s / (N / 2u) * (4u * N) + k / 2u * N + s % (N / 2u) * 2u + k % 2u;
}

inline threadgroup right_pair *query_at(thread const key_part &keys, uint number, uint lane)
{
    threadgroup float *queries = keys.queries;
    return (threadgroup right_pair *)queries + number * 32u + lane;
}

// The rows of a pass as pairs of right factors: [F][D / 16][32 lanes]. A column that is not used repeats the last one.
// A barrier must precede it, and follow.
template <int D, int F>
inline void arrange_queries(thread const attend_task &task, thread const key_part &keys, uint first)
{
    const uint pass = uint(MATRIX_PASS(D, F)), n = uint(D / 16);
    uint begin = first / 8u, end = min((first + pass + 7u) / 8u, uint(F));
    for (uint number = begin * n + task.simdgroup; number < end * n; number += task.n_simdgroups) {
        float x[4];
        bool own = true; // both columns of a lane belong to one pass
        TQKV_UNROLL
        for (int i = 0; i < 4; i++) {
            uint c = min(number / n * 8u + TQKV_RIGHT_COLUMN(task.lane, i % 2), columns - 1u), s = number % n * 2u;
            uint value = query_value<D>(keys.format, s + uint(i / 2), TQKV_RIGHT_ROW(task.lane, i % 2));
            if (pass < 8u) own = own && c >= first && c < first + pass;
            uint row = pass < 8u ? min(c - first, pass - 1u) : c - first; // a load under a condition stays in its loop
            x[i] = task.weights[staged_value(row, uint(D), value)];
        }
        right_pair right = right_of(x[0], x[1], x[2], x[3], false);
        if (own && TQKV_STORED_RIGHTS)
            store_right(query_at(keys, number, 0u), task.lane, right);
        else if (own)
            *query_at(keys, number, task.lane) = right;
    }
}

// A barrier must precede and follow it.
template <int D, int F>
inline void load_matrix_queries(constant tqkv__attend_args &args, thread const attend_task &task,
                                thread const key_part &keys, column_memory memory)
{
    for (uint first = 0; first < columns; first += uint(MATRIX_PASS(D, F))) {
        if (first != 0) threadgroup_barrier(mem_flags::mem_threadgroup);
        load_query_rows<D, F>(args, task, keys, first, memory);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        arrange_queries<D, F>(task, keys, first);
    }
    publish_rights();
}

// ---- Scores of one tile ----

// The lane's codes of one chunk: those of 4 rows, 8 apart.
template <int D, int W>
struct key_chunk {
    raw_codes<W, MATRIX_KEY_VALUES(D, W)> raw[4];
};

template <int D, int W>
inline void load_key_chunk(constant tqkv__attend_args &args, thread const attend_task &task,
                           thread const key_part &part, uint base, uint chunk, thread key_chunk<D, W> &keys)
{
    const int N = MATRIX_KEY_VALUES(D, W);
    const uint bytes = row_bytes<D>(part.format);
    uint first = (chunk * 4u + TQKV__MATRIX_COLUMN(task.lane) / 2u) * uint(N);
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        uint row = tile_row(p, TQKV__MATRIX_ROW(task.lane));
        device const uchar *codes = key_codes(args, task.pages, part.apart, part.rows.codes, bytes, base, row);
        load_codes<D, W, N>(part.format, codes, first, keys.raw[p]);
    }
}

// Chunks that a lane loads before it uses the first of them: two, or one where the sums leave no registers for more.
#define MATRIX_KEY_BATCH(D, W, F) \
    (TQKV_LOADS_AHEAD == 1 || ((F) > 2 && !TQKV_STORED_RIGHTS) || (D) / (4 * MATRIX_KEY_VALUES(D, W)) % 2 != 0 ? 1 : 2)

template <int D, int W, int F>
struct key_batch {
    key_chunk<D, W> chunks[MATRIX_KEY_BATCH(D, W, F)];
};

// Values i .. i + 3 of the lane's rows as left factors.
template <int D, int W, int F>
inline void decode_keys(uint format, thread const key_chunk<D, W> &keys, int i, thread const value_book &book,
                        thread left_block (&left)[2])
{
    const int N = MATRIX_KEY_VALUES(D, W);
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int k = 0; k < 2; k++)
            left[p / 2].parts[k][p % 2] = left_of_neighbours<W, N, F>(format, keys.raw[p], i + 2 * k, false, book);
    }
}

template <int F>
inline void clear_scores(thread sum_matrix (&score)[4][F])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) clear_matrix(score[p][f]);
    }
}

// score[p] += K Q^T over a chunk.
template <int D, int W, int F>
inline void multiply_chunk(thread const attend_task &task, thread const key_part &part, uint chunk,
                           thread const key_chunk<D, W> &keys, thread const value_book &book,
                           thread sum_matrix (&score)[4][F])
{
    const int N = MATRIX_KEY_VALUES(D, W);
    bool exact = !has_codebook(part.format);
    TQKV_UNROLL
    for (int i = 0; i < N; i += 4) {
        left_block left[2];
        right_pair right[F];
        if (TQKV_STORED_RIGHTS) {
            decode_keys<D, W, F>(part.format, keys, i, book, left);
            multiply_stored<2, F>(left, query_at(part, chunk * uint(N / 4) + uint(i / 4), 0u), uint(D / 16), task.lane,
                                  false, exact, has_pairs(part.format), score);
            continue;
        }
        TQKV_UNROLL
        for (int f = 0; f < F; f++)
            right[f] = *query_at(part, uint(f * D / 16) + chunk * uint(N / 4) + uint(i / 4), task.lane);
        decode_keys<D, W, F>(part.format, keys, i, book, left);
        multiply<2, F>(left, right, false, exact, has_pairs(part.format), score);
    }
}

// Norms of a block in the lane's rows, where a row has several. They are loaded before the block is multiplied.
template <int D>
inline void load_key_norms(constant tqkv__attend_args &args, thread const attend_task &task,
                           thread const key_part &part, uint base, uint block, thread float (&norms)[4])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        uint slot = key_slot(args, task.pages, part.apart, base, tile_row(p, TQKV__MATRIX_ROW(task.lane)));
        norms[p] = one_norm<D>(part.format) ? 1.0f : stored_norm<D>(part.format, part.rows, slot, block);
    }
}

// At the end of a block or a part of it: total += scale * score, and score starts again.
template <int D, int F>
inline void add_key_block(thread const key_part &part, thread const float (&norms)[4], thread sum_matrix (&score)[4][F],
                          thread sum_matrix (&total)[4][F])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        float scale = one_norm<D>(part.format) ? 1.0f : code_scale<D>(part.format, norms[p], part.block_scale);
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++)
                total[p][f].elements[i] = fma(scale, score[p][f].elements[i], total[p][f].elements[i]);
        }
    }
    clear_scores<F>(score);
}

// score = q . k, without the factor of rows that have one norm. `keys` holds the first chunks of the tile at slot
// `base`; at the end it holds those of the tile at `next_base`.
template <int D, int W, int F>
inline void score_matrix_tile(constant tqkv__attend_args &args, thread const attend_task &task,
                              thread const key_part &part, uint base, uint next_base, thread const value_book &book,
                              thread key_batch<D, W, F> &keys, thread sum_matrix (&score)[4][F])
{
    const int N = MATRIX_KEY_VALUES(D, W), chunks = D / (4 * N), B = MATRIX_KEY_BATCH(D, W, F);
    // Some hardware rounds sums of products towards 0: those of long rows are added up chunk by chunk, or there 128
    // values at a time.
    const bool in_one = one_norm<D>(part.format) && D <= 128;
    const uint block_chunks = one_norm<D>(part.format) ? uint(chunks) : norm_block<D>(part.format) / uint(4 * N);
    const uint least = one_norm<D>(part.format) ? 1u : block_chunks;
    const uint sum_chunks = TQKV_STORED_RIGHTS ? min(block_chunks, uint(128 / (4 * N))) : least;
    sum_matrix total[4][F];
    float norms[4];
    clear_scores<F>(score);
    if (!in_one) clear_scores<F>(total);
    TQKV_UNROLL
    for (int j = 0; j < chunks; j++) {
        if (!in_one && uint(j) % block_chunks == 0)
            load_key_norms<D>(args, task, part, base, uint(j) / block_chunks, norms);
        multiply_chunk<D, W, F>(task, part, uint(j), keys.chunks[j % B], book, score);
        load_key_chunk<D, W>(args, task, part, j + B < chunks ? base : next_base, uint((j + B) % chunks),
                             keys.chunks[j % B]);
        if (in_one || uint(j + 1) % sum_chunks != 0) continue;
        finish_products<F>(score, 4);
        add_key_block<D, F>(part, norms, score, total);
    }
    if (in_one) {
        finish_products<F>(score, 4);
        return;
    }
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) score[p][f] = total[p][f];
    }
}

// As any_keys of attend.h.
template <int D, int F>
struct any_key_batch {
    key_batch<D, 4, F> of_4;
    key_batch<D, 8, F> of_8;
    key_batch<D, 16, F> of_16;
};

template <int D, int W, int F>
inline void load_first_batch(constant tqkv__attend_args &args, thread const attend_task &task,
                             thread const key_part &part, uint base, thread key_batch<D, W, F> &keys)
{
    TQKV_UNROLL
    for (int b = 0; b < MATRIX_KEY_BATCH(D, W, F); b++)
        load_key_chunk<D, W>(args, task, part, base, uint(b), keys.chunks[b]);
}

template <int D, int F>
inline void open_key_batch(constant tqkv__attend_args &args, thread const attend_task &task,
                           thread const key_part &part, uint base, thread any_key_batch<D, F> &keys)
{
    WITH_CODES(part.format, keys, load_first_batch<D, W, F>(args, task, part, base, codes));
}

template <int D, int F>
inline void score_any_matrix_tile(constant tqkv__attend_args &args, thread const attend_task &task,
                                  thread const key_part &part, uint base, uint next_base, thread const value_book &book,
                                  thread any_key_batch<D, F> &keys, thread sum_matrix (&score)[4][F])
{
    WITH_CODES(part.format, keys, score_matrix_tile<D, W, F>(args, task, part, base, next_base, book, codes, score));
}

// ---- Softmax of one tile ----

// The oldest and the newest of the columns' newest positions.
struct newest_range {
    int least, most;
};

inline newest_range newest_of_columns(constant tqkv__attend_args &args, uint first_column)
{
    newest_range newest;
    newest.least = newest_seen(args, row_of_column(args, first_column).query);
    newest.most = newest_seen(args, row_of_column(args, first_column + columns - 1u).query);
    return newest;
}

// What a simdgroup carries from tile to tile.
template <int D, int F>
struct matrix_walk {
    tile_steps steps;
    tile_search search;
    tile_memory base; // of the next tile
    newest_range newest;
    any_key_batch<D, F> keys; // of that tile
    tile_norms norms;         // likewise, with few columns
};

// Whether all columns of the threadgroup see all slots of a tile, and no slot belongs to another tile.
inline bool sees_whole_tile(constant tqkv__attend_args &args, uint tile, newest_range newest)
{
    if (has_list) return false;
    uint slot = first_slot_of_tile(args, tile);
    int first = position_of_slot(args, slot), last = position_of_slot(args, slot + 31u);
    if (has_tree && last >= args.first_of_tree) return false;
    if (halves == TQKV__BEFORE_HALVES && last >= halves_begin(args, newest.least)) return false;
    if (halves == TQKV__NEWEST_HALVES && first < halves_begin(args, newest.most)) return false;
    return !short_store && slot == tile * 32u && last - first == 31 && last <= min(newest.least, args.slice_end - 1) &&
           (args.window == 0 || first > newest.most - args.window);
}

// A masked position scores -INFINITY by selection, as in attend.h. The value's norm of a row that some column does not
// see may be NaN: then the scores of those that see it are, and the norm becomes 0.
template <int D, int P, int F>
inline void mask_tile(constant tqkv__attend_args &args, thread const attend_task &task, uint tile, tile_memory base,
                      thread const matrix_state<P, F> &state, thread tile_norms &norms,
                      thread sum_matrix (&score)[4][F])
{
    const bool has_norm = has_norms(value_format) && one_norm<D>(value_format);
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        int position = position_of_row(args, base, tile, tile_row(p, TQKV__MATRIX_ROW(task.lane)));
        bool finite = !has_norm || fabs(norms.values[p]) < INFINITY;
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) {
                float own = score[p][f].elements[i];
                own = finite ? own : as_type<float>(0x7fc00000u);
                int newest = state.newest[f][i];
                bool seen = position <= newest && (args.window == 0 || position > newest - args.window) &&
                            reads_here(args, newest, position);
                if (has_tree) seen = seen && tree_shows(args, task.tree, newest, position);
                score[p][f].elements[i] = seen ? own : -INFINITY;
            }
        }
        norms.values[p] = finite ? norms.values[p] : 0.0f;
    }
}

// Products to scores in powers of two. With a tail they have the factor of the keys already.
template <int D, int P, int F>
inline void finish_scores(constant tqkv__attend_args &args, thread const attend_task &task, uint tile, tile_memory base,
                          bool whole, thread const matrix_state<P, F> &state, thread tile_norms &norms,
                          thread sum_matrix (&score)[4][F])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        float scale = tail_format != 0 ? 1.0f : scale_of_norm<D>(key_format, norms.keys[p], args.key_block_scale);
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++)
                score[p][f].elements[i] =
                    score_of(args, score[p][f].elements[i], scale * state.factor[f][i], state.shift[f][i]);
        }
    }
    if (!whole) mask_tile<D>(args, task, tile, base, state, norms, score);
}

// The scores of a tile that does not exist.
template <int F>
inline void clear_to_nothing(thread sum_matrix (&score)[4][F])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) score[p][f].elements[0] = score[p][f].elements[1] = -INFINITY;
    }
}

// Raises the maxima as attend.h does it. Sums of nothing need no factor.
template <int D, int F>
inline void raise_maxima(thread sum_matrix (&score)[4][F], thread matrix_state<D, F> &state)
{
    bool began = false;
    float before[F][2];
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            float largest = -INFINITY;
            TQKV_UNROLL
            for (int p = 0; p < 4; p++) largest = max(largest, score[p][f].elements[i]);
            largest = rint(max_of_column(largest));
            before[f][i] = state.maximum[f][i];
            began = began || before[f][i] != NOTHING_SEEN;
            state.maximum[f][i] = largest > before[f][i] + 11.0f ? largest : before[f][i];
        }
    }
    if (!simd_any(began)) return;
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            float shrink = share_of(before[f][i], state.maximum[f][i]);
            state.sum[f][i] *= shrink;
            TQKV_UNROLL
            for (int b = 0; b < D / 8; b++) state.out[b][f].elements[i] *= shrink;
        }
    }
}

// Scores to weights, without the values' scales.
template <int P, int F>
inline void weigh_scores(thread sum_matrix (&score)[4][F], thread matrix_state<P, F> &state)
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) {
                float share = fast::exp2(score[p][f].elements[i] - state.maximum[f][i]);
                score[p][f].elements[i] = share;
                state.sum[f][i] += share;
            }
        }
    }
}

// Products to weights.
template <int D, int F>
inline void weigh_matrix_tile(constant tqkv__attend_args &args, thread const attend_task &task, uint tile,
                              tile_memory base, bool whole, thread tile_norms &norms, thread sum_matrix (&score)[4][F],
                              thread matrix_state<D, F> &state)
{
    bool raise = false;
    finish_scores<D>(args, task, tile, base, whole, state, norms, score);
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) raise = raise || score[p][f].elements[i] > state.maximum[f][i] + 11.0f;
        }
    }
    if (simd_any(raise)) raise_maxima<D, F>(score, state);
    weigh_scores(score, state);
}

// ---- Maxima and weights of simdgroups that share the values of their tiles ----

// The largest score of each column in the simdgroup's tile: [simdgroups][columns]. A barrier must follow.
template <int F>
inline void store_maxima(thread const attend_task &task, thread const sum_matrix (&score)[4][F])
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            float largest = -INFINITY;
            TQKV_UNROLL
            for (int p = 0; p < 4; p++) largest = max(largest, score[p][f].elements[i]);
            largest = rint(max_of_column(largest));
            if (TQKV__MATRIX_ROW(task.lane) == 0)
                task.states[task.simdgroup * uint(8 * F) + uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane)] = largest;
        }
    }
}

// The weights of a tile in threadgroup memory, as the lanes have them: [simdgroups][4][F][32][2]
template <int F>
inline threadgroup float2 *weights_at(threadgroup float *weights, uint lane, uint simdgroup, int p, int f)
{
    return (threadgroup float2 *)weights + (((simdgroup * 4u + uint(p)) * uint(F) + uint(f)) * 32u + lane);
}

template <int F>
inline void store_tile_weights(thread const attend_task &task, threadgroup float *weights,
                               thread const sum_matrix (&weight)[4][F])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            float2 two;
            two.x = weight[p][f].elements[0];
            two.y = weight[p][f].elements[1];
            *weights_at<F>(weights, task.lane, task.simdgroup, p, f) = two;
        }
    }
}

// ---- Values of one tile ----

// The lane's codes of one chunk and two matrices of slots: those of 4 rows.
template <int D, int W, int N = MATRIX_OUT_VALUES(D, W)>
struct value_chunk {
    raw_codes<W, N> raw[4];
};

// `half_tile`: 0 for rows 0 .. 15, 1 for the others.
template <int D, int W, int N>
inline void load_value_chunk(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint chunk,
                             uint half_tile, thread value_chunk<D, W, N> &values)
{
    const uint bytes = row_bytes<D>(value_format);
    uint first = (chunk * 8u + TQKV__MATRIX_ROW(task.lane)) * uint(N);
    TQKV_UNROLL
    for (int i = 0; i < 4; i++) {
        uint k = TQKV__MATRIX_COLUMN(task.lane) + uint(i % 2), row = tile_row(2 * int(half_tile) + i / 2, k);
        device const uchar *codes = value_codes(args, task.pages, task.values.codes, bytes, base, row);
        load_codes<D, W, N>(value_format, codes, first, values.raw[i]);
    }
}

// Halves that are no numbers become 0: 0 * NaN is not 0. Only slots that some query does not see may hold such halves.
template <int W, int N>
inline void clear_not_finite(thread raw_codes<W, N> (&raw)[4])
{
    TQKV_UNROLL
    for (int i = 0; i < 4; i++) {
        TQKV_UNROLL
        for (int w = 0; w < (W * N + 31) / 32; w++) {
            uint word = raw[i].main[w];
            if ((word & 0x7c00u) == 0x7c00u) word &= 0xffff0000u;
            if ((word & 0x7c000000u) == 0x7c000000u) word &= 0xffffu;
            raw[i].main[w] = word;
        }
    }
}

// Values i .. of the lane's rows, G blocks of left factors. A pair of codes is of two rows of a factor and one of its
// columns; the columns take turns.
template <int G, int F, int D, int W, int N>
inline void decode_values(thread const value_chunk<D, W, N> &values, int i, thread const value_book &book,
                          thread left_block (&left)[G])
{
    bool wide = has_norms(value_format);
    TQKV_UNROLL
    for (int g = 0; g < 2 * G; g++) {
        TQKV_UNROLL
        for (int k = 0; k < 2; k++)
            left[g / 2].parts[k][g % 2] =
                has_pairs(value_format)
                    ? left_of_neighbours<W, N, F>(value_format, values.raw[2 * k + g % 2], i + g / 2 * 2, wide, book)
                    : left_of_rows<W, N>(value_format, values.raw[2 * k], values.raw[2 * k + 1], i + g, wide, book);
    }
}

// out += V^T P^T over a chunk and half of the tile.
template <int D, int W, int N, int P, int F>
inline void multiply_values(int chunk, thread const value_chunk<D, W, N> &values, thread const value_book &book,
                            thread const right_pair (&right)[F], thread matrix_state<P, F> &state)
{
    const int G = N % 4 == 0 ? 2 : 1; // blocks that take turns
    bool exact = !has_codebook(value_format), wide = has_norms(value_format);
    TQKV_UNROLL
    for (int i = 0; i < N; i += 2 * G) {
        left_block left[G];
        decode_values<G, F>(values, i, book, left);
        multiply<G, F>(left, right, wide, exact, has_pairs(value_format), &state.out[chunk * N + i]);
    }
}

// Weights with the values' scales of a block, as right factors. Of several norms a row, a masked one may be NaN.
template <int D, int F>
inline void scale_weights(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint block,
                          thread const tile_norms &norms, thread sum_matrix (&weight)[4][F],
                          thread right_pair (&right)[2][F])
{
    float scaled[4][F][2];
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        float scale = scale_of_norm<D>(value_format, norms.values[p], args.value_block_scale);
        if (!one_norm<D>(value_format))
            scale = stored_scale<D>(value_format, task.values,
                                    value_slot(args, task.pages, base, tile_row(p, TQKV__MATRIX_ROW(task.lane))), block,
                                    args.value_block_scale);
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) {
                float x = weight[p][f].elements[i];
                scaled[p][f][i] = x * (one_norm<D>(value_format) || x > 0.0f ? scale : 0.0f);
            }
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

// `values` holds the first chunk of the tile at slot `base`.
template <int D, int W, int F>
inline void add_matrix_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base, bool whole,
                              thread const tile_norms &norms, thread const value_book &book,
                              thread value_chunk<D, W> (&values)[2], thread sum_matrix (&weight)[4][F],
                              thread matrix_state<D, F> &state)
{
    const int N = MATRIX_OUT_VALUES(D, W), chunks = D / (8 * N);
    const uint block_chunks = norm_block<D>(value_format) / uint(8 * N);
    right_pair right[2][F];
    TQKV_UNROLL
    for (int j = 0; j < chunks; j++) {
        if (uint(j) % block_chunks == 0)
            scale_weights<D, F>(args, task, base, uint(j) / block_chunks, norms, weight, right);
        TQKV_UNROLL
        for (int h = 0; h < 2; h++) {
            if (W == 16 && !whole) clear_not_finite<W, N>(values[h].raw);
            multiply_values(j, values[h], book, right[h], state);
            if (TQKV_PLAIN_LOADS || j + 1 < chunks)
                load_value_chunk<D, W>(args, task, base, uint((j + 1) % chunks), uint(h), values[h]);
        }
    }
}

// As any_keys of attend.h: the first chunk of a tile.
template <int D>
struct any_value_chunks {
    value_chunk<D, 4> of_4[2];
    value_chunk<D, 8> of_8[2];
    value_chunk<D, 16> of_16[2];
};

template <int D, int W>
inline void load_first_chunks(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                              thread value_chunk<D, W> (&values)[2])
{
    TQKV_UNROLL
    for (int h = 0; h < 2; h++) load_value_chunk<D, W>(args, task, base, 0u, uint(h), values[h]);
}

template <int D>
inline void open_value_chunks(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                              thread any_value_chunks<D> &values)
{
    WITH_CODES(value_format, values, load_first_chunks<D, W>(args, task, base, codes));
}

template <int D, int F>
inline void add_any_matrix_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                                  bool whole, thread const tile_norms &norms, thread const value_book &book,
                                  thread any_value_chunks<D> &values, thread sum_matrix (&weight)[4][F],
                                  thread matrix_state<D, F> &state)
{
    WITH_CODES(value_format, values,
               add_matrix_values<D, W, F>(args, task, base, whole, norms, book, codes, weight, state));
}

// ---- The kernel ----

template <int P, int F>
inline void open_columns(constant tqkv__attend_args &args, thread const attend_task &task, column_memory memory,
                         thread matrix_state<P, F> &state)
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = min(uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane), columns - 1u);
            state.newest[f][i] = newest_seen(args, row_of_column(args, task.first_column + c).query);
            state.factor[f][i] = memory.factors[c] * (args.scale * TQKV_LOG2E);
            state.shift[f][i] = has_shifts() ? memory.shifts[c] : 0.0f;
        }
    }
}

template <int P, int F>
inline void clear_matrices(thread matrix_state<P, F> &state)
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            state.maximum[f][i] = NOTHING_SEEN;
            state.sum[f][i] = 0.0f;
        }
        TQKV_UNROLL
        for (int b = 0; b < P / 8; b++) clear_matrix(state.out[b][f]);
    }
}

// The simdgroup's tiles before tile `end`.
template <int D, int F>
inline void add_matrix_tiles(constant tqkv__attend_args &args, thread const attend_task &task, uint end,
                             thread const value_book &key_book, thread const value_book &out_book,
                             thread matrix_walk<D, F> &walk, thread matrix_state<D, F> &state)
{
    while (walk.steps.tile < end) {
        uint tile = walk.steps.tile;
        tile_memory base = walk.base;
        next_tile(walk.steps, task.n_simdgroups);
        walk.base = find_next(args, task.pages, walk.steps, task.n_simdgroups, walk.search);
        bool whole = sees_whole_tile(args, tile, walk.newest);
        tile_norms norms;
        next_tile_norms<D, F>(args, task, base, walk.base, walk.norms, norms);
        any_value_chunks<D> values;
        open_value_chunks<D>(args, task, base.values, values);
        sum_matrix score[4][F];
        score_any_matrix_tile<D, F>(args, task, first_part(args, task), base.keys, walk.base.keys, key_book, walk.keys,
                                    score);
        weigh_matrix_tile<D, F>(args, task, tile, base, whole, norms, score, state);
        add_any_matrix_values<D, F>(args, task, base.values, whole, norms, out_book, values, score, state);
    }
}

#endif

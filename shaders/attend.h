// Attention straight from the codes. A threadgroup serves one KV head, one or several stretches of the context, and up
// to `columns` query rows. A column is one query head of the group for one query; the heads of a query come first.
// Each simdgroup takes its own tiles of 32 slots and keeps its own softmax. The simdgroups combine their results at
// the end of a stretch. A key or value is decoded once for all columns: that decides the speed.
//
// Within a tile
//   keys     up to 4 lanes share a row and load 16 bytes at a time; a reduction leaves each lane the score of one row;
//            likewise the tail, a second part of each key, whose scores are added
//   softmax  one row a lane
//   values   the lanes lie across the row; the weights come from threadgroup memory (attend_values.h)
//
// Letters: D head_dim, W code width of a stored value, K and V before either: of keys and of values; T that of a tail.
// C most columns, the same for all head_dims. N values that a lane loads at a time, R lanes that share a row of keys, V
// output values of a column that a lane keeps.
#ifndef TQKV_ATTEND_H
#define TQKV_ATTEND_H
#include "attend_values.h"
#include "columns.h"
#include "rotate.h"

// ---- Parts of a key: its stream, and its tail ----

// Values of a tail behind each of D values of a query.
template <int D>
inline uint tail_values()
{
    return TQKV__TAIL_DIM(D) != 0 && tail_format != 0 ? uint(TQKV__TAIL_DIM(D)) : 0u;
}

// One part of the keys, and of the queries. `format` and all bools are function constants.
struct key_part {
    uint format;
    stream_rows rows; // of the KV head
    float block_scale;
    threadgroup float *queries;
    bool rotate, scaled, with_center, rotate_center, scale_center;
    device const float *center, *scale; // of the channels
    uint first;                         // value of a query
    bool apart;                         // of rows of a tile
};

inline key_part first_part(constant tqkv__attend_args &args, thread const attend_task &task)
{
    key_part part = {key_format, task.keys,    args.key_block_scale, task.queries,  rotate_queries,
                     key_scaled, key_centered, rotate_center,        center_scaled, task.center,
                     task.scale, 0u,           rows_apart()};
    return part;
}

template <int D>
inline key_part tail_part(thread const attend_task &task)
{
    key_part part = {tail_format,       task.tail,          1.0f,
                     task.tail_queries, rotate_tail,        tail_scaled,
                     tail_centered,     rotate_tail_center, scale_tail_center,
                     task.tail_center,  task.tail_scale,    uint(D),
                     tail_rows_apart()};
    return part;
}

// ---- Keys: layout over the lanes ----

// Values of a row that a lane loads at a time: 16 bytes of codes, 8 where 16 do not divide the row, or the whole row.
#define KEY_VALUES(D, W) ((D) < 128 / (W) ? (D) : (D) % (128 / (W)) ? 64 / (W) : 128 / (W))

// Lanes that share a row of keys, as many of 4 as divide what has one norm: all values or, in 8 bits, perhaps a block.
// They share R rows: lanes l*R .. l*R+R-1 have rows l, l + 32/R, l + 2*32/R ..
#define KEY_BLOCK(D, W) ((W) == 8 ? TQKV__GRID_DIM(D) : (D))
#define KEY_LANES(D, W) \
    (KEY_BLOCK(D, W) % (4 * KEY_VALUES(D, W)) == 0 ? 4 : KEY_BLOCK(D, W) % (2 * KEY_VALUES(D, W)) == 0 ? 2 : 1)

// Loads of a row that a lane starts before it uses the first of them; an odd number of loads all at once, if they fit
// into 40 registers. Or one at a time: see TQKV_LOADS_AHEAD.
#define KEY_STEPS(D, W) ((D) / KEY_VALUES(D, W) / KEY_LANES(D, W))
#define KEY_BATCH(D, W) \
    (TQKV_LOADS_AHEAD == 1 ? 1 : KEY_STEPS(D, W) % 2 == 0 ? 2 : (D) * (W) / 32 <= 40 ? KEY_STEPS(D, W) : 1)

// The row of a tile whose score a lane ends with.
template <int D>
inline uint row_of_lane(uint format, uint lane)
{
    const uint R = uint(BY_CODE_WIDTH(format, KEY_LANES, D));
    return lane % R * (32u / R) + lane / R;
}

// And the lane that ends with the score of a row.
template <int D>
inline uint lane_of_tile_row(uint format, uint row)
{
    const uint R = uint(BY_CODE_WIDTH(format, KEY_LANES, D));
    return row % (32u / R) * R + row / (32u / R);
}

// Codes of the next steps of a lane's R rows, and for rows of several norms the factors of the next block.
template <int D, int W>
struct key_steps {
    raw_codes<W, KEY_VALUES(D, W)> raw[KEY_BATCH(D, W)][KEY_LANES(D, W)];
    float scale[KEY_LANES(D, W)];
};

// ---- Queries ----

// A query in threadgroup memory has 4 floats of padding after every N values. Lanes that share a row of keys then read
// different banks.
template <int D>
inline uint padded(uint format, uint value)
{
    return value + value / uint(BY_CODE_WIDTH(format, KEY_VALUES, D)) * 4u;
}

// The score of the centre of a part of the keys: all scores of the query lack it. Every lane of the row has the result.
// x: the lane's values of the query
template <int D>
inline float score_of_center(constant tqkv__attend_args &args, thread const attend_task &task,
                             thread const key_part &keys, thread const float *x)
{
    float center[TQKV_LANE_VALUES(D)], dot = 0.0f;
    uint part = lane_of_row<D>(task.lane);
    load_center<D>(keys.center, keys.scale, task.kv_head, keys.scale_center, keys.rotate_center, part, center);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) dot = fma(x[i], center[i], dot);
    TQKV_UNROLL
    for (int distance = 1; distance < TQKV__ROW_LANES(D); distance *= 2) dot += simd_shuffle_xor(dot, ushort(distance));
    return dot * (args.scale * TQKV_LOG2E);
}

// The values of a query that belong to a part of the keys. head: of all query heads
template <int D>
inline void load_query(constant tqkv__attend_args &args, thread const attend_task &task, thread const key_part &keys,
                       uint query, uint head, thread float *x)
{
    ulong first = row_offset(query, args.query_token_stride) + row_offset(head, args.query_head_stride);
    load_typed_row<D>(row_type, task.q, first + ulong(keys.first), lane_of_row<D>(task.lane), x);
}

// To the basis of the keys, after score_of_center: that takes the query as it came.
template <int D>
inline void turn_query(thread const attend_task &task, thread const key_part &keys, thread float *x)
{
    uint part = lane_of_row<D>(task.lane);
    if (keys.scaled) multiply_channels<D>(keys.scale, task.kv_head, part, x);
    if (keys.rotate) rotate_row<D>(x, part);
}

// TQKV_ROWS(D) columns at a time. Lanes beyond the last column repeat it and store nothing.
template <int D>
inline void load_query_part(constant tqkv__attend_args &args, thread const attend_task &task,
                            thread const key_part &keys, column_memory memory)
{
    const int L = TQKV__ROW_LANES(D), C = TQKV_ROW_PIECE(D);
    const uint length = padded<D>(keys.format, D);
    uint part = lane_of_row<D>(task.lane);
    for (uint c = task.simdgroup * uint(TQKV_ROWS(D)); c < columns; c += task.n_simdgroups * uint(TQKV_ROWS(D))) {
        uint own = c + task.lane / uint(L), column = min(own, columns - 1u);
        query_row row = row_of_column(args, task.first_column + column);
        uint head = task.kv_head * uint(args.group) + uint(row.head);
        float x[TQKV_LANE_VALUES(D)];
        load_query<D>(args, task, keys, uint(row.query), head, x);
        float shift = keys.with_center ? score_of_center<D>(args, task, keys, x) : 0.0f;
        if (part == 0 && own < columns) {
            if (has_shifts()) memory.shifts[column] = keys.first == 0 ? shift : memory.shifts[column] + shift;
            if (keys.first == 0) memory.rows[column] = partial_row(args, row, head);
        }
        turn_query<D>(task, keys, x);
        TQKV_UNROLL
        for (int i = 0; i < TQKV_LANE_VALUES(D); i++)
            if (own < columns)
                keys.queries[column * length + padded<D>(keys.format, value_of_lane<L, C>(part, i))] = x[i];
    }
}

template <int D>
inline void load_queries(constant tqkv__attend_args &args, thread const attend_task &task, column_memory memory)
{
    const int T = TQKV__TAIL_DIM(D) != 0 ? TQKV__TAIL_DIM(D) : 64;
    load_query_part<D>(args, task, first_part(args, task), memory);
    if (tail_values<D>() == 0) return;
    if (has_shifts()) threadgroup_barrier(mem_flags::mem_threadgroup);
    load_query_part<T>(args, task, tail_part<D>(task), memory);
}

// ---- Keys: one tile ----

// Codes of the batch that begins with step `step`, of the tile at slot `base`.
template <int D, int W>
inline void load_key_codes(constant tqkv__attend_args &args, thread const attend_task &task,
                           thread const key_part &part, uint base, uint step, thread key_steps<D, W> &keys)
{
    const int N = KEY_VALUES(D, W), R = KEY_LANES(D, W);
    TQKV_UNROLL
    for (int b = 0; b < KEY_BATCH(D, W); b++) {
        TQKV_UNROLL
        for (int r = 0; r < R; r++) {
            uint row = uint(r * (32 / R)) + task.lane / uint(R);
            load_codes<D, W, N>(
                part.format,
                key_codes(args, task.pages, part.apart, part.rows.codes, row_bytes<D>(part.format), base, row),
                ((step + uint(b)) * uint(R) + task.lane % uint(R)) * uint(N), keys.raw[b][r]);
        }
    }
}

// Factors of block `block` of the lane's rows in the tile at slot `base`.
template <int D, int W>
inline void load_key_scales(constant tqkv__attend_args &args, thread const attend_task &task,
                            thread const key_part &part, uint base, uint block, thread key_steps<D, W> &keys)
{
    const int R = KEY_LANES(D, W);
    TQKV_UNROLL
    for (int r = 0; r < R; r++) {
        uint slot = key_slot(args, task.pages, part.apart, base, uint(r * (32 / R)) + task.lane / uint(R));
        keys.scale[r] = stored_scale<D>(part.format, part.rows, slot, block, part.block_scale);
    }
}

// dot[r][c] += q_c . k over N values of each of the lane's R rows, from value `first` on.
template <int D, int W, int R, int C>
inline void multiply_keys(thread const key_part &part, thread const raw_codes<W, KEY_VALUES(D, W)> (&raw)[R],
                          uint first, thread const codebook &book, thread float (&dot)[R][C])
{
    const int N = KEY_VALUES(D, W);
    threadgroup const float *own = part.queries + padded<D>(part.format, first);
    TQKV_UNROLL
    for (int i = 0; i < N; i += 4) {
        float x[R][4];
        TQKV_UNROLL
        for (int r = 0; r < R; r++) values_at<W, N, 4>(part.format, raw[r], i, book, x[r]);
        FOR_COLUMNS(c)
        {
            float4 q = *(threadgroup const float4 *)(own + (uint(c) * padded<D>(part.format, D) + uint(i)));
            TQKV_UNROLL
            for (int r = 0; r < R; r++)
                dot[r][c] = fma(x[r][3], q.w, fma(x[r][2], q.z, fma(x[r][1], q.y, fma(x[r][0], q.x, dot[r][c]))));
        }
    }
}

// A reduce-scatter over the R lanes that share rows: each step of the tree halves the rows that a lane holds, until
// total[0] is the sum of one whole row. This takes fewer shuffles than one sum a row.
template <int R, int C>
inline void reduce_scatter(uint part, thread float (&total)[R][C])
{
    TQKV_UNROLL
    for (int distance = R / 2; distance > 0; distance /= 2) {
        bool upper = (part & uint(distance)) != 0;
        TQKV_UNROLL
        for (int r = 0; r < R / 2; r++) {
            if (r >= distance) continue;
            FOR_COLUMNS(c)
            {
                float low = total[r][c], high = total[r + distance][c];
                float keep = upper ? high : low, give = upper ? low : high;
                total[r][c] = keep + simd_shuffle_xor(give, ushort(distance));
            }
        }
    }
}

// At the end of a block: total += scale * dot, and dot starts again.
template <int R, int C>
inline void add_block(thread const float (&scale)[R], thread float (&dot)[R][C], thread float (&total)[R][C])
{
    TQKV_UNROLL
    for (int r = 0; r < R; r++) {
        FOR_COLUMNS(c)
        {
            total[r][c] = fma(scale[r], dot[r][c], total[r][c]);
            dot[r][c] = 0.0f;
        }
    }
}

// score[c] = q_c . k of the lane's row, without the factor of rows that have one norm. `keys` holds the first codes and
// factors of the tile at slot `base`; at the end it holds those of the tile at `next_base`.
template <int D, int W, int C>
inline void score_tile(constant tqkv__attend_args &args, thread const attend_task &task, thread const key_part &part,
                       uint base, uint next_base, thread const codebook &book, thread key_steps<D, W> &keys,
                       thread float *score)
{
    const int N = KEY_VALUES(D, W), R = KEY_LANES(D, W), B = KEY_BATCH(D, W);
    const uint steps = uint(D / (N * R)), block_steps = steps / (uint(D) / norm_block<D>(part.format));
    uint own = task.lane % uint(R);
    float dot[R][C], total[R][C];
    TQKV_UNROLL
    for (int r = 0; r < R; r++) {
        TQKV_UNROLL
        for (int c = 0; c < C; c++) dot[r][c] = total[r][c] = 0.0f;
    }
    for (uint batch = 0; batch < steps; batch += uint(B)) {
        TQKV_UNROLL
        for (int b = 0; b < B; b++) {
            uint step = batch + uint(b), next = step + 1u;
            multiply_keys<D, W, R, C>(part, keys.raw[b], (step * uint(R) + own) * uint(N), book, dot);
            if (one_norm<D>(part.format) || next % block_steps != 0) continue;
            add_block<R, C>(keys.scale, dot, total);
            bool last = next == steps;
            load_key_scales<D, W>(args, task, part, last ? next_base : base, last ? 0u : next / block_steps, keys);
        }
        bool last = batch + uint(B) >= steps;
        load_key_codes<D, W>(args, task, part, last ? next_base : base, last ? 0u : batch + uint(B), keys);
    }
    if (one_norm<D>(part.format))
        reduce_scatter<R, C>(own, dot);
    else
        reduce_scatter<R, C>(own, total);
    FOR_COLUMNS(c) score[c] = one_norm<D>(part.format) ? dot[0][c] : total[0][c];
}

// The width of the keys' codes is known when the pipeline is built: one member is used, and the others disappear.
template <int D>
struct any_keys {
    key_steps<D, 4> of_4;
    key_steps<D, 8> of_8;
    key_steps<D, 16> of_16;
};

// Without a tail.
template <>
struct any_keys<0> {
};

// The first codes and factors of the tile at slot `base`.
template <int D, int W>
inline void load_first_keys(constant tqkv__attend_args &args, thread const attend_task &task,
                            thread const key_part &part, uint base, thread key_steps<D, W> &keys)
{
    load_key_codes<D, W>(args, task, part, base, 0u, keys);
    if (!one_norm<D>(part.format)) load_key_scales<D, W>(args, task, part, base, 0u, keys);
}

template <int D>
inline void open_keys(constant tqkv__attend_args &args, thread const attend_task &task, thread const key_part &part,
                      uint base, thread any_keys<D> &keys)
{
    WITH_CODES(part.format, keys, load_first_keys<D, W>(args, task, part, base, codes));
}

template <int D, int C>
inline void score_any_tile(constant tqkv__attend_args &args, thread const attend_task &task,
                           thread const key_part &part, uint base, uint next_base, thread const codebook &book,
                           thread any_keys<D> &keys, thread float *score)
{
    WITH_CODES(part.format, keys, score_tile<D, W, C>(args, task, part, base, next_base, book, codes, score));
}

// ---- The tail of one tile ----

template <int D, int T>
inline void open_tail(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                      thread any_keys<T> &keys)
{
    if (tail_format != 0) open_keys<T>(args, task, tail_part<D>(task), base, keys);
}

template <int D, int T>
inline void open_tail(constant tqkv__attend_args &, thread const attend_task &, uint, thread any_keys<0> &)
{
}

// Adds the scores of the tail to those of the keys. The two leave a row's score with different lanes: `row` is that of
// the keys' lane. key_scale becomes the factor of the sum.
template <int D, int T, int C>
inline void add_tail(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint next_base,
                     uint row, thread const codebook &book, thread any_keys<T> &keys, thread float &key_scale,
                     thread float *score)
{
    if (tail_format == 0) return;
    float tail[C];
    score_any_tile<T, C>(args, task, tail_part<D>(task), base, next_base, book, keys, tail);
    uint slot = key_slot(args, task.pages, tail_rows_apart(), base, row);
    float scale = row_scale<T>(tail_format, task.tail, slot, 1.0f);
    const bool same = BY_CODE_WIDTH(key_format, KEY_LANES, D) == BY_CODE_WIDTH(tail_format, KEY_LANES, T);
    FOR_COLUMNS(c)
    {
        float own = same ? tail[c] : simd_shuffle(tail[c], ushort(lane_of_tile_row<T>(tail_format, row)));
        score[c] = fma(own, scale, score[c] * key_scale);
    }
    key_scale = 1.0f;
}

template <int D, int T, int C>
inline void add_tail(constant tqkv__attend_args &, thread const attend_task &, uint, uint, uint,
                     thread const codebook &, thread any_keys<0> &, thread float &, thread float *)
{
}

// ---- Softmax of one tile ----

// A dot product as a score in powers of two: 2^score is e^(scale * dot).
inline float score_of(constant tqkv__attend_args &args, float dot, float factor, float shift)
{
    if (!softcap) return dot * factor;
    float score = has_shifts() ? fma(dot, factor, shift) : dot * factor;
    return args.softcap * TQKV_LOG2E * precise::tanh(score / (args.softcap * TQKV_LOG2E));
}

// Dot products to scores. A masked position scores -INFINITY by selection, never by arithmetic: nothing that its slot
// holds can spread. Returns whether a maximum is to be raised.
template <int D>
inline bool mask_scores(constant tqkv__attend_args &args, thread const attend_task &task, tile_place at,
                        float key_scale, thread const column_state<D> &state, thread float *score, thread bool *seen)
{
    const int C = TQKV__MAX_COLUMNS(D);
    float factor = key_scale * (args.scale * TQKV_LOG2E);
    bool raise = false;
    FOR_COLUMNS(c)
    {
        int newest = state.newest[c];
        seen[c] = at.position <= newest && (args.window == 0 || at.position > newest - args.window);
        seen[c] = seen[c] && reads_here(args, newest, at.position);
        if (has_tree) seen[c] = seen[c] && tree_shows(args, task.tree, newest, at.position);
        score[c] = seen[c] ? score_of(args, score[c], factor, state.shift[c]) : -INFINITY;
        raise = raise || score[c] > state.maximum[c] + 11.0f;
    }
    return raise;
}

// The maximum of a column, raised where the largest score of a tile exceeds it by 11. Weights stay below 2^11.5, and
// most tiles skip the rescaling. It is a whole number: see maximum_of_slice. Each column decides for itself: its bits
// do not depend on the others.
inline float raised_maximum(float maximum, float largest) { return largest > maximum + 11.0f ? largest : maximum; }

// Scores to weights of the online softmax.
template <int D>
inline void store_tile_weights(uint row, float value_scale, thread const float *score, thread const bool *seen,
                               thread column_state<D> &state, threadgroup float *weights)
{
    const int C = TQKV__MAX_COLUMNS(D);
    float weight[C];
    TQKV_UNROLL
    for (int c = 0; c < C; c++) weight[c] = 0.0f;
    FOR_COLUMNS(c)
    {
        float share = fast::exp2(score[c] - state.maximum[c]);
        state.sum[c] += share;
        weight[c] = share * (seen[c] ? value_scale : 0.0f); // a masked norm may be NaN
    }
    store_weights<C>(weights, row, weight);
}

template <int D>
inline void weigh_tile(constant tqkv__attend_args &args, thread const attend_task &task, tile_place at, float key_scale,
                       float value_scale, thread float *score, thread column_state<D> &state,
                       threadgroup float *weights)
{
    const int C = TQKV__MAX_COLUMNS(D), V = LANE_SUMS(D);
    bool seen[C];
    if (simd_any(mask_scores(args, task, at, key_scale, state, score, seen))) {
        FOR_COLUMNS(c)
        {
            float largest = raised_maximum(state.maximum[c], rint(simd_max(score[c])));
            float shrink = share_of(state.maximum[c], largest);
            state.maximum[c] = largest;
            state.sum[c] *= shrink;
            TQKV_UNROLL
            for (int i = 0; i < V; i++) state.out[c][i] *= shrink;
        }
    }
    store_tile_weights(at.row, value_scale, score, seen, state, weights);
}

// ---- The simdgroups' results as one ----

// Maxima and sums of the simdgroup's columns.
template <int D>
inline void store_states(thread const attend_task &task, thread const column_state<D> &state)
{
    const int C = TQKV__MAX_COLUMNS(D);
    threadgroup float *own = task.states + task.simdgroup * uint(2 * C);
    FOR_COLUMNS(c)
    {
        float sum = simd_sum(state.sum[c]);
        if (task.lane != 0) continue;
        own[c * 2] = state.maximum[c] == NOTHING_SEEN ? -INFINITY : state.maximum[c];
        own[c * 2 + 1] = sum;
    }
}

// Sums of values that lie next to each other in a row: a lane's of a piece, 8, over 32 lanes of which VALUE_LANES lie
// across the row. Each keeps KEPT_SUMS of the row's sums from value kept_sum on: as in reduce_scatter.
#define KEPT_SUMS(D) (VALUE_LANES(D) / 4)
template <int D>
inline uint kept_sum(uint lane)
{
    uint number = lane / uint(VALUE_LANES(D)), first = (number & 1u) * 4u + (number & 2u) + number / 4u;
    return lane % uint(VALUE_LANES(D)) * 8u + first;
}

template <int D>
inline void add_lanes(uint lane, thread const float *from, thread float *x)
{
    TQKV_UNROLL
    for (int i = 0; i < 8; i++) x[i] = from[i];
    TQKV_UNROLL
    for (int step = 0; step < 3; step++) {
        const int distance = VALUE_LANES(D) << step, kept = 4 >> step;
        if (distance >= 32) continue;
        bool upper = (lane & uint(distance)) != 0;
        TQKV_UNROLL
        for (int i = 0; i < 4; i++) {
            if (i >= kept) continue;
            float low = x[i], high = x[i + kept];
            x[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, ushort(distance));
        }
    }
}

// A pass takes as many pieces of columns as the memory of their sums holds, piece after piece of each column.
#define PIECE_VALUES(D)      (LANE_SPAN(D) * 8)
#define PASS_PIECES(D)       (TQKV__ATTEND_PASS_FLOATS(D) / PIECE_VALUES(D))
#define ATTEND_SUM_FLOATS(D) uint(TQKV__ATTEND_SUM_BYTES(D, int(columns)) / 4)

// Stores the simdgroup's sums of the pass that begins with piece `first`.
template <int D>
inline void store_sums(thread const attend_task &task, int first, thread const column_state<D> &state)
{
    const int C = TQKV__MAX_COLUMNS(D), J = VALUE_PIECES(D), N = KEPT_SUMS(D);
    threadgroup float *own = task.weights + task.simdgroup * ATTEND_SUM_FLOATS(D) + kept_sum<D>(task.lane);
    bool has_values = task.lane % uint(VALUE_LANES(D)) < uint(LANE_SPAN(D));
    TQKV_UNROLL
    for (int p = 0; p < PASS_PIECES(D); p++) {
        const int c = (first + p) / J < C ? (first + p) / J : C - 1;
        if (first + p >= C * J || uint(c) >= columns) continue;
        float x[8];
        add_lanes<D>(task.lane, state.out[c] + (first + p) % J * 8, x);
        if (!has_values) continue;
        threadgroup float *to = own + p * PIECE_VALUES(D);
        if (N == 1) to[0] = x[0];
        if (N == 2) {
            float2 two;
            two.x = x[0];
            two.y = x[1];
            *(threadgroup float2 *)to = two;
        }
        TQKV_UNROLL
        for (int i = 0; i + 3 < N; i += 4) {
            float4 four;
            four.x = x[i];
            four.y = x[i + 1];
            four.z = x[i + 2];
            four.w = x[i + 3];
            *(threadgroup float4 *)(to + i) = four;
        }
    }
}

// Number `at` of the pass.
template <int D>
inline void open_four_of_pass(thread const attend_task &task, int first, uint at, column_memory memory, column_end how,
                              thread four_sums &own)
{
    const uint J = uint(VALUE_PIECES(D)), E = uint(PIECE_VALUES(D));
    uint piece = at / (E / 4u), value = at % (E / 4u) * 4u, number = uint(first) + piece;
    open_four(task, uint(D), piece < uint(PASS_PIECES(D)) ? number / J : memory.n, number % J * E + value,
              task.weights + piece * E + value, memory, how, own);
}

// Adds the pass up, four values of a column a thread. The first pass also adds the columns up.
template <int D>
inline void combine_pass(thread const attend_task &task, int first, column_memory memory, column_end how,
                         thread const column_state<D> &state)
{
    uint thread_index = task.simdgroup * 32u + task.lane, n_threads = task.n_simdgroups * 32u;
    four_sums own;
    open_four_of_pass<D>(task, first, thread_index, memory, how, own); // its loads are under way before the barriers
    store_sums<D>(task, first, state);
    if (first == 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (task.simdgroup == 0 && task.lane < columns) combine_states<32>(task, task.lane, memory, how);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint at = thread_index; at < uint(PASS_PIECES(D) * PIECE_VALUES(D) / 4); at += n_threads) {
        if (at != thread_index) open_four_of_pass<D>(task, first, at, memory, how, own);
        if (own.used) combine_four<32>(task, ATTEND_SUM_FLOATS(D), memory, how, own);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); // before the next sums, or weights, overwrite these
}

// Adds a stretch to the partial results: that of its section and, at the section's end, that of all. Returns the number
// of the one that has the total.
template <int D>
inline uint keep_stretch(constant tqkv__attend_args &args, thread const attend_task &task, stretch_range own,
                         uint stretch, column_memory memory, thread const column_state<D> &state)
{
    const int J = VALUE_PIECES(D);
    column_end how = open_end(args, task, own, stretch, uint(D));
    store_states(task, state);
    TQKV_UNROLL
    for (int first = 0; first < TQKV__MAX_COLUMNS(D) * J; first += PASS_PIECES(D))
        if (uint(first / J) < columns) combine_pass<D>(task, first, memory, how, state);
    return how.to_total ? 0u : partial_of_section(args, task.split);
}

// ---- The kernel ----

template <int D>
inline void find_newest(constant tqkv__attend_args &args, uint first_column, thread column_state<D> &state)
{
    TQKV_UNROLL
    for (int c = 0; c < TQKV__MAX_COLUMNS(D); c++)
        state.newest[c] = newest_seen(args, many_queries ? row_of_column(args, first_column + uint(c)).query : 0);
}

template <int D>
inline void clear_sums(thread column_state<D> &state)
{
    TQKV_UNROLL
    for (int c = 0; c < TQKV__MAX_COLUMNS(D); c++) {
        state.maximum[c] = NOTHING_SEEN;
        state.sum[c] = 0.0f;
        TQKV_UNROLL
        for (int i = 0; i < LANE_SUMS(D); i++) state.out[c][i] = 0.0f;
    }
}

// What a simdgroup carries from tile to tile. D: of the keys
template <int D>
struct tile_walk {
    tile_steps steps;
    tile_search search;
    tile_place next; // the place of the next tile
    any_keys<D> keys;
    any_keys<TQKV__TAIL_DIM(D)> tail;
};

struct codebooks {
    codebook keys, values, tail;
};

// A barrier must precede.
inline codebooks open_codebooks(thread const attend_task &task)
{
    codebooks books;
    books.keys = open_codebook(key_format, task.tables, task.lane);
    books.values = open_codebook(value_format, task.tables + 256, task.lane);
    books.tail = open_codebook(tail_format, task.tail_table, task.lane);
    return books;
}

// The simdgroup's tiles before tile `end`.
template <int KD, int VD>
inline void add_tiles(constant tqkv__attend_args &args, thread const attend_task &task, uint end,
                      thread const codebooks &books, thread tile_walk<KD> &walk, thread column_state<VD> &state)
{
    threadgroup float *weights = task.weights + task.simdgroup * ATTEND_SUM_FLOATS(VD);
    while (walk.steps.tile < end) {
        tile_place at = walk.next;
        next_tile(walk.steps, task.n_simdgroups);
        tile_memory base = find_next(args, task.pages, walk.steps, task.n_simdgroups, walk.search);
        walk.next = open_tile(args, base, walk.steps.tile, at.row);
        const int C = TQKV__MAX_COLUMNS(KD), T = TQKV__TAIL_DIM(KD);
        float score[C];
        uint key = key_slot(args, task.pages, rows_apart(), at.base.keys, at.row);
        uint value = value_slot(args, task.pages, at.base.values, at.row);
        float key_scale = row_scale<KD>(key_format, task.keys, key, args.key_block_scale);
        float value_scale = row_scale<VD>(value_format, task.values, value, args.value_block_scale);
        any_values<VD> values;
        open_values<VD>(args, task, at.base.values, values);
        score_any_tile<KD, C>(args, task, first_part(args, task), at.base.keys, walk.next.base.keys, books.keys,
                              walk.keys, score);
        add_tail<KD, T, C>(args, task, at.base.tail, walk.next.base.tail, at.row, books.tail, walk.tail, key_scale,
                           score);
        weigh_tile<VD>(args, task, at, key_scale, value_scale, score, state, weights);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        add_any_values<VD>(args, task, at.base.values, books.values, values, weights, state);
        simdgroup_barrier(mem_flags::mem_threadgroup); // before the next tile overwrites the weights
    }
}

// The arguments of attend and attend_matrix. codes: [n_kv_heads][capacity][row_bytes], norms:
// [n_kv_heads][capacity][norms of a row]
// clang-format off
#define ATTEND_ARGUMENTS \
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
    device const uchar *tail_codes [[buffer(13)]], \
    device const float *tail_norms [[buffer(14)]], \
    device const float *tail_center [[buffer(15)]], \
    device const int *list_rows [[buffer(16)]], \
    device const float *key_scale [[buffer(17)]], \
    device const float *tail_scale [[buffer(18)]], \
    threadgroup float *tables [[threadgroup(0)]], \
    threadgroup float *queries [[threadgroup(1)]], \
    threadgroup float *states [[threadgroup(3)]], \
    uint3 group [[threadgroup_position_in_grid]], \
    uint lane [[thread_index_in_simdgroup]], \
    uint simdgroup [[simdgroup_index_in_threadgroup]], \
    uint n_simdgroups [[simdgroups_per_threadgroup]]

// `args` and `task` of these arguments, but for threadgroup memory that the two kernels share out in their own ways. D:
// of the keys, V: of the values
#define ATTEND_TASK(D, V) \
    uint item = batch ? item_of(items, group.z, TQKV_BY_GROUP) : 0u; \
    constant tqkv__attend_args &args = batch ? items[item].attend : call; \
    if (batch && args.kv_len == 0) return; \
    attend_task task; \
    task.q = q; \
    task.keys = stream_of_head<D>(key_format, key_codes, key_norms, args.key_slots, group.x); \
    task.values = stream_of_head<V>(value_format, value_codes, value_norms, args.value_slots, group.x); \
    task.tail = stream_of_head<64>(tail_format, tail_codes, tail_norms, args.tail_slots, group.x); \
    task.partial_out = partial_out; \
    task.partial_state = partial_state; \
    task.center = key_center; \
    task.tail_center = tail_center; \
    task.scale = key_scale; \
    task.tail_scale = tail_scale; \
    task.pages.keys = key_pages; \
    task.pages.values = value_pages; \
    task.pages.lane = lane; \
    task.pages.simdgroup = simdgroup; \
    task.pages.shared = task.pages.shared_values = false; \
    task.list_rows = list_rows; \
    task.tree = tree; \
    task.tables = tables; \
    task.queries = queries; \
    task.kept = states; \
    task.kv_head = group.x; \
    task.lane = lane; \
    task.simdgroup = simdgroup; \
    task.n_simdgroups = n_simdgroups; \
    if (batch) \
        open_item(items[item], group.z, task); \
    else \
        open_place(args, group.y, group.z, task);
// clang-format on

#endif

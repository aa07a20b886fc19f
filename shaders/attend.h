// Attention straight from the codes. A threadgroup serves one KV head, up to `columns` query rows ("columns": the query
// heads of the group, for one query after the other) and one split of the context. Each of its simdgroups walks over
// its own tiles of 32 slots with a softmax of its own, and they meet only at the end. A key or value is decoded once
// for all columns: that decides the speed.
//
// Within a tile
//   keys     up to 4 lanes share a row, 16 bytes a load; adding them up leaves each lane with the score of one position
//   softmax  one position a lane
//   values   lanes lie across the row, weights come by broadcast from threadgroup memory
//
// Tiles are cut from slots, not positions, so a ring needs no wrap inside a tile: only the mask knows positions.
#ifndef TQKV_ATTEND_H
#define TQKV_ATTEND_H
#include "codec.h"
#include "rotate.h"
#include "softmax.h"

constant uint key_format [[function_constant(TQKV_FC_FORMAT)]];
constant uint value_format [[function_constant(TQKV_FC_VALUE_FORMAT)]];
constant bool rotate_queries [[function_constant(TQKV_FC_ROTATE_QUERIES)]];
constant uint columns [[function_constant(TQKV_FC_COLUMNS)]];
constant bool many_queries [[function_constant(TQKV_FC_MANY_QUERIES)]];
constant bool softcap [[function_constant(TQKV_FC_SOFTCAP)]];
constant bool same_slots [[function_constant(TQKV_FC_SAME_SLOTS)]];
constant bool short_store [[function_constant(TQKV_FC_SHORT_STORE)]];

// Loops over columns run to the constant maximum with this test inside, so that they unroll into registers and fall
// away beyond `columns` when the pipeline is made.
#define FOR_COLUMNS(c)                                                                                                 \
    TQKV_UNROLL                                                                                                        \
    for (int c = 0; c < C; c++)                                                                                        \
        if (uint(c) < columns)

// Below every score: where the running maximum starts. Finite, so that a masked score less it is -INFINITY and no NaN.
#define NOTHING_SEEN (-3.0e38f)

// What a lane keeps of each column's output: 8 values of a row at a time, in D/256 pieces of the row where 32 lanes do
// not span it.
#define LANE_SUMS(D) ((D) <= 256 ? 8 : (D) / 32)

// The codes and norms of one KV head.
struct stream_rows {
    device const uchar *codes;
    device const float *norms;
};

template <int D>
inline stream_rows open_stream(uint format, device const uchar *codes, device const float *norms, int capacity,
                               uint kv_head)
{
    ulong first = ulong(kv_head) * ulong(capacity);
    stream_rows rows;
    rows.codes = codes + first * ulong(row_bytes<D>(format));
    rows.norms = norms + first * ulong(uint(D) / norm_block<D>(format));
    return rows;
}

// Factor of the codes of block `block` at a slot.
template <int D>
inline float stored_scale(uint format, stream_rows rows, uint slot, uint block, float block_scale)
{
    if (format == TQKV_F16) return 1.0f;
    return code_scale<D>(format, rows.norms[ulong(slot) * ulong(uint(D) / norm_block<D>(format)) + block], block_scale);
}

// ---- Positions, counted from the oldest resident one, and slots ----

inline int position_of_slot(constant tqkv__attend_args &args, uint slot)
{
    int position = int(slot) - args.key_oldest_slot;
    return position < 0 ? position + args.key_capacity : position;
}

// Where row r of a tile lies, counted from its row 0.
inline uint row_in_tile(constant tqkv__attend_args &args, uint r)
{
    return short_store ? min(r, uint(args.key_capacity) - 1u) : r;
}

// The values' slot of the position that has this slot in the keys; some slot of the store if none has.
inline uint value_slot_of(constant tqkv__attend_args &args, uint slot)
{
    if (same_slots) return slot;
    int at = args.value_oldest_slot + min(position_of_slot(args, slot), args.kv_len - 1);
    return uint(at < args.value_capacity ? at : at - args.value_capacity);
}

// The query row behind a column of a threadgroup; beyond the last one, the last one again, which is not written.
struct query_row {
    int query, head; // head of the group
};

inline query_row row_of_column(constant tqkv__attend_args &args, uint column)
{
    uint row = min(column, uint(args.n_queries) * uint(args.group) - 1u);
    query_row result;
    result.query = many_queries ? int(row / uint(args.group)) : 0;
    result.head = many_queries ? int(row % uint(args.group)) : int(row);
    return result;
}

// The newest position that a query sees; negative if it sees none.
inline int newest_seen(constant tqkv__attend_args &args, int query) { return args.kv_len - args.n_queries + query; }

// Tiles are numbered from the one with the oldest position that a threadgroup's columns see; a split has [begin, end).
struct tile_range {
    uint begin, end;
    uint first, total; // tile 0 is the first-th of the store's `total` tiles, behind the last of which comes the first
};

inline tile_range tiles_of_split(constant tqkv__attend_args &args, uint first_column, uint split)
{
    int newest = newest_seen(args, row_of_column(args, first_column + columns - 1u).query);
    int oldest = newest_seen(args, row_of_column(args, first_column).query) - args.window + 1;
    if (args.window == 0 || oldest < 0) oldest = 0;
    tile_range range;
    uint capacity = uint(args.key_capacity), slot = uint(args.key_oldest_slot) + uint(oldest);
    slot = slot < capacity ? slot : slot - capacity;
    uint before_end = capacity - slot, n = newest < oldest ? 0u : uint(newest - oldest) + 1u;
    range.first = slot / 32u;
    range.total = (capacity + 31u) / 32u;
    uint wrapped = range.total - range.first + (n - before_end + 31u) / 32u;
    uint count = n <= before_end ? (slot % 32u + n + 31u) / 32u : min(wrapped, range.total);
    count = n == 0 ? 0u : count;
    range.begin = uint(ulong(count) * ulong(split) / ulong(args.n_splits));
    range.end = uint(ulong(count) * ulong(split + 1u) / ulong(args.n_splits));
    return range;
}

struct tile_place {
    uint base;    // slot of row 0
    uint slot;    // of the lane's row
    int position; // of the lane's row; beyond all queries if the row is not the tile's own
};

// A tile always has 32 rows to load. Where the store ends it is moved back over rows of the tile before, which are not
// its own, and nor are those that a short store lacks.
inline tile_place open_tile(constant tqkv__attend_args &args, tile_range range, uint number, uint row)
{
    uint nth = range.first + number, start = (nth < range.total ? nth : nth - range.total) * 32u;
    tile_place result;
    result.base = short_store ? 0u : min(start, uint(args.key_capacity) - 32u);
    result.slot = result.base + row_in_tile(args, row);
    bool own = result.base + row >= start && result.base + row < uint(args.key_capacity);
    result.position = own ? position_of_slot(args, result.slot) : 0x7fffffff;
    return result;
}

// ---- Queries ----

// A column's query in threadgroup memory has 4 floats of padding behind the values of each 16 bytes of keys, so that
// the lanes that share a row read different banks.
template <int D, int W>
inline uint padded(uint value)
{
    return value + value / uint(128 / W) * 4u;
}

template <int D, int W>
inline void load_queries(constant tqkv__attend_args &args, device const float *q, uint kv_head, uint first_column,
                         threadgroup float *queries, uint lane, uint simdgroup, uint n_simdgroups)
{
    for (uint c = simdgroup; c < columns; c += n_simdgroups) {
        query_row row = row_of_column(args, first_column + c);
        uint head = kv_head * uint(args.group) + uint(row.head);
        uint at = uint(row.query) * uint(args.n_kv_heads) * uint(args.group) + head;
        float x[TQKV_LANE_VALUES(D)];
        load_row<D>(q + row_offset(at, D), lane, x);
        if (rotate_queries) rotate_row<D>(x, lane);
        for (int i = 0; i < TQKV_LANE_VALUES(D); i++)
            queries[c * padded<D, W>(D) + padded<D, W>(lane * uint(TQKV_LANE_VALUES(D)) + uint(i))] = x[i];
    }
}

// ---- One tile ----

// Lanes that share a row of keys, and rows that they share: lanes l*R .. l*R+R-1 have rows l, l + 32/R, l + 2*32/R ..
#define KEY_LANES(D, W) ((D) / (128 / (W)) < 4 ? (D) / (128 / (W)) : 4)

// Steps of 16 bytes a row that a lane loads before it uses the first of them.
#define KEY_BATCH(D, W) ((D) / (128 / (W)) / KEY_LANES(D, W) < 2 ? 1 : 2)

// The row of a tile whose score a lane ends with.
template <int D, int W>
inline uint row_of_lane(uint lane)
{
    const uint R = KEY_LANES(D, W);
    return lane % R * (32u / R) + lane / R;
}

// dot[r][c] += q_c . k over the N values of each of the lane's R rows that its 16 bytes of this step hold, from value
// `first` on.
template <int D, int W, int R, int C>
inline void multiply_keys(thread const raw_codes<W, 128 / W> (&raw)[R], uint first, threadgroup const float *queries,
                          thread const codebook &book, thread float (&dot)[R][C])
{
    const int N = 128 / W;
    TQKV_UNROLL
    for (int i = 0; i < N; i += 4) {
        float x[R][4];
        TQKV_UNROLL
        for (int r = 0; r < R; r++) {
            TQKV_UNROLL
            for (int k = 0; k < 4; k++) x[r][k] = value_at<W, N>(key_format, raw[r], i + k, book);
        }
        FOR_COLUMNS(c)
        {
            uint at = uint(c) * padded<D, W>(D) + padded<D, W>(first) + uint(i);
            float4 q = *(threadgroup const float4 *)(queries + at);
            TQKV_UNROLL
            for (int r = 0; r < R; r++)
                dot[r][c] = fma(x[r][3], q.w, fma(x[r][2], q.z, fma(x[r][1], q.y, fma(x[r][0], q.x, dot[r][c]))));
        }
    }
}

// Adds the R lanes that share rows. Each step of the tree halves the rows a lane is left with, so that it ends with one
// whole row in total[0] after fewer shuffles than one sum a row would take.
template <int R, int C>
inline void share_out_rows(uint part, thread float (&total)[R][C])
{
    TQKV_UNROLL
    for (int distance = R / 2; distance > 0; distance /= 2) {
        bool upper = (part & uint(distance)) != 0;
        TQKV_UNROLL
        for (int r = 0; r < distance; r++) {
            FOR_COLUMNS(c)
            {
                float keep = upper ? total[r + distance][c] : total[r][c];
                float give = upper ? total[r][c] : total[r + distance][c];
                total[r][c] = keep + simd_shuffle_xor(give, ushort(distance));
            }
        }
    }
}

// The norms of block `block` of the lane's rows in the tile at slot `base`; for rows of several norms.
template <int D, int R>
inline void load_key_scales(constant tqkv__attend_args &args, stream_rows keys, uint base, uint block, uint lane,
                            thread float (&scale)[R])
{
    TQKV_UNROLL
    for (int r = 0; r < R; r++) {
        uint slot = base + row_in_tile(args, uint(r * (32 / R)) + lane / uint(R));
        scale[r] = stored_scale<D>(key_format, keys, slot, block, args.key_block_scale);
    }
}

// dot becomes total += norm * dot where the values of one norm end.
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

// Codes of the steps from `step` on of the tile at slot `base`.
template <int D, int W>
inline void load_key_batch(constant tqkv__attend_args &args, stream_rows keys, uint base, uint step, uint lane,
                           thread raw_codes<W, 128 / W> (&raw)[KEY_BATCH(D, W)][KEY_LANES(D, W)])
{
    const int N = 128 / W, R = KEY_LANES(D, W);
    device const uchar *tile = keys.codes + ulong(base) * ulong(row_bytes<D>(key_format));
    TQKV_UNROLL
    for (int b = 0; b < KEY_BATCH(D, W); b++) {
        TQKV_UNROLL
        for (int r = 0; r < R; r++) {
            uint row = row_in_tile(args, uint(r * (32 / R)) + lane / uint(R));
            load_codes<D, W, N>(key_format, tile + row * row_bytes<D>(key_format),
                                ((step + uint(b)) * uint(R) + lane % uint(R)) * uint(N), raw[b][r]);
        }
    }
}

// score[c] = q_c . k of the lane's row, but for the norm of rows that have one. The first codes and
// norms are there already; when all are used, the first ones of the tile at `next_base` are asked for.
template <int D, int W>
inline void score_tile(constant tqkv__attend_args &args, stream_rows keys, uint base, uint next_base,
                       threadgroup const float *queries, thread const codebook &book, uint lane,
                       thread raw_codes<W, 128 / W> (&raw)[KEY_BATCH(D, W)][KEY_LANES(D, W)],
                       thread float (&scale)[KEY_LANES(D, W)], thread float *score)
{
    const int C = TQKV__MAX_COLUMNS(D), N = 128 / W, R = KEY_LANES(D, W), STEPS = D / (N * R), B = KEY_BATCH(D, W);
    const bool one_norm = norm_block<D>(key_format) == uint(D);
    const uint block_steps = uint(STEPS) / (uint(D) / norm_block<D>(key_format));
    uint part = lane % uint(R);
    float dot[R][C], total[R][C];
    TQKV_UNROLL
    for (int r = 0; r < R; r++) {
        TQKV_UNROLL
        for (int c = 0; c < C; c++) dot[r][c] = total[r][c] = 0.0f;
    }
    for (uint step = 0; step < uint(STEPS); step += uint(B)) {
        TQKV_UNROLL
        for (int b = 0; b < B; b++) {
            uint now = step + uint(b);
            multiply_keys<D, W, R, C>(raw[b], (now * uint(R) + part) * uint(N), queries, book, dot);
            if (one_norm || (now + 1u) % block_steps != 0) continue;
            add_block<R, C>(scale, dot, total);
            bool end = now + 1u == uint(STEPS);
            load_key_scales<D, R>(args, keys, end ? next_base : base, end ? 0u : (now + 1u) / block_steps, lane, scale);
        }
        bool last = step + uint(B) >= uint(STEPS);
        load_key_batch<D, W>(args, keys, last ? next_base : base, last ? 0u : step + uint(B), lane, raw);
    }
    if (one_norm)
        share_out_rows<R, C>(part, dot);
    else
        share_out_rows<R, C>(part, total);
    FOR_COLUMNS(c) score[c] = one_norm ? dot[0][c] : total[0][c];
}

// A dot product as a score in powers of two: 2^score is e^(scale * dot).
inline float score_of(constant tqkv__attend_args &args, float dot, float factor)
{
    if (!softcap) return dot * factor;
    return args.softcap * TQKV_LOG2E * precise::tanh(dot * factor / (args.softcap * TQKV_LOG2E));
}

// Weights of the rows of a tile: 2 columns beside each other if there are no more, or 4, then 4 more for all rows.
template <int C>
inline void store_weights(threadgroup float *weights, uint row, thread const float *weight)
{
    if (columns <= 2) {
        float2 two;
        two.x = weight[0];
        two.y = weight[1];
        *(threadgroup float2 *)(weights + row * 2u) = two;
    } else {
        TQKV_UNROLL
        for (int c = 0; c + 3 < C; c += 4) {
            if (uint(c) >= columns) continue;
            float4 four;
            four.x = weight[c];
            four.y = weight[c + 1];
            four.z = weight[c + 2];
            four.w = weight[c + 3];
            *(threadgroup float4 *)(weights + uint(c) * 32u + row * 4u) = four;
        }
    }
}

template <int C>
inline void load_weights(threadgroup const float *weights, uint row, thread float *weight)
{
    if (columns <= 2) {
        float2 two = *(threadgroup const float2 *)(weights + row * 2u);
        weight[0] = two.x;
        weight[1] = two.y;
    } else {
        TQKV_UNROLL
        for (int c = 0; c + 3 < C; c += 4)
            if (uint(c) < columns) {
                float4 four = *(threadgroup const float4 *)(weights + uint(c) * 32u + row * 4u);
                weight[c] = four.x;
                weight[c + 1] = four.y;
                weight[c + 2] = four.z;
                weight[c + 3] = four.w;
            }
    }
}

// Dot products to weights of the online softmax. A masked position scores -INFINITY by selection, never by arithmetic, so
// nothing that its slot holds gets further. `base` is subtracted from all scores: the maximum when it was last raised,
// which happens only when a score exceeds it by 11. Weights stay below 2^11, and most tiles skip the rescaling.
template <int D>
inline void weigh_tile(constant tqkv__attend_args &args, int position, thread const int *newest, float key_scale,
                       float value_scale, uint row, thread float *score, thread float *base, thread float *sum,
                       thread float (&out)[TQKV__MAX_COLUMNS(D)][LANE_SUMS(D)], threadgroup float *weights)
{
    const int C = TQKV__MAX_COLUMNS(D), V = LANE_SUMS(D);
    float factor = key_scale * (args.scale * TQKV_LOG2E);
    bool raise = false, seen[C];
    FOR_COLUMNS(c)
    {
        seen[c] = position <= newest[c] && (args.window == 0 || position > newest[c] - args.window);
        score[c] = seen[c] ? score_of(args, score[c], factor) : -INFINITY;
        raise = raise || score[c] > base[c] + 11.0f;
    }
    if (simd_any(raise)) {
        FOR_COLUMNS(c)
        {
            float most = max(base[c], simd_max(score[c]));
            float shrink = fast::exp2(base[c] - most);
            base[c] = most;
            sum[c] *= shrink;
            TQKV_UNROLL
            for (int i = 0; i < V; i++) out[c][i] *= shrink;
        }
    }
    float weight[C];
    TQKV_UNROLL
    for (int c = 0; c < C; c++) weight[c] = 0.0f;
    FOR_COLUMNS(c)
    {
        float share = fast::exp2(score[c] - base[c]);
        sum[c] += share;
        weight[c] = share * (seen[c] ? value_scale : 0.0f); // a masked norm may be NaN
    }
    store_weights<C>(weights, row, weight);
}

// Values lie across the lanes: L lanes a row, 8 values each, in J pieces of the row. A step takes 32/L rows.
#define VALUE_LANES(D)  ((D) / LANE_SUMS(D))
#define VALUE_PIECES(D) (LANE_SUMS(D) / 8)

// Steps whose codes are on their way at the same time: as many as 16 words a lane hold.
#define VALUE_ROOM(D, W)  (64 / (VALUE_PIECES(D) * (W)))
#define VALUE_BATCH(D, W) (VALUE_ROOM(D, W) < VALUE_LANES(D) ? VALUE_ROOM(D, W) : VALUE_LANES(D))

template <int D>
inline uint value_row_of_lane(uint step, uint lane)
{
    return step * uint(32 / VALUE_LANES(D)) + lane / uint(VALUE_LANES(D));
}

// A step's codes, and its norms where a row has several.
template <int D, int W>
struct value_step {
    raw_codes<W, 8> raw[VALUE_PIECES(D)];
    float scale[VALUE_PIECES(D)];
};

template <int D, int W>
inline void load_value_step(constant tqkv__attend_args &args, stream_rows values, uint base, uint step, uint lane,
                            thread value_step<D, W> &now)
{
    const uint block = norm_block<D>(value_format);
    const uint bytes = row_bytes<D>(value_format);
    uint row = row_in_tile(args, value_row_of_lane<D>(step, lane));
    device const uchar *codes = same_slots ? values.codes + ulong(base) * ulong(bytes) + row * bytes
                                           : values.codes + ulong(value_slot_of(args, base + row)) * ulong(bytes);
    TQKV_UNROLL
    for (int j = 0; j < VALUE_PIECES(D); j++) {
        uint first = (uint(j * VALUE_LANES(D)) + lane % uint(VALUE_LANES(D))) * 8u;
        load_codes<D, W, 8>(value_format, codes, first, now.raw[j]);
        now.scale[j] = 1.0f;
        if (block != uint(D))
            now.scale[j] = stored_scale<D>(value_format, values, value_slot_of(args, base + row), first / block,
                                           args.value_block_scale);
    }
}

// out[c] += weight * value, over the rows of one step.
template <int D, int W>
inline void add_value_step(uint step, uint lane, thread const value_step<D, W> &now, threadgroup const float *weights,
                           thread const codebook &book, thread float (&out)[TQKV__MAX_COLUMNS(D)][LANE_SUMS(D)])
{
    const int C = TQKV__MAX_COLUMNS(D);
    const bool one_norm = norm_block<D>(value_format) == uint(D);
    float weight[C];
    load_weights<C>(weights, value_row_of_lane<D>(step, lane), weight);
    TQKV_UNROLL
    for (int j = 0; j < VALUE_PIECES(D); j++) {
        float x[8];
        TQKV_UNROLL
        for (int i = 0; i < 8; i++) x[i] = value_at<W, 8>(value_format, now.raw[j], i, book);
        FOR_COLUMNS(c)
        {
            // A masked slot may hold halves or norms that are NaN, and 0 * NaN is no 0.
            if ((W == 16 || !one_norm) && weight[c] == 0.0f) continue;
            float factor = one_norm ? weight[c] : weight[c] * now.scale[j];
            TQKV_UNROLL
            for (int i = 0; i < 8; i++) out[c][j * 8 + i] = fma(factor, x[i], out[c][j * 8 + i]);
        }
    }
}

// The values of a tile; the codes of the first steps are there already, and those of later ones are asked for as soon as
// there is room.
template <int D, int W>
inline void add_values(constant tqkv__attend_args &args, stream_rows values, uint base, uint lane,
                       thread value_step<D, W> (&steps)[VALUE_BATCH(D, W)], threadgroup const float *weights,
                       thread const codebook &book, thread float (&out)[TQKV__MAX_COLUMNS(D)][LANE_SUMS(D)])
{
    const int L = VALUE_LANES(D), B = VALUE_BATCH(D, W);
    for (uint first = 0; first < uint(L); first += uint(B)) {
        TQKV_UNROLL
        for (int b = 0; b < B; b++) {
            add_value_step<D, W>(first + uint(b), lane, steps[b], weights, book, out);
            if (first + uint(B) < uint(L))
                load_value_step<D, W>(args, values, base, first + uint(B + b), lane, steps[b]);
        }
    }
}

// ---- The whole ----

// Brings a simdgroup's maximum, sum and output to the common maximum of the threadgroup. state:
// [simdgroups][C][2]
template <int D>
inline void combine_states(thread float *maximum, thread float *sum,
                           thread float (&out)[TQKV__MAX_COLUMNS(D)][LANE_SUMS(D)], threadgroup float *state, uint lane,
                           uint simdgroup, uint n_simdgroups)
{
    const int C = TQKV__MAX_COLUMNS(D);
    FOR_COLUMNS(c)
    {
        sum[c] = simd_sum(sum[c]);
        if (lane == 0) {
            state[(simdgroup * uint(C) + uint(c)) * 2u] = maximum[c];
            state[(simdgroup * uint(C) + uint(c)) * 2u + 1u] = sum[c];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    FOR_COLUMNS(c)
    {
        float most = -INFINITY, all = 0.0f;
        for (uint s = 0; s < n_simdgroups; s++) most = max(most, state[(s * uint(C) + uint(c)) * 2u]);
        for (uint s = 0; s < n_simdgroups; s++) {
            float own = state[(s * uint(C) + uint(c)) * 2u];
            all = fma(share_of(own, most), state[(s * uint(C) + uint(c)) * 2u + 1u], all);
        }
        float shrink = share_of(maximum[c], most);
        TQKV_UNROLL
        for (int i = 0; i < LANE_SUMS(D); i++) out[c][i] *= shrink;
        maximum[c] = most;
        sum[c] = all;
    }
}

// Adds the lanes and then the simdgroups, one after the other for a fixed order. shared_out: [columns][D]
template <int D>
inline void combine_outputs(thread float (&out)[TQKV__MAX_COLUMNS(D)][LANE_SUMS(D)], threadgroup float *shared_out,
                            uint lane, uint simdgroup, uint n_simdgroups)
{
    const int C = TQKV__MAX_COLUMNS(D), V = LANE_SUMS(D), L = D / V;
    FOR_COLUMNS(c)
    {
        TQKV_UNROLL
        for (int i = 0; i < V; i++) {
            TQKV_UNROLL
            for (int distance = L; distance < 32; distance *= 2)
                out[c][i] += simd_shuffle_xor(out[c][i], ushort(distance));
        }
    }
    for (uint turn = 0; turn < n_simdgroups; turn++) {
        if (simdgroup == turn && lane < uint(L)) {
            FOR_COLUMNS(c)
            {
                TQKV_UNROLL
                for (int i = 0; i < V; i += 4) {
                    threadgroup float4 *at =
                        (threadgroup float4 *)(shared_out +
                                               (uint(c * D) + (uint(i / 8 * L) + lane) * 8u + uint(i % 8)));
                    float4 all = *at; // of the queries in the first turn
                    all.x = (turn == 0 ? 0.0f : all.x) + out[c][i];
                    all.y = (turn == 0 ? 0.0f : all.y) + out[c][i + 1];
                    all.z = (turn == 0 ? 0.0f : all.z) + out[c][i + 2];
                    all.w = (turn == 0 ? 0.0f : all.w) + out[c][i + 3];
                    *at = all;
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// partial_out: [n_splits][n_queries][n_heads][D], not divided by the sum; partial_state:
// [n_splits][n_queries][n_heads][2], the maximum (in powers of two) and the sum of the weights relative to it.
template <int D>
inline void store_partial(constant tqkv__attend_args &args, uint3 group, thread const float *maximum,
                          thread const float *sum, threadgroup const float *shared_out, device float *partial_out,
                          device float *partial_state, uint thread_index, uint n_threads)
{
    const int C = TQKV__MAX_COLUMNS(D);
    uint n_heads = uint(args.n_kv_heads) * uint(args.group), n_rows = uint(args.n_queries) * uint(args.group);
    FOR_COLUMNS(c)
    {
        if (group.y * columns + uint(c) >= n_rows) continue;
        query_row row = row_of_column(args, group.y * columns + uint(c));
        uint head = group.x * uint(args.group) + uint(row.head);
        ulong to = (ulong(group.z) * ulong(args.n_queries) + ulong(row.query)) * ulong(n_heads) + ulong(head);
        for (uint i = thread_index; i < uint(D); i += n_threads)
            partial_out[to * ulong(D) + i] = shared_out[uint(c * D) + i];
        if (thread_index == 0) {
            partial_state[to * 2u] = maximum[c];
            partial_state[to * 2u + 1u] = sum[c];
        }
    }
}

// KW, VW: main_bits of the formats. group: (KV head, block of columns, split).
template <int D, int KW, int VW>
inline void attend(constant tqkv__attend_args &args, device const float *q, stream_rows keys, stream_rows values,
                   device float *partial_out, device float *partial_state, threadgroup float *tables,
                   threadgroup float *queries, threadgroup float *weights, threadgroup float *state, uint3 group,
                   uint lane, uint simdgroup, uint n_simdgroups)
{
    const int C = TQKV__MAX_COLUMNS(D), V = LANE_SUMS(D);
    uint thread_index = simdgroup * 32u + lane, first_column = group.y * columns;
    tile_range range = tiles_of_split(args, first_column, group.z);
    uint row = row_of_lane<D, KW>(lane);
    raw_codes<KW, 128 / KW> key_codes[KEY_BATCH(D, KW)][KEY_LANES(D, KW)];
    tile_place next = open_tile(args, range, min(range.begin + simdgroup, range.end), row);
    load_key_batch<D, KW>(args, keys, next.base, 0u, lane, key_codes);
    float key_scales[KEY_LANES(D, KW)];
    if (norm_block<D>(key_format) != uint(D)) load_key_scales<D>(args, keys, next.base, 0u, lane, key_scales);
    load_codebook(key_format, tables, thread_index, n_simdgroups * 32u);
    load_codebook(value_format, tables + 256, thread_index, n_simdgroups * 32u);
    load_queries<D, KW>(args, q, group.x, first_column, queries, lane, simdgroup, n_simdgroups);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    codebook key_book = open_codebook(key_format, tables, lane);
    codebook value_book = open_codebook(value_format, tables + 256, lane);
    threadgroup float *own_weights = weights + simdgroup * uint(32 * C);

    float base[C], sum[C], out[C][V];
    int newest[C];
    TQKV_UNROLL
    for (int c = 0; c < C; c++) {
        newest[c] = newest_seen(args, many_queries ? row_of_column(args, first_column + uint(c)).query : 0);
        base[c] = NOTHING_SEEN;
        sum[c] = 0.0f;
        TQKV_UNROLL
        for (int i = 0; i < V; i++) out[c][i] = 0.0f;
    }
    for (uint t = range.begin + simdgroup; t < range.end; t += n_simdgroups) {
        tile_place at = next;
        next = open_tile(args, range, min(t + n_simdgroups, range.end), row);
        float score[C], key_scale = 1.0f, value_scale = 1.0f;
        value_step<D, VW> steps[VALUE_BATCH(D, VW)];
        if (norm_block<D>(key_format) == uint(D))
            key_scale = stored_scale<D>(key_format, keys, at.slot, 0u, args.key_block_scale);
        if (norm_block<D>(value_format) == uint(D))
            value_scale =
                stored_scale<D>(value_format, values, value_slot_of(args, at.slot), 0u, args.value_block_scale);
        TQKV_UNROLL
        for (int b = 0; b < VALUE_BATCH(D, VW); b++)
            load_value_step<D, VW>(args, values, at.base, uint(b), lane, steps[b]);
        score_tile<D, KW>(args, keys, at.base, next.base, queries, key_book, lane, key_codes, key_scales, score);
        weigh_tile<D>(args, at.position, newest, key_scale, value_scale, row, score, base, sum, out, own_weights);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        add_values<D, VW>(args, values, at.base, lane, steps, own_weights, value_book, out);
        simdgroup_barrier(mem_flags::mem_threadgroup); // before the next tile overwrites the weights
    }
    float maximum[C];
    TQKV_UNROLL
    for (int c = 0; c < C; c++) maximum[c] = base[c] == NOTHING_SEEN ? -INFINITY : base[c];
    combine_states<D>(maximum, sum, out, state, lane, simdgroup, n_simdgroups);
    // Behind its barrier all simdgroups have done with the queries: their memory takes the sums.
    combine_outputs<D>(out, queries, lane, simdgroup, n_simdgroups);
    store_partial<D>(args, group, maximum, sum, queries, partial_out, partial_state, thread_index, n_simdgroups * 32u);
}

// The one place where formats choose code: three widths of a stored value for keys times three for values.
template <int D, int KW>
inline void attend_with_keys(constant tqkv__attend_args &args, device const float *q, stream_rows keys,
                             stream_rows values, device float *partial_out, device float *partial_state,
                             threadgroup float *tables, threadgroup float *queries, threadgroup float *weights,
                             threadgroup float *state, uint3 group, uint lane, uint simdgroup, uint n_simdgroups)
{
    if (main_bits(value_format) == 4)
        attend<D, KW, 4>(args, q, keys, values, partial_out, partial_state, tables, queries, weights, state, group,
                         lane, simdgroup, n_simdgroups);
    if (main_bits(value_format) == 8)
        attend<D, KW, 8>(args, q, keys, values, partial_out, partial_state, tables, queries, weights, state, group,
                         lane, simdgroup, n_simdgroups);
    if (main_bits(value_format) == 16)
        attend<D, KW, 16>(args, q, keys, values, partial_out, partial_state, tables, queries, weights, state, group,
                          lane, simdgroup, n_simdgroups);
}

#endif

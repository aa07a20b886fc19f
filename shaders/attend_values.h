// Sums of weight * value over a tile, for attend.h: the lanes lie across the row, and the weights come from threadgroup memory.
// Letters: as in attend.h.
#ifndef TQKV_ATTEND_VALUES_H
#define TQKV_ATTEND_VALUES_H
#include "attend_task.h"

// ---- Weights ----

// Weights of a tile in threadgroup memory: [32][2] for 1 or 2 columns, else [C/4][32][4].
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
        for (int c = 0; c + 3 < C; c += 4) {
            if (uint(c) >= columns) continue;
            float4 four = *(threadgroup const float4 *)(weights + uint(c) * 32u + row * 4u);
            weight[c] = four.x;
            weight[c + 1] = four.y;
            weight[c + 2] = four.z;
            weight[c + 3] = four.w;
        }
    }
}

// ---- Values ----

// The lanes lie across a row of values: L lanes, 8 values each, in J pieces of the row. A step takes 32/L rows. With a
// matrix the last of the L lanes have no values: they repeat others, and their sums go nowhere.
#define VALUE_LANES(D)  ((D) <= 32 ? 4 : (D) <= 64 ? 8 : (D) <= 128 ? 16 : 32)
#define VALUE_PIECES(D) (LANE_SUMS(D) / 8)

// Steps that a lane loads before it uses the first of them.
#define VALUE_WORDS(D, W) (VALUE_PIECES(D) * ((8 * (W) + 31) / 32))
#define VALUE_ROOM(D, W)  TQKV_VALUE_WORDS(D, W, LANE_SUMS(D) * int(columns))
#define VALUE_STEPS(D, W) (VALUE_ROOM(D, W) < VALUE_WORDS(D, W) ? 1 : VALUE_ROOM(D, W) / VALUE_WORDS(D, W))
#define VALUE_BATCH(D, W) (VALUE_STEPS(D, W) < VALUE_LANES(D) ? VALUE_STEPS(D, W) : VALUE_LANES(D))

template <int D>
inline uint value_row_of_lane(uint step, uint lane)
{
    return step * uint(32 / VALUE_LANES(D)) + lane / uint(VALUE_LANES(D));
}

// The codes of a step, and for rows of several norms the factors.
template <int D, int W>
struct value_step {
    raw_codes<W, 8> raw[VALUE_PIECES(D)];
    float scale[VALUE_PIECES(D)];
};

template <int D, int W>
inline void load_value_step(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint number,
                            thread value_step<D, W> &step)
{
    const uint block = norm_block<D>(value_format), bytes = row_bytes<D>(value_format);
    stream_rows values = task.values;
    uint row = value_row_of_lane<D>(number, task.lane);
    device const uchar *codes = value_codes(args, task.pages, values.codes, bytes, base, row);
    TQKV_UNROLL
    for (int j = 0; j < VALUE_PIECES(D); j++) {
        uint part = min(task.lane % uint(VALUE_LANES(D)), uint(LANE_SPAN(D)) - 1u);
        uint first = (uint(j * LANE_SPAN(D)) + part) * 8u;
        load_codes<D, W, 8>(value_format, codes, first, step.raw[j]);
        step.scale[j] = 1.0f;
        if (!one_norm<D>(value_format))
            step.scale[j] = stored_scale<D>(value_format, values, value_slot(args, task.pages, base, row),
                                            first / block, args.value_block_scale);
    }
}

// out[c] += weight * value, over the rows of step `number`.
template <int D, int W>
inline void add_value_step(thread const value_step<D, W> &step, uint number, uint lane, thread const codebook &book,
                           threadgroup const float *weights, thread column_state<D> &state)
{
    const int C = TQKV__MAX_COLUMNS(D);
    float weight[C];
    load_weights<C>(weights, value_row_of_lane<D>(number, lane), weight);
    TQKV_UNROLL
    for (int j = 0; j < VALUE_PIECES(D); j++) {
        float x[8];
        values_at<W, 8, 8>(value_format, step.raw[j], 0, book, x);
        FOR_COLUMNS(c)
        {
            // A masked slot may hold halves or norms that are NaN, and 0 * NaN is not 0.
            if ((W == 16 || !one_norm<D>(value_format)) && weight[c] == 0.0f) continue;
            float factor = one_norm<D>(value_format) ? weight[c] : weight[c] * step.scale[j];
            TQKV_UNROLL
            for (int i = 0; i < 8; i++) state.out[c][j * 8 + i] = fma(factor, x[i], state.out[c][j * 8 + i]);
        }
    }
}

// `steps` holds the first steps of the tile at slot `base`. A later step is loaded when an earlier one makes room. With
// plain loads the last steps stand apart.
template <int D, int W>
inline void add_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                       thread const codebook &book, thread value_step<D, W> (&steps)[VALUE_BATCH(D, W)],
                       threadgroup const float *weights, thread column_state<D> &state)
{
    const int L = VALUE_LANES(D), B = VALUE_BATCH(D, W);
    const uint end = TQKV_PLAIN_LOADS ? uint(L - B) : uint(L);
    TQKV_UNROLL_VALUES(D, W, LANE_SUMS(D) * int(columns))
    for (uint first = 0; first < end; first += uint(B)) {
        TQKV_UNROLL
        for (int b = 0; b < B; b++) {
            add_value_step<D, W>(steps[b], first + uint(b), task.lane, book, weights, state);
            if (TQKV_PLAIN_LOADS || first + uint(B) < uint(L))
                load_value_step<D, W>(args, task, base, first + uint(B + b), steps[b]);
        }
    }
    if (!TQKV_PLAIN_LOADS) return;
    TQKV_UNROLL
    for (int b = 0; b < B; b++) add_value_step<D, W>(steps[b], uint(L - B + b), task.lane, book, weights, state);
}

// As any_keys.
template <int D>
struct any_values {
    value_step<D, 4> of_4[VALUE_BATCH(D, 4)];
    value_step<D, 8> of_8[VALUE_BATCH(D, 8)];
    value_step<D, 16> of_16[VALUE_BATCH(D, 16)];
};

template <int D, int W>
inline void load_first_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                              thread value_step<D, W> (&steps)[VALUE_BATCH(D, W)])
{
    TQKV_UNROLL
    for (int b = 0; b < VALUE_BATCH(D, W); b++) load_value_step<D, W>(args, task, base, uint(b), steps[b]);
}

template <int D>
inline void open_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                        thread any_values<D> &values)
{
    WITH_CODES(value_format, values, load_first_values<D, W>(args, task, base, codes));
}

template <int D>
inline void add_any_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                           thread const codebook &book, thread any_values<D> &values, threadgroup const float *weights,
                           thread column_state<D> &state)
{
    WITH_CODES(value_format, values, add_values<D, W>(args, task, base, book, codes, weights, state));
}

#endif

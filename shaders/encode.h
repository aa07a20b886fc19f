// Encoding: 32/L rows at a time by one simdgroup. The order of every rounded operation is fixed: codes and norms are the
// same bytes as those of tqkv_encode, whose 32 lanes of D/32 values each are the "parts" below.
#ifndef TQKV_ENCODE_H
#define TQKV_ENCODE_H
#include "codec.h"
#include "rotate.h"

inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }

// 16 values a lane, so that most stages of the transform stay in the lane; 32 from head_dim 256 on. Pieces of 16 bytes and
// more. Measured on a H200 at head_dim 128: 188 microseconds for 2^20 rows to TQ4, 198 with 32 values; at 256 427 and 389.
#define ENCODE_LANES(D)  ((D) <= 128 ? (D) / 16 : (D) / 32)
#define ENCODE_PIECE(D)  ((D) <= 128 ? 4 : (D) / 32)
#define ENCODE_VALUES(D) ((D) / ENCODE_LANES(D))
#define ENCODE_PIECES(D) TQKV_PIECES(D, ENCODE_LANES(D), ENCODE_PIECE(D))

// A row with a NaN or Inf becomes a row of zeros; true for such a row. Times 0, only these are not 0.
template <int D>
inline bool clear_if_not_finite(thread float *x)
{
    float zero = 0.0f;
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i++) zero = fma(x[i], 0.0f, zero);
    uint bad = zero == 0.0f ? 0u : 1u;
    TQKV_UNROLL
    for (int distance = 1; distance < ENCODE_LANES(D); distance *= 2) bad |= simd_shuffle_xor(bad, ushort(distance));
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i++) x[i] = bad != 0 ? 0.0f : x[i];
    return bad != 0;
}

// A block of values that share a norm lies in that many pieces of that many lanes.
#define BLOCK_PIECES(D, BLOCK)                                                                                         \
    ((BLOCK) > ENCODE_LANES(D) * ENCODE_PIECE(D) ? (BLOCK) / (ENCODE_LANES(D) * ENCODE_PIECE(D)) : 1)
#define BLOCK_LANES(D, BLOCK) ((BLOCK) / (ENCODE_PIECE(D) * BLOCK_PIECES(D, BLOCK)))
#define NORM_BLOCK(D)         ((D) < 512 ? (D) : 256)
#define MAXIMUM_BLOCK(D)      ((D) <= 128 ? (D) : 128)

// Sum of squares: within each part in order, then parts in pairs of distance 1, 2, 4 .. within the norm's block, which
// no lane's sum leaves. x: of one piece.
template <int D>
inline float piece_squares(thread const float *x)
{
    const int E = TQKV_LANE_VALUES(D), PARTS = ENCODE_PIECE(D) / E, LANES = BLOCK_LANES(D, NORM_BLOCK(D));
    float sum[PARTS];
    TQKV_UNROLL
    for (int p = 0; p < PARTS; p++) {
        sum[p] = x[p * E] * x[p * E];
        TQKV_UNROLL
        for (int i = 1; i < E; i++) sum[p] = sum[p] + x[p * E + i] * x[p * E + i];
    }
    TQKV_UNROLL
    for (int distance = 1; distance < PARTS; distance *= 2) {
        TQKV_UNROLL
        for (int p = 0; p + distance < PARTS; p += 2 * distance) sum[p] = sum[p] + sum[p + distance];
    }
    TQKV_UNROLL
    for (int distance = 1; distance < LANES; distance *= 2)
        sum[0] = sum[0] + simd_shuffle_xor(sum[0], ushort(distance));
    return sum[0];
}

// norm[j]: of the block that begins at piece j.
template <int D>
inline void block_norms(thread const float *x, thread float *norm)
{
    const int J = ENCODE_PIECES(D), P = BLOCK_PIECES(D, NORM_BLOCK(D));
    TQKV_UNROLL
    for (int j = 0; j < J; j++) norm[j] = piece_squares<D>(x + j * ENCODE_PIECE(D));
    TQKV_UNROLL
    for (int distance = 1; distance < P; distance *= 2) {
        TQKV_UNROLL
        for (int j = 0; j + distance < J; j += 2 * distance) norm[j] = norm[j] + norm[j + distance];
    }
    TQKV_UNROLL
    for (int j = 0; j < J; j += P) {
        norm[j] = precise::sqrt(D < 512 ? norm[j] : norm[j] / 256.0f);
        // Where the rotation overflows; which of all NaNs it is differs from machine to machine.
        if ((as_type<uint>(norm[j]) & 0x7fffffffu) > 0x7f800000u) norm[j] = as_type<float>(0x7fc00000u);
    }
}

template <int D>
inline void block_maxima(thread const float *x, thread float *most)
{
    const int J = ENCODE_PIECES(D), C = ENCODE_PIECE(D), P = BLOCK_PIECES(D, MAXIMUM_BLOCK(D));
    TQKV_UNROLL
    for (int j = 0; j < J; j += P) {
        most[j] = 0.0f;
        TQKV_UNROLL
        for (int i = 0; i < P * C; i++) most[j] = fmax(most[j], fabs(x[j * C + i]));
        TQKV_UNROLL
        for (int distance = 1; distance < BLOCK_LANES(D, MAXIMUM_BLOCK(D)); distance *= 2)
            most[j] = fmax(most[j], simd_shuffle_xor(most[j], ushort(distance)));
    }
}

// Scales the lane's values to the codebook's or the grid's units; norm[j]: of the block that piece j is in.
template <int D>
inline void normalise(uint format, float block_scale, thread float *x, thread float *norm)
{
    const int C = ENCODE_PIECE(D), P = BLOCK_PIECES(D, NORM_BLOCK(D)), M = BLOCK_PIECES(D, MAXIMUM_BLOCK(D));
    if (is_half(format)) return;
    float scale = 0.0f;
    if (is_grid(format))
        block_maxima<D>(x, norm);
    else
        block_norms<D>(x, norm);
    TQKV_UNROLL
    for (int j = 0; j < ENCODE_PIECES(D); j++) {
        if (is_grid(format) && j % M == 0) {
            scale = norm[j] > TQKV__MIN_NORM ? 127.0f / norm[j] : 0.0f;
            norm[j] = norm[j] / 127.0f;
        }
        if (!is_grid(format) && j % P == 0) {
            float inverse = norm[j] > TQKV__MIN_NORM ? 1.0f / norm[j] : 0.0f;
            scale = inverse * (D < 512 ? TQKV__SQRT(D) : block_scale);
        }
        scale_values<C>(x + j * C, scale);
    }
}

// The lowest BITS bits, 8 or more, of words.
template <int BITS>
inline void store_bits(device uchar *to, thread const uint *words)
{
    if (BITS == 8) *to = uchar(words[0]);
    if (BITS == 16) *(device ushort *)to = ushort(words[0]);
    TQKV_UNROLL
    for (int i = 0; i < BITS / 32; i++) ((device uint *)to)[i] = words[i];
}

// BITS bits, from bit `low` on, of each of a piece's codes, into the field at `to`. Codes that fit leave nothing to mask.
template <int D, int BITS>
inline void store_field(thread const uint *codes, uint low, bool fit, uint first, bool own, uint lane,
                        device uchar *field)
{
    const int C = ENCODE_PIECE(D), N = C * BITS;
    uint words[(N + 31) / 32];
    TQKV_UNROLL
    for (int i = 0; i < (N + 31) / 32; i++) words[i] = 0;
    TQKV_UNROLL
    for (int i = 0; i < C; i++)
        words[i * BITS / 32] += (fit ? codes[i] : (codes[i] >> low) & ((1u << BITS) - 1u)) << (i * BITS % 32);
    if (N < 8) { // half a byte: the other half is the next lane's
        words[0] |= simd_shuffle_xor(words[0], ushort(1)) << (N % 8);
        own = own && (lane & 1u) == 0;
    }
    if (own) store_bits<(N < 8 ? 8 : N)>(field + first * uint(BITS) / 8u, words);
}

// Codes of a piece into the row, the piece's first value being `first`. own: the lane's row is there; all lanes come here
// together.
template <int D>
inline void store_piece(uint format, thread const float *x, uint first, bool own, uint lane, threadgroup uint2 *cells,
                        device uchar *row)
{
    const int C = ENCODE_PIECE(D);
    uint codes[C];
    if (is_half(format)) {
        uint words[C / 2];
        TQKV_UNROLL
        for (int i = 0; i < C / 2; i++) words[i] = half_bits(x[2 * i]) | half_bits(x[2 * i + 1]) << 16;
        if (own) store_bits<16 * C>(row + first * 2u, words);
        return;
    }
    TQKV_UNROLL
    for (int i = 0; i < C; i++)
        codes[i] = is_grid(format) ? quantise_grid(x[i]) : quantise(x[i], codebook_bits(format), cells);
    if (main_bits(format) == 4)
        store_field<D, 4>(codes, 0u, format == TQKV_TQ4, first, own, lane, row);
    else
        store_field<D, 8>(codes, 0u, true, first, own, lane, row);
    if (format == TQKV_TQ5) store_field<D, 1>(codes, 4u, false, first, own, lane, row + D / 2);
    if (format == TQKV_TQ6) store_field<D, 2>(codes, 4u, false, first, own, lane, row + D / 2);
}

// Where a lane is: its number among the lanes of its row, and the row, of token and head, if there is such a row.
struct encode_place {
    uint lane, row, token, head;
    bool own;
};

// The lane's row of the first pass, `first_row` being the simdgroup's first.
template <int D>
inline encode_place first_place(constant tqkv__rows_args &args, uint first_row, uint lane)
{
    encode_place at;
    at.lane = lane % uint(ENCODE_LANES(D));
    at.row = first_row + lane / uint(ENCODE_LANES(D));
    at.token = at.row / uint(args.n_kv_heads);
    at.head = at.row % uint(args.n_kv_heads);
    at.own = at.token < uint(args.n_tokens);
    return at;
}

// The lane's row of the next pass: without another division.
template <int D>
inline void next_place(constant tqkv__rows_args &args, uint step_tokens, uint step_heads, thread encode_place &at)
{
    at.row += uint(32 / ENCODE_LANES(D));
    at.token += step_tokens;
    at.head += step_heads;
    bool wrap = at.head >= uint(args.n_kv_heads);
    at.token += wrap ? 1u : 0u;
    at.head -= wrap ? uint(args.n_kv_heads) : 0u;
    at.own = at.token < uint(args.n_tokens);
}

// +-1 of each value of a row. The caller puts a barrier behind it.
template <int D>
inline void load_signs(threadgroup float *signs, uint thread_index, uint n_threads)
{
    for (uint i = thread_index; i < uint(D); i += n_threads)
        signs[i] = (tqkv__tables.signs[(i & 511u) >> 3] >> (i & 7u)) & 1u ? -1.0f : 1.0f;
}

// rotate_values with signs from threadgroup memory: products with them are exact, and half of them are part of the
// transform's first stage.
template <int D>
inline void turn_values(thread float *x, uint lane, threadgroup const float *signs)
{
    const int L = ENCODE_LANES(D), C = ENCODE_PIECE(D);
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i += 4) {
        float4 sign = *(threadgroup const float4 *)(signs + ((uint(i / C * L) + lane) * uint(C) + uint(i % C)));
        float a = x[i] * sign.x, b = x[i + 2] * sign.z;
        x[i] = fma(x[i + 1], sign.y, a);
        x[i + 1] = fma(x[i + 1], -sign.y, a);
        x[i + 2] = fma(x[i + 3], sign.w, b);
        x[i + 3] = fma(x[i + 3], -sign.w, b);
    }
    hadamard_from<D, L, C>(x, lane, 2);
    scale_values<ENCODE_VALUES(D)>(x, TQKV__INV_SQRT(D));
}

template <int D>
inline void load_values(device const float *row, uint lane, thread float *x)
{
    const int L = ENCODE_LANES(D), C = ENCODE_PIECE(D);
    TQKV_UNROLL
    for (int j = 0; j < ENCODE_PIECES(D); j++) load_floats<C>(row + (uint(j * L) + lane) * uint(C), x + j * C);
}

// Everything before the codes: loads the lane's part of its row, raises the flag, rotates and scales. Every value of a
// rotated row is a sum of all, so a NaN or Inf shows in any of them; then the row is looked at again.
template <int D>
inline void prepare_row(uint format, bool rotated, float block_scale, device const float *row, uint lane,
                        threadgroup const float *signs, device atomic_uint *not_finite, thread float *x,
                        thread float *norm)
{
    load_values<D>(row, lane, x);
    if (rotated) turn_values<D>(x, lane, signs);
    if (!rotated || simd_any(!is_finite(x[0]))) {
        if (rotated) load_values<D>(row, lane, x);
        if (clear_if_not_finite<D>(x) && lane == 0) atomic_store_explicit(not_finite, 1u, memory_order_relaxed);
        if (rotated) turn_values<D>(x, lane, signs);
    }
    normalise<D>(format, block_scale, x, norm);
}

// One simdgroup of a threadgroup that shares the cells encodes TQKV__ENCODE_ROWS(D) rows from `first_row` on, or as many
// as there are. Lanes without a row go along with the last one.
template <int D>
inline void encode_rows(uint format, bool rotated, constant tqkv__rows_args &args, device const float *source,
                        uint first_row, device uchar *codes, device float *norms, device atomic_uint *not_finite,
                        threadgroup uint2 *cells, threadgroup const float *signs, uint lane)
{
    const int L = ENCODE_LANES(D), C = ENCODE_PIECE(D), STEP = 32 / L;
    const uint block = norm_block<D>(format), n_heads = uint(args.n_kv_heads), n_rows = uint(args.n_tokens) * n_heads;
    uint step_tokens = uint(STEP) / n_heads, step_heads = uint(STEP) % n_heads;
    encode_place at = first_place<D>(args, first_row, lane);
    for (uint row = first_row; row < min(first_row + uint(TQKV__ENCODE_ROWS(D)), n_rows); row += uint(STEP)) {
        float x[ENCODE_VALUES(D)], norm[ENCODE_PIECES(D)];
        prepare_row<D>(format, rotated, args.block_scale, source + row_offset(min(at.row, n_rows - 1u), D), at.lane,
                       signs, not_finite, x, norm);
        ulong to = ulong(at.head) * ulong(args.capacity) + ulong(slot_of(args, at.token));
        TQKV_UNROLL
        for (int j = 0; j < ENCODE_PIECES(D); j++) {
            uint first = (uint(j * L) + at.lane) * uint(C);
            store_piece<D>(format, x + j * C, first, at.own, lane, cells, codes + to * ulong(row_bytes<D>(format)));
            if (at.own && !is_half(format) && first % block == 0)
                norms[to * ulong(uint(D) / block) + first / block] = norm[j];
        }
        next_place<D>(args, step_tokens, step_heads, at);
    }
}

template <int D>
inline void probe_rows(uint format, bool rotated, constant tqkv__rows_args &args, device const float *source,
                       uint first_row, device float *scaled, device atomic_uint *not_finite,
                       threadgroup const float *signs, uint lane)
{
    const int L = ENCODE_LANES(D), C = ENCODE_PIECE(D), STEP = 32 / L;
    const uint n_rows = uint(args.n_tokens) * uint(args.n_kv_heads);
    uint lane_of_row = lane % uint(L);
    for (uint row = first_row; row < min(first_row + uint(TQKV__ENCODE_ROWS(D)), n_rows); row += uint(STEP)) {
        float x[ENCODE_VALUES(D)], norm[ENCODE_PIECES(D)];
        uint own = row + lane / uint(L);
        prepare_row<D>(format, rotated, args.block_scale, source + row_offset(min(own, n_rows - 1u), D), lane_of_row,
                       signs, not_finite, x, norm);
        TQKV_UNROLL
        for (int i = 0; i < ENCODE_VALUES(D); i++)
            if (own < n_rows)
                scaled[row_offset(own, D) + (uint(i / C * L) + lane_of_row) * uint(C) + uint(i % C)] = x[i];
    }
}

#endif

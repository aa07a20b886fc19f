// Encoding of one row by one simdgroup. The order of every rounded operation is fixed: codes and norms are the same
// bytes as those of tqkv_encode.
#ifndef TQKV_ENCODE_H
#define TQKV_ENCODE_H
#include "codec.h"
#include "rotate.h"

inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }

// A row with a NaN or Inf becomes a row of zeros; true for such a row.
template <int D>
inline bool clear_if_not_finite(thread float *x)
{
    bool bad = false;
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) bad = bad || !is_finite(x[i]);
    bool any = simd_any(bad);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = any ? 0.0f : x[i];
    return any;
}

// Norm of the lane's block: the lane's squares in order, then lanes in pairs of distance 1, 2, 4 .. within the block.
// The tree meets only lanes of its own block, so no lane has to sit out and none sums a neighbour's block.
template <int D>
inline float block_norm(thread const float *x)
{
    const int lanes = D < 512 ? 32 : 256 / TQKV_LANE_VALUES(D);
    float sum = 0.0f;
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) sum = sum + x[i] * x[i];
    TQKV_UNROLL
    for (int distance = 1; distance < lanes; distance *= 2) sum = sum + simd_shuffle_xor(sum, ushort(distance));
    return precise::sqrt(D < 512 ? sum : sum / 256.0f);
}

template <int D>
inline float block_maximum(thread const float *x)
{
    const int lanes = (D <= 128 ? D : 128) / TQKV_LANE_VALUES(D);
    float most = 0.0f;
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) most = fabs(x[i]) > most ? fabs(x[i]) : most;
    TQKV_UNROLL
    for (int distance = 1; distance < lanes; distance *= 2) {
        float other = simd_shuffle_xor(most, ushort(distance));
        most = other > most ? other : most;
    }
    return most;
}

// Scales the lane's values to the codebook's or the grid's units and returns the norm of their block.
template <int D>
inline float normalise(uint format, float block_scale, thread float *x)
{
    if (format == TQKV_F16) return 0.0f;
    float norm, scale;
    if (format == TQKV_I8) {
        float most = block_maximum<D>(x);
        norm = most / 127.0f;
        scale = most > TQKV__MIN_NORM ? 127.0f / most : 0.0f;
    } else {
        norm = block_norm<D>(x);
        float inverse = norm > TQKV__MIN_NORM ? 1.0f / norm : 0.0f;
        scale = inverse * (D < 512 ? TQKV__SQRT(D) : block_scale);
    }
    scale_lane<D>(x, scale);
    return norm;
}

// Codes of the lane's values into the row: F16 straight, the others by way of `staging`, one byte a code, from which
// each lane takes the codes of whole words.
template <int D>
inline void store_codes(uint format, thread const float *x, uint lane, threadgroup const float *boundaries,
                        threadgroup uchar *staging, device uchar *row)
{
    const int E = TQKV_LANE_VALUES(D);
    if (format == TQKV_F16) {
        for (int i = 0; i < E; i++) ((device ushort *)row)[int(lane) * E + i] = ushort(half_bits(x[i]));
        return;
    }
    for (int i = 0; i < E; i++) {
        uint code = format == TQKV_I8 ? quantise_grid(x[i]) : quantise(x[i], codebook_bits(format), boundaries);
        staging[int(lane) * E + i] = uchar(code);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    uint bits = main_bits(format), upper = upper_bits(format), words = uint(D) * bits / 32u;
    for (uint i = lane; i < words; i += 32u) ((device uint *)row)[i] = pack_word(staging + i * (32u / bits), bits, 0u);
    if (upper == 0) return;
    for (uint i = lane; i < uint(D) * upper / 32u; i += 32u)
        ((device uint *)row)[words + i] = pack_word(staging + i * (32u / upper), upper, 4u);
}

// Everything before the codes: loads row `row` of the source, raises the flag, rotates and scales. Returns the norm.
template <int D>
inline float prepare_row(uint format, bool rotated, float block_scale, device const float *source, uint row, uint lane,
                         device atomic_uint *not_finite, thread float *x)
{
    load_row<D>(source + row_offset(row, D), lane, x);
    if (clear_if_not_finite<D>(x) && lane == 0) atomic_store_explicit(not_finite, 1u, memory_order_relaxed);
    if (rotated) rotate_row<D>(x, lane);
    return normalise<D>(format, block_scale, x);
}

// One simdgroup of a threadgroup that shares the boundaries encodes row `row`, if there is one.
template <int D>
inline void encode_row(uint format, bool rotated, constant tqkv__rows_args &args, device const float *source, uint row,
                       device uchar *codes, device float *norms, device atomic_uint *not_finite,
                       threadgroup const float *boundaries, threadgroup uchar *staging, uint lane)
{
    if (row >= uint(args.n_tokens) * uint(args.n_kv_heads)) return;
    float x[TQKV_LANE_VALUES(D)];
    float norm = prepare_row<D>(format, rotated, args.block_scale, source, row, lane, not_finite, x);
    ulong to = store_row(args, row);
    store_codes<D>(format, x, lane, boundaries, staging, codes + to * ulong(row_bytes<D>(format)));
    uint block = norm_block<D>(format), first = lane * uint(TQKV_LANE_VALUES(D));
    if (format != TQKV_F16 && first % block == 0) norms[to * ulong(uint(D) / block) + first / block] = norm;
}

template <int D>
inline void probe_row(uint format, bool rotated, constant tqkv__rows_args &args, device const float *source, uint row,
                      device float *scaled, device atomic_uint *not_finite, uint lane)
{
    if (row >= uint(args.n_tokens) * uint(args.n_kv_heads)) return;
    float x[TQKV_LANE_VALUES(D)];
    prepare_row<D>(format, rotated, args.block_scale, source, row, lane, not_finite, x);
    store_row_values<D>(x, lane, scaled + row_offset(row, D));
}

#endif

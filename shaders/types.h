// The caller's rows: their three types, and how a row lies over the lanes of a simdgroup. Everything in integers: a
// GPU's own conversions may round differently or flush small halves.
#ifndef TQKV_TYPES_H
#define TQKV_TYPES_H
#include "common.h"

// ---- Types ----

// The value of a half or a bfloat16. `type` is a function constant wherever it is passed.
inline float widened(uint type, uint bits)
{
    if (type == TQKV_TYPE_BF16) return as_type<float>(bits << 16);
    uint sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    uint subnormal = as_type<uint>(float(magnitude) * (1.0f / 16777216.0f)); // a multiple of 2^-24
    uint normal = (magnitude << 13) + (magnitude < 0x7c00u ? 0x38000000u : 0x70000000u);
    return as_type<float>(sign | (magnitude < 0x400u ? subnormal : normal));
}

// The nearest IEEE half, ties to even, clamped to +-65504.
inline uint half_bits(float x)
{
    uint word = as_type<uint>(x), sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
    if (magnitude >= 0x477fe000u) return sign | 0x7bffu;
    bool subnormal = magnitude < 0x38800000u; // below 2^-14: a multiple of 2^-24
    uint bits = subnormal ? (magnitude & 0x7fffffu) | 0x800000u : magnitude - 0x38000000u;
    uint shift = subnormal ? min(126u - (magnitude >> 23), 25u) : 13u;
    return sign | ((bits + (1u << (shift - 1u)) - 1u + ((bits >> shift) & 1u)) >> shift);
}

// The nearest half or bfloat16, ties to even; beyond the largest one infinity. NaN keeps its upper bits and is quiet.
inline uint narrowed(uint type, float x)
{
    uint word = as_type<uint>(x), sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
    bool nan = magnitude > 0x7f800000u;
    if (type == TQKV_TYPE_BF16) return nan ? (word >> 16) | 0x40u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    if (nan) return sign | 0x7e00u | ((word >> 13) & 0x3ffu);
    return magnitude >= 0x477ff000u ? sign | 0x7c00u : half_bits(x);
}

// ---- Neighbouring values. The caller's buffers have the alignment of one value ----

template <int N>
inline void load_floats(device const float *from, thread float *x)
{
    if (N % 4 == 0) {
        TQKV_UNROLL
        for (int i = 0; i < N / 4; i++) {
            packed_float4 four = ((device const packed_float4 *)from)[i];
            x[4 * i] = four.x;
            x[4 * i + 1] = four.y;
            x[4 * i + 2] = four.z;
            x[4 * i + 3] = four.w;
        }
    } else {
        TQKV_UNROLL
        for (int i = 0; i < N; i++) x[i] = from[i];
    }
}

template <int N>
inline void load_narrow(uint type, device const ushort *from, thread float *x)
{
    uint bits[N];
    if (N % 4 == 0) {
        TQKV_UNROLL
        for (int i = 0; i < N / 4; i++) {
            packed_ushort4 four = ((device const packed_ushort4 *)from)[i];
            bits[4 * i] = uint(four.x);
            bits[4 * i + 1] = uint(four.y);
            bits[4 * i + 2] = uint(four.z);
            bits[4 * i + 3] = uint(four.w);
        }
    } else {
        TQKV_UNROLL
        for (int i = 0; i < N; i++) bits[i] = uint(from[i]);
    }
    TQKV_UNROLL
    for (int i = 0; i < N; i++) x[i] = widened(type, bits[i]);
}

// ---- A row over lanes: L lanes, pieces of C values a lane. lane: among the row's lanes ----

// The place in the row of the lane's value i.
template <int L, int C>
inline uint value_of_lane(uint lane, int i)
{
    return (uint(i / C * L) + lane) * uint(C) + uint(i % C);
}

template <int D, int L, int C>
inline void load_pieces(device const float *row, uint lane, thread float *x)
{
    TQKV_UNROLL
    for (int j = 0; j < TQKV_PIECES(D, L, C); j++) load_floats<C>(row + (uint(j * L) + lane) * uint(C), x + j * C);
}

// first: the row's first value in rows
template <int D, int L, int C>
inline void load_typed_pieces(uint type, device const uchar *rows, ulong first, uint lane, thread float *x)
{
    if (type == TQKV_TYPE_F32) {
        load_pieces<D, L, C>((device const float *)rows + first, lane, x);
    } else {
        device const ushort *row = (device const ushort *)rows + first;
        TQKV_UNROLL
        for (int j = 0; j < TQKV_PIECES(D, L, C); j++)
            load_narrow<C>(type, row + (uint(j * L) + lane) * uint(C), x + j * C);
    }
}

template <int D>
inline void load_row(device const float *row, uint lane, thread float *x)
{
    load_pieces<D, TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D)>(row, lane, x);
}

template <int D>
inline void load_typed_row(uint type, device const uchar *rows, ulong first, uint lane, thread float *x)
{
    load_typed_pieces<D, TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D)>(type, rows, first, lane, x);
}

template <int D>
inline void store_typed_row(uint type, thread const float *x, uint lane, device uchar *rows, ulong first)
{
    device float *row = (device float *)rows + first;
    device ushort *narrow_row = (device ushort *)rows + first;
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) {
        uint at = value_of_lane<TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D)>(lane, i);
        if (type == TQKV_TYPE_F32)
            row[at] = x[i];
        else
            narrow_row[at] = ushort(narrowed(type, x[i]));
    }
}

#endif

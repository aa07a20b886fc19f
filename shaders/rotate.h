// The rotation y = R(s*x)/sqrt(D) of a row: random signs s, then R: the Walsh-Hadamard transform H or, where D is no
// power of two, H of each subrow and a Hadamard matrix across the subrows. common.h has the layout of the row over L
// lanes in pieces of C values a lane. With a matrix a piece of all lanes is a subrow, and C is 1.
#ifndef TQKV_ROTATE_H
#define TQKV_ROTATE_H
#include "types.h"

// (a, b) -> (a+b, a-b) between the values of a lane that are `distance` apart in x.
template <int N>
inline void butterflies(thread float *x, int distance)
{
    TQKV_UNROLL
    for (int i = 0; i < N; i++) {
        if (i & distance) continue;
        float a = x[i], b = x[i + distance];
        x[i] = a + b;
        x[i + distance] = a - b;
    }
}

// Row `row` of the Hadamard matrix of order M, 12, 20 or 28: bit j is set where value j is subtracted.
template <int M>
inline uint matrix_row(int row)
{
    uint bits = 0;
    TQKV_UNROLL
    for (int i = 0; i < (M + 7) / 8; i++)
        bits |= uint(M == 12   ? tqkv__tables.hadamard_12[row][i]
                     : M == 20 ? tqkv__tables.hadamard_20[row][i]
                               : tqkv__tables.hadamard_28[row][i])
                << (8 * i);
    return bits;
}

// The matrix times x, [M]. A row's terms are added one after the other, in the order of tqkv_encode.
template <int M>
inline void multiply_matrix(thread float *x)
{
    float product[M];
    TQKV_UNROLL
    for (int row = 0; row < M; row++) {
        uint bits = matrix_row<M>(row);
        float sum = as_type<float>(as_type<uint>(x[0]) ^ (bits << 31));
        TQKV_UNROLL
        for (int i = 1; i < M; i++)
            sum = sum + as_type<float>(as_type<uint>(x[i]) ^ ((bits << (31 - i)) & 0x80000000u));
        product[row] = sum;
    }
    TQKV_UNROLL
    for (int i = 0; i < M; i++) x[i] = product[i];
}

// Lanes `distance` apart trade halves of their values: the lane that has the bit `distance` in its number gives those
// without the bit `bit` in theirs, and takes the others. Twice leaves all as it was.
template <int N, class T>
inline void trade_values(thread T *x, uint lane, uint distance, int bit)
{
    bool upper = (lane & distance) != 0;
    TQKV_UNROLL
    for (int i = 0; i < N; i++) {
        if (i & bit) continue;
        T low = x[i], high = x[i + bit], other = simd_shuffle_xor(upper ? low : high, ushort(distance));
        x[i] = upper ? other : low;
        x[i + bit] = upper ? high : other;
    }
}

// The bit of a value's number that lanes `distance` apart trade for a strided row (see encode.h), 0 if none.
template <int L>
inline int traded_bit(uint distance)
{
    return distance == 4u ? (L == 8 ? 2 : 1) : distance == 8u ? 2 : 0;
}

// R without the stages before `start`, which lies within a piece. H has the stages of distance start, 2*start .. in
// this order: within a lane's piece, across lanes, then across pieces. strided: lanes trade values, once for a stage,
// where both need all of each other's otherwise. lane: among the row's lanes.
template <int D, int L, int C>
inline void hadamard_from(thread float *x, uint lane, int start, bool strided)
{
    const int N = D / L;
    TQKV_UNROLL
    for (int distance = start; distance < C; distance *= 2) butterflies<N>(x, distance);
    TQKV_UNROLL
    for (uint distance = 1; distance < uint(L); distance *= 2) {
        if (!TQKV__HAS_MATRIX(D) && strided && traded_bit<L>(distance) != 0) {
            trade_values<N>(x, lane, distance, traded_bit<L>(distance));
            butterflies<N>(x, traded_bit<L>(distance));
            continue;
        }
        float sign = (lane & distance) ? -1.0f : 1.0f; // other - x or other + x, rounded once
        TQKV_UNROLL
        for (int i = 0; i < N; i++) x[i] = fma(x[i], sign, simd_shuffle_xor(x[i], ushort(distance)));
    }
    if (TQKV__HAS_MATRIX(D)) {
        multiply_matrix<TQKV__MATRIX_ORDER(D)>(x);
    } else {
        TQKV_UNROLL
        for (int distance = C; distance < N; distance *= 2) butterflies<N>(x, distance);
    }
}

template <int D, int L, int C>
inline void hadamard(thread float *x, uint lane)
{
    hadamard_from<D, L, C>(x, lane, 1, false);
}

// Bit i is set if x[i] changes its sign. RUN: values whose signs come of one read, a divisor of C and of 8.
template <int D, int L, int C, int RUN>
inline uint lane_signs(uint lane)
{
    uint signs = 0;
    TQKV_UNROLL
    for (int i = 0; i < D / L; i += RUN) {
        uint at = value_of_lane<L, C>(lane, i);
        signs |= ((uint(tqkv__tables.signs[(at & 511u) >> 3]) >> (at & 7u)) & ((1u << RUN) - 1u)) << i;
    }
    return signs;
}

template <int N>
inline void flip_signs(thread float *x, uint signs)
{
    TQKV_UNROLL
    for (int i = 0; i < N; i++) x[i] = as_type<float>(as_type<uint>(x[i]) ^ ((signs << (31 - i)) & 0x80000000u));
}

template <int N>
inline void scale_values(thread float *x, float factor)
{
    TQKV_UNROLL
    for (int i = 0; i < N; i++) x[i] = x[i] * factor;
}

// signs: lane_signs of the lane.
template <int D, int L, int C>
inline void rotate_values(thread float *x, uint lane, uint signs)
{
    flip_signs<D / L>(x, signs);
    hadamard<D, L, C>(x, lane);
    scale_values<D / L>(x, TQKV__INV_SQRT(D));
}

// The inverse: x = s * R(y)/sqrt(D).
template <int D, int L, int C>
inline void unrotate_values(thread float *x, uint lane, uint signs)
{
    hadamard<D, L, C>(x, lane);
    scale_values<D / L>(x, TQKV__INV_SQRT(D));
    flip_signs<D / L>(x, signs);
}

// Rows as load_row loads them.
template <int D>
inline uint signs_of_row(uint lane)
{
    return lane_signs<D, TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D), 1>(lane);
}

template <int D>
inline void rotate_row(thread float *x, uint lane)
{
    rotate_values<D, TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D)>(x, lane, signs_of_row<D>(lane));
}

template <int D>
inline void unrotate_row(thread float *x, uint lane, uint signs)
{
    unrotate_values<D, TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D)>(x, lane, signs);
}

// x times the scales of a head's channels. scale: [n_kv_heads][D]
template <int D>
inline void multiply_channels(device const float *scale, uint kv_head, uint lane, thread float *x)
{
    float g[TQKV_LANE_VALUES(D)];
    load_row<D>(scale + row_offset(kv_head, D), lane, g);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = x[i] * g[i];
}

// The centre of a head, [n_kv_heads][D], as rows in the store have it: scaled and rotated, if asked.
template <int D>
inline void load_center(device const float *center, device const float *scale, uint kv_head, bool scaled, bool rotated,
                        uint lane, thread float *x)
{
    load_row<D>(center + row_offset(kv_head, D), lane, x);
    if (scaled) {
        float g[TQKV_LANE_VALUES(D)];
        load_row<D>(scale + row_offset(kv_head, D), lane, g);
        TQKV_UNROLL
        for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = x[i] * (1.0f / g[i]);
    }
    if (rotated) rotate_row<D>(x, lane);
}

// x += weight * that centre.
template <int D>
inline void add_center(device const float *center, device const float *scale, uint kv_head, bool scaled, bool rotated,
                       float weight, uint lane, thread float *x)
{
    float c[TQKV_LANE_VALUES(D)];
    load_center<D>(center, scale, kv_head, scaled, rotated, lane, c);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = x[i] + weight * c[i];
}

#endif

// The rotation y = H(s*x)/sqrt(D) of a row: random signs s, then the Walsh-Hadamard transform H. common.h has the
// layout of the row over L lanes in pieces of C values a lane.
#ifndef TQKV_ROTATE_H
#define TQKV_ROTATE_H
#include "common.h"

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

// The stages of distance start, 2*start .. D/2 in this order: first within a lane's piece, where `start` lies, then
// across lanes, then across pieces. lane: among the row's lanes.
template <int D, int L, int C>
inline void hadamard_from(thread float *x, uint lane, int start)
{
    const int N = D / L;
    TQKV_UNROLL
    for (int distance = start; distance < C; distance *= 2) butterflies<N>(x, distance);
    TQKV_UNROLL
    for (uint distance = 1; distance < uint(L); distance *= 2) {
        float sign = (lane & distance) ? -1.0f : 1.0f; // other - x or other + x, rounded once
        TQKV_UNROLL
        for (int i = 0; i < N; i++) x[i] = fma(x[i], sign, simd_shuffle_xor(x[i], ushort(distance)));
    }
    TQKV_UNROLL
    for (int distance = C; distance < N; distance *= 2) butterflies<N>(x, distance);
}

template <int D, int L, int C>
inline void hadamard(thread float *x, uint lane)
{
    hadamard_from<D, L, C>(x, lane, 1);
}

// Bit i is set if x[i] changes its sign.
template <int D, int L, int C>
inline uint lane_signs(uint lane)
{
    uint signs = 0;
    TQKV_UNROLL
    for (int i = 0; i < D / L; i++) {
        uint at = (uint(i / C * L) + lane) * uint(C) + uint(i % C);
        signs |= ((uint(tqkv__tables.signs[(at & 511u) >> 3]) >> (at & 7u)) & 1u) << i;
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

// The inverse: x = s * H(y)/sqrt(D).
template <int D, int L, int C>
inline void unrotate_values(thread float *x, uint lane, uint signs)
{
    hadamard<D, L, C>(x, lane);
    scale_values<D / L>(x, TQKV__INV_SQRT(D));
    flip_signs<D / L>(x, signs);
}

// A row over the whole simdgroup.
template <int D>
inline void rotate_row(thread float *x, uint lane)
{
    rotate_values<D, 32, TQKV_LANE_VALUES(D)>(x, lane, lane_signs<D, 32, TQKV_LANE_VALUES(D)>(lane));
}

template <int D>
inline void unrotate_row(thread float *x, uint lane)
{
    unrotate_values<D, 32, TQKV_LANE_VALUES(D)>(x, lane, lane_signs<D, 32, TQKV_LANE_VALUES(D)>(lane));
}

// x += weight * the centre of a head, rotated if asked. center: [n_kv_heads][D]
template <int D>
inline void add_center(device const float *center, uint kv_head, bool rotated, float weight, uint lane, thread float *x)
{
    float c[TQKV_LANE_VALUES(D)];
    load_row<D>(center + row_offset(kv_head, D), lane, c);
    if (rotated) rotate_row<D>(c, lane);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = x[i] + weight * c[i];
}

#endif

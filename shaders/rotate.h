// The rotation y = H(s*x)/sqrt(D) of a row spread over a simdgroup: random signs s, then the Walsh-Hadamard transform
// H.
#ifndef TQKV_ROTATE_H
#define TQKV_ROTATE_H
#include "common.h"

// Stages of distance 1, 2, 4 .. D/2 in this order: (a, b) -> (a+b, a-b). Distances below E stay in the lane.
template <int D>
inline void hadamard(thread float *x, uint lane)
{
    const int E = TQKV_LANE_VALUES(D);
    TQKV_UNROLL
    for (int distance = 1; distance < E; distance *= 2) {
        TQKV_UNROLL
        for (int i = 0; i < E; i++) {
            if (i & distance) continue;
            float a = x[i], b = x[i + distance];
            x[i] = a + b;
            x[i + distance] = a - b;
        }
    }
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2) {
        TQKV_UNROLL
        for (int i = 0; i < E; i++) {
            float other = simd_shuffle_xor(x[i], ushort(distance));
            x[i] = (lane & distance) ? other - x[i] : x[i] + other;
        }
    }
}

template <int D>
inline void flip_signs(thread float *x, uint lane)
{
    const int E = TQKV_LANE_VALUES(D);
    TQKV_UNROLL
    for (int i = 0; i < E; i++) {
        uint j = (lane * uint(E) + uint(i)) & 511u;
        uint negative = (uint(tqkv__tables.signs[j >> 3]) >> (j & 7u)) & 1u;
        x[i] = as_type<float>(as_type<uint>(x[i]) ^ (negative << 31));
    }
}

template <int D>
inline void scale_lane(thread float *x, float factor)
{
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = x[i] * factor;
}

template <int D>
inline void rotate_row(thread float *x, uint lane)
{
    flip_signs<D>(x, lane);
    hadamard<D>(x, lane);
    scale_lane<D>(x, TQKV__INV_SQRT(D));
}

// H is its own inverse after the 1/sqrt(D): x = s * H(y)/sqrt(D).
template <int D>
inline void unrotate_row(thread float *x, uint lane)
{
    hadamard<D>(x, lane);
    scale_lane<D>(x, TQKV__INV_SQRT(D));
    flip_signs<D>(x, lane);
}

#endif

// Ways to share the scores of a tile of 32 keys among lanes, to compare their counts; not part of the library.
// 4-bit codes of head_dim 128, looked up in threadgroup memory, against four query heads.
#include <metal_stdlib>
using namespace metal;
#include "../src/api/types.h"
#include "../src/base/tables.h"
#include "../src/gpu/sizes.h"
#define VARIANT_UNROLL _Pragma("clang loop unroll(full)")

constant uint way [[function_constant(TQKV_FC_FORMAT)]];

inline float centroid(uint word, int i, threadgroup const float *table) { return table[(word >> (4 * i)) & 15u]; }

// Lanes across the dimension, 4 values each, and a sum over the simdgroup for each position and head.
inline void lanes_across(device const uchar *tile, threadgroup const float *queries, threadgroup const float *table,
                         uint lane, device float *scores)
{
    float q[4][4];
    VARIANT_UNROLL
    for (int c = 0; c < 4; c++) {
        VARIANT_UNROLL
        for (int k = 0; k < 4; k++) q[c][k] = queries[uint(c) * 128u + lane * 4u + uint(k)];
    }
    for (uint row = 0; row < 32; row++) {
        uint word = *(device const ushort *)(tile + row * 64u + lane * 2u);
        float x[4];
        VARIANT_UNROLL
        for (int k = 0; k < 4; k++) x[k] = centroid(word, k, table);
        VARIANT_UNROLL
        for (int c = 0; c < 4; c++) {
            float dot = 0.0f;
            VARIANT_UNROLL
            for (int k = 0; k < 4; k++) dot = fma(x[k], q[c][k], dot);
            dot = simd_sum(dot);
            if (lane == 0) scores[row * 4u + uint(c)] = dot;
        }
    }
}

// One position a lane: no sums across lanes, but each lane reads a row of its own.
inline void lane_per_position(device const uchar *tile, threadgroup const float *queries,
                              threadgroup const float *table, uint lane, device float *scores)
{
    float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint step = 0; step < 4; step++) {
        uint4 four = *(device const uint4 *)(tile + lane * 64u + step * 16u);
        uint words[4] = {four.x, four.y, four.z, four.w};
        VARIANT_UNROLL
        for (int i = 0; i < 32; i += 4) {
            VARIANT_UNROLL
            for (int c = 0; c < 4; c++) {
                float4 q = *(threadgroup const float4 *)(queries + uint(c) * 128u + step * 32u + uint(i));
                dot[c] = fma(centroid(words[i / 8], i % 8, table), q.x, dot[c]);
                dot[c] = fma(centroid(words[i / 8], i % 8 + 1, table), q.y, dot[c]);
                dot[c] = fma(centroid(words[i / 8], i % 8 + 2, table), q.z, dot[c]);
                dot[c] = fma(centroid(words[i / 8], i % 8 + 3, table), q.w, dot[c]);
            }
        }
    }
    VARIANT_UNROLL
    for (int c = 0; c < 4; c++) scores[lane * 4u + uint(c)] = dot[c];
}

// Four lanes a row, four rows a lane. The reduction leaves each lane with one position.
inline void four_lanes_a_row(device const uchar *tile, threadgroup const float *queries, threadgroup const float *table,
                             uint lane, device float *scores)
{
    float dot[4][4];
    uint4 four[4];
    uint part = lane % 4u;
    VARIANT_UNROLL
    for (int r = 0; r < 4; r++) {
        four[r] = *(device const uint4 *)(tile + (uint(r) * 8u + lane / 4u) * 64u + part * 16u);
        VARIANT_UNROLL
        for (int c = 0; c < 4; c++) dot[r][c] = 0.0f;
    }
    VARIANT_UNROLL
    for (int i = 0; i < 32; i += 4) {
        float x[4][4];
        VARIANT_UNROLL
        for (int r = 0; r < 4; r++) {
            uint words[4] = {four[r].x, four[r].y, four[r].z, four[r].w};
            VARIANT_UNROLL
            for (int k = 0; k < 4; k++) x[r][k] = centroid(words[i / 8], i % 8 + k, table);
        }
        VARIANT_UNROLL
        for (int c = 0; c < 4; c++) {
            float4 q = *(threadgroup const float4 *)(queries + uint(c) * 128u + part * 32u + uint(i));
            VARIANT_UNROLL
            for (int r = 0; r < 4; r++)
                dot[r][c] = fma(x[r][3], q.w, fma(x[r][2], q.z, fma(x[r][1], q.y, fma(x[r][0], q.x, dot[r][c]))));
        }
    }
    VARIANT_UNROLL
    for (int distance = 2; distance > 0; distance /= 2) {
        bool upper = (part & uint(distance)) != 0;
        VARIANT_UNROLL
        for (int r = 0; r < distance; r++) {
            VARIANT_UNROLL
            for (int c = 0; c < 4; c++) {
                float keep = upper ? dot[r + distance][c] : dot[r][c], give = upper ? dot[r][c] : dot[r + distance][c];
                dot[r][c] = keep + simd_shuffle_xor(give, ushort(distance));
            }
        }
    }
    VARIANT_UNROLL
    for (int c = 0; c < 4; c++) scores[(part * 8u + lane / 4u) * 4u + uint(c)] = dot[0][c];
}

// codes: [n_rows][64], queries: [4][128], scores: [n_rows][4]; n_rows a multiple of 32 times the simdgroups
kernel void tqkv_scores(constant tqkv__rotate_args &args [[buffer(0)]], device const uchar *codes [[buffer(1)]],
                        device const float *queries [[buffer(2)]], device float *scores [[buffer(3)]],
                        threadgroup float *table [[threadgroup(0)]],
                        threadgroup float *shared_queries [[threadgroup(1)]],
                        uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    if (thread_index < 16) table[thread_index] = tqkv__tables.codebook_4[thread_index];
    for (uint i = thread_index; i < 512; i += n_simdgroups * 32u) shared_queries[i] = queries[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint row = simdgroup * 32u; row < uint(args.n_rows); row += n_simdgroups * 32u) {
        device const uchar *tile = codes + row * 64u;
        device float *to = scores + row * 4u;
        if (way == 0) lanes_across(tile, shared_queries, table, lane, to);
        if (way == 1) lane_per_position(tile, shared_queries, table, lane, to);
        if (way == 2) four_lanes_a_row(tile, shared_queries, table, lane, to);
    }
}

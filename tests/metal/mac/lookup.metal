// Ways to look up a 4-bit code in its codebook, and to make a float of a signed byte; and a kernel that only reads.
// lookup.m times them on a Mac; the library does not contain them. A lane adds up 32 values, or 16 bytes, each times a
// weight: one multiply-add a value is not part of the look-up.
#include <metal_stdlib>
using namespace metal;
#include "../src/api/types.h"
#include "../src/base/tables.h"
#include "../src/gpu/sizes.h"
#define VARIANT_UNROLL _Pragma("clang loop unroll(full)")

constant uint way [[function_constant(TQKV_FC_FORMAT)]];

// Each lane holds a centroid, the 16 of them twice. A shuffle fetches the one whose lane number is the code.
inline float by_shuffle(uint word, int i, float own) { return simd_shuffle(own, ushort((word >> (4 * i)) & 31u)); }

inline float by_threadgroup(uint word, int i, threadgroup const float *table) { return table[(word >> (4 * i)) & 15u]; }

inline float by_constant(uint word, int i) { return tqkv__tables.codebook_4[(word >> (4 * i)) & 15u]; }

// x = u*p(u*u) with u = code - 7.5: the codebook is odd. Seven terms of least squares, each cell weighted by its
// probability, are off by 7e-7 of the codebook's size; six by 2e-5. The code stays where it lies in the word, below the
// bits of a float of 2^23, so there is no shift but of the upper half.
inline float by_arithmetic(uint word, int i)
{
    uint half_word = i < 4 ? word & 0xffffu : word >> 16;
    float place = 1.0f / float(1 << (4 * (i & 3)));
    float x = as_type<float>((half_word & (15u << (4 * (i & 3)))) | 0x4b000000u);
    float u = (i & 3) == 0 ? (x - 8388608.0f) - 7.5f // 8388615.5 is no float
                           : fma(x, place, -(8388608.0f * place + 7.5f));
    float v = u * u, p = 1.644473e-12f;
    p = fma(p, v, -1.4323035e-10f);
    p = fma(p, v, 6.4945983e-9f);
    p = fma(p, v, -3.7227491e-8f);
    p = fma(p, v, 8.052551e-6f);
    p = fma(p, v, 9.3300469e-4f);
    return u * fma(p, v, 0.2565585f);
}

// The lanes of a quad hold the magnitudes of codes 8 to 11 and 12 to 15. Codes below 8 are negative; they are mirrored
// first, all codes of a word at once: 7 - code inverts the low three bits.
inline uint mirrored(uint word)
{
    uint negative = ~word & 0x88888888u;
    return word ^ (negative - (negative >> 3));
}

inline float by_quad(uint word, int i, float near, float far)
{
    ushort lane = ushort((word >> (4 * i)) & 3u);
    float a = quad_shuffle(near, lane), b = quad_shuffle(far, lane);
    float magnitude = (word & (4u << (4 * i))) ? b : a;
    return (word & (8u << (4 * i))) ? magnitude : -magnitude;
}

// Three levels of selections among the magnitudes by the bits of the code, then the sign.
inline float by_selection(uint word, int i, thread const float *magnitudes)
{
    bool first = word & (1u << (4 * i)), second = word & (2u << (4 * i)), third = word & (4u << (4 * i));
    float pair[4];
    VARIANT_UNROLL
    for (int k = 0; k < 4; k++) pair[k] = first ? magnitudes[2 * k + 1] : magnitudes[2 * k];
    float low = second ? pair[1] : pair[0], high = second ? pair[3] : pair[2];
    float magnitude = third ? high : low;
    return (word & (8u << (4 * i))) ? magnitude : -magnitude;
}

// Both codes of a byte at once.
inline float2 by_pairs(uint word, int i, threadgroup const float2 *pairs) { return pairs[(word >> (8 * i)) & 255u]; }

// Bytes: by two shifts, or converted where they lie. The third way has loaded them as bytes.
inline float by_shifts(uint word, int i) { return float(int(word << (24 - 8 * i)) >> 24); }

inline float by_conversion(uint word, int i) { return float(int8_t(word >> (8 * i))); }

inline float decode(uint word, int i, float own, float far, threadgroup const float *table,
                    thread const float *magnitudes)
{
    if (way == 0) return by_shuffle(word, i, own);
    if (way == 1) return by_threadgroup(word, i, table);
    if (way == 2) return by_constant(word, i);
    if (way == 3) return by_arithmetic(word, i);
    if (way == 4) return by_quad(word, i, own, far);
    if (way == 7) return by_shifts(word, i & 3);
    if (way == 8) return by_conversion(word, i & 3);
    return by_selection(word, i, magnitudes);
}

// codes: [n_rounds][threads][4], weights: [8], sums: [threads]
kernel void tqkv_lookup(constant tqkv__rotate_args &args [[buffer(0)]], device const uint *codes [[buffer(1)]],
                        constant float *weights [[buffer(2)]], device float *sums [[buffer(3)]],
                        threadgroup float *table [[threadgroup(0)]], uint thread_index [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]], uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    uint n_threads = n_simdgroups * 32u;
    if (way != 6 && thread_index < 16) table[thread_index] = tqkv__tables.codebook_4[thread_index];
    if (way == 6)
        for (uint i = thread_index; i < 512; i += n_threads)
            table[i] = tqkv__tables.codebook_4[i & 1u ? i >> 5 : (i >> 1) & 15u];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float own = way == 4 ? table[8 + (lane & 3u)] : table[lane & 15u], far = table[12 + (lane & 3u)];
    float magnitudes[8], sum = 0.0f;
    VARIANT_UNROLL
    for (int k = 0; k < 8; k++) magnitudes[k] = table[8 + k];
    for (int round = 0; round < args.n_rows; round++) {
        if (way == 9) {
            device const char4 *at = (device const char4 *)codes + (uint(round) * n_threads + thread_index) * 4u;
            VARIANT_UNROLL
            for (int w = 0; w < 4; w++) {
                char4 bytes = at[w];
                sum = fma(float(bytes.x), weights[0], sum);
                sum = fma(float(bytes.y), weights[1], sum);
                sum = fma(float(bytes.z), weights[2], sum);
                sum = fma(float(bytes.w), weights[3], sum);
            }
            continue;
        }
        uint4 four = *(device const uint4 *)(codes + (uint(round) * n_threads + thread_index) * 4u);
        uint words[4] = {four.x, four.y, four.z, four.w};
        VARIANT_UNROLL
        for (int w = 0; w < 4; w++) {
            uint word = way == 4 || way == 5 ? mirrored(words[w]) : words[w];
            VARIANT_UNROLL
            for (int i = 0; i < 8; i++) {
                if ((way == 6 && (i & 1)) || (way >= 7 && i >= 4)) continue;
                float2 pair = by_pairs(word, i / 2, (threadgroup const float2 *)table);
                float x = way == 6 ? pair.x : decode(word, i, own, far, table, magnitudes);
                sum = fma(x, weights[i], sum);
                if (way == 6) sum = fma(pair.y, weights[i + 1], sum);
            }
        }
    }
    sums[thread_index] = sum;
}

// codes: [threadgroups][n_rounds][threads][4]. What is not used is not read: one sum in 2^96 is written.
kernel void tqkv_read(constant tqkv__rotate_args &args [[buffer(0)]], device const uint *codes [[buffer(1)]],
                      device uint *sums [[buffer(3)]], uint3 group [[threadgroup_position_in_grid]],
                      uint thread_index [[thread_index_in_threadgroup]],
                      uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    uint x = 0, y = 0, z = 0, w = 0, first = group.x * uint(args.n_rows);
    for (int round = 0; round < args.n_rows; round++) {
        uint at = (first + uint(round)) * n_simdgroups * 32u + thread_index;
        uint4 four = *(device const uint4 *)(codes + at * 4u);
        x ^= four.x;
        y ^= four.y;
        z ^= four.z;
        w ^= four.w;
    }
    if (x == 0x9e3779b9u && y == 1u && z == 2u) sums[0] = w;
}

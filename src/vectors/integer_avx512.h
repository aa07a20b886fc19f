/* >>integer-avx512: what AVX-512 brings to >>k-rows, with the products of VNNI. A product wants one factor unsigned:
   codes are 128 more than they are. An integer is 256 times its high byte plus its low one, both signed. */

#ifdef TQKV__AVX512

#define TQKV__TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")))

/* Codes of four positions, in 16 bytes of each: up to two vectors of main fields and one of upper ones. Codes of a byte
   are loaded where they are looked up, from `at`. */
typedef struct tqkv__raw_avx512 {
    __m512i main[2], upper;
    const uint8_t *at;
    size_t stride;
} tqkv__raw_avx512;
typedef struct tqkv__chunk_avx512 {
    __mmask16 main[2], upper;
    __m512i book;
} tqkv__chunk_avx512;
typedef struct tqkv__i_bytes_avx512 {
    __m512i high, low;
} tqkv__i_sum_avx512, tqkv__i_row_avx512, tqkv__i_repeated_avx512;
typedef __m512i tqkv__i_lanes_avx512;

TQKV__OP uint64_t tqkv__i_lowest_avx512(int bits) { return ((uint64_t)1 << bits) - 1; }
TQKV__OP tqkv__chunk_avx512 tqkv__open_chunk_avx512(const tqkv_format format, int left, const int8_t *centroids)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format);
    tqkv__chunk_avx512 chunk;
    if (left > 64) left = 64;
    const uint64_t bytes = main < 8 ? tqkv__i_lowest_avx512(left * main / 8) : 0;
    chunk.main[0] = (__mmask16)bytes;
    chunk.main[1] = (__mmask16)(bytes >> 16);
    chunk.upper = (__mmask16)tqkv__i_lowest_avx512(left * upper_bits / 8);
    chunk.book = _mm512_set1_epi8(-128);
    if (TQKV__KIND(format) == TQKV__BOOK)
        chunk.book = _mm512_xor_si512(_mm512_loadu_si512((const void *)centroids), chunk.book);
    return chunk;
}
TQKV__OP __m512i tqkv__i_load_four_avx512(__mmask16 mask, const uint8_t *p, size_t stride)
{
    __m256i a = _mm256_castsi128_si256(_mm_maskz_loadu_epi8(mask, (const void *)p));
    __m256i b = _mm256_castsi128_si256(_mm_maskz_loadu_epi8(mask, (const void *)(p + 2 * stride)));
    a = _mm256_inserti128_si256(a, _mm_maskz_loadu_epi8(mask, (const void *)(p + stride)), 1);
    b = _mm256_inserti128_si256(b, _mm_maskz_loadu_epi8(mask, (const void *)(p + 3 * stride)), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}
/* Orders 16 bytes of a field so that the half h of a sixteen is in its 64-bit word h, `bits` bytes from bits * k on. */
TQKV__OP __m512i tqkv__i_order_avx512(const int bits, __m512i x)
{
    if (bits == 1) x = _mm512_unpacklo_epi64(x, _mm512_srli_epi64(x, 8));
    if (bits == 1) return x;
    const __m512i halves = _mm512_set4_epi64(0x0f0e0b0a07060302, 0x0d0c090805040100, 0x0f0e0b0a07060302,
                                             0x0d0c090805040100); /* of 2 bits */
    return _mm512_shuffle_epi8(x, halves);
}
TQKV__OP tqkv__raw_avx512 tqkv__open_avx512(const tqkv_format format, const tqkv__chunk_avx512 *chunk, const uint8_t *p,
                                            const uint8_t *upper, size_t stride)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format);
    tqkv__raw_avx512 raw;
    raw.at = p;
    raw.stride = stride;
    TQKV__UNROLL
    for (int i = 0; i < 2; i++)
        if (main < 8 && i < main / 2) raw.main[i] = tqkv__i_load_four_avx512(chunk->main[i], p + 16 * i, stride);
    if (main == 2) raw.main[0] = tqkv__i_order_avx512(2, raw.main[0]);
    if (upper_bits) raw.upper = tqkv__i_order_avx512(upper_bits, tqkv__i_load_four_avx512(chunk->upper, upper, stride));
    return raw;
}
/* Takes eight bits a code of a sixteen from ordered fields of 1 or 2 bits; its first bit comes to bit `low`. */
TQKV__OP __m512i tqkv__i_take_avx512(const int bits, const int low, const int sixteen, __m512i x)
{
    const uint64_t first = (uint64_t)((16 * sixteen + 64 - low) % 64);
    const uint64_t at = (uint64_t)bits * 0x0706050403020100u + first * 0x0101010101010101u;
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64((long long)at), x);
}
/* Bits above a code find its copy in the table. */
TQKV__OP __m512i tqkv__look_up_avx512(const tqkv_format format, const int k, const tqkv__chunk_avx512 *chunk,
                                      const tqkv__raw_avx512 *raw)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format);
    const __m512i x =
        main == 8 ? tqkv__i_load_four_avx512(0xffff, raw->at + 16 * k, raw->stride) : raw->main[k * main / 8 % 2];
    __m512i index = x;
    if (TQKV__KIND(format) == TQKV__GRID) return _mm512_xor_si512(x, chunk->book);
    if (main == 4) {
        const __m512i next = _mm512_srli_epi16(x, 4);
        index = k % 2 ? _mm512_unpackhi_epi8(x, next) : _mm512_unpacklo_epi8(x, next);
    }
    if (main == 2) index = tqkv__i_take_avx512(2, 0, k, x);
    if (upper_bits)
        index = _mm512_ternarylogic_epi64(_mm512_set1_epi8((char)((1 << main) - 1)), index,
                                          tqkv__i_take_avx512(upper_bits, main, k, raw->upper), 0xca);
    return _mm512_permutexvar_epi8(index, chunk->book);
}
/* GCC 12 copies the sums of the intrinsic, and spills them. */
TQKV__OP __m512i tqkv__i_dot_bytes_avx512(__m512i sums, __m512i codes, __m512i bytes)
{
#ifdef __clang__
    return _mm512_dpbusd_epi32(sums, codes, bytes);
#else
    __asm__("vpdpbusd\t{%2, %1, %0|%0, %1, %2}" : "+v"(sums) : "v"(codes), "vm"(bytes));
    return sums;
#endif
}
TQKV__OP tqkv__i_sum_avx512 tqkv__i_dot_lanes_avx512(tqkv__i_sum_avx512 sums, __m512i codes, tqkv__i_row_avx512 row)
{
    sums.high = tqkv__i_dot_bytes_avx512(sums.high, codes, row.high);
    sums.low = tqkv__i_dot_bytes_avx512(sums.low, codes, row.low);
    return sums;
}
#define tqkv__i_dot_avx512 tqkv__i_dot_lanes_avx512
TQKV__OP __m512i tqkv__i_whole_lanes_avx512(tqkv__i_sum_avx512 sum)
{
    return _mm512_add_epi32(_mm512_slli_epi32(sum.high, 8), sum.low);
}
#define tqkv__i_whole_avx512 tqkv__i_whole_lanes_avx512
/* A register, for loads that repeat 16 bytes are slow. */
TQKV__OP __m512i tqkv__i_repeat_16_avx512(const int8_t *p)
{
    __m512i x = _mm512_broadcast_i32x4(tqkv__load_128((const uint8_t *)p));
    __asm__("" : "+v"(x));
    return x;
}
TQKV__OP tqkv__i_row_avx512 tqkv__i_load_row_avx512(const int8_t *p, int plane, int i)
{
    const tqkv__i_row_avx512 row = {tqkv__i_repeat_16_avx512(p + i), tqkv__i_repeat_16_avx512(p + plane + i)};
    return row;
}
TQKV__OP tqkv__i_repeated_avx512 tqkv__i_repeat_avx512(const int8_t *p, int plane, int i)
{
    int32_t high, low;
    memcpy(&high, p + i, sizeof high);
    memcpy(&low, p + plane + i, sizeof low);
    const tqkv__i_repeated_avx512 repeated = {_mm512_set1_epi32(high), _mm512_set1_epi32(low)};
    return repeated;
}
TQKV__OP void tqkv__i_key_lanes_avx512(const __m512i *x, __m512i *lanes)
{
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    lanes[0] = _mm512_unpacklo_epi64(a, c);
    lanes[1] = _mm512_unpackhi_epi64(a, c);
    lanes[2] = _mm512_unpacklo_epi64(b, d);
    lanes[3] = _mm512_unpackhi_epi64(b, d);
}
TQKV__OP void tqkv__i_value_lanes_avx512(const __m512i *x, __m512i *lanes)
{
    const __m512i at = _mm512_set_epi32(0x3f2f1f0f, 0x3e2e1e0e, 0x3d2d1d0d, 0x3c2c1c0c, 0x3b2b1b0b, 0x3a2a1a0a,
                                        0x39291909, 0x38281808, 0x37271707, 0x36261606, 0x35251505, 0x34241404,
                                        0x33231303, 0x32221202, 0x31211101, 0x30201000);
    lanes[0] = _mm512_permutexvar_epi8(at, x[0]);
}
/* Adds up the lanes of four vectors in each quarter: lane i of it is vector i's. */
TQKV__OP __m512i tqkv__sum_four_codes_avx512(const __m512i *x)
{
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
TQKV__OP __m512 tqkv__to_floats_avx512(__m512i x) { return _mm512_cvtepi32_ps(x); }
TQKV__OP __m512i tqkv__round_codes_avx512(__m512 x) { return _mm512_cvtps_epi32(x); }
TQKV__OP void tqkv__i_store_integers_avx512(void *to, int i, int n, __m512i x)
{
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128((__m128i *)(void *)((int8_t *)to + i), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i *)(void *)((int8_t *)to + n + i), _mm512_cvtepi32_epi8(x));
}
TQKV__OP uint32_t tqkv__largest_code_avx512(__m512i x) { return _mm512_reduce_max_epu32(x); }
TQKV__OP __m512i tqkv__add_codes_avx512(__m512i x, __m512i y) { return _mm512_add_epi32(x, y); }
TQKV__OP __m512i tqkv__set_codes_avx512(int32_t x) { return _mm512_set1_epi32(x); }
TQKV__OP int32_t tqkv__sum_codes_avx512(__m512i x) { return _mm512_reduce_add_epi32(x); }

#define TQKV__(name)        tqkv__##name##_avx512
#define TQKV__I(name)       tqkv__i_##name##_avx512
#define TQKV__INTEGER_LANES 16
#define TQKV__PRODUCTS      4
#define TQKV__CODE_OFFSET   128
#define TQKV__FEW_ROWS      4 /* rows of loops straight from the codes, at most */
#define TQKV__LANES_ROWS    5 /* from so many rows on, tiles are turned */
#define TQKV__SUM_SIXTEENS  8 /* sixteens of dimensions, over all rows, whose sums fit in registers */
#include "loops.h"
#endif

/* >>integer-avx2: what AVX2 brings to >>k-rows. Products are of words. Bytes are widened with zeros: codes are 128 more
   than they are. */

#ifdef TQKV__AVX2

#define TQKV__TARGET __attribute__((target("avx2,fma,f16c")))

typedef struct tqkv__raw_avx2 {
    __m256i main[2], upper;
    const uint8_t *at;
    size_t stride;
} tqkv__raw_avx2;
typedef struct tqkv__chunk_avx2 {
    __m128i main[2], upper;
    int unfilled;
    __m256i books[4];
} tqkv__chunk_avx2;
/* The halves of 16 words, twice */
typedef struct tqkv__i_row_avx2 {
    __m256i first, last;
} tqkv__i_row_avx2;
typedef __m256i tqkv__i_sum_avx2, tqkv__i_lanes_avx2, tqkv__i_repeated_avx2;

TQKV__OP __m128i tqkv__i_lanes_left_avx2(int bytes)
{
    return _mm_cmpgt_epi32(_mm_set1_epi32(bytes), _mm_set_epi32(12, 8, 4, 0));
}
TQKV__OP tqkv__chunk_avx2 tqkv__open_chunk_avx2(const tqkv_format format, int left, const int8_t *centroids)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format), bits = TQKV__BOOK_BITS(format);
    tqkv__chunk_avx2 chunk;
    if (left > 64) left = 64;
    TQKV__UNROLL
    for (int i = 0; i < 2; i++) chunk.main[i] = tqkv__i_lanes_left_avx2(left * main / 8 - 16 * i);
    chunk.upper = tqkv__i_lanes_left_avx2(left * upper_bits / 8);
    chunk.unfilled = 8 - left / 8;
    TQKV__UNROLL
    for (int i = 0; i < 4; i++)
        if (bits && (i == 0 || i < (1 << bits) / 16))
            chunk.books[i] =
                _mm256_xor_si256(_mm256_set1_epi8(-128),
                                 _mm256_broadcastsi128_si256(tqkv__load_128((const uint8_t *)centroids + 16 * i)));
    return chunk;
}
TQKV__OP __m256i tqkv__i_load_two_avx2(__m128i mask, const uint8_t *p, size_t stride)
{
    const __m128i a = _mm_maskload_epi32((const int *)(const void *)p, mask);
    return _mm256_set_m128i(_mm_maskload_epi32((const int *)(const void *)(p + stride), mask), a);
}
/* Loads the upper bits of 64 dimensions. Of fewer the last 8 bytes of the row, which begin in its main field. */
TQKV__OP __m256i tqkv__i_load_bits_avx2(int unfilled, const uint8_t *p, size_t stride)
{
    const __m256i x = _mm256_set_m128i(tqkv__load_64(p + stride - unfilled), tqkv__load_64(p - unfilled));
    return _mm256_srl_epi64(x, _mm_cvtsi32_si128(8 * unfilled));
}
TQKV__OP tqkv__raw_avx2 tqkv__open_avx2(const tqkv_format format, const tqkv__chunk_avx2 *chunk, const uint8_t *p,
                                        const uint8_t *upper, size_t stride)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format);
    tqkv__raw_avx2 raw;
    raw.at = p;
    raw.stride = stride;
    TQKV__UNROLL
    for (int i = 0; i < 2; i++)
        if (main < 8 && i < main / 2) raw.main[i] = tqkv__i_load_two_avx2(chunk->main[i], p + 16 * i, stride);
    if (upper_bits == 1) raw.upper = tqkv__i_load_bits_avx2(chunk->unfilled, upper, stride);
    if (upper_bits == 2) raw.upper = tqkv__i_load_two_avx2(chunk->upper, upper, stride);
    return raw;
}
/* Spreads the fields of half a vector's bytes, low ones or high ones: each byte becomes two of `bits` bits. */
TQKV__OP __m256i tqkv__i_spread_avx2(const int bits, const int half, __m256i x)
{
    const __m256i mask = _mm256_set1_epi8((char)((1 << bits) - 1));
    const __m256i low = _mm256_and_si256(x, mask), high = _mm256_and_si256(_mm256_srli_epi16(x, bits), mask);
    return half ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
}
TQKV__OP __m256i tqkv__i_take_pairs_avx2(const int k, __m256i x)
{
    return tqkv__i_spread_avx2(2, k % 2, tqkv__i_spread_avx2(4, k / 2, x));
}
TQKV__OP __m256i tqkv__i_take_bits_avx2(const int k, __m256i x)
{
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    const long long first = 0x0202020202020202 * k, last = first + 0x0101010101010101;
    const __m256i bytes = _mm256_shuffle_epi8(x, _mm256_setr_epi64x(first, last, first, last));
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}
/* Look-ups take the lowest four bits of an index; fifth, sixth: the highest bit of a byte says which half */
TQKV__OP __m256i tqkv__i_centroids_avx2(const int bits, const __m256i *books, __m256i index, __m256i fifth,
                                        __m256i sixth)
{
    const __m256i first = _mm256_shuffle_epi8(books[0], index);
    if (bits < 5) return first;
    const __m256i low = _mm256_blendv_epi8(first, _mm256_shuffle_epi8(books[1], index), fifth);
    if (bits == 5) return low;
    const __m256i high =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(books[2], index), _mm256_shuffle_epi8(books[3], index), fifth);
    return _mm256_blendv_epi8(low, high, sixth);
}
TQKV__OP __m256i tqkv__look_up_avx2(const tqkv_format format, const int k, const tqkv__chunk_avx2 *chunk,
                                    const tqkv__raw_avx2 *raw)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format), bits = TQKV__BOOK_BITS(format);
    __m256i x, upper = _mm256_setzero_si256();
    if (main == 8) {
        x = _mm256_set_m128i(tqkv__load_128(raw->at + 16 * k + raw->stride), tqkv__load_128(raw->at + 16 * k));
        if (!bits) return _mm256_xor_si256(x, _mm256_set1_epi8(-128));
        upper = _mm256_srli_epi16(x, 4);
        x = _mm256_and_si256(x, _mm256_set1_epi8(15));
    }
    if (main == 4) x = tqkv__i_spread_avx2(4, k % 2, raw->main[k / 2]);
    if (main == 2) x = tqkv__i_take_pairs_avx2(k, raw->main[0]);
    if (upper_bits == 1) upper = tqkv__i_take_bits_avx2(k, raw->upper);
    if (upper_bits == 2) upper = tqkv__i_take_pairs_avx2(k, raw->upper);
    if (bits == 3) x = _mm256_or_si256(x, _mm256_and_si256(upper, _mm256_set1_epi8(4)));
    return tqkv__i_centroids_avx2(bits, chunk->books, x, _mm256_slli_epi16(upper, 7), _mm256_slli_epi16(upper, 6));
}
TQKV__OP tqkv__i_row_avx2 tqkv__i_load_row_avx2(const int8_t *p, int plane, int i)
{
    const uint8_t *words = (const uint8_t *)p + 2 * i;
    const tqkv__i_row_avx2 row = {_mm256_broadcastsi128_si256(tqkv__load_128(words)),
                                  _mm256_broadcastsi128_si256(tqkv__load_128(words + 16))};
    (void)plane; /* of bytes */
    return row;
}
/* GCC 12 copies the sums of the intrinsic, and spills them. */
TQKV__OP __m256i tqkv__i_dot_lanes_avx2(__m256i sums, __m256i words, __m256i integers)
{
    const __m256i products = _mm256_madd_epi16(words, integers);
#ifdef __clang__
    return _mm256_add_epi32(sums, products);
#else
    __asm__("vpaddd\t{%1, %0, %0|%0, %0, %1}" : "+x"(sums) : "x"(products));
    return sums;
#endif
}
TQKV__OP __m256i tqkv__i_dot_avx2(__m256i sums, __m256i x, tqkv__i_row_avx2 row)
{
    const __m256i zero = _mm256_setzero_si256();
    sums = tqkv__i_dot_lanes_avx2(sums, _mm256_unpacklo_epi8(x, zero), row.first);
    return tqkv__i_dot_lanes_avx2(sums, _mm256_unpackhi_epi8(x, zero), row.last);
}
TQKV__OP __m256i tqkv__i_whole_avx2(__m256i sum) { return sum; }
TQKV__OP __m256i tqkv__i_whole_lanes_avx2(__m256i sum) { return sum; }
TQKV__OP __m256i tqkv__i_repeat_avx2(const int8_t *p, int plane, int i)
{
    int32_t lane;
    (void)plane;
    memcpy(&lane, p + 2 * i, sizeof lane);
    return _mm256_set1_epi32(lane);
}
TQKV__OP void tqkv__i_key_lanes_avx2(const __m256i *x, __m256i *lanes)
{
    const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
    const __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    const __m256i turned[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d),
                               _mm256_unpackhi_epi64(b, d)};
    const __m256i at = _mm256_setr_epi32((int)0x80018000, (int)0x80058004, (int)0x80098008, (int)0x800d800c,
                                         (int)0x80018000, (int)0x80058004, (int)0x80098008, (int)0x800d800c);
    TQKV__UNROLL
    for (int i = 0; i < 8; i++)
        lanes[i] = _mm256_shuffle_epi8(turned[i / 2], i % 2 ? _mm256_add_epi8(at, _mm256_set1_epi16(2)) : at);
}
TQKV__OP void tqkv__i_value_lanes_avx2(const __m256i *x, __m256i *lanes)
{
    const __m256i fours = _mm256_permutevar8x32_epi32(x[0], _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
    const __m256i at = _mm256_setr_epi32((int)0x80048000, (int)0x80058001, (int)0x80068002, (int)0x80078003,
                                         (int)0x80048000, (int)0x80058001, (int)0x80068002, (int)0x80078003);
    lanes[0] = _mm256_shuffle_epi8(fours, at);
    lanes[1] = _mm256_shuffle_epi8(fours, _mm256_add_epi8(at, _mm256_set1_epi16(8)));
}
TQKV__OP __m256i tqkv__sum_four_codes_avx2(const __m256i *x)
{
    return _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
}
TQKV__OP __m256 tqkv__to_floats_avx2(__m256i x) { return _mm256_cvtepi32_ps(x); }
TQKV__OP __m256i tqkv__round_codes_avx2(__m256 x) { return _mm256_cvtps_epi32(x); }
TQKV__OP void tqkv__i_store_integers_avx2(void *to, int i, int n, __m256i x)
{
    (void)n;
    _mm_storeu_si128((__m128i *)(void *)((int16_t *)to + i),
                     _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
TQKV__OP uint32_t tqkv__largest_code_avx2(__m256i x)
{
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1)));
}
TQKV__OP __m256i tqkv__add_codes_avx2(__m256i x, __m256i y) { return _mm256_add_epi32(x, y); }
TQKV__OP __m256i tqkv__set_codes_avx2(int32_t x) { return _mm256_set1_epi32(x); }
TQKV__OP int32_t tqkv__sum_codes_avx2(__m256i x)
{
    const __m128i m = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i two = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

#define TQKV__(name)        tqkv__##name##_avx2
#define TQKV__I(name)       tqkv__i_##name##_avx2
#define TQKV__INTEGER_LANES 8
#define TQKV__PRODUCTS      2
#define TQKV__CODE_OFFSET   128
#define TQKV__FEW_ROWS      4
#define TQKV__LANES_ROWS    8
#define TQKV__SUM_SIXTEENS  4 /* sixteens of dimensions, over all rows, whose sums fit in registers */
#include "loops.h"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

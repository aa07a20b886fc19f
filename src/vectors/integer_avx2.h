/* >>integer-avx2: what AVX2 brings to >>k-integer, and AVX-VNNI */

#ifdef TQKV__AVX2

#define TQKV__TARGET __attribute__((target("avx2,fma,f16c")))

typedef __m256i tqkv__i_sum_avx2, tqkv__i_row_avx2;

TQKV__OP void tqkv__i_load_books_avx2(const int bits, const int8_t *centroids, __m256i *books)
{
    TQKV__UNROLL
    for (int i = 0; i < 4; i++)
        if (i == 0 || i < (1 << bits) / 16)
            books[i] = _mm256_broadcastsi128_si256(tqkv__load_128((const uint8_t *)centroids + 16 * i));
}
/* 16 bytes of which n come from p; n: a constant. Bytes that are stored to be loaded at once would be waited for. */
TQKV__OP __m128i tqkv__i_load_first_avx2(const int n, const uint8_t *p)
{
    int32_t word = 0;
    if (n == 16) return tqkv__load_128(p);
    if (n == 8) return tqkv__load_64(p);
    memcpy(&word, p, (size_t)(n == 4 ? 4 : 2));
    return _mm_cvtsi32_si128(word);
}
/* Loads the next 32 or 16 codes of a field, a byte each. */
TQKV__OP __m256i tqkv__i_field_avx2(const int bits, const int left, const uint8_t *p)
{
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    const __m256i at = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m128i first = tqkv__i_load_first_avx2(bits == 8 ? 16 : left * bits / 8, p);
    if (bits == 8) return _mm256_set_m128i(left == 32 ? tqkv__load_128(p + 16) : _mm_setzero_si128(), first);
    if (bits == 4) {
        const __m256i x = _mm256_cvtepu8_epi16(first);
        return _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi16(x, 4)), _mm256_set1_epi8(15));
    }
    if (bits == 2) {
        __m256i x = _mm256_cvtepu8_epi32(first);
        x = _mm256_or_si256(x, _mm256_slli_epi32(x, 12));
        return _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 6)), _mm256_set1_epi8(3));
    }
    const __m256i spread = _mm256_shuffle_epi8(_mm256_broadcastd_epi32(first), at);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), _mm256_set1_epi8(1));
}
/* Look-ups take the lowest four bits of an index, blends its highest. */
TQKV__OP __m256i tqkv__i_centroids_avx2(const int bits, const __m256i *books, __m256i index)
{
    if (bits < 5) return _mm256_shuffle_epi8(books[0], index);
    const __m256i fifth = _mm256_slli_epi16(index, 3), sixth = _mm256_slli_epi16(index, 2);
    const __m256i low =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(books[0], index), _mm256_shuffle_epi8(books[1], index), fifth);
    if (bits == 5) return low;
    const __m256i high =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(books[2], index), _mm256_shuffle_epi8(books[3], index), fifth);
    return _mm256_blendv_epi8(low, high, sixth);
}
TQKV__OP __m256i tqkv__i_look_up_avx2(const tqkv_format format, const __m256i *books, int left, const uint8_t *p,
                                      const uint8_t *upper)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format), bits = TQKV__BOOK_BITS(format);
    __m256i index = tqkv__i_field_avx2(main, left, p);
    if (upper_bits)
        index = _mm256_or_si256(index, _mm256_slli_epi16(tqkv__i_field_avx2(upper_bits, left, upper), main));
    if (main == 8) index = _mm256_and_si256(index, _mm256_set1_epi8((char)((1 << bits) - 1)));
    return tqkv__i_centroids_avx2(bits, books, index);
}
TQKV__OP __m256i tqkv__i_open_avx2(const int8_t *p, int left)
{
    (void)left; /* always 16 or more, as in NEON */
    return _mm256_cvtepi8_epi16(tqkv__load_128((const uint8_t *)p));
}
TQKV__OP __m256i tqkv__i_dot_avx2(__m256i sums, __m256i codes, __m256i integers)
{
    const __m256i products = _mm256_madd_epi16(codes, integers);
#ifdef __clang__
    return _mm256_add_epi32(sums, products);
#else
    __asm__("vpaddd\t{%1, %0, %0|%0, %0, %1}" : "+x"(sums) : "x"(products));
    return sums;
#endif
}
TQKV__OP __m256i tqkv__i_whole_avx2(__m256i sum) { return sum; }
#define tqkv__i_load_row_avx2 tqkv__i_load_codes_avx2
TQKV__OP __m256i tqkv__i_repeat_avx2(const int16_t *p)
{
    int32_t lane;
    memcpy(&lane, p, sizeof lane);
    return _mm256_set1_epi32(lane);
}
/* Interleaves rows. Behind the end of a row come its last bytes again. */
TQKV__OP void tqkv__i_interleave_avx2(const int8_t *p, size_t stride, int left, __m256i *x)
{
    const int step = left > 16 ? 16 : 0;
    TQKV__UNROLL
    for (int v = 0; v < 4; v += 2, p += step) {
        const __m128i a = tqkv__load_128((const uint8_t *)p), b = tqkv__load_128((const uint8_t *)p + stride);
        x[v] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
        x[v + 1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
    }
}
TQKV__OP void tqkv__i_transpose_avx2(const int8_t *p, size_t stride, __m256i *x)
{
    __m256i rows[4]; /* half l of rows[i]: position 4 l + i */
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) {
        const uint8_t *at = (const uint8_t *)p + (size_t)i * stride;
        rows[i] = _mm256_set_m128i(tqkv__load_128(at + 4 * stride), tqkv__load_128(at));
    }
    TQKV__UNROLL
    for (int half = 0; half < 2; half++) {
        const __m256i a = half ? _mm256_unpackhi_epi16(rows[0], rows[1]) : _mm256_unpacklo_epi16(rows[0], rows[1]);
        const __m256i b = half ? _mm256_unpackhi_epi16(rows[2], rows[3]) : _mm256_unpacklo_epi16(rows[2], rows[3]);
        const __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
        x[4 * half] = _mm256_srai_epi16(_mm256_unpacklo_epi8(low, low), 8);
        x[4 * half + 1] = _mm256_srai_epi16(_mm256_unpackhi_epi8(low, low), 8);
        x[4 * half + 2] = _mm256_srai_epi16(_mm256_unpacklo_epi8(high, high), 8);
        x[4 * half + 3] = _mm256_srai_epi16(_mm256_unpackhi_epi8(high, high), 8);
    }
}
TQKV__OP void tqkv__i_natural_order_avx2(__m256i *x) { (void)x; }
TQKV__OP __m256i tqkv__i_sum_four_codes_avx2(const __m256i *x)
{
    return _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
}
TQKV__OP __m256i tqkv__i_sum_codes_across_avx2(const __m256i *x)
{
    return _mm256_add_epi32(_mm256_permute2x128_si256(x[0], x[1], 0x20), _mm256_permute2x128_si256(x[0], x[1], 0x31));
}
TQKV__OP __m256 tqkv__i_to_floats_avx2(__m256i x) { return _mm256_cvtepi32_ps(x); }
TQKV__OP __m256i tqkv__i_round_codes_avx2(__m256 x) { return _mm256_cvtps_epi32(x); }
TQKV__OP void tqkv__i_store_words_avx2(int16_t *p, int i, __m256i x)
{
    _mm_storeu_si128((__m128i *)(void *)(p + i),
                     _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
TQKV__OP uint32_t tqkv__i_largest_code_avx2(__m256i x)
{
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1)));
}

#define TQKV__(name)        tqkv__##name##_avx2
#define TQKV__I(name)       tqkv__i_##name##_avx2
#define TQKV__S(name)       tqkv__i_##name##_avx2
#define TQKV__ISA_NAME      "avx2"
#define TQKV__INTEGER_LANES 8
#define TQKV__PRODUCTS      2
#define TQKV__PRODUCT_ROWS  2
#define TQKV__LOOKED_UP     0
#include "loops.h"

/* -- AVX2, with a product and a sum in one instruction: AVX-VNNI -- */

#define TQKV__TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))

typedef __m256i tqkv__i_sum_avxvnni, tqkv__i_row_avxvnni;
TQKV__OP __m256i tqkv__i_dot_avxvnni(__m256i sums, __m256i codes, __m256i integers)
{
#ifdef __clang__
    return _mm256_dpwssd_avx_epi32(sums, codes, integers);
#else
    __asm__("%{vex%} vpdpwssd\t{%2, %1, %0|%0, %1, %2}" : "+x"(sums) : "x"(codes), "x"(integers));
    return sums;
#endif
}
#define tqkv__i_open_avxvnni          tqkv__i_open_avx2
#define tqkv__i_whole_avxvnni         tqkv__i_whole_avx2
#define tqkv__i_load_row_avxvnni      tqkv__i_load_codes_avxvnni
#define tqkv__i_repeat_avxvnni        tqkv__i_repeat_avx2
#define tqkv__i_interleave_avxvnni    tqkv__i_interleave_avx2
#define tqkv__i_transpose_avxvnni     tqkv__i_transpose_avx2
#define tqkv__i_round_query_avxvnni   tqkv__i_round_query_avx2
#define tqkv__i_round_weights_avxvnni tqkv__i_round_weights_avx2

#define TQKV__(name)        tqkv__##name##_avx2
#define TQKV__I(name)       tqkv__i_##name##_avxvnni
#define TQKV__S(name)       tqkv__i_##name##_avx2
#define TQKV__ISA_NAME      "avx2"
#define TQKV__INTEGER_LANES 8
#define TQKV__PRODUCTS      2
#define TQKV__PRODUCT_ROWS  2
#define TQKV__LOOKED_UP     0
#define TQKV__DECODED       1
#define TQKV__ROUNDED       1
#include "loops.h"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

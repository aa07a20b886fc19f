/* >>set-avx2: with FMA and F16C */

#define TQKV__TARGET __attribute__((target("avx2,fma,f16c")))
typedef __m256 tqkv__vector_avx2;
typedef __m256i tqkv__codes_avx2;

TQKV__OP __m256 tqkv__set1_avx2(float x) { return _mm256_set1_ps(x); }
TQKV__OP __m256 tqkv__fma_avx2(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
TQKV__OP __m256 tqkv__max_avx2(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
TQKV__OP __m256 tqkv__zero_below_avx2(__m256 least, __m256 x, __m256 value)
{
    return _mm256_and_ps(_mm256_cmp_ps(x, least, _CMP_NLT_UQ), value);
}
TQKV__OP __m256 tqkv__mul_nonzero_avx2(__m256 a, __m256 b)
{
    return _mm256_and_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ), _mm256_mul_ps(a, b));
}
TQKV__OP __m256 tqkv__round_avx2(__m256 x) { return _mm256_round_ps(x, 8); }
TQKV__OP __m256 tqkv__exp2_avx2(__m256 n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
TQKV__OP float tqkv__largest_lane_avx2(__m256 x)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
TQKV__OP float tqkv__sum_16_avx2(const __m256 *x)
{
    const __m256 half = _mm256_add_ps(x[0], x[1]);
    __m128 m = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    m = _mm_add_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}
/* to[m] (+)= sum_16 of the vectors 2 m and 2 m + 1, m < 4 */
TQKV__OP void tqkv__add_sums_of_16_avx2(const __m256 *x, bool add, float *to)
{
    const __m256 a = _mm256_add_ps(x[0], x[1]), b = _mm256_add_ps(x[2], x[3]), c = _mm256_add_ps(x[4], x[5]),
                 d = _mm256_add_ps(x[6], x[7]);
    const __m256 ac = _mm256_add_ps(_mm256_permute2f128_ps(a, c, 0x20), _mm256_permute2f128_ps(a, c, 0x31));
    const __m256 bd = _mm256_add_ps(_mm256_permute2f128_ps(b, d, 0x20), _mm256_permute2f128_ps(b, d, 0x31));
    const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ac, bd, 0x44), _mm256_shuffle_ps(ac, bd, 0xee));
    const __m128 ab = _mm256_castps256_ps128(all), cd = _mm256_extractf128_ps(all, 1);
    const __m128 sums = _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
    _mm_storeu_ps(to, _mm_add_ps(add ? _mm_loadu_ps(to) : _mm_setzero_ps(), sums));
}
TQKV__OP __m256 tqkv__load_f16_avx2(const uint8_t *p) { return _mm256_cvtph_ps(tqkv__load_128(p)); }

TQKV__OP __m256 tqkv__rounded_avx2(__m256 x)
{
    __asm__("" : "+x"(x));
    return x;
}
TQKV__OP __m256 tqkv__min_avx2(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
/* Flips the signs whose bits are set, from bit i on. */
TQKV__OP __m256 tqkv__flip_avx2(__m256 x, const uint8_t *signs, int i)
{
    const __m256i bits = _mm256_set1_epi8((char)signs[i / 8]);
    const __m256i moved = _mm256_sllv_epi32(bits, _mm256_set_epi32(24, 25, 26, 27, 28, 29, 30, 31));
    return _mm256_xor_ps(x, _mm256_and_ps(_mm256_castsi256_ps(moved), _mm256_set1_ps(-0.0f)));
}
TQKV__OP __m256 tqkv__load_two_avx2(const float *low, const float *high)
{
    return _mm256_set_m128(_mm_loadu_ps(high), _mm_loadu_ps(low));
}
TQKV__OP void tqkv__store_two_avx2(float *low, float *high, __m256 x)
{
    _mm_storeu_ps(low, _mm256_castps256_ps128(x));
    _mm_storeu_ps(high, _mm256_extractf128_ps(x, 1));
}
TQKV__OP __m256i tqkv__widen_bytes_avx2(const uint8_t *p) { return _mm256_cvtepu8_epi32(tqkv__load_64(p)); }
TQKV__OP __m256 tqkv__butterfly_avx2(const int stage, __m256 x)
{
    const __m256 plus = _mm256_set1_ps(1.0f), minus = _mm256_set1_ps(-1.0f);
    const __m256 sign = stage == 0   ? _mm256_blend_ps(plus, minus, 0xaa)
                        : stage == 1 ? _mm256_blend_ps(plus, minus, 0xcc)
                                     : _mm256_blend_ps(plus, minus, 0xf0);
    const __m256 swapped = stage == 0   ? _mm256_permute_ps(x, 0xb1)
                           : stage == 1 ? _mm256_permute_ps(x, 0x4e)
                                        : _mm256_permute2f128_ps(x, x, 0x01);
    return _mm256_fmadd_ps(x, sign, swapped);
}
TQKV__OP __m256i tqkv__larger_bits_avx2(__m256i largest, __m256 x)
{
    return _mm256_max_epu32(largest, _mm256_andnot_si256(_mm256_set1_epi32((int)0x80000000), _mm256_castps_si256(x)));
}
TQKV__OP __m256i tqkv__truncate_avx2(__m256 x) { return _mm256_cvttps_epi32(x); }
/* Loads a table of 16 bytes, the same in either half of a register, and looks up: the upper three bytes of each lane
   are 0 and find the first entry, which is 0. */
TQKV__OP __m256i tqkv__load_16_avx2(const uint8_t *table) { return _mm256_broadcastsi128_si256(tqkv__load_128(table)); }
TQKV__OP __m256i tqkv__look_up_16_avx2(__m256i table, __m256i index) { return _mm256_shuffle_epi8(table, index); }
TQKV__OP __m256 tqkv__look_up_8_avx2(const __m256 *table, __m256i index)
{
    return _mm256_permutevar8x32_ps(*table, index);
}
TQKV__OP __m256 tqkv__choose_avx2(__m256 bound, __m256 w, __m256 below, __m256 above)
{
    return _mm256_blendv_ps(below, above, _mm256_cmp_ps(bound, w, _CMP_LE_OQ));
}
/* Loads eight cells: x[0] their bounds, x[1] and x[2] the centroids, x[3] the bits of n_below. Shufps runs on more
   ports than unpck. */
TQKV__OP void tqkv__load_cells_avx2(const tqkv__cell *cells, const uint32_t *at, __m256 *x)
{
    __m256 four[4];
    TQKV__UNROLL
    for (int i = 0; i < 4; i++)
        four[i] = _mm256_set_m128(_mm_load_ps(&cells[at[i + 4]].bound), _mm_load_ps(&cells[at[i]].bound));
    const __m256 a = _mm256_shuffle_ps(four[0], four[1], 0x44), b = _mm256_shuffle_ps(four[2], four[3], 0x44);
    const __m256 c = _mm256_shuffle_ps(four[0], four[1], 0xee), d = _mm256_shuffle_ps(four[2], four[3], 0xee);
    x[0] = _mm256_shuffle_ps(a, b, 0x88);
    x[1] = _mm256_shuffle_ps(a, b, 0xdd);
    x[2] = _mm256_shuffle_ps(c, d, 0x88);
    x[3] = _mm256_shuffle_ps(c, d, 0xdd);
}
TQKV__OP __m256i tqkv__quantise_i8_avx2(__m256 v)
{
    v = _mm256_max_ps(_mm256_min_ps(v, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-127.0f));
    return _mm256_and_si256(_mm256_cvtps_epi32(v), _mm256_set1_epi32(255));
}
TQKV__OP __m256i tqkv__narrow_avx2(const __m256i *four)
{
    const __m256i mixed =
        _mm256_packus_epi16(_mm256_packus_epi32(four[0], four[1]), _mm256_packus_epi32(four[2], four[3]));
    return _mm256_permutevar8x32_epi32(mixed, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));
}
TQKV__OP void tqkv__pack_avx2(const int bits, const int low, __m256i codes, uint8_t *p)
{
    if (bits == 1) {
        const int set = _mm256_movemask_epi8(_mm256_slli_epi16(codes, 7 - low));
        memcpy(p, &set, sizeof set);
        return;
    }
    const __m256i field = _mm256_and_si256(_mm256_srli_epi16(codes, low), _mm256_set1_epi8((char)((1 << bits) - 1)));
    if (bits == 4) {
        const __m256i joined = _mm256_maddubs_epi16(field, _mm256_set1_epi16(0x1001));
        _mm_storeu_si128((__m128i *)(void *)p,
                         _mm_packus_epi16(_mm256_castsi256_si128(joined), _mm256_extracti128_si256(joined, 1)));
        return;
    }
    const __m256i pairs = _mm256_maddubs_epi16(field, _mm256_set1_epi16(0x0401));
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packus_epi16(words, words));
}
TQKV__OP void tqkv__store_half_avx2(uint8_t *p, __m256 x)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
TQKV__OP void tqkv__store_words_avx2(uint8_t *p, __m256i words)
{
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128((__m128i *)(void *)p, _mm_packus_epi32(low, high));
}

#define TQKV__(name) tqkv__##name##_avx2
#define TQKV__ENCODES
#define TQKV__WIDTH 8 /* vectors of the rotation in registers */
#define TQKV__LANES 8
#include "loops.h"

/* >>set-avx512: with the byte permutes of VBMI. A function has the same name in all sets, except for the suffix. */

#ifdef TQKV__AVX512

#define TQKV__TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")))
typedef __m512 tqkv__vector_avx512;
typedef __m512i tqkv__codes_avx512;

TQKV__OP __m512 tqkv__set1_avx512(float x) { return _mm512_set1_ps(x); }
TQKV__OP __m512 tqkv__fma_avx512(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
/* Returns a > b ? a : b; gives b if either is NaN, in every set */
TQKV__OP __m512 tqkv__max_avx512(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
TQKV__OP __m512 tqkv__abs_avx512(__m512 x) { return _mm512_abs_ps(x); }
TQKV__OP __m512 tqkv__copysign_avx512(__m512 magnitude, __m512 sign)
{
    return _mm512_or_ps(magnitude, _mm512_and_ps(_mm512_set1_ps(-0.0f), sign)); /* magnitude >= 0 */
}
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored                                                                                         \
    "-Wsign-conversion" /* without optimisation GCC's intrinsic is a macro with a cast of -1 */
TQKV__OP __m512 tqkv__round_avx512(__m512 x) { return _mm512_roundscale_ps(x, 8); }
#pragma GCC diagnostic pop
TQKV__OP __m512 tqkv__exp2_avx512(__m512 n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n); }
TQKV__OP float tqkv__first_lane_avx512(__m512 x) { return _mm512_cvtss_f32(x); }
TQKV__OP float tqkv__largest_lane_avx512(__m512 x) { return _mm512_reduce_max_ps(x); }
/* Adds up 16 sums, in one order for all sets: lane i and i + 8, then i + 4, i + 2, i + 1. */
TQKV__OP float tqkv__sum_16_avx512(const __m512 *x)
{
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(*x), _mm512_extractf32x8_ps(*x, 1));
    __m128 m = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    m = _mm_add_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}

/* Finds to[m] (+)= sum_16 of x[m], m < 4 */
TQKV__OP void tqkv__add_sums_of_16_avx512(const __m512 *x, bool add, float *to)
{
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x44), _mm512_shuffle_f32x4(x[0], x[1], 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x44), _mm512_shuffle_f32x4(x[2], x[3], 0xee));
    __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
    const __m128 sums = _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all));
    _mm_storeu_ps(to, _mm_add_ps(add ? _mm_loadu_ps(to) : _mm_setzero_ps(), sums));
}

/* Returns value where x >= least or x is NaN, else 0 */
TQKV__OP __m512 tqkv__zero_below_avx512(__m512 least, __m512 x, __m512 value)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), value);
}
/* Returns a * b; 0 where a is 0, even if b is infinite or NaN */
TQKV__OP __m512 tqkv__mul_nonzero_avx512(__m512 a, __m512 b)
{
    return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ), a, b);
}

TQKV__OP __m256i tqkv__load_256_avx512(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}
/* Loads a field of 1 or 2 bits a lane, of which bit `first` comes to bit `to`. */
TQKV__OP __m512i tqkv__load_short_field_avx512(const int bits, const int first, const int to, const uint8_t *p)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i turn =
        _mm512_add_epi32(_mm512_slli_epi32(lanes, (unsigned)(bits - 1)), _mm512_set1_epi32((first - to) & 31));
    uint32_t all;
    int16_t half;
    if (bits == 1) { /* twice in a lane */
        memcpy(&half, p, sizeof half);
        return _mm512_rorv_epi32(_mm512_set1_epi16(half), turn);
    }
    memcpy(&all, p, sizeof all);
    return _mm512_rorv_epi32(_mm512_set1_epi32((int)all), turn);
}
/* Loads a field of a strip: lane l holds `bits` bits from bit l * bits of p on. With the codes l * per_lane ... of a
   strip in a lane, one shift moves the k-th code of every lane to bit 0. Other bits may follow those of the lane. */
TQKV__OP __m512i tqkv__load_field_avx512(const int bits, const uint8_t *p)
{
    uint64_t word;
    if (bits == 32) return _mm512_loadu_si512((const void *)p);
    if (bits < 4) return tqkv__load_short_field_avx512(bits, 0, 0, p);
    if (bits == 16) return _mm512_cvtepu16_epi32(tqkv__load_256_avx512(p));
    if (bits == 8) return _mm512_cvtepu8_epi32(tqkv__load_128(p));
    memcpy(&word, p, sizeof word); /* 4: the lowest byte of each lane takes a window of 8 bits */
    return _mm512_multishift_epi64_epi8(_mm512_set_epi32(60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0),
                                        _mm512_set1_epi64((long long)word));
}
/* Returns the k-th codes of a strip of one or two vectors. */
TQKV__OP __m512i tqkv__short_codes_avx512(const int bits, const int per_lane, const int k, const uint8_t *p,
                                          const uint8_t *upper)
{
    const int main_bits = bits < 4 ? 2 : 4, upper_bits = bits - main_bits;
    const __m512i low = main_bits * per_lane > 2 ? _mm512_srli_epi32(tqkv__load_field_avx512(main_bits * per_lane, p),
                                                                     (unsigned)(main_bits * k))
                                                 : tqkv__load_short_field_avx512(2, 0, 0, p);
    if (!upper_bits) return low;
    const __m512i high =
        upper_bits * per_lane > 2
            ? _mm512_slli_epi32(tqkv__load_field_avx512(4, upper), (unsigned)(main_bits - upper_bits * k))
            : tqkv__load_short_field_avx512(upper_bits * per_lane, upper_bits * k, main_bits, upper);
    return _mm512_ternarylogic_epi64(_mm512_set1_epi32((1 << main_bits) - 1), low, high, 0xca);
}
/* Loads the fields of a strip of 8 or 4 vectors. */
TQKV__OP void tqkv__load_fields_avx512(const int bits, const int count, const uint8_t *p, const uint8_t *upper,
                                       __m512i *low, __m512i *high)
{
    const int main_bits = bits < 4 ? 2 : 4, upper_bits = bits - main_bits;
    *low = tqkv__load_field_avx512(count * main_bits, p);
    if (upper_bits) *high = tqkv__load_field_avx512(count * upper_bits, upper);
}
/* Joins all codes of TQ3 as nibbles. Bytes take windows of 8 bits from both fields, in words of 64 bits: two codes' low
   pairs in bits 0 to 3, their third bits in bits 4 and 5. One look-up puts these six bits in order. */
TQKV__OP __m512i tqkv__join_tq3_avx512(__m512i low, __m512i high)
{
    const __m512i pairs = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x2c2824200c080400), low);
    const __m512i third = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x22201e1c02003e3c), high);
    const __m512i six = _mm512_ternarylogic_epi64(_mm512_set1_epi8(15), pairs, third, 0xca);
    const __m512i upper_five =
        _mm512_set_epi32(0x74747474, 0x64646464, 0x54545454, 0x44444444, 0x70707070, 0x60606060, 0x50505050, 0x40404040,
                         0x34343434, 0x24242424, 0x14141414, 0x04040404, 0x30303030, 0x20202020, 0x10101010, 0);
    return _mm512_permutexvar_epi8(six, _mm512_or_si512(upper_five, _mm512_set1_epi32(0x03020100)));
}
/* Joins the codes from the k-th on of each lane: of TQ5 and TQ6 four as bytes, in the same way, whose upper bits may be
   others; of the other formats all of them, in as many bits as their codes or, TQ3, in four. */
TQKV__OP __m512i tqkv__join_fields_avx512(const int bits, int k, __m512i low, __m512i high)
{
    const long long each = 0x0101010101010101, upper_at = bits == 5 ? 0x1f1e1d1c3f3e3d3c : 0x22201e1c02003e3c;
    if (bits == 3) return tqkv__join_tq3_avx512(low, high);
    if (bits < 5) return low;
    low = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x2c2824200c080400 + k * 4 * each), low);
    high = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(upper_at + k * (bits - 4) * each), high);
    return _mm512_ternarylogic_epi64(_mm512_set1_epi8(15), low, high, 0xca);
}
TQKV__OP __m512 tqkv__look_up_avx512(const int bits, const __m512 *table, __m512i codes)
{
    if (bits <= 4) return _mm512_permutexvar_ps(codes, table[0]);
    const __m512 lower = _mm512_permutex2var_ps(table[0], codes, table[1]);
    if (bits == 5) return lower;
    return _mm512_mask_blend_ps(_mm512_test_epi32_mask(codes, _mm512_set1_epi32(0x20)), lower,
                                _mm512_permutex2var_ps(table[2], codes, table[3]));
}
/* Brings the next of the joined codes of each lane to bit 0. */
TQKV__OP void tqkv__next_codes_avx512(const int bits, __m512i *codes)
{
    *codes = _mm512_srli_epi32(*codes, bits == 2 ? 2u : bits < 5 ? 4u : 8u);
}
/* Byte codes look up each byte of a centroid in one register; TQ8 in two for 128 centroids, the half it needs. */
TQKV__OP void tqkv__load_table_avx512(const int bits, const bool nibbles, const tqkv__stream *s, __m512 *table)
{
    if (bits == 2) table[0] = _mm512_broadcast_f32x4(_mm_loadu_ps(s->codebook));
    if (bits == 3) table[0] = _mm512_broadcast_f32x8(_mm256_loadu_ps(s->codebook));
    if (nibbles && bits > 3)
        for (int i = 0; i < 1 << (bits - 4); i++) table[i] = _mm512_loadu_ps(s->codebook + 16 * i);
    if (!nibbles)
        for (int p = 0; p < 4; p++) {
            table[p] = _mm512_loadu_ps((const void *)s->planes[p]);
            if (bits == 8) table[4 + p] = _mm512_loadu_ps((const void *)(s->planes[p] + 64));
        }
}
TQKV__OP __m512 tqkv__centroids_of_packed_avx512(const int bits, const int per_lane, const int k, const __m512 *table,
                                                 const uint8_t *p, const uint8_t *upper)
{
    const int main_bits = bits < 4 ? 2 : 4, upper_bits = bits - main_bits;
    if (per_lane < 4) return tqkv__look_up_avx512(bits, table, tqkv__short_codes_avx512(bits, per_lane, k, p, upper));
    const __m512i low = tqkv__load_field_avx512(main_bits * per_lane, p);
    const __m512i high = upper_bits ? tqkv__load_field_avx512(upper_bits * per_lane, upper) : low;
    const __m512i codes = tqkv__join_fields_avx512(bits, k / 4 * 4, low, high);
    const int at = bits == 2 ? 2 * k : bits < 5 ? 4 * k : 8 * (k % 4);
    return tqkv__look_up_avx512(bits, table, _mm512_srli_epi32(codes, (unsigned)at));
}
/* Looks up the four bytes of 64 centroids and joins them. TQ8: a code c of the upper half takes ~c and flips the
   sign. */
TQKV__OP __m512 tqkv__centroids_of_bytes_avx512(const int bits, const int per_lane, const int k, const __m512 *table,
                                                const uint8_t *p)
{
    /* dword 4i + j goes to dword i of 128-bit lane j; two unpacks then leave codes 16k to 16k + 15 in vector k */
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i loaded = _mm512_maskz_loadu_epi32((__mmask16)((1 << 4 * per_lane) - 1), (const void *)p);
    __m512i codes = _mm512_permutexvar_epi32(order, loaded), bytes[4];
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    if (bits == 8) codes = _mm512_mask_sub_epi8(codes, upper, _mm512_set1_epi8(-1), codes);
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) {
        const __m512i first = _mm512_castps_si512(table[i]), second = _mm512_castps_si512(table[bits == 8 ? 4 + i : i]);
        bytes[i] = bits == 8 ? _mm512_permutex2var_epi8(first, codes, second) : _mm512_permutexvar_epi8(codes, first);
    }
    if (bits == 8) bytes[3] = _mm512_mask_add_epi8(bytes[3], upper, bytes[3], _mm512_set1_epi8(-128));
    const __m512i low = k < 2 ? _mm512_unpacklo_epi8(bytes[0], bytes[1]) : _mm512_unpackhi_epi8(bytes[0], bytes[1]);
    const __m512i high = k < 2 ? _mm512_unpacklo_epi8(bytes[2], bytes[3]) : _mm512_unpackhi_epi8(bytes[2], bytes[3]);
    return _mm512_castsi512_ps(k % 2 ? _mm512_unpackhi_epi16(low, high) : _mm512_unpacklo_epi16(low, high));
}
TQKV__OP __m512 tqkv__load_i8_avx512(const uint8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(tqkv__load_128(p)));
}
TQKV__OP __m512 tqkv__load_f16_avx512(const uint8_t *p) { return _mm512_cvtph_ps(tqkv__load_256_avx512(p)); }

/* Sums up fours: lane 4i + m has the sum of lanes 4i to 4i + 3 of x[m] */
TQKV__OP __m512 tqkv__sum_fours_avx512(const __m512 *x)
{
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}
/* Sums up across x, four such vectors. Lane 4i + m: the sum of the lanes 4j + m of the i-th */
TQKV__OP __m512 tqkv__sum_across_avx512(const float *x)
{
    const __m512 a = _mm512_load_ps(x), b = _mm512_load_ps(x + 16), c = _mm512_load_ps(x + 32),
                 d = _mm512_load_ps(x + 48);
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

/* A matrix [16][columns] to [columns][16], or back: each step moves the lowest bit of a place to the top, or back. */
TQKV__OP void tqkv__turn_step_avx512(const bool decoded, const int columns, __m512 *x)
{
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_or_si512(low, _mm512_set1_epi32(8));
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    __m512 y[8];
    const int half = columns / 2;
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) {
        if (i < half) {
            const __m512 a = decoded ? x[2 * i] : x[i], b = decoded ? x[2 * i + 1] : x[half + i];
            y[decoded ? i : 2 * i] = _mm512_permutex2var_ps(a, decoded ? even : low, b);
            y[decoded ? half + i : 2 * i + 1] = _mm512_permutex2var_ps(a, decoded ? odd : high, b);
        }
    }
    TQKV__UNROLL
    for (int i = 0; i < 8; i++)
        if (i < 2 * half) x[i] = y[i];
}
TQKV__OP void tqkv__turn_avx512(const bool decoded, const int columns, __m512 *x)
{
    if (columns > 1) tqkv__turn_step_avx512(decoded, columns, x);
    if (columns > 2) tqkv__turn_step_avx512(decoded, columns, x);
    if (columns > 4) tqkv__turn_step_avx512(decoded, columns, x);
}

TQKV__OP __m512i tqkv__larger_bits_avx512(__m512i largest, __m512 x)
{
    return _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(x)));
}

#define tqkv__codec_avx512       tqkv__codec_avx2 /* rows are encoded by the narrower set */
#define TQKV__(name)             tqkv__##name##_avx512
#define TQKV__ISA_NAME           "avx512"
#define TQKV__LANES              16
#define TQKV__COLUMNS            8 /* of a matrix of packed codes: see reorder */
#define TQKV__MATRIX_ROWS        16
#define TQKV__NIBBLE_STRIP       8 /* vectors in a strip of nibbles */
#define TQKV__STRIP_TOGETHER     0 /* do the vectors of a strip share work? */
#define TQKV__ROWS               4 /* queries whose sums fit in registers: values, */
#define TQKV__SCORE_ROWS         4 /* keys, and decoded keys */
#define TQKV__DECODED_SCORE_ROWS 4
#define TQKV__SUMS               16 /* vectors of sums of values in registers */
#include "loops.h"

#endif /* TQKV__AVX512 */

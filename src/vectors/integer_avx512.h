/* >>integer-avx512: what AVX-512 brings to >>k-integer, with the products of VNNI */

#ifdef TQKV__AVX512

#define TQKV__TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")))

typedef __m512i tqkv__i_sum_avx512, tqkv__i_row_avx512;

TQKV__OP void tqkv__i_load_books_avx512(const int bits, const int8_t *centroids, __m512i *books)
{
    (void)bits; /* 64 entries are one register */
    books[0] = _mm512_loadu_si512((const void *)centroids);
}
/* Byte i: eight bits from bit i * bits - low of a field on, which has `left` codes. */
TQKV__OP __m512i tqkv__i_field_avx512(const int bits, const int low, int left, const uint8_t *p)
{
    const uint64_t mask = ~(uint64_t)0 >> (64 - (left < 64 ? left : 64) * bits / 8);
    const uint64_t at = (uint64_t)bits * 0x0706050403020100u + (uint64_t)(64 - low) * 0x0101010101010101u;
    __m512i words;
    if (bits == 8) return _mm512_maskz_loadu_epi8(mask, (const void *)p);
    if (bits == 4)
        words = _mm512_cvtepu32_epi64(_mm256_maskz_loadu_epi8((__mmask32)mask, (const void *)p));
    else if (bits == 2)
        words = _mm512_cvtepu16_epi64(_mm_maskz_loadu_epi8((__mmask16)mask, (const void *)p));
    else
        words = _mm512_cvtepu8_epi64(_mm_maskz_loadu_epi8((__mmask16)mask, (const void *)p));
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64((long long)at), words);
}
/* Looks codes up. Bits above a code find its copy in the table. */
TQKV__OP __m512i tqkv__i_look_up_avx512(const tqkv_format format, const __m512i *books, int left, const uint8_t *p,
                                        const uint8_t *upper)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format);
    __m512i index = tqkv__i_field_avx512(main, 0, left, p);
    if (upper_bits)
        index = _mm512_ternarylogic_epi64(_mm512_set1_epi8((char)((1 << main) - 1)), index,
                                          tqkv__i_field_avx512(upper_bits, main, left, upper), 0xca);
    return _mm512_permutexvar_epi8(index, books[0]);
}
TQKV__OP __m512i tqkv__i_open_avx512(const int8_t *p, int left)
{
    if (left >= 32) return _mm512_cvtepi8_epi16(tqkv__load_256_avx512((const uint8_t *)p));
    return _mm512_cvtepi8_epi16(_mm256_castsi128_si256(tqkv__load_128((const uint8_t *)p)));
}
/* GCC 12 copies the sums of the intrinsic, and spills them. */
TQKV__OP __m512i tqkv__i_dot_avx512(__m512i sums, __m512i codes, __m512i integers)
{
#ifdef __clang__
    return _mm512_dpwssd_epi32(sums, codes, integers);
#else
    __asm__("vpdpwssd\t{%2, %1, %0|%0, %1, %2}" : "+v"(sums) : "v"(codes), "v"(integers));
    return sums;
#endif
}
TQKV__OP __m512i tqkv__i_whole_avx512(__m512i sum) { return sum; }
#define tqkv__i_load_row_avx512 tqkv__i_load_codes_avx512
TQKV__OP __m512i tqkv__i_repeat_avx512(const int16_t *p)
{
    int32_t lane;
    memcpy(&lane, p, sizeof lane);
    return _mm512_set1_epi32(lane);
}
TQKV__OP void tqkv__i_transpose_avx512(const int8_t *p, size_t stride, __m512i *x)
{
    __m512i rows[4]; /* quarter l of rows[i]: position 4 l + i */
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) {
        const uint8_t *at = (const uint8_t *)p + (size_t)i * stride;
        rows[i] = _mm512_castsi128_si512(tqkv__load_128(at));
        rows[i] = _mm512_inserti32x4(rows[i], tqkv__load_128(at + 4 * stride), 1);
        rows[i] = _mm512_inserti32x4(rows[i], tqkv__load_128(at + 8 * stride), 2);
        rows[i] = _mm512_inserti32x4(rows[i], tqkv__load_128(at + 12 * stride), 3);
    }
    TQKV__UNROLL
    for (int half = 0; half < 2; half++) {
        const __m512i a = half ? _mm512_unpackhi_epi16(rows[0], rows[1]) : _mm512_unpacklo_epi16(rows[0], rows[1]);
        const __m512i b = half ? _mm512_unpackhi_epi16(rows[2], rows[3]) : _mm512_unpacklo_epi16(rows[2], rows[3]);
        const __m512i low = _mm512_unpacklo_epi32(a, b), high = _mm512_unpackhi_epi32(a, b);
        x[4 * half] = _mm512_srai_epi16(_mm512_unpacklo_epi8(low, low), 8);
        x[4 * half + 1] = _mm512_srai_epi16(_mm512_unpackhi_epi8(low, low), 8);
        x[4 * half + 2] = _mm512_srai_epi16(_mm512_unpacklo_epi8(high, high), 8);
        x[4 * half + 3] = _mm512_srai_epi16(_mm512_unpackhi_epi8(high, high), 8);
    }
}
TQKV__OP __m512i tqkv__i_load_left_avx512(const int8_t *p, int left)
{
    if (left >= 64) return _mm512_loadu_si512((const void *)p);
    return _mm512_maskz_loadu_epi8(((uint64_t)1 << left) - 1, (const void *)p);
}
/* Interleaves rows. Half h of vector v: dimensions 16 h + 8 v on, of v + 2 from 32 on */
TQKV__OP void tqkv__i_interleave_avx512(const int8_t *p, size_t stride, int left, __m512i *x)
{
    const __m512i a = tqkv__i_load_left_avx512(p, left), b = tqkv__i_load_left_avx512(p + stride, left);
    const __m512i low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
    x[0] = _mm512_cvtepi8_epi16(_mm512_castsi512_si256(low));
    x[1] = _mm512_cvtepi8_epi16(_mm512_castsi512_si256(high));
    x[2] = _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(low, 1));
    x[3] = _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(high, 1));
}
TQKV__OP void tqkv__i_natural_order_avx512(__m512i *x)
{
    TQKV__UNROLL
    for (int v = 0; v < 4; v += 2) {
        const __m512i a = x[v], b = x[v + 1];
        x[v] = _mm512_shuffle_i64x2(a, b, 0x44);
        x[v + 1] = _mm512_shuffle_i64x2(a, b, 0xee);
    }
}
/* Adds up the lanes of four vectors in each quarter: lane i of it is vector i's. */
TQKV__OP __m512i tqkv__i_sum_four_codes_avx512(const __m512i *x)
{
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
TQKV__OP __m512i tqkv__i_sum_codes_across_avx512(const __m512i *x)
{
    const __m512i a = _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[1], 0x88), _mm512_shuffle_i32x4(x[0], x[1], 0xdd));
    const __m512i b = _mm512_add_epi32(_mm512_shuffle_i32x4(x[2], x[3], 0x88), _mm512_shuffle_i32x4(x[2], x[3], 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}
TQKV__OP __m512 tqkv__i_to_floats_avx512(__m512i x) { return _mm512_cvtepi32_ps(x); }
TQKV__OP __m512i tqkv__i_round_codes_avx512(__m512 x) { return _mm512_cvtps_epi32(x); }
TQKV__OP void tqkv__i_store_words_avx512(int16_t *p, int i, __m512i x)
{
    _mm256_storeu_si256((__m256i *)(void *)(p + i), _mm512_cvtepi32_epi16(x));
}
TQKV__OP uint32_t tqkv__i_largest_code_avx512(__m512i x) { return _mm512_reduce_max_epu32(x); }

/* These are what loops for few rows take; see there. */

TQKV__OP __m512i tqkv__i_load_book_avx512(const int8_t *centroids)
{
    return _mm512_xor_si512(_mm512_loadu_si512((const void *)centroids), _mm512_set1_epi8(-128));
}
/* Splits into the high and the low bytes of 64 integers, of which there are n */
TQKV__OP void tqkv__i_split_avx512(const int16_t *words, int n, __m512i *bytes)
{
    const uint64_t mask = n <= 0 ? 0 : n >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1;
    const __m512i half = _mm512_set1_epi16(128);
    const __m512i a = _mm512_maskz_loadu_epi16((__mmask32)mask, (const void *)words);
    const __m512i b = _mm512_maskz_loadu_epi16((__mmask32)(mask >> 32), (const void *)(words + 32));
    const __m256i high = _mm512_cvtepi16_epi8(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8));
    const __m256i next = _mm512_cvtepi16_epi8(_mm512_srai_epi16(_mm512_add_epi16(b, half), 8));
    bytes[0] = _mm512_inserti64x4(_mm512_castsi256_si512(high), next, 1);
    bytes[1] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
}
/* Takes the bytes of one nibble out of those of 128 dimensions. */
TQKV__OP __m512i tqkv__i_nibbles_of_avx512(int nibble, __m512i a, __m512i b)
{
    TQKV__ALIGNED int8_t at[64];
    for (int i = 0; i < 64; i++) at[i] = (int8_t)(2 * i + nibble);
    return _mm512_permutex2var_epi8(a, _mm512_load_si512((const void *)at), b);
}
TQKV__OP __m512i tqkv__i_dot_bytes_avx512(__m512i sums, __m512i codes, __m512i bytes)
{
#ifdef __clang__
    return _mm512_dpbusd_epi32(sums, codes, bytes);
#else
    __asm__("vpdpbusd\t{%2, %1, %0|%0, %1, %2}" : "+v"(sums) : "v"(codes), "v"(bytes));
    return sums;
#endif
}
/* Returns sums - 128 times the sums of four bytes. */
TQKV__OP __m512i tqkv__i_less_bytes_avx512(__m512i sums, __m512i bytes)
{
    return _mm512_sub_epi32(sums,
                            tqkv__i_dot_bytes_avx512(_mm512_setzero_si512(), _mm512_set1_epi8((char)-128), bytes));
}
TQKV__OP __m512i tqkv__i_join_avx512(__m512i high, __m512i low)
{
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}
TQKV__OP __m512i tqkv__i_set_lanes_avx512(int32_t x) { return _mm512_set1_epi32(x); }
/* Loads one nibble of each byte. left: dimensions from here on; upper: 8 upper bits a byte of TQ5, 4 of TQ6 */
TQKV__OP __m512i tqkv__i_load_nibbles_avx512(const tqkv_format format, const int nibble, __m512i book, int left,
                                             const uint8_t *p, const uint8_t *upper)
{
    const int n = left < 128 ? left : 128, upper_bits = TQKV__UPPER_BITS(format);
    __m512i index = _mm512_maskz_loadu_epi8(~(uint64_t)0 >> (64 - n / 2), (const void *)p);
    /* other bits find a copy in the table */
    if (nibble) index = _mm512_srlv_epi16(index, _mm512_set1_epi16(4));
    if (upper_bits) {
        const uint64_t step = (uint64_t)(2 * upper_bits), first = (uint64_t)(upper_bits * nibble - 4 + 64) % 64;
        const uint64_t at = first * 0x0101010101010101u + step * 0x0706050403020100u;
        const uint64_t mask = ~(uint64_t)0 >> (64 - n * upper_bits / 8);
        __m512i x;
        if (upper_bits == 1)
            x = _mm512_cvtepu16_epi64(_mm_maskz_loadu_epi8((__mmask16)mask, (const void *)upper));
        else
            x = _mm512_cvtepu32_epi64(_mm256_maskz_loadu_epi8((__mmask32)mask, (const void *)upper));
        x = _mm512_multishift_epi64_epi8(_mm512_set1_epi64((long long)at), x);
        index = _mm512_ternarylogic_epi64(_mm512_set1_epi8(15), index, x, 0xca);
    }
    return _mm512_permutexvar_epi8(index, book);
}
/* Interleaves four vectors: dword i of quarter l of x[t] is byte 16 l + 4 t + i of four vectors */
TQKV__OP void tqkv__i_interleave_four_avx512(__m512i *x)
{
    const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
    const __m512i c = _mm512_unpackhi_epi8(x[0], x[1]), d = _mm512_unpackhi_epi8(x[2], x[3]);
    x[0] = _mm512_unpacklo_epi16(a, b);
    x[1] = _mm512_unpackhi_epi16(a, b);
    x[2] = _mm512_unpacklo_epi16(c, d);
    x[3] = _mm512_unpackhi_epi16(c, d);
}
/* Puts four bytes into all lanes. */
TQKV__OP __m512i tqkv__i_repeat_four_avx512(const int8_t *p)
{
    int32_t lane;
    memcpy(&lane, p, sizeof lane);
    return _mm512_set1_epi32(lane);
}
/* Splits a tile's weights into bytes; returns -128 times the sum of the weights. */
TQKV__OP int32_t tqkv__i_split_weights_avx512(const int16_t *words, int8_t (*to)[TQKV__TILE])
{
    const __m512i ones = _mm512_set1_epi16(1);
    __m512i bytes[2];
    tqkv__i_split_avx512(words, 64, bytes);
    _mm512_storeu_si512((void *)to[0], bytes[0]);
    _mm512_storeu_si512((void *)to[1], bytes[1]);
    return -128 * _mm512_reduce_add_epi32(
                      _mm512_add_epi32(_mm512_madd_epi16(_mm512_loadu_si512((const void *)words), ones),
                                       _mm512_madd_epi16(_mm512_loadu_si512((const void *)(words + 32)), ones)));
}
/* Brings the sums of both nibbles into the order of their dimensions. even, odd: [4], x: [8] */
TQKV__OP void tqkv__i_order_nibbles_avx512(const __m512i *even, const __m512i *odd, __m512i *x)
{
    TQKV__UNROLL
    for (int i = 0; i < 4; i += 2) {
        const __m512i y0 = _mm512_unpacklo_epi32(even[i], odd[i]), y1 = _mm512_unpackhi_epi32(even[i], odd[i]);
        const __m512i y2 = _mm512_unpacklo_epi32(even[i + 1], odd[i + 1]);
        const __m512i y3 = _mm512_unpackhi_epi32(even[i + 1], odd[i + 1]);
        const __m512i a = _mm512_shuffle_i32x4(y0, y1, 0x44), b = _mm512_shuffle_i32x4(y2, y3, 0x44);
        const __m512i c = _mm512_shuffle_i32x4(y0, y1, 0xee), d = _mm512_shuffle_i32x4(y2, y3, 0xee);
        x[i / 2] = _mm512_shuffle_i32x4(a, b, 0x88);
        x[i / 2 + 2] = _mm512_shuffle_i32x4(a, b, 0xdd);
        x[i / 2 + 4] = _mm512_shuffle_i32x4(c, d, 0x88);
        x[i / 2 + 6] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
}

/* Puts quarter i into all quarters. */
TQKV__OP __m512i tqkv__i_repeat_quarter_avx512(__m512i x, const int i)
{
    const __m512i index = _mm512_set4_epi32(4 * i + 3, 4 * i + 2, 4 * i + 1, 4 * i);
    return _mm512_permutexvar_epi32(index, x);
}
/* Loads fields of 64 codes of four positions, each in a half of a vector or in a quarter of the first one. mask: a bit
   for 16 bits */
TQKV__OP void tqkv__i_load_quarters_avx512(const int bits, uint32_t mask, const uint8_t *p, size_t stride, __m512i *x)
{
    if (bits == 4) {
        const __mmask16 halves = (__mmask16)mask;
        TQKV__UNROLL
        for (int i = 0; i < 2; i++, p += 2 * stride)
            x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi16(halves, (const void *)p)),
                                      _mm256_maskz_loadu_epi16(halves, (const void *)(p + stride)), 1);
        return;
    }
    const __mmask8 quarters = (__mmask8)mask;
    x[0] = _mm512_castsi128_si512(_mm_maskz_loadu_epi16(quarters, (const void *)p));
    x[0] = _mm512_inserti32x4(x[0], _mm_maskz_loadu_epi16(quarters, (const void *)(p + stride)), 1);
    x[0] = _mm512_inserti32x4(x[0], _mm_maskz_loadu_epi16(quarters, (const void *)(p + 2 * stride)), 2);
    x[0] = _mm512_inserti32x4(x[0], _mm_maskz_loadu_epi16(quarters, (const void *)(p + 3 * stride)), 3);
}
/* Orders fields by the words of 64 bits from which tqkv__i_sixteen takes codes. x: of 64 codes of four positions

     scores   word h of quarter p: of position p codes 8 h to 8 h + 7 of this sixteen, `bits` bytes, then of others
     sums     word w: a byte with codes 2 w and 2 w + 1 of this sixteen of each position, then of the next sixteen  */
TQKV__OP __m512i tqkv__i_order_fields_avx512(const int bits, const bool lanes, const int sixteen, const __m512i *x)
{
    TQKV__ALIGNED int8_t at[64];
    const int size = bits == 4 ? 32 : 16; /* bytes from one position to the next */
    for (int i = 0; i < 64 && lanes; i++) {
        const int word = i / 8, next = i % 8 / 4, position = i % 4;
        at[i] = (int8_t)(position * size + (16 * (sixteen + next) + 2 * word) * bits / 8 % size);
    }
    for (int i = 0; i < 64 && !lanes; i++) {
        const int position = i / 16, half = i % 16 / 8, next = i % 8 / bits, byte = i % bits;
        at[i] = (int8_t)(position * size + ((2 * (sixteen + next) + half) * bits + byte) % size);
    }
    const __m512i index = _mm512_load_si512((const void *)at);
    return bits == 4 ? _mm512_permutex2var_epi8(x[0], index, x[1]) : _mm512_permutexvar_epi8(index, x[0]);
}
/* Takes eight bits a code of a sixteen from ordered fields; its first bit comes to bit `low`. */
TQKV__OP __m512i tqkv__i_sixteen_avx512(const int bits, const int low, const bool lanes, const int sixteen,
                                        __m512i fields)
{
    TQKV__ALIGNED int8_t at[64];
    for (int i = 0; i < 64 && lanes; i++) {
        const int code = i / 4, position = i % 4;
        at[i] = (int8_t)((sixteen % 2 * 32 + position * 8 + code * bits % 8 + 64 - low) % 64);
    }
    for (int i = 0; i < 64 && !lanes; i++) at[i] = (int8_t)(((8 * sixteen + i % 8) * bits + 64 - low) % 64);
    return _mm512_multishift_epi64_epi8(_mm512_load_si512((const void *)at), fields);
}
/* Looks up a sixteen. fields: the main ones, the upper ones */
TQKV__OP __m512i tqkv__i_look_up_fields_avx512(const tqkv_format format, const bool lanes, const int sixteen,
                                               const __m512i *fields, __m512i book)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format);
    __m512i index = tqkv__i_sixteen_avx512(main, 0, lanes, sixteen, fields[0]);
    if (upper_bits)
        index = _mm512_ternarylogic_epi64(_mm512_set1_epi8((char)((1 << main) - 1)), index,
                                          tqkv__i_sixteen_avx512(upper_bits, main, lanes, sixteen, fields[1]), 0xca);
    return _mm512_permutexvar_epi8(index, book);
}

#define TQKV__(name)        tqkv__##name##_avx512
#define TQKV__I(name)       tqkv__i_##name##_avx512
#define TQKV__S(name)       tqkv__i_##name##_avx512
#define TQKV__ISA_NAME      "avx512"
#define TQKV__INTEGER_LANES 16
#define TQKV__PRODUCTS      2
#define TQKV__PRODUCT_ROWS  4 /* rows whose sums fit in registers */
#define TQKV__LOOKED_UP     1
#include "loops.h"
#endif

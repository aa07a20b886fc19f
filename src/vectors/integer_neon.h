/* >>integer-neon: what NEON brings to >>k-integer */

#ifdef TQKV__NEON

#define TQKV__TARGET

/* Codes are looked up where they lie. */
typedef struct tqkv__raw_neon {
    const uint8_t *at, *upper;
} tqkv__raw_neon;
typedef struct tqkv__chunk_neon {
    uint32x4_t books[4];
} tqkv__chunk_neon;
typedef struct tqkv__i_row_neon {
    int16x8_t first, last;
} tqkv__i_row_neon;
typedef uint32x4_t tqkv__i_sum_neon, tqkv__i_lanes_neon, tqkv__i_repeated_neon;

TQKV__OP tqkv__chunk_neon tqkv__open_chunk_neon(const tqkv_format format, int left, const int8_t *centroids)
{
    tqkv__chunk_neon chunk;
    (void)left;
    TQKV__UNROLL
    for (int i = 0; i < 4; i++)
        if (TQKV__KIND(format) == TQKV__BOOK && (i == 0 || i < (1 << TQKV__BOOK_BITS(format)) / 16))
            chunk.books[i] = vreinterpretq_u32_s8(vld1q_s8(centroids + 16 * i));
    return chunk;
}
TQKV__OP tqkv__raw_neon tqkv__open_neon(const tqkv_format format, const tqkv__chunk_neon *chunk, const uint8_t *p,
                                        const uint8_t *upper, size_t stride)
{
    const tqkv__raw_neon raw = {p, upper};
    (void)format, (void)chunk, (void)stride; /* of one position */
    return raw;
}
/* The next 16 codes of a field, a byte each, from bit `to` of it on; other bits may be set. */
TQKV__OP uint8x16_t tqkv__i_field_neon(const int bits, const int to, const uint8_t *p)
{
    uint8_t at[16];
    int8_t shift[16];
    uint64_t bytes = 0;
    if (bits == 8) return vld1q_u8(p);
    TQKV__UNROLL
    for (int i = 0; i < 16; i++) {
        at[i] = (uint8_t)(i * bits / 8);
        shift[i] = (int8_t)(to - i * bits % 8);
    }
    memcpy(&bytes, p, 2 * (size_t)bits);
    const uint8x16_t spread = vqtbl1q_u8(vcombine_u8(vcreate_u8(bytes), vdup_n_u8(0)), vld1q_u8(at));
    return vshlq_u8(spread, vld1q_s8(shift));
}
TQKV__OP uint32x4_t tqkv__look_up_neon(const tqkv_format format, const int k, const tqkv__chunk_neon *chunk,
                                       const tqkv__raw_neon *raw)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format), bits = TQKV__BOOK_BITS(format);
    uint8x16_t index = tqkv__i_field_neon(main, 0, raw->at + 2 * k * main), found;
    uint8x16x4_t book;
    if (TQKV__KIND(format) == TQKV__GRID) return vreinterpretq_u32_u8(index);
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) book.val[i] = vreinterpretq_u8_u32(chunk->books[i < (1 << bits) / 16 ? i : 0]);
    const uint8x16x2_t half = {{book.val[0], book.val[1]}};
    if (upper_bits)
        index = vbslq_u8(vdupq_n_u8((uint8_t)((1 << main) - 1)), index,
                         tqkv__i_field_neon(upper_bits, main, raw->upper + 2 * k * upper_bits));
    index = vandq_u8(index, vdupq_n_u8((uint8_t)((1 << bits) - 1)));
    if (bits == 6)
        found = vqtbl4q_u8(book, index);
    else if (bits == 5)
        found = vqtbl2q_u8(half, index);
    else
        found = vqtbl1q_u8(book.val[0], index);
    return vreinterpretq_u32_u8(found);
}
TQKV__OP tqkv__i_row_neon tqkv__i_load_row_neon(const int8_t *p, int plane, int i)
{
    const int16_t *words = (const int16_t *)(const void *)p + i;
    const tqkv__i_row_neon row = {vld1q_s16(words), vld1q_s16(words + 8)};
    (void)plane; /* of bytes */
    return row;
}
/* Lane i adds up the products of words i and i + 4. */
TQKV__OP uint32x4_t tqkv__i_dot_words_neon(uint32x4_t sums, int16x8_t x, int16x8_t y)
{
    const int32x4_t low = vmlal_s16(vreinterpretq_s32_u32(sums), vget_low_s16(x), vget_low_s16(y));
    return vreinterpretq_u32_s32(vmlal_high_s16(low, x, y));
}
TQKV__OP uint32x4_t tqkv__i_dot_neon(uint32x4_t sums, uint32x4_t codes, tqkv__i_row_neon row)
{
    const int8x16_t x = vreinterpretq_s8_u32(codes);
    sums = tqkv__i_dot_words_neon(sums, vmovl_s8(vget_low_s8(x)), row.first);
    return tqkv__i_dot_words_neon(sums, vmovl_high_s8(x), row.last);
}
TQKV__OP uint32x4_t tqkv__i_dot_lanes_neon(uint32x4_t sums, uint32x4_t lanes, uint32x4_t integers)
{
    return tqkv__i_dot_words_neon(sums, vreinterpretq_s16_u32(lanes), vreinterpretq_s16_u32(integers));
}
TQKV__OP uint32x4_t tqkv__i_whole_neon(uint32x4_t sum) { return sum; }
TQKV__OP uint32x4_t tqkv__i_whole_lanes_neon(uint32x4_t sum) { return sum; }
TQKV__OP uint32x4_t tqkv__i_repeat_neon(const int8_t *p, int plane, int i)
{
    const int16_t *words = (const int16_t *)(const void *)p + i;
    (void)plane;
    return vreinterpretq_u32_s16(vcombine_s16(vld1_dup_s16(words), vld1_dup_s16(words + 1)));
}
TQKV__OP void tqkv__i_transpose_neon(const uint32x4_t *x, uint32x4_t *four)
{
    TQKV__UNROLL
    for (int half = 0; half < 2; half++) {
        const uint32x4_t a = half ? vzip2q_u32(x[0], x[2]) : vzip1q_u32(x[0], x[2]);
        const uint32x4_t b = half ? vzip2q_u32(x[1], x[3]) : vzip1q_u32(x[1], x[3]);
        four[2 * half] = vzip1q_u32(a, b);
        four[2 * half + 1] = vzip2q_u32(a, b);
    }
}
/* Four positions of a dimension, then of the next one */
TQKV__OP void tqkv__i_key_lanes_neon(const uint32x4_t *x, uint32x4_t *lanes)
{
    uint32x4_t four[4];
    tqkv__i_transpose_neon(x, four);
    const uint32_t columns[4] = {0x0c080400, 0x0d090501, 0x0e0a0602, 0x0f0b0703};
    const uint8x16_t at = vreinterpretq_u8_u32(vld1q_u32(columns));
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) {
        const int8x16_t ordered = vreinterpretq_s8_u8(vqtbl1q_u8(vreinterpretq_u8_u32(four[i]), at));
        lanes[2 * i] = vreinterpretq_u32_s16(vmovl_s8(vget_low_s8(ordered)));
        lanes[2 * i + 1] = vreinterpretq_u32_s16(vmovl_high_s8(ordered));
    }
}
/* Four dimensions of a position, then of the next one */
TQKV__OP void tqkv__i_value_lanes_neon(const uint32x4_t *x, uint32x4_t *lanes)
{
    const int8x16_t low = vreinterpretq_s8_u32(vzip1q_u32(x[0], x[1]));
    const int8x16_t high = vreinterpretq_s8_u32(vzip2q_u32(x[0], x[1]));
    lanes[0] = vreinterpretq_u32_s16(vmovl_s8(vget_low_s8(low)));
    lanes[1] = vreinterpretq_u32_s16(vmovl_high_s8(low));
    lanes[2] = vreinterpretq_u32_s16(vmovl_s8(vget_low_s8(high)));
    lanes[3] = vreinterpretq_u32_s16(vmovl_high_s8(high));
}
TQKV__OP uint32x4_t tqkv__sum_four_codes_neon(const uint32x4_t *x)
{
    return vpaddq_u32(vpaddq_u32(x[0], x[1]), vpaddq_u32(x[2], x[3]));
}
TQKV__OP float32x4_t tqkv__to_floats_neon(uint32x4_t x) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x)); }
TQKV__OP uint32x4_t tqkv__round_codes_neon(float32x4_t x) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(x)); }
TQKV__OP void tqkv__i_store_integers_neon(void *to, int i, int n, uint32x4_t x)
{
    (void)n;
    vst1_s16((int16_t *)to + i, vmovn_s32(vreinterpretq_s32_u32(x)));
}
TQKV__OP uint32x4_t tqkv__add_codes_neon(uint32x4_t x, uint32x4_t y) { return vaddq_u32(x, y); }
TQKV__OP uint32x4_t tqkv__set_codes_neon(int32_t x) { return vdupq_n_u32((uint32_t)x); }
TQKV__OP int32_t tqkv__sum_codes_neon(uint32x4_t x) { return vaddvq_s32(vreinterpretq_s32_u32(x)); }
TQKV__OP uint32_t tqkv__largest_code_neon(uint32x4_t x) { return vmaxvq_u32(x); }

#define TQKV__(name)        tqkv__##name##_neon
#define TQKV__I(name)       tqkv__i_##name##_neon
#define TQKV__INTEGER_LANES 4
#define TQKV__PRODUCTS      2
#define TQKV__CODE_OFFSET   0
#define TQKV__FEW_ROWS      4
#define TQKV__LANES_ROWS    8
#define TQKV__SUM_SIXTEENS  4
#include "loops.h"

/* -- NEON, with products of four bytes: DotProd. An integer is 256 high + low, both signed bytes. -- */

/* gcc inlines a function into another only if that has all features of its target. DotProd wants ARMv8.2 there, which
   all that come with one of the first four have. */
#ifdef __clang__
#define TQKV__TARGET __attribute__((target("dotprod")))
#elif defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC) || defined(__ARM_FEATURE_SVE) || \
    defined(__ARM_FEATURE_COMPLEX)
#define TQKV__ARM_BASE ""
#elif defined(__ARM_FEATURE_CRYPTO)
#define TQKV__ARM_BASE "arch=armv8.2-a+crypto"
#else
#define TQKV__ARM_BASE "arch=armv8.2-a"
#endif
#ifndef __clang__
#define TQKV__TARGET __attribute__((target(TQKV__ARM_BASE "+dotprod")))
#endif

typedef struct tqkv__i_bytes {
    uint32x4_t high, low;
} tqkv__i_sum_dotprod, tqkv__i_row_dotprod, tqkv__i_repeated_dotprod;
typedef uint32x4_t tqkv__i_lanes_dotprod;

/* sums + the products of each lane's four bytes. Compilers hide the intrinsic where the file is for an older target. */
TQKV__OP uint32x4_t tqkv__i_dot_bytes(uint32x4_t sums, uint32x4_t x, uint32x4_t y)
{
    __asm__("sdot\t%0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(x), "w"(y));
    return sums;
}
TQKV__OP tqkv__i_sum_dotprod tqkv__i_dot_lanes_dotprod(tqkv__i_sum_dotprod sums, uint32x4_t codes,
                                                       tqkv__i_row_dotprod row)
{
    sums.high = tqkv__i_dot_bytes(sums.high, codes, row.high);
    sums.low = tqkv__i_dot_bytes(sums.low, codes, row.low);
    return sums;
}
#define tqkv__i_dot_dotprod tqkv__i_dot_lanes_dotprod
TQKV__OP uint32x4_t tqkv__i_whole_lanes_dotprod(tqkv__i_sum_dotprod sums)
{
    return vaddq_u32(vshlq_n_u32(sums.high, 8), sums.low);
}
#define tqkv__i_whole_dotprod tqkv__i_whole_lanes_dotprod
/* The high bytes of n integers, then their low ones */
TQKV__OP void tqkv__i_store_integers_dotprod(void *to, int i, int n, uint32x4_t x)
{
    const int16x4_t words = vmovn_s32(vreinterpretq_s32_u32(x));
    const uint32x2_t bytes = vreinterpret_u32_s8(vmovn_s16(vcombine_s16(vrshr_n_s16(words, 8), words)));
    vst1_lane_u32((uint32_t *)(void *)((int8_t *)to + i), bytes, 0);
    vst1_lane_u32((uint32_t *)(void *)((int8_t *)to + n + i), bytes, 1);
}
TQKV__OP tqkv__i_row_dotprod tqkv__i_load_row_dotprod(const int8_t *p, int plane, int i)
{
    const tqkv__i_row_dotprod row = {vreinterpretq_u32_s8(vld1q_s8(p + i)),
                                     vreinterpretq_u32_s8(vld1q_s8(p + plane + i))};
    return row;
}
TQKV__OP tqkv__i_row_dotprod tqkv__i_repeat_dotprod(const int8_t *p, int plane, int i)
{
    const tqkv__i_row_dotprod row = {vld1q_dup_u32((const uint32_t *)(const void *)(p + i)),
                                     vld1q_dup_u32((const uint32_t *)(const void *)(p + plane + i))};
    return row;
}
#define tqkv__i_key_lanes_dotprod tqkv__i_transpose_neon
TQKV__OP void tqkv__i_value_lanes_dotprod(const uint32x4_t *units, uint32x4_t *x)
{
    const int8x16_t a = vreinterpretq_s8_u32(units[0]), b = vreinterpretq_s8_u32(units[1]),
                    c = vreinterpretq_s8_u32(units[2]), d = vreinterpretq_s8_u32(units[3]);
    const uint16x8_t ab = vreinterpretq_u16_s8(vzip1q_s8(a, b)), cd = vreinterpretq_u16_s8(vzip1q_s8(c, d));
    const uint16x8_t ab_high = vreinterpretq_u16_s8(vzip2q_s8(a, b)), cd_high = vreinterpretq_u16_s8(vzip2q_s8(c, d));
    x[0] = vreinterpretq_u32_u16(vzip1q_u16(ab, cd));
    x[1] = vreinterpretq_u32_u16(vzip2q_u16(ab, cd));
    x[2] = vreinterpretq_u32_u16(vzip1q_u16(ab_high, cd_high));
    x[3] = vreinterpretq_u32_u16(vzip2q_u16(ab_high, cd_high));
}

#define TQKV__(name)        tqkv__##name##_neon
#define TQKV__I(name)       tqkv__i_##name##_dotprod
#define TQKV__INTEGER_LANES 4
#define TQKV__PRODUCTS      4
#define TQKV__DECODED       1
#define TQKV__CODE_OFFSET   0
#define TQKV__FEW_ROWS      2
#define TQKV__LANES_ROWS    8
#define TQKV__SUM_SIXTEENS  2
#include "loops.h"

#if defined(__clang__) ? __clang_major__ >= 13 : __GNUC__ >= 10
#define TQKV__I8MM
/* -- NEON, with products of matrices of 2 by 8 bytes: I8MM. One is of two positions, or two dimensions of eight
   positions; the other is the high bytes of eight integers and their low ones, which lie side by side. Keys of few rows
   take DotProd. -- */

#ifdef __clang__
#define TQKV__TARGET __attribute__((target("dotprod,i8mm")))
#else
#define TQKV__TARGET __attribute__((target(TQKV__ARM_BASE "+dotprod+i8mm")))
#endif

typedef tqkv__i_sum_dotprod tqkv__i_sum_i8mm; /* of lanes: the first two, high and low in turns; the others */
typedef tqkv__i_row_dotprod tqkv__i_row_i8mm;
typedef uint32x4_t tqkv__i_repeated_i8mm;
typedef struct tqkv__i_lanes_i8mm {
    uint32x4_t first, last;
} tqkv__i_lanes_i8mm;

/* Returns sums + x times y transposed. */
TQKV__OP uint32x4_t tqkv__i_multiply_matrices(uint32x4_t sums, uint32x4_t x, uint32x4_t y)
{
    __asm__("smmla\t%0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(x), "w"(y));
    return sums;
}
TQKV__OP tqkv__i_sum_i8mm tqkv__i_dot_lanes_i8mm(tqkv__i_sum_i8mm sums, tqkv__i_lanes_i8mm x, uint32x4_t y)
{
    sums.high = tqkv__i_multiply_matrices(sums.high, x.first, y);
    sums.low = tqkv__i_multiply_matrices(sums.low, x.last, y);
    return sums;
}
TQKV__OP uint32x4_t tqkv__i_whole_lanes_i8mm(tqkv__i_sum_i8mm sums)
{
    return vaddq_u32(vshlq_n_u32(vuzp1q_u32(sums.high, sums.low), 8), vuzp2q_u32(sums.high, sums.low));
}
#define tqkv__i_store_integers_i8mm tqkv__i_store_integers_dotprod
#define tqkv__i_load_row_i8mm       tqkv__i_load_row_dotprod
#define tqkv__i_dot_i8mm            tqkv__i_dot_dotprod
#define tqkv__i_whole_i8mm          tqkv__i_whole_dotprod
TQKV__OP uint32x4_t tqkv__i_repeat_i8mm(const int8_t *p, int plane, int i)
{
    return vreinterpretq_u32_s8(vcombine_s8(vld1_s8(p + i), vld1_s8(p + plane + i)));
}
TQKV__OP void tqkv__i_key_lanes_i8mm(const uint32x4_t *units, tqkv__i_lanes_i8mm *x)
{
    uint64x2_t rows[4];
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) rows[i] = vreinterpretq_u64_u32(units[i]);
    x[0].first = vreinterpretq_u32_u64(vzip1q_u64(rows[0], rows[1]));
    x[0].last = vreinterpretq_u32_u64(vzip1q_u64(rows[2], rows[3]));
    x[1].first = vreinterpretq_u32_u64(vzip2q_u64(rows[0], rows[1]));
    x[1].last = vreinterpretq_u32_u64(vzip2q_u64(rows[2], rows[3]));
}
/* Each round makes the highest bit of a register's number the lowest of a byte's. */
TQKV__OP void tqkv__i_value_lanes_i8mm(const uint32x4_t *units, tqkv__i_lanes_i8mm *x)
{
    int8x16_t from[8], to[8];
    TQKV__UNROLL
    for (int i = 0; i < 8; i++) to[i] = vreinterpretq_s8_u32(units[i]);
    TQKV__UNROLL
    for (int round = 0; round < 3; round++) {
        TQKV__UNROLL
        for (int i = 0; i < 8; i++) from[i] = to[i];
        TQKV__UNROLL
        for (int i = 0; i < 8; i++)
            to[i] = i % 2 ? vzip2q_s8(from[i / 2], from[i / 2 + 4]) : vzip1q_s8(from[i / 2], from[i / 2 + 4]);
    }
    TQKV__UNROLL
    for (int v = 0; v < 4; v++) {
        x[v].first = vreinterpretq_u32_s8(to[2 * v]);
        x[v].last = vreinterpretq_u32_s8(to[2 * v + 1]);
    }
}

#define TQKV__(name)        tqkv__##name##_neon
#define TQKV__I(name)       tqkv__i_##name##_i8mm
#define TQKV__INTEGER_LANES 4
#define TQKV__PRODUCTS      8
#define TQKV__DECODED       1
#define TQKV__CODE_OFFSET   0
#define TQKV__FEW_ROWS      2
#define TQKV__LANES_ROWS    4
#define TQKV__SUM_SIXTEENS  2
#include "loops.h"
#endif
#endif

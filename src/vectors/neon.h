/* >>set-neon: part of every AArch64 */

#define TQKV__TARGET
typedef float32x4_t tqkv__vector_neon;
typedef uint32x4_t tqkv__codes_neon;

TQKV__OP float32x4_t tqkv__set1_neon(float x) { return vdupq_n_f32(x); }
TQKV__OP float32x4_t tqkv__fma_neon(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
TQKV__OP float32x4_t tqkv__max_neon(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
TQKV__OP float32x4_t tqkv__round_neon(float32x4_t x) { return vrndnq_f32(x); }
TQKV__OP float32x4_t tqkv__exp2_neon(float32x4_t n)
{
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
TQKV__OP float tqkv__largest_lane_neon(float32x4_t x) { return vmaxvq_f32(x); }
TQKV__OP float tqkv__sum_16_neon(const float32x4_t *x)
{
    const float32x4_t four = vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
TQKV__OP float32x4_t tqkv__zero_below_neon(float32x4_t least, float32x4_t x, float32x4_t value)
{
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, least)));
}
TQKV__OP float32x4_t tqkv__mul_nonzero_neon(float32x4_t a, float32x4_t b)
{
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(vmulq_f32(a, b)), vceqzq_f32(a)));
}
/* to[m] (+)= sum_16 of the vectors from 4 m on, m < 4 */
TQKV__OP void tqkv__add_sums_of_16_neon(const float32x4_t *x, bool add, float *to)
{
    float32x4_t fours[4], pairs[2];
    TQKV__UNROLL
    for (int m = 0; m < 4; m++)
        fours[m] = vaddq_f32(vaddq_f32(x[4 * m], x[4 * m + 2]), vaddq_f32(x[4 * m + 1], x[4 * m + 3]));
    TQKV__UNROLL
    for (int m = 0; m < 2; m++) {
        const float64x2_t a = vreinterpretq_f64_f32(fours[2 * m]), b = vreinterpretq_f64_f32(fours[2 * m + 1]);
        pairs[m] = vaddq_f32(vreinterpretq_f32_f64(vtrn1q_f64(a, b)), vreinterpretq_f32_f64(vtrn2q_f64(a, b)));
    }
    vst1q_f32(to, vaddq_f32(add ? vld1q_f32(to) : vdupq_n_f32(0.0f), vpaddq_f32(pairs[0], pairs[1])));
}
TQKV__OP float32x4_t tqkv__load_f16_neon(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }

TQKV__OP float32x4_t tqkv__rounded_neon(float32x4_t x)
{
    __asm__("" : "+w"(x));
    return x;
}
TQKV__OP float32x4_t tqkv__min_neon(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
TQKV__OP float32x4_t tqkv__flip_neon(float32x4_t x, const uint8_t *signs, int i)
{
    const int32_t shifts[4] = {31, 30, 29, 28};
    const uint32x4_t bits = vdupq_n_u32((uint32_t)signs[i / 8] >> (i % 8));
    const uint32x4_t moved = vandq_u32(vshlq_u32(bits, vld1q_s32(shifts)), vdupq_n_u32(0x80000000u));
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(x), moved));
}
/* A vector is no longer than a subrow: high is behind low. */
TQKV__OP float32x4_t tqkv__load_two_neon(const float *low, const float *high)
{
    (void)high;
    return vld1q_f32(low);
}
TQKV__OP void tqkv__store_two_neon(float *low, float *high, float32x4_t x)
{
    (void)high;
    vst1q_f32(low, x);
}
TQKV__OP uint32x4_t tqkv__widen_bytes_neon(const uint8_t *p)
{
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
TQKV__OP float32x4_t tqkv__butterfly_neon(const int stage, float32x4_t x)
{
    const float signs[2][4] = {{1.0f, -1.0f, 1.0f, -1.0f}, {1.0f, 1.0f, -1.0f, -1.0f}};
    return vfmaq_f32(stage == 0 ? vrev64q_f32(x) : vextq_f32(x, x, 2), x, vld1q_f32(signs[stage]));
}
TQKV__OP uint32x4_t tqkv__larger_bits_neon(uint32x4_t largest, float32x4_t x)
{
    return vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(x)));
}
TQKV__OP uint32x4_t tqkv__truncate_neon(float32x4_t x) { return vcvtq_u32_f32(x); }
TQKV__OP uint32x4_t tqkv__load_16_neon(const uint8_t *table) { return vreinterpretq_u32_u8(vld1q_u8(table)); }
TQKV__OP uint32x4_t tqkv__look_up_16_neon(uint32x4_t table, uint32x4_t index)
{
    return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), vreinterpretq_u8_u32(index)));
}
TQKV__OP float32x4_t tqkv__look_up_8_neon(const float32x4_t *table, uint32x4_t index)
{
    const uint8x16x2_t entries = {{vreinterpretq_u8_f32(table[0]), vreinterpretq_u8_f32(table[1])}};
    const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100u), index, 0x04040404u);
    return vreinterpretq_f32_u8(vqtbl2q_u8(entries, vreinterpretq_u8_u32(bytes)));
}
TQKV__OP float32x4_t tqkv__choose_neon(float32x4_t bound, float32x4_t w, float32x4_t below, float32x4_t above)
{
    return vbslq_f32(vcleq_f32(bound, w), above, below);
}
TQKV__OP void tqkv__load_cells_neon(const tqkv__cell *cells, const uint32_t *at, float32x4_t *x)
{
    float32x4_t four[4];
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) four[i] = vld1q_f32(&cells[at[i]].bound);
    const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(four[0], four[1]));
    const float64x2_t b = vreinterpretq_f64_f32(vtrn1q_f32(four[2], four[3]));
    const float64x2_t c = vreinterpretq_f64_f32(vtrn2q_f32(four[0], four[1]));
    const float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(four[2], four[3]));
    x[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, b));
    x[1] = vreinterpretq_f32_f64(vtrn1q_f64(c, d));
    x[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, b));
    x[3] = vreinterpretq_f32_f64(vtrn2q_f64(c, d));
}
TQKV__OP uint32x4_t tqkv__quantise_i8_neon(float32x4_t v)
{
    v = tqkv__max_neon(tqkv__min_neon(v, vdupq_n_f32(127.0f)), vdupq_n_f32(-127.0f));
    return vreinterpretq_u32_s32(vcvtnq_s32_f32(v));
}
TQKV__OP uint32x4_t tqkv__narrow_neon(const uint32x4_t *four)
{
    const uint16x8_t low = vcombine_u16(vmovn_u32(four[0]), vmovn_u32(four[1]));
    const uint16x8_t high = vcombine_u16(vmovn_u32(four[2]), vmovn_u32(four[3]));
    return vreinterpretq_u32_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
}
/* Stores the `bits` bits from bit `low` on of each byte, packed: 1, 2 or 4 bits. */
TQKV__OP void tqkv__pack_neon(const int bits, const int low, uint32x4_t codes, uint8_t *p)
{
    const int8_t shifts[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint8x16_t mask = vdupq_n_u8((uint8_t)((1 << bits) - 1));
    const uint8x16_t field = vandq_u8(vshlq_u8(vreinterpretq_u8_u32(codes), vdupq_n_s8((int8_t)-low)), mask);
    if (bits == 4) {
        vst1_u8(p, vget_low_u8(vsliq_n_u8(vuzp1q_u8(field, field), vuzp2q_u8(field, field), 4)));
        return;
    }
    if (bits == 1) {
        p[0] = vaddv_u8(vshl_u8(vget_low_u8(field), vld1_s8(shifts)));
        p[1] = vaddv_u8(vshl_u8(vget_high_u8(field), vld1_s8(shifts)));
        return;
    }
    const uint16x8_t words = vreinterpretq_u16_u8(field);
    const uint32x4_t pairs = vreinterpretq_u32_u16(vandq_u16(vorrq_u16(words, vshrq_n_u16(words, 6)), vdupq_n_u16(15)));
    const uint16x4_t fours = vmovn_u32(vorrq_u32(pairs, vshrq_n_u32(pairs, 12)));
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(fours, fours))), 0);
    memcpy(p, &bytes, sizeof bytes);
}
TQKV__OP void tqkv__store_half_neon(uint8_t *p, float32x4_t x) { vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32(x))); }
TQKV__OP void tqkv__store_words_neon(uint8_t *p, uint32x4_t words)
{
    vst1_u8(p, vreinterpret_u8_u16(vmovn_u32(words)));
}
#define TQKV__(name) tqkv__##name##_neon
#define TQKV__ENCODES
#define TQKV__WIDTH 16 /* vectors of the rotation in registers */
#define TQKV__LANES 4
#include "loops.h"

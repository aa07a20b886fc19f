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
TQKV__OP __m512 tqkv__load_f16_avx512(const uint8_t *p) { return _mm512_cvtph_ps(tqkv__load_256_avx512(p)); }
TQKV__OP __m512 tqkv__load_bf16_avx512(const uint8_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(tqkv__load_256_avx512(p)), 16));
}

/* Encoding. An empty asm prevents the fusion of a product with a following sum, as in tqkv__rounded. */
TQKV__OP __m512 tqkv__rounded_avx512(__m512 x)
{
    __asm__("" : "+v"(x));
    return x;
}
TQKV__OP __m512 tqkv__min_avx512(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
TQKV__OP __m512 tqkv__sqrt_avx512(__m512 x) { return _mm512_sqrt_ps(x); }
/* Returns x > least ? 1/x : 0. */
TQKV__OP __m512 tqkv__invert_above_avx512(float least, __m512 x)
{
    return _mm512_maskz_div_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GT_OQ), _mm512_set1_ps(1.0f), x);
}
/* Applies the table's signs of elements d to d + LANES - 1 to x. */
TQKV__OP __m512 tqkv__flip_avx512(__m512 x, int d)
{
    uint16_t signs;
    memcpy(&signs, tqkv__tables.signs + d % 512 / 8, sizeof signs);
    return _mm512_mask_xor_ps(x, signs, x, _mm512_set1_ps(-0.0f));
}
/* Returns -1 for bits of 1, else 1; lane i has bit i. */
TQKV__OP __m512 tqkv__signs_avx512(uint32_t bits)
{
    return _mm512_mask_blend_ps((__mmask16)bits, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
}
/* See >>set-avx2. Subrows that do not fill a vector of 16 are rotated there: n is 1. */
TQKV__OP __m512 tqkv__repeat_avx512(const int n, const float *p)
{
    (void)n;
    return _mm512_set1_ps(*p);
}
TQKV__OP __m512 tqkv__spread_avx512(const int n, int i, __m512 x)
{
    (void)n, (void)i;
    return x;
}
TQKV__OP __m512 tqkv__unite_avx512(const int n, __m512 x)
{
    (void)n;
    return x;
}
TQKV__OP void tqkv__mix_20_avx512(const float *subrows, float factor, float *out)
{
    (void)subrows, (void)factor, (void)out;
}
/* Loads four floats at p, p + stride and so on. */
TQKV__OP __m512 tqkv__load_fours_avx512(const float *p, int stride)
{
    __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(p));
    x = _mm512_insertf32x4(x, _mm_loadu_ps(p + stride), 1);
    x = _mm512_insertf32x4(x, _mm_loadu_ps(p + 2 * stride), 2);
    return _mm512_insertf32x4(x, _mm_loadu_ps(p + 3 * stride), 3);
}
/* Widens bytes to words. */
TQKV__OP __m512 tqkv__widen_bytes_avx512(const uint8_t *p)
{
    return _mm512_castsi512_ps(_mm512_cvtepu8_epi32(tqkv__load_128(p)));
}
/* Lane i of the result is lane i ^ distance of x; distance is a constant. */
TQKV__OP __m512 tqkv__swap_avx512(const int distance, __m512 x)
{
    if (distance == 1) return _mm512_permute_ps(x, 0xb1);
    if (distance == 2) return _mm512_permute_ps(x, 0x4e);
    if (distance == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
    return _mm512_shuffle_f32x4(x, x, 0x4e);
}
/* Lanes i and i ^ 2^stage become their sum and difference. The product with 1 or -1 is exact. */
TQKV__OP __m512 tqkv__butterfly_avx512(const int stage, __m512 x)
{
    const __mmask16 upper[4] = {0xaaaa, 0xcccc, 0xf0f0, 0xff00};
    const __m512 sign = _mm512_mask_blend_ps(upper[stage], _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
    return _mm512_fmadd_ps(x, sign, tqkv__swap_avx512(1 << stage, x));
}
/* Both pick lanes. even: lanes of a and b with bit `stage` clear, those of b moved up by 2^stage. odd: the others, a's
   moved down. */
TQKV__OP __m512 tqkv__even_avx512(const int stage, __m512 a, __m512 b)
{
    if (stage == 0) return _mm512_mask_moveldup_ps(a, 0xaaaa, b);
    if (stage == 1) return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    if (stage == 2) return _mm512_mask_shuffle_f32x4(a, 0xf0f0, b, b, 0xa0);
    return _mm512_shuffle_f32x4(a, b, 0x44);
}
TQKV__OP __m512 tqkv__odd_avx512(const int stage, __m512 a, __m512 b)
{
    if (stage == 0) return _mm512_mask_movehdup_ps(b, 0x5555, a);
    if (stage == 1) return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    if (stage == 2) return _mm512_mask_shuffle_f32x4(b, 0x0f0f, a, a, 0xf5);
    return _mm512_shuffle_f32x4(a, b, 0xee);
}
TQKV__OP __m512i tqkv__larger_bits_avx512(__m512i largest, __m512 x)
{
    return _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(x)));
}

/* Returns the magnitude of v; for positive v the next float below: "boundary <= result" then counts ties down on both
   sides. NaN becomes -TQKV__FAR, its magnitude TQKV__FAR. With half = 2^(bits-1) and c boundaries passed, the code is
   half + c on the positive side and half - 1 - c on the negative: c ^ side. */
TQKV__OP __m512 tqkv__fold_avx512(const int half, __m512 v, __m512i *side)
{
    v = _mm512_max_ps(v, _mm512_set1_ps(-TQKV__FAR));
    const __mmask16 positive = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512i size = _mm512_castps_si512(_mm512_abs_ps(v));
    *side = _mm512_mask_blend_epi32(positive, _mm512_set1_epi32(half - 1), _mm512_set1_epi32(half));
    return _mm512_castsi512_ps(_mm512_mask_sub_epi32(size, positive, size, _mm512_set1_epi32(1)));
}
TQKV__OP __m512i tqkv__truncate_avx512(__m512 x) { return _mm512_cvttps_epi32(x); }
TQKV__OP void tqkv__load_below_avx512(const int bits, const uint8_t *table, __m512i *below)
{
    (void)bits; /* 64 entries are one register */
    below[0] = _mm512_loadu_si512((const void *)table);
}
/* Looks up bytes: the upper three of each lane are 0 and find the table's first entry, which is 0. */
TQKV__OP __m512i tqkv__below_avx512(const int bits, const __m512i *below, __m512i cells)
{
    (void)bits;
    return _mm512_permutexvar_epi8(cells, below[0]);
}
TQKV__OP __m512 tqkv__bound_avx512(const int bits, const __m512 *bounds, __m512i index)
{
    return bits < 6 ? _mm512_permutexvar_ps(index, bounds[0]) : _mm512_permutex2var_ps(bounds[0], index, bounds[1]);
}
/* Returns the code, from the count before the cell and the one boundary that may lie in it */
TQKV__OP __m512i tqkv__code_from_avx512(__m512i count, __m512 bound, __m512 w, __m512i side)
{
    const __mmask16 above = _mm512_cmp_ps_mask(bound, w, _CMP_LE_OQ);
    return _mm512_xor_si512(_mm512_mask_sub_epi32(count, above, count, _mm512_set1_epi32(-1)), side);
}
/* Returns above where bound <= w, else below. */
TQKV__OP __m512 tqkv__choose_avx512(__m512 bound, __m512 w, __m512 below, __m512 above)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(bound, w, _CMP_LE_OQ), below, above);
}
TQKV__OP void tqkv__load_entries_avx512(const float (*entries)[2], const uint32_t *cells, __m512 *x)
{
    (void)entries, (void)cells; /* search_tq8 takes their place */
    memset(x, 0, 3 * sizeof *x);
}
TQKV__OP __m512i tqkv__quantise_i8_avx512(__m512 v)
{
    v = _mm512_min_ps(v, _mm512_set1_ps(127.0f)); /* gives the second operand if either is NaN */
    v = _mm512_max_ps(v, _mm512_set1_ps(-127.0f));
    return _mm512_and_si512(_mm512_cvtps_epi32(v), _mm512_set1_epi32(255));
}
/* Joins four vectors of codes below 256 into one vector of bytes. */
TQKV__OP __m512i tqkv__narrow_avx512(const __m512i *four)
{
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i mixed =
        _mm512_packus_epi16(_mm512_packus_epi32(four[0], four[1]), _mm512_packus_epi32(four[2], four[3]));
    return _mm512_permutexvar_epi32(order, mixed);
}
/* Stores the `bits` bits from bit `low` on of each byte, packed: 1, 2 or 4 bits. */
TQKV__OP void tqkv__pack_avx512(const int bits, const int low, __m512i codes, uint8_t *p)
{
    if (bits == 1) {
        const __mmask64 set = _mm512_test_epi8_mask(codes, _mm512_set1_epi8((char)(1 << low)));
        memcpy(p, &set, sizeof set);
        return;
    }
    const __m512i field =
        _mm512_and_si512(_mm512_srl_epi16(codes, _mm_cvtsi32_si128(low)), _mm512_set1_epi8((char)((1 << bits) - 1)));
    if (bits == 4) {
        const __m512i joined = _mm512_maddubs_epi16(field, _mm512_set1_epi16(0x1001)); /* first + 16 * second */
        _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi16_epi8(joined));
        return;
    }
    const __m512i pairs = _mm512_maddubs_epi16(field, _mm512_set1_epi16(0x0401));
    const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00100001));
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(fours));
}
/* Stores rounded halves; beyond the largest infinity. store_f16 clamps instead. */
TQKV__OP void tqkv__store_half_avx512(uint8_t *p, __m512 x)
{
    const __m256i halves = /* without a mask GCC's macro gives a warning */
        _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256((__m256i *)(void *)p, halves);
}
TQKV__OP void tqkv__store_f16_avx512(uint8_t *p, __m512 x)
{
    tqkv__store_half_avx512(p, _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(65504.0f)), _mm512_set1_ps(-65504.0f)));
}
/* Stores the lower halves of 32-bit words, whose upper halves are 0. */
TQKV__OP void tqkv__store_words_avx512(uint8_t *p, __m512i words)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(words));
}

/* Joins byte p of words, in plane[p], to the words themselves. */
TQKV__OP void tqkv__join_planes_avx512(const __m512i *plane, __m512i *words)
{
    const __m512i low01 = _mm512_unpacklo_epi8(plane[0], plane[1]), high01 = _mm512_unpackhi_epi8(plane[0], plane[1]);
    const __m512i low23 = _mm512_unpacklo_epi8(plane[2], plane[3]), high23 = _mm512_unpackhi_epi8(plane[2], plane[3]);
    words[0] = _mm512_unpacklo_epi16(low01, low23);
    words[1] = _mm512_unpackhi_epi16(low01, low23);
    words[2] = _mm512_unpacklo_epi16(high01, high23);
    words[3] = _mm512_unpackhi_epi16(high01, high23);
}

/* Looks up n centroids of TQ8, 64 at a time: those of the lower half, for a code c of the upper half that of ~c with its
   sign flipped. n: a multiple of 16 */
TQKV__OP void tqkv__decode_tq8_avx512(const tqkv__stream *s, const uint8_t *codes, int n, float *to)
{
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    for (int d = 0; d < n; d += 64) {
        const __mmask16 mask = (__mmask16)(0xffff >> (n - d < 64 ? 16 - (n - d) / 4 : 0));
        __m512i index = _mm512_permutexvar_epi32(order, _mm512_maskz_loadu_epi32(mask, (const void *)(codes + d)));
        __m512i plane[4], words[4];
        const __mmask64 upper = _mm512_movepi8_mask(index);
        index = _mm512_mask_sub_epi8(index, upper, _mm512_set1_epi8(-1), index);
        TQKV__UNROLL
        for (int p = 0; p < 4; p++)
            plane[p] = _mm512_permutex2var_epi8(_mm512_loadu_si512((const void *)s->planes[p]), index,
                                                _mm512_loadu_si512((const void *)(s->planes[p] + 64)));
        plane[3] = _mm512_mask_add_epi8(plane[3], upper, plane[3], _mm512_set1_epi8(-128));
        tqkv__join_planes_avx512(plane, words);
        TQKV__UNROLL
        for (int i = 0; i < 4; i++)
            if (d + 16 * i < n) _mm512_storeu_si512((void *)(to + d + 16 * i), words[i]);
    }
}

/* Quantises 64 values at a time. One byte look-up finds the count before the cell, four find the bytes of the
   boundary in it. Packing and interleaving are inverse within 128 bits: boundaries meet their values. `order` sorts
   the counts. */
TQKV__TARGET static void tqkv__quantise_tq8_avx512(const tqkv__quantiser *q, const float *y, int n, float scale,
                                                   uint8_t *codes)
{
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512 slope = _mm512_set1_ps(q->slope), top = _mm512_set1_ps(q->top);
    __m512i below[4], plane[4], unused;
    for (int i = 0; i < 4; i++) below[i] = _mm512_loadu_si512((const void *)(q->below + 64 * i));
    for (int d = 0; d < n; d += 64, y += 64) {
        __m512 w[4];
        __m512i cell[4], bound[4];
        __mmask64 positive = 0, above = 0;
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) {
            const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(y + 16 * i), _mm512_set1_ps(scale));
            w[i] = tqkv__fold_avx512(128, v, &unused);
            cell[i] = _mm512_cvttps_epi32(_mm512_min_ps(_mm512_mul_ps(w[i], slope), top));
            positive |= (__mmask64)_mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_GT_OQ) << (16 * i);
        }
        const __m512i cells =
            _mm512_packus_epi16(_mm512_packus_epi32(cell[0], cell[1]), _mm512_packus_epi32(cell[2], cell[3]));
        const __m512i count =
            _mm512_mask_blend_epi8(_mm512_movepi8_mask(cells), _mm512_permutex2var_epi8(below[0], cells, below[1]),
                                   _mm512_permutex2var_epi8(below[2], cells, below[3]));
        TQKV__UNROLL
        for (int p = 0; p < 4; p++)
            plane[p] = _mm512_permutex2var_epi8(_mm512_loadu_si512((const void *)q->planes[p]), count,
                                                _mm512_loadu_si512((const void *)(q->planes[p] + 64)));
        tqkv__join_planes_avx512(plane, bound);
        TQKV__UNROLL
        for (int i = 0; i < 4; i++)
            above |= (__mmask64)_mm512_cmp_ps_mask(_mm512_castsi512_ps(bound[i]), w[i], _CMP_LE_OQ) << (16 * i);
        __m512i code = _mm512_permutexvar_epi32(order, count);
        code = _mm512_mask_sub_epi8(code, above, code, _mm512_set1_epi8(-1));
        code = _mm512_xor_si512(code, _mm512_mask_blend_epi8(positive, _mm512_set1_epi8(127), _mm512_set1_epi8(-128)));
        _mm512_storeu_si512((void *)(codes + d), code);
    }
}

/* Looks bytes up in a table of 128. upper: those of which the index is 64 or more */
TQKV__OP __m512i tqkv__look_up_byte_avx512(const uint8_t *table, __mmask64 upper, __m512i index)
{
    const __m512i first = _mm512_permutexvar_epi8(index, _mm512_loadu_si512((const void *)table));
    return _mm512_mask_permutexvar_epi8(first, upper, index, _mm512_loadu_si512((const void *)(table + 64)));
}
/* Looks words up in a table of 128, in planes of bytes, in the order in which packing has them. */
TQKV__OP void tqkv__look_up_words_avx512(const uint8_t (*planes)[128], __m512i index, __m512i *words)
{
    const __mmask64 upper = _mm512_movepi8_mask(_mm512_slli_epi16(index, 1));
    __m512i plane[4];
    TQKV__UNROLL
    for (int p = 0; p < 4; p++) plane[p] = tqkv__look_up_byte_avx512(planes[p], upper, index);
    tqkv__join_planes_avx512(plane, words);
}
/* Finds where the centroids of 64 sizes times a factor, w, of a search of TQ8 are: counts and bounds by bytes, as in
   quantise_tq8. Bounds are compared as integers, whose signs packing keeps. */
TQKV__OP void tqkv__search_tq8_avx512(const tqkv__quantiser *q, const __m512i *cell, const __m512 *w, uint8_t *codes)
{
    __m512i words[4];
    const __m512i cells =
        _mm512_packus_epi16(_mm512_packus_epi32(cell[0], cell[1]), _mm512_packus_epi32(cell[2], cell[3]));
    const __mmask64 odd = _mm512_movepi8_mask(_mm512_slli_epi16(cells, 1)), upper = _mm512_movepi8_mask(cells);
    __m512i count = _mm512_mask_blend_epi8(upper, tqkv__look_up_byte_avx512(q->below, odd, cells),
                                           tqkv__look_up_byte_avx512(q->below + 128, odd, cells));
    tqkv__look_up_words_avx512(q->planes, count, words);
    TQKV__UNROLL
    for (int i = 0; i < 4; i++)
        words[i] = _mm512_sub_epi32(_mm512_castps_si512(w[i]), words[i]); /* negative: below the bound */
    const __m512i differences =
        _mm512_packs_epi16(_mm512_packs_epi32(words[0], words[1]), _mm512_packs_epi32(words[2], words[3]));
    count = _mm512_sub_epi8(_mm512_set1_epi8(126), count); /* of the next larger centroid */
    count = _mm512_mask_sub_epi8(count, _mm512_movepi8_mask(differences), count, _mm512_set1_epi8(-1));
    _mm512_storeu_si512((void *)codes, count);
}
/* Looks up the centroids, all negative, of 64 such codes: the stream has their bytes from the most negative one on. */
TQKV__OP void tqkv__centroids_tq8_avx512(const tqkv__stream *s, const uint8_t *codes, uint32_t *centroids)
{
    __m512i words[4];
    tqkv__look_up_words_avx512(s->planes, _mm512_loadu_si512((const void *)codes), words);
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) _mm512_storeu_si512((void *)(centroids + 16 * i), words[i]);
}

static void tqkv__mix_by_order_avx2(int m, const float *subrows, float factor, int n, float *out);

#define TQKV__(name)            tqkv__##name##_avx512
#define TQKV__WIDTH             16 /* vectors of the rotation in registers */
#define TQKV__ISA_NAME          "avx512"
#define TQKV__MIX_SHORT_SUBROWS tqkv__mix_by_order_avx2
#define TQKV__LANES             16
#include "loops.h"

#endif /* TQKV__AVX512 */

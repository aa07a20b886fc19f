/* >>set-avx512: with the byte permutes of VBMI. A function has the same name in all sets, except for the suffix. */

#ifdef TQKV__AVX512

#define TQKV__TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")))
typedef __m512 tqkv__vector_avx512;
typedef __m512i tqkv__codes_avx512;

TQKV__OP __m512 tqkv__set1_avx512(float x) { return _mm512_set1_ps(x); }
TQKV__OP __m512 tqkv__fma_avx512(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
/* Returns a > b ? a : b; gives b if either is NaN, in every set */
TQKV__OP __m512 tqkv__max_avx512(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored \
    "-Wsign-conversion" /* without optimisation GCC's intrinsic is a macro with a cast of -1 */
TQKV__OP __m512 tqkv__round_avx512(__m512 x) { return _mm512_roundscale_ps(x, 8); }
#pragma GCC diagnostic pop
TQKV__OP __m512 tqkv__exp2_avx512(__m512 n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n); }
TQKV__OP float tqkv__largest_lane_avx512(__m512 x) { return _mm512_reduce_max_ps(x); }
TQKV__OP float tqkv__sum_16_avx512(const __m512 *x)
{
    const __m256 halves[2] = {_mm512_castps512_ps256(*x), _mm512_extractf32x8_ps(*x, 1)};
    return tqkv__sum_16_avx2(halves);
}

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

TQKV__OP __m512 tqkv__load_f16_avx512(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

TQKV__OP __m512i tqkv__larger_bits_avx512(__m512i largest, __m512 x)
{
    return _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(x)));
}

/* -- Rows are encoded by the narrower set, but for the search of up to 6 bits, whose tables fit registers here. -- */

TQKV__OP __m512 tqkv__rounded_avx512(__m512 x)
{
    __asm__("" : "+v"(x));
    return x;
}

/* The tables of a codebook: positive boundaries, then infinity, the centroids above 0, and what >>k-search says of
   cells */
typedef struct tqkv__book_avx512 {
    __m512 bounds[2], centroids[2], top;
    __m512i n_below;
    float slope;
} tqkv__book_avx512;

/* large is a constant: a table of 32, not 16 */
TQKV__OP __m512 tqkv__look_up_in_avx512(const bool large, const __m512 *table, __m512i index)
{
    return large ? _mm512_permutex2var_ps(table[0], index, table[1]) : _mm512_permutexvar_ps(index, table[0]);
}

/* Returns how many positive boundaries are below each size times a factor or, of negative values, at it. */
TQKV__OP __m512i tqkv__count_avx512(const bool large, const tqkv__book_avx512 *book, const float *sizes,
                                    const int32_t *less, float factor)
{
    const __m512 size = _mm512_loadu_ps(sizes);
    const __m512i w = _mm512_add_epi32(_mm512_castps_si512(size * _mm512_set1_ps(factor)), _mm512_loadu_si512(less));
    const __m512 cell = _mm512_min_ps(size * _mm512_set1_ps(factor * book->slope), book->top);
    const __m512i count = _mm512_permutexvar_epi8(_mm512_cvttps_epi32(cell), book->n_below);
    const __m512 bound = tqkv__look_up_in_avx512(large, book->bounds, count);
    const __mmask16 above = _mm512_cmp_ps_mask(bound, _mm512_castsi512_ps(w), _CMP_LE_OQ);
    return _mm512_mask_sub_epi32(count, above, count, _mm512_set1_epi32(-1));
}

/* Does what >>k-search does for n values of one norm, and finds their codes. sizes, less: as TQKV__(sizes) has them */
TQKV__OP void tqkv__search_avx512(const bool large, const tqkv__stream *s, const tqkv__book_avx512 *book,
                                  const float *sizes, const int32_t *less, int n, float *factor, float *square,
                                  uint8_t *codes)
{
    const __m512i half = _mm512_set1_epi32((1 << (s->book_bits - 1)) - 1);
    float best = 0.0f;
    for (int f = 0; f < TQKV__MOST_FACTORS; f++) {
        __m512 products = _mm512_setzero_ps(), squares = products;
        for (int d = 0; d < n; d += 16) {
            const __m512i count = tqkv__count_avx512(large, book, sizes + d, less + d, s->factors[f]);
            const __m512 c = tqkv__look_up_in_avx512(large, book->centroids, count);
            products += tqkv__rounded_avx512(_mm512_loadu_ps(sizes + d) * c);
            squares += tqkv__rounded_avx512(c * c);
        }
        const float u = tqkv__sum_16_avx512(&products), c = tqkv__sum_16_avx512(&squares);
        const float share = TQKV__AS_FLOAT(tqkv__rounded(u * u) / tqkv__rounded(c)); /* hidden: see >>k-search */
        if (f > 0 && !(share > best)) continue;
        best = share;
        *square = c;
        *factor = s->factors[f];
    }
    for (int d = 0; d < n; d += 16) {
        const __m512i count = tqkv__count_avx512(large, book, sizes + d, less + d, *factor);
        const __m512i side = _mm512_sub_epi32(half, _mm512_loadu_si512(less + d));
        _mm_storeu_si128((__m128i *)(void *)(codes + d), _mm512_cvtepi32_epi8(_mm512_xor_si512(count, side)));
    }
}

TQKV__TARGET static void tqkv__code_row_avx512(const tqkv__stream *s, const tqkv__quantiser *q, const float *y,
                                               float *scales, float *squares, uint8_t *codes)
{
    TQKV__ALIGNED float sizes[TQKV_MAX_HEAD_DIM];
    TQKV__ALIGNED int32_t less[TQKV_MAX_HEAD_DIM];
    tqkv__book_avx512 book;
    for (int i = 0; i < 2; i++) {
        book.bounds[i] = _mm512_loadu_ps(q->bounds + 16 * i);
        book.centroids[i] = _mm512_loadu_ps(q->centroids + 16 * i);
    }
    book.n_below = _mm512_loadu_si512(q->n_below);
    book.top = _mm512_set1_ps(q->top);
    book.slope = q->slope;
    for (int d = 0; d < s->head_dim; d += 16) {
        const __m512 v = _mm512_loadu_ps(y + d) * _mm512_set1_ps(scales[d / s->norm_dim]), zero = _mm512_setzero_ps();
        _mm512_storeu_ps(sizes + d, _mm512_abs_ps(_mm512_max_ps(v, _mm512_set1_ps(-INFINITY)))); /* NaN: infinity */
        _mm512_storeu_si512(less + d, _mm512_movm_epi32(_mm512_cmp_ps_mask(v, zero, _CMP_GT_OQ)));
    }
    for (int b = 0, d = 0; b < s->norms_per_row; b++, d += s->norm_dim) {
        if (s->book_bits < 6)
            tqkv__search_avx512(false, s, &book, sizes + d, less + d, s->norm_dim, &scales[b], &squares[b], codes + d);
        else
            tqkv__search_avx512(true, s, &book, sizes + d, less + d, s->norm_dim, &scales[b], &squares[b], codes + d);
    }
}

static void tqkv__encode_rows_avx512(const tqkv__stream *s, const tqkv__quantiser *q, const tqkv__row *rows, int n_rows)
{
    const bool wide = s->n_factors > 1 && s->book_bits <= 6;
    tqkv__encode_rows_by_avx2(wide ? tqkv__code_row_avx512 : tqkv__code_row_avx2, s, q, rows, n_rows);
}

static const tqkv__codec tqkv__codec_avx512 = {tqkv__rows_finite_avx2, tqkv__largest_of_avx2,   tqkv__invert_avx2,
                                               tqkv__widen_avx2,       tqkv__narrow_row_avx2,   tqkv__rotate_avx2,
                                               tqkv__unrotate_avx2,    tqkv__encode_rows_avx512};

#define TQKV__(name) tqkv__##name##_avx512
#define TQKV__LANES  16
#include "loops.h"

#endif /* TQKV__AVX512 */

/* An independent implementation of the codec and of attention, written for clarity. The codec uses exact float steps.
 * Attention uses double, in the original basis. */
#ifndef TQKV_TESTS_REFERENCE_H
#define TQKV_TESTS_REFERENCE_H

#include "runner.h"

#include <math.h>

enum { REFERENCE_MAX_DIM = 1024, REFERENCE_RUNS = 36 };

/* ---- Formats ---- */

static inline int reference_bits(tqkv_format format)
{
    return format == TQKV_TQ2                               ? 2
           : format == TQKV_TQ3                             ? 3
           : format == TQKV_TQ4                             ? 4
           : format == TQKV_TQ5 || format == TQKV_TQ5_BYTES ? 5
           : format == TQKV_TQ6 || format == TQKV_TQ6_BYTES ? 6
                                                            : 8;
}

static inline bool reference_is_codebook(tqkv_format format) { return format != TQKV_F16 && format != TQKV_I8; }

/* May a store of this format omit the rotation? */
static inline bool reference_can_be_unrotated(tqkv_format format)
{
    return reference_is_codebook(format) && reference_bits(format) > 4;
}

static inline bool reference_is_rotated(const tqkv_store *store)
{
    return store->format == TQKV_F16 ? store->rotation == TQKV_ROTATION_ON : store->rotation != TQKV_ROTATION_OFF;
}

/* Does a code take a byte? */
static inline bool reference_in_bytes(tqkv_format format)
{
    return format == TQKV_TQ5_BYTES || format == TQKV_TQ6_BYTES || reference_bits(format) == 8;
}

static inline size_t reference_row_bytes(tqkv_format format, int head_dim)
{
    const size_t d = (size_t)head_dim;
    if (format == TQKV_F16) return 2 * d;
    return reference_in_bytes(format) ? d : d * (size_t)reference_bits(format) / 8;
}

static inline int reference_block(tqkv_format format, int head_dim)
{
    int block = 128;
    if (format != TQKV_I8) return head_dim == 512 || head_dim == 1024 ? 256 : head_dim;
    while (head_dim % block) block -= 16;
    return block;
}

/* Does a row of a codebook format have one norm? */
static inline bool reference_has_one_norm(int head_dim) { return reference_block(TQKV_TQ4, head_dim) == head_dim; }

static inline int reference_norms_per_row(tqkv_format format, int head_dim)
{
    return format == TQKV_F16 ? 0 : head_dim / reference_block(format, head_dim);
}

/* ---- Exact float steps: volatile stops the compiler from contracting them or keeping more bits ---- */

static inline float reference_multiply(float a, float b)
{
    volatile float result = a * b;
    return result;
}

static inline float reference_add(float a, float b)
{
    volatile float result = a + b;
    return result;
}

static inline float reference_divide(float a, float b)
{
    volatile float result = a / b;
    return result;
}

static inline float reference_root(float a)
{
    volatile float result = sqrtf(a);
    return result;
}

static inline bool reference_is_negative(int index, int head_dim)
{
    const uint8_t *signs = test_signs();
    int j = head_dim <= 256 ? index : index % 512;
    return (signs[j / 8] >> (j % 8) & 1) != 0;
}

/* The odd part of head_dim = m * n decides m; n is a power of two. */
static inline int reference_runs(int head_dim)
{
    int odd = head_dim;
    while (odd % 2 == 0) odd /= 2;
    return odd == 1 ? 1 : 4 * odd;
}

static inline bool reference_matrix_is_negative(int m, int row, int column)
{
    return (test_hadamard(m)[row * ((m + 7) / 8) + column / 8] >> (column % 8) & 1) != 0;
}

/* out[b] = sum of P[b][c] * x[c] over the m runs c of n values, for each place in a run. row: [m][n] */
static inline void reference_mix_runs(float *row, int m, int n)
{
    float runs[REFERENCE_RUNS];
    for (int place = 0; place < n; place++) {
        for (int c = 0; c < m; c++) runs[c] = row[c * n + place];
        for (int b = 0; b < m; b++) {
            float sum = reference_matrix_is_negative(m, b, 0) ? -runs[0] : runs[0];
            for (int c = 1; c < m; c++)
                sum = reference_add(sum, reference_matrix_is_negative(m, b, c) ? -runs[c] : runs[c]);
            row[b * n + place] = sum;
        }
    }
}

/* y = R(s * x) / sqrt(D). row: [head_dim] */
static inline void reference_rotate_row(float *row, int head_dim)
{
    const int m = reference_runs(head_dim), n = head_dim / m;
    for (int i = 0; i < head_dim; i++)
        if (reference_is_negative(i, head_dim)) row[i] = -row[i];
    for (int h = 1; h < n; h *= 2) {
        for (int i = 0; i < head_dim; i++) {
            if (i & h) continue;
            float a = row[i], b = row[i + h];
            row[i] = reference_add(a, b);
            row[i + h] = reference_add(a, -b);
        }
    }
    if (m > 1) reference_mix_runs(row, m, n);
    for (int i = 0; i < head_dim; i++) row[i] = reference_multiply(row[i], (float)(1.0 / sqrt((double)head_dim)));
}

/* Sum of the products of n values: number d belongs to sum d mod 16, and the sums are added by halves. x, y: [n] */
static inline float reference_sum_of_products(const float *x, const float *y, int n)
{
    float sums[16] = {0};
    for (int k = 0; k < 16; k++)
        for (int d = k; d < n; d += 16) sums[k] = reference_add(sums[k], reference_multiply(x[d], y[d]));
    for (int half = 8; half >= 1; half /= 2)
        for (int k = 0; k < half; k++) sums[k] = reference_add(sums[k], sums[k + half]);
    return sums[0];
}

/* The scaled value where a format saturates. */
static inline float reference_last_boundary(tqkv_format format)
{
    const int bits = reference_bits(format);
    if (format == TQKV_F16 || format == TQKV_I8) return format == TQKV_F16 ? 65504.0f : 127.5f;
    return test_boundaries(bits)[(1 << bits) - 2];
}

static inline int reference_code(int bits, float scaled)
{
    const float *boundaries = test_boundaries(bits);
    int code = 0;
    for (int half = 1 << (bits - 1); half; half /= 2)
        if (boundaries[code + half - 1] < scaled) code += half;
    return code;
}

/* What encoding tries on the scale of a row, in order; *n: their number */
static inline const float *reference_factors(int bits, int *n)
{
    static const float factors[6][5] = {{1.0f},
                                        {1.0f, 0.92f, 1.08f, 0.82f, 1.18f},
                                        {1.0f, 0.88f, 1.06f, 1.14f, 1.24f},
                                        {1.0f, 0.9f, 1.1f, 1.18f, 1.24f},
                                        {0.95f, 1.05f, 1.1f, 1.15f, 1.2f},
                                        {1.125f, 1.45f, 1.475f, 1.5f, 1.525f}};
    *n = bits == 2 ? 1 : 5;
    return factors[bits == 8 ? 5 : bits - 2];
}

static inline double reference_half_value(uint16_t half)
{
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    double size = exponent == 31  ? (mantissa ? (double)NAN : (double)INFINITY)
                  : exponent == 0 ? ldexp(mantissa, -24)
                                  : ldexp(1024 + mantissa, exponent - 25);
    return half & 0x8000 ? -size : size;
}

/* ---- Types of rows ---- */

static inline double reference_wide(tqkv_type type, uint16_t bits)
{
    const uint32_t word = (uint32_t)(bits & 0x7fff) << 16;
    float magnitude;
    if (type == TQKV_TYPE_F16) return reference_half_value(bits);
    memcpy(&magnitude, &word, sizeof magnitude);
    return bits & 0x8000 ? -(double)magnitude : (double)magnitude;
}

/* The nearest half or bfloat16; of two equally near ones the even one. As a neighbour infinity counts as the next power
 * of two. */
static inline uint16_t reference_narrow(tqkv_type type, float value)
{
    const int bits = type == TQKV_TYPE_F16 ? 10 : 7, least = type == TQKV_TYPE_F16 ? -14 : -126;
    const int infinity = type == TQKV_TYPE_F16 ? 0x7c00 : 0x7f80, sign = signbit(value) ? 0x8000 : 0;
    const double magnitude = fabs((double)value);
    int exponent, code = infinity;
    frexp(magnitude, &exponent);
    exponent = magnitude == 0.0 || exponent - 1 < least ? least : exponent - 1;
    if (magnitude < ldexp(1.0, 128)) /* a normal number has 2^bits units or more */
        code = ((exponent - least) << bits) + (int)rint(ldexp(magnitude, bits - exponent));
    return (uint16_t)((code < infinity ? code : infinity) | sign);
}

/* The nearest half; values beyond 65504 become 65504. */
static inline uint16_t reference_half(float value)
{
    return reference_narrow(TQKV_TYPE_F16, value < -65504.0f ? -65504.0f : value > 65504.0f ? 65504.0f : value);
}

/* ---- Encoding ---- */

static inline void reference_put_code(uint8_t *codes, tqkv_format format, int head_dim, int j, int code)
{
    if (reference_in_bytes(format)) {
        codes[j] = (uint8_t)code;
        return;
    }
    if (format == TQKV_TQ2 || format == TQKV_TQ3) {
        uint8_t *third = codes + head_dim / 4;
        codes[j / 4] = (uint8_t)(codes[j / 4] | (code & 3) << (2 * (j % 4)));
        if (format == TQKV_TQ3) third[j / 8] = (uint8_t)(third[j / 8] | (code >> 2) << (j % 8));
        return;
    }
    codes[j / 2] = (uint8_t)(codes[j / 2] | (code & 15) << (j % 2 ? 4 : 0));
    uint8_t *upper = codes + head_dim / 2;
    if (format == TQKV_TQ5) upper[j / 8] = (uint8_t)(upper[j / 8] | (code >> 4) << (j % 8));
    if (format == TQKV_TQ6) upper[j / 4] = (uint8_t)(upper[j / 4] | (code >> 4) << (2 * (j % 4)));
}

static inline int reference_code_at(const uint8_t *codes, tqkv_format format, int head_dim, int j)
{
    if (reference_in_bytes(format)) return codes[j] & ((1 << reference_bits(format)) - 1);
    if (format == TQKV_TQ2 || format == TQKV_TQ3) {
        const int pair = codes[j / 4] >> (2 * (j % 4)) & 3;
        return format == TQKV_TQ2 ? pair : pair | (codes[head_dim / 4 + j / 8] >> (j % 8) & 1) << 2;
    }
    int code = codes[j / 2] >> (j % 2 ? 4 : 0) & 15;
    const uint8_t *upper = codes + head_dim / 2;
    if (format == TQKV_TQ5) code |= (upper[j / 8] >> (j % 8) & 1) << 4;
    if (format == TQKV_TQ6) code |= (upper[j / 4] >> (2 * (j % 4)) & 3) << 4;
    return code;
}

static inline float reference_block_scale(const tqkv_store *store)
{
    return reference_has_one_norm(store->head_dim) || store->block_scale == 0.0f ? 1.0f : store->block_scale;
}

/* Steps 5 to 8 for a codebook format. row: [head_dim], rotated; scaled: [head_dim] */
static inline void reference_scale_row(const tqkv_store *s, const float *row, float *norms, float *scaled)
{
    int d = s->head_dim, block = reference_block(s->format, d);
    const bool one = reference_has_one_norm(d);
    for (int first = 0; first < d; first += block) {
        float sum = reference_sum_of_products(row + first, row + first, block);
        float norm = reference_root(one ? sum : reference_divide(sum, 256.0f));
        float inverse = norm > (float)1e-10 ? reference_divide(1.0f, norm) : 0.0f;
        float scale = reference_multiply(inverse, one ? (float)sqrt((double)d) : reference_block_scale(s));
        norms[first / block] = norm;
        for (int j = first; j < first + block; j++) scaled[j] = reference_multiply(row[j], scale);
    }
}

/* Step 8 of a codebook format for a block of `size` values from `first` on: of all factors' codes those with the
   largest (sum of value * centroid)^2 / (sum of centroid^2), of equal ones the earliest; NaN is not larger.
   Returns their factor.
   scaled: [head_dim]; codes, centroids: the block's part of [head_dim] is written */
static inline float reference_search(int bits, const float *scaled, int first, int size, uint8_t *codes,
                                     float *centroids)
{
    float shares[5] = {0}, tried[REFERENCE_MAX_DIM] = {0};
    int n, best = 0;
    const float *factors = reference_factors(bits, &n);
    for (int f = 0; f < n; f++) {
        for (int j = first; j < first + size; j++)
            tried[j] = test_codebook(bits)[reference_code(bits, reference_multiply(scaled[j], factors[f]))];
        const float product = reference_sum_of_products(scaled + first, tried + first, size);
        const float square = reference_sum_of_products(tried + first, tried + first, size);
        shares[f] = reference_divide(reference_multiply(product, product), square);
        if (shares[f] > shares[best]) best = f;
    }
    for (int j = first; j < first + size; j++) {
        codes[j] = (uint8_t)reference_code(bits, reference_multiply(scaled[j], factors[best]));
        centroids[j] = test_codebook(bits)[codes[j]];
    }
    return factors[best];
}

/* Step 9 of a codebook format: the decoded row is as long as the source. centroids: [head_dim] */
static inline void reference_correct_norms(const tqkv_store *s, const float *centroids, float *norms)
{
    int d = s->head_dim, block = reference_block(s->format, d);
    const bool one = reference_has_one_norm(d);
    for (int first = 0; first < d; first += block) {
        float sum = reference_sum_of_products(centroids + first, centroids + first, block);
        float length = reference_root(one ? sum : reference_divide(sum, 256.0f));
        float factor = reference_divide(one ? (float)sqrt((double)d) : reference_block_scale(s), length);
        float *norm = &norms[first / block];
        *norm = *norm <= (float)1e-10 ? 0.0f : reference_multiply(*norm, factor);
    }
}

/* The uniform grid of I8. row: [head_dim], rotated; scaled: [head_dim] in grid units */
static inline void reference_grid_row(const tqkv_store *s, const float *row, float *norms, float *scaled)
{
    int block = reference_block(s->format, s->head_dim);
    for (int first = 0; first < s->head_dim; first += block) {
        float largest = 0.0f;
        for (int j = first; j < first + block; j++)
            if (fabsf(row[j]) > largest) largest = fabsf(row[j]);
        const bool zero = largest <= (float)1e-10;
        norms[first / block] = zero ? 0.0f : reference_divide(largest, 127.0f);
        const float inverse = zero ? 0.0f : reference_divide(127.0f, largest);
        for (int j = first; j < first + block; j++) scaled[j] = reference_multiply(row[j], inverse);
    }
}

/* The centre of a head, [head_dim], or NULL */
static inline const float *reference_center(const tqkv_store *s, int kv_head)
{
    return s->center ? s->center + (size_t)kv_head * (size_t)s->head_dim : NULL;
}

/* The scale of a head, [head_dim], or NULL */
static inline const float *reference_scale(const tqkv_store *s, int kv_head)
{
    return s->channel_scale ? s->channel_scale + (size_t)kv_head * (size_t)s->head_dim : NULL;
}

/* One row of a head as the store holds it. source, scaled: [head_dim]; codes: [row_bytes]; norms: [norms_per_row] */
static inline void reference_encode_row(const tqkv_store *s, int kv_head, const float *source, uint8_t *codes,
                                        float *norms, float *scaled)
{
    float row[REFERENCE_MAX_DIM];
    const float *center = reference_center(s, kv_head), *scale = reference_scale(s, kv_head);
    int d = s->head_dim;
    memcpy(row, source, (size_t)d * sizeof *row);
    for (int j = 0; center && j < d; j++) row[j] = reference_add(row[j], -center[j]);
    for (int j = 0; scale && j < d; j++) row[j] = reference_multiply(row[j], reference_divide(1.0f, scale[j]));
    memset(codes, 0, reference_row_bytes(s->format, d));
    if (reference_is_rotated(s)) reference_rotate_row(row, d);
    if (s->format == TQKV_F16) {
        memcpy(scaled, row, (size_t)d * sizeof *row);
        for (int j = 0; j < d; j++) {
            uint16_t half = reference_half(row[j]);
            codes[2 * j] = (uint8_t)half;
            codes[2 * j + 1] = (uint8_t)(half >> 8);
        }
    } else if (s->format == TQKV_I8) {
        reference_grid_row(s, row, norms, scaled);
        for (int j = 0; j < d; j++) {
            float code = rintf(scaled[j]);
            code = code < -127.0f ? -127.0f : code <= 127.0f ? code : 127.0f; /* NaN by overflow: 127 */
            codes[j] = (uint8_t)(int)code;
        }
    } else {
        const int block = reference_block(s->format, d);
        uint8_t chosen[REFERENCE_MAX_DIM];
        reference_scale_row(s, row, norms, scaled);
        for (int first = 0; first < d; first += block)
            reference_search(reference_bits(s->format), scaled, first, block, chosen, row);
        for (int j = 0; j < d; j++) reference_put_code(codes, s->format, d, j, chosen[j]);
        reference_correct_norms(s, row, norms);
    }
}

/* ---- Decoding, in double ---- */

/* row: [head_dim]; x = s * R(y) / sqrt(D) */
static inline void reference_unrotate_double(double *row, int head_dim)
{
    const int m = reference_runs(head_dim), n = head_dim / m;
    for (int h = 1; h < n; h *= 2) {
        for (int i = 0; i < head_dim; i++) {
            if (i & h) continue;
            double a = row[i], b = row[i + h];
            row[i] = a + b;
            row[i + h] = a - b;
        }
    }
    for (int place = 0; m > 1 && place < n; place++) {
        double runs[REFERENCE_RUNS];
        for (int c = 0; c < m; c++) runs[c] = row[c * n + place];
        for (int b = 0; b < m; b++) {
            row[b * n + place] = 0.0;
            for (int c = 0; c < m; c++)
                row[b * n + place] += reference_matrix_is_negative(m, b, c) ? -runs[c] : runs[c];
        }
    }
    for (int i = 0; i < head_dim; i++)
        row[i] *= (reference_is_negative(i, head_dim) ? -1.0 : 1.0) / sqrt((double)head_dim);
}

/* row: [head_dim]; y = R(s * x) / sqrt(D) */
static inline void reference_rotate_double(double *row, int head_dim)
{
    for (int i = 0; i < head_dim; i++)
        if (reference_is_negative(i, head_dim)) row[i] = -row[i];
    reference_unrotate_double(row, head_dim);
    for (int i = 0; i < head_dim; i++)
        if (reference_is_negative(i, head_dim)) row[i] = -row[i];
}

static inline int64_t reference_slot(const tqkv_store *s, int64_t position)
{
    if (s->pages) return (int64_t)s->pages[position / s->page_size] * s->page_size + position % s->page_size;
    return s->ring ? position % s->capacity : position;
}

static inline const uint8_t *reference_codes_at(const tqkv_store *s, int kv_head, int64_t position)
{
    size_t row = (size_t)kv_head * (size_t)s->capacity + (size_t)reference_slot(s, position);
    return (const uint8_t *)s->codes + row * reference_row_bytes(s->format, s->head_dim);
}

static inline const float *reference_norms_at(const tqkv_store *s, int kv_head, int64_t position)
{
    size_t row = (size_t)kv_head * (size_t)s->capacity + (size_t)reference_slot(s, position);
    return s->norms + row * (size_t)reference_norms_per_row(s->format, s->head_dim);
}

/* Whether the processor multiplies rows of a format as integers. */
static inline bool reference_in_integers(tqkv_format format) { return format != TQKV_F16 && format != TQKV_TQ8; }

/* The integer centroid of a code, times the step of its book. */
static inline double reference_integer_centroid(int bits, int code)
{
    static const double steps[5] = {0.0251706206, 0.0244347833, 0.0261686062, 0.0276549527, 0.0319480885};
    static const unsigned char books[5][32] = {{18, 60},
                                               {10, 31, 55, 88},
                                               {5, 15, 25, 36, 48, 62, 79, 104},
                                               {2, 7, 12, 17, 22, 27, 32, 38, 44, 50, 57, 65, 73, 84, 97, 118},
                                               {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 26, 28, 30,  33,
                                                35, 38, 41, 44, 47, 50, 53, 57, 61, 65, 70, 76, 82, 90, 100, 116}};
    int half = 1 << (bits - 1);
    int place = code < half ? half - 1 - code : code - half;
    return (code < half ? -1.0 : 1.0) * (double)books[bits - 2][place] * steps[bits - 2];
}

/* Whose centroids: those of tqkv_decode and of a GPU, or the integers of the processor's attention */
typedef enum reference_centroids { REFERENCE_FLOATS, REFERENCE_INTEGERS } reference_centroids;

/* One stored row in the original basis. row: [head_dim] */
static inline void reference_decode_as(reference_centroids centroids, const tqkv_store *s, int kv_head,
                                       int64_t position, double *row)
{
    const uint8_t *codes = reference_codes_at(s, kv_head, position);
    const float *center = reference_center(s, kv_head), *scale = reference_scale(s, kv_head);
    int d = s->head_dim, block = reference_block(s->format, d);
    if (s->format == TQKV_F16) {
        for (int j = 0; j < d; j++) row[j] = reference_half_value((uint16_t)(codes[2 * j] | codes[2 * j + 1] << 8));
    }
    const float *norms = s->format == TQKV_F16 ? NULL : reference_norms_at(s, kv_head, position);
    for (int j = 0; norms && j < d; j++) {
        const int bits = reference_bits(s->format);
        double norm = (double)norms[j / block];
        if (s->format == TQKV_I8) {
            row[j] = (codes[j] < 128 ? codes[j] : codes[j] - 256) * norm;
            continue;
        }
        const int code = reference_code_at(codes, s->format, d, j);
        row[j] = (centroids == REFERENCE_INTEGERS && bits < 8 ? reference_integer_centroid(bits, code)
                                                              : (double)test_codebook(bits)[code]) *
                 (reference_has_one_norm(d) ? norm / sqrt((double)d) : norm / (double)reference_block_scale(s));
    }
    if (reference_is_rotated(s)) reference_unrotate_double(row, d);
    for (int j = 0; scale && j < d; j++) row[j] *= (double)scale[j];
    for (int j = 0; center && j < d; j++) row[j] += (double)center[j];
}

static inline void reference_decode(const tqkv_store *s, int kv_head, int64_t position, double *row)
{
    reference_decode_as(REFERENCE_FLOATS, s, kv_head, position, row);
}

/* ---- Attention, in double ---- */

/* Positions that a store holds at most. */
static inline int64_t reference_room(const tqkv_store *s)
{
    return s->pages ? (int64_t)s->n_pages * s->page_size : s->capacity;
}

typedef struct reference_shape {
    int key_dim, value_dim, n_heads, n_queries, group; /* key_dim: of a query, with the tail's */
    int64_t oldest, end;                               /* resident positions are [oldest, end) */
    int64_t kept, lowest; /* [0, kept) are seen, too, though they are not resident; the first of all that are seen */
    double scale;
} reference_shape;

static inline reference_shape reference_attention_shape(const tqkv_attention *a)
{
    reference_shape shape;
    int64_t keys = reference_room(a->keys), values = reference_room(a->values),
            capacity = keys < values ? keys : values;
    shape.key_dim = a->keys->head_dim + (a->tail ? a->tail->head_dim : 0);
    shape.value_dim = a->values->head_dim;
    shape.n_heads = a->n_heads;
    shape.n_queries = a->n_queries;
    shape.group = shape.n_heads / a->keys->n_kv_heads;
    shape.end = a->end;
    shape.oldest = a->end - (a->kv_len ? a->kv_len : a->end < capacity ? a->end : capacity);
    const bool kept = a->first.keys && a->first.values && (!a->tail || a->first.tail);
    shape.kept = !kept ? 0 : a->first.n < shape.oldest ? a->first.n : shape.oldest;
    shape.lowest = shape.kept ? 0 : shape.oldest;
    shape.scale = a->scale != 0.0f ? (double)a->scale : 1.0 / sqrt((double)shape.key_dim);
    return shape;
}

/* Where a query reads a position of the keys (side 0) or the values: from the codes, or as halves. */
static inline const tqkv_store *reference_store_of(const tqkv_attention *a, int side, int query, int64_t position)
{
    const tqkv_store *codes = side ? a->values : a->keys, *first = side ? a->first.values : a->first.keys,
                     *last = side ? a->last.values : a->last.keys;
    if (reference_attention_shape(a).kept && position < a->first.n) return first;
    if (codes->format == TQKV_F16) return codes;
    if (first && position < a->first.n) return first;
    const int n_queries = a->n_queries;
    const int64_t at = a->end - (a->non_causal && !a->window ? 1 : n_queries - query);
    return last && position > at - a->last.n && position >= a->last.from ? last : codes;
}

static inline bool reference_is_visible(const tqkv_attention *a, int query, int64_t position)
{
    reference_shape shape = reference_attention_shape(a);
    int64_t at = shape.end - shape.n_queries + query, guess = position - (shape.end - shape.n_queries);
    if (a->tree && guess >= 0 && guess < 64 && !(a->tree[query] >> guess & 1)) return false;
    if (a->non_causal && a->window > 0 && position - at >= a->window) return false;
    return (position >= shape.oldest || position < shape.kept) && position < shape.end &&
           (a->non_causal || position <= at) && (a->window <= 0 || position > at - a->window);
}

/* Whether a list shows a position to a query, which would see it without one. */
static inline bool reference_is_listed(const tqkv_attention *a, int query, int kv_head, int64_t position)
{
    if (!a->list.rows) return true;
    const int heads = a->list.heads ? a->list.heads : 1;
    const int32_t *row = a->list.rows + (query * heads + (heads > 1 ? kv_head : 0)) * a->list.length;
    for (int i = 0; i < a->list.length && row[i] >= 0; i++)
        if (row[i] == position / a->list.block) return true;
    int newer = 0;
    for (int64_t p = position + 1; p < a->end && newer < a->list.newest; p++)
        newer += reference_is_visible(a, query, p);
    return newer < a->list.newest;
}

/* Positions [oldest, end) of one head in the original basis: [end - oldest][head_dim]. Freed by the caller. */
static inline double *reference_decode_all(const tqkv_store *s, int kv_head, int64_t oldest, int64_t end,
                                           reference_centroids centroids)
{
    double *rows = (double *)test_alloc((size_t)(end - oldest) * (size_t)s->head_dim * sizeof *rows);
    for (int64_t p = oldest; p < end; p++)
        reference_decode_as(centroids, s, kv_head, p, rows + (size_t)(p - oldest) * (size_t)s->head_dim);
    return rows;
}

/* All keys (side 0), with their tail, or values of one head that are seen in the original basis, zeros between:
 * [end - lowest][key_dim or value_dim]. Freed by the caller. */
static inline double *reference_decode_side(const tqkv_attention *a, int side, int query, int kv_head,
                                            reference_centroids centroids)
{
    const reference_shape shape = reference_attention_shape(a);
    const size_t d = (size_t)(side ? shape.value_dim : shape.key_dim), n = (size_t)(shape.end - shape.lowest) * d;
    double *rows = (double *)test_alloc(n * sizeof *rows);
    for (size_t i = 0; i < n; i++) rows[i] = 0.0;
    for (int64_t p = shape.lowest; p < shape.end; p++) {
        double *row = rows + (size_t)(p - shape.lowest) * d;
        if (p >= shape.kept && p < shape.oldest) continue;
        reference_decode_as(centroids, reference_store_of(a, side, query, p), kv_head, p, row);
        if (!side && a->tail)
            reference_decode_as(centroids, p < shape.kept ? a->first.tail : a->tail, kv_head, p,
                                row + a->keys->head_dim);
    }
    return rows;
}

/* query, key: [key_dim] */
static inline double reference_score(const tqkv_attention *a, const double *query, const double *key, double scale)
{
    double sum = 0.0;
    for (int j = 0; j < reference_attention_shape(a).key_dim; j++) sum += query[j] * key[j];
    double cap = (double)a->softcap;
    return cap > 0.0 ? cap * tanh(sum * scale / cap) : sum * scale;
}

/* One query of one head. query: [key_dim], out: [value_dim], original basis; keys: [end - lowest][key_dim], values:
 * with value_dim */
static inline void reference_attend_row(const tqkv_attention *a, int head, int query_index, const double *query,
                                        const double *keys, const double *values, double *out)
{
    reference_shape shape = reference_attention_shape(a);
    size_t d = (size_t)shape.key_dim, value_dim = (size_t)shape.value_dim, count = (size_t)(shape.end - shape.lowest);
    double *scores = (double *)test_alloc(count * sizeof *scores);
    bool *seen = (bool *)test_alloc(count * sizeof *seen);
    double largest = a->sinks ? (double)a->sinks[head] : -INFINITY, sum = 0.0;
    bool any = false;
    memset(out, 0, value_dim * sizeof *out);
    for (size_t i = 0; i < count; i++) {
        seen[i] = reference_is_visible(a, query_index, shape.lowest + (int64_t)i) &&
                  reference_is_listed(a, query_index, head / shape.group, shape.lowest + (int64_t)i);
        if (!seen[i]) continue;
        scores[i] = reference_score(a, query, keys + i * d, shape.scale);
        largest = scores[i] > largest ? scores[i] : largest;
        any = true;
    }
    for (size_t i = 0; i < count; i++) {
        if (!seen[i]) continue;
        double weight = exp(scores[i] - largest);
        sum += weight;
        for (size_t j = 0; j < value_dim; j++) out[j] += weight * values[i * value_dim + j];
    }
    if (a->sinks) sum += exp((double)a->sinks[head] - largest);
    for (size_t j = 0; any && j < value_dim; j++) out[j] /= sum;
    free(seen);
    free(scores);
}

/* A query of the basis of a stream's codes, R(q * scale), in the original one, in place. query: [head_dim] */
static inline void reference_original_query(const tqkv_store *s, int kv_head, double *query)
{
    const float *scale = reference_scale(s, kv_head);
    if (reference_is_rotated(s)) reference_unrotate_double(query, s->head_dim);
    for (int j = 0; scale && j < s->head_dim; j++) query[j] /= (double)scale[j];
}

/* An output in the basis of the values' codes, R(out / scale), in place. out: [head_dim] */
static inline void reference_coded_output(const tqkv_store *s, int kv_head, double *out)
{
    const float *scale = reference_scale(s, kv_head);
    for (int j = 0; scale && j < s->head_dim; j++) out[j] /= (double)scale[j];
    if (reference_is_rotated(s)) reference_rotate_double(out, s->head_dim);
}

/* q: [n_queries][n_heads][key_dim], out: with value_dim, in the bases that the attention names */
static inline void reference_attend_as(reference_centroids centroids, const tqkv_attention *a, const float *q,
                                       double *out)
{
    reference_shape shape = reference_attention_shape(a);
    size_t d = (size_t)shape.key_dim;
    double query[2 * REFERENCE_MAX_DIM];
    for (int kv_head = 0; kv_head < a->keys->n_kv_heads; kv_head++) {
        double *keys = reference_decode_side(a, 0, 0, kv_head, centroids);
        double *values = reference_decode_side(a, 1, 0, kv_head, centroids);
        for (int i = 0; i < shape.n_queries * shape.group; i++) {
            int query_index = i / shape.group, head = kv_head * shape.group + i % shape.group;
            size_t row = (size_t)query_index * (size_t)shape.n_heads + (size_t)head;
            double *to = out + row * (size_t)shape.value_dim;
            if (a->last.n && query_index && i % shape.group == 0) { /* other positions are halves for it */
                free(keys);
                free(values);
                keys = reference_decode_side(a, 0, query_index, kv_head, centroids);
                values = reference_decode_side(a, 1, query_index, kv_head, centroids);
            }
            for (size_t j = 0; j < d; j++) query[j] = (double)q[row * d + j];
            if (a->query_basis == TQKV_ROTATED) reference_original_query(a->keys, kv_head, query);
            if (a->query_basis == TQKV_ROTATED && a->tail)
                reference_original_query(a->tail, kv_head, query + a->keys->head_dim);
            reference_attend_row(a, head, query_index, query, keys, values, to);
            if (a->output_basis == TQKV_ROTATED) reference_coded_output(a->values, kv_head, to);
        }
        free(keys);
        free(values);
    }
}

static inline void reference_attend(const tqkv_attention *a, const float *q, double *out)
{
    reference_attend_as(REFERENCE_INTEGERS, a, q, out);
}

/* What the processor's attention may err by, as relative L2. deviation: the standard deviation of the scores. tail: a
   format of the keys, too, or TQKV_FORMAT_DEFAULT */
static inline double reference_tolerance(tqkv_format keys, tqkv_format tail, tqkv_format values, double deviation)
{
    const bool floats = !reference_in_integers(keys) && !reference_in_integers(values) &&
                        (tail == TQKV_FORMAT_DEFAULT || !reference_in_integers(tail));
    return floats ? (deviation > 10.0 ? 2e-6 * deviation : 2e-5) : 2e-4 + 5e-5 * deviation;
}

static inline double reference_attention_tolerance(const tqkv_attention *a, double deviation)
{
    return reference_tolerance(a->keys->format, a->tail ? a->tail->format : TQKV_FORMAT_DEFAULT, a->values->format,
                               deviation);
}

/* What attention on a GPU may differ from the processor's: both errors, and twice what integer centroids differ from
 * those of floats, as relative L2 of Gaussian rows. */
static inline double reference_gap(tqkv_format format)
{
    static const double gaps[5] = {0.0003, 0.0011, 0.0032, 0.0059, 0.0069}; /* 2 to 6 bits */
    const int bits = reference_bits(format);
    return reference_is_codebook(format) && bits <= 6 ? gaps[bits - 2] : 0.0;
}

static inline double reference_gpu_difference(tqkv_format keys, tqkv_format tail, tqkv_format values, double deviation)
{
    const double of_tail = tail == TQKV_FORMAT_DEFAULT ? 0.0 : reference_gap(tail);
    return reference_tolerance(keys, tail, values, deviation) + 2e-5 +
           2.0 * (reference_gap(values) + deviation * (reference_gap(keys) + of_tail));
}

/* ---- Index scores, in double ---- */

/* The keys that a query sees end here. */
static inline int64_t reference_index_end(const tqkv_index *x, int query)
{
    const int ratio = x->ratio ? x->ratio : 1, n_queries = x->n_queries;
    const int64_t at = (x->positions ? x->positions : x->end * ratio) - n_queries + query;
    int64_t end = 0;
    while (end < x->end && end * ratio + ratio - 1 <= at) end++;
    return end;
}

/* The score of one key for one query, and the error that is allowed; see >>index. q: [n_heads][head_dim], key:
   [head_dim] */
static inline double reference_key_score(reference_centroids centroids, const tqkv_index *x, const float *q,
                                         const float *weights, const double *key, double *allowed)
{
    const int d = x->keys->head_dim, n_heads = x->n_heads;
    const bool integers = centroids == REFERENCE_INTEGERS && reference_in_integers(x->keys->format);
    double total = 0.0, sizes = 0.0, lengths = 0.0, length = 0.0, row[REFERENCE_MAX_DIM];
    for (int i = 0; i < d; i++) length += key[i] * key[i];
    for (int h = 0; h < n_heads; h++) {
        const double weight = weights ? (double)weights[h] : 1.0;
        double sum = 0.0, squares = 0.0;
        for (int i = 0; i < d; i++) row[i] = (double)q[h * d + i];
        if (x->query_basis == TQKV_ROTATED) reference_original_query(x->keys, 0, row);
        for (int i = 0; i < d; i++) sum += row[i] * key[i], squares += row[i] * row[i];
        const double product = x->relu && sum < 0.0 ? 0.0 : sum;
        total += weight * product;
        sizes += fabs(weight * product);
        lengths += fabs(weight) * sqrt(squares * length);
    }
    *allowed = integers ? 1e-4 * sizes + 2e-5 * lengths : 2e-5 * sizes + 2e-7 * lengths;
    return total;
}

/* scores: of the blocks of one query, and in allowed the largest error that is allowed for a key of each block:
   [blocks]. keys: [end - first][head_dim], of the resident keys from `first` on */
static inline void reference_index_scores(reference_centroids centroids, const tqkv_index *x, int query, const float *q,
                                          const double *keys, int64_t first, double *scores, double *allowed)
{
    const int size = x->block ? x->block : 1, n_heads = x->n_heads, d = x->keys->head_dim;
    const int64_t end = reference_index_end(x, query), n_blocks = (x->end + size - 1) / size;
    const float *weights = x->weights ? x->weights + query * n_heads : NULL;
    for (int64_t b = 0; b < n_blocks; b++) {
        double sum = 0.0, error;
        int n = 0;
        scores[b] = -INFINITY;
        allowed[b] = 0.0;
        for (int64_t j = b * size; j < (b + 1) * size && j < end; j++) {
            if (j < first) continue;
            const double score =
                reference_key_score(centroids, x, q + query * n_heads * d, weights, keys + (j - first) * d, &error);
            if (error > allowed[b]) allowed[b] = error;
            sum += score;
            if (n++ == 0 || score > scores[b]) scores[b] = score;
        }
        if (n && x->pool == TQKV_POOL_MEAN) scores[b] = sum / n;
    }
}

/* |x - reference| / |reference| over n values; 0 when both are zero */
static inline double reference_relative_error(const float *x, const double *reference, size_t n)
{
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < n; i++) {
        double difference = (double)x[i] - reference[i];
        error += difference * difference;
        size += reference[i] * reference[i];
    }
    if (!(error > 0.0)) return error == 0.0 ? 0.0 : (double)INFINITY;
    return size > 0.0 ? sqrt(error / size) : (double)INFINITY;
}

#endif

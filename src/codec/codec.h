/* >>codec: norms, quantising, packing, and back, in plain C: the specification */

/* Returns the norm of a TQ row, or of 256 of its values, from the sum of their squares; scale brings them to variance
   1. fabsf clears the sign of a NaN, which depends on the machine. */
static float tqkv__norm_tq(const tqkv__stream *s, float sum, float *scale)
{
    const bool one = s->norms_per_row == 1;
    const float norm = fabsf(TQKV__AS_FLOAT(sqrtf(one ? sum : TQKV__AS_FLOAT(sum / 256.0f))));
    const float inverse = norm > TQKV__MIN_NORM ? TQKV__AS_FLOAT(1.0f / norm) : 0.0f;
    *scale = TQKV__AS_FLOAT(inverse * (one ? s->root : s->block_scale));
    return norm;
}

/* Returns the norm of the I8 values that share it, the largest magnitude / 127; scale: 1 / step of the grid. Both are 0
   for values near 0. -freciprocal-math would multiply by 1/127 if the compiler knew the divisor. */
static float tqkv__norm_i8(float largest, float *scale)
{
    const volatile float steps = 127.0f;
    *scale = 0.0f;
    if (!(largest > TQKV__MIN_NORM)) return 0.0f;
    *scale = TQKV__AS_FLOAT(steps / largest);
    return TQKV__AS_FLOAT(largest / steps);
}

/* Returns the sum of the products of x and y in 16 strided lanes: product d is added to lane d % 16, in order, then the
   lanes are added by halves. x, y: [n], n a multiple of 16 */
static float tqkv__strided_dot(const float *x, const float *y, int n)
{
    float lanes[16] = {0};
    for (int d = 0; d < n; d++) lanes[d % 16] = TQKV__AS_FLOAT(lanes[d % 16] + tqkv__rounded(x[d] * y[d]));
    return tqkv__sum_16(lanes);
}

/* The stored norm makes the decoded row as long as the row was: norm * sqrt(D)/|c|, c being the codes' centroids; of
   several, norm * block_scale / RMS of c. sums: of the squares of c */
static void tqkv__correct_norms(const tqkv__stream *s, const float *sums, float *norms)
{
    const bool one = s->norms_per_row == 1;
    const float root = one ? s->root : s->block_scale;
    for (int b = 0; b < s->norms_per_row; b++) {
        const float length = TQKV__AS_FLOAT(sqrtf(one ? sums[b] : TQKV__AS_FLOAT(sums[b] / 256.0f)));
        const float factor = tqkv__rounded(root / length);
        norms[b] = norms[b] <= TQKV__MIN_NORM ? 0.0f : TQKV__AS_FLOAT(norms[b] * factor);
    }
}

/* Rotates a centred row, finds its norms and scales it, in place: all of encoding before the comparison with the
   boundaries. F16 is not scaled. row: [head_dim], norms: [norms_per_row]. */
static TQKV__NOINLINE void tqkv__scale_row(const tqkv__stream *s, float *row, float *norms)
{
    const int n = s->norm_dim;
    if (s->rotated) tqkv__rotate_row(row, s->head_dim);
    for (int b = 0; b < s->norms_per_row; b++, row += n) {
        float scale, largest = 0.0f;
        for (int i = 0; i < n; i++) largest = fabsf(row[i]) > largest ? fabsf(row[i]) : largest;
        norms[b] = s->kind == TQKV__GRID ? tqkv__norm_i8(largest, &scale)
                                         : tqkv__norm_tq(s, tqkv__strided_dot(row, row, n), &scale);
        tqkv__scale(row, n, scale);
    }
}

/* Returns the number of boundaries below v, by bisection; boundaries: [(1 << bits) - 1]. NaN gives 0. */
static unsigned tqkv__quantise(const float *boundaries, int bits, float v)
{
    unsigned code = 0;
    for (unsigned half = 1u << (bits - 1); half; half >>= 1)
        if (boundaries[code + half - 1] < v) code += half;
    return code;
}

/* Returns round-half-even(v), clamped to +-127; NaN gives 127. The sum with 1.5*2^23 has no bits below 1. */
static uint8_t tqkv__quantise_i8(float v)
{
    const float magic = 12582912.0f;
    v = v < 127.0f ? v : 127.0f;
    v = v > -127.0f ? v : -127.0f;
    return (uint8_t)(int8_t)(tqkv__rounded(TQKV__AS_FLOAT(v) + magic) - magic);
}

/* Rounds to nearest even, and clamps beyond 65504. Integer arithmetic does not depend on the rounding mode. */
static uint16_t tqkv__half_from_float(float x)
{
    const uint32_t bits = tqkv__bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude >= 0x477ff000u) { /* 65520: would round to infinity */
        half = 0x7bffu;
    } else if (magnitude >= 0x38800000u) { /* 2^-14: a normal half */
        half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    } else { /* a multiple of 2^-24 */
        const uint32_t shift = 126u - (magnitude >> 23), mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        half = shift > 24u ? 0u : (mantissa + (1u << (shift - 1)) - 1u + ((mantissa >> shift) & 1u)) >> shift;
    }
    return (uint16_t)(sign | half);
}

static float tqkv__float_from_half(uint16_t half)
{
    const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude < 0x400u) {
        const float x = (float)magnitude * (1.0f / 16777216.0f);
        return sign ? -x : x;
    }
    return tqkv__float(sign | ((magnitude << 13) + (magnitude < 0x7c00u ? 0x38000000u : 0x70000000u)));
}

/* Scales are in [2^-32, 2^32]: their bits, those of positive floats, are ordered as they are. */
#define TQKV__LEAST_SCALE  0x2f800000u
#define TQKV__SCALES_RANGE 0x20000000u
static bool tqkv__scales_valid(const float *x, size_t n)
{
    uint32_t bad[16] = {0}; /* lanes: n is a multiple of 16 */
    for (; n; n -= 16, x += 16)
        for (int k = 0; k < 16; k++) bad[k] |= tqkv__bits(x[k]) - TQKV__LEAST_SCALE > TQKV__SCALES_RANGE;
    for (int k = 1; k < 16; k++) bad[0] |= bad[k];
    return !bad[0];
}

/* Compilers may replace a division by a constant; see tqkv__norm_i8. */
static TQKV__NOINLINE void tqkv__invert(const float *scales, int n, float *inverses)
{
    const volatile float one = 1.0f;
    const float dividend = one;
    for (int i = 0; i < n; i++) inverses[i] = TQKV__AS_FLOAT(dividend / scales[i]);
}

/* Makes floats of a row, less its centre and times its inverses, unless these are NULL. All arrays: [n] */
static void tqkv__widen_row(tqkv_type type, const void *src, const float *center, const float *inverses, int n,
                            float *row)
{
    if (type == TQKV_TYPE_F32)
        memcpy(row, src, (size_t)n * sizeof(float));
    else if (type == TQKV_TYPE_F16)
        for (int i = 0; i < n; i++) row[i] = tqkv__float_from_half(tqkv__half_at(src, (size_t)i));
    else
        for (int i = 0; i < n; i++) row[i] = tqkv__float((uint32_t)tqkv__half_at(src, (size_t)i) << 16);
    if (center)
        for (int i = 0; i < n; i++) row[i] = TQKV__AS_FLOAT(row[i] - center[i]);
    if (inverses)
        for (int i = 0; i < n; i++) row[i] = tqkv__rounded(row[i] * inverses[i]);
}

/* Rounds to nearest even, beyond the largest half to infinity. NaN stays NaN: it keeps its upper bits and becomes
   quiet, as by the processors' instructions. */
static uint16_t tqkv__half_rounded(float x)
{
    const uint32_t bits = tqkv__bits(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    if (magnitude < 0x477ff000u) return tqkv__half_from_float(x);
    return (uint16_t)(sign | 0x7c00u | (magnitude > 0x7f800000u ? 0x200u | (magnitude >> 13 & 0x3ffu) : 0u));
}

static uint16_t tqkv__bfloat16_rounded(float x)
{
    const uint32_t bits = tqkv__bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static void tqkv__narrow_row(tqkv_type type, const float *row, int n, void *dst)
{
    uint8_t *to = (uint8_t *)dst;
    if (type == TQKV_TYPE_F32) memcpy(dst, row, (size_t)n * sizeof(float));
    if (type != TQKV_TYPE_F32)
        for (int i = 0; i < n; i++, to += 2) {
            const uint16_t half = type == TQKV_TYPE_F16 ? tqkv__half_rounded(row[i]) : tqkv__bfloat16_rounded(row[i]);
            memcpy(to, &half, sizeof half);
        }
}

/* Packs codes: [head_dim] -> row: [row_bytes]: the field of main bits, then the field of upper bits */
static void tqkv__pack(const tqkv__stream *s, const uint8_t *codes, uint8_t *row)
{
    const int main_bits = s->main_bits, upper_bits = s->upper_bits, mask = (1 << main_bits) - 1;
    uint8_t *upper = row + s->head_dim * main_bits / 8;
    memset(row, 0, s->row_bytes);
    for (int i = 0; i < s->head_dim; i++) {
        row[i * main_bits / 8] |= (uint8_t)((codes[i] & mask) << (i * main_bits % 8));
        if (upper_bits) upper[i * upper_bits / 8] |= (uint8_t)(codes[i] >> main_bits << (i * upper_bits % 8));
    }
}

/* Unpacks n codes of a row from number `first` on. Every byte is valid: bits above a code are ignored. codes: [n] */
static void tqkv__unpack(const tqkv__stream *s, const uint8_t *row, int first, int n, uint8_t *codes)
{
    const int main_bits = s->main_bits, upper_bits = s->upper_bits;
    const int main_mask = (1 << main_bits) - 1, code_mask = s->book_bits ? (1 << s->book_bits) - 1 : main_mask;
    const uint8_t *upper = row + s->head_dim * main_bits / 8;
    for (int i = first; i < first + n; i++) {
        int code = (row[i * main_bits / 8] >> (i * main_bits % 8)) & main_mask;
        if (upper_bits) code |= upper[i * upper_bits / 8] >> (i * upper_bits % 8) << main_bits;
        *codes++ = (uint8_t)(code & code_mask);
    }
}

/* A value beyond every boundary: max(v, -TQKV__FAR) has the code of v and is never NaN. */
#define TQKV__FAR 100.0f

/* Quantising without bisection. Boundaries are symmetric; the positive ones suffice. Each of 2^bits cells of equal
   width holds at most one, away from the cell's ends, so a rounding into the next cell changes nothing. One comparison
   remains, with the boundary in the value's cell or, if it has none, the next one. */
#define TQKV__CELL_MARGIN 0.004f /* of a cell's width; a value's cell is off by 0.0001 at most */
typedef struct tqkv__cell {
    float bound, below, above; /* what a value there is compared with, and the centroids on both sides of that */
    uint32_t n_below;          /* boundaries below the value, but for this one */
} tqkv__cell;

typedef struct tqkv__quantiser {
    TQKV__ALIGNED tqkv__cell cells[256];
    /* Of codebooks of up to 6 bits, for look-ups in registers: n_below of each cell, and the positive boundaries, then
       infinity, and centroids */
    uint8_t n_below[64];
    float bounds[32], centroids[32];
    float squares[8]; /* TQ2: of its centroids, repeated */
    float slope, top; /* cell of a magnitude w: the whole part of min(w * slope, top) */
    int half;         /* the codes of one sign */
} tqkv__quantiser;

static void tqkv__quantiser_open(const tqkv__stream *s, tqkv__quantiser *q)
{
    const int bits = s->book_bits, n = (1 << (bits - 1)) - 1;
    const float *positive = s->boundaries + n + 1, *centroids = s->codebook + n + 1; /* boundaries[n] is 0 */
    int i = 0;
    q->half = n + 1;
    q->top = (float)((1 << bits) - 1);
    q->slope = (q->top + 0.45f) / positive[n - 1];
    for (int c = 0; c < 1 << bits; c++) {
        const tqkv__cell cell = {i < n ? positive[i] : INFINITY, centroids[i], centroids[i < n ? i + 1 : n],
                                 (uint32_t)i};
        const float at = i < n ? positive[i] * q->slope : INFINITY;
        TQKV_ASSERT(i == n || (at - floorf(at) > TQKV__CELL_MARGIN && at - floorf(at) < 1.0f - TQKV__CELL_MARGIN));
        q->cells[c] = cell;
        if (c < 64) q->n_below[c] = (uint8_t)i;
        i += at < (float)(c + 1) || (i < n && c == (1 << bits) - 1);
    }
    for (i = 0; i < 32; i++) {
        q->bounds[i] = i < n ? positive[i] : INFINITY;
        q->centroids[i] = centroids[i < n ? i : n];
    }
    for (i = 0; i < 8; i++) q->squares[i] = TQKV__AS_FLOAT(s->codebook[i & 3] * s->codebook[i & 3]);
}

/* Source and destination of a row. src, center and inverses (or NULL): [head_dim], codes: [row_bytes], norms, and
   factors of a search (or NULL): [norms_per_row]; half: [2 * head_dim] or NULL, takes the rotated row as halves */
typedef struct tqkv__row {
    const void *src;
    const float *center, *inverses;
    uint8_t *codes;
    float *norms, *factors;
    uint8_t *half;
} tqkv__row;

static void tqkv__store_halves(const float *x, int n, uint8_t *to)
{
    for (int i = 0; i < n; i++) {
        const uint16_t half = tqkv__half_from_float(x[i]);
        to[2 * i] = (uint8_t)(half & 255);
        to[2 * i + 1] = (uint8_t)(half >> 8);
    }
}

/* The norm of a row is not the scale that its values are best coded with. Tries the format's factors on n scaled values
   that share a norm, and takes the first with the largest (sum of v*c)^2 / (sum of c*c), c being the codes' centroids;
   the first of all if that is NaN. v: [n] -> codes: [n]; returns the sum of c*c */
static TQKV__NOINLINE float tqkv__search_block(const tqkv__stream *s, const float *v, int n, uint8_t *codes,
                                               float *factor)
{
    float centroids[TQKV_MAX_HEAD_DIM], best = 0.0f, squares = 0.0f;
    uint8_t tried[TQKV_MAX_HEAD_DIM];
    for (int f = 0; f < s->n_factors; f++) {
        for (int i = 0; i < n; i++) {
            tried[i] = (uint8_t)tqkv__quantise(s->boundaries, s->book_bits, TQKV__AS_FLOAT(v[i] * s->factors[f]));
            centroids[i] = s->codebook[tried[i]];
        }
        const float product = tqkv__strided_dot(v, centroids, n), sum = tqkv__strided_dot(centroids, centroids, n);
        const float share = TQKV__AS_FLOAT(tqkv__rounded(product * product) / sum);
        if (f > 0 && !(share > best)) continue;
        best = share;
        squares = sum;
        *factor = s->factors[f];
        memcpy(codes, tried, (size_t)n);
    }
    return squares;
}

static TQKV__NOINLINE void tqkv__encode_row(const tqkv__stream *s, const tqkv__row *row)
{
    float x[TQKV_MAX_HEAD_DIM], squares[TQKV_MAX_HEAD_DIM / 256], factors[TQKV_MAX_HEAD_DIM / 256];
    uint8_t codes[TQKV_MAX_HEAD_DIM];
    tqkv__widen_row(s->type, row->src, row->center, row->inverses, s->head_dim, x);
    if (row->half) {
        float rotated[TQKV_MAX_HEAD_DIM];
        memcpy(rotated, x, (size_t)s->head_dim * sizeof(float));
        if (s->rotated) tqkv__rotate_row(rotated, s->head_dim);
        tqkv__store_halves(rotated, s->head_dim, row->half);
    }
    tqkv__scale_row(s, x, row->norms);
    if (s->kind == TQKV__HALF) {
        tqkv__store_halves(x, s->head_dim, row->codes);
        return;
    }
    for (int i = 0; i < s->head_dim && s->kind == TQKV__GRID; i++) codes[i] = tqkv__quantise_i8(x[i]);
    if (s->kind == TQKV__BOOK) {
        float *factor = row->factors ? row->factors : factors;
        for (int b = 0; b < s->norms_per_row; b++)
            squares[b] = tqkv__search_block(s, x + b * s->norm_dim, s->norm_dim, codes + b * s->norm_dim, &factor[b]);
        tqkv__correct_norms(s, squares, row->norms);
    }
    tqkv__pack(s, codes, row->codes);
}

static void tqkv__encode_rows(const tqkv__stream *s, const tqkv__quantiser *q, const tqkv__row *rows, int n_rows)
{
    (void)q; /* bisection needs no tables */
    for (int i = 0; i < n_rows; i++) tqkv__encode_row(s, &rows[i]);
}

static const tqkv__codec tqkv__codec_scalar = {tqkv__values_finite, tqkv__largest_bits, tqkv__invert,
                                               tqkv__widen_row,     tqkv__narrow_row,   tqkv__rotate_row,
                                               tqkv__unrotate_row,  tqkv__encode_rows};

static float tqkv__factor(const tqkv__stream *s, float norm)
{
    if (s->kind == TQKV__GRID) return norm;
    return TQKV__AS_FLOAT(s->norms_per_row == 1 ? norm * s->inverse_root : norm / s->block_scale);
}

/* dst: [head_dim], in the basis of the stream */
static TQKV__NOINLINE void tqkv__decode_row(const tqkv__stream *s, const uint8_t *row, const float *norms, float *dst)
{
    uint8_t codes[TQKV_MAX_HEAD_DIM];
    if (s->kind == TQKV__HALF) {
        for (int i = 0; i < s->head_dim; i++)
            dst[i] = tqkv__float_from_half((uint16_t)(row[2 * i] | row[2 * i + 1] << 8));
        return;
    }
    tqkv__unpack(s, row, 0, s->head_dim, codes);
    for (int b = 0; b < s->norms_per_row; b++) {
        const float factor = tqkv__factor(s, norms[b]);
        for (int i = b * s->norm_dim; i < (b + 1) * s->norm_dim; i++)
            dst[i] = TQKV__AS_FLOAT((s->kind == TQKV__GRID ? (float)(int8_t)codes[i] : s->codebook[codes[i]]) * factor);
    }
}

/* Multiplies: dst *= scale of the head; dst: [head_dim], in the original basis */
static TQKV__NOINLINE void tqkv__apply_scale(const tqkv__stream *s, int kv_head, float *dst)
{
    const float *scale = tqkv__scale_of(s, kv_head);
    for (int d = 0; scale && d < s->head_dim; d++) dst[d] = TQKV__AS_FLOAT(dst[d] * scale[d]);
}

/* Adds: dst += centre of the head, or, in the basis of the codes, what encoding makes of it; dst: [head_dim] */
static TQKV__NOINLINE void tqkv__add_center(const tqkv__stream *s, int kv_head, bool coded, float *dst)
{
    float center[TQKV_MAX_HEAD_DIM], room[TQKV_MAX_HEAD_DIM];
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    if (!s->center) return;
    const float *inverses = coded ? tqkv__inverses_of(s, kv_head, 1, room) : NULL;
    codec->widen(TQKV_TYPE_F32, tqkv__center_of(s, kv_head), NULL, inverses, s->head_dim, center);
    if (coded && s->rotated) codec->rotate(center, s->head_dim);
    for (int d = 0; d < s->head_dim; d++) dst[d] = TQKV__AS_FLOAT(dst[d] + center[d]);
}

/* Decodes row and norms of a head -> dst: [head_dim], in a basis of the caller's, with the centre. */
static TQKV__NOINLINE void tqkv__decode_in(const tqkv__stream *s, int kv_head, const uint8_t *row, const float *norms,
                                           tqkv_basis basis, float *dst)
{
    tqkv__decode_row(s, row, norms, dst);
    if (s->rotated && basis == TQKV_ORIGINAL) tqkv__codec_for(s->head_dim)->unrotate(dst, s->head_dim);
    if (s->channel_scale && basis == TQKV_ORIGINAL) tqkv__apply_scale(s, kv_head, dst);
    if (s->center) tqkv__add_center(s, kv_head, basis == TQKV_ROTATED, dst);
}

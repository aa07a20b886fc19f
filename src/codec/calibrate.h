/* >>calibrate: tqkv_calibrate, tqkv_logit_noise */

/* Magnitudes to which no sum of squares leaves the range of float. */
#define TQKV__LARGEST_CALIBRATED 1.0e12f
#define TQKV__LEAST_LEARNT       (1.0f / 1024.0f)
#define TQKV__LARGEST_LEARNT     1024.0f

/* Queries as rows of a stream, whose heads are those of the queries. */
typedef struct tqkv__queries {
    tqkv__stream rows;
    const void *q;
    int n, group;
} tqkv__queries;

/* Finds the mean over rows of n positions, or that of the squares, of the differences from a centre, unless that is
   NULL: one float a channel, rows in order; zeros of none. src: the caller's rows, or NULL: those of a store; counted:
   [n], or NULL: all; means: [head_dim] */
static TQKV__NOINLINE void tqkv__channel_means(const tqkv__stream *s, const void *src, const uint8_t *counted, int n,
                                               int first_head, int n_heads, const float *center, bool squared,
                                               float *means)
{
    float row[TQKV_MAX_HEAD_DIM];
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    int n_counted = 0;
    memset(means, 0, (size_t)s->head_dim * sizeof(float));
    for (int t = 0; t < n; t++) {
        if (counted && !counted[t]) continue;
        n_counted++;
        for (int h = first_head; h < first_head + n_heads; h++) {
            const void *at = src ? tqkv__source_row(s, src, (size_t)t, (size_t)h) : NULL;
            if (at)
                codec->widen(s->type, at, NULL, NULL, s->head_dim, row);
            else
                tqkv__read_row(s, h, t, row);
            for (int d = 0; d < s->head_dim; d++) {
                const float x = center ? TQKV__AS_FLOAT(row[d] - center[d]) : row[d];
                means[d] = TQKV__AS_FLOAT(means[d] + (squared ? tqkv__rounded(x * x) : x));
            }
        }
    }
    const volatile float by = n_counted ? (float)n_counted * (float)n_heads : 1.0f; /* see tqkv__norm_i8 */
    for (int d = 0; d < s->head_dim; d++) means[d] = TQKV__AS_FLOAT(means[d] / by);
}

/* Channels that share a scale in pairs: of the first `dim` ones */
typedef struct tqkv__tied {
    tqkv_pairs pairs;
    int dim;
} tqkv__tied;

static tqkv_result tqkv__take_pairs(tqkv_pairs pairs, int rotary_dim, int head_dim, tqkv__tied *tied)
{
    if (pairs != TQKV_PAIRS_NONE && pairs != TQKV_PAIRS_NEIGHBOURS && pairs != TQKV_PAIRS_HALVES)
        return TQKV__INVALID("pairs: no tqkv_pairs");
    if (rotary_dim < 0 || rotary_dim > head_dim || rotary_dim % 2)
        return TQKV__INVALID("rotary_dim: negative, odd, or above head_dim");
    tied->pairs = pairs;
    tied->dim = rotary_dim ? rotary_dim : head_dim;
    return TQKV_OK;
}

/* Turns mean squares into deviations; channels of a pair share theirs, zeros become the smallest that is none. */
static TQKV__NOINLINE void tqkv__deviations(const tqkv__tied *tied, int head_dim, float *squares)
{
    float least = 1.0f;
    bool any = false;
    for (int i = 0; tied->pairs != TQKV_PAIRS_NONE && i < tied->dim / 2; i++) {
        const bool halves = tied->pairs == TQKV_PAIRS_HALVES;
        const int low = halves ? i : 2 * i, high = halves ? i + tied->dim / 2 : 2 * i + 1;
        squares[low] = squares[high] = tqkv__rounded(squares[low] + squares[high]) * 0.5f;
    }
    for (int d = 0; d < head_dim; d++) {
        squares[d] = TQKV__AS_FLOAT(sqrtf(squares[d]));
        if (squares[d] > 0.0f && (!any || squares[d] < least)) least = squares[d];
        any = any || squares[d] > 0.0f;
    }
    for (int d = 0; d < head_dim; d++) squares[d] = squares[d] > 0.0f ? squares[d] : least;
}

/* g = sqrt(s / r), divided by its root mean square. r: NULL: 1. scales may be s. */
static TQKV__NOINLINE void tqkv__scales_of(const float *s, const float *r, int head_dim, float *scales)
{
    float sum = 0.0f;
    for (int d = 0; d < head_dim; d++) {
        scales[d] = TQKV__AS_FLOAT(sqrtf(r ? TQKV__AS_FLOAT(s[d] / r[d]) : s[d]));
        sum = TQKV__AS_FLOAT(sum + tqkv__rounded(scales[d] * scales[d]));
    }
    const volatile float n = (float)head_dim;
    const volatile float root = TQKV__AS_FLOAT(sqrtf(TQKV__AS_FLOAT(sum / n)));
    for (int d = 0; d < head_dim; d++) {
        const float g = TQKV__AS_FLOAT(scales[d] / root);
        scales[d] = g < TQKV__LEAST_LEARNT ? TQKV__LEAST_LEARNT : g > TQKV__LARGEST_LEARNT ? TQKV__LARGEST_LEARNT : g;
    }
}

/* Finds centre and scale of a head from rows as tqkv__channel_means takes them. center, scale: [head_dim], either may
   be NULL, and so may queries */
static TQKV__NOINLINE void tqkv__calibrate_head(const tqkv__stream *s, const void *src, const uint8_t *counted,
                                                int n_tokens, int kv_head, const tqkv__queries *queries,
                                                const tqkv__tied *tied, float *center, float *scale)
{
    float mean[TQKV_MAX_HEAD_DIM], squares[TQKV_MAX_HEAD_DIM];
    tqkv__channel_means(s, src, counted, n_tokens, kv_head, 1, NULL, false, mean);
    if (center) memcpy(center, mean, (size_t)s->head_dim * sizeof(float));
    if (!scale) return;
    tqkv__channel_means(s, src, counted, n_tokens, kv_head, 1, mean, true, scale);
    tqkv__deviations(tied, s->head_dim, scale);
    if (queries) {
        tqkv__channel_means(&queries->rows, queries->q, NULL, queries->n, kv_head * queries->group, queries->group,
                            NULL, true, squares);
        tqkv__deviations(tied, s->head_dim, squares);
    }
    tqkv__scales_of(scale, queries ? squares : NULL, s->head_dim, scale);
}

/* Takes queries of the stream's type, [n_queries][n_heads][head_dim], or none; *bytes: their size. */
static tqkv_result tqkv__take_queries(const tqkv__stream *s, const void *q, int n_heads, int n_queries,
                                      tqkv__queries *queries, size_t *bytes)
{
    if (!q) n_heads = s->n_kv_heads;
    if (n_heads <= 0 || n_heads % s->n_kv_heads) return TQKV__INVALID("n_heads: 0, or not a multiple of n_kv_heads");
    if (n_queries < 0) return TQKV__INVALID("n_queries is negative");
    *bytes = 0;
    queries->rows = *s;
    queries->rows.n_kv_heads = n_heads;
    queries->rows.strides.token = queries->rows.strides.head = 0;
    queries->rows.strides = tqkv__strides_of(queries->rows.strides, n_heads, s->head_dim);
    queries->q = q;
    queries->n = n_queries;
    queries->group = n_heads / s->n_kv_heads;
    if (!q) return TQKV_OK;
    const tqkv_result r = tqkv__check_rows(&queries->rows, q, n_queries, bytes);
    if (r != TQKV_OK) return r;
    return tqkv__rows_finite(&queries->rows, q, n_queries) ? TQKV_OK
                                                           : TQKV__REFUSE(NOT_FINITE, "q holds NaN or infinity");
}

/* Whether no value is so large that its square may leave the range of float, summed up; rows are finite. */
static bool tqkv__rows_moderate(const tqkv__stream *s, const void *src, int n)
{
    float row[TQKV_MAX_HEAD_DIM];
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    if (s->type == TQKV_TYPE_F16) return true;
    for (size_t t = 0; t < (size_t)n; t++)
        for (size_t h = 0; h < (size_t)s->n_kv_heads; h++) {
            codec->widen(s->type, tqkv__source_row(s, src, t, h), NULL, NULL, s->head_dim, row);
            if (codec->largest_bits(row, (size_t)s->head_dim) > tqkv__bits(TQKV__LARGEST_CALIBRATED)) return false;
        }
    return true;
}

/* Whether an output may be written: floats, apart from what is read. */
static bool tqkv__may_write(const float *to, size_t size, const void *src, size_t src_bytes, const void *q,
                            size_t q_bytes)
{
    return !to ||
           (tqkv__floats_at(to) && !tqkv__overlap(to, size, src, src_bytes) && !tqkv__overlap(to, size, q, q_bytes));
}

static tqkv_result tqkv__check_calibration(const tqkv__stream *s, const void *src, int n_tokens,
                                           const tqkv__queries *queries, size_t q_bytes, const float *center,
                                           const float *scale)
{
    size_t bytes;
    const size_t size = tqkv__center_size(s);
    const tqkv_result r = tqkv__check_rows(s, src, n_tokens, &bytes);
    if (r != TQKV_OK) return r;
    if (!center && !scale) return TQKV__INVALID("center and channel_scale are NULL: nothing to find");
    if (!tqkv__may_write(center, size, src, bytes, queries->q, q_bytes) ||
        !tqkv__may_write(scale, size, src, bytes, queries->q, q_bytes) || tqkv__overlap(center, size, scale, size))
        return TQKV__INVALID("center or channel_scale: not aligned as floats, or overlaps src, q or the other");
    if (!tqkv__rows_finite(s, src, n_tokens)) return TQKV__REFUSE(NOT_FINITE, "src holds NaN or infinity");
    if (!tqkv__rows_moderate(s, src, n_tokens)) return TQKV__REFUSE(NOT_FINITE, "src holds values beyond 1e12");
    if (queries->q && !tqkv__rows_moderate(&queries->rows, queries->q, queries->n))
        return TQKV__REFUSE(NOT_FINITE, "q holds values beyond 1e12");
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_calibrate(const tqkv_store *shape, const void *src, int n_tokens, const void *q, int n_heads,
                                    int n_queries, tqkv_pairs pairs, float *center, float *channel_scale)
{
    tqkv__stream s;
    tqkv__queries queries;
    tqkv__tied tied;
    size_t q_bytes;
    tqkv_result r = tqkv__stream_shape(shape, &s);
    if (r != TQKV_OK) return r;
    if ((r = tqkv__take_pairs(pairs, shape->rotary_dim, s.head_dim, &tied)) != TQKV_OK) return r;
    if ((r = tqkv__take_queries(&s, q, n_heads, n_queries, &queries, &q_bytes)) != TQKV_OK) return r;
    if ((r = tqkv__check_calibration(&s, src, n_tokens, &queries, q_bytes, center, channel_scale)) != TQKV_OK) return r;
    const uint64_t mode = tqkv__fp_exact();
    for (int h = 0; h < s.n_kv_heads; h++)
        tqkv__calibrate_head(&s, src, NULL, n_tokens, h, q && n_queries ? &queries : NULL, &tied,
                             center ? center + (size_t)h * (size_t)s.head_dim : NULL,
                             channel_scale ? channel_scale + (size_t)h * (size_t)s.head_dim : NULL);
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

/* -- The noise of the logits -- */

/* Queries at work, as many as have their sums on the stack; sums of q.e and of its square over the rows */
enum { TQKV__NOISE_ROWS = 128 };
typedef struct tqkv__noises {
    double first[TQKV__NOISE_ROWS], second[TQKV__NOISE_ROWS];
} tqkv__noises;

static void tqkv__add_noise(const tqkv__queries *queries, int kv_head, size_t first, int n, const float *error,
                            tqkv__noises *sums)
{
    float q[TQKV_MAX_HEAD_DIM];
    const tqkv__stream *s = &queries->rows;
    const size_t group = (size_t)queries->group;
    for (int i = 0; i < n; i++) {
        const size_t row = first + (size_t)i, head = (size_t)kv_head * group + row % group;
        const void *at = tqkv__source_row(s, queries->q, row / group, head);
        float a = 0.0f, b = 0.0f, c = 0.0f, e = 0.0f;
        tqkv__codec_for(s->head_dim)->widen(s->type, at, NULL, NULL, s->head_dim, q);
        for (int d = 0; d < s->head_dim; d += 4) {
            a += q[d] * error[d];
            b += q[d + 1] * error[d + 1];
            c += q[d + 2] * error[d + 2];
            e += q[d + 3] * error[d + 3];
        }
        const double noise = (double)((a + b) + (c + e));
        sums->first[i] += noise;
        sums->second[i] += noise * noise;
    }
}

/* Returns the variance over the rows of what a head's rows add to scores, mean over its queries. */
static TQKV__NOINLINE double tqkv__head_noise(const tqkv__stream *s, const tqkv__quantiser *q, const void *src,
                                              int n_tokens, int kv_head, const tqkv__queries *queries)
{
    uint8_t codes[2 * TQKV_MAX_HEAD_DIM];
    float norms[TQKV_MAX_HEAD_DIM / 128], room[TQKV_MAX_HEAD_DIM], error[TQKV_MAX_HEAD_DIM], source[TQKV_MAX_HEAD_DIM];
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    const float *inverses = tqkv__inverses_of(s, kv_head, 1, room), *center = tqkv__center_of(s, kv_head);
    const int64_t n_rows = (int64_t)queries->n * queries->group;
    double total = 0.0;
    for (int64_t first = 0; first < n_rows && n_tokens; first += TQKV__NOISE_ROWS) {
        const int n = n_rows - first < TQKV__NOISE_ROWS ? (int)(n_rows - first) : TQKV__NOISE_ROWS;
        tqkv__noises sums = {{0.0}, {0.0}};
        for (int t = 0; t < n_tokens; t++) {
            const void *at = tqkv__source_row(s, src, (size_t)t, (size_t)kv_head);
            const tqkv__row row = {at, center, inverses, codes, norms, NULL, NULL};
            codec->encode_rows(s, q, &row, 1);
            tqkv__decode_in(s, kv_head, codes, norms, TQKV_ORIGINAL, error);
            codec->widen(s->type, at, NULL, NULL, s->head_dim, source);
            for (int d = 0; d < s->head_dim; d++) error[d] -= source[d];
            tqkv__add_noise(queries, kv_head, (size_t)first, n, error, &sums);
        }
        for (int i = 0; i < n; i++) {
            const double mean = sums.first[i] / n_tokens;
            total += sums.second[i] / n_tokens - mean * mean;
        }
    }
    return total > 0.0 ? total / (double)n_rows : total == 0.0 || total < 0.0 ? 0.0 : (double)INFINITY;
}

TQKV_API tqkv_result tqkv_logit_noise(const tqkv_store *shape, const void *src, int n_tokens, const void *q,
                                      int n_heads, int n_queries, double *noise)
{
    tqkv__stream s;
    tqkv__quantiser quantiser;
    tqkv__queries queries;
    size_t q_bytes;
    tqkv_result r = tqkv__stream_shape(shape, &s);
    if (r == TQKV_OK) r = tqkv__stream_channels(shape, &s);
    if (r == TQKV_OK) r = tqkv__take_queries(&s, q, n_heads, n_queries, &queries, &q_bytes);
    if (r != TQKV_OK) return r;
    if (!q) return TQKV__INVALID("q is NULL");
    const size_t size = (size_t)s.n_kv_heads * sizeof *noise;
    const size_t alignment = __alignof__(tqkv_quality); /* of a double in a struct: 4 on 32-bit x86 */
    if (tqkv__overlap(noise, size, q, q_bytes)) return TQKV__INVALID("noise overlaps q");
    if ((r = tqkv__check_source(&s, src, n_tokens, noise, alignment, size)) != TQKV_OK) return r;
    const uint64_t mode = tqkv__fp_exact();
    if (s.kind == TQKV__BOOK) tqkv__quantiser_open(&s, &quantiser);
    for (int h = 0; h < s.n_kv_heads; h++)
        noise[h] = sqrt(tqkv__head_noise(&s, &quantiser, src, n_tokens, h, &queries) / s.head_dim);
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

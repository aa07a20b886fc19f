/* >>plain: attention in plain C, the specification of what every instruction set computes, bit for bit

   A rotated query becomes integers of 16 bits against its largest value, and the weights of a tile, times the norms,
   integers of 15 bits against the largest. Codes stand for integer centroids of 8 bits, I8's for themselves. T = 32639:

     q_d = round(query_d T/Q),  Q = max_d |query_d|
     s_j = sum over panels b of (sum_d q_d c_jd) * (f_jb * (step Q/T))     f: the factor of a norm, see tqkv__factor
     p_j = exp(s_j - max),  W = max_j |p_j f_j|,  w_j = round(p_j f_j T/W)
     out_d += (sum_j w_j c_jd) * (step W/T)                                in each tile

   The sums in brackets are exact, so their order is free. Floats have one order everywhere: a product that a sum
   follows is an fma or is rounded first, a quotient is a division, exp and tanh are those of >>exact.

   F16 and TQ8 are multiplied as floats: the products of each 512 dimensions with fma in 16 sums, dimension d in sum
   d % 16, which are added by halves; values by one fma after the other, in the order of positions. */

/* 127*256 + 127, so that a set may split an integer into two signed bytes. Sums stay within 32 bits: |c| <= 128 keeps a
   score of 256 dimensions below 1.07e9, and 64 positions below 2.7e8. */
#define TQKV__INTEGER_TOP 32639
/* Smaller largest values count as this one, 2^-100: T over it is a float. */
#define TQKV__INTEGER_LEAST 7.888609052210118e-31f

/* Whether a stream is multiplied as floats. The centroids of TQ8 do not fit 8 bits. */
static bool tqkv__in_floats(const tqkv__stream *s) { return s->kind == TQKV__HALF || s->book_bits == 8; }

/* Finds the stream's integer centroids, repeated to 64, and their step. These are the upper halves of symmetric books,
   each with the step that adds the least distortion; docs/formats.md has the figures. */
static void tqkv__fill_integers(tqkv__stream *s)
{
    static const float steps[5] = {0.0251706206f, 0.0244347833f, 0.0261686062f, 0.0276549527f, 0.0319480885f};
    static const int8_t books[5][32] = {{18, 60},
                                        {10, 31, 55, 88},
                                        {5, 15, 25, 36, 48, 62, 79, 104},
                                        {2, 7, 12, 17, 22, 27, 32, 38, 44, 50, 57, 65, 73, 84, 97, 118},
                                        {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 26, 28, 30,  33,
                                         35, 38, 41, 44, 47, 50, 53, 57, 61, 65, 70, 76, 82, 90, 100, 116}};
    s->step = 1.0f;
    if (s->kind != TQKV__BOOK || tqkv__in_floats(s)) return;
    const int half = 1 << (s->book_bits - 1);
    s->step = steps[s->book_bits - 2];
    for (int i = 0; i < 64; i++) {
        const int code = i & (2 * half - 1);
        const int8_t *book = books[s->book_bits - 2];
        s->centroids[i] = (int8_t)(code >= half ? book[code - half] : -book[half - 1 - code]);
    }
}

static void tqkv__integers_at(const tqkv__stream *s, const uint8_t *row, int first, int n, int8_t *integers)
{
    uint8_t codes[TQKV_MAX_HEAD_DIM];
    tqkv__unpack(s, row, first, n, codes);
    for (int i = 0; i < n; i++) integers[i] = (int8_t)(s->kind == TQKV__GRID ? codes[i] : s->centroids[codes[i]]);
}

/* Returns what multiplies integers against the value whose bits are `largest`: step * value / T. NaN if it is not
   finite. */
static float tqkv__integer_unit(uint32_t largest, float step)
{
    const volatile float top = (float)TQKV__INTEGER_TOP;
    if (largest >= 0x7f800000u) return tqkv__float(0x7fc00000u);
    const float value = tqkv__float(largest) > TQKV__INTEGER_LEAST ? tqkv__float(largest) : TQKV__INTEGER_LEAST;
    return TQKV__AS_FLOAT(TQKV__AS_FLOAT(value / top) * step);
}

static float tqkv__integer_scale(uint32_t largest)
{
    if (largest >= 0x7f800000u) return 0.0f;
    const float value = tqkv__float(largest) > TQKV__INTEGER_LEAST ? tqkv__float(largest) : TQKV__INTEGER_LEAST;
    return TQKV__AS_FLOAT((float)TQKV__INTEGER_TOP / value);
}

static float tqkv__to_integers(const float *x, int n, float step, int16_t *to)
{
    const uint32_t largest = tqkv__largest_bits(x, (size_t)n);
    const float scale = tqkv__integer_scale(largest);
    for (int i = 0; i < n; i++) to[i] = (int16_t)(scale > 0.0f ? tqkv__round(tqkv__rounded(x[i] * scale)) : 0.0f);
    return tqkv__integer_unit(largest, step);
}

/* Rounds a query to integers, whose unit takes the place of the last float. query, to: [head_dim] */
static void tqkv__round_query_scalar(const tqkv__stream *s, const float *query, float *to)
{
    int16_t integers[TQKV_MAX_HEAD_DIM];
    to[s->head_dim - 1] = tqkv__to_integers(query, s->head_dim, s->step, integers);
    memcpy(to, integers, (size_t)s->head_dim * sizeof *integers);
}

/* Replaces a query by what its integers leave of it. Returns whether that deserves a second digit: fewer than 19 of 32
   values reach an eighth of the largest, as in one Gaussian row of 400. */
static bool tqkv__round_rest(float *query, int n)
{
    const uint32_t largest = tqkv__largest_bits(query, (size_t)n);
    int high = 0;
    if (largest >= 0x7f800000u || tqkv__float(largest) <= TQKV__INTEGER_LEAST) return false;
    const uint32_t eighth = largest - (3u << 23);
    for (int d = 0; d < n; d++) high += (tqkv__bits(query[d]) & 0x7fffffffu) >= eighth;
    if (32 * high >= 19 * n) return false;
    const float scale = tqkv__integer_scale(largest), unit = tqkv__integer_unit(largest, 1.0f);
    for (int d = 0; d < n; d++) query[d] = tqkv__fma(-tqkv__round(tqkv__rounded(query[d] * scale)), unit, query[d]);
    return true;
}

/* Gives NaN one pattern of bits: processors differ in those that they make. */
static float tqkv__one_nan(float x) { return x != x ? tqkv__float(0x7fc00000u) : x; }

static float tqkv__panel_factor(const tqkv__stream *s, const float *norms, int panel)
{
    return tqkv__factor(s, norms[panel * s->panel_dim / s->norm_dim]);
}

/* An infinite norm of a key counts as NaN: its score could be -infinity, which would leave the position out. */
static float tqkv__norm_of_key(float norm) { return norm + norm * 0.0f; }

/* Products that 16 sums take: 1024 equal ones, all rounded to one side, would give keys of constant halves an error of
   3.4e-5. */
#define TQKV__MOST_PRODUCTS 512

static float tqkv__score_floats(const tqkv__stream *s, const float *key, const float *query, float score)
{
    for (int first = 0; first < s->head_dim; first += TQKV__MOST_PRODUCTS) {
        const int left = s->head_dim - first, end = first + (left < TQKV__MOST_PRODUCTS ? left : TQKV__MOST_PRODUCTS);
        float lanes[16] = {0};
        for (int d = first; d < end; d++) lanes[d % 16] = tqkv__fma(query[d], key[d], lanes[d % 16]);
        score = TQKV__AS_FLOAT(score + tqkv__sum_16(lanes));
    }
    return score;
}

static float tqkv__score_integers(const tqkv__stream *s, const int8_t *key, const float *norms, const float *query,
                                  float score)
{
    const int16_t *q = (const int16_t *)(const void *)query;
    for (int b = 0; b < s->head_dim / s->panel_dim; b++) {
        const float norm = tqkv__norm_of_key(tqkv__panel_factor(s, norms, b));
        const float factor = TQKV__AS_FLOAT(norm * query[s->head_dim - 1]);
        int32_t sum = 0;
        for (int d = b * s->panel_dim; d < (b + 1) * s->panel_dim; d++) sum += q[d] * key[d];
        score = tqkv__fma(TQKV__AS_FLOAT((float)sum), factor, score);
    }
    return score;
}

static void tqkv__score_tile_scalar(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, const float *q,
                                    int n_rows, bool add, float *scores)
{
    float key[TQKV_MAX_HEAD_DIM];
    int8_t integers[TQKV_MAX_HEAD_DIM];
    float checked[TQKV_MAX_HEAD_DIM / 256];
    const bool in_floats = tqkv__in_floats(s);
    for (int j = 0; j < segment->n; j++) {
        const uint8_t *codes = tqkv__codes_at(s, kv_head, segment->slot + j);
        const float *norms = tqkv__norms_at(s, kv_head, segment->slot + j);
        for (int b = 0; in_floats && b < s->norms_per_row; b++) checked[b] = tqkv__norm_of_key(norms[b]);
        if (in_floats)
            tqkv__decode_row(s, codes, checked, key);
        else
            tqkv__integers_at(s, codes, 0, s->head_dim, integers);
        for (int row = 0; row < n_rows; row++) {
            const float *query = q + (size_t)row * (size_t)s->head_dim;
            float *score = &scores[row * TQKV__TILE + j];
            const float before = add ? *score : 0.0f;
            *score = in_floats ? tqkv__score_floats(s, key, query, before)
                               : tqkv__score_integers(s, integers, norms, query, before);
        }
    }
}

static bool tqkv__span_has(const tqkv__span *span, int j)
{
    return j >= span->from && j < span->to && !(span->hidden >> j & 1);
}

static void tqkv__softmax_tile_scalar(const tqkv__attention *a, const tqkv__span *span, const float *offsets,
                                      int n_rows, float *scores, float *max, float *sum, float *out)
{
    const float softcap = a->call.softcap;
    for (int row = 0; row < n_rows; row++, span++, scores += TQKV__TILE, max++, sum++, out += a->value_dim) {
        float largest = *max, lanes[16] = {0};
        const bool seen = span->to > span->from;
        for (int j = 0; j < TQKV__TILE; j++) {
            if (!seen || !tqkv__span_has(span, j)) {
                scores[j] = seen ? -INFINITY : 0.0f;
                continue;
            }
            const float capped =
                softcap > 0.0f ? TQKV__AS_FLOAT(TQKV__AS_FLOAT(scores[j] + offsets[row]) / softcap) : 0.0f;
            if (softcap > 0.0f) scores[j] = tqkv__fma(tqkv__tanh(capped), softcap, 0.0f);
            if (scores[j] > largest) largest = scores[j];
        }
        if (!seen) continue;
        if (largest > *max) {
            const float shrink = tqkv__exp(TQKV__AS_FLOAT(*max - largest));
            tqkv__scale(out, a->value_dim, shrink);
            *sum = TQKV__AS_FLOAT(*sum * shrink);
            *max = largest;
        }
        for (int j = 0; j < TQKV__TILE; j++) {
            scores[j] = tqkv__exp(TQKV__AS_FLOAT(scores[j] - largest));
            lanes[j % 16] = TQKV__AS_FLOAT(lanes[j % 16] + scores[j]);
        }
        *sum = TQKV__AS_FLOAT(*sum + tqkv__sum_16(lanes));
    }
}

static void tqkv__add_integers(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, int panel,
                               const int8_t *integers, const float *weights, float *out)
{
    float scaled[TQKV__TILE];
    int16_t w[TQKV__TILE];
    int32_t sums[TQKV__PANEL] = {0};
    for (int j = 0; j < segment->n; j++) {
        const float *norms = tqkv__norms_at(s, kv_head, segment->slot + j);
        scaled[j] = weights[j] == 0.0f ? 0.0f : TQKV__AS_FLOAT(weights[j] * tqkv__panel_factor(s, norms, panel));
    }
    const float unit = tqkv__to_integers(scaled, segment->n, s->step, w);
    for (int j = 0; j < segment->n; j++, integers += s->panel_dim)
        for (int d = 0; d < s->panel_dim; d++) sums[d] += w[j] * integers[d];
    for (int d = 0; d < s->panel_dim; d++) out[d] = tqkv__fma(TQKV__AS_FLOAT((float)sums[d]), unit, out[d]);
}

static void tqkv__value_tile_scalar(const tqkv__stream *s, int kv_head, const tqkv__segment *segment,
                                    const float *weights, int n_rows, float *scaled, float *out)
{
    int8_t integers[TQKV__TILE * TQKV__PANEL];
    (void)scaled; /* for vectors */
    for (int j = 0; tqkv__in_floats(s) && j < segment->n; j++) {
        float value[TQKV_MAX_HEAD_DIM];
        tqkv__decode_row(s, tqkv__codes_at(s, kv_head, segment->slot + j),
                         tqkv__norms_at(s, kv_head, segment->slot + j), value);
        for (int i = 0; i < n_rows * s->head_dim; i++)
            out[i] = tqkv__fma(weights[i / s->head_dim * TQKV__TILE + j], value[i % s->head_dim], out[i]);
    }
    if (tqkv__in_floats(s)) return;
    for (int b = 0; b < s->head_dim / s->panel_dim; b++) {
        for (int j = 0; j < segment->n; j++)
            tqkv__integers_at(s, tqkv__codes_at(s, kv_head, segment->slot + j), b * s->panel_dim, s->panel_dim,
                              integers + j * s->panel_dim);
        for (int row = 0; row < n_rows; row++)
            tqkv__add_integers(s, kv_head, segment, b, integers, weights + row * TQKV__TILE,
                               out + (size_t)row * (size_t)s->head_dim + b * s->panel_dim);
    }
}

/* Returns what the sum of a stretch loses to the maximum of a piece of it, as the exponent of a factor. */
static inline float tqkv__loss(float max, float piece_max)
{
    return piece_max > max ? TQKV__AS_FLOAT(max - piece_max) : 0.0f;
}

static void tqkv__end_piece_scalar(int n_rows, int value_dim, const tqkv__sums *piece, const tqkv__sums *sums)
{
    for (int row = 0; row < n_rows; row++) {
        if (piece->sum[row] == 0.0f) continue;
        const float factor = tqkv__exp(tqkv__loss(sums->max[row], piece->max[row]));
        float *added = piece->out + (size_t)row * (size_t)value_dim, *to = sums->out + (size_t)row * (size_t)value_dim;
        for (int d = 0; d < value_dim; d++) to[d] = tqkv__fma(to[d], factor, added[d]);
        memset(added, 0, (size_t)value_dim * sizeof(float));
        sums->sum[row] = tqkv__fma(sums->sum[row], factor, piece->sum[row]);
        sums->max[row] = piece->max[row];
        piece->sum[row] = 0.0f;
    }
}

static void tqkv__sum_heads_scalar(const float *scores, const float *weights, const float *offsets, bool relu,
                                   int n_rows, float *sums)
{
    for (int row = 0; row < n_rows; row++, scores += TQKV__TILE)
        for (int j = 0; j < TQKV__TILE; j++) {
            const float score = TQKV__AS_FLOAT(scores[j] + offsets[row]);
            sums[j] = tqkv__fma(weights[row], relu && score < 0.0f ? 0.0f : score, sums[j]);
        }
}

static const tqkv__kernels tqkv__kernels_scalar = {tqkv__round_query_scalar,  tqkv__score_tile_scalar,
                                                   tqkv__softmax_tile_scalar, tqkv__end_piece_scalar,
                                                   tqkv__value_tile_scalar,   tqkv__sum_heads_scalar};

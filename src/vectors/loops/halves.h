/* >>k-halves: keys and values that are multiplied as floats, see >>plain. Halves are read where they lie; rows of TQ8
   become floats first. */

/* Calls a loop for 1, 2 or `most` rows, which is a constant there. */
#define TQKV__WITH_ROWS(rows, most, loop, ...) \
    ((rows) == 1 ? loop(1, __VA_ARGS__) : (rows) == 2 ? loop(2, __VA_ARGS__) : loop(most, __VA_ARGS__))
#define TQKV__ROWS_OF(left, most) ((left) >= (most) ? (most) : (left) >= 2 ? 2 : 1)

#ifndef TQKV__DECODED /* true: another set of the same name has these */

/* Query rows that share a key, and a value: enough sums in progress to hide their latency, and few enough for the
   registers. */
#define TQKV__HALF_KEY_ROWS (TQKV__INTEGER_LANES == 16 ? 4 : 3)
#define TQKV__HALF_ROWS     4

/* Floats that are decoded together: 16 KiB, a fraction of an L1 cache */
#define TQKV__DECODED_FLOATS 4096

/* Decodes n rows of TQ8. keys: see tqkv__norm_of_key; to: [n][head_dim] */
TQKV__OP void TQKV__(decode_floats)(const tqkv__stream *s, const uint8_t *codes, const float *norms, int n, bool keys,
                                    float *to)
{
    for (int d = 0, end = s->norm_dim; d < n * s->head_dim; end += s->norm_dim, norms++) {
        const float factor = tqkv__factor(s, keys ? tqkv__norm_of_key(*norms) : *norms);
        for (; d < end; d += TQKV__INTEGER_LANES) {
            TQKV__UNROLL
            for (int i = 0; i < TQKV__INTEGER_LANES; i++) to[d + i] = s->codebook[codes[d + i]];
            TQKV__(store)(to + d, TQKV__(load)(to + d) * TQKV__(set1)(factor));
        }
    }
}

/* Finds scores[row][j] (+)= query[row] . key j over the dimensions [begin, end), for four keys, which are halves or
   floats; rows and halves are constants. ahead: bytes to the keys that are read next, whose lines are prefetched one by
   one, or 0 */
TQKV__OP void TQKV__(score_four_halves)(const int rows, const bool halves, int dim, int begin, int end,
                                        const uint8_t *const *keys, ptrdiff_t ahead, const float *q, bool add,
                                        float *scores)
{
    enum { ALL = 16 / TQKV__INTEGER_LANES, NOW = TQKV__INTEGER_LANES == 4 ? 2 : 1 };
    TQKV__VECTOR sums[TQKV__HALF_KEY_ROWS][4][ALL];
    TQKV__UNROLL
    for (int first = 0; first < ALL; first += NOW) {
        TQKV__VECTOR now[TQKV__HALF_KEY_ROWS][4][NOW];
        TQKV__UNROLL
        for (int i = 0; i < rows * 4 * NOW; i++) now[i / NOW / 4][i / NOW % 4][i % NOW] = TQKV__(set1)(0.0f);
        for (int d = begin + first * TQKV__INTEGER_LANES; d < end; d += 16) {
            if (halves && ahead && first == 0 && d % 32 == 0) {
                TQKV__UNROLL
                for (int j = 0; j < 4; j++) tqkv__prefetch(TQKV__L2, keys[j] + 2 * d + ahead, 1);
            }
            TQKV__UNROLL
            for (int i = 0; i < NOW; i++) {
                const int at = d + i * TQKV__INTEGER_LANES;
                TQKV__VECTOR x[TQKV__HALF_KEY_ROWS];
                TQKV__UNROLL
                for (int r = 0; r < rows; r++) x[r] = TQKV__(load)(q + r * dim + at);
                TQKV__UNROLL
                for (int j = 0; j < 4; j++) {
                    const TQKV__VECTOR key = halves ? TQKV__(load_f16)(keys[j] + 2 * at)
                                                    : TQKV__(load)((const float *)(const void *)keys[j] + at);
                    TQKV__UNROLL
                    for (int r = 0; r < rows; r++) now[r][j][i] = TQKV__(fma)(x[r], key, now[r][j][i]);
                }
            }
        }
        TQKV__UNROLL
        for (int i = 0; i < rows * 4 * NOW; i++)
            sums[i / NOW / 4][i / NOW % 4][first + i % NOW] = now[i / NOW / 4][i / NOW % 4][i % NOW];
    }
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) TQKV__(add_sums_of_16)(&sums[r][0][0], add, scores + r * TQKV__TILE);
}

/* Does the same for n keys, `stride` bytes apart; past the end the last one again. */
TQKV__OP void TQKV__(score_half_rows)(const int rows, const bool halves, int dim, const uint8_t *codes, size_t stride,
                                      int n, ptrdiff_t ahead, const float *q, bool add, float *scores)
{
    for (int j = 0; j < n; j += 4) {
        const uint8_t *keys[4];
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) keys[i] = codes + (size_t)(j + i < n ? j + i : n - 1) * stride;
        for (int d = 0; d < dim; d += TQKV__MOST_PRODUCTS) {
            const int end = dim - d < TQKV__MOST_PRODUCTS ? dim : d + TQKV__MOST_PRODUCTS;
            TQKV__(score_four_halves)(rows, halves, dim, d, end, keys, ahead, q, add || d > 0, scores + j);
        }
    }
}

TQKV__OP void TQKV__(score_all)(const bool halves, int dim, const uint8_t *codes, size_t stride, int n, ptrdiff_t ahead,
                                const float *q, int n_rows, bool add, float *scores)
{
    for (int left = n_rows, now; left > 0; left -= now, q += now * dim, scores += now * TQKV__TILE) {
        now = TQKV__ROWS_OF(left, TQKV__HALF_KEY_ROWS);
        TQKV__WITH_ROWS(now, TQKV__HALF_KEY_ROWS, TQKV__(score_half_rows), halves, dim, codes, stride, n, ahead, q, add,
                        scores);
        ahead = 0;
    }
}

/* keys: [n][dim] */
TQKV__LOOP void TQKV__(score_decoded)(const float *keys, int dim, int n, const float *q, int n_rows, bool add,
                                      float *scores)
{
    TQKV__(score_all)
    (false, dim, (const uint8_t *)(const void *)keys, (size_t)dim * sizeof *keys, n, 0, q, n_rows, add, scores);
}

/* Adds: out[row][d] += weights[row][j] * value j, for `width` vectors of dimensions; rows, width and halves are
   constants. */
TQKV__OP void TQKV__(add_half_vectors)(const int rows, const int width, const bool halves, int dim,
                                       const uint8_t *codes, size_t stride, int n, ptrdiff_t ahead,
                                       const float *weights, float *out)
{
    TQKV__VECTOR sums[TQKV__HALF_ROWS][8];
    TQKV__UNROLL
    for (int i = 0; i < rows * width; i++)
        sums[i / width][i % width] = TQKV__(load)(out + i / width * dim + i % width * TQKV__INTEGER_LANES);
    for (int j = 0; j < n; j++, codes += stride) {
        TQKV__VECTOR x[8];
        if (halves && ahead) tqkv__prefetch(TQKV__L2, codes + ahead, (size_t)(2 * width * TQKV__INTEGER_LANES));
        TQKV__UNROLL
        for (int i = 0; i < width; i++)
            x[i] = halves ? TQKV__(load_f16)(codes + 2 * i * TQKV__INTEGER_LANES)
                          : TQKV__(load)((const float *)(const void *)codes + i * TQKV__INTEGER_LANES);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) {
            const TQKV__VECTOR weight = TQKV__(set1)(weights[r * TQKV__TILE + j]);
            TQKV__UNROLL
            for (int i = 0; i < width; i++) sums[r][i] = TQKV__(fma)(weight, x[i], sums[r][i]);
        }
    }
    TQKV__UNROLL
    for (int i = 0; i < rows * width; i++)
        TQKV__(store)(out + i / width * dim + i % width * TQKV__INTEGER_LANES, sums[i / width][i % width]);
}

/* Does the same for all dimensions, 32 or, for few rows on wide vectors, 64 at a time. */
TQKV__OP void TQKV__(add_half_rows)(const int rows, const bool halves, int dim, const uint8_t *codes, size_t stride,
                                    int n, ptrdiff_t ahead, const float *weights, float *out)
{
    const int sixteen = 16 / TQKV__INTEGER_LANES, most = TQKV__INTEGER_LANES == 16 ? 4 : 2;
    const int bytes = halves ? 2 : 4; /* of a value */
    const bool wide = TQKV__INTEGER_LANES == 16 || rows <= 2;
    int d = 0;
    for (; wide && d + 16 * most <= dim; d += 16 * most) {
        const uint8_t *from = codes + bytes * d;
        TQKV__(add_half_vectors)(rows, most * sixteen, halves, dim, from, stride, n, ahead, weights, out + d);
    }
    for (; d < dim; d += 16) {
        const uint8_t *from = codes + bytes * d;
        TQKV__(add_half_vectors)(rows, sixteen, halves, dim, from, stride, n, ahead, weights, out + d);
    }
}

TQKV__OP void TQKV__(add_to_all)(const bool halves, int dim, const uint8_t *codes, size_t stride, int n,
                                 ptrdiff_t ahead, const float *weights, int n_rows, float *out)
{
    for (int left = n_rows, now; left > 0; left -= now, weights += now * TQKV__TILE, out += now * dim) {
        now = TQKV__ROWS_OF(left, TQKV__HALF_ROWS);
        TQKV__WITH_ROWS(now, TQKV__HALF_ROWS, TQKV__(add_half_rows), halves, dim, codes, stride, n, ahead, weights,
                        out);
        ahead = 0;
    }
}

TQKV__LOOP void TQKV__(add_decoded)(const float *values, int dim, int n, const float *weights, int n_rows, float *out)
{
    TQKV__(add_to_all)
    (false, dim, (const uint8_t *)(const void *)values, (size_t)dim * sizeof *values, n, 0, weights, n_rows, out);
}

/* A tile's products of halves, or of TQ8 decoded to floats. of: weights if these are values, else queries; to: outputs,
   or scores, which keys add to or not */
TQKV__LOOP void TQKV__(floats_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, bool values,
                                    const float *of, int n_rows, bool add, float *to)
{
    TQKV__ALIGNED float rows[TQKV__DECODED_FLOATS];
    const uint8_t *codes = tqkv__codes_at(s, kv_head, segment->slot);
    const float *norms = tqkv__norms_at(s, kv_head, segment->slot);
    const int dim = s->head_dim, n = segment->n, fit = TQKV__DECODED_FLOATS / dim / 4 * 4, most = fit > 16 ? 16 : fit;
    const ptrdiff_t ahead = (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes;
    if (s->kind == TQKV__HALF && values)
        TQKV__(add_to_all)(true, dim, codes, s->row_bytes, n, ahead, of, n_rows, to);
    else if (s->kind == TQKV__HALF)
        TQKV__(score_all)(true, dim, codes, s->row_bytes, n, ahead, of, n_rows, add, to);
    for (int j = 0; s->kind != TQKV__HALF && j < n; j += most) {
        const int now = n - j < most ? n - j : most;
        tqkv__prefetch(TQKV__L2, codes + (size_t)j * s->row_bytes + ahead, (size_t)now * s->row_bytes);
        TQKV__(decode_floats)
        (s, codes + (size_t)j * s->row_bytes, norms + j * s->norms_per_row, now, !values, rows);
        if (values)
            TQKV__(add_decoded)(rows, dim, now, of + j, n_rows, to);
        else
            TQKV__(score_decoded)(rows, dim, now, of, n_rows, add, to + j);
    }
}
#endif

/* >>k-halves: halves in integer attention. They are multiplied as floats, in one order for all sets: 16 sums of a key's
   products, added up as sum_16 does; values position after position. */

#ifndef TQKV__DECODED /* true: another set of the same name has these */

/* Rows that share decoded keys, and values. Enough sums in progress to hide their latency,
 * few enough for the registers. */
#define TQKV__HALF_KEY_ROWS (TQKV__INTEGER_LANES == 16 ? 4 : 3)
#define TQKV__HALF_ROWS     (TQKV__INTEGER_LANES == 16 ? 8 : 4)

/* scores[row][j] (+)= query[row] . key j for four keys, which are halves or floats; rows and halves are constants.
   Eight of the 16 sums at a time where registers hold no more. */
TQKV__OP void TQKV__S(score_four_halves)(const int rows, const bool halves, int dim, const uint8_t *const *keys,
                                         const float *q, bool add, float *scores)
{
    enum { ALL = 16 / TQKV__INTEGER_LANES, NOW = TQKV__INTEGER_LANES == 4 ? 2 : 1 };
    TQKV__VECTOR sums[TQKV__HALF_KEY_ROWS][4][ALL];
    TQKV__UNROLL
    for (int first = 0; first < ALL; first += NOW) {
        TQKV__VECTOR now[TQKV__HALF_KEY_ROWS][4][NOW];
        TQKV__UNROLL
        for (int i = 0; i < rows * 4 * NOW; i++) now[i / NOW / 4][i / NOW % 4][i % NOW] = TQKV__(set1)(0.0f);
        for (int d = first * TQKV__INTEGER_LANES; d < dim; d += 16) {
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

/* The same for n keys, `stride` bytes apart; past the end the last one again. */
TQKV__OP void TQKV__S(score_half_rows)(const int rows, const bool halves, int dim, const uint8_t *codes, size_t stride,
                                       int n, const float *q, bool add, float *scores)
{
    for (int j = 0; j < n; j += 4) {
        const uint8_t *keys[4];
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) keys[i] = codes + (size_t)(j + i < n ? j + i : n - 1) * stride;
        TQKV__S(score_four_halves)(rows, halves, dim, keys, q, add, scores + j);
    }
}

/* Many rows read keys that have become floats, a few at a time. */
TQKV__TARGET static TQKV__NOINLINE int TQKV__S(score_many_halves)(const tqkv__stream *s, const uint8_t *codes, int n,
                                                                  const float *q, int n_rows, bool add, float *scores)
{
    enum { ROOM = 4096 }; /* 16 KiB: a fraction of an L1 cache, and of the stack */
    TQKV__ALIGNED float keys[ROOM];
    const int dim = s->head_dim, fit = ROOM / dim / 4 * 4, most = fit > 16 ? 16 : fit;
    const int rows = TQKV__HALF_KEY_ROWS, many = n_rows / rows * rows;
    for (int j = 0; j < n; j += most) {
        const int now = n - j < most ? n - j : most;
        for (int i = 0; i < now * dim; i += TQKV__INTEGER_LANES)
            TQKV__(store)(keys + i, TQKV__(load_f16)(codes + (size_t)j * s->row_bytes + 2 * i));
        for (int row = 0; row < many; row += rows) TQKV__S(score_half_rows)
        (TQKV__HALF_KEY_ROWS, false, dim, (const uint8_t *)(const void *)keys, (size_t)dim * sizeof *keys, now,
         q + row * dim, add, scores + row * TQKV__TILE + j);
    }
    return many;
}

TQKV__TARGET static TQKV__NOINLINE void TQKV__S(score_halves)(const tqkv__stream *s, const uint8_t *codes,
                                                              const tqkv__segment *segment, const float *q, int n_rows,
                                                              bool add, float *scores)
{
    const int dim = s->head_dim, n = segment->n;
    int row = 0;
    tqkv__prefetch(TQKV__L2, codes + (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes, (size_t)n * s->row_bytes);
    if (n_rows > 2) row = TQKV__S(score_many_halves)(s, codes, n, q, n_rows, add, scores);
    for (int now; row < n_rows; row += now) {
        now = row + 2 <= n_rows ? 2 : 1;
        if (now == 2) TQKV__S(score_half_rows)
        (2, true, dim, codes, s->row_bytes, n, q + row * dim, add, scores + row * TQKV__TILE);
        else TQKV__S(score_half_rows)(1, true, dim, codes, s->row_bytes, n, q + row * dim, add,
                                      scores + row * TQKV__TILE);
    }
}

/* out[row][d] += weights[row][j] * value j for `width` vectors of dimensions; rows and width are constants. */
TQKV__OP void TQKV__S(add_half_vectors)(const int rows, const int width, const tqkv__stream *s, const uint8_t *codes,
                                        int n, const float *weights, float *out)
{
    const int dim = s->head_dim;
    TQKV__VECTOR sums[TQKV__HALF_ROWS][8];
    TQKV__UNROLL
    for (int i = 0; i < rows * width; i++)
        sums[i / width][i % width] = TQKV__(load)(out + i / width * dim + i % width * TQKV__INTEGER_LANES);
    for (int j = 0; j < n; j++, codes += s->row_bytes) {
        TQKV__VECTOR x[8];
        TQKV__UNROLL
        for (int i = 0; i < width; i++) x[i] = TQKV__(load_f16)(codes + 2 * i * TQKV__INTEGER_LANES);
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

/* The same for all dimensions, 32 or, for few rows on wide vectors, 64 at a time. */
TQKV__OP void TQKV__S(add_half_rows)(const int rows, const tqkv__stream *s, const uint8_t *codes, int n,
                                     const float *weights, float *out)
{
    const int sixteen = 16 / TQKV__INTEGER_LANES, most = TQKV__INTEGER_LANES == 16 && rows <= 2 ? 4 : 2;
    const bool wide = TQKV__INTEGER_LANES == 16 || rows <= 2;
    int d = 0;
    for (; wide && d + 16 * most <= s->head_dim; d += 16 * most)
        TQKV__S(add_half_vectors)(rows, most * sixteen, s, codes + 2 * d, n, weights, out + d);
    for (; d < s->head_dim; d += 16) TQKV__S(add_half_vectors)(rows, sixteen, s, codes + 2 * d, n, weights, out + d);
}

TQKV__TARGET static TQKV__NOINLINE void TQKV__S(add_halves)(const tqkv__stream *s, const uint8_t *codes,
                                                            const tqkv__segment *segment, const float *weights,
                                                            int n_rows, float *out)
{
    const int n = segment->n;
    tqkv__prefetch(TQKV__L2, codes + (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes, (size_t)n * s->row_bytes);
    for (int left = n_rows, now; left > 0; left -= now, weights += now * TQKV__TILE, out += now * s->head_dim) {
        now = left >= TQKV__HALF_ROWS ? TQKV__HALF_ROWS : left >= 2 ? 2 : 1;
        if (now == 1)
            TQKV__S(add_half_rows)(1, s, codes, n, weights, out);
        else if (now == 2)
            TQKV__S(add_half_rows)(2, s, codes, n, weights, out);
        else
            TQKV__S(add_half_rows)(TQKV__HALF_ROWS, s, codes, n, weights, out);
    }
}
#endif

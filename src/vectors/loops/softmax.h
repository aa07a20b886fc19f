/* >>k-softmax: exp and tanh, weights out of scores, and sums of heads. */

/* Terms of e^x - 1 = power * tail + (power - 1) for x in [-87, 0]: x = n ln2 + r, power = 2^n, tail = e^r - 1 by
   Taylor's series to r^7. The rest of the series is below float's last bit for |r| <= ln2/2. */
TQKV__OP void TQKV__(exp_terms)(TQKV__VECTOR x, TQKV__VECTOR *power, TQKV__VECTOR *tail)
{
    const TQKV__VECTOR n = TQKV__(round)(x * TQKV__(set1)(1.44269504f));
    TQKV__VECTOR r = TQKV__(fma)(n, TQKV__(set1)(-0.693359375f), x); /* ln2 as a sum; n times the first is exact */
    r = TQKV__(fma)(n, TQKV__(set1)(2.12194440e-4f), r);
    TQKV__VECTOR p = TQKV__(set1)(tqkv__series[0]);
    TQKV__UNROLL
    for (int i = 1; i < 7; i++) p = TQKV__(fma)(p, r, TQKV__(set1)(tqkv__series[i]));
    *tail = p * r;
    *power = TQKV__(exp2)(n);
}

/* e^x for x <= 0; 0 below -87, where 2^n leaves the normal floats. */
TQKV__OP TQKV__VECTOR TQKV__(exp)(TQKV__VECTOR x)
{
    TQKV__VECTOR power, tail;
    TQKV__(exp_terms)(TQKV__(max)(TQKV__(set1)(-87.0f), x), &power, &tail); /* NaN stays NaN */
    return TQKV__(zero_below)(TQKV__(set1)(-87.0f), x, TQKV__(fma)(power, tail, power));
}

/* tanh(x) = -m/(2 + m) with m = e^(-2|x|) - 1, which keeps its precision near 0. */
TQKV__TARGET static TQKV__VECTOR TQKV__(tanh)(TQKV__VECTOR x)
{
    TQKV__VECTOR power, tail;
    const TQKV__VECTOR doubled = TQKV__(abs)(x) * TQKV__(set1)(-2.0f);
    TQKV__(exp_terms)(TQKV__(max)(TQKV__(set1)(-40.0f), doubled), &power, &tail);
    const TQKV__VECTOR m = TQKV__(fma)(power, tail, power - TQKV__(set1)(1.0f));
    return TQKV__(copysign)(TQKV__(abs)(m) / (TQKV__(set1)(2.0f) + m), x);
}

/* Turns a row's scores into weights and returns their sum; -infinity gives 0. x: [TQKV__TILE] */
TQKV__TARGET static float TQKV__(weigh)(float *x, float max)
{
    const TQKV__VECTOR peak = TQKV__(set1)(max);
    TQKV__VECTOR total[16 / TQKV__LANES]; /* 16 sums in every set: see >>integer */
    TQKV__UNROLL
    for (int i = 0; i < 16 / TQKV__LANES; i++) total[i] = TQKV__(set1)(0.0f);
    TQKV__UNROLL
    for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
        const TQKV__VECTOR weight = TQKV__(exp)(TQKV__(load)(x + j) - peak);
        TQKV__(store)(x + j, weight);
        total[j / TQKV__LANES % (16 / TQKV__LANES)] += weight;
    }
    return TQKV__(sum_16)(total);
}

/* Sets the scores outside the span to `value`; some of them were never computed. */
TQKV__OP void TQKV__(mask)(float *x, tqkv__span span, float value)
{
    static const uint32_t first[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint32_t from = (uint32_t)span.from, size = (uint32_t)(span.to - span.from), bits = tqkv__bits(value);
    TQKV__(words) places, scores;
    memcpy(&places, first, sizeof places);
    places -= from;
    for (int j = 0; j < TQKV__TILE && size < TQKV__TILE; j += TQKV__LANES, places += TQKV__LANES) {
        const TQKV__(words) inside = (TQKV__(words))(places < size); /* all ones, or 0 */
        memcpy(&scores, x + j, sizeof scores);
        scores = (scores & inside) | (bits & ~inside);
        memcpy(x + j, &scores, sizeof scores);
    }
    for (uint64_t left = span.hidden; left; left &= left - 1) x[__builtin_ctzll(left)] = value;
}

/* Three passes over the rows, without dependencies from row to row. Rows that see nothing skip the arithmetic, because
   their maximum may be -infinity. */
TQKV__TARGET static void TQKV__(softmax_tile)(const tqkv__attention *a, const tqkv__span *spans, const float *offsets,
                                              int n_rows, float *scores, float *max, float *sum, float *out)
{
    float shrink[TQKV__CHUNK_ROWS];
    const float softcap = a->call.softcap;
    for (int row = 0; row < n_rows; row++) {
        float *x = scores + row * TQKV__TILE;
        const bool seen = spans[row].to > spans[row].from;
        TQKV__VECTOR largest = TQKV__(set1)(max[row]);
        TQKV__(mask)(x, spans[row], seen && softcap == 0.0f ? -INFINITY : 0.0f);
        shrink[row] = 0.0f;
        if (!seen) continue;
        if (softcap > 0.0f)
            for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
                const TQKV__VECTOR ratio = (TQKV__(load)(x + j) + TQKV__(set1)(offsets[row])) / TQKV__(set1)(softcap);
                TQKV__(store)(x + j, TQKV__(fma)(TQKV__(tanh)(ratio), TQKV__(set1)(softcap), TQKV__(set1)(0.0f)));
            }
        if (softcap > 0.0f) TQKV__(mask)(x, spans[row], -INFINITY);
        TQKV__UNROLL
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) largest = TQKV__(max)(TQKV__(load)(x + j), largest);
        const float peak = TQKV__(largest_lane)(largest);
        shrink[row] = max[row] - peak;
        max[row] = peak;
    }
    for (int row = 0; row < n_rows; row++) {
        if (!(shrink[row] < 0.0f)) continue;
        const TQKV__VECTOR factor = TQKV__(exp)(TQKV__(set1)(shrink[row]));
        float *sums = out + (size_t)row * (size_t)a->value_dim;
        for (int d = 0; d < a->value_dim; d += TQKV__LANES) TQKV__(store)(sums + d, TQKV__(load)(sums + d) * factor);
        sum[row] *= factor[0];
    }
    for (int row = 0; row < n_rows; row++)
        if (spans[row].to > spans[row].from) sum[row] += TQKV__(weigh)(scores + row * TQKV__TILE, max[row]);
}

TQKV__TARGET static void TQKV__(end_piece)(int n_rows, int value_dim, const tqkv__sums *piece, const tqkv__sums *sums)
{
    const TQKV__VECTOR zero = TQKV__(set1)(0.0f);
    for (int row = 0; row < n_rows; row++) {
        float *added = piece->out + (size_t)row * (size_t)value_dim, *to = sums->out + (size_t)row * (size_t)value_dim;
        const TQKV__VECTOR sum = TQKV__(set1)(piece->sum[row]);
        if (piece->sum[row] == 0.0f) continue;
        const TQKV__VECTOR factor = TQKV__(exp)(TQKV__(set1)(tqkv__loss(sums->max[row], piece->max[row])));
        for (int d = 0; d < value_dim; d += TQKV__LANES) {
            TQKV__(store)(to + d, TQKV__(fma)(TQKV__(load)(to + d), factor, TQKV__(load)(added + d)));
            TQKV__(store)(added + d, zero);
        }
        sums->sum[row] = TQKV__(fma)(TQKV__(set1)(sums->sum[row]), factor, sum)[0];
        sums->max[row] = piece->max[row];
        piece->sum[row] = 0.0f;
    }
}

TQKV__TARGET static void TQKV__(sum_heads)(const float *scores, const float *weights, const float *offsets, bool relu,
                                           int n_rows, float *sums)
{
    const TQKV__VECTOR least = TQKV__(set1)(relu ? 0.0f : -INFINITY);
    for (int row = 0; row < n_rows; row++, scores += TQKV__TILE) {
        const TQKV__VECTOR weight = TQKV__(set1)(weights[row]), offset = TQKV__(set1)(offsets[row]);
        TQKV__UNROLL
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
            const TQKV__VECTOR score = TQKV__(max)(least, TQKV__(load)(scores + j) + offset);
            TQKV__(store)(sums + j, TQKV__(fma)(weight, score, TQKV__(load)(sums + j)));
        }
    }
}

/* Finds the factors of a tile's codes, per panel and position; see tqkv__norm_of_key. factors: [n_panels][TQKV__TILE],
   zero beyond n */
TQKV__TARGET static void TQKV__(factors)(const tqkv__stream *s, const float *norms, const tqkv__segment *segment,
                                         bool keys, float *factors)
{
    const TQKV__VECTOR zero = TQKV__(set1)(0.0f);
    const int dim = s->head_dim, per_row = s->norms_per_row, n = segment->n;
    const bool divided = per_row > 1 && s->kind == TQKV__BOOK && s->block_scale != 1.0f;
    const TQKV__VECTOR factor = TQKV__(set1)(divided ? 1.0f : tqkv__factor(s, 1.0f));
    for (int d = 0; d < dim; d += s->panel_dim, factors += TQKV__TILE) {
        const float *norm = per_row > 1 ? norms + d / s->norm_dim : norms;
        if (per_row > 1 || n < TQKV__TILE) {
            for (int j = 0; j < n; j++, norm += per_row) factors[j] = *norm;
            for (int j = n; j < TQKV__TILE; j++) factors[j] = 0.0f;
            norm = factors;
        }
        for (int j = 0; divided && j < TQKV__TILE; j += TQKV__LANES)
            TQKV__(store)(factors + j, TQKV__(load)(factors + j) / TQKV__(set1)(s->block_scale));
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
            TQKV__VECTOR x = TQKV__(load)(norm + j) * factor;
            if (keys) x = x + x * zero;
            TQKV__(store)(factors + j, x);
        }
    }
}

/* >>k-search: the factors of a few rows, by vectors; what tqkv__search_row does with one. */

/* The scaled values of a row in the order that the sums take: element e of the lanes of a vector side by side, a vector
   of each lane's next element n_lanes further on. So the sums of lanes are sums of vectors. Magnitudes are enough:
   codebooks are symmetric, a value has the sign of its centroid, and a product of 0 adds nothing. */
typedef struct TQKV__(turned) {
    TQKV__ALIGNED float sizes[TQKV_MAX_HEAD_DIM + 128];
    TQKV__ALIGNED int32_t less[TQKV_MAX_HEAD_DIM + 128]; /* -1 for positive values, see TQKV__(fold) */
    TQKV__ALIGNED uint32_t found[TQKV_MAX_HEAD_DIM];     /* see TQKV__(find) */
} TQKV__(turned);

/* NaN becomes infinity, which is no larger with any factor either, and has the square of NaN's code. */
TQKV__OP void TQKV__(turn_value)(TQKV__(turned) * t, int at, TQKV__VECTOR v)
{
    const TQKV__(words) positive = (TQKV__(words))(v > TQKV__(set1)(0.0f));
    TQKV__(store)(t->sizes + at, TQKV__(abs)(TQKV__(max)(v, TQKV__(set1)(-INFINITY))));
    memcpy(t->less + at, &positive, sizeof positive);
}

/* Lanes of three values and more: loads of four neighbours; reads up to three floats behind the last lane. Shorter
   ones: a load has the values of two or four lanes, which come to different vectors. per_lane: a constant for 1, 2 and
   4. v: [head_dim] */
TQKV__OP void TQKV__(turn_values)(const int per_lane, int n_lanes, const float *v, TQKV__(turned) * t)
{
    const int together = per_lane < 3 ? 4 / per_lane : 1, width = together * per_lane;
    for (int lane = 0; lane < n_lanes; lane += together * TQKV__LANES)
        for (int e = 0; e < width; e += 4) {
            TQKV__VECTOR four[4];
            TQKV__UNROLL
            for (int i = 0; i < 4; i++) four[i] = TQKV__(load_fours)(v + lane * per_lane + i * width + e, 4 * width);
            TQKV__(transpose)(4, four);
            TQKV__UNROLL
            for (int i = 0; i < 4; i++)
                if (per_lane < 3)
                    TQKV__(turn_value)(t, i % per_lane * n_lanes + lane + i / per_lane * TQKV__LANES, four[i]);
                else if (e + i < width)
                    TQKV__(turn_value)(t, (e + i) * n_lanes + lane, four[i]);
        }
}

/* y: [head_dim], scales: [norms_per_row] -> v: scaled, [head_dim] and room for three more, and turned */
TQKV__OP void TQKV__(turn_row)(const tqkv__stream *s, const float *y, const float *scales, float *v, TQKV__(turned) * t)
{
    const int n_lanes = TQKV__NORM_LANES(s->head_dim), per_lane = s->head_dim / n_lanes;
    for (int b = 0, d = 0; b < s->norms_per_row; b++)
        for (const int end = d + s->norm_dim; d < end; d += TQKV__LANES)
            TQKV__(store)(v + d, TQKV__(load)(y + d) * TQKV__(set1)(scales[b]));
    if (per_lane == 1)
        TQKV__(turn_values)(1, n_lanes, v, t);
    else if (per_lane == 2)
        TQKV__(turn_values)(2, n_lanes, v, t);
    else if (per_lane == 4)
        TQKV__(turn_values)(4, n_lanes, v, t);
    else
        TQKV__(turn_values)(per_lane, n_lanes, v, t);
}

/* Codebooks whose tables do not fit registers */
#define TQKV__IS_LARGE(bits) ((bits) > (TQKV__LANES == 16 ? 6 : 4))

/* Returns sizes times a factor, and the next float below where the value is positive: see TQKV__(fold). */
TQKV__OP TQKV__VECTOR TQKV__(sizes_times)(const TQKV__(turned) * t, int at, TQKV__VECTOR factor)
{
    const TQKV__VECTOR size = TQKV__(load)(t->sizes + at) * factor;
    TQKV__VECTOR w;
    TQKV__(words) bits, less;
    memcpy(&bits, &size, sizeof bits);
    memcpy(&less, t->less + at, sizeof less);
    bits += less;
    memcpy(&w, &bits, sizeof w);
    return w;
}

/* The tables of a codebook of up to 6 bits, in registers: vectors of 16 floats at least, which one permutation reads */
#define TQKV__BOOK_VECTORS (TQKV__LANES == 4 ? 4 : 2)
typedef struct TQKV__(book) {
    TQKV__VECTOR top, bounds[TQKV__BOOK_VECTORS], centroids[TQKV__BOOK_VECTORS];
    TQKV__(codes) below[4];
} TQKV__(book);

TQKV__OP void TQKV__(load_book)(const int bits, const tqkv__quantiser *q, TQKV__(book) * book)
{
    book->top = TQKV__(set1)(q->top);
    if (bits <= 6) TQKV__(load_below)(bits, q->below, book->below);
    for (int i = 0; i < TQKV__BOOK_VECTORS; i++) {
        book->bounds[i] = TQKV__(load)(q->bounds + i * TQKV__LANES);
        book->centroids[i] = TQKV__(load)(q->centroids + i * TQKV__LANES);
    }
}

/* Returns the cells of sizes times a factor. slope: that of cells, times the factor */
TQKV__OP TQKV__(codes) TQKV__(cells)(const TQKV__(turned) * t, int at, TQKV__VECTOR slope, TQKV__VECTOR top)
{
    return TQKV__(truncate)(TQKV__(min)(TQKV__(load)(t->sizes + at) * slope, top));
}

/* Finds what nearest takes of a large codebook, for all values of a row: their centroids, or their cells. */
TQKV__OP void TQKV__(find)(const tqkv__stream *s, const tqkv__quantiser *q, TQKV__VECTOR factor, TQKV__VECTOR slope,
                           TQKV__(turned) * t)
{
    const TQKV__VECTOR top = TQKV__(set1)(q->top);
#if TQKV__LANES == 16
    uint8_t *codes = (uint8_t *)t->found + sizeof t->found - TQKV_MAX_HEAD_DIM; /* read before centroids come there */
    for (int at = 0; at < s->head_dim; at += 64) {                              /* the last may be beyond the row */
        TQKV__VECTOR w[4];
        TQKV__(codes) cells[4];
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) {
            w[i] = TQKV__(sizes_times)(t, at + 16 * i, factor);
            cells[i] = TQKV__(cells)(t, at + 16 * i, slope, top);
        }
        TQKV__(search_tq8)(q, cells, w, codes + at);
    }
    for (int at = 0; at < s->head_dim; at += 64) TQKV__(centroids_tq8)(s, codes + at, t->found + at);
#else
    (void)factor;
    for (int at = 0; at < s->head_dim; at += TQKV__LANES) {
        const TQKV__(codes) cells = TQKV__(cells)(t, at, slope, top);
        memcpy(t->found + at, &cells, sizeof cells);
    }
#endif
}

/* Returns the centroids of sizes_times or, TQ8 on vectors of 16, their negatives; bits is a constant. For 3 bits three
   comparisons are quicker than a cell. Of a large codebook one load takes the bound and the centroids of a cell. */
TQKV__OP TQKV__VECTOR TQKV__(nearest)(const int bits, const tqkv__quantiser *q, const TQKV__(book) * book,
                                      const TQKV__(turned) * t, int at, TQKV__VECTOR factor, TQKV__VECTOR slope)
{
    const TQKV__VECTOR w = TQKV__(sizes_times)(t, at, factor);
    TQKV__(codes) index;
    TQKV__VECTOR entries[3];
    memset(&index, 0, sizeof index);
    const TQKV__(codes) none = index;
    if (TQKV__IS_LARGE(bits) && TQKV__LANES == 16) {
        memcpy(entries, t->found + at, sizeof *entries);
        return *entries;
    }
    if (TQKV__IS_LARGE(bits)) {
        TQKV__(load_entries)(q->entries, t->found + at, entries);
        return TQKV__(choose)(entries[0], w, entries[1], entries[2]);
    }
    if (bits == 3) {
        TQKV__UNROLL
        for (int b = 0; b < 3; b++) index = TQKV__(code_from)(index, TQKV__(set1)(q->bounds[b]), w, none);
        return TQKV__(bound)(bits, book->centroids, index);
    }
    index = TQKV__(below)(bits, book->below, TQKV__(cells)(t, at, slope, book->top));
    index = TQKV__(code_from)(index, TQKV__(bound)(bits, book->bounds, index), w, none);
    return TQKV__(bound)(bits, book->centroids, index);
}

/* Finds the sums of v*c and of c*c of each lane: lanes[2f], lanes[2f + 1] of factor f */
enum { TQKV__(sums_tried) = 2 * TQKV__MOST_FACTORS };
TQKV__OP void TQKV__(try_factors)(const int bits, const tqkv__stream *s, const tqkv__quantiser *q, TQKV__(turned) * t,
                                  float (*lanes)[32])
{
    const int n_lanes = TQKV__NORM_LANES(s->head_dim);
    TQKV__(book) book;
    TQKV__(load_book)(bits, q, &book);
    for (int f = 0; f < TQKV__MOST_FACTORS; f++) {
        const TQKV__VECTOR factor = TQKV__(set1)(s->factors[f]), slope = TQKV__(set1)(s->factors[f] * q->slope);
        if (TQKV__IS_LARGE(bits)) TQKV__(find)(s, q, factor, slope, t);
        for (int lane = 0; lane < n_lanes; lane += TQKV__LANES) {
            TQKV__VECTOR products = TQKV__(set1)(0.0f), squares = products;
            for (int at = lane; at < s->head_dim; at += n_lanes) {
                const TQKV__VECTOR c = TQKV__(nearest)(bits, q, &book, t, at, factor, slope);
                products += TQKV__(rounded)(TQKV__(load)(t->sizes + at) * c);
                squares += TQKV__(rounded)(c * c);
            }
            TQKV__(store)(lanes[2 * f] + lane, products);
            TQKV__(store)(lanes[2 * f + 1] + lane, squares);
        }
    }
}

/* Adds lanes that are 1 << stage apart: lanes with that bit clear have the sums of a, the others those of b. */
TQKV__OP TQKV__VECTOR TQKV__(add_pairs)(const int stage, TQKV__VECTOR a, TQKV__VECTOR b)
{
    return TQKV__(even)(stage, a, b) + TQKV__(odd)(stage, a, b);
}

/* The xor-tree of tqkv__sums_of_products over `together` vectors of lanes, for all sums: sum k in x[k / LANES], lane
   k % LANES. Of 16 lanes where a norm has 8 lanes, the last step is left out. */
TQKV__OP void TQKV__(add_tried)(const float (*lanes)[32], int at, int together, bool whole, TQKV__VECTOR *x)
{
    TQKV__UNROLL
    for (int k = 0; k < TQKV__(sums_tried); k++) {
        const float *from = lanes[k] + at;
        x[k] = TQKV__(load)(from);
        if (together > 1) x[k] += TQKV__(load)(from + TQKV__LANES);
        if (together > 2) x[k] += TQKV__(load)(from + 2 * TQKV__LANES) + TQKV__(load)(from + 3 * TQKV__LANES);
    }
    TQKV__UNROLL
    for (int stage = 0; stage < 4; stage++) {
        const int last = (TQKV__(sums_tried) - 1) >> stage;
        if (1 << stage >= TQKV__LANES || (stage == 3 && !whole)) continue;
        TQKV__UNROLL
        for (int i = 0; i < TQKV__(sums_tried); i += 2)
            if (i <= last) x[i / 2] = TQKV__(add_pairs)(stage, x[i], x[i < last ? i + 1 : i]);
    }
}

/* lanes, of `together` vectors whose values came in one load -> sums: [n_norms][16] */
TQKV__OP void TQKV__(add_norms)(int n_lanes, int together, int n_norms, const float (*lanes)[32], float (*sums)[16])
{
    enum { vectors = (TQKV__(sums_tried) + TQKV__LANES - 1) / TQKV__LANES };
    const int step = together * TQKV__LANES, per_norm = n_lanes / step / n_norms;
    TQKV__VECTOR x[TQKV__(sums_tried)], all[8][vectors];
    for (int b = 0; b < n_norms && per_norm; b++, sums++) {
        for (int g = 0; g < per_norm; g++) {
            TQKV__(add_tried)(lanes, (b * per_norm + g) * step, together, true, x);
            TQKV__UNROLL
            for (int i = 0; i < vectors; i++) all[g][i] = x[i];
        }
        for (int distance = 1; distance < per_norm; distance *= 2)
            for (int g = 0; g < per_norm; g += 2 * distance) {
                TQKV__UNROLL
                for (int i = 0; i < vectors; i++) all[g][i] += all[g + distance][i];
            }
        memcpy(sums, all[0], sizeof all[0]);
    }
    for (int b = 0; b < n_norms && !per_norm && TQKV__LANES == 16; b += 2, sums += 2) {
        TQKV__(add_tried)(lanes, b * 8, 1, false, x);
        TQKV__(store)(sums[0], TQKV__(even)(3, x[0], x[1]));
        TQKV__(store)(sums[1], TQKV__(odd)(3, x[0], x[1]));
    }
}

/* Turns one row and tries the factors: sums as in add_norms */
TQKV__TARGET static TQKV__NOINLINE void TQKV__(search_row)(const tqkv__stream *s, const tqkv__quantiser *q,
                                                           const float *y, const float *scales, float *v,
                                                           float (*sums)[16])
{
    TQKV__(turned) t;
    TQKV__ALIGNED float lanes[TQKV__(sums_tried)][32];
    const int n_lanes = TQKV__NORM_LANES(s->head_dim), per_lane = s->head_dim / n_lanes;
    TQKV__(turn_row)(s, y, scales, v, &t);
    if (s->book_bits == 3)
        TQKV__(try_factors)(3, s, q, &t, lanes);
    else if (s->book_bits == 4 || (s->book_bits == 5 && TQKV__LANES == 16)) /* the same code there */
        TQKV__(try_factors)(4, s, q, &t, lanes);
    else if (s->book_bits == 6 && TQKV__LANES == 16)
        TQKV__(try_factors)(6, s, q, &t, lanes);
    else
        TQKV__(try_factors)(8, s, q, &t, lanes);
    TQKV__(add_norms)(n_lanes, per_lane < 3 ? 4 / per_lane : 1, s->norms_per_row, (const float(*)[32])lanes, sums);
}

/* Finds the best factors of n norms, each the first of the largest (sum v*c)^2 / (sum c*c), and their sums of c*c.
   tried: [n][16], factors, squares: [n]; room for whole vectors */
TQKV__OP void TQKV__(choose_factors)(const tqkv__stream *s, int n, float (*tried)[16], float *factors, float *squares)
{
    for (int first = 0; first < n; first += TQKV__LANES) {
        TQKV__ALIGNED float sums[TQKV__(sums_tried)][TQKV__LANES];
        TQKV__VECTOR best = TQKV__(set1)(0.0f), factor = best, square = best;
        for (int k = 0; k < TQKV__(sums_tried); k++)
            for (int i = 0; i < TQKV__LANES; i++) sums[k][i] = first + i < n ? tried[first + i][k] : 1.0f;
        for (int f = 0; f < TQKV__MOST_FACTORS; f++) {
            const TQKV__VECTOR u = TQKV__(load)(sums[2 * f]), t = TQKV__(load)(sums[2 * f + 1]);
            const TQKV__VECTOR share = TQKV__(rounded)(u * u) / t;
            factor = f ? TQKV__(choose)(share, best, TQKV__(set1)(s->factors[f]), factor) : TQKV__(set1)(s->factors[f]);
            square = f ? TQKV__(choose)(share, best, t, square) : t;
            best = f ? TQKV__(choose)(share, best, share, best) : share;
        }
        TQKV__(store)(factors + first, factor);
        TQKV__(store)(squares + first, square);
    }
}

/* Scales a few rows; then their scales become the factors of the search. values: [n_rows], of which each becomes a row
   of `rows`, [n_rows][head_dim] and room for three more; scales, squares: [n_rows][norms_per_row] and room for whole
   vectors */
TQKV__TARGET static void TQKV__(search)(const tqkv__stream *s, const tqkv__quantiser *q, int n_rows,
                                        const float **values, float *rows, float *scales, float *squares)
{
    float tried[16][16];
    const int n = s->norms_per_row, step = 16 / n;
    for (int first = 0; first < n_rows; first += step) {
        const int end = first + step < n_rows ? first + step : n_rows;
        for (int i = first; i < end; i++, rows += s->head_dim) {
            TQKV__(search_row)(s, q, values[i], scales + i * n, rows, tried + (i - first) * n);
            values[i] = rows;
        }
        TQKV__(choose_factors)(s, (end - first) * n, tried, scales + first * n, squares + first * n);
    }
}

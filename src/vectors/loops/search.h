/* >>k-search: the factors of a row's norms, by vectors: does what tqkv__search_block does. */

/* The scaled values of a row. Magnitudes are enough: codebooks are symmetric, a value has the sign of its centroid, and
   a product of 0 adds nothing. */
typedef struct TQKV__(sizes) {
    TQKV__ALIGNED float sizes[TQKV_MAX_HEAD_DIM];
    TQKV__ALIGNED int32_t less[TQKV_MAX_HEAD_DIM + 32]; /* -1 for positive values, see TQKV__(fold) */
    TQKV__ALIGNED uint32_t cells[TQKV_MAX_HEAD_DIM];    /* of a codebook whose tables do not fit registers */
} TQKV__(sizes);

/* Returns sizes times a factor, and the next float below where the value is positive: see TQKV__(fold). */
TQKV__OP TQKV__VECTOR TQKV__(sizes_times)(const TQKV__(sizes) * t, int at, TQKV__VECTOR factor)
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

/* The tables of a codebook of up to 4 bits, in registers */
typedef struct TQKV__(book) {
    TQKV__VECTOR top, bounds[8 / TQKV__LANES], centroids[8 / TQKV__LANES];
    TQKV__(codes) n_below;
} TQKV__(book);

/* Returns the cells of sizes times a factor. slope: that of cells, times the factor */
TQKV__OP TQKV__(codes) TQKV__(cells)(const TQKV__(sizes) * t, int at, TQKV__VECTOR slope, TQKV__VECTOR top)
{
    return TQKV__(truncate)(TQKV__(min)(TQKV__(load)(t->sizes + at) * slope, top));
}

/* Returns the centroids of sizes_times; bits is a constant: 4 for at most as many, else 8. Of a large codebook one load
   has all of a cell. */
TQKV__OP TQKV__VECTOR TQKV__(nearest)(const int bits, const tqkv__quantiser *q, const TQKV__(book) * book,
                                      const TQKV__(sizes) * t, int at, TQKV__VECTOR factor, TQKV__VECTOR slope)
{
    const TQKV__VECTOR w = TQKV__(sizes_times)(t, at, factor);
    TQKV__(codes) none;
    TQKV__VECTOR cell[4];
    if (bits == 8) {
        TQKV__(load_cells)(q->cells, t->cells + at, cell);
        return TQKV__(choose)(cell[0], w, cell[1], cell[2]);
    }
    memset(&none, 0, sizeof none);
    const TQKV__(codes) below = TQKV__(look_up_16)(book->n_below, TQKV__(cells)(t, at, slope, book->top));
    const TQKV__VECTOR bound = TQKV__(look_up_8)(book->bounds, below);
    return TQKV__(look_up_8)(book->centroids, TQKV__(code_from)(below, bound, w, none));
}

/* Finds the sums of v*c and of c*c over values [from, to) under factor f. */
TQKV__OP void TQKV__(try_factor)(const int bits, const tqkv__stream *s, const tqkv__quantiser *q,
                                 const TQKV__(book) * book, int f, int from, int to, TQKV__(sizes) * t, float *sums)
{
    const TQKV__VECTOR factor = TQKV__(set1)(s->factors[f]), slope = TQKV__(set1)(s->factors[f] * q->slope);
    TQKV__VECTOR products[16 / TQKV__LANES], squares[16 / TQKV__LANES];
    for (int at = from; bits == 8 && at < to; at += TQKV__LANES) { /* a load soon after would wait for the store */
        const TQKV__(codes) cells = TQKV__(cells)(t, at, slope, book->top);
        memcpy(t->cells + at, &cells, sizeof cells);
    }
    TQKV__UNROLL
    for (int k = 0; k < 16 / TQKV__LANES; k++) products[k] = squares[k] = TQKV__(set1)(0.0f);
    for (int at = from; at < to; at += 16) {
        TQKV__UNROLL
        for (int k = 0; k < 16 / TQKV__LANES; k++) {
            const int i = at + k * TQKV__LANES;
            const TQKV__VECTOR c = TQKV__(nearest)(bits, q, book, t, i, factor, slope);
            products[k] += TQKV__(rounded)(TQKV__(load)(t->sizes + i) * c);
            squares[k] += TQKV__(rounded)(c * c);
        }
    }
    sums[0] = TQKV__(sum_16)(products);
    sums[1] = TQKV__(sum_16)(squares);
}

/* Finds the best factor of each norm, the first of the largest (sum of v*c)^2 / (sum of c*c), and its sum of c*c. All
   lanes have the same numbers: a comparison of floats would be a branch. */
TQKV__OP void TQKV__(search_as)(const int bits, const tqkv__stream *s, const tqkv__quantiser *q, TQKV__(sizes) * t,
                                float *factors, float *squares)
{
    TQKV__(book) book;
    book.top = TQKV__(set1)(q->top);
    book.n_below = TQKV__(load_16)(q->n_below);
    for (int i = 0; i < 8 / TQKV__LANES; i++) {
        book.bounds[i] = TQKV__(load)(q->bounds + i * TQKV__LANES);
        book.centroids[i] = TQKV__(load)(q->centroids + i * TQKV__LANES);
    }
    for (int b = 0; b < s->norms_per_row; b++) {
        TQKV__VECTOR best = TQKV__(set1)(-1.0f), factor = best, square = best;
        for (int f = 0; f < TQKV__MOST_FACTORS; f++) {
            float sums[2];
            TQKV__(try_factor)(bits, s, q, &book, f, b * s->norm_dim, (b + 1) * s->norm_dim, t, sums);
            const TQKV__VECTOR u = TQKV__(set1)(sums[0]), c = TQKV__(set1)(sums[1]);
            /* Hidden, or clang multiplies by the reciprocal of a scalar under -freciprocal-math. */
            const TQKV__VECTOR share = TQKV__(rounded)(u * u) / TQKV__(rounded)(c);
            factor = TQKV__(choose)(share, best, TQKV__(set1)(s->factors[f]), factor);
            square = TQKV__(choose)(share, best, c, square);
            best = TQKV__(choose)(share, best, share, best);
        }
        factors[b] = factor[0];
        squares[b] = square[0];
    }
}

/* Scales a row, y to v: [head_dim]. Its scales become the factors of the search. NaN becomes infinity, which is no
   larger with any factor either. scales, squares: [norms_per_row] */
TQKV__LOOP void TQKV__(search_row)(const tqkv__stream *s, const tqkv__quantiser *q, const float *y, float *v,
                                   float *scales, float *squares)
{
    TQKV__(sizes) t;
    for (int d = 0; d < s->head_dim; d += TQKV__LANES) {
        const TQKV__VECTOR x = TQKV__(load)(y + d) * TQKV__(set1)(scales[d / s->norm_dim]);
        const TQKV__(words) positive = (TQKV__(words))(x > TQKV__(set1)(0.0f));
        TQKV__(store)(v + d, x);
        TQKV__(store)(t.sizes + d, TQKV__(abs)(TQKV__(max)(x, TQKV__(set1)(-INFINITY))));
        memcpy(t.less + d, &positive, sizeof positive);
    }
    if (s->book_bits <= 4)
        TQKV__(search_as)(4, s, q, &t, scales, squares);
    else
        TQKV__(search_as)(8, s, q, &t, scales, squares);
}

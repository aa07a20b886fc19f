/* >>integer-kernels: the loops of >>integer, written once. Codes become bytes, in the order of their dimensions. A lane of
   32 bits adds up TQKV__PRODUCTS products: two of words, to which the bytes are widened, or four or eight of bytes with
   the high and the low bytes of an integer, in two sums. What a set brings besides its floats, with TQKV__(codes) for a
   vector of TQKV__INTEGER_LANES lanes, as TQKV__S(name) if it has nothing to do with products, else as TQKV__I(name):

     load_books, look_up        codes to bytes, TQKV__STEP of them
     open, dot, whole           bytes of a key as dot takes them; products added to a sum; the sum in one integer a lane
     interleave                 bytes of TQKV__PRODUCTS values to lanes, a dimension of all in each
     round_codes, store_words   floats to integers, lanes to the 16 bits in which products find them, from `i` on
     load_row, repeat           those of a vector of dimensions, those of TQKV__PRODUCTS positions in each lane
     transpose                  16 bytes of TQKV__INTEGER_LANES positions to lanes, as repeat has TQKV__PRODUCTS integers
     lanes, repeated, dot_lanes, whole_lanes   as codes, row, dot, whole, for lanes of eight products
     TQKV__LOOKED_UP            whether few rows multiply codes without storing their bytes first: with load_part, or with
                                load_quarters, order_fields and look_up_fields, and with dot_bytes                     */
#ifdef TQKV__INTEGER_LANES

#define TQKV__VECTOR TQKV__(vector)
/* Integers that decode_codes writes and that interleave reads of a row; rows of integers are padded to that. */
#define TQKV__STEP        (4 * TQKV__INTEGER_LANES)
#define TQKV__PADDED(dim) (((dim) + TQKV__STEP - 1) / TQKV__STEP * TQKV__STEP)
#define TQKV__BYTES       (4 * TQKV__INTEGER_LANES) /* of a vector, of lanes: */
#define TQKV__LANE_BYTES  ((int)sizeof(TQKV__I(lanes)))
#define TQKV__WORDS       ((TQKV__PRODUCTS == 2 ? 2 : 4) * TQKV__INTEGER_LANES) /* multiplied with a vector of codes */
/* Keys that are decoded together. */
#define TQKV__SLICE  16
#define TQKV__SLICES (2 * TQKV__INTEGER_LANES > TQKV__SLICE ? 2 * TQKV__INTEGER_LANES : TQKV__SLICE)
#ifndef TQKV__LANES_ROWS
#define TQKV__LANES_ROWS 8
#endif

TQKV__OP TQKV__I(sum) TQKV__I(no_sum)(void)
{
    TQKV__I(sum) zero;
    memset(&zero, 0, sizeof zero);
    return zero;
}

TQKV__OP TQKV__(codes) TQKV__I(load_codes)(const void *p)
{
    TQKV__(codes) x;
    memcpy(&x, p, sizeof x);
    return x;
}

#if TQKV__PRODUCTS < 8
typedef TQKV__(codes) TQKV__I(lanes);
typedef TQKV__I(row) TQKV__I(repeated);
#define TQKV__DOT_LANES   TQKV__I(dot)
#define TQKV__WHOLE_LANES TQKV__I(whole)
#else
#define TQKV__DOT_LANES   TQKV__I(dot_lanes)
#define TQKV__WHOLE_LANES TQKV__I(whole_lanes)
#endif

TQKV__OP TQKV__I(lanes) TQKV__I(load_lanes)(const void *p)
{
    TQKV__I(lanes) x;
    memcpy(&x, p, sizeof x);
    return x;
}

#ifndef TQKV__DECODED /* true: another set of the same name has the decoders, and what takes floats */

/* Decodes `left` of the integers of n rows, at most TQKV__STEP; p, upper: the fields of the first row, to: as wide as `stride` */
TQKV__OP void TQKV__S(decode_step)(const tqkv_format format, const TQKV__(codes) * books, int left, size_t row_bytes,
                                   const uint8_t *p, const uint8_t *upper, int n, int8_t *to, int stride)
{
    for (int j = 0; j < n; j++, p += row_bytes, upper += row_bytes, to += stride) {
        const TQKV__(codes) bytes = TQKV__S(look_up)(format, books, left, p, upper);
        memcpy(to, &bytes, sizeof bytes);
    }
}

/* Decodes the integers [first, first + dim) of n rows; row: the first one, to: [n][TQKV__PADDED(dim)] */
TQKV__OP void TQKV__S(decode_integers)(const tqkv_format format, const tqkv__stream *s, const uint8_t *row, int first,
                                       int n, int dim, int8_t *to)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format);
    const uint8_t *p = row + first * main / 8, *upper = row + (s->head_dim * main + first * upper_bits) / 8;
    TQKV__(codes) books[4];
    TQKV__S(load_books)(TQKV__BOOK_BITS(format), s->centroids, books);
    for (int d = 0; d < dim; d += TQKV__STEP) {
        const uint8_t *at = p + d * main / 8, *upper_at = upper + d * upper_bits / 8;
        const int left = dim - d, padded = TQKV__PADDED(dim);
        if (left >= TQKV__STEP)
            TQKV__S(decode_step)(format, books, TQKV__STEP, s->row_bytes, at, upper_at, n, to + d, padded);
        else if (left == 16 || TQKV__STEP <= 32)
            TQKV__S(decode_step)(format, books, 16, s->row_bytes, at, upper_at, n, to + d, padded);
        else
            TQKV__S(decode_step)(format, books, left, s->row_bytes, at, upper_at, n, to + d, padded);
    }
}

#define TQKV__DECODE_INTEGERS(unused, format, name, kind, main, upper, book, plain)                                    \
    TQKV__TARGET static void TQKV__S(integers_##format)(const tqkv__stream *s, const uint8_t *row, int first, int n,   \
                                                        int dim, int8_t *to)                                           \
    {                                                                                                                  \
        if ((kind) == TQKV__BOOK && (book) <= 6) /* others are not called */                                           \
            TQKV__S(decode_integers)(format, s, row, first, n, dim, to);                                               \
    }
TQKV__FORMATS(TQKV__DECODE_INTEGERS, )

typedef void (*TQKV__S(decoder))(const tqkv__stream *, const uint8_t *, int, int, int, int8_t *);
#define TQKV__DECODER_OF(unused, format, ...) TQKV__S(integers_##format),
static const TQKV__S(decoder) TQKV__S(decoders)[] = {NULL, TQKV__FORMATS(TQKV__DECODER_OF, )};

/* Where products find the integers of positions. */
typedef struct TQKV__S(source) {
    const int8_t *codes;
    size_t stride;   /* of positions */
    ptrdiff_t ahead; /* to those of the next tile, if they are read in place */
} TQKV__S(source);

/* Copies dim integers of a row, and zeros behind them; to: [padded]. Sizes that the compiler knows take no calls. */
TQKV__OP void TQKV__S(copy_integers)(const uint8_t *row, int dim, int padded, int8_t *to)
{
    for (int d = 0; d < dim; d += 16) memcpy(to + d, row + d, 16);
    for (int d = dim; d < padded; d += 16) memset(to + d, 0, 16);
}

/* The integers [first, first + dim) of `n` slots from that of the run's position j on. I8 is read in place where that goes.
   room: [n rounded up to slices][TQKV__PADDED(dim)] */
TQKV__TARGET static TQKV__S(source) TQKV__S(open_integers)(const tqkv__stream *s, int kv_head, const tqkv__run *run,
                                                           int j, int n, int first, int dim, int8_t *room)
{
    const uint8_t *row = tqkv__codes_at(s, kv_head, run->slot + j);
    const ptrdiff_t ahead = (ptrdiff_t)run->ahead * (ptrdiff_t)s->row_bytes;
    const int padded = TQKV__PADDED(dim), rows = (n + TQKV__SLICE - 1) / TQKV__SLICE * TQKV__SLICE;
    const TQKV__S(source) in_place = {(const int8_t *)row + first, s->row_bytes, ahead};
    const TQKV__S(source) decoded = {room, (size_t)padded, 0};
    if (s->kind == TQKV__GRID && n == rows) return in_place;
    for (int i = 0; i < n; i += TQKV__SLICE, row += TQKV__SLICE * s->row_bytes) {
        const int now = n - i < TQKV__SLICE ? n - i : TQKV__SLICE;
        int8_t *to = room + i * padded;
        if (first == 0) tqkv__prefetch(TQKV__L2, row + ahead, (size_t)now * s->row_bytes);
        if (s->kind != TQKV__GRID) TQKV__S(decoders)[s->format](s, row, first, now, dim, to);
        if (s->kind == TQKV__GRID)
            for (int k = 0; k < now; k++)
                TQKV__S(copy_integers)(row + (size_t)k * s->row_bytes + first, dim, padded, to + k * padded);
    }
    if (n < rows) memset(room + n * padded, 0, (size_t)((rows - n) * padded)); /* their products are not used */
    return decoded;
}

/* The largest magnitude of n floats, as bits: NaN is above all others. n: a multiple of LANES */
TQKV__OP uint32_t TQKV__S(largest_bits)(const float *x, int n)
{
    TQKV__(codes) largest;
    memset(&largest, 0, sizeof largest);
    for (int i = 0; i < n; i += TQKV__INTEGER_LANES) largest = TQKV__(larger_bits)(largest, TQKV__(load)(x + i));
    return TQKV__S(largest_code)(largest);
}

/* scores[row][j] (+)= query[row] . key j of halves, in 16 sums */
TQKV__OP void TQKV__S(score_halves)(const int rows, const tqkv__stream *s, const uint8_t *codes, int n, const float *q,
                                    bool add, float *scores)
{
    for (int j = 0; j < n; j++, codes += s->row_bytes) {
        TQKV__VECTOR sums[2][16 / TQKV__INTEGER_LANES];
        TQKV__UNROLL
        for (int i = 0; i < 32 / TQKV__INTEGER_LANES; i++) sums[i % 2][i / 2] = TQKV__(set1)(0.0f);
        for (int d = 0; d < s->head_dim; d += 16) {
            TQKV__UNROLL
            for (int i = 0; i < 16 / TQKV__INTEGER_LANES; i++) {
                const int at = d + i * TQKV__INTEGER_LANES;
                const TQKV__VECTOR x = TQKV__(load_f16)(codes + 2 * at);
                TQKV__UNROLL
                for (int r = 0; r < rows; r++)
                    sums[r][i] = TQKV__(fma)(TQKV__(load)(q + r * s->head_dim + at), x, sums[r][i]);
            }
        }
        TQKV__UNROLL
        for (int r = 0; r < rows; r++)
            scores[r * TQKV__TILE + j] = (add ? scores[r * TQKV__TILE + j] : 0.0f) + TQKV__(sum_16)(sums[r]);
    }
}

TQKV__TARGET static void TQKV__S(score_tile_of_halves)(const tqkv__stream *s, const uint8_t *codes,
                                                       const tqkv__run *run, const float *q, int n_rows, bool add,
                                                       float *scores)
{
    tqkv__prefetch(TQKV__L2, codes + (ptrdiff_t)run->ahead * (ptrdiff_t)s->row_bytes, (size_t)run->n * s->row_bytes);
    for (int row = 0; row < n_rows; row += 2, q += 2 * s->head_dim, scores += 2 * TQKV__TILE) {
        if (row + 1 < n_rows)
            TQKV__S(score_halves)(2, s, codes, run->n, q, add, scores);
        else
            TQKV__S(score_halves)(1, s, codes, run->n, q, add, scores);
    }
}

/* out[d] += weights[j] * value j of halves, in the order of positions; a weight of 0 adds nothing. weights: [n] */
TQKV__TARGET static void TQKV__S(add_halves)(const tqkv__stream *s, const uint8_t *codes, const tqkv__run *run,
                                             const float *weights, float *out)
{
    for (int d = 0; d < s->head_dim; d += 16) {
        TQKV__VECTOR sums[16 / TQKV__INTEGER_LANES];
        TQKV__UNROLL
        for (int i = 0; i < 16 / TQKV__INTEGER_LANES; i++) sums[i] = TQKV__(load)(out + d + i * TQKV__INTEGER_LANES);
        for (int j = 0; j < run->n; j++) {
            if (weights[j] == 0.0f) continue;
            TQKV__UNROLL
            for (int i = 0; i < 16 / TQKV__INTEGER_LANES; i++)
                sums[i] = TQKV__(fma)(
                    TQKV__(set1)(weights[j]),
                    TQKV__(load_f16)(codes + (size_t)j * s->row_bytes + 2 * (d + i * TQKV__INTEGER_LANES)), sums[i]);
        }
        TQKV__UNROLL
        for (int i = 0; i < 16 / TQKV__INTEGER_LANES; i++) TQKV__(store)(out + d + i * TQKV__INTEGER_LANES, sums[i]);
    }
}
#endif

/* Of a block of a query, padded to whole vectors */
#define TQKV__QUERY_BLOCK(dim) (((dim) + TQKV__WORDS - 1) / TQKV__WORDS * TQKV__WORDS)
#define TQKV__WEIGHTS_UNIT     (TQKV__TILE / 2)

#ifndef TQKV__ROUNDED /* true: the integers of another set lie in the same order */

/* Rounds n floats times scale to integers; a scale of 0 gives 0, whatever the floats are. to: [n] */
TQKV__OP void TQKV__I(round_floats)(const float *x, int n, float scale, int16_t *to)
{
    if (!(scale > 0.0f)) memset(to, 0, (size_t)n * sizeof *to);
    if (scale > 0.0f)
        for (int i = 0; i < n; i += TQKV__INTEGER_LANES)
            TQKV__I(store_words)(to, i, TQKV__S(round_codes)(TQKV__(load)(x + i) * TQKV__(set1)(scale)));
}

/* The integers of a query, each block's padded with zeros to whole vectors. Its unit is in the place of the last value.
   query, to: [head_dim] */
TQKV__TARGET static void TQKV__I(round_query)(const tqkv__stream *s, const float *query, float *to)
{
    const int dim = s->block_dim, size = TQKV__QUERY_BLOCK(dim);
    const uint32_t largest = TQKV__S(largest_bits)(query, s->head_dim);
    int16_t *words = (int16_t *)(void *)to;
    for (int d = 0; d < s->head_dim; d += dim, words += size) {
        TQKV__I(round_floats)(query + d, dim, tqkv__integer_scale(largest), words);
        memset(words + dim, 0, (size_t)(size - dim) * sizeof *words);
    }
    to[s->head_dim - 1] = tqkv__integer_unit(largest, s->step);
}

/* The weights of a row times the norms of a block as integers; behind them, at TQKV__WEIGHTS_UNIT, their unit. Weights
   from n on are another row's. */
TQKV__TARGET static void TQKV__I(round_weights)(const tqkv__stream *s, const float *weights, const float *factors,
                                                int n, float *to)
{
    enum { VECTORS = TQKV__TILE / TQKV__INTEGER_LANES };
    TQKV__ALIGNED float room[TQKV__TILE];
    TQKV__VECTOR x[VECTORS];
    TQKV__(codes) largest_of;
    memset(&largest_of, 0, sizeof largest_of);
    if (n < TQKV__TILE) {
        memset(room, 0, sizeof room);
        memcpy(room, weights, (size_t)n * sizeof *room);
        weights = room;
    }
    TQKV__UNROLL
    for (int i = 0; i < VECTORS; i++) {
        const int j = i * TQKV__INTEGER_LANES;
        x[i] = TQKV__(mul_nonzero)(TQKV__(load)(weights + j), TQKV__(load)(factors + j));
        largest_of = TQKV__(larger_bits)(largest_of, x[i]);
    }
    const uint32_t largest = TQKV__S(largest_code)(largest_of);
    const float scale = tqkv__integer_scale(largest);
    if (scale > 0.0f) {
        TQKV__UNROLL
        for (int i = 0; i < VECTORS; i++) {
            const TQKV__(codes) rounded = TQKV__S(round_codes)(x[i] * TQKV__(set1)(scale));
            TQKV__I(store_words)((int16_t *)(void *)to, i * TQKV__INTEGER_LANES, rounded);
        }
    } else {
        memset(to, 0, TQKV__TILE * sizeof(int16_t));
    }
    to[TQKV__WEIGHTS_UNIT] = tqkv__integer_unit(largest, s->step);
}
#endif

/* A product of a tile: integers of positions, and the rows that they are multiplied with. */
typedef struct TQKV__I(product) {
    TQKV__S(source) at;
    int n, dim;
    const int16_t *rows; /* integers of the first row, and its unit; those of the next are row_floats floats apart */
    const float *units;
    int row_floats;
    float *results; /* scores or sums, result_floats apart */
    int result_floats;
    const float *factors; /* of positions, scores only */
    bool add;             /* to the scores */
} TQKV__I(product);

/* fours[row]: the products of four positions with a row, summed over the lanes. rows: a constant */
TQKV__OP void TQKV__I(score_four)(const int rows, const TQKV__I(product) * p, const int8_t *codes,
                                  TQKV__(codes) * fours, int distance)
{
    const int16_t *q = p->rows;
    const size_t stride = p->at.stride;
    TQKV__I(sum) sums[TQKV__PRODUCT_ROWS][4];
    TQKV__(codes) x[4];
    TQKV__UNROLL
    for (int i = 0; i < 4 * rows; i++) sums[i / 4][i % 4] = TQKV__I(no_sum)();
    for (int d = 0; d < p->dim; d += TQKV__WORDS, q += TQKV__WORDS) {
        TQKV__UNROLL
        for (int i = 0; i < 4; i++)
            if (d % 64 == 0)
                tqkv__prefetch(TQKV__L2, (const uint8_t *)codes + d + (ptrdiff_t)((size_t)i * stride) + p->at.ahead, 1);
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) x[i] = TQKV__I(open)(codes + d + (size_t)i * stride, p->dim - d);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) {
            const TQKV__I(row) y = TQKV__I(load_row)(q + 2 * r * p->row_floats);
            TQKV__UNROLL
            for (int i = 0; i < 4; i++) sums[r][i] = TQKV__I(dot)(sums[r][i], x[i], y);
        }
    }
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) {
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) x[i] = TQKV__I(whole)(sums[r][i]);
        fours[r * distance] = TQKV__S(sum_four_codes)(x);
    }
}

/* Scores of row r and the positions from j on, from the sums of their products */
TQKV__OP void TQKV__I(add_scores)(const TQKV__I(product) * p, int r, int j, TQKV__(codes) sum)
{
    float *to = p->results + r * TQKV__TILE + j;
    const TQKV__VECTOR factor = TQKV__(load)(p->factors + j) * TQKV__(set1)(p->units[r * p->row_floats]);
    const TQKV__VECTOR before = p->add ? TQKV__(load)(to) : TQKV__(set1)(0.0f);
    TQKV__(store)(to, TQKV__(fma)(TQKV__S(to_floats)(sum), factor, before));
}

/* results[row][j] (+)= (sum_d rows[row][d] * codes[j][d]) * factors[j] * unit of the row, LANES positions at a time */
TQKV__OP void TQKV__I(score_rows_of)(const int rows, const TQKV__I(product) * p)
{
    for (int j = 0; j < p->n; j += TQKV__INTEGER_LANES) {
        TQKV__(codes) fours[TQKV__PRODUCT_ROWS * TQKV__INTEGER_LANES / 4];
        for (int i = 0; i < TQKV__INTEGER_LANES / 4; i++) {
            const int8_t *codes = p->at.codes + (size_t)(j + 4 * i) * p->at.stride;
            TQKV__I(score_four)(rows, p, codes, fours + i, TQKV__INTEGER_LANES / 4);
        }
        TQKV__UNROLL
        for (int r = 0; r < rows; r++)
            TQKV__I(add_scores)(p, r, j, TQKV__S(sum_codes_across)(fours + r * TQKV__INTEGER_LANES / 4));
    }
}

/* Goes on to the next rows. */
TQKV__OP void TQKV__I(advance)(TQKV__I(product) * p, int rows)
{
    p->rows += 2 * rows * p->row_floats;
    p->units += rows * p->row_floats;
    p->results += rows * p->result_floats;
}

TQKV__TARGET static void TQKV__I(score_integers)(TQKV__I(product) p, int n_rows)
{
    for (int left = n_rows, now; left > 0; left -= now) {
        now = left >= TQKV__PRODUCT_ROWS ? TQKV__PRODUCT_ROWS : left >= 2 ? 2 : 1;
        if (now == 1)
            TQKV__I(score_rows_of)(1, &p);
        else if (now == 2)
            TQKV__I(score_rows_of)(2, &p);
        else
            TQKV__I(score_rows_of)(TQKV__PRODUCT_ROWS, &p);
        TQKV__I(advance)(&p, now);
    }
}

/* As score_rows_of for the positions of two vectors, which are lanes of tile: [dim / TQKV__PRODUCTS][2][TQKV__LANE_BYTES] */
TQKV__OP void TQKV__I(score_lanes_of)(const int rows, const TQKV__I(product) * p, const int8_t *tile)
{
    const int size = 2 * p->row_floats, half = rows > 4 ? rows / 2 : rows; /* two addresses need fewer offsets */
    const int16_t *q[2] = {p->rows, p->rows + (rows - half) * size};
    TQKV__I(sum) sums[2 * TQKV__PRODUCT_ROWS][2];
    TQKV__UNROLL
    for (int i = 0; i < 2 * rows; i++) sums[i / 2][i % 2] = TQKV__I(no_sum)();
    for (int d = 0; d < p->dim; d += TQKV__PRODUCTS, tile += 2 * TQKV__LANE_BYTES) {
        const TQKV__I(lanes) a = TQKV__I(load_lanes)(tile), b = TQKV__I(load_lanes)(tile + TQKV__LANE_BYTES);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) {
            const TQKV__I(repeated) y = TQKV__I(repeat)(q[r / half] + (ptrdiff_t)(r % half) * size + d);
            sums[r][0] = TQKV__DOT_LANES(sums[r][0], a, y);
            sums[r][1] = TQKV__DOT_LANES(sums[r][1], b, y);
        }
    }
    TQKV__UNROLL
    for (int i = 0; i < 2 * rows; i++)
        TQKV__I(add_scores)(p, i / 2, i % 2 * TQKV__INTEGER_LANES, TQKV__WHOLE_LANES(sums[i / 2][i % 2]));
}

/* score_integers for many rows: turning the positions into lanes takes less time than adding up the lanes of each sum. */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_lanes)(TQKV__I(product) p, int n_rows)
{
    TQKV__ALIGNED int8_t tile[TQKV__BLOCK / TQKV__PRODUCTS * 2 * TQKV__LANE_BYTES];
    for (int v = 0; v < 2; v++) {
        const int first = v * TQKV__INTEGER_LANES < p.n ? v * TQKV__INTEGER_LANES : 0;
        for (int d = 0; d < p.dim; d += 16) {
            TQKV__I(lanes) x[16 / TQKV__PRODUCTS];
            const int8_t *at = p.at.codes + (size_t)first * p.at.stride + d;
            if (p.at.ahead && d % 64 == 0)
                for (int j = 0; j < TQKV__INTEGER_LANES; j++)
                    tqkv__prefetch(TQKV__L2, (const uint8_t *)at + (ptrdiff_t)j * (ptrdiff_t)p.at.stride + p.at.ahead,
                                   1);
            TQKV__I(transpose)(at, p.at.stride, x);
            TQKV__UNROLL
            for (int i = 0; i < 16 / TQKV__PRODUCTS; i++)
                memcpy(tile + (2 * (d / TQKV__PRODUCTS + i) + v) * TQKV__LANE_BYTES, &x[i], sizeof x[i]);
        }
    }
    for (int left = n_rows, rows; left > 0; left -= rows) {
        rows = left >= 2 * TQKV__PRODUCT_ROWS ? 2 * TQKV__PRODUCT_ROWS : left >= 2 ? 2 : 1;
        if (rows == 1)
            TQKV__I(score_lanes_of)(1, &p, tile);
        else if (rows == 2)
            TQKV__I(score_lanes_of)(2, &p, tile);
        else
            TQKV__I(score_lanes_of)(2 * TQKV__PRODUCT_ROWS, &p, tile);
        TQKV__I(advance)(&p, rows);
    }
}

/* Scores of block b, but for its codes and the number of positions. factors: [blocks][TQKV__TILE] */
TQKV__OP void TQKV__I(open_scores)(const tqkv__stream *s, int b, const float *q, bool add, const float *factors,
                                   float *scores, TQKV__I(product) * p)
{
    p->dim = s->block_dim;
    p->rows = (const int16_t *)(const void *)q + b * TQKV__QUERY_BLOCK(s->block_dim);
    p->units = q + s->head_dim - 1;
    p->row_floats = s->head_dim;
    p->results = scores;
    p->result_floats = TQKV__TILE;
    p->factors = factors + b * TQKV__TILE;
    p->add = add || b > 0;
}

#if TQKV__LOOKED_UP
/* -- Few rows: fields of 4 bits are multiplied as bytes, in the order in which they are stored, and an integer is 256 times its
   high byte plus its low one, both signed. Part 0 is the lower code of each byte, part 1 the upper one. Codes are c + 128,
   because the products want one factor unsigned; sums begin with -128 times that of the other. -- */

/* Dimensions in both parts of a vector of codes */
#define TQKV__CHUNK (2 * TQKV__BYTES)

/* TQ4 with fewer rows than take lanes, two at a time, TQ5 with two, TQ6 with one, where they fill more than half a vector. Four
   rows of 80 dimensions take less time in quarters. */
static bool TQKV__I(is_packed)(const tqkv__stream *s, int n, int n_rows)
{
    const int most = s->upper_bits ? 3 - s->upper_bits : s->block_dim > 80 ? TQKV__LANES_ROWS - 1 : 2;
    return n_rows <= most && n % TQKV__SLICE == 0 && s->main_bits == 4 && s->block_dim > TQKV__BYTES;
}

/* The integers of a row of queries by parts, their high bytes and their low ones; starts: the first sums of both */
typedef struct TQKV__I(digits) {
    int8_t parts[TQKV__BLOCK / TQKV__BYTES][2][TQKV__BYTES];
    TQKV__(codes) starts[2];
} TQKV__I(digits);

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(open_digits)(const int16_t *words, int dim, TQKV__I(digits) * to)
{
    to->starts[0] = to->starts[1] = TQKV__I(no_sum)();
    for (int d = 0; d < dim; d += TQKV__CHUNK)
        for (int part = 0; part < 2; part++) {
            TQKV__(codes) a[2], b[2];
            TQKV__I(split)(words + d, dim - d, a);
            TQKV__I(split)(words + d + TQKV__BYTES, dim - d - TQKV__BYTES, b);
            TQKV__UNROLL
            for (int i = 0; i < 2; i++) {
                const TQKV__(codes) x = TQKV__I(part_of)(part, a[i], b[i]);
                memcpy(to->parts[d / TQKV__BYTES + part][i], &x, sizeof x);
                to->starts[i] = TQKV__I(less_bytes)(to->starts[i], x);
            }
        }
}

/* Dimensions of the positions of a tile: of a block, or 64 of them or what is left */
typedef struct TQKV__I(chunk) {
    const uint8_t *fields[2]; /* main ones, upper ones */
    uint32_t masks[2];        /* a bit for each 16 bits of 64 fields */
    size_t stride;
    ptrdiff_t ahead; /* to the next tile, 0: not asked for */
    const int8_t *centroids;
    int n, left; /* positions, dimensions */
} TQKV__I(chunk);

/* Dimensions [first + d, first + dim), at most 64 of them */
TQKV__OP TQKV__I(chunk)
    TQKV__I(open_chunk)(const tqkv__stream *s, int kv_head, const tqkv__run *run, int first, int d, int dim)
{
    const uint8_t *row = tqkv__codes_at(s, kv_head, run->slot);
    const int left = dim - d < 64 ? dim - d : 64, main = s->main_bits, upper = s->upper_bits;
    const TQKV__I(chunk) p = {{row + (first + d) * main / 8, row + (s->head_dim * main + (first + d) * upper) / 8},
                              {((uint32_t)1 << left * main / 16) - 1, ((uint32_t)1 << left * upper / 16) - 1},
                              s->row_bytes,
                              first + d == 0 ? (ptrdiff_t)run->ahead * (ptrdiff_t)s->row_bytes : 0,
                              s->centroids,
                              run->n,
                              left};
    return p;
}

/* All dimensions of a block: its packed codes are walked by lines, each of which asks for that of the next tile. */
TQKV__OP TQKV__I(chunk) TQKV__I(open_block)(const tqkv__stream *s, int kv_head, const tqkv__run *run, int first)
{
    TQKV__I(chunk) p = TQKV__I(open_chunk)(s, kv_head, run, first, 0, s->block_dim);
    p.ahead = (ptrdiff_t)run->ahead * (ptrdiff_t)s->row_bytes;
    p.left = s->block_dim;
    return p;
}

/* sums[row][i]: the products of four positions from 4 i on with one or two rows, in the lanes that sum_codes_across adds up */
TQKV__OP void TQKV__I(score_parts)(const tqkv_format format, const int rows, const TQKV__I(chunk) * p,
                                   const TQKV__I(digits) * digits, TQKV__(codes) (*sums)[TQKV__TILE / 4])
{
    const TQKV__(codes) book = TQKV__I(load_book)(p->centroids);
    const size_t stride = p->stride;
    const uint8_t *row = p->fields[0], *upper = p->fields[1];
    for (int four = 0; four < p->n / 4; four++, row += 4 * stride, upper += 4 * stride) {
        TQKV__(codes) high[2][4], low[2][4];
        TQKV__UNROLL
        for (int i = 0; i < 4 * rows; i++) {
            high[i / 4][i % 4] = digits[i / 4].starts[0];
            low[i / 4][i % 4] = digits[i / 4].starts[1];
        }
        for (int d = 0; d < p->left; d += TQKV__CHUNK) {
            const uint8_t *main_at = row + d / 2, *upper_at = upper + d * TQKV__UPPER_BITS(format) / 8;
            TQKV__UNROLL
            for (int i = 0; i < 4; i++) {
                tqkv__prefetch(TQKV__L2, main_at + (ptrdiff_t)((size_t)i * stride) + p->ahead, 1);
                if (TQKV__UPPER_BITS(format))
                    tqkv__prefetch(TQKV__L2, upper_at + (ptrdiff_t)((size_t)i * stride) + p->ahead, 1);
            }
            TQKV__UNROLL
            for (int part = 0; part < 2; part++) {
                TQKV__UNROLL
                for (int i = 0; i < 4; i++) {
                    const TQKV__(codes) x = TQKV__I(load_part)(
                        format, part, book, p->left - d, main_at + (size_t)i * stride, upper_at + (size_t)i * stride);
                    TQKV__UNROLL
                    for (int r = 0; r < rows; r++) {
                        const int8_t(*y)[TQKV__BYTES] = digits[r].parts[d / TQKV__BYTES + part];
                        high[r][i] = TQKV__I(dot_bytes)(high[r][i], x, TQKV__I(load_codes)(y[0]));
                        low[r][i] = TQKV__I(dot_bytes)(low[r][i], x, TQKV__I(load_codes)(y[1]));
                    }
                }
            }
        }
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) {
            TQKV__UNROLL
            for (int i = 0; i < 4; i++) high[r][i] = TQKV__I(join)(high[r][i], low[r][i]);
            sums[r][four] = TQKV__S(sum_four_codes)(high[r]);
        }
    }
}

/* macro(format, rows): where this takes less time than words, or than storing the bytes first (D=128, one core of a Zen 5: TQ4
   0.78 of it, TQ5 0.77, with one row TQ6 0.68; two rows of TQ4 after two 0.88 of four at once) */
#define TQKV__BY_PARTS(macro)                                                                                          \
    macro(TQKV_TQ4, 1) macro(TQKV_TQ4, 2) macro(TQKV_TQ5, 1) macro(TQKV_TQ5, 2) macro(TQKV_TQ6, 1)

/* Functions of their own, because loops that share one spill. The copy tells the compiler that sums lie elsewhere. */
#define TQKV__SCORE_PARTS(format, rows)                                                                                \
    TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_parts_##format##_##rows)(                                    \
        const TQKV__I(chunk) * p, const TQKV__I(digits) * digits, TQKV__(codes)(*sums)[TQKV__TILE / 4])                \
    {                                                                                                                  \
        const TQKV__I(chunk) copy = *p;                                                                                \
        TQKV__I(score_parts)(format, rows, &copy, digits, sums);                                                       \
    }
TQKV__BY_PARTS(TQKV__SCORE_PARTS)

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_packed)(const tqkv__stream *s, int kv_head, const tqkv__run *run,
                                                              int first, int rows, const TQKV__I(product) * p)
{
    const TQKV__I(chunk) block = TQKV__I(open_block)(s, kv_head, run, first);
    TQKV__I(digits) digits[2];
    TQKV__(codes) sums[2][TQKV__TILE / 4];
    for (int r = 0; r < rows; r++) TQKV__I(open_digits)(p->rows + 2 * r * p->row_floats, p->dim, &digits[r]);
#define TQKV__SCORE_PACKED(which, n)                                                                                   \
    if (s->format == which && rows == n) TQKV__I(score_parts_##which##_##n)(&block, digits, sums);
    TQKV__BY_PARTS(TQKV__SCORE_PACKED)
    for (int j = 0; j < p->n; j += 16)
        for (int r = 0; r < rows; r++) TQKV__I(add_scores)(p, r, j, TQKV__S(sum_codes_across)(sums[r] + j / 4));
}

/* -- Few rows: four positions at a time are looked up where they are multiplied, 16 dimensions of each in a quarter of a vector, so
   that no size leaves lanes empty. Integers and codes are the bytes that they are above. -- */

/* Of what is not packed, TQ2 and TQ4 with fewer rows than take lanes, TQ3 and TQ5 with two. More rows of more dimensions share bytes. */
static bool TQKV__I(is_quartered)(const tqkv__stream *s, int n, int n_rows)
{
    int most = 0;
    if (s->format == TQKV_TQ2 || s->format == TQKV_TQ4) most = s->block_dim > 80 ? 2 : TQKV__LANES_ROWS - 1;
    if (s->format == TQKV_TQ3 || s->format == TQKV_TQ5) most = s->block_dim > 128 ? 1 : 2;
    return n_rows <= most && n % TQKV__SLICE == 0;
}

/* The integers of a row of queries, 16 of them in each quarter, their high bytes and their low ones; start: the first sums */
typedef struct TQKV__I(quarters) {
    int8_t pieces[TQKV__BLOCK / 16][2][TQKV__BYTES];
    TQKV__(codes) start;
} TQKV__I(quarters);

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(open_quarters)(const int16_t *words, int dim, TQKV__I(quarters) * to)
{
    TQKV__(codes) starts[2] = {TQKV__I(no_sum)(), TQKV__I(no_sum)()};
    for (int d = 0; d < dim; d += TQKV__BYTES) {
        TQKV__(codes) bytes[2];
        TQKV__I(split)(words + d, dim - d, bytes);
        TQKV__UNROLL
        for (int i = 0; i < 8; i++) {
            const TQKV__(codes) x = TQKV__I(repeat_quarter)(bytes[i % 2], i / 2);
            memcpy(to->pieces[d / 16 + i / 2][i % 2], &x, sizeof x);
            starts[i % 2] = TQKV__I(less_bytes)(starts[i % 2], x);
        }
    }
    to->start = TQKV__I(join)(starts[0], starts[1]);
}

/* 16 codes of four positions, piece `piece` of 64; raw, fields: what was loaded with an earlier piece */
TQKV__OP TQKV__(codes) TQKV__I(look_up_piece)(const tqkv_format format, const bool lanes, const int piece,
                                              TQKV__(codes) book, const TQKV__I(chunk) * p, size_t at, size_t stride,
                                              TQKV__(codes) (*raw)[2], TQKV__(codes) * fields)
{
    TQKV__UNROLL
    for (int i = 0; i < 2; i++) {
        const int bits = i ? TQKV__UPPER_BITS(format) : TQKV__MAIN_BITS(format);
        if (!bits) break;
        if (piece == 0) TQKV__I(load_quarters)(bits, p->masks[i], p->fields[i] + at, stride, raw[i]);
        if (piece == 0 || (piece == 2 && (lanes || bits == 4)))
            fields[i] = TQKV__I(order_fields)(bits, lanes, piece, raw[i]);
    }
    return TQKV__I(look_up_fields)(format, lanes, piece, fields, book);
}

/* sums[row][v]: the products of the positions v, v + 4, v + 8 and v + 12 of 16 with a row, in a quarter each, for 64 dimensions */
TQKV__OP void TQKV__I(score_pieces)(const tqkv_format format, const int rows, const TQKV__I(chunk) * p,
                                    const TQKV__I(quarters) * q, int d, TQKV__(codes) (*sums)[TQKV__TILE / 4])
{
    const TQKV__(codes) book = TQKV__I(load_book)(p->centroids);
    for (int v = 0; v < p->n / 4; v++) {
        const size_t at = (size_t)(v / 4 * 16 + v % 4) * p->stride;
        TQKV__(codes) high[4], low[4], raw[2][2], fields[2];
        if (p->ahead)
            tqkv__prefetch(TQKV__L2, p->fields[0] + (ptrdiff_t)((size_t)v * 4 * p->stride) + p->ahead, 4 * p->stride);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) {
            high[r] = TQKV__I(no_sum)();
            low[r] = sums[r][v];
        }
        TQKV__UNROLL
        for (int k = 0; k < 4; k++) {
            if (k * 16 >= p->left) break;
            const TQKV__(codes) x = TQKV__I(look_up_piece)(format, false, k, book, p, at, 4 * p->stride, raw, fields);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++) {
                const int8_t(*y)[TQKV__BYTES] = q[r].pieces[d / 16 + k];
                high[r] = TQKV__I(dot_bytes)(high[r], x, TQKV__I(load_codes)(y[0]));
                low[r] = TQKV__I(dot_bytes)(low[r], x, TQKV__I(load_codes)(y[1]));
            }
        }
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) sums[r][v] = TQKV__I(join)(high[r], low[r]);
    }
}

/* macro(format, rows) */
#define TQKV__BY_PIECES(macro)                                                                                         \
    macro(TQKV_TQ2, 1) macro(TQKV_TQ2, 2) macro(TQKV_TQ3, 1) macro(TQKV_TQ3, 2) macro(TQKV_TQ4, 1) macro(TQKV_TQ4, 2)  \
        macro(TQKV_TQ5, 1) macro(TQKV_TQ5, 2)
#define TQKV__BY_FOUR_ROWS(macro) macro(TQKV_TQ2, 4) macro(TQKV_TQ4, 4) /* scores alone: values have four sums a row */

#define TQKV__SCORE_PIECES(format, rows)                                                                               \
    TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_##format##_##rows)(                                          \
        const TQKV__I(chunk) * p, const TQKV__I(quarters) * q, int d, TQKV__(codes)(*sums)[TQKV__TILE / 4])            \
    {                                                                                                                  \
        const TQKV__I(chunk) copy = *p;                                                                                \
        TQKV__I(score_pieces)(format, rows, &copy, q, d, sums);                                                        \
    }
TQKV__BY_PIECES(TQKV__SCORE_PIECES)
TQKV__BY_FOUR_ROWS(TQKV__SCORE_PIECES)

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_quarters)(const tqkv__stream *s, int kv_head,
                                                                const tqkv__run *run, int first, int rows,
                                                                const TQKV__I(product) * p)
{
    TQKV__I(quarters) quarters[4];
    TQKV__(codes) sums[4][TQKV__TILE / 4];
    for (int r = 0; r < rows; r++) {
        TQKV__I(open_quarters)(p->rows + 2 * r * p->row_floats, p->dim, &quarters[r]);
        for (int v = 0; v < p->n / 4; v++) sums[r][v] = quarters[r].start;
    }
    for (int d = 0; d < p->dim; d += 64) {
        const TQKV__I(chunk) chunk = TQKV__I(open_chunk)(s, kv_head, run, first, d, p->dim);
#define TQKV__SCORE_QUARTERS(which, n)                                                                                 \
    if (s->format == which && rows == n) TQKV__I(score_##which##_##n)(&chunk, quarters, d, sums);
        TQKV__BY_PIECES(TQKV__SCORE_QUARTERS)
        TQKV__BY_FOUR_ROWS(TQKV__SCORE_QUARTERS)
    }
    for (int j = 0; j < p->n; j += 16)
        for (int r = 0; r < rows; r++) TQKV__I(add_scores)(p, r, j, TQKV__S(sum_four_codes)(sums[r] + j / 4));
}

/* The scores of a block with few rows. p: without positions */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_few)(const tqkv__stream *s, int kv_head, const tqkv__run *run,
                                                           int first, int n_rows, TQKV__I(product) * p)
{
    const bool packed = TQKV__I(is_packed)(s, run->n, n_rows);
    p->n = run->n;
    for (int left = n_rows, now; left > 0; left -= now) {
        now = !packed && left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (packed)
            TQKV__I(score_packed)(s, kv_head, run, first, now, p);
        else
            TQKV__I(score_quarters)(s, kv_head, run, first, now, p);
        TQKV__I(advance)(p, now);
    }
}
#endif

TQKV__TARGET static void TQKV__I(integer_score_tile)(const tqkv__stream *s, int kv_head, const tqkv__run *run,
                                                     const float *q, int n_rows, bool add, float *scores)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    TQKV__ALIGNED int8_t room[TQKV__SLICES * TQKV__BLOCK];
    const bool lanes = n_rows >= TQKV__LANES_ROWS;
    const int step = lanes ? 2 * TQKV__INTEGER_LANES : TQKV__SLICE;
    const int dim = s->block_dim, head_dim = s->head_dim;
    if (s->kind == TQKV__HALF) {
        TQKV__S(score_tile_of_halves)(s, tqkv__codes_at(s, kv_head, run->slot), run, q, n_rows, add, scores);
        return;
    }
    TQKV__(factors)(s, tqkv__norms_at(s, kv_head, run->slot), run, true, factors);
    for (int b = 0; b < head_dim / dim; b++) {
        TQKV__I(product) p;
#if TQKV__LOOKED_UP
        if (TQKV__I(is_packed)(s, run->n, n_rows) || TQKV__I(is_quartered)(s, run->n, n_rows)) {
            TQKV__I(open_scores)(s, b, q, add, factors, scores, &p);
            TQKV__I(score_few)(s, kv_head, run, b * dim, n_rows, &p);
            continue;
        }
#endif
        for (int j = 0; j < run->n; j += step) {
            p.n = run->n - j < step ? run->n - j : step;
            TQKV__I(open_scores)(s, b, q, add, factors + j, scores + j, &p);
            p.at = TQKV__S(open_integers)(s, kv_head, run, j, p.n, b * dim, dim, room);
            if (lanes)
                TQKV__I(score_lanes)(p, n_rows);
            else
                TQKV__I(score_integers)(p, n_rows);
        }
    }
}

/* TQKV__STEP dimensions of TQKV__PRODUCTS positions, interleaved; asks for those of the next tile. */
TQKV__OP void TQKV__I(open_group)(const int8_t *at, size_t stride, ptrdiff_t ahead, int left, TQKV__I(lanes) * x)
{
    TQKV__UNROLL
    for (int i = 0; i < TQKV__PRODUCTS; i++)
        tqkv__prefetch(TQKV__L2, (const uint8_t *)at + i * (ptrdiff_t)stride + ahead, 1);
    TQKV__I(interleave)(at, stride, left, x);
}

/* results[row][d] += (sum_j rows[row][j] * codes[j][d]) * unit of the row, for TQKV__STEP dimensions from `first` on,
   or only for the half of them that the first two vectors hold. ready: it is interleaved in tile. rows, ready, vectors: constants */
TQKV__OP void TQKV__I(add_vectors_of)(const int rows, const bool ready, const int vectors, const TQKV__I(product) * p,
                                      int first, const int8_t *tile)
{
    const int16_t *w = p->rows;
    const int8_t *at = p->at.codes + first;
    TQKV__I(sum) sums[TQKV__PRODUCT_ROWS][4];
    TQKV__I(lanes) x[4];
    TQKV__(codes) whole[4];
    TQKV__UNROLL
    for (int i = 0; i < vectors * rows; i++) sums[i / vectors][i % vectors] = TQKV__I(no_sum)();
    for (int j = 0; j < p->n; j += TQKV__PRODUCTS, w += TQKV__PRODUCTS, at += TQKV__PRODUCTS * p->at.stride) {
        if (ready) {
            TQKV__UNROLL
            for (int v = 0; v < vectors; v++) x[v] = TQKV__I(load_lanes)(tile + v * TQKV__LANE_BYTES);
            tile += 4 * TQKV__LANE_BYTES;
        } else {
            TQKV__I(open_group)(at, p->at.stride, p->at.ahead, p->dim - first, x);
        }
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) {
            const TQKV__I(repeated) y = TQKV__I(repeat)(w + 2 * r * p->row_floats);
            TQKV__UNROLL
            for (int v = 0; v < vectors; v++) sums[r][v] = TQKV__DOT_LANES(sums[r][v], x[v], y);
        }
    }
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) {
        float *to = p->results + r * p->result_floats + first;
        const TQKV__VECTOR unit = TQKV__(set1)(p->units[r * p->row_floats]);
        TQKV__UNROLL
        for (int v = 0; v < 4; v++) whole[v] = TQKV__WHOLE_LANES(v < vectors ? sums[r][v] : TQKV__I(no_sum)());
        TQKV__S(natural_order)(whole);
        TQKV__UNROLL
        for (int v = 0; v < vectors; v++, to += TQKV__INTEGER_LANES)
            if (first + v * TQKV__INTEGER_LANES < p->dim)
                TQKV__(store)(to, TQKV__(fma)(TQKV__S(to_floats)(whole[v]), unit, TQKV__(load)(to)));
    }
}

TQKV__OP void TQKV__I(add_rows_of)(const int rows, const bool ready, const TQKV__I(product) * p, int first,
                                   const int8_t *tile)
{
    if (TQKV__STEP > 16 && p->dim - first <= TQKV__STEP / 2)
        TQKV__I(add_vectors_of)(rows, ready, 2, p, first, tile);
    else
        TQKV__I(add_vectors_of)(rows, ready, 4, p, first, tile);
}

/* The sums of all rows for TQKV__STEP dimensions from d on, whose positions they share interleaved. */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_interleaved)(TQKV__I(product) p, int d, int n_rows)
{
    TQKV__ALIGNED int8_t tile[TQKV__TILE / TQKV__PRODUCTS * 4 * TQKV__LANE_BYTES];
    for (int j = 0; j < p.n; j += TQKV__PRODUCTS) {
        TQKV__I(lanes) x[4];
        TQKV__I(open_group)(p.at.codes + (size_t)j * p.at.stride + d, p.at.stride, p.at.ahead, p.dim - d, x);
        memcpy(tile + j / TQKV__PRODUCTS * 4 * TQKV__LANE_BYTES, x, sizeof x);
    }
    for (int left = n_rows, rows; left > 0; left -= rows) {
        rows = left >= TQKV__PRODUCT_ROWS ? TQKV__PRODUCT_ROWS : left >= 2 ? 2 : 1;
        if (rows == 1)
            TQKV__I(add_rows_of)(1, true, &p, d, tile);
        else if (rows == 2)
            TQKV__I(add_rows_of)(2, true, &p, d, tile);
        else
            TQKV__I(add_rows_of)(TQKV__PRODUCT_ROWS, true, &p, d, tile);
        TQKV__I(advance)(&p, rows);
    }
}

/* Few rows interleave the positions for themselves. */
TQKV__TARGET static void TQKV__I(add_integers)(const TQKV__I(product) * p, int n_rows)
{
    for (int d = 0; d < p->dim; d += TQKV__STEP) {
        if (n_rows == 1)
            TQKV__I(add_rows_of)(1, false, p, d, NULL);
        else if (n_rows == 2)
            TQKV__I(add_rows_of)(2, false, p, d, NULL);
        else
            TQKV__I(add_interleaved)(*p, d, n_rows);
    }
}

#if TQKV__LOOKED_UP
/* The weights of a row as bytes, and -128 times their sum */
typedef struct TQKV__I(parts) {
    int8_t bytes[2][TQKV__TILE];
    int32_t start;
} TQKV__I(parts);

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(open_parts)(const int16_t *words, TQKV__I(parts) * to)
{
    to->start = TQKV__I(split_weights)(words, to->bytes);
}

/* The sums of one part of a chunk: dword i of results[t] is byte 16 l + 4 t + i of the chunk, where l is its quarter. */
TQKV__OP void TQKV__I(sum_part)(const tqkv_format format, const int part, const int rows, const TQKV__I(chunk) * p,
                                const TQKV__I(parts) * weights, TQKV__(codes) (*results)[4])
{
    const TQKV__(codes) book = TQKV__I(load_book)(p->centroids);
    const uint8_t *row = p->fields[0], *upper = p->fields[1];
    TQKV__(codes) high[2][4], low[2][4];
    TQKV__UNROLL
    for (int i = 0; i < 4 * rows; i++) {
        high[i / 4][i % 4] = TQKV__I(no_sum)();
        low[i / 4][i % 4] = TQKV__I(set_lanes)(weights[i / 4].start);
    }
    for (int j = 0; j < p->n; j += 4) {
        TQKV__(codes) x[4];
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) {
            const size_t at = (size_t)(j + i) * p->stride;
            if (part == 0) tqkv__prefetch(TQKV__L2, row + at + p->ahead, 1);
            if (part == 0 && TQKV__UPPER_BITS(format)) tqkv__prefetch(TQKV__L2, upper + at + p->ahead, 1);
            x[i] = TQKV__I(load_part)(format, part, book, p->left, row + at, upper + at);
        }
        TQKV__I(interleave_four)(x);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) {
            const TQKV__(codes) y = TQKV__I(repeat_four)(weights[r].bytes[0] + j);
            const TQKV__(codes) z = TQKV__I(repeat_four)(weights[r].bytes[1] + j);
            TQKV__UNROLL
            for (int t = 0; t < 4; t++) {
                high[r][t] = TQKV__I(dot_bytes)(high[r][t], x[t], y);
                low[r][t] = TQKV__I(dot_bytes)(low[r][t], x[t], z);
            }
        }
    }
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) {
        TQKV__UNROLL
        for (int t = 0; t < 4; t++) results[r][t] = TQKV__I(join)(high[r][t], low[r][t]);
    }
}

/* Adds the sums of both parts of a chunk of row r. */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(close_parts)(const TQKV__I(product) * p, int r, int d,
                                                             const TQKV__(codes) * even, const TQKV__(codes) * odd)
{
    TQKV__(codes) x[8];
    float *to = p->results + r * p->result_floats + d;
    const TQKV__VECTOR unit = TQKV__(set1)(p->units[r * p->row_floats]);
    TQKV__I(order_parts)(even, odd, x);
    TQKV__UNROLL
    for (int i = 0; i < 8; i++, to += TQKV__INTEGER_LANES)
        if (d + i * TQKV__INTEGER_LANES < p->dim)
            TQKV__(store)(to, TQKV__(fma)(TQKV__S(to_floats)(x[i]), unit, TQKV__(load)(to)));
}

/* sums[part][row]: of the first chunk of p */
#define TQKV__ADD_PARTS(format, rows)                                                                                  \
    TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_parts_##format##_##rows)(                                      \
        const TQKV__I(chunk) * p, const TQKV__I(parts) * weights, TQKV__(codes)(*sums)[2][4])                          \
    {                                                                                                                  \
        const TQKV__I(chunk) copy = *p;                                                                                \
        TQKV__I(sum_part)(format, 0, rows, &copy, weights, sums[0]);                                                   \
        TQKV__I(sum_part)(format, 1, rows, &copy, weights, sums[1]);                                                   \
    }
TQKV__BY_PARTS(TQKV__ADD_PARTS)

/* results[row][d] += (sum_j rows[row][j] * codes[j][d]) * unit of the row */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_packed)(const tqkv__stream *s, int kv_head, const tqkv__run *run,
                                                            int first, int rows, const TQKV__I(product) * p)
{
    TQKV__I(chunk) block = TQKV__I(open_block)(s, kv_head, run, first);
    TQKV__I(parts) weights[2];
    TQKV__(codes) sums[2][2][4];
    for (int r = 0; r < rows; r++) TQKV__I(open_parts)(p->rows + 2 * r * p->row_floats, &weights[r]);
    for (int d = 0; d < p->dim; d += TQKV__CHUNK, block.left -= TQKV__CHUNK) {
#define TQKV__ADD_PACKED(which, n)                                                                                     \
    if (s->format == which && rows == n) TQKV__I(add_parts_##which##_##n)(&block, weights, sums);
        TQKV__BY_PARTS(TQKV__ADD_PACKED)
        for (int r = 0; r < rows; r++) TQKV__I(close_parts)(p, r, d, sums[0][r], sums[1][r]);
        block.fields[0] += TQKV__CHUNK / 2;
        block.fields[1] += TQKV__CHUNK * s->upper_bits / 8;
    }
}

/* sums[row][k] = sum_j weights[row][j] * codes[j][d], for 16 dimensions of piece k of 64 */
TQKV__OP void TQKV__I(add_pieces)(const tqkv_format format, const int rows, const TQKV__I(chunk) * p,
                                  const TQKV__I(parts) * weights, TQKV__(codes) (*sums)[4])
{
    const TQKV__(codes) book = TQKV__I(load_book)(p->centroids);
    TQKV__(codes) high[2][4], low[2][4], raw[2][2], fields[2];
    TQKV__UNROLL
    for (int i = 0; i < 4 * rows; i++) {
        high[i / 4][i % 4] = TQKV__I(no_sum)();
        low[i / 4][i % 4] = TQKV__I(set_lanes)(weights[i / 4].start);
    }
    for (int j = 0; j < p->n; j += 4) {
        const size_t at = (size_t)j * p->stride;
        if (p->ahead) tqkv__prefetch(TQKV__L2, p->fields[0] + (ptrdiff_t)at + p->ahead, 4 * p->stride);
        TQKV__UNROLL
        for (int k = 0; k < 4; k++) {
            if (k * 16 >= p->left) break;
            const TQKV__(codes) x = TQKV__I(look_up_piece)(format, true, k, book, p, at, p->stride, raw, fields);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++) {
                high[r][k] = TQKV__I(dot_bytes)(high[r][k], x, TQKV__I(repeat_four)(weights[r].bytes[0] + j));
                low[r][k] = TQKV__I(dot_bytes)(low[r][k], x, TQKV__I(repeat_four)(weights[r].bytes[1] + j));
            }
        }
    }
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) {
        TQKV__UNROLL
        for (int k = 0; k < 4; k++) sums[r][k] = TQKV__I(join)(high[r][k], low[r][k]);
    }
}

#define TQKV__ADD_PIECES(format, rows)                                                                                 \
    TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_##format##_##rows)(                                            \
        const TQKV__I(chunk) * p, const TQKV__I(parts) * weights, TQKV__(codes)(*sums)[4])                             \
    {                                                                                                                  \
        const TQKV__I(chunk) copy = *p;                                                                                \
        TQKV__I(add_pieces)(format, rows, &copy, weights, sums);                                                       \
    }
TQKV__BY_PIECES(TQKV__ADD_PIECES)

#endif

/* The sums of block b, but for its codes. */
TQKV__OP void TQKV__I(open_sums)(const tqkv__stream *s, int b, int n, const float *weights, int n_rows,
                                 const float *factors, float *scaled, float *out, TQKV__I(product) * p)
{
    if (b * s->block_dim % s->norm_dim == 0)
        for (int at = 0; at < n_rows * TQKV__TILE; at += TQKV__TILE)
            TQKV__I(round_weights)(s, weights + at, factors + b * TQKV__TILE, n, scaled + at);
    p->n = n;
    p->dim = s->block_dim;
    p->rows = (const int16_t *)(const void *)scaled;
    p->units = scaled + TQKV__WEIGHTS_UNIT;
    p->row_floats = TQKV__TILE;
    p->results = out + b * s->block_dim;
    p->result_floats = s->head_dim;
    p->factors = NULL;
    p->add = true;
}

#if TQKV__LOOKED_UP
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_quarters)(const tqkv__stream *s, int kv_head, const tqkv__run *run,
                                                              int first, int rows, const TQKV__I(product) * p)
{
    TQKV__I(parts) parts[2];
    TQKV__(codes) sums[2][4];
    for (int r = 0; r < rows; r++) TQKV__I(open_parts)(p->rows + 2 * r * p->row_floats, &parts[r]);
    for (int d = 0; d < p->dim; d += 64) {
        const TQKV__I(chunk) chunk = TQKV__I(open_chunk)(s, kv_head, run, first, d, p->dim);
#define TQKV__ADD_QUARTERS(which, n)                                                                                   \
    if (s->format == which && rows == n) TQKV__I(add_##which##_##n)(&chunk, parts, sums);
        TQKV__BY_PIECES(TQKV__ADD_QUARTERS)
        for (int r = 0; r < rows; r++) {
            float *to = p->results + r * p->result_floats + d;
            const TQKV__VECTOR unit = TQKV__(set1)(p->units[r * p->row_floats]);
            for (int k = 0; k * 16 < chunk.left; k++, to += 16)
                TQKV__(store)(to, TQKV__(fma)(TQKV__S(to_floats)(sums[r][k]), unit, TQKV__(load)(to)));
        }
    }
}

/* The sums of a block with few rows. p: without p.at */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_few)(const tqkv__stream *s, int kv_head, const tqkv__run *run,
                                                         int first, int n_rows, TQKV__I(product) * p)
{
    const bool packed = TQKV__I(is_packed)(s, run->n, n_rows);
    for (int left = n_rows, now; left > 0; left -= now) {
        now = left >= 2 ? 2 : 1;
        if (packed)
            TQKV__I(add_packed)(s, kv_head, run, first, now, p);
        else
            TQKV__I(add_quarters)(s, kv_head, run, first, now, p);
        TQKV__I(advance)(p, now);
    }
}
#endif

TQKV__TARGET static void TQKV__I(integer_value_tile)(const tqkv__stream *s, int kv_head, const tqkv__run *run,
                                                     const float *weights, int n_rows, float *scaled, float *out)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    TQKV__ALIGNED int8_t room[TQKV__TILE * TQKV__BLOCK];
    const int dim = s->block_dim, head_dim = s->head_dim;
    if (s->kind == TQKV__HALF) {
        const uint8_t *codes = tqkv__codes_at(s, kv_head, run->slot);
        tqkv__prefetch(TQKV__L2, codes + (ptrdiff_t)run->ahead * (ptrdiff_t)s->row_bytes,
                       (size_t)run->n * s->row_bytes);
        for (int row = 0; row < n_rows; row++)
            TQKV__S(add_halves)(s, codes, run, weights + row * TQKV__TILE, out + row * head_dim);
        return;
    }
    TQKV__(factors)(s, tqkv__norms_at(s, kv_head, run->slot), run, false, factors);
    for (int b = 0; b < head_dim / dim; b++) {
        TQKV__I(product) p;
        TQKV__I(open_sums)(s, b, run->n, weights, n_rows, factors, scaled, out, &p);
#if TQKV__LOOKED_UP
        if (TQKV__I(is_packed)(s, run->n, n_rows) || TQKV__I(is_quartered)(s, run->n, n_rows)) {
            TQKV__I(add_few)(s, kv_head, run, b * dim, n_rows, &p);
            continue;
        }
#endif
        p.at = TQKV__S(open_integers)(s, kv_head, run, 0, run->n, b * dim, dim, room);
        TQKV__I(add_integers)(&p, n_rows);
    }
}

static const tqkv__integers TQKV__I(integers) = {&TQKV__(isa),
                                                 TQKV__I(round_query),
                                                 {TQKV__ISA_NAME,
                                                  TQKV__INTEGER_LANES,
                                                  {16, 1},
                                                  &TQKV__(codec),
                                                  TQKV__I(integer_score_tile),
                                                  TQKV__(softmax_tile),
                                                  TQKV__(end_piece),
                                                  TQKV__I(integer_value_tile),
                                                  TQKV__(sum_heads)}};

/* These macros belong to one set. */
#undef TQKV__VECTOR
#undef TQKV__STEP
#undef TQKV__PADDED
#undef TQKV__BYTES
#undef TQKV__LANE_BYTES
#undef TQKV__DOT_LANES
#undef TQKV__WHOLE_LANES
#undef TQKV__WORDS
#undef TQKV__PRODUCTS
#undef TQKV__S
#undef TQKV__SLICE
#undef TQKV__SLICES
#undef TQKV__LANES_ROWS
#undef TQKV__DECODED
#undef TQKV__ROUNDED
#undef TQKV__DECODE_INTEGERS
#undef TQKV__DECODER_OF
#undef TQKV__QUERY_BLOCK
#undef TQKV__WEIGHTS_UNIT
#undef TQKV__INTEGER_LANES
#undef TQKV__PRODUCT_ROWS
#undef TQKV__LOOKED_UP
#undef TQKV__CHUNK
#undef TQKV__BY_PARTS
#undef TQKV__SCORE_PARTS
#undef TQKV__SCORE_PACKED
#undef TQKV__ADD_PARTS
#undef TQKV__ADD_PACKED
#undef TQKV__BY_PIECES
#undef TQKV__BY_FOUR_ROWS
#undef TQKV__SCORE_PIECES
#undef TQKV__SCORE_QUARTERS
#undef TQKV__ADD_PIECES
#undef TQKV__ADD_QUARTERS
#undef TQKV__ISA_NAME
#undef TQKV__
#undef TQKV__I
#undef TQKV__TARGET
#endif /* TQKV__INTEGER_LANES */

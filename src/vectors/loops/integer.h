/* >>k-integer: the loops of >>integer, written once. Codes become bytes, in the order of their dimensions. A lane of
   32 bits adds up TQKV__PRODUCTS products: two of words, to which the bytes are widened, or four or eight of bytes with
   the high and the low bytes of an integer, in two sums. What a set brings besides its floats, with TQKV__(codes) for a
   vector of TQKV__INTEGER_LANES lanes, as TQKV__S(name) if it has nothing to do with products, else as TQKV__I(name):

     load_books, look_up        codes to bytes, TQKV__STEP of them
     open, dot, whole           bytes of a key as dot takes them; products added to a sum; the sum in one integer a lane
     interleave                 bytes of TQKV__PRODUCTS values to lanes, a dimension of all in each
     round_codes, store_words   floats to integers, lanes to the 16 bits in which products find them, from `i` on
     load_row, repeat           those of a vector of dimensions, those of TQKV__PRODUCTS positions in each lane
     transpose                  16 bytes of TQKV__INTEGER_LANES positions to lanes, as repeat has integers
     lanes, repeated, dot_lanes, whole_lanes   as codes, row, dot, whole, for lanes of eight products
     TQKV__LOOKED_UP            whether few rows multiply codes without storing their bytes first: with load_nibbles,
                                or with load_quarters, order_fields and look_up_fields, and with dot_bytes         */

#define TQKV__VECTOR TQKV__(vector)
/* Integers that decode_codes writes and that interleave reads of a row; rows of integers are padded to that. */
#define TQKV__STEP        (4 * TQKV__INTEGER_LANES)
#define TQKV__PADDED(dim) (((dim) + TQKV__STEP - 1) / TQKV__STEP * TQKV__STEP)
#define TQKV__BYTES       (4 * TQKV__INTEGER_LANES) /* of a vector, of lanes: */
#define TQKV__LANE_BYTES  ((int)sizeof(TQKV__I(lanes)))
#define TQKV__WORDS       ((TQKV__PRODUCTS == 2 ? 2 : 4) * TQKV__INTEGER_LANES) /* multiplied with a vector of codes */
/* Keys that are decoded together. */
#define TQKV__KEYS_AT_ONCE 16
#define TQKV__MOST_KEYS_AT_ONCE                                                                                        \
    (2 * TQKV__INTEGER_LANES > TQKV__KEYS_AT_ONCE ? 2 * TQKV__INTEGER_LANES : TQKV__KEYS_AT_ONCE)
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

/* Decodes `left` of the integers of n rows, at most TQKV__STEP; p, upper: the fields of the first row, to: as wide as
   `stride` */
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

/* Returns the integers [first, first + dim) of `n` slots from that of the segment's position j on. I8 is read in place
   where that goes. room: [n rounded up to slices][TQKV__PADDED(dim)] */
TQKV__TARGET static TQKV__S(source)
    TQKV__S(open_integers)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, int j, int n, int first,
                           int dim, int8_t *room)
{
    const uint8_t *row = tqkv__codes_at(s, kv_head, segment->slot + j);
    const ptrdiff_t ahead = (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes;
    const int padded = TQKV__PADDED(dim), rows = (n + TQKV__KEYS_AT_ONCE - 1) / TQKV__KEYS_AT_ONCE * TQKV__KEYS_AT_ONCE;
    const TQKV__S(source) in_place = {(const int8_t *)row + first, s->row_bytes, ahead};
    const TQKV__S(source) decoded = {room, (size_t)padded, 0};
    if (s->kind == TQKV__GRID && n == rows) return in_place;
    for (int i = 0; i < n; i += TQKV__KEYS_AT_ONCE, row += TQKV__KEYS_AT_ONCE * s->row_bytes) {
        const int now = n - i < TQKV__KEYS_AT_ONCE ? n - i : TQKV__KEYS_AT_ONCE;
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

/* Returns the largest magnitude of n floats, as bits: NaN is above all others. n: a multiple of LANES */
TQKV__OP uint32_t TQKV__S(largest_bits)(const float *x, int n)
{
    TQKV__(codes) largest;
    memset(&largest, 0, sizeof largest);
    for (int i = 0; i < n; i += TQKV__INTEGER_LANES) largest = TQKV__(larger_bits)(largest, TQKV__(load)(x + i));
    return TQKV__S(largest_code)(largest);
}
#endif

/* Integers of a panel of a query, padded to whole vectors */
#define TQKV__QUERY_PANEL(dim) (((dim) + TQKV__WORDS - 1) / TQKV__WORDS * TQKV__WORDS)
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

/* Rounds a query to integers, each panel's padded with zeros to whole vectors. Its unit stands where the last value
   would. query, to: [head_dim] */
TQKV__TARGET static void TQKV__I(round_query)(const tqkv__stream *s, const float *query, float *to)
{
    const int dim = s->panel_dim, size = TQKV__QUERY_PANEL(dim);
    const uint32_t largest = TQKV__S(largest_bits)(query, s->head_dim);
    int16_t *words = (int16_t *)(void *)to;
    for (int d = 0; d < s->head_dim; d += dim, words += size) {
        TQKV__I(round_floats)(query + d, dim, tqkv__integer_scale(largest), words);
        memset(words + dim, 0, (size_t)(size - dim) * sizeof *words);
    }
    to[s->head_dim - 1] = tqkv__integer_unit(largest, s->step);
}

/* Rounds the weights of a row times the norms of a panel as integers; behind them, at TQKV__WEIGHTS_UNIT, their unit.
   Weights from n on are another row's. */
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

/* Finds fours[row]: the products of four positions with a row, summed over the lanes. rows: a constant */
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

/* Writes scores of row r and the positions from j on, from the sums of their products */
TQKV__OP void TQKV__I(add_scores)(const TQKV__I(product) * p, int r, int j, TQKV__(codes) sum)
{
    float *to = p->results + r * TQKV__TILE + j;
    const TQKV__VECTOR factor = TQKV__(load)(p->factors + j) * TQKV__(set1)(p->units[r * p->row_floats]);
    const TQKV__VECTOR before = p->add ? TQKV__(load)(to) : TQKV__(set1)(0.0f);
    TQKV__(store)(to, TQKV__(fma)(TQKV__S(to_floats)(sum), factor, before));
}

/* Finds results[row][j] (+)= (sum_d rows[row][d] * codes[j][d]) * factors[j] * unit of the row, LANES positions at a
   time */
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

/* Does what score_rows_of does for the positions of two vectors, which are lanes of tile: [dim /
   TQKV__PRODUCTS][2][TQKV__LANE_BYTES] */
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

/* Does what score_integers does for many rows: turning the positions into lanes takes less time than adding up the
   lanes of each sum. */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_lanes)(TQKV__I(product) p, int n_rows)
{
    TQKV__ALIGNED int8_t tile[TQKV__PANEL / TQKV__PRODUCTS * 2 * TQKV__LANE_BYTES];
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

/* Opens the scores of panel b, but for its codes and the number of positions. factors: [panels][TQKV__TILE] */
TQKV__OP void TQKV__I(open_scores)(const tqkv__stream *s, int b, const float *q, bool add, const float *factors,
                                   float *scores, TQKV__I(product) * p)
{
    p->dim = s->panel_dim;
    p->rows = (const int16_t *)(const void *)q + b * TQKV__QUERY_PANEL(s->panel_dim);
    p->units = q + s->head_dim - 1;
    p->row_floats = s->head_dim;
    p->results = scores;
    p->result_floats = TQKV__TILE;
    p->factors = factors + b * TQKV__TILE;
    p->add = add || b > 0;
}

/* Opens TQKV__STEP dimensions of TQKV__PRODUCTS positions, interleaved; asks for those of the next tile. */
TQKV__OP void TQKV__I(open_group)(const int8_t *at, size_t stride, ptrdiff_t ahead, int left, TQKV__I(lanes) * x)
{
    TQKV__UNROLL
    for (int i = 0; i < TQKV__PRODUCTS; i++)
        tqkv__prefetch(TQKV__L2, (const uint8_t *)at + i * (ptrdiff_t)stride + ahead, 1);
    TQKV__I(interleave)(at, stride, left, x);
}

/* Adds: results[row][d] += (sum_j rows[row][j] * codes[j][d]) * unit of the row, for TQKV__STEP dimensions from `first`
   on, or only for the half of them that the first two vectors hold. ready: it is interleaved in tile. rows, ready,
   vectors: constants */
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

/* Adds to the sums of all rows for TQKV__STEP dimensions from d on, whose positions they share interleaved. */
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

/* Adds a panel; few rows interleave the positions for themselves. */
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

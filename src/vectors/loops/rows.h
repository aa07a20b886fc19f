/* >>k-rows: the loops of >>integer. A vector of codes is bytes: 16 dimensions, in their order, of each of
   TQKV__POSITIONS positions. A lane of 32 bits adds up TQKV__PRODUCTS products, either of words or of bytes; bytes are
   multiplied with the high and with the low byte of an integer. What a set brings, as TQKV__(name) if it has nothing
   to do with products, else as TQKV__I(name):

     open, look_up        the codes of up to 64 dimensions; sixteen k of them, plus TQKV__CODE_OFFSET, as a vector
     load_row, dot        16 integers of a row, in each 16 bytes; their products with a vector, added to a sum
     key_lanes            16 bytes of each position to lanes of TQKV__PRODUCTS dimensions
     value_lanes          vectors of TQKV__PRODUCTS positions to lanes of a dimension each
     repeat, dot_lanes    TQKV__PRODUCTS integers of a row in each lane; their products with lanes, added to a sum
     store_integers       lanes to integers as products find them
     whole, whole_lanes   a sum in one integer a lane                                                              */

#define TQKV__VECTOR        TQKV__(vector)
#define TQKV__BYTES         (4 * TQKV__INTEGER_LANES)
#define TQKV__POSITIONS     (TQKV__INTEGER_LANES / 4)
#define TQKV__CHUNK         64 /* dimensions that are opened together */
#define TQKV__LANE_BYTES    ((int)sizeof(TQKV__I(lanes)))
#define TQKV__KEY_LANES     (16 / TQKV__PRODUCTS)      /* vectors of lanes for 16 dimensions: of keys, */
#define TQKV__DIM_LANES     (16 / TQKV__INTEGER_LANES) /* and of values */
#define TQKV__MANY_SIXTEENS TQKV__SIXTEENS(TQKV__FEW_ROWS)
#define TQKV__UNITS         (TQKV__PRODUCTS > TQKV__POSITIONS ? TQKV__PRODUCTS / TQKV__POSITIONS : 1)
/* By the registers that a set has: rows of keys whose sums fit, sixteens of dimensions of one row of sums, and from how
   many rows on vectors of a codebook are turned. */
#define TQKV__MANY_ROWS           4
#define TQKV__MOST_SIXTEENS       (TQKV__INTEGER_LANES == 16 ? 4 : 2)
#define TQKV__LANES_ROWS_OF_BOOKS (TQKV__INTEGER_LANES == 16 ? 5 : 3)
/* Where a row of integers has what multiplies it, and -TQKV__CODE_OFFSET times its sum: in floats. */
#define TQKV__QUERY_OFFSET(head_dim) ((head_dim) / 2)
#define TQKV__QUERY_UNIT(head_dim)   ((head_dim)-1)
#define TQKV__WEIGHTS_OFFSET         (TQKV__TILE / 2)
#define TQKV__WEIGHTS_UNIT           (TQKV__TILE / 2 + 1)

/* The format of what is decoded already; no store has it. */
#define TQKV__READY TQKV_FORMAT_DEFAULT

#ifndef TQKV__DECODED /* true: another set of the same name has what does not depend on products */

/* The codes of a panel of a tile. Rows from `whole` on lie at `rest`: loops take 16 of them at a time. */
typedef struct TQKV__(panel) {
    const uint8_t *fields[2], *rest[2]; /* main ones, upper ones */
    size_t stride;
    const uint8_t *next; /* the rows that will be read next, or NULL */
    int first;           /* of the row's dimensions */
    const int8_t *centroids;
    tqkv_format format;
    int n, whole, dim;
} TQKV__(panel);

/* Copies the last rows of a tile, less than 16. room: [16][row_bytes] */
static void TQKV__(copy_rest)(const tqkv__stream *s, const uint8_t *row, int n, uint8_t *room)
{
    const size_t whole = (size_t)(n / 16 * 16), size = (size_t)(n % 16) * s->row_bytes;
    if (!size) return;
    memcpy(room, row + whole * s->row_bytes, size);
    memset(room + size, 0, 16 * s->row_bytes - size);
}

/* Opens the panel of the dimensions from `first` on; row: of the tile's first position */
static TQKV__(panel) TQKV__(open_panel)(const tqkv__stream *s, const uint8_t *row, const tqkv__segment *segment,
                                        int first, const uint8_t *room)
{
    const int main_at = first * s->main_bits / 8, upper_at = (s->head_dim * s->main_bits + first * s->upper_bits) / 8;
    const TQKV__(panel) panel = {{row + main_at, row + upper_at},
                                 {room + main_at, room + upper_at},
                                 s->row_bytes,
                                 segment->ahead ? row + (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes : NULL,
                                 first,
                                 s->centroids,
                                 s->format == TQKV_TQ5_BYTES ? TQKV_TQ6_BYTES : s->format,
                                 (segment->n + 15) / 16 * 16,
                                 segment->n / 16 * 16,
                                 s->panel_dim};
    return panel;
}

typedef struct TQKV__(cursor) {
    const uint8_t *fields[2];
} TQKV__(cursor);

/* Returns where the positions from j on are, up to 16, from the panel's dimension d on. */
TQKV__OP TQKV__(cursor) TQKV__(cursor_at)(const tqkv_format format, const TQKV__(panel) * a, int j, int d)
{
    const uint8_t *const *fields = j < a->whole ? a->fields : a->rest;
    const size_t at = (size_t)(j < a->whole ? j : j - a->whole) * a->stride;
    const TQKV__(cursor) cursor = {
        {fields[0] + at + d * TQKV__MAIN_BITS(format) / 8, fields[1] + at + d * TQKV__UPPER_BITS(format) / 8}};
    return cursor;
}

/* What a pass asks for of the rows that will be read next, with each `step` bytes of this tile's */
typedef struct TQKV__(request) {
    const uint8_t *next; /* or NULL */
    size_t step, size;
} TQKV__(request);

/* Opens the share of a pass over the dimensions [d, d + dims): prefetches are spread, because many at once wait for
   each other. */
TQKV__OP TQKV__(request)
    TQKV__(open_request)(const tqkv_format format, const TQKV__(panel) * a, int positions, int j, int d, int dims)
{
    const int bits = TQKV__MAIN_BITS(format) + TQKV__UPPER_BITS(format); /* of a dimension of the next rows */
    TQKV__(request) request = {NULL, (size_t)positions * a->stride, (size_t)(positions * dims * bits / 8)};
    if (a->next) request.next = a->next + (size_t)j * a->stride + positions * (a->first + d) * bits / 8;
    return request;
}

TQKV__OP void TQKV__(ask)(TQKV__(request) * request)
{
    if (!request->next) return;
    tqkv__prefetch(TQKV__L2, request->next, request->size);
    request->next += request->step;
}

TQKV__OP void TQKV__(move)(const TQKV__(panel) * a, int positions, TQKV__(cursor) * cursor)
{
    cursor->fields[0] += (size_t)positions * a->stride;
    cursor->fields[1] += (size_t)positions * a->stride;
}

TQKV__OP uint32_t TQKV__(largest_bits)(const float *x, int n)
{
    TQKV__(codes) largest;
    memset(&largest, 0, sizeof largest);
    for (int i = 0; i < n; i += TQKV__INTEGER_LANES) largest = TQKV__(larger_bits)(largest, TQKV__(load)(x + i));
    return TQKV__(largest_code)(largest);
}
#endif

/* Rounds n floats to integers against the one whose bits are `largest`, and returns -TQKV__CODE_OFFSET times their sum.
   Without a finite one all are 0. to: [n] */
TQKV__OP int32_t TQKV__I(round_floats)(const float *x, int n, uint32_t largest, void *to)
{
    const float scale = tqkv__integer_scale(largest);
    TQKV__(codes) sum;
    memset(&sum, 0, sizeof sum);
    if (!(scale > 0.0f)) memset(to, 0, (size_t)n * sizeof(int16_t));
    if (!(scale > 0.0f)) return 0;
    for (int i = 0; i < n; i += TQKV__INTEGER_LANES) {
        const TQKV__(codes) rounded = TQKV__(round_codes)(TQKV__(load)(x + i) * TQKV__(set1)(scale));
        TQKV__I(store_integers)(to, i, n, rounded);
        if (TQKV__CODE_OFFSET) sum = TQKV__(add_codes)(sum, rounded);
    }
    return TQKV__CODE_OFFSET ? -TQKV__CODE_OFFSET * TQKV__(sum_codes)(sum) : 0;
}

TQKV__TARGET static void TQKV__I(round_query)(const tqkv__stream *s, const float *query, float *to)
{
    const int dim = s->panel_dim;
    const uint32_t largest = TQKV__(largest_bits)(query, s->head_dim);
    int16_t *integers = (int16_t *)(void *)to;
    int32_t *offset = (int32_t *)(void *)(to + TQKV__QUERY_OFFSET(s->head_dim));
    for (int d = 0; d < s->head_dim; d += dim) *offset++ = TQKV__I(round_floats)(query + d, dim, largest, integers + d);
    to[TQKV__QUERY_UNIT(s->head_dim)] = tqkv__integer_unit(largest, s->step);
}

/* Rounds the weights of a row times the norms of a panel. Weights from n on are another row's. */
TQKV__LOOP void TQKV__I(round_weights)(const tqkv__stream *s, const float *weights, const float *factors, int n,
                                       float *to)
{
    TQKV__ALIGNED float x[TQKV__TILE];
    enum { VECTORS = TQKV__TILE / TQKV__INTEGER_LANES };
    TQKV__VECTOR scaled[VECTORS];
    TQKV__(codes) rounded[VECTORS], largest_of, sum;
    memset(&largest_of, 0, sizeof largest_of);
    memset(&sum, 0, sizeof sum);
    if (n < TQKV__TILE) {
        memset(x, 0, sizeof x);
        memcpy(x, weights, (size_t)n * sizeof *x);
        weights = x;
    }
    TQKV__UNROLL
    for (int i = 0; i < VECTORS; i++) {
        const int j = i * TQKV__INTEGER_LANES;
        scaled[i] = TQKV__(mul_nonzero)(TQKV__(load)(weights + j), TQKV__(load)(factors + j));
        largest_of = TQKV__(larger_bits)(largest_of, scaled[i]);
    }
    const uint32_t largest = TQKV__(largest_code)(largest_of);
    const float scale = tqkv__integer_scale(largest);
    TQKV__UNROLL
    for (int i = 0; i < VECTORS; i++) {
        rounded[i] = TQKV__(round_codes)(scaled[i] * TQKV__(set1)(scale));
        if (TQKV__CODE_OFFSET) sum = TQKV__(add_codes)(sum, rounded[i]);
    }
    int32_t offset = TQKV__CODE_OFFSET ? -TQKV__CODE_OFFSET * TQKV__(sum_codes)(sum) : 0;
    if (scale > 0.0f) {
        TQKV__UNROLL
        for (int i = 0; i < VECTORS; i++) TQKV__I(store_integers)(to, i * TQKV__INTEGER_LANES, TQKV__TILE, rounded[i]);
    } else {
        memset(to, 0, TQKV__TILE * sizeof(int16_t));
        offset = 0;
    }
    memcpy(to + TQKV__WEIGHTS_OFFSET, &offset, sizeof offset);
    to[TQKV__WEIGHTS_UNIT] = tqkv__integer_unit(largest, s->step);
}

typedef struct TQKV__I(product) {
    const int8_t *rows; /* of the first row; the next ones are row_floats floats on, like their units and offsets */
    const float *units, *offsets;
    int row_floats;
    float *results; /* scores or sums, result_floats apart */
    int result_floats;
    const float *factors; /* of positions, scores only */
    bool add;             /* to the scores */
} TQKV__I(product);

TQKV__OP void TQKV__I(advance)(TQKV__I(product) * p, int rows)
{
    p->rows += rows * p->row_floats * (int)sizeof(float);
    p->units += rows * p->row_floats;
    p->offsets += rows * p->row_floats;
    p->results += rows * p->result_floats;
}

TQKV__OP TQKV__I(sum) TQKV__I(no_sum)(void)
{
    TQKV__I(sum) zero;
    memset(&zero, 0, sizeof zero);
    return zero;
}

/* Returns the sums as floats, less what TQKV__CODE_OFFSET added to them. */
TQKV__OP TQKV__VECTOR TQKV__I(sum_of_row)(const TQKV__I(product) * p, int r, TQKV__(codes) sum)
{
    int32_t offset;
    memcpy(&offset, p->offsets + r * p->row_floats, sizeof offset);
    return TQKV__(to_floats)(TQKV__CODE_OFFSET ? TQKV__(add_codes)(sum, TQKV__(set_codes)(offset)) : sum);
}

TQKV__OP void TQKV__I(add_scores)(const TQKV__I(product) * p, int r, int j, TQKV__(codes) sum)
{
    float *to = p->results + r * p->result_floats + j;
    const TQKV__VECTOR factor = TQKV__(load)(p->factors + j) * TQKV__(set1)(p->units[r * p->row_floats]);
    const TQKV__VECTOR before = p->add ? TQKV__(load)(to) : TQKV__(set1)(0.0f);
    TQKV__(store)(to, TQKV__(fma)(TQKV__I(sum_of_row)(p, r, sum), factor, before));
}

/* -- Codes to vectors, 64 dimensions at a time. A tile is in units of TQKV__POSITIONS positions: for scores LANES
   positions are four units, where lane i of unit v has position v + 4 i; for sums lane i of a unit has its position i.
   -- */

#define TQKV__MOST_UNITS (TQKV__TILE / TQKV__POSITIONS)

#ifndef TQKV__DECODED
/* Looks up n positions from `first` on, in units. room: [units][left / 16][TQKV__BYTES] */
TQKV__OP void TQKV__(decode)(const tqkv_format format, const TQKV__(panel) * a, const bool keys, int d, int left,
                             int first, int n, int8_t *room)
{
    const TQKV__(chunk) chunk = TQKV__(open_chunk)(format, left, a->centroids);
    TQKV__(request) request = TQKV__(open_request)(format, a, TQKV__POSITIONS, first, d, left);
    for (int j = first; j < first + n; j += TQKV__INTEGER_LANES) {
        TQKV__(cursor) cursor = TQKV__(cursor_at)(format, a, j, d);
        TQKV__ROLLED
        for (int v = 0; v < 4; v++, TQKV__(move)(a, keys ? 1 : TQKV__POSITIONS, &cursor)) {
            const TQKV__(raw) raw =
                TQKV__(open)(format, &chunk, cursor.fields[0], cursor.fields[1], (keys ? 4 : 1) * a->stride);
            TQKV__(ask)(&request);
            TQKV__UNROLL
            for (int k = 0; k < 4; k++) {
                if (k && 16 * k >= left) continue;
                const TQKV__(codes) x = TQKV__(look_up)(format, k, &chunk, &raw);
                memcpy(room + k * TQKV__BYTES, &x, sizeof x);
            }
            room += left / 16 * TQKV__BYTES;
        }
    }
}

/* Codes of 5 bits in bytes are decoded as those of 6: the codebook is repeated. */
#define TQKV__DECODED_APART(format, kind, book) \
    ((kind) == TQKV__GRID || ((kind) == TQKV__BOOK && (book) <= 6 && (format) != TQKV_TQ5_BYTES))
#define TQKV__DECODER(unused, format, name, kind, main, upper, book, plain) \
    TQKV__LOOP void TQKV__(decode_##format)(const TQKV__(panel) * panel, bool keys, int d, int left, int first, int n, \
                                            int8_t *room) \
    { \
        const TQKV__(panel) a = *panel; \
        if (TQKV__DECODED_APART(format, kind, book)) TQKV__(decode)(format, &a, keys, d, left, first, n, room); \
    }
TQKV__FORMATS(TQKV__DECODER, )
#define TQKV__DECODER_OF(unused, format, ...) TQKV__(decode_##format),
static void (*const TQKV__(decoders)[])(const TQKV__(panel) *, bool, int, int, int, int,
                                        int8_t *) = {NULL, TQKV__FORMATS(TQKV__DECODER_OF, )};
#endif

/* -- Scores of few rows -- */

/* Sixteens of dimensions whose integers registers keep for so many rows */
#define TQKV__KEPT(rows) (TQKV__INTEGER_LANES == 16 && (rows) > 2 ? 2 : 4)

/* Adds the products of a unit of positions with the dimensions of a pass. format and rows are constants. */
TQKV__OP void TQKV__I(dot_unit)(const tqkv_format format, const int rows, const TQKV__(chunk) * chunk,
                                const TQKV__(raw) * raw, int left, TQKV__I(row) (*q)[4], TQKV__I(sum) * sums)
{
    const int kept = TQKV__KEPT(rows);
    TQKV__UNROLL
    for (int k = 0; k < kept; k++) {
        if (k && 16 * k >= left) continue;
        const TQKV__(codes) x = TQKV__(look_up)(format, k, chunk, raw);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) sums[r] = TQKV__I(dot)(sums[r], x, q[r][k]);
    }
}

/* Adds the products of a pass from d on: sums[row][u] for each unit. Four units are LANES positions; lane
   i of unit v has position v + 4 i. */
TQKV__OP void TQKV__I(score_chunk)(const tqkv_format format, const int rows, const TQKV__(panel) * a, int d,
                                   const TQKV__I(product) * p, TQKV__(codes) (*sums)[TQKV__MOST_UNITS])
{
    const int kept = TQKV__KEPT(rows), left = a->dim - d < 16 * kept ? a->dim - d : 16 * kept;
    const TQKV__(chunk) chunk = TQKV__(open_chunk)(format, left, a->centroids);
    TQKV__I(row) q[TQKV__FEW_ROWS][4];
    TQKV__(request) request = TQKV__(open_request)(format, a, TQKV__POSITIONS, 0, d, left);
    TQKV__UNROLL
    for (int i = 0; i < rows * kept; i++) {
        const int r = i / kept, k = i % kept;
        q[r][k] = TQKV__I(load_row)(p->rows + (size_t)(r * p->row_floats) * sizeof(float), a->dim, d + 16 * k);
    }
    for (int j = 0, u = 0; j < a->n; j += TQKV__INTEGER_LANES) {
        TQKV__(cursor) cursor = TQKV__(cursor_at)(format, a, j, d);
        TQKV__ROLLED
        for (int v = 0; v < 4; v++, u++, TQKV__(move)(a, 1, &cursor)) {
            const TQKV__(raw) raw = TQKV__(open)(format, &chunk, cursor.fields[0], cursor.fields[1], 4 * a->stride);
            TQKV__I(sum) now[TQKV__FEW_ROWS];
            TQKV__(ask)(&request);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++) now[r] = TQKV__I(no_sum)();
            TQKV__I(dot_unit)(format, rows, &chunk, &raw, left, q, now);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++) {
                const TQKV__(codes) whole = TQKV__I(whole)(now[r]);
                sums[r][u] = d ? TQKV__(add_codes)(sums[r][u], whole) : whole;
            }
        }
    }
}

/* results[row][j] (+)= (sum_d rows[row][d] * codes[j][d]) * factors[j] * unit of the row */
TQKV__LOOP void TQKV__I(finish_scores)(const TQKV__I(product) * p, int rows, int n,
                                       TQKV__(codes) (*sums)[TQKV__MOST_UNITS])
{
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < n; j += TQKV__INTEGER_LANES)
            TQKV__I(add_scores)(p, r, j, TQKV__(sum_four_codes)(sums[r] + j / TQKV__POSITIONS));
}

TQKV__OP void TQKV__I(score_rows)(const tqkv_format format, const int rows, const TQKV__(panel) * panel, int end,
                                  const TQKV__I(product) * p)
{
    TQKV__(codes) sums[TQKV__FEW_ROWS][TQKV__MOST_UNITS];
    const TQKV__(panel) a = *panel; /* sums lie elsewhere */
    for (int d = 0; d < end; d += 16 * TQKV__KEPT(rows)) TQKV__I(score_chunk)(format, rows, &a, d, p, sums);
    TQKV__I(finish_scores)(p, rows, a.n, sums);
}

/* -- Scores of many rows: a lane is a position. -- */

/* Turns two vectors of lanes of positions from j on. tile: [dim / TQKV__PRODUCTS][2][TQKV__LANE_BYTES] */
TQKV__LOOP void TQKV__I(turn_keys)(const TQKV__(panel) * a, int j, int8_t *tile)
{
    TQKV__ALIGNED int8_t room[2 * TQKV__INTEGER_LANES * TQKV__CHUNK];
    const int n = a->n - j > TQKV__INTEGER_LANES ? 2 : 1; /* vectors */
    for (int d = 0; d < a->dim; d += TQKV__CHUNK) {
        const int left = a->dim - d < TQKV__CHUNK ? a->dim - d : TQKV__CHUNK, sixteens = left / 16;
        TQKV__(decoders)[a->format](a, true, d, left, j, n * TQKV__INTEGER_LANES, room);
        for (int k = 0; k < sixteens; k++, tile += 2 * TQKV__KEY_LANES * TQKV__LANE_BYTES)
            for (int lanes = 0; lanes < n; lanes++) {
                TQKV__(codes) x[4];
                TQKV__I(lanes) y[TQKV__KEY_LANES];
                TQKV__UNROLL
                for (int v = 0; v < 4; v++)
                    memcpy(&x[v], room + ((4 * lanes + v) * sixteens + k) * TQKV__BYTES, sizeof x[v]);
                TQKV__I(key_lanes)(x, y);
                TQKV__UNROLL
                for (int i = 0; i < TQKV__KEY_LANES; i++)
                    memcpy(tile + (2 * i + lanes) * TQKV__LANE_BYTES, &y[i], sizeof y[i]);
            }
    }
}

/* Does what score_rows does for the positions of the tile, from j on. rows is a constant. */
TQKV__OP void TQKV__I(score_lanes_of)(const int rows, const TQKV__I(product) * p, int dim, int j, const int8_t *tile)
{
    const int8_t *q = p->rows;
    const int size = p->row_floats * (int)sizeof(float);
    TQKV__I(sum) sums[TQKV__MANY_ROWS][2];
    TQKV__UNROLL
    for (int i = 0; i < 2 * rows; i++) sums[i / 2][i % 2] = TQKV__I(no_sum)();
    for (int d = 0; d < dim; d += TQKV__PRODUCTS, tile += 2 * TQKV__LANE_BYTES) {
        TQKV__I(lanes) x[2];
        memcpy(x, tile, sizeof x);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) {
            const TQKV__I(repeated) y = TQKV__I(repeat)(q + (ptrdiff_t)r * size, dim, d);
            sums[r][0] = TQKV__I(dot_lanes)(sums[r][0], x[0], y);
            sums[r][1] = TQKV__I(dot_lanes)(sums[r][1], x[1], y);
        }
    }
    TQKV__UNROLL
    for (int i = 0; i < 2 * rows; i++)
        TQKV__I(add_scores)(p, i / 2, j + i % 2 * TQKV__INTEGER_LANES, TQKV__I(whole_lanes)(sums[i / 2][i % 2]));
}

TQKV__LOOP void TQKV__I(score_lanes)(TQKV__I(product) p, int dim, int j, const int8_t *tile, int n_rows)
{
    for (int left = n_rows, rows; left > 0; left -= rows, TQKV__I(advance)(&p, rows)) {
        rows = TQKV__ROWS_OF(left, TQKV__MANY_ROWS);
        TQKV__WITH_ROWS(rows, TQKV__MANY_ROWS, TQKV__I(score_lanes_of), &p, dim, j, tile);
    }
}

/* -- Sums of values: a lane is a dimension. -- */

/* Sixteens of dimensions whose sums fit in registers */
#define TQKV__SIXTEENS(rows) \
    ((rows)*TQKV__MOST_SIXTEENS <= TQKV__SUM_SIXTEENS ? TQKV__MOST_SIXTEENS : TQKV__SUM_SIXTEENS / (rows))

/* Whether a pass may have less than its sixteens. */
#define TQKV__ARE_PARTIAL(rows) (TQKV__INTEGER_LANES == 16 && (rows) < 4)

/* Adds n of the sums of a pass, sums: [rows][vectors], to results[row][d] and on. */
TQKV__OP void TQKV__I(add_sums_of)(const TQKV__I(product) * p, int rows, int vectors, int n, int d,
                                   const TQKV__(codes) * sums)
{
    for (int r = 0; r < rows; r++, sums += vectors) {
        float *to = p->results + r * p->result_floats + d;
        const TQKV__VECTOR unit = TQKV__(set1)(p->units[r * p->row_floats]);
        for (int i = 0; i < n; i++, to += TQKV__INTEGER_LANES)
            TQKV__(store)(to, TQKV__(fma)(TQKV__I(sum_of_row)(p, r, sums[i]), unit, TQKV__(load)(to)));
    }
}

/* The same for all loops of few rows, whose code would be half as long again with it */
TQKV__LOOP void TQKV__I(add_sums)(const TQKV__I(product) * p, int rows, int vectors, int n, int d,
                                  const TQKV__(codes) * sums)
{
    TQKV__I(add_sums_of)(p, rows, vectors, n, d, sums);
}

/* Adds the products of TQKV__PRODUCTS positions, from the cursor or from lanes in tile. */
TQKV__OP void TQKV__I(add_positions)(const tqkv_format format, const int rows, const int sixteens, int left,
                                     const TQKV__(panel) * a, const TQKV__(chunk) * chunk,
                                     const TQKV__(cursor) * cursor, const int8_t *tile, const TQKV__I(repeated) * y,
                                     TQKV__I(sum) (*sums)[4 * TQKV__DIM_LANES])
{
    TQKV__(raw) raw[TQKV__UNITS];
    const ptrdiff_t plane = (ptrdiff_t)(a->n / TQKV__PRODUCTS) * (TQKV__DIM_LANES * TQKV__LANE_BYTES);
    TQKV__UNROLL
    for (int i = 0; i < TQKV__UNITS; i++) {
        if (format == TQKV__READY) break;
        const size_t at = (size_t)(i * TQKV__POSITIONS) * a->stride;
        raw[i] = TQKV__(open)(format, chunk, cursor->fields[0] + at, cursor->fields[1] + at, a->stride);
    }
    TQKV__UNROLL
    for (int k = 0; k < sixteens; k++) {
        TQKV__(codes) x[TQKV__UNITS];
        TQKV__I(lanes) lanes[TQKV__DIM_LANES];
        if (TQKV__ARE_PARTIAL(rows) && k && 16 * k >= left) continue;
        if (format == TQKV__READY) {
            memcpy(lanes, tile + k * plane, sizeof lanes);
        } else {
            TQKV__UNROLL
            for (int i = 0; i < TQKV__UNITS; i++) x[i] = TQKV__(look_up)(format, k, chunk, &raw[i]);
            TQKV__I(value_lanes)(x, lanes);
        }
        TQKV__UNROLL
        for (int i = 0; i < rows * TQKV__DIM_LANES; i++) {
            TQKV__I(sum) *sum = &sums[i / TQKV__DIM_LANES][k * TQKV__DIM_LANES + i % TQKV__DIM_LANES];
            *sum = TQKV__I(dot_lanes)(*sum, lanes[i % TQKV__DIM_LANES], y[i / TQKV__DIM_LANES]);
        }
    }
}

/* Adds: results[row][d] += (sum_j rows[row][d] * codes[j][d]) * unit of the row, for 16 * sixteens dimensions from d
   on, straight from the codes or from lanes in tile. format, rows and sixteens are constants. */
TQKV__OP void TQKV__I(add_chunk)(const int rows, const tqkv_format format, const int sixteens, const TQKV__(panel) * a,
                                 int d, const TQKV__I(product) * p, const int8_t *tile)
{
    const int all = sixteens * TQKV__DIM_LANES, step = format == TQKV__READY ? a->n : 16;
    const int left = TQKV__ARE_PARTIAL(rows) && a->dim - d < 16 * sixteens ? a->dim - d : 16 * sixteens;
    const TQKV__(chunk) chunk = TQKV__(open_chunk)(format, left, a->centroids);
    TQKV__(request) request = TQKV__(open_request)(format, a, TQKV__PRODUCTS, 0, d, left);
    TQKV__I(sum) sums[TQKV__FEW_ROWS][4 * TQKV__DIM_LANES];
    const int8_t *w = p->rows;
    TQKV__UNROLL
    for (int i = 0; i < rows * all; i++) sums[i / all][i % all] = TQKV__I(no_sum)();
    for (int first = 0; first < a->n; first += step) {
        TQKV__(cursor) cursor = TQKV__(cursor_at)(format, a, first, d);
        TQKV__ROLLED
        for (int j = first; j < first + step; j += TQKV__PRODUCTS, tile += TQKV__DIM_LANES * TQKV__LANE_BYTES) {
            TQKV__I(repeated) y[TQKV__FEW_ROWS];
            if (format != TQKV__READY) TQKV__(ask)(&request);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++)
                y[r] = TQKV__I(repeat)(w + (size_t)(r * p->row_floats) * sizeof(float), TQKV__TILE, j);
            TQKV__I(add_positions)(format, rows, sixteens, left, a, &chunk, &cursor, tile, y, sums);
            TQKV__(move)(a, TQKV__PRODUCTS, &cursor);
        }
    }
    TQKV__(codes) whole[TQKV__FEW_ROWS * 4 * TQKV__DIM_LANES];
    TQKV__UNROLL
    for (int i = 0; i < rows * all; i++) whole[i] = TQKV__I(whole_lanes)(sums[i / all][i % all]);
    if (format == TQKV__READY)
        TQKV__I(add_sums_of)(p, rows, all, all, d, whole);
    else
        TQKV__I(add_sums)(p, rows, all, left / 16 * TQKV__DIM_LANES, d, whole);
}

TQKV__OP void TQKV__I(add_rows)(const tqkv_format format, const int rows, const TQKV__(panel) * panel, int end,
                                const TQKV__I(product) * p)
{
    TQKV__(panel) a = *panel; /* results lie elsewhere */
    a.dim = end;
    for (int d = 0; d < end; d += 16 * TQKV__SIXTEENS(rows))
        TQKV__I(add_chunk)(rows, format, TQKV__SIXTEENS(rows), &a, d, p, NULL);
}

/* Finds the lanes of the dimensions [d, d + left) for all positions. tile: as add_chunk has it */
TQKV__LOOP void TQKV__I(turn_values)(const TQKV__(panel) * a, int d, int left, int8_t *tile)
{
    TQKV__ALIGNED int8_t room[TQKV__TILE * TQKV__CHUNK];
    const int sixteens = left / 16, units = a->n / TQKV__POSITIONS;
    TQKV__(decoders)[a->format](a, false, d, left, 0, a->n, room);
    for (int k = 0; k < sixteens; k++)
        for (int u = 0; u < units; u += TQKV__UNITS, tile += TQKV__DIM_LANES * TQKV__LANE_BYTES) {
            TQKV__(codes) x[TQKV__UNITS];
            TQKV__I(lanes) lanes[TQKV__DIM_LANES];
            TQKV__UNROLL
            for (int i = 0; i < TQKV__UNITS; i++)
                memcpy(&x[i], room + ((u + i) * sixteens + k) * TQKV__BYTES, sizeof x[i]);
            TQKV__I(value_lanes)(x, lanes);
            memcpy(tile, lanes, sizeof lanes);
        }
}

TQKV__LOOP void TQKV__I(add_lanes)(const TQKV__(panel) * panel, TQKV__I(product) p, int d, bool whole,
                                   const int8_t *tile, int n_rows)
{
    const TQKV__(panel) a = *panel;
    for (int rows; n_rows > 0; n_rows -= rows, TQKV__I(advance)(&p, rows)) {
        rows = TQKV__ROWS_OF(n_rows, TQKV__FEW_ROWS);
        if (whole)
            TQKV__WITH_ROWS(rows, TQKV__FEW_ROWS, TQKV__I(add_chunk), TQKV__READY, TQKV__MANY_SIXTEENS, &a, d, &p,
                            tile);
        else
            TQKV__WITH_ROWS(rows, TQKV__FEW_ROWS, TQKV__I(add_chunk), TQKV__READY, 1, &a, d, &p, tile);
    }
}

/* -- The loops of each format, for one and two rows -- */

typedef struct TQKV__I(loops) {
    void (*score)(const TQKV__(panel) *, int end, const TQKV__I(product) *, int rows);
    void (*add)(const TQKV__(panel) *, int end, const TQKV__I(product) *, int rows);
} TQKV__I(loops);

/* Whether a format has such loops: I8 and packed codes, of 6 bits where these gain 15%. */
#define TQKV__FEW_LOOPS(kind, main, book) \
    ((kind) == TQKV__GRID || ((kind) == TQKV__BOOK && (main) < 8 && (book) < (TQKV__INTEGER_LANES == 16 ? 7 : 6)))
#define TQKV__LOOPS_OF_FORMAT(unused, format, name, kind, main, upper, book, plain) \
    TQKV__LOOP void TQKV__I(score_##format)(const TQKV__(panel) * a, int end, const TQKV__I(product) * p, int rows) \
    { \
        if (TQKV__FEW_LOOPS(kind, main, book)) TQKV__BY_ROWS(score_rows, format, kind, book); \
    } \
    TQKV__LOOP void TQKV__I(add_##format)(const TQKV__(panel) * a, int end, const TQKV__I(product) * p, int rows) \
    { \
        if (TQKV__FEW_LOOPS(kind, main, book)) TQKV__BY_ROWS(add_rows, format, kind, book); \
    }
#define TQKV__BY_ROWS(loop, format, kind, book) \
    (rows == 1   ? TQKV__I(loop)(format, 1, a, end, p) \
     : rows == 2 ? TQKV__I(loop)(format, 2, a, end, p) \
     : TQKV__FEW_ROWS > 2 && ((kind) == TQKV__GRID || (TQKV__LANES_ROWS_OF_BOOKS > 3 && (book) < 6)) \
         ? TQKV__I(loop)(format, TQKV__FEW_ROWS, a, end, p) \
         : (void)0)
TQKV__FORMATS(TQKV__LOOPS_OF_FORMAT, )

#define TQKV__LOOPS_ENTRY(unused, format, ...) {TQKV__I(score_##format), TQKV__I(add_##format)},
static const TQKV__I(loops) TQKV__I(loops_by_format)[] = {{NULL, NULL}, TQKV__FORMATS(TQKV__LOOPS_ENTRY, )};

/* Whether so many rows are multiplied straight from the codes, which have no loop of four rows for 6 bits. */
static bool TQKV__I(are_few)(tqkv_format format, int n_rows)
{
    const tqkv__format *f = tqkv__format_of(format);
    const int most = f->kind == TQKV__GRID ? TQKV__LANES_ROWS : f->book_bits == 6 ? 3 : TQKV__LANES_ROWS_OF_BOOKS;
    return TQKV__FEW_LOOPS(f->kind, f->main_bits, f->book_bits) && n_rows < most;
}

TQKV__OP void TQKV__I(few_rows)(void (*loop)(const TQKV__(panel) *, int, const TQKV__I(product) *, int),
                                const TQKV__(panel) * panel, int end, TQKV__I(product) p, int n_rows)
{
    for (int left = n_rows, rows; left > 0; left -= rows, TQKV__I(advance)(&p, rows)) {
        rows = TQKV__ROWS_OF(left, TQKV__FEW_ROWS);
        loop(panel, end, &p, rows);
    }
}

/* -- A tile -- */

TQKV__TARGET static void TQKV__I(score_panel)(const TQKV__(panel) * panel, const TQKV__I(product) * p, int n_rows)
{
    TQKV__ALIGNED int8_t tile[TQKV__PANEL / TQKV__PRODUCTS * 2 * TQKV__LANE_BYTES];
    if (TQKV__I(are_few)(panel->format, n_rows)) {
        TQKV__I(few_rows)(TQKV__I(loops_by_format)[panel->format].score, panel, panel->dim, *p, n_rows);
        return;
    }
    for (int j = 0; j < panel->n; j += 2 * TQKV__INTEGER_LANES) {
        TQKV__I(turn_keys)(panel, j, tile);
        TQKV__I(score_lanes)(*p, panel->dim, j, tile, n_rows);
    }
}

TQKV__TARGET static void TQKV__I(score_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment,
                                             const float *q, int n_rows, bool add, float *scores)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    TQKV__ALIGNED uint8_t room[16 * TQKV_MAX_HEAD_DIM];
    const uint8_t *row = tqkv__codes_at(s, kv_head, segment->slot);
    if (tqkv__in_floats(s)) {
        TQKV__(floats_tile)(s, kv_head, segment, false, q, n_rows, add, scores);
        return;
    }
    TQKV__(factors)(s, tqkv__norms_at(s, kv_head, segment->slot), segment, true, factors);
    TQKV__(copy_rest)(s, row, segment->n, room);
    for (int d = 0, b = 0; d < s->head_dim; d += s->panel_dim, b++) {
        const TQKV__(panel) panel = TQKV__(open_panel)(s, row, segment, d, room);
        const TQKV__I(product) p = {(const int8_t *)(q) + 2 * d,
                                    q + TQKV__QUERY_UNIT(s->head_dim),
                                    q + TQKV__QUERY_OFFSET(s->head_dim) + b,
                                    s->head_dim,
                                    scores,
                                    TQKV__TILE,
                                    factors + b * TQKV__TILE,
                                    add || b > 0};
        TQKV__I(score_panel)(&panel, &p, n_rows);
    }
}

TQKV__TARGET static void TQKV__I(add_panel)(const TQKV__(panel) * panel, const TQKV__I(product) * p, int n_rows)
{
    enum { STEP = 16 * TQKV__MANY_SIXTEENS, PLANE = TQKV__TILE / TQKV__PRODUCTS * TQKV__DIM_LANES * TQKV__LANE_BYTES };
    TQKV__ALIGNED int8_t tile[TQKV__CHUNK / 16 * PLANE];
    const int plane = panel->n / TQKV__PRODUCTS * TQKV__DIM_LANES * TQKV__LANE_BYTES;
    const bool few = TQKV__I(are_few)(panel->format, n_rows);
    const int all = TQKV__ARE_PARTIAL(n_rows) ? panel->dim : panel->dim / 32 * 32; /* or whole passes of 32 */
    const int end = few ? all : 0; /* of the dimensions that few rows add straight from the codes */
    if (few) TQKV__I(few_rows)(TQKV__I(loops_by_format)[panel->format].add, panel, end, *p, n_rows);
    for (int d = end, left; d < panel->dim; d += left) {
        left = panel->dim - d < TQKV__CHUNK ? panel->dim - d : TQKV__CHUNK;
        TQKV__I(turn_values)(panel, d, left, tile);
        for (int e = 0; e < left; e += STEP)
            TQKV__I(add_lanes)(panel, *p, d + e, left - e >= STEP, tile + e / 16 * plane, n_rows);
    }
}

TQKV__TARGET static void TQKV__I(value_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment,
                                             const float *weights, int n_rows, float *scaled, float *out)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    TQKV__ALIGNED uint8_t room[16 * TQKV_MAX_HEAD_DIM];
    const uint8_t *row = tqkv__codes_at(s, kv_head, segment->slot);
    if (tqkv__in_floats(s)) {
        TQKV__(floats_tile)(s, kv_head, segment, true, weights, n_rows, true, out);
        return;
    }
    TQKV__(factors)(s, tqkv__norms_at(s, kv_head, segment->slot), segment, false, factors);
    TQKV__(copy_rest)(s, row, segment->n, room);
    for (int d = 0, b = 0; d < s->head_dim; d += s->panel_dim, b++) {
        const TQKV__(panel) panel = TQKV__(open_panel)(s, row, segment, d, room);
        const TQKV__I(product) p = {(const int8_t *)(scaled),
                                    scaled + TQKV__WEIGHTS_UNIT,
                                    scaled + TQKV__WEIGHTS_OFFSET,
                                    TQKV__TILE,
                                    out + d,
                                    s->head_dim,
                                    NULL,
                                    true};
        if (d % s->norm_dim == 0)
            for (int at = 0; at < n_rows * TQKV__TILE; at += TQKV__TILE)
                TQKV__I(round_weights)(s, weights + at, factors + b * TQKV__TILE, segment->n, scaled + at);
        TQKV__I(add_panel)(&panel, &p, n_rows);
    }
}

static const tqkv__kernels TQKV__I(kernels) = {TQKV__I(round_query), TQKV__I(score_tile), TQKV__(softmax_tile),
                                               TQKV__(end_piece),    TQKV__I(value_tile), TQKV__(sum_heads)};

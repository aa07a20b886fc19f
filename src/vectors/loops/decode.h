/* >>k-decode: codes as floats, a segment of positions at a time. */

/* Decoded rows are floats. Their format has the number that no store may have. */
#define TQKV__FLOATS TQKV_FORMAT_DEFAULT
/* Codes of 2 or 4 main bits, in the order of reorder. */
#define TQKV__PACKED(format) (TQKV__MAIN_BITS(format) < 8)
/* Vectors in a strip, which is decoded together. */
#define TQKV__STRIP(format) (TQKV__PACKED(format) ? TQKV__NIBBLE_STRIP : 4)
/* Formats with loops straight from the codes. Not those of codebooks in bytes, and on AVX2 none of 6 bits: their rows
   are decoded first, which takes 1.1 to 1.4 times as long for one and two query rows. I8 and TQ5 are as exact or
   smaller, and faster; the loops would take 35 KB. */
#define TQKV__HAS_LOOPS(kind, main, book) ((kind) != TQKV__BOOK || ((main) < 8 && (TQKV__LANES != 8 || (book) < 6)))
#define TQKV__DIRECT(f)                   TQKV__HAS_LOOPS(TQKV__KIND(f), TQKV__MAIN_BITS(f), TQKV__BOOK_BITS(f))
/* Rows of a codebook's loops. More take decoded rows: on AVX2 four took as long or longer straight from the codes (Zen
   4, D=128: TQ3 1.10, TQ2 1.04, TQ5 to TQ8 0.99 times). */
#define TQKV__BOOK_ROWS(book, keys) (TQKV__LANES == 8 && ((keys) || (book) != 4) ? 2 : 4)
/* Most rows of a format's loops, which are compiled for 1, 2 and so many. No kind: decoded rows. */
#define TQKV__KEY_ROWS(kind, book)                                                                                     \
    ((kind) == TQKV__BOOK ? TQKV__BOOK_ROWS(book, true) : (kind) == 0 ? TQKV__DECODED_SCORE_ROWS : TQKV__SCORE_ROWS)
#define TQKV__VALUE_ROWS(kind, book) ((kind) == TQKV__BOOK ? TQKV__BOOK_ROWS(book, false) : TQKV__ROWS)

/* Distance between decoded rows. The gap keeps equal columns of many rows out of the same cache sets. */
#define TQKV__X_STRIDE(dim) ((dim) + 16)

/* Calls the loop for 1, 2 or `most` rows, each a constant. */
#define TQKV__BY_ROWS(loop, format, most)                                                                              \
    (rows == 1    ? TQKV__(loop)(format, 1, panel)                                                                     \
     : rows == 2  ? TQKV__(loop)(format, 2, panel)                                                                     \
     : (most) > 2 ? TQKV__(loop)(format, most, panel)                                                                  \
                  : (void)0)

/* -- Codes as floats. The lanes of a vector are dimensions, of keys as of values. -- */

/* One panel of a segment of positions, and the query rows that use it. rows and results: queries and scores for keys,
   weights and sums for values; their rows are row_stride and result_stride apart. */
typedef struct TQKV__(panel) {
    const tqkv__stream *stream;
    const uint8_t *codes; /* of the first position; the others are `stride` bytes apart */
    ptrdiff_t ahead;      /* bytes to the codes that will be read next */
    size_t stride, upper; /* upper: bytes from the panel's low nibbles to its upper bits */
    bool first;           /* of its rows, whose codes begin with it */
    int n, dim;           /* positions; values of the panel */
    const float *rows;
    int row_stride, result_stride; /* between the pointers: read as one vector, they would wait for their two stores */
    float *results;
    int n_rows;           /* at most as many as the loop's; the last one takes the place of those that are missing */
    const float *factors; /* [n], keys only */
    bool add;             /* add to the scores in results */
} TQKV__(panel);

/* Loops for one format. rows: 1, 2, or the most that registers hold. */
typedef struct TQKV__(loops) {
    void (*decode)(const TQKV__(panel) *, int n, float *x);
    void (*score)(const TQKV__(panel) *, int rows);
    void (*accumulate)(const TQKV__(panel) *, int rows);
    void (*add_rest)(const TQKV__(panel) *, int rows);
} TQKV__(loops);

/* Returns the bytes of a strip in the field of main bits, and in the field of upper bits. */
TQKV__OP int TQKV__(strip_bytes)(const tqkv_format format, int per_lane)
{
    return TQKV__LANES * per_lane * (format == TQKV__FLOATS ? 32 : TQKV__MAIN_BITS(format)) / 8;
}

TQKV__OP int TQKV__(upper_bytes)(const tqkv_format format, int per_lane)
{
    return TQKV__LANES * per_lane * TQKV__UPPER_BITS(format) / 8;
}

TQKV__OP size_t TQKV__(stride)(const tqkv_format format, const TQKV__(panel) * panel)
{
    return format == TQKV__FLOATS ? (size_t)TQKV__X_STRIDE(panel->dim) * sizeof(float) : panel->stride;
}

/* The parameters format, per_lane, rows, k and width are constants here and below. */
TQKV__OP void TQKV__(load_codebook)(const tqkv_format format, const tqkv__stream *s, TQKV__VECTOR *table)
{
    if (TQKV__KIND(format) == TQKV__BOOK) TQKV__(load_table)(TQKV__BOOK_BITS(format), TQKV__PACKED(format), s, table);
}

/* Returns vector k of the strip at p, with its upper bits at `upper`. Packed codes come in the order of
   reorder. */
TQKV__OP TQKV__VECTOR TQKV__(value)(const tqkv_format format, const int per_lane, const int k,
                                    const TQKV__VECTOR *table, const uint8_t *p, const uint8_t *upper)
{
    const int bits = TQKV__BOOK_BITS(format);
    if (format == TQKV__FLOATS) return TQKV__(load)((const float *)(const void *)p + k * TQKV__LANES);
    if (TQKV__KIND(format) == TQKV__GRID) return TQKV__(load_i8)(p + k * TQKV__LANES);
    if (TQKV__KIND(format) == TQKV__HALF) return TQKV__(load_f16)(p + 2 * k * TQKV__LANES);
    return TQKV__PACKED(format) ? TQKV__(centroids_of_packed)(bits, per_lane, k, table, p, upper)
                                : TQKV__(centroids_of_bytes)(bits, per_lane, k, table, p);
}

/* Finds vectors k to k + count - 1 of the strip; x: [count] */
TQKV__OP void TQKV__(values)(const tqkv_format format, const int per_lane, const int k, const int count,
                             const TQKV__VECTOR *table, const uint8_t *p, const uint8_t *upper, TQKV__VECTOR *x)
{
    TQKV__UNROLL
    for (int i = 0; i < count; i++) x[i] = TQKV__(value)(format, per_lane, k + i, table, p, upper);
}

/* -- A panel, which is a multiple of 16 values, is whole strips and then, as they fit, strips of 4, 2 and 1 vectors.
   -- */

/* Whether there are strips of two vectors. On vectors of 16 only packed codes gain by them. */
#define TQKV__SHORT_STRIPS(format) (TQKV__LANES < 16 || TQKV__PACKED(format))

/* Returns the vectors of the next strip, when so many values of the panel are left. */
TQKV__OP int TQKV__(strip_length)(const tqkv_format format, int left)
{
    const int strip = TQKV__STRIP(format);
    left /= TQKV__LANES;
    if (strip * TQKV__LANES <= 16 || left >= strip) return strip;
    if (strip > 4 && left >= 4) return 4;
    return TQKV__SHORT_STRIPS(format) && left >= 2 ? 2 : 1;
}

/* Calls the loop for a strip of `count` vectors, fewer than a whole one, as a constant. */
#define TQKV__SHORTER(loop, ...)                                                                                       \
    (TQKV__STRIP(format) > 4 && count == 4      ? loop(4, __VA_ARGS__)                                                 \
     : TQKV__SHORT_STRIPS(format) && count == 2 ? loop(2, __VA_ARGS__)                                                 \
     : TQKV__LANES == 16                        ? loop(1, __VA_ARGS__)                                                 \
                                                : (void)0)

/* Decodes a strip of per_lane vectors to floats. */
TQKV__OP void TQKV__(decode_strip)(const int per_lane, const tqkv_format format, const TQKV__VECTOR *table,
                                   const uint8_t *p, const uint8_t *upper, float *x)
{
    TQKV__VECTOR strip[8];
    TQKV__(values)(format, per_lane, 0, per_lane, table, p, upper, strip);
    TQKV__UNROLL
    for (int k = 0; k < per_lane; k++) TQKV__(store)(x + k * TQKV__LANES, strip[k]);
}

/* Decodes the first n positions to floats. x: [n][TQKV__X_STRIDE] */
TQKV__OP void TQKV__(decode)(const tqkv_format format, const TQKV__(panel) * panel, int n, float *x)
{
    TQKV__VECTOR table[8];
    TQKV__(load_codebook)(format, panel->stream, table);
    for (int j = 0; j < n; j++, x += TQKV__X_STRIDE(panel->dim)) {
        const uint8_t *p = panel->codes + (size_t)j * panel->stride, *upper = p + panel->upper;
        for (int left = panel->dim, count; left > 0; left -= count * TQKV__LANES) {
            count = TQKV__(strip_length)(format, left);
            if (count == TQKV__STRIP(format))
                TQKV__(decode_strip)(TQKV__STRIP(format), format, table, p, upper, x + panel->dim - left);
            else
                TQKV__SHORTER(TQKV__(decode_strip), format, table, p, upper, x + panel->dim - left);
            p += TQKV__(strip_bytes)(format, count);
            upper += TQKV__(upper_bytes)(format, count);
        }
    }
}

/* As reorder, for a matrix of `columns`; columns and decoded are constants where that is worth the code. */
TQKV__OP void TQKV__(reorder_matrix)(const bool decoded, const int columns, const float *from, float *to)
{
    enum { most = TQKV__COLUMNS * TQKV__MATRIX_ROWS / TQKV__LANES };
    TQKV__VECTOR x[most];
    const int n = columns * TQKV__MATRIX_ROWS / TQKV__LANES;
    TQKV__UNROLL /* over a constant: clang warns of a loop that it cannot unroll, gcc of what is left out */
    for (int i = 0; i < most; i++) x[i] = TQKV__(load)(from + (i < n ? i : 0) * TQKV__LANES);
    TQKV__(turn)(decoded, columns, x);
    TQKV__UNROLL
    for (int i = 0; i < most; i++)
        if (i < n) TQKV__(store)(to + i * TQKV__LANES, x[i]);
}

TQKV__TARGET static void TQKV__(reorder)(const tqkv__stream *s, int columns, bool decoded, const float *from, float *to)
{
    const int most = s->main_bits < 8 ? columns : 1;
    for (int d = 0; most == 1 && d < s->head_dim; d += TQKV__LANES) TQKV__(store)(to + d, TQKV__(load)(from + d));
    if (most == 1) return;
    for (int d = 0, left = s->panel_dim, now; d < s->head_dim; d += now * TQKV__MATRIX_ROWS) {
        for (now = most; now * TQKV__MATRIX_ROWS > left;) now /= 2;
        if (now == TQKV__COLUMNS && decoded)
            TQKV__(reorder_matrix)(true, TQKV__COLUMNS, from + d, to + d);
        else if (now == TQKV__COLUMNS)
            TQKV__(reorder_matrix)(false, TQKV__COLUMNS, from + d, to + d);
        else
            TQKV__(reorder_matrix)(decoded, now, from + d, to + d);
        left -= now * TQKV__MATRIX_ROWS;
        if (!left) left = s->panel_dim;
    }
}

/* Rows of a matrix: queries or weights. */
typedef struct TQKV__(rows) {
    const float *at;
    size_t offset[TQKV__ROWS]; /* of each row, in floats */
} TQKV__(rows);

/* Returns row r of a loop, in a panel: of three rows in the loop for four the last stands twice. Only that loop has a
   row 3. */
TQKV__OP int TQKV__(row_in)(const TQKV__(panel) * panel, const int r) { return r < 3 ? r : panel->n_rows - 1; }

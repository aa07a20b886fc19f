/* >>k-dot: scores straight from the codes. */

TQKV__OP TQKV__(rows) TQKV__(open_rows)(const int rows, int stride, const TQKV__(panel) * panel)
{
    TQKV__(rows) all;
    all.at = panel->rows;
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) all.offset[r] = (size_t)(TQKV__(row_in)(panel, r) * stride);
    return all;
}

/* Whether the loop decodes a strip's vectors together. They share work, which the compiler finds only in adjacent
   code. */
TQKV__OP bool TQKV__(whole_strips)(const tqkv_format format)
{
    return TQKV__KIND(format) == TQKV__BOOK && (TQKV__STRIP_TOGETHER || !TQKV__PACKED(format));
}

/* Makes the compiler read the table from memory each time. 16 registers cannot hold tables and sums; tables are the
   better ones to spill, because nothing waits for them. The sums of one row leave room for both. */
TQKV__OP const TQKV__VECTOR *TQKV__(reload)(const int rows, const TQKV__VECTOR *table)
{
    if (TQKV__LANES == 8 && rows > 1) __asm__ volatile("" : "+r"(table)::"memory");
    return table;
}

/* Four keys that are scored together: those of vectors at p[m] + at, with their upper bits at p[m] + upper. */
typedef struct TQKV__(keys) {
    const uint8_t *p[4];
    size_t at, upper;
} TQKV__(keys);

/* Adds products to sums[row][m], lane by lane, of query `row` and a strip of per_lane vectors of key m */
TQKV__OP void TQKV__(dot_strip)(const int per_lane, const tqkv_format format, const int rows, const TQKV__VECTOR *table,
                                const TQKV__(keys) * keys, const TQKV__(rows) * queries, TQKV__VECTOR (*sums)[4])
{
    TQKV__VECTOR x[8], query[TQKV__ROWS];
    if (TQKV__(whole_strips)(format)) {
        TQKV__UNROLL
        for (int m = 0; m < 4; m++) {
            const uint8_t *p = keys->p[m] + keys->at, *upper = keys->p[m] + keys->upper;
            TQKV__(values)(format, per_lane, 0, per_lane, TQKV__(reload)(rows, table), p, upper, x);
            TQKV__UNROLL
            for (int k = 0; k < per_lane; k++) {
                TQKV__UNROLL
                for (int r = 0; r < rows; r++) {
                    query[r] = TQKV__(load)(queries->at + queries->offset[r] + k * TQKV__LANES);
                    sums[r][m] = TQKV__(fma)(query[r], x[k], sums[r][m]);
                }
            }
        }
        return;
    }
    TQKV__UNROLL
    for (int k = 0; k < per_lane; k++) {
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) query[r] = TQKV__(load)(queries->at + queries->offset[r] + k * TQKV__LANES);
        TQKV__UNROLL
        for (int m = 0; m < 4; m++) {
            x[m] = TQKV__(value)(format, per_lane, k, table, keys->p[m] + keys->at, keys->p[m] + keys->upper);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++) sums[r][m] = TQKV__(fma)(query[r], x[m], sums[r][m]);
        }
    }
}

/* A strip whose vectors are taken one after the other. */
typedef struct TQKV__(rest) {
    TQKV__(codes) main, upper, codes; /* of packed codes: fields, and codes of the next vectors */
    const uint8_t *p;                 /* of others */
} TQKV__(rest);

/* Vectors whose codes are joined from the two fields together. */
#define TQKV__JOINED(format) (TQKV__BOOK_BITS(format) > 4 ? 4 : 8)

/* Opens the strip of each key; `count` is a constant for packed codes. */
TQKV__OP void TQKV__(open_strips)(const tqkv_format format, const int count, const TQKV__(keys) * keys,
                                  TQKV__(rest) * rest)
{
    TQKV__UNROLL
    for (int m = 0; m < 4; m++) {
        rest[m].p = keys->p[m] + keys->at;
        if (TQKV__PACKED(format)) {
            const uint8_t *upper = keys->p[m] + keys->upper;
            TQKV__(load_fields)(TQKV__BOOK_BITS(format), count, rest[m].p, upper, &rest[m].main, &rest[m].upper);
        }
    }
}

/* Joins the codes from vector k of the strips on. */
TQKV__OP void TQKV__(join_strips)(const tqkv_format format, int k, TQKV__(rest) * rest)
{
    (void)k; /* only on vectors of 16 */
    if (!TQKV__PACKED(format)) return;
    TQKV__UNROLL
    for (int m = 0; m < 4; m++, rest++)
        rest->codes = TQKV__(join_fields)(TQKV__BOOK_BITS(format), k, rest->main, rest->upper);
}

/* Finds the next vector of each strip, whose codes are joined; x: [4] */
TQKV__OP void TQKV__(next_vectors)(const tqkv_format format, const TQKV__VECTOR *table, TQKV__(rest) * rest,
                                   TQKV__VECTOR *x)
{
    TQKV__UNROLL
    for (int m = 0; m < 4; m++, rest++) {
        if (TQKV__PACKED(format)) {
            x[m] = TQKV__(look_up)(TQKV__BOOK_BITS(format), table, rest->codes);
            TQKV__(next_codes)(TQKV__BOOK_BITS(format), &rest->codes);
        } else {
            x[m] = TQKV__(value)(format, 1, 0, table, rest->p, rest->p);
            rest->p += TQKV__(strip_bytes)(format, 1);
        }
    }
}

/* Does what dot_strip does for any number of vectors, one after the other; of packed codes 8 or 4. */
TQKV__OP void TQKV__(dot_vectors)(const tqkv_format format, const int rows, int count, const TQKV__VECTOR *table,
                                  const TQKV__(keys) * keys, const TQKV__(rows) * queries, TQKV__VECTOR (*sums)[4])
{
    const float *at = queries->at;
    const int joined = TQKV__JOINED(format) == 8 ? count : 4;
    TQKV__(rest) rest[4];
    if (count == 8)
        TQKV__(open_strips)(format, 8, keys, rest);
    else
        TQKV__(open_strips)(format, 4, keys, rest);
    for (int k = 0; k < count; k += joined) {
        TQKV__(join_strips)(format, k, rest);
        for (int i = 0; i < joined; i++, at += TQKV__LANES) {
            TQKV__VECTOR query[TQKV__ROWS], v[4];
            TQKV__UNROLL
            for (int r = 0; r < rows; r++) query[r] = TQKV__(load)(at + queries->offset[r]);
            TQKV__(next_vectors)(format, table, rest, v);
            TQKV__UNROLL
            for (int m = 0; m < 4; m++) {
                TQKV__UNROLL
                for (int r = 0; r < rows; r++) sums[r][m] = TQKV__(fma)(query[r], v[m], sums[r][m]);
            }
        }
    }
}

/* The cache that codes are fetched to. */
#define TQKV__NEAR(format) (TQKV__UPPER_BITS(format) ? TQKV__L1 : TQKV__L2)

/* Asks for the codes of four keys of the next tile: packed rows as one piece of memory, before the first strip of the
   first panel, two lines at a time; others with each strip, because many lines at once are slower. Of the latter a
   whole strip, because a loop for fewer lines costs more than they. `begin`: before the first strip */
TQKV__OP void TQKV__(ask_ahead)(const tqkv_format format, const bool begin, const TQKV__(panel) * panel,
                                const TQKV__(keys) * keys)
{
    const uint8_t *first = keys->p[0] + panel->ahead;
    if (format == TQKV__FLOATS || begin != TQKV__PACKED(format)) return;
    if (begin)
        for (size_t i = 0; panel->first && i < 4 * panel->stride; i += 128)
            tqkv__prefetch(TQKV__NEAR(format), first + i, 128);
    TQKV__UNROLL
    for (int m = 0; !begin && m < 4; m++)
        tqkv__prefetch(TQKV__NEAR(format), keys->p[m] + (ptrdiff_t)keys->at + panel->ahead,
                       (size_t)TQKV__(strip_bytes)(format, TQKV__STRIP(format)));
}

/* Goes on behind a strip of `count` vectors. */
TQKV__OP void TQKV__(advance)(const tqkv_format format, int count, TQKV__(keys) * keys, TQKV__(rows) * queries)
{
    keys->at += (size_t)TQKV__(strip_bytes)(format, count);
    keys->upper += (size_t)TQKV__(upper_bytes)(format, count);
    queries->at += count * TQKV__LANES;
}

/* -- The products of a panel with four keys, in the way that is quickest for its format -- */

/* Vectors of 4 and 8 take strip after strip, with code for all vectors of each length. */
TQKV__OP void TQKV__(dot_by_strips)(const tqkv_format format, const int rows, const TQKV__(panel) * panel,
                                    const TQKV__VECTOR *table, TQKV__(keys) * keys, TQKV__(rows) * queries,
                                    TQKV__VECTOR (*sums)[4])
{
    for (int left = panel->dim, count; left > 0; left -= count * TQKV__LANES) {
        count = TQKV__(strip_length)(format, left);
        TQKV__(ask_ahead)(format, false, panel, keys);
        if (left >= TQKV__STRIP(format) * TQKV__LANES)
            TQKV__(dot_strip)(TQKV__STRIP(format), format, rows, table, keys, queries, sums);
        else
            TQKV__SHORTER(TQKV__(dot_strip), format, rows, table, keys, queries, sums);
        TQKV__(advance)(format, count, keys, queries);
    }
}

/* Packed codes on vectors of 16 take strips of 8 and 4 one vector after the other, because code for all of their
   vectors gains nothing there; but strips of 2 and 1. */
TQKV__OP void TQKV__(dot_long_strips)(const tqkv_format format, const int rows, const TQKV__(panel) * panel,
                                      const TQKV__VECTOR *table, TQKV__(keys) * keys, TQKV__(rows) * queries,
                                      TQKV__VECTOR (*sums)[4])
{
    for (int left = panel->dim, count; left > 0; left -= count * TQKV__LANES) {
        count = TQKV__(strip_length)(format, left);
        TQKV__(ask_ahead)(format, false, panel, keys);
        if (count > 2)
            TQKV__(dot_vectors)(format, rows, count, table, keys, queries, sums);
        else
            TQKV__SHORTER(TQKV__(dot_strip), format, rows, table, keys, queries, sums);
        TQKV__(advance)(format, count, keys, queries);
    }
}

/* Returns the vectors of the next strip where strips have any length, when so many values of the panel are left. */
TQKV__OP int TQKV__(any_length)(const tqkv_format format, int left)
{
    const int room = TQKV__STRIP(format) * TQKV__LANES;
    return (left < room ? left : room) / TQKV__LANES;
}

/* I8 on vectors of 16 takes all strips one vector after the other. */
TQKV__OP void TQKV__(dot_by_vectors)(const tqkv_format format, const int rows, const TQKV__(panel) * panel,
                                     const TQKV__VECTOR *table, TQKV__(keys) * keys, TQKV__(rows) * queries,
                                     TQKV__VECTOR (*sums)[4])
{
    for (int left = panel->dim, count; left > 0; left -= count * TQKV__LANES) {
        count = TQKV__(any_length)(format, left);
        TQKV__(ask_ahead)(format, false, panel, keys);
        TQKV__(dot_vectors)(format, rows, count, table, keys, queries, sums);
        TQKV__(advance)(format, count, keys, queries);
    }
}

/* Halves and decoded rows on vectors of 16 take whole strips: code for all vectors of whole strips gains 3%, the rest
   goes one after the other. */
TQKV__OP void TQKV__(dot_whole_strips)(const tqkv_format format, const int rows, const TQKV__(panel) * panel,
                                       const TQKV__VECTOR *table, TQKV__(keys) * keys, TQKV__(rows) * queries,
                                       TQKV__VECTOR (*sums)[4])
{
    for (int left = panel->dim, count; left > 0; left -= count * TQKV__LANES) {
        count = TQKV__(any_length)(format, left);
        TQKV__(ask_ahead)(format, false, panel, keys);
        if (left < TQKV__STRIP(format) * TQKV__LANES)
            TQKV__(dot_vectors)(format, rows, count, table, keys, queries, sums);
        else
            TQKV__(dot_strip)(TQKV__STRIP(format), format, rows, table, keys, queries, sums);
        TQKV__(advance)(format, count, keys, queries);
    }
}

/* Finds sums[row][m]: products, lane by lane, of query `row` and key m; m < 4 */
TQKV__OP void TQKV__(dot_keys)(const tqkv_format format, const int rows, const TQKV__(panel) * panel,
                               const TQKV__VECTOR *table, TQKV__(keys) * keys, TQKV__VECTOR (*sums)[4])
{
    TQKV__(rows) queries = TQKV__(open_rows)(rows, panel->row_stride, panel);
    TQKV__(ask_ahead)(format, true, panel, keys);
    TQKV__UNROLL
    for (int i = 0; i < 4 * rows; i++) sums[i / 4][i % 4] = TQKV__(set1)(0.0f);
    if (TQKV__LANES < 16)
        TQKV__(dot_by_strips)(format, rows, panel, table, keys, &queries, sums);
    else if (TQKV__PACKED(format))
        TQKV__(dot_long_strips)(format, rows, panel, table, keys, &queries, sums);
    else if (TQKV__KIND(format) == TQKV__GRID)
        TQKV__(dot_by_vectors)(format, rows, panel, table, keys, &queries, sums);
    else
        TQKV__(dot_whole_strips)(format, rows, panel, table, keys, &queries, sums);
}

/* Writes a vector of scores for each row: (+)= factors * sum_across(fours). */
TQKV__OP void TQKV__(store_scores)(const int rows, const TQKV__(panel) * panel, int first,
                                   float (*fours)[TQKV__LANES * TQKV__LANES / 4])
{
    const TQKV__VECTOR factors = TQKV__(load)(panel->factors + first);
    TQKV__VECTOR before[TQKV__ROWS];
    float *to[TQKV__ROWS];
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) {
        to[r] = panel->results + TQKV__(row_in)(panel, r) * TQKV__TILE + first;
        before[r] = panel->add ? TQKV__(load)(to[r]) : TQKV__(set1)(0.0f);
    }
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) TQKV__(store)(to[r], TQKV__(fma)(TQKV__(sum_across)(fours[r]), factors, before[r]));
}

/* Finds scores[row][j] (+)= factors[j] * (q[row] . key j), four keys at a time. Each key is decoded once for all rows.
   Summing the lanes of four vectors costs little more than of one. Writes whole vectors. */
TQKV__OP void TQKV__(score)(const tqkv_format format, const int rows, const TQKV__(panel) * panel)
{
    TQKV__ALIGNED float fours[TQKV__ROWS][TQKV__LANES * TQKV__LANES / 4];
    const int n = panel->n;
    const size_t stride = TQKV__(stride)(format, panel);
    const uint8_t *codes = panel->codes;
    TQKV__VECTOR table[8];
    TQKV__(load_codebook)(format, panel->stream, table);
    for (int first = 0; first < n; first += TQKV__LANES) {
        for (int i = 0; i < TQKV__LANES; i += 4) {
            TQKV__VECTOR sums[TQKV__ROWS][4];
            TQKV__(keys) keys;
            keys.at = 0;
            keys.upper = panel->upper;
            TQKV__UNROLL
            for (int m = 0; m < 4; m++) {
                keys.p[m] = codes;
                /* Past the end: the last key again; decoded rows are padded with copies of it. */
                codes += format == TQKV__FLOATS || first + i + m + 1 < n ? stride : 0;
            }
            TQKV__(dot_keys)(format, rows, panel, table, &keys, sums);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++) TQKV__(store)(fours[r] + i / 4 * TQKV__LANES, TQKV__(sum_fours)(sums[r]));
        }
        TQKV__(store_scores)(rows, panel, first, fours);
    }
}

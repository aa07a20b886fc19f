/* >>k-integer-few: one and two rows of integers, straight from the codes; a set with tables of bytes in registers has
   them. */

#if TQKV__LOOKED_UP
/* Few rows multiply codes that become bytes only in registers. An integer of a row is 256 times its high byte plus its
   low one, both signed, and has two sums. Codes are c + 128, because the products want one factor unsigned; sums begin
   with -128 times that of the other. A vector has 64 bytes in one of three orders, where p are positions and d
   dimensions:

     nibbles: one position, as its fields are stored. Nibble 0 is the lower code of each byte, nibble 1 the upper one.
       byte         0     1     2  ...    63
       nibble 0    d0    d2    d4  ...  d126
       nibble 1    d1    d3    d5  ...  d127

     quarters, for scores: sixteen k of 64 dimensions, d16k to d16k+15, of four positions
       byte         0 to 15   16 to 31   32 to 47   48 to 63
                    p0        p1         p2         p3

     quarters, for sums ("lanes"): the same 64 codes, the positions of a dimension side by side
       byte         0 to 3    4 to 7     ...        60 to 63
                    p0 to p3 of d16k     ...        of d16k+15     */

/* -- Nibbles -- */

/* Dimensions in both nibbles of a vector of codes */
#define TQKV__NIBBLES (2 * TQKV__BYTES)

/* Nibbles are for TQ4 with fewer rows than take lanes, two at a time, for TQ5 with two and TQ6 with one, where they
   fill more than half a vector. Four rows of 80 dimensions take less time in quarters. */
static bool TQKV__I(takes_nibbles)(const tqkv__stream *s, int n, int n_rows)
{
    const int most = s->upper_bits ? 3 - s->upper_bits : s->panel_dim > 80 ? TQKV__LANES_ROWS - 1 : 2;
    return n_rows <= most && n % TQKV__KEYS_AT_ONCE == 0 && s->main_bits == 4 && s->panel_dim > TQKV__BYTES;
}

/* The integers of a row of queries by nibbles: bytes[][0] their high bytes, [1] their low ones; starts: the first sums
   of both */
typedef struct TQKV__I(nibble_query) {
    int8_t bytes[TQKV__PANEL / TQKV__BYTES][2][TQKV__BYTES];
    TQKV__(codes) starts[2];
} TQKV__I(nibble_query);

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(open_nibble_query)(const int16_t *words, int dim,
                                                                   TQKV__I(nibble_query) * to)
{
    to->starts[0] = to->starts[1] = TQKV__I(no_sum)();
    for (int d = 0; d < dim; d += TQKV__NIBBLES)
        for (int nibble = 0; nibble < 2; nibble++) {
            TQKV__(codes) a[2], b[2];
            TQKV__I(split)(words + d, dim - d, a);
            TQKV__I(split)(words + d + TQKV__BYTES, dim - d - TQKV__BYTES, b);
            TQKV__UNROLL
            for (int i = 0; i < 2; i++) {
                const TQKV__(codes) x = TQKV__I(nibbles_of)(nibble, a[i], b[i]);
                memcpy(to->bytes[d / TQKV__BYTES + nibble][i], &x, sizeof x);
                to->starts[i] = TQKV__I(less_bytes)(to->starts[i], x);
            }
        }
}

/* The stored codes of a tile's positions, for all dimensions of a panel or for 64 of them or what is left */
typedef struct TQKV__I(stored) {
    const uint8_t *fields[2]; /* main ones, upper ones */
    uint32_t masks[2];        /* a bit for each 16 bits of 64 fields */
    size_t stride;
    ptrdiff_t ahead; /* to the next tile, 0: not asked for */
    const int8_t *centroids;
    int n, left; /* positions, dimensions */
} TQKV__I(stored);

/* Opens the codes of dimensions [first + d, first + dim), at most 64 of them. */
TQKV__OP TQKV__I(stored)
    TQKV__I(open_stored)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, int first, int d, int dim)
{
    const uint8_t *row = tqkv__codes_at(s, kv_head, segment->slot);
    const int left = dim - d < 64 ? dim - d : 64, main = s->main_bits, upper = s->upper_bits;
    const TQKV__I(stored) p = {{row + (first + d) * main / 8, row + (s->head_dim * main + (first + d) * upper) / 8},
                               {((uint32_t)1 << left * main / 16) - 1, ((uint32_t)1 << left * upper / 16) - 1},
                               s->row_bytes,
                               first + d == 0 ? (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes : 0,
                               s->centroids,
                               segment->n,
                               left};
    return p;
}

/* Opens all dimensions of a panel: its packed codes are walked by lines, each of which asks for that of the next
   tile. */
TQKV__OP TQKV__I(stored)
    TQKV__I(open_stored_panel)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, int first)
{
    TQKV__I(stored) p = TQKV__I(open_stored)(s, kv_head, segment, first, 0, s->panel_dim);
    p.ahead = (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes;
    p.left = s->panel_dim;
    return p;
}

/* Asks for the codes of four positions that lie as far ahead as the panel says. */
TQKV__OP void TQKV__I(ask_ahead)(const tqkv_format format, const TQKV__I(stored) * p, const uint8_t *main_at,
                                 const uint8_t *upper_at)
{
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) {
        tqkv__prefetch(TQKV__L2, main_at + (ptrdiff_t)((size_t)i * p->stride) + p->ahead, 1);
        if (TQKV__UPPER_BITS(format))
            tqkv__prefetch(TQKV__L2, upper_at + (ptrdiff_t)((size_t)i * p->stride) + p->ahead, 1);
    }
}

/* Finds sums[row][i]: the products of four positions from 4 i on with one or two rows, in the lanes that
   sum_codes_across adds up */
TQKV__OP void TQKV__I(dot_nibbles)(const tqkv_format format, const int rows, const TQKV__I(stored) * p,
                                   const TQKV__I(nibble_query) * query, TQKV__(codes) (*sums)[TQKV__TILE / 4])
{
    const TQKV__(codes) book = TQKV__I(load_book)(p->centroids);
    const size_t stride = p->stride;
    const uint8_t *row = p->fields[0], *upper = p->fields[1];
    for (int four = 0; four < p->n / 4; four++, row += 4 * stride, upper += 4 * stride) {
        TQKV__(codes) high[2][4], low[2][4];
        TQKV__UNROLL
        for (int i = 0; i < 4 * rows; i++) {
            high[i / 4][i % 4] = query[i / 4].starts[0];
            low[i / 4][i % 4] = query[i / 4].starts[1];
        }
        for (int d = 0; d < p->left; d += TQKV__NIBBLES) {
            const uint8_t *main_at = row + d / 2, *upper_at = upper + d * TQKV__UPPER_BITS(format) / 8;
            TQKV__I(ask_ahead)(format, p, main_at, upper_at);
            TQKV__UNROLL
            for (int nibble = 0; nibble < 2; nibble++) {
                TQKV__UNROLL
                for (int i = 0; i < 4; i++) {
                    const TQKV__(codes) x = TQKV__I(load_nibbles)(
                        format, nibble, book, p->left - d, main_at + (size_t)i * stride, upper_at + (size_t)i * stride);
                    TQKV__UNROLL
                    for (int r = 0; r < rows; r++) {
                        const int8_t(*y)[TQKV__BYTES] = query[r].bytes[d / TQKV__BYTES + nibble];
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

/* The pairs macro(format, rows) are those where this takes less time than words, or than storing the bytes first
   (D=128, one core of a Zen 5: TQ4 0.78 of it, TQ5 0.77, with one row TQ6 0.68; two rows of TQ4 after two 0.88 of four
   at once) */
#define TQKV__BY_NIBBLES(macro)                                                                                        \
    macro(TQKV_TQ4, 1) macro(TQKV_TQ4, 2) macro(TQKV_TQ5, 1) macro(TQKV_TQ5, 2) macro(TQKV_TQ6, 1)

/* Functions of their own, because loops that share one spill. The copy tells the compiler that sums lie elsewhere. */
#define TQKV__DOT_NIBBLES(format, rows)                                                                                \
    TQKV__TARGET static TQKV__NOINLINE void TQKV__I(dot_nibbles_##format##_##rows)(                                    \
        const TQKV__I(stored) * p, const TQKV__I(nibble_query) * query, TQKV__(codes)(*sums)[TQKV__TILE / 4])          \
    {                                                                                                                  \
        const TQKV__I(stored) copy = *p;                                                                               \
        TQKV__I(dot_nibbles)(format, rows, &copy, query, sums);                                                        \
    }
TQKV__BY_NIBBLES(TQKV__DOT_NIBBLES)

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_nibbles)(const tqkv__stream *s, int kv_head,
                                                               const tqkv__segment *segment, int first, int rows,
                                                               const TQKV__I(product) * p)
{
    const TQKV__I(stored) panel = TQKV__I(open_stored_panel)(s, kv_head, segment, first);
    TQKV__I(nibble_query) query[2];
    TQKV__(codes) sums[2][TQKV__TILE / 4];
    for (int r = 0; r < rows; r++) TQKV__I(open_nibble_query)(p->rows + 2 * r * p->row_floats, p->dim, &query[r]);
#define TQKV__SCORE_NIBBLES(which, n)                                                                                  \
    if (s->format == which && rows == n) TQKV__I(dot_nibbles_##which##_##n)(&panel, query, sums);
    TQKV__BY_NIBBLES(TQKV__SCORE_NIBBLES)
    for (int j = 0; j < p->n; j += 16)
        for (int r = 0; r < rows; r++) TQKV__I(add_scores)(p, r, j, TQKV__S(sum_codes_across)(sums[r] + j / 4));
}

/* -- Quarters: no size leaves lanes empty. -- */

/* Quarters are for TQ2 and TQ4 with fewer rows than take lanes, for TQ3 and TQ5 with two, where nibbles are not. More
   rows of more dimensions share bytes. */
static bool TQKV__I(takes_quarters)(const tqkv__stream *s, int n, int n_rows)
{
    int most = 0;
    if (s->format == TQKV_TQ2 || s->format == TQKV_TQ4) most = s->panel_dim > 80 ? 2 : TQKV__LANES_ROWS - 1;
    if (s->format == TQKV_TQ3 || s->format == TQKV_TQ5) most = s->panel_dim > 128 ? 1 : 2;
    return n_rows <= most && n % TQKV__KEYS_AT_ONCE == 0;
}

/* The integers of a row of queries, 16 of them in each quarter: bytes[][0] their high bytes, [1] their low ones; start:
   the first sums */
typedef struct TQKV__I(quarter_query) {
    int8_t bytes[TQKV__PANEL / 16][2][TQKV__BYTES];
    TQKV__(codes) start;
} TQKV__I(quarter_query);

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(open_quarter_query)(const int16_t *words, int dim,
                                                                    TQKV__I(quarter_query) * to)
{
    TQKV__(codes) starts[2] = {TQKV__I(no_sum)(), TQKV__I(no_sum)()};
    for (int d = 0; d < dim; d += TQKV__BYTES) {
        TQKV__(codes) bytes[2];
        TQKV__I(split)(words + d, dim - d, bytes);
        TQKV__UNROLL
        for (int i = 0; i < 8; i++) {
            const TQKV__(codes) x = TQKV__I(repeat_quarter)(bytes[i % 2], i / 2);
            memcpy(to->bytes[d / 16 + i / 2][i % 2], &x, sizeof x);
            starts[i % 2] = TQKV__I(less_bytes)(starts[i % 2], x);
        }
    }
    to->start = TQKV__I(join)(starts[0], starts[1]);
}

/* Looks up a sixteen of four positions; raw, fields: what was loaded with an earlier one. */
TQKV__OP TQKV__(codes) TQKV__I(look_up_sixteen)(const tqkv_format format, const bool lanes, const int sixteen,
                                                TQKV__(codes) book, const TQKV__I(stored) * p, size_t at, size_t stride,
                                                TQKV__(codes) (*raw)[2], TQKV__(codes) * fields)
{
    TQKV__UNROLL
    for (int i = 0; i < 2; i++) {
        const int bits = i ? TQKV__UPPER_BITS(format) : TQKV__MAIN_BITS(format);
        if (!bits) break;
        if (sixteen == 0) TQKV__I(load_quarters)(bits, p->masks[i], p->fields[i] + at, stride, raw[i]);
        if (sixteen == 0 || (sixteen == 2 && (lanes || bits == 4)))
            fields[i] = TQKV__I(order_fields)(bits, lanes, sixteen, raw[i]);
    }
    return TQKV__I(look_up_fields)(format, lanes, sixteen, fields, book);
}

/* Finds sums[row][v]: the products of the positions v, v + 4, v + 8 and v + 12 of 16 with a row, in a quarter each, for
   64 dimensions */
TQKV__OP void TQKV__I(dot_quarters)(const tqkv_format format, const int rows, const TQKV__I(stored) * p,
                                    const TQKV__I(quarter_query) * query, int d, TQKV__(codes) (*sums)[TQKV__TILE / 4])
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
            const TQKV__(codes) x = TQKV__I(look_up_sixteen)(format, false, k, book, p, at, 4 * p->stride, raw, fields);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++) {
                const int8_t(*y)[TQKV__BYTES] = query[r].bytes[d / 16 + k];
                high[r] = TQKV__I(dot_bytes)(high[r], x, TQKV__I(load_codes)(y[0]));
                low[r] = TQKV__I(dot_bytes)(low[r], x, TQKV__I(load_codes)(y[1]));
            }
        }
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) sums[r][v] = TQKV__I(join)(high[r], low[r]);
    }
}

/* macro(format, rows) */
#define TQKV__BY_QUARTERS(macro)                                                                                       \
    macro(TQKV_TQ2, 1) macro(TQKV_TQ2, 2) macro(TQKV_TQ3, 1) macro(TQKV_TQ3, 2) macro(TQKV_TQ4, 1) macro(TQKV_TQ4, 2)  \
        macro(TQKV_TQ5, 1) macro(TQKV_TQ5, 2)
#define TQKV__BY_FOUR_ROWS(macro) macro(TQKV_TQ2, 4) macro(TQKV_TQ4, 4) /* scores alone: values have four sums a row */

#define TQKV__DOT_QUARTERS(format, rows)                                                                               \
    TQKV__TARGET static TQKV__NOINLINE void TQKV__I(dot_quarters_##format##_##rows)(                                   \
        const TQKV__I(stored) * p, const TQKV__I(quarter_query) * query, int d, TQKV__(codes)(*sums)[TQKV__TILE / 4])  \
    {                                                                                                                  \
        const TQKV__I(stored) copy = *p;                                                                               \
        TQKV__I(dot_quarters)(format, rows, &copy, query, d, sums);                                                    \
    }
TQKV__BY_QUARTERS(TQKV__DOT_QUARTERS)
TQKV__BY_FOUR_ROWS(TQKV__DOT_QUARTERS)

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_quarters)(const tqkv__stream *s, int kv_head,
                                                                const tqkv__segment *segment, int first, int rows,
                                                                const TQKV__I(product) * p)
{
    TQKV__I(quarter_query) query[4];
    TQKV__(codes) sums[4][TQKV__TILE / 4];
    for (int r = 0; r < rows; r++) {
        TQKV__I(open_quarter_query)(p->rows + 2 * r * p->row_floats, p->dim, &query[r]);
        for (int v = 0; v < p->n / 4; v++) sums[r][v] = query[r].start;
    }
    for (int d = 0; d < p->dim; d += 64) {
        const TQKV__I(stored) stored = TQKV__I(open_stored)(s, kv_head, segment, first, d, p->dim);
#define TQKV__SCORE_QUARTERS(which, n)                                                                                 \
    if (s->format == which && rows == n) TQKV__I(dot_quarters_##which##_##n)(&stored, query, d, sums);
        TQKV__BY_QUARTERS(TQKV__SCORE_QUARTERS)
        TQKV__BY_FOUR_ROWS(TQKV__SCORE_QUARTERS)
    }
    for (int j = 0; j < p->n; j += 16)
        for (int r = 0; r < rows; r++) TQKV__I(add_scores)(p, r, j, TQKV__S(sum_four_codes)(sums[r] + j / 4));
}

/* Finds the scores of a panel with few rows. p: without positions */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_few)(const tqkv__stream *s, int kv_head,
                                                           const tqkv__segment *segment, int first, int n_rows,
                                                           TQKV__I(product) * p)
{
    const bool nibbles = TQKV__I(takes_nibbles)(s, segment->n, n_rows);
    p->n = segment->n;
    for (int left = n_rows, now; left > 0; left -= now) {
        now = !nibbles && left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (nibbles)
            TQKV__I(score_nibbles)(s, kv_head, segment, first, now, p);
        else
            TQKV__I(score_quarters)(s, kv_head, segment, first, now, p);
        TQKV__I(advance)(p, now);
    }
}

/* The weights of a row as bytes, and -128 times their sum */
typedef struct TQKV__I(byte_weights) {
    int8_t bytes[2][TQKV__TILE];
    int32_t start;
} TQKV__I(byte_weights);

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(open_byte_weights)(const int16_t *words, TQKV__I(byte_weights) * to)
{
    to->start = TQKV__I(split_weights)(words, to->bytes);
}

/* Finds the sums of one nibble of a vector of codes: dword i of quarter l of results[t] is that of byte 16 l + 4 t +
   i. */
TQKV__OP void TQKV__I(sum_nibbles)(const tqkv_format format, const int nibble, const int rows,
                                   const TQKV__I(stored) * p, const TQKV__I(byte_weights) * weights,
                                   TQKV__(codes) (*results)[4])
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
            if (nibble == 0) tqkv__prefetch(TQKV__L2, row + at + p->ahead, 1);
            if (nibble == 0 && TQKV__UPPER_BITS(format)) tqkv__prefetch(TQKV__L2, upper + at + p->ahead, 1);
            x[i] = TQKV__I(load_nibbles)(format, nibble, book, p->left, row + at, upper + at);
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

/* Adds the sums of both nibbles of a vector of codes to row r. */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_nibble_sums)(const TQKV__I(product) * p, int r, int d,
                                                                 const TQKV__(codes) * even, const TQKV__(codes) * odd)
{
    TQKV__(codes) x[8];
    float *to = p->results + r * p->result_floats + d;
    const TQKV__VECTOR unit = TQKV__(set1)(p->units[r * p->row_floats]);
    TQKV__I(order_nibbles)(even, odd, x);
    TQKV__UNROLL
    for (int i = 0; i < 8; i++, to += TQKV__INTEGER_LANES)
        if (d + i * TQKV__INTEGER_LANES < p->dim)
            TQKV__(store)(to, TQKV__(fma)(TQKV__S(to_floats)(x[i]), unit, TQKV__(load)(to)));
}

/* sums[nibble][row]: of the first vector of codes of p */
#define TQKV__SUM_NIBBLES(format, rows)                                                                                \
    TQKV__TARGET static TQKV__NOINLINE void TQKV__I(sum_nibbles_##format##_##rows)(                                    \
        const TQKV__I(stored) * p, const TQKV__I(byte_weights) * weights, TQKV__(codes)(*sums)[2][4])                  \
    {                                                                                                                  \
        const TQKV__I(stored) copy = *p;                                                                               \
        TQKV__I(sum_nibbles)(format, 0, rows, &copy, weights, sums[0]);                                                \
        TQKV__I(sum_nibbles)(format, 1, rows, &copy, weights, sums[1]);                                                \
    }
TQKV__BY_NIBBLES(TQKV__SUM_NIBBLES)

/* Adds: results[row][d] += (sum_j rows[row][j] * codes[j][d]) * unit of the row */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_nibbles)(const tqkv__stream *s, int kv_head,
                                                             const tqkv__segment *segment, int first, int rows,
                                                             const TQKV__I(product) * p)
{
    TQKV__I(stored) panel = TQKV__I(open_stored_panel)(s, kv_head, segment, first);
    TQKV__I(byte_weights) weights[2];
    TQKV__(codes) sums[2][2][4];
    for (int r = 0; r < rows; r++) TQKV__I(open_byte_weights)(p->rows + 2 * r * p->row_floats, &weights[r]);
    for (int d = 0; d < p->dim; d += TQKV__NIBBLES, panel.left -= TQKV__NIBBLES) {
#define TQKV__ADD_NIBBLES(which, n)                                                                                    \
    if (s->format == which && rows == n) TQKV__I(sum_nibbles_##which##_##n)(&panel, weights, sums);
        TQKV__BY_NIBBLES(TQKV__ADD_NIBBLES)
        for (int r = 0; r < rows; r++) TQKV__I(add_nibble_sums)(p, r, d, sums[0][r], sums[1][r]);
        panel.fields[0] += TQKV__NIBBLES / 2;
        panel.fields[1] += TQKV__NIBBLES * s->upper_bits / 8;
    }
}

/* Finds sums[row][k] = sum_j weights[row][j] * codes[j][d], for the 16 dimensions of sixteen k */
TQKV__OP void TQKV__I(sum_quarters)(const tqkv_format format, const int rows, const TQKV__I(stored) * p,
                                    const TQKV__I(byte_weights) * weights, TQKV__(codes) (*sums)[4])
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
            const TQKV__(codes) x = TQKV__I(look_up_sixteen)(format, true, k, book, p, at, p->stride, raw, fields);
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

#define TQKV__SUM_QUARTERS(format, rows)                                                                               \
    TQKV__TARGET static TQKV__NOINLINE void TQKV__I(sum_quarters_##format##_##rows)(                                   \
        const TQKV__I(stored) * p, const TQKV__I(byte_weights) * weights, TQKV__(codes)(*sums)[4])                     \
    {                                                                                                                  \
        const TQKV__I(stored) copy = *p;                                                                               \
        TQKV__I(sum_quarters)(format, rows, &copy, weights, sums);                                                     \
    }
TQKV__BY_QUARTERS(TQKV__SUM_QUARTERS)

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_quarters)(const tqkv__stream *s, int kv_head,
                                                              const tqkv__segment *segment, int first, int rows,
                                                              const TQKV__I(product) * p)
{
    TQKV__I(byte_weights) weights[2];
    TQKV__(codes) sums[2][4];
    for (int r = 0; r < rows; r++) TQKV__I(open_byte_weights)(p->rows + 2 * r * p->row_floats, &weights[r]);
    for (int d = 0; d < p->dim; d += 64) {
        const TQKV__I(stored) stored = TQKV__I(open_stored)(s, kv_head, segment, first, d, p->dim);
#define TQKV__ADD_QUARTERS(which, n)                                                                                   \
    if (s->format == which && rows == n) TQKV__I(sum_quarters_##which##_##n)(&stored, weights, sums);
        TQKV__BY_QUARTERS(TQKV__ADD_QUARTERS)
        for (int r = 0; r < rows; r++) {
            float *to = p->results + r * p->result_floats + d;
            const TQKV__VECTOR unit = TQKV__(set1)(p->units[r * p->row_floats]);
            for (int k = 0; k * 16 < stored.left; k++, to += 16)
                TQKV__(store)(to, TQKV__(fma)(TQKV__S(to_floats)(sums[r][k]), unit, TQKV__(load)(to)));
        }
    }
}

/* Adds to the sums of a panel with few rows. p: without p.at */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_few)(const tqkv__stream *s, int kv_head,
                                                         const tqkv__segment *segment, int first, int n_rows,
                                                         TQKV__I(product) * p)
{
    const bool nibbles = TQKV__I(takes_nibbles)(s, segment->n, n_rows);
    for (int left = n_rows, now; left > 0; left -= now) {
        now = left >= 2 ? 2 : 1;
        if (nibbles)
            TQKV__I(add_nibbles)(s, kv_head, segment, first, now, p);
        else
            TQKV__I(add_quarters)(s, kv_head, segment, first, now, p);
        TQKV__I(advance)(p, now);
    }
}
#endif

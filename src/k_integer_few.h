/* >>k-integer-few: one and two rows of integers, straight from the codes; a set with tables of bytes in registers has them. */

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
    const int most = s->upper_bits ? 3 - s->upper_bits : s->panel_dim > 80 ? TQKV__LANES_ROWS - 1 : 2;
    return n_rows <= most && n % TQKV__SLICE == 0 && s->main_bits == 4 && s->panel_dim > TQKV__BYTES;
}

/* The integers of a row of queries by parts, their high bytes and their low ones; starts: the first sums of both */
typedef struct TQKV__I(digits) {
    int8_t parts[TQKV__PANEL / TQKV__BYTES][2][TQKV__BYTES];
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

/* Dimensions of the positions of a tile: of a panel, or 64 of them or what is left */
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
    TQKV__I(open_chunk)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, int first, int d, int dim)
{
    const uint8_t *row = tqkv__codes_at(s, kv_head, segment->slot);
    const int left = dim - d < 64 ? dim - d : 64, main = s->main_bits, upper = s->upper_bits;
    const TQKV__I(chunk) p = {{row + (first + d) * main / 8, row + (s->head_dim * main + (first + d) * upper) / 8},
                              {((uint32_t)1 << left * main / 16) - 1, ((uint32_t)1 << left * upper / 16) - 1},
                              s->row_bytes,
                              first + d == 0 ? (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes : 0,
                              s->centroids,
                              segment->n,
                              left};
    return p;
}

/* All dimensions of a panel: its packed codes are walked by lines, each of which asks for that of the next tile. */
TQKV__OP TQKV__I(chunk) TQKV__I(open_panel)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, int first)
{
    TQKV__I(chunk) p = TQKV__I(open_chunk)(s, kv_head, segment, first, 0, s->panel_dim);
    p.ahead = (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes;
    p.left = s->panel_dim;
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

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_packed)(const tqkv__stream *s, int kv_head,
                                                              const tqkv__segment *segment, int first, int rows,
                                                              const TQKV__I(product) * p)
{
    const TQKV__I(chunk) panel = TQKV__I(open_panel)(s, kv_head, segment, first);
    TQKV__I(digits) digits[2];
    TQKV__(codes) sums[2][TQKV__TILE / 4];
    for (int r = 0; r < rows; r++) TQKV__I(open_digits)(p->rows + 2 * r * p->row_floats, p->dim, &digits[r]);
#define TQKV__SCORE_PACKED(which, n)                                                                                   \
    if (s->format == which && rows == n) TQKV__I(score_parts_##which##_##n)(&panel, digits, sums);
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
    if (s->format == TQKV_TQ2 || s->format == TQKV_TQ4) most = s->panel_dim > 80 ? 2 : TQKV__LANES_ROWS - 1;
    if (s->format == TQKV_TQ3 || s->format == TQKV_TQ5) most = s->panel_dim > 128 ? 1 : 2;
    return n_rows <= most && n % TQKV__SLICE == 0;
}

/* The integers of a row of queries, 16 of them in each quarter, their high bytes and their low ones; start: the first sums */
typedef struct TQKV__I(quarters) {
    int8_t pieces[TQKV__PANEL / 16][2][TQKV__BYTES];
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
                                                                const tqkv__segment *segment, int first, int rows,
                                                                const TQKV__I(product) * p)
{
    TQKV__I(quarters) quarters[4];
    TQKV__(codes) sums[4][TQKV__TILE / 4];
    for (int r = 0; r < rows; r++) {
        TQKV__I(open_quarters)(p->rows + 2 * r * p->row_floats, p->dim, &quarters[r]);
        for (int v = 0; v < p->n / 4; v++) sums[r][v] = quarters[r].start;
    }
    for (int d = 0; d < p->dim; d += 64) {
        const TQKV__I(chunk) chunk = TQKV__I(open_chunk)(s, kv_head, segment, first, d, p->dim);
#define TQKV__SCORE_QUARTERS(which, n)                                                                                 \
    if (s->format == which && rows == n) TQKV__I(score_##which##_##n)(&chunk, quarters, d, sums);
        TQKV__BY_PIECES(TQKV__SCORE_QUARTERS)
        TQKV__BY_FOUR_ROWS(TQKV__SCORE_QUARTERS)
    }
    for (int j = 0; j < p->n; j += 16)
        for (int r = 0; r < rows; r++) TQKV__I(add_scores)(p, r, j, TQKV__S(sum_four_codes)(sums[r] + j / 4));
}

/* The scores of a panel with few rows. p: without positions */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(score_few)(const tqkv__stream *s, int kv_head,
                                                           const tqkv__segment *segment, int first, int n_rows,
                                                           TQKV__I(product) * p)
{
    const bool packed = TQKV__I(is_packed)(s, segment->n, n_rows);
    p->n = segment->n;
    for (int left = n_rows, now; left > 0; left -= now) {
        now = !packed && left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (packed)
            TQKV__I(score_packed)(s, kv_head, segment, first, now, p);
        else
            TQKV__I(score_quarters)(s, kv_head, segment, first, now, p);
        TQKV__I(advance)(p, now);
    }
}

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
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_packed)(const tqkv__stream *s, int kv_head,
                                                            const tqkv__segment *segment, int first, int rows,
                                                            const TQKV__I(product) * p)
{
    TQKV__I(chunk) panel = TQKV__I(open_panel)(s, kv_head, segment, first);
    TQKV__I(parts) weights[2];
    TQKV__(codes) sums[2][2][4];
    for (int r = 0; r < rows; r++) TQKV__I(open_parts)(p->rows + 2 * r * p->row_floats, &weights[r]);
    for (int d = 0; d < p->dim; d += TQKV__CHUNK, panel.left -= TQKV__CHUNK) {
#define TQKV__ADD_PACKED(which, n)                                                                                     \
    if (s->format == which && rows == n) TQKV__I(add_parts_##which##_##n)(&panel, weights, sums);
        TQKV__BY_PARTS(TQKV__ADD_PACKED)
        for (int r = 0; r < rows; r++) TQKV__I(close_parts)(p, r, d, sums[0][r], sums[1][r]);
        panel.fields[0] += TQKV__CHUNK / 2;
        panel.fields[1] += TQKV__CHUNK * s->upper_bits / 8;
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

TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_quarters)(const tqkv__stream *s, int kv_head,
                                                              const tqkv__segment *segment, int first, int rows,
                                                              const TQKV__I(product) * p)
{
    TQKV__I(parts) parts[2];
    TQKV__(codes) sums[2][4];
    for (int r = 0; r < rows; r++) TQKV__I(open_parts)(p->rows + 2 * r * p->row_floats, &parts[r]);
    for (int d = 0; d < p->dim; d += 64) {
        const TQKV__I(chunk) chunk = TQKV__I(open_chunk)(s, kv_head, segment, first, d, p->dim);
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

/* The sums of a panel with few rows. p: without p.at */
TQKV__TARGET static TQKV__NOINLINE void TQKV__I(add_few)(const tqkv__stream *s, int kv_head,
                                                         const tqkv__segment *segment, int first, int n_rows,
                                                         TQKV__I(product) * p)
{
    const bool packed = TQKV__I(is_packed)(s, segment->n, n_rows);
    for (int left = n_rows, now; left > 0; left -= now) {
        now = left >= 2 ? 2 : 1;
        if (packed)
            TQKV__I(add_packed)(s, kv_head, segment, first, now, p);
        else
            TQKV__I(add_quarters)(s, kv_head, segment, first, now, p);
        TQKV__I(advance)(p, now);
    }
}
#endif

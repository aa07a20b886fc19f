/* >>k-tiles: the scores and the sums of a tile, by rows, decoded first or not. */

/* Decodes with a codebook too large for table instructions: loads eight codes, stores a vector of centroids. */
TQKV__OP void TQKV__(decode_by_loads)(const TQKV__(panel) * panel, int n, float *x)
{
    const float *codebook = panel->stream->codebook;
    for (int j = 0; j < n; j++, x += TQKV__X_STRIDE(panel->dim)) {
        const uint8_t *codes = panel->codes + (size_t)j * panel->stride;
        for (int d = 0; d < panel->dim; d += TQKV__LANES) {
            TQKV__VECTOR centroids = {0.0f};
            uint64_t eight = 0;
            TQKV__UNROLL
            for (int i = 0; i < TQKV__LANES; i++, eight >>= 8) {
                if (i % 8 == 0) memcpy(&eight, codes + d + i, TQKV__LANES < 8 ? TQKV__LANES : 8);
                centroids[i] = codebook[eight & 255];
            }
            TQKV__(store)(x + d, centroids);
        }
    }
}

TQKV__OP void TQKV__(decode_rows)(const tqkv_format format, const TQKV__(panel) * panel, int n, float *x)
{
    if (TQKV__BOOK_BITS(format) == 8 && TQKV__LANES == 4)
        TQKV__(decode_by_loads)(panel, n, x);
    else
        TQKV__(decode)(format, panel, n, x);
}

/* These go by the columns of a row of TQKV__FORMATS: what is left out here is not inlined to be thrown away. */
#define TQKV__ROW_LOOPS(unused, format, name, kind, main, upper, book, plain)                                          \
    TQKV__TARGET static void TQKV__(score_##format)(const TQKV__(panel) * panel, int rows)                             \
    {                                                                                                                  \
        if (TQKV__HAS_LOOPS(kind, main, book)) TQKV__BY_ROWS(score, format, TQKV__KEY_ROWS(kind, book));               \
    }                                                                                                                  \
    TQKV__TARGET static void TQKV__(accumulate_##format)(const TQKV__(panel) * panel, int rows)                        \
    {                                                                                                                  \
        if (TQKV__HAS_LOOPS(kind, main, book)) TQKV__BY_ROWS(accumulate, format, TQKV__VALUE_ROWS(kind, book));        \
    }                                                                                                                  \
    TQKV__TARGET static void TQKV__(rest_##format)(const TQKV__(panel) * panel, int rows)                              \
    {                                                                                                                  \
        if (TQKV__HAS_LOOPS(kind, main, book)) TQKV__BY_ROWS(add_rest, format, TQKV__VALUE_ROWS(kind, book));          \
    }
#define TQKV__DECODE_LOOP(unused, format, ...)                                                                         \
    TQKV__TARGET static void TQKV__(decode_##format)(const TQKV__(panel) * panel, int n, float *x)                     \
    {                                                                                                                  \
        TQKV__(decode_rows)(format, panel, n, x);                                                                      \
    }
TQKV__FORMATS(TQKV__DECODE_LOOP, )
TQKV__FORMATS(TQKV__ROW_LOOPS, )
TQKV__ROW_LOOPS(, TQKV__FLOATS, , 0, 32, 0, 0, 0)

#define TQKV__LOOPS_OF(unused, format, ...)                                                                            \
    {TQKV__(decode_##format), TQKV__(score_##format), TQKV__(accumulate_##format), TQKV__(rest_##format)},
static const TQKV__(loops) TQKV__(loops_by_format)[] = {
    {NULL, TQKV__(score_TQKV__FLOATS), TQKV__(accumulate_TQKV__FLOATS), TQKV__(rest_TQKV__FLOATS)},
    TQKV__FORMATS(TQKV__LOOPS_OF, )};

/* Calls the loop for all rows of a panel, at most `most` at a time. Three take the loop for four, with one row twice:
   as two and one they would decode everything twice. */
static void TQKV__(by_rows)(TQKV__(panel) * panel, int n_rows, int most, void (*loop)(const TQKV__(panel) *, int rows))
{
    const float *rows = panel->rows;
    float *results = panel->results;
    for (int left = n_rows; left > 0; left -= panel->n_rows) {
        panel->n_rows = left >= most ? most : left == 3 ? 3 : left >= 2 ? 2 : 1;
        loop(panel, panel->n_rows == 3 ? most : panel->n_rows);
        panel->rows += panel->n_rows * panel->row_stride;
        panel->results += panel->n_rows * panel->result_stride;
    }
    panel->rows = rows;
    panel->results = results;
}

/* Adds the values of a panel, of that format, to all rows. */
static void TQKV__(add_values)(tqkv_format format, TQKV__(panel) * panel, int n_rows, int most)
{
    const TQKV__(loops) *loops = &TQKV__(loops_by_format)[format];
    const int strip = TQKV__STRIP(format) * TQKV__LANES;
    if (panel->dim >= strip) TQKV__(by_rows)(panel, n_rows, most, loops->accumulate);
    if (panel->dim % strip) TQKV__(by_rows)(panel, n_rows, most, loops->add_rest);
}

/* Attends from decoded positions. Few at a time stay in the L1 cache, and each is decoded once. */
TQKV__TARGET static void TQKV__(attend_decoded)(TQKV__(panel) * panel, int n_rows, bool keys)
{
    TQKV__ALIGNED float x[32 * TQKV__X_STRIDE(128)]; /* 18 KiB of stack */
    const int step = panel->dim <= 128 ? 32 : 16;
    const TQKV__(loops) *loops = &TQKV__(loops_by_format)[panel->stream->format];
    const int n = panel->n;
    for (int j = 0; j < n; j += step) {
        const uint8_t *codes = panel->codes;
        panel->n = n - j < step ? n - j : step;
        tqkv__prefetch(TQKV__L2, codes + panel->ahead, (size_t)panel->n * panel->stride);
        loops->decode(panel, panel->n, x);
        for (int i = panel->n; i % TQKV__LANES; i++)
            memcpy(x + i * TQKV__X_STRIDE(panel->dim), x + (i - 1) * TQKV__X_STRIDE(panel->dim),
                   (size_t)panel->dim * sizeof(float));
        panel->codes = (const uint8_t *)(const void *)x;
        if (keys)
            TQKV__(by_rows)(panel, n_rows, TQKV__DECODED_SCORE_ROWS, TQKV__(score_TQKV__FLOATS));
        else
            TQKV__(add_values)(TQKV__FLOATS, panel, n_rows, TQKV__ROWS);
        panel->codes = codes + (size_t)step * panel->stride;
        panel->rows += keys ? 0 : step;
        panel->results += keys ? step : 0;
        if (keys) panel->factors += step; /* NULL for values */
    }
}

/* Attends to a panel. Few rows work straight from the codes; with a codebook only while no code is looked up twice. 32
   wide registers hold four rows of multiply-adds and the look-ups of up to 5 bits: there any number of rows of values
   works so, but at most eight where codes are joined from two fields (Zen 5: 12 rows of TQ3 and TQ5 take 0.92 times as
   long decoded, 64 rows 0.85). */
TQKV__TARGET static void TQKV__(attend_panel)(TQKV__(panel) * panel, int n_rows, bool keys)
{
    const tqkv__stream *s = panel->stream;
    const TQKV__(loops) *loops = &TQKV__(loops_by_format)[s->format];
    const bool any = !keys && TQKV__LANES == 16 && s->book_bits < 6 && (!s->upper_bits || n_rows <= 8);
    const int most = keys ? TQKV__KEY_ROWS(s->kind, s->book_bits) : TQKV__VALUE_ROWS(s->kind, s->book_bits);
    if (!TQKV__DIRECT(s->format) || (n_rows > (s->kind == TQKV__BOOK ? most : TQKV__ROWS) && !any))
        TQKV__(attend_decoded)(panel, n_rows, keys);
    else if (keys)
        TQKV__(by_rows)(panel, n_rows, most, loops->score);
    else
        TQKV__(add_values)(s->format, panel, n_rows, most);
}

/* Opens the panel of values from `before` on for the segment. */
static void TQKV__(open_panel)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, int before,
                               TQKV__(panel) * panel)
{
    const size_t main = (size_t)(before * s->main_bits / 8), upper = (size_t)(before * s->upper_bits / 8);
    const size_t main_field = (size_t)(s->head_dim * s->main_bits) / 8;
    panel->stream = s;
    panel->codes = tqkv__codes_at(s, kv_head, segment->slot) + main;
    panel->upper = s->upper_bits ? main_field + upper - main : 0;
    panel->stride = s->row_bytes;
    panel->ahead = (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes;
    panel->first = before == 0;
    panel->n = segment->n;
    panel->dim = s->panel_dim;
    panel->factors = NULL;
    panel->add = false;
}

TQKV__TARGET static void TQKV__(score_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment,
                                            const float *q, int n_rows, bool add, float *scores)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    /* Rotation makes products unequal, and of more sums each is smaller. */
    const int most = s->rotated || TQKV__LANES == 16 ? s->panel_dim : TQKV__MOST_ADDITIONS * TQKV__LANES;
    TQKV__(panel) panel;
    const float *of_panel = factors;
    int left = s->panel_dim; /* of a panel */
    TQKV__(factors)(s, tqkv__norms_at(s, kv_head, segment->slot), segment, true, factors);
    for (int d = 0; d < s->head_dim; d += panel.dim) {
        TQKV__(open_panel)(s, kv_head, segment, d, &panel);
        panel.dim = left < most ? left : most;
        panel.rows = q + d;
        panel.row_stride = s->head_dim;
        panel.results = scores;
        panel.result_stride = TQKV__TILE;
        panel.factors = of_panel;
        panel.add = add || d > 0;
        TQKV__(attend_panel)(&panel, n_rows, true);
        left -= panel.dim;
        if (left) continue;
        left = s->panel_dim;
        of_panel += TQKV__TILE;
    }
}

/* weights, scaled: [n_rows][TQKV__TILE], factors: [TQKV__TILE] */
TQKV__OP void TQKV__(scale_weights)(const float *weights, int n_rows, const float *factors, float *scaled)
{
    for (int row = 0; row < n_rows; row++, weights += TQKV__TILE, scaled += TQKV__TILE)
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES)
            TQKV__(store)(scaled + j, TQKV__(mul_nonzero)(TQKV__(load)(weights + j), TQKV__(load)(factors + j)));
}

TQKV__TARGET static void TQKV__(value_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment,
                                            const float *weights, int n_rows, float *scaled, float *out)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    TQKV__(panel) panel;
    const float *norms = tqkv__norms_at(s, kv_head, segment->slot);
    const float *of_panel = factors;
    if (norms) TQKV__(factors)(s, norms, segment, false, factors);
    for (int d = 0; d < s->head_dim; d += s->panel_dim, of_panel += TQKV__TILE) {
        if (norms) TQKV__(scale_weights)(weights, n_rows, of_panel, scaled);
        TQKV__(open_panel)(s, kv_head, segment, d, &panel);
        panel.rows = norms ? scaled : weights;
        panel.row_stride = TQKV__TILE;
        panel.results = out + d;
        panel.result_stride = s->head_dim;
        TQKV__(attend_panel)(&panel, n_rows, false);
    }
}

/* >>k-quantise: codes, packed, of whole rows. */

/* Quantises n values by one scale. bits is a constant, 0: the grid of I8, 4: a codebook of up to 4 bits. Codes are
   written in whole groups of four vectors, but y is not read behind n. y, codes: [n] */
TQKV__OP void TQKV__(quantise_short)(const int bits, const tqkv__quantiser *q, const float *y, int n, float scale,
                                     uint8_t *codes)
{
    TQKV__(codes) four[4], side;
    TQKV__VECTOR bounds[8 / TQKV__LANES];
    const TQKV__(codes) n_below = TQKV__(load_16)(q->n_below);
    for (int i = 0; i < 8 / TQKV__LANES; i++) bounds[i] = TQKV__(load)(q->bounds + i * TQKV__LANES);
    for (int d = 0; d < n; d += 4 * TQKV__LANES) {
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) {
            const int at = d + i * TQKV__LANES;
            const TQKV__VECTOR v = TQKV__(load)(y + (at < n ? at : d)) * TQKV__(set1)(scale);
            if (!bits) {
                four[i] = TQKV__(quantise_i8)(v);
                continue;
            }
            const TQKV__VECTOR w = TQKV__(fold)(q->half, v, &side);
            const TQKV__VECTOR cell = TQKV__(min)(w * TQKV__(set1)(q->slope), TQKV__(set1)(q->top));
            const TQKV__(codes) count = TQKV__(look_up_16)(n_below, TQKV__(truncate)(cell));
            four[i] = TQKV__(code_from)(count, TQKV__(look_up_8)(bounds, count), w, side);
        }
        const TQKV__(codes) bytes = TQKV__(narrow)(four);
        memcpy(codes + d, &bytes, sizeof bytes);
    }
}

/* Likewise for a codebook of up to 256 values, whose tables do not fit registers: one loop stores the cells, because a
   load soon after would wait for the store. */
TQKV__LOOP void TQKV__(quantise_large)(const tqkv__quantiser *q, const float *y, int n, float scale, uint8_t *codes)
{
    TQKV__ALIGNED uint32_t cells[TQKV_MAX_HEAD_DIM];
    TQKV__(codes) side, four[4];
    for (int d = 0; d < n; d += TQKV__LANES) {
        const TQKV__VECTOR w = TQKV__(fold)(q->half, TQKV__(load)(y + d) * TQKV__(set1)(scale), &side);
        four[0] = TQKV__(truncate)(TQKV__(min)(w * TQKV__(set1)(q->slope), TQKV__(set1)(q->top)));
        memcpy(cells + d, &four[0], sizeof four[0]);
    }
    for (int d = 0; d < n; d += 4 * TQKV__LANES) {
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) {
            TQKV__VECTOR cell[4];
            const int next = d + i * TQKV__LANES, at = next < n ? next : d;
            const TQKV__VECTOR w = TQKV__(fold)(q->half, TQKV__(load)(y + at) * TQKV__(set1)(scale), &side);
            TQKV__(load_cells)(q->cells, cells + at, cell);
            memcpy(&four[i], &cell[3], sizeof four[i]);
            four[i] = TQKV__(code_from)(four[i], cell[0], w, side);
        }
        const TQKV__(codes) bytes = TQKV__(narrow)(four);
        memcpy(codes + d, &bytes, sizeof bytes);
    }
}

/* Quantises a row. y: [head_dim], scales: [norms_per_row] -> codes: [head_dim] and room for four vectors */
TQKV__TARGET static void TQKV__(quantise_row)(const tqkv__stream *s, const tqkv__quantiser *q, const float *y,
                                              const float *scales, uint8_t *codes)
{
    for (int d = 0; d < s->head_dim; d += s->norm_dim, scales++)
        if (s->kind == TQKV__GRID)
            TQKV__(quantise_short)(0, q, y + d, s->norm_dim, *scales, codes + d);
        else if (s->book_bits <= 4)
            TQKV__(quantise_short)(4, q, y + d, s->norm_dim, *scales, codes + d);
        else
            TQKV__(quantise_large)(q, y + d, s->norm_dim, *scales, codes + d);
}

/* Packs the `bits` bits from bit `low` on of each code; both are constants. codes: [head_dim] and room for a vector */
TQKV__OP void TQKV__(pack_field)(const int bits, const int low, int head_dim, const uint8_t *codes, uint8_t *to)
{
    enum { step = 4 * TQKV__LANES };
    uint8_t last[step];
    for (int left = head_dim; left > 0; left -= step, codes += step, to += step * bits / 8) {
        TQKV__(codes) bytes;
        memcpy(&bytes, codes, sizeof bytes);
        TQKV__(pack)(bits, low, bytes, left < step ? last : to);
        if (left < step) memcpy(to, last, (size_t)(left * bits / 8));
    }
}

/* Packs codes: [head_dim] and room for a vector -> row: [row_bytes] */
TQKV__TARGET static void TQKV__(pack_row)(const tqkv__stream *s, const uint8_t *codes, uint8_t *row)
{
    uint8_t *upper = row + s->head_dim * s->main_bits / 8;
    for (int d = 0; s->main_bits == 8 && d < s->head_dim; d += 16) memcpy(row + d, codes + d, 16);
    if (s->main_bits == 4) TQKV__(pack_field)(4, 0, s->head_dim, codes, row);
    if (s->main_bits == 4 && s->upper_bits == 1) TQKV__(pack_field)(1, 4, s->head_dim, codes, upper);
    if (s->main_bits == 4 && s->upper_bits == 2) TQKV__(pack_field)(2, 4, s->head_dim, codes, upper);
    if (s->main_bits == 2) TQKV__(pack_field)(2, 0, s->head_dim, codes, row);
    if (s->main_bits == 2 && s->upper_bits == 1) TQKV__(pack_field)(1, 2, s->head_dim, codes, upper);
}

/* Stores a row of floats, or of halves, as halves. */
TQKV__TARGET static void TQKV__(store_f16_row)(tqkv_type type, const void *src, int head_dim, uint8_t *row)
{
    const TQKV__VECTOR most = TQKV__(set1)(65504.0f);
    if (type == TQKV_TYPE_F16) {
        memcpy(row, src, 2 * (size_t)head_dim);
        return;
    }
    for (int d = 0; d < head_dim; d += 16) {
        TQKV__UNROLL
        for (int k = d; k < d + 16; k += TQKV__LANES) {
            const TQKV__VECTOR x = TQKV__(load)((const float *)src + k);
            TQKV__(store_half)(row + 2 * k, TQKV__(max)(TQKV__(min)(x, most), -most));
        }
    }
}

/* Returns the values of a row that are to be quantised, rotated but for mix_rows: in row, [head_dim], or, where nothing
   is to be done, in the source. Halves are not widened first: that pass would cost a tenth. */
TQKV__TARGET static const void *TQKV__(open_row)(const tqkv__stream *s, const tqkv__row *source, float *row)
{
    const void *src = source->src;
    tqkv_type type = s->type;
    const bool kept = type == TQKV_TYPE_F32 || (s->kind == TQKV__HALF && type == TQKV_TYPE_F16);
    if (source->center || source->inverses || !(s->rotated || kept)) {
        TQKV__(widen)(type, src, source->center, source->inverses, s->head_dim, row);
        type = TQKV_TYPE_F32;
        src = row;
    }
    if (!s->rotated) return src;
    TQKV__(hadamard)(type, src, s->head_dim, true, row);
    return row;
}

TQKV__LOOP void TQKV__(code_row)(const tqkv__stream *s, const tqkv__quantiser *q, const float *y, float *scales,
                                 float *squares, uint8_t *codes)
{
    TQKV__ALIGNED float scaled[TQKV_MAX_HEAD_DIM];
    if (s->n_factors > 1) {
        TQKV__(search_row)(s, q, y, scaled, scales, squares);
        y = scaled;
    }
    TQKV__(quantise_row)(s, q, y, scales, codes);
    for (int b = 0; b < s->norms_per_row && s->n_factors == 1; b++) /* TQ2 */
        squares[b] = TQKV__(squares_of_codes)(q, codes + b * s->norm_dim, s->norm_dim);
}

/* Takes a few rows through each step: steps of one row depend on each other, rows do not. */
TQKV__LOOP void TQKV__(encode_rows_by)(tqkv__code_row *code_row, const tqkv__stream *s, const tqkv__quantiser *q,
                                       const tqkv__row *rows, int n_rows)
{
    enum { buffer = 1536, most_norms = buffer / 32 }; /* 6 KiB: a fraction of an L1 cache, and of the stack */
    TQKV__ALIGNED float rotated[buffer];
    float norms[most_norms], scales[most_norms], squares[TQKV_MAX_HEAD_DIM / 128];
    TQKV__ALIGNED uint8_t codes[TQKV_MAX_HEAD_DIM + 4 * TQKV__LANES];
    const void *values[most_norms];
    const int batch = buffer / s->head_dim, per_row = s->norms_per_row;
    for (int first = 0; first < n_rows; first += batch, rows += batch) {
        const int n = n_rows - first < batch ? n_rows - first : batch;
        for (int i = 0; i < n; i++) values[i] = TQKV__(open_row)(s, &rows[i], rotated + i * s->head_dim);
        if (s->rotated && TQKV__HAS_MATRIX(s->head_dim)) TQKV__(mix_rows)(s->head_dim, rotated, n);
        for (int i = 0; i < n; i++) {
            const tqkv_type type = values[i] == rows[i].src ? s->type : TQKV_TYPE_F32;
            if (rows[i].half) TQKV__(store_f16_row)(type, values[i], s->head_dim, rows[i].half);
            if (s->kind == TQKV__HALF) TQKV__(store_f16_row)(type, values[i], s->head_dim, rows[i].codes);
        }
        if (s->kind == TQKV__HALF) continue;
        for (int i = 0; i < n; i++)
            TQKV__(norms)(s, (const float *)values[i], norms + i * per_row, scales + i * per_row);
        for (int i = 0; i < n; i++) {
            float *norm = norms + i * per_row, *scale = scales + i * per_row;
            code_row(s, q, (const float *)values[i], scale, squares, codes);
            TQKV__(pack_row)(s, codes, rows[i].codes);
            if (s->kind == TQKV__BOOK) tqkv__correct_norms(s, squares, norm);
            for (int b = 0; b < per_row; b++) rows[i].norms[b] = norm[b];
            for (int b = 0; b < per_row && s->n_factors > 1 && rows[i].factors; b++) rows[i].factors[b] = scale[b];
        }
    }
}

TQKV__TARGET static void TQKV__(encode_rows)(const tqkv__stream *s, const tqkv__quantiser *q, const tqkv__row *rows,
                                             int n_rows)
{
    TQKV__(encode_rows_by)(TQKV__(code_row), s, q, rows, n_rows);
}

static const tqkv__codec TQKV__(codec) = {TQKV__(rows_finite), TQKV__(largest_of), TQKV__(invert),
                                          TQKV__(widen),       TQKV__(narrow_row), TQKV__(rotate),
                                          TQKV__(unrotate),    TQKV__(encode_rows)};

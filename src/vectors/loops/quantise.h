/* >>k-quantise: codes, packed, of whole rows. */

/* Does what tqkv__quantise does, with the cells of tqkv__quantiser. bits is a constant, 4 for fewer, too. */
TQKV__OP TQKV__(codes) TQKV__(quantise)(const int bits, const tqkv__quantiser *q, const TQKV__(codes) * below,
                                        const TQKV__VECTOR *bounds, TQKV__VECTOR v)
{
    TQKV__(codes) side;
    const TQKV__VECTOR w = TQKV__(fold)(q->half, v, &side);
    const TQKV__VECTOR cell = TQKV__(min)(w * TQKV__(set1)(q->slope), TQKV__(set1)(q->top));
    const TQKV__(codes) count = TQKV__(below)(bits, below, TQKV__(truncate)(cell));
    return TQKV__(code_from)(count, TQKV__(bound)(bits, bounds, count), w, side);
}

#if TQKV__LANES < 16
/* Quantises TQ8 where tables are too large for instructions: vectors find the cells of n values, loads the counts
   and bounds, vectors compare. One loop a step: a vector load that follows stores of its lanes at once would wait
   for them. */
TQKV__TARGET static TQKV__NOINLINE void TQKV__(quantise_loads)(const tqkv__quantiser *q, const float *y, int n,
                                                               float scale, uint8_t *codes)
{
    TQKV__ALIGNED float bounds[256]; /* n is at most that */
    TQKV__ALIGNED int32_t cells[256];
    TQKV__(codes) side, four[4];
    for (int d = 0; d < n; d += TQKV__LANES) {
        const TQKV__VECTOR w = TQKV__(fold)(128, TQKV__(load)(y + d) * TQKV__(set1)(scale), &side);
        const TQKV__VECTOR cell = TQKV__(min)(w * TQKV__(set1)(q->slope), TQKV__(set1)(q->top));
        four[0] = TQKV__(truncate)(cell);
        memcpy(cells + d, &four[0], sizeof four[0]);
    }
    for (int d = 0; d < n; d += 8) {
        TQKV__UNROLL
        for (int i = 0; i < 8; i++) {
            cells[d + i] = q->below[cells[d + i]];
            bounds[d + i] = q->bounds[cells[d + i]];
        }
    }
    for (int d = 0; d < n; d += 4 * TQKV__LANES) {
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) {
            const int at = d + i * TQKV__LANES;
            const TQKV__VECTOR w = TQKV__(fold)(128, TQKV__(load)(y + at) * TQKV__(set1)(scale), &side);
            memcpy(&four[i], cells + at, sizeof four[i]);
            four[i] = TQKV__(code_from)(four[i], TQKV__(load)(bounds + at), w, side);
        }
        const TQKV__(codes) narrow = TQKV__(narrow)(four);
        memcpy(codes + d, &narrow, sizeof narrow);
    }
}
#endif

/* Finds the codes of TQ8 for n values with one scale: 256 at a time, then whole vectors, then a tail with zeros behind
   it. */
TQKV__OP void TQKV__(quantise_values_tq8)(const tqkv__quantiser *q, const float *y, int n, float scale, uint8_t *codes)
{
    enum { step = 4 * TQKV__LANES };
    float tail[step] = {0};
    uint8_t tail_codes[step];
    const int rest = n % step;
    for (int d = 0; d < n - rest; d += 256) /* what quantise_loads takes at most */
        TQKV__(quantise_tq8)(q, y + d, n - rest - d < 256 ? n - rest - d : 256, scale, codes + d);
    if (rest == 0) return;
    memcpy(tail, y + n - rest, (size_t)rest * sizeof(float));
    TQKV__(quantise_tq8)(q, tail, step, scale, tail_codes);
    memcpy(codes + n - rest, tail_codes, (size_t)rest);
}

/* Quantises y: [head_dim], scales: [norms_per_row] -> codes: [head_dim]. bits is a constant: of the codebook, 4 for
   fewer, 0 without. */
TQKV__OP void TQKV__(quantise_as)(const int bits, const tqkv__stream *s, const tqkv__quantiser *q, const float *y,
                                  const float *scales, uint8_t *codes)
{
    TQKV__(codes) below[4], four[4];
    TQKV__VECTOR bounds[32 / TQKV__LANES];
    if (bits) TQKV__(load_below)(bits, q->below, below);
    if (bits)
        for (int i = 0; i < 32 / TQKV__LANES; i++) bounds[i] = TQKV__(load)(q->bounds + i * TQKV__LANES);
    for (const float *end = y + s->head_dim; y < end; scales++)
        for (int left = s->norm_dim, n; left > 0; left -= n, y += n, codes += n) {
            n = left < 4 * TQKV__LANES ? left : 4 * TQKV__LANES;
            TQKV__UNROLL
            for (int i = 0; i < 4; i++) { /* behind n values the first vector again */
                const float *from = y + (i * TQKV__LANES < n ? i * TQKV__LANES : 0);
                const TQKV__VECTOR v = TQKV__(load)(from) * TQKV__(set1)(*scales);
                four[i] = bits ? TQKV__(quantise)(bits, q, below, bounds, v) : TQKV__(quantise_i8)(v);
            }
            const TQKV__(codes) bytes = TQKV__(narrow)(four);
            const bool whole = n == 4 * TQKV__LANES || s->main_bits < 8; /* packing reads whole vectors */
            if (whole)
                memcpy(codes, &bytes, sizeof bytes);
            else
                memcpy(codes, &bytes, (size_t)n);
        }
}

/* Packs bytes: [head_dim], with room for whole vectors -> row: [row_bytes]. The bits are constants. */
TQKV__OP void TQKV__(pack_as)(const int main_bits, const int upper_bits, int head_dim, const uint8_t *bytes,
                              uint8_t *row)
{
    uint8_t *main = row, *upper = row + head_dim * main_bits / 8, field[2 * TQKV__LANES];
    for (int left = head_dim; left > 0; left -= 4 * TQKV__LANES, bytes += 4 * TQKV__LANES) {
        TQKV__(codes) codes;
        const bool whole = left >= 4 * TQKV__LANES;
        memcpy(&codes, bytes, sizeof codes);
        TQKV__(pack)(main_bits, 0, codes, whole ? main : field);
        if (!whole) memcpy(main, field, (size_t)(left * main_bits / 8));
        if (upper_bits) TQKV__(pack)(upper_bits, main_bits, codes, whole ? upper : field);
        if (upper_bits && !whole) memcpy(upper, field, (size_t)(left * upper_bits / 8));
        main += TQKV__LANES * main_bits / 2;
        upper += TQKV__LANES * upper_bits / 2;
    }
}

/* Quantises and packs y: [head_dim], scales: [norms_per_row] -> row: [row_bytes]. Returns the codes as bytes,
   [head_dim]: the row itself or, if it is packed, `bytes`. */
TQKV__TARGET static const uint8_t *TQKV__(quantise_row)(const tqkv__stream *s, const tqkv__quantiser *q, const float *y,
                                                        const float *scales, uint8_t *row, uint8_t *bytes)
{
    uint8_t *codes = s->main_bits < 8 ? bytes : row;
    if (s->book_bits == 8)
        for (int b = 0; b < s->head_dim; b += s->norm_dim)
            TQKV__(quantise_values_tq8)(q, y + b, s->norm_dim, *scales++, row + b);
    else if (s->book_bits == 6)
        TQKV__(quantise_as)(6, s, q, y, scales, codes);
    else if (s->book_bits == 5 && TQKV__LANES < 16)
        TQKV__(quantise_as)(5, s, q, y, scales, codes);
    else if (s->book_bits) /* vectors of 16 hold the bounds of 5 bits as well */
        TQKV__(quantise_as)(4, s, q, y, scales, codes);
    else
        TQKV__(quantise_as)(0, s, q, y, scales, codes);
    if (s->main_bits == 4 && s->upper_bits == 0) TQKV__(pack_as)(4, 0, s->head_dim, bytes, row);
    if (s->main_bits == 4 && s->upper_bits == 1) TQKV__(pack_as)(4, 1, s->head_dim, bytes, row);
    if (s->main_bits == 4 && s->upper_bits == 2) TQKV__(pack_as)(4, 2, s->head_dim, bytes, row);
    if (s->main_bits == 2 && s->upper_bits == 0) TQKV__(pack_as)(2, 0, s->head_dim, bytes, row);
    if (s->main_bits == 2 && s->upper_bits == 1) TQKV__(pack_as)(2, 1, s->head_dim, bytes, row);
    return codes;
}

/* Stores the codes of F16; type is a constant. */
TQKV__OP void TQKV__(store_f16_as)(const tqkv_type type, const void *src, int head_dim, uint8_t *row)
{
    for (int d = 0; d < head_dim; d += TQKV__LANES) TQKV__(store_f16)(row + 2 * d, TQKV__(load_as)(type, src, d));
}

TQKV__TARGET static void TQKV__(store_f16_row)(tqkv_type type, const void *src, int head_dim, uint8_t *row)
{
    if (type == TQKV_TYPE_F16)
        memcpy(row, src, 2 * (size_t)head_dim);
    else if (type == TQKV_TYPE_BF16)
        TQKV__(store_f16_as)(TQKV_TYPE_BF16, src, head_dim, row);
    else
        TQKV__(store_f16_as)(TQKV_TYPE_F32, src, head_dim, row);
}

/* Returns the values of a row that are to be quantised: less its centre, times its inverses, rotated, in row:
   [head_dim] or, where nothing is to be done, in the source. Halves are not widened first: that pass would make them a
   tenth slower than floats. F16 is stored. The sums of a row that is not rotated may read behind it: a copy. */
TQKV__TARGET static const float *TQKV__(open_row)(const tqkv__stream *s, const tqkv__row *source, float *row)
{
    const bool half = s->kind == TQKV__HALF;
    const void *src = source->src;
    tqkv_type type = s->type;
    const bool widens = !s->rotated && !half && (type != TQKV_TYPE_F32 || TQKV__HAS_MATRIX(s->head_dim));
    if (source->center || source->inverses || widens) {
        TQKV__(widen)(type, src, source->center, source->inverses, s->head_dim, row);
        type = TQKV_TYPE_F32;
        src = row;
    }
    if (s->rotated) {
        TQKV__(hadamard)(type, src, s->head_dim, true, row);
        type = TQKV_TYPE_F32;
        src = row;
    }
    if (half) TQKV__(store_f16_row)(type, src, s->head_dim, source->codes);
    return (const float *)src;
}

/* Takes a few rows through each step: steps of one row depend on each other, rows do not. */
TQKV__TARGET static void TQKV__(encode_rows)(const tqkv__stream *s, const tqkv__quantiser *q, const tqkv__row *rows,
                                             int n_rows)
{
    enum { buffer = 1536, most_norms = buffer / 32 }; /* 6 KiB: a fraction of an L1 cache, and of the stack */
    TQKV__ALIGNED float rotated[buffer + 16], norms[most_norms], scales[most_norms]; /* fours are loaded beyond a row */
    TQKV__ALIGNED float sums[most_norms];
    TQKV__ALIGNED uint8_t bytes[TQKV_MAX_HEAD_DIM + 64];
    const float *values[most_norms];
    const int batch = buffer / s->head_dim, norms_per_row = s->norms_per_row;
    for (int first = 0; first < n_rows; first += batch, rows += batch) {
        const int n = n_rows - first < batch ? n_rows - first : batch;
        for (int i = 0; i < n; i++) {
            values[i] = TQKV__(open_row)(s, &rows[i], rotated + i * s->head_dim);
            if (rows[i].half) TQKV__(store_f16_row)(TQKV_TYPE_F32, values[i], s->head_dim, rows[i].half);
        }
        if (s->kind == TQKV__HALF) continue;
        TQKV__(norms)(s, values, n, norms, scales);
        if (s->n_factors > 1) TQKV__(search)(s, q, n, values, rotated, scales, sums);
        for (int i = 0; i < n; i++) {
            const uint8_t *codes =
                TQKV__(quantise_row)(s, q, values[i], scales + i * norms_per_row, rows[i].codes, bytes);
            if (s->n_factors == 1) /* TQ2 */
                TQKV__(centroid_sums)(s, q, codes, sums + i * norms_per_row);
            if (s->n_factors > 1 && rows[i].factors)
                memcpy(rows[i].factors, scales + i * norms_per_row, (size_t)norms_per_row * sizeof(float));
        }
        for (int i = n * norms_per_row; i % TQKV__LANES; i++) sums[i] = 1.0f;
        if (s->kind == TQKV__BOOK) TQKV__(correct_norms)(s, n * norms_per_row, sums, norms);
        for (int i = 0; i < n; i++)
            memcpy(rows[i].norms, norms + i * norms_per_row, (size_t)norms_per_row * sizeof(float));
    }
}

/* Does what tqkv__all_finite does for whole rows: the largest magnitude shows an exponent of all ones. */
TQKV__TARGET static bool TQKV__(floats_finite)(const float *x, size_t n)
{
    TQKV__(codes) largest[4];
    uint32_t lanes[4 * TQKV__LANES], all = 0;
    memset(largest, 0, sizeof largest);
    size_t i = 0;
    for (; i + 4 * TQKV__LANES <= n; i += 4 * TQKV__LANES) {
        TQKV__UNROLL
        for (int j = 0; j < 4; j++) largest[j] = TQKV__(larger_bits)(largest[j], TQKV__(load)(x + i + j * TQKV__LANES));
    }
    for (; i < n; i += TQKV__LANES) largest[0] = TQKV__(larger_bits)(largest[0], TQKV__(load)(x + i));
    memcpy(lanes, largest, sizeof lanes);
    for (int j = 0; j < 4 * TQKV__LANES; j++) all = lanes[j] > all ? lanes[j] : all;
    return all < 0x7f800000u;
}

/* Does what tqkv__values_finite does for whole rows. Two halves, or bfloat16s, in a word: a 1 added at the lowest bit
   of an exponent carries into the sign bit from an exponent of all ones, and from no other. */
TQKV__TARGET static bool TQKV__(rows_finite)(tqkv_type type, const void *x, size_t n)
{
    const uint32_t one = type == TQKV_TYPE_F16 ? 0x04000400u : 0x00800080u;
    const uint8_t *p = (const uint8_t *)x;
    TQKV__(words) carries, pairs;
    uint32_t lanes[TQKV__LANES], all = 0;
    if (type == TQKV_TYPE_F32) return TQKV__(floats_finite)((const float *)x, n);
    memset(&carries, 0, sizeof carries);
    for (size_t left = 2 * n, size = sizeof pairs; left; left -= size, p += size) {
        if (left < size) {
            size = left;
            memset(&pairs, 0, sizeof pairs);
            memcpy(&pairs, p, left);
        } else {
            memcpy(&pairs, p, sizeof pairs);
        }
        carries |= (pairs & 0x7fff7fffu) + one;
    }
    memcpy(lanes, &carries, sizeof lanes);
    for (int i = 0; i < TQKV__LANES; i++) all |= lanes[i];
    return !(all & 0x80008000u);
}

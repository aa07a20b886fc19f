/* >>k-accumulate: sums of values straight from the codes. */

/* sums[row][v] += weights[row] * vector k + v of the strip of per_lane vectors at p; per_lane is a constant. Where
   vectors are looked up together, weights come after them: 16 registers cannot hold both. */
TQKV__OP void TQKV__(add_weighted)(const tqkv_format format, const int per_lane, const int rows, const int k,
                                   const int width, const TQKV__VECTOR *table, const uint8_t *p, const uint8_t *upper,
                                   const TQKV__(rows) * weights, TQKV__VECTOR (*sums)[8])
{
    TQKV__VECTOR weight[TQKV__ROWS], x[8];
    if (TQKV__(whole_strips)(format)) {
        TQKV__(values)(format, per_lane, k, width, TQKV__(reload)(rows, table), p, upper, x);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) {
            weight[r] = TQKV__(set1)(weights->at[weights->offset[r]]);
            TQKV__UNROLL
            for (int v = 0; v < width; v++) sums[r][v] = TQKV__(fma)(weight[r], x[v], sums[r][v]);
        }
        return;
    }
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) weight[r] = TQKV__(set1)(weights->at[weights->offset[r]]);
    TQKV__UNROLL
    for (int v = 0; v < width; v++) {
        x[v] = TQKV__(value)(format, per_lane, k + v, table, p, upper);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) sums[r][v] = TQKV__(fma)(weight[r], x[v], sums[r][v]);
    }
}

/* Loads or stores `width` vectors of sums of each row, at out; width is a constant, and so is `store`. */
TQKV__OP void TQKV__(move_sums)(const bool store, const int rows, const int width, const TQKV__(panel) * panel,
                                TQKV__VECTOR (*sums)[8], float *out)
{
    TQKV__UNROLL
    for (int i = 0; i < rows * width; i++) { /* in this order gcc 12 keeps all of them in registers */
        const int r = store ? i % rows : i / width, v = store ? i / rows : i % width;
        float *at = out + TQKV__(row_in)(panel, r) * panel->result_stride + v * TQKV__LANES;
        if (store)
            TQKV__(store)(at, sums[r][v]);
        else
            sums[r][v] = TQKV__(load)(at);
    }
}

/* Accumulates: out[row] += sum_j weights[row][j] * value[j] for `width` vectors from vector k on of a strip of per_lane
   vectors, whose sums are in registers over all positions; per_lane is a constant. p: of the strip at the first
   position, out: of vector k */
TQKV__OP void TQKV__(accumulate_vectors)(const tqkv_format format, const int per_lane, const int rows, const int k,
                                         const int width, const TQKV__(panel) * panel, const TQKV__VECTOR *table,
                                         const uint8_t *p, const uint8_t *upper, float *out)
{
    const int n = panel->n, size = TQKV__(strip_bytes)(format, per_lane) + TQKV__(upper_bytes)(format, per_lane);
    const size_t stride = TQKV__(stride)(format, panel);
    const ptrdiff_t ahead = panel->ahead;
    TQKV__(rows) weights = TQKV__(open_rows)(rows, TQKV__TILE, panel);
    TQKV__VECTOR sums[TQKV__ROWS][8];
    int j = 0;
    TQKV__(move_sums)(false, rows, width, panel, sums, out);
    do { /* n > 0: a loop that may strip no times costs copies of all sums */
        if (format != TQKV__FLOATS && k == 0) tqkv__prefetch(TQKV__NEAR(format), p + ahead, (size_t)size);
        TQKV__(add_weighted)(format, per_lane, rows, k, width, table, p, upper, &weights, sums);
        p += stride;
        upper += stride;
        weights.at++;
    } while (++j < n);
    TQKV__(move_sums)(true, rows, width, panel, sums, out);
}

/* Accumulates all vectors of a whole strip, as many at a time as registers hold. */
TQKV__OP void TQKV__(accumulate_strip)(const tqkv_format format, const int rows, const TQKV__(panel) * panel,
                                       const TQKV__VECTOR *table, const uint8_t *p, const uint8_t *upper, float *out)
{
    const int per_lane = TQKV__STRIP(format), most = TQKV__SUMS / rows, width = most < per_lane ? most : per_lane;
    TQKV__UNROLL
    for (int k = 0; k < per_lane; k += width, out += width * TQKV__LANES)
        TQKV__(accumulate_vectors)(format, per_lane, rows, k, width, panel, table, p, upper, out);
}

/* Loads or stores the sums of the vectors behind a strip: two, one or none; two is a constant if it is false. */
TQKV__OP void TQKV__(move_behind)(const bool store, const int rows, bool one, bool two, const TQKV__(panel) * panel,
                                  TQKV__VECTOR (*sums)[8], float *out)
{
    if (one) TQKV__(move_sums)(store, rows, 1, panel, sums, out);
    if (two) TQKV__(move_sums)(store, rows, 2, panel, sums, out);
}

/* Does in one pass what accumulate_vectors does, for a strip of per_lane vectors, 4 or 2, or 0 for none, and for
   `behind` vectors after it, 0, 1 or 2: the sums of so few would wait for each other in passes of their own. `behind`
   is a constant but after a strip of 4: tests in the loop cost up to 0.1 of attention's time at head_dim 48. */
TQKV__OP void TQKV__(accumulate_rest)(const tqkv_format format, const int per_lane, const int behind, const int rows,
                                      const TQKV__(panel) * panel, const TQKV__VECTOR *table, const uint8_t *p,
                                      const uint8_t *upper, float *out)
{
    const int n = panel->n, asked = per_lane > 2 ? per_lane + 1 : 3; /* vectors of the next tile's codes */
    const int bytes = TQKV__(strip_bytes)(format, per_lane), upper_bytes = TQKV__(upper_bytes)(format, per_lane);
    const bool two = per_lane == 4 && 6 * rows <= TQKV__SUMS && behind == 2, one = behind && !two;
    const size_t stride = TQKV__(stride)(format, panel);
    const size_t size = (size_t)(TQKV__(strip_bytes)(format, asked) + TQKV__(upper_bytes)(format, asked));
    const ptrdiff_t ahead = panel->ahead;
    TQKV__(rows) weights = TQKV__(open_rows)(rows, TQKV__TILE, panel);
    TQKV__VECTOR sums[TQKV__ROWS][8], sums_behind[TQKV__ROWS][8];
    float *out_behind = out + per_lane * TQKV__LANES;
    int j = 0;
    if (per_lane) TQKV__(move_sums)(false, rows, per_lane, panel, sums, out);
    TQKV__(move_behind)(false, rows, one, two, panel, sums_behind, out_behind);
    do {
        if (format != TQKV__FLOATS) tqkv__prefetch(TQKV__NEAR(format), p + ahead, size);
        if (per_lane) TQKV__(add_weighted)(format, per_lane, rows, 0, per_lane, table, p, upper, &weights, sums);
        if (behind) {
            const uint8_t *next = p + bytes, *next_upper = upper + upper_bytes;
            if (two)
                TQKV__(add_weighted)(format, 2, rows, 0, 2, table, next, next_upper, &weights, sums_behind);
            else
                TQKV__(add_weighted)(format, 1, rows, 0, 1, table, next, next_upper, &weights, sums_behind);
        }
        p += stride;
        upper += stride;
        weights.at++;
    } while (++j < n);
    if (per_lane) TQKV__(move_sums)(true, rows, per_lane, panel, sums, out);
    TQKV__(move_behind)(true, rows, one, two, panel, sums_behind, out_behind);
}

/* Accumulates: out[row] += sum_j weights[row][j] * value[j], for the whole strips of a panel */
TQKV__OP void TQKV__(accumulate)(const tqkv_format format, const int rows, const TQKV__(panel) * panel)
{
    const int strip = TQKV__STRIP(format);
    const uint8_t *p = panel->codes, *upper = panel->codes + panel->upper;
    float *out = panel->results;
    TQKV__VECTOR table[8];
    TQKV__(load_codebook)(format, panel->stream, table);
    for (int left = panel->dim / TQKV__LANES; left >= strip; left -= strip, out += strip * TQKV__LANES) {
        TQKV__(accumulate_strip)(format, rows, panel, table, p, upper, out);
        p += TQKV__(strip_bytes)(format, strip);
        upper += TQKV__(upper_bytes)(format, strip);
    }
}

/* Accumulates the vectors behind them, in passes. It is a function of its own: in one with whole strips gcc 12 spills a
   sum of four rows. On vectors of 4 only 4 may be left, on vectors of 8 only 2; on vectors of 16

     vectors left   7          6                           5                           4    3      2    1
     passes         4, 2 + 1   4 + 2 for up to two rows,   4 + 1 for up to three       4    2 + 1  2    1
                               else 4, 2                   rows, else 4, 1                                  */
TQKV__OP void TQKV__(add_rest)(const tqkv_format format, const int rows, const TQKV__(panel) * panel)
{
    const int strip = TQKV__STRIP(format), vectors = panel->dim / TQKV__LANES, whole = vectors / strip * strip;
    const bool wide = TQKV__LANES == 16;
    const uint8_t *p = panel->codes + TQKV__(strip_bytes)(format, whole);
    const uint8_t *upper = panel->codes + panel->upper + TQKV__(upper_bytes)(format, whole);
    float *out = panel->results + whole * TQKV__LANES;
    TQKV__VECTOR table[8];
    TQKV__(load_codebook)(format, panel->stream, table);
    for (int left = vectors - whole, count; left > 0; left -= count, out += count * TQKV__LANES) {
        const int behind = wide && left < 7 && left * rows <= TQKV__SUMS ? left - 4 : 0; /* a strip of 4 */
        count = strip > 4 && left >= 4 ? 4 + behind : left;
        if (strip > 4 && left >= 4) {
            TQKV__(accumulate_rest)(format, 4, behind, rows, panel, table, p, upper, out);
        } else if (strip * TQKV__LANES > 16) {
            if (wide && left == 1)
                TQKV__(accumulate_rest)(format, 0, 1, rows, panel, table, p, upper, out);
            else if (wide && left == 3)
                TQKV__(accumulate_rest)(format, 2, 1, rows, panel, table, p, upper, out);
            else
                TQKV__(accumulate_rest)(format, 2, 0, rows, panel, table, p, upper, out);
        }
        p += TQKV__(strip_bytes)(format, count);
        upper += TQKV__(upper_bytes)(format, count);
    }
}

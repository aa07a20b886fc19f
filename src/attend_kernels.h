/* >>attend-kernels: attention's inner loops */

/* The format of decoded rows. */
#define TQKV__FLOATS TQKV_FORMAT_DEFAULT
/* Codes of 2 or 4 main bits, in the order of tqkv__to_decoded. */
#define TQKV__PACKED(format) (TQKV__MAIN_BITS(format) < 8)
/* Vectors in a run, which is decoded together. */
#define TQKV__RUN(format) (TQKV__PACKED(format) ? TQKV__NIBBLE_RUN : 4)
/* Formats with loops straight from the codes. Not those of 5 and 6 bits in bytes, which are there for existing caches: the
   loops of two formats would take 26 KB for 1.1 to 1.5 times the speed. On NEON no codebook for bytes: it leaves no
   registers for sums. */
#define TQKV__HAS_LOOPS(kind, main, book) ((main) < 8 || (kind) != TQKV__BOOK || (TQKV__LANES > 4 && (book) == 8))
#define TQKV__DIRECT(format)              TQKV__HAS_LOOPS(TQKV__KIND(format), TQKV__MAIN_BITS(format), TQKV__BOOK_BITS(format))
/* Rows of a codebook's loops. More take decoded rows: on AVX2 four took as long or longer straight from the codes (Zen 4,
   D=128: TQ3 1.10, TQ2 1.04, TQ5 to TQ8 0.99 times). */
#define TQKV__BOOK_ROWS(book, keys) (TQKV__LANES == 8 && ((keys) || (book) != 4) ? 2 : 4)
/* Most rows of a format's loops, which are compiled for 1, 2 and so many. No kind: decoded rows. */
#define TQKV__KEY_ROWS(kind, book)                                                                                     \
    ((kind) == TQKV__BOOK ? TQKV__BOOK_ROWS(book, true) : (kind) == 0 ? TQKV__DECODED_SCORE_ROWS : TQKV__SCORE_ROWS)
#define TQKV__VALUE_ROWS(kind, book) ((kind) == TQKV__BOOK ? TQKV__BOOK_ROWS(book, false) : TQKV__ROWS)

/* Distance between decoded rows. The gap keeps equal columns of many rows out of the same cache sets. */
#define TQKV__X_STRIDE(dim) ((dim) + 16)

/* Calls the loop for 1, 2 or `most` rows, each a constant. */
#define TQKV__BY_ROWS(loop, format, most)                                                                              \
    (rows == 1    ? TQKV__(loop)(format, 1, block)                                                                     \
     : rows == 2  ? TQKV__(loop)(format, 2, block)                                                                     \
     : (most) > 2 ? TQKV__(loop)(format, most, block)                                                                  \
                  : (void)0)

/* Parts of e^x - 1 = power * tail + (power - 1) for x in [-87, 0]: x = n ln2 + r, power = 2^n, tail = e^r - 1 by
   Taylor's series to r^7. The rest of the series is below float's last bit for |r| <= ln2/2. */
TQKV__OP void TQKV__(exp_parts)(TQKV__VECTOR x, TQKV__VECTOR *power, TQKV__VECTOR *tail)
{
    const TQKV__VECTOR n = TQKV__(round)(x * TQKV__(set1)(1.44269504f));
    TQKV__VECTOR r = TQKV__(fma)(n, TQKV__(set1)(-0.693359375f), x); /* ln2 in two parts; n times the first is exact */
    r = TQKV__(fma)(n, TQKV__(set1)(2.12194440e-4f), r);
    TQKV__VECTOR p = TQKV__(fma)(TQKV__(set1)(1.0f / 5040), r, TQKV__(set1)(1.0f / 720));
    p = TQKV__(fma)(p, r, TQKV__(set1)(1.0f / 120));
    p = TQKV__(fma)(p, r, TQKV__(set1)(1.0f / 24));
    p = TQKV__(fma)(p, r, TQKV__(set1)(1.0f / 6));
    p = TQKV__(fma)(p, r, TQKV__(set1)(0.5f));
    p = TQKV__(fma)(p, r, TQKV__(set1)(1.0f));
    *tail = p * r;
    *power = TQKV__(exp2)(n);
}

/* e^x for x <= 0; 0 below -87, where 2^n leaves the normal floats. */
TQKV__OP TQKV__VECTOR TQKV__(exp)(TQKV__VECTOR x)
{
    TQKV__VECTOR power, tail;
    TQKV__(exp_parts)(TQKV__(max)(TQKV__(set1)(-87.0f), x), &power, &tail); /* NaN stays NaN */
    return TQKV__(zero_below)(TQKV__(set1)(-87.0f), x, TQKV__(fma)(power, tail, power));
}

/* tanh(x) = -m/(2 + m) with m = e^(-2|x|) - 1, which keeps its precision near 0. */
TQKV__TARGET static TQKV__VECTOR TQKV__(tanh)(TQKV__VECTOR x)
{
    TQKV__VECTOR power, tail;
    const TQKV__VECTOR doubled = TQKV__(abs)(x) * TQKV__(set1)(-2.0f);
    TQKV__(exp_parts)(TQKV__(max)(TQKV__(set1)(-40.0f), doubled), &power, &tail);
    const TQKV__VECTOR m = TQKV__(fma)(power, tail, power - TQKV__(set1)(1.0f));
    return TQKV__(copysign)(TQKV__(abs)(m) / (TQKV__(set1)(2.0f) + m), x);
}

/* Turns a row's scores into weights and returns their sum; -infinity gives 0. x: [TQKV__TILE] */
TQKV__TARGET static float TQKV__(weigh)(float *x, float max)
{
    const TQKV__VECTOR peak = TQKV__(set1)(max);
    TQKV__VECTOR total[16 / TQKV__LANES]; /* 16 sums in every set: see >>integer */
    TQKV__UNROLL
    for (int i = 0; i < 16 / TQKV__LANES; i++) total[i] = TQKV__(set1)(0.0f);
    TQKV__UNROLL
    for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
        const TQKV__VECTOR weight = TQKV__(exp)(TQKV__(load)(x + j) - peak);
        TQKV__(store)(x + j, weight);
        total[j / TQKV__LANES % (16 / TQKV__LANES)] += weight;
    }
    return TQKV__(sum_16)(total);
}

/* Sets the scores outside the span to `value`; some of them were never computed. */
TQKV__OP void TQKV__(mask)(float *x, tqkv__span span, float value)
{
    for (int j = 0; j < span.from; j++) x[j] = value;
    for (int j = span.to; j < TQKV__TILE; j++) x[j] = value;
    for (uint64_t left = span.hidden; left; left &= left - 1) x[__builtin_ctzll(left)] = value;
}

/* Three passes over the rows, without dependencies from row to row. Rows that see nothing skip the arithmetic, because
   their maximum may be -infinity. */
TQKV__TARGET static void TQKV__(softmax_tile)(const tqkv__attention *a, const tqkv__span *spans, const float *offsets,
                                              int n_rows, float *scores, float *max, float *sum, float *out)
{
    float shrink[TQKV__CHUNK_ROWS];
    const float softcap = a->call.softcap;
    for (int row = 0; row < n_rows; row++) {
        float *x = scores + row * TQKV__TILE;
        const bool seen = spans[row].to > spans[row].from;
        TQKV__VECTOR largest = TQKV__(set1)(max[row]);
        TQKV__(mask)(x, spans[row], seen && softcap == 0.0f ? -INFINITY : 0.0f);
        shrink[row] = 0.0f;
        if (!seen) continue;
        if (softcap > 0.0f)
            for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
                const TQKV__VECTOR ratio = (TQKV__(load)(x + j) + TQKV__(set1)(offsets[row])) / TQKV__(set1)(softcap);
                TQKV__(store)(x + j, TQKV__(fma)(TQKV__(tanh)(ratio), TQKV__(set1)(softcap), TQKV__(set1)(0.0f)));
            }
        if (softcap > 0.0f) TQKV__(mask)(x, spans[row], -INFINITY);
        TQKV__UNROLL
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) largest = TQKV__(max)(TQKV__(load)(x + j), largest);
        const float peak = TQKV__(largest_lane)(largest);
        shrink[row] = max[row] - peak;
        max[row] = peak;
    }
    for (int row = 0; row < n_rows; row++) {
        if (!(shrink[row] < 0.0f)) continue;
        const TQKV__VECTOR factor = TQKV__(exp)(TQKV__(set1)(shrink[row]));
        float *sums = out + (size_t)row * (size_t)a->value_dim;
        for (int d = 0; d < a->value_dim; d += TQKV__LANES) TQKV__(store)(sums + d, TQKV__(load)(sums + d) * factor);
        sum[row] *= TQKV__(first_lane)(factor);
    }
    for (int row = 0; row < n_rows; row++)
        if (spans[row].to > spans[row].from) sum[row] += TQKV__(weigh)(scores + row * TQKV__TILE, max[row]);
}

TQKV__TARGET static void TQKV__(end_piece)(int n_rows, int value_dim, const tqkv__sums *piece, const tqkv__sums *sums)
{
    const TQKV__VECTOR zero = TQKV__(set1)(0.0f);
    for (int row = 0; row < n_rows; row++) {
        float *added = piece->out + (size_t)row * (size_t)value_dim, *to = sums->out + (size_t)row * (size_t)value_dim;
        const TQKV__VECTOR sum = TQKV__(set1)(piece->sum[row]);
        if (piece->sum[row] == 0.0f) continue;
        const TQKV__VECTOR factor = TQKV__(exp)(TQKV__(set1)(tqkv__loss(sums->max[row], piece->max[row])));
        for (int d = 0; d < value_dim; d += TQKV__LANES) {
            TQKV__(store)(to + d, TQKV__(fma)(TQKV__(load)(to + d), factor, TQKV__(load)(added + d)));
            TQKV__(store)(added + d, zero);
        }
        sums->sum[row] = TQKV__(first_lane)(TQKV__(fma)(TQKV__(set1)(sums->sum[row]), factor, sum));
        sums->max[row] = piece->max[row];
        piece->sum[row] = 0.0f;
    }
}

TQKV__TARGET static void TQKV__(sum_heads)(const float *scores, const float *weights, const float *offsets, bool relu,
                                           int n_rows, float *sums)
{
    const TQKV__VECTOR least = TQKV__(set1)(relu ? 0.0f : -INFINITY);
    for (int row = 0; row < n_rows; row++, scores += TQKV__TILE) {
        const TQKV__VECTOR weight = TQKV__(set1)(weights[row]), offset = TQKV__(set1)(offsets[row]);
        TQKV__UNROLL
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
            const TQKV__VECTOR score = TQKV__(max)(least, TQKV__(load)(scores + j) + offset);
            TQKV__(store)(sums + j, TQKV__(fma)(weight, score, TQKV__(load)(sums + j)));
        }
    }
}

/* The factors of a tile's codes, per block and position. Those of keys that are infinite become NaN: a score of -infinity
   would leave the position out. norms: NULL for halves, whose factors are all 1; factors: [n_blocks][TQKV__TILE], of others zero
   beyond n */
TQKV__TARGET static void TQKV__(factors)(const tqkv__stream *s, const float *norms, const tqkv__run *run, bool keys,
                                         float *factors)
{
    const TQKV__VECTOR zero = TQKV__(set1)(0.0f), same = TQKV__(set1)(1.0f);
    const int dim = s->head_dim, per_row = s->norms_per_row, n = run->n;
    for (int d = 0; !norms && d < dim; d += s->block_dim, factors += TQKV__TILE)
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) TQKV__(store)(factors + j, same);
    if (!norms) return;
    const bool divided = per_row > 1 && s->kind == TQKV__BOOK && s->block_scale != 1.0f;
    const TQKV__VECTOR factor = divided ? same : TQKV__(set1)(tqkv__factor(s, 1.0f));
    for (int d = 0; d < dim; d += s->block_dim, factors += TQKV__TILE) {
        const float *norm = per_row > 1 ? norms + d / s->norm_dim : norms;
        if (per_row > 1 || n < TQKV__TILE) {
            for (int j = 0; j < n; j++, norm += per_row) factors[j] = *norm;
            for (int j = n; j < TQKV__TILE; j++) factors[j] = 0.0f;
            norm = factors;
        }
        for (int j = 0; divided && j < TQKV__TILE; j += TQKV__LANES)
            TQKV__(store)(factors + j, TQKV__(load)(factors + j) / TQKV__(set1)(s->block_scale));
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
            TQKV__VECTOR x = TQKV__(load)(norm + j) * factor;
            if (keys) x = x + x * zero;
            TQKV__(store)(factors + j, x);
        }
    }
}

/* -- Codes as floats. The lanes of a vector are dimensions, of keys as of values. -- */

/* One block of a run of positions, and the query rows that use it. rows and results: queries and scores for keys,
   weights and sums for values; their rows are row_stride and result_stride apart. */
typedef struct TQKV__(block) {
    const tqkv__stream *stream;
    const uint8_t *codes; /* of the first position; the others are `stride` bytes apart */
    ptrdiff_t ahead;      /* bytes to the codes that will be read next */
    size_t stride, upper; /* upper: bytes from the block's low nibbles to its upper bits */
    bool first;           /* of its rows, whose codes begin with it */
    int n, dim;           /* positions; values of the block */
    const float *rows;
    int row_stride, result_stride; /* between the pointers: read as one vector, they would wait for their two stores */
    float *results;
    int n_rows;           /* at most as many as the loop's; the last one takes the place of those that are missing */
    const float *factors; /* [n], keys only */
    bool add;             /* add to the scores in results */
} TQKV__(block);

/* Loops for one format. rows: 1, 2, or the most that registers hold. */
typedef struct TQKV__(loops) {
    void (*decode)(const TQKV__(block) *, int n, float *x);
    void (*score)(const TQKV__(block) *, int rows);
    void (*accumulate)(const TQKV__(block) *, int rows);
    void (*add_rest)(const TQKV__(block) *, int rows);
} TQKV__(loops);

/* Bytes of a run in the field of main bits, and in the field of upper bits. */
TQKV__OP int TQKV__(run_bytes)(const tqkv_format format, int per_lane)
{
    return TQKV__LANES * per_lane * (format == TQKV__FLOATS ? 32 : TQKV__MAIN_BITS(format)) / 8;
}

TQKV__OP int TQKV__(upper_bytes)(const tqkv_format format, int per_lane)
{
    return TQKV__LANES * per_lane * TQKV__UPPER_BITS(format) / 8;
}

TQKV__OP size_t TQKV__(stride)(const tqkv_format format, const TQKV__(block) * block)
{
    return format == TQKV__FLOATS ? (size_t)TQKV__X_STRIDE(block->dim) * sizeof(float) : block->stride;
}

/* The parameters format, per_lane, rows, k and width are constants here and below. */
TQKV__OP void TQKV__(load_codebook)(const tqkv_format format, const tqkv__stream *s, TQKV__VECTOR *table)
{
    if (TQKV__KIND(format) == TQKV__BOOK) TQKV__(load_table)(TQKV__BOOK_BITS(format), TQKV__PACKED(format), s, table);
}

/* Vector k of the run at p, with its upper bits at `upper`. Packed codes come in the order of tqkv__to_decoded. */
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

/* Vectors k to k + count - 1 of the run; x: [count] */
TQKV__OP void TQKV__(values)(const tqkv_format format, const int per_lane, const int k, const int count,
                             const TQKV__VECTOR *table, const uint8_t *p, const uint8_t *upper, TQKV__VECTOR *x)
{
    TQKV__UNROLL
    for (int i = 0; i < count; i++) x[i] = TQKV__(value)(format, per_lane, k + i, table, p, upper);
}

/* -- A block, which is a multiple of 16 values, is whole runs and then, as they fit, runs of 4, 2 and 1 vectors. -- */

/* Are there runs of two vectors? On vectors of 16 only packed codes gain by them. */
#define TQKV__SHORT_RUNS(format) (TQKV__LANES < 16 || TQKV__PACKED(format))

/* Vectors of the next run, when so many values of the block are left. */
TQKV__OP int TQKV__(run_length)(const tqkv_format format, int left)
{
    const int run = TQKV__RUN(format);
    left /= TQKV__LANES;
    if (run * TQKV__LANES <= 16 || left >= run) return run;
    if (run > 4 && left >= 4) return 4;
    return TQKV__SHORT_RUNS(format) && left >= 2 ? 2 : 1;
}

/* Calls the loop for a run of `count` vectors, fewer than a whole one, as a constant. */
#define TQKV__SHORTER(loop, ...)                                                                                       \
    (TQKV__RUN(format) > 4 && count == 4      ? loop(4, __VA_ARGS__)                                                   \
     : TQKV__SHORT_RUNS(format) && count == 2 ? loop(2, __VA_ARGS__)                                                   \
     : TQKV__LANES == 16                      ? loop(1, __VA_ARGS__)                                                   \
                                              : (void)0)

/* A run of per_lane vectors as floats. */
TQKV__OP void TQKV__(decode_run)(const int per_lane, const tqkv_format format, const TQKV__VECTOR *table,
                                 const uint8_t *p, const uint8_t *upper, float *x)
{
    TQKV__VECTOR run[8];
    TQKV__(values)(format, per_lane, 0, per_lane, table, p, upper, run);
    TQKV__UNROLL
    for (int k = 0; k < per_lane; k++) TQKV__(store)(x + k * TQKV__LANES, run[k]);
}

/* The first n positions as floats. x: [n][TQKV__X_STRIDE] */
TQKV__OP void TQKV__(decode)(const tqkv_format format, const TQKV__(block) * block, int n, float *x)
{
    TQKV__VECTOR table[8];
    TQKV__(load_codebook)(format, block->stream, table);
    for (int j = 0; j < n; j++, x += TQKV__X_STRIDE(block->dim)) {
        const uint8_t *p = block->codes + (size_t)j * block->stride, *upper = p + block->upper;
        for (int left = block->dim, count; left > 0; left -= count * TQKV__LANES) {
            count = TQKV__(run_length)(format, left);
            if (count == TQKV__RUN(format))
                TQKV__(decode_run)(TQKV__RUN(format), format, table, p, upper, x + block->dim - left);
            else
                TQKV__SHORTER(TQKV__(decode_run), format, table, p, upper, x + block->dim - left);
            p += TQKV__(run_bytes)(format, count);
            upper += TQKV__(upper_bytes)(format, count);
        }
    }
}

/* Rows of a matrix: queries or weights. */
typedef struct TQKV__(rows) {
    const float *at;
    size_t offset[TQKV__ROWS]; /* of each row, in floats */
} TQKV__(rows);

/* Row r of a loop, in a block: of three rows in the loop for four the last stands twice. Only that loop has a row 3. */
TQKV__OP int TQKV__(row_in)(const TQKV__(block) * block, const int r) { return r < 3 ? r : block->n_rows - 1; }

TQKV__OP TQKV__(rows) TQKV__(open_rows)(const int rows, int stride, const TQKV__(block) * block)
{
    TQKV__(rows) all;
    all.at = block->rows;
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) all.offset[r] = (size_t)(TQKV__(row_in)(block, r) * stride);
    return all;
}

/* Does the loop decode a run's vectors together? They share work, which the compiler finds only in adjacent code. */
TQKV__OP bool TQKV__(whole_runs)(const tqkv_format format)
{
    return TQKV__KIND(format) == TQKV__BOOK && (TQKV__RUN_TOGETHER || !TQKV__PACKED(format));
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

/* sums[row][m] += products, lane by lane, of query `row` and a run of per_lane vectors of key m */
TQKV__OP void TQKV__(dot_run)(const int per_lane, const tqkv_format format, const int rows, const TQKV__VECTOR *table,
                              const TQKV__(keys) * keys, const TQKV__(rows) * queries, TQKV__VECTOR (*sums)[4])
{
    TQKV__VECTOR x[8], query[TQKV__ROWS];
    if (TQKV__(whole_runs)(format)) {
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

/* A run whose vectors are taken one after the other. */
typedef struct TQKV__(rest) {
    TQKV__(codes) main, upper, codes; /* of packed codes: fields, and codes of the next vectors */
    const uint8_t *p;                 /* of others */
} TQKV__(rest);

/* Vectors whose codes are joined from the two fields together. */
#define TQKV__JOINED(format) (TQKV__BOOK_BITS(format) > 4 ? 4 : 8)

/* Opens the run of each key; `count` is a constant for packed codes. */
TQKV__OP void TQKV__(open_runs)(const tqkv_format format, const int count, const TQKV__(keys) * keys,
                                TQKV__(rest) * rest)
{
    TQKV__UNROLL
    for (int m = 0; m < 4; m++) {
        rest[m].p = keys->p[m] + keys->at;
        if (TQKV__PACKED(format)) TQKV__(load_fields)
        (TQKV__BOOK_BITS(format), count, rest[m].p, keys->p[m] + keys->upper, &rest[m].main, &rest[m].upper);
    }
}

/* Joins the codes from vector k of the runs on. */
TQKV__OP void TQKV__(join_runs)(const tqkv_format format, int k, TQKV__(rest) * rest)
{
    (void)k; /* only on vectors of 16 */
    if (!TQKV__PACKED(format)) return;
    TQKV__UNROLL
    for (int m = 0; m < 4; m++, rest++)
        rest->codes = TQKV__(join_fields)(TQKV__BOOK_BITS(format), k, rest->main, rest->upper);
}

/* The next vector of each run, whose codes are joined; x: [4] */
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
            rest->p += TQKV__(run_bytes)(format, 1);
        }
    }
}

/* As dot_run for any number of vectors, one after the other; of packed codes 8 or 4. */
TQKV__OP void TQKV__(dot_vectors)(const tqkv_format format, const int rows, int count, const TQKV__VECTOR *table,
                                  const TQKV__(keys) * keys, const TQKV__(rows) * queries, TQKV__VECTOR (*sums)[4])
{
    const float *at = queries->at;
    const int part = TQKV__JOINED(format) == 8 ? count : 4;
    TQKV__(rest) rest[4];
    if (count == 8)
        TQKV__(open_runs)(format, 8, keys, rest);
    else
        TQKV__(open_runs)(format, 4, keys, rest);
    for (int k = 0; k < count; k += part) {
        TQKV__(join_runs)(format, k, rest);
        for (int i = 0; i < part; i++, at += TQKV__LANES) {
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

/* Asks for the codes of four keys of the next tile: packed rows as one piece of memory, before the first run of the first
   block, two lines at a time; others with each run, because many lines at once are slower. Of the latter a whole run, because a
   loop for fewer lines costs more than they. `begin`: before the first run */
TQKV__OP void TQKV__(ask_ahead)(const tqkv_format format, const bool begin, const TQKV__(block) * block,
                                const TQKV__(keys) * keys)
{
    const uint8_t *first = keys->p[0] + block->ahead;
    if (format == TQKV__FLOATS || begin != TQKV__PACKED(format)) return;
    if (begin)
        for (size_t i = 0; block->first && i < 4 * block->stride; i += 128)
            tqkv__prefetch(TQKV__NEAR(format), first + i, 128);
    TQKV__UNROLL
    for (int m = 0; !begin && m < 4; m++)
        tqkv__prefetch(TQKV__NEAR(format), keys->p[m] + (ptrdiff_t)keys->at + block->ahead,
                       (size_t)TQKV__(run_bytes)(format, TQKV__RUN(format)));
}

/* Goes on behind a run of `count` vectors. */
TQKV__OP void TQKV__(advance)(const tqkv_format format, int count, TQKV__(keys) * keys, TQKV__(rows) * queries)
{
    keys->at += (size_t)TQKV__(run_bytes)(format, count);
    keys->upper += (size_t)TQKV__(upper_bytes)(format, count);
    queries->at += count * TQKV__LANES;
}

/* sums[row][m]: products, lane by lane, of query `row` and key m; m < 4. On vectors of 16 most runs are taken one vector
   after the other: code for all vectors of a run gains nothing there, but 3% for whole runs of halves, and short runs of
   packed codes. */
TQKV__OP void TQKV__(dot_keys)(const tqkv_format format, const int rows, const TQKV__(block) * block,
                               const TQKV__VECTOR *table, TQKV__(keys) * keys, TQKV__VECTOR (*sums)[4])
{
    const int run = TQKV__RUN(format);
    const bool wide = TQKV__LANES == 16, packed = TQKV__PACKED(format), grid = TQKV__KIND(format) == TQKV__GRID;
    const bool any = wide && !packed && TQKV__KIND(format) != TQKV__BOOK; /* are there runs of any length? */
    const bool apart = wide && TQKV__(whole_runs)(format);                /* whole runs in a loop of their own */
    int left = block->dim;
    TQKV__(rows) queries = TQKV__(open_rows)(rows, block->row_stride, block);
    TQKV__(ask_ahead)(format, true, block, keys);
    TQKV__UNROLL
    for (int i = 0; i < 4 * rows; i++) sums[i / 4][i % 4] = TQKV__(set1)(0.0f);
    for (; apart && left >= run * TQKV__LANES; left -= run * TQKV__LANES) {
        TQKV__(ask_ahead)(format, false, block, keys);
        TQKV__(dot_run)(TQKV__RUN(format), format, rows, table, keys, &queries, sums);
        TQKV__(advance)(format, run, keys, &queries);
    }
    for (int count; left > 0; left -= count * TQKV__LANES) {
        const int room = run * TQKV__LANES;
        const bool whole = left >= room;
        count = any ? (left < room ? left : room) / TQKV__LANES : TQKV__(run_length)(format, left);
        TQKV__(ask_ahead)(format, false, block, keys);
        if (any ? grid || !whole : wide && packed && count > 2)
            TQKV__(dot_vectors)(format, rows, count, table, keys, &queries, sums);
        else if (whole && !apart && !(wide && packed))
            TQKV__(dot_run)(TQKV__RUN(format), format, rows, table, keys, &queries, sums);
        else
            TQKV__SHORTER(TQKV__(dot_run), format, rows, table, keys, &queries, sums);
        TQKV__(advance)(format, count, keys, &queries);
    }
}

/* Writes a vector of scores for each row: (+)= factors * sum_across(fours). */
TQKV__OP void TQKV__(store_scores)(const int rows, const TQKV__(block) * block, int first,
                                   float (*fours)[TQKV__LANES * TQKV__LANES / 4])
{
    const TQKV__VECTOR factors = TQKV__(load)(block->factors + first);
    TQKV__VECTOR before[TQKV__ROWS];
    float *to[TQKV__ROWS];
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) {
        to[r] = block->results + TQKV__(row_in)(block, r) * TQKV__TILE + first;
        before[r] = block->add ? TQKV__(load)(to[r]) : TQKV__(set1)(0.0f);
    }
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) TQKV__(store)(to[r], TQKV__(fma)(TQKV__(sum_across)(fours[r]), factors, before[r]));
}

/* scores[row][j] (+)= factors[j] * (q[row] . key j), four keys at a time. Each key is decoded once for all rows.
   Summing the lanes of four vectors costs little more than of one. Writes whole vectors. */
TQKV__OP void TQKV__(score)(const tqkv_format format, const int rows, const TQKV__(block) * block)
{
    TQKV__ALIGNED float fours[TQKV__ROWS][TQKV__LANES * TQKV__LANES / 4];
    const int n = block->n;
    const size_t stride = TQKV__(stride)(format, block);
    const uint8_t *codes = block->codes;
    TQKV__VECTOR table[8];
    TQKV__(load_codebook)(format, block->stream, table);
    for (int first = 0; first < n; first += TQKV__LANES) {
        for (int i = 0; i < TQKV__LANES; i += 4) {
            TQKV__VECTOR sums[TQKV__ROWS][4];
            TQKV__(keys) keys;
            keys.at = 0;
            keys.upper = block->upper;
            TQKV__UNROLL
            for (int m = 0; m < 4; m++) {
                keys.p[m] = codes;
                /* Past the end: the last key again; decoded rows are padded with copies of it. */
                codes += format == TQKV__FLOATS || first + i + m + 1 < n ? stride : 0;
            }
            TQKV__(dot_keys)(format, rows, block, table, &keys, sums);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++) TQKV__(store)(fours[r] + i / 4 * TQKV__LANES, TQKV__(sum_fours)(sums[r]));
        }
        TQKV__(store_scores)(rows, block, first, fours);
    }
}

/* sums[row][v] += weights[row] * vector k + v of the run of per_lane vectors at p; per_lane is a constant. Where vectors are
   looked up together, weights come after them: 16 registers cannot hold both. */
TQKV__OP void TQKV__(add_weighted)(const tqkv_format format, const int per_lane, const int rows, const int k,
                                   const int width, const TQKV__VECTOR *table, const uint8_t *p, const uint8_t *upper,
                                   const TQKV__(rows) * weights, TQKV__VECTOR (*sums)[8])
{
    TQKV__VECTOR weight[TQKV__ROWS], x[8];
    if (TQKV__(whole_runs)(format)) {
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
TQKV__OP void TQKV__(move_sums)(const bool store, const int rows, const int width, const TQKV__(block) * block,
                                TQKV__VECTOR (*sums)[8], float *out)
{
    TQKV__UNROLL
    for (int i = 0; i < rows * width; i++) { /* in this order gcc 12 keeps all of them in registers */
        const int r = store ? i % rows : i / width, v = store ? i / rows : i % width;
        float *at = out + TQKV__(row_in)(block, r) * block->result_stride + v * TQKV__LANES;
        if (store)
            TQKV__(store)(at, sums[r][v]);
        else
            sums[r][v] = TQKV__(load)(at);
    }
}

/* out[row] += sum_j weights[row][j] * value[j] for `width` vectors from vector k on of a run of per_lane vectors, whose
   sums are in registers over all positions; per_lane is a constant. p: of the run at the first position, out: of vector k */
TQKV__OP void TQKV__(accumulate_vectors)(const tqkv_format format, const int per_lane, const int rows, const int k,
                                         const int width, const TQKV__(block) * block, const TQKV__VECTOR *table,
                                         const uint8_t *p, const uint8_t *upper, float *out)
{
    const int n = block->n, size = TQKV__(run_bytes)(format, per_lane) + TQKV__(upper_bytes)(format, per_lane);
    const size_t stride = TQKV__(stride)(format, block);
    const ptrdiff_t ahead = block->ahead;
    TQKV__(rows) weights = TQKV__(open_rows)(rows, TQKV__TILE, block);
    TQKV__VECTOR sums[TQKV__ROWS][8];
    int j = 0;
    TQKV__(move_sums)(false, rows, width, block, sums, out);
    do { /* n > 0: a loop that may run no times costs copies of all sums */
        if (format != TQKV__FLOATS && k == 0) tqkv__prefetch(TQKV__NEAR(format), p + ahead, (size_t)size);
        TQKV__(add_weighted)(format, per_lane, rows, k, width, table, p, upper, &weights, sums);
        p += stride;
        upper += stride;
        weights.at++;
    } while (++j < n);
    TQKV__(move_sums)(true, rows, width, block, sums, out);
}

/* The same for all vectors of a whole run, as many at a time as registers hold. */
TQKV__OP void TQKV__(accumulate_run)(const tqkv_format format, const int rows, const TQKV__(block) * block,
                                     const TQKV__VECTOR *table, const uint8_t *p, const uint8_t *upper, float *out)
{
    const int per_lane = TQKV__RUN(format), most = TQKV__SUMS / rows, width = most < per_lane ? most : per_lane;
    TQKV__UNROLL
    for (int k = 0; k < per_lane; k += width, out += width * TQKV__LANES)
        TQKV__(accumulate_vectors)(format, per_lane, rows, k, width, block, table, p, upper, out);
}

/* The same for a run of per_lane vectors, 4 or 2, or 0 for none, and `behind` vectors behind it: in one pass, because the sums of
   few vectors would wait for each other. `behind` is 0, 1 or, after a run of 4, 2, and a constant but there: tests in the loop
   cost up to 0.1 of attention's time at head_dim 48. */
TQKV__OP void TQKV__(accumulate_rest)(const tqkv_format format, const int per_lane, const int behind, const int rows,
                                      const TQKV__(block) * block, const TQKV__VECTOR *table, const uint8_t *p,
                                      const uint8_t *upper, float *out)
{
    const int n = block->n, asked = per_lane > 2 ? per_lane + 1 : 3;
    const int bytes = TQKV__(run_bytes)(format, per_lane), upper_bytes = TQKV__(upper_bytes)(format, per_lane);
    const bool pair = per_lane == 4 && 6 * rows <= TQKV__SUMS && behind == 2;
    const size_t stride = TQKV__(stride)(format, block);
    const size_t size = (size_t)(TQKV__(run_bytes)(format, asked) + TQKV__(upper_bytes)(format, asked));
    const ptrdiff_t ahead = block->ahead;
    TQKV__(rows) weights = TQKV__(open_rows)(rows, TQKV__TILE, block);
    TQKV__VECTOR sums[TQKV__ROWS][8], more[TQKV__ROWS][8];
    float *last = out + per_lane * TQKV__LANES;
    int j = 0;
    if (per_lane) TQKV__(move_sums)(false, rows, per_lane, block, sums, out);
    if (behind && !pair) TQKV__(move_sums)(false, rows, 1, block, more, last);
    if (pair) TQKV__(move_sums)(false, rows, 2, block, more, last);
    do {
        if (format != TQKV__FLOATS) tqkv__prefetch(TQKV__NEAR(format), p + ahead, size);
        if (per_lane) TQKV__(add_weighted)(format, per_lane, rows, 0, per_lane, table, p, upper, &weights, sums);
        if (behind) {
            if (pair)
                TQKV__(add_weighted)(format, 2, rows, 0, 2, table, p + bytes, upper + upper_bytes, &weights, more);
            else
                TQKV__(add_weighted)(format, 1, rows, 0, 1, table, p + bytes, upper + upper_bytes, &weights, more);
        }
        p += stride;
        upper += stride;
        weights.at++;
    } while (++j < n);
    if (per_lane) TQKV__(move_sums)(true, rows, per_lane, block, sums, out);
    if (behind && !pair) TQKV__(move_sums)(true, rows, 1, block, more, last);
    if (pair) TQKV__(move_sums)(true, rows, 2, block, more, last);
}

/* out[row] += sum_j weights[row][j] * value[j], for the whole runs of a block */
TQKV__OP void TQKV__(accumulate)(const tqkv_format format, const int rows, const TQKV__(block) * block)
{
    const int run = TQKV__RUN(format);
    const uint8_t *p = block->codes, *upper = block->codes + block->upper;
    float *out = block->results;
    TQKV__VECTOR table[8];
    TQKV__(load_codebook)(format, block->stream, table);
    for (int left = block->dim / TQKV__LANES; left >= run; left -= run, out += run * TQKV__LANES) {
        TQKV__(accumulate_run)(format, rows, block, table, p, upper, out);
        p += TQKV__(run_bytes)(format, run);
        upper += TQKV__(upper_bytes)(format, run);
    }
}

/* The same for what is behind them. A function of its own: in one with whole runs gcc 12 spills a sum of four rows. */
TQKV__OP void TQKV__(add_rest)(const tqkv_format format, const int rows, const TQKV__(block) * block)
{
    const int run = TQKV__RUN(format), vectors = block->dim / TQKV__LANES, whole = vectors / run * run;
    const bool wide = TQKV__LANES == 16;
    const uint8_t *p = block->codes + TQKV__(run_bytes)(format, whole);
    const uint8_t *upper = block->codes + block->upper + TQKV__(upper_bytes)(format, whole);
    float *out = block->results + whole * TQKV__LANES;
    TQKV__VECTOR table[8];
    TQKV__(load_codebook)(format, block->stream, table);
    for (int left = vectors - whole, count; left > 0; left -= count, out += count * TQKV__LANES) {
        const int behind = wide && left < 7 && left * rows <= TQKV__SUMS ? left - 4 : 0; /* a run of 4 */
        count = run > 4 && left >= 4 ? 4 + behind : left;
        if (run > 4 && left >= 4) {
            TQKV__(accumulate_rest)(format, 4, behind, rows, block, table, p, upper, out);
        } else if (run * TQKV__LANES > 16) {
            if (wide && left == 1)
                TQKV__(accumulate_rest)(format, 0, 1, rows, block, table, p, upper, out);
            else if (wide && left == 3)
                TQKV__(accumulate_rest)(format, 2, 1, rows, block, table, p, upper, out);
            else
                TQKV__(accumulate_rest)(format, 2, 0, rows, block, table, p, upper, out);
        }
        p += TQKV__(run_bytes)(format, count);
        upper += TQKV__(upper_bytes)(format, count);
    }
}

/* As decode, for a codebook too large for table instructions: loads eight codes, stores a vector of centroids. */
TQKV__OP void TQKV__(decode_by_loads)(const TQKV__(block) * block, int n, float *x)
{
    const float *codebook = block->stream->codebook;
    for (int j = 0; j < n; j++, x += TQKV__X_STRIDE(block->dim)) {
        const uint8_t *codes = block->codes + (size_t)j * block->stride;
        for (int d = 0; d < block->dim; d += TQKV__LANES) {
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

TQKV__OP void TQKV__(decode_rows)(const tqkv_format format, const TQKV__(block) * block, int n, float *x)
{
    if (TQKV__BOOK_BITS(format) == 8 && !TQKV__DIRECT(format))
        TQKV__(decode_by_loads)(block, n, x);
    else
        TQKV__(decode)(format, block, n, x);
}

/* By the columns of a row: what is left out here is not inlined to be thrown away. */
#define TQKV__ROW_LOOPS(unused, format, name, kind, main, upper, book, plain)                                          \
    TQKV__TARGET static void TQKV__(score_##format)(const TQKV__(block) * block, int rows)                             \
    {                                                                                                                  \
        if (TQKV__HAS_LOOPS(kind, main, book)) TQKV__BY_ROWS(score, format, TQKV__KEY_ROWS(kind, book));               \
    }                                                                                                                  \
    TQKV__TARGET static void TQKV__(accumulate_##format)(const TQKV__(block) * block, int rows)                        \
    {                                                                                                                  \
        if (TQKV__HAS_LOOPS(kind, main, book)) TQKV__BY_ROWS(accumulate, format, TQKV__VALUE_ROWS(kind, book));        \
    }                                                                                                                  \
    TQKV__TARGET static void TQKV__(rest_##format)(const TQKV__(block) * block, int rows)                              \
    {                                                                                                                  \
        if (TQKV__HAS_LOOPS(kind, main, book)) TQKV__BY_ROWS(add_rest, format, TQKV__VALUE_ROWS(kind, book));          \
    }
#define TQKV__DECODE_LOOP(unused, format, ...)                                                                         \
    TQKV__TARGET static void TQKV__(decode_##format)(const TQKV__(block) * block, int n, float *x)                     \
    {                                                                                                                  \
        TQKV__(decode_rows)(format, block, n, x);                                                                      \
    }
TQKV__FORMATS(TQKV__DECODE_LOOP, )
TQKV__FORMATS(TQKV__ROW_LOOPS, )
TQKV__ROW_LOOPS(, TQKV__FLOATS, , 0, 32, 0, 0, 0)

#define TQKV__LOOPS_OF(unused, format, ...)                                                                            \
    {TQKV__(decode_##format), TQKV__(score_##format), TQKV__(accumulate_##format), TQKV__(rest_##format)},
static const TQKV__(loops) TQKV__(loops_by_format)[] = {
    {NULL, TQKV__(score_TQKV__FLOATS), TQKV__(accumulate_TQKV__FLOATS), TQKV__(rest_TQKV__FLOATS)},
    TQKV__FORMATS(TQKV__LOOPS_OF, )};

/* Runs the loop over all rows of a block, at most `most` at a time. Three take the loop for four, with one row twice: as two
   and one they would decode everything twice. */
static void TQKV__(by_rows)(TQKV__(block) * block, int n_rows, int most, void (*loop)(const TQKV__(block) *, int rows))
{
    const float *rows = block->rows;
    float *results = block->results;
    for (int left = n_rows; left > 0; left -= block->n_rows) {
        block->n_rows = left >= most ? most : left == 3 ? 3 : left >= 2 ? 2 : 1;
        loop(block, block->n_rows == 3 ? most : block->n_rows);
        block->rows += block->n_rows * block->row_stride;
        block->results += block->n_rows * block->result_stride;
    }
    block->rows = rows;
    block->results = results;
}

/* Adds the values of a block, of that format, to all rows. */
static void TQKV__(add_values)(tqkv_format format, TQKV__(block) * block, int n_rows, int most)
{
    const TQKV__(loops) *loops = &TQKV__(loops_by_format)[format];
    const int run = TQKV__RUN(format) * TQKV__LANES;
    if (block->dim >= run) TQKV__(by_rows)(block, n_rows, most, loops->accumulate);
    if (block->dim % run) TQKV__(by_rows)(block, n_rows, most, loops->add_rest);
}

/* Attends from decoded positions. Few at a time stay in the L1 cache, and each is decoded once. */
TQKV__TARGET static void TQKV__(attend_decoded)(TQKV__(block) * block, int n_rows, bool keys)
{
    TQKV__ALIGNED float x[32 * TQKV__X_STRIDE(128)]; /* 18 KiB of stack */
    const int stretch = block->dim <= 128 ? 32 : 16;
    const TQKV__(loops) *loops = &TQKV__(loops_by_format)[block->stream->format];
    const int n = block->n;
    for (int j = 0; j < n; j += stretch) {
        const uint8_t *codes = block->codes;
        block->n = n - j < stretch ? n - j : stretch;
        tqkv__prefetch(TQKV__L2, codes + block->ahead, (size_t)block->n * block->stride);
        loops->decode(block, block->n, x);
        for (int i = block->n; i % TQKV__LANES; i++)
            memcpy(x + i * TQKV__X_STRIDE(block->dim), x + (i - 1) * TQKV__X_STRIDE(block->dim),
                   (size_t)block->dim * sizeof(float));
        block->codes = (const uint8_t *)(const void *)x;
        if (keys)
            TQKV__(by_rows)(block, n_rows, TQKV__DECODED_SCORE_ROWS, TQKV__(score_TQKV__FLOATS));
        else
            TQKV__(add_values)(TQKV__FLOATS, block, n_rows, TQKV__ROWS);
        block->codes = codes + (size_t)stretch * block->stride;
        block->rows += keys ? 0 : stretch;
        block->results += keys ? stretch : 0;
        if (keys) block->factors += stretch; /* NULL for values */
    }
}

/* Few rows work straight from the codes; with a codebook only while no code is looked up twice. 32 wide registers hold
   four rows of multiply-adds and the look-ups of up to 5 bits: there any number of rows of values works so, but at most eight
   where codes are joined from two fields (Zen 5: 12 rows of TQ3 and TQ5 take 0.92 times as long decoded, 64 rows 0.85). */
TQKV__TARGET static void TQKV__(attend_block)(TQKV__(block) * block, int n_rows, bool keys)
{
    const tqkv__stream *s = block->stream;
    const TQKV__(loops) *loops = &TQKV__(loops_by_format)[s->format];
    const bool any = !keys && TQKV__LANES == 16 && s->book_bits < 6 && (!s->upper_bits || n_rows <= 8);
    const int most = keys ? TQKV__KEY_ROWS(s->kind, s->book_bits) : TQKV__VALUE_ROWS(s->kind, s->book_bits);
    if (!TQKV__DIRECT(s->format) || (n_rows > (s->kind == TQKV__BOOK ? most : TQKV__ROWS) && !any))
        TQKV__(attend_decoded)(block, n_rows, keys);
    else if (keys)
        TQKV__(by_rows)(block, n_rows, most, loops->score);
    else
        TQKV__(add_values)(s->format, block, n_rows, most);
}

/* Opens the block of values from `before` on for the run. */
static void TQKV__(open_block)(const tqkv__stream *s, int kv_head, const tqkv__run *run, int before,
                               TQKV__(block) * block)
{
    const size_t main = (size_t)(before * s->main_bits / 8), upper = (size_t)(before * s->upper_bits / 8);
    const size_t main_field = (size_t)(s->head_dim * s->main_bits) / 8;
    block->stream = s;
    block->codes = tqkv__codes_at(s, kv_head, run->slot) + main;
    block->upper = s->upper_bits ? main_field + upper - main : 0;
    block->stride = s->row_bytes;
    block->ahead = (ptrdiff_t)run->ahead * (ptrdiff_t)s->row_bytes;
    block->first = before == 0;
    block->n = run->n;
    block->dim = s->block_dim;
    block->factors = NULL;
    block->add = false;
}

TQKV__TARGET static void TQKV__(score_tile)(const tqkv__stream *s, int kv_head, const tqkv__run *run, const float *q,
                                            int n_rows, bool add, float *scores)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    /* Rotation makes products unequal, and of more sums each is smaller. */
    const int most = s->rotated || TQKV__LANES == 16 ? s->block_dim : TQKV__MOST_ADDITIONS * TQKV__LANES;
    TQKV__(block) block;
    const float *of_block = factors;
    int left = s->block_dim; /* of a block */
    TQKV__(factors)(s, tqkv__norms_at(s, kv_head, run->slot), run, true, factors);
    for (int d = 0; d < s->head_dim; d += block.dim) {
        TQKV__(open_block)(s, kv_head, run, d, &block);
        block.dim = left < most ? left : most;
        block.rows = q + d;
        block.row_stride = s->head_dim;
        block.results = scores;
        block.result_stride = TQKV__TILE;
        block.factors = of_block;
        block.add = add || d > 0;
        TQKV__(attend_block)(&block, n_rows, true);
        left -= block.dim;
        if (left) continue;
        left = s->block_dim;
        of_block += TQKV__TILE;
    }
}

/* weights, scaled: [n_rows][TQKV__TILE], factors: [TQKV__TILE] */
TQKV__OP void TQKV__(scale_weights)(const float *weights, int n_rows, const float *factors, float *scaled)
{
    for (int row = 0; row < n_rows; row++, weights += TQKV__TILE, scaled += TQKV__TILE)
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES)
            TQKV__(store)(scaled + j, TQKV__(mul_nonzero)(TQKV__(load)(weights + j), TQKV__(load)(factors + j)));
}

TQKV__TARGET static void TQKV__(value_tile)(const tqkv__stream *s, int kv_head, const tqkv__run *run,
                                            const float *weights, int n_rows, float *scaled, float *out)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    TQKV__(block) block;
    const float *norms = tqkv__norms_at(s, kv_head, run->slot);
    const float *of_block = factors;
    if (norms) TQKV__(factors)(s, norms, run, false, factors);
    for (int d = 0; d < s->head_dim; d += s->block_dim, of_block += TQKV__TILE) {
        if (norms) TQKV__(scale_weights)(weights, n_rows, of_block, scaled);
        TQKV__(open_block)(s, kv_head, run, d, &block);
        block.rows = norms ? scaled : weights;
        block.row_stride = TQKV__TILE;
        block.results = out + d;
        block.result_stride = s->head_dim;
        TQKV__(attend_block)(&block, n_rows, false);
    }
}

/* >>encode-kernels: encoding by vectors. The sums and their order are those of >>codec, and so are the bytes. */

/* Butterflies (a, b) -> (a + b, a - b) between vectors 1, 2, 4 .. count/2 apart; count is a constant. */
TQKV__OP void TQKV__(butterflies)(const int count, TQKV__VECTOR *x)
{
    TQKV__UNROLL
    for (int stage = 0; stage < 4; stage++) {
        if (1 << stage >= count) continue;
        TQKV__UNROLL
        for (int i = 0; i < count / 2; i++) {
            const int low = (i >> stage << (stage + 1)) + (i & ((1 << stage) - 1)), high = low + (1 << stage);
            const TQKV__VECTOR a = x[low], b = x[high];
            x[low] = a + b;
            x[high] = a - b;
        }
    }
}

/* count vectors from value i on; count is a constant. */
TQKV__OP void TQKV__(load_vectors)(const int count, tqkv_type type, const void *in, int i, TQKV__VECTOR *x)
{
    if (type == TQKV_TYPE_F16) {
        TQKV__UNROLL
        for (int v = 0; v < count; v++) x[v] = TQKV__(load_as)(TQKV_TYPE_F16, in, i + v * TQKV__LANES);
    } else if (type == TQKV_TYPE_BF16) {
        TQKV__UNROLL
        for (int v = 0; v < count; v++) x[v] = TQKV__(load_as)(TQKV_TYPE_BF16, in, i + v * TQKV__LANES);
    } else {
        TQKV__UNROLL
        for (int v = 0; v < count; v++) x[v] = TQKV__(load_as)(TQKV_TYPE_F32, in, i + v * TQKV__LANES);
    }
}

/* Flips signs if asked, then runs the stages below `length`, at most count * LANES, on count vectors in registers. count
   and length are constants. in, of the type: [head_dim], out: [head_dim] */
TQKV__OP void TQKV__(hadamard_runs)(const int count, const int length, tqkv_type type, const void *in, int head_dim,
                                    bool flip, float *out)
{
    const TQKV__VECTOR factor = TQKV__(set1)(count * TQKV__LANES == head_dim ? TQKV__INV_SQRT(head_dim) : 1.0f);
    for (int run = 0; run < head_dim; run += count * TQKV__LANES) {
        TQKV__VECTOR x[16];
        TQKV__(load_vectors)(count, type, in, run, x);
        if (flip) {
            TQKV__UNROLL
            for (int i = 0; i < count; i++) x[i] = TQKV__(flip)(x[i], run + i * TQKV__LANES);
        }
        TQKV__UNROLL
        for (int stage = 0; stage < 4; stage++)
            if (1 << stage < TQKV__LANES && 1 << stage < length) {
                TQKV__UNROLL
                for (int i = 0; i < count; i++) x[i] = TQKV__(butterfly)(stage, x[i]);
            }
        TQKV__(butterflies)(count, x);
        TQKV__UNROLL
        for (int i = 0; i < count; i++) TQKV__(store)(out + run + i * TQKV__LANES, x[i] * factor);
    }
}

/* Stages h to h * count / 2, in place; count is a constant. */
TQKV__OP void TQKV__(hadamard_across)(const int count, int h, int head_dim, float *x)
{
    const TQKV__VECTOR factor = TQKV__(set1)(h * count == head_dim ? tqkv__size_of(head_dim)->inverse_root : 1.0f);
    for (int run = 0; run < head_dim; run += h * count)
        for (int j = run; j < run + h; j += TQKV__LANES) {
            TQKV__VECTOR v[4];
            TQKV__UNROLL
            for (int i = 0; i < count; i++) v[i] = TQKV__(load)(x + j + i * h);
            TQKV__(butterflies)(count, v);
            TQKV__UNROLL
            for (int i = 0; i < count; i++) TQKV__(store)(x + j + i * h, v[i] * factor);
        }
}

/* A column of the matrix as floats, +-1; signs: [m] and room for whole vectors */
TQKV__OP void TQKV__(matrix_column)(int m, int column, float *signs)
{
    uint64_t bits = 0;
    for (int i = 0; i < m; i += 8) bits |= (uint64_t)tqkv__matrix_row(m, column)[i / 8] << i; /* symmetric */
    for (int row = 0; row < m; row += TQKV__LANES, bits >>= TQKV__LANES)
        TQKV__(store)(signs + row, TQKV__(signs)((uint32_t)bits));
}

/* Between columns of signs: three vectors of 16 hold one of 36 */
#define TQKV__COLUMN 48

/* out[b] = sum over c of P[b][c] * x[c] in order, times factor, for `at_once` runs b that share a vector: lane
   at_once * a + i is element a of run b + i. x: m vectors, x_stride floats apart; their lanes have each element at_once
   times. The product with 1 or -1 is exact. count vectors of sums at a time, in registers; m, at_once and count are
   constants. signs: [m][TQKV__COLUMN], out: [m][n] */
TQKV__OP void TQKV__(mix_runs)(const int m, const int at_once, const int count, const float *x, int x_stride,
                               const float *signs, float factor, int n, float *out)
{
    for (int b = 0; b < m; b += count * at_once) {
        const float *sign = signs + b;
        TQKV__VECTOR sums[9];
        TQKV__UNROLL
        for (int i = 0; i < count; i++) sums[i] = TQKV__(load)(x) * TQKV__(repeat)(at_once, sign + i * at_once);
        for (int c = 1; c < m; c++) {
            const TQKV__VECTOR run = TQKV__(load)(x + c * x_stride);
            sign += TQKV__COLUMN;
            TQKV__UNROLL
            for (int i = 0; i < count; i++)
                sums[i] = TQKV__(fma)(run, TQKV__(repeat)(at_once, sign + i * at_once), sums[i]);
        }
        TQKV__UNROLL
        for (int i = 0; i < count; i++) TQKV__(store)
        (out + (b + i * at_once) * n, TQKV__(unite)(at_once, sums[i]) * TQKV__(set1)(factor));
    }
}

/* The matrix of order m across the runs. runs: [m][n], out: [m * n], elsewhere; at_once is LANES / n, or 1 */
TQKV__OP void TQKV__(mix)(const int m, const int at_once, const float *runs, float factor, int n, float *out)
{
    const int count = m > 12 ? m / 4 : 6;
    TQKV__ALIGNED float signs[36 * TQKV__COLUMN], spread[36 * TQKV__LANES];
    for (int c = 0; c < m; c++) TQKV__(matrix_column)(m, c, signs + c * TQKV__COLUMN);
    if (at_once == 1) {
        for (int a = 0; a < n; a += TQKV__LANES) TQKV__(mix_runs)(m, 1, count, runs + a, n, signs, factor, n, out + a);
        return;
    }
    for (int c = 0; c < m; c++) TQKV__(store)
    (spread + c * TQKV__LANES, TQKV__(spread)(at_once, c % at_once, TQKV__(load)(runs + c / at_once * TQKV__LANES)));
    TQKV__(mix_runs)(m, at_once, count, spread, TQKV__LANES, signs, factor, n, out);
}

/* The same for the matrix of order 12, whose signs the compiler knows: no loads of them. Every second sum is made of
   multiply-adds: a Zen 4 core does them beside additions. `rounded` hides that they multiply by 1. NEON has no other:
   clang 14 would reorder sums there with -fassociative-math. */
TQKV__OP void TQKV__(mix_12)(const float *runs, float factor, int n, float *out)
{
    const TQKV__VECTOR plus = TQKV__(rounded)(TQKV__(set1)(1.0f)), minus = TQKV__(rounded)(TQKV__(set1)(-1.0f));
    for (int a = 0; a < n; a += TQKV__LANES) {
        TQKV__VECTOR sums[12];
        TQKV__UNROLL
        for (int c = 0; c < 12; c++) {
            const TQKV__VECTOR x = TQKV__(load)(runs + c * n + a);
            TQKV__UNROLL
            for (int b = 0; b < 12; b++) {
                const bool subtract = (tqkv__tables.hadamard_12[b][c / 8] >> (c % 8)) & 1;
                if (c == 0)
                    sums[b] = x * (subtract ? minus : plus);
                else if (b % 2 || TQKV__LANES == 4)
                    sums[b] = TQKV__(fma)(x, subtract ? minus : plus, sums[b]);
                else if (subtract)
                    sums[b] -= x;
                else
                    sums[b] += x;
            }
        }
        TQKV__UNROLL
        for (int b = 0; b < 12; b++) TQKV__(store)(out + b * n + a, sums[b] * TQKV__(set1)(factor));
    }
}

#define TQKV__MIX(m, at_once)                                                                                          \
    case m:                                                                                                            \
        TQKV__(mix)(m, at_once, runs, factor, n, out);                                                                 \
        break;

/* n below LANES is 4 of 8 lanes: other sets leave shorter runs to AVX2, or have none. */
TQKV__TARGET static TQKV__NOINLINE void TQKV__(mix_by_order)(int m, const float *runs, float factor, int n, float *out)
{
    if (m == 12 && n >= TQKV__LANES)
        TQKV__(mix_12)(runs, factor, n, out);
    else if (n >= TQKV__LANES)
        switch (m) {
            TQKV__MIX(20, 1)
            TQKV__MIX(28, 1)
            TQKV__MIX(36, 1)
        }
    else if (m == 20)
        TQKV__(mix_20)(runs, factor, out);
    else if (TQKV__LANES == 8)
        switch (m) {
            TQKV__MIX(12, 2)
            TQKV__MIX(28, 2)
            TQKV__MIX(36, 2)
        }
}

/* As hadamard for head_dim = m * n, m > 1: H over the runs, then the matrix across them */
TQKV__TARGET static TQKV__NOINLINE void TQKV__(rotate_runs)(tqkv_type type, const void *in, int head_dim, bool flip,
                                                            float *out)
{
    TQKV__ALIGNED float runs[TQKV_MAX_HEAD_DIM];
    const tqkv__size *size = tqkv__size_of(head_dim);
    const int m = size->order, n = size->run; /* n: 4 to 64 */
    const float factor = size->inverse_root;
    if (n == 4 && TQKV__LANES > 4)
        TQKV__(hadamard_runs)(1, 4, type, in, head_dim, flip, runs);
    else if (n == 8 && TQKV__LANES > 8)
        TQKV__(hadamard_runs)(1, 8, type, in, head_dim, flip, runs);
    else if (n == TQKV__LANES)
        TQKV__(hadamard_runs)(1, TQKV__LANES, type, in, head_dim, flip, runs);
    else if (n == 2 * TQKV__LANES)
        TQKV__(hadamard_runs)(2, 2 * TQKV__LANES, type, in, head_dim, flip, runs);
    else if (n == 4 * TQKV__LANES)
        TQKV__(hadamard_runs)(4, 4 * TQKV__LANES, type, in, head_dim, flip, runs);
    else if (n == 8 * TQKV__LANES && TQKV__LANES < 16)
        TQKV__(hadamard_runs)(8, 8 * TQKV__LANES, type, in, head_dim, flip, runs);
    else if (TQKV__LANES < 8)
        TQKV__(hadamard_runs)(16, 16 * TQKV__LANES, type, in, head_dim, flip, runs);
    if (n < TQKV__LANES && TQKV__LANES == 16) /* a run of 8 fills the other set's vectors */
        TQKV__MIX_SHORT_RUNS(m, runs, factor, n, out);
    else
        TQKV__(mix_by_order)(m, runs, factor, n, out);
}
#undef TQKV__MIX
#undef TQKV__COLUMN

/* out = R(in)/sqrt(D), after flipping signs if asked; floats in and out may be the same. */
TQKV__TARGET static void TQKV__(hadamard)(tqkv_type type, const void *in, int head_dim, bool flip, float *out)
{
    int h = head_dim < TQKV__LANES * TQKV__WIDTH ? head_dim : TQKV__LANES * TQKV__WIDTH;
    if (TQKV__HAS_MATRIX(head_dim)) {
        TQKV__(rotate_runs)(type, in, head_dim, flip, out);
        return;
    }
    if (h == 4 * TQKV__LANES)
        TQKV__(hadamard_runs)(4, 4 * TQKV__LANES, type, in, head_dim, flip, out);
    else if (h == 8 * TQKV__LANES && TQKV__WIDTH > 8)
        TQKV__(hadamard_runs)(8, 8 * TQKV__LANES, type, in, head_dim, flip, out);
    else
        TQKV__(hadamard_runs)(TQKV__WIDTH, TQKV__WIDTH * TQKV__LANES, type, in, head_dim, flip, out);
    for (; h * 4 <= head_dim; h *= 4) TQKV__(hadamard_across)(4, h, head_dim, out);
    if (h < head_dim) TQKV__(hadamard_across)(2, h, head_dim, out);
}

TQKV__TARGET static void TQKV__(rotate)(float *x, int head_dim)
{
    TQKV__(hadamard)(TQKV_TYPE_F32, x, head_dim, true, x);
}

TQKV__TARGET static void TQKV__(unrotate)(float *y, int head_dim)
{
    TQKV__(hadamard)(TQKV_TYPE_F32, y, head_dim, false, y);
    for (int d = 0; d < head_dim; d += TQKV__LANES) TQKV__(store)(y + d, TQKV__(flip)(TQKV__(load)(y + d), d));
}

/* Byte e of word i: a code. Lane i of x[e]: the square of its centroid. bits is a constant, and at least those of the
   codebook. Codebooks are symmetric: codes below the middle find their mirror images above it. */
TQKV__OP void TQKV__(squares)(const int bits, const tqkv__quantiser *q, TQKV__VECTOR words, TQKV__VECTOR *x)
{
    TQKV__(words) codes;
    TQKV__VECTOR table[32 / TQKV__LANES];
    memcpy(&codes, &words, sizeof codes);
    const TQKV__(words) upper = codes & q->half, index = (codes & q->low) ^ q->low ^ (upper - (upper >> q->shift));
    const bool all = bits == 4 && TQKV__LANES == 16; /* 16 centroids in a register */
    TQKV__UNROLL
    for (int i = 0; i < 32 / TQKV__LANES; i++)
        table[i] = TQKV__(load)((all ? q->squares_by_code : q->squares) + (all ? 0 : i * TQKV__LANES));
    TQKV__UNROLL
    for (int e = 0; e < 4; e++) {
        const TQKV__(words) at = (all ? codes : index) >> (8 * e);
        TQKV__(codes) entry;
        memcpy(&entry, &at, sizeof entry);
        x[e] = TQKV__(bound)(bits, table, entry);
    }
}

/* Transposes count * count squares of `count` vectors; count is a constant. */
TQKV__OP void TQKV__(transpose)(const int count, TQKV__VECTOR *x)
{
    TQKV__UNROLL
    for (int stage = 0; stage < 4; stage++)
        if (1 << stage < count) {
            TQKV__UNROLL
            for (int i = 0; i < count / 2; i++) {
                const int low = (i >> stage << (stage + 1)) + (i & ((1 << stage) - 1)), high = low + (1 << stage);
                const TQKV__VECTOR a = x[low], b = x[high];
                x[low] = TQKV__(even)(stage, a, b);
                x[high] = TQKV__(odd)(stage, a, b);
            }
        }
}

/* The words of LANES lanes, each of per_lane neighbours: x[e] has the e-th of each. If per_lane < LANES, bit j of a lane's
   number moves to bit (j + log2(per_lane)) modulo log2(LANES) of its place. Only per_lane words from the first of count,
   a constant: the smaller of per_lane and LANES. */
TQKV__OP void TQKV__(load_lanes)(const int count, int per_lane, const uint8_t *words, TQKV__VECTOR *x)
{
    const int stride = per_lane < TQKV__LANES ? TQKV__LANES : per_lane;
    TQKV__UNROLL
    for (int i = 0; i < count; i++, words += 4 * stride) memcpy(&x[i], words, sizeof x[i]);
    TQKV__(transpose)(count, x);
}

/* Sums of squares of LANES lanes, each over its per_lane floats in order; most: a constant, per_lane or LANES */
TQKV__OP TQKV__VECTOR TQKV__(lane_sums)(const int most, int per_lane, const uint8_t *floats)
{
    const int count = most < TQKV__LANES ? most : TQKV__LANES;
    TQKV__VECTOR sum = TQKV__(set1)(0.0f);
    for (int part = 0; part < per_lane; part += count) {
        TQKV__VECTOR x[16];
        TQKV__(load_lanes)(count, per_lane, floats + 4 * part, x);
        TQKV__UNROLL
        for (int i = 0; i < count; i++) sum += TQKV__(rounded)(x[i] * x[i]);
    }
    return sum;
}

/* Adds lanes by the xor-tree of tqkv__sums_tq up to those that share a norm. x: the sums of n_lanes lanes of per_lane
   words each, in the places of load_lanes; sums: one a norm. All numbers are constants. */
TQKV__OP void TQKV__(add_lanes)(const int n_lanes, const int per_lane, const int n_norms, TQKV__VECTOR *x, float *sums)
{
    const int width = per_lane < TQKV__LANES ? per_lane : TQKV__LANES, vectors = n_lanes / TQKV__LANES;
    TQKV__ALIGNED float lanes[32];
    TQKV__UNROLL
    for (int bit = 0; bit < 4; bit++)
        if (1 << bit < TQKV__LANES && 1 << bit < n_lanes / n_norms) {
            const int place = (1 << bit) * width, distance = place < TQKV__LANES ? place : place / TQKV__LANES;
            TQKV__UNROLL
            for (int i = 0; i < vectors; i++) x[i] += TQKV__(swap)(distance, x[i]);
        }
    TQKV__UNROLL
    for (int step = 1; step < 8; step++) {
        if ((step & (step - 1)) || step >= vectors || step * TQKV__LANES >= n_lanes / n_norms) continue;
        TQKV__UNROLL
        for (int i = 0; i < vectors; i++)
            if (!(i & step)) x[i] = x[i | step] = x[i] + x[i | step];
    }
    sums[0] = TQKV__(first_lane)(x[0]);
    if (n_norms == 1) return;
    TQKV__UNROLL
    for (int i = 0; i < vectors; i++) TQKV__(store)(lanes + i * TQKV__LANES, x[i]);
    TQKV__UNROLL
    for (int b = 1; b < n_norms; b++) {
        const int lane = n_lanes / n_norms * b, place = lane % TQKV__LANES * width;
        sums[b] = lanes[lane / TQKV__LANES * TQKV__LANES + place % TQKV__LANES + place / TQKV__LANES];
    }
}

/* Sums of lanes of any length, in the lanes' own order; squared: x holds the squares. Reads up to three floats behind the
   last lane. */
TQKV__OP TQKV__VECTOR TQKV__(sums_of_lanes)(bool squared, const float *x, int per_lane)
{
    TQKV__VECTOR sum = TQKV__(set1)(0.0f);
    for (int e = 0; e < per_lane; e += 4) {
        TQKV__VECTOR four[4];
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) four[i] = TQKV__(load_fours)(x + i * per_lane + e, 4 * per_lane);
        TQKV__(transpose)(4, four);
        TQKV__UNROLL
        for (int i = 0; i < 4; i++)
            if (e + i < per_lane) sum += squared ? four[i] : TQKV__(rounded)(four[i] * four[i]);
    }
    return sum;
}

/* The sum of squares of a row of head_dim that is no power of two; three more floats are readable behind x. */
TQKV__TARGET static TQKV__NOINLINE void TQKV__(sum_of_row)(bool squared, const float *x, int head_dim, float *sum)
{
    const int n = TQKV__NORM_LANES(head_dim), per_lane = head_dim / n;
    TQKV__VECTOR sums[32 / TQKV__LANES];
    for (int i = 0; i < n; i += TQKV__LANES)
        sums[i / TQKV__LANES] = TQKV__(sums_of_lanes)(squared, x + i * per_lane, per_lane);
    if (n == 16)
        TQKV__(add_lanes)(16, TQKV__LANES, 1, sums, sum);
    else
        TQKV__(add_lanes)(32, TQKV__LANES, 1, sums, sum);
}

/* Calls step(head_dim, norms of a row of BOOK) with the constants of s. */
#define TQKV__BY_HEAD_DIM(step)                                                                                        \
    switch (s->head_dim) {                                                                                             \
        step(32, 1) step(64, 1) step(128, 1) step(256, 1) step(512, 2) step(1024, 4)                                   \
    }

/* Sums of squares of one row, one for each norm; sums: [norms_per_row]. If head_dim is no power of two, three more floats
   are readable behind y. */
TQKV__TARGET static void TQKV__(sums_tq)(const tqkv__stream *s, const float *y, float *sums)
{
    const uint8_t *bytes = (const uint8_t *)(const void *)y;
    const int per_lane = s->head_dim / 32;
    TQKV__VECTOR x[32 / TQKV__LANES];
    if (TQKV__HAS_MATRIX(s->head_dim)) {
        TQKV__(sum_of_row)(false, y, s->head_dim, sums);
        return;
    }
    if (per_lane >= TQKV__LANES)
        for (int i = 0; i < 32 / TQKV__LANES; i++) {
            const uint8_t *at = bytes + 4 * i * TQKV__LANES * per_lane;
            if (per_lane == TQKV__LANES) /* with constant offsets */
                x[i] = TQKV__(lane_sums)(TQKV__LANES, TQKV__LANES, at);
            else
                x[i] = TQKV__(lane_sums)(TQKV__LANES, per_lane, at);
        }
#define TQKV__SUM_FLOATS(D, n)                                                                                         \
    case D:                                                                                                            \
        TQKV__UNROLL                                                                                                   \
        for (int i = 0; i < 32 / TQKV__LANES; i++)                                                                     \
            if ((D) < 32 * TQKV__LANES)                                                                                \
                x[i] = TQKV__(lane_sums)((D) / 32, (D) / 32, bytes + i * TQKV__LANES * ((D) / 8));                     \
        TQKV__(add_lanes)(32, (D) / 32, n, x, sums);                                                                   \
        break;
    TQKV__BY_HEAD_DIM(TQKV__SUM_FLOATS)
#undef TQKV__SUM_FLOATS
}

/* Four codes to a word: lanes of one word up to D=128, fewer than 32 below. */
#define TQKV__WORD_LANES(D) ((D) < 128 ? (D) / 4 : 32)
#define TQKV__LANE_WORDS(D) ((D) / 4 / TQKV__WORD_LANES(D))

/* Brings `words` words of each lane into the places of load_lanes; to: in vectors */
TQKV__OP void TQKV__(turn_lanes)(const int count, int words, const uint8_t *codes, float *to)
{
    TQKV__VECTOR x[8];
    TQKV__(load_lanes)(count, words, codes, x);
    TQKV__UNROLL
    for (int i = 0; i < count; i++) TQKV__(store)(to + i * TQKV__LANES, x[i]);
}

/* Those of a row's codes, the lanes of a vector after those of another; lanes have two words or more. to: [head_dim / 4] */
TQKV__OP void TQKV__(turn_words)(int words, const uint8_t *codes, int head_dim, float *to)
{
    const int step = words * TQKV__LANES;
    for (int at = 0; at < head_dim / 4; at += step, codes += 4 * step) {
        if (words == 4)
            TQKV__(turn_lanes)(4, 4, codes, to + at);
        else if (TQKV__LANES > 4)
            TQKV__(turn_lanes)(8, 8, codes, to + at);
        else
            for (int w = 0; w < 8; w += 4) TQKV__(turn_lanes)(4, 8, codes + 4 * w, to + at + w * TQKV__LANES);
    }
}

/* Sums of lanes of codes, LANES of them in a vector, each over its words in order. short_lanes: lanes have one or two codes, and
   the first steps of the tree are taken here. bits is a constant. */
TQKV__OP void TQKV__(sums_of_words)(const int bits, bool short_lanes, int words, int n_vectors,
                                    const tqkv__quantiser *q, const uint8_t *codes, TQKV__VECTOR *sums)
{
    for (const TQKV__VECTOR *end = sums + n_vectors; sums < end; sums++) {
        TQKV__VECTOR sum = TQKV__(set1)(0.0f), word[2], x[4];
        if (words == 1) {
            memcpy(&word[0], codes, sizeof word[0]);
            codes += sizeof word[0];
            TQKV__(squares)(bits, q, word[0], x);
            *sums = short_lanes ? (x[0] + x[1]) + (x[2] + x[3]) : ((x[0] + x[1]) + x[2]) + x[3];
            continue;
        }
        for (int w = 0; w < words; w += 2, codes += 2 * sizeof word[0]) {
            memcpy(&word[0], codes, sizeof word[0]);
            memcpy(&word[1], codes + sizeof word[0], sizeof word[0]);
            if (words == 2) TQKV__(transpose)(2, word);
            TQKV__UNROLL
            for (int i = 0; i < 2; i++) {
                TQKV__(squares)(bits, q, word[i], x);
                sum = (((sum + x[0]) + x[1]) + x[2]) + x[3];
            }
        }
        *sums = sum;
    }
}

/* The sums of the lanes of a row's codes */
TQKV__OP void TQKV__(lanes_of_codes)(const tqkv__stream *s, const tqkv__quantiser *q, const uint8_t *codes,
                                     TQKV__VECTOR *sums)
{
    const int words = TQKV__LANE_WORDS(s->head_dim), n = TQKV__WORD_LANES(s->head_dim) / TQKV__LANES;
    const bool short_lanes = s->head_dim < 128;
    TQKV__ALIGNED float turned[TQKV_MAX_HEAD_DIM / 4];
    if (words > 2) {
        TQKV__(turn_words)(words, codes, s->head_dim, turned);
        codes = (const uint8_t *)(const void *)turned;
    }
    if (s->book_bits == 6)
        TQKV__(sums_of_words)(6, short_lanes, words, n, q, codes, sums);
    else if (s->book_bits == 5)
        TQKV__(sums_of_words)(5, short_lanes, words, n, q, codes, sums);
    else /* fewer centroids are in the same registers */
        TQKV__(sums_of_words)(4, short_lanes, words, n, q, codes, sums);
}

/* The squares of a row's centroids; bits is a constant. x: [head_dim] */
TQKV__OP void TQKV__(squares_of_codes)(const int bits, const tqkv__stream *s, const tqkv__quantiser *q,
                                       const uint8_t *codes, float *x)
{
    for (int d = 0; d < s->head_dim; d += TQKV__LANES) {
        TQKV__VECTOR four[4];
        TQKV__(squares)(bits, q, TQKV__(widen_bytes)(codes + d), four);
        TQKV__(store)(x + d, four[0]);
    }
}

/* As sums_tq, of the centroids of codes: [head_dim]. TQ8's are too many for squares to look up: decodes the row. */
TQKV__TARGET static TQKV__NOINLINE void TQKV__(centroid_sums)(const tqkv__stream *s, const tqkv__quantiser *q,
                                                              const uint8_t *codes, float *sums)
{
    TQKV__ALIGNED float x[TQKV__X_STRIDE(TQKV_MAX_HEAD_DIM)];
    TQKV__VECTOR lanes[32 / TQKV__LANES];
    if (s->book_bits == 8) {
        TQKV__(block) row;
        memset(&row, 0, sizeof row);
        row.stream = s;
        row.codes = codes;
        row.stride = (size_t)s->head_dim;
        row.dim = s->head_dim;
        TQKV__(decode_TQKV_TQ8)(&row, 1, x);
        TQKV__(sums_tq)(s, x, sums);
        return;
    }
    if (TQKV__HAS_MATRIX(s->head_dim)) {
        if (s->book_bits == 6)
            TQKV__(squares_of_codes)(6, s, q, codes, x);
        else if (s->book_bits == 5)
            TQKV__(squares_of_codes)(5, s, q, codes, x);
        else
            TQKV__(squares_of_codes)(4, s, q, codes, x);
        TQKV__(sum_of_row)(true, x, s->head_dim, sums);
        return;
    }
    TQKV__(lanes_of_codes)(s, q, codes, lanes);
#define TQKV__SUM_LANES(D, n)                                                                                          \
    case D:                                                                                                            \
        TQKV__(add_lanes)(TQKV__WORD_LANES(D), TQKV__LANE_WORDS(D), n, lanes, sums);                                   \
        break;
    TQKV__BY_HEAD_DIM(TQKV__SUM_LANES)
#undef TQKV__SUM_LANES
}
#undef TQKV__BY_HEAD_DIM
#undef TQKV__WORD_LANES
#undef TQKV__LANE_WORDS

/* As tqkv__norm_tq for a few rows, in whole vectors. values: [n_rows], norms, scales: [n_rows][norms_per_row] */
TQKV__TARGET static void TQKV__(norms_tq)(const tqkv__stream *s, const float *const *values, int n_rows, float *norms,
                                          float *scales)
{
    const bool several = s->norms_per_row > 1;
    const TQKV__VECTOR part =
        TQKV__(set1)(several ? 1.0f / 256.0f : 1.0f); /* 1/256 is exact: same result as the division */
    const TQKV__VECTOR factor = TQKV__(set1)(several ? s->block_scale : s->root);
    const int n = n_rows * s->norms_per_row;
    for (int i = 0; i < n_rows; i++) TQKV__(sums_tq)(s, values[i], norms + i * s->norms_per_row);
    for (int i = n; i % TQKV__LANES; i++) norms[i] = 0.0f;
    for (int i = 0; i < n; i += TQKV__LANES) {
        const TQKV__VECTOR norm = TQKV__(abs)(TQKV__(sqrt)(TQKV__(load)(norms + i) * part));
        TQKV__(store)(norms + i, norm);
        TQKV__(store)(scales + i, TQKV__(invert_above)(TQKV__MIN_NORM, norm) * factor);
    }
}

/* As tqkv__correct_norms for a few rows; sums: of the squares of their centroids. norms, sums: [n], room for whole
   vectors */
TQKV__TARGET static void TQKV__(correct_norms)(const tqkv__stream *s, int n, const float *sums, float *norms)
{
    const bool several = s->norms_per_row > 1;
    const TQKV__VECTOR part = TQKV__(set1)(several ? 1.0f / 256.0f : 1.0f);
    const TQKV__VECTOR root = TQKV__(set1)(several ? s->block_scale : s->root);
    for (int i = 0; i < n; i += TQKV__LANES) {
        const TQKV__VECTOR norm = TQKV__(load)(norms + i), length = TQKV__(sqrt)(TQKV__(load)(sums + i) * part);
        const TQKV__VECTOR next = norm * TQKV__(rounded)(root / length);
        TQKV__(store)(norms + i, TQKV__(zero_below)(TQKV__(set1)(TQKV__NEXT_NORM), norm, next));
    }
}

TQKV__TARGET static void TQKV__(norms_i8)(const tqkv__stream *s, const float *const *values, int n_rows, float *norms,
                                          float *scales)
{
    for (int i = 0; i < n_rows * s->norms_per_row; i++) {
        const float *y = values[i / s->norms_per_row] + i % s->norms_per_row * s->norm_dim;
        TQKV__VECTOR even = TQKV__(set1)(0.0f), odd = even;
        for (const float *last = y + s->norm_dim - TQKV__LANES; y <= last; y += 2 * TQKV__LANES) {
            even = TQKV__(max)(TQKV__(abs)(TQKV__(load)(y)), even);
            odd = TQKV__(max)(TQKV__(abs)(TQKV__(load)(y < last ? y + TQKV__LANES : y)), odd);
        }
        norms[i] = tqkv__norm_i8(TQKV__(largest_lane)(TQKV__(max)(even, odd)), &scales[i]);
    }
}

/* Norms and scales of a few rows, as tqkv__scale_row. */
TQKV__OP void TQKV__(norms)(const tqkv__stream *s, const float *const *values, int n_rows, float *norms, float *scales)
{
    if (s->kind == TQKV__GRID)
        TQKV__(norms_i8)(s, values, n_rows, norms, scales);
    else
        TQKV__(norms_tq)(s, values, n_rows, norms, scales);
}

TQKV__TARGET static void TQKV__(scale_row)(const tqkv__stream *s, float *row, float *norms)
{
    float row_norms[16], scales[16]; /* whole vectors */
    float copy[TQKV_MAX_HEAD_DIM];
    const float *y = row;
    if (s->rotated) TQKV__(rotate)(row, s->head_dim);
    if (s->kind == TQKV__HALF) return;
    if (TQKV__HAS_MATRIX(s->head_dim)) y = (const float *)memcpy(copy, row, (size_t)s->head_dim * sizeof(float));
    TQKV__(norms)(s, &y, 1, row_norms, scales);
    memcpy(norms, row_norms, (size_t)s->norms_per_row * sizeof(float));
    for (int d = 0; d < s->head_dim; d += TQKV__LANES)
        TQKV__(store)(row + d, TQKV__(load)(row + d) * TQKV__(set1)(scales[d / s->norm_dim]));
}

/* As tqkv__quantise, with the cells of tqkv__quantiser. bits is a constant, 4 for fewer, too. */
TQKV__OP TQKV__(codes) TQKV__(quantise)(const int bits, const tqkv__quantiser *q, const TQKV__(codes) * below,
                                        const TQKV__VECTOR *bounds, TQKV__VECTOR v)
{
    TQKV__(codes) side;
    const TQKV__VECTOR w = TQKV__(fold)((int)(q->half & 255), v, &side);
    const TQKV__VECTOR cell = TQKV__(min)(w * TQKV__(set1)(q->slope), TQKV__(set1)(q->top));
    const TQKV__(codes) count = TQKV__(below)(bits, below, TQKV__(truncate)(cell));
    return TQKV__(code_from)(count, TQKV__(bound)(bits, bounds, count), w, side);
}

#if TQKV__LANES < 16
/* Quantises TQ8 where tables are too large for instructions: vectors find the cells of a block, loads the counts and
   bounds, vectors compare. One loop a step: a vector load that follows its parts' stores at once would wait for them. */
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

/* The codes of TQ8 for n values with one scale: 256 at a time, then whole vectors, then a tail with zeros behind it. */
TQKV__OP void TQKV__(quantise_block_tq8)(const tqkv__quantiser *q, const float *y, int n, float scale, uint8_t *codes)
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

/* y: [head_dim], scales: [norms_per_row] -> codes: [head_dim]. bits is a constant: of the codebook, 4 for fewer, 0 without. */
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

/* bytes: [head_dim], with room for whole vectors -> row: [row_bytes]. The bits are constants. */
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

/* y: [head_dim], scales: [norms_per_row] -> row: [row_bytes]. Returns the codes as bytes, [head_dim]: the row itself or, if
   it is packed, `bytes`. */
TQKV__TARGET static const uint8_t *TQKV__(quantise_row)(const tqkv__stream *s, const tqkv__quantiser *q, const float *y,
                                                        const float *scales, uint8_t *row, uint8_t *bytes)
{
    uint8_t *codes = s->main_bits < 8 ? bytes : row;
    if (s->book_bits == 8)
        for (int b = 0; b < s->head_dim; b += s->norm_dim)
            TQKV__(quantise_block_tq8)(q, y + b, s->norm_dim, *scales++, row + b);
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

/* The codes of F16; type is a constant. */
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

/* The values of a row that are to be quantised: less its centre, rotated, in row: [head_dim] or, where nothing is to be done,
   in the source. Halves are not widened first: that pass would make them a tenth slower than floats. F16 is stored. The
   sums of a row that is not rotated may read behind it: a copy. */
TQKV__TARGET static const float *TQKV__(open_row)(const tqkv__stream *s, const tqkv__row *source, float *row)
{
    const bool half = s->kind == TQKV__HALF;
    const void *src = source->src;
    tqkv_type type = s->type;
    if (source->center || (!s->rotated && !half && (type != TQKV_TYPE_F32 || TQKV__HAS_MATRIX(s->head_dim)))) {
        TQKV__(widen)(type, src, source->center, s->head_dim, row);
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
    enum { buffer = 3072, most_norms = buffer / 32 }; /* 12 KiB: a part of an L1 cache, and of the stack */
    TQKV__ALIGNED float rotated[buffer + 16], norms[most_norms], scales[most_norms]; /* fours are loaded beyond a row */
    float *sums = scales; /* a row that is quantised needs its scales no more */
    TQKV__ALIGNED uint8_t bytes[TQKV_MAX_HEAD_DIM + 64];
    const float *values[most_norms];
    const int batch = buffer / s->head_dim, norms_per_row = s->norms_per_row;
    for (int first = 0; first < n_rows; first += batch, rows += batch) {
        const int n = n_rows - first < batch ? n_rows - first : batch;
        for (int i = 0; i < n; i++) values[i] = TQKV__(open_row)(s, &rows[i], rotated + i * s->head_dim);
        if (s->kind == TQKV__HALF) continue;
        TQKV__(norms)(s, values, n, norms, scales);
        for (int i = 0; i < n; i++) {
            const uint8_t *codes =
                TQKV__(quantise_row)(s, q, values[i], scales + i * norms_per_row, rows[i].codes, bytes);
            if (s->kind == TQKV__BOOK) TQKV__(centroid_sums)(s, q, codes, sums + i * norms_per_row);
        }
        for (int i = n * norms_per_row; i % TQKV__LANES; i++) sums[i] = 1.0f;
        if (s->kind == TQKV__BOOK) TQKV__(correct_norms)(s, n * norms_per_row, sums, norms);
        for (int i = 0; i < n; i++)
            memcpy(rows[i].norms, norms + i * norms_per_row, (size_t)norms_per_row * sizeof(float));
    }
}

/* As tqkv__all_finite for whole rows: the largest magnitude shows an exponent of all ones. */
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

/* As tqkv__values_finite for whole rows. Two halves, or bfloat16s, in a word: a 1 added at the lowest bit of an exponent
   carries into the sign's place from an exponent of all ones, and from no other. */
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

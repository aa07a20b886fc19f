/* >>k-norms: sums of squares and norms, in the lanes and the order of >>codec. */

/* Byte e of word i: a code of TQ2, which alone is not searched. Lane i of x[e]: the square of its centroid. */
TQKV__OP void TQKV__(squares)(const tqkv__quantiser *q, TQKV__VECTOR words, TQKV__VECTOR *x)
{
    TQKV__(words) codes;
    TQKV__VECTOR table[16 / TQKV__LANES];
    memcpy(&codes, &words, sizeof codes);
    TQKV__UNROLL
    for (int i = 0; i < 16 / TQKV__LANES; i++) table[i] = TQKV__(load)(q->squares + i * TQKV__LANES);
    TQKV__UNROLL
    for (int e = 0; e < 4; e++) {
        const TQKV__(words) at = codes >> (8 * e);
        TQKV__(codes) entry;
        memcpy(&entry, &at, sizeof entry);
        x[e] = TQKV__(bound)(2, table, entry);
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

/* Loads the words of LANES lanes, each of per_lane neighbours: x[e] has the e-th of each. If per_lane < LANES, bit j of
   a lane's number moves to bit (j + log2(per_lane)) modulo log2(LANES) of where it comes to. Only per_lane words from
   the first of count, a constant: the smaller of per_lane and LANES. */
TQKV__OP void TQKV__(load_lanes)(const int count, int per_lane, const uint8_t *words, TQKV__VECTOR *x)
{
    const int stride = per_lane < TQKV__LANES ? TQKV__LANES : per_lane;
    TQKV__UNROLL
    for (int i = 0; i < count; i++, words += 4 * stride) memcpy(&x[i], words, sizeof x[i]);
    TQKV__(transpose)(count, x);
}

/* Sums up the squares of LANES lanes, each over its per_lane floats in order; most: a constant, per_lane or LANES */
TQKV__OP TQKV__VECTOR TQKV__(lane_sums)(const int most, int per_lane, const uint8_t *floats)
{
    const int count = most < TQKV__LANES ? most : TQKV__LANES;
    TQKV__VECTOR sum = TQKV__(set1)(0.0f);
    for (int first = 0; first < per_lane; first += count) {
        TQKV__VECTOR x[16];
        TQKV__(load_lanes)(count, per_lane, floats + 4 * first, x);
        TQKV__UNROLL
        for (int i = 0; i < count; i++) sum += TQKV__(rounded)(x[i] * x[i]);
    }
    return sum;
}

/* Adds lanes by the xor-tree of tqkv__sums_of_products up to those that share a norm. x: the sums of n_lanes lanes of
   per_lane words each, in the order of load_lanes; sums: one a norm. All numbers are constants. */
TQKV__OP void TQKV__(add_lanes)(const int n_lanes, const int per_lane, const int n_norms, TQKV__VECTOR *x, float *sums)
{
    const int width = per_lane < TQKV__LANES ? per_lane : TQKV__LANES, vectors = n_lanes / TQKV__LANES;
    TQKV__ALIGNED float lanes[32];
    TQKV__UNROLL
    for (int bit = 0; bit < 4; bit++)
        if (1 << bit < TQKV__LANES && 1 << bit < n_lanes / n_norms) {
            const int moved = (1 << bit) * width, distance = moved < TQKV__LANES ? moved : moved / TQKV__LANES;
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
        const int lane = n_lanes / n_norms * b, at = lane % TQKV__LANES * width;
        sums[b] = lanes[lane / TQKV__LANES * TQKV__LANES + at % TQKV__LANES + at / TQKV__LANES];
    }
}

/* Sums up lanes of any length, in the lanes' own order; squared: x holds the squares. Reads up to three floats behind
   the last lane. */
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

/* Finds the sum of squares of a row of head_dim that is no power of two; three more floats are readable behind x. */
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

/* Finds the sums of squares of one row, one for each norm; sums: [norms_per_row]. If head_dim is no power of two, three
   more floats are readable behind y. */
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
}

/* Four codes to a word: lanes of one word up to D=128, fewer than 32 below. */
#define TQKV__WORD_LANES(D) ((D) < 128 ? (D) / 4 : 32)
#define TQKV__LANE_WORDS(D) ((D) / 4 / TQKV__WORD_LANES(D))

/* Brings `words` words of each lane into the order of load_lanes; to: in vectors */
TQKV__OP void TQKV__(turn_lanes)(const int count, int words, const uint8_t *codes, float *to)
{
    TQKV__VECTOR x[8];
    TQKV__(load_lanes)(count, words, codes, x);
    TQKV__UNROLL
    for (int i = 0; i < count; i++) TQKV__(store)(to + i * TQKV__LANES, x[i]);
}

/* Brings the words of a row's codes into that order, the lanes of a vector after those of another; lanes have two words
   or more. to: [head_dim / 4] */
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

/* Sums up lanes of codes, LANES of them in a vector, each over its words in order. short_lanes: lanes have one or two
   codes, and the first steps of the tree are taken here. */
TQKV__OP void TQKV__(sums_of_words)(bool short_lanes, int words, int n_vectors, const tqkv__quantiser *q,
                                    const uint8_t *codes, TQKV__VECTOR *sums)
{
    for (const TQKV__VECTOR *end = sums + n_vectors; sums < end; sums++) {
        TQKV__VECTOR sum = TQKV__(set1)(0.0f), word[2], x[4];
        if (words == 1) {
            memcpy(&word[0], codes, sizeof word[0]);
            codes += sizeof word[0];
            TQKV__(squares)(q, word[0], x);
            *sums = short_lanes ? (x[0] + x[1]) + (x[2] + x[3]) : ((x[0] + x[1]) + x[2]) + x[3];
            continue;
        }
        for (int w = 0; w < words; w += 2, codes += 2 * sizeof word[0]) {
            memcpy(&word[0], codes, sizeof word[0]);
            memcpy(&word[1], codes + sizeof word[0], sizeof word[0]);
            if (words == 2) TQKV__(transpose)(2, word);
            TQKV__UNROLL
            for (int i = 0; i < 2; i++) {
                TQKV__(squares)(q, word[i], x);
                sum = (((sum + x[0]) + x[1]) + x[2]) + x[3];
            }
        }
        *sums = sum;
    }
}

/* Finds the sums of the lanes of a row's codes. */
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
    TQKV__(sums_of_words)(short_lanes, words, n, q, codes, sums);
}

/* Does what sums_tq does, of the centroids of codes of TQ2: [head_dim]. */
TQKV__TARGET static TQKV__NOINLINE void TQKV__(centroid_sums)(const tqkv__stream *s, const tqkv__quantiser *q,
                                                              const uint8_t *codes, float *sums)
{
    TQKV__ALIGNED float x[TQKV_MAX_HEAD_DIM + 16];
    TQKV__VECTOR lanes[32 / TQKV__LANES];
    if (TQKV__HAS_MATRIX(s->head_dim)) {
        for (int d = 0; d < s->head_dim; d += TQKV__LANES) {
            TQKV__VECTOR four[4];
            TQKV__(squares)(q, TQKV__(widen_bytes)(codes + d), four);
            TQKV__(store)(x + d, four[0]);
        }
        TQKV__(sum_of_row)(true, x, s->head_dim, sums);
        return;
    }
    TQKV__(lanes_of_codes)(s, q, codes, lanes);
#define TQKV__SUM_LANES(D, n)                                                                                          \
    case D:                                                                                                            \
        TQKV__(add_lanes)(TQKV__WORD_LANES(D), TQKV__LANE_WORDS(D), n, lanes, sums);                                   \
        break;
    TQKV__BY_HEAD_DIM(TQKV__SUM_LANES)
}

/* Does what tqkv__norm_tq does for a few rows, in whole vectors. values: [n_rows], norms, scales:
   [n_rows][norms_per_row] */
TQKV__TARGET static void TQKV__(norms_tq)(const tqkv__stream *s, const float *const *values, int n_rows, float *norms,
                                          float *scales)
{
    const bool several = s->norms_per_row > 1;
    const TQKV__VECTOR share =
        TQKV__(set1)(several ? 1.0f / 256.0f : 1.0f); /* 1/256 is exact: same result as the division */
    const TQKV__VECTOR factor = TQKV__(set1)(several ? s->block_scale : s->root);
    const int n = n_rows * s->norms_per_row;
    for (int i = 0; i < n_rows; i++) TQKV__(sums_tq)(s, values[i], norms + i * s->norms_per_row);
    for (int i = n; i % TQKV__LANES; i++) norms[i] = 0.0f;
    for (int i = 0; i < n; i += TQKV__LANES) {
        const TQKV__VECTOR norm = TQKV__(abs)(TQKV__(sqrt)(TQKV__(load)(norms + i) * share));
        TQKV__(store)(norms + i, norm);
        TQKV__(store)(scales + i, TQKV__(invert_above)(TQKV__MIN_NORM, norm) * factor);
    }
}

/* Does what tqkv__correct_norms does for a few rows; sums: of the squares of their centroids. norms, sums: [n], room
   for whole vectors */
TQKV__TARGET static void TQKV__(correct_norms)(const tqkv__stream *s, int n, const float *sums, float *norms)
{
    const bool several = s->norms_per_row > 1;
    const TQKV__VECTOR share = TQKV__(set1)(several ? 1.0f / 256.0f : 1.0f);
    const TQKV__VECTOR root = TQKV__(set1)(several ? s->block_scale : s->root);
    for (int i = 0; i < n; i += TQKV__LANES) {
        const TQKV__VECTOR norm = TQKV__(load)(norms + i), length = TQKV__(sqrt)(TQKV__(load)(sums + i) * share);
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

/* Finds norms and scales of a few rows as tqkv__scale_row does. */
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

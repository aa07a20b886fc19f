/* What integers alone have trouble with: weights and norms that are far apart, one large coordinate, infinite norms.
 * The hashes of outputs are in goldens.h. */
#include "attend_fixture.h"

/* ---- Hard cases ---- */

typedef enum hard_kind { HARD_NORMS, HARD_ONE_ABOVE, HARD_DOMINATING, HARD_FLAT, HARD_EQUAL, HARD_KINDS } hard_kind;

typedef struct hard_row {
    int kind, head_dim;
    tqkv_format keys, values;
} hard_row;

/* Keys and values of one position of one head. direction: of the query */
static void hard_position(hard_kind kind, int t, const float *direction, data_random *random, int d, float *key,
                          float *value)
{
    const float along = kind == HARD_ONE_ABOVE    ? (t % 64 == 17 ? 6.0f : 0.0f)
                        : kind == HARD_DOMINATING ? (t == 700 ? 30.0f : 0.0f)
                                                  : 0.0f;
    const bool still = kind == HARD_ONE_ABOVE || kind == HARD_FLAT || kind == HARD_EQUAL;
    const float size = kind == HARD_NORMS && t % 3 ? 1e-4f : 1.0f; /* of values */
    for (int i = 0; i < d; i++) {
        const float noise = data_gaussian(random);
        key[i] = direction[i] * along + (still ? 0.0f : noise);
        value[i] = (kind == HARD_EQUAL ? 1.0f : 1.0f + data_gaussian(random)) * size;
    }
}

/* 1,000 positions, whose weights or norms in one tile are far apart or the same. */
static void check_hard(const void *parameters)
{
    enum { POSITIONS = 1000 };
    const hard_row *row = (const hard_row *)parameters;
    const int d = row->head_dim;
    attend_row shape = attend_default_row(row->keys, row->values, d);
    shape.n_kv_heads = shape.group = 1;
    shape.end = shape.key_capacity = shape.value_capacity = POSITIONS;
    shape.query_size = 3.0f;
    attend_problem p;
    attend_set_up(&p, &shape);
    data_random random = {(uint64_t)row->kind};
    float direction[TQKV_MAX_HEAD_DIM], key[TQKV_MAX_HEAD_DIM], value[TQKV_MAX_HEAD_DIM];
    for (int i = 0; i < d; i++) direction[i] = i % 2 ? 1.0f : -1.0f;
    for (int i = 0; i < d; i++) p.q[i] = direction[i] / sqrtf((float)d) * (row->kind == HARD_NORMS ? 3.0f : 1.0f);
    for (int t = 0; t < POSITIONS; t++) {
        hard_position((hard_kind)row->kind, t, direction, &random, d, key, value);
        CHECK_RESULT(tqkv_encode(&p.keys, key, 1, t), TQKV_OK);
        CHECK_RESULT(tqkv_encode(&p.values, value, 1, t), TQKV_OK);
    }
    reference_attend(&p.attention, p.q, p.expected);
    CHECK_RESULT(tqkv_attend(&p.attention, p.q, p.out), TQKV_OK);
    attend_check(&p, p.out, "hard");
    attend_tear_down(&p);
}

static void add_hard(void)
{
    static const char *const names[HARD_KINDS] = {"norms", "one_above", "dominating", "flat", "equal"};
    for (int kind = 0; kind < HARD_KINDS; kind++) {
        const hard_row rows[3] = {
            {kind, 128, TQKV_TQ4, TQKV_TQ4}, {kind, 80, TQKV_I8, TQKV_TQ2}, {kind, 512, TQKV_TQ5, TQKV_I8}};
        for (int i = 0; i < 3; i++)
            test_add(check_hard, &rows[i], sizeof rows[i], "integer/hard_%s/%d", names[kind], rows[i].head_dim);
    }
}

/* ---- Queries with one coordinate far above the others ---- */

typedef struct peak_row {
    int head_dim;
    tqkv_format keys;
    float peak, deviation; /* the coordinate over the others' deviation, divided by sqrt(head_dim); of the scores */
} peak_row;

/* Sets coordinate 5 of the rotated rows, and scales them, so that the scores keep their deviation.
 * rows: [n][d] of `stride` */
static void set_peaks(const peak_row *row, float *rows, size_t n, int d, size_t stride)
{
    const float scale = row->deviation / sqrtf(1.0f + row->peak * row->peak);
    for (size_t i = 0; i < n; i++, rows += stride) {
        rows[5] += row->peak * sqrtf((float)d);
        for (int j = 0; j < d; j++) rows[j] *= scale;
        CHECK_RESULT(tqkv_rotate(rows, 1, d, TQKV_ORIGINAL), TQKV_OK);
    }
}

/* The error bound holds for any query. */
static void check_peak(const void *parameters)
{
    const peak_row *row = (const peak_row *)parameters;
    attend_row shape = attend_default_row(row->keys, TQKV_I8, row->head_dim);
    shape.end = shape.key_capacity = shape.value_capacity = 107;
    shape.group = 8;
    shape.query_size = row->deviation; /* of the tolerance */
    attend_problem p;
    attend_set_up(&p, &shape);
    data_random random = {(uint64_t)row->head_dim};
    for (size_t i = 0; i < p.n_rows * p.head_dim; i++) p.q[i] = data_gaussian(&random);
    set_peaks(row, p.q, p.n_rows, row->head_dim, p.head_dim);
    reference_attend(&p.attention, p.q, p.expected);
    CHECK_RESULT(tqkv_attend(&p.attention, p.q, p.out), TQKV_OK);
    attend_check(&p, p.out, "peak");
    attend_tear_down(&p);
}

static void add_peaks(void)
{
    static const float peaks[4] = {0.25f, 1.0f, 3.0f, 30.0f}, deviations[3] = {1.0f, 3.0f, 10.0f};
    static const int head_dims[4] = {32, 128, 320, 1024};
    static const tqkv_format formats[4] = {TQKV_I8, TQKV_TQ4, TQKV_TQ6, TQKV_TQ2};
    for (int i = 0; i < 48; i++) {
        const peak_row row = {head_dims[i % 4], formats[(i / 4 + i / 16) % 4], peaks[i / 4 % 4], deviations[i / 16]};
        test_add(check_peak, &row, sizeof row, "integer/peak/%s/%d/%g/%g", tqkv_format_name(row.keys), row.head_dim,
                 (double)row.peak, (double)row.deviation);
    }
}

/* ---- Norms that no encoder writes ---- */

typedef struct norm_row {
    bool infinite;
    tqkv_format format;
    int head_dim;
} norm_row;

/* Whether x is the one NaN that attention gives. */
static bool nan_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits == 0x7fc00000u;
}

/* A visible infinite norm of a value makes its head's output NaN, and of nothing else. */
static void check_infinite_norm(const void *parameters)
{
    const norm_row *seen = (const norm_row *)parameters;
    const float norm = seen->infinite ? (float)INFINITY : (float)NAN;
    attend_row row = attend_default_row(seen->format, seen->format, seen->head_dim);
    row.bits_alone = true;
    attend_problem p;
    attend_set_up(&p, &row);
    p.values.norms[5] = norm; /* head 0 */
    CHECK_RESULT(tqkv_attend(&p.attention, p.q, p.out), TQKV_OK);
    for (size_t i = 0; i < p.n_rows * p.head_dim; i++)
        CHECK(i < p.n_rows / 2 * p.head_dim ? nan_bits(p.out[i]) : p.out[i] == p.out[i], "value %d is %g", (int)i,
              (double)p.out[i]);
    p.values.norms[5] = 1.0f;
    p.keys.norms[5] = norm; /* also where the query's product with the codes is negative */
    CHECK_RESULT(tqkv_attend(&p.attention, p.q, p.out), TQKV_OK);
    for (size_t i = 0; i < p.n_rows; i++) {
        const float x = p.out[i * p.head_dim];
        CHECK(i < p.n_rows / 2 ? nan_bits(x) : x == x, "row %d is %g", (int)i, (double)x);
    }
    attend_tear_down(&p);
}

/* Negative norms turn a row around. */
static void check_negative_norm(NO_ROW)
{
    attend_row row = attend_default_row(TQKV_TQ5, TQKV_TQ3, 64);
    attend_problem p;
    attend_set_up(&p, &row);
    for (int i = 0; i < 40; i += 3) p.values.norms[i] = p.keys.norms[i + 1] = -10.0f;
    reference_attend(&p.attention, p.q, p.expected);
    CHECK_RESULT(tqkv_attend(&p.attention, p.q, p.out), TQKV_OK);
    attend_check(&p, p.out, "negative");
    attend_tear_down(&p);
}

void test_integer_cases(void)
{
    add_hard();
    for (int i = 0; i < 15; i++) { /* sets differ in the loops for these sizes */
        static const int dims[5] = {64, 96, 128, 160, 192};
        static const tqkv_format formats[3] = {TQKV_TQ4, TQKV_I8, TQKV_TQ8};
        const norm_row row = {i % 2 == 1, formats[i / 5], dims[i % 5]};
        test_add(check_infinite_norm, &row, sizeof row, "integer/norm_%s/%s/%d", row.infinite ? "infinite" : "nan",
                 tqkv_format_name(row.format), row.head_dim);
    }
    add_peaks();
    test_add(check_negative_norm, NULL, 0, "integer/norm_negative");
}

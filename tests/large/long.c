/* make test-long: what `make test` shows at a few lengths, at random ones. Attention's error over contexts to 2^20
   positions, against double precision for four rows of each case, and the bits of queries in company, on each
   instruction set of the machine; in integers also from set to set. Options: --list, --seed N, parts of case names. */
#include "tests/attend_checks.h"

enum {
    CASES = 200,                  /* of random lengths */
    SMALL_CASES = 24,             /* of 65536 positions, small enough for an emulator */
    COMPANIES = 400,              /* problems, each asked for in many ways */
    LONGEST = 1 << 20,            /* positions */
    MOST_VALUES = 1 << 25,        /* of keys in a case; bounds the memory and the time to fill it */
    MOST_MULTIPLY_ADDS = 1 << 30, /* of scores in a case; bounds the time of plain C */
    SAMPLED_ROWS = 4,
    ISAS = 4
};

static const char *const isas[ISAS] = {"avx512", "avx2", "neon", "scalar"};
static double worst[ISAS];      /* relative L2 */
static uint64_t first_seed = 1; /* option --seed */

/* ---- The error ---- */

typedef struct long_row {
    tqkv_format keys, values;
    int head_dim, n_kv_heads, group, n_queries, n_positions, window;
    int64_t end;         /* beyond n_positions: a ring */
    float mean;          /* of the values */
    float sigma;         /* standard deviation of the scores */
    float sink, softcap; /* 0: none */
    uint64_t seed;
} long_row;

/* Sum of four uniform numbers, scaled to variance 1: near Gaussian, and fast. */
static float draw(data_random *random)
{
    const uint64_t bits = data_bits(random);
    const int32_t sum = (int32_t)(bits & 0xffff) + (int32_t)(bits >> 16 & 0xffff) + (int32_t)(bits >> 32 & 0xffff) +
                        (int32_t)(bits >> 48);
    return (float)(sum - 2 * 65535) * (1.0f / 37837.2f);
}

static tqkv_store fill(const long_row *row, tqkv_format format, float sigma, float mean, data_random *random)
{
    enum { TOKENS = 256 };
    tqkv_store store =
        test_store(format, row->head_dim, row->n_kv_heads, row->n_positions, row->end > row->n_positions);
    const size_t values = (size_t)row->n_kv_heads * (size_t)row->head_dim;
    float *source = (float *)test_alloc(TOKENS * values * sizeof(float));
    for (int64_t p = row->end - row->n_positions; p < row->end; p += TOKENS) {
        const int count = row->end - p < TOKENS ? (int)(row->end - p) : TOKENS;
        for (size_t i = 0; i < (size_t)count * values; i++) source[i] = mean + sigma * draw(random);
        CHECK_RESULT(tqkv_encode(&store, source, count, p), TQKV_OK);
    }
    free(source);
    return store;
}

/* One row in double precision. Keys and values stay as they are stored, and what is rotated is the query and the
   output: that saves most of the time. q, out: [head_dim] */
static void expect_row(const tqkv_attention *a, int head, int query, const float *q, double *out)
{
    const int d = a->keys->head_dim, kv_head = head / (a->n_heads / a->keys->n_kv_heads);
    tqkv_store keys = *a->keys, values = *a->values;
    tqkv_attention stored = *a;
    double turned[REFERENCE_MAX_DIM];
    for (int i = 0; i < d; i++) turned[i] = (double)q[i];
    if (reference_is_rotated(&keys)) reference_rotate_double(turned, d);
    keys.rotation = values.rotation = TQKV_ROTATION_OFF; /* reference_decode_as leaves rows as they are stored */
    stored.keys = &keys;
    stored.values = &values;
    double *key_rows = reference_decode_side(&stored, 0, query, kv_head, REFERENCE_INTEGERS),
           *value_rows = reference_decode_side(&stored, 1, query, kv_head, REFERENCE_INTEGERS);
    reference_attend_row(&stored, head, query, turned, key_rows, value_rows, out);
    if (reference_is_rotated(a->values)) reference_unrotate_double(out, d);
    free(key_rows);
    free(value_rows);
}

/* The largest error of the sampled rows; rows: indices of [n_queries][n_heads] */
static double error_of(const tqkv_attention *a, const size_t *rows, const double *expected, const float *out)
{
    const size_t d = (size_t)a->keys->head_dim;
    double largest = 0.0;
    for (size_t i = 0; i < SAMPLED_ROWS; i++) {
        const double error = reference_relative_error(out + rows[i] * d, expected + i * d, d);
        if (!(error <= largest)) largest = error;
    }
    return largest;
}

/* Attends with each instruction set and prints a line. */
static void attend_on_all(const tqkv_attention *a, const float *q, size_t n_elements, const size_t *rows,
                          const double *expected, float sigma)
{
    const double tolerance = reference_attention_tolerance(a, (double)sigma);
    float *out = (float *)test_alloc(n_elements * sizeof *out);
    for (int i = 0; i < ISAS; i++) {
        if (tqkv_isa_force(isas[i]) != TQKV_OK) continue;
        memset(out, 0xff, n_elements * sizeof *out);
        CHECK_RESULT(tqkv_attend(a, q, out), TQKV_OK);
        const double error = error_of(a, rows, expected, out);
        CHECK(error <= tolerance, "%s: relative error %.3g", isas[i], error);
        if (!(error <= worst[i])) worst[i] = error;
        printf("  %s %.2g", isas[i], error);
    }
    CHECK_RESULT(tqkv_isa_force(NULL), TQKV_OK);
    printf("\n");
    free(out);
}

static void check_error(const void *parameters)
{
    const long_row *row = (const long_row *)parameters;
    data_random random = {row->seed};
    tqkv_store keys = fill(row, row->keys, row->sigma, 0.0f, &random);
    tqkv_store values = fill(row, row->values, 1.0f, row->mean, &random);
    const int n_heads = row->n_kv_heads * row->group, d = row->head_dim;
    const size_t n_rows = (size_t)row->n_queries * (size_t)n_heads, n_elements = n_rows * (size_t)d;
    float *q = (float *)test_alloc(n_elements * sizeof *q), sinks[64];
    double *expected = (double *)test_alloc((size_t)(SAMPLED_ROWS * d) * sizeof *expected);
    for (size_t i = 0; i < n_elements; i++) q[i] = draw(&random);
    for (int i = 0; i < 64; i++) sinks[i] = row->sink;
    tqkv_attention a = test_attention(&keys, &values, n_heads, row->n_queries, row->end);
    a.window = row->window;
    a.softcap = row->softcap;
    a.sinks = row->sink != 0.0f ? sinks : NULL;
    size_t rows[SAMPLED_ROWS] = {0, n_rows - 1}; /* the first, the last, and any */
    for (int i = 2; i < SAMPLED_ROWS; i++) rows[i] = (size_t)data_below(&random, (int)n_rows);
    for (int i = 0; i < SAMPLED_ROWS; i++)
        expect_row(&a, (int)rows[i] % n_heads, (int)rows[i] / n_heads, q + rows[i] * (size_t)d, expected + i * d);
    printf("%s-%s %d/%d heads of %d, %d queries, %d positions to %lld, window %d, mean %g, scores %g, sink %g, cap %g:",
           tqkv_format_name(row->keys), tqkv_format_name(row->values), n_heads, row->n_kv_heads, d, row->n_queries,
           row->n_positions, (long long)row->end, row->window, (double)row->mean, (double)row->sigma, (double)row->sink,
           (double)row->softcap);
    attend_on_all(&a, q, n_elements, rows, expected, row->sigma);
    test_store_free(&keys);
    test_store_free(&values);
    free(q);
    free(expected);
}

static int smaller(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

/* 2^(0 to bits), each power as likely as the others, plus something below it. */
static int draw_size(data_random *random, int bits)
{
    const int power = 1 << data_below(random, bits);
    return power + data_below(random, power + 1);
}

static long_row random_row(int index)
{
    data_random random = {(first_seed << 32) + (uint64_t)index};
    long_row row;
    memset(&row, 0, sizeof row);
    row.seed = data_bits(&random);
    row.keys = test_formats[index / TEST_FORMATS % TEST_FORMATS];
    row.values = test_formats[index % TEST_FORMATS];
    row.head_dim = 32 << data_below(&random, 4);
    row.n_positions = smaller(32768 * (int64_t)draw_size(&random, 5) + data_below(&random, 32768), LONGEST);
    const int64_t values = (int64_t)row.n_positions * row.head_dim;
    row.n_kv_heads = values > MOST_VALUES ? 1 : smaller(draw_size(&random, 6), MOST_VALUES / values);
    int64_t rows = MOST_MULTIPLY_ADDS / (values * row.n_kv_heads); /* queries x group */
    if (rows < 1) rows = 1;
    row.group = smaller(smaller(draw_size(&random, 6), 64 / row.n_kv_heads), rows);
    row.n_queries = smaller(smaller(draw_size(&random, 9), 512), rows / row.group);
    if (index % 10 == 7) { /* one head, whose queries may be many within the bound */
        row.head_dim = 32;
        row.n_positions = 32768 + data_below(&random, 32768);
        row.n_kv_heads = row.group = 1;
        row.n_queries = 100 + data_below(&random, 413);
    }
    row.end = row.n_positions + (index % 5 == 4 ? data_below(&random, 2 * row.n_positions) : 0);
    row.window = index % 6 == 2 ? 1 + data_below(&random, row.n_positions) : 0;
    row.mean = (float)data_below(&random, 5);
    row.sigma = index % 3 == 0 ? 1.0f : index % 3 == 1 ? 3.0f : 10.0f;
    row.sink = index % 4 == 1 ? 2.0f : 0.0f;
    row.softcap = index % 8 == 3 ? 20.0f : 0.0f;
    return row;
}

static long_row small_row(int index)
{
    long_row row = random_row(index);
    row.keys = test_formats[index % TEST_FORMATS];
    row.values = test_formats[(index + 1 + index / 8) % TEST_FORMATS];
    row.head_dim = 32 << index % 2;
    row.n_positions = 65536;
    row.n_kv_heads = row.group = 1 + index / 2 % 2;
    row.n_queries = 1 + index % 3;
    row.end = row.n_positions + (index % 5 == 4 ? 77777 : 0);
    row.window = index % 6 == 2 ? 40000 : 0;
    return row;
}

/* ---- Bits in company ---- */

static attend_row company_row(int index, data_random *random)
{
    attend_row row = attend_default_row(test_formats[index / TEST_FORMATS % TEST_FORMATS],
                                        test_formats[index % TEST_FORMATS], 32 << data_below(random, 4));
    row.n_queries = 1 + smaller(draw_size(random, 9), 512);
    row.n_kv_heads = 1 + data_below(random, 3);
    row.group = 1 + data_below(random, 4);
    row.key_capacity = row.value_capacity = row.n_queries + 1 + data_below(random, 6000);
    row.key_ring = row.value_ring = data_below(random, 3) == 0;
    row.end = row.key_capacity + (row.key_ring ? data_below(random, 9000) : 0);
    row.window = data_below(random, 4) == 0 ? 1 + data_below(random, 3000) : 0;
    row.softcap = data_below(random, 5) == 0 ? 3.0f : 0.0f;
    row.sinks = data_below(random, 2) ? SINKS_SOME : SINKS_NONE;
    row.bits_alone = true;
    return row;
}

/* In every way, with every set: see attend_check_ways. */
static void check_company(const void *parameters)
{
    const int index = *(const int *)parameters;
    data_random random = {(first_seed << 32) + (uint64_t)index};
    const attend_row row = company_row(index, &random);
    attend_problem problem;
    attend_set_up(&problem, &row);
    attend_check_ways(&problem, data_bits(&random), true);
    attend_tear_down(&problem);
}

/* ---- The program ---- */

/* The table of docs/robustness.md: one long float sum had errors of up to 1.4e-3 here. */
static void add_lengths(void)
{
    static const long_row rows[] = {
        {TQKV_I8, TQKV_F16, 128, 8, 4, 128, 32768, 0, 32768, 1.0f, 3.0f, 0.0f, 0.0f, 1},
        {TQKV_I8, TQKV_F16, 32, 1, 8, 512, 131072, 0, 131072, 1.0f, 3.0f, 0.0f, 0.0f, 1},
        {TQKV_I8, TQKV_F16, 32, 1, 8, 512, 1048576, 0, 1048576, 1.0f, 3.0f, 0.0f, 0.0f, 1},
        {TQKV_I8, TQKV_F16, 32, 64, 1, 1, 131072, 0, 131072, 1.0f, 3.0f, 0.0f, 0.0f, 1},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        test_add(check_error, &rows[i], sizeof *rows, "long/many/%d", (int)i);
    for (int power = 10; power <= 20; power += 2) {
        const long_row row = {TQKV_I8, TQKV_F16, 64, 1, 8, 1, 1 << power, 0, 1 << power, 1.0f, 3.0f, 0.0f, 0.0f, 1};
        const long_row codes = {TQKV_TQ4, TQKV_I8, 64, 1, 8, 1, 1 << power, 0, 1 << power, 1.0f, 3.0f, 0.0f, 0.0f, 1};
        test_add(check_error, &row, sizeof row, "long/lengths/%d", row.n_positions);
        test_add(check_error, &codes, sizeof codes, "long/lengths_of_codes/%d", row.n_positions);
    }
}

static void add_random(void)
{
    for (int i = 0; i < CASES; i++) {
        const long_row row = random_row(i);
        test_add(check_error, &row, sizeof row, "long/random/%03d", i);
    }
    for (int i = 0; i < SMALL_CASES; i++) {
        const long_row row = small_row(i);
        test_add(check_error, &row, sizeof row, "long/small/%02d", i);
    }
    for (int i = 0; i < COMPANIES; i++) test_add(check_company, &i, sizeof i, "long/company/%03d", i);
}

int main(int argc, char **argv)
{
    const bool list = argc > 1 && strcmp(argv[1], "--list") == 0;
    int at = list ? 2 : 1;
    if (at + 1 < argc && strcmp(argv[at], "--seed") == 0) {
        first_seed = strtoull(argv[at + 1], NULL, 10);
        at += 2;
    }
    printf("seed %llu\n", (unsigned long long)first_seed);
    add_lengths();
    add_random();
    const int status = test_run_selected(list, argc - at, argv + at);
    for (int i = 0; i < ISAS; i++)
        if (worst[i] > 0.0) printf("%s: largest relative L2 %.3g\n", isas[i], worst[i]);
    return status;
}

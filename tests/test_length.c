/* Attention's error at any length; the scratch and the stack that calls take. */
#include "attend_checks.h"
#include "cache_fixture.h"

#include <fenv.h>
#include <pthread.h>

/* ---- The error at a length where one float sum would lose five digits ---- */

typedef struct length_row {
    tqkv_format keys, values;
    int n_positions;
} length_row;

static void check_length(const void *parameters)
{
    const length_row *row = (const length_row *)parameters;
    const int n = row->n_positions, d = 32;
    tqkv_store keys = test_store(row->keys, d, 1, n, false), values = test_store(row->values, d, 1, n, false);
    float *rows = test_rows(31, DATA_GAUSSIAN, n, d), *q = test_rows(32, DATA_GAUSSIAN, 1, d), out[32];
    double expected[32];
    CHECK_RESULT(tqkv_encode(&keys, rows, n, 0), TQKV_OK);
    for (int i = 0; i < n * d; i++) rows[i] += 1.0f; /* a mean: errors of the same sign */
    CHECK_RESULT(tqkv_encode(&values, rows, n, 0), TQKV_OK);
    tqkv_attention a = test_attention(&keys, &values, 1, 1, n);
    CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
    reference_attend(&a, q, expected);
    const double error = reference_relative_error(out, expected, 32);
    /* As at 1000; one long sum of floats: 1e-5. */
    const double allowed = reference_in_integers(row->keys) ? reference_attention_tolerance(&a, 1.0) : 2e-6;
    CHECK(error <= allowed, "relative error %.3g at %d positions", error, n);
    test_store_free(&keys);
    test_store_free(&values);
    free(rows);
    free(q);
}

/* Equal positions: all additions of a long float sum would be rounded to the same side. */
static void check_equal(const void *parameters)
{
    const tqkv_format format = *(const tqkv_format *)parameters;
    const int n = 1 << 15, d = 32, heads = 8;
    tqkv_store keys = test_store(TQKV_TQ4, d, 1, n, false), values = test_store(format, d, 1, n, false);
    float row[32], q[8 * 32] = {0}, out[8 * 32];
    double expected[32];
    for (int i = 0; i < d; i++) row[i] = sinf((float)i * 1.7f) + 1.3f;
    for (int p = 0; p < n; p++) {
        CHECK_RESULT(tqkv_encode(&keys, row, 1, p), TQKV_OK);
        CHECK_RESULT(tqkv_encode(&values, row, 1, p), TQKV_OK);
    }
    const tqkv_attention a = test_attention(&keys, &values, heads, 1, n);
    CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
    reference_decode_as(REFERENCE_INTEGERS, &values, 0, 0, expected);
    for (int h = 0; h < heads; h++) {
        const double error = reference_relative_error(out + h * d, expected, (size_t)d);
        CHECK(error <= 5e-6, "relative error %.3g", error);
    }
    test_store_free(&keys);
    test_store_free(&values);
}

/* Two keys parallel to the query, all others 0: scores of 50 and a little less, of a standard deviation of 8.7. All
 * products of a constant row are equal, so a long chain of additions rounds all of them to the same side. */
typedef struct parallel_row {
    tqkv_format keys;
    int head_dim;
    data_kind kind;
} parallel_row;

enum { PARALLEL = 64, PARALLEL_TRIALS = 40 };

static double parallel_error(const parallel_row *row, int trial, tqkv_attention *a, float *rows, float *q)
{
    const int d = row->head_dim;
    float out[32];
    double expected[32], square = 0.0;
    const float first = 1.0f + 0.02f * (float)trial, second = first * (1.0f - 0.0005f * (float)trial);
    memset(rows, 0, (size_t)PARALLEL * (size_t)d * sizeof *rows);
    data_rows(51 + (uint64_t)trial, row->kind, rows, 1, d);
    for (int i = 0; i < d; i++) {
        rows[d + i] = second * rows[i];
        rows[i] *= first;
    }
    CHECK_RESULT(tqkv_encode(a->keys, rows, PARALLEL, 0), TQKV_OK);
    CHECK_RESULT(tqkv_decode(a->keys, 0, 1, TQKV_ROTATED, q), TQKV_OK);
    for (int i = 0; i < d; i++) square += (double)q[i] * (double)q[i];
    const double factor = (50.0 - 0.01 * trial) * sqrt((double)d) / square;
    for (int i = 0; i < d; i++) q[i] = (float)(factor * (double)q[i]);
    CHECK_RESULT(tqkv_attend(a, q, out), TQKV_OK);
    reference_attend(a, q, expected);
    return reference_relative_error(out, expected, 32);
}

static void check_parallel(const void *parameters)
{
    const parallel_row *row = (const parallel_row *)parameters;
    tqkv_store keys = test_store(row->keys, row->head_dim, 1, PARALLEL, false);
    tqkv_store values = test_store(TQKV_F16, 32, 1, PARALLEL, false);
    float *rows = (float *)test_alloc((size_t)PARALLEL * (size_t)row->head_dim * sizeof(float));
    float of_values[PARALLEL * 32] = {0}, q[1024];
    double worst = 0.0;
    of_values[0] = of_values[32 + 1] = 1.0f;
    CHECK_RESULT(tqkv_encode(&values, of_values, PARALLEL, 0), TQKV_OK);
    tqkv_attention a = test_attention(&keys, &values, 1, 1, PARALLEL);
    a.query_basis = TQKV_ROTATED;
    for (int trial = 0; trial < PARALLEL_TRIALS; trial++) {
        const double error = parallel_error(row, trial, &a, rows, q);
        if (error > worst) worst = error;
    }
    CHECK(worst <= reference_attention_tolerance(&a, 8.7), "relative error %.3g", worst);
    free(rows);
    test_store_free(&keys);
    test_store_free(&values);
}

/* A key 1000 below the best one does not show, whatever its value. */
static void check_far_below(NO_ROW)
{
    const int d = 32;
    tqkv_store keys = test_store(TQKV_F16, d, 1, 2, false), values = test_store(TQKV_I8, d, 1, 2, false);
    float rows[64] = {0}, q[32] = {0}, out[32];
    rows[0] = 1000.0f;
    q[0] = 1.0f;
    CHECK_RESULT(tqkv_encode(&keys, rows, 2, 0), TQKV_OK);
    for (int i = 0; i < d; i++) {
        rows[i] = 1.0f;
        rows[d + i] = 1e37f;
    }
    CHECK_RESULT(tqkv_encode(&values, rows, 2, 0), TQKV_OK);
    tqkv_attention a = test_attention(&keys, &values, 1, 1, 2);
    a.scale = 1.0f;
    CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
    for (int i = 0; i < d; i++) CHECK(out[i] > 0.9f && out[i] < 1.1f, "out[%d] is %g", i, (double)out[i]);
    test_store_free(&keys);
    test_store_free(&values);
}

/* ---- Large scores: a float's last bits become a share of the weights ---- */

typedef struct scores_row {
    tqkv_format keys;
    int head_dim;
    double sigma; /* standard deviation of the scores */
} scores_row;

/* Every other key gets the same product with q, four standard deviations: these scores tie but for their errors, which
   is the worst case. One key far above the others takes all weight, and no error shows. keys: [n][d] */
static void make_ties(const float *q, int n, int d, float *keys)
{
    double length = 0.0;
    for (int i = 0; i < d; i++) length += (double)q[i] * (double)q[i];
    for (int j = 0; j < n; j += 2) {
        double product = 0.0;
        for (int i = 0; i < d; i++) product += (double)q[i] * (double)keys[j * d + i];
        const double missing = (4.0 * sqrt(length) - product) / length;
        for (int i = 0; i < d; i++) keys[j * d + i] += (float)(missing * (double)q[i]);
    }
}

static void check_score_error(const void *parameters)
{
    enum { N = 200 };
    const scores_row *row = (const scores_row *)parameters;
    const int d = row->head_dim;
    tqkv_store keys = test_store(row->keys, d, 1, N, false), values = test_store(TQKV_F16, d, 1, N, false);
    float out[REFERENCE_MAX_DIM];
    double expected[REFERENCE_MAX_DIM];
    tqkv_attention a = test_attention(&keys, &values, 1, 1, N);
    a.scale = (float)(row->sigma / sqrt((double)d)); /* of queries and keys with variance 1 */
    for (uint64_t seed = 0; seed < 4; seed++) {
        float *rows = test_rows(40 + seed, DATA_GAUSSIAN, N, d), *q = test_rows(50 + seed, DATA_GAUSSIAN, 1, d);
        CHECK_RESULT(tqkv_encode(&values, rows, N, 0), TQKV_OK);
        make_ties(q, N, d, rows);
        CHECK_RESULT(tqkv_encode(&keys, rows, N, 0), TQKV_OK);
        CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
        reference_attend(&a, q, expected);
        const double error = reference_relative_error(out, expected, (size_t)d);
        CHECK(error <= reference_attention_tolerance(&a, row->sigma), "relative error %.3g", error);
        free(rows);
        free(q);
    }
    test_store_free(&keys);
    test_store_free(&values);
}

/* Sinks above all scores: the output goes to 0, never to NaN. Other heads have no sink. */
static void check_sinks_above(const void *parameters)
{
    const float sink = *(const float *)parameters;
    for (int i = 0; i < 8; i++) {
        attend_row row = attend_default_row(test_formats[i], test_formats[(i + 3) % 8], 32 << i % 3);
        row.n_queries = 1 + 4 * i;
        row.scale = i % 2 ? -20.0f : 0.0f; /* far below 0, too */
        row.sinks = SINKS_MINUS_INFINITY;
        row.bits_alone = true;
        attend_problem problem;
        attend_set_up(&problem, &row);
        for (int h = 1; h < 4; h += 2) problem.sinks[h] = sink;
        feclearexcept(FE_ALL_EXCEPT);
        CHECK_RESULT(tqkv_attend(&problem.attention, problem.q, problem.out), TQKV_OK);
        CHECK(!fetestexcept(FE_INVALID | FE_DIVBYZERO), "an exception");
        for (size_t j = 0; j < problem.n_rows * problem.head_dim; j++) {
            const bool has_sink = j / problem.head_dim % 2 != 0;
            const float x = problem.out[j];
            CHECK(has_sink ? x == 0.0f : x - x == 0.0f, "out[%d] is %g", (int)j, (double)x);
        }
        attend_tear_down(&problem);
    }
}

/* ---- Scratch: at most 21 MiB, whatever the numbers of queries and positions ---- */

typedef struct scratch_row {
    int head_dim, n_kv_heads, group, n_queries, n_positions;
    bool hook;
} scratch_row;

static void check_scratch(const void *parameters)
{
    const scratch_row *row = (const scratch_row *)parameters;
    const size_t n = (size_t)row->n_queries * (size_t)(row->n_kv_heads * row->group * row->head_dim);
    tqkv_store store = test_store(TQKV_TQ4, row->head_dim, row->n_kv_heads, row->n_positions, false);
    float *q = (float *)test_alloc_filled(n * sizeof(float), 0), *out = (float *)test_alloc(n * sizeof(float));
    counting counter = {0, 0, 0, 0, 0};
    int calls = 0;
    memset(store.codes, 0, store.codes_size);
    memset(store.norms, 0, store.norms_size);
    tqkv_attention a = test_attention(&store, &store, row->n_kv_heads * row->group, row->n_queries, row->n_positions);
    a.allocator = counting_allocator(&counter);
    a.parallel.run = row->hook ? test_run_backwards : NULL;
    a.parallel.user = &calls;
    CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
    CHECK(counter.largest <= 21u << 20, "%d bytes of scratch", (int)counter.largest);
    CHECK_NO_LEAK(&counter);
    test_store_free(&store);
    free(q);
    free(out);
}

/* ---- Stack: at most 64 KiB, in a thread that has 96 ---- */

#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__linux__)
enum { STACK = 98304, STACK_LIMIT = 65536 };

typedef struct stack_row {
    tqkv_format keys, values;
    int head_dim;
} stack_row;

typedef struct stack_thread {
    const stack_row *row;
    stream snapshot;
    float *rows, *q, *out;
} stack_thread;

/* Every call with a frame of any size. 24 queries of 2 heads: more rows than registers hold. */
static void *call_all(void *argument)
{
    stack_thread *t = (stack_thread *)argument;
    const cache_row shape = {t->row->keys, t->row->values, t->row->head_dim, 100, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&shape, NULL);
    tqkv_cache *cache = NULL, *loaded = NULL, *learning = NULL;
    desc.softcap = 5.0f;
    desc.key_center = t->rows;
    desc.value_center = t->q;
    bool good = tqkv_cache_create(&desc, &cache) == TQKV_OK;
    desc.key_center = desc.value_center = NULL;
    good = good && tqkv_cache_append(cache, t->rows, t->rows, 90) == TQKV_OK;
    good = good && tqkv_cache_attend(cache, t->q, 24, t->out) == TQKV_OK;
    desc.calibrate = 16;
    desc.exact_last = 20;
    good = good && tqkv_cache_create(&desc, &learning) == TQKV_OK;
    good = good && tqkv_cache_append(learning, t->rows, t->rows, 90) == TQKV_OK;
    good = good && tqkv_cache_attend(learning, t->q, 24, t->out) == TQKV_OK;
    desc.calibrate = desc.exact_last = 0;
    good = good && tqkv_cache_save(cache, stream_write, &t->snapshot) == TQKV_OK;
    good = good && tqkv_cache_load(&desc, stream_read, &t->snapshot, &loaded) == TQKV_OK;
    good = good && tqkv_decode(test_keys(cache), 0, 24, TQKV_ORIGINAL, t->out) == TQKV_OK;
    good = good && tqkv_probe(test_keys(cache), t->rows, 24, t->out) == TQKV_OK;
    good = good && tqkv_measure(test_keys(cache), t->rows, 24, (tqkv_quality *)(void *)t->out) == TQKV_OK;
    good = good && tqkv_calibrate(test_keys(cache), t->rows, 24, t->q, 2 * CACHE_HEADS, 12, TQKV_PAIRS_NONE, t->out,
                                  NULL) == TQKV_OK;
    good = good && tqkv_logit_noise(test_keys(cache), t->rows, 24, t->q, 2 * CACHE_HEADS, 12,
                                    (double *)(void *)t->out) == TQKV_OK;
    tqkv_cache_destroy(cache);
    tqkv_cache_destroy(loaded);
    tqkv_cache_destroy(learning);
    return good ? t : NULL;
}

static void check_stack(const void *parameters)
{
    stack_thread t;
    memset(&t, 0, sizeof t);
    t.row = (const stack_row *)parameters;
    t.snapshot = stream_empty();
    t.rows = test_rows(1, DATA_GAUSSIAN, 90 * CACHE_HEADS, t.row->head_dim);
    t.q = test_rows(2, DATA_GAUSSIAN, 24 * 2 * CACHE_HEADS, t.row->head_dim);
    t.out = (float *)test_alloc(sizeof(float) * (size_t)(24 * 2 * CACHE_HEADS * t.row->head_dim));
    unsigned char *stack = NULL;
    pthread_attr_t attributes;
    pthread_t thread;
    void *result = NULL;
    if (posix_memalign((void **)&stack, 4096, STACK) != 0) exit(2);
    memset(stack, 0xa5, STACK);
    pthread_attr_init(&attributes);
    CHECK(pthread_attr_setstack(&attributes, stack, STACK) == 0, "the stack was refused");
    if (pthread_create(&thread, &attributes, call_all, &t) != 0) exit(2);
    pthread_join(thread, &result);
    CHECK(result == &t, "a call failed");
    int untouched = 0;
    while (untouched < STACK && stack[untouched] == 0xa5) untouched++;
    CHECK(STACK - untouched <= STACK_LIMIT, "%d bytes of stack", STACK - untouched);
    pthread_attr_destroy(&attributes);
    free(stack);
    stream_free(&t.snapshot);
    free(t.rows);
    free(t.q);
    free(t.out);
}

static void add_stack(void)
{
    static const int with_matrix[] = {80, 96, 576};
    for (int i = 0; i < 31; i++) {
        const int d = i % 9 < 6 ? test_head_dims[(i + i / TEST_FORMATS) % 6] : with_matrix[i % 9 - 6];
        const stack_row row = {test_formats[i % TEST_FORMATS], test_formats[(i + 1 + i / TEST_FORMATS) % TEST_FORMATS],
                               d};
        test_add(check_stack, &row, sizeof row, "attend/stack/%s-%s/%d", tqkv_format_name(row.keys),
                 tqkv_format_name(row.values), row.head_dim);
    }
}
#else
static void add_stack(void) {}
#endif

void test_length_cases(void)
{
    static const length_row lengths[] = {{TQKV_TQ8, TQKV_F16, (1 << 18) + 77}, {TQKV_TQ4, TQKV_TQ4, 1 << 17}};
    for (int i = 0; i < 2; i++)
        test_add(check_length, &lengths[i], sizeof *lengths, "attend/length/%s-%s/%d",
                 tqkv_format_name(lengths[i].keys), tqkv_format_name(lengths[i].values), lengths[i].n_positions);
    for (int i = 0; i < TEST_FORMATS; i++)
        test_add(check_equal, &test_formats[i], sizeof *test_formats, "attend/equal/%s",
                 tqkv_format_name(test_formats[i]));
    for (int i = 0; i < 4 * 5; i++) {
        static const tqkv_format formats[] = {TQKV_F16, TQKV_TQ8, TQKV_TQ4, TQKV_TQ2};
        static const int dims[] = {128, 192, 256, 512, 1024};
        const parallel_row row = {formats[i / 5], dims[i % 5], i / 5 ? DATA_GAUSSIAN : DATA_CONSTANT};
        test_add(check_parallel, &row, sizeof row, "attend/parallel/%s/%d", tqkv_format_name(row.keys), row.head_dim);
    }
    test_add(check_far_below, NULL, 0, "attend/far_below");
    for (int i = 0; i < 18; i++) {
        static const tqkv_format formats[] = {TQKV_F16, TQKV_I8, TQKV_TQ8}; /* coarser ones do not keep ties */
        static const double sigmas[] = {10.0, 100.0, 1000.0};
        const scores_row row = {formats[i % 3], test_head_dims[(i + i / 6) % 6], sigmas[i / 6]};
        test_add(check_score_error, &row, sizeof row, "attend/score_error/%g/%s/%d", row.sigma,
                 tqkv_format_name(row.keys), row.head_dim);
    }
    static const float sinks[] = {1e4f, 3e38f};
    for (int i = 0; i < 2; i++)
        test_add(check_sinks_above, &sinks[i], sizeof *sinks, "attend/sinks_above/%g", (double)sinks[i]);
    static const scratch_row scratch[] = {{128, 8, 4, 512, 100, true},   {64, 1, 1, 1, 1 << 17, true},
                                          {128, 4, 4, 3, 40000, true},   {1024, 31, 1, 8, 4100, true},
                                          {32, 8, 32, 512, 100, false},  {128, 31, 8, 8, 4100, true},
                                          {512, 2, 8, 100, 5000, false}, {128, 127, 8, 8, 2049, true}};
    for (size_t i = 0; i < sizeof scratch / sizeof *scratch; i++)
        test_add(check_scratch, &scratch[i], sizeof *scratch, "attend/scratch/%dx%dx%d/%d", scratch[i].n_queries,
                 scratch[i].n_kv_heads * scratch[i].group, scratch[i].head_dim, scratch[i].n_positions);
    add_stack();
}

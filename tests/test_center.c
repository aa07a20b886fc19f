/* Centres: the mean, the measure, and which a cache takes. Histories have them in encoding, attention, caches. */
#include "cache_fixture.h"
#include "counting.h"
#include "data.h"
#include "reference.h"
#include "runner.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <fenv.h>
#include <math.h>

enum { D = 64, HEADS = 2, TOKENS = 40 };

/* Rows of HEADS heads, each with a constant part of `size` standard deviations. */
static float *biased_rows(int n_tokens, int head_dim, float size)
{
    float *rows = test_rows(5, DATA_GAUSSIAN, n_tokens * HEADS, head_dim);
    float *bias = test_rows(6, DATA_GAUSSIAN, HEADS, head_dim);
    for (int i = 0; i < n_tokens * HEADS * head_dim; i++) rows[i] += size * bias[i % (HEADS * head_dim)];
    free(bias);
    return rows;
}

typedef struct measure_row {
    tqkv_format format;
    int head_dim;
    float bias;
    bool centered;
} measure_row;

/* How many values of a row are beyond the last boundary at the factors that encoding chooses; scaled: [head_dim] */
static int count_beyond(const tqkv_store *store, const float *scaled)
{
    const int d = store->head_dim, block = reference_block(store->format, d);
    const float last = reference_last_boundary(store->format);
    uint8_t codes[REFERENCE_MAX_DIM];
    float factor = 1.0f, centroids[REFERENCE_MAX_DIM];
    int beyond = 0;
    for (int first = 0; first < d; first += block) {
        if (reference_is_codebook(store->format))
            factor = reference_search(reference_bits(store->format), scaled, first, block, codes, centroids);
        for (int i = first; i < first + block; i++) beyond += fabsf(reference_multiply(scaled[i], factor)) > last;
    }
    return beyond;
}

/* The measure of one head by plain sums over what encode, decode and probe give. */
static tqkv_quality plain_quality(const tqkv_store *store, const float *rows, const float *scaled, int head)
{
    const int d = store->head_dim;
    const double n = (double)TOKENS;
    double squares = 0.0, noise = 0.0, mean = 0.0, differs = 0.0, second = 0.0, fourth = 0.0, beyond = 0.0;
    for (int i = 0; i < d; i++) {
        double sum = 0.0;
        for (int t = 0; t < TOKENS; t++) sum += (double)rows[(t * HEADS + head) * d + i];
        mean += sum / n * (sum / n);
        for (int t = 0; t < TOKENS; t++) {
            const double x = (double)rows[(t * HEADS + head) * d + i], v = (double)scaled[(t * HEADS + head) * d + i];
            squares += x * x;
            differs += (x - sum / n) * (x - sum / n);
            second += v * v;
            fourth += v * v * v * v;
        }
    }
    for (int t = 0; t < TOKENS; t++) {
        beyond += count_beyond(store, scaled + (t * HEADS + head) * d);
        double decoded[REFERENCE_MAX_DIM];
        reference_decode(store, head, t, decoded);
        for (int i = 0; i < d; i++) noise += pow(decoded[i] - (double)rows[(t * HEADS + head) * d + i], 2.0);
    }
    const double values = n * d;
    const tqkv_quality q = {mean * n / squares, noise / differs, values * fourth / (second * second), beyond / values};
    return q;
}

static void check_close(double got, double wanted, const char *what)
{
    CHECK(fabs(got - wanted) <= 1e-3 * fabs(wanted), "%s is %.6g, not %.6g", what, got, wanted);
}

static void check_measure(const void *parameters)
{
    const measure_row *row = (const measure_row *)parameters;
    const int d = row->head_dim;
    tqkv_store store = test_store(row->format, d, HEADS, TOKENS, false);
    float *rows = biased_rows(TOKENS, d, row->bias), center[HEADS * REFERENCE_MAX_DIM];
    float *scaled = (float *)test_alloc(sizeof(float) * (size_t)(TOKENS * HEADS * d));
    CHECK_RESULT(tqkv_calibrate(&store, rows, TOKENS, NULL, 0, 0, TQKV_PAIRS_NONE, center, NULL), TQKV_OK);
    store.center = row->centered ? center : NULL;
    CHECK_RESULT(tqkv_encode(&store, rows, TOKENS, 0), TQKV_OK);
    CHECK_RESULT(tqkv_probe(&store, rows, TOKENS, scaled), TQKV_OK);
    tqkv_store shape = store;
    tqkv_quality out[HEADS];
    shape.codes = NULL;
    shape.norms = NULL;
    CHECK_RESULT(tqkv_measure(&shape, rows, TOKENS, out), TQKV_OK);
    for (int head = 0; head < HEADS; head++) {
        const tqkv_quality wanted = plain_quality(&store, rows, scaled, head);
        check_close(out[head].mean_share, wanted.mean_share, "mean_share");
        check_close(out[head].error, wanted.error, "error");
        check_close(out[head].kurtosis, wanted.kurtosis, "kurtosis");
        CHECK(out[head].beyond == wanted.beyond, "beyond is %g, not %g", out[head].beyond, wanted.beyond);
    }
    CHECK_RESULT(tqkv_measure(&shape, rows, 0, out), TQKV_OK);
    CHECK(out[0].mean_share == 0.0 && out[0].error == 0.0 && out[0].kurtosis == 0.0 && out[0].beyond == 0.0,
          "the measure of nothing is not zeros");
    free(rows);
    free(scaled);
    test_store_free(&store);
}

/* Rows that are all equal, rows of zeros, rows that overflow: no division by zero, no NaN. */
static void check_measure_edges(const void *parameters)
{
    (void)parameters;
    float rows[3 * D] = {0};
    tqkv_store shape = test_store(TQKV_TQ2, D, 1, 1, false);
    tqkv_quality out;
    CHECK_RESULT(tqkv_measure(&shape, rows, 3, &out), TQKV_OK);
    CHECK(out.mean_share == 0.0 && out.error == 0.0 && out.kurtosis == 0.0, "zeros measure %g %g %g", out.mean_share,
          out.error, out.kurtosis);
    for (int i = 0; i < 3 * D; i++) rows[i] = 0.125f * (float)(i % D);
    CHECK_RESULT(tqkv_measure(&shape, rows, 3, &out), TQKV_OK);
    CHECK(out.mean_share == 1.0 && isinf(out.error), "equal rows measure %g %g", out.mean_share, out.error);
    for (int i = 0; i < 3 * D; i++) rows[i] = 1e20f * (float)(i * 37 % 101 - 50); /* norms overflow */
    CHECK_RESULT(tqkv_measure(&shape, rows, 3, &out), TQKV_OK);
    CHECK(isinf(out.error), "rows that decode to NaN have an error of %g", out.error);
    test_store_free(&shape);
    float center[D];
    for (int i = 0; i < 3 * D; i++) rows[i] = 3e38f;
    for (int i = 0; i < D; i++) center[i] = -3e38f; /* what is left overflows */
    for (int i = 0; i < TEST_FORMATS; i++) {
        shape = test_store(test_formats[i], D, 1, 1, false);
        shape.center = center;
        CHECK_RESULT(tqkv_measure(&shape, rows, 3, &out), TQKV_OK);
        CHECK(fabs(out.mean_share - 1.0) < 1e-12 && isinf(out.error) && out.kurtosis >= 0.0 && out.beyond >= 0.0,
              "%s: rows that overflow measure %g %g %g %g", tqkv_format_name(shape.format), out.mean_share, out.error,
              out.kurtosis, out.beyond);
        test_store_free(&shape);
    }
}

/* A bias a hundred times as large as the rest: with a centre the error is that of rows without a bias. */
static void check_gain(const void *parameters)
{
    const tqkv_format format = *(const tqkv_format *)parameters;
    tqkv_store shape = test_store(format, D, HEADS, 1, false);
    float *plain = biased_rows(TOKENS, D, 0.0f), *biased = biased_rows(TOKENS, D, 100.0f), center[HEADS * D];
    tqkv_quality before[HEADS], without[HEADS], with[HEADS];
    CHECK_RESULT(tqkv_calibrate(&shape, biased, TOKENS, NULL, 0, 0, TQKV_PAIRS_NONE, center, NULL), TQKV_OK);
    CHECK_RESULT(tqkv_measure(&shape, plain, TOKENS, before), TQKV_OK);
    CHECK_RESULT(tqkv_measure(&shape, biased, TOKENS, without), TQKV_OK);
    shape.center = center;
    CHECK_RESULT(tqkv_measure(&shape, biased, TOKENS, with), TQKV_OK);
    for (int h = 0; h < HEADS; h++) {
        CHECK(with[h].error < 1.1 * before[h].error, "with a centre %g, without a bias %g", with[h].error,
              before[h].error);
        CHECK(without[h].mean_share > 0.999, "mean_share is %g", without[h].mean_share);
        if (format != TQKV_F16)
            CHECK(without[h].error > 100.0 * with[h].error, "no centre: %g, centre: %g", without[h].error,
                  with[h].error);
    }
    free(plain);
    free(biased);
    test_store_free(&shape);
}

/* A cache copies its centres; a fork may be asked for the same, and for no other. */
static void check_fork(const void *parameters)
{
    (void)parameters;
    const cache_row row = {TQKV_TQ4, TQKV_TQ3, D, 12, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    float *centers = test_rows(7, DATA_GAUSSIAN, 2 * CACHE_HEADS, D), *values = centers + CACHE_HEADS * D;
    tqkv_cache *plain = cache_make(&row, &desc), *cache = cache_given(&desc, centers, NULL, values, NULL), *fork = NULL;
    REQUIRE(cache && plain, "no cache");
    CHECK(tqkv_cache_bytes(cache) == tqkv_cache_bytes(plain), "centres are counted");
    CHECK(test_keys(cache)->center != centers, "the centre is not a copy");
    cache_append_seed(cache, 3, 11, D);
    CHECK_RESULT(tqkv_cache_truncate(cache, 0), TQKV_OK);
    CHECK(test_values(cache)->center && test_values(cache)->center[0] == values[0], "the centre is gone");
    desc.value_center = values;
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), TQKV_OK);
    tqkv_cache_destroy(fork);
    values[CACHE_HEADS * D - 1] += 1.0f;
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), TQKV_INVALID_ARGUMENT);
    desc.value_center = NULL;
    desc.key_scale = centers; /* there is none */
    for (int i = 0; i < CACHE_HEADS * D; i++) centers[i] = 1.0f;
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(plain);
    tqkv_cache_destroy(cache);
    free(centers);
}

/* Refused centres: no cache. */
static void check_refused(const void *parameters)
{
    (void)parameters;
    static const float bad[3] = {(float)NAN, (float)INFINITY, -(float)INFINITY};
    const cache_row row = {TQKV_TQ3, TQKV_TQ2, D, 8, false, 0, -1};
    const tqkv_cache_desc desc = cache_desc(&row, NULL);
    tqkv_cache_desc keys = desc, values = desc;
    tqkv_cache *cache;
    float *center = test_rows(7, DATA_GAUSSIAN, CACHE_HEADS, D);
    keys.key_center = values.value_center = center;
    for (int i = 0; i < 3; i++)
        for (int at = 0; at < CACHE_HEADS * D; at += CACHE_HEADS * D - 1) {
            const float good = center[at];
            center[at] = bad[i];
            CHECK_RESULT(tqkv_cache_create(&keys, &cache), TQKV_NOT_FINITE);
            CHECK_RESULT(tqkv_cache_create(&values, &cache), TQKV_NOT_FINITE);
            CHECK(!cache, "a cache with a refused centre");
            center[at] = good;
        }
    keys.key_center = values.value_center = (const float *)((uintptr_t)center + 1);
    CHECK_RESULT(tqkv_cache_create(&keys, &cache), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_cache_create(&values, &cache), TQKV_INVALID_ARGUMENT);
    free(center);
}

void test_center_cases(void)
{
    for (int d = 0; d < 6; d++)
        for (int f = 0; f < TEST_FORMATS; f++) {
            const char *name = tqkv_format_name(test_formats[f]);
            for (int i = 0; i < 4; i++) {
                const measure_row row = {test_formats[f], test_head_dims[(f + i) % 6], i % 2 ? 20.0f : 0.0f, i >= 2};
                test_add(check_measure, &row, sizeof row, "center/measure/%s/%d/%d", name, row.head_dim, i);
            }
            test_add(check_gain, &test_formats[f], sizeof *test_formats, "center/gain/%s", name);
        }
    test_add(check_measure_edges, NULL, 0, "center/measure_edges");
    const measure_row close_rows = {TQKV_I8, D, 3e6f, false}; /* they differ by a few units of the last place */
    test_add(check_measure, &close_rows, sizeof close_rows, "center/measure_close_rows");
    test_add(check_fork, NULL, 0, "center/fork");
    test_add(check_refused, NULL, 0, "center/refused");
}

/* The cache: the bytes and results of two stores, and what truncation and rings drop. */
#include "cache_fixture.h"

/* Compares the cache's answer to random queries with the reference over its stores. kv_len: positions that must be
   resident. */
static void check_attend(tqkv_cache *cache, const tqkv_cache_desc *desc, int n_queries, int kv_len)
{
    tqkv_attention a = cache_attention(cache, desc, n_queries, kv_len);
    size_t count = (size_t)(n_queries * desc->n_heads * desc->head_dim);
    float *q = test_rows(31, DATA_GAUSSIAN, n_queries * desc->n_heads, desc->head_dim);
    float *out = (float *)test_alloc_filled(count * sizeof(float), 0xff);
    double *expected = (double *)test_alloc(count * sizeof(double));
    CHECK_RESULT(tqkv_cache_attend(cache, q, n_queries, out), TQKV_OK);
    reference_attend(&a, q, expected);
    double error = reference_relative_error(out, expected, count);
    CHECK(error <= 2e-5, "end %d, %d resident: relative error %.3g", (int)a.end, kv_len, error);
    free(q);
    free(out);
    free(expected);
}

static bool is_same_row(const tqkv_store *a, const tqkv_store *b, int head, int position)
{
    return !memcmp(reference_codes_at(a, head, position), reference_codes_at(b, head, position),
                   reference_row_bytes(a->format, a->head_dim));
}

/* Appending in pieces gives the same bytes as encoding into stores. */
static void check_equals_stores(const void *parameters)
{
    const cache_row *row = (const cache_row *)parameters;
    static const int pieces[5] = {1, 7, 2, 1, 3};
    counting counter = {0, 0, 0, 0};
    tqkv_cache_desc desc = cache_desc(row, &counter);
    tqkv_cache *cache = cache_make(row, &desc);
    REQUIRE(cache, "no cache");
    tqkv_store keys = test_store(row->key_format, row->head_dim, CACHE_HEADS, row->capacity, row->ring);
    tqkv_store values = test_store(row->value_format, row->head_dim, CACHE_HEADS, row->capacity, row->ring);
    int end = 0;
    for (int i = 0; i < 5; i++) {
        float *k = cache_data(40 + (uint64_t)i, pieces[i], row->head_dim);
        float *v = cache_data(50 + (uint64_t)i, pieces[i], row->head_dim);
        CHECK_RESULT(tqkv_cache_append(cache, k, v, pieces[i]), TQKV_OK);
        CHECK_RESULT(tqkv_encode(&keys, k, pieces[i], end), TQKV_OK);
        CHECK_RESULT(tqkv_encode(&values, v, pieces[i], end), TQKV_OK);
        end += pieces[i];
        free(k);
        free(v);
        CHECK(tqkv_cache_end(cache) == end, "end is %d, not %d", (int)tqkv_cache_end(cache), end);
        int resident = end < row->capacity ? end : row->capacity;
        for (int p = end - resident; p < end; p++)
            for (int h = 0; h < CACHE_HEADS; h++) {
                CHECK(is_same_row(tqkv_cache_keys(cache), &keys, h, p), "key codes of position %d", p);
                CHECK(is_same_row(tqkv_cache_values(cache), &values, h, p), "value codes of position %d", p);
            }
        check_attend(cache, &desc, 1 + i % 2, resident);
    }
    size_t bytes = keys.codes_size + keys.norms_size + values.codes_size + values.norms_size;
    CHECK(tqkv_cache_bytes(cache) == bytes, "%d bytes, not %d", (int)tqkv_cache_bytes(cache), (int)bytes);
    tqkv_cache_destroy(cache);
    CHECK_NO_LEAK(&counter);
    test_store_free(&keys);
    test_store_free(&values);
}

static void check_options(const void *parameters)
{
    (void)parameters;
    cache_row row = {TQKV_TQ6, TQKV_TQ8, 64, 16, true, 23, -1};
    float sinks[4];
    tqkv_cache_desc desc = cache_desc(&row, NULL); /* malloc and free */
    memcpy(sinks, cache_sinks, sizeof sinks);
    desc.window = 9;
    desc.scale = 0.3f;
    desc.softcap = 4.0f;
    desc.sinks = sinks;
    tqkv_cache *cache = cache_make(&row, &desc);
    REQUIRE(cache, "no cache");
    memset(sinks, 0xff, sizeof sinks); /* the cache has its own copy */
    desc.sinks = cache_sinks;
    check_attend(cache, &desc, 3, 16);
    tqkv_cache_destroy(cache);
}

static void check_defaults(const void *parameters)
{
    (void)parameters;
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.head_dim = 128;
    desc.n_kv_heads = CACHE_HEADS;
    desc.capacity = 8;
    tqkv_cache *cache = NULL;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    REQUIRE(cache, "no cache");
    CHECK(tqkv_cache_keys(cache)->format == TQKV_I8, "keys are %d", (int)tqkv_cache_keys(cache)->format);
    CHECK(tqkv_cache_values(cache)->format == TQKV_TQ4, "values are %d", (int)tqkv_cache_values(cache)->format);
    cache_append_seed(cache, 1, 5, 128);
    desc.n_heads = CACHE_HEADS; /* what 0 means */
    check_attend(cache, &desc, 2, 5);
    tqkv_cache_destroy(cache);
    tqkv_cache_destroy(NULL);
    CHECK(tqkv_cache_end(NULL) == 0 && tqkv_cache_bytes(NULL) == 0, "NULL is no cache");
    CHECK(!tqkv_cache_keys(NULL) && !tqkv_cache_values(NULL), "NULL has no stores");
}

static void check_empty(const void *parameters)
{
    (void)parameters;
    cache_row row = {TQKV_I8, TQKV_TQ4, 32, 4, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    tqkv_cache *cache = cache_make(&row, &desc);
    REQUIRE(cache, "no cache");
    float q[2 * 4 * 32], out[2 * 4 * 32];
    data_rows(1, DATA_GAUSSIAN, q, 8, 32);
    memset(out, 0xff, sizeof out);
    CHECK_RESULT(tqkv_cache_attend(cache, q, 2, out), TQKV_OK);
    for (int i = 0; i < 2 * 4 * 32; i++)
        CHECK(out[i] == 0.0f, "element %d of an empty cache's answer is %g", i, (double)out[i]);
    CHECK_RESULT(tqkv_cache_append(cache, q, q, 0), TQKV_OK);
    CHECK(tqkv_cache_end(cache) == 0, "appending nothing moved the end");
    tqkv_cache_destroy(cache);
}

/* A linear cache refuses a run of tokens that does not fit as a whole, and then still takes a shorter one. */
static void check_full(const void *parameters)
{
    (void)parameters;
    cache_row row = {TQKV_TQ5, TQKV_TQ6, 64, 8, false, 5, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    tqkv_cache *cache = cache_make(&row, &desc);
    REQUIRE(cache, "no cache");
    stream before = stream_of_cache(cache);
    float *rows = cache_data(3, 4, 64);
    CHECK_RESULT(tqkv_cache_append(cache, rows, rows, 4), TQKV_OUT_OF_RANGE);
    stream after = stream_of_cache(cache);
    CHECK(stream_is_equal(&before, &after), "a refused append changed the cache");
    CHECK_RESULT(tqkv_cache_append(cache, rows, rows, 3), TQKV_OK);
    CHECK_RESULT(tqkv_cache_append(cache, rows, rows, 1), TQKV_OUT_OF_RANGE);
    check_attend(cache, &desc, 1, 8);
    free(rows);
    stream_free(&before);
    stream_free(&after);
    tqkv_cache_destroy(cache);
}

/* NaN in the values must leave the keys unchanged too. */
static void check_not_finite(const void *parameters)
{
    (void)parameters;
    cache_row row = {TQKV_I8, TQKV_TQ4, 64, 8, true, 11, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    tqkv_cache *cache = cache_make(&row, &desc);
    REQUIRE(cache, "no cache");
    stream before = stream_of_cache(cache);
    float *good = cache_data(3, 2, 64), *bad = cache_data(4, 2, 64);
    bad[2 * CACHE_HEADS * 64 - 1] = (float)NAN;
    CHECK_RESULT(tqkv_cache_append(cache, good, bad, 2), TQKV_NOT_FINITE);
    CHECK_RESULT(tqkv_cache_append(cache, bad, good, 2), TQKV_NOT_FINITE);
    stream after = stream_of_cache(cache);
    CHECK(stream_is_equal(&before, &after), "a refused append changed the cache");
    free(good);
    free(bad);
    stream_free(&before);
    stream_free(&after);
    tqkv_cache_destroy(cache);
}

/* ---- Truncate ---- */

static void check_truncate_linear(const void *parameters)
{
    (void)parameters;
    cache_row row = {TQKV_TQ8, TQKV_TQ5, 64, 20, false, 15, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    tqkv_cache *cache = cache_make(&row, &desc);
    REQUIRE(cache, "no cache");
    CHECK_RESULT(tqkv_cache_truncate(cache, 16), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_cache_truncate(cache, -1), TQKV_OUT_OF_RANGE);
    CHECK(tqkv_cache_end(cache) == 15, "a refused truncate moved the end to %d", (int)tqkv_cache_end(cache));
    CHECK_RESULT(tqkv_cache_truncate(cache, 15), TQKV_OK);
    CHECK_RESULT(tqkv_cache_truncate(cache, 6), TQKV_OK);
    CHECK(tqkv_cache_end(cache) == 6, "end is %d", (int)tqkv_cache_end(cache));
    check_attend(cache, &desc, 2, 6);
    cache_append_seed(cache, 60, 14, 64);
    check_attend(cache, &desc, 2, 20);
    CHECK_RESULT(tqkv_cache_truncate(cache, 0), TQKV_OK);
    cache_append_seed(cache, 61, 3, 64);
    check_attend(cache, &desc, 1, 3);
    tqkv_cache_destroy(cache);
}

/* Truncation cannot restore overwritten positions: 33 tokens in a ring of 10, truncated to 27, leave [23, 27). */
static void check_truncate_ring(const void *parameters)
{
    const cache_row *row = (const cache_row *)parameters;
    tqkv_cache_desc desc = cache_desc(row, NULL);
    tqkv_cache *cache = cache_make(row, &desc);
    REQUIRE(cache, "no cache");
    CHECK_RESULT(tqkv_cache_truncate(cache, 22), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_cache_truncate(cache, 34), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_cache_truncate(cache, 27), TQKV_OK);
    check_attend(cache, &desc, 2, 4);
    CHECK_RESULT(tqkv_cache_truncate(cache, 22), TQKV_OUT_OF_RANGE);
    cache_append_seed(cache, 70, 3, row->head_dim); /* [23, 30) */
    check_attend(cache, &desc, 2, 7);
    CHECK_RESULT(tqkv_cache_truncate(cache, 25), TQKV_OK);
    check_attend(cache, &desc, 2, 2);
    cache_append_seed(cache, 71, 25, row->head_dim); /* full again */
    check_attend(cache, &desc, 2, 10);
    CHECK_RESULT(tqkv_cache_truncate(cache, 40), TQKV_OK); /* the oldest position of a full ring: none is left */
    float q[4 * 128], out[4 * 128];
    data_rows(1, DATA_GAUSSIAN, q, 4, row->head_dim);
    CHECK_RESULT(tqkv_cache_attend(cache, q, 1, out), TQKV_OK);
    CHECK(out[0] == 0.0f, "nothing is resident, but the answer is %g", (double)out[0]);
    CHECK_RESULT(tqkv_cache_truncate(cache, 0), TQKV_OK);
    cache_append_seed(cache, 72, 4, row->head_dim);
    check_attend(cache, &desc, 1, 4);
    tqkv_cache_destroy(cache);
}

/* A run longer than the ring, appended after a truncation. */
static void check_long_run(const void *parameters)
{
    (void)parameters;
    cache_row row = {TQKV_F16, TQKV_TQ4, 32, 10, true, 33, 27};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    tqkv_cache *cache = cache_make(&row, &desc);
    REQUIRE(cache, "no cache");
    cache_append_seed(cache, 80, 37, 32);
    CHECK(tqkv_cache_end(cache) == 64, "end is %d", (int)tqkv_cache_end(cache));
    check_attend(cache, &desc, 4, 10);
    tqkv_cache_destroy(cache);
}

void test_cache_cases(void)
{
    for (int i = 0; i < 2 * TEST_FORMATS; i++) {
        cache_row row = {test_formats[i % TEST_FORMATS],
                         test_formats[(3 * i + i / TEST_FORMATS) % TEST_FORMATS],
                         test_head_dims[i % 6],
                         i % 2 ? 6 : 14,
                         i % 2 != 0,
                         0,
                         -1};
        test_add(check_equals_stores, &row, sizeof row, "cache/equals_stores/%s-%s/%d/%s",
                 tqkv_format_name(row.key_format), tqkv_format_name(row.value_format), row.head_dim,
                 row.ring ? "ring" : "linear");
    }
    for (int i = 0; i < TEST_FORMATS; i++) {
        cache_row row = {test_formats[i], test_formats[(i + 3) % TEST_FORMATS], 64, 10, true, 33, -1};
        test_add(check_truncate_ring, &row, sizeof row, "cache/truncate_ring/%s", tqkv_format_name(row.key_format));
    }
    test_add(check_options, NULL, 0, "cache/options");
    test_add(check_defaults, NULL, 0, "cache/defaults");
    test_add(check_empty, NULL, 0, "cache/empty");
    test_add(check_full, NULL, 0, "cache/full");
    test_add(check_not_finite, NULL, 0, "cache/not_finite");
    test_add(check_truncate_linear, NULL, 0, "cache/truncate_linear");
    test_add(check_long_run, NULL, 0, "cache/long_run");
}

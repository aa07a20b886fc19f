/* Allocation n of a cache's call fails, for every n: the call gives TQKV_OUT_OF_MEMORY, writes nothing and leaks nothing.
 * attend_checks.h has attention. */
#include "cache_fixture.h"
#include "counting.h"

enum { MAX_ALLOCATIONS = 1000 };

static void fail_at(counting *counter, int allocation)
{
    counter->calls = 0;
    counter->fail_at = allocation;
}

/* Creates the cache of the desc, or loads it from a snapshot if there is one. */
static void check_new_cache(tqkv_cache_desc *desc, counting *counter, stream *snapshot)
{
    tqkv_result result = TQKV_OUT_OF_MEMORY;
    int failures = 0;
    desc->sinks = cache_sinks;
    for (int n = 1; n < MAX_ALLOCATIONS; n++) {
        tqkv_cache *cache = (tqkv_cache *)(uintptr_t)1;
        if (snapshot) stream_rewind(snapshot);
        fail_at(counter, n);
        result = snapshot ? tqkv_cache_load(desc, stream_read, snapshot, &cache) : tqkv_cache_create(desc, &cache);
        if (result == TQKV_OK) tqkv_cache_destroy(cache);
        CHECK_NO_LEAK(counter);
        if (result == TQKV_OK) break;
        failures++;
        CHECK(result == TQKV_OUT_OF_MEMORY, "allocation %d fails: %s", n, tqkv_result_string(result));
        CHECK(!cache, "allocation %d fails: a cache came out", n);
    }
    CHECK_RESULT(result, TQKV_OK);
    CHECK(failures > 0, "a cache without an allocation");
}

static void check_create(const void *parameters)
{
    counting counter = {0, 0, 0, 0, 0};
    tqkv_cache_desc desc = cache_desc((const cache_row *)parameters, &counter);
    check_new_cache(&desc, &counter, NULL);
}

static void check_load(const void *parameters)
{
    const cache_row *row = (const cache_row *)parameters;
    counting counter = {0, 0, 0, 0, 0};
    tqkv_cache_desc desc = cache_desc(row, &counter);
    desc.sinks = cache_sinks;
    tqkv_cache *cache = cache_make(row, &desc);
    REQUIRE(cache, "no cache");
    stream s = stream_of_cache(cache);
    tqkv_cache_destroy(cache);
    check_new_cache(&desc, &counter, &s);
    stream_free(&s);
}

static void check_cache_calls(const void *parameters)
{
    const cache_row *row = (const cache_row *)parameters;
    counting counter = {0, 0, 0, 0, 0};
    tqkv_cache_desc desc = cache_desc(row, &counter);
    tqkv_cache *cache = cache_make(row, &desc);
    REQUIRE(cache, "no cache");
    const int live = counter.live, n_rows = 2 * CACHE_HEADS * CACHE_GROUP;
    const size_t bytes = sizeof(float) * (size_t)(n_rows * row->head_dim);
    stream before = stream_of_cache(cache);
    float *rows = cache_data(5, 2, row->head_dim), *q = test_rows(6, DATA_GAUSSIAN, n_rows, row->head_dim);
    float *out = (float *)test_alloc_filled(bytes, 0xff);
    for (int append = 0; append < 2; append++) {
        tqkv_result result = TQKV_OUT_OF_MEMORY;
        for (int n = 1; n < MAX_ALLOCATIONS && result != TQKV_OK; n++) {
            fail_at(&counter, n);
            result = append ? tqkv_cache_append(cache, rows, rows, 2) : tqkv_cache_attend(cache, q, 2, out);
            CHECK(counter.live == live, "%s leaks %d blocks", append ? "append" : "attend", counter.live - live);
            if (result == TQKV_OK) break;
            counter.fail_at = 0;
            stream after = stream_of_cache(cache);
            CHECK(stream_is_equal(&before, &after), "allocation %d fails: the cache changed", n);
            CHECK(append || test_is_untouched(out, bytes), "allocation %d fails: the output was written", n);
            stream_free(&after);
        }
        CHECK_RESULT(result, TQKV_OK);
    }
    tqkv_cache *copy = cache;
    fail_at(&counter, 1);
    CHECK_RESULT(tqkv_cache_fork(cache, NULL, &copy), TQKV_OUT_OF_MEMORY);
    CHECK(!copy && counter.live == live, "a fork that failed");
    counter.fail_at = 0;
    stream_free(&before);
    free(rows);
    free(q);
    free(out);
    tqkv_cache_destroy(cache);
    CHECK_NO_LEAK(&counter);
}

void test_fault_cases(void)
{
    for (int i = 0; i < TEST_FORMATS / 2; i++) {
        cache_row row = {test_formats[2 * i], test_formats[TEST_FORMATS - 1 - 2 * i], 64, 8, i % 2 != 0, 6, -1};
        const char *name = tqkv_format_name(row.key_format);
        test_add(check_create, &row, sizeof row, "fault/cache_create/%s", name);
        test_add(check_cache_calls, &row, sizeof row, "fault/cache_calls/%s", name);
        test_add(check_load, &row, sizeof row, "fault/cache_load/%s", name);
    }
}

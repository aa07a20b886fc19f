/* The n-th allocation fails, for every n: TQKV_OUT_OF_MEMORY, nothing written, nothing leaked. */
#include "attend_fixture.h"
#include "cache_fixture.h"
#include "counting.h"

enum { MAX_ALLOCATIONS = 1000 };

static void run_in_order(void *user, int count, tqkv_task task, void *context)
{
    (void)user;
    for (int i = 0; i < count; i++) task(context, i);
}

static bool is_still_filled(const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (((const unsigned char *)bytes)[i] != 0xff) return false;
    return true;
}

/* ---- Attention ---- */

static void check_attend(const void *parameters)
{
    const attend_row *row = (const attend_row *)parameters;
    attend_problem problem;
    counting counter = {0, 0, 0, 0};
    attend_set_up(&problem, row);
    problem.attention.allocator = counting_allocator(&counter);
    if (row->way == WAY_PARALLEL) problem.attention.parallel.run = run_in_order;
    size_t bytes = problem.n_rows * problem.head_dim * sizeof(float);
    tqkv_result result = TQKV_OUT_OF_MEMORY;
    for (int n = 1; result != TQKV_OK && n < MAX_ALLOCATIONS; n++) {
        counter.calls = 0;
        counter.fail_at = n;
        result = tqkv_attend(&problem.attention, problem.q, problem.out);
        CHECK_NO_LEAK(&counter);
        if (result == TQKV_OK) break;
        CHECK(result == TQKV_OUT_OF_MEMORY, "allocation %d fails: %s", n, tqkv_result_string(result));
        CHECK(is_still_filled(problem.out, bytes), "allocation %d fails: the output was written", n);
    }
    CHECK_RESULT(result, TQKV_OK);
    attend_check(&problem, problem.out, "out");
    attend_tear_down(&problem);
}

static void check_partial(const void *parameters)
{
    const attend_row *row = (const attend_row *)parameters;
    attend_problem problem;
    counting counter = {0, 0, 0, 0};
    attend_set_up(&problem, row);
    problem.attention.allocator = counting_allocator(&counter);
    if (row->way == WAY_PARALLEL) problem.attention.parallel.run = run_in_order;
    size_t bytes = problem.n_rows * problem.head_dim * sizeof(float);
    float *max = (float *)test_alloc_filled(problem.n_rows * sizeof(float), 0xff);
    float *sum = (float *)test_alloc_filled(problem.n_rows * sizeof(float), 0xff);
    tqkv_result result = TQKV_OUT_OF_MEMORY;
    for (int n = 1; n < MAX_ALLOCATIONS; n++) {
        counter.calls = 0;
        counter.fail_at = n;
        result = tqkv_attend_partial(&problem.attention, problem.q, 0, (int)row->end, problem.out, max, sum);
        CHECK_NO_LEAK(&counter);
        if (result == TQKV_OK) break;
        CHECK(result == TQKV_OUT_OF_MEMORY, "allocation %d fails: %s", n, tqkv_result_string(result));
        CHECK(is_still_filled(problem.out, bytes) && is_still_filled(max, problem.n_rows * sizeof(float)) &&
                  is_still_filled(sum, problem.n_rows * sizeof(float)),
              "allocation %d fails: an output was written", n);
    }
    CHECK_RESULT(result, TQKV_OK);
    counter.fail_at = 0;
    CHECK_RESULT(tqkv_attend_finish(&problem.attention, problem.out, max, sum), TQKV_OK);
    CHECK_NO_LEAK(&counter);
    attend_check(&problem, problem.out, "out");
    free(max);
    free(sum);
    attend_tear_down(&problem);
}

/* ---- The cache ---- */

static void check_create(const void *parameters)
{
    const cache_row *row = (const cache_row *)parameters;
    counting counter = {0, 0, 0, 0};
    tqkv_cache_desc desc = cache_desc(row, &counter);
    desc.sinks = cache_sinks;
    tqkv_result result = TQKV_OUT_OF_MEMORY;
    int failures = 0;
    for (int n = 1; n < MAX_ALLOCATIONS; n++) {
        tqkv_cache *cache = (tqkv_cache *)(uintptr_t)1;
        counter.calls = 0;
        counter.fail_at = n;
        result = tqkv_cache_create(&desc, &cache);
        if (result == TQKV_OK) tqkv_cache_destroy(cache);
        CHECK_NO_LEAK(&counter);
        if (result == TQKV_OK) break;
        failures++;
        CHECK(result == TQKV_OUT_OF_MEMORY, "allocation %d fails: %s", n, tqkv_result_string(result));
        CHECK(!cache, "allocation %d fails: a cache came out", n);
    }
    CHECK_RESULT(result, TQKV_OK);
    CHECK(failures > 0, "a cache without an allocation");
}

static void check_cache_calls(const void *parameters)
{
    const cache_row *row = (const cache_row *)parameters;
    counting counter = {0, 0, 0, 0};
    tqkv_cache_desc desc = cache_desc(row, &counter);
    tqkv_cache *cache = cache_make(row, &desc);
    REQUIRE(cache, "no cache");
    int live = counter.live, d = row->head_dim;
    stream before = stream_of_cache(cache);
    float *rows = cache_data(5, 2, d);
    size_t bytes = sizeof(float) * (size_t)(2 * CACHE_HEADS * CACHE_GROUP * d);
    float *q = (float *)test_alloc(bytes), *out = (float *)test_alloc_filled(bytes, 0xff);
    data_rows(6, DATA_GAUSSIAN, q, 2 * CACHE_HEADS * CACHE_GROUP, d);
    tqkv_result result = TQKV_OUT_OF_MEMORY;
    for (int n = 1; n < MAX_ALLOCATIONS && result != TQKV_OK; n++) {
        counter.calls = 0;
        counter.fail_at = n;
        result = tqkv_cache_attend(cache, q, 2, out);
        CHECK(counter.live == live, "attend leaks %d blocks", counter.live - live);
        CHECK(result == TQKV_OK || is_still_filled(out, bytes), "allocation %d fails: the output was written", n);
    }
    CHECK_RESULT(result, TQKV_OK);
    result = TQKV_OUT_OF_MEMORY;
    for (int n = 1; n < MAX_ALLOCATIONS && result != TQKV_OK; n++) {
        counter.calls = 0;
        counter.fail_at = n;
        result = tqkv_cache_append(cache, rows, rows, 2);
        CHECK(counter.live == live, "append leaks %d blocks", counter.live - live);
        counter.fail_at = 0;
        stream after = stream_of_cache(cache);
        CHECK(result == TQKV_OK || stream_is_equal(&before, &after), "allocation %d fails: the cache changed", n);
        stream_free(&after);
    }
    CHECK_RESULT(result, TQKV_OK);
    stream_free(&before);
    free(rows);
    free(q);
    free(out);
    tqkv_cache_destroy(cache);
    CHECK_NO_LEAK(&counter);
}

static void check_load(const void *parameters)
{
    const cache_row *row = (const cache_row *)parameters;
    counting counter = {0, 0, 0, 0};
    tqkv_cache_desc desc = cache_desc(row, &counter);
    desc.sinks = cache_sinks;
    tqkv_cache *cache = cache_make(row, &desc);
    REQUIRE(cache, "no cache");
    stream s = stream_of_cache(cache);
    tqkv_cache_destroy(cache);
    tqkv_result result = TQKV_OUT_OF_MEMORY;
    int failures = 0;
    for (int n = 1; n < MAX_ALLOCATIONS; n++) {
        cache = (tqkv_cache *)(uintptr_t)1;
        stream_rewind(&s);
        counter.calls = 0;
        counter.fail_at = n;
        result = tqkv_cache_load(&desc, stream_read, &s, &cache);
        if (result == TQKV_OK) tqkv_cache_destroy(cache);
        CHECK_NO_LEAK(&counter);
        if (result == TQKV_OK) break;
        failures++;
        CHECK(result == TQKV_OUT_OF_MEMORY, "allocation %d fails: %s", n, tqkv_result_string(result));
        CHECK(!cache, "allocation %d fails: a cache came out", n);
    }
    CHECK_RESULT(result, TQKV_OK);
    CHECK(failures > 0, "a cache without an allocation");
    stream_free(&s);
}

void test_fault_cases(void)
{
    attend_row attend = attend_default_row(TQKV_I8, TQKV_TQ4, 128);
    attend.n_queries = 3;
    test_add(check_attend, &attend, sizeof attend, "fault/attend");
    test_add(check_partial, &attend, sizeof attend, "fault/attend_partial");
    attend.way = WAY_PARALLEL;
    attend.end = 2500;
    attend.key_capacity = attend.value_capacity = 2500;
    test_add(check_attend, &attend, sizeof attend, "fault/attend/parallel");
    test_add(check_partial, &attend, sizeof attend, "fault/attend_partial/parallel");
    for (int i = 0; i < 4; i++) {
        cache_row row = {test_formats[2 * i], test_formats[7 - 2 * i], 64, 8, i % 2 != 0, 6, -1};
        const char *name = tqkv_format_name(row.key_format);
        test_add(check_create, &row, sizeof row, "fault/cache_create/%s", name);
        test_add(check_cache_calls, &row, sizeof row, "fault/cache_calls/%s", name);
        test_add(check_load, &row, sizeof row, "fault/cache_load/%s", name);
    }
}

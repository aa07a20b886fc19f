/* Caches that learn: memory and its lack, damaged snapshots, centres and scales that are given, smaller copies. */
#include "learn_fixture.h"

/* ---- Memory ---- */

/* Whether the call that follows is to be tried again, with the next allocation failing. */
static bool fails_again(tqkv_result r, counting *counter)
{
    const int failed = counter->fail_at;
    counter->calls = 0;
    counter->fail_at = 0;
    if (r == TQKV_OK) return false;
    CHECK(r == TQKV_OUT_OF_MEMORY, "allocation %d fails: %s", failed, tqkv_result_string(r));
    return true;
}

static tqkv_cache *create_failing(const tqkv_cache_desc *desc, counting *counter)
{
    tqkv_cache *cache = NULL;
    for (int fail = 1;; fail++) {
        counter->fail_at = fail;
        if (!fails_again(tqkv_cache_create(desc, &cache), counter)) return cache;
        CHECK(!cache, "allocation %d fails: a cache", fail);
        CHECK_NO_LEAK(counter);
    }
}

/* n tokens behind the first 10 */
static void append_failing(const learn_model *m, tqkv_cache *cache, int n, counting *counter)
{
    for (int fail = 1;; fail++) {
        counter->fail_at = fail;
        if (!fails_again(tqkv_cache_append(cache, row_at(m, 0, 10), row_at(m, 1, 10), n), counter)) return;
        CHECK(tqkv_cache_end(cache) == 10, "allocation %d fails: positions were appended", fail);
        CHECK(!test_keys(cache)->channel_scale, "a failed append has learned");
        check_queries(m, cache, 10, 4, "after a failed append");
    }
}

static void attend_failing(const learn_model *m, tqkv_cache *cache, int n, counting *counter)
{
    const size_t size = (size_t)(n * HEADS * m->value_dim) * sizeof(float);
    char *out = (char *)test_alloc_filled(size, 0xa5);
    for (int fail = 1;; fail++) {
        counter->fail_at = fail;
        if (!fails_again(tqkv_cache_attend(cache, row_at(m, 2, 10), n, out), counter)) break;
        for (size_t i = 0; i < size; i++)
            CHECK((unsigned char)out[i] == 0xa5, "allocation %d fails: byte %d was written", fail, (int)i);
    }
    free(out);
}

/* Rows of halves are counted as long as they are there. An allocation that fails, at any time,
 * leaves the cache as it was. */
static void check_memory(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    const int n = row->exact_last ? 150 : 60;
    learn_model m;
    model_open(&m, row);
    tqkv_cache_desc desc = describe(row), plain = desc;
    counting counter = {0, 0, 0, 0, 0};
    tqkv_cache *cache = NULL;
    plain.calibrate = 0;
    CHECK_RESULT(tqkv_cache_create(&plain, &cache), TQKV_OK);
    const size_t without = tqkv_cache_bytes(cache);
    const size_t raw = (size_t)(2 * row->learns_at * CACHE_HEADS * (row->head_dim + m.value_dim));
    tqkv_cache_destroy(cache);
    desc.allocator = counting_allocator(&counter);
    cache = create_failing(&desc, &counter);
    CHECK(tqkv_cache_bytes(cache) == without, "%d bytes, without %d", (int)tqkv_cache_bytes(cache), (int)without);
    append(&m, cache, 0, 10);
    CHECK(tqkv_cache_bytes(cache) >= without + raw, "%d bytes, without %d", (int)tqkv_cache_bytes(cache), (int)without);
    append_failing(&m, cache, n, &counter);
    attend_failing(&m, cache, n, &counter);
    check_queries(&m, cache, 10 + n, n, "after failed calls");
    CHECK(tqkv_cache_bytes(cache) >= without + raw, "the halves are gone before the next append");
    append(&m, cache, 10 + n, 1);
    CHECK(tqkv_cache_bytes(cache) == without, "%d bytes are left, without %d", (int)tqkv_cache_bytes(cache),
          (int)without);
    tqkv_cache_destroy(cache);
    CHECK_NO_LEAK(&counter);
    model_close(&m);
}

/* ---- Setting and refusing ---- */

/* Copied, or saved and loaded, it has the same snapshot. */
static void check_copy(const tqkv_cache *cache, bool loads)
{
    learn_row row;
    tqkv_cache *copy = NULL;
    memset(&row, 0, sizeof row);
    row.head_dim = test_keys(cache)->head_dim;
    row.capacity = test_keys(cache)->capacity;
    row.key_format = test_keys(cache)->format;
    row.value_format = test_values(cache)->format;
    if (loads)
        copy = reloaded(&row, cache);
    else
        CHECK_RESULT(tqkv_cache_fork(cache, NULL, &copy), TQKV_OK);
    stream a = stream_of_cache(cache), b = stream_of_cache(copy);
    CHECK(stream_is_equal(&a, &b), "%s: another snapshot", loads ? "loaded" : "copied");
    stream_free(&a);
    stream_free(&b);
    tqkv_cache_destroy(copy);
}

static void check_set(const void *parameters)
{
    (void)parameters;
    enum { D = 64 };
    const cache_row row = {TQKV_TQ4, TQKV_TQ3, D, 100, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    desc.calibrate = 20;
    float *scales = test_scales(1, CACHE_HEADS, D, 6.0), *rows = test_rows(2, DATA_GAUSSIAN, 30 * CACHE_HEADS, D);
    tqkv_cache *learning = cache_given(&desc, NULL, NULL, NULL, NULL);
    for (int way = 0; way < 2; way++) { /* a centre or a scale switches learning off */
        tqkv_cache *cache = cache_given(&desc, way ? NULL : scales, way ? scales : NULL, NULL, way ? scales : NULL);
        CHECK_RESULT(tqkv_cache_append(learning, rows, rows, 5), TQKV_OK);
        CHECK(tqkv_cache_bytes(cache) < tqkv_cache_bytes(learning), "room for halves");
        CHECK_RESULT(tqkv_cache_append(cache, rows, rows, 30), TQKV_OK);
        const tqkv_store *keys = test_keys(cache), *values = test_values(cache);
        CHECK((keys->center != NULL) == (way == 0) && (keys->channel_scale != NULL) == (way == 1) &&
                  (values->channel_scale != NULL) == (way == 1) && !values->center,
              "way %d: other centres or scales", way);
        CHECK(way != 1 || (keys->channel_scale && keys->channel_scale != scales &&
                           !memcmp(keys->channel_scale, scales, sizeof(float) * CACHE_HEADS * D)),
              "the scale is no copy");
        check_copy(cache, false);
        check_copy(cache, true);
        tqkv_cache_destroy(cache);
    }
    tqkv_cache_destroy(learning);
    free(scales);
    free(rows);
}

/* A copy of less capacity learns from as many positions as the cache does, to the same codes; one that cannot hold them
 * learns from all that it holds. */
static void check_smaller(const void *parameters)
{
    (void)parameters;
    enum { D = 64, BEFORE = 40, N = 110 };
    float *rows = test_rows(2, DATA_GAUSSIAN, N * CACHE_HEADS, D);
    for (int capacity = 400; capacity >= 50; capacity -= 50) {
        const cache_row row = {TQKV_TQ4, TQKV_TQ4, D, 400, false, 0, -1};
        tqkv_cache_desc desc = cache_desc(&row, NULL), smaller;
        tqkv_cache *cache = NULL, *copy = NULL;
        desc.calibrate = 64;
        desc.exact_last = 8;
        memset(&smaller, 0, sizeof smaller);
        smaller.capacity = capacity;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        CHECK_RESULT(tqkv_cache_append(cache, rows, rows, BEFORE), TQKV_OK);
        CHECK_RESULT(tqkv_cache_fork(cache, &smaller, &copy), TQKV_OK);
        const int n = (capacity < N ? capacity : N) - BEFORE;
        const float *rest = rows + BEFORE * CACHE_HEADS * D;
        CHECK_RESULT(tqkv_cache_append(cache, rest, rest, n), TQKV_OK);
        CHECK_RESULT(tqkv_cache_append(copy, rest, rest, n), TQKV_OK);
        const tqkv_store *keys[2] = {test_keys(cache), test_keys(copy)};
        REQUIRE(keys[1]->channel_scale, "capacity %d: the copy has not learned", capacity);
        if (capacity > 64) {
            CHECK(!memcmp(keys[0]->channel_scale, keys[1]->channel_scale, sizeof(float) * CACHE_HEADS * D),
                  "capacity %d: another scale", capacity);
            check_codes(keys[0], keys[1], 0, BEFORE + n, "keys");
        }
        tqkv_cache_destroy(copy);
        tqkv_cache_destroy(cache);
    }
    free(rows);
}

void test_learn_faults_cases(void)
{
    const tqkv_type f32 = TQKV_TYPE_F32;
    const tqkv_pairs none = TQKV_PAIRS_NONE;
    const learn_row plain = {TQKV_TQ4, TQKV_TQ4, 64, 0, 240, 40, 40, 0, 0, 0, 0, 100, 0, 0, 0, 0, 0, f32, 0, none},
                    ends = {TQKV_TQ4, TQKV_TQ4, 64, 0, 300, 40, 40, 4, 9, 0, 0, 220, 0, 0, 0, 0, 0, f32, 0, none};
    test_add(check_memory, &ends, sizeof ends, "learn/memory/ends");
    test_add(check_memory, &plain, sizeof ends, "learn/memory/plain");
    test_add(check_set, NULL, 0, "learn/set");
    test_add(check_smaller, NULL, 0, "learn/smaller");
}

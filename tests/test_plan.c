/* What tqkv_metal.m takes from tqkv.h: plans of its kernels' arguments, and the door of caches to a context, here to
 * one that is no GPU. */
#define TQKV_SHARED
#include "cache_fixture.h"
#include "runner.h"

#include <limits.h>

static tqkv_store plan_store(tqkv_format format, int head_dim, int capacity, bool ring)
{
    tqkv_store s;
    memset(&s, 0, sizeof s);
    s.format = format;
    s.head_dim = head_dim;
    s.n_kv_heads = 3;
    s.capacity = capacity;
    s.ring = ring;
    return s;
}

static void run_rows(const void *row)
{
    tqkv__rows_plan p;
    tqkv_store linear = plan_store(TQKV_TQ5, 64, 10, false), ring = plan_store(TQKV_I8, 512, 10, true);
    const size_t token = 3 * 512 * sizeof(float);
    (void)row;
    CHECK_RESULT(tqkv__plan_encode(&ring, 24, 7, &p), TQKV_OK);
    CHECK(p.args.n_tokens == 10 && p.args.first_slot == 1, "%d tokens at %d", p.args.n_tokens, p.args.first_slot);
    CHECK(p.rows_size == 24 * token && p.skipped_size == 14 * token, "sizes %zu, %zu", p.rows_size, p.skipped_size);
    CHECK(p.codes_size == 3 * 10 * 512 && p.norms_size == 3 * 10 * 4 * sizeof(float), "the store's sizes");
    CHECK(p.turn && p.args.block_scale == 1.0f && p.head_dim == 512 && p.format == TQKV_I8, "the kernel");
    CHECK_RESULT(tqkv__plan_encode(&linear, 4, 6, &p), TQKV_OK);
    CHECK(p.skipped_size == 0 && p.args.first_slot == 6 && p.args.capacity == 10, "a linear store");
    CHECK_RESULT(tqkv__plan_encode(&linear, 0, 10, &p), TQKV_OK);
    CHECK(p.args.n_tokens == 0 && p.rows_size == 0, "nothing to encode");
    CHECK_RESULT(tqkv__plan_encode(&linear, 5, 6, &p), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv__plan_encode(&linear, -1, 0, &p), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_encode(NULL, 1, 0, &p), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_probe(&linear, INT_MAX, &p), TQKV_INVALID_ARGUMENT); /* rows beyond 2^31 */
    CHECK_RESULT(tqkv__plan_probe(&linear, 7, &p), TQKV_OK);
    CHECK(p.args.n_tokens == 7 && p.rows_size == 7 * 3 * 64 * sizeof(float), "a probe");
    CHECK_RESULT(tqkv__plan_decode(&ring, 95, 10, TQKV_ORIGINAL, &p), TQKV_OK);
    CHECK(p.turn && p.args.first_slot == 5, "decoded from slot %d", p.args.first_slot);
    CHECK_RESULT(tqkv__plan_decode(&ring, 95, 10, TQKV_ROTATED, &p), TQKV_OK);
    CHECK(!p.turn, "left rotated");
    CHECK_RESULT(tqkv__plan_decode(&ring, 95, 11, TQKV_ROTATED, &p), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv__plan_decode(&linear, 8, 3, TQKV_ROTATED, &p), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv__plan_decode(&linear, 0, 1, test_no_basis(2), &p), TQKV_INVALID_ARGUMENT);
}

static void run_rotate(const void *row)
{
    size_t size = 0;
    (void)row;
    CHECK_RESULT(tqkv__plan_rotate(5, 64, &size), TQKV_OK);
    CHECK(size == 5 * 64 * sizeof(float), "%zu bytes", size);
    CHECK_RESULT(tqkv__plan_rotate(5, 65, &size), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv__plan_rotate(-1, 64, &size), TQKV_INVALID_ARGUMENT);
    CHECK(tqkv__hash("", 0) == UINT64_C(0x2d06800538d394c2), "not XXH3-64");
}

static void run_attend(const void *row)
{
    tqkv__attend_plan p;
    tqkv_attention a;
    tqkv_store keys = plan_store(TQKV_I8, 64, 100, true), values = plan_store(TQKV_F16, 64, 40, true);
    (void)row;
    memset(&a, 0, sizeof a);
    a.keys = &keys;
    a.values = &values;
    a.n_heads = 6;
    a.n_queries = 4;
    a.end = 1030;
    CHECK_RESULT(tqkv__plan_attend(&a, false, &p), TQKV_OK);
    CHECK(p.args.kv_len == 40 && p.args.key_oldest_slot == 90 && p.args.value_oldest_slot == 30 && !p.same_slots,
          "oldest slots %d, %d", p.args.key_oldest_slot, p.args.value_oldest_slot);
    CHECK(p.rotate_queries && !p.unrotate_output && p.args.group == 2 && p.n_rows == 24, "the kernel");
    CHECK(p.seen == 40 && p.args.window == 0, "%d seen", p.seen);
    a.window = 10;
    CHECK_RESULT(tqkv__plan_attend(&a, false, &p), TQKV_OK);
    CHECK(p.seen == 13 && p.args.window == 10, "%d seen through the window", p.seen);
    a.window = 40; /* no smaller than what is resident: none */
    CHECK_RESULT(tqkv__plan_attend(&a, false, &p), TQKV_OK);
    CHECK(p.seen == 40 && p.args.window == 0, "%d seen", p.seen);
    a.end = a.kv_len = 0;
    CHECK_RESULT(tqkv__plan_attend(&a, false, &p), TQKV_OK);
    CHECK(p.seen == 0 && p.args.kv_len == 0 && p.args.key_oldest_slot == 0, "an empty store");
    CHECK_RESULT(tqkv__plan_attend(&a, true, &p), TQKV_OK);
    CHECK(p.seen == 40 && p.args.kv_len == 40, "the whole store: %d", p.seen);
    a.kv_len = 1;
    CHECK_RESULT(tqkv__plan_attend(&a, false, &p), TQKV_OUT_OF_RANGE);
    a.n_heads = 7;
    CHECK_RESULT(tqkv__plan_attend(&a, false, &p), TQKV_INVALID_ARGUMENT);
}

static void run_cache_plan(const void *row)
{
    const cache_row shape = {TQKV_I8, TQKV_TQ4, 64, 8, true, 20, 15};
    tqkv__attend_plan p;
    tqkv_cache_desc desc = cache_desc(&shape, NULL);
    tqkv_cache *cache = cache_make(&shape, &desc);
    (void)row;
    REQUIRE(cache, "no cache");
    CHECK(!tqkv__cache_sinks(cache), "sinks");
    CHECK_RESULT(tqkv__plan_cache_attend(cache, 1, false, &p), TQKV_OK);
    CHECK(p.args.kv_len == 3 && p.args.key_oldest_slot == 4, "after a truncation: %d", p.args.kv_len);
    CHECK_RESULT(tqkv__plan_cache_attend(cache, 1, true, &p), TQKV_OK);
    CHECK(p.args.kv_len == 8, "whole: %d", p.args.kv_len);
    tqkv__cache_advance(cache, 7);
    CHECK_RESULT(tqkv__plan_cache_attend(cache, 1, false, &p), TQKV_OK);
    CHECK(tqkv_cache_end(cache) == 22 && p.args.kv_len == 8, "after an advance: %d", p.args.kv_len);
    CHECK_RESULT(tqkv__plan_cache_attend(cache, 0, false, &p), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_cache_attend(NULL, 1, false, &p), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(cache);
}

/* Begins as struct tqkv_metal does. */
typedef struct fake {
    tqkv__backend backend;
    counting memory;
    int appends, attends;
    tqkv_result answer;
} fake;

static fake *fake_of(tqkv_metal *m) { return (fake *)(void *)m; }

static tqkv_result fake_append(tqkv_metal *m, const tqkv_cache *c, const float *k, const float *v, int n_tokens)
{
    fake_of(m)->appends++;
    if (fake_of(m)->answer != TQKV_OK) return fake_of(m)->answer;
    CHECK_RESULT(tqkv_encode(tqkv_cache_keys(c), k, n_tokens, tqkv_cache_end(c)), TQKV_OK);
    return tqkv_encode(tqkv_cache_values(c), v, n_tokens, tqkv_cache_end(c));
}

static tqkv_result fake_attend(tqkv_metal *m, const tqkv_cache *c, const float *q, int n_queries, float *out)
{
    (void)c;
    fake_of(m)->attends++;
    for (int i = 0; i < n_queries && fake_of(m)->answer == TQKV_OK; i++) out[i] = q[i];
    return fake_of(m)->answer;
}

/* A cache of a context has its memory, asks it to append and attend, and stays as it was when it fails. */
static void run_backend(const void *row)
{
    const cache_row shape = {TQKV_I8, TQKV_TQ4, 64, 8, false, 0, -1};
    fake context;
    counting scratch;
    (void)row;
    memset(&context, 0, sizeof context);
    memset(&scratch, 0, sizeof scratch);
    context.backend.memory = counting_allocator(&context.memory);
    context.backend.append = fake_append;
    context.backend.attend = fake_attend;
    tqkv_cache_desc desc = cache_desc(&shape, &scratch);
    desc.metal = (tqkv_metal *)(void *)&context;
    tqkv_cache *cache = cache_make(&shape, &desc);
    REQUIRE(cache, "no cache");
    CHECK(context.memory.live == 1 && scratch.calls == 0, "memory of another");
    cache_append_seed(cache, 3, 5, 64);
    float *rows = cache_data(9, 2, 64), out[CACHE_HEADS * CACHE_GROUP * 64];
    CHECK_RESULT(tqkv_cache_attend(cache, rows, 1, out), TQKV_OK);
    CHECK(out[0] == rows[0] && context.attends == 1 && context.appends == 1, "the context was not asked");
    CHECK_RESULT(tqkv_cache_append(cache, rows, rows, 4), TQKV_OUT_OF_RANGE);
    context.answer = TQKV_METAL_ERROR;
    CHECK_RESULT(tqkv_cache_append(cache, rows, rows, 1), TQKV_METAL_ERROR);
    CHECK_RESULT(tqkv_cache_attend(cache, rows, 1, out), TQKV_METAL_ERROR);
    CHECK(tqkv_cache_end(cache) == 5 && context.appends == 2, "a failed append counts, or a refused one was passed on");
    CHECK_RESULT(tqkv_cache_attend(cache, rows, 1, rows), TQKV_INVALID_ARGUMENT);
    CHECK(context.attends == 2, "a refused attention was passed on");
    tqkv_cache_destroy(cache);
    CHECK_NO_LEAK(&context.memory);
    free(rows);
}

void test_plan_cases(void)
{
    test_add(run_rows, NULL, 0, "plan/rows");
    test_add(run_rotate, NULL, 0, "plan/rotate");
    test_add(run_attend, NULL, 0, "plan/attend");
    test_add(run_cache_plan, NULL, 0, "plan/cache");
    test_add(run_backend, NULL, 0, "plan/backend");
}

/* The plans of a cache, and the calls that a cache makes to its context, here a fake without a GPU. */
#include "plan_fixture.h"
#include "../cache_fixture.h"

/* After a truncation, an advance and an append; what a cache's plans refuse. */
static void check_cache_plan(const void *row)
{
    const cache_row shape = {TQKV_I8, TQKV_TQ4, 64, 8, true, 20, 15};
    tqkv_metal_plan plan;
    tqkv_cache_desc desc = cache_desc(&shape, NULL);
    desc.sinks = cache_sinks;
    tqkv_cache *cache = cache_make(&shape, &desc);
    (void)row;
    REQUIRE(cache, "no cache");
#define ATTEND_CACHE(n) \
    check_plan( \
        tqkv_metal_plan_cache_attend(cache, at(0, 256), NULL, NULL, at(Q, 0), n, at(SCRATCH, 0), at(OUT, 0), &plan), \
        &plan)
    CHECK_RESULT(ATTEND_CACHE(1), TQKV_OK);
    CHECK(attend_args(plan.d).kv_len == 3, "after a truncation: %d", attend_args(plan.d).kv_len);
    tqkv_metal_cache_appended(cache, 7);
    CHECK_RESULT(ATTEND_CACHE(1), TQKV_OK);
    CHECK(tqkv_cache_end(cache) == 22 && attend_args(plan.d).kv_len == 8, "after an advance");
    CHECK_RESULT(
        check_plan(tqkv_metal_plan_cache_append(cache, at(0, 0), NULL, at(Q, 0), at(OUT, 0), 3, none, &plan), &plan),
        TQKV_OK);
    CHECK(plan.n == 1 && plan.d->kernel.family == TQKV_METAL_ENCODE_KV, "an append");
    CHECK_RESULT(ATTEND_CACHE(0), TQKV_OK);
    CHECK(!plan.n && !plan.scratch_size, "%d dispatches for no query", plan.n);
    CHECK_RESULT(ATTEND_CACHE(-1), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_cache_append(NULL, none, NULL, none, none, 1, none, &plan), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(cache);
#undef ATTEND_CACHE
}

/* A cache and its fork plan the kernel that their groups have elsewhere. */
static void check_cache_kernels(const void *row)
{
    (void)row;
    for (int group = 1; group <= 5; group++)
        for (int least = 0; least <= 5; least++) {
            tqkv_cache_desc desc;
            tqkv_cache *cache, *fork = NULL;
            tqkv_metal_plan plan;
            tqkv_metal_dispatch *const d = plan.d;
            memset(&desc, 0, sizeof desc);
            desc.head_dim = 64;
            desc.n_kv_heads = 2;
            desc.n_heads = 2 * group;
            desc.capacity = 64;
            desc.matrix_group = least;
            CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
            if (!cache) return;
            CHECK_RESULT(tqkv_cache_fork(cache, NULL, &fork), TQKV_OK);
            const bool matrix = group >= (least ? least : 8);
            for (int i = 0; i < 2; i++) {
                CHECK_RESULT(tqkv_metal_plan_cache_attend(i ? fork : cache, at(0, 0), NULL, NULL, at(1, 0), 1, at(2, 0),
                                                          at(3, 0), &plan),
                             TQKV_OK);
                CHECK(d[0].kernel.family == (matrix ? TQKV_METAL_ATTEND_MATRIX : TQKV_METAL_ATTEND), "group %d of %d",
                      group, least);
            }
            tqkv_cache_destroy(fork);
            tqkv_cache_destroy(cache);
            desc.matrix_group = -1;
            CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_INVALID_ARGUMENT);
        }
}

/* Starts with the same member as struct tqkv_metal. */
typedef struct fake {
    tqkv__backend backend;
    counting memory;
    int appends, attends;
    tqkv_result answer;
} fake;

static fake *fake_of(tqkv_metal *m) { return (fake *)(void *)m; }

static tqkv_result fake_append(tqkv_metal *m, const tqkv_cache *c, const void *k, const void *v, int n_tokens)
{
    fake_of(m)->appends++;
    if (fake_of(m)->answer != TQKV_OK) return fake_of(m)->answer;
    CHECK_RESULT(tqkv_encode(test_keys(c), k, n_tokens, tqkv_cache_end(c)), TQKV_OK);
    return tqkv_encode(test_values(c), v, n_tokens, tqkv_cache_end(c));
}

static tqkv_result fake_attend(tqkv_metal *m, const tqkv_cache *c, const void *q, int n_queries, void *out)
{
    (void)c;
    fake_of(m)->attends++;
    if (fake_of(m)->answer == TQKV_OK) memcpy(out, q, (size_t)n_queries * sizeof(float));
    return fake_of(m)->answer;
}

/* A cache with a context allocates from it, lets it append and attend, and does not change when it fails. */
static void check_backend(const void *row)
{
    const cache_row shape = {TQKV_I8, TQKV_TQ4, 64, 8, false, 0, -1};
    fake context;
    counting scratch;
    (void)row;
    memset(&context, 0, sizeof context);
    memset(&scratch, 0, sizeof scratch);
    context.backend.memory = counting_allocator(&context.memory);
    context.backend.has_kernels = tqkv__has_kernels;
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
    desc.head_dim = 112; /* no kernels */
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_UNSUPPORTED);
    CHECK_NO_LEAK(&context.memory);
    free(rows);
}

void test_plan_cache_cases(void)
{
    test_add(check_cache_plan, NULL, 0, "plan/cache");
    test_add(check_cache_kernels, NULL, 0, "plan/cache_kernels");
    test_add(check_backend, NULL, 0, "plan/backend");
}

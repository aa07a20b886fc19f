/* The plans of a cache. */
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

void test_plan_cache_cases(void)
{
    test_add(check_cache_plan, NULL, 0, "plan/cache");
    test_add(check_cache_kernels, NULL, 0, "plan/cache_kernels");
}

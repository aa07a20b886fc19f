/* The plans of a cache. */
#include "plan_fixture.h"
#include "../cache_fixture.h"

/* After a truncation, an advance and an append; what a cache's plans refuse. */
static void check_cache_plan(NO_ROW)
{
    const cache_row shape = {TQKV_I8, TQKV_TQ4, 64, 8, true, 20, 15};
    const tqkv_cache_strides gaps = {{0, 0}, {0, 0}, {400, 80}, {300, 72}};
    tqkv_metal_plan plan;
    tqkv_cache_desc desc = cache_desc(&shape, NULL);
    desc.sinks = cache_sinks;
    tqkv_cache *cache = cache_make(&shape, &desc);
    REQUIRE(cache, "no cache");
    CHECK_RESULT(plan_queries(cache, 1, &plan), TQKV_OK);
    CHECK(attend_args(plan.d).kv_len == 3, "after a truncation: %d", attend_args(plan.d).kv_len);
    tqkv_metal_cache_appended(cache, 7);
    CHECK_RESULT(plan_queries(cache, 1, &plan), TQKV_OK);
    CHECK(tqkv_cache_end(cache) == 22 && attend_args(plan.d).kv_len == 8, "after an advance");
    CHECK_RESULT(plan_append(cache, 3, &plan), TQKV_OK);
    CHECK(plan.n == 1 && plan.d->kernel.family == TQKV_METAL_ENCODE_KV, "an append");
    CHECK_RESULT(
        tqkv_metal_plan_cache_attend(cache, at(0, 256), &gaps, NULL, at(Q, 0), 1, at(SCRATCH, 0), at(OUT, 0), &plan),
        TQKV_OK);
    CHECK(attend_args(plan.d).query_head_stride == 80 && merge_args(plan.d).out_head_stride == 72, "a call's strides");
    CHECK_RESULT(plan_queries(cache, 0, &plan), TQKV_OK);
    CHECK(!plan.n && !plan.scratch_size, "%d dispatches for no query", plan.n);
    CHECK_RESULT(plan_queries(cache, -1, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_cache_append(NULL, none, NULL, none, none, 1, none, &plan), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(cache);
}

/* A cache and its fork plan the kernel that their groups have elsewhere. */
static void check_cache_kernels(NO_ROW)
{
    for (int group = 1; group <= 5; group++)
        for (int least = 0; least <= 5; least++) {
            tqkv_cache_desc desc = test_cache_desc(64, 2, 2 * group, 64);
            tqkv_cache *caches[2] = {NULL, NULL};
            desc.matrix_group = least;
            CHECK_RESULT(tqkv_cache_create(&desc, &caches[0]), TQKV_OK);
            CHECK_RESULT(tqkv_cache_fork(caches[0], NULL, &caches[1]), TQKV_OK);
            for (int i = 0; i < 2; i++) {
                tqkv_metal_plan plan;
                CHECK_RESULT(plan_queries(caches[i], 1, &plan), TQKV_OK);
                CHECK((plan.d->kernel.family == TQKV_METAL_ATTEND_MATRIX) == (group >= (least ? least : 8)),
                      "group %d of %d", group, least);
                tqkv_cache_destroy(caches[i]);
            }
            desc.matrix_group = -1;
            CHECK_RESULT(tqkv_cache_create(&desc, &caches[0]), TQKV_INVALID_ARGUMENT);
        }
}

void test_plan_cache_cases(void)
{
    test_add(check_cache_plan, NULL, 0, "plan/cache");
    test_add(check_cache_kernels, NULL, 0, "plan/cache_kernels");
}

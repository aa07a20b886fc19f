/* Plans of an index: its scores, and the choice of blocks. */
#include "plan_fixture.h"

static tqkv_metal_index plan_index(tqkv_metal_store *keys, int capacity, int64_t end, int n_queries)
{
    tqkv_metal_index x;
    *keys = plan_store(TQKV_TQ4, 128, capacity, false, 0);
    keys->shape.n_kv_heads = 1;
    memset(&x, 0, sizeof x);
    x.keys = keys;
    x.index.end = end;
    x.index.n_heads = 1;
    x.index.n_queries = n_queries;
    return x;
}

/* In the scratch that the plan without it tells. */
static tqkv_result plan_choose(const tqkv_metal_index *x, int k, tqkv_metal_plan *plan)
{
    tqkv_metal_plan sizes;
    const tqkv_result r =
        check_plan(tqkv_metal_plan_index_choose(x, at(Q, 0), k, at(SCRATCH, 0), at(OUT, 0), plan), plan);
    (void)tqkv_metal_plan_index_choose(x, none, 1, none, none, &sizes);
    CHECK(plan_end(plan, at(SCRATCH, 0)) <= sizes.scratch_size, "%zu bytes of scratch", sizes.scratch_size);
    return r;
}

static tqkv_result plan_scores(const tqkv_metal_index *x, tqkv_metal_plan *plan)
{
    return check_plan(tqkv_metal_plan_index_scores(x, at(Q, 0), at(OUT, 0), plan), plan);
}

static void check_choose(NO_ROW)
{
    tqkv_metal_store keys;
    tqkv_metal_index x = plan_index(&keys, 1 << 20, 1 << 18, 1);
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    CHECK_RESULT(plan_choose(&x, 2048, &plan), TQKV_OK);
    CHECK(plan.n == 3 && d[1].grid[0] == 64 && d[2].grid[0] == 1 && plan_end(&plan, at(OUT, 0)) == 8192,
          "%d dispatches of %zu", plan.n, d->grid[0]);
    x.index.n_queries = 40;
    CHECK_RESULT(plan_choose(&x, 2048, &plan), TQKV_OK);
    CHECK(plan.n == 1 && d->grid[0] == 1 && d->grid[1] == 40 && !plan_end(&plan, at(SCRATCH, 0)), "many queries");
    CHECK_RESULT(plan_choose(&x, 0, &plan), TQKV_OK);
    CHECK(d->grid[0] == 0, "nothing to choose");
    x.index.positions = 1;
    CHECK_RESULT(plan_choose(&x, 7, &plan), TQKV_OK);
    x.index.n_queries = 0;
    CHECK_RESULT(plan_choose(&x, 2048, &plan), TQKV_OK);
    CHECK(!plan.n, "a choice for no query");
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_OK);
    CHECK(!plan.n, "scores of no query");
}

static void check_scores(NO_ROW)
{
    tqkv_metal_store keys;
    tqkv_metal_index x = plan_index(&keys, 1 << 18, 1 << 18, 2);
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    x.index.n_heads = 64;
    x.weights = at(MORE, 0);
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_OK);
    CHECK(constant(d, TQKV_FC_COLUMNS) == 32 && d->grid[0] == 256 && d->grid[1] == 2, "%zu threadgroups", d->grid[0]);
    CHECK(plan_end(&plan, at(OUT, 0)) == 2 << 20 && plan_end(&plan, at(MORE, 0)) == 512, "scores and weights");
    const int64_t ends[] = {1 << 18, 100, 0};
    const size_t blocks[] = {53, 1, 0};
    for (int i = 0; i < 3; i++) {
        x.index.block = i ? 0 : 5000;
        x.index.end = ends[i];
        CHECK_RESULT(plan_scores(&x, &plan), TQKV_OK);
        CHECK(d->grid[0] == blocks[i], "%zu threadgroups", d->grid[0]);
    }
    keys.shape.head_dim = 256;
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_UNSUPPORTED);
}

static void check_index_refusals(NO_ROW)
{
    static const int32_t pages[4] = {3, 0, 5, 2}; /* of 5 pages */
    tqkv_metal_store keys;
    tqkv_metal_index x = plan_index(&keys, 100, 90, 2);
    tqkv_metal_plan plan;
    CHECK_RESULT(plan_choose(&x, -1, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(plan_choose(NULL, 7, &plan), TQKV_INVALID_ARGUMENT);
    keys.shape.n_kv_heads = 3;
    CHECK_RESULT(plan_choose(&x, 7, &plan), TQKV_INVALID_ARGUMENT);
    x.keys = NULL;
    CHECK_RESULT(plan_choose(&x, 7, &plan), TQKV_INVALID_ARGUMENT);
    x = plan_index(&keys, 100, (int64_t)1 << 31, 1);
    keys.shape.ring = true;
    x.index.block = 2;
    CHECK_RESULT(plan_choose(&x, 7, &plan), TQKV_UNSUPPORTED);
    x = plan_index(&keys, 100, INT_MAX, 1 << 20);
    keys.shape.ring = true;
    CHECK_RESULT(plan_choose(&x, INT_MAX, &plan), sizeof(size_t) == 8 ? TQKV_OK : TQKV_INVALID_ARGUMENT);
    x = plan_index(&keys, 100, 250, 9);
    keys = plan_pool(TQKV_TQ4, 0, pages);
    keys.shape.n_kv_heads = 1;
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_OUT_OF_RANGE);
    x.index.end = 128; /* no query sees the entry of a page that there is not */
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_OK);
}

void test_plan_index_cases(void)
{
    test_add(check_choose, NULL, 0, "plan/index/choose");
    test_add(check_scores, NULL, 0, "plan/index/scores");
    test_add(check_index_refusals, NULL, 0, "plan/index/refusals");
}

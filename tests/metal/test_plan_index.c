/* Plans of an index, its scores and the choice of blocks, and of attention over lists of them. */
#include "plan_fixture.h"

static tqkv_metal_index plan_index(const tqkv_metal_store *keys, int64_t end, int n_queries)
{
    tqkv_metal_index x;
    memset(&x, 0, sizeof x);
    x.keys = keys;
    x.index.end = end;
    x.index.n_heads = 1;
    x.index.n_queries = n_queries;
    return x;
}

static tqkv_metal_store plan_index_keys(int capacity)
{
    tqkv_metal_store s = plan_store(TQKV_TQ4, 128, capacity, false, 0);
    s.shape.n_kv_heads = 1;
    return s;
}

static tqkv__choose_args choose_args(const tqkv_metal_dispatch *d)
{
    tqkv__choose_args args;
    memcpy(&args, d->arguments[0].bytes, sizeof args);
    return args;
}

static tqkv_result plan_choose(const tqkv_metal_index *x, int k, tqkv_metal_plan *plan)
{
    const tqkv_result r = tqkv_metal_plan_index_choose(x, at(4, 0), k, at(5, 0), at(6, 0), plan);
    check_plan(plan);
    return r;
}

static tqkv_result plan_choose_scratch(const tqkv_metal_index *x, size_t *bytes)
{
    tqkv_metal_plan plan;
    const tqkv_result r = tqkv_metal_plan_index_choose(x, none, 1, none, none, &plan);
    *bytes = plan.scratch_size;
    return r;
}

static void check_choose(const void *row)
{
    const tqkv_metal_store keys = plan_index_keys(1 << 20);
    tqkv_metal_index x = plan_index(&keys, 1 << 18, 1);
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    size_t bytes;
    (void)row;
    CHECK_RESULT(plan_choose(&x, 2048, &plan), TQKV_OK);
    CHECK(plan.n == 3 && d[1].grid[0] == 64 && d[2].grid[0] == 1 && !d[0].barrier && d[2].barrier,
          "%d dispatches of %zu", plan.n, d->grid[0]);
    CHECK(choose_args(&d[1]).step == TQKV__CHOOSE_GATHER && choose_args(&d[2]).step == TQKV__CHOOSE_AMONG, "the steps");
    CHECK_RESULT(plan_choose_scratch(&x, &bytes), TQKV_OK);
    CHECK(binding(d, "scratch").size <= bytes && binding(d, "list").size == 8192, "%zu bytes of scratch", bytes);
    x.index.n_queries = 0;
    CHECK_RESULT(plan_choose(&x, 2048, &plan), TQKV_OK);
    CHECK(!plan.n, "a choice for no query");
    CHECK_RESULT(tqkv_metal_plan_index_scores(&x, none, none, &plan), TQKV_OK);
    CHECK(!plan.n, "scores of no query");
    x.index.n_queries = 40;
    CHECK_RESULT(plan_choose(&x, 2048, &plan), TQKV_OK);
    CHECK(plan.n == 1 && d->grid[0] == 1 && d->grid[1] == 40 && !binding(d, "scratch").size, "many queries");
    CHECK_RESULT(plan_choose_scratch(&x, &bytes), TQKV_OK);
    CHECK(bytes == 0, "%zu bytes of scratch", bytes);
    x.index.n_queries = 3;
    x.index.block = 64;
    x.index.ratio = 4;
    x.index.positions = 4 * (1 << 18) - 5; /* 0 .. : query 0 has seen two keys less */
    CHECK_RESULT(plan_choose(&x, 7, &plan), TQKV_OK);
    CHECK(plan.n == 1 && choose_args(d).n_blocks == 4096 && choose_args(d).seen == (1 << 18) - 2 &&
              choose_args(d).seen_rest == 1,
          "%d and %d", choose_args(d).seen, choose_args(d).seen_rest);
    x.index.positions = 1;
    CHECK_RESULT(plan_choose(&x, 7, &plan), TQKV_OK);
    CHECK(choose_args(d).seen == -1 && choose_args(d).seen_rest == 3, "before position 0");
    CHECK_RESULT(plan_choose(&x, 0, &plan), TQKV_OK);
    CHECK(d->grid[0] == 0, "nothing to choose");
}

static tqkv_result plan_scores(const tqkv_metal_index *x, tqkv_metal_plan *plan)
{
    const tqkv_result r = tqkv_metal_plan_index_scores(x, at(4, 0), at(5, 0), plan);
    check_plan(plan);
    return r;
}

static void check_scores(const void *row)
{
    tqkv_metal_store keys = plan_index_keys(1 << 18);
    tqkv_metal_index x = plan_index(&keys, 1 << 18, 2);
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    tqkv__index_args args;
    (void)row;
    x.index.n_heads = 64;
    x.weights = at(6, 0);
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_OK);
    memcpy(&args, d->arguments[0].bytes, sizeof args);
    CHECK(constant(d, TQKV_FC_COLUMNS) == 32 && d->grid[0] == 256 && d->grid[1] == 2 && args.blocks_each == 1024,
          "%zu threadgroups", d->grid[0]);
    CHECK(binding(d, "scores").size == 2 << 20 && binding(d, "weights").size == 512, "scores and weights");
    x.index.block = 5000;
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_OK);
    CHECK(d->grid[0] == 53, "%zu blocks", d->grid[0]);
    x.index.end = 100;
    x.index.block = 0;
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_OK);
    CHECK(d->grid[0] == 1, "%zu threadgroups", d->grid[0]);
    x.index.end = 0;
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_OK);
    CHECK(d->grid[0] == 0, "no keys");
    keys.shape.head_dim = 256;
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_index_scores(&x, none, none, NULL), TQKV_INVALID_ARGUMENT);
}

/* A list of 2,048 of 32,768 positions takes a tenth of the threadgroups along the context,
 * whose stretches are as long. */
static void check_list(const void *row)
{
    tqkv_metal_store keys = plan_store(TQKV_TQ4, 64, 32768, false, 0),
                     values = plan_store(TQKV_TQ4, 64, 32768, false, 2);
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    size_t bytes;
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.n_heads = 15;
    a.attention.n_queries = 3;
    a.attention.end = 32768;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    const size_t all = d->grid[2];
    a.list = at(7, 0);
    a.attention.list.length = 2048;
    a.attention.list.block = 1;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(plan.n == 3 && all == 28 && d[1].grid[2] == 4 * TQKV__STRANDS && d[1].grid[1] == 3 &&
              constant(d + 1, TQKV_FC_LIST) == 1 && d[1].barrier,
          "%zu splits of %zu, %zu blocks of rows", d[1].grid[2], all, d[1].grid[1]);
    CHECK(d->grid[0] == 3 && binding(d, "list").size == 3 * 8192, "%zu rows", d->grid[0]);
    CHECK(binding(d, "scratch").size == 3 * (8192 + 32), "the cleaned rows");
    CHECK_RESULT(plan_scratch(&a, &bytes), TQKV_OK);
    const tqkv_metal_binding state = binding(&d[2], "scratch");
    CHECK(state.at.offset + state.size <= bytes, "%zu bytes of scratch", bytes);
    a.attention.list.heads = 2;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    a.attention.list.heads = 3;
    a.attention.list.block = 32;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    a.attention.list.block = 64;
    a.attention.list.length = -1;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    a.attention.list.length = INT_MAX;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
}

/* A ring that has wrapped, with a window: scratch holds what a call takes. Part of a context has lists of its own. */
static void check_list_scratch(const void *row)
{
    const tqkv_metal_store keys = plan_store(TQKV_TQ4, 64, 10000, true, 0),
                           values = plan_store(TQKV_TQ4, 64, 10000, true, 2);
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    size_t bytes;
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.end = 15000;
    a.attention.window = 5000;
    a.list = at(7, 0);
    a.attention.list.length = 200;
    a.attention.list.block = 64;
    CHECK_RESULT(plan_scratch(&a, &bytes), TQKV_OK);
    CHECK_RESULT(tqkv_metal_plan_attend(&a, at(4, 0), at(5, 0), at(6, 0), &plan), TQKV_OK);
    const tqkv_metal_binding state = binding(&d[2], "scratch");
    CHECK(plan.n == 3 && state.at.offset + state.size <= bytes, "%zu bytes, not %zu", bytes,
          state.at.offset + state.size);
    CHECK_RESULT(
        tqkv_metal_plan_attend_partial(&a, at(4, 0), 12000, 1000, at(5, 0), at(6, 0), at(6, 8192), at(6, 9216), &plan),
        TQKV_OK);
    const tqkv__attend_args args = attend_args(&d[1]), list = attend_args(&d[0]);
    CHECK(plan.n == 3 && args.kv_len == 3000 && args.slice_end == 1000 && args.list_first_block == 187 &&
              args.list_inside == 32 && !memcmp(&args, &list, sizeof args),
          "the list of a slice");
    check_plan(&plan);
}

static void check_index_refusals(const void *row)
{
    const tqkv_metal_store keys = plan_index_keys(100), three = plan_store(TQKV_TQ4, 128, 100, false, 0);
    tqkv_metal_index x = plan_index(&keys, 90, 2);
    tqkv_metal_plan plan;
    int *const numbers[] = {&x.index.n_queries, &x.index.ratio,  &x.index.block,  &x.index.first,
                            &x.index.newest,    &x.index.kv_len, &x.index.n_heads};
    (void)row;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        *numbers[i] = -1;
        CHECK_RESULT(plan_choose(&x, 7, &plan), TQKV_INVALID_ARGUMENT);
        *numbers[i] = 0;
    }
    CHECK_RESULT(plan_choose(&x, -1, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(plan_choose(NULL, 7, &plan), TQKV_INVALID_ARGUMENT);
    x.keys = &three;
    CHECK_RESULT(plan_choose(&x, 7, &plan), TQKV_INVALID_ARGUMENT);
    x.keys = NULL;
    CHECK_RESULT(plan_choose(&x, 7, &plan), TQKV_INVALID_ARGUMENT);
    tqkv_metal_store ring = keys;
    ring.shape.ring = true;
    x = plan_index(&ring, (int64_t)1 << 31, 1);
    x.index.block = 2;
    CHECK_RESULT(plan_choose(&x, 7, &plan), TQKV_UNSUPPORTED);
    x = plan_index(&ring, INT_MAX, 1 << 20);
    CHECK_RESULT(plan_choose(&x, INT_MAX, &plan), sizeof(size_t) == 8 ? TQKV_OK : TQKV_INVALID_ARGUMENT);
}

/* An entry of a table that no query sees does not matter. */
static void check_index_pages(const void *row)
{
    static const int32_t pages[4] = {3, 0, 5, 2}; /* of 5 pages */
    tqkv_metal_store pool = plan_pool(TQKV_TQ4, 0, pages);
    tqkv_metal_plan plan;
    (void)row;
    pool.shape.n_kv_heads = 1;
    tqkv_metal_index x = plan_index(&pool, 250, 9);
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_OUT_OF_RANGE);
    x.index.end = 128;
    CHECK_RESULT(plan_scores(&x, &plan), TQKV_OK);
}

void test_plan_index_cases(void)
{
    test_add(check_choose, NULL, 0, "plan/index/choose");
    test_add(check_scores, NULL, 0, "plan/index/scores");
    test_add(check_list, NULL, 0, "plan/list");
    test_add(check_list_scratch, NULL, 0, "plan/list/scratch");
    test_add(check_index_refusals, NULL, 0, "plan/index/refusals");
    test_add(check_index_pages, NULL, 0, "plan/index/pages");
}

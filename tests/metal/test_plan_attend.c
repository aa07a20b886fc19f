/* The plans of attention over stores. */
#include "plan_fixture.h"

static void check_attend(const void *row)
{
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    const tqkv_metal_store keys = plan_store(TQKV_I8, 64, 100, true, 0), values = plan_store(TQKV_F16, 64, 40, true, 2);
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.n_heads = 6;
    a.attention.n_queries = 4;
    a.attention.end = 1030;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(attend_args(d).kv_len == 40 && attend_args(d).key_oldest_slot == 90 && attend_args(d).value_oldest_slot == 30,
          "oldest slots %d, %d", attend_args(d).key_oldest_slot, attend_args(d).value_oldest_slot);
    CHECK(constant(d, TQKV_FC_ROTATE_QUERIES) == 1 && constant(d, TQKV_FC_SAME_SLOTS) == 0 &&
              constant(d, TQKV_FC_MANY_QUERIES) == 1 && constant(d, TQKV_FC_SOFTCAP) == 0,
          "the kernel");
    CHECK(constant(d + 1, TQKV_FC_UNROTATE) == 0 && constant(d + 1, TQKV_FC_SINKS) == 0, "the merge");
    CHECK(attend_args(d).group == 2 && d[1].grid[0] == 24 && merge_args(d).n_rows == 24, "rows");
    CHECK(d[1].barrier == at(5, 0).buffer && !d[0].barrier, "a barrier between the two");
    a.attention.window = 10;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(attend_args(d).window == 10, "window %d", attend_args(d).window);
    a.attention.window = 40; /* all resident positions: the same as no window */
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(attend_args(d).window == 0, "window %d", attend_args(d).window);
    a.attention.end = a.attention.kv_len = 0;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(attend_args(d).kv_len == 0 && attend_args(d).key_oldest_slot == 0 && d[0].n_simdgroups == 1,
          "an empty store");
    a.sinks = at(5, 8);
    CHECK_RESULT(tqkv_metal_plan_attend(&a, at(4, 0), at(5, 0), at(6, 0), &plan), TQKV_OK);
    CHECK(!strcmp(overlapping(d), "sinks"), "sinks in the scratch: %s", overlapping(d));
    a.attention.kv_len = 1;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OUT_OF_RANGE);
    a.attention.n_heads = 7;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
}

static void check_tree(const void *row)
{
    const uint64_t tree[64] = {1, 3, 5};
    const int32_t pages[] = {3, -1, 2, 0};
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    const tqkv_metal_store keys = plan_store(TQKV_I8, 64, 100, false, 0),
                           values = plan_store(TQKV_F16, 64, 100, true, 2);
    const tqkv_metal_store paged = plan_pool(TQKV_I8, 0, pages), paged_values = plan_pool(TQKV_F16, 2, pages);
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.end = 70;
    a.attention.n_queries = 3;
    a.tree = at(7, 4);
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(constant(d, TQKV_FC_TREE) == 1 && binding(d, "tree").size == 24 && binding(d, "tree").at.offset == 4,
          "a tree that is not known here");
    a.attention.tree = tree;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    a.attention.n_queries = 65;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    a.attention.tree = NULL;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    a.attention.n_queries = 3;
    a.attention.tree = tree;
    a.tree = none;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    a.tree = at(5, 8);
    CHECK_RESULT(tqkv_metal_plan_attend(&a, at(4, 0), at(5, 0), at(6, 0), &plan), TQKV_OK);
    CHECK(!strcmp(overlapping(d), "scratch"), "a tree in the scratch: %s", overlapping(d));
    a.keys = &paged; /* positions 64, 65 and 66, of the entry -1: the tree shows the second and the third only to 1 */
    a.values = &paged_values;
    a.attention.end = 67;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OUT_OF_RANGE);
    a.attention.tree = tree + 3; /* zeros */
    a.tree = at(7, 0);
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    a.attention.tree = NULL;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
}

/* Slices of values whose centres or scales are others do not merge; outputs lie apart from all that is read. */
static void check_channels(const void *row)
{
    tqkv_metal_plan plan;
    tqkv_metal_store keys = plan_store(TQKV_I8, 64, 10, false, 0), values = plan_store(TQKV_F16, 64, 10, false, 2),
                     plain = values;
    const tqkv_metal_buffer b = at(5, 0);
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values), other = plan_attention(&keys, &plain);
    a.attention.end = other.attention.end = 10;
    values.channel_scale = at(7, 0);
    CHECK_RESULT(tqkv_metal_plan_attend_merge(&a, b, b, b, &a, b, b, b, &plan), TQKV_OK);
    CHECK_RESULT(tqkv_metal_plan_attend_merge(&a, b, b, b, &other, b, b, b, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_attend_merge(&other, b, b, b, &a, b, b, b, &plan), TQKV_INVALID_ARGUMENT);
    values.center = at(7, 4096);
    CHECK_RESULT(tqkv_metal_plan_attend(&a, at(4, 0), at(5, 0), at(7, 4096), &plan), TQKV_OK);
    CHECK(!strcmp(overlapping(plan.d), "values' center"), "the output in the centre: %s", overlapping(plan.d));
    CHECK_RESULT(tqkv_metal_plan_attend(&a, at(4, 0), at(5, 0), at(7, 0), &plan), TQKV_OK);
    CHECK(!strcmp(overlapping(plan.d), "values' channel_scale"), "the output in the scale: %s", overlapping(plan.d));
}

/* Streams that share bytes are one stream. */
static void check_tail_refusals(const void *row)
{
    tqkv_metal_plan plan;
    tqkv_metal_store keys = plan_store(TQKV_TQ4, 512, 100, false, 0), tail = plan_store(TQKV_I8, 64, 100, false, 2),
                     other = keys;
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &keys);
    a.tail = &tail;
    a.attention.end = 100;
    a.attention.n_heads = 12;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    tail.shape.capacity = 90;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    tail.shape.capacity = 100;
    tail.shape.head_dim = 128;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
    tail.shape.head_dim = 64;
    tail.pages = at(7, 0);
    tail.shape.page_size = 64;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    tail.pages = none;
    tail.codes = at(0, 3 * 100 * 256 - 16);
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    a.tail = NULL;
    a.values = &other;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    other.shape.format = TQKV_TQ3;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    other.shape.format = TQKV_TQ4;
    other.codes = at(0, 256);
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    keys.shape.head_dim = other.shape.head_dim = 256; /* no tail for keys of 256 */
    a.values = &keys;
    a.tail = &tail;
    tail.codes = at(2, 0);
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
}

/* A ring far behind its first positions, which are kept with their tails: they are a region of their own, from 0 on. */
static void check_kept(const void *row)
{
    tqkv_metal_store keys = plan_store(TQKV_TQ4, 512, 100, true, 0), tail = plan_store(TQKV_TQ5, 64, 100, true, 2),
                     first = plan_store(TQKV_F16, 512, 8, false, 4), first_tail = plan_store(TQKV_TQ5, 64, 8, false, 6);
    tqkv_metal_plan plan;
    (void)row;
    first.shape.rotation = TQKV_ROTATION_ON;
    tqkv_metal_attention a = plan_attention(&keys, &keys);
    a.tail = &tail;
    a.first.keys = a.first.values = &first;
    a.first.tail = &first_tail;
    a.attention.first.n = 8;
    a.attention.end = 5000;
    CHECK_RESULT(tqkv_metal_plan_attend(&a, at(3, 0), at(3, 1 << 20), at(3, 1 << 16), &plan), TQKV_OK);
    CHECK(plan.n == 3, "%d dispatches", plan.n);
    a.list = none;
    a.attention.window = 4990;
    a.attention.end = (int64_t)1 << 31;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
    a.attention.window = 0;
    tqkv_metal_store bad[4] = {first_tail, first_tail, first_tail, first_tail};
    bad[0].channel_scale = bad[1].center = at(3, 0);
    bad[2].shape.format = TQKV_TQ4;
    bad[3].shape.capacity = 7;
    for (int i = 0; i < 4; i++) {
        a.first.tail = &bad[i];
        CHECK_RESULT(plan_attend(&a, &plan), i < 3 ? TQKV_INVALID_ARGUMENT : TQKV_OUT_OF_RANGE);
    }
}

/* Halves beside pages: of both streams, without a tail, and in no pages themselves. */
static void check_paged_ends(const void *row)
{
    static const int32_t pages[4] = {3, 0, 1, 2};
    tqkv_metal_store keys = plan_pool(TQKV_I8, 0, pages), values = plan_pool(TQKV_TQ4, 2, pages), last, tail;
    tqkv_metal_plan plan;
    (void)row;
    last = plan_store(TQKV_F16, 64, 80, true, 4);
    last.shape.rotation = TQKV_ROTATION_ON;
    tail = plan_pool(TQKV_F16, 6, pages);
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.last.keys = a.last.values = &last;
    a.attention.last.n = 40;
    a.attention.end = 200;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    a.last.values = NULL;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
    a.last.values = &last;
    last.pages = at(7, 2048);
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
    last.pages = none;
    keys.shape.head_dim = last.shape.head_dim = 512;
    tail.pages = keys.pages;
    a.values = a.keys;
    a.tail = &tail;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
}

/* Positions count in 32 bits, also those that queries see behind them. */
static void check_non_causal(const void *row)
{
    tqkv_metal_store s = plan_store(TQKV_TQ5, 64, INT_MAX, false, 0);
    tqkv_metal_plan plan;
    (void)row;
    tqkv_metal_attention a = plan_attention(&s, &s);
    a.attention.list.block = 16;
    a.attention.list.length = 1;
    a.attention.n_queries = 4;
    a.attention.window = INT_MAX;
    for (int listed = 0; listed < 2; listed++) {
        a.list = listed ? at(7, 0) : none;
        a.attention.non_causal = true;
        a.attention.end = 50;
        CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
        a.attention.end = 1 << 30;
        CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
        a.attention.non_causal = false;
        CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    }
}

void test_plan_attend_cases(void)
{
    test_add(check_attend, NULL, 0, "plan/attend");
    test_add(check_tree, NULL, 0, "plan/tree");
    test_add(check_channels, NULL, 0, "plan/channels");
    test_add(check_tail_refusals, NULL, 0, "plan/tail/refusals");
    test_add(check_kept, NULL, 0, "plan/kept");
    test_add(check_paged_ends, NULL, 0, "plan/paged_ends");
    test_add(check_non_causal, NULL, 0, "plan/non_causal");
}

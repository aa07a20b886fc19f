/* What the plan of attention refuses, and which arrays must lie apart: one change of a scene a line. What dispatches
   compute shows the machine of simt.h. */
#include "plan_fixture.h"

static void check_numbers(NO_ROW)
{
    plan_scene s;
    PLAN_IS(OUT_OF_RANGE, PLAIN, s.a.attention.end = 9001);
    PLAN_IS(INVALID_ARGUMENT, PLAIN, s.a.attention.n_heads = 7);
    PLAN_IS(INVALID_ARGUMENT, PLAIN, s.a.attention.n_queries = INT_MAX);
    PLAN_IS(INVALID_ARGUMENT, PLAIN, s.a.keys = NULL);
    PLAN_IS(UNSUPPORTED, PLAIN, s.a.attention.output_type = test_no_type(-1));
    /* Rows that share values: only those that are read may. */
    PLAN_IS(OK, PLAIN, s.keys.shape.strides.head = 65; s.a.attention.query_strides.head = 65);
    PLAN_IS(INVALID_ARGUMENT, PLAIN, s.a.attention.n_queries = 4; s.a.attention.output_strides.head = 65);
    if (sizeof(size_t) > 4) PLAN_IS(UNSUPPORTED, PLAIN, s.a.attention.output_strides.head = (size_t)UINT32_MAX * 2);
    /* Positions count in 32 bits, also those that queries see behind them. */
    for (int listed = 0; listed < 2; listed++) {
        const tqkv_metal_buffer list = listed ? at(MORE, 0) : none;
        PLAN_IS(OK, PLAIN, s.a.list = list; s.a.attention.list.block = s.a.attention.list.length = 1;
                s.a.attention.non_causal = true);
        PLAN_IS(UNSUPPORTED, PLAIN, s.keys.shape.capacity = s.values.shape.capacity = INT_MAX;
                s.a.attention.end = 1 << 30; s.a.attention.window = INT_MAX; s.a.attention.n_queries = 4;
                s.a.list = list; s.a.attention.list.block = s.a.attention.list.length = 1;
                s.a.attention.non_causal = true);
        PLAN_IS(OK, PLAIN, s.keys.shape.capacity = s.values.shape.capacity = INT_MAX; s.a.attention.end = 1 << 30;
                s.a.attention.window = INT_MAX; s.a.attention.n_queries = 4; s.a.list = list;
                s.a.attention.list.block = s.a.attention.list.length = 1);
    }
}

/* A tree whose bits are known here, or not. */
static void check_tree(NO_ROW)
{
    const uint64_t tree[64] = {1, 3, 5};
    plan_scene s;
    PLAN_IS(OK, PLAIN, s.a.attention.n_queries = 3; s.a.tree = at(MORE, 4));
    CHECK(plan_end(&s.plan, at(MORE, 0)) == 4 + 24, "the size of a tree");
    PLAN_IS(INVALID_ARGUMENT, PLAIN, s.a.attention.n_queries = 65; s.a.tree = at(MORE, 4));
    PLAN_IS(INVALID_ARGUMENT, PLAIN, s.a.attention.n_queries = 65; s.a.tree = at(MORE, 4); s.a.attention.tree = tree);
    PLAN_IS(INVALID_ARGUMENT, PLAIN, s.a.attention.n_queries = 3; s.a.attention.tree = tree);
    PLAN_OVERLAPS("scratch", s.a.attention.n_queries = 3; s.a.tree = at(SCRATCH, 8));
    /* Positions 64, 65 and 66 are of entry -1; the tree shows the second and the third only to query 1. */
    PLAN_IS(OUT_OF_RANGE, PAGED, s.pages[1] = -1; s.a.attention.end = 67; s.a.attention.n_queries = 3;
            s.a.tree = at(MORE, 4096); s.a.attention.tree = tree);
    PLAN_IS(OK, PAGED, s.pages[1] = -1; s.a.attention.end = 67; s.a.attention.n_queries = 3; s.a.tree = at(MORE, 4096);
            s.a.attention.tree = tree + 3); /* zeros */
    PLAN_IS(OK, PAGED, s.pages[1] = -1; s.a.attention.end = 67; s.a.attention.n_queries = 3;
            s.a.tree = at(MORE, 4096)); /* not known here */
}

static void check_overlaps(NO_ROW)
{
    plan_scene s;
    PLAN_OVERLAPS("sinks", s.a.sinks = at(SCRATCH, 8));
    PLAN_OVERLAPS("values' center", s.values.center = at(OUT, 0));
    PLAN_OVERLAPS("values' channel_scale", s.values.channel_scale = at(OUT, 0));
    /* Streams that share bytes are one stream. */
    PLAN_IS(INVALID_ARGUMENT, PLAIN, s.values = s.keys; s.values.shape.format = TQKV_TQ3);
    PLAN_IS(INVALID_ARGUMENT, PLAIN, s.values = s.keys; s.values.codes.offset = 32);
}

static void check_tails(NO_ROW)
{
    plan_scene s;
    PLAN_IS(OK, LATENT, (void)0);
    PLAN_IS(INVALID_ARGUMENT, LATENT, s.tail.shape.capacity = 8999);
    PLAN_IS(UNSUPPORTED, LATENT, s.tail.shape.head_dim = 128);
    PLAN_IS(INVALID_ARGUMENT, LATENT, s.tail.pages = at(MORE, 0); s.tail.shape.page_size = 64);
    PLAN_IS(INVALID_ARGUMENT, LATENT, s.tail.codes = at(0, 3 * 9000 * 256 - 16)); /* in the keys */
    PLAN_IS(UNSUPPORTED, LATENT, s.keys.shape.head_dim = 256);                    /* no tail for keys of 256 */
    /* First positions are kept with their tails; a ring stands far behind them. */
#define KEPT \
    s.keys.shape.ring = s.tail.shape.ring = true; \
    s.a.first.keys = s.a.first.values = &s.first; \
    s.a.first.tail = &s.first_tail; \
    s.a.attention.first.n = 20; \
    s.a.attention.end = 50000
    PLAN_IS(OK, LATENT, KEPT);
    CHECK(s.plan.n == 3, "%d dispatches", s.plan.n);
    PLAN_IS(UNSUPPORTED, LATENT, KEPT; s.a.attention.window = 8990; s.a.attention.end = (int64_t)1 << 31);
    PLAN_IS(INVALID_ARGUMENT, LATENT, KEPT; s.first_tail.channel_scale = at(MORE, 0));
    PLAN_IS(INVALID_ARGUMENT, LATENT, KEPT; s.first_tail.center = at(MORE, 0));
    PLAN_IS(INVALID_ARGUMENT, LATENT, KEPT; s.first_tail.shape.format = TQKV_TQ4);
    PLAN_IS(OUT_OF_RANGE, LATENT, KEPT; s.first_tail.shape.capacity = 19);
#undef KEPT
}

/* A dispatch for the first positions, for the others, for the last ones, and the merge. A ring has room for the newest
   halves of all queries, or refuses them. */
static void check_ends(NO_ROW)
{
    plan_scene s;
    for (int end = 0; end <= 9000; end += 113) {
        PLAN_IS(OK, ENDS, s.a.attention.end = end);
        CHECK(s.plan.n == (end > 720 ? 4 : end > 20 ? 3 : 2), "%d dispatches at %d", s.plan.n, end);
    }
    PLAN_IS(INVALID_ARGUMENT, ENDS, s.first.shape.rotation = TQKV_ROTATION_DEFAULT);
    PLAN_IS(INVALID_ARGUMENT, ENDS, s.first.center = at(MORE, 0));
    PLAN_IS(OUT_OF_RANGE, ENDS, s.first.shape.capacity = 19);
    PLAN_IS(UNSUPPORTED, ENDS, s.a.attention.first.n = s.first.shape.capacity = 1500; s.a.first.values = NULL);
    PLAN_IS(OUT_OF_RANGE, ENDS, s.a.attention.last.n = INT_MAX; s.a.attention.n_queries = 9);
    PLAN_IS(OK, ENDS, s.a.attention.last.n = INT_MAX; s.a.attention.n_queries = 9; s.last.shape.capacity = 9024);
    CHECK(s.plan.n == 3, "%d dispatches, all are newest", s.plan.n);
    PLAN_IS(OK, ENDS, s.a.attention.last.n = 100; s.a.attention.n_queries = 29; s.last.shape.capacity = 128);
    PLAN_IS(OUT_OF_RANGE, ENDS, s.a.attention.last.n = 100; s.a.attention.n_queries = 30; s.last.shape.capacity = 128);
    PLAN_IS(OK, ENDS, s.a.attention.last.from = 3000); /* an edit took all of them away */
    CHECK(s.plan.n == 3, "%d dispatches, none is newest", s.plan.n);
}

/* Halves beside pages: of both streams, without a tail, and in no pages themselves. */
static void check_paged_ends(NO_ROW)
{
    plan_scene s;
#define WITH_LAST \
    s.a.last.keys = s.a.last.values = &s.last; \
    s.a.attention.last.n = 40
    PLAN_IS(OK, PAGED, WITH_LAST);
    PLAN_IS(UNSUPPORTED, PAGED, WITH_LAST; s.a.last.values = NULL);
    PLAN_IS(UNSUPPORTED, PAGED, WITH_LAST; s.last.pages = at(MORE, 2048));
    PLAN_IS(OK, PAGED, WITH_LAST; s.values = s.keys; s.a.last.values = NULL); /* which are those of the keys */
    PLAN_IS(UNSUPPORTED, PAGED, WITH_LAST; s.values = s.keys; s.values.shape.page_size = 320; s.a.last.values = NULL);
    PLAN_IS(UNSUPPORTED, PAGED, WITH_LAST; s.keys.shape.head_dim = s.last.shape.head_dim = 512; s.a.values = s.a.keys;
            s.tail = plan_pool(TQKV_F16, 6, s.pages); s.tail.pages = s.keys.pages; s.a.tail = &s.tail);
#undef WITH_LAST
}

static void check_pages(NO_ROW)
{
    plan_scene s;
    PLAN_IS(OUT_OF_RANGE, PAGED, s.pages[1] = -1);
    PLAN_IS(OK, PAGED, s.pages[1] = -1; s.a.attention.window = 72);
    CHECK(constant(s.plan.d, TQKV_FC_SAME_SLOTS) == 0, "two tables");
    PLAN_IS(OK, PAGED, s.values.pages = s.keys.pages);
    CHECK(constant(s.plan.d, TQKV_FC_SAME_SLOTS) == 1, "one table is looked up twice");
    PLAN_IS(UNSUPPORTED, PAGED, s.values = plan_store(TQKV_F16, 64, 320, false, 2));
    PLAN_IS(UNSUPPORTED, PAGED, s.values = plan_store(TQKV_F16, 64, 320, false, 2); s.keys.shape.pages = NULL);
    PLAN_IS(INVALID_ARGUMENT, PAGED, s.keys.pages = none);
    /* Tables that only the GPU knows, and an empty one, which is not read. */
    PLAN_IS(OK, PAGED, s.keys.shape.pages = s.values.shape.pages = NULL; s.a.attention.end = 256);
    PLAN_IS(OUT_OF_RANGE, PAGED, s.keys.shape.pages = s.values.shape.pages = NULL; s.a.attention.end = 257);
    PLAN_IS(OK, PAGED, s.values.shape.n_pages = 0; s.a.attention.end = 0);
    CHECK(constant(s.plan.d, TQKV_FC_PAGES) == 0 && attend_args(s.plan.d).key_capacity == 320,
          "an empty table is read");
}

/* The kernel divides by the tiles of a page with a factor and a shift. */
static void check_page_division(NO_ROW)
{
    const int page_sizes[] = {64, 128, 192, 320, 448, 4032, 65600, 1 << 20, 33554432 + 64, 1 << 30, INT_MAX / 64 * 64};
    plan_scene s;
    for (size_t i = 0; i < sizeof page_sizes / sizeof *page_sizes; i++) {
        const uint32_t tiles = (uint32_t)page_sizes[i] / 32, last = (uint32_t)INT_MAX / 32;
        PLAN_IS(OK, PAGED, s.keys.shape.pages = NULL; s.a.attention.end = s.keys.shape.n_pages = 1;
                s.keys.shape.capacity = s.keys.shape.page_size = page_sizes[i]; s.a.values = &s.keys);
        const tqkv__attend_args args = attend_args(s.plan.d);
        for (uint32_t page = 0; page <= last / tiles; page += 1 + page / 50)
            for (uint32_t tile = page * tiles, n = 0; n < 2; n++, tile += tiles - 1)
                CHECK(tile > last ||
                          (uint32_t)((uint64_t)tile * args.key_page_factor >> 32) >> args.key_page_shift == page,
                      "tile %u of pages of %d", tile, page_sizes[i]);
    }
}

static void check_lists(NO_ROW)
{
    plan_scene s;
#define LISTED(n, size) \
    s.a.list = at(MORE, 0); \
    s.a.attention.list.length = n; \
    s.a.attention.list.block = size
    PLAN_IS(OK, PLAIN, LISTED(2048, 1); s.a.attention.n_queries = 3);
    CHECK(s.plan.n == 3 && plan_end(&s.plan, at(MORE, 0)) == 3 * 8192, "%d dispatches", s.plan.n);
    PLAN_IS(INVALID_ARGUMENT, PLAIN, LISTED(2048, 1); s.a.attention.list.heads = 2);
    PLAN_IS(INVALID_ARGUMENT, PLAIN, LISTED(2048, 48));
    PLAN_IS(INVALID_ARGUMENT, PLAIN, LISTED(INT_MAX, 64); s.a.attention.n_queries = 3);
    PLAN_IS(OK, PLAIN, LISTED(200, 64); s.keys.shape.ring = s.values.shape.ring = true; s.a.attention.end = 15000;
            s.a.attention.window = 5000);
    for (int end = 1900; end < 2500; end += 7)
        for (int n = 1; n <= 64; n += 9) {
            PLAN_IS(OK, ENDS, LISTED(3, 16); s.a.attention.end = end; s.a.attention.n_queries = n;
                    s.a.attention.last.n = 100);
            CHECK(s.plan.n == 7, "%d dispatches", s.plan.n);
        }
#undef LISTED
}

/* Scratch that no size_t counts: of halves, and of rows of lists, once for each part. */
static void check_large_scratch(NO_ROW)
{
    const struct {
        int n_kv_heads, n_heads, n_queries, first, length;
        tqkv_result expected;
    } cases[] = {{3, 96, 1 << 24, 0, 0, TQKV_OK},
                 {3, 96, 1 << 24, INT_MAX - 63, 0, TQKV_INVALID_ARGUMENT},
                 {1, 1, INT_MAX, 1, 1 << 20, TQKV_OK},
                 {1, 1, INT_MAX, 1, (1 << 30) - 100, TQKV_INVALID_ARGUMENT}};
    plan_scene s;
    for (int i = 0; i < 4; i++) {
        set_scene(&s, PLAIN);
        s.keys = plan_store(TQKV_TQ4, 1024, INT_MAX - 63, false, 0);
        s.values = s.keys;
        s.first = plan_store(TQKV_F16, 1024, INT_MAX - 63, false, 4);
        s.first.shape.rotation = TQKV_ROTATION_ON;
        s.keys.shape.n_kv_heads = s.values.shape.n_kv_heads = s.first.shape.n_kv_heads = cases[i].n_kv_heads;
        s.a.first.keys = s.a.first.values = &s.first;
        s.a.attention.end = 0;
        s.a.attention.first.n = cases[i].first;
        s.a.attention.n_heads = cases[i].n_heads;
        s.a.attention.n_queries = cases[i].n_queries;
        if (cases[i].length) s.a.list = at(MORE, 0);
        s.a.attention.list.length = cases[i].length;
        s.a.attention.list.block = 1;
        CHECK_RESULT(tqkv_metal_plan_attend(&s.a, none, none, none, &s.plan), cases[i].expected);
    }
}

/* Slices are of positions that there are; those that merge are of the same values and queries. */
static void check_slices(NO_ROW)
{
    plan_scene s, t;
    const tqkv_metal_buffer b = at(OUT, 0), m = at(MORE, 0);
    tqkv_metal_plan *const plan = &s.plan;
#define PARTIAL_IS(expected, first, count) \
    CHECK_RESULT(check_plan(tqkv_metal_plan_attend_partial(&s.a, at(Q, 0), first, count, at(SCRATCH, 0), b, m, \
                                                           at(MORE, 8192), plan), \
                            plan), \
                 TQKV_##expected)
#define MERGE_IS(expected, change) \
    RESULT_AFTER(expected, set_scene(&s, PLAIN); \
                 set_scene(&t, PLAIN), \
                 tqkv_metal_plan_attend_merge(&s.a, b, m, at(MORE, 8192), &t.a, at(SCRATCH, 0), m, m, plan), change)
    set_scene(&s, PLAIN);
    s.a.attention.kv_len = 1000;
    PARTIAL_IS(OK, 1000, 1000);
    PARTIAL_IS(OUT_OF_RANGE, 999, 1);
    CHECK_RESULT(tqkv_metal_plan_attend_partial(NULL, b, 0, 1, b, b, b, b, plan), TQKV_INVALID_ARGUMENT);
    MERGE_IS(OK, (void)0);
    MERGE_IS(INVALID_ARGUMENT, s.values.channel_scale = at(MORE, 16384));
    MERGE_IS(INVALID_ARGUMENT, t.values.channel_scale = at(MORE, 16384));
    MERGE_IS(INVALID_ARGUMENT, s.values.center = at(MORE, 16384));
    MERGE_IS(INVALID_ARGUMENT, t.a.attention.n_queries = 2);
    MERGE_IS(OK, s.a.attention.n_queries = t.a.attention.n_queries = 0);
    CHECK(!plan->n, "%d dispatches without queries", plan->n);
    CHECK_RESULT(tqkv_metal_plan_attend_merge(&s.a, b, b, b, NULL, b, b, b, plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_attend_finish(NULL, b, b, b, b, plan), TQKV_INVALID_ARGUMENT);
    PLAN_IS(OK, PLAIN, s.a.attention.n_queries = 0);
    PARTIAL_IS(OK, 0, 0);
    CHECK_RESULT(tqkv_metal_plan_attend_finish(&s.a, b, b, b, b, plan), TQKV_OK);
    CHECK(!plan->n, "%d dispatches without queries", plan->n);
#undef PARTIAL_IS
#undef MERGE_IS
}

/* Slices of two attentions lie apart. */
static void check_slice_overlaps(NO_ROW)
{
    plan_scene s;
    const size_t size = 6 * 64 * sizeof(float);
    set_scene(&s, PLAIN);
    CHECK_RESULT(tqkv_metal_plan_attend_merge(&s.a, at(OUT, 0), at(OUT, size), at(OUT, size + 24), &s.a,
                                              at(OUT, size + 48), at(MORE, 0), at(OUT, size + 20), &s.plan),
                 TQKV_OK);
    CHECK(!strcmp(overlapping(s.plan.d), "max"), "src_sum in max: %s", overlapping(s.plan.d));
    CHECK_RESULT(tqkv_metal_plan_attend_finish(&s.a, at(OUT, 0), at(MORE, 0), at(MORE, 24), at(OUT, 4), &s.plan),
                 TQKV_OK);
    CHECK(*overlapping(s.plan.d), "src_out is out");
}

void test_plan_attend_cases(void)
{
    test_add(check_numbers, NULL, 0, "plan/attend");
    test_add(check_tree, NULL, 0, "plan/tree");
    test_add(check_overlaps, NULL, 0, "plan/overlaps");
    test_add(check_tails, NULL, 0, "plan/tail");
    test_add(check_ends, NULL, 0, "plan/ends");
    test_add(check_paged_ends, NULL, 0, "plan/paged_ends");
    test_add(check_pages, NULL, 0, "plan/pages");
    test_add(check_page_division, NULL, 0, "plan/pages/division");
    test_add(check_lists, NULL, 0, "plan/list");
    test_add(check_large_scratch, NULL, 0, "plan/large_scratch");
    test_add(check_slices, NULL, 0, "plan/slice");
    test_add(check_slice_overlaps, NULL, 0, "plan/slice/overlaps");
}

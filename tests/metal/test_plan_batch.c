/* Plans of batches: items joined into one dispatch pair, and what they must agree in. */
#include "plan_fixture.h"

enum { ITEMS = 3 };

/* Three sequences over pools that lie in the same buffers. */
typedef struct plan_batch {
    tqkv_metal_store keys[ITEMS], values[ITEMS];
    tqkv_metal_attention items[ITEMS];
    tqkv_metal_buffer q[ITEMS], out[ITEMS];
    tqkv__batch_item arguments[ITEMS];
    struct {
        const tqkv_metal_attention *items;
        int n;
        const tqkv_metal_buffer *q, *out;
        tqkv_metal_buffer arguments, scratch;
        void *contents; /* of the arguments */
    } batch;
    tqkv_metal_plan plan;
} plan_batch;

static void set_up_batch(plan_batch *b)
{
    const int lengths[ITEMS] = {1000, 20, 3000}, n_queries[ITEMS] = {1, 3, 1};
    memset(b, 0, sizeof *b);
    for (int i = 0; i < ITEMS; i++) {
        b->keys[i] = plan_store(TQKV_I8, 64, 3200, false, 0);
        b->values[i] = plan_store(TQKV_TQ4, 64, 3200, false, 2);
        b->keys[i].codes.offset = (size_t)i << 20;
        b->values[i].norms.offset = (size_t)(ITEMS - i) << 18;
        b->items[i] = plan_attention(&b->keys[i], &b->values[i]);
        b->items[i].attention.n_heads = 6;
        b->items[i].attention.n_queries = n_queries[i];
        b->items[i].attention.end = lengths[i];
        b->q[i] = at(Q, (size_t)i * 8192);
        b->out[i] = at(OUT, (size_t)i * 8192);
    }
    b->batch.items = b->items;
    b->batch.n = ITEMS;
    b->batch.q = b->q;
    b->batch.out = b->out;
    b->batch.scratch = at(SCRATCH, 64);
    b->batch.arguments = at(ARGUMENTS, 0);
    b->batch.contents = b->arguments;
}

/* What a batch needs, which its plan without contents tells. */
static tqkv_result plan_sizes(const tqkv_metal_attention *items, int n, tqkv_metal_plan *plan)
{
    return tqkv_metal_plan_attend_batch(items, n, NULL, at(ARGUMENTS, 0), NULL, none, NULL, plan);
}

static tqkv_result planned(plan_batch *b)
{
    tqkv_metal_plan sizes;
    const tqkv_result r =
        check_plan(tqkv_metal_plan_attend_batch(b->batch.items, b->batch.n, b->batch.q, b->batch.arguments,
                                                b->batch.contents, b->batch.scratch, b->batch.out, &b->plan),
                   &b->plan);
    (void)plan_sizes(b->batch.items, b->batch.n, &sizes);
    CHECK(r != TQKV_OK || (plan_end(&b->plan, at(SCRATCH, 0)) <= sizes.scratch_size + 64 &&
                           plan_end(&b->plan, at(ARGUMENTS, 0)) <= sizes.arguments_size),
          "%zu bytes of scratch, %zu of arguments", sizes.scratch_size, sizes.arguments_size);
    return r;
}

/* Outputs in one array: strides, then where each begins, in values. */
static void interleave(plan_batch *b, size_t token, size_t head, size_t first, size_t second, size_t third)
{
    const size_t begins[ITEMS] = {first, second, third};
    for (int i = 0; i < ITEMS; i++) {
        b->items[i].attention.output_strides.token = token;
        b->items[i].attention.output_strides.head = head;
        b->out[i].offset = begins[i] * sizeof(float);
    }
}

/* Items are planned as alone. Columns for 3 queries: 6 rows, in a power of two; stretches of 512 slots: 2, 1 and 6,
   strands of those of more than four tiles. */
static void check_batch(NO_ROW)
{
    plan_batch b;
    tqkv_metal_plan one;
    const tqkv__batch_item *items = b.arguments;
    set_up_batch(&b);
    const tqkv_metal_dispatch *const d = b.plan.d;
    CHECK_RESULT(planned(&b), TQKV_OK);
    for (int i = 0; i < ITEMS; i++) {
        CHECK_RESULT(tqkv_metal_plan_attend(&b.items[i], b.q[i], b.batch.scratch, b.out[i], &one), TQKV_OK);
        CHECK(!memcmp(&items[i].attend, one.d[0].arguments[0].bytes, sizeof items[i].attend) &&
                  !memcmp(&items[i].merge, one.d[1].arguments[0].bytes, sizeof items[i].merge),
              "item %d is planned otherwise alone", i);
    }
    CHECK(constant(d, TQKV_FC_COLUMNS) == 8, "%d columns", constant(d, TQKV_FC_COLUMNS));
}

static void check_batch_of_nothing(NO_ROW)
{
    plan_batch b;
    set_up_batch(&b);
    b.batch.n = 0;
    CHECK_RESULT(planned(&b), TQKV_OK);
    CHECK(b.plan.n == 0, "an empty batch is recorded");
}

/* Items without queries are as if they were not there. */
static void check_batch_without_queries(NO_ROW)
{
    plan_batch b, two;
    tqkv_metal_plan sizes[2];
    set_up_batch(&b);
    set_up_batch(&two);
    b.items[0].attention.n_queries = 0;
    b.q[0] = b.out[0] = none;
    b.items[0].sinks = at(MORE, 8192); /* other sinks, which no query has */
    two.batch.items++;
    two.batch.q++;
    two.batch.out++;
    two.batch.n--;
    CHECK_RESULT(planned(&b), TQKV_OK);
    CHECK_RESULT(planned(&two), TQKV_OK);
    CHECK(b.plan.n == two.plan.n && !memcmp(b.arguments, two.arguments, 2 * sizeof *b.arguments), "other arguments");
    for (int i = 0; i < b.plan.n; i++)
        CHECK(!memcmp(b.plan.d[i].grid, two.plan.d[i].grid, sizeof b.plan.d[i].grid), "dispatch %d: another grid", i);
    CHECK_RESULT(plan_sizes(b.items, ITEMS, &sizes[0]), TQKV_OK);
    CHECK_RESULT(plan_sizes(two.items + 1, 2, &sizes[1]), TQKV_OK);
    CHECK(sizes[0].scratch_size == sizes[1].scratch_size, "other scratch");
    for (int i = 1; i < ITEMS; i++) b.items[i].attention.n_queries = 0;
    CHECK_RESULT(planned(&b), TQKV_OK);
    CHECK(b.plan.n == 0, "a batch without queries is recorded");
    b.items[0].attention.n_heads = 0;
    CHECK_RESULT(planned(&b), TQKV_INVALID_ARGUMENT);
}

/* With halves a dispatch for each part that some item has, each with a table of its own, and one for the merge; with
   lists as many before them. All lists lie in one buffer. */
static void check_batch_parts(NO_ROW)
{
    static char tables[7 * 1024]; /* ITEMS are less than 1 KiB */
    const tqkv_metal_buffer elsewhere[2] = {none, at(2, 0)};
    plan_batch b;
    tqkv_metal_plan sizes;
    tqkv_metal_store first = plan_store(TQKV_F16, 64, 20, false, 4), last = plan_store(TQKV_F16, 64, 704, true, 4);
    set_up_batch(&b);
    first.shape.rotation = last.shape.rotation = TQKV_ROTATION_ON;
    b.batch.contents = tables;
    for (int i = 0; i < ITEMS; i++) {
        b.items[i].first.keys = b.items[i].first.values = &first;
        b.items[i].last.keys = b.items[i].last.values = &last;
        b.items[i].attention.last.n = 700;
        b.items[i].attention.first.n = i ? 20 : 0; /* the second has nothing but first positions */
    }
    CHECK_RESULT(planned(&b), TQKV_OK);
    CHECK_RESULT(plan_sizes(b.items, ITEMS, &sizes), TQKV_OK);
    CHECK(b.plan.n == 4 && sizes.arguments_size == 4 * 1024, "%d dispatches", b.plan.n);
    for (int i = 0; i < ITEMS; i++) {
        b.items[i].list = at(3, (size_t)i * 4096);
        b.items[i].attention.list.length = 10 + i;
        b.items[i].attention.list.block = 16;
    }
    CHECK_RESULT(planned(&b), TQKV_OK);
    CHECK(b.plan.n == 7 && b.plan.d[0].kernel.family == TQKV_METAL_ATTEND_LIST, "%d dispatches", b.plan.n);
    for (int i = 0; i < 2; i++) {
        b.items[1].list = elsewhere[i];
        CHECK_RESULT(planned(&b), TQKV_UNSUPPORTED);
    }
}

/* Without matrices: planned so, or turned into it alone; a batch cannot be turned. */
static void check_lanes(NO_ROW)
{
    plan_batch b;
    tqkv_metal_plan alone;
    set_up_batch(&b);
    for (int i = 0; i < ITEMS; i++) b.items[i].matrix_group = 2;
    CHECK_RESULT(planned(&b), TQKV_OK);
    const tqkv_metal_dispatch *const d = b.plan.d;
    CHECK(d->kernel.family == TQKV_METAL_ATTEND_MATRIX && !tqkv_metal_plan_lanes(&b.plan), "a batch with matrices");
    for (int i = 0; i < ITEMS; i++) b.items[i].matrix_group = INT_MAX;
    CHECK_RESULT(planned(&b), TQKV_OK);
    CHECK(d->kernel.family == TQKV_METAL_ATTEND && tqkv_metal_plan_lanes(&b.plan), "a batch without");
    b.items[0].matrix_group = 2;
    CHECK_RESULT(tqkv_metal_plan_attend(&b.items[0], b.q[0], b.batch.scratch, b.out[0], &alone), TQKV_OK);
    CHECK(alone.d->kernel.family == TQKV_METAL_ATTEND_MATRIX && tqkv_metal_plan_lanes(&alone), "a call");
    CHECK(alone.d->kernel.family == TQKV_METAL_ATTEND && alone.d->n_simdgroups <= 4, "a call without");
    check_plan(TQKV_OK, &alone);
}

/* Items over pages, one of which has no positions yet: they join. */
static void check_batch_pages(NO_ROW)
{
    static const int32_t pages[4] = {3, 0, 1, 2};
    plan_batch b;
    set_up_batch(&b);
    for (int i = 0; i < ITEMS; i++) {
        b.keys[i] = plan_pool(TQKV_I8, 0, pages);
        b.values[i] = plan_pool(TQKV_TQ4, 2, pages);
        b.keys[i].pages = b.values[i].pages = at(MORE, 4096);
        b.items[i].attention.end = i == 1 ? 0 : 200;
    }
    CHECK_RESULT(planned(&b), TQKV_OK);
    CHECK(constant(b.plan.d, TQKV_FC_PAGES) == 1 && constant(b.plan.d, TQKV_FC_SHORT_STORE) == 0, "the kernel");
}

#define REFUSED(expected, change) RESULT_AFTER(expected, set_up_batch(&b), planned(&b), change)

static void check_batch_refusals(NO_ROW)
{
    plan_batch b;
    REFUSED(INVALID_ARGUMENT, b.batch.n = -1);
    REFUSED(INVALID_ARGUMENT, b.batch.items = NULL);
    REFUSED(INVALID_ARGUMENT, b.batch.q = NULL);
    REFUSED(INVALID_ARGUMENT, b.batch.out = NULL);
    REFUSED(INVALID_ARGUMENT, b.items[1].keys = NULL);
    REFUSED(OUT_OF_RANGE, b.items[2].attention.end = 3201);
    REFUSED(UNSUPPORTED, b.keys[2].codes = at(1, 0));
    REFUSED(UNSUPPORTED, b.q[1] = at(1, 0));
    REFUSED(UNSUPPORTED, b.keys[2].shape.format = TQKV_TQ4);
    REFUSED(UNSUPPORTED, b.items[2].attention.softcap = 3.0f);
    REFUSED(UNSUPPORTED, b.items[2].attention.n_heads = 3);
    REFUSED(UNSUPPORTED, b.items[2].attention.output_type = TQKV_TYPE_F16);
    REFUSED(UNSUPPORTED, b.items[2].sinks = at(MORE, 1024));
    REFUSED(UNSUPPORTED, b.items[2].matrix_group = 2);
    REFUSED(INVALID_ARGUMENT, b.items[2].matrix_group = -1);
    REFUSED(UNSUPPORTED, b.values[1].center = at(MORE, 1024));
    REFUSED(UNSUPPORTED, b.keys[2].pages = b.values[2].pages = at(MORE, 0);
            b.keys[2].shape.n_pages = b.values[2].shape.n_pages = 50;
            b.keys[2].shape.page_size = b.values[2].shape.page_size = 64);
    if (sizeof(size_t) > 4) REFUSED(UNSUPPORTED, b.keys[2].codes.offset = (size_t)1 << (sizeof(size_t) > 4 ? 37 : 0));
    REFUSED(INVALID_ARGUMENT, b.keys[2].codes.offset += 8);
    REFUSED(INVALID_ARGUMENT, b.q[2].offset += 2);
    REFUSED(INVALID_ARGUMENT, b.q[2].offset = SIZE_MAX - 3);
    REFUSED(INVALID_ARGUMENT, b.out[2].offset = b.out[0].offset + 4);
    REFUSED(INVALID_ARGUMENT, b.out[0].offset = b.out[2].offset);
    REFUSED(OK, b.out[0].offset = 6 * 8192);
    REFUSED(OK, b.items[2].attention.query_strides.head = 1024);
    REFUSED(OK, b.items[2].attention.output_strides.token = 65536);
}

/* Outputs that interleave may not share a value. */
static void check_batch_outputs(NO_ROW)
{
    plan_batch b;
    REFUSED(OK, interleave(&b, 64, 5 * 64, 0, 64, 4 * 64));               /* head by head, one query behind the other */
    REFUSED(INVALID_ARGUMENT, interleave(&b, 64, 5 * 64, 0, 32, 4 * 64)); /* from the middle of a row on */
    REFUSED(INVALID_ARGUMENT, interleave(&b, 64, 4 * 64, 0, 64, 4 * 64)); /* the last one is on the next head's first */
    REFUSED(OK, interleave(&b, 3 * 384, 64, 0, 384, 2 * 384));            /* tokens in turns */
    REFUSED(OK, interleave(&b, 3 * 384, 64, 2 * 384, 384, 0));
    REFUSED(INVALID_ARGUMENT,
            interleave(&b, 2 * 384, 64, 0, 384, 3 * 384)); /* the last one is the second one's next token */
    REFUSED(INVALID_ARGUMENT, interleave(&b, 3 * 384, 64, 0, 384, 384 + 63));
#undef REFUSED
}

static void check_batch_memory(NO_ROW)
{
    plan_batch b;
    tqkv_metal_plan sizes;
    set_up_batch(&b);
    b.q[1] = at(OUT, 100);
    b.q[0] = b.q[2] = at(OUT, 0);
    CHECK_RESULT(
        tqkv_metal_plan_attend_batch(b.items, ITEMS, b.q, at(MORE, 0), b.arguments, at(SCRATCH, 64), b.out, &b.plan),
        TQKV_OK);
    CHECK(*overlapping(b.plan.d), "queries between the outputs");
    CHECK_RESULT(plan_sizes(b.items, -1, &sizes), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(plan_sizes(NULL, 1, &sizes), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(plan_sizes(NULL, 0, &sizes), TQKV_OK);
    CHECK(sizes.arguments_size == 0 && sizes.scratch_size == 0, "an empty batch needs memory");
}

void test_plan_batch_cases(void)
{
    test_add(check_batch, NULL, 0, "plan/batch");
    test_add(check_batch_of_nothing, NULL, 0, "plan/batch/nothing");
    test_add(check_batch_without_queries, NULL, 0, "plan/batch/no_queries");
    test_add(check_batch_parts, NULL, 0, "plan/batch/parts");
    test_add(check_lanes, NULL, 0, "plan/batch/lanes");
    test_add(check_batch_pages, NULL, 0, "plan/batch/pages");
    test_add(check_batch_refusals, NULL, 0, "plan/batch/refusals");
    test_add(check_batch_outputs, NULL, 0, "plan/batch/outputs");
    test_add(check_batch_memory, NULL, 0, "plan/batch/memory");
}

/* What tqkv_metal.m takes from tqkv.h: the plans of its dispatches, and the calls that a cache makes to its context.
 * The context here is a fake without a GPU. */
#include "plan_fixture.h"
#include "cache_fixture.h"

static void check_encode(const void *row)
{
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    const tqkv_metal_store linear = plan_store(TQKV_TQ5, 64, 10, false, 0),
                           ring = plan_store(TQKV_I8, 512, 10, true, 2);
    const size_t token = 3 * 512 * sizeof(float);
    (void)row;
    CHECK_RESULT(tqkv_metal_plan_encode(&ring, at(4, 8), 24, 7, at(5, 0), &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(rows_args(d, 0).n_tokens == 10 && rows_args(d, 0).first_slot == 1, "%d tokens at %d",
          rows_args(d, 0).n_tokens, rows_args(d, 0).first_slot);
    CHECK(binding(d, "src").at.offset == 8 + 14 * token && binding(d, "src").size == 10 * token, "the source");
    CHECK(binding(d, "codes").size == 3 * 10 * 512 && binding(d, "norms").size == 3 * 10 * 4 * sizeof(float),
          "the store's sizes");
    CHECK(d->kernel.family == TQKV_METAL_ENCODE && d->kernel.head_dim == 512 / TQKV__DIM_UNIT &&
              constant(d, TQKV_FC_ROTATED) == 1 && constant(d, TQKV_FC_FORMAT) == TQKV_I8 &&
              constant(d, TQKV_FC_VALUE_FORMAT) == -1,
          "the kernel");
    CHECK(d->rows && d->grid[0] == 6 && rows_args(d, 0).block_scale == 1.0f, "%zu simdgroups for 10 rows of 3 heads",
          d->grid[0]);
    CHECK_RESULT(tqkv_metal_plan_encode(&ring, at(4, SIZE_MAX - 3), 24, 7, none, &plan), TQKV_OK);
    CHECK(binding(d, "src").at.offset > SIZE_MAX - 16, "an offset that wraps");
    CHECK_RESULT(tqkv_metal_plan_encode(&linear, at(4, 0), 4, 6, none, &plan), TQKV_OK);
    CHECK(rows_args(d, 0).first_slot == 6 && rows_args(d, 0).capacity == 10 && !binding(d, "not_finite").size,
          "linear");
    CHECK_RESULT(tqkv_metal_plan_encode(&linear, at(4, 0), 0, 10, none, &plan), TQKV_OK);
    CHECK(d->grid[0] == 0, "nothing to encode");
    CHECK_RESULT(tqkv_metal_plan_encode(&linear, at(0, 0), 4, 6, none, &plan), TQKV_OK);
    CHECK(!strcmp(overlapping(d), "src"), "the source in the store: %s", overlapping(d));
    CHECK_RESULT(tqkv_metal_plan_encode(&linear, none, 5, 6, none, &plan), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_metal_plan_encode(&linear, none, -1, 0, none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_encode(NULL, none, 1, 0, none, &plan), TQKV_INVALID_ARGUMENT);
}

static void check_encode_kv(const void *row)
{
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    const tqkv_metal_store keys = plan_store(TQKV_F16, 64, 10, true, 0), values = plan_store(TQKV_TQ8, 64, 12, true, 2);
    const tqkv_metal_store wide = plan_store(TQKV_TQ8, 128, 12, true, 2);
    tqkv_metal_store fewer = values, longer = keys;
    (void)row;
    CHECK_RESULT(tqkv_metal_plan_encode_kv(&keys, &values, at(4, 0), at(5, 0), 11, 3, at(6, 0), &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(d->n_arguments == 2 && rows_args(d, 0).n_tokens == 10 && rows_args(d, 1).n_tokens == 11, "tokens of both");
    CHECK(d->grid[0] == 3 && d->grid[2] == 2, "simdgroups for the 11 rows of 3 heads of the longer");
    CHECK(constant(d, TQKV_FC_FORMAT) == TQKV_F16 && constant(d, TQKV_FC_VALUE_FORMAT) == TQKV_TQ8 &&
              constant(d, TQKV_FC_ROTATED) == 0 && constant(d, TQKV_FC_VALUE_ROTATED) == 1,
          "the kernel");
    CHECK(binding(d, "keys' norms").size == 0 && binding(d, "values' norms").size == 3 * 12 * sizeof(float), "norms");
    longer.shape.capacity = 500;
    CHECK_RESULT(tqkv_metal_plan_encode_kv(&longer, &values, at(4, 0), at(5, 0), 400, 3, at(6, 0), &plan), TQKV_OK);
    const size_t one = d->grid[0];
    CHECK_RESULT(tqkv_metal_plan_encode_kv(&values, &longer, at(4, 0), at(5, 0), 400, 3, at(6, 0), &plan), TQKV_OK);
    CHECK(rows_args(d, 0).n_tokens == 12 && rows_args(d, 1).n_tokens == 400, "tokens of both");
    CHECK(one == d->grid[0] && one * TQKV__ENCODE_ROWS(64) >= 1200, "%zu, %zu simdgroups", one, d->grid[0]);
    fewer.shape.n_kv_heads = 2;
    CHECK_RESULT(tqkv_metal_plan_encode_kv(&keys, &wide, none, none, 1, 0, none, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_encode_kv(&keys, &fewer, none, none, 1, 0, none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_encode_kv(&keys, NULL, none, none, 1, 0, none, &plan), TQKV_INVALID_ARGUMENT);
}

static void check_rows(const void *row)
{
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    const tqkv_metal_store linear = plan_store(TQKV_TQ5, 64, 10, false, 0),
                           ring = plan_store(TQKV_I8, 512, 10, true, 2);
    (void)row;
    CHECK_RESULT(tqkv_metal_plan_probe(&linear, none, INT_MAX, none, none, &plan),
                 TQKV_INVALID_ARGUMENT); /* rows > 2^31 */
    CHECK_RESULT(tqkv_metal_plan_probe(&linear, at(4, 0), 7, at(5, 0), none, &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(rows_args(d, 0).n_tokens == 7 && binding(d, "scaled").size == 7 * 3 * 64 * sizeof(float), "a probe");
    CHECK_RESULT(tqkv_metal_plan_decode(&ring, 95, 10, TQKV_ORIGINAL, at(4, 0), &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(constant(d, TQKV_FC_UNROTATE) == 1 && rows_args(d, 0).first_slot == 5, "slot %d", rows_args(d, 0).first_slot);
    CHECK_RESULT(tqkv_metal_plan_decode(&ring, 95, 10, TQKV_ROTATED, at(4, 0), &plan), TQKV_OK);
    CHECK(constant(d, TQKV_FC_UNROTATE) == 0, "left rotated");
    CHECK_RESULT(tqkv_metal_plan_decode(&ring, 95, 11, TQKV_ROTATED, none, &plan), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_metal_plan_decode(&linear, 8, 3, TQKV_ROTATED, none, &plan), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_metal_plan_decode(&linear, 0, 1, test_no_basis(2), none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_rotate(at(4, 0), 5, 64, true, &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(binding(d, "rows").size == 5 * 64 * sizeof(float) && constant(d, TQKV_FC_UNROTATE) == 1, "a rotation");
    CHECK_RESULT(tqkv_metal_plan_rotate(none, 5, 65, false, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_rotate(none, -1, 64, false, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(
        tqkv_metal_plan_calibrate(&linear, at(4, 0), 9, at(5, 0), 6, 2, TQKV_PAIRS_HALVES, at(6, 0), at(7, 0), &plan),
        TQKV_OK);
    check_plan(&plan);
    CHECK(d->grid[0] == 3 && d->n_simdgroups == 2 && binding(d, "q").size == 2 * 6 * 64 * sizeof(float) &&
              binding(d, "center").size == 3 * 64 * sizeof(float),
          "calibration");
    CHECK_RESULT(tqkv_metal_plan_calibrate(&linear, at(4, 0), 9, none, 5, 2, TQKV_PAIRS_NONE, none, none, &plan),
                 TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_tables(at(4, 0), &plan), TQKV_OK);
    check_plan(&plan);
    CHECK(plan.n == 2 && d[1].grid[0] == 1 && !d[1].rows && d[1].kernel.head_dim == 0, "tables");
}

/* What an engine with its own encoder reads from a plan. */
static void check_engine(const void *row)
{
    static const char *const names[] = {"tqkv_tables", "tqkv_encode_d1024", "tqkv_encode_kv_d192_128",
                                        "tqkv_attend_d64"};
    static const char *const calls[] = {"tables", "encode", "encode_kv", "attend"};
    tqkv_metal_plan plans[4];
    tqkv_metal_dispatch d[4];
    tqkv_metal_launch launch;
    char name[TQKV_METAL_NAME];
    uint32_t value = 7;
    const tqkv_metal_store large = plan_store(TQKV_TQ4, 1024, 10, false, 0),
                           keys = plan_store(TQKV_I8, 192, 10, false, 0),
                           values = plan_store(TQKV_TQ5, 128, 10, false, 2),
                           small = plan_store(TQKV_F16, 64, 9, false, 0);
    (void)row;
    tqkv_metal_attention a = plan_attention(&small, &small);
    const tqkv_result planned[] = {tqkv_metal_plan_tables(at(4, 0), &plans[0]),
                                   tqkv_metal_plan_encode(&large, at(4, 0), 9, 0, none, &plans[1]),
                                   tqkv_metal_plan_encode_kv(&keys, &values, at(4, 0), at(5, 0), 9, 0, none, &plans[2]),
                                   tqkv_metal_plan_attend(&a, at(4, 0), at(5, 0), at(6, 0), &plans[3])};
    for (int i = 0; i < 4; i++) {
        CHECK_RESULT(planned[i], TQKV_OK);
        CHECK(!strcmp(plans[i].call, calls[i]) && plans[i].n == (i % 3 ? 1 : 2), "%s: %d", plans[i].call, plans[i].n);
        d[i] = plans[i].d[0];
    }
    for (int i = 0; i < 4; i++) {
        tqkv_metal_kernel_name(&d[i].kernel, name);
        CHECK(!strcmp(name, names[i]), "%s, not %s", name, names[i]);
    }
    CHECK(tqkv_metal_kernel_constant(&d[2].kernel, TQKV_FC_VALUE_FORMAT, &value) == TQKV_METAL_UINT &&
              value == TQKV_TQ5 && tqkv_metal_kernel_constant(&d[2].kernel, TQKV_FC_PAGES, &value) == TQKV_METAL_BOOL &&
              value == 0 && tqkv_metal_kernel_constant(&d[2].kernel, TQKV_FC_SINKS, &value) == TQKV_METAL_UNSET,
          "constants");
    CHECK(!tqkv_metal_kernel_constant(&d[2].kernel, -1, &value) &&
              !tqkv_metal_kernel_constant(&d[2].kernel, TQKV_METAL_CONSTANTS, &value) && !value,
          "constants that are none");
    char text[TQKV_METAL_TEXT], other[TQKV_METAL_TEXT];
    tqkv_metal_kernel_text(&d[2].kernel, text);
    tqkv_metal_kernel_text(&d[3].kernel, other);
    CHECK(!strncmp(text, "tqkv_encode_kv_d192_128-8_3_1_1_x_", 34) && strlen(text) < TQKV_METAL_TEXT - 40 &&
              strcmp(text, other),
          "the text %s", text);
    CHECK(d[2].arguments[0].index == 0 && d[2].arguments[1].index == 4 &&
              d[2].arguments[1].size == sizeof(tqkv__rows_args),
          "arguments");
    CHECK_RESULT(tqkv_metal_plan_launch(&d[1], 64, &launch), TQKV_OK); /* 9 rows of 3 heads, 4 a simdgroup */
    CHECK(launch.threadgroups[0] == 5 && launch.threads == 64 && launch.memory[3] == 16, "%zu threadgroups of %zu",
          launch.threadgroups[0], launch.threads);
    CHECK_RESULT(tqkv_metal_plan_launch(&d[1], 31, &launch), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_launch(NULL, 64, &launch), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_launch(&d[1], 64, NULL), TQKV_INVALID_ARGUMENT);
}

/* Nowhere to write a plan. */
static void check_no_plan(const void *row)
{
    const tqkv_metal_store s = plan_store(TQKV_I8, 64, 10, false, 0);
    tqkv_metal_store one = s;
    (void)row;
    one.shape.n_kv_heads = 1;
    tqkv_metal_attention a = plan_attention(&s, &s);
    tqkv_metal_index x;
    memset(&x, 0, sizeof x);
    x.keys = &one;
    const tqkv_result results[] = {
        tqkv_metal_plan_tables(none, NULL),
        tqkv_metal_plan_encode(&s, none, 1, 0, none, NULL),
        tqkv_metal_plan_encode_kv(&s, &s, none, none, 1, 0, none, NULL),
        tqkv_metal_plan_encode_slots(&s, none, 1, none, NULL, none, NULL),
        tqkv_metal_plan_encode_kv_slots(&s, &s, none, none, 1, none, NULL, none, NULL),
        tqkv_metal_plan_probe(&s, none, 1, none, none, NULL),
        tqkv_metal_plan_decode(&s, 0, 1, TQKV_ORIGINAL, none, NULL),
        tqkv_metal_plan_rotate(none, 1, 64, false, NULL),
        tqkv_metal_plan_calibrate(&s, none, 1, none, 0, 0, TQKV_PAIRS_NONE, none, none, NULL),
        tqkv_metal_plan_attend_scratch(&a, NULL),
        tqkv_metal_plan_attend(&a, none, none, none, NULL),
        tqkv_metal_plan_attend_partial(&a, none, 0, 0, none, none, none, none, NULL),
        tqkv_metal_plan_attend_merge_slice(&a, none, none, none, &a, none, none, none, NULL),
        tqkv_metal_plan_attend_finish(&a, none, none, none, none, NULL),
        tqkv_metal_plan_index_scores(&x, none, none, NULL),
        tqkv_metal_plan_index_choose_scratch(&x, NULL),
        tqkv_metal_plan_index_choose(&x, none, 1, none, none, NULL),
        tqkv_metal_plan_attend_batch(&a, 1, &none, none, &a, none, &none, true, NULL),
        tqkv_metal_plan_cache_append(NULL, none, NULL, none, none, 1, none, NULL),
        tqkv_metal_plan_cache_attend(NULL, none, NULL, NULL, none, 1, none, none, NULL),
        tqkv_metal_plan_prepare(&a, 1, 0, NULL, NULL),
        tqkv_metal_plan_index_prepare(&x, 1, NULL, NULL),
        tqkv_metal_plan_cache_prepare(NULL, none, 1, NULL, NULL)};
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        CHECK(results[i] == TQKV_INVALID_ARGUMENT, "call %zu: %s", i, tqkv_result_string(results[i]));
    CHECK(!tqkv_metal_overlapping(NULL, 1), "no dispatch");
}

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

/* The centres of keys and values. In attend the keys' changes nothing without sinks or a softcap. */
static void check_center(const void *row)
{
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    tqkv_metal_store keys = plan_store(TQKV_I8, 64, 10, false, 0), values = plan_store(TQKV_F16, 64, 10, false, 2);
    const size_t size = 3 * 64 * sizeof(float);
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.end = 10;
    keys.center = at(7, 0);
    values.center = at(7, size);
    CHECK_RESULT(tqkv_metal_plan_encode_kv(&keys, &values, at(4, 0), at(5, 0), 4, 3, none, &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(binding(d, "keys' center").size == size && binding(d, "values' center").at.offset == size &&
              constant(d, TQKV_FC_CENTER) == 1 && constant(d, TQKV_FC_VALUE_CENTER) == 1,
          "encode_kv");
    CHECK_RESULT(tqkv_metal_plan_decode(&keys, 0, 10, TQKV_ROTATED, at(4, 0), &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(constant(d, TQKV_FC_CENTER) == 1 && constant(d, TQKV_FC_ROTATED) == 1, "decode");
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(constant(d, TQKV_FC_CENTER) == 0 && !binding(d, "keys' center").size, "attend without need");
    CHECK(constant(d + 1, TQKV_FC_VALUE_CENTER) == 1 && binding(d + 1, "values' center").size == size, "the merge");
    a.sinks = at(4, 4096);
    a.attention.query_basis = TQKV_ROTATED;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(constant(d, TQKV_FC_CENTER) == 1 && binding(d, "keys' center").size == size, "attend with sinks");
    CHECK(constant(d, TQKV_FC_ROTATED) == 1 && constant(d + 1, TQKV_FC_CENTER) == 1, "a rotated query");
    a.attention.softcap = 3.0f;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(constant(d, TQKV_FC_CENTER) == 1 && constant(d + 1, TQKV_FC_CENTER) == 0, "attend with softcap");
    CHECK_RESULT(tqkv_metal_plan_attend(&a, at(4, 0), at(5, 0), at(7, size), &plan), TQKV_OK);
    CHECK(!strcmp(overlapping(d), "values' center"), "the output in the centre: %s", overlapping(d));
}

/* Scales of channels: of rows, of queries in the original basis, of the centre beside rotated ones, and of outputs. */
static void check_channel_scale(const void *row)
{
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    tqkv_metal_store keys = plan_store(TQKV_I8, 64, 10, false, 0), values = plan_store(TQKV_F16, 64, 10, false, 2),
                     plain = values;
    const size_t size = 3 * 64 * sizeof(float);
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values), other = plan_attention(&keys, &plain);
    a.attention.end = other.attention.end = 10;
    keys.channel_scale = at(7, 0);
    values.channel_scale = at(7, size);
    CHECK_RESULT(tqkv_metal_plan_encode_kv(&keys, &values, at(4, 0), at(5, 0), 4, 3, none, &plan), TQKV_OK);
    check_plan(&plan);
    CHECK(binding(d, "keys' channel_scale").size == size && binding(d, "values' channel_scale").at.offset == size &&
              constant(d, TQKV_FC_SCALED) == 1 && constant(d, TQKV_FC_VALUE_SCALED) == 1,
          "encode_kv");
    CHECK_RESULT(tqkv_metal_plan_probe(&keys, at(4, 0), 3, at(5, 0), none, &plan), TQKV_OK);
    check_plan(&plan);
    CHECK(constant(d, TQKV_FC_SCALED) == 1 && binding(d, "channel_scale").size == size, "probe");
    for (int rotated = 0; rotated < 2; rotated++)
        for (int center = 0; center < 2; center++) {
            const tqkv_basis basis = rotated ? TQKV_ROTATED : TQKV_ORIGINAL;
            keys.center = values.center = center ? at(7, 4 * size) : none;
            CHECK_RESULT(tqkv_metal_plan_decode(&values, 0, 10, basis, at(4, 0), &plan), TQKV_OK);
            check_plan(&plan);
            CHECK(constant(d, TQKV_FC_SCALED) == !rotated && constant(d, TQKV_FC_CENTER_SCALED) == (rotated && center),
                  "decode");
            a.attention.query_basis = a.attention.output_basis = basis;
            a.attention.softcap = 3.0f; /* the keys' centre counts */
            CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
            CHECK(constant(d, TQKV_FC_SCALED) == !rotated &&
                      constant(d, TQKV_FC_CENTER_SCALED) == (rotated && center) &&
                      constant(d, TQKV_FC_TAIL_SCALED) == 0 && constant(d, TQKV_FC_TAIL_CENTER_SCALED) == 0 &&
                      binding(d, "keys' channel_scale").size == (!rotated || center ? size : 0),
                  "attend: rotated %d, centre %d", rotated, center);
            CHECK(constant(d + 1, TQKV_FC_VALUE_SCALED) == !rotated &&
                      constant(d + 1, TQKV_FC_CENTER_SCALED) == (rotated && center),
                  "merge: rotated %d, centre %d", rotated, center);
            CHECK_RESULT(
                tqkv_metal_plan_attend_partial(&a, at(4, 0), 0, 7, at(5, 0), at(6, 0), at(6, 4096), at(6, 8192), &plan),
                TQKV_OK);
            CHECK(constant(d + 1, TQKV_FC_VALUE_SCALED) == 0 && constant(d + 1, TQKV_FC_CENTER_SCALED) == center,
                  "a slice: centre %d", center);
            CHECK_RESULT(tqkv_metal_plan_attend_finish(&a, at(5, 0), at(5, size), at(5, 2 * size), at(4, 0), &plan),
                         TQKV_OK);
            check_plan(&plan);
            CHECK(constant(d, TQKV_FC_VALUE_SCALED) == !rotated && constant(d, TQKV_FC_CENTER_SCALED) == 0, "the end");
        }
    const tqkv_metal_buffer b = at(5, 0);
    CHECK_RESULT(tqkv_metal_plan_attend_merge_slice(&a, b, b, b, &a, b, b, b, &plan), TQKV_OK);
    CHECK_RESULT(tqkv_metal_plan_attend_merge_slice(&a, b, b, b, &other, b, b, b, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_attend_merge_slice(&other, b, b, b, &a, b, b, b, &plan), TQKV_INVALID_ARGUMENT);
}

/* The kernels of the plans that somebody was shown. */
typedef struct seen {
    tqkv_metal_kernel kernels[64];
    int n, left; /* left: plans until the visit fails; 0: it does not */
} seen;

static tqkv_result see(void *user, tqkv_metal_plan *plan)
{
    seen *all = (seen *)user;
    CHECK(plan->result == TQKV_OK && plan->n, "a plan of nothing");
    for (int i = 0; i < plan->n; i++) {
        int j = 0;
        while (j < all->n && memcmp(&all->kernels[j], &plan->d[i].kernel, sizeof all->kernels[j])) j++;
        if (j == all->n && j < 64) all->kernels[all->n++] = plan->d[i].kernel;
    }
    return --all->left == 0 ? TQKV_METAL_ERROR : TQKV_OK;
}

static void check_seen(const seen *all, const tqkv_metal_plan *plan, const char *what)
{
    CHECK(plan->result == TQKV_OK, "%s: %s", what, tqkv_result_string(plan->result));
    for (int i = 0; i < plan->n; i++) {
        int j = 0;
        while (j < all->n && memcmp(&all->kernels[j], &plan->d[i].kernel, sizeof all->kernels[j])) j++;
        CHECK(j < all->n, "%s: dispatch %d was not prepared", what, i);
    }
}

/* What is planned ahead of time has the kernels of later calls, wherever they stand. */
static void check_prepare(const void *row)
{
    const tqkv_metal_store keys = plan_store(TQKV_TQ4, 64, 900, false, 0),
                           values = plan_store(TQKV_I8, 64, 900, false, 2);
    tqkv_metal_store first = plan_store(TQKV_F16, 64, 20, false, 4), last = plan_store(TQKV_F16, 64, 192, true, 4);
    tqkv_metal_plan plan;
    seen all;
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    first.shape.rotated = last.shape.rotated = true;
    a.first_keys = a.first_values = &first;
    a.last_keys = a.last_values = &last;
    a.attention.exact_first = 20;
    a.attention.exact_last = 100;
    memset(&all, 0, sizeof all);
    CHECK_RESULT(tqkv_metal_plan_prepare(&a, 5, TQKV_METAL_BATCHES | TQKV_METAL_SLICES, see, &all), TQKV_OK);
    for (int end = 1; end <= 900; end += end < 130 ? 1 : 77)
        for (int n = 1; n <= 5; n += 2) {
            a.attention.end = end;
            a.attention.n_queries = n;
            tqkv_metal_plan_attend(&a, at(4, 0), at(5, 0), at(6, 0), &plan);
            check_seen(&all, &plan, "attention");
            for (int i = 0; i < plan.n; i++) plan.d[i].kernel.constants[TQKV_FC_BATCH] = 1 + true;
            check_seen(&all, &plan, "a batch");
            tqkv_metal_plan_attend_partial(&a, at(4, 0), 0, end, at(5, 0), at(6, 0), at(6, 256), at(6, 512), &plan);
            check_seen(&all, &plan, "a slice");
        }
    tqkv_metal_plan_encode_kv(&first, &first, at(4, 0), at(5, 0), 4, 0, none, &plan);
    check_seen(&all, &plan, "halves");
    tqkv_metal_plan_attend_merge_slice(&a, none, none, none, &a, none, none, none, &plan);
    check_seen(&all, &plan, "a merge");
    tqkv_metal_plan_attend_finish(&a, none, none, none, none, &plan);
    check_seen(&all, &plan, "the end of a slice");
    memset(&all, 0, sizeof all);
    all.left = 2;
    CHECK_RESULT(tqkv_metal_plan_prepare(&a, 5, 0, see, &all), TQKV_METAL_ERROR);
    CHECK_RESULT(tqkv_metal_plan_prepare(&a, -1, 0, see, &all), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_prepare(NULL, 1, 0, see, &all), TQKV_INVALID_ARGUMENT);
}

/* Every call takes the sizes that have kernels, within the limits of Metal, and refuses the others. Values of 128 go
   with keys of 128 and of 192, and no others. */
static void check_head_dim(const void *row)
{
    const int d = *(const int *)row;
    bool known = false;
    for (int i = 0; i < TQKV__KERNEL_DIMS; i++) known = known || TQKV__KERNEL_DIM(i) == d;
    const tqkv_result expected = known ? TQKV_OK : TQKV_UNSUPPORTED;
    const tqkv_metal_store keys = plan_store(TQKV_I8, d, 10, true, 0), values = plan_store(TQKV_TQ3, d, 10, true, 2),
                           others = plan_store(TQKV_TQ3, 128, 10, true, 2);
    tqkv_metal_plan plans[5];
    const tqkv_metal_dispatch *const p = plans[0].d;
    size_t scratch;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.end = 10;
    CHECK(TQKV__HAS_KERNELS(d) == known, "kernels of %d", d);
    CHECK_RESULT(tqkv_metal_plan_encode(&keys, at(4, 0), 40, 7, none, &plans[0]), expected);
    CHECK_RESULT(tqkv_metal_plan_encode_kv(&keys, &values, at(4, 0), at(5, 0), 9, 3, none, &plans[1]), expected);
    CHECK_RESULT(tqkv_metal_plan_probe(&keys, at(4, 0), 7, at(5, 0), none, &plans[2]), expected);
    CHECK_RESULT(tqkv_metal_plan_decode(&keys, 0, 10, TQKV_ORIGINAL, at(4, 0), &plans[3]), expected);
    CHECK_RESULT(tqkv_metal_plan_rotate(at(4, 0), 5, d, true, &plans[4]), expected);
    for (int i = 0; i < 5 && known; i++) {
        check_plan(&plans[i]);
        CHECK(plans[i].n == 1 && plans[i].d->kernel.head_dim * TQKV__DIM_UNIT == d && !plans[i].d->kernel.value_dim,
              "the kernel");
    }
    CHECK_RESULT(tqkv_metal_plan_attend_scratch(&a, &scratch), expected);
    CHECK_RESULT(plan_attend(&a, &plans[0]), expected);
    a.values = &others;
    const tqkv_result pair = d == 128 || d == 192 ? TQKV_OK : TQKV_UNSUPPORTED;
    CHECK_RESULT(tqkv_metal_plan_encode_kv(&keys, &others, at(4, 0), at(5, 0), 9, 3, none, &plans[0]), pair);
    if (pair == TQKV_OK) check_dispatch(p);
    CHECK_RESULT(tqkv_metal_plan_attend_scratch(&a, &scratch), pair);
    CHECK_RESULT(plan_attend(&a, &plans[0]), pair);
    if (d != 192) return;
    CHECK(p[0].kernel.value_dim * TQKV__DIM_UNIT == 128 && p[1].kernel.head_dim * TQKV__DIM_UNIT == 128, "the kernels");
    CHECK(binding(p, "q").size == 3 * 192 * sizeof(float) && binding(p, "out").size == 3 * 128 * sizeof(float),
          "sizes");
}

/* A tail lies in the slots of the keys. Streams that share bytes are one stream. */
static void check_tail(const void *row)
{
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    tqkv_metal_store keys = plan_store(TQKV_TQ4, 512, 100, false, 0), tail = plan_store(TQKV_F16, 64, 100, false, 2),
                     other = keys;
    const size_t part = 3 * 64 * sizeof(float);
    size_t scratch;
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &keys);
    a.tail = &tail;
    a.attention.end = 100;
    a.attention.n_heads = 12;
    CHECK_RESULT(tqkv_metal_plan_encode_kv(&keys, &tail, at(4, 0), at(5, 0), 9, 3, none, &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(d->kernel.head_dim * TQKV__DIM_UNIT == 512 && d->kernel.value_dim * TQKV__DIM_UNIT == 64, "the kernel");
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    check_dispatch(&d[0]);
    check_dispatch(&d[1]);
    CHECK(constant(d, TQKV_FC_TAIL_FORMAT) == TQKV_F16 && binding(d, "tail's codes").size == 3 * 100 * 128 &&
              binding(d, "q").size == 12 * 576 * sizeof(float) && binding(d, "out").size == 12 * 512 * sizeof(float) &&
              attend_args(d).scale == (float)(1.0 / 24.0),
          "sizes");
    CHECK_RESULT(tqkv_metal_plan_attend_scratch(&a, &scratch), TQKV_OK);
    tail.shape.format = TQKV_I8;
    tail.center = at(3, 4096);
    a.sinks = at(3, 8192);
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(constant(d, TQKV_FC_ROTATE_TAIL) == 1 && constant(d, TQKV_FC_TAIL_CENTER) == 1 &&
              constant(d, TQKV_FC_CENTER) == 0 && constant(d + 1, TQKV_FC_CENTER) == 1 &&
              binding(d, "tail's center").size == part,
          "the tail's centre");
    a.attention.query_basis = TQKV_ROTATED;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(constant(d, TQKV_FC_ROTATE_TAIL) == 0 && constant(d, TQKV_FC_TAIL_ROTATED) == 1, "a rotated query");
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

/* Each type has its sizes, its alignment and its constant. */
static void check_types(const void *row)
{
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    tqkv_metal_store s = plan_store(TQKV_TQ4, 80, 5, true, 0), v = s;
    (void)row;
    tqkv_metal_attention a = plan_attention(&s, &s);
    a.attention.end = 5;
    for (int type = TQKV_TYPE_F32; type <= TQKV_TYPE_BF16; type++) {
        const size_t size = type == TQKV_TYPE_F32 ? 4 : 2, token = 3 * 80;
        s.shape.type = (tqkv_type)type;
        v.shape.type = type == TQKV_TYPE_F32 ? TQKV_TYPE_BF16 : TQKV_TYPE_F32;
        a.attention.query_type = s.shape.type;
        a.attention.output_type = v.shape.type;
        CHECK_RESULT(tqkv_metal_plan_encode_kv(&s, &v, at(4, 2), at(5, 0), 7, 0, none, &plan), TQKV_OK);
        const tqkv_metal_binding k = binding(d, "k"), values = binding(d, "v");
        CHECK(k.size == 5 * token * size && k.alignment == size && k.at.offset == 2 + 2 * token * size, "the keys");
        CHECK(values.size == 5 * token * (6 - size) && constant(d, TQKV_FC_TYPE) == type &&
                  constant(d, TQKV_FC_VALUE_TYPE) == (int)v.shape.type,
              "the values");
        CHECK_RESULT(tqkv_metal_plan_probe(&s, at(4, 0), 7, at(5, 0), none, &plan), TQKV_OK);
        CHECK(binding(d, "src").size == 7 * token * size && binding(d, "scaled").size == 7 * token * 4, "a probe");
        CHECK_RESULT(tqkv_metal_plan_decode(&s, 0, 5, TQKV_ORIGINAL, at(4, 0), &plan), TQKV_OK);
        CHECK(binding(d, "dst").size == 5 * token * size && constant(d, TQKV_FC_TYPE) == type, "decoded rows");
        CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
        CHECK(binding(d, "q").size == token * size && constant(d, TQKV_FC_TYPE) == type, "queries");
        CHECK(binding(d + 1, "out").size == token * (6 - size) && binding(d, "out").alignment == 6 - size &&
                  constant(d + 1, TQKV_FC_TYPE) == (int)v.shape.type,
              "outputs");
    }
    s.shape.type = test_no_type(3);
    CHECK_RESULT(tqkv_metal_plan_encode(&s, none, 1, 0, none, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_probe(&s, none, 1, none, none, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_decode(&s, 0, 1, TQKV_ORIGINAL, none, &plan), TQKV_UNSUPPORTED);
    a.attention.output_type = test_no_type(-1);
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
}

static void check_strides(const void *row)
{
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    tqkv_metal_store s = plan_store(TQKV_TQ5, 64, 10, true, 0);
    (void)row;
    tqkv_metal_attention a = plan_attention(&s, &s);
    a.attention.n_heads = 6;
    a.attention.n_queries = 4;
    a.attention.end = 7;
    s.shape.type = TQKV_TYPE_F16;
    s.shape.strides.token = 64; /* head by head, 24 tokens of each; the ring keeps 10 */
    s.shape.strides.head = 24 * 64;
    CHECK_RESULT(tqkv_metal_plan_encode(&s, at(4, 2), 24, 7, none, &plan), TQKV_OK);
    CHECK(binding(d, "src").at.offset == 2 + 14 * 64 * 2 && binding(d, "src").size == (2 * 24 * 64 + 10 * 64) * 2 &&
              rows_args(d, 0).token_stride == 64 && rows_args(d, 0).head_stride == 24 * 64,
          "the source: %zu bytes from %zu on", binding(d, "src").size, binding(d, "src").at.offset);
    CHECK_RESULT(tqkv_metal_plan_probe(&s, at(4, 0), 24, at(5, 0), none, &plan), TQKV_OK);
    CHECK(binding(d, "src").size == 3 * 24 * 64 * 2 && binding(d, "scaled").size == 3 * 24 * 64 * 4, "a probe");
    CHECK_RESULT(tqkv_metal_plan_decode(&s, 0, 3, TQKV_ORIGINAL, at(4, 0), &plan), TQKV_OK);
    CHECK(binding(d, "dst").size == (2 * 24 + 3) * 64 * 2, "decoded rows");
    s.shape.strides.head = 65; /* rows share values: only those that are read may */
    CHECK_RESULT(tqkv_metal_plan_decode(&s, 0, 3, TQKV_ORIGINAL, at(4, 0), &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_encode(&s, at(4, 0), 3, 0, none, &plan), TQKV_OK);
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(attend_args(d).query_token_stride == 6 * 64 && attend_args(d).query_head_stride == 64 &&
              merge_args(d).out_token_stride == 6 * 64 && merge_args(d).out_head_stride == 64,
          "the defaults of an attention");
    a.attention.query_strides.token = 1000;
    a.attention.output_strides.head = 4 * 70;
    a.attention.output_strides.token = 70;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(attend_args(d).query_token_stride == 1000 && attend_args(d).query_head_stride == 64 &&
              binding(d, "q").size == (3 * 1000 + 6 * 64) * 4,
          "queries");
    CHECK(merge_args(d).out_token_stride == 70 && merge_args(d).out_head_stride == 280 &&
              binding(d, "out").size == (3 * 70 + 5 * 280 + 64) * 4 &&
              binding(d + 1, "out").size == binding(d, "out").size,
          "outputs");
    CHECK_RESULT(tqkv_metal_plan_attend_partial(&a, at(4, 0), 0, 7, at(5, 0), at(6, 0), at(7, 0), at(7, 256), &plan),
                 TQKV_OK);
    CHECK(merge_args(d).out_token_stride == 6 * 64 && binding(d + 1, "out").size == 4 * 6 * 64 * 4,
          "sums have no gaps");
    a.attention.output_strides.head = 65;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    if (sizeof(size_t) <= 4) return;
    a.attention.output_strides.head = (size_t)UINT32_MAX + 1;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
    s.shape.strides.token = (size_t)UINT32_MAX + 1;
    CHECK_RESULT(tqkv_metal_plan_encode(&s, at(4, 0), 3, 0, none, &plan), TQKV_UNSUPPORTED);
}

/* What queries see, as two numbers. */
static void check_non_causal(const void *row)
{
    const struct {
        int end, n_queries, window, first_newest, seen;
    } cases[] = {{50, 4, 0, 49, 0},  {50, 4, 10, 55, 19}, {50, 4, 53, 98, 105},
                 {50, 4, 54, 49, 0}, {3, 10, 12, 4, 23},  {50, 4, INT_MAX, 49, 0}};
    tqkv_metal_store s = plan_store(TQKV_TQ5, 64, INT_MAX, false, 0);
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    (void)row;
    tqkv_metal_attention a = plan_attention(&s, &s);
    a.attention.list_block = 16;
    a.attention.list_length = 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        a.list = none;
        a.attention.non_causal = true;
        a.attention.end = cases[i].end;
        a.attention.n_queries = cases[i].n_queries;
        a.attention.window = cases[i].window;
        CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
        CHECK(attend_args(d).first_newest == cases[i].first_newest && attend_args(d).window == cases[i].seen &&
                  attend_args(d).kv_len == cases[i].end,
              "case %zu: %d, %d", i, attend_args(d).first_newest, attend_args(d).window);
        a.list = at(7, 0);
        CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
        CHECK(d->kernel.family == TQKV_METAL_ATTEND_LIST && attend_args(d).first_newest == cases[i].first_newest &&
                  attend_args(d).window == cases[i].seen,
              "a list, case %zu", i);
        a.list = none;
        a.attention.non_causal = false;
        CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
        CHECK(attend_args(d).first_newest == cases[i].end - cases[i].n_queries, "causal, case %zu", i);
    }
    a.list = none;
    a.attention.non_causal = true;
    a.attention.end = 1 << 30;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
    a.list = at(7, 0);
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
    a.attention.non_causal = false;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
}

/* Strides of a cache's rows, and what the blocking calls do, which copy rows without gaps. */
static void check_cache_strides(const void *row)
{
    const cache_row shape = {TQKV_I8, TQKV_TQ4, 64, 40, false, 20, -1};
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    tqkv_cache_desc desc = cache_desc(&shape, NULL);
    (void)row;
    desc.exact_first = 30;
    tqkv_cache *cache = cache_make(&shape, &desc);
    const tqkv_cache_layout layout = {{64, 640}, {1000, 0}, {0, 70}, {2000, 128}},
                            no_gaps = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};
    REQUIRE(cache, "no cache");
    CHECK_RESULT(tqkv_cache_set_layout(cache, &layout), TQKV_OK);
    for (int packed = 0; packed < 2; packed++) {
        const tqkv_cache_layout *const own = packed ? &no_gaps : NULL;
        CHECK_RESULT(tqkv_metal_plan_cache_append(cache, at(0, 0), own, at(1, 0), at(2, 0), 3, none, &plan), TQKV_OK);
        CHECK(plan.n == 2, "codes and halves");
        for (int i = 0; i < 2; i++) {
            CHECK(rows_args(&d[i], 0).token_stride == (packed ? CACHE_HEADS * 64 : 64) &&
                      rows_args(&d[i], 0).head_stride == (packed ? 64 : 640),
                  "keys, dispatch %d", i);
            CHECK(rows_args(&d[i], 1).token_stride == (packed ? CACHE_HEADS * 64 : 1000) &&
                      rows_args(&d[i], 1).head_stride == 64,
                  "values, dispatch %d", i);
        }
        CHECK_RESULT(tqkv_metal_plan_cache_attend(cache, at(0, 0), own, NULL, at(1, 0), 2, at(2, 0), at(3, 0), &plan),
                     TQKV_OK);
        const int heads = CACHE_HEADS * CACHE_GROUP;
        tqkv__merge_args merge;
        memcpy(&merge, d[plan.n - 1].arguments[0].bytes, sizeof merge);
        CHECK((int)attend_args(d).query_token_stride == heads * 64 &&
                  attend_args(d).query_head_stride == (packed ? 64 : 70),
              "queries");
        CHECK((int)merge.out_token_stride == (packed ? heads * 64 : 2000) &&
                  merge.out_head_stride == (packed ? 64 : 128),
              "outputs");
    }
    tqkv_cache_destroy(cache);
}

static void check_cache_plan(const void *row)
{
    const cache_row shape = {TQKV_I8, TQKV_TQ4, 64, 8, true, 20, 15};
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    tqkv_cache_desc desc = cache_desc(&shape, NULL);
    desc.sinks = cache_sinks;
    tqkv_cache *cache = cache_make(&shape, &desc);
    size_t most = 0;
    (void)row;
    REQUIRE(cache, "no cache");
    CHECK_RESULT(tqkv_metal_plan_cache_attend(cache, at(0, 256), NULL, NULL, at(1, 0), 1, at(2, 0), at(3, 0), &plan),
                 TQKV_OK);
    CHECK(attend_args(d).kv_len == 3 && attend_args(d).key_oldest_slot == 4, "after a truncation: %d",
          attend_args(d).kv_len);
    const char *codes = (const char *)tqkv_cache_values(cache)->codes;
    CHECK(binding(d, "values' codes").at.offset == 256 + (size_t)(codes - (const char *)cache), "where the codes lie");
    CHECK(binding(d, "sinks").size && binding(d, "sinks").at.buffer == at(0, 0).buffer, "sinks are in the cache");
    check_dispatch(&d[0]);
    check_dispatch(&d[1]);
    tqkv_metal_cache_appended(cache, 7);
    CHECK_RESULT(tqkv_metal_plan_cache_attend(cache, at(0, 0), NULL, NULL, none, 1, none, none, &plan), TQKV_OK);
    CHECK(tqkv_cache_end(cache) == 22 && attend_args(d).kv_len == 8, "after an advance: %d", attend_args(d).kv_len);
    CHECK_RESULT(tqkv_metal_plan_cache_append(cache, at(0, 0), NULL, at(1, 0), at(2, 0), 3, none, &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(rows_args(d, 0).first_slot == 22 % 8 && d->kernel.family == TQKV_METAL_ENCODE_KV, "an append");
    CHECK_RESULT(tqkv_metal_plan_cache_scratch(cache, NULL, 2, &most), TQKV_OK);
    CHECK(most > 2 * CACHE_HEADS * CACHE_GROUP * 64 * sizeof(float), "%zu bytes", most);
    CHECK_RESULT(tqkv_metal_plan_cache_scratch(cache, NULL, 0, &most), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_cache_scratch(cache, NULL, 1, NULL), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_cache_scratch(NULL, NULL, 1, &most), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_cache_append(NULL, none, NULL, none, none, 1, none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK(plan.n == 0 && plan.result == TQKV_INVALID_ARGUMENT, "a refused plan");
    tqkv_cache_destroy(cache);
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

/* A report as the shaders give it, then with each byte changed in turn. */
static void check_stale(const void *row)
{
    tqkv__table_report report;
    (void)row;
    memset(&report, 0, sizeof report);
    CHECK(!strcmp(tqkv_metal_stale_table(&report), "table version"), "an empty report");
    report.table_version = TQKV_TABLE_VERSION;
#define SHARED_SIZE(name) sizeof(tqkv__##name),
    const uint32_t sizes[] = {TQKV__SHARED_STRUCTS(SHARED_SIZE)};
    memcpy(report.struct_sizes, sizes, sizeof sizes);
    report.tables = tqkv__tables;
    for (int i = 0; i < TQKV__KERNEL_DIMS; i++) {
        const int32_t kernel_sizes[] = {TQKV__KERNEL_SIZES(TQKV__KERNEL_DIM(i))};
        memcpy(report.kernel_sizes[i], kernel_sizes, sizeof kernel_sizes);
    }
    CHECK(!tqkv_metal_stale_table(&report), "not stale: %s", tqkv_metal_stale_table(&report));
    CHECK(!tqkv_metal_has_matrices(&report), "a product of zeros");
    for (size_t i = 0; i < offsetof(tqkv__table_report, matrix_product); i++) {
        ((unsigned char *)&report)[i] ^= 1;
        CHECK(tqkv_metal_stale_table(&report), "byte %zu of %zu", i, sizeof report);
        ((unsigned char *)&report)[i] ^= 1;
    }
    report.tables.signs[5] ^= 8;
    CHECK(!strcmp(tqkv_metal_stale_table(&report), "table signs"), "signs");
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
    CHECK_RESULT(tqkv_encode(tqkv_cache_keys(c), k, n_tokens, tqkv_cache_end(c)), TQKV_OK);
    return tqkv_encode(tqkv_cache_values(c), v, n_tokens, tqkv_cache_end(c));
}

static tqkv_result fake_attend(tqkv_metal *m, const tqkv_cache *c, const tqkv_attention *some, const void *q,
                               int n_queries, void *out)
{
    (void)c;
    (void)some;
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

void test_plan_cases(void)
{
    test_add(check_encode, NULL, 0, "plan/encode");
    test_add(check_encode_kv, NULL, 0, "plan/encode_kv");
    test_add(check_rows, NULL, 0, "plan/rows");
    test_add(check_engine, NULL, 0, "plan/engine");
    test_add(check_no_plan, NULL, 0, "plan/no_plan");
    test_add(check_attend, NULL, 0, "plan/attend");
    test_add(check_tree, NULL, 0, "plan/tree");
    test_add(check_center, NULL, 0, "plan/center");
    test_add(check_channel_scale, NULL, 0, "plan/channel_scale");
    test_add(check_prepare, NULL, 0, "plan/prepare");
    for (int i = 0; i < TEST_ALL_HEAD_DIMS; i++)
        test_add(check_head_dim, &test_all_head_dims[i], sizeof(int), "plan/head_dim/%d", test_all_head_dims[i]);
    test_add(check_tail, NULL, 0, "plan/tail");
    test_add(check_types, NULL, 0, "plan/types");
    test_add(check_strides, NULL, 0, "plan/strides");
    test_add(check_non_causal, NULL, 0, "plan/non_causal");
    test_add(check_cache_strides, NULL, 0, "plan/cache/strides");
    test_add(check_cache_plan, NULL, 0, "plan/cache");
    test_add(check_cache_kernels, NULL, 0, "plan/cache_kernels");
    test_add(check_stale, NULL, 0, "plan/stale");
    test_add(check_backend, NULL, 0, "plan/backend");
}

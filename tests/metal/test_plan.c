/* What tqkv_metal.m takes from tqkv.h: the plans of its dispatches. Those of rows, and what holds for all. */
#include "plan_fixture.h"

/* Rows that are encoded, decoded, probed, rotated and learned from: a wrong number or pointer is refused, memory that
   overlaps is told. */
static void check_rows(const void *row)
{
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    const tqkv_metal_store linear = plan_store(TQKV_TQ5, 64, 10, false, 0),
                           ring = plan_store(TQKV_I8, 512, 10, true, 2);
    (void)row;
    CHECK_RESULT(tqkv_metal_plan_encode(&ring, NULL, at(4, SIZE_MAX - 3), none, 24, 7, none, &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(binding(d, "src").at.offset > SIZE_MAX - 16, "an offset that wraps");
    CHECK_RESULT(tqkv_metal_plan_encode(&linear, NULL, at(4, 0), none, 0, 10, none, &plan), TQKV_OK);
    CHECK(d->grid[0] == 0, "nothing to encode");
    CHECK_RESULT(tqkv_metal_plan_encode(&linear, NULL, at(0, 0), none, 4, 6, none, &plan), TQKV_OK);
    CHECK(!strcmp(overlapping(d), "src"), "the source in the store: %s", overlapping(d));
    CHECK_RESULT(tqkv_metal_plan_encode(&linear, NULL, none, none, 5, 6, none, &plan), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_metal_plan_encode(&linear, NULL, none, none, -1, 0, none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_encode(NULL, NULL, none, none, 1, 0, none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_encode(NULL, &linear, none, none, 1, 0, none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_probe(&linear, none, INT_MAX, none, none, &plan),
                 TQKV_INVALID_ARGUMENT); /* rows > 2^31 */
    CHECK_RESULT(tqkv_metal_plan_decode(&ring, 95, 11, TQKV_ROTATED, none, &plan), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_metal_plan_decode(&linear, 8, 3, TQKV_ROTATED, none, &plan), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_metal_plan_decode(&linear, 0, 1, test_no_basis(2), none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_rotate(none, 5, 65, TQKV_ROTATED, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_rotate(none, -1, 64, TQKV_ROTATED, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(
        tqkv_metal_plan_calibrate(&linear, at(4, 0), 9, at(5, 0), 6, 2, TQKV_PAIRS_HALVES, at(6, 0), at(7, 0), &plan),
        TQKV_OK);
    check_plan(&plan);
    CHECK_RESULT(tqkv_metal_plan_calibrate(&linear, at(4, 0), 9, at(5, 0), 5, 2, TQKV_PAIRS_NONE, none, none, &plan),
                 TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_calibrate(&linear, at(4, 0), 9, none, 0, 0, (tqkv_pairs)3, none, none, &plan),
                 TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_tables(at(4, 0), &plan), TQKV_OK);
    check_plan(&plan);
}

/* Keys and values of one dispatch: as many heads, sizes that have a kernel, threads for the longer stream. */
static void check_encode_kv(const void *row)
{
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    const tqkv_metal_store keys = plan_store(TQKV_F16, 64, 10, true, 0), wide = plan_store(TQKV_TQ8, 128, 12, true, 2);
    tqkv_metal_store values = plan_store(TQKV_TQ8, 64, 12, true, 2), longer = keys, fewer = values;
    (void)row;
    longer.shape.capacity = 500;
    CHECK_RESULT(tqkv_metal_plan_encode(&longer, &values, at(4, 0), at(5, 0), 400, 3, at(6, 0), &plan), TQKV_OK);
    const size_t one = d->grid[0];
    CHECK_RESULT(tqkv_metal_plan_encode(&values, &longer, at(4, 0), at(5, 0), 400, 3, at(6, 0), &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(one == d->grid[0] && one * TQKV__ENCODE_ROWS(64) >= 1200, "%zu, %zu simdgroups", one, d->grid[0]);
    fewer.shape.n_kv_heads = 2;
    CHECK_RESULT(tqkv_metal_plan_encode(&keys, &wide, none, none, 1, 0, none, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_encode(&keys, &fewer, none, none, 1, 0, none, &plan), TQKV_INVALID_ARGUMENT);
}

/* The constants of the kernel of encode_kv. */
static void check_constants(const tqkv_metal_kernel *kernel)
{
    CHECK(kernel->constants[TQKV_FC_VALUE_FORMAT] == 1 + TQKV_TQ5 && kernel->constants[TQKV_FC_PAGES] == 1 &&
              !kernel->constants[TQKV_FC_SINKS],
          "constants");
    for (int i = 0; i < TQKV_METAL_CONSTANTS; i++)
        CHECK(TQKV_METAL_IS_UINT(i) == TQKV__IS_NUMBER(i), "the type of constant %d", i);
}

/* What an engine with its own encoder reads from a plan. */
static void check_engine(const void *row)
{
    static const char *const names[] = {"tqkv_tables", "tqkv_encode_d1024", "tqkv_encode_kv_d192_128",
                                        "tqkv_attend_d64"};
    static const char *const calls[] = {"tables", "encode", "encode", "attend"};
    tqkv_metal_plan plans[4];
    tqkv_metal_dispatch d[4];
    tqkv_metal_launch launch;
    const tqkv_metal_store large = plan_store(TQKV_TQ4, 1024, 10, false, 0),
                           keys = plan_store(TQKV_I8, 192, 10, false, 0),
                           values = plan_store(TQKV_TQ5, 128, 10, false, 2),
                           small = plan_store(TQKV_F16, 64, 9, false, 0);
    (void)row;
    tqkv_metal_attention a = plan_attention(&small, &small);
    const tqkv_result planned[] = {tqkv_metal_plan_tables(at(4, 0), &plans[0]),
                                   tqkv_metal_plan_encode(&large, NULL, at(4, 0), none, 9, 0, none, &plans[1]),
                                   tqkv_metal_plan_encode(&keys, &values, at(4, 0), at(5, 0), 9, 0, none, &plans[2]),
                                   tqkv_metal_plan_attend(&a, at(4, 0), at(5, 0), at(6, 0), &plans[3])};
    for (int i = 0; i < 4; i++) {
        CHECK_RESULT(planned[i], TQKV_OK);
        CHECK(!strcmp(plans[i].call, calls[i]) && plans[i].n == (i % 3 ? 1 : 2), "%s: %d", plans[i].call, plans[i].n);
        d[i] = plans[i].d[0];
    }
    for (int i = 0; i < 4; i++) CHECK(!strcmp(d[i].kernel.name, names[i]), "%s, not %s", d[i].kernel.name, names[i]);
    check_constants(&d[2].kernel);
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
        tqkv_metal_plan_encode(&s, NULL, none, none, 1, 0, none, NULL),
        tqkv_metal_plan_encode(&s, &s, none, none, 1, 0, none, NULL),
        tqkv_metal_plan_probe(&s, none, 1, none, none, NULL),
        tqkv_metal_plan_decode(&s, 0, 1, TQKV_ORIGINAL, none, NULL),
        tqkv_metal_plan_rotate(none, 1, 64, TQKV_ROTATED, NULL),
        tqkv_metal_plan_calibrate(&s, none, 1, none, 0, 0, TQKV_PAIRS_NONE, none, none, NULL),
        tqkv_metal_plan_attend(&a, none, none, none, NULL),
        tqkv_metal_plan_attend_partial(&a, none, 0, 0, none, none, none, none, NULL),
        tqkv_metal_plan_attend_merge(&a, none, none, none, &a, none, none, none, NULL),
        tqkv_metal_plan_attend_finish(&a, none, none, none, none, NULL),
        tqkv_metal_plan_index_scores(&x, none, none, NULL),
        tqkv_metal_plan_index_choose(&x, none, 1, none, none, NULL),
        tqkv_metal_plan_attend_batch(&a, 1, &none, none, &a, none, &none, NULL),
        tqkv_metal_plan_cache_append(NULL, none, NULL, none, none, 1, none, NULL),
        tqkv_metal_plan_cache_attend(NULL, none, NULL, NULL, none, 1, none, none, NULL)};
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        CHECK(results[i] == TQKV_INVALID_ARGUMENT, "call %zu: %s", i, tqkv_result_string(results[i]));
    CHECK(!tqkv_metal_overlapping(NULL, 1), "no dispatch");
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
    size_t scratch;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.end = 10;
    CHECK(TQKV__HAS_KERNELS(d) == known, "kernels of %d", d);
    CHECK_RESULT(tqkv_metal_plan_encode(&keys, NULL, at(4, 0), none, 40, 7, none, &plans[0]), expected);
    CHECK_RESULT(tqkv_metal_plan_encode(&keys, &values, at(4, 0), at(5, 0), 9, 3, none, &plans[1]), expected);
    CHECK_RESULT(tqkv_metal_plan_probe(&keys, at(4, 0), 7, at(5, 0), none, &plans[2]), expected);
    CHECK_RESULT(tqkv_metal_plan_decode(&keys, 0, 10, TQKV_ORIGINAL, at(4, 0), &plans[3]), expected);
    CHECK_RESULT(tqkv_metal_plan_rotate(at(4, 0), 5, d, TQKV_ORIGINAL, &plans[4]), expected);
    for (int i = 0; i < 5 && known; i++) {
        check_plan(&plans[i]);
        CHECK(plans[i].n == 1 && plans[i].d->kernel.head_dim * TQKV__DIM_UNIT == d && !plans[i].d->kernel.value_dim,
              "the kernel");
    }
    CHECK_RESULT(plan_scratch(&a, &scratch), expected);
    CHECK_RESULT(plan_attend(&a, &plans[0]), expected);
    a.values = &others;
    const tqkv_result pair = d == 128 || d == 192 ? TQKV_OK : TQKV_UNSUPPORTED;
    CHECK_RESULT(tqkv_metal_plan_encode(&keys, &others, at(4, 0), at(5, 0), 9, 3, none, &plans[0]), pair);
    const tqkv_metal_dispatch *const p = plans[0].d;
    if (pair == TQKV_OK) check_dispatch(p);
    CHECK_RESULT(plan_scratch(&a, &scratch), pair);
    CHECK_RESULT(plan_attend(&a, &plans[0]), pair);
    if (d != 192) return;
    CHECK(p[0].kernel.value_dim * TQKV__DIM_UNIT == 128 && p[1].kernel.head_dim * TQKV__DIM_UNIT == 128, "the kernels");
    CHECK(binding(p, "q").size == 3 * 192 * sizeof(float) && binding(p, "out").size == 3 * 128 * sizeof(float),
          "sizes");
}

/* Rows begin at multiples of their values' size; other types, and strides beyond 32 bits, are refused. */
static void check_types(const void *row)
{
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    tqkv_metal_store s = plan_store(TQKV_TQ4, 80, 5, true, 0);
    (void)row;
    tqkv_metal_attention a = plan_attention(&s, &s);
    a.attention.end = 5;
    for (int type = TQKV_TYPE_F32; type <= TQKV_TYPE_BF16; type++) {
        const size_t size = type == TQKV_TYPE_F32 ? 4 : 2;
        s.shape.type = (tqkv_type)type;
        a.attention.query_type = a.attention.output_type = s.shape.type;
        CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, at(4, 0), none, 3, 0, none, &plan), TQKV_OK);
        CHECK(binding(d, "src").alignment == size, "rows");
        CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
        CHECK(binding(d, "q").alignment == size && binding(d, "out").alignment == size, "queries and outputs");
    }
    s.shape.type = test_no_type(3);
    CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, none, none, 1, 0, none, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_probe(&s, none, 1, none, none, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_decode(&s, 0, 1, TQKV_ORIGINAL, none, &plan), TQKV_UNSUPPORTED);
    a.attention.output_type = test_no_type(-1);
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
}

/* Rows that share values: only those that are read may. */
static void check_strides(const void *row)
{
    tqkv_metal_plan plan;
    tqkv_metal_store s = plan_store(TQKV_TQ5, 64, 10, true, 0);
    (void)row;
    tqkv_metal_attention a = plan_attention(&s, &s);
    a.attention.n_queries = 4;
    a.attention.end = 7;
    s.shape.strides.head = 65;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK); /* rows that attention does not read */
    CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, at(4, 0), none, 3, 0, none, &plan), TQKV_OK);
    CHECK_RESULT(tqkv_metal_plan_decode(&s, 0, 3, TQKV_ORIGINAL, at(4, 0), &plan), TQKV_INVALID_ARGUMENT);
    a.attention.query_strides.head = 65;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    a.attention.output_strides.head = 65;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
    if (sizeof(size_t) <= 4) return;
    a.attention.output_strides.head = s.shape.strides.token = (size_t)UINT32_MAX + 1;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, at(4, 0), none, 3, 0, none, &plan), TQKV_UNSUPPORTED);
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

void test_plan_cases(void)
{
    test_add(check_encode_kv, NULL, 0, "plan/encode_kv");
    test_add(check_rows, NULL, 0, "plan/rows");
    test_add(check_engine, NULL, 0, "plan/engine");
    test_add(check_no_plan, NULL, 0, "plan/no_plan");
    for (int i = 0; i < TEST_ALL_HEAD_DIMS; i++)
        test_add(check_head_dim, &test_all_head_dims[i], sizeof(int), "plan/head_dim/%d", test_all_head_dims[i]);
    test_add(check_types, NULL, 0, "plan/types");
    test_add(check_strides, NULL, 0, "plan/strides");
    test_add(check_stale, NULL, 0, "plan/stale");
}

/* What tqkv_metal.m takes from tqkv.h: the plans of its dispatches. Those of rows, and what holds for all. */
#include "plan_fixture.h"

/* Keys of 64 and values, 10 and 12 slots, their sources; what planning says of their rows after one change. */
typedef struct rows_scene {
    tqkv_metal_store keys, values;
    tqkv_metal_plan plan;
    int32_t pages[4];
} rows_scene;

static void set_rows(rows_scene *s, bool paged)
{
    static const int32_t pages[4] = {3, 1, 2, 0};
    memcpy(s->pages, pages, sizeof pages);
    s->keys = paged ? plan_pool(TQKV_TQ5, 0, s->pages) : plan_store(TQKV_TQ5, 64, 10, false, 0);
    s->values = plan_store(TQKV_I8, 64, 12, true, 2);
}

static tqkv_result encode(rows_scene *s, int n, int64_t position)
{
    return check_plan(tqkv_metal_plan_encode(&s->keys, NULL, at(Q, 0), none, n, position, none, &s->plan), &s->plan);
}

static tqkv_result encode_both(rows_scene *s, int n, int64_t position)
{
    return check_plan(tqkv_metal_plan_encode(&s->keys, &s->values, at(Q, 0), at(OUT, 0), n, position, none, &s->plan),
                      &s->plan);
}

static tqkv_result decode(rows_scene *s, int n, int64_t position)
{
    return check_plan(tqkv_metal_plan_decode(&s->keys, position, n, TQKV_ORIGINAL, at(OUT, 0), &s->plan), &s->plan);
}

#define ROWS_ARE(expected, paged, call, n, position, change) \
    RESULT_AFTER(expected, set_rows(&s, paged), call(&s, n, position), change)

/* Rows that are encoded and decoded: a wrong number, type, stride or pair is refused. */
static void check_rows(NO_ROW)
{
    rows_scene s;
    ROWS_ARE(OK, false, encode, 0, 10, (void)0);
    ROWS_ARE(OK, false, encode_both, 4, 6, s.values.shape.ring = true);
    ROWS_ARE(OUT_OF_RANGE, false, encode, 5, 6, (void)0);
    ROWS_ARE(INVALID_ARGUMENT, false, encode, -1, 0, (void)0);
    ROWS_ARE(OUT_OF_RANGE, false, decode, 3, 8, (void)0);
    ROWS_ARE(OUT_OF_RANGE, false, decode, 11, 95, s.keys.shape.ring = true);
    ROWS_ARE(UNSUPPORTED, false, encode, 3, 0, s.keys.shape.type = test_no_type(3));
    ROWS_ARE(UNSUPPORTED, false, decode, 3, 0, s.keys.shape.type = test_no_type(3));
    /* Rows that share values are only read. */
    ROWS_ARE(INVALID_ARGUMENT, false, decode, 3, 0, s.keys.shape.strides.head = 65);
    if (sizeof(size_t) > 4)
        ROWS_ARE(UNSUPPORTED, false, encode, 3, 0, s.keys.shape.strides.token = (size_t)UINT32_MAX * 2);
    ROWS_ARE(UNSUPPORTED, false, encode_both, 1, 0, s.values.shape.head_dim = 128);
    ROWS_ARE(INVALID_ARGUMENT, false, encode_both, 1, 0, s.values.shape.n_kv_heads = 2);
    /* Threads for the longer stream. */
    ROWS_ARE(OK, false, encode_both, 400, 0, s.keys.shape.capacity = 500);
    const size_t one = s.plan.d->grid[0];
    ROWS_ARE(OK, false, encode_both, 400, 0, s.keys.shape.ring = true; s.values.shape.capacity = 500);
    CHECK(one == s.plan.d->grid[0] && one * TQKV__ENCODE_ROWS(64) >= 1200, "%zu simdgroups", one);
    set_rows(&s, false);
    CHECK_RESULT(tqkv_metal_plan_encode(&s.keys, NULL, at(0, 0), none, 4, 6, none, &s.plan), TQKV_OK);
    CHECK(!strcmp(overlapping(s.plan.d), "src"), "the source in the store: %s", overlapping(s.plan.d));
}

/* Keys in pages, of which some entries are -1: tokens of these are left out, and cannot be decoded. */
static void check_paged_rows(NO_ROW)
{
    rows_scene s;
    ROWS_ARE(OUT_OF_RANGE, true, decode, 64, 64, s.pages[1] = -1);
    ROWS_ARE(OUT_OF_RANGE, true, encode, 257, 0, (void)0);
    ROWS_ARE(OUT_OF_RANGE, true, decode, 257, 0, (void)0);
    ROWS_ARE(OK, true, decode, 0, 256, (void)0);
    ROWS_ARE(OUT_OF_RANGE, true, encode, 1, 127, s.pages[1] = 5);
    ROWS_ARE(OUT_OF_RANGE, true, encode, 1, 127, s.pages[1] = -2);
    ROWS_ARE(INVALID_ARGUMENT, true, encode, 130, 0, s.pages[2] = 3); /* page 3 twice */
    ROWS_ARE(OK, true, decode, 130, 0, s.pages[2] = 3);
    ROWS_ARE(OUT_OF_RANGE, true, encode, 257, 0, s.keys.shape.pages = NULL); /* not known here */
    ROWS_ARE(OUT_OF_RANGE, true, encode, 1, 0, s.keys.shape.n_pages = 0);
    ROWS_ARE(UNSUPPORTED, true, encode, 1, 0, s.keys.shape.pages = NULL; s.keys.shape.n_pages = INT_MAX / 64 + 1);
    ROWS_ARE(INVALID_ARGUMENT, true, encode, 1, 0, s.keys.shape.strides.head = SIZE_MAX / 64);
    ROWS_ARE(INVALID_ARGUMENT, true, encode, 1, 0, s.keys.shape.page_size = 96);
    ROWS_ARE(INVALID_ARGUMENT, true, encode, 1, 0, s.keys.pages = none);
    ROWS_ARE(INVALID_ARGUMENT, true, decode, 1, 0, s.keys.pages = none);
    ROWS_ARE(OK, true, encode, 4, 0, s.keys.shape.page_size = 1; s.pages[0] = 319);
    ROWS_ARE(OUT_OF_RANGE, true, encode, 4, 0, s.keys.shape.page_size = 1; s.pages[0] = 320);
    set_rows(&s, true);
    s.keys.pages = at(0, 8);
    CHECK_RESULT(tqkv_metal_plan_encode(&s.keys, NULL, at(Q, 0), none, 1, 0, none, &s.plan), TQKV_OK);
    CHECK(!strcmp(overlapping(s.plan.d), "codes"), "a table in the codes: %s", overlapping(s.plan.d));
}
#undef ROWS_ARE

/* The other calls over rows. */
static void check_other_rows(NO_ROW)
{
    const tqkv_metal_store s = plan_store(TQKV_TQ5, 64, 10, false, 0);
    tqkv_metal_store odd = s;
    tqkv_metal_plan plan;
    odd.shape.type = test_no_type(3);
    CHECK_RESULT(tqkv_metal_plan_encode(NULL, NULL, none, none, 1, 0, none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_encode(NULL, &s, none, none, 1, 0, none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_probe(&s, none, INT_MAX, none, none, &plan), TQKV_INVALID_ARGUMENT); /* rows > 2^31 */
    CHECK_RESULT(tqkv_metal_plan_probe(&odd, none, 1, none, none, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_decode(&s, 0, 1, test_no_basis(2), none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_rotate(none, 5, 65, TQKV_ROTATED, &plan), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv_metal_plan_rotate(none, -1, 64, TQKV_ROTATED, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(check_plan(tqkv_metal_plan_calibrate(&s, at(Q, 0), 9, at(MORE, 0), 6, 2, TQKV_PAIRS_HALVES, at(OUT, 0),
                                                      at(SCRATCH, 0), &plan),
                            &plan),
                 TQKV_OK);
    CHECK_RESULT(tqkv_metal_plan_calibrate(&s, at(Q, 0), 9, at(MORE, 0), 5, 2, TQKV_PAIRS_NONE, none, none, &plan),
                 TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_calibrate(&s, at(Q, 0), 9, none, 0, 0, test_no_pairs(3), none, none, &plan),
                 TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(check_plan(tqkv_metal_plan_tables(at(OUT, 0), &plan), &plan), TQKV_OK);
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
static void check_engine(NO_ROW)
{
    tqkv_metal_plan plan;
    tqkv_metal_launch launch;
    const tqkv_metal_store keys = plan_store(TQKV_I8, 192, 10, false, 0),
                           values = plan_store(TQKV_TQ5, 128, 10, false, 2);
    CHECK_RESULT(tqkv_metal_plan_encode(&keys, &values, at(Q, 0), at(OUT, 0), 9, 0, none, &plan), TQKV_OK);
    CHECK(!strcmp(plan.call, "encode") && plan.n == 1, "%s: %d", plan.call, plan.n);
    CHECK(!strcmp(plan.d->kernel.name, "tqkv_encode_kv_d192_128"), "%s", plan.d->kernel.name);
    check_constants(&plan.d->kernel);
    CHECK_RESULT(tqkv_metal_plan_launch(plan.d, 31, &launch), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_launch(NULL, 64, &launch), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_launch(plan.d, 64, NULL), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_tables(at(OUT, 0), &plan), TQKV_OK);
    CHECK(!strcmp(plan.call, "tables") && plan.n == 2, "%s: %d", plan.call, plan.n);
}

/* Nowhere to write a plan. */
static void check_no_plan(NO_ROW)
{
    const tqkv_metal_store s = plan_store(TQKV_I8, 64, 10, false, 0);
    tqkv_metal_store one = s;
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
    const tqkv_result expected = known ? TQKV_OK : TQKV_UNSUPPORTED,
                      pair = d == 128 || d == 192 ? TQKV_OK : TQKV_UNSUPPORTED;
    const tqkv_metal_store keys = plan_store(TQKV_I8, d, 10, true, 0), values = plan_store(TQKV_TQ3, d, 10, true, 2),
                           others = plan_store(TQKV_TQ3, 128, 10, true, 2);
    tqkv_metal_plan plan, *const p = &plan;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.end = 10;
    CHECK(TQKV__HAS_KERNELS(d) == known, "kernels of %d", d);
    const tqkv_result results[] = {
        check_plan(tqkv_metal_plan_encode(&keys, NULL, at(Q, 0), none, 9, 3, none, p), p),
        check_plan(tqkv_metal_plan_encode(&keys, &values, at(Q, 0), at(OUT, 0), 9, 3, none, p), p),
        check_plan(tqkv_metal_plan_probe(&keys, at(Q, 0), 9, at(OUT, 0), none, p), p),
        check_plan(tqkv_metal_plan_decode(&keys, 0, 10, TQKV_ORIGINAL, at(OUT, 0), p), p),
        check_plan(tqkv_metal_plan_rotate(at(Q, 0), 5, d, TQKV_ORIGINAL, p), p),
        plan_attend(&a, p)};
    for (int i = 0; i < 6; i++) CHECK_RESULT(results[i], expected);
    a.values = &others;
    CHECK_RESULT(check_plan(tqkv_metal_plan_encode(&keys, &others, at(Q, 0), at(OUT, 0), 9, 3, none, p), p), pair);
    CHECK_RESULT(plan_attend(&a, p), pair);
    if (d == 192)
        CHECK(plan_end(p, at(Q, 0)) == 3 * 192 * sizeof(float) && plan_end(p, at(OUT, 0)) == 3 * 128 * sizeof(float),
              "sizes");
}

/* A report as the shaders give it, then with each byte changed in turn. */
static void check_stale(NO_ROW)
{
    tqkv__table_report report;
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
    test_add(check_rows, NULL, 0, "plan/rows");
    test_add(check_paged_rows, NULL, 0, "plan/rows/paged");
    test_add(check_other_rows, NULL, 0, "plan/rows/other");
    test_add(check_engine, NULL, 0, "plan/engine");
    test_add(check_no_plan, NULL, 0, "plan/no_plan");
    for (int i = 0; i < TEST_ALL_HEAD_DIMS; i++)
        test_add(check_head_dim, &test_all_head_dims[i], sizeof(int), "plan/head_dim/%d", test_all_head_dims[i]);
    test_add(check_stale, NULL, 0, "plan/stale");
}

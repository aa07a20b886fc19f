/* Plans of dispatches over page tables, and of encoding by slots. */
#include "plan_fixture.h"

/* What tqkv_metal_plan_encode, of one stream and of two, and _decode say of positions [position, position + n). */
static void check_paged_rows(const tqkv_metal_store *s, int n, int64_t position, tqkv_result written, tqkv_result read)
{
    tqkv_metal_plan plan;
    CHECK_RESULT(tqkv_metal_plan_encode(s, NULL, at(4, 0), none, n, position, none, &plan), written);
    CHECK_RESULT(tqkv_metal_plan_encode(s, s, at(4, 0), at(5, 0), n, position, none, &plan), written);
    CHECK_RESULT(tqkv_metal_plan_decode(s, position, n, TQKV_ORIGINAL, at(4, 0), &plan), read);
}

static void check_paged_encode(const void *row)
{
    int32_t pages[] = {3, -1, 3, 0};
    tqkv_metal_store s = plan_pool(TQKV_TQ5, 0, pages);
    const tqkv_metal_store values = plan_store(TQKV_I8, 64, 320, true, 2);
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    (void)row;
    CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, at(4, 0), none, 65, 130, none, &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(rows_args(d, 0).first_slot == 130 && rows_args(d, 0).page_size == 64 && rows_args(d, 0).n_pages == 5 &&
              rows_args(d, 0).capacity == 320 && constant(d, TQKV_FC_PAGES) == 1 && binding(d, "pages").size == 16,
          "the table");
    CHECK(binding(d, "codes").size == 3 * 320 * 40, "the pool");
    CHECK_RESULT(tqkv_metal_plan_encode(&s, &values, at(4, 0), at(5, 0), 65, 130, none, &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(constant(d, TQKV_FC_PAGES) == 1 && constant(d, TQKV_FC_VALUE_PAGES) == 0, "only the keys have pages");
    check_paged_rows(&s, 64, 64, TQKV_OK, TQKV_OUT_OF_RANGE);           /* -1: left out */
    check_paged_rows(&s, 257, 0, TQKV_OUT_OF_RANGE, TQKV_OUT_OF_RANGE); /* beyond the table */
    check_paged_rows(&s, 0, 256, TQKV_OK, TQKV_OK);
    pages[1] = 5;
    check_paged_rows(&s, 1, 127, TQKV_OUT_OF_RANGE, TQKV_OUT_OF_RANGE);
    pages[1] = 1;
    check_paged_rows(&s, 130, 0, TQKV_INVALID_ARGUMENT, TQKV_OK); /* page 3 twice */
    s.shape.pages = NULL;                                         /* not known here */
    check_paged_rows(&s, 130, 0, TQKV_OK, TQKV_OK);
    check_paged_rows(&s, 257, 0, TQKV_OUT_OF_RANGE, TQKV_OUT_OF_RANGE);
}

static void check_paged_refusals(const void *row)
{
    const int32_t pages[] = {3, 1, 2, 0};
    tqkv_metal_store s = plan_pool(TQKV_TQ5, 0, NULL);
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    (void)row;
    s.shape.n_pages = 0;
    check_paged_rows(&s, 1, 0, TQKV_OUT_OF_RANGE, TQKV_OUT_OF_RANGE);
    s.shape.n_pages = INT_MAX / 64 + 1;
    check_paged_rows(&s, 1, 0, TQKV_UNSUPPORTED, TQKV_UNSUPPORTED);
    s.shape.n_pages = -1;
    check_paged_rows(&s, 1, 0, TQKV_INVALID_ARGUMENT, TQKV_INVALID_ARGUMENT);
    s = plan_pool(TQKV_TQ5, 0, pages);
    s.shape.strides.head = SIZE_MAX / 64;
    check_paged_rows(&s, 1, 0, TQKV_INVALID_ARGUMENT, TQKV_INVALID_ARGUMENT);
    s = plan_pool(TQKV_TQ5, 0, pages);
    s.shape.page_size = 96;
    check_paged_rows(&s, 1, 0, TQKV_INVALID_ARGUMENT, TQKV_INVALID_ARGUMENT);
    s.shape.page_size = 80; /* divides the pool */
    check_paged_rows(&s, 1, 0, TQKV_OK, TQKV_OK);
    s = plan_pool(TQKV_TQ5, 0, pages);
    s.shape.ring = true;
    check_paged_rows(&s, 1, 0, TQKV_INVALID_ARGUMENT, TQKV_INVALID_ARGUMENT);
    s = plan_pool(TQKV_TQ5, 0, pages);
    s.pages = none;
    check_paged_rows(&s, 1, 0, TQKV_INVALID_ARGUMENT, TQKV_INVALID_ARGUMENT);
    s.pages = at(0, 8);
    CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, at(4, 0), none, 1, 0, none, &plan), TQKV_OK);
    CHECK(!strcmp(overlapping(d), "codes"), "a table in the codes: %s", overlapping(d));
}

/* Slots are pages of one position. */
static void check_slots(const void *row)
{
    int32_t slots[] = {9, -1, 0, -1};
    tqkv_metal_store s = plan_store(TQKV_TQ5, 64, 10, false, 0), values = plan_store(TQKV_I8, 64, 12, false, 2);
    tqkv_metal_plan plan;
    const tqkv_metal_dispatch *const d = plan.d;
    (void)row;
    s.shape.pages = values.shape.pages = slots;
    s.shape.n_pages = values.shape.n_pages = 4;
    s.shape.page_size = values.shape.page_size = 1;
    s.pages = values.pages = at(7, 4);
    CHECK_RESULT(tqkv_metal_plan_encode(&s, &values, at(4, 0), at(5, 0), 4, 0, none, &plan), TQKV_OK);
    check_dispatch(d);
    CHECK(rows_args(d, 0).page_size == 1 && rows_args(d, 0).n_pages == 10 && rows_args(d, 1).n_pages == 12 &&
              rows_args(d, 0).capacity == 10 && rows_args(d, 0).first_slot == 0 && rows_args(d, 0).n_tokens == 4,
          "a table of slots");
    CHECK(constant(d, TQKV_FC_PAGES) == 1 && constant(d, TQKV_FC_VALUE_PAGES) == 1 &&
              binding(d, "keys' pages").size == 16,
          "the kernel");
    slots[0] = 10;
    CHECK_RESULT(tqkv_metal_plan_encode(&values, NULL, at(4, 0), none, 4, 0, none, &plan), TQKV_OK);
    CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, at(4, 0), none, 4, 0, none, &plan), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_metal_plan_encode(&values, &s, at(4, 0), at(5, 0), 4, 0, none, &plan), TQKV_OUT_OF_RANGE);
    slots[0] = -2;
    CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, at(4, 0), none, 4, 0, none, &plan), TQKV_OUT_OF_RANGE);
    slots[0] = 0;
    CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, at(4, 0), none, 4, 0, none, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, at(4, 0), none, 2, 0, none, &plan), TQKV_OK);
    CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, at(4, 0), none, 5, 0, none, &plan), TQKV_OUT_OF_RANGE);
    s.shape.pages = NULL; /* not known here */
    CHECK_RESULT(tqkv_metal_plan_encode(&s, NULL, at(4, 0), none, 4, 0, none, &plan), TQKV_OK);
    check_dispatch(d);
}

static void check_paged_attend(const void *row)
{
    int32_t pages[] = {3, -1, 2, 0};
    tqkv_metal_plan plan;
    tqkv_metal_store keys = plan_pool(TQKV_I8, 0, pages), values = plan_pool(TQKV_F16, 2, pages);
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.end = 250;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OUT_OF_RANGE); /* sees the entry of -1 */
    a.attention.window = 122;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(constant(plan.d, TQKV_FC_SAME_SLOTS) == 0, "two tables");
    values.pages = keys.pages;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(constant(plan.d, TQKV_FC_SAME_SLOTS) == 1, "one table is looked up twice");
}

/* Scratch is that of linear stores; both streams have pages, or none. */
static void check_paged_scratch(const void *row)
{
    static const int32_t pages[] = {3, -1, 2, 0};
    tqkv_metal_plan plan;
    tqkv_metal_store keys = plan_pool(TQKV_I8, 0, pages), values = plan_pool(TQKV_F16, 2, pages);
    const tqkv_metal_store linear = plan_store(TQKV_F16, 64, 320, false, 2);
    size_t paged_scratch, scratch;
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    values.pages = keys.pages;
    a.attention.end = 250;
    a.attention.window = 122;
    CHECK_RESULT(plan_scratch(&a, &paged_scratch), TQKV_OK);
    a.values = &linear;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
    keys.shape.pages = NULL; /* not known here */
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_UNSUPPORTED);
    keys.pages = none;
    keys.shape.capacity = 256;
    CHECK_RESULT(plan_scratch(&a, &scratch), TQKV_OK);
    CHECK(scratch == paged_scratch, "%zu bytes with pages, %zu without", paged_scratch, scratch);
}

/* The kernel divides by the tiles of a page with a factor and a shift. */
static void check_page_division(const void *row)
{
    const int page_sizes[] = {64, 128, 192, 320, 448, 4032, 65600, 1 << 20, 33554432 + 64, 1 << 30, INT_MAX / 64 * 64};
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    (void)row;
    for (size_t i = 0; i < sizeof page_sizes / sizeof *page_sizes; i++) {
        tqkv_metal_store s = plan_pool(TQKV_TQ4, 0, NULL);
        const uint32_t tiles = (uint32_t)page_sizes[i] / 32, last = (uint32_t)INT_MAX / 32;
        s.shape.capacity = s.shape.page_size = page_sizes[i];
        s.shape.n_pages = 1;
        tqkv_metal_attention a = plan_attention(&s, &s);
        a.attention.end = 1;
        CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
        for (uint32_t page = 0; page <= last / tiles; page += 1 + page / 50)
            for (uint32_t tile = page * tiles, n = 0; n < 2; n++, tile += tiles - 1)
                CHECK(tile > last || (uint32_t)((uint64_t)tile * attend_args(d).key_page_factor >> 32) >>
                                             attend_args(d).key_page_shift ==
                                         page,
                      "tile %u of pages of %d", tile, page_sizes[i]);
    }
}

/* Tables that only the GPU knows, and an empty one. */
static void check_unknown_pages(const void *row)
{
    const int32_t pages[] = {3, -1, 2, 0};
    tqkv_metal_plan plan;
    tqkv_metal_dispatch *const d = plan.d;
    tqkv_metal_store keys = plan_pool(TQKV_I8, 0, NULL), values = plan_pool(TQKV_F16, 2, NULL);
    (void)row;
    tqkv_metal_attention a = plan_attention(&keys, &values);
    a.attention.end = 250;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    a.attention.end = 257;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OUT_OF_RANGE);
    a.attention.end = 0;
    values.shape.n_pages = 0;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_OK);
    CHECK(constant(d, TQKV_FC_PAGES) == 0 && attend_args(d).key_capacity == 320, "an empty table is read");
    keys.shape.pages = pages;
    keys.pages = none;
    CHECK_RESULT(plan_attend(&a, &plan), TQKV_INVALID_ARGUMENT);
}

void test_plan_pages_cases(void)
{
    test_add(check_paged_encode, NULL, 0, "plan/pages/encode");
    test_add(check_paged_refusals, NULL, 0, "plan/pages/refusals");
    test_add(check_paged_attend, NULL, 0, "plan/pages/attend");
    test_add(check_paged_scratch, NULL, 0, "plan/pages/scratch");
    test_add(check_slots, NULL, 0, "plan/slots");
    test_add(check_page_division, NULL, 0, "plan/pages/division");
    test_add(check_unknown_pages, NULL, 0, "plan/pages/unknown");
}

/* What tqkv_metal.m takes from tqkv.h: the plans of its dispatches, and the calls that a cache makes to its context.
 * The context here is a fake without a GPU. */
#define TQKV_SHARED
#include "cache_fixture.h"
#include "runner.h"

#include <limits.h>

/* A buffer that is never read or written. */
static tqkv_metal_buffer at(int number, size_t offset)
{
    static char things[8];
    tqkv_metal_buffer b;
    b.buffer = &things[number];
    b.offset = offset;
    return b;
}

static const tqkv_metal_buffer none = {NULL, 0};

static tqkv_metal_store plan_store(tqkv_format format, int head_dim, int capacity, bool ring, int number)
{
    tqkv_metal_store s;
    memset(&s, 0, sizeof s);
    s.shape.format = format;
    s.shape.head_dim = head_dim;
    s.shape.n_kv_heads = 3;
    s.shape.capacity = capacity;
    s.shape.ring = ring;
    s.codes = at(number, 0);
    s.norms = at(number + 1, 0);
    return s;
}

/* The last binding of that name. */
static tqkv__binding binding(const tqkv__dispatch *d, const char *name)
{
    tqkv__binding found;
    memset(&found, 0, sizeof found);
    for (int i = 0; i < d->n_bindings; i++)
        if (!strcmp(d->bindings[i].name, name)) found = d->bindings[i];
    CHECK(found.name, "no %s", name);
    return found;
}

/* -1: not set */
static int constant(const tqkv__dispatch *d, int index) { return d->kernel.constants[index] - 1; }

static const char *overlapping(const tqkv__dispatch *d)
{
    for (int i = 0; i < d->n_bindings; i++)
        if (tqkv__overlapping(d, i)) return tqkv__overlapping(d, i)->name;
    return "";
}

/* The limits of Metal: 32 KiB of threadgroup memory in multiples of 16, 1024 threads, one argument an index. */
static void check_dispatch(const tqkv__dispatch *d)
{
    size_t memory = 0;
    unsigned indices = 0;
    for (int i = 0; i < d->n_args; i++) indices |= 1u << (i * TQKV__SECOND_ARGS);
    for (int i = 0; i < d->n_bindings; i++) {
        const int index = d->bindings[i].index;
        if (index == TQKV__ONLY_CHECKED) continue;
        CHECK(!(indices >> index & 1u), "index %d twice", index);
        indices |= 1u << index;
    }
    CHECK((indices & (indices + 1)) == 0, "indices %x", indices); /* 0, 1, 2 ... without gaps */
    for (int n = 1; n <= d->n_simdgroups; n++)
        for (int i = 0; i < TQKV__MEMORIES; i++) {
            const size_t size = d->memory[i] + (size_t)n * d->memory_each[i];
            CHECK(size % 16 == 0, "%zu bytes of memory %d", size, i);
            if (n == d->n_simdgroups) memory += size ? size : 16; /* the least that a dispatch can set */
        }
    CHECK(memory <= 32768, "%zu bytes of threadgroup memory", memory);
    CHECK(d->n_simdgroups > 0 && d->n_simdgroups <= 32 && d->grid[1] && d->grid[2], "no threads");
    CHECK(!*overlapping(d), "%s lies under another", overlapping(d));
}

static void check_encode(const void *row)
{
    tqkv__dispatch d;
    const tqkv_metal_store linear = plan_store(TQKV_TQ5, 64, 10, false, 0),
                           ring = plan_store(TQKV_I8, 512, 10, true, 2);
    const size_t token = 3 * 512 * sizeof(float);
    (void)row;
    CHECK_RESULT(tqkv__plan_encode(&ring, at(4, 8), 24, 7, at(5, 0), &d), TQKV_OK);
    check_dispatch(&d);
    CHECK(d.args[0].rows.n_tokens == 10 && d.args[0].rows.first_slot == 1, "%d tokens at %d", d.args[0].rows.n_tokens,
          d.args[0].rows.first_slot);
    CHECK(binding(&d, "src").at.offset == 8 + 14 * token && binding(&d, "src").size == 10 * token, "the source");
    CHECK(binding(&d, "codes").size == 3 * 10 * 512 && binding(&d, "norms").size == 3 * 10 * 4 * sizeof(float),
          "the store's sizes");
    CHECK(d.kernel.family == TQKV__ENCODE && d.kernel.head_dim == 512 / TQKV__DIM_UNIT &&
              constant(&d, TQKV_FC_ROTATED) == 1 && constant(&d, TQKV_FC_FORMAT) == TQKV_I8 &&
              constant(&d, TQKV_FC_VALUE_FORMAT) == -1,
          "the kernel");
    CHECK(d.rows && d.grid[0] == 4 && d.args[0].rows.block_scale == 1.0f, "%zu simdgroups for 30 rows", d.grid[0]);
    CHECK_RESULT(tqkv__plan_encode(&ring, at(4, SIZE_MAX - 3), 24, 7, none, &d), TQKV_OK);
    CHECK(binding(&d, "src").at.offset > SIZE_MAX - 16, "an offset that wraps");
    CHECK_RESULT(tqkv__plan_encode(&linear, at(4, 0), 4, 6, none, &d), TQKV_OK);
    CHECK(d.args[0].rows.first_slot == 6 && d.args[0].rows.capacity == 10 && !binding(&d, "not_finite").size, "linear");
    CHECK_RESULT(tqkv__plan_encode(&linear, at(4, 0), 0, 10, none, &d), TQKV_OK);
    CHECK(d.grid[0] == 0, "nothing to encode");
    CHECK_RESULT(tqkv__plan_encode(&linear, at(0, 0), 4, 6, none, &d), TQKV_OK);
    CHECK(!strcmp(overlapping(&d), "src"), "the source in the store: %s", overlapping(&d));
    CHECK_RESULT(tqkv__plan_encode(&linear, none, 5, 6, none, &d), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv__plan_encode(&linear, none, -1, 0, none, &d), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_encode(NULL, none, 1, 0, none, &d), TQKV_INVALID_ARGUMENT);
}

static void check_encode_kv(const void *row)
{
    tqkv__dispatch d;
    const tqkv_metal_store keys = plan_store(TQKV_F16, 64, 10, true, 0), values = plan_store(TQKV_TQ8, 64, 12, true, 2);
    const tqkv_metal_store wide = plan_store(TQKV_TQ8, 128, 12, true, 2);
    tqkv_metal_store fewer = values, longer = keys;
    (void)row;
    CHECK_RESULT(tqkv__plan_encode_kv(&keys, &values, at(4, 0), at(5, 0), 11, 3, at(6, 0), &d), TQKV_OK);
    check_dispatch(&d);
    CHECK(d.n_args == 2 && d.args[0].rows.n_tokens == 10 && d.args[1].rows.n_tokens == 11, "tokens of both");
    CHECK(d.grid[0] == 1 && d.grid[2] == 2, "simdgroups for the 33 rows of the longer");
    CHECK(constant(&d, TQKV_FC_FORMAT) == TQKV_F16 && constant(&d, TQKV_FC_VALUE_FORMAT) == TQKV_TQ8 &&
              constant(&d, TQKV_FC_ROTATED) == 0 && constant(&d, TQKV_FC_VALUE_ROTATED) == 1,
          "the kernel");
    CHECK(binding(&d, "keys' norms").size == 0 && binding(&d, "values' norms").size == 3 * 12 * sizeof(float), "norms");
    longer.shape.capacity = 500;
    CHECK_RESULT(tqkv__plan_encode_kv(&longer, &values, at(4, 0), at(5, 0), 400, 3, at(6, 0), &d), TQKV_OK);
    const size_t one = d.grid[0];
    CHECK_RESULT(tqkv__plan_encode_kv(&values, &longer, at(4, 0), at(5, 0), 400, 3, at(6, 0), &d), TQKV_OK);
    CHECK(d.args[0].rows.n_tokens == 12 && d.args[1].rows.n_tokens == 400, "tokens of both");
    CHECK(one == d.grid[0] && one * TQKV__ENCODE_ROWS(64) >= 1200, "%zu, %zu simdgroups", one, d.grid[0]);
    fewer.shape.n_kv_heads = 2;
    CHECK_RESULT(tqkv__plan_encode_kv(&keys, &wide, none, none, 1, 0, none, &d), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv__plan_encode_kv(&keys, &fewer, none, none, 1, 0, none, &d), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_encode_kv(&keys, NULL, none, none, 1, 0, none, &d), TQKV_INVALID_ARGUMENT);
}

static void check_rows(const void *row)
{
    tqkv__dispatch d;
    const tqkv_metal_store linear = plan_store(TQKV_TQ5, 64, 10, false, 0),
                           ring = plan_store(TQKV_I8, 512, 10, true, 2);
    (void)row;
    CHECK_RESULT(tqkv__plan_probe(&linear, none, INT_MAX, none, none, &d), TQKV_INVALID_ARGUMENT); /* rows > 2^31 */
    CHECK_RESULT(tqkv__plan_probe(&linear, at(4, 0), 7, at(5, 0), none, &d), TQKV_OK);
    check_dispatch(&d);
    CHECK(d.args[0].rows.n_tokens == 7 && binding(&d, "scaled").size == 7 * 3 * 64 * sizeof(float), "a probe");
    CHECK_RESULT(tqkv__plan_decode(&ring, 95, 10, TQKV_ORIGINAL, at(4, 0), &d), TQKV_OK);
    check_dispatch(&d);
    CHECK(constant(&d, TQKV_FC_UNROTATE) == 1 && d.args[0].rows.first_slot == 5, "slot %d", d.args[0].rows.first_slot);
    CHECK_RESULT(tqkv__plan_decode(&ring, 95, 10, TQKV_ROTATED, at(4, 0), &d), TQKV_OK);
    CHECK(constant(&d, TQKV_FC_UNROTATE) == 0, "left rotated");
    CHECK_RESULT(tqkv__plan_decode(&ring, 95, 11, TQKV_ROTATED, none, &d), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv__plan_decode(&linear, 8, 3, TQKV_ROTATED, none, &d), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv__plan_decode(&linear, 0, 1, test_no_basis(2), none, &d), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_rotate(at(4, 0), 5, 64, true, &d), TQKV_OK);
    check_dispatch(&d);
    CHECK(binding(&d, "rows").size == 5 * 64 * sizeof(float) && constant(&d, TQKV_FC_UNROTATE) == 1, "a rotation");
    CHECK_RESULT(tqkv__plan_rotate(none, 5, 65, false, &d), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv__plan_rotate(none, -1, 64, false, &d), TQKV_INVALID_ARGUMENT);
    tqkv__plan_tables(at(4, 0), true, &d);
    check_dispatch(&d);
    CHECK(d.grid[0] == 1 && !d.rows && d.kernel.head_dim == 0, "tables");
}

static tqkv_result plan_attend(const tqkv_metal_attention *a, tqkv__dispatch d[2])
{
    const tqkv_result r = tqkv__plan_attend(a, at(4, 0), at(5, 0), at(6, 0), d);
    for (int i = 0; i < 2 && r == TQKV_OK; i++) check_dispatch(&d[i]);
    return r;
}

static void check_attend(const void *row)
{
    tqkv__dispatch d[2];
    tqkv_metal_attention a;
    const tqkv_metal_store keys = plan_store(TQKV_I8, 64, 100, true, 0), values = plan_store(TQKV_F16, 64, 40, true, 2);
    const tqkv__attend_args *args = &d[0].args[0].attend;
    (void)row;
    memset(&a, 0, sizeof a);
    a.keys = &keys;
    a.values = &values;
    a.attention.n_heads = 6;
    a.attention.n_queries = 4;
    a.attention.end = 1030;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(args->kv_len == 40 && args->key_oldest_slot == 90 && args->value_oldest_slot == 30, "oldest slots %d, %d",
          args->key_oldest_slot, args->value_oldest_slot);
    CHECK(constant(d, TQKV_FC_ROTATE_QUERIES) == 1 && constant(d, TQKV_FC_SAME_SLOTS) == 0 &&
              constant(d, TQKV_FC_MANY_QUERIES) == 1 && constant(d, TQKV_FC_SOFTCAP) == 0,
          "the kernel");
    CHECK(constant(d + 1, TQKV_FC_UNROTATE) == 0 && constant(d + 1, TQKV_FC_SINKS) == 0, "the merge");
    CHECK(args->group == 2 && d[1].grid[0] == 24 && d[1].args[0].merge.n_rows == 24, "rows");
    CHECK(d[1].barrier == at(5, 0).buffer && !d[0].barrier, "a barrier between the two");
    a.attention.window = 10;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(args->window == 10, "window %d", args->window);
    a.attention.window = 40; /* all resident positions: the same as no window */
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(args->window == 0, "window %d", args->window);
    a.attention.end = a.attention.kv_len = 0;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(args->kv_len == 0 && args->key_oldest_slot == 0 && d[0].n_simdgroups == 1, "an empty store");
    a.sinks = at(5, 8);
    CHECK_RESULT(tqkv__plan_attend(&a, at(4, 0), at(5, 0), at(6, 0), d), TQKV_OK);
    CHECK(!strcmp(overlapping(d), "sinks"), "sinks in the scratch: %s", overlapping(d));
    a.attention.kv_len = 1;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OUT_OF_RANGE);
    a.attention.n_heads = 7;
    CHECK_RESULT(plan_attend(&a, d), TQKV_INVALID_ARGUMENT);
}

/* A pool of 5 pages, and a table of 4. */
static tqkv_metal_store plan_pool(tqkv_format format, int number, const int32_t *pages)
{
    tqkv_metal_store s = plan_store(format, 64, 320, false, number);
    s.shape.pages = pages;
    s.shape.n_pages = 4;
    s.shape.page_size = 64;
    s.pages = at(7, 128 * (size_t)number);
    return s;
}

/* What tqkv__plan_encode, _encode_kv and _decode say of positions [position, position + n). */
static void check_paged_rows(const tqkv_metal_store *s, int n, int64_t position, tqkv_result written, tqkv_result read)
{
    tqkv__dispatch d;
    CHECK_RESULT(tqkv__plan_encode(s, at(4, 0), n, position, none, &d), written);
    CHECK_RESULT(tqkv__plan_encode_kv(s, s, at(4, 0), at(5, 0), n, position, none, &d), written);
    CHECK_RESULT(tqkv__plan_decode(s, position, n, TQKV_ORIGINAL, at(4, 0), &d), read);
}

static void check_paged_encode(const void *row)
{
    int32_t pages[] = {3, -1, 3, 0};
    tqkv_metal_store s = plan_pool(TQKV_TQ5, 0, pages);
    const tqkv_metal_store values = plan_store(TQKV_I8, 64, 320, true, 2);
    tqkv__dispatch d;
    (void)row;
    CHECK_RESULT(tqkv__plan_encode(&s, at(4, 0), 65, 130, none, &d), TQKV_OK);
    check_dispatch(&d);
    CHECK(d.args[0].rows.first_slot == 130 && d.args[0].rows.page_size == 64 && d.args[0].rows.n_pages == 5 &&
              d.args[0].rows.capacity == 320 && constant(&d, TQKV_FC_PAGES) == 1 && binding(&d, "pages").size == 16,
          "the table");
    CHECK(binding(&d, "codes").size == 3 * 320 * 40, "the pool");
    CHECK_RESULT(tqkv__plan_encode_kv(&s, &values, at(4, 0), at(5, 0), 65, 130, none, &d), TQKV_OK);
    check_dispatch(&d);
    CHECK(constant(&d, TQKV_FC_PAGES) == 1 && constant(&d, TQKV_FC_VALUE_PAGES) == 0, "only the keys have pages");
    check_paged_rows(&s, 64, 64, TQKV_OUT_OF_RANGE, TQKV_OUT_OF_RANGE); /* -1 */
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
    tqkv__dispatch d;
    (void)row;
    s.shape.n_pages = 0;
    check_paged_rows(&s, 1, 0, TQKV_OUT_OF_RANGE, TQKV_OUT_OF_RANGE);
    s.shape.n_pages = INT_MAX / 64 + 1;
    check_paged_rows(&s, 1, 0, TQKV_UNSUPPORTED, TQKV_UNSUPPORTED);
    s.shape.n_pages = -1;
    check_paged_rows(&s, 1, 0, TQKV_INVALID_ARGUMENT, TQKV_INVALID_ARGUMENT);
    s = plan_pool(TQKV_TQ5, 0, pages);
    s.shape.page_size = 96;
    check_paged_rows(&s, 1, 0, TQKV_INVALID_ARGUMENT, TQKV_INVALID_ARGUMENT);
    s = plan_pool(TQKV_TQ5, 0, pages);
    s.shape.ring = true;
    check_paged_rows(&s, 1, 0, TQKV_INVALID_ARGUMENT, TQKV_INVALID_ARGUMENT);
    s = plan_pool(TQKV_TQ5, 0, pages);
    s.pages = none;
    check_paged_rows(&s, 1, 0, TQKV_INVALID_ARGUMENT, TQKV_INVALID_ARGUMENT);
    s.pages = at(0, 8);
    CHECK_RESULT(tqkv__plan_encode(&s, at(4, 0), 1, 0, none, &d), TQKV_OK);
    CHECK(!strcmp(overlapping(&d), "codes"), "a table in the codes: %s", overlapping(&d));
}

static void check_slots(const void *row)
{
    int32_t slots[] = {9, -1, 0, -1};
    tqkv_metal_store s = plan_store(TQKV_TQ5, 64, 10, true, 0);
    const tqkv_metal_store values = plan_store(TQKV_I8, 64, 12, false, 2);
    tqkv__dispatch d;
    (void)row;
    s.shape.pages = slots; /* neither the table nor the ring is looked at */
    CHECK_RESULT(tqkv__plan_encode_kv_slots(&s, &values, at(4, 0), at(5, 0), 4, at(7, 4), slots, none, &d), TQKV_OK);
    check_dispatch(&d);
    CHECK(d.args[0].rows.page_size == 1 && d.args[0].rows.n_pages == 10 && d.args[1].rows.n_pages == 12 &&
              d.args[0].rows.capacity == 10 && d.args[0].rows.first_slot == 0 && d.args[0].rows.n_tokens == 4,
          "a table of slots");
    CHECK(constant(&d, TQKV_FC_PAGES) == 1 && constant(&d, TQKV_FC_VALUE_PAGES) == 1 && binding(&d, "slots").size == 16,
          "the kernel");
    slots[0] = 10;
    CHECK_RESULT(tqkv__plan_encode_slots(&values, at(4, 0), 4, at(7, 4), slots, none, &d), TQKV_OK);
    CHECK_RESULT(tqkv__plan_encode_slots(&s, at(4, 0), 4, at(7, 4), slots, none, &d), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv__plan_encode_kv_slots(&values, &s, at(4, 0), at(5, 0), 4, at(7, 4), slots, none, &d),
                 TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv__plan_encode_slots(&s, at(4, 0), 4, at(7, 4), NULL, none, &d), TQKV_OK);
    check_dispatch(&d);
    slots[0] = -2;
    CHECK_RESULT(tqkv__plan_encode_slots(&s, at(4, 0), 4, at(7, 4), slots, none, &d), TQKV_OUT_OF_RANGE);
    slots[0] = 0;
    CHECK_RESULT(tqkv__plan_encode_slots(&s, at(4, 0), 4, at(7, 4), slots, none, &d), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_encode_slots(&s, at(4, 0), 2, at(7, 4), slots, none, &d), TQKV_OK);
    CHECK_RESULT(tqkv__plan_encode_slots(&s, at(4, 0), -1, at(7, 4), slots, none, &d), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_encode_slots(NULL, at(4, 0), 2, at(7, 4), slots, none, &d), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_encode_slots(&s, at(4, 0), 0, none, slots, none, &d), TQKV_OK);
    CHECK(d.grid[0] == 0 && constant(&d, TQKV_FC_PAGES) == 0, "no tokens");
}

static void check_paged_attend(const void *row)
{
    int32_t pages[] = {3, -1, 2, 0};
    tqkv__dispatch d[2];
    tqkv_metal_attention a;
    tqkv_metal_store keys = plan_pool(TQKV_I8, 0, pages), values = plan_pool(TQKV_F16, 2, pages);
    const tqkv_metal_store linear = plan_store(TQKV_F16, 64, 320, false, 2);
    const tqkv__attend_args *args = &d[0].args[0].attend;
    size_t paged_scratch, scratch;
    (void)row;
    memset(&a, 0, sizeof a);
    a.keys = &keys;
    a.values = &values;
    a.attention.end = 250;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OUT_OF_RANGE); /* sees the entry of -1 */
    a.attention.window = 122;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(args->kv_len == 250 && args->key_capacity == 256 && args->key_slots == 320 && args->value_slots == 320 &&
              args->key_page_size == 64 && args->key_last_page == 4 && args->value_last_page == 4,
          "arguments");
    CHECK(constant(d, TQKV_FC_PAGES) == 1 && constant(d, TQKV_FC_SAME_SLOTS) == 0 && constant(d, TQKV_FC_TREE) == 0 &&
              binding(d, "keys' pages").size == 16 && binding(d, "values' pages").at.offset == 256,
          "the kernel");
    values.pages = keys.pages;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(constant(d, TQKV_FC_SAME_SLOTS) == 1, "one table is looked up twice");
    CHECK_RESULT(tqkv__plan_scratch(&a, &paged_scratch), TQKV_OK);
    a.values = &linear;
    CHECK_RESULT(plan_attend(&a, d), TQKV_UNSUPPORTED);
    keys.shape.pages = NULL; /* not known here */
    CHECK_RESULT(plan_attend(&a, d), TQKV_UNSUPPORTED);
    keys.pages = none;
    keys.shape.capacity = 256;
    CHECK_RESULT(tqkv__plan_scratch(&a, &scratch), TQKV_OK);
    CHECK(scratch == paged_scratch, "%zu bytes with pages, %zu without", paged_scratch, scratch);
}

/* The kernel divides by the tiles of a page with a factor and a shift. */
static void check_page_division(const void *row)
{
    const int page_sizes[] = {64, 128, 192, 320, 448, 4032, 65600, 1 << 20, 33554432 + 64, 1 << 30, INT_MAX / 64 * 64};
    tqkv__dispatch d[2];
    tqkv_metal_attention a;
    const tqkv__attend_args *args = &d[0].args[0].attend;
    (void)row;
    for (size_t i = 0; i < sizeof page_sizes / sizeof *page_sizes; i++) {
        tqkv_metal_store s = plan_pool(TQKV_TQ4, 0, NULL);
        const uint32_t tiles = (uint32_t)page_sizes[i] / 32, last = (uint32_t)INT_MAX / 32;
        s.shape.capacity = s.shape.page_size = page_sizes[i];
        s.shape.n_pages = 1;
        memset(&a, 0, sizeof a);
        a.keys = a.values = &s;
        a.attention.end = 1;
        CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
        for (uint32_t page = 0; page <= last / tiles; page += 1 + page / 50)
            for (uint32_t tile = page * tiles, n = 0; n < 2; n++, tile += tiles - 1)
                CHECK(tile > last ||
                          (uint32_t)((uint64_t)tile * args->key_page_factor >> 32) >> args->key_page_shift == page,
                      "tile %u of pages of %d", tile, page_sizes[i]);
    }
}

/* Tables that only the GPU knows, and an empty one. */
static void check_unknown_pages(const void *row)
{
    const int32_t pages[] = {3, -1, 2, 0};
    tqkv__dispatch d[2];
    tqkv_metal_attention a;
    tqkv_metal_store keys = plan_pool(TQKV_I8, 0, NULL), values = plan_pool(TQKV_F16, 2, NULL);
    const tqkv__attend_args *args = &d[0].args[0].attend;
    (void)row;
    memset(&a, 0, sizeof a);
    a.keys = &keys;
    a.values = &values;
    a.attention.end = 250;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    a.attention.end = 257;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OUT_OF_RANGE);
    a.attention.end = 0;
    values.shape.n_pages = 0;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(constant(d, TQKV_FC_PAGES) == 0 && args->key_capacity == 320, "an empty table is read");
    keys.shape.pages = pages;
    keys.pages = none;
    CHECK_RESULT(plan_attend(&a, d), TQKV_INVALID_ARGUMENT);
}

static void check_tree(const void *row)
{
    const uint64_t tree[64] = {1, 3, 5};
    const int32_t pages[] = {3, -1, 2, 0};
    tqkv__dispatch d[2];
    tqkv_metal_attention a;
    const tqkv_metal_store keys = plan_store(TQKV_I8, 64, 100, false, 0),
                           values = plan_store(TQKV_F16, 64, 100, true, 2);
    const tqkv_metal_store paged = plan_pool(TQKV_I8, 0, pages), paged_values = plan_pool(TQKV_F16, 2, pages);
    (void)row;
    memset(&a, 0, sizeof a);
    a.keys = &keys;
    a.values = &values;
    a.attention.end = 70;
    a.attention.n_queries = 3;
    a.tree = at(7, 4);
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(constant(d, TQKV_FC_TREE) == 1 && binding(d, "tree").size == 24 && binding(d, "tree").at.offset == 4,
          "a tree that is not known here");
    a.attention.tree = tree;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    a.attention.n_queries = 65;
    CHECK_RESULT(plan_attend(&a, d), TQKV_INVALID_ARGUMENT);
    a.attention.tree = NULL;
    CHECK_RESULT(plan_attend(&a, d), TQKV_INVALID_ARGUMENT);
    a.attention.n_queries = 3;
    a.attention.tree = tree;
    a.tree = none;
    CHECK_RESULT(plan_attend(&a, d), TQKV_INVALID_ARGUMENT);
    a.tree = at(5, 8);
    CHECK_RESULT(tqkv__plan_attend(&a, at(4, 0), at(5, 0), at(6, 0), d), TQKV_OK);
    CHECK(!strcmp(overlapping(d), "scratch"), "a tree in the scratch: %s", overlapping(d));
    a.keys = &paged; /* positions 64, 65 and 66, of the entry -1: the tree shows the second and the third only to 1 */
    a.values = &paged_values;
    a.attention.end = 67;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OUT_OF_RANGE);
    a.attention.tree = tree + 3; /* zeros */
    a.tree = at(7, 0);
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    a.attention.tree = NULL;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
}

enum { ITEMS = 3 };

/* Three sequences over pools that lie in the same buffers. */
typedef struct plan_batch {
    tqkv_metal_store keys[ITEMS], values[ITEMS];
    tqkv_metal_attention items[ITEMS];
    tqkv_metal_buffer q[ITEMS], out[ITEMS];
    tqkv__batch_item arguments[ITEMS];
    tqkv__batch batch;
    tqkv__dispatch d[2];
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
        b->items[i].keys = &b->keys[i];
        b->items[i].values = &b->values[i];
        b->items[i].attention.n_heads = 6;
        b->items[i].attention.n_queries = n_queries[i];
        b->items[i].attention.end = lengths[i];
        b->q[i] = at(4, (size_t)i * 8192);
        b->out[i] = at(6, (size_t)i * 8192);
    }
    b->batch.items = b->items;
    b->batch.n = ITEMS;
    b->batch.q = b->q;
    b->batch.out = b->out;
    b->batch.scratch = at(5, 64);
    b->batch.arguments = at(7, 0);
    b->batch.matrices = true;
}

static tqkv_result planned(plan_batch *b) { return tqkv__plan_batch(&b->batch, b->arguments, b->d); }

static void check_batch(const void *row)
{
    plan_batch b;
    tqkv__dispatch alone[2];
    size_t arguments, scratch, all = 0;
    const tqkv__batch_item *items = b.arguments;
    (void)row;
    set_up_batch(&b);
    CHECK_RESULT(planned(&b), TQKV_OK);
    CHECK_RESULT(tqkv__plan_batch_sizes(b.items, ITEMS, &arguments, &scratch), TQKV_OK);
    CHECK(arguments == sizeof b.arguments && binding(b.d, "arguments").size == arguments, "arguments");
    for (int i = 0; i < 2; i++) check_dispatch(&b.d[i]);
    for (int i = 0; i < ITEMS; i++) {
        CHECK_RESULT(tqkv__plan_attend(&b.items[i], b.q[i], b.batch.scratch, b.out[i], alone), TQKV_OK);
        CHECK(!memcmp(&items[i].attend, &alone[0].args[0].attend, sizeof items[i].attend) &&
                  !memcmp(&items[i].merge, &alone[1].args[0].merge, sizeof items[i].merge),
              "item %d is planned otherwise alone", i);
        CHECK(items[i].n_items == ITEMS && items[i].q == (uint32_t)i * 4096 && items[i].out == (uint32_t)i * 4096 &&
                  items[i].key_codes == (uint32_t)i << 16 && items[i].value_norms == (uint32_t)(2 - i) << 16,
              "offsets of item %d", i);
        for (int j = 6; j <= 7; j++)
            for (int k = 0; k < alone->n_bindings; k++)
                if (alone->bindings[k].index == j) all += alone->bindings[k].size;
    }
    /* columns for 3 queries: 6 rows, in a power of two; splits of 512 slots: 2, 1 and 6 */
    CHECK(constant(b.d, TQKV_FC_COLUMNS) == 8 && constant(b.d, TQKV_FC_MANY_QUERIES) == 1 &&
              constant(b.d, TQKV_FC_BATCH) == 1 && constant(b.d + 1, TQKV_FC_BATCH) == 1,
          "the kernel");
    CHECK(items[0].first_group == 0 && items[1].first_group == 2 && items[2].first_group == 3 && b.d[0].grid[2] == 9 &&
              b.d[0].grid[1] == 1 && b.d[0].grid[0] == 3,
          "threadgroups");
    CHECK(items[0].attend.n_splits == 2 && items[1].attend.n_splits == 1 && items[2].attend.n_splits == 6, "splits");
    CHECK(items[1].first_row == 6 && items[2].first_row == 24 && b.d[1].grid[0] == 30, "rows");
    CHECK(binding(b.d + 1, "sinks").size == 0 && items[0].partial_out == 0 && b.d[1].barrier == at(5, 0).buffer,
          "merge");
    CHECK(scratch >= all, "%zu bytes of scratch, not %zu", scratch, all);
    b.items[1].attention.end = 0;
    CHECK_RESULT(planned(&b), TQKV_OK);
    CHECK(items[1].attend.kv_len == 0 && items[1].merge.n_partials == 0, "an item without positions");
    b.batch.n = 0;
    CHECK_RESULT(planned(&b), TQKV_OK);
    CHECK(b.d[0].grid[0] == 0, "an empty batch is recorded");
}

static void check_batch_refusals(const void *row)
{
    plan_batch b;
    (void)row;
#define REFUSED(expected, change)                                                                                      \
    do {                                                                                                               \
        set_up_batch(&b);                                                                                              \
        change;                                                                                                        \
        CHECK_RESULT(planned(&b), TQKV_##expected);                                                                    \
    } while (0)
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
    REFUSED(UNSUPPORTED, for (int i = 0; i < b.batch.n; i++) b.items[i].attention.arithmetic = TQKV_INTEGER);
    REFUSED(UNSUPPORTED, b.items[2].attention.output_type = TQKV_TYPE_F16);
    REFUSED(UNSUPPORTED, b.items[2].sinks = at(7, 1024));
    REFUSED(UNSUPPORTED, b.items[2].matrix_group = 2);
    REFUSED(INVALID_ARGUMENT, b.items[2].matrix_group = -1);
    REFUSED(UNSUPPORTED, b.values[1].center = at(7, 1024));
    REFUSED(UNSUPPORTED, b.keys[2].pages = b.values[2].pages = at(7, 0);
            b.keys[2].shape.n_pages = b.values[2].shape.n_pages = 50;
            b.keys[2].shape.page_size = b.values[2].shape.page_size = 64);
    if (sizeof(size_t) > 4) REFUSED(UNSUPPORTED, b.keys[2].codes.offset = (size_t)1 << (sizeof(size_t) > 4 ? 37 : 0));
    REFUSED(INVALID_ARGUMENT, b.keys[2].codes.offset += 8);
    REFUSED(INVALID_ARGUMENT, b.q[2].offset += 2);
    REFUSED(INVALID_ARGUMENT, b.q[2].offset = SIZE_MAX - 3);
    REFUSED(INVALID_ARGUMENT, b.out[2].offset = b.out[0].offset + 4);
    REFUSED(INVALID_ARGUMENT, b.out[0].offset = b.out[2].offset);
    REFUSED(OK, b.out[0].offset = 6 * 8192);
#undef REFUSED
}

static void check_batch_memory(const void *row)
{
    plan_batch b;
    size_t sizes[2];
    (void)row;
    set_up_batch(&b);
    b.q[1] = at(6, 100);
    b.q[0] = b.q[2] = at(6, 0);
    CHECK_RESULT(planned(&b), TQKV_OK);
    CHECK(*overlapping(b.d), "queries between the outputs");
    CHECK_RESULT(tqkv__plan_batch_sizes(b.items, -1, &sizes[0], &sizes[1]), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_batch_sizes(NULL, 1, &sizes[0], &sizes[1]), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_batch_sizes(NULL, 0, &sizes[0], &sizes[1]), TQKV_OK);
    CHECK(sizes[0] == 0 && sizes[1] == 0, "an empty batch needs memory");
}

/* The centres of keys and values. In attend the keys' changes nothing without sinks or a softcap. */
static void check_center(const void *row)
{
    tqkv__dispatch d[2];
    tqkv_metal_store keys = plan_store(TQKV_I8, 64, 10, false, 0), values = plan_store(TQKV_F16, 64, 10, false, 2);
    const size_t size = 3 * 64 * sizeof(float);
    tqkv_metal_attention a;
    (void)row;
    memset(&a, 0, sizeof a);
    a.keys = &keys;
    a.values = &values;
    a.attention.end = 10;
    keys.center = at(7, 0);
    values.center = at(7, size);
    CHECK_RESULT(tqkv__plan_encode_kv(&keys, &values, at(4, 0), at(5, 0), 4, 3, none, d), TQKV_OK);
    check_dispatch(d);
    CHECK(binding(d, "keys' center").size == size && binding(d, "values' center").at.offset == size &&
              constant(d, TQKV_FC_CENTER) == 1 && constant(d, TQKV_FC_VALUE_CENTER) == 1,
          "encode_kv");
    CHECK_RESULT(tqkv__plan_decode(&keys, 0, 10, TQKV_ROTATED, at(4, 0), d), TQKV_OK);
    check_dispatch(d);
    CHECK(constant(d, TQKV_FC_CENTER) == 1 && constant(d, TQKV_FC_ROTATED) == 1, "decode");
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(constant(d, TQKV_FC_CENTER) == 0 && !binding(d, "keys' center").size, "attend without need");
    CHECK(constant(d + 1, TQKV_FC_VALUE_CENTER) == 1 && binding(d + 1, "values' center").size == size, "the merge");
    a.sinks = at(4, 4096);
    a.attention.query_basis = TQKV_ROTATED;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(constant(d, TQKV_FC_CENTER) == 1 && binding(d, "keys' center").size == size, "attend with sinks");
    CHECK(constant(d, TQKV_FC_ROTATED) == 1 && constant(d + 1, TQKV_FC_CENTER) == 1, "a rotated query");
    a.attention.softcap = 3.0f;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(constant(d, TQKV_FC_CENTER) == 1 && constant(d + 1, TQKV_FC_CENTER) == 0, "attend with softcap");
    CHECK_RESULT(tqkv__plan_attend(&a, at(4, 0), at(5, 0), at(7, size), d), TQKV_OK);
    CHECK(!strcmp(overlapping(d), "values' center"), "the output in the centre: %s", overlapping(d));
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
    tqkv_metal_attention a;
    tqkv__dispatch p[6];
    size_t scratch;
    memset(&a, 0, sizeof a);
    a.keys = &keys;
    a.values = &values;
    a.attention.end = 10;
    CHECK(TQKV__HAS_KERNELS(d) == known, "kernels of %d", d);
    CHECK_RESULT(tqkv__plan_encode(&keys, at(4, 0), 40, 7, none, &p[0]), expected);
    CHECK_RESULT(tqkv__plan_encode_kv(&keys, &values, at(4, 0), at(5, 0), 9, 3, none, &p[1]), expected);
    CHECK_RESULT(tqkv__plan_probe(&keys, at(4, 0), 7, at(5, 0), none, &p[2]), expected);
    CHECK_RESULT(tqkv__plan_decode(&keys, 0, 10, TQKV_ORIGINAL, at(4, 0), &p[3]), expected);
    CHECK_RESULT(tqkv__plan_rotate(at(4, 0), 5, d, true, &p[4]), expected);
    for (int i = 0; i < 5 && known; i++) {
        check_dispatch(&p[i]);
        CHECK(p[i].kernel.head_dim * TQKV__DIM_UNIT == d && !p[i].kernel.value_dim, "the kernel");
    }
    CHECK_RESULT(tqkv__plan_scratch(&a, &scratch), expected);
    CHECK_RESULT(plan_attend(&a, p), expected);
    a.values = &others;
    const tqkv_result pair = d == 128 || d == 192 ? TQKV_OK : TQKV_UNSUPPORTED;
    CHECK_RESULT(tqkv__plan_encode_kv(&keys, &others, at(4, 0), at(5, 0), 9, 3, none, p), pair);
    if (pair == TQKV_OK) check_dispatch(p);
    CHECK_RESULT(tqkv__plan_scratch(&a, &scratch), pair);
    CHECK_RESULT(plan_attend(&a, p), pair);
    if (d != 192) return;
    CHECK(p[0].kernel.value_dim * TQKV__DIM_UNIT == 128 && p[1].kernel.head_dim * TQKV__DIM_UNIT == 128, "the kernels");
    CHECK(binding(p, "q").size == 3 * 192 * sizeof(float) && binding(p, "out").size == 3 * 128 * sizeof(float),
          "sizes");
}

/* Each type has its sizes, its alignment and its constant. */
static void check_types(const void *row)
{
    tqkv__dispatch d[2];
    tqkv_metal_store s = plan_store(TQKV_TQ4, 80, 5, true, 0), v = s;
    tqkv_metal_attention a;
    (void)row;
    memset(&a, 0, sizeof a);
    a.keys = a.values = &s;
    a.attention.end = 5;
    for (int type = TQKV_TYPE_F32; type <= TQKV_TYPE_BF16; type++) {
        const size_t size = type == TQKV_TYPE_F32 ? 4 : 2, token = 3 * 80;
        s.shape.type = (tqkv_type)type;
        v.shape.type = type == TQKV_TYPE_F32 ? TQKV_TYPE_BF16 : TQKV_TYPE_F32;
        a.attention.query_type = s.shape.type;
        a.attention.output_type = v.shape.type;
        CHECK_RESULT(tqkv__plan_encode_kv(&s, &v, at(4, 2), at(5, 0), 7, 0, none, d), TQKV_OK);
        const tqkv__binding k = binding(d, "k"), values = binding(d, "v");
        CHECK(k.size == 5 * token * size && k.alignment == size && k.at.offset == 2 + 2 * token * size, "the keys");
        CHECK(values.size == 5 * token * (6 - size) && constant(d, TQKV_FC_TYPE) == type &&
                  constant(d, TQKV_FC_VALUE_TYPE) == (int)v.shape.type,
              "the values");
        CHECK_RESULT(tqkv__plan_probe(&s, at(4, 0), 7, at(5, 0), none, d), TQKV_OK);
        CHECK(binding(d, "src").size == 7 * token * size && binding(d, "scaled").size == 7 * token * 4, "a probe");
        CHECK_RESULT(tqkv__plan_decode(&s, 0, 5, TQKV_ORIGINAL, at(4, 0), d), TQKV_OK);
        CHECK(binding(d, "dst").size == 5 * token * size && constant(d, TQKV_FC_TYPE) == type, "decoded rows");
        CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
        CHECK(binding(d, "q").size == token * size && constant(d, TQKV_FC_TYPE) == type, "queries");
        CHECK(binding(d + 1, "out").size == token * (6 - size) && binding(d, "out").alignment == 6 - size &&
                  constant(d + 1, TQKV_FC_TYPE) == (int)v.shape.type,
              "outputs");
    }
    s.shape.type = test_no_type(3);
    CHECK_RESULT(tqkv__plan_encode(&s, none, 1, 0, none, d), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv__plan_probe(&s, none, 1, none, none, d), TQKV_UNSUPPORTED);
    CHECK_RESULT(tqkv__plan_decode(&s, 0, 1, TQKV_ORIGINAL, none, d), TQKV_UNSUPPORTED);
    a.attention.output_type = test_no_type(-1);
    CHECK_RESULT(plan_attend(&a, d), TQKV_UNSUPPORTED);
}

/* Stretches of 512 positions up to 8192 and of 2048 beyond, all threadgroups together at least once. */
static void check_stretches(const tqkv__dispatch d[2], int64_t end, size_t scratch)
{
    const tqkv__attend_args *args = &d[0].args[0].attend;
    const tqkv__merge_args *merge = &d[1].args[0].merge;
    const int64_t stretches = end <= 8192 ? (end + 511) / 512 : 16 + (end - 8192 + 2047) / 2048;
    const int64_t n = stretches > 1 ? stretches : 1, sections = (n + 15) / 16;
    const size_t row = ((size_t)d->kernel.head_dim * TQKV__DIM_UNIT + 2) * sizeof(float),
                 n_rows = (size_t)merge->n_rows;
    const bool full = d->grid[0] * d->grid[1] >= 256, each = !full && n_rows * row * (size_t)n <= 32 << 20;
    const tqkv__binding state = binding(d, "scratch");
    CHECK(state.at.offset + state.size <= scratch, "%zu bytes of scratch", state.at.offset + state.size);
    CHECK(args->first_stretch == 0 && args->stretch_tiles == 16 && args->n_short == 16, "the stretches");
    CHECK((int64_t)d->grid[2] == (full ? 1 : each ? n : sections), "%zu splits, %d stretches", d->grid[2], (int)n);
    CHECK(args->sections_each == (full ? sections : each ? 0 : 1), "%d sections each", args->sections_each);
    CHECK(state.at.offset + state.size == n_rows * (row * (full && sections > 1 ? 2 : d->grid[2]) + 2 * sizeof(float)),
          "partial results");
    CHECK(merge->n_partials == (int)d->grid[2] && merge->section == (each ? 16 : 1) && merge->before == 0, "the merge");
}

/* Contexts of all lengths: the blocks hold all rows, and the splits fit into the scratch of tqkv__plan_scratch. */
static void check_split(const void *row)
{
    const int head_dim = *(const int *)row, groups[] = {1, 3, 8, 16}, queries[] = {1, 2, 9, 64, 300};
    for (int g = 0; g < 4; g++)
        for (int q = 0; q < 5; q++) {
            const int capacity = 90000, rows = groups[g] * queries[q];
            const tqkv_metal_store keys = plan_store(TQKV_TQ4, head_dim, capacity, false, 0),
                                   values = plan_store(TQKV_TQ8, head_dim, capacity, false, 2);
            size_t scratch = 0;
            tqkv_metal_attention a;
            memset(&a, 0, sizeof a);
            a.keys = &keys;
            a.values = &values;
            a.attention.n_heads = 3 * groups[g];
            a.attention.n_queries = queries[q];
            CHECK_RESULT(tqkv__plan_scratch(&a, &scratch), TQKV_OK);
            for (a.attention.end = 0; a.attention.end <= capacity; a.attention.end += 2500) {
                tqkv__dispatch d[2];
                CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
                const int columns = constant(d, TQKV_FC_COLUMNS);
                const bool matrix = d->kernel.family == TQKV__ATTEND_MATRIX;
                const int most = matrix ? TQKV__MOST_MATRIX_COLUMNS(head_dim) : TQKV__MAX_COLUMNS(head_dim);
                const int blocks = (int)d->grid[1], even = (rows + blocks - 1) / blocks;
                CHECK(columns <= most && columns * blocks >= rows && columns * (blocks - 1) < rows,
                      "%d rows as %d blocks of %d", rows, blocks, columns);
                CHECK(queries[q] == 1 ? columns == even : columns < 2 * even && (columns & (columns - 1)) == 0,
                      "%d columns for %d rows of %d queries", columns, rows, queries[q]);
                check_stretches(d, a.attention.end, scratch);
            }
        }
}

/* The group, head_dim and matrix_group choose the kernel, never the number of queries: a query has the same bits in
   company. The other kernel can take its place in the same scratch. */
static void check_kernel(int head_dim, int group, int matrix_group, int n_queries)
{
    const tqkv_metal_store keys = plan_store(TQKV_TQ4, head_dim, 3000, false, 0),
                           values = plan_store(TQKV_TQ8, head_dim, 3000, false, 2);
    const bool has_matrices = head_dim == 64 || head_dim == 128 || head_dim == 256;
    const bool matrix = has_matrices && group >= (matrix_group ? matrix_group : 4);
    const int rows = group * n_queries;
    size_t scratch = 0;
    tqkv__dispatch d[2];
    tqkv_metal_attention a;
    memset(&a, 0, sizeof a);
    a.keys = &keys;
    a.values = &values;
    a.attention.n_heads = 3 * group;
    a.attention.n_queries = n_queries;
    a.attention.end = 3000;
    a.matrix_group = matrix_group;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(d[0].kernel.family == (matrix ? TQKV__ATTEND_MATRIX : TQKV__ATTEND), "group %d of %d, %d queries", group,
          matrix_group, n_queries);
    CHECK_RESULT(tqkv__plan_scratch(&a, &scratch), TQKV_OK);
    check_stretches(d, a.attention.end, scratch);
    tqkv__plan_columns(d, false, 16);
    const int columns = constant(d, TQKV_FC_COLUMNS);
    CHECK(d[0].kernel.family == TQKV__ATTEND && columns <= TQKV__MAX_COLUMNS(head_dim) &&
              columns * (int)d[0].grid[1] >= rows,
          "%d rows as %zu blocks of %d", rows, d[0].grid[1], columns);
    CHECK(d[0].memory_each[2] > 0 && d[0].memory[2] == 0, "the memory of another kernel");
}

static void check_kernels(const void *row)
{
    (void)row;
    for (int i = 0; i < TQKV__KERNEL_DIMS; i++)
        for (int group = 1; group <= 8; group++)
            for (int matrix_group = 0; matrix_group <= 5; matrix_group++)
                for (int n_queries = 1; n_queries <= 40; n_queries += 13)
                    check_kernel(TQKV__KERNEL_DIM(i), group, matrix_group, n_queries);
}

/* A window has the stretches that its queries see together, wherever it stands, and all of a ring that wraps. */
static void check_window(const void *row)
{
    tqkv_metal_store keys = plan_store(TQKV_TQ4, 64, 200000, false, 0), values = keys;
    size_t scratch = 0;
    tqkv__dispatch d[2];
    tqkv_metal_attention a;
    const tqkv__attend_args *args = &d[0].args[0].attend;
    (void)row;
    memset(&a, 0, sizeof a);
    a.keys = &keys;
    a.values = &values;
    a.attention.window = 1000;
    for (a.attention.n_queries = 1; a.attention.n_queries < 700; a.attention.n_queries += 300) {
        CHECK_RESULT(tqkv__plan_scratch(&a, &scratch), TQKV_OK);
        for (a.attention.end = 0; a.attention.end < 200000; a.attention.end += 997) {
            const int64_t seen = a.attention.end - 999 - a.attention.n_queries, first = seen < 0 ? 0 : seen;
            CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
            CHECK(args->first_stretch == first / 512 && args->n_short == INT_MAX, "stretch %d", args->first_stretch);
            CHECK((int64_t)d[0].grid[2] == (a.attention.end ? a.attention.end - 1 : 0) / 512 - first / 512 + 1,
                  "%zu splits before %d", d[0].grid[2], (int)a.attention.end);
            CHECK(binding(d, "scratch").at.offset + binding(d, "scratch").size <= scratch, "%zu bytes", scratch);
        }
    }
    keys.shape.ring = values.shape.ring = true;
    a.attention.n_queries = 1;
    a.attention.end = 200100;
    CHECK_RESULT(plan_attend(&a, d), TQKV_OK);
    CHECK(args->first_stretch == 0 && d[0].grid[2] == 391, "%zu splits of a ring that wraps", d[0].grid[2]);
    CHECK_RESULT(tqkv__plan_scratch(&a, &scratch), TQKV_OK);
    CHECK(binding(d, "scratch").at.offset + binding(d, "scratch").size <= scratch, "%zu bytes of a ring", scratch);
}

static void check_cache_plan(const void *row)
{
    const cache_row shape = {TQKV_I8, TQKV_TQ4, 64, 8, true, 20, 15};
    tqkv__dispatch d[2];
    tqkv_cache_desc desc = cache_desc(&shape, NULL);
    desc.sinks = cache_sinks;
    tqkv_cache *cache = cache_make(&shape, &desc);
    const tqkv__attend_args *args = &d[0].args[0].attend;
    size_t rows[2] = {0, 0}, most = 0;
    (void)row;
    REQUIRE(cache, "no cache");
    CHECK_RESULT(tqkv__plan_cache_attend(cache, at(0, 256), at(1, 0), 1, at(2, 0), at(3, 0), d), TQKV_OK);
    CHECK(args->kv_len == 3 && args->key_oldest_slot == 4, "after a truncation: %d", args->kv_len);
    const char *codes = (const char *)tqkv_cache_values(cache)->codes;
    CHECK(binding(d, "values' codes").at.offset == 256 + (size_t)(codes - (const char *)cache), "where the codes lie");
    CHECK(binding(d, "sinks").size && binding(d, "sinks").at.buffer == at(0, 0).buffer, "sinks are in the cache");
    check_dispatch(&d[0]);
    check_dispatch(&d[1]);
    tqkv__cache_advance(cache, 7);
    CHECK_RESULT(tqkv__plan_cache_attend(cache, at(0, 0), none, 1, none, none, d), TQKV_OK);
    CHECK(tqkv_cache_end(cache) == 22 && args->kv_len == 8, "after an advance: %d", args->kv_len);
    CHECK_RESULT(tqkv__plan_cache_append(cache, at(0, 0), at(1, 0), at(2, 0), 3, none, d), TQKV_OK);
    check_dispatch(d);
    CHECK(d->args[0].rows.first_slot == 22 % 8 && d->kernel.family == TQKV__ENCODE_KV, "an append");
    CHECK_RESULT(tqkv__plan_cache_sizes(cache, 2, rows, &most), TQKV_OK);
    CHECK(rows[0] == 2 * CACHE_HEADS * CACHE_GROUP * 64 * sizeof(float) && rows[1] == rows[0] && most > rows[0],
          "%zu, %zu and %zu bytes", rows[0], rows[1], most);
    CHECK_RESULT(tqkv__plan_cache_sizes(cache, 0, rows, &most), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv__plan_cache_sizes(NULL, 1, rows, &most), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(cache);
    desc.head_dim = 192;
    desc.value_dim = 128;
    desc.type = TQKV_TYPE_BF16;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    CHECK_RESULT(tqkv__plan_cache_sizes(cache, 1, rows, &most), TQKV_OK);
    CHECK(rows[0] == CACHE_HEADS * CACHE_GROUP * 192 * 2 && rows[1] == CACHE_HEADS * CACHE_GROUP * 128 * 2,
          "%zu and %zu bytes", rows[0], rows[1]);
    CHECK(tqkv__rows_size(tqkv_cache_values(cache), 3) == 3 * CACHE_HEADS * 128 * 2, "rows of values");
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
            tqkv__dispatch d[2];
            memset(&desc, 0, sizeof desc);
            desc.head_dim = 64;
            desc.n_kv_heads = 2;
            desc.n_heads = 2 * group;
            desc.capacity = 64;
            desc.matrix_group = least;
            CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
            if (!cache) return;
            CHECK_RESULT(tqkv_cache_fork(cache, NULL, &fork), TQKV_OK);
            const bool matrix = group >= (least ? least : 4);
            for (int i = 0; i < 2; i++) {
                CHECK_RESULT(tqkv__plan_cache_attend(i ? fork : cache, at(0, 0), at(1, 0), 1, at(2, 0), at(3, 0), d),
                             TQKV_OK);
                CHECK(d[0].kernel.family == (matrix ? TQKV__ATTEND_MATRIX : TQKV__ATTEND), "group %d of %d", group,
                      least);
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
    CHECK(!strcmp(tqkv__stale_table(&report), "table version"), "an empty report");
    report.table_version = TQKV_TABLE_VERSION;
    const uint32_t sizes[] = {sizeof(tqkv__table_set),   sizeof(tqkv__rows_args),  sizeof(tqkv__rotate_args),
                              sizeof(tqkv__attend_args), sizeof(tqkv__merge_args), sizeof(tqkv__batch_item)};
    memcpy(report.struct_sizes, sizes, sizeof sizes);
    report.tables = tqkv__tables;
    for (int i = 0; i < TQKV__KERNEL_DIMS; i++) {
        const int32_t kernel_sizes[] = {TQKV__KERNEL_SIZES(TQKV__KERNEL_DIM(i))};
        memcpy(report.kernel_sizes[i], kernel_sizes, sizeof kernel_sizes);
    }
    CHECK(!tqkv__stale_table(&report), "not stale: %s", tqkv__stale_table(&report));
    CHECK(!tqkv__matrices_as_expected(&report), "a product of zeros");
    for (size_t i = 0; i < offsetof(tqkv__table_report, matrix_product); i++) {
        ((unsigned char *)&report)[i] ^= 1;
        CHECK(tqkv__stale_table(&report), "byte %zu of %zu", i, sizeof report);
        ((unsigned char *)&report)[i] ^= 1;
    }
    report.tables.signs[5] ^= 8;
    CHECK(!strcmp(tqkv__stale_table(&report), "table signs"), "signs");
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

static tqkv_result fake_attend(tqkv_metal *m, const tqkv_cache *c, const void *q, int n_queries, void *out)
{
    (void)c;
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
    test_add(check_attend, NULL, 0, "plan/attend");
    test_add(check_paged_encode, NULL, 0, "plan/pages/encode");
    test_add(check_paged_refusals, NULL, 0, "plan/pages/refusals");
    test_add(check_paged_attend, NULL, 0, "plan/pages/attend");
    test_add(check_slots, NULL, 0, "plan/slots");
    test_add(check_page_division, NULL, 0, "plan/pages/division");
    test_add(check_unknown_pages, NULL, 0, "plan/pages/unknown");
    test_add(check_tree, NULL, 0, "plan/tree");
    test_add(check_batch, NULL, 0, "plan/batch");
    test_add(check_batch_refusals, NULL, 0, "plan/batch/refusals");
    test_add(check_batch_memory, NULL, 0, "plan/batch/memory");
    test_add(check_center, NULL, 0, "plan/center");
    for (int i = 0; i < TQKV__KERNEL_DIMS; i++) {
        const int head_dim = TQKV__KERNEL_DIM(i);
        test_add(check_split, &head_dim, sizeof head_dim, "plan/split/d%d", head_dim);
    }
    for (int i = 0; i < TEST_ALL_HEAD_DIMS; i++)
        test_add(check_head_dim, &test_all_head_dims[i], sizeof(int), "plan/head_dim/%d", test_all_head_dims[i]);
    test_add(check_types, NULL, 0, "plan/types");
    test_add(check_kernels, NULL, 0, "plan/kernels");
    test_add(check_window, NULL, 0, "plan/window");
    test_add(check_cache_plan, NULL, 0, "plan/cache");
    test_add(check_cache_kernels, NULL, 0, "plan/cache_kernels");
    test_add(check_stale, NULL, 0, "plan/stale");
    test_add(check_backend, NULL, 0, "plan/backend");
}

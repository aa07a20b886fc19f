/* Lists of blocks: what is refused, allocations that fail, a cache. test_attend_history.c has lists at random. */
#include "attend_fixture.h"
#include "cache_fixture.h"
#include "counting.h"

/* ---- The cache ---- */

/* A cache gives what attention over its stores gives: linear, or a ring that forgot some of its positions. */
static void check_cache(const void *parameters)
{
    const bool ring = *(const int *)parameters != 0;
    const cache_row row = {TQKV_I8, TQKV_TQ4, 64, 200, ring, ring ? 300 : 150, ring ? 280 : -1};
    const uint64_t tree[3] = {1, 3, 5};
    int32_t list[2][3][20];
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    desc.window = 150;
    tqkv_cache *c = cache_make(&row, &desc);
    float *q = test_rows(7, DATA_GAUSSIAN, 3 * 4, 64), out[2][3 * 4 * 64];
    REQUIRE(c, "no cache");
    for (int i = 0; i < 120; i++) (&list[0][0][0])[i] = 20 + i % 20 * 2;
    tqkv_attention a = cache_attention(c, &desc, 3, (int)(tqkv_cache_end(c) - test_first(c)));
    a.list.rows = &list[0][0][0];
    a.list.length = 20;
    a.list.heads = 2;
    a.list.block = 4;
    a.list.newest = 6;
    a.tree = tree;
    CHECK_RESULT(tqkv_attend(&a, q, out[0]), TQKV_OK);
    a.keys = a.values = NULL; /* ignored */
    a.n_heads = a.n_queries = a.window = -1;
    CHECK_RESULT(test_attend_some(c, &a, q, 3, out[1]), TQKV_OK);
    CHECK(!memcmp(out[0], out[1], sizeof out[0]), "the cache's output is another");
    a.list.block = 5;
    CHECK_RESULT(test_attend_some(c, &a, q, 3, out[1]), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(test_attend_some(NULL, &a, q, 3, out[1]), TQKV_INVALID_ARGUMENT);
    CHECK(!memcmp(out[0], out[1], sizeof out[0]), "a refused call has written");
    a.list.rows = NULL;
    a.tree = NULL;
    CHECK_RESULT(test_attend_some(c, &a, q, 3, out[0]), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(c, q, 3, out[1]), TQKV_OK);
    CHECK(!memcmp(out[0], out[1], sizeof out[0]), "without a list the output is another");
    free(q);
    tqkv_cache_destroy(c);
}

/* ---- What is refused ---- */

typedef struct bad_list {
    const char *name;
    int32_t row[4];
    int length, heads, block, newest, offset; /* offset: bytes */
    tqkv_result expected;
} bad_list;

/* A bad list in the second call of a batch: the first one is not written either. */
static void check_batch_refused(const attend_problem *p, tqkv_result expected)
{
    tqkv_attention items[2] = {p->attention, p->attention};
    const void *q[2] = {p->q, p->q};
    float written[2 * 4 * 64];
    void *out[2] = {written, written + 4 * 64};
    items[0].list.rows = NULL;
    memset(written, 0xff, sizeof written);
    CHECK_RESULT(tqkv_attend_batch(items, 2, q, out), expected);
    for (int i = 0; i < 2 * 4 * 64; i++)
        CHECK((written[i] != written[i]) == (expected != TQKV_OK), "value %d of a batch", i);
}

static void check_refused(const void *parameters)
{
    const bad_list *bad = (const bad_list *)parameters;
    attend_row row = attend_default_row(TQKV_TQ4, TQKV_TQ4, 64);
    attend_problem p;
    row.bits_alone = true;
    attend_set_up(&p, &row);
    int32_t list[16];
    float before[4 * 64], max[4], sum[4];
    for (int i = 0; i < 16; i++) list[i] = bad->row[i % 4];
    p.attention.list.rows = (const int32_t *)(const void *)((const char *)list + bad->offset);
    p.attention.list.length = bad->length;
    p.attention.list.heads = bad->heads;
    p.attention.list.block = bad->block;
    p.attention.list.newest = bad->newest;
    memcpy(before, p.out, sizeof before);
    test_explained = NULL;
    CHECK_RESULT(tqkv_attend(&p.attention, p.q, p.out), bad->expected);
    CHECK(bad->expected == TQKV_OK || test_explained, "no text");
    CHECK(bad->expected == TQKV_OK || !memcmp(before, p.out, sizeof before), "a refused call has written");
    check_batch_refused(&p, bad->expected);
    CHECK_RESULT(tqkv_attend_partial(&p.attention, p.q, 0, 40, p.out, max, sum), bad->expected);
    for (int i = 0; bad->expected == TQKV_OK && i < 4 * 64; i++) CHECK(p.out[i] == p.out[i], "value %d", i);
    attend_tear_down(&p);
}

/* An output over the list, and an allocation that fails. */
static void check_memory(const void *parameters)
{
    counting counter = {0, 1, 0, 0, 0};
    attend_row row = attend_default_row(TQKV_TQ4, TQKV_TQ4, 64);
    attend_problem p;
    (void)parameters;
    row.list_block = 1;
    row.list_share = 0.5f;
    row.bits_alone = true;
    attend_set_up(&p, &row);
    tqkv_attention a = p.attention;
    a.list.rows = (const int32_t *)(void *)p.out;
    memset(p.out, 0xff, 4 * 64 * sizeof(float));
    CHECK_RESULT(tqkv_attend(&a, p.q, p.out), TQKV_INVALID_ARGUMENT);
    a.list.rows = p.list;
    a.allocator = counting_allocator(&counter);
    CHECK_RESULT(tqkv_attend(&a, p.q, p.out), TQKV_OUT_OF_MEMORY);
    CHECK(p.out[0] != p.out[0], "a failed call has written");
    CHECK_RESULT(tqkv_attend(&a, p.q, p.out), TQKV_OK);
    CHECK_NO_LEAK(&counter);
    attend_tear_down(&p);
}

static const bad_list bad_lists[] = {{"good", {0, 3, 9, -1}, 4, 1, 4, 0, 0, TQKV_OK},
                                     {"empty", {-1, 3, 2, -1}, 4, 0, 4, 0, 0, TQKV_OK},
                                     {"no_length", {0, 0, 0, 0}, 0, 0, 4, 3, 0, TQKV_OK},
                                     {"by_head", {0, 3, 0, 3}, 2, 2, 4, 0, 0, TQKV_OK},
                                     {"beyond_the_end", {0, 3, 9, INT32_MAX}, 4, 1, 128, 0, 0, TQKV_OK},
                                     {"unsorted", {0, 9, 3, -1}, 4, 1, 4, 0, 0, TQKV_INVALID_ARGUMENT},
                                     {"repeated", {0, 3, 3, -1}, 4, 1, 4, 0, 0, TQKV_INVALID_ARGUMENT},
                                     {"negative", {0, 3, -2, -1}, 4, 1, 4, 0, 0, TQKV_INVALID_ARGUMENT},
                                     {"negative_first", {INT32_MIN, 3, 5, -1}, 4, 1, 4, 0, 0, TQKV_INVALID_ARGUMENT},
                                     {"in_the_other_row", {0, 3, 4, 2}, 2, 2, 4, 0, 0, TQKV_INVALID_ARGUMENT},
                                     {"length", {0, 3, 9, -1}, -1, 1, 4, 0, 0, TQKV_INVALID_ARGUMENT},
                                     {"newest", {0, 3, 9, -1}, 4, 1, 4, -1, 0, TQKV_INVALID_ARGUMENT},
                                     {"heads", {0, 3, 9, -1}, 4, 3, 4, 0, 0, TQKV_INVALID_ARGUMENT},
                                     {"block_zero", {0, 3, 9, -1}, 4, 1, 0, 0, 0, TQKV_INVALID_ARGUMENT},
                                     {"block_8", {0, 3, 9, -1}, 4, 1, 8, 0, 0, TQKV_INVALID_ARGUMENT},
                                     {"block_256", {0, 3, 9, -1}, 4, 1, 256, 0, 0, TQKV_INVALID_ARGUMENT},
                                     {"misaligned", {0, 3, 9, -1}, 1, 1, 4, 0, 2, TQKV_INVALID_ARGUMENT}};

void test_list_cases(void)
{
    for (int i = 0; i < 2; i++) test_add(check_cache, &i, sizeof i, "list/cache/%s", i ? "ring" : "linear");
    for (size_t i = 0; i < sizeof bad_lists / sizeof *bad_lists; i++)
        test_add(check_refused, &bad_lists[i], sizeof bad_lists[i], "list/refused/%s", bad_lists[i].name);
    test_add(check_memory, NULL, 0, "list/memory");
}

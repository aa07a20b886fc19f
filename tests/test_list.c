/* Attention over lists of blocks: against double precision, the bits of a list of all blocks and of queries in company,
 * pages that no list names, and what is refused. */
#include "attend_option_list.h"
#include "cache_fixture.h"
#include "counting.h"

void test_check_attend(const void *parameters);

static const int list_blocks[5] = {1, 4, 16, 64, 128};

/* Option i, with formats, sizes, streams and lists in turn. */
static attend_row row_of(int i)
{
    static const int dims[7] = {64, 128, 32, 96, 512, 80, 256};
    static const float shares[4] = {0.1f, 0.5f, 0.9f, 0.0f};
    attend_row row =
        attend_default_row(test_formats[i % TEST_FORMATS], test_formats[i / 3 % TEST_FORMATS], dims[i % 7]);
    row.shared = i % 4 == 1;
    row.tail_dim = i % 4 > 1 ? 0 : i % 8 == 0 ? 64 : 32;
    row.tail_format = i % 5 ? TQKV_F16 : TQKV_I8;
    row.list_block = list_blocks[i % 5];
    row.list_share = shares[i / 5 % 4];
    row.list_newest = i % 3 * 11;
    row.list_by_head = i % 2;
    return row;
}

static void apply(attend_row *row, const option *o)
{
    o->apply(row);
    row->tail_center = row->key_center;
}

static void add_options(void)
{
    const int n_options = (int)(sizeof options / sizeof *options);
    for (int i = 0; i < n_options; i++)
        for (int turn = 0; turn < 2; turn++) {
            attend_row row = row_of(i + 7 * turn);
            apply(&row, &options[i]);
            test_add(test_check_attend, &row, sizeof row, "list/%s/%d/%d", options[i].name, row.list_block,
                     row.head_dim);
        }
}

/* ---- Bits ---- */

/* A list of all blocks gives the bits that no list gives. */
static void check_full(const void *parameters)
{
    attend_row row = *(const attend_row *)parameters;
    attend_problem p;
    row.bits_alone = true;
    row.list_share = 1.0f;
    row.poison = POISON_NONE;
    attend_set_up(&p, &row);
    const size_t bytes = p.n_rows * p.value_dim * sizeof(float);
    float *out = (float *)test_alloc(bytes);
    tqkv_attention all = p.attention;
    all.list.rows = NULL;
    CHECK_RESULT(tqkv_attend(&p.attention, p.q, p.out), TQKV_OK);
    CHECK_RESULT(tqkv_attend(&all, p.q, out), TQKV_OK);
    CHECK(!memcmp(out, p.out, bytes), "a list of all blocks changes bits");
    free(out);
    attend_tear_down(&p);
}

static void add_full(void)
{
    const int n_options = (int)(sizeof options / sizeof *options);
    for (int i = 0; i < n_options; i++) {
        attend_row row = row_of(i + 3);
        apply(&row, &options[i]);
        if (row.end > (int64_t)1 << 30) continue; /* no list names so far positions */
        test_add(check_full, &row, sizeof row, "list/full/%s/%d", options[i].name, row.list_block);
    }
}

static attend_row company_row(int i)
{
    attend_row row = row_of(i);
    row.n_queries = 9;
    row.end = 700;
    row.key_capacity = row.value_capacity = 700;
    row.list_share = i % 2 ? 0.3f : 0.7f;
    row.bits_alone = true;
    return row;
}

static void run_backwards(void *user, int count, tqkv_task task, void *context)
{
    (void)user;
    for (int i = count - 1; i >= 0; i--) task(context, i);
}

/* Each query alone, in a batch with a hook, has the bits that it has among nine without. */
static void check_alone(const void *parameters)
{
    const attend_row row = company_row(*(const int *)parameters);
    attend_problem p;
    attend_set_up(&p, &row);
    const size_t n_heads = (size_t)p.attention.n_heads, floats = n_heads * p.value_dim;
    float *alone = (float *)test_alloc(p.n_rows * p.value_dim * sizeof *alone);
    tqkv_attention items[9];
    const void *q[9];
    void *out[9];
    CHECK_RESULT(tqkv_attend(&p.attention, p.q, p.out), TQKV_OK);
    for (int i = 0; i < 9; i++) {
        items[i] = p.attention;
        items[i].n_queries = 1;
        items[i].end = row.end - 8 + i;
        items[i].list.rows = p.list + i * p.attention.list.length * (row.list_by_head ? row.n_kv_heads : 1);
        q[i] = p.q + (size_t)i * n_heads * p.head_dim;
        out[i] = alone + (size_t)i * floats;
    }
    items[0].parallel.run = run_backwards;
    CHECK_RESULT(tqkv_attend_batch(items, 9, q, out), TQKV_OK);
    CHECK(!memcmp(alone, p.out, p.n_rows * p.value_dim * sizeof *alone), "queries alone have other bits");
    free(alone);
    attend_tear_down(&p);
}

/* ---- Pages ---- */

enum { SLOTS = 704 };

/* A pool that has the positions of a linear store. */
static tqkv_store pool_of(const tqkv_store *from, int n_positions, const int32_t *table, int page_size)
{
    tqkv_store pool = test_store(from->format, from->head_dim, from->n_kv_heads, SLOTS, false);
    stream s = stream_empty();
    pool.pages = table;
    pool.n_pages = SLOTS / page_size;
    pool.page_size = page_size;
    CHECK_RESULT(tqkv_store_save(from, 0, n_positions, stream_write, &s), TQKV_OK);
    CHECK_RESULT(tqkv_store_load(&pool, 0, n_positions, stream_read, &s), TQKV_OK);
    stream_free(&s);
    return pool;
}

/* Pages hold the same positions as a linear store; those that no list names are not looked at. */
static void check_pages(const void *parameters)
{
    const int index = *(const int *)parameters, sizes[] = {64, 16, 64, 1}, page_size = sizes[index % 4];
    const int n_pages = SLOTS / page_size;
    int32_t table[SLOTS];
    attend_row row = company_row(index);
    attend_problem p;
    tqkv_store pools[2];
    row.shared = false;
    row.tail_dim = 0;
    row.list_newest = 5;
    row.list_share = 0.02f;
    row.n_queries = 2;
    attend_set_up(&p, &row);
    tqkv_attention a = p.attention;
    const size_t bytes = p.n_rows * p.value_dim * sizeof(float);
    for (int i = 0; i < n_pages; i++) table[i] = (int32_t)(3 * i + 1) % n_pages;
    for (int i = 0; i < 2; i++) pools[i] = pool_of(i ? a.values : a.keys, (int)a.end, table, page_size);
    CHECK_RESULT(tqkv_attend(&a, p.q, p.out), TQKV_OK);
    float *out = (float *)test_alloc(bytes);
    a.keys = &pools[0];
    a.values = &pools[1];
    int seen_page = -1;
    for (int page = 0; page < n_pages; page++) {
        bool seen = false;
        for (int j = 0; j < page_size; j++) seen = seen || attend_is_seen(&a, page * page_size + j);
        if (seen) seen_page = page;
        if (!seen) table[page] = page % 2 ? -1 : n_pages;
    }
    CHECK_RESULT(tqkv_attend(&a, p.q, out), TQKV_OK);
    CHECK(!memcmp(out, p.out, bytes), "pages give other bits");
    table[seen_page] = n_pages;
    CHECK_RESULT(tqkv_attend(&a, p.q, out), TQKV_OUT_OF_RANGE);
    free(out);
    test_store_free(&pools[0]);
    test_store_free(&pools[1]);
    attend_tear_down(&p);
}

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
    add_options();
    add_full();
    for (int i = 0; i < 15; i++) test_add(check_alone, &i, sizeof i, "list/alone/%d", i);
    for (int i = 0; i < 10; i++) test_add(check_pages, &i, sizeof i, "list/pages/%d", i);
    for (int i = 0; i < 2; i++) test_add(check_cache, &i, sizeof i, "list/cache/%s", i ? "ring" : "linear");
    for (size_t i = 0; i < sizeof bad_lists / sizeof *bad_lists; i++)
        test_add(check_refused, &bad_lists[i], sizeof bad_lists[i], "list/refused/%s", bad_lists[i].name);
    test_add(check_memory, NULL, 0, "list/memory");
}

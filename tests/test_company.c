/* Caches with exact ends and rings: their memory, which windows are refused, and what stays visible. A query's bits in
 * company: test_attend_history.c and test_learn_history.c. */
#include "cache_fixture.h"

enum { TOKENS = 300, GROUP_HEADS = CACHE_HEADS * CACHE_GROUP };

typedef struct company_row {
    const char *name;
    tqkv_format keys, values;
    int exact_first, exact_last, window, capacity; /* capacity: of a ring; 0: linear */
    int tail_dim;
    bool shared;
    float softcap;
} company_row;

static tqkv_cache_desc desc_of(const company_row *row)
{
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.head_dim = 64;
    desc.n_kv_heads = CACHE_HEADS;
    desc.n_heads = GROUP_HEADS;
    desc.capacity = row->capacity ? row->capacity : TOKENS;
    desc.ring = row->capacity != 0;
    desc.key_format = row->keys;
    desc.value_format = row->shared ? TQKV_FORMAT_DEFAULT : row->values;
    desc.shared = row->shared;
    desc.tail_dim = row->tail_dim;
    desc.window = row->window;
    desc.softcap = row->softcap;
    desc.exact_first = row->exact_first;
    desc.exact_last = row->exact_last;
    return desc;
}

/* Rows for TOKENS tokens, and queries for them. */
typedef struct company_data {
    float *k, *v, *q;
    int key_dim;
} company_data;

static company_data make_data(int tail_dim)
{
    company_data data;
    data.key_dim = 64 + tail_dim;
    data.k = test_rows(1, DATA_STUDENT, TOKENS * CACHE_HEADS, data.key_dim);
    data.v = test_rows(2, DATA_STUDENT, TOKENS * CACHE_HEADS, 64);
    data.q = test_rows(3, DATA_GAUSSIAN, TOKENS * GROUP_HEADS, data.key_dim);
    return data;
}

static void free_data(company_data *data)
{
    free(data->k);
    free(data->v);
    free(data->q);
}

/* ---- Memory ---- */

/* What an allocator has lent, in bytes; fails where it would be more than `most`. */
typedef struct lender {
    size_t lent, most;
} lender;

static void *lend(void *user, size_t size)
{
    lender *l = (lender *)user;
    if (size > l->most - l->lent) return NULL;
    l->lent += size;
    return malloc(size);
}

static void take_back(void *user, void *p, size_t size)
{
    ((lender *)user)->lent -= size;
    free(p);
}

/* A large append takes memory for the halves of its queries, which a smaller one gives back.
 * Without that memory nothing happens. */
static void check_memory(const void *parameters)
{
    static const company_row row = {"", TQKV_TQ4, TQKV_TQ3, 4, 64, 0, 0, 0, false, 0};
    tqkv_cache_desc desc = desc_of(&row);
    lender l = {0, SIZE_MAX};
    company_data data = make_data(0);
    tqkv_cache *cache = NULL;
    (void)parameters;
    desc.allocator.alloc = lend;
    desc.allocator.free = take_back;
    desc.allocator.user = &l;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    REQUIRE(cache, "no cache");
    CHECK_RESULT(tqkv_cache_append(cache, data.k, data.v, 64), TQKV_OK);
    const size_t lent = l.lent, bytes = tqkv_cache_bytes(cache), others = lent - bytes;
    stream before = stream_of_cache(cache);
    l.most = lent + 1000;
    CHECK_RESULT(tqkv_cache_append(cache, data.k, data.v, 200), TQKV_OUT_OF_MEMORY);
    stream after = stream_of_cache(cache);
    CHECK(stream_is_equal(&before, &after) && tqkv_cache_bytes(cache) == bytes && l.lent == lent, "changed");
    l.most = SIZE_MAX;
    CHECK_RESULT(tqkv_cache_append(cache, data.k, data.v, 200), TQKV_OK);
    CHECK(l.lent > lent && l.lent - tqkv_cache_bytes(cache) <= others + 128, "%d bytes, but %d are lent",
          (int)tqkv_cache_bytes(cache), (int)l.lent);
    data.k[0] = NAN;
    CHECK_RESULT(tqkv_cache_append(cache, data.k, data.v, 1), TQKV_NOT_FINITE);
    CHECK(l.lent > lent, "a refused append gave memory back");
    CHECK_RESULT(tqkv_cache_append(cache, data.v, data.v, 1), TQKV_OK);
    CHECK(l.lent == lent && tqkv_cache_bytes(cache) == bytes, "%d bytes are lent, %d at first", (int)l.lent, (int)lent);
    tqkv_cache_destroy(cache);
    CHECK(l.lent == 0, "%d bytes leaked", (int)l.lent);
    stream_free(&before);
    stream_free(&after);
    free_data(&data);
}

/* The memory of the grown halves is the cache's, too: nothing else may lie there. */
static void check_overlaps(const void *parameters)
{
    static const company_row row = {"", TQKV_TQ4, TQKV_TQ3, 0, 64, 0, 0, 0, false, 0};
    const tqkv_cache_desc desc = desc_of(&row);
    company_data data = make_data(0);
    tqkv_cache *cache = NULL;
    (void)parameters;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    REQUIRE(cache, "no cache");
    CHECK_RESULT(tqkv_cache_append(cache, data.k, data.v, 200), TQKV_OK);
    const tqkv_attention view = test_view(cache, 1);
    const void *grown = view.last.keys->codes;
    CHECK_RESULT(tqkv_cache_append(cache, grown, data.v, 1), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_cache_keep(cache, 2, (const int *)grown, 1), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_cache_attend(cache, data.q, 1, (void *)(uintptr_t)grown), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(cache);
    free_data(&data);
}

/* More queries than find their newest halves are refused, and write nothing. */
static void check_too_many(const void *parameters)
{
    static const company_row row = {"", TQKV_TQ4, TQKV_TQ3, 0, 65, 0, 0, 0, false, 0};
    static const int appends[3] = {1, 100, 1}, most[3] = {64, 100, 64}, none[3] = {130, 165, 130};
    const tqkv_cache_desc desc = desc_of(&row);
    company_data data = make_data(0);
    float *out = test_rows(4, DATA_ZEROS, TOKENS * GROUP_HEADS, 64);
    tqkv_cache *cache = NULL;
    (void)parameters;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    REQUIRE(cache, "no cache");
    for (int i = 0; i < 150; i++) CHECK_RESULT(tqkv_cache_append(cache, data.k, data.v, 1), TQKV_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_RESULT(tqkv_cache_append(cache, data.k, data.v, appends[i]), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(cache, data.q, most[i], out), TQKV_OK);
        memset(out, 0xff, TOKENS * GROUP_HEADS * 64 * sizeof *out);
        CHECK_RESULT(tqkv_cache_attend(cache, data.q, none[i], out), TQKV_OUT_OF_RANGE);
        CHECK(test_is_untouched(out, TOKENS * GROUP_HEADS * 64 * sizeof *out), "written");
    }
    tqkv_cache_destroy(cache);
    free_data(&data);
    free(out);
}

/* ---- Rings ---- */

/* Expects that n queries are refused, in all ways; their outputs are as they were. */
static void expect_refused(tqkv_cache *cache, const company_data *data, int n, const char *when)
{
    enum { MOST = 8 };
    static float out[MOST * GROUP_HEADS * 64], sums[2][MOST * GROUP_HEADS];
    tqkv_attention view = test_view(cache, 1), some;
    const void *const q[1] = {data->q};
    void *const outs[1] = {out};
    memset(&some, 0, sizeof some);
    memset(out, 0xff, sizeof out);
    view.n_queries = n;
    CHECK(tqkv_cache_attend(cache, data->q, n, out) == TQKV_OUT_OF_RANGE, "%s: attend", when);
    CHECK(test_attend_some(cache, &some, data->q, n, out) == TQKV_OUT_OF_RANGE, "%s: attend_some", when);
    CHECK(tqkv_attend(&view, data->q, out) == TQKV_OUT_OF_RANGE, "%s: the view", when);
    CHECK(tqkv_attend_batch(&view, 1, q, outs) == TQKV_OUT_OF_RANGE, "%s: a batch", when);
    CHECK(tqkv_attend_partial(&view, data->q, test_first(cache), 1, out, sums[0], sums[1]) == TQKV_OUT_OF_RANGE,
          "%s: a slice", when);
    CHECK(test_is_untouched(out, sizeof out), "%s: written", when);
}

/* Six queries at positions 198 to 203 of a ring that begins at 140, with a window of 64: the first five miss some of
   their windows. Refused is what asks for these, by its list or by its newest positions. */
static void check_lost_lists(tqkv_cache *cache, const company_data *data)
{
    static const struct {
        int block, newest;
        tqkv_result result;
    } cases[] = {{35, 0, TQKV_OK},  {34, 0, TQKV_OUT_OF_RANGE},  {33, 0, TQKV_OUT_OF_RANGE}, {32, 0, TQKV_OK},
                 {35, 59, TQKV_OK}, {35, 60, TQKV_OUT_OF_RANGE}, {-1, 60, TQKV_OUT_OF_RANGE}};
    static float out[6 * GROUP_HEADS * 64];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int32_t lists[6] = {cases[i].block, 36, 36, 36, 36, 36};
        tqkv_attention some;
        memset(&some, 0, sizeof some);
        some.list.rows = lists;
        some.list.length = 1;
        some.list.block = 4;
        some.list.newest = cases[i].newest;
        CHECK(test_attend_some(cache, &some, data->q, 6, out) == cases[i].result, "block %d, %d newest", cases[i].block,
              cases[i].newest);
    }
}

/* A list may name positions before all windows: nobody misses them, until a window begins among them. */
static void check_lists_before_windows(tqkv_cache *cache, const company_data *data)
{
    static float out[13 * GROUP_HEADS * 64];
    int32_t lists[13][2];
    tqkv_attention some;
    memset(&some, 0, sizeof some);
    some.list.rows = lists[0];
    some.list.length = 2;
    some.list.block = 16;
    for (int i = 0; i < 13; i++) { /* whose windows begin at 128 to 140, the oldest position */
        lists[i][0] = 7;           /* positions 112 to 127 */
        lists[i][1] = 12;          /* 192 to 207 */
    }
    CHECK_RESULT(test_attend_some(cache, &some, data->q, 1, out), TQKV_OK);
    CHECK_RESULT(test_attend_some(cache, &some, data->q, 13, out), TQKV_OK);
    lists[0][0] = 8;
    CHECK_RESULT(test_attend_some(cache, &some, data->q, 13, out), TQKV_OUT_OF_RANGE);
}

/* A ring of its window's size: a query whose window is gone gets no answer,
 * but one that the window does not reach does. */
static void check_lost_windows(const void *parameters)
{
    static const company_row row = {"", TQKV_TQ4, TQKV_TQ4, 0, 0, 64, 64, 0, false, 0};
    const tqkv_cache_desc desc = desc_of(&row);
    company_data data = make_data(0);
    static float out[8 * GROUP_HEADS * 64];
    tqkv_cache *cache = NULL;
    (void)parameters;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    REQUIRE(cache, "no cache");
    CHECK_RESULT(tqkv_cache_append(cache, data.k, data.v, 64), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(cache, data.q, 8, out), TQKV_OK);
    CHECK_RESULT(tqkv_cache_append(cache, data.k, data.v, 140), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(cache, data.q, 1, out), TQKV_OK);
    expect_refused(cache, &data, 6, "six queries");
    check_lost_lists(cache, &data);
    check_lists_before_windows(cache, &data);
    CHECK_RESULT(tqkv_cache_truncate(cache, 180), TQKV_OK);
    expect_refused(cache, &data, 1, "truncated");
    CHECK_RESULT(tqkv_cache_append(cache, data.k, data.v, 20), TQKV_OK); /* end 200: back to position 137 */
    expect_refused(cache, &data, 1, "not yet");
    CHECK_RESULT(tqkv_cache_append(cache, data.k, data.v, 4), TQKV_OK); /* the oldest is 140, as before */
    CHECK_RESULT(tqkv_cache_attend(cache, data.q, 1, out), TQKV_OK);
    CHECK_RESULT(tqkv_cache_keep(cache, 10, NULL, 0), TQKV_OK);
    expect_refused(cache, &data, 1, "after keep");
    tqkv_attention store = test_view(cache, 1); /* the same over its stores, which know no history */
    store.whole_window = false;
    CHECK_RESULT(tqkv_attend(&store, data.q, out), TQKV_OK);
    tqkv_cache_destroy(cache);
    free_data(&data);
}

void test_company_cases(void)
{
    test_add(check_memory, NULL, 0, "company/memory");
    test_add(check_overlaps, NULL, 0, "company/overlaps");
    test_add(check_too_many, NULL, 0, "company/too_many");
    test_add(check_lost_windows, NULL, 0, "company/lost_windows");
}

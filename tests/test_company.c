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

static void run_backwards(void *user, int n, tqkv_task task, void *context)
{
    (void)user;
    while (n-- > 0) task(context, n);
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
        for (int j = 0; j < TOKENS * GROUP_HEADS * 64; j++)
            if (out[j] == out[j]) {
                CHECK(false, "value %d was written", j);
                break;
            }
    }
    tqkv_cache_destroy(cache);
    free_data(&data);
    free(out);
}

/* ---- Rings ---- */

static bool untouched(const float *x, int n)
{
    for (int i = 0; i < n; i++)
        if (x[i] == x[i]) return false;
    return true;
}

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
    CHECK(untouched(out, MOST * GROUP_HEADS * 64), "%s: written", when);
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

/* A ring without a window, long after it has wrapped, and what attention over its first and resident positions is. */
enum { QUERIES = 5, OUT = QUERIES * GROUP_HEADS * 64 };

typedef struct kept_ring {
    const company_row *row;
    company_data data;
    tqkv_cache *cache;
    tqkv_attention view;
    double expected[OUT], allowed; /* error */
    float out[OUT];                /* of the cache */
} kept_ring;

static bool open_kept(const company_row *row, kept_ring *r)
{
    const tqkv_cache_desc desc = desc_of(row);
    memset(r, 0, sizeof *r);
    r->row = row;
    r->data = make_data(row->tail_dim);
    const company_data *data = &r->data;
    for (int i = 0; i < row->exact_first * CACHE_HEADS * data->key_dim; i++)
        data->k[i] *= 2.0f; /* what queries look at */
    CHECK_RESULT(tqkv_cache_create(&desc, &r->cache), TQKV_OK);
    if (!r->cache) return false;
    const float *v = row->shared ? NULL : data->v;
    for (int i = 0; i < TOKENS; i += 100)
        CHECK_RESULT(tqkv_cache_append(r->cache, data->k + i * CACHE_HEADS * data->key_dim,
                                       v ? v + i * CACHE_HEADS * 64 : NULL, 100),
                     TQKV_OK);
    r->view = test_view(r->cache, 1);
    CHECK(r->view.first.n == row->exact_first, "the view has %d first positions", r->view.first.n);
    r->view.n_queries = QUERIES;
    r->allowed = reference_attention_tolerance(&r->view, 2.0);
    reference_attend(&r->view, data->q, r->expected);
    CHECK_RESULT(tqkv_cache_attend(r->cache, data->q, QUERIES, r->out), TQKV_OK);
    return true;
}

/* The outputs are those of double precision, and would be others without the first positions. */
static void check_kept_error(const kept_ring *r)
{
    static double without[OUT];
    tqkv_attention view = r->view;
    const double error = reference_relative_error(r->out, r->expected, OUT);
    CHECK(error <= r->allowed, "relative error %.3g", error);
    view.first.n = 0;
    reference_attend(&view, r->data.q, without);
    CHECK(reference_relative_error(r->out, without, OUT) > 0.02, "the first positions make no difference");
}

/* The same bits over the stores, alone and by tasks; in two slices nearly the same. */
static void check_kept_calls(const kept_ring *r)
{
    static float out[2][OUT], sums[2][2][QUERIES * GROUP_HEADS];
    tqkv_attention view = r->view;
    const float *q = r->data.q;
    const int64_t first = test_first(r->cache), second = first + 33;
    for (int tasks = 0; tasks < 2; tasks++) {
        if (tasks) view.parallel.run = run_backwards;
        CHECK_RESULT(tqkv_attend(&view, q, out[0]), TQKV_OK);
        CHECK(!memcmp(r->out, out[0], sizeof out[0]), "%s other bits", tasks ? "tasks have" : "the view has");
    }
    CHECK_RESULT(tqkv_attend_partial(&view, q, first, 33, out[0], sums[0][0], sums[0][1]), TQKV_OK);
    CHECK_RESULT(tqkv_attend_partial(&view, q, second, (int)(TOKENS - second), out[1], sums[1][0], sums[1][1]),
                 TQKV_OK);
    CHECK_RESULT(tqkv_attend_merge(&view, out[0], sums[0][0], sums[0][1], &view, out[1], sums[1][0], sums[1][1]),
                 TQKV_OK);
    CHECK_RESULT(tqkv_attend_finish(&view, out[0], sums[0][0], sums[0][1]), TQKV_OK);
    CHECK(reference_relative_error(out[0], r->expected, OUT) <= r->allowed, "slices");
}

/* A list of all blocks changes no bit; one without the first block has none of the first positions. */
static void check_kept_lists(const kept_ring *r)
{
    enum { BLOCKS = 40 };
    static int32_t list[QUERIES * BLOCKS];
    static double expected[OUT];
    static float out[OUT];
    tqkv_attention view = r->view;
    view.list.rows = list;
    view.list.length = BLOCKS;
    view.list.block = 16;
    for (int i = 0; i < QUERIES * BLOCKS; i++) list[i] = i % BLOCKS * 16 < TOKENS ? i % BLOCKS : -1;
    CHECK_RESULT(tqkv_attend(&view, r->data.q, out), TQKV_OK);
    CHECK(!memcmp(r->out, out, sizeof out), "a list of all blocks has other bits");
    for (int i = 0; i < QUERIES * BLOCKS; i++) list[i] = i % BLOCKS ? -1 : 1;
    view.list.newest = 9;
    reference_attend(&view, r->data.q, expected);
    CHECK_RESULT(tqkv_attend(&view, r->data.q, out), TQKV_OK);
    CHECK(reference_relative_error(out, expected, OUT) <= r->allowed, "a list without them");
}

/* Loaded and forked, with the same bits. */
static void check_kept_copies(const kept_ring *r)
{
    static float out[OUT];
    for (int way = 0; way < 2; way++) {
        tqkv_cache_desc open;
        tqkv_cache *copy = NULL;
        stream s = stream_of_cache(r->cache);
        memset(&open, 0, sizeof open);
        CHECK_RESULT(way ? tqkv_cache_fork(r->cache, NULL, &copy) : tqkv_cache_load(&open, stream_read, &s, &copy),
                     TQKV_OK);
        if (copy) CHECK_RESULT(tqkv_cache_attend(copy, r->data.q, QUERIES, out), TQKV_OK);
        CHECK(!memcmp(r->out, out, sizeof out), "a copy has other bits");
        tqkv_cache_destroy(copy);
        stream_free(&s);
    }
}

/* Slices of a ring of which nothing has gone: each first position is in one of them. */
static void check_slices_before(const void *parameters)
{
    static const int cuts[4][4] = {{0, 3, 40, 60}, {0, 4, 5, 60}, {0, 0, 30, 60}, {0, 2, 4, 60}};
    static float out[2][GROUP_HEADS * 64], sums[2][2][GROUP_HEADS];
    static double expected[GROUP_HEADS * 64];
    const company_row *row = (const company_row *)parameters;
    const tqkv_cache_desc desc = desc_of(row);
    company_data data = make_data(row->tail_dim);
    tqkv_cache *cache = NULL;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    CHECK_RESULT(tqkv_cache_append(cache, data.k, row->shared ? NULL : data.v, 60), TQKV_OK);
    const tqkv_attention view = test_view(cache, 1);
    reference_attend(&view, data.q, expected);
    for (int i = 0; i < 4; i++) {
        for (int s = 0; s < 3; s++) {
            const int to = s > 0, from = cuts[i][s];
            CHECK_RESULT(
                tqkv_attend_partial(&view, data.q, from, cuts[i][s + 1] - from, out[to], sums[to][0], sums[to][1]),
                TQKV_OK);
            if (s)
                CHECK_RESULT(
                    tqkv_attend_merge(&view, out[0], sums[0][0], sums[0][1], &view, out[1], sums[1][0], sums[1][1]),
                    TQKV_OK);
        }
        CHECK_RESULT(tqkv_attend_finish(&view, out[0], sums[0][0], sums[0][1]), TQKV_OK);
        CHECK(reference_relative_error(out[0], expected, GROUP_HEADS * 64) <= reference_attention_tolerance(&view, 2.0),
              "cut %d", i);
    }
    tqkv_cache_destroy(cache);
    free_data(&data);
}

static void check_first_kept(const void *parameters)
{
    static kept_ring r;
    if (!open_kept((const company_row *)parameters, &r)) return;
    check_kept_error(&r);
    check_kept_calls(&r);
    check_kept_lists(&r);
    check_kept_copies(&r);
    tqkv_cache_destroy(r.cache);
    free_data(&r.data);
}

static void add_first_kept(void)
{
    static const company_row kept[] = {
        {"codes", TQKV_TQ4, TQKV_TQ4, 4, 0, 0, 64, 0, false, 0},
        {"integers", TQKV_TQ4, TQKV_I8, 4, 10, 0, 64, 0, false, 0},
        {"f16", TQKV_F16, TQKV_F16, 4, 0, 0, 70, 0, false, 0},
        {"keys_of_f16", TQKV_F16, TQKV_TQ4, 9, 20, 0, 64, 0, false, 5},
        {"tail", TQKV_TQ4, TQKV_TQ3, 4, 10, 0, 100, 32, false, 0},
        {"latent", TQKV_TQ4, TQKV_TQ4, 70, 10, 0, 130, 32, true, 0},
        {"some_resident", TQKV_TQ4, TQKV_TQ4, 4, 10, 0, TOKENS - 2, 0, false, 0},
    };
    for (int i = 0; i < (int)(sizeof kept / sizeof *kept); i++)
        test_add(check_slices_before, &kept[i], sizeof *kept, "company/slices_before/%s", kept[i].name);
    for (int i = 0; i < (int)(sizeof kept / sizeof *kept); i++)
        test_add(check_first_kept, &kept[i], sizeof *kept, "company/first_kept/%s", kept[i].name);
}

void test_company_cases(void)
{
    test_add(check_memory, NULL, 0, "company/memory");
    test_add(check_overlaps, NULL, 0, "company/overlaps");
    test_add(check_too_many, NULL, 0, "company/too_many");
    test_add(check_lost_windows, NULL, 0, "company/lost_windows");
    add_first_kept();
}

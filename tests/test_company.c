/* A query's bits do not depend on who else is in the call, and where its keys came from: with exact ends in chunks of
 * any size, over stores of any kind, after edits. Rings: which windows are refused, and what stays visible. */
#include "cache_fixture.h"

enum { TOKENS = 300, GROUP_HEADS = CACHE_HEADS * CACHE_GROUP, MOST_DIM = 96 };

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

/* Appends tokens [from, from + n) of the data, and attends with their queries; out: [n][GROUP_HEADS][64] */
static void append_and_attend(tqkv_cache *cache, const company_data *data, bool shared, int from, int n, float *out)
{
    const float *v = shared ? NULL : data->v + from * CACHE_HEADS * 64;
    CHECK_RESULT(tqkv_cache_append(cache, data->k + from * CACHE_HEADS * data->key_dim, v, n), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(cache, data->q + from * GROUP_HEADS * data->key_dim, n, out), TQKV_OK);
}

static void check_same_queries(const float *alone, const float *other, int n, const char *what, int number)
{
    const size_t size = GROUP_HEADS * 64;
    for (int i = 0; i < n; i++)
        if (memcmp(alone + (size_t)i * size, other + (size_t)i * size, size * sizeof *alone)) {
            CHECK(false, "%s %d: query %d has other bits than alone", what, number, i);
            return;
        }
}

/* The prompt one token at a time, by 7, by 64, in pieces that differ, and at once. */
static void check_chunks(const void *parameters)
{
    static const int sizes[5][3] = {{1, 1, 1}, {7, 7, 7}, {64, 64, 64}, {100, 1, 33}, {TOKENS, TOKENS, TOKENS}};
    const company_row *row = (const company_row *)parameters;
    const size_t n_out = TOKENS * GROUP_HEADS * 64;
    company_data data = make_data(row->tail_dim);
    float *outs[2] = {test_rows(4, DATA_ZEROS, TOKENS * GROUP_HEADS, 64), (float *)test_alloc(n_out * sizeof(float))};
    const int most = row->capacity && row->window ? row->capacity - row->window + 1 : TOKENS;
    for (int way = 0; way < 5; way++) {
        const tqkv_cache_desc desc = desc_of(row);
        tqkv_cache *cache = NULL;
        if (sizes[way][0] > most) continue;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        REQUIRE(cache, "no cache");
        memset(outs[1], 0xff, n_out * sizeof(float));
        for (int i = 0, piece = 0, n; i < TOKENS; i += n) {
            n = sizes[way][piece++ % 3];
            if (n > TOKENS - i) n = TOKENS - i;
            append_and_attend(cache, &data, row->shared, i, n, outs[way > 0] + i * GROUP_HEADS * 64);
        }
        if (way) check_same_queries(outs[0], outs[1], TOKENS, "chunks", sizes[way][0]);
        tqkv_cache_destroy(cache);
    }
    free_data(&data);
    free(outs[0]);
    free(outs[1]);
}

/* ---- Stores ---- */

typedef struct store_row {
    int n, n_queries, exact_first, exact_last, window, page_size, end_page_size, list_block;
    bool slices, backwards;
} store_row;

enum { MOST_PAGES = 400, LIST = 24 };

static void run_backwards(void *user, int n, tqkv_task task, void *context)
{
    (void)user;
    while (n-- > 0) task(context, n);
}

/* n positions, linear or over pages in reverse order. */
static tqkv_store filled_store(tqkv_format format, int n, int page_size, const float *rows, int32_t *pages)
{
    const int n_pages = page_size ? (n + page_size - 1) / page_size : 0;
    tqkv_store s = test_store(format, 64, CACHE_HEADS, page_size ? n_pages * page_size : n, false);
    s.rotation = format == TQKV_F16 ? TQKV_ROTATION_ON : TQKV_ROTATION_DEFAULT;
    for (int i = 0; i < n_pages; i++) pages[i] = n_pages - 1 - i;
    if (page_size) {
        s.pages = pages;
        s.n_pages = n_pages;
        s.page_size = page_size;
    }
    CHECK_RESULT(tqkv_encode(&s, rows, n, 0), TQKV_OK);
    return s;
}

/* In one go, or in two slices that are merged. */
static void attend_by(const tqkv_attention *a, bool slices, const float *q, float *out)
{
    enum { MOST_ROWS = 100 * GROUP_HEADS };
    static float sums[2][2][MOST_ROWS], second[MOST_ROWS * 64];
    const int cut = (int)(a->end / 2 + 5 < a->end ? a->end / 2 + 5 : a->end);
    if (!slices) {
        CHECK_RESULT(tqkv_attend(a, q, out), TQKV_OK);
        return;
    }
    CHECK_RESULT(tqkv_attend_partial(a, q, 0, cut, out, sums[0][0], sums[0][1]), TQKV_OK);
    CHECK_RESULT(tqkv_attend_partial(a, q, cut, (int)a->end - cut, second, sums[1][0], sums[1][1]), TQKV_OK);
    CHECK_RESULT(tqkv_attend_merge(a, out, sums[0][0], sums[0][1], a, second, sums[1][0], sums[1][1]), TQKV_OK);
    CHECK_RESULT(tqkv_attend_finish(a, out, sums[0][0], sums[0][1]), TQKV_OK);
}

/* Keys, values, and halves of both, and a list for each query. */
typedef struct company_stores {
    tqkv_store stores[4];
    int32_t pages[4][MOST_PAGES], list[100][LIST];
    tqkv_attention attention;
} company_stores;

static void open_stores(const store_row *row, const float *k, const float *v, company_stores *s)
{
    tqkv_attention *a = &s->attention;
    memset(s, 0, sizeof *s);
    for (int i = 0; i < 4; i++)
        s->stores[i] = filled_store(i < 2 ? TQKV_TQ4 : TQKV_F16, row->n, i < 2 ? row->page_size : row->end_page_size,
                                    i % 2 ? v : k, s->pages[i]);
    a->keys = &s->stores[0];
    a->values = &s->stores[1];
    a->first.keys = a->last.keys = &s->stores[2];
    a->first.values = a->last.values = &s->stores[3];
    a->first.n = row->exact_first;
    a->last.n = row->exact_last;
    a->n_heads = GROUP_HEADS;
    a->n_queries = row->n_queries;
    a->end = row->n;
    a->window = row->window;
    if (row->backwards) a->parallel.run = run_backwards;
    for (int i = 0; i < row->n_queries && row->list_block; i++)
        for (int j = 0; j < LIST; j++) s->list[i][j] = (2 * j + i % 2) * row->list_block < row->n ? 2 * j + i % 2 : -1;
    if (row->list_block) a->list.rows = s->list[0];
    a->list.length = LIST;
    a->list.block = row->list_block ? row->list_block : 1;
    a->list.newest = 33;
}

/* All queries in one call against each alone, whose `end` is lower; slices are cut at the same position in both. */
static void check_stores(const void *parameters)
{
    const store_row *row = (const store_row *)parameters;
    const int n = row->n, n_queries = row->n_queries;
    static company_stores s;
    float *k = test_rows(1, DATA_STUDENT, n * CACHE_HEADS, 64), *v = test_rows(2, DATA_STUDENT, n * CACHE_HEADS, 64);
    float *q = test_rows(3, DATA_GAUSSIAN, n_queries * GROUP_HEADS, 64);
    float *together = test_rows(4, DATA_ZEROS, n_queries * GROUP_HEADS, 64),
          *alone = test_rows(5, DATA_ZEROS, n_queries * GROUP_HEADS, 64);
    open_stores(row, k, v, &s);
    tqkv_attention a = s.attention;
    attend_by(&a, false, q, together);
    for (int i = 0; i < n_queries; i++) {
        tqkv_attention one = a;
        one.n_queries = 1;
        one.end = n - n_queries + i + 1;
        if (row->list_block) one.list.rows = s.list[i];
        attend_by(&one, false, q + i * GROUP_HEADS * 64, alone + i * GROUP_HEADS * 64);
    }
    check_same_queries(alone, together, n_queries, "stores of", n);
    if (row->slices) {
        attend_by(&a, true, q, together);
        a.n_queries = 1;
        for (int i = 0; i < n_queries; i += 7) { /* with the same end, and so the same cut */
            tqkv_attention last = a;
            last.n_queries = n_queries - i;
            attend_by(&last, true, q + i * GROUP_HEADS * 64, alone + i * GROUP_HEADS * 64);
            check_same_queries(together + i * GROUP_HEADS * 64, alone + i * GROUP_HEADS * 64, n_queries - i,
                               "slices from", i);
        }
    }
    for (int i = 0; i < 4; i++) test_store_free(&s.stores[i]);
    free(k);
    free(v);
    free(q);
    free(together);
    free(alone);
}

/* ---- Edits ---- */

static void edit(tqkv_cache **cache, data_random *random)
{
    const int end = (int)tqkv_cache_end(*cache), what = data_below(random, 5);
    int some = data_below(random, data_below(random, 3) ? 40 : end + 1), kept[TOKENS], n_kept = 0;
    if (some > end) some = end;
    if (what < 2) CHECK_RESULT(tqkv_cache_truncate(*cache, end - some), TQKV_OK);
    if (what == 2) CHECK_RESULT(tqkv_cache_remove(*cache, end - some, some / 2), TQKV_OK);
    for (int i = 0; what == 3 && i < some; i++)
        if (data_below(random, 2)) kept[n_kept++] = i;
    if (what == 3) CHECK_RESULT(tqkv_cache_keep(*cache, some, kept, n_kept), TQKV_OK);
    if (what < 4) return;
    tqkv_cache *fork = NULL;
    CHECK_RESULT(tqkv_cache_fork(*cache, NULL, &fork), TQKV_OK);
    tqkv_cache_destroy(*cache);
    *cache = fork;
}

/* The same edits at the same positions, with appends between them that are cut otherwise. */
static void check_edits(const void *parameters)
{
    const int seed = *(const int *)parameters;
    company_row row = {"", TQKV_TQ4, TQKV_TQ4, seed % 3 * 4, 17 + seed % 4 * 30, 0, 0, 0, false, 0};
    company_data data = make_data(0);
    float *outs[3];
    for (int way = 0; way < 3; way++) {
        data_random random = {(uint64_t)seed + 1};
        const tqkv_cache_desc desc = desc_of(&row);
        tqkv_cache *cache = NULL;
        outs[way] = test_rows(4, DATA_ZEROS, TOKENS * GROUP_HEADS, 64);
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        for (int used = 0; cache && used < TOKENS;) {
            int n = 1 + data_below(&random, 120), done = 0;
            if (n > TOKENS - used) n = TOKENS - used;
            for (int now; done < n; done += now) {
                now = way == 0 ? 1 : way == 1 ? n : 37;
                if (now > n - done) now = n - done;
                append_and_attend(cache, &data, false, used + done, now, outs[way] + (used + done) * GROUP_HEADS * 64);
            }
            used += n;
            edit(&cache, &random);
        }
        tqkv_cache_destroy(cache);
        if (way) check_same_queries(outs[0], outs[way], TOKENS, "way", way);
    }
    for (int way = 0; way < 3; way++) free(outs[way]);
    free_data(&data);
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

/* One append that fills a cache, whose rings of halves then need a tile for its last position:
 * every query is answered. */
static void check_one_append(const void *parameters)
{
    enum { WHOLE = 3 * 64 + 1 };
    static const company_row row = {"", TQKV_TQ4, TQKV_TQ3, 4, 64, 0, 0, 0, false, 0};
    tqkv_cache_desc desc = desc_of(&row);
    company_data data = make_data(0);
    float *alone = test_rows(4, DATA_ZEROS, WHOLE * GROUP_HEADS, 64),
          *at_once = test_rows(4, DATA_ZEROS, WHOLE * GROUP_HEADS, 64);
    (void)parameters;
    desc.capacity = WHOLE;
    for (int n = 1; n <= WHOLE; n += WHOLE - 1) {
        tqkv_cache *cache = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        for (int i = 0; cache && i < WHOLE; i += n)
            append_and_attend(cache, &data, false, i, n, (n == 1 ? alone : at_once) + i * GROUP_HEADS * 64);
        tqkv_cache_destroy(cache);
    }
    check_same_queries(alone, at_once, WHOLE, "tokens at once", WHOLE);
    free(alone);
    free(at_once);
    free_data(&data);
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
    static const company_row chunks[] = {
        {"ends", TQKV_TQ4, TQKV_TQ4, 4, 64, 0, 0, 0, false, 0},
        {"ends_in_integers", TQKV_TQ4, TQKV_TQ4, 4, 64, 0, 0, 0, false, 0},
        {"one_newest", TQKV_I8, TQKV_TQ4, 8, 1, 0, 0, 0, false, 0},
        {"newest_alone", TQKV_TQ3, TQKV_TQ2, 0, 128, 0, 0, 0, false, 0},
        {"ends_that_meet", TQKV_TQ4, TQKV_TQ6, 100, 90, 0, 0, 0, false, 0},
        {"all_newest", TQKV_TQ4, TQKV_TQ4, 0, TOKENS, 0, 0, 0, false, 0},
        {"keys_of_f16", TQKV_F16, TQKV_TQ4, 4, 17, 0, 0, 0, false, 0},
        {"values_of_f16", TQKV_TQ4, TQKV_F16, 4, 17, 0, 0, 0, false, 0},
        {"window", TQKV_TQ4, TQKV_TQ4, 4, 64, 50, 0, 0, false, 20},
        {"ring", TQKV_I8, TQKV_TQ4, 4, 30, 50, 157, 0, false, 0},
        {"latent", TQKV_TQ4, TQKV_TQ4, 4, 64, 0, 0, 32, true, 0},
        {"latent_ring", TQKV_TQ4, TQKV_TQ4, 4, 30, 40, 128, 32, true, 0},
        {"ring_of_f16", TQKV_F16, TQKV_F16, 140, 0, 90, 171, 0, false, 0},
        {"ring_of_keys_of_f16", TQKV_F16, TQKV_I8, 70, 12, 60, 131, 0, false, 5},
        {"ring_with_a_tail", TQKV_TQ4, TQKV_F16, 100, 9, 60, 131, 32, false, 0},
    };
    for (int i = 0; i < (int)(sizeof chunks / sizeof *chunks); i++)
        test_add(check_chunks, &chunks[i], sizeof *chunks, "company/chunks/%s", chunks[i].name);
    static const store_row stores[] = {
        {190, 70, 4, 64, 0, 0, 0, 0, true, false},     {190, 70, 70, 33, 90, 16, 0, 0, false, false},
        {2300, 40, 4, 128, 0, 128, 64, 0, true, true}, {400, 50, 0, 17, 0, 64, 16, 0, false, false},
        {500, 33, 4, 64, 0, 0, 0, 16, false, true},    {500, 33, 4, 64, 200, 16, 16, 1, false, false},
        {500, 33, 4, 64, 0, 0, 64, 64, false, false},
    };
    for (int i = 0; i < (int)(sizeof stores / sizeof *stores); i++)
        test_add(check_stores, &stores[i], sizeof *stores, "company/stores/%d", i);
    for (int seed = 0; seed < 12; seed++) test_add(check_edits, &seed, sizeof seed, "company/edits/%d", seed);
    test_add(check_memory, NULL, 0, "company/memory");
    test_add(check_overlaps, NULL, 0, "company/overlaps");
    test_add(check_too_many, NULL, 0, "company/too_many");
    test_add(check_one_append, NULL, 0, "company/one_append");
    test_add(check_lost_windows, NULL, 0, "company/lost_windows");
    add_first_kept();
}

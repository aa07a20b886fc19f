/* Caches: defaults, refusals, sizes, and a defect of edits. What they hold, learn and answer: test_history.c. */
#include "cache_fixture.h"

static void check_defaults(NO_ROW)
{
    tqkv_cache_desc desc = test_cache_desc(128, CACHE_HEADS, 0, 8); /* n_heads has no default */
    tqkv_cache *cache = NULL;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_INVALID_ARGUMENT);
    desc.n_heads = CACHE_HEADS;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    REQUIRE(cache, "no cache");
    CHECK(test_keys(cache)->format == TQKV_I8, "keys are %d", (int)test_keys(cache)->format);
    CHECK(test_values(cache)->format == TQKV_TQ4, "values are %d", (int)test_values(cache)->format);
    cache_append_seed(cache, 1, 5, 128);
    tqkv_attention view = test_view(cache, 1);
    CHECK(view.n_queries == 1 && view.n_heads == CACHE_HEADS, "a view of %d queries", view.n_queries);
    CHECK_RESULT(tqkv_cache_attend(cache, NULL, 0, NULL), TQKV_OK);
    tqkv_cache_destroy(cache);
    tqkv_cache_destroy(NULL);
    CHECK(tqkv_cache_end(NULL) == 0 && tqkv_cache_bytes(NULL) == 0, "NULL is no cache");
    CHECK(!test_keys(NULL) && !test_values(NULL), "NULL has no stores");
}

/* A ring that cannot hold its window, or what it is to learn from, is refused with a reason when it is created. */
static void check_ring_refusals(NO_ROW)
{
    static const struct {
        int capacity, window, calibrate;
        const char *words;
    } rows[] = {{100, 100, 0, NULL},     {100, 101, 0, "window:"},  {100, 0, 25, NULL},
                {100, 0, 26, "quarter"}, {400, 60, 512, "quarter"}, {40, 0, 16, NULL}};
    for (int i = 0; i < (int)(sizeof rows / sizeof *rows); i++)
        for (int ring = 0; ring < 2; ring++) {
            cache_row row = {TQKV_I8, TQKV_TQ4, 32, rows[i].capacity, ring != 0, 0, -1};
            tqkv_cache_desc desc = cache_desc(&row, NULL);
            tqkv_cache *cache = NULL;
            desc.window = rows[i].window;
            desc.calibrate = rows[i].calibrate;
            test_explained = "";
            const bool refused = ring && rows[i].words;
            CHECK_RESULT(tqkv_cache_create(&desc, &cache), refused ? TQKV_INVALID_ARGUMENT : TQKV_OK);
            CHECK(!refused || (!cache && strstr(test_explained, rows[i].words)), "row %d: %s", i, test_explained);
            tqkv_cache_destroy(cache);
        }
}

/* Outputs over any part of a cache's memory are refused, and change nothing: its struct, its channels, its codes. */
static void check_out_over_cache(NO_ROW)
{
    enum { D = 64, SIZE = 8192 };
    for (int way = 0; way < 3; way++) {
        cache_row row = {TQKV_I8, TQKV_TQ4, D, 64, false, 10, -1};
        counting counter = {0, 0, 0, 0, 0};
        tqkv_cache_desc desc = cache_desc(&row, &counter); /* fills memory, which is compared */
        desc.calibrate = way == 1 ? 16 : 0;
        desc.exact_last = way == 2 ? 4 : 0;
        tqkv_cache *cache = cache_make(&row, &desc);
        REQUIRE(cache, "no cache");
        float *q = test_rows(1, DATA_GAUSSIAN, CACHE_HEADS * CACHE_GROUP, D);
        unsigned char before[SIZE];
        memcpy(before, cache, SIZE);
        for (size_t at = 0; at < SIZE; at += 256)
            CHECK_RESULT(tqkv_cache_attend(cache, q, 1, (char *)cache + at), TQKV_INVALID_ARGUMENT);
        CHECK(!memcmp(before, cache, SIZE), "a refused output was written");
        free(q);
        tqkv_cache_destroy(cache);
    }
}

/* The memory of the newest halves of a large append is the cache's, too: nothing else may lie there. */
static void check_over_halves(NO_ROW)
{
    const cache_row row = {TQKV_TQ4, TQKV_TQ3, 64, 300, false, 200, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    desc.exact_last = 64;
    tqkv_cache *cache = cache_make(&row, &desc);
    REQUIRE(cache, "no cache");
    float *rows = cache_data(1, CACHE_GROUP, 64);
    void *grown = test_view(cache, 1).last.keys->codes;
    CHECK_RESULT(tqkv_cache_append(cache, grown, rows, 1), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_cache_keep(cache, 2, (const int *)grown, 1), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_cache_attend(cache, rows, 1, grown), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(cache);
    free(rows);
}

/* ---- Queries on both sides of the position at which a cache learns ---- */

/* A call whose first queries stand where rows are read raw is refused and writes nothing. */
static void check_cut_refused(tqkv_cache *cache, int n, const float *q, float *out, const float *all, size_t size,
                              const char *what)
{
    float *before = (float *)test_alloc(size);
    memcpy(before, all, size);
    const tqkv_result r = tqkv_cache_attend(cache, q, n, out);
    CHECK(r == TQKV_INVALID_ARGUMENT && !memcmp(before, all, size), "%s: %s", what, tqkv_result_string(r));
    free(before);
}

/* They are one call: its outputs may overlap neither the queries of the other side, nor each other, nor the cache. */
static void check_over_queries(NO_ROW)
{
    enum { D = 64, WIDE = CACHE_HEADS * CACHE_GROUP * D, N = 6, RAW = 3, LEARNS_AT = 40, ALL = (N + RAW) * WIDE };
    const size_t size = ALL * sizeof(float);
    float *q = test_rows(3, DATA_GAUSSIAN, N, WIDE), *all = (float *)test_alloc_filled(size, 0);
    float *behind = all + RAW * WIDE;
    for (int way = 0; way < 3; way++) {
        const cache_row row = {TQKV_TQ4, TQKV_TQ3, D, 240, false, LEARNS_AT - RAW, -1};
        tqkv_cache_desc desc = cache_desc(&row, NULL);
        desc.calibrate = LEARNS_AT;
        if (way == 1) desc.strides.out.token = D, desc.strides.out.head = RAW * D;
        tqkv_cache *cache = cache_make(&row, &desc);
        REQUIRE(cache, "no cache");
        cache_append_seed(cache, 22, way == 2 ? RAW : N, D);
        float *codes = (float *)test_keys(cache)->codes;
        if (way == 1) {
            check_cut_refused(cache, N, q, all, all, size, "outputs that share rows");
        } else if (way == 2) {
            check_cut_refused(cache, RAW, all, codes, all, size, "outputs in codes that no query reads");
        } else {
            check_cut_refused(cache, N, all, behind, all, size, "outputs in the queries behind");
            check_cut_refused(cache, N, behind, all, all, size, "outputs in the queries before");
            check_cut_refused(cache, N, all, codes, all, size, "outputs in the codes");
            check_cut_refused(cache, N, all, codes - (N - 1) * WIDE, all, size, "the last output in the codes");
        }
        tqkv_cache_destroy(cache);
    }
    free(all);
    free(q);
}

/* ---- Windows that are gone ---- */

/* Lists of queries at the newest of 204 positions of a ring that begins at 140, with a window of 64: all but the newest
   query miss some of their windows. Refused is what asks for these, by its list or by its newest positions. A list may
   name positions before all windows: nobody misses them, until a window begins among them. */
static void check_lost_lists(const tqkv_cache *cache, const float *q, float *out)
{
    static const struct {
        int n, block, newest;
        int32_t of_first, of_all[2]; /* blocks that the first query's list begins with, and those of the others */
        tqkv_result result;
    } cases[] = {{6, 4, 0, 35, {36, -1}, TQKV_OK},
                 {6, 4, 0, 34, {36, -1}, TQKV_OUT_OF_RANGE},
                 {6, 4, 0, 33, {36, -1}, TQKV_OUT_OF_RANGE},
                 {6, 4, 0, 32, {36, -1}, TQKV_OK},
                 {6, 4, 59, 35, {36, -1}, TQKV_OK},
                 {6, 4, 60, 35, {36, -1}, TQKV_OUT_OF_RANGE},
                 {6, 4, 60, -1, {36, -1}, TQKV_OUT_OF_RANGE},
                 {1, 16, 0, 7, {7, 12}, TQKV_OK}, /* positions 112 to 127, 192 to 207; windows from 128 on */
                 {13, 16, 0, 7, {7, 12}, TQKV_OK},
                 {13, 16, 0, 8, {7, 12}, TQKV_OUT_OF_RANGE}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t lists[13][2];
        tqkv_attention some;
        memset(&some, 0, sizeof some);
        for (int query = 0; query < 13; query++) memcpy(lists[query], cases[i].of_all, sizeof lists[query]);
        lists[0][0] = cases[i].of_first;
        some.list.rows = lists[0];
        some.list.length = 2;
        some.list.block = cases[i].block;
        some.list.newest = cases[i].newest;
        CHECK(test_attend_some(cache, &some, q, cases[i].n, out) == cases[i].result, "case %d", (int)i);
    }
}

/* A view of a cache whose queries miss some of their windows gets no answer in any way; stores know no history. */
static void check_lost_windows(NO_ROW)
{
    enum { D = 64, WIDE = CACHE_HEADS * CACHE_GROUP * D, N = 13 };
    const cache_row row = {TQKV_TQ4, TQKV_TQ4, D, 64, true, 204, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    float *q = test_rows(3, DATA_GAUSSIAN, N, WIDE), *out = (float *)test_alloc_filled(N * WIDE * sizeof(float), 0xff);
    static float sums[2][N * CACHE_HEADS * CACHE_GROUP];
    const void *const queries[1] = {q};
    void *const outs[1] = {out};
    desc.window = 64;
    tqkv_cache *cache = cache_make(&row, &desc);
    REQUIRE(cache, "no cache");
    tqkv_attention view = test_view(cache, 1);
    view.n_queries = 6;
    CHECK_RESULT(tqkv_attend(&view, q, out), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_attend_batch(&view, 1, queries, outs), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(tqkv_attend_partial(&view, q, 140, 1, out, sums[0], sums[1]), TQKV_OUT_OF_RANGE);
    CHECK(test_is_untouched(out, N * WIDE * sizeof(float)), "written");
    view.whole_window = false;
    CHECK_RESULT(tqkv_attend(&view, q, out), TQKV_OK);
    check_lost_lists(cache, q, out);
    tqkv_cache_destroy(cache);
    free(q);
    free(out);
}

/* ---- Edits and forks ---- */

/* Defect: kept whole, a run of positions that reaches below the newest halves took them all. */
static void check_keep_all(NO_ROW)
{
    const cache_row row = {TQKV_TQ4, TQKV_TQ3, 64, 200, false, 50, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    int kept[150];
    desc.exact_first = desc.exact_last = 4;
    tqkv_cache *cache = cache_make(&row, &desc);
    REQUIRE(cache, "no cache");
    for (int i = 0; i < 150; i++) kept[i] = i;
    for (int i = 0; i < 2; i++) cache_append_seed(cache, 22, 50, 64);
    for (int n = 150; n > 100; n -= 49) { /* then all but the newest 49 */
        CHECK_RESULT(tqkv_cache_keep(cache, (int)tqkv_cache_end(cache), kept, n), TQKV_OK);
        CHECK(test_view(cache, 1).last.n == 4, "%d newest positions", test_view(cache, 1).last.n);
    }
    tqkv_cache_destroy(cache);
}

/* Defects: caches that learn, whose snapshots could not be loaded. After a fork to a ring of less than four times the
 * positions that it learned from; to no more room than its positions take, where it never learned; and of a ring that
 * held more positions than it has room for, when it learned anew because an edit took one back. */
static void check_saved(NO_ROW)
{
    static const struct {
        int capacity, calibrate, n_tokens, fork, first; /* fork: its capacity, 0: none; first: the oldest position */
        bool ring, fork_ring;
    } rows[] = {
        {1024, 512, 300, 1024, 0, false, true}, {400, 64, 40, 40, 0, false, false}, {64, 16, 70, 0, 5, true, false}};
    int kept[63];
    float q[CACHE_HEADS * CACHE_GROUP * 64] = {0}, out[CACHE_HEADS * CACHE_GROUP * 64];
    for (int i = 0; i < 3; i++) {
        const cache_row row = {TQKV_TQ4, TQKV_TQ3, 64, rows[i].capacity, rows[i].ring, rows[i].n_tokens, -1};
        tqkv_cache_desc desc = cache_desc(&row, NULL), changed = test_cache_desc(0, 0, 0, rows[i].fork);
        desc.calibrate = rows[i].calibrate;
        changed.ring = rows[i].fork_ring;
        tqkv_cache *cache = cache_make(&row, &desc), *copy = NULL, *loaded = NULL;
        for (int k = 0; k < 63; k++) kept[k] = k + (k > 5);
        if (rows[i].fork)
            CHECK_RESULT(tqkv_cache_fork(cache, &changed, &copy), TQKV_OK);
        else
            CHECK_RESULT(tqkv_cache_keep(cache, 64, kept, 63), TQKV_OK);
        tqkv_cache *const saved = copy ? copy : cache;
        CHECK(test_keys(saved)->channel_scale && test_first(saved) == rows[i].first, "%d: begins at %d", i,
              (int)test_first(saved));
        CHECK_RESULT(tqkv_cache_attend(saved, q, 1, out), TQKV_OK);
        stream s = stream_of_cache(saved);
        changed.capacity = 0;
        CHECK_RESULT(tqkv_cache_load(&changed, stream_read, &s, &loaded), TQKV_OK);
        stream_free(&s);
        tqkv_cache_destroy(cache);
        tqkv_cache_destroy(copy);
        tqkv_cache_destroy(loaded);
    }
}

/* A cache copies its centres; a fork may be asked for the same, and for no other. */
static void check_centers(NO_ROW)
{
    const cache_row row = {TQKV_TQ4, TQKV_TQ3, 64, 12, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    float *centers = test_rows(7, DATA_GAUSSIAN, 2 * CACHE_HEADS, 64), *values = centers + CACHE_HEADS * 64;
    tqkv_cache *cache = cache_given(&desc, centers, NULL, values, NULL), *fork = NULL;
    REQUIRE(cache, "no cache");
    CHECK(test_keys(cache)->center != centers, "the centre is not a copy");
    desc.value_center = values;
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), TQKV_OK);
    tqkv_cache_destroy(fork);
    values[CACHE_HEADS * 64 - 1] += 1.0f;
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), TQKV_INVALID_ARGUMENT);
    desc.value_center = NULL;
    desc.key_scale = centers; /* there is none */
    for (int i = 0; i < CACHE_HEADS * 64; i++) centers[i] = 1.0f;
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(cache);
    free(centers);
}

/* ---- Sizes ---- */

/* Gives the same block for any size: a cache that is made touches little of its memory. */
static void *alloc_too_little(void *user, size_t size) { return size > SIZE_MAX / 16 ? user : malloc(size); }

static void free_too_little(void *user, void *pointer, size_t size)
{
    (void)size;
    if (pointer != user) free(pointer);
}

/* Codes that a size_t can count beside halves that it cannot: of the first positions, and of those before a cache has
   learned. */
static void check_too_large(NO_ROW)
{
    static uint64_t room[2048];
    const int bits = sizeof(size_t) == 8 ? 30 : 14;
    const cache_row row = {TQKV_TQ2, TQKV_TQ2, 32, 1 << bits, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    tqkv_cache *cache = NULL;
    desc.n_kv_heads = desc.n_heads = 1 << bits;
    desc.value_format = TQKV_FORMAT_DEFAULT;
    desc.shared = true;
    desc.allocator.alloc = alloc_too_little;
    desc.allocator.free = free_too_little;
    desc.allocator.user = room;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    tqkv_cache_destroy(cache);
    desc.calibrate = 1 << (bits - 2);
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(cache);
    desc.calibrate = 0;
    desc.exact_first = 1 << (bits - 2);
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(cache);
}

void test_cache_cases(void)
{
    test_add(check_defaults, NULL, 0, "cache/defaults");
    test_add(check_ring_refusals, NULL, 0, "cache/ring_refusals");
    test_add(check_out_over_cache, NULL, 0, "cache/out_over_cache");
    test_add(check_over_halves, NULL, 0, "cache/over_halves");
    test_add(check_over_queries, NULL, 0, "cache/over_queries");
    test_add(check_lost_windows, NULL, 0, "cache/lost_windows");
    test_add(check_keep_all, NULL, 0, "cache/keep_all");
    test_add(check_saved, NULL, 0, "cache/saved");
    test_add(check_centers, NULL, 0, "cache/centers");
    test_add(check_too_large, NULL, 0, "cache/too_large");
}

/* Caches with exact ends and rings: their memory, what is refused, what stays visible, and forks of halves. What edits
 * leave of halves: test_history.c. Their bytes and bits: test_attend_history.c and test_history.c. */
#include "cache_fixture.h"

enum {
    TOKENS = 300,
    DIM = 64,
    ROW = CACHE_HEADS * DIM,
    N_HEADS = CACHE_HEADS * CACHE_GROUP,
    OUT = TOKENS * N_HEADS * DIM
};

typedef struct ends_row {
    tqkv_format keys, values;
    int capacity;
    bool ring;
    int window, exact_first, exact_last;
} ends_row;

/* A cache, rows and queries for TOKENS tokens, and room for their outputs. */
typedef struct ends {
    tqkv_cache *cache;
    float *k, *v, *q, *out;
} ends;

/* Creates the cache. memory: NULL, or where from. False and a failed case without. */
static bool ends_open(ends *e, const ends_row *row, const tqkv_allocator *memory)
{
    const cache_row plain = {row->keys, row->values, DIM, row->capacity, row->ring, 0, -1};
    tqkv_cache_desc desc = cache_desc(&plain, NULL);
    memset(e, 0, sizeof *e);
    desc.window = row->window;
    desc.exact_first = row->exact_first;
    desc.exact_last = row->exact_last;
    if (memory) desc.allocator = *memory;
    e->k = test_rows(1, DATA_STUDENT, TOKENS * CACHE_HEADS, DIM);
    e->v = test_rows(2, DATA_STUDENT, TOKENS * CACHE_HEADS, DIM);
    e->q = test_rows(3, DATA_GAUSSIAN, TOKENS * N_HEADS, DIM);
    e->out = (float *)test_alloc_filled(OUT * sizeof(float), 0xff);
    CHECK_RESULT(tqkv_cache_create(&desc, &e->cache), TQKV_OK);
    return e->cache != NULL;
}

static void ends_close(ends *e)
{
    tqkv_cache_destroy(e->cache);
    free(e->k);
    free(e->v);
    free(e->q);
    free(e->out);
}

static void ends_append(ends *e, int n) { CHECK_RESULT(tqkv_cache_append(e->cache, e->k, e->v, n), TQKV_OK); }

static tqkv_result ends_attend(ends *e, int n) { return tqkv_cache_attend(e->cache, e->q, n, e->out); }

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
    static const ends_row row = {TQKV_TQ4, TQKV_TQ3, TOKENS, false, 0, 4, 64};
    lender l = {0, SIZE_MAX};
    const tqkv_allocator memory = {lend, take_back, &l};
    ends e;
    (void)parameters;
    if (!ends_open(&e, &row, &memory)) return;
    ends_append(&e, 64);
    const size_t lent = l.lent, bytes = tqkv_cache_bytes(e.cache), others = lent - bytes;
    stream before = stream_of_cache(e.cache);
    l.most = lent + 1000;
    CHECK_RESULT(tqkv_cache_append(e.cache, e.k, e.v, 200), TQKV_OUT_OF_MEMORY);
    stream after = stream_of_cache(e.cache);
    CHECK(stream_is_equal(&before, &after) && tqkv_cache_bytes(e.cache) == bytes && l.lent == lent, "changed");
    l.most = SIZE_MAX;
    ends_append(&e, 200);
    CHECK(l.lent > lent && l.lent - tqkv_cache_bytes(e.cache) <= others + 128, "%d bytes, but %d are lent",
          (int)tqkv_cache_bytes(e.cache), (int)l.lent);
    e.k[0] = NAN;
    CHECK_RESULT(tqkv_cache_append(e.cache, e.k, e.v, 1), TQKV_NOT_FINITE);
    CHECK(l.lent > lent, "a refused append gave memory back");
    CHECK_RESULT(tqkv_cache_append(e.cache, e.v, e.v, 1), TQKV_OK);
    CHECK(l.lent == lent && tqkv_cache_bytes(e.cache) == bytes, "%d bytes are lent, %d at first", (int)l.lent,
          (int)lent);
    ends_close(&e);
    CHECK(l.lent == 0, "%d bytes leaked", (int)l.lent);
    stream_free(&before);
    stream_free(&after);
}

/* The memory of the grown halves is the cache's, too: nothing else may lie there. */
static void check_overlaps(const void *parameters)
{
    static const ends_row row = {TQKV_TQ4, TQKV_TQ3, TOKENS, false, 0, 0, 64};
    ends e;
    (void)parameters;
    if (!ends_open(&e, &row, NULL)) return;
    ends_append(&e, 200);
    const tqkv_attention view = test_view(e.cache, 1);
    const void *grown = view.last.keys->codes;
    CHECK_RESULT(tqkv_cache_append(e.cache, grown, e.v, 1), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_cache_keep(e.cache, 2, (const int *)grown, 1), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_cache_attend(e.cache, e.q, 1, (void *)(uintptr_t)grown), TQKV_INVALID_ARGUMENT);
    ends_close(&e);
}

/* More queries than find their newest halves are refused, and write nothing. */
static void check_too_many(const void *parameters)
{
    static const ends_row row = {TQKV_TQ4, TQKV_TQ3, TOKENS, false, 0, 0, 65};
    static const int appends[3] = {1, 100, 1}, most[3] = {64, 100, 64}, none[3] = {130, 165, 130};
    ends e;
    (void)parameters;
    if (!ends_open(&e, &row, NULL)) return;
    for (int i = 0; i < 150; i++) ends_append(&e, 1);
    for (int i = 0; i < 3; i++) {
        ends_append(&e, appends[i]);
        CHECK_RESULT(ends_attend(&e, most[i]), TQKV_OK);
        memset(e.out, 0xff, OUT * sizeof *e.out);
        CHECK_RESULT(ends_attend(&e, none[i]), TQKV_OUT_OF_RANGE);
        CHECK(test_is_untouched(e.out, OUT * sizeof *e.out), "written");
    }
    ends_close(&e);
}

/* ---- Rings ---- */

/* Expects that n queries are refused, in all ways; their outputs are as they were. */
static void expect_refused(ends *e, int n, const char *when)
{
    static float sums[2][8 * N_HEADS];
    tqkv_attention view = test_view(e->cache, 1), some;
    const void *const q[1] = {e->q};
    void *const outs[1] = {e->out};
    memset(&some, 0, sizeof some);
    memset(e->out, 0xff, OUT * sizeof *e->out);
    view.n_queries = n;
    CHECK(ends_attend(e, n) == TQKV_OUT_OF_RANGE, "%s: attend", when);
    CHECK(test_attend_some(e->cache, &some, e->q, n, e->out) == TQKV_OUT_OF_RANGE, "%s: attend_some", when);
    CHECK(tqkv_attend(&view, e->q, e->out) == TQKV_OUT_OF_RANGE, "%s: the view", when);
    CHECK(tqkv_attend_batch(&view, 1, q, outs) == TQKV_OUT_OF_RANGE, "%s: a batch", when);
    CHECK(tqkv_attend_partial(&view, e->q, test_first(e->cache), 1, e->out, sums[0], sums[1]) == TQKV_OUT_OF_RANGE,
          "%s: a slice", when);
    CHECK(test_is_untouched(e->out, OUT * sizeof *e->out), "%s: written", when);
}

/* Queries at the newest of 204 positions of a ring that begins at 140, with a window of 64: all but the newest query
   miss some of their windows. Refused is what asks for these, by its list or by its newest positions. A list may name
   positions before all windows: nobody misses them, until a window begins among them. */
static void check_lost_lists(ends *e)
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
        CHECK(test_attend_some(e->cache, &some, e->q, cases[i].n, e->out) == cases[i].result, "case %d", (int)i);
    }
}

/* A ring of its window's size: a query whose window is gone gets no answer,
 * but one that the window does not reach does. */
static void check_lost_windows(const void *parameters)
{
    static const ends_row row = {TQKV_TQ4, TQKV_TQ4, 64, true, 64, 0, 0};
    ends e;
    (void)parameters;
    if (!ends_open(&e, &row, NULL)) return;
    ends_append(&e, 64);
    CHECK_RESULT(ends_attend(&e, 8), TQKV_OK);
    ends_append(&e, 140);
    CHECK_RESULT(ends_attend(&e, 1), TQKV_OK);
    expect_refused(&e, 6, "six queries");
    check_lost_lists(&e);
    CHECK_RESULT(tqkv_cache_truncate(e.cache, 180), TQKV_OK);
    expect_refused(&e, 1, "truncated");
    ends_append(&e, 20); /* end 200: back to position 137 */
    expect_refused(&e, 1, "not yet");
    ends_append(&e, 4); /* the oldest is 140, as before */
    CHECK_RESULT(ends_attend(&e, 1), TQKV_OK);
    CHECK_RESULT(tqkv_cache_keep(e.cache, 10, NULL, 0), TQKV_OK);
    expect_refused(&e, 1, "after keep");
    tqkv_attention store = test_view(e.cache, 1); /* the same over its stores, which know no history */
    store.whole_window = false;
    CHECK_RESULT(tqkv_attend(&store, e.q, e.out), TQKV_OK);
    ends_close(&e);
}

/* ---- Edits ---- */

/* How many positions remain as halves where appends and removals are longer than the ring of the newest ones. */
static void check_remains(const void *parameters)
{
    static const ends_row row = {TQKV_TQ4, TQKV_TQ3, 200, false, 0, 4, 40};
    static const struct {
        int end, n; /* removes n positions before `end`, or appends -n; then truncates to `end` */
        int first, last;
    } steps[] = {{190, -190, 4, 40}, {104, 100, 4, 40}, {70, 0, 4, 40},     {65, 5, 4, 40},
                 {66, -1, 4, 40},    {3, 1, 3, 40},     {195, -130, 3, 40}, {196, -1, 3, 40},
                 {150, 140, 3, 40},  {5, 0, 3, 0},      {15, -10, 3, 10},   {3, 2, 1, 10}};
    ends e;
    (void)parameters;
    if (!ends_open(&e, &row, NULL)) return;
    for (int i = 0; i < (int)(sizeof steps / sizeof *steps); i++) {
        const int end = steps[i].end, n = steps[i].n;
        if (n < 0) ends_append(&e, -n);
        if (n > 0) CHECK_RESULT(tqkv_cache_remove(e.cache, end - n, n), TQKV_OK);
        if (n == 0) CHECK_RESULT(tqkv_cache_truncate(e.cache, end), TQKV_OK);
        const tqkv_attention a = test_view(e.cache, 1);
        CHECK(a.first.n == steps[i].first && a.last.n == steps[i].last,
              "step %d: end %d, %d first and %d newest positions", i, (int)a.end, a.first.n, a.last.n);
    }
    ends_close(&e);
}

/* Defect: kept whole, a run of positions that reaches below the newest halves took them all. */
static void check_keep_all(const void *parameters)
{
    static const ends_row row = {TQKV_TQ4, TQKV_TQ3, 200, false, 0, 4, 4};
    int kept[150];
    ends e;
    (void)parameters;
    if (!ends_open(&e, &row, NULL)) return;
    for (int i = 0; i < 150; i++) kept[i] = i;
    for (int i = 0; i < 3; i++) ends_append(&e, 50);
    for (int n = 150; n > 100; n -= 49) { /* then all but the newest 49 */
        CHECK_RESULT(tqkv_cache_keep(e.cache, (int)tqkv_cache_end(e.cache), kept, n), TQKV_OK);
        CHECK_RESULT(ends_attend(&e, 1), TQKV_OK);
        CHECK(test_view(e.cache, 1).last.n == 4, "%d newest positions", test_view(e.cache, 1).last.n);
    }
    ends_close(&e);
}

/* ---- Forks ---- */

/* A ring keeps its first positions whatever its newest ones are: no copy has less room than these take. */
static void check_fork_below_first(const void *parameters)
{
    static const ends_row row = {TQKV_TQ4, TQKV_TQ4, 100, true, 0, 60, 30};
    tqkv_cache_desc desc;
    ends e;
    (void)parameters;
    if (!ends_open(&e, &row, NULL)) return;
    ends_append(&e, 200);
    CHECK_RESULT(tqkv_cache_keep(e.cache, 100, NULL, 0), TQKV_OK);
    memset(&desc, 0, sizeof desc);
    for (desc.capacity = 59; desc.capacity < 61; desc.capacity++) {
        tqkv_cache *copy = NULL;
        CHECK_RESULT(tqkv_cache_fork(e.cache, &desc, &copy), desc.capacity < 60 ? TQKV_OUT_OF_RANGE : TQKV_OK);
        CHECK(!copy || test_view(copy, 1).first.n == test_view(e.cache, 1).first.n, "other positions");
        tqkv_cache_destroy(copy);
    }
    ends_close(&e);
}

/* Forks a cache of halves into one of codes. */
static tqkv_cache *fork_to_codes(const ends *e, counting *counter)
{
    tqkv_cache_desc desc;
    tqkv_cache *copy = NULL;
    memset(&desc, 0, sizeof desc);
    desc.key_format = desc.value_format = TQKV_TQ4;
    if (counter) desc.allocator = counting_allocator(counter);
    CHECK_RESULT(tqkv_cache_fork(e->cache, &desc, &copy), TQKV_OK);
    return copy;
}

/* A cache of halves goes on in codes: its halves are those of its newest and first rows. */
static void check_fork_from_f16(const void *parameters)
{
    static const ends_row row = {TQKV_F16, TQKV_F16, 200, true, 0, 4, 64};
    ends e;
    (void)parameters;
    if (!ends_open(&e, &row, NULL)) return;
    ends_append(&e, 150);
    CHECK(!test_view(e.cache, 1).last.keys, "halves of halves");
    tqkv_cache *copy = fork_to_codes(&e, NULL);
    REQUIRE(copy, "no fork");
    const tqkv_attention a = test_view(copy, 1);
    CHECK(a.end == 150 && a.first.n == 4 && a.last.n == 64, "%d and %d positions", a.first.n, a.last.n);
    const size_t halves = 2 * CACHE_HEADS * 64 * 2 * (4 + 128), codes = 2 * CACHE_HEADS * (64 / 2 + 4) * 200;
    CHECK(tqkv_cache_bytes(copy) == halves + codes, "%d bytes", (int)tqkv_cache_bytes(copy));
    tqkv_cache_destroy(copy);
    ends_close(&e);
}

/* Halves of first positions that are gone from a ring of F16: no bytes of the allocator come into a snapshot. */
static void check_fork_from_f16_ring(const void *parameters)
{
    static const ends_row row = {TQKV_F16, TQKV_F16, 100, true, 0, 60, 30};
    counting counter = {0, 0, 0, 0, 0};
    ends e;
    (void)parameters;
    if (!ends_open(&e, &row, NULL)) return;
    ends_append(&e, 150);
    tqkv_cache *copies[2] = {fork_to_codes(&e, NULL), fork_to_codes(&e, &counter)};
    if (copies[0] && copies[1]) {
        stream a = stream_of_cache(copies[0]), b = stream_of_cache(copies[1]);
        CHECK(stream_is_equal(&a, &b), "two forks save other bytes");
        stream_free(&a);
        stream_free(&b);
    }
    for (int i = 0; i < 2; i++) tqkv_cache_destroy(copies[i]);
    ends_close(&e);
}

/* ---- What halves hold ---- */

/* Rows that halves cannot hold are refused where a cache keeps halves, and nothing is appended; as codes alone they are
 * as good as any. */
static void check_range(const void *parameters)
{
    enum { D = DIM, N = 20 };
    static const struct {
        float size;        /* of the row's one value that is not 0; 64 of an eighth of that when it is rotated */
        bool raw, rotated; /* halves hold it */
    } rows[] = {{1e-9f, false, false}, {7e-6f, false, false},  {8e-6f, true, false},    {7e-5f, true, true},
                {1.0f, true, true},    {65519.0f, true, true}, {65520.0f, false, true}, {6e5f, false, false},
                {1e30f, false, false}, {0.0f, true, true}};
    const int kind = *(const int *)parameters; /* 0: codes alone; 1: calibrate; 2: exact_first; 3: exact_last */
    for (int i = 0; i < (int)(sizeof rows / sizeof *rows); i++)
        for (int side = 0; side < 2; side++) {
            const cache_row row = {TQKV_I8, TQKV_TQ4, D, 100, false, 0, -1};
            tqkv_cache_desc desc = cache_desc(&row, NULL);
            tqkv_cache *cache = NULL;
            float *k = test_rows(1, DATA_GAUSSIAN, N * CACHE_HEADS, D), odd[CACHE_HEADS * D] = {0};
            for (int h = 0; h < CACHE_HEADS; h++) odd[h * D] = rows[i].size;
            desc.calibrate = kind == 1 ? 25 : 0;
            desc.exact_first = kind == 2 ? N + 1 : 0;
            desc.exact_last = kind == 3 ? 2 : 0;
            CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
            CHECK_RESULT(tqkv_cache_append(cache, k, k, N), TQKV_OK);
            stream before = stream_of_cache(cache);
            test_explained = "";
            const bool refused = kind && !(kind == 1 ? rows[i].raw : rows[i].rotated);
            CHECK_RESULT(tqkv_cache_append(cache, side ? k : odd, side ? odd : k, 1),
                         refused ? TQKV_NOT_FINITE : TQKV_OK);
            CHECK(!refused || strstr(test_explained, "halves"), "%g: %s", (double)rows[i].size, test_explained);
            stream after = stream_of_cache(cache);
            CHECK(stream_is_equal(&before, &after) == refused, "%g: %s", (double)rows[i].size,
                  refused ? "something was appended" : "nothing was");
            stream_free(&before);
            stream_free(&after);
            tqkv_cache_destroy(cache);
            free(k);
        }
}

/* A channel that hardly moves but for the first position, which is not learned from: the scale is so large that the
 * first position's halves hold it, and channels that share a scale still do. */
static void check_first_half(const void *parameters)
{
    (void)parameters;
    enum { D = DIM, N = 41 }; /* the last row gives the halves of the others back */
    const cache_row row = {TQKV_I8, TQKV_TQ4, D, 200, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    tqkv_cache *cache = NULL;
    float *k = test_rows(1, DATA_GAUSSIAN, N * CACHE_HEADS, D), found[CACHE_HEADS * D];
    for (int t = 0; t < N; t++) k[t * CACHE_HEADS * D] = t ? 1.0f : 6e4f;
    desc.calibrate = 40;
    desc.exact_first = 4;
    desc.pairs = TQKV_PAIRS_HALVES;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    for (int t = 0; t < N; t++)
        CHECK_RESULT(tqkv_cache_append(cache, k + t * CACHE_HEADS * D, k + t * CACHE_HEADS * D, 1), TQKV_OK);
    const tqkv_attention view = test_view(cache, 1);
    const float *scale = test_keys(cache)->channel_scale;
    REQUIRE(scale && view.first.keys, "nothing was learned");
    for (int i = 0; i < CACHE_HEADS * D; i++)
        CHECK(scale[i] == scale[i / D * D + (i + D / 2) % D], "channel %d has a scale of its own", i);
    CHECK_RESULT(tqkv_decode(view.first.keys, 0, 1, TQKV_ORIGINAL, found), TQKV_OK);
    CHECK(fabsf(found[0] - 6e4f) < 60.0f, "%g", (double)found[0]);
    tqkv_cache_destroy(cache);
    free(k);
}

void test_ends_cases(void)
{
    test_add(check_memory, NULL, 0, "ends/memory");
    test_add(check_overlaps, NULL, 0, "ends/overlaps");
    test_add(check_too_many, NULL, 0, "ends/too_many");
    test_add(check_lost_windows, NULL, 0, "ends/lost_windows");
    test_add(check_remains, NULL, 0, "ends/remains");
    test_add(check_keep_all, NULL, 0, "ends/keep_all");
    test_add(check_fork_below_first, NULL, 0, "ends/fork_below_first");
    test_add(check_fork_from_f16, NULL, 0, "ends/fork_from_f16");
    test_add(check_fork_from_f16_ring, NULL, 0, "ends/fork_from_f16_ring");
    for (int i = 0; i < 4; i++) test_add(check_range, &i, sizeof i, "ends/range/%d", i);
    test_add(check_first_half, NULL, 0, "ends/first_half");
}

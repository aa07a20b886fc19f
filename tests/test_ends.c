/* Caches that keep their first and newest positions as halves, too: what remains of them after edits, in copies, and
 * over pages. Their bytes and bits: test_history.c and test_learn_history.c. */
#include "cache_fixture.h"

enum { MOST = 400 };

typedef struct ends_row {
    tqkv_format key_format, value_format;
    int head_dim, value_dim, capacity, exact_first, exact_last, tail_dim, window;
    bool ring, shared, center;
} ends_row;

/* A cache, and the number of the row that each position was appended with. */
typedef struct ends_model {
    tqkv_cache *cache;
    const ends_row *row;
    int key_dim, value_dim;
    float *k, *v; /* [MOST][CACHE_HEADS][key_dim], with value_dim */
    float *center;
    int rows[MOST], end, n_used;
} ends_model;

static tqkv_cache_desc describe(const ends_row *row)
{
    const cache_row plain = {row->key_format, row->value_format, row->head_dim, row->capacity, row->ring, 0, -1};
    tqkv_cache_desc desc = cache_desc(&plain, NULL);
    if (row->shared) desc.value_format = TQKV_FORMAT_DEFAULT;
    desc.value_dim = row->shared ? 0 : row->value_dim;
    desc.shared = row->shared;
    desc.tail_dim = row->tail_dim;
    desc.window = row->window;
    desc.exact_first = row->exact_first;
    desc.exact_last = row->exact_last;
    return desc;
}

static bool model_open(ends_model *m, const ends_row *row)
{
    tqkv_cache_desc desc = describe(row);
    memset(m, 0, sizeof *m);
    m->row = row;
    m->key_dim = row->head_dim + row->tail_dim;
    m->value_dim = row->value_dim && !row->shared ? row->value_dim : row->head_dim;
    m->k = test_rows(1, DATA_STUDENT, MOST * CACHE_HEADS, m->key_dim);
    m->v = test_rows(2, DATA_STUDENT, MOST * CACHE_HEADS, m->value_dim);
    m->center = test_rows(3, DATA_GAUSSIAN, CACHE_HEADS, m->key_dim > m->value_dim ? m->key_dim : m->value_dim);
    if (row->center) desc.key_center = m->center;
    if (row->center && !row->shared) desc.value_center = m->center;
    CHECK_RESULT(tqkv_cache_create(&desc, &m->cache), TQKV_OK);
    return m->cache != NULL;
}

static void model_close(ends_model *m)
{
    tqkv_cache_destroy(m->cache);
    free(m->k);
    free(m->v);
    free(m->center);
}

static void model_append(ends_model *m, int n)
{
    const float *k = m->k + m->n_used * CACHE_HEADS * m->key_dim, *v = m->v + m->n_used * CACHE_HEADS * m->value_dim;
    REQUIRE(m->n_used + n <= MOST, "too many tokens");
    CHECK_RESULT(tqkv_cache_append(m->cache, k, m->row->shared ? NULL : v, n), TQKV_OK);
    while (n-- > 0) m->rows[m->end++] = m->n_used++;
}

/* The halves of a position are those of the row that it was appended with. */
static void check_half(const ends_model *m, const tqkv_store *s, int side, int position)
{
    const int dim = side ? m->value_dim : m->key_dim, row = m->rows[position];
    for (int h = 0; h < CACHE_HEADS; h++) {
        uint8_t codes[2 * REFERENCE_MAX_DIM];
        float norms[1], scaled[REFERENCE_MAX_DIM];
        const float *source = (side ? m->v : m->k) + (row * CACHE_HEADS + h) * dim;
        reference_encode_row(s, h, source, codes, norms, scaled);
        CHECK(!memcmp(reference_codes_at(s, h, position), codes, 2 * (size_t)s->head_dim),
              "%s: position %d is not row %d", side ? "values" : "keys", position, row);
    }
}

static void check_halves(const ends_model *m)
{
    const tqkv_attention a = test_view(m->cache, 1);
    const tqkv_store *const stores[2][2] = {{a.first.keys, a.first.values}, {a.last.keys, a.last.values}};
    CHECK(a.end == m->end, "end is %d, not %d", (int)a.end, m->end);
    CHECK(a.first.n <= m->row->exact_first && a.last.n <= m->row->exact_last && a.first.n <= m->end &&
              a.last.n <= m->end,
          "%d and %d positions", a.first.n, a.last.n);
    for (int side = 0; side < (m->row->shared ? 1 : 2); side++) {
        for (int p = 0; stores[0][side] && p < a.first.n; p++) check_half(m, stores[0][side], side, p);
        for (int p = m->end - a.last.n; stores[1][side] && p < m->end; p++) check_half(m, stores[1][side], side, p);
    }
}

/* Returns how many of `asked` positions a cache has: no more than its capacity, or than were appended. */
static int at_most(const ends_model *m, int asked)
{
    if (asked > m->row->capacity) asked = m->row->capacity;
    return asked < m->end ? asked : m->end;
}

/* All that the end asks for are halves. */
static void check_all_there(const ends_model *m)
{
    const tqkv_attention a = test_view(m->cache, 1);
    CHECK(a.first.n == at_most(m, m->row->exact_first), "%d first positions", a.first.n);
    CHECK(a.last.n == at_most(m, m->row->exact_last), "%d newest positions", a.last.n);
}

static tqkv_cache *reloaded(const tqkv_cache *cache, const ends_row *row)
{
    tqkv_cache_desc desc;
    tqkv_cache *loaded = NULL;
    stream saved = stream_of_cache(cache);
    memset(&desc, 0, sizeof desc);
    desc.exact_last = row->exact_last;
    CHECK_RESULT(tqkv_cache_load(&desc, stream_read, &saved, &loaded), TQKV_OK);
    if (loaded) {
        stream again = stream_of_cache(loaded);
        CHECK(stream_is_equal(&saved, &again), "the loaded cache saves other bytes");
        stream_free(&again);
    }
    stream_free(&saved);
    return loaded;
}

static void model_remove(ends_model *m, int first, int count)
{
    CHECK_RESULT(tqkv_cache_remove(m->cache, first, count), TQKV_OK);
    memmove(m->rows + first, m->rows + first + count, (size_t)(m->end - first - count) * sizeof *m->rows);
    m->end -= count;
}

static void model_fork(ends_model *m, bool load)
{
    tqkv_cache *copy = NULL;
    if (load)
        copy = reloaded(m->cache, m->row);
    else
        CHECK_RESULT(tqkv_cache_fork(m->cache, NULL, &copy), TQKV_OK);
    if (!copy) return;
    tqkv_cache_destroy(m->cache);
    m->cache = copy;
}

/* What remains of the halves where it can: a part of the middle removed, the newest taken back by few. The same in the
 * cache itself, in one loaded and in a fork. */
static void check_remains(const void *parameters)
{
    static const ends_row row = {TQKV_TQ4, TQKV_TQ3, 64, 0, 200, 4, 40, 0, 0, false, false, false};
    const int way = *(const int *)parameters;
    ends_model m;
    if (!model_open(&m, &row)) return;
    model_append(&m, 190);
    model_remove(&m, 4, 100);
    check_all_there(&m);
    if (way) model_fork(&m, way == 1);
    CHECK_RESULT(tqkv_cache_truncate(m.cache, m.end -= 20), TQKV_OK); /* the ring has 88 more than it must */
    check_all_there(&m);
    model_remove(&m, m.end - 10, 5);
    check_halves(&m);
    CHECK(test_view(m.cache, 1).last.n == 40, "%d newest positions", test_view(m.cache, 1).last.n);
    model_append(&m, 1);
    check_all_there(&m);
    model_remove(&m, 2, 1);
    CHECK(test_view(m.cache, 1).first.n == 3, "%d first positions", test_view(m.cache, 1).first.n);
    model_append(&m, 130);
    model_append(&m, 1);
    model_remove(&m, 10, 140); /* more than the ring has */
    check_halves(&m);
    CHECK(test_view(m.cache, 1).last.n == 40, "%d newest positions", test_view(m.cache, 1).last.n);
    CHECK_RESULT(tqkv_cache_truncate(m.cache, m.end = 5), TQKV_OK); /* all that the ring held is gone */
    model_append(&m, 10);
    check_halves(&m);
    model_remove(&m, 1, 2); /* before what is halves */
    check_halves(&m);
    CHECK(test_view(m.cache, 1).last.n == 10, "%d newest positions", test_view(m.cache, 1).last.n);
    model_close(&m);
}

/* Of drafts that begin among the first positions some are kept, also the one behind these: only those before it
 * have halves as first ones, all as newest ones. */
static void check_keep_first(const void *parameters)
{
    static const ends_row row = {TQKV_TQ4, TQKV_TQ3, 64, 0, 200, 4, 40, 0, 0, false, false, false};
    static const int kept[4] = {0, 2, 4, 5};
    ends_model m;
    (void)parameters;
    if (!model_open(&m, &row)) return;
    model_append(&m, 8);
    CHECK_RESULT(tqkv_cache_keep(m.cache, 8, kept, 4), TQKV_OK);
    for (int i = 0; i < 4; i++) m.rows[i] = m.rows[kept[i]];
    m.end = 4;
    check_halves(&m);
    const tqkv_attention a = test_view(m.cache, 1);
    CHECK(a.first.n == 2 && a.last.n == 4, "%d first and %d newest positions", a.first.n, a.last.n);
    model_close(&m);
}

/* A ring keeps its first positions whatever its newest ones are: no copy has less room than these take. */
static void check_fork_below_first(const void *parameters)
{
    static const ends_row row = {TQKV_TQ4, TQKV_TQ4, 64, 0, 100, 60, 30, 0, 0, true, false, false};
    tqkv_cache_desc desc;
    ends_model m;
    (void)parameters;
    if (!model_open(&m, &row)) return;
    model_append(&m, 200);
    CHECK_RESULT(tqkv_cache_keep(m.cache, 100, NULL, 0), TQKV_OK);
    memset(&desc, 0, sizeof desc);
    for (desc.capacity = 59; desc.capacity < 61; desc.capacity++) {
        tqkv_cache *copy = NULL;
        CHECK_RESULT(tqkv_cache_fork(m.cache, &desc, &copy), desc.capacity < 60 ? TQKV_OUT_OF_RANGE : TQKV_OK);
        CHECK(!copy || test_view(copy, 1).first.n == test_view(m.cache, 1).first.n, "other positions");
        tqkv_cache_destroy(copy);
    }
    model_close(&m);
}

/* A cache of halves goes on in codes: its halves are those of its newest and first rows. */
static void check_fork_from_f16(const void *parameters)
{
    static const ends_row row = {TQKV_F16, TQKV_F16, 64, 0, 200, 4, 64, 0, 0, true, false, false};
    ends_model m;
    tqkv_cache_desc desc;
    tqkv_cache *copy = NULL;
    (void)parameters;
    if (!model_open(&m, &row)) return;
    model_append(&m, 150);
    CHECK(!test_view(m.cache, 1).last.keys, "halves of halves");
    memset(&desc, 0, sizeof desc);
    desc.key_format = desc.value_format = TQKV_TQ4;
    CHECK_RESULT(tqkv_cache_fork(m.cache, &desc, &copy), TQKV_OK);
    tqkv_cache_destroy(m.cache);
    m.cache = copy;
    REQUIRE(copy, "no fork");
    check_all_there(&m);
    const size_t ends = 2 * CACHE_HEADS * 64 * 2 * (4 + 128), codes = 2 * CACHE_HEADS * (64 / 2 + 4) * 200;
    CHECK(tqkv_cache_bytes(copy) == ends + codes, "%d bytes", (int)tqkv_cache_bytes(copy));
    model_close(&m);
}

/* Halves of first positions that are gone from a ring of F16: no bytes of the allocator come into a snapshot. */
static void check_fork_from_f16_ring(const void *parameters)
{
    static const ends_row row = {TQKV_F16, TQKV_F16, 64, 0, 100, 60, 30, 0, 0, true, false, false};
    counting counter = {0, 0, 0, 0, 0};
    ends_model m;
    tqkv_cache_desc desc;
    tqkv_cache *copies[2] = {NULL, NULL};
    (void)parameters;
    if (!model_open(&m, &row)) return;
    model_append(&m, 150);
    memset(&desc, 0, sizeof desc);
    desc.key_format = desc.value_format = TQKV_TQ4;
    for (int i = 0; i < 2; i++) {
        if (i) desc.allocator = counting_allocator(&counter);
        CHECK_RESULT(tqkv_cache_fork(m.cache, &desc, &copies[i]), TQKV_OK);
    }
    if (copies[0] && copies[1]) {
        stream a = stream_of_cache(copies[0]), b = stream_of_cache(copies[1]);
        CHECK(stream_is_equal(&a, &b), "two forks save other bytes");
        stream_free(&a);
        stream_free(&b);
    }
    for (int i = 0; i < 2; i++) tqkv_cache_destroy(copies[i]);
    model_close(&m);
}

/* Rows that halves cannot hold are refused where a cache keeps halves, and nothing is appended; as codes alone they are
 * as good as any. */
static void check_range(const void *parameters)
{
    enum { D = 64, N = 20 };
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
    enum { D = 64, N = 41 }; /* the last row gives the halves of the others back */
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
    for (int i = 0; i < 4; i++) test_add(check_range, &i, sizeof i, "ends/range/%d", i);
    test_add(check_first_half, NULL, 0, "ends/first_half");
    static const char *const ways[3] = {"as_it_is", "loaded", "forked"};
    for (int way = 0; way < 3; way++) test_add(check_remains, &way, sizeof way, "ends/remains/%s", ways[way]);
    test_add(check_keep_first, NULL, 0, "ends/keep_first");
    test_add(check_fork_below_first, NULL, 0, "ends/fork_below_first");
    test_add(check_fork_from_f16, NULL, 0, "ends/fork_from_f16");
    test_add(check_fork_from_f16_ring, NULL, 0, "ends/fork_from_f16_ring");
}

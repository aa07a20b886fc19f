/* Caches that learn centre and scale of their keys from their first positions: every query against a cache of halves or
 * a cache with that centre and scale; chunks, edits, copies and snapshots change nothing; memory and its lack. */
#include "cache_fixture.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { MOST = 230, HEADS = CACHE_HEADS * CACHE_GROUP };

typedef struct learn_row {
    tqkv_format key_format, value_format;
    int head_dim, value_dim, capacity, calibrate, learns_at; /* learns_at: what calibrate comes to */
    int exact_first, exact_last, tail_dim, window, tokens;
    bool ring, shared, non_causal, threads, layout;
    tqkv_type type;
    int repeat; /* only every so many positions is new; 0: all */
    tqkv_pairs pairs;
} learn_row;

typedef struct learn_model {
    const learn_row *row;
    int key_dim, value_dim;
    float *k, *v, *q;            /* [MOST][heads][dim]; as the type holds them */
    bool few;                    /* positions are new: all count, and no scale is below 1/2 */
    void *typed[3];              /* the same in the type, or NULL */
    float *halves[2], *channels; /* of the first rows as halves hold them; centre and scale, or NULL */
    float *expected;             /* [MOST][HEADS][value_dim]: of each position's query, alone */
    tqkv_cache *plain, *raw;     /* with centre and scale, and of halves */
} learn_model;

static void run_backwards(void *user, int count, tqkv_task task, void *context)
{
    (void)user;
    for (int i = count - 1; i >= 0; i--) task(context, i);
}

static tqkv_cache_desc describe(const learn_row *row)
{
    const cache_row plain = {row->key_format, row->value_format, row->head_dim, row->capacity, row->ring, 0, -1};
    tqkv_cache_desc desc = cache_desc(&plain, NULL);
    desc.value_dim = row->shared ? 0 : row->value_dim;
    if (row->shared) desc.value_format = TQKV_FORMAT_DEFAULT;
    desc.shared = row->shared;
    desc.tail_dim = row->tail_dim;
    desc.tail_format = row->tail_dim ? TQKV_TQ6 : TQKV_FORMAT_DEFAULT;
    desc.window = row->window;
    desc.exact_first = row->exact_first;
    desc.exact_last = row->exact_last;
    desc.calibrate = row->calibrate;
    desc.pairs = row->pairs;
    desc.type = row->type;
    desc.non_causal = row->non_causal;
    if (row->threads) desc.parallel.run = run_backwards;
    return desc;
}

static size_t value_size(const learn_row *row) { return row->type == TQKV_TYPE_F32 ? 4 : 2; }

/* Row t of k, v (1) or q (2), of the type. */
static const void *row_at(const learn_model *m, int which, int t)
{
    const int dim = which == 1 ? m->value_dim : m->key_dim, heads = which == 2 ? HEADS : CACHE_HEADS;
    const void *rows = m->typed[which] ? m->typed[which] : which == 0 ? m->k : which == 1 ? m->v : m->q;
    return (const char *)rows + (size_t)(t * heads * dim) * value_size(m->row);
}

static void append(const learn_model *m, tqkv_cache *cache, int t, int n)
{
    CHECK_RESULT(tqkv_cache_append(cache, row_at(m, 0, t), m->row->shared ? NULL : row_at(m, 1, t), n), TQKV_OK);
}

/* Rows whose channels differ in size, with a constant part. */
static float *make_rows(uint64_t seed, int heads, int dim)
{
    float *rows = test_rows(seed, DATA_STUDENT, MOST * heads, dim), *sizes = test_scales(seed + 1, heads, dim, 8.0);
    for (int i = 0; i < MOST * heads * dim; i++) rows[i] = (rows[i] + (float)(i % 5)) * sizes[i % (heads * dim)];
    free(sizes);
    return rows;
}

static void *typed_rows(tqkv_type type, float *rows, int n)
{
    if (type == TQKV_TYPE_F32) return NULL;
    uint16_t *typed = (uint16_t *)test_alloc((size_t)n * sizeof *typed);
    for (int i = 0; i < n; i++) {
        typed[i] = reference_narrow(type, rows[i]);
        rows[i] = (float)reference_wide(type, typed[i]);
    }
    return typed;
}

/* As floats what halves hold of n rows. */
static float *as_halves(const float *rows, int n)
{
    float *halves = (float *)test_alloc((size_t)n * sizeof *halves);
    for (int i = 0; i < n; i++) halves[i] = (float)reference_half_value(reference_half(rows[i]));
    return halves;
}

/* Whether a position of the model is new. */
static bool is_new(const learn_row *row, int t) { return !row->repeat || t % row->repeat == 0; }

/* Lets the values of positions that are not new be nearly those of the position before. */
static void repeat_rows(const learn_model *m)
{
    const int n = CACHE_HEADS * (m->row->shared ? m->key_dim : m->value_dim);
    float *rows = m->row->shared ? m->k : m->v;
    for (int t = 1; t < MOST; t++)
        for (int i = 0; i < n && !is_new(m->row, t); i++)
            rows[t * n + i] = rows[(t - 1) * n + i] * (i % 3 ? 1.0f : 1.25f);
}

/* Moves the rows of [first, end) that count together; their number. */
static int gather_rows(const learn_model *m, float *rows, int each, int first, int end)
{
    int n = 0;
    for (int t = first; t < end; t++)
        if (m->few || is_new(m->row, t)) memmove(rows + n++ * each, rows + t * each, (size_t)each * sizeof *rows);
    return n;
}

/* Centre and scale that the first positions give, and what their halves hold. */
static void learn(learn_model *m)
{
    const learn_row *row = m->row;
    const int n = row->learns_at, d = row->head_dim, each = CACHE_HEADS * d, key_row = CACHE_HEADS * m->key_dim;
    int from = 0, all = 0;
    for (int t = 0; t < n; t++) all += is_new(row, t);
    for (int t = row->exact_first; t < n; t++) from += is_new(row, t);
    const int half = n / 2;
    m->few = all < (half > 64 ? 64 : half > 16 ? half : 16);
    const int first = (m->few ? n - row->exact_first : from) >= 16 ? row->exact_first : 0;
    tqkv_store shape = test_store(TQKV_I8, d, CACHE_HEADS, 1, false);
    m->halves[0] = as_halves(m->k, n * CACHE_HEADS * m->key_dim);
    m->halves[1] = as_halves(m->v, n * CACHE_HEADS * m->value_dim);
    m->channels = (float *)test_alloc(2 * sizeof(float) * (size_t)each);
    shape.strides.token = (size_t)key_row;
    shape.strides.head = (size_t)m->key_dim;
    float *kept = as_halves(m->k, n * key_row);
    CHECK_RESULT(tqkv_calibrate(&shape, kept, gather_rows(m, kept, key_row, first, n), NULL, 0, 0, row->pairs,
                                m->channels, m->channels + each),
                 TQKV_OK);
    for (int i = each; m->few && i < 2 * each; i++) m->channels[i] = m->channels[i] > 0.5f ? m->channels[i] : 0.5f;
    free(kept);
    test_store_free(&shape);
}

/* The cache with centre and scale that the other one should become; a tail has neither. */
static tqkv_cache *make_plain(const learn_model *m)
{
    tqkv_cache_desc desc = describe(m->row);
    const int d = m->row->head_dim, key_dim = m->key_dim;
    float *center = (float *)test_alloc(sizeof(float) * (size_t)(CACHE_HEADS * key_dim));
    float *scale = (float *)test_alloc(sizeof(float) * (size_t)(CACHE_HEADS * key_dim));
    for (int i = 0; i < CACHE_HEADS * key_dim; i++) {
        const int at = i / key_dim * d + i % key_dim;
        center[i] = i % key_dim < d ? m->channels[at] : 0.0f;
        scale[i] = i % key_dim < d ? m->channels[CACHE_HEADS * d + at] : 1.0f;
    }
    desc.calibrate = 0;
    tqkv_cache *cache = cache_given(&desc, center, scale, NULL, NULL);
    free(center);
    free(scale);
    return cache;
}

/* Appends row t to the plain cache: as a half if it was one. */
static void append_plain(const learn_model *m, tqkv_cache *plain, int t)
{
    const int k = t * CACHE_HEADS * m->key_dim, v = t * CACHE_HEADS * m->value_dim, tail = m->row->tail_dim;
    const bool half = t < m->row->learns_at && m->row->type != TQKV_TYPE_F16;
    if (!half) {
        append(m, plain, t, 1);
        return;
    }
    float keys[CACHE_HEADS * (REFERENCE_MAX_DIM + 64)], values[CACHE_HEADS * REFERENCE_MAX_DIM];
    void *rows[2] = {keys, values};
    memcpy(keys, m->halves[0] + k, sizeof(float) * (size_t)(CACHE_HEADS * m->key_dim));
    memcpy(values, m->halves[1] + v, sizeof(float) * (size_t)(CACHE_HEADS * m->value_dim));
    for (int i = 0; i < CACHE_HEADS * m->key_dim; i++) /* a tail is not kept as halves */
        if (tail && i % m->key_dim >= m->row->head_dim) keys[i] = m->k[k + i];
    if (m->row->type ==
        TQKV_TYPE_BF16) { /* every half of the test data is a bfloat16 before it is rounded: halves are the same */
        append(m, plain, t, 1);
        return;
    }
    CHECK_RESULT(tqkv_cache_append(plain, rows[0], m->row->shared ? NULL : rows[1], 1), TQKV_OK);
}

/* What each position's query must give, by caches that hold one position after the other. */
static void expect(learn_model *m)
{
    tqkv_cache_desc desc = describe(m->row);
    desc.calibrate = desc.exact_first = desc.exact_last = 0;
    desc.key_format = desc.value_format = TQKV_F16;
    if (m->row->shared) desc.value_format = TQKV_FORMAT_DEFAULT;
    CHECK_RESULT(tqkv_cache_create(&desc, &m->raw), TQKV_OK);
    m->plain = make_plain(m);
    const size_t size = (size_t)(HEADS * m->value_dim) * value_size(m->row);
    m->expected = (float *)test_alloc((size_t)MOST * size);
    for (int t = 0; t < m->row->tokens; t++) {
        if (t < m->row->learns_at) append(m, m->raw, t, 1);
        append_plain(m, m->plain, t);
        CHECK_RESULT(tqkv_cache_attend(t < m->row->learns_at ? m->raw : m->plain, row_at(m, 2, t), 1,
                                       (char *)m->expected + (size_t)t * size),
                     TQKV_OK);
    }
}

static void model_open(learn_model *m, const learn_row *row)
{
    memset(m, 0, sizeof *m);
    m->row = row;
    m->key_dim = row->head_dim + row->tail_dim;
    m->value_dim = row->value_dim && !row->shared ? row->value_dim : row->head_dim;
    m->k = make_rows(1, CACHE_HEADS, m->key_dim);
    m->v = make_rows(2, CACHE_HEADS, m->value_dim);
    m->q = test_rows(3, DATA_GAUSSIAN, MOST * HEADS, m->key_dim);
    for (int i = 0; i < MOST * HEADS * m->key_dim; i++) m->q[i] *= 0.3f;
    repeat_rows(m);
    m->typed[0] = typed_rows(row->type, m->k, MOST * CACHE_HEADS * m->key_dim);
    m->typed[1] = typed_rows(row->type, m->v, MOST * CACHE_HEADS * m->value_dim);
    m->typed[2] = typed_rows(row->type, m->q, MOST * HEADS * m->key_dim);
    learn(m);
    expect(m);
}

static void model_close(learn_model *m)
{
    tqkv_cache_destroy(m->plain);
    tqkv_cache_destroy(m->raw);
    for (int i = 0; i < 3; i++) free(m->typed[i]);
    for (int i = 0; i < 2; i++) free(m->halves[i]);
    free(m->k);
    free(m->v);
    free(m->q);
    free(m->channels);
    free(m->expected);
}

/* Codes and norms of all resident positions are those of the other cache. */
static void check_codes(const tqkv_store *a, const tqkv_store *b, int64_t first, int64_t end, const char *what)
{
    const size_t codes = reference_row_bytes(a->format, a->head_dim);
    const size_t norms = sizeof(float) * (size_t)reference_norms_per_row(a->format, a->head_dim);
    for (int64_t p = first; p < end; p++)
        for (int h = 0; h < a->n_kv_heads; h++) {
            CHECK(!memcmp(reference_codes_at(a, h, p), reference_codes_at(b, h, p), codes), "%s: codes of %d", what,
                  (int)p);
            CHECK(!norms || !memcmp(reference_norms_at(a, h, p), reference_norms_at(b, h, p), norms), "%s: norms of %d",
                  what, (int)p);
        }
}

/* A cache that has appended all tokens is the plain one. */
static void check_settled(const learn_model *m, const tqkv_cache *cache)
{
    const int n = CACHE_HEADS * m->row->head_dim;
    const tqkv_store *keys = test_keys(cache);
    const int64_t first = test_first(cache), end = tqkv_cache_end(cache);
    REQUIRE(keys->center && keys->channel_scale, "nothing was learned");
    CHECK(!memcmp(keys->center, m->channels, sizeof(float) * (size_t)n), "another centre");
    CHECK(!memcmp(keys->channel_scale, m->channels + n, sizeof(float) * (size_t)n), "another scale");
    CHECK(end == tqkv_cache_end(m->plain) && first == test_first(m->plain), "other positions");
    check_codes(keys, test_keys(m->plain), first, end, "keys");
    check_codes(test_values(cache), test_values(m->plain), first, end, "values");
    if (m->row->tail_dim) check_codes(test_tail(cache), test_tail(m->plain), first, end, "tail");
}

/* The queries of the newest n positions, all in one call. */
static void check_queries(const learn_model *m, tqkv_cache *cache, int end, int n, const char *what)
{
    const size_t size = (size_t)(HEADS * m->value_dim) * value_size(m->row);
    char *out = (char *)test_alloc_filled((size_t)n * size, 0xa5);
    CHECK_RESULT(tqkv_cache_attend(cache, row_at(m, 2, end - n), n, out), TQKV_OK);
    for (int i = 0; i < n; i++)
        CHECK(!memcmp(out + (size_t)i * size, (const char *)m->expected + (size_t)(end - n + i) * size, size),
              "%s: query %d of %d, at %d", what, i, n, end - n + i);
    free(out);
}

/* A view attends like a query of the cache. */
static void check_view(const learn_model *m, const tqkv_cache *cache, int end)
{
    const size_t size = (size_t)(HEADS * m->value_dim) * value_size(m->row);
    tqkv_attention view = test_view(cache, 1);
    char *out = (char *)test_alloc(size);
    CHECK_RESULT(tqkv_attend(&view, row_at(m, 2, end - 1), out), TQKV_OK);
    CHECK(!memcmp(out, (const char *)m->expected + (size_t)(end - 1) * size, size), "the view at %d", end);
    free(out);
}

static const int chunkings[6][8] = {{1}, {MOST}, {7, 40, 1, 90}, {31, 1, 1, 3}, {50, 3, 64}, {64, 64}};

static void check_chunks(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    learn_model m;
    model_open(&m, row);
    for (int c = 0; c < 6; c++) {
        const tqkv_cache_desc desc = describe(row);
        tqkv_cache *cache = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        for (int end = 0, i = 0, n; end < row->tokens; end += n, i = chunkings[c][i + 1] ? i + 1 : 0) {
            n = chunkings[c][i] < row->tokens - end ? chunkings[c][i] : row->tokens - end;
            /* a ring finds its whole window only in pieces of so many tokens */
            if (row->ring && row->window && n > row->capacity - row->window + 1) n = row->capacity - row->window + 1;
            if (row->ring && !row->window) n = 1;
            append(&m, cache, end, n);
            check_queries(&m, cache, end + n, n, "all at once");
            if (n > 2) check_queries(&m, cache, end + n, n / 2, "some");
            check_view(&m, cache, end + n);
        }
        check_settled(&m, cache);
        tqkv_cache_destroy(cache);
    }
    model_close(&m);
}

/* ---- Copies on the way ---- */

static tqkv_cache *reloaded(const learn_row *row, const tqkv_cache *cache)
{
    const tqkv_cache_desc desc = describe(row);
    tqkv_cache *copy = NULL;
    stream s = stream_of_cache(cache);
    CHECK_RESULT(tqkv_cache_load(&desc, stream_read, &s, &copy), TQKV_OK);
    if (copy) {
        stream again = stream_of_cache(copy);
        CHECK(stream_is_equal(&s, &again), "another snapshot after loading");
        stream_free(&again);
    }
    stream_free(&s);
    return copy;
}

/* Copied or saved and loaded at any moment, the cache goes on as if nothing had been. */
static void check_copies(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    learn_model m;
    model_open(&m, row);
    for (int loads = 0; loads < 2; loads++) {
        const tqkv_cache_desc desc = describe(row);
        tqkv_cache *cache = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        for (int end = 0; cache && end < row->tokens; end++) {
            append(&m, cache, end, 1);
            check_queries(&m, cache, end + 1, 1, "before a copy");
            if (end % 9 && end != row->learns_at - 1) continue;
            tqkv_cache *copy = NULL;
            if (loads)
                copy = reloaded(row, cache);
            else
                CHECK_RESULT(tqkv_cache_fork(cache, NULL, &copy), TQKV_OK);
            tqkv_cache_destroy(cache);
            cache = copy;
        }
        if (cache) check_settled(&m, cache);
        tqkv_cache_destroy(cache);
    }
    model_close(&m);
}

/* ---- Edits on the way ---- */

typedef enum edit { EDIT_TRUNCATE, EDIT_REMOVE, EDIT_KEEP, EDITS } edit;

/* Rows that are not to stay are appended and taken away before the cache learns;
 * a truncation after it undoes nothing. */
static void check_edits(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    learn_model m;
    model_open(&m, row);
    for (int how = 0; how < EDITS; how++) {
        const tqkv_cache_desc desc = describe(row);
        tqkv_cache *cache = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        append(&m, cache, 0, 5);
        append(&m, cache, 100, 4);
        append(&m, cache, 5, how == EDIT_TRUNCATE ? 1 : 2);
        if (how == EDIT_TRUNCATE) CHECK_RESULT(tqkv_cache_truncate(cache, 5), TQKV_OK);
        if (how == EDIT_REMOVE) CHECK_RESULT(tqkv_cache_remove(cache, 5, 4), row->ring ? TQKV_UNSUPPORTED : TQKV_OK);
        if (how == EDIT_KEEP || (how == EDIT_REMOVE && row->ring)) {
            CHECK_RESULT(tqkv_cache_truncate(cache, 9), TQKV_OK);
            append(&m, cache, 5, 2);
            const int newest[2] = {4, 5};
            CHECK_RESULT(tqkv_cache_keep(cache, 6, newest, 2), TQKV_OK);
        }
        const int end = (int)tqkv_cache_end(cache);
        check_queries(&m, cache, end, 2, "after an edit");
        for (int t = end; t < row->tokens; t++) append(&m, cache, t, 1);
        check_settled(&m, cache);
        if (!row->ring) {
            CHECK_RESULT(tqkv_cache_truncate(cache, row->learns_at / 2), TQKV_OK);
            CHECK(test_keys(cache)->channel_scale, "a truncation forgets the scale");
            for (int t = row->learns_at / 2; t < row->tokens; t++) append(&m, cache, t, 1);
            CHECK_RESULT(tqkv_cache_truncate(cache, 0), TQKV_OK);
            CHECK(!test_keys(cache)->channel_scale, "an empty cache remembers the scale");
            for (int t = 0; t < row->tokens; t++) append(&m, cache, t, 1);
            check_settled(&m, cache);
            check_queries(&m, cache, row->tokens, 1, "after another beginning");
        }
        tqkv_cache_destroy(cache);
    }
    model_close(&m);
}

/* ---- Drafts ---- */

enum { DRAFTS = 6 };

/* Appends drafts whose rows are those of other positions, but for the right ones: t + i in the place kept[i]. */
static void append_drafts(const learn_model *m, tqkv_cache *cache, int t, const int *kept, int n_kept)
{
    const size_t rows[2] = {(size_t)(CACHE_HEADS * m->key_dim) * value_size(m->row),
                            (size_t)(CACHE_HEADS * m->value_dim) * value_size(m->row)};
    char *drafts[2];
    for (int which = 0; which < 2; which++) {
        drafts[which] = (char *)test_alloc(DRAFTS * rows[which]);
        memcpy(drafts[which], row_at(m, which, MOST - DRAFTS), DRAFTS * rows[which]);
        for (int i = 0; i < n_kept; i++)
            memcpy(drafts[which] + (size_t)kept[i] * rows[which], row_at(m, which, t + i), rows[which]);
    }
    CHECK_RESULT(tqkv_cache_append(cache, drafts[0], drafts[1], DRAFTS), TQKV_OK);
    for (int which = 0; which < 2; which++) free(drafts[which]);
}

/* Drafts that the cache would learn from, attended to and taken back, leave no trace: by truncation, or of a tree whose
 * path stays. */
static void check_drafts(const void *parameters)
{
    static const int paths[4][3] = {{0, 1, 2}, {0, 2, 5}, {1, 3, 4}, {5, 0, 0}};
    const learn_row *row = (const learn_row *)parameters;
    const tqkv_cache_desc desc = describe(row);
    learn_model m;
    model_open(&m, row);
    float *out = (float *)test_alloc(DRAFTS * sizeof(float) * (size_t)(HEADS * m.value_dim));
    for (int t = row->learns_at - DRAFTS - 1; t <= row->learns_at + 1; t++)
        for (int way = 0; way < 8; way++) {
            const int *path = paths[way % 4], n_kept = way < 4 ? way : way < 7 ? 3 : 1;
            tqkv_cache *cache = NULL;
            CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
            append(&m, cache, 0, t);
            append_drafts(&m, cache, t, way < 4 ? paths[0] : path, n_kept);
            CHECK_RESULT(tqkv_cache_attend(cache, row_at(&m, 2, t), DRAFTS, out), TQKV_OK);
            CHECK_RESULT(way < 4 ? tqkv_cache_truncate(cache, t + n_kept)
                                 : tqkv_cache_keep(cache, DRAFTS, path, n_kept),
                         TQKV_OK);
            if (t + n_kept > 0 && n_kept) check_queries(&m, cache, t + n_kept, 1, "after the drafts");
            for (int p = t + n_kept; p < row->tokens; p++) {
                append(&m, cache, p, 1);
                check_queries(&m, cache, p + 1, 1, "behind drafts");
            }
            check_settled(&m, cache);
            tqkv_cache_destroy(cache);
        }
    free(out);
    model_close(&m);
}

/* A copy made between the append that learns and its queries has no halves for them, and says so; from the next append
 * on it is as good as the cache. */
static void check_copy_before_queries(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    const tqkv_cache_desc desc = describe(row);
    const int before = row->learns_at - 5, n = 9;
    learn_model m;
    model_open(&m, row);
    float *out = (float *)test_alloc((size_t)n * sizeof(float) * (size_t)(HEADS * m.value_dim));
    for (int loads = 0; loads < 2; loads++) {
        tqkv_cache *cache = NULL, *copy = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        append(&m, cache, 0, before);
        append(&m, cache, before, n);
        if (loads)
            copy = reloaded(row, cache);
        else
            CHECK_RESULT(tqkv_cache_fork(cache, NULL, &copy), TQKV_OK);
        REQUIRE(copy, "no copy");
        test_explained = NULL;
        CHECK_RESULT(tqkv_cache_attend(copy, row_at(&m, 2, before), n, out), TQKV_OUT_OF_RANGE);
        CHECK(test_explained && strstr(test_explained, "copy"), "no text");
        check_queries(&m, copy, before + n, n - 5, "of a copy, behind");
        check_queries(&m, cache, before + n, n, "of the cache");
        CHECK_RESULT(tqkv_cache_truncate(copy, before + 5), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(copy, row_at(&m, 2, before), 1, out), TQKV_OUT_OF_RANGE);
        const tqkv_attention view = test_view(copy, 1);
        CHECK(!view.keys, "a view of what is not there");
        for (int p = before + 5; p < row->tokens; p++) {
            append(&m, copy, p, 1);
            if (!row->exact_last) check_queries(&m, copy, p + 1, 1, "of a copy that goes on");
        }
        check_settled(&m, copy);
        tqkv_cache_destroy(copy);
        tqkv_cache_destroy(cache);
    }
    free(out);
    model_close(&m);
}

/* ---- Trees ---- */

/* Queries of a tree read halves or codes; on both sides of the position there is no view of them. */
static void check_tree(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    enum { N = 6 };
    static const uint64_t tree[N] = {1, 3, 5, 11, 19, 37};
    const size_t size = sizeof(float) * (size_t)(HEADS * row->head_dim);
    learn_model m;
    model_open(&m, row);
    const tqkv_cache_desc desc = describe(row);
    for (int before = 0; before <= N; before++) {
        const int end = row->learns_at + N - before;
        tqkv_cache *caches[3] = {NULL, NULL, NULL}; /* which learns, of halves, with the scale */
        float *out[3];
        tqkv_attention some;
        memset(&some, 0, sizeof some);
        some.tree = tree;
        tqkv_cache_desc halves = desc;
        halves.calibrate = halves.exact_first = halves.exact_last = 0;
        halves.key_format = halves.value_format = TQKV_F16;
        CHECK_RESULT(tqkv_cache_create(&desc, &caches[0]), TQKV_OK);
        CHECK_RESULT(tqkv_cache_create(&halves, &caches[1]), TQKV_OK);
        caches[2] = make_plain(&m);
        append(&m, caches[0], 0, end - N);
        append(&m, caches[0], end - N, N);
        append(&m, caches[1], 0, end);
        for (int t = 0; t < end; t++) append_plain(&m, caches[2], t);
        for (int i = 0; i < 3; i++) {
            out[i] = (float *)test_alloc_filled(N * size, 0xff);
            CHECK_RESULT(test_attend_some(caches[i], &some, row_at(&m, 2, end - N), N, out[i]),
                         !i && before % N ? TQKV_OUT_OF_RANGE : TQKV_OK);
        }
        CHECK(before % N || !memcmp(out[0], out[before ? 1 : 2], N * size), "%d queries are before", before);
        for (int i = 0; i < 3; i++) {
            free(out[i]);
            tqkv_cache_destroy(caches[i]);
        }
    }
    model_close(&m);
}

/* Whether a call whose first queries stand where rows are read raw is refused and writes nothing. */
static void check_cut_refused(tqkv_cache *cache, int n, const float *q, float *out, const float *all, size_t size,
                              const char *what)
{
    float *before = (float *)test_alloc(size);
    memcpy(before, all, size);
    const tqkv_result r = tqkv_cache_attend(cache, q, n, out);
    CHECK(r == TQKV_INVALID_ARGUMENT && !memcmp(before, all, size), "%s: %s", what, tqkv_result_string(r));
    free(before);
}

/* Queries on both sides of the position are one call: its outputs may overlap neither the queries of the other side,
 * nor each other, nor the cache. */
static void check_overlap(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    enum { N = 6, RAW = 3 };
    const int values = HEADS * row->head_dim;
    const size_t size = sizeof(float) * (size_t)((N + RAW) * values);
    const tqkv_cache_desc desc = describe(row);
    tqkv_cache_desc sharing = desc;
    sharing.strides.out.token = (size_t)row->head_dim;
    sharing.strides.out.head = (size_t)(RAW * row->head_dim);
    learn_model m;
    model_open(&m, row);
    {
        float *all = (float *)test_alloc_filled(size, 0), *behind = all + RAW * values;
        tqkv_cache *cache = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        append(&m, cache, 0, row->learns_at - RAW);
        append(&m, cache, row->learns_at - RAW, N);
        check_cut_refused(cache, N, all, behind, all, size, "outputs in the queries behind");
        check_cut_refused(cache, N, behind, all, all, size, "outputs in the queries before");
        float *codes = (float *)test_keys(cache)->codes;
        check_cut_refused(cache, N, all, codes, all, size, "outputs in the codes");
        check_cut_refused(cache, N, all, codes - (N - 1) * values, all, size, "the last output in the codes");
        tqkv_cache_destroy(cache);
        CHECK_RESULT(tqkv_cache_create(&sharing, &cache), TQKV_OK);
        append(&m, cache, 0, row->learns_at - RAW);
        append(&m, cache, row->learns_at - RAW, N);
        float *out = (float *)test_alloc_filled(size, 0xa5);
        check_cut_refused(cache, N, all, out, out, size, "outputs that share rows");
        free(out);
        tqkv_cache_destroy(cache);
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        append(&m, cache, 0, row->learns_at);
        codes = (float *)test_keys(cache)->codes;
        check_cut_refused(cache, RAW, all, codes, all, size, "outputs in codes that no query reads");
        tqkv_cache_destroy(cache);
        free(all);
    }
    model_close(&m);
}

/* ---- Non-causal ---- */

static void check_non_causal(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    const size_t size = sizeof(float) * (size_t)(HEADS * row->head_dim);
    float *out[2] = {(float *)test_alloc(8 * size), (float *)test_alloc(8 * size)};
    learn_model m;
    model_open(&m, row);
    const tqkv_cache_desc desc = describe(row);
    tqkv_cache *cache = NULL, *halves = NULL;
    tqkv_cache_desc raw = desc;
    raw.calibrate = 0;
    raw.key_format = raw.value_format = TQKV_F16;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    CHECK_RESULT(tqkv_cache_create(&raw, &halves), TQKV_OK);
    for (int end = 8; end <= row->tokens; end += 8) {
        append(&m, cache, end - 8, 8);
        append(&m, halves, end - 8, 8);
        tqkv_cache *plain = make_plain(&m);
        for (int t = 0; t < end; t++) append_plain(&m, plain, t);
        CHECK_RESULT(tqkv_cache_attend(cache, row_at(&m, 2, 0), 8, out[0]), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(end < row->learns_at ? halves : plain, row_at(&m, 2, 0), 8, out[1]), TQKV_OK);
        CHECK(!memcmp(out[0], out[1], 8 * size), "at %d", end);
        tqkv_cache_destroy(plain);
    }
    tqkv_cache_destroy(cache);
    tqkv_cache_destroy(halves);
    free(out[0]);
    free(out[1]);
    model_close(&m);
}

/* ---- Memory ---- */

/* Whether the call that follows is to be tried again, with the next allocation failing. */
static bool fails_again(tqkv_result r, counting *counter)
{
    const int failed = counter->fail_at;
    counter->calls = 0;
    counter->fail_at = 0;
    if (r == TQKV_OK) return false;
    CHECK(r == TQKV_OUT_OF_MEMORY, "allocation %d fails: %s", failed, tqkv_result_string(r));
    return true;
}

static tqkv_cache *create_failing(const tqkv_cache_desc *desc, counting *counter)
{
    tqkv_cache *cache = NULL;
    for (int fail = 1;; fail++) {
        counter->fail_at = fail;
        if (!fails_again(tqkv_cache_create(desc, &cache), counter)) return cache;
        CHECK(!cache, "allocation %d fails: a cache", fail);
        CHECK_NO_LEAK(counter);
    }
}

/* n tokens behind the first 10 */
static void append_failing(const learn_model *m, tqkv_cache *cache, int n, counting *counter)
{
    for (int fail = 1;; fail++) {
        counter->fail_at = fail;
        if (!fails_again(tqkv_cache_append(cache, row_at(m, 0, 10), row_at(m, 1, 10), n), counter)) return;
        CHECK(tqkv_cache_end(cache) == 10, "allocation %d fails: positions were appended", fail);
        CHECK(!test_keys(cache)->channel_scale, "a failed append has learned");
        check_queries(m, cache, 10, 4, "after a failed append");
    }
}

static void attend_failing(const learn_model *m, tqkv_cache *cache, int n, counting *counter)
{
    const size_t size = (size_t)(n * HEADS * m->value_dim) * sizeof(float);
    char *out = (char *)test_alloc_filled(size, 0xa5);
    for (int fail = 1;; fail++) {
        counter->fail_at = fail;
        if (!fails_again(tqkv_cache_attend(cache, row_at(m, 2, 10), n, out), counter)) break;
        for (size_t i = 0; i < size; i++)
            CHECK((unsigned char)out[i] == 0xa5, "allocation %d fails: byte %d was written", fail, (int)i);
    }
    free(out);
}

/* Rows of halves are counted as long as they are there. An allocation that fails, at any time,
 * leaves the cache as it was. */
static void check_memory(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    const int n = row->exact_last ? 150 : 60;
    learn_model m;
    model_open(&m, row);
    tqkv_cache_desc desc = describe(row), plain = desc;
    counting counter = {0, 0, 0, 0, 0};
    tqkv_cache *cache = NULL;
    plain.calibrate = 0;
    CHECK_RESULT(tqkv_cache_create(&plain, &cache), TQKV_OK);
    const size_t without = tqkv_cache_bytes(cache);
    const size_t raw = (size_t)(2 * row->learns_at * CACHE_HEADS * (row->head_dim + m.value_dim));
    tqkv_cache_destroy(cache);
    desc.allocator = counting_allocator(&counter);
    cache = create_failing(&desc, &counter);
    CHECK(tqkv_cache_bytes(cache) == without, "%d bytes, without %d", (int)tqkv_cache_bytes(cache), (int)without);
    append(&m, cache, 0, 10);
    CHECK(tqkv_cache_bytes(cache) >= without + raw, "%d bytes, without %d", (int)tqkv_cache_bytes(cache), (int)without);
    append_failing(&m, cache, n, &counter);
    attend_failing(&m, cache, n, &counter);
    check_queries(&m, cache, 10 + n, n, "after failed calls");
    CHECK(tqkv_cache_bytes(cache) >= without + raw, "the halves are gone before the next append");
    append(&m, cache, 10 + n, 1);
    CHECK(tqkv_cache_bytes(cache) == without, "%d bytes are left, without %d", (int)tqkv_cache_bytes(cache),
          (int)without);
    tqkv_cache_destroy(cache);
    CHECK_NO_LEAK(&counter);
    model_close(&m);
}

/* Every byte of a snapshot that is changed or missing is found, before and after the cache has learned. */
static void check_damage(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    learn_model m;
    model_open(&m, row);
    const tqkv_cache_desc desc = describe(row);
    for (int settled = 0; settled < 2; settled++) {
        tqkv_cache *cache = NULL, *loaded = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        for (int t = 0; t < (settled ? row->learns_at + 1 : 3); t++) append(&m, cache, t, 1);
        stream s = stream_of_cache(cache);
        const size_t size = s.size;
        for (size_t i = 0; i < size; i++) {
            const unsigned char kept = s.bytes[i];
            s.bytes[i] = (unsigned char)(kept ^ (1 << i % 8));
            stream_rewind(&s);
            const tqkv_result r = tqkv_cache_load(&desc, stream_read, &s, &loaded);
            CHECK(r == TQKV_CORRUPT && !loaded, "byte %d: %s", (int)i, tqkv_result_string(r));
            s.bytes[i] = kept;
        }
        for (s.size = 0; s.size < size; s.size += 1 + s.size / 7) {
            stream_rewind(&s);
            CHECK_RESULT(tqkv_cache_load(&desc, stream_read, &s, &loaded), TQKV_CORRUPT);
        }
        s.size = size;
        stream_rewind(&s);
        CHECK_RESULT(tqkv_cache_load(&desc, stream_read, &s, &loaded), TQKV_OK);
        stream_free(&s);
        tqkv_cache_destroy(loaded);
        tqkv_cache_destroy(cache);
    }
    model_close(&m);
}

/* Headers of a cache that learns with a right hash, which no such cache writes: each field alone would do. */
static void check_header(const void *parameters)
{
    enum { SIZE = 144 };
    const learn_row *row = (const learn_row *)parameters;
    static const struct {
        const char *what;
        int at, bytes;
        uint64_t value;
    } lies[] = {{"learns, and has a centre", 68, 4, 4 | 1 << 8},
                {"and a scale", 68, 4, 4 | 1 << 16},
                {"has learned, and is to learn", 68, 4, 0},
                {"learns without calibrate", 84, 4, 0},
                {"exact_below", 96, 4, 1},
                {"queries below need halves", 100, 4, 1},
                {"learns from nothing", 104, 4, 0},
                {"from less than 16", 104, 4, 15},
                {"from more than calibrate", 104, 4, 41},
                {"before its end", 104, 4, 10},
                {"a field without a meaning", 108, 4, 1},
                {"pairs", 112, 4, 3},
                {"rotary_dim is odd", 116, 4, 63},
                {"rotary_dim", 116, 4, 66},
                {"begins later", 120, 8, 1},
                {"exact_from", 136, 8, 1}};
    learn_model m;
    model_open(&m, row);
    tqkv_cache_desc desc = describe(row);
    desc.exact_last = 8;
    for (int i = 0; i < (int)(sizeof lies / sizeof *lies); i++) {
        tqkv_cache *cache = NULL, *loaded = NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        append(&m, cache, 0, 10);
        stream s = stream_of_cache(cache);
        tqkv_cache_desc any;
        memset(&any, 0, sizeof any);
        CHECK_RESULT(tqkv_cache_load(&any, stream_read, &s, &loaded), TQKV_OK);
        tqkv_cache_destroy(loaded);
        for (int k = 0; k < lies[i].bytes; k++) s.bytes[lies[i].at + k] = (unsigned char)(lies[i].value >> 8 * k);
        const uint64_t hash = XXH3_64bits(s.bytes, SIZE);
        for (int k = 0; k < 8; k++) s.bytes[SIZE + k] = (unsigned char)(hash >> (8 * k));
        stream_rewind(&s);
        const tqkv_result r = tqkv_cache_load(&any, stream_read, &s, &loaded);
        CHECK(r == TQKV_CORRUPT && !loaded, "%s: %s", lies[i].what, tqkv_result_string(r));
        stream_free(&s);
        tqkv_cache_destroy(cache);
    }
    model_close(&m);
}

/* ---- Setting and refusing ---- */

/* Copied, or saved and loaded, it has the same snapshot. */
static void check_copy(const tqkv_cache *cache, bool loads)
{
    learn_row row;
    tqkv_cache *copy = NULL;
    memset(&row, 0, sizeof row);
    row.head_dim = test_keys(cache)->head_dim;
    row.capacity = test_keys(cache)->capacity;
    row.key_format = test_keys(cache)->format;
    row.value_format = test_values(cache)->format;
    if (loads)
        copy = reloaded(&row, cache);
    else
        CHECK_RESULT(tqkv_cache_fork(cache, NULL, &copy), TQKV_OK);
    stream a = stream_of_cache(cache), b = stream_of_cache(copy);
    CHECK(stream_is_equal(&a, &b), "%s: another snapshot", loads ? "loaded" : "copied");
    stream_free(&a);
    stream_free(&b);
    tqkv_cache_destroy(copy);
}

static void check_set(const void *parameters)
{
    (void)parameters;
    enum { D = 64 };
    const cache_row row = {TQKV_TQ4, TQKV_TQ3, D, 100, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    desc.calibrate = 20;
    float *scales = test_scales(1, CACHE_HEADS, D, 6.0), *rows = test_rows(2, DATA_GAUSSIAN, 30 * CACHE_HEADS, D);
    tqkv_cache *learning = cache_given(&desc, NULL, NULL, NULL, NULL);
    for (int way = 0; way < 2; way++) { /* a centre or a scale switches learning off */
        tqkv_cache *cache = cache_given(&desc, way ? NULL : scales, way ? scales : NULL, NULL, way ? scales : NULL);
        CHECK_RESULT(tqkv_cache_append(learning, rows, rows, 5), TQKV_OK);
        CHECK(tqkv_cache_bytes(cache) < tqkv_cache_bytes(learning), "room for halves");
        CHECK_RESULT(tqkv_cache_append(cache, rows, rows, 30), TQKV_OK);
        const tqkv_store *keys = test_keys(cache), *values = test_values(cache);
        CHECK((keys->center != NULL) == (way == 0) && (keys->channel_scale != NULL) == (way == 1) &&
                  (values->channel_scale != NULL) == (way == 1) && !values->center,
              "way %d: other centres or scales", way);
        CHECK(way != 1 || (keys->channel_scale && keys->channel_scale != scales &&
                           !memcmp(keys->channel_scale, scales, sizeof(float) * CACHE_HEADS * D)),
              "the scale is no copy");
        check_copy(cache, false);
        check_copy(cache, true);
        tqkv_cache_destroy(cache);
    }
    tqkv_cache_destroy(learning);
    free(scales);
    free(rows);
}

static void check_bad_scale(const void *parameters)
{
    (void)parameters;
    enum { D = 64 };
    const cache_row row = {TQKV_TQ4, TQKV_TQ3, D, 100, false, 0, -1};
    tqkv_cache_desc keys = cache_desc(&row, NULL), values = keys;
    tqkv_cache *cache = NULL;
    float *scales = test_scales(1, CACHE_HEADS, D, 6.0);
    static const float bad[5] = {0.0f, -1.0f, 1e30f, (float)NAN, (float)INFINITY};
    keys.key_scale = values.value_scale = scales;
    for (int i = 0; i < 5; i++)
        for (int at = 0; at < CACHE_HEADS * D; at += CACHE_HEADS * D - 1) {
            const float kept = scales[at];
            scales[at] = bad[i];
            CHECK_RESULT(tqkv_cache_create(&keys, &cache), i < 3 ? TQKV_INVALID_ARGUMENT : TQKV_NOT_FINITE);
            CHECK_RESULT(tqkv_cache_create(&values, &cache), i < 3 ? TQKV_INVALID_ARGUMENT : TQKV_NOT_FINITE);
            CHECK(!cache, "a cache with a refused scale");
            scales[at] = kept;
        }
    keys.key_scale = (const float *)((uintptr_t)scales + 1);
    CHECK_RESULT(tqkv_cache_create(&keys, &cache), TQKV_INVALID_ARGUMENT);
    free(scales);
}

/* A copy of less capacity learns from as many positions as the cache does, to the same codes; one that cannot hold them
 * learns from all that it holds. */
static void check_smaller(const void *parameters)
{
    (void)parameters;
    enum { D = 64, BEFORE = 40, N = 110 };
    float *rows = test_rows(2, DATA_GAUSSIAN, N * CACHE_HEADS, D);
    for (int capacity = 400; capacity >= 50; capacity -= 50) {
        const cache_row row = {TQKV_TQ4, TQKV_TQ4, D, 400, false, 0, -1};
        tqkv_cache_desc desc = cache_desc(&row, NULL), smaller;
        tqkv_cache *cache = NULL, *copy = NULL;
        desc.calibrate = 64;
        desc.exact_last = 8;
        memset(&smaller, 0, sizeof smaller);
        smaller.capacity = capacity;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        CHECK_RESULT(tqkv_cache_append(cache, rows, rows, BEFORE), TQKV_OK);
        CHECK_RESULT(tqkv_cache_fork(cache, &smaller, &copy), TQKV_OK);
        const int n = (capacity < N ? capacity : N) - BEFORE;
        const float *rest = rows + BEFORE * CACHE_HEADS * D;
        CHECK_RESULT(tqkv_cache_append(cache, rest, rest, n), TQKV_OK);
        CHECK_RESULT(tqkv_cache_append(copy, rest, rest, n), TQKV_OK);
        const tqkv_store *keys[2] = {test_keys(cache), test_keys(copy)};
        REQUIRE(keys[1]->channel_scale, "capacity %d: the copy has not learned", capacity);
        if (capacity > 64) {
            CHECK(!memcmp(keys[0]->channel_scale, keys[1]->channel_scale, sizeof(float) * CACHE_HEADS * D),
                  "capacity %d: another scale", capacity);
            check_codes(keys[0], keys[1], 0, BEFORE + n, "keys");
        }
        tqkv_cache_destroy(copy);
        tqkv_cache_destroy(cache);
    }
    free(rows);
}

void test_learn_cases(void)
{
    const tqkv_type f32 = TQKV_TYPE_F32;
    const tqkv_pairs none = TQKV_PAIRS_NONE;
    const learn_row rows[] = {
        {TQKV_TQ4, TQKV_TQ4, 64, 0, 240, 40, 40, 0, 0, 0, 0, 100, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ4, 64, 0, 300, 40, 40, 4, 9, 0, 0, 220, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_I8, TQKV_TQ3, 128, 64, 230, 100, 57, 50, 20, 0, 0, 120, 0, 0, 0, 1, 0, f32, 0, none},
        {TQKV_TQ3, TQKV_TQ2, 80, 0, 40, 512, 16, 4, 8, 0, 0, 39, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_I8, 64, 0, 90, 22, 22, 3, 17, 0, 30, 210, 1, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ5, TQKV_F16, 64, 0, 70, 17, 17, 5, 6, 0, 0, 150, 1, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ4, 96, 0, 200, 30, 30, 2, 5, 0, 0, 80, 0, 1, 0, 0, 0, f32, 0, none},
        {TQKV_TQ6, TQKV_TQ4, 128, 0, 200, 30, 30, 2, 5, 64, 0, 80, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ4, 64, 0, 80, 18, 18, 3, 5, 32, 25, 130, 1, 1, 0, 0, 0, f32, 0, none},
        {TQKV_TQ5, TQKV_TQ4, 64, 0, 200, 30, 30, 40, 5, 0, 0, 120, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ5, 512, 0, 100, 20, 20, 0, 10, 0, 0, 60, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ4, 64, 0, 200, 19, 19, 3, 5, 0, 0, 90, 0, 0, 0, 0, 0, TQKV_TYPE_F16, 0, none},
        {TQKV_F16, TQKV_TQ4, 64, 0, 200, 30, 30, 3, 5, 0, 0, 70, 0, 0, 0, 0, 0, f32, 0, none},
        {TQKV_TQ4, TQKV_TQ3, 64, 0, 300, 60, 60, 4, 9, 0, 0, 160, 0, 0, 0, 0, 0, f32, 2, TQKV_PAIRS_HALVES},
        {TQKV_TQ4, TQKV_TQ3, 64, 0, 240, 40, 40, 2, 9, 0, 0, 100, 0, 0, 0, 0, 0, f32, 2, none},
        {TQKV_TQ5, TQKV_TQ4, 64, 0, 240, 40, 40, 2, 9, 0, 0, 100, 0, 0, 0, 1, 0, f32, 10, none},
        {TQKV_TQ4, TQKV_TQ4, 96, 0, 200, 46, 46, 2, 5, 0, 0, 80, 0, 1, 0, 0, 0, TQKV_TYPE_F16, 2, none},
        {TQKV_TQ4, TQKV_TQ5, 64, 0, 240, 60, 60, 3, 5, 0, 25, 150, 1, 0, 0, 0, 0, f32, 2, none},
    };
    for (int i = 0; i < (int)(sizeof rows / sizeof *rows); i++) {
        test_add(check_chunks, &rows[i], sizeof *rows, "learn/chunks/%d", i);
        test_add(check_copies, &rows[i], sizeof *rows, "learn/copies/%d", i);
        test_add(check_edits, &rows[i], sizeof *rows, "learn/edits/%d", i);
    }
    test_add(check_tree, &rows[1], sizeof *rows, "learn/tree");
    for (int i = 0; i < 2; i++) {
        learn_row drafts = rows[i ? 1 : 0], halves = rows[i ? 14 : 11]; /* a tree keeps the halves of rows of floats */
        drafts.type = halves.type = TQKV_TYPE_F16;
        drafts.exact_last = halves.exact_last = i ? 9 : 0;
        test_add(check_drafts, &drafts, sizeof drafts, "learn/drafts/%d", i);
        test_add(check_drafts, &halves, sizeof halves, "learn/drafts/repeated%d", i);
        test_add(check_copy_before_queries, &rows[i], sizeof *rows, "learn/copy_before_queries/%d", i);
    }
    test_add(check_overlap, &rows[1], sizeof *rows, "learn/overlap");
    learn_row non_causal = rows[1];
    non_causal.non_causal = true;
    test_add(check_non_causal, &non_causal, sizeof *rows, "learn/non_causal");
    const learn_row small = {TQKV_TQ4, TQKV_TQ3, 32, 0, 64, 16, 16, 2, 3, 32, 0, 20, 0, 0, 0, 0, 0, f32, 0, none};
    test_add(check_damage, &small, sizeof small, "learn/damage");
    test_add(check_header, &rows[1], sizeof *rows, "learn/header");
    test_add(check_memory, &rows[1], sizeof *rows, "learn/memory/ends");
    test_add(check_memory, &rows[0], sizeof *rows, "learn/memory/plain");
    test_add(check_set, NULL, 0, "learn/set");
    test_add(check_bad_scale, NULL, 0, "learn/bad_scale");
    test_add(check_smaller, NULL, 0, "learn/smaller");
}

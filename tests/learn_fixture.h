/* Caches that learn centre and scale of their keys: a model of what they learn, and of what each query then gives. */
#ifndef TQKV_TESTS_LEARN_FIXTURE_H
#define TQKV_TESTS_LEARN_FIXTURE_H

#include "cache_fixture.h"

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
    bool few;                    /* positions are new: all count, for scales in [1/2, 3/2] */
    void *typed[3];              /* the same in the type, or NULL */
    float *halves[2], *channels; /* of the first rows as halves hold them; centre and scale, or NULL */
    float *expected;             /* [MOST][HEADS][value_dim]: of each position's query, alone */
    tqkv_cache *plain, *raw;     /* with centre and scale, and of halves */
} learn_model;

static inline void run_backwards(void *user, int count, tqkv_task task, void *context)
{
    (void)user;
    for (int i = count - 1; i >= 0; i--) task(context, i);
}

static inline tqkv_cache_desc describe(const learn_row *row)
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

static inline size_t value_size(const learn_row *row) { return row->type == TQKV_TYPE_F32 ? 4 : 2; }

/* Row t of k, v (1) or q (2), of the type. */
static inline const void *row_at(const learn_model *m, int which, int t)
{
    const int dim = which == 1 ? m->value_dim : m->key_dim, heads = which == 2 ? HEADS : CACHE_HEADS;
    const void *rows = m->typed[which] ? m->typed[which] : which == 0 ? m->k : which == 1 ? m->v : m->q;
    return (const char *)rows + (size_t)(t * heads * dim) * value_size(m->row);
}

static inline void append(const learn_model *m, tqkv_cache *cache, int t, int n)
{
    CHECK_RESULT(tqkv_cache_append(cache, row_at(m, 0, t), m->row->shared ? NULL : row_at(m, 1, t), n), TQKV_OK);
}

/* Rows whose channels differ in size, with a constant part. */
static inline float *make_rows(uint64_t seed, int heads, int dim)
{
    float *rows = test_rows(seed, DATA_STUDENT, MOST * heads, dim), *sizes = test_scales(seed + 1, heads, dim, 8.0);
    for (int i = 0; i < MOST * heads * dim; i++) rows[i] = (rows[i] + (float)(i % 5)) * sizes[i % (heads * dim)];
    free(sizes);
    return rows;
}

static inline void *typed_rows(tqkv_type type, float *rows, int n)
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
static inline float *as_halves(const float *rows, int n)
{
    float *halves = (float *)test_alloc((size_t)n * sizeof *halves);
    for (int i = 0; i < n; i++) halves[i] = (float)reference_half_value(reference_half(rows[i]));
    return halves;
}

/* Whether a position of the model is new. */
static inline bool is_new(const learn_row *row, int t) { return !row->repeat || t % row->repeat == 0; }

/* Lets the values of positions that are not new be nearly those of the position before. */
static inline void repeat_rows(const learn_model *m)
{
    const int n = CACHE_HEADS * (m->row->shared ? m->key_dim : m->value_dim);
    float *rows = m->row->shared ? m->k : m->v;
    for (int t = 1; t < MOST; t++)
        for (int i = 0; i < n && !is_new(m->row, t); i++)
            rows[t * n + i] = rows[(t - 1) * n + i] * (i % 3 ? 1.0f : 1.25f);
}

/* Moves the rows of [first, end) that count together; their number. */
static inline int gather_rows(const learn_model *m, float *rows, int each, int first, int end)
{
    int n = 0;
    for (int t = first; t < end; t++)
        if (m->few || is_new(m->row, t)) memmove(rows + n++ * each, rows + t * each, (size_t)each * sizeof *rows);
    return n;
}

/* Centre and scale that the first positions give, and what their halves hold. */
static inline void learn(learn_model *m)
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
    for (int i = each; m->few && i < 2 * each; i++) m->channels[i] = fmaxf(0.5f, fminf(m->channels[i], 1.5f));
    free(kept);
    test_store_free(&shape);
}

/* The cache with centre and scale that the other one should become; a tail has neither. */
static inline tqkv_cache *make_plain(const learn_model *m)
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
static inline void append_plain(const learn_model *m, tqkv_cache *plain, int t)
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
static inline void expect(learn_model *m)
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

static inline void model_open(learn_model *m, const learn_row *row)
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

static inline void model_close(learn_model *m)
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
static inline void check_codes(const tqkv_store *a, const tqkv_store *b, int64_t first, int64_t end, const char *what)
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
static inline void check_settled(const learn_model *m, const tqkv_cache *cache)
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
static inline void check_queries(const learn_model *m, tqkv_cache *cache, int end, int n, const char *what)
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
static inline void check_view(const learn_model *m, const tqkv_cache *cache, int end)
{
    const size_t size = (size_t)(HEADS * m->value_dim) * value_size(m->row);
    tqkv_attention view = test_view(cache, 1);
    char *out = (char *)test_alloc(size);
    CHECK_RESULT(tqkv_attend(&view, row_at(m, 2, end - 1), out), TQKV_OK);
    CHECK(!memcmp(out, (const char *)m->expected + (size_t)(end - 1) * size, size), "the view at %d", end);
    free(out);
}

static inline tqkv_cache *reloaded(const learn_row *row, const tqkv_cache *cache)
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

#endif

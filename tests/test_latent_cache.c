/* Caches whose keys are the values, and with a tail: answers, copies, and their snapshots. Edits: test_history.c. */
#include "cache_fixture.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef struct latent_row {
    tqkv_format keys, tail;
    int head_dim, tail_dim; /* tail_dim: 0 = none */
    bool shared, ring, centered;
} latent_row;

enum { CAPACITY = 20, QUERIES = 3, ROWS = QUERIES * CACHE_HEADS * CACHE_GROUP };

static tqkv_cache_desc latent_desc(const latent_row *row, counting *counter)
{
    const cache_row shape = {
        row->keys, row->shared ? TQKV_FORMAT_DEFAULT : TQKV_TQ5, row->head_dim, CAPACITY, row->ring, 0, -1};
    tqkv_cache_desc desc = cache_desc(&shape, counter);
    desc.shared = row->shared;
    desc.tail_dim = row->tail_dim;
    desc.tail_format = row->tail_dim ? row->tail : TQKV_FORMAT_DEFAULT;
    return desc;
}

/* Appends tokens [first, first + n) of those of the seed, `each` in a call. */
static void append(tqkv_cache *cache, const latent_row *row, int first, int n, int each)
{
    const int key_dim = row->head_dim + row->tail_dim;
    float *k = cache_data(31, first + n, key_dim), *v = cache_data(32, first + n, row->head_dim);
    for (int t = first; t < first + n; t += each) {
        const float *values = row->shared ? NULL : v + t * CACHE_HEADS * row->head_dim;
        const int now = first + n - t < each ? first + n - t : each;
        CHECK_RESULT(tqkv_cache_append(cache, k + t * CACHE_HEADS * key_dim, values, now), TQKV_OK);
    }
    free(k);
    free(v);
}

/* A cache of that desc, with the row's centres. */
static tqkv_cache *make_of(const latent_row *row, const tqkv_cache_desc *desc)
{
    if (!row->centered) return cache_given(desc, NULL, NULL, NULL, NULL);
    float *keys = cache_data(33, 1, row->head_dim + row->tail_dim), *values = cache_data(34, 1, row->head_dim);
    tqkv_cache *cache = cache_given(desc, keys, NULL, row->shared ? NULL : values, NULL);
    free(keys);
    free(values);
    return cache;
}

static tqkv_cache *make(const latent_row *row, counting *counter)
{
    tqkv_cache_desc desc = latent_desc(row, counter);
    return make_of(row, &desc);
}

/* Both caches have the same snapshots; frees b. */
static void check_same(const tqkv_cache *a, tqkv_cache *b, const char *what)
{
    stream of_a = stream_of_cache(a), of_b = stream_of_cache(b);
    CHECK(stream_is_equal(&of_a, &of_b), "%s: other bytes", what);
    stream_free(&of_a);
    stream_free(&of_b);
    tqkv_cache_destroy(b);
}

/* out: [ROWS][head_dim], of 3 queries */
static void answer(tqkv_cache *cache, const latent_row *row, float *out)
{
    float *q = test_rows(35, DATA_GAUSSIAN, ROWS, row->head_dim + row->tail_dim);
    CHECK_RESULT(tqkv_cache_attend(cache, q, QUERIES, out), TQKV_OK);
    free(q);
}

/* The reference's answer, and the bits of attention over the cache's stores. */
static void check_answer(tqkv_cache *cache, const latent_row *row)
{
    const size_t n = (size_t)(ROWS * row->head_dim);
    const tqkv_cache_desc desc = latent_desc(row, NULL);
    float *out = (float *)test_alloc(n * sizeof(float)), *same = (float *)test_alloc(n * sizeof(float));
    float *q = test_rows(35, DATA_GAUSSIAN, ROWS, row->head_dim + row->tail_dim);
    double *expected = (double *)test_alloc(n * sizeof(double));
    tqkv_attention a = cache_attention(cache, &desc, QUERIES, (int)(tqkv_cache_end(cache) - test_first(cache)));
    a.tail = test_tail(cache);
    CHECK((a.values == a.keys) == row->shared && (a.tail != NULL) == (row->tail_dim > 0), "other streams");
    answer(cache, row, out);
    CHECK_RESULT(tqkv_attend(&a, q, same), TQKV_OK);
    CHECK(!memcmp(out, same, n * sizeof(float)), "attention over the stores has other bits");
    reference_attend(&a, q, expected);
    const double error = reference_relative_error(out, expected, n);
    CHECK(error <= (reference_attention_tolerance(&a, 1.0)), "relative error %.3g", error);
    free(out);
    free(same);
    free(q);
    free(expected);
}

/* ---- Copies ---- */

/* The fork's stream has the bytes of a conversion of the cache's. */
static void check_converted(const tqkv_store *from, const tqkv_store *to, int64_t first, int64_t end)
{
    tqkv_store expected = test_store(to->format, from->head_dim, from->n_kv_heads, from->capacity, from->ring);
    stream a = stream_empty(), b = stream_empty();
    expected.center = from->center;
    CHECK_RESULT(tqkv_store_convert(&expected, from, first, (int)(end - first)), TQKV_OK);
    CHECK_RESULT(tqkv_store_save(&expected, first, (int)(end - first), stream_write, &a), TQKV_OK);
    CHECK_RESULT(tqkv_store_save(to, first, (int)(end - first), stream_write, &b), TQKV_OK);
    CHECK(stream_is_equal(&a, &b), "a converted stream has other bytes");
    stream_free(&a);
    stream_free(&b);
    test_store_free(&expected);
}

static void check_forks(tqkv_cache *cache, const latent_row *row, counting *counter)
{
    tqkv_cache_desc desc;
    tqkv_cache *fork = NULL;
    CHECK_RESULT(tqkv_cache_fork(cache, NULL, &fork), TQKV_OK);
    check_answer(fork, row);
    check_same(cache, fork, "a fork");
    memset(&desc, 0, sizeof desc);
    desc.capacity = 2 * CAPACITY;
    desc.key_format = TQKV_TQ3;
    desc.tail_format = row->tail_dim ? TQKV_TQ6 : TQKV_FORMAT_DEFAULT;
    desc.allocator = counting_allocator(counter);
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), TQKV_OK);
    REQUIRE(fork, "no fork");
    const int64_t first = test_first(cache), end = tqkv_cache_end(cache);
    check_converted(test_keys(cache), test_keys(fork), first, end);
    if (row->tail_dim) check_converted(test_tail(cache), test_tail(fork), first, end);
    check_answer(fork, row);
    tqkv_cache_destroy(fork);
    memset(&desc, 0, sizeof desc);
    desc.shared = true;
    desc.tail_dim = row->tail_dim;
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), row->shared ? TQKV_OK : TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(fork);
    desc.shared = false;
    desc.tail_dim = row->tail_dim + 16;
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), TQKV_INVALID_ARGUMENT);
}

/* ---- Snapshots ---- */

static tqkv_result load(stream *s, const tqkv_cache_desc *desc, tqkv_cache **cache)
{
    stream_rewind(s);
    return tqkv_cache_load(desc, stream_read, s, cache);
}

static void check_snapshot(tqkv_cache *cache, const latent_row *row, counting *counter)
{
    tqkv_cache_desc open, wrong;
    tqkv_cache *loaded = NULL;
    stream s = stream_of_cache(cache);
    memset(&open, 0, sizeof open);
    open.allocator = counting_allocator(counter);
    CHECK_RESULT(load(&s, &open, &loaded), TQKV_OK);
    REQUIRE(loaded, "no cache from the snapshot");
    CHECK(s.at == s.size, "%d of %d bytes were read", (int)s.at, (int)s.size);
    CHECK(tqkv_cache_bytes(loaded) == tqkv_cache_bytes(cache), "other sizes");
    check_answer(loaded, row);
    check_same(cache, loaded, "saving after loading");
    wrong = open;
    wrong.tail_dim = row->tail_dim + 16;
    CHECK_RESULT(load(&s, &wrong, &loaded), TQKV_INVALID_ARGUMENT);
    wrong = open;
    wrong.tail_format = row->tail == TQKV_TQ4 ? TQKV_F16 : TQKV_TQ4;
    CHECK_RESULT(load(&s, &wrong, &loaded), TQKV_INVALID_ARGUMENT);
    wrong = open;
    wrong.shared = true;
    CHECK_RESULT(load(&s, &wrong, &loaded), row->shared ? TQKV_OK : TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(loaded);
    stream_free(&s);
}

/* ---- One cache ---- */

static void check_refusals(tqkv_cache *cache, const latent_row *row)
{
    float *k = cache_data(31, 1, row->head_dim + row->tail_dim), *v = cache_data(32, 1, row->head_dim);
    const stream before = stream_of_cache(cache);
    CHECK_RESULT(tqkv_cache_append(cache, k, row->shared ? v : NULL, 1), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_cache_append(cache, NULL, row->shared ? NULL : v, 1), TQKV_INVALID_ARGUMENT);
    k[CACHE_HEADS * (row->head_dim + row->tail_dim) - 1] = (float)NAN; /* of the tail, if there is one */
    CHECK_RESULT(tqkv_cache_append(cache, k, row->shared ? NULL : v, 1), TQKV_NOT_FINITE);
    if (row->tail_dim) {
        float *inside = (float *)test_tail(cache)->codes;
        CHECK_RESULT(tqkv_cache_append(cache, inside, row->shared ? NULL : v, 1), TQKV_INVALID_ARGUMENT);
    }
    stream after = stream_of_cache(cache), copy = before;
    CHECK(stream_is_equal(&copy, &after), "a refused append has changed the cache");
    stream_free(&copy);
    stream_free(&after);
    tqkv_cache_desc desc = latent_desc(row, NULL);
    tqkv_cache *none;
    desc.value_center = row->shared ? v : NULL;
    if (row->shared) CHECK_RESULT(tqkv_cache_create(&desc, &none), TQKV_INVALID_ARGUMENT);
    desc.value_center = NULL;
    desc.key_center = k;
    CHECK_RESULT(tqkv_cache_create(&desc, &none), TQKV_NOT_FINITE);
    free(k);
    free(v);
}

static size_t store_bytes(const tqkv_store *s) { return s ? s->codes_size + s->norms_size : 0; }

static void check_cache(const void *parameters)
{
    const latent_row *row = (const latent_row *)parameters;
    counting counter = {0, 0, 0, 0, 0};
    tqkv_cache *cache = make(row, &counter), *other = make(row, &counter);
    REQUIRE(cache && other, "no cache");
    append(cache, row, 0, row->ring ? 33 : 17, 8);
    append(other, row, 0, row->ring ? 33 : 17, 1);
    check_same(cache, other, "one by one");
    const size_t values = row->shared ? 0 : store_bytes(test_values(cache));
    CHECK(tqkv_cache_bytes(cache) == store_bytes(test_keys(cache)) + values + store_bytes(test_tail(cache)), "%d bytes",
          (int)tqkv_cache_bytes(cache));
    check_answer(cache, row);
    check_forks(cache, row, &counter);
    check_snapshot(cache, row, &counter);
    if (row->ring) CHECK_RESULT(tqkv_cache_truncate(cache, 30), TQKV_OK);
    if (row->ring) check_answer(cache, row);
    check_refusals(cache, row);
    tqkv_cache_destroy(cache);
    CHECK_NO_LEAK(&counter);
}

/* ---- Rows with gaps: a layout counts values of whole rows, keys and tail together ---- */

static void check_layout(const void *parameters)
{
    const latent_row *row = (const latent_row *)parameters;
    enum { TOKENS = 5, GAP = 7 };
    const int dim = row->head_dim + row->tail_dim, token = CACHE_HEADS * dim + GAP;
    tqkv_cache_desc desc = latent_desc(row, NULL);
    desc.strides.k.token = (size_t)token;
    tqkv_cache *cache = make_of(row, &desc), *plain = make(row, NULL);
    float *k = cache_data(31, TOKENS, dim);
    float *wide = (float *)test_alloc_filled((size_t)(TOKENS * token) * sizeof(float), 0xff);
    for (int t = 0; t < TOKENS; t++)
        memcpy(wide + t * token, k + t * CACHE_HEADS * dim, (size_t)(CACHE_HEADS * dim) * sizeof(float));
    CHECK_RESULT(tqkv_cache_append(cache, wide, NULL, TOKENS), TQKV_OK);
    append(plain, row, 0, TOKENS, TOKENS);
    check_same(cache, plain, "rows with gaps");
    tqkv_cache_destroy(cache);
    free(k);
    free(wide);
}

/* ---- Damaged snapshots ---- */

enum { HEADER_SIZE = 144 };

static void check_damage(const void *parameters)
{
    const latent_row *row = (const latent_row *)parameters;
    tqkv_cache *cache = make(row, NULL), *loaded = NULL;
    tqkv_cache_desc open;
    memset(&open, 0, sizeof open);
    append(cache, row, 0, 3, 3);
    stream s = stream_of_cache(cache);
    const size_t size = s.size;
    for (size_t i = 0; i < size; i++) {
        s.bytes[i] ^= 0x11;
        CHECK(load(&s, &open, &loaded) == TQKV_CORRUPT && !loaded, "byte %d", (int)i);
        s.bytes[i] ^= 0x11;
    }
    for (s.size = 0; s.size < size; s.size++)
        CHECK(load(&s, &open, &loaded) == TQKV_CORRUPT && !loaded, "length %d", (int)s.size);
    stream_free(&s);
    tqkv_cache_destroy(cache);
}

typedef struct header_change {
    const char *name;
    int offset, value;
} header_change;

/* Headers that no cache writes, with a valid hash. */
static void check_header(const void *parameters)
{
    const header_change *change = (const header_change *)parameters;
    const latent_row row = {TQKV_TQ4, TQKV_F16, 32, 32, true, false, false};
    tqkv_cache *cache = make(&row, NULL), *loaded = NULL;
    tqkv_cache_desc open;
    memset(&open, 0, sizeof open);
    append(cache, &row, 0, 3, 3);
    stream s = stream_of_cache(cache);
    for (int i = 0; i < 4; i++) s.bytes[change->offset + i] = (unsigned char)((uint32_t)change->value >> (8 * i));
    const uint64_t hash = XXH3_64bits(s.bytes, HEADER_SIZE);
    for (int i = 0; i < 8; i++) s.bytes[HEADER_SIZE + i] = (unsigned char)(hash >> (8 * i));
    CHECK(load(&s, &open, &loaded) == TQKV_CORRUPT && !loaded, "%s", change->name);
    stream_free(&s);
    tqkv_cache_destroy(cache);
}

/* The bytes of a snapshot are the same everywhere and for good. */
static void check_bytes(const void *parameters)
{
    const latent_row row = {TQKV_TQ4, TQKV_I8, 64, 32, true, true, true};
    tqkv_cache *cache = make(&row, NULL);
    (void)parameters;
    append(cache, &row, 0, 25, 25);
    stream s = stream_of_cache(cache);
    const uint64_t hash = XXH3_64bits(s.bytes, s.size), expected = 0x3cfc1417f6d3d29cu;
    CHECK(hash == expected, "XXH3 0x%08x%08x", (unsigned)(hash >> 32), (unsigned)hash);
    stream_free(&s);
    tqkv_cache_destroy(cache);
}

void test_latent_cache_cases(void)
{
    static const latent_row rows[] = {
        {TQKV_TQ4, TQKV_F16, 512, 64, true, false, false}, {TQKV_I8, TQKV_I8, 128, 64, true, true, true},
        {TQKV_TQ5, TQKV_TQ4, 96, 48, false, true, true},   {TQKV_TQ6, TQKV_F16, 64, 0, true, false, true},
        {TQKV_F16, TQKV_F16, 32, 32, true, true, false},   {TQKV_I8, TQKV_F16, 64, 0, false, false, true},
        {TQKV_TQ4, TQKV_F16, 64, 32, true, false, true},   {TQKV_TQ2, TQKV_I8, 448, 64, false, false, false}};
    static const header_change changes[] = {{"no_tail", 36, 0},
                                            {"tail_dim", 36, 40},
                                            {"negative_tail_dim", 36, -32},
                                            {"tail_format", 60, 15},
                                            {"no_tail_format", 60, 0},
                                            {"huge_tail_format", 60, 0x7fffffff},
                                            {"rest", 100, 1},
                                            {"flags", 68, 2 | 8},
                                            {"values_center", 68, 2 | 1 << 9},
                                            {"values_scale", 68, 2 | 1 << 17},
                                            {"value_dim", 32, 64},
                                            {"value_format", 56, TQKV_TQ5}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const latent_row *r = &rows[i];
        test_add(check_cache, r, sizeof *r, "latent_cache/%s-%s/%d+%d%s%s", tqkv_format_name(r->keys),
                 tqkv_format_name(r->tail), r->head_dim, r->tail_dim, r->shared ? "/shared" : "",
                 r->ring ? "/ring" : "");
    }
    test_add(check_layout, &rows[0], sizeof *rows, "latent_cache/layout");
    test_add(check_damage, &rows[4], sizeof *rows, "latent_cache/damage/tail");
    test_add(check_damage, &rows[3], sizeof *rows, "latent_cache/damage/shared");
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++)
        test_add(check_header, &changes[i], sizeof *changes, "latent_cache/header/%s", changes[i].name);
    test_add(check_bytes, NULL, 0, "latent_cache/bytes");
}

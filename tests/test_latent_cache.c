/* Caches whose keys are the values, and with a tail: what is refused, and snapshots. Answers, copies and edits:
 * test_history.c. */
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

/* ---- Snapshots ---- */

static tqkv_result load(stream *s, const tqkv_cache_desc *desc, tqkv_cache **cache)
{
    stream_rewind(s);
    return tqkv_cache_load(desc, stream_read, s, cache);
}

/* Copies and snapshots of other streams than the cache has are refused. */
static void check_others(const tqkv_cache *cache, const latent_row *row)
{
    stream s = stream_of_cache(cache);
    for (int i = 0; i < 4; i++) {
        tqkv_cache_desc desc;
        tqkv_cache *other = NULL;
        memset(&desc, 0, sizeof desc);
        desc.tail_dim = i == 0 ? row->tail_dim + 16 : row->tail_dim;
        desc.shared = i == 1;
        if (i == 2) desc.tail_format = row->tail == TQKV_TQ4 ? TQKV_F16 : TQKV_TQ4; /* which a fork converts to */
        const bool same = i == 3 || (i == 1 && row->shared) || (i == 2 && row->tail_dim);
        if (i != 2) CHECK_RESULT(tqkv_cache_fork(cache, &desc, &other), same ? TQKV_OK : TQKV_INVALID_ARGUMENT);
        tqkv_cache_destroy(other);
        CHECK_RESULT(load(&s, &desc, &other), same && i != 2 ? TQKV_OK : TQKV_INVALID_ARGUMENT);
        tqkv_cache_destroy(other);
    }
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

static void check_cache(const void *parameters)
{
    const latent_row *row = (const latent_row *)parameters;
    counting counter = {0, 0, 0, 0, 0};
    tqkv_cache *cache = make(row, &counter), *other = make(row, &counter);
    REQUIRE(cache && other, "no cache");
    append(cache, row, 0, row->ring ? 33 : 17, 8);
    append(other, row, 0, row->ring ? 33 : 17, 1);
    check_same(cache, other, "one by one");
    check_others(cache, row);
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

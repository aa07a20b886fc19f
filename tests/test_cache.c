/* The cache: defaults, forks, refusals. Its bytes and results, and edits: test_history.c. */
#include "cache_fixture.h"

static void check_defaults(const void *parameters)
{
    (void)parameters;
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
static void check_ring_refusals(const void *parameters)
{
    static const struct {
        int capacity, window, calibrate;
        const char *words;
    } rows[] = {{100, 100, 0, NULL},     {100, 101, 0, "window:"},  {100, 0, 25, NULL},
                {100, 0, 26, "quarter"}, {400, 60, 512, "quarter"}, {40, 0, 16, NULL}};
    (void)parameters;
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
static void check_out_over_cache(const void *parameters)
{
    enum { D = 64, SIZE = 8192 };
    (void)parameters;
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

/* A cache copies its centres; a fork may be asked for the same, and for no other. */
static void check_centers(const void *parameters)
{
    (void)parameters;
    const cache_row row = {TQKV_TQ4, TQKV_TQ3, 64, 12, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    float *centers = test_rows(7, DATA_GAUSSIAN, 2 * CACHE_HEADS, 64), *values = centers + CACHE_HEADS * 64;
    tqkv_cache *plain = cache_make(&row, &desc), *cache = cache_given(&desc, centers, NULL, values, NULL), *fork = NULL;
    REQUIRE(cache && plain, "no cache");
    CHECK(tqkv_cache_bytes(cache) == tqkv_cache_bytes(plain), "centres are counted");
    CHECK(test_keys(cache)->center != centers, "the centre is not a copy");
    cache_append_seed(cache, 3, 11, 64);
    CHECK_RESULT(tqkv_cache_truncate(cache, 0), TQKV_OK);
    CHECK(test_values(cache)->center && test_values(cache)->center[0] == values[0], "the centre is gone");
    desc.value_center = values;
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), TQKV_OK);
    tqkv_cache_destroy(fork);
    values[CACHE_HEADS * 64 - 1] += 1.0f;
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), TQKV_INVALID_ARGUMENT);
    desc.value_center = NULL;
    desc.key_scale = centers; /* there is none */
    for (int i = 0; i < CACHE_HEADS * 64; i++) centers[i] = 1.0f;
    CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(plain);
    tqkv_cache_destroy(cache);
    free(centers);
}

/* A ring's capacity decides where it wraps, which may be within a tile:
 * a copy of another capacity has the same bits. */
static void check_fork_bits(const void *parameters)
{
    enum { N = 150, DIM = 64, TAIL = 32, QUERIES = 32, VALUES = QUERIES * CACHE_HEADS * CACHE_GROUP };
    const int index = *(const int *)parameters;
    const cache_row row = {
        test_formats[index % TEST_FORMATS], test_formats[(index + 3) % TEST_FORMATS], DIM, 110, true, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL), larger = test_cache_desc(0, 0, 0, 0);
    float *k = test_rows(1, DATA_STUDENT, N * CACHE_HEADS, DIM + TAIL), *v = cache_data(2, N, DIM);
    float *q = test_rows(3, DATA_GAUSSIAN, VALUES, DIM + TAIL), out[2][VALUES * DIM];
    desc.tail_dim = TAIL;
    if (index % 4 > 1) desc.exact_first = desc.exact_last = 50;
    if (index % 3 == 1) desc.window = 70;
    int32_t list[QUERIES][2];
    tqkv_attention some;
    memset(&some, 0, sizeof some);
    for (int i = 0; i < QUERIES; i++) { /* blocks of 64 positions: the ring of 110 wraps in block 1 */
        list[i][0] = 1;
        list[i][1] = i % 2 ? 2 : -1;
    }
    if (index % 5 == 4) some.list.rows = list[0];
    some.list.length = 2;
    some.list.block = 64;
    tqkv_cache *ring = cache_make(&row, &desc), *copy;
    REQUIRE(ring, "no cache");
    for (int i = 0; i < N; i += 50) /* the ring drops 40 */
        CHECK_RESULT(tqkv_cache_append(ring, k + i * CACHE_HEADS * (DIM + TAIL), v + i * CACHE_HEADS * DIM, 50),
                     TQKV_OK);
    CHECK_RESULT(test_attend_some(ring, &some, q, QUERIES, out[0]), TQKV_OK);
    for (larger.capacity = 128; larger.capacity < 200; larger.capacity += 11) {
        CHECK_RESULT(tqkv_cache_fork(ring, &larger, &copy), TQKV_OK);
        CHECK_RESULT(test_attend_some(copy, &some, q, QUERIES, out[1]), TQKV_OK);
        CHECK(!memcmp(out[0], out[1], sizeof out[0]), "a ring of %d has other bits", larger.capacity);
        tqkv_cache_destroy(copy);
    }
    tqkv_cache_destroy(ring);
    free(k);
    free(v);
    free(q);
}

/* Gives the same block for any size: a cache that is made touches little of its memory. */
static void *alloc_too_little(void *user, size_t size) { return size > SIZE_MAX / 16 ? user : malloc(size); }

static void free_too_little(void *user, void *pointer, size_t size)
{
    (void)size;
    if (pointer != user) free(pointer);
}

/* A copy and a loaded cache take over that their queries see all positions. */
static void check_non_causal_copy(const void *parameters)
{
    static const cache_row row = {TQKV_TQ4, TQKV_TQ3, 64, 10, false, 5, -1};
    const tqkv_cache_desc desc = cache_desc(&row, NULL);
    tqkv_cache *cache = cache_make(&row, &desc);
    tqkv_cache_desc use = test_cache_desc(0, 0, 0, 0);
    (void)parameters;
    REQUIRE(cache, "no cache");
    use.non_causal = true;
    for (int way = 0; way < 2; way++) {
        stream s = stream_of_cache(cache);
        tqkv_cache *copy = NULL;
        CHECK_RESULT(way ? tqkv_cache_fork(cache, &use, &copy) : tqkv_cache_load(&use, stream_read, &s, &copy),
                     TQKV_OK);
        CHECK(test_view(copy, 1).non_causal && !test_view(cache, 1).non_causal, "way %d", way);
        tqkv_cache_destroy(copy);
        stream_free(&s);
    }
    tqkv_cache_destroy(cache);
}

/* Codes that a size_t can count beside halves that it cannot: of the first positions, and of those before a cache has
   learned. */
static void check_too_large(const void *parameters)
{
    static uint64_t room[2048];
    const int bits = sizeof(size_t) == 8 ? 30 : 14;
    const cache_row row = {TQKV_TQ2, TQKV_TQ2, 32, 1 << bits, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    tqkv_cache *cache = NULL;
    (void)parameters;
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
    for (int i = 0; i < 20; i++) test_add(check_fork_bits, &i, sizeof i, "cache/fork_bits/%d", i);
    test_add(check_centers, NULL, 0, "cache/centers");
    test_add(check_defaults, NULL, 0, "cache/defaults");
    test_add(check_ring_refusals, NULL, 0, "cache/ring_refusals");
    test_add(check_out_over_cache, NULL, 0, "cache/out_over_cache");
    test_add(check_non_causal_copy, NULL, 0, "cache/non_causal_copy");
    test_add(check_too_large, NULL, 0, "cache/too_large");
}

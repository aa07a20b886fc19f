/* Snapshots: damaged bytes, failing streams, headers, and bytes that cross between machines. Round trips: histories. */
#include "cache_fixture.h"
#include "damage.h"

/* Loads the snapshot into a new cache; NULL on failure. Sets *result. */
static tqkv_cache *load(const tqkv_cache_desc *desc, stream *s, tqkv_result *result)
{
    tqkv_cache *cache = (tqkv_cache *)(uintptr_t)1; /* must become NULL on failure */
    stream_rewind(s);
    *result = tqkv_cache_load(desc, stream_read, s, &cache);
    return cache;
}

/* A desc that accepts every snapshot. */
static tqkv_cache_desc open_desc(counting *counter)
{
    tqkv_cache_desc desc = test_cache_desc(0, 0, 0, 0);
    desc.allocator = counting_allocator(counter);
    return desc;
}

/* The snapshot of a new cache. Empty, and a failed check, if the cache cannot be made. */
static stream make_snapshot(const cache_row *row, const tqkv_cache_desc *desc)
{
    tqkv_cache *cache = cache_make(row, desc);
    stream s = stream_of_cache(cache);
    tqkv_cache_destroy(cache);
    return s;
}

/* ---- Samples of all kinds of caches ---- */

typedef struct sample_row {
    cache_row shape; /* its truncate does not count */
    int tail_dim;
    tqkv_format tail;
    int calibrate, exact_first, exact_last;
    bool shared, centered;
} sample_row;

enum { SAMPLE_PLAIN, SAMPLE_RING, SAMPLE_EMPTY, SAMPLE_LATENT, SAMPLE_SHARED, SAMPLE_LEARNS, SAMPLE_LEARNED, SAMPLES };

static const sample_row samples[SAMPLES] = {
    {{TQKV_TQ4, TQKV_TQ5, 32, 6, false, 3, -1}, 0, TQKV_FORMAT_DEFAULT, 0, 0, 0, false, false},
    {{TQKV_I8, TQKV_F16, 32, 3, true, 7, -1}, 0, TQKV_FORMAT_DEFAULT, 0, 0, 0, false, false},
    {{TQKV_TQ6, TQKV_TQ8, 32, 3, true, 0, -1}, 0, TQKV_FORMAT_DEFAULT, 0, 0, 0, false, false},
    {{TQKV_TQ4, TQKV_FORMAT_DEFAULT, 32, 20, false, 3, -1}, 32, TQKV_F16, 0, 0, 0, true, false},
    {{TQKV_TQ4, TQKV_FORMAT_DEFAULT, 64, 20, true, 25, -1}, 32, TQKV_I8, 0, 0, 0, true, true},
    {{TQKV_TQ4, TQKV_TQ3, 32, 64, false, 10, -1}, 32, TQKV_F16, 40, 4, 8, false, false},
    {{TQKV_TQ4, TQKV_TQ3, 32, 64, false, 17, -1}, 32, TQKV_F16, 16, 2, 3, false, false}};

static tqkv_cache *sample_cache(const sample_row *row)
{
    const int key_dim = row->shape.head_dim + row->tail_dim, n = row->shape.n_tokens;
    tqkv_cache_desc desc = cache_desc(&row->shape, NULL);
    float *k = cache_data(31, n + 1, key_dim), *v = cache_data(32, n + 1, row->shape.head_dim);
    float *center = cache_data(33, 1, key_dim);
    desc.shared = row->shared;
    desc.tail_dim = row->tail_dim;
    desc.tail_format = row->tail;
    desc.calibrate = row->calibrate;
    desc.exact_first = row->exact_first;
    desc.exact_last = row->exact_last;
    tqkv_cache *cache = cache_given(&desc, row->centered ? center : NULL, NULL, NULL, NULL);
    for (int t = 0; cache && t < n; t++)
        CHECK_RESULT(tqkv_cache_append(cache, k + t * CACHE_HEADS * key_dim,
                                       row->shared ? NULL : v + t * CACHE_HEADS * row->shape.head_dim, 1),
                     TQKV_OK);
    free(k);
    free(v);
    free(center);
    return cache;
}

/* Empty, and a failed check, if the cache cannot be made. */
static stream sample_stream(int index)
{
    tqkv_cache *cache = sample_cache(&samples[index]);
    stream s = stream_of_cache(cache);
    tqkv_cache_destroy(cache);
    return s;
}

static void check_hash(const stream *s, uint64_t expected)
{
    const uint64_t hash = XXH3_64bits(s->bytes, s->size);
    CHECK(hash == expected, "XXH3 0x%08x%08x", (unsigned)(hash >> 32), (unsigned)hash);
}

/* The bytes of a snapshot are the same everywhere and for good. */
static void check_bytes(const void *parameters)
{
    static const uint64_t hashes[SAMPLES] = {0x16411b74df4605e5u, 0xfc9118858398d335u, 0x70a4305adfd0d756u,
                                             0x9649d3e66252e17fu, 0x3cfc1417f6d3d29cu, 0x68f9fa3e397843a3u,
                                             0xe2ebeec2614497c8u};
    const int index = *(const int *)parameters;
    stream s = sample_stream(index);
    check_hash(&s, hashes[index]);
    stream_free(&s);
}

/* ---- Damage ---- */

static tqkv_result save_cache(const saved_thing *s, stream *to)
{
    return tqkv_cache_save((const tqkv_cache *)s->from, stream_write, to);
}

static tqkv_result load_cache(const saved_thing *s, stream *from)
{
    counting counter = {0, 0, 0, 0, 0};
    const tqkv_cache_desc open = open_desc(&counter);
    tqkv_result result;
    (void)s;
    test_explained = NULL;
    tqkv_cache *cache = load(&open, from, &result);
    CHECK((cache != NULL) == (result == TQKV_OK), "%s: a cache, or none", tqkv_result_string(result));
    CHECK(result != TQKV_CORRUPT || test_explained, "no text");
    tqkv_cache_destroy(cache);
    CHECK_NO_LEAK(&counter);
    return result;
}

static void expect_corrupt(stream *s, const char *what, size_t at)
{
    static const saved_thing any = {save_cache, load_cache, NULL, NULL};
    damage_expect(&any, s, TQKV_CORRUPT, what, at);
}

static void check_damaged(const void *parameters)
{
    tqkv_cache *cache = sample_cache(&samples[*(const int *)parameters]);
    const saved_thing s = {save_cache, load_cache, cache, NULL};
    damage_bytes(&s);
    tqkv_cache_destroy(cache);
}

static void check_failing(const void *parameters)
{
    const damage_row *row = (const damage_row *)parameters;
    tqkv_cache *cache = sample_cache(&samples[row->index]);
    const saved_thing s = {save_cache, load_cache, cache, NULL};
    damage_calls(&s, &row->call);
    tqkv_cache_destroy(cache);
}

/* ---- Invalid headers with a valid hash ---- */

enum { HEADER_SIZE = 144 }; /* its hash follows */

/* The sets of samples. */
enum { PLAIN = 1 << SAMPLE_PLAIN, LATENT = 1 << SAMPLE_LATENT, LEARNS = 1 << SAMPLE_LEARNS };
enum { CODED = PLAIN | LATENT, ALL = CODED | LEARNS };

static const field_row header_rows[] = {
    {"magic", 0, 8, 0, 0, 1, ALL},
    {"version", 8, 4, 0, 0, 1, ALL},
    {"size", 12, 4, 0, 0, 1, ALL},
    {"codes_version", 24, 4, 0, 0, 1, ALL},
    {"head_dim", 28, 4, 0, 0, 1, ALL},
    {"value_dim", 32, 4, 0, 0, 1, ALL},
    {"tail_dim", 36, 4, 0, 0, 1, ALL},
    {"n_kv_heads", 40, 4, 0, 0, 1, ALL},
    {"n_heads", 44, 4, CACHE_HEADS, INT32_MAX - 1, CACHE_HEADS, ALL},
    {"capacity", 48, 4, 3, INT32_MAX, 1, CODED},
    {"key_format", 52, 4, 1, TEST_FORMATS, 1, ALL},
    {"value_format", 56, 4, 1, TEST_FORMATS, 1, PLAIN | LEARNS},
    {"value_format", 56, 4, 0, 0, 1, LATENT},
    {"tail_format", 60, 4, 0, 0, 1, ALL},
    {"type", 64, 4, 0, 0, 1, ALL},
    {"flags", 68, 4, 0, 1, 1, PLAIN},
    {"flags", 68, 4, 2, 3, 1, LATENT},
    {"flags", 68, 4, 0, 0, 1, LEARNS},
    {"window", 72, 4, 0, INT32_MAX, 1, ALL},
    {"scale", 76, 4, 1, 0xff7fffff, 1, ALL}, /* as bits: finite, of any sign */
    {"softcap", 80, 4, 0, 0x7f7fffff, 1, ALL},
    {"calibrate", 84, 4, 16, INT32_MAX, 1, ALL},
    {"exact_first", 88, 4, 0, 0, 1, CODED},
    {"exact_first", 88, 4, 0, INT32_MAX, 1, LEARNS},
    {"exact_last", 92, 4, 0, 0, 1, CODED},
    {"exact_last", 92, 4, 0, INT32_MAX, 1, LEARNS},
    {"kept", 96, 4, 0, 0, 1, ALL},
    {"lacks_halves", 100, 4, 0, 0, 1, ALL},
    {"learns_new", 104, 4, 0, 0, 1, CODED},
    {"learns_new", 104, 4, 16, 40, 1, LEARNS},
    {"learns_last", 108, 4, 0, 0, 1, ALL},
    {"pairs", 112, 4, 0, 2, 1, ALL},
    {"rotary_dim", 116, 4, 0, 32, 2, ALL},
    {"first", 120, 8, 0, 0, 1, ALL},
    {"end", 128, 8, 0, 0, 1, ALL},
    {"exact_from", 136, 8, 0, 0, 1, ALL},
};

static void check_header(const void *parameters)
{
    const field_row *row = (const field_row *)parameters;
    for (int i = 0; i < SAMPLES; i++) {
        if (!(row->set >> i & 1)) continue;
        tqkv_cache *cache = sample_cache(&samples[i]);
        const saved_thing s = {save_cache, load_cache, cache, NULL};
        damage_field(&s, row, HEADER_SIZE, TQKV_CORRUPT);
        tqkv_cache_destroy(cache);
    }
}

/* An empty cache whose streams each have a size, but not together. */
static void check_huge_header(NO_ROW)
{
    cache_row shape = {TQKV_TQ2, TQKV_TQ2, 32, 6, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&shape, NULL);
    stream s = make_snapshot(&shape, &desc);
    REQUIRE(s.bytes, "no snapshot");
    for (size_t offset = 40; offset <= 48; offset += 4) /* KV heads, heads, capacity */
        damage_put(&s, 0, HEADER_SIZE, offset, 4, 1 << 30);
    expect_corrupt(&s, "2^30 heads of 2^30 positions", 0);
    stream_free(&s);
}

/* More first positions than a ring of 6 has room for: nothing is written behind the room. */
static void check_kept_beyond_capacity(NO_ROW)
{
    cache_row shape = {TQKV_TQ4, TQKV_TQ5, 32, 6, true, 20, -1};
    tqkv_cache_desc desc = cache_desc(&shape, NULL);
    desc.exact_first = 8;
    stream s = make_snapshot(&shape, &desc);
    REQUIRE(s.bytes, "no snapshot");
    CHECK(s.bytes[96] == 6, "%d first positions", s.bytes[96]);
    damage_put(&s, 0, HEADER_SIZE, 96, 4, 7);
    expect_corrupt(&s, "first positions", 7);
    CHECK(s.at == HEADER_SIZE + 8, "%d bytes were read", (int)s.at);
    stream_free(&s);
}

/* What is wrong with a snapshot, in words. Of another version a reader knows magic, version and size, and no more:
 * nothing behind these is read. */
static void check_words(NO_ROW)
{
    static const struct {
        const char *words;
        int at, change, size; /* of a byte, and what is left of the snapshot's length */
        bool hashed;
        size_t read; /* 0: any */
    } rows[] = {{"newer version", 8, 1, 0, false, 16},  {"older version", 8, -1, 0, false, 16},
                {"newer version", 24, 1, 0, true, 0},   {"older version", 24, -1, 0, true, 0},
                {"first bytes", 0, 1, 0, false, 16},    {"another size", 12, 8, 0, false, 16},
                {"no cache writes", 64, 1, 0, true, 0}, {"checksum", 64, 1, 0, false, 0},
                {"checksum", 160, 1, 0, false, 0},      {"cut short", 0, 0, 10, false, 0},
                {"cut short", 0, 0, 100, false, 0},     {"cut short", 0, 0, 170, false, 0}};
    for (int i = 0; i < (int)(sizeof rows / sizeof *rows); i++) {
        stream s = sample_stream(SAMPLE_PLAIN);
        REQUIRE(s.bytes, "no snapshot");
        CHECK(s.bytes[12] == HEADER_SIZE + 8 && !s.bytes[13], "the header does not say its size");
        const unsigned char byte = (unsigned char)(s.bytes[rows[i].at] + rows[i].change);
        if (rows[i].hashed)
            damage_put(&s, 0, HEADER_SIZE, (size_t)rows[i].at, 1, byte);
        else
            s.bytes[rows[i].at] = byte;
        if (rows[i].size) s.size = (size_t)rows[i].size;
        expect_corrupt(&s, rows[i].words, (size_t)i);
        CHECK(test_explained && strstr(test_explained, rows[i].words), "%s: %s", rows[i].words,
              test_explained ? test_explained : "no text");
        CHECK(!rows[i].read || s.at == rows[i].read, "%s: %d bytes were read", rows[i].words, (int)s.at);
        stream_free(&s);
    }
}

/* A large empty cache that was to learn, but got a centre: nothing is read behind its snapshot. */
static void check_settled(NO_ROW)
{
    const cache_row shape = {TQKV_I8, TQKV_I8, 1024, 200, true, 0, -1};
    tqkv_cache_desc desc = cache_desc(&shape, NULL), open = test_cache_desc(0, 0, 0, 0);
    tqkv_cache *loaded = NULL;
    float *center = test_rows(7, DATA_GAUSSIAN, CACHE_HEADS, 1024);
    desc.calibrate = 16;
    desc.exact_last = 3;
    tqkv_cache *cache = cache_given(&desc, NULL, NULL, center, NULL);
    stream s = stream_of_cache(cache);
    CHECK_RESULT(tqkv_cache_load(&open, stream_read, &s, &loaded), TQKV_OK);
    CHECK(s.at == s.size, "%d of %d bytes were read", (int)s.at, (int)s.size);
    tqkv_cache_destroy(loaded);
    tqkv_cache_destroy(cache);
    stream_free(&s);
    free(center);
}

/* The tag of the model, in the snapshot and in the desc of the load or of the fork. */
static void check_tag(NO_ROW)
{
    static const uint64_t tags[3] = {0, UINT64_C(0x8123456789abcdef), 7};
    cache_row shape = {TQKV_TQ4, TQKV_TQ5, 32, 6, false, 3, -1};
    for (int i = 0; i < 9; i++) {
        tqkv_cache_desc desc = cache_desc(&shape, NULL);
        const uint64_t saved = tags[i / 3], wanted = tags[i % 3];
        const bool other = saved && wanted && saved != wanted;
        tqkv_cache *fork = NULL;
        tqkv_result result;
        desc.tag = saved;
        tqkv_cache *cache = cache_make(&shape, &desc);
        REQUIRE(cache, "no cache");
        stream s = stream_of_cache(cache);
        desc.tag = wanted;
        tqkv_cache *loaded = load(&desc, &s, &result);
        CHECK_RESULT(result, other ? TQKV_INVALID_ARGUMENT : TQKV_OK);
        test_explained = "";
        CHECK_RESULT(tqkv_cache_fork(cache, &desc, &fork), other ? TQKV_INVALID_ARGUMENT : TQKV_OK);
        CHECK(!other || strstr(test_explained, "desc: tag "), "%s", test_explained);
        if (loaded && fork) {
            const uint64_t expected = saved ? saved : wanted;
            stream again = stream_of_cache(loaded), forked = stream_of_cache(fork);
            CHECK(!memcmp(again.bytes + 16, forked.bytes + 16, 8), "load and fork have other tags");
            for (int byte = 0; byte < 8; byte++)
                CHECK(again.bytes[16 + byte] == (unsigned char)(expected >> 8 * byte), "byte %d of the tag", byte);
            stream_free(&again);
            stream_free(&forked);
        }
        tqkv_cache_destroy(loaded);
        tqkv_cache_destroy(fork);
        tqkv_cache_destroy(cache);
        stream_free(&s);
    }
}

/* A centre that is not finite, with a valid hash. Streams without positions hold their centre and its hash. */
static void check_center(const void *parameters)
{
    const bool of_values = *(const bool *)parameters;
    const cache_row row = {TQKV_TQ4, TQKV_TQ5, 32, 6, false, 0, -1};
    counting counter = {0, 0, 0, 0, 0};
    tqkv_cache_desc desc = cache_desc(&row, NULL), open = open_desc(&counter);
    float *center = test_rows(7, DATA_GAUSSIAN, CACHE_HEADS, row.head_dim);
    tqkv_cache *cache = cache_given(&desc, of_values ? NULL : center, NULL, of_values ? center : NULL, NULL);
    stream s = stream_of_cache(cache);
    const size_t begin = HEADER_SIZE + 8 + (of_values ? 8 : 0), size = CACHE_HEADS * 32 * sizeof(float);
    REQUIRE(s.size == HEADER_SIZE + 3 * 8 + size, "%d bytes", (int)s.size);
    damage_put(&s, begin, begin + size, begin + size - 4, 4, 0x3f800000); /* 1 */
    tqkv_result result;
    tqkv_cache *loaded = load(&open, &s, &result);
    CHECK_RESULT(result, TQKV_OK);
    tqkv_cache_destroy(loaded);
    damage_put(&s, begin, begin + size, begin + size - 4, 4, 0x7fc00000);
    expect_corrupt(&s, "NaN", 0);
    damage_put(&s, begin, begin + size, begin + size - 4, 4, 0xff800000);
    expect_corrupt(&s, "-infinity", 0);
    stream_free(&s);
    free(center);
    tqkv_cache_destroy(cache);
}

/* ---- Snapshots that cross between machines ---- */

static cache_row crossing_row(int index)
{
    cache_row row = {test_formats[index % TEST_FORMATS],
                     test_formats[(index + 3) % TEST_FORMATS],
                     test_head_dims[index % 6],
                     9,
                     index % 2 != 0,
                     index % 2 ? 14 : 8,
                     index % 3 ? -1 : 7};
    return row;
}

enum { CROSSING_STORES = 4 };

/* A store of 9 positions in one page, with a centre: of rotated halves, with a scale, not rotated, or none of these.
   The caller frees both. */
static tqkv_store crossing_store(int index)
{
    static const int32_t page = 1;
    tqkv_store s = test_store(test_formats[index], test_head_dims[index], CACHE_HEADS, 128, false);
    float *channels = test_rows(4, DATA_GAUSSIAN, 2 * CACHE_HEADS, s.head_dim),
          *scale = channels + CACHE_HEADS * s.head_dim;
    for (int i = 0; i < CACHE_HEADS * s.head_dim; i++) scale[i] = fabsf(scale[i]) + 0.5f;
    s.center = channels;
    if (index == 0) s.rotation = TQKV_ROTATION_ON;
    if (index == 1) s.channel_scale = scale;
    if (index == 2) s.rotation = TQKV_ROTATION_OFF;
    s.pages = &page;
    s.n_pages = 1;
    s.page_size = 64;
    return s;
}

static void free_crossing_store(tqkv_store *s)
{
    free((void *)(uintptr_t)s->center);
    test_store_free(s);
}

static void save_crossing_store(int index, stream *to)
{
    tqkv_store s = crossing_store(index);
    float *rows = cache_data(3, 9, s.head_dim);
    CHECK_RESULT(tqkv_encode(&s, rows, 9, 0), TQKV_OK);
    CHECK_RESULT(tqkv_store_save(&s, 0, 9, stream_write, to), TQKV_OK);
    free(rows);
    free_crossing_store(&s);
}

/* The bytes of 16 caches and some stores one after the other. Encoding is exact: every machine writes the same ones. */
static stream crossing_bytes(void)
{
    stream s = stream_empty();
    for (int i = 0; i < 16; i++) {
        cache_row row = crossing_row(i);
        tqkv_cache_desc desc = cache_desc(&row, NULL);
        desc.scale = 0.1f;
        tqkv_cache *cache = cache_make(&row, &desc);
        if (cache) CHECK_RESULT(tqkv_cache_save(cache, stream_write, &s), TQKV_OK);
        tqkv_cache_destroy(cache);
    }
    for (int i = 0; i < CROSSING_STORES; i++) save_crossing_store(i, &s);
    return s;
}

/* Loads a cache, or from 16 on a store, and saves it again. */
static tqkv_result load_crossing(int index, stream *s, stream *again)
{
    tqkv_result result;
    if (index < 16) {
        const tqkv_cache_desc open = test_cache_desc(0, 0, 0, 0);
        tqkv_cache *cache = NULL;
        result = tqkv_cache_load(&open, stream_read, s, &cache);
        if (result == TQKV_OK) result = tqkv_cache_save(cache, stream_write, again);
        tqkv_cache_destroy(cache);
        return result;
    }
    tqkv_store store = crossing_store(index - 16);
    result = tqkv_store_load(&store, 0, 9, stream_read, s);
    if (result == TQKV_OK) result = tqkv_store_save(&store, 0, 9, stream_write, again);
    free_crossing_store(&store);
    return result;
}

/* All machines write the same bytes: what one loads and saves again could have come from any other. */
static void check_crossing(NO_ROW)
{
    stream s = crossing_bytes(), again = stream_empty();
    check_hash(&s, UINT64_C(0x63ae8a28538524e2));
    for (int i = 0; i < 16 + CROSSING_STORES; i++) CHECK_RESULT(load_crossing(i, &s, &again), TQKV_OK);
    CHECK(stream_is_equal(&s, &again), "saved again, the bytes differ");
    stream_free(&s);
    stream_free(&again);
}

/* ---- What a load asks for before the bytes have arrived ---- */

typedef struct bounded {
    size_t live, most; /* bytes */
} bounded;

static void *bounded_alloc(void *user, size_t size)
{
    bounded *b = (bounded *)user;
    b->live += size;
    if (b->live > b->most) b->most = b->live;
    return malloc(size);
}

static void bounded_free(void *user, void *pointer, size_t size)
{
    ((bounded *)user)->live -= size;
    free(pointer);
}

/* The snapshot of a cache of `capacity` positions of which `resident` are filled, and six bytes behind it. */
static stream filled_snapshot(int capacity, int resident, int n_kv_heads, bool centers)
{
    cache_row shape = {TQKV_I8, TQKV_TQ4, 128, capacity, false, resident, -1};
    if (n_kv_heads > CACHE_HEADS) shape.key_format = shape.value_format = TQKV_TQ2;
    tqkv_cache_desc desc = cache_desc(&shape, NULL);
    desc.n_kv_heads = desc.n_heads = n_kv_heads;
    float *center = test_rows(7, DATA_GAUSSIAN, n_kv_heads, shape.head_dim);
    tqkv_cache *filled = centers ? cache_given(&desc, center, NULL, center, NULL) : cache_make(&shape, &desc);
    free(center);
    if (!filled) return stream_empty();
    stream s = stream_of_cache(filled);
    tqkv_cache_destroy(filled);
    stream_write(&s, "behind", 6);
    return s;
}

/* A snapshot, whole and cut short. A short file asks for little memory whatever capacity it states; a whole one is read
   to its last byte and no further. */
static void check_held_back(const void *parameters)
{
    const int *row = (const int *)parameters;
    stream s = filled_snapshot(row[0], row[1], row[2], row[3]);
    REQUIRE(s.bytes, "no snapshot");
    const size_t whole = s.size - 6;
    bounded b = {0, 0};
    tqkv_cache_desc open = test_cache_desc(0, 0, 0, 0);
    open.allocator.alloc = bounded_alloc;
    open.allocator.free = bounded_free;
    open.allocator.user = &b;
    tqkv_result result;
    for (int i = 0; i <= 40; i++) {
        s.size = i == 40 ? whole - 1 : whole * (size_t)i / 40;
        b.most = 0;
        tqkv_cache *cache = load(&open, &s, &result);
        CHECK(result == TQKV_CORRUPT && !cache, "%d of %d bytes: %s", (int)s.size, (int)whole,
              tqkv_result_string(result));
        CHECK(b.most <= 20 * s.size + (1 << 20) + 65536, "%d of %d bytes: %d asked for", (int)s.size, (int)whole,
              (int)b.most);
        CHECK(b.live == 0, "%d bytes leaked", (int)b.live);
    }
    s.size = whole + 6;
    tqkv_cache *cache = load(&open, &s, &result);
    CHECK_RESULT(result, TQKV_OK);
    REQUIRE(cache, "no cache");
    CHECK(s.at == whole, "%d of %d bytes were read", (int)s.at, (int)whole);
    stream again = stream_of_cache(cache);
    CHECK(again.size == whole && !memcmp(again.bytes, s.bytes, whole), "saving after loading gives other bytes");
    tqkv_cache_destroy(cache);
    CHECK(b.live == 0, "%d bytes leaked", (int)b.live);
    stream_free(&s);
    stream_free(&again);
}

void test_snapshot_cases(void)
{
    /* capacity, resident, KV heads, centres; those of many heads are of the room for centres, and of centres */
    static const int held_back[][4] = {{200, 150, 2, 0},   {9000, 0, 2, 0},  {9000, 100, 2, 0}, {9000, 9000, 2, 0},
                                       {300000, 40, 2, 0}, {1, 0, 12000, 0}, {1, 0, 12000, 1}};
    for (int i = 0; i < 7; i++)
        test_add(check_held_back, held_back[i], sizeof *held_back, "snapshot/held_back/%d_of_%d%s", held_back[i][1],
                 held_back[i][0], held_back[i][3] ? "_with_centers" : "");
    test_add(check_huge_header, NULL, 0, "snapshot/huge_header");
    test_add(check_kept_beyond_capacity, NULL, 0, "snapshot/kept_beyond_capacity");
    test_add(check_words, NULL, 0, "snapshot/words");
    test_add(check_tag, NULL, 0, "snapshot/tag");
    test_add(check_settled, NULL, 0, "snapshot/settled");
    test_add(check_crossing, NULL, 0, "snapshot/crossing");
    for (int i = 0; i < SAMPLES; i++) {
        test_add(check_bytes, &i, sizeof i, "snapshot/bytes/%d", i);
        test_add(check_damaged, &i, sizeof i, "snapshot/damaged/%d", i);
    }
    for (int i = 0; i < SAMPLE_SHARED; i++) damage_add_calls(check_failing, "snapshot/failing", i);
    for (size_t i = 0; i < sizeof header_rows / sizeof *header_rows; i++)
        test_add(check_header, &header_rows[i], sizeof *header_rows, "snapshot/header/%s/%d", header_rows[i].name,
                 header_rows[i].set);
    for (int i = 0; i < 2; i++) {
        const bool of_values = i > 0;
        test_add(check_center, &of_values, sizeof of_values, "snapshot/center/%s", i ? "values" : "keys");
    }
}

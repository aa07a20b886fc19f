/* make fuzz FUZZERS=snapshot SECONDS=60; AFL++: make fuzz-afl FUZZERS=snapshot. Loads arbitrary bytes as a cache or
   into a store. If the input asks for it, the checksums are corrected first, to reach the parser behind them. */
#include "fuzz.h"
#include "tests/damage.h"

enum { HEADER = 144, STORES = 11, MAX_FILE = 1 << 15, MAX_MEMORY = 1 << 18, MAX_SINKS = 64 };

typedef struct control {
    bool is_made, fix_header, fix_streams, with_sinks;
    int n_edits;
    size_t chunk;
    int fail_alloc, fail_read;
    size_t read_answer;
    uint8_t match; /* which fields of the desc are set */
    bool is_store;
} control;

static control read_control(fuzz_input *input)
{
    control c;
    uint8_t flags = fuzz_byte(input);
    c.is_made = (flags & 1) != 0;
    c.fix_header = (flags & 2) != 0;
    c.fix_streams = (flags & 4) != 0;
    c.with_sinks = (flags & 8) != 0;
    c.n_edits = flags >> 4;
    c.chunk = fuzz_byte(input);
    const uint8_t alloc = fuzz_byte(input);
    c.is_store = alloc >= 192;
    c.fail_alloc = alloc % 4;
    uint8_t fail = fuzz_byte(input);
    c.fail_read = fail & 127;
    c.read_answer = fail & 128 ? SIZE_MAX : 0;
    c.match = fuzz_byte(input);
    return c;
}

static void put(uint8_t *bytes, int n, uint64_t value)
{
    for (int i = 0; i < n; i++) bytes[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get(const uint8_t *bytes, int n)
{
    uint64_t value = 0;
    for (int i = 0; i < n; i++) value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

/* A cache of any kind. */
static tqkv_cache_desc make_cache_desc(fuzz_input *input)
{
    static const float numbers[4] = {0.125f, 1.0f, 7.5f, 1e-3f};
    const uint8_t flags = fuzz_byte(input), kind = fuzz_byte(input), ends = fuzz_byte(input);
    tqkv_cache_desc d;
    memset(&d, 0, sizeof d);
    d.head_dim = fuzz_head_dim(input);
    d.n_kv_heads = fuzz_range(input, 1, 3);
    d.n_heads = d.n_kv_heads * fuzz_range(input, 1, 4);
    d.capacity = fuzz_range(input, 1, 40);
    d.key_format = test_formats[fuzz_range(input, 0, TEST_FORMATS - 1)];
    d.value_format = test_formats[fuzz_range(input, 0, TEST_FORMATS - 1)];
    d.ring = flags & 1;
    d.shared = flags & 2;
    if (d.shared) d.value_format = TQKV_FORMAT_DEFAULT;
    if (flags & 64 && !d.shared) d.value_dim = test_all_head_dims[kind % 6];
    if (flags & 128) d.tail_dim = test_all_head_dims[kind / 8 % 8];
    if (d.tail_dim) d.tail_format = test_formats[kind % TEST_FORMATS];
    d.window = kind & 64 ? d.ring ? 1 + ends % d.capacity : ends : 0;
    d.scale = numbers[ends % 4];
    d.softcap = numbers[kind % 4];
    d.tag = kind & 128 ? UINT64_MAX - ends : 0;
    if (flags & 16) d.exact_first = ends % 5 % (d.capacity + 1);
    if (flags & 32) d.exact_last = 1 + ends / 5 % 30;
    if (flags & 8) d.calibrate = 16;
    return d;
}

/* A cache with centres and scales, as bits of `channels` say, and some appends; NULL if there is none. */
static tqkv_cache *fill_cache(fuzz_input *input, const tqkv_cache_desc *d)
{
    const int key_dim = d->head_dim + d->tail_dim, value_dim = d->value_dim ? d->value_dim : d->head_dim;
    const int rows = 24 * d->n_kv_heads;
    const uint8_t channels = fuzz_byte(input);
    float *k = fuzz_new_floats(4, rows, key_dim), *v = fuzz_new_floats(4, rows, value_dim);
    fuzz_data(4, DATA_STUDENT, k, rows, key_dim);
    fuzz_data(5, DATA_STUDENT, v, rows, value_dim);
    const float *values = d->shared ? NULL : v;
    float *scales = fuzz_new_floats(4, rows, key_dim);
    tqkv_cache_desc given = *d;
    tqkv_cache *cache = NULL;
    if (channels & 2) given.key_center = channels & 1 ? k : NULL;
    if (channels & 1) given.value_center = values;
    for (int i = 0; i < rows * key_dim; i++) scales[i] = fabsf(k[i]) + 0.5f;
    if (channels & 4) given.key_scale = scales;
    if (tqkv_cache_create(&given, &cache) != TQKV_OK) cache = NULL;
    memcpy(k, scales, sizeof(float) * (size_t)(rows * key_dim));
    free(scales);
    for (int n = channels >> 4; cache && n > 0; n--) {
        const tqkv_result result = tqkv_cache_append(cache, k, values, fuzz_byte(input) % 24);
        CHECK(result == TQKV_OK || result == TQKV_OUT_OF_RANGE, "append: %s", tqkv_result_string(result));
    }
    if (cache && channels & 8) CHECK_RESULT(tqkv_cache_truncate(cache, tqkv_cache_end(cache)), TQKV_OK);
    free(k);
    free(v);
    return cache;
}

/* The file of a possible cache: valid until it is edited. */
static size_t make_file(fuzz_input *input, uint8_t *file)
{
    const tqkv_cache_desc d = make_cache_desc(input);
    tqkv_cache *cache = NULL;
    size_t size = 0;
    if (tqkv_cache_create(&d, &cache) != TQKV_OK) return 0;
    tqkv_cache_destroy(cache);
    cache = fill_cache(input, &d);
    if (!cache) return 0;
    stream s = stream_empty();
    CHECK_RESULT(tqkv_cache_save(cache, stream_write, &s), TQKV_OK);
    if (s.size <= MAX_FILE) memcpy(file, s.bytes, size = s.size);
    tqkv_cache_destroy(cache);
    stream_free(&s);
    return size;
}

/* The file: built from the input, or the input itself. */
static size_t read_file(fuzz_input *input, const control *c, uint8_t *file)
{
    size_t size = c->is_made ? make_file(input, file) : input->left < MAX_FILE ? input->left : MAX_FILE;
    if (!c->is_made && size) memcpy(file, input->at, size);
    for (int i = 0; size && c->is_made && i < c->n_edits; i++) {
        size_t at = (size_t)fuzz_bits(input, 2);
        file[at & 1 ? at / 2 % size : at / 2 % HEADER] = fuzz_byte(input);
    }
    if (c->is_made && c->n_edits > 12) size = size * fuzz_byte(input) / 256;
    return size;
}

/* What memory holds before anybody has written it. */
static int pattern;

static void *limited_alloc(void *user, size_t size)
{
    void *memory = size > MAX_MEMORY ? NULL : counting_alloc(user, size);
    if (memory) memset(memory, pattern, size);
    return memory;
}

static const float sinks[MAX_SINKS] = {0.5f, -1.0f, 2.0f, -3.0f};

/* Sets the fields that `match` names to the file's values, or one of them to a wrong value if `match` says so. */
static tqkv_cache_desc make_desc(const control *c, const uint8_t *file, size_t size, counting *counter)
{
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = counting_allocator(counter);
    desc.allocator.alloc = limited_alloc;
    if (size < HEADER) return desc;
    if (c->match & 1) desc.head_dim = (int)get(file + 28, 2);
    if (c->match & 2) desc.n_kv_heads = (int)get(file + 40, 2);
    if (c->match & 4) desc.capacity = (int)get(file + 48, 2) + (c->match & 128 ? 1 : 0);
    if (c->match & 8) desc.key_format = test_no_format((int)get(file + 52, 2));
    if (c->match & 16) desc.value_format = test_no_format((int)get(file + 56, 2));
    if (c->match & 16) desc.tag = get(file + 16, 8) | (c->match & 128);
    if (c->match & 32) desc.ring = get(file + 68, 1) & 1;
    if (c->match & 64) {
        desc.value_dim = (int)get(file + 32, 4);
        desc.shared = file[68] & 2;
        desc.tail_dim = (int)get(file + 36, 2);
        desc.tail_format = test_no_format((int)get(file + 60, 1));
        memcpy(&desc.softcap, file + 80, 4);
    }
    if (c->with_sinks && get(file + 44, 4) <= MAX_SINKS) desc.sinks = sinks; /* as many as n_heads: the caller's word */
    return desc;
}

/* A file that is loaded: a piece of eight bytes may be the hash of the bytes since the last one. */
typedef struct hashed_file {
    stream *s;
    size_t begin; /* behind the last hash that is right */
} hashed_file;

static uint64_t hash_of(const hashed_file *f) { return XXH3_64bits(f->s->bytes + f->begin, f->s->at - 8 - f->begin); }

static size_t read_hashed(void *user, void *bytes, size_t n)
{
    hashed_file *f = (hashed_file *)user;
    const size_t got = stream_read(f->s, bytes, n);
    if (got == 8 && get(f->s->bytes + f->s->at - 8, 8) == hash_of(f)) f->begin = f->s->at;
    return got;
}

/* Corrects the hash at which loading ends, until it no longer does. */
static void fix_checksums(const control *c, const tqkv_cache_desc *desc, stream *s)
{
    tqkv_result result = TQKV_CORRUPT;
    for (int i = 0; i <= STORES && result == TQKV_CORRUPT; i++) {
        counting counter = {0, 0, 0, 0, 0};
        hashed_file f = {s, 0};
        tqkv_cache_desc own = *desc;
        tqkv_cache *cache = NULL;
        own.allocator.user = &counter;
        stream_rewind(s);
        result = tqkv_cache_load(&own, read_hashed, &f, &cache);
        tqkv_cache_destroy(cache);
        if (result != TQKV_CORRUPT || s->at < f.begin + 8 || !(f.begin ? c->fix_streams : c->fix_header)) break;
        put(s->bytes + s->at - 8, 8, hash_of(&f));
    }
    stream_rewind(s);
}

static tqkv_result load(const tqkv_cache_desc *desc, stream *s, tqkv_cache **cache)
{
    *cache = (tqkv_cache *)(uintptr_t)1;
    tqkv_result result = tqkv_cache_load(desc, stream_read, s, cache);
    CHECK((result == TQKV_OK) == (*cache != NULL), "%s, but cache %p", tqkv_result_string(result), (void *)*cache);
    return result;
}

/* Scratch for many heads, or new halves, may exceed what limited_alloc grants. A window or halves of a ring may be
   gone, and a snapshot may lack halves. */
static void attend(tqkv_cache *cache, const float *q, int n_queries, float *out, size_t n_out, uint64_t *hash)
{
    memset(out, 0, n_out * sizeof *out);
    tqkv_result result = tqkv_cache_attend(cache, q, n_queries, out);
    CHECK(result == TQKV_OK || result == TQKV_OUT_OF_MEMORY || result == TQKV_OUT_OF_RANGE, "attend: %s",
          tqkv_result_string(result));
    *hash = XXH3_64bits_withSeed(out, n_out * sizeof *out, *hash + (uint64_t)result);
}

/* A loaded cache can be used, whatever its norms are. Returns a hash of what its queries get. */
static uint64_t use_cache(tqkv_cache *cache)
{
    uint64_t hash = 0;
    const tqkv_store *keys = test_keys(cache);
    const tqkv_store *tail = test_tail(cache), *shared = test_values(cache) == keys ? keys : NULL;
    int d = keys->head_dim + (tail ? tail->head_dim : 0), value_dim = test_values(cache)->head_dim;
    const int kv_heads = keys->n_kv_heads;
    if (kv_heads > 8) return hash;
    const size_t n_out = (size_t)(2 * MAX_SINKS * kv_heads) * (size_t)value_dim;
    float *rows = fuzz_new_floats(3, kv_heads, d), *q = fuzz_new_floats(2, MAX_SINKS * kv_heads, d);
    float *out = fuzz_new_floats(2, MAX_SINKS * kv_heads, value_dim), *values = fuzz_new_floats(3, kv_heads, value_dim);
    fuzz_data(1, DATA_STUDENT, rows, 3 * kv_heads, d);
    fuzz_data(3, DATA_STUDENT, values, 3 * kv_heads, value_dim);
    fuzz_data(2, DATA_GAUSSIAN, q, 2 * MAX_SINKS * kv_heads, d);
    int64_t end = tqkv_cache_end(cache);
    attend(cache, q, 2, out, n_out, &hash);
    tqkv_result result = tqkv_cache_append(cache, rows, shared ? NULL : values, 3);
    CHECK(result == TQKV_OK || result == TQKV_OUT_OF_MEMORY || result == TQKV_OUT_OF_RANGE, "append: %s",
          tqkv_result_string(result));
    CHECK(tqkv_cache_end(cache) == end + (result == TQKV_OK ? 3 : 0), "end after append");
    attend(cache, q, 1, out, n_out, &hash);
    CHECK_RESULT(tqkv_cache_truncate(cache, tqkv_cache_end(cache)), TQKV_OK);
    result = tqkv_cache_truncate(cache, end - 1);
    CHECK(result == TQKV_OK || result == TQKV_OUT_OF_RANGE, "truncate: %s", tqkv_result_string(result));
    attend(cache, q, 2, out, n_out, &hash);
    CHECK_RESULT(tqkv_cache_truncate(cache, 0), TQKV_OK);
    attend(cache, q, 2, out, n_out, &hash);
    free(rows);
    free(values);
    free(q);
    free(out);
    return hash;
}

/* The file format is canonical: saving writes the bytes that were read, but for a tag that the desc supplied. */
static void check_loaded(tqkv_cache *cache, const tqkv_cache_desc *desc, const stream *s, counting *counter)
{
    stream saved = stream_empty();
    int n_heads = (int)get(s->bytes + 44, 4);
    const bool tagged = desc->tag && !get(s->bytes + 16, 8);
    CHECK_RESULT(tqkv_cache_save(cache, stream_write, &saved), TQKV_OK);
    CHECK(saved.size == s->at, "saved again, the size differs");
    for (size_t i = 0; i < saved.size && i < s->at; i++)
        CHECK(saved.bytes[i] == s->bytes[i] || (tagged && i < HEADER + 8), "saved again, byte %d differs", (int)i);
    counter->fail_at = 0;
    tqkv_cache *again;
    pattern = 0x3c;
    CHECK_RESULT(load(desc, &saved, &again), TQKV_OK);
    const uint64_t other = again && n_heads <= MAX_SINKS ? use_cache(again) : 0;
    tqkv_cache_destroy(again);
    pattern = 0;
    const uint64_t hash = n_heads <= MAX_SINKS ? use_cache(cache) : 0;
    CHECK(hash == other, "results depend on what memory held before");
    stream_free(&saved);
}

/* ---- Positions of a store ---- */

enum { STORE_HEADER = 64, MAX_STORE = 1 << 18, TABLE = 3 };

/* Linear, a ring, or one to three pages of a pool of one to three;
 * some tables name a page twice or one that is not there. */
static void set_layout(fuzz_input *input, tqkv_store *s, int32_t *pages)
{
    const uint8_t kind = fuzz_byte(input), table = fuzz_byte(input);
    s->ring = kind % 4 == 1;
    s->capacity = 1 + kind / 4;
    if (kind % 4 < 2) return;
    s->page_size = 64;
    s->capacity = 64 * (1 + kind / 4 % TABLE);
    s->pages = pages;
    s->n_pages = 1 + table % TABLE;
    for (int i = 0; i < TABLE; i++) pages[i] = (table >> 2 * (i + 1) & 3) - (table == 255);
}

/* Memory for codes and norms, filled with 0xff, or random bytes. */
static void fill_store(tqkv_store *s, bool at_random)
{
    data_random random = {3};
    s->codes_size = tqkv_codes_size(s);
    s->norms_size = tqkv_norms_size(s);
    s->codes = test_alloc_filled(s->codes_size, 0xff);
    s->norms = s->norms_size ? (float *)test_alloc_filled(s->norms_size, 0xff) : NULL;
    for (size_t i = 0; at_random && i < s->codes_size; i++) ((uint8_t *)s->codes)[i] = (uint8_t)data_bits(&random);
}

/* The shape of a store; false: a size that would take long, or none. */
static bool read_shape(fuzz_input *input, const float *center, const float *scale, tqkv_store *s)
{
    const uint8_t flags = fuzz_byte(input);
    memset(s, 0, sizeof *s);
    s->format = test_formats[fuzz_range(input, 0, TEST_FORMATS - 1)];
    s->head_dim = fuzz_head_dim(input);
    s->n_kv_heads = 1 + flags % 2;
    s->rotation = (flags & 14) == 14 ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    s->block_scale = flags & 16 ? 0.75f : 0.0f;
    if (flags & 32) s->center = center;
    if (flags & 64) s->channel_scale = scale;
    s->capacity = TABLE * 64;
    return tqkv_codes_size(s) > 0 && tqkv_codes_size(s) <= MAX_STORE;
}

/* Half of the files stay as they are saved. */
static int edits_of(const control *c) { return c->with_sinks ? c->n_edits : 0; }

/* The file: what a store saves, edited, or the input itself. */
static stream make_store_file(fuzz_input *input, const control *c, const tqkv_store *from, int64_t position, int n)
{
    stream s = stream_empty();
    if (!c->is_made) {
        stream_write(&s, input->at, input->left);
    } else if (tqkv_store_save(from, position, n, stream_write, &s) == TQKV_OK) {
        for (int i = 0; i < edits_of(c); i++) {
            const size_t at = (size_t)fuzz_bits(input, 2);
            s.bytes[at & 1 ? at / 2 % s.size : at / 2 % STORE_HEADER] = fuzz_byte(input);
        }
        if (edits_of(c) > 12) s.size = s.size * fuzz_byte(input) / 256;
    }
    if (c->fix_header && s.size >= STORE_HEADER + 8) put(s.bytes + STORE_HEADER, 8, XXH3_64bits(s.bytes, STORE_HEADER));
    if (c->fix_streams && s.size >= STORE_HEADER + 16)
        put(s.bytes + s.size - 8, 8, XXH3_64bits(s.bytes + STORE_HEADER + 8, s.size - STORE_HEADER - 16));
    stream_rewind(&s);
    return s;
}

/* Whether n positions have slots in the store, and, if they are to be written, each its own. */
static bool has_room(const tqkv_store *s, int64_t position, int n, bool writes)
{
    if (n < 0 || position < 0 || position > INT64_MAX - n) return false;
    if (s->ring) return n <= s->capacity;
    if (!s->pages) return position + n <= s->capacity;
    if (position + n > s->n_pages * s->page_size) return false;
    unsigned named = 0;
    for (int64_t i = position / s->page_size; n && i <= (position + n - 1) / s->page_size; i++) {
        const int32_t page = s->pages[i];
        if (page < 0 || page >= s->capacity / s->page_size || (writes && named >> page & 1)) return false;
        named |= 1u << page;
    }
    return true;
}

/* Loads the file into the store. It is refused as a whole, fails within the positions, or saves to the same bytes. */
static tqkv_result load_store(const tqkv_store *to, stream *s, int64_t position, int n)
{
    const tqkv_result result = tqkv_store_load(to, position, n, stream_read, s);
    damage_others(to, position, result == TQKV_OK || result == TQKV_IO || result == TQKV_CORRUPT ? n : 0);
    if (result != TQKV_OK) return result;
    stream saved = stream_empty();
    CHECK_RESULT(tqkv_store_save(to, position, n, stream_write, &saved), TQKV_OK);
    memcpy(saved.bytes + 40, s->bytes + 40, 8); /* the file may be of other positions */
    put(saved.bytes + STORE_HEADER, 8, XXH3_64bits(saved.bytes, STORE_HEADER));
    CHECK(saved.size == s->at && !memcmp(saved.bytes, s->bytes, s->at), "saved again, the bytes differ");
    stream_free(&saved);
    return result;
}

/* The rows of positions that were loaded at others. */
static void check_rows(const tqkv_store *from, const tqkv_store *to, int64_t position, int64_t at, int n)
{
    const size_t codes = reference_row_bytes(from->format, from->head_dim);
    const size_t norms = (size_t)reference_norms_per_row(from->format, from->head_dim) * sizeof(float);
    for (int i = 0; i < n * from->n_kv_heads; i++) {
        const int head = i % from->n_kv_heads, p = i / from->n_kv_heads;
        CHECK(!memcmp(reference_codes_at(from, head, position + p), reference_codes_at(to, head, at + p), codes) &&
                  (!norms ||
                   !memcmp(reference_norms_at(from, head, position + p), reference_norms_at(to, head, at + p), norms)),
              "position %d", p);
    }
}

/* What differs between the stores, or in the call that loads; at most one of these. */
typedef enum difference { CENTER, SCALE, NO_CENTER, NO_SCALE, BLOCK_SCALE, COUNT, PLACE, NOTHING } difference;

/* Saves positions of one store and loads them into another, at the same place or another one. */
static void cross(fuzz_input *input, const control *c, const tqkv_store *from, const tqkv_store *to, difference differs,
                  bool alike)
{
    const int64_t position = c->match > 240 ? (int64_t)fuzz_bits(input, 8) : fuzz_byte(input) % (from->capacity + 2);
    const int left = from->capacity - (int)(from->ring || position > from->capacity ? 0 : position),
              n = fuzz_byte(input) % (left + 3) - 1;
    const int count = differs == COUNT ? fuzz_byte(input) % (left + 2) : n;
    const int64_t at = differs == PLACE ? fuzz_byte(input) % (to->capacity + 2) : position;
    stream s = make_store_file(input, c, from, position, n);
    const bool whole = c->is_made && !edits_of(c), has = s.size > 0;
    s.call.largest = c->chunk;
    s.fail_at = c->fail_read > 63 ? c->fail_read - 63 : 0; /* in half of the inputs */
    s.call.answer = c->read_answer;
    const tqkv_result result = load_store(to, &s, at, count);
    CHECK(result != TQKV_IO || c->read_answer, "no read failed");
    CHECK(!whole || has == has_room(from, position, n, false), "saved, or not");
    if (whole && has && (!s.fail_at || s.calls < s.fail_at)) {
        const bool fits = alike && count == n && has_room(to, at, count, true);
        CHECK((result == TQKV_OK) == fits && result != TQKV_CORRUPT, "%s", tqkv_result_string(result));
        if (result == TQKV_OK) check_rows(from, to, position, at, n);
    }
    stream_free(&s);
}

static void fuzz_store(fuzz_input *input, const control *c)
{
    const difference differs = c->match & 64 ? (difference)(c->match % 8) : NOTHING;
    tqkv_store from, to;
    int32_t pages[2][TABLE];
    float *channels[4]; /* two centres, two scales */
    for (int i = 0; i < 4; i++)
        channels[i] =
            i < 2 ? test_rows(1, DATA_GAUSSIAN, 2, REFERENCE_MAX_DIM) : test_scales(1, 2, REFERENCE_MAX_DIM, 4.0);
    const bool valid = read_shape(input, channels[0], channels[2], &from);
    for (int i = 1; i < 4; i += 2) channels[i][from.n_kv_heads * from.head_dim - 1] *= 2.0f;
    to = from;
    if (to.center && differs == CENTER) to.center = channels[1];
    if (to.channel_scale && differs == SCALE) to.channel_scale = channels[3];
    if (differs == NO_CENTER) to.center = to.center ? NULL : channels[0];
    if (differs == NO_SCALE) to.channel_scale = to.channel_scale ? NULL : channels[2];
    if (differs == BLOCK_SCALE) to.block_scale = 1.5f;
    const bool scaled = reference_norms_per_row(from.format, from.head_dim) > 1 && from.format != TQKV_I8;
    const bool alike = to.center == from.center && to.channel_scale == from.channel_scale &&
                       (to.block_scale == from.block_scale || !scaled);
    set_layout(input, &from, pages[0]);
    set_layout(input, &to, pages[1]);
    if (valid) {
        fill_store(&from, true);
        fill_store(&to, false);
        cross(input, c, &from, &to, differs, alike);
        test_store_free(&from);
        test_store_free(&to);
    }
    for (int i = 0; i < 4; i++) free(channels[i]);
}

static void fuzz_cache(fuzz_input *input, const control *c)
{
    counting counter = {0, c->fail_alloc, 0, 0, 0};
    uint8_t *whole = (uint8_t *)test_alloc(MAX_FILE + HEADER);
    stream s = stream_empty();
    s.size = read_file(input, c, whole);
    s.bytes = (uint8_t *)test_alloc(s.size); /* of the exact size: the sanitizer reports a read beyond it */
    if (s.size) memcpy(s.bytes, whole, s.size);
    free(whole);
    tqkv_cache_desc desc = make_desc(c, s.bytes, s.size, &counter);
    fix_checksums(c, &desc, &s);
    s.call.largest = c->chunk;
    s.fail_at = c->fail_read;
    s.call.answer = c->read_answer;
    tqkv_cache *cache;
    tqkv_result result = load(&desc, &s, &cache);
    bool may_fail = s.calls >= c->fail_read && c->fail_read;
    CHECK(result != TQKV_IO || (may_fail && c->read_answer), "no read failed");
    CHECK(result != TQKV_INVALID_ARGUMENT || c->match, "the desc asks for nothing");
    if (c->is_made && !c->n_edits && s.size && !may_fail)
        CHECK(result == TQKV_OK || result == TQKV_OUT_OF_MEMORY || (c->match & 64) || (c->match & 128), "%s",
              tqkv_result_string(result));
    if (result == TQKV_OK) {
        check_loaded(cache, &desc, &s, &counter);
        tqkv_cache_destroy(cache);
    }
    CHECK_NO_LEAK(&counter);
    stream_free(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    test_failure_aborts = true;
    fuzz_input input = {bytes, size};
    const control c = read_control(&input);
    if (c.is_store)
        fuzz_store(&input, &c);
    else
        fuzz_cache(&input, &c);
    return 0;
}

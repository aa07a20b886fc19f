/* make fuzz FUZZERS=snapshot SECONDS=60; AFL++: make fuzz-afl FUZZERS=snapshot. Loads arbitrary bytes as a cache or into
   a store. If the input asks for it, the checksums are corrected first, to reach the parser behind them. */
#include "fuzz.h"
#include "tests/counting.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { HEADER = 72, MORE = 16, MAX_FILE = 1 << 15, MAX_MEMORY = 1 << 18, MAX_SINKS = 64 };

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

enum { STREAMS = 3 };

static bool is_latent(const uint8_t *file) { return get(file + 8, 4) == 3; }

static size_t header_size(const uint8_t *file) { return HEADER + (is_latent(file) ? MORE : 0); }

/* By the header's fields: whether the cache has stream i, keys, values and tail. */
static bool has_stream(const uint8_t *file, int i)
{
    return i == 0 || (i == 1 ? !is_latent(file) || !(file[40] & 16) : is_latent(file) && get(file + HEADER, 4));
}

/* The head_dim of a stream by the header's fields. */
static uint64_t dim_of(const uint8_t *file, int i)
{
    const uint64_t value_dim = get(file + 42, 2);
    return i == 2 ? get(file + HEADER, 4) : i == 1 && value_dim ? value_dim : get(file + 16, 4);
}

/* The bytes of a stream's centre by the header's fields. */
static size_t center_size(const uint8_t *file, int i)
{
    const bool has = file[40] & 2 << i;
    return has ? 4 * (size_t)dim_of(file, i) * (size_t)get(file + 20, 4) : 0;
}

/* The size of a stream by the header's fields; more than MAX_FILE if it does not fit. */
static size_t stream_size(const uint8_t *file, int i)
{
    const uint64_t format = get(file + (i == 2 ? HEADER + 4 : 32 + 4 * i), 4);
    uint64_t head_dim = dim_of(file, i), heads = get(file + 20, 4);
    uint64_t resident = get(file + 64, 8) - get(file + 56, 8);
    if (head_dim > 1024 || heads > MAX_FILE || resident > MAX_FILE || format < 1 || format > TEST_FORMATS)
        return MAX_FILE + 1;
    tqkv_format f = test_no_format((int)format);
    uint64_t row = tqkv_row_bytes(f, (int)head_dim) + 4 * (uint64_t)tqkv_norms_per_row(f, (int)head_dim);
    uint64_t bytes = heads * resident * row + center_size(file, i);
    return bytes > MAX_FILE ? MAX_FILE + 1 : (size_t)bytes;
}

static void fix_checksums(const control *c, uint8_t *file, size_t size)
{
    if (size < header_size(file) + 8) return;
    if (c->fix_header) put(file + header_size(file), 8, XXH3_64bits(file, header_size(file)));
    size_t at = header_size(file) + 8;
    for (int i = 0; c->fix_streams && i < STREAMS; i++) {
        if (!has_stream(file, i)) continue;
        size_t n = stream_size(file, i);
        if (at + n + 8 > size) return;
        put(file + at + n, 8, XXH3_64bits(file + at, n));
        at += n + 8;
    }
}

/* Makes the header that of a latent cache: keys that are the values, a tail, or both. */
static void make_latent(fuzz_input *input, uint8_t *file)
{
    const uint8_t kind = fuzz_byte(input), format = fuzz_byte(input);
    const bool shared = kind % 3 != 1, tail = kind % 3 != 0;
    put(file + 8, 4, 3);
    if (shared) put(file + 36, 4, get(file + 32, 4));
    file[40] = (uint8_t)((file[40] & (shared ? 3 : 7)) | (shared ? 16 : 0) | (tail && kind & 64 ? 8 : 0));
    if (shared) put(file + 42, 2, 0);
    put(file + HEADER, 4, tail ? (uint64_t)test_all_head_dims[kind / 3 % 8] : 0);
    put(file + HEADER + 4, 4, tail ? 1 + format % TEST_FORMATS : 0);
    put(file + HEADER + 8, 8, 0);
}

/* Builds the file of a possible cache: valid until it is edited. */
static size_t make_file(fuzz_input *input, uint8_t *file)
{
    uint32_t heads = (uint32_t)fuzz_range(input, 1, 3), capacity = (uint32_t)fuzz_range(input, 1, 40);
    const uint8_t flags = fuzz_byte(input); /* ring, version 1, centres */
    const bool ring = flags & 1, first_version = (flags & 14) == 2;
    const int formats = first_version ? TQKV_I8 : TEST_FORMATS;
    uint64_t first = ring ? fuzz_bits(input, 8) >> 2 : 0, resident = fuzz_byte(input) % (capacity + 1);
    static const float numbers[4] = {0.125f, 1.0f, 7.5f, 1e-3f};
    memcpy(file, "tqkv\r\n\x1a\n", 8);
    uint32_t fields[12] = {first_version ? 1 : 2, first_version ? 1 : 2, (uint32_t)fuzz_head_dim(input), heads};
    fields[4] = heads * (uint32_t)fuzz_range(input, 1, 4);
    fields[5] = capacity;
    fields[6] = (uint32_t)fuzz_range(input, 1, formats);
    fields[7] = (uint32_t)fuzz_range(input, 1, formats);
    fields[8] = (uint32_t)ring | (first_version ? 0u : (uint32_t)(flags >> 1 & 6));
    const uint32_t value_dim = (uint32_t)test_all_head_dims[(flags >> 4) + (fields[3] + fields[5]) % 6]; /* any */
    if (flags & 64 && !first_version && value_dim != fields[2]) fields[8] |= value_dim << 16;
    fields[9] = fuzz_byte(input);
    memcpy(&fields[10], &numbers[fuzz_byte(input) % 4], 4);
    memcpy(&fields[11], &numbers[fuzz_byte(input) % 4], 4);
    for (int i = 0; i < 12; i++) put(file + 8 + 4 * i, 4, fields[i]);
    put(file + 56, 8, first);
    put(file + 64, 8, first + resident);
    if (flags & 128 && !first_version) make_latent(input, file);
    size_t size = header_size(file) + 8, begins[STREAMS] = {0};
    for (int i = 0; i < STREAMS && size <= MAX_FILE; i++) {
        begins[i] = size;
        if (has_stream(file, i)) size += stream_size(file, i) + 8;
    }
    if (size > MAX_FILE) return 0;
    data_random random = {fuzz_bits(input, 2)};
    for (size_t i = header_size(file); i < size; i++) file[i] = (uint8_t)data_bits(&random);
    for (int i = 0; i < STREAMS; i++) /* centres are finite */
        for (size_t at = 3; has_stream(file, i) && at < center_size(file, i); at += 4) file[begins[i] + at] &= 0xbf;
    control all = {true, true, true, false, 0, 0, 0, 0, 0, 0, false};
    fix_checksums(&all, file, size);
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
    fix_checksums(c, file, size);
    return size;
}

static void *limited_alloc(void *user, size_t size) { return size > MAX_MEMORY ? NULL : counting_alloc(user, size); }

static const float sinks[MAX_SINKS] = {0.5f, -1.0f, 2.0f, -3.0f};

/* Sets the fields that `match` names to the file's values, or one of them to a wrong value if `match` says so. */
static tqkv_cache_desc make_desc(const control *c, const uint8_t *file, size_t size, counting *counter)
{
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = counting_allocator(counter);
    desc.allocator.alloc = limited_alloc;
    if (size < HEADER) return desc;
    if (c->match & 1) desc.head_dim = (int)get(file + 16, 2);
    if (c->match & 2) desc.n_kv_heads = (int)get(file + 20, 2);
    if (c->match & 4) desc.capacity = (int)get(file + 28, 2) + (c->match & 128 ? 1 : 0);
    if (c->match & 8) desc.key_format = test_no_format((int)get(file + 32, 2));
    if (c->match & 16) desc.value_format = test_no_format((int)get(file + 36, 2));
    if (c->match & 32) desc.ring = get(file + 40, 1) & 1;
    if (c->match & 64) desc.value_dim = (int)dim_of(file, 1);
    if (c->match & 64 && size >= HEADER + MORE && is_latent(file)) {
        desc.shared = file[40] & 16;
        desc.tail_dim = (int)get(file + HEADER, 2);
        desc.tail_format = test_no_format((int)get(file + HEADER + 4, 1));
    }
    if (c->match & 64) memcpy(&desc.softcap, file + 52, 4);
    if (c->with_sinks && get(file + 24, 4) <= MAX_SINKS) desc.sinks = sinks; /* as many as n_heads: the caller's word */
    return desc;
}

static tqkv_result load(const tqkv_cache_desc *desc, stream *s, tqkv_cache **cache)
{
    *cache = (tqkv_cache *)(uintptr_t)1;
    tqkv_result result = tqkv_cache_load(desc, stream_read, s, cache);
    CHECK((result == TQKV_OK) == (*cache != NULL), "%s, but cache %p", tqkv_result_string(result), (void *)*cache);
    return result;
}

/* Scratch for many heads may exceed what limited_alloc grants. */
static void attend(tqkv_cache *cache, const float *q, int n_queries, float *out)
{
    tqkv_result result = tqkv_cache_attend(cache, q, n_queries, out);
    CHECK(result == TQKV_OK || result == TQKV_OUT_OF_MEMORY, "attend: %s", tqkv_result_string(result));
}

/* A loaded cache can be used, whatever its norms are. */
static void use_cache(tqkv_cache *cache)
{
    const tqkv_store *keys = tqkv_cache_keys(cache);
    const tqkv_store *tail = tqkv_cache_tail(cache), *shared = tqkv_cache_values(cache) == keys ? keys : NULL;
    int d = keys->head_dim + (tail ? tail->head_dim : 0), value_dim = tqkv_cache_values(cache)->head_dim;
    const int kv_heads = keys->n_kv_heads;
    if (kv_heads > 8) return;
    float *rows = fuzz_new_floats(3, kv_heads, d), *q = fuzz_new_floats(2, MAX_SINKS * kv_heads, d);
    float *out = fuzz_new_floats(2, MAX_SINKS * kv_heads, value_dim), *values = fuzz_new_floats(3, kv_heads, value_dim);
    fuzz_data(1, DATA_STUDENT, rows, 3 * kv_heads, d);
    fuzz_data(3, DATA_STUDENT, values, 3 * kv_heads, value_dim);
    fuzz_data(2, DATA_GAUSSIAN, q, 2 * MAX_SINKS * kv_heads, d);
    int64_t end = tqkv_cache_end(cache);
    attend(cache, q, 2, out);
    tqkv_result result = tqkv_cache_append(cache, rows, shared ? NULL : values, 3);
    CHECK(result == TQKV_OK || result == TQKV_OUT_OF_RANGE, "append: %s", tqkv_result_string(result));
    CHECK(tqkv_cache_end(cache) == end + (result == TQKV_OK ? 3 : 0), "end after append");
    attend(cache, q, 1, out);
    CHECK_RESULT(tqkv_cache_truncate(cache, tqkv_cache_end(cache)), TQKV_OK);
    result = tqkv_cache_truncate(cache, end - 1);
    CHECK(result == TQKV_OK || result == TQKV_OUT_OF_RANGE, "truncate: %s", tqkv_result_string(result));
    attend(cache, q, 2, out);
    CHECK_RESULT(tqkv_cache_truncate(cache, 0), TQKV_OK);
    attend(cache, q, 2, out);
    free(rows);
    free(values);
    free(q);
    free(out);
}

/* The file format is canonical: saving writes the bytes that were read, or those of newer versions. */
static void check_loaded(tqkv_cache *cache, const tqkv_cache_desc *desc, const stream *s, counting *counter)
{
    stream saved = stream_empty();
    int n_heads = (int)get(s->bytes + 24, 4);
    CHECK_RESULT(tqkv_cache_save(cache, stream_write, &saved), TQKV_OK);
    const bool older = get(s->bytes + 8, 8) != get(saved.bytes + 8, 8);
    CHECK(saved.size == s->at, "saved again, the size differs");
    for (size_t i = 0; i < saved.size && i < s->at; i++)
        CHECK(saved.bytes[i] == s->bytes[i] || (older && i < HEADER + 8), "saved again, byte %d differs", (int)i);
    counter->fail_at = 0;
    tqkv_cache *again;
    CHECK_RESULT(load(desc, &saved, &again), TQKV_OK);
    tqkv_cache_destroy(again);
    if (n_heads <= MAX_SINKS) use_cache(cache);
    stream_free(&saved);
}

/* ---- Positions of a store ---- */

enum { STORE_HEADER = 56, MAX_STORE = 1 << 15, TABLE = 3 };

/* Linear, a ring, or one to three pages of a pool of one to three; some tables name a page twice or one that is not there. */
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
static bool read_shape(fuzz_input *input, const float *center, tqkv_store *s)
{
    const uint8_t flags = fuzz_byte(input);
    memset(s, 0, sizeof *s);
    s->format = test_formats[fuzz_range(input, 0, TEST_FORMATS - 1)];
    s->head_dim = fuzz_head_dim(input);
    s->n_kv_heads = 1 + flags % 2;
    s->unrotated = (flags & 14) == 14;
    s->block_scale = flags & 16 ? 0.75f : 0.0f;
    if (flags & 32) s->center = center;
    s->capacity = TABLE * 64;
    return tqkv_codes_size(s) > 0 && tqkv_codes_size(s) <= MAX_STORE;
}

/* The file: what a store saves, edited, or the input itself. */
static stream make_store_file(fuzz_input *input, const control *c, const tqkv_store *from, int64_t position, int n)
{
    stream s = stream_empty();
    if (!c->is_made) {
        stream_write(&s, input->at, input->left);
    } else if (tqkv_store_save(from, position, n, stream_write, &s) == TQKV_OK) {
        for (int i = 0; i < c->n_edits; i++) {
            const size_t at = (size_t)fuzz_bits(input, 2);
            s.bytes[at & 1 ? at / 2 % s.size : at / 2 % STORE_HEADER] = fuzz_byte(input);
        }
        if (c->n_edits > 12) s.size = s.size * fuzz_byte(input) / 256;
    }
    if (c->fix_header && s.size >= STORE_HEADER + 8) put(s.bytes + STORE_HEADER, 8, XXH3_64bits(s.bytes, STORE_HEADER));
    if (c->fix_streams && s.size >= STORE_HEADER + 16)
        put(s.bytes + s.size - 8, 8, XXH3_64bits(s.bytes + STORE_HEADER + 8, s.size - STORE_HEADER - 16));
    stream_rewind(&s);
    return s;
}

/* What a load may have written: the slots of its positions, or none. */
static void check_others(const tqkv_store *to, int64_t position, int n)
{
    bool named[TABLE * 64] = {false};
    tqkv_store s = *to;
    s.pages = NULL;
    s.ring = false;
    for (int i = 0; i < n; i++) named[reference_slot(to, position + i)] = true;
    for (int slot = 0; slot < s.capacity; slot++)
        for (int head = 0; head < s.n_kv_heads && !named[slot]; head++) {
            CHECK(fuzz_is_untouched(reference_codes_at(&s, head, slot), reference_row_bytes(s.format, s.head_dim)),
                  "slot %d was written", slot);
            if (s.norms)
                CHECK(fuzz_is_untouched(reference_norms_at(&s, head, slot),
                                        (size_t)reference_norms_per_row(s.format, s.head_dim) * sizeof(float)),
                      "slot %d was written", slot);
        }
}

/* Loads the file into the store. It is refused as a whole, fails within the positions, or saves to the same bytes. */
static tqkv_result load_store(const tqkv_store *to, stream *s, int64_t position, int n)
{
    const tqkv_result result = tqkv_store_load(to, position, n, stream_read, s);
    check_others(to, position, result == TQKV_OK || result == TQKV_IO || result == TQKV_CORRUPT ? n : 0);
    if (result != TQKV_OK) return result;
    stream saved = stream_empty();
    CHECK_RESULT(tqkv_store_save(to, position, n, stream_write, &saved), TQKV_OK);
    memcpy(saved.bytes + 32, s->bytes + 32, 8); /* the file may be of other positions */
    put(saved.bytes + STORE_HEADER, 8, XXH3_64bits(saved.bytes, STORE_HEADER));
    CHECK(saved.size == s->at && !memcmp(saved.bytes, s->bytes, s->at), "saved again, the bytes differ");
    stream_free(&saved);
    return result;
}

static void fuzz_store(fuzz_input *input, const control *c)
{
    tqkv_store from, to;
    int32_t pages[2][TABLE];
    float *center = test_rows(1, DATA_GAUSSIAN, 2, REFERENCE_MAX_DIM);
    const bool valid = read_shape(input, center, &from);
    const int n = fuzz_byte(input) - 1;
    const int64_t position = c->match & 128 ? (int64_t)fuzz_bits(input, 8) : fuzz_byte(input);
    to = from;
    if (c->match & 1) to.center = to.center ? NULL : center;
    if (c->match & 2) to.block_scale = 1.5f;
    set_layout(input, &from, pages[0]);
    set_layout(input, &to, pages[1]);
    if (valid) {
        fill_store(&from, true);
        fill_store(&to, false);
        stream s = make_store_file(input, c, &from, position, n);
        const size_t whole = s.size;
        s.call.largest = c->chunk;
        s.fail_at = c->fail_read;
        s.call.answer = c->read_answer;
        const tqkv_result result = load_store(&to, &s, position, n);
        CHECK(result != TQKV_IO || c->read_answer, "no read failed");
        if (c->is_made && !c->n_edits && whole && !c->fail_read && !(c->match & 3))
            CHECK(result == TQKV_OK || (s.calls == 0 && result != TQKV_CORRUPT), "%s", tqkv_result_string(result));
        stream_free(&s);
        test_store_free(&from);
        test_store_free(&to);
    }
    free(center);
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
    s.call.largest = c->chunk;
    s.fail_at = c->fail_read;
    s.call.answer = c->read_answer;
    tqkv_cache_desc desc = make_desc(c, s.bytes, s.size, &counter);
    tqkv_cache *cache;
    tqkv_result result = load(&desc, &s, &cache);
    bool may_fail = s.calls >= c->fail_read && c->fail_read;
    CHECK(result != TQKV_IO || (may_fail && c->read_answer), "no read failed");
    CHECK(result != TQKV_INVALID_ARGUMENT || c->match, "the desc asks for nothing");
    if (c->is_made && !c->n_edits && s.size && !may_fail)
        CHECK(result == TQKV_OK || result == TQKV_OUT_OF_MEMORY || (c->match & 64) || (c->match & 132) == 132, "%s",
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

/* make fuzz FUZZERS=cache SECONDS=60; AFL++: make fuzz-afl FUZZERS=cache. Sequences of cache calls, checked against a
   model that keeps every position ever appended: the stores hold what it says, and answers are those of tqkv_attend
   over them. */
#include "fuzz.h"
#include "tests/counting.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { MAX_OPERATIONS = 40, MAX_QUERIES = 5, MAX_HEADS = 8, MAX_POSITIONS = 2 * 150 + 10 };

/* Position p of the model is position base + p of the cache. */
typedef struct model {
    tqkv_cache_desc desc;
    tqkv_cache *cache;
    tqkv_store keys, values, tail; /* linear, all positions; values: the keys again if they are the values */
    tqkv_store halves[2];          /* of all positions of keys and values, if the cache has some */
    bool kept[2][MAX_POSITIONS];   /* which the cache must still have, as first and as newest ones */
    int positions;                 /* capacity of the model */
    int64_t base, first, end;
    counting counter;
    float sinks[MAX_HEADS];
    /* As set_center and set_scale take them, then the keys' and the tail's parts of the first one; or NULL. */
    float *centers[4], *scales[4];
    bool edits; /* operations 8 to 15 remove, keep and fork */
} model;

static int n_heads(const model *m) { return m->desc.n_heads; }

static int key_dim(const model *m) { return m->desc.head_dim + m->desc.tail_dim; }

static int value_dim(const model *m) { return m->desc.value_dim ? m->desc.value_dim : m->desc.head_dim; }

static void read_latent(fuzz_input *input, tqkv_cache_desc *desc)
{
    static const int dims[4] = {32, 64, 48, 128};
    const uint8_t kind = fuzz_byte(input);
    desc->shared = kind & 1;
    desc->tail_dim = kind & 2 ? dims[kind >> 2 & 3] : 0;
    desc->tail_format = test_no_format(desc->tail_dim ? (kind >> 4) % (TEST_FORMATS + 1) : 0);
    if (!desc->shared) return;
    desc->value_dim = 0;
    desc->value_format = TQKV_FORMAT_DEFAULT;
}

static void read_ends(fuzz_input *input, tqkv_cache_desc *desc)
{
    desc->exact_first = fuzz_range(input, 0, 9);
    desc->exact_last = fuzz_range(input, 0, desc->capacity + 9);
    if (desc->head_dim > 64 || desc->exact_last % 2) return;
    desc->capacity = 150; /* more than the rings of so few newest halves hold */
    desc->exact_last = desc->exact_last % 4 ? 1 : 2 + desc->exact_last % 32;
}

/* Columns [from, from + dim) of n rows of k, or of its centre; NULL stays NULL. */
static float *part_of(const model *m, const float *rows, int from, int dim, int n)
{
    float *part = rows ? fuzz_new_floats(n, dim, 1) : NULL;
    for (int i = 0; part && i < n; i++)
        memcpy(part + i * dim, rows + i * key_dim(m) + from, (size_t)dim * sizeof *part);
    return part;
}

/* The last byte of an input decides on scales. */
static void make_scales(const fuzz_input *input, model *m)
{
    const tqkv_cache_desc *desc = &m->desc;
    const uint8_t last = input->left ? input->at[input->left - 1] : 0;
    if (last & 1) m->scales[0] = test_scales(last, desc->n_kv_heads, key_dim(m), 4.0);
    if (last & 2 && !desc->shared) m->scales[1] = test_scales(last + 1u, desc->n_kv_heads, value_dim(m), 4.0);
    m->scales[2] = part_of(m, m->scales[0], 0, desc->head_dim, desc->n_kv_heads);
    m->scales[3] = part_of(m, m->scales[0], desc->head_dim, desc->tail_dim, desc->n_kv_heads);
}

static void read_desc(fuzz_input *input, model *m)
{
    static const int dims[8] = {32, 64, 128, 256, 32, 64, 512, 1024};
    static const float scales[4] = {0.0f, 0.02f, 0.1f, -0.05f}, caps[4] = {0.0f, 5.0f, 30.0f, 0.5f};
    tqkv_cache_desc *desc = &m->desc;
    uint8_t flags = fuzz_byte(input), numbers = fuzz_byte(input);
    desc->head_dim = dims[numbers & 7];
    desc->scale = scales[numbers >> 3 & 3];
    desc->softcap = caps[numbers >> 5 & 3];
    desc->n_kv_heads = fuzz_range(input, 1, 2);
    const int group = fuzz_range(input, 0, 4);
    desc->n_heads = (group ? group : 1) * desc->n_kv_heads;
    desc->capacity = fuzz_range(input, 1, desc->head_dim <= 64 ? 150 : 9600 / desc->head_dim);
    desc->key_format = test_no_format(fuzz_range(input, 0, TEST_FORMATS));
    desc->value_format = test_no_format(fuzz_range(input, 0, TEST_FORMATS));
    desc->ring = (flags & 1) != 0;
    desc->window = flags & 2 ? fuzz_byte(input) : 0;
    if (desc->ring && desc->window > desc->capacity) desc->window = desc->capacity;
    if (flags & 4) desc->parallel.run = test_run_backwards;
    if (flags & 8) desc->sinks = m->sinks;
    for (int i = 0; i < MAX_HEADS; i++) m->sinks[i] = (float)(i * 7 % 5) - 2.0f;
    desc->allocator = counting_allocator(&m->counter);
    m->edits = (flags & 64) != 0;
    if (flags & 128) {
        desc->value_dim = dims[(numbers + flags) & 7];
        desc->type = test_no_type(numbers % 3);
    }
    if (numbers & 128) read_latent(input, desc);
    if (numbers & 128 && flags & 8) read_ends(input, desc);
    m->centers[0] = flags & 16 ? test_rows(1, DATA_GAUSSIAN, desc->n_kv_heads, key_dim(m)) : NULL;
    m->centers[1] = flags & 32 && !desc->shared ? test_rows(2, DATA_STUDENT, desc->n_kv_heads, value_dim(m)) : NULL;
    m->centers[2] = part_of(m, m->centers[0], 0, desc->head_dim, desc->n_kv_heads);
    m->centers[3] = part_of(m, m->centers[0], desc->head_dim, desc->tail_dim, desc->n_kv_heads);
    make_scales(input, m);
}

static bool set_up(fuzz_input *input, model *m)
{
    memset(m, 0, sizeof *m);
    fuzz_choose_isa(fuzz_byte(input));
    read_desc(input, m);
    tqkv_cache_desc desc = m->desc;
    desc.key_center = m->centers[0];
    desc.value_center = m->centers[1];
    desc.key_scale = m->scales[0];
    desc.value_scale = m->scales[1];
    for (m->counter.fail_at = 1; m->counter.fail_at && !m->cache; m->counter.fail_at++) { /* each allocation fails */
        m->counter.calls = 0;
        const tqkv_result result = tqkv_cache_create(&desc, &m->cache);
        CHECK(result == TQKV_OK || result == TQKV_OUT_OF_MEMORY, "create: %s", tqkv_result_string(result));
        CHECK((m->cache != NULL) == (result == TQKV_OK), "create: a cache, or none");
        if (!m->cache) CHECK_NO_LEAK(&m->counter);
    }
    CHECK(m->counter.fail_at > 2, "a cache without an allocation");
    m->counter.fail_at = 0;
    tqkv_format keys = test_keys(m->cache)->format, values = test_values(m->cache)->format;
    m->positions = 2 * m->desc.capacity + 10;
    m->keys = test_store(keys, m->desc.head_dim, m->desc.n_kv_heads, m->positions, false);
    m->values = test_store(values, value_dim(m), m->desc.n_kv_heads, m->positions, false);
    m->keys.center = m->centers[2];
    m->values.center = m->desc.shared ? m->centers[2] : m->centers[1];
    m->keys.channel_scale = m->scales[2];
    m->values.channel_scale = m->desc.shared ? m->scales[2] : m->scales[1];
    if (m->desc.tail_dim) {
        const tqkv_format tail = test_tail(m->cache)->format;
        m->tail = test_store(tail, m->desc.tail_dim, m->desc.n_kv_heads, m->positions, false);
        m->tail.center = m->centers[3];
        m->tail.channel_scale = m->scales[3];
    }
    for (int side = 0; side < 2 && (m->desc.exact_first || m->desc.exact_last); side++) {
        const tqkv_store *codes = side ? &m->values : &m->keys;
        m->halves[side] = test_store(TQKV_F16, codes->head_dim, codes->n_kv_heads, m->positions, false);
        m->halves[side].rotation = TQKV_ROTATION_ON;
        m->halves[side].center = codes->center;
        m->halves[side].channel_scale = codes->channel_scale;
    }
    return true;
}

static void tear_down(model *m)
{
    tqkv_cache_destroy(m->cache);
    CHECK_NO_LEAK(&m->counter);
    for (int i = 0; i < 4; i++) free(m->centers[i]);
    for (int i = 0; i < 4; i++) free(m->scales[i]);
    test_store_free(&m->keys);
    test_store_free(&m->values);
    test_store_free(&m->tail);
    test_store_free(&m->halves[0]);
    test_store_free(&m->halves[1]);
}

/* ---- The cache against the model ---- */

static void check_row(const model *m, const tqkv_store *store, const tqkv_store *modelled, int head, int64_t at)
{
    tqkv_store s = *store; /* the ring may have more slots than positions */
    size_t codes = reference_row_bytes(s.format, s.head_dim);
    size_t norms = (size_t)reference_norms_per_row(s.format, s.head_dim) * sizeof(float);
    CHECK(!memcmp(reference_codes_at(&s, head, m->base + at), reference_codes_at(modelled, head, at), codes),
          "codes of position %d", (int)at);
    if (norms)
        CHECK(!memcmp(reference_norms_at(&s, head, m->base + at), reference_norms_at(modelled, head, at), norms),
              "norms of position %d", (int)at);
}

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

/* An edit leaves the newest halves that a ring for 64 queries has room for. */
static void forget_halves(model *m)
{
    const int64_t last = at_most(m->desc.exact_last, m->desc.capacity), room = (last + 63 + 63) / 64 * 64;
    for (int64_t at = 0; at < m->end - room; at++) m->kept[1][at] = false;
}

/* What the halves hold, and how many there are. */
static void check_halves(const model *m)
{
    const tqkv_attention a = test_view(m->cache, 0);
    const int64_t most = at_most(m->desc.exact_last, m->end - m->first),
                  from = at_least(m->first, a.last.from - m->base);
    int n_first = 0, n_last = 0;
    while (n_first < m->end && m->kept[0][n_first]) n_first++;
    while (n_last < most && m->kept[1][m->end - 1 - n_last]) n_last++;
    CHECK(a.first.n == n_first, "%d first positions, not %d", a.first.n, n_first);
    CHECK(a.last.n == n_last, "%d newest positions, not %d", a.last.n, n_last);
    CHECK(m->end == m->first || test_view(m->cache, 1).keys, "the newest query lacks halves");
    const tqkv_store *const first[2] = {a.first.keys, a.first.values}, *const last[2] = {a.last.keys, a.last.values};
    for (int i = 0; i < 2 * m->desc.n_kv_heads; i++) {
        for (int at = 0; first[i % 2] && at < a.first.n; at++)
            if (first[i % 2]->rotation == TQKV_ROTATION_ON) check_row(m, first[i % 2], &m->halves[i % 2], i / 2, at);
        for (int64_t at = at_least(m->end - a.last.n - MAX_QUERIES + 1, from); last[i % 2] && at < m->end; at++)
            check_row(m, last[i % 2], &m->halves[i % 2], i / 2, at);
    }
}

static void check_state(const model *m)
{
    CHECK(tqkv_cache_end(m->cache) == m->base + m->end, "end");
    CHECK(test_first(m->cache) == m->base + m->first, "first");
    CHECK(m->counter.live <= 2, "%d blocks live", m->counter.live); /* the second of halves */
    for (int64_t at = m->first; at < m->end; at++)
        for (int head = 0; head < m->desc.n_kv_heads; head++) {
            check_row(m, test_keys(m->cache), &m->keys, head, at);
            check_row(m, test_values(m->cache), &m->values, head, at);
            if (m->tail.codes) check_row(m, test_tail(m->cache), &m->tail, head, at);
        }
    if (m->halves[0].codes) check_halves(m);
}

/* ---- Append ---- */

static void model_append(model *m, tqkv_store *store, const float *rows, int n)
{
    float scaled[REFERENCE_MAX_DIM], norms[REFERENCE_MAX_DIM / 128];
    size_t n_norms = (size_t)reference_norms_per_row(store->format, store->head_dim);
    for (int i = 0; i < n * store->n_kv_heads; i++) {
        int64_t at = m->end + i / store->n_kv_heads;
        int head = i % store->n_kv_heads;
        reference_encode_row(store, head, rows + (size_t)i * (size_t)store->head_dim,
                             (uint8_t *)(uintptr_t)reference_codes_at(store, head, at), norms, scaled);
        if (n_norms) memcpy((void *)(uintptr_t)reference_norms_at(store, head, at), norms, n_norms * sizeof *norms);
    }
}

/* Keys have ordinary size: float is accurate for their scores. Values have any size. */
static void make_rows(fuzz_input *input, const model *m, float *keys, float *values, int n_rows)
{
    static const data_kind key_kinds[4] = {DATA_GAUSSIAN, DATA_ZEROS, DATA_ONE_HOT, DATA_CONSTANT};
    static const data_kind value_kinds[4] = {DATA_STUDENT, DATA_OUTLIERS, DATA_MAGNITUDES, DATA_ZEROS};
    uint8_t kinds = fuzz_byte(input);
    fuzz_data(kinds, key_kinds[kinds & 3], keys, n_rows, key_dim(m));
    fuzz_data((uint64_t)kinds + 1, value_kinds[kinds >> 2 & 3], values, n_rows, value_dim(m));
}

/* Whether the halves that an append brings hold n rows of keys (0) or values. */
static bool halves_hold(const model *m, int side, const float *rows, int n)
{
    const tqkv_store *s = &m->halves[side];
    const int first = m->desc.exact_first < m->desc.capacity ? m->desc.exact_first : m->desc.capacity;
    const int dim = s->head_dim, n_rows = n * s->n_kv_heads;
    bool hold = true;
    const tqkv_format format = side && !m->desc.shared ? m->values.format : m->keys.format;
    if (!s->codes || format == TQKV_F16 || (!m->desc.exact_last && m->base + m->end >= first)) return true;
    float *stored = fuzz_new_floats(n_rows, dim, 1);
    CHECK_RESULT(tqkv_probe(s, rows, n, stored), TQKV_OK);
    for (int i = 0; i < n_rows; i++) {
        float most = 0.0f;
        for (int d = 0; d < dim; d++) most = fmaxf(most, fabsf(stored[i * dim + d]));
        hold = hold && most < 65520.0f && (s->center || most == 0.0f || most >= 1.0f / 131072.0f);
    }
    free(stored);
    return hold;
}

static void append(fuzz_input *input, model *m)
{
    int heads = m->desc.n_kv_heads, n = fuzz_range(input, 0, m->desc.capacity + 3);
    uint8_t bad = fuzz_byte(input);
    if (m->end + n > m->positions) n = (int)(m->positions - m->end);
    const size_t n_keys = (size_t)(n * heads * key_dim(m)), n_values = (size_t)(n * heads * value_dim(m));
    float *keys = fuzz_new_floats((int)n_keys, 1, 1), *values = fuzz_new_floats((int)n_values, 1, 1);
    make_rows(input, m, keys, values, n * heads);
    bool is_bad = bad >= 224 && n;
    const bool bad_key = bad & 1 || m->desc.shared;
    if (is_bad) (bad_key ? keys : values)[bad % (bad_key ? n_keys : n_values)] = bad & 2 ? NAN : -INFINITY;
    void *k = fuzz_typed(m->desc.type, keys, n_keys), *v = fuzz_typed(m->desc.type, values, n_values);
    bool fits = m->desc.ring ? m->base + m->end <= INT64_MAX - n : m->end + n <= m->desc.capacity;
    float *main = part_of(m, keys, 0, m->desc.head_dim, n * heads);
    const bool hold = is_bad || (halves_hold(m, 0, main, n) && halves_hold(m, 1, m->desc.shared ? main : values, n));
    tqkv_result expected = !fits ? TQKV_OUT_OF_RANGE : is_bad || !hold ? TQKV_NOT_FINITE : TQKV_OK;
    tqkv_result result = tqkv_cache_append(m->cache, k, m->desc.shared ? NULL : v, n);
    CHECK(result == expected || result == TQKV_OUT_OF_MEMORY, "append: %s, not %s", tqkv_result_string(result),
          tqkv_result_string(expected));
    CHECK(result != TQKV_OUT_OF_MEMORY || m->counter.fail_at, "no allocation failed");
    if (result == TQKV_OK) {
        float *tail = part_of(m, keys, m->desc.head_dim, m->desc.tail_dim, n * heads);
        model_append(m, &m->keys, main, n);
        model_append(m, &m->values, m->desc.shared ? main : values, n);
        if (m->tail.codes) model_append(m, &m->tail, tail, n);
        if (m->halves[0].codes) model_append(m, &m->halves[0], main, n);
        if (m->halves[1].codes) model_append(m, &m->halves[1], m->desc.shared ? main : values, n);
        free(tail);
        for (int64_t first = at_most(m->desc.exact_first, m->desc.capacity); n-- > 0; m->end++) {
            m->kept[0][m->end] = m->end < first && (m->end == 0 || m->kept[0][m->end - 1]);
            m->kept[1][m->end] = true;
        }
        if (m->end - m->first > m->desc.capacity) m->first = m->end - m->desc.capacity;
    }
    free(main);
    free(k);
    free(v);
    free(keys);
    free(values);
}

/* ---- Attend ---- */

/* The cache's attention over its own stores. */
static tqkv_attention attention_of(const model *m, int n_queries)
{
    const tqkv_attention view = test_view(m->cache, 1);
    tqkv_attention a =
        test_attention(test_keys(m->cache), test_values(m->cache), n_heads(m), n_queries, m->base + m->end);
    a.tail = test_tail(m->cache);
    a.kv_len = (int)(m->end - m->first); /* 0 would mean the default */
    a.window = m->desc.window;
    a.scale = m->desc.scale;
    a.softcap = m->desc.softcap;
    a.sinks = m->desc.sinks;
    a.first = view.first;
    a.last = view.last;
    return a;
}

/* The floats whose rounded values the cache must give: zeros where nothing is resident. */
static void attend_floats(const model *m, const float *q, int n_queries, size_t n_out, float *floats)
{
    const tqkv_attention a = attention_of(m, n_queries);
    memset(floats, 0, n_out * sizeof *floats);
    if (a.kv_len && n_queries) CHECK_RESULT(tqkv_attend(&a, q, floats), TQKV_OK);
}

static void attend(fuzz_input *input, model *m)
{
    const tqkv_type type = m->desc.type;
    int n = fuzz_range(input, 0, MAX_QUERIES), d = key_dim(m);
    const size_t n_out = (size_t)(n * n_heads(m) * value_dim(m));
    const size_t size = n_out * (type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t));
    float *q = fuzz_new_floats(n, n_heads(m), d), *floats = fuzz_new_floats((int)n_out, 1, 1);
    void *out = test_alloc_filled(size, 0xff);
    const uint8_t seed = fuzz_byte(input);
    fuzz_data(seed, DATA_GAUSSIAN, q, n * n_heads(m), d);
    void *queries = fuzz_typed(type, q, (size_t)(n * n_heads(m) * d));
    tqkv_result result = tqkv_cache_attend(m->cache, queries, n, out);
    const tqkv_attention view = test_view(m->cache, 1);
    /* What the window of the first query begins with, and the first position that can be missing. */
    const int64_t begin = m->end - n - view.window + 1, kept = m->base ? -m->base : view.first.n;
    const bool gone = view.window && n && (begin > kept ? begin : kept) < m->first;
    if (gone && result == TQKV_OUT_OF_RANGE) {
        CHECK(test_is_untouched(out, size), "written");
        free(q);
        free(floats);
        free(queries);
        free(out);
        return;
    }
    CHECK(result == TQKV_OK || (result == TQKV_OUT_OF_MEMORY && m->counter.fail_at), "%s", tqkv_result_string(result));
    if (result == TQKV_OK) {
        attend_floats(m, q, n, n_out, floats);
        const bool any = m->end > m->first; /* else zeros of either sign */
        CHECK(!any || fuzz_is_rounded(type, out, floats, n_out), "not the rounded floats of the stores");
    } else {
        CHECK(test_is_untouched(out, size), "written");
    }
    free(q);
    free(floats);
    free(queries);
    free(out);
}

/* ---- Truncate, save and load ---- */

static void truncate_to(model *m, int64_t end)
{
    bool fits = end == 0 || (end >= m->base + m->first && end <= m->base + m->end);
    tqkv_result result = tqkv_cache_truncate(m->cache, end);
    CHECK(result == (fits ? TQKV_OK : TQKV_OUT_OF_RANGE), "truncate: %s", tqkv_result_string(result));
    if (!fits) return;
    if (end < m->base + m->end) forget_halves(m);
    m->end = end == 0 ? 0 : end - m->base;
    if (end == 0) m->first = m->base = 0;
}

/* Truncates to 0, or to a position near the end, sometimes just beyond it. */
static void truncate_near_end(fuzz_input *input, model *m)
{
    int64_t end = m->base + m->end - fuzz_range(input, 0, 12);
    truncate_to(m, fuzz_byte(input) < 8 ? 0 : end <= INT64_MAX - 2 ? end + 2 : end);
}

/* Moves a ring's positions by rewriting its snapshot; appending up to them would take years. */
static void move_positions(model *m, stream *s, uint64_t bits)
{
    int64_t farthest = INT64_MAX - m->end, base = (int64_t)(bits & INT64_MAX);
    uint64_t positions[2], hash;
    if (!m->desc.ring || m->end == 0) return;
    m->base = base <= farthest ? base : farthest;
    positions[0] = (uint64_t)(m->base + m->first);
    positions[1] = (uint64_t)(m->base + m->end);
    for (int i = 0; i < 16; i++) s->bytes[120 + i] = (uint8_t)(positions[i / 8] >> (8 * (i % 8)));
    const size_t header = 144;
    hash = XXH3_64bits(s->bytes, header);
    for (size_t i = 0; i < 8; i++) s->bytes[header + i] = (uint8_t)(hash >> (8 * i));
}

static void save_and_load(fuzz_input *input, model *m, bool move)
{
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = m->desc.allocator;
    desc.parallel = m->desc.parallel;
    desc.sinks = m->desc.sinks;
    desc.type = m->desc.type;
    desc.n_heads = m->desc.sinks ? n_heads(m) : 0;
    stream s = stream_empty();
    s.call.largest = fuzz_byte(input);
    CHECK_RESULT(tqkv_cache_save(m->cache, stream_write, &s), TQKV_OK);
    if (move && !m->halves[0].codes) move_positions(m, &s, fuzz_bits(input, 8));
    stream_rewind(&s);
    tqkv_cache *loaded = NULL;
    tqkv_result result = tqkv_cache_load(&desc, stream_read, &s, &loaded);
    if (result == TQKV_OUT_OF_MEMORY && m->counter.fail_at) {
        m->counter.fail_at = 0;
        stream_rewind(&s);
        result = tqkv_cache_load(&desc, stream_read, &s, &loaded);
    }
    CHECK_RESULT(result, TQKV_OK);
    tqkv_cache_destroy(m->cache);
    m->cache = loaded;
    stream_free(&s);
}

/* ---- Remove, keep and fork ---- */

/* Moves n positions of the model down. */
static void model_move(model *m, int64_t from, int64_t to, int64_t n)
{
    for (int i = 0; i < 2 && n > 0; i++) memmove(&m->kept[i][to], &m->kept[i][from], (size_t)n * sizeof(bool));
    tqkv_store *stores[5] = {&m->keys, &m->values, &m->tail, &m->halves[0], &m->halves[1]};
    for (int i = 0; i < 5 * m->desc.n_kv_heads && n > 0; i++) {
        const tqkv_store *s = stores[i % 5];
        const int head = i / 5;
        if (!s->codes) continue;
        const size_t norms = (size_t)reference_norms_per_row(s->format, s->head_dim) * sizeof(float);
        memmove((void *)(uintptr_t)reference_codes_at(s, head, to), reference_codes_at(s, head, from),
                (size_t)n * reference_row_bytes(s->format, s->head_dim));
        if (norms)
            memmove((void *)(uintptr_t)reference_norms_at(s, head, to), reference_norms_at(s, head, from),
                    (size_t)n * norms);
    }
}

static void remove_some(fuzz_input *input, model *m)
{
    const int64_t first = fuzz_range(input, 0, m->desc.capacity) - 1;
    const uint8_t size = fuzz_byte(input); /* often few, else more than the rings of the newest halves hold */
    const int64_t count = size % 2 ? size / 2 : size % 21 - 1;
    const bool fits = first >= 0 && first <= m->end && count <= m->end - first;
    const tqkv_result expected = m->desc.ring ? TQKV_UNSUPPORTED
                                 : count < 0  ? TQKV_INVALID_ARGUMENT
                                 : fits       ? TQKV_OK
                                              : TQKV_OUT_OF_RANGE;
    CHECK_RESULT(tqkv_cache_remove(m->cache, first, count), expected);
    if (expected != TQKV_OK) return;
    if (count) forget_halves(m);
    model_move(m, first + count, first, m->end - first - count);
    m->end -= count;
}

/* Of the newest n those whose bits are set; sometimes one is out of order or range. */
static void keep_some(fuzz_input *input, model *m)
{
    int kept[64], n_kept = 0, n = fuzz_range(input, 0, 64);
    const uint64_t bits = fuzz_bits(input, 8);
    const uint8_t bad = fuzz_byte(input);
    for (int i = 0; i < n; i++)
        if (bits >> i & 1) kept[n_kept++] = i;
    tqkv_result expected = n > m->end - m->first ? TQKV_OUT_OF_RANGE : TQKV_OK;
    if (bad >= 224 && n_kept && expected == TQKV_OK) {
        const int other = fuzz_range(input, 0, 64) - 1, at = bad % n_kept;
        const bool before = at && other <= kept[at - 1], behind = at + 1 < n_kept && other >= kept[at + 1];
        kept[at] = other;
        if (before || behind) expected = TQKV_INVALID_ARGUMENT;
        if (other < 0 || other >= n) expected = TQKV_OUT_OF_RANGE;
    }
    CHECK_RESULT(tqkv_cache_keep(m->cache, n, kept, n_kept), expected);
    if (expected != TQKV_OK) return;
    if (n_kept < n) forget_halves(m);
    bool all = true; /* from the first on that moves */
    int same = 0;
    while (same < n_kept && kept[same] == same) same++;
    for (int i = same; i < n; i++) all = all && m->kept[1][m->end - n + i];
    for (int i = 0; i < n_kept; i++) model_move(m, m->end - n + kept[i], m->end - n + i, 1);
    m->end -= n - n_kept;
    for (int64_t at = 0; at < m->end && !all; at++) m->kept[1][at] = false;
}

/* Asks for a copy in other formats, unless halves stand beside the codes. */
static void ask_for_formats(const model *m, uint8_t choice, tqkv_cache_desc *desc)
{
    if (m->halves[0].codes || !(choice & 2)) return;
    desc->key_format = test_formats[(choice >> 2) % TEST_FORMATS];
    if (!m->desc.shared) desc->value_format = test_formats[(choice >> 3) % TEST_FORMATS];
    if (m->tail.codes) desc->tail_format = test_formats[(choice >> 4) % TEST_FORMATS];
}

/* Converts a stream of the model, if the copy has another format. */
static void model_convert(const model *m, tqkv_store *s, tqkv_format format)
{
    if (!s->codes || s->format == format) return;
    tqkv_store to = test_store(format, s->head_dim, s->n_kv_heads, s->capacity, false);
    to.center = s->center;
    to.channel_scale = s->channel_scale;
    CHECK_RESULT(tqkv_store_convert(&to, s, m->first, (int)(m->end - m->first)), TQKV_OK);
    free(s->codes);
    free(s->norms);
    *s = to;
}

/* The fork takes the cache's place. */
static void fork_cache(fuzz_input *input, model *m)
{
    const uint8_t choice = fuzz_byte(input);
    const bool changed = choice & 1, ring = fuzz_byte(input) & 1;
    const int capacity = fuzz_range(input, 0, 150);
    tqkv_cache_desc desc;
    tqkv_cache *copy = NULL;
    memset(&desc, 0, sizeof desc);
    desc.capacity = changed ? capacity : 0;
    desc.ring = ring;
    ask_for_formats(m, choice, &desc);
    const int first = test_view(m->cache, 1).first.n;
    const bool fits = !desc.capacity || (desc.capacity >= m->end - m->first && desc.capacity >= first);
    const tqkv_result result = tqkv_cache_fork(m->cache, changed ? &desc : NULL, &copy);
    const bool short_ring = (m->desc.ring || (changed && ring)) &&
                            m->desc.window > (desc.capacity ? desc.capacity : test_keys(m->cache)->capacity);
    const tqkv_result expected = !fits ? TQKV_OUT_OF_RANGE : short_ring ? TQKV_INVALID_ARGUMENT : TQKV_OK;
    CHECK(result == expected || (result == TQKV_OUT_OF_MEMORY && m->counter.fail_at), "fork: %s",
          tqkv_result_string(result));
    CHECK((copy != NULL) == (result == TQKV_OK), "fork: a cache, or none");
    if (!copy) return;
    tqkv_cache_destroy(m->cache);
    m->cache = copy;
    if (desc.capacity) m->desc.capacity = desc.capacity;
    m->desc.ring = m->desc.ring || (changed && ring);
    model_convert(m, &m->keys, test_keys(copy)->format);
    model_convert(m, &m->values, test_values(copy)->format);
    if (m->tail.codes) model_convert(m, &m->tail, test_tail(copy)->format);
}

static void operate_edit(fuzz_input *input, model *m, int operation)
{
    if (operation < 2)
        remove_some(input, m);
    else if (operation < 5)
        keep_some(input, m);
    else
        fork_cache(input, m);
}

static void operate(fuzz_input *input, model *m)
{
    uint8_t operation = fuzz_byte(input);
    m->counter.calls = 0;
    m->counter.fail_at = operation >= 192 ? 1 + operation % 3 : 0;
    if (m->edits && operation & 8) {
        operate_edit(input, m, operation % 8);
        check_state(m);
        return;
    }
    switch (operation % 8) {
    case 0:
    case 1:
    case 2:
        append(input, m);
        break;
    case 3:
    case 4:
        attend(input, m);
        break;
    case 5:
        truncate_near_end(input, m);
        break;
    case 6:
        save_and_load(input, m, false);
        break;
    default:
        save_and_load(input, m, true);
        break;
    }
    check_state(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    test_failure_aborts = true;
    fuzz_input input = {bytes, size};
    model m;
    if (!set_up(&input, &m)) return 0;
    for (int i = 0; i < MAX_OPERATIONS && input.left; i++) operate(&input, &m);
    tear_down(&m);
    return 0;
}

/* make fuzz FUZZERS=cache SECONDS=60; AFL++: make fuzz-afl FUZZERS=cache. Sequences of cache calls, checked against a
   model that takes every position alone and keeps it: the stores hold what it says, a cache learns what its first
   positions must teach, and answers are those of tqkv_attend over these stores. */
#include "cache_model.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

/* ---- The cache against the model ---- */

static void check_rows(const model *m, const tqkv_store *store, int modelled, int64_t from, int64_t to)
{
    const tqkv_store *expected = &m->stores[modelled];
    const size_t codes = reference_row_bytes(store->format, store->head_dim);
    const size_t norms = (size_t)reference_norms_per_row(store->format, store->head_dim) * sizeof(float);
    for (int64_t at = from; at < to; at++)
        for (int head = 0; head < m->desc.n_kv_heads; head++) {
            CHECK(!memcmp(reference_codes_at(store, head, m->base + at), reference_codes_at(expected, head, at), codes),
                  "store %d: codes of position %d", modelled, (int)at);
            CHECK(!norms || !memcmp(reference_norms_at(store, head, m->base + at),
                                    reference_norms_at(expected, head, at), norms),
                  "store %d: norms of position %d", modelled, (int)at);
        }
}

static bool same_floats(const float *a, const float *b, int n)
{
    return a && b ? !memcmp(a, b, (size_t)n * sizeof *a) : a == b;
}

/* Positions of a ring of newest halves for so many queries. */
static int64_t end_room(const model *m, int64_t n_queries)
{
    return n_last(m) ? (n_last(m) + n_queries - 1 + TILE - 1) / TILE * TILE : 0;
}

/* An edit leaves the newest halves that a ring for 64 queries has room for. */
static void forget_halves(model *m)
{
    if (!m->learning && n_last(m)) m->from = at_least(m->from, m->end - end_room(m, TILE));
}

/* What the halves hold that n queries read, and how many there are. */
static void check_halves(const model *m, int n_queries)
{
    const tqkv_attention a = test_view(m->cache, 0);
    const tqkv_store *const first[STREAMS] = {a.first.keys, a.first.values, a.first.tail};
    const tqkv_store *const last[2] = {a.last.keys, a.last.values};
    const int64_t from = at_least(m->from, m->first), oldest = m->end - n_last(m) - n_queries + 1;
    CHECK(a.first.n == m->below, "%d first positions, not %d", a.first.n, (int)m->below);
    CHECK(a.last.n == at_most(m->end - from, n_last(m)), "%d newest positions of %d", a.last.n, (int)(m->end - from));
    CHECK(a.last.from >= m->base + m->from, "newest positions from %d on", (int)a.last.from);
    for (int i = 0; i < STREAMS; i++)
        if (first[i]) check_rows(m, first[i], first[i]->rotation == TQKV_ROTATION_ON ? HALVES + i : i, 0, a.first.n);
    for (int i = 0; i < 2; i++)
        if (last[i]) check_rows(m, last[i], HALVES + i, at_least(from, oldest), m->end);
}

static size_t row_bytes(const model *m, tqkv_format format, int dim)
{
    return ((size_t)reference_norms_per_row(format, dim) * sizeof(float) + reference_row_bytes(format, dim)) *
           (size_t)m->desc.n_kv_heads;
}

/* What the codes take, and what is kept besides. */
static size_t bytes_of(const model *m)
{
    const int capacity = m->desc.capacity;
    const int64_t own = end_room(m, TILE), grown = end_room(m, at_most(m->appended, capacity - n_last(m) + 1));
    const size_t n_halves = (size_t)(grown > own ? own + grown : own);
    const size_t first = (size_t)at_most(m->desc.exact_first, capacity);
    const size_t n_raw = m->end && m->raw_end ? (size_t)m->learn_from + TILE : 0;
    size_t bytes = 0;
    for (int i = 0; i < STREAMS; i++) {
        const tqkv_store *s = &m->stores[i];
        if (!s->codes || (i == VALUES && m->desc.shared)) continue;
        const size_t coded = row_bytes(m, s->format, s->head_dim), half = row_bytes(m, TQKV_F16, s->head_dim);
        const bool halves = i != TAIL && s->format != TQKV_F16;
        bytes += (size_t)capacity * coded + n_raw * (i == TAIL ? coded : half);
        bytes += halves ? (first + n_halves) * half : m->desc.ring ? first * coded : 0;
    }
    return bytes;
}

static void check_state(const model *m)
{
    const tqkv_attention view = test_view(m->cache, 0), newest = test_view(m->cache, 1);
    const tqkv_store *const codes[STREAMS] = {view.keys, view.values, view.tail};
    const tqkv_store *const raw[STREAMS] = {newest.keys, newest.values, newest.tail};
    const bool reads_raw = raw_queries(m, 1) && m->raw_end;
    CHECK(tqkv_cache_end(m->cache) == m->base + m->end, "end");
    CHECK(test_first(m->cache) == m->base + m->first, "first");
    CHECK(m->counter.live <= 2 + (m->raw_end > 0), "%d blocks live", m->counter.live); /* halves, and what is raw */
    CHECK(m->end == 0 || tqkv_cache_bytes(m->cache) == bytes_of(m), "%d bytes, not %d", (int)tqkv_cache_bytes(m->cache),
          (int)bytes_of(m));
    const bool lacks = (m->base + m->end && m->end == m->first) || (raw_queries(m, 1) && !m->raw_end);
    CHECK((newest.keys != NULL) == !lacks, "a view of the newest query, or none");
    for (int i = 0; i < STREAMS; i++) {
        const tqkv_store *s = &m->stores[i];
        const int n = m->desc.n_kv_heads * s->head_dim;
        if (!s->codes) continue;
        CHECK(same_floats(codes[i]->center, s->center, n), "the centre of store %d", i);
        CHECK(same_floats(codes[i]->channel_scale, s->channel_scale, n), "the scale of store %d", i);
        if (!m->learning) check_rows(m, codes[i], i, m->first, m->end);
        if (reads_raw) check_rows(m, raw[i], i == TAIL ? TAIL : RAW + i, 0, m->end);
    }
    if (m->stores[HALVES].codes && !m->learning) check_halves(m, TILE);
}

/* A call that lacked memory has changed nothing, and succeeds when it gets some. */
static bool try_again(model *m, tqkv_result result)
{
    if (result != TQKV_OUT_OF_MEMORY) return false;
    CHECK(m->counter.fail_at, "no allocation failed");
    m->counter.fail_at = 0;
    check_state(m);
    return true;
}

/* ---- Rows in memory ---- */

static size_t type_size(const model *m) { return m->desc.type == TQKV_TYPE_F32 ? 4 : 2; }

/* Where row i of those of heads begins, in bytes. */
static size_t row_at(const model *m, tqkv_strides s, int heads, int dim, int i)
{
    if (!s.token) return (size_t)(i * dim) * type_size(m);
    return ((size_t)(i / heads) * s.token + (size_t)(i % heads) * s.head) * type_size(m);
}

/* Bytes of n tokens' rows, as far as the last value. */
static size_t wide_size(const model *m, tqkv_strides s, int n, int heads, int dim)
{
    return n ? row_at(m, s, heads, dim, n * heads - 1) + (size_t)dim * type_size(m) : 0;
}

/* Rounds rows of floats to the type, and returns them in it with their gaps. Freed by the caller. */
static char *spread(const model *m, tqkv_strides s, int n, int heads, int dim, float *rows)
{
    const size_t bytes = (size_t)dim * type_size(m);
    char *typed = (char *)fuzz_typed(m->desc.type, rows, (size_t)(n * heads * dim));
    char *wide = (char *)test_alloc_filled(wide_size(m, s, n, heads, dim), 0xff);
    for (int i = 0; i < n * heads; i++) memcpy(wide + row_at(m, s, heads, dim, i), typed + (size_t)i * bytes, bytes);
    free(typed);
    return wide;
}

/* ---- Append ---- */

/* Makes a row one that halves may not hold: in each head one value, the others 0. */
static void make_odd_row(float *row, int heads, int dim, int choice)
{
    static const float sizes[8] = {1e-9f, 7e-6f, 8e-6f, 7e-5f, 65519.0f, 65520.0f, 6e5f, 1.0f};
    for (int i = 0; i < heads * dim; i++) row[i] = i % dim ? 0.0f : sizes[choice];
}

/* Keys to learn from have a constant part and channels of different sizes, sometimes one of the first position alone;
   values to learn from repeat themselves. */
static void make_rows(fuzz_input *input, const model *m, float *keys, float *values, int n)
{
    static const data_kind key_kinds[8] = {DATA_GAUSSIAN, DATA_ZEROS,    DATA_ONE_HOT,    DATA_CONSTANT,
                                           DATA_STUDENT,  DATA_OUTLIERS, DATA_MAGNITUDES, DATA_GAUSSIAN};
    static const data_kind value_kinds[8] = {DATA_STUDENT,  DATA_OUTLIERS, DATA_MAGNITUDES, DATA_ZEROS,
                                             DATA_GAUSSIAN, DATA_ONE_HOT,  DATA_CONSTANT,   DATA_STUDENT};
    const uint8_t kinds = fuzz_byte(input);
    const int heads = m->desc.n_kv_heads, n_keys = heads * key_dim(m), n_values = heads * value_dim(m);
    fuzz_data(kinds, key_kinds[(kinds & 3) + (kinds >> 5 & 4)], keys, n * heads, key_dim(m));
    fuzz_data((uint64_t)kinds + 1, value_kinds[(kinds >> 2 & 3) + (kinds >> 4 & 4)], values, n * heads, value_dim(m));
    for (int i = 0; i < n * n_keys && m->learn_from; i++)
        keys[i] = keys[i] * (float)(1 + i % n_keys % 7) + (float)(i % 3);
    for (int t = 0; t < n && kinds % 16 == 12; t++) keys[t * n_keys] = m->end + t ? 1.0f : 6e4f;
    for (int t = 1; t < n && m->learn_from && kinds & 16; t++) /* the same, or nearly */
        for (int i = 0; (t * 7 + kinds) % 4 && i < n_values; i++)
            values[t * n_values + i] = values[(t - 1) * n_values + i] * (i % 2 ? 1.0f : 1.125f);
    if (!n || kinds % 16 != 15) return;
    if (kinds & 16)
        make_odd_row(keys, heads, key_dim(m), kinds >> 5);
    else
        make_odd_row(values, heads, value_dim(m), kinds >> 5);
}

/* Whether halves hold n rows of dim values. */
static bool in_halves(const float *rows, int n, int dim, bool centered)
{
    bool hold = true;
    for (int i = 0; i < n; i++) {
        float most = 0.0f;
        for (int d = 0; d < dim; d++) most = fmaxf(most, fabsf(rows[i * dim + d]));
        hold = hold && most < 65520.0f && (centered || most == 0.0f || most >= 1.0f / 131072.0f);
    }
    return hold;
}

/* Whether the halves that an append brings hold n rows of keys (0) or values. */
static bool halves_hold(const model *m, int side, const float *rows, int n)
{
    const tqkv_store *s = &m->stores[HALVES + side];
    const int dim = m->stores[side].head_dim, n_rows = n * m->desc.n_kv_heads;
    if (m->stores[side].format == TQKV_F16) return true;
    if (m->learning && !in_halves(rows, n_rows, dim, false)) return false;
    if (!s->codes || (!n_last(m) && m->base + m->end >= n_first(m))) return true;
    float *stored = fuzz_new_floats(n_rows, dim, 1);
    CHECK_RESULT(tqkv_probe(s, rows, n, stored), TQKV_OK);
    const bool hold = in_halves(stored, n_rows, dim, s->center != NULL);
    free(stored);
    return hold;
}

/* One position after the other. */
static void model_append(model *m, const float *const rows[STREAMS], int n)
{
    const int heads = m->desc.n_kv_heads;
    const bool learning = m->learning;
    if (n && !learning) m->raw_below = m->raw_end = 0;
    for (int t = 0; t <= n; t++) {
        if (m->learning && m->end == m->learn_from) learn(m, m->end);
        for (int i = 0; i < STORES * heads && t < n; i++) {
            const tqkv_store *s = &m->stores[i % STORES];
            if (s->codes)
                encode(s, i / STORES, m->end, rows[side_of(i % STORES)] + (t * heads + i / STORES) * s->head_dim);
        }
        if (t == n) break;
        if (m->below == m->end && m->end < n_first(m)) m->below++;
        m->end++;
    }
    if (learning && !m->learning) m->raw_end = at_most(m->end, m->learn_from + TILE);
    if (m->desc.non_causal && !m->learning) m->raw_below = m->raw_end = 0; /* all queries see what is encoded */
    if (m->end - m->first > m->desc.capacity) m->first = m->end - m->desc.capacity;
    if (n) m->appended = n;
}

static void append(fuzz_input *input, model *m, bool few)
{
    const int heads = m->desc.n_kv_heads, dims[2] = {key_dim(m), value_dim(m)};
    int n = fuzz_range(input, 0, m->desc.capacity + 3);
    const uint8_t bad = fuzz_byte(input);
    if (few) n %= 8;
    n = (int)at_most(n, m->positions - m->end);
    float *keys = fuzz_new_floats(n, heads, dims[0]), *values = fuzz_new_floats(n, heads, dims[1]);
    make_rows(input, m, keys, values, n);
    const bool is_bad = bad >= 224 && n, bad_key = bad & 1 || m->desc.shared;
    if (is_bad) (bad_key ? keys : values)[bad % (n * heads * dims[!bad_key])] = bad & 2 ? NAN : -INFINITY;
    char *k = spread(m, m->desc.strides.k, n, heads, dims[0], keys);
    char *v = spread(m, m->desc.strides.v, n, heads, dims[1], values);
    float *main = part_of(m, keys, 0, m->desc.head_dim, n * heads);
    float *tail = part_of(m, keys, m->desc.head_dim, m->desc.tail_dim, n * heads);
    const float *const rows[STREAMS] = {main, m->desc.shared ? main : values, tail};
    const bool fits = m->desc.ring ? m->base + m->end <= INT64_MAX - n : m->end + n <= m->desc.capacity;
    const bool hold = !is_bad && halves_hold(m, KEYS, rows[KEYS], n) && halves_hold(m, VALUES, rows[VALUES], n);
    tqkv_result result = tqkv_cache_append(m->cache, k, m->desc.shared ? NULL : v, n);
    if (try_again(m, result)) result = tqkv_cache_append(m->cache, k, m->desc.shared ? NULL : v, n);
    CHECK_RESULT(result, !fits ? TQKV_OUT_OF_RANGE : hold ? TQKV_OK : TQKV_NOT_FINITE);
    CHECK(result != TQKV_NOT_FINITE || is_bad == !strstr(test_explained, "halves"), "%s", test_explained);
    if (result == TQKV_OK) model_append(m, rows, n);
    free(main);
    free(tail);
    free(k);
    free(v);
    free(keys);
    free(values);
}

/* ---- Attend ---- */

/* Lets attention read the model's stores where it reads the cache's. */
static void read_model(const model *m, tqkv_attention *a)
{
    const tqkv_store *const s = m->stores;
    a->keys = &s[KEYS];
    a->values = &s[VALUES];
    if (a->tail) a->tail = &s[TAIL];
    if (a->first.keys) a->first.keys = &s[HALVES + KEYS];
    if (a->first.values) a->first.values = &s[HALVES + VALUES];
    if (a->last.keys) a->last.keys = &s[HALVES + KEYS];
    if (a->last.values) a->last.values = &s[HALVES + VALUES];
}

/* The attention of the newest queries, with the halves that the cache must have: over its own stores where the model's
   have other positions, and in a ring with first ones, which adds these apart. */
static tqkv_attention attention_of(const model *m, int n_queries)
{
    tqkv_attention view = test_view(m->cache, 0);
    if (!m->base && !(m->desc.ring && m->below)) read_model(m, &view);
    tqkv_attention a = test_attention(view.keys, view.values, n_heads(m), n_queries, m->base + m->end);
    a.tail = view.tail;
    a.kv_len = (int)(m->end - m->first); /* 0 would mean the default */
    a.window = m->desc.window;
    a.scale = m->desc.scale;
    a.softcap = m->desc.softcap;
    a.sinks = m->desc.sinks;
    a.non_causal = m->desc.non_causal;
    a.first = view.first;
    a.first.n = (int)m->below;
    a.last = view.last;
    a.last.n = n_last(m);
    a.last.from = m->base + m->from;
    return a;
}

/* The floats whose rounded values the cache must give: zeros where nothing is resident. */
static float *expect_answers(const model *m, const float *q, int n, const tqkv_attention *some)
{
    const int n_raw = raw_queries(m, n);
    float *floats = fuzz_new_floats(n, n_heads(m), value_dim(m));
    tqkv_attention codes = attention_of(m, n - n_raw), raw;
    if (some) codes.tree = some->tree, codes.list = some->list;
    raw = codes;
    memset(floats, 0, (size_t)(n * n_heads(m) * value_dim(m)) * sizeof *floats);
    raw.keys = &m->stores[RAW + KEYS];
    raw.values = &m->stores[RAW + VALUES];
    raw.tail = m->stores[TAIL].codes ? &m->stores[TAIL] : NULL;
    raw.first.n = raw.last.n = 0;
    raw.n_queries = n_raw;
    raw.end = m->end - (n - n_raw);
    raw.kv_len = (int)raw.end;
    if (n_raw) CHECK_RESULT(tqkv_attend(&raw, q, floats), TQKV_OK);
    if (codes.kv_len && n > n_raw)
        CHECK_RESULT(
            tqkv_attend(&codes, q + n_raw * n_heads(m) * key_dim(m), floats + n_raw * n_heads(m) * value_dim(m)),
            TQKV_OK);
    return floats;
}

/* Compares n queries' answers, which become untouched memory. */
static void check_answers(const model *m, const float *q, int n, const tqkv_attention *some, char *out)
{
    const int heads = n_heads(m), dim = value_dim(m);
    float *floats = expect_answers(m, q, n, some);
    for (int i = 0; i < n * heads; i++) {
        char *row = out + row_at(m, m->desc.strides.out, heads, dim, i);
        if (m->end > m->first) /* else zeros of either sign */
            CHECK(fuzz_is_rounded(m->desc.type, row, floats + i * dim, (size_t)dim), "query %d of %d: other floats",
                  i / heads, n);
        memset(row, 0xff, (size_t)dim * type_size(m));
    }
    free(floats);
}

/* Whether queries must be refused for a window, or for halves of what was raw. */
static bool lacks_rows(const model *m, int n)
{
    const int n_raw = raw_queries(m, n);
    /* What the window of the first query begins with, and the first position that can be missing. */
    const int64_t begin = m->end - n + n_raw - m->desc.window + 1, kept = m->base ? -m->base : m->below;
    return (n_raw && !m->raw_end) || (m->desc.window && n > n_raw && at_least(begin, kept) < m->first);
}

/* Room for what some queries see of their positions. */
typedef struct sight {
    uint64_t tree[TILE];
    int32_t blocks[256][2];
} sight;

/* A tree, or a list of two blocks each and of the newest positions, where there can be one. */
static void choose_sight(const model *m, uint8_t seed, int n, sight *room, tqkv_attention *some)
{
    memset(some, 0, sizeof *some);
    for (int i = 0; i < TILE; i++) room->tree[i] = UINT64_C(1) << i | UINT64_C(0x9e3779b97f4a7c15) * seed >> i % 16;
    for (int i = 0; i < n; i++) room->blocks[i][0] = (seed + i) % 5, room->blocks[i][1] = i % 3 ? 5 + seed % 4 : -1;
    if (seed & 2 && n <= TILE && !m->desc.non_causal) some->tree = room->tree;
    if (seed & 2 || m->desc.window || m->base) return; /* what a list leaves out of a window, nobody misses */
    some->list.rows = room->blocks[0];
    some->list.length = 2;
    some->list.block = 16;
    some->list.newest = seed % 7;
}

static tqkv_result ask(const model *m, const tqkv_attention *some, const void *q, int n, void *out)
{
    return some ? test_attend_some(m->cache, some, q, n, out) : tqkv_cache_attend(m->cache, q, n, out);
}

/* By the cache, or by a view of it. */
static void attend(fuzz_input *input, model *m, int n)
{
    const tqkv_cache_strides *s = &m->desc.strides;
    const int heads = n_heads(m), dims[2] = {key_dim(m), value_dim(m)}, n_raw = raw_queries(m, n);
    const size_t size = wide_size(m, s->out, n, heads, dims[1]);
    const uint8_t seed = fuzz_byte(input);
    const bool views = m->chunks && seed & 1 && n && m->end > m->first, cut = views && n_raw && n_raw < n;
    const bool many = n_last(m) && n > TILE && n > m->appended; /* more than there need be halves for */
    const bool refused = cut || lacks_rows(m, n);
    sight room;
    tqkv_attention some;
    choose_sight(m, seed, n, &room, &some);
    float *q = fuzz_new_floats(n, heads, dims[0]);
    fuzz_data(seed, DATA_GAUSSIAN, q, n * heads, dims[0]);
    char *rows = spread(m, s->q, n, heads, dims[0], q), *out = (char *)test_alloc_filled(size, 0xff);
    tqkv_result result = ask(m, views ? &some : NULL, rows, n, out);
    if (try_again(m, result)) result = ask(m, views ? &some : NULL, rows, n, out);
    if (!many || result != TQKV_OUT_OF_RANGE) CHECK_RESULT(result, refused ? TQKV_OUT_OF_RANGE : TQKV_OK);
    if (result == TQKV_OK && m->stores[HALVES].codes && !m->learning)
        check_halves(m, m->desc.non_causal && !m->desc.window ? 1 : n - n_raw);
    if (result == TQKV_OK) check_answers(m, q, n, views ? &some : NULL, out);
    CHECK(test_is_untouched(out, size), "written, or a gap was");
    free(q);
    free(rows);
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
    if ((m->raw_end && end < m->raw_below) || (end == 0 && m->learn_from)) unlearn(m);
    m->end = end == 0 ? 0 : end - m->base;
    m->below = at_most(m->below, m->end);
    m->from = at_most(m->from, m->end);
    if (!m->learning) m->raw_end = at_most(m->raw_end, m->end);
    if (end == 0) m->first = m->base = 0;
}

/* Truncates to 0, or to a position some steps before the end, or before those that are read raw, or just beyond. */
static void truncate_near_end(fuzz_input *input, model *m, int step)
{
    const bool learnt = m->chunks && m->raw_end && !m->learning;
    int64_t end = (learnt ? m->raw_below : m->base + m->end) - fuzz_range(input, 0, 12) * step;
    truncate_to(m, fuzz_byte(input) < (m->chunks ? 40 : 8) ? 0 : end <= INT64_MAX - 2 ? end + 2 : end);
}

/* Moves a ring's positions by rewriting its snapshot; appending up to them would take years. */
static void move_positions(model *m, stream *s, uint64_t bits)
{
    int64_t farthest = INT64_MAX - m->end, base = (int64_t)(bits & INT64_MAX);
    uint64_t positions[2], hash;
    if (!m->desc.ring || m->end == 0 || m->learning || m->stores[HALVES].codes) return;
    m->base = base <= farthest ? base : farthest;
    positions[0] = (uint64_t)(m->base + m->first);
    positions[1] = (uint64_t)(m->base + m->end);
    for (int i = 0; i < 16; i++) s->bytes[120 + i] = (uint8_t)(positions[i / 8] >> (8 * (i % 8)));
    const size_t header = 144;
    hash = XXH3_64bits(s->bytes, header);
    for (size_t i = 0; i < 8; i++) s->bytes[header + i] = (uint8_t)(hash >> (8 * i));
}

/* What is loaded takes the cache's place, and saves to the same bytes. */
static void save_and_load(fuzz_input *input, model *m, bool move)
{
    tqkv_cache_desc desc = test_cache_desc(0, 0, m->desc.sinks ? n_heads(m) : 0, 0);
    desc.allocator = m->desc.allocator;
    desc.parallel = m->desc.parallel;
    desc.sinks = m->desc.sinks;
    desc.type = m->desc.type;
    desc.strides = m->desc.strides;
    desc.non_causal = m->desc.non_causal;
    stream s = stream_empty();
    s.call.largest = fuzz_byte(input);
    CHECK_RESULT(tqkv_cache_save(m->cache, stream_write, &s), TQKV_OK);
    if (move) move_positions(m, &s, fuzz_bits(input, 8));
    tqkv_cache *loaded = NULL;
    tqkv_result result = tqkv_cache_load(&desc, stream_read, &s, &loaded);
    if (result == TQKV_OUT_OF_MEMORY && m->counter.fail_at) {
        m->counter.fail_at = 0;
        stream_rewind(&s);
        result = tqkv_cache_load(&desc, stream_read, &s, &loaded);
    }
    CHECK_RESULT(result, TQKV_OK);
    stream again = stream_of_cache(loaded);
    CHECK(stream_is_equal(&s, &again), "a loaded cache saves to other bytes");
    tqkv_cache_destroy(m->cache);
    m->cache = loaded;
    begin_copy(m);
    stream_free(&s);
    stream_free(&again);
}

/* ---- Remove, keep and fork ---- */

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
    if (expected != TQKV_OK || !count) return;
    forget_halves(m);
    begin_edit(m, first);
    model_move(m, first + count, first, m->end - first - count);
    m->end -= count;
    if (m->below > first) m->below = at_least(m->below - count, first);
    if (m->from > first) m->from = at_least(m->from - count, first);
}

/* Of the newest n positions those that are named stay. */
static void model_keep(model *m, int n, const int *kept, int n_kept)
{
    const int64_t first = m->end - n;
    int same = 0, below = 0;
    while (same < n_kept && kept[same] == same) same++;
    while (below < n_kept && first + kept[below] < m->below) below++;
    const int64_t position = m->base + first + same;
    forget_halves(m);
    if (position < m->raw_below && m->raw_end >= m->base + m->end) unlearn(m);
    begin_edit(m, position);
    for (int i = 0; i < n_kept; i++) model_move(m, first + kept[i], first + i, 1);
    m->end = first + n_kept;
    m->below = at_most(m->below, first + below);
    if (first + same < m->from) m->from = m->end; /* of what moves some has no halves */
    if (m->learning && m->end >= m->learn_from) learn(m, m->end);
}

/* Of the newest n none, or those whose bits are set; sometimes one is out of order or range. */
static void keep_some(fuzz_input *input, model *m)
{
    int kept[64], n_kept = 0, n = fuzz_range(input, 0, 64);
    const uint64_t bits = fuzz_bits(input, 8);
    const uint8_t bad = fuzz_byte(input);
    if (m->chunks) n %= (int)(m->end - m->first) + 2;
    for (int i = 0; i < n && !(m->chunks && bad < 48); i++)
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
    if (expected == TQKV_OK && n_kept < n) model_keep(m, n, kept, n_kept);
}

/* Asks for a copy in other formats; with halves beside the codes not for F16, which would leave them. */
static void ask_for_formats(const model *m, uint8_t choice, tqkv_cache_desc *desc)
{
    if (!(choice & 2)) return;
    desc->key_format = test_formats[(choice >> 2) % TEST_FORMATS];
    if (!m->desc.shared) desc->value_format = test_formats[(choice >> 3) % TEST_FORMATS];
    if (m->stores[TAIL].codes) desc->tail_format = test_formats[(choice >> 4) % TEST_FORMATS];
    if (!m->stores[HALVES].codes) return;
    if (desc->key_format == TQKV_F16) desc->key_format = TQKV_FORMAT_DEFAULT;
    if (desc->value_format == TQKV_F16) desc->value_format = TQKV_FORMAT_DEFAULT;
}

/* Converts a stream of the model, if the copy has another format; its halves are those of what was F16. */
static void model_convert(model *m, int i, tqkv_format format)
{
    tqkv_store *s = &m->stores[i];
    if (!s->codes || s->format == format) return;
    tqkv_store to = test_store(format, s->head_dim, s->n_kv_heads, s->capacity, false);
    to.center = s->center;
    to.channel_scale = s->channel_scale;
    if (i == TAIL || !m->learning) CHECK_RESULT(tqkv_store_convert(&to, s, 0, (int)m->end), TQKV_OK);
    if (i != TAIL && !m->learning && m->stores[HALVES].codes && s->format == TQKV_F16)
        CHECK_RESULT(tqkv_store_convert(&m->stores[HALVES + i], s, 0, (int)m->end), TQKV_OK);
    free(s->codes);
    free(s->norms);
    *s = to;
}

/* What a fork must give. */
static tqkv_result expect_fork(const model *m, const tqkv_cache_desc *desc)
{
    const int capacity = desc->capacity ? desc->capacity : m->desc.capacity;
    const bool ring = m->desc.ring || desc->ring;
    if (capacity < m->end - m->first || (!m->learning && capacity < m->below)) return TQKV_OUT_OF_RANGE;
    if (ring && m->desc.window > capacity) return TQKV_INVALID_ARGUMENT;
    return m->learning && !can_calibrate(m, capacity, ring) ? TQKV_INVALID_ARGUMENT : TQKV_OK;
}

/* The fork takes the cache's place. */
static void fork_cache(fuzz_input *input, model *m)
{
    const uint8_t choice = fuzz_byte(input);
    const uint8_t use = fuzz_byte(input);
    const bool changed = choice & 1;
    const int capacity = fuzz_range(input, 0, 150);
    tqkv_cache_desc desc = test_cache_desc(0, 0, 0, changed ? capacity : 0);
    tqkv_cache *copy = NULL;
    desc.ring = changed && use & 1;
    desc.non_causal = changed && use > 240;
    if (changed) ask_for_formats(m, choice, &desc);
    const tqkv_result expected = expect_fork(m, &desc);
    tqkv_result result = tqkv_cache_fork(m->cache, changed ? &desc : NULL, &copy);
    if (try_again(m, result)) result = tqkv_cache_fork(m->cache, changed ? &desc : NULL, &copy);
    CHECK_RESULT(result, expected);
    CHECK((copy != NULL) == (result == TQKV_OK), "fork: a cache, or none");
    if (!copy) return;
    tqkv_cache_destroy(m->cache);
    m->cache = copy;
    if (desc.capacity) m->desc.capacity = desc.capacity;
    m->desc.ring = m->desc.ring || desc.ring;
    m->desc.non_causal = m->desc.non_causal || desc.non_causal;
    const tqkv_attention view = test_view(copy, 0);
    model_convert(m, KEYS, view.keys->format);
    model_convert(m, VALUES, view.values->format);
    if (view.tail) model_convert(m, TAIL, view.tail->format);
    begin_copy(m);
}

static void edit(fuzz_input *input, model *m, int operation)
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
    const uint8_t operation = fuzz_byte(input);
    const bool attends = m->chunks && operation & 16, odd = m->chunks && operation & 32;
    const bool edits = operation & 8 || (m->raw_end && !m->learning && operation & 64); /* often as it has learned */
    m->counter.calls = 0;
    m->counter.fail_at = operation >= 192 ? 1 + operation % 3 : 0;
    if (m->edits && edits) {
        edit(input, m, operation % 8);
    } else if (operation % 8 < 3) {
        append(input, m, odd);
        if (attends) attend(input, m, m->appended);
    } else if (operation % 8 < 5) {
        attend(input, m,
               !attends ? fuzz_range(input, 0, MAX_QUERIES)
               : odd    ? TILE + (operation >> 6 & 1)
                        : m->appended);
    } else if (operation % 8 == 5) {
        truncate_near_end(input, m, attends ? 8 : 1);
    } else {
        save_and_load(input, m, operation % 8 == 7);
    }
    check_state(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    test_failure_aborts = true;
    fuzz_input input = {bytes, size};
    model m;
    set_up(&input, &m);
    for (int i = 0; i < MAX_OPERATIONS && input.left; i++) operate(&input, &m);
    tear_down(&m);
    return 0;
}

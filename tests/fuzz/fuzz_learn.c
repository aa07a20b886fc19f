/* make fuzz FUZZERS=learn SECONDS=60; AFL++: make fuzz-afl FUZZERS=learn. Two caches of one description that mostly
   learns centre and scale: one gets its positions in chunks, some with gaps between rows, with tasks in another order
   and allocations that fail, the other one after the other. Values that are often equal let positions not be new.
   After each operation their snapshots have the same bytes, and queries the same bits. Until an edit after it has
   learned the second one is also compared with a model: before, with a cache of halves; then, with one that was given
   the centre and the scale that its first positions must teach. */
#include "fuzz.h"
#include "tests/counting.h"

enum { MAX_OPERATIONS = 40 };

/* What the single cache is compared with; all are of floats, which hold what rows of the type do. */
typedef struct model {
    bool ended;              /* nothing is compared any more */
    tqkv_cache *raw, *plain; /* of halves, and with centre and scale; plain: NULL before these are learned */
    float *k, *v;            /* [capacity] rows, as they came, before that */
    int n;                   /* of them */
} model;

typedef struct twins {
    tqkv_cache_desc desc;
    tqkv_cache *chunked, *single;
    model model;
    bool strided, by_head;
    bool copied;      /* the chunked one: an empty one does not learn anew */
    counting counter; /* of the chunked one */
} twins;

static int n_heads(const twins *t) { return t->desc.n_heads; }

static int key_dim(const twins *t) { return t->desc.head_dim + t->desc.tail_dim; }

static int value_dim(const twins *t) { return t->desc.value_dim ? t->desc.value_dim : t->desc.head_dim; }

static void read_desc(fuzz_input *input, twins *t)
{
    static const int dims[8] = {32, 64, 48, 96, 32, 80, 128, 160};
    const uint8_t flags = fuzz_byte(input), kind = fuzz_byte(input), more = fuzz_byte(input);
    tqkv_cache_desc *desc = &t->desc;
    desc->head_dim = dims[kind & 7];
    desc->n_kv_heads = 1 + (kind >> 3 & 1);
    desc->n_heads = desc->n_kv_heads * (1 + (kind >> 4 & 3));
    desc->capacity = fuzz_range(input, 16, 120);
    const uint8_t calibrate = fuzz_byte(input);
    desc->calibrate = calibrate < 210 ? 16 + calibrate % 105 : 0;
    desc->key_format = test_no_format(fuzz_range(input, 0, TEST_FORMATS));
    desc->shared = (flags & 1) != 0;
    desc->value_format = desc->shared ? TQKV_FORMAT_DEFAULT : test_no_format(fuzz_range(input, 0, TEST_FORMATS));
    desc->value_dim = flags & 2 && !desc->shared ? dims[more & 7] : 0;
    desc->tail_dim = flags & 4 ? dims[more >> 3 & 1] : 0;
    desc->tail_format = desc->tail_dim ? test_no_format((more >> 4) % (TEST_FORMATS + 1)) : TQKV_FORMAT_DEFAULT;
    desc->ring = (flags & 8) != 0;
    if (desc->ring && desc->calibrate > desc->capacity / 4)
        desc->calibrate = desc->capacity < 64 ? 16 : desc->capacity / 4;
    desc->window = flags & 16 ? fuzz_range(input, 1, desc->capacity) : 0;
    if (flags & 32) desc->exact_first = fuzz_range(input, 0, 9);
    if (flags & 32) desc->exact_last = fuzz_range(input, 0, desc->capacity + 9);
    desc->type = test_no_type((kind >> 6) % 3);
    desc->pairs = test_no_pairs((more >> 2) % 3);
    desc->non_causal = (flags & 128) != 0;
    t->strided = (flags & 64) != 0;
    t->by_head = (calibrate & 1) != 0;
}

/* ---- The model ---- */

static void open_model(twins *t)
{
    model *m = &t->model;
    tqkv_cache_desc raw = t->desc;
    raw.type = TQKV_TYPE_F32;
    raw.calibrate = raw.exact_first = raw.exact_last = 0;
    raw.key_format = TQKV_F16;
    raw.value_format = raw.shared ? TQKV_FORMAT_DEFAULT : TQKV_F16;
    CHECK_RESULT(tqkv_cache_create(&raw, &m->raw), TQKV_OK);
    m->k = fuzz_new_floats(t->desc.capacity, t->desc.n_kv_heads, key_dim(t));
    m->v = fuzz_new_floats(t->desc.capacity, t->desc.n_kv_heads, value_dim(t));
}

static void close_model(model *m)
{
    tqkv_cache_destroy(m->raw);
    tqkv_cache_destroy(m->plain);
    free(m->k);
    free(m->v);
    memset(m, 0, sizeof *m);
    m->ended = true;
}

static float as_half(float x) { return (float)reference_half_value(reference_half(x)); }

/* Whether |v - v'|^2 > |v|^2 / 4, of the halves of values v and those before. n: values of a position */
static bool is_new(const float *v, int n)
{
    double differs = 0.0, size = 0.0;
    for (int i = 0; i < n; i++) {
        const double x = (double)as_half(v[i]);
        differs += pow(x - (double)as_half(v[i - n]), 2.0);
        size += x * x;
    }
    return differs > size / 4.0;
}

/* Scales of a head so large that halves hold its rows. kept: [n] rows of n_kv_heads heads of d */
static void limit_scales(const float *kept, int n, int step, int d, const float *center, float *scale)
{
    float factor = 1.0f;
    for (int i = 0; i < d; i++) {
        float largest = 0.0f;
        for (int p = 0; p < n; p++) largest = fmaxf(largest, fabsf(reference_add(kept[p * step + i], -center[i])));
        factor = fmaxf(factor, reference_divide(reference_multiply(largest, 1.0f / 1024.0f), scale[i]));
    }
    for (int i = 0; i < d; i++) scale[i] = reference_multiply(scale[i], factor);
}

/* Centre and scale that the first positions teach. channels: [2][n_kv_heads][head_dim] */
static void expect_channels(const twins *t, float *channels)
{
    const model *m = &t->model;
    const int heads = t->desc.n_kv_heads, d = t->desc.head_dim, step = heads * d, half = m->n / 2;
    const int n_values = t->desc.shared ? step : heads * value_dim(t);
    float *kept = fuzz_new_floats(m->n, heads, d), *used = fuzz_new_floats(m->n, heads, d);
    bool news[128] = {false};
    int all = 0, from = 0, n = 0;
    for (int p = 0; p < m->n; p++) {
        for (int i = 0; i < step; i++)
            kept[p * step + i] = as_half(m->k[p * heads * key_dim(t) + i / d * key_dim(t) + i % d]);
        news[p] = p == 0 || is_new((t->desc.shared ? kept : m->v) + p * n_values, n_values);
        all += news[p];
        from += p >= t->desc.exact_first && news[p];
    }
    const bool few = all < (half > 64 ? 64 : half > 16 ? half : 16);
    const int first = (few ? m->n - t->desc.exact_first : from) >= 16 ? t->desc.exact_first : 0;
    for (int p = first; p < m->n; p++)
        if (few || news[p]) memcpy(used + n++ * step, kept + p * step, (size_t)step * sizeof *used);
    tqkv_store shape = test_store(TQKV_I8, d, heads, 1, false);
    CHECK_RESULT(tqkv_calibrate(&shape, used, n, NULL, 0, 0, t->desc.pairs, channels, channels + step), TQKV_OK);
    for (int i = step; few && i < 2 * step; i++) channels[i] = fmaxf(0.5f, fminf(channels[i], 1.5f));
    for (int h = 0; h < heads; h++)
        limit_scales(kept + h * d, m->n, step, d, channels + h * d, channels + step + h * d);
    test_store_free(&shape);
    free(kept);
    free(used);
}

/* Appends rows of floats; tail: the part of a key that is not kept as halves */
static void append_halves(const twins *t, tqkv_cache *to, int p)
{
    const int n_keys = t->desc.n_kv_heads * key_dim(t), n_values = t->desc.n_kv_heads * value_dim(t);
    float *k = fuzz_new_floats(1, n_keys, 1), *v = fuzz_new_floats(1, n_values, 1);
    for (int i = 0; i < n_keys; i++) {
        const float x = t->model.k[p * n_keys + i];
        k[i] = i % key_dim(t) < t->desc.head_dim ? as_half(x) : x;
    }
    for (int i = 0; i < n_values; i++) v[i] = as_half(t->model.v[p * n_values + i]);
    CHECK_RESULT(tqkv_cache_append(to, k, t->desc.shared ? NULL : v, 1), TQKV_OK);
    free(k);
    free(v);
}

/* The single cache has learned: what it must have, and a cache with that, which takes over. */
static void model_learns(twins *t)
{
    const int heads = t->desc.n_kv_heads, d = t->desc.head_dim, step = heads * d;
    const tqkv_store *keys = test_keys(t->single);
    float *channels = fuzz_new_floats(2, heads, d), *given = fuzz_new_floats(2, heads, key_dim(t));
    expect_channels(t, channels);
    CHECK(!memcmp(keys->center, channels, (size_t)step * sizeof *channels), "another centre");
    CHECK(!memcmp(keys->channel_scale, channels + step, (size_t)step * sizeof *channels), "another scale");
    for (int i = 0; i < 2 * heads * key_dim(t); i++) {
        const int c = i % key_dim(t);
        given[i] = c < d ? channels[i / key_dim(t) * d + c] : i < heads * key_dim(t) ? 0.0f : 1.0f;
    }
    tqkv_cache_desc desc = t->desc;
    desc.type = TQKV_TYPE_F32;
    memset(&desc.strides, 0, sizeof desc.strides);
    desc.calibrate = 0;
    desc.allocator.alloc = NULL;
    desc.allocator.free = NULL;
    desc.key_center = given;
    desc.key_scale = given + heads * key_dim(t);
    CHECK_RESULT(tqkv_cache_create(&desc, &t->model.plain), TQKV_OK);
    for (int p = 0; p < t->model.n; p++) append_halves(t, t->model.plain, p);
    free(channels);
    free(given);
}

/* Row r of k and v goes to the model, too, and the single cache answered its query q with out. */
static void model_append(twins *t, const float *k, const float *v, const float *q, const void *out)
{
    model *m = &t->model;
    const size_t n_keys = (size_t)(t->desc.n_kv_heads * key_dim(t)),
                 n_values = (size_t)(t->desc.n_kv_heads * value_dim(t));
    const size_t n_out = (size_t)(n_heads(t) * value_dim(t));
    if (m->ended) return;
    tqkv_cache *answers = m->plain ? m->plain : m->raw;
    if (m->plain) {
        CHECK_RESULT(tqkv_cache_append(m->plain, k, t->desc.shared ? NULL : v, 1), TQKV_OK);
    } else {
        CHECK_RESULT(tqkv_cache_append(m->raw, k, t->desc.shared ? NULL : v, 1), TQKV_OK);
        memcpy(m->k + (size_t)m->n * n_keys, k, n_keys * sizeof *k);
        memcpy(m->v + (size_t)m->n * n_values, v, n_values * sizeof *v);
        m->n++;
        if (test_keys(t->single)->channel_scale) model_learns(t);
    }
    if (!out) return;                                       /* a lost window */
    if (t->desc.non_causal && m->plain) answers = m->plain; /* all positions are read as codes at once */
    float *floats = fuzz_new_floats(1, (int)n_out, 1);
    CHECK_RESULT(tqkv_cache_attend(answers, q, 1, floats), TQKV_OK);
    CHECK(fuzz_is_rounded(t->desc.type, out, floats, n_out), "position %d: not what %s gives",
          (int)tqkv_cache_end(t->single) - 1, answers == m->raw ? "a cache of halves" : "a cache with that scale");
    free(floats);
}

/* Positions [first, first + count) are gone, of a cache that has not learned. */
static void model_remove(twins *t, int64_t first, int64_t count)
{
    model *m = &t->model;
    if (m->ended || !count) return;
    if (m->plain || t->desc.ring || tqkv_cache_remove(m->raw, first, count) != TQKV_OK) {
        close_model(m);
        return;
    }
    const int n_keys = t->desc.n_kv_heads * key_dim(t), n_values = t->desc.n_kv_heads * value_dim(t);
    const size_t left = (size_t)(m->n - first - count);
    memmove(m->k + first * n_keys, m->k + (first + count) * n_keys, left * (size_t)n_keys * sizeof(float));
    memmove(m->v + first * n_values, m->v + (first + count) * n_values, left * (size_t)n_values * sizeof(float));
    m->n -= (int)count;
}

/* Rows of the chunked cache have gaps, token by token or head by head. */
static tqkv_strides strides_of(int heads, int dim, bool by_head)
{
    enum { GAP = 16, MOST_TOKENS = 128 };
    const size_t token = by_head ? (size_t)dim : (size_t)(heads * dim + GAP),
                 head = by_head ? (size_t)(MOST_TOKENS * dim + GAP) : (size_t)dim;
    const tqkv_strides s = {token, head};
    return s;
}

static void set_strides(twins *t, bool by_head)
{
    tqkv_cache_desc *d = &t->desc;
    d->strides.k = strides_of(d->n_kv_heads, key_dim(t), by_head);
    d->strides.v = strides_of(d->n_kv_heads, value_dim(t), !by_head);
    d->strides.q = strides_of(n_heads(t), key_dim(t), by_head);
    d->strides.out = strides_of(n_heads(t), value_dim(t), !by_head);
}

/* Copies n rows of each head between memory without gaps and with them. */
static void copy_rows(const twins *t, tqkv_strides s, int n, int heads, int dim, char *plain, char *wide, bool spreads)
{
    const size_t size = t->desc.type == TQKV_TYPE_F32 ? 4 : 2, bytes = (size_t)dim * size;
    for (int i = 0; i < n * heads; i++) {
        char *row = wide + ((size_t)(i / heads) * s.token + (size_t)(i % heads) * s.head) * size;
        memcpy(spreads ? row : plain + (size_t)i * bytes, spreads ? plain + (size_t)i * bytes : row, bytes);
        if (!spreads) memset(row, 0xff, bytes);
    }
}

static size_t wide_size(const twins *t, tqkv_strides s, int n, int heads, int dim)
{
    const size_t last = n ? (size_t)(n - 1) * s.token + (size_t)(heads - 1) * s.head + (size_t)dim : 0;
    return last * (t->desc.type == TQKV_TYPE_F32 ? 4 : 2);
}

/* The rows with gaps, or as they are without strides. Freed by the caller. */
static char *spread(const twins *t, tqkv_strides s, int n, int heads, int dim, char *plain)
{
    if (!s.token) s.token = (size_t)(heads * dim), s.head = (size_t)dim;
    char *wide = (char *)test_alloc_filled(wide_size(t, s, n, heads, dim), 0xff);
    copy_rows(t, s, n, heads, dim, plain, wide, true);
    return wide;
}

/* Whether the library takes the description: it refuses the same for both. */
static bool set_up(fuzz_input *input, twins *t)
{
    memset(t, 0, sizeof *t);
    fuzz_choose_isa(fuzz_byte(input));
    read_desc(input, t);
    const tqkv_result result = tqkv_cache_create(&t->desc, &t->single);
    if (result == TQKV_OK && t->desc.calibrate)
        open_model(t);
    else
        t->model.ended = true;
    t->desc.allocator = counting_allocator(&t->counter);
    t->desc.parallel.run = test_run_backwards;
    if (t->strided) set_strides(t, t->by_head);
    CHECK_RESULT(tqkv_cache_create(&t->desc, &t->chunked), result);
    return result == TQKV_OK;
}

/* ---- Both caches hold the same ---- */

/* Says whether the last append to the chunked cache has learned: an edit may take that back. Its snapshot tells, and is
   else that of the single one, whose last append was a smaller one. */
static bool check_same(const twins *t)
{
    enum { NEEDS_HALVES = 100, HEADER = 144 };
    stream a = stream_of_cache(t->chunked), b = stream_of_cache(t->single);
    bool learned = false;
    for (int i = 0; i < 4; i++) learned |= a.bytes[NEEDS_HALVES + i] != 0;
    memset((unsigned char *)a.bytes + NEEDS_HALVES, 0, 4);
    memset(b.bytes + NEEDS_HALVES, 0, 4);
    memcpy(a.bytes + HEADER, b.bytes + HEADER, 8); /* the hash of that */
    CHECK(stream_is_equal(&a, &b), "snapshots of %d and %d bytes differ", (int)a.size, (int)b.size);
    stream_free(&a);
    stream_free(&b);
    return learned;
}

/* A call that lacked memory has changed nothing, and succeeds when it gets some. */
static bool try_again(twins *t, tqkv_result result)
{
    if (result != TQKV_OUT_OF_MEMORY) return false;
    CHECK(t->counter.fail_at, "no allocation failed");
    t->counter.fail_at = 0;
    (void)check_same(t);
    return true;
}

/* ---- Operations ---- */

/* Typed rows of n tokens: of keys with a constant part and channels of different sizes, of values, of queries. */
typedef struct rows {
    char *k, *v, *q;
    float *floats[3];                /* the same */
    size_t of_k, of_v, of_q, of_out; /* bytes of a token */
} rows;

static rows make_rows(fuzz_input *input, const twins *t, int n)
{
    static const data_kind kinds[8] = {DATA_GAUSSIAN, DATA_STUDENT, DATA_OUTLIERS,   DATA_CONSTANT,
                                       DATA_ZEROS,    DATA_ONE_HOT, DATA_MAGNITUDES, DATA_GAUSSIAN};
    const uint8_t seed = fuzz_byte(input);
    const int heads = t->desc.n_kv_heads, dim = key_dim(t), step = heads * dim;
    const size_t size = t->desc.type == TQKV_TYPE_F32 ? 4 : 2;
    float *k = fuzz_new_floats(n, heads, dim), *v = fuzz_new_floats(n, heads, value_dim(t));
    float *q = fuzz_new_floats(n, n_heads(t), dim);
    fuzz_data(seed, kinds[seed & 7], k, n * heads, dim);
    fuzz_data(seed + 1u, kinds[seed >> 3 & 7], v, n * heads, value_dim(t));
    fuzz_data(seed + 2u, DATA_GAUSSIAN, q, n * n_heads(t), dim);
    for (int i = 0; i < n * step; i++) k[i] = k[i] * (float)(1 + i % step % 7) + (float)(i % 3);
    for (int t1 = 1; t1 < n && seed & 64; t1++) /* some positions have the values of the one before, or nearly */
        for (int i = 0; (t1 * 7 + seed) % 4 && i < heads * value_dim(t); i++)
            v[t1 * heads * value_dim(t) + i] = v[(t1 - 1) * heads * value_dim(t) + i] * (i % 2 ? 1.0f : 1.125f);
    if (seed == 255 && n) k[(n - 1) * step] = (float)NAN;
    const rows r = {(char *)fuzz_typed(t->desc.type, k, (size_t)(n * step)),
                    (char *)fuzz_typed(t->desc.type, v, (size_t)(n * heads * value_dim(t))),
                    (char *)fuzz_typed(t->desc.type, q, (size_t)(n * n_heads(t) * dim)),
                    {k, v, q},
                    (size_t)step * size,
                    (size_t)(heads * value_dim(t)) * size,
                    (size_t)(n_heads(t) * dim) * size,
                    (size_t)(n_heads(t) * value_dim(t)) * size};
    return r;
}

static void free_rows(rows *r)
{
    free(r->k);
    free(r->v);
    free(r->q);
    for (int i = 0; i < 3; i++) free(r->floats[i]);
}

static tqkv_result append_chunk(twins *t, const rows *r, int n)
{
    const tqkv_cache_desc *d = &t->desc;
    char *k = spread(t, d->strides.k, n, d->n_kv_heads, key_dim(t), r->k);
    char *v = spread(t, d->strides.v, n, d->n_kv_heads, value_dim(t), r->v);
    const tqkv_result result = tqkv_cache_append(t->chunked, k, d->shared ? NULL : v, n);
    free(k);
    free(v);
    return result;
}

/* The chunked cache's answers, without gaps; nothing is written between them, nor by a refused call. */
static tqkv_result attend_chunk(twins *t, const rows *r, int n, char *out)
{
    const tqkv_cache_desc *d = &t->desc;
    const int heads = n_heads(t), dim = value_dim(t);
    tqkv_strides s = d->strides.out;
    if (!s.token) s.token = (size_t)(heads * dim), s.head = (size_t)dim;
    const size_t size = wide_size(t, s, n, heads, dim);
    char *q = spread(t, d->strides.q, n, heads, key_dim(t), r->q), *wide = (char *)test_alloc_filled(size, 0xff);
    const tqkv_result result = tqkv_cache_attend(t->chunked, q, n, wide);
    if (result == TQKV_OK) copy_rows(t, s, n, heads, dim, out, wide, false);
    CHECK(test_is_untouched(wide, size), "%s: written, or a gap was", tqkv_result_string(result));
    free(q);
    free(wide);
    return result;
}

/* Whether the n queries of a chunk see what each sees alone. All see the whole chunk if the cache is not causal, and in
   a ring that has wrapped they may have lost positions, or read first positions that are gone,
   unless n leaves room for a window. */
static bool chunk_sees_the_same(const twins *t, int n)
{
    const bool wrapped = t->desc.ring && tqkv_cache_end(t->chunked) > t->desc.capacity;
    return !t->desc.non_causal && (!wrapped || (t->desc.window && n <= t->desc.capacity - t->desc.window + 1));
}

/* Appends the rows to the single cache, each attended to alone; out: what the chunk gave, or NULL if it was refused. */
static void append_singly(twins *t, const rows *r, int n, const char *out)
{
    char *alone = (char *)test_alloc(r->of_out);
    for (int i = 0; i < n; i++) {
        const size_t at = (size_t)i;
        CHECK_RESULT(tqkv_cache_append(t->single, r->k + at * r->of_k, t->desc.shared ? NULL : r->v + at * r->of_v, 1),
                     TQKV_OK);
        const tqkv_result result = tqkv_cache_attend(t->single, r->q + at * r->of_q, 1, alone);
        CHECK(result == TQKV_OK || (!out && result == TQKV_OUT_OF_RANGE), "query %d of %d: %s", i,
              n, /* a lost window */
              tqkv_result_string(result));
        CHECK(!out || !memcmp(alone, out + at * r->of_out, r->of_out), "query %d of %d has other bits", i, n);
        model_append(t, r->floats[0] + at * (size_t)(t->desc.n_kv_heads * key_dim(t)),
                     r->floats[1] + at * (size_t)(t->desc.n_kv_heads * value_dim(t)),
                     r->floats[2] + at * (size_t)(n_heads(t) * key_dim(t)), result == TQKV_OK ? alone : NULL);
    }
    free(alone);
}

static void append_tokens(fuzz_input *input, twins *t, int n)
{
    rows r = make_rows(input, t, n);
    char *out = (char *)test_alloc((size_t)n * r.of_out);
    tqkv_result result = append_chunk(t, &r, n);
    if (try_again(t, result)) result = append_chunk(t, &r, n);
    if (result == TQKV_OK) {
        result = attend_chunk(t, &r, n, out);
        if (result == TQKV_OUT_OF_MEMORY) {
            CHECK(t->counter.fail_at, "no allocation failed");
            t->counter.fail_at = 0;
            result = attend_chunk(t, &r, n, out);
        }
        CHECK(result == TQKV_OK || result == TQKV_OUT_OF_RANGE, "%s", tqkv_result_string(result));
        append_singly(t, &r, n, result == TQKV_OK && chunk_sees_the_same(t, n) ? out : NULL);
    }
    free(out);
    free_rows(&r);
}

static void append(fuzz_input *input, twins *t) { append_tokens(input, t, fuzz_range(input, 0, t->desc.capacity + 3)); }

/* Lets what was learned count, with another append. False: there is no room for it. */
static bool settle(fuzz_input *input, twins *t)
{
    const bool full = !t->desc.ring && tqkv_cache_end(t->chunked) == t->desc.capacity;
    if (!check_same(t)) return true;
    if (!full) append_tokens(input, t, 1);
    return !check_same(t);
}

/* One more query at the newest position, unless only one of the caches still has the halves for it. */
static void attend(fuzz_input *input, twins *t)
{
    rows r = make_rows(input, t, 1);
    char *out[2] = {(char *)test_alloc_filled(r.of_out, 0xff), (char *)test_alloc_filled(r.of_out, 0xff)};
    const tqkv_result result = tqkv_cache_attend(t->single, r.q, 1, out[0]);
    if (!check_same(t)) {
        tqkv_result other = attend_chunk(t, &r, 1, out[1]);
        if (try_again(t, other)) other = attend_chunk(t, &r, 1, out[1]);
        CHECK_RESULT(other, result);
        CHECK(!memcmp(out[0], out[1], r.of_out), "the newest query has other bits");
    }
    free(out[0]);
    free(out[1]);
    free_rows(&r);
}

static void truncate_both(fuzz_input *input, twins *t)
{
    const int64_t less = fuzz_range(input, 0, 40) - 2, end = tqkv_cache_end(t->chunked);
    const int64_t to = less == 38 ? 0 : end - less;
    if (!settle(input, t) || (t->copied && to == 0)) return;
    const tqkv_result result = tqkv_cache_truncate(t->chunked, to);
    const int64_t before = tqkv_cache_end(t->single);
    CHECK_RESULT(tqkv_cache_truncate(t->single, to), result);
    if (result == TQKV_OK) model_remove(t, to, before - to);
}

static void remove_both(fuzz_input *input, twins *t)
{
    const int64_t first = fuzz_range(input, 0, 60), count = fuzz_range(input, 0, 30);
    if (!settle(input, t)) return;
    const tqkv_result result = tqkv_cache_remove(t->chunked, first, count);
    CHECK_RESULT(tqkv_cache_remove(t->single, first, count), result);
    if (result == TQKV_OK) model_remove(t, first, count);
}

static void keep_both(fuzz_input *input, twins *t)
{
    const int n = fuzz_range(input, 0, 32);
    const uint64_t bits = fuzz_bits(input, 4);
    int kept[32], n_kept = 0;
    for (int i = 0; i < n; i++)
        if (bits >> i & 1) kept[n_kept++] = i;
    if (!settle(input, t)) return;
    const tqkv_result result = tqkv_cache_keep(t->chunked, n, kept, n_kept);
    CHECK_RESULT(tqkv_cache_keep(t->single, n, kept, n_kept), result);
    const int64_t begin = tqkv_cache_end(t->single) - n_kept;
    for (int i = n; result == TQKV_OK && i-- > 0;)
        if (!(bits >> i & 1)) model_remove(t, begin + i, 1);
}

/* Lets a copy, or what a snapshot gives, take the place of the chunked cache. */
static void replace(fuzz_input *input, twins *t)
{
    tqkv_cache *copy = NULL;
    tqkv_result result;
    if (fuzz_byte(input) & 1) {
        result = tqkv_cache_fork(t->chunked, NULL, &copy);
        if (try_again(t, result)) result = tqkv_cache_fork(t->chunked, NULL, &copy);
    } else {
        stream s = stream_of_cache(t->chunked);
        s.call.largest = fuzz_byte(input);
        stream_rewind(&s);
        tqkv_cache_desc desc = t->desc;
        result = tqkv_cache_load(&desc, stream_read, &s, &copy);
        if (try_again(t, result)) {
            stream_rewind(&s);
            result = tqkv_cache_load(&desc, stream_read, &s, &copy);
        }
        stream_free(&s);
    }
    CHECK_RESULT(result, TQKV_OK);
    tqkv_cache_destroy(t->chunked);
    t->chunked = copy;
    t->copied = true;
}

static void operate(fuzz_input *input, twins *t)
{
    static void (*const operations[16])(fuzz_input *, twins *) = {
        append, append, append,        append,      append,    append,  append, append,
        attend, attend, truncate_both, remove_both, keep_both, replace, append, replace};
    const uint8_t operation = fuzz_byte(input);
    t->counter.calls = 0;
    t->counter.fail_at = operation >= 192 ? 1 + operation / 16 % 4 : 0;
    operations[operation % 16](input, t);
    t->counter.fail_at = 0;
    (void)check_same(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    test_failure_aborts = true;
    fuzz_input input = {bytes, size};
    twins t;
    if (!set_up(&input, &t)) return 0;
    for (int i = 0; i < MAX_OPERATIONS && input.left; i++) operate(&input, &t);
    close_model(&t.model);
    tqkv_cache_destroy(t.chunked);
    tqkv_cache_destroy(t.single);
    CHECK_NO_LEAK(&t.counter);
    return 0;
}

/* The model of a cache's histories: a description at random, every position that was appended, what the cache must have
 * learned from them, and what edits and copies leave of that. */
#ifndef TQKV_TESTS_CACHE_MODEL_H
#define TQKV_TESTS_CACHE_MODEL_H
#include "fuzz.h"
#include "tests/counting.h"

enum { MAX_OPERATIONS = 40, MAX_QUERIES = 5, MAX_HEADS = 8, MAX_POSITIONS = 2 * 150 + 10, TILE = 64 };

/* The model's stores: codes, the halves of exact ends, and halves as they came, which a cache learns from. If the keys
   are the values, both have them. */
enum { KEYS, VALUES, TAIL, STREAMS, HALVES = STREAMS, RAW = HALVES + 2, STORES = RAW + 2 };

/* Position p of the model is position base + p of the cache. */
typedef struct model {
    tqkv_cache_desc desc;
    tqkv_cache *cache;
    tqkv_store stores[STORES]; /* linear, all positions; some are zeros */
    int positions;             /* capacity of the model */
    int64_t base, first, end;
    int64_t below, from; /* the cache must still have halves of the positions below, and from there on */
    int appended;        /* by the last append: so many queries find their halves */
    counting counter;
    float sinks[MAX_HEADS];
    /* Of keys and of values, then the keys' and the tail's parts of the first one; or NULL. */
    float *centers[4], *scales[4];
    bool edits;  /* operations 8 to 15 remove, keep and fork */
    bool chunks; /* appends are often small, and all their positions attend */
    /* Of a cache that learns. */
    bool learning;
    int learn_from;             /* 0: never again */
    int64_t raw_below, raw_end; /* queries below the one read what is raw; it is there below the other */
    float *channels;            /* centre and scale that it has learned: [2][n_kv_heads][head_dim] */
} model;

static int n_heads(const model *m) { return m->desc.n_heads; }

static int key_dim(const model *m) { return m->desc.head_dim + m->desc.tail_dim; }

static int value_dim(const model *m) { return m->desc.value_dim ? m->desc.value_dim : m->desc.head_dim; }

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

/* Positions of exact ends. */
static int n_first(const model *m) { return (int)at_most(m->desc.exact_first, m->desc.capacity); }
static int n_last(const model *m) { return (int)at_most(m->desc.exact_last, m->desc.capacity); }

/* Of keys, values or tail. */
static int side_of(int store) { return store < HALVES ? store : (store - HALVES) % 2; }

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
    const uint8_t first = fuzz_byte(input);
    desc->exact_first = first < 136 ? first % 10 : first % (desc->capacity + 1);
    desc->exact_last = first % 8 ? fuzz_range(input, 0, desc->capacity + 9) : 0;
    if (desc->head_dim > 64 || !desc->exact_last || desc->exact_last % 4 == 3) return;
    desc->capacity = 150; /* more than the rings of so few newest halves hold */
    desc->exact_last = desc->exact_last % 4 ? 1 : 2 + desc->exact_last % 32;
}

/* Of how many positions a cache of this capacity learns at most. */
static int most_learnt(int capacity) { return capacity < 64 ? 16 : capacity / 4; }

/* Whether a cache can calibrate as this one does. */
static bool can_calibrate(const model *m, int capacity, bool ring)
{
    return !m->desc.calibrate || (capacity >= 16 && (!ring || m->desc.calibrate <= most_learnt(capacity)));
}

static void read_calibrate(fuzz_input *input, model *m)
{
    const int byte = fuzz_byte(input), calibrate = 16 + byte % 105, most = most_learnt(m->desc.capacity);
    if (m->desc.capacity < 16) return;
    m->desc.calibrate = m->desc.ring && calibrate > most ? most : calibrate;
    m->desc.pairs = test_no_pairs(byte % 3);
}

/* Rows have gaps, token by token or head by head. */
static tqkv_strides strides_of(int heads, int dim, bool by_head)
{
    enum { GAP = 16, MOST_TOKENS = 256 };
    const size_t token = by_head ? (size_t)dim : (size_t)(heads * dim + GAP),
                 head = by_head ? (size_t)(MOST_TOKENS * dim + GAP) : (size_t)dim;
    const tqkv_strides s = {token, head};
    return s;
}

static void set_strides(model *m, bool by_head)
{
    tqkv_cache_desc *d = &m->desc;
    d->strides.k = strides_of(d->n_kv_heads, key_dim(m), by_head);
    d->strides.v = strides_of(d->n_kv_heads, value_dim(m), !by_head);
    d->strides.q = strides_of(n_heads(m), key_dim(m), by_head);
    d->strides.out = strides_of(n_heads(m), value_dim(m), !by_head);
}

/* Columns [from, from + dim) of n rows of k, or of its centre; NULL stays NULL. */
static float *part_of(const model *m, const float *rows, int from, int dim, int n)
{
    float *part = rows ? fuzz_new_floats(n, dim, 1) : NULL;
    for (int i = 0; part && i < n; i++)
        memcpy(part + i * dim, rows + i * key_dim(m) + from, (size_t)dim * sizeof *part);
    return part;
}

/* Centres, and scales, on which the last byte of an input decides. */
static void make_channels(const fuzz_input *input, model *m, uint8_t flags)
{
    const tqkv_cache_desc *desc = &m->desc;
    const uint8_t last = input->left ? input->at[input->left - 1] : 0;
    const int heads = desc->n_kv_heads, d = desc->head_dim;
    if (flags & 16) m->centers[0] = test_rows(1, DATA_GAUSSIAN, heads, key_dim(m));
    if (flags & 32 && !desc->shared) m->centers[1] = test_rows(2, DATA_STUDENT, heads, value_dim(m));
    if (last & 1) m->scales[0] = test_scales(last, heads, key_dim(m), 4.0);
    if (last & 2 && !desc->shared) m->scales[1] = test_scales(last + 1u, heads, value_dim(m), 4.0);
    for (int i = 0; i < 2; i++) {
        float **const channels = i ? m->scales : m->centers;
        channels[2] = part_of(m, channels[0], 0, d, heads);
        channels[3] = part_of(m, channels[0], d, desc->tail_dim, heads);
    }
}

static void read_desc(fuzz_input *input, model *m)
{
    static const int dims[2][8] = {{32, 64, 128, 256, 32, 64, 512, 1024}, {32, 64, 48, 96, 32, 80, 128, 160}};
    static const float scales[4] = {0.0f, 0.02f, 0.1f, -0.05f}, caps[4] = {0.0f, 5.0f, 30.0f, 0.5f};
    tqkv_cache_desc *desc = &m->desc;
    const uint8_t use = fuzz_byte(input), flags = fuzz_byte(input), numbers = fuzz_byte(input);
    const bool learns = use & 4;
    fuzz_choose_isa(use);
    desc->head_dim = dims[learns][numbers & 7];
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
    desc->non_causal = (use & 96) == 96;
    m->chunks = (use & 128) != 0;
    m->edits = (flags & 64) != 0;
    if (flags & 128) {
        desc->value_dim = dims[learns][(numbers + flags) & 7];
        desc->type = test_no_type(numbers % 3);
    }
    if (numbers & 128) read_latent(input, desc);
    if (flags & 8 && (numbers & 128 || m->chunks)) read_ends(input, desc);
    if (learns) read_calibrate(input, m);
    if (!learns || (numbers & 24) == 24) make_channels(input, m, flags);
    const bool given = m->centers[0] || m->centers[1] || m->scales[0] || m->scales[1];
    m->learning = desc->calibrate && !given;
    if (m->learning) m->learn_from = (int)at_most(desc->calibrate, most_learnt(desc->capacity));
    if (use & 8) set_strides(m, use & 16);
}

/* ---- The model's stores ---- */

static void add_store(model *m, int i, tqkv_format format, int dim)
{
    const int channels = i == TAIL ? 3 : side_of(i) == VALUES && !m->desc.shared ? 1 : 2;
    m->stores[i] = test_store(format, dim, m->desc.n_kv_heads, m->positions, false);
    if (i >= RAW) return;
    m->stores[i].center = m->centers[channels];
    m->stores[i].channel_scale = m->scales[channels];
    if (i >= HALVES) m->stores[i].rotation = TQKV_ROTATION_ON;
}

static void add_stores(model *m)
{
    const tqkv_attention view = test_view(m->cache, 0);
    const int dims[2] = {m->desc.head_dim, value_dim(m)};
    m->positions = 2 * m->desc.capacity + 10;
    add_store(m, KEYS, view.keys->format, dims[0]);
    add_store(m, VALUES, view.values->format, dims[1]);
    if (m->desc.tail_dim) add_store(m, TAIL, view.tail->format, m->desc.tail_dim);
    for (int side = 0; side < 2; side++) {
        if (m->desc.exact_first || m->desc.exact_last) add_store(m, HALVES + side, TQKV_F16, dims[side]);
        if (m->learning) add_store(m, RAW + side, TQKV_F16, dims[side]);
    }
}

static void set_up(fuzz_input *input, model *m)
{
    memset(m, 0, sizeof *m);
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
    if (m->learning) m->raw_below = m->raw_end = INT64_MAX;
    m->channels = fuzz_new_floats(2, m->desc.n_kv_heads, m->desc.head_dim);
    add_stores(m);
}

static void tear_down(model *m)
{
    tqkv_cache_destroy(m->cache);
    CHECK_NO_LEAK(&m->counter);
    for (int i = 0; i < 4; i++) free(m->centers[i]);
    for (int i = 0; i < 4; i++) free(m->scales[i]);
    for (int i = 0; i < STORES; i++) test_store_free(&m->stores[i]);
    free(m->channels);
}

static void encode(const tqkv_store *s, int head, int64_t at, const float *row)
{
    float scaled[REFERENCE_MAX_DIM], norms[REFERENCE_MAX_DIM / 128];
    const size_t n_norms = (size_t)reference_norms_per_row(s->format, s->head_dim);
    reference_encode_row(s, head, row, (uint8_t *)(uintptr_t)reference_codes_at(s, head, at), norms, scaled);
    if (n_norms) memcpy((void *)(uintptr_t)reference_norms_at(s, head, at), norms, n_norms * sizeof *norms);
}

/* Moves n positions of the model down. */
static void model_move(model *m, int64_t from, int64_t to, int64_t n)
{
    for (int i = 0; i < STORES * m->desc.n_kv_heads && n > 0; i++) {
        const tqkv_store *s = &m->stores[i % STORES];
        const int head = i / STORES;
        if (!s->codes) continue;
        const size_t norms = (size_t)reference_norms_per_row(s->format, s->head_dim) * sizeof(float);
        memmove((void *)(uintptr_t)reference_codes_at(s, head, to), reference_codes_at(s, head, from),
                (size_t)n * reference_row_bytes(s->format, s->head_dim));
        if (norms)
            memmove((void *)(uintptr_t)reference_norms_at(s, head, to), reference_norms_at(s, head, from),
                    (size_t)n * norms);
    }
}

/* ---- Learning ---- */

/* The first n positions as they came, as halves hold them: [n][n_kv_heads][head_dim]. Freed by the caller. */
static float *raw_rows(const model *m, int side, int64_t n)
{
    const tqkv_store *raw = &m->stores[RAW + side];
    const int heads = m->desc.n_kv_heads, d = raw->head_dim;
    float *rows = fuzz_new_floats((int)n, heads, d);
    for (int i = 0; i < n * heads * d; i++) {
        const uint8_t *half = reference_codes_at(raw, i / d % heads, i / d / heads) + i % d * 2;
        rows[i] = (float)reference_half_value((uint16_t)(half[0] | half[1] << 8));
    }
    return rows;
}

/* Whether |v - v'|^2 > |v|^2 / 4, of the values v of a position and those before. n: values of a position */
static bool is_new(const float *v, int n)
{
    double differs = 0.0, size = 0.0;
    for (int i = 0; i < n; i++) {
        const double x = (double)v[i];
        differs += pow(x - (double)v[i - n], 2.0);
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

/* Centre and scale that the first positions teach. */
static void find_channels(const model *m)
{
    const int heads = m->desc.n_kv_heads, d = m->desc.head_dim, step = heads * d;
    const int count = m->learn_from, half = count / 2, n_values = heads * value_dim(m);
    const int exact = (int)n_first(m);
    float *kept = raw_rows(m, KEYS, count), *values = raw_rows(m, VALUES, count), *scale = m->channels + step;
    float *used = fuzz_new_floats(count, heads, d);
    bool news[MAX_POSITIONS] = {false};
    int all = 0, from = 0, n = 0;
    for (int p = 0; p < count; p++) {
        news[p] = p == 0 || is_new(values + p * n_values, n_values);
        all += news[p];
        from += p >= exact && news[p];
    }
    const bool few = all < (half > 64 ? 64 : half > 16 ? half : 16);
    for (int p = (few ? count - exact : from) >= 16 ? exact : 0; p < count; p++)
        if (few || news[p]) memcpy(used + n++ * step, kept + p * step, (size_t)step * sizeof *used);
    tqkv_store shape = test_store(TQKV_I8, d, heads, 1, false);
    CHECK_RESULT(tqkv_calibrate(&shape, used, n, NULL, 0, 0, m->desc.pairs, m->channels, scale), TQKV_OK);
    for (int i = 0; few && i < step; i++) scale[i] = fmaxf(0.5f, fminf(scale[i], 1.5f));
    for (int h = 0; h < heads; h++) limit_scales(kept + h * d, count, step, d, m->channels + h * d, scale + h * d);
    test_store_free(&shape);
    free(kept);
    free(values);
    free(used);
}

/* Lets the keys, and values that are the keys, have these channels, or none. */
static void name_channels(model *m, const float *channels)
{
    for (int i = 0; i < RAW; i++) {
        if (i == TAIL || (side_of(i) == VALUES && !m->desc.shared)) continue;
        m->stores[i].center = channels;
        m->stores[i].channel_scale = channels ? channels + m->desc.n_kv_heads * m->desc.head_dim : NULL;
    }
}

/* Learns, and encodes n positions from halves of what came. */
static void learn(model *m, int64_t n)
{
    const int heads = m->desc.n_kv_heads;
    find_channels(m);
    name_channels(m, m->channels);
    for (int i = 0; i < RAW; i++) {
        const tqkv_store *s = &m->stores[i];
        if (i == TAIL || !s->codes) continue;
        float *rows = raw_rows(m, side_of(i), n);
        for (int row = 0; row < n * heads; row++) encode(s, row % heads, row / heads, rows + row * s->head_dim);
        free(rows);
    }
    m->below = at_most(n, n_first(m));
    m->from = 0;
    m->learning = false;
    m->raw_below = m->learn_from;
    m->raw_end = n;
    m->first = at_least(m->first, n - m->desc.capacity);
}

/* What taught the cache is taken back: as if it had never come. */
static void unlearn(model *m)
{
    name_channels(m, NULL);
    m->learning = true;
    m->raw_below = m->raw_end = INT64_MAX;
    m->first = 0;
}

/* A position changes or moves: from there on the cache no longer has what was raw when it learned. */
static void begin_edit(model *m, int64_t position)
{
    if (m->learning) return;
    if (position < m->raw_below) m->raw_below = 0;
    m->raw_end = m->raw_below ? at_most(m->raw_end, position) : 0;
}

/* A copy learns no more if the cache has, and else from no fewer positions. */
static void begin_copy(model *m)
{
    const int most = (int)at_most(m->desc.calibrate, most_learnt(m->desc.capacity));
    m->appended = 0;
    m->learn_from = m->learning ? (int)at_most(at_least(most, m->learn_from), m->desc.capacity) : 0;
    if (!m->learning) m->raw_end = 0;
    if (m->learning && m->end >= m->learn_from) learn(m, m->end);
}

/* How many of the newest n queries read what is raw. */
static int raw_queries(const model *m, int n)
{
    const int64_t end = m->base + m->end, below = m->raw_below;
    return !end || !below || end - n >= below ? 0 : end <= below ? n : (int)(below - (end - n));
}

#endif

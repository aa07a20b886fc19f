/* tqkv in a transformer: a cache for each layer, and a forward pass that appends to it and attends over it. The same
 * pass also runs on plain arrays (plain_cache.h), for comparison. Read layer_desc and attend_cached first. */
#ifndef TINYLM_SESSION_H
#define TINYLM_SESSION_H

#include "tinylm_options.h"

enum { BATCH = 128 }; /* positions that go through a layer together */

/* One conversation: the caches of every layer and the scratch of a forward pass. */
typedef struct session session;
struct session {
    model *m;
    const format_choice *keys, *values;
    int capacity, end;                    /* positions */
    tqkv_cache *caches[MAX_LAYERS];       /* if the formats are tqkv's */
    plain_cache plain[MAX_LAYERS];        /* if not */
    float *x, *h, *q, *k, *v, *wide, *up; /* [BATCH][...] */
    /* Appends k and v of n tokens to a layer's cache and puts the attention of q into `wide`: attend_cached, or what a
     * program sets in its place. `user` is that program's. */
    void (*attend)(session *s, int layer, int n);
    void *user;
    const int *depths; /* [n] of a tree of guesses: how far behind `end` each byte stands; NULL: one after the other */
};

static void check(tqkv_result result, const char *what)
{
    if (result != TQKV_OK) stop(what, tqkv_result_string(result));
}

static float *floats(size_t count)
{
    float *memory = (float *)calloc(count ? count : 1, sizeof *memory);
    if (!memory) stop("scratch", "out of memory");
    return memory;
}

/* ---- the caches ---- */

/* A layer with a sliding window needs a ring, not the whole context. The ring holds the window and one batch: the
 * window of the oldest query in a batch must be resident, also after a rollback of the batch. */
static tqkv_cache_desc layer_desc(session *s, const model_layer *shape)
{
    const tqkv_cache_desc plain = {.exact_first = s->m->exact_first, .exact_last = s->m->exact_last};
    tqkv_cache_desc desc = s->keys->is_preset ? tqkv_cache_preset(s->keys->preset) : plain;
    desc.head_dim = shape->head_dim;
    desc.n_kv_heads = shape->n_kv_heads;
    desc.n_heads = shape->n_heads;
    desc.ring = shape->window > 0;
    desc.capacity = desc.ring ? shape->window + BATCH : s->capacity;
    desc.window = shape->window;
    desc.softcap = shape->softcap;
    if (desc.ring) desc.exact_first = 0; /* a ring forgets the first positions */
    if (desc.ring && desc.calibrate > desc.capacity / 4)
        desc.calibrate = desc.capacity / 4; /* what one can learn from */
    desc.parallel = (tqkv_parallel){pool_run, &s->m->pool};
    desc.tag = s->m->tag; /* a snapshot of another model is refused */
    return desc;
}

/* The same with the formats of the session. */
static tqkv_cache_desc session_desc(session *s, const model_layer *shape)
{
    tqkv_cache_desc desc = layer_desc(s, shape);
    if (!s->keys->is_preset) {
        desc.key_format = s->keys->format;
        desc.value_format = s->values->format;
    } else if (shape->key_format) {
        desc.key_format = shape->key_format;
        desc.value_format = shape->value_format;
    }
    return desc;
}

/* tqkv takes two calls between the projections: append, attend. */
static void attend_cached(session *s, int layer, int n)
{
    if (is_tqkv(s->keys)) {
        check(tqkv_cache_append(s->caches[layer], s->k, s->v, n), "append");
        check(tqkv_cache_attend(s->caches[layer], s->q, n, s->wide), "attend");
    } else {
        plain_cache_append(&s->plain[layer], s->end, s->k, s->v, n);
        plain_cache_attend(&s->plain[layer], &s->m->pool, s->end, s->q, n, s->wide);
    }
}

static void session_scratch(session *s, model *m, int capacity)
{
    size_t widest = (size_t)m->hidden, model_width = (size_t)m->d_model;
    for (int i = 0; i < m->n_layers; i++) {
        size_t width = (size_t)m->layers[i].n_heads * (size_t)m->layers[i].head_dim;
        widest = width > widest ? width : widest;
    }
    memset(s, 0, sizeof *s);
    s->m = m;
    s->capacity = capacity;
    s->attend = attend_cached;
    float **arrays[] = {&s->x, &s->h, &s->q, &s->k, &s->v, &s->wide, &s->up};
    for (int i = 0; i < 7; i++) *arrays[i] = floats(BATCH * (i < 2 ? model_width : widest));
}

static inline void session_create(session *s, model *m, const format_choice *keys, const format_choice *values,
                                  int capacity)
{
    session_scratch(s, m, capacity);
    s->keys = keys;
    s->values = values;
    if (capacity > MAX_CONTEXT) stop("context", "longer than 4096 bytes");
    if (is_tqkv(keys) != is_tqkv(values))
        stop("formats", "the plain ones (f32, q8_0, q4_0, q8_0r, q4_0r) do not pair with tqkv's");
    if (keys != values && (keys->is_preset || values->is_preset))
        stop("formats", "a preset has both, of keys and values");
    for (int i = 0; i < m->n_layers; i++) {
        const model_layer *shape = &m->layers[i];
        if (is_tqkv(keys)) {
            tqkv_cache_desc desc = session_desc(s, shape);
            desc.key_center = shape->key_center;
            desc.key_scale = shape->key_scale;
            check(tqkv_cache_create(&desc, &s->caches[i]), "cache");
        } else {
            size_t row = (size_t)shape->n_kv_heads * (size_t)shape->head_dim;
            float *k = floats((size_t)capacity * row), *v = floats((size_t)capacity * row);
            s->plain[i] = (plain_cache){shape, k, v, keys->through, values->through, keys->rotated, values->rotated};
        }
    }
}

static void session_destroy(session *s)
{
    for (int i = 0; i < MAX_LAYERS; i++) {
        tqkv_cache_destroy(s->caches[i]);
        free(s->plain[i].keys);
        free(s->plain[i].values);
    }
    float *arrays[] = {s->x, s->h, s->q, s->k, s->v, s->wide, s->up};
    for (int i = 0; i < 7; i++) free(arrays[i]);
}

/* Removes the positions from `end` on. */
static inline void session_truncate(session *s, int end)
{
    for (int i = 0; i < s->m->n_layers && is_tqkv(s->keys); i++)
        check(tqkv_cache_truncate(s->caches[i], end), "truncate");
    s->end = end;
}

/* Codes and norms of a cache, without what it keeps beside them. */
static inline double coded_bytes(const tqkv_cache *cache)
{
    tqkv_attention view;
    check(tqkv_cache_view(cache, 0, &view), "view");
    const tqkv_store *keys = view.keys, *values = view.values;
    return (double)(tqkv_codes_size(keys) + tqkv_norms_size(keys) + tqkv_codes_size(values) + tqkv_norms_size(values));
}

/* Bytes of the caches of all layers. *bits, if given: bits a stored value, codes and norms. A plain cache counts with
 * the bits of its format and the capacity of the tqkv cache. */
static inline double session_bytes(session *s, double *bits)
{
    double bytes = 0, coded = 0, values = 0;
    for (int i = 0; i < s->m->n_layers; i++) {
        tqkv_cache_desc desc = layer_desc(s, &s->m->layers[i]);
        const double stream = (double)desc.capacity * desc.n_kv_heads * desc.head_dim;
        const double plain = stream * (s->keys->bits + s->values->bits) / 8;
        values += 2 * stream;
        bytes += is_tqkv(s->keys) ? (double)tqkv_cache_bytes(s->caches[i]) : plain;
        coded += is_tqkv(s->keys) ? coded_bytes(s->caches[i]) : plain;
    }
    if (bits) *bits = 8 * coded / values;
    return bytes;
}

/* ---- the forward pass ---- */

/* The rotary embedding of n tokens at their positions. heads: [n][n_heads][head_dim] */
static void rope_tokens(const session *s, float *heads, int n, int n_heads, int head_dim)
{
    if (!s->depths) rope(s->m, heads, n, n_heads, head_dim, s->end);
    for (int i = 0; s->depths && i < n; i++)
        rope(s->m, heads + i * n_heads * head_dim, 1, n_heads, head_dim, s->end + s->depths[i]);
}

/* Adds one layer's attention to s->x. */
static void attention(session *s, int index, int n)
{
    model *m = s->m;
    const model_layer *layer = &m->layers[index];
    int d = layer->head_dim, n_heads = layer->n_heads, n_kv_heads = layer->n_kv_heads;
    rms_norm(m, s->x, layer->norm_attention, n, m->d_model, s->h);
    linear_apply(m, &layer->q, s->h, n, s->q);
    linear_apply(m, &layer->k, s->h, n, s->k);
    linear_apply(m, &layer->v, s->h, n, s->v);
    if (layer->qk_norm) {
        rms_norm(m, s->q, layer->q_norm, n * n_heads, d, s->q);
        rms_norm(m, s->k, layer->k_norm, n * n_kv_heads, d, s->k);
    }
    rope_tokens(s, s->q, n, n_heads, d);
    if (m->bias_before_rotary) add_to_rows(s->k, layer->key_bias, n, n_kv_heads * d);
    rope_tokens(s, s->k, n, n_kv_heads, d);
    if (!m->bias_before_rotary) add_to_rows(s->k, layer->key_bias, n, n_kv_heads * d);
    s->attend(s, index, n);
    linear_apply(m, &layer->o, s->wide, n, s->h);
    for (int i = 0; i < n * m->d_model; i++) s->x[i] += s->h[i];
}

static void mlp(session *s, int index, int n)
{
    model *m = s->m;
    const model_layer *layer = &m->layers[index];
    rms_norm(m, s->x, layer->norm_mlp, n, m->d_model, s->h);
    linear_apply(m, &layer->gate, s->h, n, s->wide);
    linear_apply(m, &layer->up, s->h, n, s->up);
    silu_multiply(s->wide, s->up, n * m->hidden);
    linear_apply(m, &layer->down, s->wide, n, s->h);
    for (int i = 0; i < n * m->d_model; i++) s->x[i] += s->h[i];
}

/* Appends n bytes to the conversation and gives the logits after each: logits[n][VOCABULARY]. BATCH positions at a time
 * go through all layers: scratch and rings have room for that many. */
static void forward(session *s, const unsigned char *bytes, int n, float *logits)
{
    model *m = s->m;
    const int most = m->batch ? m->batch : BATCH;
    if (n > s->capacity - s->end) stop("context", "full");
    for (int done = 0, batch; done < n; done += batch) {
        batch = n - done < most ? n - done : most;
        for (int i = 0; i < batch; i++)
            memcpy(s->x + i * m->d_model, m->embedding + bytes[done + i] * m->d_model,
                   sizeof(float) * (size_t)m->d_model);
        for (int layer = 0; layer < m->n_layers; layer++) {
            attention(s, layer, batch);
            mlp(s, layer, batch);
        }
        rms_norm(m, s->x, m->norm_out, batch, m->d_model, s->h);
        linear_apply(m, &m->logits, s->h, batch, logits + done * VOCABULARY);
        s->end += batch;
    }
}

/* The same without the logits. */
static inline void prefill(session *s, const unsigned char *bytes, int n)
{
    float *logits = floats((size_t)n * VOCABULARY);
    forward(s, bytes, n, logits);
    free(logits);
}

#endif

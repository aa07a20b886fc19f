/* The library as measure.py uses it: caches by names and numbers, so that no struct is written down a second time in
 * another language. `library.py` declares these functions to ctypes.
 *
 * Each returns NULL where it succeeds, else why not: a text that holds until the thread's next call. */
#include <stdio.h>

static _Thread_local char models_reason[512];

/* Which argument the library refused, and why. */
#define TQKV_EXPLAIN(text) snprintf(models_reason, sizeof models_reason, "%s", text)
#define TQKV_IMPLEMENTATION
#include "tqkv.h"

#include "examples/plan.h"
#include "examples/profile.h"

static const char *models_failed(tqkv_result result)
{
    if (result == TQKV_OK) return NULL;
    return models_reason[0] ? models_reason : tqkv_result_string(result);
}

static tqkv_format models_format(const char *name)
{
    const tqkv_format format = tqkv_format_from_name(name);
    if (format == TQKV_FORMAT_DEFAULT) snprintf(models_reason, sizeof models_reason, "%s is no format", name);
    return format;
}

/* The formats of both streams, or a preset's with all that it brings: its name in `keys`, and an empty `values`. */
static tqkv_cache_desc models_desc(const char *keys, const char *values)
{
    static const char *const presets[] = {"safe", "small", "tiny"};
    tqkv_cache_desc desc;
    for (int i = 0; i < 3; i++)
        if (!strcmp(keys, presets[i]) && !*values) return tqkv_cache_preset((tqkv_preset)i);
    memset(&desc, 0, sizeof desc);
    desc.key_format = models_format(keys);
    desc.value_format = models_format(values);
    return desc;
}

/* window: 0 = none; scale: of the scores. exact: positions at both ends that are kept as halves; calibrate: those from
   which the cache learns; -1: as the preset says, else 0. halves: 1 keeps the keys as halves, 2 the values. center,
   channel_scale: [n_kv_heads][head_dim], of the keys, or NULL; with one of them the cache learns nothing. */
const char *models_cache_create(const char *keys, const char *values, int head_dim, int value_dim, int n_kv_heads,
                                int n_heads, int capacity, int window, float scale, int exact_first, int exact_last,
                                int calibrate, int halves, const float *center, const float *channel_scale,
                                tqkv_cache **out)
{
    models_reason[0] = '\0';
    tqkv_cache_desc desc = models_desc(keys, values);
    *out = NULL;
    if (models_reason[0]) return models_reason;
    desc.head_dim = head_dim;
    desc.n_kv_heads = n_kv_heads;
    desc.n_heads = n_heads;
    desc.value_dim = value_dim;
    desc.window = window;
    desc.scale = scale;
    desc.capacity = capacity;
    if (exact_first >= 0) desc.exact_first = exact_first;
    if (exact_last >= 0) desc.exact_last = exact_last;
    /* A text shorter than the ends of a preset. */
    if (capacity < desc.exact_first + desc.exact_last) desc.capacity = desc.exact_first + desc.exact_last;
    if (calibrate >= 0) desc.calibrate = calibrate;
    if (halves & 1) desc.key_format = TQKV_F16;
    if (halves & 2) desc.value_format = TQKV_F16;
    desc.key_center = center;
    desc.key_scale = channel_scale;
    return models_failed(tqkv_cache_create(&desc, out));
}

void models_cache_destroy(tqkv_cache *cache) { tqkv_cache_destroy(cache); }

/* Appends n positions and attends to what is there by then. k: [n][n_kv_heads][head_dim], v: with value_dim;
   q: [n][n_heads][head_dim], out: with value_dim */
const char *models_cache_run(tqkv_cache *cache, const float *k, const float *v, const float *q, int n, float *out)
{
    models_reason[0] = '\0';
    tqkv_result result = tqkv_cache_append(cache, k, v, n);
    if (result == TQKV_OK) result = tqkv_cache_attend(cache, q, n, out);
    return models_failed(result);
}

/* Bits a value of the codes and norms, without what is kept as halves beside them. */
double models_cache_bits(const tqkv_cache *cache)
{
    tqkv_attention view;
    if (tqkv_cache_view(cache, 0, &view) != TQKV_OK) return 0;
    const tqkv_store *stores[2] = {view.keys, view.values};
    double bytes = 0, values = 0;
    for (int i = 0; i < 2; i++) {
        bytes += (double)tqkv_codes_size(stores[i]) + (double)tqkv_norms_size(stores[i]);
        values += (double)stores[i]->n_kv_heads * stores[i]->capacity * stores[i]->head_dim;
    }
    return 8 * bytes / values;
}

double models_cache_bytes(const tqkv_cache *cache) { return (double)tqkv_cache_bytes(cache); }

/* Centre and scale of the channels. keys: [n][n_kv_heads][head_dim], queries: [n][n_heads][head_dim]; center,
   channel_scale: [n_kv_heads][head_dim] */
const char *models_learn(const float *keys, const float *queries, int n, int n_kv_heads, int n_heads, int head_dim,
                         float *center, float *channel_scale)
{
    models_reason[0] = '\0';
    tqkv_store shape;
    memset(&shape, 0, sizeof shape);
    shape.format = TQKV_F16;
    shape.head_dim = head_dim;
    shape.n_kv_heads = n_kv_heads;
    shape.capacity = 1;
    return models_failed(tqkv_calibrate(&shape, keys, n, queries, n_heads, n, TQKV_PAIRS_NONE, center, channel_scale));
}

double models_format_bits(const char *format, int head_dim)
{
    return plan_bits(tqkv_format_from_name(format), head_dim);
}

/* What the format adds to rows, against what differs between positions: the mean over the heads of tqkv_measure's
   error. rows: [n][n_kv_heads][head_dim]; center, channel_scale: [n_kv_heads][head_dim], or NULL */
const char *models_error(const char *format, const float *rows, int n, int n_kv_heads, int head_dim,
                         const float *center, const float *channel_scale, double *error)
{
    models_reason[0] = '\0';
    tqkv_store shape;
    memset(&shape, 0, sizeof shape);
    shape.format = tqkv_format_from_name(format);
    shape.head_dim = head_dim;
    shape.n_kv_heads = n_kv_heads;
    shape.capacity = 1;
    shape.center = center;
    shape.channel_scale = channel_scale;
    tqkv_quality *heads = (tqkv_quality *)calloc((size_t)n_kv_heads, sizeof *heads);
    if (!heads) return tqkv_result_string(TQKV_OUT_OF_MEMORY);
    const tqkv_result result = tqkv_measure(&shape, rows, n, heads);
    *error = 0;
    for (int h = 0; h < n_kv_heads; h++) *error += heads[h].error / n_kv_heads;
    free(heads);
    return models_failed(result);
}

/* The name of a format that plans have, by bits; NULL behind the last. */
const char *models_plan_format(int index)
{
    return index < PLAN_FORMATS ? tqkv_format_name(plan_formats[index]) : NULL;
}

/* losses, bytes: [n][formats of plans]; chosen: [n], indexes of formats. 0: even the shortest take more than `room`. */
int models_plan(const double *losses, const double *bytes, int n, double room, int *chosen)
{
    plan_stream *streams = (plan_stream *)calloc((size_t)n, sizeof *streams);
    if (!streams) return 0;
    for (int i = 0; i < n; i++) {
        memcpy(streams[i].loss, losses + i * PLAN_FORMATS, sizeof streams[i].loss);
        memcpy(streams[i].bytes, bytes + i * PLAN_FORMATS, sizeof streams[i].bytes);
    }
    const bool fits = plan_choose(streams, n, room);
    for (int i = 0; i < n; i++) chosen[i] = streams[i].chosen;
    free(streams);
    return fits;
}

/* What keys and values of a layer take, as plan_cache has them. keys, values: [formats of plans] */
const char *models_plan_bytes(int head_dim, int value_dim, int n_kv_heads, int context, int window, int chunk,
                              double *keys, double *values)
{
    models_reason[0] = '\0';
    plan_stream streams[2];
    const tqkv_cache_desc desc = plan_cache(head_dim, value_dim, n_kv_heads, context, window, chunk);
    if (!plan_measure_bytes(&desc, streams)) return models_failed(TQKV_OUT_OF_MEMORY);
    memcpy(keys, streams[0].bytes, sizeof streams[0].bytes);
    memcpy(values, streams[1].bytes, sizeof streams[1].bytes);
    return NULL;
}

/* Of a profile's bytes. */
uint64_t models_hash(const void *bytes, size_t n) { return XXH3_64bits(bytes, n); }

/* Opens a profile; *out is to be closed. */
const char *models_profile_open(const char *path, profile **out)
{
    models_reason[0] = '\0';
    *out = (profile *)calloc(1, sizeof **out);
    if (!*out) return tqkv_result_string(TQKV_OUT_OF_MEMORY);
    const tqkv_result result = profile_load(path, *out);
    if (result != TQKV_OK) {
        free(*out);
        *out = NULL;
    }
    return models_failed(result);
}

int models_profile_layers(const profile *p) { return p->n_layers; }

/* 1, or 0 where there is no such layer of that shape; then nothing is written. center, channel_scale: as
   models_learn's. */
int models_profile_layer(const profile *p, int index, int n_kv_heads, int head_dim, float *center, float *channel_scale)
{
    if (index < 0 || index >= p->n_layers) return 0;
    const profile_layer *layer = &p->layers[index];
    const size_t size = sizeof(float) * (size_t)n_kv_heads * (size_t)head_dim;
    if (layer->n_kv_heads != n_kv_heads || layer->head_dim != head_dim) return 0;
    memcpy(center, layer->center, size);
    memcpy(channel_scale, layer->channel_scale, size);
    return 1;
}

/* The name of a layer's format of keys, or of values; NULL without a plan. */
const char *models_profile_format(const profile *p, int index, int is_key)
{
    const tqkv_format format = is_key ? p->layers[index].key_format : p->layers[index].value_format;
    return format == TQKV_FORMAT_DEFAULT ? NULL : tqkv_format_name(format);
}

void models_profile_close(profile *p)
{
    profile_free(p);
    free(p);
}

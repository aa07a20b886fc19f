/* The library as measure.py uses it: caches by names and numbers, so that no struct is written down a second time in another
 * language. `library.py` declares these functions to ctypes.
 *
 * Each returns NULL where it succeeds, else why not: a text that holds until the thread's next call. */
#include <stdio.h>

static _Thread_local char models_reason[512];

/* Which argument the library refused, and why. */
#define TQKV_EXPLAIN(text) snprintf(models_reason, sizeof models_reason, "%s", text)
#define TQKV_IMPLEMENTATION
#include "tqkv.h"

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

/* window: 0 = none; scale: of the scores. exact: positions at both ends that are kept as halves. */
const char *models_cache_create(const char *keys, const char *values, int head_dim, int value_dim, int n_kv_heads,
                                int n_heads, int capacity, int window, float scale, int exact_first, int exact_last,
                                int integers, tqkv_cache **out)
{
    models_reason[0] = '\0';
    tqkv_cache_desc desc = {.head_dim = head_dim, .n_kv_heads = n_kv_heads, .n_heads = n_heads, .capacity = capacity};
    *out = NULL;
    desc.key_format = models_format(keys);
    desc.value_format = models_format(values);
    if (models_reason[0]) return models_reason;
    desc.value_dim = value_dim;
    desc.window = window;
    desc.scale = scale;
    desc.exact_first = exact_first;
    desc.exact_last = exact_last;
    desc.arithmetic = integers ? TQKV_INTEGER : TQKV_FLOAT;
    return models_failed(tqkv_cache_create(&desc, out));
}

void models_cache_destroy(tqkv_cache *cache) { tqkv_cache_destroy(cache); }

/* Before the first positions; center: [n_kv_heads][head_dim], of the keys. */
const char *models_cache_learned(tqkv_cache *cache, const float *center)
{
    models_reason[0] = '\0';
    return models_failed(tqkv_cache_set_center(cache, center, NULL));
}

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
    const tqkv_store *stores[2] = {tqkv_cache_keys(cache), tqkv_cache_values(cache)};
    double bytes = 0, values = 0;
    for (int i = 0; i < 2; i++) {
        bytes += (double)tqkv_codes_size(stores[i]) + (double)tqkv_norms_size(stores[i]);
        values += (double)stores[i]->n_kv_heads * stores[i]->capacity * stores[i]->head_dim;
    }
    return 8 * bytes / values;
}

double models_cache_bytes(const tqkv_cache *cache) { return (double)tqkv_cache_bytes(cache); }

/* Centres of the channels. rows: [n][n_kv_heads][head_dim]; center: [n_kv_heads][head_dim] */
const char *models_learn(const float *rows, int n, int n_kv_heads, int head_dim, float *center)
{
    models_reason[0] = '\0';
    const tqkv_store shape = {.format = TQKV_F16, .head_dim = head_dim, .n_kv_heads = n_kv_heads, .capacity = 1};
    return models_failed(tqkv_mean(&shape, rows, n, center));
}

/* Of a profile's bytes. */
uint64_t models_hash(const void *bytes, size_t n) { return XXH3_64bits(bytes, n); }

/* Caches filled with test data, and the attention they compute. */
#ifndef TQKV_TESTS_CACHE_FIXTURE_H
#define TQKV_TESTS_CACHE_FIXTURE_H

#include "counting.h"
#include "data.h"
#include "reference.h"
#include "runner.h"

enum { CACHE_HEADS = 2, CACHE_GROUP = 2 };

typedef struct cache_row {
    tqkv_format key_format, value_format;
    int head_dim, capacity;
    bool ring;
    int n_tokens; /* to append */
    int truncate; /* the end to truncate to after that; -1: none */
} cache_row;

static const float cache_sinks[CACHE_HEADS * CACHE_GROUP] = {0.5f, -1.0f, 2.0f, 0.0f};

static inline tqkv_cache_desc cache_desc(const cache_row *row, counting *counter)
{
    tqkv_cache_desc desc = test_cache_desc(row->head_dim, CACHE_HEADS, CACHE_HEADS * CACHE_GROUP, row->capacity);
    desc.key_format = row->key_format;
    desc.value_format = row->value_format;
    desc.ring = row->ring;
    if (counter) desc.allocator = counting_allocator(counter);
    return desc;
}

/* A cache of that desc with centres and scales. */
static inline tqkv_cache *cache_given(const tqkv_cache_desc *desc, const float *key_center, const float *key_scale,
                                      const float *value_center, const float *value_scale)
{
    tqkv_cache_desc with = *desc;
    tqkv_cache *cache = NULL;
    with.key_center = key_center;
    with.key_scale = key_scale;
    with.value_center = value_center;
    with.value_scale = value_scale;
    CHECK_RESULT(tqkv_cache_create(&with, &cache), TQKV_OK);
    return cache;
}

/* [n][CACHE_HEADS][head_dim], freed by the caller. A larger n gives the same rows first. */
static inline float *cache_data(uint64_t seed, int n, int head_dim)
{
    return test_rows(seed, DATA_STUDENT, n * CACHE_HEADS, head_dim);
}

static inline void cache_append_seed(tqkv_cache *cache, uint64_t seed, int n, int head_dim)
{
    float *keys = cache_data(seed, n, head_dim), *values = cache_data(seed + 100, n, head_dim);
    CHECK_RESULT(tqkv_cache_append(cache, keys, values, n), TQKV_OK);
    free(keys);
    free(values);
}

/* NULL and a failed check if the cache cannot be made. */
static inline tqkv_cache *cache_make(const cache_row *row, const tqkv_cache_desc *desc)
{
    tqkv_cache *cache = NULL;
    CHECK_RESULT(tqkv_cache_create(desc, &cache), TQKV_OK);
    if (!cache) return NULL;
    if (row->n_tokens) cache_append_seed(cache, 21, row->n_tokens, row->head_dim);
    if (row->truncate >= 0) CHECK_RESULT(tqkv_cache_truncate(cache, row->truncate), TQKV_OK);
    return cache;
}

/* The attention that a cache with this desc computes over its own stores. */
static inline tqkv_attention cache_attention(const tqkv_cache *cache, const tqkv_cache_desc *desc, int n_queries,
                                             int kv_len)
{
    tqkv_attention a;
    memset(&a, 0, sizeof a);
    a.keys = test_keys(cache);
    a.values = test_values(cache);
    a.n_heads = desc->n_heads;
    a.n_queries = n_queries;
    a.end = tqkv_cache_end(cache);
    a.kv_len = kv_len;
    a.window = desc->window;
    a.scale = desc->scale;
    a.softcap = desc->softcap;
    a.sinks = desc->sinks;
    return a;
}

#endif

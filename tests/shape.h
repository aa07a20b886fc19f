/* Sizes of one row, by the public functions. */
#ifndef SHAPE_H
#define SHAPE_H

#include "tqkv.h"
#include <string.h>

/* A store of one position of one head. */
static inline tqkv_store test_shape(tqkv_format format, int head_dim)
{
    tqkv_store s;
    memset(&s, 0, sizeof s);
    s.format = format;
    s.head_dim = head_dim;
    s.n_kv_heads = s.capacity = 1;
    return s;
}

/* Bytes of a row's codes; 0 for an unsupported format or head_dim. */
static inline size_t test_row_bytes(tqkv_format format, int head_dim)
{
    const tqkv_store s = test_shape(format, head_dim);
    return tqkv_codes_size(&s);
}

static inline int test_norms_per_row(tqkv_format format, int head_dim)
{
    const tqkv_store s = test_shape(format, head_dim);
    return (int)(tqkv_norms_size(&s) / sizeof(float));
}

/* Token t goes to slot slots[t] of a pool, a token with slot -1 nowhere: pages of one position. */
static inline tqkv_result test_encode_slots(const tqkv_store *pool, const void *src, int n_tokens, const int32_t *slots)
{
    if (!pool) return tqkv_encode(pool, src, n_tokens, 0);
    tqkv_store s = *pool;
    s.ring = false;
    s.pages = slots;
    s.n_pages = n_tokens;
    s.page_size = 1;
    return tqkv_encode(&s, src, n_tokens, 0);
}

/* Attention without options over a store of keys and one of values. */
static inline tqkv_attention test_attention(const tqkv_store *keys, const tqkv_store *values, int n_heads,
                                            int n_queries, int64_t end)
{
    tqkv_attention a;
    memset(&a, 0, sizeof a);
    a.keys = keys;
    a.values = values;
    a.n_heads = n_heads;
    a.n_queries = n_queries;
    a.end = end;
    return a;
}

/* A cache without options; of zeros: what takes any snapshot, or a copy as the cache is. */
static inline tqkv_cache_desc test_cache_desc(int head_dim, int n_kv_heads, int n_heads, int capacity)
{
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.head_dim = head_dim;
    desc.n_kv_heads = n_kv_heads;
    desc.n_heads = n_heads;
    desc.capacity = capacity;
    return desc;
}

/* What a cache attends to with n queries; zeros if it refuses. */
static inline tqkv_attention test_view(const tqkv_cache *c, int n)
{
    tqkv_attention view;
    memset(&view, 0, sizeof view);
    (void)tqkv_cache_view(c, n, &view);
    return view;
}

/* The stores of a cache's codes; tail: NULL without one. */
static inline const tqkv_store *test_keys(const tqkv_cache *c) { return test_view(c, 0).keys; }
static inline const tqkv_store *test_values(const tqkv_cache *c) { return test_view(c, 0).values; }
static inline const tqkv_store *test_tail(const tqkv_cache *c) { return test_view(c, 0).tail; }

/* The oldest resident position. */
static inline int64_t test_first(const tqkv_cache *c)
{
    const tqkv_attention view = test_view(c, 0);
    return view.end - view.kv_len;
}

/* Attends as a cache does, with the list and the tree of `some`. */
static inline tqkv_result test_attend_some(const tqkv_cache *c, const tqkv_attention *some, const void *q, int n,
                                           void *out)
{
    tqkv_attention a;
    const tqkv_result r = tqkv_cache_view(c, n, &a);
    if (r != TQKV_OK) return r;
    a.list = some->list;
    a.tree = some->tree;
    return tqkv_attend(&a, q, out);
}

#endif

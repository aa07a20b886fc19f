/* tqkv in a ggml graph: the KV cache and the attention of a layer as two nodes, on ggml's public API (ggml_custom_4d).
 *
 * ggml calls a node on all its threads at once; tqkv_team hands them the tasks. Strides of tensors become tqkv_strides, so
 * views need no ggml_cont. A node cannot fail: kv_layer.result has the first failure, to be looked at after the graph has
 * been computed. layer.c beside this file is the test and the benchmark. */
#ifndef TQKV_GGML_H
#define TQKV_GGML_H

#include "tqkv.h"

#include <ggml.h>
#include <stdlib.h>
#include <string.h>

enum { KV_MAX_SEQUENCES = 64, KV_MAX_TOKENS = 4096 };

/* The sequences of one graph: their tokens follow each other in k, v, q and out. One for all layers. */
typedef struct kv_batch {
    int page_size, n_tokens, n_sequences;
    struct {
        const int32_t *pages; /* [n_pages] */
        int n_pages, first, n_tokens;
        int64_t end;
    } sequences[KV_MAX_SEQUENCES];
    int32_t slots[KV_MAX_TOKENS]; /* of each token */
} kv_batch;

/* A layer's codes and norms: one pool for all sequences. */
typedef struct kv_layer {
    tqkv_store keys, values;
    const kv_batch *batch;
    tqkv_team *team;     /* of all layers */
    tqkv_attention call; /* scale, softcap, window, sinks, arithmetic: what is the same in each call */
    tqkv_result result;
} kv_layer;

/* Adds n_tokens that follow `position` positions of the sequence with these pages; false if there is no room. */
static inline bool kv_batch_add(kv_batch *b, const int32_t *pages, int n_pages, int64_t position, int n_tokens)
{
    const int64_t end = position + n_tokens;
    if (b->n_sequences == KV_MAX_SEQUENCES || b->n_tokens > KV_MAX_TOKENS - n_tokens ||
        end > (int64_t)n_pages * b->page_size)
        return false;
    const int i = b->n_sequences++;
    b->sequences[i].pages = pages;
    b->sequences[i].n_pages = n_pages;
    b->sequences[i].first = b->n_tokens;
    b->sequences[i].n_tokens = n_tokens;
    b->sequences[i].end = end;
    for (int64_t p = position; p < end; p++)
        b->slots[b->n_tokens++] = pages[p / b->page_size] * b->page_size + (int32_t)(p % b->page_size);
    return true;
}

static inline void kv_layer_close(kv_layer *l)
{
    free(l->keys.codes);
    free(l->keys.norms);
    free(l->values.codes);
    free(l->values.norms);
}

static inline bool kv_store_open(tqkv_store *s, tqkv_format format, int head_dim, int n_kv_heads, int capacity)
{
    memset(s, 0, sizeof *s);
    s->format = format;
    s->head_dim = head_dim;
    s->n_kv_heads = n_kv_heads;
    s->capacity = capacity;
    s->codes_size = tqkv_codes_size(s);
    s->norms_size = tqkv_norms_size(s);
    s->codes = s->codes_size ? malloc(s->codes_size) : NULL;
    s->norms = s->norms_size ? (float *)malloc(s->norms_size) : NULL;
    return s->codes && (s->norms || !s->norms_size);
}

/* capacity: slots, of all sequences. False: no such shape, or no memory. */
static inline bool kv_layer_open(kv_layer *l, tqkv_format keys, tqkv_format values, int head_dim, int n_kv_heads,
                                 int capacity, const kv_batch *batch, tqkv_team *team)
{
    memset(l, 0, sizeof *l);
    l->batch = batch;
    l->team = team;
    l->call.parallel = tqkv_team_parallel(team);
    l->call.allocator = tqkv_team_allocator(team);
    if (kv_store_open(&l->keys, keys, head_dim, n_kv_heads, capacity) &
        kv_store_open(&l->values, values, head_dim, n_kv_heads, capacity))
        return true;
    kv_layer_close(l);
    return false;
}

static inline tqkv_type kv_type(const struct ggml_tensor *t)
{
    return t->type == GGML_TYPE_F16 ? TQKV_TYPE_F16 : t->type == GGML_TYPE_BF16 ? TQKV_TYPE_BF16 : TQKV_TYPE_F32;
}

/* Of a tensor [tokens][heads][dim], in any layout whose rows are in one piece. */
static inline tqkv_strides kv_strides(const struct ggml_tensor *t)
{
    const tqkv_strides s = {t->nb[2] / t->nb[0], t->nb[1] / t->nb[0]};
    return s;
}

static inline bool kv_rows_whole(const struct ggml_tensor *t)
{
    return t->nb[0] == ggml_type_size(t->type) && t->nb[1] % t->nb[0] == 0 && t->nb[2] % t->nb[0] == 0 &&
           (t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_BF16);
}

static inline tqkv_result kv_write_rows(const kv_layer *l, const tqkv_store *store, const struct ggml_tensor *rows)
{
    tqkv_store s = *store;
    s.type = kv_type(rows);
    s.strides = kv_strides(rows);
    s.parallel = l->call.parallel;
    return tqkv_encode_slots(&s, rows->data, (int)rows->ne[2], l->batch->slots);
}

static inline void kv_write_node(struct ggml_tensor *dst, int thread, int n_threads, void *user)
{
    kv_layer *l = (kv_layer *)user;
    if (!tqkv_team_begin(l->team, thread, n_threads)) return;
    tqkv_result r = kv_write_rows(l, &l->keys, dst->src[0]);
    if (r == TQKV_OK) r = kv_write_rows(l, &l->values, dst->src[1]);
    if (l->result == TQKV_OK) l->result = r;
    tqkv_team_end(l->team);
}

/* All sequences in one call; tokens of a sequence attend to all before them. */
static inline tqkv_result kv_attend_all(const kv_layer *l, const struct ggml_tensor *q, struct ggml_tensor *out)
{
    tqkv_attention items[KV_MAX_SEQUENCES];
    tqkv_store stores[2 * KV_MAX_SEQUENCES];
    const void *queries[KV_MAX_SEQUENCES];
    void *outs[KV_MAX_SEQUENCES];
    const kv_batch *b = l->batch;
    for (int i = 0; i < b->n_sequences; i++) {
        tqkv_store *keys = &stores[2 * i], *values = &stores[2 * i + 1];
        *keys = l->keys;
        *values = l->values;
        keys->pages = values->pages = b->sequences[i].pages;
        keys->n_pages = values->n_pages = b->sequences[i].n_pages;
        keys->page_size = values->page_size = b->page_size;
        items[i] = l->call;
        items[i].keys = keys;
        items[i].values = values;
        items[i].n_heads = (int)q->ne[1];
        items[i].n_queries = b->sequences[i].n_tokens;
        items[i].end = b->sequences[i].end;
        items[i].query_type = kv_type(q);
        items[i].query_strides = kv_strides(q);
        items[i].output_strides = kv_strides(out);
        queries[i] = (const char *)q->data + (size_t)b->sequences[i].first * q->nb[2];
        outs[i] = (char *)out->data + (size_t)b->sequences[i].first * out->nb[2];
    }
    return tqkv_attend_batch(items, b->n_sequences, queries, outs);
}

static inline void kv_attend_node(struct ggml_tensor *dst, int thread, int n_threads, void *user)
{
    kv_layer *l = (kv_layer *)user;
    if (!tqkv_team_begin(l->team, thread, n_threads)) return;
    const tqkv_result r = kv_attend_all(l, dst->src[0], dst);
    if (l->result == TQKV_OK) l->result = r;
    tqkv_team_end(l->team);
}

/* The node that writes k and v, [tokens][kv heads][dim]; give it to kv_attend. NULL: a layout that tqkv cannot read. */
static inline struct ggml_tensor *kv_write(struct ggml_context *context, kv_layer *l, struct ggml_tensor *k,
                                           struct ggml_tensor *v)
{
    struct ggml_tensor *sources[2] = {k, v};
    if (!kv_rows_whole(k) || !kv_rows_whole(v)) return NULL;
    return ggml_custom_4d(context, GGML_TYPE_F32, 1, 1, 1, 1, sources, 2, kv_write_node, GGML_N_TASKS_MAX, l);
}

/* Attention after `written`; q: [tokens][heads][dim], the result: [tokens][heads][dim of the values], F32. */
static inline struct ggml_tensor *kv_attend(struct ggml_context *context, kv_layer *l, struct ggml_tensor *q,
                                            struct ggml_tensor *written)
{
    struct ggml_tensor *sources[2] = {q, written};
    if (!kv_rows_whole(q)) return NULL;
    return ggml_custom_4d(context, GGML_TYPE_F32, l->values.head_dim, q->ne[1], q->ne[2], 1, sources, 2, kv_attend_node,
                          GGML_N_TASKS_MAX, l);
}

#endif

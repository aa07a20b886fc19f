/* tqkv in a ggml graph: the KV cache and the attention of a layer as two nodes, on ggml's public API (ggml_custom_4d).
 *
 * ggml calls a node on all its threads at once; tqkv_team hands them the tasks. Strides of tensors become tqkv_strides,
 * so views need no ggml_cont. A node cannot fail: tqkv_ggml_layer.result has the first failure, to be looked at before
 * the next graph. All functions that return bool return false for lack of memory or for a shape that tqkv refuses, and
 * have then changed nothing. layer.c beside this file is the test and the benchmark. */
#ifndef TQKV_GGML_H
#define TQKV_GGML_H

#include "tqkv.h"

#include <ggml.h>
#include <stdlib.h>
#include <string.h>

/* ---- What a graph computes: one batch for all layers ---- */

/* Tokens of one sequence that follow each other in it, in k, v, q and out. */
typedef struct tqkv_ggml_run {
    const int32_t *pages; /* [n_pages] of the sequence; -1 where nothing is to be seen any more */
    int n_pages, first, n_tokens, sequence;
    int64_t end;
} tqkv_ggml_run;

/* Which positions of a sequence have halves, for exact ends: the first so many, and [from, end). */
typedef struct tqkv_ggml_sequence {
    int64_t from, end;
    int n_first;
    int n_tokens; /* in this batch */
} tqkv_ggml_sequence;

/* What attention over a run reads. */
typedef struct tqkv_ggml_item {
    tqkv_store keys, values, first[2], last[2];
} tqkv_ggml_item;

typedef struct tqkv_ggml_batch {
    int page_size;
    int exact_first, exact_last,
        n_batch; /* exact_last: 0 = no exact ends; n_batch: most tokens of a sequence in a batch */
    int n_tokens, n_runs, n_sequences;
    tqkv_ggml_sequence *sequences; /* [n_sequences] that have exact ends */
    int32_t *slots;                /* [n_tokens] */
    tqkv_ggml_run *runs;           /* [n_runs], and as many of what an attention over all of them takes: */
    tqkv_ggml_item *stores;
    tqkv_attention *items;
    const void **queries;
    void **outs;
    int slot_room, run_room;
} tqkv_ggml_batch;

/* The positions whose halves a sequence keeps: those that queries of a batch read, and whole vectors of 64. */
static inline int tqkv_ggml_last_slots(const tqkv_ggml_batch *b) { return (b->exact_last + b->n_batch + 63) / 64 * 64; }

/* preset: formats aside, its exact ends, for sequences 0 to n_sequences - 1. NULL: none. */
static inline bool tqkv_ggml_batch_open(tqkv_ggml_batch *b, int page_size, const tqkv_cache_desc *preset,
                                        int n_sequences, int n_batch)
{
    memset(b, 0, sizeof *b);
    b->page_size = page_size;
    if (!preset || !preset->exact_last || n_sequences <= 0) return true;
    if (n_batch < 0 || n_batch > INT32_MAX / 2 - preset->exact_last) return false;
    b->sequences = (tqkv_ggml_sequence *)calloc((size_t)n_sequences, sizeof *b->sequences);
    if (!b->sequences) return false;
    b->n_sequences = n_sequences;
    b->exact_first = preset->exact_first;
    b->exact_last = preset->exact_last;
    b->n_batch = n_batch;
    return true;
}

static inline void tqkv_ggml_batch_close(tqkv_ggml_batch *b)
{
    free(b->sequences);
    free(b->slots);
    free(b->runs);
    free(b->stores);
    free(b->items);
    free((void *)b->queries);
    free((void *)b->outs);
    memset(b, 0, sizeof *b);
}

/* Before the first tokens of a graph. Another page size may be taken for each graph: the slots stay where they are. */
static inline void tqkv_ggml_batch_begin(tqkv_ggml_batch *b, int page_size)
{
    b->page_size = page_size;
    b->n_tokens = b->n_runs = 0;
    for (int i = 0; i < b->n_sequences; i++) b->sequences[i].n_tokens = 0;
}

/* Grows *array to at least n elements; size: of one. */
static inline bool tqkv_ggml_grow(void **array, size_t n, size_t size)
{
    void *grown = n <= SIZE_MAX / size ? realloc(*array, n * size) : NULL;
    if (grown) *array = grown;
    return grown != NULL;
}

static inline bool tqkv_ggml_batch_reserve(tqkv_ggml_batch *b, int n_runs, int n_tokens)
{
    const int slot_room = n_tokens > b->slot_room ? n_tokens + n_tokens / 2 : b->slot_room;
    const int run_room = n_runs > b->run_room ? n_runs + n_runs / 2 + 8 : b->run_room;
    if (slot_room > b->slot_room && !tqkv_ggml_grow((void **)&b->slots, (size_t)slot_room, sizeof *b->slots))
        return false;
    b->slot_room = slot_room;
    if (run_room == b->run_room) return true;
    const size_t n = (size_t)run_room;
    if (!tqkv_ggml_grow((void **)&b->runs, n, sizeof *b->runs) ||
        !tqkv_ggml_grow((void **)&b->stores, n, sizeof *b->stores) ||
        !tqkv_ggml_grow((void **)&b->items, n, sizeof *b->items) ||
        !tqkv_ggml_grow((void **)&b->queries, n, sizeof *b->queries) ||
        !tqkv_ggml_grow((void **)&b->outs, n, sizeof *b->outs))
        return false;
    b->run_room = run_room;
    return true;
}

/* Positions [position, end) of a sequence get halves, over those of older positions. */
static inline void tqkv_ggml_sequence_write(const tqkv_ggml_batch *b, tqkv_ggml_sequence *s, int64_t position,
                                            int64_t end)
{
    const int64_t oldest = end - tqkv_ggml_last_slots(b);
    if (position < s->from || position > s->end) s->from = position;
    if (s->from < oldest) s->from = oldest;
    s->end = end;
    if (position <= s->n_first) s->n_first = end < b->exact_first ? (int)end : b->exact_first;
}

/* The slots of positions [position, end) -> to; false where a page is none. */
static inline bool tqkv_ggml_slots(const int32_t *pages, int page_size, int64_t position, int64_t end, int32_t *to)
{
    for (int64_t p = position; p < end; p++) {
        const int32_t page = pages[p / page_size];
        if (page < 0 || page > (INT32_MAX - page_size) / page_size) return false;
        *to++ = page * page_size + (int32_t)(p % page_size);
    }
    return true;
}

/* Adds n_tokens that follow `position` positions of the sequence with these pages, which have to stay until the graph
   has been computed. Tokens of a sequence may come in several runs. False also if the pages do not have the positions,
   or a sequence with exact ends is none of the batch's or would have more than n_batch tokens in it. */
static inline bool tqkv_ggml_batch_add(tqkv_ggml_batch *b, int sequence, const int32_t *pages, int n_pages,
                                       int64_t position, int n_tokens)
{
    if (n_tokens < 0 || position < 0 || position > INT64_MAX - n_tokens) return false;
    const int64_t end = position + n_tokens;
    if (end > (int64_t)n_pages * b->page_size || n_tokens > INT32_MAX / 2 - b->n_tokens) return false;
    if (b->exact_last && (sequence < 0 || sequence >= b->n_sequences)) return false;
    tqkv_ggml_sequence *s = b->exact_last ? &b->sequences[sequence] : NULL;
    if (s && n_tokens > b->n_batch - s->n_tokens) return false;
    if (!tqkv_ggml_batch_reserve(b, b->n_runs + 1, b->n_tokens + n_tokens)) return false;
    if (!tqkv_ggml_slots(pages, b->page_size, position, end, b->slots + b->n_tokens)) return false;
    const tqkv_ggml_run run = {pages, n_pages, b->n_tokens, n_tokens, sequence, end};
    b->runs[b->n_runs++] = run;
    b->n_tokens += n_tokens;
    if (s) s->n_tokens += n_tokens;
    if (s) tqkv_ggml_sequence_write(b, s, position, end);
    return true;
}

/* What a sequence holds has other positions now, or another sequence's place: it is read from codes alone. */
static inline void tqkv_ggml_sequence_forget(tqkv_ggml_batch *b, int sequence)
{
    if (!b->exact_last || sequence < 0 || sequence >= b->n_sequences) return;
    b->sequences[sequence].from = b->sequences[sequence].end = INT64_MAX;
    b->sequences[sequence].n_first = 0;
}

/* cells: [n], that of each position, or -1 -> pages: [(n + page_size - 1) / page_size]. False unless the cells lie in
   whole blocks, in which case a page size of 1 does: then the cells are the table. */
static inline bool tqkv_ggml_pages(const int32_t *cells, int n, int page_size, int32_t *pages)
{
    for (int i = 0; i < n; i++) {
        int32_t *page = &pages[i / page_size];
        if (i % page_size == 0) *page = -1;
        if (cells[i] < 0) continue;
        if (cells[i] % page_size != i % page_size || (*page >= 0 && *page != cells[i] / page_size)) return false;
        *page = cells[i] / page_size;
    }
    return true;
}

/* ---- A layer: one pool for all sequences ---- */

typedef struct tqkv_ggml_layer {
    tqkv_store keys, values;
    tqkv_store *ends; /* [sequence][first keys, first values, last keys, last values], or NULL */
    int n_ends;
    tqkv_ggml_batch *batch; /* of all layers, as the team */
    tqkv_team *team;
    tqkv_attention call; /* what is the same in each call; set its scale: zero is 1 / sqrt(dim of the keys) */
    tqkv_result result;
} tqkv_ggml_layer;

/* Memory of zeros on a cache line; what calloc returned lies before it. */
static inline void *tqkv_ggml_zeros(size_t size)
{
    enum { line = 64 };
    char *memory = size <= SIZE_MAX - 2 * line ? (char *)calloc(size + 2 * line, 1) : NULL;
    if (!memory) return NULL;
    char *at = memory + line + (line - (uintptr_t)memory % line);
    memcpy(at - sizeof memory, &memory, sizeof memory);
    return at;
}

static inline void tqkv_ggml_free(void *zeros)
{
    char *memory;
    if (!zeros) return;
    memcpy(&memory, (char *)zeros - sizeof memory, sizeof memory);
    free(memory);
}

static inline void tqkv_ggml_store_close(tqkv_store *s)
{
    tqkv_ggml_free(s->codes);
    tqkv_ggml_free(s->norms);
    s->codes = NULL;
    s->norms = NULL;
}

/* Gives a store of a known shape its memory. */
static inline bool tqkv_ggml_store_open(tqkv_store *s)
{
    s->codes_size = tqkv_codes_size(s);
    s->norms_size = tqkv_norms_size(s);
    s->codes = s->codes_size ? tqkv_ggml_zeros(s->codes_size) : NULL;
    s->norms = s->norms_size ? (float *)tqkv_ggml_zeros(s->norms_size) : NULL;
    if (s->codes && (s->norms || !s->norms_size)) return true;
    tqkv_ggml_store_close(s);
    return false;
}

static inline void tqkv_ggml_layer_close(tqkv_ggml_layer *l)
{
    for (int i = 0; i < l->n_ends; i++) tqkv_ggml_store_close(&l->ends[i]);
    free(l->ends);
    tqkv_ggml_store_close(&l->keys);
    tqkv_ggml_store_close(&l->values);
    l->ends = NULL;
    l->n_ends = 0;
}

/* The halves of the sequences' ends, which have the centre and the scale of their codes. A stream of F16 needs none. */
static inline bool tqkv_ggml_ends_open(tqkv_ggml_layer *l)
{
    const tqkv_ggml_batch *b = l->batch;
    const int n = 4 * b->n_sequences;
    if (!b->exact_last) return true;
    l->ends = (tqkv_store *)calloc((size_t)n, sizeof *l->ends);
    if (!l->ends) return false;
    for (; l->n_ends < n; l->n_ends++) {
        const bool last = l->n_ends % 4 / 2 == 1;
        tqkv_store *s = &l->ends[l->n_ends];
        *s = l->n_ends % 2 ? l->values : l->keys;
        s->codes = NULL;
        s->norms = NULL;
        if (s->format == TQKV_F16 || (!last && !b->exact_first)) continue;
        s->format = TQKV_F16;
        s->rotated = true;
        s->capacity = last ? tqkv_ggml_last_slots(b) : b->exact_first;
        s->ring = last;
        if (!tqkv_ggml_store_open(s)) return false;
    }
    return true;
}

/* shape: key_format, value_format, head_dim, value_dim (0: head_dim), n_kv_heads, capacity (slots, of all sequences);
   its other fields are not read. center, channel_scale: [n_kv_heads][head_dim] of the keys, or NULL; they stay the
   caller's. */
static inline bool tqkv_ggml_layer_open(tqkv_ggml_layer *l, const tqkv_cache_desc *shape, const float *center,
                                        const float *channel_scale, tqkv_ggml_batch *batch, tqkv_team *team)
{
    memset(l, 0, sizeof *l);
    l->batch = batch;
    l->team = team;
    l->call.parallel = tqkv_team_parallel(team);
    l->call.allocator = tqkv_team_allocator(team);
    l->keys.format = shape->key_format;
    l->keys.head_dim = shape->head_dim;
    l->keys.n_kv_heads = shape->n_kv_heads;
    l->keys.capacity = shape->capacity;
    l->values = l->keys;
    l->values.format = shape->value_format;
    if (shape->value_dim) l->values.head_dim = shape->value_dim;
    l->keys.center = center;
    l->keys.channel_scale = channel_scale;
    if (tqkv_ggml_store_open(&l->keys) && tqkv_ggml_store_open(&l->values) && tqkv_ggml_ends_open(l)) return true;
    tqkv_ggml_layer_close(l);
    return false;
}

/* Copies n positions of a sequence, in all its formats' bytes, to other pages of the pool. */
static inline tqkv_result tqkv_ggml_copy(const tqkv_ggml_layer *l, int page_size, const int32_t *from,
                                         const int32_t *to, int n_pages, int n)
{
    tqkv_result r = TQKV_OK;
    for (int side = 0; side < 2 && r == TQKV_OK; side++) {
        tqkv_store source = side ? l->values : l->keys, target;
        source.page_size = page_size;
        source.n_pages = n_pages;
        target = source;
        source.pages = from;
        target.pages = to;
        r = tqkv_store_convert(&target, &source, 0, n);
    }
    return r;
}

/* ---- The nodes ---- */

static inline tqkv_type tqkv_ggml_type(const struct ggml_tensor *t)
{
    return t->type == GGML_TYPE_F16 ? TQKV_TYPE_F16 : t->type == GGML_TYPE_BF16 ? TQKV_TYPE_BF16 : TQKV_TYPE_F32;
}

/* Of a tensor [tokens][heads][dim], in any layout whose rows are in one piece. */
static inline tqkv_strides tqkv_ggml_strides(const struct ggml_tensor *t)
{
    const tqkv_strides s = {t->nb[2] / t->nb[0], t->nb[1] / t->nb[0]};
    return s;
}

static inline bool tqkv_ggml_rows_whole(const struct ggml_tensor *t)
{
    return t->nb[0] == ggml_type_size(t->type) && t->nb[1] % t->nb[0] == 0 && t->nb[2] % t->nb[0] == 0 &&
           (t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_BF16);
}

/* A store as it takes rows of a tensor. */
static inline tqkv_store tqkv_ggml_taking(const tqkv_ggml_layer *l, const tqkv_store *store,
                                          const struct ggml_tensor *rows)
{
    tqkv_store s = *store;
    s.type = tqkv_ggml_type(rows);
    s.strides = tqkv_ggml_strides(rows);
    s.parallel = l->call.parallel;
    return s;
}

/* The halves of a run's rows that are the first or, for now, the newest of their sequence. */
static inline tqkv_result tqkv_ggml_write_ends(const tqkv_ggml_layer *l, const tqkv_ggml_run *run, int side,
                                               const struct ggml_tensor *rows)
{
    const tqkv_store *ends = &l->ends[4 * run->sequence];
    const char *data = (const char *)rows->data + (size_t)run->first * rows->nb[2];
    const int64_t position = run->end - run->n_tokens, left = l->batch->exact_first - position;
    tqkv_result r = TQKV_OK;
    if (ends[side].codes && left > 0) {
        const tqkv_store first = tqkv_ggml_taking(l, &ends[side], rows);
        r = tqkv_encode(&first, data, left < run->n_tokens ? (int)left : run->n_tokens, position);
    }
    if (r != TQKV_OK || !ends[2 + side].codes) return r;
    const tqkv_store last = tqkv_ggml_taking(l, &ends[2 + side], rows);
    return tqkv_encode(&last, data, run->n_tokens, position);
}

static inline tqkv_result tqkv_ggml_write_rows(const tqkv_ggml_layer *l, int side, const struct ggml_tensor *rows)
{
    const tqkv_store s = tqkv_ggml_taking(l, side ? &l->values : &l->keys, rows);
    tqkv_result r = tqkv_encode_slots(&s, rows->data, (int)rows->ne[2], l->batch->slots);
    for (int i = 0; i < l->batch->n_runs && l->ends && r == TQKV_OK; i++)
        r = tqkv_ggml_write_ends(l, &l->batch->runs[i], side, rows);
    return r;
}

static inline void tqkv_ggml_keep_result(tqkv_ggml_layer *l, tqkv_result r)
{
    if (l->result == TQKV_OK) l->result = r;
}

static inline void tqkv_ggml_write_node(struct ggml_tensor *dst, int thread, int n_threads, void *user)
{
    tqkv_ggml_layer *l = (tqkv_ggml_layer *)user;
    if (!tqkv_team_begin(l->team, thread, n_threads)) return;
    tqkv_result r = tqkv_ggml_write_rows(l, 0, dst->src[0]);
    if (r == TQKV_OK) r = tqkv_ggml_write_rows(l, 1, dst->src[1]);
    tqkv_ggml_keep_result(l, r);
    tqkv_team_end(l->team);
}

/* Gives an attention over a run the halves of its sequence. */
static inline void tqkv_ggml_take_ends(const tqkv_ggml_layer *l, const tqkv_ggml_run *run, tqkv_ggml_item *item,
                                       tqkv_attention *a)
{
    const tqkv_ggml_sequence *s = &l->batch->sequences[run->sequence];
    for (int side = 0; side < 2; side++) {
        item->first[side] = l->ends[4 * run->sequence + side];
        item->last[side] = l->ends[4 * run->sequence + 2 + side];
    }
    a->exact_first = s->n_first;
    a->exact_last = l->batch->exact_last;
    a->exact_from = s->from < run->end ? s->from : run->end;
    if (item->first[0].codes) a->first_keys = &item->first[0];
    if (item->first[1].codes) a->first_values = &item->first[1];
    if (item->last[0].codes) a->last_keys = &item->last[0];
    if (item->last[1].codes) a->last_values = &item->last[1];
}

/* All runs in one call; tokens of a sequence attend to all before them. */
static inline tqkv_result tqkv_ggml_attend_all(const tqkv_ggml_layer *l, const struct ggml_tensor *q,
                                               struct ggml_tensor *out)
{
    const tqkv_ggml_batch *b = l->batch;
    for (int i = 0; i < b->n_runs; i++) {
        const tqkv_ggml_run *run = &b->runs[i];
        tqkv_ggml_item *item = &b->stores[i];
        tqkv_attention *a = &b->items[i];
        item->keys = l->keys;
        item->values = l->values;
        item->keys.pages = item->values.pages = run->pages;
        item->keys.n_pages = item->values.n_pages = run->n_pages;
        item->keys.page_size = item->values.page_size = b->page_size;
        *a = l->call;
        a->keys = &item->keys;
        a->values = &item->values;
        a->n_heads = (int)q->ne[1];
        a->n_queries = run->n_tokens;
        a->end = run->end;
        a->query_type = tqkv_ggml_type(q);
        a->query_strides = tqkv_ggml_strides(q);
        a->output_strides = tqkv_ggml_strides(out);
        if (l->ends) tqkv_ggml_take_ends(l, run, item, a);
        b->queries[i] = (const char *)q->data + (size_t)run->first * q->nb[2];
        b->outs[i] = (char *)out->data + (size_t)run->first * out->nb[2];
    }
    return tqkv_attend_batch(b->items, b->n_runs, b->queries, b->outs);
}

static inline void tqkv_ggml_attend_node(struct ggml_tensor *dst, int thread, int n_threads, void *user)
{
    tqkv_ggml_layer *l = (tqkv_ggml_layer *)user;
    if (!tqkv_team_begin(l->team, thread, n_threads)) return;
    tqkv_ggml_keep_result(l, tqkv_ggml_attend_all(l, dst->src[0], dst));
    tqkv_team_end(l->team);
}

/* The node that writes k and v, [tokens][kv heads][dim]; give it to tqkv_ggml_attend. NULL: a layout that tqkv cannot
 * read. */
static inline struct ggml_tensor *tqkv_ggml_write(struct ggml_context *context, tqkv_ggml_layer *l,
                                                  struct ggml_tensor *k, struct ggml_tensor *v)
{
    struct ggml_tensor *sources[2] = {k, v};
    if (!tqkv_ggml_rows_whole(k) || !tqkv_ggml_rows_whole(v)) return NULL;
    return ggml_custom_4d(context, GGML_TYPE_F32, 1, 1, 1, 1, sources, 2, tqkv_ggml_write_node, GGML_N_TASKS_MAX, l);
}

/* Attention after `written`; q: [tokens][heads][dim], the result: [tokens][heads][dim of the values], F32. */
static inline struct ggml_tensor *tqkv_ggml_attend(struct ggml_context *context, tqkv_ggml_layer *l,
                                                   struct ggml_tensor *q, struct ggml_tensor *written)
{
    struct ggml_tensor *sources[2] = {q, written};
    if (!tqkv_ggml_rows_whole(q)) return NULL;
    return ggml_custom_4d(context, GGML_TYPE_F32, l->values.head_dim, q->ne[1], q->ne[2], 1, sources, 2,
                          tqkv_ggml_attend_node, GGML_N_TASKS_MAX, l);
}

/* ---- A context shift: all keys decoded, turned by nodes of ggml, and those that move encoded again ---- */

static inline void tqkv_ggml_keys_node(struct ggml_tensor *dst, int thread, int n_threads, void *user)
{
    tqkv_ggml_layer *l = (tqkv_ggml_layer *)user;
    if (!tqkv_team_begin(l->team, thread, n_threads)) return;
    tqkv_store s = l->keys;
    s.parallel = l->call.parallel;
    tqkv_ggml_keep_result(l, tqkv_decode(&s, 0, s.capacity, TQKV_ORIGINAL, (float *)dst->data));
    tqkv_team_end(l->team);
}

/* The keys of all slots, [slots][kv heads][dim], F32. */
static inline struct ggml_tensor *tqkv_ggml_keys(struct ggml_context *context, tqkv_ggml_layer *l)
{
    return ggml_custom_4d(context, GGML_TYPE_F32, l->keys.head_dim, l->keys.n_kv_heads, l->keys.capacity, 1, NULL, 0,
                          tqkv_ggml_keys_node, GGML_N_TASKS_MAX, l);
}

static inline void tqkv_ggml_set_keys_node(struct ggml_tensor *dst, int thread, int n_threads, void *user)
{
    tqkv_ggml_layer *l = (tqkv_ggml_layer *)user;
    const struct ggml_tensor *keys = dst->src[0], *moved = dst->src[1];
    if (!tqkv_team_begin(l->team, thread, n_threads)) return;
    int32_t *slots = (int32_t *)dst->data;
    for (int32_t i = 0; i < (int32_t)keys->ne[2]; i++) slots[i] = ((const int32_t *)moved->data)[i] ? i : -1;
    const tqkv_store s = tqkv_ggml_taking(l, &l->keys, keys);
    tqkv_ggml_keep_result(l, tqkv_encode_slots(&s, keys->data, (int)keys->ne[2], slots));
    tqkv_team_end(l->team);
}

/* The node that encodes again the keys of slots whose entry in moved, I32 [slots], is not 0. Their sequences read codes
   alone after it (tqkv_ggml_sequence_forget): halves do not turn. NULL: a layout that tqkv cannot read. */
static inline struct ggml_tensor *tqkv_ggml_set_keys(struct ggml_context *context, tqkv_ggml_layer *l,
                                                     struct ggml_tensor *keys, struct ggml_tensor *moved)
{
    struct ggml_tensor *sources[2] = {keys, moved};
    if (!tqkv_ggml_rows_whole(keys) || keys->ne[2] != l->keys.capacity || moved->type != GGML_TYPE_I32 ||
        moved->ne[0] != keys->ne[2])
        return NULL;
    return ggml_custom_4d(context, GGML_TYPE_I32, keys->ne[2], 1, 1, 1, sources, 2, tqkv_ggml_set_keys_node,
                          GGML_N_TASKS_MAX, l);
}

#endif

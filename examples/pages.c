/* Pages with all that a preset has. Two sequences that begin with one prompt share a pool of pages. Keys have a centre
 * and a scale of their channels; the first and newest positions are halves, in pages of a second pool. The outputs have
 * the bits of a tqkv_cache. server.c shows how an engine takes and returns pages, and shares a pool among threads. */
#define TQKV_IMPLEMENTATION
#include "tqkv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEAD_DIM = 64,
    KV_HEADS = 2,
    HEADS = 8,
    ROW = KV_HEADS * HEAD_DIM,
    PAGE = 64,
    POOL_PAGES = 32,
    TABLE = 16, /* pages of the longest sequence */
    PROMPT = 640,
    OWN = 200,
    TOKENS = PROMPT + OWN,
    FIRST = 4,
    NEWEST = 128
};

/* ---- the pools: four streams of one layer, and their pages ---- */

typedef struct page_list {
    int32_t free[POOL_PAGES];
    int uses[POOL_PAGES]; /* by how many sequences */
    int n_free;
} page_list;

typedef struct pool {
    tqkv_store keys, values, key_halves, value_halves; /* without a table: each sequence has its own */
    float center[ROW], scale[ROW];
    page_list codes, halves; /* both streams of a page come and go together */
} pool;

static void need(bool good, const char *what)
{
    if (good) return;
    fprintf(stderr, "pages: %s\n", what);
    exit(1);
}

static void call(tqkv_result result) { need(result == TQKV_OK, tqkv_result_string(result)); }

static tqkv_store make_stream(tqkv_format format, const float *center, const float *scale)
{
    tqkv_store s = {.format = format, .head_dim = HEAD_DIM, .n_kv_heads = KV_HEADS, .page_size = PAGE};
    s.capacity = POOL_PAGES * PAGE;
    s.rotation = format == TQKV_F16
                     ? TQKV_ROTATION_ON
                     : TQKV_ROTATION_DEFAULT; /* halves stand in the basis of the codes, with their centre and scale */
    s.center = center;
    s.channel_scale = scale;
    s.codes_size = tqkv_codes_size(&s);
    s.norms_size = tqkv_norms_size(&s);
    s.codes = malloc(s.codes_size);
    s.norms = (float *)malloc(s.norms_size + 1); /* halves have none */
    need(s.codes && s.norms, "out of memory");
    return s;
}

/* Centre and scale are the model's: an engine learns them once, from 512 positions or more, and keeps them in a file.
   All stores over the pool name the same numbers, and a pool that learns anew must be empty. */
static void open_pool(pool *p, const float *keys, int n)
{
    const tqkv_store shape = {.format = TQKV_TQ5, .head_dim = HEAD_DIM, .n_kv_heads = KV_HEADS, .capacity = n};
    call(tqkv_calibrate(&shape, keys, n, NULL, 0, 0, TQKV_PAIRS_NONE, p->center, p->scale));
    p->keys = make_stream(TQKV_TQ5, p->center, p->scale);
    p->values = make_stream(TQKV_TQ3, NULL, NULL);
    p->key_halves = make_stream(TQKV_F16, p->center, p->scale);
    p->value_halves = make_stream(TQKV_F16, NULL, NULL);
    for (int i = 0; i < POOL_PAGES; i++) p->codes.free[p->codes.n_free++] = p->halves.free[p->halves.n_free++] = i;
}

static int32_t take(page_list *list)
{
    need(list->n_free > 0, "no page is free");
    const int32_t page = list->free[--list->n_free];
    list->uses[page] = 1;
    return page;
}

static void give_back(page_list *list, int32_t page)
{
    if (--list->uses[page] == 0) list->free[list->n_free++] = page;
}

/* ---- a sequence: two tables, of pages of codes and of halves ---- */

typedef struct sequence {
    pool *pool;
    int32_t pages[TABLE], halves[TABLE]; /* -1: none */
    int64_t end;
} sequence;

static tqkv_store with_table(tqkv_store s, const int32_t *table)
{
    s.pages = table;
    s.n_pages = TABLE;
    return s;
}

static sequence make_sequence(pool *p)
{
    sequence s = {.pool = p};
    for (int i = 0; i < TABLE; i++) s.pages[i] = s.halves[i] = -1;
    return s;
}

/* Shares the pages of a sequence, which must be full: each sequence then writes into pages of its own. */
static sequence share(const sequence *of)
{
    for (int i = 0; i < TABLE; i++) {
        if (of->pages[i] >= 0) of->pool->codes.uses[of->pages[i]]++;
        if (of->halves[i] >= 0) of->pool->halves.uses[of->halves[i]]++;
    }
    return *of;
}

static void take_pages(sequence *s, int64_t end)
{
    for (int i = 0; i * PAGE < end; i++) {
        const bool is_new = s->pages[i] < 0;
        if (is_new) s->pages[i] = take(&s->pool->codes);
        if (is_new) s->halves[i] = take(&s->pool->halves);
    }
}

/* The page of the first positions stays; others go when no later query reads halves of them. */
static void return_halves(sequence *s)
{
    for (int i = 1; i < TABLE; i++)
        if (s->halves[i] >= 0 && (i + 1) * PAGE <= s->end + 1 - NEWEST) {
            give_back(&s->pool->halves, s->halves[i]);
            s->halves[i] = -1;
        }
}

/* Each row goes into the codes and into the halves, at the same position. */
static void append(sequence *s, const float *k, const float *v, int n)
{
    take_pages(s, s->end + n);
    const tqkv_store keys = with_table(s->pool->keys, s->pages), values = with_table(s->pool->values, s->pages);
    const tqkv_store key_halves = with_table(s->pool->key_halves, s->halves);
    const tqkv_store value_halves = with_table(s->pool->value_halves, s->halves);
    call(tqkv_encode(&keys, k, n, s->end));
    call(tqkv_encode(&values, v, n, s->end));
    call(tqkv_encode(&key_halves, k, n, s->end));
    call(tqkv_encode(&value_halves, v, n, s->end));
    s->end += n;
    return_halves(s);
}

/* One query, of the newest position. In an engine tqkv_attend_batch takes such an attention of each sequence. */
static void attend(const sequence *s, const float *q, float *out)
{
    const tqkv_store keys = with_table(s->pool->keys, s->pages), values = with_table(s->pool->values, s->pages);
    const tqkv_store key_halves = with_table(s->pool->key_halves, s->halves);
    const tqkv_store value_halves = with_table(s->pool->value_halves, s->halves);
    tqkv_attention a = {.keys = &keys, .values = &values, .n_heads = HEADS, .n_queries = 1, .end = s->end};
    a.first.keys = a.last.keys = &key_halves; /* one table serves both ends */
    a.first.values = a.last.values = &value_halves;
    a.first.n = FIRST;
    a.last.n = NEWEST;
    call(tqkv_attend(&a, q, out));
}

/* ---- the check: a cache with the same formats, centre, scale and ends ---- */

static void attend_cache(const pool *p, const float *k, const float *v, const float *q, float *out)
{
    tqkv_cache_desc desc = tqkv_cache_preset(TQKV_SMALL);
    tqkv_cache *cache;
    desc.head_dim = HEAD_DIM;
    desc.n_kv_heads = KV_HEADS;
    desc.n_heads = HEADS;
    desc.capacity = TOKENS;
    desc.calibrate = 0; /* it gets what the pool has learned */
    desc.key_center = p->center;
    desc.key_scale = p->scale;
    call(tqkv_cache_create(&desc, &cache));
    call(tqkv_cache_append(cache, k, v, TOKENS));
    call(tqkv_cache_attend(cache, q, 1, out));
    tqkv_cache_destroy(cache);
}

/* In place of a model's projections: keys with a constant part and a large channel in each head. */
static void fill(float *rows, int n, bool are_keys)
{
    for (int i = 0; i < n; i++) {
        rows[i] = (float)rand() / (float)RAND_MAX - 0.5f;
        if (are_keys && i % HEAD_DIM == 7) rows[i] = 20.0f * rows[i] + 30.0f;
    }
}

static int pages_in_use(const page_list *list) { return POOL_PAGES - list->n_free; }

int main(void)
{
    static float k[2][TOKENS * ROW], v[2][TOKENS * ROW], q[HEADS * HEAD_DIM], out[HEADS * HEAD_DIM],
        wanted[HEADS * HEAD_DIM];
    static pool p;
    bool good = true;
    for (int i = 0; i < 2; i++) { /* tokens of a common prompt, then of each sequence */
        fill(k[i], TOKENS * ROW, true);
        fill(v[i], TOKENS * ROW, false);
    }
    memcpy(k[1], k[0], PROMPT * ROW * sizeof **k);
    memcpy(v[1], v[0], PROMPT * ROW * sizeof **v);
    fill(q, HEADS * HEAD_DIM, false);

    open_pool(&p, k[0] + FIRST * ROW, PROMPT - FIRST);
    sequence sequences[2] = {make_sequence(&p)};
    append(&sequences[0], k[0], v[0], PROMPT);
    sequences[1] = share(&sequences[0]);
    for (int token = PROMPT; token < TOKENS; token++)
        for (int i = 0; i < 2; i++) append(&sequences[i], k[i] + token * ROW, v[i] + token * ROW, 1);
    for (int i = 0; i < 2; i++) {
        attend(&sequences[i], q, out);
        attend_cache(&p, k[i], v[i], q, wanted);
        good = good && memcmp(out, wanted, sizeof out) == 0;
    }
    printf("2 sequences of %d tokens, %d of them common: %d pages of codes, %d of halves; outputs have %s\n", TOKENS,
           PROMPT, pages_in_use(&p.codes), pages_in_use(&p.halves),
           good ? "the bits of a cache: as expected" : "OTHER bits: WRONG");
    return good ? 0 : 1;
}

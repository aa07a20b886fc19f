/* The pool of pages of server.c: its stores, who holds which page, snapshots of a sequence's own pages, and a step of
 * many sequences through the model. Read reserve, move_pages and attend_pages first. */
#ifndef SERVER_POOL_H
#define SERVER_POOL_H

#include "tinylm_logits.h"
#include "tinylm_session.h"

enum { SEQUENCES = 16, PAGE = 64, MAX_PAGES = 8, POOL_PAGES = 20, MAX_TEXT = MAX_PAGES * PAGE };
enum { COMMON = 200, SHARED = COMMON / PAGE * PAGE }; /* bytes of the common prompt, and those in its full pages */

/* The positions of a preempted sequence behind the shared pages, as tqkv_store_save writes them. */
typedef struct snapshot {
    unsigned char *bytes;
    size_t size, room, at; /* at: bytes read */
} snapshot;

typedef enum sequence_state { WAITING, RUNNING, FINISHED, CANCELLED } sequence_state;

typedef struct sequence {
    unsigned char text[MAX_TEXT];
    int prompt, length, end; /* bytes of the prompt, of the text now, and of the finished text */
    int stored;              /* positions in the pool, or in the shared pages and the snapshot */
    int computed;            /* positions that went through the layers */
    int batch;               /* bytes that go through the layers in this step, from `stored` on */
    int32_t pages[MAX_PAGES];
    int n_pages, preemptions;
    snapshot saved;
    sequence_state state;
    int ready;          /* under the server's lock: bytes of text that the client may read */
    bool ended, cancel; /* under the lock: nothing more will come; the client wants no more */
} sequence;

typedef struct server {
    pthread_mutex_t lock; /* guards what clients and the scheduler share: the next three, and some of each sequence */
    pthread_cond_t changed;
    sequence *queue[SEQUENCES]; /* in order of arrival */
    int n_queued;
    bool asked; /* clients changed something since the scheduler looked */

    session s;                                       /* the model, and scratch for a step */
    tqkv_store keys[MAX_LAYERS], values[MAX_LAYERS]; /* the pool */
    int holders[POOL_PAGES];                         /* tables that name the page */
    sequence common;                                 /* the common prompt */
    int n_known, n_ended;                            /* sequences of the queue that the scheduler has seen, and ended */
    sequence *batch[SEQUENCES];                      /* those with bytes in this step */
    int n_batch, step;
    int most_used, most_named; /* pages in use at most, and by how many table entries at that time */
    int n_saved, n_again;      /* positions saved by preemption, and those computed twice */
    size_t saved_bytes;
} server;

/* ---- Pages ---- */

static int pages_used(const server *v)
{
    int used = 0;
    for (int page = 0; page < POOL_PAGES; page++) used += v->holders[page] > 0;
    return used;
}

/* Pages for n more positions. False if the pool has not enough; those it got stay in the table. */
static bool reserve(server *v, sequence *q, int n)
{
    while (q->n_pages * PAGE < q->stored + n) {
        int page = 0;
        while (page < POOL_PAGES && v->holders[page] > 0) page++;
        if (page == POOL_PAGES) return false;
        v->holders[page] = 1;
        q->pages[q->n_pages++] = page;
    }
    return true;
}

static void release(server *v, sequence *q)
{
    for (int i = 0; i < q->n_pages; i++) v->holders[q->pages[i]]--;
    q->n_pages = q->batch = 0;
}

/* A table starts with the full pages of the common prompt: nobody writes them any more. */
static void share_common(server *v, sequence *q)
{
    for (q->n_pages = 0; q->n_pages < SHARED / PAGE; q->n_pages++) {
        q->pages[q->n_pages] = v->common.pages[q->n_pages];
        v->holders[q->pages[q->n_pages]]++;
    }
}

/* The positions of one sequence in a layer's store. */
static tqkv_store pages_of(const tqkv_store *pool, const sequence *q)
{
    tqkv_store store = *pool;
    store.pages = q->pages;
    store.n_pages = q->n_pages;
    store.page_size = PAGE;
    return store;
}

/* An empty store of all pages. */
static tqkv_store pool_store(const model_layer *shape, tqkv_format format)
{
    tqkv_store store = {.format = format, .head_dim = shape->head_dim, .n_kv_heads = shape->n_kv_heads};
    store.capacity = POOL_PAGES * PAGE;
    store.codes_size = tqkv_codes_size(&store);
    store.norms_size = tqkv_norms_size(&store);
    store.codes = floats(store.codes_size / sizeof(float) + 1);
    store.norms = floats(store.norms_size / sizeof(float));
    return store;
}

/* ---- Snapshots of a sequence's own pages ---- */

static size_t snapshot_write(void *user, const void *bytes, size_t n)
{
    snapshot *to = (snapshot *)user;
    if (n > to->room - to->size) {
        size_t room = 2 * to->room + n;
        unsigned char *larger = (unsigned char *)realloc(to->bytes, room);
        if (!larger) return 0;
        to->bytes = larger;
        to->room = room;
    }
    memcpy(to->bytes + to->size, bytes, n);
    to->size += n;
    return n;
}

static size_t snapshot_read(void *user, void *bytes, size_t n)
{
    snapshot *from = (snapshot *)user;
    n = n < from->size - from->at ? n : from->size - from->at;
    memcpy(bytes, from->bytes + from->at, n);
    from->at += n;
    return n;
}

static void snapshot_free(snapshot *saved)
{
    free(saved->bytes);
    *saved = (snapshot){NULL, 0, 0, 0};
}

/* Saves a sequence's positions behind the shared pages, or loads them into the pages that it has now. */
static void move_pages(server *v, sequence *q, bool load)
{
    int own = q->stored - SHARED;
    for (int i = 0; i < v->s.m->n_layers && own > 0; i++) {
        const tqkv_store stores[] = {pages_of(&v->keys[i], q), pages_of(&v->values[i], q)};
        for (int j = 0; j < 2; j++) {
            if (load)
                check(tqkv_store_load(&stores[j], SHARED, own, snapshot_read, &q->saved), "load");
            else
                check(tqkv_store_save(&stores[j], SHARED, own, snapshot_write, &q->saved), "save");
        }
    }
}

/* ---- A step: some bytes of each sequence of v->batch through all layers ---- */

/* The attention of every sequence over its own pages, in one call. Its new positions are in the pool already. */
static void attend_pages(server *v, int index)
{
    tqkv_store keys[SEQUENCES], values[SEQUENCES];
    tqkv_attention items[SEQUENCES];
    const void *q[SEQUENCES];
    void *out[SEQUENCES];
    const model_layer *layer = &v->s.m->layers[index];
    int token = 0, wide = layer->n_heads * layer->head_dim;
    for (int i = 0; i < v->n_batch; i++) {
        const sequence *one = v->batch[i];
        keys[i] = pages_of(&v->keys[index], one);
        values[i] = pages_of(&v->values[index], one);
        items[i] = (tqkv_attention){.keys = &keys[i], .values = &values[i], .n_heads = layer->n_heads};
        items[i].n_queries = one->batch;
        items[i].end = one->stored + one->batch;
        items[i].window = layer->window;
        items[i].softcap = layer->softcap;
        items[i].parallel = (tqkv_parallel){pool_run, &v->s.m->pool};
        q[i] = v->s.q + token * wide;
        out[i] = v->s.wide + token * wide;
        token += one->batch;
    }
    check(tqkv_attend_batch(items, v->n_batch, q, out), "attend");
}

/* Positions and slots of the n bytes of a step. */
static int place_bytes(const server *v, int *positions, int32_t *slots)
{
    int n = 0;
    for (int i = 0; i < v->n_batch; i++)
        for (int p = v->batch[i]->stored; p < v->batch[i]->stored + v->batch[i]->batch; p++) {
            positions[n] = p;
            slots[n++] = v->batch[i]->pages[p / PAGE] * PAGE + p % PAGE;
        }
    return n;
}

/* As `attention` in tinylm_session.h, with a position of its own for each byte. */
/* Token t goes to slot slots[t]: a table with pages of one position. */
static void encode_slots(const tqkv_store *pool, const float *rows, int n, const int32_t *slots, const char *what)
{
    tqkv_store s = *pool;
    s.pages = slots;
    s.n_pages = n;
    s.page_size = 1;
    check(tqkv_encode(&s, rows, n, 0), what);
}

static void attend_layer(server *v, int index, const int *positions, const int32_t *slots, int n)
{
    session *s = &v->s;
    model *m = s->m;
    const model_layer *layer = &m->layers[index];
    int d = layer->head_dim, q_row = layer->n_heads * d, kv_row = layer->n_kv_heads * d;
    rms_norm(m, s->x, layer->norm_attention, n, m->d_model, s->h);
    linear_apply(m, &layer->q, s->h, n, s->q);
    linear_apply(m, &layer->k, s->h, n, s->k);
    linear_apply(m, &layer->v, s->h, n, s->v);
    if (layer->qk_norm) {
        rms_norm(m, s->q, layer->q_norm, n * layer->n_heads, d, s->q);
        rms_norm(m, s->k, layer->k_norm, n * layer->n_kv_heads, d, s->k);
    }
    for (int i = 0; i < n; i++) {
        rope(m, s->q + i * q_row, 1, layer->n_heads, d, positions[i]);
        rope(m, s->k + i * kv_row, 1, layer->n_kv_heads, d, positions[i]);
    }
    encode_slots(&v->keys[index], s->k, n, slots, "keys");
    encode_slots(&v->values[index], s->v, n, slots, "values");
    attend_pages(v, index);
    linear_apply(m, &layer->o, s->wide, n, s->h);
    for (int i = 0; i < n * m->d_model; i++) s->x[i] += s->h[i];
}

/* Runs the step. A sequence whose whole text is stored gets its next byte, the likeliest. */
static void run_step(server *v)
{
    static float logits[BATCH * VOCABULARY];
    int positions[BATCH], n = 0, token = 0;
    int32_t slots[BATCH];
    session *s = &v->s;
    model *m = s->m;
    for (int i = 0; i < v->n_batch; i++)
        for (int j = 0; j < v->batch[i]->batch; j++, n++)
            memcpy(s->x + n * m->d_model, m->embedding + v->batch[i]->text[v->batch[i]->stored + j] * m->d_model,
                   sizeof(float) * (size_t)m->d_model);
    place_bytes(v, positions, slots);
    for (int layer = 0; layer < m->n_layers; layer++) {
        attend_layer(v, layer, positions, slots, n);
        mlp(s, layer, n);
    }
    rms_norm(m, s->x, m->norm_out, n, m->d_model, s->h);
    linear_apply(m, &m->logits, s->h, n, logits);
    for (int i = 0; i < v->n_batch; i++) {
        sequence *q = v->batch[i];
        token += q->batch;
        q->stored += q->batch;
        q->computed += q->batch;
        if (q->stored == q->length && q->length < q->end && q->length < MAX_TEXT)
            q->text[q->length++] = (unsigned char)largest(logits + (token - 1) * VOCABULARY);
    }
}

#endif

/* A server in small: many sequences over one pool of pages. Each layer has one store for keys and one for values; a
 * sequence is a table of pages, the same pages in every layer. Sequences come and go while others run (continuous
 * batching): a step takes some bytes of each, new prompts in pieces, through the layers together. Per layer that is
 * tqkv_encode_slots for keys, for values, and tqkv_attend_batch.
 *   - The common prompt is held once: tables share its full pages, and the server counts who holds a page.
 *   - When the pool is exhausted, the youngest sequence is preempted: it gives its pages back and waits. Its text stays,
 *     and later goes through the layers again. One sequence is cancelled.
 *   - Every text is compared with that of the same prompt alone in an ordinary session: the same bytes.
 * Read serve, reserve and attend_pages first. */
#define _POSIX_C_SOURCE  200809L
#define _DARWIN_C_SOURCE /* the number of processors, which POSIX does not give */
#include "../tqkv.h"
#include "tinylm_logits.h"
#include "tinylm_session.h"

enum { SEQUENCES = 16, PAGE = 64, MAX_PAGES = 8, POOL_PAGES = 24, MAX_TEXT = MAX_PAGES * PAGE };
enum { COMMON = 200, SHARED = COMMON / PAGE * PAGE }; /* bytes of the common prompt, and those in its full pages */
enum { CHUNK = 24, ARRIVE_EVERY = 2, CANCELLED_ONE = 7, CANCEL_STEP = 30 };

typedef enum sequence_state { WAITING, RUNNING, FINISHED, CANCELLED } sequence_state;

typedef struct sequence {
    unsigned char text[MAX_TEXT];
    int length, end; /* bytes of text now, and when it is finished */
    int stored;      /* positions in the pool */
    int batch;       /* bytes that go through the layers in this step, from `stored` on */
    int32_t pages[MAX_PAGES];
    int n_pages, arrival, preemptions;
    sequence_state state;
} sequence;

typedef struct server {
    session s;                                       /* the model, and scratch for a step */
    tqkv_store keys[MAX_LAYERS], values[MAX_LAYERS]; /* the pool */
    int holders[POOL_PAGES];                         /* tables that name the page */
    sequence common, sequences[SEQUENCES];           /* in order of arrival */
    sequence *batch[SEQUENCES];                      /* those with bytes in this step */
    int n_batch, step;
    int most_used, most_named; /* pages in use at most, and by how many table entries at that time */
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
    q->n_pages = q->stored = q->batch = 0;
}

/* A table starts with the full pages of the common prompt: nobody writes them any more. */
static void share_common(server *v, sequence *q)
{
    for (q->n_pages = 0; q->n_pages < SHARED / PAGE; q->n_pages++) {
        q->pages[q->n_pages] = v->common.pages[q->n_pages];
        v->holders[q->pages[q->n_pages]]++;
    }
    q->stored = SHARED;
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
        keys[i] = v->keys[index];
        values[i] = v->values[index];
        keys[i].pages = values[i].pages = one->pages;
        keys[i].n_pages = values[i].n_pages = one->n_pages;
        keys[i].page_size = values[i].page_size = PAGE;
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
    check(tqkv_encode_slots(&v->keys[index], s->k, n, slots), "keys");
    check(tqkv_encode_slots(&v->values[index], s->v, n, slots), "values");
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
        if (q->stored == q->length && q->length < q->end)
            q->text[q->length++] = (unsigned char)largest(logits + (token - 1) * VOCABULARY);
    }
}

/* ---- The schedule ---- */

static sequence *youngest_running(server *v)
{
    for (int i = SEQUENCES - 1; i >= 0; i--)
        if (v->sequences[i].state == RUNNING) return &v->sequences[i];
    return NULL;
}

/* Starts those that wait, the oldest first, while the pool has room for their text. */
static void admit(server *v)
{
    for (int i = 0; i < SEQUENCES; i++) {
        sequence *q = &v->sequences[i];
        if (q->state != WAITING || q->arrival > v->step) continue;
        if (POOL_PAGES - pages_used(v) < q->length / PAGE + 1 - SHARED / PAGE) return;
        share_common(v, q);
        if (!reserve(v, q, q->length - q->stored)) stop("admit", "no page");
        q->state = RUNNING;
    }
}

/* Gives each running sequence its bytes of this step, the oldest first. One that finds no page preempts the youngest. */
static void fill_batch(server *v)
{
    int room = BATCH;
    v->n_batch = 0;
    for (int i = 0; i < SEQUENCES; i++) {
        sequence *q = &v->sequences[i];
        int n = q->length - q->stored < CHUNK ? q->length - q->stored : CHUNK;
        n = n < room ? n : room;
        while (q->state == RUNNING && !reserve(v, q, n)) {
            sequence *victim = youngest_running(v);
            release(v, victim);
            victim->state = WAITING;
            victim->preemptions++;
        }
        if (q->state != RUNNING || n == 0) continue;
        q->batch = n;
        room -= n;
        v->batch[v->n_batch++] = q;
    }
}

static void count_pages(server *v)
{
    int used = pages_used(v), named = 0;
    for (int page = 0; page < POOL_PAGES; page++) named += v->holders[page];
    if (used < v->most_used || (used == v->most_used && named <= v->most_named)) return;
    v->most_used = used;
    v->most_named = named;
}

/* Ends a sequence, with its text complete or not. */
static void end_sequence(server *v, sequence *q, sequence_state state)
{
    release(v, q);
    q->state = state;
}

/* Until all sequences have ended. */
static void serve(server *v)
{
    v->batch[0] = &v->common;
    for (v->n_batch = 1; v->common.stored < SHARED; run_step(v)) {
        v->common.batch = SHARED - v->common.stored < BATCH ? SHARED - v->common.stored : BATCH;
        if (!reserve(v, &v->common, v->common.batch)) stop("common prompt", "larger than the pool");
    }
    for (int left = SEQUENCES; left > 0; v->step++) {
        sequence *cancelled = &v->sequences[CANCELLED_ONE];
        if (v->step == CANCEL_STEP && cancelled->state <= RUNNING) {
            end_sequence(v, cancelled, CANCELLED);
            left--;
        }
        admit(v);
        fill_batch(v);
        count_pages(v);
        if (v->n_batch > 0) run_step(v);
        for (int i = 0; i < v->n_batch; i++) {
            if (v->batch[i]->length < v->batch[i]->end) continue;
            end_sequence(v, v->batch[i], FINISHED);
            left--;
        }
    }
    release(v, &v->common);
}

/* ---- The program ---- */

/* Prompts of different lengths behind the common one, from other places of the text. */
static void make_requests(server *v, const data_file *text)
{
    memcpy(v->common.text, text->bytes, SHARED);
    v->common.length = v->common.end = SHARED;
    for (int i = 0; i < SEQUENCES; i++) {
        sequence *q = &v->sequences[i];
        int own = 20 + 37 * i % 60;
        memcpy(q->text, text->bytes, COMMON);
        memcpy(q->text + COMMON, text->bytes + 900 * (i + 1), (size_t)own);
        q->length = COMMON + own;
        q->end = q->length + 30 + 29 * i % 50;
        q->arrival = ARRIVE_EVERY * i;
    }
}

/* The text of a request as an ordinary session writes it. */
static void write_alone(session *s, const sequence *request, unsigned char *text)
{
    float logits[VOCABULARY];
    int length = request->length;
    memcpy(text, request->text, (size_t)length);
    session_truncate(s, 0);
    prefill(s, text, length - 1);
    while (length < request->end) {
        forward(s, text + length - 1, 1, logits);
        text[length++] = (unsigned char)largest(logits);
    }
}

/* Prints a line for each sequence. Returns how many differ from their run alone. */
static int compare_alone(server *v, const sequence *requests)
{
    static const char *const words[] = {"waiting", "running", "finished", "cancelled"};
    unsigned char text[MAX_TEXT];
    session s;
    int n_different = 0, written = 0;
    double start = seconds();
    session_create(&s, v->s.m, find_format("i8"), find_format("tq4"), MAX_TEXT);
    printf("%8s %7s %6s %10s %10s %10s\n", "sequence", "prompt", "bytes", "state", "preempted", "alone");
    for (int i = 0; i < SEQUENCES; i++) {
        const sequence *q = &v->sequences[i];
        write_alone(&s, &requests[i], text);
        bool same = memcmp(q->text, text, (size_t)q->length) == 0 && (q->state == CANCELLED || q->length == q->end);
        n_different += !same;
        written += q->end - requests[i].length;
        printf("%8d %7d %6d %10s %10d %10s\n", i, requests[i].length, q->length - requests[i].length, words[q->state],
               q->preemptions, same ? "the same" : "DIFFERENT");
    }
    printf("alone, one after the other: %.0f bytes a second\n", written / (seconds() - start));
    session_destroy(&s);
    return n_different;
}

/* Prints what the service did since `start`, in seconds. */
static void print_service(const server *v, const sequence *requests, double start)
{
    double time = seconds() - start;
    int written = 0, preemptions = 0;
    for (int i = 0; i < SEQUENCES; i++) {
        written += v->sequences[i].length - requests[i].length;
        preemptions += v->sequences[i].preemptions;
    }
    printf("%d sequences in %d steps: %d bytes written, %.0f a second; %d preemptions\n", SEQUENCES, v->step, written,
           written / time, preemptions);
    printf("a pool of %d pages of %d positions: at most %d in use, for %d entries of tables: %.0f%% saved by sharing\n",
           POOL_PAGES, PAGE, v->most_used, v->most_named, 100.0 * (v->most_named - v->most_used) / v->most_named);
    printf("pages in use at the end: %d\n", pages_used(v));
}

static void free_server(server *v)
{
    for (int i = 0; i < v->s.m->n_layers; i++) {
        tqkv_store *stores[] = {&v->keys[i], &v->values[i]};
        for (int j = 0; j < 2; j++) {
            free(stores[j]->codes);
            free(stores[j]->norms);
        }
    }
    session_destroy(&v->s);
}

int main(void)
{
    static server v;
    static sequence requests[SEQUENCES];
    options o = parse(2, (char *[]){"server", "score", NULL});
    data_file text;
    model m;
    if (!model_load(&m, o.model_path, o.n_threads)) stop(o.model_path, "is no model, or damaged");
    if (!data_file_open(&text, o.file) || text.size < 16384) stop(o.file, "cannot be read, or is too short");
    session_scratch(&v.s, &m, MAX_TEXT);
    for (int i = 0; i < m.n_layers; i++) {
        v.keys[i] = pool_store(&m.layers[i], TQKV_I8);
        v.values[i] = pool_store(&m.layers[i], TQKV_TQ4);
    }
    make_requests(&v, &text);
    memcpy(requests, v.sequences, sizeof requests);
    double start = seconds();
    serve(&v);
    print_service(&v, requests, start);
    int n_different = compare_alone(&v, requests);
    free_server(&v);
    model_free(&m);
    free(text.bytes);
    return n_different > 0;
}

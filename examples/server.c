/* A server in small: many sequences over one pool of pages. Each layer has one store for keys and one for values; a
 * sequence is a table of pages, the same pages in every layer. Sequences come and go while others run (continuous
 * batching): a step takes some bytes of each, new prompts in pieces, through the layers together. Per layer that is
 * tqkv_encode_slots for keys, for values, and tqkv_attend_batch.
 *   - The common prompt is held once: tables share its full pages, and the server counts who holds a page.
 *   - When the pool is exhausted, the youngest sequence is preempted: its positions go into a snapshot in memory, its
 *     pages back to the pool. Later the snapshot is loaded into other pages: nothing is computed twice.
 *   - One sequence is cancelled.
 *   - Every text is compared with that of the same prompt alone in an ordinary session: the same bytes.
 * Read serve first, then server_pool.h. */
#define _POSIX_C_SOURCE  200809L
#define _DARWIN_C_SOURCE /* the number of processors, which POSIX does not give */
#include "../tqkv.h"
#include "server_pool.h"

enum { CHUNK = 24, ARRIVE_EVERY = 2, CANCELLED_ONE = 7, CANCEL_STEP = 30 };

/* ---- The schedule ---- */

static sequence *youngest_running(server *v)
{
    for (int i = SEQUENCES - 1; i >= 0; i--)
        if (v->sequences[i].state == RUNNING) return &v->sequences[i];
    return NULL;
}

static void preempt(server *v, sequence *q)
{
    move_pages(v, q, false);
    v->n_saved += q->stored - SHARED;
    v->saved_bytes += q->saved.size;
    release(v, q);
    q->state = WAITING;
    q->preemptions++;
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
        move_pages(v, q, true);
        snapshot_free(&q->saved);
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
        while (q->state == RUNNING && !reserve(v, q, n)) preempt(v, youngest_running(v));
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
    snapshot_free(&q->saved);
    v->n_again += q->computed - (q->stored - SHARED);
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
        q->stored = SHARED; /* by the common prompt */
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
    printf("preemption saved %d positions in %zu bytes; positions computed twice: %d\n", v->n_saved, v->saved_bytes,
           v->n_again);
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

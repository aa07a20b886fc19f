/* A small server: many sequences over one pool of pages. Each layer has one store for keys and one for values; a
 * sequence is a table of pages, the same pages in every layer. Sequences come and go while others run (continuous
 * batching): a step takes some bytes of each, new prompts in pieces, through the layers together. Per layer that is
 * tqkv_encode with a slot for each token for keys, for values, and tqkv_attend_batch.
 *   - The common prompt is held once: tables share its full pages, and the server counts who holds a page.
 *   - When the pool is exhausted, the youngest sequence is preempted: its positions go into a snapshot in memory, its
 *     pages back to the pool. Later the snapshot is loaded into other pages: nothing is computed twice.
 *   - Clients are threads: they queue requests, read text as it comes, and one cancels. The scheduler holds the lock
 *     between steps, not during one.
 *   - Every text is compared with that of the same prompt alone in an ordinary session: the same bytes.
 * Read client_thread and serve first, then server_pool.h. */
#define _POSIX_C_SOURCE  200809L
#define _DARWIN_C_SOURCE /* the number of processors, which POSIX does not give */
#include "tqkv.h"
#include "server_pool.h"

/* Each client sends some requests before the first step, and its last one when it has the text of its first: the pool
 * is full whichever thread runs first. One request has no end; its client cancels it after ENOUGH bytes. */
enum { CLIENTS = 4, REQUESTS = SEQUENCES / CLIENTS, SENT_FIRST = REQUESTS - 1 };
enum { CHUNK = 24, ENDLESS_ONE = 3, ENOUGH = 15 };

/* What one client asked, and the text that it received. */
typedef struct request {
    sequence q;
    unsigned char received[MAX_TEXT];
    int n_received;
} request;

typedef struct client {
    pthread_t thread;
    server *v;
    request *requests; /* [REQUESTS] */
} client;

/* ---- Clients ---- */

static void submit(server *v, sequence *q)
{
    pthread_mutex_lock(&v->lock);
    v->queue[v->n_queued++] = q;
    v->asked = true;
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
}

/* Takes bytes as they come, until there are n or the sequence has ended. */
static void receive(server *v, request *r, int n)
{
    pthread_mutex_lock(&v->lock);
    while (r->n_received < n && !(r->q.ended && r->n_received == r->q.ready)) {
        while (r->n_received == r->q.ready && !r->q.ended) pthread_cond_wait(&v->changed, &v->lock);
        memcpy(r->received + r->n_received, r->q.text + r->n_received, (size_t)(r->q.ready - r->n_received));
        r->n_received = r->q.ready;
    }
    pthread_mutex_unlock(&v->lock);
}

static void cancel(server *v, sequence *q)
{
    pthread_mutex_lock(&v->lock);
    q->cancel = v->asked = true;
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
}

static void *client_thread(void *user)
{
    client *c = (client *)user;
    for (int i = 0; i < SENT_FIRST; i++) submit(c->v, &c->requests[i].q);
    for (int i = 0; i < REQUESTS; i++) {
        request *r = &c->requests[i];
        if (r->q.end > MAX_TEXT) {
            receive(c->v, r, r->q.prompt + ENOUGH);
            cancel(c->v, &r->q);
        }
        receive(c->v, r, MAX_TEXT);
        if (i == 0) submit(c->v, &c->requests[SENT_FIRST].q);
    }
    return NULL;
}

static void start_clients(server *v, client *clients, request *requests)
{
    for (int i = 0; i < CLIENTS; i++) {
        clients[i].v = v;
        clients[i].requests = requests + REQUESTS * i;
        if (pthread_create(&clients[i].thread, NULL, client_thread, &clients[i]) != 0) stop("client", "no thread");
    }
}

/* ---- The schedule ---- */

static sequence *youngest_running(server *v)
{
    for (int i = v->n_known - 1; i >= 0; i--)
        if (v->queue[i]->state == RUNNING) return v->queue[i];
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
    for (int i = 0; i < v->n_known; i++) {
        sequence *q = v->queue[i];
        if (q->state != WAITING) continue;
        if (POOL_PAGES - pages_used(v) < q->length / PAGE + 1 - SHARED / PAGE) return;
        share_common(v, q);
        if (!reserve(v, q, q->length - q->stored)) stop("admit", "no page");
        move_pages(v, q, true);
        snapshot_free(&q->saved);
        q->state = RUNNING;
    }
}

/* Gives each running sequence its bytes of this step, the oldest first. One that finds no page preempts the youngest.
 * */
static void fill_batch(server *v)
{
    int room = BATCH;
    v->n_batch = 0;
    for (int i = 0; i < v->n_known; i++) {
        sequence *q = v->queue[i];
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

/* Ends a sequence, with its text complete or not. The lock is held. */
static void end_sequence(server *v, sequence *q, sequence_state state)
{
    release(v, q);
    snapshot_free(&q->saved);
    v->n_again += q->computed - (q->stored - SHARED);
    v->n_ended++;
    q->state = state;
    q->ended = true;
}

/* Takes new sequences and cancellations. Before the first requests and when nothing could run it waits for clients. */
static void listen_to_clients(server *v)
{
    pthread_mutex_lock(&v->lock);
    while (v->n_queued < CLIENTS * SENT_FIRST || (v->n_batch == 0 && !v->asked))
        pthread_cond_wait(&v->changed, &v->lock);
    v->asked = false;
    v->n_known = v->n_queued;
    for (int i = 0; i < v->n_known; i++)
        if (v->queue[i]->cancel && !v->queue[i]->ended) end_sequence(v, v->queue[i], CANCELLED);
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
}

/* Hands the clients the bytes of the step. */
static void answer_clients(server *v)
{
    pthread_mutex_lock(&v->lock);
    for (int i = 0; i < v->n_batch; i++) {
        sequence *q = v->batch[i];
        q->ready = q->length;
        if (q->length >= q->end) end_sequence(v, q, FINISHED);
    }
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
}

static void store_common(server *v)
{
    v->batch[0] = &v->common;
    for (v->n_batch = 1; v->common.stored < SHARED; run_step(v)) {
        v->common.batch = SHARED - v->common.stored < BATCH ? SHARED - v->common.stored : BATCH;
        if (!reserve(v, &v->common, v->common.batch)) stop("common prompt", "larger than the pool");
    }
}

/* Until all sequences have ended. */
static void serve(server *v)
{
    store_common(v);
    while (v->n_ended < SEQUENCES) {
        listen_to_clients(v);
        admit(v);
        fill_batch(v);
        if (v->n_batch == 0) continue;
        count_pages(v);
        run_step(v);
        v->step++;
        answer_clients(v);
    }
    release(v, &v->common);
}

/* ---- The program ---- */

/* Prompts of different lengths behind the common one, from other places of the text. */
static void make_requests(server *v, const data_file *text, request *requests)
{
    memcpy(v->common.text, text->bytes, SHARED);
    v->common.length = v->common.end = SHARED;
    for (int i = 0; i < SEQUENCES; i++) {
        sequence *q = &requests[i].q;
        int own = 20 + 37 * i % 60;
        memcpy(q->text, text->bytes, COMMON);
        memcpy(q->text + COMMON, text->bytes + 900 * (i + 1), (size_t)own);
        q->prompt = q->length = q->ready = COMMON + own;
        q->stored = SHARED; /* by the common prompt */
        q->end = i == ENDLESS_ONE ? MAX_TEXT + 1 : q->length + 30 + 29 * i % 50;
    }
}

/* The text of a request as an ordinary session writes it, up to n bytes. */
static void write_alone(session *s, const sequence *q, unsigned char *text, int n)
{
    float logits[VOCABULARY];
    int length = q->prompt;
    memcpy(text, q->text, (size_t)length);
    session_truncate(s, 0);
    prefill(s, text, length - 1);
    while (length < n) {
        forward(s, text + length - 1, 1, logits);
        text[length++] = (unsigned char)largest(logits);
    }
}

/* Prints a line for each sequence. Returns how many differ from their run alone. */
static int compare_alone(server *v, const request *requests)
{
    static const char *const words[] = {"waiting", "running", "finished", "cancelled"};
    unsigned char text[MAX_TEXT];
    session s;
    int n_different = 0, written = 0;
    double start = seconds();
    session_create(&s, v->s.m, find_format("i8"), find_format("tq4"), MAX_TEXT);
    printf("%8s %7s %6s %10s %10s %10s\n", "sequence", "prompt", "bytes", "state", "preempted", "alone");
    for (int i = 0; i < SEQUENCES; i++) {
        const sequence *q = &requests[i].q;
        int n = requests[i].n_received;
        write_alone(&s, q, text, n);
        bool same = memcmp(requests[i].received, text, (size_t)n) == 0 && (q->state == CANCELLED || n == q->end);
        n_different += !same;
        written += n - q->prompt;
        printf("%8d %7d %6d %10s %10d %10s\n", i, q->prompt, n - q->prompt, words[q->state], q->preemptions,
               same ? "the same" : "DIFFERENT");
    }
    printf("alone, one after the other: %.0f bytes a second\n", written / (seconds() - start));
    session_destroy(&s);
    return n_different;
}

/* Prints what the service did since `start`, in seconds. */
static void print_service(const server *v, double start)
{
    double time = seconds() - start;
    int written = 0, preemptions = 0;
    for (int i = 0; i < SEQUENCES; i++) {
        written += v->queue[i]->length - v->queue[i]->prompt;
        preemptions += v->queue[i]->preemptions;
    }
    printf("%d sequences of %d clients in %d steps: %d bytes written, %.0f a second; %d preemptions\n", SEQUENCES,
           CLIENTS, v->step, written, written / time, preemptions);
    printf("preemption saved %d positions in %zu bytes; positions computed twice: %d\n", v->n_saved, v->saved_bytes,
           v->n_again);
    printf("a pool of %d pages of %d positions: at most %d in use, for %d entries of tables: %.0f%% saved by sharing\n",
           POOL_PAGES, PAGE, v->most_used, v->most_named, 100.0 * (v->most_named - v->most_used) / v->most_named);
    printf("pages in use at the end: %d\n", pages_used(v));
}

static void create_server(server *v, model *m)
{
    session_scratch(&v->s, m, MAX_TEXT);
    for (int i = 0; i < m->n_layers; i++) {
        v->keys[i] = pool_store(&m->layers[i], TQKV_I8);
        v->values[i] = pool_store(&m->layers[i], TQKV_TQ4);
    }
    pthread_mutex_init(&v->lock, NULL);
    pthread_cond_init(&v->changed, NULL);
}

static void destroy_server(server *v)
{
    for (int i = 0; i < v->s.m->n_layers; i++) {
        tqkv_store *stores[] = {&v->keys[i], &v->values[i]};
        for (int j = 0; j < 2; j++) {
            free(stores[j]->codes);
            free(stores[j]->norms);
        }
    }
    session_destroy(&v->s);
    pthread_cond_destroy(&v->changed);
    pthread_mutex_destroy(&v->lock);
}

int main(void)
{
    static server v;
    static request requests[SEQUENCES];
    client clients[CLIENTS];
    options o = parse(2, (char *[]){"server", "score", NULL});
    data_file text;
    model m;
    if (!model_load(&m, o.model_path, o.n_threads)) stop(o.model_path, "is no model, or damaged");
    if (!data_file_open(&text, o.file) || text.size < 16384) stop(o.file, "cannot be read, or is too short");
    create_server(&v, &m);
    make_requests(&v, &text, requests);
    double start = seconds();
    start_clients(&v, clients, requests);
    serve(&v);
    for (int i = 0; i < CLIENTS; i++) pthread_join(clients[i].thread, NULL);
    print_service(&v, start);
    int n_different = compare_alone(&v, requests);
    destroy_server(&v);
    model_free(&m);
    free(text.bytes);
    return n_different > 0;
}

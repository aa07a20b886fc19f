/* Attention over pages, and several sequences in a call. */
#include "bench.h"

/* [n]: each page once, in random order */
static int32_t *random_pages(int n)
{
    int32_t *pages = (int32_t *)bench_alloc((size_t)n * sizeof *pages);
    uint64_t seed = 5;
    for (int i = 0; i < n; i++) {
        const int j = (int)((bench_random(&seed) >> 33) % (uint64_t)(i + 1));
        pages[i] = pages[j];
        pages[j] = i;
    }
    return pages;
}

/* The layers of a stream with that table over each. The caller frees `layers`. */
static bench_stream with_pages(const bench_stream *linear, const int32_t *pages, int n_pages)
{
    bench_stream paged = *linear;
    paged.layers = (tqkv_store *)bench_alloc((size_t)linear->n_layers * sizeof *paged.layers);
    for (int i = 0; i < linear->n_layers; i++) {
        paged.layers[i] = linear->layers[i];
        paged.layers[i].pages = pages;
        paged.layers[i].n_pages = n_pages;
        paged.layers[i].page_size = PAGE;
    }
    return paged;
}

/* A paged store beside a linear one over the same codes. The ratio: speed over pages, of that without. */
static void run_paged(bench *b, const pair *p, const float *q, float *out, const int32_t *pages)
{
    static timing t;
    const timing_limits limits = limits_of(&b->options);
    const tqkv_attention attention = {.n_heads = PAGED_HEADS, .n_queries = 1, .end = PAGED_POSITIONS};
    const bench_stream *keys = &b->keys[p->keys], *values = &b->values[p->values];
    bench_stream paged_keys = with_pages(keys, pages, PAGED_POSITIONS / PAGE);
    bench_stream paged_values = with_pages(values, pages, PAGED_POSITIONS / PAGE);
    attend_work works[2] = {{attention, keys, values, 0, q, out}, {attention, &paged_keys, &paged_values, 0, q, out}};
    char name[96];
    t.n_entries = 0;
    const timing_entry *linear = timing_add(&t, "linear", run_attend, &works[0]);
    const timing_entry *paged = timing_add(&t, "paged", run_attend, &works[1]);
    timing_run(&t, &limits);
    printf("\n%s: head_dim %d, %d positions, group %d, random pages of %d; %d rounds\n", p->name, PAGED_DIM,
           PAGED_POSITIONS, PAGED_GROUP, PAGE, t.n_rounds);
    print_times(&t, linear);
    printf("\n");
    print_times(&t, paged);
    printf("\n");
    snprintf(name, sizeof name, "paged_%s_d%d_n%d_g%d", p->name, PAGED_DIM, PAGED_POSITIONS, PAGED_GROUP);
    print_ratio(b, name, "linear", timing_ratio(&t, paged, linear));
    free(paged_keys.layers);
    free(paged_values.layers);
}

typedef struct batch_work {
    tqkv_store keys[SEQUENCES], values[SEQUENCES];
    tqkv_attention items[SEQUENCES];
    const void *q[SEQUENCES];
    void *out[SEQUENCES];
} batch_work;

static void run_batch(void *user)
{
    const batch_work *work = (const batch_work *)user;
    bench_check(tqkv_attend_batch(work->items, SEQUENCES, work->q, work->out));
}

static void run_loop(void *user)
{
    const batch_work *work = (const batch_work *)user;
    for (int i = 0; i < SEQUENCES; i++) bench_check(tqkv_attend(&work->items[i], work->q[i], work->out[i]));
}

/* One query of each sequence, which has the next pages of the pool. outs: [SEQUENCES][PAGED_ROW] */
static void open_batch(const bench *b, const pair *p, const int32_t *pages, const float *q, float *outs,
                       batch_work *work)
{
    for (int i = 0; i < SEQUENCES; i++) {
        const int length = (i + 1) * SEQUENCE_STEP;
        tqkv_store *keys = &work->keys[i], *values = &work->values[i];
        *keys = *b->keys[p->keys].layers;
        *values = *b->values[p->values].layers;
        keys->pages = values->pages = pages;
        keys->n_pages = values->n_pages = (length + PAGE - 1) / PAGE;
        keys->page_size = values->page_size = PAGE;
        work->items[i] =
            (tqkv_attention){.keys = keys, .values = values, .n_heads = PAGED_HEADS, .n_queries = 1, .end = length};
        work->q[i] = q;
        work->out[i] = outs + i * PAGED_ROW;
        pages += keys->n_pages;
    }
}

void run_batches(bench *b, const pair *p, const float *q, float *outs, tqkv_parallel hook, const char *suffix)
{
    double (*ratio)(const timing *, const timing_entry *, const timing_entry *) =
        hook.run ? timing_wall_ratio : timing_ratio;
    static timing t;
    static batch_work work;
    char name[96];
    const timing_limits limits = limits_of(&b->options);
    const int total = SEQUENCE_STEP * SEQUENCES * (SEQUENCES + 1) / 2, n_pages = total / PAGE + SEQUENCES;
    float *source = (float *)bench_alloc(BENCH_SOURCE_TOKENS * BENCH_KV_HEADS * PAGED_DIM * sizeof *source);
    int32_t *pages = random_pages(n_pages);
    bench_fill(source, BENCH_SOURCE_TOKENS * BENCH_KV_HEADS * PAGED_DIM, 1);
    bench_stream_open(&b->keys[p->keys], p->keys, PAGED_DIM, n_pages * PAGE, source);
    bench_stream_open(&b->values[p->values], p->values, PAGED_DIM, n_pages * PAGE, source);
    open_batch(b, p, pages, q, outs, &work);
    for (int i = 0; i < SEQUENCES; i++) work.items[i].parallel = hook;
    const tqkv_attention one = {.n_heads = PAGED_HEADS, .n_queries = 1, .end = total, .parallel = hook};
    bench_stream paged_keys = with_pages(&b->keys[p->keys], pages, n_pages);
    bench_stream paged_values = with_pages(&b->values[p->values], pages, n_pages);
    attend_work wholes[2] = {{one, &paged_keys, &paged_values, 0, q, outs},
                             {one, &b->keys[p->keys], &b->values[p->values], 0, q, outs}};
    t.n_entries = 0;
    const timing_entry *batch = timing_add(&t, "batch", run_batch, &work);
    const timing_entry *loop = timing_add(&t, "loop", run_loop, &work);
    const timing_entry *single = timing_add(&t, "one of the same total", run_attend, &wholes[0]);
    const timing_entry *linear = timing_add(&t, "one, linear", run_attend, &wholes[1]);
    timing_run(&t, &limits);
    printf("\n%s%s: %d sequences, %d positions in all, random pages of %d; %d rounds\n", p->name, suffix, SEQUENCES,
           total, PAGE, t.n_rounds);
    for (int i = 0; i < t.n_entries; i++) {
        print_times(&t, &t.entries[i]);
        printf("\n");
    }
    snprintf(name, sizeof name, "batch_default_s16%s", suffix);
    print_ratio(b, name, "loop", ratio(&t, batch, loop));
    print_ratio(b, name, "one", ratio(&t, batch, single));
    print_ratio(b, name, "linear", ratio(&t, batch, linear));
    free(paged_keys.layers);
    free(paged_values.layers);
    free(source);
    free(pages);
    close_streams(b);
}

void run_pages(bench *b)
{
    static const char *const names[] = {"f16", "i8", "tq5", "tq4", "default"};
    float *q = (float *)bench_alloc(PAGED_ROW * sizeof *q);
    float *out = (float *)bench_alloc(SEQUENCES * PAGED_ROW * sizeof *out);
    int32_t *pages = random_pages(PAGED_POSITIONS / PAGE);
    bench_fill(q, PAGED_ROW, 6);
    open_streams(b, PAGED_DIM, PAGED_POSITIONS);
    for (int i = 0; i < COUNT(pairs); i++)
        for (int j = 0; j < COUNT(names); j++)
            if (strcmp(pairs[i].name, names[j]) == 0 && wanted(b, &pairs[i])) run_paged(b, &pairs[i], q, out, pages);
    close_streams(b);
    for (int i = 0; i < COUNT(pairs); i++)
        if (strcmp(pairs[i].name, "default") == 0 && wanted(b, &pairs[i]))
            run_batches(b, &pairs[i], q, out, (tqkv_parallel){NULL, NULL}, "");
    fflush(stdout);
    free(q);
    free(out);
    free(pages);
}

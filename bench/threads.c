/* Calls by several threads, and by all of a machine. */
#include "bench.h"
#include "../examples/thread_pool.h"

/* ---- Some threads ---- */

enum { APPENDED = 4096, APPEND_COUNTS = 3 };

typedef struct append_work {
    thread_pool pool;
    tqkv_cache *cache;
    const float *source; /* [APPENDED][BENCH_KV_HEADS][PAGED_DIM] */
} append_work;

static void run_append(void *user)
{
    const append_work *work = (const append_work *)user;
    bench_check(tqkv_cache_truncate(work->cache, 0));
    bench_check(tqkv_cache_append(work->cache, work->source, work->source, APPENDED));
}

/* A prefill's keys and values, TQ4, by as many threads. The ratios: speed, of one thread's. */
static void run_appends(bench *b)
{
    static timing t;
    static append_work works[APPEND_COUNTS];
    static const int threads[APPEND_COUNTS] = {1, 2, 4};
    const timing_limits limits = limits_of(&b->options);
    const size_t n = (size_t)APPENDED * BENCH_KV_HEADS * PAGED_DIM;
    float *source = (float *)bench_alloc(n * sizeof *source);
    bench_fill(source, n, 1);
    t.n_entries = 0;
    for (int i = 0; i < APPEND_COUNTS; i++) {
        append_work *work = &works[i];
        char name[TIMING_NAME];
        snprintf(name, sizeof name, "%d thread%s", threads[i], i ? "s" : "");
        pool_start(&work->pool, threads[i] - 1);
        work->source = source;
        tqkv_cache_desc desc = {.key_format = TQKV_TQ4, .value_format = TQKV_TQ4, .head_dim = PAGED_DIM};
        desc.n_heads = desc.n_kv_heads = BENCH_KV_HEADS;
        desc.capacity = APPENDED;
        if (i) desc.parallel = (tqkv_parallel){pool_run, &work->pool};
        bench_check(tqkv_cache_create(&desc, &work->cache));
        timing_add(&t, name, run_append, work);
    }
    timing_run(&t, &limits);
    printf("\nappend: %d tokens, tq4, head_dim %d; %d rounds\n", APPENDED, PAGED_DIM, t.n_rounds);
    for (int i = 0; i < APPEND_COUNTS; i++) {
        char name[TIMING_NAME];
        print_times(&t, &t.entries[i]);
        printf("\n");
        tqkv_cache_destroy(works[i].cache);
        pool_stop(&works[i].pool);
        snprintf(name, sizeof name, "append_tq4_d%d_t%d", PAGED_DIM, threads[i]);
        if (i) print_ratio(b, name, "t1", timing_wall_ratio(&t, &t.entries[i], &t.entries[0]));
    }
    free(source);
}

void run_threads(bench *b)
{
    thread_pool pool;
    float *q = (float *)bench_alloc(PAGED_ROW * sizeof *q);
    float *out = (float *)bench_alloc(SEQUENCES * PAGED_ROW * sizeof *out);
    bench_fill(q, PAGED_ROW, 6);
    run_appends(b);
    pool_start(&pool, 1); /* beside this thread */
    for (int i = 0; i < COUNT(pairs); i++)
        if (strcmp(pairs[i].name, "default") == 0)
            run_batches(b, &pairs[i], q, out, (tqkv_parallel){pool_run, &pool}, "_t2");
    pool_stop(&pool);
    fflush(stdout);
    free(q);
    free(out);
}

/* ---- A whole machine ---- */

enum { MACHINE_DIM = 128, MACHINE_POSITIONS = 32768, MACHINE_GROUP = 2, MACHINE_READS = 64 };

typedef struct machine_read {
    bench *b;
    thread_pool *pool;
    float sums[MACHINE_READS];
} machine_read;

static void read_part(void *context, int i)
{
    machine_read *work = (machine_read *)context;
    const size_t at = (size_t)i * PEAK_READ_BYTES % PEAK_MEMORY_BYTES;
    work->sums[i] = work->b->peak->read(work->b->memory + at / sizeof(float));
}

static void run_machine_read(void *user)
{
    machine_read *work = (machine_read *)user;
    pool_run(work->pool, MACHINE_READS, read_part, work);
}

/* Prints wall times, and the bytes of codes and norms a second,
 * of the read bandwidth of the same threads and rounds. */
static void print_machine(const bench *b, const timing *t, int threads)
{
    const timing_entry *read = timing_of(t, "read");
    const double read_rate = (double)MACHINE_READS * PEAK_READ_BYTES / timing_median(read->wall, t->n_rounds);
    printf("\n%d threads: head_dim %d, %d positions, group %d; read %.1f GB/s; %d rounds\n", threads, MACHINE_DIM,
           MACHINE_POSITIONS, MACHINE_GROUP, 1e-9 * read_rate, t->n_rounds);
    printf("  %-28s %10s %10s %8s\n", "", "wall us", "GB/s", "of read");
    for (int i = 0; i < COUNT(pairs); i++) {
        const timing_entry *entry = timing_find(t, pairs[i].name);
        if (!entry) continue;
        char name[96];
        const double seconds = timing_median(entry->wall, t->n_rounds), rate = stored_bytes(b, &pairs[i]) / seconds;
        printf("  %-28s %10.1f %10.1f %8.2f\n", entry->name, 1e6 * seconds, 1e-9 * rate, rate / read_rate);
        snprintf(name, sizeof name, "threads%d_%s_d%d_n%d_g%d", threads, pairs[i].name, MACHINE_DIM, MACHINE_POSITIONS,
                 MACHINE_GROUP);
        print_ratio(b, name, "read", rate / read_rate);
    }
}

/* One token by all threads, every format in turns. */
void run_machine(bench *b, int threads)
{
    static timing t;
    static attend_work works[COUNT(pairs)];
    const int n = BENCH_KV_HEADS * MACHINE_GROUP * MACHINE_DIM;
    float *q = (float *)bench_alloc((size_t)n * sizeof *q), *out = (float *)bench_alloc((size_t)n * sizeof *out);
    const timing_limits limits = limits_of(&b->options);
    thread_pool pool;
    machine_read read = {b, &pool, {0}};
    bench_fill(q, (size_t)n, 3);
    open_streams(b, MACHINE_DIM, MACHINE_POSITIONS);
    pool_start(&pool, threads - 1); /* beside this thread */
    t.n_entries = 0;
    timing_add(&t, "read", run_machine_read, &read);
    for (int i = 0; i < COUNT(pairs); i++) {
        if (!wanted(b, &pairs[i]) || pairs[i].type) continue;
        works[i] = (attend_work){{.n_heads = BENCH_KV_HEADS * MACHINE_GROUP, .n_queries = 1, .end = MACHINE_POSITIONS},
                                 &b->keys[pairs[i].keys],
                                 &b->values[pairs[i].values],
                                 0,
                                 q,
                                 out};
        works[i].attention.parallel = (tqkv_parallel){pool_run, &pool};
        timing_add(&t, pairs[i].name, run_attend, &works[i]);
    }
    timing_run(&t, &limits);
    print_machine(b, &t, threads);
    pool_stop(&pool);
    close_streams(b);
    fflush(stdout);
    free(q);
    free(out);
}

/* What the header promises to threads; `make test-tsan` runs this under ThreadSanitizer. */
#include "attend_fixture.h"
#include "cache_fixture.h"

#include <pthread.h>

enum { THREADS = 6, ROUNDS = 4, QUERIES = 3, DIM = 64, OUT = QUERIES * CACHE_HEADS * CACHE_GROUP * DIM };

/* Starts THREADS threads with their own contexts, element_size apart, and waits for them. */
static void run_threads(void *(*body)(void *context), void *contexts, size_t element_size)
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, body, (char *)contexts + (size_t)i * element_size)) exit(2);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
}

/* ---- A hook that gives every task a thread of its own, a few at a time ---- */

typedef struct hook_task {
    tqkv_task task;
    void *context;
    int index;
} hook_task;

static void *run_hook_task(void *context)
{
    hook_task *t = (hook_task *)context;
    t->task(t->context, t->index);
    return NULL;
}

static void run_on_threads(void *user, int count, tqkv_task task, void *context)
{
    const int at_once = *(const int *)user;
    for (int first = 0; first < count; first += at_once) {
        pthread_t threads[THREADS];
        hook_task tasks[THREADS];
        int n = count - first < at_once ? count - first : at_once;
        for (int i = 0; i < n; i++) {
            tasks[i].task = task;
            tasks[i].context = context;
            tasks[i].index = first + i;
            if (pthread_create(&threads[i], NULL, run_hook_task, &tasks[i])) exit(2);
        }
        for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
    }
}

/* ---- Many caches on many threads ---- */

typedef struct cache_thread {
    cache_row row;
    float out[OUT];
    int failures; /* CHECK is not for threads */
} cache_thread;

/* Everything that a cache does, with one of this thread's own. */
static void *live_with_cache(void *context)
{
    cache_thread *t = (cache_thread *)context;
    tqkv_cache_desc desc = cache_desc(&t->row, NULL), any;
    float *rows = cache_data(31, 7, DIM), *q = (float *)test_alloc(sizeof t->out);
    data_rows(32, DATA_GAUSSIAN, q, OUT / DIM, DIM);
    memset(&any, 0, sizeof any);
    for (int round = 0; round < ROUNDS; round++) {
        tqkv_cache *cache = NULL, *loaded = NULL;
        stream s = stream_empty();
        t->failures += tqkv_cache_create(&desc, &cache) != TQKV_OK;
        t->failures += tqkv_cache_append(cache, rows, rows, 7) != TQKV_OK;
        t->failures += tqkv_cache_truncate(cache, 6) != TQKV_OK;
        t->failures += tqkv_cache_append(cache, rows, rows, 3) != TQKV_OK;
        t->failures += tqkv_cache_save(cache, stream_write, &s) != TQKV_OK;
        t->failures += tqkv_cache_load(&any, stream_read, &s, &loaded) != TQKV_OK;
        t->failures += tqkv_cache_attend(loaded, q, QUERIES, t->out) != TQKV_OK;
        tqkv_cache_destroy(cache);
        tqkv_cache_destroy(loaded);
        stream_free(&s);
    }
    free(rows);
    free(q);
    return NULL;
}

static void fill_threads(cache_thread *threads)
{
    memset(threads, 0, THREADS * sizeof *threads);
    for (int i = 0; i < THREADS; i++) {
        cache_row row = {test_formats[i], test_formats[7 - i], DIM, 12, i % 2 != 0, 0, -1};
        threads[i].row = row;
    }
}

static void check_own_caches(const void *parameters)
{
    (void)parameters;
    cache_thread alone[THREADS], together[THREADS];
    fill_threads(alone);
    fill_threads(together);
    const char *isa = tqkv_isa_name();
    tqkv_isa_force(NULL); /* chosen anew by whichever thread comes first */
    run_threads(live_with_cache, together, sizeof *together);
    for (int i = 0; i < THREADS; i++) live_with_cache(&alone[i]);
    CHECK_RESULT(tqkv_isa_force(isa), TQKV_OK);
    for (int i = 0; i < THREADS; i++) {
        CHECK(!alone[i].failures && !together[i].failures, "%d calls failed", together[i].failures);
        CHECK(!memcmp(alone[i].out, together[i].out, sizeof alone[i].out), "thread %d: other bits", i);
    }
}

/* ---- One cache, read by many ---- */

typedef struct reading_thread {
    tqkv_cache *cache;
    const float *q;
    const stream *snapshot;
    int failures;
    float out[OUT], decoded[5 * CACHE_HEADS * DIM];
} reading_thread;

static void *read_cache(void *context)
{
    reading_thread *t = (reading_thread *)context;
    for (int round = 0; round < ROUNDS; round++) {
        stream s = stream_empty();
        t->failures += tqkv_cache_attend(t->cache, t->q, QUERIES, t->out) != TQKV_OK;
        t->failures += tqkv_cache_save(t->cache, stream_write, &s) != TQKV_OK || !stream_is_equal(&s, t->snapshot);
        int64_t end = tqkv_cache_end(t->cache);
        t->failures += tqkv_decode(tqkv_cache_keys(t->cache), end - 5, 5, TQKV_ORIGINAL, t->decoded) != TQKV_OK;
        t->failures += tqkv_cache_bytes(t->cache) == 0;
        stream_free(&s);
    }
    return NULL;
}

/* parameters: tasks at once of the cache's hook; 0 = no hook */
static void check_one_cache(const void *parameters)
{
    int at_once = *(const int *)parameters;
    cache_row row = {TQKV_I8, TQKV_TQ4, DIM, 3000, true, 3100, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    if (at_once) desc.parallel.run = run_on_threads;
    desc.parallel.user = &at_once;
    tqkv_cache *cache = cache_make(&row, &desc);
    REQUIRE(cache, "no cache");
    static reading_thread threads[THREADS], alone;
    stream snapshot = stream_of_cache(cache);
    float *q = (float *)test_alloc(sizeof alone.out);
    data_rows(33, DATA_GAUSSIAN, q, OUT / DIM, DIM);
    memset(threads, 0, sizeof threads);
    memset(&alone, 0, sizeof alone);
    alone.cache = cache;
    alone.q = q;
    alone.snapshot = &snapshot;
    for (int i = 0; i < THREADS; i++) threads[i] = alone;
    run_threads(read_cache, threads, sizeof *threads);
    read_cache(&alone);
    for (int i = 0; i < THREADS; i++) {
        CHECK(!threads[i].failures, "%d calls failed", threads[i].failures);
        CHECK(!memcmp(threads[i].out, alone.out, sizeof alone.out), "thread %d: other bits", i);
        CHECK(!memcmp(threads[i].decoded, alone.decoded, sizeof alone.decoded), "thread %d: decoded otherwise", i);
    }
    stream_free(&snapshot);
    free(q);
    tqkv_cache_destroy(cache);
}

/* ---- The hook: the same bits on any number of threads ---- */

static void check_hook(const void *parameters)
{
    const attend_row *row = (const attend_row *)parameters;
    attend_problem problem;
    attend_set_up(&problem, row);
    size_t bytes = problem.n_rows * problem.head_dim * sizeof(float);
    CHECK_RESULT(tqkv_attend(&problem.attention, problem.q, problem.out), TQKV_OK);
    attend_check(&problem, problem.out, "out");
    float *out = (float *)test_alloc(bytes);
    for (int at_once = 1; at_once <= THREADS; at_once++) {
        problem.attention.parallel.run = run_on_threads;
        problem.attention.parallel.user = &at_once;
        CHECK_RESULT(tqkv_attend(&problem.attention, problem.q, out), TQKV_OK);
        CHECK(!memcmp(out, problem.out, bytes), "%d threads: other bits", at_once);
    }
    free(out);
    attend_tear_down(&problem);
}

void test_threads_cases(void)
{
    static const int hooks[2] = {0, 3};
    test_add(check_own_caches, NULL, 0, "threads/own_caches");
    for (int i = 0; i < 2; i++)
        test_add(check_one_cache, &hooks[i], sizeof *hooks, "threads/one_cache/hook_%d", hooks[i]);
    for (int i = 0; i < 8; i++) {
        attend_row row = attend_default_row(test_formats[i], test_formats[(i + 5) % 8], 64);
        row.end = i % 2 ? 2500 : 300;
        row.key_capacity = row.value_capacity = (int)row.end;
        row.n_queries = i % 2 ? 1 : 40;
        test_add(check_hook, &row, sizeof row, "threads/hook/%d", i);
    }
}

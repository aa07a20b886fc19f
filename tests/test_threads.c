/* The thread rules of tqkv.h, and examples/thread_pool.h as a hook. `make test-tsan` runs this with ThreadSanitizer. */
#include "attend_fixture.h"
#include "cache_fixture.h"
#include "examples/thread_pool.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

enum { THREADS = 6, ROUNDS = 4, QUERIES = 3, DIM = 64, OUT = QUERIES * CACHE_HEADS * CACHE_GROUP * DIM };
enum { HELPERS = 3, DEADLOCK_SECONDS = 60 };

static void report_deadlock(int signal_number)
{
    static const char text[] = "FAIL threads: a case does not end\n";
    (void)signal_number;
    _exit(write(STDOUT_FILENO, text, sizeof text - 1) < 0 ? 2 : 1);
}

/* Starts n_threads <= THREADS with their own contexts, element_size apart, and waits for them. */
static void run_threads(int n_threads, void *(*body)(void *context), void *contexts, size_t element_size)
{
    pthread_t threads[THREADS];
    signal(SIGALRM, report_deadlock);
    alarm(DEADLOCK_SECONDS);
    for (int i = 0; i < n_threads; i++)
        if (pthread_create(&threads[i], NULL, body, (char *)contexts + (size_t)i * element_size)) exit(2);
    for (int i = 0; i < n_threads; i++) pthread_join(threads[i], NULL);
    alarm(0);
}

/* ---- A hook that gives every task its own thread, a few at a time ---- */

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

/* All calls of a cache, on a cache that no other thread uses. */
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
    tqkv_isa_force(NULL); /* the first thread chooses again */
    run_threads(THREADS, live_with_cache, together, sizeof *together);
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

typedef struct reading_row {
    const char *name;
    int at_once; /* tasks at once of run_on_threads; 0: another hook, or none */
    bool pool;   /* the hook is examples/thread_pool.h */
    bool nested; /* the readers are tasks of that pool, not threads of their own */
} reading_row;

static const reading_row reading_rows[] = {
    {"hook_0", 0, false, false}, {"hook_3", 3, false, false}, {"pool", 0, true, false}, {"pool_nested", 0, true, true}};

typedef struct reading_pool {
    thread_pool *pool;
    reading_thread *readers;
} reading_pool;

static void read_cache_task(void *context, int index) { read_cache(&((reading_thread *)context)[index]); }

static void *read_cache_in_pool(void *context)
{
    reading_pool *readers = (reading_pool *)context;
    pool_run(readers->pool, THREADS, read_cache_task, readers->readers);
    return NULL;
}

static void check_one_cache(const void *parameters)
{
    const reading_row *reading = (const reading_row *)parameters;
    int at_once = reading->at_once;
    thread_pool pool;
    pool_start(&pool, HELPERS);
    cache_row row = {TQKV_I8, TQKV_TQ4, DIM, 3000, true, 3100, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    if (at_once) desc.parallel.run = run_on_threads, desc.parallel.user = &at_once;
    if (reading->pool) desc.parallel.run = pool_run, desc.parallel.user = &pool;
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
    reading_pool in_pool = {&pool, threads};
    if (reading->nested)
        run_threads(1, read_cache_in_pool, &in_pool, sizeof in_pool);
    else
        run_threads(THREADS, read_cache, threads, sizeof *threads);
    read_cache(&alone);
    for (int i = 0; i < THREADS; i++) {
        CHECK(!threads[i].failures, "%d calls failed", threads[i].failures);
        CHECK(!memcmp(threads[i].out, alone.out, sizeof alone.out), "thread %d: other bits", i);
        CHECK(!memcmp(threads[i].decoded, alone.decoded, sizeof alone.decoded), "thread %d: decoded otherwise", i);
    }
    stream_free(&snapshot);
    free(q);
    tqkv_cache_destroy(cache);
    pool_stop(&pool);
}

/* ---- examples/thread_pool.h: each task runs once and has ended when its run returns ---- */

enum { MOST_TASKS = 1000, RUNS = 200 };

typedef struct pool_row {
    const char *name;
    int n_helpers, n_callers, count;
    int depth; /* 1: plain tasks; above: each task runs `count` tasks of depth - 1 on the same pool */
} pool_row;

static const pool_row pool_rows[] = {{"no_task", HELPERS, 1, 0, 1},
                                     {"one_task", HELPERS, 1, 1, 1},
                                     {"many_tasks", HELPERS, 1, MOST_TASKS, 1},
                                     {"two_callers", HELPERS, 2, 9, 1},
                                     {"callers", HELPERS, THREADS, 9, 1},
                                     {"nested", HELPERS, 1, 5, 2},
                                     {"nested_twice", HELPERS, 1, 4, 3},
                                     {"nested_callers", HELPERS, THREADS, 4, 2},
                                     {"no_helper", 0, 2, 4, 2}};

typedef struct pool_caller {
    const pool_row *row;
    thread_pool *pool;
    int failures;
} pool_caller;

typedef struct counted_job {
    thread_pool *pool;
    int count, depth, runs[MOST_TASKS];
} counted_job;

static int run_counted_job(thread_pool *pool, int count, int depth);

static void counted_task(void *context, int index)
{
    counted_job *job = (counted_job *)context;
    const int failures = job->depth > 1 ? run_counted_job(job->pool, job->count, job->depth - 1) : 0;
    sched_yield(); /* other callers come in while this task runs */
    job->runs[index] += 1 + failures;
}

/* The number of tasks that did not run exactly once, or whose own tasks did not. */
static int run_counted_job(thread_pool *pool, int count, int depth)
{
    counted_job job;
    memset(&job, 0, sizeof job);
    job.pool = pool;
    job.count = count;
    job.depth = depth;
    pool_run(pool, count, counted_task, &job);
    int failures = 0;
    for (int i = 0; i < MOST_TASKS; i++) failures += job.runs[i] != (i < count);
    return failures;
}

static void *call_pool(void *context)
{
    pool_caller *caller = (pool_caller *)context;
    for (int i = 0; i < RUNS; i++) {
        caller->failures += run_counted_job(caller->pool, caller->row->count, caller->row->depth);
        caller->failures += run_counted_job(caller->pool, 2, 1); /* the job before has left nothing behind */
    }
    return NULL;
}

static void check_pool(const void *parameters)
{
    const pool_row *row = (const pool_row *)parameters;
    thread_pool pool;
    pool_caller callers[THREADS];
    pool_start(&pool, row->n_helpers);
    for (int i = 0; i < THREADS; i++) {
        const pool_caller caller = {row, &pool, 0};
        callers[i] = caller;
    }
    run_threads(row->n_callers, call_pool, callers, sizeof *callers);
    pool_stop(&pool);
    for (int i = 0; i < row->n_callers; i++)
        CHECK(!callers[i].failures, "caller %d: %d tasks not run once", i, callers[i].failures);
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
    test_add(check_own_caches, NULL, 0, "threads/own_caches");
    for (size_t i = 0; i < sizeof reading_rows / sizeof *reading_rows; i++)
        test_add(check_one_cache, &reading_rows[i], sizeof *reading_rows, "threads/one_cache/%s", reading_rows[i].name);
    for (size_t i = 0; i < sizeof pool_rows / sizeof *pool_rows; i++)
        test_add(check_pool, &pool_rows[i], sizeof *pool_rows, "threads/pool/%s", pool_rows[i].name);
    for (int i = 0; i < TEST_FORMATS; i++) {
        attend_row row = attend_default_row(test_formats[i], test_formats[(i + 5) % TEST_FORMATS], 64);
        row.end = i % 2 ? 2500 : 300;
        row.key_capacity = row.value_capacity = (int)row.end;
        row.n_queries = i % 2 ? 1 : 40;
        test_add(check_hook, &row, sizeof row, "threads/hook/%d", i);
    }
}

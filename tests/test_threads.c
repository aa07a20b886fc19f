/* The thread rules of tqkv.h, with examples/thread_pool.h and examples/thread_team.h as hooks. `make test-tsan` runs
 * this with ThreadSanitizer. */
#include "attend_fixture.h"
#include "cache_fixture.h"
#include "examples/thread_pool.h"
#include "examples/thread_team.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

enum { THREADS = 6, ROUNDS = 2, QUERIES = 3, DIM = 64, OUT = QUERIES * CACHE_HEADS * CACHE_GROUP * DIM };
enum { HELPERS = 3, DEADLOCK_SECONDS = 300 };

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

static void check_own_caches(NO_ROW)
{
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
        t->failures += tqkv_decode(test_keys(t->cache), end - 5, 5, TQKV_ORIGINAL, t->decoded) != TQKV_OK;
        t->failures += tqkv_cache_bytes(t->cache) == 0;
        stream_free(&s);
    }
    return NULL;
}

typedef struct reading_row {
    const char *name;
    bool pool;   /* the hook is examples/thread_pool.h */
    bool nested; /* the readers are tasks of that pool, not threads of their own */
} reading_row;

static const reading_row reading_rows[] = {
    {"no_hook", false, false}, {"pool", true, false}, {"pool_nested", true, true}};

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
    thread_pool pool;
    pool_start(&pool, HELPERS);
    cache_row row = {TQKV_I8, TQKV_TQ4, DIM, 3000, true, 3100, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
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

enum { MOST_TASKS = 1000, RUNS = 50 };

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

/* ---- A team: threads that are there already ---- */

enum { TEAM_PROMPT = 400, TEAM_LONG = 2600, TEAM_ITEMS = 3, TEAM_ROW = CACHE_HEADS * DIM };
enum { TEAM_CHUNKS = 4, TEAM_WIDE = QUERIES * CACHE_HEADS * CACHE_GROUP * DIM };

typedef struct team_work {
    thread_team *team; /* NULL: none */
    int n_threads, calls_failed;
    tqkv_store stores[2]; /* keys, values */
    tqkv_cache *cache;
    const float *rows, *q;
    int32_t slots[TEAM_PROMPT]; /* of the last positions, backwards */
    float one[TEAM_WIDE], items[TEAM_ITEMS][TEAM_WIDE], cached[TEAM_CHUNKS][TEAM_WIDE];
} team_work;

static void team_work_open(team_work *w, thread_team *team, int n_threads, const float *rows, const float *q)
{
    const cache_row row = {TQKV_I8, TQKV_TQ3, DIM, TEAM_LONG, true, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    memset(w, 0, sizeof *w);
    desc.calibrate = TEAM_PROMPT / 2;
    desc.exact_first = 4;
    desc.exact_last = 20;
    w->team = team;
    w->n_threads = n_threads;
    w->rows = rows;
    w->q = q;
    w->stores[0] = test_store(TQKV_TQ5, DIM, CACHE_HEADS, TEAM_LONG, false);
    w->stores[1] = test_store(TQKV_TQ4, DIM, CACHE_HEADS, TEAM_LONG, false);
    for (int i = 0; i < TEAM_PROMPT; i++) w->slots[i] = TEAM_LONG - 1 - i;
    if (team) {
        desc.parallel = team_parallel(team);
        desc.allocator = team_allocator(team);
        w->stores[0].parallel = w->stores[1].parallel = desc.parallel;
    }
    CHECK_RESULT(tqkv_cache_create(&desc, &w->cache), TQKV_OK);
}

static void team_work_close(team_work *w)
{
    test_store_free(&w->stores[0]);
    test_store_free(&w->stores[1]);
    tqkv_cache_destroy(w->cache);
}

/* Every call that takes a hook: a prompt, single tokens, one long and several short contexts, a cache that learns. */
static void do_team_work(team_work *w)
{
    tqkv_attention a, items[TEAM_ITEMS];
    const void *queries[TEAM_ITEMS];
    void *outs[TEAM_ITEMS];
    int bad = 0;
    const float *last = w->rows + (TEAM_LONG - TEAM_PROMPT) * TEAM_ROW;
    memset(&a, 0, sizeof a);
    a.keys = &w->stores[0];
    a.values = &w->stores[1];
    a.n_heads = CACHE_HEADS * CACHE_GROUP;
    a.n_queries = QUERIES;
    a.end = TEAM_LONG;
    if (w->team) {
        a.parallel = team_parallel(w->team);
        a.allocator = team_allocator(w->team);
    }
    for (int i = 0; i < 2; i++) {
        bad += tqkv_encode(&w->stores[i], w->rows, TEAM_LONG - TEAM_PROMPT - 1, 0) != TQKV_OK;
        bad += tqkv_encode(&w->stores[i], last - TEAM_ROW, 1, TEAM_LONG - TEAM_PROMPT - 1) != TQKV_OK;
        bad += test_encode_slots(&w->stores[i], last, TEAM_PROMPT, w->slots) != TQKV_OK;
    }
    bad += tqkv_attend(&a, w->q, w->one) != TQKV_OK;
    for (int i = 0; i < TEAM_ITEMS; i++) {
        items[i] = a;
        items[i].end = i == 1 ? TEAM_LONG : 9 * (i + 1);
        queries[i] = w->q;
        outs[i] = w->items[i];
    }
    bad += tqkv_attend_batch(items, TEAM_ITEMS, queries, outs) != TQKV_OK;
    bad += tqkv_cache_truncate(w->cache, 0) != TQKV_OK; /* it learns again */
    for (int i = 0; i < TEAM_CHUNKS; i++) {
        const float *chunk = w->rows + i * (TEAM_PROMPT / TEAM_CHUNKS) * TEAM_ROW;
        bad += tqkv_cache_append(w->cache, chunk, chunk, TEAM_PROMPT / TEAM_CHUNKS) != TQKV_OK;
        bad += tqkv_cache_attend(w->cache, w->q, QUERIES, w->cached[i]) != TQKV_OK;
    }
    w->calls_failed += bad;
}

typedef struct team_thread {
    team_work *work;
    int index;
} team_thread;

static void *work_in_team(void *context)
{
    team_thread *t = (team_thread *)context;
    for (int round = 0; round < ROUNDS; round++) {
        if (!team_begin(t->work->team, t->index, t->work->n_threads)) continue;
        do_team_work(t->work);
        team_end(t->work->team);
    }
    return NULL;
}

static void check_team(const void *parameters)
{
    const int n_threads = *(const int *)parameters;
    counting counter;
    static team_work together, alone;
    team_thread threads[THREADS];
    memset(&counter, 0, sizeof counter);
    thread_team one_team, *team = &one_team;
    memset(team, 0, sizeof *team);
    team->memory = counting_allocator(&counter);
    float *rows = cache_data(41, TEAM_LONG, DIM), *q = test_rows(42, DATA_GAUSSIAN, TEAM_WIDE / DIM, DIM);
    team_work_open(&together, team, n_threads, rows, q);
    team_work_open(&alone, NULL, 1, rows, q);
    for (int i = 0; i < n_threads; i++) {
        const team_thread one = {&together, i};
        threads[i] = one;
    }
    for (int round = 0; round < ROUNDS; round++) do_team_work(&alone);
    run_threads(n_threads, work_in_team, threads, sizeof *threads);
    const int calls = counter.calls;
    run_threads(n_threads, work_in_team, threads, sizeof *threads);
    CHECK(counter.calls == calls, "%d allocations after the first calls", counter.calls - calls);
    for (int round = 0; round < ROUNDS; round++) do_team_work(&alone);
    do_team_work(&together); /* the hook outside of begin and end: this thread alone */
    do_team_work(&alone);
    CHECK(!together.calls_failed && !alone.calls_failed, "%d calls failed", together.calls_failed);
    CHECK(!memcmp(together.one, alone.one, sizeof alone.one), "attend: other bits");
    CHECK(!memcmp(together.items, alone.items, sizeof alone.items), "attend_batch: other bits");
    CHECK(!memcmp(together.cached, alone.cached, sizeof alone.cached), "the cache: other bits");
    for (int i = 0; i < 2; i++)
        CHECK(!memcmp(together.stores[i].codes, alone.stores[i].codes, alone.stores[i].codes_size), "other codes");
    stream saved[2] = {stream_of_cache(together.cache), stream_of_cache(alone.cache)};
    CHECK(stream_is_equal(&saved[0], &saved[1]), "the cache holds other bytes");
    stream_free(&saved[0]);
    stream_free(&saved[1]);
    team_work_close(&together);
    team_work_close(&alone);
    team_release(team);
    CHECK_NO_LEAK(&counter);
    free(rows);
    free(q);
}

/* A source with NaN, and an allocator that fails, leave a team as it was. */
static void check_team_refusals(NO_ROW)
{
    counting counter;
    memset(&counter, 0, sizeof counter);
    thread_team one_team, *team = &one_team;
    memset(team, 0, sizeof *team);
    team->memory = counting_allocator(&counter);
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    attend_problem problem;
    attend_set_up(&problem, &row);
    problem.attention.parallel = team_parallel(team);
    problem.attention.allocator = team_allocator(team);
    problem.keys.parallel = problem.attention.parallel;
    counter.fail_at = counter.calls + 1;
    CHECK_RESULT(tqkv_attend(&problem.attention, problem.q, problem.out), TQKV_OUT_OF_MEMORY);
    CHECK_RESULT(tqkv_attend(&problem.attention, problem.q, problem.out), TQKV_OK);
    attend_check(&problem, problem.out, "out");
    float *source = test_rows(5, DATA_GAUSSIAN, 40 * 2 * 8, 64);
    source[40 * 2 * 64 - 1] = (float)NAN;
    CHECK_RESULT(tqkv_encode(&problem.keys, source, 40, 0), TQKV_NOT_FINITE);
    CHECK_RESULT(tqkv_attend(&problem.attention, problem.q, problem.out), TQKV_OK);
    attend_check(&problem, problem.out, "after a refused encode");
    const tqkv_allocator scratch = team_allocator(team);
    void *one = scratch.alloc(scratch.user, 0), *other = scratch.alloc(scratch.user, 0);
    CHECK(one && other && one != other, "blocks of no bytes: %p, %p", one, other);
    scratch.free(scratch.user, one, 0);
    scratch.free(scratch.user, other, 0);
    free(source);
    attend_tear_down(&problem);
    team_release(team);
    CHECK_NO_LEAK(&counter);
}

/* ---- One store, written by many: each thread its own slots; others attend to older ones ---- */

enum { OLD = 70, OWN = 37 };

typedef struct writing_thread {
    tqkv_store keys, values;
    const float *rows, *q;
    int index, failures;
    float out[CACHE_HEADS * DIM];
} writing_thread;

static void *write_slots(void *context)
{
    writing_thread *t = (writing_thread *)context;
    const int first = OLD + t->index / 2 * OWN;
    int32_t slots[OWN];
    tqkv_attention a;
    memset(&a, 0, sizeof a);
    a.keys = &t->keys;
    a.values = &t->values;
    a.n_heads = CACHE_HEADS;
    a.n_queries = 1;
    a.end = OLD;
    const float *own = t->rows + (size_t)first * TEAM_ROW;
    for (int i = 0; i < OWN; i++) slots[i] = first + i;
    for (int round = 0; round < ROUNDS; round++) {
        if (t->index % 2) {
            t->failures += tqkv_attend(&a, t->q, t->out) != TQKV_OK;
            continue;
        }
        t->failures += tqkv_encode(&t->keys, own, OWN, first) != TQKV_OK;
        t->failures += test_encode_slots(&t->values, own, OWN, slots) != TQKV_OK;
    }
    return NULL;
}

static void check_one_store(const void *parameters)
{
    const int index = *(const int *)parameters, total = OLD + THREADS / 2 * OWN;
    static writing_thread threads[THREADS];
    tqkv_store keys = test_store(test_formats[index], DIM, CACHE_HEADS, total, false), alone = keys;
    tqkv_store values = test_store(test_formats[(index + 3) % TEST_FORMATS], DIM, CACHE_HEADS, total, false);
    float *rows = cache_data(43, total, DIM), *q = test_rows(44, DATA_GAUSSIAN, CACHE_HEADS, DIM);
    alone = test_store(keys.format, DIM, CACHE_HEADS, total, false);
    CHECK_RESULT(tqkv_encode(&keys, rows, OLD, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&values, rows, OLD, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&alone, rows, total, 0), TQKV_OK);
    memset(threads, 0, sizeof threads);
    for (int i = 0; i < THREADS; i++) {
        threads[i].keys = keys;
        threads[i].values = values;
        threads[i].rows = rows;
        threads[i].q = q;
        threads[i].index = i;
    }
    write_slots(&threads[1]); /* what all readers expect */
    run_threads(THREADS, write_slots, threads, sizeof *threads);
    for (int i = 0; i < THREADS; i++) CHECK(!threads[i].failures, "%d calls failed", threads[i].failures);
    for (int i = 3; i < THREADS; i += 2)
        CHECK(!memcmp(threads[i].out, threads[1].out, sizeof threads[1].out), "other bits beside an encode");
    CHECK(!memcmp(keys.codes, alone.codes, keys.codes_size), "other codes");
    test_store_free(&keys);
    test_store_free(&values);
    test_store_free(&alone);
    free(rows);
    free(q);
}

void test_threads_cases(void)
{
    test_add(check_own_caches, NULL, 0, "threads/own_caches");
    for (int n = 1; n <= THREADS; n += 1 + n / 2) test_add(check_team, &n, sizeof n, "threads/team/%d", n);
    test_add(check_team_refusals, NULL, 0, "threads/team/refusals");
    for (int i = 0; i < TEST_FORMATS; i += 3) test_add(check_one_store, &i, sizeof i, "threads/one_store/%d", i);
    for (size_t i = 0; i < sizeof reading_rows / sizeof *reading_rows; i++)
        test_add(check_one_cache, &reading_rows[i], sizeof *reading_rows, "threads/one_cache/%s", reading_rows[i].name);
    for (size_t i = 0; i < sizeof pool_rows / sizeof *pool_rows; i++)
        test_add(check_pool, &pool_rows[i], sizeof *pool_rows, "threads/pool/%s", pool_rows[i].name);
}

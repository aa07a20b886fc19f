/* A small pthread pool behind the tqkv_parallel hook.
 *
 * Any number of threads may call pool_run at once, and so may a task that the pool runs. Each call is a job in a list.
 * The caller takes tasks of its own job until none is left, then waits for those that other threads took. This cannot
 * deadlock: a thread waits only for tasks that already run, and these wait only for jobs that they started themselves.
 * So every wait goes one level deeper, and the deepest job has nothing to wait for. */
#ifndef THREAD_POOL_H
#define THREAD_POOL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

enum { POOL_MAX_THREADS = 16 };

/* One call of pool_run. It lives on the stack of its caller, which stays until the last task has ended. */
typedef struct pool_job {
    void (*task)(void *context, int index);
    void *context;
    int next, count;       /* tasks [next, count) are still to be taken */
    int unfinished;        /* tasks that have not ended */
    struct pool_job *link; /* in thread_pool.jobs */
} pool_job;

typedef struct thread_pool {
    pthread_t threads[POOL_MAX_THREADS];
    int n_threads; /* helpers beside the calling threads */

    pthread_mutex_t lock; /* guards all that follows, and every job */
    pthread_cond_t work;  /* a job has come, or the pool stops */
    pthread_cond_t done;  /* the last task of a job has ended */
    pool_job *jobs;       /* those with tasks to take, the newest first */
    bool stop;
} thread_pool;

/* Takes the job's next task and runs it. Called and left with the lock held; the task runs without it. */
static void pool_run_next(thread_pool *pool, pool_job *job)
{
    const int index = job->next++;
    if (job->next == job->count) {
        pool_job **at = &pool->jobs;
        while (*at != job) at = &(*at)->link;
        *at = job->link;
    }
    pthread_mutex_unlock(&pool->lock);
    job->task(job->context, index);
    pthread_mutex_lock(&pool->lock);
    if (--job->unfinished == 0) pthread_cond_broadcast(&pool->done);
}

/* The hook: tqkv_parallel parallel = {pool_run, &pool}. */
static void pool_run(void *user, int count, void (*task)(void *context, int index), void *context)
{
    thread_pool *pool = (thread_pool *)user;
    if (count < 1) return;
    pthread_mutex_lock(&pool->lock);
    pool_job job = {task, context, 0, count, count, pool->jobs};
    pool->jobs = &job;
    if (count > 1) pthread_cond_broadcast(&pool->work);
    while (job.next < job.count) pool_run_next(pool, &job);
    while (job.unfinished > 0) pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

static void *pool_thread(void *user)
{
    thread_pool *pool = (thread_pool *)user;
    pthread_mutex_lock(&pool->lock);
    while (!pool->stop) {
        if (pool->jobs)
            pool_run_next(pool, pool->jobs);
        else
            pthread_cond_wait(&pool->work, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* A pool with fewer helpers than requested, or none, is slower but works. */
static void pool_start(thread_pool *pool, int n_helpers)
{
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->jobs = NULL;
    pool->stop = false;
    pool->n_threads = 0;
    while (pool->n_threads < n_helpers && pool->n_threads < POOL_MAX_THREADS &&
           pthread_create(&pool->threads[pool->n_threads], NULL, pool_thread, pool) == 0)
        pool->n_threads++;
}

/* No pool_run may be under way. */
static void pool_stop(thread_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->n_threads; i++) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
}

#endif

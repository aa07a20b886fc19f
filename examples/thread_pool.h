/* A small pthread pool behind the tqkv_parallel hook. Any pool that runs a task for each index and waits will do. */
#ifndef THREAD_POOL_H
#define THREAD_POOL_H

#include <pthread.h>
#include <stdbool.h>

enum { POOL_MAX_THREADS = 16 };

typedef struct thread_pool {
    pthread_t threads[POOL_MAX_THREADS];
    int n_threads; /* helpers beside the calling thread */
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    void (*task)(void *context, int index);
    void *context;
    int next, count, running;
    bool stop;
} thread_pool;

/* Takes indices until none is left. Called and left with the lock held. */
static void pool_work(thread_pool *pool)
{
    pool->running++;
    while (pool->next < pool->count) {
        int index = pool->next++;
        pthread_mutex_unlock(&pool->lock);
        pool->task(pool->context, index);
        pthread_mutex_lock(&pool->lock);
    }
    if (--pool->running == 0) pthread_cond_signal(&pool->done);
}

static void *pool_thread(void *user)
{
    thread_pool *pool = (thread_pool *)user;
    pthread_mutex_lock(&pool->lock);
    while (!pool->stop) {
        if (pool->next < pool->count)
            pool_work(pool);
        else
            pthread_cond_wait(&pool->work, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* The hook: tqkv_parallel parallel = {pool_run, &pool}. */
static void pool_run(void *user, int count, void (*task)(void *context, int index), void *context)
{
    thread_pool *pool = (thread_pool *)user;
    pthread_mutex_lock(&pool->lock);
    pool->task = task;
    pool->context = context;
    pool->next = 0;
    pool->count = count;
    if (count > 1) pthread_cond_broadcast(&pool->work);
    pool_work(pool);
    while (pool->running > 0) pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

static void pool_start(thread_pool *pool, int n_helpers)
{
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->n_threads = pool->next = pool->count = pool->running = 0;
    pool->stop = false;
    while (pool->n_threads < n_helpers && pool->n_threads < POOL_MAX_THREADS &&
           pthread_create(&pool->threads[pool->n_threads], NULL, pool_thread, pool) == 0)
        pool->n_threads++;
}

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

/* The hook for threads: those of OpenMP, which ggml uses, too, so that both share one set; else a pool of its own. */
#pragma once
#include "tqkv.h"

#ifdef _OPENMP
#include <omp.h>
#else
#include "thread_pool.h"
#endif

namespace tqkv_llama
{

#ifdef _OPENMP
/* The team has as many threads as ggml's, also for fewer tasks: libgomp ends threads that a smaller team leaves out and
   starts them anew for the next one. */
inline void run_tasks(void *user, int count, tqkv_task task, void *context)
{
    const int n = *(const int *)user;
#pragma omp parallel for schedule(dynamic, 1) num_threads(n) if (n > 1 && count > 1)
    for (int i = 0; i < count; i++) task(context, i);
}

/* n_threads: read at each call. */
inline tqkv_parallel threads_hook(int *n_threads) { return {run_tasks, n_threads}; }
#else
inline tqkv_parallel threads_hook(int *n_threads)
{
    static thread_pool pool;
    static const bool started = (pool_start(&pool, *n_threads - 1), true);
    (void)started;
    return {pool_run, &pool};
}
#endif

} // namespace tqkv_llama

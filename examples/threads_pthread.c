/* Attention on several threads with pthreads: the hook gives the tasks of a call to a pool (thread_pool.h). */
#define _POSIX_C_SOURCE 200809L
#include "threads_demo.h"
#include "thread_pool.h"

enum { HELPERS = 3 };

int main(void)
{
    static thread_pool pool;
    pool_start(&pool, HELPERS);
    const int status = demo_compare((tqkv_parallel){pool_run, &pool}, 1 + pool.n_threads);
    pool_stop(&pool);
    return status;
}

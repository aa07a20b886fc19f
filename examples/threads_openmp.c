/* Attention on several threads with OpenMP: the hook is one parallel loop. Compile with -fopenmp; without it the loop
   runs on the calling thread. Several threads may call the hook at once: OpenMP gives each its own team of THREADS.
   Inside another parallel region the loop runs on the calling thread, unless OMP_MAX_ACTIVE_LEVELS is above 1. */
#define _POSIX_C_SOURCE 200809L
#include "threads_demo.h"

enum { THREADS = 4 };

static void run(void *user, int count, tqkv_task task, void *context)
{
    (void)user;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) num_threads(THREADS)
#endif
    for (int i = 0; i < count; i++) task(context, i); /* the bits of the result do not depend on order or thread */
}

int main(void) { return demo_compare((tqkv_parallel){run, NULL}, THREADS); }

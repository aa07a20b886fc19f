/* A hook for threads that are there already: of an engine that calls each operation on all its threads at once, as ggml
 * does, and has no pool to lend. All call team_begin. It returns true in thread 0, whose calls to tqkv the others then
 * help with; in these it returns false after team_end, when there is nothing left to do. Example:
 *
 *     void attend_layer(layer *l, int thread, int n_threads)       // on all threads, with one l
 *     {
 *         if (!team_begin(l->team, thread, n_threads)) return;
 *         l->result = tqkv_encode(&l->keys, l->k, 1, l->position); // l->keys.parallel = team_parallel(l->team)
 *         if (l->result == TQKV_OK) l->result = tqkv_encode(&l->values, l->v, 1, l->position);
 *         l->attention.end = l->position + 1;                      // l->attention.parallel: the same
 *         if (l->result == TQKV_OK) l->result = tqkv_attend(&l->attention, l->q, l->out);
 *         team_end(l->team);
 *     }
 *
 * Thread 0 begins at once; its team_end, and team_begin in the others, wait until all n_threads threads have come to
 * team_begin. The next begin may follow at once; another number of threads only after all have returned. Waiting
 * threads spin, and after a while give way to others. One team serves all layers; two operations at once need two. A
 * team begins as zeros, or with an allocator in `memory`. */
#ifndef THREAD_TEAM_H
#define THREAD_TEAM_H

#include "tqkv.h"
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { TEAM_KEPT = 4 };

/* Fields that threads write at different times lie on different cache lines. */
typedef struct thread_team {
    tqkv_allocator memory;
    uint8_t *kept[TEAM_KEPT];    /* scratch that is not in use */
    size_t kept_size[TEAM_KEPT]; /* 0: none */
    /* One run of the hook. Thread 0 writes these while no other thread is inside. */
    tqkv_task task;
    void *context;
    int count;
    unsigned n_runs;
    char line_0[64];
    int next; /* the next task */
    char line_1[64];
    unsigned open; /* the number of the run whose tasks may be taken, or 0 */
    char line_2[64];
    int inside; /* threads beside thread 0 that may be taking tasks */
    char line_3[64];
    int n_threads, arrived, left; /* of this begin */
    bool full, ended;             /* all threads have arrived; thread 0 has ended it */
} thread_team;

enum { TEAM_KEPT_HEADER = 64, TEAM_KEPT_MOST = 1 << 26 }; /* larger memory is of caches, not scratch */

/* Memory begins with its size, which may be above what was asked for. */
static void *team_alloc(void *user, size_t size)
{
    thread_team *team = (thread_team *)user;
    int best = -1; /* the smallest of those kept that is large enough */
    for (int i = 0; i < TEAM_KEPT; i++)
        if (team->kept_size[i] && team->kept_size[i] >= size &&
            (best < 0 || team->kept_size[i] < team->kept_size[best]))
            best = i;
    uint8_t *memory = NULL;
    if (best >= 0) {
        memory = team->kept[best];
        team->kept_size[best] = 0;
    } else if (size <= SIZE_MAX - TEAM_KEPT_HEADER) {
        memory = (uint8_t *)(team->memory.alloc ? team->memory.alloc(team->memory.user, size + TEAM_KEPT_HEADER)
                                                : malloc(size + TEAM_KEPT_HEADER));
        if (memory) memcpy(memory, &size, sizeof size);
    }
    return memory ? memory + TEAM_KEPT_HEADER : NULL;
}

static void team_drop(thread_team *team, uint8_t *memory, size_t size)
{
    if (team->memory.free)
        team->memory.free(team->memory.user, memory, size + TEAM_KEPT_HEADER);
    else
        free(memory);
}

/* Keeps the largest memory. */
static void team_free(void *user, void *pointer, size_t size)
{
    thread_team *team = (thread_team *)user;
    uint8_t *memory = (uint8_t *)pointer - TEAM_KEPT_HEADER;
    int least = 0;
    memcpy(&size, memory, sizeof size);
    for (int i = 1; i < TEAM_KEPT; i++)
        if (team->kept_size[i] < team->kept_size[least]) least = i;
    if (size > TEAM_KEPT_MOST || size <= team->kept_size[least]) {
        team_drop(team, memory, size);
        return;
    }
    if (team->kept_size[least]) team_drop(team, team->kept[least], team->kept_size[least]);
    team->kept[least] = memory;
    team->kept_size[least] = size;
}

/* Waits for a moment: the other threads are about to come, or lack a core. */
static void team_spin(int *spins)
{
    enum { patience = 100 }; /* some microseconds */
    if (*spins < patience)
        ++*spins;
    else
        (void)sched_yield();
}

static void team_take_tasks(thread_team *team)
{
    while (__atomic_load_n(&team->next, __ATOMIC_RELAXED) <
           team->count) { /* it grows by one a thread beyond the count */
        const int index = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED);
        if (index < team->count) team->task(team->context, index);
    }
}

/* This is the hook. A helper counts itself in before it looks whether tasks are open, and thread 0 closes before it
   looks who is inside: one of them sees the other, so no helper has a task or looks at `task` when this returns. */
static void team_run(void *user, int count, tqkv_task task, void *context)
{
    thread_team *team = (thread_team *)user;
    int spins = 0;
    if (count <= 1) {
        if (count == 1) task(context, 0);
        return;
    }
    team->task = task;
    team->context = context;
    team->count = count;
    if (++team->n_runs == 0) team->n_runs = 1;
    __atomic_store_n(&team->next, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->open, team->n_runs, __ATOMIC_SEQ_CST);
    team_take_tasks(team);
    __atomic_store_n(&team->open, 0, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team->inside, __ATOMIC_SEQ_CST) > 0) team_spin(&spins);
}

/* Runs tasks of thread 0's calls until it has ended and all threads have arrived. */
static void team_help(thread_team *team)
{
    unsigned known = 0; /* the last run, of which no task is left */
    int spins = 0;
    while (!__atomic_load_n(&team->ended, __ATOMIC_ACQUIRE) || !__atomic_load_n(&team->full, __ATOMIC_ACQUIRE)) {
        const unsigned open = __atomic_load_n(&team->open, __ATOMIC_RELAXED);
        team_spin(&spins);
        if (open == 0 || open == known) continue;
        __atomic_fetch_add(&team->inside, 1, __ATOMIC_SEQ_CST);
        known = __atomic_load_n(&team->open, __ATOMIC_SEQ_CST);
        if (known) team_take_tasks(team);
        __atomic_fetch_sub(&team->inside, 1, __ATOMIC_SEQ_CST);
        spins = 0;
    }
}

/* The last thread to leave opens the next begin. */
static void team_leave(thread_team *team, int n_threads)
{
    if (__atomic_add_fetch(&team->left, 1, __ATOMIC_ACQ_REL) < n_threads) return;
    __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->left, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->ended, false, __ATOMIC_RELAXED);
    __atomic_store_n(&team->full, false, __ATOMIC_RELEASE);
}

static bool team_begin(thread_team *team, int thread, int n_threads)
{
    int spins = 0;
    while (__atomic_load_n(&team->full, __ATOMIC_ACQUIRE)) team_spin(&spins); /* some have not left the last one yet */
    if (thread == 0) team->n_threads = n_threads;
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) >= n_threads)
        __atomic_store_n(&team->full, true, __ATOMIC_RELEASE);
    if (thread == 0) return true;
    team_help(team);
    team_leave(team, n_threads);
    return false;
}

static void team_end(thread_team *team)
{
    int spins = 0;
    __atomic_store_n(&team->ended, true, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&team->full, __ATOMIC_ACQUIRE)) team_spin(&spins);
    team_leave(team, team->n_threads);
}

/* Gives the team's scratch back. No thread may be between begin and end; caches in its memory are gone. */
static void team_release(thread_team *team)
{
    for (int i = 0; i < TEAM_KEPT; i++)
        if (team->kept_size[i]) team_drop(team, team->kept[i], team->kept_size[i]);
    memset(team->kept_size, 0, sizeof team->kept_size);
}

/* The hook, for calls of thread 0 between begin and end. Elsewhere the calling thread, one at a time, runs all
 * tasks. */
static tqkv_parallel team_parallel(thread_team *team)
{
    const tqkv_parallel parallel = {team_run, team};
    return parallel;
}

/* Scratch for the same calls, and caches. The team keeps what is freed, so that after the first calls nothing is
 * allocated. */
static tqkv_allocator team_allocator(thread_team *team)
{
    const tqkv_allocator allocator = {team_alloc, team_free, team};
    return allocator;
}

#endif

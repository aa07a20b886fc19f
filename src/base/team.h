/* >>team: tqkv_team */

enum { TQKV__KEPT = 4 };

/* Fields that threads write at different times lie on different cache lines. */
struct tqkv_team {
    tqkv_allocator memory;
    uint8_t *kept[TQKV__KEPT];    /* scratch that is not in use */
    size_t kept_size[TQKV__KEPT]; /* 0: none */
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
};

enum { TQKV__KEPT_HEADER = 64, TQKV__KEPT_MOST = 1 << 26 }; /* larger memory is of caches, not scratch */

/* Memory begins with its size, which may be above what was asked for. */
static void *tqkv__team_alloc(void *user, size_t size)
{
    tqkv_team *team = (tqkv_team *)user;
    int best = -1; /* the smallest of those kept that is large enough */
    for (int i = 0; i < TQKV__KEPT; i++)
        if (team->kept_size[i] && team->kept_size[i] >= size &&
            (best < 0 || team->kept_size[i] < team->kept_size[best]))
            best = i;
    uint8_t *memory = NULL;
    if (best >= 0) {
        memory = team->kept[best];
        team->kept_size[best] = 0;
    } else if (size <= SIZE_MAX - TQKV__KEPT_HEADER) {
        memory = (uint8_t *)team->memory.alloc(team->memory.user, size + TQKV__KEPT_HEADER);
        if (memory) memcpy(memory, &size, sizeof size);
    }
    return memory ? memory + TQKV__KEPT_HEADER : NULL;
}

static void tqkv__drop_memory(tqkv_team *team, uint8_t *memory, size_t size)
{
    team->memory.free(team->memory.user, memory, size + TQKV__KEPT_HEADER);
}

/* Keeps the largest memory. */
static void tqkv__team_free(void *user, void *pointer, size_t size)
{
    tqkv_team *team = (tqkv_team *)user;
    uint8_t *memory = (uint8_t *)pointer - TQKV__KEPT_HEADER;
    int least = 0;
    memcpy(&size, memory, sizeof size);
    for (int i = 1; i < TQKV__KEPT; i++)
        if (team->kept_size[i] < team->kept_size[least]) least = i;
    if (size > TQKV__KEPT_MOST || size <= team->kept_size[least]) {
        tqkv__drop_memory(team, memory, size);
        return;
    }
    if (team->kept_size[least]) tqkv__drop_memory(team, team->kept[least], team->kept_size[least]);
    team->kept[least] = memory;
    team->kept_size[least] = size;
}

/* Waits for a moment: the other threads are about to come, or lack a core. */
static void tqkv__spin(int *spins)
{
    enum { patience = 100 }; /* some microseconds */
    if (*spins < patience) {
        ++*spins;
        TQKV__PAUSE();
        return;
    }
    TQKV__YIELD();
}

static void tqkv__take_tasks(tqkv_team *team)
{
    while (__atomic_load_n(&team->next, __ATOMIC_RELAXED) <
           team->count) { /* it grows by one a thread beyond the count */
        const int index = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED);
        if (index < team->count) team->task(team->context, index);
    }
}

/* This is the hook. A helper counts itself in before it looks whether tasks are open, and thread 0 closes before it
   looks who is inside: one of them sees the other, so no helper has a task or looks at `task` when this returns. */
static void tqkv__team_run(void *user, int count, tqkv_task task, void *context)
{
    tqkv_team *team = (tqkv_team *)user;
    int spins = 0;
    if (count <= 1) {
        tqkv__run_serial(NULL, count, task, context);
        return;
    }
    team->task = task;
    team->context = context;
    team->count = count;
    if (++team->n_runs == 0) team->n_runs = 1;
    __atomic_store_n(&team->next, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->open, team->n_runs, __ATOMIC_SEQ_CST);
    tqkv__take_tasks(team);
    __atomic_store_n(&team->open, 0, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team->inside, __ATOMIC_SEQ_CST) > 0) tqkv__spin(&spins);
}

/* Runs tasks of thread 0's calls until it has ended and all threads have arrived. */
static void tqkv__team_help(tqkv_team *team)
{
    unsigned known = 0; /* the last run, of which no task is left */
    int spins = 0;
    while (!__atomic_load_n(&team->ended, __ATOMIC_ACQUIRE) || !__atomic_load_n(&team->full, __ATOMIC_ACQUIRE)) {
        const unsigned open = __atomic_load_n(&team->open, __ATOMIC_RELAXED);
        tqkv__spin(&spins);
        if (open == 0 || open == known) continue;
        __atomic_fetch_add(&team->inside, 1, __ATOMIC_SEQ_CST);
        known = __atomic_load_n(&team->open, __ATOMIC_SEQ_CST);
        if (known) tqkv__take_tasks(team);
        __atomic_fetch_sub(&team->inside, 1, __ATOMIC_SEQ_CST);
        spins = 0;
    }
}

/* The last thread to leave opens the next begin. */
static void tqkv__team_leave(tqkv_team *team, int n_threads)
{
    if (__atomic_add_fetch(&team->left, 1, __ATOMIC_ACQ_REL) < n_threads) return;
    __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->left, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->ended, false, __ATOMIC_RELAXED);
    __atomic_store_n(&team->full, false, __ATOMIC_RELEASE);
}

TQKV_API bool tqkv_team_begin(tqkv_team *team, int thread, int n_threads)
{
    int spins = 0;
    while (__atomic_load_n(&team->full, __ATOMIC_ACQUIRE)) tqkv__spin(&spins); /* some have not left the last one yet */
    if (thread == 0) team->n_threads = n_threads;
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) >= n_threads)
        __atomic_store_n(&team->full, true, __ATOMIC_RELEASE);
    if (thread == 0) return true;
    tqkv__team_help(team);
    tqkv__team_leave(team, n_threads);
    return false;
}

TQKV_API void tqkv_team_end(tqkv_team *team)
{
    int spins = 0;
    __atomic_store_n(&team->ended, true, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&team->full, __ATOMIC_ACQUIRE)) tqkv__spin(&spins);
    tqkv__team_leave(team, team->n_threads);
}

TQKV__COLD TQKV_API tqkv_result tqkv_team_create(const tqkv_allocator *allocator, tqkv_team **out)
{
    tqkv_allocator memory = {NULL, NULL, NULL};
    if (!out) return TQKV__INVALID("out is NULL");
    *out = NULL;
    if (allocator) memory = *allocator;
    if (!tqkv__resolve_allocator(&memory)) return TQKV__INVALID("allocator: one of alloc and free is missing");
    tqkv_team *team = (tqkv_team *)memory.alloc(memory.user, sizeof *team);
    if (!team) return TQKV_OUT_OF_MEMORY;
    memset(team, 0, sizeof *team);
    team->memory = memory;
    *out = team;
    return TQKV_OK;
}

TQKV__COLD TQKV_API void tqkv_team_destroy(tqkv_team *team)
{
    if (!team) return;
    const tqkv_allocator memory = team->memory;
    for (int i = 0; i < TQKV__KEPT; i++)
        if (team->kept_size[i]) tqkv__drop_memory(team, team->kept[i], team->kept_size[i]);
    memory.free(memory.user, team, sizeof *team);
}

TQKV_API tqkv_parallel tqkv_team_parallel(tqkv_team *team)
{
    const tqkv_parallel parallel = {tqkv__team_run, team};
    return parallel;
}

TQKV_API tqkv_allocator tqkv_team_allocator(tqkv_team *team)
{
    const tqkv_allocator allocator = {tqkv__team_alloc, tqkv__team_free, team};
    return allocator;
}

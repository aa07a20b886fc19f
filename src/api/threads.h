/* >>threads
   A hook for threads that are there already: of an engine that calls each operation on all its threads at once, as ggml
   does, and has no pool to lend. All call tqkv_team_begin. It returns true in thread 0, whose calls to tqkv the others
   then help with; in these it returns false after tqkv_team_end, when there is nothing left to do. Example:

     void attend_layer(layer *l, int thread, int n_threads)          // on all threads, with one l
     {
         if (!tqkv_team_begin(l->team, thread, n_threads)) return;
         l->result = tqkv_encode(&l->keys, l->k, 1, l->position);    // l->keys.parallel = tqkv_team_parallel(l->team)
         if (l->result == TQKV_OK) l->result = tqkv_encode(&l->values, l->v, 1, l->position);
         l->attention.end = l->position + 1;                         // l->attention.parallel: the same
         if (l->result == TQKV_OK) l->result = tqkv_attend(&l->attention, l->q, l->out);
         tqkv_team_end(l->team);
     }

   Thread 0 begins at once; its tqkv_team_end, and tqkv_team_begin in the others, wait until all n_threads threads have
   come to tqkv_team_begin. The next begin may follow at once; another number of threads only after all have returned.
   Waiting threads spin, and after a while give way to others. One team serves all layers; two operations at once need
   two. */
typedef struct tqkv_team tqkv_team;
/* allocator: NULL = malloc, free. *out is NULL on failure. */
TQKV_API tqkv_result tqkv_team_create(const tqkv_allocator *allocator, tqkv_team **out);
TQKV_API void tqkv_team_destroy(tqkv_team *team); /* NULL is fine. No thread may be between begin and end. */
TQKV_API bool tqkv_team_begin(tqkv_team *team, int thread, int n_threads);
TQKV_API void tqkv_team_end(tqkv_team *team); /* by thread 0 */
/* The hook, for calls of thread 0 between begin and end. Elsewhere the calling thread, one at a time, runs all
   tasks. */
TQKV_API tqkv_parallel tqkv_team_parallel(tqkv_team *team);
/* Scratch for the same calls, and caches, which must be destroyed before the team. The team keeps what is freed, so
   that after the first calls nothing is allocated. */
TQKV_API tqkv_allocator tqkv_team_allocator(tqkv_team *team);

/* >>isa
   The instruction set in use: "avx512" (with VBMI and VNNI), "avx2" (with FMA), "neon" or "scalar". The first call
   chooses the best set of the processor, or the one named by the environment variable TQKV_ISA: where that one is not
   there, TQKV_EXPLAIN gets a sentence. Codes and norms are the same in all sets; attention differs in the last bits. */
TQKV_API const char *tqkv_isa_name(void);
/* For tests: uses that set from now on, in all threads. NULL: chooses again. TQKV_INVALID_ARGUMENT for an unknown name,
   TQKV_UNSUPPORTED if the processor lacks the set. */
TQKV_API tqkv_result tqkv_isa_force(const char *name);

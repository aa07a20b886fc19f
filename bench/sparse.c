/* Lists of blocks, and the index that chooses them. */
#include "bench.h"
#include "../examples/thread_pool.h"

enum { LISTED = 2048, LISTED_OF = 32768, INDEX_KEYS = 262144, INDEX_HEADS = 64 };
static const int list_blocks[] = {1, 16, 64};

/* LISTED / block of the blocks at random, ascending, of each of the others' gaps alike. list: [LISTED] */
static void random_list(int block, int32_t *list)
{
    const int n = LISTED / block, every = LISTED_OF / LISTED;
    uint64_t seed = 7;
    for (int i = 0; i < n; i++) {
        list[i] = i * every + (int)((bench_random(&seed) >> 33) % (uint64_t)every);
    }
}

typedef struct list_shape {
    int head_dim, group;
} list_shape;

/* A list of 2,048 of 32,768 positions beside all of them. The ratio: speed, of that without a list; by wall time if
   there is a hook. */
static void run_lists(bench *b, const pair *p, list_shape shape, const float *q, float *out, tqkv_parallel hook,
                      const char *suffix)
{
    static timing t;
    static int32_t lists[COUNT(list_blocks)][LISTED];
    const timing_limits limits = limits_of(&b->options);
    attend_work works[COUNT(list_blocks) + 1];
    t.n_entries = 0;
    for (int i = 0; i <= COUNT(list_blocks); i++) {
        char name[TIMING_NAME] = "all";
        works[i] = (attend_work){{.n_heads = BENCH_KV_HEADS * shape.group, .n_queries = 1, .end = LISTED_OF},
                                 &b->keys[p->keys],
                                 &b->values[p->values],
                                 0,
                                 q,
                                 out};
        works[i].attention.parallel = hook;
        if (i) {
            snprintf(name, sizeof name, "blocks_of_%d", list_blocks[i - 1]);
            random_list(list_blocks[i - 1], lists[i - 1]);
            works[i].attention.list.rows = lists[i - 1];
            works[i].attention.list.block = list_blocks[i - 1];
            works[i].attention.list.length = LISTED / list_blocks[i - 1];
        }
        timing_add(&t, name, run_attend, &works[i]);
    }
    timing_run(&t, &limits);
    printf("\nlists%s: %s, head_dim %d, %d of %d positions, group %d; %d rounds\n", suffix, p->name, shape.head_dim,
           LISTED, LISTED_OF, shape.group, t.n_rounds);
    for (int i = 0; i <= COUNT(list_blocks); i++) {
        char name[96], group[16] = "";
        print_times(&t, &t.entries[i]);
        printf("\n");
        if (shape.group != PAGED_GROUP) snprintf(group, sizeof group, "g%d_", shape.group);
        snprintf(name, sizeof name, "list_%s_d%d_n%d_%s%s%s", p->name, shape.head_dim, LISTED_OF, group,
                 t.entries[i].name, suffix);
        if (i && hook.run) print_ratio(b, name, "all", timing_wall_ratio(&t, &t.entries[i], &t.entries[0]));
        if (i && !hook.run) print_ratio(b, name, "all", timing_ratio(&t, &t.entries[i], &t.entries[0]));
    }
}

typedef struct index_work {
    tqkv_index index;
    const float *q;
    float *scores;
    int32_t *list;
} index_work;

static void run_index_scores(void *user)
{
    const index_work *work = (const index_work *)user;
    bench_check(tqkv_index_scores(&work->index, work->q, work->scores));
}

static void run_index_choose(void *user)
{
    const index_work *work = (const index_work *)user;
    bench_check(tqkv_index_choose(&work->index, work->scores, LISTED, work->list));
}

static void print_index(const bench *b, const timing *t)
{
    const double products = (double)INDEX_HEADS * PAGED_DIM * INDEX_KEYS;
    const timing_entry *fma = timing_of(t, "fma"), *scores = timing_of(t, "scores"), *choice = timing_of(t, "choice");
    printf("\nindex: tq4, %d heads of %d, %d keys, %d of them chosen; %d rounds\n", INDEX_HEADS, PAGED_DIM, INDEX_KEYS,
           LISTED, t->n_rounds);
    for (int i = 1; i < t->n_entries; i++) {
        char name[96];
        print_times(t, &t->entries[i]);
        printf("\n");
        snprintf(name, sizeof name, "index_tq4_d%d_n%d_%s", PAGED_DIM, INDEX_KEYS, t->entries[i].name);
        if (&t->entries[i] != choice)
            print_ratio(b, name, "fma", products / peak_fma_count(b->peak) * timing_ratio(t, &t->entries[i], fma));
    }
    print_ratio(b, "index_tq4_choice", "scores", timing_ratio(t, choice, scores));
}

/* Scores of one query, as a share of the float multiply-add peak, and the choice. */
static void run_index(bench *b, const float *q)
{
    static timing t;
    const timing_limits limits = limits_of(&b->options);
    tqkv_store keys = {.format = TQKV_TQ4, .head_dim = PAGED_DIM, .n_kv_heads = 1, .capacity = INDEX_KEYS};
    keys.codes_size = tqkv_codes_size(&keys);
    keys.norms_size = tqkv_norms_size(&keys);
    keys.codes = bench_alloc(keys.codes_size);
    keys.norms = (float *)bench_alloc(keys.norms_size);
    float *source = (float *)bench_alloc(BENCH_SOURCE_TOKENS * PAGED_DIM * sizeof *source);
    for (int i = 0; i < INDEX_KEYS; i += BENCH_SOURCE_TOKENS) {
        bench_fill(source, BENCH_SOURCE_TOKENS * PAGED_DIM, (uint64_t)i);
        bench_check(tqkv_encode(&keys, source, BENCH_SOURCE_TOKENS, i));
    }
    t.n_entries = 0;
    timing_add(&t, "fma", run_fma, b);
    index_work work = {
        {.keys = &keys, .n_heads = INDEX_HEADS, .n_queries = 1, .end = INDEX_KEYS, .relu = true}, q, NULL, NULL};
    work.scores = (float *)bench_alloc(INDEX_KEYS * sizeof(float));
    work.list = (int32_t *)bench_alloc(LISTED * sizeof(int32_t));
    timing_add(&t, "scores", run_index_scores, &work);
    timing_add(&t, "choice", run_index_choose, &work);
    run_index_scores(&work);
    timing_run(&t, &limits);
    print_index(b, &t);
    free(work.scores);
    free(work.list);
    free(source);
    free(keys.codes);
    free(keys.norms);
}

void run_sparse(bench *b)
{
    static const list_shape shapes[] = {
        {PAGED_DIM, PAGED_GROUP}, {PAGED_DIM, 1}, {PAGED_DIM, 8}, {64, 1}, {64, 2}, {64, 8}};
    thread_pool pool;
    const size_t n = INDEX_HEADS * PAGED_DIM; /* more than PAGED_ROW */
    float *q = (float *)bench_alloc(n * sizeof *q), *out = (float *)bench_alloc(n * sizeof *out);
    bench_fill(q, n, 3);
    pool_start(&pool, 1);
    for (int s = 0; s < COUNT(shapes); s++) {
        const bool both = shapes[s].head_dim == PAGED_DIM && shapes[s].group == PAGED_GROUP;
        open_streams(b, shapes[s].head_dim, LISTED_OF); /* those that are open remain */
        for (int i = 0; i < COUNT(pairs); i++) {
            if (strncmp(pairs[i].name, "tq4", 3) != 0 || !wanted(b, &pairs[i])) continue;
            run_lists(b, &pairs[i], shapes[s], q, out, (tqkv_parallel){NULL, NULL}, "");
            if (both) run_lists(b, &pairs[i], shapes[s], q, out, (tqkv_parallel){pool_run, &pool}, "_t2");
        }
        if (s + 1 == COUNT(shapes) || shapes[s + 1].head_dim != shapes[s].head_dim) close_streams(b);
    }
    pool_stop(&pool);
    if (!b->options.format || strcmp(b->options.format, "tq4") == 0) run_index(b, q);
    fflush(stdout);
    free(q);
    free(out);
}

/* What exact ends cost: the same caches read with the ends that they keep, and as if all were codes. */
#include "bench.h"

enum { ENDS_DIM = 128, ENDS_GROUP = 2, ENDS_POSITIONS = 4096, ENDS_PROMPT = 512, ENDS_CACHES = 3 };
enum { ENDS_HEADS = BENCH_KV_HEADS * ENDS_GROUP };
enum { NONE, ENDS, ENDS_WAYS };

static const char *const ways[ENDS_WAYS] = {"none", "ends"};

/* Calls go from cache to cache, as a model's do from layer to layer: what they read is not in the L2. */
typedef struct ends_work {
    tqkv_cache *caches[ENDS_CACHES];
    int next, n_queries;
    bool ends;
    const float *rows, *q;
    float *out;
} ends_work;

static tqkv_cache *next_cache(ends_work *work)
{
    work->next = (work->next + 1) % ENDS_CACHES;
    return work->caches[work->next];
}

static void attend_cache(void *user)
{
    ends_work *work = (ends_work *)user;
    tqkv_attention attention;
    bench_check(tqkv_cache_view(next_cache(work), work->n_queries, &attention));
    if (!work->ends) attention.first.n = attention.last.n = 0;
    bench_check(tqkv_attend(&attention, work->q, work->out));
}

static void append_token(void *user)
{
    ends_work *work = (ends_work *)user;
    tqkv_cache *cache = next_cache(work);
    bench_check(tqkv_cache_truncate(cache, ENDS_POSITIONS));
    bench_check(tqkv_cache_append(cache, work->rows, work->rows, 1));
}

/* Opens caches of 4 and 128 exact positions, or of none; the last append has as many tokens as a call has queries. */
static void open_caches(const pair *p, bool ends, int n_queries, const float *rows, tqkv_cache **caches)
{
    const size_t row = BENCH_KV_HEADS * ENDS_DIM;
    const tqkv_cache_desc desc = {.head_dim = ENDS_DIM,
                                  .n_kv_heads = BENCH_KV_HEADS,
                                  .n_heads = ENDS_HEADS,
                                  .capacity = ENDS_POSITIONS + ENDS_PROMPT,
                                  .key_format = p->keys,
                                  .value_format = p->values,
                                  .exact_first = ends ? 4 : 0,
                                  .exact_last = ends ? 128 : 0};
    for (int i = 0; i < ENDS_CACHES; i++) {
        const int before = ENDS_POSITIONS - n_queries;
        const float *last = rows + (size_t)before * row;
        bench_check(tqkv_cache_create(&desc, &caches[i]));
        bench_check(tqkv_cache_append(caches[i], rows, rows, before));
        bench_check(tqkv_cache_append(caches[i], last, last, n_queries));
    }
}

/* Prints the time with ends by that without. */
static void compare(bench *b, const pair *p, const char *name, void (*run)(void *user), ends_work works[ENDS_WAYS])
{
    static timing t;
    timing_limits limits = limits_of(&b->options);
    char label[64];
    t.n_entries = 0;
    for (int i = 0; i < ENDS_WAYS; i++) timing_add(&t, ways[i], run, &works[i]);
    if (!b->options.rounds)
        limits.min_rounds = limits.max_rounds = run == attend_cache && works->n_queries > 1 ? 5 : 99;
    timing_run(&t, &limits);
    printf(" %s %s\n", p->name, name);
    for (int i = 0; i < ENDS_WAYS; i++) {
        print_times(&t, &t.entries[i]);
        puts("");
    }
    snprintf(label, sizeof label, "ends_%s_%s", p->name, name);
    print_ratio(b, label, "by_none", 1.0 / timing_ratio(&t, &t.entries[ENDS], &t.entries[NONE]));
}

/* Attention of n_queries over caches that both ways share. */
static void compare_queries(bench *b, const pair *p, const char *name, int n_queries, ends_work works[ENDS_WAYS])
{
    open_caches(p, true, n_queries, works[ENDS].rows, works[ENDS].caches);
    memcpy(works[NONE].caches, works[ENDS].caches, sizeof works[NONE].caches);
    works[NONE].n_queries = works[ENDS].n_queries = n_queries;
    compare(b, p, name, attend_cache, works);
    for (int i = 0; i < ENDS_CACHES; i++) tqkv_cache_destroy(works[ENDS].caches[i]);
}

static void compare_appends(bench *b, const pair *p, ends_work works[ENDS_WAYS])
{
    for (int way = 0; way < ENDS_WAYS; way++) open_caches(p, way == ENDS, 1, works[way].rows, works[way].caches);
    compare(b, p, "append_1", append_token, works);
    for (int way = 0; way < ENDS_WAYS; way++)
        for (int i = 0; i < ENDS_CACHES; i++) tqkv_cache_destroy(works[way].caches[i]);
}

void run_ends(bench *b)
{
    const size_t n = (size_t)ENDS_POSITIONS * BENCH_KV_HEADS * ENDS_DIM,
                 of_q = (size_t)ENDS_PROMPT * ENDS_HEADS * ENDS_DIM;
    float *rows = (float *)bench_alloc(n * sizeof *rows), *q = (float *)bench_alloc(of_q * sizeof *q);
    float *out = (float *)bench_alloc(of_q * sizeof *out);
    bench_fill(rows, n, 7);
    bench_fill(q, of_q, 8);
    printf("\nexact ends: 4 + 128 of %d positions, %d heads of %d, %d KV heads\n", ENDS_POSITIONS, ENDS_HEADS, ENDS_DIM,
           BENCH_KV_HEADS);
    for (int i = 0; i < COUNT(pairs); i++) {
        ends_work works[ENDS_WAYS] = {{.rows = rows, .q = q, .out = out},
                                      {.rows = rows, .q = q, .out = out, .ends = true}};
        if (pairs[i].keys != TQKV_TQ4 || !wanted(b, &pairs[i])) continue;
        compare_queries(b, &pairs[i], "token", 1, works);
        compare_queries(b, &pairs[i], "prompt_512", ENDS_PROMPT, works);
        compare_appends(b, &pairs[i], works);
    }
    fflush(stdout);
    free(rows);
    free(q);
    free(out);
}

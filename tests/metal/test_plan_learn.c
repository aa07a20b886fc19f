/* The plans of a cache that learns its scales: what is dispatched at each step, and where it lies. */
#include "plan_fixture.h"
#include "../cache_fixture.h"

/* What an append dispatches, a letter each: k: keys and values, or keys and tail, e: one stream, c: calibration. The
   append that makes the cache learn has three parts: rows that become halves, learning, and rows behind these. */
typedef struct learn_row {
    const char *name, *raw, *learns, *rest;
    int head_dim, tail_dim, exact_first, exact_last;
    bool ring, shared, non_causal;
} learn_row;

static const learn_row rows[] = {{"plain", "k", "ck", "k", 64, 0, 0, 0, false, false, false},
                                 {"ends", "k", "ckkk", "kk", 64, 0, 4, 16, false, false, false},
                                 {"first", "k", "ckk", "k", 64, 0, 8, 0, false, false, false},
                                 {"ring", "k", "ckk", "kk", 64, 0, 0, 16, true, false, false},
                                 {"non_causal", "k", "ck", "k", 64, 0, 0, 0, false, false, true},
                                 {"tail", "kee", "ckkk", "kek", 512, 64, 4, 16, false, false, false},
                                 {"latent", "ke", "ceee", "ke", 512, 64, 4, 16, false, true, false}};

enum { LEARNS_AT = 32, HEADS = CACHE_HEADS * CACHE_GROUP };

typedef struct learning {
    tqkv__backend backend; /* first, as in struct tqkv_metal */
    counting memory;
    tqkv_cache *cache;
} learning;

static bool open_learning(const learn_row *row, learning *l)
{
    tqkv_cache_desc desc = test_cache_desc(row->head_dim, CACHE_HEADS, HEADS, 200);
    memset(l, 0, sizeof *l);
    l->backend.memory = counting_allocator(&l->memory);
    l->backend.has_kernels = tqkv__has_kernels;
    desc.metal = (tqkv_metal *)(void *)l;
    desc.key_format = TQKV_TQ4;
    desc.value_format = row->shared ? TQKV_FORMAT_DEFAULT : TQKV_TQ3;
    desc.shared = row->shared;
    desc.tail_dim = row->tail_dim;
    desc.calibrate = LEARNS_AT;
    desc.exact_first = row->exact_first;
    desc.exact_last = row->exact_last;
    desc.ring = row->ring;
    desc.non_causal = row->non_causal;
    CHECK_RESULT(tqkv_cache_create(&desc, &l->cache), TQKV_OK);
    return l->cache != NULL;
}

/* The letters of an append of n tokens, whose plan is as it must be. */
static const char *append(learning *l, int n, tqkv_metal_plan *plan)
{
    static char letters[TQKV_METAL_DISPATCHES + 1];
    (void)plan_append(l->cache, n, plan);
    for (int i = 0; i < plan->n; i++) {
        const int family = plan->d[i].kernel.family;
        letters[i] = "?ek"[family == TQKV_METAL_ENCODE_KV ? 2 : family == TQKV_METAL_ENCODE];
        if (family == TQKV_METAL_CALIBRATE) letters[i] = 'c';
    }
    letters[plan->n] = 0;
    return letters;
}

/* Attention of n queries: the number of dispatches that read codes or halves,
 * and the scratch that they were promised. */
static void check_queries(learning *l, int n, int n_reads, const char *when)
{
    tqkv_metal_plan plan, sizes;
    int reads = 0;
    CHECK_RESULT(tqkv_metal_plan_cache_attend(l->cache, at(0, 0), NULL, NULL, none, n, none, none, &sizes), TQKV_OK);
    (void)plan_queries(l->cache, n, &plan);
    for (int i = 0; i < plan.n; i++) reads += plan.d[i].kernel.family != TQKV_METAL_ATTEND_MERGE;
    CHECK(plan_end(&plan, at(SCRATCH, 0)) <= sizes.scratch_size, "%s: %zu bytes of scratch", when, sizes.scratch_size);
    CHECK(reads == n_reads, "%s: %d dispatches read keys, not %d", when, reads, n_reads);
}

/* Of 20 queries 12 read rows as they came, the others codes: the outputs of one part may lie neither in the queries of
   the other, nor among its outputs, nor in the cache. */
static void check_apart(const learn_row *row, const learning *l)
{
    enum { RAW = 12, N = 20 };
    const size_t query = (size_t)(HEADS * (row->head_dim + row->tail_dim)) * sizeof(float), dim = (size_t)row->head_dim;
    const tqkv_cache_strides shared = {{0, 0}, {0, 0}, {0, 0}, {dim, RAW * dim}};
    const struct {
        const tqkv_cache_strides *strides;
        tqkv_metal_buffer out;
        tqkv_result expected;
    } outputs[] = {{NULL, at(1, RAW * query), TQKV_INVALID_ARGUMENT},
                   {NULL, at(0, 0), TQKV_INVALID_ARGUMENT},
                   {&shared, at(3, 0), TQKV_INVALID_ARGUMENT},
                   {NULL, at(1, N * query), TQKV_OK}};
    tqkv_metal_plan plan;
    for (int i = 0; i < 4; i++)
        CHECK_RESULT(tqkv_metal_plan_cache_attend(l->cache, at(0, 0), outputs[i].strides, NULL, at(1, 0), N, at(2, 0),
                                                  outputs[i].out, &plan),
                     outputs[i].expected);
}

/* 20 tokens, 20 more, of which 12 fill what the cache learns from, and 3 behind them. */
static void check_learning(const void *parameters)
{
    const learn_row *row = (const learn_row *)parameters;
    char expected[3 * TQKV_METAL_DISPATCHES];
    tqkv_metal_plan plan, again;
    learning l;
    if (!open_learning(row, &l)) return;
    const char *letters = append(&l, 20, &plan);
    CHECK(!strcmp(letters, row->raw), "rows before the last that it learns from: %s", letters);
    tqkv_metal_cache_appended(l.cache, 20);
    check_queries(&l, 20, 1, "before it has learned");
    letters = append(&l, 20, &plan);
    snprintf(expected, sizeof expected, "%s%s%s", row->raw, row->learns, row->rest);
    CHECK(!strcmp(letters, expected), "the rows that it learns from: %s, not %s", letters, expected);
    tqkv_metal_cache_appended(l.cache, 20);
    const int parts = 1 + (row->exact_first > 0) + (row->exact_last > 0);
    check_queries(&l, 3, parts, "behind what it has learned from");
    check_queries(&l, 20, row->non_causal ? parts : parts + 1, "at both");
    if (!row->non_causal) check_apart(row, &l);
    CHECK_RESULT(tqkv_metal_cache_failed(l.cache, 20), TQKV_OK);
    append(&l, 20, &again);
    CHECK(again.n == plan.n, "%d dispatches after a failure", again.n);
    for (int i = 0; i < plan.n; i++)
        CHECK(!memcmp(&again.d[i].kernel, &plan.d[i].kernel, sizeof plan.d[i].kernel) &&
                  again.d[i].n_arguments == plan.d[i].n_arguments &&
                  !memcmp(again.d[i].arguments, plan.d[i].arguments, sizeof *plan.d[i].arguments),
              "dispatch %d after a failure", i);
    tqkv_metal_cache_appended(l.cache, 20);
    letters = append(&l, 3, &plan);
    CHECK(!strcmp(letters, row->rest), "rows behind what it has learned from: %s", letters);
    CHECK_RESULT(tqkv_metal_cache_failed(l.cache, 0), TQKV_OK);
    CHECK(!test_keys(l.cache)->channel_scale && !tqkv_cache_end(l.cache), "an empty cache has forgotten the scale");
    CHECK_RESULT(tqkv_metal_cache_failed(l.cache, 1), TQKV_OUT_OF_RANGE);
    tqkv_cache_destroy(l.cache);
    CHECK_NO_LEAK(&l.memory);
}

/* A GPU takes no cache whose halves the processor has put elsewhere,
 * and no more tokens at once than there is room for. */
static void check_learning_refused(NO_ROW)
{
    const cache_row shape = {TQKV_I8, TQKV_TQ4, 64, 100, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&shape, NULL);
    tqkv_metal_plan plan;
    desc.calibrate = 20;
    tqkv_cache *cache = cache_make(&shape, &desc);
    REQUIRE(cache, "no cache");
    CHECK_RESULT(plan_append(cache, 1, &plan), TQKV_UNSUPPORTED);
    cache_append_seed(cache, 1, 19, 64);
    CHECK_RESULT(plan_queries(cache, 1, &plan), TQKV_UNSUPPORTED);
    cache_append_seed(cache, 1, 1, 64); /* which it has learned from: queries before still read the halves */
    CHECK_RESULT(plan_append(cache, 1, &plan), TQKV_OK);
    CHECK_RESULT(plan_queries(cache, 1, &plan), TQKV_UNSUPPORTED);
    cache_append_seed(cache, 1, 1, 64);
    CHECK_RESULT(plan_queries(cache, 1, &plan), TQKV_OK);
    CHECK_RESULT(plan_append(cache, 80, &plan), TQKV_OUT_OF_RANGE);
    CHECK_RESULT(plan_append(cache, -1, &plan), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_cache_failed(NULL, 0), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_cache_failed(cache, -1), TQKV_OUT_OF_RANGE);
    tqkv_cache_destroy(cache);
    desc.exact_last = 10;
    desc.calibrate = 0;
    desc.capacity = 1000;
    cache = cache_make(&shape, &desc);
    REQUIRE(cache, "no cache");
    CHECK_RESULT(plan_append(cache, 700, &plan), TQKV_OUT_OF_RANGE);
    cache_append_seed(cache, 1, 700, 64);
    CHECK_RESULT(plan_append(cache, 1, &plan), TQKV_UNSUPPORTED);
    tqkv_cache_destroy(cache);
}

void test_plan_learn_cases(void)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        test_add(check_learning, &rows[i], sizeof rows[i], "plan/learn/%s", rows[i].name);
    test_add(check_learning_refused, NULL, 0, "plan/learn/refused");
}

/* Scores of an index against double precision, their bits in company, and the choice of blocks against a sort. */
#include "counting.h"
#include "index_fixture.h"

/* ---- Scores ---- */

static void check_error(const index_problem *p)
{
    double *keys = reference_decode_all(&p->keys, 0, p->first, p->index.end, REFERENCE_INTEGERS);
    double *expected = (double *)test_alloc(2 * (size_t)p->n_blocks * sizeof *expected),
           *allowed = expected + p->n_blocks;
    for (int i = 0; i < p->index.n_queries; i++) {
        reference_index_scores(REFERENCE_INTEGERS, &p->index, i, p->q, keys, p->first, expected, allowed);
        for (int64_t b = 0; b < p->n_blocks; b++) {
            const double got = (double)p->scores[i * p->n_blocks + b];
            CHECK(got == expected[b] || fabs(got - expected[b]) <= allowed[b], "query %d block %d: %g, not %g", i,
                  (int)b, got, expected[b]);
        }
    }
    free(keys);
    free(expected);
}

/* Each query alone has the bits that it has among others, with and without the hook. other: [n_queries][n_blocks] */
static void check_alone(const index_problem *p, float *other)
{
    tqkv_index one = p->index;
    const int n_queries = p->index.n_queries, d = p->keys.head_dim;
    one.n_queries = 1;
    one.query_type = TQKV_TYPE_F32;
    one.parallel.run = p->index.parallel.run ? NULL : test_run_backwards;
    for (int i = 0; i < n_queries; i++) {
        const int row = i * p->index.n_heads;
        one.weights = p->weights ? p->weights + row : NULL;
        one.positions =
            (p->index.positions ? p->index.positions : p->index.end * (p->index.ratio ? p->index.ratio : 1)) -
            n_queries + 1 + i;
        if (one.positions <= 0) continue;
        CHECK_RESULT(tqkv_index_scores(&one, p->q + row * d, other), TQKV_OK);
        CHECK(!memcmp(other, p->scores + i * p->n_blocks, (size_t)p->n_blocks * sizeof *other), "query %d differs", i);
    }
}

/* Against double precision, alone, and the same bits with each instruction set. */
static void check_scores(const void *parameters)
{
    static const char *const sets[4] = {"scalar", "avx2", "avx512", "neon"};
    const char *in_use = tqkv_isa_name();
    index_problem p;
    index_set_up(&p, *(const int *)parameters, 0);
    const size_t bytes = (size_t)(p.index.n_queries * p.n_blocks) * sizeof(float);
    float *other = (float *)test_alloc(bytes);
    CHECK_RESULT(tqkv_index_scores(&p.index, index_queries(&p), p.scores), TQKV_OK);
    check_error(&p);
    check_alone(&p, other);
    for (int i = 0; i < 4; i++) {
        if (tqkv_isa_force(sets[i]) != TQKV_OK) continue;
        CHECK_RESULT(tqkv_index_scores(&p.index, index_queries(&p), other), TQKV_OK);
        CHECK(!memcmp(other, p.scores, bytes), "%s gives other bits", sets[i]);
    }
    CHECK_RESULT(tqkv_isa_force(in_use), TQKV_OK);
    free(other);
    index_tear_down(&p);
}

/* ---- The choice ---- */

static const float *sorted_scores;

static int by_score(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    if (sorted_scores[x] != sorted_scores[y]) return sorted_scores[x] > sorted_scores[y] ? -1 : 1;
    return x < y ? -1 : x > y;
}

static int by_number(const void *a, const void *b) { return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1; }

/* The blocks of one query by a sort; scores are changed. list: [n_blocks], of which k count */
static void expect_choice(const tqkv_index *x, int64_t n_blocks, int query, float *scores, int k, int32_t *list)
{
    const int64_t end = reference_index_end(x, query), seen = end ? (end - 1) / x->block + 1 : 0;
    int n = 0;
    for (int64_t b = 0; b < seen; b++) {
        if (scores[b] == -(float)INFINITY) continue;
        list[n++] = (int32_t)b;
        if (b < x->first || b >= seen - x->newest) scores[b] = (float)INFINITY;
    }
    sorted_scores = scores;
    qsort(list, (size_t)n, sizeof *list, by_score);
    if (n > k) n = k;
    qsort(list, (size_t)n, sizeof *list, by_number);
    for (int64_t i = n; i < n_blocks || i < k; i++) list[i] = -1;
}

/* Scores with many ties, both zeros, and invisible blocks. */
static void make_scores(data_random *random, float *scores, int64_t n)
{
    const int kind = data_below(random, 4);
    for (int64_t i = 0; i < n; i++) {
        scores[i] = data_student(random) * (kind == 0 ? 1e-30f : 100.0f);
        if (kind == 1) scores[i] = (float)data_below(random, 5) - 2.0f;
        if (kind == 2) scores[i] = data_below(random, 2) ? 0.0f : -0.0f;
        if (kind == 3 && data_below(random, 3) == 0) scores[i] = -(float)INFINITY;
    }
}

/* 100 choices. */
static void check_choices(const void *parameters)
{
    enum { MOST = 3000, QUERIES = 4 };
    data_random random = {(uint64_t)(*(const int *)parameters + 100)};
    float *scores = (float *)test_alloc(QUERIES * MOST * sizeof *scores);
    int32_t *list = (int32_t *)test_alloc(QUERIES * 2 * MOST * sizeof *list);
    int32_t *expected = (int32_t *)test_alloc(2 * MOST * sizeof *expected);
    tqkv_store keys = test_store(TQKV_TQ4, 32, 1, 4 * MOST, false);
    void *codes = keys.codes;
    keys.codes = NULL; /* only the shape is read */
    for (int round = 0; round < 100; round++) {
        tqkv_index x;
        memset(&x, 0, sizeof x);
        x.keys = &keys;
        x.n_heads = 64;
        x.n_queries = 1 + data_below(&random, QUERIES);
        x.block = 1 + data_below(&random, 4);
        const bool few = data_below(&random, 2); /* of which all but one or two are always chosen */
        x.end = data_below(&random, few ? 20 : MOST);
        x.first = data_below(&random, 4);
        x.newest = data_below(&random, 4);
        if (data_below(&random, 2)) x.parallel.run = test_run_backwards;
        const int64_t n = (x.end + x.block - 1) / x.block;
        const int k = few                      ? data_below(&random, 9)
                      : data_below(&random, 3) ? data_below(&random, 40)
                                               : data_below(&random, 2 * MOST);
        make_scores(&random, scores, x.n_queries * n);
        memset(list, 0x77, QUERIES * 2 * MOST * sizeof *list);
        CHECK_RESULT(tqkv_index_choose(&x, scores, k, list), TQKV_OK);
        for (int i = 0; i < x.n_queries; i++) {
            expect_choice(&x, n, i, scores + i * n, k, expected);
            CHECK(!memcmp(expected, list + (size_t)i * (size_t)k, (size_t)k * sizeof *list),
                  "round %d query %d: %d of %d blocks differ", round, i, k, (int)n);
        }
        CHECK(list[x.n_queries * k] == 0x77777777, "written behind the list");
    }
    free(scores);
    free(list);
    free(expected);
    free(codes);
    free(keys.norms);
}

static void check_fault(const void *parameters)
{
    counting counter = {0, 1, 0, 0, 0};
    index_problem p;
    index_set_up(&p, 5, 0);
    (void)parameters;
    const size_t bytes = (size_t)(p.index.n_queries * p.n_blocks) * sizeof(float);
    float *before = (float *)test_alloc_filled(bytes, 0xff);
    p.index.allocator = counting_allocator(&counter);
    CHECK_RESULT(tqkv_index_scores(&p.index, index_queries(&p), p.scores), TQKV_OUT_OF_MEMORY);
    CHECK(!memcmp(before, p.scores, bytes), "a failed call has written");
    CHECK_RESULT(tqkv_index_scores(&p.index, index_queries(&p), p.scores), TQKV_OK);
    CHECK_NO_LEAK(&counter);
    free(before);
    index_tear_down(&p);
}

void test_index_cases(void)
{
    for (int i = 0; i < 60; i++) test_add(check_scores, &i, sizeof i, "index/scores/%d", i);
    for (int i = 0; i < 10; i++) test_add(check_choices, &i, sizeof i, "index/choices/%d", i);
    test_add(check_fault, NULL, 0, "index/fault");
}

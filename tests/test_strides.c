/* Strides of sources, queries and outputs: the bits of the same rows without gaps, and nothing written between them. */
#include "attend_fixture.h"
#include "cache_fixture.h"

enum { TOKENS = 37, DIM = 64, HEADS = CACHE_HEADS, QUERY_HEADS = CACHE_HEADS * CACHE_GROUP, GAP_BYTE = 0xee };

typedef struct layout_row {
    const char *name;
    int token, head, begin; /* in dims; for TOKENS tokens of HEADS heads */
} layout_row;

static const layout_row layouts[] = {{"fused", 3 * HEADS, 1, HEADS},
                                     {"head_major", 1, TOKENS, 0},
                                     {"gaps", 5 * HEADS, 2, 1},
                                     {"gaps_head_major", 2, 2 * TOKENS, 0}};

static tqkv_strides strides_of(const layout_row *l)
{
    const tqkv_strides s = {(size_t)(l->token * DIM), (size_t)(l->head * DIM)};
    return s;
}

/* The row of token t and head h in memory of that layout. */
static uint8_t *row_at(const layout_row *l, void *memory, size_t size, int t, int h)
{
    return (uint8_t *)memory + (size_t)(l->begin + t * l->token + h * l->head) * DIM * size;
}

static size_t memory_size(const layout_row *l, size_t size, int n, int n_heads)
{
    return (size_t)(l->begin + (n - 1) * l->token + (n_heads - 1) * l->head + 1) * DIM * size;
}

/* The rows [n][n_heads] in that layout, GAP_BYTE between them. */
static void *spread_rows(const layout_row *l, const void *rows, size_t size, int n, int n_heads)
{
    void *memory = test_alloc_filled(memory_size(l, size, n, n_heads), GAP_BYTE);
    for (int i = 0; i < n * n_heads; i++)
        memcpy(row_at(l, memory, size, i / n_heads, i % n_heads), (const uint8_t *)rows + (size_t)i * DIM * size,
               DIM * size);
    return memory;
}

static bool is_spread(const layout_row *l, const void *memory, const void *rows, size_t size, int n, int n_heads)
{
    void *expected = spread_rows(l, rows, size, n, n_heads);
    const bool same = !memcmp(expected, memory, memory_size(l, size, n, n_heads));
    free(expected);
    return same;
}

/* ---- Attention in a batch whose outputs interleave, and by a cache ---- */

/* Two sequences write every other token of one array; and every other head. */
static void check_batch(const void *parameters)
{
    enum { N = 3, WIDE = QUERY_HEADS * DIM };
    const bool by_heads = *(const bool *)parameters;
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, DIM);
    row.n_queries = N;
    attend_problem problem;
    attend_set_up(&problem, &row);
    float out[2 * N * WIDE];
    const tqkv_strides s = {2 * WIDE, (size_t)(by_heads ? 2 * (int)DIM : (int)DIM)};
    const tqkv_attention one = problem.attention;
    tqkv_attention items[2] = {one, one};
    const void *q[2] = {problem.q, problem.q};
    void *outs[2] = {out, out + (by_heads ? (int)DIM : (int)WIDE)};
    items[0].output_strides = items[1].output_strides = s;
    items[1].end--;
    CHECK_RESULT(tqkv_attend_batch(items, 2, q, outs), TQKV_OK);
    for (int i = 0; i < 2; i++) {
        tqkv_attention alone = one;
        alone.end = items[i].end;
        CHECK_RESULT(tqkv_attend(&alone, problem.q, problem.out), TQKV_OK);
        for (int r = 0; r < N * QUERY_HEADS; r++)
            CHECK(!memcmp(problem.out + r * DIM,
                          (const float *)outs[i] + (size_t)(r / QUERY_HEADS) * s.token +
                              (size_t)(r % QUERY_HEADS) * s.head,
                          DIM * sizeof(float)),
                  "item %d, row %d", i, r);
    }
    outs[1] = out + DIM / 2; /* each row of one lies in one of the other, or between two */
    CHECK_RESULT(tqkv_attend_batch(items, 2, q, outs), TQKV_INVALID_ARGUMENT);
    outs[1] = out + 2 * WIDE; /* the second token of the first */
    CHECK_RESULT(tqkv_attend_batch(items, 2, q, outs), TQKV_INVALID_ARGUMENT);
    attend_tear_down(&problem);
}

static void check_cache(const void *parameters)
{
    const layout_row *l = (const layout_row *)parameters;
    const cache_row row = {TQKV_TQ5, TQKV_TQ4, DIM, TOKENS, false, 0, -1};
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    desc.n_heads = HEADS;
    tqkv_cache_desc strided = desc, none;
    tqkv_cache *caches[2], *copy, *loaded;
    float *rows = cache_data(5, TOKENS, DIM), out[TOKENS * HEADS * DIM];
    void *src = spread_rows(l, rows, sizeof(float), TOKENS, HEADS);
    void *to = test_alloc_filled(memory_size(l, sizeof(float), TOKENS, HEADS), GAP_BYTE);
    const void *at = row_at(l, src, sizeof(float), 0, 0);
    strided.strides.k = strided.strides.v = strided.strides.q = strided.strides.out = strides_of(l);
    for (int i = 0; i < 2; i++) CHECK_RESULT(tqkv_cache_create(i ? &strided : &desc, &caches[i]), TQKV_OK);
    CHECK_RESULT(tqkv_cache_append(caches[0], rows, rows, TOKENS), TQKV_OK);
    CHECK_RESULT(tqkv_cache_append(caches[1], at, at, TOKENS), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(caches[0], rows, TOKENS, out), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(caches[1], at, TOKENS, row_at(l, to, sizeof(float), 0, 0)), TQKV_OK);
    CHECK(is_spread(l, to, out, sizeof(float), TOKENS, HEADS), "other bits");
    CHECK_RESULT(tqkv_cache_fork(caches[1], NULL, &copy), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(copy, at, TOKENS, row_at(l, to, sizeof(float), 0, 0)), TQKV_OK);
    CHECK(is_spread(l, to, out, sizeof(float), TOKENS, HEADS), "other bits of a copy");
    memset(&none, 0, sizeof none);
    stream s = stream_of_cache(caches[1]);
    CHECK_RESULT(tqkv_cache_load(&none, stream_read, &s, &loaded), TQKV_OK); /* a snapshot has no strides */
    float *again = (float *)test_alloc(sizeof out);
    CHECK_RESULT(tqkv_cache_attend(loaded, rows, TOKENS, again), TQKV_OK);
    CHECK(!memcmp(again, out, sizeof out), "without gaps");
    free(again);
    stream_free(&s);
    tqkv_cache_destroy(loaded);
    for (int i = 0; i < 2; i++) tqkv_cache_destroy(caches[i]);
    tqkv_cache_destroy(copy);
    free(rows);
    free(src);
    free(to);
}

void test_strides_cases(void)
{
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        test_add(check_cache, &layouts[i], sizeof *layouts, "strides/cache/%s", layouts[i].name);
    for (int i = 0; i < 2; i++) {
        const bool by_heads = i;
        test_add(check_batch, &by_heads, sizeof by_heads, "strides/batch/%s", by_heads ? "heads" : "tokens");
    }
}

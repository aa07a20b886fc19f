/* Paged stores: pages that occur twice, hidden and shared ones. test_codec_history.c and test_attend_history.c have
 * others. */
#include "attend_checks.h"

enum { PAGES_HEADS = 2, POOL_PAGES = 9 };

static tqkv_store make_pool(tqkv_format format, int head_dim)
{
    tqkv_store s = test_store(format, head_dim, PAGES_HEADS, POOL_PAGES * 64, false);
    s.page_size = 64;
    return s;
}

/* Numbers that occur twice are found wherever they stand, beyond the 32768 that are marked at a time too. */
static void check_twice(const void *parameters)
{
    (void)parameters;
    enum { n = 3, d = 32, capacity = 100000 };
    tqkv_store pool = test_store(TQKV_TQ2, d, 1, capacity, false);
    float *rows = test_rows(6, DATA_GAUSSIAN, n, d);
    const int32_t starts[] = {0, 32767, 32768, 5 + 32767, 5 + 32768, 65535, capacity - 1};
    for (int i = 0; i < (int)(sizeof starts / sizeof *starts); i++) {
        const int32_t twice[n] = {starts[i], 5, starts[i]}, apart[n] = {starts[i], 5, starts[i] / 2 + 1};
        CHECK_RESULT(test_encode_slots(&pool, rows, n, twice), TQKV_INVALID_ARGUMENT);
        CHECK_RESULT(test_encode_slots(&pool, rows, n, apart), TQKV_OK);
    }
    test_store_free(&pool);
    free(rows);
}

/* ---- Attention ---- */

/* A tree hides the newest page from all queries: its entry is not looked at. */
static void check_hidden(const void *parameters)
{
    (void)parameters;
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ4, 64);
    uint64_t tree[64] = {0};
    int32_t pages[POOL_PAGES + 2];
    row.key_capacity = row.value_capacity = POOL_PAGES * 64;
    row.end = 128;
    row.n_queries = 64;
    attend_problem problem;
    attend_set_up(&problem, &row);
    tqkv_attention a = problem.attention;
    const size_t one = problem.n_rows / 64 * problem.head_dim;
    data_random order = {1};
    tqkv_store keys = attend_paged(&a, &problem.keys, &order, 64, pages);
    order.state = 1;
    tqkv_store values = attend_paged(&a, &problem.values, &order, 64, pages);
    a.keys = &keys;
    a.values = &values;
    a.tree = tree;
    pages[1] = INT32_MIN;
    CHECK_RESULT(tqkv_attend(&a, problem.q, problem.out), TQKV_OK);
    tree[63] = (uint64_t)1 << 40;
    CHECK_RESULT(tqkv_attend(&a, problem.q, problem.out), TQKV_OUT_OF_RANGE);
    float *alone = (float *)test_alloc(one * sizeof *alone); /* the last query, at the end of the first page */
    a.tree = NULL;
    a.end = 64;
    a.n_queries = 1;
    CHECK_RESULT(tqkv_attend(&a, problem.q + 63 * one, alone), TQKV_OK);
    CHECK(!memcmp(alone, problem.out + 63 * one, one * sizeof *alone), "the hidden page counts");
    test_store_free(&keys);
    test_store_free(&values);
    free(alone);
    attend_tear_down(&problem);
}

enum { PROMPT = 128, TAIL = 40 };

/* Encodes a prompt, or none, and what a sequence has behind it, as keys (0) or values (1). */
static void fill_sequence(const tqkv_store *store, int side, int sequence, bool prompt)
{
    const uint64_t seed = (uint64_t)(2 * sequence + side);
    float *rows = test_rows(10 + (uint64_t)side, DATA_GAUSSIAN, PROMPT * PAGES_HEADS, store->head_dim);
    float *own = test_rows(12 + seed, DATA_GAUSSIAN, TAIL * PAGES_HEADS, store->head_dim);
    if (prompt) CHECK_RESULT(tqkv_encode(store, rows, PROMPT, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(store, own, TAIL, PROMPT), TQKV_OK);
    free(rows);
    free(own);
}

/* Two sequences share the pages of a prompt; each attends as over stores of its own. */
static void check_shared(const void *parameters)
{
    (void)parameters;
    enum { d = 64 };
    const int32_t tables[2][3] = {{4, 1, 7}, {4, 1, 2}};
    tqkv_store pool[2] = {make_pool(TQKV_I8, d), make_pool(TQKV_TQ4, d)};
    tqkv_store linear[2] = {test_store(TQKV_I8, d, PAGES_HEADS, 200, false),
                            test_store(TQKV_TQ4, d, PAGES_HEADS, 200, false)};
    float *q = test_rows(9, DATA_GAUSSIAN, PAGES_HEADS, d), out[PAGES_HEADS * d], expected[PAGES_HEADS * d];
    for (int sequence = 0; sequence < 2; sequence++)
        for (int i = 0; i < 2; i++) {
            pool[i].pages = tables[sequence];
            pool[i].n_pages = 3;
            fill_sequence(&pool[i], i, sequence, sequence == 0);
        }
    for (int sequence = 0; sequence < 2; sequence++) {
        tqkv_attention a;
        memset(&a, 0, sizeof a);
        a.n_heads = PAGES_HEADS;
        a.n_queries = 1;
        a.end = PROMPT + TAIL;
        for (int i = 0; i < 2; i++) {
            fill_sequence(&linear[i], i, sequence, true);
            pool[i].pages = tables[sequence];
        }
        a.keys = &pool[0];
        a.values = &pool[1];
        CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
        a.keys = &linear[0];
        a.values = &linear[1];
        CHECK_RESULT(tqkv_attend(&a, q, expected), TQKV_OK);
        CHECK(!memcmp(out, expected, sizeof out), "sequence %d", sequence);
    }
    for (int i = 0; i < 2; i++) {
        test_store_free(&pool[i]);
        test_store_free(&linear[i]);
    }
    free(q);
}

void test_pages_cases(void)
{
    test_add(check_twice, NULL, 0, "pages/twice");
    test_add(check_hidden, NULL, 0, "pages/hidden");
    test_add(check_shared, NULL, 0, "pages/shared");
}

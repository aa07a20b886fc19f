/* Paged stores: pages that occur twice, and hidden ones. test_codec_history.c and test_attend_history.c have
 * others. */
#include "attend_checks.h"

enum { POOL_PAGES = 9 };

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
    tqkv_store keys = attend_paged(&a, &problem.keys, 0, &order, 64, pages);
    order.state = 1;
    tqkv_store values = attend_paged(&a, &problem.values, 0, &order, 64, pages);
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

/* Keys and values that lie in one pool, each by its own table. */
static void check_one_pool(const void *parameters)
{
    (void)parameters;
    enum { n = 100, d = 64 };
    static const int32_t tables[2][2] = {{3, 0}, {1, 2}};
    float *rows = test_rows(7, DATA_GAUSSIAN, 2 * n, d), out[2][d];
    tqkv_store stores[4]; /* those in the pool, then each alone */
    for (int i = 0; i < 4; i++) {
        stores[i] = i == 1 ? stores[0] : test_store(TQKV_TQ4, d, 1, i ? n : 256, false);
        stores[i].pages = i < 2 ? tables[i] : NULL;
        stores[i].n_pages = 2;
        stores[i].page_size = 64;
        CHECK_RESULT(tqkv_encode(&stores[i], rows + i % 2 * n * d, n, 0), TQKV_OK);
    }
    for (int i = 0; i < 2; i++) {
        const tqkv_attention a = test_attention(&stores[2 * i], &stores[2 * i + 1], 1, 1, n);
        CHECK_RESULT(tqkv_attend(&a, rows, out[i]), TQKV_OK);
    }
    CHECK(!memcmp(out[0], out[1], sizeof *out), "other bits");
    for (int i = 0; i < 4; i++)
        if (i != 1) test_store_free(&stores[i]);
    free(rows);
}

void test_pages_cases(void)
{
    test_add(check_one_pool, NULL, 0, "pages/one_pool");
    test_add(check_twice, NULL, 0, "pages/twice");
    test_add(check_hidden, NULL, 0, "pages/hidden");
}

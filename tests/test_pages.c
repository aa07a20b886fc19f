/* Paged stores: pages that occur twice, and two tables of one pool. test_codec_history.c and test_attend_history.c have
 * others. */
#include "data.h"
#include "reference.h"
#include "runner.h"

/* Numbers that occur twice are found wherever they stand, beyond the 32768 that are marked at a time too. */
static void check_twice(NO_ROW)
{
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

/* Keys and values that lie in one pool, each by its own table. */
static void check_one_pool(NO_ROW)
{
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
}

/* The index through the Metal API, recorded with nothing read back. */
#include "host.h"

enum { KEYS = 20000, QUERIES = 2, CHOSEN = 50 };

/* Scores that ascend: the newest blocks are the best. */
static void run_choose(const void *parameters)
{
    tqkv_metal_store keys = {.shape = {.format = TQKV_TQ4, .head_dim = 64, .n_kv_heads = 1, .capacity = KEYS}};
    tqkv_metal_index x = {.index = {.end = KEYS, .n_queries = QUERIES, .first = 1}, .keys = &keys};
    size_t bytes;
    (void)parameters;
    float *scores = test_alloc(sizeof(float) * QUERIES * KEYS);
    for (int i = 0; i < QUERIES * KEYS; i++) scores[i] = (float)(i % KEYS) - 5000.0f;
    scores[KEYS - 1] = -INFINITY;
    CHECK_RESULT(tqkv_metal_index_choose_scratch(test_host.metal, &x, &bytes), TQKV_OK);
    tqkv_metal_buffer from = host_buffer(scores, sizeof(float) * QUERIES * KEYS), scratch = host_zeros(bytes),
                      list = host_zeros(sizeof(int32_t) * QUERIES * CHOSEN);
    host_work w = host_begin(true);
    CHECK_RESULT(tqkv_metal_index_choose(test_host.metal, w.encoder, &x, from, CHOSEN, scratch, list), TQKV_OK);
    CHECK_REFUSED(test_host.metal, tqkv_metal_index_choose(test_host.metal, w.encoder, &x, from, -1, scratch, list),
                  TQKV_INVALID_ARGUMENT, "index_choose");
    CHECK_REFUSED(test_host.metal, tqkv_metal_index_choose(test_host.metal, w.encoder, &x, from, CHOSEN, scratch, from),
                  TQKV_INVALID_ARGUMENT, "overlap");
    host_end(&w);
    const int32_t *got = host_contents(list);
    for (int i = 0; i < QUERIES; i++)
        for (int j = 0; j < CHOSEN; j++) {
            const int32_t expected = j ? KEYS - (i == 0) - CHOSEN + j : 0;
            CHECK(got[i * CHOSEN + j] == expected, "query %d, entry %d: %d, not %d", i, j, got[i * CHOSEN + j],
                  expected);
        }
    x.index.block = -1;
    CHECK_REFUSED(test_host.metal, tqkv_metal_index_choose_scratch(test_host.metal, &x, &bytes), TQKV_INVALID_ARGUMENT,
                  "index_choose_scratch");
    host_release(from);
    host_release(scratch);
    host_release(list);
    free(scores);
}

void index_host_cases(void) { test_add(run_choose, NULL, 0, "index/choose"); }

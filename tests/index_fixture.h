/* Indices over keys at random, for the processor and for the shaders. */
#ifndef TQKV_TESTS_INDEX_FIXTURE_H
#define TQKV_TESTS_INDEX_FIXTURE_H

#include "reference.h"
#include "runner.h"

typedef struct index_problem {
    tqkv_index index;
    tqkv_store keys;
    int32_t pages[8];
    int64_t first, n_blocks; /* the oldest resident key */
    int n_rows;              /* queries times heads */
    float *q, *weights, *center, *scales, *scores;
    uint16_t *halves; /* q as bfloat16 */
} index_problem;

/* Where keys lie: linear, ring or pages in another order. */
static inline void index_place_keys(index_problem *p, data_random *random, tqkv_format format, int head_dim)
{
    const int place = data_below(random, 3),
              capacity = place == 2 ? 512 : 1 + data_below(random, data_below(random, 6) ? 500 : 2500);
    int end = 1 + data_below(random, place == 1 ? 3 * capacity : capacity);
    p->keys = test_store(format, head_dim, 1, capacity, place == 1);
    if (place == 2) {
        for (int i = 0; i < 8; i++) p->pages[i] = (int32_t)(5 * i + 3) % 8;
        p->keys.pages = p->pages;
        p->keys.n_pages = 8;
        p->keys.page_size = 64;
    }
    const int held = end < capacity ? end : capacity;
    p->index.end = end;
    p->index.kv_len = data_below(random, 3) ? 0 : 1 + data_below(random, held);
    p->first = end - (p->index.kv_len ? p->index.kv_len : held);
}

static inline void index_set_options(index_problem *p, data_random *random)
{
    tqkv_index *x = &p->index;
    static const int heads[6] = {1, 2, 5, 16, 64, 71}, blocks[7] = {0, 1, 4, 16, 64, 100, 1100};
    x->n_heads = heads[data_below(random, 6)];
    x->n_queries = data_below(random, 3) ? 1 + data_below(random, x->n_heads > 16 ? 3 : 20) : 1;
    x->ratio = data_below(random, 2) ? 4 : 0;
    if (x->ratio && data_below(random, 2)) x->positions = x->end * x->ratio + data_below(random, 3 * x->ratio);
    x->block = blocks[data_below(random, 7)];
    x->pool = data_below(random, 2) ? TQKV_POOL_MEAN : TQKV_POOL_MAX;
    x->relu = data_below(random, 2);
    x->query_basis = data_below(random, 2) ? TQKV_ROTATED : TQKV_ORIGINAL;
    x->query_type = data_below(random, 2) ? TQKV_TYPE_BF16 : TQKV_TYPE_F32;
    if (data_below(random, 2)) x->parallel.run = test_run_backwards;
}

/* head_dim 0: any */
static inline void index_set_up(index_problem *p, int seed, int head_dim)
{
    static const int dims[6] = {32, 64, 80, 128, 128, 512};
    data_random random = {(uint64_t)seed};
    memset(p, 0, sizeof *p);
    const tqkv_format format = test_formats[data_below(&random, TEST_FORMATS)];
    const int any = dims[data_below(&random, 6)], d = head_dim ? head_dim : any;
    index_place_keys(p, &random, format, d);
    index_set_options(p, &random);
    p->index.keys = &p->keys;
    const int n_queries = p->index.n_queries, size = p->index.block ? p->index.block : 1;
    p->n_rows = n_queries * p->index.n_heads;
    p->n_blocks = (p->index.end + size - 1) / size;
    if (data_below(&random, 2)) p->keys.center = p->center = test_rows(3, DATA_GAUSSIAN, 1, d);
    if (data_below(&random, 2)) p->keys.channel_scale = p->scales = test_scales(4, 1, d, 8.0);
    const int resident = (int)(p->index.end - p->first);
    float *rows = test_rows((uint64_t)seed, DATA_GAUSSIAN, resident, d);
    for (int i = 0; p->scales && i < resident * d; i++) rows[i] *= p->scales[i % d];
    for (int i = 0; p->scales && p->center && i < d; i++) p->center[i] *= p->scales[i];
    CHECK_RESULT(tqkv_encode(&p->keys, rows, resident, p->first), TQKV_OK);
    free(rows);
    p->q = test_rows((uint64_t)seed + 1, DATA_GAUSSIAN, p->n_rows, d);
    p->halves = (uint16_t *)test_alloc((size_t)(p->n_rows * d) * sizeof *p->halves);
    for (int i = 0; i < p->n_rows * d; i++) {
        uint32_t bits;
        memcpy(&bits, &p->q[i], sizeof bits);
        p->halves[i] = (uint16_t)(bits >> 16);
        bits &= 0xffff0000u;
        if (p->index.query_type == TQKV_TYPE_BF16) memcpy(&p->q[i], &bits, sizeof bits);
    }
    p->weights =
        data_below(&random, 3) ? test_rows((uint64_t)seed + 2, DATA_STUDENT, n_queries, p->index.n_heads) : NULL;
    p->index.weights = p->weights;
    p->scores = (float *)test_alloc_filled((size_t)(n_queries * p->n_blocks) * sizeof(float), 0xff);
}

static inline const void *index_queries(const index_problem *p)
{
    return p->index.query_type == TQKV_TYPE_BF16 ? (const void *)p->halves : (const void *)p->q;
}

/* Of the scores. */
static inline size_t index_bytes(const index_problem *p)
{
    return p->index.n_queries > 0 ? (size_t)(p->index.n_queries * p->n_blocks) * sizeof(float) : 0;
}

static inline void index_tear_down(index_problem *p)
{
    test_store_free(&p->keys);
    free(p->q);
    free(p->halves);
    free(p->weights);
    free(p->center);
    free(p->scales);
    free(p->scores);
}

#endif

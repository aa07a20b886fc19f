/* The index through the Metal API, and attention over lists of blocks. */
#include "host.h"
#include "tests/attend_fixture.h"

enum { KEYS = 20000, QUERIES = 2, CHOSEN = 50 };
enum { POSITIONS = 700, DIM = 64, INDEX_HEADS = 5, GROUP = 4, BLOCK = 16, BLOCKS = 7 };

/* The stores and rows of a layer: an index of keys, keys and values; 2 KV heads. */
typedef struct layer {
    tqkv_store stores[3];
    tqkv_metal_store gpu[3];
    float *q, *index_q, *weights;
} layer;

static void open_layer(layer *l)
{
    const tqkv_format formats[] = {TQKV_TQ4, TQKV_I8, TQKV_TQ4};
    for (int i = 0; i < 3; i++) {
        const int heads = i ? 2 : 1;
        float *rows = host_floats(31 + (uint64_t)i, (size_t)(POSITIONS * heads * DIM));
        l->stores[i] = test_store(formats[i], DIM, heads, POSITIONS, false);
        CHECK_RESULT(tqkv_encode(&l->stores[i], rows, POSITIONS, 0), TQKV_OK);
        l->gpu[i] = host_store(&l->stores[i]);
        free(rows);
    }
    l->q = host_floats(41, QUERIES * 2 * GROUP * DIM);
    l->index_q = host_floats(42, QUERIES * INDEX_HEADS * DIM);
    l->weights = host_floats(43, QUERIES * INDEX_HEADS);
}

static void close_layer(layer *l)
{
    for (int i = 0; i < 3; i++) {
        host_store_release(&l->gpu[i]);
        test_store_free(&l->stores[i]);
    }
    free(l->q);
    free(l->index_q);
    free(l->weights);
}

static tqkv_attention attention_of(const layer *l)
{
    const tqkv_attention a = {.keys = &l->stores[1],
                              .values = &l->stores[2],
                              .n_heads = 2 * GROUP,
                              .n_queries = QUERIES,
                              .end = POSITIONS,
                              .list.length = BLOCKS,
                              .list.block = BLOCK,
                              .list.newest = 5};
    return a;
}

/* From the GPU's scores: the choice of the processor, and attention to it. */
static void check_sparse(const layer *l, const tqkv_index *x, const float *scores, const int32_t *list,
                         const float *out)
{
    enum { ROWS = QUERIES * 2 * GROUP };
    int32_t chosen[QUERIES * BLOCKS];
    double *expected = test_alloc(ROWS * DIM * sizeof *expected);
    CHECK_RESULT(tqkv_index_choose(x, scores, BLOCKS, chosen), TQKV_OK);
    CHECK(!memcmp(chosen, list, sizeof chosen), "another choice: %d, not %d", list[0], chosen[0]);
    tqkv_attention a = attention_of(l);
    a.list.rows = chosen;
    reference_attend_as(REFERENCE_FLOATS, &a, l->q, expected);
    for (int i = 0; i < ROWS; i++) {
        const double error = reference_relative_error(out + i * DIM, expected + i * DIM, DIM);
        CHECK(error <= ATTEND_TOLERANCE, "row %d: relative error %.3g", i, error);
    }
    free(expected);
}

/* Scores, choice and attention in one encoder, with nothing read back. */
static void run_sparse(const void *concurrent)
{
    layer l;
    size_t bytes, choose_bytes;
    tqkv_metal *m = test_host.metal;
    open_layer(&l);
    tqkv_metal_index x = {.keys = &l.gpu[0], .index = {.n_heads = INDEX_HEADS, .n_queries = QUERIES, .end = POSITIONS}};
    x.index.relu = true;
    x.index.block = BLOCK;
    x.index.first = x.index.newest = 1;
    x.weights = host_buffer(l.weights, QUERIES * INDEX_HEADS * sizeof(float));
    const int n_blocks = (POSITIONS + BLOCK - 1) / BLOCK;
    tqkv_metal_attention a = {.attention = attention_of(&l), .keys = &l.gpu[1], .values = &l.gpu[2]};
    tqkv_metal_buffer index_q = host_buffer(l.index_q, QUERIES * INDEX_HEADS * DIM * sizeof(float)),
                      scores = host_zeros((size_t)(QUERIES * n_blocks) * sizeof(float)),
                      q = host_buffer(l.q, QUERIES * 2 * GROUP * DIM * sizeof(float)),
                      out = host_zeros(QUERIES * 2 * GROUP * DIM * sizeof(float));
    a.list = host_zeros(QUERIES * BLOCKS * sizeof(int32_t));
    CHECK_RESULT(HOST_SCRATCH(&choose_bytes, index_choose, &x, host_none, 1, host_none, host_none), TQKV_OK);
    CHECK_RESULT(HOST_SCRATCH(&bytes, attend, &a, host_none, host_none, host_none), TQKV_OK);
    CHECK(choose_bytes == 0, "%zu bytes of scratch", choose_bytes);
    tqkv_metal_buffer scratch = host_zeros(bytes);
    const tqkv_metal_buffer none = {nil, 0};
    CHECK_RESULT(HOST_PREPARE(m, index_scores, &x, none, none), TQKV_OK);
    CHECK_RESULT(HOST_PREPARE(m, index_choose, &x, none, BLOCKS, none, none), TQKV_OK);
    CHECK_RESULT(HOST_PREPARE(m, attend, &a, none, none, none), TQKV_OK);
    host_work w = host_begin(*(const bool *)concurrent);
    host_count_calls();
    CHECK_RESULT(HOST(m, w.encoder, index_scores, &x, index_q, scores), TQKV_OK);
    const id<MTLResource> written[] = {(id<MTLBuffer>)scores.buffer, (id<MTLBuffer>)a.list.buffer};
    if (*(const bool *)concurrent) [w.encoder memoryBarrierWithResources:written count:1];
    CHECK_RESULT(HOST(m, w.encoder, index_choose, &x, scores, BLOCKS, none, a.list), TQKV_OK);
    if (*(const bool *)concurrent) [w.encoder memoryBarrierWithResources:written + 1 count:1];
    CHECK_RESULT(HOST(m, w.encoder, attend, &a, q, scratch, out), TQKV_OK);
    host_check_no_calls();
    host_end(&w);
    x.index.keys = &l.stores[0];
    check_sparse(&l, &x.index, host_contents(scores), host_contents(a.list), host_contents(out));
    const tqkv_metal_buffer all[] = {x.weights, a.list, index_q, scores, q, out, scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) host_release(all[i]);
    close_layer(&l);
}

/* Scores that ascend: the newest blocks are the best. */
static void run_choose(const void *parameters)
{
    tqkv_metal_store keys = {.shape = {.format = TQKV_TQ4, .head_dim = 64, .n_kv_heads = 1, .capacity = KEYS}};
    tqkv_metal_index x = {.index = {.end = KEYS, .n_heads = 1, .n_queries = QUERIES, .first = 1}, .keys = &keys};
    size_t bytes;
    (void)parameters;
    float *scores = test_alloc(sizeof(float) * QUERIES * KEYS);
    for (int i = 0; i < QUERIES * KEYS; i++) scores[i] = (float)(i % KEYS) - 5000.0f;
    scores[KEYS - 1] = -INFINITY;
    CHECK_RESULT(HOST_SCRATCH(&bytes, index_choose, &x, host_none, 1, host_none, host_none), TQKV_OK);
    tqkv_metal_buffer from = host_buffer(scores, sizeof(float) * QUERIES * KEYS), scratch = host_zeros(bytes),
                      list = host_zeros(sizeof(int32_t) * QUERIES * CHOSEN);
    host_work w = host_begin(true);
    CHECK_RESULT(HOST(test_host.metal, w.encoder, index_choose, &x, from, CHOSEN, scratch, list), TQKV_OK);
    CHECK_REFUSED(test_host.metal, HOST(test_host.metal, w.encoder, index_choose, &x, from, -1, scratch, list),
                  TQKV_INVALID_ARGUMENT, "index_choose");
    CHECK_REFUSED(test_host.metal, HOST(test_host.metal, w.encoder, index_choose, &x, from, CHOSEN, scratch, from),
                  TQKV_INVALID_ARGUMENT, "overlap");
    host_end(&w);
    const int32_t *got = host_contents(list);
    for (int i = 0; i < QUERIES; i++)
        for (int j = 0; j < CHOSEN; j++) {
            const int32_t expected = j ? KEYS - (i == 0) - CHOSEN + j : 0;
            CHECK(got[i * CHOSEN + j] == expected, "query %d, entry %d: %d, not %d", i, j, got[i * CHOSEN + j],
                  expected);
        }
    host_release(from);
    host_release(scratch);
    host_release(list);
    free(scores);
}

void index_host_cases(void)
{
    test_add(run_choose, NULL, 0, "index/choose");
    for (int concurrent = 0; concurrent < 2; concurrent++) {
        const bool own = concurrent != 0;
        test_add(run_sparse, &own, sizeof own, "index/sparse/%s", own ? "concurrent" : "serial");
    }
}

/* Page tables, slots and trees through the Metal API, against tqkv.h over the same pools. */
#include "host.h"
#include "tests/attend_fixture.h"

enum { HEADS = 2, GROUP = 4, DIM = 64, PAGES = 5, PAGE_SLOTS = 64, TOKENS = 150, QUERIES = 3 };

static const tqkv_metal_buffer none = {nil, 0};
static const int32_t table[PAGES - 1] = {3, 0, 4, -1};

static tqkv_store make_pool(tqkv_format format)
{
    tqkv_store s = test_store(format, DIM, HEADS, PAGES * PAGE_SLOTS, false);
    s.pages = table;
    s.n_pages = PAGES - 1;
    s.page_size = PAGE_SLOTS;
    return s;
}

static bool same_pool(const tqkv_metal_store *gpu, const tqkv_store *s)
{
    return !memcmp(host_contents(gpu->codes), s->codes, s->codes_size) &&
           (!s->norms_size || !memcmp(host_contents(gpu->norms), s->norms, s->norms_size));
}

/* A pair of pools on the processor and on the GPU, and rows for TOKENS tokens. */
typedef struct pools {
    tqkv_store keys, values;
    tqkv_metal_store gpu_keys, gpu_values;
    float *rows;
    tqkv_metal_buffer k, v;
} pools;

static void open_pools(pools *p)
{
    const size_t count = (size_t)TOKENS * HEADS * DIM;
    p->keys = make_pool(TQKV_I8);
    p->values = make_pool(TQKV_TQ4);
    p->gpu_keys = host_store(&p->keys);
    p->gpu_values = host_store(&p->values);
    p->rows = host_floats(21, 2 * count);
    p->k = host_buffer(p->rows, count * sizeof(float));
    p->v = host_buffer(p->rows + count, count * sizeof(float));
}

static void close_pools(pools *p)
{
    host_store_release(&p->gpu_keys);
    host_store_release(&p->gpu_values);
    test_store_free(&p->keys);
    test_store_free(&p->values);
    host_release(p->k);
    host_release(p->v);
    free(p->rows);
}

static void fill_pools(pools *p)
{
    const float *v = p->rows + (size_t)TOKENS * HEADS * DIM;
    CHECK_RESULT(tqkv_encode(&p->keys, p->rows, TOKENS, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&p->values, v, TOKENS, 0), TQKV_OK);
    host_work w = host_begin(false);
    CHECK_RESULT(HOST(test_host.metal, w.encoder, encode, &p->gpu_keys, &p->gpu_values, p->k, p->v, TOKENS, 0, none),
                 TQKV_OK);
    host_end(&w);
    CHECK(same_pool(&p->gpu_keys, &p->keys) && same_pool(&p->gpu_values, &p->values), "the pools differ");
}

static void check_decode(const pools *p)
{
    const size_t size = (size_t)90 * HEADS * DIM * sizeof(float);
    float *expected = test_alloc(size);
    tqkv_metal_buffer dst = host_zeros(size);
    CHECK_RESULT(tqkv_decode(&p->values, 50, 90, TQKV_ORIGINAL, expected), TQKV_OK);
    host_work w = host_begin(false);
    CHECK_RESULT(HOST(test_host.metal, w.encoder, decode, &p->gpu_values, 50, 90, TQKV_ORIGINAL, dst), TQKV_OK);
    host_end(&w);
    CHECK(!memcmp(expected, host_contents(dst), size), "decoded rows differ");
    host_release(dst);
    free(expected);
}

static void check_close(const float *got, const double *expected, int n_rows)
{
    for (int i = 0; i < n_rows; i++) {
        const double error = reference_relative_error(got + i * DIM, expected + i * DIM, DIM);
        CHECK(error <= ATTEND_TOLERANCE, "row %d: relative error %.3g", i, error);
    }
}

/* Positions by tables, and a tree over the newest of them. */
static void run_pages(const void *parameters)
{
    const uint64_t tree[QUERIES] = {1, 2, 5};
    enum { ROWS = QUERIES * HEADS * GROUP };
    pools p;
    size_t bytes;
    (void)parameters;
    open_pools(&p);
    fill_pools(&p);
    check_decode(&p);
    float *q = host_floats(22, ROWS * DIM);
    double *expected = test_alloc(ROWS * DIM * sizeof *expected);
    tqkv_metal_attention a = {.keys = &p.gpu_keys, .values = &p.gpu_values, .tree = host_buffer(tree, sizeof tree)};
    tqkv_attention host = {.keys = &p.keys,
                           .values = &p.values,
                           .n_heads = HEADS * GROUP,
                           .n_queries = QUERIES,
                           .end = TOKENS,
                           .tree = tree};
    a.attention = host;
    CHECK_RESULT(HOST_SCRATCH(&bytes, attend, &a, host_none, host_none, host_none), TQKV_OK);
    tqkv_metal_buffer qb = host_buffer(q, ROWS * DIM * sizeof(float)), scratch = host_zeros(bytes),
                      out = host_zeros(ROWS * DIM * sizeof(float));
    CHECK_RESULT(HOST_PREPARE(test_host.metal, attend, &a, none, none, none), TQKV_OK);
    host_work w = host_begin(true);
    host_count_calls();
    CHECK_RESULT(HOST(test_host.metal, w.encoder, attend, &a, qb, scratch, out), TQKV_OK);
    host_check_no_calls();
    host_end(&w);
    reference_attend_as(REFERENCE_FLOATS, &host, q, expected);
    check_close(host_contents(out), expected, ROWS);
    host_release(a.tree);
    host_release(qb);
    host_release(scratch);
    host_release(out);
    free(q);
    free(expected);
    close_pools(&p);
}

/* The store of a pool with a table of slots: of pages of one position. */
static tqkv_metal_store by_slots(const tqkv_metal_store *pool, const int32_t *slots, int n)
{
    tqkv_metal_store s = *pool;
    s.shape.pages = slots;
    s.shape.n_pages = n;
    s.shape.page_size = 1;
    s.pages = host_buffer(slots, (size_t)n * sizeof *slots);
    return s;
}

static void run_slots(const void *parameters)
{
    const int32_t slots[] = {5, -1, 0, 319, 77};
    pools p;
    (void)parameters;
    open_pools(&p);
    CHECK_RESULT(test_encode_slots(&p.keys, p.rows, 5, slots), TQKV_OK);
    CHECK_RESULT(test_encode_slots(&p.values, p.rows + (size_t)TOKENS * HEADS * DIM, 5, slots), TQKV_OK);
    host_work w = host_begin(false);
    const tqkv_metal_store keys = by_slots(&p.gpu_keys, slots, 5);
    tqkv_metal_store values = by_slots(&p.gpu_values, slots, 5);
    CHECK_RESULT(HOST(test_host.metal, w.encoder, encode, &keys, &values, p.k, p.v, 5, 0, none), TQKV_OK);
    host_end(&w);
    CHECK(same_pool(&p.gpu_keys, &p.keys) && same_pool(&p.gpu_values, &p.values), "the pools differ");
    CHECK_RESULT(test_encode_slots(&p.values, p.rows, 3, slots), TQKV_OK);
    w = host_begin(false);
    values.shape.pages = NULL;
    CHECK_RESULT(HOST(test_host.metal, w.encoder, encode, &values, NULL, p.k, none, 3, 0, none), TQKV_OK);
    host_end(&w);
    CHECK(same_pool(&p.gpu_values, &p.values), "the values' pool differs");
    host_release(keys.pages);
    host_release(values.pages);
    close_pools(&p);
}

/* Two sequences over the pools of the pair: their own queries and lengths, in one call. */
enum { ROW = HEADS * GROUP * DIM, ROWS_OF_BATCH = 3 };

typedef struct batch {
    tqkv_metal_attention items[2];
    tqkv_metal_buffer rows, results, lists, q[2], out[2], arguments, scratch;
    void *contents;   /* of the arguments */
    double *expected; /* [ROWS_OF_BATCH][ROW] */
} batch;

/* listed: each has a list of its own */
static void open_batch(batch *b, const pools *p, bool listed)
{
    static const int32_t lists[][3] = {{0, 2, -1}, {1, 3, 4}, {0, 1, 2}};
    const int lengths[] = {TOKENS, 70}, queries[] = {1, 2}, first[] = {0, 1};
    float *rows = host_floats(23, ROWS_OF_BATCH * ROW);
    const size_t size = ROWS_OF_BATCH * ROW * sizeof(float);
    memset(b, 0, sizeof *b);
    b->expected = test_alloc(ROWS_OF_BATCH * ROW * sizeof *b->expected);
    b->rows = host_buffer(rows, size);
    b->results = host_zeros(size);
    b->lists = host_buffer(lists, sizeof lists);
    for (int i = 0; i < 2; i++) {
        const int at = first[i] * ROW;
        tqkv_attention host = {.keys = &p->keys, .values = &p->values, .n_heads = HEADS * GROUP};
        host.n_queries = queries[i];
        host.end = lengths[i];
        if (listed) host.list.rows = lists[first[i]], host.list.length = 3, host.list.block = 16;
        reference_attend_as(REFERENCE_FLOATS, &host, rows + at, b->expected + at);
        b->items[i].attention = host;
        if (listed) b->items[i].list = b->lists, b->items[i].list.offset += (size_t)first[i] * sizeof lists[0];
        b->items[i].keys = &p->gpu_keys;
        b->items[i].values = &p->gpu_values;
        b->q[i] = b->rows, b->q[i].offset += (size_t)at * sizeof(float);
        b->out[i] = b->results, b->out[i].offset += (size_t)at * sizeof(float);
    }
    CHECK_RESULT(tqkv_metal_plan_attend_batch(b->items, 2, NULL, none, NULL, none, NULL, host_plan()), TQKV_OK);
    b->arguments = host_zeros(host_plan()->arguments_size);
    b->contents = host_contents(b->arguments);
    b->scratch = host_zeros(host_plan()->scratch_size);
    free(rows);
}

static tqkv_result attend_batch(const batch *b, int n, id<MTLComputeCommandEncoder> encoder)
{
    return HOST(test_host.metal, encoder, attend_batch, b->items, n, b->q, b->arguments, b->contents, b->scratch,
                b->out);
}

static void refuse_batches(const batch *whole, id<MTLComputeCommandEncoder> encoder)
{
    tqkv_metal *m = test_host.metal;
    batch b = *whole;
    b.arguments = none;
    CHECK_REFUSED(m, attend_batch(&b, 2, encoder), TQKV_INVALID_ARGUMENT, "arguments: no buffer");
    b = *whole, b.arguments.offset += 256;
    CHECK_REFUSED(m, attend_batch(&b, 2, encoder), TQKV_INVALID_ARGUMENT, "arguments: needs");
    b = *whole, b.arguments.offset -= 64;
    CHECK_REFUSED(m, attend_batch(&b, 2, encoder), TQKV_INVALID_ARGUMENT, "arguments: offset");
    b = *whole, b.scratch = host_zeros(64); /* sizes are for any lengths of the items: these take less */
    CHECK_REFUSED(m, attend_batch(&b, 2, encoder), TQKV_INVALID_ARGUMENT, "scratch: needs");
    host_release(b.scratch);
    b = *whole, b.arguments = b.scratch;
    CHECK_REFUSED(m, attend_batch(&b, 2, encoder), TQKV_INVALID_ARGUMENT, "overlap");
    b = *whole, b.q[1] = b.out[0];
    CHECK_REFUSED(m, attend_batch(&b, 2, encoder), TQKV_UNSUPPORTED, "attend_batch");
    CHECK_REFUSED(m, attend_batch(whole, -1, encoder), TQKV_INVALID_ARGUMENT, "attend_batch");
    CHECK_REFUSED(m, attend_batch(whole, 2, nil), TQKV_INVALID_ARGUMENT, "no encoder");
    b.arguments = b.scratch = none;
    CHECK_RESULT(attend_batch(&b, 0, encoder), TQKV_OK);
}

static void run_batch(const void *parameters)
{
    pools p;
    batch b;
    open_pools(&p);
    fill_pools(&p);
    open_batch(&b, &p, *(const bool *)parameters);
    host_work w = host_begin(true);
    refuse_batches(&b, w.encoder);
    CHECK_RESULT(HOST_PREPARE(test_host.metal, attend_batch, b.items, 2, NULL, none, NULL, none, NULL), TQKV_OK);
    host_count_calls();
    CHECK_RESULT(attend_batch(&b, 2, w.encoder), TQKV_OK);
    host_check_no_calls();
    host_end(&w);
    check_close(host_contents(b.results), b.expected, ROWS_OF_BATCH * HEADS * GROUP);
    host_release(b.rows);
    host_release(b.results);
    host_release(b.lists);
    host_release(b.arguments);
    host_release(b.scratch);
    free(b.expected);
    close_pools(&p);
}

static void run_refusals(const void *parameters)
{
    const int32_t twice[] = {5, -1, 5};
    tqkv_metal *m = test_host.metal;
    pools p;
    (void)parameters;
    open_pools(&p);
    tqkv_metal_store s = p.gpu_keys, slots = by_slots(&s, twice, 3), b;
    host_work w = host_begin(false);
    CHECK_REFUSED(m, HOST(m, w.encoder, encode, &slots, NULL, p.k, none, 3, 0, none), TQKV_INVALID_ARGUMENT, "encode");
    b = slots, b.shape.pages = NULL, b.shape.n_pages = 4;
    CHECK_REFUSED(m, HOST(m, w.encoder, encode, &b, NULL, p.k, none, 4, 0, none), TQKV_INVALID_ARGUMENT,
                  "pages: needs");
    b = slots, b.shape.pages = NULL, b.pages.offset += 2;
    CHECK_REFUSED(m, HOST(m, w.encoder, encode, &b, NULL, p.k, none, 2, 0, none), TQKV_INVALID_ARGUMENT,
                  "pages: offset");
    CHECK_REFUSED(m, HOST(m, w.encoder, encode, &s, NULL, p.k, none, 1, PAGES * PAGE_SLOTS, none), TQKV_OUT_OF_RANGE,
                  "encode");
    s.pages.offset += 4;
    CHECK_REFUSED(m, HOST(m, w.encoder, encode, &s, NULL, p.k, none, 1, 0, none), TQKV_INVALID_ARGUMENT,
                  "pages: needs");
    s.pages = none;
    CHECK_REFUSED(m, HOST(m, w.encoder, encode, &s, NULL, p.k, host_none, 1, 0, none), TQKV_INVALID_ARGUMENT, "encode");
    s.pages = s.codes;
    CHECK_REFUSED(m, HOST(m, w.encoder, encode, &s, NULL, p.k, host_none, 1, 0, none), TQKV_INVALID_ARGUMENT,
                  "overlap");
    host_end(&w);
    CHECK(same_pool(&p.gpu_keys, &p.keys), "a refused call has written");
    host_release(slots.pages);
    close_pools(&p);
}

void page_host_cases(void)
{
    test_add(run_pages, NULL, 0, "pages/attend");
    test_add(run_slots, NULL, 0, "pages/slots");
    for (int i = 0; i < 2; i++) {
        const bool listed = i != 0;
        test_add(run_batch, &listed, sizeof listed, listed ? "pages/batch/list" : "pages/batch");
    }
    test_add(run_refusals, NULL, 0, "refusals/pages");
}

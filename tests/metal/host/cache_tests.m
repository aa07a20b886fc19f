/* Caches in shared memory: the processor reads what the GPU writes, and the reverse. Histories of calls at random, from
   the seed in a case's name: on the processor, in calls that wait, and recorded in the caller's encoder. */
#include "host.h"
#include "tests/cache_fixture.h"
#include <math.h>

static float *attend_cache(tqkv_cache *cache, const cache_row *row, int n_queries)
{
    const size_t count = (size_t)(n_queries * CACHE_HEADS * CACHE_GROUP * row->head_dim);
    float *q = host_floats(31, count), *out = test_alloc(count * sizeof *out);
    CHECK_RESULT(tqkv_cache_attend(cache, q, n_queries, out), TQKV_OK);
    free(q);
    return out;
}

/* What outputs of a cache on the GPU may differ from the processor's. */
static double difference_of(const tqkv_cache *c)
{
    const tqkv_store *tail = test_tail(c);
    return reference_gpu_difference(test_keys(c)->format, tail ? tail->format : TQKV_FORMAT_DEFAULT,
                                    test_values(c)->format, 1.0);
}

static void check_close(const float *a, const float *b, size_t count, double most, const char *what)
{
    double wrong = 0, all = 0;
    for (size_t i = 0; i < count; i++) {
        wrong += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        all += (double)b[i] * (double)b[i];
    }
    CHECK(wrong <= most * most * all, "%s: relative difference %g", what, sqrt(wrong / all));
}

/* ---- Histories ---- */

enum { CPU, WAITING, RECORDED, SIDES, TOKENS = 40, MOST = 9, MOST_HEADS = 16 };

typedef struct history {
    tqkv_cache_desc desc;
    tqkv_cache *caches[SIDES];
    data_random random;
    size_t key_dim, value_dim, value_size;
    char *k, *v, *q, *out[SIDES]; /* [TOKENS][heads][dim], out: [MOST] of them */
} history;

static int below(history *h, int limit) { return data_below(&h->random, limit); }

/* Every kind of cache that a GPU takes. */
static tqkv_cache_desc random_desc(history *h)
{
    static const int dims[] = {64, 128, 32, 512, 80, 448, 192, 64, 256, 96, 48};
    static const float sinks[MOST_HEADS] = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f};
    tqkv_cache_desc d = {.head_dim = dims[below(h, 11)], .n_kv_heads = 1 + below(h, 2), .capacity = 30 + below(h, 30)};
    const bool latent = d.head_dim == 448 || d.head_dim == 512;
    d.n_heads = d.n_kv_heads * (1 + below(h, MOST_HEADS / 2));
    d.key_format = test_no_format(below(h, TEST_FORMATS + 1));
    d.value_format = test_no_format(below(h, TEST_FORMATS + 1));
    d.ring = below(h, 2);
    d.window = below(h, 2) ? 1 + below(h, 25) : 0;
    if (below(h, 2)) d.exact_first = below(h, 9), d.exact_last = below(h, 20);
    if (below(h, 3) == 0) d.calibrate = 16 + below(h, 8);
    d.type = test_no_type(below(h, 5) - 2 > 0 ? below(h, 2) + 1 : 0);
    d.shared = latent && below(h, 3);
    if (d.shared) d.value_format = TQKV_FORMAT_DEFAULT;
    d.tail_dim = latent && below(h, 4) ? 64 : 0;
    d.tail_format = d.tail_dim ? test_no_format(below(h, TEST_FORMATS + 1)) : TQKV_FORMAT_DEFAULT;
    d.value_dim = d.head_dim == 192 && below(h, 2) ? 128 : 0;
    d.sinks = below(h, 2) ? sinks : NULL;
    d.softcap = below(h, 4) ? 0.0f : 20.0f;
    d.non_causal = below(h, 6) == 0;
    d.matrix_group = below(h, 3) ? 0 : 2;
    return d;
}

/* [n], in the cache's type. */
static char *random_rows(const history *h, uint64_t seed, size_t n)
{
    float *rows = host_floats(seed, n);
    uint16_t *halves = (uint16_t *)rows;
    for (size_t i = 0; i < n && h->desc.type != TQKV_TYPE_F32; i++) halves[i] = reference_narrow(h->desc.type, rows[i]);
    return (char *)rows;
}

static bool open_history(history *h, int seed)
{
    memset(h, 0, sizeof *h);
    h->random.state = (uint64_t)seed;
    h->desc = random_desc(h);
    h->value_size = h->desc.type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t);
    h->key_dim = (size_t)(h->desc.head_dim + h->desc.tail_dim);
    h->value_dim = (size_t)(h->desc.value_dim ? h->desc.value_dim : h->desc.head_dim);
    const size_t kv = (size_t)(TOKENS * h->desc.n_kv_heads), rows = (size_t)(TOKENS * h->desc.n_heads);
    h->k = random_rows(h, 81, kv * h->key_dim);
    h->v = random_rows(h, 82, kv * h->value_dim);
    h->q = random_rows(h, 83, rows * h->key_dim);
    tqkv_result results[SIDES];
    for (int i = 0; i < SIDES; i++) {
        h->desc.metal = i == CPU ? NULL : test_host.metal;
        results[i] = tqkv_cache_create(&h->desc, &h->caches[i]);
        h->out[i] = test_alloc((size_t)(MOST * h->desc.n_heads) * h->value_dim * sizeof(float));
        CHECK_RESULT(results[i], results[CPU]);
    }
    return results[CPU] == TQKV_OK;
}

static void close_history(history *h)
{
    for (int i = 0; i < SIDES; i++) {
        tqkv_cache_destroy(h->caches[i]);
        free(h->out[i]);
    }
    free(h->k);
    free(h->v);
    free(h->q);
}

/* All caches have the processor's snapshot. */
static void check_snapshots(const history *h, const char *when)
{
    stream first = stream_of_cache(h->caches[CPU]);
    for (int i = 1; i < SIDES; i++) {
        stream other = stream_of_cache(h->caches[i]);
        CHECK(stream_is_equal(&first, &other), "%s, at %d: side %d has another snapshot", when,
              (int)tqkv_cache_end(h->caches[CPU]), i);
        stream_free(&other);
    }
    stream_free(&first);
}

static float value_of(const history *h, const char *rows, size_t i)
{
    return h->desc.type == TQKV_TYPE_F32 ? ((const float *)rows)[i]
                                         : (float)reference_wide(h->desc.type, ((const uint16_t *)rows)[i]);
}

/* Outputs of n queries: as recorded so waited for, and near the processor's unless it has no view of such queries. */
static void check_outputs(const history *h, int n, const tqkv_result results[SIDES], const char *what)
{
    const size_t count = (size_t)(n * h->desc.n_heads) * h->value_dim;
    const double of_type = h->desc.type == TQKV_TYPE_F32 ? 0.0 : h->desc.type == TQKV_TYPE_F16 ? 1e-3 : 8e-3;
    CHECK_RESULT(results[RECORDED], results[WAITING]);
    if (results[WAITING] != TQKV_OK) return;
    CHECK(!memcmp(h->out[WAITING], h->out[RECORDED], count * h->value_size), "%s: recorded, other bits", what);
    if (results[CPU] != TQKV_OK) return;
    float *wide[2] = {test_alloc(count * sizeof(float)), test_alloc(count * sizeof(float))};
    for (size_t i = 0; i < count; i++) {
        wide[0][i] = value_of(h, h->out[WAITING], i);
        wide[1][i] = value_of(h, h->out[CPU], i);
    }
    check_close(wide[0], wide[1], count, difference_of(h->caches[CPU]) + of_type, what);
    free(wide[0]);
    free(wide[1]);
}

/* Of keys of two parts the rows of the tail lie behind those of the keys, and are the values of a shared stream. */
static void key_buffers(const history *h, int t, int n, tqkv_metal_buffer *kb, tqkv_metal_buffer *vb)
{
    const size_t heads = (size_t)h->desc.n_kv_heads, rows = (size_t)n * heads,
                 dim = (size_t)h->desc.head_dim * h->value_size, tail = (size_t)h->desc.tail_dim * h->value_size;
    const char *k = h->k + (size_t)t * heads * (dim + tail);
    *kb = host_zeros(rows * (dim + tail));
    for (size_t i = 0; i < rows; i++) {
        memcpy((char *)host_contents(*kb) + i * dim, k + i * (dim + tail), dim);
        memcpy((char *)host_contents(*kb) + rows * dim + i * tail, k + i * (dim + tail) + dim, tail);
    }
    *vb = *kb;
    if (h->desc.shared) vb->offset += rows * dim;
    if (!h->desc.shared)
        *vb = host_buffer(h->v + (size_t)t * heads * h->value_dim * h->value_size, rows * h->value_dim * h->value_size);
}

/* Tokens [t, t + n) into the caller's encoder, whose dispatches run in any order between barriers, with the attention
   of as many queries behind them; append: what it gives. */
static tqkv_result record(history *h, int t, int n, bool appends, const tqkv_attention *known, tqkv_result *append)
{
    tqkv_metal *m = test_host.metal;
    const tqkv_cache *c = h->caches[RECORDED];
    const size_t rows = (size_t)(n * h->desc.n_heads), out_size = rows * h->value_dim * h->value_size;
    tqkv_metal_buffer kb, vb, codes, flag = host_zeros(4), out = host_zeros(out_size),
                                     q = host_buffer(h->q + (size_t)(t * h->desc.n_heads) * h->key_dim * h->value_size,
                                                     rows * h->key_dim * h->value_size);
    tqkv_metal_attention some = {.attention = *known};
    if (known->tree) some.tree = host_buffer(known->tree, (size_t)n * sizeof(uint64_t));
    if (known->list.rows) some.list = host_buffer(known->list.rows, (size_t)(n * known->list.length) * sizeof(int32_t));
    key_buffers(h, t, n, &kb, &vb);
    CHECK_RESULT(tqkv_metal_find(m, test_keys(c)->codes, &codes), TQKV_OK);
    host_work work = host_begin(true);
    *append = appends ? tqkv_metal_cache_append(m, work.encoder, h->caches[RECORDED], kb, vb, n, flag) : TQKV_OK;
    size_t bytes = 0;
    (void)HOST_SCRATCH(&bytes, cache_attend, c, host_none, NULL, &some, host_none, n, host_none, host_none);
    const tqkv_metal_buffer scratch = host_zeros(bytes);
    const id<MTLResource> written[] = {codes.buffer};
    [work.encoder memoryBarrierWithResources:written count:1];
    const tqkv_result r =
        *append != TQKV_OK ? *append : host_attend_some(m, work.encoder, c, &some, q, n, scratch, out);
    host_end(&work);
    CHECK(*(uint32_t *)host_contents(flag) == 0, "the flag is raised");
    memcpy(h->out[RECORDED], host_contents(out), out_size);
    const tqkv_metal_buffer all[] = {kb, h->desc.shared ? host_none : vb, q, out, scratch, flag, some.tree, some.list};
    for (int i = 0; i < 8; i++)
        if (all[i].buffer) host_release(all[i]);
    return r;
}

/* Appends and attends with as many queries; ends of caches that refuse stay where they are. */
static void append_some(history *h)
{
    const tqkv_attention all = {0};
    const int n = 1 + below(h, MOST), t = below(h, TOKENS - MOST);
    const size_t kv = (size_t)(t * h->desc.n_kv_heads) * h->value_size;
    tqkv_result appended[SIDES], results[SIDES];
    for (int i = CPU; i <= WAITING; i++) {
        const char *q = h->q + (size_t)(t * h->desc.n_heads) * h->key_dim * h->value_size;
        results[i] = appended[i] = tqkv_cache_append(h->caches[i], h->k + kv * h->key_dim,
                                                     h->desc.shared ? NULL : h->v + kv * h->value_dim, n);
        if (appended[i] == TQKV_OK) results[i] = tqkv_cache_attend(h->caches[i], q, n, h->out[i]);
        CHECK_RESULT(appended[i], appended[CPU]);
    }
    results[RECORDED] = record(h, t, n, true, &all, &appended[RECORDED]);
    CHECK_RESULT(appended[RECORDED], appended[CPU]);
    check_outputs(h, n, results, "appended");
}

/* Queries by a list, a tree or both. */
static void attend_some(history *h)
{
    enum { LENGTH = 3 };
    const int n = 1 + below(h, 5), t = below(h, TOKENS - MOST), way = 1 + below(h, 3);
    uint64_t tree[5];
    int32_t list[5 * LENGTH];
    tqkv_attention some = {.list.length = LENGTH, .list.block = 4, .list.newest = 1 + below(h, 3)};
    tqkv_result results[SIDES], appended;
    for (int i = 0; i < n; i++) tree[i] = data_bits(&h->random) | (uint64_t)1 << i;
    for (int i = 0; i < LENGTH * n; i++) list[i] = i % LENGTH ? list[i - 1] + below(h, 4) : below(h, 4);
    if (way & 1) some.tree = tree;
    if (way & 2) some.list.rows = list;
    if (!some.list.rows) memset(&some.list, 0, sizeof some.list);
    if (tqkv_cache_end(h->caches[CPU]) < n) return;
    results[CPU] = test_attend_some(h->caches[CPU], &some,
                                    h->q + (size_t)(t * h->desc.n_heads) * h->key_dim * h->value_size, n, h->out[CPU]);
    results[WAITING] = results[RECORDED] = record(h, t, n, false, &some, &appended);
    memcpy(h->out[WAITING], h->out[RECORDED], (size_t)(n * h->desc.n_heads) * h->value_dim * h->value_size);
    check_outputs(h, n, results, "of a list or a tree");
}

/* Each side goes on with what the next one has saved, or with a fork. */
static void copy_all(history *h)
{
    tqkv_cache *copies[SIDES] = {NULL, NULL, NULL};
    const bool forks = below(h, 2);
    const tqkv_cache_desc larger = {.capacity = h->desc.capacity + 5};
    for (int i = 0; i < SIDES; i++) {
        tqkv_cache_desc desc = {
            .sinks = h->desc.sinks, .type = h->desc.type, .n_heads = h->desc.sinks ? h->desc.n_heads : 0};
        desc.metal = i == CPU ? NULL : test_host.metal;
        stream s = stream_of_cache(h->caches[(i + 1) % SIDES]);
        CHECK_RESULT(forks ? tqkv_cache_fork(h->caches[i], &larger, &copies[i])
                           : tqkv_cache_load(&desc, stream_read, &s, &copies[i]),
                     TQKV_OK);
        stream_free(&s);
    }
    for (int i = 0; i < SIDES; i++) {
        tqkv_cache_destroy(h->caches[i]);
        h->caches[i] = copies[i];
    }
    if (forks) h->desc.capacity += 5;
}

/* The processor moves the codes of caches on the GPU. */
static void edit(history *h)
{
    const int way = below(h, 3), kept[] = {0, 2, 3};
    const int64_t end = tqkv_cache_end(h->caches[CPU]), to = end - below(h, 7);
    tqkv_result results[SIDES];
    for (int i = 0; i < SIDES; i++) {
        results[i] = way == 0   ? tqkv_cache_truncate(h->caches[i], to)
                     : way == 1 ? tqkv_cache_keep(h->caches[i], 5, kept, 3)
                                : tqkv_cache_remove(h->caches[i], 2, 4);
        CHECK_RESULT(results[i], results[CPU]);
    }
}

static void run_history(const void *parameters)
{
    static void (*const operations[])(history *) = {append_some, append_some, append_some, attend_some, edit, copy_all};
    static const char *const names[] = {"appended", "appended", "appended", "attended", "edited", "copied"};
    history h;
    const bool made = open_history(&h, *(const int *)parameters);
    for (int i = 0; made && i < 9; i++) {
        const int operation = i < 2 ? 0 : below(&h, 6);
        operations[operation](&h);
        if (!h.caches[CPU] || !h.caches[WAITING] || !h.caches[RECORDED]) break;
        check_snapshots(&h, names[operation]);
    }
    close_history(&h);
}

/* ---- What has a test of its own ---- */

/* The processor's calls use the stores of a cache on the GPU. */
static void run_one_memory(const void *parameters)
{
    const cache_row *row = parameters;
    tqkv_cache_desc desc = cache_desc(row, NULL);
    desc.metal = test_host.metal;
    tqkv_cache *cache = cache_make(row, &desc);
    REQUIRE(cache, "no cache");
    const size_t count = (size_t)(CACHE_HEADS * CACHE_GROUP * row->head_dim);
    tqkv_attention a = cache_attention(cache, &desc, 1, 0);
    float *q = host_floats(31, count), *gpu = attend_cache(cache, row, 1);
    double *expected = test_alloc(count * sizeof *expected);
    reference_attend_as(REFERENCE_FLOATS, &a, q, expected);
    CHECK(reference_relative_error(gpu, expected, count) <= 2e-5, "the processor on the GPU's codes");
    float *one = cache_data(77, 1, row->head_dim);
    CHECK_RESULT(tqkv_encode(test_keys(cache), one, 1, tqkv_cache_end(cache) - 1), TQKV_OK);
    free(gpu);
    gpu = attend_cache(cache, row, 1);
    reference_attend_as(REFERENCE_FLOATS, &a, q, expected);
    CHECK(reference_relative_error(gpu, expected, count) <= 2e-5, "the GPU on the processor's codes");
    free(one);
    free(q);
    free(expected);
    free(gpu);
    tqkv_cache_destroy(cache);
}

/* Refuses what the processor refuses, and a cache whose memory is not the context's. */
static void run_refusals(const void *parameters)
{
    const cache_row row = {TQKV_I8, TQKV_TQ4, 64, 4, false, 3, -1};
    (void)parameters;
    tqkv_cache_desc plain = cache_desc(&row, NULL), metal = plain;
    metal.metal = test_host.metal;
    tqkv_cache *cpu = cache_make(&row, &plain), *gpu = cache_make(&row, &metal);
    REQUIRE(cpu && gpu, "no caches");
    float *rows = cache_data(1, 2, row.head_dim);
    tqkv_metal_buffer b = host_buffer(rows, (size_t)(2 * CACHE_HEADS * row.head_dim) * sizeof *rows);
    CHECK_RESULT(tqkv_cache_append(gpu, rows, rows, 2), TQKV_OUT_OF_RANGE);
    rows[3] = NAN;
    CHECK_RESULT(tqkv_cache_append(gpu, rows, rows, 1), TQKV_NOT_FINITE);
    CHECK_RESULT(tqkv_cache_append(gpu, rows, rows, 0), TQKV_OK);
    tqkv_metal *m = test_host.metal;
    metal.exact_last = 2;
    tqkv_cache *exact = cache_make(&row, &metal);
    REQUIRE(exact, "no cache");
    rows[3] = 1e7f;
    CHECK_REFUSED(m, tqkv_cache_append(exact, rows, rows, 1), TQKV_NOT_FINITE, "halves");
    rows[3] = 1.0f;
    CHECK_RESULT(tqkv_cache_append(exact, rows, rows, 1), TQKV_OK);
    tqkv_cache_destroy(exact);
    host_work work = host_begin(false);
    CHECK_REFUSED(m, tqkv_metal_cache_append(m, work.encoder, cpu, b, b, 1, b), TQKV_INVALID_ARGUMENT, "memory");
    CHECK_REFUSED(m, tqkv_metal_cache_append(m, work.encoder, gpu, b, b, 2, b), TQKV_OUT_OF_RANGE, "cache_append");
    CHECK_REFUSED(m, tqkv_metal_cache_append(m, work.encoder, gpu, b, b, 1, b), TQKV_INVALID_ARGUMENT, "overlap");
    CHECK_REFUSED(m, tqkv_metal_cache_attend(m, work.encoder, cpu, b, 1, b, b), TQKV_INVALID_ARGUMENT, "memory");
    CHECK_REFUSED(m, tqkv_metal_cache_attend(m, work.encoder, gpu, b, -1, b, b), TQKV_INVALID_ARGUMENT, "attend");
    CHECK_RESULT(tqkv_metal_cache_attend(m, work.encoder, gpu, b, 0, b, b), TQKV_OK);
    CHECK_REFUSED(m, tqkv_metal_cache_append(m, work.encoder, NULL, b, b, 1, b), TQKV_INVALID_ARGUMENT, "NULL");
    host_end(&work);
    CHECK(tqkv_cache_end(gpu) == 3, "a refused append counts");
    host_release(b);
    free(rows);
    tqkv_cache_destroy(cpu);
    tqkv_cache_destroy(gpu);
}

/* Rows of `dim` that lie one behind the other, head after head and token after token, to where the strides say. */
static void spread_rows(const float *packed, int n_tokens, int n_heads, size_t dim, tqkv_strides strides, float *to)
{
    for (int i = 0; i < n_tokens * n_heads; i++)
        memcpy(to + (size_t)(i / n_heads) * strides.token + (size_t)(i % n_heads) * strides.head,
               packed + (size_t)i * dim, dim * sizeof *to);
}

/* Appends k, which are the values, too, and attends with q, recorded. k, q, expected: all floats between their rows,
   too */
static void check_recorded_strides(tqkv_cache *cache, int n, const float *k, size_t k_size, const float *q,
                                   size_t q_size, const float *expected)
{
    size_t scratch_size = 0;
    CHECK_RESULT(
        HOST_SCRATCH(&scratch_size, cache_attend, cache, host_none, NULL, NULL, host_none, n, host_none, host_none),
        TQKV_OK);
    tqkv_metal_buffer kb = host_buffer(k, k_size * sizeof *k), qb = host_buffer(q, q_size * sizeof *q),
                      ob = host_zeros(q_size * sizeof *q), scratch = host_zeros(scratch_size), flag = host_zeros(4);
    host_work work = host_begin(false);
    CHECK_RESULT(tqkv_metal_cache_append(test_host.metal, work.encoder, cache, kb, kb, n, flag), TQKV_OK);
    CHECK_RESULT(tqkv_metal_cache_attend(test_host.metal, work.encoder, cache, qb, n, scratch, ob), TQKV_OK);
    host_end(&work);
    CHECK(!memcmp(host_contents(ob), expected, q_size * sizeof *expected), "other bits, recorded");
    const tqkv_metal_buffer buffers[] = {kb, qb, ob, scratch, flag};
    for (int i = 0; i < 5; i++) host_release(buffers[i]);
}

/* Rows head by head, in both directions, and one behind the other: the same bits. In the call that waits and in one
   that is recorded; nothing is written between the rows. */
static void run_strides(const void *parameters)
{
    enum { D = 64, N = 3, GAP = 5, Q = CACHE_HEADS * CACHE_GROUP };
    const cache_row row = {TQKV_TQ5, TQKV_TQ4, D, 40, false, 20, -1};
    const tqkv_strides kv = {D, (N + GAP) * D}, by_heads = {D + GAP, (N + 1) * (D + GAP)};
    const tqkv_cache_strides strides = {kv, kv, by_heads, by_heads};
    const size_t kv_size = CACHE_HEADS * (N + GAP) * D, q_size = Q * (N + 1) * (D + GAP);
    float *packed_k = host_floats(71, N * CACHE_HEADS * D), *packed_q = host_floats(72, N * Q * D),
          packed_out[N * Q * D], *k = host_floats(74, kv_size), *q = host_floats(75, q_size),
          *out = host_floats(73, q_size), *expected = host_floats(73, q_size);
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    (void)parameters;
    desc.metal = test_host.metal;
    desc.non_causal = true;
    desc.exact_first = 30;
    spread_rows(packed_k, N, CACHE_HEADS, D, kv, k);
    spread_rows(packed_q, N, Q, D, by_heads, q);
    tqkv_cache *caches[3] = {NULL, NULL, cache_make(&row, &desc)};
    desc.strides = strides;
    for (int i = 0; i < 2; i++) CHECK_RESULT(tqkv_cache_fork(caches[2], &desc, &caches[i]), TQKV_OK);
    REQUIRE(caches[0] && caches[1] && caches[2], "no caches");
    CHECK_RESULT(tqkv_cache_append(caches[2], packed_k, packed_k, N), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(caches[2], packed_q, N, packed_out), TQKV_OK);
    spread_rows(packed_out, N, Q, D, by_heads, expected);
    CHECK_RESULT(tqkv_cache_append(caches[0], k, k, N), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(caches[0], q, N, out), TQKV_OK);
    CHECK(!memcmp(out, expected, q_size * sizeof *out), "other bits");
    memset(out, 0, q_size * sizeof *out);
    spread_rows(packed_out, N, Q, D, by_heads, out);
    check_recorded_strides(caches[1], N, k, kv_size, q, q_size, out);
    for (int i = 0; i < 3; i++) tqkv_cache_destroy(caches[i]);
    float *const memory[] = {k, q, packed_k, packed_q, out, expected};
    for (int i = 0; i < 6; i++) free(memory[i]);
}

void cache_host_cases(void)
{
    const cache_row rows[] = {{TQKV_FORMAT_DEFAULT, TQKV_FORMAT_DEFAULT, 64, 40, false, 33, -1},
                              {TQKV_TQ4, TQKV_TQ4, 128, 16, true, 50, -1}};
    for (int seed = 0; seed < 24; seed++) test_add(run_history, &seed, sizeof seed, "cache/history/%d", seed);
    for (int i = 0; i < 2; i++) test_add(run_one_memory, &rows[i], sizeof rows[i], "cache/one_memory/%d", i);
    test_add(run_refusals, NULL, 0, "refusals/cache");
    test_add(run_strides, NULL, 0, "cache/strides");
}

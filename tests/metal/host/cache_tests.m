/* Caches in shared memory: the processor reads what the GPU writes, and the reverse. */
#include "host.h"
#include "tests/cache_fixture.h"
#include "tests/reference.h"
#include <math.h>

enum { LATENT_HEADS = 8, LATENT_OUT = 2 * LATENT_HEADS * 512 };

typedef struct stream_memory {
    unsigned char *bytes;
    size_t size, at;
} stream_memory;

static size_t write_memory(void *user, const void *bytes, size_t n)
{
    stream_memory *s = user;
    s->bytes = realloc(s->bytes, s->size + n);
    memcpy(s->bytes + s->size, bytes, n);
    s->size += n;
    return n;
}

static size_t read_memory(void *user, void *bytes, size_t n)
{
    stream_memory *s = user;
    if (n > s->size - s->at) n = s->size - s->at;
    memcpy(bytes, s->bytes + s->at, n);
    s->at += n;
    return n;
}

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

/* Two caches with the same codes give the same attention. */
static void compare_caches(tqkv_cache *a, tqkv_cache *b, const cache_row *row, const char *what)
{
    for (int n_queries = 1; n_queries <= 3; n_queries += 2) {
        float *x = attend_cache(a, row, n_queries), *y = attend_cache(b, row, n_queries);
        check_close(x, y, (size_t)(n_queries * CACHE_HEADS * CACHE_GROUP * row->head_dim), difference_of(a), what);
        free(x);
        free(y);
    }
}

static tqkv_cache *reload(const tqkv_cache *cache, const tqkv_cache_desc *desc, stream_memory *s)
{
    tqkv_cache *loaded = NULL;
    CHECK_RESULT(tqkv_cache_save(cache, write_memory, s), TQKV_OK);
    CHECK_RESULT(tqkv_cache_load(desc, read_memory, s, &loaded), TQKV_OK);
    return loaded;
}

/* Both sides append the same rows and save the same snapshot. Then each loads the other's. */
static void run_both_sides(const void *parameters)
{
    const cache_row *row = parameters;
    counting counter = {0};
    tqkv_cache_desc plain = cache_desc(row, &counter), metal = plain;
    plain.sinks = metal.sinks = cache_sinks;
    metal.metal = test_host.metal;
    tqkv_cache *cpu = cache_make(row, &plain), *gpu = cache_make(row, &metal);
    stream_memory from_cpu = {0}, from_gpu = {0};
    REQUIRE(cpu && gpu, "no caches");
    compare_caches(gpu, cpu, row, "built");
    tqkv_cache *on_gpu = reload(cpu, &metal, &from_cpu), *on_cpu = reload(gpu, &plain, &from_gpu);
    CHECK(from_cpu.size == from_gpu.size && !memcmp(from_cpu.bytes, from_gpu.bytes, from_cpu.size), "snapshots differ");
    REQUIRE(on_gpu && on_cpu, "not loaded");
    compare_caches(on_gpu, on_cpu, row, "loaded");
    if (row->ring || row->truncate >= 0) {
        cache_append_seed(on_gpu, 51, 3, row->head_dim);
        cache_append_seed(on_cpu, 51, 3, row->head_dim);
        compare_caches(on_gpu, on_cpu, row, "continued");
    }
    tqkv_cache_destroy(cpu);
    tqkv_cache_destroy(gpu);
    tqkv_cache_destroy(on_cpu);
    tqkv_cache_destroy(on_gpu);
    CHECK_NO_LEAK(&counter);
    free(from_cpu.bytes);
    free(from_gpu.bytes);
}

/* Keys with a tail or without, one stream with the values or not, with halves or without; all positions, or those of a
   list and a tree: the processor's snapshot and, within rounding, its outputs. */
typedef struct latent_row {
    bool tail, apart;
    int exact;
} latent_row;

static void check_some(const float out[2][LATENT_OUT], double most, const char *what)
{
    double wrong = 0, all = 0;
    for (size_t i = 0; i < LATENT_OUT; i++) {
        wrong += ((double)out[0][i] - (double)out[1][i]) * ((double)out[0][i] - (double)out[1][i]);
        all += (double)out[0][i] * (double)out[0][i];
    }
    CHECK(all > 0 && wrong <= most * most * all, "%s: relative difference %g", what, sqrt(wrong / all));
}

static void run_latent(const void *parameters)
{
    enum { N = 40, HEADS = LATENT_HEADS };
    const latent_row row = *(const latent_row *)parameters;
    const bool tail = row.tail;
    const size_t each = 512 + (tail ? 64 : 0);
    const int32_t list[] = {0, 2, 7, -1, 3, 5};
    const uint64_t tree[] = {1, 2}; /* the second query does not see the first */
    const tqkv_attention some = {.list.rows = list, .list.length = 3, .list.block = 4, .list.newest = 3, .tree = tree};
    tqkv_cache_desc desc = {.head_dim = 512,
                            .n_kv_heads = 1,
                            .n_heads = HEADS,
                            .capacity = N,
                            .key_format = TQKV_TQ4,
                            .shared = !row.apart,
                            .exact_first = row.exact,
                            .exact_last = 2 * row.exact,
                            .tail_dim = tail ? 64 : 0};
    float *k = host_floats(64, N * each), *q = host_floats(65, 2 * HEADS * each), *v = row.apart ? k : NULL,
          out[2][LATENT_OUT], listed[2][LATENT_OUT];
    double most = 0.0;
    stream_memory saved[2] = {{0}, {0}};
    for (int i = 0; i < 2; i++) {
        tqkv_cache *cache;
        desc.metal = i ? test_host.metal : NULL;
        REQUIRE(tqkv_cache_create(&desc, &cache) == TQKV_OK, "no cache");
        CHECK_RESULT(tqkv_cache_append(cache, k, v, N - 1), TQKV_OK);
        CHECK_RESULT(tqkv_cache_append(cache, k + (N - 1) * each, v, 1), TQKV_OK);
        if (!row.apart) CHECK_RESULT(tqkv_cache_append(cache, k, k, 1), TQKV_INVALID_ARGUMENT);
        CHECK_RESULT(tqkv_cache_attend(cache, q, 2, out[i]), TQKV_OK);
        CHECK_RESULT(test_attend_some(cache, &some, q, 2, listed[i]), TQKV_OK);
        CHECK_RESULT(tqkv_cache_save(cache, write_memory, &saved[i]), TQKV_OK);
        most = difference_of(cache);
        tqkv_cache_destroy(cache);
    }
    CHECK(saved[0].size == saved[1].size && !memcmp(saved[0].bytes, saved[1].bytes, saved[0].size), "snapshots differ");
    check_some(out, most, "all");
    check_some(listed, most, "of a list and a tree");
    CHECK(memcmp(out[1], listed[1], sizeof out[1]) != 0, "the list was not used");
    for (int i = 0; i < 2; i++) free(saved[i].bytes);
    free(k);
    free(q);
}

/* A cache of keys of 192, values of 128 and rows of bfloat16: the processor's snapshot, and its outputs but for one
   rounding more. */
static void run_types(const void *parameters)
{
    enum { N = 5 };
    tqkv_cache_desc desc = {
        .head_dim = 192, .value_dim = 128, .n_kv_heads = CACHE_HEADS, .n_heads = CACHE_HEADS, .capacity = 8};
    const size_t n_k = N * CACHE_HEADS * 192, n_v = N * CACHE_HEADS * 128, n_out = CACHE_HEADS * 128;
    float *k = host_floats(61, n_k), *v = host_floats(62, n_v);
    uint16_t *halves = (uint16_t *)k, *value_halves = (uint16_t *)v, out[2][CACHE_HEADS * 128];
    stream_memory saved[2] = {{0}, {0}};
    (void)parameters;
    desc.type = TQKV_TYPE_BF16;
    for (size_t i = 0; i < n_k; i++) halves[i] = reference_narrow(desc.type, k[i]);
    for (size_t i = 0; i < n_v; i++) value_halves[i] = reference_narrow(desc.type, v[i]);
    for (int i = 0; i < 2; i++) {
        tqkv_cache *cache;
        desc.metal = i ? test_host.metal : NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
        CHECK_RESULT(tqkv_cache_append(cache, halves, value_halves, N), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(cache, halves + 7, 1, out[i]), TQKV_OK);
        CHECK_RESULT(tqkv_cache_save(cache, write_memory, &saved[i]), TQKV_OK);
        tqkv_cache_destroy(cache);
    }
    CHECK(saved[0].size == saved[1].size && !memcmp(saved[0].bytes, saved[1].bytes, saved[0].size), "snapshots differ");
    double wrong = 0, all = 0;
    for (size_t i = 0; i < n_out; i++) {
        const double a = reference_wide(desc.type, out[0][i]), b = reference_wide(desc.type, out[1][i]);
        wrong += (a - b) * (a - b);
        all += a * a;
    }
    CHECK(all > 0 && wrong <= all / 65536, "relative difference %g",
          sqrt(wrong / all)); /* 2^-8: all rounded otherwise */
    desc.head_dim = 112;
    desc.value_dim = 0;
    tqkv_cache *cache;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_UNSUPPORTED);
    for (int i = 0; i < 2; i++) free(saved[i].bytes);
    free(k);
    free(v);
}

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

/* A step of decoding in the caller's encoder: append, barrier, attend. */
static void record_step(tqkv_cache *cache, const float *k, const float *v, const float *q, int head_dim, float *out)
{
    const size_t kv = (size_t)(CACHE_HEADS * head_dim) * sizeof(float), rows = kv * CACHE_GROUP;
    size_t scratch_size = 0;
    CHECK_RESULT(
        HOST_SCRATCH(&scratch_size, cache_attend, cache, host_none, NULL, NULL, host_none, 1, host_none, host_none),
        TQKV_OK);
    tqkv_metal_buffer kb = host_buffer(k, kv), vb = host_buffer(v, kv), qb = host_buffer(q, rows),
                      ob = host_zeros(rows);
    tqkv_metal_buffer scratch = host_zeros(scratch_size), flag = host_zeros(4), codes;
    CHECK_RESULT(tqkv_metal_find(test_host.metal, test_keys(cache)->codes, &codes), TQKV_OK);
    host_work work = host_begin(true);
    CHECK_RESULT(tqkv_metal_cache_append(test_host.metal, work.encoder, cache, kb, vb, 1, flag), TQKV_OK);
    const id<MTLResource> written[] = {codes.buffer};
    [work.encoder memoryBarrierWithResources:written count:1];
    CHECK_RESULT(tqkv_metal_cache_attend(test_host.metal, work.encoder, cache, qb, 1, scratch, ob), TQKV_OK);
    host_end(&work);
    memcpy(out, host_contents(ob), rows);
    host_release(kb);
    host_release(vb);
    host_release(qb);
    host_release(ob);
    host_release(scratch);
    host_release(flag);
}

/* One query by lists that only the GPU knows, recorded. */
static void compare_listed(tqkv_cache *gpu, tqkv_cache *cpu, size_t count)
{
    const int32_t list[] = {0, 1, 3, -1};
    const tqkv_attention known = {.list.rows = list, .list.length = 4, .list.block = 4, .list.newest = 2};
    tqkv_metal_attention some = {.attention = known};
    float *q = host_floats(90, count), *expected = test_alloc(count * sizeof *q);
    size_t bytes = 0;
    tqkv_metal *m = test_host.metal;
    some.attention.list.rows = NULL;
    some.list = host_buffer(list, sizeof list);
    CHECK_RESULT(HOST_SCRATCH(&bytes, cache_attend, gpu, host_none, NULL, &some, host_none, 1, host_none, host_none),
                 TQKV_OK);
    tqkv_metal_buffer qb = host_buffer(q, count * sizeof *q), ob = host_zeros(count * sizeof *q),
                      scratch = host_zeros(bytes);
    host_work work = host_begin(true);
    CHECK_RESULT(host_attend_some(m, work.encoder, gpu, &some, qb, 1, scratch, ob), TQKV_OK);
    some.attention.list.block = 5;
    CHECK_REFUSED(m, host_attend_some(m, work.encoder, gpu, &some, qb, 1, scratch, ob), TQKV_INVALID_ARGUMENT,
                  "attend");
    host_end(&work);
    CHECK_RESULT(test_attend_some(cpu, &known, q, 1, expected), TQKV_OK);
    check_close(host_contents(ob), expected, count, difference_of(cpu), "listed");
    host_release(some.list);
    host_release(qb);
    host_release(ob);
    host_release(scratch);
    free(q);
    free(expected);
}

static void run_recorded(const void *parameters)
{
    const cache_row *row = parameters;
    tqkv_cache_desc plain = cache_desc(row, NULL), metal = plain;
    plain.sinks = metal.sinks = cache_sinks;
    metal.metal = test_host.metal;
    tqkv_cache *cpu = cache_make(row, &plain), *gpu = cache_make(row, &metal);
    REQUIRE(cpu && gpu, "no caches");
    const size_t count = (size_t)(CACHE_HEADS * CACHE_GROUP * row->head_dim);
    float *a = test_alloc(count * sizeof *a), *b = test_alloc(count * sizeof *b);
    for (int step = 0; step < 4; step++) {
        float *k = cache_data((uint64_t)(60 + step), 1, row->head_dim),
              *v = cache_data((uint64_t)(70 + step), 1, row->head_dim);
        float *q = host_floats((uint64_t)(80 + step), count);
        CHECK_RESULT(tqkv_cache_append(cpu, k, v, 1), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(cpu, q, 1, a), TQKV_OK);
        record_step(gpu, k, v, q, row->head_dim, b);
        check_close(b, a, count, difference_of(cpu), "step");
        CHECK(tqkv_cache_end(cpu) == tqkv_cache_end(gpu), "ends differ");
        free(k);
        free(v);
        free(q);
    }
    compare_listed(gpu, cpu, count);
    free(a);
    free(b);
    tqkv_cache_destroy(cpu);
    tqkv_cache_destroy(gpu);
}

/* The processor moves the codes of a cache on the GPU; a fork lies in the context's memory too. */
static void run_edited(const void *parameters)
{
    const cache_row *row = parameters;
    const int kept[] = {0, 2, 3};
    tqkv_cache_desc plain = cache_desc(row, NULL), metal = plain, larger = {0};
    plain.sinks = metal.sinks = cache_sinks;
    metal.metal = test_host.metal;
    larger.capacity = row->capacity + 5;
    tqkv_cache *caches[2] = {cache_make(row, &plain), cache_make(row, &metal)}, *copies[2] = {NULL, NULL};
    REQUIRE(caches[0] && caches[1], "no caches");
    for (int i = 0; i < 2; i++) {
        CHECK_RESULT(tqkv_cache_keep(caches[i], 5, kept, 3), TQKV_OK);
        if (!row->ring) CHECK_RESULT(tqkv_cache_remove(caches[i], 2, 4), TQKV_OK);
        CHECK_RESULT(tqkv_cache_fork(caches[i], &larger, &copies[i]), TQKV_OK);
    }
    compare_caches(caches[1], caches[0], row, "edited");
    REQUIRE(copies[0] && copies[1], "no forks");
    for (int i = 0; i < 2; i++) {
        tqkv_cache_destroy(caches[i]);
        cache_append_seed(copies[i], 51, 3, row->head_dim);
    }
    compare_caches(copies[1], copies[0], row, "forked");
    for (int i = 0; i < 2; i++) tqkv_cache_destroy(copies[i]);
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

/* All caches have the snapshot of the first one. */
static void check_snapshots(tqkv_cache *const *caches, int n, const char *when)
{
    stream_memory first = {0};
    CHECK_RESULT(tqkv_cache_save(caches[0], write_memory, &first), TQKV_OK);
    for (int i = 1; i < n; i++) {
        stream_memory other = {0};
        CHECK_RESULT(tqkv_cache_save(caches[i], write_memory, &other), TQKV_OK);
        CHECK(other.size == first.size && !memcmp(other.bytes, first.bytes, first.size), "snapshot %d, %s, at %d", i,
              when, (int)tqkv_cache_end(caches[i]));
        free(other.bytes);
    }
    free(first.bytes);
}

typedef struct ends_row {
    cache_row cache;
    int first, last;
} ends_row;

/* Halves of the first and newest positions: written by the GPU or by the processor they have the same bytes, through
   appends of either kind, truncation, removal and forks. */
static void run_ends(const void *parameters)
{
    const ends_row *ends = parameters;
    const cache_row *row = &ends->cache;
    tqkv_cache_desc plain = cache_desc(row, NULL);
    plain.exact_first = ends->first;
    plain.exact_last = ends->last;
    tqkv_cache_desc metal = plain;
    metal.metal = test_host.metal;
    tqkv_cache *cpu = cache_make(row, &plain), *gpu = cache_make(row, &metal), *fork = NULL;
    REQUIRE(cpu && gpu, "no caches");
    compare_caches(gpu, cpu, row, "built");
    const size_t kv = (size_t)(CACHE_HEADS * row->head_dim), n_out = kv * CACHE_GROUP;
    float *k = cache_data(71, 1, row->head_dim), *v = cache_data(72, 1, row->head_dim), *q = host_floats(73, n_out),
          *out = test_alloc(n_out * sizeof *out), *expected = test_alloc(n_out * sizeof *out);
    for (int i = 0; i < 3; i++) {
        record_step(gpu, k, v, q, row->head_dim, out);
        CHECK_RESULT(tqkv_cache_append(cpu, k, v, 1), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(cpu, q, 1, expected), TQKV_OK);
        check_close(out, expected, n_out, difference_of(cpu), "recorded");
    }
    tqkv_cache *const both[] = {cpu, gpu};
    check_snapshots(both, 2, "recorded");
    for (int i = 0; i < 2; i++) {
        tqkv_cache *c = i ? gpu : cpu;
        CHECK_RESULT(tqkv_cache_truncate(c, tqkv_cache_end(c) - 5), TQKV_OK);
        cache_append_seed(c, 74, 2, row->head_dim);
        if (!row->ring) CHECK_RESULT(tqkv_cache_remove(c, 2, 4), TQKV_OK);
    }
    compare_caches(gpu, cpu, row, "edited");
    CHECK_RESULT(tqkv_cache_fork(gpu, NULL, &fork), TQKV_OK);
    compare_caches(fork, cpu, row, "forked");
    tqkv_cache_destroy(fork);
    tqkv_cache_destroy(cpu);
    tqkv_cache_destroy(gpu);
    free(k);
    free(v);
    free(q);
    free(out);
    free(expected);
}

/* Appends n tokens and attends with as many queries in the caller's encoder,
 * whose dispatches run in any order between barriers. */
static void record_chunk(tqkv_cache *cache, const tqkv_cache_desc *desc, const float *k, const float *v, const float *q,
                         int n, float *out)
{
    const size_t value_dim = (size_t)(desc->value_dim ? desc->value_dim : desc->head_dim),
                 tail = (size_t)desc->tail_dim, dim = (size_t)desc->head_dim, heads = (size_t)desc->n_kv_heads,
                 tokens = (size_t)n * heads, rows = (size_t)(n * desc->n_heads), n_k = tokens * (dim + tail);
    size_t scratch_size = 0;
    tqkv_metal *m = test_host.metal;
    CHECK_RESULT(
        HOST_SCRATCH(&scratch_size, cache_attend, cache, host_none, NULL, NULL, host_none, n, host_none, host_none),
        TQKV_OK);
    float *apart = test_alloc(n_k * sizeof *apart); /* rows of a tail lie behind those of the keys */
    for (size_t i = 0; i < tokens; i++) {
        memcpy(apart + i * dim, k + i * (dim + tail), dim * sizeof *k);
        memcpy(apart + tokens * dim + i * tail, k + i * (dim + tail) + dim, tail * sizeof *k);
    }
    tqkv_metal_buffer kb = host_buffer(apart, n_k * sizeof *k), qb = host_buffer(q, rows * (dim + tail) * sizeof *q),
                      vb = desc->shared ? kb : host_buffer(v, tokens * value_dim * sizeof *v),
                      ob = host_zeros(rows * value_dim * sizeof *out), scratch = host_zeros(scratch_size),
                      flag = host_zeros(4), codes;
    if (desc->shared) vb.offset += tokens * dim * sizeof *k;
    CHECK_RESULT(tqkv_metal_find(m, test_keys(cache)->codes, &codes), TQKV_OK);
    host_work work = host_begin(true);
    CHECK_RESULT(tqkv_metal_cache_append(m, work.encoder, cache, kb, vb, n, flag), TQKV_OK);
    const id<MTLResource> written[] = {codes.buffer};
    [work.encoder memoryBarrierWithResources:written count:1];
    CHECK_RESULT(tqkv_metal_cache_attend(m, work.encoder, cache, qb, n, scratch, ob), TQKV_OK);
    host_end(&work);
    memcpy(out, host_contents(ob), rows * value_dim * sizeof *out);
    CHECK(*(uint32_t *)host_contents(flag) == 0, "the flag is raised");
    const tqkv_metal_buffer all[] = {kb, qb, ob, scratch, flag};
    for (int i = 0; i < 5; i++) host_release(all[i]);
    if (!desc->shared) host_release(vb);
    free(apart);
}

/* A cache that learns, appended to in chunks that are recorded, in chunks that wait, and on the processor: the same
   snapshots at any time. Queries of a tree that stand on both sides of the last position that is raw come later than
   the others. */
static void run_learns(const void *parameters)
{
    enum { TOKENS = 40, MOST = 20 };
    static const int chunks[] = {5, 1, 8, MOST, 1, 5};
    const uint64_t tree[] = {1, 3, 5, 11, 19};
    const tqkv_attention some = {.tree = tree};
    tqkv_cache_desc desc = *(const tqkv_cache_desc *)parameters;
    const size_t value_dim = (size_t)(desc.value_dim ? desc.value_dim : desc.head_dim),
                 key_dim = (size_t)(desc.head_dim + desc.tail_dim), heads = (size_t)desc.n_kv_heads,
                 n_heads = (size_t)desc.n_heads, n_out = MOST * n_heads * value_dim;
    float *k = host_floats(81, TOKENS * heads * key_dim), *v = host_floats(82, TOKENS * heads * value_dim),
          *q = host_floats(83, TOKENS * n_heads * key_dim), *out[3];
    tqkv_cache *caches[3] = {NULL, NULL, NULL}; /* of the processor, recorded, waiting */
    for (int i = 0; i < 3; i++) {
        desc.metal = i ? test_host.metal : NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &caches[i]), TQKV_OK);
        out[i] = test_alloc(n_out * sizeof *out[i]);
    }
    for (size_t i = 0, end = 0; i < sizeof chunks / sizeof *chunks; end += (size_t)chunks[i++]) {
        const int n = chunks[i];
        const float *rows = k + end * heads * key_dim, *others = desc.shared ? NULL : v + end * heads * value_dim,
                    *queries = q + end * n_heads * key_dim;
        for (int c = 0; c < 3; c += 2) {
            CHECK_RESULT(tqkv_cache_append(caches[c], rows, others, n), TQKV_OK);
            CHECK_RESULT(tqkv_cache_attend(caches[c], queries, n, out[c]), TQKV_OK);
        }
        record_chunk(caches[1], &desc, rows, others, queries, n, out[1]);
        check_snapshots(caches, 3, "learning");
        check_close(out[1], out[0], (size_t)n * n_heads * value_dim, difference_of(caches[0]), "recorded");
        CHECK(!memcmp(out[1], out[2], (size_t)n * n_heads * value_dim * sizeof **out), "recorded: other bits");
        for (int c = 0; n >= 5 && c < 3; c += 2)
            CHECK_RESULT(test_attend_some(caches[c], &some, queries, 5, out[c]), TQKV_OK);
        if (n >= 5) check_close(out[2], out[0], 5 * n_heads * value_dim, difference_of(caches[0]), "of a tree");
    }
    CHECK(test_keys(caches[1])->channel_scale, "nothing was learned");
    for (int i = 0; i < 3; i++) {
        tqkv_cache_destroy(caches[i]);
        free(out[i]);
    }
    free(k);
    free(v);
    free(q);
}

/* Of a tree whose queries stand on both sides, recorded: the outputs of those that read
 * what is raw are written last. */
static void run_learns_tree(const void *parameters)
{
    enum { N = 6, BEFORE = 20 - 3, D = 64, OUT = N * 2 * D };
    const uint64_t tree[N] = {1, 3, 5, 11, 19, 37};
    const tqkv_attention known = {.tree = tree};
    tqkv_cache_desc desc = {.head_dim = D, .n_kv_heads = 1, .n_heads = 2, .capacity = 90, .calibrate = 20};
    tqkv_metal *m = test_host.metal;
    tqkv_cache *caches[2] = {NULL, NULL};
    float *rows = host_floats(91, (BEFORE + N) * D), *q = host_floats(92, OUT), out[OUT];
    size_t bytes = 0;
    (void)parameters;
    for (int i = 0; i < 2; i++) {
        desc.metal = i ? m : NULL;
        CHECK_RESULT(tqkv_cache_create(&desc, &caches[i]), TQKV_OK);
        CHECK_RESULT(tqkv_cache_append(caches[i], rows, rows, BEFORE), TQKV_OK);
        CHECK_RESULT(tqkv_cache_append(caches[i], rows + BEFORE * D, rows, N), TQKV_OK);
    }
    tqkv_metal_attention some = {.attention = known, .tree = host_buffer(tree, sizeof tree)};
    CHECK_RESULT(
        HOST_SCRATCH(&bytes, cache_attend, caches[1], host_none, NULL, &some, host_none, N, host_none, host_none),
        TQKV_OK);
    const tqkv_metal_buffer qb = host_buffer(q, OUT * sizeof *q), ob = host_zeros(OUT * sizeof *q),
                            scratch = host_zeros(bytes);
    host_work work = host_begin(true);
    CHECK_RESULT(host_attend_some(m, work.encoder, caches[1], &some, qb, N, scratch, ob), TQKV_OK);
    host_end(&work);
    tqkv_attention codes = test_view(caches[0], 1); /* all queries read these; those before have a cache of their own */
    codes.n_queries = N;
    codes.tree = tree;
    CHECK_RESULT(tqkv_attend(&codes, q, out), TQKV_OK);
    CHECK_RESULT(tqkv_cache_truncate(caches[0], 0), TQKV_OK);
    CHECK_RESULT(tqkv_cache_append(caches[0], rows, rows, BEFORE), TQKV_OK);
    CHECK_RESULT(tqkv_cache_append(caches[0], rows + BEFORE * D, rows, N / 2), TQKV_OK);
    CHECK_RESULT(test_attend_some(caches[0], &known, q, N / 2, out), TQKV_OK);
    check_close(host_contents(ob), out, OUT, difference_of(caches[0]), "of a tree, recorded");
    const tqkv_metal_buffer all[] = {some.tree, qb, ob, scratch};
    for (int i = 0; i < 4; i++) host_release(all[i]);
    for (int i = 0; i < 2; i++) tqkv_cache_destroy(caches[i]);
    free(rows);
    free(q);
}

void cache_host_cases(void)
{
    const ends_row ends[] = {
        {{TQKV_I8, TQKV_TQ4, 64, 90, false, 60, -1}, 4, 30},   {{TQKV_TQ4, TQKV_TQ3, 128, 40, true, 100, -1}, 4, 16},
        {{TQKV_F16, TQKV_TQ4, 64, 90, false, 7, -1}, 8, 20},   {{TQKV_TQ4, TQKV_TQ4, 64, 90, false, 60, -1}, 0, 70},
        {{TQKV_TQ4, TQKV_TQ4, 64, 40, false, 30, -1}, 4, 128}, {{TQKV_TQ5, TQKV_TQ3, 64, 20, true, 50, -1}, 4, 128}};
    const cache_row rows[] = {{TQKV_FORMAT_DEFAULT, TQKV_FORMAT_DEFAULT, 64, 40, false, 33, -1},
                              {TQKV_TQ4, TQKV_TQ4, 128, 16, true, 50, -1},
                              {TQKV_F16, TQKV_F16, 64, 16, true, 10, 6},
                              {TQKV_TQ6, TQKV_TQ5, 256, 12, false, 9, 4},
                              {TQKV_TQ8, TQKV_TQ6_BYTES, 512, 8, true, 8, -1},
                              {TQKV_I8, TQKV_I8, 32, 64, true, 200, 150}};
    const cache_row steps[] = {{TQKV_I8, TQKV_TQ4, 64, 30, false, 20, -1},
                               {TQKV_TQ5, TQKV_TQ5_BYTES, 64, 9, true, 20, -1}};
    for (int i = 0; i < 6; i++) test_add(run_both_sides, &rows[i], sizeof rows[i], "cache/both_sides/%d", i);
    for (int i = 0; i < 2; i++) test_add(run_one_memory, &rows[i], sizeof rows[i], "cache/one_memory/%d", i);
    for (int i = 0; i < 2; i++) test_add(run_recorded, &steps[i], sizeof steps[i], "cache/recorded/%d", i);
    for (int i = 0; i < 2; i++) test_add(run_edited, &steps[i], sizeof steps[i], "cache/edited/%d", i);
    for (int i = 0; i < (int)(sizeof ends / sizeof *ends); i++)
        test_add(run_ends, &ends[i], sizeof ends[i], "cache/ends/%d", i);
    test_add(run_types, NULL, 0, "cache/types");
    const latent_row latent[] = {{false, false, 0}, {true, false, 0}, {false, false, 5},
                                 {true, true, 0},   {true, false, 3}, {true, true, 6}};
    for (int i = 0; i < 6; i++) test_add(run_latent, &latent[i], sizeof latent[i], "cache/latent/%d", i);
    const tqkv_cache_desc learns[] = {
        {.head_dim = 64,
         .n_kv_heads = 2,
         .n_heads = 4,
         .capacity = 80,
         .calibrate = 16,
         .exact_first = 3,
         .exact_last = 5},
        {.head_dim = 64, .n_kv_heads = 1, .n_heads = 2, .capacity = 50, .calibrate = 16, .ring = true, .window = 9},
        {.head_dim = 512,
         .n_kv_heads = 1,
         .n_heads = 2,
         .capacity = 80,
         .calibrate = 16,
         .shared = true,
         .tail_dim = 64},
        {.head_dim = 448,
         .n_kv_heads = 1,
         .n_heads = 2,
         .capacity = 80,
         .calibrate = 16,
         .tail_dim = 64,
         .tail_format = TQKV_I8,
         .exact_first = 20,
         .exact_last = 4}};
    for (int i = 0; i < 4; i++) test_add(run_learns, &learns[i], sizeof learns[i], "cache/learns/%d", i);
    test_add(run_learns_tree, NULL, 0, "cache/learns/tree");
    test_add(run_refusals, NULL, 0, "refusals/cache");
    test_add(run_strides, NULL, 0, "cache/strides");
}

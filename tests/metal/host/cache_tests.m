/* Caches in shared memory: the processor reads what the GPU writes, and the reverse. Histories are among the shaders'
   cases. */
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
static void run_refusals(NO_ROW)
{
    const cache_row row = {TQKV_I8, TQKV_TQ4, 64, 4, false, 3, -1};
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

/* Rows head by head, of the queries in both directions: a recorded call gives the bits of one that waits, and both
   leave what lies between the rows. */
static void run_strides(NO_ROW)
{
    enum { D = 64, N = 3, GAP = 5, Q = CACHE_HEADS * CACHE_GROUP };
    const cache_row row = {TQKV_TQ5, TQKV_TQ4, D, 40, false, 20, -1};
    const tqkv_strides kv = {D, (N + GAP) * D}, by_heads = {D + GAP, (N + 1) * (D + GAP)};
    const size_t kv_size = CACHE_HEADS * (N + GAP) * D, q_size = Q * (N + 1) * (D + GAP);
    float *k = host_floats(74, kv_size), *q = host_floats(75, q_size),
          *out = test_alloc_filled(q_size * sizeof *out, 0);
    tqkv_cache_desc desc = cache_desc(&row, NULL);
    size_t scratch_size = 0;
    desc.metal = test_host.metal;
    desc.non_causal = true;
    desc.exact_first = 30;
    tqkv_cache *caches[3] = {NULL, NULL, cache_make(&row, &desc)};
    desc.strides = (tqkv_cache_strides){kv, kv, by_heads, by_heads};
    for (int i = 0; i < 2; i++) CHECK_RESULT(tqkv_cache_fork(caches[2], &desc, &caches[i]), TQKV_OK);
    REQUIRE(caches[0] && caches[1] && caches[2], "no caches");
    CHECK_RESULT(tqkv_cache_append(caches[0], k, k, N), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(caches[0], q, N, out), TQKV_OK);
    CHECK_RESULT(
        HOST_SCRATCH(&scratch_size, cache_attend, caches[1], host_none, NULL, NULL, host_none, N, host_none, host_none),
        TQKV_OK);
    const tqkv_metal_buffer b[] = {host_buffer(k, kv_size * sizeof *k), host_buffer(q, q_size * sizeof *q),
                                   host_zeros(q_size * sizeof *q), host_zeros(scratch_size), host_zeros(4)};
    host_work work = host_begin(false);
    CHECK_RESULT(tqkv_metal_cache_append(test_host.metal, work.encoder, caches[1], b[0], b[0], N, b[4]), TQKV_OK);
    CHECK_RESULT(tqkv_metal_cache_attend(test_host.metal, work.encoder, caches[1], b[1], N, b[3], b[2]), TQKV_OK);
    host_end(&work);
    CHECK(!memcmp(host_contents(b[2]), out, q_size * sizeof *out), "other bits, recorded");
    for (int i = 0; i < 5; i++) host_release(b[i]);
    for (int i = 0; i < 3; i++) tqkv_cache_destroy(caches[i]);
    free(k);
    free(q);
    free(out);
}

void cache_host_cases(void)
{
    const cache_row rows[] = {{TQKV_FORMAT_DEFAULT, TQKV_FORMAT_DEFAULT, 64, 40, false, 33, -1},
                              {TQKV_TQ4, TQKV_TQ4, 128, 16, true, 50, -1}};
    for (int i = 0; i < 2; i++) test_add(run_one_memory, &rows[i], sizeof rows[i], "cache/one_memory/%d", i);
    test_add(run_refusals, NULL, 0, "refusals/cache");
    test_add(run_strides, NULL, 0, "cache/strides");
}

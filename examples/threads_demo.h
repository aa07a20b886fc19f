/* Both thread examples attend over one long context, with and without their hook. */
#ifndef THREADS_DEMO_H
#define THREADS_DEMO_H

#include "tqkv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DEMO_HEAD_DIM = 128, DEMO_KV_HEADS = 2, DEMO_HEADS = 8, DEMO_POSITIONS = 16384 };

static double demo_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The fastest of ten calls, in seconds; negative on failure. out: [DEMO_HEADS][DEMO_HEAD_DIM] */
static double demo_attend(tqkv_parallel parallel, const float *rows, const float *q, float *out)
{
    tqkv_cache_desc desc = {.head_dim = DEMO_HEAD_DIM, .n_kv_heads = DEMO_KV_HEADS, .n_heads = DEMO_HEADS};
    desc.capacity = DEMO_POSITIONS;
    desc.parallel = parallel;
    tqkv_cache *cache = NULL;
    tqkv_result result = tqkv_cache_create(&desc, &cache);
    if (result == TQKV_OK) result = tqkv_cache_append(cache, rows, rows, DEMO_POSITIONS);
    double best = 1e9;
    for (int i = 0; i < 10 && result == TQKV_OK; i++) {
        double begin = demo_seconds();
        result = tqkv_cache_attend(cache, q, 1, out);
        double seconds = demo_seconds() - begin;
        if (seconds < best) best = seconds;
    }
    tqkv_cache_destroy(cache);
    if (result != TQKV_OK) fprintf(stderr, "tqkv: %s\n", tqkv_result_string(result));
    return result == TQKV_OK ? best : -1.0;
}

/* The exit status: 0 if the results with and without the hook have the same bits. */
static int demo_compare(tqkv_parallel parallel, int n_threads)
{
    static float q[DEMO_HEADS * DEMO_HEAD_DIM], alone[DEMO_HEADS * DEMO_HEAD_DIM], together[DEMO_HEADS * DEMO_HEAD_DIM];
    const size_t n = (size_t)DEMO_POSITIONS * DEMO_KV_HEADS * DEMO_HEAD_DIM;
    float *rows = (float *)malloc(n * sizeof *rows); /* [position][kv head][dim] */
    if (!rows) return 1;
    for (size_t i = 0; i < n; i++) rows[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    for (int i = 0; i < DEMO_HEADS * DEMO_HEAD_DIM; i++) q[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    const double one = demo_attend((tqkv_parallel){NULL, NULL}, rows, q, alone);
    const double many = demo_attend(parallel, rows, q, together);
    free(rows);
    if (one < 0.0 || many < 0.0) return 1;
    const int same = memcmp(alone, together, sizeof alone) == 0;
    printf("%d positions: one thread %.0f us, %d threads %.0f us, %s bits\n", DEMO_POSITIONS, 1e6 * one, n_threads,
           1e6 * many, same ? "the same" : "DIFFERENT");
    return !same;
}

#endif

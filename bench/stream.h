/* Keys or values of several layers, as in a model: attention that cycles through the
 * layers finds none in a CPU cache. */
#ifndef BENCH_STREAM_H
#define BENCH_STREAM_H

#include "tqkv.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BENCH_KV_HEADS = 8,
    BENCH_SOURCE_TOKENS = 256,   /* encoded once, then copied along the positions */
    BENCH_COLD_BYTES = 128 << 20 /* keys and values of all layers: more than a large third-level cache */
};

typedef struct bench_shape {
    int head_dim, n_positions, group, n_queries;
} bench_shape;

typedef struct bench_stream {
    int n_layers;
    tqkv_store *layers; /* [n_layers] */
    uint8_t *codes;     /* [n_layers][codes_size] */
    float *norms;
} bench_stream;

static inline void *bench_alloc(size_t size)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 64, size + 64) != 0) {
        fprintf(stderr, "bench: no memory for %zu MiB\n", size >> 20);
        exit(1);
    }
    return memory;
}

static inline void bench_check(tqkv_result result)
{
    if (result == TQKV_OK) return;
    fprintf(stderr, "bench: %s\n", tqkv_result_string(result));
    exit(1);
}

/* The next of a sequence of random numbers; the upper bits are the better ones. */
static inline uint64_t bench_random(uint64_t *seed)
{
    return *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
}

/* x: [n], near Gaussian with deviation 1: each a sum of twelve uniform numbers. */
static inline void bench_fill(float *x, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        float sum = -6.0f;
        for (int j = 0; j < 12; j++) sum += (float)(bench_random(&seed) >> 40) * (1.0f / 16777216.0f);
        x[i] = sum;
    }
}

/* Fills `size` bytes with copies of the first `done`. */
static inline void bench_tile(void *memory, size_t done, size_t size)
{
    for (; done > 0 && done < size; done *= 2)
        memcpy((char *)memory + done, memory, done < size - done ? done : size - done);
}

/* Number of layers at which keys and values of the format fill BENCH_COLD_BYTES. */
static inline int bench_layers(size_t stream_bytes) { return (int)((BENCH_COLD_BYTES - 1) / (2 * stream_bytes)) + 1; }

static inline void bench_stream_open(bench_stream *stream, tqkv_format format, int head_dim, int n_positions,
                                     const float *source)
{
    tqkv_store store = {.format = format, .head_dim = head_dim, .n_kv_heads = BENCH_KV_HEADS, .capacity = n_positions};
    const int n_source = n_positions < BENCH_SOURCE_TOKENS ? n_positions : BENCH_SOURCE_TOKENS;
    store.codes_size = tqkv_codes_size(&store);
    store.norms_size = tqkv_norms_size(&store);
    stream->n_layers = bench_layers(store.codes_size + store.norms_size);
    const size_t n_layers = (size_t)stream->n_layers;
    store.codes = stream->codes = (uint8_t *)bench_alloc(n_layers * store.codes_size);
    store.norms = stream->norms = (float *)bench_alloc(n_layers * store.norms_size);
    stream->layers = (tqkv_store *)bench_alloc(n_layers * sizeof store);
    bench_check(tqkv_encode(&store, source, n_source, 0));
    for (size_t head = 0; head < BENCH_KV_HEADS; head++) {
        const size_t codes = store.codes_size / BENCH_KV_HEADS, norms = store.norms_size / BENCH_KV_HEADS;
        const size_t n = (size_t)n_source, all = (size_t)n_positions;
        bench_tile(stream->codes + head * codes, codes / all * n, codes);
        bench_tile((char *)stream->norms + head * norms, norms / all * n, norms);
    }
    bench_tile(stream->codes, store.codes_size, n_layers * store.codes_size);
    bench_tile(stream->norms, store.norms_size, n_layers * store.norms_size);
    for (size_t i = 0; i < n_layers; i++) {
        stream->layers[i] = store;
        stream->layers[i].codes = stream->codes + i * store.codes_size;
        stream->layers[i].norms = (float *)(void *)((char *)stream->norms + i * store.norms_size);
    }
}

static inline void bench_stream_close(bench_stream *stream)
{
    free(stream->codes);
    free(stream->norms);
    free(stream->layers);
    memset(stream, 0, sizeof *stream);
}

#endif

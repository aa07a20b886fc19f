/* The cache that tqkv is compared with: float arrays and plain loops. A round trip passes keys and values through
 * llama.cpp's q8_0 or q4_0 before they are stored as floats, so only the error of the format counts. The formats are
 * written from their public description: blocks of 32 values with one half as scale. An optional rotation does what
 * llama.cpp does since pull request 21038: a Hadamard transform of the whole head for keys, of 64 values at a time for
 * values. */
#ifndef PLAIN_CACHE_H
#define PLAIN_CACHE_H

#include "tinylm_model.h"

enum { MAX_CONTEXT = 4096, GGML_BLOCK = 32, VALUE_ROTATION = 64 };

typedef void (*round_trip)(float *values, int count);

typedef struct plain_cache {
    const model_layer *shape;
    float *keys, *values; /* [capacity][n_kv_heads][head_dim] */
    round_trip through_keys, through_values;
    bool rotate_keys, rotate_values;
} plain_cache;

/* The value rounded to a half, to nearest with ties to even. A half has 11 bits from 2^-14 to 65504, and steps of 2^-24
 * below. */
static float through_half(float value)
{
    if (!(fabsf(value) >= 6.103515625e-5f)) return rintf(value * 16777216.0f) / 16777216.0f;
    int exponent;
    float fraction = frexpf(value, &exponent);
    return ldexpf(rintf(fraction * 2048.0f), exponent - 11);
}

/* q8_0: scale = largest magnitude / 127, codes -127..127; 34 bytes for 32 values. */
static void q8_0_round_trip(float *values, int count)
{
    for (float *block = values; block < values + count; block += GGML_BLOCK) {
        float peak = 0;
        for (int i = 0; i < GGML_BLOCK; i++) peak = fmaxf(peak, fabsf(block[i]));
        float scale = peak / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f, stored = through_half(scale);
        for (int i = 0; i < GGML_BLOCK; i++) block[i] = roundf(block[i] * inverse) * stored;
    }
}

/* q4_0: codes 0..15 stand for -8..7 scales; the element of largest magnitude gets code 0; 18 bytes for 32 values. */
static void q4_0_round_trip(float *values, int count)
{
    for (float *block = values; block < values + count; block += GGML_BLOCK) {
        float peak = 0;
        for (int i = 0; i < GGML_BLOCK; i++)
            if (fabsf(block[i]) > fabsf(peak)) peak = block[i];
        float scale = peak / -8.0f, inverse = peak != 0 ? 1.0f / scale : 0.0f, stored = through_half(scale);
        for (int i = 0; i < GGML_BLOCK; i++)
            block[i] = (fminf(15.0f, floorf(block[i] * inverse + 8.5f)) - 8.0f) * stored;
    }
}

/* The Hadamard transform of `size` values at a time, scaled so that it is its own inverse. */
static void hadamard(float *values, int count, int size)
{
    for (float *row = values; row < values + count; row += size)
        for (int half = 1; half < size; half *= 2)
            for (int i = 0; i < size; i++) {
                if (i & half) continue;
                float low = row[i], high = row[i + half];
                row[i] = (low + high) * sqrtf(0.5f);
                row[i + half] = (low - high) * sqrtf(0.5f);
            }
}

static void pass_through(float *values, int count, round_trip through, int rotation /* 0: none */)
{
    if (!through) return;
    if (rotation) hadamard(values, count, rotation);
    through(values, count);
    if (rotation) hadamard(values, count, rotation);
}

static void plain_cache_append(plain_cache *cache, int64_t position, const float *k, const float *v, int n_tokens)
{
    int d = cache->shape->head_dim, row = cache->shape->n_kv_heads * d, count = n_tokens * row;
    float *keys = cache->keys + position * row, *values = cache->values + position * row;
    memcpy(keys, k, (size_t)count * sizeof *k);
    memcpy(values, v, (size_t)count * sizeof *v);
    pass_through(keys, count, cache->through_keys, cache->rotate_keys ? d : 0);
    pass_through(values, count, cache->through_values, cache->rotate_values ? VALUE_ROTATION : 0);
}

static float dot_product(const float *a, const float *b, int size)
{
    lanes low = {0}, high = {0};
    for (int i = 0; i < size; i += PANEL) {
        low += load_lanes(a + i) * load_lanes(b + i);
        high += load_lanes(a + i + PANEL / 2) * load_lanes(b + i + PANEL / 2);
    }
    low += high;
    float sum = 0;
    for (int lane = 0; lane < PANEL / 2; lane++) sum += low[lane];
    return sum;
}

static void add_scaled(float *restrict out, const float *restrict in, float weight, int size)
{
    for (int i = 0; i < size; i += PANEL)
        for (int lane = 0; lane < PANEL; lane++) out[i + lane] += weight * in[i + lane];
}

typedef struct plain_job {
    const plain_cache *cache;
    const float *q;
    float *out;
    int64_t first; /* position of query 0 */
} plain_job;

/* Attention of one query of one head over its visible positions. */
static void plain_task(void *context, int index)
{
    const plain_job *job = (const plain_job *)context;
    const model_layer *shape = job->cache->shape;
    int d = shape->head_dim, head = index % shape->n_heads, end = (int)job->first + index / shape->n_heads + 1;
    int begin = shape->window > 0 && end > shape->window ? end - shape->window : 0, row = shape->n_kv_heads * d;
    int offset = head / (shape->n_heads / shape->n_kv_heads) * d;
    float scores[MAX_CONTEXT], largest = -INFINITY, sum = 0, *out = job->out + index * d;
    for (int j = begin; j < end; j++) {
        float score = dot_product(job->q + index * d, job->cache->keys + j * row + offset, d) / sqrtf((float)d);
        if (shape->softcap > 0) score = shape->softcap * tanhf(score / shape->softcap);
        scores[j - begin] = score;
        largest = fmaxf(largest, score);
    }
    for (int j = begin; j < end; j++) sum += scores[j - begin] = expf(scores[j - begin] - largest);
    memset(out, 0, (size_t)d * sizeof *out);
    for (int j = begin; j < end; j++)
        add_scaled(out, job->cache->values + j * row + offset, scores[j - begin] / sum, d);
}

/* q, out: [n_queries][n_heads][head_dim]; query 0 stands at position `first`. */
static void plain_cache_attend(plain_cache *cache, thread_pool *pool, int64_t first, const float *q, int n_queries,
                               float *out)
{
    plain_job job = {cache, q, out, first};
    pool_run(pool, n_queries * cache->shape->n_heads, plain_task, &job);
}

#endif

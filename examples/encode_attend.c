/* The smallest useful program: creates a cache for one layer, appends a prompt and one token, attends for that token
   and checks the output. */
#define TQKV_IMPLEMENTATION
#include "tqkv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEAD_DIM = 128, KV_HEADS = 2, HEADS = 8, PROMPT = 1000, TOKENS = PROMPT + 1 };

static float keys[TOKENS * KV_HEADS * HEAD_DIM], values[TOKENS * KV_HEADS * HEAD_DIM]; /* [token][kv head][dim] */
static float query[HEADS * HEAD_DIM], output[HEADS * HEAD_DIM];                        /* [head][dim] */

/* Random numbers in place of a model's projections: sums of uniform numbers, close to a Gaussian. */
static void fill(float *out, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        out[i] = -6.0f;
        for (int j = 0; j < 12; j++) out[i] += (float)rand() / (float)RAND_MAX;
    }
}

/* The relative squared error of one head's output. Exact: attention in double over the floats that were appended. */
static double head_error(int head)
{
    const float *q = query + head * HEAD_DIM, *out = output + head * HEAD_DIM;
    int offset = head / (HEADS / KV_HEADS) * HEAD_DIM;
    double exact[HEAD_DIM] = {0}, sum = 0, wrong = 0, all = 0;
    for (int token = 0; token < TOKENS; token++) {
        const float *k = keys + token * KV_HEADS * HEAD_DIM + offset,
                    *v = values + token * KV_HEADS * HEAD_DIM + offset;
        double score = 0;
        for (int i = 0; i < HEAD_DIM; i++) score += (double)q[i] * k[i];
        double weight = exp(score / sqrt(HEAD_DIM));
        for (int i = 0; i < HEAD_DIM; i++) exact[i] += weight * v[i];
        sum += weight;
    }
    for (int i = 0; i < HEAD_DIM; i++) {
        wrong += (out[i] - exact[i] / sum) * (out[i] - exact[i] / sum);
        all += exact[i] / sum * (exact[i] / sum);
    }
    return wrong / all;
}

int main(void)
{
    fill(keys, sizeof keys / sizeof *keys);
    fill(values, sizeof values / sizeof *values);
    fill(query, sizeof query / sizeof *query);

    /* Keys of 8 bits, values of 4; centre and scale of the keys learned from the first 512 positions. */
    tqkv_cache_desc desc = tqkv_cache_preset(TQKV_SAFE);
    desc.head_dim = HEAD_DIM;
    desc.n_kv_heads = KV_HEADS;
    desc.n_heads = HEADS;
    desc.capacity = 4096;
    const size_t prompt_size = (size_t)PROMPT * KV_HEADS * HEAD_DIM;
    tqkv_cache *cache = NULL;
    tqkv_result result = tqkv_cache_create(&desc, &cache);
    /* A model attends for the prompt here, to each append before the next one. */
    if (result == TQKV_OK) result = tqkv_cache_append(cache, keys, values, PROMPT);
    if (result == TQKV_OK) result = tqkv_cache_append(cache, keys + prompt_size, values + prompt_size, 1);
    if (result == TQKV_OK) result = tqkv_cache_attend(cache, query, 1, output); /* the newest token's query */
    if (result != TQKV_OK) {
        fprintf(stderr, "tqkv: %s\n", tqkv_result_string(result));
        tqkv_cache_destroy(cache);
        return 1;
    }
    double error = 0;
    for (int head = 0; head < HEADS; head++) error += head_error(head) / HEADS;
    double f16_bytes = 2.0 * 2 * desc.capacity * KV_HEADS * HEAD_DIM, bytes = (double)tqkv_cache_bytes(cache);
    tqkv_cache_destroy(cache);
    printf("%d tokens in a cache of %.0f KiB (F16: %.0f KiB); relative squared error of the output %.4f: %s\n", TOKENS,
           bytes / 1024, f16_bytes / 1024, error, error < 0.02 ? "as expected" : "WRONG");
    return error < 0.02 ? 0 : 1;
}

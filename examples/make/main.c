/* Stores in the caller's own memory: an engine that has an allocator, a file mapping or a GPU buffer keeps codes and
 * norms there, and tqkv only reads and writes them. Encodes a few positions, decodes them, attends. */
#include "tqkv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEAD_DIM = 128, KV_HEADS = 4, HEADS = 16, CAPACITY = 512, TOKENS = 300 };

/* One block for a stream: codes, then norms. Returns NULL when memory runs out. */
static void *place(tqkv_store *store, tqkv_format format)
{
    *store = (tqkv_store){.format = format, .head_dim = HEAD_DIM, .n_kv_heads = KV_HEADS, .capacity = CAPACITY};
    store->codes_size = tqkv_codes_size(store);
    store->norms_size = tqkv_norms_size(store);
    char *block = malloc(store->codes_size + store->norms_size); /* codes_size is a multiple of 4 here: norms align */
    store->codes = block;
    store->norms = (float *)(void *)(block + store->codes_size);
    return block;
}

static void fill(float *out, int count, float phase)
{
    for (int i = 0; i < count; i++) out[i] = sinf(phase + 0.61f * (float)i) + 0.3f * cosf(0.013f * (float)i * (float)i);
}

static double relative_error(const float *exact, const float *got, int count)
{
    double wrong = 0, all = 0;
    for (int i = 0; i < count; i++) {
        wrong += ((double)got[i] - exact[i]) * ((double)got[i] - exact[i]);
        all += (double)exact[i] * exact[i];
    }
    return wrong / all;
}

int main(void)
{
    static float k[TOKENS * KV_HEADS * HEAD_DIM], v[TOKENS * KV_HEADS * HEAD_DIM], back[TOKENS * KV_HEADS * HEAD_DIM];
    static float q[HEADS * HEAD_DIM], out[HEADS * HEAD_DIM];
    tqkv_store keys, values;
    void *key_block = place(&keys, TQKV_I8), *value_block = place(&values, TQKV_TQ5);
    if (!key_block || !value_block) return 1;
    fill(k, TOKENS * KV_HEADS * HEAD_DIM, 0.0f);
    fill(v, TOKENS * KV_HEADS * HEAD_DIM, 1.0f);
    fill(q, HEADS * HEAD_DIM, 2.0f);

    tqkv_attention attention = {.keys = &keys, .values = &values, .n_heads = HEADS, .n_queries = 1, .end = TOKENS};
    tqkv_result result = tqkv_encode(&keys, k, TOKENS, 0);
    if (result == TQKV_OK) result = tqkv_encode(&values, v, TOKENS, 0);
    if (result == TQKV_OK) result = tqkv_attend(&attention, q, out);
    if (result == TQKV_OK) result = tqkv_decode(&values, 0, TOKENS, TQKV_ORIGINAL, back);
    if (result != TQKV_OK) {
        fprintf(stderr, "tqkv: %s\n", tqkv_result_string(result));
        return 1;
    }
    double error = relative_error(v, back, TOKENS * KV_HEADS * HEAD_DIM);
    printf("values in %s, %zu bytes a position and head: relative squared error %.5f: %s\n",
           tqkv_format_name(values.format), (values.codes_size + values.norms_size) / (TOKENS * KV_HEADS), error,
           error < 0.005 ? "as expected" : "WRONG");
    free(key_block);
    free(value_block);
    return error < 0.005 ? 0 : 1;
}

/* What tqkv takes the place of: keys and values as floats, a loop over the positions for each head. */
#ifndef PLAIN_ENGINE_H
#define PLAIN_ENGINE_H

#include <math.h>

typedef struct plain_engine {
    int n_heads, n_kv_heads, head_dim, max_positions;
    float *keys, *values; /* [layer][position][kv head][dim] */
    float *scores;        /* [position] */
} plain_engine;

/* One token of one layer. q, out: [head][dim]; k, v: [kv head][dim], after the rotary embedding */
static void plain_attention(plain_engine *e, int layer, int position, const float *q, const float *k, const float *v,
                            float *out)
{
    int d = e->head_dim, row = e->n_kv_heads * d, group = e->n_heads / e->n_kv_heads;
    float *keys = e->keys + layer * e->max_positions * row, *values = e->values + layer * e->max_positions * row;
    for (int i = 0; i < row; i++) keys[position * row + i] = k[i];
    for (int i = 0; i < row; i++) values[position * row + i] = v[i];
    for (int head = 0; head < e->n_heads; head++) {
        int offset = head / group * d;
        float max = -INFINITY, sum = 0.0f;
        for (int p = 0; p <= position; p++) {
            e->scores[p] = 0.0f;
            for (int i = 0; i < d; i++) e->scores[p] += q[head * d + i] * keys[p * row + offset + i];
            e->scores[p] /= sqrtf((float)d);
            if (e->scores[p] > max) max = e->scores[p];
        }
        for (int i = 0; i < d; i++) out[head * d + i] = 0.0f;
        for (int p = 0; p <= position; p++) {
            float weight = expf(e->scores[p] - max);
            sum += weight;
            for (int i = 0; i < d; i++) out[head * d + i] += weight * values[p * row + offset + i];
        }
        for (int i = 0; i < d; i++) out[head * d + i] /= sum;
    }
}

#endif

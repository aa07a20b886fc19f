/* Keys with a constant part, and centres that take it away. Models with a bias in the key projection have such keys.
 * Most of their length is the same at all positions, and the error of a code is a share of that length. */
#ifndef TINYLM_BIAS_H
#define TINYLM_BIAS_H

#include "tinylm_logits.h"
#include "tinylm_session.h"

enum { BIAS_TOKENS = 128 }; /* over which plant_bias measures the keys' length */

static size_t key_row(const model_layer *layer) { return (size_t)layer->n_kv_heads * (size_t)layer->head_dim; }

static void keep_keys(session *s, int layer, int n)
{
    size_t row = key_row(&s->m->layers[layer]);
    float **keys = (float **)s->user;
    memcpy(keys[layer] + (size_t)s->end * row, s->k, (size_t)n * row * sizeof(float));
    attend_cached(s, layer, n);
}

/* The keys of a text as the caches would receive them; keys[layer]: [n_tokens][n_kv_heads][head_dim], to be freed. */
static void collect_keys(model *m, const unsigned char *text, int n_tokens, float *keys[MAX_LAYERS])
{
    session s;
    session_create(&s, m, find_format("f32"), find_format("f32"), n_tokens);
    for (int i = 0; i < m->n_layers; i++) keys[i] = floats((size_t)n_tokens * key_row(&m->layers[i]));
    s.attend = keep_keys;
    s.user = keys;
    prefill(&s, text, n_tokens);
    session_destroy(&s);
}

/* Calibrates: the centre of each layer's keys is their mean over the first tokens of a text. */
static void find_centers(model *m, const unsigned char *text, int n_tokens)
{
    float *keys[MAX_LAYERS];
    collect_keys(m, text, n_tokens, keys);
    for (int i = 0; i < m->n_layers; i++) {
        model_layer *layer = &m->layers[i];
        tqkv_store shape = {
            .format = TQKV_F16, .head_dim = layer->head_dim, .n_kv_heads = layer->n_kv_heads, .capacity = 1};
        layer->key_center = floats(key_row(layer));
        check(tqkv_calibrate(&shape, keys[i], n_tokens, NULL, 0, 0, TQKV_PAIRS_NONE, layer->key_center, NULL), "mean");
        free(keys[i]);
    }
}

/* A vector of random direction, in the pairs of elements that the rotary embedding turns slowest: the given share of
 * them. Trained models have their large biases there. */
static void random_vector(float *out, int head_dim, double length, float share, uint64_t *seed)
{
    int half = head_dim / 2, first = half - (int)((float)half * share);
    double square = 0;
    for (int i = 0; i < head_dim; i++) {
        out[i] = i % half < first ? 0.0f : (float)(2 * random_unit(seed) - 1);
        square += (double)out[i] * out[i];
    }
    for (int i = 0; i < head_dim; i++) out[i] *= (float)(length / sqrt(square));
}

/* Adds to all keys of a head one vector, `lengths` times as long as the keys are (root mean square). share 0: after the
 * rotary embedding. Else before it, as the bias of a key projection; see random_vector. */
static void plant_bias(model *m, const unsigned char *text, float lengths, float share)
{
    float *keys[MAX_LAYERS];
    uint64_t seed = 1;
    collect_keys(m, text, BIAS_TOKENS, keys);
    m->bias_before_rotary = share > 0;
    for (int i = 0; i < m->n_layers; i++) {
        model_layer *layer = &m->layers[i];
        int d = layer->head_dim;
        layer->key_bias = floats(key_row(layer));
        for (int head = 0; head < layer->n_kv_heads; head++) {
            double square = 0;
            for (int token = 0; token < BIAS_TOKENS; token++) {
                const float *key = keys[i] + (size_t)token * key_row(layer) + head * d;
                for (int j = 0; j < d; j++) square += (double)key[j] * key[j] / BIAS_TOKENS;
            }
            random_vector(layer->key_bias + head * d, d, (double)lengths * sqrt(square), share > 0 ? share : 1.0f,
                          &seed);
        }
        free(keys[i]);
    }
}

#endif

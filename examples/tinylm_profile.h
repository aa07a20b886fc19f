/* Profiles of the small model: centre and scale of each layer's keys, learned from one text and used on others. */
#ifndef TINYLM_PROFILE_H
#define TINYLM_PROFILE_H

#include "profile_write.h"
#include "tinylm_bias.h"

/* The keys of the first n_tokens bytes of a text, in a file. */
static inline void learn_profile(model *m, const unsigned char *text, int n_tokens, const char *path)
{
    float *keys[MAX_LAYERS];
    profile_layer layers[MAX_LAYERS];
    memset(layers, 0, sizeof layers);
    collect_keys(m, text, n_tokens, keys);
    for (int i = 0; i < m->n_layers; i++) {
        const model_layer *from = &m->layers[i];
        const tqkv_store shape = {
            .format = TQKV_F16, .head_dim = from->head_dim, .n_kv_heads = from->n_kv_heads, .capacity = 1};
        profile_layer *to = &layers[i];
        to->n_kv_heads = from->n_kv_heads;
        to->head_dim = from->head_dim;
        to->center = floats(key_row(from));
        to->channel_scale = floats(key_row(from));
        check(tqkv_calibrate(&shape, keys[i], n_tokens, NULL, 0, 0, TQKV_PAIRS_HALVES, to->center, to->channel_scale),
              "calibrate");
        free(keys[i]);
    }
    const profile learned = {m->n_layers, layers};
    check(profile_save(path, &learned), path);
    for (int i = 0; i < m->n_layers; i++) {
        free(layers[i].center);
        free(layers[i].channel_scale);
    }
}

/* The caches of the model store their keys by what a profile says, and learn nothing themselves. */
static inline void use_profile(model *m, const char *path)
{
    profile p;
    check(profile_load(path, &p), path);
    if (p.n_layers != m->n_layers) stop(path, "is the profile of a model of another shape");
    for (int i = 0; i < m->n_layers; i++) {
        model_layer *to = &m->layers[i];
        profile_layer *from = &p.layers[i];
        if (from->head_dim != to->head_dim || from->n_kv_heads != to->n_kv_heads)
            stop(path, "is the profile of a model of another shape");
        to->key_center = from->center;
        to->key_scale = from->channel_scale;
        from->center = from->channel_scale = NULL;
    }
    profile_free(&p);
}

#endif

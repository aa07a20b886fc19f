/* Profiles of the small model: centre and scale of each layer's keys, learned from one text and used on others. */
#ifndef TINYLM_PROFILE_H
#define TINYLM_PROFILE_H

#include "plan.h"
#include "profile_write.h"
#include "tinylm_bias.h"
#include "tinylm_score.h"

/* The loss of each layer's keys (even) and values (odd) in TQ4, with all others as halves. A bit more leaves a quarter
 * of it. */
static inline void measure_streams(model *m, const options *o, plan_stream *streams)
{
    const format_choice *plain = find_format("f32"), *preset = find_format("small");
    scoring job = scoring_open(m, o->file, o->n_windows);
    score_windows(&job, plain, plain, job.reference, NULL);
    for (int i = 0; i < m->n_layers; i++) m->layers[i].key_format = m->layers[i].value_format = TQKV_F16;
    for (int i = 0; i < 2 * m->n_layers; i++) {
        double means[3];
        model_layer *layer = &m->layers[i / 2];
        tqkv_format *format = i % 2 ? &layer->value_format : &layer->key_format;
        *format = TQKV_TQ4;
        score_windows(&job, preset, preset, job.logits, NULL);
        *format = TQKV_F16;
        compare(job.logits, job.reference, job.text, o->n_windows * WINDOW_BYTES, means);
        for (int f = 0; f < PLAN_FORMATS; f++)
            streams[i].loss[f] = means[1] * pow(4, 4 - plan_bits(plan_formats[f], layer->head_dim));
        streams[i].loss[PLAN_FORMATS - 1] = 0; /* halves */
    }
    scoring_close(&job);
}

/* Formats by layer of so many bits a value of all caches of a window. */
static inline void learn_plan(model *m, const options *o, profile_layer *to)
{
    plan_stream streams[2 * MAX_LAYERS];
    session s = {.m = m, .keys = find_format("small"), .capacity = WINDOW_BYTES};
    double room = 0;
    measure_streams(m, o, streams);
    for (int i = 0; i < 2 * m->n_layers; i++) {
        const model_layer *layer = &m->layers[i / 2];
        const double values = (double)key_row(layer) * layer_desc(&s, layer).capacity;
        room += o->bits / 8 * values;
        for (int f = 0; f < PLAN_FORMATS; f++)
            streams[i].bytes[f] = plan_bits(plan_formats[f], layer->head_dim) / 8 * values;
    }
    if (!plan_choose(streams, 2 * m->n_layers, room)) stop("--bits", "not even tq2 fits");
    for (int i = 0; i < m->n_layers; i++) {
        to[i].key_format = plan_formats[streams[2 * i].chosen];
        to[i].value_format = plan_formats[streams[2 * i + 1].chosen];
    }
}

/* The keys of the first n_tokens bytes of a text, in a file, and with --bits a plan. */
static inline void learn_profile(model *m, const options *o, const unsigned char *text, int n_tokens)
{
    float *keys[MAX_LAYERS];
    profile_layer layers[MAX_LAYERS];
    memset(layers, 0, sizeof layers);
    if (o->bits > 0) learn_plan(m, o, layers);
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
    check(profile_save(o->profile, &learned), o->profile);
    for (int i = 0; i < m->n_layers; i++) {
        free(layers[i].center);
        free(layers[i].channel_scale);
    }
}

/* The caches of the model store their keys by what a profile says, and learn nothing themselves; a preset's formats
 * give way to those of its plan. */
static inline void use_profile(model *m, const char *path)
{
    profile p;
    check(profile_load(path, &p), path);
    if (p.n_layers > m->n_layers) stop(path, "is the profile of a model with more layers");
    for (int i = 0; i < m->n_layers; i++) {
        model_layer *to = &m->layers[i];
        tqkv_cache_desc desc = {.head_dim = to->head_dim, .n_kv_heads = to->n_kv_heads};
        const char *reason = profile_desc(&p, i, &desc);
        if (reason) stop(path, reason);
        to->key_format = desc.key_format;
        to->value_format = desc.value_format;
        to->key_center = p.layers[i].center;
        to->key_scale = p.layers[i].channel_scale;
        p.layers[i].center = p.layers[i].channel_scale = NULL;
    }
    profile_free(&p);
}

#endif

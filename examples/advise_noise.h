/* What the formats of a layer's keys add to its logits, without and with the centre and the scale of tqkv_calibrate,
 * and the preset that follows. */
#ifndef ADVISE_NOISE_H
#define ADVISE_NOISE_H

#include "capture_file.h"

/* What keys may add to the logits of a layer. Those of TQKV_SMALL add 0.1 to 0.4 in the captured layers of pretrained
 * models, whose predictions it changes by 0.003 nats. */
static const double bearable_noise = 0.5;

enum { NEITHER, CENTRE, SCALE, QUERIES, LATER, N_NOISES };

typedef struct noise_row {
    double noise[N_NOISES]; /* root mean square over the KV heads */
} noise_row;

/* Rows of a part of the keys, and their part of the queries. */
typedef struct noise_part {
    const captured_layer *layer;
    int dim, n_positions, n_queries;
    tqkv_strides strides;
    const float *rows;
    float *q; /* [n_queries][n_heads][dim] */
} noise_part;

/* first: where the part begins in a row */
static noise_part open_noise(const capture *all, const captured_layer *layer, int first, int dim)
{
    const int n = all->n_queries * layer->n_heads, d = layer->head_dim;
    noise_part part = {layer, dim, all->n_positions, all->n_queries, {(size_t)(layer->n_kv_heads * d), (size_t)d},
                       NULL,  NULL};
    part.rows = layer->keys + first;
    part.q = (float *)allocate((size_t)(n * dim), sizeof *part.q);
    for (int i = 0; i < n; i++) memcpy(part.q + i * dim, layer->queries + i * d + first, (size_t)dim * sizeof *part.q);
    return part;
}

/* Of the positions from `first` on. */
static double noise_of(const noise_part *part, const tqkv_store *shape, int first)
{
    double heads[256], squares = 0;
    const float *rows = part->rows + (size_t)first * part->strides.token;
    check(
        tqkv_logit_noise(shape, rows, part->n_positions - first, part->q, part->layer->n_heads, part->n_queries, heads),
        "logit_noise");
    for (int h = 0; h < shape->n_kv_heads; h++) squares += heads[h] * heads[h] / shape->n_kv_heads;
    return sqrt(squares * part->dim / part->layer->head_dim);
}

/* Learns from the first n positions. */
static void learn(const noise_part *part, tqkv_store *shape, int n, bool queries, float *center, float *scale)
{
    shape->center = shape->channel_scale = NULL;
    check(tqkv_calibrate(shape, part->rows, n, queries ? part->q : NULL, part->layer->n_heads, part->n_queries,
                         TQKV_PAIRS_NONE, center, scale),
          "calibrate");
    shape->center = center;
    shape->channel_scale = scale;
}

/* LATER: the noise of the second half with what the first one taught. */
static noise_row noises_of(const noise_part *part, tqkv_format format)
{
    const size_t n = (size_t)(part->layer->n_kv_heads * part->dim);
    float *center = (float *)allocate(n, sizeof *center), *scale = (float *)allocate(n, sizeof *scale);
    tqkv_store shape = {.format = format, .head_dim = part->dim, .n_kv_heads = part->layer->n_kv_heads, .capacity = 1};
    noise_row row;
    shape.strides = part->strides;
    row.noise[NEITHER] = noise_of(part, &shape, 0);
    learn(part, &shape, part->n_positions / 2, false, center, scale);
    row.noise[LATER] = noise_of(part, &shape, part->n_positions / 2);
    learn(part, &shape, part->n_positions, true, center, scale);
    row.noise[QUERIES] = noise_of(part, &shape, 0);
    learn(part, &shape, part->n_positions, false, center, scale);
    row.noise[SCALE] = noise_of(part, &shape, 0);
    shape.channel_scale = NULL;
    row.noise[CENTRE] = noise_of(part, &shape, 0);
    free(center);
    free(scale);
    return row;
}

/* The worst of the layers so far, with what was learned from other rows: of the keys of TQKV_SMALL and of TQKV_TINY. */
typedef struct noise_worst {
    double small, tiny;
} noise_worst;

/* A table of a part of the keys. formats: [n] */
static void print_noise(const capture *all, const captured_layer *layer, int first, int dim, const tqkv_format *formats,
                        int n, noise_worst *worst)
{
    noise_part part = open_noise(all, layer, first, dim);
    printf("  %-6s %10s %10s %10s %10s %10s\n", "logits", "neither", "centre", "scale", "queries", "later");
    for (int f = 0; f < n; f++) {
        const noise_row row = noises_of(&part, formats[f]);
        printf("  %-6s", tqkv_format_name(formats[f]));
        for (int i = 0; i < N_NOISES; i++) printf(" %10.3g", row.noise[i]);
        puts("");
        const double later = row.noise[LATER];
        if (formats[f] == tqkv_cache_preset(TQKV_SMALL).key_format) worst->small = fmax(worst->small, later);
        if (formats[f] == tqkv_cache_preset(TQKV_TINY).key_format) worst->tiny = fmax(worst->tiny, later);
    }
    free(part.q);
}

static void print_preset(const noise_worst *worst)
{
    const char *preset = worst->small <= bearable_noise ? "TQKV_SMALL" : "TQKV_SAFE";
    printf("\npreset: %s. With a scale learned from other rows the keys of TQKV_SMALL, %s, add at most %.2g to the "
           "logits of "
           "a\nlayer, those of TQKV_TINY, %s, %.2g; %g is bearable beside a preset's exact ends\n",
           preset, tqkv_format_name(tqkv_cache_preset(TQKV_SMALL).key_format), worst->small,
           tqkv_format_name(tqkv_cache_preset(TQKV_TINY).key_format), worst->tiny, bearable_noise);
}

#endif

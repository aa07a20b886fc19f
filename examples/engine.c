/* A small engine of the kind that tqkv goes into: the shape of llama2.c's stories15M, with random weights. Its caches
 * are float arrays [position][head][dim] or, by one other function, tqkv's.
 *   engine [TOKENS]    the logits with tqkv's caches against those with the arrays, and the bytes of both */
#include "tqkv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 288, HIDDEN = 768, LAYERS = 6, HEADS = 6, HEAD_DIM = WIDTH / HEADS, VOCABULARY = 256, POSITIONS = 256 };

typedef struct block {
    float q[WIDTH][WIDTH], k[WIDTH][WIDTH], v[WIDTH][WIDTH], out[WIDTH][WIDTH];
    float gate[HIDDEN][WIDTH], up[HIDDEN][WIDTH], down[WIDTH][HIDDEN];
} block;

typedef struct model {
    float embedding[VOCABULARY][WIDTH]; /* also gives the logits */
    block layers[LAYERS];
} model;

typedef struct engine engine;
struct engine {
    const model *m;
    /* One token of one layer: keeps k and v, and attends with q. q, k, v, out: [HEADS][HEAD_DIM] */
    void (*attention)(engine *e, int layer, int position, const float *q, const float *k, const float *v, float *out);
    float keys[LAYERS][POSITIONS][HEADS][HEAD_DIM], values[LAYERS][POSITIONS][HEADS][HEAD_DIM];
    tqkv_cache *caches[LAYERS]; /* in place of keys and values */
    float logits[VOCABULARY];
};

static void check(tqkv_result result, const char *what)
{
    if (result == TQKV_OK) return;
    fprintf(stderr, "engine: %s: %s\n", what, tqkv_result_string(result));
    exit(1);
}

/* ---- The one place: before, and after ---- */

static void attend_arrays(engine *e, int layer, int position, const float *q, const float *k, const float *v,
                          float *out)
{
    memcpy(e->keys[layer][position], k, sizeof e->keys[layer][position]);
    memcpy(e->values[layer][position], v, sizeof e->values[layer][position]);
    memset(out, 0, WIDTH * sizeof *out);
    for (int head = 0; head < HEADS; head++) {
        float scores[POSITIONS], max = -INFINITY, sum = 0.0f;
        for (int p = 0; p <= position; p++) {
            scores[p] = 0.0f;
            for (int i = 0; i < HEAD_DIM; i++) scores[p] += q[head * HEAD_DIM + i] * e->keys[layer][p][head][i];
            scores[p] /= sqrtf(HEAD_DIM);
            max = scores[p] > max ? scores[p] : max;
        }
        for (int p = 0; p <= position; p++) sum += scores[p] = expf(scores[p] - max);
        for (int p = 0; p <= position; p++)
            for (int i = 0; i < HEAD_DIM; i++)
                out[head * HEAD_DIM + i] += scores[p] / sum * e->values[layer][p][head][i];
    }
}

static void attend_tqkv(engine *e, int layer, int position, const float *q, const float *k, const float *v, float *out)
{
    (void)position; /* the cache counts */
    check(tqkv_cache_append(e->caches[layer], k, v, 1), "append");
    check(tqkv_cache_attend(e->caches[layer], q, 1, out), "attend");
}

/* ---- The rest knows nothing of it ---- */

/* out = w x; w: [n_out][n_in] */
static void multiply(const float *w, const float *x, int n_out, int n_in, float *out)
{
    for (int row = 0; row < n_out; row++) {
        float sums[4] = {0};
        for (int i = 0; i < n_in; i += 4)
            for (int j = 0; j < 4; j++) sums[j] += w[row * n_in + i + j] * x[i + j];
        out[row] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}

static void normalise(const float *x, float *out)
{
    float squares = 0.0f;
    for (int i = 0; i < WIDTH; i++) squares += x[i] * x[i];
    for (int i = 0; i < WIDTH; i++) out[i] = x[i] / sqrtf(squares / WIDTH + 1e-5f);
}

/* Rotary embedding of neighbouring pairs; x: [HEADS][HEAD_DIM] */
static void turn(float *x, int position)
{
    for (int i = 0; i < WIDTH; i += 2) {
        const float angle = (float)position * powf(10000.0f, -(float)(i % HEAD_DIM) / HEAD_DIM);
        const float a = x[i], b = x[i + 1], c = cosf(angle), s = sinf(angle);
        x[i] = a * c - b * s;
        x[i + 1] = a * s + b * c;
    }
}

static void forward(engine *e, int token, int position)
{
    float x[WIDTH], normed[WIDTH], q[WIDTH], k[WIDTH], v[WIDTH], out[WIDTH], gate[HIDDEN], up[HIDDEN];
    for (int i = 0; i < WIDTH; i++) x[i] = sqrtf(WIDTH) * e->m->embedding[token][i];
    for (int i = 0; i < LAYERS; i++) {
        const block *l = &e->m->layers[i];
        normalise(x, normed);
        multiply(l->q[0], normed, WIDTH, WIDTH, q);
        multiply(l->k[0], normed, WIDTH, WIDTH, k);
        multiply(l->v[0], normed, WIDTH, WIDTH, v);
        turn(q, position);
        turn(k, position);
        e->attention(e, i, position, q, k, v, out);
        multiply(l->out[0], out, WIDTH, WIDTH, normed);
        for (int j = 0; j < WIDTH; j++) x[j] += normed[j];
        normalise(x, normed);
        multiply(l->gate[0], normed, HIDDEN, WIDTH, gate);
        multiply(l->up[0], normed, HIDDEN, WIDTH, up);
        for (int j = 0; j < HIDDEN; j++) gate[j] *= up[j] / (1.0f + expf(-gate[j]));
        multiply(l->down[0], gate, WIDTH, HIDDEN, out);
        for (int j = 0; j < WIDTH; j++) x[j] += out[j];
    }
    normalise(x, normed);
    multiply(e->m->embedding[0], normed, VOCABULARY, WIDTH, e->logits);
}

static void *zeros(size_t size)
{
    void *memory = calloc(1, size);
    if (!memory) check(TQKV_OUT_OF_MEMORY, "memory");
    return memory;
}

/* Weights near Gaussian that keep the size of what passes through. */
static model *random_model(void)
{
    model *m = (model *)zeros(sizeof *m);
    for (float *w = m->embedding[0], *end = (float *)(void *)(m + 1); w < end; w++) {
        for (int i = 0; i < 12; i++) *w += (float)rand() / (float)RAND_MAX - 0.5f;
        *w /= sqrtf(WIDTH);
    }
    return m;
}

static engine *open_engine(const model *m, tqkv_format keys, tqkv_format values)
{
    engine *e = (engine *)zeros(sizeof *e);
    tqkv_cache_desc desc = {.head_dim = HEAD_DIM, .n_kv_heads = HEADS, .n_heads = HEADS, .capacity = POSITIONS};
    desc.key_format = keys;
    desc.value_format = values;
    e->m = m;
    e->attention = attend_tqkv;
    for (int i = 0; i < LAYERS; i++) check(tqkv_cache_create(&desc, &e->caches[i]), "cache");
    return e;
}

int main(int argc, char **argv)
{
    static const tqkv_format pairs[][2] = {{TQKV_F16, TQKV_F16}, {TQKV_I8, TQKV_I8}, {TQKV_I8, TQKV_TQ4}};
    const int n_tokens = argc > 1 ? atoi(argv[1]) : 48;
    if (n_tokens < 1 || n_tokens > POSITIONS) check(TQKV_OUT_OF_RANGE, "TOKENS");
    model *m = random_model();
    engine *plain = (engine *)zeros(sizeof *plain), *others[3];
    double wrong[3] = {0}, all = 0.0;
    plain->m = m;
    plain->attention = attend_arrays;
    for (int i = 0; i < 3; i++) others[i] = open_engine(m, pairs[i][0], pairs[i][1]);
    for (int t = 0; t < n_tokens; t++) {
        const int token = rand() % VOCABULARY;
        forward(plain, token, t);
        for (int i = 0; i < 3; i++) forward(others[i], token, t);
        for (int j = 0; j < VOCABULARY; j++) {
            all += (double)plain->logits[j] * (double)plain->logits[j];
            for (int i = 0; i < 3; i++) wrong[i] += pow((double)others[i]->logits[j] - (double)plain->logits[j], 2.0);
        }
    }
    printf("%d tokens, %d layers, %d heads of %d; arrays: %zu bytes\n", n_tokens, LAYERS, HEADS, HEAD_DIM,
           sizeof plain->keys + sizeof plain->values);
    for (int i = 0; i < 3; i++) {
        printf("keys %-4s values %-4s relative error of the logits %.1e, %zu bytes\n", tqkv_format_name(pairs[i][0]),
               tqkv_format_name(pairs[i][1]), sqrt(wrong[i] / all), LAYERS * tqkv_cache_bytes(others[i]->caches[0]));
        for (int j = 0; j < LAYERS; j++) tqkv_cache_destroy(others[i]->caches[j]);
        free(others[i]);
    }
    free(plain);
    free(m);
    return 0;
}

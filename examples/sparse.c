/* Sparse attention from codes, as DeepSeek V3.2 does it: an index of 64 heads chooses 2,048 of 65,536 positions of a
 * latent cache, and 64 heads attend to these alone. Random weights. Prints bytes and times of dense and of sparse
 * attention, what index keys of fewer bits choose, and how far the outputs lie apart.
 *   tqkv_index_scores -> tqkv_index_choose -> tqkv_attend with a list; of a cache over its tqkv_cache_view */
#include "tqkv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    POSITIONS = 65536,
    CHOSEN = 2048,
    HEADS = 64,
    LATENT = 512, /* one row a position that all heads read, as key and as value */
    ROTARY = 64,  /* more dimensions of each key */
    INDEX = 128,
    TOPICS = 48,
    CHUNK = 1024 /* positions that are made at a time */
};

static void check(tqkv_result result, const char *what)
{
    if (result == TQKV_OK) return;
    fprintf(stderr, "sparse: %s: %s\n", what, tqkv_result_string(result));
    exit(1);
}

static void *allocate(size_t bytes)
{
    void *memory = malloc(bytes);
    if (!memory) exit(1);
    return memory;
}

static double seconds(void) { return (double)clock() / CLOCKS_PER_SEC; }

/* ---- random states of a model: each position has one of some topics, and noise ---- */

static uint64_t state = 1;

/* Near Gaussian, with deviation 1 */
static float noise(void)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    const uint64_t bits = state >> 16;
    const int sum = (int)(bits & 0xfff) + (int)(bits >> 12 & 0xfff) + (int)(bits >> 24 & 0xfff) + (int)(bits >> 36);
    return (float)(sum - 8190) * (1.0f / 2365.0f);
}

static float topics[TOPICS][LATENT];

/* row: [LATENT], noise and some of topic `topic`; returns it */
static float *fill(float *row, int topic, float share)
{
    for (int i = 0; i < LATENT; i++) row[i] = noise() + share * topics[topic][i];
    return row;
}

/* ---- the layer ---- */

typedef struct layer {
    tqkv_store latent, rotary; /* TQ4 and halves */
    float *index_keys;         /* [POSITIONS][INDEX] */
    float q[HEADS][LATENT + ROTARY], index_q[HEADS][INDEX], weights[HEADS];
} layer;

static tqkv_store new_store(tqkv_format format, int head_dim)
{
    tqkv_store s = {.format = format, .head_dim = head_dim, .n_kv_heads = 1, .capacity = POSITIONS};
    s.codes_size = tqkv_codes_size(&s);
    s.norms_size = tqkv_norms_size(&s);
    s.codes = allocate(s.codes_size);
    s.norms = (float *)allocate(s.norms_size + 1);
    return s;
}

/* A trained index follows attention. This index sees a quarter of each latent row and of each query. */
static void make_layer(layer *l)
{
    float *latent = (float *)allocate(CHUNK * LATENT * sizeof *latent),
          *rotary = (float *)allocate(CHUNK * ROTARY * sizeof *rotary), row[LATENT];
    for (int t = 0; t < TOPICS; t++) fill(topics[t], 0, 0.0f);
    l->latent = new_store(TQKV_TQ4, LATENT);
    l->rotary = new_store(TQKV_F16, ROTARY);
    l->index_keys = (float *)allocate(sizeof(float) * POSITIONS * INDEX);
    for (int first = 0; first < POSITIONS; first += CHUNK) {
        for (int i = 0; i < CHUNK; i++) {
            float *to = fill(latent + i * LATENT, (first + i) / 37 % TOPICS, 0.7f);
            memcpy(l->index_keys + (size_t)(first + i) * INDEX, to, INDEX * sizeof *to);
        }
        for (int i = 0; i < CHUNK * ROTARY; i++) rotary[i] = 0.2f * noise();
        check(tqkv_encode(&l->latent, latent, CHUNK, first), "encode");
        check(tqkv_encode(&l->rotary, rotary, CHUNK, first), "encode");
    }
    for (int h = 0; h < HEADS; h++) {
        fill(row, 7, 0.6f);
        memcpy(l->q[h], row, sizeof row);
        memcpy(l->index_q[h], row, sizeof l->index_q[h]);
        for (int i = 0; i < ROTARY; i++) l->q[h][LATENT + i] = noise();
        l->weights[h] = 0.5f + 0.5f * fabsf(noise());
    }
    free(latent);
    free(rotary);
}

/* list NULL: dense. out: [HEADS][LATENT]; returns the time */
static double attend(const layer *l, const int32_t *list, float *out)
{
    tqkv_attention a = {.keys = &l->latent, .values = &l->latent, .tail = &l->rotary, .n_heads = HEADS, .n_queries = 1};
    a.end = POSITIONS;
    a.list.rows = list;
    a.list.length = CHOSEN;
    a.list.block = 1;
    const double begin = seconds();
    check(tqkv_attend(&a, l->q, out), "attend");
    return seconds() - begin;
}

/* ---- the index ---- */

/* Scores of float keys, with which the formats are compared. */
static void float_scores(const layer *l, float *scores)
{
    for (size_t j = 0; j < POSITIONS; j++) {
        const float *key = l->index_keys + j * INDEX;
        scores[j] = 0.0f;
        for (int h = 0; h < HEADS; h++) {
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (int i = 0; i < INDEX; i++) sums[i % 4] += l->index_q[h][i] * key[i];
            const float sum = sums[0] + sums[1] + sums[2] + sums[3];
            scores[j] += l->weights[h] * (sum > 0.0f ? sum : 0.0f);
        }
    }
}

typedef struct choice {
    int32_t list[CHOSEN];
    double scoring, choosing; /* seconds */
    size_t bytes;             /* of the index keys */
} choice;

/* format: of the index keys; TQKV_FORMAT_DEFAULT: floats */
static void choose(const layer *l, tqkv_format format, choice *c)
{
    tqkv_store keys = new_store(format ? format : TQKV_TQ4, INDEX);
    float *scores = (float *)allocate(POSITIONS * sizeof *scores);
    tqkv_index x = {
        .keys = &keys, .n_heads = HEADS, .n_queries = 1, .end = POSITIONS, .weights = l->weights, .relu = true};
    x.newest = 64; /* the newest positions are always among them */
    check(tqkv_encode(&keys, l->index_keys, POSITIONS, 0), "encode");
    double begin = seconds();
    if (format)
        check(tqkv_index_scores(&x, l->index_q, scores), "scores");
    else
        float_scores(l, scores);
    c->scoring = seconds() - begin;
    begin = seconds();
    check(tqkv_index_choose(&x, scores, CHOSEN, c->list), "choose");
    c->choosing = seconds() - begin;
    c->bytes = format ? keys.codes_size + keys.norms_size : sizeof(float) * POSITIONS * INDEX;
    free(keys.codes);
    free(keys.norms);
    free(scores);
}

/* The share of `wanted` that is in `found`; both ascending. */
static double recall(const int32_t *wanted, const int32_t *found)
{
    int both = 0;
    for (int i = 0, j = 0; i < CHOSEN && j < CHOSEN;) {
        both += wanted[i] == found[j];
        if (wanted[i] <= found[j])
            i++;
        else
            j++;
    }
    return (double)both / CHOSEN;
}

/* |x - y| / |y| */
static double difference(const float *x, const float *y)
{
    double error = 0.0, size = 0.0;
    for (int i = 0; i < HEADS * LATENT; i++) {
        error += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
        size += (double)y[i] * (double)y[i];
    }
    return sqrt(error / size);
}

int main(void)
{
    static const tqkv_format formats[4] = {TQKV_FORMAT_DEFAULT, TQKV_F16, TQKV_I8, TQKV_TQ4};
    static layer l;
    static choice choices[4];
    static float dense[HEADS * LATENT], sparse[HEADS * LATENT];
    make_layer(&l);
    const size_t row = (l.latent.codes_size + l.latent.norms_size + l.rotary.codes_size) / POSITIONS;
    const double dense_time = attend(&l, NULL, dense);
    bool fine = true;
    printf("one token, %d heads over %d positions of %d + %d; an index of %d heads of %d chooses %d\n\n", HEADS,
           POSITIONS, LATENT, ROTARY, HEADS, INDEX, CHOSEN);
    printf("dense, from codes: %6.2f MiB read, %6.1f ms\n\n", (double)(row * POSITIONS) / (1 << 20), 1e3 * dense_time);
    printf("index keys    MiB   scores  choice  attention      all   MiB read  recall  output from dense\n");
    for (int i = 0; i < 4; i++) {
        choice *c = &choices[i];
        choose(&l, formats[i], c);
        const double time = attend(&l, c->list, sparse), found = recall(choices[0].list, c->list);
        const double off = difference(sparse, dense);
        printf("%-10s %6.2f %5.1f ms %4.1f ms    %4.1f ms %5.1f ms %10.2f  %6.4f  %.4f\n",
               formats[i] ? tqkv_format_name(formats[i]) : "floats", (double)c->bytes / (1 << 20), 1e3 * c->scoring,
               1e3 * c->choosing, 1e3 * time, 1e3 * (c->scoring + c->choosing + time),
               (double)(c->bytes + row * CHOSEN) / (1 << 20), found, off);
        fine = fine && found > 0.85 && off < 0.2;
    }
    printf("\nTimes are of the processor. recall: the share of the positions that float index keys choose: %s\n",
           fine ? "as expected" : "WRONG");
    return fine ? 0 : 1;
}

/* Latent attention as DeepSeek V3, GLM-5 and Kimi K2 have it, on one stream that is key and value, and a tail for the
 * rotary part. Random weights of a small layer; all sizes of a head are those of DeepSeek V3.
 *   latent
 * A token leaves 512 + 64 numbers in the cache, for all heads: its latent c, and the rotary part r of every head's key.
 * Head h has the key [ K_h c | r ] and the value V_h c, of 128 + 64 and 128 dimensions. An engine never computes them:
 *     q.K_h c = (K_h^T q).c             "absorbed": a query of 512 dimensions against c itself
 *     sum_j p_j V_h c_j = V_h sum_j p_j c_j
 * So all heads attend to the same rows. Checked against the keys and values of each head, in double precision. */
#include "tqkv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 256, HEADS = 8, LATENT = 512, ROTARY = 64, HEAD = 128, TOKENS = 200, QUERY = LATENT + ROTARY };

typedef struct layer {
    float to_latent[LATENT][HIDDEN], to_rotary[ROTARY][HIDDEN]; /* of a token */
    float to_query[HEADS][HEAD][HIDDEN], to_query_rotary[HEADS][ROTARY][HIDDEN];
    float keys[HEADS][HEAD][LATENT], values[HEADS][HEAD][LATENT]; /* K_h and V_h */
} layer;

static layer weights;
static float rows[TOKENS][QUERY];                             /* [c | r] of each token */
static float query[HEADS][HEAD], query_rotary[HEADS][ROTARY]; /* of the newest one */

static float random_normal(void)
{
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) sum += (float)rand() / (float)RAND_MAX;
    return sum;
}

/* [n], so that a product with n_in normal numbers is normal */
static void fill(float *x, size_t n, int n_in)
{
    for (size_t i = 0; i < n; i++) x[i] = random_normal() / sqrtf((float)n_in);
}

/* out: [n_out], matrix: [n_out][n_in], x: [n_in] */
static void multiply(const float *matrix, const float *x, int n_out, int n_in, float *out)
{
    for (int i = 0; i < n_out; i++) {
        out[i] = 0.0f;
        for (int j = 0; j < n_in; j++) out[i] += matrix[i * n_in + j] * x[j];
    }
}

/* The rotary embedding of neighbours, in place; x: [ROTARY] */
static void rotate_by_position(float *x, int position)
{
    for (int i = 0; i < ROTARY; i += 2) {
        const float angle = (float)position * powf(10000.0f, -(float)i / ROTARY), a = x[i], b = x[i + 1];
        x[i] = a * cosf(angle) - b * sinf(angle);
        x[i + 1] = a * sinf(angle) + b * cosf(angle);
    }
}

/* Makes the layer, the rows of all tokens and the query of the last one. */
static void make_layer(void)
{
    float hidden[HIDDEN];
    fill(&weights.to_latent[0][0], LATENT * HIDDEN, HIDDEN);
    fill(&weights.to_rotary[0][0], ROTARY * HIDDEN, HIDDEN);
    fill(&weights.to_query[0][0][0], HEADS * HEAD * HIDDEN, HIDDEN);
    fill(&weights.to_query_rotary[0][0][0], HEADS * ROTARY * HIDDEN, HIDDEN);
    fill(&weights.keys[0][0][0], HEADS * HEAD * LATENT, LATENT);
    fill(&weights.values[0][0][0], HEADS * HEAD * LATENT, LATENT);
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < HIDDEN; i++) hidden[i] = random_normal();
        multiply(&weights.to_latent[0][0], hidden, LATENT, HIDDEN, rows[t]); /* a model normalises c */
        multiply(&weights.to_rotary[0][0], hidden, ROTARY, HIDDEN, rows[t] + LATENT);
        rotate_by_position(rows[t] + LATENT, t);
    }
    multiply(&weights.to_query[0][0][0], hidden, HEADS * HEAD, HIDDEN, &query[0][0]);
    multiply(&weights.to_query_rotary[0][0][0], hidden, HEADS * ROTARY, HIDDEN, &query_rotary[0][0]);
    for (int h = 0; h < HEADS; h++) rotate_by_position(query_rotary[h], TOKENS - 1);
}

/* ---- As a paper writes it: keys and values of each head, in double ---- */

/* out: [HEAD] = matrix x; matrix: [HEAD][LATENT] */
static void expand(const float *matrix, const float *x, double *out)
{
    for (int i = 0; i < HEAD; i++) {
        out[i] = 0.0;
        for (int j = 0; j < LATENT; j++) out[i] += (double)matrix[i * LATENT + j] * (double)x[j];
    }
}

/* cached: [TOKENS][QUERY], out: [HEADS][HEAD] */
static void attend_expanded(const float *cached, double *out)
{
    for (int h = 0; h < HEADS; h++) {
        double largest = -INFINITY, sum = 0.0, scores[TOKENS], key[HEAD], value[HEAD];
        for (int t = 0; t < TOKENS; t++) {
            const float *row = cached + t * QUERY;
            scores[t] = 0.0;
            expand(&weights.keys[h][0][0], row, key);
            for (int i = 0; i < HEAD; i++) scores[t] += (double)query[h][i] * key[i];
            for (int i = 0; i < ROTARY; i++) scores[t] += (double)query_rotary[h][i] * (double)row[LATENT + i];
            scores[t] /= sqrt(HEAD + ROTARY);
            if (scores[t] > largest) largest = scores[t];
        }
        memset(out + h * HEAD, 0, HEAD * sizeof *out);
        for (int t = 0; t < TOKENS; t++) {
            const double weight = exp(scores[t] - largest);
            expand(&weights.values[h][0][0], cached + t * QUERY, value);
            for (int i = 0; i < HEAD; i++) out[h * HEAD + i] += weight * value[i];
            sum += weight;
        }
        for (int i = 0; i < HEAD; i++) out[h * HEAD + i] /= sum;
    }
}

/* ---- As an engine does it ---- */

/* The query of each head against the latent: [ K_h^T q | rotary part ]. keys: K, or K with rotated rows */
static void absorb(const float *keys, float *q)
{
    for (int h = 0; h < HEADS; h++, q += QUERY) {
        memset(q, 0, LATENT * sizeof *q);
        for (int i = 0; i < HEAD; i++)
            for (int j = 0; j < LATENT; j++) q[j] += query[h][i] * keys[(h * HEAD + i) * LATENT + j];
        memcpy(q + LATENT, query_rotary[h], ROTARY * sizeof *q);
    }
}

/* out: [HEADS][HEAD] = V_h times the sums of latents; values: V, or V with rotated rows */
static void project(const float *values, const float *sums, float *out)
{
    for (int h = 0; h < HEADS; h++)
        multiply(values + h * HEAD * LATENT, sums + h * LATENT, HEAD, LATENT, out + h * HEAD);
}

/* Absorbed queries over the cache's streams. out: [HEADS][HEAD] */
static tqkv_result attend_absorbed(tqkv_cache *cache, float *out)
{
    static float q[HEADS * QUERY], sums[HEADS * LATENT];
    absorb(&weights.keys[0][0][0], q);
    const tqkv_result r = tqkv_cache_attend(cache, q, 1, sums);
    project(&weights.values[0][0][0], sums, out);
    return r;
}

/* The same without a rotation of 512 dimensions at run time. Rows of K and V are rotated once, when the model is
   loaded: rotating both factors leaves a product as it is. Halves are not rotated, in either part. A rotated tail takes
   its small part of the query rotated. */
static tqkv_result attend_folded(tqkv_cache *cache, float *out)
{
    static float q[HEADS * QUERY], sums[HEADS * LATENT], keys[HEADS * HEAD * LATENT], values[HEADS * HEAD * LATENT];
    tqkv_attention a;
    tqkv_result r = tqkv_cache_view(cache, 1, &a);
    if (r != TQKV_OK) return r;
    a.query_basis = a.output_basis = TQKV_ROTATED;
    memcpy(keys, weights.keys, sizeof keys);
    memcpy(values, weights.values, sizeof values);
    if (a.keys->format != TQKV_F16) r = tqkv_rotate(keys, HEADS * HEAD, LATENT, TQKV_ROTATED);
    if (a.keys->format != TQKV_F16 && r == TQKV_OK) r = tqkv_rotate(values, HEADS * HEAD, LATENT, TQKV_ROTATED);
    absorb(keys, q);
    for (int h = 0; h < HEADS && r == TQKV_OK && a.tail->format != TQKV_F16; h++)
        r = tqkv_rotate(q + h * QUERY + LATENT, 1, ROTARY, TQKV_ROTATED);
    if (r == TQKV_OK) r = tqkv_attend(&a, q, sums);
    project(values, sums, out);
    return r;
}

/* ---- One pair of formats ---- */

/* |x - y| / |y|; [HEADS][HEAD] */
static double difference(const float *x, const double *y)
{
    double error = 0.0, size = 0.0;
    for (int i = 0; i < HEADS * HEAD; i++) {
        error += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        size += y[i] * y[i];
    }
    return sqrt(error / size);
}

/* What the cache holds, decoded. cached: [TOKENS][QUERY] */
static tqkv_result decode(const tqkv_cache *cache, float *cached)
{
    static float latent[TOKENS][LATENT], rotary[TOKENS][ROTARY];
    tqkv_attention view;
    tqkv_result r = tqkv_cache_view(cache, 1, &view);
    if (r == TQKV_OK) r = tqkv_decode(view.keys, 0, TOKENS, TQKV_ORIGINAL, latent);
    if (r == TQKV_OK) r = tqkv_decode(view.tail, 0, TOKENS, TQKV_ORIGINAL, rotary);
    for (int t = 0; t < TOKENS; t++) {
        memcpy(cached + t * QUERY, latent[t], sizeof latent[t]);
        memcpy(cached + t * QUERY + LATENT, rotary[t], sizeof rotary[t]);
    }
    return r;
}

/* Prints a line; false if the result is not the expanded one. exact: of the rows as they were before; [HEADS][HEAD] */
static bool try_formats(tqkv_format latent, tqkv_format rotary, const double *exact, double bearable)
{
    static float absorbed[HEADS * HEAD], folded[HEADS * HEAD], cached[TOKENS * QUERY];
    static double same_rows[HEADS * HEAD];
    tqkv_cache_desc desc = {.head_dim = LATENT, .n_kv_heads = 1, .n_heads = HEADS, .capacity = TOKENS};
    tqkv_cache *cache;
    desc.shared = true;
    desc.key_format = latent;
    desc.tail_dim = ROTARY;
    desc.tail_format = rotary;
    desc.scale = 1.0f / sqrtf(HEAD + ROTARY); /* of the expanded key: the default would be that of 512 + 64 */
    tqkv_result r = tqkv_cache_create(&desc, &cache);
    if (r == TQKV_OK) r = tqkv_cache_append(cache, rows, NULL, TOKENS);
    if (r == TQKV_OK) r = attend_absorbed(cache, absorbed);
    if (r == TQKV_OK) r = attend_folded(cache, folded);
    if (r == TQKV_OK) r = decode(cache, cached);
    if (r != TQKV_OK) {
        printf("%s\n", tqkv_result_string(r));
        return false;
    }
    attend_expanded(cached, same_rows);
    const double of_path = difference(absorbed, same_rows), of_folding = difference(folded, same_rows);
    const double of_formats = difference(absorbed, exact);
    /* Codes are multiplied as integers, whose centroids are a little off those that decode gives. */
    const double same = latent == TQKV_F16 && rotary == TQKV_F16 ? 1e-5 : 0.01;
    const bool fine = of_path < same && of_folding < same && of_formats < bearable;
    printf("%-5s %-5s %9d %12.1e %12.1e %12.5f  %s\n", tqkv_format_name(latent), tqkv_format_name(rotary),
           (int)(tqkv_cache_bytes(cache) / TOKENS), of_path, of_folding, of_formats,
           fine ? "as expected" : "NOT as expected");
    tqkv_cache_destroy(cache);
    return fine;
}

int main(void)
{
    static double exact[HEADS * HEAD];
    make_layer();
    attend_expanded(&rows[0][0], exact);
    printf("%d tokens, %d heads. A row of bfloat16 takes %d bytes, keys and values of all heads %d.\n", TOKENS, HEADS,
           2 * QUERY, 2 * HEADS * (2 * HEAD + ROTARY));
    printf("Absorbed against expanded: on the same stored rows, so with the rotation in the weights, on the exact "
           "rows.\n");
    printf("%-5s %-5s %9s %12s %12s %12s\n", "c", "r", "bytes", "same rows", "folded", "exact rows");
    bool fine = try_formats(TQKV_F16, TQKV_F16, exact, 1e-3);
    fine = try_formats(TQKV_I8, TQKV_F16, exact, 0.02) && fine;
    fine = try_formats(TQKV_I8, TQKV_I8, exact, 0.02) && fine;
    fine = try_formats(TQKV_TQ6, TQKV_F16, exact, 0.06) && fine;
    fine = try_formats(TQKV_TQ4, TQKV_F16, exact, 0.2) && fine;
    fine = try_formats(TQKV_TQ4, TQKV_TQ4, exact, 0.2) && fine;
    return fine ? 0 : 1;
}

/* What the presets promise: their fields, any capacity, rows of models, warm-ups, prompts that sequences share. */
#include "captured_fixture.h"

#include "cache_fixture.h"

static void check_preset(NO_ROW)
{
    static const tqkv_format formats[3][2] = {{TQKV_I8, TQKV_TQ4}, {TQKV_TQ5, TQKV_TQ3}, {TQKV_TQ3, TQKV_TQ2}};
    for (int i = 0; i < 3; i++) {
        tqkv_cache_desc desc = tqkv_cache_preset((tqkv_preset)i), others = desc;
        CHECK(desc.key_format == formats[i][0] && desc.value_format == formats[i][1], "preset %d: other formats", i);
        CHECK(desc.calibrate == 512 && desc.exact_first == 4 && desc.exact_last == 128, "preset %d", i);
        others.key_format = others.value_format = TQKV_FORMAT_DEFAULT;
        others.calibrate = others.exact_first = others.exact_last = 0;
        const tqkv_cache_desc none = test_cache_desc(0, 0, 0, 0);
        CHECK(!memcmp(&others, &none, sizeof none), "preset %d sets another field", i);
    }
}

static tqkv_cache_desc preset_desc(int preset, int head_dim, int n_kv_heads, int n_heads, int capacity)
{
    tqkv_cache_desc desc = tqkv_cache_preset((tqkv_preset)preset);
    desc.head_dim = head_dim;
    desc.n_kv_heads = n_kv_heads;
    desc.n_heads = n_heads;
    desc.capacity = capacity;
    return desc;
}

/* A preset fits every cache that can learn: in one of fewer positions than it keeps as halves all are, and a copy that
   has grown keeps as many as the preset says. */
static void check_preset_fits(const void *parameters)
{
    enum { D = 64, Q = CACHE_HEADS * CACHE_GROUP, GROWN = 200 };
    const int capacity = *(const int *)parameters;
    tqkv_cache_desc desc = preset_desc(TQKV_SMALL, D, CACHE_HEADS, Q, capacity), halves = desc,
                    grown = test_cache_desc(0, 0, 0, GROWN);
    tqkv_cache *caches[2] = {NULL, NULL}, *copy = NULL;
    float *rows = test_rows(1, DATA_GAUSSIAN, GROWN * CACHE_HEADS, D), *q = test_rows(2, DATA_GAUSSIAN, Q, D),
          out[2][Q * D];
    halves.key_format = halves.value_format = TQKV_F16;
    for (int i = 0; i < 2; i++) {
        CHECK_RESULT(tqkv_cache_create(i ? &halves : &desc, &caches[i]), TQKV_OK);
        REQUIRE(caches[i], "no cache");
        for (int p = 0; p < capacity; p++) {
            const float *row = rows + p * CACHE_HEADS * D;
            CHECK_RESULT(tqkv_cache_append(caches[i], row, row, 1), TQKV_OK);
            CHECK_RESULT(tqkv_cache_attend(caches[i], q, 1, out[i]), TQKV_OK);
        }
    }
    double reference[Q * D];
    for (int i = 0; i < Q * D; i++) reference[i] = (double)out[1][i];
    const double error = reference_relative_error(out[0], reference, Q * D);
    CHECK(error < 1e-3, "error %.3g of halves", error);
    grown.exact_last = desc.exact_last;
    CHECK_RESULT(tqkv_cache_fork(caches[0], &grown, &copy), TQKV_OK);
    REQUIRE(copy, "no copy");
    CHECK_RESULT(tqkv_cache_append(copy, rows, rows, GROWN - capacity), TQKV_OK);
    CHECK(test_view(copy, 1).last.n == 128, "%d newest positions", test_view(copy, 1).last.n);
    tqkv_cache_destroy(copy);
    for (int i = 0; i < 2; i++) tqkv_cache_destroy(caches[i]);
    free(rows);
    free(q);
}

/* ---- A text behind one token, again and again ---- */

enum { WARM_UP = 520 };

static int captured_outputs(const captured *layer) { return layer->n_queries * layer->n_heads * layer->head_dim; }

/* What the last queries get in a cache of a model's rows behind warm_up positions of its first row; forgets: these are
 * taken back before. Freed by the caller. */
static float *attend_warmed(const captured *layer, const tqkv_cache_desc *desc, int warm_up, bool forgets)
{
    tqkv_cache *cache = NULL;
    const int row = layer->n_kv_heads * layer->head_dim;
    float *out = (float *)test_alloc_filled((size_t)captured_outputs(layer) * sizeof *out, 0);
    CHECK_RESULT(tqkv_cache_create(desc, &cache), TQKV_OK);
    for (int t = 0; t < warm_up; t++) CHECK_RESULT(tqkv_cache_append(cache, layer->keys, layer->values, 1), TQKV_OK);
    if (forgets) CHECK_RESULT(tqkv_cache_truncate(cache, 0), TQKV_OK);
    for (int t = 0; t < layer->n_positions; t += 64)
        CHECK_RESULT(tqkv_cache_append(cache, layer->keys + t * row, layer->values + t * row, 64), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(cache, layer->queries, layer->n_queries, out), TQKV_OK);
    tqkv_cache_destroy(cache);
    return out;
}

static double squared_error(const float *a, const float *exact, int n)
{
    double sum = 0.0;
    for (int i = 0; i < n; i++) sum += pow((double)a[i] - (double)exact[i], 2.0);
    return sum;
}

/* Emptied, the cache is a new one, bit for bit. With the warm-up in front of the text it is no worse than its formats
 * that learn nothing; without it TQKV_SMALL is much nearer to the exact result of the first layer. */
static void check_warm_up(const void *parameters)
{
    const int *which = (const int *)parameters; /* preset, layer */
    captured layer;
    if (!captured_load(which[1], &layer)) return;
    const int n_out = captured_outputs(&layer);
    tqkv_cache_desc desc = preset_desc(which[0], layer.head_dim, layer.n_kv_heads, layer.n_heads, 8192), plain, exact;
    desc.calibrate = 128; /* of the 256 positions of the text */
    plain = desc;
    plain.calibrate = 0;
    exact = plain;
    exact.key_format = exact.value_format = TQKV_F16;
    float *out[4] = {attend_warmed(&layer, &desc, 0, false), attend_warmed(&layer, &desc, WARM_UP, true),
                     attend_warmed(&layer, &plain, 0, false), attend_warmed(&layer, &exact, 0, false)};
    float *warmed[3] = {attend_warmed(&layer, &desc, WARM_UP, false), attend_warmed(&layer, &plain, WARM_UP, false),
                        attend_warmed(&layer, &exact, WARM_UP, false)};
    CHECK(!memcmp(out[0], out[1], sizeof(float) * (size_t)n_out), "other bits after truncate(0)");
    double error = squared_error(warmed[0], warmed[2], n_out) / squared_error(warmed[1], warmed[2], n_out);
    CHECK(error <= 1.01, "%.3g times the error of the formats alone", error);
    error = squared_error(out[0], out[3], n_out) / squared_error(out[2], out[3], n_out);
    CHECK(which[0] != TQKV_SMALL || which[1] || error < 0.1, "%.3g times the error without learning", error);
    for (int i = 0; i < 7; i++) free(i < 4 ? out[i] : warmed[i - 4]);
    captured_free(&layer);
}

/* ---- One key, again and again ---- */

/* n keys of a model, with channels of deviations 0.3 to 3 and a few large constant ones, turned by a rotary embedding
 * of base theta from position `first` on; one: the same key before it is turned */
static float *model_keys(int n, int first, bool one, double theta)
{
    enum { D = 128, HALF = D / 2 };
    float *keys = test_rows(one ? 7 : 8, DATA_GAUSSIAN, n, D), *sizes = test_rows(9, DATA_GAUSSIAN, 1, D);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < D; i++)
            keys[t * D + i] = one && t ? keys[i]
                                       : keys[t * D + i] * (float)exp(0.6 * (double)sizes[i]) +
                                             (i * 37 % D < 6 ? 8.0f * (float)(i % 2 * 2 - 1) : 0.0f);
    for (int t = n - 1; t >= 0; t--) /* row 0 last: the others are its copies */
        for (int i = 0; i < HALF && theta > 0.0; i++) {
            const double angle = (first + t) * pow(theta, -(double)i / (double)HALF), a = keys[t * D + i],
                         b = keys[t * D + i + HALF];
            keys[t * D + i] = (float)(a * cos(angle) - b * sin(angle));
            keys[t * D + i + HALF] = (float)(a * sin(angle) + b * cos(angle));
        }
    free(sizes);
    return keys;
}

/* What a preset learns from one key adds at most twice as much noise to the scores of other keys as its format alone.
   */
static void check_repeated_key(const void *parameters)
{
    enum { D = 128, N = 512, M = 600 };
    static const double thetas[] = {0.0, 1e4, 1e6};
    const int *which = (const int *)parameters; /* preset, theta */
    float *once = model_keys(N, 0, true, thetas[which[1]]), *keys = model_keys(M, N, false, thetas[which[1]]);
    float *values = test_rows(1, DATA_GAUSSIAN, 1, D), *q = model_keys(64, N + M, false, thetas[which[1]]);
    double noise[2] = {0.0, 0.0};
    tqkv_cache_desc desc = preset_desc(which[0], D, 1, 1, 8192);
    tqkv_cache *cache = NULL;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    for (int t = 0; t < N; t++) CHECK_RESULT(tqkv_cache_append(cache, once + t * D, values, 1), TQKV_OK);
    tqkv_store learned = *test_keys(cache), plain = test_store(desc.key_format, D, 1, 1, false);
    CHECK(learned.channel_scale, "nothing was learned");
    CHECK_RESULT(tqkv_logit_noise(&plain, keys, M, q, 1, 64, &noise[0]), TQKV_OK);
    CHECK_RESULT(tqkv_logit_noise(&learned, keys, M, q, 1, 64, &noise[1]), TQKV_OK);
    CHECK(noise[1] <= 2.0 * noise[0], "%.3g times the noise of the format alone", noise[1] / noise[0]);
    tqkv_cache_destroy(cache);
    test_store_free(&plain);
    float *const memory[] = {once, keys, values, q};
    for (int i = 0; i < 4; i++) free(memory[i]);
}

/* ---- A prompt that sequences share ---- */

typedef struct shared_row {
    int preset, prompt, own; /* presets learn from 512 positions: each of the two has come so far, or has not */
} shared_row;

/* Whether slices of two caches by a preset merge: n rows of k, v, of which the first are the prompt's. */
static void merge_caches(tqkv_cache *const caches[2], const float *q, bool own_first, float *out)
{
    enum { D = 64, H = 4 };
    float sums[2][H * (D + 2)];
    tqkv_attention a[2];
    for (int i = 0; i < 2; i++) {
        a[i] = test_view(caches[i], 1);
        a[i].non_causal = true;
        CHECK_RESULT(tqkv_attend_partial(&a[i], q, a[i].end - a[i].kv_len, a[i].kv_len, sums[i], sums[i] + H * D,
                                         sums[i] + H * (D + 1)),
                     TQKV_OK);
    }
    const int to = own_first, from = !own_first;
    CHECK_RESULT(tqkv_attend_merge(&a[to], sums[to], sums[to] + H * D, sums[to] + H * (D + 1), &a[from], sums[from],
                                   sums[from] + H * D, sums[from] + H * (D + 1)),
                 TQKV_OK);
    CHECK_RESULT(tqkv_attend_finish(&a[to], sums[to], sums[to] + H * D, sums[to] + H * (D + 1)), TQKV_OK);
    memcpy(out, sums[to], sizeof(float) * H * D);
}

/* A prompt and a part of a sequence's own, in caches that have learned or have not, give what all positions give in
   double precision: the error is that of the formats. */
static void check_shared_prompt(const void *parameters)
{
    enum { D = 64, KV = 2, H = 4 };
    const shared_row *row = (const shared_row *)parameters;
    static const double limits[3] = {0.02, 0.05, 0.2}; /* squared; of sums in two bases it is 0.4 to 1.6 */
    const int n = row->prompt + row->own, counts[2] = {row->prompt, row->own};
    float *k = test_rows(1, DATA_GAUSSIAN, n * KV, D), *v = test_rows(2, DATA_GAUSSIAN, n * KV, D),
          *q = test_rows(3, DATA_GAUSSIAN, H, D), out[H * D];
    tqkv_store halves[2] = {test_store(TQKV_F16, D, KV, n, false), test_store(TQKV_F16, D, KV, n, false)};
    double expected[H * D];
    tqkv_cache *caches[2] = {NULL, NULL};
    const tqkv_cache_desc desc = preset_desc(row->preset, D, KV, H, 4096);
    for (int i = 0, at = 0; i < 2; at += counts[i++]) {
        CHECK_RESULT(tqkv_cache_create(&desc, &caches[i]), TQKV_OK);
        CHECK_RESULT(tqkv_cache_append(caches[i], k + at * KV * D, v + at * KV * D, counts[i]), TQKV_OK);
        CHECK_RESULT(tqkv_encode(&halves[i], i ? v : k, n, 0), TQKV_OK);
    }
    const tqkv_attention all = test_attention(&halves[0], &halves[1], H, 1, n);
    reference_attend(&all, q, expected);
    for (int own_first = 0; own_first < 2; own_first++) {
        merge_caches(caches, q, own_first, out);
        const double error = pow(reference_relative_error(out, expected, H * D), 2.0);
        CHECK(error < limits[row->preset], "own first %d: squared error %.3g", own_first, error);
    }
    for (int i = 0; i < 2; i++) {
        tqkv_cache_destroy(caches[i]);
        test_store_free(&halves[i]);
    }
    free(k);
    free(v);
    free(q);
}

static void add_shared_prompts(void)
{
    static const int lengths[5][2] = {{700, 600}, {700, 150}, {150, 100}, {150, 700}, {512, 511}};
    for (int preset = 0; preset < 3; preset++)
        for (int i = 0; i < 5; i++) {
            const shared_row row = {preset, lengths[i][0], lengths[i][1]};
            test_add(check_shared_prompt, &row, sizeof row, "presets/shared_prompt/preset%d/%d/%d", preset, row.prompt,
                     row.own);
        }
}

void test_presets_cases(void)
{
    test_add(check_preset, NULL, 0, "presets/fields");
    for (int i = 0; i < 5; i++) {
        const int capacities[] = {16, 20, 64, 100, 131};
        test_add(check_preset_fits, &capacities[i], sizeof(int), "presets/capacity%d", capacities[i]);
    }
    for (int i = 0; i < 3 * CAPTURED_LAYERS; i++) {
        const int which[2] = {i / CAPTURED_LAYERS, i % CAPTURED_LAYERS};
        test_add(check_warm_up, which, sizeof which, "presets/warm_up/preset%d/layer%d", which[0], which[1]);
    }
    for (int i = 0; i < 9; i++) {
        const int which[2] = {i / 3, i % 3};
        test_add(check_repeated_key, which, sizeof which, "presets/repeated_key/preset%d/theta%d", which[0], which[1]);
    }
    add_shared_prompts();
}

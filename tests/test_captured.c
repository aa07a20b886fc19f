/* Keys, values and queries of pretrained models, with their outliers, biases and attention sinks. */
#include "attend_fixture.h"
#include "captured_fixture.h"

enum { CAPTURED_QUERIES = 16, CAPTURED_END = 2048 };

/* ---- Codec error ---- */

typedef struct captured_row {
    int layer;
    tqkv_format keys, values;
    bool unrotated;
} captured_row;

/* Mean over rows of |x - x'|^2 / |x|^2. rows: [n_positions][n_kv_heads][head_dim] */
static double captured_error(const captured *layer, tqkv_format format, bool unrotated, const float *rows)
{
    tqkv_store store = test_store(format, layer->head_dim, layer->n_kv_heads, layer->n_positions, false);
    store.rotation = unrotated ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    int n_rows = layer->n_positions * layer->n_kv_heads, d = layer->head_dim;
    float *decoded = (float *)test_alloc(sizeof(float) * (size_t)(n_rows * d));
    CHECK_RESULT(tqkv_encode(&store, rows, layer->n_positions, 0), TQKV_OK);
    CHECK_RESULT(tqkv_decode(&store, 0, layer->n_positions, TQKV_ORIGINAL, decoded), TQKV_OK);
    double total = 0.0;
    for (int r = 0; r < n_rows; r++) {
        double expected[REFERENCE_MAX_DIM];
        for (int j = 0; j < d; j++) expected[j] = (double)rows[r * d + j];
        double error = reference_relative_error(decoded + r * d, expected, (size_t)d);
        total += error * error;
    }
    free(decoded);
    test_store_free(&store);
    return total / n_rows;
}

/* Centre and scale of a layer's keys: [2][n_kv_heads][head_dim]. Freed by the caller. */
static float *captured_channels(const captured *layer)
{
    const int n = layer->n_kv_heads * layer->head_dim;
    float *channels = (float *)test_alloc(2 * sizeof(float) * (size_t)n);
    tqkv_store shape = test_store(TQKV_F16, layer->head_dim, layer->n_kv_heads, 1, false);
    CHECK_RESULT(
        tqkv_calibrate(&shape, layer->keys, layer->n_positions, NULL, 0, 0, TQKV_PAIRS_NONE, channels, channels + n),
        TQKV_OK);
    test_store_free(&shape);
    return channels;
}

/* Rotated rows of a model are close to Gaussian: their errors are those of Gaussian rows. Keys are as their centre and
 * scale leave them. */
static void check_error(const void *parameters)
{
    const captured_row *row = (const captured_row *)parameters;
    captured layer;
    if (!captured_load(row->layer, &layer)) return;
    const int d = layer.head_dim, n = layer.n_kv_heads * d;
    float *channels = captured_channels(&layer),
          *gaussian = test_rows(1, DATA_GAUSSIAN, layer.n_positions * layer.n_kv_heads, d);
    for (int i = 0; i < layer.n_positions * n; i++)
        layer.keys[i] = (layer.keys[i] - channels[i % n]) / channels[n + i % n];
    const double wanted = captured_error(&layer, row->keys, false, gaussian);
    const double keys = captured_error(&layer, row->keys, false, layer.keys) / wanted;
    const double values = captured_error(&layer, row->values, false, layer.values) / wanted;
    CHECK(keys >= 0.85 && keys <= 1.15, "keys: %.3g times the error of Gaussian rows", keys);
    CHECK(values >= 0.85 && values <= 1.15, "values: %.3g times the error of Gaussian rows", values);
    free(gaussian);
    free(channels);
    captured_free(&layer);
}

/* The values of Qwen's first layer have heavy tails: TQ8 without the rotation must be much less accurate on them. */
static void check_unrotated(NO_ROW)
{
    captured layer;
    if (!captured_load(0, &layer)) return;
    double rotated = captured_error(&layer, TQKV_TQ8, false, layer.values);
    double unrotated = captured_error(&layer, TQKV_TQ8, true, layer.values);
    CHECK(unrotated > 5e-4 && unrotated > 10.0 * rotated, "relMSE %.3g unrotated, %.3g rotated", unrotated, rotated);
    captured_free(&layer);
}

/* ---- Attention with the layer's own window, softcap and queries ---- */

static void check_attend(const void *parameters)
{
    const captured_row *row = (const captured_row *)parameters;
    captured layer;
    if (!captured_load(row->layer, &layer)) return;
    tqkv_store keys = test_store(row->keys, layer.head_dim, layer.n_kv_heads, layer.n_positions, true);
    tqkv_store values = test_store(row->values, layer.head_dim, layer.n_kv_heads, layer.n_positions, true);
    float *channels = captured_channels(&layer);
    values.rotation = row->unrotated ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    keys.center = channels;
    keys.channel_scale = channels + layer.n_kv_heads * layer.head_dim;
    int64_t first = CAPTURED_END - layer.n_positions;
    CHECK_RESULT(tqkv_encode(&keys, layer.keys, layer.n_positions, first), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&values, layer.values, layer.n_positions, first), TQKV_OK);
    tqkv_attention a = test_attention(&keys, &values, layer.n_heads, CAPTURED_QUERIES, CAPTURED_END);
    a.window = layer.window;
    a.softcap = layer.softcap;
    size_t per_query = (size_t)(layer.n_heads * layer.head_dim), count = CAPTURED_QUERIES * per_query;
    const float *q = layer.queries + (size_t)(layer.n_queries - CAPTURED_QUERIES) * per_query;
    float *out = (float *)test_alloc_filled(count * sizeof(float), 0xff);
    double *expected = (double *)test_alloc(count * sizeof(double));
    CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
    reference_attend(&a, q, expected);
    for (size_t i = 0; i < count; i += (size_t)layer.head_dim) {
        double error = reference_relative_error(out + i, expected + i, (size_t)layer.head_dim);
        CHECK(error <= reference_attention_tolerance(&a, 1.0), "row %d: relative error %.3g",
              (int)(i / (size_t)layer.head_dim), error);
    }
    free(out);
    free(expected);
    free(channels);
    test_store_free(&keys);
    test_store_free(&values);
    captured_free(&layer);
}

void test_captured_cases(void)
{
    static const tqkv_format errors[6] = {TQKV_TQ3, TQKV_TQ4, TQKV_TQ5, TQKV_TQ6, TQKV_TQ8, TQKV_I8};
    static const captured_row pairs[4] = {{0, TQKV_I8, TQKV_TQ4, false},
                                          {0, TQKV_TQ6, TQKV_TQ5, false},
                                          {0, TQKV_F16, TQKV_TQ8, true},
                                          {0, TQKV_TQ4, TQKV_F16, false}};
    for (int layer = 0; layer < CAPTURED_LAYERS; layer++) {
        for (int i = 0; i < 6; i++) {
            const captured_row row = {layer, errors[i], errors[i], false};
            test_add(check_error, &row, sizeof row, "captured/error/%d/%s", layer, tqkv_format_name(row.keys));
        }
        for (int i = 0; i < 4; i++) {
            captured_row row = pairs[i];
            row.layer = layer;
            test_add(check_attend, &row, sizeof row, "captured/attend/%d/%s-%s", layer, tqkv_format_name(row.keys),
                     tqkv_format_name(row.values));
        }
    }
    test_add(check_unrotated, NULL, 0, "captured/unrotated");
}

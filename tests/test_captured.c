/* Keys, values and queries of a trained model (examples/data), with its outliers, attention sinks and scales. */
#include "attend_fixture.h"
#include "examples/data_file.h"

enum { CAPTURED_LAYERS = 4, CAPTURED_QUERIES = 16, CAPTURED_END = 2048 };

typedef struct captured {
    int head_dim, n_heads, n_kv_heads, window, n_positions, n_queries;
    float softcap;
    float *keys, *values, *queries; /* [n_positions][n_kv_heads][head_dim] twice, [n_queries][n_heads][head_dim] */
} captured;

static void read_layer(data_file *file, captured *layer)
{
    layer->keys = data_file_halves(file, layer->n_positions, layer->n_kv_heads * layer->head_dim);
    layer->values = data_file_halves(file, layer->n_positions, layer->n_kv_heads * layer->head_dim);
    layer->queries = data_file_halves(file, layer->n_queries, layer->n_heads * layer->head_dim);
}

static void read_shapes(data_file *file, captured layers[CAPTURED_LAYERS])
{
    data_file_magic(file, "TQKVREAL");
    data_file_count(file, CAPTURED_LAYERS, CAPTURED_LAYERS);
    int n_positions = data_file_count(file, 1, 1 << 16), n_queries = data_file_count(file, 1, 1 << 16);
    data_file_size(file);
    for (int i = 0; i < CAPTURED_LAYERS; i++) {
        captured *layer = &layers[i];
        layer->head_dim = data_file_count(file, 32, 1024);
        layer->n_heads = data_file_count(file, 1, 64);
        layer->n_kv_heads = data_file_count(file, 1, 64);
        layer->window = data_file_count(file, 0, 1 << 16);
        layer->softcap = data_file_f32(file);
        layer->n_positions = n_positions;
        layer->n_queries = n_queries;
    }
}

static void captured_free(captured *layer)
{
    free(layer->keys);
    free(layer->values);
    free(layer->queries);
}

/* One layer of the file. False, and a failed case, where the file is not as examples/data/README.md says. */
static bool captured_load(int index, captured *layer)
{
    data_file file;
    captured layers[CAPTURED_LAYERS];
    memset(layers, 0, sizeof layers);
    const bool opened = data_file_open(&file, "examples/data/real_kv.bin");
    CHECK(opened, "examples/data/real_kv.bin cannot be read");
    if (!opened) return false;
    read_shapes(&file, layers);
    for (int i = 0; i <= index && !file.failed; i++) {
        read_layer(&file, &layers[i]);
        if (i < index || file.failed) captured_free(&layers[i]);
    }
    free(file.bytes);
    *layer = layers[index];
    CHECK(!file.failed, "examples/data/real_kv.bin is damaged");
    return !file.failed;
}

/* ---- Codec error ---- */

typedef struct captured_row {
    int layer;
    tqkv_format keys, values;
    bool unrotated;
    double low, high; /* bounds of the relMSE of keys and of values */
} captured_row;

/* Mean over rows of |x - x'|^2 / |x|^2. rows: [n_positions][n_kv_heads][head_dim] */
static double captured_error(const captured *layer, tqkv_format format, bool unrotated, const float *rows)
{
    tqkv_store store = test_store(format, layer->head_dim, layer->n_kv_heads, layer->n_positions, false);
    store.unrotated = unrotated;
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

static void check_error(const void *parameters)
{
    const captured_row *row = (const captured_row *)parameters;
    captured layer;
    if (!captured_load(row->layer, &layer)) return;
    double keys = captured_error(&layer, row->keys, false, layer.keys);
    double values = captured_error(&layer, row->values, false, layer.values);
    CHECK(keys >= row->low && keys <= row->high, "keys: relMSE %.3g, not in [%.3g, %.3g]", keys, row->low, row->high);
    CHECK(values >= row->low && values <= row->high, "values: relMSE %.3g, not in [%.3g, %.3g]", values, row->low,
          row->high);
    captured_free(&layer);
}

/* The values of layer 0 have heavy tails: TQ8 without the rotation must be much less accurate on them. */
static void check_unrotated(const void *parameters)
{
    (void)parameters;
    captured layer;
    if (!captured_load(0, &layer)) return;
    double rotated = captured_error(&layer, TQKV_TQ8, false, layer.values);
    double unrotated = captured_error(&layer, TQKV_TQ8, true, layer.values);
    CHECK(unrotated > 1e-3 && unrotated > 20.0 * rotated, "relMSE %.3g unrotated, %.3g rotated", unrotated, rotated);
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
    values.unrotated = row->unrotated;
    int64_t first = CAPTURED_END - layer.n_positions;
    CHECK_RESULT(tqkv_encode(&keys, layer.keys, layer.n_positions, first), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&values, layer.values, layer.n_positions, first), TQKV_OK);
    tqkv_attention a;
    memset(&a, 0, sizeof a);
    a.keys = &keys;
    a.values = &values;
    a.n_heads = layer.n_heads;
    a.n_queries = CAPTURED_QUERIES;
    a.end = CAPTURED_END;
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
        CHECK(error <= ATTEND_TOLERANCE, "row %d: relative error %.3g", (int)(i / (size_t)layer.head_dim), error);
    }
    free(out);
    free(expected);
    test_store_free(&keys);
    test_store_free(&values);
    captured_free(&layer);
}

/* Rotated rows of a model are close to Gaussian: their errors lie within 12% of those of Gaussian rows. */
void test_captured_cases(void)
{
    static const captured_row errors[5] = {{0, TQKV_TQ4, TQKV_TQ4, false, 0.9 * 9.4e-3, 1.1 * 9.4e-3},
                                           {0, TQKV_TQ5, TQKV_TQ5, false, 0.9 * 2.47e-3, 1.1 * 2.47e-3},
                                           {0, TQKV_TQ6, TQKV_TQ6, false, 0.88 * 6.4e-4, 1.12 * 6.4e-4},
                                           {0, TQKV_TQ8, TQKV_TQ8, false, 0.9 * 6.27e-5, 1.1 * 6.27e-5},
                                           {0, TQKV_I8, TQKV_I8, false, 3.2e-5, 5e-5}};
    static const captured_row pairs[4] = {{0, TQKV_I8, TQKV_TQ4, false, 0.0, 0.0},
                                          {0, TQKV_TQ6, TQKV_TQ5, false, 0.0, 0.0},
                                          {0, TQKV_F16, TQKV_TQ8, true, 0.0, 0.0},
                                          {0, TQKV_TQ4, TQKV_F16, false, 0.0, 0.0}};
    for (int layer = 0; layer < CAPTURED_LAYERS; layer++) {
        for (int i = 0; i < 5; i++) {
            captured_row row = errors[i];
            row.layer = layer;
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

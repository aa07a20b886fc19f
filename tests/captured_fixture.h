/* Keys, values and queries of pretrained models: examples/data/pretrained_kv.bin. Layers: Qwen2.5-Coder-0.5B's 0 and 8,
 * the 0 of the same with 1.5B, SmolLM2-135M's 10. */
#ifndef TQKV_TESTS_CAPTURED_FIXTURE_H
#define TQKV_TESTS_CAPTURED_FIXTURE_H

#include "examples/data_file.h"
#include "runner.h"

enum { CAPTURED_LAYERS = 4 };

typedef struct captured {
    int head_dim, n_heads, n_kv_heads, window, n_positions, n_queries;
    float softcap;
    float *keys, *values, *queries; /* [n_positions][n_kv_heads][head_dim] twice, [n_queries][n_heads][head_dim] */
} captured;

static inline void captured_read(data_file *file, captured *layer)
{
    layer->keys = data_file_halves(file, layer->n_positions, layer->n_kv_heads * layer->head_dim);
    layer->values = data_file_halves(file, layer->n_positions, layer->n_kv_heads * layer->head_dim);
    layer->queries = data_file_halves(file, layer->n_queries, layer->n_heads * layer->head_dim);
}

static inline void captured_shapes(data_file *file, captured layers[CAPTURED_LAYERS])
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

static inline void captured_free(captured *layer)
{
    free(layer->keys);
    free(layer->values);
    free(layer->queries);
}

/* One layer of the file. False, and a failed case, where the file is not as examples/data/README.md says. */
static inline bool captured_load(int index, captured *layer)
{
    data_file file;
    captured layers[CAPTURED_LAYERS];
    memset(layers, 0, sizeof layers);
    const bool opened = data_file_open(&file, "examples/data/pretrained_kv.bin");
    CHECK(opened, "examples/data/pretrained_kv.bin cannot be read");
    if (!opened) return false;
    captured_shapes(&file, layers);
    for (int i = 0; i <= index && !file.failed; i++) {
        captured_read(&file, &layers[i]);
        if (i < index || file.failed) captured_free(&layers[i]);
    }
    free(file.bytes);
    *layer = layers[index];
    CHECK(!file.failed, "examples/data/pretrained_kv.bin is damaged");
    return !file.failed;
}

#endif

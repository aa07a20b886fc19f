/* Captured keys, values and queries of a model (data/README.md has the format), and what programs need that put them
 * into stores: a store, exact attention, the difference of two results. */
#ifndef CAPTURE_FILE_H
#define CAPTURE_FILE_H

#include "tqkv.h"
#include "data_file.h"

typedef struct captured_layer {
    int head_dim, n_heads, n_kv_heads, window;
    float softcap;
    float *keys, *values; /* [n_positions][n_kv_heads][head_dim] */
    float *queries;       /* [n_queries][n_heads][head_dim], at the newest positions */
} captured_layer;

typedef struct capture {
    int n_layers, n_positions, n_queries;
    captured_layer layers[8];
} capture;

static void stop(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void check(tqkv_result result, const char *what)
{
    if (result != TQKV_OK) stop(what, tqkv_result_string(result));
}

static void *allocate(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (!memory) stop("allocate", "out of memory");
    return memory;
}

static void load_layer(data_file *file, const capture *all, captured_layer *layer)
{
    int row = layer->n_kv_heads * layer->head_dim;
    layer->keys = data_file_halves(file, all->n_positions, row);
    layer->values = data_file_halves(file, all->n_positions, row);
    layer->queries = data_file_halves(file, all->n_queries, layer->n_heads * layer->head_dim);
}

static void capture_load(capture *all, const char *path)
{
    data_file file;
    memset(all, 0, sizeof *all);
    if (!data_file_open(&file, path)) stop(path, "cannot be read");
    data_file_magic(&file, "TQKVREAL");
    all->n_layers = data_file_count(&file, 1, 8);
    all->n_positions = data_file_count(&file, 1, 1 << 20);
    all->n_queries = data_file_count(&file, 1, (uint32_t)all->n_positions);
    data_file_size(&file);
    for (int i = 0; i < all->n_layers; i++) {
        captured_layer *layer = &all->layers[i];
        layer->head_dim = data_file_count(&file, 32, 1024);
        layer->n_heads = data_file_count(&file, 1, 256);
        layer->n_kv_heads = data_file_count(&file, 1, 256);
        layer->window = data_file_count(&file, 0, 1 << 20);
        layer->softcap = data_file_f32(&file);
        if (layer->n_heads % layer->n_kv_heads != 0) file.failed = true;
    }
    for (int i = 0; i < all->n_layers && !file.failed; i++) load_layer(&file, all, &all->layers[i]);
    if (file.failed || file.at != file.size) stop(path, "is damaged or has another version");
    free(file.bytes);
}

static void capture_free(capture *all)
{
    for (int i = 0; i < all->n_layers; i++) {
        free(all->layers[i].keys);
        free(all->layers[i].values);
        free(all->layers[i].queries);
    }
}

/* An empty linear store of the layer's shape. */
static tqkv_store make_store(const captured_layer *layer, int capacity, tqkv_format format, bool unrotated)
{
    tqkv_store store = {.format = format, .head_dim = layer->head_dim, .n_kv_heads = layer->n_kv_heads};
    store.capacity = capacity;
    store.rotation = unrotated ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    store.codes_size = tqkv_codes_size(&store);
    store.norms_size = tqkv_norms_size(&store);
    if (store.codes_size == 0) stop("store", "no such combination of format and head_dim");
    store.codes = allocate(store.codes_size, 1);
    store.norms = store.norms_size ? (float *)allocate(store.norms_size, 1) : NULL;
    return store;
}

static void free_store(tqkv_store *store)
{
    free(store->codes);
    free(store->norms);
}

/* Centre and scale of keys, to be freed: [2][n_kv_heads][head_dim]. rows: [n][n_kv_heads][head_dim] */
static inline float *calibrated(const captured_layer *layer, const float *rows, int n, tqkv_pairs pairs)
{
    const size_t size = (size_t)(layer->n_kv_heads * layer->head_dim);
    float *channels = (float *)allocate(2 * size, sizeof *channels);
    tqkv_store shape = {.format = TQKV_F16, .head_dim = layer->head_dim, .n_kv_heads = layer->n_kv_heads};
    shape.capacity = 1;
    check(tqkv_calibrate(&shape, rows, n, NULL, 0, 0, pairs, channels, channels + size), "calibrate");
    return channels;
}

static double relative_error(const float *exact, const float *got, int n_rows, int size)
{
    double mean = 0;
    for (int row = 0; row < n_rows; row++) {
        double wrong = 0, all = 0;
        for (int i = row * size; i < (row + 1) * size; i++) {
            wrong += ((double)got[i] - exact[i]) * ((double)got[i] - exact[i]);
            all += (double)exact[i] * exact[i];
        }
        mean += all > 0 ? wrong / all / n_rows : 0;
    }
    return mean;
}

/* Attention of one query of one head over the original floats, in double. */
static void exact_head(const capture *all, const captured_layer *layer, int query, int head, float *out)
{
    int d = layer->head_dim, row = layer->n_kv_heads * d, end = all->n_positions - all->n_queries + query + 1;
    int begin = layer->window > 0 && end > layer->window ? end - layer->window : 0;
    int offset = head / (layer->n_heads / layer->n_kv_heads) * d;
    const float *q = layer->queries + (query * layer->n_heads + head) * d;
    double sum = 0, output[TQKV_MAX_HEAD_DIM] = {0}, *scores = (double *)allocate((size_t)end, sizeof(double)),
           top = -1e300;
    for (int j = begin; j < end; j++) {
        double score = 0;
        for (int i = 0; i < d; i++) score += (double)q[i] * layer->keys[j * row + offset + i];
        score /= sqrt(d);
        scores[j] = layer->softcap > 0 ? layer->softcap * tanh(score / layer->softcap) : score;
        top = scores[j] > top ? scores[j] : top;
    }
    for (int j = begin; j < end; j++) {
        double weight = exp(scores[j] - top);
        for (int i = 0; i < d; i++) output[i] += weight * layer->values[j * row + offset + i];
        sum += weight;
    }
    for (int i = 0; i < d; i++) out[i] = (float)(output[i] / sum);
    free(scores);
}

/* The exact output, to be freed: [n_queries][n_heads][head_dim] */
static float *exact_attention(const capture *all, const captured_layer *layer)
{
    int d = layer->head_dim;
    float *out = (float *)allocate((size_t)(all->n_queries * layer->n_heads * d), sizeof *out);
    for (int query = 0; query < all->n_queries; query++)
        for (int head = 0; head < layer->n_heads; head++)
            exact_head(all, layer, query, head, out + (query * layer->n_heads + head) * d);
    return out;
}

/* Attention of the captured queries over two stores and the keys' tail, or NULL; out as above, in the values' head_dim.
 * */
static void stored_attention(const capture *all, const captured_layer *layer, const tqkv_store *keys,
                             const tqkv_store *values, const tqkv_store *tail, float *out)
{
    tqkv_attention attention = {.keys = keys, .values = values, .tail = tail, .n_heads = layer->n_heads};
    attention.n_queries = all->n_queries;
    attention.end = all->n_positions;
    attention.window = layer->window;
    attention.softcap = layer->softcap;
    check(tqkv_attend(&attention, layer->queries, out), "attend");
}

#endif

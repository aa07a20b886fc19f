/* The error of each pair of formats on keys, values and queries of a trained model (data/real_kv.bin), which are not
 * Gaussian. Shows how to use stores without a cache: encode, decode, probe, attend.
 *   real_kv [FILE]              a table for each layer
 *   real_kv --histogram [FILE]  probe values of layer 0's values, rotated and not, as columns for a chart
 * Errors are relMSE: the mean over rows of |x - x'|^2 / |x|^2. */
#define TQKV_IMPLEMENTATION
#include "../tqkv.h"
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

typedef struct format_pair {
    tqkv_format keys, values;
    bool unrotated; /* the values skip the rotation */
} format_pair;

static const format_pair pairs[] = {
    {TQKV_F16, TQKV_F16, false}, {TQKV_I8, TQKV_I8, false},  {TQKV_TQ8, TQKV_TQ8, false}, {TQKV_TQ6, TQKV_TQ6, false},
    {TQKV_TQ5, TQKV_TQ5, false}, {TQKV_I8, TQKV_TQ4, false}, {TQKV_TQ4, TQKV_TQ4, false}, {TQKV_F16, TQKV_TQ8, true},
};

static void stop(const char *what, const char *why)
{
    fprintf(stderr, "real_kv: %s: %s\n", what, why);
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

static void load(capture *all, const char *path)
{
    data_file file;
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

/* An empty linear store of the layer's shape. */
static tqkv_store make_store(const captured_layer *layer, int capacity, tqkv_format format, bool unrotated)
{
    tqkv_store store = {.format = format, .head_dim = layer->head_dim, .n_kv_heads = layer->n_kv_heads};
    store.capacity = capacity;
    store.unrotated = unrotated;
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

/* The relMSE of one stream. *beyond: the share of its probe values outside the last boundary of the format. */
static double stream_error(const tqkv_store *store, const float *source, double *beyond)
{
    int n_rows = store->capacity * store->n_kv_heads;
    size_t count = (size_t)n_rows * (size_t)store->head_dim, n_beyond = 0;
    float *scratch = (float *)allocate(count, sizeof *scratch), last = tqkv_last_boundary(store->format);
    check(tqkv_encode(store, source, store->capacity, 0), "encode");
    check(tqkv_probe(store, source, store->capacity, scratch), "probe");
    for (size_t i = 0; i < count; i++)
        n_beyond += fabsf(scratch[i]) > last * 1.000001f; /* the factor allows for rounding in I8 */
    *beyond = (double)n_beyond / (double)count;
    check(tqkv_decode(store, 0, store->capacity, TQKV_ORIGINAL, scratch), "decode");
    double error = relative_error(source, scratch, n_rows, store->head_dim);
    free(scratch);
    return error;
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

static void print_pair(const capture *all, const captured_layer *layer, const format_pair *pair, const float *exact)
{
    tqkv_store keys = make_store(layer, all->n_positions, pair->keys, false);
    tqkv_store values = make_store(layer, all->n_positions, pair->values, pair->unrotated);
    double beyond_keys, beyond_values;
    double key_error = stream_error(&keys, layer->keys, &beyond_keys);
    double value_error = stream_error(&values, layer->values, &beyond_values);

    int n_rows = all->n_queries * layer->n_heads;
    float *out = (float *)allocate((size_t)n_rows * (size_t)layer->head_dim, sizeof *out);
    tqkv_attention attention = {.keys = &keys, .values = &values, .n_heads = layer->n_heads};
    attention.n_queries = all->n_queries;
    attention.end = all->n_positions;
    attention.window = layer->window;
    attention.softcap = layer->softcap;
    check(tqkv_attend(&attention, layer->queries, out), "attend");
    double output_error = relative_error(exact, out, n_rows, layer->head_dim);

    double bytes = (double)(keys.codes_size + keys.norms_size + values.codes_size + values.norms_size);
    double n_values = 2.0 * all->n_positions * layer->n_kv_heads * layer->head_dim;
    printf("%-5s %-4s%-11s %6.2f %9.0f %6.1f%%  %9.2e  %9.2e  %9.2e  %8.4f%% %8.4f%%\n", tqkv_format_name(pair->keys),
           tqkv_format_name(pair->values), pair->unrotated ? " unrotated" : "", 8 * bytes / n_values, bytes,
           100 * bytes / (2 * n_values), key_error, value_error, output_error, 100 * beyond_keys, 100 * beyond_values);
    free(out);
    free_store(&keys);
    free_store(&values);
}

static void print_layer(const capture *all, int index)
{
    const captured_layer *layer = &all->layers[index];
    int d = layer->head_dim;
    float *exact = (float *)allocate((size_t)(all->n_queries * layer->n_heads * d), sizeof *exact);
    for (int query = 0; query < all->n_queries; query++)
        for (int head = 0; head < layer->n_heads; head++)
            exact_head(all, layer, query, head, exact + (query * layer->n_heads + head) * d);
    printf("\nlayer %d: head_dim %d, %d query heads, %d KV heads, window %d, softcap %g; %d positions, %d queries\n",
           index, d, layer->n_heads, layer->n_kv_heads, layer->window, (double)layer->softcap, all->n_positions,
           all->n_queries);
    printf("%-20s %7s %9s %7s  %9s  %9s  %9s  %19s\n", "keys  values", "bits/v", "bytes", "of F16", "K error",
           "V error", "output", "beyond: K         V");
    for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++) print_pair(all, layer, &pairs[p], exact);
    free(exact);
}

/* The sixteen centroids of TQ4, decoded by the public functions from a row whose norm makes the scale 1. */
static void print_codebook(void)
{
    unsigned char codes[16];
    float norm = sqrtf(32.0f), centroids[32];
    tqkv_store store = {.format = TQKV_TQ4, .head_dim = 32, .n_kv_heads = 1, .capacity = 1, .codes = codes};
    store.codes_size = sizeof codes;
    store.norms = &norm;
    store.norms_size = sizeof norm;
    for (int i = 0; i < 16; i++) codes[i] = (unsigned char)(i | i << 4);
    check(tqkv_decode(&store, 0, 1, TQKV_ROTATED, centroids), "decode");
    for (int i = 0; i < 32; i += 2) printf("%g\n", (double)centroids[i]);
}

/* Three blocks of lines with two empty lines between them: the density of the probe values of layer 0 in bins of 0.2
 * (columns: middle, rotated, unrotated), the centroids of TQ4, the last boundary of TQ8. */
static void print_histogram(const capture *all)
{
    enum { BINS = 100, MIDDLE = BINS / 2 }; /* from -10 to 10; values outside go to the first or last bin */
    const captured_layer *layer = &all->layers[0];
    size_t counts[2][BINS] = {{0}}, total = (size_t)(all->n_positions * layer->n_kv_heads * layer->head_dim);
    float *scaled = (float *)allocate(total, sizeof *scaled);
    for (int unrotated = 0; unrotated < 2; unrotated++) {
        tqkv_store store = make_store(layer, all->n_positions, TQKV_TQ8, unrotated != 0);
        check(tqkv_probe(&store, layer->values, all->n_positions, scaled), "probe");
        for (size_t i = 0; i < total; i++) {
            float place = floorf(scaled[i] * 5.0f) + (float)MIDDLE;
            counts[unrotated][place < 0 ? 0 : place >= BINS ? BINS - 1 : (int)place]++;
        }
        free_store(&store);
    }
    for (int bin = 0; bin < BINS; bin++)
        printf("%.2f %g %g\n", ((double)bin - (double)MIDDLE + 0.5) / 5.0, 5.0 * (double)counts[0][bin] / (double)total,
               5.0 * (double)counts[1][bin] / (double)total);
    puts("\n");
    print_codebook();
    printf("\n\n%g\n", (double)tqkv_last_boundary(TQKV_TQ8));
    free(scaled);
}

int main(int argc, char **argv)
{
    bool histogram = argc > 1 && strcmp(argv[1], "--histogram") == 0;
    capture all = {0};
    load(&all, argc > 1 + histogram ? argv[1 + histogram] : "examples/data/real_kv.bin");
    if (histogram)
        print_histogram(&all);
    else
        for (int i = 0; i < all.n_layers; i++) print_layer(&all, i);
    for (int i = 0; i < all.n_layers; i++) {
        free(all.layers[i].keys);
        free(all.layers[i].values);
        free(all.layers[i].queries);
    }
    return 0;
}

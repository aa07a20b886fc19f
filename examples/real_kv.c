/* The error of each pair of formats on keys, values and queries of pretrained models (data/pretrained_kv.bin), which
 * are not Gaussian. Shows how to use stores without a cache: calibrate, encode, decode, probe, attend. Keys have the
 * centre and the scale of tqkv_calibrate; a last row shows what TQ4 is without them.
 *   real_kv [FILE]              a table for each layer
 *   real_kv --histogram [FILE]  probe values of layer 0's values, rotated and not, as columns for a chart
 * Errors are relMSE: the mean over rows of |x - x'|^2 / |x|^2. */
#include "tqkv.h"
#include "capture_file.h"

typedef struct format_pair {
    tqkv_format keys, values;
    bool unrotated; /* the values skip the rotation */
    bool plain;     /* keys without centre and scale */
} format_pair;

static const format_pair pairs[] = {
    {TQKV_F16, TQKV_F16, false, false}, {TQKV_I8, TQKV_I8, false, false},   {TQKV_TQ8, TQKV_TQ8, false, false},
    {TQKV_TQ6, TQKV_TQ6, false, false}, {TQKV_TQ5, TQKV_TQ5, false, false}, {TQKV_I8, TQKV_TQ4, false, false},
    {TQKV_TQ4, TQKV_TQ4, false, false}, {TQKV_TQ3, TQKV_TQ3, false, false}, {TQKV_TQ2, TQKV_TQ2, false, false},
    {TQKV_F16, TQKV_TQ8, true, false},  {TQKV_TQ4, TQKV_TQ4, false, true},
};

/* The relMSE of one stream. *beyond: the share of its values outside the last boundary of the format. */
static double stream_error(const tqkv_store *store, const float *source, double *beyond)
{
    int n_rows = store->capacity * store->n_kv_heads;
    float *scratch = (float *)allocate((size_t)n_rows * (size_t)store->head_dim, sizeof *scratch);
    tqkv_quality *heads = (tqkv_quality *)allocate((size_t)store->n_kv_heads, sizeof *heads);
    check(tqkv_encode(store, source, store->capacity, 0), "encode");
    check(tqkv_measure(store, source, store->capacity, heads), "measure");
    *beyond = 0.0;
    for (int h = 0; h < store->n_kv_heads; h++) *beyond += heads[h].beyond / store->n_kv_heads;
    free(heads);
    check(tqkv_decode(store, 0, store->capacity, TQKV_ORIGINAL, scratch), "decode");
    double error = relative_error(source, scratch, n_rows, store->head_dim);
    free(scratch);
    return error;
}

/* channels: centre and scale of the keys, [2][n_kv_heads][head_dim] */
static void print_pair(const capture *all, const captured_layer *layer, const format_pair *pair, const float *channels,
                       const float *exact)
{
    tqkv_store keys = make_store(layer, all->n_positions, pair->keys, false);
    tqkv_store values = make_store(layer, all->n_positions, pair->values, pair->unrotated);
    keys.center = pair->plain ? NULL : channels;
    keys.channel_scale = pair->plain ? NULL : channels + layer->n_kv_heads * layer->head_dim;
    double beyond_keys, beyond_values;
    double key_error = stream_error(&keys, layer->keys, &beyond_keys);
    double value_error = stream_error(&values, layer->values, &beyond_values);

    int n_rows = all->n_queries * layer->n_heads;
    float *out = (float *)allocate((size_t)n_rows * (size_t)layer->head_dim, sizeof *out);
    stored_attention(all, layer, &keys, &values, NULL, out);
    double output_error = relative_error(exact, out, n_rows, layer->head_dim);

    double bytes = (double)(keys.codes_size + keys.norms_size + values.codes_size + values.norms_size);
    double n_values = 2.0 * all->n_positions * layer->n_kv_heads * layer->head_dim;
    printf("%-5s %-4s%-11s %6.2f %9.0f %6.1f%%  %9.2e  %9.2e  %9.2e  %8.4f%% %8.4f%%\n", tqkv_format_name(pair->keys),
           tqkv_format_name(pair->values),
           pair->unrotated ? " unrotated"
           : pair->plain   ? " plain"
                           : "",
           8 * bytes / n_values, bytes, 100 * bytes / (2 * n_values), key_error, value_error, output_error,
           100 * beyond_keys, 100 * beyond_values);
    free(out);
    free_store(&keys);
    free_store(&values);
}

static void print_layer(const capture *all, int index)
{
    const captured_layer *layer = &all->layers[index];
    float *exact = exact_attention(all, layer),
          *channels = calibrated(layer, layer->keys, all->n_positions, TQKV_PAIRS_NONE);
    printf("\nlayer %d: head_dim %d, %d query heads, %d KV heads, window %d, softcap %g; %d positions, %d queries\n",
           index, layer->head_dim, layer->n_heads, layer->n_kv_heads, layer->window, (double)layer->softcap,
           all->n_positions, all->n_queries);
    printf("%-20s %7s %9s %7s  %9s  %9s  %9s  %19s\n", "keys  values", "bits/v", "bytes", "of F16", "K error",
           "V error", "output", "beyond: K         V");
    for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++) print_pair(all, layer, &pairs[p], channels, exact);
    free(exact);
    free(channels);
}

/* Decodes a row of 32 codes by the public functions; its norm makes the scale 1. */
static void decode_codes(tqkv_format format, unsigned char *codes, size_t size, float *centroids)
{
    float norm = sqrtf(32.0f);
    tqkv_store store = {.format = format, .head_dim = 32, .n_kv_heads = 1, .capacity = 1, .codes = codes};
    store.codes_size = size;
    store.norms = &norm;
    store.norms_size = sizeof norm;
    check(tqkv_decode(&store, 0, 1, TQKV_ROTATED, centroids), "decode");
}

/* The sixteen centroids of TQ4, and the last boundary of TQ8, which is the middle of its last two centroids. */
static void print_codebooks(void)
{
    unsigned char codes[16], last[32];
    float centroids[32];
    for (int i = 0; i < 16; i++) codes[i] = (unsigned char)(i | i << 4);
    decode_codes(TQKV_TQ4, codes, sizeof codes, centroids);
    for (int i = 0; i < 32; i += 2) printf("%g\n", (double)centroids[i]);
    for (int i = 0; i < 32; i++) last[i] = (unsigned char)(254 + i % 2);
    decode_codes(TQKV_TQ8, last, sizeof last, centroids);
    printf("\n\n%g\n", 0.5 * ((double)centroids[0] + (double)centroids[1]));
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
    print_codebooks();
    free(scaled);
}

int main(int argc, char **argv)
{
    bool histogram = argc > 1 && strcmp(argv[1], "--histogram") == 0;
    capture all;
    capture_load(&all, argc > 1 + histogram ? argv[1 + histogram] : "examples/data/pretrained_kv.bin");
    if (histogram)
        print_histogram(&all);
    else
        for (int i = 0; i < all.n_layers; i++) print_layer(&all, i);
    capture_free(&all);
    return 0;
}

/* Which formats a model's keys and values bear, from a capture of them (data/README.md has the format).
 *   advise [--bits N] [--plant-bias LENGTHS] [--no-center] [--shared] [FILE]
 *   advise --chart [FILE]    the keys' errors by the length of a planted bias, as columns for a chart
 * --bits: the pair to suggest takes at most so many bits a value, keys and values averaged, norms included (5).
 * --plant-bias: adds to all keys of a head a constant vector of so many times their length, as a biased projection does.
 * --no-center: for engines that cannot set a centre.
 * --shared: the keys are the values, too, as in a latent cache: one format for both. The file's values are not looked at. */
#include "../tqkv.h"
#include "capture_file.h"

/* From most to fewest bits. TQ8 is not here: I8 takes the same room with less error. */
static const tqkv_format formats[] = {TQKV_F16, TQKV_I8, TQKV_TQ6, TQKV_TQ5, TQKV_TQ4, TQKV_TQ3, TQKV_TQ2};
enum { F16, I8, TQ6, TQ5, TQ4, TQ3, TQ2, N_FORMATS };

/* The largest error of a layer's output that one stream may cause. On the captured model, whose predictions four bits
 * change by 0.005 nats, TQ4 keys or values cause 0.001 to 0.016. */
static const double bearable = 0.03;

/* One format of one stream, without a centre and with one. */
typedef struct trial {
    double bits;                /* a value, norms included */
    double error[2], beyond[2]; /* of tqkv_measure, the worst head */
    double output[2];           /* error of the layer's output when only this stream is quantised */
    double both[2];             /* the same when it is keys and values at once; of --shared, in the keys' trials */
} trial;

typedef struct stream {
    const char *name;
    const float *rows;           /* [n_positions][n_kv_heads][head_dim] */
    float *center;               /* their mean: [n_kv_heads][head_dim] */
    double mean_share, kurtosis; /* the head with the largest */
    double later[2];             /* error of tq4 in the second half, without and with a centre made of the first */
    trial trials[N_FORMATS];
    bool use_center;
} stream;

typedef struct options {
    double bits, bias;
    bool no_center, chart, shared;
    const char *path;
} options;

/* ---- measuring ---- */

static tqkv_store filled_store(const capture *all, const captured_layer *layer, const stream *s, tqkv_format format,
                               bool centered)
{
    tqkv_store store = make_store(layer, all->n_positions, format, false);
    store.center = centered ? s->center : NULL;
    check(tqkv_encode(&store, s->rows, all->n_positions, 0), "encode");
    return store;
}

static void find_center(const capture *all, const captured_layer *layer, stream *s)
{
    tqkv_store shape = {
        .format = TQKV_F16, .head_dim = layer->head_dim, .n_kv_heads = layer->n_kv_heads, .capacity = 1};
    s->center = (float *)allocate((size_t)(layer->n_kv_heads * layer->head_dim), sizeof(float));
    check(tqkv_mean(&shape, s->rows, all->n_positions, s->center), "mean");
}

/* A centre is judged by rows that it was not made from: of few rows, the mean has as much noise as meaning. */
static void check_center(const capture *all, const captured_layer *layer, stream *s)
{
    const int half = all->n_positions / 2, row = layer->n_kv_heads * layer->head_dim;
    tqkv_store shape = {
        .format = TQKV_TQ4, .head_dim = layer->head_dim, .n_kv_heads = layer->n_kv_heads, .capacity = 1};
    float *center = (float *)allocate((size_t)row, sizeof *center);
    tqkv_quality *heads = (tqkv_quality *)allocate((size_t)layer->n_kv_heads, sizeof *heads);
    check(tqkv_mean(&shape, s->rows, half, center), "mean");
    for (int centered = 0; centered < 2; centered++) {
        shape.center = centered ? center : NULL;
        check(tqkv_measure(&shape, s->rows + (size_t)half * (size_t)row, all->n_positions - half, heads), "measure");
        for (int h = 0; h < layer->n_kv_heads; h++) s->later[centered] += heads[h].error / layer->n_kv_heads;
    }
    free(center);
    free(heads);
}

/* The worst head of tqkv_measure. */
static void measure_heads(const capture *all, const captured_layer *layer, const tqkv_store *store, stream *s, trial *t)
{
    int centered = store->center != NULL;
    tqkv_quality *heads = (tqkv_quality *)allocate((size_t)layer->n_kv_heads, sizeof *heads);
    check(tqkv_measure(store, s->rows, all->n_positions, heads), "measure");
    for (int h = 0; h < layer->n_kv_heads; h++) {
        s->mean_share = fmax(s->mean_share, heads[h].mean_share);
        if (!centered && store->format != TQKV_F16) s->kurtosis = fmax(s->kurtosis, heads[h].kurtosis);
        t->error[centered] = fmax(t->error[centered], heads[h].error);
        t->beyond[centered] = fmax(t->beyond[centered], heads[h].beyond);
    }
    free(heads);
}

/* Quantises the keys or the values, leaves the others in F16 around their centre, and compares with exact attention. */
static void try_format(const capture *all, const captured_layer *layer, stream *streams, bool keys, int format,
                       const float *exact)
{
    stream *s = &streams[!keys], *other = &streams[keys];
    trial *t = &s->trials[format];
    int n_rows = all->n_queries * layer->n_heads;
    float *out = (float *)allocate((size_t)(n_rows * layer->head_dim), sizeof *out);
    tqkv_store plain = filled_store(all, layer, other, TQKV_F16, true);
    for (int centered = 0; centered < 2; centered++) {
        tqkv_store store = filled_store(all, layer, s, formats[format], centered != 0);
        measure_heads(all, layer, &store, s, t);
        stored_attention(all, layer, keys ? &store : &plain, keys ? &plain : &store, out);
        t->output[centered] = relative_error(exact, out, n_rows, layer->head_dim);
        double n_values = (double)all->n_positions * layer->n_kv_heads * layer->head_dim;
        t->bits = 8 * (double)(store.codes_size + store.norms_size) / n_values;
        free_store(&store);
    }
    free_store(&plain);
    free(out);
}

/* One store as keys and values: the same noise in scores and sums. */
static void try_shared(const capture *all, const captured_layer *layer, stream *s, int format, const float *exact)
{
    const int n_rows = all->n_queries * layer->n_heads;
    float *out = (float *)allocate((size_t)(n_rows * layer->head_dim), sizeof *out);
    for (int centered = 0; centered < 2; centered++) {
        tqkv_store store = filled_store(all, layer, s, formats[format], centered != 0);
        stored_attention(all, layer, &store, &store, out);
        s->trials[format].both[centered] = relative_error(exact, out, n_rows, layer->head_dim);
        free_store(&store);
    }
    free(out);
}

static void measure_layer(const capture *all, const captured_layer *layer, bool shared, stream streams[2])
{
    memset(streams, 0, 2 * sizeof *streams);
    streams[0].name = "keys";
    streams[0].rows = layer->keys;
    streams[1].name = "values";
    streams[1].rows = layer->values;
    for (int i = 0; i < 2; i++) {
        find_center(all, layer, &streams[i]);
        check_center(all, layer, &streams[i]);
    }
    float *exact = exact_attention(all, layer);
    for (int f = 0; f < N_FORMATS; f++) {
        try_format(all, layer, streams, true, f, exact);
        try_format(all, layer, streams, false, f, exact);
        if (shared) try_shared(all, layer, &streams[0], f, exact);
    }
    free(exact);
}

/* ---- a planted bias ---- */

/* Uniform in [-1, 1). The same numbers in every run. */
static float random_number(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

/* Adds a vector of random direction to the keys of each head, `lengths` times as long as they are. */
static void plant_bias(const capture *all, const captured_layer *layer, double lengths)
{
    int d = layer->head_dim, row = layer->n_kv_heads * d;
    uint32_t state = 1;
    for (int head = 0; head < layer->n_kv_heads; head++) {
        float bias[TQKV_MAX_HEAD_DIM], *keys = layer->keys + head * d;
        double square = 0, own = 0;
        for (int p = 0; p < all->n_positions; p++)
            for (int i = 0; i < d; i++) square += (double)keys[p * row + i] * keys[p * row + i] / all->n_positions;
        for (int i = 0; i < d; i++) {
            bias[i] = random_number(&state);
            own += (double)bias[i] * bias[i];
        }
        for (int p = 0; p < all->n_positions; p++)
            for (int i = 0; i < d; i++) keys[p * row + i] += bias[i] * (float)(lengths * sqrt(square / own));
    }
}

/* ---- the advice ---- */

/* The error of the output at a format, with the centre where the advice is to use one. */
static double advised_output(const stream *s, int format) { return s->trials[format].output[s->use_center]; }

/* A centre is advised where four bits need it, and where it takes away more than half of their error, if it helps rows, too,
 * that it was not made from. */
static void decide_center(stream *s, const options *o)
{
    const trial *t = &s->trials[TQ4];
    bool helps = t->error[1]<0.5 * t->error[0], needed = t->output[0]> bearable && t->output[1] <= bearable;
    s->use_center = !o->no_center && (helps || needed) && s->later[1] < s->later[0];
}

static void print_verdict(const stream *s)
{
    const trial *t = &s->trials[TQ4];
    const char *with = s->use_center ? "with the centre " : "";
    double four = advised_output(s, TQ4), eight = advised_output(s, I8);
    printf("  verdict: ");
    if (four > bearable && eight > bearable)
        printf("keep F16: %seven i8 moves the output by %.2g, more than %g\n", with, eight, bearable);
    else if (four > bearable)
        printf("%s need I8: %stq4 moves the output by %.2g, more than %g; i8 by %.2g\n", s->name, with, four, bearable,
               eight);
    else if (s->use_center)
        printf("use a centre: %.1f%% of the squared length is constant; it takes tq4's error from %.2g to %.2g\n",
               100 * s->mean_share, t->error[0], t->error[1]);
    else
        printf("fine: tq4 moves the output by %.2g, at most %g is bearable\n", four, bearable);
}

/* The noise of a mean falls with the number of its rows: what is added to the error does, too. */
static void print_later(const stream *s, int n_positions)
{
    const double change = s->later[1] / s->later[0] - 1;
    printf("  a centre of the first %d positions takes tq4's error in the others from %.2g to %.2g", n_positions / 2,
           s->later[0], s->later[1]);
    if (change > 0)
        printf(": %.0f%% worse; it wants about %.0f positions to add 1%%", 100 * change,
               n_positions / 2 * change / 0.01);
    printf("\n");
}

static void print_stream(const stream *s, int n_positions)
{
    printf(" %s: %.1f%% of the squared length is constant, kurtosis %.2f\n", s->name, 100 * s->mean_share, s->kurtosis);
    printf("  %-6s %6s %10s %10s %10s %10s %9s\n", "format", "bits", "error", "centred", "output", "centred", "beyond");
    for (int f = 0; f < N_FORMATS; f++) {
        const trial *t = &s->trials[f];
        printf("  %-6s %6.2f %10.2e %10.2e %10.2e %10.2e %8.2f%%\n", tqkv_format_name(formats[f]), t->bits, t->error[0],
               t->error[1], t->output[0], t->output[1], 100 * t->beyond[0]);
    }
    print_later(s, n_positions);
    print_verdict(s);
}

/* What a pair costs over all layers: mean bits a value, and the mean error of the outputs. Errors of keys and values are
 * independent, so those of the output add up. */
static double pair_error(const capture *all, stream (*layers)[2], int keys, int values, double *bits)
{
    double error = 0, n_bits = 0, n_values = 0;
    for (int i = 0; i < all->n_layers; i++) {
        const captured_layer *layer = &all->layers[i];
        double weight = (double)layer->n_kv_heads * layer->head_dim;
        error += (advised_output(&layers[i][0], keys) + advised_output(&layers[i][1], values)) / all->n_layers;
        n_bits += weight * (layers[i][0].trials[keys].bits + layers[i][1].trials[values].bits) / 2;
        n_values += weight;
    }
    *bits = n_bits / n_values;
    return error;
}

/* The pair of least error whose keys have at least as many bits as its values: noise of one size in the output hurts the
 * predictions of tinylm more when it comes from the keys. */
static void suggest_pair(const capture *all, stream (*layers)[2], double budget)
{
    double least = INFINITY, bits, best_bits = 0;
    int keys = -1, values = -1;
    for (int k = 0; k < N_FORMATS; k++)
        for (int v = k; v < N_FORMATS; v++) {
            double error = pair_error(all, layers, k, v, &bits);
            if (bits > budget || error >= least) continue;
            least = error;
            best_bits = bits;
            keys = k;
            values = v;
        }
    if (keys < 0)
        printf("\nno pair takes %g bits a value or fewer\n", budget);
    else
        printf("\nfor %g bits a value: keys %s, values %s (%.2f bits, mean error of the outputs %.2g)\n", budget,
               tqkv_format_name(formats[keys]), tqkv_format_name(formats[values]), best_bits, least);
}

/* What one stream as keys and values does to the output, beside what it does as one of them. */
static void print_shared(const stream streams[2])
{
    const bool centered = streams[0].use_center;
    printf(" keys and values: one stream%s\n", centered ? ", with the centre" : "");
    printf("  %-6s %6s %10s %10s %10s\n", "format", "bits", "as keys", "as values", "as both");
    for (int f = 0; f < N_FORMATS; f++) {
        const trial *t = &streams[0].trials[f];
        printf("  %-6s %6.2f %10.2e %10.2e %10.2e\n", tqkv_format_name(formats[f]), t->bits, t->output[centered],
               streams[1].trials[f].output[centered], t->both[centered]);
    }
    int fewest = F16;
    for (int f = 0; f < N_FORMATS; f++)
        if (streams[0].trials[f].both[centered] <= bearable) fewest = f;
    printf("  verdict: %s moves the output by %.2g, at most %g is bearable\n", tqkv_format_name(formats[fewest]),
           streams[0].trials[fewest].both[centered], bearable);
}

/* The format of least error for a stream that is keys and values. */
static void suggest_shared(const capture *all, stream (*layers)[2], double budget)
{
    for (int f = 0; f < N_FORMATS; f++) { /* from most bits */
        double error = 0, bits = 0;
        for (int i = 0; i < all->n_layers; i++) {
            const trial *t = &layers[i][0].trials[f];
            error += t->both[layers[i][0].use_center] / all->n_layers;
            bits += t->bits / all->n_layers;
        }
        if (bits > budget) continue;
        printf("\nfor %g bits a value: %s (%.2f bits, mean error of the outputs %.2g)\n", budget,
               tqkv_format_name(formats[f]), bits, error);
        return;
    }
    printf("\nno format takes %g bits a value or fewer\n", budget);
}

static void advise(const capture *all, const options *o)
{
    stream(*layers)[2] = (stream(*)[2])allocate((size_t)all->n_layers, sizeof *layers);
    puts("error: tqkv_measure's, noise against what differs between positions. output: error of the layer's output "
         "when\n"
         "only this stream is quantised. centred: with the mean of the rows as the store's centre.");
    for (int i = 0; i < all->n_layers; i++) {
        const captured_layer *layer = &all->layers[i];
        if (o->bias > 0) plant_bias(all, layer, o->bias);
        if (o->shared)
            memcpy(layer->values, layer->keys,
                   (size_t)(all->n_positions * layer->n_kv_heads * layer->head_dim) * sizeof *layer->keys);
        measure_layer(all, layer, o->shared, layers[i]);
        printf("\nlayer %d: head_dim %d, %d KV heads\n", i, layer->head_dim, layer->n_kv_heads);
        for (int k = 0; k < 2; k++) {
            decide_center(&layers[i][k], o);
            if (!k || !o->shared) print_stream(&layers[i][k], all->n_positions);
        }
        if (o->shared) print_shared(layers[i]);
    }
    if (o->shared)
        suggest_shared(all, layers, o->bits);
    else
        suggest_pair(all, layers, o->bits);
    for (int i = 0; i < all->n_layers; i++)
        for (int k = 0; k < 2; k++) free(layers[i][k].center);
    free(layers);
}

/* ---- the chart ---- */

/* Columns: bias, then for each format the keys' mean error without and with a centre. */
static void print_chart(const options *o)
{
    static const double biases[] = {0.5, 1, 2, 5, 10, 20, 50, 100};
    for (size_t b = 0; b < sizeof biases / sizeof *biases; b++) {
        capture all;
        double errors[N_FORMATS][2] = {{0}};
        capture_load(&all, o->path);
        for (int i = 0; i < all.n_layers; i++) {
            stream s = {.rows = all.layers[i].keys};
            plant_bias(&all, &all.layers[i], biases[b]);
            find_center(&all, &all.layers[i], &s);
            for (int f = 0; f < N_FORMATS; f++)
                for (int centered = 0; centered < 2; centered++) {
                    tqkv_store shape = {.format = formats[f], .head_dim = all.layers[i].head_dim};
                    shape.n_kv_heads = all.layers[i].n_kv_heads;
                    shape.capacity = 1;
                    shape.center = centered ? s.center : NULL;
                    measure_heads(&all, &all.layers[i], &shape, &s, &s.trials[f]);
                    errors[f][centered] += s.trials[f].error[centered] / all.n_layers;
                }
            free(s.center);
        }
        printf("%g", biases[b]);
        for (int f = 0; f < N_FORMATS; f++) printf(" %g %g", errors[f][0], errors[f][1]);
        puts("");
        capture_free(&all);
    }
}

static double number(const char *option, const char *text)
{
    char *rest = NULL;
    double value = text ? strtod(text, &rest) : 0;
    if (!text || *text == 0 || *rest != 0 || !(value > 0 && value <= 1e6)) stop(option, "needs a number above 0");
    return value;
}

int main(int argc, char **argv)
{
    options o = {.bits = 5, .path = "examples/data/real_kv.bin"};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--bits") == 0) {
            i++;
            o.bits = number("--bits", argv[i]);
        } else if (strcmp(argv[i], "--plant-bias") == 0) {
            i++;
            o.bias = number("--plant-bias", argv[i]);
        } else if (strcmp(argv[i], "--no-center") == 0) {
            o.no_center = true;
        } else if (strcmp(argv[i], "--shared") == 0) {
            o.shared = true;
        } else if (strcmp(argv[i], "--chart") == 0) {
            o.chart = true;
        } else {
            o.path = argv[i];
        }
    }
    if (o.chart) {
        print_chart(&o);
        return 0;
    }
    capture all;
    capture_load(&all, o.path);
    advise(&all, &o);
    capture_free(&all);
    return 0;
}

/* Says which preset and which formats a model bears, from a capture of its keys, values and queries (data/README.md has
 * the format).
 *   advise [--bits N | --bytes N --context POSITIONS] [--no-center] [--shared] [--tail DIMENSIONS] [FILE]
 * --bits: the suggested pair takes at most so many bits a value, keys and values averaged, norms included (5).
 * --bytes: suggests formats for each layer instead, whose caches take at most so many bytes (2G, 512M) with so many
 * positions, exact ends and norms included.
 * --no-center: the engine can set neither centre nor scale.
 * --shared: the keys are the values, too, as in a latent cache. The file's values are not read.
 * --tail: the last dimensions of each key, its rotary part, have a format of their own; with --shared the values are
 * the other dimensions. A layer with no more dimensions has no tail. */
#include "tqkv.h"
#include "capture_file.h"
#include "advise_noise.h"
#include "plan.h"

/* From most to fewest bits. TQ8 is left out, because I8 takes the same room with less error. */
static const tqkv_format formats[] = {TQKV_F16, TQKV_I8, TQKV_TQ6, TQKV_TQ5, TQKV_TQ4, TQKV_TQ3, TQKV_TQ2};
enum { F16, I8, TQ6, TQ5, TQ4, TQ3, TQ2, N_FORMATS };

/* Streams of a layer. */
enum { KEYS, VALUES, TAIL, N_STREAMS };

/* The largest error of a layer's output that one stream may cause. In the captured layers TQ4 values cause 0.003 to
 * 0.005. */
static const double bearable = 0.03;

/* One format of one stream, without a centre and with one; outputs also with the scale of keys. */
typedef struct trial {
    double bits;                /* a value, norms included */
    double error[2], beyond[2]; /* of tqkv_measure, the worst head */
    double output[2];           /* error of the layer's output when only this stream is quantised */
    double both[2];             /* the same when it is keys and values at once; of --shared, in the keys' trials */
} trial;

typedef struct stream {
    const char *name;
    int dim;                     /* values of a row; a tail's: 0 if there is none */
    tqkv_strides strides;        /* of the rows: a key's part and its tail lie in one row of the file */
    const float *rows;           /* [n_positions][n_kv_heads][dim] */
    float *center;               /* their mean: [n_kv_heads][dim] */
    float *scale;                /* of the channels, as long; values have none: NULL */
    double mean_share, kurtosis; /* the head with the largest */
    double later[2];             /* error of tq4 in the second half, without and with a centre made of the first */
    trial trials[N_FORMATS];
    bool calibrate; /* the advice is to set them */
} stream;

typedef struct options {
    double bits, bytes; /* bytes: 0, or those of a plan */
    int context;        /* of the plan, positions */
    bool no_center, shared;
    int tail;
    const char *path;
} options;

/* ---- measuring ---- */

/* A store's shape, for rows of the stream. */
static tqkv_store shape_of(const captured_layer *layer, const stream *s, tqkv_format format, const float *center)
{
    tqkv_store shape = {.format = format, .head_dim = s->dim, .n_kv_heads = layer->n_kv_heads, .capacity = 1};
    shape.strides = s->strides;
    shape.center = center;
    return shape;
}

static tqkv_store filled_store(const capture *all, const captured_layer *layer, const stream *s, tqkv_format format,
                               bool centered)
{
    captured_layer part = *layer;
    part.head_dim = s->dim;
    tqkv_store store = make_store(&part, all->n_positions, format, false);
    store.strides = s->strides;
    store.center = centered ? s->center : NULL;
    store.channel_scale = centered ? s->scale : NULL;
    check(tqkv_encode(&store, s->rows, all->n_positions, 0), "encode");
    return store;
}

static void find_center(const capture *all, const captured_layer *layer, stream *s)
{
    const tqkv_store shape = shape_of(layer, s, TQKV_F16, NULL);
    const size_t n = (size_t)(layer->n_kv_heads * s->dim);
    s->center = (float *)allocate(n, sizeof(float));
    if (s->rows != layer->values) s->scale = (float *)allocate(n, sizeof(float));
    check(tqkv_calibrate(&shape, s->rows, all->n_positions, NULL, 0, 0, TQKV_PAIRS_NONE, s->center, s->scale),
          "calibrate");
}

/* A centre is judged by rows that it was not made from, because the mean of few rows is mostly noise. */
static void check_center(const capture *all, const captured_layer *layer, stream *s)
{
    const int half = all->n_positions / 2, row = layer->n_kv_heads * layer->head_dim;
    tqkv_store shape = shape_of(layer, s, TQKV_TQ4, NULL);
    float *center = (float *)allocate((size_t)(layer->n_kv_heads * s->dim), sizeof *center);
    tqkv_quality *heads = (tqkv_quality *)allocate((size_t)layer->n_kv_heads, sizeof *heads);
    check(tqkv_calibrate(&shape, s->rows, half, NULL, 0, 0, TQKV_PAIRS_NONE, center, NULL), "mean");
    for (int centered = 0; centered < 2; centered++) {
        shape.center = centered ? center : NULL;
        check(tqkv_measure(&shape, s->rows + (size_t)half * (size_t)row, all->n_positions - half, heads), "measure");
        for (int h = 0; h < layer->n_kv_heads; h++) s->later[centered] += heads[h].error / layer->n_kv_heads;
    }
    free(center);
    free(heads);
}

/* The worst head of tqkv_measure. */
static void measure_heads(const capture *all, const captured_layer *layer, const tqkv_store *shape, stream *s, trial *t)
{
    int centered = shape->center != NULL;
    tqkv_quality *heads = (tqkv_quality *)allocate((size_t)layer->n_kv_heads, sizeof *heads);
    check(tqkv_measure(shape, s->rows, all->n_positions, heads), "measure");
    for (int h = 0; h < layer->n_kv_heads; h++) {
        s->mean_share = fmax(s->mean_share, heads[h].mean_share);
        if (!centered && shape->format != TQKV_F16) s->kurtosis = fmax(s->kurtosis, heads[h].kurtosis);
        t->error[centered] = fmax(t->error[centered], heads[h].error);
        t->beyond[centered] = fmax(t->beyond[centered], heads[h].beyond);
    }
    free(heads);
}

/* Quantises one stream, leaves the others in F16 around their centre, and compares with exact attention. */
static void try_format(const capture *all, const captured_layer *layer, stream *streams, int which, int format,
                       const float *exact)
{
    stream *s = &streams[which];
    trial *t = &s->trials[format];
    const int n_rows = all->n_queries * layer->n_heads;
    float *out = (float *)allocate((size_t)(n_rows * streams[VALUES].dim), sizeof *out);
    tqkv_store stores[N_STREAMS];
    for (int centered = 0; centered < 2; centered++) {
        for (int i = 0; i < N_STREAMS; i++)
            if (streams[i].dim)
                stores[i] = filled_store(all, layer, &streams[i], i == which ? formats[format] : TQKV_F16,
                                         i != which || centered);
        const tqkv_store *store = &stores[which];
        const tqkv_store shape = shape_of(layer, s, formats[format], centered ? s->center : NULL);
        measure_heads(all, layer, &shape, s, t);
        stored_attention(all, layer, &stores[KEYS], &stores[VALUES], streams[TAIL].dim ? &stores[TAIL] : NULL, out);
        t->output[centered] = relative_error(exact, out, n_rows, streams[VALUES].dim);
        const double n_values = (double)all->n_positions * layer->n_kv_heads * s->dim;
        t->bits = 8 * (double)(store->codes_size + store->norms_size) / n_values;
        for (int i = 0; i < N_STREAMS; i++)
            if (streams[i].dim) free_store(&stores[i]);
    }
    free(out);
}

/* One store is keys and values: scores and sums have the same noise. */
static void try_shared(const capture *all, const captured_layer *layer, stream *streams, int format, const float *exact)
{
    stream *s = &streams[KEYS];
    const int n_rows = all->n_queries * layer->n_heads;
    float *out = (float *)allocate((size_t)(n_rows * s->dim), sizeof *out);
    tqkv_store tail = {.head_dim = 0};
    if (streams[TAIL].dim) tail = filled_store(all, layer, &streams[TAIL], TQKV_F16, true);
    for (int centered = 0; centered < 2; centered++) {
        tqkv_store store = filled_store(all, layer, s, formats[format], centered != 0);
        stored_attention(all, layer, &store, &store, tail.head_dim ? &tail : NULL, out);
        s->trials[format].both[centered] = relative_error(exact, out, n_rows, s->dim);
        free_store(&store);
    }
    if (tail.head_dim) free_store(&tail);
    free(out);
}

/* The streams of a layer: the keys without their tail, the values, the tail. */
static void open_streams(const captured_layer *layer, const options *o, stream streams[N_STREAMS])
{
    static const char *const names[] = {"keys", "values", "tail"};
    const int d = layer->head_dim, tail = o->tail < d ? o->tail : 0;
    memset(streams, 0, N_STREAMS * sizeof *streams);
    for (int i = 0; i < N_STREAMS; i++) {
        streams[i].name = names[i];
        streams[i].dim = i == TAIL ? tail : i == KEYS || o->shared ? d - tail : d;
        streams[i].rows = i == VALUES && !o->shared ? layer->values : layer->keys + (i == TAIL ? d - tail : 0);
        streams[i].strides = (tqkv_strides){(size_t)(layer->n_kv_heads * d), (size_t)d};
    }
}

static void measure_layer(const capture *all, const captured_layer *layer, const options *o, stream streams[N_STREAMS])
{
    open_streams(layer, o, streams);
    for (int i = 0; i < N_STREAMS; i++)
        if (streams[i].dim) {
            find_center(all, layer, &streams[i]);
            check_center(all, layer, &streams[i]);
        }
    float *exact = exact_attention(all, layer);
    for (int row = 0; row < all->n_queries * layer->n_heads; row++) /* only what the values have of it */
        memmove(exact + row * streams[VALUES].dim, exact + row * layer->head_dim,
                (size_t)streams[VALUES].dim * sizeof *exact);
    for (int f = 0; f < N_FORMATS; f++) {
        for (int i = 0; i < N_STREAMS; i++)
            if (streams[i].dim) try_format(all, layer, streams, i, f, exact);
        if (o->shared) try_shared(all, layer, streams, f, exact);
    }
    free(exact);
}

/* ---- the advice ---- */

/* The error of the output at a format, with centre and scale where the advice is to set them. */
static double advised_output(const stream *s, int format) { return s->trials[format].output[s->calibrate]; }

/* Advises centre and scale if four bits need them, or if the centre takes away more than half of their error, also for
 * rows that it was not made from. */
static void decide_center(stream *s, const options *o)
{
    const trial *t = &s->trials[TQ4];
    bool helps = t->error[1]<0.5 * t->error[0], needed = t->output[0]> bearable && t->output[1] <= bearable;
    s->calibrate = !o->no_center && (helps || needed) && s->later[1] < s->later[0];
}

static void print_verdict(const stream *s)
{
    const trial *t = &s->trials[TQ4];
    const char *with = !s->calibrate ? "" : s->scale ? "with centre and scale " : "with the centre ";
    double four = advised_output(s, TQ4), eight = advised_output(s, I8);
    printf("  verdict: ");
    if (four > bearable && eight > bearable)
        printf("keep F16: %seven i8 moves the output by %.2g, more than %g\n", with, eight, bearable);
    else if (four > bearable)
        printf("%s need I8: %stq4 moves the output by %.2g, more than %g; i8 by %.2g\n", s->name, with, four, bearable,
               eight);
    else if (s->calibrate)
        printf("use a centre%s: %.1f%% of the squared length is constant; tq4 moves the output by %.2g, not %.2g\n",
               s->scale ? " and a scale" : "", 100 * s->mean_share, t->output[1], t->output[0]);
    else
        printf("fine: tq4 moves the output by %.2g, at most %g is bearable\n", four, bearable);
}

/* The noise of a mean falls with the number of its rows, and so does what it adds to the error. */
static void print_later(const stream *s, int n_positions)
{
    const double change = s->later[1] / s->later[0] - 1;
    const int half = n_positions / 2;
    printf("  a centre of the first %d positions takes tq4's error in the others from %.2g to %.2g", half, s->later[0],
           s->later[1]);
    if (change > 0)
        printf(": %.0f%% worse; it wants about %.0f positions to add 1%%", 100 * change, half * change / 0.01);
    printf("\n");
}

static void print_stream(const capture *all, const captured_layer *layer, const stream *s, noise_worst *worst)
{
    printf(" %s: %.1f%% of the squared length is constant, kurtosis %.2f\n", s->name, 100 * s->mean_share, s->kurtosis);
    printf("  %-6s %6s %10s %10s %10s %10s %9s\n", "format", "bits", "error", "centred", "output",
           s->scale ? "calibrated" : "centred", "beyond");
    for (int f = 0; f < N_FORMATS; f++) {
        const trial *t = &s->trials[f];
        printf("  %-6s %6.2f %10.2e %10.2e %10.2e %10.2e %8.2f%%\n", tqkv_format_name(formats[f]), t->bits, t->error[0],
               t->error[1], t->output[0], t->output[1], 100 * t->beyond[0]);
    }
    print_later(s, all->n_positions);
    if (s->rows != layer->values)
        print_noise(all, layer, (int)(s->rows - layer->keys), s->dim, formats, N_FORMATS, worst);
    print_verdict(s);
}

/* The cost of formats for keys, values and tail over all layers: mean bits a value and mean error of the outputs.
 * Errors of the streams are independent, so their effects on the output add up. */
static double formats_error(const capture *all, const options *o, stream (*layers)[N_STREAMS],
                            const int chosen[N_STREAMS], double *bits)
{
    double error = 0, n_bits = 0, n_values = 0;
    for (int i = 0; i < all->n_layers; i++) {
        const stream *streams = layers[i];
        for (int k = 0; k < N_STREAMS; k++) {
            const double weight = (double)all->layers[i].n_kv_heads * streams[k].dim;
            if (!streams[k].dim || (k == VALUES && o->shared)) continue;
            error += (k == KEYS && o->shared ? streams[k].trials[chosen[k]].both[streams[k].calibrate]
                                             : advised_output(&streams[k], chosen[k])) /
                     all->n_layers;
            n_bits += weight * streams[k].trials[chosen[k]].bits;
            n_values += weight;
        }
    }
    *bits = n_bits / n_values;
    return error;
}

/* The formats of least error. Keys have at least as many bits as values: noise of one size in the output hurts the
 * predictions of tinylm more when it comes from the keys. */
static void suggest(const capture *all, const options *o, stream (*layers)[N_STREAMS])
{
    double least = INFINITY, bits, best_bits = 0;
    int chosen[N_STREAMS], best[N_STREAMS] = {-1, -1, -1};
    bool any_tail = false;
    for (int i = 0; i < all->n_layers; i++) any_tail = any_tail || layers[i][TAIL].dim;
    for (int i = 0; i < N_FORMATS * N_FORMATS * (any_tail ? N_FORMATS : 1); i++) {
        chosen[KEYS] = i % N_FORMATS;
        chosen[VALUES] = i / N_FORMATS % N_FORMATS;
        chosen[TAIL] = i / N_FORMATS / N_FORMATS;
        if (o->shared ? chosen[VALUES] != chosen[KEYS] : chosen[VALUES] < chosen[KEYS]) continue;
        const double error = formats_error(all, o, layers, chosen, &bits);
        if (bits > o->bits || error >= least) continue;
        least = error;
        best_bits = bits;
        memcpy(best, chosen, sizeof best);
    }
    if (best[KEYS] < 0) {
        printf("\nno %s takes %g bits a value or fewer\n", o->shared ? "format" : "pair", o->bits);
        return;
    }
    printf("\nfor %g bits a value: ", o->bits);
    if (o->shared)
        printf("%s", tqkv_format_name(formats[best[KEYS]]));
    else
        printf("keys %s, values %s", tqkv_format_name(formats[best[KEYS]]), tqkv_format_name(formats[best[VALUES]]));
    if (any_tail) printf(", tail %s", tqkv_format_name(formats[best[TAIL]]));
    printf(" (%.2f bits, mean error of the outputs %.2g)\n", best_bits, least);
}

enum { CHUNK = 512 }; /* positions that an engine appends at a time: beside its window what a layer keeps */

/* What each layer's keys and values take with each format of a plan; where even the shortest take too much, the end. */
static void open_plan(const capture *all, const options *o, plan_stream *streams)
{
    const int n = 2 * all->n_layers;
    memset(streams, 0, (size_t)n * sizeof *streams);
    for (int i = 0; i < all->n_layers; i++) {
        const captured_layer *l = &all->layers[i];
        const tqkv_cache_desc desc = plan_cache(l->head_dim, 0, l->n_kv_heads, o->context, l->window, CHUNK);
        if (!plan_measure_bytes(&desc, &streams[2 * i]))
            stop("--context", "there is no memory for a cache of that size");
    }
    if (plan_choose(streams, n, o->bytes)) return;
    fprintf(stderr, "--bytes: not even %s fits: %d layers take %.0f bytes with %d positions, there are %.0f\n",
            tqkv_format_name(plan_formats[0]), all->n_layers, plan_bytes(streams, n), o->context, o->bytes);
    exit(1);
}

/* Formats by layer for a number of bytes. */
static void suggest_plan(const capture *all, const options *o, stream (*layers)[N_STREAMS], plan_stream *streams)
{
    const int n = 2 * all->n_layers;
    for (int i = 0; i < n; i++)
        for (int f = 0; f < PLAN_FORMATS; f++)
            streams[i].loss[f] = advised_output(&layers[i / 2][i % 2], N_FORMATS - 1 - f) / all->n_layers;
    plan_choose(streams, n, o->bytes);
    printf("\nfor %.0f bytes and %d positions:\n", o->bytes, o->context);
    for (int i = 0; i < n; i += 2)
        printf("  layer %d: keys %s, values %s\n", i / 2, tqkv_format_name(plan_formats[streams[i].chosen]),
               tqkv_format_name(plan_formats[streams[i + 1].chosen]));
    printf("  %.0f bytes, mean error of the outputs %.2g\n", plan_bytes(streams, n), plan_loss(streams, n));
}

/* The error of the output if one stream is keys and values, beside its error as keys or values alone. */
static void print_shared(const stream streams[N_STREAMS])
{
    const bool centered = streams[0].calibrate;
    printf(" keys and values: one stream%s\n", centered ? ", with centre and scale" : "");
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

/* Both parts of a key need a supported head_dim. */
static void check_tail(const capture *all, int tail)
{
    for (int i = 0; i < all->n_layers; i++)
        for (int part = 0; part < 2 && all->layers[i].head_dim > tail; part++) {
            const tqkv_store shape = {.format = TQKV_F16,
                                      .head_dim = part ? tail : all->layers[i].head_dim - tail,
                                      .n_kv_heads = 1,
                                      .capacity = 1};
            if (tail && tqkv_codes_size(&shape) == 0)
                stop("--tail", "a part of the keys has a size that is not supported");
        }
}

static void advise(const capture *all, const options *o)
{
    plan_stream plan[2 * sizeof all->layers / sizeof *all->layers];
    check_tail(all, o->tail);
    if (o->bytes > 0) open_plan(all, o, plan);
    stream(*layers)[N_STREAMS] = (stream(*)[N_STREAMS])allocate((size_t)all->n_layers, sizeof *layers);
    noise_worst worst = {0, 0};
    puts("error: tqkv_measure's, noise against what differs between positions; centred: with the mean of the rows as\n"
         "the store's centre. output: error of the layer's output if only this stream is quantised; calibrated: with\n"
         "the centre and the scale of tqkv_calibrate.\n"
         "logits: the standard deviation of what the keys' error adds to them, without and with centre and scale of\n"
         "tqkv_calibrate; queries: learned with them, too; later: of the second half, learned from the first.");
    for (int i = 0; i < all->n_layers; i++) {
        const captured_layer *layer = &all->layers[i];
        stream *streams = layers[i];
        if (o->shared)
            memcpy(layer->values, layer->keys,
                   (size_t)(all->n_positions * layer->n_kv_heads * layer->head_dim) * sizeof *layer->keys);
        measure_layer(all, layer, o, streams);
        printf("\nlayer %d: head_dim %d, %d KV heads\n", i, layer->head_dim, layer->n_kv_heads);
        for (int k = 0; k < N_STREAMS; k++) {
            if (!streams[k].dim) continue;
            decide_center(&streams[k], o);
            if (k != VALUES || !o->shared) print_stream(all, layer, &streams[k], &worst);
        }
        if (o->shared) print_shared(streams);
    }
    print_preset(&worst);
    if (o->bytes > 0)
        suggest_plan(all, o, layers, plan);
    else
        suggest(all, o, layers);
    for (int i = 0; i < all->n_layers; i++)
        for (int k = 0; k < N_STREAMS; k++) {
            free(layers[i][k].center);
            free(layers[i][k].scale);
        }
    free(layers);
}

static double number(const char *option, const char *text)
{
    char *rest = NULL;
    double value = text ? strtod(text, &rest) : 0;
    if (!text || *text == 0 || *rest != 0 || !(value > 0 && value <= 1e6)) stop(option, "needs a number above 0");
    return value;
}

/* A number with K, M, G or T behind it, for powers of 1024. */
static double number_of_bytes(const char *text)
{
    static const char units[] = "KMGT";
    char *rest = NULL;
    double value = text ? strtod(text, &rest) : 0;
    const char *unit = text && *rest ? strchr(units, *rest) : NULL;
    if (!text || rest == text || (*rest && (!unit || rest[1])) || !(value > 0 && value <= 1e15))
        stop("--bytes", "needs a number above 0, as 2G or 512M");
    for (long i = 0; unit && i <= unit - units; i++) value *= 1024;
    return value;
}

static void check_plan(const options *o)
{
    if (!o->bytes != !o->context) stop("--bytes", "needs --context, and --context needs --bytes");
    if (o->bytes > 0 && (o->shared || o->tail))
        stop("--bytes", "is for keys and values alone, without --shared and --tail");
}

int main(int argc, char **argv)
{
    options o = {.bits = 5, .path = "examples/data/pretrained_kv.bin"};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--bits") == 0) {
            i++;
            o.bits = number("--bits", argv[i]);
        } else if (strcmp(argv[i], "--bytes") == 0) {
            i++;
            o.bytes = number_of_bytes(argv[i]);
        } else if (strcmp(argv[i], "--context") == 0) {
            i++;
            o.context = (int)number("--context", argv[i]);
        } else if (strcmp(argv[i], "--no-center") == 0) {
            o.no_center = true;
        } else if (strcmp(argv[i], "--shared") == 0) {
            o.shared = true;
        } else if (strcmp(argv[i], "--tail") == 0) {
            i++;
            o.tail = (int)number("--tail", argv[i]);
        } else {
            o.path = argv[i];
        }
    }
    check_plan(&o);
    capture all;
    capture_load(&all, o.path);
    advise(&all, &o);
    capture_free(&all);
    return 0;
}

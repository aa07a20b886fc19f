/* A context shift that changes no key. When the context is full, the oldest positions after the first KEEP are dropped,
 * and later ones move down. Rotary embedding is relative, so queries are turned in place of the keys that moved. Keys
 * that have moved equally far form a segment. Attention is one slice a segment, each with its own turned query, and a
 * merge. The usual way is compared: decode the keys, turn them, encode them again. Both have the centre and the scale
 * of the first CONTEXT keys.
 *   context_shift [LAYER]    the error of both over 32 shifts, with keys, values and queries of a pretrained model
 * "same codes in double": the largest |out - exact| / |exact| of an output, where exact is attention in double over the
 * decoded codes: attention's own error, and what integer centroids differ from decoded ones. The other errors are
 * relMSE, as in real_kv.c, against the original floats; "recomputed" encodes the remaining keys afresh. Values are F16,
 * so that only the error of the keys counts. */
#include "tqkv.h"
#include "capture_file.h"

enum { CONTEXT = 256, KEEP = 16, DROP = 8, SHIFTS = 32, QUERIES = 64, MAX_SEGMENTS = 8 };

/* The rotary embeddings of the captured layers: three of Qwen2.5-Coder, one of SmolLM2. */
typedef struct rotary {
    double base;
    bool neighbours; /* turns channels 2i and 2i + 1 together, not i and i + head_dim / 2 */
} rotary;

static const rotary rotaries[] = {{1e6, false}, {1e6, false}, {1e6, false}, {1e5, true}};

/* Neighbouring positions of a cache whose keys are turned to their position + turn. */
typedef struct segment {
    int count;
    int64_t turn;
} segment;

typedef struct context {
    tqkv_cache *cache;
    const captured_layer *layer;
    const rotary *rotary;
    segment segments[MAX_SEGMENTS]; /* from the oldest position to the newest */
    int n_segments;
    bool reencode; /* the usual way: one segment, keys always turned to where they are */
} context;

/* Turns row r to position first + r * step. rows: [n_rows][n_heads][dim] */
static void turn(const rotary *by, float *rows, int n_rows, int n_heads, int dim, int64_t first, int step)
{
    const int apart = by->neighbours ? 1 : dim / 2;
    for (int i = 0; i < dim / 2; i++) {
        double frequency = pow(by->base, -2.0 * i / dim);
        for (int row = 0; row < n_rows; row++) {
            double angle = (double)(first + row * step) * frequency, c = cos(angle), s = sin(angle);
            float *head = rows + row * n_heads * dim + (by->neighbours ? 2 * i : i);
            for (int h = 0; h < n_heads; h++, head += dim) {
                double a = head[0], b = head[apart];
                head[0] = (float)(a * c - b * s);
                head[apart] = (float)(b * c + a * s);
            }
        }
    }
}

static float *copy_of(const float *values, int count)
{
    float *copy = (float *)allocate((size_t)count, sizeof *copy);
    memcpy(copy, values, (size_t)count * sizeof *copy);
    return copy;
}

/* ---- The context: open, append, drop, attend ---- */

/* channels: centre and scale of the keys, [2][n_kv_heads][head_dim] */
static context open_context(const captured_layer *layer, const rotary *by, const float *channels, tqkv_format keys,
                            bool reencode)
{
    tqkv_cache_desc desc = {.head_dim = layer->head_dim, .n_kv_heads = layer->n_kv_heads, .n_heads = layer->n_heads};
    context c = {.layer = layer, .rotary = by, .reencode = reencode, .n_segments = 1};
    desc.capacity = CONTEXT;
    desc.key_format = keys;
    desc.value_format = TQKV_F16;
    desc.key_center = channels;
    desc.key_scale = channels + layer->n_kv_heads * layer->head_dim;
    check(tqkv_cache_create(&desc, &c.cache), "cache");
    return c;
}

/* Keys of new tokens join the last segment: their positions run on as if nothing had been dropped. */
static void append(context *c, int token, int n_tokens)
{
    int heads = c->layer->n_kv_heads, dim = c->layer->head_dim, row = heads * dim;
    segment *last = &c->segments[c->n_segments - 1];
    float *keys = copy_of(c->layer->keys + token * row, n_tokens * row);
    turn(c->rotary, keys, n_tokens, heads, dim, tqkv_cache_end(c->cache) + last->turn, 1);
    check(tqkv_cache_append(c->cache, keys, c->layer->values + token * row, n_tokens), "append");
    last->count += n_tokens;
    free(keys);
}

/* Cuts the segments. Those after the gap have moved further from the position that their keys are turned to. */
static void cut_segments(context *c, int first, int count)
{
    segment old[MAX_SEGMENTS];
    int n_old = c->n_segments, begin = 0;
    memcpy(old, c->segments, sizeof old);
    c->n_segments = 0;
    for (int i = 0; i < n_old; begin += old[i++].count) {
        int end = begin + old[i].count, before = (end < first ? end : first) - begin,
            behind = end - (begin > first + count ? begin : first + count);
        if (c->n_segments + 2 > MAX_SEGMENTS) stop("segments", "too many");
        if (before > 0) c->segments[c->n_segments++] = (segment){before, old[i].turn};
        if (behind > 0) c->segments[c->n_segments++] = (segment){behind, old[i].turn + count};
    }
}

static tqkv_attention view_of(const tqkv_cache *cache, int n_queries)
{
    tqkv_attention view;
    check(tqkv_cache_view(cache, n_queries, &view), "view");
    return view;
}

/* Decodes the keys from `first` on, turns them back by `count`, and encodes them again. */
static void reencode_keys(context *c, int first, int count)
{
    const tqkv_attention view = view_of(c->cache, 0);
    const tqkv_store *store = view.keys;
    int n = (int)tqkv_cache_end(c->cache) - first, row = store->n_kv_heads * store->head_dim;
    float *keys = (float *)allocate((size_t)(n * row), sizeof *keys);
    check(tqkv_decode(store, first, n, TQKV_ORIGINAL, keys), "decode");
    turn(c->rotary, keys, n, store->n_kv_heads, store->head_dim, -count, 0);
    check(tqkv_encode(store, keys, n, first), "encode");
    free(keys);
}

/* Positions after [first, first + count) move down. Their codes change only with reencode. */
static void drop(context *c, int first, int count)
{
    check(tqkv_cache_remove(c->cache, first, count), "remove");
    if (c->reencode) {
        c->segments[0].count -= count;
        reencode_keys(c, first, count);
    } else {
        cut_segments(c, first, count);
    }
}

/* The newest n positions attend. q: [n][n_heads][head_dim], not yet turned */
static void attend(const context *c, const float *q, int n, float *out)
{
    tqkv_attention a = view_of(c->cache, n);
    int heads = c->layer->n_heads, dim = c->layer->head_dim, rows = n * heads, first = 0;
    float *max = (float *)allocate((size_t)(rows * (dim + 4)), sizeof *max), *sum = max + rows, *slice_max = sum + rows,
          *slice_sum = slice_max + rows, *slice = slice_sum + rows;
    a.n_heads = heads;
    a.end = tqkv_cache_end(c->cache);
    a.softcap = c->layer->softcap;
    for (int i = 0; i < c->n_segments; first += c->segments[i++].count) {
        float *turned = copy_of(q, rows * dim);
        turn(c->rotary, turned, n, heads, dim, a.end - n + c->segments[i].turn, 1);
        if (i == 0) {
            check(tqkv_attend_partial(&a, turned, 0, c->segments[0].count, out, max, sum), "attend");
        } else {
            check(tqkv_attend_partial(&a, turned, first, c->segments[i].count, slice, slice_max, slice_sum), "attend");
            check(tqkv_attend_merge(&a, out, max, sum, &a, slice, slice_max, slice_sum), "merge");
        }
        free(turned);
    }
    check(tqkv_attend_finish(&a, out, max, sum), "finish");
    free(max);
}

/* ---- What they are compared with ---- */

/* A capture that holds the context as if it were new: the tokens' keys and the queries turned to their positions. */
static capture fresh_context(const captured_layer *layer, const rotary *by, const int *tokens, int n)
{
    capture now = {.n_layers = 1, .n_positions = n, .n_queries = QUERIES};
    captured_layer *l = &now.layers[0];
    int row = layer->n_kv_heads * layer->head_dim;
    *l = *layer;
    l->window = 0;
    l->keys = (float *)allocate((size_t)(n * row), sizeof(float));
    l->values = (float *)allocate((size_t)(n * row), sizeof(float));
    for (int i = 0; i < n; i++) {
        memcpy(l->keys + i * row, layer->keys + tokens[i] * row, (size_t)row * sizeof(float));
        memcpy(l->values + i * row, layer->values + tokens[i] * row, (size_t)row * sizeof(float));
    }
    l->queries = copy_of(layer->queries, QUERIES * layer->n_heads * layer->head_dim);
    turn(by, l->keys, n, layer->n_kv_heads, layer->head_dim, 0, 1);
    turn(by, l->queries, QUERIES, layer->n_heads, layer->head_dim, n - QUERIES, 1);
    return now;
}

/* The keys as the context's queries see them: decoded, each turned to its position. */
static float *seen_keys(const context *c, int n)
{
    int heads = c->layer->n_kv_heads, dim = c->layer->head_dim, row = heads * dim, first = 0;
    float *keys = (float *)allocate((size_t)(n * row), sizeof *keys);
    check(tqkv_decode(view_of(c->cache, 0).keys, 0, n, TQKV_ORIGINAL, keys), "decode");
    for (int i = 0; i < c->n_segments; first += c->segments[i++].count)
        turn(c->rotary, keys + first * row, c->segments[i].count, heads, dim, -c->segments[i].turn, 0);
    return keys;
}

/* Errors of a way: of its keys, of its outputs, and the largest |out - exact| / |exact| of a row, where `exact` is
 * attention in double over the way's own decoded codes. */
typedef struct errors {
    double keys, outputs, on_codes;
} errors;

static errors measure(const context *c, const capture *now, const float *exact)
{
    captured_layer codes = now->layers[0];
    int n = now->n_positions, dim = codes.head_dim, rows = QUERIES * codes.n_heads;
    float *out = copy_of(exact, rows * dim);
    codes.keys = seen_keys(c, n);
    codes.values = copy_of(codes.values, n * codes.n_kv_heads * dim);
    check(tqkv_decode(view_of(c->cache, 0).values, 0, n, TQKV_ORIGINAL, codes.values), "decode");
    attend(c, c->layer->queries, QUERIES, out);
    errors e = {relative_error(now->layers[0].keys, codes.keys, n * codes.n_kv_heads, dim),
                relative_error(exact, out, rows, dim), 0};
    float *on_codes = exact_attention(now, &codes);
    for (int i = 0; i < rows * dim; i += dim)
        e.on_codes = fmax(e.on_codes, relative_error(on_codes + i, out + i, 1, dim));
    e.on_codes = sqrt(e.on_codes);
    free(out);
    free(on_codes);
    free(codes.keys);
    free(codes.values);
    return e;
}

/* The error of the outputs if all keys are computed and encoded again. */
static double recomputed_error(const capture *now, const tqkv_store *like, const float *exact)
{
    const captured_layer *layer = &now->layers[0];
    int n = now->n_positions, rows = QUERIES * layer->n_heads;
    float *out = copy_of(exact, rows * layer->head_dim);
    tqkv_store keys = make_store(layer, n, like->format, false), values = make_store(layer, n, TQKV_F16, false);
    keys.center = like->center;
    keys.channel_scale = like->channel_scale;
    check(tqkv_encode(&keys, layer->keys, n, 0), "encode");
    check(tqkv_encode(&values, layer->values, n, 0), "encode");
    stored_attention(now, layer, &keys, &values, NULL, out);
    double error = relative_error(exact, out, rows, layer->head_dim);
    free(out);
    free_store(&keys);
    free_store(&values);
    return error;
}

static void print_row(const context ways[2], const int *tokens, const char *event)
{
    capture now = fresh_context(ways[0].layer, ways[0].rotary, tokens, (int)tqkv_cache_end(ways[0].cache));
    const tqkv_store *keys = view_of(ways[0].cache, 0).keys;
    float *exact = exact_attention(&now, &now.layers[0]);
    errors a = measure(&ways[0], &now, exact), b = measure(&ways[1], &now, exact);
    printf("%-5s %6s %8d %10.1e %10.2e %10.2e %11.2e %10.2e %10.2e\n", tqkv_format_name(keys->format), event,
           ways[0].n_segments, a.on_codes, a.keys, b.keys, recomputed_error(&now, keys, exact), a.outputs, b.outputs);
    free(exact);
    capture_free(&now);
}

static void drop_tokens(int *tokens, int n, int first, int count)
{
    memmove(tokens + first, tokens + first + count, (size_t)(n - first - count) * sizeof *tokens);
}

static void print_format(const captured_layer *layer, const rotary *by, const float *channels, tqkv_format format)
{
    context ways[] = {open_context(layer, by, channels, format, false),
                      open_context(layer, by, channels, format, true)};
    int tokens[CONTEXT], next = CONTEXT;
    for (int i = 0; i < CONTEXT; i++) tokens[i] = i;
    for (int i = 0; i < 2; i++) append(&ways[i], 0, CONTEXT);
    for (int shift = 0; shift <= SHIFTS; shift++) {
        char label[16];
        snprintf(label, sizeof label, "%d", shift);
        if ((shift & (shift - 1)) == 0) print_row(ways, tokens, label);
        if (shift == SHIFTS) break;
        drop_tokens(tokens, CONTEXT, KEEP, DROP);
        for (int i = CONTEXT - DROP; i < CONTEXT; i++) tokens[i] = next++;
        for (int i = 0; i < 2; i++) {
            drop(&ways[i], KEEP, DROP);
            append(&ways[i], tokens[CONTEXT - DROP], DROP);
        }
    }
    drop_tokens(tokens, CONTEXT, CONTEXT / 2, 50); /* out of the middle, as an edited message would be */
    for (int i = 0; i < 2; i++) drop(&ways[i], CONTEXT / 2, 50);
    print_row(ways, tokens, "middle");
    for (int i = 0; i < 2; i++) tqkv_cache_destroy(ways[i].cache);
}

int main(int argc, char **argv)
{
    static const tqkv_format formats[] = {TQKV_F16, TQKV_I8, TQKV_TQ4};
    capture all;
    capture_load(&all, "examples/data/pretrained_kv.bin");
    int index = argc > 1 ? atoi(argv[1]) : 3;
    if (index < 0 || index >= all.n_layers) stop("LAYER", "outside of the capture");
    if (all.n_positions < CONTEXT + SHIFTS * DROP || all.n_queries < QUERIES) stop("capture", "too few positions");
    captured_layer *layer = &all.layers[index];
    const rotary *by = &rotaries[index];
    float *channels = calibrated(layer, layer->keys, CONTEXT, TQKV_PAIRS_NONE);
    turn(by, layer->keys, all.n_positions, layer->n_kv_heads, layer->head_dim, 0, -1);
    turn(by, layer->queries, all.n_queries, layer->n_heads, layer->head_dim, all.n_queries - all.n_positions, -1);
    printf("layer %d: head_dim %d; a context of %d, the oldest %d kept, %d dropped a shift; %d queries\n", index,
           layer->head_dim, CONTEXT, KEEP, DROP, QUERIES);
    printf("%21s %10s %21s %33s\n", "", "same codes", "error of the keys", "error of the output");
    printf("%-5s %6s %8s %10s %10s %10s %11s %10s %10s\n", "keys", "shifts", "segments", "in double", "segments",
           "re-encoded", "recomputed", "segments", "re-encoded");
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) print_format(layer, by, channels, formats[i]);
    free(channels);
    capture_free(&all);
    return 0;
}

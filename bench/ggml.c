/* ggml's attention and conversion on one thread, for bench.c. ggml has none of tqkv's formats; the nearest are f16, q8_0
   (8.5 bits a value) and q4_0 (4.5). */
#include "peer.h"

#include <ggml.h>
#include <ggml-cpu.h>
#include <math.h>

enum { PEER_MAX_WAYS = 8 };

/* Beyond this, ggml takes seconds a call, and its time is linear in the context and the query heads. */
#define PEER_MAX_MULTIPLY_ADDS (1.1 * 2147483648.0)

/* One way to compute the shape: a graph that reads another layer in each run. */
typedef struct peer_way {
    peer *owner;
    enum ggml_type type;
    bool flash;
    bool contiguous; /* [heads][positions][head_dim]; else [positions][heads][head_dim], as ggml's callers keep it */
    const uint8_t *keys, *values; /* [n_layers][layer_bytes] */
    size_t layer_bytes;
    int n_layers, layer;
    struct ggml_tensor *k, *v, *out;
    struct ggml_cgraph *graph;
    struct ggml_cplan plan;
    void *work;
} peer_way;

struct peer {
    bench_shape shape;
    struct ggml_context *context;
    struct ggml_threadpool *pool;
    struct ggml_tensor *q, *mask;
    uint8_t *quantised[2]; /* keys and values at once; [n_layers][layer_bytes] of q8_0 and of q4_0 */
    peer_way ways[PEER_MAX_WAYS];
    int n_ways;
};

static const struct {
    const char *name;
    enum ggml_type type;
    bool flash, contiguous;
} ways[PEER_MAX_WAYS] = {
    {"ggml_flash_f16_strided", GGML_TYPE_F16, true, false},
    {"ggml_flash_f16_contiguous", GGML_TYPE_F16, true, true},
    {"ggml_f16_strided", GGML_TYPE_F16, false, false},
    {"ggml_f16_contiguous", GGML_TYPE_F16, false, true},
    {"ggml_flash_q8_0_strided", GGML_TYPE_Q8_0, true, false},
    {"ggml_flash_q8_0_contiguous", GGML_TYPE_Q8_0, true, true},
    {"ggml_flash_q4_0_strided", GGML_TYPE_Q4_0, true, false},
    {"ggml_flash_q4_0_contiguous", GGML_TYPE_Q4_0, true, true},
};

static void peer_run(void *user)
{
    peer_way *way = (peer_way *)user;
    const size_t offset = (size_t)way->layer * way->layer_bytes;
    way->layer = (way->layer + 1) % way->n_layers;
    way->k->data = (void *)(uintptr_t)(way->keys + offset); /* read only */
    way->v->data = (void *)(uintptr_t)(way->values + offset);
    if (ggml_graph_compute(way->graph, &way->plan) != GGML_STATUS_SUCCESS) {
        fprintf(stderr, "bench: ggml failed\n");
        exit(1);
    }
}

/* A tensor [ne2][ne1][ne0] whose memory is set later; strided: [ne1][ne2][ne0]. */
static struct ggml_tensor *peer_tensor(peer *p, enum ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2,
                                       bool strided)
{
    ggml_set_no_alloc(p->context, true);
    struct ggml_tensor *tensor = ggml_new_tensor_3d(p->context, type, ne0, ne1, ne2);
    ggml_set_no_alloc(p->context, false);
    if (strided) {
        tensor->nb[2] = tensor->nb[1];
        tensor->nb[1] *= (size_t)ne2;
    }
    return tensor;
}

/* Without flash attention, values are [heads][head_dim][positions]; strided: [head_dim][heads][positions]. */
static void peer_graph(peer_way *way)
{
    peer *p = way->owner;
    const int head_dim = p->shape.head_dim, n = p->shape.n_positions;
    const float scale = 1.0f / sqrtf((float)head_dim);
    way->k = peer_tensor(p, way->type, head_dim, n, BENCH_KV_HEADS, !way->contiguous);
    way->v = peer_tensor(p, way->type, way->flash ? head_dim : n, way->flash ? n : head_dim, BENCH_KV_HEADS,
                         !way->contiguous);
    way->k->data = (void *)(uintptr_t)way->keys;
    way->v->data = (void *)(uintptr_t)way->values;
    if (way->flash) {
        way->out = ggml_flash_attn_ext(p->context, p->q, way->k, way->v, p->mask, scale, 0.0f, 0.0f);
    } else {
        struct ggml_tensor *scores = ggml_mul_mat(p->context, way->k, p->q);
        scores = ggml_soft_max_ext(p->context, scores, p->mask, scale, 0.0f);
        way->out = ggml_mul_mat(p->context, way->v, scores);
    }
    way->graph = ggml_new_graph(p->context);
    ggml_build_forward_expand(way->graph, way->out);
    way->plan = ggml_graph_plan(way->graph, 1, p->pool);
    way->work = bench_alloc(way->plan.work_size);
    way->plan.work_data = (uint8_t *)way->work;
}

/* Gaussian numbers in blocks of the type: keys and values of each layer, the same in both layouts. */
static uint8_t *peer_quantise(enum ggml_type type, size_t layer_bytes, int n_layers)
{
    const size_t size = 2 * (size_t)n_layers * layer_bytes;
    const int64_t n = 65536; /* divides the keys of every shape */
    float *source = (float *)bench_alloc((size_t)n * sizeof *source);
    uint8_t *quantised = (uint8_t *)bench_alloc(size);
    bench_fill(source, (size_t)n, 5);
    ggml_get_type_traits_cpu(type)->from_float(source, quantised, n);
    bench_tile(quantised, ggml_row_size(type, n), size);
    free(source);
    return quantised;
}

/* Query i sees the positions up to n_positions - n_queries + i; one query sees all and needs no mask. */
static struct ggml_tensor *peer_mask(peer *p)
{
    const int n = p->shape.n_positions, n_queries = p->shape.n_queries;
    if (n_queries == 1) return NULL;
    struct ggml_tensor *mask = ggml_new_tensor_2d(p->context, GGML_TYPE_F16, n, n_queries);
    ggml_fp16_t *data = (ggml_fp16_t *)mask->data;
    for (int i = 0; i < n_queries; i++)
        for (int j = 0; j < n; j++)
            data[(size_t)i * (size_t)n + (size_t)j] = ggml_fp32_to_fp16(j > n - n_queries + i ? -INFINITY : 0.0f);
    return mask;
}

/* ggml's q is [n_heads][n_queries][head_dim]. */
static void peer_queries(peer *p, const float *q)
{
    const int n_heads = BENCH_KV_HEADS * p->shape.group, n_queries = p->shape.n_queries;
    const size_t row = (size_t)p->shape.head_dim;
    p->q = ggml_new_tensor_3d(p->context, GGML_TYPE_F32, p->shape.head_dim, n_queries, n_heads);
    for (int head = 0; head < n_heads; head++)
        for (int i = 0; i < n_queries; i++)
            memcpy((float *)p->q->data + (size_t)(head * n_queries + i) * row, q + (size_t)(i * n_heads + head) * row,
                   row * sizeof *q);
}

peer *peer_open(const bench_shape *shape, const bench_stream *keys, const bench_stream *values, const float *q)
{
    const double rows = (double)BENCH_KV_HEADS * shape->group * shape->n_queries;
    if (2.0 * rows * shape->n_positions * shape->head_dim > PEER_MAX_MULTIPLY_ADDS) return NULL;
    peer *p = (peer *)bench_alloc(sizeof *p);
    memset(p, 0, sizeof *p);
    p->shape = *shape;
    const double floats = 4 * rows * shape->n_positions + 16 * rows * shape->head_dim; /* scores of two ways, twice */
    p->context = ggml_init((struct ggml_init_params){.mem_size = (size_t)(floats * sizeof(float)) + (16u << 20)});
    struct ggml_threadpool_params params = ggml_threadpool_params_default(1);
    p->pool = ggml_threadpool_new(&params);
    peer_queries(p, q);
    p->mask = peer_mask(p);
    for (int i = 0; i < PEER_MAX_WAYS; i++) {
        peer_way *way = &p->ways[p->n_ways++];
        const int64_t elements = (int64_t)shape->n_positions * BENCH_KV_HEADS * shape->head_dim;
        *way = (peer_way){.owner = p, .type = ways[i].type, .flash = ways[i].flash, .contiguous = ways[i].contiguous};
        way->layer_bytes = ggml_row_size(way->type, elements);
        way->n_layers = bench_layers(way->layer_bytes);
        way->keys = keys->codes;
        way->values = values->codes;
        if (way->type != GGML_TYPE_F16) {
            uint8_t **quantised = &p->quantised[way->type == GGML_TYPE_Q4_0];
            if (!*quantised) *quantised = peer_quantise(way->type, way->layer_bytes, way->n_layers);
            way->keys = *quantised;
            way->values = *quantised + (size_t)way->n_layers * way->layer_bytes;
        }
        peer_graph(way);
    }
    return p;
}

void peer_add(peer *p, timing *t)
{
    for (int i = 0; i < p->n_ways; i++) timing_add(t, ways[i].name, peer_run, &p->ways[i]);
}

void peer_check(peer *p, const float *out)
{
    peer_way *way = &p->ways[1]; /* flash_f16_contiguous: the layout of tqkv's F16 stores */
    const size_t n = (size_t)ggml_nelements(way->out);
    const float *found = (const float *)way->out->data; /* [n_queries][n_heads][head_dim] */
    double wrong = 0.0, all = 0.0;
    if (p->shape.n_positions > 512) return; /* it accumulates in halves: the error grows with the context */
    way->layer = 0;
    peer_run(way);
    for (size_t i = 0; i < n; i++) {
        wrong += ((double)found[i] - out[i]) * ((double)found[i] - out[i]);
        all += (double)out[i] * out[i];
    }
    if (wrong <= 1e-4 * all) return;
    fprintf(stderr, "bench: ggml's result is not tqkv's: relative error %.3g\n", sqrt(wrong / all));
    exit(1);
}

void peer_close(peer *p)
{
    for (int i = 0; i < p->n_ways; i++) free(p->ways[i].work);
    free(p->quantised[0]);
    free(p->quantised[1]);
    ggml_threadpool_free(p->pool);
    ggml_free(p->context);
    free(p);
}

typedef struct peer_encoder {
    ggml_from_float_t convert;
    const float *source; /* [n] */
    int n;
    void *to;
} peer_encoder;

static void peer_encode(void *user)
{
    const peer_encoder *encoder = (const peer_encoder *)user;
    encoder->convert(encoder->source, encoder->to, encoder->n);
}

void peer_add_encoders(timing *t, const float *source, int n)
{
    static const struct {
        const char *name;
        enum ggml_type type;
    } types[] = {{"ggml_f16", GGML_TYPE_F16}, {"ggml_q8_0", GGML_TYPE_Q8_0}, {"ggml_q4_0", GGML_TYPE_Q4_0}};
    static peer_encoder encoders[3];
    ggml_cpu_init();
    for (int i = 0; i < 3; i++) {
        peer_encoder *encoder = &encoders[i];
        free(encoder->to);
        encoder->convert = ggml_get_type_traits_cpu(types[i].type)->from_float;
        encoder->source = source;
        encoder->n = n;
        encoder->to = bench_alloc(ggml_row_size(types[i].type, n));
        timing_add(t, types[i].name, peer_encode, encoder);
    }
}

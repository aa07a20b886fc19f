/* ggml's attention and conversion on one thread, for the benchmark. ggml has none of tqkv's formats; the nearest are
   f16, q8_0 (8.5 bits a value) and q4_0 (4.5). With PEER_IK: the ggml of ik_llama.cpp, which has q8_KV too (8 bits a
   value and one scale a row). */
#include "peer.h"

#include <ggml.h>
#include <math.h>
#ifdef PEER_IK
#define PEER_NAME      "ik_ggml_"
#define PEER_ALL_MASKS 1 /* its quick loops need one: a token's attention is up to 10 times slower without */
#else
#include <ggml-cpu.h>
#define PEER_NAME      "ggml_"
#define PEER_ALL_MASKS 0
#endif

enum { PEER_MAX_WAYS = 10, PEER_TYPES = 4, PEER_MASK_ROWS = 64 /* ik_llama.cpp: a multiple of this */ };

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
#ifndef PEER_IK
    struct ggml_threadpool *pool;
#endif
    struct ggml_tensor *q, *mask;
    const uint8_t *keys, *values;   /* the F16 streams */
    uint8_t *quantised[PEER_TYPES]; /* by the place in `types`: keys and values at once; [n_layers][layer_bytes] */
    peer_way ways[PEER_MAX_WAYS];
    int n_ways;
};

static const struct {
    const char *name;
    enum ggml_type type;
} types[] = {
    {PEER_NAME "f16", GGML_TYPE_F16},
    {PEER_NAME "q8_0", GGML_TYPE_Q8_0},
    {PEER_NAME "q4_0", GGML_TYPE_Q4_0},
#ifdef PEER_IK
    {PEER_NAME "q8_KV", GGML_TYPE_Q8_KV},
#endif
};
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static const struct {
    const char *name;
    int type; /* place in `types` */
    bool flash, contiguous;
} ways[] = {
    {PEER_NAME "flash_f16_strided", 0, true, false},   {PEER_NAME "flash_f16_contiguous", 0, true, true},
    {PEER_NAME "f16_strided", 0, false, false},        {PEER_NAME "f16_contiguous", 0, false, true},
    {PEER_NAME "flash_q8_0_strided", 1, true, false},  {PEER_NAME "flash_q8_0_contiguous", 1, true, true},
    {PEER_NAME "flash_q4_0_strided", 2, true, false},  {PEER_NAME "flash_q4_0_contiguous", 2, true, true},
#ifdef PEER_IK
    {PEER_NAME "flash_q8_KV_strided", 3, true, false}, {PEER_NAME "flash_q8_KV_contiguous", 3, true, true},
#endif
};

static ggml_from_float_t peer_from_float(enum ggml_type type)
{
#ifdef PEER_IK
    return ggml_internal_get_type_traits(type).from_float;
#else
    return ggml_get_type_traits_cpu(type)->from_float;
#endif
}

static void peer_run(void *user)
{
    peer_way *way = (peer_way *)user;
    const size_t offset = (size_t)way->layer * way->layer_bytes;
    way->layer = (way->layer + 1) % way->n_layers;
    way->k->data = (void *)(uintptr_t)(way->keys + offset); /* read only */
    way->v->data = (void *)(uintptr_t)(way->values + offset);
    if (ggml_graph_compute(way->graph, &way->plan) != GGML_STATUS_SUCCESS) {
        fprintf(stderr, "bench: " PEER_NAME " failed\n");
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
#ifdef PEER_IK
    way->plan = ggml_graph_plan(way->graph, 1);
#else
    way->plan = ggml_graph_plan(way->graph, 1, p->pool);
#endif
    way->work = bench_alloc(way->plan.work_size);
    way->plan.work_data = (uint8_t *)way->work;
}

/* Gaussian rows of the type: keys and values of each layer, the same in both layouts. */
static uint8_t *peer_quantise(enum ggml_type type, int head_dim, size_t layer_bytes, int n_layers)
{
    const size_t size = 2 * (size_t)n_layers * layer_bytes, row_bytes = ggml_row_size(type, head_dim);
    const int n = 65536 / head_dim; /* divides the rows of every shape */
    float *source = (float *)bench_alloc((size_t)n * (size_t)head_dim * sizeof *source);
    uint8_t *quantised = (uint8_t *)bench_alloc(size);
    bench_fill(source, (size_t)n * (size_t)head_dim, 5);
    for (int i = 0; i < n; i++)
        peer_from_float(type)(source + (size_t)i * (size_t)head_dim, quantised + (size_t)i * row_bytes, head_dim);
    bench_tile(quantised, (size_t)n * row_bytes, size);
    free(source);
    return quantised;
}

/* Query i sees the positions up to n_positions - n_queries + i; one query sees all. */
static struct ggml_tensor *peer_mask(peer *p)
{
    const int n = p->shape.n_positions, n_queries = p->shape.n_queries;
    if (n_queries == 1 && !PEER_ALL_MASKS) return NULL;
    const int n_rows = (n_queries + PEER_MASK_ROWS - 1) / PEER_MASK_ROWS * PEER_MASK_ROWS;
    struct ggml_tensor *mask = ggml_new_tensor_2d(p->context, GGML_TYPE_F16, n, n_rows);
    ggml_fp16_t *data = (ggml_fp16_t *)mask->data;
    for (int i = 0; i < n_rows; i++)
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

static void peer_open_way(peer *p, int index)
{
    const bench_shape *shape = &p->shape;
    peer_way *way = &p->ways[p->n_ways++];
    const enum ggml_type type = types[ways[index].type].type;
    *way = (peer_way){.owner = p, .type = type, .flash = ways[index].flash, .contiguous = ways[index].contiguous};
    way->layer_bytes = ggml_row_size(type, shape->head_dim) * (size_t)shape->n_positions * BENCH_KV_HEADS;
    way->n_layers = bench_layers(way->layer_bytes);
    way->keys = p->keys;
    way->values = p->values;
    if (type != GGML_TYPE_F16) {
        uint8_t **quantised = &p->quantised[ways[index].type];
        if (!*quantised) *quantised = peer_quantise(type, shape->head_dim, way->layer_bytes, way->n_layers);
        way->keys = *quantised;
        way->values = *quantised + (size_t)way->n_layers * way->layer_bytes;
    }
    peer_graph(way);
}

static peer *peer_open(const bench_shape *shape, const bench_stream *keys, const bench_stream *values, const float *q)
{
    const double rows = (double)BENCH_KV_HEADS * shape->group * shape->n_queries;
    if (2.0 * rows * shape->n_positions * shape->head_dim > PEER_MAX_MULTIPLY_ADDS) return NULL;
    peer *p = (peer *)bench_alloc(sizeof *p);
    memset(p, 0, sizeof *p);
    p->shape = *shape;
    p->keys = keys->codes;
    p->values = values->codes;
    const double masks = (double)PEER_MASK_ROWS * shape->n_positions;
    const double floats = 4 * rows * shape->n_positions + 16 * rows * shape->head_dim; /* scores of two ways, twice */
    p->context = ggml_init((struct ggml_init_params){.mem_size = (size_t)((floats + masks) * 4) + (16u << 20)});
#ifndef PEER_IK
    struct ggml_threadpool_params params = ggml_threadpool_params_default(1);
    p->pool = ggml_threadpool_new(&params);
#endif
    peer_queries(p, q);
    p->mask = peer_mask(p);
    for (int i = 0; i < COUNT(ways); i++) { /* those of halves come first; other types have blocks of 32 values */
        if (types[ways[i].type].type != GGML_TYPE_F16 && shape->head_dim % 32 != 0) break;
        peer_open_way(p, i);
    }
    return p;
}

static void peer_add(peer *p, timing *t)
{
    for (int i = 0; i < p->n_ways; i++) timing_add(t, ways[i].name, peer_run, &p->ways[i]);
}

static void peer_check(peer *p, const float *out)
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
    fprintf(stderr, "bench: " PEER_NAME ": the result is not tqkv's: relative error %.3g\n", sqrt(wrong / all));
    exit(1);
}

static void peer_close(peer *p)
{
    for (int i = 0; i < p->n_ways; i++) free(p->ways[i].work);
    for (int i = 0; i < PEER_TYPES; i++) free(p->quantised[i]);
#ifndef PEER_IK
    ggml_threadpool_free(p->pool);
#endif
    ggml_free(p->context);
    free(p);
}

typedef struct peer_encoder {
    ggml_from_float_t convert;
    const float *source; /* [n_rows][row_length] */
    int n_rows, row_length;
    size_t row_bytes;
    uint8_t *to;
} peer_encoder;

static void peer_encode(void *user)
{
    const peer_encoder *encoder = (const peer_encoder *)user;
    for (int i = 0; i < encoder->n_rows; i++)
        encoder->convert(encoder->source + (size_t)i * (size_t)encoder->row_length,
                         encoder->to + (size_t)i * encoder->row_bytes, encoder->row_length);
}

static void peer_add_encoders(timing *t, const float *source, int n_rows, int head_dim)
{
    static peer_encoder encoders[PEER_TYPES];
#ifdef PEER_IK
    ggml_free(ggml_init((struct ggml_init_params){.mem_size = 1024})); /* fills tables */
#else
    ggml_cpu_init();
#endif
    for (int i = 0; i < COUNT(types); i++) { /* in one call where rows have no scale of their own */
        peer_encoder *encoder = &encoders[i];
        const enum ggml_type type = types[i].type;
        const bool whole = ggml_row_size(type, 2 * head_dim) == 2 * ggml_row_size(type, head_dim);
        free(encoder->to);
        encoder->convert = peer_from_float(type);
        encoder->source = source;
        encoder->n_rows = whole ? 1 : n_rows;
        encoder->row_length = whole ? n_rows * head_dim : head_dim;
        encoder->row_bytes = ggml_row_size(type, encoder->row_length);
        encoder->to = (uint8_t *)bench_alloc((size_t)encoder->n_rows * encoder->row_bytes);
        timing_add(t, types[i].name, peer_encode, encoder);
    }
}

extern const peer_library peer_exports;
const peer_library peer_exports = {peer_open, peer_add, peer_check, peer_close, peer_add_encoders};

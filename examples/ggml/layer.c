/* The nodes of tqkv_ggml.h beside ggml's own: `layer` compares them with ggml's attention in F32, `layer --bench` measures
 * a layer's write and attention. Built and run by `make test-ggml GGML_PREFIX=...`. */
#include "examples/ggml/tqkv_ggml.h"

#include <ggml-cpu.h>
#include <math.h>
#include <stdio.h>
#include <time.h>

typedef struct shape {
    int n_heads, n_kv_heads, head_dim;
} shape;

static unsigned long long random_state = 1;

/* In [-1, 1); the same everywhere */
static float random_value(void)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (float)(int)(random_state >> 32) / 2147483648.0f;
}

static void fill(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = random_value() + random_value();
}

static void *take(size_t size)
{
    void *memory;
    if (posix_memalign(&memory, 64, size) == 0) return memory;
    fprintf(stderr, "out of memory\n");
    exit(1);
}

static void require(bool good, const char *what)
{
    if (good) return;
    fprintf(stderr, "layer: %s\n", what);
    exit(1);
}

static struct ggml_context *open_context(size_t bytes)
{
    const struct ggml_init_params params = {.mem_size = bytes};
    struct ggml_context *context = ggml_init(params);
    require(context, "ggml_init failed");
    return context;
}

/* ---- The comparison: three sequences, a prompt each, then some tokens ---- */

enum { SEQUENCES = 3, ROUNDS = 5, PAGE = 64, MOST = 2 * PAGE, POOL = 8 * PAGE };
static const shape small = {8, 2, 64};
static const int prompts[SEQUENCES] = {70, 5, 33};

/* One sequence as ggml's F32 sees it: rows [position][(n_heads + 2 * n_kv_heads) * head_dim], fused as q, k, v */
typedef struct history {
    float *rows;
    int n;
} history;

static int fused_row(void) { return (small.n_heads + 2 * small.n_kv_heads) * small.head_dim; }

/* Attention of the newest n_queries positions by ggml in F32; out: [query][head][dim] */
static void attend_f32(const history *h, int n_queries, float *out)
{
    struct ggml_context *c = open_context(64u << 20);
    const int n = h->n, d = small.head_dim;
    struct ggml_tensor *q = ggml_new_tensor_3d(c, GGML_TYPE_F32, d, n_queries, small.n_heads);
    struct ggml_tensor *k = ggml_new_tensor_3d(c, GGML_TYPE_F32, d, n, small.n_kv_heads);
    struct ggml_tensor *v = ggml_new_tensor_3d(c, GGML_TYPE_F32, n, d, small.n_kv_heads);
    struct ggml_tensor *mask = ggml_new_tensor_2d(c, GGML_TYPE_F32, n, n_queries);
    for (int p = 0; p < n; p++) {
        const float *row = h->rows + (size_t)p * (size_t)fused_row(), *keys = row + small.n_heads * d;
        const float *values = keys + small.n_kv_heads * d;
        const int query = p - (n - n_queries);
        for (int head = 0; head < small.n_heads && query >= 0; head++)
            memcpy((float *)q->data + (head * n_queries + query) * d, row + head * d, (size_t)d * sizeof *row);
        for (int head = 0; head < small.n_kv_heads; head++)
            for (int i = 0; i < d; i++) {
                ((float *)k->data)[(head * n + p) * d + i] = keys[head * d + i];
                ((float *)v->data)[(head * d + i) * n + p] = values[head * d + i];
            }
        for (int i = 0; i < n_queries; i++) ((float *)mask->data)[i * n + p] = p > n - n_queries + i ? -INFINITY : 0.0f;
    }
    struct ggml_tensor *scores = ggml_soft_max_ext(c, ggml_mul_mat(c, k, q), mask, 1.0f / sqrtf((float)d), 0.0f);
    struct ggml_tensor *result = ggml_mul_mat(c, v, scores); /* [head][query][dim] */
    struct ggml_cgraph *graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, result);
    require(ggml_graph_compute_with_ctx(c, graph, 1) == GGML_STATUS_SUCCESS, "ggml failed");
    for (int i = 0; i < n_queries; i++)
        for (int head = 0; head < small.n_heads; head++)
            memcpy(out + (i * small.n_heads + head) * d, (float *)result->data + (head * n_queries + i) * d,
                   (size_t)d * sizeof *out);
    ggml_free(c);
}

/* |a - b| / |b| */
static double distance(const float *a, const float *b, size_t n)
{
    double wrong = 0, all = 0;
    for (size_t i = 0; i < n; i++) {
        wrong += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        all += (double)b[i] * b[i];
    }
    return sqrt(wrong / all);
}

/* One graph: all tokens of the batch, from views into fused projections; out: [token][head][dim] */
static void compute(kv_layer *l, const float *fused, int n_tokens, int n_threads, float *out)
{
    struct ggml_context *c = open_context(16u << 20);
    const int d = small.head_dim;
    const size_t row = (size_t)fused_row() * sizeof(float), head = (size_t)d * sizeof(float);
    struct ggml_tensor *qkv = ggml_new_tensor_2d(c, GGML_TYPE_F32, fused_row(), n_tokens);
    memcpy(qkv->data, fused, row * (size_t)n_tokens);
    const size_t at_k = head * (size_t)small.n_heads, at_v = at_k + head * (size_t)small.n_kv_heads;
    struct ggml_tensor *q = ggml_view_3d(c, qkv, d, small.n_heads, n_tokens, head, row, 0);
    struct ggml_tensor *k = ggml_view_3d(c, qkv, d, small.n_kv_heads, n_tokens, head, row, at_k);
    struct ggml_tensor *v = ggml_view_3d(c, qkv, d, small.n_kv_heads, n_tokens, head, row, at_v);
    struct ggml_tensor *result = kv_attend(c, l, q, kv_write(c, l, k, v));
    struct ggml_cgraph *graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, result);
    require(ggml_graph_compute_with_ctx(c, graph, n_threads) == GGML_STATUS_SUCCESS, "ggml failed");
    require(l->result == TQKV_OK, tqkv_result_string(l->result));
    memcpy(out, result->data, ggml_nbytes(result));
    ggml_free(c);
}

/* Returns the largest distance from F32; all outputs go to `outs`, [ROUNDS][token][head][dim]. */
static double compare(tqkv_format keys, tqkv_format values, int page_size, int n_threads, float *outs)
{
    static int32_t pages[SEQUENCES][MOST];
    const size_t row = (size_t)fused_row(), wide = (size_t)(small.n_heads * small.head_dim);
    static kv_batch batch;
    kv_layer layer;
    history h[SEQUENCES];
    tqkv_team *team;
    double worst = 0;
    require(tqkv_team_create(NULL, &team) == TQKV_OK, "no team");
    require(kv_layer_open(&layer, keys, values, small.head_dim, small.n_kv_heads, POOL, &batch, team), "no layer");
    float *fused = (float *)take(MOST * SEQUENCES * row * sizeof *fused), *expected = (float *)take(MOST * wide * 4);
    for (int s = 0; s < SEQUENCES; s++) {
        h[s].rows = (float *)take(MOST * row * sizeof *h[s].rows);
        h[s].n = 0;
    }
    const int n_pages = MOST / page_size, all_pages = POOL / page_size; /* a power of two: times 5 shuffles them */
    for (int i = 0; i < SEQUENCES * n_pages; i++) pages[i % SEQUENCES][i / SEQUENCES] = (5 * i + 3) % all_pages;
    random_state = 1;
    for (int round = 0; round < ROUNDS; round++) {
        memset(&batch, 0, sizeof batch);
        batch.page_size = page_size;
        for (int s = 0; s < SEQUENCES; s++) {
            const int n = round ? 1 : prompts[s];
            float *to = fused + (size_t)batch.n_tokens * row;
            fill(to, (size_t)n * row);
            memcpy(h[s].rows + (size_t)h[s].n * row, to, (size_t)n * row * sizeof *to);
            require(kv_batch_add(&batch, pages[s], n_pages, h[s].n, n), "no room in the batch");
            h[s].n += n;
        }
        compute(&layer, fused, batch.n_tokens, n_threads, outs);
        for (int s = 0; s < SEQUENCES; s++) {
            const int n = batch.sequences[s].n_tokens;
            attend_f32(&h[s], n, expected);
            const double d = distance(outs + (size_t)batch.sequences[s].first * wide, expected, (size_t)n * wide);
            if (d > worst) worst = d;
        }
        outs += (size_t)batch.n_tokens * wide;
    }
    for (int s = 0; s < SEQUENCES; s++) free(h[s].rows);
    free(fused);
    free(expected);
    kv_layer_close(&layer);
    tqkv_team_destroy(team);
    return worst;
}

static int test(void)
{
    static const struct {
        tqkv_format keys, values;
        double limit;
    } pairs[] = {
        {TQKV_F16, TQKV_F16, 1e-3}, {TQKV_I8, TQKV_I8, 2e-2}, {TQKV_I8, TQKV_TQ4, 0.15}, {TQKV_TQ4, TQKV_TQ4, 0.3}};
    const size_t floats = (size_t)(MOST * SEQUENCES * small.n_heads * small.head_dim);
    float *alone = (float *)calloc(floats, sizeof *alone), *outs = (float *)calloc(floats, sizeof *outs);
    int passed = 0, failed = 0;
    require(alone && outs, "out of memory");
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (int run = 0; run < 4; run++) { /* one to three threads, then pages of one cell */
            const int n_threads = run < 3 ? run + 1 : 2, page_size = run < 3 ? PAGE : 1;
            const double d = compare(pairs[i].keys, pairs[i].values, page_size, n_threads, run ? outs : alone);
            const bool same = run == 0 || !memcmp(alone, outs, floats * sizeof *outs);
            const bool good = same && d < pairs[i].limit;
            good ? passed++ : failed++;
            if (!good)
                printf("FAIL %s/%s on %d threads, pages of %d: %.2g from F32, %s bits\n",
                       tqkv_format_name(pairs[i].keys), tqkv_format_name(pairs[i].values), n_threads, page_size, d,
                       same ? "the same" : "other");
        }
    free(alone);
    free(outs);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}

/* ---- The benchmark: a layer's write and attention, of a prompt's piece or of one token, at the end of n positions ---- */

typedef struct way {
    const char *name;
    tqkv_format keys, values; /* 0: ggml's */
    enum ggml_type type;
    bool flash;
} way;

static const way ways[] = {{"tqkv i8/tq4", TQKV_I8, TQKV_TQ4, GGML_TYPE_F32, false},
                           {"tqkv tq4/tq4", TQKV_TQ4, TQKV_TQ4, GGML_TYPE_F32, false},
                           {"tqkv i8/i8", TQKV_I8, TQKV_I8, GGML_TYPE_F32, false},
                           {"tqkv f16/f16", TQKV_F16, TQKV_F16, GGML_TYPE_F32, false},
                           {"ggml f16", (tqkv_format)0, (tqkv_format)0, GGML_TYPE_F16, false},
                           {"ggml f16 flash", (tqkv_format)0, (tqkv_format)0, GGML_TYPE_F16, true},
                           {"ggml q8_0 flash", (tqkv_format)0, (tqkv_format)0, GGML_TYPE_Q8_0, true},
                           {"ggml q4_0 flash", (tqkv_format)0, (tqkv_format)0, GGML_TYPE_Q4_0, true}};
enum { WAYS = sizeof ways / sizeof *ways };

typedef struct bench {
    const way *w;
    shape s;
    int n, n_tokens, n_threads; /* the newest n_tokens of n positions are written and attend */
    struct ggml_context *c;
    struct ggml_tensor *q, *k, *v; /* [token][head][dim] */
    struct ggml_cgraph *graph;
    kv_layer layer;
    kv_batch *batch;
    int32_t *pages;
    tqkv_team *team;
} bench;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void open_tqkv(bench *b)
{
    const int n_pages = (b->n + PAGE - 1) / PAGE, row = b->s.n_kv_heads * b->s.head_dim;
    float *rows = (float *)take((size_t)(PAGE * row) * sizeof *rows);
    require(tqkv_team_create(NULL, &b->team) == TQKV_OK, "no team");
    b->batch = (kv_batch *)calloc(1, sizeof *b->batch);
    b->pages = (int32_t *)take((size_t)n_pages * sizeof *b->pages);
    require(b->batch, "out of memory");
    for (int i = 0; i < n_pages; i++) b->pages[i] = n_pages - 1 - i;
    b->batch->page_size = PAGE;
    require(kv_batch_add(b->batch, b->pages, n_pages, b->n - b->n_tokens, b->n_tokens), "no room in the batch");
    require(kv_layer_open(&b->layer, b->w->keys, b->w->values, b->s.head_dim, b->s.n_kv_heads, n_pages * PAGE, b->batch,
                          b->team),
            "no layer");
    for (int i = 0; i < n_pages; i++) {
        fill(rows, (size_t)(PAGE * row));
        require(tqkv_encode(&b->layer.keys, rows, PAGE, (int64_t)i * PAGE) == TQKV_OK &&
                    tqkv_encode(&b->layer.values, rows, PAGE, (int64_t)i * PAGE) == TQKV_OK,
                "encode failed");
    }
    free(rows);
    ggml_build_forward_expand(b->graph, kv_attend(b->c, &b->layer, b->q, kv_write(b->c, &b->layer, b->k, b->v)));
}

/* Random rows of the type, the same piece over and over */
static void fill_tensor(struct ggml_tensor *t)
{
    enum { N = 32768 };
    static float values[N];
    const size_t piece = ggml_row_size(t->type, N), size = ggml_nbytes(t);
    uint8_t *bytes = (uint8_t *)take(piece);
    fill(values, N);
    if (t->type == GGML_TYPE_F16)
        ggml_fp32_to_fp16_row(values, (ggml_fp16_t *)(void *)bytes, N);
    else
        ggml_quantize_chunk(t->type, values, bytes, 0, 1, N, NULL);
    for (size_t at = 0; at < size; at += piece)
        memcpy((uint8_t *)t->data + at, bytes, size - at < piece ? size - at : piece);
    free(bytes);
}

/* The cache as engines on ggml keep it: keys [position][kv head][dim]; values likewise, but without flash attention
   [kv head][dim][position]. */
static void open_ggml(bench *b)
{
    const int d = b->s.head_dim, h = b->s.n_kv_heads, n = b->n, m = b->n_tokens, row = d * h;
    const enum ggml_type type = b->w->type;
    struct ggml_context *c = b->c;
    struct ggml_tensor *keys = ggml_new_tensor_2d(c, type, row, n);
    struct ggml_tensor *values =
        b->w->flash ? ggml_new_tensor_2d(c, type, row, n) : ggml_new_tensor_2d(c, type, n, row);
    struct ggml_tensor *slots = ggml_new_tensor_1d(c, GGML_TYPE_I64, m);
    struct ggml_tensor *mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, n, (m + 63) / 64 * 64);
    fill_tensor(keys);
    fill_tensor(values);
    for (int i = 0; i < m; i++) ((int64_t *)slots->data)[i] = n - m + i;
    for (int i = 0; i < (m + 63) / 64 * 64; i++)
        for (int p = 0; p < n; p++)
            ((ggml_fp16_t *)mask->data)[(size_t)i * (size_t)n + (size_t)p] =
                ggml_fp32_to_fp16(p > n - m + i ? -INFINITY : 0.0f);
    struct ggml_tensor *v = ggml_reshape_2d(c, b->v, row, m), *q = ggml_permute(c, b->q, 0, 2, 1, 3);
    ggml_build_forward_expand(b->graph, ggml_set_rows(c, keys, ggml_reshape_2d(c, b->k, row, m), slots));
    struct ggml_tensor *k_all = ggml_view_3d(c, keys, d, n, h, ggml_row_size(type, row), ggml_row_size(type, d), 0);
    const float scale = 1.0f / sqrtf((float)d);
    if (b->w->flash) {
        ggml_build_forward_expand(b->graph, ggml_set_rows(c, values, v, slots));
        struct ggml_tensor *v_all =
            ggml_view_3d(c, values, d, n, h, ggml_row_size(type, row), ggml_row_size(type, d), 0);
        ggml_build_forward_expand(b->graph, ggml_flash_attn_ext(c, q, k_all, v_all, mask, scale, 0.0f, 0.0f));
        return;
    }
    const size_t size = ggml_type_size(type), line = size * (size_t)n;
    struct ggml_tensor *new_values = ggml_view_2d(c, values, m, row, line, size * (size_t)(n - m));
    ggml_build_forward_expand(b->graph, ggml_cpy(c, ggml_transpose(c, v), new_values));
    struct ggml_tensor *v_all = ggml_view_3d(c, values, n, d, h, line, line * (size_t)d, 0);
    struct ggml_tensor *scores = ggml_soft_max_ext(c, ggml_mul_mat(c, k_all, q), mask, scale, 0.0f);
    ggml_build_forward_expand(b->graph, ggml_mul_mat(c, v_all, scores));
}

/* The median of the runs of a quarter of a second, at most nine, in milliseconds */
static double measure(bench *b)
{
    struct ggml_threadpool_params params = ggml_threadpool_params_default(b->n_threads);
    struct ggml_threadpool *pool = ggml_threadpool_new(&params);
    struct ggml_cplan plan = ggml_graph_plan(b->graph, b->n_threads, pool);
    double times[9], begin = seconds();
    int n = 0;
    plan.work_data = (uint8_t *)take(plan.work_size);
    if (b->n <= 8192) ggml_graph_compute(b->graph, &plan);
    while (n < 9 && (n < 1 || seconds() - begin < 0.25)) {
        const double start = seconds();
        require(ggml_graph_compute(b->graph, &plan) == GGML_STATUS_SUCCESS, "ggml failed");
        times[n++] = seconds() - start;
        for (int i = n - 1; i > 0 && times[i] < times[i - 1]; i--) {
            const double t = times[i];
            times[i] = times[i - 1];
            times[i - 1] = t;
        }
    }
    free(plan.work_data);
    ggml_threadpool_free(pool);
    return 1e3 * times[(n - 1) / 2];
}

static double bench_way(const way *w, shape s, int n, int n_tokens, int n_threads)
{
    bench b;
    memset(&b, 0, sizeof b);
    b.w = w;
    b.s = s;
    b.n = n;
    b.n_tokens = n_tokens;
    b.n_threads = n_threads;
    const size_t cache = 4 * (size_t)n * (size_t)(s.n_kv_heads * s.head_dim);
    const size_t scores = 2 * 4 * (size_t)n * (size_t)n_tokens * (size_t)s.n_heads, mask = 2 * (size_t)n * 192;
    b.c = open_context(cache + scores + mask + (64u << 20));
    b.q = ggml_new_tensor_3d(b.c, GGML_TYPE_F32, s.head_dim, s.n_heads, n_tokens);
    b.k = ggml_new_tensor_3d(b.c, GGML_TYPE_F32, s.head_dim, s.n_kv_heads, n_tokens);
    b.v = ggml_new_tensor_3d(b.c, GGML_TYPE_F32, s.head_dim, s.n_kv_heads, n_tokens);
    fill((float *)b.q->data, (size_t)ggml_nelements(b.q));
    fill((float *)b.k->data, (size_t)ggml_nelements(b.k));
    fill((float *)b.v->data, (size_t)ggml_nelements(b.v));
    b.graph = ggml_new_graph(b.c);
    w->keys ? open_tqkv(&b) : open_ggml(&b);
    const double ms = measure(&b);
    require(b.layer.result == TQKV_OK, tqkv_result_string(b.layer.result));
    if (w->keys) {
        kv_layer_close(&b.layer);
        tqkv_team_destroy(b.team);
        free(b.batch);
        free(b.pages);
    }
    ggml_free(b.c);
    return ms;
}

static int run_bench(int n_threads, int n_tokens)
{
    static const struct {
        shape s;
        int n;
    } places[] = {{{32, 8, 128}, 4096},
                  {{32, 8, 128}, 16384},
                  {{32, 8, 128}, 32768},
                  {{28, 4, 128}, 32768},
                  {{8, 4, 256}, 32768}};
    enum { PLACES = sizeof places / sizeof *places };
    printf("%d of n positions, %d threads, tqkv on %s: milliseconds a layer\n%-16s", n_tokens, n_threads,
           tqkv_isa_name(), "");
    for (int i = 0; i < PLACES; i++)
        printf(" %d/%dx%d:%d", places[i].s.n_heads, places[i].s.n_kv_heads, places[i].s.head_dim, places[i].n);
    printf("\n");
    for (int w = 0; w < WAYS; w++) {
        printf("%-16s", ways[w].name);
        for (int i = 0; i < PLACES; i++) {
            printf(" %14.2f", bench_way(&ways[w], places[i].s, places[i].n, n_tokens, n_threads));
            fflush(stdout);
        }
        printf("\n");
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 1) return test();
    if (argc == 4 && !strcmp(argv[1], "--bench")) return run_bench(atoi(argv[2]), atoi(argv[3]));
    fprintf(stderr, "usage: layer [--bench THREADS TOKENS]\n");
    return 2;
}

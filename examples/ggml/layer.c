/* The nodes of tqkv_ggml.h beside ggml's own: `layer` compares them with ggml's attention in F32, `layer --bench`
 * measures a layer's write and attention. Built and run by `make test-ggml GGML_PREFIX=...`. */
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
enum { HEADS = 8, KV_HEADS = 2, KEY_DIM = 64, VALUE_DIM = 96, WIDE = HEADS * VALUE_DIM };
/* A row of fused projections: q, k, v */
enum { AT_K = HEADS * KEY_DIM, AT_V = AT_K + KV_HEADS * KEY_DIM, FUSED = AT_V + KV_HEADS * VALUE_DIM };
static const int prompts[SEQUENCES] = {70, 5, 33};

/* How one comparison runs: with exact ends and a centre and scales of keys as a cache of a preset has them; `in_turn`:
 * tokens of the sequences in turn, each a run of its own. */
typedef struct setup {
    tqkv_format keys, values;
    int page_size, n_threads;
    bool preset, in_turn;
} setup;

/* One sequence as ggml's F32 sees it, and as a cache does. */
typedef struct history {
    float *rows; /* [position][FUSED] */
    int n;
    tqkv_cache *cache; /* or NULL */
} history;

/* Attention of the newest n_queries positions by ggml in F32; out: [query][head][VALUE_DIM] */
static void attend_f32(const history *h, int n_queries, float *out)
{
    struct ggml_context *c = open_context(64u << 20);
    const int n = h->n;
    struct ggml_tensor *q = ggml_new_tensor_3d(c, GGML_TYPE_F32, KEY_DIM, n_queries, HEADS);
    struct ggml_tensor *k = ggml_new_tensor_3d(c, GGML_TYPE_F32, KEY_DIM, n, KV_HEADS);
    struct ggml_tensor *v = ggml_new_tensor_3d(c, GGML_TYPE_F32, n, VALUE_DIM, KV_HEADS);
    struct ggml_tensor *mask = ggml_new_tensor_2d(c, GGML_TYPE_F32, n, n_queries);
    for (int p = 0; p < n; p++) {
        const float *row = h->rows + (size_t)p * FUSED;
        const int query = p - (n - n_queries);
        for (int head = 0; head < HEADS && query >= 0; head++)
            memcpy((float *)q->data + (head * n_queries + query) * KEY_DIM, row + head * KEY_DIM,
                   KEY_DIM * sizeof *row);
        for (int head = 0; head < KV_HEADS; head++) {
            memcpy((float *)k->data + (head * n + p) * KEY_DIM, row + AT_K + head * KEY_DIM, KEY_DIM * sizeof *row);
            for (int i = 0; i < VALUE_DIM; i++)
                ((float *)v->data)[(head * VALUE_DIM + i) * n + p] = row[AT_V + head * VALUE_DIM + i];
        }
        for (int i = 0; i < n_queries; i++) ((float *)mask->data)[i * n + p] = p > n - n_queries + i ? -INFINITY : 0.0f;
    }
    struct ggml_tensor *scores = ggml_soft_max_ext(c, ggml_mul_mat(c, k, q), mask, 1.0f / sqrtf((float)KEY_DIM), 0.0f);
    struct ggml_tensor *result = ggml_mul_mat(c, v, scores); /* [head][query][VALUE_DIM] */
    struct ggml_cgraph *graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, result);
    require(ggml_graph_compute_with_ctx(c, graph, 1) == GGML_STATUS_SUCCESS, "ggml failed");
    for (int i = 0; i < n_queries; i++)
        for (int head = 0; head < HEADS; head++)
            memcpy(out + (i * HEADS + head) * VALUE_DIM, (float *)result->data + (head * n_queries + i) * VALUE_DIM,
                   VALUE_DIM * sizeof *out);
    ggml_free(c);
}

/* The same by the sequence's cache, whose positions it appends; returns whether its bits are those of out. */
static bool same_as_cache(const history *h, int n_queries, const float *out)
{
    float *own = (float *)take((size_t)n_queries * (FUSED + WIDE) * sizeof *own);
    float *k = own + n_queries * WIDE, *v = k + n_queries * KV_HEADS * KEY_DIM,
          *q = v + n_queries * KV_HEADS * VALUE_DIM;
    for (int i = 0; i < n_queries; i++) {
        const float *row = h->rows + (size_t)(h->n - n_queries + i) * FUSED;
        memcpy(q + i * AT_K, row, AT_K * sizeof *q);
        memcpy(k + i * KV_HEADS * KEY_DIM, row + AT_K, KV_HEADS * KEY_DIM * sizeof *k);
        memcpy(v + i * KV_HEADS * VALUE_DIM, row + AT_V, KV_HEADS * VALUE_DIM * sizeof *v);
    }
    require(tqkv_cache_append(h->cache, k, v, n_queries) == TQKV_OK, "append failed");
    require(tqkv_cache_attend(h->cache, q, n_queries, own) == TQKV_OK, "attend failed");
    const bool same = !memcmp(own, out, (size_t)n_queries * WIDE * sizeof *own);
    free(own);
    return same;
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

/* One graph: all tokens of the batch, from views into fused projections; out: [token][head][VALUE_DIM] */
static void compute(tqkv_ggml_layer *l, const float *fused, int n_tokens, int n_threads, float *out)
{
    struct ggml_context *c = open_context(16u << 20);
    const size_t row = FUSED * sizeof(float), key = KEY_DIM * sizeof(float), value = VALUE_DIM * sizeof(float);
    struct ggml_tensor *qkv = ggml_new_tensor_2d(c, GGML_TYPE_F32, FUSED, n_tokens);
    memcpy(qkv->data, fused, row * (size_t)n_tokens);
    struct ggml_tensor *q = ggml_view_3d(c, qkv, KEY_DIM, HEADS, n_tokens, key, row, 0);
    struct ggml_tensor *k = ggml_view_3d(c, qkv, KEY_DIM, KV_HEADS, n_tokens, key, row, AT_K * sizeof(float));
    struct ggml_tensor *v = ggml_view_3d(c, qkv, VALUE_DIM, KV_HEADS, n_tokens, value, row, AT_V * sizeof(float));
    struct ggml_tensor *result = tqkv_ggml_attend(c, l, q, tqkv_ggml_write(c, l, k, v));
    struct ggml_cgraph *graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, result);
    require(ggml_graph_compute_with_ctx(c, graph, n_threads) == GGML_STATUS_SUCCESS, "ggml failed");
    require(l->result == TQKV_OK, tqkv_result_string(l->result));
    memcpy(out, result->data, ggml_nbytes(result));
    ggml_free(c);
}

/* What a layer and the caches of its sequences are made of: the first as the caches have it. */
typedef struct world {
    const setup *how;
    tqkv_cache_desc shape;
    float center[KV_HEADS * KEY_DIM], scales[KV_HEADS * KEY_DIM];
    tqkv_ggml_batch batch;
    tqkv_ggml_layer layer;
    tqkv_team *team;
    history h[SEQUENCES];
    int32_t pages[SEQUENCES][MOST];
} world;

static void open_world(world *w, const setup *how)
{
    memset(w, 0, sizeof *w);
    w->how = how;
    if (how->preset) w->shape = tqkv_cache_preset(TQKV_SMALL);
    w->shape.exact_last = how->preset ? 32 : 0;
    w->shape.calibrate = 0;
    w->shape.key_format = how->keys;
    w->shape.value_format = how->values;
    w->shape.head_dim = KEY_DIM;
    w->shape.value_dim = VALUE_DIM;
    w->shape.n_kv_heads = KV_HEADS;
    w->shape.n_heads = HEADS;
    w->shape.capacity = POOL;
    for (int i = 0; i < KV_HEADS * KEY_DIM; i++) {
        w->center[i] = 0.1f * (float)(i % 7);
        w->scales[i] = 0.5f + 0.25f * (float)(i % 5);
    }
    require(tqkv_team_create(NULL, &w->team) == TQKV_OK, "no team");
    require(tqkv_ggml_batch_open(&w->batch, how->page_size, &w->shape, SEQUENCES, MOST), "no batch");
    require(tqkv_ggml_layer_open(&w->layer, &w->shape, how->preset ? w->center : NULL, how->preset ? w->scales : NULL,
                                 &w->batch, w->team),
            "no layer");
    for (int s = 0; s < SEQUENCES; s++) {
        w->h[s].rows = (float *)take(MOST * FUSED * sizeof *w->h[s].rows);
        if (!how->preset) continue;
        require(tqkv_cache_create(&w->shape, &w->h[s].cache) == TQKV_OK &&
                    tqkv_cache_set_center(w->h[s].cache, w->center, NULL) == TQKV_OK &&
                    tqkv_cache_set_scale(w->h[s].cache, w->scales, NULL) == TQKV_OK,
                "no cache");
    }
    const int n_pages = MOST / how->page_size,
              all_pages = POOL / how->page_size; /* a power of two: times 5 shuffles them */
    for (int i = 0; i < SEQUENCES * n_pages; i++) w->pages[i % SEQUENCES][i / SEQUENCES] = (5 * i + 3) % all_pages;
}

static void close_world(world *w)
{
    for (int s = 0; s < SEQUENCES; s++) {
        free(w->h[s].rows);
        tqkv_cache_destroy(w->h[s].cache);
    }
    tqkv_ggml_layer_close(&w->layer);
    tqkv_ggml_batch_close(&w->batch);
    tqkv_team_destroy(w->team);
}

/* Adds the next n rows of a sequence to the batch. */
static void add_run(world *w, int s, int n, const float *rows, float *fused)
{
    history *h = &w->h[s];
    memcpy(fused + (size_t)w->batch.n_tokens * FUSED, rows, (size_t)n * FUSED * sizeof *rows);
    memcpy(h->rows + (size_t)h->n * FUSED, rows, (size_t)n * FUSED * sizeof *rows);
    require(tqkv_ggml_batch_add(&w->batch, s, w->pages[s], MOST / w->how->page_size, h->n, n), "no room in the batch");
    h->n += n;
}

/* Returns the largest distance from F32, or 9 where a cache has other bits; outs:
 * [ROUNDS][sequence][token][head][VALUE_DIM]. */
static double compare(const setup *how, float *outs)
{
    static world w;
    static float results[SEQUENCES * MOST * WIDE], expected[MOST * WIDE];
    float *fused = (float *)take(MOST * SEQUENCES * FUSED * sizeof *fused),
          *rows = (float *)take(MOST * SEQUENCES * FUSED * 4);
    double worst = 0;
    open_world(&w, how);
    random_state = 1;
    for (int round = 0; round < ROUNDS; round++) {
        tqkv_ggml_batch_begin(&w.batch, how->page_size);
        for (int s = 0; s < SEQUENCES; s++) fill(rows + s * MOST * FUSED, (size_t)((round ? 1 : prompts[s]) * FUSED));
        for (int i = 0; i < (how->in_turn ? MOST : 1); i++)
            for (int s = 0; s < SEQUENCES; s++) {
                const int n = round ? 1 : prompts[s];
                if (i < n) add_run(&w, s, how->in_turn ? 1 : n, rows + (s * MOST + i) * FUSED, fused);
            }
        compute(&w.layer, fused, w.batch.n_tokens, how->n_threads, results);
        for (int s = 0; s < SEQUENCES; s++) {
            const int n = round ? 1 : prompts[s];
            float *out = outs;
            for (int i = 0; i < w.batch.n_runs; i++) {
                const tqkv_ggml_run *run = &w.batch.runs[i];
                if (run->sequence != s) continue;
                memcpy(outs, results + run->first * WIDE, (size_t)run->n_tokens * WIDE * sizeof *outs);
                outs += run->n_tokens * WIDE;
            }
            attend_f32(&w.h[s], n, expected);
            const double d = distance(out, expected, (size_t)n * WIDE);
            if (d > worst) worst = d;
            if (w.h[s].cache && !same_as_cache(&w.h[s], n, out)) worst = 9;
        }
    }
    close_world(&w);
    free(fused);
    free(rows);
    return worst;
}

/* Decodes all keys, takes the negative and encodes every third slot again: the others keep their bytes. */
static bool shift_keeps_others(void)
{
    static const setup how = {TQKV_TQ6, TQKV_TQ4, 1, 2, false, false};
    static world w;
    float *rows = (float *)take(POOL * FUSED * sizeof *rows);
    struct ggml_context *c = open_context(16u << 20);
    open_world(&w, &how);
    tqkv_store *keys = &w.layer.keys, expected = *keys;
    fill(rows, POOL * KV_HEADS * KEY_DIM);
    require(tqkv_encode(keys, rows, POOL, 0) == TQKV_OK, "encode failed");
    require(tqkv_decode(keys, 0, POOL, TQKV_ORIGINAL, rows) == TQKV_OK, "decode failed");
    require(tqkv_ggml_store_open(&expected), "out of memory");
    memcpy(expected.codes, keys->codes, keys->codes_size);
    memcpy(expected.norms, keys->norms, keys->norms_size);
    for (int i = 0; i < POOL * KV_HEADS * KEY_DIM; i++) rows[i] = -rows[i];
    for (int i = 0; i < POOL; i += 3)
        require(tqkv_encode(&expected, rows + i * KV_HEADS * KEY_DIM, 1, i) == TQKV_OK, "encode failed");
    struct ggml_tensor *moved = ggml_new_tensor_1d(c, GGML_TYPE_I32, POOL);
    for (int i = 0; i < POOL; i++) ((int32_t *)moved->data)[i] = i % 3 == 0;
    struct ggml_tensor *result = tqkv_ggml_set_keys(c, &w.layer, ggml_neg(c, tqkv_ggml_keys(c, &w.layer)), moved);
    struct ggml_cgraph *graph = ggml_new_graph(c);
    require(result, "no node");
    ggml_build_forward_expand(graph, result);
    require(ggml_graph_compute_with_ctx(c, graph, 2) == GGML_STATUS_SUCCESS, "ggml failed");
    const bool same = w.layer.result == TQKV_OK && !memcmp(expected.codes, keys->codes, keys->codes_size) &&
                      !memcmp(expected.norms, keys->norms, keys->norms_size);
    tqkv_ggml_store_close(&expected);
    ggml_free(c);
    close_world(&w);
    free(rows);
    return same;
}

/* What a batch refuses, and a copy to other pages. */
static bool batch_refuses(void)
{
    static const setup how = {TQKV_TQ4, TQKV_TQ4, 16, 1, true, false};
    static const int32_t pages[4] = {0, 1, 2, 3}, none[4] = {0, -1, 2, 3}, far[4] = {0, INT32_MAX, 2, 3},
                         to[4] = {9, 8, 7, 6};
    static world w;
    bool good;
    open_world(&w, &how);
    tqkv_ggml_batch *b = &w.batch;
    good = !tqkv_ggml_batch_add(b, 0, none, 4, 10, 10) && !tqkv_ggml_batch_add(b, 0, far, 4, 10, 10);
    good = good && !tqkv_ggml_batch_add(b, 0, pages, 4, 60, 5) && !tqkv_ggml_batch_add(b, SEQUENCES, pages, 4, 0, 1);
    b->n_batch = 30;
    good = good && tqkv_ggml_batch_add(b, 0, pages, 4, 0, 20) && !tqkv_ggml_batch_add(b, 0, pages, 4, 20, 11);
    good = good && tqkv_ggml_batch_add(b, 1, to, 4, 0, 30) && tqkv_ggml_batch_add(b, 0, pages, 4, 20, 10);
    good = good && b->n_runs == 3 && b->n_tokens == 60 && b->slots[20] == 9 * 16 && b->slots[59] == 29;
    good = good && tqkv_ggml_copy(&w.layer, 16, pages, to, 4, 64) == TQKV_OK;
    good = good && tqkv_ggml_copy(&w.layer, 16, pages, pages, 4, 64) == TQKV_INVALID_ARGUMENT;
    good = good && (uintptr_t)w.layer.keys.codes % 64 == 0 && (uintptr_t)w.layer.values.norms % 64 == 0;
    close_world(&w);
    return good;
}

/* A table of pages out of cells, and what is none. */
static bool pages_of_cells(void)
{
    int32_t cells[10] = {8, 9, 10, 11, -1, -1, 2, 3, 4, 5}, pages[3];
    const bool whole = tqkv_ggml_pages(cells, 10, 4, pages) && pages[0] == 2 && pages[1] == 0 && pages[2] == 1;
    cells[9] = 6;
    const bool moved = tqkv_ggml_pages(cells, 10, 4, pages);
    cells[9] = 13;
    return whole && !moved && !tqkv_ggml_pages(cells, 10, 4, pages);
}

static int passed, failed;

static void report(bool good, const char *what)
{
    good ? passed++ : failed++;
    if (!good) printf("FAIL %s\n", what);
}

static int test(void)
{
    static const struct {
        tqkv_format keys, values;
        double limit;
    } pairs[] = {
        {TQKV_F16, TQKV_F16, 1e-3}, {TQKV_I8, TQKV_I8, 2e-2}, {TQKV_I8, TQKV_TQ4, 0.15}, {TQKV_TQ4, TQKV_TQ4, 0.3}};
    /* One to three threads, pages of one cell, tokens in turn. */
    static const setup ways[] = {{TQKV_F16, TQKV_F16, PAGE, 1, false, false},
                                 {TQKV_F16, TQKV_F16, PAGE, 2, false, false},
                                 {TQKV_F16, TQKV_F16, PAGE, 3, false, false},
                                 {TQKV_F16, TQKV_F16, 1, 2, false, false},
                                 {TQKV_F16, TQKV_F16, PAGE, 2, false, true}};
    const size_t floats = (size_t)MOST * SEQUENCES * WIDE;
    float *alone = (float *)calloc(floats, sizeof *alone), *outs = (float *)calloc(floats, sizeof *outs);
    char what[120];
    require(alone && outs, "out of memory");
    for (size_t i = 0; i < 2 * sizeof pairs / sizeof *pairs; i++)
        for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
            setup how = ways[way];
            how.keys = pairs[i / 2].keys;
            how.values = pairs[i / 2].values;
            how.preset = i % 2;
            const double d = compare(&how, way ? outs : alone);
            const bool same = way == 0 || !memcmp(alone, outs, floats * sizeof *outs);
            snprintf(what, sizeof what, "%s/%s%s, way %d: %.2g from F32, %s bits", tqkv_format_name(how.keys),
                     tqkv_format_name(how.values), how.preset ? " as a preset" : "", (int)way, d,
                     same ? "the same" : "other");
            report(same && d < pairs[i / 2].limit, what);
        }
    report(shift_keeps_others(), "a shift of every third slot");
    report(pages_of_cells(), "pages out of cells");
    report(batch_refuses(), "what a batch refuses, and a copy");
    free(alone);
    free(outs);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}

/* ---- The benchmark: a layer's write and attention, of a prompt's piece or of one token, at the end of n positions
 * ---- */

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
    tqkv_ggml_layer layer;
    tqkv_ggml_batch batch;
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
    b->pages = (int32_t *)take((size_t)n_pages * sizeof *b->pages);
    for (int i = 0; i < n_pages; i++) b->pages[i] = n_pages - 1 - i;
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.key_format = b->w->keys;
    desc.value_format = b->w->values;
    desc.head_dim = b->s.head_dim;
    desc.n_kv_heads = b->s.n_kv_heads;
    desc.n_heads = b->s.n_heads;
    desc.capacity = n_pages * PAGE;
    require(tqkv_ggml_batch_open(&b->batch, PAGE, NULL, 0, 0), "no batch");
    require(tqkv_ggml_batch_add(&b->batch, 0, b->pages, n_pages, b->n - b->n_tokens, b->n_tokens),
            "no room in the batch");
    require(tqkv_ggml_layer_open(&b->layer, &desc, NULL, NULL, &b->batch, b->team), "no layer");
    for (int i = 0; i < n_pages; i++) {
        fill(rows, (size_t)(PAGE * row));
        require(tqkv_encode(&b->layer.keys, rows, PAGE, (int64_t)i * PAGE) == TQKV_OK &&
                    tqkv_encode(&b->layer.values, rows, PAGE, (int64_t)i * PAGE) == TQKV_OK,
                "encode failed");
    }
    free(rows);
    ggml_build_forward_expand(b->graph,
                              tqkv_ggml_attend(b->c, &b->layer, b->q, tqkv_ggml_write(b->c, &b->layer, b->k, b->v)));
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
        tqkv_ggml_layer_close(&b.layer);
        tqkv_ggml_batch_close(&b.batch);
        tqkv_team_destroy(b.team);
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

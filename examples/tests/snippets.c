/* Runs the C code of README.md, the guides and tqkv.h's comments, which snippets.sh cuts out, and checks what
   it computes. */
#include "explain.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plain_engine.h"

#include "engine.h"

#include "fork.h"
#include "latent.h"
#include "padding.h"
#include "scaled_pool.h"
#include "sparse.h"
#include "speculation.h"
#include "store_snapshot.h"
#include "threads.h"
#include "typed.h"
#include "view.h"
#include "window.h"

/* Pairs of neighbours; in and out: [n_heads][head_dim] */
static void rotary(const float *in, int n_heads, int head_dim, int64_t position, float *out)
{
    for (int i = 0; i < n_heads * head_dim; i += 2) {
        float angle = (float)position * powf(100.0f, -(float)(i % head_dim) / (float)head_dim);
        float c = cosf(angle), s = sinf(angle), a = in[i], b = in[i + 1];
        out[i] = a * c - b * s;
        out[i + 1] = a * s + b * c;
    }
}

#include "context_shift.h"
#include "shared_prompt.h"

static int passed, failed;

static void check(const char *name, bool good)
{
    good ? passed++ : failed++;
    if (!good) printf("FAIL snippets/%s\n", name);
}

static void fill(float *values, int count)
{
    for (int i = 0; i < count; i++) values[i] = 4.0f * ((float)rand() / (float)RAND_MAX - 0.5f);
}

static void test_readme(void)
{
    enum { N = 3 };
    int n = N;
    static float k[N * 8 * 128], v[N * 8 * 128], q[N * 32 * 128], out[N * 32 * 128];
    fill(k, N * 8 * 128);
    for (int i = 0; i < N * 8 * 128; i++) v[i] = 1.0f; /* any average of ones is one */
    fill(q, N * 32 * 128);
#include "readme.h"
    double mean = 0;
    for (int i = 0; i < N * 32 * 128; i++) mean += out[i] / (N * 32.0 * 128.0);
    check("readme/result", result == TQKV_OK);
    check("readme/output", fabs(mean - 1.0) < 0.05);
}

enum { LAYERS = 2, HEADS = 8, KV_HEADS = 2, DIM = 64, TOKENS = 300, ROW = KV_HEADS * DIM, WIDE = HEADS * DIM };

static float k[TOKENS * ROW], v[TOKENS * ROW], q[TOKENS * WIDE]; /* [token][head][dim] */
static float expected[TOKENS * WIDE], out[TOKENS * WIDE], scratch[TOKENS * HEADS * (DIM + 4)];

/* |a - b| / |a| */
static double difference(const float *a, const float *b, int count)
{
    double wrong = 0, all = 0;
    for (int i = 0; i < count; i++) {
        wrong += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        all += (double)a[i] * a[i];
    }
    return sqrt(wrong / all);
}

static tqkv_cache *make_cache(tqkv_format format, int capacity, int window, tqkv_parallel parallel)
{
    tqkv_cache_desc desc = {.head_dim = DIM, .n_kv_heads = KV_HEADS, .n_heads = HEADS, .capacity = capacity};
    desc.key_format = desc.value_format = format;
    desc.ring = window > 0;
    desc.window = window;
    desc.parallel = parallel;
    tqkv_cache *cache = NULL;
    check("create", tqkv_cache_create(&desc, &cache) == TQKV_OK);
    return cache;
}

/* A cache of tokens [first, last), with room for some more. */
static tqkv_cache *cache_of(tqkv_format format, int first, int last)
{
    tqkv_cache *cache = make_cache(format, last - first + 8, 0, (tqkv_parallel){0});
    check("append", tqkv_cache_append(cache, k + first * ROW, v + first * ROW, last - first) == TQKV_OK);
    return cache;
}

/* The plain engine token by token, whose outputs are `expected`, and the one with tqkv. */
static void test_engine(void)
{
    plain_engine plain = {HEADS, KV_HEADS, DIM, TOKENS, NULL, NULL, NULL};
    plain.keys = (float *)calloc(LAYERS * TOKENS * ROW, sizeof(float));
    plain.values = (float *)calloc(LAYERS * TOKENS * ROW, sizeof(float));
    plain.scores = (float *)calloc(TOKENS, sizeof(float));
    engine e = {LAYERS, HEADS, KV_HEADS, DIM, TOKENS, {NULL}};
    bool good = engine_open(&e) == TQKV_OK;
    for (int t = 0; t < TOKENS; t++) {
        for (int layer = LAYERS - 1; layer >= 0; layer--) { /* the other layer's keys are these, scaled */
            float keys[ROW], values[ROW];
            for (int i = 0; i < ROW; i++) keys[i] = k[t * ROW + i] * (float)(1 - 2 * layer);
            for (int i = 0; i < ROW; i++) values[i] = v[t * ROW + i] * (float)(1 - 2 * layer);
            plain_attention(&plain, layer, t, q + t * WIDE, keys, values, expected + t * WIDE);
            good &= attention(&e, layer, q + t * WIDE, keys, values, out + t * WIDE) == TQKV_OK;
        }
    }
    check("engine/output", good && difference(expected, out, TOKENS * WIDE) < 0.2); /* 4-bit values, 10% each */
    check("engine/full", attention(&e, 0, q, k, v, out) == TQKV_OUT_OF_RANGE);
    check("speculation", keep_accepted(&e, 5, 2) == TQKV_OK && tqkv_cache_end(e.layers[1]) == TOKENS - 3);
    engine_close(&e);
    free(plain.keys);
    free(plain.values);
    free(plain.scores);
}

static void test_padding(void)
{
    enum { FROM = 72, TO = 80 };
    static float keys[TOKENS * KV_HEADS * FROM], values[TOKENS * KV_HEADS * FROM], scores[TOKENS];
    static float rows[2][KV_HEADS * FROM], wide[2][KV_HEADS * TO], query[HEADS * FROM], exact[HEADS * FROM];
    static float wide_query[HEADS * TO], wide_result[HEADS * TO], result[HEADS * FROM];
    plain_engine plain = {HEADS, KV_HEADS, FROM, TOKENS, keys, values, scores};
    tqkv_cache_desc desc = {.n_kv_heads = KV_HEADS, .n_heads = HEADS, .capacity = TOKENS};
    desc.key_format = desc.value_format = TQKV_F16;
    tqkv_cache *cache = NULL;
    fill(query, HEADS * FROM);
    bool good = create_72(desc, &cache) == TQKV_OK;
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < 2; i++) {
            fill(rows[i], KV_HEADS * FROM);
            resize_rows(rows[i], KV_HEADS, FROM, wide[i], TO);
        }
        good &= tqkv_cache_append(cache, wide[0], wide[1], 1) == TQKV_OK;
        plain_attention(&plain, 0, t, query, rows[0], rows[1], exact);
    }
    resize_rows(query, HEADS, FROM, wide_query, TO);
    check("padding/attend", tqkv_cache_attend(cache, wide_query, 1, wide_result) == TQKV_OK);
    resize_rows(wide_result, HEADS, TO, result, FROM);
    check("padding/output", good && difference(exact, result, HEADS * FROM) < 1e-3);
    tqkv_cache_destroy(cache);
}

/* Values that are all one, in bfloat16: their average is one, and TQ4's error vanishes but for its constant part. */
static void test_typed(void)
{
    static uint16_t keys[TOKENS * KV_HEADS * 192], values[TOKENS * KV_HEADS * 128], query[HEADS * 192],
        output[HEADS * 128];
    for (int i = 0; i < TOKENS * KV_HEADS * 192; i++) keys[i] = (uint16_t)(0x3f00 + rand() % 256); /* 0.5 to 2 */
    for (int i = 0; i < TOKENS * KV_HEADS * 128; i++) values[i] = 0x3f80;
    for (int i = 0; i < HEADS * 192; i++) query[i] = (uint16_t)(0x3f00 + rand() % 256);
    check("typed/attend", attend_bfloat16(HEADS, KV_HEADS, keys, values, TOKENS, query, output) == TQKV_OK);
    double mean = 0;
    for (int i = 0; i < HEADS * 128; i++) {
        const uint32_t bits = (uint32_t)output[i] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        mean += value / (HEADS * 128.0);
    }
    check("typed/output", fabs(mean - 1.0) < 0.05);
}

static int run_header_example(void)
{
#include "header_example.h"
    return 0;
}

static void test_header_example(void)
{
    for (int i = 0; i < 8 * 128; i++) v[i] = 1.0f + (float)(i / 128); /* of a KV head all the same */
    check("header/example", run_header_example() == 0);
    check("header/output", fabsf(out[5 * 128] - 2.0f) < 0.5f); /* of the only position; four heads read a KV head */
    fill(v, 8 * 128);
}

static void test_threads_and_window(void)
{
    static float other[TOKENS * WIDE];
    tqkv_parallel parallel = {run_openmp, NULL};
    tqkv_cache *ring = make_cache(TQKV_TQ6, 80, 50, parallel), *whole = make_cache(TQKV_TQ6, TOKENS, 0, parallel);
    check("window/prefill", prefill(ring, 50, HEADS, q, k, v, TOKENS, out) == TQKV_OK);
    check("window/append", tqkv_cache_append(whole, k, v, TOKENS) == TQKV_OK);
    tqkv_attention a = view(whole, TOKENS);
    a.window = 50;
    check("window/attend", tqkv_attend(&a, q, expected) == TQKV_OK);
    check("window/output", difference(expected, out, TOKENS * WIDE) < 3e-4);
    a.parallel = parallel;
    check("threads/attend", tqkv_attend(&a, q, other) == TQKV_OK);
    check("threads/same bits", memcmp(expected, other, sizeof other) == 0);
    tqkv_cache_destroy(ring);
    tqkv_cache_destroy(whole);
}

/* The first 200 tokens in one cache and the rest in another, against one cache of all. */
static void test_slices(void)
{
    tqkv_cache *whole = cache_of(TQKV_TQ4, 0, TOKENS), *prompt = cache_of(TQKV_TQ4, 0, 200),
               *own = cache_of(TQKV_TQ4, 200, TOKENS), *exact = cache_of(TQKV_F16, 0, TOKENS),
               *recent = cache_of(TQKV_F16, 200, TOKENS), *old = cache_of(TQKV_TQ8, 0, 200);
    for (int n = 1; n <= 5; n += 4) {
        check("slices/whole", tqkv_cache_attend(whole, q, n, expected) == TQKV_OK);
        check("shared_prompt/attend", attend_shared(prompt, own, HEADS, n, q, out, scratch) == TQKV_OK);
        check("shared_prompt/output", difference(expected, out, n * WIDE) < 3e-4);
    }
    check("slices/exact", tqkv_cache_attend(exact, q, 1, expected) == TQKV_OK);
    check("shared_prompt/formats", attend_shared(old, recent, HEADS, 1, q, out, scratch) == TQKV_OK);
    check("shared_prompt/formats_output", difference(expected, out, WIDE) < 0.02);
    tqkv_cache *caches[] = {whole, prompt, own, exact, recent, old};
    for (int i = 0; i < 6; i++) tqkv_cache_destroy(caches[i]);
}

/* A cache by a preset that learns from 64 positions, of the tokens [first, last). */
static tqkv_cache *cache_by(int preset, int first, int last)
{
    tqkv_cache *cache = NULL;
    tqkv_cache_desc desc = tqkv_cache_preset((tqkv_preset)preset);
    desc.head_dim = DIM;
    desc.n_kv_heads = KV_HEADS;
    desc.n_heads = HEADS;
    desc.capacity = 1024;
    desc.calibrate = 64;
    check("preset/create", tqkv_cache_create(&desc, &cache) == TQKV_OK);
    check("preset/append", tqkv_cache_append(cache, k + first * ROW, v + first * ROW, last - first) == TQKV_OK);
    return cache;
}

/* Prompts and parts that have learned, or have not: [first, cut) and [cut, last). */
static void test_shared_presets(void)
{
    static const int cuts[4][3] = {{0, 200, 300}, {0, 250, 300}, {200, 250, 300}, {150, 180, 300}};
    static const double limits[3] = {0.15, 0.25, 0.5};
    for (int i = 0; i < 12; i++) {
        const int *cut = cuts[i / 3];
        tqkv_cache *whole = cache_of(TQKV_F16, cut[0], cut[2]), *prompt = cache_by(i % 3, cut[0], cut[1]),
                   *own = cache_by(i % 3, cut[1], cut[2]);
        check("shared_prompt/whole", tqkv_cache_attend(whole, q, 1, expected) == TQKV_OK);
        check("shared_prompt/preset", attend_shared(prompt, own, HEADS, 1, q, out, scratch) == TQKV_OK);
        check("shared_prompt/preset_output", difference(expected, out, WIDE) < limits[i % 3]);
        tqkv_cache_destroy(whole);
        tqkv_cache_destroy(prompt);
        tqkv_cache_destroy(own);
    }
}

/* A copy goes on apart, beyond the capacity of the first. */
static void test_fork(void)
{
    tqkv_cache *cache = cache_of(TQKV_TQ6, 0, 100), *copy = NULL;
    check("fork/fork", fork_layer(cache, TOKENS, &copy) == TQKV_OK && tqkv_cache_end(copy) == 100);
    check("fork/append", tqkv_cache_append(copy, k + 100 * ROW, v + 100 * ROW, TOKENS - 100) == TQKV_OK);
    check("fork/apart", tqkv_cache_end(cache) == 100 && tqkv_cache_end(copy) == TOKENS);
    tqkv_cache_destroy(cache);
    tqkv_cache_destroy(copy);
}

/* Rows of k turned to positions first, first + 1 ... and appended with their values. */
static void append_turned(tqkv_cache *cache, int token, int n_tokens, int first)
{
    float row[ROW];
    for (int t = token; t < token + n_tokens; t++) {
        rotary(k + t * ROW, KV_HEADS, DIM, first + t - token, row);
        check("context_shift/append", tqkv_cache_append(cache, row, v + t * ROW, 1) == TQKV_OK);
    }
}

/* 4 of 100 positions kept, then 30 dropped, then 20 new ones, against a cache whose keys are turned to where they are
 * now. */
static void test_context_shift(void)
{
    enum { OLD = 100, KEPT = 4, DROPPED = 30, NEW = 20, LEFT = OLD - DROPPED + NEW };
    tqkv_cache *shifted = make_cache(TQKV_F16, OLD, 0, (tqkv_parallel){0}),
               *moved = make_cache(TQKV_F16, OLD, 0, (tqkv_parallel){0});
    segment segments[] = {{KEPT, 0}, {LEFT - KEPT, DROPPED}}, unturned[] = {{LEFT, 0}};
    append_turned(shifted, 0, OLD, 0);
    check("context_shift/remove", tqkv_cache_remove(shifted, KEPT, DROPPED) == TQKV_OK);
    append_turned(shifted, OLD, NEW, OLD);
    append_turned(moved, 0, KEPT, 0);
    append_turned(moved, KEPT + DROPPED, LEFT - KEPT, KEPT);
    check("context_shift/moved", attend_segments(moved, unturned, 1, HEADS, q, expected, scratch) == TQKV_OK);
    check("context_shift/shifted", attend_segments(shifted, segments, 2, HEADS, q, out, scratch) == TQKV_OK);
    check("context_shift/output", difference(expected, out, WIDE) < 1e-3); /* keys of 11 bits */
    check("context_shift/without", attend_segments(shifted, unturned, 1, HEADS, q, out, scratch) == TQKV_OK);
    check("context_shift/changes", difference(expected, out, WIDE) > 0.01);
    tqkv_cache_destroy(shifted);
    tqkv_cache_destroy(moved);
}

/* Bytes in memory, written and read from the start. */
typedef struct memory_file {
    unsigned char bytes[1 << 16];
    size_t size, at;
} memory_file;

static size_t write_memory(void *user, const void *bytes, size_t n)
{
    memory_file *file = user;
    if (n > sizeof file->bytes - file->size) return 0;
    memcpy(file->bytes + file->size, bytes, n);
    file->size += n;
    return n;
}

static size_t read_memory(void *user, void *bytes, size_t n)
{
    memory_file *file = user;
    n = n < file->size - file->at ? n : file->size - file->at;
    memcpy(bytes, file->bytes + file->at, n);
    file->at += n;
    return n;
}

/* A sequence leaves two pages of a pool and comes back into two others. */
static void test_store_snapshot(void)
{
    enum { POOL = 4 * 64, N = 100 };
    static memory_file file;
    static unsigned char codes[KV_HEADS * POOL * DIM];
    static float norms[KV_HEADS * POOL], decoded[N * ROW], again[N * ROW];
    int32_t pages[] = {2, 0};
    tqkv_store s = {.format = TQKV_I8, .head_dim = DIM, .n_kv_heads = KV_HEADS, .capacity = POOL};
    s.codes = codes;
    s.codes_size = sizeof codes;
    s.norms = norms;
    s.norms_size = sizeof norms;
    s.pages = pages;
    s.n_pages = 2;
    s.page_size = 64;
    check("store_snapshot/encode", tqkv_encode(&s, k, N, 0) == TQKV_OK);
    check("store_snapshot/decode", tqkv_decode(&s, 0, N, TQKV_ORIGINAL, decoded) == TQKV_OK);
    check("store_snapshot/park", park(&s, N, write_memory, &file) == TQKV_OK);
    memset(codes, 0, sizeof codes);
    pages[0] = 1;
    pages[1] = 3;
    check("store_snapshot/resume", resume(&s, N, read_memory, &file) == TQKV_OK);
    check("store_snapshot/again", tqkv_decode(&s, 0, N, TQKV_ORIGINAL, again) == TQKV_OK);
    check("store_snapshot/same", memcmp(decoded, again, sizeof again) == 0);
}

/* With k above the number of positions sparse attention is attention. */
static void test_sparse(void)
{
    enum { KEYS = 128 };
    tqkv_cache *cache = cache_of(TQKV_TQ4, 0, TOKENS);
    static unsigned char codes[TOKENS * KEYS];
    static float norms[TOKENS], index_q[4 * KEYS], scores[TOKENS], keys[TOKENS * KEYS];
    static int32_t list[TOKENS + 4];
    tqkv_store store = {.format = TQKV_I8, .head_dim = KEYS, .n_kv_heads = 1, .capacity = TOKENS};
    store.codes = codes;
    store.codes_size = sizeof codes;
    store.norms = norms;
    store.norms_size = sizeof norms;
    tqkv_index index = {
        .keys = &store, .n_heads = 4, .n_queries = 1, .end = TOKENS, .ratio = 1, .block = 1, .relu = true};
    fill(keys, TOKENS * KEYS);
    fill(index_q, 4 * KEYS);
    bool good = tqkv_encode(&store, keys, TOKENS, 0) == TQKV_OK;
    good &= attend_sparse(cache, &index, index_q, TOKENS + 4, scores, list, q, out) == TQKV_OK;
    check("sparse/all",
          good && tqkv_cache_attend(cache, q, 1, expected) == TQKV_OK && !memcmp(out, expected, WIDE * sizeof *out));
    good = attend_sparse(cache, &index, index_q, TOKENS / 2, scores, list, q, out) == TQKV_OK;
    check("sparse/half", good && memcmp(out, expected, WIDE * sizeof *out) != 0);
    tqkv_cache_destroy(cache);
}

/* Of one position all heads get the latent, but for its error. */
static void test_latent(void)
{
    enum { LATENT = 512, ROW_DIM = 576, LATENT_HEADS = 64 };
    static float row[ROW_DIM], queries[LATENT_HEADS * ROW_DIM], sums[LATENT_HEADS * LATENT];
    double error = 0.0, size = 0.0;
    fill(row, ROW_DIM);
    fill(queries, LATENT_HEADS * ROW_DIM);
    check("latent/attend", attend_latent(row, 1, queries, sums) == TQKV_OK);
    for (int i = 0; i < LATENT_HEADS * LATENT; i++) {
        const double wrong = (double)sums[i] - (double)row[i % LATENT];
        error += wrong * wrong;
        size += (double)row[i % LATENT] * (double)row[i % LATENT];
    }
    check("latent/rows", error < 0.02 * size);
}

/* Keys with some channels a thousand times as large as the others: with the pool's scale these are kept, too. */
static void test_scaled_pool(void)
{
    enum { N = 100 };
    static unsigned char codes[KV_HEADS * N * DIM / 2];
    static float norms[KV_HEADS * N], keys[N * ROW], decoded[N * ROW], center[ROW], scale[ROW];
    tqkv_store pool = {.format = TQKV_TQ4, .head_dim = DIM, .n_kv_heads = KV_HEADS, .capacity = N};
    double errors[2] = {0.0, 0.0};
    pool.codes = codes;
    pool.codes_size = sizeof codes;
    pool.norms = norms;
    pool.norms_size = sizeof norms;
    fill(keys, N * ROW);
    for (int i = 0; i < N * ROW; i += 8) keys[i] *= 1000.0f;
    for (int scaled = 0; scaled < 2; scaled++) {
        if (scaled) check("scaled_pool/calibrate", scale_pool(&pool, keys, N, center, scale) == TQKV_OK);
        check("scaled_pool/encode", tqkv_encode(&pool, keys, N, 0) == TQKV_OK);
        check("scaled_pool/decode", tqkv_decode(&pool, 0, N, TQKV_ORIGINAL, decoded) == TQKV_OK);
        for (int i = 0; i < N * ROW; i++)
            if (i % 8) errors[scaled] += pow((double)keys[i] - (double)decoded[i], 2.0);
    }
    check("scaled_pool/error", errors[1] < 0.05 * errors[0]);
}

int main(void)
{
    fill(k, TOKENS * ROW);
    fill(v, TOKENS * ROW);
    fill(q, TOKENS * WIDE);
    test_readme();
    test_engine();
    test_padding();
    test_typed();
    test_latent();
    test_sparse();
    test_header_example();
    test_threads_and_window();
    test_slices();
    test_fork();
    test_shared_presets();
    test_context_shift();
    test_store_snapshot();
    test_scaled_pool();
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}

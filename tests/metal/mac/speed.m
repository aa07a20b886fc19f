/* What a token and a prompt cost: speed LIBRARY [--tiny]. At shapes that models of 2026 have, caches of half floats, of I8
   keys with TQ4 values and of TQ4, from 4,096 to 131,072 positions. Times are of the GPU's queue: several calls in one
   command buffer, the best of three. GB/s counts codes and norms once a call. `share` is of the time of half floats.
   --tiny: one shape at 64 positions, to see that it runs. */
#define TQKV_IMPLEMENTATION
#include "report.h"
#include "tqkv.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 2048, LENGTHS = 4 };

static int prompt = 128, rounds = 3, calls = 16;

typedef struct shape {
    int n_heads, n_kv_heads, head_dim;
    const char *models;
} shape;

static const shape shapes[] = {{32, 8, 128, "Llama 3, Qwen3, Mistral"},
                               {32, 4, 128, "Qwen3 30B-A3B, MiMo"},
                               {24, 4, 256, "Qwen3.6 27B"},
                               {64, 8, 64, "gpt-oss"},
                               {64, 1, 512, "DeepSeek V4"}};
static const tqkv_format pairs[][2] = {{TQKV_F16, TQKV_F16}, {TQKV_I8, TQKV_TQ4}, {TQKV_TQ4, TQKV_TQ4}};

/* A cache, and calls to record into one command buffer. */
typedef struct work {
    tqkv_metal *m;
    tqkv_cache *cache;
    tqkv_metal_buffer k, v, q, out, scratch;
    int n_tokens, n_queries, n_calls;
} work;

static tqkv_result record_appends(void *user, tqkv_metal_object encoder)
{
    const work *w = (const work *)user;
    const tqkv_metal_buffer none = {nil, 0};
    return tqkv_metal_cache_append(w->m, encoder, w->cache, w->k, w->v, w->n_tokens, none);
}

static tqkv_result record_attends(void *user, tqkv_metal_object encoder)
{
    const work *w = (const work *)user;
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < w->n_calls && r == TQKV_OK; i++)
        r = tqkv_metal_cache_attend(w->m, encoder, w->cache, w->q, w->n_queries, w->scratch, w->out);
    return r;
}

static bool succeeded(tqkv_metal *m, const char *what, tqkv_result r)
{
    char text[400];
    if (r == TQKV_OK) return true;
    tqkv_metal_error(m, text, sizeof text);
    printf("failed: %s: %s: %s\n", what, tqkv_result_string(r), text);
    return false;
}

/* Seconds of one call with so many queries; 0 if it failed. A round before the first builds pipelines. */
static double time_attends(work *w, int n_queries, int n_calls)
{
    double best = 1e9;
    w->n_queries = n_queries;
    w->n_calls = n_calls;
    for (int i = 0; i <= rounds; i++) {
        const double start = report_seconds();
        if (!succeeded(w->m, "attend", tqkv_metal_run(w->m, record_attends, w))) return 0;
        if (i) best = fmin(best, (report_seconds() - start) / n_calls);
    }
    return best;
}

static bool fill_to(work *w, int length)
{
    while (tqkv_cache_end(w->cache) < length) {
        const int left = length - (int)tqkv_cache_end(w->cache);
        w->n_tokens = left < CHUNK ? left : CHUNK;
        if (!succeeded(w->m, "append", tqkv_metal_run(w->m, record_appends, w))) return false;
    }
    return true;
}

/* *halves: seconds of half floats, or 0 where these are they */
static void time_prompt(work *w, const shape *s, const char *what, int length, double *halves)
{
    const double t = time_attends(w, prompt, 1);
    const double operations = 4.0 * s->n_heads * s->head_dim * (double)prompt * length;
    if (*halves <= 0) *halves = t;
    if (t > 0)
        printf("prompt %s, %d queries over %d positions: %.2f ms, %.2f Tflop/s, share %.2f\n", what, prompt, length,
               t * 1e3, operations / t * 1e-12, t / *halves);
}

/* One pair of formats of a shape at all lengths. halves: seconds of half floats, by length, then of the prompt */
static void time_pair(work *w, const shape *s, int pair, const int *lengths, double halves[LENGTHS + 1])
{
    char what[80];
    const tqkv_format key = pairs[pair][0], value = pairs[pair][1];
    snprintf(what, sizeof what, "%d/%d of %d, %s/%s", s->n_heads, s->n_kv_heads, s->head_dim, tqkv_format_name(key),
             tqkv_format_name(value));
    for (int i = 0; i < LENGTHS && lengths[i]; i++) {
        if (!fill_to(w, lengths[i])) return;
        const double bytes = (double)tqkv_cache_bytes(w->cache) * lengths[i] / tqkv_cache_keys(w->cache)->capacity;
        const double t = time_attends(w, 1, lengths[i] > 65536 ? calls / 4 : calls);
        if (pair == 0) halves[i] = t;
        if (t > 0)
            printf("token %s, %d positions: %.3f ms, %.1f GB/s, share %.2f\n", what, lengths[i], t * 1e3,
                   bytes / t * 1e-9, halves[i] > 0 ? t / halves[i] : 0);
        if (i == 0) time_prompt(w, s, what, lengths[i], &halves[LENGTHS]);
    }
}

/* Shared memory for the rows of all calls; false if there is none. */
static bool open_rows(work *w, const shape *s)
{
    const tqkv_allocator memory = tqkv_metal_allocator(w->m);
    size_t scratch = 0;
    const size_t kv = sizeof(float) * CHUNK * (size_t)(s->n_kv_heads * s->head_dim),
                 q = sizeof(float) * (size_t)(prompt * s->n_heads * s->head_dim);
    if (!succeeded(w->m, "scratch", tqkv_metal_cache_scratch(w->m, w->cache, prompt, &scratch))) return false;
    size_t one = 0;
    tqkv_metal_cache_scratch(w->m, w->cache, 1, &one);
    if (one > scratch) scratch = one;
    char *block = (char *)memory.alloc(memory.user, 2 * kv + 2 * q + scratch);
    if (!block) return false;
    report_fill((float *)(void *)block, (2 * kv + q) / sizeof(float), 7);
    tqkv_metal_buffer *const parts[] = {&w->k, &w->v, &w->q, &w->out, &w->scratch};
    const size_t sizes[] = {kv, kv, q, q, scratch};
    for (int i = 0; i < 5; block += sizes[i++])
        if (!succeeded(w->m, "rows", tqkv_metal_find(w->m, block, parts[i]))) return false;
    return true;
}

static void time_shape(tqkv_metal *m, const shape *s, const int *lengths)
{
    double halves[LENGTHS + 1] = {0};
    const tqkv_allocator memory = tqkv_metal_allocator(m);
    printf("shape %d/%d of %d (%s)\n", s->n_heads, s->n_kv_heads, s->head_dim, s->models);
    for (int pair = 0; pair < 3; pair++) {
        work w = {.m = m};
        tqkv_cache_desc desc = {
            .head_dim = s->head_dim, .n_kv_heads = s->n_kv_heads, .n_heads = s->n_heads, .metal = m};
        for (int i = 0; i < LENGTHS && lengths[i]; i++) desc.capacity = lengths[i];
        desc.key_format = pairs[pair][0];
        desc.value_format = pairs[pair][1];
        if (!succeeded(m, "cache", tqkv_cache_create(&desc, &w.cache))) continue;
        @autoreleasepool {
            if (open_rows(&w, s)) time_pair(&w, s, pair, lengths, halves);
            if (w.k.buffer) memory.free(memory.user, [(id<MTLBuffer>)w.k.buffer contents], 0);
        }
        tqkv_cache_destroy(w.cache);
    }
}

int main(int argc, char **argv)
{
    static const int usual[LENGTHS] = {4096, 16384, 32768, 131072}, tiny[LENGTHS] = {64};
    if (argc < 2) return 2;
    report_begin();
    const bool is_tiny = argc > 2 && !strcmp(argv[2], "--tiny");
    if (is_tiny) prompt = 2, rounds = 1, calls = 1;
    NSAutoreleasePool *pool = [[NSAutoreleasePool alloc] init];
    char error[400] = "";
    tqkv_metal_desc desc = {.error = error, .error_size = sizeof error, .library_path = argv[1]};
    tqkv_metal *m = NULL;
    if (tqkv_metal_create(&desc, &m) != TQKV_OK) return printf("failed: %s\n", error), 1;
    const int n = (int)(sizeof shapes / sizeof *shapes);
    for (int i = is_tiny ? n - 2 : 0; i < (is_tiny ? n - 1 : n); i++) time_shape(m, &shapes[i], is_tiny ? tiny : usual);
    tqkv_metal_destroy(m);
    [pool release];
    return 0;
}

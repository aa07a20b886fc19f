/* What a token and a prompt cost: speed LIBRARY [--tiny]. At shapes that models of 2026 have, caches of half floats, of
   I8 keys with TQ4 values and of TQ4, from 512 to 131,072 positions; groups of 4 and 8 by lanes and by matrices. Times
   are the GPU's own, of several calls in one command buffer, the best of some rounds after 0.3 s of the same work:
   an idle GPU has a low clock. GB/s counts codes and norms once a call. `share` is of the time of half floats. First
   comes tqkv's test of itself, without pipelines and with them. --tiny: one shape at 64 positions, to see that it
   runs. */
#include "report.h"
#include "../../shape.h"
#include <string.h>

enum { CHUNK = 2048, LENGTHS = 7 };

static int prompt = 128, rounds = 3, calls = 16;
static double warm = 0.3; /* seconds */
static id<MTLCommandQueue> queue;

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

static bool succeeded(tqkv_metal *m, const char *what, tqkv_result r)
{
    char text[400];
    if (r == TQKV_OK) return true;
    tqkv_metal_error(m, text, sizeof text);
    printf("failed: %s: %s: %s\n", what, tqkv_result_string(r), text);
    return false;
}

static bool record_appends(void *user, id<MTLComputeCommandEncoder> encoder)
{
    const work *w = (const work *)user;
    const tqkv_metal_buffer none = {nil, 0};
    return succeeded(w->m, "append", tqkv_metal_cache_append(w->m, encoder, w->cache, w->k, w->v, w->n_tokens, none));
}

static bool record_attends(void *user, id<MTLComputeCommandEncoder> encoder)
{
    const work *w = (const work *)user;
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < w->n_calls && r == TQKV_OK; i++)
        r = tqkv_metal_cache_attend(w->m, encoder, w->cache, w->q, w->n_queries, w->scratch, w->out);
    return succeeded(w->m, "attend", r);
}

/* Seconds of one call with so many queries; 0 if it failed. */
static double time_attends(work *w, int n_queries, int n_calls)
{
    w->n_queries = n_queries;
    w->n_calls = n_calls;
    return report_time_best(queue, record_attends, w, rounds, warm) / n_calls;
}

/* *each: seconds of a token in the last append */
static bool fill_to(work *w, int length, double *each)
{
    while (tqkv_cache_end(w->cache) < length) {
        const int left = length - (int)tqkv_cache_end(w->cache);
        w->n_tokens = left < CHUNK ? left : CHUNK;
        const double t = report_time_once(queue, record_appends, w);
        if (t <= 0) return false;
        *each = t / w->n_tokens;
    }
    return true;
}

/* *halves: seconds of half floats, or 0 where these are they */
static void time_prompt(work *w, const shape *s, const char *what, int n_queries, int length, double *halves)
{
    const double t = time_attends(w, n_queries, 1);
    const double operations = 4.0 * s->n_heads * s->head_dim * (double)n_queries * length;
    if (*halves <= 0) *halves = t;
    if (t > 0)
        printf("prompt %s, %d queries over %d positions: %.2f ms, %.2f Tflop/s, share %.2f\n", what, n_queries, length,
               t * 1e3, operations / t * 1e-12, t / *halves);
}

/* Queries that fill every number of columns. */
static const int queries[] = {2, 4, 8, 16, 128};
enum { N_QUERIES = sizeof queries / sizeof *queries };

/* Seconds of half floats. */
typedef struct reference {
    double tokens[LENGTHS], prompts[N_QUERIES];
} reference;

/* One pair of formats of a shape at all lengths. by: lanes, matrices, or nothing: the default */
static void time_pair(work *w, const shape *s, int pair, const char *by, const int *lengths, reference *halves)
{
    char what[80];
    double each = 0;
    const tqkv_format key = pairs[pair][0], value = pairs[pair][1];
    snprintf(what, sizeof what, "%d/%d of %d, %s/%s%s", s->n_heads, s->n_kv_heads, s->head_dim, tqkv_format_name(key),
             tqkv_format_name(value), by);
    for (int i = 0; i < LENGTHS && lengths[i]; i++) {
        if (!fill_to(w, lengths[i], &each)) return;
        const double bytes = (double)tqkv_cache_bytes(w->cache) * lengths[i] / test_keys(w->cache)->capacity;
        const double t = time_attends(w, 1, lengths[i] > 65536 ? calls / 4 : calls);
        if (halves->tokens[i] <= 0) halves->tokens[i] = t;
        if (t > 0)
            printf("token %s, %d positions: %.3f ms, %.1f GB/s, share %.2f\n", what, lengths[i], t * 1e3,
                   bytes / t * 1e-9, t / halves->tokens[i]);
        if (lengths[i] != 4096 && lengths[i] != 64) continue;
        for (int q = 0; q < N_QUERIES; q++)
            if (queries[q] <= prompt) time_prompt(w, s, what, queries[q], lengths[i], &halves->prompts[q]);
    }
    if (each > 0) printf("append %s: %.3f us a token of the last %d\n", what, each * 1e6, w->n_tokens);
}

/* Shared memory for the rows of all calls; false if there is none. */
static bool open_rows(work *w, const shape *s)
{
    const tqkv_allocator memory = tqkv_metal_allocator(w->m);
    size_t scratch = 0;
    const size_t kv = sizeof(float) * CHUNK * (size_t)(s->n_kv_heads * s->head_dim),
                 q = sizeof(float) * (size_t)(prompt * s->n_heads * s->head_dim);
    for (int n = 1; n <= prompt; n += prompt > 1 ? prompt - 1 : 1) {
        tqkv_metal_plan plan;
        const tqkv_metal_buffer none = {nil, 0};
        if (!succeeded(w->m, "scratch",
                       tqkv_metal_plan_cache_attend(w->cache, none, NULL, NULL, none, n, none, none, &plan)))
            return false;
        if (plan.scratch_size > scratch) scratch = plan.scratch_size;
    }
    char *block = (char *)memory.alloc(memory.user, 2 * kv + 2 * q + scratch);
    if (!block) return false;
    report_fill((float *)(void *)block, (2 * kv + q) / sizeof(float), 7);
    tqkv_metal_buffer *const parts[] = {&w->k, &w->v, &w->q, &w->out, &w->scratch};
    const size_t sizes[] = {kv, kv, q, q, scratch};
    for (int i = 0; i < 5; block += sizes[i++])
        if (!succeeded(w->m, "rows", tqkv_metal_find(w->m, block, parts[i]))) return false;
    return true;
}

/* matrix_group: 0, or by lanes (more than any group), or by matrices (1) */
static void time_formats(tqkv_metal *m, const shape *s, int pair, int matrix_group, const int *lengths,
                         reference *halves)
{
    const tqkv_allocator memory = tqkv_metal_allocator(m);
    const char *by = matrix_group == 1 ? ", matrices" : matrix_group ? ", lanes" : "";
    work w = {.m = m};
    tqkv_cache_desc desc = {.head_dim = s->head_dim,
                            .n_kv_heads = s->n_kv_heads,
                            .n_heads = s->n_heads,
                            .metal = m,
                            .matrix_group = matrix_group};
    for (int i = 0; i < LENGTHS && lengths[i]; i++) desc.capacity = lengths[i];
    desc.key_format = pairs[pair][0];
    desc.value_format = pairs[pair][1];
    if (!succeeded(m, "cache", tqkv_cache_create(&desc, &w.cache))) return;
    @autoreleasepool {
        if (open_rows(&w, s)) time_pair(&w, s, pair, by, lengths, halves);
        if (w.k.buffer) memory.free(memory.user, [(id<MTLBuffer>)w.k.buffer contents], 0);
    }
    tqkv_cache_destroy(w.cache);
}

static void time_shape(tqkv_metal *m, const shape *s, const int *lengths)
{
    reference halves;
    const int both = s->head_dim == 128; /* groups of 4 and 8 */
    memset(&halves, 0, sizeof halves);
    printf("shape %d/%d of %d (%s)\n", s->n_heads, s->n_kv_heads, s->head_dim, s->models);
    for (int pair = 0; pair < 3; pair++) {
        time_formats(m, s, pair, both ? 1 : 0, lengths, &halves);
        if (both) time_formats(m, s, pair, 1000, lengths, &halves);
    }
}

/* What a program does after an update of the system: the second time pipelines are there. */
static void time_self_test(tqkv_metal *m, int head_dim, int group)
{
    char what[40];
    const tqkv_cache_desc desc = {.head_dim = head_dim, .n_kv_heads = 2, .n_heads = 2 * group};
    snprintf(what, sizeof what, "self-test of d%d, group %d", head_dim, group);
    const double start = report_seconds();
    if (!succeeded(m, what, tqkv_metal_self_test(m, &desc))) return;
    const double built = report_seconds();
    if (succeeded(m, what, tqkv_metal_self_test(m, &desc)))
        printf("%s: ok, %.0f ms, with pipelines built %.1f ms\n", what, (built - start) * 1e3,
               (report_seconds() - built) * 1e3);
}

int main(int argc, char **argv)
{
    static const int usual[LENGTHS] = {512, 1024, 2048, 4096, 16384, 32768, 131072}, tiny[LENGTHS] = {64};
    if (argc < 2) return 2;
    report_begin();
    const bool is_tiny = argc > 2 && !strcmp(argv[2], "--tiny");
    if (is_tiny) prompt = 2, rounds = 1, calls = 1, warm = 0;
    NSAutoreleasePool *pool = [[NSAutoreleasePool alloc] init];
    char error[400] = "";
    id<MTLDevice> device = MTLCreateSystemDefaultDevice();
    tqkv_metal_desc desc = {.error = error, .error_size = sizeof error, .library_path = argv[1], .device = device};
    tqkv_metal *m = NULL;
    if (tqkv_metal_create(&desc, &m) != TQKV_OK) return printf("failed: %s\n", error), 1;
    queue = [device newCommandQueue];
    time_self_test(m, 64, 1);
    if (!is_tiny) time_self_test(m, 128, 4);
    const int n = (int)(sizeof shapes / sizeof *shapes);
    for (int i = is_tiny ? n - 2 : 0; i < (is_tiny ? n - 1 : n); i++) time_shape(m, &shapes[i], is_tiny ? tiny : usual);
    tqkv_metal_destroy(m);
    [queue release];
    [device release];
    [pool release];
    return 0;
}

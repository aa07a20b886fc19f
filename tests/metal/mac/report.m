/* Runs every kernel of a library or source on the GPU, once for each head_dim and pair of formats, and compares with the
   processor: report LIBRARY|SOURCE.metal [--quick] [--time]

   `result` lines have the bits of what the GPU computed: those of two libraries can be compared. --quick: one head_dim,
   one pair. --time: a long context, too. Ends with status 1 if the library is refused or a result is wrong. */
#define TQKV_IMPLEMENTATION
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#define XXH_INLINE_ALL
#include "../../../tqkv.h"
#include <math.h>
#include <time.h>
#include <xxhash.h>

enum { KV_HEADS = 2, HEADS = 4, TOKENS = 48, QUERIES = 3, MAX_ROWS = TOKENS * KV_HEADS * TQKV_MAX_HEAD_DIM };

static int n_results, n_wrong;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The same floats on every machine. */
static void fill(float *x, size_t count, uint32_t seed)
{
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)seed / 1073741824.0f;
    }
}

static void report(const char *what, uint64_t bits, bool good, const char *note)
{
    n_results++;
    n_wrong += !good;
    printf("result %s %016llx %s%s\n", what, (unsigned long long)bits, good ? "ok" : "WRONG", note);
}

/* Whether the call succeeded; prints why not. */
static bool succeeded(tqkv_metal *m, const char *what, tqkv_result r)
{
    char text[400];
    if (r == TQKV_OK) return true;
    tqkv_metal_error(m, text, sizeof text);
    n_wrong++;
    printf("failed %s: %s: %s\n", what, tqkv_result_string(r), text);
    return false;
}

static uint64_t store_bits(const tqkv_store *s)
{
    return XXH3_64bits(s->codes, s->codes_size) ^ (s->norms_size ? XXH3_64bits(s->norms, s->norms_size) : 0);
}

/* encode_kv, attend and attend_merge of one pair of formats. */
static void run_pair(tqkv_metal *m, int head_dim, tqkv_format key, tqkv_format value)
{
    static float k[MAX_ROWS], v[MAX_ROWS], q[QUERIES * HEADS * TQKV_MAX_HEAD_DIM], out[2][sizeof q / sizeof *q];
    char what[80], note[40];
    tqkv_cache *caches[2] = {NULL, NULL}; /* of the GPU, of the processor */
    tqkv_cache_desc desc = {.head_dim = head_dim, .n_kv_heads = KV_HEADS, .n_heads = HEADS, .capacity = TOKENS};
    const size_t n = (size_t)(QUERIES * HEADS * head_dim);
    double wrong = 0, all = 0;
    bool good = true;
    desc.key_format = key;
    desc.value_format = value;
    snprintf(what, sizeof what, "pair/d%d/%s/%s", head_dim, tqkv_format_name(key), tqkv_format_name(value));
    fill(k, MAX_ROWS, 1);
    fill(v, MAX_ROWS, 2);
    fill(q, n, 3);
    for (int i = 0; i < 2 && good; i++) {
        desc.metal = i == 0 ? m : NULL;
        good = succeeded(m, what, tqkv_cache_create(&desc, &caches[i])) &&
               succeeded(m, what, tqkv_cache_append(caches[i], k, v, TOKENS)) &&
               succeeded(m, what, tqkv_cache_attend(caches[i], q, QUERIES, out[i])) &&
               succeeded(m, what, tqkv_cache_attend(caches[i], q, 1, out[i]));
    }
    if (good) {
        const bool same = store_bits(tqkv_cache_keys(caches[0])) == store_bits(tqkv_cache_keys(caches[1])) &&
                          store_bits(tqkv_cache_values(caches[0])) == store_bits(tqkv_cache_values(caches[1]));
        for (size_t i = 0; i < n; i++) {
            const double expected = (double)out[1][i], difference = (double)out[0][i] - expected;
            wrong += difference * difference;
            all += expected * expected;
        }
        snprintf(note, sizeof note, "%s, error %.1e", same ? "" : ", other codes", sqrt(wrong / all));
        report(what, XXH3_64bits(out[0], n * sizeof(float)), same && wrong <= 4e-10 * all, note);
    }
    for (int i = 0; i < 2; i++) tqkv_cache_destroy(caches[i]);
}

/* The calls on one stream. */
typedef struct stream {
    tqkv_metal *m;
    tqkv_metal_store store;
    tqkv_metal_buffer rows, out;
} stream;

static tqkv_result record_stream(void *user, tqkv_metal_object encoder)
{
    const stream *s = user;
    const tqkv_metal_buffer none = {nil, 0};
    const int head_dim = s->store.shape.head_dim, n = TOKENS * KV_HEADS;
    tqkv_metal_buffer to = s->out;
    tqkv_result r = tqkv_metal_encode(s->m, encoder, &s->store, s->rows, TOKENS, 0, none);
    if (r == TQKV_OK) r = tqkv_metal_decode(s->m, encoder, &s->store, 0, TOKENS, TQKV_ORIGINAL, to);
    to.offset += (size_t)(n * head_dim) * sizeof(float);
    if (r == TQKV_OK) r = tqkv_metal_probe(s->m, encoder, &s->store, s->rows, TOKENS, to, none);
    if (r == TQKV_OK) r = tqkv_metal_rotate(s->m, encoder, s->rows, n, head_dim);
    return r == TQKV_OK ? tqkv_metal_unrotate(s->m, encoder, s->rows, n, head_dim) : r;
}

/* encode, decode, probe and rotate of one format; what they compute must have the processor's bits. */
static void run_stream(tqkv_metal *m, int head_dim, tqkv_format format)
{
    static float source[MAX_ROWS], expected[2 * MAX_ROWS], norms[TOKENS * KV_HEADS * 8];
    static unsigned char codes[2 * MAX_ROWS];
    char what[80];
    const tqkv_allocator memory = tqkv_metal_allocator(m);
    const size_t n = (size_t)(TOKENS * KV_HEADS * head_dim), size = n * sizeof(float);
    tqkv_store shape = {.format = format, .head_dim = head_dim, .n_kv_heads = KV_HEADS, .capacity = TOKENS};
    shape.codes = codes;
    shape.codes_size = (size_t)(TOKENS * KV_HEADS) * tqkv_row_bytes(format, head_dim);
    shape.norms = norms;
    shape.norms_size = (size_t)(TOKENS * KV_HEADS * tqkv_norms_per_row(format, head_dim)) * sizeof(float);
    stream s = {.m = m};
    s.store.shape = shape;
    snprintf(what, sizeof what, "stream/d%d/%s", head_dim, tqkv_format_name(format));
    fill(source, n, 4);
    char *block = memory.alloc(memory.user, 6 * size + 64);
    if (!block || tqkv_metal_find(m, block, &s.rows) != TQKV_OK) return;
    memcpy(block, source, size);
    s.out = s.store.codes = s.store.norms = s.rows;
    s.out.offset += size;
    s.store.codes.offset += 3 * size;
    s.store.norms.offset += 5 * size;
    if (succeeded(m, what, tqkv_metal_run(m, record_stream, &s)) &&
        succeeded(m, what, tqkv_encode(&shape, source, TOKENS, 0)) &&
        succeeded(m, what, tqkv_decode(&shape, 0, TOKENS, TQKV_ORIGINAL, expected)) &&
        succeeded(m, what, tqkv_probe(&shape, source, TOKENS, expected + n)))
        report(what, XXH3_64bits(block, 3 * size),
               !memcmp(block + size, expected, 2 * size) && !memcmp(block + 3 * size, codes, shape.codes_size) &&
                   !memcmp(block + 5 * size, norms, shape.norms_size),
               "");
    memory.free(memory.user, block, 6 * size + 64);
}

/* Wall time of calls that wait: a prompt into the cache, and one token over it. */
static void run_times(tqkv_metal *m, tqkv_format key, tqkv_format value)
{
    enum { CONTEXT = 32768, CHUNK = 4096, HEAD_DIM = 128, KV = 8, N_HEADS = 16, ROUNDS = 21 };
    static float rows[CHUNK * KV * HEAD_DIM], q[N_HEADS * HEAD_DIM], out[N_HEADS * HEAD_DIM];
    double best[2] = {1e9, 1e9};
    tqkv_cache *cache = NULL;
    tqkv_cache_desc desc = {
        .head_dim = HEAD_DIM, .n_kv_heads = KV, .n_heads = N_HEADS, .capacity = CONTEXT, .metal = m};
    desc.key_format = key;
    desc.value_format = value;
    fill(rows, sizeof rows / sizeof *rows, 5);
    fill(q, sizeof q / sizeof *q, 6);
    if (!succeeded(m, "time", tqkv_cache_create(&desc, &cache))) return;
    for (int i = 0; i < CONTEXT / CHUNK; i++) {
        const double start = seconds();
        if (!succeeded(m, "time", tqkv_cache_append(cache, rows, rows, CHUNK))) break;
        best[0] = fmin(best[0], seconds() - start);
    }
    for (int i = 0; i < ROUNDS; i++) {
        const double start = seconds();
        if (!succeeded(m, "time", tqkv_cache_attend(cache, q, 1, out))) break;
        best[1] = fmin(best[1], seconds() - start);
    }
    printf("time %s/%s: %d tokens stored in %.2f ms, one token over %d in %.2f ms (best of %d and %d, with the wait)\n",
           tqkv_format_name(key), tqkv_format_name(value), CHUNK, best[0] * 1e3, CONTEXT, best[1] * 1e3,
           CONTEXT / CHUNK, ROUNDS);
    tqkv_cache_destroy(cache);
}

static bool is_format(int f) { return tqkv_row_bytes((tqkv_format)f, 128) != 0; }

static void run_all(tqkv_metal *m, bool quick)
{
    for (int i = 0; i < TQKV__KERNEL_DIMS; i++) {
        const int head_dim = TQKV__KERNEL_DIM(i);
        if (quick && head_dim != 64) continue;
        for (int key = 1; is_format(key); key++) {
            if (quick && key != TQKV_TQ4) continue;
            run_stream(m, head_dim, (tqkv_format)key);
            for (int value = 1; is_format(value); value++)
                if (!quick || value == TQKV_TQ5) run_pair(m, head_dim, (tqkv_format)key, (tqkv_format)value);
        }
    }
}

int main(int argc, char **argv)
{
    bool quick = false, time = false;
    for (int i = 2; i < argc; i++) {
        quick = quick || !strcmp(argv[i], "--quick");
        time = time || !strcmp(argv[i], "--time");
    }
    if (argc < 2) return 2;
    NSAutoreleasePool *pool = [[NSAutoreleasePool alloc] init];
    char error[400] = "";
    NSString *path = [NSString stringWithUTF8String:argv[1]];
    const bool is_source = [path hasSuffix:@".metal"];
    tqkv_metal_desc desc = {.error = error, .error_size = sizeof error};
    if (is_source)
        desc.library_source = [[NSString stringWithContentsOfFile:path encoding:NSUTF8StringEncoding
                                                            error:NULL] UTF8String];
    else
        desc.library_path = argv[1];
    tqkv_metal *m = NULL;
    const double start = seconds();
    const tqkv_result r = tqkv_metal_create(&desc, &m);
    printf("library %s: %s %s (%.2f s)\n", argv[1], tqkv_result_string(r), error, seconds() - start);
    if (m) run_all(m, quick);
    printf("%d results, %d wrong, %.1f s with every pipeline built\n", n_results, n_wrong, seconds() - start);
    if (m && time) run_times(m, TQKV_I8, TQKV_TQ4);
    if (m && time) run_times(m, TQKV_TQ4, TQKV_TQ4);
    if (m && time) run_times(m, TQKV_F16, TQKV_F16);
    tqkv_metal_destroy(m);
    [pool release];
    return r != TQKV_OK || n_wrong != 0 || n_results == 0;
}

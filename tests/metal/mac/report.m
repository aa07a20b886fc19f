/* Runs the kernels of a library or source on the GPU and compares with the processor: report LIBRARY|SOURCE.metal
   [--brief | --all]

   Otherwise: the default pair at each head_dim, all formats at 128, and groups that multiply matrices. --all: all pairs
   of formats at each head_dim. --brief: one head_dim. `result` lines have the bits of what the GPU computed: those of
   two libraries can be compared. Ends with status 1 if the library is refused or a result is wrong. */
#include "report.h"
#include "../../shape.h"
#include "tests/metal/sizes.h"
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { KV_HEADS = 2, TOKENS = 48, QUERIES = 3, THREADS = 4, MOST_JOBS = 3000 };

static int n_results, n_wrong;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the two, and of lines */

static uint64_t bits_of(const void *bytes, size_t n)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

static void report(const char *what, uint64_t bits, bool good, const char *note)
{
    pthread_mutex_lock(&lock);
    n_results++;
    n_wrong += !good;
    printf("result %s %016llx %s%s\n", what, (unsigned long long)bits, good ? "ok" : "WRONG", note);
    pthread_mutex_unlock(&lock);
}

/* Whether the call succeeded; prints why not. */
static bool succeeded(tqkv_metal *m, const char *what, tqkv_result r)
{
    char text[400];
    if (r == TQKV_OK) return true;
    tqkv_metal_error(m, text, sizeof text);
    pthread_mutex_lock(&lock);
    n_wrong++;
    printf("failed %s: %s: %s\n", what, tqkv_result_string(r), text);
    pthread_mutex_unlock(&lock);
    return false;
}

static float *floats(size_t count, uint32_t seed)
{
    float *x = (float *)calloc(count, sizeof *x);
    if (!x) abort();
    if (seed) report_fill(x, count, seed);
    return x;
}

/* One comparison: a stream's calls, or a pair of formats where there is a value. */
typedef struct job {
    int head_dim, value_dim, group;
    tqkv_format key, value;
} job;

/* What attention may differ by: the processor multiplies integers, whose centroids are others below 8 bits. */
static double limit_of(const job *j)
{
    const bool as_floats[] = {j->key == TQKV_F16 || j->key == TQKV_I8 || j->key == TQKV_TQ8,
                              j->value == TQKV_F16 || j->value == TQKV_I8 || j->value == TQKV_TQ8};
    return as_floats[0] && as_floats[1] ? 3.5e-4 : 0.035;
}

static bool same_bytes(const tqkv_store *a, const tqkv_store *b)
{
    return !memcmp(a->codes, b->codes, a->codes_size) && !memcmp(a->norms, b->norms, a->norms_size);
}

/* Attends with so many queries to the caches of the GPU and of the processor, and compares. */
static void compare_attention(tqkv_metal *m, const char *what, const job *j, tqkv_cache *const caches[2], int n_queries)
{
    char name[100], note[60];
    const size_t rows = (size_t)(n_queries * KV_HEADS * j->group), n = rows * (size_t)j->value_dim;
    float *q = floats(rows * (size_t)j->head_dim, 3), *out[2] = {floats(n, 0), floats(n, 0)};
    double wrong = 0, all = 0;
    bool good = true;
    snprintf(name, sizeof name, "%s/%d", what, n_queries);
    for (int i = 0; i < 2 && good; i++) good = succeeded(m, name, tqkv_cache_attend(caches[i], q, n_queries, out[i]));
    for (size_t i = 0; i < n; i++) {
        const double expected = (double)out[1][i], difference = (double)out[0][i] - expected;
        wrong += difference * difference;
        all += expected * expected;
    }
    const bool same = same_bytes(test_keys(caches[0]), test_keys(caches[1])) &&
                      same_bytes(test_values(caches[0]), test_values(caches[1]));
    snprintf(note, sizeof note, "%s, error %.1e", same ? "" : ", OTHER CODES", sqrt(wrong / all));
    if (good) report(name, bits_of(out[0], n * sizeof(float)), same && wrong <= limit_of(j) * limit_of(j) * all, note);
    for (int i = 0; i < 2; i++) free(out[i]);
    free(q);
}

/* encode_kv, attend or attend_matrix, and attend_merge of one pair of formats. */
static void run_pair(tqkv_metal *m, const job *j)
{
    char what[80], dims[24];
    tqkv_cache *caches[2] = {NULL, NULL}; /* of the GPU, of the processor */
    tqkv_cache_desc desc = {.head_dim = j->head_dim, .n_kv_heads = KV_HEADS, .capacity = TOKENS};
    bool good = true;
    desc.value_dim = j->value_dim;
    desc.n_heads = KV_HEADS * j->group;
    desc.key_format = j->key;
    desc.value_format = j->value;
    snprintf(dims, sizeof dims, j->value_dim == j->head_dim ? "d%d" : "d%d_%d", j->head_dim, j->value_dim);
    snprintf(what, sizeof what, "pair/%s/%s/%s/group%d", dims, tqkv_format_name(j->key), tqkv_format_name(j->value),
             j->group);
    float *k = floats((size_t)(TOKENS * KV_HEADS * j->head_dim), 1);
    float *v = floats((size_t)(TOKENS * KV_HEADS * j->value_dim), 2);
    for (int i = 0; i < 2 && good; i++) {
        desc.metal = i == 0 ? m : NULL;
        good = succeeded(m, what, tqkv_cache_create(&desc, &caches[i])) &&
               succeeded(m, what, tqkv_cache_append(caches[i], k, v, TOKENS));
    }
    if (good) compare_attention(m, what, j, caches, 1);
    if (good) compare_attention(m, what, j, caches, QUERIES);
    for (int i = 0; i < 2; i++) tqkv_cache_destroy(caches[i]);
    free(k);
    free(v);
}

/* The calls on one stream. */
typedef struct stream {
    tqkv_metal *m;
    tqkv_metal_store store;
    tqkv_metal_buffer rows, out;
} stream;

static tqkv_result record_stream(void *user, tqkv_metal_object encoder)
{
    const stream *s = (const stream *)user;
    const tqkv_metal_buffer none = {nil, 0};
    const int head_dim = s->store.shape.head_dim, n = TOKENS * KV_HEADS;
    static tqkv_metal_plan plans[5];
    tqkv_metal_buffer probed = s->out;
    probed.offset += (size_t)(n * head_dim) * sizeof(float);
    tqkv_metal_plan_encode(&s->store, NULL, s->rows, none, TOKENS, 0, none, &plans[0]);
    tqkv_metal_plan_decode(&s->store, 0, TOKENS, TQKV_ORIGINAL, s->out, &plans[1]);
    tqkv_metal_plan_probe(&s->store, s->rows, TOKENS, probed, none, &plans[2]);
    tqkv_metal_plan_rotate(s->rows, n, head_dim, TQKV_ROTATED, &plans[3]);
    tqkv_metal_plan_rotate(s->rows, n, head_dim, TQKV_ORIGINAL, &plans[4]);
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < 5 && r == TQKV_OK; i++) r = tqkv_metal_record(s->m, encoder, &plans[i]);
    return r;
}

/* block: [6][rows]: source, decoded, probed, codes (two), norms */
static void compare_stream(const char *what, stream *s, const tqkv_store *shape, const float *source, char *block)
{
    const size_t n = (size_t)(TOKENS * KV_HEADS * shape->head_dim), size = n * sizeof(float);
    float *expected = floats(2 * n, 0);
    if (succeeded(s->m, what, tqkv_metal_run(s->m, record_stream, s)) &&
        succeeded(s->m, what, tqkv_encode(shape, source, TOKENS, 0)) &&
        succeeded(s->m, what, tqkv_decode(shape, 0, TOKENS, TQKV_ORIGINAL, expected)) &&
        succeeded(s->m, what, tqkv_probe(shape, source, TOKENS, expected + n))) {
        const bool rows = !memcmp(block + size, expected, 2 * size),
                   codes = !memcmp(block + 3 * size, shape->codes, shape->codes_size) &&
                           !memcmp(block + 5 * size, shape->norms, shape->norms_size);
        report(what, bits_of(block, 3 * size), rows && codes, codes ? rows ? "" : ", other rows" : ", OTHER CODES");
    }
    free(expected);
}

/* encode, decode, probe and rotate of one format; what they compute must have the processor's bits. */
static void run_stream(tqkv_metal *m, const job *j)
{
    char what[80];
    const tqkv_allocator memory = tqkv_metal_allocator(m);
    const size_t n = (size_t)(TOKENS * KV_HEADS * j->head_dim), size = n * sizeof(float);
    tqkv_store shape = {.format = j->key, .head_dim = j->head_dim, .n_kv_heads = KV_HEADS, .capacity = TOKENS};
    stream s = {.m = m};
    shape.codes_size = tqkv_codes_size(&shape);
    shape.norms_size = tqkv_norms_size(&shape);
    shape.codes = floats(2 * n, 0);
    shape.norms = floats(n, 0);
    s.store.shape = shape;
    snprintf(what, sizeof what, "stream/d%d/%s", j->head_dim, tqkv_format_name(j->key));
    float *source = floats(n, 4);
    char *block = (char *)memory.alloc(memory.user, 6 * size + 64);
    if (block && succeeded(m, what, tqkv_metal_find(m, block, &s.rows))) {
        memcpy(block, source, size);
        s.out = s.store.codes = s.store.norms = s.rows;
        s.out.offset += size;
        s.store.codes.offset += 3 * size;
        s.store.norms.offset += 5 * size;
        compare_stream(what, &s, &shape, source, block);
    }
    if (block) memory.free(memory.user, block, 6 * size + 64);
    free(source);
    free(shape.codes);
    free(shape.norms);
}

/* ---- The list of jobs, and the threads that share it: a new pipeline takes a second of one ---- */

static job jobs[MOST_JOBS];
static int n_jobs, n_begun;

static bool is_format(int f) { return strcmp(tqkv_format_name((tqkv_format)f), "?") != 0; }

/* value 0: a stream */
static void add(int head_dim, int group, int key, int value)
{
    const job j = {head_dim, head_dim, group, (tqkv_format)key, (tqkv_format)value};
    if (n_jobs < MOST_JOBS) jobs[n_jobs++] = j;
}

/* The least group that multiplies matrices; 0: none. */
static int matrix_group(int head_dim)
{
    return head_dim == 64 || head_dim == 128 || head_dim == 256 || head_dim == 448 || head_dim == 512 ? 8 : 0;
}

static void add_brief(void)
{
    add(64, 1, TQKV_TQ4, 0);
    add(64, 2, TQKV_TQ4, TQKV_TQ5);
    add(64, 8, TQKV_I8, TQKV_TQ4);
}

static void add_usual(void)
{
    const int pairs[][2] = {{TQKV_I8, TQKV_TQ4}, {TQKV_TQ4, TQKV_TQ4}, {TQKV_F16, TQKV_F16}};
    for (int i = 0; i < TQKV__KERNEL_DIMS; i++) {
        const int head_dim = TQKV__KERNEL_DIM(i);
        add(head_dim, 1, TQKV_I8, 0);
        add(head_dim, 1, TQKV_TQ4, 0);
        add(head_dim, 2, TQKV_I8, TQKV_TQ4);
        for (int j = 0; j < 3 && matrix_group(head_dim); j++)
            add(head_dim, matrix_group(head_dim), pairs[j][0], pairs[j][1]);
    }
    add(192, 2, TQKV_I8, TQKV_TQ4);
    jobs[n_jobs - 1].value_dim = 128;
    for (int f = 1; is_format(f); f++) {
        add(128, 1, f, 0);
        add(128, 2, f, f);
    }
}

static void add_all(void)
{
    for (int i = 0; i < TQKV__KERNEL_DIMS; i++)
        for (int key = 1; is_format(key); key++) {
            const int head_dim = TQKV__KERNEL_DIM(i);
            add(head_dim, 1, key, 0);
            for (int value = 1; is_format(value); value++) {
                add(head_dim, 2, key, value);
                if (matrix_group(head_dim)) add(head_dim, matrix_group(head_dim), key, value);
            }
        }
}

static void *run_jobs(void *context)
{
    tqkv_metal *m = (tqkv_metal *)context;
    for (;;) {
        pthread_mutex_lock(&lock);
        const job *j = n_begun < n_jobs ? &jobs[n_begun++] : NULL;
        pthread_mutex_unlock(&lock);
        if (!j) return NULL;
        @autoreleasepool {
            if (j->value)
                run_pair(m, j);
            else
                run_stream(m, j);
        }
    }
}

static void run_on_threads(tqkv_metal *m)
{
    pthread_t threads[THREADS];
    bool started[THREADS];
    for (int i = 1; i < THREADS; i++) started[i] = !pthread_create(&threads[i], NULL, run_jobs, m);
    run_jobs(m);
    for (int i = 1; i < THREADS; i++)
        if (started[i]) pthread_join(threads[i], NULL);
}

/* What a program does after an update of the system: the second time pipelines are there. */
static void run_self_test(tqkv_metal *m, int head_dim, int group)
{
    char what[40];
    const tqkv_cache_desc desc = {.head_dim = head_dim, .n_kv_heads = KV_HEADS, .n_heads = KV_HEADS * group};
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
    if (argc < 2) return 2;
    report_begin();
    NSAutoreleasePool *pool = [[NSAutoreleasePool alloc] init];
    char error[400] = "";
    tqkv_metal_desc desc = {.error = error, .error_size = sizeof error};
    desc.library_source = [report_source(argv[1]) UTF8String];
    if (!desc.library_source) desc.library_path = argv[1];
    tqkv_metal *m = NULL;
    const double start = report_seconds();
    const tqkv_result r = tqkv_metal_create(&desc, &m);
    printf("library %s: %s %s (%.2f s)\n", argv[1], tqkv_result_string(r), error, report_seconds() - start);
    const char *option = argc > 2 ? argv[2] : "";
    if (!strcmp(option, "--brief"))
        add_brief();
    else if (!strcmp(option, "--all"))
        add_all();
    else
        add_usual();
    if (m) run_self_test(m, 64, 1);
    if (m && n_jobs > 10) run_self_test(m, 128, 4);
    if (m) run_on_threads(m);
    printf("%d results, %d wrong, %.1f s with every pipeline built\n", n_results, n_wrong, report_seconds() - start);
    tqkv_metal_destroy(m);
    [pool release];
    return r != TQKV_OK || n_wrong != 0 || n_results == 0;
}

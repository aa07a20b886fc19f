/* Contexts: every kind of library, devices, threads, memory, and every failure that Metal can report. */
#include "host.h"
#include "tests/data.h"
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#ifdef STANDIN
#include "tests/metal/standin/standin.h"
#endif

/* Creates a context. If that fails, its text must contain `words`. */
static tqkv_metal *create(tqkv_metal_desc desc, tqkv_result expected, const char *words)
{
    char error[400] = "untouched";
    tqkv_metal *m = NULL;
    desc.error = error;
    desc.error_size = sizeof error;
    CHECK_RESULT(tqkv_metal_create(&desc, &m), expected);
    CHECK((m != NULL) == (expected == TQKV_OK), "a context with result %d", (int)expected);
    CHECK(strstr(error, words), "the text is \"%s\", without \"%s\"", error, words);
    return m;
}

static NSData *library_bytes(void)
{
    NSData *data = [NSData dataWithContentsOfFile:[NSString stringWithUTF8String:test_host.library]];
    CHECK(data, "no library");
    return data;
}

/* Checks that the context works: it rotates a row and rotates it back. */
static tqkv_result record_rotations(void *user, tqkv_metal_object encoder)
{
    tqkv_metal *m = ((tqkv_metal **)user)[0];
    float *rows = ((void **)user)[1];
    tqkv_metal_buffer b;
    tqkv_result r = tqkv_metal_find(m, rows, &b);
    if (r == TQKV_OK) r = tqkv_metal_rotate(m, encoder, b, 2, 64);
    return r == TQKV_OK ? tqkv_metal_unrotate(m, encoder, b, 2, 64) : r;
}

static void check_works(tqkv_metal *m)
{
    REQUIRE(m, "no context");
    const tqkv_allocator memory = tqkv_metal_allocator(m);
    float *source = host_floats(3, 128), *rows = memory.alloc(memory.user, 512);
    memcpy(rows, source, 512);
    void *user[] = {m, rows};
    CHECK_RESULT(tqkv_metal_run(m, record_rotations, user), TQKV_OK);
    double wrong = 0;
    for (int i = 0; i < 128; i++) wrong += fabs((double)rows[i] - (double)source[i]);
    CHECK(wrong < 1e-3 && wrong > 0, "rotated there and back: off by %g", wrong);
    memory.free(memory.user, rows, 512);
    free(source);
}

static void run_libraries(const void *parameters)
{
    (void)parameters;
    @autoreleasepool {
        NSError *error = nil;
        NSData *data = library_bytes();
        tqkv_metal_desc path = {0}, bytes = {0}, object = {0};
        path.library_path = test_host.library;
        bytes.library_bytes = [data bytes];
        bytes.library_size = [data length];
        object.device = test_host.device;
        NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:test_host.library]];
        id<MTLLibrary> library = [test_host.device newLibraryWithURL:url error:&error];
        object.library = library;
        const tqkv_metal_desc descs[] = {path, bytes, object};
        for (int i = 0; i < 3; i++) {
            tqkv_metal *m = create(descs[i], TQKV_OK, "");
            check_works(m);
            tqkv_metal_destroy(m);
        }
        path.library = object.library;
        create(path, TQKV_INVALID_ARGUMENT, "more than one library");
        [library release];
    }
    CHECK_RESULT(tqkv_metal_create(NULL, NULL), TQKV_INVALID_ARGUMENT);
    tqkv_metal *m = test_host.metal;
    CHECK_RESULT(tqkv_metal_create(NULL, &m), TQKV_INVALID_ARGUMENT);
    CHECK(!m, "a context on failure");
    tqkv_metal_destroy(NULL);
}

static void run_bad_libraries(const void *parameters)
{
    (void)parameters;
    @autoreleasepool {
        NSData *data = library_bytes();
        tqkv_metal_desc desc = {0};
        desc.library_path = "no/such/file.metallib";
        create(desc, TQKV_METAL_ERROR, "no/such/file.metallib");
        desc.library_path = "";
        create(desc, TQKV_INVALID_ARGUMENT, "library_path");
        desc.library_path = "tqkv.h"; /* a file that is not a library */
        create(desc, TQKV_METAL_ERROR, "tqkv.h");
        desc.library_path = NULL;
        desc.library_bytes = [data bytes];
        const size_t sizes[] = {1, 8, 16, 100, [data length] / 4, [data length] / 2};
        for (int i = 0; i < 6; i++) {
            desc.library_size = sizes[i];
            create(desc, TQKV_METAL_ERROR, "library in memory");
        }
    }
}

/* The shaders as one string; freed with its pool. */
static const char *source_text(void)
{
    NSString *text = [NSString stringWithContentsOfFile:@"metallib/tqkv.metal"
                                               encoding:NSUTF8StringEncoding
                                                  error:NULL];
    CHECK(text, "no metallib/tqkv.metal");
    return [text UTF8String];
}

/* A library that is refused, where a source takes its place: a path, or as many bytes of the library. */
typedef struct refused_library {
    const char *name, *path;
    size_t size;
    const char *words; /* why, in the text */
} refused_library;

static void check_refused_library(const char *path, size_t size, const char *words)
{
    char expected[200];
    @autoreleasepool {
        tqkv_metal_desc desc = {.library_path = path, .library_source = source_text()};
        if (!path) desc.library_bytes = [library_bytes() bytes], desc.library_size = size;
        tqkv_metal *m = create(desc, TQKV_OK, "library refused: ");
        tqkv_metal_error(m, expected, sizeof expected);
        CHECK(strstr(expected, words) && strstr(expected, "; compiled from source"), "the text is \"%s\"", expected);
        check_works(m);
        tqkv_metal_destroy(m);
        desc.library_source = NULL;
        tqkv_metal_destroy(create(desc, TQKV_METAL_ERROR, words));
        desc.library_source = "int nothing;"; /* both are refused: the text has both reasons */
        create(desc, TQKV_METAL_ERROR, words);
        create(desc, TQKV_METAL_ERROR, "; then: ");
    }
}

static void run_source_fallback(const void *parameters)
{
    const refused_library *c = parameters;
    check_refused_library(c->path, c->size, c->words);
}

/* Without a library the source is compiled, and with a good one it is not. */
static void run_source(const void *parameters)
{
    (void)parameters;
    @autoreleasepool {
        tqkv_metal_desc desc = {.library_source = source_text()};
        tqkv_metal *m = create(desc, TQKV_OK, "");
        char text[100] = "untouched";
        tqkv_metal_error(m, text, sizeof text);
        CHECK(!text[0], "a text without a failure: %s", text);
        check_works(m);
        tqkv_metal_destroy(m);
        desc.library_source = "int nothing;";
        if (!test_host.embedded) create(desc, TQKV_METAL_ERROR, "library_source: ");
        desc.library_source = "";
        if (!test_host.embedded) create(desc, TQKV_INVALID_ARGUMENT, "library_source is empty");
        desc.library_source = "int nothing;"; /* not read: the library is good */
        desc.library_path = test_host.library;
        m = create(desc, TQKV_OK, "");
        tqkv_metal_error(m, text, sizeof text);
        CHECK(!text[0], "a good library is refused: %s", text);
        tqkv_metal_destroy(m);
        desc.library_path = ""; /* a wrong argument stays one */
        desc.library_source = source_text();
        create(desc, TQKV_INVALID_ARGUMENT, "library_path");
    }
}

static void run_embedded(const void *parameters)
{
    (void)parameters;
    tqkv_metal_desc desc = {0};
    const bool is_embedded = test_host.embedded;
    tqkv_metal *m = create(desc, is_embedded ? TQKV_OK : TQKV_INVALID_ARGUMENT, is_embedded ? "" : "no library");
    if (m) check_works(m);
    tqkv_metal_destroy(m);
}

static void run_memory(const void *parameters)
{
    (void)parameters;
    tqkv_metal *m = host_context();
    REQUIRE(m, "no context");
    const tqkv_allocator memory = tqkv_metal_allocator(m);
    char *a = memory.alloc(memory.user, 100), *b = memory.alloc(memory.user, 0), *left = memory.alloc(memory.user, 7);
    tqkv_metal_buffer at, end;
    REQUIRE(a && b && left, "no memory");
    CHECK_RESULT(tqkv_metal_find(m, a, &at), TQKV_OK);
    CHECK(at.offset == 0 && [(id<MTLBuffer>)at.buffer contents] == a, "another buffer");
    CHECK_RESULT(tqkv_metal_find(m, a + 99, &end), TQKV_OK);
    CHECK(end.offset == 99 && end.buffer == at.buffer, "another offset");
    CHECK_REFUSED(m, tqkv_metal_find(m, a - 1, &at), TQKV_INVALID_ARGUMENT, "outside");
    CHECK_REFUSED(m, tqkv_metal_find(m, a + 100, &at), TQKV_INVALID_ARGUMENT, "outside");
    CHECK_RESULT(tqkv_metal_find(m, NULL, &at), TQKV_INVALID_ARGUMENT);
    memory.free(memory.user, a, 100);
    memory.free(memory.user, NULL, 0);
    memory.free(memory.user, b, 0);
    CHECK_RESULT(tqkv_metal_find(m, a, &at), TQKV_INVALID_ARGUMENT);
    char text[8];
    tqkv_metal_error(m, text, sizeof text);
    CHECK(!strcmp(text, "a point"), "cut to \"%s\"", text);
    CHECK(!tqkv_metal_allocator(NULL).alloc, "an allocator of nothing");
    tqkv_metal_destroy(m); /* frees `left` too */
}

/* Formats, types and groups as caches may have them; what a context cannot serve is refused with its text. */
static void run_self_test(const void *parameters)
{
    (void)parameters;
    const float sinks[] = {1.0f, -2.0f};
    const tqkv_cache_desc descs[] = {
        {.head_dim = 64, .n_kv_heads = 1},
        {.head_dim = 128, .n_kv_heads = 2, .n_heads = 8, .key_format = TQKV_TQ4, .value_format = TQKV_TQ4},
        {.head_dim = 192, .value_dim = 128, .n_kv_heads = 1, .n_heads = 2, .type = TQKV_TYPE_F16},
        {.head_dim = 80, .n_kv_heads = 1, .type = TQKV_TYPE_BF16, .softcap = 30.0f},
        {.head_dim = 64, .n_kv_heads = 1, .key_format = TQKV_F16, .value_format = TQKV_F16},
        {.head_dim = 512, .n_kv_heads = 1, .n_heads = 8, .shared = true, .tail_dim = 64},
        {.head_dim = 448, .n_kv_heads = 1, .n_heads = 2, .shared = true, .tail_dim = 64, .tail_format = TQKV_TQ8},
        {.head_dim = 128, .n_kv_heads = 1, .n_heads = 2, .exact_first = 4, .exact_last = 64, .ring = true},
        {.head_dim = 96, .n_kv_heads = 1, .n_heads = 2, .sinks = sinks, .window = 100}};
    for (size_t i = 0; i < sizeof descs / sizeof *descs; i++) {
        char text[400];
        const tqkv_result r = tqkv_metal_self_test(test_host.metal, &descs[i]);
        tqkv_metal_error(test_host.metal, text, sizeof text);
        CHECK(r == TQKV_OK, "case %zu: %s, \"%s\"", i, tqkv_result_string(r), text);
    }
    const tqkv_cache_desc unknown = {.head_dim = 100, .n_kv_heads = 1}, empty = {.head_dim = 64};
    CHECK_REFUSED(test_host.metal, tqkv_metal_self_test(test_host.metal, &unknown), TQKV_UNSUPPORTED, "head_dim 32");
    CHECK_REFUSED(test_host.metal, tqkv_metal_self_test(test_host.metal, &empty), TQKV_INVALID_ARGUMENT, "self-test");
    CHECK_RESULT(tqkv_metal_self_test(NULL, &unknown), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_self_test(test_host.metal, NULL), TQKV_INVALID_ARGUMENT);
}

#ifdef STANDIN
/* A GPU that computes otherwise: after dispatch n of the test one value of a buffer that it wrote is another. */
static void run_self_test_fails(const void *parameters)
{
    (void)parameters;
    const tqkv_cache_desc usual = {.head_dim = 64, .n_kv_heads = 1},
                          latent = {.head_dim = 448, .n_kv_heads = 1, .shared = true, .tail_dim = 64},
                          ends = {.head_dim = 64, .n_kv_heads = 1, .exact_first = 1, .exact_last = 1};
    const struct {
        tqkv_cache_desc desc;
        int dispatch;
        const char *words;
    } cases[] = {{usual, 1, "self-test: keys of head_dim 64, i8/tq4 differ"},
                 {usual, 2, "decoded keys"},
                 {usual, 3, "decoded values"}, /* then attend and attend_merge, twice */
                 {usual, 5, "outputs of one query"},
                 {usual, 7, "outputs of three queries"},
                 {usual, 8, "scores of an index"},
                 {usual, 9, "chosen blocks"},
                 {usual, 12, "outputs of a list"}, /* after attend_list and attend */
                 {latent, 3, "decoded tails of head_dim 448, i8/i8 and f16"},
                 {latent, 10, "outputs of a list"},
                 {ends, 2, "outputs of one query"}}; /* encode_kv of the first positions as halves */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        standin_spoil(cases[i].dispatch);
        CHECK_REFUSED(test_host.metal, tqkv_metal_self_test(test_host.metal, &cases[i].desc), TQKV_METAL_ERROR,
                      cases[i].words);
        standin_spoil(0);
    }
    CHECK_RESULT(tqkv_metal_self_test(test_host.metal, &usual), TQKV_OK);
}
#endif

/* -- Threads: one context, one encoder a thread -- */

enum { THREADS = 6, ROUNDS = 4 };

typedef struct worker {
    tqkv_metal *metal;
    int number, failures;
    pthread_t thread;
    void *(*work)(void *);
    atomic_int *missing; /* threads that have not started */
} worker;

static int worker_round(const worker *w, int round)
{
    const int head_dim = test_head_dims[(w->number + round) % 4];
    const tqkv_format format = test_formats[(w->number + 3 * round) % TEST_FORMATS];
    tqkv_cache_desc desc = {0};
    tqkv_cache *caches[2] = {NULL, NULL};
    desc.head_dim = head_dim;
    desc.n_kv_heads = 2;
    desc.capacity = 20;
    desc.key_format = desc.value_format = format;
    const size_t count = (size_t)(20 * 2 * head_dim);
    float *x = host_floats((uint64_t)(w->number * 10 + round), count), out[2][2 * 1024];
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < 2 && r == TQKV_OK; i++) {
        desc.metal = i ? w->metal : NULL;
        r = tqkv_cache_create(&desc, &caches[i]);
        if (r == TQKV_OK) r = tqkv_cache_append(caches[i], x, x, 20);
        if (r == TQKV_OK) r = tqkv_cache_attend(caches[i], x, 1, out[i]);
    }
    double wrong = 0, all = 0;
    for (int i = 0; i < 2 * head_dim && r == TQKV_OK; i++) {
        wrong += ((double)out[0][i] - (double)out[1][i]) * ((double)out[0][i] - (double)out[1][i]);
        all += (double)out[0][i] * (double)out[0][i];
    }
    tqkv_cache_destroy(caches[0]);
    tqkv_cache_destroy(caches[1]);
    free(x);
    return r != TQKV_OK || !(wrong <= 4e-5 * 4e-5 * all);
}

static void *work_thread(void *parameter)
{
    worker *w = parameter;
    @autoreleasepool {
        for (int round = 0; round < ROUNDS; round++) w->failures += worker_round(w, round);
    }
    return NULL;
}

/* Records calls of every head_dim and waits at the end: all threads ask for the same new pipelines. */
static void *record_thread(void *parameter)
{
    worker *w = parameter;
    @autoreleasepool {
        id<MTLBuffer> rows = [test_host.device newBufferWithLength:4096 options:MTLResourceStorageModeShared];
        const tqkv_metal_buffer b = {rows, 0};
        id<MTLCommandBuffer> commands = [test_host.queue commandBuffer];
        id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
        memset([rows contents], 0, 4096);
        for (int i = 0; i < 24; i++) {
            const int head_dim = test_head_dims[(i + w->number) % 6];
            w->failures += tqkv_metal_rotate(w->metal, encoder, b, 1, head_dim) != TQKV_OK;
            w->failures += tqkv_metal_unrotate(w->metal, encoder, b, 1, head_dim) != TQKV_OK;
            w->failures += tqkv_metal_rotate(w->metal, encoder, b, 1, 33) != TQKV_UNSUPPORTED;
        }
        [encoder endEncoding];
        [commands commit];
        [commands waitUntilCompleted];
        w->failures += [commands status] != MTLCommandBufferStatusCompleted;
        [rows release];
    }
    return NULL;
}

/* Allocates and frees memory while other threads look theirs up. */
static void *memory_thread(void *parameter)
{
    worker *w = parameter;
    const tqkv_allocator memory = tqkv_metal_allocator(w->metal);
    for (int round = 0; round < 50; round++) {
        char *own = memory.alloc(memory.user, 1000);
        for (int i = 0; own && i < 20; i++) {
            tqkv_metal_buffer found = {nil, 0};
            w->failures += tqkv_metal_find(w->metal, own + 50 * i, &found) != TQKV_OK;
            w->failures += found.offset != 50 * (size_t)i || !found.buffer;
            if (i % 4 == 0) sched_yield();
        }
        w->failures += !own;
        memory.free(memory.user, own, 1000);
    }
    return NULL;
}

/* Relaxed: it must not order the accesses that the test wants to race. */
static void *begin_together(void *parameter)
{
    worker *w = parameter;
    atomic_fetch_sub_explicit(w->missing, 1, memory_order_relaxed);
    while (atomic_load_explicit(w->missing, memory_order_relaxed) > 0) sched_yield();
    return w->work(w);
}

static void run_threads(const void *parameters)
{
    static void *(*const works[])(void *) = {work_thread, record_thread, memory_thread, record_thread};
    worker workers[THREADS];
    atomic_int missing = THREADS;
    const tqkv_metal_desc from_source = {.device = test_host.device, .library_source = source_text()};
    tqkv_metal *m = *(const int *)parameters == 3 ? create(from_source, TQKV_OK, "") : host_context();
    REQUIRE(m, "no context");
    for (int i = 0; i < THREADS; i++) {
        workers[i].metal = m;
        workers[i].number = i;
        workers[i].failures = 0;
        workers[i].work = works[*(const int *)parameters];
        workers[i].missing = &missing;
        CHECK(!pthread_create(&workers[i].thread, NULL, begin_together, &workers[i]), "no thread");
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK(workers[i].failures == 0, "thread %d: %d failures", i, workers[i].failures);
    }
    tqkv_metal_destroy(m);
}

#ifdef STANDIN

/* -- What only the stand-in can do -- */

static void run_stale(const void *parameters)
{
    char path[400];
    const char *what = parameters;
    tqkv_metal_desc desc = {0};
    REQUIRE(test_host.stale, "needs --stale");
    snprintf(path, sizeof path, "%s/%s.metallib", test_host.stale, what);
    desc.library_path = path;
    tqkv_metal_destroy(create(desc, TQKV_TABLE_MISMATCH, what));
}

/* With a library that lacks the kernels, each call says so and records nothing. */
static void run_missing_kernels(const void *parameters)
{
    (void)parameters;
    char path[400];
    tqkv_metal_desc desc = {0};
    REQUIRE(test_host.stale, "needs --stale");
    snprintf(path, sizeof path, "%s/tables_alone.metallib", test_host.stale);
    desc.library_path = path;
    desc.device = test_host.device;
    tqkv_metal *m = create(desc, TQKV_OK, "");
    REQUIRE(m, "no context");
    const tqkv_metal_buffer rows = host_zeros(512);
    ((float *)host_contents(rows))[5] = 1.0f;
    host_work work = host_begin(false);
    CHECK_REFUSED(m, tqkv_metal_rotate(m, work.encoder, rows, 2, 64), TQKV_METAL_ERROR, "tqkv_rotate_d64");
    host_end(&work);
    CHECK(((float *)host_contents(rows))[5] == 1.0f, "rotated");
    host_release(rows);
    tqkv_metal_destroy(m);
}

/* A stale library, and one that lacks kernels: the source takes their place. */
static void run_source_of_stale(const void *parameters)
{
    char path[400];
    const refused_library *c = parameters;
    REQUIRE(test_host.stale, "needs --stale");
    snprintf(path, sizeof path, "%s/%s.metallib", test_host.stale, c->path);
    @autoreleasepool {
        tqkv_metal_desc desc = {.library_path = path, .library_source = source_text()};
        char text[400];
        tqkv_metal *m = create(desc, TQKV_OK, c->words);
        check_works(m); /* a library without kernels is no stale one: each is compiled when it is needed */
        tqkv_metal_error(m, text, sizeof text);
        CHECK(!strncmp(text, "library refused: ", 17) && strstr(text, "; compiled from source"), "the text is \"%s\"",
              text);
        tqkv_metal_destroy(m);
    }
}

/* A good library one of whose kernels Metal refuses: the source serves that one. */
static void run_refused_kernel(const void *parameters)
{
    (void)parameters;
    @autoreleasepool {
        char text[400];
        tqkv_metal_desc desc = {.library_path = test_host.library, .library_source = source_text()};
        desc.device = test_host.device;
        const tqkv_metal_buffer rows = host_zeros(512);
        standin_refuse("tqkv_rotate_d64", false);
        tqkv_metal *m = create(desc, TQKV_OK, "");
        check_works(m);
        tqkv_metal_error(m, text, sizeof text);
        CHECK(!strcmp(text, "library refused: tqkv_rotate_d64: refused by name; compiled from source"), "%s", text);
        tqkv_metal_destroy(m);
        m = create(desc, TQKV_OK, "");
        standin_refuse("tqkv_rotate_d64", true);
        host_work work = host_begin(false);
        CHECK_REFUSED(m, tqkv_metal_rotate(m, work.encoder, rows, 2, 64), TQKV_METAL_ERROR,
                      "refused by name; then: tqkv_rotate_d64: refused by name");
        host_end(&work);
        standin_refuse(NULL, false);
        tqkv_metal_destroy(m);
        host_release(rows);
    }
}

/* A GPU without matrices: the context can be made all the same. */
static void run_no_product(const void *parameters)
{
    (void)parameters;
    const tqkv_metal_desc desc = {.library_path = test_host.library};
    standin_refuse("tqkv_tables 1", true);
    tqkv_metal *m = create(desc, TQKV_OK, "tqkv_tables: refused by name; attention without matrices");
    standin_refuse(NULL, false);
    const tqkv_cache_desc cache = {.head_dim = 64, .n_kv_heads = 1, .n_heads = 4};
    standin_refuse("attend_matrix", true); /* nobody asks for it */
    CHECK_RESULT(tqkv_metal_self_test(m, &cache), TQKV_OK);
    standin_refuse(NULL, false);
    tqkv_metal_destroy(m);
}

/* Where Metal takes no kernel that multiplies matrices, a context attends without them and says so. */
static void run_without_matrices(const void *parameters)
{
    const int way = *(const int *)parameters; /* 0: a call that waits, 1: prepare, 2: recorded, 3: in a batch */
    char text[400];
    tqkv_metal *m = host_context();
    tqkv_store s = test_store(TQKV_TQ4, 64, 1, 64, false);
    float *x = host_floats(5, 64 * 64), expected[4 * 64];
    const tqkv_attention own = {.keys = &s, .values = &s, .n_heads = 4, .end = 64};
    const tqkv_cache_desc desc = {.head_dim = 64, .n_kv_heads = 1, .n_heads = 4};
    REQUIRE(m, "no context");
    CHECK_RESULT(tqkv_encode(&s, x, 64, 0), TQKV_OK);
    CHECK_RESULT(tqkv_attend(&own, x, expected), TQKV_OK);
    tqkv_metal_store gpu = host_store(&s);
    const tqkv_metal_attention a = {.keys = &gpu, .values = &gpu, .attention = {.n_heads = 4, .end = 64}};
    const tqkv_metal_buffer q = host_buffer(x, sizeof expected), out = host_zeros(sizeof expected),
                            scratch = host_zeros(65536), arguments = host_zeros(1024);
    standin_refuse("attend_matrix", true);
    if (way == 0) CHECK_RESULT(tqkv_metal_self_test(m, &desc), TQKV_OK);
    if (way == 1) CHECK_RESULT(tqkv_metal_prepare(m, &a, 2, TQKV_METAL_BATCHES), TQKV_OK);
    host_work work = host_begin(false);
    if (way == 3)
        CHECK_RESULT(tqkv_metal_attend_batch(m, work.encoder, &a, 1, &q, arguments, scratch, &out), TQKV_OK);
    else
        CHECK_RESULT(tqkv_metal_attend(m, work.encoder, &a, q, scratch, out), TQKV_OK);
    host_end(&work);
    standin_refuse(NULL, false);
    tqkv_metal_error(m, text, sizeof text);
    CHECK(strstr(text, "refused by name; attention without matrices"), "the text is \"%s\"", text);
    for (int i = 0; i < 4 * 64; i++)
        CHECK(fabs((double)((float *)host_contents(out))[i] - (double)expected[i]) < 1e-4, "value %d", i);
    const tqkv_metal_buffer all[] = {q, out, scratch, arguments};
    for (int i = 0; i < 4; i++) host_release(all[i]);
    host_store_release(&gpu);
    test_store_free(&s);
    free(x);
    tqkv_metal_destroy(m);
}

/* A refusal of another kernel of such a call is one of the call alone: the context goes on with matrices, which an index needs. */
static void run_with_matrices(const void *parameters)
{
    tqkv_metal *m = host_context();
    tqkv_store s = test_store(TQKV_TQ4, 64, 1, 64, false);
    tqkv_metal_store gpu = host_store(&s);
    tqkv_metal_attention a = {.keys = &gpu, .values = &gpu, .attention = {.n_heads = 4, .end = 64}};
    const tqkv_metal_index x = {.keys = &gpu, .index = {.n_heads = 4, .end = 64}};
    const tqkv_metal_buffer q = host_zeros(1024), out = host_zeros(1024), scratch = host_zeros(65536);
    (void)parameters;
    REQUIRE(m, "no context");
    a.list = host_zeros(4);
    a.attention.list_length = a.attention.list_block = 1;
    host_work work = host_begin(false);
    standin_refuse("attend_list", true);
    CHECK_REFUSED(m, tqkv_metal_attend(m, work.encoder, &a, q, scratch, out), TQKV_METAL_ERROR, "tqkv_attend_list");
    standin_refuse(NULL, false);
    CHECK_RESULT(tqkv_metal_index_scores(m, work.encoder, &x, q, out), TQKV_OK);
    host_end(&work);
    const tqkv_metal_buffer all[] = {q, out, scratch, a.list};
    for (int i = 0; i < 4; i++) host_release(all[i]);
    host_store_release(&gpu);
    test_store_free(&s);
    tqkv_metal_destroy(m);
}

enum { BY_PATH, BY_BYTES, BY_OBJECT, EMBEDDED };

/* With a good library, given in that form, and a source, each call that can fail fails once: the context works from the
   source and says so, or the result is that of the failure. */
static void run_source_failures(const void *parameters)
{
    const int form = *(const int *)parameters, live = standin_live_objects();
    int from_source = 0, n_calls;
    @autoreleasepool {
        tqkv_metal_desc desc = {.device = test_host.device, .library_source = source_text()};
        NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:test_host.library]];
        id<MTLLibrary> library = form == BY_OBJECT ? [test_host.device newLibraryWithURL:url error:NULL] : nil;
        if (form == BY_PATH) desc.library_path = test_host.library;
        if (form == BY_BYTES)
            desc.library_bytes = [library_bytes() bytes], desc.library_size = [library_bytes() length];
        desc.library = library;
        standin_fail_at(0);
        tqkv_metal_destroy(create(desc, TQKV_OK, ""));
        n_calls = standin_calls();
        for (int n = 1; n <= n_calls; n++) {
            char text[400] = "";
            tqkv_metal *m = NULL;
            desc.error = text;
            desc.error_size = sizeof text;
            standin_fail_at(n);
            const tqkv_result r = tqkv_metal_create(&desc, &m);
            standin_fail_at(0);
            const bool fell_back = strstr(text, "; compiled from source") != NULL;
            const bool without = strstr(text, "attention without matrices") != NULL;
            CHECK((fell_back || without) == (r == TQKV_OK), "call %d failed: %s, \"%s\"", n, tqkv_result_string(r),
                  text);
            if (r == TQKV_OK) check_works(m);
            from_source += fell_back;
            tqkv_metal_destroy(m);
        }
        [library release];
    }
    CHECK(standin_live_objects() == live, "%d objects leaked", standin_live_objects() - live);
    /* the library; function and pipeline of tables; command buffer, encoder and completion */
    CHECK(from_source == (form != BY_OBJECT) + 2 + 3, "%d of %d failures led to the source", from_source, n_calls);
}

/* A context refuses the objects of another device. */
static void run_other_device(const void *parameters)
{
    (void)parameters;
    tqkv_metal *m = test_host.metal;
    tqkv_metal_desc desc = {0};
    NSError *error = nil;
    id<MTLDevice> other = MTLCreateSystemDefaultDevice();
    id<MTLBuffer> buffer = [other newBufferWithLength:512 options:MTLResourceStorageModeShared];
    const tqkv_metal_buffer rows = {buffer, 0};
    host_work work = host_begin(false);
    CHECK_REFUSED(m, tqkv_metal_rotate(m, work.encoder, rows, 2, 64), TQKV_INVALID_ARGUMENT, "another device");
    host_end(&work);
    @autoreleasepool {
        NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:test_host.library]];
        id<MTLLibrary> library = [other newLibraryWithURL:url error:&error];
        desc.device = test_host.device;
        desc.library = library;
        create(desc, TQKV_INVALID_ARGUMENT, "another device");
        [library release];
    }
    [buffer release];
    [other release];
}

/* Metal's capture and validation hand out devices as objects of their own. */
static void run_wrapped_device(const void *parameters)
{
    (void)parameters;
    id<MTLDevice> wrapped = standin_wrapped(test_host.device);
    id<MTLBuffer> buffer = [wrapped newBufferWithLength:512 options:MTLResourceStorageModeShared];
    const tqkv_metal_buffer rows = {buffer, 0};
    memset([buffer contents], 0, 512);
    host_work work = host_begin(false);
    CHECK_RESULT(tqkv_metal_rotate(test_host.metal, work.encoder, rows, 2, 64), TQKV_OK);
    host_end(&work);
    [buffer release];
    [wrapped release];
}

/* Threadgroup memory of the caller's own dispatches stays in force: nothing of it may stand beside that of a call. */
static void run_memory_in_force(const void *parameters)
{
    (void)parameters;
    tqkv_store s = test_store(TQKV_TQ4, 64, 1, 4, false);
    tqkv_metal_store gpu = host_store(&s);
    const tqkv_metal_buffer src = host_zeros(256), none = {nil, 0};
    host_work work = host_begin(false);
    [work.encoder setThreadgroupMemoryLength:32752 atIndex:3];
    CHECK_RESULT(tqkv_metal_encode(test_host.metal, work.encoder, &gpu, src, 1, 0, none), TQKV_OK);
    host_end(&work);
    host_release(src);
    host_store_release(&gpu);
    test_store_free(&s);
}

/* Encoders of Metal 4 have other methods. */
static void run_other_encoder(const void *parameters)
{
    (void)parameters;
    const tqkv_metal_buffer rows = host_zeros(512);
    NSObject *other = [[NSObject alloc] init];
    CHECK_REFUSED(test_host.metal, tqkv_metal_rotate(test_host.metal, other, rows, 2, 64), TQKV_INVALID_ARGUMENT,
                  "Metal 4");
    CHECK_REFUSED(test_host.metal, tqkv_metal_rotate(test_host.metal, nil, rows, 2, 64), TQKV_INVALID_ARGUMENT,
                  "no encoder");
    [other release];
    host_release(rows);
}

static void run_devices(const void *parameters)
{
    (void)parameters;
    tqkv_metal_desc desc = {0};
    desc.library_path = test_host.library;
    standin_set_device((standin_device){.missing = true});
    create(desc, TQKV_UNSUPPORTED, "no Metal device");
    standin_set_device((standin_device){.before_apple7 = true});
    create(desc, TQKV_UNSUPPORTED, "Apple7");
    standin_set_device((standin_device){.simd_width = 16});
    create(desc, TQKV_UNSUPPORTED, "simdgroups of 16");
    standin_set_device((standin_device){.max_threads = 16});
    create(desc, TQKV_UNSUPPORTED, "tqkv_tables");
    const unsigned small[] = {32, 64, 96};
    for (int i = 0; i < 3; i++) {
        worker w = {.number = i};
        standin_set_device((standin_device){.max_threads = small[i]});
        w.metal = create(desc, TQKV_OK, "");
        CHECK(worker_round(&w, 0) == 0, "wrong with %u threads at most", small[i]);
        tqkv_metal_destroy(w.metal);
    }
    standin_set_device((standin_device){0});
}

/* Attention needs two pipelines. If one cannot be built, nothing is recorded; the next call builds both. */
static void run_half_recorded(const void *parameters)
{
    (void)parameters;
    tqkv_metal *m = host_context();
    tqkv_store s = test_store(TQKV_TQ4, 32, 1, 4, false);
    const float q[32] = {1.0f};
    size_t size = 0;
    REQUIRE(m, "no context");
    CHECK_RESULT(tqkv_encode(&s, q, 1, 0), TQKV_OK);
    tqkv_metal_store gpu = host_store(&s);
    const tqkv_metal_attention a = {.keys = &gpu, .values = &gpu, .attention.end = 1};
    CHECK_RESULT(tqkv_metal_attend_scratch(m, &a, &size), TQKV_OK);
    const tqkv_metal_buffer qb = host_buffer(q, sizeof q), out = host_zeros(sizeof q), scratch = host_zeros(size);
    host_work work = host_begin(false);
    const int failing[] = {6, 3, 2,
                           1}; /* each takes memory, a function, a pipeline; the first is built and kept at once */
    for (int i = 0; i < 4; i++) {
        standin_fail_at(failing[i]);
        const tqkv_result r = tqkv_metal_attend(m, work.encoder, &a, qb, scratch, out);
        CHECK(r == TQKV_METAL_ERROR || r == TQKV_OUT_OF_MEMORY, "call %d failed: %s", failing[i],
              tqkv_result_string(r));
        standin_fail_at(0);
    }
    host_end(&work);
    for (size_t i = 0; i < size; i++) CHECK(!((char *)host_contents(scratch))[i], "byte %zu of scratch is written", i);
    work = host_begin(false);
    CHECK_RESULT(tqkv_metal_attend(m, work.encoder, &a, qb, scratch, out), TQKV_OK);
    host_end(&work);
    CHECK(*(float *)host_contents(out) > 0.5f, "attended to the one position: %g",
          (double)*(float *)host_contents(out));
    host_release(qb);
    host_release(out);
    host_release(scratch);
    host_store_release(&gpu);
    test_store_free(&s);
    tqkv_metal_destroy(m);
}

/* After prepare no call of its kind builds a pipeline, however the cache has grown. */
static void run_prepared(const void *parameters)
{
    tqkv_metal *m = host_context();
    REQUIRE(m, "no context");
    tqkv_cache_desc desc = *(const tqkv_cache_desc *)parameters;
    tqkv_cache *cache = NULL;
    const size_t row = (size_t)desc.head_dim + (size_t)desc.tail_dim;
    float *x = host_floats(4, 9 * 3 * row), *out = test_alloc(9 * 3 * row * sizeof *out);
    desc.metal = m;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    CHECK_RESULT(tqkv_metal_cache_prepare(m, cache, 9), TQKV_OK);
    standin_fail_at(0);
    int calls = 0;
    for (int end = 1; end <= 12; end++, calls++) {
        CHECK_RESULT(tqkv_cache_append(cache, x, desc.shared ? NULL : x, 1), TQKV_OK);
        for (int n = 9; n > 0; n -= 4, calls++) CHECK_RESULT(tqkv_cache_attend(cache, x, n, out), TQKV_OK);
    }
    /* a command buffer, an encoder and a completion each; one or two staging blocks */
    CHECK(standin_calls() <= calls * 3 + 2 * 2, "%d calls that can fail, of %d", standin_calls(), calls);
    CHECK_RESULT(tqkv_metal_cache_prepare(m, cache, 1), TQKV_OK);
    CHECK_REFUSED(m, tqkv_metal_cache_prepare(m, (tqkv_cache *)(void *)x, 1), TQKV_INVALID_ARGUMENT, "outside");
    CHECK_RESULT(tqkv_metal_cache_prepare(m, cache, -1), TQKV_INVALID_ARGUMENT);
    tqkv_cache_destroy(cache);
    free(x);
    free(out);
    tqkv_metal_destroy(m);
}

/* The same of stores, in batches, with pages whose entries nobody knows yet. */
static void run_prepared_stores(const void *parameters)
{
    const bool paged = *(const bool *)parameters;
    tqkv_metal *m = host_context();
    int32_t pages[2] = {1, 0};
    tqkv_store stores[2] = {test_store(TQKV_TQ4, 64, 1, 128, false), test_store(TQKV_TQ5, 64, 1, 128, false)};
    tqkv_metal_store s[2] = {host_store(&stores[0]), host_store(&stores[1])};
    const tqkv_metal_buffer table = host_buffer(pages, sizeof pages), none = {nil, 0};
    for (int i = 0; paged && i < 2; i++) s[i].pages = table, s[i].shape.n_pages = 2, s[i].shape.page_size = 64;
    tqkv_metal_attention a = {.keys = &s[0], .values = &s[1], .attention.n_heads = 2};
    REQUIRE(m, "no context");
    CHECK_RESULT(tqkv_metal_prepare(m, &a, 4, TQKV_METAL_BATCHES | TQKV_METAL_SLICES), TQKV_OK);
    standin_fail_at(0);
    const tqkv_metal_buffer q = host_zeros(4 * 2 * 256), out = host_zeros(4 * 2 * 256), max = host_zeros(32),
                            sum = host_zeros(32), more = host_zeros(32), most = host_zeros(32),
                            slice = host_zeros(4 * 2 * 256);
    size_t arguments, scratch;
    a.attention.end = 3;
    a.attention.n_queries = 3;
    CHECK_RESULT(tqkv_metal_attend_batch_sizes(m, &a, 1, &arguments, &scratch), TQKV_OK);
    const tqkv_metal_buffer ab = host_zeros(arguments), sb = host_zeros(scratch);
    host_work work = host_begin(false);
    standin_fail_at(0);
    CHECK_RESULT(tqkv_metal_encode_kv(m, work.encoder, &s[0], &s[1], q, q, 4, 0, none), TQKV_OK);
    CHECK_RESULT(tqkv_metal_attend(m, work.encoder, &a, q, sb, out), TQKV_OK);
    CHECK_RESULT(tqkv_metal_attend_batch(m, work.encoder, &a, 1, &q, ab, sb, &out), TQKV_OK);
    CHECK_RESULT(tqkv_metal_attend_partial(m, work.encoder, &a, q, 0, 2, sb, out, max, sum), TQKV_OK);
    CHECK_RESULT(tqkv_metal_attend_partial(m, work.encoder, &a, q, 2, 1, sb, slice, more, most), TQKV_OK);
    CHECK_RESULT(tqkv_metal_attend_merge(m, work.encoder, &a, out, max, sum, slice, more, most), TQKV_OK);
    CHECK_RESULT(tqkv_metal_attend_finish(m, work.encoder, &a, out, max, sum, slice), TQKV_OK);
    CHECK(standin_calls() == 0, "%d calls that can fail", standin_calls());
    host_end(&work);
    CHECK_RESULT(tqkv_metal_prepare(m, NULL, 1, 0), TQKV_INVALID_ARGUMENT);
    const tqkv_metal_buffer all[] = {q, out, ab, sb, table, max, sum, more, most, slice};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) host_release(all[i]);
    for (int i = 0; i < 2; i++) {
        s[i].pages = none;
        host_store_release(&s[i]);
        test_store_free(&stores[i]);
    }
    tqkv_metal_destroy(m);
}

/* Stores of positions that are kept as halves: a call for each end of the context that has positions. */
/* Pages of half a tile: a table of one page is shorter than a tile, and others are not. The list that the processor knows is
   that of one query. */
static void run_prepared_tables(const void *parameters)
{
    enum { ENTRIES = 4, PAGE = 16 };
    const int longest = *(const int *)parameters;
    const int32_t pages[ENTRIES] = {1, 0, 3, 2}, list[] = {0, -1};
    tqkv_metal *m = host_context();
    tqkv_store store = test_store(TQKV_TQ4, 64, 1, ENTRIES * PAGE, false);
    tqkv_metal_store s = host_store(&store);
    s.pages = host_buffer(pages, sizeof pages);
    s.shape.n_pages = longest;
    s.shape.page_size = PAGE;
    int32_t *known = test_alloc(sizeof list);
    memcpy(known, list, sizeof list);
    tqkv_metal_attention a = {.keys = &s, .values = &s, .list = host_buffer(list, sizeof list)};
    a.attention.list = known;
    a.attention.list_length = 2;
    a.attention.list_block = 16;
    REQUIRE(m, "no context");
    CHECK_RESULT(tqkv_metal_prepare(m, &a, 5, 0), TQKV_OK);
    const tqkv_metal_buffer unused = a.list;
    a.list.buffer = nil;
    a.attention.list = NULL;
    CHECK_RESULT(tqkv_metal_prepare(m, &a, 1, TQKV_METAL_BATCHES | TQKV_METAL_SLICES), TQKV_OK);
    const tqkv_metal_buffer q = host_zeros(256), out = host_zeros(256), max = host_zeros(4), sum = host_zeros(4),
                            arguments = host_zeros(4096), scratch = host_zeros(65536);
    host_work work = host_begin(false);
    for (int n = 1; n <= ENTRIES; n++) {
        s.shape.n_pages = n;
        a.attention.end = n * PAGE - 3;
        standin_fail_at(0);
        CHECK_RESULT(tqkv_metal_attend(m, work.encoder, &a, q, scratch, out), TQKV_OK);
        CHECK_RESULT(tqkv_metal_attend_batch(m, work.encoder, &a, 1, &q, arguments, scratch, &out), TQKV_OK);
        CHECK_RESULT(tqkv_metal_attend_partial(m, work.encoder, &a, q, 2, 9, scratch, out, max, sum), TQKV_OK);
        CHECK(standin_calls() == 0, "%d pages: %d calls that can fail", n, standin_calls());
    }
    [work.encoder endEncoding]; /* nothing has to run */
    const tqkv_metal_buffer all[] = {q, out, max, sum, arguments, scratch, unused};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) host_release(all[i]);
    free(known);
    host_store_release(&s);
    test_store_free(&store);
    tqkv_metal_destroy(m);
}

static void run_prepared_ends(const void *parameters)
{
    (void)parameters;
    tqkv_metal *m = host_context();
    tqkv_store stores[5] = {test_store(TQKV_TQ4, 64, 1, 32, false), test_store(TQKV_TQ5, 64, 1, 32, false),
                            test_store(TQKV_F16, 64, 1, 4, false), test_store(TQKV_F16, 64, 1, 32, false),
                            test_store(TQKV_F16, 64, 1, 32, false)};
    tqkv_metal_store s[5];
    for (int i = 2; i < 5; i++) stores[i].rotated = true; /* as the codes */
    for (int i = 0; i < 5; i++) s[i] = host_store(&stores[i]);
    tqkv_metal_attention a = {.keys = &s[0], .values = &s[1], .first_keys = &s[2], .last_keys = &s[3]};
    a.last_values = &s[4];
    a.attention.exact_first = 4;
    a.attention.exact_last = 6;
    REQUIRE(m, "no context");
    CHECK_RESULT(tqkv_metal_prepare(m, &a, 1, 0), TQKV_OK);
    size_t scratch;
    CHECK_RESULT(tqkv_metal_attend_scratch(m, &a, &scratch), TQKV_OK);
    const tqkv_metal_buffer q = host_zeros(20 * 256), out = host_zeros(256), sb = host_zeros(scratch), none = {nil, 0};
    host_work work = host_begin(false);
    standin_fail_at(0);
    CHECK_RESULT(tqkv_metal_encode_kv(m, work.encoder, &s[0], &s[1], q, q, 20, 0, none), TQKV_OK);
    CHECK_RESULT(tqkv_metal_encode(m, work.encoder, &s[2], q, 4, 0, none), TQKV_OK);
    CHECK_RESULT(tqkv_metal_encode_kv(m, work.encoder, &s[3], &s[4], q, q, 20, 0, none), TQKV_OK);
    for (a.attention.end = 10; a.attention.end <= 20; a.attention.end += 5)
        CHECK_RESULT(tqkv_metal_attend(m, work.encoder, &a, q, sb, out), TQKV_OK);
    CHECK(standin_calls() == 0, "%d calls that can fail", standin_calls());
    host_end(&work);
    host_release(q);
    host_release(out);
    host_release(sb);
    for (int i = 0; i < 5; i++) {
        host_store_release(&s[i]);
        test_store_free(&stores[i]);
    }
    tqkv_metal_destroy(m);
}

/* An index and the list that it chooses. */
static void run_prepared_index(const void *parameters)
{
    (void)parameters;
    tqkv_metal *m = host_context();
    tqkv_store store = test_store(TQKV_I8, 64, 1, 40000, false);
    tqkv_metal_store s = host_store(&store);
    tqkv_metal_index x = {.keys = &s, .index = {.n_heads = 2}};
    tqkv_metal_attention a = {.keys = &s, .values = &s, .list = host_zeros(3 * 2 * sizeof(int32_t))};
    a.attention.list_length = 2;
    a.attention.list_block = 1;
    REQUIRE(m, "no context");
    CHECK_RESULT(tqkv_metal_index_prepare(m, &x, 3), TQKV_OK);
    CHECK_RESULT(tqkv_metal_prepare(m, &a, 3, 0), TQKV_OK);
    size_t sizes[2];
    a.attention.n_queries = 3;
    CHECK_RESULT(tqkv_metal_attend_scratch(m, &a, &sizes[0]), TQKV_OK);
    CHECK_RESULT(tqkv_metal_index_choose_scratch(m, &x, &sizes[1]), TQKV_OK);
    const tqkv_metal_buffer q = host_zeros(3 * 2 * 256), out = host_zeros(3 * 256), none = {nil, 0},
                            scores = host_zeros(3 * 40000 * sizeof(float)), first = host_zeros(sizes[0]),
                            second = host_zeros(sizes[1]);
    host_work work = host_begin(false);
    standin_fail_at(0);
    CHECK_RESULT(tqkv_metal_encode(m, work.encoder, &s, q, 3, 0, none), TQKV_OK);
    for (int n = 1; n <= 3; n += 2) {
        x.index.n_queries = a.attention.n_queries = n;
        x.index.end = a.attention.end = n == 1 ? 40000 : 3; /* a choice in several dispatches, and in one */
        CHECK_RESULT(tqkv_metal_index_scores(m, work.encoder, &x, q, scores), TQKV_OK);
        CHECK_RESULT(tqkv_metal_index_choose(m, work.encoder, &x, scores, 2, second, a.list), TQKV_OK);
        CHECK_RESULT(tqkv_metal_attend(m, work.encoder, &a, q, first, out), TQKV_OK);
    }
    CHECK(standin_calls() == 0, "%d calls that can fail", standin_calls());
    [work.encoder endEncoding]; /* nothing has to run */
    CHECK_RESULT(tqkv_metal_index_prepare(m, NULL, 1), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_index_prepare(m, &x, -1), TQKV_INVALID_ARGUMENT);
    const tqkv_metal_buffer all[] = {q, out, scores, first, second, a.list};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) host_release(all[i]);
    host_store_release(&s);
    test_store_free(&store);
    tqkv_metal_destroy(m);
}

/* Calls that wait release what they used: a second round leaves no more objects than the first. */
static void run_given_back(const void *parameters)
{
    (void)parameters;
    tqkv_cache_desc desc = {.head_dim = 64, .n_kv_heads = 1, .capacity = 8, .ring = true};
    tqkv_cache *cache = NULL;
    float *x = host_floats(4, 64), out[64];
    int live = 0;
    desc.metal = test_host.metal;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_RESULT(tqkv_cache_append(cache, x, x, 1), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(cache, x, 1, out), TQKV_OK);
        CHECK(i == 0 || standin_live_objects() == live, "%d more objects", standin_live_objects() - live);
        CHECK(i < 2 || standin_calls() == 6, "%d calls that can fail", standin_calls());
        if (i == 1) standin_fail_at(0); /* from here on: command buffer, encoder and completion of two calls */
        live = standin_live_objects();
    }
    tqkv_cache_destroy(cache);
    free(x);
}

/* Makes each call once. s: two stores of one head, b: source, destination, scratch. */
static void record_all(id<MTLComputeCommandEncoder> e, const tqkv_metal_store s[2], const tqkv_metal_buffer b[3],
                       tqkv_cache *cache)
{
    tqkv_metal *m = test_host.metal;
    const tqkv_metal_buffer none = {nil, 0};
    const tqkv_metal_attention a = {.keys = &s[0], .values = &s[1], .attention.end = 2};
    size_t bytes;
    CHECK_RESULT(tqkv_metal_encode(m, e, s, b[0], 1, 0, none), TQKV_OK);
    CHECK_RESULT(tqkv_metal_encode_kv(m, e, &s[0], &s[1], b[0], b[0], 1, 1, none), TQKV_OK);
    CHECK_RESULT(tqkv_metal_probe(m, e, s, b[0], 1, b[1], none), TQKV_OK);
    CHECK_RESULT(tqkv_metal_decode(m, e, s, 0, 1, TQKV_ORIGINAL, b[1]), TQKV_OK);
    CHECK_RESULT(tqkv_metal_rotate(m, e, b[1], 1, 64), TQKV_OK);
    CHECK_RESULT(tqkv_metal_unrotate(m, e, b[1], 1, 64), TQKV_OK);
    CHECK_RESULT(tqkv_metal_attend_scratch(m, &a, &bytes), TQKV_OK);
    CHECK_RESULT(tqkv_metal_attend(m, e, &a, b[0], b[2], b[1]), TQKV_OK);
    CHECK_RESULT(tqkv_metal_cache_append(m, e, cache, b[0], b[0], 1, none), TQKV_OK);
    CHECK_RESULT(tqkv_metal_cache_scratch(m, cache, 1, &bytes), TQKV_OK);
    CHECK_RESULT(tqkv_metal_cache_attend(m, e, cache, b[0], 1, b[2], b[1]), TQKV_OK);
}

/* Recorded a second time, no call builds a pipeline, allocates memory or makes a Metal call that may fail. */
static void run_recorded_again(const void *parameters)
{
    (void)parameters;
    tqkv_store stores[2] = {test_store(TQKV_TQ4, 64, 1, 4, false), test_store(TQKV_TQ5, 64, 1, 4, false)};
    tqkv_cache_desc desc = {.head_dim = 64, .n_kv_heads = 1, .capacity = 8, .metal = test_host.metal};
    tqkv_cache *cache = NULL;
    const tqkv_metal_store s[2] = {host_store(&stores[0]), host_store(&stores[1])};
    const tqkv_metal_buffer b[3] = {host_zeros(256), host_zeros(256), host_zeros(4096)};
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    for (int round = 0; round < 2; round++) {
        host_work work = host_begin(false);
        standin_fail_at(0);
        record_all(work.encoder, s, b, cache);
        CHECK(round == 0 || standin_calls() == 0, "%d calls that can fail", standin_calls());
        host_end(&work);
    }
    for (int i = 0; i < 3; i++) host_release(b[i]);
    for (int i = 0; i < 2; i++) {
        host_store_release((tqkv_metal_store[]){s[i]});
        test_store_free(&stores[i]);
    }
    tqkv_cache_destroy(cache);
}

/* Makes every call once on a new context. Gives the first result other than TQKV_OK and the failure's texts. */
static tqkv_result live_through(char *text, size_t size)
{
    tqkv_metal *m = NULL;
    tqkv_cache *cache = NULL;
    tqkv_metal_desc desc = {0};
    tqkv_cache_desc cache_desc = {0};
    desc.library_path = test_host.library;
    desc.error = text;
    desc.error_size = size;
    tqkv_result r = tqkv_metal_create(&desc, &m);
    if (r != TQKV_OK) return r;
    float x[3 * 64], out[64];
    data_rows(1, DATA_GAUSSIAN, x, 3, 64);
    cache_desc.head_dim = 64;
    cache_desc.n_kv_heads = 1;
    cache_desc.capacity = 8;
    cache_desc.metal = m;
    r = tqkv_cache_create(&cache_desc, &cache);
    if (r == TQKV_OK) r = tqkv_cache_append(cache, x, x, 3);
    if (r != TQKV_OK) CHECK(tqkv_cache_end(cache) == 0, "a failed append counts");
    if (r == TQKV_OK) r = tqkv_cache_attend(cache, x, 1, out);
    tqkv_metal_error(m, text, size);
    if (cache && r != TQKV_OK) { /* the context stays usable: the same call succeeds now */
        standin_fail_at(0);
        if (tqkv_cache_end(cache) == 0) CHECK_RESULT(tqkv_cache_append(cache, x, x, 3), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(cache, x, 1, out), TQKV_OK);
    }
    tqkv_cache_destroy(cache);
    tqkv_metal_destroy(m);
    return r;
}

/* The n-th call that can fail fails, for every n. */
static void run_failures(const void *parameters)
{
    char text[400];
    (void)parameters;
    const int live = standin_live_objects();
    int with_words = 0, with_label = 0, n_calls;
    @autoreleasepool {
        standin_fail_at(0);
        CHECK_RESULT(live_through(text, sizeof text), TQKV_OK);
        n_calls = standin_calls();
        printf("%d calls are made to fail, one at a time\n", n_calls);
    }
    CHECK(n_calls > 20, "only %d calls can fail", n_calls);
    for (int n = 1; n <= n_calls; n++) {
        text[0] = 0;
        @autoreleasepool {
            standin_fail_at(n);
            const tqkv_result r = live_through(text, sizeof text);
            const bool without = strstr(text, "attention without matrices") != NULL; /* their test failed: no more */
            CHECK(without || r == TQKV_METAL_ERROR || r == TQKV_OUT_OF_MEMORY || r == TQKV_UNSUPPORTED,
                  "call %d failed: %s", n, tqkv_result_string(r));
            with_words += strstr(text, STANDIN_WORDS) != NULL;
            with_label += strstr(text, "; tqkv attend faulted") != NULL;
        }
        standin_fail_at(0);
        CHECK(standin_live_objects() == live, "call %d failed: %d objects leaked", n, standin_live_objects() - live);
    }
    /* the library, then function and pipeline of tables twice, encode_kv, attend and attend_merge, and four completions */
    CHECK(with_words == 1 + 2 * 5 + 4, "%d failures of %d came with Metal's words", with_words, n_calls);
    CHECK(with_label == 1, "%d failures named the attention", with_label);
}

#endif

void context_host_cases(void)
{
    test_add(run_embedded, NULL, 0, "context/embedded");
    test_add(run_libraries, NULL, 0, "context/libraries");
    test_add(run_bad_libraries, NULL, 0, "context/bad_libraries");
    test_add(run_source, NULL, 0, "context/source/alone");
    const refused_library refused[] = {{"no_file", "no/such/file.metallib", 0, "no/such/file.metallib"},
                                       {"no_library", "tqkv.h", 0, "tqkv.h"},
                                       {"empty", NULL, 1, "library in memory"},
                                       {"truncated", NULL, 100, "library in memory"}};
    for (int i = 0; i < 4; i++)
        test_add(run_source_fallback, &refused[i], sizeof refused[i], "context/source/%s", refused[i].name);
    test_add(run_memory, NULL, 0, "context/memory");
    test_add(run_self_test, NULL, 0, "context/self_test");
    const char *const threads[] = {"caches", "recording", "memory", "source"};
    for (int i = 0; i < 4; i++) test_add(run_threads, &i, sizeof i, "context/threads/%s", threads[i]);
#ifdef STANDIN
    const char *const stale[] = {"codebook_2",   "codebook_3",   "codebook_4",   "codebook_5",   "codebook_6",
                                 "codebook_8",   "boundaries_2", "boundaries_3", "boundaries_4", "boundaries_5",
                                 "boundaries_6", "boundaries_8", "signs",        "version",      "rows_args",
                                 "rotate_args",  "attend_args",  "merge_args",   "batch_item",   "dispatch"};
    for (int i = 0; i < 20; i++) test_add(run_stale, stale[i], strlen(stale[i]) + 1, "context/stale/%s", stale[i]);
    const refused_library stale_libraries[] = {{"stale", "signs", 0, "signs differs"},
                                               {"no_kernels", "tables_alone", 0, ""}};
    for (int i = 0; i < 2; i++)
        test_add(run_source_of_stale, &stale_libraries[i], sizeof stale_libraries[i], "context/source/%s",
                 stale_libraries[i].name);
    const char *const forms[] = {"path", "bytes", "object", "embedded"};
    for (int i = BY_PATH; i <= EMBEDDED; i++)
        if ((i == EMBEDDED) == test_host.embedded)
            test_add(run_source_failures, &i, sizeof i, "context/source/failures/%s", forms[i]);
    test_add(run_missing_kernels, NULL, 0, "context/missing_kernels");
    test_add(run_refused_kernel, NULL, 0, "context/source/kernel");
    test_add(run_no_product, NULL, 0, "context/no_product");
    for (int i = 0; i < 4; i++) test_add(run_without_matrices, &i, sizeof i, "context/without_matrices/%d", i);
    test_add(run_with_matrices, NULL, 0, "context/with_matrices");
    test_add(run_other_device, NULL, 0, "context/other_device");
    test_add(run_wrapped_device, NULL, 0, "context/wrapped_device");
    test_add(run_other_encoder, NULL, 0, "context/other_encoder");
    test_add(run_memory_in_force, NULL, 0, "context/memory_in_force");
    test_add(run_self_test_fails, NULL, 0, "context/self_test_fails");
    test_add(run_half_recorded, NULL, 0, "context/half_recorded");
    test_add(run_given_back, NULL, 0, "context/given_back");
    const tqkv_cache_desc prepared[] = {
        {.head_dim = 64, .n_kv_heads = 1, .n_heads = 3, .capacity = 12},
        {.head_dim = 64, .n_kv_heads = 1, .n_heads = 2, .capacity = 12, .exact_first = 4, .exact_last = 5},
        {.head_dim = 64, .n_kv_heads = 1, .ring = true, .capacity = 7, .value_format = TQKV_F16, .exact_last = 3},
        {.head_dim = 448, .n_kv_heads = 1, .n_heads = 2, .capacity = 12, .shared = true, .tail_dim = 64}};
    const char *const prepared_names[] = {"cache", "cache_ends", "cache_ring", "cache_latent"};
    for (int i = 0; i < 4; i++)
        test_add(run_prepared, &prepared[i], sizeof prepared[i], "context/prepared/%s", prepared_names[i]);
    for (int i = 0; i < 2; i++)
        test_add(run_prepared_stores, &(bool){i == 1}, sizeof(bool), "context/prepared/%s", i ? "pages" : "stores");
    for (int i = 1; i <= 4; i += 3) test_add(run_prepared_tables, &i, sizeof i, "context/prepared/tables%d", i);
    test_add(run_prepared_ends, NULL, 0, "context/prepared/ends");
    test_add(run_prepared_index, NULL, 0, "context/prepared/index");
    test_add(run_recorded_again, NULL, 0, "context/recorded_again");
    test_add(run_devices, NULL, 0, "context/devices");
    test_add(run_failures, NULL, 0, "context/failures");
#endif
}

/* Contexts: memory, their test of themselves, threads, devices and encoders. */
#include "host.h"
#include "tests/reference.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

static void run_memory(NO_ROW)
{
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
static void run_self_test(NO_ROW)
{
    const float sinks[] = {1.0f, -2.0f};
    const tqkv_cache_desc descs[] = {
        {.head_dim = 64, .n_kv_heads = 1, .n_heads = 1},
        {.head_dim = 128, .n_kv_heads = 2, .n_heads = 8, .key_format = TQKV_TQ4, .value_format = TQKV_TQ4},
        {.head_dim = 192, .value_dim = 128, .n_kv_heads = 1, .n_heads = 2, .type = TQKV_TYPE_F16},
        {.head_dim = 80, .n_kv_heads = 1, .n_heads = 1, .type = TQKV_TYPE_BF16, .softcap = 30.0f},
        {.head_dim = 64, .n_kv_heads = 1, .n_heads = 1, .key_format = TQKV_F16, .value_format = TQKV_F16},
        {.head_dim = 512, .n_kv_heads = 1, .n_heads = 8, .shared = true, .tail_dim = 64},
        {.head_dim = 448, .n_kv_heads = 1, .n_heads = 2, .shared = true, .tail_dim = 64, .tail_format = TQKV_TQ8},
        {.head_dim = 128, .n_kv_heads = 1, .n_heads = 2, .exact_first = 4, .exact_last = 64, .ring = true},
        {.head_dim = 96, .n_kv_heads = 1, .n_heads = 2, .sinks = sinks, .window = 100},
        {.head_dim = 64,
         .n_kv_heads = 2,
         .n_heads = 2,
         .calibrate = 512,
         .exact_first = 4,
         .exact_last = 128,
         .sinks = sinks},
        {.head_dim = 512, .n_kv_heads = 1, .n_heads = 8, .shared = true, .tail_dim = 64, .calibrate = 100}};
    for (size_t i = 0; i < sizeof descs / sizeof *descs; i++) {
        const tqkv_result r = tqkv_metal_self_test(test_host.metal, &descs[i]);
        CHECK(r == TQKV_OK, "case %zu: %s, \"%s\"", i, tqkv_result_string(r), host_error(test_host.metal));
    }
    const tqkv_cache_desc unknown = {.head_dim = 100, .n_kv_heads = 1, .n_heads = 1}, empty = {.head_dim = 64};
    CHECK_REFUSED(test_host.metal, tqkv_metal_self_test(test_host.metal, &unknown), TQKV_UNSUPPORTED, "head_dim 32");
    CHECK_REFUSED(test_host.metal, tqkv_metal_self_test(test_host.metal, &empty), TQKV_INVALID_ARGUMENT, "self-test");
    CHECK_RESULT(tqkv_metal_self_test(NULL, &unknown), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_metal_self_test(test_host.metal, NULL), TQKV_INVALID_ARGUMENT);
}

#ifdef STANDIN
/* A GPU that computes otherwise: after dispatch n of the test one value of a buffer that it wrote is another. */
static void run_self_test_fails(NO_ROW)
{
    const tqkv_cache_desc usual = {.head_dim = 64, .n_kv_heads = 1, .n_heads = 1},
                          latent = {.head_dim = 448, .n_kv_heads = 1, .n_heads = 1, .shared = true, .tail_dim = 64},
                          ends = {.head_dim = 64, .n_kv_heads = 1, .n_heads = 1, .exact_first = 1, .exact_last = 1},
                          learns = {.head_dim = 64, .n_kv_heads = 1, .n_heads = 1, .calibrate = 512};
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
                 {ends, 2, "outputs of one query"},       /* encode_kv of the first positions as halves */
                 {learns, 3, "outputs of three queries"}, /* of what is raw, after encode_kv and attend */
                 {learns, 5, "keys of head_dim 64"}};     /* by another centre, after the last of what is raw */
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
    desc.n_kv_heads = desc.n_heads = 2;
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
    const double most = reference_gpu_difference(format, TQKV_FORMAT_DEFAULT, format, 1.0);
    return r != TQKV_OK || !(wrong <= most * most * all);
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
            w->failures += HOST(w->metal, encoder, rotate, b, 1, head_dim, TQKV_ROTATED) != TQKV_OK;
            w->failures += HOST(w->metal, encoder, rotate, b, 1, head_dim, TQKV_ORIGINAL) != TQKV_OK;
            w->failures += HOST(w->metal, encoder, rotate, b, 1, 33, TQKV_ROTATED) != TQKV_UNSUPPORTED;
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
    const tqkv_metal_desc from_source = {.device = test_host.device, .library_source = host_source()};
    tqkv_metal *m = *(const int *)parameters == 3 ? host_create(from_source, TQKV_OK, "") : host_context();
    REQUIRE(m, "no context");
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){.metal = m, .number = i, .work = works[*(const int *)parameters], .missing = &missing};
        CHECK(!pthread_create(&workers[i].thread, NULL, begin_together, &workers[i]), "no thread");
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK(workers[i].failures == 0, "thread %d: %d failures", i, workers[i].failures);
    }
    tqkv_metal_destroy(m);
}

#ifdef STANDIN

/* -- Devices and encoders -- */

/* Rotates rows in a buffer of that device. */
static void rotate_on(id<MTLDevice> device, tqkv_result expected, const char *words)
{
    id<MTLBuffer> buffer = [device newBufferWithLength:512 options:MTLResourceStorageModeShared];
    const tqkv_metal_buffer rows = {buffer, 0};
    tqkv_metal *m = test_host.metal;
    memset([buffer contents], 0, 512);
    host_work work = host_begin(false);
    CHECK_REFUSED(m, HOST(m, work.encoder, rotate, rows, 2, 64, TQKV_ROTATED), expected, words);
    host_end(&work);
    [buffer release];
}

/* A context refuses the objects of another device. */
static void run_other_device(NO_ROW)
{
    tqkv_metal_desc desc = {0};
    NSError *error = nil;
    id<MTLDevice> other = MTLCreateSystemDefaultDevice();
    rotate_on(other, TQKV_INVALID_ARGUMENT, "another device");
    @autoreleasepool {
        NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:test_host.library]];
        id<MTLLibrary> library = [other newLibraryWithURL:url error:&error];
        desc.device = test_host.device;
        desc.library = library;
        host_create(desc, TQKV_INVALID_ARGUMENT, "another device");
        [library release];
    }
    [other release];
}

/* Metal's capture and validation hand out devices as objects of their own. */
static void run_wrapped_device(NO_ROW)
{
    id<MTLDevice> wrapped = standin_wrapped(test_host.device);
    rotate_on(wrapped, TQKV_OK, "");
    [wrapped release];
}

/* Threadgroup memory of the caller's own dispatches stays in force: nothing of it may stand beside that of a call. */
static void run_memory_in_force(NO_ROW)
{
    tqkv_store s = test_store(TQKV_TQ4, 64, 1, 4, false);
    tqkv_metal_store gpu = host_store(&s);
    const tqkv_metal_buffer src = host_zeros(256), none = {nil, 0};
    host_work work = host_begin(false);
    [work.encoder setThreadgroupMemoryLength:32752 atIndex:3];
    CHECK_RESULT(HOST(test_host.metal, work.encoder, encode, &gpu, NULL, src, host_none, 1, 0, none), TQKV_OK);
    host_end(&work);
    host_release(src);
    host_store_release(&gpu);
    test_store_free(&s);
}

/* Encoders of Metal 4 have other methods. */
static void run_other_encoder(NO_ROW)
{
    const tqkv_metal_buffer rows = host_zeros(512);
    NSObject *other = [[NSObject alloc] init];
    CHECK_REFUSED(test_host.metal, HOST(test_host.metal, other, rotate, rows, 2, 64, TQKV_ROTATED),
                  TQKV_INVALID_ARGUMENT, "Metal 4");
    CHECK_REFUSED(test_host.metal, HOST(test_host.metal, nil, rotate, rows, 2, 64, TQKV_ROTATED), TQKV_INVALID_ARGUMENT,
                  "no encoder");
    [other release];
    host_release(rows);
}

static void run_devices(NO_ROW)
{
    tqkv_metal_desc desc = {0};
    desc.library_path = test_host.library;
    standin_set_device((standin_device){.missing = true});
    host_create(desc, TQKV_UNSUPPORTED, "no Metal device");
    standin_set_device((standin_device){.before_apple7 = true});
    host_create(desc, TQKV_UNSUPPORTED, "Apple7");
    standin_set_device((standin_device){.simd_width = 16});
    host_create(desc, TQKV_UNSUPPORTED, "simdgroups of 16");
    standin_set_device((standin_device){.max_threads = 16});
    host_create(desc, TQKV_UNSUPPORTED, "tqkv_tables");
    const unsigned small[] = {32, 64, 96};
    for (int i = 0; i < 3; i++) {
        worker w = {.number = i};
        standin_set_device((standin_device){.max_threads = small[i]});
        w.metal = host_create(desc, TQKV_OK, "");
        CHECK(worker_round(&w, 0) == 0, "wrong with %u threads at most", small[i]);
        tqkv_metal_destroy(w.metal);
    }
    standin_set_device((standin_device){0});
}

#endif

void context_host_cases(void)
{
    test_add(run_memory, NULL, 0, "context/memory");
    test_add(run_self_test, NULL, 0, "context/self_test");
    const char *const threads[] = {"caches", "recording", "memory", "source"};
    for (int i = 0; i < 4; i++) test_add(run_threads, &i, sizeof i, "context/threads/%s", threads[i]);
#ifdef STANDIN
    test_add(run_other_device, NULL, 0, "context/other_device");
    test_add(run_wrapped_device, NULL, 0, "context/wrapped_device");
    test_add(run_other_encoder, NULL, 0, "context/other_encoder");
    test_add(run_memory_in_force, NULL, 0, "context/memory_in_force");
    test_add(run_self_test_fails, NULL, 0, "context/self_test_fails");
    test_add(run_devices, NULL, 0, "context/devices");
#endif
}

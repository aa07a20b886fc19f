/* The fixture of host.h. */
#include "host.h"
#include <math.h>
#include "tests/data.h"
#ifdef STANDIN
#include "tests/metal/standin/standin.h"
#endif

host test_host;

tqkv_metal *host_context(void)
{
    char error[400];
    tqkv_metal *metal = NULL;
    tqkv_metal_desc desc = {0};
    desc.device = test_host.device;
    desc.library_path = test_host.library;
    desc.error = error;
    desc.error_size = sizeof error;
    tqkv_result r = tqkv_metal_create(&desc, &metal);
    CHECK(r == TQKV_OK, "%s: %s", tqkv_result_string(r), error);
    return metal;
}

bool host_open(void)
{
    test_host.device = MTLCreateSystemDefaultDevice();
    if (!test_host.device) return false;
    printf("device: %s\n", [[test_host.device name] UTF8String]);
    test_host.queue = [test_host.device newCommandQueue];
    char error[400];
    tqkv_metal_desc desc = {0};
    desc.device = test_host.device;
    desc.library_path = test_host.library;
    desc.error = error;
    desc.error_size = sizeof error;
    tqkv_result r = tqkv_metal_create(&desc, &test_host.metal);
    if (r != TQKV_OK) fprintf(stderr, "%s: %s\n", tqkv_result_string(r), error);
    return r == TQKV_OK;
}

void host_close(void)
{
    tqkv_metal_destroy(test_host.metal);
    [test_host.queue release];
    [test_host.device release];
}

tqkv_metal_buffer host_zeros(size_t size)
{
    tqkv_metal_buffer b;
    b.buffer =
        [test_host.device newBufferWithLength:HOST_OFFSET + (size ? size : 4) options:MTLResourceStorageModeShared];
    b.offset = HOST_OFFSET;
    memset([(id<MTLBuffer>)b.buffer contents], 0xa5, HOST_OFFSET);
    memset(host_contents(b), 0, size);
    return b;
}

tqkv_metal_buffer host_buffer(const void *bytes, size_t size)
{
    tqkv_metal_buffer b = host_zeros(size);
    if (size) memcpy(host_contents(b), bytes, size);
    return b;
}

void *host_contents(tqkv_metal_buffer b) { return (char *)[(id<MTLBuffer>)b.buffer contents] + b.offset; }

/* The bytes in front of the data must be unchanged. */
void host_release(tqkv_metal_buffer b)
{
    const unsigned char *front = [(id<MTLBuffer>)b.buffer contents];
    for (size_t i = 0; i < HOST_OFFSET; i++) CHECK(front[i] == 0xa5, "byte %zu in front of the data was written", i);
    [(id<MTLBuffer>)b.buffer release];
}

tqkv_metal_store host_store(const tqkv_store *s)
{
    tqkv_metal_store store = {0};
    store.shape = *s;
    store.shape.codes = NULL;
    store.shape.norms = NULL;
    store.codes = host_buffer(s->codes, s->codes_size);
    if (s->norms_size) store.norms = host_buffer(s->norms, s->norms_size);
    if (s->pages) store.pages = host_buffer(s->pages, (size_t)s->n_pages * sizeof(int32_t));
    const size_t channels = (size_t)(s->n_kv_heads * s->head_dim) * sizeof(float);
    if (s->center) store.center = host_buffer(s->center, channels);
    if (s->channel_scale) store.channel_scale = host_buffer(s->channel_scale, channels);
    return store;
}

void host_store_read(const tqkv_metal_store *from, tqkv_store *s)
{
    memcpy(s->codes, host_contents(from->codes), s->codes_size);
    if (s->norms_size) memcpy(s->norms, host_contents(from->norms), s->norms_size);
}

void host_store_release(tqkv_metal_store *s)
{
    const tqkv_metal_buffer all[] = {s->codes, s->norms, s->pages, s->center, s->channel_scale};
    for (int i = 0; i < 5; i++)
        if (all[i].buffer) host_release(all[i]);
}

host_work host_begin(bool concurrent)
{
    host_work work;
    work.pool = [[NSAutoreleasePool alloc] init];
    work.commands = [test_host.queue commandBuffer];
    work.encoder = [work.commands
        computeCommandEncoderWithDispatchType:concurrent ? MTLDispatchTypeConcurrent : MTLDispatchTypeSerial];
    return work;
}

void host_end(host_work *work)
{
    [work->encoder endEncoding];
    [work->commands commit];
    [work->commands waitUntilCompleted];
    CHECK([work->commands status] == MTLCommandBufferStatusCompleted, "%s",
          [[[work->commands error] localizedDescription] UTF8String]);
    [work->pool release];
}

const tqkv_metal_buffer host_none = {nil, 0};

tqkv_metal_plan *host_plan(void)
{
    static _Thread_local tqkv_metal_plan plan;
    return &plan;
}

#ifdef STANDIN
void host_count_calls(void) { standin_fail_at(0); }
void host_check_no_calls(void) { CHECK(standin_calls() == 0, "%d calls that can fail", standin_calls()); }
#else
void host_count_calls(void) {}
void host_check_no_calls(void) {}
#endif

tqkv_result host_attend_some(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const tqkv_cache *c,
                             const tqkv_metal_attention *some, tqkv_metal_buffer q, int n_queries,
                             tqkv_metal_buffer scratch, tqkv_metal_buffer out)
{
    tqkv_metal_buffer memory;
    const tqkv_result r = tqkv_metal_find(m, c, &memory);
    return r == TQKV_OK ? HOST(m, encoder, cache_attend, c, memory, NULL, some, q, n_queries, scratch, out) : r;
}

float *host_floats(uint64_t seed, size_t count)
{
    float *x = test_alloc(count * sizeof *x);
    for (size_t done = 0; done < count; done += 32) {
        float row[32];
        data_rows(seed * 100000 + done, DATA_STUDENT, row, 1, 32);
        memcpy(x + done, row, (count - done < 32 ? count - done : 32) * sizeof *x);
    }
    return x;
}

tqkv_metal *host_create(tqkv_metal_desc desc, tqkv_result expected, const char *words)
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

static tqkv_result record_rotations(void *user, tqkv_metal_object encoder)
{
    tqkv_metal *m = ((tqkv_metal **)user)[0];
    float *rows = ((void **)user)[1];
    tqkv_metal_buffer b;
    tqkv_result r = tqkv_metal_find(m, rows, &b);
    if (r == TQKV_OK) r = HOST(m, encoder, rotate, b, 2, 64, TQKV_ROTATED);
    return r == TQKV_OK ? HOST(m, encoder, rotate, b, 2, 64, TQKV_ORIGINAL) : r;
}

void host_check_works(tqkv_metal *m)
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

const char *host_source(void)
{
    NSString *text = [NSString stringWithContentsOfFile:@"metallib/tqkv.metal"
                                               encoding:NSUTF8StringEncoding
                                                  error:NULL];
    CHECK(text, "no metallib/tqkv.metal");
    return [text UTF8String];
}

/* The fixture of host.h. */
#include "host.h"
#include "tests/metal/mac/report.h"
#include <math.h>
#include "tests/reference.h"

host test_host;

tqkv_metal *host_context(void)
{
    const char *source = [report_source(test_host.library) UTF8String];
    const tqkv_metal_desc desc = {
        .device = test_host.device, .library_path = source ? NULL : test_host.library, .library_source = source};
    return host_create(desc, TQKV_OK, "");
}

bool host_open(void)
{
    test_host.device = MTLCreateSystemDefaultDevice();
    if (!test_host.device) return false;
    printf("device: %s\n", [[test_host.device name] UTF8String]);
    test_host.queue = [test_host.device newCommandQueue];
    test_host.metal = host_context();
    return test_host.metal != NULL;
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

void host_open_attention(host_attention *a, int n_heads)
{
    const size_t size = (size_t)n_heads * 64 * sizeof(float);
    float *x = host_floats(5, 64 * 64);
    memset(a, 0, sizeof *a);
    a->store = test_store(TQKV_TQ4, 64, 1, 64, false);
    CHECK_RESULT(tqkv_encode(&a->store, x, 64, 0), TQKV_OK);
    const tqkv_attention own = {.keys = &a->store, .values = &a->store, .n_heads = n_heads, .n_queries = 1, .end = 64};
    a->expected = test_alloc(2 * size);
    reference_attend_as(REFERENCE_FLOATS, &own, x, a->expected);
    a->gpu = host_store(&a->store);
    a->metal.attention = own;
    a->metal.keys = a->metal.values = &a->gpu;
    a->q = host_buffer(x, size);
    a->out = host_zeros(size);
    a->scratch = host_zeros(65536);
    free(x);
}

void host_check_attention(const host_attention *a)
{
    const size_t n = (size_t)a->metal.attention.n_heads * 64;
    const double error = reference_relative_error(host_contents(a->out), a->expected, n);
    CHECK(error < 2e-5, "relative error %g", error);
}

void host_close_attention(host_attention *a)
{
    const tqkv_metal_buffer all[] = {a->q, a->out, a->scratch};
    for (int i = 0; i < 3; i++) host_release(all[i]);
    host_store_release(&a->gpu);
    test_store_free(&a->store);
    free(a->expected);
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

const char *host_error(tqkv_metal *m)
{
    static _Thread_local char text[400];
    snprintf(text, sizeof text, "untouched");
    tqkv_metal_error(m, text, sizeof text);
    return text;
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
    NSString *text = report_source("metallib/tqkv.metal");
    CHECK(text, "no metallib/tqkv.metal");
    return [text UTF8String];
}

/* An array of a plan: bytes [0, size) in plain memory, and where they lie for Metal. */
typedef struct host_array {
    void *plain;
    size_t size;
    bool written, shared; /* shared: memory of the context itself */
    tqkv_metal_buffer at;
} host_array;

static host_array *find_array(host_array *arrays, int *n, void *plain)
{
    int i = 0;
    while (i < *n && arrays[i].plain != plain) i++;
    if (i == *n) arrays[(*n)++].plain = plain;
    return &arrays[i];
}

/* The arrays that bindings name, and their number. */
static int find_arrays(tqkv_metal_plan *plan, host_array *arrays)
{
    int n = 0;
    for (int i = 0; i < plan->n; i++)
        for (int j = 0; j < plan->d[i].n_bindings; j++) {
            const tqkv_metal_binding *b = &plan->d[i].bindings[j];
            if (!b->size || !b->at.buffer) continue;
            host_array *a = find_array(arrays, &n, b->at.buffer);
            if (a->size < b->at.offset + b->size) a->size = b->at.offset + b->size;
            a->written = a->written || b->written;
        }
    for (int i = 0; i < n; i++) {
        arrays[i].shared = tqkv_metal_find(test_host.metal, arrays[i].plain, &arrays[i].at) == TQKV_OK;
        if (!arrays[i].shared) arrays[i].at = host_buffer(arrays[i].plain, arrays[i].size);
    }
    return n;
}

/* Puts Metal's buffers in the place of plain memory. */
static void bind_arrays(tqkv_metal_plan *plan, host_array *arrays, int n)
{
    for (int i = 0; i < plan->n; i++) {
        tqkv_metal_dispatch *d = &plan->d[i];
        if (d->barrier) d->barrier = find_array(arrays, &n, d->barrier)->at.buffer;
        for (int j = 0; j < d->n_bindings; j++) {
            tqkv_metal_buffer *at = &d->bindings[j].at;
            if (!d->bindings[j].size || !at->buffer) continue;
            const tqkv_metal_buffer to = find_array(arrays, &n, at->buffer)->at;
            at->buffer = to.buffer;
            at->offset += to.offset;
        }
    }
}

/* Binds one array of the plan wrongly. What its refusal says, or NULL if the array cannot be wrong in this way. */
static const char *bind_wrongly(tqkv_metal_plan *plan, data_random *random)
{
    tqkv_metal_dispatch *d = &plan->d[data_below(random, plan->n)];
    tqkv_metal_binding *b = &d->bindings[data_below(random, d->n_bindings)],
                       *other = &d->bindings[data_below(random, d->n_bindings)];
    const int way = data_below(random, 5);
    if (!b->size) return NULL;
    const size_t behind = [(id<MTLBuffer>)b->at.buffer length] - b->at.offset;
    if (way == 0) return b->at.buffer = NULL, ": no buffer";
    if (way == 1) return b->size = behind + 1, ": needs ";
    if (way == 2) return b->at.offset = SIZE_MAX / b->alignment * b->alignment, ": needs ";
    if (way == 3) return b->at.offset += 1, b->alignment > 1 ? ": offset " : NULL;
    const bool fits = other->size && [(id<MTLBuffer>)other->at.buffer length] - other->at.offset >= b->size;
    b->at = other->at;
    return b != other && fits && (b->written || other->written) && other->at.offset % b->alignment == 0 ? " overlap"
                                                                                                        : NULL;
}

/* What tqkv_metal_record refuses: a refused plan records nothing. */
static void check_refusals(const tqkv_metal_plan *plan, id<MTLComputeCommandEncoder> encoder)
{
    static data_random random = {1};
    tqkv_metal_plan wrong = *plan;
    const char *const words = plan->n ? bind_wrongly(&wrong, &random) : NULL;
    if (words)
        CHECK_REFUSED(test_host.metal, tqkv_metal_record(test_host.metal, encoder, &wrong), TQKV_INVALID_ARGUMENT,
                      words);
    wrong = *plan;
    CHECK_REFUSED(test_host.metal, tqkv_metal_record(test_host.metal, nil, &wrong), TQKV_INVALID_ARGUMENT,
                  "no encoder");
    CHECK_RESULT(tqkv_metal_record(NULL, encoder, &wrong), TQKV_INVALID_ARGUMENT);
}

/* A hash of what the plans of a case wrote; 0: nothing. */
static uint64_t bits;

static void add_bits(const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) bits = (bits + ((const unsigned char *)bytes)[i] + 1) * 0x100000001b3u;
}

void host_print_bits(const char *name)
{
    if (bits) printf("result %s %016llx\n", name, (unsigned long long)bits);
    bits = 0;
}

/* Only the stand-in counts the calls of Metal that can fail. */
#ifdef STANDIN
static void count_calls(void) { standin_fail_at(0); }
static void check_no_calls(void) { CHECK(standin_calls() == 0, "%d calls that can fail", standin_calls()); }
#else
static void count_calls(void) {}
static void check_no_calls(void) {}
#endif

bool host_run(tqkv_metal_plan *plan, char *error, size_t error_size)
{
    host_array arrays[TQKV_METAL_DISPATCHES * TQKV_METAL_BINDINGS];
    memset(arrays, 0, sizeof arrays);
    const int n = find_arrays(plan, arrays);
    bind_arrays(plan, arrays, n);
    host_work work = host_begin(true);
    check_refusals(plan, work.encoder);
    tqkv_result r = tqkv_metal_prepare(test_host.metal, plan);
    count_calls();
    if (r == TQKV_OK) r = tqkv_metal_record(test_host.metal, work.encoder, plan);
    check_no_calls();
    host_end(&work);
    for (int i = 0; i < n; i++) {
        const void *made = host_contents(arrays[i].at);
        if (arrays[i].shared) continue;
        if (arrays[i].written) memcpy(arrays[i].plain, made, arrays[i].size), add_bits(made, arrays[i].size);
        CHECK(!memcmp(arrays[i].plain, made, arrays[i].size), "an array that is only read was written");
        host_release(arrays[i].at);
    }
    if (r != TQKV_OK) tqkv_metal_error(test_host.metal, error, error_size);
    return r == TQKV_OK;
}

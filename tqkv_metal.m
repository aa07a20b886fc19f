/* tqkv_metal.m - the Metal host of tqkv.h, where the API is documented (>>metal). MIT licence, as tqkv.h.

     clang -O2 -c tqkv_metal.m        with or without -fobjc-arc
     ... -framework Metal -framework Foundation

   One C or C++ file of the program defines TQKV_IMPLEMENTATION. -DTQKV_METALLIB_EMBED='"default.metallib"' puts the
   compiled shaders into the object.

   tqkv.h plans what a call binds and dispatches (>>metal-plan). This file checks a plan against Metal's objects
   and records it.

   CONTENTS (search for the tag)

     >>errors         what went wrong, in words
     >>pipelines      built on first use, kept as long as the context
     >>recording      a plan handed to an encoder; command buffers of our own
     >>memory         what processor and GPU share: tqkv_metal_allocator, tqkv_metal_find
     >>caches         tqkv_metal_cache_append and the like
     >>waiting        the calls of tqkv_cache, which wait for the GPU
     >>self-test      one cache on the GPU, one on the processor
     >>context        libraries, the device, create and destroy */
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <dispatch/dispatch.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef TQKV_SHARED
#define TQKV_SHARED
#endif
#include "tqkv.h"
#ifndef TQKV_METAL
#error "tqkv_metal.m: add -DTQKV_METAL where this file and the one with TQKV_IMPLEMENTATION are compiled"
#endif

/* Each object that the context keeps is retained once and released once. Under ARC assignments to variables do both. */
#if __has_feature(objc_arc)
#define TQKV__RETAIN(object)  (object)
#define TQKV__RELEASE(object) ((object) = nil)
#else
#define TQKV__RETAIN(object)  [(object) retain]
#define TQKV__RELEASE(object) ([(object) release], (object) = nil)
#endif

/* What the context keeps of a kernel: its pipeline or, of a kernel without constants, the library compiled from its
   source. */
typedef struct tqkv__kept {
    tqkv_metal_kernel kernel;
    id object;
    NSUInteger max_threads; /* of a pipeline */
    struct tqkv__kept *next;
} tqkv__kept;

/* A block of shared memory that the context has lent. */
typedef struct tqkv__memory {
    id<MTLBuffer> buffer;
    char *begin;
    size_t size;
    struct tqkv__memory *next;
} tqkv__memory;

struct tqkv_metal {
    tqkv__backend backend; /* first: tqkv.h finds it there */
    id<MTLDevice> device;
    id<MTLCommandQueue> queue;
    id<MTLLibrary> library; /* nil: all kernels come from the source */
    NSString *source;       /* for kernels that the library lacks or Metal refuses; nil: none */
    id<MTLBuffer> unused;   /* bound to kernel arguments that a call lacks */
    pthread_mutex_t lock;   /* of all fields below */
    bool matrices;          /* the GPU's matrices are as attend_matrix expects, and its pipelines were built so far */
    tqkv__kept *pipelines, *compiled;
    tqkv__memory *memory;
    tqkv__memory *staging; /* one of them, which waits for the next blocking call of a cache; NULL while in use */
    char error[400];
};

/* >>errors: what went wrong, in words */

static tqkv_result tqkv__fail(tqkv_metal *m, tqkv_result result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static tqkv_result tqkv__fail(tqkv_metal *m, tqkv_result result, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&m->lock);
    vsnprintf(m->error, sizeof m->error, format, arguments);
    pthread_mutex_unlock(&m->lock);
    va_end(arguments);
    return result;
}

static const char *tqkv__error_text(NSError *error)
{
    const char *text = [[error localizedDescription] UTF8String];
    return text ? text : "Metal gave no reason";
}

void tqkv_metal_error(tqkv_metal *m, char *text, size_t size)
{
    if (!text || !size) return;
    text[0] = 0;
    if (!m) return;
    pthread_mutex_lock(&m->lock);
    snprintf(text, size, "%s", m->error);
    pthread_mutex_unlock(&m->lock);
}

/* >>pipelines: built on first use, kept as long as the context */

/* The caller holds the lock. A list is enough: a program has one pipeline a format pair, head_dim and column count. */
static const tqkv__kept *tqkv__find_kept(const tqkv__kept *list, const tqkv_metal_kernel *kernel)
{
    while (list && memcmp(&list->kernel, kernel, sizeof *kernel) != 0) list = list->next;
    return list;
}

static void tqkv__free_kept(tqkv__kept *k)
{
    TQKV__RELEASE(k->object);
    free(k);
}

/* Keeps `made` and returns it. If another thread was faster: frees `made` and returns the other's. */
static const tqkv__kept *tqkv__keep(tqkv_metal *m, tqkv__kept **list, tqkv__kept *made)
{
    pthread_mutex_lock(&m->lock);
    const tqkv__kept *k = tqkv__find_kept(*list, &made->kernel);
    if (!k) {
        made->next = *list;
        *list = made;
    }
    pthread_mutex_unlock(&m->lock);
    if (k) tqkv__free_kept(made);
    return k ? k : made;
}

/* Finds a kernel, or makes and keeps it: outside the lock, because that takes up to a second. */
static tqkv_result tqkv__get_kept(tqkv_metal *m, tqkv__kept **list, const tqkv_metal_kernel *kernel,
                                  tqkv_result (*make)(tqkv_metal *, tqkv__kept *), const tqkv__kept **out)
{
    tqkv_result r;
    pthread_mutex_lock(&m->lock);
    *out = tqkv__find_kept(*list, kernel);
    pthread_mutex_unlock(&m->lock);
    if (*out) return TQKV_OK;
    tqkv__kept *made = (tqkv__kept *)calloc(1, sizeof *made);
    if (!made) return tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no memory for a pipeline");
    made->kernel = *kernel;
    @autoreleasepool {
        r = make(m, made);
    }
    if (r == TQKV_OK)
        *out = tqkv__keep(m, list, made);
    else
        tqkv__free_kept(made);
    return r;
}

static NSString *tqkv__function_name(const tqkv_metal_kernel *kernel)
{
    return [NSString stringWithUTF8String:kernel->name];
}

static void tqkv__set_values(const tqkv_metal_kernel *kernel, MTLFunctionConstantValues *values)
{
    for (int i = 0; i < TQKV_METAL_CONSTANTS; i++) {
        const uint32_t value = kernel->constants[i] - 1u;
        const bool flag = value != 0;
        if (!kernel->constants[i]) continue;
        if (TQKV_METAL_IS_UINT(i))
            [values setConstantValue:&value type:MTLDataTypeUInt atIndex:(NSUInteger)i];
        else
            [values setConstantValue:&flag type:MTLDataTypeBool atIndex:(NSUInteger)i];
    }
}

/* Fast math off: codes and norms must be the same bytes as those of tqkv.h. Of the source only that kernel: all of them
   take minutes. */
static tqkv_result tqkv__compile(tqkv_metal *m, tqkv__kept *made)
{
    NSError *error = nil;
    NSString *name = tqkv__function_name(&made->kernel);
    MTLCompileOptions *options = [[MTLCompileOptions alloc] init];
    NSString *only = [@"TQKV_ONLY_" stringByAppendingString:name];
    [options setPreprocessorMacros:[NSDictionary dictionaryWithObjectsAndKeys:@"1", @"TQKV_ONLY", @"1", only, nil]];
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations" /* its successor is of macOS 15 */
    [options setFastMathEnabled:NO];
#pragma clang diagnostic pop
    made->object = [m->device newLibraryWithSource:m->source options:options error:&error];
    TQKV__RELEASE(options);
    if (made->object) return TQKV_OK;
    return tqkv__fail(m, TQKV_METAL_ERROR, "library_source: %s: %s", [name UTF8String], tqkv__error_text(error));
}

/* The threads that a kernel cannot do without. */
static NSUInteger tqkv__needs_threads(const tqkv_metal_kernel *kernel)
{
    const bool shared = kernel->family == TQKV_METAL_ATTEND_MATRIX && kernel->head_dim * TQKV__DIM_UNIT > 256;
    return shared ? TQKV__LONG_SIMDGROUPS * TQKV__SIMD_WIDTH : 0;
}

/* Metal's compiler gives a thread the more registers the fewer threads it is told of. */
static id<MTLComputePipelineState> tqkv__new_state(tqkv_metal *m, const tqkv_metal_kernel *kernel,
                                                   id<MTLFunction> function, NSError **error)
{
    MTLComputePipelineDescriptor *descriptor = [[MTLComputePipelineDescriptor alloc] init];
    [descriptor setComputeFunction:function];
    [descriptor setMaxTotalThreadsPerThreadgroup:(NSUInteger)kernel->most_simdgroups * TQKV__SIMD_WIDTH];
    [descriptor setThreadGroupSizeIsMultipleOfThreadExecutionWidth:YES];
    id<MTLComputePipelineState> state = [m->device newComputePipelineStateWithDescriptor:descriptor
                                                                                 options:MTLPipelineOptionNone
                                                                              reflection:nil
                                                                                   error:error];
    TQKV__RELEASE(descriptor);
    return state;
}

/* Makes p's pipeline, if its simdgroups are of 32 threads, and enough of them. */
static tqkv_result tqkv__build_from(tqkv_metal *m, id<MTLLibrary> library, tqkv__kept *p)
{
    NSError *error = nil;
    NSString *name = tqkv__function_name(&p->kernel);
    const char *text = [name UTF8String];
    MTLFunctionConstantValues *values = [[MTLFunctionConstantValues alloc] init];
    tqkv__set_values(&p->kernel, values);
    id<MTLFunction> function = [library newFunctionWithName:name constantValues:values error:&error];
    TQKV__RELEASE(values);
    id<MTLComputePipelineState> state = function ? tqkv__new_state(m, &p->kernel, function, &error) : nil;
    TQKV__RELEASE(function);
    if (!state) return tqkv__fail(m, TQKV_METAL_ERROR, "%s: %s", text, tqkv__error_text(error));
    p->max_threads = [state maxTotalThreadsPerThreadgroup];
    const int threads = (int)p->max_threads, width = (int)[state threadExecutionWidth];
    const bool few = tqkv__needs_threads(&p->kernel) > p->max_threads;
    if (!few && width == TQKV__SIMD_WIDTH && threads >= TQKV__SIMD_WIDTH) {
        p->object = state;
        return TQKV_OK;
    }
    TQKV__RELEASE(state);
    if (few) return tqkv__fail(m, TQKV_METAL_ERROR, "%s: %d threads a threadgroup are too few", text, threads);
    return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: simdgroups of %d threads, not 32", text, width);
}

/* The text of what came from the source, or failed there too, after the library was refused with another text. */
static tqkv_result tqkv__fell_back(tqkv_metal *m, tqkv_result r, const char *library_text)
{
    char source_text[180];
    if (r == TQKV_OK) return tqkv__fail(m, r, "library refused: %s; compiled from source", library_text);
    tqkv_metal_error(m, source_text, sizeof source_text);
    return tqkv__fail(m, r, "library refused: %s; then: %s", library_text, source_text);
}

/* From the library, or from the source where Metal refuses the library's kernel or there is no library. */
static tqkv_result tqkv__build_pipeline(tqkv_metal *m, tqkv__kept *p)
{
    char library_text[180];
    const tqkv__kept *compiled = NULL;
    tqkv_metal_kernel any = p->kernel;
    tqkv_result r = m->library ? tqkv__build_from(m, m->library, p) : TQKV_METAL_ERROR;
    if (r != TQKV_METAL_ERROR || !m->source) return r;
    tqkv_metal_error(m, library_text, sizeof library_text);
    memset(any.constants, 0, sizeof any.constants);
    r = tqkv__get_kept(m, &m->compiled, &any, tqkv__compile, &compiled);
    if (r == TQKV_OK) r = tqkv__build_from(m, compiled->object, p);
    return m->library ? tqkv__fell_back(m, r, library_text) : r;
}

static tqkv_result tqkv__get_pipeline(tqkv_metal *m, const tqkv_metal_kernel *kernel, const tqkv__kept **out)
{
    return tqkv__get_kept(m, &m->pipelines, kernel, tqkv__build_pipeline, out);
}

static bool tqkv__has_matrices(tqkv_metal *m)
{
    pthread_mutex_lock(&m->lock);
    const bool has = m->matrices;
    pthread_mutex_unlock(&m->lock);
    return has;
}

static bool tqkv__is_built(tqkv_metal *m, const tqkv_metal_kernel *kernel)
{
    pthread_mutex_lock(&m->lock);
    const bool built = tqkv__find_kept(m->pipelines, kernel) != NULL;
    pthread_mutex_unlock(&m->lock);
    return built;
}

/* Whether pipelines of a plan could not be built because Metal refuses attend_matrix, twice: its compiler may have been
   restarted. Then the context does without from now on, and its text says so. */
static bool tqkv__lost_matrices(tqkv_metal *m, tqkv_result r, const tqkv_metal_plan *plan)
{
    char text[300];
    const tqkv__kept *attend;
    const tqkv_metal_dispatch *missing = NULL;
    if (r != TQKV_METAL_ERROR) return false;
    for (int i = 0; i < plan->n && !missing; i++)
        if (!tqkv__is_built(m, &plan->d[i].kernel)) missing = &plan->d[i];
    if (!missing || missing->kernel.family != TQKV_METAL_ATTEND_MATRIX) return false; /* something else failed */
    if (tqkv__get_pipeline(m, &missing->kernel, &attend) == TQKV_OK) return true;
    tqkv_metal_plan lanes;
    tqkv_metal_kernel *kernel = &lanes.d[0].kernel;
    lanes.n = 1;
    lanes.d[0] = *missing;
    kernel->constants[TQKV_FC_BATCH] = 1 + false;
    tqkv_metal_plan_lanes(&lanes);
    kernel->constants[TQKV_FC_BATCH] = missing->kernel.constants[TQKV_FC_BATCH];
    tqkv_metal_error(m, text, sizeof text);
    if (tqkv__get_pipeline(m, kernel, &attend) != TQKV_OK) {
        tqkv__fail(m, TQKV_METAL_ERROR, "%s", text);
        return false;
    }
    pthread_mutex_lock(&m->lock);
    m->matrices = false;
    pthread_mutex_unlock(&m->lock);
    tqkv__fail(m, TQKV_OK, "%s; attention without matrices", text);
    return true;
}

/* Without matrices attend takes the place of attend_matrix, but not in a batch, which the caller plans anew. */
static tqkv_result tqkv__avoid_matrices(tqkv_metal *m, tqkv_metal_plan *plan)
{
    if (plan->n && plan->d[0].kernel.family == TQKV_METAL_INDEX_SCORES)
        return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: this GPU's matrices lie otherwise, or Metal refuses them",
                          plan->call);
    if (tqkv_metal_plan_lanes(plan)) return TQKV_OK;
    return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: planned with matrices, without which the context goes on", plan->call);
}

static tqkv_result tqkv__try_pipelines(tqkv_metal *m, tqkv_metal_plan *plan, const tqkv__kept **out)
{
    tqkv_result r = tqkv__has_matrices(m) ? TQKV_OK : tqkv__avoid_matrices(m, plan);
    for (int i = 0; i < plan->n && r == TQKV_OK; i++) r = tqkv__get_pipeline(m, &plan->d[i].kernel, &out[i]);
    return r;
}

/* All pipelines of a plan. */
static tqkv_result tqkv__get_pipelines(tqkv_metal *m, tqkv_metal_plan *plan, const tqkv__kept **out)
{
    const tqkv_result r = tqkv__try_pipelines(m, plan, out);
    return tqkv__lost_matrices(m, r, plan) ? tqkv__try_pipelines(m, plan, out) : r;
}

/* >>recording: a plan, checked against Metal's objects and handed to an encoder; command buffers of our own */

/* Metal's capture and validation put objects of their own around a device. */
static bool tqkv__is_device(const tqkv_metal *m, id<MTLDevice> device)
{
    if (device == m->device || [device isEqual:m->device]) return true;
    NSObject *one = (NSObject *)device, *other = (NSObject *)m->device;
    SEL number = @selector(registryID); /* not in every system's headers */
    return [one respondsToSelector:number] && [other respondsToSelector:number] &&
           [[one valueForKey:@"registryID"] isEqual:[other valueForKey:@"registryID"]];
}

static tqkv_result tqkv__check_binding(tqkv_metal *m, const tqkv_metal_binding *b)
{
    if (!b->size) return TQKV_OK;
    id<MTLBuffer> buffer = b->at.buffer;
    if (!buffer) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: no buffer", b->name);
    const size_t length = [buffer length];
    if (!tqkv__is_device(m, [buffer device]))
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: a buffer of another device", b->name);
    if (b->at.offset % b->alignment)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: offset %zu is not a multiple of %zu", b->name, b->at.offset,
                          b->alignment);
    if (b->at.offset > length || b->size > length - b->at.offset)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: needs %zu bytes from %zu on of a buffer of %zu", b->name,
                          b->size, b->at.offset, length);
    return TQKV_OK;
}

static tqkv_result tqkv__check_bindings(tqkv_metal *m, const tqkv_metal_dispatch *d)
{
    for (int i = 0; i < d->n_bindings; i++) {
        const tqkv_metal_binding *other = tqkv_metal_overlapping(d, i);
        const tqkv_result r = tqkv__check_binding(m, &d->bindings[i]);
        if (r != TQKV_OK) return r;
        if (other) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s and %s overlap", other->name, d->bindings[i].name);
    }
    return TQKV_OK;
}

/* Metal 4's encoders, and those of render passes, lack what a plan needs. */
static tqkv_result tqkv__check_encoder(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const char *call)
{
    if (!encoder) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: no encoder", call);
    if ([encoder respondsToSelector:@selector(setBytes:length:atIndex:)]) return TQKV_OK;
    return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: no MTLComputeCommandEncoder; for Metal 4 see docs/metal.md", call);
}

static void tqkv__bind_all(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const tqkv_metal_dispatch *d)
{
    for (int i = 0; i < d->n_arguments; i++)
        [encoder setBytes:d->arguments[i].bytes length:d->arguments[i].size atIndex:(NSUInteger)d->arguments[i].index];
    for (int i = 0; i < d->n_bindings; i++) {
        const tqkv_metal_binding *b = &d->bindings[i];
        if (b->index == TQKV_METAL_ONLY_CHECKED) continue;
        [encoder setBuffer:b->size ? (id<MTLBuffer>)b->at.buffer : m->unused
                    offset:b->size ? b->at.offset : 0
                   atIndex:(NSUInteger)b->index];
    }
}

static tqkv_result tqkv__record_dispatch(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const tqkv__kept *p,
                                         const tqkv_metal_dispatch *d)
{
    tqkv_metal_launch launch;
    const tqkv_result r = tqkv_metal_plan_launch(d, p->max_threads, &launch);
    if (r != TQKV_OK) return tqkv__fail(m, r, "a pipeline allows too few threads"); /* seen when it was built */
    if (d->barrier) {
        const id<MTLResource> written[] = {d->barrier};
        [encoder memoryBarrierWithResources:written count:1];
    }
    [encoder setComputePipelineState:p->object];
    tqkv__bind_all(m, encoder, d);
    for (NSUInteger i = 0; i < TQKV_METAL_MEMORIES; i++)
        [encoder setThreadgroupMemoryLength:launch.memory[i] atIndex:i];
    [encoder dispatchThreadgroups:MTLSizeMake(launch.threadgroups[0], launch.threadgroups[1], launch.threadgroups[2])
            threadsPerThreadgroup:MTLSizeMake(launch.threads, 1, 1)];
    return TQKV_OK;
}

/* What tqkv.h says to a call, with a text if it refuses it. */
static tqkv_result tqkv__planned(tqkv_metal *m, tqkv_result r, const char *call)
{
    if (r == TQKV_OK) return r;
    return tqkv__fail(m, r, "%s: %s%s", call, tqkv_result_string(r),
                      r == TQKV_UNSUPPORTED ? "; " TQKV__KERNELS_TEXT : "");
}

/* Looks at what made a plan. */
static tqkv_result tqkv__check_plan(tqkv_metal *m, const tqkv_metal_plan *plan)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    return plan ? tqkv__planned(m, plan->result, plan->call) : tqkv__planned(m, TQKV_INVALID_ARGUMENT, "plan");
}

tqkv_result tqkv_metal_prepare(tqkv_metal *m, tqkv_metal_plan *plan)
{
    const tqkv__kept *pipelines[TQKV_METAL_DISPATCHES];
    const tqkv_result r = tqkv__check_plan(m, plan);
    return r == TQKV_OK ? tqkv__get_pipelines(m, plan, pipelines) : r;
}

tqkv_result tqkv_metal_record(tqkv_metal *m, tqkv_metal_object encoder, tqkv_metal_plan *plan)
{
    const tqkv__kept *pipelines[TQKV_METAL_DISPATCHES];
    tqkv_result r = tqkv__check_plan(m, plan);
    if (r != TQKV_OK) return r;
    r = tqkv__check_encoder(m, encoder, plan->call);
    for (int i = 0; i < plan->n && r == TQKV_OK; i++) r = tqkv__check_bindings(m, &plan->d[i]);
    if (r != TQKV_OK || !plan->n || !plan->d[0].grid[0]) return r;
    r = tqkv__get_pipelines(m, plan, pipelines);
    for (int i = 0; i < plan->n && r == TQKV_OK; i++) r = tqkv__record_dispatch(m, encoder, pipelines[i], &plan->d[i]);
    return r;
}

/* With the state of each encoder among its errors. */
static id<MTLCommandBuffer> tqkv__new_commands(tqkv_metal *m)
{
    MTLCommandBufferDescriptor *descriptor = [[MTLCommandBufferDescriptor alloc] init];
    [descriptor setErrorOptions:MTLCommandBufferErrorOptionEncoderExecutionStatus];
    id<MTLCommandBuffer> commands = [m->queue commandBufferWithDescriptor:descriptor];
    TQKV__RELEASE(descriptor);
    return commands;
}

static tqkv_result tqkv__commands_failed(tqkv_metal *m, NSError *error)
{
    const char *state = "";
    NSString *label = nil;
    for (id<MTLCommandBufferEncoderInfo> info in [[error userInfo] objectForKey:MTLCommandBufferEncoderInfoErrorKey]) {
        label = [info label];
        state = [info errorState] == MTLCommandEncoderErrorStateFaulted ? " faulted" : " did not complete";
    }
    return tqkv__fail(m, TQKV_METAL_ERROR, "the command buffer failed: %s%s%s%s", tqkv__error_text(error),
                      label ? "; " : "", label ? [label UTF8String] : "", label ? state : "");
}

/* tqkv_metal_run. label: of the encoder, for Metal's tools and for the text of a failure */
static tqkv_result tqkv__run_as(tqkv_metal *m, const char *label, tqkv_metal_work record, void *user)
{
    @autoreleasepool {
        id<MTLCommandBuffer> commands = tqkv__new_commands(m);
        id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
        if (!encoder)
            return tqkv__fail(m, TQKV_METAL_ERROR, "Metal gave no command %s", commands ? "encoder" : "buffer");
        [encoder setLabel:[NSString stringWithFormat:@"tqkv %s", label]];
        const tqkv_result r = record(user, encoder);
        [encoder endEncoding];
        if (r != TQKV_OK) return r;
        [commands commit];
        [commands waitUntilCompleted];
        if ([commands status] == MTLCommandBufferStatusCompleted) return TQKV_OK;
        return tqkv__commands_failed(m, [commands error]);
    }
}

tqkv_result tqkv_metal_run(tqkv_metal *m, tqkv_metal_work record, void *user)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    return record ? tqkv__run_as(m, "run", record, user) : tqkv__planned(m, TQKV_INVALID_ARGUMENT, "run");
}

/* A plan that runs in its own command buffer. */
typedef struct tqkv__call {
    tqkv_metal *m;
    tqkv_metal_plan *plan;
} tqkv__call;

static tqkv_result tqkv__record_call(void *user, tqkv_metal_object encoder)
{
    const tqkv__call *c = (const tqkv__call *)user;
    return tqkv_metal_record(c->m, encoder, c->plan);
}

static tqkv_result tqkv__run_plan(tqkv_metal *m, tqkv_metal_plan *plan)
{
    tqkv__call call = {m, plan};
    return tqkv__run_as(m, plan->call, tqkv__record_call, &call);
}

/* >>memory: what processor and GPU share */

static tqkv__memory *tqkv__lend(tqkv_metal *m, size_t size)
{
    tqkv__memory *block = (tqkv__memory *)calloc(1, sizeof *block);
    if (!block) return NULL;
    block->size = size ? size : 1; /* Metal has no empty buffers */
    block->buffer = [m->device newBufferWithLength:block->size options:MTLResourceStorageModeShared];
    block->begin = (char *)[block->buffer contents];
    if (!block->begin) {
        TQKV__RELEASE(block->buffer);
        free(block);
        return NULL;
    }
    pthread_mutex_lock(&m->lock);
    block->next = m->memory;
    m->memory = block;
    pthread_mutex_unlock(&m->lock);
    return block;
}

static void *tqkv__memory_alloc(void *user, size_t size)
{
    const tqkv__memory *block = tqkv__lend((tqkv_metal *)user, size);
    return block ? block->begin : NULL;
}

static void tqkv__memory_free(void *user, void *pointer, size_t size)
{
    tqkv_metal *m = (tqkv_metal *)user;
    tqkv__memory **at = &m->memory, *block;
    (void)size;
    pthread_mutex_lock(&m->lock);
    while (*at && (*at)->begin != pointer) at = &(*at)->next;
    block = *at;
    if (block) *at = block->next;
    pthread_mutex_unlock(&m->lock);
    if (!block) return;
    TQKV__RELEASE(block->buffer);
    free(block);
}

tqkv_allocator tqkv_metal_allocator(tqkv_metal *m)
{
    const tqkv_allocator none = {NULL, NULL, NULL};
    return m ? m->backend.memory : none;
}

tqkv_result tqkv_metal_find(tqkv_metal *m, const void *pointer, tqkv_metal_buffer *out)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    if (!pointer || !out) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "a pointer or a cache is NULL");
    const uintptr_t address = (uintptr_t)pointer;
    pthread_mutex_lock(&m->lock);
    const tqkv__memory *block = m->memory;
    while (block && address - (uintptr_t)block->begin >= block->size) block = block->next; /* unsigned: below it, too */
    if (block) {
        out->buffer = block->buffer;
        out->offset = address - (uintptr_t)block->begin;
    }
    pthread_mutex_unlock(&m->lock);
    return block ? TQKV_OK : tqkv__fail(m, TQKV_INVALID_ARGUMENT, "a pointer outside the context's memory");
}

/* >>caches: each is one block of shared memory */

tqkv_result tqkv_metal_cache_append(tqkv_metal *m, tqkv_metal_object encoder, tqkv_cache *c, tqkv_metal_buffer k,
                                    tqkv_metal_buffer v, int n_tokens, tqkv_metal_buffer not_finite)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer memory;
    tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    tqkv_metal_plan_cache_append(c, memory, NULL, k, v, n_tokens, not_finite, &plan);
    if ((r = tqkv_metal_record(m, encoder, &plan)) == TQKV_OK) tqkv_metal_cache_appended(c, n_tokens);
    return r;
}

tqkv_result tqkv_metal_cache_attend(tqkv_metal *m, tqkv_metal_object encoder, const tqkv_cache *c, tqkv_metal_buffer q,
                                    int n_queries, tqkv_metal_buffer scratch, tqkv_metal_buffer out)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer memory;
    const tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    tqkv_metal_plan_cache_attend(c, memory, NULL, NULL, q, n_queries, scratch, out, &plan);
    return tqkv_metal_record(m, encoder, &plan);
}

/* >>waiting: the calls of tqkv_cache, which wait for the GPU. What they hand to it lies in a block of shared memory;
   one such block waits for the next call, of any cache. */

enum { TQKV__MOST_STAGING = 64 << 20 }; /* bytes of it: a long prefill's is given back at once */

static void tqkv__drop_staging(tqkv_metal *m, const tqkv__memory *block)
{
    if (block) tqkv__memory_free(m, block->begin, block->size);
}

/* Divides a block among n arrays. NULL and a text, or a block for tqkv__give_back. */
static tqkv__memory *tqkv__take_staging(tqkv_metal *m, int n, const size_t *sizes, tqkv_metal_buffer *out)
{
    size_t size = 0;
    for (int i = 0; i < n; i++) {
        out[i].offset = size;
        size += (sizes[i] + 15) / 16 * 16;
    }
    pthread_mutex_lock(&m->lock);
    tqkv__memory *block = m->staging;
    m->staging = NULL;
    pthread_mutex_unlock(&m->lock);
    if (block && block->size < size) {
        tqkv__drop_staging(m, block);
        block = NULL;
    }
    if (!block) block = tqkv__lend(m, size);
    if (!block) {
        tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no buffer of %zu bytes", size);
        return NULL;
    }
    for (int i = 0; i < n; i++) out[i].buffer = block->buffer;
    return block;
}

/* Of two blocks the larger one waits. */
static void tqkv__give_back(tqkv_metal *m, tqkv__memory *block)
{
    pthread_mutex_lock(&m->lock);
    if (block->size <= TQKV__MOST_STAGING && (!m->staging || m->staging->size < block->size)) {
        tqkv__memory *other = m->staging;
        m->staging = block;
        block = other;
    }
    pthread_mutex_unlock(&m->lock);
    tqkv__drop_staging(m, block);
}

/* Rows [n][n_heads] of the caller, or parts of them, without gaps: `size` bytes each. */
typedef struct tqkv__rows_copy {
    const tqkv_strides *strides;
    size_t value, size; /* bytes of a value, and of what is copied of a row */
    int n, n_heads;
} tqkv__rows_copy;

static size_t tqkv__row_of_copy(const tqkv__rows_copy *c, size_t i)
{
    const size_t n_heads = (size_t)c->n_heads;
    return (i / n_heads * c->strides->token + i % n_heads * c->strides->head) * c->value;
}

static size_t tqkv__copied_rows(const tqkv__rows_copy *c) { return (size_t)c->n * (size_t)c->n_heads; }

static void tqkv__copy_in(const tqkv__rows_copy *c, const void *rows, char *to)
{
    for (size_t i = 0; i < tqkv__copied_rows(c); i++)
        memcpy(to + i * c->size, (const char *)rows + tqkv__row_of_copy(c, i), c->size);
}

static void tqkv__copy_out(const tqkv__rows_copy *c, const char *from, void *rows)
{
    for (size_t i = 0; i < tqkv__copied_rows(c); i++)
        memcpy((char *)rows + tqkv__row_of_copy(c, i), from + i * c->size, c->size);
}

static size_t tqkv__value_size(tqkv_type type) { return type == TQKV_TYPE_F32 ? 4 : 2; }

/* Strides with their defaults. */
static tqkv_strides tqkv__strides_with(tqkv_strides strides, int n_heads, int head_dim)
{
    if (!strides.token) strides.token = (size_t)n_heads * (size_t)head_dim;
    if (!strides.head) strides.head = (size_t)head_dim;
    return strides;
}

static const tqkv_cache_strides tqkv__no_gaps = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};

/* The stores of a cache's codes, and the strides of its rows. */
static tqkv_attention tqkv__stores_of(const tqkv_cache *c)
{
    tqkv_attention view;
    memset(&view, 0, sizeof view);
    tqkv_cache_view(c, 0, &view);
    return view;
}

static int tqkv__key_dim(const tqkv_attention *view)
{
    return view->keys->head_dim + (view->tail ? view->tail->head_dim : 0);
}

/* The blocking calls of a cache copy their rows into a block of shared memory, and the result out of it. */
static tqkv_result tqkv__cache_append(tqkv_metal *m, const tqkv_cache *c, const void *k, const void *v, int n_tokens)
{
    tqkv_metal_plan plan;
    const tqkv_attention view = tqkv__stores_of(c);
    const tqkv_store *keys = view.keys, *tail = view.tail, *values = view.values;
    const tqkv_strides of_k = tqkv__strides_with(keys->strides, keys->n_kv_heads, tqkv__key_dim(&view)),
                       of_v = tqkv__strides_with(values->strides, keys->n_kv_heads, values->head_dim);
    const size_t value = tqkv__value_size(keys->type), key_row = (size_t)keys->head_dim * value,
                 tail_row = tail ? (size_t)tail->head_dim * value : 0,
                 value_row = v ? (size_t)values->head_dim * value : 0;
    const tqkv__rows_copy first = {&of_k, value, key_row, n_tokens, keys->n_kv_heads},
                          second = {&of_k, value, tail_row, n_tokens, keys->n_kv_heads},
                          third = {&of_v, value, value_row, n_tokens, keys->n_kv_heads};
    const size_t rows = tqkv__copied_rows(&first), k_size = rows * key_row,
                 sizes[] = {k_size + rows * tail_row, rows * value_row, sizeof(uint32_t)};
    tqkv_metal_buffer memory, staged[3];
    if (!n_tokens) return TQKV_OK;
    tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    tqkv__memory *block = tqkv__take_staging(m, 3, sizes, staged);
    if (!block) return TQKV_OUT_OF_MEMORY;
    uint32_t *unfit = (uint32_t *)(void *)(block->begin + staged[2].offset);
    *unfit = 0;
    tqkv__copy_in(&first, k, block->begin);
    if (tail) tqkv__copy_in(&second, (const char *)k + key_row, block->begin + k_size);
    if (v) tqkv__copy_in(&third, v, block->begin + staged[1].offset);
    if (!v) staged[1].offset = k_size; /* a shared cache takes the tail as v */
    tqkv_metal_plan_cache_append(c, memory, &tqkv__no_gaps, staged[0], staged[1], n_tokens, staged[2], &plan);
    r = tqkv__run_plan(m, &plan);
    if (r == TQKV_OK && *unfit) /* of NaN and infinity tqkv_cache_append has looked */
        r = tqkv__fail(m, TQKV_NOT_FINITE, "append: halves, which calibrate and exact ends keep, do not hold a row");
    tqkv__give_back(m, block);
    return r;
}

/* What a blocking attention has in one block of shared memory. */
enum { TQKV__CALL_Q, TQKV__CALL_OUT, TQKV__CALL_SCRATCH, TQKV__CALL_PARTS };

static tqkv_result tqkv__attend_cache(tqkv_metal *m, const tqkv_cache *c, const void *q, int n_queries, void *out)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer memory, parts[TQKV__CALL_PARTS];
    const tqkv_attention view = tqkv__stores_of(c);
    const int n_heads = view.n_heads, key_dim = tqkv__key_dim(&view), value_dim = view.values->head_dim;
    const size_t value = tqkv__value_size(view.keys->type), rows = (size_t)n_queries * (size_t)n_heads,
                 q_row = (size_t)key_dim * value, out_row = (size_t)value_dim * value;
    size_t sizes[TQKV__CALL_PARTS] = {rows * q_row, rows * out_row, 0};
    tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    memset(parts, 0, sizeof parts);
    r = tqkv_metal_plan_cache_attend(c, memory, &tqkv__no_gaps, NULL, parts[TQKV__CALL_Q], n_queries,
                                     parts[TQKV__CALL_SCRATCH], parts[TQKV__CALL_OUT], &plan);
    if (tqkv__planned(m, r, "attend") != TQKV_OK) return r;
    sizes[TQKV__CALL_SCRATCH] = plan.scratch_size;
    tqkv__memory *block = tqkv__take_staging(m, TQKV__CALL_PARTS, sizes, parts);
    if (!block) return TQKV_OUT_OF_MEMORY;
    const tqkv_strides of_q = tqkv__strides_with(view.query_strides, n_heads, key_dim),
                       of_out = tqkv__strides_with(view.output_strides, n_heads, value_dim);
    const tqkv__rows_copy queries = {&of_q, value, q_row, n_queries, n_heads},
                          outputs = {&of_out, value, out_row, n_queries, n_heads};
    tqkv__copy_in(&queries, q, block->begin + parts[TQKV__CALL_Q].offset);
    tqkv_metal_plan_cache_attend(c, memory, &tqkv__no_gaps, NULL, parts[TQKV__CALL_Q], n_queries,
                                 parts[TQKV__CALL_SCRATCH], parts[TQKV__CALL_OUT], &plan);
    r = tqkv__run_plan(m, &plan);
    if (r == TQKV_OK) tqkv__copy_out(&outputs, block->begin + parts[TQKV__CALL_OUT].offset, out);
    tqkv__give_back(m, block);
    return r;
}

/* >>self-test: one cache on the GPU, one on the processor */

enum {
    TQKV__TRIAL_TOKENS = 48,
    TQKV__TRIAL_RAW = 12,
    TQKV__TRIAL_QUERIES = 3,
    TQKV__TRIAL_BLOCK = 4,
    TQKV__TRIAL_LISTED = 5
};
enum { TQKV__TRIAL_BLOCKS = TQKV__TRIAL_TOKENS / TQKV__TRIAL_BLOCK };
enum { TQKV__TRIAL_K, TQKV__TRIAL_V, TQKV__TRIAL_Q, TQKV__TRIAL_OUT, TQKV__TRIAL_EXPECTED, TQKV__TRIAL_PARTS };

typedef struct tqkv__trial {
    tqkv_metal *m;
    tqkv_cache_desc desc;
    tqkv_cache *gpu, *own;
    char *parts[TQKV__TRIAL_PARTS]; /* rows of desc.type, in one block */
    size_t sizes[TQKV__TRIAL_PARTS];
    tqkv_metal_store store; /* that the GPU decodes, to these rows */
    tqkv_metal_buffer rows;
} tqkv__trial;

/* A value of a row. Halves are of whatever size: their exponents lie 112 lower. */
static float tqkv__trial_value(tqkv_type type, const char *at)
{
    uint32_t bits = 0;
    float value;
    memcpy(&bits, at, tqkv__value_size(type)); /* as GPU and processor, little-endian */
    if (type == TQKV_TYPE_BF16) bits <<= 16;
    if (type == TQKV_TYPE_F16) bits = (bits & 0x8000u) << 16 | (bits & 0x7fffu) << 13;
    memcpy(&value, &bits, sizeof value);
    return type == TQKV_TYPE_F16 ? value * 5.192296858534828e33f : value;
}

/* Values from -2 to 2 of seven bits, which all types have; none is 0. */
static void tqkv__trial_fill(tqkv_type type, size_t size, uint32_t seed, char *rows)
{
    for (size_t i = 0; i < size; i += tqkv__value_size(type)) {
        seed = seed * 1664525u + 1013904223u;
        const float value = (float)(seed >> 25) / 32.0f - 127.0f / 64.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (type == TQKV_TYPE_BF16) bits >>= 16;
        if (type == TQKV_TYPE_F16) bits = (bits >> 16 & 0x8000u) | ((bits >> 13 & 0x3ffffu) - (112u << 10));
        memcpy(rows + i, &bits, tqkv__value_size(type));
    }
}

static tqkv_result tqkv__trial_differs(const tqkv__trial *t, const char *what, double by, const char *unit)
{
    const tqkv_attention view = tqkv__stores_of(t->own);
    const tqkv_store *tail = view.tail;
    return tqkv__fail(t->m, TQKV_METAL_ERROR,
                      "self-test: %s of head_dim %d, %s/%s%s%s differ from the processor's by %.3g%s", what,
                      t->desc.head_dim, tqkv_format_name(view.keys->format), tqkv_format_name(view.values->format),
                      tail ? " and " : "", tail ? tqkv_format_name(tail->format) : "", by, unit);
}

static tqkv_result tqkv__trial_bytes(const tqkv__trial *t, const char *what, const void *gpu, const void *own,
                                     size_t size)
{
    size_t n = 0;
    for (size_t i = 0; i < size; i++) n += ((const char *)gpu)[i] != ((const char *)own)[i];
    return n ? tqkv__trial_differs(t, what, 100.0 * (double)n / (double)size, "% of their bytes") : TQKV_OK;
}

/* Whether the processor's attention has other centroids for a stream than the GPU's. */
static bool tqkv__trial_rounds(const tqkv_store *s)
{
    return s && s->format != TQKV_F16 && s->format != TQKV_I8 && s->format != TQKV_TQ8;
}

/* Returns what outputs may differ by: the processor multiplies integers, and each is rounded to the type of rows. */
static double tqkv__trial_limit(const tqkv__trial *t, tqkv_type type)
{
    const tqkv_attention view = tqkv__stores_of(t->own);
    const tqkv_store *keys = view.keys, *tail = view.tail;
    const double root = sqrt((double)(keys->head_dim + (tail ? tail->head_dim : 0)));
    const double deviation = t->desc.scale != 0.0f ? 1.4 * fabs((double)t->desc.scale) * root : 1.4; /* of scores */
    const bool rounds = tqkv__trial_rounds(keys) || tqkv__trial_rounds(view.values) || tqkv__trial_rounds(tail);
    const double of_type = type == TQKV_TYPE_F32 ? 0.0 : type == TQKV_TYPE_F16 ? 1e-3 : 8e-3;
    return of_type + (rounds ? 0.015 : 3e-4) * (1.0 + deviation);
}

static tqkv_result tqkv__trial_values(const tqkv__trial *t, const char *what, tqkv_type type, size_t n, const void *gpu,
                                      const void *own)
{
    const double limit = tqkv__trial_limit(t, type);
    const size_t size = n * tqkv__value_size(type);
    double wrong = 0, all = 0;
    for (size_t i = 0; i < size; i += tqkv__value_size(type)) {
        const double expected = (double)tqkv__trial_value(type, (const char *)own + i),
                     difference = (double)tqkv__trial_value(type, (const char *)gpu + i) - expected;
        wrong += difference * difference;
        all += expected * expected;
    }
    return wrong <= limit * limit * all ? TQKV_OK : tqkv__trial_differs(t, what, sqrt(wrong / all), " of their length");
}

/* A store of a cache of the context. */
static tqkv_result tqkv__trial_store(tqkv_metal *m, const tqkv_store *s, tqkv_metal_store *out)
{
    memset(out, 0, sizeof *out);
    out->shape = *s;
    tqkv_result r = tqkv_metal_find(m, s->codes, &out->codes);
    if (r == TQKV_OK && s->norms_size) r = tqkv_metal_find(m, s->norms, &out->norms);
    if (r == TQKV_OK && s->center) r = tqkv_metal_find(m, s->center, &out->center);
    return r == TQKV_OK && s->channel_scale ? tqkv_metal_find(m, s->channel_scale, &out->channel_scale) : r;
}

static tqkv_result tqkv__record_trial(void *user, tqkv_metal_object encoder)
{
    const tqkv__trial *t = (const tqkv__trial *)user;
    tqkv_metal_plan plan;
    tqkv_metal_plan_decode(&t->store, 0, TQKV__TRIAL_TOKENS, TQKV_ORIGINAL, t->rows, &plan);
    return tqkv_metal_record(t->m, encoder, &plan);
}

/* names: of the codes and of the decoded rows. The source is not needed any more. */
static tqkv_result tqkv__try_store(tqkv__trial *t, const tqkv_store *gpu, const tqkv_store *own,
                                   const char *const names[2])
{
    char *decoded = t->parts[TQKV__TRIAL_K];
    const size_t size =
        (size_t)TQKV__TRIAL_TOKENS * (size_t)own->n_kv_heads * (size_t)own->head_dim * tqkv__value_size(t->desc.type);
    tqkv_result r = tqkv__trial_bytes(t, names[0], gpu->codes, own->codes, own->codes_size);
    if (r == TQKV_OK) r = tqkv__trial_bytes(t, names[0], gpu->norms, own->norms, own->norms_size);
    if (r == TQKV_OK) r = tqkv__trial_store(t->m, gpu, &t->store);
    if (r != TQKV_OK) return r;
    tqkv__memory *block = tqkv__take_staging(t->m, 1, &size, &t->rows);
    if (!block) return TQKV_OUT_OF_MEMORY;
    r = tqkv__run_as(t->m, "self-test", tqkv__record_trial, t);
    if (r == TQKV_OK) r = tqkv_decode(own, 0, TQKV__TRIAL_TOKENS, TQKV_ORIGINAL, decoded);
    if (r == TQKV_OK) r = tqkv__trial_bytes(t, names[1], block->begin, decoded, size);
    tqkv__give_back(t->m, block);
    return r;
}

static tqkv_result tqkv__try_stores(tqkv__trial *t)
{
    static const char *const names[3][2] = {
        {"keys", "decoded keys"}, {"values", "decoded values"}, {"tails", "decoded tails"}};
    const tqkv_attention of_gpu = tqkv__stores_of(t->gpu), of_own = tqkv__stores_of(t->own);
    const tqkv_store *const gpu[] = {of_gpu.keys, of_gpu.values, of_gpu.tail}, *const own[] = {of_own.keys,
                                                                                               of_own.values,
                                                                                               of_own.tail};
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < 3 && r == TQKV_OK; i++)
        if (own[i] && (i != 1 || !t->desc.shared)) r = tqkv__try_store(t, gpu[i], own[i], names[i]);
    return r;
}

static tqkv_result tqkv__try_attention(const tqkv__trial *t, int n_queries)
{
    const size_t n = t->sizes[TQKV__TRIAL_OUT] / TQKV__TRIAL_QUERIES / tqkv__value_size(t->desc.type);
    char *out = t->parts[TQKV__TRIAL_OUT], *expected = t->parts[TQKV__TRIAL_EXPECTED];
    tqkv_result r = tqkv_cache_attend(t->gpu, t->parts[TQKV__TRIAL_Q], n_queries, out);
    if (r == TQKV_OK) r = tqkv_cache_attend(t->own, t->parts[TQKV__TRIAL_Q], n_queries, expected);
    if (r != TQKV_OK) return r;
    return tqkv__trial_values(t, n_queries > 1 ? "outputs of three queries" : "outputs of one query", t->desc.type,
                              n * (size_t)n_queries, out, expected);
}

/* The keys of the first KV head as those of an index, its choice, and attention to the blocks that it chose. Where an
   index cannot be, the list is the processor's. Arrays lie one behind the other in a block of shared memory. */
typedef struct tqkv__trial_list {
    const tqkv__trial *t;
    bool indexed;
    tqkv_metal_store keys, values, tail, index_keys;
    tqkv_metal_attention a;
    tqkv_metal_index x;
    tqkv_metal_buffer q, scores, list, scratch, out;
    tqkv__memory *block;
} tqkv__trial_list;

static tqkv_result tqkv__record_trial_list(void *user, tqkv_metal_object encoder)
{
    const tqkv__trial_list *l = (const tqkv__trial_list *)user;
    tqkv_metal *m = l->t->m;
    tqkv_metal_plan plan;
    tqkv_result r = TQKV_OK;
    if (l->indexed) {
        tqkv_metal_plan_index_scores(&l->x, l->q, l->scores, &plan);
        r = tqkv_metal_record(m, encoder, &plan);
        tqkv_metal_plan_index_choose(&l->x, l->scores, TQKV__TRIAL_LISTED, l->scratch, l->list, &plan);
        if (r == TQKV_OK) r = tqkv_metal_record(m, encoder, &plan);
    }
    tqkv_metal_plan_attend(&l->a, l->q, l->scratch, l->out, &plan);
    return r == TQKV_OK ? tqkv_metal_record(m, encoder, &plan) : r;
}

/* An attention to a list, as the processor takes it. */
static tqkv_attention tqkv__trial_view(const tqkv_cache *c, const int32_t *list)
{
    tqkv_attention a = tqkv__stores_of(c);
    a.n_queries = TQKV__TRIAL_QUERIES;
    a.first.n = a.last.n = 0;
    a.list.rows = list;
    a.list.length = TQKV__TRIAL_LISTED;
    a.list.block = TQKV__TRIAL_BLOCK;
    return a;
}

static tqkv_result tqkv__open_trial_list(const tqkv__trial *t, tqkv__trial_list *l)
{
    const tqkv_attention view = tqkv__stores_of(t->gpu);
    const tqkv_store *keys = view.keys, *values = view.values, *tail = view.tail;
    memset(l, 0, sizeof *l);
    l->t = t;
    l->indexed = (keys->head_dim == 64 || keys->head_dim == 128) && tqkv__has_matrices(t->m);
    tqkv_result r = tqkv__trial_store(t->m, keys, &l->keys);
    if (r == TQKV_OK) r = tqkv__trial_store(t->m, values, &l->values);
    if (r == TQKV_OK && tail) r = tqkv__trial_store(t->m, tail, &l->tail);
    l->a.attention = tqkv__trial_view(t->gpu, NULL);
    if (r == TQKV_OK && l->a.attention.sinks) r = tqkv_metal_find(t->m, l->a.attention.sinks, &l->a.sinks);
    l->a.keys = &l->keys;
    l->a.values = &l->values;
    l->a.tail = tail ? &l->tail : NULL;
    l->a.matrix_group = t->desc.matrix_group;
    l->index_keys = l->keys;
    l->index_keys.shape.n_kv_heads = 1;
    l->x.keys = &l->index_keys;
    l->x.index.n_heads = l->a.attention.n_heads;
    l->x.index.n_queries = TQKV__TRIAL_QUERIES;
    l->x.index.end = TQKV__TRIAL_TOKENS;
    l->x.index.block = TQKV__TRIAL_BLOCK;
    l->x.index.relu = true;
    l->x.index.query_type = t->desc.type;
    return r;
}

/* Divides a block, and writes q and a list into it. */
static tqkv_result tqkv__fill_trial_list(tqkv__trial_list *l)
{
    const tqkv__trial *t = l->t;
    tqkv_metal_buffer staged[5];
    size_t sizes[] = {t->sizes[TQKV__TRIAL_Q], sizeof(float) * TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS,
                      sizeof(int32_t) * TQKV__TRIAL_QUERIES * TQKV__TRIAL_LISTED, 0, t->sizes[TQKV__TRIAL_OUT]};
    tqkv_metal_plan plan;
    l->a.list.buffer = t->m->unused; /* for now */
    tqkv_result r = tqkv_metal_plan_attend(&l->a, l->q, l->scratch, l->out, &plan);
    if (tqkv__planned(t->m, r, "self-test") != TQKV_OK) return r;
    sizes[3] = plan.scratch_size;
    l->block = tqkv__take_staging(t->m, 5, sizes, staged);
    if (!l->block) return TQKV_OUT_OF_MEMORY;
    l->q = staged[0];
    l->scores = staged[1];
    l->list = staged[2];
    l->scratch = staged[3];
    l->out = staged[4];
    memcpy(l->block->begin, t->parts[TQKV__TRIAL_Q], t->sizes[TQKV__TRIAL_Q]);
    for (int i = 0; i < TQKV__TRIAL_QUERIES; i++) {
        const int32_t row[TQKV__TRIAL_LISTED] = {0, 3 + i, 7, TQKV__TRIAL_BLOCKS - 1, -1};
        memcpy(l->block->begin + l->list.offset + (size_t)i * sizeof row, row, sizeof row);
    }
    l->a.list = l->list;
    return TQKV_OK;
}

/* The choice must be the same of the same scores. */
static tqkv_result tqkv__check_trial_index(const tqkv__trial_list *l)
{
    float expected[TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS], scores[TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS];
    int32_t list[TQKV__TRIAL_QUERIES * TQKV__TRIAL_LISTED];
    const tqkv__trial *t = l->t;
    tqkv_store keys = *tqkv__stores_of(t->own).keys;
    tqkv_index x = l->x.index;
    keys.n_kv_heads = 1;
    x.keys = &keys;
    memcpy(scores, l->block->begin + l->scores.offset, sizeof scores);
    tqkv_result r = tqkv_index_scores(&x, t->parts[TQKV__TRIAL_Q], expected);
    if (r == TQKV_OK)
        r = tqkv__trial_values(t, "scores of an index", TQKV_TYPE_F32, TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS, scores,
                               expected);
    if (r == TQKV_OK) r = tqkv_index_choose(&x, scores, TQKV__TRIAL_LISTED, list);
    return r == TQKV_OK ? tqkv__trial_bytes(t, "chosen blocks", l->block->begin + l->list.offset, list, sizeof list)
                        : r;
}

static tqkv_result tqkv__try_list(const tqkv__trial *t)
{
    tqkv__trial_list l;
    char *expected = t->parts[TQKV__TRIAL_EXPECTED];
    tqkv_result r = tqkv__open_trial_list(t, &l);
    if (r == TQKV_OK) r = tqkv__fill_trial_list(&l);
    if (r == TQKV_OK) r = tqkv__run_as(t->m, "self-test", tqkv__record_trial_list, &l);
    if (r == TQKV_OK && l.indexed) r = tqkv__check_trial_index(&l);
    if (r == TQKV_OK) {
        const tqkv_attention a = tqkv__trial_view(t->own, (int32_t *)(void *)(l.block->begin + l.list.offset));
        r = tqkv_attend(&a, t->parts[TQKV__TRIAL_Q], expected);
    }
    if (r == TQKV_OK)
        r = tqkv__trial_values(t, "outputs of a list", t->desc.type,
                               t->sizes[TQKV__TRIAL_OUT] / tqkv__value_size(t->desc.type),
                               l.block->begin + l.out.offset, expected);
    if (l.block) tqkv__give_back(t->m, l.block);
    return r;
}

static tqkv_result tqkv__open_trial(tqkv__trial *t)
{
    const tqkv_cache_desc *d = &t->desc;
    t->desc.metal = t->m;
    tqkv_result r = tqkv_cache_create(d, &t->gpu);
    t->desc.metal = NULL;
    if (r == TQKV_OK) r = tqkv_cache_create(d, &t->own);
    if (tqkv__planned(t->m, r, "self-test") != TQKV_OK) return r;
    const size_t width = tqkv__value_size(d->type), n_heads = (size_t)d->n_heads,
                 key_dim = (size_t)(d->head_dim + d->tail_dim),
                 value_dim = (size_t)(d->value_dim ? d->value_dim : d->head_dim);
    const size_t tokens = TQKV__TRIAL_TOKENS * (size_t)d->n_kv_heads * width,
                 queries = TQKV__TRIAL_QUERIES * n_heads * width;
    const size_t sizes[] = {tokens * key_dim, tokens * value_dim, queries * key_dim, queries * value_dim,
                            queries * value_dim};
    size_t all = 0;
    memcpy(t->sizes, sizes, sizeof sizes);
    for (int i = 0; i < TQKV__TRIAL_PARTS; i++) all += sizes[i];
    t->parts[0] = (char *)calloc(all, 1);
    if (!t->parts[0]) return tqkv__fail(t->m, TQKV_OUT_OF_MEMORY, "no memory for a self-test");
    for (int i = 1; i < TQKV__TRIAL_PARTS; i++) t->parts[i] = t->parts[i - 1] + sizes[i - 1];
    for (int i = TQKV__TRIAL_K; i <= TQKV__TRIAL_Q; i++)
        tqkv__trial_fill(d->type, sizes[i], 1u + (uint32_t)i, t->parts[i]);
    return TQKV_OK;
}

/* Both caches append `n` tokens from number `first` on. */
static tqkv_result tqkv__append_trial(const tqkv__trial *t, int first, int n)
{
    const size_t at = (size_t)first, all = TQKV__TRIAL_TOKENS;
    const char *k = t->parts[TQKV__TRIAL_K] + at * (t->sizes[TQKV__TRIAL_K] / all),
               *v = t->desc.shared ? NULL : t->parts[TQKV__TRIAL_V] + at * (t->sizes[TQKV__TRIAL_V] / all);
    const tqkv_result r = tqkv_cache_append(t->gpu, k, v, n);
    return r == TQKV_OK ? tqkv_cache_append(t->own, k, v, n) : r;
}

/* A cache that learns attends to its rows as they came before it encodes them. */
static tqkv_result tqkv__try_raw(const tqkv__trial *t)
{
    const tqkv_result r = tqkv__append_trial(t, 0, TQKV__TRIAL_RAW);
    return r == TQKV_OK ? tqkv__try_attention(t, TQKV__TRIAL_QUERIES) : r;
}

tqkv_result tqkv_metal_self_test(tqkv_metal *m, const tqkv_cache_desc *desc)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    if (!desc) return tqkv__planned(m, TQKV_INVALID_ARGUMENT, "self-test");
    tqkv__trial t = {.m = m, .desc = *desc};
    t.desc.capacity = TQKV__TRIAL_TOKENS;
    t.desc.ring = false;
    t.desc.window = desc->window ? TQKV__TRIAL_TOKENS / 2 : 0;
    t.desc.exact_first = desc->exact_first ? 5 : 0;
    t.desc.exact_last = desc->exact_last ? 9 : 0;
    tqkv_result r = tqkv__open_trial(&t);
    const int raw = desc->calibrate ? TQKV__TRIAL_RAW : 0;
    if (r == TQKV_OK && raw) r = tqkv__try_raw(&t);
    if (r == TQKV_OK) r = tqkv__append_trial(&t, raw, TQKV__TRIAL_TOKENS - raw);
    if (r == TQKV_OK) r = tqkv__try_stores(&t);
    if (r == TQKV_OK) r = tqkv__try_attention(&t, 1);
    if (r == TQKV_OK) r = tqkv__try_attention(&t, TQKV__TRIAL_QUERIES);
    if (r == TQKV_OK) r = tqkv__try_list(&t);
    free(t.parts[0]);
    tqkv_cache_destroy(t.gpu);
    tqkv_cache_destroy(t.own);
    return r;
}

/* >>context: libraries, the device, create and destroy */

#ifdef TQKV_METALLIB_EMBED
/* The size, and 16 bytes on the library. Labels that start with L make no symbols, where a linker could split them. */
__asm__(
#ifdef __APPLE__
    ".pushsection __TEXT,__const\n"
    ".balign 16\n_tqkv__embedded:\n"
#else
    ".pushsection .rodata\n"
    ".balign 16\ntqkv__embedded:\n"
#endif
    ".quad Ltqkv_end - Ltqkv_begin\n.quad 0\n"
    "Ltqkv_begin:\n.incbin \"" TQKV_METALLIB_EMBED "\"\nLtqkv_end:\n"
    ".popsection\n");
extern const struct {
    uint64_t size, zero;
    unsigned char bytes[];
} tqkv__embedded;
#endif

static tqkv_result tqkv__load_bytes(tqkv_metal *m, const void *bytes, size_t size)
{
    NSError *error = nil;
    dispatch_data_t data = dispatch_data_create(bytes, size, NULL, DISPATCH_DATA_DESTRUCTOR_DEFAULT); /* a copy */
    m->library = [m->device newLibraryWithData:data error:&error];
#if !(__has_feature(objc_arc) && OS_OBJECT_USE_OBJC)
    dispatch_release(data); /* not an object of Objective-C, or one without ARC */
#endif
    return m->library ? TQKV_OK : tqkv__fail(m, TQKV_METAL_ERROR, "library in memory: %s", tqkv__error_text(error));
}

static tqkv_result tqkv__load_path(tqkv_metal *m, const char *path)
{
    NSError *error = nil;
    NSString *name = [NSString stringWithUTF8String:path];
    if (!name || !path[0]) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "library_path is empty or not UTF-8");
    m->library = [m->device newLibraryWithURL:[NSURL fileURLWithPath:name] error:&error];
    return m->library ? TQKV_OK : tqkv__fail(m, TQKV_METAL_ERROR, "%s: %s", path, tqkv__error_text(error));
}

/* Kernels are compiled when they are needed. */
static tqkv_result tqkv__load_source(tqkv_metal *m, const char *source)
{
    NSString *text = [NSString stringWithUTF8String:source];
    if (!text || !source[0]) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "library_source is empty or not UTF-8");
    m->source = TQKV__RETAIN(text);
    return TQKV_OK;
}

static bool tqkv__has_library(const tqkv_metal_desc *desc)
{
#ifdef TQKV_METALLIB_EMBED
    (void)desc;
    return true;
#else
    return desc->library_path || desc->library_bytes || desc->library;
#endif
}

static tqkv_result tqkv__load_library(tqkv_metal *m, const tqkv_metal_desc *desc)
{
    id<MTLLibrary> library = desc->library;
    if ((desc->library_path != NULL) + (desc->library_bytes != NULL) + (library != nil) > 1)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "more than one library");
    if (desc->library_path) return tqkv__load_path(m, desc->library_path);
    if (desc->library_bytes) return tqkv__load_bytes(m, desc->library_bytes, desc->library_size);
    if (library && !tqkv__is_device(m, [library device]))
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "the library is of another device");
    if (library) {
        m->library = TQKV__RETAIN(library);
        return TQKV_OK;
    }
#ifdef TQKV_METALLIB_EMBED
    return tqkv__load_bytes(m, tqkv__embedded.bytes, (size_t)tqkv__embedded.size);
#else
    if (desc->library_source) return tqkv__load_source(m, desc->library_source);
    return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "no library: none given, and built without TQKV_METALLIB_EMBED");
#endif
}

static tqkv_result tqkv__open_device(tqkv_metal *m, const tqkv_metal_desc *desc)
{
    id<MTLDevice> given = desc->device;
    m->device = given ? TQKV__RETAIN(given) : MTLCreateSystemDefaultDevice();
    if (!m->device) return tqkv__fail(m, TQKV_UNSUPPORTED, "there is no Metal device");
#ifndef TQKV_METAL_ANY_FAMILY /* for tests on virtual machines, whose GPU calls itself Apple5 */
    if (![m->device supportsFamily:MTLGPUFamilyApple7])
        return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: not of the GPU family Apple7 or later",
                          [[m->device name] UTF8String]);
#endif
    m->queue = [m->device newCommandQueue];
    if (!m->queue) return tqkv__fail(m, TQKV_METAL_ERROR, "Metal gave no command queue");
    /* As long as the largest struct of an argument: Metal's validation compares the two, also for arguments that a
       pipeline does not read. Untracked: Metal must not order dispatches because they share this buffer. */
    m->unused = [m->device newBufferWithLength:sizeof(tqkv__batch_item)
                                       options:MTLResourceStorageModePrivate | MTLResourceHazardTrackingModeUntracked];
    return m->unused ? TQKV_OK : tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no buffer");
}

static bool tqkv__all_zero(const char *bytes, size_t size)
{
    size_t n = 0;
    while (n < size && !bytes[n]) n++;
    return n == size;
}

/* Runs the product of two matrices. A failure may be of the moment: it is tried again. Matrices that lie otherwise, or
   a kernel that Metal refuses twice, cost the context its matrices; one that was built and did not run is a failure. */
static tqkv_result tqkv__check_product(tqkv_metal *m, tqkv_metal_plan *plan, const void *report)
{
    char text[300];
    tqkv_result r = tqkv__run_plan(m, plan);
    if (r == TQKV_METAL_ERROR && (r = tqkv__run_plan(m, plan)) == TQKV_OK) tqkv__fail(m, r, "%s", "");
    if (r != TQKV_OK && (r != TQKV_METAL_ERROR || tqkv__is_built(m, &plan->d[0].kernel))) return r;
    m->matrices = r == TQKV_OK && tqkv_metal_has_matrices(report);
    tqkv_metal_error(m, text, sizeof text);
    if (!m->matrices)
        tqkv__fail(m, r, "%s; attention without matrices", r == TQKV_OK ? "this GPU's matrices lie otherwise" : text);
    return TQKV_OK;
}

/* Compares the shaders' tables with those of tqkv.h. Then it looks where the GPU's matrices lie: attention can do
   without them, so a failure there is only a text. */
static tqkv_result tqkv__check_tables(tqkv_metal *m)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer buffer;
    const size_t size = TQKV_METAL_REPORT;
    tqkv__memory *block = tqkv__take_staging(m, 1, &size, &buffer);
    if (!block) return TQKV_OUT_OF_MEMORY;
    memset(block->begin, 0, size);
    tqkv_metal_plan_tables(buffer, &plan);
    plan.n = 1; /* the other one may fail */
    tqkv_result r = tqkv__run_plan(m, &plan);
    const char *stale = r == TQKV_OK ? tqkv_metal_stale_table(block->begin) : NULL;
    if (stale && tqkv__all_zero(block->begin, size))
        r = tqkv__fail(m, TQKV_METAL_ERROR, "tables: the kernel wrote nothing");
    else if (stale)
        r = tqkv__fail(m, TQKV_TABLE_MISMATCH, "the library's %s differs from that of tqkv.h", stale);
    if (r == TQKV_OK) {
        plan.call = "matrices";
        plan.d[0] = plan.d[1];
        r = tqkv__check_product(m, &plan, block->begin);
    }
    tqkv__give_back(m, block);
    return r;
}

static void tqkv__drop_kept(tqkv__kept **list)
{
    while (*list) {
        tqkv__kept *k = *list;
        *list = k->next;
        tqkv__free_kept(k);
    }
}

static void tqkv__drop_library(tqkv_metal *m)
{
    tqkv__drop_kept(&m->pipelines);
    tqkv__drop_kept(&m->compiled);
    TQKV__RELEASE(m->library);
    TQKV__RELEASE(m->source);
}

/* The library, or the source if there is one and Metal refuses the library. A wrong argument is refused either way.
   With both, single kernels that Metal refuses come from the source, too. */
static tqkv_result tqkv__open_library(tqkv_metal *m, const tqkv_metal_desc *desc)
{
    char library_text[180];
    const bool may_fall_back = desc->library_source && tqkv__has_library(desc);
    tqkv_result r = tqkv__load_library(m, desc);
    if (r == TQKV_OK) r = tqkv__check_tables(m);
    if (r == TQKV_OK && may_fall_back) return tqkv__load_source(m, desc->library_source);
    if (!may_fall_back || (r != TQKV_METAL_ERROR && r != TQKV_TABLE_MISMATCH)) return r;
    tqkv_metal_error(m, library_text, sizeof library_text);
    tqkv__drop_library(m);
    r = tqkv__load_source(m, desc->library_source);
    if (r == TQKV_OK) r = tqkv__check_tables(m);
    return tqkv__fell_back(m, r, library_text);
}

tqkv_result tqkv_metal_create(const tqkv_metal_desc *desc, tqkv_metal **out)
{
    if (!out) return TQKV_INVALID_ARGUMENT;
    *out = NULL;
    if (!desc) return TQKV_INVALID_ARGUMENT;
    if (desc->error && desc->error_size) snprintf(desc->error, desc->error_size, "out of memory");
    tqkv_metal *m = (tqkv_metal *)calloc(1, sizeof *m);
    if (!m) return TQKV_OUT_OF_MEMORY;
    if (pthread_mutex_init(&m->lock, NULL)) {
        free(m);
        return TQKV_OUT_OF_MEMORY;
    }
    m->backend.memory.alloc = tqkv__memory_alloc;
    m->backend.memory.free = tqkv__memory_free;
    m->backend.memory.user = m;
    m->backend.append = tqkv__cache_append;
    m->backend.attend = tqkv__attend_cache;
    tqkv_result r;
    @autoreleasepool {
        r = tqkv__open_device(m, desc);
        if (r == TQKV_OK) r = tqkv__open_library(m, desc);
    }
    tqkv_metal_error(m, desc->error, desc->error_size);
    if (r == TQKV_OK)
        *out = m;
    else
        tqkv_metal_destroy(m);
    return r;
}

void tqkv_metal_destroy(tqkv_metal *m)
{
    if (!m) return;
    tqkv__drop_library(m);
    while (m->memory) tqkv__memory_free(m, m->memory->begin, m->memory->size);
    TQKV__RELEASE(m->unused);
    TQKV__RELEASE(m->queue);
    TQKV__RELEASE(m->device);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

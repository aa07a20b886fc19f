/* tqkv_metal.m - the Metal host of tqkv.h, where the API is documented (>>metal). MIT licence, as tqkv.h.

     clang -O2 -c tqkv_metal.m        with or without -fobjc-arc
     ... -framework Metal -framework Foundation

   In the program one C or C++ file has TQKV_IMPLEMENTATION. -DTQKV_METALLIB_EMBED='"default.metallib"' puts the
   compiled shaders into the object.

   In this order: errors, pipelines, commands, rows, attention, shared memory, caches, the context. */
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <dispatch/dispatch.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef TQKV_SHARED
#define TQKV_SHARED
#endif
#include "tqkv.h"

/* Every object that is kept is in a strong variable, retained once and released once: under ARC by assignment. */
#if __has_feature(objc_arc)
#define TQKV__RETAIN(object)  (object)
#define TQKV__RELEASE(object) ((object) = nil)
#define TQKV__TO_THE_END      __attribute__((objc_precise_lifetime)) /* also where only C structs know it any more */
#else
#define TQKV__RETAIN(object)  [(object) retain]
#define TQKV__RELEASE(object) ([(object) release], (object) = nil)
#define TQKV__TO_THE_END
#endif

typedef enum tqkv__family {
    TQKV__TABLES,
    TQKV__ENCODE,
    TQKV__ENCODE_KV,
    TQKV__PROBE,
    TQKV__DECODE,
    TQKV__ROTATE,
    TQKV__ATTEND,
    TQKV__ATTEND_MERGE
} tqkv__family;

enum { TQKV__CONSTANTS = 12, TQKV__BUCKETS = 64, TQKV__SIMD_WIDTH = 32 };

/* What names a pipeline. Bytes only, without gaps, so that two are compared as bytes. */
typedef struct tqkv__kernel {
    uint8_t family, head_dim;          /* head_dim / 32 */
    uint8_t constant[TQKV__CONSTANTS]; /* by TQKV_FC_*: value + 1, 0 = not set */
} tqkv__kernel;

typedef struct tqkv__pipeline {
    tqkv__kernel kernel;
    id<MTLComputePipelineState> state;
    int max_simdgroups;
    struct tqkv__pipeline *next;
} tqkv__pipeline;

/* A block of memory that the context has lent. */
typedef struct tqkv__memory {
    id<MTLBuffer> buffer;
    const char *begin;
    size_t size;
    struct tqkv__memory *next;
} tqkv__memory;

struct tqkv_metal {
    tqkv__backend backend; /* first: tqkv.h finds it there */
    id<MTLDevice> device;
    id<MTLCommandQueue> queue;
    id<MTLLibrary> library;
    id<MTLBuffer> unused; /* bound where a kernel has an argument that the call has not */
    pthread_mutex_t lock; /* of what follows */
    tqkv__pipeline *pipelines[TQKV__BUCKETS];
    tqkv__memory *memory;
    char error[400];
};

/* -- Errors -- */

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

/* Of a check by tqkv.h. */
static tqkv_result tqkv__refuse(tqkv_metal *m, tqkv_result result, const char *call)
{
    return tqkv__fail(m, result, "%s: %s", call, tqkv_result_string(result));
}

static const char *tqkv__words(NSError *error)
{
    const char *words = [[error localizedDescription] UTF8String];
    return words ? words : "Metal gave no reason";
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

/* -- Pipelines: built when first asked for, and kept -- */

static tqkv__kernel tqkv__kernel_of(tqkv__family family, int head_dim)
{
    tqkv__kernel kernel;
    memset(&kernel, 0, sizeof kernel);
    kernel.family = (uint8_t)family;
    kernel.head_dim = (uint8_t)(head_dim / 32);
    return kernel;
}

static void tqkv__set_constant(tqkv__kernel *kernel, int index, int value)
{
    kernel->constant[index] = (uint8_t)(value + 1);
}

static NSString *tqkv__function_name(const tqkv__kernel *kernel)
{
    static const char *const families[] = {"tables", "encode", "encode_kv", "probe",
                                           "decode", "rotate", "attend",    "attend_merge"};
    const char *family = families[kernel->family];
    if (!kernel->head_dim) return [NSString stringWithFormat:@"tqkv_%s", family];
    return [NSString stringWithFormat:@"tqkv_%s_d%d", family, kernel->head_dim * 32];
}

static void tqkv__set_values(const tqkv__kernel *kernel, MTLFunctionConstantValues *values)
{
    for (unsigned i = 0; i < TQKV__CONSTANTS; i++) {
        const uint32_t value = kernel->constant[i] - 1u;
        const bool flag = value != 0,
                   is_number = i == TQKV_FC_FORMAT || i == TQKV_FC_VALUE_FORMAT || i == TQKV_FC_COLUMNS;
        if (!kernel->constant[i]) continue;
        if (is_number)
            [values setConstantValue:&value type:MTLDataTypeUInt atIndex:i];
        else
            [values setConstantValue:&flag type:MTLDataTypeBool atIndex:i];
    }
}

static tqkv_result tqkv__build_pipeline(tqkv_metal *m, tqkv__pipeline *p)
{
    NSError *error = nil;
    NSString *name = tqkv__function_name(&p->kernel);
    MTLFunctionConstantValues *values = [[MTLFunctionConstantValues alloc] init];
    tqkv__set_values(&p->kernel, values);
    id<MTLFunction> function = [m->library newFunctionWithName:name constantValues:values error:&error];
    TQKV__RELEASE(values);
    if (!function) return tqkv__fail(m, TQKV_METAL_ERROR, "%s: %s", [name UTF8String], tqkv__words(error));
    p->state = [m->device newComputePipelineStateWithFunction:function error:&error];
    TQKV__RELEASE(function);
    if (!p->state) return tqkv__fail(m, TQKV_METAL_ERROR, "%s: %s", [name UTF8String], tqkv__words(error));
    p->max_simdgroups = (int)([p->state maxTotalThreadsPerThreadgroup] / TQKV__SIMD_WIDTH);
    if ([p->state threadExecutionWidth] == TQKV__SIMD_WIDTH && p->max_simdgroups > 0) return TQKV_OK;
    const int width = (int)[p->state threadExecutionWidth];
    TQKV__RELEASE(p->state);
    return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: simdgroups of %d threads, not 32", [name UTF8String], width);
}

static tqkv__pipeline **tqkv__bucket(tqkv_metal *m, const tqkv__kernel *kernel)
{
    return &m->pipelines[tqkv__hash(kernel, sizeof *kernel) % TQKV__BUCKETS];
}

static const tqkv__pipeline *tqkv__find_pipeline(tqkv_metal *m, const tqkv__kernel *kernel)
{
    tqkv__pipeline *const *bucket = tqkv__bucket(m, kernel);
    pthread_mutex_lock(&m->lock);
    const tqkv__pipeline *p = *bucket;
    while (p && memcmp(&p->kernel, kernel, sizeof *kernel) != 0) p = p->next;
    pthread_mutex_unlock(&m->lock);
    return p;
}

static void tqkv__free_pipeline(tqkv__pipeline *p)
{
    TQKV__RELEASE(p->state);
    free(p);
}

/* Building takes up to a second, so it is done outside the lock; should another thread have been first, its pipeline is
   the one that is kept. Pipelines live as long as the context. */
static tqkv_result tqkv__get_pipeline(tqkv_metal *m, const tqkv__kernel *kernel, const tqkv__pipeline **out)
{
    tqkv_result r;
    if ((*out = tqkv__find_pipeline(m, kernel))) return TQKV_OK;
    tqkv__pipeline *made = (tqkv__pipeline *)calloc(1, sizeof *made), **bucket = tqkv__bucket(m, kernel);
    if (!made) return tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no memory for a pipeline");
    made->kernel = *kernel;
    @autoreleasepool {
        r = tqkv__build_pipeline(m, made);
    }
    if (r != TQKV_OK) {
        tqkv__free_pipeline(made);
        return r;
    }
    pthread_mutex_lock(&m->lock);
    tqkv__pipeline *p = *bucket;
    while (p && memcmp(&p->kernel, kernel, sizeof *kernel) != 0) p = p->next;
    if (!p) {
        made->next = *bucket;
        *bucket = made;
    }
    pthread_mutex_unlock(&m->lock);
    if (p) tqkv__free_pipeline(made);
    *out = p ? p : made;
    return TQKV_OK;
}

/* -- Commands: a kernel with all that a dispatch of it takes, checked first and then recorded -- */

enum { TQKV__ARGUMENTS = 8, TQKV__MEMORIES = 4, TQKV__CODE_ALIGNMENT = 16, TQKV__ALIGNMENT = 4 };

/* A buffer argument. size 0: the call has none. */
typedef struct tqkv__binding {
    const char *name;
    unsigned index;
    tqkv_metal_buffer at;
    size_t size, alignment;
    bool written;
} tqkv__binding;

typedef struct tqkv__command {
    tqkv__kernel kernel;
    tqkv__binding bindings[TQKV__ARGUMENTS];
    int n_bindings;
    NSUInteger memory[TQKV__MEMORIES], memory_each[TQKV__MEMORIES]; /* bytes a threadgroup, and for each simdgroup */
} tqkv__command;

static tqkv__binding *tqkv__input(tqkv__command *c, const char *name, unsigned index, tqkv_metal_buffer at, size_t size)
{
    const tqkv__binding binding = {name, index, at, size, TQKV__ALIGNMENT, false};
    c->bindings[c->n_bindings] = binding;
    return &c->bindings[c->n_bindings++];
}

static tqkv__binding *tqkv__output(tqkv__command *c, const char *name, unsigned index, tqkv_metal_buffer at,
                                   size_t size)
{
    tqkv__binding *binding = tqkv__input(c, name, index, at, size);
    binding->written = true;
    return binding;
}

static void tqkv__flag(tqkv__command *c, unsigned index, tqkv_metal_buffer at)
{
    tqkv__output(c, "not_finite", index, at, at.buffer ? sizeof(uint32_t) : 0);
}

static tqkv_metal_buffer tqkv__behind(tqkv_metal_buffer at, size_t bytes)
{
    at.offset += bytes;
    return at;
}

static tqkv_result tqkv__check_binding(tqkv_metal *m, const tqkv__binding *b)
{
    if (!b->size) return TQKV_OK;
    id<MTLBuffer> buffer = b->at.buffer;
    if (!buffer) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: no buffer", b->name);
    const size_t length = [buffer length];
    if ([buffer device] != m->device)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: a buffer of another device", b->name);
    if (b->at.offset % b->alignment)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: offset %zu is not a multiple of %zu", b->name, b->at.offset,
                          b->alignment);
    if (b->at.offset > length || b->size > length - b->at.offset)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: needs %zu bytes from %zu on of a buffer of %zu", b->name,
                          b->size, b->at.offset, length);
    return TQKV_OK;
}

static bool tqkv__bindings_overlap(const tqkv__binding *a, const tqkv__binding *b)
{
    if (!a->size || !b->size || a->at.buffer != b->at.buffer || (!a->written && !b->written)) return false;
    return a->at.offset < b->at.offset ? b->at.offset - a->at.offset < a->size : a->at.offset - b->at.offset < b->size;
}

static tqkv_result tqkv__check_command(tqkv_metal *m, tqkv_metal_object encoder, const tqkv__command *c)
{
    if (!encoder) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "no encoder");
    for (int i = 0; i < c->n_bindings; i++) {
        const tqkv_result r = tqkv__check_binding(m, &c->bindings[i]);
        if (r != TQKV_OK) return r;
        for (int j = 0; j < i; j++)
            if (tqkv__bindings_overlap(&c->bindings[i], &c->bindings[j]))
                return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s and %s overlap", c->bindings[j].name,
                                  c->bindings[i].name);
    }
    return TQKV_OK;
}

static void tqkv__record(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const tqkv__pipeline *pipeline,
                         const tqkv__command *c, MTLSize threadgroups, int n_simdgroups)
{
    const NSUInteger n = (NSUInteger)n_simdgroups;
    [encoder setComputePipelineState:pipeline->state];
    for (int i = 0; i < c->n_bindings; i++) {
        const tqkv__binding *b = &c->bindings[i];
        [encoder setBuffer:b->size ? (id<MTLBuffer>)b->at.buffer : m->unused
                    offset:b->size ? b->at.offset : 0
                   atIndex:b->index];
    }
    for (NSUInteger i = 0; i < TQKV__MEMORIES; i++) {
        const NSUInteger size = c->memory[i] + n * c->memory_each[i];
        if (size) [encoder setThreadgroupMemoryLength:size atIndex:i];
    }
    [encoder dispatchThreadgroups:threadgroups threadsPerThreadgroup:MTLSizeMake(n * TQKV__SIMD_WIDTH, 1, 1)];
}

/* -- Rows: kernels of one row a simdgroup -- */

/* 4 simdgroups a threadgroup: they share one copy of the boundaries (up to 1 KiB, a quarter of the loads), and the rows
   of a single token, some tens, still spread over many cores. */
static void tqkv__record_rows(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const tqkv__pipeline *pipeline,
                              const tqkv__command *c, size_t n_rows, NSUInteger depth)
{
    const int n = pipeline->max_simdgroups < 4 ? pipeline->max_simdgroups : 4;
    tqkv__record(m, encoder, pipeline, c, MTLSizeMake((n_rows + (size_t)n - 1) / (size_t)n, 1, depth), n);
}

/* Checks the command and records it for the rows of the plan, if there are any. */
static tqkv_result tqkv__run_rows(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const tqkv__command *c,
                                  const tqkv__rows_plan *plan)
{
    const tqkv__pipeline *pipeline;
    tqkv_result r = tqkv__check_command(m, encoder, c);
    if (r != TQKV_OK || !plan->args.n_tokens) return r;
    if ((r = tqkv__get_pipeline(m, &c->kernel, &pipeline)) != TQKV_OK) return r;
    [encoder setBytes:&plan->args length:sizeof plan->args atIndex:0];
    tqkv__record_rows(m, encoder, pipeline, c, (size_t)plan->args.n_tokens * (size_t)plan->args.n_kv_heads, 1);
    return TQKV_OK;
}

static tqkv__command tqkv__rows_command(tqkv__family family, const tqkv__rows_plan *plan, int turn_constant)
{
    tqkv__command c;
    memset(&c, 0, sizeof c);
    c.kernel = tqkv__kernel_of(family, plan->head_dim);
    tqkv__set_constant(&c.kernel, TQKV_FC_FORMAT, (int)plan->format);
    tqkv__set_constant(&c.kernel, turn_constant, plan->turn);
    return c;
}

/* src, codes and norms at three indices from `index` on, and the memory that encoding takes. */
static void tqkv__encode_arguments(tqkv__command *c, unsigned index, const char *const names[3],
                                   const tqkv__rows_plan *plan, tqkv_metal_buffer src, const tqkv_metal_store *s)
{
    src = tqkv__behind(src, plan->skipped_size);
    tqkv__input(c, names[0], index, src, plan->rows_size - plan->skipped_size);
    tqkv__output(c, names[1], index + 1, s->codes, plan->codes_size)->alignment = TQKV__CODE_ALIGNMENT;
    tqkv__output(c, names[2], index + 2, s->norms, plan->norms_size);
    c->memory[0] = TQKV__TABLE_BYTES;
    c->memory_each[1] = TQKV__STAGING_BYTES((NSUInteger)plan->head_dim, 1);
}

tqkv_result tqkv_metal_encode(tqkv_metal *m, tqkv_metal_object encoder, const tqkv_metal_store *s,
                              tqkv_metal_buffer src, int n_tokens, int64_t position, tqkv_metal_buffer not_finite)
{
    static const char *const names[] = {"src", "codes", "norms"};
    tqkv__rows_plan plan;
    if (!m) return TQKV_INVALID_ARGUMENT;
    const tqkv_result r = tqkv__plan_encode(s ? &s->shape : NULL, n_tokens, position, &plan);
    if (r != TQKV_OK) return tqkv__refuse(m, r, "encode");
    tqkv__command c = tqkv__rows_command(TQKV__ENCODE, &plan, TQKV_FC_ROTATED);
    tqkv__encode_arguments(&c, 1, names, &plan, src, s);
    tqkv__flag(&c, 4, not_finite);
    return tqkv__run_rows(m, encoder, &c, &plan);
}

/* Both plans, and that one kernel can serve them. */
static tqkv_result tqkv__plan_kv(const tqkv_metal_store *keys, const tqkv_metal_store *values, int n_tokens,
                                 int64_t position, tqkv__rows_plan *key_plan, tqkv__rows_plan *value_plan)
{
    if (!keys || !values) return TQKV_INVALID_ARGUMENT;
    tqkv_result r = tqkv__plan_encode(&keys->shape, n_tokens, position, key_plan);
    if (r == TQKV_OK) r = tqkv__plan_encode(&values->shape, n_tokens, position, value_plan);
    if (r != TQKV_OK) return r;
    const bool alike =
        key_plan->head_dim == value_plan->head_dim && key_plan->args.n_kv_heads == value_plan->args.n_kv_heads;
    return alike ? TQKV_OK : TQKV_INVALID_ARGUMENT;
}

tqkv_result tqkv_metal_encode_kv(tqkv_metal *m, tqkv_metal_object object, const tqkv_metal_store *keys,
                                 const tqkv_metal_store *values, tqkv_metal_buffer k, tqkv_metal_buffer v, int n_tokens,
                                 int64_t position, tqkv_metal_buffer not_finite)
{
    static const char *const key_names[] = {"k", "keys' codes", "keys' norms"}, *const value_names[] = {
                                                                                    "v", "values' codes",
                                                                                    "values' norms"};
    tqkv__rows_plan kp, vp;
    const tqkv__pipeline *pipeline;
    id<MTLComputeCommandEncoder> encoder = object;
    if (!m) return TQKV_INVALID_ARGUMENT;
    tqkv_result r = tqkv__plan_kv(keys, values, n_tokens, position, &kp, &vp);
    if (r != TQKV_OK) return tqkv__refuse(m, r, "encode_kv");
    tqkv__command c = tqkv__rows_command(TQKV__ENCODE_KV, &kp, TQKV_FC_ROTATED);
    tqkv__set_constant(&c.kernel, TQKV_FC_VALUE_FORMAT, (int)vp.format);
    tqkv__set_constant(&c.kernel, TQKV_FC_VALUE_ROTATED, vp.turn);
    tqkv__encode_arguments(&c, 1, key_names, &kp, k, keys);
    tqkv__encode_arguments(&c, 5, value_names, &vp, v, values);
    tqkv__flag(&c, 8, not_finite);
    if ((r = tqkv__check_command(m, encoder, &c)) != TQKV_OK || !n_tokens) return r;
    if ((r = tqkv__get_pipeline(m, &c.kernel, &pipeline)) != TQKV_OK) return r;
    [encoder setBytes:&kp.args length:sizeof kp.args atIndex:0];
    [encoder setBytes:&vp.args length:sizeof vp.args atIndex:4];
    const int most = kp.args.n_tokens > vp.args.n_tokens ? kp.args.n_tokens : vp.args.n_tokens; /* rings keep fewer */
    tqkv__record_rows(m, encoder, pipeline, &c, (size_t)most * (size_t)kp.args.n_kv_heads, 2);
    return TQKV_OK;
}

tqkv_result tqkv_metal_probe(tqkv_metal *m, tqkv_metal_object encoder, const tqkv_store *shape, tqkv_metal_buffer src,
                             int n_tokens, tqkv_metal_buffer scaled, tqkv_metal_buffer not_finite)
{
    tqkv__rows_plan plan;
    if (!m) return TQKV_INVALID_ARGUMENT;
    const tqkv_result r = tqkv__plan_probe(shape, n_tokens, &plan);
    if (r != TQKV_OK) return tqkv__refuse(m, r, "probe");
    tqkv__command c = tqkv__rows_command(TQKV__PROBE, &plan, TQKV_FC_ROTATED);
    tqkv__input(&c, "src", 1, src, plan.rows_size);
    tqkv__output(&c, "scaled", 2, scaled, plan.rows_size);
    tqkv__flag(&c, 3, not_finite);
    return tqkv__run_rows(m, encoder, &c, &plan);
}

tqkv_result tqkv_metal_decode(tqkv_metal *m, tqkv_metal_object encoder, const tqkv_metal_store *s, int64_t position,
                              int n_positions, tqkv_basis basis, tqkv_metal_buffer dst)
{
    tqkv__rows_plan plan;
    if (!m) return TQKV_INVALID_ARGUMENT;
    const tqkv_result r = tqkv__plan_decode(s ? &s->shape : NULL, position, n_positions, basis, &plan);
    if (r != TQKV_OK) return tqkv__refuse(m, r, "decode");
    tqkv__command c = tqkv__rows_command(TQKV__DECODE, &plan, TQKV_FC_UNROTATE);
    tqkv__input(&c, "codes", 1, s->codes, plan.codes_size)->alignment = TQKV__CODE_ALIGNMENT;
    tqkv__input(&c, "norms", 2, s->norms, plan.norms_size);
    tqkv__output(&c, "dst", 3, dst, plan.rows_size);
    c.memory[0] = TQKV__TABLE_BYTES;
    return tqkv__run_rows(m, encoder, &c, &plan);
}

static tqkv_result tqkv__run_turn(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, tqkv_metal_buffer rows,
                                  int n_rows, int head_dim, bool unrotate)
{
    size_t size;
    tqkv__command c;
    const tqkv__rotate_args args = {n_rows};
    const tqkv__pipeline *pipeline;
    if (!m) return TQKV_INVALID_ARGUMENT;
    tqkv_result r = tqkv__plan_rotate(n_rows, head_dim, &size);
    if (r != TQKV_OK) return tqkv__refuse(m, r, unrotate ? "unrotate" : "rotate");
    memset(&c, 0, sizeof c);
    c.kernel = tqkv__kernel_of(TQKV__ROTATE, head_dim);
    tqkv__set_constant(&c.kernel, TQKV_FC_UNROTATE, unrotate);
    tqkv__output(&c, "rows", 1, rows, size);
    if ((r = tqkv__check_command(m, encoder, &c)) != TQKV_OK || !n_rows) return r;
    if ((r = tqkv__get_pipeline(m, &c.kernel, &pipeline)) != TQKV_OK) return r;
    [encoder setBytes:&args length:sizeof args atIndex:0];
    tqkv__record_rows(m, encoder, pipeline, &c, (size_t)n_rows, 1);
    return TQKV_OK;
}

tqkv_result tqkv_metal_rotate(tqkv_metal *m, tqkv_metal_object encoder, tqkv_metal_buffer rows, int n_rows,
                              int head_dim)
{
    return tqkv__run_turn(m, encoder, rows, n_rows, head_dim, false);
}

tqkv_result tqkv_metal_unrotate(tqkv_metal *m, tqkv_metal_object encoder, tqkv_metal_buffer rows, int n_rows,
                                int head_dim)
{
    return tqkv__run_turn(m, encoder, rows, n_rows, head_dim, true);
}

/* -- Attention -- */

typedef struct tqkv__split {
    int columns;      /* query rows of a KV head that a threadgroup serves */
    int n_simdgroups; /* of a threadgroup */
    int n_splits;     /* threadgroups along the context */
} tqkv__split;

/* How attention is cut. Metal does not say how many cores a GPU has (7 to 80), so that the shape alone decides, but for
   the most simdgroups that the pipeline allows. Derived from sizes, not measured on Apple's hardware yet.

   columns       Each key and value is decoded once for all columns, so as many as registers hold; a rest is shared out
                 evenly: 9 rows are 5 + 4, not 8 + 1, and take the same two passes over the cache.
   n_simdgroups  4: each walks tiles of its own, so that more of them hide each other's loads; they share the tables and
                 queries in threadgroup memory, which one simdgroup alone would have to fill for itself.
   n_splits      Enough for 128 threadgroups, more than the largest GPU has cores, since below that cores idle. But at
                 least 4 tiles of 32 positions a simdgroup: a split writes and reads 8 bytes a value and row for the
                 merge, at 8 rows 64 bytes a value, against 512 positions of half to two bytes a value. */
static tqkv__split tqkv__choose_split(const tqkv__attend_plan *plan, int max_simdgroups)
{
    const int64_t rows = (int64_t)plan->args.n_queries * plan->args.group;
    const int64_t most = TQKV__MAX_COLUMNS(plan->head_dim), blocks = (rows + most - 1) / most;
    const int64_t tiles = ((int64_t)plan->seen + 31) / 32, threadgroups = blocks * plan->args.n_kv_heads;
    const int64_t wanted = (128 + threadgroups - 1) / threadgroups, allowed = tiles / (4 * 4);
    tqkv__split split;
    split.columns = (int)((rows + blocks - 1) / blocks);
    split.n_simdgroups = tiles < 4 ? (int)tiles : 4;
    if (split.n_simdgroups > max_simdgroups) split.n_simdgroups = max_simdgroups;
    if (split.n_simdgroups < 1) split.n_simdgroups = 1;
    split.n_splits = (int)(wanted < allowed ? wanted : allowed);
    if (split.n_splits < 1) split.n_splits = 1;
    return split;
}

/* [n_splits][n_rows][head_dim] sums, then [n_splits][n_rows][2] of maximum and weight; false on overflow. */
static bool tqkv__scratch_size(const tqkv__attend_plan *plan, int n_splits, size_t *sums_size, size_t *size)
{
    const size_t n = (size_t)n_splits, row = ((size_t)plan->head_dim + 2) * sizeof(float);
    if (plan->n_rows > SIZE_MAX / row / n) return false;
    *sums_size = plan->rows_size * n;
    *size = plan->n_rows * row * n;
    return true;
}

/* Where one attention takes and puts its data. */
typedef struct tqkv__attend_buffers {
    tqkv_metal_buffer key_codes, key_norms, value_codes, value_norms, sinks, q, scratch, out;
} tqkv__attend_buffers;

static void tqkv__set_attend_kernel(tqkv__kernel *kernel, const tqkv__attend_plan *plan, int columns)
{
    *kernel = tqkv__kernel_of(TQKV__ATTEND, plan->head_dim);
    tqkv__set_constant(kernel, TQKV_FC_FORMAT, (int)plan->key_format);
    tqkv__set_constant(kernel, TQKV_FC_VALUE_FORMAT, (int)plan->value_format);
    tqkv__set_constant(kernel, TQKV_FC_ROTATE_QUERIES, plan->rotate_queries);
    tqkv__set_constant(kernel, TQKV_FC_COLUMNS, columns);
    tqkv__set_constant(kernel, TQKV_FC_MANY_QUERIES, plan->args.n_queries > 1);
    tqkv__set_constant(kernel, TQKV_FC_SOFTCAP, plan->args.softcap > 0.0f);
    tqkv__set_constant(kernel, TQKV_FC_SAME_SLOTS, plan->same_slots);
    tqkv__set_constant(kernel, TQKV_FC_SHORT_STORE, plan->args.key_capacity < TQKV__SIMD_WIDTH);
}

/* The kernel attend. The memory of queries is cut to the columns in use: it is the largest part, and decides how many
   threadgroups a core holds. */
static tqkv__command tqkv__attend_command(const tqkv__attend_plan *plan, const tqkv__attend_buffers *b, int columns,
                                          size_t sums_size, size_t scratch_size)
{
    tqkv__command c;
    const NSUInteger d = (NSUInteger)plan->head_dim;
    memset(&c, 0, sizeof c);
    tqkv__set_attend_kernel(&c.kernel, plan, columns);
    tqkv__input(&c, "q", 1, b->q, plan->rows_size);
    tqkv__input(&c, "keys' codes", 2, b->key_codes, plan->key_codes_size)->alignment = TQKV__CODE_ALIGNMENT;
    tqkv__input(&c, "keys' norms", 3, b->key_norms, plan->key_norms_size);
    tqkv__input(&c, "values' codes", 4, b->value_codes, plan->value_codes_size)->alignment = TQKV__CODE_ALIGNMENT;
    tqkv__input(&c, "values' norms", 5, b->value_norms, plan->value_norms_size);
    tqkv__output(&c, "scratch", 6, b->scratch, sums_size);
    tqkv__output(&c, "scratch", 7, tqkv__behind(b->scratch, sums_size), scratch_size - sums_size);
    c.memory[0] = TQKV__ATTEND_TABLE_BYTES;
    c.memory[1] = TQKV__ATTEND_QUERY_BYTES(d) / TQKV__MAX_COLUMNS(d) * (NSUInteger)columns;
    c.memory_each[2] = TQKV__ATTEND_WEIGHT_BYTES(d, 1);
    c.memory_each[3] = TQKV__ATTEND_STATE_BYTES(d, 1);
    return c;
}

static tqkv__command tqkv__merge_command(const tqkv__attend_plan *plan, const tqkv__attend_buffers *b, size_t sums_size,
                                         size_t scratch_size)
{
    tqkv__command c;
    const bool sinks = b->sinks.buffer != nil;
    memset(&c, 0, sizeof c);
    c.kernel = tqkv__kernel_of(TQKV__ATTEND_MERGE, plan->head_dim);
    tqkv__set_constant(&c.kernel, TQKV_FC_UNROTATE, plan->unrotate_output);
    tqkv__set_constant(&c.kernel, TQKV_FC_SINKS, sinks);
    tqkv__input(&c, "scratch", 1, b->scratch, sums_size);
    tqkv__input(&c, "scratch", 2, tqkv__behind(b->scratch, sums_size), scratch_size - sums_size);
    tqkv__input(&c, "sinks", 3, b->sinks, sinks ? (size_t)plan->n_heads * sizeof(float) : 0);
    tqkv__output(&c, "out", 4, b->out, plan->rows_size);
    return c;
}

/* Each command's own buffers, and that the result goes nowhere where attention still reads. */
static tqkv_result tqkv__check_attend(tqkv_metal *m, tqkv_metal_object encoder, const tqkv__command *attend,
                                      const tqkv__command *merge)
{
    tqkv__command both = *attend;
    both.bindings[6] = merge->bindings[3];
    tqkv_result r = tqkv__check_command(m, encoder, attend);
    if (r == TQKV_OK) r = tqkv__check_command(m, encoder, merge);
    return r == TQKV_OK ? tqkv__check_command(m, encoder, &both) : r;
}

static tqkv_result tqkv__run_attend(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const tqkv__attend_plan *plan,
                                    const tqkv__attend_buffers *b)
{
    size_t sums_size, size;
    const tqkv__pipeline *attend_pipeline, *merge_pipeline;
    tqkv__split split = tqkv__choose_split(plan, INT_MAX);
    if (!tqkv__scratch_size(plan, split.n_splits, &sums_size, &size))
        return tqkv__refuse(m, TQKV_INVALID_ARGUMENT, "attend");
    const tqkv__command attend = tqkv__attend_command(plan, b, split.columns, sums_size, size),
                        merge = tqkv__merge_command(plan, b, sums_size, size);
    tqkv_result r = tqkv__check_attend(m, encoder, &attend, &merge);
    if (r != TQKV_OK) return r;
    if ((r = tqkv__get_pipeline(m, &attend.kernel, &attend_pipeline)) != TQKV_OK) return r;
    if ((r = tqkv__get_pipeline(m, &merge.kernel, &merge_pipeline)) != TQKV_OK) return r;
    split = tqkv__choose_split(plan, attend_pipeline->max_simdgroups);
    tqkv__attend_args args = plan->args;
    args.n_splits = split.n_splits;
    const tqkv__merge_args merge_args = {(int32_t)plan->n_rows, plan->n_heads, split.n_splits};
    const size_t rows = (size_t)args.n_queries * (size_t)args.group, columns = (size_t)split.columns;
    const MTLSize grid =
        MTLSizeMake((NSUInteger)args.n_kv_heads, (rows + columns - 1) / columns, (NSUInteger)split.n_splits);
    const id<MTLResource> scratch[] = {b->scratch.buffer};
    [encoder setBytes:&args length:sizeof args atIndex:0];
    tqkv__record(m, encoder, attend_pipeline, &attend, grid, split.n_simdgroups);
    [encoder memoryBarrierWithResources:scratch count:1];
    [encoder setBytes:&merge_args length:sizeof merge_args atIndex:0];
    tqkv__record_rows(m, encoder, merge_pipeline, &merge, plan->n_rows, 1);
    return TQKV_OK;
}

static tqkv_result tqkv__plan_of(const tqkv_metal_attention *a, bool whole, tqkv__attend_plan *plan)
{
    tqkv_attention attention;
    if (!a || !a->keys || !a->values) return TQKV_INVALID_ARGUMENT;
    memset(&attention, 0, sizeof attention);
    attention.keys = &a->keys->shape;
    attention.values = &a->values->shape;
    attention.n_heads = a->n_heads;
    attention.n_queries = a->n_queries;
    attention.end = a->end;
    attention.kv_len = a->kv_len;
    attention.window = a->window;
    attention.scale = a->scale;
    attention.softcap = a->softcap;
    attention.query_basis = a->query_basis;
    attention.output_basis = a->output_basis;
    return tqkv__plan_attend(&attention, whole, plan);
}

/* n_splits does not fall as more positions are seen, so that the whole store needs the most. */
static tqkv_result tqkv__most_scratch(tqkv_metal *m, const tqkv__attend_plan *plan, size_t *bytes)
{
    size_t sums_size;
    if (tqkv__scratch_size(plan, tqkv__choose_split(plan, INT_MAX).n_splits, &sums_size, bytes)) return TQKV_OK;
    return tqkv__refuse(m, TQKV_INVALID_ARGUMENT, "attend_scratch");
}

tqkv_result tqkv_metal_attend_scratch(tqkv_metal *m, const tqkv_metal_attention *a, size_t *bytes)
{
    tqkv__attend_plan plan;
    if (!m || !bytes) return TQKV_INVALID_ARGUMENT;
    const tqkv_result r = tqkv__plan_of(a, true, &plan);
    return r == TQKV_OK ? tqkv__most_scratch(m, &plan, bytes) : tqkv__refuse(m, r, "attend_scratch");
}

tqkv_result tqkv_metal_attend(tqkv_metal *m, tqkv_metal_object encoder, const tqkv_metal_attention *a,
                              tqkv_metal_buffer q, tqkv_metal_buffer scratch, tqkv_metal_buffer out)
{
    tqkv__attend_plan plan;
    if (!m) return TQKV_INVALID_ARGUMENT;
    const tqkv_result r = tqkv__plan_of(a, false, &plan);
    if (r != TQKV_OK) return tqkv__refuse(m, r, "attend");
    const tqkv__attend_buffers buffers = {
        a->keys->codes, a->keys->norms, a->values->codes, a->values->norms, a->sinks, q, scratch, out};
    return tqkv__run_attend(m, encoder, &plan, &buffers);
}

/* -- Shared memory, and running without an encoder -- */

static void *tqkv__memory_alloc(void *user, size_t size)
{
    tqkv_metal *m = (tqkv_metal *)user;
    tqkv__memory *block = (tqkv__memory *)calloc(1, sizeof *block);
    if (!block) return NULL;
    block->size = size ? size : 1; /* Metal has no empty buffers */
    block->buffer = [m->device newBufferWithLength:block->size options:MTLResourceStorageModeShared];
    block->begin = (const char *)[block->buffer contents];
    if (!block->begin) {
        TQKV__RELEASE(block->buffer);
        free(block);
        return NULL;
    }
    pthread_mutex_lock(&m->lock);
    block->next = m->memory;
    m->memory = block;
    pthread_mutex_unlock(&m->lock);
    return [block->buffer contents];
}

static void tqkv__memory_free(void *user, void *pointer, size_t size)
{
    tqkv_metal *m = (tqkv_metal *)user;
    tqkv__memory **at = &m->memory, *block;
    (void)size;
    pthread_mutex_lock(&m->lock);
    while (*at && (*at)->begin != (const char *)pointer) at = &(*at)->next;
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
    if (!m || !pointer || !out) return TQKV_INVALID_ARGUMENT;
    const uintptr_t address = (uintptr_t)pointer;
    pthread_mutex_lock(&m->lock);
    const tqkv__memory *block = m->memory;
    while (block && address - (uintptr_t)block->begin >= block->size) block = block->next; /* unsigned: also below it */
    if (block) {
        out->buffer = block->buffer;
        out->offset = address - (uintptr_t)block->begin;
    }
    pthread_mutex_unlock(&m->lock);
    return block ? TQKV_OK : tqkv__fail(m, TQKV_INVALID_ARGUMENT, "a pointer outside the context's memory");
}

tqkv_result tqkv_metal_run(tqkv_metal *m, tqkv_metal_record record, void *user)
{
    if (!m || !record) return TQKV_INVALID_ARGUMENT;
    @autoreleasepool {
        id<MTLCommandBuffer> commands = [m->queue commandBuffer];
        id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
        if (!encoder)
            return tqkv__fail(m, TQKV_METAL_ERROR, "Metal gave no command %s", commands ? "encoder" : "buffer");
        const tqkv_result r = record(user, encoder);
        [encoder endEncoding];
        if (r != TQKV_OK) return r;
        [commands commit];
        [commands waitUntilCompleted];
        if ([commands status] == MTLCommandBufferStatusCompleted) return TQKV_OK;
        return tqkv__fail(m, TQKV_METAL_ERROR, "the command buffer failed: %s", tqkv__words([commands error]));
    }
}

/* -- Caches -- */

static tqkv_result tqkv__store_of(tqkv_metal *m, const tqkv_store *store, tqkv_metal_store *out)
{
    memset(out, 0, sizeof *out);
    out->shape = *store;
    const tqkv_result r = tqkv_metal_find(m, store->codes, &out->codes);
    return r == TQKV_OK && store->norms_size ? tqkv_metal_find(m, store->norms, &out->norms) : r;
}

static tqkv_result tqkv__stores_of(tqkv_metal *m, const tqkv_cache *c, tqkv_metal_store *keys, tqkv_metal_store *values)
{
    if (!m || !c) return TQKV_INVALID_ARGUMENT;
    const tqkv_result r = tqkv__store_of(m, tqkv_cache_keys(c), keys);
    return r == TQKV_OK ? tqkv__store_of(m, tqkv_cache_values(c), values) : r;
}

static tqkv_result tqkv__record_append(tqkv_metal *m, tqkv_metal_object encoder, const tqkv_cache *c,
                                       tqkv_metal_buffer k, tqkv_metal_buffer v, int n_tokens,
                                       tqkv_metal_buffer not_finite)
{
    tqkv_metal_store keys, values;
    const tqkv_result r = tqkv__stores_of(m, c, &keys, &values);
    if (r != TQKV_OK) return r;
    return tqkv_metal_encode_kv(m, encoder, &keys, &values, k, v, n_tokens, tqkv_cache_end(c), not_finite);
}

tqkv_result tqkv_metal_cache_append(tqkv_metal *m, tqkv_metal_object encoder, tqkv_cache *c, tqkv_metal_buffer k,
                                    tqkv_metal_buffer v, int n_tokens, tqkv_metal_buffer not_finite)
{
    const tqkv_result r = tqkv__record_append(m, encoder, c, k, v, n_tokens, not_finite);
    if (r == TQKV_OK) tqkv__cache_advance(c, n_tokens);
    return r;
}

tqkv_result tqkv_metal_cache_attend(tqkv_metal *m, tqkv_metal_object encoder, const tqkv_cache *c, tqkv_metal_buffer q,
                                    int n_queries, tqkv_metal_buffer scratch, tqkv_metal_buffer out)
{
    tqkv__attend_plan plan;
    tqkv_metal_store keys, values;
    tqkv_result r = tqkv__stores_of(m, c, &keys, &values);
    if (r != TQKV_OK) return r;
    if ((r = tqkv__plan_cache_attend(c, n_queries, false, &plan)) != TQKV_OK) return tqkv__refuse(m, r, "attend");
    tqkv__attend_buffers b = {keys.codes, keys.norms, values.codes, values.norms, {nil, 0}, q, scratch, out};
    const float *sinks = tqkv__cache_sinks(c); /* in the cache's own memory */
    if (sinks && (r = tqkv_metal_find(m, sinks, &b.sinks)) != TQKV_OK) return r;
    return tqkv__run_attend(m, encoder, &plan, &b);
}

tqkv_result tqkv_metal_cache_scratch(tqkv_metal *m, const tqkv_cache *c, int n_queries, size_t *bytes)
{
    tqkv__attend_plan plan;
    if (!m || !bytes) return TQKV_INVALID_ARGUMENT;
    const tqkv_result r = tqkv__plan_cache_attend(c, n_queries, true, &plan);
    return r == TQKV_OK ? tqkv__most_scratch(m, &plan, bytes) : tqkv__refuse(m, r, "cache_scratch");
}

/* One blocking call on a cache, with the caller's floats copied to buffers and back. */
typedef struct tqkv__cache_call {
    tqkv_metal *m;
    const tqkv_cache *c;
    int n;
    tqkv_metal_buffer in[2], scratch, out;
} tqkv__cache_call;

static tqkv_result tqkv__record_cache_call(void *user, tqkv_metal_object encoder)
{
    const tqkv__cache_call *call = (const tqkv__cache_call *)user;
    const tqkv_metal_buffer none = {nil, 0};
    if (!call->out.buffer)
        return tqkv__record_append(call->m, encoder, call->c, call->in[0], call->in[1], call->n, none);
    return tqkv_metal_cache_attend(call->m, encoder, call->c, call->in[0], call->n, call->scratch, call->out);
}

static tqkv_result tqkv__cache_append(tqkv_metal *m, const tqkv_cache *c, const float *k, const float *v, int n_tokens)
{
    const tqkv_store *keys = tqkv_cache_keys(c);
    const size_t size = (size_t)n_tokens * (size_t)keys->n_kv_heads * (size_t)keys->head_dim * sizeof(float);
    if (!n_tokens) return TQKV_OK;
    TQKV__TO_THE_END id<MTLBuffer> kb = [m->device newBufferWithBytes:k
                                                               length:size
                                                              options:MTLResourceStorageModeShared];
    TQKV__TO_THE_END id<MTLBuffer> vb = [m->device newBufferWithBytes:v
                                                               length:size
                                                              options:MTLResourceStorageModeShared];
    tqkv__cache_call call = {m, c, n_tokens, {{kb, 0}, {vb, 0}}, {nil, 0}, {nil, 0}};
    const tqkv_result r = kb && vb
                              ? tqkv_metal_run(m, tqkv__record_cache_call, &call)
                              : tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no buffers for %zu bytes of keys, values", size);
    TQKV__RELEASE(kb);
    TQKV__RELEASE(vb);
    return r;
}

static tqkv_result tqkv__cache_attend(tqkv_metal *m, const tqkv_cache *c, const float *q, int n_queries, float *out)
{
    tqkv__attend_plan plan;
    size_t scratch_size;
    tqkv_result r = tqkv__plan_cache_attend(c, n_queries, true, &plan);
    if (r == TQKV_OK) r = tqkv__most_scratch(m, &plan, &scratch_size);
    if (r != TQKV_OK) return r;
    TQKV__TO_THE_END id<MTLBuffer> qb = [m->device newBufferWithBytes:q
                                                               length:plan.rows_size
                                                              options:MTLResourceStorageModeShared];
    TQKV__TO_THE_END id<MTLBuffer> ob = [m->device newBufferWithLength:plan.rows_size
                                                               options:MTLResourceStorageModeShared];
    TQKV__TO_THE_END id<MTLBuffer> sb = [m->device newBufferWithLength:scratch_size
                                                               options:MTLResourceStorageModePrivate];
    tqkv__cache_call call = {m, c, n_queries, {{qb, 0}, {nil, 0}}, {sb, 0}, {ob, 0}};
    r = qb && ob && sb ? tqkv_metal_run(m, tqkv__record_cache_call, &call)
                       : tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no buffers for queries, output and scratch");
    if (r == TQKV_OK) memcpy(out, [ob contents], plan.rows_size);
    TQKV__RELEASE(qb);
    TQKV__RELEASE(ob);
    TQKV__RELEASE(sb);
    return r;
}

/* -- The context -- */

#ifdef TQKV_METALLIB_EMBED
/* The size, then the library 16 bytes on. Labels that start with L make no symbols a linker could move apart. */
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
    dispatch_release(data); /* no object of Objective-C, or one without ARC */
#endif
    return m->library ? TQKV_OK : tqkv__fail(m, TQKV_METAL_ERROR, "library in memory: %s", tqkv__words(error));
}

static tqkv_result tqkv__load_path(tqkv_metal *m, const char *path)
{
    NSError *error = nil;
    NSString *name = [NSString stringWithUTF8String:path];
    if (!name || !path[0]) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "library_path is no path in UTF-8");
    m->library = [m->device newLibraryWithURL:[NSURL fileURLWithPath:name] error:&error];
    return m->library ? TQKV_OK : tqkv__fail(m, TQKV_METAL_ERROR, "%s: %s", path, tqkv__words(error));
}

static tqkv_result tqkv__load_library(tqkv_metal *m, const tqkv_metal_desc *desc)
{
    id<MTLLibrary> library = desc->library;
    if ((desc->library_path != NULL) + (desc->library_bytes != NULL) + (library != nil) > 1)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "more than one library");
    if (desc->library_path) return tqkv__load_path(m, desc->library_path);
    if (desc->library_bytes) return tqkv__load_bytes(m, desc->library_bytes, desc->library_size);
    if (library && [library device] != m->device)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "the library is of another device");
    if (library) {
        m->library = TQKV__RETAIN(library);
        return TQKV_OK;
    }
#ifdef TQKV_METALLIB_EMBED
    return tqkv__load_bytes(m, tqkv__embedded.bytes, (size_t)tqkv__embedded.size);
#else
    return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "no library: none given, and built without TQKV_METALLIB_EMBED");
#endif
}

static tqkv_result tqkv__open_device(tqkv_metal *m, const tqkv_metal_desc *desc)
{
    id<MTLDevice> given = desc->device;
    m->device = given ? TQKV__RETAIN(given) : MTLCreateSystemDefaultDevice();
    if (!m->device) return tqkv__fail(m, TQKV_UNSUPPORTED, "there is no Metal device");
    if (![m->device supportsFamily:MTLGPUFamilyApple7])
        return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: not of the GPU family Apple7 or later",
                          [[m->device name] UTF8String]);
    m->queue = [m->device newCommandQueue];
    if (!m->queue) return tqkv__fail(m, TQKV_METAL_ERROR, "Metal gave no command queue");
    /* Untracked: as a stand-in for arguments that do not exist it must not order those who share it. */
    m->unused = [m->device newBufferWithLength:16
                                       options:MTLResourceStorageModePrivate | MTLResourceHazardTrackingModeUntracked];
    return m->unused ? TQKV_OK : tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no buffer of 16 bytes");
}

/* The shaders' tables against this header's: sizes first, since they say where the tables lie. */
static tqkv_result tqkv__compare_tables(tqkv_metal *m, const tqkv__table_report *report)
{
    const tqkv__table_set *t = &report->tables;
    const struct {
        const char *name;
        uint32_t found, expected;
    } sizes[] = {{"table version", report->table_version, TQKV_TABLE_VERSION},
                 {"size of tqkv__table_set", report->table_set_size, sizeof(tqkv__table_set)},
                 {"size of tqkv__rows_args", report->rows_args_size, sizeof(tqkv__rows_args)},
                 {"size of tqkv__rotate_args", report->rotate_args_size, sizeof(tqkv__rotate_args)},
                 {"size of tqkv__attend_args", report->attend_args_size, sizeof(tqkv__attend_args)},
                 {"size of tqkv__merge_args", report->merge_args_size, sizeof(tqkv__merge_args)}};
    const struct {
        const char *name;
        const void *bytes;
        size_t size;
        uint64_t hash;
    } tables[] = {{"codebook_4", t->codebook_4, sizeof t->codebook_4, TQKV_HASH_CODEBOOK_4},
                  {"codebook_5", t->codebook_5, sizeof t->codebook_5, TQKV_HASH_CODEBOOK_5},
                  {"codebook_6", t->codebook_6, sizeof t->codebook_6, TQKV_HASH_CODEBOOK_6},
                  {"codebook_8", t->codebook_8, sizeof t->codebook_8, TQKV_HASH_CODEBOOK_8},
                  {"boundaries_4", t->boundaries_4, sizeof t->boundaries_4, TQKV_HASH_BOUNDARIES_4},
                  {"boundaries_5", t->boundaries_5, sizeof t->boundaries_5, TQKV_HASH_BOUNDARIES_5},
                  {"boundaries_6", t->boundaries_6, sizeof t->boundaries_6, TQKV_HASH_BOUNDARIES_6},
                  {"boundaries_8", t->boundaries_8, sizeof t->boundaries_8, TQKV_HASH_BOUNDARIES_8},
                  {"signs", t->signs, sizeof t->signs, TQKV_HASH_SIGNS}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].found != sizes[i].expected)
            return tqkv__fail(m, TQKV_TABLE_MISMATCH, "the library's %s is %u, not %u", sizes[i].name, sizes[i].found,
                              sizes[i].expected);
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (tqkv__hash(tables[i].bytes, tables[i].size) != tables[i].hash)
            return tqkv__fail(m, TQKV_TABLE_MISMATCH, "the library's table %s differs from tqkv.h", tables[i].name);
    return TQKV_OK;
}

/* The kernel `tables` and the buffer for its report. */
typedef struct tqkv__tables_call {
    const tqkv__pipeline *pipeline;
    tqkv_metal_buffer report;
} tqkv__tables_call;

static tqkv_result tqkv__record_tables(void *user, tqkv_metal_object object)
{
    const tqkv__tables_call *call = (const tqkv__tables_call *)user;
    id<MTLComputeCommandEncoder> encoder = object;
    const MTLSize one = MTLSizeMake(1, 1, 1), threads = MTLSizeMake(TQKV__SIMD_WIDTH, 1, 1);
    [encoder setComputePipelineState:call->pipeline->state];
    [encoder setBuffer:call->report.buffer offset:0 atIndex:0];
    [encoder dispatchThreadgroups:one threadsPerThreadgroup:threads];
    return TQKV_OK;
}

static tqkv_result tqkv__check_tables(tqkv_metal *m)
{
    const tqkv__kernel kernel = tqkv__kernel_of(TQKV__TABLES, 0);
    tqkv__table_report empty;
    tqkv__tables_call call;
    tqkv_result r = tqkv__get_pipeline(m, &kernel, &call.pipeline);
    if (r != TQKV_OK) return r;
    memset(&empty, 0, sizeof empty);
    TQKV__TO_THE_END id<MTLBuffer> report = [m->device newBufferWithBytes:&empty
                                                                   length:sizeof empty
                                                                  options:MTLResourceStorageModeShared];
    if (!report) return tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no buffer for the tables");
    call.report.buffer = report;
    call.report.offset = 0;
    r = tqkv_metal_run(m, tqkv__record_tables, &call);
    if (r == TQKV_OK) r = tqkv__compare_tables(m, (const tqkv__table_report *)[report contents]);
    TQKV__RELEASE(report);
    return r;
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
    m->backend.attend = tqkv__cache_attend;
    tqkv_result r;
    @autoreleasepool {
        r = tqkv__open_device(m, desc);
        if (r == TQKV_OK) r = tqkv__load_library(m, desc);
        if (r == TQKV_OK) r = tqkv__check_tables(m);
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
    for (int i = 0; i < TQKV__BUCKETS; i++)
        while (m->pipelines[i]) {
            tqkv__pipeline *p = m->pipelines[i];
            m->pipelines[i] = p->next;
            tqkv__free_pipeline(p);
        }
    while (m->memory) tqkv__memory_free(m, (void *)(uintptr_t)m->memory->begin, m->memory->size);
    TQKV__RELEASE(m->unused);
    TQKV__RELEASE(m->library);
    TQKV__RELEASE(m->queue);
    TQKV__RELEASE(m->device);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

/* For the tests of tqkv_metal.m: a context, command buffers, and buffers whose data starts at an offset and ends at the
   end of the buffer, where a sanitizer reports accesses beyond it. */
#ifndef TQKV_TESTS_HOST_H
#define TQKV_TESTS_HOST_H
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include "tests/runner.h"
#include "tests/metal/sizes.h"
#ifdef STANDIN
#include "tests/metal/standin/standin.h"
#endif

typedef struct host {
    const char *library, *stale; /* path of the library or source, folder of stale ones (stand-in only) */
    bool embedded;               /* tqkv_metal.m was built with TQKV_METALLIB_EMBED */
    id<MTLDevice> device;
    id<MTLCommandQueue> queue;
    tqkv_metal *metal; /* over that device */
} host;
extern host test_host;

bool host_open(void);
void host_close(void);
/* A new context; NULL and a failed test if there is none. */
tqkv_metal *host_context(void);
/* Creates a context. Its text must contain `words`. */
tqkv_metal *host_create(tqkv_metal_desc desc, tqkv_result expected, const char *words);
/* The context's text of this thread's last failure, until the next call. */
const char *host_error(tqkv_metal *m);
/* Checks that the context works: it rotates a row and rotates it back. */
void host_check_works(tqkv_metal *m);
/* The shaders as one string; freed with its pool. */
const char *host_source(void);

enum { HOST_OFFSET = 256 };
tqkv_metal_buffer host_buffer(const void *bytes, size_t size);
tqkv_metal_buffer host_zeros(size_t size);
void host_release(tqkv_metal_buffer b);
void *host_contents(tqkv_metal_buffer b);
/* Copies a store's buffers into Metal buffers. */
tqkv_metal_store host_store(const tqkv_store *s);
void host_store_release(tqkv_metal_store *s);

/* A command buffer with one encoder; between begin and end an autorelease pool is open. */
typedef struct host_work {
    id<MTLCommandBuffer> commands;
    id<MTLComputeCommandEncoder> encoder;
    NSAutoreleasePool *pool;
} host_work;
host_work host_begin(bool concurrent);
void host_end(host_work *work);

/* A call, planned and recorded; and the scratch that it needs, which its plan without scratch tells. */
extern const tqkv_metal_buffer host_none;
tqkv_metal_plan *host_plan(void); /* of this thread */
#define HOST(metal, encoder, call, ...) \
    ((void)tqkv_metal_plan_##call(__VA_ARGS__, host_plan()), tqkv_metal_record(metal, encoder, host_plan()))
#define HOST_SCRATCH(bytes, call, ...) \
    ((void)tqkv_metal_plan_##call(__VA_ARGS__, host_plan()), *(bytes) = host_plan()->scratch_size, host_plan()->result)
#define HOST_PREPARE(metal, call, ...) \
    ((void)tqkv_metal_plan_##call(__VA_ARGS__, host_plan()), tqkv_metal_prepare(metal, host_plan()))
/* Runs a plan whose buffers are plain memory through tqkv_metal.m: prepared, then recorded into a concurrent encoder,
   which makes no call of Metal that can fail. False and a text on failure. */
bool host_run(tqkv_metal_plan *plan, char *error, size_t error_size);
/* Prints a hash of what the plans of this case wrote, if there were any: the same for each library. */
void host_print_bits(const char *name);
/* The cases of the shaders, of tests/metal/driver.cpp; run: what runs their plans. */
void add_shader_cases(bool (*run)(tqkv_metal_plan *plan, char *error, size_t error_size), tqkv_metal *context);
/* Attention of one query to 64 positions of a TQ4 store of one head, and its outputs in double precision. */
typedef struct host_attention {
    tqkv_store store;
    tqkv_metal_store gpu;
    tqkv_metal_attention metal;
    tqkv_metal_buffer q, out, scratch;
    double *expected;
} host_attention;
void host_open_attention(host_attention *a, int n_heads);
void host_check_attention(const host_attention *a);
void host_close_attention(host_attention *a);
/* Floats of a fixed sequence; freed by the caller. */
float *host_floats(uint64_t seed, size_t count);

/* CHECK_RESULT; the context's text must also contain `words`. */
#define CHECK_REFUSED(metal, call, expected, words) \
    do { \
        CHECK_RESULT(call, expected); \
        CHECK(strstr(host_error(metal), words), "the text is \"%s\"", host_error(metal)); \
    } while (0)

void refusal_host_cases(void);
void cache_host_cases(void);
void library_host_cases(void);
void context_host_cases(void);
void pipeline_host_cases(void);

#endif

/* A step of decoding on an Apple GPU, in the caller's own command buffer. It encodes the key and value of the new token
   into a cache in shared memory, then attends with its query. Run with the path of default.metallib. */
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include "tqkv.h"
#include <math.h>

enum { HEAD_DIM = 128, KV_HEADS = 2, HEADS = 8, PROMPT = 600, ROW = KV_HEADS * HEAD_DIM, QUERY = HEADS * HEAD_DIM };

/* Memory that processor and GPU share. */
typedef struct shared {
    float *floats;
    tqkv_metal_buffer buffer;
} shared;

/* Random floats in place of a model's projections. tqkv_metal_destroy frees what is still allocated. */
static shared make(tqkv_metal *metal, size_t count)
{
    const tqkv_allocator memory = tqkv_metal_allocator(metal);
    shared s = {.floats = memory.alloc(memory.user, count * sizeof(float))};
    if (tqkv_metal_find(metal, s.floats, &s.buffer) != TQKV_OK) exit(1);
    for (size_t i = 0; i < count; i++) s.floats[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    return s;
}

/* The relative difference between `out` and the output of the processor for the same cache. */
static double difference(const tqkv_cache *cache, const float *q, const float *out)
{
    static float expected[QUERY];
    double wrong = 0, all = 0;
    tqkv_attention a;
    if (tqkv_cache_view(cache, 1, &a) != TQKV_OK || tqkv_attend(&a, q, expected) != TQKV_OK) return INFINITY;
    for (int i = 0; i < QUERY; i++) {
        wrong += ((double)out[i] - (double)expected[i]) * ((double)out[i] - (double)expected[i]);
        all += (double)expected[i] * (double)expected[i];
    }
    return sqrt(wrong / all);
}

/* Appends and attends for the new token. A serial encoder, the default, orders the two calls; a concurrent encoder
   needs a barrier between them. */
static double decode_step(tqkv_metal *metal, id<MTLCommandQueue> queue, tqkv_cache *cache)
{
    const tqkv_metal_buffer none = {nil, 0};
    tqkv_metal_plan plan; /* without scratch a plan says how much there has to be */
    if (tqkv_metal_plan_cache_attend(cache, none, NULL, NULL, none, 1, none, none, &plan) != TQKV_OK) return INFINITY;
    const shared k = make(metal, ROW), v = make(metal, ROW), q = make(metal, QUERY), out = make(metal, QUERY),
                 scratch = make(metal, plan.scratch_size / sizeof(float));
    id<MTLCommandBuffer> commands = [queue commandBuffer];
    id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
    tqkv_result r = tqkv_metal_cache_append(metal, encoder, cache, k.buffer, v.buffer, 1, none);
    if (r == TQKV_OK) r = tqkv_metal_cache_attend(metal, encoder, cache, q.buffer, 1, scratch.buffer, out.buffer);
    [encoder endEncoding];
    [commands commit]; /* a model records all its layers before, and commits once a token */
    [commands waitUntilCompleted];
    if (r != TQKV_OK || [commands status] != MTLCommandBufferStatusCompleted) return INFINITY;
    return difference(cache, q.floats, out.floats);
}

int main(int argc, char **argv)
{
    double wrong = INFINITY;
    @autoreleasepool {
        char error[400] = "";
        tqkv_metal *metal;
        tqkv_cache *cache = NULL;
        id<MTLDevice> device = MTLCreateSystemDefaultDevice();
        id<MTLCommandQueue> queue = [device newCommandQueue];
        tqkv_metal_desc desc = {.device = device, .library_path = argc > 1 ? argv[1] : "metallib/default.metallib"};
        desc.error = error, desc.error_size = sizeof error;
        tqkv_result r = tqkv_metal_create(&desc, &metal);
        tqkv_cache_desc shape = {.head_dim = HEAD_DIM, .n_kv_heads = KV_HEADS, .n_heads = HEADS, .capacity = 1024};
        shape.metal = metal; /* the cache lies in shared memory; tqkv_cache_append runs on the GPU and waits */
        if (r == TQKV_OK) r = tqkv_cache_create(&shape, &cache);
        if (r == TQKV_OK)
            r = tqkv_cache_append(cache, make(metal, PROMPT * ROW).floats, make(metal, PROMPT * ROW).floats, PROMPT);
        if (r == TQKV_OK) wrong = decode_step(metal, queue, cache);
        if (r == TQKV_OK)
            printf("%d tokens: GPU and processor differ by %.1e\n", PROMPT + 1, wrong);
        else
            printf("%s: %s\n", tqkv_result_string(r), error);
        tqkv_cache_destroy(cache);
        tqkv_metal_destroy(metal);
#if !__has_feature(objc_arc)
        [queue release];
        [device release];
#endif
    }
    return wrong < 0.01 ? 0 : 1; /* the processor multiplies integers, the GPU floats */
}

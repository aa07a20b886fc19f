/* A step of decoding on an Apple GPU, in the caller's own command buffer: the new token's key and value are encoded
   into a cache in shared memory, then its query attends over all of it. Run with the path of default.metallib. */
#define TQKV_IMPLEMENTATION
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include "../tqkv.h"
#include <math.h>

enum { HEAD_DIM = 128, KV_HEADS = 2, HEADS = 8, PROMPT = 600 };
enum { ROW = KV_HEADS * HEAD_DIM, QUERY = HEADS * HEAD_DIM };

/* Stands in for a model's projections: sums of uniform numbers, close to a Gaussian. */
static void fill(float *x, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        x[i] = -6.0f;
        for (int j = 0; j < 12; j++) x[i] += (float)rand() / (float)RAND_MAX;
    }
}

/* Memory of the processor and the GPU, and the buffer behind it. */
static tqkv_metal_buffer allocate(tqkv_metal *metal, size_t size, void **pointer)
{
    tqkv_metal_buffer buffer = {nil, 0};
    const tqkv_allocator memory = tqkv_metal_allocator(metal);
    *pointer = memory.alloc(memory.user, size);
    tqkv_metal_find(metal, *pointer, &buffer);
    return buffer;
}

/* The step. A serial encoder (the default) orders the two calls; a concurrent one needs a barrier between them. */
static tqkv_result record_step(tqkv_metal *metal, id<MTLComputeCommandEncoder> encoder, tqkv_cache *cache,
                               const tqkv_metal_buffer k, tqkv_metal_buffer v, tqkv_metal_buffer q,
                               tqkv_metal_buffer scratch, tqkv_metal_buffer out)
{
    const tqkv_metal_buffer no_flag = {nil, 0};
    const tqkv_result r = tqkv_metal_cache_append(metal, encoder, cache, k, v, 1, no_flag);
    return r == TQKV_OK ? tqkv_metal_cache_attend(metal, encoder, cache, q, 1, scratch, out) : r;
}

/* Runs the step on the GPU, and the same attention by the processor on the same memory. The relative difference. */
static double decode_step(tqkv_metal *metal, id<MTLCommandQueue> queue, tqkv_cache *cache)
{
    void *k, *v, *q, *out, *scratch;
    size_t scratch_size;
    if (tqkv_metal_cache_scratch(metal, cache, 1, &scratch_size) != TQKV_OK) return INFINITY;
    const tqkv_metal_buffer kb = allocate(metal, ROW * sizeof(float), &k),
                            vb = allocate(metal, ROW * sizeof(float), &v),
                            qb = allocate(metal, QUERY * sizeof(float), &q),
                            ob = allocate(metal, QUERY * sizeof(float), &out),
                            sb = allocate(metal, scratch_size, &scratch);
    fill(k, ROW), fill(v, ROW), fill(q, QUERY);
    id<MTLCommandBuffer> commands = [queue commandBuffer];
    id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
    const tqkv_result r = record_step(metal, encoder, cache, kb, vb, qb, sb, ob);
    [encoder endEncoding];
    [commands commit]; /* a program would record the rest of the layer, and commit once for all of them */
    [commands waitUntilCompleted];
    static float expected[QUERY];
    tqkv_attention a = {.keys = tqkv_cache_keys(cache), .values = tqkv_cache_values(cache), .n_heads = HEADS};
    a.end = tqkv_cache_end(cache);
    if (r != TQKV_OK || [commands status] != MTLCommandBufferStatusCompleted || tqkv_attend(&a, q, expected) != TQKV_OK)
        return INFINITY;
    double wrong = 0, all = 0;
    for (int i = 0; i < QUERY; i++) {
        const double difference = (double)((const float *)out)[i] - (double)expected[i];
        wrong += difference * difference;
        all += (double)expected[i] * (double)expected[i];
    }
    return sqrt(wrong / all);
}

int main(int argc, char **argv)
{
    double difference = INFINITY;
    @autoreleasepool {
        char error[400];
        tqkv_metal *metal;
        tqkv_cache *cache = NULL;
        id<MTLDevice> device = MTLCreateSystemDefaultDevice();
        id<MTLCommandQueue> queue = [device newCommandQueue];
        tqkv_metal_desc desc = {.device = device, .library_path = argc > 1 ? argv[1] : "metallib/default.metallib"};
        desc.error = error;
        desc.error_size = sizeof error;
        if (tqkv_metal_create(&desc, &metal) != TQKV_OK) {
            printf("no Metal context: %s\n", error);
            return 1;
        }
        static float keys[PROMPT * ROW], values[PROMPT * ROW];
        fill(keys, PROMPT * ROW), fill(values, PROMPT * ROW);
        tqkv_cache_desc cache_desc = {.head_dim = HEAD_DIM, .n_kv_heads = KV_HEADS, .n_heads = HEADS, .capacity = 1024};
        cache_desc.metal = metal; /* the cache lies in shared memory; this append runs on the GPU and waits */
        tqkv_result r = tqkv_cache_create(&cache_desc, &cache);
        if (r == TQKV_OK) r = tqkv_cache_append(cache, keys, values, PROMPT);
        if (r == TQKV_OK) difference = decode_step(metal, queue, cache);
        tqkv_cache_destroy(cache);
        tqkv_metal_destroy(metal); /* and the memory it lent */
#if !__has_feature(objc_arc)
        [queue release];
        [device release];
#endif
    }
    printf("a step of decoding over %d tokens: GPU and processor differ by %.1e of the output: %s\n", PROMPT + 1,
           difference, difference < 4e-5 ? "as expected" : "WRONG");
    return difference < 4e-5 ? 0 : 1;
}

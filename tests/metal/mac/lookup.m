/* Times each way to look up a code, and to make a float of a byte: lookup SOURCE [--tiny]. SOURCE is
   tests/metal/mac/lookup.metal in one file. Each way is a pipeline of one kernel, over codes that lie in
   caches; `only reading` is a kernel that reads more than caches hold. Times are the GPU's own, the best of some rounds
   after 0.3 s of the same work. `share` is of the time of the first way of its kind. --tiny: one round, to see that it
   runs. */
#include "report.h"
#include <string.h>

/* Of the kernel: the function constant that says which way, and bytes of its tables. */
enum { WAY_CONSTANT = 0, TABLES = 2048 };
enum { THREADS = 128, GROUPS = 4096, ROUNDS = 64, WORDS = 4, READING_GROUPS = 2048 };

static int rounds = 5;
static double warm = 0.3; /* seconds */

typedef struct way {
    const char *name;
    uint32_t number; /* in the kernel */
    int values;      /* of a lane and round */
} way;

static const way ways[] = {{"a table in threadgroup memory", 1, 32},
                           {"a table in constant memory", 2, 32},
                           {"arithmetic", 3, 32},
                           {"simd_shuffle", 0, 32},
                           {"quad_shuffle", 4, 32},
                           {"selections", 5, 32},
                           {"a table of pairs in threadgroup memory", 6, 32},
                           {"bytes by shifts", 7, 16},
                           {"bytes converted", 8, 16},
                           {"bytes loaded as char4", 9, 16}};
enum { WAYS = sizeof ways / sizeof *ways, FIRST_OF_BYTES = 7 };

typedef struct work {
    id<MTLCommandQueue> queue;
    id<MTLComputePipelineState> state;
    id<MTLBuffer> codes, weights, sums;
    int32_t rounds;
    NSUInteger groups;
} work;

static bool record_work(void *user, id<MTLComputeCommandEncoder> encoder)
{
    const work *w = (const work *)user;
    [encoder setComputePipelineState:w->state];
    [encoder setBytes:&w->rounds length:sizeof w->rounds atIndex:0];
    [encoder setBuffer:w->codes offset:0 atIndex:1];
    [encoder setBuffer:w->weights offset:0 atIndex:2];
    [encoder setBuffer:w->sums offset:0 atIndex:3];
    [encoder setThreadgroupMemoryLength:TABLES atIndex:0];
    [encoder dispatchThreadgroups:MTLSizeMake(w->groups, 1, 1) threadsPerThreadgroup:MTLSizeMake(THREADS, 1, 1)];
    return true;
}

/* Makes the pipeline of a kernel; prints why there is none. */
static bool open_pipeline(work *w, id<MTLLibrary> library, NSString *kernel, uint32_t way_number, const char *what)
{
    NSError *error = nil;
    MTLFunctionConstantValues *constants = [[[MTLFunctionConstantValues alloc] init] autorelease];
    [constants setConstantValue:&way_number type:MTLDataTypeUInt atIndex:WAY_CONSTANT];
    id<MTLFunction> function = [library newFunctionWithName:kernel constantValues:constants error:&error];
    w->state = function ? [[library device] newComputePipelineStateWithFunction:function error:&error] : nil;
    [function release];
    if (!w->state) printf("%s: not measured: %s\n", what, [[error localizedDescription] UTF8String]);
    return w->state != nil;
}

/* *first: seconds a value of the first way, or 0 before it */
static void time_way(work *w, id<MTLLibrary> library, const way *one, double *first)
{
    char what[60];
    snprintf(what, sizeof what, "look-up by %s", one->name);
    if (!open_pipeline(w, library, @"tqkv_lookup", one->number, what)) return;
    const double t = report_time_best(w->queue, record_work, w, rounds, warm),
                 n = (double)GROUPS * THREADS * ROUNDS * one->values;
    if (*first <= 0) *first = t / n;
    if (t > 0)
        printf("%s: %.1f G values/s, share %.2f, threads %lu\n", what, n / t * 1e-9, t / n / *first,
               (unsigned long)[w->state maxTotalThreadsPerThreadgroup]);
    [w->state release];
}

/* As much as a cache of some thousand positions, and more than caches of chips hold. */
static void time_reading(work *w, id<MTLLibrary> library)
{
    if (!open_pipeline(w, library, @"tqkv_read", 0, "only reading")) return;
    w->groups = READING_GROUPS;
    for (w->rounds = 4; w->rounds <= 64; w->rounds *= 4) {
        const NSUInteger length = (NSUInteger)(READING_GROUPS * THREADS * WORDS * 4) * (NSUInteger)w->rounds;
        [w->codes release];
        w->codes = [[library device] newBufferWithLength:length options:MTLResourceStorageModeShared];
        const double t = report_time_best(w->queue, record_work, w, rounds, warm);
        if (t > 0)
            printf("only reading: %lu MB: %.3f ms, %.1f GB/s\n", (unsigned long)length >> 20, t * 1e3,
                   (double)length / t * 1e-9);
    }
    [w->state release];
}

static void time_ways(id<MTLDevice> device, id<MTLLibrary> library)
{
    double first = 0;
    const NSUInteger length = (NSUInteger)ROUNDS * THREADS * WORDS * sizeof(uint32_t);
    work w = {.queue = [device newCommandQueue], .rounds = ROUNDS, .groups = GROUPS};
    w.codes = [device newBufferWithLength:length options:MTLResourceStorageModeShared];
    w.weights = [device newBufferWithLength:256 options:MTLResourceStorageModeShared];
    w.sums = [device newBufferWithLength:THREADS * sizeof(float) options:MTLResourceStorageModeShared];
    report_fill((float *)[w.codes contents], length / sizeof(float), 3); /* any bits */
    report_fill((float *)[w.weights contents], 8, 5);
    for (int i = 0; i < WAYS; i++) {
        if (i == FIRST_OF_BYTES) first = 0;
        time_way(&w, library, &ways[i], &first);
    }
    time_reading(&w, library);
    [w.sums release];
    [w.weights release];
    [w.codes release];
    [w.queue release];
}

int main(int argc, char **argv)
{
    if (argc < 2) return 2;
    report_begin();
    if (argc > 2 && !strcmp(argv[2], "--tiny")) rounds = 1, warm = 0;
    NSAutoreleasePool *pool = [[NSAutoreleasePool alloc] init];
    NSError *error = nil;
    id<MTLDevice> device = MTLCreateSystemDefaultDevice();
    MTLCompileOptions *options = [[[MTLCompileOptions alloc] init] autorelease];
    [options setFastMathEnabled:NO];
    [options
        setPreprocessorMacros:@{@"TQKV_ONLY" : @"1", @"TQKV_ONLY_tqkv_lookup" : @"1", @"TQKV_ONLY_tqkv_read" : @"1"}];
    NSString *source = report_source(argv[1]);
    if (!source) return printf("failed: %s is no source of shaders\n", argv[1]), 1;
    id<MTLLibrary> library = [device newLibraryWithSource:source options:options error:&error];
    if (library)
        time_ways(device, library);
    else
        printf("look-ups: not measured: %s\n", [[error localizedDescription] UTF8String]);
    [library release];
    [device release];
    [pool release];
    return 0;
}

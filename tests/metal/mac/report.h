/* What the programs of a Mac's report share. */
#ifndef TQKV_REPORT_H
#define TQKV_REPORT_H
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

static inline double report_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The same floats on every machine, in [-2, 2). */
static inline void report_fill(float *x, size_t count, uint32_t seed)
{
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)seed / 1073741824.0f;
    }
}

/* NULL if the file is no source of shaders, or cannot be read. */
static inline NSString *report_source(const char *path)
{
    NSString *name = [NSString stringWithUTF8String:path];
    if (![name hasSuffix:@".metal"]) return nil;
    return [NSString stringWithContentsOfFile:name encoding:NSUTF8StringEncoding error:NULL];
}

/* Seconds that the GPU takes for what is recorded, false if that failed; 0 if it failed. */
typedef bool (*report_record)(void *user, id<MTLComputeCommandEncoder> encoder);
static inline double report_time_once(id<MTLCommandQueue> queue, report_record record, void *user)
{
    double seconds = 0;
    @autoreleasepool {
        id<MTLCommandBuffer> commands = [queue commandBuffer];
        id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
        const bool recorded = record(user, encoder);
        [encoder endEncoding];
        if (!recorded) return 0;
        [commands commit];
        [commands waitUntilCompleted];
        if ([commands status] == MTLCommandBufferStatusCompleted)
            seconds = [commands GPUEndTime] - [commands GPUStartTime];
        else
            printf("failed: %s\n", [[[commands error] localizedDescription] UTF8String]);
    }
    return seconds;
}

/* The best of some rounds after others, for `warm` seconds, that build pipelines and raise the clock. */
static inline double report_time_best(id<MTLCommandQueue> queue, report_record record, void *user, int rounds,
                                      double warm)
{
    double best = 1e9;
    const double start = report_seconds();
    do
        if (report_time_once(queue, record, user) <= 0) return 0;
    while (report_seconds() - start < warm);
    for (int i = 0; i < rounds; i++) best = fmin(best, report_time_once(queue, record, user));
    return best;
}

/* The reader of a report sees each line at once, also if the program ends by a signal. */
static inline void report_begin(void) { setvbuf(stdout, NULL, _IOLBF, 0); }

#endif

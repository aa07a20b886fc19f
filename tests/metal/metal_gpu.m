// device.h on a Mac's GPU. Compiled with ARC. Pipelines are kept by kernel and function constants: many cases share
// one, and Metal takes up to a second for it.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include "device.h"
#include <stdio.h>
#include <string.h>

static id<MTLDevice> device;
static id<MTLCommandQueue> queue;
static id<MTLLibrary> library;
static NSMutableDictionary<NSString *, id<MTLComputePipelineState>> *pipelines;

static bool fail(char *error, size_t size, const char *what, NSError *reason)
{
    snprintf(error, size, "%s: %s", what, reason ? reason.localizedDescription.UTF8String : "no reason given");
    return false;
}

bool device_open(const char *path, char *error, size_t error_size)
{
    NSError *reason = nil;
    device = MTLCreateSystemDefaultDevice();
    if (!device) return fail(error, error_size, "no Metal device", nil);
    queue = [device newCommandQueue];
    NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:path]];
    library = [device newLibraryWithURL:url error:&reason];
    if (!library) return fail(error, error_size, path, reason);
    pipelines = [NSMutableDictionary dictionary];
    printf("Metal device: %s\n", device.name.UTF8String);
    return true;
}

static id<MTLComputePipelineState> build_pipeline(const device_dispatch *d, char *error, size_t error_size)
{
    NSError *reason = nil;
    MTLFunctionConstantValues *values = [[MTLFunctionConstantValues alloc] init];
    for (NSUInteger i = 0; i < DEVICE_CONSTANTS; i++) {
        bool flag = d->constants[i] != 0;
        if (!d->constant_set[i]) continue;
        if (d->constant_is_bool[i])
            [values setConstantValue:&flag type:MTLDataTypeBool atIndex:i];
        else
            [values setConstantValue:&d->constants[i] type:MTLDataTypeUInt atIndex:i];
    }
    NSString *name = [NSString stringWithUTF8String:d->kernel];
    id<MTLFunction> function = [library newFunctionWithName:name constantValues:values error:&reason];
    id<MTLComputePipelineState> pipeline = nil;
    if (function) pipeline = [device newComputePipelineStateWithFunction:function error:&reason];
    if (!pipeline) fail(error, error_size, d->kernel, reason);
    return pipeline;
}

static id<MTLComputePipelineState> find_pipeline(const device_dispatch *d, char *error, size_t error_size)
{
    NSMutableString *key = [NSMutableString stringWithUTF8String:d->kernel];
    for (int i = 0; i < DEVICE_CONSTANTS; i++)
        if (d->constant_set[i]) [key appendFormat:@" %d=%u", i, d->constants[i]];
    id<MTLComputePipelineState> pipeline = pipelines[key];
    if (!pipeline) pipeline = build_pipeline(d, error, error_size);
    if (pipeline) pipelines[key] = pipeline;
    if (pipeline && (pipeline.threadExecutionWidth != 32 || pipeline.maxTotalThreadsPerThreadgroup < d->threads)) {
        snprintf(error, error_size, "%s: simd width %d, at most %d threads", d->kernel,
                 (int)pipeline.threadExecutionWidth, (int)pipeline.maxTotalThreadsPerThreadgroup);
        return nil;
    }
    return pipeline;
}

static void bind_arguments(const device_dispatch *d, id<MTLComputeCommandEncoder> encoder, NSMutableDictionary *buffers)
{
    for (NSUInteger i = 0; i < DEVICE_BUFFERS; i++) {
        if (!d->buffers[i]) continue;
        if (d->by_value[i]) {
            [encoder setBytes:d->buffers[i] length:d->buffer_sizes[i] atIndex:i];
            continue;
        }
        NSUInteger size = d->buffer_sizes[i] ? d->buffer_sizes[i] : 4; // Metal has no empty buffers
        id<MTLBuffer> buffer = [device newBufferWithLength:size options:MTLResourceStorageModeShared];
        memcpy(buffer.contents, d->buffers[i], d->buffer_sizes[i]);
        [encoder setBuffer:buffer offset:0 atIndex:i];
        buffers[@(i)] = buffer;
    }
    for (NSUInteger i = 0; i < DEVICE_MEMORIES; i++)
        if (d->threadgroup_bytes[i]) [encoder setThreadgroupMemoryLength:d->threadgroup_bytes[i] atIndex:i];
}

bool device_run(const device_dispatch *d, char *error, size_t error_size)
{
    @autoreleasepool {
        id<MTLComputePipelineState> pipeline = find_pipeline(d, error, error_size);
        if (!pipeline) return false;
        NSMutableDictionary<NSNumber *, id<MTLBuffer>> *buffers = [NSMutableDictionary dictionary];
        id<MTLCommandBuffer> commands = [queue commandBuffer];
        id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
        [encoder setComputePipelineState:pipeline];
        bind_arguments(d, encoder, buffers);
        MTLSize groups = MTLSizeMake(d->threadgroups[0], d->threadgroups[1], d->threadgroups[2]);
        [encoder dispatchThreadgroups:groups threadsPerThreadgroup:MTLSizeMake(d->threads, 1, 1)];
        [encoder endEncoding];
        [commands commit];
        [commands waitUntilCompleted];
        if (commands.status != MTLCommandBufferStatusCompleted)
            return fail(error, error_size, d->kernel, commands.error);
        for (NSUInteger i = 0; i < DEVICE_BUFFERS; i++)
            if (d->written[i]) memcpy(d->buffers[i], buffers[@(i)].contents, d->buffer_sizes[i]);
        return true;
    }
}

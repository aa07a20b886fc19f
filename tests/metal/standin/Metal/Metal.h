/* The part of Metal that tqkv_metal.m, its tests and its example use, for Linux: names and signatures from Apple's
   documentation, on GNUstep's Foundation. standin.m runs it on the CPU; standin.h controls it. */
#ifndef STANDIN_METAL_H
#define STANDIN_METAL_H
#import <Foundation/Foundation.h>
#include <dispatch/dispatch.h>

@interface StandinObject : NSObject /* counted */
@end

typedef struct {
    NSUInteger width, height, depth;
} MTLSize;
static inline MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth)
{
    MTLSize size = {width, height, depth};
    return size;
}

typedef enum : NSUInteger { MTLDataTypeUInt = 33, MTLDataTypeBool = 53 } MTLDataType;
typedef enum : NSInteger { MTLGPUFamilyApple6 = 1006, MTLGPUFamilyApple7 = 1007 } MTLGPUFamily;
typedef enum : NSUInteger { MTLDispatchTypeSerial, MTLDispatchTypeConcurrent } MTLDispatchType;
typedef enum : NSUInteger {
    MTLCommandBufferStatusNotEnqueued,
    MTLCommandBufferStatusEnqueued,
    MTLCommandBufferStatusCommitted,
    MTLCommandBufferStatusScheduled,
    MTLCommandBufferStatusCompleted,
    MTLCommandBufferStatusError
} MTLCommandBufferStatus;
typedef NSUInteger MTLResourceOptions;
enum {
    MTLResourceStorageModeShared = 0,
    MTLResourceStorageModePrivate = 2 << 4,
    MTLResourceHazardTrackingModeUntracked = 1 << 8
};

@protocol MTLDevice
, MTLCommandBuffer;

typedef enum : NSUInteger {
    MTLCommandBufferErrorOptionNone,
    MTLCommandBufferErrorOptionEncoderExecutionStatus
} MTLCommandBufferErrorOption;
typedef enum : NSInteger {
    MTLCommandEncoderErrorStateUnknown,
    MTLCommandEncoderErrorStateCompleted,
    MTLCommandEncoderErrorStateAffected,
    MTLCommandEncoderErrorStatePending,
    MTLCommandEncoderErrorStateFaulted
} MTLCommandEncoderErrorState;
extern NSString *const MTLCommandBufferEncoderInfoErrorKey;

@protocol MTLCommandBufferEncoderInfo <NSObject>
@property(readonly) NSString *label;
@property(readonly) MTLCommandEncoderErrorState errorState;
@end

@interface MTLCommandBufferDescriptor : StandinObject {
    MTLCommandBufferErrorOption errorOptions;
}
@property MTLCommandBufferErrorOption errorOptions;
@end

@interface MTLFunctionConstantValues : StandinObject <NSCopying> {
  @public
    BOOL set[40];
    int64_t value[40];
}
- (void)setConstantValue:(const void *)value type:(MTLDataType)type atIndex:(NSUInteger)index;
@end

@interface MTLCompileOptions : StandinObject {
    BOOL fastMathEnabled;
    NSDictionary *preprocessorMacros;
}
@property(copy) NSDictionary *preprocessorMacros;
@property BOOL fastMathEnabled; /* YES at first */
@end

@protocol MTLResource <NSObject>
@property(readonly) id<MTLDevice> device;
@end

@protocol MTLBuffer <MTLResource>
@property(readonly) NSUInteger length;
- (void *)contents;
@end

@protocol MTLFunction <NSObject>
@property(readonly) NSString *name;
@end

typedef NSUInteger MTLPipelineOption;
enum { MTLPipelineOptionNone = 0 };

@interface MTLComputePipelineDescriptor : NSObject {
    id<MTLFunction> computeFunction;
    NSUInteger maxTotalThreadsPerThreadgroup;
    BOOL threadGroupSizeIsMultipleOfThreadExecutionWidth;
}
@property(retain) id<MTLFunction> computeFunction;
@property NSUInteger maxTotalThreadsPerThreadgroup; /* 0 at first: as many as the device takes */
@property BOOL threadGroupSizeIsMultipleOfThreadExecutionWidth;
@end

@protocol MTLComputePipelineState <NSObject>
@property(readonly) NSUInteger maxTotalThreadsPerThreadgroup;
@property(readonly) NSUInteger threadExecutionWidth;
@property(readonly) NSUInteger staticThreadgroupMemoryLength;
@end

@protocol MTLLibrary <NSObject>
@property(readonly) id<MTLDevice> device;
@property(readonly) NSArray *functionNames;
- (id<MTLFunction>)newFunctionWithName:(NSString *)name
                        constantValues:(MTLFunctionConstantValues *)values
                                 error:(NSError **)error;
@end

@protocol MTLComputeCommandEncoder <NSObject>
@property(copy) NSString *label;
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state;
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index;
- (void)setBytes:(const void *)bytes length:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)dispatchThreadgroups:(MTLSize)threadgroups threadsPerThreadgroup:(MTLSize)threads;
- (void)memoryBarrierWithResources:(const id<MTLResource> *)resources count:(NSUInteger)count;
- (void)endEncoding;
@end

@protocol MTLCommandBuffer <NSObject>
@property(readonly) MTLCommandBufferStatus status;
@property(readonly) NSError *error;
@property(readonly) double GPUStartTime, GPUEndTime; /* seconds */
- (id<MTLComputeCommandEncoder>)computeCommandEncoder;
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type;
- (void)commit;
- (void)waitUntilCompleted;
@end

@protocol MTLCommandQueue <NSObject>
- (id<MTLCommandBuffer>)commandBuffer;
- (id<MTLCommandBuffer>)commandBufferWithDescriptor:(MTLCommandBufferDescriptor *)descriptor;
@end

@protocol MTLDevice <NSObject>
@property(readonly) NSString *name;
@property(readonly) uint64_t registryID;
@property(readonly) NSUInteger maxThreadgroupMemoryLength;
- (BOOL)supportsFamily:(MTLGPUFamily)family;
- (id<MTLCommandQueue>)newCommandQueue;
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options;
- (id<MTLLibrary>)newLibraryWithURL:(NSURL *)url error:(NSError **)error;
- (id<MTLLibrary>)newLibraryWithData:(dispatch_data_t)data error:(NSError **)error;
- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source options:(MTLCompileOptions *)options error:(NSError **)error;
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError **)error;
/* reflection: NULL here */
- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor *)descriptor
                                                             options:(MTLPipelineOption)options
                                                          reflection:(void *)reflection
                                                               error:(NSError **)error;
@end

id<MTLDevice> MTLCreateSystemDefaultDevice(void) NS_RETURNS_RETAINED;

#endif

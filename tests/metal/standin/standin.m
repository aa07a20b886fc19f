/* Metal on the CPU, for Linux: simt.h runs the real shaders.
   Misuse that Metal's validation would report ends the program.
   The stand-in is stricter than Metal:
     - bindings and threadgroup memory end with the dispatch: each call must set its own
     - work runs only when someone waits for it
     - in a concurrent encoder, dispatches without a barrier between them run in reverse order */
#import <Metal/Metal.h>
#include "standin.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

NSString *const MTLCommandBufferEncoderInfoErrorKey = @"MTLCommandBufferEncoderInfoErrorKey";
static atomic_int live, calls, fail_at, devices, unlimited,
    spoil; /* spoil: dispatches until the one with wrong values */
static standin_device the_device;
static const char *refused; /* part of the names of kernels without pipelines */
static bool refused_everywhere;
static const char *compiled;                                /* the library that any source becomes */
static pthread_mutex_t machine = PTHREAD_MUTEX_INITIALIZER; /* simt.h runs one launch at a time */

void standin_set_device(standin_device device)
{
    if (!device.simd_width) device.simd_width = 32;
    if (!device.max_threads) device.max_threads = 1024;
    the_device = device;
}

void standin_set_compiled(const char *library) { compiled = library; }

void standin_fail_at(int n)
{
    calls = 0;
    fail_at = n;
}

void standin_refuse(const char *part, bool everywhere)
{
    refused = part;
    refused_everywhere = everywhere;
}

void standin_spoil(int n) { spoil = n; }
static bool is_idle;
void standin_idle(bool idle) { is_idle = idle; }
int standin_calls(void) { return calls; }
int standin_live_objects(void) { return live; }

/* Relaxed: counting must not order threads that a test wants to race. */
static int count(atomic_int *counter, int by)
{
    return atomic_fetch_add_explicit(counter, by, memory_order_relaxed) + by;
}

static bool is_to_fail(void) { return count(&calls, 1) == atomic_load_explicit(&fail_at, memory_order_relaxed); }

static void misuse(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
static void misuse(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("Metal stand-in: misuse: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

static void set_error(NSError **error, NSString *words)
{
    NSDictionary *info = [NSDictionary dictionaryWithObject:words forKey:NSLocalizedDescriptionKey];
    if (error) *error = [NSError errorWithDomain:@"standin" code:1 userInfo:info];
}

/* Whether this call must fail; if so, sets *error. */
static bool fails(NSError **error)
{
    if (!is_to_fail()) return false;
    set_error(error, [NSString stringWithUTF8String:STANDIN_WORDS]);
    return true;
}

void *standin_calloc(size_t n, size_t size) { return is_to_fail() ? NULL : calloc(n, size); }

int standin_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes)
{
    return is_to_fail() ? -1 : pthread_mutex_init(mutex, attributes);
}

/* -- Objects, counted -- */

@implementation StandinObject
- (id)init
{
    if ((self = [super init])) count(&live, 1);
    return self;
}
- (void)dealloc
{
    count(&live, -1);
    [super dealloc];
}
@end

@interface StandinData : StandinObject <OS_dispatch_data> {
  @public
    NSData *bytes;
}
@end
@implementation StandinData
- (void)dealloc
{
    [bytes release];
    [super dealloc];
}
@end

dispatch_data_t dispatch_data_create(const void *bytes, size_t size, void *queue, void *destructor)
{
    if (queue || destructor) misuse("dispatch_data_create: only copies here");
    StandinData *data = [[StandinData alloc] init];
    data->bytes = [[NSData alloc] initWithBytes:bytes length:size];
    return data;
}

@implementation MTLFunctionConstantValues
- (void)setConstantValue:(const void *)from type:(MTLDataType)type atIndex:(NSUInteger)index
{
    if (index >= STANDIN_CONSTANTS || !from) misuse("function constant %lu", (unsigned long)index);
    if (type == MTLDataTypeUInt)
        value[index] = *(const uint32_t *)from;
    else if (type == MTLDataTypeBool)
        value[index] = *(const bool *)from;
    else
        misuse("type of function constant %lu", (unsigned long)index);
    set[index] = YES;
}
- (id)copyWithZone:(NSZone *)zone
{
    MTLFunctionConstantValues *copy = [[MTLFunctionConstantValues allocWithZone:zone] init];
    memcpy(copy->set, set, sizeof set);
    memcpy(copy->value, value, sizeof value);
    return copy;
}
@end

@implementation MTLCompileOptions
@synthesize fastMathEnabled, preprocessorMacros;
- (id)init
{
    if ((self = [super init])) fastMathEnabled = YES;
    return self;
}
- (void)dealloc
{
    [preprocessorMacros release];
    [super dealloc];
}
@end

@implementation MTLCommandBufferDescriptor
@synthesize errorOptions;
@end

@interface StandinBuffer : StandinObject <MTLBuffer> {
  @public
    char *bytes;
    NSUInteger size;
    id<MTLDevice> owner; /* not retained */
    BOOL hidden;         /* from the processor: storage mode private */
}
@end
@implementation StandinBuffer
@synthesize length = size, device = owner;
- (void)dealloc
{
    free(bytes);
    [super dealloc];
}
- (void *)contents
{
    return hidden ? NULL : bytes;
}
@end

@interface StandinLibrary : StandinObject <MTLLibrary> {
  @public
    void *handle;
    standin_find_function find;
    standin_run_function run;
    standin_name_function name;
    NSString *only;      /* the one kernel of a compiled source */
    id<MTLDevice> owner; /* not retained */
}
@end

@interface StandinFunction : StandinObject <MTLFunction> {
  @public
    NSString *function_name;
    MTLFunctionConstantValues *constants;
    StandinLibrary *library;
    standin_kernel kernel;
}
@end
@implementation StandinFunction
@synthesize name = function_name;
- (void)dealloc
{
    [function_name release];
    [constants release];
    [library release];
    [super dealloc];
}
@end

@implementation MTLComputePipelineDescriptor
@synthesize computeFunction, maxTotalThreadsPerThreadgroup, threadGroupSizeIsMultipleOfThreadExecutionWidth;
- (void)dealloc
{
    [computeFunction release];
    [super dealloc];
}
@end

@interface StandinPipeline : StandinObject <MTLComputePipelineState> {
  @public
    StandinFunction *function;
    NSUInteger most; /* threads */
    bool whole;      /* only multiples of the width */
}
@end
@implementation StandinPipeline
@synthesize maxTotalThreadsPerThreadgroup = most;
- (void)dealloc
{
    [function release];
    [super dealloc];
}
- (NSUInteger)staticThreadgroupMemoryLength
{
    return 0;
}
- (NSUInteger)threadExecutionWidth
{
    return the_device.simd_width;
}
@end

@implementation StandinLibrary
@synthesize device = owner;
- (void)dealloc
{
    [only release];
    if (handle) dlclose(handle);
    [super dealloc];
}
- (NSArray *)functionNames
{
    NSMutableArray *names = [NSMutableArray array];
    for (int i = 0; name(i); i++) [names addObject:[NSString stringWithUTF8String:name(i)]];
    return names;
}
- (id<MTLFunction>)newFunctionWithName:(NSString *)function_name
                        constantValues:(MTLFunctionConstantValues *)values
                                 error:(NSError **)error
{
    standin_kernel found;
    if (fails(error)) return nil;
    if ((only && ![only isEqual:function_name]) || !find([function_name UTF8String], &found)) {
        set_error(error, [NSString stringWithFormat:@"there is no function %@ in the library", function_name]);
        return nil;
    }
    for (int i = 0; i < STANDIN_CONSTANTS; i++)
        if ((found.constants >> i & 1) && !values->set[i]) {
            set_error(error, [NSString stringWithFormat:@"%@ needs the function constant %d", function_name, i]);
            return nil;
        }
    StandinFunction *function = [[StandinFunction alloc] init];
    function->function_name = [function_name copy];
    function->constants = [values copy];
    function->library = [self retain];
    function->kernel = found;
    return function;
}
@end

/* -- Work -- */

/* One dispatch and the objects that it retains. Dispatches of the same group may run in any order. */
@interface StandinDispatch : StandinObject {
  @public
    StandinPipeline *pipeline;
    StandinBuffer *buffers[STANDIN_BUFFERS];
    NSUInteger room[STANDIN_BUFFERS]; /* bytes from the offset on */
    standin_launch launch;
    unsigned group;
}
@end
@implementation StandinDispatch
- (void)dealloc
{
    [pipeline release];
    for (int i = 0; i < STANDIN_BUFFERS; i++) [buffers[i] release];
    [super dealloc];
}
- (void)run
{
    char error[600];
    StandinFunction *function = pipeline->function;
    if (is_idle) return;
    memcpy(launch.set, function->constants->set, sizeof launch.set);
    memcpy(launch.value, function->constants->value, sizeof launch.value);
    pthread_mutex_lock(&machine);
    function->library->run([function->function_name UTF8String], &launch, error, sizeof error);
    pthread_mutex_unlock(&machine);
    if (error[0]) misuse("%s", error);
    if (atomic_load_explicit(&spoil, memory_order_relaxed) && count(&spoil, -1) == 0)
        [self spoilWhat:[function->function_name UTF8String]];
}
/* Flips the sign of a value, or bits of a code, in the first bytes of the first buffer that the kernel writes. */
- (void)spoilWhat:(const char *)name
{
    static const struct {
        const char *family;
        int index;
    } written[] = {{"tqkv_encode", 2}, {"tqkv_decode", 3}, {"tqkv_index_scores", 5}, {"tqkv_index_choice", 3}, {"", 4}};
    int i = 0;
    while (strncmp(name, written[i].family, strlen(written[i].family))) i++;
    unsigned char *bytes = launch.buffers[written[i].index];
    for (i = 0; i < 32; i++) bytes[i] ^= 0x80;
}
@end

@interface StandinEncoder : StandinObject <MTLComputeCommandEncoder, MTLCommandBufferEncoderInfo> {
  @public
    NSString *label;
    NSMutableArray *work;
    StandinDispatch *next; /* what the encoder has set so far */
    MTLDispatchType type;
    NSUInteger memory[STANDIN_MEMORIES]; /* lengths in force, also those of earlier dispatches */
    unsigned group;
    BOOL ended;
}
@end
@implementation StandinEncoder
@synthesize label;
- (MTLCommandEncoderErrorState)errorState
{
    return MTLCommandEncoderErrorStateFaulted;
}
- (void)dealloc
{
    [label release];
    if (!ended) misuse("an encoder was released before endEncoding");
    [work release];
    [next release];
    [super dealloc];
}
- (StandinDispatch *)open
{
    if (ended) misuse("an encoder was used after endEncoding");
    if (!next) next = [[StandinDispatch alloc] init];
    return next;
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state
{
    if (!state) misuse("no pipeline");
    [[self open]->pipeline release];
    next->pipeline = (StandinPipeline *)[state retain];
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index
{
    StandinBuffer *bound = (StandinBuffer *)buffer;
    if (index >= STANDIN_BUFFERS) misuse("buffer index %lu", (unsigned long)index);
    if (bound && offset >= bound->size) misuse("offset %lu at buffer %lu", (unsigned long)offset, (unsigned long)index);
    [[self open]->buffers[index] release];
    next->buffers[index] = [bound retain];
    next->room[index] = bound ? bound->size - offset : 0;
    next->launch.buffers[index] = bound ? bound->bytes + offset : NULL;
}
- (void)setBytes:(const void *)bytes length:(NSUInteger)length atIndex:(NSUInteger)index
{
    if (!length || length > 4096) misuse("setBytes of %lu bytes", (unsigned long)length);
    StandinBuffer *copy = [[StandinBuffer alloc] init];
    copy->bytes = malloc(length);
    copy->size = length;
    memcpy(copy->bytes, bytes, length);
    [self setBuffer:copy offset:0 atIndex:index];
    [copy release];
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index
{
    if (!length || length % 16 || index >= STANDIN_MEMORIES)
        misuse("%lu bytes of threadgroup memory %lu", (unsigned long)length, (unsigned long)index);
    [self open]->launch.threadgroup_bytes[index] = memory[index] = length;
}
- (void)dispatchThreadgroups:(MTLSize)g threadsPerThreadgroup:(MTLSize)t
{
    StandinDispatch *dispatch = [self open];
    if (!dispatch->pipeline) misuse("a dispatch without pipeline");
    if (!g.width || !g.height || !g.depth || g.width > UINT32_MAX || g.height > UINT32_MAX || g.depth > UINT32_MAX)
        misuse("a grid of %lu x %lu x %lu threadgroups", (unsigned long)g.width, (unsigned long)g.height,
               (unsigned long)g.depth);
    const NSUInteger threads_each = t.width * t.height * t.depth;
    if (threads_each > dispatch->pipeline->most)
        misuse("%lu threads are more than the pipeline takes", (unsigned long)threads_each);
    if (dispatch->pipeline->whole && threads_each % the_device.simd_width)
        misuse("%lu threads are no multiple of the width that was promised", (unsigned long)threads_each);
    for (unsigned i = 0; i < STANDIN_BUFFERS; i++) /* as Metal's validation does, whether or not the kernel reads it */
        if (dispatch->buffers[i] && dispatch->room[i] < dispatch->pipeline->function->kernel.sizes[i])
            misuse("buffer %u has space for %lu bytes, but its argument has %zu", i, (unsigned long)dispatch->room[i],
                   dispatch->pipeline->function->kernel.sizes[i]);
    NSUInteger in_force = 0;
    for (unsigned i = 0; i < STANDIN_MEMORIES; i++) in_force += memory[i];
    if (in_force > 32768) misuse("%lu bytes of threadgroup memory are in force", (unsigned long)in_force);
    const unsigned threadgroups[3] = {(unsigned)g.width, (unsigned)g.height, (unsigned)g.depth};
    const unsigned threads[3] = {(unsigned)t.width, (unsigned)t.height, (unsigned)t.depth};
    memcpy(dispatch->launch.threadgroups, threadgroups, sizeof threadgroups);
    memcpy(dispatch->launch.threads, threads, sizeof threads);
    dispatch->group = group;
    if (type == MTLDispatchTypeSerial) group++;
    [work addObject:dispatch];
    [next release];
    next = nil;
}
- (void)memoryBarrierWithResources:(const id<MTLResource> *)resources count:(NSUInteger)count
{
    [self open];
    for (NSUInteger i = 0; i < count; i++)
        if (!resources[i]) misuse("a barrier on no resource");
    if (!count) misuse("a barrier on nothing");
    group++;
}
- (void)endEncoding
{
    [self open];
    ended = YES;
}
@end

@interface StandinQueue : StandinObject <MTLCommandQueue> {
  @public
    NSMutableArray *committed; /* not yet run */
}
@end

@interface StandinCommands : StandinObject <MTLCommandBuffer> {
  @public
    StandinQueue *queue;
    NSMutableArray *encoders;
    MTLCommandBufferStatus state;
    NSError *failure;
    BOOL to_fail, tells_encoders;
    struct timespec begun, done;
}
@end
@implementation StandinCommands
@synthesize status = state, error = failure;
- (void)dealloc
{
    [queue release];
    [encoders release];
    [failure release];
    [super dealloc];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder
{
    return [self computeCommandEncoderWithDispatchType:MTLDispatchTypeSerial];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type
{
    for (StandinEncoder *other in encoders)
        if (!other->ended) misuse("two encoders of a command buffer at once");
    if (state != MTLCommandBufferStatusNotEnqueued) misuse("an encoder of a committed command buffer");
    if (is_to_fail()) return nil;
    StandinEncoder *encoder = [[[StandinEncoder alloc] init] autorelease];
    encoder->work = [[NSMutableArray alloc] init];
    encoder->type = type;
    [encoders addObject:encoder];
    return encoder;
}
- (void)commit
{
    if (state != MTLCommandBufferStatusNotEnqueued) misuse("a command buffer committed twice");
    for (StandinEncoder *encoder in encoders)
        if (!encoder->ended) misuse("commit before endEncoding");
    to_fail = is_to_fail();
    state = MTLCommandBufferStatusCommitted;
    @synchronized(queue) {
        [queue->committed addObject:self];
    }
}
- (double)GPUStartTime
{
    return (double)begun.tv_sec + 1e-9 * (double)begun.tv_nsec;
}
- (double)GPUEndTime
{
    return (double)done.tv_sec + 1e-9 * (double)done.tv_nsec;
}
- (void)run
{
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (StandinEncoder *encoder in encoders) {
        NSArray *work = encoder->work;
        for (NSUInteger first = 0, end; first < [work count] && !to_fail; first = end) {
            const unsigned group = ((StandinDispatch *)[work objectAtIndex:first])->group;
            for (end = first; end < [work count]; end++)
                if (((StandinDispatch *)[work objectAtIndex:end])->group != group) break;
            for (NSUInteger i = end; i-- > first;) [[work objectAtIndex:i] run];
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &done);
    NSError *error = nil;
    if (to_fail) set_error(&error, [NSString stringWithUTF8String:STANDIN_WORDS]);
    if (to_fail && tells_encoders) {
        NSMutableDictionary *info = [NSMutableDictionary dictionaryWithDictionary:[error userInfo]];
        [info setObject:encoders forKey:MTLCommandBufferEncoderInfoErrorKey];
        error = [NSError errorWithDomain:@"standin" code:1 userInfo:info];
    }
    failure = [error retain];
    state = to_fail ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted;
}
- (void)waitUntilCompleted
{
    @synchronized(queue) { /* another thread may use this command buffer */
        if (state == MTLCommandBufferStatusNotEnqueued) misuse("wait before commit");
        while (state == MTLCommandBufferStatusCommitted) {
            [[queue->committed objectAtIndex:0] run];
            [queue->committed removeObjectAtIndex:0];
        }
    }
}
@end

@implementation StandinQueue
- (void)dealloc
{
    [committed release];
    [super dealloc];
}
- (id<MTLCommandBuffer>)commandBuffer
{
    if (is_to_fail()) return nil;
    StandinCommands *commands = [[[StandinCommands alloc] init] autorelease];
    commands->queue = [self retain];
    commands->encoders = [[NSMutableArray alloc] init];
    return commands;
}
- (id<MTLCommandBuffer>)commandBufferWithDescriptor:(MTLCommandBufferDescriptor *)descriptor
{
    StandinCommands *commands = (StandinCommands *)[self commandBuffer];
    if (commands) commands->tells_encoders = [descriptor errorOptions] != MTLCommandBufferErrorOptionNone;
    return commands;
}
@end

/* -- The device -- */

/* The shared object inside a library, or NULL and the reason. */
static void *open_library(NSData *data, NSError **error)
{
    uint64_t size = 0;
    const char *bytes = [data bytes];
    if ([data length] < 16 || memcmp(bytes, STANDIN_MAGIC, 8) != 0) {
        set_error(error, @"this is no library");
        return NULL;
    }
    memcpy(&size, bytes + 8, sizeof size);
    if (size != [data length] - 16) {
        set_error(error, @"the library is truncated");
        return NULL;
    }
    char path[] = "/tmp/standin-library-XXXXXX"; /* a new name each time: dlopen identifies libraries by name */
    const int file = mkstemp(path);
    void *handle = write(file, bytes + 16, size) == (ssize_t)size ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!handle) set_error(error, [NSString stringWithFormat:@"not loaded: %s", dlerror()]);
    close(file);
    unlink(path);
    return handle;
}

@interface StandinDevice : StandinObject <MTLDevice> {
  @public
    uint64_t number;
}
@end
@implementation StandinDevice
@synthesize registryID = number;
- (NSUInteger)maxThreadgroupMemoryLength
{
    return 32768;
}
- (NSString *)name
{
    return @"the CPU, standing in for a GPU";
}
- (BOOL)supportsFamily:(MTLGPUFamily)family
{
    return family < MTLGPUFamilyApple7 || !the_device.before_apple7;
}
- (id<MTLCommandQueue>)newCommandQueue
{
    if (is_to_fail()) return nil;
    StandinQueue *queue = [[StandinQueue alloc] init];
    queue->committed = [[NSMutableArray alloc] init];
    return queue;
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options
{
    if (!length) misuse("a buffer without length");
    if (is_to_fail() || length > (NSUInteger)1 << 34) return nil;
    StandinBuffer *buffer = [[StandinBuffer alloc] init];
    buffer->bytes = malloc(length);
    memset(buffer->bytes, 0xff, length); /* NaN to whoever reads before writing */
    buffer->size = length;
    buffer->owner = self;
    buffer->hidden = (options & MTLResourceStorageModePrivate) != 0;
    return buffer;
}
- (id<MTLLibrary>)newLibraryFrom:(NSData *)data error:(NSError **)error
{
    if (fails(error)) return nil;
    StandinLibrary *library = [[StandinLibrary alloc] init];
    library->handle = open_library(data, error);
    library->owner = self;
    if (library->handle) {
        library->find = (standin_find_function)dlsym(library->handle, "standin_find");
        library->run = (standin_run_function)dlsym(library->handle, "standin_run");
        library->name = (standin_name_function)dlsym(library->handle, "standin_name");
        if (library->find && library->run && library->name) return library;
        set_error(error, @"a shared object without shaders");
    }
    [library release];
    return nil;
}
- (id<MTLLibrary>)newLibraryWithURL:(NSURL *)url error:(NSError **)error
{
    NSData *data = [NSData dataWithContentsOfFile:[url path]];
    if (data) return [self newLibraryFrom:data error:error];
    set_error(error, [NSString stringWithFormat:@"there is no file %@", [url path]]);
    return nil;
}
- (id<MTLLibrary>)newLibraryWithData:(dispatch_data_t)data error:(NSError **)error
{
    return [self newLibraryFrom:((StandinData *)data)->bytes error:error];
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source options:(MTLCompileOptions *)options error:(NSError **)error
{
    if (!source || !options || [options fastMathEnabled]) misuse("shaders compiled with fast math");
    const char *path = compiled ? compiled : getenv("STANDIN_COMPILED");
    NSDictionary *macros = [options preprocessorMacros];
    NSString *macro = nil;
    for (NSString *key in macros)
        if ([key hasPrefix:@"TQKV_ONLY_"]) macro = key;
    if (![macros objectForKey:@"TQKV_ONLY"] || !macro) misuse("a source compiled whole, which takes minutes");
    if ([source rangeOfString:[NSString stringWithFormat:@"defined(%@)", macro]].length && path) {
        NSData *data = [NSData dataWithContentsOfFile:[NSString stringWithUTF8String:path]];
        StandinLibrary *library = (StandinLibrary *)[self newLibraryFrom:data error:error];
        if (library) library->only = [[macro substringFromIndex:10] copy];
        return library;
    }
    if (!fails(error)) set_error(error, @"program_source:1:1: error: no shaders");
    return nil;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError **)error
{
    MTLComputePipelineDescriptor *descriptor = [[[MTLComputePipelineDescriptor alloc] init] autorelease];
    [descriptor setComputeFunction:function];
    return [self newComputePipelineStateWithDescriptor:descriptor options:0 reflection:NULL error:error];
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor *)descriptor
                                                             options:(MTLPipelineOption)options
                                                          reflection:(void *)reflection
                                                               error:(NSError **)error
{
    id<MTLFunction> function = [descriptor computeFunction];
    const NSUInteger limit = [descriptor maxTotalThreadsPerThreadgroup];
    if (!function) misuse("a pipeline without function");
    if (options || reflection) misuse("a reflection, which the stand-in has not");
    if (limit > 1024) misuse("%lu threads: more than a threadgroup ever has", (unsigned long)limit);
    if (fails(error)) return nil;
    StandinFunction *of = (StandinFunction *)function;
    NSString *called = [NSString stringWithFormat:@"%@ %d", [of name], (int)of -> constants -> value[4]];
    if (refused && strstr([called UTF8String], refused) && (refused_everywhere || !of->library->only)) {
        set_error(error, @"refused by name");
        return nil;
    }
    StandinPipeline *pipeline = [[StandinPipeline alloc] init];
    pipeline->function = (StandinFunction *)[function retain];
    pipeline->most = limit && limit < the_device.max_threads ? limit : the_device.max_threads;
    pipeline->whole = [descriptor threadGroupSizeIsMultipleOfThreadExecutionWidth];
    if (!limit || !pipeline->whole) count(&unlimited, 1);
    return pipeline;
}
@end

int standin_unlimited(void) { return count(&unlimited, 0); }

id<MTLDevice> MTLCreateSystemDefaultDevice(void)
{
    if (!the_device.simd_width) standin_set_device(the_device);
    if (getenv("STANDIN_APPLE5")) the_device.before_apple7 = true;
    if (the_device.missing || is_to_fail()) return nil;
    StandinDevice *device = [[StandinDevice alloc] init];
    device->number = (uint64_t)count(&devices, 1);
    return device;
}

id<MTLDevice> standin_wrapped(id<MTLDevice> device)
{
    StandinDevice *wrapped = [[StandinDevice alloc] init];
    wrapped->number = [device registryID];
    return wrapped;
}

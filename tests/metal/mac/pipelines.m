/* Does Metal take each kernel? pipelines LIBRARY. Builds the pipeline of every function of a library alone, for the default
   formats, with nothing of tqkv but the names of function constants. A line each: ok, the time, the most threads, static
   threadgroup memory; or Metal's error. Status 1 if one failed. */
#include "report.h"
#define TQKV_SHARED
#include "tqkv.h"

static void print_device(id<MTLDevice> device)
{
    printf("device: %s, %lu bytes of threadgroup memory, families", [[device name] UTF8String],
           (unsigned long)[device maxThreadgroupMemoryLength]);
    for (NSInteger family = 1001; family <= 1015; family++)
        if ([device supportsFamily:(MTLGPUFamily)family]) printf(" Apple%ld", (long)family - 1000);
    printf("\n");
}

/* Keys of I8, values of TQ4, four columns, no options. */
static MTLFunctionConstantValues *constants(void)
{
    static const uint32_t chosen[TQKV__CONSTANTS] = {
        [TQKV_FC_FORMAT] = TQKV_I8,   [TQKV_FC_VALUE_FORMAT] = TQKV_TQ4, [TQKV_FC_COLUMNS] = 4,
        [TQKV_FC_ROTATED] = 1,        [TQKV_FC_VALUE_ROTATED] = 1,       [TQKV_FC_UNROTATE] = 1,
        [TQKV_FC_ROTATE_QUERIES] = 1, [TQKV_FC_SAME_SLOTS] = 1};
    MTLFunctionConstantValues *values = [[MTLFunctionConstantValues alloc] init];
    for (uint32_t i = 0; i < TQKV__CONSTANTS; i++) {
        const bool flag = chosen[i] != 0;
        if (TQKV__IS_NUMBER(i))
            [values setConstantValue:&chosen[i] type:MTLDataTypeUInt atIndex:i];
        else
            [values setConstantValue:&flag type:MTLDataTypeBool atIndex:i];
    }
    return values;
}

static bool build(id<MTLDevice> device, id<MTLLibrary> library, NSString *name, MTLFunctionConstantValues *values)
{
    NSError *error = nil;
    const double start = report_seconds();
    id<MTLFunction> function = [library newFunctionWithName:name constantValues:values error:&error];
    const double specialised = report_seconds();
    id<MTLComputePipelineState> state =
        function ? [device newComputePipelineStateWithFunction:function error:&error] : nil;
    if (state)
        printf("pipeline %s: ok, %.0f + %.0f ms, %lu threads of %lu, %lu bytes\n", [name UTF8String],
               (specialised - start) * 1e3, (report_seconds() - specialised) * 1e3,
               (unsigned long)[state maxTotalThreadsPerThreadgroup], (unsigned long)[state threadExecutionWidth],
               (unsigned long)[state staticThreadgroupMemoryLength]);
    else
        printf("pipeline %s: FAILED: %s\n", [name UTF8String], [[error localizedDescription] UTF8String]);
    const bool good = state != nil;
    [state release];
    [function release];
    return good;
}

int main(int argc, char **argv)
{
    if (argc < 2) return 2;
    report_begin();
    NSAutoreleasePool *pool = [[NSAutoreleasePool alloc] init];
    NSError *error = nil;
    int n_failed = 0;
    id<MTLDevice> device = MTLCreateSystemDefaultDevice();
    if (!device) return printf("there is no Metal device\n"), 1;
    print_device(device);
    NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:argv[1]]];
    const double start = report_seconds();
    id<MTLLibrary> library = [device newLibraryWithURL:url error:&error];
    if (!library) return printf("library %s: FAILED: %s\n", argv[1], [[error localizedDescription] UTF8String]), 1;
    NSArray *names = [[library functionNames] sortedArrayUsingSelector:@selector(compare:)];
    printf("library %s: ok, %.0f ms, %lu functions\n", argv[1], (report_seconds() - start) * 1e3,
           (unsigned long)[names count]);
    MTLFunctionConstantValues *values = constants();
    for (NSString *name in names) n_failed += !build(device, library, name, values);
    printf("%lu pipelines, %d failed, %.1f s\n", (unsigned long)[names count], n_failed, report_seconds() - start);
    [values release];
    [library release];
    [device release];
    [pool release];
    return n_failed != 0;
}

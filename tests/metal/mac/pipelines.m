/* Does Metal take each kernel? pipelines LIBRARY. Builds the pipeline of every function of a library alone, for the
   default formats, with nothing of tqkv but the names of function constants; those of attention with every number of
   columns that plans choose, for half floats, too, and one with a list. A line each: ok, the time, the most threads,
   which tell registers (1024 down to 384), static threadgroup memory; or Metal's error. Status 1 if one failed. */
#include "report.h"
#include "tests/metal/sizes.h"

static void print_device(id<MTLDevice> device)
{
    printf("device: %s, %lu bytes of threadgroup memory, families", [[device name] UTF8String],
           (unsigned long)[device maxThreadgroupMemoryLength]);
    for (NSInteger family = 1001; family <= 1015; family++)
        if ([device supportsFamily:(MTLGPUFamily)family]) printf(" Apple%ld", (long)family - 1000);
    printf("\n");
}

/* What a pipeline is built for, without other options. */
typedef struct variant {
    tqkv_format key, value;
    uint32_t columns;
    bool list;
} variant;

static MTLFunctionConstantValues *constants(variant v)
{
    const bool rotated = v.key != TQKV_F16;
    const uint32_t chosen[TQKV__CONSTANTS] = {[TQKV_FC_FORMAT] = (uint32_t)v.key,
                                              [TQKV_FC_VALUE_FORMAT] = (uint32_t)v.value,
                                              [TQKV_FC_COLUMNS] = v.columns,
                                              [TQKV_FC_ROTATED] = rotated,
                                              [TQKV_FC_VALUE_ROTATED] = rotated,
                                              [TQKV_FC_UNROTATE] = rotated,
                                              [TQKV_FC_ROTATE_QUERIES] = rotated,
                                              [TQKV_FC_SAME_SLOTS] = 1,
                                              [TQKV_FC_LIST] = v.list};
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

static bool build(id<MTLDevice> device, id<MTLLibrary> library, NSString *name, variant v)
{
    MTLFunctionConstantValues *values = constants(v);
    NSError *error = nil;
    const double start = report_seconds();
    id<MTLFunction> function = [library newFunctionWithName:name constantValues:values error:&error];
    const double specialised = report_seconds();
    id<MTLComputePipelineState> state =
        function ? [device newComputePipelineStateWithFunction:function error:&error] : nil;
    if (state)
        printf("pipeline %s, %s/%s, %u columns%s: ok, %.0f + %.0f ms, %lu threads of %lu, %lu bytes\n",
               [name UTF8String], tqkv_format_name(v.key), tqkv_format_name(v.value), v.columns,
               v.list ? ", a list" : "", (specialised - start) * 1e3, (report_seconds() - specialised) * 1e3,
               (unsigned long)[state maxTotalThreadsPerThreadgroup], (unsigned long)[state threadExecutionWidth],
               (unsigned long)[state staticThreadgroupMemoryLength]);
    else
        printf("pipeline %s: FAILED: %s\n", [name UTF8String], [[error localizedDescription] UTF8String]);
    const bool good = state != nil;
    [state release];
    [function release];
    [values release];
    return good;
}

/* The head_dim in a kernel's name: of its queries. */
static int head_dim_of(NSString *name)
{
    const NSRange at = [name rangeOfString:@"_d"];
    return at.length ? [[name substringFromIndex:at.location + 2] intValue] : 0;
}

/* The default formats, four columns. Of attention all others. */
static int build_all(id<MTLDevice> device, id<MTLLibrary> library, NSString *name, int *n_failed)
{
    const variant usual = {TQKV_I8, TQKV_TQ4, 4, false}, halves = {TQKV_F16, TQKV_F16, 4, false};
    const int d = head_dim_of(name);
    const bool matrix = [name hasPrefix:@"tqkv_attend_matrix_d"];
    int n = 1;
    variant v = usual;
    *n_failed += !build(device, library, name, v);
    if (!matrix && ![name hasPrefix:@"tqkv_attend_d"]) return n;
    const uint32_t most = matrix ? (d <= 64 ? 32 : d <= 128 ? 16 : 8) : (uint32_t)TQKV__MAX_COLUMNS(d);
    for (v.columns = 1; v.columns <= most; v.columns *= 2) {
        if (v.columns == usual.columns) continue;
        *n_failed += !build(device, library, name, v);
        n++;
    }
    v.columns = usual.columns;
    v.list = true;
    *n_failed += !build(device, library, name, v);
    *n_failed += !build(device, library, name, halves);
    return n + 2;
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
    int n = 0;
    for (NSString *name in names) n += build_all(device, library, name, &n_failed);
    printf("%d pipelines, %d failed, %.1f s\n", n, n_failed, report_seconds() - start);
    [library release];
    [device release];
    [pool release];
    return n_failed != 0;
}

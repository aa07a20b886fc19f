/* The stand-in itself: it reports each misuse. */
#include "host.h"
#ifdef STANDIN
#include "tests/metal/standin/standin.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* A pipeline of tqkv_rotate_d64. Nobody releases it: the process ends. */
static id<MTLComputePipelineState> rotate_pipeline(void)
{
    const bool unrotate = false;
    NSError *error = nil;
    NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:test_host.library]];
    id<MTLLibrary> library = [test_host.device newLibraryWithURL:url error:&error];
    MTLFunctionConstantValues *values = [[MTLFunctionConstantValues alloc] init];
    [values setConstantValue:&unrotate type:MTLDataTypeBool atIndex:TQKV_FC_UNROTATE];
    id<MTLFunction> function = [library newFunctionWithName:@"tqkv_rotate_d64" constantValues:values error:&error];
    return [test_host.device newComputePipelineStateWithFunction:function error:&error];
}

/* The misuses, each with an encoder that has that pipeline. */
static void dispatch(host_work *w, NSUInteger threads)
{
    [w->encoder dispatchThreadgroups:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
}

static void bind_row(host_work *w)
{
    const int32_t n_rows = 1;
    [w->encoder setBytes:&n_rows length:sizeof n_rows atIndex:0];
    [w->encoder setBuffer:host_zeros(256).buffer offset:0 atIndex:1];
}

static void no_pipeline(host_work *w)
{
    host_end(w);
    *w = host_begin(false);
    bind_row(w);
    dispatch(w, 32);
}

static void unbound_buffer(host_work *w) { dispatch(w, 32); }

static void binding_of_before(host_work *w)
{
    bind_row(w);
    dispatch(w, 32);
    [w->encoder setComputePipelineState:rotate_pipeline()];
    dispatch(w, 32);
}

static void too_many_threads(host_work *w)
{
    bind_row(w);
    dispatch(w, 1056);
}

static void half_a_simdgroup(host_work *w)
{
    bind_row(w);
    dispatch(w, 48);
}

static void empty_grid(host_work *w)
{
    bind_row(w);
    [w->encoder dispatchThreadgroups:MTLSizeMake(0, 1, 1) threadsPerThreadgroup:MTLSizeMake(32, 1, 1)];
}

static void many_bytes(host_work *w)
{
    char bytes[5000] = {0};
    [w->encoder setBytes:bytes length:sizeof bytes atIndex:0];
}

static void offset_beyond(host_work *w) { [w->encoder setBuffer:host_zeros(4).buffer offset:300 atIndex:1]; }
static void odd_memory(host_work *w) { [w->encoder setThreadgroupMemoryLength:20 atIndex:0]; }
static void still_open(host_work *w) { [w->commands commit]; }
static void early_wait(host_work *w) { [w->commands waitUntilCompleted]; }

static void used_after_end(host_work *w)
{
    [w->encoder endEncoding];
    bind_row(w);
}

static void committed_twice(host_work *w)
{
    [w->encoder endEncoding];
    [w->commands commit];
    [w->commands commit];
}

typedef struct misuse_case {
    const char *name, *words;
    void (*misuse)(host_work *w);
} misuse_case;

/* Runs a misuse in a child process and checks its exit and its message. */
static void run_misuse(const void *parameters)
{
    const misuse_case *c = parameters;
    int pipe_ends[2], status = 0;
    char words[500] = "";
    REQUIRE(!pipe(pipe_ends), "no pipe");
    const pid_t child = fork();
    if (child == 0) {
        dup2(pipe_ends[1], 2);
        host_work w = host_begin(false);
        [w.encoder setComputePipelineState:rotate_pipeline()];
        c->misuse(&w);
        host_end(&w);
        _exit(0);
    }
    close(pipe_ends[1]);
    for (size_t n = 0; n < sizeof words - 1;) {
        const ssize_t got = read(pipe_ends[0], words + n, sizeof words - 1 - n);
        if (got <= 0) break;
        n += (size_t)got;
    }
    close(pipe_ends[0]);
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "it went through");
    CHECK(strstr(words, c->words), "it said \"%s\"", words);
}

/* Encodes and decodes in one concurrent encoder: correct only with a barrier between the two. */
static void run_missing_barrier(const void *parameters)
{
    const bool barrier = *(const bool *)parameters;
    tqkv_store s = test_store(TQKV_I8, 64, 1, 4, false);
    tqkv_metal_store gpu = host_store(&s);
    float *x = host_floats(2, 64);
    const tqkv_metal_buffer none = {nil, 0}, src = host_buffer(x, 256), dst = host_zeros(256);
    host_work w = host_begin(true);
    CHECK_RESULT(HOST(test_host.metal, w.encoder, encode, &gpu, NULL, src, host_none, 1, 0, none), TQKV_OK);
    const id<MTLResource> codes[] = {gpu.codes.buffer};
    if (barrier) [w.encoder memoryBarrierWithResources:codes count:1];
    CHECK_RESULT(HOST(test_host.metal, w.encoder, decode, &gpu, 0, 1, TQKV_ORIGINAL, dst), TQKV_OK);
    host_end(&w);
    const float *y = host_contents(dst);
    double wrong = 0, all = 0;
    for (int i = 0; i < 64; i++) {
        wrong += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
        all += (double)x[i] * (double)x[i];
    }
    CHECK((wrong < 0.01 * all) == barrier, "relative squared error %g", wrong / all);
    host_release(src);
    host_release(dst);
    host_store_release(&gpu);
    test_store_free(&s);
    free(x);
}

void standin_host_cases(void)
{
    const misuse_case cases[] = {{"no_pipeline", "without pipeline", no_pipeline},
                                 {"unbound_buffer", "is not bound", unbound_buffer},
                                 {"binding_of_before", "is not bound", binding_of_before},
                                 {"too_many_threads", "more than the pipeline takes", too_many_threads},
                                 {"half_a_simdgroup", "multiple of 32", half_a_simdgroup},
                                 {"empty_grid", "a grid of", empty_grid},
                                 {"many_bytes", "setBytes of", many_bytes},
                                 {"offset_beyond", "offset 300", offset_beyond},
                                 {"odd_memory", "20 bytes of threadgroup memory", odd_memory},
                                 {"still_open", "commit before endEncoding", still_open},
                                 {"early_wait", "wait before commit", early_wait},
                                 {"used_after_end", "after endEncoding", used_after_end},
                                 {"committed_twice", "committed twice", committed_twice}};
    const bool barriers[] = {true, false};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        test_add(run_misuse, &cases[i], sizeof cases[i], "standin/misuse/%s", cases[i].name);
    for (int i = 0; i < 2; i++)
        test_add(run_missing_barrier, &barriers[i], sizeof(bool), "standin/barrier/%d", (int)barriers[i]);
}
#else
void standin_host_cases(void) {}
#endif

/* What a plan refuses is refused again when it is recorded, with its name: wrong arrays are those of buffers.m. A
   library without kernels: the refusal names the one that a call wants. */
#include "host.h"

/* Calls with a number out of range or without a store, and the text of each. */
static void run_calls(NO_ROW)
{
    tqkv_metal *m = test_host.metal;
    const tqkv_metal_buffer none = host_none;
    const tqkv_metal_store s = {.shape = {.format = TQKV_TQ4, .head_dim = 64, .n_kv_heads = 1, .capacity = 8}};
    const tqkv_metal_attention empty = {0}, *a = &empty;
    const tqkv_metal_index x = {.keys = &s, .index = {.end = 8, .n_heads = 1, .n_queries = 1}};
    host_work w = host_begin(false);
    id<MTLComputeCommandEncoder> e = w.encoder;
#define CALL_REFUSED(result, words, ...) CHECK_REFUSED(m, HOST(m, e, __VA_ARGS__), result, words)
    CALL_REFUSED(TQKV_INVALID_ARGUMENT, "encode: ", encode, NULL, NULL, none, none, 1, 0, none);
    CALL_REFUSED(TQKV_OUT_OF_RANGE, "encode: ", encode, &s, NULL, none, none, 4, 5, none);
    CALL_REFUSED(TQKV_INVALID_ARGUMENT, "probe: ", probe, NULL, none, 4, none, none);
    CALL_REFUSED(TQKV_OUT_OF_RANGE, "decode: ", decode, &s, 6, 4, TQKV_ORIGINAL, none);
    CALL_REFUSED(TQKV_INVALID_ARGUMENT, "rotate: ", rotate, none, -1, 64, TQKV_ORIGINAL);
    CALL_REFUSED(TQKV_UNSUPPORTED,
                 "a GPU takes head_dim 32, 48, 64, 80, 96, 128, 192, 256, 448, 512, 1024, and keys of 192 with values "
                 "of 128, of 448 or 512 with a tail of 64",
                 rotate, none, 1, 112, TQKV_ROTATED);
    CALL_REFUSED(TQKV_INVALID_ARGUMENT, "calibrate: ", calibrate, NULL, none, 1, none, 0, 0, TQKV_PAIRS_NONE, none,
                 none);
    CALL_REFUSED(TQKV_INVALID_ARGUMENT, "attend: ", attend, a, none, none, none);
    CALL_REFUSED(TQKV_INVALID_ARGUMENT, "attend_partial: ", attend_partial, a, none, 0, 1, none, none, none, none);
    CALL_REFUSED(TQKV_INVALID_ARGUMENT, "attend_merge: ", attend_merge, a, none, none, none, a, none, none, none);
    CALL_REFUSED(TQKV_INVALID_ARGUMENT, "attend_finish: ", attend_finish, a, none, none, none, none);
    CALL_REFUSED(TQKV_INVALID_ARGUMENT, "attend_batch: ", attend_batch, a, -1, NULL, none, NULL, none, NULL);
    CALL_REFUSED(TQKV_INVALID_ARGUMENT, "index_choose: ", index_choose, &x, none, -1, none, none);
#undef CALL_REFUSED
    CHECK_RESULT(HOST(m, e, rotate, none, 0, 64, TQKV_ROTATED), TQKV_OK);
    CHECK_RESULT(HOST(m, e, attend_batch, a, 0, NULL, none, NULL, none, NULL), TQKV_OK);
    host_end(&w);
}

#ifdef STANDIN
typedef struct wanted_kernel {
    char library[20], kernel[40];
    int group, matrix_group;
} wanted_kernel;

/* A group of matrix_group and more multiplies matrices unless the shaders find another order of their elements. */
static void run_kernel_wanted(const void *parameters)
{
    const wanted_kernel *c = parameters;
    char path[400];
    tqkv_metal *m = NULL;
    REQUIRE(test_host.stale, "needs --stale");
    snprintf(path, sizeof path, "%s/%s.metallib", test_host.stale, c->library);
    const tqkv_metal_desc desc = {.library_path = path, .device = test_host.device};
    CHECK_RESULT(tqkv_metal_create(&desc, &m), TQKV_OK);
    host_attention a;
    host_open_attention(&a, c->group);
    a.metal.matrix_group = c->matrix_group;
    host_work work = host_begin(false);
    CHECK_REFUSED(m, HOST(m, work.encoder, attend, &a.metal, a.q, a.scratch, a.out), TQKV_METAL_ERROR, c->kernel);
    host_end(&work);
    host_close_attention(&a);
    tqkv_metal_destroy(m);
}
#endif

void refusal_host_cases(void)
{
    test_add(run_calls, NULL, 0, "refusals/calls");
#ifdef STANDIN
    const wanted_kernel wanted[] = {{"tables_alone", "tqkv_attend_matrix_d64", 8, 0},
                                    {"matrices", "tqkv_attend_d64", 8, 0},
                                    {"tables_alone", "tqkv_attend_d64", 4, 0},
                                    {"tables_alone", "tqkv_attend_matrix_d64", 2, 2}};
    static const char *const names[] = {"as_expected", "in_another_order", "narrow", "narrow_asked"};
    for (int i = 0; i < 4; i++)
        test_add(run_kernel_wanted, &wanted[i], sizeof wanted[i], "attend/matrices/%s", names[i]);
#endif
}

/* When pipelines and memory are made: by the first call, by prepare, never in a call that was made before; and every
   failure that Metal can report. Only the stand-in tells. */
#include "host.h"
#include "tests/data.h"

#ifdef STANDIN

/* Attention needs two pipelines. If one cannot be built, nothing is recorded; the next call builds both. */
static void run_half_recorded(NO_ROW)
{
    /* each takes memory, a function, a pipeline; the first is built and kept at once */
    const int failing[] = {6, 3, 2, 1};
    host_attention a;
    tqkv_metal *m = host_context();
    REQUIRE(m, "no context");
    host_open_attention(&a, 2);
    host_work work = host_begin(false);
    for (int i = 0; i < 4; i++) {
        standin_fail_at(failing[i]);
        const tqkv_result r = HOST(m, work.encoder, attend, &a.metal, a.q, a.scratch, a.out);
        CHECK(r == TQKV_METAL_ERROR || r == TQKV_OUT_OF_MEMORY, "call %d failed: %s", failing[i],
              tqkv_result_string(r));
        standin_fail_at(0);
    }
    host_end(&work);
    for (int i = 0; i < 65536; i++) CHECK(!((char *)host_contents(a.scratch))[i], "byte %d of scratch is written", i);
    work = host_begin(false);
    CHECK_RESULT(HOST(m, work.encoder, attend, &a.metal, a.q, a.scratch, a.out), TQKV_OK);
    host_end(&work);
    host_check_attention(&a);
    host_close_attention(&a);
    tqkv_metal_destroy(m);
}

/* A GPU on which nothing runs, as virtual ones have done. */
static void run_idle(NO_ROW)
{
    standin_idle(true);
    const tqkv_metal_desc desc = {.library_path = test_host.library};
    CHECK(!host_create(desc, TQKV_METAL_ERROR, "the kernel wrote nothing"), "a context");
    standin_idle(false);
}

/* Plans what a cache of such a desc will append, up to `end` tokens, and attend to. */
static void prepare_cache(tqkv_metal *m, const tqkv_cache_desc *desc, int end)
{
    const tqkv_metal_buffer none = host_none;
    tqkv_metal_buffer memory;
    tqkv_cache *trial = NULL;
    REQUIRE(tqkv_cache_create(desc, &trial) == TQKV_OK, "no cache");
    CHECK_RESULT(tqkv_metal_find(m, trial, &memory), TQKV_OK);
    for (int i = 0; i < end; i++) {
        CHECK_RESULT(HOST_PREPARE(m, cache_append, trial, memory, NULL, none, none, 1, none), TQKV_OK);
        tqkv_metal_cache_appended(trial, 1);
        for (int n = 1; n <= 16; n *= 2)
            CHECK_RESULT(HOST_PREPARE(m, cache_attend, trial, memory, NULL, NULL, none, n, none, none), TQKV_OK);
    }
    tqkv_cache_destroy(trial);
}

/* After prepare no call of a planned kind builds a pipeline. */
static void run_prepared(const void *parameters)
{
    tqkv_metal *m = host_context();
    REQUIRE(m, "no context");
    tqkv_cache_desc desc = *(const tqkv_cache_desc *)parameters;
    desc.n_kv_heads = 1;
    tqkv_cache *cache = NULL;
    const size_t row = (size_t)desc.head_dim + (size_t)desc.tail_dim;
    const int most = desc.calibrate ? 24 : 12;
    float *x = host_floats(4, 9 * 3 * row), *out = test_alloc(9 * 3 * row * sizeof *out);
    desc.metal = m;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    prepare_cache(m, &desc, most);
    standin_fail_at(0);
    int calls = 0;
    for (int end = 1; end <= most; end++, calls++) {
        CHECK_RESULT(tqkv_cache_append(cache, x, desc.shared ? NULL : x, 1), TQKV_OK);
        for (int n = 9; n > 0; n -= 4, calls++) CHECK_RESULT(tqkv_cache_attend(cache, x, n, out), TQKV_OK);
    }
    /* a command buffer, an encoder and a completion each; one or two staging blocks */
    CHECK(standin_calls() <= calls * 3 + 2 * 2, "%d calls that can fail, of %d", standin_calls(), calls);
    CHECK_REFUSED(m, tqkv_metal_prepare(m, NULL), TQKV_INVALID_ARGUMENT, "plan");
    CHECK_REFUSED(m, HOST_PREPARE(m, rotate, host_none, -1, 64, TQKV_ROTATED), TQKV_INVALID_ARGUMENT, "rotate");
    tqkv_cache_destroy(cache);
    free(x);
    free(out);
    tqkv_metal_destroy(m);
}

/* Calls that wait release what they used: a second round leaves no more objects than the first. Recorded again, no call
   builds a pipeline, allocates memory or makes a Metal call that may fail. */
static void run_again(NO_ROW)
{
    tqkv_metal *m = test_host.metal;
    tqkv_cache_desc desc = {.head_dim = 64, .n_kv_heads = 1, .n_heads = 1, .capacity = 8, .ring = true, .metal = m};
    tqkv_cache *cache = NULL;
    float *x = host_floats(4, 64), out[64];
    int live = 0;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_RESULT(tqkv_cache_append(cache, x, x, 1), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(cache, x, 1, out), TQKV_OK);
        CHECK(i == 0 || standin_live_objects() == live, "%d more objects", standin_live_objects() - live);
        CHECK(i < 2 || standin_calls() == 6, "%d calls that can fail", standin_calls());
        if (i == 1) standin_fail_at(0); /* from here on: command buffer, encoder and completion of two calls */
        live = standin_live_objects();
    }
    const tqkv_metal_buffer b[3] = {host_zeros(256), host_zeros(256), host_zeros(4096)};
    host_work work = host_begin(false);
    standin_fail_at(0);
    CHECK_RESULT(tqkv_metal_cache_append(m, work.encoder, cache, b[0], b[0], 1, host_none), TQKV_OK);
    CHECK_RESULT(tqkv_metal_cache_attend(m, work.encoder, cache, b[0], 1, b[2], b[1]), TQKV_OK);
    CHECK(standin_calls() == 0, "%d recorded calls that can fail", standin_calls());
    host_end(&work);
    for (int i = 0; i < 3; i++) host_release(b[i]);
    tqkv_cache_destroy(cache);
    free(x);
}

/* Makes every call once on a new context. Gives the first result other than TQKV_OK and the failure's texts. */
static tqkv_result live_through(char *text, size_t size)
{
    tqkv_metal *m = NULL;
    tqkv_cache *cache = NULL;
    const tqkv_metal_desc desc = {.library_path = test_host.library, .error = text, .error_size = size};
    tqkv_result r = tqkv_metal_create(&desc, &m);
    if (r != TQKV_OK) return r;
    float x[3 * 64], out[64];
    data_rows(1, DATA_GAUSSIAN, x, 3, 64);
    const tqkv_cache_desc cache_desc = {.head_dim = 64, .n_kv_heads = 1, .n_heads = 1, .capacity = 8, .metal = m};
    r = tqkv_cache_create(&cache_desc, &cache);
    if (r == TQKV_OK) r = tqkv_cache_append(cache, x, x, 3);
    if (r != TQKV_OK) CHECK(tqkv_cache_end(cache) == 0, "a failed append counts");
    if (r == TQKV_OK) r = tqkv_cache_attend(cache, x, 1, out);
    tqkv_metal_error(m, text, size);
    if (cache && r != TQKV_OK) { /* the context stays usable: the same call succeeds now */
        standin_fail_at(0);
        if (tqkv_cache_end(cache) == 0) CHECK_RESULT(tqkv_cache_append(cache, x, x, 3), TQKV_OK);
        CHECK_RESULT(tqkv_cache_attend(cache, x, 1, out), TQKV_OK);
    }
    tqkv_cache_destroy(cache);
    tqkv_metal_destroy(m);
    return r;
}

/* The n-th call that can fail fails, for every n. */
static void run_failures(NO_ROW)
{
    char text[400];
    const int live = standin_live_objects();
    int with_words = 0, with_label = 0, retried = 0, n_calls;
    @autoreleasepool {
        standin_fail_at(0);
        CHECK_RESULT(live_through(text, sizeof text), TQKV_OK);
        n_calls = standin_calls();
        printf("%d calls are made to fail, one at a time\n", n_calls);
    }
    CHECK(n_calls > 20, "only %d calls can fail", n_calls);
    for (int n = 1; n <= n_calls; n++) {
        text[0] = 0;
        @autoreleasepool {
            standin_fail_at(n);
            const tqkv_result r = live_through(text, sizeof text);
            CHECK(!strstr(text, "without matrices"), "a failure of one moment cost the matrices: %s", text);
            CHECK(r == TQKV_OK || r == TQKV_METAL_ERROR || r == TQKV_OUT_OF_MEMORY || r == TQKV_UNSUPPORTED,
                  "call %d failed: %s", n, tqkv_result_string(r));
            retried += r == TQKV_OK;
            with_words += strstr(text, STANDIN_WORDS) != NULL;
            with_label += strstr(text, "; tqkv attend faulted") != NULL;
        }
        standin_fail_at(0);
        CHECK(standin_live_objects() == live, "call %d failed: %d objects leaked", n, standin_live_objects() - live);
    }
    /* the product of matrices: command buffer, encoder, function, pipeline and completion */
    CHECK(retried == 5, "%d calls were tried again", retried);
    /* the library, then function and pipeline of tables, encode_kv, attend and attend_merge, and three completions */
    CHECK(with_words == 1 + 2 * 4 + 3, "%d failures of %d came with Metal's words", with_words, n_calls);
    CHECK(with_label == 1, "%d failures named the attention", with_label);
}

#endif

void pipeline_host_cases(void)
{
#ifdef STANDIN
    test_add(run_half_recorded, NULL, 0, "context/half_recorded");
    test_add(run_idle, NULL, 0, "context/idle");
    test_add(run_again, NULL, 0, "context/again");
    const tqkv_cache_desc prepared[] = {
        {.head_dim = 64, .n_heads = 3, .capacity = 12},
        {.head_dim = 64, .n_heads = 2, .capacity = 12, .exact_first = 4, .exact_last = 5},
        {.head_dim = 64, .n_heads = 1, .ring = true, .capacity = 7, .value_format = TQKV_F16, .exact_last = 3},
        {.head_dim = 448, .n_heads = 2, .capacity = 12, .shared = true, .tail_dim = 64},
        {.head_dim = 64, .n_heads = 1, .capacity = 40, .calibrate = 16, .exact_first = 20, .exact_last = 3},
        {.head_dim = 448, .n_heads = 1, .capacity = 40, .calibrate = 16, .shared = true, .tail_dim = 64}};
    const char *const prepared_names[] = {"cache",        "cache_ends", "cache_ring",
                                          "cache_latent", "learns",     "learns_latent"};
    for (int i = 0; i < 6; i++)
        test_add(run_prepared, &prepared[i], sizeof prepared[i], "context/prepared/%s", prepared_names[i]);
    test_add(run_failures, NULL, 0, "context/failures");
#endif
}

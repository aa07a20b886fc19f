/* Where the shaders come from: every kind of library, a source in the place of one that is refused, GPUs that take not
   all kernels. */
#include "host.h"
#include "tests/reference.h"
#include <math.h>
#ifdef STANDIN
#include "tests/metal/standin/standin.h"
#endif

static NSData *library_bytes(void)
{
    NSData *data = [NSData dataWithContentsOfFile:[NSString stringWithUTF8String:test_host.library]];
    CHECK(data, "no library");
    return data;
}

static void run_libraries(const void *parameters)
{
    (void)parameters;
    @autoreleasepool {
        NSError *error = nil;
        NSData *data = library_bytes();
        tqkv_metal_desc path = {0}, bytes = {0}, object = {0};
        path.library_path = test_host.library;
        bytes.library_bytes = [data bytes];
        bytes.library_size = [data length];
        object.device = test_host.device;
        NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:test_host.library]];
        id<MTLLibrary> library = [test_host.device newLibraryWithURL:url error:&error];
        object.library = library;
        const tqkv_metal_desc descs[] = {path, bytes, object};
        for (int i = 0; i < 3; i++) {
            tqkv_metal *m = host_create(descs[i], TQKV_OK, "");
            host_check_works(m);
            tqkv_metal_destroy(m);
        }
        path.library = object.library;
        host_create(path, TQKV_INVALID_ARGUMENT, "more than one library");
        [library release];
    }
    CHECK_RESULT(tqkv_metal_create(NULL, NULL), TQKV_INVALID_ARGUMENT);
    tqkv_metal *m = test_host.metal;
    CHECK_RESULT(tqkv_metal_create(NULL, &m), TQKV_INVALID_ARGUMENT);
    CHECK(!m, "a context on failure");
    tqkv_metal_destroy(NULL);
}

static void run_bad_libraries(const void *parameters)
{
    (void)parameters;
    @autoreleasepool {
        NSData *data = library_bytes();
        tqkv_metal_desc desc = {0};
        desc.library_path = "no/such/file.metallib";
        host_create(desc, TQKV_METAL_ERROR, "no/such/file.metallib");
        desc.library_path = "";
        host_create(desc, TQKV_INVALID_ARGUMENT, "library_path");
        desc.library_path = "tqkv.h"; /* a file that is not a library */
        host_create(desc, TQKV_METAL_ERROR, "tqkv.h");
        desc.library_path = NULL;
        desc.library_bytes = [data bytes];
        const size_t sizes[] = {1, 8, 16, 100, [data length] / 4, [data length] / 2};
        for (int i = 0; i < 6; i++) {
            desc.library_size = sizes[i];
            host_create(desc, TQKV_METAL_ERROR, "library in memory");
        }
    }
}

/* A library that is refused, where a source takes its place: a path, or as many bytes of the library. */
typedef struct refused_library {
    const char *name, *path;
    size_t size;
    const char *words; /* why, in the text */
} refused_library;

static void check_refused_library(const char *path, size_t size, const char *words)
{
    char expected[200];
    @autoreleasepool {
        tqkv_metal_desc desc = {.library_path = path, .library_source = host_source()};
        if (!path) desc.library_bytes = [library_bytes() bytes], desc.library_size = size;
        tqkv_metal *m = host_create(desc, TQKV_OK, "library refused: ");
        tqkv_metal_error(m, expected, sizeof expected);
        CHECK(strstr(expected, words) && strstr(expected, "; compiled from source"), "the text is \"%s\"", expected);
        host_check_works(m);
        tqkv_metal_destroy(m);
        desc.library_source = NULL;
        tqkv_metal_destroy(host_create(desc, TQKV_METAL_ERROR, words));
        desc.library_source = "int nothing;"; /* both are refused: the text has both reasons */
        host_create(desc, TQKV_METAL_ERROR, words);
        host_create(desc, TQKV_METAL_ERROR, "; then: ");
    }
}

static void run_source_fallback(const void *parameters)
{
    const refused_library *c = parameters;
    check_refused_library(c->path, c->size, c->words);
}

/* Without a library the source is compiled, and with a good one it is not. */
static void run_source(const void *parameters)
{
    (void)parameters;
    @autoreleasepool {
        tqkv_metal_desc desc = {.library_source = host_source()};
        tqkv_metal *m = host_create(desc, TQKV_OK, "");
        char text[100] = "untouched";
        tqkv_metal_error(m, text, sizeof text);
        CHECK(!text[0], "a text without a failure: %s", text);
        host_check_works(m);
        tqkv_metal_destroy(m);
        desc.library_source = "int nothing;";
        if (!test_host.embedded) host_create(desc, TQKV_METAL_ERROR, "library_source: ");
        desc.library_source = "";
        if (!test_host.embedded) host_create(desc, TQKV_INVALID_ARGUMENT, "library_source is empty");
        desc.library_source = "int nothing;"; /* not read: the library is good */
        desc.library_path = test_host.library;
        m = host_create(desc, TQKV_OK, "");
        tqkv_metal_error(m, text, sizeof text);
        CHECK(!text[0], "a good library is refused: %s", text);
        tqkv_metal_destroy(m);
        desc.library_path = ""; /* a wrong argument stays one */
        desc.library_source = host_source();
        host_create(desc, TQKV_INVALID_ARGUMENT, "library_path");
    }
}

static void run_embedded(const void *parameters)
{
    (void)parameters;
    tqkv_metal_desc desc = {0};
    const bool is_embedded = test_host.embedded;
    tqkv_metal *m = host_create(desc, is_embedded ? TQKV_OK : TQKV_INVALID_ARGUMENT, is_embedded ? "" : "no library");
    if (m) host_check_works(m);
    tqkv_metal_destroy(m);
}

#ifdef STANDIN

/* -- What only the stand-in can do -- */

static void run_stale(const void *parameters)
{
    char path[400];
    const char *what = parameters;
    tqkv_metal_desc desc = {0};
    REQUIRE(test_host.stale, "needs --stale");
    snprintf(path, sizeof path, "%s/%s.metallib", test_host.stale, what);
    desc.library_path = path;
    tqkv_metal_destroy(host_create(desc, TQKV_TABLE_MISMATCH, what));
}

/* With a library that lacks the kernels, each call says so and records nothing. */
static void run_missing_kernels(const void *parameters)
{
    (void)parameters;
    char path[400];
    tqkv_metal_desc desc = {0};
    REQUIRE(test_host.stale, "needs --stale");
    snprintf(path, sizeof path, "%s/tables_alone.metallib", test_host.stale);
    desc.library_path = path;
    desc.device = test_host.device;
    tqkv_metal *m = host_create(desc, TQKV_OK, "");
    REQUIRE(m, "no context");
    const tqkv_metal_buffer rows = host_zeros(512);
    ((float *)host_contents(rows))[5] = 1.0f;
    host_work work = host_begin(false);
    CHECK_REFUSED(m, HOST(m, work.encoder, rotate, rows, 2, 64, TQKV_ROTATED), TQKV_METAL_ERROR, "tqkv_rotate_d64");
    host_end(&work);
    CHECK(((float *)host_contents(rows))[5] == 1.0f, "rotated");
    host_release(rows);
    tqkv_metal_destroy(m);
}

/* A stale library, and one that lacks kernels: the source takes their place. */
static void run_source_of_stale(const void *parameters)
{
    char path[400];
    const refused_library *c = parameters;
    REQUIRE(test_host.stale, "needs --stale");
    snprintf(path, sizeof path, "%s/%s.metallib", test_host.stale, c->path);
    @autoreleasepool {
        tqkv_metal_desc desc = {.library_path = path, .library_source = host_source()};
        char text[400];
        tqkv_metal *m = host_create(desc, TQKV_OK, c->words);
        host_check_works(m); /* a library without kernels is no stale one: each is compiled when it is needed */
        tqkv_metal_error(m, text, sizeof text);
        CHECK(!strncmp(text, "library refused: ", 17) && strstr(text, "; compiled from source"), "the text is \"%s\"",
              text);
        tqkv_metal_destroy(m);
    }
}

/* A good library one of whose kernels Metal refuses: the source serves that one. */
static void run_refused_kernel(const void *parameters)
{
    (void)parameters;
    @autoreleasepool {
        char text[400];
        tqkv_metal_desc desc = {.library_path = test_host.library, .library_source = host_source()};
        desc.device = test_host.device;
        const tqkv_metal_buffer rows = host_zeros(512);
        standin_refuse("tqkv_rotate_d64", false);
        tqkv_metal *m = host_create(desc, TQKV_OK, "");
        host_check_works(m);
        tqkv_metal_error(m, text, sizeof text);
        CHECK(!strcmp(text, "library refused: tqkv_rotate_d64: refused by name; compiled from source"), "%s", text);
        tqkv_metal_destroy(m);
        m = host_create(desc, TQKV_OK, "");
        standin_refuse("tqkv_rotate_d64", true);
        host_work work = host_begin(false);
        CHECK_REFUSED(m, HOST(m, work.encoder, rotate, rows, 2, 64, TQKV_ROTATED), TQKV_METAL_ERROR,
                      "refused by name; then: tqkv_rotate_d64: refused by name");
        host_end(&work);
        standin_refuse(NULL, false);
        tqkv_metal_destroy(m);
        host_release(rows);
    }
}

/* A GPU without matrices: the context can be made all the same. */
static void run_no_product(const void *parameters)
{
    (void)parameters;
    const tqkv_metal_desc desc = {.library_path = test_host.library};
    standin_refuse("tqkv_tables 1", true);
    tqkv_metal *m = host_create(desc, TQKV_OK, "tqkv_tables: refused by name; attention without matrices");
    standin_refuse(NULL, false);
    const tqkv_cache_desc cache = {.head_dim = 64, .n_kv_heads = 1, .n_heads = 4};
    standin_refuse("attend_matrix", true); /* nobody asks for it */
    CHECK_RESULT(tqkv_metal_self_test(m, &cache), TQKV_OK);
    standin_refuse(NULL, false);
    tqkv_metal_destroy(m);
}

/* Where Metal takes no kernel that multiplies matrices, a context attends without them and says so. */
static void run_without_matrices(const void *parameters)
{
    const int way = *(const int *)parameters; /* 0: a call that waits, 1: prepare, 2: recorded, 3: in a batch */
    char text[400];
    const tqkv_cache_desc desc = {.head_dim = 64, .n_kv_heads = 1, .n_heads = 8};
    const tqkv_metal_buffer arguments = host_zeros(1024);
    host_attention a;
    tqkv_metal *m = host_context();
    REQUIRE(m, "no context");
    host_open_attention(&a, 8);
    standin_refuse("attend_matrix", true);
    if (way == 0) CHECK_RESULT(tqkv_metal_self_test(m, &desc), TQKV_OK);
    if (way == 1) CHECK_RESULT(HOST_PREPARE(m, attend, &a.metal, host_none, host_none, host_none), TQKV_OK);
    host_work work = host_begin(false);
    for (int i = 0; i < 2 && way == 3; i++) { /* planned with matrices, then without */
        const tqkv_result r = HOST(m, work.encoder, attend_batch, &a.metal, 1, &a.q, arguments,
                                   host_contents(arguments), a.scratch, &a.out);
        CHECK_RESULT(r, i ? TQKV_OK : TQKV_UNSUPPORTED);
        a.metal.matrix_group = INT_MAX;
    }
    if (way != 3) CHECK_RESULT(HOST(m, work.encoder, attend, &a.metal, a.q, a.scratch, a.out), TQKV_OK);
    host_end(&work);
    standin_refuse(NULL, false);
    tqkv_metal_error(m, text, sizeof text);
    CHECK(strstr(text, way == 3 ? "attend_batch: planned with" : "refused by name; attention without matrices"),
          "the text is \"%s\"", text);
    host_check_attention(&a);
    host_close_attention(&a);
    host_release(arguments);
    tqkv_metal_destroy(m);
}

/* A refusal of another kernel of such a call is one of the call alone: the context goes on with matrices,
 * which an index needs. */
static void run_with_matrices(const void *parameters)
{
    host_attention a;
    tqkv_metal *m = host_context();
    (void)parameters;
    REQUIRE(m, "no context");
    host_open_attention(&a, 4);
    const tqkv_metal_index x = {.keys = &a.gpu, .index = {.n_heads = 4, .n_queries = 1, .end = 64}};
    a.metal.list = host_zeros(4);
    a.metal.attention.list.length = a.metal.attention.list.block = 1;
    host_work work = host_begin(false);
    standin_refuse("attend_list", true);
    CHECK_REFUSED(m, HOST(m, work.encoder, attend, &a.metal, a.q, a.scratch, a.out), TQKV_METAL_ERROR,
                  "tqkv_attend_list");
    standin_refuse(NULL, false);
    CHECK_RESULT(HOST(m, work.encoder, index_scores, &x, a.q, a.out), TQKV_OK);
    host_end(&work);
    host_release(a.metal.list);
    host_close_attention(&a);
    tqkv_metal_destroy(m);
}

enum { BY_PATH, BY_BYTES, BY_OBJECT, EMBEDDED };

/* With a good library, given in that form, and a source, each call that can fail fails once: the context works from the
   source and says so, or the result is that of the failure. */
static void run_source_failures(const void *parameters)
{
    const int form = *(const int *)parameters, live = standin_live_objects();
    int from_source = 0, n_calls;
    @autoreleasepool {
        tqkv_metal_desc desc = {.device = test_host.device, .library_source = host_source()};
        NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:test_host.library]];
        id<MTLLibrary> library = form == BY_OBJECT ? [test_host.device newLibraryWithURL:url error:NULL] : nil;
        if (form == BY_PATH) desc.library_path = test_host.library;
        if (form == BY_BYTES)
            desc.library_bytes = [library_bytes() bytes], desc.library_size = [library_bytes() length];
        desc.library = library;
        standin_fail_at(0);
        tqkv_metal_destroy(host_create(desc, TQKV_OK, ""));
        n_calls = standin_calls();
        for (int n = 1; n <= n_calls; n++) {
            char text[400] = "";
            tqkv_metal *m = NULL;
            desc.error = text;
            desc.error_size = sizeof text;
            standin_fail_at(n);
            const tqkv_result r = tqkv_metal_create(&desc, &m);
            standin_fail_at(0);
            const bool fell_back = strstr(text, "; compiled from source") != NULL;
            const bool without = strstr(text, "attention without matrices") != NULL;
            CHECK((fell_back || without || !text[0]) == (r == TQKV_OK), "call %d failed: %s, \"%s\"", n,
                  tqkv_result_string(r), text);
            if (r == TQKV_OK) host_check_works(m);
            from_source += fell_back;
            tqkv_metal_destroy(m);
        }
        [library release];
    }
    CHECK(standin_live_objects() == live, "%d objects leaked", standin_live_objects() - live);
    /* the library; function and pipeline of tables; command buffer, encoder and completion */
    CHECK(from_source == (form != BY_OBJECT) + 2 + 3, "%d of %d failures led to the source", from_source, n_calls);
}

#endif

void library_host_cases(void)
{
    test_add(run_embedded, NULL, 0, "context/embedded");
    test_add(run_libraries, NULL, 0, "context/libraries");
    test_add(run_bad_libraries, NULL, 0, "context/bad_libraries");
    test_add(run_source, NULL, 0, "context/source/alone");
    const refused_library refused[] = {{"no_file", "no/such/file.metallib", 0, "no/such/file.metallib"},
                                       {"no_library", "tqkv.h", 0, "tqkv.h"},
                                       {"empty", NULL, 1, "library in memory"},
                                       {"truncated", NULL, 100, "library in memory"}};
    for (int i = 0; i < 4; i++)
        test_add(run_source_fallback, &refused[i], sizeof refused[i], "context/source/%s", refused[i].name);
#ifdef STANDIN
    const char *const stale[] = {"codebook_2",  "codebook_8", "boundaries_2", "boundaries_8", "factors_2",
                                 "factors_8",   "signs",      "version",      "rows_args",    "rotate_args",
                                 "attend_args", "merge_args", "batch_item",   "dispatch"};
    for (size_t i = 0; i < sizeof stale / sizeof *stale; i++)
        test_add(run_stale, stale[i], strlen(stale[i]) + 1, "context/stale/%s", stale[i]);
    const refused_library stale_libraries[] = {{"stale", "signs", 0, "signs differs"},
                                               {"no_kernels", "tables_alone", 0, ""}};
    for (int i = 0; i < 2; i++)
        test_add(run_source_of_stale, &stale_libraries[i], sizeof stale_libraries[i], "context/source/%s",
                 stale_libraries[i].name);
    const char *const forms[] = {"path", "bytes", "object", "embedded"};
    for (int i = BY_PATH; i <= EMBEDDED; i++)
        if ((i == EMBEDDED) == test_host.embedded)
            test_add(run_source_failures, &i, sizeof i, "context/source/failures/%s", forms[i]);
    test_add(run_missing_kernels, NULL, 0, "context/missing_kernels");
    test_add(run_refused_kernel, NULL, 0, "context/source/kernel");
    test_add(run_no_product, NULL, 0, "context/no_product");
    for (int i = 0; i < 4; i++) test_add(run_without_matrices, &i, sizeof i, "context/without_matrices/%d", i);
    test_add(run_with_matrices, NULL, 0, "context/with_matrices");
#endif
}

/* Where the shaders come from: every kind of library, a source in the place of one that is refused, GPUs that take not
   all kernels. */
#include "host.h"

static NSData *library_bytes(void)
{
    NSData *data = [NSData dataWithContentsOfFile:[NSString stringWithUTF8String:test_host.library]];
    CHECK(data, "no library");
    return data;
}

enum { BY_PATH, BY_BYTES, BY_OBJECT, EMBEDDED };

/* A good library, given in that form. *object is the caller's to release. */
static tqkv_metal_desc good_library(int form, id<MTLLibrary> *object)
{
    tqkv_metal_desc desc = {.device = test_host.device};
    NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:test_host.library]];
    *object = form == BY_OBJECT ? [test_host.device newLibraryWithURL:url error:NULL] : nil;
    desc.library = *object;
    if (form == BY_PATH) desc.library_path = test_host.library;
    if (form == BY_BYTES) desc.library_bytes = [library_bytes() bytes], desc.library_size = [library_bytes() length];
    return desc;
}

static void run_libraries(NO_ROW)
{
    @autoreleasepool {
        for (int form = BY_PATH; form <= BY_OBJECT; form++) {
            id<MTLLibrary> object;
            tqkv_metal_desc desc = good_library(form, &object);
            tqkv_metal *m = host_create(desc, TQKV_OK, "");
            host_check_works(m);
            tqkv_metal_destroy(m);
            desc.library_path = test_host.library;
            if (form != BY_PATH) host_create(desc, TQKV_INVALID_ARGUMENT, "more than one library");
            [object release];
        }
    }
    CHECK_RESULT(tqkv_metal_create(NULL, NULL), TQKV_INVALID_ARGUMENT);
    tqkv_metal *m = test_host.metal;
    CHECK_RESULT(tqkv_metal_create(NULL, &m), TQKV_INVALID_ARGUMENT);
    CHECK(!m, "a context on failure");
    tqkv_metal_destroy(NULL);
}

/* A library that is refused: a path, one in the folder of stale ones, or as many bytes of a good library. */
typedef struct refused_library {
    const char *name, *path;
    bool stale, with_source; /* with_source: also in its place */
    size_t size;
    tqkv_result result;
    const char *words; /* why, in the text */
} refused_library;

static void check_fell_back(tqkv_metal *m, const char *words)
{
    host_check_works(m);
    const char *text = host_error(m);
    CHECK(!strncmp(text, "library refused: ", 17) && strstr(text, words) && strstr(text, "; compiled from source"),
          "the text is \"%s\"", text);
    tqkv_metal_destroy(m);
}

/* Refused alone; with a source, which takes its place; and with a source that is refused, too. */
static void run_refused(const void *parameters)
{
    const refused_library *c = parameters;
    char path[400];
    REQUIRE(!c->stale || test_host.stale, "needs --stale");
    if (c->stale)
        snprintf(path, sizeof path, "%s/%s.metallib", test_host.stale, c->path);
    else
        snprintf(path, sizeof path, "%s", c->path);
    @autoreleasepool {
        tqkv_metal_desc desc = {.library_path = path};
        if (c->size)
            desc.library_path = NULL, desc.library_bytes = [library_bytes() bytes], desc.library_size = c->size;
        tqkv_metal_destroy(host_create(desc, c->result, c->words));
        if (!c->with_source) return;
        desc.library_source = host_source();
        check_fell_back(host_create(desc, TQKV_OK, "library refused: "), c->words);
        desc.library_source = "int nothing;"; /* the text has both reasons */
        host_create(desc, TQKV_METAL_ERROR, c->words);
        host_create(desc, TQKV_METAL_ERROR, "; then: ");
    }
}

/* Without a library the source is compiled, and with a good one it is not. */
static void run_source(NO_ROW)
{
    @autoreleasepool {
        tqkv_metal_desc desc = {.library_source = host_source()};
        tqkv_metal *m = host_create(desc, TQKV_OK, "");
        CHECK(!host_error(m)[0], "a text without a failure: %s", host_error(m));
        host_check_works(m);
        tqkv_metal_destroy(m);
        desc.library_source = "int nothing;";
        if (!test_host.embedded) host_create(desc, TQKV_METAL_ERROR, "library_source: ");
        desc.library_source = "";
        if (!test_host.embedded) host_create(desc, TQKV_INVALID_ARGUMENT, "library_source is empty");
        desc.library_source = "int nothing;"; /* not read: the library is good */
        desc.library_path = test_host.library;
        m = host_create(desc, TQKV_OK, "");
        CHECK(!host_error(m)[0], "a good library is refused: %s", host_error(m));
        tqkv_metal_destroy(m);
        desc.library_path = ""; /* a wrong argument stays one */
        for (int i = 0; i < 2; i++) {
            desc.library_source = i ? host_source() : NULL;
            host_create(desc, TQKV_INVALID_ARGUMENT, "library_path");
        }
    }
}

static void run_embedded(NO_ROW)
{
    tqkv_metal_desc desc = {0};
    const bool is_embedded = test_host.embedded;
    tqkv_metal *m = host_create(desc, is_embedded ? TQKV_OK : TQKV_INVALID_ARGUMENT, is_embedded ? "" : "no library");
    if (m) host_check_works(m);
    tqkv_metal_destroy(m);
}

#ifdef STANDIN

/* -- What only the stand-in can do -- */

/* A library that lacks kernels is no stale one: each is compiled when it is needed. */
static void run_no_kernels(NO_ROW)
{
    char path[400];
    REQUIRE(test_host.stale, "needs --stale");
    snprintf(path, sizeof path, "%s/tables_alone.metallib", test_host.stale);
    @autoreleasepool {
        const tqkv_metal_desc desc = {.library_path = path, .library_source = host_source()};
        check_fell_back(host_create(desc, TQKV_OK, ""), "");
    }
}

/* A good library one of whose kernels Metal refuses: the source serves that one. */
static void run_refused_kernel(NO_ROW)
{
    @autoreleasepool {
        const tqkv_metal_desc desc = {
            .device = test_host.device, .library_path = test_host.library, .library_source = host_source()};
        const tqkv_metal_buffer rows = host_zeros(512);
        standin_refuse("tqkv_rotate_d64", false);
        tqkv_metal *m = host_create(desc, TQKV_OK, "");
        host_check_works(m);
        const char *text = host_error(m);
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
static void run_no_product(NO_ROW)
{
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
    const char *words = way == 3 ? "attend_batch: planned with" : "refused by name; attention without matrices";
    CHECK(strstr(host_error(m), words), "the text is \"%s\"", host_error(m));
    host_check_attention(&a);
    host_close_attention(&a);
    host_release(arguments);
    tqkv_metal_destroy(m);
}

/* A refusal of another kernel of such a call is one of the call alone: the context goes on with matrices,
 * which an index needs. */
static void run_with_matrices(NO_ROW)
{
    host_attention a;
    tqkv_metal *m = host_context();
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

/* With a good library, given in that form, and a source, each call that can fail fails once: the context works from the
   source and says so, or the result is that of the failure. */
static void run_source_failures(const void *parameters)
{
    const int form = *(const int *)parameters, live = standin_live_objects();
    int from_source = 0, n_calls;
    @autoreleasepool {
        id<MTLLibrary> object;
        tqkv_metal_desc desc = good_library(form, &object);
        desc.library_source = host_source();
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
        [object release];
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
    test_add(run_source, NULL, 0, "context/source/alone");
    const refused_library refused[] = {
        {"no_file", "no/such/file.metallib", false, true, 0, TQKV_METAL_ERROR, "no/such/file.metallib"},
        {"no_library", "tqkv.h", false, true, 0, TQKV_METAL_ERROR, "tqkv.h"},
        {"empty", "", false, true, 1, TQKV_METAL_ERROR, "library in memory"},
        {"no_size", "", false, false, 8, TQKV_METAL_ERROR, "library in memory"},
        {"size_alone", "", false, false, 16, TQKV_METAL_ERROR, "library in memory"},
        {"truncated", "", false, true, 100, TQKV_METAL_ERROR, "library in memory"},
        {"cut", "", false, false, 100000, TQKV_METAL_ERROR, "library in memory"}};
    for (int i = 0; i < 7; i++)
        test_add(run_refused, &refused[i], sizeof refused[i], "context/source/%s", refused[i].name);
#ifdef STANDIN
    const char *const stale[] = {"codebook_2",  "codebook_8", "boundaries_2", "boundaries_8", "factors_2",
                                 "factors_8",   "signs",      "version",      "rows_args",    "rotate_args",
                                 "attend_args", "merge_args", "batch_item",   "dispatch"};
    for (size_t i = 0; i < sizeof stale / sizeof *stale; i++) {
        const refused_library row = {stale[i], stale[i], true, !strcmp(stale[i], "signs"), 0, TQKV_TABLE_MISMATCH,
                                     stale[i]};
        test_add(run_refused, &row, sizeof row, "context/stale/%s", stale[i]);
    }
    test_add(run_no_kernels, NULL, 0, "context/source/no_kernels");
    const char *const forms[] = {"path", "bytes", "object", "embedded"};
    for (int i = BY_PATH; i <= EMBEDDED; i++)
        if ((i == EMBEDDED) == test_host.embedded)
            test_add(run_source_failures, &i, sizeof i, "context/source/failures/%s", forms[i]);
    test_add(run_refused_kernel, NULL, 0, "context/source/kernel");
    test_add(run_no_product, NULL, 0, "context/no_product");
    for (int i = 0; i < 4; i++) test_add(run_without_matrices, &i, sizeof i, "context/without_matrices/%d", i);
    test_add(run_with_matrices, NULL, 0, "context/with_matrices");
#endif
}

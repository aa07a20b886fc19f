/* >>context: libraries, the device, create and destroy */

#ifdef TQKV_METALLIB_EMBED
/* The size, and 16 bytes on the library. Labels that start with L make no symbols, where a linker could split them. */
__asm__(
#ifdef __APPLE__
    ".pushsection __TEXT,__const\n"
    ".balign 16\n_tqkv__embedded:\n"
#else
    ".pushsection .rodata\n"
    ".balign 16\ntqkv__embedded:\n"
#endif
    ".quad Ltqkv_end - Ltqkv_begin\n.quad 0\n"
    "Ltqkv_begin:\n.incbin \"" TQKV_METALLIB_EMBED "\"\nLtqkv_end:\n"
    ".popsection\n");
extern const struct {
    uint64_t size, zero;
    unsigned char bytes[];
} tqkv__embedded;
#endif

static tqkv_result tqkv__load_bytes(tqkv_metal *m, const void *bytes, size_t size)
{
    NSError *error = nil;
    dispatch_data_t data = dispatch_data_create(bytes, size, NULL, DISPATCH_DATA_DESTRUCTOR_DEFAULT); /* a copy */
    m->library = [m->device newLibraryWithData:data error:&error];
#if !(__has_feature(objc_arc) && OS_OBJECT_USE_OBJC)
    dispatch_release(data); /* not an object of Objective-C, or one without ARC */
#endif
    return m->library ? TQKV_OK : tqkv__fail(m, TQKV_METAL_ERROR, "library in memory: %s", tqkv__error_text(error));
}

static tqkv_result tqkv__load_path(tqkv_metal *m, const char *path)
{
    NSError *error = nil;
    NSString *name = [NSString stringWithUTF8String:path];
    if (!name || !path[0]) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "library_path is empty or not UTF-8");
    m->library = [m->device newLibraryWithURL:[NSURL fileURLWithPath:name] error:&error];
    return m->library ? TQKV_OK : tqkv__fail(m, TQKV_METAL_ERROR, "%s: %s", path, tqkv__error_text(error));
}

/* Kernels are compiled when they are needed. */
static tqkv_result tqkv__load_source(tqkv_metal *m, const char *source)
{
    NSString *text = [NSString stringWithUTF8String:source];
    if (!text || !source[0]) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "library_source is empty or not UTF-8");
    m->source = TQKV__RETAIN(text);
    return TQKV_OK;
}

static bool tqkv__has_library(const tqkv_metal_desc *desc)
{
#ifdef TQKV_METALLIB_EMBED
    (void)desc;
    return true;
#else
    return desc->library_path || desc->library_bytes || desc->library;
#endif
}

static tqkv_result tqkv__load_library(tqkv_metal *m, const tqkv_metal_desc *desc)
{
    id<MTLLibrary> library = desc->library;
    if ((desc->library_path != NULL) + (desc->library_bytes != NULL) + (library != nil) > 1)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "more than one library");
    if (desc->library_path) return tqkv__load_path(m, desc->library_path);
    if (desc->library_bytes) return tqkv__load_bytes(m, desc->library_bytes, desc->library_size);
    if (library && !tqkv__is_device(m, [library device]))
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "the library is of another device");
    if (library) {
        m->library = TQKV__RETAIN(library);
        return TQKV_OK;
    }
#ifdef TQKV_METALLIB_EMBED
    return tqkv__load_bytes(m, tqkv__embedded.bytes, (size_t)tqkv__embedded.size);
#else
    if (desc->library_source) return tqkv__load_source(m, desc->library_source);
    return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "no library: none given, and built without TQKV_METALLIB_EMBED");
#endif
}

static tqkv_result tqkv__open_device(tqkv_metal *m, const tqkv_metal_desc *desc)
{
    id<MTLDevice> given = desc->device;
    m->device = given ? TQKV__RETAIN(given) : MTLCreateSystemDefaultDevice();
    if (!m->device) return tqkv__fail(m, TQKV_UNSUPPORTED, "there is no Metal device");
#ifndef TQKV_METAL_ANY_FAMILY /* for tests on virtual machines, whose GPU calls itself Apple5 */
    if (![m->device supportsFamily:MTLGPUFamilyApple7])
        return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: not of the GPU family Apple7 or later",
                          [[m->device name] UTF8String]);
#endif
    m->queue = [m->device newCommandQueue];
    if (!m->queue) return tqkv__fail(m, TQKV_METAL_ERROR, "Metal gave no command queue");
    /* As long as the largest struct of an argument: Metal's validation compares the two, also for arguments that a
       pipeline does not read. Untracked: Metal must not order dispatches because they share this buffer. */
    m->unused = [m->device newBufferWithLength:sizeof(tqkv__batch_item)
                                       options:MTLResourceStorageModePrivate | MTLResourceHazardTrackingModeUntracked];
    return m->unused ? TQKV_OK : tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no buffer");
}

static bool tqkv__all_zero(const char *bytes, size_t size)
{
    size_t n = 0;
    while (n < size && !bytes[n]) n++;
    return n == size;
}

/* Runs the product of two matrices. A failure may be of the moment: it is tried again. Matrices that lie otherwise, or
   a kernel that Metal refuses twice, cost the context its matrices; one that was built and did not run is a failure. */
static tqkv_result tqkv__check_product(tqkv_metal *m, tqkv_metal_plan *plan, const void *report)
{
    char text[300];
    tqkv_result r = tqkv__run_plan(m, plan);
    if (r == TQKV_METAL_ERROR && (r = tqkv__run_plan(m, plan)) == TQKV_OK) tqkv__fail(m, r, "%s", "");
    if (r != TQKV_OK && (r != TQKV_METAL_ERROR || tqkv__is_built(m, &plan->d[0].kernel))) return r;
    m->matrices = r == TQKV_OK && tqkv_metal_has_matrices(report);
    tqkv_metal_error(m, text, sizeof text);
    if (!m->matrices)
        tqkv__fail(m, r, "%s; attention without matrices", r == TQKV_OK ? "this GPU's matrices lie otherwise" : text);
    return TQKV_OK;
}

/* Compares the shaders' tables with those of tqkv.h. Then it looks where the GPU's matrices lie: attention can do
   without them, so a failure there is only a text. */
static tqkv_result tqkv__check_tables(tqkv_metal *m)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer buffer;
    const size_t size = TQKV_METAL_REPORT;
    tqkv__memory *block = tqkv__take_staging(m, 1, &size, &buffer);
    if (!block) return TQKV_OUT_OF_MEMORY;
    memset(block->begin, 0, size);
    tqkv_metal_plan_tables(buffer, &plan);
    plan.n = 1; /* the other one may fail */
    tqkv_result r = tqkv__run_plan(m, &plan);
    const char *stale = r == TQKV_OK ? tqkv_metal_stale_table(block->begin) : NULL;
    if (stale && tqkv__all_zero(block->begin, size))
        r = tqkv__fail(m, TQKV_METAL_ERROR, "tables: the kernel wrote nothing");
    else if (stale)
        r = tqkv__fail(m, TQKV_TABLE_MISMATCH, "the library's %s differs from that of tqkv.h", stale);
    if (r == TQKV_OK) {
        plan.call = "matrices";
        plan.d[0] = plan.d[1];
        r = tqkv__check_product(m, &plan, block->begin);
    }
    tqkv__give_back(m, block);
    return r;
}

static void tqkv__drop_kept(tqkv__kept **list)
{
    while (*list) {
        tqkv__kept *k = *list;
        *list = k->next;
        tqkv__free_kept(k);
    }
}

static void tqkv__drop_library(tqkv_metal *m)
{
    tqkv__drop_kept(&m->pipelines);
    tqkv__drop_kept(&m->compiled);
    TQKV__RELEASE(m->library);
    TQKV__RELEASE(m->source);
}

/* The library, or the source if there is one and Metal refuses the library. A wrong argument is refused either way.
   With both, single kernels that Metal refuses come from the source, too. */
static tqkv_result tqkv__open_library(tqkv_metal *m, const tqkv_metal_desc *desc)
{
    char library_text[180];
    const bool may_fall_back = desc->library_source && tqkv__has_library(desc);
    tqkv_result r = tqkv__load_library(m, desc);
    if (r == TQKV_OK) r = tqkv__check_tables(m);
    if (r == TQKV_OK && may_fall_back) return tqkv__load_source(m, desc->library_source);
    if (!may_fall_back || (r != TQKV_METAL_ERROR && r != TQKV_TABLE_MISMATCH)) return r;
    tqkv_metal_error(m, library_text, sizeof library_text);
    tqkv__drop_library(m);
    r = tqkv__load_source(m, desc->library_source);
    if (r == TQKV_OK) r = tqkv__check_tables(m);
    return tqkv__fell_back(m, r, library_text);
}

tqkv_result tqkv_metal_create(const tqkv_metal_desc *desc, tqkv_metal **out)
{
    if (!out) return TQKV_INVALID_ARGUMENT;
    *out = NULL;
    if (!desc) return TQKV_INVALID_ARGUMENT;
    if (desc->error && desc->error_size) snprintf(desc->error, desc->error_size, "out of memory");
    tqkv_metal *m = (tqkv_metal *)calloc(1, sizeof *m);
    if (!m) return TQKV_OUT_OF_MEMORY;
    if (pthread_mutex_init(&m->lock, NULL)) {
        free(m);
        return TQKV_OUT_OF_MEMORY;
    }
    m->backend.memory.alloc = tqkv__memory_alloc;
    m->backend.memory.free = tqkv__memory_free;
    m->backend.memory.user = m;
    m->backend.has_kernels = tqkv__has_kernels;
    m->backend.append = tqkv__cache_append;
    m->backend.attend = tqkv__attend_cache;
    tqkv_result r;
    @autoreleasepool {
        r = tqkv__open_device(m, desc);
        if (r == TQKV_OK) r = tqkv__open_library(m, desc);
    }
    tqkv_metal_error(m, desc->error, desc->error_size);
    if (r == TQKV_OK)
        *out = m;
    else
        tqkv_metal_destroy(m);
    return r;
}

void tqkv_metal_destroy(tqkv_metal *m)
{
    if (!m) return;
    tqkv__drop_library(m);
    while (m->memory) tqkv__memory_free(m, m->memory->begin, m->memory->size);
    TQKV__RELEASE(m->unused);
    TQKV__RELEASE(m->queue);
    TQKV__RELEASE(m->device);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

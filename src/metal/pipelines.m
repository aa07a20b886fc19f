/* >>pipelines: built on first use, kept as long as the context */

/* The caller holds the lock. A list is enough: a program has one pipeline a format pair, head_dim and column count. */
static const tqkv__kept *tqkv__find_kept(const tqkv__kept *list, const tqkv_metal_kernel *kernel)
{
    while (list && memcmp(&list->kernel, kernel, sizeof *kernel) != 0) list = list->next;
    return list;
}

static void tqkv__free_kept(tqkv__kept *k)
{
    TQKV__RELEASE(k->object);
    free(k);
}

/* Keeps `made` and returns it. If another thread was faster: frees `made` and returns the other's. */
static const tqkv__kept *tqkv__keep(tqkv_metal *m, tqkv__kept **list, tqkv__kept *made)
{
    pthread_mutex_lock(&m->lock);
    const tqkv__kept *k = tqkv__find_kept(*list, &made->kernel);
    if (!k) {
        made->next = *list;
        *list = made;
    }
    pthread_mutex_unlock(&m->lock);
    if (k) tqkv__free_kept(made);
    return k ? k : made;
}

/* Finds a kernel, or makes and keeps it: outside the lock, because that takes up to a second. */
static tqkv_result tqkv__get_kept(tqkv_metal *m, tqkv__kept **list, const tqkv_metal_kernel *kernel,
                                  tqkv_result (*make)(tqkv_metal *, tqkv__kept *), const tqkv__kept **out)
{
    tqkv_result r;
    pthread_mutex_lock(&m->lock);
    *out = tqkv__find_kept(*list, kernel);
    pthread_mutex_unlock(&m->lock);
    if (*out) return TQKV_OK;
    tqkv__kept *made = (tqkv__kept *)calloc(1, sizeof *made);
    if (!made) return tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no memory for a pipeline");
    made->kernel = *kernel;
    @autoreleasepool {
        r = make(m, made);
    }
    if (r == TQKV_OK)
        *out = tqkv__keep(m, list, made);
    else
        tqkv__free_kept(made);
    return r;
}

static NSString *tqkv__function_name(const tqkv_metal_kernel *kernel)
{
    return [NSString stringWithUTF8String:kernel->name];
}

static void tqkv__set_values(const tqkv_metal_kernel *kernel, MTLFunctionConstantValues *values)
{
    for (int i = 0; i < TQKV_METAL_CONSTANTS; i++) {
        const uint32_t value = kernel->constants[i] - 1u;
        const bool flag = value != 0;
        if (!kernel->constants[i]) continue;
        if (TQKV_METAL_IS_UINT(i))
            [values setConstantValue:&value type:MTLDataTypeUInt atIndex:(NSUInteger)i];
        else
            [values setConstantValue:&flag type:MTLDataTypeBool atIndex:(NSUInteger)i];
    }
}

/* Fast math off: codes and norms must be the same bytes as those of tqkv.h. Of the source only that kernel: all of them
   take minutes. */
static tqkv_result tqkv__compile(tqkv_metal *m, tqkv__kept *made)
{
    NSError *error = nil;
    NSString *name = tqkv__function_name(&made->kernel);
    MTLCompileOptions *options = [[MTLCompileOptions alloc] init];
    NSString *only = [@"TQKV_ONLY_" stringByAppendingString:name];
    [options setPreprocessorMacros:[NSDictionary dictionaryWithObjectsAndKeys:@"1", @"TQKV_ONLY", @"1", only, nil]];
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations" /* its successor is of macOS 15 */
    [options setFastMathEnabled:NO];
#pragma clang diagnostic pop
    made->object = [m->device newLibraryWithSource:m->source options:options error:&error];
    TQKV__RELEASE(options);
    if (made->object) return TQKV_OK;
    return tqkv__fail(m, TQKV_METAL_ERROR, "library_source: %s: %s", [name UTF8String], tqkv__error_text(error));
}

/* The threads that a kernel cannot do without. */
static NSUInteger tqkv__needs_threads(const tqkv_metal_kernel *kernel)
{
    const bool shared = kernel->family == TQKV_METAL_ATTEND_MATRIX && kernel->head_dim * TQKV__DIM_UNIT > 256;
    return shared ? TQKV__LONG_SIMDGROUPS * TQKV__SIMD_WIDTH : 0;
}

/* Metal's compiler gives a thread the more registers the fewer threads it is told of. */
static id<MTLComputePipelineState> tqkv__new_state(tqkv_metal *m, const tqkv_metal_kernel *kernel,
                                                   id<MTLFunction> function, NSError **error)
{
    MTLComputePipelineDescriptor *descriptor = [[MTLComputePipelineDescriptor alloc] init];
    [descriptor setComputeFunction:function];
    [descriptor setMaxTotalThreadsPerThreadgroup:(NSUInteger)kernel->most_simdgroups * TQKV__SIMD_WIDTH];
    [descriptor setThreadGroupSizeIsMultipleOfThreadExecutionWidth:YES];
    id<MTLComputePipelineState> state = [m->device newComputePipelineStateWithDescriptor:descriptor
                                                                                 options:MTLPipelineOptionNone
                                                                              reflection:nil
                                                                                   error:error];
    TQKV__RELEASE(descriptor);
    return state;
}

/* Makes p's pipeline, if its simdgroups are of 32 threads, and enough of them. */
static tqkv_result tqkv__build_from(tqkv_metal *m, id<MTLLibrary> library, tqkv__kept *p)
{
    NSError *error = nil;
    NSString *name = tqkv__function_name(&p->kernel);
    const char *text = [name UTF8String];
    MTLFunctionConstantValues *values = [[MTLFunctionConstantValues alloc] init];
    tqkv__set_values(&p->kernel, values);
    id<MTLFunction> function = [library newFunctionWithName:name constantValues:values error:&error];
    TQKV__RELEASE(values);
    id<MTLComputePipelineState> state = function ? tqkv__new_state(m, &p->kernel, function, &error) : nil;
    TQKV__RELEASE(function);
    if (!state) return tqkv__fail(m, TQKV_METAL_ERROR, "%s: %s", text, tqkv__error_text(error));
    p->max_threads = [state maxTotalThreadsPerThreadgroup];
    const int threads = (int)p->max_threads, width = (int)[state threadExecutionWidth];
    const bool few = tqkv__needs_threads(&p->kernel) > p->max_threads;
    if (!few && width == TQKV__SIMD_WIDTH && threads >= TQKV__SIMD_WIDTH) {
        p->object = state;
        return TQKV_OK;
    }
    TQKV__RELEASE(state);
    if (few) return tqkv__fail(m, TQKV_METAL_ERROR, "%s: %d threads a threadgroup are too few", text, threads);
    return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: simdgroups of %d threads, not 32", text, width);
}

/* The text of what came from the source, or failed there too, after the library was refused with another text. */
static tqkv_result tqkv__fell_back(tqkv_metal *m, tqkv_result r, const char *library_text)
{
    char source_text[180];
    if (r == TQKV_OK) return tqkv__fail(m, r, "library refused: %s; compiled from source", library_text);
    tqkv_metal_error(m, source_text, sizeof source_text);
    return tqkv__fail(m, r, "library refused: %s; then: %s", library_text, source_text);
}

/* From the library, or from the source where Metal refuses the library's kernel or there is no library. */
static tqkv_result tqkv__build_pipeline(tqkv_metal *m, tqkv__kept *p)
{
    char library_text[180];
    const tqkv__kept *compiled = NULL;
    tqkv_metal_kernel any = p->kernel;
    tqkv_result r = m->library ? tqkv__build_from(m, m->library, p) : TQKV_METAL_ERROR;
    if (r != TQKV_METAL_ERROR || !m->source) return r;
    tqkv_metal_error(m, library_text, sizeof library_text);
    memset(any.constants, 0, sizeof any.constants);
    r = tqkv__get_kept(m, &m->compiled, &any, tqkv__compile, &compiled);
    if (r == TQKV_OK) r = tqkv__build_from(m, compiled->object, p);
    return m->library ? tqkv__fell_back(m, r, library_text) : r;
}

static tqkv_result tqkv__get_pipeline(tqkv_metal *m, const tqkv_metal_kernel *kernel, const tqkv__kept **out)
{
    return tqkv__get_kept(m, &m->pipelines, kernel, tqkv__build_pipeline, out);
}

static bool tqkv__has_matrices(tqkv_metal *m)
{
    pthread_mutex_lock(&m->lock);
    const bool has = m->matrices;
    pthread_mutex_unlock(&m->lock);
    return has;
}

static bool tqkv__is_built(tqkv_metal *m, const tqkv_metal_kernel *kernel)
{
    pthread_mutex_lock(&m->lock);
    const bool built = tqkv__find_kept(m->pipelines, kernel) != NULL;
    pthread_mutex_unlock(&m->lock);
    return built;
}

/* Whether pipelines of a plan could not be built because Metal refuses attend_matrix, twice: its compiler may have been
   restarted. Then the context does without from now on, and its text says so. */
static bool tqkv__lost_matrices(tqkv_metal *m, tqkv_result r, const tqkv_metal_plan *plan)
{
    char text[300];
    const tqkv__kept *attend;
    const tqkv_metal_dispatch *missing = NULL;
    if (r != TQKV_METAL_ERROR) return false;
    for (int i = 0; i < plan->n && !missing; i++)
        if (!tqkv__is_built(m, &plan->d[i].kernel)) missing = &plan->d[i];
    if (!missing || missing->kernel.family != TQKV_METAL_ATTEND_MATRIX) return false; /* something else failed */
    if (tqkv__get_pipeline(m, &missing->kernel, &attend) == TQKV_OK) return true;
    tqkv_metal_plan lanes;
    tqkv_metal_kernel *kernel = &lanes.d[0].kernel;
    lanes.n = 1;
    lanes.d[0] = *missing;
    kernel->constants[TQKV_FC_BATCH] = 1 + false;
    tqkv_metal_plan_lanes(&lanes);
    kernel->constants[TQKV_FC_BATCH] = missing->kernel.constants[TQKV_FC_BATCH];
    tqkv_metal_error(m, text, sizeof text);
    if (tqkv__get_pipeline(m, kernel, &attend) != TQKV_OK) {
        tqkv__fail(m, TQKV_METAL_ERROR, "%s", text);
        return false;
    }
    pthread_mutex_lock(&m->lock);
    m->matrices = false;
    pthread_mutex_unlock(&m->lock);
    tqkv__fail(m, TQKV_OK, "%s; attention without matrices", text);
    return true;
}

/* Without matrices attend takes the place of attend_matrix, but not in a batch, which the caller plans anew. */
static tqkv_result tqkv__avoid_matrices(tqkv_metal *m, tqkv_metal_plan *plan)
{
    if (plan->n && plan->d[0].kernel.family == TQKV_METAL_INDEX_SCORES)
        return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: this GPU's matrices lie otherwise, or Metal refuses them",
                          plan->call);
    if (tqkv_metal_plan_lanes(plan)) return TQKV_OK;
    return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: planned with matrices, without which the context goes on", plan->call);
}

static tqkv_result tqkv__try_pipelines(tqkv_metal *m, tqkv_metal_plan *plan, const tqkv__kept **out)
{
    tqkv_result r = tqkv__has_matrices(m) ? TQKV_OK : tqkv__avoid_matrices(m, plan);
    for (int i = 0; i < plan->n && r == TQKV_OK; i++) r = tqkv__get_pipeline(m, &plan->d[i].kernel, &out[i]);
    return r;
}

/* All pipelines of a plan. */
static tqkv_result tqkv__get_pipelines(tqkv_metal *m, tqkv_metal_plan *plan, const tqkv__kept **out)
{
    const tqkv_result r = tqkv__try_pipelines(m, plan, out);
    return tqkv__lost_matrices(m, r, plan) ? tqkv__try_pipelines(m, plan, out) : r;
}

/* >>recording: a plan, checked against Metal's objects and handed to an encoder; command buffers of our own */

/* Metal's capture and validation put objects of their own around a device. */
static bool tqkv__is_device(const tqkv_metal *m, id<MTLDevice> device)
{
    if (device == m->device || [device isEqual:m->device]) return true;
    NSObject *one = (NSObject *)device, *other = (NSObject *)m->device;
    SEL number = @selector(registryID); /* not in every system's headers */
    return [one respondsToSelector:number] && [other respondsToSelector:number] &&
           [[one valueForKey:@"registryID"] isEqual:[other valueForKey:@"registryID"]];
}

static tqkv_result tqkv__check_binding(tqkv_metal *m, const tqkv_metal_binding *b)
{
    if (!b->size) return TQKV_OK;
    id<MTLBuffer> buffer = b->at.buffer;
    if (!buffer) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: no buffer", b->name);
    const size_t length = [buffer length];
    if (!tqkv__is_device(m, [buffer device]))
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: a buffer of another device", b->name);
    if (b->at.offset % b->alignment)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: offset %zu is not a multiple of %zu", b->name, b->at.offset,
                          b->alignment);
    if (b->at.offset > length || b->size > length - b->at.offset)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: needs %zu bytes from %zu on of a buffer of %zu", b->name,
                          b->size, b->at.offset, length);
    return TQKV_OK;
}

static tqkv_result tqkv__check_bindings(tqkv_metal *m, const tqkv_metal_dispatch *d)
{
    for (int i = 0; i < d->n_bindings; i++) {
        const tqkv_metal_binding *other = tqkv_metal_overlapping(d, i);
        const tqkv_result r = tqkv__check_binding(m, &d->bindings[i]);
        if (r != TQKV_OK) return r;
        if (other) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s and %s overlap", other->name, d->bindings[i].name);
    }
    return TQKV_OK;
}

/* Metal 4's encoders, and those of render passes, lack what a plan needs. */
static tqkv_result tqkv__check_encoder(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const char *call)
{
    if (!encoder) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: no encoder", call);
    if ([encoder respondsToSelector:@selector(setBytes:length:atIndex:)]) return TQKV_OK;
    return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: no MTLComputeCommandEncoder; for Metal 4 see docs/metal.md", call);
}

static void tqkv__bind_all(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const tqkv_metal_dispatch *d)
{
    for (int i = 0; i < d->n_arguments; i++)
        [encoder setBytes:d->arguments[i].bytes length:d->arguments[i].size atIndex:(NSUInteger)d->arguments[i].index];
    for (int i = 0; i < d->n_bindings; i++) {
        const tqkv_metal_binding *b = &d->bindings[i];
        if (b->index == TQKV_METAL_ONLY_CHECKED) continue;
        [encoder setBuffer:b->size ? (id<MTLBuffer>)b->at.buffer : m->unused
                    offset:b->size ? b->at.offset : 0
                   atIndex:(NSUInteger)b->index];
    }
}

static tqkv_result tqkv__record_dispatch(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const tqkv__kept *p,
                                         const tqkv_metal_dispatch *d)
{
    tqkv_metal_launch launch;
    const tqkv_result r = tqkv_metal_plan_launch(d, p->max_threads, &launch);
    if (r != TQKV_OK) return tqkv__fail(m, r, "a pipeline allows too few threads"); /* seen when it was built */
    if (d->barrier) {
        const id<MTLResource> written[] = {d->barrier};
        [encoder memoryBarrierWithResources:written count:1];
    }
    [encoder setComputePipelineState:p->object];
    tqkv__bind_all(m, encoder, d);
    for (NSUInteger i = 0; i < TQKV_METAL_MEMORIES; i++)
        [encoder setThreadgroupMemoryLength:launch.memory[i] atIndex:i];
    [encoder dispatchThreadgroups:MTLSizeMake(launch.threadgroups[0], launch.threadgroups[1], launch.threadgroups[2])
            threadsPerThreadgroup:MTLSizeMake(launch.threads, 1, 1)];
    return TQKV_OK;
}

/* What tqkv.h says to a call, with a text if it refuses it. */
static tqkv_result tqkv__planned(tqkv_metal *m, tqkv_result r, const char *call)
{
    if (r == TQKV_OK) return r;
    return tqkv__fail(m, r, "%s: %s%s", call, tqkv_result_string(r),
                      r == TQKV_UNSUPPORTED ? "; " TQKV__KERNELS_TEXT : "");
}

/* Looks at what made a plan. */
static tqkv_result tqkv__check_plan(tqkv_metal *m, const tqkv_metal_plan *plan)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    return plan ? tqkv__planned(m, plan->result, plan->call) : tqkv__planned(m, TQKV_INVALID_ARGUMENT, "plan");
}

tqkv_result tqkv_metal_prepare(tqkv_metal *m, tqkv_metal_plan *plan)
{
    const tqkv__kept *pipelines[TQKV_METAL_DISPATCHES];
    const tqkv_result r = tqkv__check_plan(m, plan);
    return r == TQKV_OK ? tqkv__get_pipelines(m, plan, pipelines) : r;
}

tqkv_result tqkv_metal_record(tqkv_metal *m, tqkv_metal_object encoder, tqkv_metal_plan *plan)
{
    const tqkv__kept *pipelines[TQKV_METAL_DISPATCHES];
    tqkv_result r = tqkv__check_plan(m, plan);
    if (r != TQKV_OK) return r;
    r = tqkv__check_encoder(m, encoder, plan->call);
    for (int i = 0; i < plan->n && r == TQKV_OK; i++) r = tqkv__check_bindings(m, &plan->d[i]);
    if (r != TQKV_OK || !plan->n || !plan->d[0].grid[0]) return r;
    r = tqkv__get_pipelines(m, plan, pipelines);
    for (int i = 0; i < plan->n && r == TQKV_OK; i++) r = tqkv__record_dispatch(m, encoder, pipelines[i], &plan->d[i]);
    return r;
}

/* With the state of each encoder among its errors. */
static id<MTLCommandBuffer> tqkv__new_commands(tqkv_metal *m)
{
    MTLCommandBufferDescriptor *descriptor = [[MTLCommandBufferDescriptor alloc] init];
    [descriptor setErrorOptions:MTLCommandBufferErrorOptionEncoderExecutionStatus];
    id<MTLCommandBuffer> commands = [m->queue commandBufferWithDescriptor:descriptor];
    TQKV__RELEASE(descriptor);
    return commands;
}

static tqkv_result tqkv__commands_failed(tqkv_metal *m, NSError *error)
{
    const char *state = "";
    NSString *label = nil;
    for (id<MTLCommandBufferEncoderInfo> info in [[error userInfo] objectForKey:MTLCommandBufferEncoderInfoErrorKey]) {
        label = [info label];
        state = [info errorState] == MTLCommandEncoderErrorStateFaulted ? " faulted" : " did not complete";
    }
    return tqkv__fail(m, TQKV_METAL_ERROR, "the command buffer failed: %s%s%s%s", tqkv__error_text(error),
                      label ? "; " : "", label ? [label UTF8String] : "", label ? state : "");
}

/* tqkv_metal_run. label: of the encoder, for Metal's tools and for the text of a failure */
static tqkv_result tqkv__run_as(tqkv_metal *m, const char *label, tqkv_metal_work record, void *user)
{
    @autoreleasepool {
        id<MTLCommandBuffer> commands = tqkv__new_commands(m);
        id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
        if (!encoder)
            return tqkv__fail(m, TQKV_METAL_ERROR, "Metal gave no command %s", commands ? "encoder" : "buffer");
        [encoder setLabel:[NSString stringWithFormat:@"tqkv %s", label]];
        const tqkv_result r = record(user, encoder);
        [encoder endEncoding];
        if (r != TQKV_OK) return r;
        [commands commit];
        [commands waitUntilCompleted];
        if ([commands status] == MTLCommandBufferStatusCompleted) return TQKV_OK;
        return tqkv__commands_failed(m, [commands error]);
    }
}

tqkv_result tqkv_metal_run(tqkv_metal *m, tqkv_metal_work record, void *user)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    return record ? tqkv__run_as(m, "run", record, user) : tqkv__planned(m, TQKV_INVALID_ARGUMENT, "run");
}

/* A plan that runs in its own command buffer. */
typedef struct tqkv__call {
    tqkv_metal *m;
    tqkv_metal_plan *plan;
} tqkv__call;

static tqkv_result tqkv__record_call(void *user, tqkv_metal_object encoder)
{
    const tqkv__call *c = (const tqkv__call *)user;
    return tqkv_metal_record(c->m, encoder, c->plan);
}

static tqkv_result tqkv__run_plan(tqkv_metal *m, tqkv_metal_plan *plan)
{
    tqkv__call call = {m, plan};
    return tqkv__run_as(m, plan->call, tqkv__record_call, &call);
}

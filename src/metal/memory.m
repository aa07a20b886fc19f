/* >>memory: what processor and GPU share */

static tqkv__memory *tqkv__lend(tqkv_metal *m, size_t size)
{
    tqkv__memory *block = (tqkv__memory *)calloc(1, sizeof *block);
    if (!block) return NULL;
    block->size = size ? size : 1; /* Metal has no empty buffers */
    block->buffer = [m->device newBufferWithLength:block->size options:MTLResourceStorageModeShared];
    block->begin = (char *)[block->buffer contents];
    if (!block->begin) {
        TQKV__RELEASE(block->buffer);
        free(block);
        return NULL;
    }
    pthread_mutex_lock(&m->lock);
    block->next = m->memory;
    m->memory = block;
    pthread_mutex_unlock(&m->lock);
    return block;
}

static void *tqkv__memory_alloc(void *user, size_t size)
{
    const tqkv__memory *block = tqkv__lend((tqkv_metal *)user, size);
    return block ? block->begin : NULL;
}

static void tqkv__memory_free(void *user, void *pointer, size_t size)
{
    tqkv_metal *m = (tqkv_metal *)user;
    tqkv__memory **at = &m->memory, *block;
    (void)size;
    pthread_mutex_lock(&m->lock);
    while (*at && (*at)->begin != pointer) at = &(*at)->next;
    block = *at;
    if (block) *at = block->next;
    pthread_mutex_unlock(&m->lock);
    if (!block) return;
    TQKV__RELEASE(block->buffer);
    free(block);
}

tqkv_allocator tqkv_metal_allocator(tqkv_metal *m)
{
    const tqkv_allocator none = {NULL, NULL, NULL};
    return m ? m->backend.memory : none;
}

tqkv_result tqkv_metal_find(tqkv_metal *m, const void *pointer, tqkv_metal_buffer *out)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    if (!pointer || !out) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "a pointer or a cache is NULL");
    const uintptr_t address = (uintptr_t)pointer;
    pthread_mutex_lock(&m->lock);
    const tqkv__memory *block = m->memory;
    while (block && address - (uintptr_t)block->begin >= block->size) block = block->next; /* unsigned: below it, too */
    if (block) {
        out->buffer = block->buffer;
        out->offset = address - (uintptr_t)block->begin;
    }
    pthread_mutex_unlock(&m->lock);
    return block ? TQKV_OK : tqkv__fail(m, TQKV_INVALID_ARGUMENT, "a pointer outside the context's memory");
}

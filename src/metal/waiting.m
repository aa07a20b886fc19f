/* >>waiting: the calls of tqkv_cache, which wait for the GPU. What they hand to it lies in a block of shared memory;
   one such block waits for the next call, of any cache. */

enum { TQKV__MOST_STAGING = 64 << 20 }; /* bytes of it: a long prefill's is given back at once */

static void tqkv__drop_staging(tqkv_metal *m, const tqkv__memory *block)
{
    if (block) tqkv__memory_free(m, block->begin, block->size);
}

/* Divides a block among n arrays. NULL and a text, or a block for tqkv__give_back. */
static tqkv__memory *tqkv__take_staging(tqkv_metal *m, int n, const size_t *sizes, tqkv_metal_buffer *out)
{
    size_t size = 0;
    for (int i = 0; i < n; i++) {
        out[i].offset = size;
        size += (sizes[i] + 15) / 16 * 16;
    }
    pthread_mutex_lock(&m->lock);
    tqkv__memory *block = m->staging;
    m->staging = NULL;
    pthread_mutex_unlock(&m->lock);
    if (block && block->size < size) {
        tqkv__drop_staging(m, block);
        block = NULL;
    }
    if (!block) block = tqkv__lend(m, size);
    if (!block) {
        tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no buffer of %zu bytes", size);
        return NULL;
    }
    for (int i = 0; i < n; i++) out[i].buffer = block->buffer;
    return block;
}

/* Of two blocks the larger one waits. */
static void tqkv__give_back(tqkv_metal *m, tqkv__memory *block)
{
    pthread_mutex_lock(&m->lock);
    if (block->size <= TQKV__MOST_STAGING && (!m->staging || m->staging->size < block->size)) {
        tqkv__memory *other = m->staging;
        m->staging = block;
        block = other;
    }
    pthread_mutex_unlock(&m->lock);
    tqkv__drop_staging(m, block);
}

/* Rows [n][n_heads] of the caller, or parts of them, without gaps: `size` bytes each. */
typedef struct tqkv__rows_copy {
    const tqkv_strides *strides;
    size_t value, size; /* bytes of a value, and of what is copied of a row */
    int n, n_heads;
} tqkv__rows_copy;

static size_t tqkv__row_of_copy(const tqkv__rows_copy *c, size_t i)
{
    const size_t n_heads = (size_t)c->n_heads;
    return (i / n_heads * c->strides->token + i % n_heads * c->strides->head) * c->value;
}

static size_t tqkv__copied_rows(const tqkv__rows_copy *c) { return (size_t)c->n * (size_t)c->n_heads; }

static void tqkv__copy_in(const tqkv__rows_copy *c, const void *rows, char *to)
{
    for (size_t i = 0; i < tqkv__copied_rows(c); i++)
        memcpy(to + i * c->size, (const char *)rows + tqkv__row_of_copy(c, i), c->size);
}

static void tqkv__copy_out(const tqkv__rows_copy *c, const char *from, void *rows)
{
    for (size_t i = 0; i < tqkv__copied_rows(c); i++)
        memcpy((char *)rows + tqkv__row_of_copy(c, i), from + i * c->size, c->size);
}

static size_t tqkv__value_size(tqkv_type type) { return type == TQKV_TYPE_F32 ? 4 : 2; }

/* Strides with their defaults. */
static tqkv_strides tqkv__strides_with(tqkv_strides strides, int n_heads, int head_dim)
{
    if (!strides.token) strides.token = (size_t)n_heads * (size_t)head_dim;
    if (!strides.head) strides.head = (size_t)head_dim;
    return strides;
}

static const tqkv_cache_strides tqkv__no_gaps = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};

/* The stores of a cache's codes, and the strides of its rows. */
static tqkv_attention tqkv__stores_of(const tqkv_cache *c)
{
    tqkv_attention view;
    memset(&view, 0, sizeof view);
    tqkv_cache_view(c, 0, &view);
    return view;
}

static int tqkv__key_dim(const tqkv_attention *view)
{
    return view->keys->head_dim + (view->tail ? view->tail->head_dim : 0);
}

/* The blocking calls of a cache copy their rows into a block of shared memory, and the result out of it. */
static tqkv_result tqkv__cache_append(tqkv_metal *m, const tqkv_cache *c, const void *k, const void *v, int n_tokens)
{
    tqkv_metal_plan plan;
    const tqkv_attention view = tqkv__stores_of(c);
    const tqkv_store *keys = view.keys, *tail = view.tail, *values = view.values;
    const tqkv_strides of_k = tqkv__strides_with(keys->strides, keys->n_kv_heads, tqkv__key_dim(&view)),
                       of_v = tqkv__strides_with(values->strides, keys->n_kv_heads, values->head_dim);
    const size_t value = tqkv__value_size(keys->type), key_row = (size_t)keys->head_dim * value,
                 tail_row = tail ? (size_t)tail->head_dim * value : 0,
                 value_row = v ? (size_t)values->head_dim * value : 0;
    const tqkv__rows_copy first = {&of_k, value, key_row, n_tokens, keys->n_kv_heads},
                          second = {&of_k, value, tail_row, n_tokens, keys->n_kv_heads},
                          third = {&of_v, value, value_row, n_tokens, keys->n_kv_heads};
    const size_t rows = tqkv__copied_rows(&first), k_size = rows * key_row,
                 sizes[] = {k_size + rows * tail_row, rows * value_row, sizeof(uint32_t)};
    tqkv_metal_buffer memory, staged[3];
    if (!n_tokens) return TQKV_OK;
    tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    tqkv__memory *block = tqkv__take_staging(m, 3, sizes, staged);
    if (!block) return TQKV_OUT_OF_MEMORY;
    uint32_t *unfit = (uint32_t *)(void *)(block->begin + staged[2].offset);
    *unfit = 0;
    tqkv__copy_in(&first, k, block->begin);
    if (tail) tqkv__copy_in(&second, (const char *)k + key_row, block->begin + k_size);
    if (v) tqkv__copy_in(&third, v, block->begin + staged[1].offset);
    if (!v) staged[1].offset = k_size; /* a shared cache takes the tail as v */
    tqkv_metal_plan_cache_append(c, memory, &tqkv__no_gaps, staged[0], staged[1], n_tokens, staged[2], &plan);
    r = tqkv__run_plan(m, &plan);
    if (r == TQKV_OK && *unfit) /* of NaN and infinity tqkv_cache_append has looked */
        r = tqkv__fail(m, TQKV_NOT_FINITE, "append: halves, which calibrate and exact ends keep, do not hold a row");
    tqkv__give_back(m, block);
    return r;
}

/* What a blocking attention has in one block of shared memory. */
enum { TQKV__CALL_Q, TQKV__CALL_OUT, TQKV__CALL_SCRATCH, TQKV__CALL_PARTS };

static tqkv_result tqkv__attend_cache(tqkv_metal *m, const tqkv_cache *c, const void *q, int n_queries, void *out)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer memory, parts[TQKV__CALL_PARTS];
    const tqkv_attention view = tqkv__stores_of(c);
    const int n_heads = view.n_heads, key_dim = tqkv__key_dim(&view), value_dim = view.values->head_dim;
    const size_t value = tqkv__value_size(view.keys->type), rows = (size_t)n_queries * (size_t)n_heads,
                 q_row = (size_t)key_dim * value, out_row = (size_t)value_dim * value;
    size_t sizes[TQKV__CALL_PARTS] = {rows * q_row, rows * out_row, 0};
    tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    memset(parts, 0, sizeof parts);
    r = tqkv_metal_plan_cache_attend(c, memory, &tqkv__no_gaps, NULL, parts[TQKV__CALL_Q], n_queries,
                                     parts[TQKV__CALL_SCRATCH], parts[TQKV__CALL_OUT], &plan);
    if (tqkv__planned(m, r, "attend") != TQKV_OK) return r;
    sizes[TQKV__CALL_SCRATCH] = plan.scratch_size;
    tqkv__memory *block = tqkv__take_staging(m, TQKV__CALL_PARTS, sizes, parts);
    if (!block) return TQKV_OUT_OF_MEMORY;
    const tqkv_strides of_q = tqkv__strides_with(view.query_strides, n_heads, key_dim),
                       of_out = tqkv__strides_with(view.output_strides, n_heads, value_dim);
    const tqkv__rows_copy queries = {&of_q, value, q_row, n_queries, n_heads},
                          outputs = {&of_out, value, out_row, n_queries, n_heads};
    tqkv__copy_in(&queries, q, block->begin + parts[TQKV__CALL_Q].offset);
    tqkv_metal_plan_cache_attend(c, memory, &tqkv__no_gaps, NULL, parts[TQKV__CALL_Q], n_queries,
                                 parts[TQKV__CALL_SCRATCH], parts[TQKV__CALL_OUT], &plan);
    r = tqkv__run_plan(m, &plan);
    if (r == TQKV_OK) tqkv__copy_out(&outputs, block->begin + parts[TQKV__CALL_OUT].offset, out);
    tqkv__give_back(m, block);
    return r;
}

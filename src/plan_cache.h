/* >>plan-cache: appending to a cache and attending to it */

static tqkv_metal_buffer tqkv__buffer_of_part(const tqkv_cache *c, tqkv_metal_buffer memory, const void *part)
{
    memory.offset += (size_t)((const char *)part - (const char *)c);
    return memory;
}

static tqkv_metal_store tqkv__store_in_buffer(const tqkv_cache *c, tqkv_metal_buffer memory, const tqkv_store *s)
{
    tqkv_metal_store store;
    store.shape = *s;
    store.codes = tqkv__buffer_of_part(c, memory, s->codes);
    store.norms = tqkv__buffer_of_part(c, memory, s->norms);
    memset(&store.center, 0, sizeof store.center);
    if (s->center) store.center = tqkv__buffer_of_part(c, memory, s->center);
    memset(&store.pages, 0, sizeof store.pages);
    return store;
}

TQKV_API float tqkv__value_to_float(tqkv_type type, const void *value)
{
    float x;
    tqkv__widen_row(type, value, NULL, NULL, 1, &x);
    return x;
}

TQKV_API void tqkv__value_from_float(tqkv_type type, float x, void *value) { tqkv__narrow_row(type, &x, 1, value); }

TQKV_API tqkv_cache_layout tqkv__cache_layout_of(const tqkv_cache *c)
{
    const tqkv_attention *a = &c->attention;
    const int key_dim = c->keys.head_dim + c->tail.head_dim, value_dim = (c->shared ? &c->keys : &c->values)->head_dim;
    const tqkv_cache_layout layout = {tqkv__strides_of(c->keys.strides, c->keys.n_kv_heads, key_dim),
                                      tqkv__strides_of(c->values.strides, c->keys.n_kv_heads, value_dim),
                                      tqkv__strides_of(a->query_strides, a->n_heads, key_dim),
                                      tqkv__strides_of(a->output_strides, a->n_heads, value_dim)};
    return layout;
}

/* The halves of the first (0) or newest (2) positions for the tokens that they keep: those of keys, of values or of both. */
static tqkv_result tqkv__plan_append_halves(const tqkv_cache *c, tqkv_metal_buffer memory, bool packed, int first,
                                            tqkv_metal_buffer k, tqkv_metal_buffer v, int n_tokens,
                                            tqkv_metal_buffer not_finite, tqkv_metal_dispatch *d, int *n)
{
    const tqkv_store *const ends[2] = {tqkv__end_of(c, first), tqkv__end_of(c, first + 1)};
    const int64_t end = c->attention.end, left = first ? n_tokens : c->exact_first - end;
    const int kept = left < 0 ? 0 : left < n_tokens ? (int)left : n_tokens;
    tqkv_metal_store stores[2];
    if ((!ends[0] && !ends[1]) || (n_tokens && !kept)) return TQKV_OK;
    for (int side = 0; side < 2; side++) {
        if (!ends[side]) continue;
        stores[side] = tqkv__store_in_buffer(c, memory, ends[side]);
        stores[side].shape.type = tqkv__stream_of(c, side)->type;
        if (!packed) stores[side].shape.strides = tqkv__stream_of(c, side)->strides;
    }
    d += (*n)++;
    const int64_t at = kept ? end : 0;
    if (ends[0] && ends[1]) return tqkv_metal_plan_encode_kv(&stores[0], &stores[1], k, v, kept, at, not_finite, d);
    return tqkv_metal_plan_encode(&stores[!ends[0]], ends[0] ? k : v, kept, at, not_finite, d);
}

TQKV_API tqkv_result tqkv__plan_cache_append(const tqkv_cache *c, tqkv_metal_buffer memory, bool packed,
                                             tqkv_metal_buffer k, tqkv_metal_buffer v, int n_tokens,
                                             tqkv_metal_buffer not_finite, tqkv_metal_dispatch *d, int *n)
{
    const bool tail = c->tail.head_dim > 0, apart = tail && !c->shared;
    const int64_t end = c->attention.end;
    const tqkv_strides none = {0, 0};
    tqkv_metal_store keys = tqkv__store_in_buffer(c, memory, &c->keys),
                     others = tqkv__store_in_buffer(c, memory, tail && !apart ? &c->tail : &c->values);
    keys.shape.strides = packed ? none : c->keys.strides;
    others.shape.strides = packed ? none : c->values.strides;
    tqkv_result r = c->shared && !tail ? tqkv_metal_plan_encode(&keys, k, n_tokens, end, not_finite, d)
                                       : tqkv_metal_plan_encode_kv(&keys, &others, k, v, n_tokens, end, not_finite, d);
    *n = 1;
    if (r == TQKV_OK && apart) {
        tqkv_metal_store third = tqkv__store_in_buffer(c, memory, &c->tail);
        third.shape.strides = none;
        const tqkv_metal_binding *rows = tqkv__binding_at(d, 1);
        r = tqkv_metal_plan_encode(&third, tqkv__buffer_after(rows->at, rows->size), n_tokens, end, not_finite,
                                   &d[(*n)++]);
    }
    for (int first = 0; r == TQKV_OK && first <= 2; first += 2)
        r = tqkv__plan_append_halves(c, memory, packed, first, k, v, n_tokens, not_finite, d, n);
    return r;
}

/* The attention of a cache over its stores, with the lists and the tree of `some`. */
typedef struct tqkv__cache_call {
    tqkv_metal_attention attention;
    tqkv_metal_store stores[TQKV__CACHE_STORES];
} tqkv__cache_call;

static const tqkv_metal_store *tqkv__store_of_call(const tqkv_cache *c, const tqkv__cache_call *call, int i)
{
    return tqkv__store_of(c, i) ? &call->stores[i] : NULL;
}

/* As it is now, of one query. */
static void tqkv__open_cache_call(const tqkv_cache *c, tqkv_metal_buffer memory, const tqkv_metal_attention *some,
                                  tqkv__cache_call *call)
{
    const int values = c->shared ? 0 : 1, ends = TQKV__CACHE_STREAMS;
    tqkv_metal_attention *a = &call->attention;
    memset(call, 0, sizeof *call);
    for (int i = 0; i < TQKV__CACHE_STORES; i++)
        if (tqkv__store_of(c, i)) call->stores[i] = tqkv__store_in_buffer(c, memory, tqkv__store_of(c, i));
    a->attention = tqkv_cache_view(c);
    if (!a->attention.kv_len) a->attention.end = 0; /* nothing is resident; kv_len alone would be its default */
    a->keys = &call->stores[0];
    a->values = &call->stores[values];
    a->tail = tqkv__store_of_call(c, call, 2);
    a->first_keys = tqkv__store_of_call(c, call, ends);
    a->first_values = tqkv__store_of_call(c, call, ends + values);
    a->last_keys = tqkv__store_of_call(c, call, ends + 2);
    a->last_values = tqkv__store_of_call(c, call, ends + 2 + values);
    a->matrix_group = c->matrix_group;
    if (c->attention.sinks) a->sinks = tqkv__buffer_of_part(c, memory, c->attention.sinks);
    if (!some) return;
    a->tree = some->tree;
    a->list = some->list;
    a->attention.tree = some->attention.tree;
    a->attention.list = some->attention.list;
    a->attention.list_length = some->attention.list_length;
    a->attention.list_heads = some->attention.list_heads;
    a->attention.list_block = some->attention.list_block;
    a->attention.list_newest = some->attention.list_newest;
}

TQKV_API tqkv_result tqkv__plan_cache_sizes(const tqkv_cache *c, const tqkv_metal_attention *some, int n_queries,
                                            size_t rows_sizes[2], size_t *scratch_size)
{
    const tqkv_metal_buffer none = {NULL, 0};
    const tqkv_strides any = {0, 0}; /* the sizes are those without gaps */
    tqkv__cache_call call;
    if (!c || n_queries <= 0) return TQKV__INVALID(TQKV__NO_CACHE_QUERIES);
    tqkv__open_cache_call(c, none, some, &call);
    tqkv_attention *a = &call.attention.attention;
    a->n_queries = n_queries;
    a->query_strides = a->output_strides = any;
    a->exact_first = c->exact_first; /* as many as there will ever be */
    a->exact_last = c->exact_last;
    const tqkv_result r = tqkv_metal_plan_attend_scratch(&call.attention, scratch_size);
    if (r != TQKV_OK) return r;
    const size_t rows = (size_t)n_queries * (size_t)a->n_heads * tqkv__type_size(c->keys.type);
    rows_sizes[0] = rows * (size_t)(c->keys.head_dim + c->tail.head_dim);
    rows_sizes[1] = rows * (size_t)call.attention.values->shape.head_dim;
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv__plan_cache_attend(const tqkv_cache *c, tqkv_metal_buffer memory, bool packed,
                                             const tqkv_metal_attention *some, tqkv_metal_buffer q, int n_queries,
                                             tqkv_metal_buffer scratch, tqkv_metal_buffer out, tqkv_metal_dispatch *d,
                                             int *n)
{
    const tqkv_strides none = {0, 0};
    tqkv__cache_call call;
    if (!c || n_queries <= 0) return TQKV__INVALID(TQKV__NO_CACHE_QUERIES);
    tqkv__open_cache_call(c, memory, some, &call);
    tqkv_attention *a = &call.attention.attention;
    a->n_queries = n_queries;
    if (packed) a->query_strides = a->output_strides = none;
    return tqkv__plan_attend_parts(&call.attention, q, scratch, out, d, n);
}

TQKV_API tqkv_result tqkv__plan_cache_all_parts(const tqkv_cache *c, tqkv_metal_buffer memory, int n_queries,
                                                tqkv_metal_dispatch *d, int *n)
{
    const tqkv_metal_buffer none = {NULL, 0};
    tqkv__cache_call call;
    tqkv__open_cache_call(c, memory, NULL, &call);
    tqkv_attention *a = &call.attention.attention;
    a->n_queries = n_queries;
    a->exact_first = c->exact_first;
    a->exact_last = c->exact_last;
    tqkv__take_all_parts(a, &call.attention.keys->shape, &call.attention.values->shape);
    return tqkv__plan_attend_parts(&call.attention, none, none, none, d, n);
}

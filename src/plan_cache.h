/* >>plan-cache: appending to a cache and attending to it */

static tqkv_metal_buffer tqkv__buffer_within(const tqkv_cache *c, tqkv_metal_buffer memory, const void *at)
{
    memory.offset += (size_t)((const char *)at - (const char *)c);
    return memory;
}

static tqkv_metal_store tqkv__store_in_buffer(const tqkv_cache *c, tqkv_metal_buffer memory, const tqkv_store *s)
{
    tqkv_metal_store store;
    store.shape = *s;
    store.codes = tqkv__buffer_within(c, memory, s->codes);
    store.norms = tqkv__buffer_within(c, memory, s->norms);
    memset(&store.center, 0, sizeof store.center);
    memset(&store.channel_scale, 0, sizeof store.channel_scale);
    if (s->center) store.center = tqkv__buffer_within(c, memory, s->center);
    if (s->channel_scale) store.channel_scale = tqkv__buffer_within(c, memory, s->channel_scale);
    memset(&store.pages, 0, sizeof store.pages);
    return store;
}

/* The strides of calls: those that are given, or the cache's. */
static tqkv_cache_layout tqkv__layout_of_call(const tqkv_cache *c, const tqkv_cache_layout *given)
{
    const tqkv_cache_layout own = {c->keys.strides, c->values.strides, c->attention.query_strides,
                                   c->attention.output_strides};
    return given ? *given : own;
}

/* The halves of the first (TQKV__FIRST_KEYS) or newest (TQKV__LAST_KEYS) positions for the tokens that they keep: those of keys, of values or of
   both. */
static tqkv_result tqkv__plan_halves(const tqkv_cache *c, tqkv_metal_buffer memory, const tqkv_strides strides[2],
                                     int keys, const tqkv_metal_buffer rows[2], int n_tokens,
                                     tqkv_metal_buffer not_finite, tqkv_metal_plan *plan)
{
    const tqkv_store *const ends[2] = {tqkv__store_of(c, keys), tqkv__store_of(c, keys + 1)};
    const int64_t end = c->attention.end, left = keys == TQKV__LAST_KEYS ? n_tokens : c->exact_first - end;
    const int kept = left < 0 ? 0 : left < n_tokens ? (int)left : n_tokens;
    const tqkv__mapping mapping = tqkv__mapping_from(kept, kept ? end : 0);
    tqkv_metal_store stores[2];
    if ((!ends[0] && !ends[1]) || (n_tokens && !kept)) return TQKV_OK;
    for (int side = 0; side < 2; side++) {
        if (!ends[side]) continue;
        stores[side] = tqkv__store_in_buffer(c, memory, ends[side]);
        stores[side].shape.type = TQKV__STORE_AT(c, side)->type;
        stores[side].shape.strides = strides[side];
    }
    if (ends[0] && ends[1])
        return tqkv__add_encode_kv(&stores[0], &stores[1], rows[0], rows[1], &mapping, not_finite, plan);
    return tqkv__add_encode(&stores[!ends[0]], rows[!ends[0]], &mapping, not_finite, plan);
}

/* Whether a GPU can append n_tokens to a cache in its memory: that is one allocation, of what kernels write. */
static tqkv_result tqkv__check_on_gpu(const tqkv_cache *c, int n_tokens)
{
    const int64_t wanted = (int64_t)c->exact_last + n_tokens - 1;
    if (c->grown) return TQKV__REFUSE(UNSUPPORTED, "the processor has appended more tokens than exact_batch");
    if (tqkv__newest_room(c) && n_tokens &&
        (wanted < c->keys.capacity ? wanted : c->keys.capacity) > tqkv__newest_room(c))
        return TQKV__REFUSE(OUT_OF_RANGE, "n_tokens: more than exact_batch");
    return TQKV_OK;
}

/* The tail, whose rows lie apart from the keys, and in a ring its first positions. */
static tqkv_result tqkv__add_tail(const tqkv_cache *c, tqkv_metal_buffer memory, const tqkv_store *to,
                                  tqkv_metal_buffer rows, tqkv_strides strides, const tqkv__mapping *mapping,
                                  tqkv_metal_buffer not_finite, tqkv_metal_plan *plan)
{
    tqkv_metal_store tail = tqkv__store_in_buffer(c, memory, to);
    tail.shape.type = c->tail.type;
    tail.shape.strides = strides;
    return tqkv__add_encode(&tail, rows, mapping, not_finite, plan);
}

TQKV_API tqkv_result tqkv_metal_plan_cache_append(const tqkv_cache *c, tqkv_metal_buffer memory,
                                                  const tqkv_cache_layout *layout, tqkv_metal_buffer k,
                                                  tqkv_metal_buffer v, int n_tokens, tqkv_metal_buffer not_finite,
                                                  tqkv_metal_plan *plan)
{
    if (!tqkv__open_plan(plan, "cache_append")) return TQKV__INVALID(TQKV__NO_PLAN);
    if (!c) return tqkv__close_plan(plan, TQKV__INVALID("the cache is NULL"));
    const bool tail = c->tail.head_dim > 0, apart = tail && !c->shared;
    const tqkv__mapping mapping = tqkv__mapping_from(n_tokens, c->attention.end);
    const tqkv_cache_layout own = tqkv__layout_of_call(c, layout);
    const tqkv_strides strides[] = {own.k, own.v};
    const tqkv_metal_buffer rows[] = {k, v};
    tqkv_metal_buffer tail_rows = v;
    tqkv_strides tail_strides = own.v;
    tqkv_metal_store keys = tqkv__store_in_buffer(c, memory, &c->keys),
                     others = tqkv__store_in_buffer(c, memory, tail && !apart ? &c->tail : &c->values);
    keys.shape.strides = own.k;
    others.shape.strides = own.v;
    tqkv_result r = tqkv__check_on_gpu(c, n_tokens);
    if (r == TQKV_OK)
        r = c->shared && !tail ? tqkv__add_encode(&keys, k, &mapping, not_finite, plan)
                               : tqkv__add_encode_kv(&keys, &others, k, v, &mapping, not_finite, plan);
    if (r == TQKV_OK && apart) { /* its rows come behind all of the keys' */
        const tqkv_strides none = {0, 0};
        const tqkv_metal_binding *of_keys = tqkv__binding_at(&plan->d[0], 1);
        tail_rows = tqkv__buffer_after(of_keys->at, of_keys->size);
        tail_strides = none;
        r = tqkv__add_tail(c, memory, &c->tail, tail_rows, tail_strides, &mapping, not_finite, plan);
    }
    const int64_t left = c->exact_first - c->attention.end;
    if (r == TQKV_OK && tqkv__has_store(c, TQKV__FIRST_TAIL) && (left > 0 || !n_tokens)) {
        const tqkv__mapping kept =
            tqkv__mapping_from(left < n_tokens && n_tokens ? (int)left : n_tokens, n_tokens ? c->attention.end : 0);
        r = tqkv__add_tail(c, memory, TQKV__STORE_AT(c, TQKV__FIRST_TAIL), tail_rows, tail_strides, &kept, not_finite,
                           plan);
    }
    if (r == TQKV_OK) r = tqkv__plan_halves(c, memory, strides, TQKV__FIRST_KEYS, rows, n_tokens, not_finite, plan);
    if (r == TQKV_OK) r = tqkv__plan_halves(c, memory, strides, TQKV__LAST_KEYS, rows, n_tokens, not_finite, plan);
    return tqkv__close_plan(plan, r);
}

TQKV_API void tqkv_metal_cache_appended(tqkv_cache *c, int n_tokens) { tqkv__cache_advance(c, n_tokens); }

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
    const int values = c->shared ? TQKV__KEYS : TQKV__VALUES;
    tqkv_metal_attention *a = &call->attention;
    memset(call, 0, sizeof *call);
    for (int i = 0; i < TQKV__CACHE_STORES; i++)
        if (tqkv__store_of(c, i)) call->stores[i] = tqkv__store_in_buffer(c, memory, tqkv__store_of(c, i));
    a->attention = tqkv_cache_view(c);
    if (!a->attention.kv_len) a->attention.end = 0; /* nothing is resident; kv_len alone would be its default */
    a->keys = &call->stores[TQKV__KEYS];
    a->values = &call->stores[values];
    a->tail = tqkv__store_of_call(c, call, TQKV__TAIL);
    a->first_keys = tqkv__store_of_call(c, call, TQKV__FIRST_KEYS);
    a->first_tail = tqkv__store_of_call(c, call, TQKV__FIRST_TAIL);
    a->first_values = tqkv__store_of_call(c, call, TQKV__FIRST_KEYS + values);
    a->last_keys = tqkv__store_of_call(c, call, TQKV__LAST_KEYS);
    a->last_values = tqkv__store_of_call(c, call, TQKV__LAST_KEYS + values);
    a->matrix_group = c->matrix_group;
    if (c->attention.sinks) a->sinks = tqkv__buffer_within(c, memory, c->attention.sinks);
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

TQKV_API tqkv_result tqkv_metal_plan_cache_scratch(const tqkv_cache *c, const tqkv_metal_attention *some, int n_queries,
                                                   size_t *bytes)
{
    const tqkv_metal_buffer none = {NULL, 0};
    tqkv__cache_call call;
    if (!c || n_queries <= 0) return TQKV__INVALID(TQKV__NO_CACHE_QUERIES);
    tqkv__open_cache_call(c, none, some, &call);
    call.attention.attention.n_queries = n_queries;
    call.attention.attention.exact_first = c->exact_first; /* as many as there will ever be */
    call.attention.attention.exact_last = c->exact_last;
    return tqkv_metal_plan_attend_scratch(&call.attention, bytes);
}

TQKV_API tqkv_result tqkv_metal_plan_cache_attend(const tqkv_cache *c, tqkv_metal_buffer memory,
                                                  const tqkv_cache_layout *layout, const tqkv_metal_attention *some,
                                                  tqkv_metal_buffer q, int n_queries, tqkv_metal_buffer scratch,
                                                  tqkv_metal_buffer out, tqkv_metal_plan *plan)
{
    tqkv__cache_call call;
    if (!tqkv__open_plan(plan, "attend")) return TQKV__INVALID(TQKV__NO_PLAN);
    if (!c || n_queries <= 0) return tqkv__close_plan(plan, TQKV__INVALID(TQKV__NO_CACHE_QUERIES));
    const tqkv_result r = tqkv__check_on_gpu(c, 0);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    const tqkv_cache_layout own = tqkv__layout_of_call(c, layout);
    tqkv__open_cache_call(c, memory, some, &call);
    call.attention.attention.n_queries = n_queries;
    call.attention.attention.query_strides = own.q;
    call.attention.attention.output_strides = own.out;
    return tqkv_metal_plan_attend(&call.attention, q, scratch, out, plan);
}

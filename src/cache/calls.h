/* >>cache-calls: a cache made, appended to and attended to */

/* Finds the shapes of what is kept besides; follows tqkv__cache_shapes. */
static tqkv_result tqkv__end_shapes(tqkv_cache *c)
{
    const int capacity = c->keys.capacity;
    if (c->asked_first < 0 || c->asked_last < 0) return TQKV__INVALID("exact_first or exact_last is negative");
    c->exact_first = c->asked_first < capacity ? c->asked_first : capacity;
    c->exact_last = c->asked_last < capacity ? c->asked_last : capacity;
    if (tqkv__end_room(c->exact_last, TQKV__APPENDED_ON_GPU) > INT_MAX) return TQKV__INVALID("exact_last is too large");
    const int64_t room = tqkv__end_room(c->exact_last, c->metal ? TQKV__APPENDED_ON_GPU : TQKV__TILE);
    for (int i = TQKV__FIRST_KEYS; i < TQKV__STREAMS; i++) {
        const bool last = tqkv__stream_kinds[i].end == TQKV__LAST_END;
        const tqkv_store *stream = tqkv__store_of(c, tqkv__stream_kinds[i].side);
        tqkv_store *s = TQKV__STORE_AT(c, i);
        if (!stream || !(last ? c->exact_last : c->exact_first)) continue;
        const bool halves = tqkv__stream_kinds[i].side != TQKV__TAIL && stream->format != TQKV_F16;
        if (!halves && (last || !c->keys.ring)) continue;
        *s = *stream;
        if (halves) s->format = TQKV_F16;
        if (halves) s->rotation = TQKV_ROTATION_ON;
        s->ring = last;
        s->capacity = last ? (int)room : c->exact_first;
    }
    return TQKV_OK;
}

static tqkv_result tqkv__cache_shapes(const tqkv_cache_desc *desc, tqkv_cache *c)
{
#define TQKV__FIELD_TAKEN(field, member, ...) c->member = desc->field;
    TQKV__CACHE_NUMBERS(TQKV__FIELD_TAKEN)
    TQKV__CACHE_SHAPE(TQKV__FIELD_TAKEN)
    TQKV__CACHE_USE(TQKV__FIELD_TAKEN)
    if (!desc->key_format) c->keys.format = TQKV_I8;
    c->values = c->keys;
    if (!c->shared) c->values.format = desc->value_format ? desc->value_format : TQKV_TQ4;
    if (desc->value_dim) c->values.head_dim = desc->value_dim;
    if (desc->ring && desc->window > desc->capacity)
        return TQKV__INVALID("window: longer than the ring's capacity, which no query would find");
    if (c->shared &&
        (c->values.head_dim != desc->head_dim || (desc->value_format && desc->value_format != c->keys.format)))
        return TQKV__INVALID("shared: value_format or value_dim is not that of the keys");
    if (!desc->tail_dim && desc->tail_format) return TQKV__INVALID("tail_format: there is no tail_dim");
    if (!desc->tail_dim) return TQKV_OK;
    c->tail = c->keys;
    c->tail.format = desc->tail_format ? desc->tail_format : TQKV_F16;
    c->tail.head_dim = desc->tail_dim;
    return TQKV_OK;
}

static void tqkv__cache_attach(tqkv_attention *a, const tqkv_cache *c)
{
    a->keys = &c->keys;
    a->values = c->shared ? &c->keys : &c->values;
    a->tail = c->tail.head_dim ? &c->tail : NULL;
    a->first.keys = tqkv__store_of(c, TQKV__FIRST_KEYS);
    a->first.values = tqkv__store_of(c, c->shared ? TQKV__FIRST_KEYS : TQKV__FIRST_VALUES);
    a->first.tail = tqkv__store_of(c, TQKV__FIRST_TAIL);
    a->last.keys = tqkv__store_of(c, TQKV__LAST_KEYS);
    a->last.values = tqkv__store_of(c, c->shared ? TQKV__LAST_KEYS : TQKV__LAST_VALUES);
}

static tqkv_result tqkv__cache_resolve(const tqkv_cache_desc *desc, tqkv_cache *c)
{
    tqkv__attention resolved;
    memset(c, 0, sizeof *c);
    c->learnt_at = -1;
    tqkv_result r = tqkv__cache_shapes(desc, c);
    if (r == TQKV_OK) r = tqkv__end_shapes(c);
    if (r == TQKV_OK) r = tqkv__raw_shapes(desc, c);
    if (r != TQKV_OK) return r;
    c->keys.strides = desc->strides.k;
    c->values.strides = desc->strides.v;
    c->attention.query_strides = desc->strides.q;
    c->attention.output_strides = desc->strides.out;
    c->attention.query_type = c->attention.output_type = desc->type;
    tqkv__cache_attach(&c->attention, c);
    c->attention.n_queries = 1;
    c->attention.whole_window = true;
    r = tqkv__attention_shape(&c->attention, &resolved);
    if (r != TQKV_OK) return r;
    c->attention = resolved.call;
    if (desc->matrix_group < 0) return TQKV__INVALID("matrix_group is negative");
    if (c->metal && !tqkv__backend_of(c->metal)->has_kernels(c->keys.head_dim, c->values.head_dim, c->tail.head_dim))
        return TQKV__REFUSE(UNSUPPORTED, "metal: the GPU has no kernels for this head_dim, value_dim and tail_dim");
    c->memory = c->metal ? tqkv__backend_of(c->metal)->memory : c->attention.allocator;
    return TQKV_OK;
}

static bool tqkv__divide_memory(const tqkv_cache *c, size_t sinks_size, tqkv__cache_memory *at)
{
    size_t channels;
    memset(at, 0, sizeof *at);
    at->size = sizeof *c;
    return tqkv__count_channels(c, TQKV__CACHE_STREAMS, &channels) &&
           tqkv__reserve(&at->size, sinks_size, &at->sinks) &&
           tqkv__reserve(&at->size, TQKV__CHANNELS * channels * sizeof(float), &at->channels) &&
           tqkv__reserve_stores(c, 0, tqkv__stores_within(c), at);
}

static const float *tqkv__given(const tqkv_cache_desc *desc, const tqkv_cache *c, int i, tqkv__channels kind,
                                size_t *stride)
{
    const float *keys = kind == TQKV__CENTERS ? desc->key_center : desc->key_scale;
    const bool value = i == TQKV__VALUES;
    *stride = (size_t)(value ? c->values.head_dim : c->keys.head_dim + c->tail.head_dim);
    if (value) return kind == TQKV__CENTERS ? desc->value_center : desc->value_scale;
    return keys && i == TQKV__TAIL ? keys + c->keys.head_dim : keys;
}

static tqkv_result tqkv__check_given(const tqkv_cache_desc *desc, const tqkv_cache *c)
{
    if (c->shared && (desc->value_center || desc->value_scale))
        return TQKV__INVALID("value_center, value_scale: the values have those of the keys");
    for (int i = TQKV__KEYS; i <= TQKV__VALUES; i++)
        for (int kind = TQKV__CENTERS; kind <= TQKV__SCALES; kind++) {
            size_t stride;
            const float *values = tqkv__given(desc, c, i, (tqkv__channels)kind, &stride);
            const size_t n = (size_t)c->keys.n_kv_heads * stride;
            if ((uintptr_t)values % sizeof(float)) return TQKV__INVALID("a centre or a scale is not aligned as floats");
            if (values && !tqkv__all_finite(values, n))
                return TQKV__REFUSE(NOT_FINITE, "a centre or a scale holds NaN or infinity");
            if (values && kind == TQKV__SCALES && !tqkv__scales_valid(values, n))
                return TQKV__INVALID("a scale is not in [2^-32, 2^32]");
        }
    return TQKV_OK;
}

/* Creates a cache that, if it learns, does so from at least as many positions as one that it is made of. */
static tqkv_result tqkv__create(const tqkv_cache_desc *desc, int learn_from, tqkv_cache **out)
{
    tqkv_cache c;
    tqkv__cache_memory at, raw;
    size_t stride;
    if (!out) return TQKV__INVALID("out is NULL");
    *out = NULL;
    if (!desc) return TQKV__INVALID("desc is NULL");
    tqkv_result r = tqkv__cache_resolve(desc, &c);
    if (r == TQKV_OK) r = tqkv__check_given(desc, &c);
    if (r != TQKV_OK) return r;
    if (c.learning && learn_from > c.learn_from) tqkv__learn_from(&c, learn_from);
    const size_t sinks_size = desc->sinks ? (size_t)c.attention.n_heads * sizeof(float) : 0;
    if (!tqkv__divide_memory(&c, sinks_size, &at) || !tqkv__divide_raw(&c, &raw))
        return TQKV__INVALID(TQKV__LARGE_CACHE);
    c.size = at.size + 63;
    void *memory = c.memory.alloc(c.memory.user, c.size);
    if (!memory) return TQKV_OUT_OF_MEMORY;
    uint8_t *lines = tqkv__first_line(memory);
    c.channels = (float *)(void *)(lines + at.channels);
    tqkv__place_stores(&c, 0, tqkv__stores_within(&c), &at, lines);
    if (sinks_size) {
        memcpy(lines + at.sinks, desc->sinks, sinks_size);
        c.attention.sinks = (const float *)(const void *)(lines + at.sinks);
    }
    for (int side = 0; side < 2; side++) c.own[side] = c.ends[1][side].codes;
    c.own_room = (int)tqkv__newest_room(&c);
    *out = (tqkv_cache *)memcpy(memory, &c, sizeof c);
    tqkv__cache_attach(&(*out)->attention, *out);
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++)
        for (int k = TQKV__CENTERS; k <= TQKV__SCALES; k++) {
            const float *values = tqkv__given(desc, *out, i, (tqkv__channels)k, &stride);
            tqkv__cache_channels(*out, i, (tqkv__channels)k, values, stride);
        }
    return TQKV_OK;
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_create(const tqkv_cache_desc *desc, tqkv_cache **out)
{
    return tqkv__create(desc, 0, out);
}

TQKV__COLD TQKV_API void tqkv_cache_destroy(tqkv_cache *c)
{
    if (!c) return;
    const tqkv_allocator memory = c->memory;
    if (c->grown) memory.free(memory.user, c->grown, c->grown_size);
    tqkv__drop_raw(c);
    memory.free(memory.user, c, c->size);
}

static bool tqkv__in_cache(const tqkv_cache *c, const void *p, size_t size)
{
    return tqkv__overlap(c, c->size, p, size) || tqkv__overlap(c->grown, c->grown_size, p, size) ||
           tqkv__overlap(c->raw_memory, c->raw_size, p, size);
}

/* Opens stream i for its share of the caller's rows. Rows of k hold those of the tail, too. */
static tqkv_result tqkv__append_open(const tqkv_cache *c, int i, const void *k, const void *v, int n_tokens,
                                     tqkv__append *append)
{
    const int key_dim = c->keys.head_dim + c->tail.head_dim;
    const int64_t left = c->exact_first - c->attention.end;
    const void *src = i == TQKV__VALUES ? v : k;
    tqkv_store store = *TQKV__STORE_AT(c, i);
    store.strides =
        i == TQKV__VALUES ? c->values.strides : tqkv__strides_of(c->keys.strides, store.n_kv_heads, key_dim);
    if (i == TQKV__TAIL && k) src = (const uint8_t *)k + (size_t)c->keys.head_dim * tqkv__type_size(store.type);
    size_t bytes;
    tqkv_result r = tqkv__encode_open(&store, src, n_tokens, c->attention.end, &append->streams[i], &bytes);
    if (r != TQKV_OK) return r;
    if (tqkv__in_cache(c, src, bytes)) return TQKV__INVALID("k or v overlaps the cache");
    if (store.channel_scale) append->streams[i].inverses = tqkv__channel_room(c, i, TQKV__INVERSES);
    if (i != TQKV__TAIL && !c->metal) {
        const bool first = left > 0 && tqkv__keeps_halves(c, TQKV__FIRST_KEYS + i);
        append->job.as_halves[append->job.n_streams] =
            (c->learning && tqkv__keeps_halves(c, TQKV__RAW + i) ? TQKV__RAW_HALVES : 0) |
            (first || tqkv__keeps_halves(c, TQKV__LAST_KEYS + i) ? TQKV__ROTATED_HALVES : 0);
    }
    tqkv__add_stream(&append->job, &append->streams[i], src);
    if (!tqkv__has_store(c, TQKV__FIRST_KEYS + i) || left <= 0) return TQKV_OK;
    tqkv_store first = *TQKV__STORE_AT(c, TQKV__FIRST_KEYS + i);
    first.strides = store.strides;
    r = tqkv__stream_open(&first, &append->first[i]);
    tqkv__add_stream(&append->first_job, &append->first[i], src);
    return r;
}

/* Gets memory for rings of `room` positions, or the cache's own, and NULL, where that is enough. */
static tqkv_result tqkv__get_newest(const tqkv_cache *c, int64_t room, tqkv_store rings[2], void **memory, size_t *size)
{
    size_t at[2] = {0, 0};
    for (int side = 0; side < 2; side++) {
        if (!rings[side].head_dim) continue;
        rings[side].capacity = (int)room;
        rings[side].codes = c->own[side];
        rings[side].codes_size = tqkv_codes_size(&rings[side]);
        if (room > c->own_room && (!rings[side].codes_size || !tqkv__reserve(size, rings[side].codes_size, &at[side])))
            return TQKV_OUT_OF_MEMORY;
    }
    if (!*size) return TQKV_OK;
    *size += 63;
    *memory = c->memory.alloc(c->memory.user, *size);
    if (!*memory) return TQKV_OUT_OF_MEMORY;
    for (int side = 0; side < 2; side++)
        if (rings[side].head_dim) rings[side].codes = tqkv__first_line(*memory) + at[side];
    return TQKV_OK;
}

/* Makes the rings of the newest halves large enough for n_tokens more, or small again: then in the cache's memory. */
static tqkv_result tqkv__fit_newest(tqkv_cache *c, int n_tokens)
{
    const int64_t most = (int64_t)c->keys.capacity - c->exact_last + 1; /* of a ring no query sees more */
    int64_t room = tqkv__end_room(c->exact_last, n_tokens < most ? n_tokens : most), from = c->exact_held;
    tqkv_store rings[2] = {c->ends[1][0], c->ends[1][1]};
    void *memory = NULL;
    size_t size = 0;
    if (room < c->own_room) room = c->own_room;
    if (!n_tokens || !tqkv__newest_room(c) || room == tqkv__newest_room(c)) return TQKV_OK;
    if (c->metal) return TQKV__REFUSE(OUT_OF_RANGE, "n_tokens: a GPU has room for the halves of 512");
    if (room > INT_MAX) return TQKV_OUT_OF_MEMORY;
    const tqkv_result r = tqkv__get_newest(c, room, rings, &memory, &size);
    if (r != TQKV_OK) return r;
    if (from < c->attention.end + n_tokens - room) from = c->attention.end + n_tokens - room;
    for (int side = 0; side < 2; side++) {
        tqkv__stream old, ring;
        if (!rings[side].head_dim || tqkv__stream_open(&c->ends[1][side], &old) != TQKV_OK ||
            tqkv__stream_open(&rings[side], &ring) != TQKV_OK)
            continue;
        tqkv__move_rows(&old, from, &ring, from, c->attention.end - from);
        c->ends[1][side] = rings[side];
    }
    if (c->grown) c->memory.free(c->memory.user, c->grown, c->grown_size);
    c->grown = memory;
    c->grown_size = size;
    c->exact_held = from < c->attention.end ? from : c->attention.end;
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_cache_append(tqkv_cache *c, const void *k, const void *v, int n_tokens)
{
    tqkv__append append;
    tqkv_result r = TQKV_OK;
    if (!c) return TQKV__INVALID("the cache is NULL");
    if (c->shared && v) return TQKV__INVALID("v: the keys are the values");
    const int64_t left = c->exact_first - c->attention.end;
    tqkv__encode_job_open(&append.job, &c->attention.parallel, n_tokens, c->attention.end);
    tqkv__encode_job_open(&append.first_job, &c->attention.parallel, left < n_tokens ? (int)left : n_tokens,
                          c->attention.end);
    for (int i = 0; r == TQKV_OK && i < TQKV__CACHE_STREAMS; i++)
        if (tqkv__has_store(c, i)) r = tqkv__append_open(c, i, k, v, n_tokens, &append);
    if (r == TQKV_OK) r = tqkv__check_sources(&append.job);
    if (r == TQKV_OK) r = tqkv__fit_newest(c, n_tokens);
    if (r != TQKV_OK) return r;
    if (c->metal) {
        r = tqkv__backend_of(c->metal)->append(c->metal, c, k, v, n_tokens);
        if (r == TQKV_OK) tqkv__count_append(c, n_tokens);
        return r;
    }
    if (!c->learning && n_tokens) tqkv__drop_raw(c); /* the queries that read them have come */
    if (c->learning)
        r = tqkv__append_learning(c, &append);
    else
        tqkv__append_rows(c, &append);
    if (r == TQKV_OK) tqkv__cache_advance(c, n_tokens);
    return r;
}

static void tqkv__count_ends(const tqkv_cache *c, tqkv_attention *a)
{
    const tqkv__range newest = tqkv__range_of(c, TQKV__LAST_KEYS);
    a->first.n = (int)c->exact_below;
    a->last.n = newest.to - newest.from < c->exact_last ? (int)(newest.to - newest.from) : c->exact_last;
    a->last.from = c->exact_from;
}

static tqkv_attention tqkv__view_codes(const tqkv_cache *c)
{
    tqkv_attention view = c->attention;
    view.kv_len = (int)(c->attention.end - c->first);
    tqkv__count_ends(c, &view);
    const bool full = c->exact_held <= c->attention.end - tqkv__newest_room(c); /* of halves that came */
    if (!full && view.last.from < c->exact_held) view.last.from = c->exact_held;
    return view;
}

#define TQKV__NO_RAW "a copy has no halves for queries at positions that its cache has learned from"

static tqkv_result tqkv__check_newest(const tqkv_cache *c, const tqkv_attention *call)
{
    if (!tqkv__newest_room(c) || tqkv__exact_oldest(call, c->first) >= c->exact_held) return TQKV_OK;
    return TQKV__REFUSE(OUT_OF_RANGE,
                        "n_queries: above 64 and what the last append brought; exact_last has halves for no more");
}

TQKV_API tqkv_result tqkv_cache_view(const tqkv_cache *c, int n_queries, tqkv_attention *out)
{
    if (!c || !out || n_queries < 0) return TQKV__INVALID("the cache or out is NULL, or n_queries negative");
    const int n_raw = tqkv__raw_queries(c, n_queries);
    if (n_raw && n_raw < n_queries)
        return TQKV__REFUSE(OUT_OF_RANGE,
                            "n_queries: they stand on both sides of the position at which the cache learned");
    if (n_raw && !c->raw[0].codes) return TQKV__REFUSE(OUT_OF_RANGE, TQKV__NO_RAW);
    tqkv_attention view = n_raw ? tqkv__raw_attention(c, c->attention.end, n_queries) : tqkv__view_codes(c);
    view.n_queries = n_queries;
    if (n_queries && view.end && !view.kv_len) return TQKV__REFUSE(OUT_OF_RANGE, "no position is resident");
    const tqkv_result r = n_queries && !n_raw ? tqkv__check_newest(c, &view) : TQKV_OK;
    if (r == TQKV_OK) *out = view;
    return r;
}

/* Opens the attention of the queries at some positions to codes, or to what is raw, and its request. first: the
   position of the first row of q and out */
static tqkv_result tqkv__cut_queries(const tqkv_cache *c, bool raw, tqkv__range positions, int64_t first, const void *q,
                                     void *out, tqkv__attention *a, tqkv__request *request)
{
    const int n_queries = (int)(positions.to - positions.from);
    tqkv_attention call = raw ? tqkv__raw_attention(c, positions.to, n_queries) : c->attention;
    call.n_queries = n_queries;
    if (!raw) tqkv__count_ends(c, &call);
    tqkv_result r = tqkv__attention_streams(&call, a);
    a->first = raw ? 0 : c->first; /* after a truncation fewer positions than kv_len's default, or none */
    a->matrix_group = c->matrix_group;
    if (r == TQKV_OK && !raw) r = tqkv__check_newest(c, &a->call);
    if (r == TQKV_OK) r = tqkv__attention_ends(a);
    if (r != TQKV_OK) return r;
    const size_t row = (size_t)(positions.from - first) * (size_t)call.n_heads,
                 wide = tqkv__type_size(call.output_type);
    void *to = (uint8_t *)out + tqkv__row_begin(a, a->call.output_strides, row) * wide;
    if (tqkv__in_cache(c, to, a->out_size)) return TQKV__INVALID("out overlaps the cache");
    return tqkv__cut_whole(a, tqkv__query_at(a, q, row), to, request);
}

/* Checks the arrays of all queries: a request looks at its own alone. */
static TQKV__NOINLINE tqkv_result tqkv__check_all_queries(const tqkv_cache *c, const void *q, int n_queries, void *out)
{
    tqkv__attention a;
    tqkv_attention call = c->attention;
    call.n_queries = n_queries;
    const tqkv_result r = tqkv__attention_shape(&call, &a);
    return r == TQKV_OK ? tqkv__check_q_out(&a, q, out) : r;
}

/* Queries at positions that are read raw and the others have a request each. */
TQKV_API tqkv_result tqkv_cache_attend(tqkv_cache *c, const void *q, int n_queries, void *out)
{
    tqkv__attention a[2];
    tqkv__request requests[2];
    if (!c || n_queries < 0) return TQKV__INVALID("the cache is NULL or n_queries negative");
    if (n_queries == 0) return TQKV_OK;
    const int n_raw = tqkv__raw_queries(c, n_queries);
    const int64_t first = c->attention.end - n_queries;
    const tqkv__range raw = {first, first + n_raw}, coded = {raw.to, c->attention.end};
    const bool both = n_raw && n_raw < n_queries;
    tqkv_result r = both ? tqkv__check_all_queries(c, q, n_queries, out) : TQKV_OK;
    if (r == TQKV_OK && n_raw && !c->raw[0].codes) r = TQKV__REFUSE(OUT_OF_RANGE, TQKV__NO_RAW);
    if (r == TQKV_OK && n_raw) r = tqkv__cut_queries(c, true, raw, first, q, out, &a[0], &requests[0]);
    if (r == TQKV_OK && n_raw < n_queries)
        r = tqkv__cut_queries(c, false, coded, first, q, out, &a[both], &requests[both]);
    if (r != TQKV_OK) return r;
    return c->metal ? tqkv__backend_of(c->metal)->attend(c->metal, c, q, n_queries, out)
                    : tqkv__run_job(requests, both ? 2 : 1);
}

TQKV_API int64_t tqkv_cache_end(const tqkv_cache *c) { return c ? c->attention.end : 0; }

TQKV_API size_t tqkv_cache_bytes(const tqkv_cache *c)
{
    size_t bytes = 0;
    for (int i = 0; c && i < TQKV__CACHE_STORES; i++) {
        const tqkv_store *s = tqkv__store_of(c, i);
        if (s) bytes += s->codes_size + s->norms_size;
    }
    for (int side = 0; c && c->grown && side < 2; side++)
        if (c->own[side])
            bytes += c->ends[1][side].codes_size / (size_t)c->ends[1][side].capacity * (size_t)c->own_room;
    return bytes;
}

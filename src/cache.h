/* >>cache-code: tqkv_cache */

struct tqkv_cache {
    tqkv_attention attention;      /* one query over all appended positions; defaults resolved, sinks in the block */
    tqkv_store keys, values, tail; /* values: only their shape if the keys are the values; tail: zeros without one */
    bool shared;                   /* the keys are the values */
    tqkv_store ends[2][2];         /* halves of the first and of the newest positions: keys, values; zeros without */
    int exact_first, exact_last;
    int64_t exact_below, exact_from; /* positions [0, exact_below) and [exact_from, end) have halves */
    float *centers;                  /* room for those of its streams, one after the other: [n_kv_heads][head_dim] */
    int64_t first;                   /* resident positions [first, attention.end) */
    tqkv_metal *metal;
    int matrix_group;
    tqkv_allocator memory;
    size_t size; /* of the block with the struct, the sinks, the codes and the norms */
};

/* The streams of a cache, in the order of its memory and of snapshots: keys, values, tail. NULL: it has no such stream. */
enum { TQKV__CACHE_STREAMS = 3 };
static tqkv_store *tqkv__stream_of(const tqkv_cache *c, int i)
{
    const tqkv_store *const all[TQKV__CACHE_STREAMS] = {&c->keys, c->shared ? NULL : &c->values,
                                                        c->tail.head_dim ? &c->tail : NULL};
    return (tqkv_store *)(uintptr_t)all[i];
}

/* Halves number i: of the first positions' keys and values, then of the newest ones'. NULL: there are none. */
enum { TQKV__CACHE_ENDS = 4 };
static tqkv_store *tqkv__end_of(const tqkv_cache *c, int i)
{
    const tqkv_store *s = &c->ends[i / 2][i % 2];
    return s->head_dim ? (tqkv_store *)(uintptr_t)s : NULL;
}

/* All stores: the streams, then the halves, of first and of newest positions. */
enum { TQKV__CACHE_STORES = 7, TQKV__FIRST_ENDS = 3, TQKV__LAST_ENDS = 5 };
static tqkv_store *tqkv__store_of(const tqkv_cache *c, int i)
{
    return i < TQKV__CACHE_STREAMS ? tqkv__stream_of(c, i) : tqkv__end_of(c, i - TQKV__CACHE_STREAMS);
}

/* The positions that store i holds. Of the newest halves these may be more than exact_last: a truncation takes
   from them first. */
static tqkv__range tqkv__range_of(const tqkv_cache *c, int i)
{
    const tqkv__range all = {c->first, c->attention.end}, first = {0, c->exact_below};
    tqkv__range newest = all;
    if (c->exact_from > c->first) newest.from = c->exact_from;
    return i < TQKV__FIRST_ENDS ? all : i < TQKV__LAST_ENDS ? first : newest;
}

/* Floats of the centres of the streams before number n; false on overflow. */
static bool tqkv__center_floats(const tqkv_cache *c, int n, size_t *floats)
{
    size_t dims = 0;
    for (int i = 0; i < n; i++)
        if (tqkv__stream_of(c, i)) dims += (size_t)tqkv__stream_of(c, i)->head_dim;
    return tqkv__size_multiply(dims, (size_t)c->keys.n_kv_heads, floats) && *floats <= SIZE_MAX / sizeof(float);
}

/* Starts each part of the block on a cache line: attention to codes that straddle two takes a tenth longer. */
static bool tqkv__reserve(size_t *end, size_t size, size_t *begin)
{
    if (*end > SIZE_MAX - 63 || size > SIZE_MAX - 63 - *end) return false;
    *begin = (*end + 63) / 64 * 64;
    *end = *begin + size;
    return true;
}

static const tqkv__backend *tqkv__backend_of(const tqkv_metal *m) { return (const tqkv__backend *)(const void *)m; }

#ifdef TQKV_METAL
static tqkv_result tqkv__check_kernels(int head_dim, int value_dim);
static tqkv_result tqkv__check_tail(int head_dim, int tail_dim);
#endif

/* Whether a GPU has kernels for a cache of these stores. */
static tqkv_result tqkv__check_metal(const tqkv_store *keys, const tqkv_store *values, const tqkv_store *tail)
{
#ifdef TQKV_METAL
    const tqkv_result r = tqkv__check_kernels(keys->head_dim, values->head_dim);
    return r == TQKV_OK ? tqkv__check_tail(keys->head_dim, tail->head_dim) : r;
#else
    (void)keys;
    (void)values;
    (void)tail;
    return TQKV__REFUSE(UNSUPPORTED, "metal: tqkv.h was compiled without TQKV_METAL");
#endif
}

/* Positions of a ring of halves: whole tiles, none of which wraps. */
static int64_t tqkv__end_room(int64_t exact_last) { return (exact_last + TQKV__TILE - 1) / TQKV__TILE * TQKV__TILE; }

/* Takes the shapes of the halves. */
static tqkv_result tqkv__end_shapes(const tqkv_cache_desc *desc, tqkv_cache *c)
{
    const int first = desc->exact_first, last = desc->exact_last;
    if (first < 0 || last < 0) return TQKV__INVALID("exact_first or exact_last is negative");
    if ((first || last) && (int64_t)first + last > desc->capacity)
        return TQKV__INVALID("exact_first + exact_last is above the capacity");
    if (last > INT_MAX - TQKV__TILE) return TQKV__INVALID("exact_last is too large");
    c->exact_first = first;
    c->exact_last = last;
    for (int i = 0; i < TQKV__CACHE_ENDS; i++) {
        const tqkv_store *codes = i % 2 ? &c->values : &c->keys;
        tqkv_store *s = &c->ends[i / 2][i % 2];
        if (!(i < 2 ? first : last) || codes->format == TQKV_F16 || (i % 2 && c->shared)) continue;
        *s = *codes;
        s->format = TQKV_F16;
        s->rotated = true;
        s->ring = i >= 2;
        s->capacity = i < 2 ? first : (int)tqkv__end_room(last);
    }
    return TQKV_OK;
}

/* Takes the shapes of the streams. */
static tqkv_result tqkv__cache_shapes(const tqkv_cache_desc *desc, tqkv_cache *c)
{
    c->keys.format = desc->key_format ? desc->key_format : TQKV_I8;
    c->keys.head_dim = desc->head_dim;
    c->keys.n_kv_heads = desc->n_kv_heads;
    c->keys.capacity = desc->capacity;
    c->keys.ring = desc->ring;
    c->keys.type = desc->type;
    c->values = c->keys;
    c->shared = desc->shared;
    if (!c->shared) c->values.format = desc->value_format ? desc->value_format : TQKV_TQ4;
    if (desc->value_dim) c->values.head_dim = desc->value_dim;
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

/* Points the attention at the streams. */
static void tqkv__cache_attach(tqkv_attention *a, const tqkv_cache *c)
{
    a->keys = &c->keys;
    a->values = c->shared ? &c->keys : &c->values;
    a->tail = c->tail.head_dim ? &c->tail : NULL;
    a->first_keys = tqkv__end_of(c, 0);
    a->first_values = tqkv__end_of(c, c->shared ? 0 : 1);
    a->last_keys = tqkv__end_of(c, 2);
    a->last_values = tqkv__end_of(c, c->shared ? 2 : 3);
}

/* Resolves the defaults of a desc; checks it and the shapes of all streams. */
static tqkv_result tqkv__cache_resolve(const tqkv_cache_desc *desc, tqkv_cache *c)
{
    tqkv__attention resolved;
    memset(c, 0, sizeof *c);
    tqkv_result r = tqkv__cache_shapes(desc, c);
    if (r == TQKV_OK) r = tqkv__end_shapes(desc, c);
    if (r != TQKV_OK) return r;
    c->attention.query_type = c->attention.output_type = desc->type;
    tqkv__cache_attach(&c->attention, c);
    c->attention.n_heads = desc->n_heads;
    c->attention.window = desc->window;
    c->attention.scale = desc->scale;
    c->attention.softcap = desc->softcap;
    c->attention.sinks = desc->sinks;
    c->attention.parallel = desc->parallel;
    c->attention.allocator = desc->allocator;
    c->attention.arithmetic = desc->arithmetic;
    c->attention.non_causal = desc->non_causal;
    r = tqkv__attention_shape(&c->attention, &resolved);
    if (r != TQKV_OK) return r;
    c->attention = resolved.call;
    if (desc->matrix_group < 0) return TQKV__INVALID("matrix_group is negative");
    c->matrix_group = desc->matrix_group;
    c->metal = desc->metal;
    if (c->metal && (r = tqkv__check_metal(&c->keys, &c->values, &c->tail)) != TQKV_OK) return r;
    if (c->metal && resolved.round_query) return TQKV__REFUSE(UNSUPPORTED, TQKV__FLOATS_ON_GPU);
    c->memory = c->metal ? tqkv__backend_of(c->metal)->memory : c->attention.allocator;
    return TQKV_OK;
}

/* Where the parts of a cache's block begin. */
typedef struct tqkv__cache_block {
    size_t sinks, centers, codes[TQKV__CACHE_STORES], norms[TQKV__CACHE_STORES], size;
} tqkv__cache_block;

/* Divides the block; false on overflow. */
static bool tqkv__divide_block(const tqkv_cache *c, size_t sinks_size, tqkv__cache_block *block)
{
    size_t floats;
    memset(block, 0, sizeof *block);
    block->size = sizeof *c;
    bool fits = tqkv__center_floats(c, TQKV__CACHE_STREAMS, &floats) &&
                tqkv__reserve(&block->size, sinks_size, &block->sinks) &&
                tqkv__reserve(&block->size, floats * sizeof(float), &block->centers);
    for (int i = 0; i < TQKV__CACHE_STORES; i++) {
        const tqkv_store *s = tqkv__store_of(c, i);
        if (!s) continue;
        fits = fits && tqkv__reserve(&block->size, tqkv_codes_size(s), &block->codes[i]) &&
               tqkv__reserve(&block->size, tqkv_norms_size(s), &block->norms[i]);
    }
    return fits && block->size <= SIZE_MAX - 63;
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_create(const tqkv_cache_desc *desc, tqkv_cache **out)
{
    tqkv_cache c;
    tqkv__cache_block block;
    if (!out) return TQKV__INVALID("out is NULL");
    *out = NULL;
    if (!desc) return TQKV__INVALID("desc is NULL");
    const tqkv_result r = tqkv__cache_resolve(desc, &c);
    if (r != TQKV_OK) return r;
    const size_t sinks_size = desc->sinks ? (size_t)c.attention.n_heads * sizeof(float) : 0;
    if (!tqkv__divide_block(&c, sinks_size, &block)) return TQKV__INVALID("a cache of more than SIZE_MAX bytes");
    c.size = block.size + 63;
    char *memory = (char *)c.memory.alloc(c.memory.user, c.size);
    if (!memory) return TQKV_OUT_OF_MEMORY;
    char *lines = memory + (64 - (uintptr_t)memory % 64) % 64;
    c.centers = (float *)(void *)(lines + block.centers);
    for (int i = 0; i < TQKV__CACHE_STORES; i++) {
        tqkv_store *s = tqkv__store_of(&c, i);
        if (!s) continue;
        s->codes_size = tqkv_codes_size(s);
        s->norms_size = tqkv_norms_size(s);
        s->codes = lines + block.codes[i];
        s->norms = (float *)(void *)(lines + block.norms[i]);
    }
    if (sinks_size) {
        memcpy(lines + block.sinks, desc->sinks, sinks_size);
        c.attention.sinks = (const float *)(const void *)(lines + block.sinks);
    }
    *out = (tqkv_cache *)(void *)memory;
    memcpy(memory, &c, sizeof c);
    tqkv__cache_attach(&(*out)->attention, *out);
    return TQKV_OK;
}

TQKV__COLD TQKV_API void tqkv_cache_destroy(tqkv_cache *c)
{
    if (!c) return;
    const tqkv_allocator memory = c->memory;
    memory.free(memory.user, c, c->size);
}

/* The oldest resident position of a cache appended up to `end`. */
static int64_t tqkv__oldest(const tqkv_cache *c, int64_t end)
{
    return end - c->first > c->keys.capacity ? end - c->keys.capacity : c->first;
}

TQKV__FOR_HOST void tqkv__cache_advance(tqkv_cache *c, int n_tokens)
{
    const int64_t end = c->attention.end + n_tokens, room = tqkv__end_room(c->exact_last);
    if (c->attention.end <= c->exact_below) c->exact_below = end < c->exact_first ? end : c->exact_first;
    if (c->exact_from < end - room) c->exact_from = end - room;
    c->attention.end = end;
    c->first = tqkv__oldest(c, end);
}

/* The stores that an append fills, with their sources. */
typedef struct tqkv__append {
    int n, n_streams; /* streams come first, then halves */
    tqkv__stream streams[TQKV__CACHE_STORES];
    const void *src[TQKV__CACHE_STORES];
    size_t size[TQKV__CACHE_STORES]; /* of src */
    int n_tokens[TQKV__CACHE_STORES];
} tqkv__append;

/* Opens store i for its part of the caller's rows. Rows of k hold those of the tail, too. Halves of the first positions keep
   the tokens below exact_first. */
static tqkv_result tqkv__append_open(const tqkv_cache *c, int i, const void *k, const void *v, int n_tokens,
                                     tqkv__append *append)
{
    const bool first = i >= TQKV__FIRST_ENDS && i < TQKV__LAST_ENDS;
    const bool of_values = i == 1 || i == TQKV__FIRST_ENDS + 1 || i == TQKV__LAST_ENDS + 1;
    const int64_t left = first ? c->exact_first - c->attention.end : n_tokens;
    const int key_dim = c->keys.head_dim + c->tail.head_dim;
    const void *src = of_values ? v : k;
    tqkv_store store = *tqkv__store_of(c, i);
    if (first && left <= 0) return TQKV_OK;
    const int n = left < n_tokens ? (int)left : n_tokens;
    store.strides = of_values ? c->values.strides : tqkv__strides_of(c->keys.strides, store.n_kv_heads, key_dim);
    if (i == 2 && k) src = (const uint8_t *)k + (size_t)c->keys.head_dim * tqkv__type_size(store.type);
    const tqkv_result r = tqkv__encode_open(&store, src, n, c->attention.end, &append->streams[append->n]);
    append->src[append->n] = src;
    append->size[append->n] = tqkv__rows_size(&store, n);
    append->n_tokens[append->n++] = n;
    if (i < TQKV__CACHE_STREAMS) append->n_streams = append->n;
    return r;
}

static bool tqkv__append_overlaps(const tqkv__append *append)
{
    for (int i = 0; i < append->n; i++)
        for (int j = 0; j < append->n_streams; j++)
            if (tqkv__encoding_overlaps(&append->streams[i], append->src[j], append->size[j])) return true;
    return false;
}

TQKV_API tqkv_result tqkv_cache_append(tqkv_cache *c, const void *k, const void *v, int n_tokens)
{
    tqkv__append append;
    tqkv__encode_job job;
    tqkv_result r = TQKV_OK;
    if (!c) return TQKV__INVALID("the cache is NULL");
    if (c->shared && v) return TQKV__INVALID("v: the keys are the values");
    append.n = 0;
    for (int i = 0; i < TQKV__CACHE_STORES; i++)
        if (tqkv__store_of(c, i) && (r = tqkv__append_open(c, i, k, v, n_tokens, &append)) != TQKV_OK) return r;
    if (tqkv__append_overlaps(&append)) return TQKV__INVALID("k or v overlaps the cache");
    tqkv__encode_job_open(&job, &c->attention.parallel, n_tokens, c->attention.end);
    for (int i = 0; i < append.n_streams; i++) tqkv__add_stream(&job, &append.streams[i], append.src[i]);
    if (!c->metal)
        r = tqkv__encode_sources(&job);
    else if (tqkv__sources_finite(&job))
        r = tqkv__backend_of(c->metal)->append(c->metal, c, k, v, n_tokens);
    else
        r = TQKV__REFUSE(NOT_FINITE, "k or v holds NaN or infinity");
    if (r != TQKV_OK) return r;
    for (int i = append.n_streams; i < append.n && !c->metal; i++) /* halves: few rows */
        tqkv__encode_tokens(&append.streams[i], append.src[i], tqkv__first_kept(&append.streams[i], append.n_tokens[i]),
                            append.n_tokens[i], c->attention.end);
    tqkv__cache_advance(c, n_tokens);
    return r;
}

static void tqkv__count_ends(const tqkv_cache *c, tqkv_attention *a)
{
    const tqkv__range newest = tqkv__range_of(c, TQKV__LAST_ENDS);
    a->exact_first = (int)c->exact_below;
    a->exact_last = newest.to - newest.from < c->exact_last ? (int)(newest.to - newest.from) : c->exact_last;
}

TQKV_API tqkv_attention tqkv_cache_view(const tqkv_cache *c)
{
    tqkv_attention view;
    memset(&view, 0, sizeof view);
    if (!c) return view;
    view = c->attention;
    view.kv_len = (int)(c->attention.end - c->first);
    tqkv__count_ends(c, &view);
    return view;
}

/* some: NULL, or an attention with the list and the tree */
static tqkv_result tqkv__cache_attention(const tqkv_cache *c, const tqkv_attention *some, int n_queries,
                                         tqkv__attention *a)
{
    tqkv_attention attention = c->attention;
    attention.n_queries = n_queries;
    if (some) {
        attention.tree = some->tree;
        attention.list = some->list;
        attention.list_length = some->list_length;
        attention.list_heads = some->list_heads;
        attention.list_block = some->list_block;
        attention.list_newest = some->list_newest;
    }
    tqkv__count_ends(c, &attention);
    const tqkv_result r = tqkv__attention_open(&attention, a);
    a->first = c->first; /* after a truncation fewer positions than kv_len's default, or none */
    a->matrix_group = c->matrix_group;
    return r;
}

static tqkv_result tqkv__cache_attend(tqkv_cache *c, const tqkv_attention *some, const void *q, int n_queries,
                                      void *out)
{
    tqkv__attention a;
    if (!c || n_queries < 0) return TQKV__INVALID("the cache is NULL or n_queries negative");
    if (n_queries == 0) return TQKV_OK;
    tqkv_result r = tqkv__cache_attention(c, some, n_queries, &a);
    if (r != TQKV_OK) return r;
    if (!c->metal) return tqkv__attend(&a, q, out);
    r = tqkv__check_q_out(&a, q, out);
    return r == TQKV_OK ? tqkv__backend_of(c->metal)->attend(c->metal, c, some, q, n_queries, out) : r;
}

TQKV_API tqkv_result tqkv_cache_attend(tqkv_cache *c, const void *q, int n_queries, void *out)
{
    return tqkv__cache_attend(c, NULL, q, n_queries, out);
}

TQKV_API tqkv_result tqkv_cache_attend_some(tqkv_cache *c, const tqkv_attention *a, const void *q, int n_queries,
                                            void *out)
{
    if (!a) return TQKV__INVALID("the attention is NULL");
    return tqkv__cache_attend(c, a, q, n_queries, out);
}

/* Where the centre of stream i lies. */
static float *tqkv__center_room(const tqkv_cache *c, int i)
{
    size_t before = 0;
    (void)tqkv__center_floats(c, i, &before); /* of a cache that exists */
    return c->centers + before;
}

/* Takes center as that of stream i and its halves, its heads `stride` floats apart; NULL: none. */
static void tqkv__cache_center(tqkv_cache *c, int i, const float *center, size_t stride)
{
    tqkv_store *s = tqkv__stream_of(c, i);
    if (!s) return;
    const size_t dim = (size_t)s->head_dim;
    float *own = tqkv__center_room(c, i);
    s->center = center ? own : NULL;
    for (size_t h = 0; center && h < (size_t)s->n_kv_heads; h++)
        memmove(own + h * dim, center + h * stride, dim * sizeof(float));
    for (int end = i; i < 2 && end < TQKV__CACHE_ENDS; end += 2) c->ends[end / 2][i].center = s->center;
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_set_center(tqkv_cache *c, const float *keys, const float *values)
{
    if (!c) return TQKV__INVALID("the cache is NULL");
    if (c->attention.end != 0) return TQKV__INVALID("a centre: the cache holds positions encoded without it");
    if (c->shared && values) return TQKV__INVALID("values: they have the centre of the keys");
    const size_t n_kv_heads = (size_t)c->keys.n_kv_heads, key_dim = (size_t)(c->keys.head_dim + c->tail.head_dim);
    const size_t n_keys = n_kv_heads * key_dim, n_values = n_kv_heads * (size_t)c->values.head_dim;
    if ((uintptr_t)keys % sizeof(float) || (uintptr_t)values % sizeof(float))
        return TQKV__INVALID("a centre is not aligned as floats");
    if ((keys && !tqkv__all_finite(keys, n_keys)) || (values && !tqkv__all_finite(values, n_values)))
        return TQKV__REFUSE(NOT_FINITE, "a centre holds NaN or infinity");
    if (tqkv__overlap(c, c->size, keys, n_keys * sizeof(float)) ||
        tqkv__overlap(c, c->size, values, n_values * sizeof(float)))
        return TQKV__INVALID("a centre lies in the cache");
    tqkv__cache_center(c, 0, keys, key_dim);
    tqkv__cache_center(c, 1, values, (size_t)c->values.head_dim);
    tqkv__cache_center(c, 2, keys ? keys + c->keys.head_dim : NULL, key_dim);
    return TQKV_OK;
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_set_layout(tqkv_cache *c, const tqkv_cache_layout *layout)
{
    tqkv_cache_layout none;
    memset(&none, 0, sizeof none);
    if (!c) return TQKV__INVALID("the cache is NULL");
    if (!layout) layout = &none;
    c->keys.strides = layout->k;
    c->values.strides = layout->v;
    c->attention.query_strides = layout->q;
    c->attention.output_strides = layout->out;
    return TQKV_OK;
}

TQKV_API int64_t tqkv_cache_end(const tqkv_cache *c) { return c ? c->attention.end : 0; }

TQKV_API int64_t tqkv_cache_first(const tqkv_cache *c) { return c ? c->first : 0; }

TQKV_API size_t tqkv_cache_bytes(const tqkv_cache *c)
{
    size_t bytes = 0;
    for (int i = 0; c && i < TQKV__CACHE_STORES; i++) {
        const tqkv_store *s = tqkv__store_of(c, i);
        if (s) bytes += s->codes_size + s->norms_size;
    }
    return bytes;
}

TQKV_API const tqkv_store *tqkv_cache_keys(const tqkv_cache *c) { return c ? &c->keys : NULL; }
TQKV_API const tqkv_store *tqkv_cache_values(const tqkv_cache *c) { return c ? c->attention.values : NULL; }
TQKV_API const tqkv_store *tqkv_cache_tail(const tqkv_cache *c) { return c ? c->attention.tail : NULL; }

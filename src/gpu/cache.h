/* >>plan-cache: appending to a cache and attending to it */

/* A call of a cache at the beginning of `memory`. */
typedef struct tqkv__cache_plan {
    const tqkv_cache *c;
    tqkv_metal_buffer memory;
    tqkv_metal_plan *plan;
} tqkv__cache_plan;

static tqkv_metal_buffer tqkv__buffer_within(const tqkv__cache_plan *p, const void *at)
{
    tqkv_metal_buffer found = p->memory;
    found.offset += (size_t)((const char *)at - (const char *)p->c);
    return found;
}

static tqkv_metal_store tqkv__store_in_buffer(const tqkv__cache_plan *p, const tqkv_store *s)
{
    tqkv_metal_store store;
    memset(&store, 0, sizeof store);
    store.shape = *s;
    store.codes = tqkv__buffer_within(p, s->codes);
    store.norms = tqkv__buffer_within(p, s->norms);
    if (s->center) store.center = tqkv__buffer_within(p, s->center);
    if (s->channel_scale) store.channel_scale = tqkv__buffer_within(p, s->channel_scale);
    return store;
}

/* Returns the strides of a call: those that are given, or the cache's. */
static tqkv_cache_strides tqkv__layout_of_call(const tqkv_cache *c, const tqkv_cache_strides *given)
{
    const tqkv_cache_strides own = {c->keys.strides, c->values.strides, c->attention.query_strides,
                                    c->attention.output_strides};
    return given ? *given : own;
}

/* Rows that an append takes, of keys, values and tail: tokens from `position` on. */
typedef struct tqkv__rows_in_buffers {
    tqkv_metal_buffer at[TQKV__CACHE_STREAMS], not_finite;
    tqkv_strides strides[TQKV__CACHE_STREAMS];
    tqkv_type type;
    int n_tokens;
    int64_t position;
    bool learnt; /* keys have the centre and the scale that the kernels before learn */
} tqkv__rows_in_buffers;

/* Returns a store of the cache, for rows of the caller's type. */
static tqkv_metal_store tqkv__target_of_rows(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows, int i)
{
    const int side = tqkv__stream_kinds[i].side;
    tqkv_metal_store store = tqkv__store_in_buffer(p, TQKV__STORE_AT(p->c, i));
    store.shape.type = rows->type;
    store.shape.strides = rows->strides[side];
    if (!rows->learnt || side != TQKV__KEYS) return store;
    store.center = tqkv__buffer_within(p, tqkv__channel_room(p->c, TQKV__KEYS, TQKV__CENTERS));
    store.channel_scale = tqkv__buffer_within(p, tqkv__channel_room(p->c, TQKV__KEYS, TQKV__SCALES));
    return store;
}

/* Encodes rows to stores `one` and `other` of a cache, as far as it has them. */
static tqkv_result tqkv__add_rows(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows, int one, int other)
{
    tqkv__mapping mapping = {rows->n_tokens, rows->n_tokens ? rows->position : 0, {false, false}};
    tqkv_metal_store stores[2];
    const tqkv_metal_store *to[2] = {NULL, NULL};
    tqkv_metal_buffer from[2] = {{NULL, 0}, {NULL, 0}};
    const int which[] = {one, other};
    int n = 0;
    for (int i = one == other; i < 2; i++) {
        if (!tqkv__has_store(p->c, which[i])) continue;
        stores[n] = tqkv__target_of_rows(p, rows, which[i]);
        from[n] = rows->at[tqkv__stream_kinds[which[i]].side];
        mapping.besides[n] = tqkv__keeps_halves(p->c, which[i]);
        to[n] = &stores[n];
        n++;
    }
    return n ? tqkv__add_encode(to, from, &mapping, rows->not_finite, p->plan) : TQKV_OK;
}

/* Returns the first n tokens of rows, or as many as there are. */
static tqkv__rows_in_buffers tqkv__rows_until(const tqkv__rows_in_buffers *rows, int64_t n)
{
    tqkv__rows_in_buffers some = *rows;
    if (n < some.n_tokens) some.n_tokens = n > 0 ? (int)n : 0;
    return some;
}

/* Returns rows without the first n tokens, of which there are more. */
static tqkv__rows_in_buffers tqkv__rows_after(const tqkv_cache *c, const tqkv__rows_in_buffers *rows, int n)
{
    tqkv__rows_in_buffers some = *rows;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv_store *s = tqkv__store_of(c, i);
        if (!s) continue;
        const size_t token = tqkv__strides_of(rows->strides[i], s->n_kv_heads, s->head_dim).token;
        some.at[i] = tqkv__buffer_after(some.at[i], (size_t)n * token * tqkv__type_size(rows->type));
    }
    some.n_tokens -= n;
    some.position += n;
    return some;
}

/* Encodes rows to the cache's streams (0), or to what is raw of them (TQKV__RAW). A tail lies apart from keys that are
   not the values. */
static tqkv_result tqkv__add_streams(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows, int first)
{
    const int keys = first + TQKV__KEYS, tail = first + TQKV__TAIL;
    const tqkv_result r = tqkv__add_rows(p, rows, keys, p->c->shared ? tail : first + TQKV__VALUES);
    return r == TQKV_OK && !p->c->shared ? tqkv__add_rows(p, rows, tail, tail) : r;
}

/* Encodes rows of the first positions to what is kept of them besides: of the tail, or of keys and values. None: the
   kernels of all. */
static tqkv_result tqkv__add_first(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows, bool tail)
{
    const tqkv__rows_in_buffers some = tqkv__rows_until(rows, p->c->exact_first - rows->position);
    if (rows->n_tokens && !some.n_tokens) return TQKV_OK;
    return tail ? tqkv__add_rows(p, &some, TQKV__FIRST_TAIL, TQKV__FIRST_TAIL)
                : tqkv__add_rows(p, &some, TQKV__FIRST_KEYS, TQKV__FIRST_VALUES);
}

/* Encodes rows of a cache that does not learn, or no longer. */
static tqkv_result tqkv__add_coded(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows)
{
    tqkv_result r = tqkv__add_streams(p, rows, 0);
    if (r == TQKV_OK) r = tqkv__add_first(p, rows, true);
    if (r == TQKV_OK) r = tqkv__add_first(p, rows, false);
    return r == TQKV_OK ? tqkv__add_rows(p, rows, TQKV__LAST_KEYS, TQKV__LAST_VALUES) : r;
}

/* Returns the raw halves of keys and values as rows to encode. */
static tqkv__rows_in_buffers tqkv__raw_rows(const tqkv__cache_plan *p, tqkv_metal_buffer not_finite)
{
    tqkv__rows_in_buffers rows;
    memset(&rows, 0, sizeof rows);
    rows.not_finite = not_finite;
    rows.type = TQKV_TYPE_F16;
    rows.n_tokens = p->c->learn_from;
    rows.learnt = true;
    for (int i = TQKV__KEYS; i <= TQKV__VALUES; i++) {
        const tqkv_store *raw = &p->c->raw[i];
        if (!raw->head_dim) continue;
        rows.at[i] = tqkv__buffer_within(p, raw->codes);
        rows.strides[i].token = (size_t)raw->head_dim;
        rows.strides[i].head = (size_t)raw->capacity * (size_t)raw->head_dim;
    }
    return rows;
}

/* Learns centre and scale of the keys from what is raw, as tqkv__learn does. */
static tqkv_result tqkv__add_learning(const tqkv__cache_plan *p)
{
    const tqkv_metal_buffer none = {NULL, 0};
    const int side = p->c->shared ? TQKV__KEYS : TQKV__VALUES;
    const tqkv__rows_in_buffers rows = tqkv__raw_rows(p, none);
    tqkv_metal_store keys = tqkv__target_of_rows(p, &rows, TQKV__KEYS);
    const tqkv_metal_buffer results[2] = {keys.center, keys.channel_scale};
    tqkv__judged_rows judged;
    memset(&judged, 0, sizeof judged);
    judged.values = rows.at[side];
    judged.values_size = p->c->raw[side].codes_size;
    judged.is_new = tqkv__buffer_within(p, p->c->is_new);
    judged.is_new_size = (size_t)keys.shape.n_kv_heads * (size_t)rows.n_tokens;
    judged.args.value_dim = p->c->raw[side].head_dim;
    judged.args.n_exact = p->c->exact_first < rows.n_tokens ? p->c->exact_first : rows.n_tokens;
    judged.args.least_rest = TQKV__LEAST_POSITIONS;
    judged.args.least_new = tqkv__least_new(p->c);
    judged.args.value_token_stride = (uint32_t)rows.strides[side].token;
    judged.args.value_head_stride = (uint32_t)rows.strides[side].head;
    return tqkv__add_calibration(&keys, rows.at[TQKV__KEYS], rows.n_tokens, none, 0, 0, p->c->pairs, &judged, results,
                                 p->plan);
}

/* Encodes the raw halves, and of the newest those that their rings hold at `end`: as tqkv__settle. */
static tqkv_result tqkv__add_settling(const tqkv__cache_plan *p, int64_t end, tqkv_metal_buffer not_finite)
{
    const tqkv__rows_in_buffers rows = tqkv__raw_rows(p, not_finite);
    const int64_t oldest = end - tqkv__newest_room(p->c);
    tqkv_metal_dispatch *learns = &p->plan->d[p->plan->n];
    tqkv_result r = tqkv__add_learning(p);
    if (r == TQKV_OK) learns->barrier = p->memory.buffer;
    tqkv_metal_dispatch *reads = &p->plan->d[p->plan->n];
    if (r == TQKV_OK) r = tqkv__add_rows(p, &rows, TQKV__KEYS, TQKV__VALUES);
    if (r != TQKV_OK) return r;
    reads->barrier = p->memory.buffer;
    r = tqkv__add_first(p, &rows, false);
    if (r != TQKV_OK || oldest >= rows.n_tokens) return r;
    const tqkv__rows_in_buffers newest = tqkv__rows_after(p->c, &rows, oldest > 0 ? (int)oldest : 0);
    return tqkv__add_rows(p, &newest, TQKV__LAST_KEYS, TQKV__LAST_VALUES);
}

/* Does what a cache that learns does with rows: those before its last raw position become halves, and their tails what
   they will be. When it has that position it learns, encodes the halves and goes on. */
static tqkv_result tqkv__add_raw(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows)
{
    const int left = (int)(p->c->learn_from - rows->position);
    const tqkv__rows_in_buffers now = tqkv__rows_until(rows, left),
                                raw = tqkv__rows_until(rows, left + TQKV__TILE); /* see tqkv__learn_from */
    tqkv_result r = tqkv__add_streams(p, &raw, TQKV__RAW);
    if (r == TQKV_OK) r = tqkv__add_rows(p, &now, TQKV__TAIL, TQKV__TAIL);
    if (r == TQKV_OK) r = tqkv__add_first(p, &now, true);
    if (r != TQKV_OK || now.n_tokens < left) return r;
    r = tqkv__add_settling(p, rows->position + rows->n_tokens, rows->not_finite);
    if (r != TQKV_OK || rows->n_tokens == left) return r;
    tqkv__rows_in_buffers rest = tqkv__rows_after(p->c, rows, left);
    rest.learnt = true;
    return tqkv__add_coded(p, &rest);
}

/* Whether a GPU can append n_tokens to a cache in its memory, or attend with n_raw queries that read rows as they came:
   that is one allocation, of all that kernels read and write. */
static tqkv_result tqkv__check_on_gpu(const tqkv_cache *c, int n_tokens, int n_raw)
{
    const int64_t wanted = (int64_t)c->exact_last + n_tokens - 1;
    if (!c->metal && (c->learning || n_raw))
        return TQKV__REFUSE(UNSUPPORTED, "calibrate: its halves lie apart in a cache without a context (metal)");
    if (c->grown) return TQKV__REFUSE(UNSUPPORTED, "the processor has appended more tokens at once than a GPU can");
    if (tqkv__newest_room(c) && n_tokens &&
        (wanted < c->keys.capacity ? wanted : c->keys.capacity) > tqkv__newest_room(c))
        return TQKV__REFUSE(OUT_OF_RANGE,
                            "n_tokens: there is room for the halves of 512, without a context (metal) of 64");
    return TQKV_OK;
}

/* Returns the caller's rows, from the cache's end on, if it has room for them. Those of a tail come as v, or behind all
   of the keys'. */
static tqkv_result tqkv__open_rows(const tqkv_cache *c, const tqkv_cache_strides *layout, tqkv_metal_buffer k,
                                   tqkv_metal_buffer v, int n_tokens, tqkv_metal_buffer not_finite,
                                   tqkv__rows_in_buffers *rows)
{
    const tqkv_cache_strides own = tqkv__layout_of_call(c, layout);
    tqkv__stream keys;
    size_t bytes;
    tqkv_store shape = c->keys;
    shape.strides = own.k;
    if (n_tokens < 0) return TQKV__INVALID("n_tokens is negative");
    tqkv_result r = tqkv__stream_shape(&shape, &keys);
    if (r == TQKV_OK) r = tqkv__check_positions(&keys, n_tokens, c->attention.end, -1);
    if (r != TQKV_OK) return r;
    memset(rows, 0, sizeof *rows);
    rows->at[TQKV__KEYS] = k;
    rows->at[TQKV__VALUES] = rows->at[TQKV__TAIL] = v;
    rows->strides[TQKV__KEYS] = own.k;
    rows->strides[TQKV__VALUES] = rows->strides[TQKV__TAIL] = own.v;
    rows->type = c->keys.type;
    rows->n_tokens = n_tokens;
    rows->position = c->attention.end;
    rows->not_finite = not_finite;
    if (c->shared || !c->tail.head_dim) return TQKV_OK;
    if ((r = tqkv__plan_extent(&keys, n_tokens, &bytes)) != TQKV_OK) return r;
    rows->at[TQKV__TAIL] = tqkv__buffer_after(k, bytes);
    memset(&rows->strides[TQKV__TAIL], 0, sizeof rows->strides[TQKV__TAIL]);
    return TQKV_OK;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_cache_append(const tqkv_cache *c, tqkv_metal_buffer memory,
                                                        const tqkv_cache_strides *layout, tqkv_metal_buffer k,
                                                        tqkv_metal_buffer v, int n_tokens, tqkv_metal_buffer not_finite,
                                                        tqkv_metal_plan *plan)
{
    const tqkv__cache_plan p = {c, memory, plan};
    tqkv__rows_in_buffers rows;
    if (!tqkv__open_plan(plan, "cache_append")) return TQKV__INVALID(TQKV__NO_PLAN);
    if (!c) return tqkv__close_plan(plan, TQKV__INVALID("the cache is NULL"));
    tqkv_result r = tqkv__check_on_gpu(c, n_tokens, 0);
    if (r == TQKV_OK) r = tqkv__open_rows(c, layout, k, v, n_tokens, not_finite, &rows);
    if (r == TQKV_OK) r = c->learning ? tqkv__add_raw(&p, &rows) : tqkv__add_coded(&p, &rows);
    return tqkv__close_plan(plan, r);
}

TQKV_METAL_API void tqkv_metal_cache_appended(tqkv_cache *c, int n_tokens) { tqkv__count_append(c, n_tokens); }

TQKV_METAL_API tqkv_result tqkv_metal_cache_failed(tqkv_cache *c, int64_t end)
{
    if (!c) return TQKV__INVALID("the cache is NULL");
    const bool unlearns = !c->learning && end >= 0 && end <= c->learnt_at;
    const tqkv_result r = tqkv_cache_truncate(c, end);
    if (r == TQKV_OK && unlearns) tqkv__unlearn(c);
    return r;
}

/* The attention of a view of a cache, in the order of the streams. */
typedef struct tqkv__cache_call {
    tqkv_metal_attention attention;
    tqkv_metal_store stores[TQKV__STREAMS];
} tqkv__cache_call;

/* Takes the lists and the tree of queries from number `first` on; some: or NULL */
static void tqkv__take_some_buffers(const tqkv_metal_attention *some, int first, tqkv_metal_attention *a)
{
    if (!some) return;
    const tqkv_list *list = &some->attention.list;
    const size_t heads = (size_t)(list->heads > 0 ? list->heads : 1),
                 skipped = (size_t)first * heads * (size_t)(list->length > 0 ? list->length : 0);
    a->tree = some->tree;
    a->list = some->list;
    if (skipped) a->list = tqkv__buffer_after(some->list, skipped * sizeof(int32_t));
    a->attention.tree = some->attention.tree;
    a->attention.list = *list;
    if (list->rows) a->attention.list.rows += skipped;
}

static void tqkv__open_cache_call(const tqkv__cache_plan *p, const tqkv_attention *view, tqkv__cache_call *call)
{
    tqkv_metal_attention *a = &call->attention;
    const tqkv_store *const shapes[TQKV__STREAMS] = {view->keys,       view->values,       view->tail,
                                                     view->first.keys, view->first.values, view->first.tail,
                                                     view->last.keys,  view->last.values};
    const tqkv_metal_store **const stores[TQKV__STREAMS] = {&a->keys,       &a->values,       &a->tail,
                                                            &a->first.keys, &a->first.values, &a->first.tail,
                                                            &a->last.keys,  &a->last.values};
    memset(call, 0, sizeof *call);
    for (int i = 0; i < TQKV__STREAMS; i++) {
        if (!shapes[i]) continue;
        call->stores[i] = tqkv__store_in_buffer(p, shapes[i]);
        *stores[i] = &call->stores[i];
    }
    a->attention = *view;
    if (!a->attention.kv_len) a->attention.end = 0; /* nothing is resident; kv_len alone would be its default */
    a->matrix_group = p->c->matrix_group;
    if (p->c->attention.sinks) a->sinks = tqkv__buffer_within(p, p->c->attention.sinks);
}

/* Finds the scratch of both kinds of queries, which may run at once. coded: the bytes of those that read codes */
static tqkv_result tqkv__scratch_of_cache(const tqkv_cache *c, const tqkv_metal_attention *some, int n_queries,
                                          size_t *coded, size_t *bytes)
{
    const tqkv__cache_plan p = {c, {NULL, 0}, NULL};
    const tqkv_attention codes = tqkv__view_codes(c), halves = tqkv__raw_attention(c, 0, n_queries);
    tqkv__cache_call call;
    size_t raw = 0;
    tqkv__open_cache_call(&p, &codes, &call);
    tqkv__take_some_buffers(some, 0, &call.attention);
    call.attention.attention.n_queries = n_queries;
    call.attention.attention.first.n = c->exact_first; /* as many as there will ever be */
    call.attention.attention.last.n = c->exact_last;
    tqkv_result r = tqkv__plan_scratch_within(&call.attention, TQKV__MOST_SUMS, coded);
    *coded = (*coded + 15) / 16 * 16;
    if (r == TQKV_OK && c->raw_below && c->raw[0].codes && c->metal) {
        tqkv__open_cache_call(&p, &halves, &call);
        tqkv__take_some_buffers(some, 0, &call.attention);
        r = tqkv__plan_scratch_within(&call.attention, TQKV__MOST_SUMS, &raw);
    }
    if (r != TQKV_OK) return r;
    if (raw > SIZE_MAX - *coded) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
    *bytes = *coded + raw;
    return TQKV_OK;
}

/* The queries of a call, their buffers, and where the outputs go. */
typedef struct tqkv__queries_in_buffers {
    const tqkv_metal_attention *some; /* or NULL */
    tqkv_metal_buffer q, scratch, out;
    tqkv_strides q_strides, out_strides;
    int n_queries;
} tqkv__queries_in_buffers;

/* Adds the attention of n queries from number `first` on to a view of the cache. */
static tqkv_result tqkv__add_cache_call(const tqkv__cache_plan *p, const tqkv__queries_in_buffers *from, int first,
                                        int n, tqkv_attention view)
{
    tqkv__cache_call call;
    tqkv_metal_buffer q = from->q, out = from->out;
    view.n_queries = n;
    view.query_strides = from->q_strides;
    view.output_strides = from->out_strides;
    tqkv__open_cache_call(p, &view, &call);
    tqkv__take_some_buffers(from->some, first, &call.attention);
    if (first) {
        q = tqkv__buffer_after(q, (size_t)first * from->q_strides.token * tqkv__type_size(view.query_type));
        out = tqkv__buffer_after(out, (size_t)first * from->out_strides.token * tqkv__type_size(view.output_type));
    }
    tqkv__attend_buffers b = tqkv__buffers_of_call(q, from->scratch, out);
    return tqkv__add_attention(&call.attention, 0, 0, &b, p->plan);
}

/* Checks the rows of all queries together, because a dispatch shows its own alone, and finds their strides. */
static tqkv_result tqkv__check_cut_rows(const tqkv__cache_plan *p, tqkv__queries_in_buffers *from)
{
    tqkv__attention a;
    tqkv_attention whole = p->c->attention;
    whole.n_queries = from->n_queries;
    whole.query_strides = from->q_strides;
    whole.output_strides = from->out_strides;
    const tqkv_result r = tqkv__attention_shape(&whole, &a);
    if (r != TQKV_OK) return r;
    from->q_strides = a.call.query_strides;
    from->out_strides = a.call.output_strides;
    if (!from->out.buffer || (!tqkv__bytes_meet(from->q, a.q_size, from->out, a.out_size) &&
                              !tqkv__bytes_meet(p->memory, p->c->size, from->out, a.out_size)))
        return TQKV_OK;
    return TQKV__INVALID("out overlaps q or the cache");
}

/* Attends for all queries. The first n_raw queries stand where rows are read raw. With a tree, which counts from the
   first query of a call, all the others' call has them, too, and theirs comes after it. */
static tqkv_result tqkv__add_cut_call(const tqkv__cache_plan *p, tqkv__queries_in_buffers *from, int n_raw)
{
    size_t coded = 0, bytes;
    const int n = from->n_queries;
    const bool whole = n_raw && n_raw < n && from->some && from->some->tree.buffer;
    const int first = whole ? 0 : n_raw; /* that reads codes */
    tqkv_result r = tqkv__check_cut_rows(p, from);
    if (r == TQKV_OK && n_raw < n) r = tqkv__add_cache_call(p, from, first, n - first, tqkv__view_codes(p->c));
    if (r == TQKV_OK && n_raw && n_raw < n) r = tqkv__scratch_of_cache(p->c, from->some, n, &coded, &bytes);
    if (r != TQKV_OK || !n_raw) return r;
    const int before = p->plan->n;
    from->scratch = tqkv__buffer_after(from->scratch, coded);
    r = tqkv__add_cache_call(p, from, 0, n_raw, tqkv__raw_attention(p->c, p->c->attention.end - (n - n_raw), n_raw));
    if (r == TQKV_OK && whole) p->plan->d[before].barrier = from->out.buffer;
    return r;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_cache_attend(const tqkv_cache *c, tqkv_metal_buffer memory,
                                                        const tqkv_cache_strides *layout,
                                                        const tqkv_metal_attention *some, tqkv_metal_buffer q,
                                                        int n_queries, tqkv_metal_buffer scratch, tqkv_metal_buffer out,
                                                        tqkv_metal_plan *plan)
{
    const tqkv__cache_plan p = {c, memory, plan};
    if (!tqkv__open_plan(plan, "attend")) return TQKV__INVALID(TQKV__NO_PLAN);
    if (!c || n_queries < 0) return tqkv__close_plan(plan, TQKV__INVALID(TQKV__NO_CACHE_QUERIES));
    if (!n_queries) return tqkv__close_plan(plan, TQKV_OK);
    const int n_raw = tqkv__raw_queries(c, n_queries);
    size_t coded = 0;
    tqkv_result r = tqkv__check_on_gpu(c, 0, n_raw);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    const tqkv_cache_strides own = tqkv__layout_of_call(c, layout);
    tqkv__queries_in_buffers from = {some, q, scratch, out, own.q, own.out, n_queries};
    r = tqkv__add_cut_call(&p, &from, n_raw);
    if (r == TQKV_OK && !scratch.buffer) r = tqkv__scratch_of_cache(c, some, n_queries, &coded, &plan->scratch_size);
    return tqkv__close_plan(plan, r);
}

/* >>attention-code: opening a tqkv_attention: every default resolved, every field checked */

/* Its offset is the alignment of a uint64_t in a struct: 4 on 32-bit x86, where it is 8 by itself. */
struct tqkv__mask_gap {
    char before;
    uint64_t mask;
};

static tqkv_result tqkv__check_tree_and_sinks(const tqkv_attention *a)
{
    if (a->tree && a->non_causal) return TQKV__INVALID("tree: not with non_causal");
    if (a->tree && (a->n_queries > 64 || (uintptr_t)a->tree % offsetof(struct tqkv__mask_gap, mask)))
        return TQKV__INVALID("tree: more than 64 queries, or not aligned as uint64_t");
    if ((uintptr_t)a->sinks % sizeof(float)) return TQKV__INVALID("sinks: not aligned as floats");
    for (int h = 0; a->sinks && h < a->n_heads; h++) {
        const float negated = -a->sinks[h]; /* -INFINITY is no sink */
        if (!tqkv__all_finite(&a->sinks[h], 1) && !(negated > 0.0f))
            return TQKV__REFUSE(NOT_FINITE, "a sink is NaN or +infinity");
    }
    return TQKV_OK;
}

static tqkv_result tqkv__take_tail(tqkv__attention *a)
{
    const tqkv__stream *keys = &a->keys, *tail = &a->tail;
    if (!a->call.tail) return TQKV_OK;
    const tqkv_result r = tqkv__stream_shape(a->call.tail, &a->tail);
    if (r != TQKV_OK) return r;
    if (tail->n_kv_heads != keys->n_kv_heads) return TQKV__INVALID("tail: n_kv_heads is not that of the keys");
    if (tail->capacity != keys->capacity || tail->ring != keys->ring)
        return TQKV__INVALID("tail: capacity or ring is not that of the keys");
    if (tail->pages != keys->pages || tail->n_pages != keys->n_pages || tail->page_size != keys->page_size)
        return TQKV__INVALID("tail: the page table is not that of the keys");
    a->key_dim += tail->head_dim;
    a->isa = tqkv__narrower(a->isa, tqkv__isa_for(tail->head_dim));
    return TQKV_OK;
}

/* Returns 1/sqrt(n), rounded by the bits of the double whatever the caller's mode. For sums of two sizes double is
   enough: no 1/sqrt(n) lies so near to the middle of two floats. */
static float tqkv__inverse_root(int n)
{
    double root = 1.0 / sqrt((double)n);
    uint64_t bits;
    if (tqkv__head_dim_known(n)) return tqkv__size_of(n)->inverse_root;
    memcpy(&bits, &root, sizeof bits);
    bits = (bits + (UINT64_C(1) << 28)) >> 29 << 29; /* a float has 29 bits less */
    memcpy(&root, &bits, sizeof root);
    return (float)root;
}

static tqkv_result tqkv__take_strides(tqkv__attention *a)
{
    tqkv_attention *call = &a->call;
    const int n = call->n_queries, n_heads = call->n_heads;
    call->query_strides = tqkv__strides_of(call->query_strides, n_heads, a->key_dim);
    call->output_strides = tqkv__strides_of(call->output_strides, n_heads, a->value_dim);
    const size_t q_type = tqkv__type_size(call->query_type), out_type = tqkv__type_size(call->output_type);
    if (!tqkv__rows_extent(call->query_strides, n, n_heads, a->key_dim, q_type, &a->q_size) ||
        !tqkv__rows_extent(call->output_strides, n, n_heads, a->value_dim, out_type, &a->out_size))
        return TQKV__INVALID("query_strides or output_strides: rows of more than SIZE_MAX bytes");
    if (tqkv__rows_distinct(call->output_strides, n, n_heads, a->value_dim)) return TQKV_OK;
    return TQKV__INVALID(TQKV__ROWS_SHARED);
}

static tqkv_result tqkv__check_options(const tqkv_attention *a)
{
    if (a->first.n < 0 || a->last.n < 0 || a->last.from < 0)
        return TQKV__INVALID("first.n, last.n or last.from is negative");
    if (!tqkv__all_finite(&a->scale, 1) || !tqkv__all_finite(&a->softcap, 1))
        return TQKV__INVALID("scale or softcap is NaN or infinite");
    if (!tqkv__basis_known(a->query_basis) || !tqkv__basis_known(a->output_basis))
        return TQKV__INVALID("query_basis or output_basis: no tqkv_basis");
    if (!tqkv__type_size(a->query_type) || !tqkv__type_size(a->output_type))
        return TQKV__REFUSE(UNSUPPORTED, TQKV__NO_TYPE);
    return TQKV_OK;
}

/* Resolves and checks everything except the stores' buffers and the resident range. */
static tqkv_result tqkv__attention_shape(const tqkv_attention *a, tqkv__attention *r)
{
    tqkv_result result;
    tqkv_attention *call = &r->call;
    memset(r, 0, offsetof(tqkv__attention, ends));
    if (!a) return TQKV__INVALID("the attention is NULL");
    if ((result = tqkv__stream_shape(a->keys, &r->keys)) != TQKV_OK) return result;
    if ((result = tqkv__stream_shape(a->values, &r->values)) != TQKV_OK) return result;
    *call = *a;
    r->key_dim = r->keys.head_dim;
    r->value_dim = r->values.head_dim;
    r->n_kv_heads = r->keys.n_kv_heads;
    r->reads[TQKV__KEYS] = r->reads[TQKV__VALUES] = true;
    r->reads[TQKV__TAIL] = a->tail != NULL;
    r->isa = tqkv__narrower(tqkv__isa_for(r->key_dim), tqkv__isa_for(r->value_dim));
    if ((result = tqkv__take_tail(r)) != TQKV_OK) return result;
    if (call->scale == 0.0f) call->scale = tqkv__inverse_root(r->key_dim);
    if (!(call->softcap > 0.0f)) call->softcap = 0.0f;
    if (!call->parallel.run) call->parallel.run = tqkv__run_serial;
    r->group = call->n_heads / r->n_kv_heads;
    r->rotate_queries = r->keys.rotated && a->query_basis == TQKV_ORIGINAL;
    r->unrotate_output = r->values.rotated && a->output_basis == TQKV_ORIGINAL;
    if (r->values.n_kv_heads != r->n_kv_heads) return TQKV__INVALID("keys and values differ in n_kv_heads");
    if (call->n_heads <= 0 || call->n_heads % r->n_kv_heads != 0)
        return TQKV__INVALID("n_heads: 0, or not a multiple of n_kv_heads");
    if (call->n_queries < 0 || call->window < 0) return TQKV__INVALID("n_queries or window is negative");
    if ((result = tqkv__check_options(a)) != TQKV_OK) return result;
    if (!tqkv__resolve_allocator(&call->allocator)) return TQKV__INVALID("allocator: one of alloc and free is missing");
    if (!tqkv__array_size(call->n_queries, call->n_heads, 1, 1, &r->n_rows) ||
        !tqkv__size_multiply(r->n_rows, (size_t)r->key_dim, &r->q_elements) || r->q_elements > SIZE_MAX / 64 ||
        !tqkv__size_multiply(r->n_rows, (size_t)r->value_dim, &r->out_elements) || r->out_elements > SIZE_MAX / 64 ||
        r->n_rows > (size_t)INT_MAX)
        return TQKV__INVALID("n_queries * n_heads * head_dim is too large");
    if ((result = tqkv__take_strides(r)) != TQKV_OK) return result;
    r->kernels = tqkv__kernels_for(r->isa);
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++)
        if (r->reads[i]) tqkv__fill_integers(TQKV__STREAM_AT(r, i));
    return tqkv__check_tree_and_sinks(call);
}

static tqkv_result tqkv__attention_range(const tqkv_attention *a, tqkv__attention *r)
{
    if (a->end < 0 || a->kv_len < 0) return TQKV__INVALID("end or kv_len is negative");
    const int64_t key_room = tqkv__room(&r->keys), value_room = tqkv__room(&r->values);
    const int64_t capacity = key_room < value_room ? key_room : value_room;
    const int64_t kv_len = a->kv_len ? a->kv_len : a->end < capacity ? a->end : capacity;
    if (kv_len > capacity || kv_len > a->end) return TQKV__REFUSE(OUT_OF_RANGE, "kv_len is above capacity or end");
    if ((!r->keys.ring && a->end > key_room) || (!r->values.ring && a->end > value_room))
        return TQKV__REFUSE(OUT_OF_RANGE, "end: beyond a linear store or a page table");
    r->first = a->end - kv_len;
    return TQKV_OK;
}

static bool tqkv__share_bytes(const tqkv__stream *a, const tqkv__stream *b)
{
    return tqkv__encoding_overlaps(a, b->codes, b->codes_size) || tqkv__encoding_overlaps(a, b->norms, b->norms_size);
}

/* Refuses streams that share bytes, but for keys and values that are one stream and for page tables over one pool.
   Finds whether keys and values are one. */
static tqkv_result tqkv__check_streams(tqkv__attention *a)
{
    const tqkv__stream *k = &a->keys, *v = &a->values;
    const bool alike = k->codes == v->codes && (k->norms == v->norms || !k->norms_size) && k->format == v->format &&
                       k->head_dim == v->head_dim && k->n_kv_heads == v->n_kv_heads && k->capacity == v->capacity &&
                       k->rotated == v->rotated && k->block_scale == v->block_scale; /* rows in the same bytes */
    const bool one_table = k->pages == v->pages && k->n_pages == v->n_pages;
    a->shared = alike && one_table && k->page_size == v->page_size && k->ring == v->ring && k->center == v->center &&
                k->channel_scale == v->channel_scale;
    if (a->call.tail && (tqkv__share_bytes(k, &a->tail) || tqkv__share_bytes(v, &a->tail)))
        return TQKV__INVALID("tail: overlaps the keys or the values");
    if (a->shared || (alike && k->pages && v->pages && !one_table) || !tqkv__share_bytes(k, v)) return TQKV_OK;
    return TQKV__INVALID("keys and values share bytes, but are not described in the same way");
}

/* Returns where a query's newest positions begin. One whose own position does not matter stands at the end. */
static int64_t tqkv__newest_of(const tqkv_attention *call, int query)
{
    const bool at_end = call->non_causal && !call->window;
    const int64_t back = (int64_t)call->last.n + (at_end ? 0 : call->n_queries - 1 - query);
    const int64_t from = back < 0 ? call->end : call->end - back;
    return from > call->last.from ? from : call->last.from;
}

/* Whether keys or values are kept besides: TQKV__FIRST_KEYS, or TQKV__LAST_KEYS. */
static bool tqkv__has_end(const tqkv__attention *a, int keys) { return a->reads[keys] || a->reads[keys + 1]; }

/* Returns the first position that a query reads from the halves of the newest, 0 where these are codes. */
static int64_t tqkv__exact_at(const tqkv__attention *a, int query)
{
    return tqkv__has_end(a, TQKV__LAST_KEYS) ? tqkv__newest_of(&a->call, query) : 0;
}

/* Returns the oldest position that some query reads from the halves of the newest. */
static int64_t tqkv__exact_oldest(const tqkv_attention *call, int64_t first)
{
    const int64_t newest = tqkv__newest_of(call, 0), from = newest > first ? newest : first;
    return from < call->end ? from : call->end;
}

/* Checks the store of the positions that are kept of a stream besides: halves, or of a tail rows as they are. */
static tqkv_result tqkv__check_end(const tqkv__attention *a, int i, int64_t low, int64_t high)
{
    const int side = tqkv__stream_kinds[i].side;
    const tqkv__stream *s = TQKV__STREAM_AT(a, i), *codes = TQKV__STREAM_AT(a, side);
    if (side == TQKV__TAIL) {
        if (s->format != codes->format || s->rotated != codes->rotated || s->block_scale != codes->block_scale)
            return TQKV__INVALID("first.tail: a store of another format or basis than the tail");
        if (s->ring || a->call.first.n > tqkv__room(s))
            return TQKV__REFUSE(OUT_OF_RANGE, "first.tail: a store that does not hold so many positions");
    } else {
        if (s->kind != TQKV__HALF || s->rotated != codes->rotated)
            return TQKV__INVALID("first, last: a store that is not F16, or rotated otherwise than the codes");
        if (s->ring ? a->call.end - low > s->capacity : high > tqkv__room(s))
            return TQKV__REFUSE(OUT_OF_RANGE, "first, last: a store that does not hold so many positions");
    }
    if (s->head_dim != codes->head_dim || s->n_kv_heads != codes->n_kv_heads)
        return TQKV__INVALID("first, last: a store of other head_dim or n_kv_heads than its stream");
    return tqkv__check_channels_match(s, codes);
}

/* Takes what is kept of the first and of the newest positions, from stores opened by `open`: of codes, and of all
   streams if first positions are no longer resident and all have them. Those of a ring are added apart from the start,
   so that no bit depends on when they go. */
static tqkv_result tqkv__take_ends(tqkv__attention *a, tqkv_result (*open)(const tqkv_store *, tqkv__stream *))
{
    const tqkv_attention *call = &a->call;
    const tqkv_store *const stores[TQKV__STREAMS - TQKV__FIRST_KEYS] = {
        call->first.keys, a->shared ? call->first.keys : call->first.values, call->tail ? call->first.tail : NULL,
        call->last.keys, a->shared ? call->last.keys : call->last.values};
    const int64_t below = call->first.n < call->end ? call->first.n : call->end;
    const bool kept = below && (a->first || a->keys.ring) && stores[0] && stores[1] && (!call->tail || stores[2]);
    for (int i = TQKV__FIRST_KEYS; i < TQKV__STREAMS; i++) {
        const bool last = tqkv__stream_kinds[i].end == TQKV__LAST_END, tail = i == TQKV__FIRST_TAIL;
        const bool halves = !tail && TQKV__STREAM_AT(a, tqkv__stream_kinds[i].side)->kind != TQKV__HALF;
        const tqkv_store *store = stores[i - TQKV__FIRST_KEYS];
        if (!store || (last ? !halves || !call->last.n : !below || !(halves || kept))) continue;
        tqkv_result r = open(store, TQKV__STREAM_AT(a, i));
        if (r == TQKV_OK && last) r = tqkv__check_end(a, i, tqkv__exact_oldest(call, a->first), call->end);
        if (r == TQKV_OK && !last) r = tqkv__check_end(a, i, 0, below);
        if (r != TQKV_OK) return r;
        if (tail) tqkv__fill_integers(TQKV__STREAM_AT(a, i));
        a->reads[i] = true;
        if (!last) a->exact_below = below;
    }
    if (kept) a->kept = a->keys.ring || below < a->first ? below : a->first;
    return TQKV_OK;
}

/* Positions that are read from the same streams. A query reads what is no longer resident, then [0, b), then [b, end),
   where b is tqkv__exact_at. Each query of an item looks only at its own positions of a pass, so its sums have the same
   order alone and in a batch. */
enum { TQKV__GONE, TQKV__OLDER, TQKV__NEWEST, TQKV__PASSES };
typedef struct tqkv__region {
    int number; /* tells regions apart: 2 * pass, plus 1 for the first positions */
    const tqkv__stream *streams[TQKV__CACHE_STREAMS]; /* keys, values, and a tail or NULL */
    int64_t end;                                      /* the first position behind them */
} tqkv__region;

static tqkv__region tqkv__region_at(const tqkv__attention *a, int64_t position, int pass)
{
    tqkv__region region;
    const bool first = position < a->exact_below;
    for (int side = 0; side < TQKV__CACHE_STREAMS; side++) {
        int i = side;
        if (side == TQKV__TAIL)
            i = pass == TQKV__GONE ? TQKV__FIRST_TAIL : side;
        else if (first && a->reads[TQKV__FIRST_KEYS + side])
            i = TQKV__FIRST_KEYS + side;
        else if (pass == TQKV__NEWEST && a->reads[TQKV__LAST_KEYS + side])
            i = TQKV__LAST_KEYS + side;
        region.streams[side] = tqkv__stream_read(a, i);
    }
    region.number = 2 * pass + first;
    region.end = first ? a->exact_below : INT64_MAX;
    return region;
}

/* Returns the resident positions of a range that a query, or one behind it, may read from stream i. */
static tqkv__range tqkv__positions_read(const tqkv__attention *a, int i, tqkv__range range, int query)
{
    const bool first = tqkv__stream_kinds[i].end == TQKV__FIRST_END, last = tqkv__stream_kinds[i].end == TQKV__LAST_END;
    if (last && tqkv__exact_at(a, query) > range.from) range.from = tqkv__exact_at(a, query);
    if (first && a->exact_below < range.to) range.to = a->exact_below;
    if (i == TQKV__FIRST_TAIL) range.to = range.from;
    return range;
}

static const int32_t *tqkv__list_row(const tqkv__attention *a, int query, int kv_head)
{
    const size_t heads = (size_t)a->call.list.heads, head = heads > 1 ? (size_t)kv_head : 0;
    return a->call.list.rows + ((size_t)query * heads + head) * (size_t)a->call.list.length;
}

static int tqkv__list_shift(int block)
{
    for (int shift = 0; shift <= 7; shift++)
        if (block == 1 << shift && (0xd5 >> shift & 1)) return shift; /* 1, 4, 16, 64, 128 */
    return -1;
}

static tqkv_result tqkv__list_shape(tqkv__attention *a)
{
    tqkv_attention *call = &a->call;
    size_t size;
    if (!call->list.rows) return TQKV_OK;
    if (!call->list.heads) call->list.heads = 1;
    if (call->list.length < 0 || call->list.newest < 0) return TQKV__INVALID("list: length or newest is negative");
    if (call->list.heads != 1 && call->list.heads != a->n_kv_heads)
        return TQKV__INVALID("list.heads: neither 1 nor n_kv_heads");
    if (tqkv__list_shift(call->list.block) < 0) return TQKV__INVALID("list.block: none of 1, 4, 16, 64 and 128");
    if (!tqkv__array_size(call->n_queries, call->list.heads, call->list.length, sizeof *call->list.rows, &size))
        return TQKV__INVALID("a list of more than SIZE_MAX bytes");
    return TQKV_OK;
}

static tqkv_result tqkv__check_list(tqkv__attention *a)
{
    const tqkv_attention *call = &a->call;
    const tqkv_result r = tqkv__list_shape(a);
    if (!call->list.rows || r != TQKV_OK) return r;
    if (!tqkv__aligned_at(call->list.rows, sizeof *call->list.rows))
        return TQKV__INVALID("list: not aligned as int32_t");
    for (int64_t i = 0; i < (int64_t)call->n_queries * call->list.heads; i++) {
        const int32_t *row = call->list.rows + i * call->list.length;
        int32_t before = -1;
        for (int j = 0; j < call->list.length && row[j] != -1; before = row[j++])
            if (row[j] <= before) return TQKV__INVALID("list: a row is not ascending, or has a negative number but -1");
    }
    return TQKV_OK;
}

/* Whether a query's list, or its newest positions, have some of those that are gone. */
static bool tqkv__list_meets(const tqkv__attention *a, int query, int kv_head, tqkv__range gone)
{
    const int32_t *row = tqkv__list_row(a, query, kv_head);
    const int shift = tqkv__list_shift(a->call.list.block);
    const int64_t position = a->call.end - a->call.n_queries + query;
    const int64_t resident = (a->call.non_causal ? a->call.end : position + 1) - a->first;
    for (int i = 0; i < a->call.list.length && row[i] >= 0; i++)
        if (((int64_t)row[i] + 1) << shift > gone.from && (int64_t)row[i] << shift < gone.to) return true;
    return a->call.list.newest > resident;
}

/* Refuses queries whose window was longer than what is there. What a list leaves out, nobody misses. */
static tqkv_result tqkv__check_window(const tqkv__attention *a)
{
    const tqkv_attention *call = &a->call;
    if (!call->window || !call->whole_window) return TQKV_OK;
    for (int i = 0; i < call->n_queries; i++) {
        const int64_t oldest = call->end - call->n_queries + i - call->window + 1;
        const tqkv__range gone = {oldest > a->kept ? oldest : a->kept, a->first}; /* of the query's window */
        bool missed = gone.from < gone.to && !call->list.rows;
        for (int h = 0; h < call->list.heads && call->list.rows && gone.from < gone.to && !missed; h++)
            missed = tqkv__list_meets(a, i, h, gone);
        if (missed) return TQKV__REFUSE(OUT_OF_RANGE, "a query's window begins before the oldest resident position");
        if (gone.from >= gone.to) break; /* nor do those behind it */
    }
    return TQKV_OK;
}

static tqkv_result tqkv__attention_streams(const tqkv_attention *a, tqkv__attention *r)
{
    tqkv_result result = tqkv__attention_shape(a, r);
    if (result == TQKV_OK) result = tqkv__stream_memory(a->keys, &r->keys);
    if (result == TQKV_OK) result = tqkv__stream_memory(a->values, &r->values);
    if (result == TQKV_OK && a->tail) result = tqkv__stream_memory(a->tail, &r->tail);
    if (result == TQKV_OK) result = tqkv__check_streams(r);
    if (result == TQKV_OK) result = tqkv__attention_range(a, r);
    return result == TQKV_OK ? tqkv__check_list(r) : result;
}

static tqkv_result tqkv__attention_ends(tqkv__attention *a)
{
    tqkv_result r = TQKV_OK;
    if (a->call.first.n || a->call.last.n) r = tqkv__take_ends(a, tqkv__stream_open);
    for (int i = 0; i < TQKV__STREAMS; i++) {
        const tqkv__stream *s = tqkv__stream_read(a, i);
        a->small_pages = a->small_pages || (s && s->page_size % TQKV__TILE);
        a->odd_rings = a->odd_rings || (s && s->ring && s->capacity % TQKV__TILE);
    }
    return r == TQKV_OK ? tqkv__check_window(a) : r;
}

static tqkv_result tqkv__attention_open(const tqkv_attention *a, tqkv__attention *r)
{
    const tqkv_result result = tqkv__attention_streams(a, r);
    return result == TQKV_OK ? tqkv__attention_ends(r) : result;
}

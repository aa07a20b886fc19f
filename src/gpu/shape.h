/* >>plan-shape: an attention over buffers as one over stores, checked. */

/* An attention over buffers as one over stores. */
typedef struct tqkv__plan_call {
    tqkv_attention attention;
    tqkv_store keys, values, tail, ends[TQKV__STREAMS - TQKV__FIRST_KEYS];
} tqkv__plan_call;

static bool tqkv__same_buffer(tqkv_metal_buffer a, tqkv_metal_buffer b)
{
    return a.buffer == b.buffer && (a.offset == b.offset || !a.buffer);
}

/* Whether two stores have the same page table, or none. */
static bool tqkv__same_table(const tqkv_metal_store *a, const tqkv_metal_store *b)
{
    const tqkv_store *x = &a->shape, *y = &b->shape;
    return tqkv__same_buffer(a->pages, b->pages) &&
           (!a->pages.buffer || (x->n_pages == y->n_pages && x->page_size == y->page_size && x->pages == y->pages));
}

/* Whether some of the bytes that a store takes from a buffer on belong to another store. */
static bool tqkv__stores_overlap(const tqkv_metal_store *a, const tqkv__stream *s, const tqkv_metal_store *b,
                                 const tqkv__stream *t)
{
    return a->codes.buffer && (tqkv__bytes_meet(a->codes, s->codes_size, b->codes, t->codes_size) ||
                               tqkv__bytes_meet(a->codes, s->codes_size, b->norms, t->norms_size) ||
                               tqkv__bytes_meet(a->norms, s->norms_size, b->codes, t->codes_size) ||
                               tqkv__bytes_meet(a->norms, s->norms_size, b->norms, t->norms_size));
}

/* Whether keys and values lie in the same bytes in the same way. */
static bool tqkv__plan_alike(const tqkv_metal_attention *from, const tqkv__attention *a)
{
    const tqkv__stream *k = &a->keys, *v = &a->values;
    return tqkv__same_buffer(from->keys->codes, from->values->codes) && k->format == v->format &&
           (!k->norms_size || tqkv__same_buffer(from->keys->norms, from->values->norms)) &&
           k->head_dim == v->head_dim && from->keys->shape.capacity == from->values->shape.capacity &&
           k->rotated == v->rotated && k->block_scale == v->block_scale;
}

/* Whether they are one stream. */
static bool tqkv__plan_shared(const tqkv_metal_attention *from, const tqkv__attention *a)
{
    return tqkv__plan_alike(from, a) && from->keys->codes.buffer && tqkv__same_table(from->keys, from->values) &&
           a->keys.ring == a->values.ring && tqkv__same_buffer(from->keys->center, from->values->center) &&
           tqkv__same_buffer(from->keys->channel_scale, from->values->channel_scale);
}

/* Checks streams: those that share bytes must be one stream, or by their page tables two in one pool. The tail lies in
   the keys' slots. */
static tqkv_result tqkv__plan_check_streams(const tqkv_metal_attention *from, const tqkv__attention *a)
{
    const tqkv__stream *k = &a->keys, *v = &a->values;
    /* tqkv__plan_shape has seen that there is one. NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    const bool paged = from->keys->pages.buffer && from->values->pages.buffer;
    if (!(tqkv__plan_alike(from, a) && paged) && !tqkv__plan_shared(from, a) &&
        tqkv__stores_overlap(from->keys, k, from->values, v))
        return TQKV__INVALID("keys and values share bytes, but are not described in the same way");
    if (!from->tail) return TQKV_OK;
    if (!tqkv__same_table(from->keys, from->tail)) return TQKV__INVALID("tail: the page table is not that of the keys");
    if (!tqkv__stores_overlap(from->keys, k, from->tail, &a->tail) &&
        !tqkv__stores_overlap(from->values, v, from->tail, &a->tail))
        return TQKV_OK;
    return TQKV__INVALID("tail: overlaps the keys or the values");
}

/* Takes the stores of the positions that are kept besides. Their centres are buffers, too. */
static tqkv_result tqkv__plan_end_shapes(const tqkv_metal_attention *from, tqkv__plan_call *call)
{
    tqkv_ends *first = &call->attention.first, *last = &call->attention.last;
    const tqkv_metal_store *const streams[3] = {from->keys, from->values, from->tail};
    const tqkv_metal_store *const ends[] = {from->first.keys, from->first.values, from->first.tail, from->last.keys,
                                            from->last.values};
    const tqkv_store **const shapes[] = {&first->keys, &first->values, &first->tail, &last->keys, &last->values};
    for (int i = 0; i < TQKV__STREAMS - TQKV__FIRST_KEYS; i++) {
        const int side = tqkv__stream_kinds[TQKV__FIRST_KEYS + i].side, n = i < 3 ? first->n : last->n;
        const tqkv_metal_store *end = ends[i], *codes = streams[side];
        tqkv_store *shape = &call->ends[i];
        *shapes[i] = end && codes && (n || side != TQKV__TAIL) ? shape : NULL;
        if (!*shapes[i] || !n) continue;
        tqkv__plan_store(end, shape);
        shape->center = codes->shape.center;
        shape->channel_scale = codes->shape.channel_scale;
        if (!tqkv__same_buffer(end->center, codes->center) ||
            !tqkv__same_buffer(end->channel_scale, codes->channel_scale))
            return TQKV__INVALID("first or last: a store with another centre or scale than the codes");
        if (end->pages.buffer || shape->n_pages)
            return TQKV__REFUSE(UNSUPPORTED, "first or last with pages of their own: not on a GPU");
    }
    return TQKV_OK;
}

/* These stand for what the processor does not know. A tree of as many queries as one has: none sees any of its
   positions. */
static const uint64_t tqkv__unknown_tree[64] = {0};
static const int32_t tqkv__unknown_list[1] = {0};

/* Does what tqkv__attention_shape does, for `from`. */
static tqkv_result tqkv__plan_shape(const tqkv_metal_attention *from, tqkv__plan_call *call, tqkv__attention *a)
{
    const tqkv_strides none = {0, 0};
    tqkv_attention *to = &call->attention;
    if (!from) return TQKV__INVALID("the attention is NULL");
    if (from->attention.tree && !from->tree.buffer) return TQKV__INVALID("tree: no buffer");
    if (from->attention.list.rows && !from->list.buffer) return TQKV__INVALID("list: no buffer");
    if (from->matrix_group < 0) return TQKV__INVALID("matrix_group is negative");
    tqkv_result r = tqkv__plan_store(from->keys, &call->keys);
    if (r == TQKV_OK) r = tqkv__plan_store(from->values, &call->values);
    if (r == TQKV_OK && from->tail) r = tqkv__plan_store(from->tail, &call->tail);
    if (r != TQKV_OK) return r;
    *to = from->attention;
    to->keys = &call->keys;
    to->values = &call->values;
    to->tail = from->tail ? &call->tail : NULL;
    if ((r = tqkv__plan_end_shapes(from, call)) != TQKV_OK) return r;
    if (from->tree.buffer && !to->tree) to->tree = tqkv__unknown_tree;
    if (from->list.buffer && !to->list.rows) to->list.rows = tqkv__unknown_list;
    to->sinks = NULL;
    memset(&to->parallel, 0, sizeof to->parallel);
    memset(&to->allocator, 0, sizeof to->allocator);
    r = tqkv__attention_shape(to, a);
    if (r == TQKV_OK) r = tqkv__plan_table(from->keys, &a->keys);
    if (r == TQKV_OK) r = tqkv__plan_table(from->values, &a->values);
    if (r == TQKV_OK) r = tqkv__check_kernels(a->keys.head_dim, a->value_dim, a->tail.head_dim);
    if (r == TQKV_OK) r = from->attention.list.rows ? tqkv__check_list(a) : tqkv__list_shape(a);
    if (r == TQKV_OK && a->call.list.rows) r = tqkv__check_list_rows(a);
    if (r == TQKV_OK) r = tqkv__check_strides(a->call.query_strides);
    if (r == TQKV_OK) r = tqkv__check_strides(a->call.output_strides);
    if (r == TQKV_OK) r = tqkv__check_strides(tqkv__strides_of(none, a->call.n_heads, a->value_dim)); /* of slices */
    a->matrix_group = from->matrix_group;
    if (r != TQKV_OK || !a->keys.page_size == !a->values.page_size) return r;
    return TQKV__REFUSE(UNSUPPORTED, "one of keys and values has pages: not on a GPU");
}

/* Lets positions take the place of slots. If a table is empty there are none, and the kernel reads neither table. */
static tqkv_result tqkv__plan_attention_positions(tqkv__attention *a)
{
    if (!a->keys.n_pages || !a->values.n_pages)
        a->keys.n_pages = a->values.n_pages = a->keys.page_size = a->values.page_size = 0;
    const tqkv_result r = tqkv__plan_positions(&a->keys);
    return r == TQKV_OK ? tqkv__plan_positions(&a->values) : r;
}

/* Takes the positions that are kept as halves; slots of positions follow. */
static tqkv_result tqkv__plan_ends(const tqkv_metal_attention *from, tqkv__attention *a)
{
    if (!a->call.first.n && !a->call.last.n) return TQKV_OK;
    a->shared = tqkv__plan_shared(from, a);
    tqkv_result r = tqkv__take_ends(a, tqkv__stream_shape);
    if (r != TQKV_OK) return r;
    if (a->kept && a->call.window && a->call.end > 1 << 30)
        return TQKV__REFUSE(UNSUPPORTED, "first, of a ring behind 2^30 positions, and a window: not on a GPU");
    const bool *first = &a->reads[TQKV__FIRST_KEYS], *last = &a->reads[TQKV__LAST_KEYS];
    if (a->keys.page_size && (first[0] != first[1] || last[0] != last[1]))
        return TQKV__REFUSE(UNSUPPORTED, "one of keys and values has pages: not on a GPU");
    if (a->keys.page_size && (first[0] || last[0]) && from->tail)
        return TQKV__REFUSE(UNSUPPORTED, "first or last of keys with a tail in pages: not on a GPU");
    const bool meet = (last[0] || last[1]) && tqkv__exact_at(a, 0) < a->exact_below;
    if (!meet || ((first[0] || !last[0]) && (first[1] || !last[1]))) return TQKV_OK;
    return TQKV__REFUSE(UNSUPPORTED, "first and last meet, and are of different streams: not on a GPU");
}

/* Takes [first, first + count) if b says slice, else all resident positions, and checks the pages that the processor
   knows. */
static tqkv_result tqkv__plan_range(const tqkv_metal_attention *from, int64_t first, int count, tqkv__attention *a,
                                    tqkv__attend_buffers *b)
{
    const bool known = !a->call.list.rows || from->attention.list.rows, slice = b->slice.to;
    tqkv_result r = slice ? tqkv__check_slice_range(a, first, count) : TQKV_OK;
    if (r != TQKV_OK) return r;
    if (slice) memset(&b->of.sinks, 0, sizeof b->of.sinks);
    const tqkv__range range = {slice ? first : a->first, slice ? first + count : a->call.end};
    const bool begins = range.from == a->first && (range.from < range.to || range.to == a->call.end);
    if (known) r = tqkv__check_seen(a, range);
    if (!begins) a->kept = 0;
    a->first = range.from;
    b->slice_end = range.to;
    return r;
}

/* Attends to [first, first + count) if b says slice, else to all resident positions. */
static tqkv_result tqkv__plan_call_of(const tqkv_metal_attention *from, int64_t first, int count, size_t most_sums,
                                      tqkv__attend_buffers *b, tqkv__attend_plan *plan)
{
    tqkv__plan_call call;
    tqkv__attention a;
    tqkv_result r = tqkv__plan_shape(from, &call, &a);
    if (r == TQKV_OK) b->of = *from;
    if (r == TQKV_OK) r = tqkv__plan_check_streams(from, &a);
    if (r == TQKV_OK) r = tqkv__attention_range(&call.attention, &a);
    if (r == TQKV_OK) r = tqkv__plan_ends(from, &a);
    if (r == TQKV_OK) r = tqkv__check_window(&a);
    plan->empty = r == TQKV_OK && !a.call.n_queries;
    if (plan->empty) return b->slice.to ? tqkv__check_slice_range(&a, first, count) : r;
    if (r == TQKV_OK) r = tqkv__plan_range(from, first, count, &a, b);
    if (r == TQKV_OK) r = tqkv__plan_attention_positions(&a);
    if (r != TQKV_OK) return r;
    return tqkv__plan_attention(&a, b, most_sums, plan);
}

/* >>plan-calls: the calls of attention on a GPU. */

/* All its dispatches, in their order. */
static tqkv_result tqkv__plan_dispatches(const tqkv_metal_attention *from, int64_t first, int count,
                                         tqkv__attend_buffers *b, tqkv_metal_dispatch *d, int *n)
{
    tqkv__attend_plan plan;
    const tqkv_result r = tqkv__plan_call_of(from, first, count, TQKV__MOST_SUMS, b, &plan);
    if (r == TQKV_OK) tqkv__order_dispatches(&plan, d, n);
    return r;
}

/* Of one without exact ends attend and merge, or the list before them: that of the two which is not NULL. */
static tqkv_result tqkv__plan_codes(const tqkv_metal_attention *from, int64_t first, int count, tqkv__attend_buffers *b,
                                    tqkv_metal_dispatch d[2], tqkv_metal_dispatch *list)
{
    tqkv__attend_plan plan;
    if (!d && !list) return TQKV__INVALID(TQKV__NO_DISPATCH);
    if (from && (from->attention.exact_first || from->attention.exact_last))
        return TQKV__REFUSE(UNSUPPORTED, TQKV__ENDS_ON_GPU);
    const tqkv_result r = tqkv__plan_call_of(from, first, count, TQKV__MOST_SUMS, b, &plan);
    if (r != TQKV_OK) return r;
    if (list && !plan.listed) return TQKV__INVALID("list: no buffer");
    if (list) *list = plan.lists[TQKV__CODES_PART];
    if (d) d[0] = plan.attends[TQKV__CODES_PART];
    if (d) d[1] = plan.merge;
    return TQKV_OK;
}

static tqkv__attend_buffers tqkv__buffers_of_call(tqkv_metal_buffer q, tqkv_metal_buffer scratch, tqkv_metal_buffer out)
{
    tqkv__attend_buffers b;
    memset(&b, 0, sizeof b);
    b.q = q;
    b.scratch = scratch;
    b.out = out;
    return b;
}

TQKV_API tqkv_result tqkv__plan_attend_parts(const tqkv_metal_attention *from, tqkv_metal_buffer q,
                                             tqkv_metal_buffer scratch, tqkv_metal_buffer out, tqkv_metal_dispatch *d,
                                             int *n)
{
    tqkv__attend_buffers b = tqkv__buffers_of_call(q, scratch, out);
    return tqkv__plan_dispatches(from, 0, 0, &b, d, n);
}

static int64_t tqkv__positions_in(const tqkv_store *s)
{
    return s->n_pages ? (int64_t)s->n_pages * s->page_size : s->capacity;
}

TQKV_API void tqkv__take_all_parts(tqkv_attention *a, const tqkv_store *keys, const tqkv_store *values)
{
    const tqkv_store *const stores[] = {keys, values};
    const int64_t end = (int64_t)a->exact_first + a->exact_last + 1; /* one that is neither */
    a->end = end;
    a->kv_len = end < INT_MAX ? (int)end : INT_MAX;
    for (int i = 0; i < 2; i++) {
        const int64_t room = tqkv__positions_in(stores[i]);
        if (room < a->kv_len) a->kv_len = (int)room;
        if (room < a->end && !stores[i]->ring) a->end = room;
    }
}

TQKV_API tqkv_result tqkv_metal_plan_attend(const tqkv_metal_attention *from, tqkv_metal_buffer q,
                                            tqkv_metal_buffer scratch, tqkv_metal_buffer out, tqkv_metal_dispatch d[2])
{
    tqkv__attend_buffers b = tqkv__buffers_of_call(q, scratch, out);
    return tqkv__plan_codes(from, 0, 0, &b, d, NULL);
}

TQKV_API tqkv_result tqkv_metal_plan_attend_list(const tqkv_metal_attention *from, tqkv_metal_buffer scratch,
                                                 tqkv_metal_dispatch *d)
{
    const tqkv_metal_buffer none = {NULL, 0};
    tqkv__attend_buffers b = tqkv__buffers_of_call(none, scratch, none);
    return tqkv__plan_codes(from, 0, 0, &b, NULL, d);
}

static tqkv__attend_buffers tqkv__buffers_of_slice(tqkv_metal_buffer q, tqkv_metal_buffer scratch,
                                                   tqkv_metal_buffer out, tqkv_metal_buffer max, tqkv_metal_buffer sum)
{
    tqkv__attend_buffers b = tqkv__buffers_of_call(q, scratch, out);
    b.slice.to = true;
    b.slice.max = max;
    b.slice.sum = sum;
    return b;
}

TQKV_API tqkv_result tqkv__plan_partial_parts(const tqkv_metal_attention *from, tqkv_metal_buffer q, int64_t first,
                                              int count, tqkv_metal_buffer scratch, tqkv_metal_buffer out,
                                              tqkv_metal_buffer max, tqkv_metal_buffer sum, tqkv_metal_dispatch *d,
                                              int *n)
{
    tqkv__attend_buffers b = tqkv__buffers_of_slice(q, scratch, out, max, sum);
    return tqkv__plan_dispatches(from, first, count, &b, d, n);
}

TQKV_API tqkv_result tqkv_metal_plan_attend_partial(const tqkv_metal_attention *from, tqkv_metal_buffer q,
                                                    int64_t first, int count, tqkv_metal_buffer scratch,
                                                    tqkv_metal_buffer out, tqkv_metal_buffer max, tqkv_metal_buffer sum,
                                                    tqkv_metal_dispatch d[2])
{
    tqkv__attend_buffers b = tqkv__buffers_of_slice(q, scratch, out, max, sum);
    if (from && from->list.buffer) return TQKV__REFUSE(UNSUPPORTED, TQKV__LISTS_IN_PLAN);
    return tqkv__plan_codes(from, first, count, &b, d, NULL);
}

TQKV_API tqkv_result tqkv_metal_plan_attend_merge_slice(const tqkv_metal_attention *from, tqkv_metal_buffer out,
                                                        tqkv_metal_buffer max, tqkv_metal_buffer sum,
                                                        const tqkv_metal_attention *slice, tqkv_metal_buffer src_out,
                                                        tqkv_metal_buffer src_max, tqkv_metal_buffer src_sum,
                                                        tqkv_metal_dispatch *d)
{
    tqkv__plan_call call;
    tqkv__attention a, other;
    tqkv__attend_buffers b = tqkv__buffers_of_call(src_out, src_out, out);
    const tqkv__slice_buffers slices = {true, true, max, sum, src_max, src_sum};
    if (!d) return TQKV__INVALID(TQKV__NO_DISPATCH);
    tqkv_result r = tqkv__plan_shape(from, &call, &a);
    if (r == TQKV_OK) r = tqkv__plan_shape(slice, &call, &other);
    if (r == TQKV_OK) r = tqkv__check_slices_match(&a, &other);
    if (r != TQKV_OK) return r;
    b.slice = slices;
    tqkv__plan_slice(d, &a, &b, src_out, other.values.rotated && !a.values.rotated);
    tqkv__plan_constant(d, TQKV_FC_ROTATED, a.values.rotated && !other.values.rotated);
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_metal_plan_attend_merge(const tqkv_metal_attention *a, tqkv_metal_buffer out,
                                                  tqkv_metal_buffer max, tqkv_metal_buffer sum,
                                                  tqkv_metal_buffer src_out, tqkv_metal_buffer src_max,
                                                  tqkv_metal_buffer src_sum, tqkv_metal_dispatch *d)
{
    return tqkv_metal_plan_attend_merge_slice(a, out, max, sum, a, src_out, src_max, src_sum, d);
}

TQKV_API tqkv_result tqkv_metal_plan_attend_finish(const tqkv_metal_attention *from, tqkv_metal_buffer src_out,
                                                   tqkv_metal_buffer src_max, tqkv_metal_buffer src_sum,
                                                   tqkv_metal_buffer out, tqkv_metal_dispatch *d)
{
    tqkv__plan_call call;
    tqkv__attention a;
    tqkv__attend_buffers b = tqkv__buffers_of_call(src_out, src_out, out);
    if (!d) return TQKV__INVALID(TQKV__NO_DISPATCH);
    const tqkv_result r = tqkv__plan_shape(from, &call, &a);
    if (r != TQKV_OK) return r;
    b.sinks = from->sinks;
    b.slice.from = true;
    b.slice.src_max = src_max;
    b.slice.src_sum = src_sum;
    tqkv__plan_slice(d, &a, &b, src_out, a.unrotate_output);
    return TQKV_OK;
}

/* Adds the most scratch for positions that are kept as halves: a stretch more than they fill, or all of a ring. */
static tqkv_result tqkv__add_scratch_of_end(const tqkv__attention *a, int last, size_t *bytes)
{
    const tqkv_attention *call = &a->call;
    const tqkv_store *keys = last ? call->last_keys : call->first_keys,
                     *values = last ? call->last_values : call->first_values;
    const int64_t n = last ? call->exact_last : call->exact_first, length = TQKV__STRETCH_TILES * TQKV__SIMD_WIDTH;
    if (!n || (!keys && !values)) return TQKV_OK;
    const bool ring = keys ? keys->ring : a->keys.ring;
    const int64_t room = !ring ? 0 : keys ? keys->capacity : a->keys.capacity;
    const size_t stretches = (size_t)((n > room ? n : room) / length + 2),
                 row = sizeof(float) * (stretches * ((size_t)a->value_dim + 2) + 2);
    if (a->n_rows > (SIZE_MAX - *bytes) / row) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
    *bytes += a->n_rows * row;
    return TQKV_OK;
}

/* The most scratch for any `end`. A window takes most stretches and sections where it begins with the last slot of a
   section. If the whole store takes sections, a part of it may take stretches, up to their limit. */
static tqkv_result tqkv__plan_most_scratch(tqkv__attention *a, size_t most_sums, size_t *bytes)
{
    tqkv__split split;
    const int64_t section = (int64_t)TQKV__SECTION * TQKV__STRETCH_TILES, width = TQKV__SIMD_WIDTH;
    const int64_t seen = (int64_t)a->call.window - 1 + a->call.n_queries,
                  all = (a->keys.capacity + width - 1) / width + (a->call.list ? 8 : 0);
    const bool part = a->call.window && !a->keys.ring && seen / width + 2 < all;
    const int64_t first = part ? section - 1 : 0, end = part ? section + (seen + width - 2) / width : all;
    tqkv_result r = tqkv__choose_split(a, first, end, most_sums, &split);
    if (r != TQKV_OK) return r;
    const size_t stretches = most_sums + a->n_rows * 2 * sizeof(float);
    *bytes = split.scratch_size;
    if (split.sections_each == 1 && *bytes < stretches) *bytes = stretches;
    *bytes += tqkv__list_rows_size(a) * (a->call.exact_first || a->call.exact_last ? TQKV__PARTS : 1);
    for (int last = 0; last < 2 && r == TQKV_OK; last++) r = tqkv__add_scratch_of_end(a, last, bytes);
    return r;
}

static tqkv_result tqkv__plan_scratch_within(const tqkv_metal_attention *from, size_t most_sums, size_t *bytes)
{
    tqkv__plan_call call;
    tqkv__attention a;
    tqkv_result r = tqkv__plan_shape(from, &call, &a);
    if (r == TQKV_OK) r = tqkv__plan_attention_positions(&a);
    return r == TQKV_OK ? tqkv__plan_most_scratch(&a, most_sums, bytes) : r;
}

TQKV_API tqkv_result tqkv_metal_plan_attend_scratch(const tqkv_metal_attention *from, size_t *bytes)
{
    return bytes ? tqkv__plan_scratch_within(from, TQKV__MOST_SUMS, bytes) : TQKV_INVALID_ARGUMENT;
}

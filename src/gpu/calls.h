/* >>plan-calls: the calls of attention on a GPU. */

/* Adds the most scratch for positions that are kept as halves: a stretch more than they fill, or all of a ring. */
static tqkv_result tqkv__add_scratch_of_end(const tqkv__attention *a, int last, size_t *bytes)
{
    const tqkv_attention *call = &a->call;
    const tqkv_store *keys = last ? call->last.keys : call->first.keys,
                     *values = last ? call->last.values : call->first.values;
    const int64_t newest = call->last.n ? (int64_t)call->last.n + call->n_queries : 0,
                  n = last ? newest : call->first.n, length = TQKV__STRETCH_TILES * TQKV__SIMD_WIDTH;
    if (!n || (!keys && !values)) return TQKV_OK;
    const bool ring = keys ? keys->ring : a->keys.ring;
    const int64_t room = !ring ? 0 : keys ? keys->capacity : a->keys.capacity;
    const size_t stretches = (size_t)((n > room ? n : room) / length + 2),
                 row = sizeof(float) * (stretches * ((size_t)a->value_dim + 2) + 2);
    if (a->n_rows > (SIZE_MAX - *bytes) / row) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
    *bytes += a->n_rows * row;
    return TQKV_OK;
}

/* Returns the most scratch of a context before tile `end` whose stretches are in strands: longer ones may take less. */
static size_t tqkv__scratch_of_strands(const tqkv__attention *a, const tqkv__split *split, int64_t end,
                                       size_t most_sums)
{
    const size_t few = tqkv__most_stranded(split, a->keys.head_dim, end, most_sums),
                 all = (size_t)(tqkv__stretch_of(end > 0 ? end - 1 : 0, split->n_short) - split->first_stretch + 1);
    const size_t stretches = few < all ? few : all, most = stretches < TQKV__SECTION ? stretches : TQKV__SECTION,
                 row = ((size_t)a->value_dim + 2) * sizeof(float);
    return most ? a->n_rows * (row * TQKV__STRANDS * most + 2 * sizeof(float)) : 0;
}

/* Finds the most scratch for any `end`. A window takes most stretches and sections where it begins with the last slot
   of a section. If the whole store takes sections, a slice of it may take stretches, up to their limit. */
static tqkv_result tqkv__plan_most_scratch(tqkv__attention *a, size_t most_sums, size_t *bytes)
{
    tqkv__split split;
    const int64_t section = (int64_t)TQKV__SECTION * TQKV__STRETCH_TILES, width = TQKV__SIMD_WIDTH;
    const int64_t seen = (int64_t)a->call.window - 1 + a->call.n_queries,
                  all = (a->keys.capacity + width - 1) / width + (a->call.list.rows ? 8 : 0);
    const bool bounded = a->call.window && !a->keys.ring && seen / width + 2 < all;
    const int64_t first = bounded ? section - 1 : 0, end = bounded ? section + (seen + width - 2) / width : all;
    tqkv_result r = tqkv__choose_split(a, first, end, most_sums, &split);
    if (r != TQKV_OK) return r;
    const size_t stretches = most_sums + a->n_rows * 2 * sizeof(float);
    *bytes = split.scratch_size;
    const size_t strands = tqkv__scratch_of_strands(a, &split, end, most_sums);
    if (split.sections_each == 1 && *bytes < stretches) *bytes = stretches;
    if (*bytes < strands) *bytes = strands;
    *bytes += tqkv__list_rows_size(a) * (a->call.first.n || a->call.last.n ? TQKV__REGIONS : 1);
    for (int last = 0; last < 2 && r == TQKV_OK; last++) r = tqkv__add_scratch_of_end(a, last, bytes);
    return r;
}

static tqkv_result tqkv__plan_scratch_within(const tqkv_metal_attention *from, size_t most_sums, size_t *bytes)
{
    tqkv__plan_call call;
    tqkv__attention a;
    tqkv_result r = tqkv__plan_shape(from, &call, &a);
    if (r == TQKV_OK) r = tqkv__plan_attention_positions(&a);
    if (r == TQKV_OK && !a.call.n_queries) *bytes = 0;
    return r == TQKV_OK && a.call.n_queries ? tqkv__plan_most_scratch(&a, most_sums, bytes) : r;
}

/* Adds all dispatches of an attention. Without scratch the plan says how much there has to be. */
static tqkv_result tqkv__add_attention(const tqkv_metal_attention *from, int64_t first, int count,
                                       tqkv__attend_buffers *b, tqkv_metal_plan *plan)
{
    tqkv__attend_plan dispatches;
    tqkv_result r = TQKV_OK;
    if (!b->scratch.buffer) r = tqkv__plan_scratch_within(from, TQKV__MOST_SUMS, &plan->scratch_size);
    if (r == TQKV_OK) r = tqkv__plan_call_of(from, first, count, TQKV__MOST_SUMS, b, &dispatches);
    if (r == TQKV_OK) tqkv__order_dispatches(&dispatches, plan);
    return r;
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

TQKV_METAL_API tqkv_result tqkv_metal_plan_attend(const tqkv_metal_attention *from, tqkv_metal_buffer q,
                                                  tqkv_metal_buffer scratch, tqkv_metal_buffer out,
                                                  tqkv_metal_plan *plan)
{
    tqkv__attend_buffers b = tqkv__buffers_of_call(q, scratch, out);
    if (!tqkv__open_plan(plan, "attend")) return TQKV__INVALID(TQKV__NO_PLAN);
    return tqkv__close_plan(plan, tqkv__add_attention(from, 0, 0, &b, plan));
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_partial(const tqkv_metal_attention *from, tqkv_metal_buffer q,
                                                          int64_t first, int count, tqkv_metal_buffer scratch,
                                                          tqkv_metal_buffer out, tqkv_metal_buffer max,
                                                          tqkv_metal_buffer sum, tqkv_metal_plan *plan)
{
    tqkv__attend_buffers b = tqkv__buffers_of_call(q, scratch, out);
    const tqkv__slice_buffers slice = {false, true, max, sum, {NULL, 0}, {NULL, 0}};
    b.slice = slice;
    if (!tqkv__open_plan(plan, "attend_partial")) return TQKV__INVALID(TQKV__NO_PLAN);
    return tqkv__close_plan(plan, tqkv__add_attention(from, first, count, &b, plan));
}

/* Adds the kernel that finishes a slice or, with another attention, adds it to that one's. */
static tqkv_result tqkv__add_merge(const tqkv_metal_attention *from, const tqkv_metal_attention *src,
                                   tqkv_metal_buffer src_out, tqkv__attend_buffers *b, tqkv_metal_plan *plan)
{
    tqkv__plan_call call;
    tqkv__attention a, other;
    tqkv_result r = tqkv__plan_shape(from, &call, &a);
    if (r == TQKV_OK && src) r = tqkv__plan_shape(src, &call, &other);
    if (r == TQKV_OK && src) r = tqkv__check_slices_match(&a, &other);
    if (r != TQKV_OK) return r;
    /* The numbers are in buffers, and are not compared. */
    if (src && (!from->values->channel_scale.buffer != !src->values->channel_scale.buffer ||
                !from->values->center.buffer != !src->values->center.buffer))
        return TQKV__INVALID("slices of values with and without a scale of their channels, or a centre");
    b->of = *from;
    if (src) memset(&b->of.sinks, 0, sizeof b->of.sinks); /* which finish reads */
    if (!a.call.n_queries) return TQKV_OK;
    const bool unrotate = !b->slice.to && (!a.values.rotated || a.unrotate_output);
    const tqkv__merge_args args = {0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0};
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_merge_begin(d, &a, b, args, unrotate);
    tqkv__plan_bind(d, "src_out", 1, src_out, a.out_elements * sizeof(float), false);
    tqkv__plan_bind(d, "scratch", 2, src_out, 0, false);
    tqkv__plan_bind_values(d, &a, b, unrotate);
    tqkv__plan_constant(d, TQKV_FC_CENTER, false); /* the slices have what the keys' centres add */
    return TQKV_OK;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_merge(const tqkv_metal_attention *from, tqkv_metal_buffer out,
                                                        tqkv_metal_buffer max, tqkv_metal_buffer sum,
                                                        const tqkv_metal_attention *src, tqkv_metal_buffer src_out,
                                                        tqkv_metal_buffer src_max, tqkv_metal_buffer src_sum,
                                                        tqkv_metal_plan *plan)
{
    tqkv__attend_buffers b = tqkv__buffers_of_call(src_out, src_out, out);
    const tqkv__slice_buffers slice = {true, true, max, sum, src_max, src_sum};
    b.slice = slice;
    if (!tqkv__open_plan(plan, "attend_merge")) return TQKV__INVALID(TQKV__NO_PLAN);
    if (!src) return tqkv__close_plan(plan, TQKV__INVALID("the attention of the other slice is NULL"));
    return tqkv__close_plan(plan, tqkv__add_merge(from, src, src_out, &b, plan));
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_finish(const tqkv_metal_attention *from, tqkv_metal_buffer src_out,
                                                         tqkv_metal_buffer src_max, tqkv_metal_buffer src_sum,
                                                         tqkv_metal_buffer out, tqkv_metal_plan *plan)
{
    tqkv__attend_buffers b = tqkv__buffers_of_call(src_out, src_out, out);
    const tqkv__slice_buffers slice = {true, false, {NULL, 0}, {NULL, 0}, src_max, src_sum};
    b.slice = slice;
    if (!tqkv__open_plan(plan, "attend_finish")) return TQKV__INVALID(TQKV__NO_PLAN);
    return tqkv__close_plan(plan, tqkv__add_merge(from, NULL, src_out, &b, plan));
}

/* >>attend-calls: the arrays of a call, checked, and the public calls of attention */

/* The arrays of one call. No written array may overlap another one. */
typedef struct tqkv__arrays {
    const void *at[8];
    size_t size[8];
    int n;
    size_t alignment;
} tqkv__arrays;

static void tqkv__add_array(tqkv__arrays *arrays, const void *at, size_t size)
{
    TQKV_ASSERT(arrays->n < 8);
    arrays->at[arrays->n] = at;
    arrays->size[arrays->n++] = size;
}

static void tqkv__add_slice(tqkv__arrays *arrays, const tqkv__attention *a, const void *out, const void *max,
                            const void *sum)
{
    tqkv__add_array(arrays, out, a->out_elements * sizeof(float));
    tqkv__add_array(arrays, max, a->n_rows * sizeof(float));
    tqkv__add_array(arrays, sum, a->n_rows * sizeof(float));
}

static tqkv_result tqkv__check_arrays(const tqkv__arrays *arrays, int n_written)
{
    for (int i = 0; i < arrays->n; i++)
        if (!tqkv__aligned_at(arrays->at[i], arrays->alignment))
            return TQKV__INVALID("an array is NULL or not aligned as its type: out, max or sum");
    for (int i = 0; i < n_written; i++)
        for (int j = i + 1; j < arrays->n; j++)
            if (tqkv__overlap(arrays->at[i], arrays->size[i], arrays->at[j], arrays->size[j]))
                return TQKV__INVALID("an output overlaps another array or the sinks");
    return TQKV_OK;
}

static bool tqkv__reads(const tqkv__attention *a, const void *q, const void *p, size_t size)
{
    const size_t n_queries = (size_t)a->call.n_queries,
                 list_size = n_queries * (size_t)a->call.list.heads * (size_t)a->call.list.length * sizeof(int32_t);
    for (int i = 0; i < TQKV__STREAMS; i++) {
        const tqkv__stream *s = tqkv__stream_read(a, i);
        if (s && tqkv__stream_overlaps(s, p, size)) return true;
    }
    return tqkv__overlap(q, a->q_size, p, size) ||
           tqkv__overlap(a->call.sinks, (size_t)a->call.n_heads * sizeof(float), p, size) ||
           tqkv__overlap(a->call.tree, n_queries * sizeof(uint64_t), p, size) ||
           tqkv__overlap(a->call.list.rows, list_size, p, size);
}

/* Checks the outputs in arrays against what the call reads, and q for NaN and infinity. */
static tqkv_result tqkv__check_attend(const tqkv__attention *a, const void *q, const tqkv__arrays *arrays)
{
    if (!tqkv__aligned_at(q, tqkv__type_size(a->call.query_type)))
        return TQKV__INVALID("q: NULL or not aligned as its type");
    for (int i = 0; i < arrays->n; i++)
        if (tqkv__reads(a, q, arrays->at[i], arrays->size[i]))
            return TQKV__INVALID("an output overlaps q, a store, the sinks, the tree or the list");
    const tqkv_result r = tqkv__check_arrays(arrays, arrays->n);
    if (r != TQKV_OK || tqkv__all_rows_finite(a->isa->codec, a->call.query_type, q, a->call.query_strides,
                                              a->call.n_queries, a->call.n_heads, a->key_dim))
        return r;
    return TQKV__REFUSE(NOT_FINITE, "q holds NaN or infinity");
}

static tqkv_result tqkv__check_q_out(const tqkv__attention *a, const void *q, const void *out)
{
    const size_t size = tqkv__type_size(a->call.output_type);
    const tqkv__arrays arrays = {{out}, {a->out_size}, 1, size};
    return tqkv__check_attend(a, q, &arrays);
}

static tqkv_result tqkv__cut_whole(const tqkv__attention *a, const void *q, void *out, tqkv__request *request)
{
    const tqkv__range all = {a->first, a->call.end};
    tqkv_result r = tqkv__check_q_out(a, q, out);
    if (r == TQKV_OK) r = tqkv__check_seen(a, all);
    if (r == TQKV_OK) tqkv__cut(a, all, q, out, NULL, NULL, request);
    return r;
}

TQKV_API tqkv_result tqkv_attend(const tqkv_attention *attention, const void *q, void *out)
{
    tqkv__attention a;
    tqkv__request request;
    tqkv_result r = tqkv__attention_open(attention, &a);
    if (r != TQKV_OK || !a.call.n_queries) return r;
    r = tqkv__cut_whole(&a, q, out, &request);
    return r == TQKV_OK ? tqkv__run_job(&request, 1) : r;
}

typedef struct tqkv__output {
    uint64_t begin, token_stride, head_stride, row;
    size_t n_tokens, n_heads;
} tqkv__output;

static tqkv__output tqkv__output_of(const tqkv__request *request)
{
    const tqkv__attention *a = request->a;
    const size_t size = tqkv__type_size(a->call.output_type);
    const tqkv__output output = {
        (uintptr_t)request->out,     a->call.output_strides.token * size, a->call.output_strides.head * size,
        (size_t)a->value_dim * size, (size_t)a->call.n_queries,           (size_t)a->call.n_heads};
    return output;
}

/* What a batch writes, in extents of memory. */
typedef struct tqkv__extent {
    uint64_t begin, end;
} tqkv__extent;
typedef struct tqkv__writes {
    tqkv__extent *extents; /* [n]; NULL while they are counted */
    size_t n;
} tqkv__writes;

/* Adds the rows of an output; those that touch are one extent. */
static void tqkv__add_output(tqkv__writes *writes, tqkv__output output)
{
    if (output.head_stride == output.row) output.row *= output.n_heads, output.n_heads = 1;
    if (output.token_stride == output.row) output.row *= output.n_tokens, output.n_tokens = 1;
    for (size_t i = 0; i < output.n_tokens * output.n_heads; i++, writes->n++) {
        const uint64_t at = i / output.n_heads * output.token_stride + i % output.n_heads * output.head_stride;
        const tqkv__extent extent = {output.begin + at, output.begin + at + output.row};
        if (writes->extents) writes->extents[writes->n] = extent;
    }
}

static bool tqkv__open_writes(tqkv__writes *writes, const tqkv_allocator *allocator, size_t *size)
{
    if (!tqkv__size_multiply(writes->n, sizeof *writes->extents, size)) return false;
    writes->extents = (tqkv__extent *)allocator->alloc(allocator->user, *size);
    writes->n = 0;
    return writes->extents != NULL;
}

/* Sorts by `begin`, with a shell sort: qsort may allocate, and not by the caller's allocator. */
static void tqkv__sort_extents(tqkv__extent *extents, size_t n)
{
    size_t gap = 1;
    while (gap < n / 3) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (size_t i = gap, at; i < n; i++) {
            const tqkv__extent moved = extents[i];
            for (at = i; at >= gap && extents[at - gap].begin > moved.begin; at -= gap) extents[at] = extents[at - gap];
            extents[at] = moved;
        }
}

static bool tqkv__writes_overlap(const tqkv__writes *writes)
{
    tqkv__sort_extents(writes->extents, writes->n);
    for (size_t i = 1; i < writes->n; i++)
        if (writes->extents[i].begin < writes->extents[i - 1].end) return true;
    return false;
}

/* Whether an item reads one of n > 0 sorted extents, by halves. */
static bool tqkv__reads_extent(const tqkv__request *request, const tqkv__extent *extents, size_t n)
{
    const uint8_t *low = (const uint8_t *)(uintptr_t)extents[0].begin;
    const uint8_t *end = (const uint8_t *)(uintptr_t)extents[n - 1].end;
    if (!tqkv__reads(request->a, request->q, low, (size_t)(end - low))) return false;
    return n == 1 || tqkv__reads_extent(request, extents, n / 2) ||
           tqkv__reads_extent(request, extents + n / 2, n - n / 2);
}

static tqkv_result tqkv__check_outputs(const tqkv__request *requests, int n_requests, const tqkv_allocator *allocator)
{
    size_t size;
    tqkv__writes writes = {NULL, 0};
    for (int i = 0; i < n_requests; i++) tqkv__add_output(&writes, tqkv__output_of(&requests[i]));
    if (!tqkv__open_writes(&writes, allocator, &size)) return TQKV_OUT_OF_MEMORY;
    for (int i = 0; i < n_requests; i++) tqkv__add_output(&writes, tqkv__output_of(&requests[i]));
    bool overlap = tqkv__writes_overlap(&writes);
    for (int i = 0; i < n_requests && !overlap; i++)
        overlap = tqkv__reads_extent(&requests[i], writes.extents, writes.n);
    allocator->free(allocator->user, writes.extents, size);
    return overlap ? TQKV__INVALID("the output of an item overlaps an array of another") : TQKV_OK;
}

TQKV_API tqkv_result tqkv_attend_batch(const tqkv_attention *items, int n_items, const void *const *q, void *const *out)
{
    size_t size;
    int n_requests = 0;
    if (!items || !q || !out) return TQKV__INVALID("items, q or out is NULL");
    if (n_items < 0) return TQKV__INVALID("n_items is negative");
    if (n_items == 0) return TQKV_OK;
    tqkv_allocator allocator = items[0].allocator;
    if (!tqkv__resolve_allocator(&allocator)) return TQKV__INVALID("allocator: one of alloc and free is missing");
    if (!tqkv__size_multiply((size_t)n_items, sizeof(tqkv__attention) + sizeof(tqkv__request), &size))
        return TQKV__INVALID("n_items is too large");
    tqkv__attention *opened = (tqkv__attention *)allocator.alloc(allocator.user, size);
    if (!opened) return TQKV_OUT_OF_MEMORY;
    tqkv__request *requests = (tqkv__request *)(void *)(opened + n_items);
    tqkv_result r = TQKV_OK;
    for (int i = 0; r == TQKV_OK && i < n_items; i++) {
        tqkv_attention item = items[i];
        item.parallel = items[0].parallel;
        item.allocator = items[0].allocator;
        r = tqkv__attention_open(&item, &opened[i]);
        if (r == TQKV_OK && item.n_queries) r = tqkv__cut_whole(&opened[i], q[i], out[i], &requests[n_requests++]);
    }
    if (r == TQKV_OK && n_requests) r = tqkv__check_outputs(requests, n_requests, &allocator);
    if (r == TQKV_OK && n_requests) r = tqkv__run_job(requests, n_requests);
    allocator.free(allocator.user, opened, size);
    return r;
}

static tqkv_result tqkv__check_slice_range(const tqkv__attention *a, int64_t first, int count)
{
    if (count < 0) return TQKV__INVALID("count is negative");
    if (first < a->first || first > a->call.end || count > a->call.end - first)
        return TQKV__REFUSE(OUT_OF_RANGE, "the slice leaves the resident positions");
    return TQKV_OK;
}

static tqkv_result tqkv__check_slices_match(const tqkv__attention *a, const tqkv__attention *src)
{
    if (src->value_dim != a->value_dim || src->call.n_heads != a->call.n_heads ||
        src->call.n_queries != a->call.n_queries)
        return TQKV__INVALID("the slices differ in the values' head_dim, n_heads or n_queries");
    if (src->n_kv_heads != a->n_kv_heads) return TQKV__INVALID("the slices differ in n_kv_heads");
    return tqkv__check_channels_match(&a->values, &src->values);
}

static tqkv_result tqkv__slice_shape(const tqkv_attention *attention, tqkv__attention *a)
{
    const tqkv_result r = tqkv__attention_shape(attention, a);
    return r == TQKV_OK ? tqkv__stream_channels(attention->values, &a->values) : r;
}

TQKV_API tqkv_result tqkv_attend_partial(const tqkv_attention *attention, const void *q, int64_t first, int count,
                                         float *out, float *max, float *sum)
{
    tqkv__attention a;
    tqkv__request request;
    tqkv__arrays arrays = {{NULL}, {0}, 0, sizeof(float)};
    tqkv_result r = tqkv__attention_open(attention, &a);
    if (r == TQKV_OK) r = tqkv__check_slice_range(&a, first, count);
    if (r != TQKV_OK || !a.call.n_queries) return r;
    const tqkv__range slice = {first, first + count};
    if ((r = tqkv__check_seen(&a, slice)) != TQKV_OK) return r;
    tqkv__add_slice(&arrays, &a, out, max, sum);
    if ((r = tqkv__check_attend(&a, q, &arrays)) != TQKV_OK) return r;
    tqkv__cut(&a, slice, q, out, max, sum, &request);
    return tqkv__run_job(&request, 1);
}

TQKV_API tqkv_result tqkv_attend_merge(const tqkv_attention *attention, float *out, float *max, float *sum,
                                       const tqkv_attention *src, const float *src_out, const float *src_max,
                                       const float *src_sum)
{
    tqkv__attention a, from;
    tqkv__arrays arrays = {{NULL}, {0}, 0, sizeof(float)};
    tqkv_result r = tqkv__slice_shape(attention, &a);
    if (r == TQKV_OK) r = tqkv__slice_shape(src, &from);
    if (r == TQKV_OK) r = tqkv__check_slices_match(&a, &from);
    if (r != TQKV_OK || !a.call.n_queries) return r;
    tqkv__add_slice(&arrays, &a, out, max, sum);
    tqkv__add_slice(&arrays, &a, src_out, src_max, src_sum);
    if ((r = tqkv__check_arrays(&arrays, 3)) != TQKV_OK) return r;
    const size_t value_dim = (size_t)a.value_dim;
    const uint64_t mode = tqkv__fp_exact();
    for (size_t row = 0; row < a.n_rows; row++) {
        float *at = out + row * value_dim;
        tqkv__merge_row(a.value_dim, at, &max[row], &sum[row], src_out + row * value_dim, src_max[row], src_sum[row]);
        tqkv__settle_row(&a, at, &max[row], &sum[row]);
    }
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_attend_finish(const tqkv_attention *attention, float *out, const float *max, const float *sum)
{
    tqkv__attention a;
    float room[TQKV_MAX_HEAD_DIM];
    tqkv__arrays arrays = {{NULL}, {0}, 0, sizeof(float)};
    tqkv_result r = tqkv__slice_shape(attention, &a);
    if (r != TQKV_OK || !a.call.n_queries) return r;
    tqkv__add_slice(&arrays, &a, out, max, sum);
    if (a.call.sinks) tqkv__add_array(&arrays, a.call.sinks, (size_t)a.call.n_heads * sizeof(float));
    if (a.values.channel_scale) tqkv__add_array(&arrays, a.values.channel_scale, tqkv__center_size(&a.values));
    if (a.values.center) tqkv__add_array(&arrays, a.values.center, tqkv__center_size(&a.values));
    if ((r = tqkv__check_arrays(&arrays, 1)) != TQKV_OK) return r;
    const uint64_t mode = tqkv__fp_exact();
    const bool unrotate = !a.values.rotated || a.unrotate_output;
    for (size_t row = 0; row < a.n_rows; row++) {
        float *at = out + row * (size_t)a.value_dim, of[2] = {max[row], sum[row]};
        const int head = (int)(row % (size_t)a.call.n_heads);
        const float *center = tqkv__output_center(&a, head / a.group, room);
        tqkv__finish_row(&a, head, unrotate, center, at, of[0], of[1]);
        tqkv__settle_row(&a, at, &of[0], &of[1]);
    }
    tqkv__fp_restore(mode);
    return r;
}

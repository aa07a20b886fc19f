/* >>attend-calls: the arrays of a call, checked, and the public calls of attention */

/* The arrays of one call. No written array may overlap another one. */
typedef struct tqkv__arrays {
    const void *at[8];
    size_t size[8];
    int n;
    size_t alignment; /* of each */
} tqkv__arrays;

static void tqkv__add_array(tqkv__arrays *arrays, const void *at, size_t size)
{
    TQKV_ASSERT(arrays->n < 8);
    arrays->at[arrays->n] = at;
    arrays->size[arrays->n++] = size;
}

/* Adds out [n_queries][n_heads][value_dim], and max and sum [n_queries][n_heads]. */
static void tqkv__add_slice(tqkv__arrays *arrays, const tqkv__attention *a, const void *out, const void *max,
                            const void *sum)
{
    tqkv__add_array(arrays, out, a->out_elements * sizeof(float));
    tqkv__add_array(arrays, max, a->n_rows * sizeof(float));
    tqkv__add_array(arrays, sum, a->n_rows * sizeof(float));
}

/* Checks the arrays; the first n_written are outputs. */
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

/* Bytes of a list. */
static size_t tqkv__list_size(const tqkv__attention *a)
{
    if (!a->call.list) return 0;
    return (size_t)a->call.n_queries * (size_t)a->call.list_heads * (size_t)a->call.list_length * sizeof(int32_t);
}

/* Whether an attention reads memory at p. */
static bool tqkv__reads(const tqkv__attention *a, const void *q, const void *p, size_t size)
{
    for (int i = 0; i < TQKV__STREAMS; i++) {
        const tqkv__stream *s = tqkv__stream_read(a, i);
        if (s && tqkv__stream_overlaps(s, p, size)) return true;
    }
    return tqkv__overlap(q, a->q_size, p, size) ||
           tqkv__overlap(a->call.sinks, (size_t)a->call.n_heads * sizeof(float), p, size) ||
           tqkv__overlap(a->call.tree, (size_t)a->call.n_queries * sizeof(uint64_t), p, size) ||
           tqkv__overlap(a->call.list, tqkv__list_size(a), p, size);
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

/* Checks the arrays of a call over all resident positions and cuts it; follows tqkv__attention_open. */
static tqkv_result tqkv__cut_whole(const tqkv__attention *a, const void *q, void *out, tqkv__part *part)
{
    const tqkv__range all = {a->first, a->call.end};
    tqkv_result r = tqkv__check_q_out(a, q, out);
    if (r == TQKV_OK) r = tqkv__check_seen(a, all);
    if (r == TQKV_OK) tqkv__cut(a, all, q, out, NULL, NULL, part);
    return r;
}

static tqkv_result tqkv__attend(const tqkv__attention *a, const void *q, void *out)
{
    tqkv__part part;
    const tqkv_result r = tqkv__cut_whole(a, q, out, &part);
    return r == TQKV_OK ? tqkv__run_job(&part, 1) : r;
}

TQKV_API tqkv_result tqkv_attend(const tqkv_attention *attention, const void *q, void *out)
{
    tqkv__attention a;
    tqkv_result r = tqkv__attention_open(attention, &a);
    return r == TQKV_OK ? tqkv__attend(&a, q, out) : r;
}

/* Where the output of a call lies, in bytes: [n][n_heads] rows. */
typedef struct tqkv__output {
    uint64_t begin, size;
    int64_t token, head, row; /* strides; size of a row */
    int n, n_heads;
} tqkv__output;

static tqkv__output tqkv__output_of(const tqkv__part *part)
{
    const tqkv__attention *a = part->a;
    const int64_t size = (int64_t)tqkv__type_size(a->call.output_type);
    const int64_t token = (int64_t)a->call.output_strides.token, head = (int64_t)a->call.output_strides.head;
    const tqkv__output x = {(uintptr_t)part->out, a->out_size,       token * size,   head * size,
                            a->value_dim * size,  a->call.n_queries, a->call.n_heads};
    return x;
}

/* Whether rows of two outputs share bytes. Outputs of the same strides may lie between each other's rows. */
static bool tqkv__output_rows_overlap(const tqkv__output *x, const tqkv__output *y)
{
    const int64_t apart = (int64_t)(y->begin - x->begin);
    if (y->begin >= x->begin ? y->begin - x->begin >= x->size : x->begin - y->begin >= y->size) return false;
    if (x->token != y->token || x->head != y->head || x->row != y->row) return true;
    for (int h = 1 - x->n_heads; h < y->n_heads; h++) {
        const int64_t rest = apart + h * x->head; /* a row of y and one of x differ by this and some tokens */
        int64_t t = -rest / x->token;             /* overlap needs |rest + t * token| < row: t or a neighbour */
        for (t--; t <= -rest / x->token + 1; t++)
            if (t > -x->n && t < y->n && rest + t * x->token < x->row && rest + t * x->token > -x->row) return true;
    }
    return false;
}

/* Outputs in order. They share nothing if each begins behind the one before. Nor if, with the same strides, that is so of their
   parts within the longer stride, and all these fit into it. */
typedef struct tqkv__ascent {
    tqkv__output first, last;
    bool behind, between; /* so far */
} tqkv__ascent;

static tqkv__ascent tqkv__begin_ascent(const tqkv__output *first)
{
    const tqkv__ascent all = {*first, *first, true, true};
    return all;
}

static uint64_t tqkv__inner_size(const tqkv__output *x)
{
    return (uint64_t)((x->token <= x->head ? (x->n - 1) * x->token : (x->n_heads - 1) * x->head) + x->row);
}

static void tqkv__ascend(tqkv__ascent *all, const tqkv__output *next)
{
    const tqkv__output *last = &all->last;
    const uint64_t outer = (uint64_t)(last->token <= last->head ? last->head : last->token);
    const bool alike = last->token == next->token && last->head == next->head && last->row == next->row;
    all->behind = all->behind && next->begin >= last->begin && next->begin - last->begin >= last->size;
    all->between = all->between && alike && next->begin >= last->begin &&
                   next->begin - last->begin >= tqkv__inner_size(last) &&
                   next->begin - all->first.begin + tqkv__inner_size(next) <= outer;
    all->last = *next;
}

/* Whether item j reads an output of another of the items [low, high), whose outputs ascend. Halves the range until none is left:
   thousands of items need no comparison of each with each. */
static bool tqkv__reads_output(const tqkv__part *parts, int j, int low, int high)
{
    const uintptr_t begin = (uintptr_t)parts[low].out;
    const uintptr_t end = (uintptr_t)parts[high - 1].out + parts[high - 1].a->out_size;
    if (!tqkv__reads(parts[j].a, parts[j].q, parts[low].out, end - begin)) return false;
    if (high - low == 1) return low != j;
    const int middle = low + (high - low) / 2;
    return tqkv__reads_output(parts, j, low, middle) || tqkv__reads_output(parts, j, middle, high);
}

/* Whether outputs ascend or lie between each other's rows, apart from all that is read: then a comparison of each with each is not
   needed. */
static bool tqkv__parts_ascend(const tqkv__part *parts, int n)
{
    const tqkv__output first = tqkv__output_of(&parts[0]);
    tqkv__ascent all = tqkv__begin_ascent(&first);
    const uintptr_t low = (uintptr_t)parts[0].out;
    uintptr_t high = low;
    for (int i = 0; i < n; i++) {
        const tqkv__output next = tqkv__output_of(&parts[i]);
        const uintptr_t end = (uintptr_t)parts[i].out + parts[i].a->out_size;
        if (i) tqkv__ascend(&all, &next);
        if (end > high) high = end;
    }
    bool apart = all.behind || all.between;
    for (int i = 0; i < n && apart; i++)
        apart = all.behind ? !tqkv__reads_output(parts, i, 0, n)
                           : !tqkv__reads(parts[i].a, parts[i].q, parts[0].out, high - low);
    return apart;
}

/* Whether the output of one call overlaps an array of another. */
static bool tqkv__parts_overlap(const tqkv__part *parts, int n)
{
    if (tqkv__parts_ascend(parts, n)) return false;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            const tqkv__output x = tqkv__output_of(&parts[i]), y = tqkv__output_of(&parts[j]);
            if (i == j) continue;
            if (tqkv__reads(parts[j].a, parts[j].q, parts[i].out, parts[i].a->out_size)) return true;
            if (tqkv__output_rows_overlap(&x, &y)) return true;
        }
    return false;
}

/* Opens and checks one item; it takes over the hooks of the first. */
static tqkv_result tqkv__open_item(const tqkv_attention *items, int i, const void *q, void *out, tqkv__attention *a,
                                   tqkv__part *part)
{
    tqkv_attention item = items[i];
    item.parallel = items[0].parallel;
    item.allocator = items[0].allocator;
    const tqkv_result r = tqkv__attention_open(&item, a);
    return r == TQKV_OK ? tqkv__cut_whole(a, q, out, part) : r;
}

TQKV_API tqkv_result tqkv_attend_batch(const tqkv_attention *items, int n_items, const void *const *q, void *const *out)
{
    size_t size;
    if (!items || !q || !out) return TQKV__INVALID("items, q or out is NULL");
    if (n_items < 0) return TQKV__INVALID("n_items is negative");
    if (n_items == 0) return TQKV_OK;
    tqkv_allocator allocator = items[0].allocator;
    if (!tqkv__resolve_allocator(&allocator)) return TQKV__INVALID("allocator: one of alloc and free is missing");
    if (!tqkv__size_multiply((size_t)n_items, sizeof(tqkv__attention) + sizeof(tqkv__part), &size))
        return TQKV__INVALID("n_items is too large");
    tqkv__attention *opened = (tqkv__attention *)allocator.alloc(allocator.user, size);
    if (!opened) return TQKV_OUT_OF_MEMORY;
    tqkv__part *parts = (tqkv__part *)(void *)(opened + n_items);
    tqkv_result r = TQKV_OK;
    for (int i = 0; r == TQKV_OK && i < n_items; i++)
        r = tqkv__open_item(items, i, q[i], out[i], &opened[i], &parts[i]);
    if (r == TQKV_OK && tqkv__parts_overlap(parts, n_items))
        r = TQKV__INVALID("the output of an item overlaps an array of another");
    if (r == TQKV_OK) r = tqkv__run_job(parts, n_items);
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

static tqkv_result tqkv__check_slices_match(const tqkv__attention *a, const tqkv__attention *from)
{
    if (from->value_dim != a->value_dim || from->call.n_heads != a->call.n_heads ||
        from->call.n_queries != a->call.n_queries)
        return TQKV__INVALID("the slices differ in the values' head_dim, n_heads or n_queries");
    if (from->n_kv_heads != a->n_kv_heads && (from->values.channel_scale || a->values.channel_scale))
        return TQKV__INVALID("the slices differ in n_kv_heads");
    return tqkv__same_scale(&a->values, &from->values)
               ? TQKV_OK
               : TQKV__INVALID("the slices differ in the values' channel_scale");
}

/* Opens the shape of an attention, and the scale of its values, which is in the sums of its slices. */
static tqkv_result tqkv__slice_shape(const tqkv_attention *attention, tqkv__attention *a)
{
    const tqkv_result r = tqkv__attention_shape(attention, a);
    return r == TQKV_OK ? tqkv__stream_scale(attention->values, &a->values) : r;
}

TQKV_API tqkv_result tqkv_attend_partial(const tqkv_attention *attention, const void *q, int64_t first, int count,
                                         float *out, float *max, float *sum)
{
    tqkv__attention a;
    tqkv__part part;
    tqkv__arrays arrays = {{NULL}, {0}, 0, sizeof(float)};
    tqkv_result r = tqkv__attention_open(attention, &a);
    if (r == TQKV_OK) r = tqkv__check_slice_range(&a, first, count);
    if (r != TQKV_OK) return r;
    const tqkv__range slice = {first, first + count};
    if ((r = tqkv__check_seen(&a, slice)) != TQKV_OK) return r;
    tqkv__add_slice(&arrays, &a, out, max, sum);
    if ((r = tqkv__check_attend(&a, q, &arrays)) != TQKV_OK) return r;
    tqkv__cut(&a, slice, q, out, max, sum, &part);
    return tqkv__run_job(&part, 1);
}

TQKV_API tqkv_result tqkv_attend_merge_slice(const tqkv_attention *attention, float *out, float *max, float *sum,
                                             const tqkv_attention *slice, const float *src_out, const float *src_max,
                                             const float *src_sum)
{
    tqkv__attention a, from;
    tqkv__arrays arrays = {{NULL}, {0}, 0, sizeof(float)};
    tqkv_result r = tqkv__slice_shape(attention, &a);
    if (r == TQKV_OK) r = tqkv__slice_shape(slice, &from);
    if (r == TQKV_OK) r = tqkv__check_slices_match(&a, &from);
    if (r != TQKV_OK) return r;
    tqkv__add_slice(&arrays, &a, out, max, sum);
    tqkv__add_slice(&arrays, &a, src_out, src_max, src_sum);
    if ((r = tqkv__check_arrays(&arrays, 3)) != TQKV_OK) return r;
    const size_t value_dim = (size_t)a.value_dim;
    const uint64_t mode = tqkv__fp_exact();
    for (size_t row = 0; row < a.n_rows; row++) {
        float source[TQKV_MAX_HEAD_DIM]; /* basis of a's values */
        memcpy(source, src_out + row * value_dim, value_dim * sizeof(float));
        if (from.values.rotated && !a.values.rotated) a.isa->codec->unrotate(source, a.value_dim);
        if (a.values.rotated && !from.values.rotated) a.isa->codec->rotate(source, a.value_dim);
        tqkv__merge_row(a.value_dim, out + row * value_dim, &max[row], &sum[row], source, src_max[row], src_sum[row]);
        tqkv__settle_row(&a, out + row * value_dim, &max[row], &sum[row]);
    }
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_attend_merge(const tqkv_attention *attention, float *out, float *max, float *sum,
                                       const float *src_out, const float *src_max, const float *src_sum)
{
    return tqkv_attend_merge_slice(attention, out, max, sum, attention, src_out, src_max, src_sum);
}

TQKV_API tqkv_result tqkv_attend_finish(const tqkv_attention *attention, float *out, const float *max, const float *sum)
{
    tqkv__attention a;
    tqkv__arrays arrays = {{NULL}, {0}, 0, sizeof(float)};
    tqkv_result r = tqkv__slice_shape(attention, &a);
    if (r != TQKV_OK) return r;
    tqkv__add_slice(&arrays, &a, out, max, sum);
    if (a.call.sinks) tqkv__add_array(&arrays, a.call.sinks, (size_t)a.call.n_heads * sizeof(float));
    if (a.values.channel_scale) tqkv__add_array(&arrays, a.values.channel_scale, tqkv__center_size(&a.values));
    if ((r = tqkv__check_arrays(&arrays, 1)) != TQKV_OK) return r;
    const uint64_t mode = tqkv__fp_exact();
    for (size_t row = 0; row < a.n_rows; row++) {
        float *at = out + row * (size_t)a.value_dim, of[2] = {max[row], sum[row]};
        tqkv__finish_row(&a, (int)(row % (size_t)a.call.n_heads), NULL, at, of[0], of[1]);
        tqkv__settle_row(&a, at, &of[0], &of[1]);
    }
    tqkv__fp_restore(mode);
    return r;
}

/* >>plan-batch: batches. Each item is planned as a call of its own, and the plans are joined. */

static tqkv_metal_binding *tqkv__binding_at(tqkv_metal_dispatch *d, int index)
{
    int i = 0;
    while (d->bindings[i].index != index) i++;
    return &d->bindings[i];
}

/* Whether a constant may differ between items. */
static bool tqkv__joins(int constant)
{
    return constant == TQKV_FC_COLUMNS || constant == TQKV_FC_MANY_QUERIES || constant == TQKV_FC_SAME_SLOTS ||
           constant == TQKV_FC_SHORT_STORE || constant == TQKV_FC_PAGES || constant == TQKV_FC_SMALL_PAGES ||
           constant == TQKV_FC_TREE || constant == TQKV_FC_TAIL_ELSEWHERE || constant == TQKV_FC_HALVES ||
           constant == TQKV_FC_STRANDS;
}

static bool tqkv__sees_nothing(const tqkv_metal_dispatch *attend) { return tqkv__attend_args_of(attend).kv_len == 0; }

typedef struct tqkv__batch {
    const tqkv_metal_attention *items;
    int n_items, n; /* n: those with queries; the tables have no others */
    int tables; /* of items. One is described once for each region and once for the merge, which look for other numbers
                       of threadgroups and other bytes of scratch; without halves once for all */
    const tqkv_metal_buffer *q, *out;
    tqkv_metal_buffer arguments, scratch;
} tqkv__batch;

/* Plans item i alone, with the scratch from *used on. An item without positions has no partial results. */
static tqkv_result tqkv__plan_batch_item(const tqkv__batch *b, int i, size_t *used, tqkv__attend_plan *own)
{
    const tqkv_metal_buffer none = {NULL, 0}, q = b->q ? b->q[i] : none, out = b->out ? b->out[i] : none;
    tqkv__attend_buffers buffers = tqkv__buffers_of_call(q, tqkv__buffer_after(b->scratch, *used), out);
    const tqkv_result r =
        tqkv__plan_call_of(&b->items[i], 0, 0, (size_t)TQKV__MOST_SUMS / (size_t)(b->n ? b->n : 1), &buffers, own);
    if (r != TQKV_OK || own->empty) return r;
    if (own->has[TQKV__CODES_REGION] && tqkv__sees_nothing(&own->attends[TQKV__CODES_REGION])) {
        tqkv__merge_args merge;
        memcpy(&merge, own->merge.arguments[0].bytes, sizeof merge);
        merge.n_partials = merge.before = 0;
        tqkv__replace_args(&own->merge, &merge);
    }
    if (own->scratch_size > SIZE_MAX / 2 - *used) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
    *used += own->scratch_size;
    return TQKV_OK;
}

/* Adds the range of an item to that of all. */
static tqkv_result tqkv__join_binding(tqkv_metal_binding *all, const tqkv_metal_binding *one)
{
    if (!one->size) return TQKV_OK;
    if (one->at.offset % one->alignment || one->at.offset > SIZE_MAX / 2 || one->size > SIZE_MAX / 2)
        return TQKV__INVALID("an offset of a batch's item is not aligned, or beyond any buffer");
    if (!all->size) {
        *all = *one;
        return TQKV_OK;
    }
    if (all->at.buffer != one->at.buffer)
        return TQKV__REFUSE(UNSUPPORTED, "the same array of a batch's items lies in different buffers");
    const size_t end = all->at.offset + all->size, own_end = one->at.offset + one->size;
    if (one->at.offset < all->at.offset) all->at.offset = one->at.offset;
    all->size = (end > own_end ? end : own_end) - all->at.offset;
    return TQKV_OK;
}

/* Adds a dispatch of an item to that of the items before it. */
static tqkv_result tqkv__join(tqkv_metal_dispatch *all, const tqkv_metal_dispatch *one)
{
    const bool merge = one->kernel.family == TQKV_METAL_ATTEND_MERGE,
               attend = !merge && one->kernel.family != TQKV_METAL_ATTEND_LIST;
    const tqkv__attend_args args = tqkv__attend_args_of(one);
    tqkv__attend_args all_args = tqkv__attend_args_of(all);
    uint8_t *constants = all->kernel.constants;
    bool same = all->kernel.family == one->kernel.family && all->kernel.head_dim == one->kernel.head_dim &&
                all->kernel.value_dim == one->kernel.value_dim;
    if (attend) same = same && all->grid[0] == one->grid[0] && all_args.group == args.group;
    for (int i = 0; i < TQKV_METAL_CONSTANTS; i++) {
        const uint8_t own = one->kernel.constants[i];
        const bool joins = !merge && tqkv__joins(i);
        if (!joins) same = same && constants[i] == own;
        if (joins && (i == TQKV_FC_SAME_SLOTS ? own < constants[i] : own > constants[i])) constants[i] = own;
    }
    if (!same) return TQKV__REFUSE(UNSUPPORTED, "items of a batch differ in heads, formats, types or options");
    tqkv_result r = TQKV_OK;
    for (int i = 0; r == TQKV_OK && i < one->n_bindings; i++)
        r = tqkv__join_binding(&all->bindings[i], &one->bindings[i]);
    if (one->n_simdgroups > all->n_simdgroups) all->n_simdgroups = one->n_simdgroups;
    if (!attend) return r;
    if (args.sections_each > all_args.sections_each) all_args.sections_each = args.sections_each;
    if (args.strands > all_args.strands) all_args.strands = args.strands;
    tqkv__replace_args(all, &all_args); /* which say how much memory columns take */
    return r;
}

/* Adds the regions of an item. */
static tqkv_result tqkv__join_regions(tqkv__attend_plan *all, const tqkv__attend_plan *own)
{
    tqkv_result r = tqkv__join(&all->merge, &own->merge);
    if (all->listed != own->listed) return TQKV__REFUSE(UNSUPPORTED, "some items of a batch have lists, others none");
    for (int p = 0; p < TQKV__REGIONS && r == TQKV_OK; p++) {
        if (!own->has[p]) continue;
        if (!all->has[p]) {
            all->attends[p] = own->attends[p];
            all->lists[p] = own->lists[p];
            all->has[p] = true;
        }
        r = tqkv__join(&all->attends[p], &own->attends[p]);
        if (r == TQKV_OK && own->listed) r = tqkv__join(&all->lists[p], &own->lists[p]);
    }
    return r;
}

/* Joins all items' plans in one, and counts the bytes of scratch. */
static tqkv_result tqkv__join_items(const tqkv__batch *b, size_t *used, tqkv__attend_plan *all)
{
    bool paged = false, unpaged = false;
    tqkv_result r = TQKV_OK;
    const tqkv_metal_attention *first = NULL; /* with queries */
    for (int i = 0; r == TQKV_OK && i < b->n_items; i++) {
        tqkv__attend_plan own;
        if ((r = tqkv__plan_batch_item(b, i, used, &own)) != TQKV_OK) return r;
        if (own.empty) continue;
        if (!first) *all = own;
        first = first ? first : &b->items[i];
        if (!tqkv__same_buffer(b->items[i].sinks, first->sinks))
            return TQKV__REFUSE(UNSUPPORTED, "items of a batch differ in their sinks");
        if (own.has[TQKV__CODES_REGION]) {
            const tqkv_metal_dispatch *codes = &own.attends[TQKV__CODES_REGION];
            const bool has_pages = codes->kernel.constants[TQKV_FC_PAGES] > 1;
            paged = paged || has_pages;
            unpaged = unpaged || (!has_pages && !tqkv__sees_nothing(codes));
        }
        r = tqkv__join_regions(all, &own);
    }
    if (r != TQKV_OK || !paged) return r;
    if (unpaged) return TQKV__REFUSE(UNSUPPORTED, "some items of a batch have pages, others have none");
    tqkv_metal_dispatch *codes = &all->attends[TQKV__CODES_REGION];
    if (codes->kernel.constants[TQKV_FC_SMALL_PAGES] != 1 + true)
        tqkv__plan_constant(codes, TQKV_FC_SHORT_STORE, false); /* items without positions look at no slot */
    return TQKV_OK;
}

/* Where an array of an item is: its number in what is bound for all, and in the item's plan; and its offset in the
   item. */
typedef struct tqkv__batch_array {
    int bound, index;
    size_t unit, to;
} tqkv__batch_array;
#define TQKV__OFFSET(name) offsetof(tqkv__batch_item, name)

/* Writes the offset of an item's array in what is bound for all; 0 if it has none. */
static tqkv_result tqkv__write_offsets(tqkv_metal_dispatch *all, tqkv_metal_dispatch *one,
                                       const tqkv__batch_array *arrays, size_t n, tqkv__batch_item *to)
{
    for (size_t i = 0; i < n; i++) {
        const tqkv_metal_binding *bound = tqkv__binding_at(all, arrays[i].bound),
                                 *own = tqkv__binding_at(one, arrays[i].index);
        const size_t at = own->size ? (own->at.offset - bound->at.offset) / arrays[i].unit : 0;
        if (at > UINT32_MAX) return TQKV__REFUSE(UNSUPPORTED, "arrays of a batch's items lie too far apart");
        const uint32_t offset = (uint32_t)at;
        memcpy((char *)to + arrays[i].to, &offset, sizeof offset);
    }
    return TQKV_OK;
}

/* Writes region p of an item. */
static tqkv_result tqkv__write_region(tqkv__attend_plan *all, tqkv__attend_plan *own, int p, tqkv__batch_item *to)
{
    static const tqkv__batch_array arrays[] = {
        {1, 1, TQKV__ROWS_UNIT, TQKV__OFFSET(q)}, {2, 2, TQKV__CODES_UNIT, TQKV__OFFSET(key_codes)},
        {3, 3, 4, TQKV__OFFSET(key_norms)},       {4, 4, TQKV__CODES_UNIT, TQKV__OFFSET(value_codes)},
        {5, 5, 4, TQKV__OFFSET(value_norms)},     {6, 6, 4, TQKV__OFFSET(partial_out)},
        {6, 7, 4, TQKV__OFFSET(partial_state)},   {8, 8, 4, TQKV__OFFSET(key_center)},
        {9, 9, 4, TQKV__OFFSET(key_pages)},       {10, 10, 4, TQKV__OFFSET(value_pages)},
        {11, 11, 4, TQKV__OFFSET(tree)},          {13, 13, TQKV__CODES_UNIT, TQKV__OFFSET(tail_codes)},
        {14, 14, 4, TQKV__OFFSET(tail_norms)},    {15, 15, 4, TQKV__OFFSET(tail_center)},
        {6, 16, 4, TQKV__OFFSET(list_rows)},      {17, 17, 4, TQKV__OFFSET(key_scale)},
        {18, 18, 4, TQKV__OFFSET(tail_scale)}};
    static const tqkv__batch_array list = {1, 1, 4, TQKV__OFFSET(list)};
    to->attend = tqkv__attend_args_of(&own->attends[p]);
    const tqkv_result r =
        tqkv__write_offsets(&all->attends[p], &own->attends[p], arrays, sizeof arrays / sizeof *arrays, to);
    return r == TQKV_OK && own->listed ? tqkv__write_offsets(&all->lists[p], &own->lists[p], &list, 1, to) : r;
}

/* Writes the merge of an item. */
static tqkv_result tqkv__write_merge(tqkv__attend_plan *all, tqkv__attend_plan *own, tqkv__batch_item *to)
{
    static const tqkv__batch_array arrays[] = {{1, 1, 4, TQKV__OFFSET(partial_out)},
                                               {1, 2, 4, TQKV__OFFSET(partial_state)},
                                               {4, 4, TQKV__ROWS_UNIT, TQKV__OFFSET(out)},
                                               {5, 5, 4, TQKV__OFFSET(value_center)},
                                               {11, 11, 4, TQKV__OFFSET(value_scale)}};
    memcpy(&to->merge, own->merge.arguments[0].bytes, sizeof to->merge);
    return tqkv__write_offsets(&all->merge, &own->merge, arrays, sizeof arrays / sizeof *arrays, to);
}

static size_t tqkv__batch_table_size(int n)
{
    const size_t unit = TQKV__ARGUMENTS_ALIGNMENT;
    return ((size_t)n * sizeof(tqkv__batch_item) + unit - 1) / unit * unit;
}

/* Returns table number `number` of b->tables, or the only one. */
static tqkv__batch_item *tqkv__batch_table(const tqkv__batch *b, void *contents, int number)
{
    char *first = (char *)contents;
    return (tqkv__batch_item *)(void *)(first + (b->tables > 1 ? (size_t)number * tqkv__batch_table_size(b->n) : 0));
}

/* Threadgroups and rows of the items so far. */
typedef struct tqkv__batch_counts {
    size_t groups[TQKV__REGIONS], lists[TQKV__REGIONS], rows;
} tqkv__batch_counts;

/* Writes an item into place i of all tables. */
static tqkv_result tqkv__write_item(const tqkv__batch *b, int i, void *contents, tqkv__attend_plan *own,
                                    tqkv__attend_plan *all, tqkv__batch_counts *counts)
{
    tqkv_result r = TQKV_OK;
    for (int t = 0; t < b->tables; t++) {
        tqkv__batch_item *to = tqkv__batch_table(b, contents, t) + i;
        memset(to, 0, sizeof *to);
        to->n_items = b->n;
        to->first_row = (int32_t)counts->rows;
    }
    for (int p = 0; p < TQKV__REGIONS && r == TQKV_OK; p++) {
        const tqkv_metal_dispatch *attend = &all->attends[p];
        tqkv__batch_item *to = tqkv__batch_table(b, contents, p) + i;
        if (b->tables > 1 || p == TQKV__CODES_REGION) { /* a single table is that of the codes */
            to->first_group = (int32_t)counts->groups[p];
            to->first_list = (int32_t)counts->lists[p];
        }
        if (!own->has[p]) continue;
        r = tqkv__write_region(all, own, p, to);
        counts->groups[p] +=
            tqkv__row_groups(attend, &to->attend, (size_t)attend->kernel.constants[TQKV_FC_COLUMNS] - 1) *
            own->attends[p].grid[2];
        if (own->listed) counts->lists[p] += own->lists[p].grid[0];
        if (counts->groups[p] > INT_MAX || counts->lists[p] > INT_MAX)
            return TQKV__INVALID("a batch of 2^31 rows or threadgroups");
    }
    counts->rows += own->merge.grid[0];
    if (counts->rows > INT_MAX) return TQKV__INVALID("a batch of 2^31 rows or threadgroups");
    return r == TQKV_OK ? tqkv__write_merge(all, own, tqkv__batch_table(b, contents, TQKV__REGIONS) + i) : r;
}

/* Writes the items, and counts their threadgroups and rows. */
static tqkv_result tqkv__write_items(const tqkv__batch *b, void *contents, tqkv__attend_plan *all)
{
    tqkv__batch_counts counts;
    size_t used = 0;
    memset(&counts, 0, sizeof counts);
    for (int i = 0, at = 0; i < b->n_items; i++) {
        tqkv__attend_plan own;
        tqkv_result r = tqkv__plan_batch_item(b, i, &used, &own);
        if (r == TQKV_OK && !own.empty) r = tqkv__write_item(b, at++, contents, &own, all, &counts);
        if (r != TQKV_OK) return r;
    }
    for (int p = 0; p < TQKV__REGIONS; p++) {
        all->attends[p].grid[1] = 1;
        all->attends[p].grid[2] = counts.groups[p];
        all->lists[p].grid[0] = counts.lists[p];
    }
    all->merge.grid[0] = counts.rows;
    return TQKV_OK;
}

/* Returns the rows that an item writes; value: bytes of one, dim: values of a row. */
static tqkv__output tqkv__output_of_item(const tqkv__batch_item *item, size_t value, int dim)
{
    const tqkv__merge_args *merge = &item->merge;
    const tqkv__output output = {(uint64_t)item->out * TQKV__ROWS_UNIT,    (uint64_t)merge->out_token_stride * value,
                                 (uint64_t)merge->out_head_stride * value, (uint64_t)dim * value,
                                 (size_t)(merge->n_rows / merge->n_heads), (size_t)merge->n_heads};
    return output;
}

/* Checks that no two items of a batch write the same bytes. */
static tqkv_result tqkv__check_item_outputs(const tqkv__batch *b, const tqkv__batch_item *merges, size_t value, int dim)
{
    size_t size;
    tqkv__writes writes = {NULL, 0};
    tqkv_allocator allocator = {NULL, NULL, NULL}; /* malloc: that of a cache's memory may make buffers of the GPU */
    (void)tqkv__resolve_allocator(&allocator);
    for (int i = 0; i < b->n; i++) tqkv__add_output(&writes, tqkv__output_of_item(&merges[i], value, dim));
    if (!tqkv__open_writes(&writes, &allocator, &size)) return TQKV_OUT_OF_MEMORY;
    for (int i = 0; i < b->n; i++) tqkv__add_output(&writes, tqkv__output_of_item(&merges[i], value, dim));
    const bool overlap = tqkv__writes_overlap(&writes);
    allocator.free(allocator.user, writes.extents, size);
    return overlap ? TQKV__INVALID("outputs of a batch overlap") : TQKV_OK;
}

/* Gives one dispatch for all items what it has in place of an item's: the items and all scratch. scratch: index of
   partial results, or of rows of lists */
static void tqkv__plan_joined(const tqkv__batch *b, int table, size_t used, int items, int scratch,
                              tqkv_metal_dispatch *d)
{
    tqkv_metal_binding *sums = tqkv__binding_at(d, scratch), *at = tqkv__binding_at(d, items);
    sums->at = b->scratch;
    sums->size = used;
    at->at = tqkv__buffer_after(b->arguments, b->tables > 1 ? (size_t)table * tqkv__batch_table_size(b->n) : 0);
    at->size = (size_t)b->n * sizeof(tqkv__batch_item);
    at->alignment = TQKV__ARGUMENTS_ALIGNMENT;
    tqkv__plan_constant(d, TQKV_FC_BATCH, true);
}

/* Joins all dispatches. The items say where states and rows of lists are in scratch. */
static void tqkv__plan_all_joined(const tqkv__batch *b, size_t used, tqkv__attend_plan *all)
{
    for (int p = 0; p < TQKV__REGIONS; p++) {
        tqkv_metal_dispatch *d = &all->attends[p];
        if (!all->has[p]) continue;
        tqkv__plan_joined(b, p, used, TQKV__ITEMS_OF_ATTEND, 6, d);
        tqkv__binding_at(d, 7)->size = tqkv__binding_at(d, 16)->size = 0;
        tqkv__plan_columns(d, d->kernel.family == TQKV_METAL_ATTEND_MATRIX, d->kernel.constants[TQKV_FC_COLUMNS] - 1);
        if (all->listed) tqkv__plan_joined(b, p, used, TQKV__ITEMS_OF_LIST, 2, &all->lists[p]);
    }
    tqkv__plan_joined(b, TQKV__REGIONS, used, TQKV__ITEMS_OF_MERGE, 1, &all->merge);
    tqkv__binding_at(&all->merge, 2)->size = 0;
}

/* Plans a batch. Without queries nothing is set; without contents no arguments are written. */
static tqkv_result tqkv__plan_batch(const tqkv__batch *b, void *contents, tqkv__attend_plan *all)
{
    size_t used = 0;
    if (contents && (!b->q || !b->out)) return TQKV__INVALID("q or out is NULL");
    tqkv_result r = tqkv__join_items(b, &used, all);
    all->empty = !b->n;
    if (r != TQKV_OK || all->empty) return r;
    tqkv__plan_all_joined(b, used, all);
    if (!contents) return TQKV_OK;
    if ((r = tqkv__write_items(b, contents, all)) != TQKV_OK) return r;
    const int head_dim = all->merge.kernel.head_dim * TQKV__DIM_UNIT,
              type = all->merge.kernel.constants[TQKV_FC_TYPE] - 1;
    const size_t value = tqkv__type_size((tqkv_type)type);
    const tqkv__batch_item *merges = tqkv__batch_table(b, contents, TQKV__REGIONS);
    return tqkv__check_item_outputs(b, merges, value, head_dim);
}

/* Finds the bytes of a batch's arguments, and its most scratch. */
static tqkv_result tqkv__batch_sizes(const tqkv__batch *b, tqkv_metal_plan *plan)
{
    const size_t n_items = (size_t)b->n_items;
    size_t own = 0;
    tqkv_result r = TQKV_OK;
    if (n_items > SIZE_MAX / 8 / sizeof(tqkv__batch_item)) return TQKV__INVALID("n_items is too large");
    plan->arguments_size =
        b->tables > 1 ? (size_t)b->tables * tqkv__batch_table_size(b->n_items) : n_items * sizeof(tqkv__batch_item);
    for (int i = 0; i < b->n_items && r == TQKV_OK; i++) {
        r = tqkv__plan_scratch_within(&b->items[i], TQKV__MOST_SUMS / (size_t)(b->n ? b->n : 1), &own);
        if (r == TQKV_OK && own > SIZE_MAX - plan->scratch_size) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
        plan->scratch_size += own;
    }
    return r;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_batch(const tqkv_metal_attention *items, int n_items,
                                                        const tqkv_metal_buffer *q, tqkv_metal_buffer arguments,
                                                        void *contents, tqkv_metal_buffer scratch,
                                                        const tqkv_metal_buffer *out, tqkv_metal_plan *plan)
{
    tqkv__attend_plan all;
    if (!tqkv__open_plan(plan, "attend_batch")) return TQKV__INVALID(TQKV__NO_PLAN);
    if (n_items < 0 || (n_items && !items))
        return tqkv__close_plan(plan, TQKV__INVALID("n_items is negative, or items is NULL"));
    if (n_items == 0) return tqkv__close_plan(plan, TQKV_OK);
    if (!contents) arguments.buffer = NULL; /* nothing is written there, so it must not run */
    tqkv__batch b = {items, n_items, 0, 1, q, out, arguments, scratch};
    for (int i = 0; i < n_items; i++) {
        b.n += items[i].attention.n_queries != 0;
        if (items[i].attention.first.n || items[i].attention.last.n) b.tables = TQKV__REGIONS + 1;
    }
    tqkv_result r = contents ? TQKV_OK : tqkv__batch_sizes(&b, plan);
    if (r == TQKV_OK) r = tqkv__plan_batch(&b, contents, &all);
    if (r == TQKV_OK) tqkv__order_dispatches(&all, plan);
    return tqkv__close_plan(plan, r);
}

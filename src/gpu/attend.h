/* >>plan-attend: the dispatches of an attention. */

/* max and sum: of a slice, which also says so. The two of a slice that is read */
typedef struct tqkv__slice_buffers {
    bool from, to;
    tqkv_metal_buffer max, sum, src_max, src_sum;
} tqkv__slice_buffers;

typedef struct tqkv__attend_buffers {
    tqkv_metal_attention of; /* of a region: with the stores that it reads */
    tqkv_metal_buffer q, scratch, out;
    tqkv__slice_buffers slice;   /* zero: attends to all positions */
    int64_t slice_end;           /* of the positions to attend to */
    int halves;                  /* TQKV_FC_HALVES */
    tqkv_metal_buffer list_rows; /* what attend_list makes of the caller's list */
} tqkv__attend_buffers;

static void tqkv__plan_list_args(const tqkv__attention *a, int64_t slice_end, tqkv__attend_args *args)
{
    const int64_t first_block = a->first / a->call.list.block;
    args->list_heads = a->call.list.heads;
    args->list_row = TQKV__LIST_HEADER + (first_block <= INT_MAX ? a->call.list.length : 0); /* or none can be named */
    args->list_shift = tqkv__list_shift(a->call.list.block);
    args->list_inside = tqkv__list_inside(a);
    args->list_base = (int)tqkv__list_base(a, slice_end);
    args->list_slots = tqkv__list_in_order(a, slice_end) ? args->key_capacity : INT_MAX;
    args->list_newest = a->call.list.newest;
    args->list_first_block = first_block <= INT_MAX ? (int32_t)first_block : 0;
}

/* Takes what attention and index_scores have in common. slots: of a KV head in memory */
static TQKV__NOINLINE void tqkv__plan_key_args(const tqkv__attention *a, int slot_list, tqkv__attend_args *args)
{
    memset(args, 0, sizeof *args);
    args->n_queries = a->call.n_queries;
    args->n_kv_heads = a->n_kv_heads;
    args->group = a->group;
    args->kv_len = tqkv__positions_behind(a);
    args->query_token_stride = (uint32_t)a->call.query_strides.token;
    args->query_head_stride = (uint32_t)a->call.query_strides.head;
    args->scale = a->call.scale;
    args->key_capacity = a->keys.capacity;
    args->key_oldest_slot = args->kv_len ? tqkv__slot(&a->keys, a->first) : 0;
    args->key_block_scale = a->keys.block_scale;
    args->key_slots = slot_list;
    if (!a->keys.n_pages) return;
    args->key_page_size = a->keys.page_size;
    args->key_last_page = slot_list / a->keys.page_size - 1;
    if (!tqkv__has_small_pages(a))
        tqkv__plan_division(a->keys.page_size, &args->key_page_factor, &args->key_page_shift);
}

/* Finds where the newest halves of each query begin, counted from the newest position that it sees; without halves that
   is behind all of them. Numbers go as far as it matters, so that no sum is too large. */
static void tqkv__plan_boundary(const tqkv__attention *a, tqkv__attend_args *args)
{
    const int own = args->kv_len - a->call.n_queries,
              most = args->kv_len + a->call.n_queries; /* own: the first query's */
    const bool one = a->call.non_causal && !a->call.window;
    const int64_t from = (one ? tqkv__exact_at(a, 0) : a->call.last.from) - a->first;
    if (!tqkv__has_end(a, TQKV__LAST_KEYS)) {
        args->exact_from = INT_MAX;
        return;
    }
    args->exact_last = one || a->call.last.n > most ? most : a->call.last.n;
    args->exact_last += args->first_newest - own;
    args->exact_from = from < 0 ? 0 : from < INT_MAX ? (int)from : INT_MAX;
}

static void tqkv__plan_attend_args(const tqkv__attention *a, const tqkv__attend_buffers *b, const tqkv__split *split,
                                   tqkv__attend_args *args)
{
    tqkv__plan_key_args(a, b->of.keys->shape.capacity, args);
    tqkv__plan_seen(a, &args->first_newest, &args->window);
    args->slice_end = (int)(b->slice_end - a->first);
    tqkv__plan_boundary(a, args);
    args->first_stretch = split->first_stretch;
    args->stretch_tiles = TQKV__STRETCH_TILES;
    args->n_short = split->n_short;
    args->n_splits = split->n_splits;
    args->sections_each = split->sections_each;
    args->strands = split->strands;
    args->value_capacity = a->values.capacity;
    args->value_oldest_slot = args->kv_len ? tqkv__slot(&a->values, a->first) : 0;
    args->softcap = a->call.softcap;
    args->value_block_scale = a->values.block_scale;
    args->first_of_tree = a->call.tree ? args->kv_len - a->call.n_queries : INT_MAX;
    args->value_slots = b->of.values->shape.capacity;
    if (b->of.tail) args->tail_slots = b->of.tail->shape.capacity;
    args->tail_capacity = a->tail.capacity;
    args->tail_oldest_slot = b->of.tail && args->kv_len ? tqkv__slot(&a->tail, a->first) : 0;
    if (a->call.list.rows) tqkv__plan_list_args(a, b->slice_end, args);
    if (!a->keys.n_pages) return;
    args->value_page_size = a->values.page_size;
    args->value_last_page = args->value_slots / args->value_page_size - 1;
    if (!tqkv__has_small_pages(a))
        tqkv__plan_division(args->value_page_size, &args->value_page_factor, &args->value_page_shift);
}

/* Names the constants of attention and index_scores. center, tail_center: whether those of the keys and of their tail
   are used */
static void tqkv__plan_key_constants(tqkv_metal_dispatch *d, const tqkv__attention *a, bool center, bool tail_center)
{
    const bool rotate = a->call.query_basis == TQKV_ORIGINAL;
    tqkv__plan_constant(d, TQKV_FC_FORMAT, (int)a->keys.format);
    tqkv__plan_constant(d, TQKV_FC_VALUE_FORMAT, (int)a->values.format);
    tqkv__plan_constant(d, TQKV_FC_ROTATE_QUERIES, a->rotate_queries);
    tqkv__plan_constant(d, TQKV_FC_MANY_QUERIES, a->call.n_queries > 1);
    tqkv__plan_constant(d, TQKV_FC_SOFTCAP, a->call.softcap > 0.0f);
    tqkv__plan_constant(d, TQKV_FC_CENTER, center);
    tqkv__plan_constant(d, TQKV_FC_ROTATED, center && a->keys.rotated && !rotate);
    tqkv__plan_constant(d, TQKV_FC_TREE, a->call.tree != NULL);
    tqkv__plan_constant(d, TQKV_FC_BATCH, false);
    tqkv__plan_constant(d, TQKV_FC_SMALL_PAGES, tqkv__has_small_pages(a));
    tqkv__plan_constant(d, TQKV_FC_TAIL_FORMAT, (int)a->tail.format);
    tqkv__plan_constant(d, TQKV_FC_ROTATE_TAIL, a->tail.rotated && rotate);
    tqkv__plan_constant(d, TQKV_FC_TAIL_CENTER, tail_center);
    tqkv__plan_constant(d, TQKV_FC_TAIL_ROTATED, tail_center && a->tail.rotated && !rotate);
}

/* Binds scales of the channels of the keys, or of their tail, which are of queries in the original basis or, beside
   others, of the centre. */
static void tqkv__plan_bind_key_scale(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv_metal_store *store,
                                      bool tail, int index, bool center)
{
    const tqkv__stream *s = tail ? &a->tail : &a->keys;
    const bool original = a->call.query_basis == TQKV_ORIGINAL, used = s->head_dim > 0 && (original || center);
    const bool scaled = tqkv__plan_bind_channels(d, tail ? "tail's channel_scale" : "keys' channel_scale", index,
                                                 store->channel_scale, s, used);
    tqkv__plan_constant(d, tail ? TQKV_FC_TAIL_SCALED : TQKV_FC_SCALED, scaled && original);
    tqkv__plan_constant(d, tail ? TQKV_FC_TAIL_CENTER_SCALED : TQKV_FC_CENTER_SCALED, scaled && !original);
}

/* Names the constants that say which streams have a position in the same slot. */
static void tqkv__plan_slot_constants(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                      const tqkv__attend_args *args)
{
    const tqkv_metal_buffer pages = b->of.keys->pages, value_pages = b->of.values->pages;
    const bool same_pages = pages.buffer == value_pages.buffer && pages.offset == value_pages.offset &&
                            args->key_page_size == args->value_page_size &&
                            args->key_last_page == args->value_last_page && args->key_capacity == args->value_capacity;
    const bool values = args->key_capacity == args->value_capacity && args->key_oldest_slot == args->value_oldest_slot,
               tail = args->key_capacity == args->tail_capacity && args->key_oldest_slot == args->tail_oldest_slot;
    tqkv__plan_constant(d, TQKV_FC_SAME_SLOTS, a->keys.n_pages ? same_pages : values);
    tqkv__plan_constant(d, TQKV_FC_SHORT_STORE, args->key_capacity < TQKV__SIMD_WIDTH);
    tqkv__plan_constant(d, TQKV_FC_TAIL_ELSEWHERE, b->of.tail && !a->keys.n_pages && !tail);
}

/* Binds partial results: sums at `index`, their states behind it. */
static TQKV__NOINLINE void tqkv__plan_bind_partials(tqkv_metal_dispatch *d, int index, tqkv_metal_buffer scratch,
                                                    const tqkv__split *split, bool written)
{
    tqkv__plan_bind(d, "scratch", index, tqkv__buffer_after(scratch, split->sums_at), split->sums_size, written);
    tqkv__plan_bind(d, "scratch", index + 1, tqkv__buffer_after(scratch, split->states_at),
                    split->scratch_size - split->sums_size, written);
}

static int tqkv__planned_tail(const tqkv_metal_dispatch *d)
{
    return d->kernel.constants[TQKV_FC_TAIL_FORMAT] > 1 ? TQKV__TAIL_DIM(d->kernel.head_dim * TQKV__DIM_UNIT) : 0;
}

/* Whether a centre of keys or of their tail counts. It adds the same to all scores of a query. That shows under
   softcap, beside sinks and in a slice. */
static bool tqkv__center_counts(const tqkv__attention *a, const tqkv__attend_buffers *b, const tqkv_metal_store *keys)
{
    return keys && keys->center.buffer && (a->call.softcap > 0.0f || b->of.sinks.buffer || b->slice.to);
}

/* Binds slices of attend_merge, from index 7 on, and of attend, which does not use them. */
static void tqkv__plan_bind_slices(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__slice_buffers *slice)
{
    const bool merge = d->kernel.family == TQKV_METAL_ATTEND_MERGE;
    const size_t size = a->n_rows * sizeof(float), written = slice->to ? size : 0, read = slice->from ? size : 0;
    tqkv__plan_bind(d, "max", merge ? 7 : TQKV_METAL_ONLY_CHECKED, slice->max, written, true);
    tqkv__plan_bind(d, "sum", merge ? 8 : TQKV_METAL_ONLY_CHECKED, slice->sum, written, true);
    if (!merge) return;
    tqkv__plan_bind(d, "src_max", 9, slice->src_max, read, false);
    tqkv__plan_bind(d, "src_sum", 10, slice->src_sum, read, false);
    tqkv__plan_constant(d, TQKV_FC_FROM_SLICE, slice->from);
    tqkv__plan_constant(d, TQKV_FC_TO_SLICE, slice->to);
}

/* Returns the bytes of the output with its gaps, or of the sums of a slice, which have none. */
static size_t tqkv__plan_out_size(const tqkv__attention *a, const tqkv__attend_buffers *b)
{
    return b->slice.to ? a->out_elements * sizeof(float) : a->out_size;
}

/* Of a simdgroup: where rows lie apart, all lanes read their slots from it; of rows that several simdgroups share those
   of the values alone. */
static size_t tqkv__planned_slots(const tqkv_metal_dispatch *d, bool is_long)
{
    const uint8_t *constants = d->kernel.constants;
    const bool apart = constants[TQKV_FC_LIST] == 1 + true || constants[TQKV_FC_SMALL_PAGES] == 1 + true,
               same_slots = constants[TQKV_FC_SAME_SLOTS] == 1 + true,
               tail_elsewhere = constants[TQKV_FC_TAIL_ELSEWHERE] == 1 + true;
    return TQKV__SLOT_BYTES((size_t)(is_long ? apart : TQKV__SLOT_LISTS(apart, same_slots, tail_elsewhere)));
}

/* The memory of queries holds only the columns in use: memory limits the threadgroups on a core. */
static void tqkv__plan_attend_memory(tqkv_metal_dispatch *d, size_t key_dim, size_t value_dim, int columns)
{
    const size_t tail = (size_t)tqkv__planned_tail(d), query = TQKV__QUERY_FLOATS(key_dim) + TQKV__QUERY_FLOATS(tail);
    d->memory[0] = TQKV__ATTEND_TABLE_BYTES + (tail ? TQKV__TABLE_BYTES : 0);
    d->memory[1] = query * sizeof(float) * (size_t)columns;
    d->memory[2] = 0;
    d->memory[3] = TQKV__COLUMN_BYTES(TQKV__MAX_COLUMNS(value_dim));
    d->memory_each[2] = TQKV__ATTEND_SUM_BYTES(value_dim, (size_t)columns);
    d->memory_each[3] = (size_t)TQKV__STATE_BYTES(TQKV__MAX_COLUMNS(value_dim)) + tqkv__planned_slots(d, false);
}

/* Matrices come whole: 8, 16 or 32 columns. The sums take turns, and after the only stretch the queries' memory. Of
   rows that several simdgroups share, some queries and then the weights lie behind. */
static void tqkv__plan_matrix_memory(tqkv_metal_dispatch *d, size_t head_dim, int columns)
{
    const size_t matrices = TQKV__MATRICES(columns), tail = (size_t)tqkv__planned_tail(d),
                 queries = TQKV__MATRIX_QUERY_BYTES(head_dim + tail) * matrices;
    const bool is_long = tqkv__is_long((int)head_dim);
    const size_t rows = is_long ? TQKV__LONG_ROW_BYTES(head_dim)
                                : TQKV__MATRIX_QUERY_BYTES(head_dim) * (columns <= 8 ? 1 : 2),
                 sums = TQKV__MATRIX_SUM_BYTES(head_dim) + (tqkv__attend_args_of(d).sections_each ? queries : 0),
                 strands = tqkv__attend_args_of(d).strands > 1 && columns <= TQKV__MOST_STRAND_COLUMNS
                               ? TQKV__MATRIX_STRAND_BYTES(head_dim, matrices)
                               : 0,
                 ends = sums > strands ? sums : strands,
                 others = is_long ? queries + TQKV__LONG_WEIGHT_BYTES(matrices) : ends;
    d->memory[0] = TQKV__ATTEND_TABLE_BYTES;
    d->memory[1] = queries + rows > others ? queries + rows : others;
    d->memory[2] = d->memory_each[2] = 0;
    d->memory[3] = TQKV__COLUMN_BYTES(8 * matrices) + (tail ? TQKV__TABLE_BYTES : 0);
    d->memory_each[3] = TQKV__STATE_BYTES(8 * matrices) + tqkv__planned_slots(d, is_long);
}

/* Returns the threadgroups of a KV head and split. */
static size_t tqkv__row_groups(const tqkv_metal_dispatch *d, const tqkv__attend_args *args, size_t columns)
{
    const bool list = d->kernel.constants[TQKV_FC_LIST] == 1 + true; /* then each query has threadgroups of its own */
    const size_t n_queries = (size_t)args->n_queries, rows = (list ? 1 : n_queries) * (size_t)args->group;
    return (rows + columns - 1) / columns * (list ? n_queries : 1);
}

static void tqkv__plan_columns(tqkv_metal_dispatch *d, bool matrix, int columns)
{
    const int head_dim = d->kernel.head_dim * TQKV__DIM_UNIT, value_dim = d->kernel.value_dim * TQKV__DIM_UNIT;
    const int most = matrix ? TQKV__MOST_MATRIX_COLUMNS(head_dim) : TQKV__MAX_COLUMNS(head_dim);
    const tqkv__attend_args args = tqkv__attend_args_of(d);
    if (columns > most) columns = most;
    if (matrix != (d->kernel.family == TQKV_METAL_ATTEND_MATRIX))
        tqkv__plan_family(d, matrix ? TQKV_METAL_ATTEND_MATRIX : TQKV_METAL_ATTEND);
    tqkv__plan_constant(d, TQKV_FC_COLUMNS, columns);
    if (matrix)
        tqkv__plan_matrix_memory(d, (size_t)head_dim, columns);
    else
        tqkv__plan_attend_memory(d, (size_t)head_dim, (size_t)(value_dim ? value_dim : head_dim), columns);
    d->grid[1] = tqkv__row_groups(d, &args, (size_t)columns);
}

TQKV_METAL_API bool tqkv_metal_plan_lanes(tqkv_metal_plan *plan)
{
    for (int i = 0; i < plan->n; i++) {
        tqkv_metal_dispatch *d = &plan->d[i];
        if (d->kernel.family != TQKV_METAL_ATTEND_MATRIX) continue;
        if (d->kernel.constants[TQKV_FC_BATCH] == 1 + true) return false;
        tqkv__plan_columns(d, false, d->kernel.constants[TQKV_FC_COLUMNS] - 1);
        if (d->n_simdgroups > 4) d->n_simdgroups = 4;
    }
    return true;
}

static void tqkv__plan_attend_splits(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                     const tqkv__split *split)
{
    const bool center = tqkv__center_counts(a, b, b->of.keys), tail_center = tqkv__center_counts(a, b, b->of.tail);
    const tqkv_metal_store *tail = b->of.tail ? b->of.tail : b->of.keys; /* then nothing of it is bound */
    tqkv__plan_begin(d, TQKV_METAL_ATTEND, a->keys.head_dim, a->value_dim);
    tqkv__attend_args args;
    tqkv__plan_attend_args(a, b, split, &args);
    tqkv__plan_args(d, &args, sizeof args);
    tqkv__plan_key_constants(d, a, center, tail_center);
    tqkv__plan_slot_constants(d, a, b, &args);
    tqkv__plan_constant(d, TQKV_FC_LIST, a->call.list.rows != NULL);
    tqkv__plan_bind_rows(d, "q", 1, b->q, TQKV_FC_TYPE, a->call.query_type, a->q_size, false);
    tqkv__plan_bind_store(d, "keys' codes", "keys' norms", 2, b->of.keys, &a->keys, false);
    tqkv__plan_bind_store(d, "values' codes", "values' norms", 4, b->of.values, &a->values, false);
    tqkv__plan_bind(d, "sinks", TQKV_METAL_ONLY_CHECKED, b->of.sinks,
                    b->of.sinks.buffer ? (size_t)a->call.n_heads * sizeof(float) : 0, false);
    tqkv__plan_bind_partials(d, 6, b->scratch, split, true);
    tqkv__plan_bind_channels(d, "keys' center", 8, b->of.keys->center, &a->keys, center);
    tqkv__plan_bind_channels(d, "values' center", TQKV_METAL_ONLY_CHECKED, b->of.values->center, &a->values, true);
    tqkv__plan_bind_channels(d, "values' channel_scale", TQKV_METAL_ONLY_CHECKED, b->of.values->channel_scale,
                             &a->values, true);
    tqkv__plan_bind_pages(d, "keys' pages", 9, b->of.keys->pages, &a->keys, TQKV_FC_PAGES);
    tqkv__plan_bind_pages(d, "values' pages", 10, b->of.values->pages, &a->values, TQKV_FC_PAGES);
    tqkv__plan_bind(d, "tree", 11, b->of.tree, a->call.tree ? (size_t)a->call.n_queries * sizeof(uint64_t) : 0, false);
    tqkv__plan_bind(d, "arguments", TQKV__ITEMS_OF_ATTEND, b->of.tree, 0, false);
    tqkv__plan_bind_store(d, "tail's codes", "tail's norms", 13, tail, &a->tail, false);
    tqkv__plan_bind_channels(d, "tail's center", 15, tail->center, &a->tail, tail_center);
    tqkv__plan_bind_key_scale(d, a, b->of.keys, false, 17, center);
    tqkv__plan_bind_key_scale(d, a, tail, true, 18, tail_center);
    tqkv__plan_constant(d, TQKV_FC_HALVES, b->halves);
    tqkv__plan_constant(d, TQKV_FC_STRANDS, split->strands > 1);
    tqkv__plan_bind(d, "lists", 16, b->list_rows, tqkv__list_rows_size(a), false);
    if (a->call.list.rows) d->barrier = b->list_rows.buffer;
    tqkv__plan_bind_rows(d, "out", TQKV_METAL_ONLY_CHECKED, b->out, TQKV_FC_TYPE, a->call.output_type,
                         tqkv__plan_out_size(a, b), true);
    tqkv__plan_bind_slices(d, a, &b->slice);
    tqkv__plan_columns(d, split->matrix, split->columns);
    d->grid[0] = (size_t)a->n_kv_heads;
    d->grid[2] = (size_t)split->n_splits;
    d->n_simdgroups = split->n_simdgroups;
}

/* Plans attend_list for a planned attend, whose arguments it has. */
static void tqkv__plan_list(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                            const tqkv_metal_dispatch *attend)
{
    const size_t n_queries = (size_t)a->call.n_queries, n_rows = n_queries * (size_t)a->call.list.heads,
                 length = (size_t)a->call.list.length;
    tqkv__plan_begin(d, TQKV_METAL_ATTEND_LIST, 0, 0);
    tqkv__plan_args(d, attend->arguments[0].bytes, attend->arguments[0].size);
    tqkv__plan_bind(d, "list", 1, b->of.list, n_rows * length * sizeof(int32_t), false);
    tqkv__plan_bind(d, "scratch", 2, b->list_rows, tqkv__list_rows_size(a), true);
    tqkv__plan_bind(d, "tree", 3, b->of.tree, a->call.tree ? n_queries * sizeof(uint64_t) : 0, false);
    tqkv__plan_bind(d, "arguments", TQKV__ITEMS_OF_LIST, b->of.tree, 0, false);
    tqkv__plan_constant(d, TQKV_FC_TREE, a->call.tree != NULL);
    tqkv__plan_constant(d, TQKV_FC_BATCH, false);
    tqkv__plan_constant(d, TQKV_FC_HALVES, b->halves);
    d->memory[0] = TQKV__SIMD_WIDTH * sizeof(uint32_t);
    d->grid[0] = n_rows;
    d->n_simdgroups = length / 32 < 31 ? (int)length / 32 + 1 : 32;
}

/* Begins a call of attend_merge: all but what is read, and the centres. */
static void tqkv__plan_merge_begin(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                   tqkv__merge_args args, bool unrotate)
{
    const bool sinks = b->of.sinks.buffer != NULL;
    const size_t dim = (size_t)a->value_dim;
    args.n_rows = (int32_t)a->n_rows;
    args.n_heads = a->call.n_heads;
    args.group = a->group;
    args.out_token_stride = (uint32_t)(b->slice.to ? (size_t)args.n_heads * dim : a->call.output_strides.token);
    args.out_head_stride = (uint32_t)(b->slice.to ? dim : a->call.output_strides.head);
    tqkv__plan_begin(d, TQKV_METAL_ATTEND_MERGE, a->value_dim, a->value_dim);
    tqkv__plan_args(d, &args, sizeof args);
    tqkv__plan_constant(d, TQKV_FC_UNROTATE, unrotate);
    tqkv__plan_constant(d, TQKV_FC_ROTATED, false);
    tqkv__plan_constant(d, TQKV_FC_SINKS, sinks);
    tqkv__plan_bind(d, "sinks", 3, b->of.sinks, sinks ? (size_t)a->call.n_heads * sizeof(float) : 0, false);
    tqkv__plan_bind_rows(d, "out", 4, b->out, TQKV_FC_TYPE, b->slice.to ? TQKV_TYPE_F32 : a->call.output_type,
                         tqkv__plan_out_size(a, b), true);
    tqkv__plan_bind(d, "arguments", TQKV__ITEMS_OF_MERGE, b->of.tree, 0, false);
    tqkv__plan_constant(d, TQKV_FC_BATCH, false);
    tqkv__plan_bind_slices(d, a, &b->slice);
    d->memory_each[0] = TQKV__MERGE_BYTES((size_t)a->value_dim, 1);
    d->grid[0] = a->n_rows;
    d->n_simdgroups = 1;
}

/* Binds centre and scales of the values. Scales are of an output in the original basis or, in the other one, of the
   centre. Sums of slices have neither. */
static void tqkv__plan_bind_values(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                   bool unrotate)
{
    const bool finish = !b->slice.to, original = a->call.output_basis == TQKV_ORIGINAL,
               center = tqkv__plan_bind_channels(d, "values' center", 5, b->of.values->center, &a->values, finish),
               scaled = tqkv__plan_bind_channels(d, "values' channel_scale", 11, b->of.values->channel_scale,
                                                 &a->values, finish && (original || center));
    tqkv__plan_constant(d, TQKV_FC_VALUE_SCALED, scaled && original);
    tqkv__plan_constant(d, TQKV_FC_CENTER_SCALED, scaled && !original);
    tqkv__plan_constant(d, TQKV_FC_VALUE_CENTER, center);
    tqkv__plan_constant(d, TQKV_FC_VALUE_ROTATED, center && a->values.rotated && !unrotate);
}

/* Merges all regions of the context: splits [first positions, others, last positions], of those that there are. */
static void tqkv__plan_attend_merge(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                    const tqkv__split splits[3], const tqkv__split *all)
{
    const tqkv__split *split = &splits[1];
    const int length = split->sections_each ? 1
                       : split->strands > 1 ? split->strands
                                            : TQKV__SECTION,
              before = split->strands > 1 ? 0 : split->first_stretch % length;
    const int n_results = split->sections_each > 1 ? 1 : split->n_partials, most = TQKV__MERGE_SIMDGROUPS(a->value_dim);
    const int n_sections =
        (before + n_results + length - 1) / length + (splits[0].n_partials > 0) + (splits[2].n_partials > 0);
    const bool slice = b->slice.to, unrotate = a->unrotate_output && !slice;
    const tqkv__merge_args args = {
        0, 0, 0, n_results, length, split->strands, before, splits[0].n_partials, splits[2].n_partials, 0, 0};
    tqkv__plan_merge_begin(d, a, b, args, unrotate);
    tqkv__plan_bind_partials(d, 1, b->scratch, all, false);
    tqkv__plan_constant(d, TQKV_FC_ROTATED, slice && !a->values.rotated);
    tqkv__plan_bind_values(d, a, b, unrotate);
    const bool shifted = tqkv__center_counts(a, b, b->of.keys) || tqkv__center_counts(a, b, b->of.tail);
    tqkv__plan_constant(d, TQKV_FC_CENTER, shifted && !(a->call.softcap > 0.0f));
    d->n_simdgroups = most < n_sections ? most : n_sections;
    d->barrier = b->scratch.buffer;
}

/* Finds the positions of each region of the context up to slice_end. First and last are read as halves where stores
   hold them so. What a query reads as newest halves depends on its own position: where several begin the last region
   and the codes overlap. */
static void tqkv__find_regions(const tqkv__attention *a, int64_t slice_end, tqkv__range regions[TQKV__REGIONS])
{
    const int64_t low = tqkv__exact_at(a, 0), high = tqkv__exact_at(a, a->call.n_queries - 1);
    tqkv__range *codes = &regions[TQKV__CODES_REGION], *newest = &regions[TQKV__LAST_REGION];
    for (int i = 0; i < TQKV__REGIONS; i++)
        regions[i].from = regions[i].to = i == TQKV__LAST_REGION ? slice_end : a->first;
    codes->to = slice_end;
    if (tqkv__has_end(a, TQKV__FIRST_KEYS) && a->exact_below > a->first)
        codes->from = a->exact_below < slice_end ? a->exact_below : slice_end;
    regions[TQKV__FIRST_REGION].to = codes->from;
    if (a->kept) {
        regions[TQKV__FIRST_REGION].from = 0;
        regions[TQKV__FIRST_REGION].to = a->exact_below < slice_end ? a->exact_below : slice_end;
    }
    if (!tqkv__has_end(a, TQKV__LAST_KEYS)) return;
    if (low < slice_end) newest->from = low > codes->from ? low : codes->from;
    if (high < slice_end) codes->to = high > codes->from ? high : codes->from;
}

/* Takes the attention to region i alone, and its streams. */
static void tqkv__take_region(const tqkv__attention *a, const tqkv__attend_buffers *b, int i, tqkv__range positions,
                              tqkv__attention *own, tqkv__attend_buffers *buffers)
{
    const int last = i == TQKV__LAST_REGION;
    const int64_t gone =
        a->first > a->kept ? a->first - a->kept : 0; /* between the first positions and the oldest resident one */
    const int ends = last ? TQKV__LAST_KEYS : TQKV__FIRST_KEYS;
    const tqkv_metal_ends *kept = last ? &b->of.last : &b->of.first;
    *own = *a;
    *buffers = *b;
    own->first = positions.from;
    own->newest_halves = last;
    buffers->slice_end = positions.to;
    buffers->halves = last                                                           ? TQKV__NEWEST_HALVES
                      : i == TQKV__CODES_REGION && tqkv__has_end(a, TQKV__LAST_KEYS) ? TQKV__BEFORE_HALVES
                                                                                     : TQKV__ALL_POSITIONS;
    if (i == TQKV__CODES_REGION) return;
    if (a->reads[ends]) {
        own->keys = *TQKV__STREAM_AT(a, ends);
        buffers->of.keys = kept->keys;
    }
    if (a->reads[ends + 1]) {
        own->values = *TQKV__STREAM_AT(a, ends + 1);
        buffers->of.values = a->shared ? kept->keys : kept->values;
    }
    if (last || !a->kept) return;
    if (a->call.tail) {
        own->tail = *TQKV__STREAM_AT(a, TQKV__FIRST_TAIL);
        buffers->of.tail = kept->tail;
    }
    if (a->call.list.newest) /* counts what there is */
        own->call.list.newest = gone < INT_MAX - a->call.list.newest ? a->call.list.newest + (int)gone : INT_MAX;
}

/* Divides each region, and scratch: rows of lists, then sums, then states. Those of the first and last region lie
   before the others, whose number may be more than the merge reads. *all: of all regions */
static tqkv_result tqkv__split_regions(const tqkv__attention *a, const tqkv__attend_buffers *b,
                                       const tqkv__range regions[TQKV__REGIONS], size_t most_sums,
                                       tqkv__split splits[TQKV__REGIONS], tqkv__split *all)
{
    static const int order[] = {TQKV__FIRST_REGION, TQKV__LAST_REGION, TQKV__CODES_REGION};
    const tqkv__range *first_region = &regions[TQKV__FIRST_REGION], *last_region = &regions[TQKV__LAST_REGION];
    const bool halves = first_region->from < first_region->to || last_region->from < last_region->to;
    tqkv__attention alone;
    tqkv__attend_buffers buffers;
    int64_t first, end;
    memset(splits, 0, TQKV__REGIONS * sizeof *splits);
    memset(all, 0, sizeof *all);
    for (int i = 0; i < TQKV__REGIONS; i++) {
        const int p = order[i];
        tqkv__split *own = &splits[p];
        if (regions[p].from == regions[p].to && (p != TQKV__CODES_REGION || halves)) continue;
        tqkv__take_region(a, b, p, regions[p], &alone, &buffers);
        tqkv__tiles_seen(&alone, buffers.slice_end, &first, &end);
        if (a->call.list.rows) tqkv__listed_tiles(&alone, buffers.slice_end, &first, &end);
        const tqkv_result r =
            tqkv__choose_split(&alone, first, end, p == TQKV__CODES_REGION ? most_sums : SIZE_MAX, own);
        if (r != TQKV_OK) return r;

        own->sums_at = all->sums_size;
        own->states_at = all->scratch_size - all->sums_size;
        own->list_at = all->list_at;
        all->list_at += tqkv__list_rows_size(a);
        all->sums_size += own->sums_size;
        all->scratch_size += own->scratch_size;
    }
    all->states_at = all->sums_size;
    return TQKV_OK;
}

/* Plans lists and attend for each region of the context, then the merge. */
static tqkv_result tqkv__plan_attention(const tqkv__attention *a, const tqkv__attend_buffers *b, size_t most_sums,
                                        tqkv__attend_plan *plan)
{
    tqkv__split splits[TQKV__REGIONS], all;
    tqkv__attention own;
    tqkv__attend_buffers behind = *b, buffers;
    tqkv__range regions[TQKV__REGIONS];
    tqkv__find_regions(a, b->slice_end, regions);
    if (a->call.non_causal && a->call.end - a->first + a->call.n_queries > INT_MAX / 2)
        return TQKV__REFUSE(UNSUPPORTED, "non_causal with 2^30 positions and queries: not on a GPU");
    const tqkv_result r = tqkv__split_regions(a, b, regions, most_sums, splits, &all);
    if (r != TQKV_OK) return r;
    behind.scratch = tqkv__buffer_after(b->scratch, all.list_at);
    plan->listed = a->call.list.rows != NULL;
    plan->scratch_size = all.list_at + all.scratch_size;
    for (int p = 0; p < TQKV__REGIONS; p++) {
        plan->has[p] = splits[p].n_partials > 0;
        if (!plan->has[p]) continue;
        splits[p].states_at += all.sums_size;
        tqkv__take_region(a, &behind, p, regions[p], &own, &buffers);
        buffers.list_rows = tqkv__buffer_after(b->scratch, splits[p].list_at);
        tqkv__plan_attend_splits(&plan->attends[p], &own, &buffers, &splits[p]);
        if (plan->listed) tqkv__plan_list(&plan->lists[p], &own, &buffers, &plan->attends[p]);
    }
    tqkv__plan_attend_merge(&plan->merge, a, &behind, splits, &all);
    return TQKV_OK;
}

/* Adds all dispatches, in their order. */
static void tqkv__order_dispatches(const tqkv__attend_plan *from, tqkv_metal_plan *plan)
{
    if (from->empty) return;
    for (int p = 0; p < TQKV__REGIONS; p++)
        if (from->has[p] && from->listed) *tqkv__add_dispatch(plan) = from->lists[p];
    for (int p = 0; p < TQKV__REGIONS; p++)
        if (from->has[p]) *tqkv__add_dispatch(plan) = from->attends[p];
    *tqkv__add_dispatch(plan) = from->merge;
}

/* How the threadgroups share attention. Metal does not report a GPU's number of cores (7 to 80): only the shape decides.
   These numbers come from sizes and `make model`, not from measurements on Apple's hardware.

   columns       Query rows of a KV head in a threadgroup, as many as registers hold: each key and value is decoded once
                 for all of them. The rows of one query are divided evenly: 9 rows are 5 + 4, not 8 + 1, for the same two
                 passes. For several queries: tqkv__choose_columns.
   n_simdgroups  4, or as many as the pipeline allows. Each walks its own tiles, and together they hide the latency of
                 loads. They share tables and queries in threadgroup memory.
   stretches     512 slots up to slot 8192, 2048 beyond. A simdgroup's float sums run over a quarter of that, so they
                 do not lose digits at any length. The bounds depend on slots alone: what stands beside a query changes
                 no bit of its result. 512 slots are 4 tiles a simdgroup: fewer would not hide latency, more would leave
                 the cores of a large GPU idle at 8192 positions and 8 KV heads (128 threadgroups). Beyond, threadgroups
                 abound, and longer stretches save queries loaded and sums merged: a stretch's sums are 8 bytes a value
                 and row, read and written, against 512 or 2048 positions of half to two bytes a value. On an H200, D=128,
                 group 2, 128k positions, I8 takes 107 microseconds with 512 slots up to slot 65536, 89 as it is, and 80
                 with 2048 everywhere. A window sees few stretches wherever it stands, so there all are short.
   splits        Threadgroups along the context, each with
                 one stretch   until the stretches' sums take 32 MiB of scratch,
                 one section   beyond that, 16 stretches added up as it goes, or
                 everything    if heads and rows make 256 threadgroups already. Section and total stand in scratch.
                 All three do the same additions in the same order. */
enum { TQKV__STRETCH_TILES = 16, TQKV__SHORT_STRETCHES = 16, TQKV__MOST_SUMS = 32 << 20, TQKV__FULL = 256 };

typedef struct tqkv__split {
    int columns, n_simdgroups, n_splits, first_stretch, n_short, sections_each, n_partials;
    bool matrix;
    size_t sums_size, scratch_size; /* [n_partials][n_rows][head_dim]; scratch: also [1 + n_partials][n_rows][2] */
    size_t sums_at, states_at;      /* of the two, in scratch */
    size_t list_at;                 /* rows of attend_list, in their part of scratch */
} tqkv__split;

static int tqkv__stretch_of(int64_t tile, int n_short)
{
    const int64_t length = TQKV__STRETCH_TILES, n = n_short;
    return (int)TQKV__STRETCH_OF_TILE(tile, length, n);
}

/* Slots of the keys before slice_end that some query sees, as tiles [*first, *end). A ring that wraps: all. */
static void tqkv__tiles_seen(const tqkv__attention *a, int64_t slice_end, int64_t *first, int64_t *end)
{
    const tqkv__range slice = {a->first, slice_end}, visible = tqkv__visible_to(a, 0, a->call.n_queries - 1, slice);
    const int64_t seen = visible.to - visible.from, slot = seen > 0 ? tqkv__slot(&a->keys, visible.from) : 0;
    const bool wraps = seen > a->keys.capacity - slot;
    *first = wraps ? 0 : slot / TQKV__SIMD_WIDTH;
    *end = ((wraps ? a->keys.capacity : slot + seen) + TQKV__SIMD_WIDTH - 1) / TQKV__SIMD_WIDTH;
}

/* Whether attention multiplies matrices. A query must have the same bits alone and in company, so the number of queries
   does not decide. Microseconds on an H200, one token, 128k positions, 8 KV heads, D=128 (make bench-gpu, with --lanes and
   --matrices):

   group                 1          2          4           8           16
   TQ4, without, with    60, 71     68, 71     96, 73      153, 75     284, 101
   I8                    76, -      79, 77     103, 77     173, 79     - , 91
   I8 keys, TQ4 values   63, -      70, 69     99, 76      154, 72     - , 87

   F16, TQ5 and TQ8 gain from a group of 8 on and lose at 1 and 2. 512 queries over 8k positions at a group of 2, TQ4: 1470
   and 353; 8 queries over 128k: 287 and 100. So on that GPU TQ4 and I8 are better served by a matrix_group of 2. The
   model of Apple's GPUs, which have no unit for such products, expects tokens of narrow groups to lose up to half of their
   speed there: hence 4. */
static bool tqkv__choose_matrix(const tqkv__attention *a)
{
    const int head_dim = a->keys.head_dim, least = tqkv__is_long(head_dim) ? 8 : 4;
    return a->group >= (a->matrix_group ? a->matrix_group : least) && head_dim == a->value_dim &&
           (head_dim == 64 || head_dim == 128 || head_dim == 256 || tqkv__is_long(head_dim));
}

/* Query rows of a threadgroup that multiplies matrices: 64 registers of sums. The benchmark's GPU, with 255 registers a
   thread, takes 32 up to D=128. */
static int tqkv__matrix_rows(int head_dim) { return head_dim <= 64 ? 32 : head_dim <= 128 ? 16 : 8; }

/* A number of columns has a pipeline of its own, and Metal takes up to a second for one. One query has always the same rows:
   they are its columns. For several they are a power of two, so that a server, whose calls differ in their numbers of
   queries, does not wait for Metal's compiler in mid-run. */
static int tqkv__choose_columns(int64_t rows, int n_queries)
{
    int columns = 1;
    if (n_queries == 1) return (int)rows;
    while (columns < rows) columns *= 2;
    return columns;
}

/* Divides query rows and the tiles [first, end) of the keys. most_sums: bytes of the stretches' sums; SIZE_MAX: each stretch
   has its own, and all are short */
static tqkv_result tqkv__choose_split(const tqkv__attention *a, int64_t first, int64_t end, size_t most_sums,
                                      tqkv__split *split)
{
    split->matrix = tqkv__choose_matrix(a);
    const int64_t each = a->call.list ? a->group : (int64_t)a->call.n_queries * a->group; /* rows that share tiles */
    const int64_t most = split->matrix ? tqkv__matrix_rows(a->keys.head_dim) : TQKV__MAX_COLUMNS(a->keys.head_dim);
    const int64_t parts = (each + most - 1) / most, section = TQKV__SECTION;
    const int64_t blocks = a->call.list ? parts * a->call.n_queries : parts;
    const size_t row = ((size_t)a->value_dim + 2) * sizeof(float);
    split->n_short = a->call.window || most_sums == SIZE_MAX ? INT_MAX : TQKV__SHORT_STRETCHES;
    split->first_stretch = tqkv__stretch_of(first, split->n_short);
    const int last = tqkv__stretch_of(end > first ? end - 1 : first, split->n_short);
    const int n_stretches = last - split->first_stretch + 1;
    const int n_sections = (int)(last / section - split->first_stretch / section) + 1;
    const bool full = blocks * a->n_kv_heads >= TQKV__FULL && most_sums != SIZE_MAX;
    const bool stretches = !full && a->n_rows <= most_sums / row / (size_t)n_stretches;
    split->n_splits = full ? 1 : stretches ? n_stretches : n_sections;
    split->sections_each = full ? n_sections : stretches ? 0 : 1;
    split->n_partials = full && n_sections > 1 ? 2 : split->n_splits;
    split->columns = tqkv__choose_columns((each + parts - 1) / parts, a->call.list ? 1 : a->call.n_queries);
    const bool shared = split->matrix && tqkv__is_long(a->keys.head_dim); /* rows by all simdgroups of a threadgroup */
    split->n_simdgroups = shared ? TQKV__LONG_SIMDGROUPS : end > 4 ? 4 : end > 1 ? (int)end : 1;
    const size_t n = (size_t)split->n_partials;
    if (a->n_rows > SIZE_MAX / 8 / row / (n + 1)) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
    split->sums_size = a->out_elements * sizeof(float) * n;
    split->scratch_size = a->n_rows * (row * n + 2 * sizeof(float));
    split->sums_at = 0;
    split->states_at = split->sums_size;
    return TQKV_OK;
}

/* max and sum: of a slice, which also says so. The two of a slice that is read */
typedef struct tqkv__slice_buffers {
    bool from, to;
    tqkv_metal_buffer max, sum, src_max, src_sum;
} tqkv__slice_buffers;

typedef struct tqkv__attend_buffers {
    const tqkv_metal_store *keys, *values, *tail; /* tail: NULL without one */
    tqkv_metal_buffer sinks, tree, q, scratch, out;
    tqkv__slice_buffers slice;          /* zero: attends to all positions */
    int64_t slice_end;                  /* of the positions to attend to */
    const tqkv_metal_store *ends[2][2]; /* of tqkv__attention */
    tqkv_metal_buffer list, list_rows;  /* the caller's, and what attend_list makes of them */
} tqkv__attend_buffers;

/* What a query sees, counted from the oldest resident position: the positions up to first_newest and its number, and of those
   the last `window`, or all. Without causality it looks as far ahead as back. */
static void tqkv__plan_seen(const tqkv__attention *a, int32_t *first_newest, int32_t *window)
{
    const int kv_len = (int)(a->call.end - a->first), n = a->call.n_queries, own = a->call.window;
    *first_newest = kv_len - n;
    *window = own < kv_len ? own : 0;
    if (!a->call.non_causal) return;
    const bool all = !own || own >= kv_len + n;
    *first_newest = all ? kv_len - 1 : kv_len - n + own - 1;
    *window = all ? 0 : 2 * own - 1;
}

/* Whether these are integers. */
static tqkv_result tqkv__check_non_causal(const tqkv__attention *a)
{
    if (!a->call.non_causal || a->call.end - a->first + a->call.n_queries <= INT_MAX / 2) return TQKV_OK;
    return TQKV__REFUSE(UNSUPPORTED, "non_causal with 2^30 positions and queries: not on a GPU");
}

/* ---- Lists of blocks ---- */

static tqkv_result tqkv__check_list_rows(const tqkv__attention *a)
{
    const tqkv_attention *c = &a->call;
    size_t size;
    if (c->list_length <= INT_MAX - TQKV__LIST_HEADER && c->n_queries <= INT_MAX / c->list_heads &&
        tqkv__array_size(c->n_queries, c->list_heads, c->list_length + TQKV__LIST_HEADER, 8 * sizeof(int32_t), &size))
        return TQKV_OK;
    return TQKV__INVALID("list: too large for a GPU");
}

static size_t tqkv__list_rows_size(const tqkv__attention *a)
{
    const size_t row = ((size_t)a->call.list_length + TQKV__LIST_HEADER) * sizeof(int32_t);
    return a->call.list ? ((size_t)a->call.n_queries * (size_t)a->call.list_heads * row + 15) / 16 * 16 : 0;
}

/* Positions of its block before the oldest resident one. */
static int tqkv__list_inside(const tqkv__attention *a) { return (int)(a->first % a->call.list_block); }

/* Whether positions up to slice_end have ascending slots, and enough before them, so that ranks can take slots. */
static bool tqkv__list_in_order(const tqkv__attention *a, int64_t slice_end)
{
    const int64_t slot = slice_end > a->first ? tqkv__slot(&a->keys, a->first) : 0;
    return slot >= tqkv__list_inside(a) && slot + (slice_end - a->first) <= a->keys.capacity;
}

/* The slot of the first position of the block of the oldest resident one. */
static int64_t tqkv__list_base(const tqkv__attention *a, int64_t slice_end)
{
    if (!tqkv__list_in_order(a, slice_end) || slice_end == a->first) return 0;
    return tqkv__slot(&a->keys, a->first) - tqkv__list_inside(a);
}

/* The first position, counted from the oldest resident one, of the block where the window of a query begins. */
static int64_t tqkv__window_block(const tqkv__attention *a, int query)
{
    int32_t newest, window;
    tqkv__plan_seen(a, &newest, &window);
    const int64_t end = (int64_t)newest + query + 1, from = window && end > window ? end - window : 0;
    return (from + tqkv__list_inside(a)) / a->call.list_block * a->call.list_block;
}

/* The tiles of ranks: from that of the first query's on, and before *end; with ascending slots not beyond the *end that there
   was. */
static void tqkv__listed_tiles(const tqkv__attention *a, int64_t slice_end, int64_t *first, int64_t *end)
{
    const tqkv_attention *c = &a->call;
    const int64_t size = c->list_block, width = TQKV__SIMD_WIDTH, base = tqkv__list_base(a, slice_end);
    const int64_t most = c->list_newest + (c->tree ? 64 : 0),
                  newest = c->list_newest ? (most + 2 * size - 2) / size : 0;
    const int64_t all = (tqkv__list_inside(a) + slice_end - a->first + size - 1) / size * size,
                  listed = tqkv__window_block(a, c->n_queries - 1) + (c->list_length + newest) * size;
    const int64_t tiles = (base + (listed < all ? listed : all) + width - 1) / width;
    const int64_t begin = (base + tqkv__window_block(a, 0)) / width;
    if (begin < *first) *first = begin;
    if (tiles < *end || !tqkv__list_in_order(a, slice_end)) *end = tiles;
}

/* Whether some pages may end within tiles, which are then looked up row by row. */
static bool tqkv__has_small_pages(const tqkv__attention *a)
{
    return a->keys.page_size % 64 || a->values.page_size % 64;
}

/* A division by the tiles of a page, d: a GPU takes tens of instructions for one. With 2^shift < d <= 2^(shift+1) the factor
   2^(32+shift) / d, rounded up, is at most d / 2^(32+shift) of itself too large: that is exact for tiles below 2^26. */
static void tqkv__plan_division(int page_size, uint32_t *factor, int32_t *shift)
{
    const int tiles = page_size / TQKV__SIMD_WIDTH;
    *shift = 0;
    while (((int64_t)2 << *shift) < tiles) ++*shift;
    *factor = (uint32_t)((((uint64_t)1 << (32 + *shift)) + (uint64_t)tiles - 1) / (uint64_t)tiles);
}

/* Whether keys and values look up the same entries of one table. */
static bool tqkv__same_pages(const tqkv__attend_args *args, const tqkv__attend_buffers *b)
{
    return b->keys->pages.buffer == b->values->pages.buffer && b->keys->pages.offset == b->values->pages.offset &&
           args->key_page_size == args->value_page_size && args->key_last_page == args->value_last_page &&
           args->key_capacity == args->value_capacity;
}

static void tqkv__plan_list_args(const tqkv__attention *a, int64_t slice_end, tqkv__attend_args *args)
{
    const int64_t first_block = a->first / a->call.list_block;
    args->list_heads = a->call.list_heads;
    args->list_row = TQKV__LIST_HEADER + a->call.list_length;
    args->list_shift = tqkv__list_shift(a->call.list_block);
    args->list_inside = tqkv__list_inside(a);
    args->list_base = (int)tqkv__list_base(a, slice_end);
    args->list_slots = tqkv__list_in_order(a, slice_end) ? args->key_capacity : INT_MAX;
    args->list_newest = a->call.list_newest;
    args->list_first_block = first_block < INT_MAX ? (int32_t)first_block : INT_MAX;
}

/* What attention and index_scores have in common. slots: of a KV head in memory */
static TQKV__NOINLINE void tqkv__plan_key_args(const tqkv__attention *a, int slots, tqkv__attend_args *args)
{
    memset(args, 0, sizeof *args);
    args->n_queries = a->call.n_queries;
    args->n_kv_heads = a->n_kv_heads;
    args->group = a->group;
    args->kv_len = (int)(a->call.end - a->first);
    args->query_token_stride = (uint32_t)a->call.query_strides.token;
    args->query_head_stride = (uint32_t)a->call.query_strides.head;
    args->scale = a->call.scale;
    args->key_capacity = a->keys.capacity;
    args->key_oldest_slot = args->kv_len ? tqkv__slot(&a->keys, a->first) : 0;
    args->key_block_scale = a->keys.block_scale;
    args->key_slots = slots;
    if (!a->keys.n_pages) return;
    args->key_page_size = a->keys.page_size;
    args->key_last_page = slots / a->keys.page_size - 1;
    if (!tqkv__has_small_pages(a))
        tqkv__plan_division(a->keys.page_size, &args->key_page_factor, &args->key_page_shift);
}

static void tqkv__plan_attend_args(const tqkv__attention *a, const tqkv__attend_buffers *b, const tqkv__split *split,
                                   tqkv__attend_args *args)
{
    tqkv__plan_key_args(a, b->keys->shape.capacity, args);
    tqkv__plan_seen(a, &args->first_newest, &args->window);
    args->slice_end = (int)(b->slice_end - a->first);
    args->first_stretch = split->first_stretch;
    args->stretch_tiles = TQKV__STRETCH_TILES;
    args->n_short = split->n_short;
    args->n_splits = split->n_splits;
    args->sections_each = split->sections_each;
    args->value_capacity = a->values.capacity;
    args->value_oldest_slot = args->kv_len ? tqkv__slot(&a->values, a->first) : 0;
    args->softcap = a->call.softcap;
    args->value_block_scale = a->values.block_scale;
    args->first_of_tree = a->call.tree ? args->kv_len - a->call.n_queries : INT_MAX;
    args->value_slots = b->values->shape.capacity;
    if (b->tail) args->tail_slots = b->tail->shape.capacity;
    args->tail_capacity = a->tail.capacity;
    args->tail_oldest_slot = b->tail && args->kv_len ? tqkv__slot(&a->tail, a->first) : 0;
    if (a->call.list) tqkv__plan_list_args(a, b->slice_end, args);
    if (!a->keys.n_pages) return;
    args->value_page_size = a->values.page_size;
    args->value_last_page = args->value_slots / args->value_page_size - 1;
    if (!tqkv__has_small_pages(a))
        tqkv__plan_division(args->value_page_size, &args->value_page_factor, &args->value_page_shift);
}

/* Of attention and index_scores. center, tail_center: whether those of the keys and of their tail are used */
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

/* Of attention: which streams have a position in the same slot. */
static void tqkv__plan_slot_constants(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                      const tqkv__attend_args *args)
{
    const bool values = args->key_capacity == args->value_capacity && args->key_oldest_slot == args->value_oldest_slot,
               tail = args->key_capacity == args->tail_capacity && args->key_oldest_slot == args->tail_oldest_slot;
    tqkv__plan_constant(d, TQKV_FC_SAME_SLOTS, a->keys.n_pages ? tqkv__same_pages(args, b) : values);
    tqkv__plan_constant(d, TQKV_FC_SHORT_STORE, args->key_capacity < TQKV__SIMD_WIDTH);
    tqkv__plan_constant(d, TQKV_FC_TAIL_ELSEWHERE, b->tail && !a->keys.n_pages && !tail);
}

/* Partial results: sums at `index`, their states behind it. */
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

/* The centre of the keys or of their tail adds the same to all scores of a query. That shows under softcap, beside sinks and
   in a slice. */
static bool tqkv__center_counts(const tqkv__attention *a, const tqkv__attend_buffers *b, const tqkv_metal_store *part)
{
    return part && part->center.buffer && (a->call.softcap > 0.0f || b->sinks.buffer || b->slice.to);
}

/* Slices of attend_merge, from index 7 on, and of attend, which does not use them. */
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

/* Bytes of the output with its gaps, or of the sums of a slice, which have none. */
static size_t tqkv__plan_out_size(const tqkv__attention *a, const tqkv__attend_buffers *b)
{
    return b->slice.to ? a->out_elements * sizeof(float) : a->out_size;
}

/* The memory of queries and sums, the largest part, holds only the columns in use: it limits the threadgroups on a
   core. */
static void tqkv__plan_attend_memory(tqkv_metal_dispatch *d, size_t key_dim, size_t value_dim, int columns)
{
    const size_t sums = tqkv__attend_args_of(d).sections_each ? TQKV__ATTEND_SUM_BYTES(value_dim) : 0;
    const size_t tail = sizeof(float) * (size_t)TQKV__QUERY_FLOATS(tqkv__planned_tail(d));
    d->memory[0] = TQKV__ATTEND_TABLE_BYTES + (tail ? TQKV__TABLE_BYTES : 0);
    d->memory[1] = ((TQKV__ATTEND_QUERY_BYTES(key_dim) + sums) / TQKV__MAX_COLUMNS(key_dim) + tail) * (size_t)columns;
    d->memory[2] = 0;
    d->memory[3] = TQKV__ATTEND_KEPT_BYTES(value_dim);
    d->memory_each[2] = TQKV__ATTEND_WEIGHT_BYTES(value_dim, 1);
    d->memory_each[3] = TQKV__ATTEND_STATE_BYTES(value_dim, 1);
}

/* Matrices come whole: 8, 16 or 32 columns. The sums take turns, and after the only stretch the queries' memory. Of rows that
   several simdgroups share, some queries and then the weights lie behind. */
static void tqkv__plan_matrix_memory(tqkv_metal_dispatch *d, size_t head_dim, int columns)
{
    const size_t matrices = TQKV__MATRICES(columns), tail = (size_t)tqkv__planned_tail(d),
                 queries = TQKV__MATRIX_QUERY_BYTES(head_dim + tail) * matrices;
    const bool is_long = tqkv__is_long((int)head_dim);
    const size_t rows = is_long ? TQKV__LONG_ROW_BYTES(head_dim)
                                : TQKV__MATRIX_QUERY_BYTES(head_dim) * (columns <= 8 ? 1 : 2),
                 sums = TQKV__MATRIX_SUM_BYTES(head_dim) + (tqkv__attend_args_of(d).sections_each ? queries : 0),
                 others = is_long ? queries + TQKV__LONG_WEIGHT_BYTES(matrices) : sums;
    d->memory[0] = TQKV__ATTEND_TABLE_BYTES;
    d->memory[1] = queries + rows > others ? queries + rows : others;
    d->memory[2] = d->memory_each[2] = 0;
    d->memory[3] = TQKV__MATRIX_KEPT_BYTES(matrices) + (tail ? TQKV__TABLE_BYTES : 0);
    d->memory_each[3] = TQKV__MATRIX_STATE_BYTES(matrices);
}

/* Threadgroups of a KV head and split. */
static size_t tqkv__row_blocks(const tqkv_metal_dispatch *d, const tqkv__attend_args *args, size_t columns)
{
    const bool list = d->kernel.constants[TQKV_FC_LIST] == 1 + true; /* then each query has threadgroups of its own */
    const size_t n_queries = (size_t)args->n_queries, rows = (list ? 1 : n_queries) * (size_t)args->group;
    return (rows + columns - 1) / columns * (list ? n_queries : 1);
}

TQKV_API void tqkv__plan_columns(tqkv_metal_dispatch *d, bool matrix, int columns)
{
    const int head_dim = d->kernel.head_dim * TQKV__DIM_UNIT, value_dim = d->kernel.value_dim * TQKV__DIM_UNIT;
    const int most = matrix ? TQKV__MOST_MATRIX_COLUMNS(head_dim) : TQKV__MAX_COLUMNS(head_dim);
    const tqkv__attend_args args = tqkv__attend_args_of(d);
    if (columns > most) columns = most;
    d->kernel.family = matrix ? TQKV_METAL_ATTEND_MATRIX : TQKV_METAL_ATTEND;
    tqkv__plan_constant(d, TQKV_FC_COLUMNS, columns);
    if (matrix)
        tqkv__plan_matrix_memory(d, (size_t)head_dim, columns);
    else
        tqkv__plan_attend_memory(d, (size_t)head_dim, (size_t)(value_dim ? value_dim : head_dim), columns);
    d->grid[1] = tqkv__row_blocks(d, &args, (size_t)columns);
}

TQKV_API void tqkv_metal_plan_lanes(tqkv_metal_dispatch *d)
{
    if (d->kernel.family != TQKV_METAL_ATTEND_MATRIX) return;
    tqkv__plan_columns(d, false, d->kernel.constants[TQKV_FC_COLUMNS] - 1);
    if (d->n_simdgroups > 4) d->n_simdgroups = 4;
}

static void tqkv__plan_attend_splits(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                     const tqkv__split *split)
{
    const bool center = tqkv__center_counts(a, b, b->keys), tail_center = tqkv__center_counts(a, b, b->tail);
    const tqkv_metal_store *tail = b->tail ? b->tail : b->keys; /* then nothing of it is bound */
    tqkv__plan_begin(d, TQKV_METAL_ATTEND, a->keys.head_dim, a->value_dim);
    tqkv__attend_args args;
    tqkv__plan_attend_args(a, b, split, &args);
    tqkv__plan_args(d, &args, sizeof args);
    tqkv__plan_key_constants(d, a, center, tail_center);
    tqkv__plan_slot_constants(d, a, b, &args);
    tqkv__plan_constant(d, TQKV_FC_LIST, a->call.list != NULL);
    tqkv__plan_bind_rows(d, "q", 1, b->q, TQKV_FC_TYPE, a->call.query_type, a->q_size, false);
    tqkv__plan_bind_store(d, "keys' codes", "keys' norms", 2, b->keys, &a->keys, false);
    tqkv__plan_bind_store(d, "values' codes", "values' norms", 4, b->values, &a->values, false);
    tqkv__plan_bind(d, "sinks", TQKV_METAL_ONLY_CHECKED, b->sinks,
                    b->sinks.buffer ? (size_t)a->call.n_heads * sizeof(float) : 0, false);
    tqkv__plan_bind_partials(d, 6, b->scratch, split, true);
    tqkv__plan_bind_center(d, "keys' center", 8, b->keys, &a->keys, center);
    tqkv__plan_bind_center(d, "values' center", TQKV_METAL_ONLY_CHECKED, b->values, &a->values, true);
    tqkv__plan_bind_pages(d, "keys' pages", 9, b->keys->pages, &a->keys, TQKV_FC_PAGES);
    tqkv__plan_bind_pages(d, "values' pages", 10, b->values->pages, &a->values, TQKV_FC_PAGES);
    tqkv__plan_bind(d, "tree", 11, b->tree, a->call.tree ? (size_t)a->call.n_queries * sizeof(uint64_t) : 0, false);
    tqkv__plan_bind(d, "arguments", TQKV__ITEMS_OF_ATTEND, b->tree, 0, false);
    tqkv__plan_bind_store(d, "tail's codes", "tail's norms", 13, tail, &a->tail, false);
    tqkv__plan_bind_center(d, "tail's center", 15, tail, &a->tail, tail_center);
    tqkv__plan_bind(d, "lists", 16, b->list_rows, tqkv__list_rows_size(a), false);
    if (a->call.list) d->barrier = b->list_rows.buffer;
    tqkv__plan_bind_rows(d, "out", TQKV_METAL_ONLY_CHECKED, b->out, TQKV_FC_TYPE, a->call.output_type,
                         tqkv__plan_out_size(a, b), true);
    tqkv__plan_bind_slices(d, a, &b->slice);
    tqkv__plan_columns(d, split->matrix, split->columns);
    d->grid[0] = (size_t)a->n_kv_heads;
    d->grid[2] = (size_t)split->n_splits;
    d->n_simdgroups = split->n_simdgroups;
}

/* attend_list for a planned attend: it has its arguments. */
static void tqkv__plan_list(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                            const tqkv_metal_dispatch *attend)
{
    const size_t n_queries = (size_t)a->call.n_queries, n_rows = n_queries * (size_t)a->call.list_heads,
                 length = (size_t)a->call.list_length;
    tqkv__plan_begin(d, TQKV_METAL_ATTEND_LIST, 0, 0);
    tqkv__plan_args(d, attend->arguments[0].bytes, attend->arguments[0].size);
    tqkv__plan_bind(d, "list", 1, b->list, n_rows * length * sizeof(int32_t), false);
    tqkv__plan_bind(d, "scratch", 2, b->list_rows, tqkv__list_rows_size(a), true);
    tqkv__plan_bind(d, "tree", 3, b->tree, a->call.tree ? n_queries * sizeof(uint64_t) : 0, false);
    tqkv__plan_bind(d, "arguments", TQKV__ITEMS_OF_LIST, b->tree, 0, false);
    tqkv__plan_constant(d, TQKV_FC_TREE, a->call.tree != NULL);
    tqkv__plan_constant(d, TQKV_FC_BATCH, false);
    d->memory[0] = TQKV__SIMD_WIDTH * sizeof(uint32_t);
    d->grid[0] = n_rows;
    d->n_simdgroups = length / 32 < 31 ? (int)length / 32 + 1 : 32;
}

/* What all calls of attend_merge have; without what is read, and the centres. */
static void tqkv__plan_merge_begin(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                   tqkv__merge_args args, bool unrotate)
{
    const bool sinks = b->sinks.buffer != NULL;
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
    tqkv__plan_bind(d, "sinks", 3, b->sinks, sinks ? (size_t)a->call.n_heads * sizeof(float) : 0, false);
    tqkv__plan_bind_rows(d, "out", 4, b->out, TQKV_FC_TYPE, b->slice.to ? TQKV_TYPE_F32 : a->call.output_type,
                         tqkv__plan_out_size(a, b), true);
    tqkv__plan_bind(d, "arguments", TQKV__ITEMS_OF_MERGE, b->tree, 0, false);
    tqkv__plan_constant(d, TQKV_FC_BATCH, false);
    tqkv__plan_bind_slices(d, a, &b->slice);
    d->memory_each[0] = TQKV__MERGE_BYTES((size_t)a->value_dim, 1);
    d->grid[0] = a->n_rows;
    d->n_simdgroups = 1;
}

/* Merges all parts of the context: splits [first positions, others, last positions], of those that there are. */
static void tqkv__plan_attend_merge(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                    const tqkv__split splits[3], const tqkv__split *all)
{
    const tqkv__split *split = &splits[1];
    const int length = split->sections_each ? 1 : TQKV__SECTION, before = split->first_stretch % length;
    const int n_results = split->sections_each > 1 ? 1 : split->n_partials, most = TQKV__MERGE_SIMDGROUPS(a->value_dim);
    const int n_sections =
        (before + n_results + length - 1) / length + (splits[0].n_partials > 0) + (splits[2].n_partials > 0);
    const bool unrotate = a->unrotate_output && !b->slice.to;
    const tqkv__merge_args args = {0, 0, 0, n_results, length, before, splits[0].n_partials, splits[2].n_partials,
                                   0, 0};
    tqkv__plan_merge_begin(d, a, b, args, unrotate);
    tqkv__plan_bind_partials(d, 1, b->scratch, all, false);
    const bool center = tqkv__plan_bind_center(d, "values' center", 5, b->values, &a->values, true);
    const bool shifted = tqkv__center_counts(a, b, b->keys) || tqkv__center_counts(a, b, b->tail);
    tqkv__plan_constant(d, TQKV_FC_CENTER, shifted && !(a->call.softcap > 0.0f));
    tqkv__plan_constant(d, TQKV_FC_VALUE_CENTER, center);
    tqkv__plan_constant(d, TQKV_FC_VALUE_ROTATED, center && a->values.rotated && !unrotate);
    d->n_simdgroups = most < n_sections ? most : n_sections;
    d->barrier = b->scratch.buffer;
}

/* Part i of the context, [borders[i], borders[i + 1]): 0 and 2 are read as halves where stores hold them so. */
static void tqkv__find_borders(const tqkv__attention *a, int64_t slice_end, int64_t borders[4])
{
    const bool first = a->exact[0][0] || a->exact[0][1], last = a->exact[1][0] || a->exact[1][1];
    borders[0] = borders[1] = a->first;
    borders[2] = borders[3] = slice_end;
    if (first && a->exact_below > a->first) borders[1] = a->exact_below < slice_end ? a->exact_below : slice_end;
    if (last && a->exact_from < slice_end) borders[2] = a->exact_from;
    if (borders[2] < borders[1]) borders[2] = borders[1];
}

/* The attention to part i alone. */
static void tqkv__take_part(const tqkv__attention *a, const tqkv__attend_buffers *b, int i, const int64_t borders[4],
                            tqkv__attention *part, tqkv__attend_buffers *buffers)
{
    const int last = i / 2;
    *part = *a;
    *buffers = *b;
    part->first = borders[i];
    buffers->slice_end = borders[i + 1];
    if (i != 1 && a->exact[last][0]) part->keys = a->ends[last][0];
    if (i != 1 && a->exact[last][0]) buffers->keys = b->ends[last][0];
    if (i != 1 && a->exact[last][1]) part->values = a->ends[last][1];
    if (i != 1 && a->exact[last][1]) buffers->values = b->ends[last][1];
}

/* Divides each part, and scratch: rows of lists, then sums, then states. Those of the first and last part lie before the others,
   whose number may be more than the merge reads. *all: of all parts */
static tqkv_result tqkv__split_parts(const tqkv__attention *a, const tqkv__attend_buffers *b, const int64_t borders[4],
                                     size_t most_sums, tqkv__split splits[TQKV__PARTS], tqkv__split *all)
{
    static const int order[] = {TQKV__FIRST_PART, TQKV__LAST_PART, TQKV__CODES_PART};
    const bool halves = borders[0] < borders[1] || borders[2] < borders[3];
    tqkv__attention part;
    tqkv__attend_buffers buffers;
    int64_t first, end;
    memset(splits, 0, TQKV__PARTS * sizeof *splits);
    memset(all, 0, sizeof *all);
    for (int i = 0; i < TQKV__PARTS; i++) {
        const int p = order[i];
        tqkv__split *own = &splits[p];
        if (borders[p] == borders[p + 1] && (p != TQKV__CODES_PART || halves)) continue;
        tqkv__take_part(a, b, p, borders, &part, &buffers);
        tqkv__tiles_seen(&part, buffers.slice_end, &first, &end);
        if (a->call.list) tqkv__listed_tiles(&part, buffers.slice_end, &first, &end);
        const tqkv_result r = tqkv__choose_split(&part, first, end, p == TQKV__CODES_PART ? most_sums : SIZE_MAX, own);
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

/* Lists and attend for each part of the context, then the merge. */
static tqkv_result tqkv__plan_attention(const tqkv__attention *a, const tqkv__attend_buffers *b, size_t most_sums,
                                        tqkv__attend_plan *plan)
{
    tqkv__split splits[TQKV__PARTS], all;
    tqkv__attention part;
    tqkv__attend_buffers behind = *b, buffers;
    int64_t borders[4];
    tqkv__find_borders(a, b->slice_end, borders);
    tqkv_result r = tqkv__check_non_causal(a);
    if (r == TQKV_OK) r = tqkv__split_parts(a, b, borders, most_sums, splits, &all);
    if (r != TQKV_OK) return r;
    behind.scratch = tqkv__buffer_after(b->scratch, all.list_at);
    plan->listed = a->call.list != NULL;
    plan->scratch_size = all.list_at + all.scratch_size;
    for (int p = 0; p < TQKV__PARTS; p++) {
        plan->has[p] = splits[p].n_partials > 0;
        if (!plan->has[p]) continue;
        splits[p].states_at += all.sums_size;
        tqkv__take_part(a, &behind, p, borders, &part, &buffers);
        buffers.list_rows = tqkv__buffer_after(b->scratch, splits[p].list_at);
        tqkv__plan_attend_splits(&plan->attends[p], &part, &buffers, &splits[p]);
        if (plan->listed) tqkv__plan_list(&plan->lists[p], &part, &buffers, &plan->attends[p]);
    }
    tqkv__plan_attend_merge(&plan->merge, a, &behind, splits, &all);
    return TQKV_OK;
}

/* The dispatches of a plan, in their order: *n of them. */
static void tqkv__order_dispatches(const tqkv__attend_plan *plan, tqkv_metal_dispatch d[TQKV__MOST_DISPATCHES], int *n)
{
    *n = 0;
    for (int p = 0; p < TQKV__PARTS; p++)
        if (plan->has[p] && plan->listed) d[(*n)++] = plan->lists[p];
    for (int p = 0; p < TQKV__PARTS; p++)
        if (plan->has[p]) d[(*n)++] = plan->attends[p];
    d[(*n)++] = plan->merge;
}

/* attend_merge of a slice of the caller: b->slice.to: adds it to another, else finishes it. */
static void tqkv__plan_slice(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                             tqkv_metal_buffer src_out, bool unrotate)
{
    const tqkv__merge_args args = {0, 0, 0, 0, 1, 0, 0, 0, 0, 0};
    tqkv__plan_merge_begin(d, a, b, args, unrotate);
    tqkv__plan_bind(d, "src_out", 1, src_out, a->out_elements * sizeof(float), false);
    tqkv__plan_bind(d, "scratch", 2, src_out, 0, false);
    tqkv__plan_bind(d, "values' center", 5, src_out, 0, false);
    tqkv__plan_constant(d, TQKV_FC_CENTER, false); /* the slices have what the centres add */
    tqkv__plan_constant(d, TQKV_FC_VALUE_CENTER, false);
    tqkv__plan_constant(d, TQKV_FC_VALUE_ROTATED, false);
}

/* An attention over buffers as one over stores. */
typedef struct tqkv__plan_call {
    tqkv_attention attention;
    tqkv_store keys, values, tail, ends[2][2];
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

/* Of the bytes that a store takes from a buffer on, whether some belong to another store. */
static bool tqkv__stores_overlap(const tqkv_metal_store *a, const tqkv__stream *s, const tqkv_metal_store *b,
                                 const tqkv__stream *t)
{
    const tqkv_metal_binding codes[] = {{"", 0, a->codes, s->codes_size, 1, true},
                                        {"", 0, b->codes, t->codes_size, 1, true}},
                             norms[] = {{"", 0, a->norms, s->norms_size, 1, true},
                                        {"", 0, b->norms, t->norms_size, 1, true}};
    return a->codes.buffer &&
           (tqkv__bindings_overlap(&codes[0], &codes[1]) || tqkv__bindings_overlap(&codes[0], &norms[1]) ||
            tqkv__bindings_overlap(&norms[0], &codes[1]) || tqkv__bindings_overlap(&norms[0], &norms[1]));
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
           a->keys.ring == a->values.ring && tqkv__same_buffer(from->keys->center, from->values->center);
}

/* Streams that share bytes must be one stream, or by their page tables two in one pool. The tail lies in the keys' slots. */
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

/* The stores of the positions that are kept as halves. Their centres are buffers, too. */
static tqkv_result tqkv__plan_end_shapes(const tqkv_metal_attention *from, tqkv__plan_call *call)
{
    const tqkv_metal_store *const ends[2][2] = {{from->first_keys, from->first_values},
                                                {from->last_keys, from->last_values}};
    tqkv_attention *to = &call->attention;
    const tqkv_store **const shapes[2][2] = {{&to->first_keys, &to->first_values}, {&to->last_keys, &to->last_values}};
    for (int i = 0; i < 4; i++) {
        const tqkv_metal_store *end = ends[i / 2][i % 2], *codes = i % 2 ? from->values : from->keys;
        tqkv_store *shape = &call->ends[i / 2][i % 2];
        *shapes[i / 2][i % 2] = end ? shape : NULL;
        if (!end || !(i / 2 ? to->exact_last : to->exact_first)) continue;
        tqkv__plan_store(end, shape);
        shape->center = codes->shape.center;
        if (!tqkv__same_buffer(end->center, codes->center))
            return TQKV__INVALID("exact_first or exact_last: a store with another centre than the codes");
        if (end->pages.buffer || shape->n_pages)
            return TQKV__REFUSE(UNSUPPORTED, "exact_first or exact_last with pages of their own: not on a GPU");
    }
    return TQKV_OK;
}

/* In place of what the processor does not know. A tree of as many queries as one has: none sees any of its positions. */
static const uint64_t tqkv__unknown_tree[64] = {0};
static const int32_t tqkv__unknown_list[1] = {0};

/* tqkv__attention_shape of `from` */
static tqkv_result tqkv__plan_shape(const tqkv_metal_attention *from, tqkv__plan_call *call, tqkv__attention *a)
{
    tqkv_attention *to = &call->attention;
    if (!from) return TQKV__INVALID("the attention is NULL");
    if (from->attention.tree && !from->tree.buffer) return TQKV__INVALID("tree: no buffer");
    if (from->attention.list && !from->list.buffer) return TQKV__INVALID("list: no buffer");
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
    if (from->list.buffer && !to->list) to->list = tqkv__unknown_list;
    to->sinks = NULL;
    memset(&to->parallel, 0, sizeof to->parallel);
    memset(&to->allocator, 0, sizeof to->allocator);
    r = tqkv__attention_shape(to, a);
    if (r == TQKV_OK) r = tqkv__plan_table(from->keys, &a->keys);
    if (r == TQKV_OK) r = tqkv__plan_table(from->values, &a->values);
    if (r == TQKV_OK) r = tqkv__check_kernels(a->keys.head_dim, a->value_dim);
    if (r == TQKV_OK) r = tqkv__check_tail(a->keys.head_dim, a->tail.head_dim);
    if (r == TQKV_OK) r = from->attention.list ? tqkv__check_list(a) : tqkv__list_shape(a);
    if (r == TQKV_OK && a->call.list) r = tqkv__check_list_rows(a);
    if (r == TQKV_OK && a->round_query) r = TQKV__REFUSE(UNSUPPORTED, TQKV__FLOATS_ON_GPU);
    if (r == TQKV_OK) r = tqkv__check_call_strides(a);
    a->matrix_group = from->matrix_group;
    if (r != TQKV_OK || !a->keys.page_size == !a->values.page_size) return r;
    return TQKV__REFUSE(UNSUPPORTED, "one of keys and values has pages: not on a GPU");
}

/* Positions take the place of slots. If a table is empty there are none, and the kernel reads neither table. */
static tqkv_result tqkv__plan_attention_positions(tqkv__attention *a)
{
    if (!a->keys.n_pages || !a->values.n_pages)
        a->keys.n_pages = a->values.n_pages = a->keys.page_size = a->values.page_size = 0;
    const tqkv_result r = tqkv__plan_positions(&a->keys);
    return r == TQKV_OK ? tqkv__plan_positions(&a->values) : r;
}

/* Takes the positions that are kept as halves; slots of positions follow. */
static tqkv_result tqkv__plan_ends(const tqkv_metal_attention *from, tqkv__attention *a, tqkv__attend_buffers *b)
{
    if (!a->call.exact_first && !a->call.exact_last) return TQKV_OK;
    a->shared = tqkv__plan_shared(from, a);
    const tqkv_result r = tqkv__take_ends(a, tqkv__stream_shape);
    if (r != TQKV_OK) return r;
    b->ends[0][0] = from->first_keys;
    b->ends[0][1] = a->shared ? from->first_keys : from->first_values;
    b->ends[1][0] = from->last_keys;
    b->ends[1][1] = a->shared ? from->last_keys : from->last_values;
    for (int last = 0; last < 2; last++) {
        if (a->keys.page_size && a->exact[last][0] != a->exact[last][1])
            return TQKV__REFUSE(UNSUPPORTED, "one of keys and values has pages: not on a GPU");
        if (a->keys.page_size && a->exact[last][0] && from->tail)
            return TQKV__REFUSE(UNSUPPORTED, "exact_first or exact_last of keys with a tail in pages: not on a GPU");
    }
    const bool last = a->exact[1][0] || a->exact[1][1], meet = last && a->exact_from < a->exact_below;
    if (!meet || (a->exact[0][0] == a->exact[1][0] && a->exact[0][1] == a->exact[1][1])) return TQKV_OK;
    return TQKV__REFUSE(UNSUPPORTED, "exact_first and exact_last meet, and are of different streams: not on a GPU");
}

/* Takes [first, first + count) if b says slice, else all resident positions, and checks the pages that the processor knows. */
static tqkv_result tqkv__plan_range(const tqkv_metal_attention *from, int64_t first, int count, tqkv__attention *a,
                                    tqkv__attend_buffers *b)
{
    const bool known = !a->call.list || from->attention.list, slice = b->slice.to;
    tqkv_result r = slice ? tqkv__check_slice_range(a, first, count) : TQKV_OK;
    if (r != TQKV_OK) return r;
    if (!slice) b->sinks = from->sinks;
    const tqkv__range range = {slice ? first : a->first, slice ? first + count : a->call.end};
    if (known) r = tqkv__check_seen(a, range);
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
    if (r == TQKV_OK) r = tqkv__plan_check_streams(from, &a);
    if (r == TQKV_OK) r = tqkv__attention_range(&call.attention, &a);
    if (r == TQKV_OK) r = tqkv__plan_ends(from, &a, b);
    if (r == TQKV_OK) r = tqkv__plan_range(from, first, count, &a, b);
    if (r == TQKV_OK) r = tqkv__plan_attention_positions(&a);
    if (r != TQKV_OK) return r;
    b->keys = from->keys;
    b->values = from->values;
    b->tail = from->tail;
    b->tree = from->tree;
    b->list = from->list;
    return tqkv__plan_attention(&a, b, most_sums, plan);
}

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

/* >>plan-rows: bindings; encode, probe, decode, rotate */

/* Checks whether there are kernels; follows tqkv__stream_shape and tqkv__attention_shape. */
static tqkv_result tqkv__check_kernels(int head_dim, int value_dim, int tail_dim)
{
    return tqkv__has_kernels(head_dim, value_dim, tail_dim) ? TQKV_OK : TQKV__REFUSE(UNSUPPORTED, TQKV__KERNELS_TEXT);
}

/* Whether attend_matrix has sums of such rows in several simdgroups, TQKV__LONG_SIMDGROUPS a threadgroup. */
static bool tqkv__is_long(int head_dim) { return head_dim == 448 || head_dim == 512; }

/* The regions of a context that attention takes in dispatches of their own: first positions that are kept as halves,
   the codes, last positions that are. */
enum { TQKV__FIRST_REGION, TQKV__CODES_REGION, TQKV__LAST_REGION, TQKV__REGIONS };

/* What an attention dispatches, of those regions that there are. */
typedef struct tqkv__attend_plan {
    bool empty; /* there are no queries: all else is unset */
    bool has[TQKV__REGIONS], listed;
    size_t scratch_size;
    tqkv_metal_dispatch lists[TQKV__REGIONS], attends[TQKV__REGIONS], merge;
} tqkv__attend_plan;

static bool tqkv__bytes_meet(tqkv_metal_buffer a, size_t a_size, tqkv_metal_buffer b, size_t b_size)
{
    if (!a_size || !b_size || a.buffer != b.buffer) return false;
    return a.offset < b.offset ? b.offset - a.offset < a_size : a.offset - b.offset < b_size;
}

/* Whether the simdgroups of a threadgroup share rows: it needs all of them. */
static bool tqkv__shares_rows(const tqkv_metal_kernel *kernel)
{
    return kernel->family == TQKV_METAL_ATTEND_MATRIX && tqkv__is_long(kernel->head_dim * TQKV__DIM_UNIT);
}

TQKV_METAL_API const tqkv_metal_binding *tqkv_metal_overlapping(const tqkv_metal_dispatch *d, int i)
{
    for (int j = 0; d && i < d->n_bindings && j < i; j++) {
        const tqkv_metal_binding *a = &d->bindings[i], *b = &d->bindings[j];
        if ((a->written || b->written) && tqkv__bytes_meet(a->at, a->size, b->at, b->size)) return b;
    }
    return NULL;
}

/* Writes the name of a kernel's function. */
static void tqkv__name_kernel(tqkv_metal_kernel *kernel)
{
    static const char *const families[] = {"tables",        "encode",       "encode_kv",   "probe",
                                           "decode",        "rotate",       "attend",      "attend_merge",
                                           "attend_matrix", "index_choice", "attend_list", "index_scores",
                                           "learn_scales"}; /* tqkv__family */
    const int dims[] = {kernel->head_dim * TQKV__DIM_UNIT, kernel->value_dim * TQKV__DIM_UNIT};
    const char *family = families[kernel->family];
    char *at = kernel->name + 5 + strlen(family);
    memset(kernel->name, 0, sizeof kernel->name);
    memcpy(kernel->name, "tqkv_", 5);
    memcpy(kernel->name + 5, family, strlen(family));
    for (int i = 0; i < 2 && dims[i]; i++) {
        int unit = 1;
        *at++ = '_';
        if (i == 0) *at++ = 'd';
        while (dims[i] / unit >= 10) unit *= 10;
        for (; unit; unit /= 10) *at++ = (char)('0' + dims[i] / unit % 10);
    }
}

/* Returns the most simdgroups that plans give a threadgroup of a kernel. */
static int tqkv__most_simdgroups(const tqkv_metal_kernel *kernel)
{
    switch (kernel->family) {
    case TQKV_METAL_TABLES:
        return 1;
    case TQKV_METAL_CALIBRATE:
    case TQKV_METAL_INDEX_CHOICE:
    case TQKV_METAL_ATTEND_LIST:
        return 1024 / TQKV__SIMD_WIDTH;
    case TQKV_METAL_ATTEND_MERGE:
        return TQKV__MERGE_SIMDGROUPS(kernel->head_dim * TQKV__DIM_UNIT);
    default:
        return tqkv__shares_rows(kernel) ? TQKV__LONG_SIMDGROUPS : 4;
    }
}

/* Gives a dispatch its kernel, for rows of its sizes. */
static void tqkv__plan_family(tqkv_metal_dispatch *d, tqkv__family family)
{
    d->kernel.family = (uint8_t)family;
    d->kernel.most_simdgroups = (uint8_t)tqkv__most_simdgroups(&d->kernel);
    tqkv__name_kernel(&d->kernel);
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_launch(const tqkv_metal_dispatch *d, size_t max_threads,
                                                  tqkv_metal_launch *out)
{
    if (!d || !out || max_threads < TQKV__SIMD_WIDTH) return TQKV__INVALID("d or out is NULL, or max_threads below 32");
    const size_t most = max_threads / TQKV__SIMD_WIDTH, planned = (size_t)d->n_simdgroups,
                 n = planned < most ? planned : most;
    if (n < planned && tqkv__shares_rows(&d->kernel))
        return TQKV__REFUSE(UNSUPPORTED, "max_threads is below the 256 of this kernel: see tqkv_metal_plan_lanes");
    out->threadgroups[0] = d->rows ? d->grid[0] / n + (d->grid[0] % n != 0) : d->grid[0];
    out->threadgroups[1] = d->grid[1];
    out->threadgroups[2] = d->grid[2];
    out->threads = n * TQKV__SIMD_WIDTH;
    for (int i = 0; i < TQKV_METAL_MEMORIES; i++) {
        const size_t size = d->memory[i] + n * d->memory_each[i];
        out->memory[i] = size ? size : 16; /* the least: a length would stay set for later dispatches */
    }
    return TQKV_OK;
}

static tqkv__attend_args tqkv__attend_args_of(const tqkv_metal_dispatch *d)
{
    tqkv__attend_args args;
    memcpy(&args, d->arguments[0].bytes, sizeof args);
    return args;
}

static void tqkv__replace_args(tqkv_metal_dispatch *d, const void *args)
{
    memcpy(d->arguments[0].bytes, args, d->arguments[0].size);
}

/* The largest structs fit a dispatch, and the buffer that is bound for arrays that a call lacks. */
typedef char tqkv__args_fit[sizeof(tqkv__attend_args) <= TQKV_METAL_ARGUMENTS ? 1 : -1];
typedef char tqkv__item_fits[sizeof(tqkv__batch_item) <= TQKV__UNUSED_BYTES ? 1 : -1];

/* Begins the plan of a call, without dispatches. False for NULL. */
static bool tqkv__open_plan(tqkv_metal_plan *plan, const char *call)
{
    if (!plan) return false;
    plan->call = call;
    plan->n = 0;
    plan->scratch_size = plan->arguments_size = 0;
    return true;
}

/* Ends a plan with the result of its call. */
static tqkv_result tqkv__close_plan(tqkv_metal_plan *plan, tqkv_result r)
{
    plan->result = r;
    if (r != TQKV_OK) plan->n = 0;
    return r;
}

/* Returns the next dispatch of a plan. */
static tqkv_metal_dispatch *tqkv__add_dispatch(tqkv_metal_plan *plan)
{
    TQKV_ASSERT(plan->n < TQKV_METAL_DISPATCHES);
    return &plan->d[plan->n++];
}

/* Adds arguments. What plans are made of is called, not inlined: a fifth of their code. */
static TQKV__NOINLINE void tqkv__plan_args(tqkv_metal_dispatch *d, const void *args, size_t size)
{
    TQKV_ASSERT(d->n_arguments < 2 && size <= TQKV_METAL_ARGUMENTS);
    tqkv_metal_arguments *to = &d->arguments[d->n_arguments];
    to->index = d->n_arguments++ ? TQKV__SECOND_ARGS : 0;
    to->size = size;
    memcpy(to->bytes, args, size);
}

static TQKV__NOINLINE void tqkv__plan_begin(tqkv_metal_dispatch *d, tqkv__family family, int head_dim, int value_dim)
{
    memset(d, 0, sizeof *d);
    d->kernel.head_dim = (uint8_t)(head_dim / TQKV__DIM_UNIT);
    d->kernel.value_dim = (uint8_t)(value_dim == head_dim ? 0 : value_dim / TQKV__DIM_UNIT);
    tqkv__plan_family(d, family);
    d->grid[1] = d->grid[2] = 1;
}

static void tqkv__plan_constant(tqkv_metal_dispatch *d, int constant, int value)
{
    d->kernel.constants[constant] = (uint8_t)(value + 1);
}

static TQKV__NOINLINE void tqkv__plan_bind(tqkv_metal_dispatch *d, const char *name, int index, tqkv_metal_buffer at,
                                           size_t size, bool written)
{
    const tqkv_metal_binding binding = {name, index, at, size, 4, written};
    TQKV_ASSERT(d->n_bindings < TQKV_METAL_BINDINGS);
    d->bindings[d->n_bindings++] = binding;
}

/* Binds what a row with NaN or infinity sets, if there is a buffer. */
static void tqkv__plan_bind_flag(tqkv_metal_dispatch *d, int index, tqkv_metal_buffer not_finite)
{
    tqkv__plan_bind(d, "not_finite", index, not_finite, not_finite.buffer ? sizeof(uint32_t) : 0, true);
}

/* Binds rows of the caller's type, which the kernel learns from the constant. */
static TQKV__NOINLINE void tqkv__plan_bind_rows(tqkv_metal_dispatch *d, const char *name, int index,
                                                tqkv_metal_buffer at, int constant, tqkv_type type, size_t bytes,
                                                bool written)
{
    tqkv__plan_bind(d, name, index, at, bytes, written);
    d->bindings[d->n_bindings - 1].alignment = tqkv__type_size(type);
    if (index != TQKV_METAL_ONLY_CHECKED) tqkv__plan_constant(d, constant, (int)type);
}

/* Binds codes and norms at index and index + 1. Kernels load 16 bytes of codes at a time. */
static TQKV__NOINLINE void tqkv__plan_bind_store(tqkv_metal_dispatch *d, const char *codes, const char *norms,
                                                 int index, const tqkv_metal_store *store, const tqkv__stream *s,
                                                 bool written)
{
    tqkv__plan_bind(d, codes, index, store->codes, s->codes_size, written);
    d->bindings[d->n_bindings - 1].alignment = 16;
    tqkv__plan_bind(d, norms, index + 1, store->norms, s->norms_size, written);
}

/* Binds the centre or the scales of a stream's channels at index, if the call uses them. Returns whether it does. */
static TQKV__NOINLINE bool tqkv__plan_bind_channels(tqkv_metal_dispatch *d, const char *name, int index,
                                                    tqkv_metal_buffer channels, const tqkv__stream *s, bool used)
{
    const size_t size = (size_t)s->n_kv_heads * (size_t)s->head_dim * sizeof(float);
    used = used && channels.buffer;
    tqkv__plan_bind(d, name, index, channels, used ? size : 0, false);
    return used;
}

/* Takes the page table of a store in buffers; its entries are known to the processor if shape.pages is set. */
static tqkv_result tqkv__plan_table(const tqkv_metal_store *store, tqkv__stream *s)
{
    if (store->pages.buffer) return tqkv__table_shape(&store->shape, s);
    return store->shape.pages ? TQKV__INVALID("pages: no buffer") : TQKV_OK;
}

/* Takes the shape of a store in buffers, without its table. */
static tqkv_result tqkv__plan_store(const tqkv_metal_store *store, tqkv_store *shape)
{
    if (!store) return TQKV__INVALID("a store is NULL");
    *shape = store->shape;
    shape->pages = NULL;
    return TQKV_OK;
}

static tqkv_result tqkv__plan_open(const tqkv_metal_store *store, tqkv__stream *s)
{
    tqkv_store shape;
    tqkv_result r = tqkv__plan_store(store, &shape);
    if (r == TQKV_OK) r = tqkv__stream_shape(&shape, s);
    return r == TQKV_OK ? tqkv__plan_table(store, s) : r;
}

/* Lets positions take the place of slots: only the kernel looks at the table. */
static tqkv_result tqkv__plan_positions(tqkv__stream *s)
{
    const int64_t room = (int64_t)s->n_pages * s->page_size;
    if (room > INT_MAX) return TQKV__REFUSE(UNSUPPORTED, "n_pages * page_size: 2^31 or more on a GPU");
    s->pages = NULL;
    if (s->page_size) s->capacity = (int)room;
    return TQKV_OK;
}

/* Binds the page table at index, if there is one, and names the constant that says so. */
static TQKV__NOINLINE void tqkv__plan_bind_pages(tqkv_metal_dispatch *d, const char *name, int index,
                                                 tqkv_metal_buffer at, const tqkv__stream *s, int constant)
{
    tqkv__plan_bind(d, name, index, at, tqkv__table_size(s), false);
    tqkv__plan_constant(d, constant, s->n_pages > 0);
}

/* Returns the buffer `bytes` further on. An offset that would wrap becomes one beyond the end of any buffer. */
static tqkv_metal_buffer tqkv__buffer_after(tqkv_metal_buffer at, size_t bytes)
{
    const size_t last = SIZE_MAX - 15;
    at.offset = at.offset > last || bytes > last - at.offset ? last : at.offset + bytes;
    return at;
}

/* Plans `each` of n_units, rows or lanes, a simdgroup, and 4 simdgroups a threadgroup, which share the codebook's cells
   (up to 3 KiB). */
static TQKV__NOINLINE void tqkv__plan_simdgroups(tqkv_metal_dispatch *d, size_t n_units, size_t each)
{
    const size_t n = n_units / each + (n_units % each != 0);
    d->rows = true;
    d->n_simdgroups = 4;
    if (n > d->grid[0]) d->grid[0] = n; /* two rings may keep different numbers of rows */
}

static tqkv_result tqkv__check_strides(tqkv_strides strides)
{
    if (strides.token <= UINT32_MAX && strides.head <= UINT32_MAX) return TQKV_OK;
    return TQKV__REFUSE(UNSUPPORTED, "strides of 2^32 values or more: not on a GPU");
}

/* Finds the bytes of the caller's rows of so many tokens, with gaps. As floats without gaps they have a size, too. */
static TQKV__NOINLINE tqkv_result tqkv__plan_extent(const tqkv__stream *s, int n_tokens, size_t *bytes)
{
    const size_t size = tqkv__type_size(s->type);
    if (!size) return TQKV__REFUSE(UNSUPPORTED, TQKV__NO_TYPE);
    if (n_tokens < 0 || !tqkv__array_size(n_tokens, s->n_kv_heads, s->head_dim, sizeof(float), bytes) ||
        !tqkv__rows_extent(s->strides, n_tokens, s->n_kv_heads, s->head_dim, size, bytes))
        return TQKV__INVALID("the number of tokens or positions is negative or too large");
    return tqkv__check_strides(s->strides);
}

/* Adds arguments for the rows of tokens from `position` on. slots: of a KV head in memory. What encodes has bound its
   flag before, as its first buffer; besides: rows that halves do not hold raise it, too. */
static tqkv_result tqkv__plan_rows(tqkv_metal_dispatch *d, const tqkv__stream *s, int slot_list, int n_tokens,
                                   int64_t position, bool besides)
{
    if (n_tokens > INT_MAX / s->n_kv_heads) return TQKV__INVALID("2^31 rows or more");
    const size_t tokens = (size_t)n_tokens, heads = (size_t)s->n_kv_heads,
                 each = (size_t)TQKV__ENCODE_ROWS(s->head_dim);
    tqkv__rows_args args;
    args.n_tokens = n_tokens;
    args.n_kv_heads = s->n_kv_heads;
    args.capacity = slot_list;
    args.first_slot = n_tokens ? tqkv__slot(s, position) : 0;
    args.block_scale = s->block_scale;
    args.page_size = s->n_pages ? s->page_size : 0;
    args.n_pages = s->n_pages ? slot_list / s->page_size : 0;
    args.token_stride = (uint32_t)s->strides.token;
    args.head_stride = (uint32_t)s->strides.head;
    args.has_flag = d->n_bindings > 0 && d->bindings[0].size > 0 ? besides ? 2 : 1 : 0;
    tqkv__plan_args(d, &args, sizeof args);
    if (d->kernel.family == TQKV_METAL_DECODE)
        tqkv__plan_simdgroups(d, tokens * heads * (size_t)TQKV__ROW_LANES(s->head_dim), TQKV__SIMD_WIDTH);
    else
        tqkv__plan_simdgroups(d, (tokens / each + (tokens % each != 0)) * heads, 1); /* each has tokens of one head */
    return TQKV_OK;
}

/* The tokens of an encode call. */
typedef struct tqkv__mapping {
    int n_tokens;
    int64_t position;
    bool besides[2]; /* each stream has halves that are kept besides codes */
} tqkv__mapping;

/* Where an encode kernel takes what belongs to a stream: names of source, codes, norms, centre, pages and scales of
   channels, and indices of the last three. */
typedef struct tqkv__encode_stream {
    const char *names[6];
    int center, pages, scale;
} tqkv__encode_stream;

/* Plans memory at `index` for the rows of each simdgroup. Metal takes no empty memory. */
static void tqkv__plan_encode_memory(tqkv_metal_dispatch *d, int index, int head_dim)
{
    const size_t rows = (size_t)TQKV__ROW_BYTES(head_dim, 1);
    d->memory[index] = 16;
    if (d->memory_each[index] < rows) d->memory_each[index] = rows;
}

/* Adds a stream to encode: arguments at index 0 or 4, then source, codes and norms; the others where e says. */
static tqkv_result tqkv__plan_stream(tqkv_metal_dispatch *d, const tqkv__encode_stream *e,
                                     const tqkv_metal_store *store, tqkv_metal_buffer src, const tqkv__mapping *mapping,
                                     tqkv__stream *s)
{
    size_t all, kept;
    const int index = d->n_arguments ? TQKV__SECOND_ARGS : 0, slot_list = s->capacity, n_tokens = mapping->n_tokens;
    tqkv_result r = tqkv__plan_extent(s, n_tokens, &all);
    if (r == TQKV_OK) r = tqkv__check_positions(s, n_tokens, mapping->position, -1);
    if (r == TQKV_OK) r = tqkv__check_written(s, n_tokens, mapping->position);
    if (r == TQKV_OK) r = tqkv__plan_positions(s);
    if (r != TQKV_OK) return r;
    const int skipped = tqkv__first_kept(s, n_tokens);
    r = tqkv__plan_extent(s, n_tokens - skipped, &kept);
    if (r == TQKV_OK)
        r = tqkv__plan_rows(d, s, slot_list, n_tokens - skipped, mapping->position + skipped,
                            mapping->besides[index > 0]);
    if (r != TQKV_OK) return r;
    tqkv__plan_constant(d, index ? TQKV_FC_VALUE_FORMAT : TQKV_FC_FORMAT, (int)s->format);
    tqkv__plan_constant(d, index ? TQKV_FC_VALUE_ROTATED : TQKV_FC_ROTATED, s->rotated);
    tqkv__plan_bind_rows(d, e->names[0], index + 1, tqkv__buffer_after(src, all - kept),
                         index ? TQKV_FC_VALUE_TYPE : TQKV_FC_TYPE, s->type, kept, false);
    tqkv__plan_bind_store(d, e->names[1], e->names[2], index + 2, store, s, true);
    tqkv__plan_constant(d, index ? TQKV_FC_VALUE_CENTER : TQKV_FC_CENTER,
                        tqkv__plan_bind_channels(d, e->names[3], e->center, store->center, s, true));
    tqkv__plan_constant(d, index ? TQKV_FC_VALUE_SCALED : TQKV_FC_SCALED,
                        tqkv__plan_bind_channels(d, e->names[5], e->scale, store->channel_scale, s, true));
    tqkv__plan_bind_pages(d, e->names[4], e->pages, store->pages, s, index ? TQKV_FC_VALUE_PAGES : TQKV_FC_PAGES);
    d->memory[0] = TQKV__CELL_BYTES;
    tqkv__plan_encode_memory(d, 1, s->head_dim);
    d->memory[2] = TQKV__TABLE_BYTES;
    return TQKV_OK;
}

typedef char tqkv__report_fits[sizeof(tqkv__table_report) == TQKV_METAL_REPORT ? 1 : -1];

TQKV_METAL_API tqkv_result tqkv_metal_plan_tables(tqkv_metal_buffer report, tqkv_metal_plan *plan)
{
    if (!tqkv__open_plan(plan, "tables")) return TQKV__INVALID(TQKV__NO_PLAN);
    for (int i = 0; i < 2; i++) {
        tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
        tqkv__plan_begin(d, TQKV_METAL_TABLES, 0, 0);
        tqkv__plan_constant(d, TQKV_FC_UNROTATE, i);
        tqkv__plan_bind(d, "report", 0, report, sizeof(tqkv__table_report), true);
        d->grid[0] = 1;
        d->n_simdgroups = 1;
    }
    return tqkv__close_plan(plan, TQKV_OK);
}

/* Encodes rows of one stream or, if there is a second store, of two. */
static tqkv_result tqkv__add_encode(const tqkv_metal_store *const stores[2], const tqkv_metal_buffer sources[2],
                                    const tqkv__mapping *mapping, tqkv_metal_buffer not_finite, tqkv_metal_plan *plan)
{
    static const tqkv__encode_stream rows[] = {
        {{"src", "codes", "norms", "center", "pages", "channel_scale"}, 5, 6, 7},
        {{"k", "keys' codes", "keys' norms", "keys' center", "keys' pages", "keys' channel_scale"}, 9, 11, 13},
        {{"v", "values' codes", "values' norms", "values' center", "values' pages", "values' channel_scale"},
         10,
         12,
         14}};
    tqkv__stream s[2];
    const int n = stores[1] ? 2 : 1;
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < n && r == TQKV_OK; i++) r = tqkv__plan_open(stores[i], &s[i]);
    if (r != TQKV_OK) return r;
    const int head_dim = s[0].head_dim, other = s[n - 1].head_dim;
    if (s[0].n_kv_heads != s[n - 1].n_kv_heads) return TQKV__INVALID("keys and values differ in n_kv_heads");
    if (other != TQKV__TAIL_DIM(head_dim)) r = tqkv__check_kernels(head_dim, other, 0);
    if (r != TQKV_OK) return r;
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_begin(d, n > 1 ? TQKV_METAL_ENCODE_KV : TQKV_METAL_ENCODE, head_dim, other);
    tqkv__plan_bind_flag(d, 4 * n, not_finite);
    d->grid[2] = (size_t)n;
    for (int i = 0; i < n && r == TQKV_OK; i++)
        r = tqkv__plan_stream(d, &rows[n - 1 + i], stores[i], sources[i], mapping, &s[i]);
    return r;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_encode(const tqkv_metal_store *keys, const tqkv_metal_store *values,
                                                  tqkv_metal_buffer k, tqkv_metal_buffer v, int n_tokens,
                                                  int64_t position, tqkv_metal_buffer not_finite, tqkv_metal_plan *plan)
{
    const tqkv__mapping mapping = {n_tokens, position, {false, false}};
    const tqkv_metal_store *const stores[2] = {keys, values};
    const tqkv_metal_buffer sources[2] = {k, v};
    if (!tqkv__open_plan(plan, "encode")) return TQKV__INVALID(TQKV__NO_PLAN);
    return tqkv__close_plan(plan, tqkv__add_encode(stores, sources, &mapping, not_finite, plan));
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_probe(const tqkv_metal_store *store, tqkv_metal_buffer src, int n_tokens,
                                                 tqkv_metal_buffer scaled, tqkv_metal_buffer not_finite,
                                                 tqkv_metal_plan *plan)
{
    tqkv__stream s;
    size_t bytes;
    if (!tqkv__open_plan(plan, "probe")) return TQKV__INVALID(TQKV__NO_PLAN);
    tqkv_result r = tqkv__stream_shape(store ? &store->shape : NULL, &s);
    if (r == TQKV_OK) r = tqkv__check_kernels(s.head_dim, s.head_dim, 0);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_begin(d, TQKV_METAL_PROBE, s.head_dim, s.head_dim);
    tqkv__plan_bind_flag(d, 3, not_finite);
    r = tqkv__plan_extent(&s, n_tokens, &bytes);
    if (r == TQKV_OK) r = tqkv__plan_rows(d, &s, s.capacity, n_tokens, 0, false);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    tqkv__plan_constant(d, TQKV_FC_FORMAT, (int)s.format);
    tqkv__plan_constant(d, TQKV_FC_ROTATED, s.rotated);
    tqkv__plan_encode_memory(d, 0, s.head_dim);
    tqkv__plan_bind_rows(d, "src", 1, src, TQKV_FC_TYPE, s.type, bytes, false);
    tqkv__plan_bind(d, "scaled", 2, scaled, (size_t)n_tokens * tqkv__center_size(&s), true);
    tqkv__plan_constant(d, TQKV_FC_CENTER, tqkv__plan_bind_channels(d, "center", 4, store->center, &s, true));
    tqkv__plan_constant(d, TQKV_FC_SCALED,
                        tqkv__plan_bind_channels(d, "channel_scale", 5, store->channel_scale, &s, true));
    return tqkv__close_plan(plan, TQKV_OK);
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_decode(const tqkv_metal_store *store, int64_t position, int n_positions,
                                                  tqkv_basis basis, tqkv_metal_buffer dst, tqkv_metal_plan *plan)
{
    tqkv__stream s;
    size_t bytes;
    if (!tqkv__open_plan(plan, "decode")) return TQKV__INVALID(TQKV__NO_PLAN);
    tqkv_result r = tqkv__plan_open(store, &s);
    if (r == TQKV_OK) r = tqkv__check_kernels(s.head_dim, s.head_dim, 0);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    const int slot_list = s.capacity;
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_begin(d, TQKV_METAL_DECODE, s.head_dim, s.head_dim);
    if (n_positions < 0 || !tqkv__basis_known(basis))
        r = TQKV__INVALID("n_positions is negative, or basis no tqkv_basis");
    if (r == TQKV_OK && n_positions > slot_list) r = TQKV__REFUSE(OUT_OF_RANGE, "n_positions is above the capacity");
    if (r == TQKV_OK) r = tqkv__check_positions(&s, n_positions, position, 0);
    if (r == TQKV_OK) r = tqkv__plan_positions(&s);
    if (r == TQKV_OK) r = tqkv__plan_extent(&s, n_positions, &bytes);
    if (r == TQKV_OK) r = tqkv__plan_rows(d, &s, slot_list, n_positions, position, false);
    if (r == TQKV_OK && !tqkv__rows_distinct(s.strides, n_positions, s.n_kv_heads, s.head_dim))
        r = TQKV__INVALID(TQKV__ROWS_SHARED);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    tqkv__plan_constant(d, TQKV_FC_FORMAT, (int)s.format);
    tqkv__plan_constant(d, TQKV_FC_UNROTATE, s.rotated && basis == TQKV_ORIGINAL);
    tqkv__plan_bind_store(d, "codes", "norms", 1, store, &s, false);
    tqkv__plan_bind_rows(d, "dst", 3, dst, TQKV_FC_TYPE, s.type, bytes, true);
    const bool center = tqkv__plan_bind_channels(d, "center", 4, store->center, &s, true),
               original = basis == TQKV_ORIGINAL;
    tqkv__plan_constant(d, TQKV_FC_CENTER, center);
    tqkv__plan_constant(d, TQKV_FC_ROTATED, s.rotated && !original);
    tqkv__plan_bind_pages(d, "pages", 5, store->pages, &s, TQKV_FC_PAGES);
    const bool scale = tqkv__plan_bind_channels(d, "channel_scale", 6, store->channel_scale, &s, original || center);
    tqkv__plan_constant(d, TQKV_FC_SCALED, scale && original);
    tqkv__plan_constant(d, TQKV_FC_CENTER_SCALED, scale && !original);
    d->memory[0] = TQKV__TABLE_BYTES;
    return tqkv__close_plan(plan, TQKV_OK);
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_rotate(tqkv_metal_buffer rows, int n_rows, int head_dim, tqkv_basis to,
                                                  tqkv_metal_plan *plan)
{
    size_t size;
    if (!tqkv__open_plan(plan, "rotate")) return TQKV__INVALID(TQKV__NO_PLAN);
    tqkv_result r = tqkv__check_kernels(head_dim, head_dim, 0);
    if (r == TQKV_OK && !tqkv__basis_known(to)) r = TQKV__INVALID("to: no tqkv_basis");
    if (r == TQKV_OK && (n_rows < 0 || !tqkv__array_size(n_rows, head_dim, 1, sizeof(float), &size)))
        r = TQKV__INVALID("n_rows is negative or too large");
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    const tqkv__rotate_args args = {n_rows};
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_begin(d, TQKV_METAL_ROTATE, head_dim, head_dim);
    tqkv__plan_constant(d, TQKV_FC_UNROTATE, to == TQKV_ORIGINAL);
    tqkv__plan_args(d, &args, sizeof args);
    tqkv__plan_bind(d, "rows", 1, rows, size, true);
    tqkv__plan_simdgroups(d, (size_t)n_rows * (size_t)TQKV__ROW_LANES(head_dim), TQKV__SIMD_WIDTH);
    return tqkv__close_plan(plan, TQKV_OK);
}

/* How a cache tells which of its rows are new; zeros: all rows count. */
typedef struct tqkv__judged_rows {
    tqkv_metal_buffer values, is_new; /* halves; room for a byte a KV head and position */
    size_t values_size, is_new_size;
    tqkv__calibrate_args args; /* from value_dim on */
} tqkv__judged_rows;

static void tqkv__plan_calibrate_args(tqkv_metal_dispatch *d, const tqkv__stream *s, int n_tokens, int n_heads,
                                      int n_queries, const tqkv__tied *tied, const tqkv__judged_rows *judged)
{
    const uint32_t dim = (uint32_t)s->head_dim;
    tqkv__calibrate_args args = judged->args;
    args.head_dim = s->head_dim;
    args.n_tokens = n_tokens;
    args.n_queries = n_queries;
    args.n_kv_heads = s->n_kv_heads;
    args.group = n_heads / s->n_kv_heads;
    args.pairs = (int32_t)tied->pairs;
    args.rotary_dim = tied->dim;
    args.token_stride = (uint32_t)s->strides.token;
    args.head_stride = (uint32_t)s->strides.head;
    args.query_token_stride = (uint32_t)n_heads * dim;
    args.query_head_stride = dim;
    tqkv__plan_args(d, &args, sizeof args);
}

/* Adds the kernel that learns. */
static tqkv_result tqkv__add_calibration(const tqkv_metal_store *shape, tqkv_metal_buffer src, int n_tokens,
                                         tqkv_metal_buffer q, int n_heads, int n_queries, tqkv_pairs pairs,
                                         const tqkv__judged_rows *judged, const tqkv_metal_buffer results[2],
                                         tqkv_metal_plan *plan)
{
    tqkv__stream s;
    tqkv__tied tied;
    size_t bytes, q_bytes;
    const tqkv_strides none = {0, 0};
    if (!shape) return TQKV__INVALID("a store is NULL");
    tqkv_result r = tqkv__stream_shape(&shape->shape, &s);
    if (r == TQKV_OK) r = tqkv__plan_extent(&s, n_tokens, &bytes);
    if (r != TQKV_OK) return r;
    if ((r = tqkv__take_pairs(pairs, shape->shape.rotary_dim, s.head_dim, &tied)) != TQKV_OK) return r;
    if (!q.buffer) n_heads = s.n_kv_heads, n_queries = 0;
    if (n_heads <= 0 || n_heads % s.n_kv_heads || n_queries < 0)
        return TQKV__INVALID("n_heads is 0 or no multiple of n_kv_heads, or n_queries negative");
    const tqkv_strides strides = tqkv__strides_of(none, n_heads, s.head_dim);
    if (!tqkv__array_size(n_queries, n_heads, s.head_dim, sizeof(float), &q_bytes))
        return TQKV__INVALID("q: too large");
    if ((r = tqkv__check_strides(strides)) != TQKV_OK) return r;
    const size_t value = tqkv__type_size(s.type), size = (size_t)s.n_kv_heads * (size_t)s.head_dim * sizeof(float);
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_begin(d, TQKV_METAL_CALIBRATE, 0, 0);
    tqkv__plan_calibrate_args(d, &s, n_tokens, n_heads, n_queries, &tied, judged);
    tqkv__plan_bind_rows(d, "src", 1, src, TQKV_FC_TYPE, s.type, bytes, false);
    tqkv__plan_bind_rows(d, "q", 2, q, TQKV_FC_VALUE_TYPE, s.type, q_bytes / sizeof(float) * value, false);
    tqkv__plan_bind(d, "center", 3, results[0], size, true);
    tqkv__plan_bind(d, "channel_scale", 4, results[1], size, true);
    tqkv__plan_bind(d, "values", 5, judged->values, judged->values_size, false);
    tqkv__plan_bind(d, "is_new", 6, judged->is_new, judged->is_new_size, true);
    d->memory[0] = 2 * (size_t)s.head_dim * sizeof(float);
    d->grid[0] = (size_t)s.n_kv_heads;
    d->n_simdgroups = (s.head_dim + TQKV__SIMD_WIDTH - 1) / TQKV__SIMD_WIDTH;
    return TQKV_OK;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_calibrate(const tqkv_metal_store *shape, tqkv_metal_buffer src, int n_tokens,
                                                     tqkv_metal_buffer q, int n_heads, int n_queries, tqkv_pairs pairs,
                                                     tqkv_metal_buffer center, tqkv_metal_buffer channel_scale,
                                                     tqkv_metal_plan *plan)
{
    const tqkv_metal_buffer results[2] = {center, channel_scale};
    tqkv__judged_rows all;
    memset(&all, 0, sizeof all);
    if (!tqkv__open_plan(plan, "calibrate")) return TQKV__INVALID(TQKV__NO_PLAN);
    return tqkv__close_plan(
        plan, tqkv__add_calibration(shape, src, n_tokens, q, n_heads, n_queries, pairs, &all, results, plan));
}

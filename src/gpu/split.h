/* >>plan-split: how the threadgroups share attention. */

/* How the threadgroups share attention. Metal does not report a GPU's number of cores (7 to 80): only the shape
   decides. docs/notes/attention-gpu.md has what was measured on an H200.

   columns       Query rows of a KV head in a threadgroup, as many as registers hold: each key and value is decoded once
                 for all of them. The rows of one query are divided evenly: 9 rows are 5 + 4, not 8 + 1.
   n_simdgroups  4, or as many as the pipeline allows. Each walks its own tiles, and together they hide the latency of
                 loads.
   stretches     512 slots up to slot 8192, 2048 beyond, so that float sums do not lose digits at any length. The bounds
                 depend on slots alone: what stands beside a query changes no bit of its result. A window sees few
                 stretches wherever it stands, so there all are short.
   strands       Threadgroups that share a stretch: where they are at most TQKV__FEW otherwise, a simdgroup's part
                 of a stretch has one of its own, whose simdgroups share its four tiles. The bits are the same.
   splits        Threadgroups along the context, each with one stretch until the stretches' sums take 32 MiB of scratch,
                 with one section of 16 stretches beyond that, or with everything if heads and rows make 256 of them
                 already. All three do the same additions in the same order. */
enum {
    TQKV__STRETCH_TILES = 16,
    TQKV__SHORT_STRETCHES = 16,
    TQKV__MOST_SUMS = 32 << 20,
    TQKV__FULL = 256,
    TQKV__FEW = 64
};

typedef struct tqkv__split {
    int columns, n_simdgroups, n_splits, strands, first_stretch, n_short, sections_each, n_partials;
    bool matrix;
    size_t n_groups;                /* threadgroups of a stretch */
    size_t sums_size, scratch_size; /* [n_partials][n_rows][head_dim]; scratch: also [1 + n_partials][n_rows][2] */
    size_t sums_at, states_at;      /* of the two, in scratch */
    size_t list_at;                 /* rows of attend_list, in their range of scratch */
} tqkv__split;

static int tqkv__stretch_of(int64_t tile, int n_short)
{
    const int64_t length = TQKV__STRETCH_TILES, n = n_short;
    return (int)TQKV__STRETCH_OF_TILE(tile, length, n);
}

/* Finds the slots of the keys before slice_end that some query sees, as tiles [*first, *end): all of a ring that
   wraps. */
static void tqkv__tiles_seen(const tqkv__attention *a, int64_t slice_end, int64_t *first, int64_t *end)
{
    const tqkv__range slice = {a->first, slice_end}, visible = tqkv__visible_to(a, 0, a->call.n_queries - 1, slice);
    const int64_t seen = visible.to - visible.from, slot = seen > 0 ? tqkv__slot(&a->keys, visible.from) : 0;
    const bool wraps = seen > a->keys.capacity - slot;
    *first = wraps ? 0 : slot / TQKV__SIMD_WIDTH;
    *end = ((wraps ? a->keys.capacity : slot + seen) + TQKV__SIMD_WIDTH - 1) / TQKV__SIMD_WIDTH;
}

/* Returns the query rows of a threadgroup that multiplies matrices: 64 registers of sums. The benchmark's GPU, with 255
   registers a thread, takes 32 up to D=128. */
static int tqkv__matrix_rows(int head_dim) { return head_dim <= 64 ? 32 : head_dim <= 128 ? 16 : 8; }

/* Returns the columns of a threadgroup. A number of columns has a pipeline of its own, and Metal takes up to a second
   for one. One query has always the same rows: they are its columns. For several they are a power of two, so that a
   server, whose calls differ in their numbers of queries, does not wait for Metal's compiler while it serves. */
static int tqkv__choose_columns(int64_t rows, int n_queries)
{
    int columns = 1;
    if (n_queries == 1) return (int)rows;
    while (columns < rows) columns *= 2;
    return columns;
}

/* Returns how many stretches may be divided into strands: so many as are few threadgroups, in their part of a batch. */
static size_t tqkv__most_stranded(const tqkv__split *split, int head_dim, int64_t end, size_t most_sums)
{
    const bool has_strands = !split->matrix || (head_dim <= 256 && split->columns <= TQKV__MOST_STRAND_COLUMNS);
    if (!has_strands || end <= TQKV__STRANDS || most_sums == SIZE_MAX || !split->n_groups) return 0;
    return most_sums / (TQKV__MOST_SUMS / TQKV__FEW) / split->n_groups;
}

/* Whether stretches are divided into strands: where all are short and of one section. */
static bool tqkv__choose_strands(const tqkv__split *split, int head_dim, int64_t end, size_t most_sums)
{
    const int last = split->first_stretch + split->n_splits - 1;
    const bool short_ones = last < split->n_short && last / TQKV__SECTION == split->first_stretch / TQKV__SECTION;
    return short_ones && !split->sections_each &&
           (size_t)split->n_splits <= tqkv__most_stranded(split, head_dim, end, most_sums);
}

/* Divides query rows and the tiles [first, end) of the keys. A query must have the same bits alone and in company, so
   the number of queries does not decide whether matrices are multiplied. By counted operations narrow groups lose up to
   half of their speed on Apple's GPUs: hence 8. most_sums: bytes of the stretches' sums; SIZE_MAX: each stretch has its
   own, and all are short */
static tqkv_result tqkv__choose_split(const tqkv__attention *a, int64_t first, int64_t end, size_t most_sums,
                                      tqkv__split *split)
{
    const int head_dim = a->keys.head_dim, least = a->matrix_group ? a->matrix_group : 8;
    split->matrix = a->group >= least && head_dim == a->value_dim &&
                    (head_dim == 64 || head_dim == 128 || head_dim == 256 || tqkv__is_long(head_dim));
    const int64_t each =
        a->call.list.rows ? a->group : (int64_t)a->call.n_queries * a->group; /* rows that share tiles */
    const int64_t most = split->matrix ? tqkv__matrix_rows(head_dim) : TQKV__MAX_COLUMNS(head_dim);
    const int64_t shares = (each + most - 1) / most, section = TQKV__SECTION;
    const int64_t groups = a->call.list.rows ? shares * a->call.n_queries : shares;
    const size_t row = ((size_t)a->value_dim + 2) * sizeof(float);
    split->n_short = a->call.window || most_sums == SIZE_MAX ? INT_MAX : TQKV__SHORT_STRETCHES;
    split->first_stretch = tqkv__stretch_of(first, split->n_short);
    const int last = tqkv__stretch_of(end > first ? end - 1 : first, split->n_short);
    const int n_stretches = last - split->first_stretch + 1;
    const int n_sections = (int)(last / section - split->first_stretch / section) + 1;
    const bool full = groups * a->n_kv_heads >= TQKV__FULL && most_sums != SIZE_MAX;
    const bool stretches = !full && a->n_rows <= most_sums / row / (size_t)n_stretches;
    split->n_splits = full ? 1 : stretches ? n_stretches : n_sections;
    split->sections_each = full ? n_sections : stretches ? 0 : 1;
    split->n_groups = (size_t)(groups * a->n_kv_heads);
    split->n_partials = full && n_sections > 1 ? 2 : split->n_splits;
    split->columns = tqkv__choose_columns((each + shares - 1) / shares, a->call.list.rows ? 1 : a->call.n_queries);
    split->strands = tqkv__choose_strands(split, head_dim, end, most_sums) ? TQKV__STRANDS : 1;
    split->n_splits *= split->strands;
    split->n_partials *= split->strands;
    const bool shared = split->matrix && tqkv__is_long(head_dim); /* rows by all simdgroups of a threadgroup */
    split->n_simdgroups = shared ? TQKV__LONG_SIMDGROUPS : end > 4 ? 4 : end > 1 ? (int)end : 1;
    const size_t n = (size_t)split->n_partials;
    if (a->n_rows > SIZE_MAX / 8 / row / (n + 1)) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
    split->sums_size = a->out_elements * sizeof(float) * n;
    split->scratch_size = a->n_rows * (row * n + 2 * sizeof(float));
    split->sums_at = 0;
    split->states_at = split->sums_size;
    return TQKV_OK;
}

/* Returns the number of positions from the oldest one of a region of the context on. Only the first ones of a ring,
   which end long before the queries' own, have more behind them than an int counts. */
static int tqkv__positions_behind(const tqkv__attention *a)
{
    const int64_t n = a->call.end - a->first;
    return n < INT_MAX ? (int)n : 1 << 30;
}

/* Finds what a query sees, counted from the oldest resident position: the positions up to first_newest and its number,
   and of those the last `window`, or all. Without causality it looks as far ahead as back. */
static void tqkv__plan_seen(const tqkv__attention *a, int32_t *first_newest, int32_t *window)
{
    const int kv_len = tqkv__positions_behind(a), n = a->call.n_queries, own = a->call.window;
    *first_newest = kv_len - n;
    *window = own < kv_len ? own : 0;
    if (!a->call.non_causal) return;
    const bool all = !own || own >= kv_len + n;
    *first_newest = all ? kv_len - 1 : kv_len - n + own - 1;
    *window = all ? 0 : 2 * own - 1;
}

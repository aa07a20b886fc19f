/* >>plan-list: which tiles lists of blocks name. */

static tqkv_result tqkv__check_list_rows(const tqkv__attention *a)
{
    const tqkv_attention *c = &a->call;
    size_t size;
    if (c->list.length <= INT_MAX - TQKV__LIST_HEADER && c->n_queries <= INT_MAX / c->list.heads &&
        tqkv__array_size(c->n_queries, c->list.heads, c->list.length + TQKV__LIST_HEADER, 8 * sizeof(int32_t), &size))
        return TQKV_OK;
    return TQKV__INVALID("list: too large for a GPU");
}

static size_t tqkv__list_rows_size(const tqkv__attention *a)
{
    const size_t row = ((size_t)a->call.list.length + TQKV__LIST_HEADER) * sizeof(int32_t);
    return a->call.list.rows ? ((size_t)a->call.n_queries * (size_t)a->call.list.heads * row + 15) / 16 * 16 : 0;
}

/* Returns the positions of its block before the oldest resident one. */
static int tqkv__list_inside(const tqkv__attention *a) { return (int)(a->first % a->call.list.block); }

/* Whether positions up to slice_end have ascending slots, and enough before them, so that ranks can take slots. */
static bool tqkv__list_in_order(const tqkv__attention *a, int64_t slice_end)
{
    const int64_t slot = slice_end > a->first ? tqkv__slot(&a->keys, a->first) : 0;
    if (a->newest_halves) return false;
    return slot >= tqkv__list_inside(a) && slot + (slice_end - a->first) <= a->keys.capacity;
}

/* Returns the slot of the first position of the block of the oldest resident one. Of newest halves, whose ring is short
   and whose oldest position depends on all queries of the call: its slot in a stretch, so that a query's ranks are
   divided as if it were alone. */
static int64_t tqkv__list_base(const tqkv__attention *a, int64_t slice_end)
{
    const int64_t length = TQKV__STRETCH_TILES * TQKV__SIMD_WIDTH;
    if (a->newest_halves) return (a->first - tqkv__list_inside(a)) % length;
    if (!tqkv__list_in_order(a, slice_end) || slice_end == a->first) return 0;
    return tqkv__slot(&a->keys, a->first) - tqkv__list_inside(a);
}

/* Returns the first position, counted from the oldest resident one, of the block where the window of a query begins, or
   its newest halves. */
static int64_t tqkv__window_block(const tqkv__attention *a, int query)
{
    int32_t newest, window;
    tqkv__plan_seen(a, &newest, &window);
    const int64_t end = (int64_t)newest + query + 1, own = tqkv__exact_at(a, query) - a->first;
    int64_t from = window && end > window ? end - window : 0;
    if (a->newest_halves && own > from) from = own;
    return (from + tqkv__list_inside(a)) / a->call.list.block * a->call.list.block;
}

/* Finds the tiles of ranks: from that of the first query's on, and before *end; with ascending slots not beyond the
   *end that there was. */
static void tqkv__listed_tiles(const tqkv__attention *a, int64_t slice_end, int64_t *first, int64_t *end)
{
    const tqkv_attention *c = &a->call;
    const int64_t size = c->list.block, width = TQKV__SIMD_WIDTH, base = tqkv__list_base(a, slice_end);
    const int64_t most = c->list.newest + (c->tree ? 64 : 0),
                  newest = c->list.newest ? (most + 2 * size - 2) / size : 0;
    const int64_t all = (tqkv__list_inside(a) + slice_end - a->first + size - 1) / size * size,
                  listed = tqkv__window_block(a, c->n_queries - 1) + (c->list.length + newest) * size;
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

/* Plans a division by the tiles of a page, d: a GPU takes tens of instructions for one. With 2^shift < d <= 2^(shift+1)
   the factor 2^(32+shift) / d, rounded up, is at most d / 2^(32+shift) of itself too large: that is exact for tiles
   below 2^26. */
static void tqkv__plan_division(int page_size, uint32_t *factor, int32_t *shift)
{
    const int tiles = page_size / TQKV__SIMD_WIDTH;
    *shift = 0;
    while (((int64_t)2 << *shift) < tiles) ++*shift;
    *factor = (uint32_t)((((uint64_t)1 << (32 + *shift)) + (uint64_t)tiles - 1) / (uint64_t)tiles);
}

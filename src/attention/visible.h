/* >>visible: which positions a query sees: windows, trees, lists */

static tqkv__range tqkv__visible(const tqkv__attention *a, int query, tqkv__range range)
{
    const int64_t position = a->call.end - a->call.n_queries + query;
    const int64_t ahead = !a->call.non_causal ? 1 : a->call.window ? a->call.window : INT64_MAX;
    const int64_t oldest = a->call.window ? position - a->call.window + 1 : range.from, end = range.to;
    if (end - position > ahead) range.to = position + ahead;
    if (oldest > range.from) range.from = oldest;
    if (range.from > end) range.from = end;
    if (range.to < range.from) range.to = range.from;
    return range;
}

static tqkv__range tqkv__visible_to(const tqkv__attention *a, int first, int last, tqkv__range range)
{
    const tqkv__range seen = {tqkv__visible(a, first, range).from, tqkv__visible(a, last, range).to};
    return seen;
}

static bool tqkv__tree_has(const tqkv__attention *a, int j)
{
    for (int i = j; i < a->call.n_queries; i++)
        if (a->call.tree[i] >> j & 1 && (!a->call.window || i - j < a->call.window)) return true;
    return false;
}

/* What a query sees of a context by its list: the blocks entries[0 .. n_before), then all blocks from `recent` on. The
   positions of these blocks, visible or not, have the ranks base, base + 1 ..., as positions without a list. The first
   visible block has its positions as ranks: a list of all blocks changes no bit. */
typedef struct tqkv__list {
    const int32_t *entries; /* from the first visible block on */
    int shift;              /* a block is 1 << shift positions */
    int64_t n_before, recent;
    int64_t recent_from; /* positions of block `recent` before this one are not seen; 0: all are */
    int64_t base;
    tqkv__range seen; /* ranks */
    /* Of the positions that are added apart those in the blocks row[0 .. n_row), and those from kept_from on.
       They have no ranks. */
    const int32_t *row;
    int64_t n_row, kept_from;
} tqkv__list;

/* Returns the number of the first of n ascending entries that is not below `block`. */
static int64_t tqkv__entry_at(const int32_t *entries, int64_t n, int64_t block)
{
    int64_t low = 0;
    while (low < n) {
        const int64_t middle = low + (n - low) / 2;
        if (entries[middle] < block)
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

static int64_t tqkv__rank_of(const tqkv__list *l, int64_t position)
{
    const int64_t block = position >> l->shift, inside = position & (((int64_t)1 << l->shift) - 1);
    if (block >= l->recent) return l->base + ((l->n_before + block - l->recent) << l->shift) + inside;
    const int64_t at = tqkv__entry_at(l->entries, l->n_before, block);
    return l->base + (at << l->shift) + (at < l->n_before && l->entries[at] == block ? inside : 0);
}

/* Returns the position of a rank; without a list it is the rank. */
static int64_t tqkv__position_of(const tqkv__list *l, int64_t rank)
{
    if (!l) return rank;
    const int64_t at = (rank - l->base) >> l->shift;
    const int64_t block = at < l->n_before ? l->entries[at] : l->recent + at - l->n_before;
    return (block << l->shift) + (rank & (((int64_t)1 << l->shift) - 1));
}

static bool tqkv__tree_hides(const tqkv__attention *a, int query, int64_t position)
{
    const int64_t j = position - (a->call.end - a->call.n_queries);
    return a->call.tree && j >= 0 && !(a->call.tree[query] >> j & 1);
}

/* Returns where the newest `left` positions of a range begin that a query sees; takes their number from `left`. */
static int64_t tqkv__newest_from(const tqkv__attention *a, int query, tqkv__range range, int *left)
{
    while (a->call.tree && *left > 0 && range.to > range.from && range.to > a->call.end - a->call.n_queries)
        *left -= !tqkv__tree_hides(a, query, --range.to);
    const int n = range.to - range.from < *left ? (int)(range.to - range.from) : *left;
    *left -= n;
    return range.to - n;
}

static tqkv__list tqkv__open_list(const tqkv__attention *a, int query, int kv_head, tqkv__range range)
{
    tqkv__list l;
    const tqkv__range resident = {a->first > a->kept ? a->first : a->kept, a->call.end},
                      all = tqkv__visible(a, query, resident), kept = {0, a->kept};
    int newest = a->call.list.newest;
    l.entries = l.row = tqkv__list_row(a, query, kv_head);
    l.shift = tqkv__list_shift(a->call.list.block);
    int64_t n = 0;
    while (n < a->call.list.length && l.row[n] >= 0) n++;
    l.n_row = n;
    const int64_t gone = tqkv__entry_at(l.entries, n, all.from >> l.shift);
    l.entries += gone;
    n -= gone;
    l.base = all.from >> l.shift << l.shift;
    const int64_t newest_from = tqkv__newest_from(a, query, all, &newest), inside = ((int64_t)1 << l.shift) - 1;
    l.kept_from = tqkv__newest_from(a, query, tqkv__visible(a, query, kept), &newest);
    /* Without newest positions `recent` is the first block behind all that the query sees. */
    l.recent = newest_from < all.to ? newest_from >> l.shift : (all.to >> l.shift) + ((all.to & inside) > 0);
    l.n_before = tqkv__entry_at(l.entries, n, l.recent);
    const bool listed = l.n_before < n && l.entries[l.n_before] == l.recent; /* then all of it is seen */
    l.recent_from = newest_from < all.to && !listed ? newest_from : 0;
    range = tqkv__visible(a, query, range);
    l.seen.from = tqkv__rank_of(&l, range.from);
    l.seen.to = tqkv__rank_of(&l, range.to);
    return l;
}

/* Returns as bits those of the ranks [rank, rank + n), n <= 64, whose positions a query does not see. */
static uint64_t tqkv__hidden_ranks(const tqkv__attention *a, int query, const tqkv__list *l, int64_t rank, int n)
{
    uint64_t hidden = 0;
    if (!l) return 0; /* see tqkv__find_spans */
    const int64_t last = tqkv__position_of(l, rank + n - 1);
    const bool tree = a->call.tree && last >= a->call.end - a->call.n_queries;
    if (!tree && (l->recent_from == 0 || rank + n <= l->base + (l->n_before << l->shift))) return 0;
    for (int j = 0; j < n; j++) {
        const int64_t position = tqkv__position_of(l, rank + j);
        const bool before = position < l->recent_from && position >> l->shift >= l->recent;
        if (before || tqkv__tree_hides(a, query, position)) hidden |= (uint64_t)1 << j;
    }
    return hidden;
}

static tqkv__range tqkv__listed_to(const tqkv__attention *a, tqkv__range range)
{
    tqkv__range all = {INT64_MAX, 0};
    for (int i = 0; i < a->call.n_queries; i++)
        for (int h = 0; h < a->call.list.heads; h++) {
            const tqkv__range seen = tqkv__open_list(a, i, h, range).seen;
            if (seen.from < all.from) all.from = seen.from;
            if (seen.to > all.to) all.to = seen.to;
        }
    if (all.from > all.to) all.from = all.to;
    return all;
}

static tqkv_result tqkv__check_listed(const tqkv__attention *a, int i, tqkv__range range, int query,
                                      const tqkv__list *l)
{
    const tqkv__stream *s = tqkv__stream_read(a, i);
    tqkv_result r = TQKV_OK;
    if (!s || !s->pages) return r;
    range = tqkv__positions_read(a, i, range, query);
    for (int64_t rank = l->seen.from; r == TQKV_OK && rank < l->seen.to; rank++) {
        const int64_t position = tqkv__position_of(l, rank);
        if (position < range.from || position >= range.to || tqkv__hidden_ranks(a, query, l, rank, 1)) continue;
        r = tqkv__check_pages(s, position, position + 1, 0);
        range.from = (position / s->page_size + 1) * s->page_size; /* its page has been checked */
    }
    return r;
}

static tqkv_result tqkv__check_lists_seen(const tqkv__attention *a, tqkv__range range)
{
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < a->call.n_queries; i++)
        for (int h = 0; r == TQKV_OK && h < a->call.list.heads; h++) {
            const tqkv__list l = tqkv__open_list(a, i, h, range);
            for (int j = 0; r == TQKV_OK && j < TQKV__STREAMS; j++) r = tqkv__check_listed(a, j, range, i, &l);
        }
    return r;
}

static tqkv_result tqkv__check_entries(const tqkv__attention *a, int64_t first, int64_t end)
{
    tqkv_result r = TQKV_OK;
    for (int i = 0; r == TQKV_OK && i < TQKV__STREAMS; i++) {
        const tqkv__range all = {first, end}, range = tqkv__positions_read(a, i, all, 0);
        if (tqkv__stream_read(a, i)) r = tqkv__check_pages(tqkv__stream_read(a, i), range.from, range.to, 0);
    }
    return r;
}

static tqkv_result tqkv__check_seen(const tqkv__attention *a, tqkv__range range)
{
    const int64_t first = a->call.end - a->call.n_queries; /* of the tree */
    const tqkv__range all_kept = {0, a->kept}, kept = tqkv__visible_to(a, 0, a->call.n_queries - 1, all_kept);
    tqkv_result r = TQKV_OK;
    for (int i = TQKV__FIRST_KEYS; r == TQKV_OK && a->kept && i <= TQKV__FIRST_TAIL; i++)
        if (a->reads[i]) r = tqkv__check_pages(TQKV__STREAM_AT(a, i), kept.from, kept.to, 0);
    if (r == TQKV_OK && a->call.list.rows) r = tqkv__check_lists_seen(a, range);
    if (r != TQKV_OK || a->call.list.rows) return r;
    const tqkv__range seen = tqkv__visible_to(a, 0, a->call.n_queries - 1, range);
    const int64_t base = a->call.tree && first < seen.to ? first : seen.to;
    r = tqkv__check_entries(a, seen.from, base);
    for (int64_t at = base < seen.from ? seen.from : base; r == TQKV_OK && at < seen.to; at++)
        if (tqkv__tree_has(a, (int)(at - first))) r = tqkv__check_entries(a, at, at + 1);
    return r;
}

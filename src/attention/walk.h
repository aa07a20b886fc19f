/* >>walk: an item from tile to tile */

/* An item at work: its queries, what centres add to its scores, and its sums. A tile's values are added after the next
   tile's scores: these steps are independent, so the processor overlaps them. */
typedef struct tqkv__work {
    const tqkv__attention *a;
    const tqkv__item *item;
    const float *q, *offsets;
    int digits;        /* of the queries: see tqkv__arrange_queries */
    tqkv__tile *tiles; /* [2] */
    tqkv__tile *before;
    tqkv__sums piece, sums;
    const tqkv__list *list; /* or NULL: ranks are positions */
    tqkv__range kept;
    int first_query, last_query;      /* those of the first and of the last row */
    tqkv__range passes[TQKV__PASSES]; /* of ranks, in a stretch */
    tqkv__range common[TQKV__PASSES]; /* what all rows see of these, without a list */
    const tqkv__attention *gathered;  /* streams in scratch, for rows that do not lie together */
    tqkv__ranks ranks[3];             /* likewise: of the tile before, of this one and of the next */
} tqkv__work;

static tqkv__range tqkv__common_range(const tqkv__work *w, tqkv__range range)
{
    const int64_t tree = w->a->call.end - w->a->call.n_queries; /* where it begins */
    tqkv__range all = {tqkv__visible(w->a, w->last_query, range).from, tqkv__visible(w->a, w->first_query, range).to};
    if (w->a->call.tree && all.to > tree) all.to = tree;
    return all;
}

/* Divides a range into what is older than `to`, and what is read as newest halves. */
static void tqkv__divide_passes(tqkv__range *passes, tqkv__range range, int64_t to, int64_t from)
{
    passes[TQKV__OLDER] = passes[TQKV__NEWEST] = range;
    if (range.to > to) passes[TQKV__OLDER].to = to;
    if (range.from < from) passes[TQKV__NEWEST].from = from;
}

/* Finds the passes through a range of positions or ranks or, for `kept`, through those that are added apart, and what
   all rows see of them. */
static void tqkv__find_passes(tqkv__work *w, tqkv__range range, bool kept)
{
    const tqkv__range none = {0, 0}, before = w->kept;
    for (int pass = 0; pass < TQKV__PASSES; pass++) w->passes[pass] = w->common[pass] = none;
    if (kept) {
        w->passes[TQKV__GONE] = tqkv__visible_to(w->a, w->first_query, w->last_query, before);
        if (!w->list) w->common[TQKV__GONE] = tqkv__common_range(w, before);
        return;
    }
    int64_t low = tqkv__exact_at(w->a, w->first_query), high = tqkv__exact_at(w->a, w->last_query);
    tqkv__range seen = w->list ? w->list->seen : tqkv__visible_to(w->a, w->first_query, w->last_query, range);
    if (w->list) {
        low = tqkv__rank_of(w->list, low);
        high = tqkv__rank_of(w->list, high);
        if (seen.from < range.from) seen.from = range.from;
        if (seen.to > range.to) seen.to = range.to;
    }
    tqkv__divide_passes(w->passes, seen, high, low);
    if (!w->list) tqkv__divide_passes(w->common, tqkv__common_range(w, range), low, high);
}

static tqkv__range tqkv__range_in_pass(const tqkv__work *w, int pass, int query, tqkv__range range)
{
    const int64_t exact = tqkv__exact_at(w->a, query);
    if (pass == TQKV__GONE) return w->kept;
    if (pass == TQKV__OLDER && range.to > exact) range.to = exact;
    if (pass == TQKV__NEWEST && range.from < exact) range.from = exact;
    return range;
}

/* Hides from a span of a tile what its query's list does not name of the positions that are no longer resident. */
static void tqkv__hide_kept(const tqkv__list *l, const tqkv__tile *tile, tqkv__span *span)
{
    bool seen = false;
    for (int j = span->from; j < span->to; j++) {
        const int64_t position = tile->position + (j - tile->begin), block = position >> l->shift;
        const int64_t at = tqkv__entry_at(l->row, l->n_row, block);
        if (position < l->kept_from && (at == l->n_row || l->row[at] != block)) span->hidden |= (uint64_t)1 << j;
        seen = seen || !(span->hidden >> j & 1);
    }
    if (!seen) span->to = span->from;
}

/* Finds what each row sees of a tile; false: none sees any of it. */
static bool tqkv__find_spans(const tqkv__work *w, tqkv__range range, tqkv__tile *tile)
{
    const int pass = tile->region.number / 2, group = w->a->group;
    const tqkv__range *common = &w->common[pass];
    const tqkv__item *item = w->item;
    const bool listed = w->list && pass != TQKV__GONE;
    tqkv__span span = {tile->begin, tile->begin + tile->n, listed ? tile->ranks->hidden << tile->begin : 0};
    bool seen = false;
    tile->whole = !span.hidden;
    if (listed || (tile->position >= common->from && tile->position + tile->n <= common->to)) {
        for (int row = 0; row < item->n_rows; row++) tile->spans[row] = span;
        return true;
    }
    for (int row = 0; row < item->n_rows;) {
        const int query = (item->first_row + row) / group, next = (query + 1) * group - item->first_row;
        span = tqkv__span_of(w->a, query, tile, tqkv__range_in_pass(w, pass, query, range));
        if (w->list) tqkv__hide_kept(w->list, tile, &span);
        for (; row < next && row < item->n_rows; row++) tile->spans[row] = span;
        seen = seen || span.to > span.from;
        tile->whole = tile->whole && span.to - span.from == tile->n && !span.hidden;
    }
    return seen;
}

/* Copies a row. Rows are short: a call of memcpy for each would take longer than the copy. */
static inline void tqkv__copy_row(uint8_t *to, const uint8_t *from, size_t size)
{
    for (; size >= 64; size -= 64, to += 64, from += 64) memcpy(to, from, 64);
    for (; size >= 16; size -= 16, to += 16, from += 16) memcpy(to, from, 16);
    if (size) memcpy(to, from, size);
}

typedef struct tqkv__source {
    const uint8_t *codes;
    const float *of_rows;
    size_t size, norms; /* bytes and floats a row */
} tqkv__source;

static tqkv__source tqkv__source_of(const tqkv__stream *s, int kv_head)
{
    const tqkv__source source = {tqkv__codes_at(s, kv_head, 0), tqkv__norms_at(s, kv_head, 0), s->row_bytes,
                                 (size_t)s->norms_per_row};
    return source;
}

/* Prefetches a row to the L1 cache, because requests to the L2 take longer from memory. The last line of a row that is
   not aligned to lines is left out: it costs more than it brings. */
static TQKV__INLINE void tqkv__ask_row(const tqkv__source *s, int32_t slot)
{
    const uint8_t *row = s->codes + (size_t)slot * s->size;
    tqkv__prefetch(TQKV__L1, row, 1); /* by the line, which takes less time than a loop over a size */
    for (size_t i = 64; i < s->size; i += 64) tqkv__prefetch(TQKV__L1, row + i, 1);
    if (s->norms) tqkv__prefetch(TQKV__L1, (const uint8_t *)(s->of_rows + (size_t)slot * s->norms), 1);
}

/* Copies the rows of a tile and their norms from one of its streams to slots of another one, from `slot` on; what is
   hidden becomes zeros, because it may be NaN. Prefetches the next tile's rows, or NULL: one a row, since a burst would
   wait. */
static void tqkv__gather(int stream, int kv_head, const tqkv__ranks *ranks, const tqkv__ranks *next,
                         const tqkv__stream *to, int slot)
{
    const tqkv__source s = tqkv__source_of(ranks->region.streams[stream], kv_head);
    const int32_t *slot_list = ranks->slot_lists[stream], *asked = next ? next->slot_lists[stream] : NULL;
    const int n_next = next ? next->n : 0;
    uint8_t *row = tqkv__codes_at(to, 0, slot);
    float *norm = tqkv__norms_at(to, 0, slot);
    for (int j = 0; j < ranks->n; j++, row += s.size) {
        const size_t at = slot_list[j] < 0 ? 0 : (size_t)slot_list[j];
        if (j < n_next && asked[j] >= 0) tqkv__ask_row(&s, asked[j]);
        if (slot_list[j] < 0)
            memset(row, 0, s.size);
        else
            tqkv__copy_row(row, s.codes + at * s.size, s.size);
        for (size_t i = 0; i < s.norms; i++) *norm++ = slot_list[j] < 0 ? 0.0f : s.of_rows[at * s.norms + i];
    }
    for (int j = ranks->n; j < n_next; j++)
        if (asked[j] >= 0) tqkv__ask_row(&s, asked[j]);
}

/* Prefetches the rows of a tile: those of the values, or of the keys and their tail. */
static void tqkv__ask(int kv_head, const tqkv__ranks *ranks, bool values)
{
    for (int i = 0; i < TQKV__CACHE_STREAMS && ranks->n; i++) {
        if ((i == TQKV__VALUES) != values || !ranks->region.streams[i]) continue;
        const tqkv__source source = tqkv__source_of(ranks->region.streams[i], kv_head);
        for (int j = 0; j < ranks->n; j++)
            if (ranks->slot_lists[i][j] >= 0) tqkv__ask_row(&source, ranks->slot_lists[i][j]);
    }
}

/* Whether the rows of a tile are gathered while the next tile's are prefetched. */
static bool tqkv__asks_meanwhile(const tqkv__ranks *ranks, const tqkv__ranks *next)
{
    return next->n && !ranks->together && !next->together && ranks->region.number == next->region.number;
}

static tqkv__tile *tqkv__next_tile(const tqkv__work *w, int64_t position, int n)
{
    tqkv__tile *tile = &w->tiles[w->before == &w->tiles[0]];
    tile->position = position;
    tile->n = n;
    tile->begin = (int)(position % TQKV__TILE);
    tile->streams = w->a;
    tile->kv_head = w->item->kv_head;
    tile->ranks = NULL;
    return tile;
}

/* Adds the values of the tile before. next: where those of the tile in progress lie, to prefetch them; or NULL */
static void tqkv__add_before(tqkv__work *w, const tqkv__ranks *next)
{
    tqkv__tile *tile = w->before;
    const tqkv__ranks *ranks = tile ? tile->ranks : NULL;
    const int kv_head = w->item->kv_head;
    const bool asks = next && ranks && tqkv__asks_meanwhile(ranks, next);
    if (next && !asks && !w->a->shared) tqkv__ask(kv_head, next, true);
    if (ranks && !ranks->together && !w->a->shared)
        tqkv__gather(TQKV__VALUES, kv_head, ranks, asks ? next : NULL, tile->region.streams[TQKV__VALUES],
                     tile->segments[TQKV__VALUES].slot);
    if (tile) tqkv__add_values(tile, w->item->n_rows, w->piece.out);
}

static void tqkv__attend_tile(tqkv__work *w, tqkv__tile *tile)
{
    const int n_rows = w->item->n_rows;
    const tqkv__tile *before = w->before;
    tqkv__score_tile(tile, w->q, w->digits, n_rows);
    tqkv__add_before(w, tile->ranks);
    if (before && (before->region.number != tile->region.number ||
                   before->position / TQKV__PIECE != tile->position / TQKV__PIECE))
        w->a->kernels->end_piece(n_rows, w->a->value_dim, &w->piece, &w->sums);
    w->a->kernels->softmax_tile(w->a, tile->spans, w->offsets, n_rows, tile->scores, w->piece.max, w->piece.sum,
                                w->piece.out);
    w->before = tile;
}

static void tqkv__touch_streams(const tqkv__tile *tile)
{
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        if (!tile->region.streams[i] || (i == TQKV__VALUES && tile->streams->shared)) continue;
        tqkv__touch_next(tile->region.streams[i], tile->kv_head, &tile->segments[i]);
    }
}

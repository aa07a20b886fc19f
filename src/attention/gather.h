/* >>gather: lists, small pages and the ends of rings: tiles of ranks. Scattered rows are gathered into scratch, where
   they are a tile as others are. */

/* Bytes of the scratch of a stream: rows of two tiles, then their norms. */
static size_t tqkv__gathered_codes(const tqkv__stream *s) { return (2 * TQKV__TILE * s->row_bytes + 63) / 64 * 64; }
static size_t tqkv__gathered_size(const tqkv__stream *s)
{
    return tqkv__gathered_codes(s) + 2 * TQKV__TILE * (size_t)s->norms_per_row * sizeof(float);
}

static size_t tqkv__gathered_floats(const tqkv__attention *a)
{
    size_t size = 64;
    if (!a->call.list.rows && !a->small_pages && !a->odd_rings) return 0;
    for (int i = 0; i < TQKV__STREAMS; i++)
        if (tqkv__stream_read(a, i)) size += tqkv__gathered_size(tqkv__stream_read(a, i));
    return size / sizeof(float);
}

/* Puts a stream of two tiles at `memory`; returns what is behind it. */
static uint8_t *tqkv__put_stream(tqkv__stream *s, uint8_t *memory)
{
    s->codes = memory;
    s->norms = (float *)(void *)(memory + tqkv__gathered_codes(s));
    s->n_kv_heads = 1;
    s->capacity = 2 * TQKV__TILE;
    s->ring = false;
    s->pages = NULL;
    s->n_pages = s->page_size = 0;
    return memory + tqkv__gathered_size(s);
}

/* Opens the attention over gathered tiles; tile i of a work has the slots from TQKV__TILE * i on. */
static void tqkv__open_gathered(const tqkv__attention *a, float *scratch, tqkv__attention *gathered)
{
    uint8_t *memory = tqkv__first_line(scratch);
    *gathered = *a;
    for (int i = 0; i < TQKV__STREAMS; i++) {
        tqkv__stream *s = TQKV__STREAM_AT(gathered, i);
        if (a->reads[i]) memory = tqkv__put_stream(s, memory);
        if (a->reads[i] && a->shared && tqkv__stream_kinds[i].side == TQKV__VALUES)
            *s = *TQKV__STREAM_AT(gathered, i - 1);
    }
}

/* Finds the slots of n positions; -1 where a page is none: nothing sees it, for it would have been refused. */
static void tqkv__slots_of(const tqkv__stream *s, int64_t position, int n, int32_t *slot_list)
{
    const int size = s->pages ? s->page_size : n, n_pages = s->pages ? s->capacity / size : 0;
    const int32_t *page = s->pages ? s->pages + position / size : NULL;
    int at = s->pages ? (int)(position % size) : tqkv__slot(s, position);
    for (int j = 0, end; j < n; at = 0) {
        const bool known = !page || (*page >= 0 && *page < n_pages);
        int slot = page ? *page++ * (known ? size : 0) + at : at;
        const int room = page ? size - at : s->capacity - at;
        for (end = n - j < room ? n : j + room; j < end; j++) slot_list[j] = known ? slot++ : -1;
    }
}

static void tqkv__find_slots(const tqkv__stream *s, const tqkv__list *l, const tqkv__ranks *ranks, int32_t *slot_list)
{
    const bool hidden = ranks->hidden && !ranks->together;
    if (!l) {
        tqkv__slots_of(s, ranks->rank, ranks->n, slot_list);
        return;
    }
    if (!s->pages && !s->ring && !hidden && l->shift == 0 && ranks->rank + ranks->n <= l->base + l->n_before) {
        /* The entries are the slots. */
        memcpy(slot_list, l->entries + (ranks->rank - l->base), (size_t)ranks->n * sizeof *slot_list);
        return;
    }
    for (int j = 0, left; j < ranks->n;) { /* block after block */
        int64_t position = tqkv__position_of(l, ranks->rank + j);
        left = (1 << l->shift) - (int)((ranks->rank + j - l->base) & ((1 << l->shift) - 1));
        for (; left > 0 && j < ranks->n; left--, j++, position++)
            slot_list[j] = hidden && ranks->hidden >> j & 1 ? -1 : tqkv__slot(s, position);
    }
}

/* Finds the slots in all streams. Returns whether in each of them rows lie one after the other. */
static bool tqkv__find_slots_of(const tqkv__list *l, tqkv__ranks *ranks)
{
    bool in_order = true;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv__stream *s = ranks->region.streams[i], *k = ranks->region.streams[TQKV__KEYS];
        int32_t *slot_list = ranks->slot_lists[i], differs = 0;
        if (!s) continue;
        if (i && k->pages == s->pages && k->page_size == s->page_size && k->ring == s->ring &&
            k->capacity == s->capacity)
            memcpy(slot_list, ranks->slot_lists[TQKV__KEYS], (size_t)ranks->n * sizeof *slot_list);
        else
            tqkv__find_slots(s, l, ranks, slot_list);
        for (int j = 0; j < ranks->n; j++) differs |= slot_list[j] ^ (slot_list[0] + j);
        in_order = in_order && !differs && slot_list[0] >= 0;
    }
    return in_order;
}

static const tqkv__list *tqkv__list_in_pass(const tqkv__work *w, int pass)
{
    return pass == TQKV__GONE ? NULL : w->list;
}

/* Finds the tile of the ranks from `rank` to at most `end`, n 0 if a list hides all; returns the rank behind. */
static int64_t tqkv__find_ranks_at(const tqkv__work *w, int pass, int64_t rank, int64_t end, tqkv__ranks *ranks)
{
    const tqkv__attention *a = w->a;
    const tqkv__list *l = tqkv__list_in_pass(w, pass);
    const bool scattered = a->small_pages || a->odd_rings;
    int64_t n = TQKV__TILE - rank % TQKV__TILE;
    if (n > end - rank) n = end - rank;
    const int64_t position = tqkv__position_of(l, rank), last = tqkv__position_of(l, rank + n - 1);
    const bool together = last - position == n - 1;
    ranks->n = 0;
    ranks->region = tqkv__region_at(a, position, pass);
    if (together)
        n = tqkv__tile_length(&ranks->region, position, last + 1); /* as without a list */
    else if (last >= ranks->region.end)
        n = tqkv__rank_of(l, ranks->region.end) - rank;
    ranks->together = together && !scattered; /* then nothing is hidden in the slots */
    ranks->hidden = tqkv__hidden_ranks(a, w->item->first_row / a->group, l, rank, (int)n);
    if (ranks->hidden == tqkv__bits_below((int)n)) return rank + n;
    ranks->rank = rank;
    ranks->n = (int)n;
    const bool in_order = tqkv__find_slots_of(l, ranks);
    ranks->together = ranks->together || (scattered && in_order);
    return rank + n;
}

/* Finds the next tile of ranks from `rank` of a pass on; n is 0 if there is none. */
static void tqkv__find_ranks(const tqkv__work *w, int pass, int64_t rank, tqkv__ranks *ranks)
{
    ranks->n = 0;
    for (;;) {
        while (rank < w->passes[pass].to && !ranks->n)
            rank = tqkv__find_ranks_at(w, pass, rank, w->passes[pass].to, ranks);
        if (ranks->n || ++pass == TQKV__PASSES) return;
        rank = w->passes[pass].from;
    }
}

/* Makes a tile of ranks; scattered ones get the keys in scratch now, and the values before they are added. */
static tqkv__tile *tqkv__tile_of_ranks(const tqkv__work *w, const tqkv__ranks *ranks, const tqkv__ranks *next)
{
    const tqkv__attention *a = w->a, *streams = ranks->together ? a : w->gathered;
    tqkv__tile *tile = tqkv__next_tile(w, ranks->rank, ranks->n);
    const int kv_head = tile->kv_head, slot = tile == w->tiles ? 0 : TQKV__TILE;
    const bool ahead = ranks->together && next->n && next->together && /* the loops ask for the next tile */
                       memcmp(ranks->region.streams, next->region.streams, sizeof next->region.streams) == 0;
    const int pass = ranks->region.number / 2;
    tile->region = tqkv__region_at(streams, tqkv__position_of(tqkv__list_in_pass(w, pass), ranks->rank), pass);
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) { /* in scratch, or where the rows are */
        if (!ranks->region.streams[i]) continue;
        const int first = ranks->slot_lists[i][0], at = ranks->together ? first : slot;
        const tqkv__segment segment = {at, ranks->n, ahead ? next->slot_lists[i][0] - first : 0};
        tile->segments[i] = segment;
    }
    const bool asks = tqkv__asks_meanwhile(ranks, next);
    if (ahead)
        tqkv__touch_streams(tile);
    else if (!asks)
        tqkv__ask(kv_head, next, false);
    tile->ranks = ranks;
    if (ranks->together) return tile;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++)
        if (i != TQKV__VALUES && ranks->region.streams[i])
            tqkv__gather(i, kv_head, ranks, asks ? next : NULL, tile->region.streams[i], slot);
    tile->streams = streams;
    tile->kv_head = 0;
    return tile;
}

static tqkv__tile *tqkv__wrapped_tile(tqkv__work *w, int pass, int64_t position)
{
    tqkv__ranks *ranks = &w->ranks[w->before == &w->tiles[0]]; /* those of the tile before are in use */
    w->ranks[2].n = 0;                                         /* no tile to ask for */
    tqkv__find_ranks(w, pass, position, ranks);
    return tqkv__tile_of_ranks(w, ranks, &w->ranks[2]);
}

static void tqkv__attend_rows(tqkv__work *w, int pass, tqkv__range range)
{
    const tqkv__attention *a = w->a;
    const tqkv__range seen = w->passes[pass];
    tqkv__region region = tqkv__region_at(a, seen.from, pass);
    for (int64_t position = seen.from, n; position < seen.to; position += n) {
        if (position >= region.end) region = tqkv__region_at(a, position, pass);
        n = tqkv__tile_length(&region, position, seen.to);
        const bool wraps = a->odd_rings && tqkv__wraps(&region, position, n);
        tqkv__tile *tile = wraps ? tqkv__wrapped_tile(w, pass, position) : tqkv__next_tile(w, position, (int)n);
        if (!wraps) tile->region = region;
        if (!tqkv__find_spans(w, range, tile)) continue; /* a tree hides it */
        for (int i = 0; i < TQKV__CACHE_STREAMS && !wraps; i++)
            if (region.streams[i]) tqkv__open_segment(region.streams[i], position, (int)n, seen.to, &tile->segments[i]);
        if (!wraps && position + n < seen.to) tqkv__touch_streams(tile);
        tqkv__attend_tile(w, tile);
    }
}

/* Does what tqkv__attend_rows does, for lists and small pages; range: of ranks */
static void tqkv__attend_ranks(tqkv__work *w, tqkv__range range)
{
    tqkv__find_ranks(w, 0, w->passes[0].from, &w->ranks[0]);
    tqkv__ask(w->item->kv_head, &w->ranks[0], false);
    for (int now = 0; w->ranks[now].n; now = (now + 1) % 3) {
        const tqkv__ranks *ranks = &w->ranks[now];
        tqkv__ranks *next = &w->ranks[(now + 1) % 3];
        tqkv__find_ranks(w, ranks->region.number / 2, ranks->rank + ranks->n, next);
        tqkv__tile *tile = tqkv__tile_of_ranks(w, ranks, next);
        tqkv__find_spans(w, range, tile);
        tqkv__attend_tile(w, tile);
    }
}

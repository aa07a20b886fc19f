/* >>tile: tiles, and the sums of a tile, of a piece and of a stretch */

static int tqkv__clamp(int64_t x, int low, int high) { return x < low ? low : x > high ? high : (int)x; }

/* Whether a ring ends within n positions. */
static bool tqkv__wraps(const tqkv__region *region, int64_t position, int64_t n)
{
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv__stream *s = region->streams[i];
        if (s && s->ring && tqkv__slots_left(s, position) < n) return true;
    }
    return false;
}

/* Returns the length of a tile, which is contiguous in all its streams, or gathered. It ends where a large page ends,
   or another region begins, and at multiples of TQKV__TILE; its scores are at the position modulo TQKV__TILE. So a
   query's sums are the same bits alone, in a batch, and in any store, and prefill and decode do not drift apart. */
static int tqkv__tile_length(const tqkv__region *region, int64_t position, int64_t end)
{
    const int64_t aligned = TQKV__TILE - position % TQKV__TILE, border = region->end - position;
    int64_t n = end - position < aligned ? end - position : aligned;
    if (n > border) n = border;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv__stream *s = region->streams[i];
        if (!s || s->page_size % TQKV__TILE || s->ring) continue; /* rows are gathered there if need be */
        if (n > tqkv__slots_left(s, position)) n = tqkv__slots_left(s, position);
    }
    return (int)n;
}

/* Where the ranks [rank, rank + n) of a tile lie. */
typedef struct tqkv__ranks {
    int64_t rank;
    int n;
    bool together;   /* in all streams one row after the other */
    uint64_t hidden; /* ranks that the query does not see, as bits */
    tqkv__region region;
    int32_t slot_lists[TQKV__CACHE_STREAMS][TQKV__TILE]; /* -1: hidden, or no page */
} tqkv__ranks;

/* A tile in progress: n positions from `position` on. Its scores, later weights, begin at scores[row][begin]. */
typedef struct tqkv__tile {
    int64_t position;
    int n, begin;
    tqkv__region region;
    tqkv__segment segments[TQKV__CACHE_STREAMS];
    const tqkv__ranks *ranks;       /* of a list or of gathered rows, or NULL */
    const tqkv__attention *streams; /* that hold it: the caller's, or gathered ones */
    int kv_head;                    /* there */
    bool whole;                     /* every row sees all of it */
    tqkv__span spans[TQKV__CHUNK_ROWS];
    TQKV__ALIGNED float scores[(TQKV__CHUNK_ROWS + 1) * TQKV__TILE]; /* room for whole vectors at a tile's end */
    TQKV__ALIGNED float scaled[TQKV__CHUNK_ROWS * TQKV__TILE];       /* for value_tile */
} tqkv__tile;

/* Finds the slots of a tile of n positions, and where the next tile of [.., end) lies, for the prefetch. */
static void tqkv__open_segment(const tqkv__stream *s, int64_t position, int n, int64_t end, tqkv__segment *segment)
{
    const int64_t next = position + n;
    segment->slot = tqkv__slot(s, position);
    segment->n = n;
    segment->ahead = TQKV__TILE;
    if (!s->pages || next >= end || next % s->page_size) return;
    const int32_t page = s->pages[next / s->page_size]; /* not checked if a tree hides it */
    if (page >= 0 && page < s->capacity / s->page_size) segment->ahead = page * s->page_size - segment->slot;
}

/* Prefetches a line of each 4 KiB of the next tile, and its norms: the loops prefetch the rest, but late where the
   memory page is not known yet. Short rows that go on behind this tile need none. */
static void tqkv__touch_next(const tqkv__stream *s, int kv_head, const tqkv__segment *segment)
{
    const size_t size = TQKV__TILE * s->row_bytes, norms_size = (size_t)(TQKV__TILE * s->norms_per_row) * sizeof(float);
    const uint8_t *codes =
        tqkv__codes_at(s, kv_head, segment->slot) + (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes;
    if (segment->ahead != TQKV__TILE || s->row_bytes >= 128) {
        for (size_t i = 0; i < size; i += 4096) tqkv__prefetch(TQKV__L1, codes + i, 1);
        tqkv__prefetch(TQKV__L1, codes + size - 1, 1);
    }
    if (!norms_size) return;
    const float *norms = tqkv__norms_at(s, kv_head, segment->slot) + (ptrdiff_t)segment->ahead * s->norms_per_row;
    tqkv__prefetch(TQKV__L1, (const uint8_t *)norms, norms_size + 63); /* they may begin within a line */
}

/* Whether no value of a segment is infinite or NaN, so that a weight of 0 adds nothing. */
static bool tqkv__segment_finite(const tqkv__attention *a, const tqkv__stream *s, int kv_head,
                                 const tqkv__segment *segment)
{
    const size_t n = (size_t)segment->n;
    if (!tqkv__in_floats(s)) return true;
    if (s->kind == TQKV__HALF)
        return a->isa->codec->rows_finite(TQKV_TYPE_F16, tqkv__codes_at(s, kv_head, segment->slot),
                                          n * (size_t)s->head_dim);
    const float *norms = tqkv__norms_at(s, kv_head, segment->slot);
    for (size_t i = 0; i < n * (size_t)s->norms_per_row; i++) {
        const float most = tqkv__factor(s, norms[i]) * s->codebook[255];
        if (!tqkv__all_finite(&most, 1)) return false;
    }
    return true;
}

/* Does what value_tile does, safe for floats: where a tile holds NaN or infinity and some row does not see all of it,
   each position is added alone, to the rows that see it. */
static void tqkv__add_values(tqkv__tile *tile, int n_rows, float *out)
{
    const tqkv__attention *a = tile->streams;
    const tqkv__stream *s = tile->region.streams[TQKV__VALUES];
    const tqkv__segment *segment = &tile->segments[TQKV__VALUES];
    const int kv_head = tile->kv_head;
    const float *weights = tile->scores + tile->begin;
    if (tile->whole || tqkv__segment_finite(a, s, kv_head, segment)) {
        a->kernels->value_tile(s, kv_head, segment, weights, n_rows, tile->scaled, out);
        return;
    }
    for (int row = 0; row < n_rows; row++)
        for (int j = 0; j < segment->n; j++) {
            const tqkv__segment one = {segment->slot + j, 1, segment->ahead};
            float alone[TQKV__TILE] = {0};
            alone[0] = weights[row * TQKV__TILE + j];
            if (!tqkv__span_has(&tile->spans[row], tile->begin + j)) continue;
            a->kernels->value_tile(s, kv_head, &one, alone, 1, tile->scaled, out + (size_t)row * (size_t)s->head_dim);
        }
}

static uint64_t tqkv__bits_below(int n) { return n < 64 ? ((uint64_t)1 << n) - 1 : UINT64_MAX; }

static tqkv__span tqkv__span_of(const tqkv__attention *a, int query, const tqkv__tile *tile, tqkv__range range)
{
    const tqkv__range seen = tqkv__visible(a, query, range);
    tqkv__span span = {tile->begin + tqkv__clamp(seen.from - tile->position, 0, tile->n),
                       tile->begin + tqkv__clamp(seen.to - tile->position, 0, tile->n), 0};
    if (!a->call.tree) return span;
    const uint64_t hidden = ~a->call.tree[query];
    const int64_t shift = a->call.end - a->call.n_queries - (tile->position - tile->begin); /* of bit 0 */
    const uint64_t inside = tqkv__bits_below(span.to) & ~tqkv__bits_below(span.from);
    if (shift >= 0 && shift < 64) span.hidden = hidden << shift & inside;
    if (shift < 0 && shift > -64) span.hidden = hidden >> -shift & inside;
    if (span.hidden == inside) span.to = span.from;
    return span;
}

/* Query rows of one KV head that share decoded tiles. */
typedef struct tqkv__item {
    int kv_head, first_row, n_rows;
} tqkv__item;

/* Adds the slice (source, source_max, source_sum) of one row to (out, max, sum). */
static TQKV__NOINLINE void tqkv__merge_row(int value_dim, float *out, float *max, float *sum, const float *source,
                                           float source_max, float source_sum)
{
    if (source_sum == 0.0f) return;
    const float largest = source_max > *max ? source_max : *max;
    const float keep = *sum == 0.0f ? 0.0f : tqkv__exp(TQKV__AS_FLOAT(*max - largest));
    const float add = tqkv__exp(TQKV__AS_FLOAT(source_max - largest));
    for (int d = 0; d < value_dim; d++) out[d] = tqkv__sum_of_products(out[d], keep, source[d], add);
    *sum = tqkv__sum_of_products(*sum, keep, source_sum, add);
    *max = largest;
}

static void tqkv__clear_sums(const tqkv__sums *sums, size_t n_rows, int value_dim)
{
    memset(sums->out, 0, n_rows * (size_t)value_dim * sizeof(float));
    memset(sums->sum, 0, n_rows * sizeof(float));
    for (size_t i = 0; i < n_rows; i++) sums->max[i] = -INFINITY;
}

static TQKV__NOINLINE void tqkv__merge_sums(const tqkv__sums *into, const tqkv__sums *from, size_t n_rows,
                                            int value_dim)
{
    for (size_t i = 0; i < n_rows; i++)
        tqkv__merge_row(value_dim, into->out + i * (size_t)value_dim, &into->max[i], &into->sum[i],
                        from->out + i * (size_t)value_dim, from->max[i], from->sum[i]);
}

/* The context is cut into stretches at multiples of 2048 positions, and these into pieces, each with its own softmax
   and float sums, merged in order: the error does not grow with the context, and a query's bits depend only on its
   positions. */
#define TQKV__STRETCH 2048
#define TQKV__PIECE   256

static bool tqkv__has_exact_keys(const tqkv__attention *a)
{
    return a->reads[TQKV__FIRST_KEYS] || a->reads[TQKV__LAST_KEYS];
}

/* Returns the floats of an arranged query, without its second digits. */
static size_t tqkv__first_floats(const tqkv__attention *a)
{
    return (size_t)(a->key_dim + (tqkv__has_exact_keys(a) ? a->keys.head_dim : 0));
}

/* Adds the scores of the second digits: few rows have any, and their units say which. digits: [n_rows][head_dim] */
static void tqkv__score_digits(const tqkv__attention *a, const tqkv__stream *s, int kv_head,
                               const tqkv__segment *segment, const float *digits, int n_rows, float *scores)
{
    const size_t dim = (size_t)s->head_dim;
    for (int row = 0, n; row<n_rows; row += n> 0 ? n : 1) {
        for (n = 0; row + n < n_rows && digits[(size_t)(row + n + 1) * dim - 1] != 0.0f;) n++;
        if (n > 0)
            a->kernels->score_tile(s, kv_head, segment, digits + (size_t)row * dim, n, true, scores + row * TQKV__TILE);
    }
}

/* Finds the scores of a tile: the sum of those of the parts of the keys, in their order, and of the second digits. q,
   digits: as tqkv__arrange_queries gives them */
static void tqkv__score_tile(tqkv__tile *tile, const float *q, int digits, int n_rows)
{
    const tqkv__attention *a = tile->streams;
    const tqkv__stream *keys = tile->region.streams[TQKV__KEYS], *tail = tile->region.streams[TQKV__TAIL];
    const tqkv__segment *segments = tile->segments;
    float *scores = tile->scores + tile->begin;
    const bool codes = keys == &a->keys;
    const size_t all = (size_t)n_rows, of_keys = all * (size_t)a->keys.head_dim;
    const float *rest = q + all * tqkv__first_floats(a);
    a->kernels->score_tile(keys, tile->kv_head, &segments[TQKV__KEYS], codes ? q : q + all * (size_t)a->key_dim, n_rows,
                           false, scores);
    if (tail) a->kernels->score_tile(tail, tile->kv_head, &segments[TQKV__TAIL], q + of_keys, n_rows, true, scores);
    if ((digits & 1) && codes) tqkv__score_digits(a, keys, tile->kv_head, &segments[TQKV__KEYS], rest, n_rows, scores);
    if (digits & 2) tqkv__score_digits(a, tail, tile->kv_head, &segments[TQKV__TAIL], rest + of_keys, n_rows, scores);
}

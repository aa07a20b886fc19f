/* >>cache-code: tqkv_cache, its stores and its memory */

struct tqkv_cache {
    tqkv_attention
        attention; /* one query over all appended positions; defaults resolved, sinks in the cache's memory */
    tqkv_store keys, values, tail; /* values: only their shape if the keys are the values; tail: zeros without one */
    bool shared;                   /* the keys are the values */
    /* What is kept besides of the first and of the newest positions, of keys, values and tail; zeros without. Halves;
       in a ring the first ones' rows of F16 streams and of the tail as they are. */
    tqkv_store ends[2][3];
    int exact_first, exact_last; /* at most the capacity */
    int asked_first, asked_last; /* as in the desc */
    int64_t exact_below;         /* positions below it are among the first ones kept */
    int64_t exact_from;          /* positions below it are read as codes since an edit */
    int64_t exact_held;          /* the newest halves are there from it on */
    void *own[2];                /* codes of the newest halves' rings in the cache's memory, of keys and values */
    int own_room;                /* their capacity */
    void *grown;                 /* memory of newest halves for which that has no room, or NULL */
    size_t grown_size;
    float *channels;  /* room for centres, scales and inverses, stream after stream: [n_kv_heads][head_dim] */
    int64_t first;    /* resident positions [first, attention.end) */
    tqkv_pairs pairs; /* as in the desc */
    int calibrate;
    uint64_t tag;
    bool learning;     /* positions are in `raw` alone */
    int learn_from;    /* so many positions */
    int64_t raw_below; /* queries at positions below it read `raw`; INT64_MAX while the cache learns */
    int64_t raw_end;   /* the rows there, when it has learned */
    tqkv_store raw[3]; /* rows as they came of keys and values, as halves, and of the tail; zeros if it never learns */
    uint8_t *is_new; /* [learn_from]: whether a position is new; on a GPU for each KV head, where the kernel needs it */
    void *raw_memory; /* that holds them, or NULL: on a GPU they lie in the cache's memory, as long as that */
    size_t raw_size;
    int64_t learnt_at; /* on a GPU the end before the append that learned; -1: none, or positions were edited since */
    tqkv_metal *metal;
    int matrix_group;
    tqkv_allocator memory;
    size_t size; /* of the cache's memory: the struct, the sinks, the codes and the norms */
};

enum { TQKV__APPENDED_ON_GPU = 512 }; /* tokens at once: memory for the newest halves does not grow there */

/* The fields of a desc, and where a cache has them: those that a snapshot holds as numbers, with the number of their
   field in its header; what it holds otherwise; then what it does not hold. */
// clang-format off
#define TQKV__CACHE_NUMBERS(row)                                                                                       \
    row(head_dim,      keys.head_dim,     1, int)         row(value_dim,    values.head_dim,  2, int)                  \
    row(tail_dim,      tail.head_dim,     3, int)         row(n_kv_heads,   keys.n_kv_heads,  4, int)                  \
    row(n_heads,       attention.n_heads, 5, int)         row(capacity,     keys.capacity,    6, int)                  \
    row(key_format,    keys.format,       7, tqkv_format) row(value_format, values.format,    8, tqkv_format)          \
    row(tail_format,   tail.format,       9, tqkv_format) row(window,       attention.window, 12, int)                 \
    row(calibrate,     calibrate,        15, int)         row(exact_first,  asked_first,      16, int)                 \
    row(exact_last,    asked_last,       17, int)         row(pairs,        pairs,            22, tqkv_pairs)          \
    row(rotary_dim,    keys.rotary_dim,  23, int)
#define TQKV__CACHE_SHAPE(row)                                                                                         \
    row(ring,         keys.ring,)          row(shared,     shared,)                                                    \
    row(scale,        attention.scale,)    row(softcap,    attention.softcap,)
#define TQKV__CACHE_USE(row)                                                                                           \
    row(type,         keys.type,)          row(sinks,      attention.sinks,)     row(metal,    metal,)                 \
    row(parallel,     attention.parallel,) row(allocator,  attention.allocator,)                                       \
    row(matrix_group, matrix_group,)       row(non_causal, attention.non_causal,)                                      \
    row(tag,          tag,)
// clang-format on

/* This is where a cache has store i, whether there is one or not. */
#define TQKV__STORE_AT(c, i) \
    ((i) >= TQKV__RAW      ? &(c)->raw[(i)-TQKV__RAW] \
     : (i) == TQKV__KEYS   ? &(c)->keys \
     : (i) == TQKV__VALUES ? &(c)->values \
     : (i) == TQKV__TAIL   ? &(c)->tail \
                           : &(c)->ends[tqkv__stream_kinds[i].end][tqkv__stream_kinds[i].side])

static bool tqkv__has_store(const tqkv_cache *c, int i)
{
    return (i != TQKV__VALUES || !c->shared) && TQKV__STORE_AT(c, i)->head_dim > 0;
}

static const tqkv_store *tqkv__store_of(const tqkv_cache *c, int i)
{
    return tqkv__has_store(c, i) ? TQKV__STORE_AT(c, i) : NULL;
}

/* Stores of the cache's memory: what is raw lies there only on a GPU, where work under way may read it at any time. */
static int tqkv__stores_within(const tqkv_cache *c) { return c->metal ? TQKV__CACHE_STORES : TQKV__RAW; }

/* Returns the positions of a ring of halves that serves so many queries: whole tiles, none of which wraps. */
static int64_t tqkv__end_room(int64_t exact_last, int64_t n_queries)
{
    return exact_last ? (exact_last + n_queries - 1 + TQKV__TILE - 1) / TQKV__TILE * TQKV__TILE : 0;
}

/* Returns the oldest position that an edit leaves as halves: as if the ring had room for a tile of queries, so that no
   bit depends on how positions came. */
static int64_t tqkv__exact_kept(const tqkv_cache *c)
{
    const int64_t oldest = c->attention.end - tqkv__end_room(c->exact_last, TQKV__TILE);
    return oldest > c->exact_from ? oldest : c->exact_from;
}

/* Returns the positions for which the rings of the newest halves have room; 0 without. */
static int64_t tqkv__newest_room(const tqkv_cache *c)
{
    return c->ends[1][0].capacity ? c->ends[1][0].capacity : c->ends[1][1].capacity;
}

/* Returns the positions that store i holds: of the newest halves those that an edit leaves. These may be more than
   exact_last: a truncation takes from them first. */
static tqkv__range tqkv__range_of(const tqkv_cache *c, int i)
{
    const tqkv__range all = {c->first, c->attention.end}, first = {0, c->exact_below}, none = {0, 0};
    tqkv__range newest = all;
    if (i >= TQKV__RAW || c->learning) return i >= TQKV__RAW && c->learning ? all : none;
    if (tqkv__exact_kept(c) > newest.from) newest.from = tqkv__exact_kept(c);
    return i < TQKV__FIRST_KEYS ? all : i < TQKV__LAST_KEYS ? first : newest;
}

/* What a stream has a value a channel of. */
typedef enum tqkv__channels {
    TQKV__CENTERS,
    TQKV__SCALES,
    TQKV__INVERSES, /* of the scales: what encoding multiplies by */
    TQKV__CHANNELS
} tqkv__channels;

/* Counts the channels of the streams before number n; false if their room overflows. */
static bool tqkv__count_channels(const tqkv_cache *c, int n, size_t *channels)
{
    size_t dims = 0;
    for (int i = 0; i < n; i++)
        if (tqkv__has_store(c, i)) dims += (size_t)TQKV__STORE_AT(c, i)->head_dim;
    return tqkv__size_multiply(dims, (size_t)c->keys.n_kv_heads, channels) &&
           *channels <= SIZE_MAX / sizeof(float) / TQKV__CHANNELS;
}

/* Starts each array in memory on a cache line: attention to codes that straddle two takes a tenth longer. 63 bytes more
   than *end still have a size. */
static bool tqkv__reserve(size_t *end, size_t size, size_t *begin)
{
    const size_t most = SIZE_MAX - 2 * 63;
    if (*end > most || size > most - *end) return false;
    *begin = (*end + 63) / 64 * 64;
    *end = *begin + size;
    return true;
}

#define TQKV__LARGE_CACHE "a cache of more than SIZE_MAX bytes"

/* Where arrays lie in memory. */
typedef struct tqkv__cache_memory {
    size_t sinks, channels, is_new, size;
    size_t codes[TQKV__CACHE_STORES], norms[TQKV__CACHE_STORES];
} tqkv__cache_memory;

/* Reserves memory for the stores [first, end) and, with raw ones, for is_new: on a GPU for each KV head. */
static bool tqkv__reserve_stores(const tqkv_cache *c, int first, int end, tqkv__cache_memory *at)
{
    const size_t new_rows = (size_t)c->learn_from * (size_t)(c->metal ? c->keys.n_kv_heads : 1);
    bool fits = end <= TQKV__RAW || tqkv__reserve(&at->size, new_rows, &at->is_new);
    for (int i = first; fits && i < end; i++) {
        if (!tqkv__has_store(c, i)) continue;
        const size_t codes = tqkv_codes_size(TQKV__STORE_AT(c, i)); /* 0: more than SIZE_MAX bytes */
        fits = codes && tqkv__reserve(&at->size, codes, &at->codes[i]) &&
               tqkv__reserve(&at->size, tqkv_norms_size(TQKV__STORE_AT(c, i)), &at->norms[i]);
    }
    return fits;
}

static void tqkv__place_stores(tqkv_cache *c, int first, int end, const tqkv__cache_memory *at, uint8_t *memory)
{
    if (end > TQKV__RAW) c->is_new = memory + at->is_new;
    for (int i = first; i < end; i++) {
        tqkv_store *s = TQKV__STORE_AT(c, i);
        if (!tqkv__has_store(c, i)) continue;
        s->codes_size = tqkv_codes_size(s);
        s->norms_size = tqkv_norms_size(s);
        s->codes = memory + at->codes[i];
        s->norms = (float *)(void *)(memory + at->norms[i]);
    }
}

static const tqkv__backend *tqkv__backend_of(const tqkv_metal *m) { return (const tqkv__backend *)(const void *)m; }

static float *tqkv__channel_room(const tqkv_cache *c, int i, tqkv__channels kind)
{
    size_t before = 0, all = 0; /* of a cache that exists */
    (void)tqkv__count_channels(c, i, &before);
    (void)tqkv__count_channels(c, TQKV__CACHE_STREAMS, &all);
    return c->channels + (size_t)kind * all + before;
}

/* Stream i, and what is kept of it besides, has the centres or the scales that lie in their room, or none. */
static void tqkv__name_channels(tqkv_cache *c, int i, tqkv__channels kind, bool has)
{
    tqkv_store *s = TQKV__STORE_AT(c, i);
    *(kind == TQKV__CENTERS ? &s->center : &s->channel_scale) = has ? tqkv__channel_room(c, i, kind) : NULL;
    for (int last = 0; last < 2; last++) {
        c->ends[last][i].center = s->center;
        c->ends[last][i].channel_scale = s->channel_scale;
    }
}

/* Takes values, or NULL, as centres or scales of stream i and of its halves; heads are `stride` floats apart. */
static void tqkv__cache_channels(tqkv_cache *c, int i, tqkv__channels kind, const float *values, size_t stride)
{
    const tqkv_store *s = tqkv__store_of(c, i);
    if (!s) return;
    const size_t dim = (size_t)s->head_dim, n_kv_heads = (size_t)s->n_kv_heads;
    float *own = tqkv__channel_room(c, i, kind), *inverses = tqkv__channel_room(c, i, TQKV__INVERSES);
    const uint64_t mode = tqkv__fp_exact();
    for (size_t h = 0; values && h < n_kv_heads; h++) {
        memmove(own + h * dim, values + h * stride, dim * sizeof(float));
        if (kind == TQKV__SCALES) tqkv__invert(own + h * dim, s->head_dim, inverses + h * dim);
    }
    tqkv__fp_restore(mode);
    tqkv__name_channels(c, i, kind, values != NULL);
}

static void tqkv__cache_advance(tqkv_cache *c, int n_tokens)
{
    const int64_t end = c->attention.end + n_tokens;
    if (c->attention.end <= c->exact_below) c->exact_below = end < c->exact_first ? end : c->exact_first;
    if (c->exact_held < end - tqkv__newest_room(c)) c->exact_held = end - tqkv__newest_room(c);
    c->attention.end = end;
    if (end - c->first > c->keys.capacity) c->first = end - c->keys.capacity;
}

/* What an append encodes: the streams, and the first positions that are kept besides. */
typedef struct tqkv__append {
    tqkv__encode_job job, first_job;
    tqkv__stream streams[TQKV__CACHE_STREAMS], newest[2], first[TQKV__CACHE_STREAMS];
} tqkv__append;

/* Whether store i keeps rows as halves besides codes. */
static bool tqkv__keeps_halves(const tqkv_cache *c, int i)
{
    const int side = tqkv__stream_kinds[i].side;
    return i >= TQKV__FIRST_KEYS && side != TQKV__TAIL && tqkv__has_store(c, i) &&
           TQKV__STORE_AT(c, side)->format != TQKV_F16;
}

static void tqkv__append_rows(const tqkv_cache *c, tqkv__append *append)
{
    for (int side = 0; side < 2; side++) {
        const tqkv_store *newest = tqkv__store_of(c, TQKV__LAST_KEYS + side);
        if (!newest || tqkv__stream_open(newest, &append->newest[side]) != TQKV_OK) continue;
        append->job.halves[side] = &append->newest[side];
    }
    append->job.encode = append->first_job.encode = true;
    tqkv__run_encode_tasks(&append->job);
    if (append->first_job.n_streams) tqkv__run_encode_tasks(&append->first_job);
}

/* >>attend: softmax(q.k) v in one pass over tiles of positions; a decoded key or value serves all its queries */

/* Positions in a tile, which attention scores, weights and sums together. Their scores stay in the L1 cache. */
#define TQKV__TILE 64
/* Query rows (queries x heads of a group) that share a decoded tile. The limit keeps their sums in the L2 cache. */
#define TQKV__CHUNK_ROWS 64

/* The streams of an attention and, with raw ones, a cache's stores, in the order of its memory and of snapshots. */
enum {
    TQKV__KEYS,
    TQKV__VALUES,
    TQKV__TAIL,
    TQKV__CACHE_STREAMS,
    /* What is kept of the first positions besides: halves, and of a tail, which only a ring keeps, rows as they are. */
    TQKV__FIRST_KEYS = TQKV__CACHE_STREAMS,
    TQKV__FIRST_VALUES,
    TQKV__FIRST_TAIL,
    TQKV__LAST_KEYS, /* halves of the newest positions */
    TQKV__LAST_VALUES,
    TQKV__STREAMS,
    TQKV__RAW = TQKV__STREAMS, /* rows as they came while a cache learns: keys, values, tail */
    TQKV__CACHE_STORES = TQKV__RAW + 3
};

/* A stream has a side (keys, values or tail) and an end: the first or the last positions, or neither. */
typedef struct tqkv__stream_kind {
    uint8_t side, end;
} tqkv__stream_kind;
enum { TQKV__FIRST_END, TQKV__LAST_END, TQKV__NO_END };
static const tqkv__stream_kind tqkv__stream_kinds[TQKV__CACHE_STORES] = {
    {TQKV__KEYS, TQKV__NO_END},    {TQKV__VALUES, TQKV__NO_END},    {TQKV__TAIL, TQKV__NO_END},
    {TQKV__KEYS, TQKV__FIRST_END}, {TQKV__VALUES, TQKV__FIRST_END}, {TQKV__TAIL, TQKV__FIRST_END},
    {TQKV__KEYS, TQKV__LAST_END},  {TQKV__VALUES, TQKV__LAST_END},  {TQKV__KEYS, TQKV__NO_END},
    {TQKV__VALUES, TQKV__NO_END},  {TQKV__TAIL, TQKV__NO_END}};

/* Positions, or ranks of a list: [from, to) */
typedef struct tqkv__range {
    int64_t from, to;
} tqkv__range;

/* A checked tqkv_attention. A row is one query of one head: row = query * group + (head within the group). */
typedef struct tqkv__attention {
    tqkv_attention call;                       /* defaults resolved */
    tqkv__stream keys, values, tail;           /* tail: if call.tail is set */
    int n_kv_heads, group, key_dim, value_dim; /* dims: of a query with that of the tail, of an output */
    int64_t first;                             /* resident positions [first, call.end) */
    bool rotate_queries, unrotate_output;      /* rotate_queries: but for the tail's part */
    bool shared;                               /* keys and values are one stream */
    size_t n_rows, q_elements, out_elements;   /* n_queries * n_heads, and times key_dim or value_dim */
    size_t q_size, out_size;                   /* bytes of the caller's rows, with gaps */
    const tqkv__isa *isa;
    const tqkv__kernels *kernels; /* those of the set, or of a narrower one */
    int matrix_group;             /* on a GPU; 0 = the default */
    bool reads[TQKV__STREAMS];    /* which streams there are */
    int64_t
        exact_below;    /* positions below are read from the first halves, those from tqkv__exact_at on from the last */
    bool newest_halves; /* on a GPU: this is the region that queries read from halves of the newest */
    bool small_pages, odd_rings; /* pages, or rings, may end within a tile, whose rows are then gathered */
    int64_t kept; /* positions below are seen, resident or not, from what is kept of the first, apart from the others */
    tqkv__stream ends[TQKV__STREAMS - TQKV__FIRST_KEYS]; /* not cleared if unused: as long as a few positions take */
} tqkv__attention;

#define TQKV__STREAM_AT(a, i) \
    ((i) >= TQKV__FIRST_KEYS ? &(a)->ends[(i)-TQKV__FIRST_KEYS] \
     : (i) == TQKV__KEYS     ? &(a)->keys \
     : (i) == TQKV__VALUES   ? &(a)->values \
                             : &(a)->tail)

static const tqkv__stream *tqkv__stream_read(const tqkv__attention *a, int i)
{
    return a->reads[i] ? TQKV__STREAM_AT(a, i) : NULL;
}

/* Prefetches the codes of the next tile while this one is computed. Streams go to the L2 cache, because few lines can
   be on their way to the L1. cache: constant */
enum { TQKV__L1 = 1, TQKV__L2 };
static TQKV__INLINE void tqkv__prefetch(const int cache, const uint8_t *codes, size_t size)
{
    for (size_t i = 0; i < size; i += 64) {
        if (cache == TQKV__L1)
            __builtin_prefetch((const void *)((uintptr_t)codes + i), 0, 3);
        else
            __builtin_prefetch((const void *)((uintptr_t)codes + i), 0, 2);
    }
}

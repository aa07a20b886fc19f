/* >>attend: softmax(q.k) v in one pass over tiles of positions; a decoded key or value serves all its queries */

/* Positions in a tile, which attention scores, weights and sums together. Their scores stay in the L1 cache. */
#define TQKV__TILE 64
/* Query rows (queries x heads of a group) that share a decoded tile. Many rows make decoding a small part of the work;
   the limit keeps their sums in the L2 cache. */
#define TQKV__CHUNK_ROWS 64

/* The streams of an attention and, with raw ones, the stores of a cache, in the order of its memory and of
   snapshots. */
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
    const struct tqkv__isa *isa;
    int matrix_group; /* on a GPU; 0 = the default */
    /* Makes integers of a query; NULL: floats. See tqkv__integers. */
    void (*round_query)(const tqkv__stream *s, const float *query, float *to);
    /* Positions below exact_below are halves in ends[0][side], and those from tqkv__exact_at on in ends[1][side], where
       exact[][side] is set; side: TQKV__KEYS or TQKV__VALUES. exact_from: for the last query, on a GPU for all. See
       tqkv__region_at. */
    int64_t exact_below, exact_from;
    bool newest_halves; /* on a GPU: this is the region that queries read from halves of the newest */
    bool exact[2][2];
    int64_t kept; /* positions below are seen though they are no longer resident: in ends[0] and first_tail */
    tqkv__stream ends[2][2], first_tail; /* not cleared if unused: that would take as long as a few positions */
} tqkv__attention;

/* Additions in a row to one sum of products. Longer ones may all be rounded to the same side, where keys are parallel
   to the query and their products equal: with scores of 50 an error of 8e-5 at head_dim 1024. */
#define TQKV__MOST_ADDITIONS 16

/* A dot product in eight sums has less latency and smaller errors. n: up to 8 * TQKV__MOST_ADDITIONS, a multiple of
   8 */
static float tqkv__dot(const float *a, const float *b, int n)
{
    float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int d = 0; d < n; d += 8)
        for (int i = 0; i < 8; i++) sums[i] += a[d + i] * b[d + i];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

static void tqkv__score_tile_scalar(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, const float *q,
                                    int n_rows, bool add, float *scores)
{
    const int most = 8 * TQKV__MOST_ADDITIONS;
    float key[TQKV_MAX_HEAD_DIM];
    for (int j = 0; j < segment->n; j++) {
        tqkv__decode_row(s, tqkv__codes_at(s, kv_head, segment->slot + j),
                         tqkv__norms_at(s, kv_head, segment->slot + j), key);
        for (int row = 0; row < n_rows; row++) {
            const float *query = q + (size_t)row * (size_t)s->head_dim;
            float *score = &scores[row * TQKV__TILE + j];
            if (!add) *score = 0.0f;
            for (int d = 0; d < s->head_dim; d += most)
                *score += tqkv__dot(query + d, key + d, s->head_dim - d < most ? s->head_dim - d : most);
        }
    }
}

static void tqkv__value_tile_scalar(const tqkv__stream *s, int kv_head, const tqkv__segment *segment,
                                    const float *weights, int n_rows, float *scaled, float *out)
{
    (void)scaled; /* for vectors */
    float value[TQKV_MAX_HEAD_DIM];
    for (int j = 0; j < segment->n; j++) {
        tqkv__decode_row(s, tqkv__codes_at(s, kv_head, segment->slot + j),
                         tqkv__norms_at(s, kv_head, segment->slot + j), value);
        for (int row = 0; row < n_rows; row++) {
            const float weight = weights[row * TQKV__TILE + j];
            float *sum = out + (size_t)row * (size_t)s->head_dim;
            if (weight == 0.0f) continue;
            for (int d = 0; d < s->head_dim; d++) sum[d] += weight * value[d];
        }
    }
}

static void tqkv__reorder_scalar(const tqkv__stream *s, int columns, bool decoded, const float *from, float *to)
{
    (void)columns;
    (void)decoded;
    memmove(to, from, (size_t)s->head_dim * sizeof(float));
}

static bool tqkv__span_has(const tqkv__span *span, int j)
{
    return j >= span->from && j < span->to && !(span->hidden >> j & 1);
}

static void tqkv__softmax_row_scalar(const tqkv__attention *a, const tqkv__span *span, float offset, float *scores,
                                     float *max, float *sum, float *out)
{
    float largest = *max, total = 0.0f;
    const bool seen = span->to > span->from;
    if (!seen)
        for (int j = 0; j < TQKV__TILE; j++) scores[j] = 0.0f;
    if (!seen) return; /* the maximum may still be -infinity */
    for (int j = span->from; j < span->to; j++) {
        if (!tqkv__span_has(span, j)) continue;
        if (a->call.softcap > 0.0f) scores[j] = a->call.softcap * tanhf((scores[j] + offset) / a->call.softcap);
        if (scores[j] > largest) largest = scores[j];
    }
    if (largest > *max) {
        const float shrink = expf(*max - largest); /* 0 for the first tile, where max is -INFINITY */
        for (int d = 0; d < a->value_dim; d++) out[d] *= shrink;
        *sum *= shrink;
        *max = largest;
    }
    for (int j = 0; j < TQKV__TILE; j++) {
        scores[j] = tqkv__span_has(span, j) ? expf(scores[j] - largest) : 0.0f;
        total += scores[j];
    }
    *sum += total;
}

static void tqkv__softmax_tile_scalar(const tqkv__attention *a, const tqkv__span *spans, const float *offsets,
                                      int n_rows, float *scores, float *max, float *sum, float *out)
{
    for (int row = 0; row < n_rows; row++)
        tqkv__softmax_row_scalar(a, &spans[row], offsets[row], scores + row * TQKV__TILE, &max[row], &sum[row],
                                 out + (size_t)row * (size_t)a->value_dim);
}

/* Returns what the sum of a stretch loses to the maximum of a piece of it, as the exponent of a factor. */
static inline float tqkv__loss(float max, float piece_max)
{
    return piece_max > max ? TQKV__AS_FLOAT(max - piece_max) : 0.0f;
}

static void tqkv__end_piece_scalar(int n_rows, int value_dim, const tqkv__sums *piece, const tqkv__sums *sums)
{
    for (int row = 0; row < n_rows; row++) {
        if (piece->sum[row] == 0.0f) continue;
        const float factor = tqkv__exp(tqkv__loss(sums->max[row], piece->max[row]));
        float *added = piece->out + (size_t)row * (size_t)value_dim, *to = sums->out + (size_t)row * (size_t)value_dim;
        for (int d = 0; d < value_dim; d++) to[d] = tqkv__fma(to[d], factor, added[d]);
        memset(added, 0, (size_t)value_dim * sizeof(float));
        sums->sum[row] = tqkv__fma(sums->sum[row], factor, piece->sum[row]);
        sums->max[row] = piece->max[row];
        piece->sum[row] = 0.0f;
    }
}

static void tqkv__sum_heads_scalar(const float *scores, const float *weights, const float *offsets, bool relu,
                                   int n_rows, float *sums)
{
    for (int row = 0; row < n_rows; row++, scores += TQKV__TILE)
        for (int j = 0; j < TQKV__TILE; j++) {
            const float score = TQKV__AS_FLOAT(scores[j] + offsets[row]);
            sums[j] = tqkv__fma(weights[row], relu && score < 0.0f ? 0.0f : score, sums[j]);
        }
}

/* Asks for codes that will be read soon: the next tile's, while this tile is computed. Nearer requests come too late;
   farther ones push out what is in use (32k positions: 1.1 to 1.5 times slower at half or twice the distance). They go
   to the L2 cache: on a Zen 4 core F16 is then twice and I8 1.6 times as fast as with requests to the L1, to which few
   lines can be on their way (D=128, 32k). Formats with a field of upper bits take the L1: they wait for look-ups and
   not for memory (TQ5 1.3 times, TQ6 1.2 times as fast there). cache is a constant. */
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

static const tqkv__isa tqkv__isa_scalar = {"scalar",
                                           1,
                                           1,
                                           &tqkv__codec_scalar,
                                           tqkv__reorder_scalar,
                                           tqkv__score_tile_scalar,
                                           tqkv__softmax_tile_scalar,
                                           tqkv__end_piece_scalar,
                                           tqkv__value_tile_scalar,
                                           tqkv__sum_heads_scalar};

/* >>set: what an instruction set provides, in plain C or by vectors. Which one is in use >>isa-code decides. */

struct tqkv__attention;
struct tqkv__quantiser;
struct tqkv__row;

/* The encoding functions of an instruction set; every set gives the same bytes. */
typedef struct tqkv__codec {
    bool (*rows_finite)(tqkv_type type, const void *x, size_t n); /* n: a multiple of head_dim */
    uint32_t (*largest_bits)(const float *x, size_t n);           /* likewise: of the largest magnitude */
    void (*invert)(const float *scales, int n, float *inverses);  /* likewise: 1 / scale, rounded once */
    void (*widen)(tqkv_type type, const void *src, const float *center, const float *inverses, int n, float *row);
    void (*narrow)(tqkv_type type, const float *row, int n, void *dst);
    void (*rotate)(float *x, int head_dim);
    void (*unrotate)(float *y, int head_dim);
    void (*encode_rows)(const tqkv__stream *s, const struct tqkv__quantiser *q, const struct tqkv__row *rows,
                        int n_rows);
} tqkv__codec;

/* Finds the codes of a row. scales: of its norms, then the factors of a search; squares: of the codes' centroids, for
   tqkv__correct_norms. y: [head_dim], scales, squares: [norms_per_row], codes: [head_dim] and room for 64 */
typedef void tqkv__code_row(const tqkv__stream *s, const struct tqkv__quantiser *q, const float *y, float *scales,
                            float *squares, uint8_t *codes);

static const tqkv__codec *tqkv__codec_for(int head_dim);

static bool tqkv__channels_finite(const tqkv__stream *s, const float *x)
{
    return tqkv__codec_for(s->head_dim)->rows_finite(TQKV_TYPE_F32, x, (size_t)s->n_kv_heads * (size_t)s->head_dim);
}

/* Returns the inverses by which encoding multiplies the channels of the heads [first, first + n): those that the stream
   keeps, or in room: [n][head_dim]. NULL without a scale */
static const float *tqkv__inverses_of(const tqkv__stream *s, int first, int n, float *room)
{
    if (s->inverses || !s->channel_scale) return tqkv__of_head(s, s->inverses, first);
    tqkv__codec_for(s->head_dim)->invert(tqkv__scale_of(s, first), n * s->head_dim, room);
    return room;
}

/* Slots of a tile in one stream: [slot, slot + n). The codes `ahead` slots further on will be read next. */
typedef struct tqkv__segment {
    int slot, n, ahead;
} tqkv__segment;

/* The positions of a tile that a row sees: [from, to) without those whose bits are set. */
typedef struct tqkv__span {
    int from, to;
    uint64_t hidden;
} tqkv__span;

/* Unnormalised attention of some rows. out: [n_rows][value_dim], max, sum: [n_rows] */
typedef struct tqkv__sums {
    float *out, *max, *sum;
} tqkv__sums;

/* The functions of attention; every set gives the same bits. */
typedef struct tqkv__kernels {
    /* Makes integers of a query, in an order of the set's own, with their unit. query, to: [head_dim] */
    void (*round_query)(const tqkv__stream *s, const float *query, float *to);
    /* scores[row][j] (+)= q[row] . key[slot + j] for j < n, with the segment's slot and n; add: to the scores of
       another part of the keys. q: [n_rows][head_dim], scores: [n_rows][TQKV__TILE] */
    void (*score_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, const float *q, int n_rows,
                       bool add, float *scores);
    /* Turns the scores in each row's span into weights exp(score - max) and the others into 0; scales the row's sums to
       the new maximum. offsets are added to the scores before a softcap. spans, offsets, max, sum: [n_rows], scores:
       [n_rows][TQKV__TILE], out: [n_rows][value_dim] */
    void (*softmax_tile)(const struct tqkv__attention *a, const tqkv__span *spans, const float *offsets, int n_rows,
                         float *scores, float *max, float *sum, float *out);
    /* Adds the sums of a piece to those of its stretch, each rounded once, and clears them for the next piece, whose
       maximum goes on from here. */
    void (*end_piece)(int n_rows, int value_dim, const tqkv__sums *piece, const tqkv__sums *sums);
    /* out[row] += sum_j weights[row][j] * value[slot + j] for j < n. A weight of 0 adds nothing to integers, even
       beside a NaN norm; for floats see tqkv__add_values. weights, scaled (scratch): [n_rows][TQKV__TILE] */
    void (*value_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, const float *weights,
                       int n_rows, float *scaled, float *out);
    /* sums[j] += weights[row] * f(scores[row][j] + offsets[row]), row after row, each rounded once; f: see >>index.
       weights, offsets: [n_rows], scores: [n_rows][TQKV__TILE], sums: [TQKV__TILE] */
    void (*sum_heads)(const float *scores, const float *weights, const float *offsets, bool relu, int n_rows,
                      float *sums);
} tqkv__kernels;

typedef struct tqkv__isa {
    const char *name;
    int lanes; /* floats in a vector */
    const tqkv__codec *codec;
    const tqkv__kernels *kernels; /* NULL: by the products that the processor has */
} tqkv__isa;

static const tqkv__isa *tqkv__isa_for(int head_dim);

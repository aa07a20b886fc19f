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

/* The context is cut into stretches at multiples of 2048 positions, and these into pieces. Each has its own softmax and float
   sums, merged in the order of the positions: the error does not grow with the context as in one long sum, not even if
   all additions of equal values are rounded to the same side. A query's bits depend only on its positions, not on
   other queries or on tasks. A merge costs as much as half a position. */
#define TQKV__STRETCH 2048
#define TQKV__PIECE   256

/* The scores of a tile: the sum of those of the parts of the keys, in their order. q: as tqkv__arrange_queries gives them */
static void tqkv__score_tile(tqkv__tile *tile, const float *q, int n_rows)
{
    const tqkv__attention *a = tile->streams;
    float *scores = tile->scores + tile->begin;
    const int before = tile->place.keys == &a->keys ? 0 : a->key_dim; /* dimensions of q before those for halves */
    a->isa->score_tile(tile->place.keys, tile->kv_head, &tile->keys, q + (size_t)n_rows * (size_t)before, n_rows, false,
                       scores);
    if (!a->call.tail) return;
    a->isa->score_tile(&a->tail, tile->kv_head, &tile->tail, q + (size_t)n_rows * (size_t)a->keys.head_dim, n_rows,
                       true, scores);
}

/* Sums of values have the order of the stream that is added to them: brings them into that of another. */
static void tqkv__turn_sums(const tqkv__attention *a, const tqkv__stream *from, const tqkv__stream *to, int n_rows,
                            float *out)
{
    float turned[TQKV_MAX_HEAD_DIM];
    if (a->isa->lanes == 1 || (from->main_bits < 8) == (to->main_bits < 8)) return;
    for (int row = 0; row < n_rows; row++, out += a->value_dim) {
        if (from->main_bits < 8)
            tqkv__to_natural(a->isa, from, out, turned);
        else
            tqkv__to_decoded(a->isa, to, out, turned);
        memcpy(out, turned, (size_t)a->value_dim * sizeof(float));
    }
}

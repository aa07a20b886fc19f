/* >>query: a row of a call: its query, its centres, its result. */

typedef struct tqkv__request {
    const tqkv__attention *a;
    const void *q; /* the caller's, as out, max and sum */
    void *out;
    float *max, *sum;             /* NULL: finish the rows */
    tqkv__range slice;            /* the positions looked at */
    tqkv__range seen;             /* by some query; of lists: ranks */
    int64_t stretch, n_stretches; /* the first stretch, and their number */
    tqkv__range kept;             /* positions of the first stretch, apart from the others; empty: there is none */
    int n_rows; /* of a KV head that may share an item: all of them, or with a list those of a query */
    int rows_each, n_items;
    int first_unit;       /* units of the requests before, in this wave */
    int64_t wave, n_wave; /* spread: the first stretch in this wave, and their number */
    size_t sums_floats;   /* sums of all rows */
    float *total, *now;   /* spread: sums of all earlier waves; [n_wave]: of the stretches in this wave */
} tqkv__request;

static size_t tqkv__caller_row(const tqkv__attention *a, const tqkv__item *item, int i)
{
    const int row = item->first_row + i;
    return (size_t)(row / a->group) * (size_t)a->call.n_heads + (size_t)(item->kv_head * a->group + row % a->group);
}

static size_t tqkv__row_begin(const tqkv__attention *a, tqkv_strides strides, size_t row)
{
    const size_t n_heads = (size_t)a->call.n_heads;
    return row / n_heads * strides.token + row % n_heads * strides.head;
}

static const void *tqkv__query_at(const tqkv__attention *a, const void *q, size_t row)
{
    return (const uint8_t *)q + tqkv__row_begin(a, a->call.query_strides, row) * tqkv__type_size(a->call.query_type);
}

/* Returns a part of the caller's query: [head_dim] of part 0 or 1 of the keys */
static const void *tqkv__query_part(const tqkv__attention *a, const void *query, int part)
{
    return (const uint8_t *)query + (part ? (size_t)a->keys.head_dim * tqkv__type_size(a->call.query_type) : 0);
}

/* Brings part 0 or 1 of an item's queries into the basis of a stream, times scale, as floats or integers; returns
   whether there are second digits. arranged, halves (as floats, or NULL), rest: [n_rows][head_dim] */
static bool tqkv__arrange_part(const tqkv__attention *a, const tqkv__item *item, const void *q, int part,
                               const tqkv__stream *s, float *arranged, float *halves, float *rest)
{
    TQKV__ALIGNED float natural[TQKV_MAX_HEAD_DIM];
    bool digits = false;
    for (int i = 0; i < item->n_rows; i++, arranged += s->head_dim) {
        const void *query = tqkv__query_at(a, q, tqkv__caller_row(a, item, i));
        const bool original = a->call.query_basis == TQKV_ORIGINAL;
        const float *scale = original ? tqkv__scale_of(s, item->kv_head) : NULL;
        a->isa->codec->widen(a->call.query_type, tqkv__query_part(a, query, part), NULL, scale, s->head_dim, natural);
        if (s->rotated && original) a->isa->codec->rotate(natural, s->head_dim);
        tqkv__scale(natural, s->head_dim, a->call.scale);
        if (halves) memcpy(halves + (size_t)i * (size_t)s->head_dim, natural, (size_t)s->head_dim * sizeof(float));
        if (tqkv__in_floats(s)) {
            memcpy(arranged, natural, (size_t)s->head_dim * sizeof(float));
            continue;
        }
        a->kernels->round_query(s, natural, arranged);
        float *second = rest + (size_t)i * (size_t)s->head_dim;
        if (tqkv__round_rest(natural, s->head_dim)) {
            a->kernels->round_query(s, natural, second);
            digits = true;
        } else {
            memset(second, 0, (size_t)s->head_dim * sizeof(float));
        }
    }
    return digits;
}

static size_t tqkv__query_floats(const tqkv__attention *a) { return tqkv__first_floats(a) + (size_t)a->key_dim; }

/* Returns which parts have second digits: 1 for the keys, 2 for the tail. arranged: [n_rows][head_dim] of the keys, of
   the tail and, if some keys are halves, of the keys for these; then the second digits */
static int tqkv__arrange_queries(const tqkv__attention *a, const tqkv__item *item, const void *q, float *arranged)
{
    const size_t n_rows = (size_t)item->n_rows, of_keys = n_rows * (size_t)a->keys.head_dim;
    float *rest = arranged + n_rows * tqkv__first_floats(a);
    float *halves = tqkv__has_exact_keys(a) ? arranged + n_rows * (size_t)a->key_dim : NULL;
    int digits = tqkv__arrange_part(a, item, q, 0, &a->keys, arranged, halves, rest) ? 1 : 0;
    if (a->call.tail && tqkv__arrange_part(a, item, q, 1, &a->tail, arranged + of_keys, NULL, rest + of_keys))
        digits |= 2;
    return digits;
}

/* Returns q.c, for the centre c of part 0 or 1 of the keys, in the query's basis. query: [key_dim], the caller's */
static TQKV__NOINLINE double tqkv__center_product(const tqkv__attention *a, int kv_head, int part, const void *query)
{
    float q[TQKV_MAX_HEAD_DIM]; /* first room for the inverses */
    double c[TQKV_MAX_HEAD_DIM], sum = 0.0;
    const bool coded = a->call.query_basis == TQKV_ROTATED;
    const tqkv__stream *s = part ? &a->tail : &a->keys;
    const float *center = tqkv__center_of(s, kv_head);
    if (!center) return 0.0;
    const float *inverses = coded ? tqkv__inverses_of(s, kv_head, 1, q) : NULL;
    for (int d = 0; d < s->head_dim; d++)
        c[d] = (double)(inverses ? tqkv__rounded(center[d] * inverses[d]) : center[d]);
    if (coded && s->rotated) tqkv__rotate_double(c, s->head_dim);
    a->isa->codec->widen(a->call.query_type, tqkv__query_part(a, query, part), NULL, NULL, s->head_dim, q);
    for (int d = 0; d < s->head_dim; d++) sum += tqkv__rounded_double(c[d] * (double)q[d]);
    return sum;
}

/* Returns scale * q.c of all parts: what is missing in all scores of a row. In double: it may be a thousand times what
   differs between scores. query: [key_dim] */
static double tqkv__center_score(const tqkv__attention *a, int kv_head, const void *query)
{
    const double tail = a->call.tail ? tqkv__center_product(a, kv_head, 1, query) : 0.0;
    return (tqkv__center_product(a, kv_head, 0, query) + tail) * (double)a->call.scale;
}

/* Finds what centres add to an item's scores; offsets: [n_rows], read if there is a softcap */
static void tqkv__find_offsets(const tqkv__attention *a, const tqkv__item *item, const void *q, float *offsets)
{
    for (int i = 0; i < item->n_rows; i++) {
        const void *row = tqkv__query_at(a, q, tqkv__caller_row(a, item, i));
        offsets[i] = a->call.softcap > 0.0f ? (float)tqkv__center_score(a, item->kv_head, row) : 0.0f;
    }
}

/* Adds what the keys' centre adds to all scores of a row. It belongs to the maximum, where a float has lost the last
   bits of the sum; they go into the weights. out: [value_dim] */
static void tqkv__shift_scores(const tqkv__attention *a, double score, float *out, float *max, float *sum)
{
    if (*sum == 0.0f) return;
    const double exact = (double)*max + score;
    const float rounded = TQKV__AS_FLOAT((float)exact), rest = (float)(exact - (double)rounded);
    const float factor = tqkv__exp(rest - rest == 0.0f ? rest : NAN); /* the score is beyond the range of float */
    *sum = TQKV__AS_FLOAT(*sum * factor);
    tqkv__scale(out, a->value_dim, factor);
    *max = rounded;
}

/* Finishes a row: out = out / (sum + exp(sink - max)) in the basis of outputs, plus the values' centre; zeros if the
   row saw nothing. unrotate: the basis changes. center: in the basis of outputs, or NULL; out: [value_dim] */
static TQKV__NOINLINE void tqkv__finish_row(const tqkv__attention *a, int head, bool unrotate, const float *center,
                                            float *out, float max, float sum)
{
    if (sum == 0.0f) { /* rotated back, half of the zeros would be negative */
        memset(out, 0, (size_t)a->value_dim * sizeof(float));
        return;
    }
    const float sink = a->call.sinks ? a->call.sinks[head] : -INFINITY;
    const float largest = sink > max ? sink : max, keep = tqkv__exp(TQKV__AS_FLOAT(max - largest));
    const float of_sink = tqkv__exp(TQKV__AS_FLOAT(sink - largest));
    const float all = tqkv__sum_of_products(sum, keep, of_sink, 1.0f);
    tqkv__scale(out, a->value_dim, TQKV__AS_FLOAT(keep / all));
    if (unrotate) a->isa->codec->unrotate(out, a->value_dim);
    if (a->call.output_basis == TQKV_ORIGINAL) tqkv__apply_scale(&a->values, head / a->group, out);
    const float share = TQKV__AS_FLOAT(tqkv__rounded(sum * keep) / all); /* of the positions in all weights */
    for (int d = 0; center && d < a->value_dim; d++) out[d] = TQKV__AS_FLOAT(out[d] + tqkv__rounded(share * center[d]));
}

/* Returns the values' centre of a head in the basis of outputs, behind the scale, or NULL; room: [TQKV_MAX_HEAD_DIM] */
static const float *tqkv__output_center(const tqkv__attention *a, int kv_head, float *room)
{
    if (!a->values.center || a->call.output_basis == TQKV_ORIGINAL) return tqkv__center_of(&a->values, kv_head);
    memset(room, 0, (size_t)a->value_dim * sizeof(float));
    tqkv__add_center(&a->values, kv_head, true, room);
    return room;
}

/* Makes a row the same on all processors, see tqkv__one_nan. out: [value_dim] */
static void tqkv__settle_row(const tqkv__attention *a, float *out, float *max, float *sum)
{
    for (int d = 0; d < a->value_dim; d++) out[d] = tqkv__one_nan(out[d]);
    *max = tqkv__one_nan(TQKV__AS_FLOAT(*max + 0.0f)); /* second digits of other rows turn -0 into 0 */
    *sum = tqkv__one_nan(*sum);
}

/* Writes an item's sums to the caller: finished and rounded, or as those of a slice, which are rotated whatever the
   values' format. */
static TQKV__NOINLINE void tqkv__deliver(const tqkv__request *request, const tqkv__item *item, const tqkv__sums *sums)
{
    const tqkv__attention *a = request->a;
    float room[TQKV_MAX_HEAD_DIM];
    const float *center = tqkv__output_center(a, item->kv_head, room);
    TQKV__ALIGNED float wide[TQKV_MAX_HEAD_DIM];
    const tqkv_type type = request->max ? TQKV_TYPE_F32 : a->call.output_type;
    const tqkv_strides strides = {(size_t)a->call.n_heads * (size_t)a->value_dim, (size_t)a->value_dim}; /* of slices */
    const bool scored =
        (a->keys.center || a->tail.center) && a->call.softcap == 0.0f && (request->max || a->call.sinks);
    for (int i = 0; i < item->n_rows; i++) {
        const size_t row = tqkv__caller_row(a, item, i);
        const size_t begin = tqkv__row_begin(a, request->max ? strides : a->call.output_strides, row);
        void *to = (uint8_t *)request->out + begin * tqkv__type_size(type);
        float *out = type == TQKV_TYPE_F32 ? (float *)to : wide, max = sums->max[i], sum = sums->sum[i];
        const double score = scored ? tqkv__center_score(a, item->kv_head, tqkv__query_at(a, request->q, row)) : 0.0;
        const float *from = sums->out + (size_t)i * (size_t)a->value_dim;
        /* Codes of masked slots have the weight 0, and leave their signs in sums that underflow: -0 becomes 0. */
        for (int d = 0; d < a->value_dim; d++) out[d] = TQKV__AS_FLOAT(from[d] + 0.0f);
        if (scored) tqkv__shift_scores(a, score, out, &max, &sum);
        if (!request->max)
            tqkv__finish_row(a, (int)(row % (size_t)a->call.n_heads), a->unrotate_output, center, out, max, sum);
        else if (!a->values.rotated && sum != 0.0f)
            a->isa->codec->rotate(out, a->value_dim);
        tqkv__settle_row(a, out, &max, &sum);
        if (request->max) {
            request->max[row] = max;
            request->sum[row] = sum;
        }
        if (out == wide) a->isa->codec->narrow(type, wide, a->value_dim, to);
    }
}

/* >>self-test: one cache on the GPU, one on the processor */

enum {
    TQKV__TRIAL_TOKENS = 48,
    TQKV__TRIAL_RAW = 12,
    TQKV__TRIAL_QUERIES = 3,
    TQKV__TRIAL_BLOCK = 4,
    TQKV__TRIAL_LISTED = 5
};
enum { TQKV__TRIAL_BLOCKS = TQKV__TRIAL_TOKENS / TQKV__TRIAL_BLOCK };
enum { TQKV__TRIAL_K, TQKV__TRIAL_V, TQKV__TRIAL_Q, TQKV__TRIAL_OUT, TQKV__TRIAL_EXPECTED, TQKV__TRIAL_PARTS };

typedef struct tqkv__trial {
    tqkv_metal *m;
    tqkv_cache_desc desc;
    tqkv_cache *gpu, *own;
    char *parts[TQKV__TRIAL_PARTS]; /* rows of desc.type, in one block */
    size_t sizes[TQKV__TRIAL_PARTS];
    tqkv_metal_store store; /* that the GPU decodes, to these rows */
    tqkv_metal_buffer rows;
} tqkv__trial;

/* A value of a row. Halves are of whatever size: their exponents lie 112 lower. */
static float tqkv__trial_value(tqkv_type type, const char *at)
{
    uint32_t bits = 0;
    float value;
    memcpy(&bits, at, tqkv__value_size(type)); /* as GPU and processor, little-endian */
    if (type == TQKV_TYPE_BF16) bits <<= 16;
    if (type == TQKV_TYPE_F16) bits = (bits & 0x8000u) << 16 | (bits & 0x7fffu) << 13;
    memcpy(&value, &bits, sizeof value);
    return type == TQKV_TYPE_F16 ? value * 5.192296858534828e33f : value;
}

/* Values from -2 to 2 of seven bits, which all types have; none is 0. */
static void tqkv__trial_fill(tqkv_type type, size_t size, uint32_t seed, char *rows)
{
    for (size_t i = 0; i < size; i += tqkv__value_size(type)) {
        seed = seed * 1664525u + 1013904223u;
        const float value = (float)(seed >> 25) / 32.0f - 127.0f / 64.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (type == TQKV_TYPE_BF16) bits >>= 16;
        if (type == TQKV_TYPE_F16) bits = (bits >> 16 & 0x8000u) | ((bits >> 13 & 0x3ffffu) - (112u << 10));
        memcpy(rows + i, &bits, tqkv__value_size(type));
    }
}

static tqkv_result tqkv__trial_differs(const tqkv__trial *t, const char *what, double by, const char *unit)
{
    const tqkv_attention view = tqkv__stores_of(t->own);
    const tqkv_store *tail = view.tail;
    return tqkv__fail(t->m, TQKV_METAL_ERROR,
                      "self-test: %s of head_dim %d, %s/%s%s%s differ from the processor's by %.3g%s", what,
                      t->desc.head_dim, tqkv_format_name(view.keys->format), tqkv_format_name(view.values->format),
                      tail ? " and " : "", tail ? tqkv_format_name(tail->format) : "", by, unit);
}

static tqkv_result tqkv__trial_bytes(const tqkv__trial *t, const char *what, const void *gpu, const void *own,
                                     size_t size)
{
    size_t n = 0;
    for (size_t i = 0; i < size; i++) n += ((const char *)gpu)[i] != ((const char *)own)[i];
    return n ? tqkv__trial_differs(t, what, 100.0 * (double)n / (double)size, "% of their bytes") : TQKV_OK;
}

/* Whether the processor's attention has other centroids for a stream than the GPU's. */
static bool tqkv__trial_rounds(const tqkv_store *s)
{
    return s && s->format != TQKV_F16 && s->format != TQKV_I8 && s->format != TQKV_TQ8;
}

/* Returns what outputs may differ by: the processor multiplies integers, and each is rounded to the type of rows. */
static double tqkv__trial_limit(const tqkv__trial *t, tqkv_type type)
{
    const tqkv_attention view = tqkv__stores_of(t->own);
    const tqkv_store *keys = view.keys, *tail = view.tail;
    const double root = sqrt((double)(keys->head_dim + (tail ? tail->head_dim : 0)));
    const double deviation = t->desc.scale != 0.0f ? 1.4 * fabs((double)t->desc.scale) * root : 1.4; /* of scores */
    const bool rounds = tqkv__trial_rounds(keys) || tqkv__trial_rounds(view.values) || tqkv__trial_rounds(tail);
    const double of_type = type == TQKV_TYPE_F32 ? 0.0 : type == TQKV_TYPE_F16 ? 1e-3 : 8e-3;
    return of_type + (rounds ? 0.015 : 3e-4) * (1.0 + deviation);
}

static tqkv_result tqkv__trial_values(const tqkv__trial *t, const char *what, tqkv_type type, size_t n, const void *gpu,
                                      const void *own)
{
    const double limit = tqkv__trial_limit(t, type);
    const size_t size = n * tqkv__value_size(type);
    double wrong = 0, all = 0;
    for (size_t i = 0; i < size; i += tqkv__value_size(type)) {
        const double expected = (double)tqkv__trial_value(type, (const char *)own + i),
                     difference = (double)tqkv__trial_value(type, (const char *)gpu + i) - expected;
        wrong += difference * difference;
        all += expected * expected;
    }
    return wrong <= limit * limit * all ? TQKV_OK : tqkv__trial_differs(t, what, sqrt(wrong / all), " of their length");
}

/* A store of a cache of the context. */
static tqkv_result tqkv__trial_store(tqkv_metal *m, const tqkv_store *s, tqkv_metal_store *out)
{
    memset(out, 0, sizeof *out);
    out->shape = *s;
    tqkv_result r = tqkv_metal_find(m, s->codes, &out->codes);
    if (r == TQKV_OK && s->norms_size) r = tqkv_metal_find(m, s->norms, &out->norms);
    if (r == TQKV_OK && s->center) r = tqkv_metal_find(m, s->center, &out->center);
    return r == TQKV_OK && s->channel_scale ? tqkv_metal_find(m, s->channel_scale, &out->channel_scale) : r;
}

static tqkv_result tqkv__record_trial(void *user, tqkv_metal_object encoder)
{
    const tqkv__trial *t = (const tqkv__trial *)user;
    tqkv_metal_plan plan;
    tqkv_metal_plan_decode(&t->store, 0, TQKV__TRIAL_TOKENS, TQKV_ORIGINAL, t->rows, &plan);
    return tqkv_metal_record(t->m, encoder, &plan);
}

/* names: of the codes and of the decoded rows. The source is not needed any more. */
static tqkv_result tqkv__try_store(tqkv__trial *t, const tqkv_store *gpu, const tqkv_store *own,
                                   const char *const names[2])
{
    char *decoded = t->parts[TQKV__TRIAL_K];
    const size_t size =
        (size_t)TQKV__TRIAL_TOKENS * (size_t)own->n_kv_heads * (size_t)own->head_dim * tqkv__value_size(t->desc.type);
    tqkv_result r = tqkv__trial_bytes(t, names[0], gpu->codes, own->codes, own->codes_size);
    if (r == TQKV_OK) r = tqkv__trial_bytes(t, names[0], gpu->norms, own->norms, own->norms_size);
    if (r == TQKV_OK) r = tqkv__trial_store(t->m, gpu, &t->store);
    if (r != TQKV_OK) return r;
    tqkv__memory *block = tqkv__take_staging(t->m, 1, &size, &t->rows);
    if (!block) return TQKV_OUT_OF_MEMORY;
    r = tqkv__run_as(t->m, "self-test", tqkv__record_trial, t);
    if (r == TQKV_OK) r = tqkv_decode(own, 0, TQKV__TRIAL_TOKENS, TQKV_ORIGINAL, decoded);
    if (r == TQKV_OK) r = tqkv__trial_bytes(t, names[1], block->begin, decoded, size);
    tqkv__give_back(t->m, block);
    return r;
}

static tqkv_result tqkv__try_stores(tqkv__trial *t)
{
    static const char *const names[3][2] = {
        {"keys", "decoded keys"}, {"values", "decoded values"}, {"tails", "decoded tails"}};
    const tqkv_attention of_gpu = tqkv__stores_of(t->gpu), of_own = tqkv__stores_of(t->own);
    const tqkv_store *const gpu[] = {of_gpu.keys, of_gpu.values, of_gpu.tail}, *const own[] = {of_own.keys,
                                                                                               of_own.values,
                                                                                               of_own.tail};
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < 3 && r == TQKV_OK; i++)
        if (own[i] && (i != 1 || !t->desc.shared)) r = tqkv__try_store(t, gpu[i], own[i], names[i]);
    return r;
}

static tqkv_result tqkv__try_attention(const tqkv__trial *t, int n_queries)
{
    const size_t n = t->sizes[TQKV__TRIAL_OUT] / TQKV__TRIAL_QUERIES / tqkv__value_size(t->desc.type);
    char *out = t->parts[TQKV__TRIAL_OUT], *expected = t->parts[TQKV__TRIAL_EXPECTED];
    tqkv_result r = tqkv_cache_attend(t->gpu, t->parts[TQKV__TRIAL_Q], n_queries, out);
    if (r == TQKV_OK) r = tqkv_cache_attend(t->own, t->parts[TQKV__TRIAL_Q], n_queries, expected);
    if (r != TQKV_OK) return r;
    return tqkv__trial_values(t, n_queries > 1 ? "outputs of three queries" : "outputs of one query", t->desc.type,
                              n * (size_t)n_queries, out, expected);
}

/* The keys of the first KV head as those of an index, its choice, and attention to the blocks that it chose. Where an
   index cannot be, the list is the processor's. Arrays lie one behind the other in a block of shared memory. */
typedef struct tqkv__trial_list {
    const tqkv__trial *t;
    bool indexed;
    tqkv_metal_store keys, values, tail, index_keys;
    tqkv_metal_attention a;
    tqkv_metal_index x;
    tqkv_metal_buffer q, scores, list, scratch, out;
    tqkv__memory *block;
} tqkv__trial_list;

static tqkv_result tqkv__record_trial_list(void *user, tqkv_metal_object encoder)
{
    const tqkv__trial_list *l = (const tqkv__trial_list *)user;
    tqkv_metal *m = l->t->m;
    tqkv_metal_plan plan;
    tqkv_result r = TQKV_OK;
    if (l->indexed) {
        tqkv_metal_plan_index_scores(&l->x, l->q, l->scores, &plan);
        r = tqkv_metal_record(m, encoder, &plan);
        tqkv_metal_plan_index_choose(&l->x, l->scores, TQKV__TRIAL_LISTED, l->scratch, l->list, &plan);
        if (r == TQKV_OK) r = tqkv_metal_record(m, encoder, &plan);
    }
    tqkv_metal_plan_attend(&l->a, l->q, l->scratch, l->out, &plan);
    return r == TQKV_OK ? tqkv_metal_record(m, encoder, &plan) : r;
}

/* An attention to a list, as the processor takes it. */
static tqkv_attention tqkv__trial_view(const tqkv_cache *c, const int32_t *list)
{
    tqkv_attention a = tqkv__stores_of(c);
    a.n_queries = TQKV__TRIAL_QUERIES;
    a.first.n = a.last.n = 0;
    a.list.rows = list;
    a.list.length = TQKV__TRIAL_LISTED;
    a.list.block = TQKV__TRIAL_BLOCK;
    return a;
}

static tqkv_result tqkv__open_trial_list(const tqkv__trial *t, tqkv__trial_list *l)
{
    const tqkv_attention view = tqkv__stores_of(t->gpu);
    const tqkv_store *keys = view.keys, *values = view.values, *tail = view.tail;
    memset(l, 0, sizeof *l);
    l->t = t;
    l->indexed = (keys->head_dim == 64 || keys->head_dim == 128) && tqkv__has_matrices(t->m);
    tqkv_result r = tqkv__trial_store(t->m, keys, &l->keys);
    if (r == TQKV_OK) r = tqkv__trial_store(t->m, values, &l->values);
    if (r == TQKV_OK && tail) r = tqkv__trial_store(t->m, tail, &l->tail);
    l->a.attention = tqkv__trial_view(t->gpu, NULL);
    if (r == TQKV_OK && l->a.attention.sinks) r = tqkv_metal_find(t->m, l->a.attention.sinks, &l->a.sinks);
    l->a.keys = &l->keys;
    l->a.values = &l->values;
    l->a.tail = tail ? &l->tail : NULL;
    l->a.matrix_group = t->desc.matrix_group;
    l->index_keys = l->keys;
    l->index_keys.shape.n_kv_heads = 1;
    l->x.keys = &l->index_keys;
    l->x.index.n_heads = l->a.attention.n_heads;
    l->x.index.n_queries = TQKV__TRIAL_QUERIES;
    l->x.index.end = TQKV__TRIAL_TOKENS;
    l->x.index.block = TQKV__TRIAL_BLOCK;
    l->x.index.relu = true;
    l->x.index.query_type = t->desc.type;
    return r;
}

/* Divides a block, and writes q and a list into it. */
static tqkv_result tqkv__fill_trial_list(tqkv__trial_list *l)
{
    const tqkv__trial *t = l->t;
    tqkv_metal_buffer staged[5];
    size_t sizes[] = {t->sizes[TQKV__TRIAL_Q], sizeof(float) * TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS,
                      sizeof(int32_t) * TQKV__TRIAL_QUERIES * TQKV__TRIAL_LISTED, 0, t->sizes[TQKV__TRIAL_OUT]};
    tqkv_metal_plan plan;
    l->a.list.buffer = t->m->unused; /* for now */
    tqkv_result r = tqkv_metal_plan_attend(&l->a, l->q, l->scratch, l->out, &plan);
    if (tqkv__planned(t->m, r, "self-test") != TQKV_OK) return r;
    sizes[3] = plan.scratch_size;
    l->block = tqkv__take_staging(t->m, 5, sizes, staged);
    if (!l->block) return TQKV_OUT_OF_MEMORY;
    l->q = staged[0];
    l->scores = staged[1];
    l->list = staged[2];
    l->scratch = staged[3];
    l->out = staged[4];
    memcpy(l->block->begin, t->parts[TQKV__TRIAL_Q], t->sizes[TQKV__TRIAL_Q]);
    for (int i = 0; i < TQKV__TRIAL_QUERIES; i++) {
        const int32_t row[TQKV__TRIAL_LISTED] = {0, 3 + i, 7, TQKV__TRIAL_BLOCKS - 1, -1};
        memcpy(l->block->begin + l->list.offset + (size_t)i * sizeof row, row, sizeof row);
    }
    l->a.list = l->list;
    return TQKV_OK;
}

/* The choice must be the same of the same scores. */
static tqkv_result tqkv__check_trial_index(const tqkv__trial_list *l)
{
    float expected[TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS], scores[TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS];
    int32_t list[TQKV__TRIAL_QUERIES * TQKV__TRIAL_LISTED];
    const tqkv__trial *t = l->t;
    tqkv_store keys = *tqkv__stores_of(t->own).keys;
    tqkv_index x = l->x.index;
    keys.n_kv_heads = 1;
    x.keys = &keys;
    memcpy(scores, l->block->begin + l->scores.offset, sizeof scores);
    tqkv_result r = tqkv_index_scores(&x, t->parts[TQKV__TRIAL_Q], expected);
    if (r == TQKV_OK)
        r = tqkv__trial_values(t, "scores of an index", TQKV_TYPE_F32, TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS, scores,
                               expected);
    if (r == TQKV_OK) r = tqkv_index_choose(&x, scores, TQKV__TRIAL_LISTED, list);
    return r == TQKV_OK ? tqkv__trial_bytes(t, "chosen blocks", l->block->begin + l->list.offset, list, sizeof list)
                        : r;
}

static tqkv_result tqkv__try_list(const tqkv__trial *t)
{
    tqkv__trial_list l;
    char *expected = t->parts[TQKV__TRIAL_EXPECTED];
    tqkv_result r = tqkv__open_trial_list(t, &l);
    if (r == TQKV_OK) r = tqkv__fill_trial_list(&l);
    if (r == TQKV_OK) r = tqkv__run_as(t->m, "self-test", tqkv__record_trial_list, &l);
    if (r == TQKV_OK && l.indexed) r = tqkv__check_trial_index(&l);
    if (r == TQKV_OK) {
        const tqkv_attention a = tqkv__trial_view(t->own, (int32_t *)(void *)(l.block->begin + l.list.offset));
        r = tqkv_attend(&a, t->parts[TQKV__TRIAL_Q], expected);
    }
    if (r == TQKV_OK)
        r = tqkv__trial_values(t, "outputs of a list", t->desc.type,
                               t->sizes[TQKV__TRIAL_OUT] / tqkv__value_size(t->desc.type),
                               l.block->begin + l.out.offset, expected);
    if (l.block) tqkv__give_back(t->m, l.block);
    return r;
}

static tqkv_result tqkv__open_trial(tqkv__trial *t)
{
    const tqkv_cache_desc *d = &t->desc;
    t->desc.metal = t->m;
    tqkv_result r = tqkv_cache_create(d, &t->gpu);
    t->desc.metal = NULL;
    if (r == TQKV_OK) r = tqkv_cache_create(d, &t->own);
    if (tqkv__planned(t->m, r, "self-test") != TQKV_OK) return r;
    const size_t width = tqkv__value_size(d->type), n_heads = (size_t)d->n_heads,
                 key_dim = (size_t)(d->head_dim + d->tail_dim),
                 value_dim = (size_t)(d->value_dim ? d->value_dim : d->head_dim);
    const size_t tokens = TQKV__TRIAL_TOKENS * (size_t)d->n_kv_heads * width,
                 queries = TQKV__TRIAL_QUERIES * n_heads * width;
    const size_t sizes[] = {tokens * key_dim, tokens * value_dim, queries * key_dim, queries * value_dim,
                            queries * value_dim};
    size_t all = 0;
    memcpy(t->sizes, sizes, sizeof sizes);
    for (int i = 0; i < TQKV__TRIAL_PARTS; i++) all += sizes[i];
    t->parts[0] = (char *)calloc(all, 1);
    if (!t->parts[0]) return tqkv__fail(t->m, TQKV_OUT_OF_MEMORY, "no memory for a self-test");
    for (int i = 1; i < TQKV__TRIAL_PARTS; i++) t->parts[i] = t->parts[i - 1] + sizes[i - 1];
    for (int i = TQKV__TRIAL_K; i <= TQKV__TRIAL_Q; i++)
        tqkv__trial_fill(d->type, sizes[i], 1u + (uint32_t)i, t->parts[i]);
    return TQKV_OK;
}

/* Both caches append `n` tokens from number `first` on. */
static tqkv_result tqkv__append_trial(const tqkv__trial *t, int first, int n)
{
    const size_t at = (size_t)first, all = TQKV__TRIAL_TOKENS;
    const char *k = t->parts[TQKV__TRIAL_K] + at * (t->sizes[TQKV__TRIAL_K] / all),
               *v = t->desc.shared ? NULL : t->parts[TQKV__TRIAL_V] + at * (t->sizes[TQKV__TRIAL_V] / all);
    const tqkv_result r = tqkv_cache_append(t->gpu, k, v, n);
    return r == TQKV_OK ? tqkv_cache_append(t->own, k, v, n) : r;
}

/* A cache that learns attends to its rows as they came before it encodes them. */
static tqkv_result tqkv__try_raw(const tqkv__trial *t)
{
    const tqkv_result r = tqkv__append_trial(t, 0, TQKV__TRIAL_RAW);
    return r == TQKV_OK ? tqkv__try_attention(t, TQKV__TRIAL_QUERIES) : r;
}

tqkv_result tqkv_metal_self_test(tqkv_metal *m, const tqkv_cache_desc *desc)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    if (!desc) return tqkv__planned(m, TQKV_INVALID_ARGUMENT, "self-test");
    tqkv__trial t = {.m = m, .desc = *desc};
    t.desc.capacity = TQKV__TRIAL_TOKENS;
    t.desc.ring = false;
    t.desc.window = desc->window ? TQKV__TRIAL_TOKENS / 2 : 0;
    t.desc.exact_first = desc->exact_first ? 5 : 0;
    t.desc.exact_last = desc->exact_last ? 9 : 0;
    tqkv_result r = tqkv__open_trial(&t);
    const int raw = desc->calibrate ? TQKV__TRIAL_RAW : 0;
    if (r == TQKV_OK && raw) r = tqkv__try_raw(&t);
    if (r == TQKV_OK) r = tqkv__append_trial(&t, raw, TQKV__TRIAL_TOKENS - raw);
    if (r == TQKV_OK) r = tqkv__try_stores(&t);
    if (r == TQKV_OK) r = tqkv__try_attention(&t, 1);
    if (r == TQKV_OK) r = tqkv__try_attention(&t, TQKV__TRIAL_QUERIES);
    if (r == TQKV_OK) r = tqkv__try_list(&t);
    free(t.parts[0]);
    tqkv_cache_destroy(t.gpu);
    tqkv_cache_destroy(t.own);
    return r;
}

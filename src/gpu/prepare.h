/* >>plan-prepare: what calls will need, planned ahead of time so that pipelines can be built. */

/* The last number of queries that can need a pipeline of its own: more of them fill all columns of a threadgroup. */
enum { TQKV__MOST_PREPARED = TQKV__MOST_MATRIX_COLUMNS(64) };

/* Who sees the plans. */
typedef struct tqkv__visitor {
    tqkv_metal_visit visit;
    void *user;
    tqkv_metal_plan plan;
} tqkv__visitor;

static tqkv_result tqkv__check_visit(tqkv_metal_visit visit, int max_queries)
{
    return visit && max_queries >= 0 ? TQKV_OK : TQKV__INVALID("visit is NULL, or max_queries negative");
}

/* Visits a plan. planned: the result of what made it */
static tqkv_result tqkv__visit(tqkv__visitor *v, tqkv_result planned)
{
    return planned == TQKV_OK ? v->visit(v->user, &v->plan) : planned;
}

/* Visits a plan as it is, and for a page table that is shorter than a tile where it is not, or the reverse. */
static tqkv_result tqkv__visit_tables(tqkv__visitor *v, tqkv_result planned)
{
    bool other = false;
    const tqkv_result r = tqkv__visit(v, planned);
    for (int i = 0; i < v->plan.n && r == TQKV_OK; i++) {
        tqkv_metal_dispatch *d = &v->plan.d[i];
        const bool attend = d->kernel.family == TQKV_METAL_ATTEND || d->kernel.family == TQKV_METAL_ATTEND_MATRIX;
        const int page_size = attend ? tqkv__attend_args_of(d).key_page_size : 0;
        if (!page_size || page_size >= TQKV__SIMD_WIDTH) continue;
        tqkv__plan_constant(d, TQKV_FC_SHORT_STORE, d->kernel.constants[TQKV_FC_SHORT_STORE] == 1 + false);
        other = true;
    }
    return other ? tqkv__visit(v, r) : r;
}

/* Visits a plan for contexts that are short, whose stretches are divided into strands, and for others. Only attention
   to codes has strands: it comes before that to the newest halves. */
static tqkv_result tqkv__visit_lengths(tqkv__visitor *v, tqkv_result planned)
{
    const tqkv_result r = tqkv__visit_tables(v, planned);
    for (int i = v->plan.n - 1; i >= 0 && r == TQKV_OK; i--) {
        tqkv_metal_dispatch *d = &v->plan.d[i];
        const uint8_t *constants = d->kernel.constants;
        const bool lanes = d->kernel.family == TQKV_METAL_ATTEND,
                   codes = constants[TQKV_FC_HALVES] != 1 + TQKV__NEWEST_HALVES;
        if ((!lanes && d->kernel.family != TQKV_METAL_ATTEND_MATRIX) || !codes) continue;
        if (!lanes && !tqkv__matrix_has_strands(d->kernel.head_dim * TQKV__DIM_UNIT, constants[TQKV_FC_COLUMNS] - 1))
            return r;
        tqkv__plan_constant(d, TQKV_FC_STRANDS, constants[TQKV_FC_STRANDS] == 1 + false);
        return tqkv__visit_tables(v, r);
    }
    return r;
}

/* Visits attention, alone and in batches. */
static tqkv_result tqkv__visit_attention(tqkv__visitor *v, tqkv_result planned, bool batches)
{
    const tqkv_result r = tqkv__visit_lengths(v, planned);
    if (r != TQKV_OK || !batches) return r;
    for (int i = 0; i < v->plan.n; i++) tqkv__plan_constant(&v->plan.d[i], TQKV_FC_BATCH, true);
    return tqkv__visit_lengths(v, r);
}

/* Visits what writes keys and values, or one of them. */
static tqkv_result tqkv__visit_encoding(tqkv__visitor *v, const tqkv_metal_store *keys, const tqkv_metal_store *values)
{
    const tqkv_metal_buffer none = {NULL, 0};
    if (!keys && !values) return TQKV_OK;
    return tqkv__visit(v, keys && values ? tqkv_metal_plan_encode_kv(keys, values, none, none, 0, 0, none, &v->plan)
                                         : tqkv_metal_plan_encode(keys ? keys : values, none, 0, 0, none, &v->plan));
}

/* Visits slices of an attention, their merge and their end. */
static tqkv_result tqkv__visit_slices(tqkv__visitor *v, const tqkv_metal_attention *a)
{
    const tqkv_metal_buffer none = {NULL, 0};
    const int count = a->attention.kv_len;
    const int64_t first = a->attention.end - count;
    tqkv_result r = tqkv_metal_plan_attend_partial(a, none, first, count, none, none, none, none, &v->plan);
    r = tqkv__visit_attention(v, r, false);
    if (r != TQKV_OK) return r;
    r = tqkv__visit(v, tqkv_metal_plan_attend_merge(a, none, none, none, a, none, none, none, &v->plan));
    return r == TQKV_OK ? tqkv__visit(v, tqkv_metal_plan_attend_finish(a, none, none, none, none, &v->plan)) : r;
}

/* Returns the store without the processor's copy of its page table. */
static tqkv_metal_store tqkv__any_pages(const tqkv_metal_store *s)
{
    tqkv_metal_store any = *s;
    if (s->pages.buffer) any.shape.pages = NULL;
    return any;
}

static int64_t tqkv__positions_in(const tqkv_store *s)
{
    return s->n_pages ? (int64_t)s->n_pages * s->page_size : s->capacity;
}

/* Gives an attention positions in every region that its context can have, as far as the stores go. */
static void tqkv__take_all_regions(tqkv_attention *a, const tqkv_store *keys, const tqkv_store *values)
{
    const tqkv_store *const stores[] = {keys, values};
    const int64_t end = (int64_t)a->first.n + a->last.n + 1; /* one that is neither */
    a->end = end;
    a->last.from = 0;
    a->kv_len = end < INT_MAX ? (int)end : INT_MAX;
    for (int i = 0; i < 2; i++) {
        const int64_t room = tqkv__positions_in(stores[i]);
        if (room < a->kv_len) a->kv_len = (int)room;
        if (room < a->end && !stores[i]->ring) a->end = room;
    }
}

/* Whether attention of n queries is to be planned. */
static bool tqkv__prepares(int n, int max_queries) { return n <= max_queries && n <= TQKV__MOST_PREPARED; }

/* Visits attention of all numbers of queries. call: in all regions */
static tqkv_result tqkv__visit_queries(tqkv__visitor *v, tqkv_metal_attention *call, int max_queries, int also)
{
    const tqkv_metal_buffer none = {NULL, 0};
    tqkv_result r = TQKV_OK;
    for (int n = 1; r == TQKV_OK && tqkv__prepares(n, max_queries); n++) {
        call->attention.n_queries = n;
        r = tqkv_metal_plan_attend(call, none, none, none, &v->plan);
        r = tqkv__visit_attention(v, r, also & TQKV_METAL_BATCHES);
        if (r == TQKV_OK && (also & TQKV_METAL_SLICES)) r = tqkv__visit_slices(v, call);
    }
    return r;
}

TQKV_API tqkv_result tqkv_metal_plan_prepare(const tqkv_metal_attention *a, int max_queries, int also,
                                             tqkv_metal_visit visit, void *user)
{
    tqkv__visitor v;
    tqkv_result r = tqkv__check_visit(visit, max_queries);
    if (r != TQKV_OK) return r;
    if (!a || !a->keys || !a->values) return TQKV__INVALID("the attention or a store is NULL");
    v.visit = visit;
    v.user = user;
    const bool shared = a->keys == a->values;
    const tqkv_metal_store keys = tqkv__any_pages(a->keys), values = tqkv__any_pages(a->values),
                           others = tqkv__any_pages(a->tail ? a->tail : a->values);
    tqkv_metal_attention call = *a;
    call.keys = &keys;
    call.values = &values;
    call.tail = a->tail ? &others : NULL;
    call.attention.tree = NULL; /* what the processor knows of it, and of the list, is of another number of queries */
    call.attention.list.rows = NULL;
    tqkv__take_all_regions(&call.attention, &keys.shape, &values.shape);
    r = tqkv__visit_encoding(&v, &keys, shared && !a->tail ? NULL : &others);
    if (r == TQKV_OK && a->attention.first.n)
        r = tqkv__visit_encoding(&v, a->first.keys, shared ? NULL : a->first.values);
    if (r == TQKV_OK && a->attention.last.n) r = tqkv__visit_encoding(&v, a->last.keys, shared ? NULL : a->last.values);
    return r == TQKV_OK ? tqkv__visit_queries(&v, &call, max_queries, also) : r;
}

TQKV_API tqkv_result tqkv_metal_plan_index_prepare(const tqkv_metal_index *x, int max_queries, tqkv_metal_visit visit,
                                                   void *user)
{
    const tqkv_metal_buffer none = {NULL, 0};
    tqkv__visitor v;
    tqkv_result r = tqkv__check_visit(visit, max_queries);
    if (r != TQKV_OK) return r;
    if (!x || !x->keys) return TQKV__INVALID("the index or its keys are NULL");
    v.visit = visit;
    v.user = user;
    const tqkv_metal_store keys = tqkv__any_pages(x->keys);
    tqkv_metal_index call = *x;
    call.keys = &keys;
    call.index.end = call.index.positions = 0;
    call.index.kv_len = 0;
    r = tqkv__visit_encoding(&v, &keys, NULL);
    for (int n = 1; r == TQKV_OK && n <= 2 && tqkv__prepares(n, max_queries); n++) { /* one, or several */
        call.index.n_queries = n;
        r = tqkv__visit(&v, tqkv_metal_plan_index_scores(&call, none, none, &v.plan));
        if (r == TQKV_OK) r = tqkv__visit(&v, tqkv_metal_plan_index_choose(&call, none, 1, none, none, &v.plan));
    }
    return r;
}

/* Appending. A cache that learns also keeps halves, learns and encodes these. */
static tqkv_result tqkv__visit_append(const tqkv_cache *c, tqkv_metal_buffer memory, tqkv__visitor *v)
{
    const tqkv_metal_buffer none = {NULL, 0};
    tqkv__rows_in_buffers rows;
    tqkv_result r = tqkv__check_on_gpu(c, 0, 0);
    if (r == TQKV_OK) r = tqkv__open_rows(c, NULL, none, none, 0, none, &rows);
    if (r != TQKV_OK) return r;
    rows.position = 0;
    rows.learnt = c->learning;
    (void)tqkv__open_plan(&v->plan, "cache_append");
    r = tqkv__visit(v, tqkv__close_plan(&v->plan, tqkv__add_coded(c, memory, &rows, &v->plan)));
    if (r != TQKV_OK || !c->learning) return r;
    rows.position = c->learn_from - 1;
    rows.n_tokens = 1;
    rows.learnt = false;
    (void)tqkv__open_plan(&v->plan, "cache_append");
    return tqkv__visit(v, tqkv__close_plan(&v->plan, tqkv__add_raw(c, memory, &rows, &v->plan)));
}

TQKV_API tqkv_result tqkv_metal_plan_cache_prepare(const tqkv_cache *c, tqkv_metal_buffer memory, int max_queries,
                                                   tqkv_metal_visit visit, void *user)
{
    tqkv__cache_call call;
    tqkv__visitor v;
    tqkv_attention *a = &call.attention.attention;
    tqkv_result r = tqkv__check_visit(visit, max_queries);
    if (r == TQKV_OK && !c) r = TQKV__INVALID("the cache is NULL");
    if (r != TQKV_OK) return r;
    v.visit = visit;
    v.user = user;
    if ((r = tqkv__visit_append(c, memory, &v)) != TQKV_OK) return r;
    tqkv__open_coded_call(c, memory, c->learning, &call);
    a->first.n = c->exact_first;
    a->last.n = c->exact_last;
    tqkv__take_all_regions(a, &call.attention.keys->shape, &call.attention.values->shape);
    r = tqkv__visit_queries(&v, &call.attention, max_queries, 0);
    if (r != TQKV_OK || !c->raw_below || !c->metal) return r;
    tqkv__open_raw_call(c, memory, 0, 1, &call);
    tqkv__take_all_regions(a, &call.attention.keys->shape, &call.attention.values->shape);
    return tqkv__visit_queries(&v, &call.attention, max_queries, 0);
}

/* >>plan-index: the scores of an index and the choice of blocks */

/* Does what tqkv__index_shape does, for `from`. */
static tqkv_result tqkv__plan_index_open(const tqkv_metal_index *from, tqkv__index *x)
{
    static const int32_t not_known[1] = {0};
    if (!from || !from->keys) return TQKV__INVALID("the index or its keys are NULL");
    tqkv_store keys = from->keys->shape;
    tqkv_index call = from->index;
    if (keys.pages && !from->keys->pages.buffer) return TQKV__INVALID("pages: no buffer");
    if (!keys.pages && from->keys->pages.buffer) keys.pages = not_known;
    call.keys = &keys;
    call.weights = NULL;
    memset(&call.parallel, 0, sizeof call.parallel);
    memset(&call.allocator, 0, sizeof call.allocator);
    const tqkv_result r = tqkv__index_shape(&call, x);
    if (r != TQKV_OK) return r;
    return call.end > INT_MAX ? TQKV__REFUSE(UNSUPPORTED, "an index of 2^31 keys: not on a GPU") : TQKV_OK;
}

/* Finds `seen` and `rest`: the keys before seen + (rest + i) / ratio are at positions that query i sees. */
static void tqkv__plan_keys_seen(const tqkv__index *x, int32_t *seen, int32_t *rest)
{
    const int64_t first = x->call.positions - x->a.call.n_queries + 1, ratio = x->call.ratio, end = x->a.call.end;
    const int64_t whole = first < 0 ? (first + 1) / ratio - 1 : first / ratio;
    *seen = (int32_t)(whole < end ? whole : end);
    *rest = (int32_t)(first - whole * ratio);
}

static void tqkv__plan_index_args(const tqkv__index *x, const tqkv_metal_index *from, tqkv__index_args *args)
{
    const tqkv__attention *a = &x->a;
    /* 256 threadgroups if that gives each 128 keys, and most 1024 */
    const int64_t keys = (a->call.end - a->first) * a->call.n_queries / 256 / 128 * 128;
    const int64_t each = keys < 128 ? 128 : keys < TQKV__INDEX_KEYS ? keys : TQKV__INDEX_KEYS;
    memset(args, 0, sizeof *args);
    tqkv__plan_key_args(a, from->keys->shape.capacity, &args->keys);
    args->keys.value_capacity = args->keys.key_capacity;
    tqkv__plan_keys_seen(x, &args->seen, &args->seen_rest);
    args->ratio = x->call.ratio;
    args->end = (int32_t)a->call.end;
    args->block = x->call.block;
    args->n_blocks = (int32_t)x->blocks;
    args->first_key = (int32_t)a->first;
    args->blocks_each = each > x->call.block ? (int)(each / x->call.block) : 1;
    args->pool = (int32_t)x->call.pool;
    args->relu = x->call.relu;
    args->has_weights = from->weights.buffer != NULL;
}

static void tqkv__plan_score(const tqkv__index *x, const tqkv__index_args *args, const tqkv_metal_index *from,
                             tqkv_metal_buffer q, tqkv_metal_buffer scores, tqkv_metal_dispatch *d)
{
    static const uint8_t absent[] = {TQKV_FC_TAIL_SCALED, TQKV_FC_TAIL_CENTER_SCALED, TQKV_FC_HALVES,
                                     TQKV_FC_SHORT_STORE, TQKV_FC_TAIL_ELSEWHERE,     TQKV_FC_STRANDS};
    const tqkv__attention *a = &x->a;
    const size_t n_queries = (size_t)a->call.n_queries, head_dim = (size_t)a->key_dim;
    const int columns = a->call.n_heads < TQKV__INDEX_COLUMNS ? a->call.n_heads : TQKV__INDEX_COLUMNS;
    const size_t matrices = TQKV__MATRICES(columns);
    tqkv__plan_begin(d, TQKV_METAL_INDEX_SCORES, a->key_dim, a->key_dim);
    tqkv__plan_args(d, args, sizeof *args);
    tqkv__plan_bind_rows(d, "q", 1, q, TQKV_FC_TYPE, a->call.query_type, a->q_size, false);
    tqkv__plan_bind_store(d, "keys' codes", "keys' norms", 2, from->keys, &a->keys, false);
    tqkv__plan_bind(d, "weights", 4, from->weights, from->weights.buffer ? a->n_rows * sizeof(float) : 0, false);
    tqkv__plan_bind(d, "scores", 5, scores, x->size, true);
    const bool center = tqkv__plan_bind_channels(d, "keys' center", 6, from->keys->center, &a->keys, true);
    tqkv__plan_bind_pages(d, "keys' pages", 7, from->keys->pages, &a->keys, TQKV_FC_PAGES);
    tqkv__plan_key_constants(d, a, center, false);
    tqkv__plan_bind_key_scale(d, a, from->keys, false, 8, center);
    for (size_t i = 0; i < sizeof absent; i++) tqkv__plan_constant(d, absent[i], 0);
    tqkv__plan_constant(d, TQKV_FC_COLUMNS, columns);
    tqkv__plan_constant(d, TQKV_FC_SAME_SLOTS, true);
    tqkv__plan_constant(d, TQKV_FC_LIST, true);
    d->memory[0] = TQKV__TABLE_BYTES;
    d->memory[1] = TQKV__MATRIX_QUERY_BYTES(head_dim) * matrices;
    d->memory[2] = TQKV__INDEX_KEYS * sizeof(float);
    d->memory[3] = TQKV__COLUMN_BYTES(8 * matrices);
    d->grid[0] = (size_t)((x->blocks + args->blocks_each - 1) / args->blocks_each);
    d->grid[1] = n_queries;
    d->n_simdgroups = TQKV__MATRIX_SIMDGROUPS;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_index_scores(const tqkv_metal_index *from, tqkv_metal_buffer q,
                                                        tqkv_metal_buffer scores, tqkv_metal_plan *plan)
{
    tqkv__index_args args;
    tqkv__index x;
    if (!tqkv__open_plan(plan, "index_scores")) return TQKV__INVALID(TQKV__NO_PLAN);
    tqkv_result r = tqkv__plan_index_open(from, &x);
    if (r == TQKV_OK && x.a.key_dim != 64 && x.a.key_dim != 128)
        r = TQKV__REFUSE(UNSUPPORTED, "an index on a GPU has a head_dim of 64 or 128");
    if (r != TQKV_OK || !x.a.call.n_queries) return tqkv__close_plan(plan, r);
    if (from->keys->shape.pages)
        r = tqkv__check_pages(&x.a.keys, x.a.first, tqkv__index_end(&x, x.a.call.n_queries - 1), 0);
    if (r == TQKV_OK) r = tqkv__plan_positions(&x.a.keys);
    if (r == TQKV_OK) r = tqkv__check_strides(x.a.call.query_strides);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    tqkv__plan_index_args(&x, from, &args);
    tqkv__plan_score(&x, &args, from, q, scores, tqkv__add_dispatch(plan));
    return tqkv__close_plan(plan, TQKV_OK);
}

/* How the resident blocks of a row are divided: one threadgroup up to 16384, or where many queries fill the GPU. Else
   at most 64 chunks of a multiple of 4096 blocks, four a thread. */
enum { TQKV__CHOOSE_BLOCKS = 4096, TQKV__CHOOSE_CHUNKS = 64, TQKV__CHOOSE_QUERIES = 16 };

static bool tqkv__chooses_alone(int64_t n_blocks, int n_queries)
{
    return n_blocks <= 4 * TQKV__CHOOSE_BLOCKS || n_queries >= TQKV__CHOOSE_QUERIES;
}

static void tqkv__plan_choose_args(const tqkv__index *x, int k, tqkv__choose_args *args)
{
    const int from = (int)(x->a.first / x->call.block);
    const int64_t n_blocks = x->blocks - from, most = (int64_t)TQKV__CHOOSE_BLOCKS * TQKV__CHOOSE_CHUNKS;
    const bool alone = tqkv__chooses_alone(n_blocks, x->a.call.n_queries);
    memset(args, 0, sizeof *args);
    tqkv__plan_keys_seen(x, &args->seen, &args->seen_rest);
    args->ratio = x->call.ratio;
    args->end = (int32_t)x->a.call.end;
    args->block = x->call.block;
    args->n_blocks = (int32_t)x->blocks;
    args->from = from;
    args->k = k;
    args->first = x->call.first;
    args->newest = x->call.newest;
    args->chunk = (int32_t)(alone ? n_blocks : (n_blocks + most - 1) / most * TQKV__CHOOSE_BLOCKS);
    args->n_chunks = (int32_t)(alone ? 1 : (n_blocks + args->chunk - 1) / args->chunk);
}

/* Returns the words of scratch of a query. That of fewer blocks is not larger. */
static size_t tqkv__choose_words(int64_t n_blocks, int n_queries)
{
    const size_t chunks = TQKV__CHOOSE_CHUNKS, blocks = (size_t)n_blocks;
    return tqkv__chooses_alone(n_blocks, n_queries) ? 0 : TQKV__CHOOSE_SCRATCH(chunks, blocks);
}

static void tqkv__plan_choose(const tqkv__choose_args *args, size_t n_queries, const tqkv_metal_buffer buffers[3],
                              tqkv_metal_dispatch *d)
{
    const int most = 1024 / TQKV__SIMD_WIDTH, each = TQKV__CHOOSE_BLOCKS / most; /* simdgroups, and blocks of one */
    const bool chunks = args->step == TQKV__CHOOSE_COUNT || args->step == TQKV__CHOOSE_GATHER;
    const int64_t n_blocks = (int64_t)args->n_blocks - args->from;
    tqkv__plan_begin(d, TQKV_METAL_INDEX_CHOICE, 0, 0);
    tqkv__plan_args(d, args, sizeof *args);
    tqkv__plan_bind(d, "scores", 1, buffers[0], n_queries * (size_t)args->n_blocks * sizeof(float), false);
    tqkv__plan_bind(d, "scratch", 2, buffers[1],
                    n_queries * tqkv__choose_words(n_blocks, (int)n_queries) * sizeof(uint32_t), true);
    tqkv__plan_bind(d, "list", 3, buffers[2], n_queries * (size_t)args->k * sizeof(int32_t), true);
    d->memory[0] = TQKV__CHOOSE_COUNTS * sizeof(uint32_t);
    d->memory[1] = (2 * TQKV__CHOOSE_SUMS + TQKV__SIMD_WIDTH + 4) * sizeof(uint32_t);
    d->grid[0] = !args->k ? 0 : chunks ? (size_t)args->n_chunks : 1;
    d->grid[1] = n_queries;
    d->n_simdgroups = args->chunk / each < most ? args->chunk / each + 1 : most;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_index_choose(const tqkv_metal_index *from, tqkv_metal_buffer scores, int k,
                                                        tqkv_metal_buffer scratch, tqkv_metal_buffer list,
                                                        tqkv_metal_plan *plan)
{
    const tqkv_metal_buffer buffers[3] = {scores, scratch, list};
    tqkv__choose_args args;
    tqkv__index x;
    size_t size;
    if (!tqkv__open_plan(plan, "index_choose")) return TQKV__INVALID(TQKV__NO_PLAN);
    tqkv_result r = tqkv__plan_index_open(from, &x);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    const int n_queries = x.a.call.n_queries;
    if (!scratch.buffer) /* of the whole store, whose first and last block may be cut */
        plan->scratch_size = (size_t)n_queries * sizeof(uint32_t) *
                             tqkv__choose_words(tqkv__room(&x.a.keys) / x.call.block + 2, n_queries);
    if (k < 0 || !tqkv__array_size(n_queries, k, 1, sizeof(int32_t), &size))
        r = TQKV__INVALID("k is negative, or the list too large");
    if (r != TQKV_OK || !n_queries) return tqkv__close_plan(plan, r);
    tqkv__plan_choose_args(&x, k, &args);
    for (int i = 0; i < (args.n_chunks > 1 ? 3 : 1); i++) {
        tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
        args.step = args.n_chunks > 1 ? i : TQKV__CHOOSE_ALONE;
        tqkv__plan_choose(&args, (size_t)n_queries, buffers, d);
        if (i) d->barrier = scratch.buffer;
    }
    return tqkv__close_plan(plan, TQKV_OK);
}

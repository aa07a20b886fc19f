/* >>index-code: scores of an index of keys, and the choice of blocks by them */

/* A checked tqkv_index. A row of `a` is one query of one head; its values are the keys again. */
typedef struct tqkv__index {
    tqkv__attention a;
    tqkv_index call; /* defaults resolved */
    int64_t blocks;  /* up to end */
    size_t size;     /* bytes of the scores */
} tqkv__index;

static tqkv_result tqkv__index_shape(const tqkv_index *index, tqkv__index *x)
{
    tqkv_attention a;
    tqkv_result r;
    if (!index) return TQKV__INVALID("the index is NULL");
    x->call = *index;
    if (index->ratio < 0 || index->block < 0 || index->first < 0 || index->newest < 0 || index->positions < 0)
        return TQKV__INVALID("ratio, block, first, newest or positions is negative");
    if (index->pool != TQKV_POOL_MAX && index->pool != TQKV_POOL_MEAN) return TQKV__INVALID("pool: no tqkv_pool");
    memset(&a, 0, sizeof a);
    a.keys = a.values = index->keys;
    a.n_heads = index->n_heads;
    a.n_queries = index->n_queries;
    a.end = index->end;
    a.kv_len = index->kv_len;
    a.scale = 1.0f;
    a.query_basis = index->query_basis;
    a.parallel = index->parallel;
    a.allocator = index->allocator;
    a.query_type = index->query_type;
    if ((r = tqkv__attention_shape(&a, &x->a)) != TQKV_OK) return r;
    if (x->a.n_kv_heads != 1) return TQKV__INVALID("keys of an index: n_kv_heads is not 1");
    if ((r = tqkv__attention_range(&a, &x->a)) != TQKV_OK) return r;
    if (!x->call.ratio) x->call.ratio = 1;
    if (!x->call.block) x->call.block = 1;
    if (index->end > INT64_MAX / x->call.ratio) return TQKV__INVALID("end * ratio is too large");
    if (!index->positions) x->call.positions = index->end * x->call.ratio;
    x->blocks = index->end / x->call.block + (index->end % x->call.block > 0);
    if (x->blocks > INT32_MAX) return TQKV__INVALID("more blocks than an int32_t counts");
    if (!tqkv__array_size(index->n_queries, (int)x->blocks, 1, sizeof(float), &x->size))
        return TQKV__INVALID("scores of more than SIZE_MAX bytes");
    return TQKV_OK;
}

/* Returns where the keys that a query sees end; they begin at the first resident one. */
static int64_t tqkv__index_end(const tqkv__index *x, int query)
{
    const int64_t end = (x->call.positions - x->a.call.n_queries + query + 1) / x->call.ratio;
    return end < x->a.first ? x->a.first : end < x->a.call.end ? end : x->a.call.end;
}

#define TQKV__NO_SCORES "scores: NULL or not aligned as floats"

/* -- Scores. A unit of work is an item, as many queries as share decoded keys, over a range of blocks. -- */

typedef struct tqkv__scoring {
    const tqkv__index *x;
    const void *q;
    float *scores;
    int queries_each, n_items; /* queries of an item */
    int64_t blocks_each;       /* of a range */
    tqkv__queue queue;
} tqkv__scoring;

/* An item at work; its arrays lie in the task's scratch. */
typedef struct tqkv__scored {
    int first_query, n_queries;
    double *totals;           /* [n_queries], of the block in progress: TQKV_POOL_MEAN */
    float *tile, *sums;       /* [rows of a tile][TQKV__TILE], [n_queries][TQKV__TILE] */
    float *q, *rest;          /* arranged, and second digits: [n_queries][n_heads][head_dim] */
    int digits;               /* whether there are any */
    float *weights, *offsets; /* [n_queries][n_heads] */
} tqkv__scored;

static int tqkv__tile_rows(const tqkv__index *x)
{
    const int rows = x->a.call.n_heads * x->a.call.n_queries, most = tqkv__chunk_rows(x->a.key_dim);
    return rows < most ? rows : most;
}

/* Takes the queries of an item, and arranges them in scratch. */
static tqkv__scored tqkv__open_scored(const tqkv__scoring *job, int number, float *scratch)
{
    const tqkv__index *x = job->x;
    const int n_heads = x->a.call.n_heads;
    const size_t each = (size_t)job->queries_each, rows = each * (size_t)n_heads;
    tqkv__scored s;
    s.first_query = number * job->queries_each;
    s.n_queries = x->a.call.n_queries - s.first_query;
    if (s.n_queries > job->queries_each) s.n_queries = job->queries_each;
    s.tile = scratch;
    s.sums = s.tile + tqkv__tile_rows(x) * TQKV__TILE;
    s.q = s.sums + each * TQKV__TILE;
    s.totals = (double *)(void *)(s.q + rows * tqkv__query_floats(&x->a));
    s.weights = (float *)(void *)(s.totals + each);
    s.offsets = s.weights + rows;
    const tqkv__item item = {0, s.first_query * n_heads, s.n_queries * n_heads};
    s.rest = s.q + (size_t)item.n_rows * tqkv__first_floats(&x->a);
    s.digits = tqkv__arrange_queries(&x->a, &item, job->q, s.q);
    for (int i = 0; i < item.n_rows; i++) {
        const size_t row = (size_t)item.first_row + (size_t)i;
        s.weights[i] = x->call.weights ? x->call.weights[row] : 1.0f;
        s.offsets[i] = (float)tqkv__center_score(&x->a, 0, tqkv__query_at(&x->a, job->q, row));
    }
    return s;
}

/* Finds sums[query][j]: the score of each key of the segment */
static void tqkv__score_keys(const tqkv__index *x, const tqkv__scored *s, const tqkv__segment *segment)
{
    const int n_heads = x->a.call.n_heads, n_rows = s->n_queries * n_heads, most = tqkv__tile_rows(x);
    memset(s->sums, 0, (size_t)s->n_queries * TQKV__TILE * sizeof(float));
    for (int row = 0, n; row < n_rows; row += n) {
        n = n_rows - row < most ? n_rows - row : most;
        const int heads = n < n_heads ? n : n_heads; /* whole queries, or some heads of one */
        const size_t at = (size_t)row * (size_t)x->a.key_dim;
        x->a.kernels->score_tile(&x->a.keys, 0, segment, s->q + at, n, false, s->tile);
        if (s->digits) tqkv__score_digits(&x->a, &x->a.keys, 0, segment, s->rest + at, n, s->tile);
        for (int i = 0; i < n; i += heads)
            x->a.kernels->sum_heads(s->tile + i * TQKV__TILE, s->weights + row + i, s->offsets + row + i, x->call.relu,
                                    heads, s->sums + (row + i) / n_heads * TQKV__TILE);
    }
}

/* Pools the scores of the keys [position, position + n), which a query sees up to `end`. out: of block 0 */
static void tqkv__pool(const tqkv__index *x, const float *sums, int64_t position, int n, int64_t end, double *total,
                       float *out)
{
    const int size = x->call.block;
    if (size == 1) {
        memcpy(out + position, sums, (size_t)n * sizeof(float));
        return;
    }
    for (int j = 0, left; j < n; j += left) {
        const int64_t block = (position + j) / size, first = block * size,
                      last = end - first < size ? end : first + size;
        left = last - (position + j) < n - j ? (int)(last - (position + j)) : n - j;
        if (x->call.pool == TQKV_POOL_MAX) {
            for (int i = j; i < j + left; i++)
                if (sums[i] > out[block] || sums[i] != sums[i]) out[block] = sums[i];
            continue;
        }
        for (int i = j; i < j + left; i++) *total += (double)sums[i];
        *total = tqkv__rounded_double(*total);
        if (position + j + left < last) return;
        const int64_t seen = last - (first > x->a.first ? first : x->a.first);
        out[block] = (float)tqkv__rounded_double(*total / (double)seen);
        *total = 0.0;
    }
}

static TQKV__NOINLINE void tqkv__score_unit(const tqkv__scoring *job, int unit, float *scratch)
{
    const tqkv__index *x = job->x;
    const tqkv__stream *keys = &x->a.keys;
    tqkv__scored s = tqkv__open_scored(job, unit % job->n_items, scratch);
    const int64_t block = unit / job->n_items * job->blocks_each;
    const int64_t n_blocks = x->blocks - block < job->blocks_each ? x->blocks - block : job->blocks_each;
    int64_t from = block * x->call.block, to = tqkv__index_end(x, s.first_query + s.n_queries - 1);
    if (to > from && to - from > n_blocks * x->call.block) to = from + n_blocks * x->call.block;
    if (from < x->a.first) from = x->a.first;
    for (int i = 0; i < s.n_queries; i++) {
        float *out = job->scores + (int64_t)(s.first_query + i) * x->blocks + block;
        for (int64_t b = 0; b < n_blocks; b++) out[b] = -INFINITY;
        s.totals[i] = 0.0;
    }
    for (int64_t position = from, n; position < to; position += n) {
        const int room = tqkv__slots_left(keys, position);
        n = TQKV__TILE - position % TQKV__TILE;
        if (n > room) n = room;
        if (n > to - position) n = to - position;
        tqkv__segment segment;
        tqkv__open_segment(keys, position, (int)n, to, &segment);
        if (position + n < to) tqkv__touch_next(keys, 0, &segment);
        tqkv__score_keys(x, &s, &segment);
        for (int i = 0; i < s.n_queries; i++) {
            const int64_t end = tqkv__index_end(x, s.first_query + i), seen = end - position < n ? end - position : n;
            float *out = job->scores + (int64_t)(s.first_query + i) * x->blocks;
            if (seen > 0) tqkv__pool(x, s.sums + i * TQKV__TILE, position, (int)seen, end, &s.totals[i], out);
        }
    }
    for (int i = 0; i < s.n_queries; i++) {
        float *out = job->scores + (int64_t)(s.first_query + i) * x->blocks + block;
        for (int64_t b = 0; b < n_blocks; b++) out[b] = tqkv__one_nan(out[b]);
    }
}

static void tqkv__score_task(void *context, int index)
{
    tqkv__scoring *job = (tqkv__scoring *)context;
    float *scratch = job->queue.scratch + (size_t)index * job->queue.scratch_floats;
    const uint64_t mode = tqkv__fp_exact();
    for (int unit; (unit = tqkv__queue_take(&job->queue)) >= 0;) tqkv__score_unit(job, unit, scratch);
    tqkv__fp_restore(mode);
}

/* Cuts the work. Arranging the queries of a unit costs as much as 40 keys. */
static tqkv_result tqkv__divide_scoring(tqkv__scoring *job)
{
    enum { keys_each = 4096 };
    const tqkv__index *x = job->x;
    const bool hook = x->a.call.parallel.run != tqkv__run_serial;
    const int rows = tqkv__tile_rows(x), n_heads = x->a.call.n_heads;
    job->queries_each = rows > n_heads ? rows / n_heads : 1;
    job->n_items = (x->a.call.n_queries - 1) / job->queries_each + 1;
    job->blocks_each = !hook ? x->blocks : x->call.block < keys_each ? keys_each / x->call.block : 1;
    if (job->blocks_each < 1) job->blocks_each = 1;
    const int64_t ranges = (x->blocks + job->blocks_each - 1) / job->blocks_each;
    if (ranges > (INT_MAX - TQKV__TASKS) / job->n_items) return TQKV__INVALID("more units of work than an int counts");
    job->queue.n_units = (int)ranges * job->n_items;
    job->queue.n_tasks = !hook ? 1 : job->queue.n_units < TQKV__TASKS ? job->queue.n_units : (int)TQKV__TASKS;
    const size_t each = (size_t)job->queries_each, all = each * (size_t)n_heads;
    job->queue.scratch_floats = ((size_t)rows + each) * TQKV__TILE + all * (tqkv__query_floats(&x->a) + 2) + 2 * each;
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_index_scores(const tqkv_index *index, const void *q, float *scores)
{
    tqkv__index x;
    tqkv__scoring job;
    tqkv_result r = tqkv__index_shape(index, &x);
    if (r == TQKV_OK) r = tqkv__stream_memory(index->keys, &x.a.keys);
    if (r != TQKV_OK || !x.a.call.n_queries) return r;
    if (!tqkv__floats_at(scores)) return TQKV__INVALID(TQKV__NO_SCORES);
    const tqkv__arrays arrays = {{scores}, {x.size}, 1, sizeof(float)};
    r = tqkv__check_attend(&x.a, q, &arrays);
    if (r == TQKV_OK) r = tqkv__check_pages(&x.a.keys, x.a.first, tqkv__index_end(&x, x.a.call.n_queries - 1), 0);
    if (r != TQKV_OK) return r;
    if ((uintptr_t)index->weights % sizeof(float)) return TQKV__INVALID("weights: not aligned as floats");
    if (tqkv__overlap(index->weights, x.a.n_rows * sizeof(float), scores, x.size))
        return TQKV__INVALID("scores overlap the weights");
    if (index->weights && !tqkv__all_finite(index->weights, x.a.n_rows))
        return TQKV__REFUSE(NOT_FINITE, "weights hold NaN or infinity");
    memset(&job, 0, sizeof job);
    job.x = &x;
    job.q = q;
    job.scores = scores;
    if ((r = tqkv__divide_scoring(&job)) != TQKV_OK || job.queue.n_units == 0) return r;
    const tqkv_attention *call = &x.a.call;
    if (!tqkv__queue_open(&job.queue, &call->allocator, 0)) return TQKV_OUT_OF_MEMORY;
    memset(job.queue.memory, 0, job.queue.size); /* scores behind a segment's end are read */
    call->parallel.run(call->parallel.user, job.queue.n_tasks, tqkv__score_task, &job);
    call->allocator.free(call->allocator.user, job.queue.memory, job.queue.size);
    return TQKV_OK;
}

/* -- The choice -- */

/* Blocks that a query sees, by number: [from, old) and [recent, to) come before all others. */
typedef struct tqkv__seen_blocks {
    int64_t from, old, recent, to;
} tqkv__seen_blocks;

static tqkv__seen_blocks tqkv__blocks_of(const tqkv__index *x, int query)
{
    tqkv__seen_blocks seen = {0, 0, 0, 0};
    const int64_t size = x->call.block, end = tqkv__index_end(x, query);
    if (end <= x->a.first) return seen;
    seen.from = x->a.first / size;
    seen.to = (end - 1) / size + 1;
    seen.old = x->call.first > seen.from ? x->call.first : seen.from;
    if (seen.old > seen.to) seen.old = seen.to;
    seen.recent = seen.to - x->call.newest > seen.old ? seen.to - x->call.newest : seen.old;
    return seen;
}

/* Orders scores as floats do; 0 for -infinity, which is no block. */
static uint32_t tqkv__score_key(float score)
{
    const uint32_t bits = tqkv__bits(score), sign = 0x80000000u;
    const uint32_t positive = bits | sign, ordered = bits >> 31 ? ~bits : positive;
    if (bits == 0xff800000u) return 0;
    return bits == sign ? sign : ordered; /* -0 is 0 */
}

/* Returns the n-th largest key of n_scores scores, and how many equal ones are among those n; 0 < n <= n_scores. Each
   pass counts the next bits of the keys that agree with it so far. */
static uint32_t tqkv__nth_key(const float *scores, int64_t n_scores, int64_t n, int64_t *equal)
{
    static const uint8_t widths[3] = {11, 11, 10};
    uint32_t counts[1 << 11], key = 0;
    for (int pass = 0, above = 32; pass < 3; pass++) {
        const int width = widths[pass], shift = above - width;
        uint32_t at = (1u << width) - 1;
        memset(counts, 0, sizeof counts);
        for (int64_t i = 0; i < n_scores; i++) {
            const uint32_t x = tqkv__score_key(scores[i]);
            if ((uint64_t)x >> above == key) counts[x >> shift & ((1u << width) - 1)]++;
        }
        for (; counts[at] < n; at--) n -= counts[at];
        key = key << width | at;
        above = shift;
    }
    *equal = n;
    return key;
}

typedef struct tqkv__choice {
    const float *scores;
    int32_t *list;
    int64_t n, k; /* chosen so far, and at most */
} tqkv__choice;

/* Takes the blocks of [from, to) with larger keys, and the first `equal` ones with that key. */
static void tqkv__take_blocks(tqkv__choice *c, int64_t from, int64_t to, uint32_t key, int64_t equal)
{
    for (int64_t b = from; b < to && c->n < c->k; b++) {
        const uint32_t x = tqkv__score_key(c->scores[b]);
        if (x == 0 || x < key || (x == key && equal-- <= 0)) continue;
        c->list[c->n++] = (int32_t)b;
    }
}

static int64_t tqkv__count_blocks(const float *scores, int64_t from, int64_t to)
{
    int64_t n = 0;
    for (int64_t b = from; b < to; b++) n += tqkv__score_key(scores[b]) != 0;
    return n;
}

typedef struct tqkv__choosing {
    const tqkv__index *x;
    const float *scores;
    int k;
    int32_t *list;
} tqkv__choosing;

static void tqkv__choose_task(void *context, int query)
{
    const tqkv__choosing *job = (const tqkv__choosing *)context;
    const tqkv__seen_blocks seen = tqkv__blocks_of(job->x, query);
    tqkv__choice c = {job->scores + query * job->x->blocks, job->list + (int64_t)query * job->k, 0, job->k};
    int64_t left = c.k - tqkv__count_blocks(c.scores, seen.from, seen.old), equal = 0;
    left -= tqkv__count_blocks(c.scores, seen.recent, seen.to);
    tqkv__take_blocks(&c, seen.from, seen.old, 0, 0);
    if (left >= seen.recent - seen.old) {
        tqkv__take_blocks(&c, seen.old, seen.recent, 0, 0);
    } else if (left > 0) {
        const uint32_t key = tqkv__nth_key(c.scores + seen.old, seen.recent - seen.old, left, &equal);
        tqkv__take_blocks(&c, seen.old, seen.recent, key, equal);
    }
    tqkv__take_blocks(&c, seen.recent, seen.to, 0, 0);
    while (c.n < c.k) c.list[c.n++] = -1;
}

static bool tqkv__scores_nan(const tqkv__index *x, const float *scores)
{
    uint32_t bad = 0;
    for (int i = 0; i < x->a.call.n_queries; i++, scores += x->blocks) {
        const tqkv__seen_blocks seen = tqkv__blocks_of(x, i);
        for (int64_t b = seen.from; b < seen.to; b++) bad |= (tqkv__bits(scores[b]) & 0x7fffffffu) > 0x7f800000u;
    }
    return bad != 0;
}

TQKV_API tqkv_result tqkv_index_choose(const tqkv_index *index, const float *scores, int k, int32_t *list)
{
    tqkv__index x;
    size_t list_size;
    tqkv_result r = tqkv__index_shape(index, &x);
    if (r == TQKV_OK && k < 0) r = TQKV__INVALID("k is negative");
    if (r != TQKV_OK || !x.a.call.n_queries) return r;
    if (!tqkv__floats_at(scores)) return TQKV__INVALID(TQKV__NO_SCORES);
    if (!tqkv__aligned_at(list, sizeof *list)) return TQKV__INVALID("list: NULL or not aligned as int32_t");
    if (!tqkv__array_size(x.a.call.n_queries, k, 1, sizeof *list, &list_size))
        return TQKV__INVALID("a list of more than SIZE_MAX bytes");
    if (tqkv__overlap(scores, x.size, list, list_size)) return TQKV__INVALID("the list overlaps the scores");
    if (tqkv__scores_nan(&x, scores)) return TQKV__REFUSE(NOT_FINITE, "scores hold NaN");
    tqkv__choosing job = {&x, scores, k, list};
    const tqkv_parallel *parallel = &x.a.call.parallel;
    if (x.a.call.n_queries == 1)
        tqkv__choose_task(&job, 0);
    else
        parallel->run(parallel->user, x.a.call.n_queries, tqkv__choose_task, &job);
    return TQKV_OK;
}

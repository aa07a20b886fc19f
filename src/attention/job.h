/* >>job: what a call computes, cut into tasks. */

/* Units of work. Tasks take one after the other, so none waits for a longer one; each task has scratch of its own. */
enum { TQKV__TASKS = 32 };
typedef struct tqkv__queue {
    int n_units, n_tasks;
    int next; /* unit; atomic */
    size_t scratch_floats;
    float *scratch; /* [n_tasks][scratch_floats], each on cache lines of its own */
    float *memory;  /* that holds them */
    size_t size;
} tqkv__queue;

static bool tqkv__queue_open(tqkv__queue *queue, const tqkv_allocator *allocator, size_t more)
{
    queue->scratch_floats = (queue->scratch_floats + 15) / 16 * 16;
    if (queue->scratch_floats > (SIZE_MAX / 8 - more) / (size_t)queue->n_tasks) return false;
    queue->size = ((size_t)queue->n_tasks * queue->scratch_floats + more + 16) * sizeof(float);
    queue->memory = (float *)allocator->alloc(allocator->user, queue->size);
    if (!queue->memory) return false;
    queue->scratch = (float *)(void *)tqkv__first_line(queue->memory);
    return true;
}

/* Takes the next unit; -1 when all are taken. */
static int tqkv__queue_take(tqkv__queue *queue)
{
    const int unit = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
    return unit < queue->n_units ? unit : -1;
}

/* A job is one call or many. A unit of its work is an item over all stretches or, if some item alone is much of the
   work ("spread"), an item over one stretch of a wave. Both ways do the same additions in the same order. */
enum { TQKV__WAVE_FLOATS = 1 << 20 };

typedef struct tqkv__job {
    tqkv__queue queue; /* scratch: tiles, queries, gathered rows, sums of a piece, of all stretches, of one */
    tqkv__request *requests;
    int n_requests;
    bool spread;
    size_t wave_floats;
    float *waves; /* [wave_floats] */
} tqkv__job;

/* The KV heads of rows come one after the other where they share a list. Queries with lists of their own take one KV
   head after the other: neighbours share most entries, whose rows the L2 cache still has. */
static tqkv__item tqkv__item_of(const tqkv__request *request, int index)
{
    TQKV_ASSERT(index >= 0 && index < request->n_items);
    const int n_kv_heads = request->a->n_kv_heads, each = (request->n_rows - 1) / request->rows_each + 1;
    const tqkv_attention *call = &request->a->call;
    const bool follow = !call->list.rows || (call->n_queries == 1 && call->list.heads == 1);
    const int of_head = request->n_items / n_kv_heads; /* items */
    const int kv_head = follow ? index % n_kv_heads : index / of_head,
              i = follow ? index / n_kv_heads : index % of_head;
    const int before = i % each * request->rows_each, left = request->n_rows - before;
    const tqkv__item item = {kv_head, i / each * request->n_rows + before,
                             left < request->rows_each ? left : request->rows_each};
    return item;
}

/* Finds the sums of one stretch; that before the first is of positions that are no longer resident. */
static void tqkv__attend_stretch(const tqkv__request *request, tqkv__work *w, int64_t stretch, const tqkv__sums *sums)
{
    const int64_t begin = stretch * TQKV__STRETCH;
    tqkv__range range = request->seen;
    if (range.from < begin) range.from = begin;
    if (range.to - begin > TQKV__STRETCH) range.to = begin + TQKV__STRETCH;
    const int n_rows = w->item->n_rows;
    w->before = NULL;
    w->sums = *sums;
    tqkv__find_passes(w, range, request->kept.from < request->kept.to && stretch == request->stretch);
    tqkv__clear_sums(&w->piece, (size_t)n_rows, request->a->value_dim);
    tqkv__clear_sums(sums, (size_t)n_rows, request->a->value_dim);
    for (int i = 0; i < 2; i++) /* value_tile reads whole vectors behind the last row: no NaN or Inf of old scratch */
        memset(w->tiles[i].scores + n_rows * TQKV__TILE, 0, TQKV__TILE * sizeof(float));
    if (w->list || w->a->small_pages)
        tqkv__attend_ranks(w, range);
    else
        for (int pass = 0; pass < TQKV__PASSES; pass++) tqkv__attend_rows(w, pass, range);
    tqkv__add_before(w, NULL);
    w->a->kernels->end_piece(n_rows, w->a->value_dim, &w->piece, sums);
}

static tqkv__sums tqkv__sums_at(float *memory, size_t n_rows, int value_dim)
{
    const size_t elements = n_rows * (size_t)value_dim;
    const tqkv__sums sums = {memory, memory + elements, memory + elements + n_rows};
    return sums;
}

/* Returns an item's sums within those of all rows, which are ordered by KV head. */
static tqkv__sums tqkv__sums_of_item(const tqkv__request *request, const tqkv__item *item, float *memory)
{
    const tqkv__attention *a = request->a;
    const tqkv__sums all = tqkv__sums_at(memory, a->n_rows, a->value_dim);
    const size_t row = (size_t)item->kv_head * (size_t)(a->call.n_queries * a->group) + (size_t)item->first_row;
    const tqkv__sums own = {all.out + row * (size_t)a->value_dim, all.max + row, all.sum + row};
    return own;
}

static TQKV__NOINLINE void tqkv__attend_unit(const tqkv__job *job, const tqkv__request *request, int unit,
                                             float *scratch)
{
    const tqkv__attention *a = request->a;
    const tqkv__item item = tqkv__item_of(request, unit % request->n_items);
    const size_t rows = (size_t)request->rows_each, floats = rows * (size_t)(a->value_dim + 2);
    float *q = scratch + 2 * sizeof(tqkv__tile) / sizeof(float), *next = q + rows * tqkv__query_floats(a);
    float offsets[TQKV__CHUNK_ROWS];
    tqkv__attention gathered;
    tqkv__list list;
    tqkv__work w;
    w.a = a;
    w.item = &item;
    w.q = q;
    w.offsets = offsets;
    w.tiles = (tqkv__tile *)(void *)scratch;
    w.piece = tqkv__sums_at(next, rows, a->value_dim);
    w.list = a->call.list.rows ? &list : NULL;
    w.gathered = &gathered;
    if (w.list) list = tqkv__open_list(a, item.first_row / a->group, item.kv_head, request->slice);
    if (w.list || a->small_pages || a->odd_rings) tqkv__open_gathered(a, next + floats, &gathered);
    next += floats + tqkv__gathered_floats(a);
    w.kept = request->kept;
    w.first_query = item.first_row / a->group;
    w.last_query = (item.first_row + item.n_rows - 1) / a->group;
    w.digits = tqkv__arrange_queries(a, &item, request->q, q);
    tqkv__find_offsets(a, &item, request->q, offsets);
    if (job->spread) {
        const int64_t stretch = unit / request->n_items;
        const tqkv__sums to = tqkv__sums_of_item(request, &item, request->now + (size_t)stretch * request->sums_floats);
        tqkv__attend_stretch(request, &w, request->wave + stretch, &to);
        return;
    }
    const tqkv__sums all = tqkv__sums_at(next, rows, a->value_dim);
    const tqkv__sums one = tqkv__sums_at(next + floats, rows, a->value_dim);
    tqkv__attend_stretch(request, &w, request->stretch, &all);
    for (int64_t i = 1; i < request->n_stretches; i++) {
        tqkv__attend_stretch(request, &w, request->stretch + i, &one);
        tqkv__merge_sums(&all, &one, (size_t)item.n_rows, a->value_dim);
    }
    tqkv__deliver(request, &item, &all);
}

static void tqkv__attend_task(void *context, int index)
{
    tqkv__job *job = (tqkv__job *)context;
    float *scratch = job->queue.scratch + (size_t)index * job->queue.scratch_floats;
    const uint64_t mode = tqkv__fp_exact();
    const tqkv__request *request = job->requests, *last = request + job->n_requests - 1;
    for (int unit; (unit = tqkv__queue_take(&job->queue)) >= 0;) { /* a task's units ascend */
        while (request < last && request[1].first_unit <= unit) request++;
        tqkv__attend_unit(job, request, unit - request->first_unit, scratch);
    }
    tqkv__fp_restore(mode);
}

/* Returns the number of rows whose vectors take 32 KiB. */
static int tqkv__chunk_rows(int head_dim)
{
    return 8192 / head_dim < TQKV__CHUNK_ROWS ? 8192 / head_dim : TQKV__CHUNK_ROWS;
}

/* Returns the query rows of an item, of `all`: up to 144 KiB of sums, which the L2 cache holds, or 32 KiB where tasks
   would be left without work. others: how often the work of these rows exists */
static int tqkv__item_rows(const tqkv__attention *a, int all, int64_t others)
{
    const int dim = a->key_dim > a->value_dim ? a->key_dim : a->value_dim;
    const int most = 36864 / dim < TQKV__CHUNK_ROWS ? 36864 / dim : TQKV__CHUNK_ROWS;
    int n = (all - 1) / most + 1;
    if (a->call.parallel.run != tqkv__run_serial)
        while (n * 2 * tqkv__chunk_rows(dim) <= all && others * n < TQKV__TASKS) n *= 2;
    return (all - 1) / n + 1;
}

/* Finds the stretches and items of a call over a slice. max and sum NULL: finishes the rows. */
static void tqkv__cut(const tqkv__attention *a, tqkv__range slice, const void *q, void *out, float *max, float *sum,
                      tqkv__request *request)
{
    const bool begins = slice.from == a->first && (slice.from < slice.to || slice.to == a->call.end);
    const tqkv__range kept = {begins ? 0 : slice.from, slice.to < a->kept ? slice.to : a->kept};
    if (slice.from < kept.to) slice.from = kept.to;
    const tqkv__range seen =
        a->call.list.rows ? tqkv__listed_to(a, slice) : tqkv__visible_to(a, 0, a->call.n_queries - 1, slice);
    const int each = a->n_kv_heads * (a->call.list.rows ? a->call.n_queries : 1);
    memset(request, 0, sizeof *request);
    request->a = a;
    request->q = q;
    request->out = out;
    request->max = max;
    request->sum = sum;
    request->slice = slice;
    request->seen = seen;
    request->stretch = seen.from / TQKV__STRETCH;
    request->n_stretches = seen.to > seen.from ? (seen.to - 1) / TQKV__STRETCH - request->stretch + 1 : 1;
    request->kept = kept;
    request->stretch -= kept.from < kept.to;
    request->n_stretches += kept.from < kept.to;
    request->wave = request->stretch;
    request->n_rows = a->call.list.rows ? a->group : a->call.n_queries * a->group;
    request->rows_each = tqkv__item_rows(a, request->n_rows, request->n_stretches * each);
    request->n_items = each * ((request->n_rows - 1) / request->rows_each + 1);
    request->sums_floats = a->n_rows * ((size_t)a->value_dim + 2);
}

/* Chooses how to divide the work, and how much memory that takes. Returns the floats of all totals. */
static size_t tqkv__divide(tqkv__job *job)
{
    const bool hook = job->requests[0].a->call.parallel.run != tqkv__run_serial;
    double longest = 0.0, all = 0.0; /* in stretches of an item */
    const size_t limit = TQKV__WAVE_FLOATS;
    size_t most = 0, totals = 0, waves = 0;
    for (int i = 0; i < job->n_requests; i++) {
        const tqkv__request *request = &job->requests[i];
        const int64_t left = (int64_t)(limit - waves), each = (int64_t)request->sums_floats;
        if ((double)request->n_stretches > longest) longest = (double)request->n_stretches;
        all += (double)request->n_stretches * request->n_items;
        waves = request->n_stretches > left / each ? limit : waves + (size_t)(request->n_stretches * each);
        if (request->sums_floats > most) most = request->sums_floats;
        if (totals <= SIZE_MAX / 64) totals += request->sums_floats; /* each is below, see tqkv__attention_shape */
    }
    const int most_tasks = TQKV__TASKS;
    job->queue.n_tasks = !hook ? 1 : all < (double)most_tasks ? (int)all : most_tasks;
    job->spread = hook && longest > 1.0 && 4.0 * longest * (double)most_tasks > all && totals <= SIZE_MAX / 64;
    job->wave_floats = !job->spread ? 0 : waves > most ? waves : most;
    return job->spread ? totals : 0;
}

/* Gives each request as many of its next stretches as the memory of a wave holds, and counts the units. */
static void tqkv__next_wave(tqkv__job *job)
{
    size_t used = 0;
    job->queue.n_units = job->queue.next = 0;
    for (int i = 0; i < job->n_requests; i++) {
        tqkv__request *request = &job->requests[i];
        request->wave += request->n_wave;
        const int64_t left = request->stretch + request->n_stretches - request->wave;
        const int64_t fit = (int64_t)((job->wave_floats - used) / request->sums_floats);
        request->n_wave = left < fit ? left : fit;
        request->now = job->waves + used;
        request->first_unit = job->queue.n_units;
        used += (size_t)request->n_wave * request->sums_floats;
        job->queue.n_units += (int)request->n_wave * request->n_items;
    }
}

static void tqkv__merge_wave(const tqkv__request *request)
{
    const size_t n_rows = request->a->n_rows;
    const int value_dim = request->a->value_dim;
    const tqkv__sums total = tqkv__sums_at(request->total, n_rows, value_dim);
    if (request->wave == request->stretch) tqkv__clear_sums(&total, n_rows, value_dim);
    for (int64_t w = 0; w < request->n_wave; w++) {
        const tqkv__sums now = tqkv__sums_at(request->now + (size_t)w * request->sums_floats, n_rows, value_dim);
        tqkv__merge_sums(&total, &now, n_rows, value_dim);
    }
}

/* Runs the waves of a spread job and merges each request's stretches in order. totals: sums of all its rows */
static void tqkv__run_waves(tqkv__job *job, const tqkv_parallel *parallel, float *totals)
{
    for (int i = 0; i < job->n_requests; totals += job->requests[i++].sums_floats) job->requests[i].total = totals;
    for (tqkv__next_wave(job); job->queue.n_units > 0; tqkv__next_wave(job)) {
        parallel->run(parallel->user, job->queue.n_tasks, tqkv__attend_task, job);
        const uint64_t mode = tqkv__fp_exact();
        for (int i = 0; i < job->n_requests; i++) tqkv__merge_wave(&job->requests[i]);
        tqkv__fp_restore(mode);
    }
    const uint64_t mode = tqkv__fp_exact();
    for (int i = 0; i < job->n_requests; i++)
        for (int j = 0; j < job->requests[i].n_items; j++) {
            const tqkv__item item = tqkv__item_of(&job->requests[i], j);
            const tqkv__sums sums = tqkv__sums_of_item(&job->requests[i], &item, job->requests[i].total);
            tqkv__deliver(&job->requests[i], &item, &sums);
        }
    tqkv__fp_restore(mode);
}

static tqkv_result tqkv__run_job(tqkv__request *requests, int n_requests)
{
    tqkv__job job;
    tqkv__queue *queue = &job.queue;
    const tqkv_allocator *allocator = &requests[0].a->call.allocator;
    const tqkv_parallel *parallel = &requests[0].a->call.parallel;
    memset(&job, 0, sizeof job);
    job.requests = requests;
    job.n_requests = n_requests;
    const size_t totals = tqkv__divide(&job);
    int64_t n_units = 0;
    for (int i = 0; i < n_requests; i++) {
        const size_t rows = (size_t)requests[i].rows_each, sums = rows * (size_t)(requests[i].a->value_dim + 2);
        const size_t scratch = 2 * sizeof(tqkv__tile) / sizeof(float) + rows * tqkv__query_floats(requests[i].a) +
                               (job.spread ? 1 : 3) * sums + tqkv__gathered_floats(requests[i].a);
        if (scratch > queue->scratch_floats) queue->scratch_floats = scratch;
        requests[i].first_unit = (int)n_units;
        n_units += requests[i].n_items;
        if (n_units > INT_MAX - TQKV__TASKS) return TQKV__INVALID("more query rows than an int counts");
    }
    queue->n_units = (int)n_units;
    if (!job.spread && queue->n_tasks > queue->n_units) queue->n_tasks = queue->n_units;
    if (!tqkv__queue_open(queue, allocator, job.wave_floats + totals)) return TQKV_OUT_OF_MEMORY;
    job.waves = queue->scratch + (size_t)queue->n_tasks * queue->scratch_floats;
    if (job.spread)
        tqkv__run_waves(&job, parallel, job.waves + job.wave_floats);
    else
        parallel->run(parallel->user, queue->n_tasks, tqkv__attend_task, &job);
    allocator->free(allocator->user, queue->memory, queue->size);
    return TQKV_OK;
}

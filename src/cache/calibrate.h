/* >>cache-calibrate: a cache that learns centre and scale of its keys from its first positions, and presets. Until then
   keys and values are halves of the rows as they came, `raw`; the append that brings the last of these positions
   encodes all. A position is `new` if its values differ from those of the position before. */

/* Positions from which a scale can be learned, and the new ones that are enough of any number. */
#define TQKV__LEAST_POSITIONS 16
#define TQKV__LEAST_NEW       64
/* Bounds of the scales that fewer teach: a key that is one vector again and again tells little of a channel. */
#define TQKV__LEAST_OF_FEW   0.5f
#define TQKV__LARGEST_OF_FEW 1.5f

/* Returns the new positions without which a cache learns from all. */
static int tqkv__least_new(const tqkv_cache *c)
{
    const int half = c->learn_from / 2;
    return half > TQKV__LEAST_NEW ? TQKV__LEAST_NEW : half > TQKV__LEAST_POSITIONS ? half : TQKV__LEAST_POSITIONS;
}

/* Lets a cache learn from n positions. It keeps a tile more of them raw: a tree of drafts may be cut there. */
static void tqkv__learn_from(tqkv_cache *c, int n)
{
    c->learn_from = n < c->keys.capacity ? n : c->keys.capacity;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) c->raw[i].capacity = c->learn_from + TQKV__TILE;
}

/* Finds from how many positions a cache learns, and the shapes of its raw halves; follows tqkv__cache_shapes. */
static tqkv_result tqkv__raw_shapes(const tqkv_cache_desc *desc, tqkv_cache *c)
{
    const int quarter = desc->capacity / 4, least = TQKV__LEAST_POSITIONS, most = quarter > least ? quarter : least;
    tqkv__tied tied;
    const tqkv_result r = tqkv__take_pairs(desc->pairs, desc->rotary_dim, desc->head_dim, &tied);
    if (r != TQKV_OK) return r;
    if (desc->calibrate < 0) return TQKV__INVALID("calibrate is negative");
    if (desc->calibrate == 0) return TQKV_OK;
    if (desc->calibrate < least) return TQKV__INVALID("calibrate: fewer than 16 positions");
    if (desc->capacity > 0 && desc->capacity < least) return TQKV__INVALID("calibrate: the capacity is less than 16");
    if (desc->ring && desc->calibrate > most)
        return TQKV__INVALID("calibrate: a ring learns from no more than a quarter of its capacity, or 16 positions");
    if (desc->key_center || desc->key_scale || desc->value_center || desc->value_scale) return TQKV_OK;
    c->learning = true;
    c->raw_below = INT64_MAX;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv_store *s = tqkv__store_of(c, i);
        if (!s) continue;
        c->raw[i] = *s;
        if (i < 2) c->raw[i].format = TQKV_F16;
        c->raw[i].ring = false;
    }
    tqkv__learn_from(c, desc->calibrate < most ? desc->calibrate : most);
    return TQKV_OK;
}

/* Finds where what is raw lies in memory of its own; false if that has no size. */
static bool tqkv__divide_raw(const tqkv_cache *c, tqkv__cache_memory *at)
{
    at->size = 0;
    return c->metal || !c->learning || tqkv__reserve_stores(c, TQKV__RAW, TQKV__CACHE_STORES, at);
}

/* Gets memory for what is raw, unless there is some. On a GPU there always is. */
static tqkv_result tqkv__get_raw(tqkv_cache *c)
{
    tqkv__cache_memory at;
    if (c->metal || c->raw_memory) return TQKV_OK;
    if (!tqkv__divide_raw(c, &at)) return TQKV_OUT_OF_MEMORY;
    c->raw_memory = c->memory.alloc(c->memory.user, at.size + 63);
    if (!c->raw_memory) return TQKV_OUT_OF_MEMORY;
    c->raw_size = at.size + 63;
    tqkv__place_stores(c, TQKV__RAW, TQKV__CACHE_STORES, &at, tqkv__first_line(c->raw_memory));
    return TQKV_OK;
}

/* Gives the raw halves back; on a GPU their memory stays, but no later query reads it. */
static void tqkv__drop_raw(tqkv_cache *c)
{
    if (c->raw_memory) c->memory.free(c->memory.user, c->raw_memory, c->raw_size);
    c->raw_memory = NULL;
    c->learning = false;
    c->raw_below = c->raw_end = 0;
    for (int i = 0; i < TQKV__CACHE_STREAMS && !c->metal; i++) { /* their shapes stay: an empty cache learns again */
        c->raw[i].codes = c->raw[i].norms = NULL;
        c->raw[i].codes_size = c->raw[i].norms_size = 0;
    }
}

/* -- Learning -- */

/* Whether |v - v'|^2 > |v|^2 / 4, for the values v of a position and v' of the one before, over all heads, in 16 sums
   that are added by halves. */
static TQKV__NOINLINE bool tqkv__judge(const tqkv__stream *raw, int slot)
{
    float row[TQKV_MAX_HEAD_DIM], before[TQKV_MAX_HEAD_DIM], sums[2][16];
    if (slot == 0) return true;
    memset(sums, 0, sizeof sums);
    for (int h = 0; h < raw->n_kv_heads; h++) {
        tqkv__read_row(raw, h, slot, row);
        tqkv__read_row(raw, h, slot - 1, before);
        for (int d = 0; d < raw->head_dim; d++) {
            const float x = TQKV__AS_FLOAT(row[d] - before[d]);
            sums[0][d % 16] = TQKV__AS_FLOAT(sums[0][d % 16] + tqkv__rounded(x * x));
            sums[1][d % 16] = TQKV__AS_FLOAT(sums[1][d % 16] + tqkv__rounded(row[d] * row[d]));
        }
    }
    return tqkv__sum_16(sums[0]) > tqkv__sum_16(sums[1]) * 0.25f;
}

static int tqkv__count_new(const tqkv_cache *c, int first)
{
    int n = 0;
    for (int p = first; p < c->learn_from; p++) n += c->is_new[p];
    return n;
}

/* Makes the scales of a head so large, all by one factor, that halves hold its raw rows however they are rotated. */
static TQKV__NOINLINE void tqkv__limit_scales(const tqkv_cache *c, const tqkv__stream *raw, int kv_head,
                                              const float *center, float *largest, float *scale)
{
    float row[TQKV_MAX_HEAD_DIM], factor = 1.0f;
    memset(largest, 0, (size_t)raw->head_dim * sizeof(float));
    for (int slot = 0; slot < c->learn_from; slot++) {
        tqkv__read_row(raw, kv_head, slot, row);
        for (int d = 0; d < raw->head_dim; d++) {
            const float size = fabsf(TQKV__AS_FLOAT(row[d] - center[d]));
            largest[d] = size > largest[d] ? size : largest[d];
        }
    }
    for (int d = 0; d < raw->head_dim; d++) {
        const float wanted = TQKV__AS_FLOAT(largest[d] * TQKV__LEAST_LEARNT / scale[d]);
        factor = wanted > factor ? wanted : factor;
    }
    for (int d = 0; d < raw->head_dim; d++) scale[d] = TQKV__AS_FLOAT(scale[d] * factor);
}

/* Learns centre and scale of the keys from the new positions, without those that stay exact, if enough remain. Too few
   new ones: it learns from all, because a model's biases show in any text, but bounds the scales. */
static TQKV__NOINLINE void tqkv__learn(tqkv_cache *c)
{
    float room[TQKV_MAX_HEAD_DIM];
    tqkv__stream raw, values;
    const uint64_t mode = tqkv__fp_exact();
    (void)tqkv__stream_open(&c->raw[0], &raw);
    (void)tqkv__stream_open(&c->raw[c->shared ? 0 : 1], &values);
    for (int p = 0; p < c->learn_from; p++) c->is_new[p] = tqkv__judge(&values, p);
    const bool few = tqkv__count_new(c, 0) < tqkv__least_new(c);
    if (few) memset(c->is_new, true, (size_t)c->learn_from);
    if (tqkv__count_new(c, c->exact_first) >= TQKV__LEAST_POSITIONS) memset(c->is_new, false, (size_t)c->exact_first);
    const size_t dim = (size_t)raw.head_dim;
    const tqkv__tied tied = {c->pairs, c->keys.rotary_dim ? c->keys.rotary_dim : raw.head_dim};
    float *center = tqkv__channel_room(c, TQKV__KEYS, TQKV__CENTERS),
          *scale = tqkv__channel_room(c, TQKV__KEYS, TQKV__SCALES);
    for (size_t h = 0; h < (size_t)raw.n_kv_heads; h++, center += dim, scale += dim) {
        tqkv__calibrate_head(&raw, NULL, c->is_new, c->learn_from, (int)h, NULL, &tied, center, scale);
        for (size_t d = 0; few && d < dim; d++) {
            const float g = scale[d] < TQKV__LARGEST_OF_FEW ? scale[d] : TQKV__LARGEST_OF_FEW;
            scale[d] = g > TQKV__LEAST_OF_FEW ? g : TQKV__LEAST_OF_FEW;
        }
        tqkv__limit_scales(c, &raw, (int)h, center, room, scale);
    }
    tqkv__fp_restore(mode);
    tqkv__name_channels(c, TQKV__KEYS, TQKV__CENTERS, true);
    tqkv__cache_channels(c, TQKV__KEYS, TQKV__SCALES, tqkv__channel_room(c, TQKV__KEYS, TQKV__SCALES), dim);
}

/* -- Encoding what was raw -- */

/* Encodes n raw positions of its stream to store i, or what it holds of them at `end`; halves are copied. */
static void tqkv__settle_store(const tqkv_cache *c, int i, int64_t n, int64_t end)
{
    const tqkv__stream_kind kind = tqkv__stream_kinds[i];
    const int64_t room = kind.end == TQKV__LAST_END ? tqkv__newest_room(c) : c->keys.capacity;
    const int64_t from = kind.end == TQKV__FIRST_END || end < room ? 0 : end - room;
    tqkv__stream raw, to;
    if (kind.end == TQKV__FIRST_END && n > c->exact_first) n = c->exact_first;
    if (from >= n || !tqkv__has_store(c, i) || tqkv__stream_open(&c->raw[kind.side], &raw) != TQKV_OK ||
        tqkv__stream_open(TQKV__STORE_AT(c, i), &to) != TQKV_OK)
        return;
    tqkv__convert_streams(&to, &raw, from, (int)(n - from), &c->attention.parallel);
}

static void tqkv__count_settled(tqkv_cache *c, int64_t n, int64_t end)
{
    c->learning = false;
    c->raw_below = c->learn_from;
    c->raw_end = n;
    c->exact_below = n < c->exact_first ? n : c->exact_first;
    c->exact_from = c->exact_held = 0;
    if (end > tqkv__newest_room(c)) c->exact_held = end - tqkv__newest_room(c) < n ? end - tqkv__newest_room(c) : n;
}

/* Learns, and encodes n raw positions, with what is kept besides of them at `end`. */
static void tqkv__settle(tqkv_cache *c, int64_t n, int64_t end)
{
    tqkv__learn(c);
    for (int i = 0; i < TQKV__RAW; i++) tqkv__settle_store(c, i, n, end);
    tqkv__count_settled(c, n, end);
}

/* Learns if all that the cache holds is enough: after an edit, or of fewer positions than another cache. */
static void tqkv__settle_all(tqkv_cache *c)
{
    const int64_t end = c->attention.end;
    if (!c->learning || end < c->learn_from) return;
    tqkv__settle(c, end, end);
    tqkv__cache_advance(c, 0); /* a ring may hold less */
}

/* -- Appending -- */

static void tqkv__skip_tokens(tqkv__encode_job *job, int n)
{
    if (n > job->n_tokens) n = job->n_tokens < 0 ? 0 : job->n_tokens;
    for (int i = 0; i < job->n_streams; i++) job->src[i] = tqkv__source_row(job->streams[i], job->src[i], (size_t)n, 0);
    job->n_tokens -= n;
    job->position += n;
    if (job->n_tokens <= 0) job->n_streams = 0;
}

static void tqkv__append_raw(const tqkv_cache *c, const tqkv__append *append, int n)
{
    tqkv__stream raw[TQKV__CACHE_STREAMS];
    tqkv__encode_job job = append->job;
    if (job.n_tokens > n) job.n_tokens = n;
    for (int i = 0; i < job.n_streams; i++) {
        const int stream = (int)(job.streams[i] - append->streams);
        (void)tqkv__stream_open(&c->raw[stream], &raw[i]);
        raw[i].strides = job.streams[i]->strides;
        job.streams[i] = &raw[i];
    }
    job.encode = true;
    tqkv__run_encode_tasks(&job);
}

/* Appends to a cache that learns: raw halves as far as it learns from them, then codes. A failure changes nothing. */
static tqkv_result tqkv__append_learning(tqkv_cache *c, tqkv__append *append)
{
    const int64_t end = c->attention.end + append->job.n_tokens, at = end < c->learn_from ? end : c->learn_from;
    const tqkv_result r = tqkv__get_raw(c);
    if (r != TQKV_OK) return r;
    const int n = (int)(at - c->attention.end);
    tqkv__append_raw(c, append, n);
    tqkv__skip_tokens(&append->job, n);
    tqkv__skip_tokens(&append->first_job, n);
    if (at < c->learn_from) return TQKV_OK;
    tqkv__settle(c, at, end);
    if (append->job.n_tokens) tqkv__append_raw(c, append, TQKV__TILE);
    c->raw_end = end - at < TQKV__TILE ? end : at + TQKV__TILE;
    if (c->attention.non_causal) tqkv__drop_raw(c); /* all queries see what is encoded */
    tqkv__stream *const keys[2] = {&append->streams[TQKV__KEYS], &append->first[TQKV__KEYS]};
    for (int i = 0; i < 2; i++) { /* for what is left */
        keys[i]->center = c->keys.center;
        keys[i]->channel_scale = c->keys.channel_scale;
        keys[i]->inverses = tqkv__channel_room(c, TQKV__KEYS, TQKV__INVERSES);
    }
    if (append->job.n_tokens) tqkv__append_rows(c, append);
    return TQKV_OK;
}

/* Counts what a GPU has appended, or will have when what is recorded has run: the cache then has centre and scale,
   whose numbers the processor does not know yet. */
static void tqkv__count_append(tqkv_cache *c, int n_tokens)
{
    const int64_t end = c->attention.end + n_tokens;
    if (!c->learning && n_tokens) tqkv__drop_raw(c);
    if (c->learning && end >= c->learn_from) {
        c->learnt_at = c->attention.end;
        tqkv__count_settled(c, c->learn_from, end);
        c->raw_end = end < c->learn_from + TQKV__TILE ? end : c->learn_from + TQKV__TILE;
        tqkv__name_channels(c, TQKV__KEYS, TQKV__CENTERS, true);
        tqkv__name_channels(c, TQKV__KEYS, TQKV__SCALES, true);
        if (c->attention.non_causal) tqkv__drop_raw(c);
    }
    tqkv__cache_advance(c, n_tokens);
}

/* On a GPU a tail is encoded to its stream while the cache learns, too; after raw rows moved or came, the stream
   follows. */
static void tqkv__follow_tail(const tqkv_cache *c)
{
    const int64_t end = c->attention.end;
    if (!c->metal || !c->learning) return;
    tqkv__settle_store(c, TQKV__TAIL, end, end);
    tqkv__settle_store(c, TQKV__FIRST_TAIL, end, end);
}

/* -- Attending -- */

/* Returns how many of the newest n_queries queries stand at positions that are read raw. */
static int tqkv__raw_queries(const tqkv_cache *c, int n_queries)
{
    const int64_t first = c->attention.end - n_queries, n = c->raw_below;
    if (!n || first >= n || !c->attention.end) return 0; /* of nothing there is nothing raw */
    return c->attention.end <= n ? n_queries : (int)(n - first);
}

/* Returns the attention of n_queries queries, the last of which stands before `end`, to what is raw. */
static tqkv_attention tqkv__raw_attention(const tqkv_cache *c, int64_t end, int n_queries)
{
    tqkv_attention a = c->attention;
    a.keys = &c->raw[0];
    a.values = &c->raw[c->shared ? 0 : 1];
    a.tail = c->tail.head_dim ? &c->raw[2] : NULL;
    a.first.keys = a.first.values = a.first.tail = a.last.keys = a.last.values = NULL;
    a.end = end;
    a.kv_len = (int)end;
    a.n_queries = n_queries;
    return a;
}

/* -- Presets -- */

TQKV_API tqkv_cache_desc tqkv_cache_preset(tqkv_preset preset)
{
    static const tqkv_format formats[3][2] = {{TQKV_I8, TQKV_TQ4}, {TQKV_TQ5, TQKV_TQ3}, {TQKV_TQ3, TQKV_TQ2}};
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    if (preset != TQKV_SAFE && preset != TQKV_SMALL && preset != TQKV_TINY) return desc;
    desc.key_format = formats[preset][0];
    desc.value_format = formats[preset][1];
    desc.calibrate = 512;
    desc.exact_first = 4;
    desc.exact_last = 128;
    return desc;
}

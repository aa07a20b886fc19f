/* >>cache-edit: truncate, remove, keep, fork. */

/* Lets positions below `from` be read as codes after an edit. */
static void tqkv__exact_begins(tqkv_cache *c, int64_t from)
{
    c->exact_from = c->exact_last && !c->learning ? from : 0;
}

/* Forgets what the cache has learned: it is raw again, and learns. */
static void tqkv__unlearn(tqkv_cache *c)
{
    tqkv__name_channels(c, TQKV__KEYS, TQKV__CENTERS, false);
    tqkv__name_channels(c, TQKV__KEYS, TQKV__SCALES, false);
    c->learning = true;
    c->raw_below = INT64_MAX;
    c->first = c->exact_below = c->exact_from = c->exact_held = 0;
}

/* Whether an edit that takes positions back from `end` on takes some that the last append has learned from. The cache
   then is as if they had never come. */
static bool tqkv__takes_learnt(const tqkv_cache *c, int64_t end)
{
    return !c->learning && end < c->raw_below && c->raw[0].codes;
}

/* After an edit from `first` on, which may move positions down, what was raw is no longer what the cache holds. */
static void tqkv__begin_edit(tqkv_cache *c, int64_t first)
{
    c->learnt_at = -1;
    if (!c->learning && first < c->raw_below) tqkv__drop_raw(c);
    if (c->raw_end > first) c->raw_end = first;
}

TQKV_API tqkv_result tqkv_cache_truncate(tqkv_cache *c, int64_t end)
{
    if (!c) return TQKV__INVALID("the cache is NULL");
    if (end < 0 || end > c->attention.end || (end < c->first && end != 0))
        return TQKV__REFUSE(OUT_OF_RANGE, "end: negative, behind the cache's end, or gone from its ring");
    if (end < c->attention.end) c->learnt_at = -1;
    if (tqkv__takes_learnt(c, end) || (end == 0 && c->raw[0].head_dim && !c->learning)) tqkv__unlearn(c);
    if (c->raw_end > end) c->raw_end = end;
    if (end == 0) c->first = 0;
    if (c->exact_below > end) c->exact_below = end;
    if (end < c->attention.end) tqkv__exact_begins(c, tqkv__exact_kept(c) < end ? tqkv__exact_kept(c) : end);
    if (c->exact_held > end) c->exact_held = end;
    c->attention.end = end;
    return TQKV_OK;
}

/* Moves n positions down: halves of the first ones as far as there are any, of the newest if all have them. */
static void tqkv__move_positions(const tqkv_cache *c, int64_t source, int64_t target, int64_t n)
{
    const int64_t below = c->exact_below - source < n ? c->exact_below - source : n;
    for (int i = 0; i < TQKV__CACHE_STORES; i++) {
        tqkv__stream s;
        const tqkv_store *store = tqkv__store_of(c, i);
        const bool first = tqkv__stream_kinds[i].end == TQKV__FIRST_END;
        const bool newest = tqkv__stream_kinds[i].end == TQKV__LAST_END;
        if (!store || (newest && target < c->exact_held) || c->learning != (i >= TQKV__RAW)) continue;
        if (tqkv__stream_open(store, &s) == TQKV_OK) tqkv__move_rows(&s, source, &s, target, first ? below : n);
    }
}

static void tqkv__reverse_rows(uint8_t *rows, int n, size_t size)
{
    uint8_t row[2 * TQKV_MAX_HEAD_DIM];
    for (uint8_t *last = rows + (size_t)n * size; rows + size < last; rows += size) {
        last -= size;
        memcpy(row, rows, size);
        memcpy(rows, last, size);
        memcpy(last, row, size);
    }
}

/* Turns the rings of halves: position p + by becomes position p. */
static void tqkv__turn_rings(const tqkv_cache *c, int64_t by)
{
    for (int i = TQKV__LAST_KEYS; i <= TQKV__LAST_VALUES; i++) {
        tqkv__stream s;
        if (!tqkv__has_store(c, i) || tqkv__stream_open(TQKV__STORE_AT(c, i), &s) != TQKV_OK) continue;
        const int n = (int)(by % s.capacity);
        for (int h = 0; h < s.n_kv_heads; h++) {
            uint8_t *rows = tqkv__codes_at(&s, h, 0);
            tqkv__reverse_rows(rows, n, s.row_bytes);
            tqkv__reverse_rows(rows + (size_t)n * s.row_bytes, s.capacity - n, s.row_bytes);
            tqkv__reverse_rows(rows, s.capacity, s.row_bytes);
        }
    }
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_remove(tqkv_cache *c, int64_t first, int64_t count)
{
    if (!c) return TQKV__INVALID("the cache is NULL");
    if (c->keys.ring) return TQKV__REFUSE(UNSUPPORTED, "remove: the cache is a ring");
    if (count < 0) return TQKV__INVALID("count is negative");
    if (first < 0 || first > c->attention.end || count > c->attention.end - first)
        return TQKV__REFUSE(OUT_OF_RANGE, "first, count: not among the resident positions");
    if (count) tqkv__begin_edit(c, first);
    const int64_t behind = first + count, n = c->attention.end - behind;
    tqkv__move_positions(c, behind, first, n);
    const int64_t kept = tqkv__exact_kept(c);
    if (first < c->exact_held) {
        tqkv__turn_rings(c, count);
        c->exact_held = (behind > c->exact_held ? behind : c->exact_held) - count;
    }
    if (count) tqkv__exact_begins(c, first < kept ? (behind > kept ? behind : kept) - count : kept);
    if (first < c->exact_below) c->exact_below = c->exact_below > behind ? c->exact_below - count : first;
    c->attention.end -= count;
    tqkv__follow_tail(c);
    return TQKV_OK;
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_keep(tqkv_cache *c, int n, const int *kept, int n_kept)
{
    if (!c) return TQKV__INVALID("the cache is NULL");
    if (n < 0 || n_kept < 0 || (n_kept > 0 && !kept)) return TQKV__INVALID("n or n_kept is negative, or kept is NULL");
    if (n > c->attention.end - c->first) return TQKV__REFUSE(OUT_OF_RANGE, "n: more positions than are resident");
    if ((uintptr_t)kept % sizeof(int) || tqkv__in_cache(c, kept, (size_t)n_kept * sizeof(int)))
        return TQKV__INVALID("kept: not aligned as int, or in the cache");
    for (int i = 0; i < n_kept; i++) {
        if (kept[i] < 0 || kept[i] >= n) return TQKV__REFUSE(OUT_OF_RANGE, "kept: not one of the newest n positions");
        if (i && kept[i] <= kept[i - 1]) return TQKV__INVALID("kept: not ascending");
    }
    const int64_t first = c->attention.end - n;
    int64_t same = first; /* positions below do not move */
    for (int i = 0; i < n_kept && kept[i] == i; i++) same++;
    if (n_kept < n && tqkv__takes_learnt(c, same) && c->raw_end == c->attention.end) tqkv__unlearn(c);
    if (n_kept < n) tqkv__begin_edit(c, same);
    const int64_t kept_from = tqkv__exact_kept(c);
    int64_t below = first;
    for (int i = 0, next; i < n_kept; i = next) {
        for (next = i + 1; next < n_kept && kept[next] == kept[next - 1] + 1;) next++;
        tqkv__move_positions(c, first + kept[i], first + i, next - i);
        for (int j = i; j < next && first + kept[j] < c->exact_below;) below = first + ++j;
    }
    c->attention.end = first + n_kept;
    if (c->exact_below > below) c->exact_below = below;
    if (same < c->exact_held) c->exact_held = c->attention.end; /* their rows did not move */
    if (n_kept < n) tqkv__exact_begins(c, same < kept_from ? c->attention.end : kept_from);
    tqkv__settle_all(c);
    tqkv__follow_tail(c);
    return TQKV_OK;
}

static tqkv_cache_desc tqkv__desc_of(const tqkv_cache *c)
{
#define TQKV__FIELD_OF(field, member, ...) desc.field = c->member;
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    TQKV__CACHE_NUMBERS(TQKV__FIELD_OF)
    TQKV__CACHE_SHAPE(TQKV__FIELD_OF)
    TQKV__CACHE_USE(TQKV__FIELD_OF)
    desc.strides.k = c->keys.strides;
    desc.strides.v = c->values.strides;
    desc.strides.q = c->attention.query_strides;
    desc.strides.out = c->attention.output_strides;
    return desc;
}

static void tqkv__take_use(const tqkv_cache_desc *from, tqkv_cache_desc *to)
{
    if (from->type) to->type = from->type;
    if (from->sinks) to->sinks = from->sinks;
    if (from->parallel.run) to->parallel = from->parallel;
    if (from->allocator.alloc || from->allocator.free) to->allocator = from->allocator;
    if (from->metal) to->metal = from->metal;
    if (from->matrix_group) to->matrix_group = from->matrix_group;
    if (from->tag) to->tag = from->tag;
    to->non_causal = to->non_causal || from->non_causal;
    const tqkv_strides all[] = {from->strides.k, from->strides.v, from->strides.q, from->strides.out};
    bool has = false;
    for (int i = 0; i < 4; i++) has = has || all[i].token || all[i].head;
    if (has) to->strides = from->strides;
}

static tqkv_result tqkv__check_same_given(const tqkv_cache_desc *desc, const tqkv_cache *c)
{
    tqkv_result r = tqkv__check_given(desc, c);
    for (int i = 0; r == TQKV_OK && i < TQKV__CACHE_STREAMS; i++)
        for (int k = TQKV__CENTERS; k <= TQKV__SCALES; k++) {
            size_t stride;
            const tqkv_store *s = tqkv__store_of(c, i);
            const float *given = s ? tqkv__given(desc, c, i, (tqkv__channels)k, &stride) : NULL;
            if (!given) continue;
            const float *own = k == TQKV__CENTERS ? s->center : s->channel_scale;
            const size_t dim = (size_t)s->head_dim;
            for (size_t h = 0; h < (size_t)s->n_kv_heads; h++)
                if (!own || memcmp(given + h * stride, own + h * dim, dim * sizeof(float)) != 0)
                    return TQKV__INVALID("desc: a centre or a scale is neither NULL nor that of the cache or snapshot");
        }
    return r;
}

static tqkv_result tqkv__check_match(const tqkv_cache_desc *wanted, const tqkv_cache_desc *found)
{
#define TQKV__FIELD_MATCHES(field, ...) \
    if (meant.field != 0 && meant.field != found->field) \
        return TQKV__INVALID("desc: " #field " is neither 0 nor that of the cache or snapshot");
    tqkv_cache_desc meant = *wanted;
    if (meant.softcap < 0.0f && found->softcap == 0.0f) meant.softcap = 0.0f; /* off in both */
    TQKV__CACHE_NUMBERS(TQKV__FIELD_MATCHES)
    TQKV__CACHE_SHAPE(TQKV__FIELD_MATCHES)
    if (meant.tag && found->tag && meant.tag != found->tag)
        return TQKV__INVALID("desc: tag is neither 0 nor that of the cache or snapshot: another model's");
    return TQKV_OK;
}

/* Copies a store, or makes halves of a stream that was F16. */
static tqkv_result tqkv__fork_store(const tqkv_cache *c, int i, const tqkv_cache *copy, const tqkv_parallel *parallel)
{
    const tqkv_store *to = tqkv__store_of(copy, i), *from = tqkv__store_of(c, i);
    const tqkv__range range = tqkv__range_of(c, i);
    if (!to || range.from >= range.to) return TQKV_OK;
    if (!from) { /* a ring would have kept what is gone */
        TQKV_ASSERT(range.from >= c->first);
        from = tqkv__store_of(c, tqkv__stream_kinds[i].side);
    }
    return tqkv__convert(to, from, range.from, (int)(range.to - range.from), parallel);
}

static tqkv_result tqkv__copy_cache(const tqkv_cache *c, tqkv_cache *copy, const tqkv_parallel *parallel)
{
    tqkv_result r = c->learning && c->attention.end ? tqkv__get_raw(copy) : TQKV_OK;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv_store *from = tqkv__store_of(c, i);
        if (!from) continue;
        tqkv__cache_channels(copy, i, TQKV__CENTERS, from->center, (size_t)from->head_dim);
        tqkv__cache_channels(copy, i, TQKV__SCALES, from->channel_scale, (size_t)from->head_dim);
    }
    for (int i = 0; r == TQKV_OK && i < TQKV__CACHE_STORES; i++) r = tqkv__fork_store(c, i, copy, parallel);
    copy->calibrate = c->calibrate;
    copy->raw_below = c->raw_below;
    copy->first = c->first;
    copy->exact_below = c->exact_below;
    copy->exact_from = c->exact_from;
    copy->exact_held = tqkv__range_of(c, TQKV__LAST_KEYS).from;
    copy->attention.end = c->attention.end;
    if (r == TQKV_OK) tqkv__settle_all(copy);
    if (r == TQKV_OK) tqkv__follow_tail(copy);
    return r;
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_fork(const tqkv_cache *c, const tqkv_cache_desc *desc, tqkv_cache **out)
{
    if (!out) return TQKV__INVALID("out is NULL");
    *out = NULL;
    if (!c) return TQKV__INVALID("the cache is NULL");
    tqkv_cache_desc copied = tqkv__desc_of(c);
    tqkv_cache *copy;
    if (desc) {
        if (desc->capacity) copied.capacity = desc->capacity;
        if (desc->key_format) copied.key_format = desc->key_format;
        if (desc->value_format || c->shared)
            copied.value_format = desc->value_format ? desc->value_format : copied.key_format;
        if (desc->tail_format) copied.tail_format = desc->tail_format;
        copied.ring = copied.ring || desc->ring;
        tqkv_result match = tqkv__check_match(desc, &copied);
        if (match == TQKV_OK) match = tqkv__check_same_given(desc, c);
        if (match != TQKV_OK) return match;
        tqkv__take_use(desc, &copied);
    }
    const int64_t resident = c->attention.end - c->first, least = resident > c->exact_below ? resident : c->exact_below;
    if (copied.capacity > 0 && copied.capacity < least)
        return TQKV__REFUSE(OUT_OF_RANGE, "capacity: too small for the resident or for the first positions");
    if (!c->learning) copied.calibrate = 0;
    tqkv_result r = tqkv__create(&copied, c->learn_from, &copy);
    if (r != TQKV_OK) return r;
    if ((r = tqkv__copy_cache(c, copy, &copied.parallel)) == TQKV_OK)
        *out = copy;
    else
        tqkv_cache_destroy(copy);
    return r;
}

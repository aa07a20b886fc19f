/* >>convert: rows moved, and stores in another format */

/* Moves the rows of n positions from `source` on to `target` on, downwards in one stream or to another one. In
   ascending order no row is overwritten before it has moved, in a ring too. */
static void tqkv__move_rows(const tqkv__stream *from, int64_t source, const tqkv__stream *to, int64_t target, int64_t n)
{
    while (n > 0) {
        const int source_slot = tqkv__slot(from, source), target_slot = tqkv__slot(to, target);
        const int source_room = tqkv__slots_left(from, source), target_room = tqkv__slots_left(to, target);
        int64_t now = n < source_room ? n : source_room;
        if (now > target_room) now = target_room;
        for (int h = 0; h < from->n_kv_heads; h++) {
            memmove(tqkv__codes_at(to, h, target_slot), tqkv__codes_at(from, h, source_slot),
                    (size_t)now * from->row_bytes);
            if (from->norms_per_row)
                memmove(tqkv__norms_at(to, h, target_slot), tqkv__norms_at(from, h, source_slot),
                        (size_t)now * (size_t)from->norms_per_row * sizeof(float));
        }
        source += now;
        target += now;
        n -= now;
    }
}

/* Decodes a row in the basis of its codes; dst: [head_dim]. Codes are little-endian on any machine; where there are
   vectors, so are halves. */
static void tqkv__read_row(const tqkv__stream *s, int kv_head, int slot, float *dst)
{
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    const uint8_t *codes = tqkv__codes_at(s, kv_head, slot);
    if (s->kind == TQKV__HALF && codec != &tqkv__codec_scalar)
        codec->widen(TQKV_TYPE_F16, codes, NULL, NULL, s->head_dim, dst);
    else
        tqkv__decode_row(s, codes, tqkv__norms_at(s, kv_head, slot), dst);
}

/* Whether decoding and rotating a row gives floats. The bound leaves room for sums of TQKV_MAX_HEAD_DIM products. */
static bool tqkv__row_converts(const tqkv__stream *s, int kv_head, int slot)
{
    float row[TQKV_MAX_HEAD_DIM];
    const float *norms = tqkv__norms_at(s, kv_head, slot);
    if (s->kind == TQKV__HALF) tqkv__read_row(s, kv_head, slot, row);
    if (s->kind == TQKV__HALF) return tqkv__all_finite(row, (size_t)s->head_dim);
    for (int b = 0; b < s->norms_per_row; b++)
        if (!(fabsf(tqkv__factor(s, norms[b])) < 1.0e30f)) return false;
    return true;
}

/* Whether both stores are tables over one pool, and those pages of `to` that have n > 0 positions are none of those of
   `from`. */
static bool tqkv__other_pages(const tqkv__stream *to, const tqkv__stream *from, int64_t position, int n)
{
    if (!to->pages || !from->pages || to->codes != from->codes || to->norms != from->norms) return false;
    if (to->capacity != from->capacity || to->page_size != from->page_size) return false;
    if (to->row_bytes != from->row_bytes || to->norms_per_row != from->norms_per_row) return false;
    const int64_t first = position / to->page_size, count = (position + n - 1) / to->page_size - first + 1;
    return tqkv__all_distinct(to->pages + first, count, from->pages + first, count);
}

/* Whether n > 0 positions can be converted without writing what is still to be read. Rows that begin where longer rows
   begin can be written over them in ascending order. */
static bool tqkv__stays_apart(const tqkv__stream *to, const tqkv__stream *from, int64_t position, int n)
{
    const bool aligned = to->capacity == from->capacity && to->ring == from->ring && !to->pages && !from->pages;
    const bool others = tqkv__other_pages(to, from, position, n);
    const bool codes_stay = others || (to->codes == from->codes && aligned && to->row_bytes <= from->row_bytes);
    const bool norms_stay = others || (to->norms == from->norms && aligned && to->norms_per_row <= from->norms_per_row);
    return (codes_stay || !tqkv__overlap(to->codes, to->codes_size, from->codes, from->codes_size)) &&
           (norms_stay || !tqkv__overlap(to->norms, to->norms_size, from->norms, from->norms_size)) &&
           !tqkv__overlap(to->codes, to->codes_size, from->norms, from->norms_size) &&
           !tqkv__overlap(to->norms, to->norms_size, from->codes, from->codes_size) &&
           !tqkv__encoding_overlaps(to, from->center, tqkv__center_size(from)) &&
           !tqkv__encoding_overlaps(to, from->channel_scale, tqkv__center_size(from)) &&
           !tqkv__encoding_overlaps(to, from->pages, tqkv__table_size(from));
}

/* Whether rows are copied rather than encoded again. */
static bool tqkv__same_rows(const tqkv__stream *a, const tqkv__stream *b)
{
    return a->format == b->format && a->rotated == b->rotated && !a->center == !b->center &&
           !a->channel_scale == !b->channel_scale &&
           (a->block_scale == b->block_scale || a->kind != TQKV__BOOK || a->norms_per_row == 1);
}

TQKV__COLD static tqkv_result tqkv__convert_open(const tqkv_store *to_store, const tqkv_store *from_store,
                                                 int64_t position, int n, tqkv__stream *to, tqkv__stream *from)
{
    tqkv_result r = tqkv__open_positions(to_store, n, position, to);
    if (r == TQKV_OK) r = tqkv__open_positions(from_store, n, position, from);
    if (r == TQKV_OK) r = tqkv__check_written(to, n, position);
    if (r != TQKV_OK) return r;
    if (to->head_dim != from->head_dim || to->n_kv_heads != from->n_kv_heads)
        return TQKV__INVALID("the stores differ in head_dim or n_kv_heads");
    if (to->rotated != from->rotated && to->kind != TQKV__HALF && from->kind != TQKV__HALF)
        return TQKV__INVALID("rotation: the stores differ in it");
    if ((r = tqkv__check_channels_match(to, from)) != TQKV_OK) return r;
    if (n && !tqkv__stays_apart(to, from, position, n))
        return TQKV__INVALID("`to` overlaps `from`, other than in pages of its own or with shorter rows in place");
    for (int p = 0; p < n && !tqkv__same_rows(to, from); p++)
        for (int h = 0; h < from->n_kv_heads; h++)
            if (!tqkv__row_converts(from, h, tqkv__slot(from, position + p)))
                return TQKV__REFUSE(NOT_FINITE, "a row of `from` holds NaN, infinity or a norm of 1e30 or more");
    return TQKV_OK;
}

/* Converts the rows of n positions of a head, in their order, a few at a time: all of these are read, then written. Of
   rows as they came, `from` lacks the centre and the scale of `to`. */
static TQKV__NOINLINE void tqkv__convert_rows(const tqkv__stream *from, const tqkv__stream *to,
                                              const tqkv__quantiser *q, int kv_head, int64_t position, int64_t n)
{
    enum { buffer = 1024 };
    TQKV__ALIGNED float values[buffer + 16]; /* encoding loads whole vectors */
    float room[TQKV_MAX_HEAD_DIM];
    tqkv__row rows[buffer / 32];
    tqkv__stream decoded = *to; /* how the decoded rows are encoded */
    const tqkv__codec *codec = tqkv__codec_for(to->head_dim);
    const int batch = buffer / to->head_dim;
    const float *center = from->center ? NULL : tqkv__center_of(to, kv_head),
                *inverses = from->channel_scale ? NULL : tqkv__inverses_of(to, kv_head, 1, room);
    decoded.type = TQKV_TYPE_F32;
    decoded.rotated = to->rotated && !from->rotated;
    for (; n > 0; position += batch, n -= batch) {
        const int now = n < batch ? (int)n : batch;
        for (int i = 0; i < now; i++) {
            const int target = tqkv__slot(to, position + i);
            float *row = values + i * to->head_dim;
            tqkv__read_row(from, kv_head, tqkv__slot(from, position + i), row);
            if (from->rotated && !to->rotated) codec->unrotate(row, to->head_dim);
            const tqkv__row encoded = {
                row,  center, inverses, tqkv__codes_at(to, kv_head, target), tqkv__norms_at(to, kv_head, target),
                NULL, NULL};
            rows[i] = encoded;
        }
        codec->encode_rows(&decoded, q, rows, now);
    }
}

typedef struct tqkv__convert_job {
    const tqkv__stream *from, *to;
    int64_t position;
    int n, n_tasks;
} tqkv__convert_job;

/* Converts a share of the positions in ascending order of their slots, so that it can be done in place: of a ring that
   wraps, the newer ones first. */
static void tqkv__convert_task(void *context, int index)
{
    const tqkv__convert_job *job = (const tqkv__convert_job *)context;
    const tqkv__stream *from = job->from, *to = job->to;
    const int64_t first = (int64_t)job->n * index / job->n_tasks, end = (int64_t)job->n * (index + 1) / job->n_tasks;
    const int64_t position = job->position + first, n = end - first;
    const int64_t room = from->ring ? tqkv__slots_left(from, position) : n, before = n < room ? n : room;
    const uint64_t mode = tqkv__fp_exact();
    tqkv__quantiser q;
    if (to->kind == TQKV__BOOK) tqkv__quantiser_open(to, &q);
    for (int h = 0; h < from->n_kv_heads; h++) {
        tqkv__convert_rows(from, to, &q, h, position + before, n - before);
        tqkv__convert_rows(from, to, &q, h, position, before);
    }
    tqkv__fp_restore(mode);
}

/* Converts the positions [position, position + n) on the threads of a hook or, in place, in order. */
static void tqkv__convert_streams(const tqkv__stream *to, const tqkv__stream *from, int64_t position, int n,
                                  const tqkv_parallel *parallel)
{
    const bool in_place = to->codes == from->codes || (to->norms_size && to->norms == from->norms);
    tqkv__convert_job job = {from, to, position, n, in_place ? 1 : tqkv__tasks_for(parallel, to, n)};
    if (tqkv__same_rows(to, from))
        tqkv__move_rows(from, position, to, position, n);
    else if (job.n_tasks > 1)
        parallel->run(parallel->user, job.n_tasks, tqkv__convert_task, &job);
    else
        tqkv__convert_task(&job, 0);
}

static tqkv_result tqkv__convert(const tqkv_store *to_store, const tqkv_store *from_store, int64_t position, int n,
                                 const tqkv_parallel *parallel)
{
    tqkv__stream to, from;
    const tqkv_result r = tqkv__convert_open(to_store, from_store, position, n, &to, &from);
    if (r == TQKV_OK) tqkv__convert_streams(&to, &from, position, n, parallel);
    return r;
}

TQKV_API tqkv_result tqkv_store_convert(const tqkv_store *to, const tqkv_store *from, int64_t position, int n_positions)
{
    const tqkv_parallel serial = {NULL, NULL};
    return tqkv__convert(to, from, position, n_positions, to ? &to->parallel : &serial);
}

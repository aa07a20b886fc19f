/* >>encode: rows into a store and out of it; how they lie on the scale */

/* Opens a store to encode at `position`; *bytes: of src, with gaps. The checks that encode and append share, except for
   NaN and infinity. */
static tqkv_result tqkv__encode_open(const tqkv_store *store, const void *src, int n_tokens, int64_t position,
                                     tqkv__stream *s, size_t *bytes)
{
    tqkv_result r = tqkv__stream_open(store, s);
    if (r == TQKV_OK) r = tqkv__check_rows(s, src, n_tokens, bytes);
    if (r != TQKV_OK) return r;
    if (tqkv__encoding_overlaps(s, src, *bytes))
        return TQKV__INVALID("src overlaps the store"); /* it may overlap the centre, which is only read */
    r = tqkv__check_positions(s, n_tokens, position, -1);
    return r == TQKV_OK ? tqkv__check_written(s, n_tokens, position) : r;
}

/* Whether [n][n_heads] rows hold neither NaN nor infinity: in one go, or token by token, or row by row. */
static bool tqkv__all_rows_finite(const tqkv__codec *codec, tqkv_type type, const void *p, tqkv_strides strides, int n,
                                  int n_heads, int dim)
{
    const size_t size = tqkv__type_size(type), row = (size_t)dim, heads = (size_t)n_heads;
    if (strides.head == row && strides.token == heads * row)
        return codec->rows_finite(type, p, (size_t)n * heads * row);
    const size_t each = strides.head == row ? 1 : heads, length = heads / each * row; /* each: rows of a token */
    for (size_t t = 0; t < (size_t)n; t++)
        for (size_t h = 0; h < each; h++)
            if (!codec->rows_finite(type, (const uint8_t *)p + (t * strides.token + h * strides.head) * size, length))
                return false;
    return true;
}

static bool tqkv__rows_finite(const tqkv__stream *s, const void *src, int n_tokens)
{
    return tqkv__all_rows_finite(tqkv__codec_for(s->head_dim), s->type, src, s->strides, n_tokens, s->n_kv_heads,
                                 s->head_dim);
}

static tqkv_result tqkv__check_source(const tqkv__stream *s, const void *src, int n_tokens, const void *to,
                                      size_t alignment, size_t size)
{
    size_t bytes;
    const tqkv_result r = tqkv__check_rows(s, src, n_tokens, &bytes);
    if (r != TQKV_OK) return r;
    if (!tqkv__aligned_at(to, alignment) || tqkv__overlap(src, bytes, to, size) || tqkv__channels_overlap(s, to, size))
        return TQKV__INVALID(
            "scaled, mean or out: NULL, not aligned as its type, or overlaps src, the centre or the scale");
    return tqkv__rows_finite(s, src, n_tokens) ? TQKV_OK : TQKV__REFUSE(NOT_FINITE, "src holds NaN or infinity");
}

/* Returns the first token to write: of more than a ring holds only the last ones, so that none is overwritten. */
static int tqkv__first_kept(const tqkv__stream *s, int n_tokens)
{
    return s->ring && n_tokens > s->capacity ? n_tokens - s->capacity : 0;
}

/* Tokens [from, to) of src; src[0] is for `position`. halves: a ring of halves that takes what remains in it of the
   tokens up to `end`, too, or NULL */
typedef struct tqkv__tokens {
    const tqkv__stream *halves;
    const void *src;
    int from, to;
    int64_t position, end;
} tqkv__tokens;

/* Encodes tokens of the heads [first, first + n_heads); inverses: theirs, [n_heads][head_dim], or NULL */
static void tqkv__encode_heads(const tqkv__stream *s, const tqkv__quantiser *q, int first, int n_heads,
                               const float *inverses, const tqkv__tokens *tokens)
{
    enum { batch = 32 };
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    tqkv__row rows[batch];
    const tqkv__stream *halves = tokens->halves;
    int n = 0;
    for (int t = tokens->from; t < tokens->to; t++) {
        const int64_t position = tokens->position + t;
        const int slot = tqkv__slot(s, position);
        const bool half = halves && tokens->end - position <= halves->capacity;
        const int half_slot = half ? tqkv__slot(halves, position) : 0;
        if (slot >= 0)
            for (int i = 0; i < n_heads; i++) {
                const int h = first + i;
                const void *src = tqkv__source_row(s, tokens->src, (size_t)t, (size_t)h);
                const tqkv__row row = {src,
                                       tqkv__center_of(s, h),
                                       tqkv__of_head(s, inverses, i),
                                       tqkv__codes_at(s, h, slot),
                                       tqkv__norms_at(s, h, slot),
                                       NULL,
                                       half ? tqkv__codes_at(halves, h, half_slot) : NULL};
                rows[n] = row;
                if (++n == batch) codec->encode_rows(s, q, rows, n);
                n %= batch;
            }
    }
    if (n) codec->encode_rows(s, q, rows, n);
}

/* Encodes tokens after tqkv__encode_open. With a scale as many heads at a time as have their inverses in 4 KiB, so that
   each inverse is found once. */
static void tqkv__encode_tokens(const tqkv__stream *s, const tqkv__tokens *tokens)
{
    float room[TQKV_MAX_HEAD_DIM];
    const uint64_t mode = tqkv__fp_exact();
    const int most = s->channel_scale && !s->inverses ? TQKV_MAX_HEAD_DIM / s->head_dim : s->n_kv_heads;
    tqkv__quantiser q;
    if (s->kind == TQKV__BOOK) tqkv__quantiser_open(s, &q);
    for (int h = 0; h < s->n_kv_heads; h += most) {
        const int n = s->n_kv_heads - h < most ? s->n_kv_heads - h : most;
        tqkv__encode_heads(s, &q, h, n, tqkv__inverses_of(s, h, n, room), tokens);
    }
    tqkv__fp_restore(mode);
}

/* How a stream's rows are kept as halves besides: as they came, or as its codes' rows are before they are scaled. */
enum { TQKV__RAW_HALVES = 1, TQKV__ROTATED_HALVES = 2 };

/* Whether halves hold a row; see TQKV__LEAST_HALF. Less a centre all values may be small. Tests bits, as
   tqkv__all_finite does. */
static bool tqkv__in_halves(const float *row, int n, bool centered)
{
    const uint32_t largest = tqkv__largest_bits(row, (size_t)n);
    return largest < tqkv__bits(TQKV__BEYOND_HALVES) &&
           (centered || largest == 0 || largest >= tqkv__bits(TQKV__LEAST_HALF));
}

/* Whether halves hold n tokens: in any rotation if the largest value is not near their ends, because a rotation of 1024
   values changes it by a factor of 32 at most. False for NaN and infinity. */
static TQKV__NOINLINE bool tqkv__rows_in_halves(const tqkv__stream *s, int halves, const void *src, int n)
{
    TQKV__ALIGNED float own[TQKV_MAX_HEAD_DIM];
    float room[TQKV_MAX_HEAD_DIM];
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    const uint32_t least = tqkv__bits(TQKV__LEAST_HALF * 32.0f), beyond = tqkv__bits(TQKV__BEYOND_HALVES / 32.0f);
    const uint64_t mode = tqkv__fp_exact();
    const bool widens = s->type != TQKV_TYPE_F32 || s->center || s->channel_scale;
    bool fit = true;
    for (int h = 0; h < s->n_kv_heads && fit; h++) {
        const float *center = tqkv__center_of(s, h), *inverses = tqkv__inverses_of(s, h, 1, room);
        for (int t = 0; t < n && fit; t++) {
            const void *row = tqkv__source_row(s, src, (size_t)t, (size_t)h);
            if (widens) codec->widen(s->type, row, center, inverses, s->head_dim, own);
            const uint32_t largest = codec->largest_bits(widens ? own : (const float *)row, (size_t)s->head_dim);
            if (largest - least < beyond - least) continue;
            if (!widens) memcpy(own, row, (size_t)s->head_dim * sizeof(float));
            if (halves & TQKV__RAW_HALVES) fit = tqkv__in_halves(own, s->head_dim, center != NULL);
            if (!(halves & TQKV__ROTATED_HALVES) || !fit) continue;
            codec->rotate(own, s->head_dim);
            fit = tqkv__in_halves(own, s->head_dim, center != NULL);
        }
    }
    tqkv__fp_restore(mode);
    return fit;
}

/* Encodes the same tokens into some streams, each from its own source: tasks for some tokens of one of them. The hook
   runs them twice: first they test for NaN and Inf, and for what halves do not hold, then they encode. */
enum { TQKV__ENCODE_STREAMS = 3, TQKV__ENCODE_TASKS = 16 };
typedef struct tqkv__encode_job {
    const tqkv__stream *streams[TQKV__ENCODE_STREAMS], *halves[TQKV__ENCODE_STREAMS];
    const void *src[TQKV__ENCODE_STREAMS];
    int as_halves[TQKV__ENCODE_STREAMS];
    tqkv_parallel parallel;
    int n_streams, n_tokens, n_tasks; /* n_tasks: of each stream */
    int64_t position;
    bool encode;
    bool bad[TQKV__ENCODE_STREAMS * TQKV__ENCODE_TASKS], unfit[TQKV__ENCODE_STREAMS * TQKV__ENCODE_TASKS];
} tqkv__encode_job;

static void tqkv__encode_task(void *context, int index)
{
    tqkv__encode_job *job = (tqkv__encode_job *)context;
    const int stream = index / job->n_tasks, share = index % job->n_tasks;
    const tqkv__stream *s = job->streams[stream];
    const void *src = job->src[stream];
    const int first = job->encode ? tqkv__first_kept(s, job->n_tokens) : 0;
    const int from = first + (int)((int64_t)(job->n_tokens - first) * share / job->n_tasks);
    const int to = first + (int)((int64_t)(job->n_tokens - first) * (share + 1) / job->n_tasks);
    const tqkv__tokens tokens = {job->halves[stream], src, from, to, job->position, job->position + job->n_tokens};
    if (job->encode) {
        tqkv__encode_tokens(s, &tokens);
        return;
    }
    const void *rows = tqkv__source_row(s, src, (size_t)from, 0);
    if (job->as_halves[stream] && tqkv__rows_in_halves(s, job->as_halves[stream], rows, to - from)) return;
    job->bad[index] = !tqkv__rows_finite(s, rows, to - from);
    job->unfit[index] = job->as_halves[stream] && !job->bad[index];
}

static void tqkv__encode_job_open(tqkv__encode_job *job, const tqkv_parallel *parallel, int n_tokens, int64_t position)
{
    memset(job, 0, sizeof *job);
    job->parallel = *parallel;
    job->n_tokens = n_tokens;
    job->position = position;
}

static void tqkv__add_stream(tqkv__encode_job *job, const tqkv__stream *s, const void *src)
{
    TQKV_ASSERT(job->n_streams < TQKV__ENCODE_STREAMS);
    job->streams[job->n_streams] = s;
    job->src[job->n_streams++] = src;
}

/* Returns the number of tasks for tokens of a stream: one or, with a hook, one for each 64 KiB of floats, which take
   about ten microseconds. */
static int tqkv__tasks_for(const tqkv_parallel *parallel, const tqkv__stream *s, int n_tokens)
{
    const int64_t wanted = (int64_t)n_tokens * s->n_kv_heads * s->head_dim / 16384;
    const bool serial = !parallel->run || parallel->run == tqkv__run_serial;
    return serial || wanted < 1 ? 1 : wanted < TQKV__ENCODE_TASKS ? (int)wanted : TQKV__ENCODE_TASKS;
}

static void tqkv__run_encode_tasks(tqkv__encode_job *job)
{
    job->n_tasks = job->n_streams ? tqkv__tasks_for(&job->parallel, job->streams[0], job->n_tokens) : 1;
    if (job->n_tasks > 1)
        job->parallel.run(job->parallel.user, job->n_streams * job->n_tasks, tqkv__encode_task, job);
    else
        tqkv__run_serial(NULL, job->n_streams, tqkv__encode_task, job);
}

/* Refuses sources that hold NaN or infinity, or what halves do not hold; in rows that are left out, too. */
static tqkv_result tqkv__check_sources(tqkv__encode_job *job)
{
    bool bad = false, unfit = false;
    job->encode = false;
    tqkv__run_encode_tasks(job);
    for (int i = 0; i < job->n_streams * job->n_tasks; i++) {
        bad = bad || job->bad[i];
        unfit = unfit || job->unfit[i];
    }
    if (bad) return TQKV__REFUSE(NOT_FINITE, "the rows to encode hold NaN or infinity");
    if (unfit)
        return TQKV__REFUSE(NOT_FINITE, "k or v: a row beyond 65504, or all of it below 2^-17 but not 0: the halves of "
                                        "calibrate, exact_first and exact_last do not hold it, codes alone do");
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_encode(const tqkv_store *store, const void *src, int n_tokens, int64_t position)
{
    tqkv__stream s;
    tqkv__encode_job job;
    size_t bytes;
    tqkv_result r = tqkv__encode_open(store, src, n_tokens, position, &s, &bytes);
    if (r != TQKV_OK) return r;
    tqkv__encode_job_open(&job, &store->parallel, n_tokens, position);
    tqkv__add_stream(&job, &s, src);
    r = tqkv__check_sources(&job);
    if (r != TQKV_OK) return r;
    job.encode = true;
    tqkv__run_encode_tasks(&job);
    return TQKV_OK;
}

TQKV__COLD TQKV_API tqkv_result tqkv_probe(const tqkv_store *store, const void *src, int n_tokens, float *scaled)
{
    tqkv__stream s;
    float norms[TQKV_MAX_HEAD_DIM / 128], room[TQKV_MAX_HEAD_DIM];
    tqkv_result r = tqkv__stream_shape(store, &s);
    if (r == TQKV_OK) r = tqkv__stream_channels(store, &s);
    const size_t size = (size_t)n_tokens * tqkv__center_size(&s); /* overflows only if the rows do */
    if (r == TQKV_OK) r = tqkv__check_source(&s, src, n_tokens, scaled, sizeof(float), size);
    if (r != TQKV_OK) return r;
    const tqkv__codec *codec = tqkv__codec_for(s.head_dim);
    const uint64_t mode = tqkv__fp_exact();
    for (size_t h = 0; h < (size_t)s.n_kv_heads; h++) {
        const float *inverses = tqkv__inverses_of(&s, (int)h, 1, room);
        for (size_t i = 0; i < (size_t)n_tokens; i++) {
            float *row = scaled + (i * (size_t)s.n_kv_heads + h) * (size_t)s.head_dim;
            codec->widen(s.type, tqkv__source_row(&s, src, i, h), tqkv__center_of(&s, (int)h), inverses, s.head_dim,
                         row);
            tqkv__scale_row(&s, row, norms);
        }
    }
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

TQKV__COLD TQKV_API tqkv_result tqkv_decode(const tqkv_store *store, int64_t position, int n_positions,
                                            tqkv_basis basis, void *dst)
{
    tqkv__stream s;
    size_t bytes;
    tqkv_result r = tqkv__open_positions(store, n_positions, position, &s);
    if (r != TQKV_OK) return r;
    if ((r = tqkv__check_rows(&s, dst, n_positions, &bytes)) != TQKV_OK) return r;
    if (!tqkv__basis_known(basis)) return TQKV__INVALID("basis: no tqkv_basis");
    if (tqkv__stream_overlaps(&s, dst, bytes)) return TQKV__INVALID("dst overlaps the store");
    if (!tqkv__rows_distinct(s.strides, n_positions, s.n_kv_heads, s.head_dim)) return TQKV__INVALID(TQKV__ROWS_SHARED);
    const tqkv__codec *codec = tqkv__codec_for(s.head_dim);
    const uint64_t mode = tqkv__fp_exact();
    float wide[TQKV_MAX_HEAD_DIM];
    for (int p = 0; p < n_positions; p++) {
        const int slot = tqkv__slot(&s, position + p);
        for (int h = 0; h < s.n_kv_heads; h++) {
            void *to = (uint8_t *)dst + tqkv__row_offset(&s, (size_t)p, (size_t)h);
            float *row = s.type == TQKV_TYPE_F32 ? (float *)to : wide;
            tqkv__decode_in(&s, h, tqkv__codes_at(&s, h, slot), tqkv__norms_at(&s, h, slot), basis, row);
            if (row == wide) codec->narrow(s.type, row, s.head_dim, to);
        }
    }
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

/* >>measure: errors, and the rotation of rows alone */

typedef struct tqkv__moments {
    const void *first;              /* one of the rows, of the source: what differs may be far smaller than a row */
    double row[TQKV_MAX_HEAD_DIM];  /* of the rows less the first */
    double squares, differs, noise; /* |x|^2, |x - first|^2, |x - x'|^2 */
    double second, fourth, beyond;  /* of the scaled values */
} tqkv__moments;

static TQKV__NOINLINE void tqkv__add_moments(const tqkv__stream *s, int kv_head, const tqkv__row *row, tqkv__moments *m)
{
    float source[TQKV_MAX_HEAD_DIM], first[TQKV_MAX_HEAD_DIM], x[TQKV_MAX_HEAD_DIM], norms[TQKV_MAX_HEAD_DIM / 128];
    const float last = s->kind == TQKV__BOOK   ? s->boundaries[(1 << s->book_bits) - 2]
                       : s->kind == TQKV__HALF ? 65504.0f
                                               : 127.5f; /* where the format saturates */
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    codec->widen(s->type, row->src, row->center, row->inverses, s->head_dim, x);
    tqkv__scale_row(s, x, norms);
    for (int d = 0; d < s->head_dim; d++) {
        const double square = (double)x[d] * (double)x[d];
        m->second += square;
        m->fourth += square * square;
        m->beyond += fabsf(tqkv__rounded(x[d] * (row->factors ? row->factors[d / s->norm_dim] : 1.0f))) > last;
    }
    tqkv__decode_in(s, kv_head, row->codes, row->norms, TQKV_ORIGINAL, x);
    codec->widen(s->type, row->src, NULL, NULL, s->head_dim, source);
    codec->widen(s->type, m->first, NULL, NULL, s->head_dim, first);
    for (int d = 0; d < s->head_dim; d++) {
        const double value = (double)source[d], noise = value - (double)x[d], less = value - (double)first[d];
        m->row[d] += less;
        m->squares += value * value;
        m->differs += less * less;
        m->noise += noise * noise;
    }
}

TQKV__COLD static TQKV__NOINLINE void tqkv__quality_of(const tqkv__stream *s, const tqkv__moments *m, int n_tokens,
                                                       tqkv_quality *out)
{
    float first[TQKV_MAX_HEAD_DIM] = {0};
    double mean = 0.0, differs = m->differs;
    const double n = n_tokens ? n_tokens : 1, values = n * s->head_dim;
    memset(out, 0, sizeof *out);
    if (n_tokens) tqkv__codec_for(s->head_dim)->widen(s->type, m->first, NULL, NULL, s->head_dim, first);
    for (int d = 0; d < s->head_dim; d++) {
        const double less = m->row[d] / n, value = (double)first[d] + less;
        mean += value * value;
        differs -= n * less * less;
    }
    if (m->squares > 0.0) out->mean_share = n * mean / m->squares;
    if (!(m->noise == 0.0)) out->error = differs > 0.0 && m->noise >= 0.0 ? m->noise / differs : (double)INFINITY;
    const bool finite = m->second - m->second == 0.0; /* halves less a centre may overflow */
    if (m->second > 0.0) out->kurtosis = finite ? values * m->fourth / (m->second * m->second) : (double)INFINITY;
    out->beyond = m->beyond / values;
}

TQKV_API tqkv_result tqkv_measure(const tqkv_store *shape, const void *src, int n_tokens, tqkv_quality *out)
{
    tqkv__stream s;
    tqkv__quantiser q;
    tqkv__moments m;
    uint8_t codes[2 * TQKV_MAX_HEAD_DIM];
    float norms[TQKV_MAX_HEAD_DIM / 128], factors[TQKV_MAX_HEAD_DIM / 256], room[TQKV_MAX_HEAD_DIM];
    tqkv_result r = tqkv__stream_shape(shape, &s);
    if (r == TQKV_OK) r = tqkv__stream_channels(shape, &s);
    const size_t out_size = (size_t)s.n_kv_heads * sizeof *out;
    if (r == TQKV_OK) r = tqkv__check_source(&s, src, n_tokens, out, __alignof__(tqkv_quality), out_size);
    if (r != TQKV_OK) return r;
    const uint64_t mode = tqkv__fp_exact();
    if (s.kind == TQKV__BOOK) tqkv__quantiser_open(&s, &q);
    const tqkv__codec *codec = tqkv__codec_for(s.head_dim);
    for (int h = 0; h < s.n_kv_heads; h++) {
        memset(&m, 0, sizeof m);
        m.first = tqkv__source_row(&s, src, 0, (size_t)h);
        const float *inverses = tqkv__inverses_of(&s, h, 1, room);
        for (int t = 0; t < n_tokens; t++) {
            const void *at = tqkv__source_row(&s, src, (size_t)t, (size_t)h);
            const tqkv__row row = {at,    tqkv__center_of(&s, h),           inverses, codes,
                                   norms, s.n_factors > 1 ? factors : NULL, NULL};
            codec->encode_rows(&s, &q, &row, 1);
            tqkv__add_moments(&s, h, &row, &m);
        }
        tqkv__quality_of(&s, &m, n_tokens, &out[h]);
    }
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_rotate(float *rows, int n_rows, int head_dim, tqkv_basis to)
{
    size_t bytes;
    if (!tqkv__head_dim_known(head_dim)) return TQKV__REFUSE(UNSUPPORTED, TQKV__HEAD_DIMS);
    if (!tqkv__basis_known(to)) return TQKV__INVALID("to: no tqkv_basis");
    if (!tqkv__floats_at(rows) || n_rows < 0 || !tqkv__array_size(n_rows, head_dim, 1, sizeof(float), &bytes))
        return TQKV__INVALID("rows: NULL or not aligned as floats, or n_rows negative or too large");
    const tqkv__codec *codec = tqkv__codec_for(head_dim);
    const uint64_t mode = tqkv__fp_exact();
    for (int i = 0; i < n_rows; i++)
        (to == TQKV_ROTATED ? codec->rotate : codec->unrotate)(rows + (size_t)i * (size_t)head_dim, head_dim);
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

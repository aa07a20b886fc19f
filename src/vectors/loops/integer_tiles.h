/* >>k-integer-tiles: the scores and the sums of a tile. */

TQKV__TARGET static void TQKV__I(score_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment,
                                             const float *q, int n_rows, bool add, float *scores)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    TQKV__ALIGNED int8_t room[TQKV__MOST_KEYS_AT_ONCE * TQKV__PANEL];
    const bool lanes = n_rows >= TQKV__LANES_ROWS;
    const int step = lanes ? 2 * TQKV__INTEGER_LANES : TQKV__KEYS_AT_ONCE;
    const int dim = s->panel_dim, head_dim = s->head_dim;
    if (tqkv__in_floats(s)) {
        TQKV__S(score_floats)(s, kv_head, segment, q, n_rows, add, scores);
        return;
    }
    TQKV__(factors)(s, tqkv__norms_at(s, kv_head, segment->slot), segment, true, factors);
    for (int b = 0; b < head_dim / dim; b++) {
        TQKV__I(product) p;
#if TQKV__LOOKED_UP
        if (TQKV__I(takes_nibbles)(s, segment->n, n_rows) || TQKV__I(takes_quarters)(s, segment->n, n_rows)) {
            TQKV__I(open_scores)(s, b, q, add, factors, scores, &p);
            TQKV__I(score_few)(s, kv_head, segment, b * dim, n_rows, &p);
            continue;
        }
#endif
        for (int j = 0; j < segment->n; j += step) {
            p.n = segment->n - j < step ? segment->n - j : step;
            TQKV__I(open_scores)(s, b, q, add, factors + j, scores + j, &p);
            p.at = TQKV__S(open_integers)(s, kv_head, segment, j, p.n, b * dim, dim, room);
            if (lanes)
                TQKV__I(score_lanes)(p, n_rows);
            else
                TQKV__I(score_integers)(p, n_rows);
        }
    }
}

/* Opens the sums of panel b, but for its codes. */
TQKV__OP void TQKV__I(open_sums)(const tqkv__stream *s, int b, int n, const float *weights, int n_rows,
                                 const float *factors, float *scaled, float *out, TQKV__I(product) * p)
{
    if (b * s->panel_dim % s->norm_dim == 0)
        for (int at = 0; at < n_rows * TQKV__TILE; at += TQKV__TILE)
            TQKV__I(round_weights)(s, weights + at, factors + b * TQKV__TILE, n, scaled + at);
    p->n = n;
    p->dim = s->panel_dim;
    p->rows = (const int16_t *)(const void *)scaled;
    p->units = scaled + TQKV__WEIGHTS_UNIT;
    p->row_floats = TQKV__TILE;
    p->results = out + b * s->panel_dim;
    p->result_floats = s->head_dim;
    p->factors = NULL;
    p->add = true;
}

TQKV__TARGET static void TQKV__I(value_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment,
                                             const float *weights, int n_rows, float *scaled, float *out)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    TQKV__ALIGNED int8_t room[TQKV__TILE * TQKV__PANEL];
    const int dim = s->panel_dim, head_dim = s->head_dim;
    if (tqkv__in_floats(s)) {
        TQKV__S(add_floats)(s, kv_head, segment, weights, n_rows, out);
        return;
    }
    TQKV__(factors)(s, tqkv__norms_at(s, kv_head, segment->slot), segment, false, factors);
    for (int b = 0; b < head_dim / dim; b++) {
        TQKV__I(product) p;
        TQKV__I(open_sums)(s, b, segment->n, weights, n_rows, factors, scaled, out, &p);
#if TQKV__LOOKED_UP
        if (TQKV__I(takes_nibbles)(s, segment->n, n_rows) || TQKV__I(takes_quarters)(s, segment->n, n_rows)) {
            TQKV__I(add_few)(s, kv_head, segment, b * dim, n_rows, &p);
            continue;
        }
#endif
        p.at = TQKV__S(open_integers)(s, kv_head, segment, 0, segment->n, b * dim, dim, room);
        TQKV__I(add_integers)(&p, n_rows);
    }
}

static const tqkv__kernels TQKV__I(kernels) = {TQKV__I(round_query), TQKV__I(score_tile), TQKV__(softmax_tile),
                                               TQKV__(end_piece),    TQKV__I(value_tile), TQKV__(sum_heads)};

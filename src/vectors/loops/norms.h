/* >>k-norms: sums of squares in 16 strided lanes, as in >>codec, and the norms of rows. */

/* Returns magnitudes, and the next float below where v is positive: then a boundary is below v if it is at most that.
   side: 1 less than the codes of one sign, or as many */
TQKV__OP TQKV__VECTOR TQKV__(fold)(const int half, TQKV__VECTOR v, TQKV__(codes) * side)
{
    v = TQKV__(max)(v, TQKV__(set1)(-TQKV__FAR));
    const TQKV__(words) positive = (TQKV__(words))(v > TQKV__(set1)(0.0f));
    *side = (TQKV__(codes))((uint32_t)(half - 1) - positive);
    return (TQKV__VECTOR)((TQKV__(words))TQKV__(abs)(v) + positive);
}

TQKV__OP TQKV__(codes) TQKV__(code_from)(TQKV__(codes) count, TQKV__VECTOR bound, TQKV__VECTOR w, TQKV__(codes) side)
{
    return (TQKV__(codes))(((TQKV__(words))count - (TQKV__(words))(bound <= w)) ^ (TQKV__(words))side);
}

TQKV__OP float TQKV__(sum_of_squares)(const float *x, int n)
{
    TQKV__VECTOR lanes[16 / TQKV__LANES];
    TQKV__UNROLL
    for (int k = 0; k < 16 / TQKV__LANES; k++) lanes[k] = TQKV__(set1)(0.0f);
    for (int d = 0; d < n; d += 16) {
        TQKV__UNROLL
        for (int k = 0; k < 16 / TQKV__LANES; k++) {
            const TQKV__VECTOR v = TQKV__(load)(x + d + k * TQKV__LANES);
            lanes[k] += TQKV__(rounded)(v * v);
        }
    }
    return TQKV__(sum_16)(lanes);
}

/* Returns the sum of the squares of the centroids of codes of TQ2, the one format that is not searched; codes: [n] */
TQKV__OP float TQKV__(squares_of_codes)(const tqkv__quantiser *q, const uint8_t *codes, int n)
{
    TQKV__VECTOR lanes[16 / TQKV__LANES], table[8 / TQKV__LANES];
    TQKV__UNROLL
    for (int k = 0; k < 16 / TQKV__LANES; k++) lanes[k] = TQKV__(set1)(0.0f);
    TQKV__UNROLL
    for (int k = 0; k < 8 / TQKV__LANES; k++) table[k] = TQKV__(load)(q->squares + k * TQKV__LANES);
    for (int d = 0; d < n; d += 16) {
        TQKV__UNROLL
        for (int k = 0; k < 16 / TQKV__LANES; k++)
            lanes[k] += TQKV__(look_up_8)(table, TQKV__(widen_bytes)(codes + d + k * TQKV__LANES));
    }
    return TQKV__(sum_16)(lanes);
}

TQKV__OP float TQKV__(largest_size)(const float *x, int n)
{
    TQKV__VECTOR even = TQKV__(set1)(0.0f), odd = even;
    for (int d = 0; d < n; d += 2 * TQKV__LANES) {
        even = TQKV__(max)(TQKV__(abs)(TQKV__(load)(x + d)), even);
        odd = TQKV__(max)(TQKV__(abs)(TQKV__(load)(x + d + TQKV__LANES)), odd);
    }
    return TQKV__(largest_lane)(TQKV__(max)(even, odd));
}

TQKV__OP void TQKV__(norms)(const tqkv__stream *s, const float *y, float *norms, float *scales)
{
    for (int b = 0; b < s->norms_per_row; b++, y += s->norm_dim)
        norms[b] = s->kind == TQKV__GRID ? tqkv__norm_i8(TQKV__(largest_size)(y, s->norm_dim), &scales[b])
                                         : tqkv__norm_tq(s, TQKV__(sum_of_squares)(y, s->norm_dim), &scales[b]);
}

/* >>k-rotate: the rotation by vectors. The sums and their order are those of >>codec, and so are the
   bytes. */

/* Butterflies (a, b) -> (a + b, a - b) between vectors 1, 2, 4 .. count/2 apart; count is a constant. */
TQKV__OP void TQKV__(butterflies)(const int count, TQKV__VECTOR *x)
{
    TQKV__UNROLL
    for (int stage = 0; stage < 4; stage++) {
        if (1 << stage >= count) continue;
        TQKV__UNROLL
        for (int i = 0; i < count / 2; i++) {
            const int low = (i >> stage << (stage + 1)) + (i & ((1 << stage) - 1)), high = low + (1 << stage);
            const TQKV__VECTOR a = x[low], b = x[high];
            x[low] = a + b;
            x[high] = a - b;
        }
    }
}

/* Loads count vectors from value i on; count is a constant. */
TQKV__OP void TQKV__(load_vectors)(const int count, tqkv_type type, const void *in, int i, TQKV__VECTOR *x)
{
    if (type == TQKV_TYPE_F16) {
        TQKV__UNROLL
        for (int v = 0; v < count; v++) x[v] = TQKV__(load_as)(TQKV_TYPE_F16, in, i + v * TQKV__LANES);
    } else if (type == TQKV_TYPE_BF16) {
        TQKV__UNROLL
        for (int v = 0; v < count; v++) x[v] = TQKV__(load_as)(TQKV_TYPE_BF16, in, i + v * TQKV__LANES);
    } else {
        TQKV__UNROLL
        for (int v = 0; v < count; v++) x[v] = TQKV__(load_as)(TQKV_TYPE_F32, in, i + v * TQKV__LANES);
    }
}

/* Flips signs if asked, then subrows the stages below `length`, at most count * LANES, on count vectors in registers.
   count and length are constants. in, of the type: [head_dim], out: [head_dim] */
TQKV__OP void TQKV__(hadamard_subrows)(const int count, const int length, tqkv_type type, const void *in, int head_dim,
                                       bool flip, float *out)
{
    const TQKV__VECTOR factor = TQKV__(set1)(count * TQKV__LANES == head_dim ? TQKV__INV_SQRT(head_dim) : 1.0f);
    for (int first = 0; first < head_dim; first += count * TQKV__LANES) {
        TQKV__VECTOR x[16];
        TQKV__(load_vectors)(count, type, in, first, x);
        if (flip) {
            TQKV__UNROLL
            for (int i = 0; i < count; i++) x[i] = TQKV__(flip)(x[i], first + i * TQKV__LANES);
        }
        TQKV__UNROLL
        for (int stage = 0; stage < 4; stage++)
            if (1 << stage < TQKV__LANES && 1 << stage < length) {
                TQKV__UNROLL
                for (int i = 0; i < count; i++) x[i] = TQKV__(butterfly)(stage, x[i]);
            }
        TQKV__(butterflies)(count, x);
        TQKV__UNROLL
        for (int i = 0; i < count; i++) TQKV__(store)(out + first + i * TQKV__LANES, x[i] * factor);
    }
}

/* Does stages h to h * count / 2, in place; count is a constant. */
TQKV__OP void TQKV__(hadamard_across)(const int count, int h, int head_dim, float *x)
{
    const TQKV__VECTOR factor = TQKV__(set1)(h * count == head_dim ? tqkv__size_of(head_dim)->inverse_root : 1.0f);
    for (int first = 0; first < head_dim; first += h * count)
        for (int j = first; j < first + h; j += TQKV__LANES) {
            TQKV__VECTOR v[4];
            TQKV__UNROLL
            for (int i = 0; i < count; i++) v[i] = TQKV__(load)(x + j + i * h);
            TQKV__(butterflies)(count, v);
            TQKV__UNROLL
            for (int i = 0; i < count; i++) TQKV__(store)(x + j + i * h, v[i] * factor);
        }
}

/* Writes a column of the matrix as floats, +-1; signs: [m] and room for whole vectors */
TQKV__OP void TQKV__(matrix_column)(int m, int column, float *signs)
{
    uint64_t bits = 0;
    for (int i = 0; i < m; i += 8) bits |= (uint64_t)tqkv__matrix_row(m, column)[i / 8] << i; /* symmetric */
    for (int row = 0; row < m; row += TQKV__LANES, bits >>= TQKV__LANES)
        TQKV__(store)(signs + row, TQKV__(signs)((uint32_t)bits));
}

/* Between columns of signs: five vectors of 8 hold one of 36 */
#define TQKV__COLUMN 40

/* Mixes subrows: out[b] = sum over c of P[b][c] * x[c] in order, times factor, for `at_once` subrows b that share a
   vector: lane at_once * a + i is element a of subrow b + i. x: m vectors, x_stride floats apart; their lanes have each
   element at_once times. The product with 1 or -1 is exact. count vectors of sums at a time, in registers; m, at_once
   and count are constants. signs: [m][TQKV__COLUMN], out: [m][n] */
TQKV__OP void TQKV__(mix_subrows)(const int m, const int at_once, const int count, const float *x, int x_stride,
                                  const float *signs, float factor, int n, float *out)
{
    for (int b = 0; b < m; b += count * at_once) {
        const float *sign = signs + b;
        TQKV__VECTOR sums[9];
        TQKV__UNROLL
        for (int i = 0; i < count; i++) sums[i] = TQKV__(load)(x) * TQKV__(repeat)(at_once, sign + i * at_once);
        for (int c = 1; c < m; c++) {
            const TQKV__VECTOR subrow = TQKV__(load)(x + c * x_stride);
            sign += TQKV__COLUMN;
            TQKV__UNROLL
            for (int i = 0; i < count; i++)
                sums[i] = TQKV__(fma)(subrow, TQKV__(repeat)(at_once, sign + i * at_once), sums[i]);
        }
        TQKV__UNROLL
        for (int i = 0; i < count; i++) {
            const TQKV__VECTOR sum = TQKV__(unite)(at_once, sums[i]);
            TQKV__(store)(out + (b + i * at_once) * n, sum * TQKV__(set1)(factor));
        }
    }
}

/* Applies the matrix of order m across the subrows. subrows: [m][n], out: [m * n], elsewhere; at_once is LANES / n, or
   1 */
TQKV__OP void TQKV__(mix)(const int m, const int at_once, const float *subrows, float factor, int n, float *out)
{
    const int count = m > 12 ? m / 4 : 6;
    TQKV__ALIGNED float signs[36 * TQKV__COLUMN], spread[36 * TQKV__LANES];
    for (int c = 0; c < m; c++) TQKV__(matrix_column)(m, c, signs + c * TQKV__COLUMN);
    if (at_once == 1) {
        for (int a = 0; a < n; a += TQKV__LANES)
            TQKV__(mix_subrows)(m, 1, count, subrows + a, n, signs, factor, n, out + a);
        return;
    }
    for (int c = 0; c < m; c++) {
        const TQKV__VECTOR x = TQKV__(load)(subrows + c / at_once * TQKV__LANES);
        TQKV__(store)(spread + c * TQKV__LANES, TQKV__(spread)(at_once, c % at_once, x));
    }
    TQKV__(mix_subrows)(m, at_once, count, spread, TQKV__LANES, signs, factor, n, out);
}

#define TQKV__MIX(m)                                                                                                   \
    case m:                                                                                                            \
        if (TQKV__LANES > 4 && n < TQKV__LANES)                                                                        \
            TQKV__(mix)(m, TQKV__LANES / 4, subrows, factor, n, out);                                                  \
        else                                                                                                           \
            TQKV__(mix)(m, 1, subrows, factor, n, out);                                                                \
        break;

/* Subrows shorter than a vector have 4 values. */
TQKV__TARGET static TQKV__NOINLINE void TQKV__(mix_by_order)(int m, const float *subrows, float factor, int n,
                                                             float *out)
{
    switch (m) {
        TQKV__MIX(12)
        TQKV__MIX(20)
        TQKV__MIX(28)
        TQKV__MIX(36)
    }
}

/* Does what hadamard does for head_dim = m * n, m > 1: H over the subrows, then the matrix across them */
TQKV__TARGET static TQKV__NOINLINE void TQKV__(rotate_subrows)(tqkv_type type, const void *in, int head_dim, bool flip,
                                                               float *out)
{
    TQKV__ALIGNED float subrows[TQKV_MAX_HEAD_DIM];
    const tqkv__size *size = tqkv__size_of(head_dim);
    const int m = size->order, n = size->subrow; /* n: 4 to 64 */
    const float factor = size->inverse_root;
    if (n == 4 && TQKV__LANES > 4)
        TQKV__(hadamard_subrows)(1, 4, type, in, head_dim, flip, subrows);
    else if (n == TQKV__LANES)
        TQKV__(hadamard_subrows)(1, TQKV__LANES, type, in, head_dim, flip, subrows);
    else if (n == 2 * TQKV__LANES)
        TQKV__(hadamard_subrows)(2, 2 * TQKV__LANES, type, in, head_dim, flip, subrows);
    else if (n == 4 * TQKV__LANES)
        TQKV__(hadamard_subrows)(4, 4 * TQKV__LANES, type, in, head_dim, flip, subrows);
    else if (n == 8 * TQKV__LANES)
        TQKV__(hadamard_subrows)(8, 8 * TQKV__LANES, type, in, head_dim, flip, subrows);
    else if (TQKV__LANES < 8)
        TQKV__(hadamard_subrows)(16, 16 * TQKV__LANES, type, in, head_dim, flip, subrows);
    TQKV__(mix_by_order)(m, subrows, factor, n, out);
}

/* Rotates: out = R(in)/sqrt(D), after flipping signs if asked; floats in and out may be the same. */
TQKV__TARGET static void TQKV__(hadamard)(tqkv_type type, const void *in, int head_dim, bool flip, float *out)
{
    int h = head_dim < TQKV__LANES * TQKV__WIDTH ? head_dim : TQKV__LANES * TQKV__WIDTH;
    if (TQKV__HAS_MATRIX(head_dim)) {
        TQKV__(rotate_subrows)(type, in, head_dim, flip, out);
        return;
    }
    if (h == 4 * TQKV__LANES)
        TQKV__(hadamard_subrows)(4, 4 * TQKV__LANES, type, in, head_dim, flip, out);
    else if (h == 8 * TQKV__LANES && TQKV__WIDTH > 8)
        TQKV__(hadamard_subrows)(8, 8 * TQKV__LANES, type, in, head_dim, flip, out);
    else
        TQKV__(hadamard_subrows)(TQKV__WIDTH, TQKV__WIDTH * TQKV__LANES, type, in, head_dim, flip, out);
    for (; h * 4 <= head_dim; h *= 4) TQKV__(hadamard_across)(4, h, head_dim, out);
    if (h < head_dim) TQKV__(hadamard_across)(2, h, head_dim, out);
}

TQKV__TARGET static void TQKV__(rotate)(float *x, int head_dim)
{
    TQKV__(hadamard)(TQKV_TYPE_F32, x, head_dim, true, x);
}

TQKV__TARGET static void TQKV__(unrotate)(float *y, int head_dim)
{
    TQKV__(hadamard)(TQKV_TYPE_F32, y, head_dim, false, y);
    for (int d = 0; d < head_dim; d += TQKV__LANES) TQKV__(store)(y + d, TQKV__(flip)(TQKV__(load)(y + d), d));
}

/* >>k-rotate: the rotation by vectors, with the sums of >>codec in their order: the same bytes. */

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
            const uint8_t *signs = &tqkv__tables.signs[first % 512 / 8];
            TQKV__UNROLL
            for (int i = 0; i < count; i++)
                x[i] = TQKV__(flip)(x[i], signs, i * TQKV__LANES + (TQKV__LANES < 8 ? first % 8 : 0));
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

/* Where a column of a row's subrows begins: of LANES values or, if subrows are shorter, of two rows, a half each. */
typedef struct TQKV__(column) {
    float *low, *high;
} TQKV__(column);

/* Writes the matrix as floats, +-1: signs: [m / 4][m][4], four sums' by column */
TQKV__OP void TQKV__(open_signs)(int m, float *signs)
{
    for (int b = 0; b < m; b += 4)
        for (int c = 0; c < m; c++, signs += 4) {
            const unsigned bits = (unsigned)tqkv__matrix_row(m, c)[b / 8] >> (b % 8); /* symmetric */
            for (int i = 0; i < 4; i++) signs[i] = (bits >> i) & 1 ? -1.0f : 1.0f;
        }
}

/* Applies the matrix of order m to two columns of subrows n floats apart, in place: four sums of each in registers.
   pair is a constant: true where subrows are shorter than a vector. */
TQKV__OP void TQKV__(mix)(const bool pair, int m, int n, const float *signs, float factor,
                          const TQKV__(column) * columns)
{
    TQKV__VECTOR x[36][2];
    for (int c = 0; c < m; c++)
        for (int k = 0; k < 2; k++) {
            const float *low = columns[k].low + c * n, *high = columns[k].high + c * n;
            x[c][k] = pair ? TQKV__(load_two)(low, high) : TQKV__(load)(low);
        }
    for (int b = 0; b < m; b += 4) {
        TQKV__VECTOR sums[4][2];
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) {
            const TQKV__VECTOR sign = TQKV__(set1)(signs[i]);
            for (int k = 0; k < 2; k++) sums[i][k] = x[0][k] * sign;
        }
        signs += 4;
        for (int c = 1; c < m; c++, signs += 4) {
            TQKV__UNROLL
            for (int i = 0; i < 4; i++) {
                const TQKV__VECTOR sign = TQKV__(set1)(signs[i]);
                TQKV__UNROLL
                for (int k = 0; k < 2; k++) sums[i][k] = TQKV__(fma)(x[c][k], sign, sums[i][k]);
            }
        }
        TQKV__UNROLL
        for (int i = 0; i < 8; i++) {
            const TQKV__VECTOR sum = sums[i / 2][i % 2] * TQKV__(set1)(factor);
            float *low = columns[i % 2].low + (b + i / 2) * n, *high = columns[i % 2].high + (b + i / 2) * n;
            if (pair)
                TQKV__(store_two)(low, high, sum);
            else
                TQKV__(store)(low, sum);
        }
    }
}

/* Returns column i of some rows. A last row that has no next one is both halves. */
TQKV__OP TQKV__(column) TQKV__(column_at)(int head_dim, int n, float *rows, int n_rows, int i)
{
    const int per_row = n < TQKV__LANES ? 1 : n / TQKV__LANES, row = n < TQKV__LANES ? 2 * i : i / per_row;
    const TQKV__(column) column = {rows + row * head_dim + i % per_row * TQKV__LANES,
                                   rows + (row + 1 < n_rows ? row + 1 : row) * head_dim};
    return column;
}

/* Ends the rotation of rows of head_dim = m * n, m > 1, with the matrix across the subrows: of a few rows, because the
   signs take as long as one. The last of an odd number of columns is mixed twice. rows: [n_rows][head_dim] */
TQKV__LOOP void TQKV__(mix_rows)(int head_dim, float *rows, int n_rows)
{
    const tqkv__size *size = tqkv__size_of(head_dim);
    const int m = size->order, n = size->subrow;
    const int count = n < TQKV__LANES ? (n_rows + 1) / 2 : n_rows * (n / TQKV__LANES);
    TQKV__ALIGNED float signs[36 * 36];
    TQKV__(open_signs)(m, signs);
    for (int i = 0; i < count; i += 2) {
        const TQKV__(column) columns[2] = {TQKV__(column_at)(head_dim, n, rows, n_rows, i),
                                           TQKV__(column_at)(head_dim, n, rows, n_rows, i + 1 < count ? i + 1 : i)};
        if (n < TQKV__LANES)
            TQKV__(mix)(true, m, n, signs, size->inverse_root, columns);
        else
            TQKV__(mix)(false, m, n, signs, size->inverse_root, columns);
    }
}

/* Rotates: out = R(in)/sqrt(D), after flipping signs if asked, but for mix_rows; floats in and out may be the same. */
TQKV__LOOP void TQKV__(hadamard)(tqkv_type type, const void *in, int head_dim, bool flip, float *out)
{
    const bool whole = !TQKV__HAS_MATRIX(head_dim);
    int h = tqkv__size_of(head_dim)->subrow; /* 4 to 64, or all of the row */
    if (whole && h > TQKV__LANES * TQKV__WIDTH) h = TQKV__LANES * TQKV__WIDTH;
    if (h == 4 && TQKV__LANES > 4)
        TQKV__(hadamard_subrows)(1, 4, type, in, head_dim, flip, out);
    else if (h == TQKV__LANES)
        TQKV__(hadamard_subrows)(1, TQKV__LANES, type, in, head_dim, flip, out);
    else if (h == 2 * TQKV__LANES)
        TQKV__(hadamard_subrows)(2, 2 * TQKV__LANES, type, in, head_dim, flip, out);
    else if (h == 4 * TQKV__LANES)
        TQKV__(hadamard_subrows)(4, 4 * TQKV__LANES, type, in, head_dim, flip, out);
    else if (h == 8 * TQKV__LANES)
        TQKV__(hadamard_subrows)(8, 8 * TQKV__LANES, type, in, head_dim, flip, out);
    else if (TQKV__LANES < 8)
        TQKV__(hadamard_subrows)(16, 16 * TQKV__LANES, type, in, head_dim, flip, out);
    for (; whole && h * 4 <= head_dim; h *= 4) TQKV__(hadamard_across)(4, h, head_dim, out);
    if (whole && h < head_dim) TQKV__(hadamard_across)(2, h, head_dim, out);
}

TQKV__TARGET static void TQKV__(rotate)(float *x, int head_dim)
{
    TQKV__(hadamard)(TQKV_TYPE_F32, x, head_dim, true, x);
    if (TQKV__HAS_MATRIX(head_dim)) TQKV__(mix_rows)(head_dim, x, 1);
}

TQKV__TARGET static void TQKV__(unrotate)(float *y, int head_dim)
{
    TQKV__(hadamard)(TQKV_TYPE_F32, y, head_dim, false, y);
    if (TQKV__HAS_MATRIX(head_dim)) TQKV__(mix_rows)(head_dim, y, 1);
    for (int d = 0; d < head_dim; d += TQKV__LANES)
        TQKV__(store)(y + d, TQKV__(flip)(TQKV__(load)(y + d), tqkv__tables.signs, d % 512));
}

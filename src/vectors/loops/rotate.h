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

/* A vector of a row or, if n is 4 and LANES 8, of two: each has a half. pair is a constant. */
TQKV__OP TQKV__VECTOR TQKV__(load_column)(const bool pair, const float *low, const float *high)
{
    return pair ? TQKV__(load_two)(low, high) : TQKV__(load)(low);
}

TQKV__OP void TQKV__(store_column)(const bool pair, float *low, float *high, TQKV__VECTOR x)
{
    if (pair)
        TQKV__(store_two)(low, high, x);
    else
        TQKV__(store)(low, x);
}

/* Applies the matrix of order m to a column of subrows n floats apart, in place, with signs that the compiler knows,
   and no loads of them: encoding I8 takes a quarter less at 80, 96 and 192. Every second sum is made of multiply-adds:
   a Zen 4 core does them beside additions. `rounded` hides that they multiply by 1. NEON has no other, since clang 14
   would reorder sums there with -fassociative-math. */
TQKV__OP void TQKV__(mix_known)(const int m, const bool pair, int n, float factor, float *low, float *high)
{
    const TQKV__VECTOR plus = TQKV__(rounded)(TQKV__(set1)(1.0f)), minus = TQKV__(rounded)(TQKV__(set1)(-1.0f));
    const int halves = m > 12 ? 2 : 1, parts = halves * halves;
    const int count = m / halves; /* sums in registers, and terms that are unrolled together */
    TQKV__VECTOR sums[20];
    TQKV__UNROLL
    for (int part = 0; part < parts; part++) {
        const int first = part / halves * count, from = part % halves * count;
        TQKV__UNROLL
        for (int c = from; c < from + count; c++) {
            const TQKV__VECTOR x = TQKV__(load_column)(pair, low + c * n, high + c * n);
            TQKV__UNROLL
            for (int b = first; b < first + count; b++) {
                const bool subtract = (tqkv__matrix_row(m, b)[c / 8] >> (c % 8)) & 1;
                if (c == 0)
                    sums[b] = x * (subtract ? minus : plus);
                else if (b % 2 || TQKV__LANES == 4)
                    sums[b] = TQKV__(fma)(x, subtract ? minus : plus, sums[b]);
                else
                    sums[b] = subtract ? sums[b] - x : sums[b] + x;
            }
        }
    }
    for (int b = 0; b < m; b++) TQKV__(store_column)(pair, low + b * n, high + b * n, sums[b] * TQKV__(set1)(factor));
}

/* Writes the matrix as floats, +-1: signs: [m][TQKV__COLUMN], five vectors of 8 hold a column of 36 */
#define TQKV__COLUMN 40
TQKV__OP void TQKV__(open_signs)(int m, float *signs)
{
    for (int c = 0; c < m; c++, signs += TQKV__COLUMN) {
        uint64_t bits = 0;
        for (int i = 0; i < m; i += 8) bits |= (uint64_t)tqkv__matrix_row(m, c)[i / 8] << i; /* symmetric */
        for (int b = 0; b < m; b += TQKV__LANES, bits >>= TQKV__LANES)
            TQKV__(store)(signs + b, TQKV__(signs)((uint32_t)bits));
    }
}

/* Does what mix_known does with `count` sums in registers, a constant that divides m. */
TQKV__OP void TQKV__(mix)(const int count, const bool pair, int m, int n, const float *signs, float factor, float *low,
                          float *high)
{
    TQKV__VECTOR x[36];
    for (int c = 0; c < m; c++) x[c] = TQKV__(load_column)(pair, low + c * n, high + c * n);
    for (int b = 0; b < m; b += count) {
        const float *sign = signs + b;
        TQKV__VECTOR sums[9];
        TQKV__UNROLL
        for (int i = 0; i < count; i++) sums[i] = x[0] * TQKV__(set1)(sign[i]);
        for (int c = 1; c < m; c++) {
            sign += TQKV__COLUMN;
            TQKV__UNROLL
            for (int i = 0; i < count; i++) sums[i] = TQKV__(fma)(x[c], TQKV__(set1)(sign[i]), sums[i]);
        }
        TQKV__UNROLL
        for (int i = 0; i < count; i++)
            TQKV__(store_column)(pair, low + (b + i) * n, high + (b + i) * n, sums[i] * TQKV__(set1)(factor));
    }
}

/* Mixes a column by the order of the matrix. */
TQKV__OP void TQKV__(mix_column)(const bool pair, int m, int n, const float *signs, float factor, float *low,
                                 float *high)
{
    if (m == 12 && !pair)
        TQKV__(mix_known)(12, pair, n, factor, low, high);
    else if (m == 20 && pair)
        TQKV__(mix_known)(20, pair, n, factor, low, high);
    else if (m == 12)
        TQKV__(mix)(6, pair, m, n, signs, factor, low, high);
    else if (m == 20)
        TQKV__(mix)(5, pair, m, n, signs, factor, low, high);
    else if (m == 28)
        TQKV__(mix)(7, pair, m, n, signs, factor, low, high);
    else
        TQKV__(mix)(9, pair, m, n, signs, factor, low, high);
}

/* Ends the rotation of rows of head_dim = m * n, m > 1, with the matrix across the subrows: of a few rows, because the
   signs take as long as one. rows: [n_rows][head_dim] */
TQKV__TARGET static TQKV__NOINLINE void TQKV__(mix_rows)(int head_dim, float *rows, int n_rows)
{
    const tqkv__size *size = tqkv__size_of(head_dim);
    const int m = size->order, n = size->subrow;
    TQKV__ALIGNED float signs[36 * TQKV__COLUMN];
    if (m != (n < TQKV__LANES ? 20 : 12)) TQKV__(open_signs)(m, signs);
    for (int row = 0; row < n_rows; row += n < TQKV__LANES ? 2 : 1, rows += head_dim) {
        if (n < TQKV__LANES) {
            float *next = rows + (row + 1 < n_rows ? head_dim : 0);
            TQKV__(mix_column)(true, m, n, signs, size->inverse_root, rows, next);
            rows += head_dim;
        } else
            for (int a = 0; a < n; a += TQKV__LANES)
                TQKV__(mix_column)(false, m, n, signs, size->inverse_root, rows + a, rows + a);
    }
}

/* Does what hadamard does for head_dim = m * n, m > 1: H over the subrows */
TQKV__TARGET static TQKV__NOINLINE void TQKV__(rotate_subrows)(tqkv_type type, const void *in, int head_dim, bool flip,
                                                               float *out)
{
    const int n = tqkv__size_of(head_dim)->subrow; /* 4 to 64 */
    if (n == 4 && TQKV__LANES > 4)
        TQKV__(hadamard_subrows)(1, 4, type, in, head_dim, flip, out);
    else if (n == TQKV__LANES)
        TQKV__(hadamard_subrows)(1, TQKV__LANES, type, in, head_dim, flip, out);
    else if (n == 2 * TQKV__LANES)
        TQKV__(hadamard_subrows)(2, 2 * TQKV__LANES, type, in, head_dim, flip, out);
    else if (n == 4 * TQKV__LANES)
        TQKV__(hadamard_subrows)(4, 4 * TQKV__LANES, type, in, head_dim, flip, out);
    else if (n == 8 * TQKV__LANES)
        TQKV__(hadamard_subrows)(8, 8 * TQKV__LANES, type, in, head_dim, flip, out);
    else if (TQKV__LANES < 8)
        TQKV__(hadamard_subrows)(16, 16 * TQKV__LANES, type, in, head_dim, flip, out);
}

/* Rotates: out = R(in)/sqrt(D), after flipping signs if asked, but for mix_rows; floats in and out may be the same. */
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
    if (TQKV__HAS_MATRIX(head_dim)) TQKV__(mix_rows)(head_dim, x, 1);
}

TQKV__TARGET static void TQKV__(unrotate)(float *y, int head_dim)
{
    TQKV__(hadamard)(TQKV_TYPE_F32, y, head_dim, false, y);
    if (TQKV__HAS_MATRIX(head_dim)) TQKV__(mix_rows)(head_dim, y, 1);
    for (int d = 0; d < head_dim; d += TQKV__LANES) TQKV__(store)(y + d, TQKV__(flip)(TQKV__(load)(y + d), d));
}

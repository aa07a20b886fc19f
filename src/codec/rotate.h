/* >>rotate-code: the rotation, in plain C */

/* Row `row` of the Hadamard matrix of order m: bit j = (p[j>>3] >> (j&7)) & 1, 1 is -1 */
static const uint8_t *tqkv__matrix_row(int m, int row)
{
    switch (m) {
    case 12:
        return tqkv__tables.hadamard_12[row];
    case 20:
        return tqkv__tables.hadamard_20[row];
    case 28:
        return tqkv__tables.hadamard_28[row];
    default:
        return tqkv__tables.hadamard_36[row];
    }
}

/* Mixes subrows: out[b] = sum over c = 0 .. m-1 of P[b][c] * x[c], in that order, for each column of x as [m][n]; P is
   of order m > 1. */
static void tqkv__mix_subrows(float *x, int m, int n)
{
    float column[36];
    for (int a = 0; a < n; a++) {
        for (int c = 0; c < m; c++) column[c] = x[c * n + a];
        for (int b = 0; b < m; b++) {
            const uint8_t *row = tqkv__matrix_row(m, b);
            float sum = row[0] & 1 ? -column[0] : column[0];
            for (int c = 1; c < m; c++)
                sum = TQKV__AS_FLOAT((row[c / 8] >> (c % 8)) & 1 ? sum - column[c] : sum + column[c]);
            x[b * n + a] = sum;
        }
    }
}

/* Applies the Walsh-Hadamard transform to each subrow in natural order, then the matrix across the subrows;
   unnormalised. x: [head_dim] */
static void tqkv__hadamard(float *x, int head_dim)
{
    const int m = tqkv__size_of(head_dim)->order, n = tqkv__size_of(head_dim)->subrow;
    for (int h = 1; h < n; h *= 2)
        for (int i = 0; i < head_dim; i += 2 * h)
            for (int j = i; j < i + h; j++) {
                float a = x[j], b = x[j + h];
                x[j] = TQKV__AS_FLOAT(a + b);
                x[j + h] = TQKV__AS_FLOAT(a - b);
            }
    if (m > 1) tqkv__mix_subrows(x, m, n);
}

static void tqkv__flip_signs(float *x, int head_dim)
{
    for (int j = 0; j < head_dim; j++)
        if ((tqkv__tables.signs[j % 512 / 8] >> (j % 8)) & 1) x[j] = -x[j];
}

/* Rotates, y = R(s*x)/sqrt(D), in double, for sums of far larger terms. */
static void tqkv__rotate_double(double *x, int head_dim)
{
    const int m = tqkv__size_of(head_dim)->order, n = tqkv__size_of(head_dim)->subrow;
    double y[36]; /* of each subrow one value at a time: a row would take 8 KB more of the stack */
    for (int j = 0; j < head_dim; j++)
        if ((tqkv__tables.signs[j % 512 / 8] >> (j % 8)) & 1) x[j] = -x[j];
    for (int h = 1; h < n; h *= 2)
        for (int i = 0; i < head_dim; i++) {
            if (i & h) continue;
            const double a = x[i], b = x[i | h];
            x[i] = a + b;
            x[i | h] = a - b;
        }
    for (int i = 0; m > 1 && i < n; i++) {
        for (int b = 0; b < m; b++) {
            y[b] = 0.0;
            for (int c = 0; c < m; c++)
                y[b] += (tqkv__matrix_row(m, b)[c / 8] >> (c % 8)) & 1 ? -x[c * n + i] : x[c * n + i];
        }
        for (int b = 0; b < m; b++) x[b * n + i] = y[b];
    }
    for (int j = 0; j < head_dim; j++) x[j] = x[j] / sqrt((double)head_dim);
}

static void tqkv__scale(float *x, int n, float factor)
{
    for (int i = 0; i < n; i++) x[i] = TQKV__AS_FLOAT(x[i] * factor);
}

/* y = R(s*x)/sqrt(D) */
static TQKV__NOINLINE void tqkv__rotate_row(float *x, int head_dim)
{
    tqkv__flip_signs(x, head_dim);
    tqkv__hadamard(x, head_dim);
    tqkv__scale(x, head_dim, tqkv__size_of(head_dim)->inverse_root);
}

/* x = s*R(y)/sqrt(D) */
static TQKV__NOINLINE void tqkv__unrotate_row(float *y, int head_dim)
{
    tqkv__hadamard(y, head_dim);
    tqkv__scale(y, head_dim, tqkv__size_of(head_dim)->inverse_root);
    tqkv__flip_signs(y, head_dim);
}

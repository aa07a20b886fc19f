/* >>kernels: what the loops of attention and of encoding share */

#define TQKV__VECTOR TQKV__(vector)
typedef uint32_t TQKV__(words) __attribute__((vector_size(4 * TQKV__LANES)));

TQKV__OP TQKV__VECTOR TQKV__(load)(const float *p)
{
    TQKV__VECTOR x;
    memcpy(&x, p, sizeof x);
    return x;
}

TQKV__OP void TQKV__(store)(float *p, TQKV__VECTOR x) { memcpy(p, &x, sizeof x); }

/* Loads LANES values from number i on as floats; type is a constant. */
TQKV__OP TQKV__VECTOR TQKV__(load_as)(const tqkv_type type, const void *values, int i)
{
    const uint8_t *halves = (const uint8_t *)values + 2 * (size_t)i;
    if (type == TQKV_TYPE_F16) return TQKV__(load_f16)(halves);
    if (type == TQKV_TYPE_BF16) return TQKV__(load_bf16)(halves);
    return TQKV__(load)((const float *)values + i);
}

/* These do what tqkv__widen_row and tqkv__narrow_row do. */
TQKV__OP void TQKV__(widen_as)(const tqkv_type type, const void *src, const float *center, const float *inverses, int n,
                               float *row)
{
    for (int i = 0; i < n; i += TQKV__LANES) {
        TQKV__VECTOR x = TQKV__(load_as)(type, src, i);
        if (center) x -= TQKV__(load)(center + i);
        if (inverses) x = TQKV__(rounded)(x * TQKV__(load)(inverses + i));
        TQKV__(store)(row + i, x);
    }
}

TQKV__TARGET static void TQKV__(widen)(tqkv_type type, const void *src, const float *center, const float *inverses,
                                       int n, float *row)
{
    if (type == TQKV_TYPE_F16)
        TQKV__(widen_as)(TQKV_TYPE_F16, src, center, inverses, n, row);
    else if (type == TQKV_TYPE_BF16)
        TQKV__(widen_as)(TQKV_TYPE_BF16, src, center, inverses, n, row);
    else
        TQKV__(widen_as)(TQKV_TYPE_F32, src, center, inverses, n, row);
}

/* These do what tqkv__scales_valid and tqkv__invert do, for whole rows. */
TQKV__TARGET static bool TQKV__(scales_valid)(const float *x, size_t n)
{
    TQKV__(words) bad, bits;
    uint32_t lanes[TQKV__LANES], all = 0;
    memset(&bad, 0, sizeof bad);
    for (size_t i = 0; i < n; i += TQKV__LANES) {
        memcpy(&bits, x + i, sizeof bits);
        bad |= (TQKV__(words))(bits - TQKV__LEAST_SCALE > TQKV__SCALES_RANGE);
    }
    memcpy(lanes, &bad, sizeof lanes);
    for (int i = 0; i < TQKV__LANES; i++) all |= lanes[i];
    return !all;
}

TQKV__TARGET static void TQKV__(invert)(const float *scales, int n, float *inverses)
{
    for (int i = 0; i < n; i += TQKV__LANES)
        TQKV__(store)(inverses + i, TQKV__(invert_above)(0.0f, TQKV__(load)(scales + i)));
}

TQKV__TARGET static void TQKV__(narrow_row)(tqkv_type type, const float *row, int n, void *dst)
{
    uint8_t *p = (uint8_t *)dst;
    if (type == TQKV_TYPE_F32) memcpy(dst, row, (size_t)n * sizeof(float));
    if (type == TQKV_TYPE_F16)
        for (int i = 0; i < n; i += TQKV__LANES, p += 2 * TQKV__LANES) TQKV__(store_half)(p, TQKV__(load)(row + i));
    if (type == TQKV_TYPE_BF16)
        for (int i = 0; i < n; i += TQKV__LANES, p += 2 * TQKV__LANES) {
            TQKV__(words) bits, nan;
            TQKV__(codes) words;
            memcpy(&bits, row + i, sizeof bits);
            nan = (TQKV__(words))((bits & 0x7fffffffu) > 0x7f800000u); /* all ones, or 0 */
            bits = (((bits + 0x7fffu + ((bits >> 16) & 1u)) & ~nan) | ((bits | 0x400000u) & nan)) >> 16;
            memcpy(&words, &bits, sizeof words);
            TQKV__(store_words)(p, words);
        }
}

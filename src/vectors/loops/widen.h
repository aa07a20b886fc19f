/* >>k-widen: rows of any type as floats, and back; whether their numbers are valid */

TQKV__OP TQKV__VECTOR TQKV__(load_bf16)(const uint8_t *p)
{
    uint16_t __attribute__((vector_size(2 * TQKV__LANES))) upper;
    memcpy(&upper, p, sizeof upper);
    return (TQKV__VECTOR)(__builtin_convertvector(upper, TQKV__(words)) << 16);
}

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

/* Does what tqkv__invert does, for whole rows. */
TQKV__TARGET static void TQKV__(invert)(const float *scales, int n, float *inverses)
{
    for (int i = 0; i < n; i += TQKV__LANES) TQKV__(store)(inverses + i, TQKV__(set1)(1.0f) / TQKV__(load)(scales + i));
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

/* Does what tqkv__largest_bits does for whole rows. */
TQKV__TARGET static uint32_t TQKV__(largest_of)(const float *x, size_t n)
{
    TQKV__(codes) largest[4];
    uint32_t lanes[4 * TQKV__LANES], all = 0;
    memset(largest, 0, sizeof largest);
    size_t i = 0;
    for (; i + 4 * TQKV__LANES <= n; i += 4 * TQKV__LANES) {
        TQKV__UNROLL
        for (int j = 0; j < 4; j++) largest[j] = TQKV__(larger_bits)(largest[j], TQKV__(load)(x + i + j * TQKV__LANES));
    }
    for (; i < n; i += TQKV__LANES) largest[0] = TQKV__(larger_bits)(largest[0], TQKV__(load)(x + i));
    memcpy(lanes, largest, sizeof lanes);
    for (int j = 0; j < 4 * TQKV__LANES; j++) all = lanes[j] > all ? lanes[j] : all;
    return all;
}

/* Does what tqkv__values_finite does for whole rows. Two halves, or bfloat16s, in a word: a 1 added at the lowest bit
   of an exponent carries into the sign bit only from an exponent of all ones. */
TQKV__TARGET static bool TQKV__(rows_finite)(tqkv_type type, const void *x, size_t n)
{
    const uint32_t one = type == TQKV_TYPE_F16 ? 0x04000400u : 0x00800080u;
    const uint8_t *p = (const uint8_t *)x;
    TQKV__(words) carries, pairs;
    uint32_t lanes[TQKV__LANES], all = 0;
    if (type == TQKV_TYPE_F32) return TQKV__(largest_of)((const float *)x, n) < 0x7f800000u;
    memset(&carries, 0, sizeof carries);
    for (size_t left = 2 * n, size = sizeof pairs; left; left -= size, p += size) {
        if (left < size) {
            size = left;
            memset(&pairs, 0, sizeof pairs);
            memcpy(&pairs, p, left);
        } else {
            memcpy(&pairs, p, sizeof pairs);
        }
        carries |= (pairs & 0x7fff7fffu) + one;
    }
    memcpy(lanes, &carries, sizeof lanes);
    for (int i = 0; i < TQKV__LANES; i++) all |= lanes[i];
    return !(all & 0x80008000u);
}

/* >>exact: arithmetic that gives the same bits for every compiler, flag and floating-point mode of the caller */

/* Rounds x to float at this point. Compilers may fuse a product with a following sum, and not all obey pragmas: an
   empty asm that may change the value prevents it. */
static inline float tqkv__rounded(float x)
{
#if defined(__SSE2_MATH__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#else
    __asm__("" : "+m"(x));
#endif
    return x;
}

/* Rounds results that no sum follows: they are floats already, except in wider registers (x87). */
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ == 0
#define TQKV__AS_FLOAT(x) (x)
#else
#define TQKV__AS_FLOAT(x) tqkv__rounded(x)
#endif

static inline double tqkv__rounded_double(double x)
{
    __asm__("" : "+m"(x));
    return x;
}

/* Returns a*b + c, rounded once. The product is exact in double; its sum with c is rounded to odd (if it is not exact,
   the last bit is set), so the rounding to float cannot see a tie that is none. clang 14 to 19 optimise this function
   wrongly for s390x. */
#if defined(__clang__) && defined(__s390x__)
__attribute__((noinline, optnone)) static float tqkv__fma(float a, float b, float c)
#else
static inline float tqkv__fma(float a, float b, float c)
#endif
{
#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    const double product = tqkv__rounded_double((double)a * (double)b), addend = (double)c;
    const bool first = fabs(product) > fabs(addend);
    double sum = tqkv__rounded_double(product + addend);
    const double large = first ? product : addend, smaller = first ? addend : product;
    const double error = tqkv__rounded_double(smaller - tqkv__rounded_double(sum - large));
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if (error != 0.0 && !(bits & 1) && fabs(sum) < (double)INFINITY)
        bits += (error > 0.0) == (sum > 0.0) ? 1u : ~(uint64_t)0;
    memcpy(&sum, &bits, sizeof sum);
    return TQKV__AS_FLOAT((float)sum);
#endif
}

/* Sets round-to-nearest and keeps denormals; returns the caller's mode for tqkv__fp_restore. Programs linked with
   -ffast-math start with flush-to-zero. Functions that are not inlined keep the arithmetic inside this mode. */
static uint64_t tqkv__fp_exact(void)
{
    uint64_t mode = 0;
#if !defined(__SSE2_MATH__) && !defined(__aarch64__) && defined(FE_TONEAREST)
    mode = (uint64_t)fegetround() << 32;
    fesetround(FE_TONEAREST);
#endif
#if defined(__SSE2__)
    mode |= _mm_getcsr();
    _mm_setcsr(0x1f80); /* all exceptions masked */
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
#endif
    return mode;
}

static void tqkv__fp_restore(uint64_t mode)
{
#if !defined(__SSE2_MATH__) && !defined(__aarch64__) && defined(FE_TONEAREST)
    fesetround((int)(mode >> 32));
#endif
#if defined(__SSE2__)
    _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#endif
    (void)mode;
}

static uint32_t tqkv__bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float tqkv__float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns the bits of the largest magnitude of n floats: an exponent of all ones shows NaN or infinity. */
static uint32_t tqkv__largest_bits(const float *x, size_t n)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = tqkv__bits(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Tests bits, because -ffinite-math-only would remove a test of values. */
static bool tqkv__all_finite(const float *x, size_t n) { return tqkv__largest_bits(x, n) < 0x7f800000u; }

/* Returns the i-th half or bfloat16, whatever type the caller's compiler has for it. */
static uint16_t tqkv__half_at(const void *halves, size_t i)
{
    uint16_t half;
    memcpy(&half, (const uint8_t *)halves + 2 * i, sizeof half);
    return half;
}

static bool tqkv__values_finite(tqkv_type type, const void *x, size_t n)
{
    const uint32_t exponent = type == TQKV_TYPE_F16 ? 0x7c00u : 0x7f80u;
    uint32_t bad = 0;
    if (type == TQKV_TYPE_F32) return tqkv__all_finite((const float *)x, n);
    for (size_t i = 0; i < n; i++) bad |= (tqkv__half_at(x, i) & exponent) == exponent;
    return !bad;
}

/* Adds 16 lanes by halves: lane i and i + 8, then i + 4, i + 2, i + 1. */
static float tqkv__sum_16(float *lanes)
{
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] = TQKV__AS_FLOAT(lanes[i] + lanes[i + n]);
    return lanes[0];
}

/* Rounds to the nearest integer, ties to even; |x| < 2^22 */
static inline float tqkv__round(float x) { return TQKV__AS_FLOAT(tqkv__rounded(x + 12582912.0f) - 12582912.0f); }

/* Of e^r - 1, from the highest term on. Tables hold constants, because these may be wider than a float. */
static const float tqkv__series[7] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f};

/* These are exp_terms, exp and tanh of the kernels, step by step. */
static void tqkv__exp_terms(float x, float *power, float *tail)
{
    static const float reduce[3] = {1.44269504f, -0.693359375f, 2.12194440e-4f};
    const float n = tqkv__round(tqkv__rounded(x * reduce[0]));
    const float r = tqkv__fma(n, reduce[2], tqkv__fma(n, reduce[1], x));
    float p = tqkv__series[0];
    for (int i = 1; i < 7; i++) p = tqkv__fma(p, r, tqkv__series[i]);
    *tail = TQKV__AS_FLOAT(p * r);
    *power = tqkv__float((uint32_t)((int)n + 127) << 23);
}

/* Returns e^x for x up to 87; 0 below -87. NaN stays NaN. */
static TQKV__NOINLINE float tqkv__exp(float x)
{
    float power, tail;
    if (x != x) return x;
    if (x == 0.0f) return 1.0f; /* of two maxima the larger one gives it */
    if (x < -87.0f) return 0.0f;
    tqkv__exp_terms(x < 87.0f ? x : 87.0f, &power, &tail);
    return tqkv__fma(power, tail, power);
}

/* Returns a*b + c*d, each product rounded. */
static inline float tqkv__sum_of_products(float a, float b, float c, float d)
{
    return TQKV__AS_FLOAT(tqkv__rounded(a * b) + tqkv__rounded(c * d));
}

static float tqkv__tanh(float x)
{
    float power, tail;
    const float doubled = TQKV__AS_FLOAT(fabsf(x) * -2.0f);
    if (x != x) return x;
    tqkv__exp_terms(doubled > -40.0f ? doubled : -40.0f, &power, &tail);
    const float m = tqkv__fma(power, tail, TQKV__AS_FLOAT(power - 1.0f));
    return copysignf(TQKV__AS_FLOAT(fabsf(m) / TQKV__AS_FLOAT(2.0f + m)), x);
}

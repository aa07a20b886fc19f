/* The limits of one core with an instruction set: float multiply-adds from registers, bytes read from DRAM. */
#ifndef BENCH_PEAK_H
#define BENCH_PEAK_H

#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifdef __clang__
#define PEAK_UNROLL _Pragma("clang loop unroll(full)")
#else
#define PEAK_UNROLL _Pragma("GCC unroll 16")
#endif

/* Twelve independent chains hide a latency of four cycles at three operations a cycle and fit AVX2's 16 registers. */
enum { PEAK_CHAINS = 12, PEAK_STEPS = 10000 };

/* Four streams with prefetch are the fastest way tried; one stream is 10 to 30% slower. */
enum { PEAK_STREAMS = 4, PEAK_AHEAD = 4096, PEAK_READ_BYTES = 64 << 20, PEAK_MEMORY_BYTES = 256 << 20 };

/* fma_NAME: PEAK_STEPS times PEAK_CHAINS vector multiply-adds. Chains start with different values, or the compiler
   merges them. read_NAME: the sum of PEAK_READ_BYTES. */
#define PEAK_LOOPS(name, target, vector, lanes, set1, fma, add, load) \
    target static float peak_fma_##name(void) \
    { \
        vector x[PEAK_CHAINS]; \
        const vector factor = set1(0.99f), step_up = set1(0.01f); \
        float lane_values[lanes]; \
        PEAK_UNROLL for (int i = 0; i < PEAK_CHAINS; i++) x[i] = set1((float)i); \
        for (int step = 0; step < PEAK_STEPS; step++) \
            PEAK_UNROLL for (int i = 0; i < PEAK_CHAINS; i++) x[i] = fma(x[i], factor, step_up); \
        PEAK_UNROLL for (int i = 1; i < PEAK_CHAINS; i++) x[0] = add(x[0], x[i]); \
        memcpy(lane_values, &x[0], sizeof lane_values); \
        return lane_values[0]; \
    } \
    target static float peak_read_##name(const float *p) \
    { \
        const size_t stream = PEAK_READ_BYTES / PEAK_STREAMS / sizeof(float); \
        const size_t line = 64 / sizeof(float); \
        vector sums[PEAK_STREAMS]; \
        float lane_values[lanes]; \
        PEAK_UNROLL for (int s = 0; s < PEAK_STREAMS; s++) sums[s] = set1(0.0f); \
        for (size_t i = 0; i < stream; i += line) PEAK_UNROLL for (int s = 0; s < PEAK_STREAMS; s++) \
            { \
                const float *at = p + (size_t)s * stream + i; \
                __builtin_prefetch(at + PEAK_AHEAD / sizeof(float)); \
                PEAK_UNROLL for (size_t k = 0; k < line; k += lanes) sums[s] = add(sums[s], load(at + k)); \
            } \
        PEAK_UNROLL for (int s = 1; s < PEAK_STREAMS; s++) sums[0] = add(sums[0], sums[s]); \
        memcpy(lane_values, &sums[0], sizeof lane_values); \
        return lane_values[0]; \
    }

#if defined(__x86_64__)
PEAK_LOOPS(avx512, __attribute__((target("avx512f"))), __m512, 16, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_add_ps,
           _mm512_loadu_ps)
PEAK_LOOPS(avx2, __attribute__((target("avx2,fma"))), __m256, 8, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_add_ps,
           _mm256_loadu_ps)
#elif defined(__aarch64__)
static inline float32x4_t peak_fma_neon_order(float32x4_t x, float32x4_t factor, float32x4_t term)
{
    return vfmaq_f32(term, x, factor);
}
PEAK_LOOPS(neon, , float32x4_t, 4, vdupq_n_f32, peak_fma_neon_order, vaddq_f32, vld1q_f32)
#endif

static inline float peak_set_scalar(float x) { return x; }
static inline float peak_fma_scalar_order(float x, float factor, float term) { return x * factor + term; }
static inline float peak_add_scalar(float a, float b) { return a + b; }
static inline float peak_load_scalar(const float *p) { return *p; }
PEAK_LOOPS(scalar, , float, 1, peak_set_scalar, peak_fma_scalar_order, peak_add_scalar, peak_load_scalar)

typedef struct peak {
    const char *isa;
    int lanes;
    float (*fma)(void);
    float (*read)(const float *p);
} peak;

static const peak peaks[] = {
#if defined(__x86_64__)
    {"avx512", 16, peak_fma_avx512, peak_read_avx512},
    {"avx2", 8, peak_fma_avx2, peak_read_avx2},
#elif defined(__aarch64__)
    {"neon", 4, peak_fma_neon, peak_read_neon},
#endif
    {"scalar", 1, peak_fma_scalar, peak_read_scalar},
};

static inline double peak_fma_count(const peak *p) { return (double)PEAK_STEPS * PEAK_CHAINS * p->lanes; }

#endif

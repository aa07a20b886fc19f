/* Test data with the same bits on every compiler and machine. It uses integers and single float operations that no
 * compiler can contract: no product is added to anything, and sqrt is the only function of libm. */
#ifndef TQKV_TESTS_DATA_H
#define TQKV_TESTS_DATA_H

#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct data_random {
    uint64_t state;
} data_random;

/* SplitMix64 (Steele, Lea, Flood 2014). */
static inline uint64_t data_bits(data_random *random)
{
    random->state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t z = random->state;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* In [0, limit), with a bias below limit / 2^31. */
static inline int data_below(data_random *random, int limit)
{
    return (int)((data_bits(random) >> 33) % (uint64_t)limit);
}

/* Sum of 48 uniform 16-bit integers, centred: near Gaussian (excess kurtosis -0.025), standard deviation 131072. */
static inline int32_t data_gaussian_integer(data_random *random)
{
    const uint64_t halves = UINT64_C(0x0000ffff0000ffff);
    uint64_t sums = 0; /* two, side by side */
    for (int i = 0; i < 12; i++) {
        const uint64_t bits = data_bits(random);
        sums += (bits & halves) + (bits >> 16 & halves);
    }
    return (int32_t)(sums & UINT32_MAX) + (int32_t)(sums >> 32) - 48 * 65535 / 2;
}

/* Mean 0, variance 1. */
static inline float data_gaussian(data_random *random)
{
    return (float)data_gaussian_integer(random) * (1.0f / 131072.0f);
}

/* Student's t with 3 degrees of freedom: heavy tails, as values of real models have. */
static inline float data_student(data_random *random)
{
    int64_t a = data_gaussian_integer(random), b = data_gaussian_integer(random), c = data_gaussian_integer(random);
    int64_t squares = a * a + b * b + c * c;
    double scale = sqrt(3.0 / (double)(squares + 1));
    return (float)((double)data_gaussian_integer(random) * scale);
}

typedef enum data_kind {
    DATA_GAUSSIAN,
    DATA_STUDENT,
    DATA_OUTLIERS,   /* a few channels 10 to 50 times as large */
    DATA_MAGNITUDES, /* rows scaled by 1e-6 .. 1e6 */
    DATA_EXTREMES,   /* rows scaled to where squares or sums under- and overflow */
    DATA_ZEROS,      /* zeros of both signs */
    DATA_ONE_HOT,
    DATA_CONSTANT, /* all values of a row are equal: rotation gives the transform of the signs */
    DATA_KINDS
} data_kind;

static inline const char *data_kind_name(int kind)
{
    static const char *const names[DATA_KINDS] = {"gaussian", "student", "outliers", "magnitudes",
                                                  "extremes", "zeros",   "one_hot",  "constant"};
    return names[kind];
}

/* Channels 5, 69, 133 ... (one in 64) are 10, 20, 30, 40, 50 times as large. */
static inline float data_outlier_factor(int channel)
{
    return channel % 64 == 5 ? (float)(10 * (1 + channel / 64 % 5)) : 1.0f;
}

static inline float data_row_scale(data_random *random, data_kind kind)
{
    static const float magnitudes[7] = {1e-6f, 1e-4f, 1e-2f, 1.0f, 1e2f, 1e4f, 1e6f};
    static const float extremes[8] = {1e-40f, 1e-30f, 1e-22f, 1e-11f, 1e-10f, 6e-8f, 1e18f, 1e30f};
    if (kind == DATA_MAGNITUDES) return magnitudes[data_below(random, 7)];
    if (kind == DATA_EXTREMES) return extremes[data_below(random, 8)];
    return 1.0f;
}

/* row: [head_dim] */
static inline void data_row(data_random *random, data_kind kind, float *row, int head_dim)
{
    float scale = data_row_scale(random, kind);
    int hot = data_below(random, head_dim);
    float constant = data_gaussian(random);
    for (int i = 0; i < head_dim; i++) {
        switch (kind) {
        case DATA_STUDENT:
            row[i] = data_student(random);
            break;
        case DATA_OUTLIERS:
            row[i] = data_gaussian(random) * data_outlier_factor(i);
            break;
        case DATA_ZEROS:
            row[i] = i % 3 == 1 ? -0.0f : 0.0f;
            break;
        case DATA_ONE_HOT:
            row[i] = i == hot ? constant : 0.0f;
            break;
        case DATA_CONSTANT:
            row[i] = constant;
            break;
        default:
            row[i] = data_gaussian(random) * scale;
            break;
        }
    }
}

/* Floats become their little-endian bytes, in place, so that hashes are the same on every machine. */
static inline void data_to_little_endian(void *floats, size_t n)
{
    uint8_t *bytes = (uint8_t *)floats;
    for (size_t i = 0; i < n; i++, bytes += 4) {
        uint32_t bits;
        memcpy(&bits, bytes, sizeof bits);
        for (int k = 0; k < 4; k++) bytes[k] = (uint8_t)(bits >> (8 * k));
    }
}

/* Rows that data_rows has made: tests ask for the same ones many times, and a value takes 12 to 48 random numbers. */
typedef struct data_made {
    uint64_t seed;
    data_kind kind;
    int head_dim, n_rows;
    data_random random; /* after the last row */
    float *rows;        /* [n_rows][head_dim] */
} data_made;

enum { DATA_MADE = 256, DATA_KEPT = 1 << 24 /* values in all */ };

/* data_rows, by one thread at a time. */
static inline void data_rows_alone(uint64_t seed, data_kind kind, float *rows, int n_rows, int head_dim)
{
    static data_made made[DATA_MADE];
    static int n_made;
    static size_t n_kept;
    const size_t d = (size_t)head_dim, n = (size_t)n_rows * d;
    data_made wanted = {seed, kind, head_dim, 0, {seed * UINT64_C(0x2545f4914f6cdd1d) + (uint64_t)kind}, NULL};
    int i = 0;
    while (i < n_made && (made[i].seed != seed || made[i].kind != kind || made[i].head_dim != head_dim)) i++;
    if (i < n_made && made[i].n_rows >= n_rows) {
        memcpy(rows, made[i].rows, n * sizeof *rows);
        return;
    }
    if (i < n_made) {
        wanted = made[i];
        n_kept -= (size_t)wanted.n_rows * d;
        made[i] = made[--n_made];
        memcpy(rows, wanted.rows, (size_t)wanted.n_rows * d * sizeof *rows);
    }
    for (; wanted.n_rows < n_rows; wanted.n_rows++)
        data_row(&wanted.random, kind, rows + (size_t)wanted.n_rows * d, head_dim);
    if (n_made == DATA_MADE || n_kept + n > DATA_KEPT) {
        while (n_made > 0) free(made[--n_made].rows);
        n_kept = 0;
    }
    free(wanted.rows);
    made[n_made] = wanted;
    made[n_made].rows = n > DATA_KEPT ? NULL : (float *)malloc(n * sizeof *rows);
    if (!made[n_made].rows) return;
    memcpy(made[n_made++].rows, rows, n * sizeof *rows);
    n_kept += n;
}

/* Fills rows: [n_rows][head_dim]. Seed and kind decide every bit. */
static inline void data_rows(uint64_t seed, data_kind kind, float *rows, int n_rows, int head_dim)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    data_rows_alone(seed, kind, rows, n_rows, head_dim);
    pthread_mutex_unlock(&lock);
}

#endif

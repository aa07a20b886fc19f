/* Shared by the fuzzers: parameters from bytes, rows of floats, the choice of an instruction set. A failed CHECK ends
 * the program; the fuzzer records that as a crash. */
#ifndef TQKV_TESTS_FUZZ_H
#define TQKV_TESTS_FUZZ_H

#include "tests/data.h"
#include "tests/reference.h"
#include "tests/runner.h"

/* Entry point of libFuzzer and AFL++. An input must free its memory and must not change how the next one runs. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

typedef struct fuzz_input {
    const uint8_t *at;
    size_t left;
} fuzz_input;

/* The input's next byte; 0 after the last one. */
static inline uint8_t fuzz_byte(fuzz_input *input)
{
    if (!input->left) return 0;
    input->left--;
    return *input->at++;
}

static inline uint64_t fuzz_bits(fuzz_input *input, int n_bytes)
{
    uint64_t bits = 0;
    for (int i = 0; i < n_bytes; i++) bits |= (uint64_t)fuzz_byte(input) << (8 * i);
    return bits;
}

static inline int fuzz_int(fuzz_input *input)
{
    uint32_t bits = (uint32_t)fuzz_bits(input, 4);
    int value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float fuzz_float(fuzz_input *input)
{
    uint32_t bits = (uint32_t)fuzz_bits(input, 4);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A value in [low, high]; the range has at most 256 values. */
static inline int fuzz_range(fuzz_input *input, int low, int high) { return low + fuzz_byte(input) % (high - low + 1); }

/* The powers of two have most of the bytes, as in the inputs that were found before there were other sizes. */
static inline int fuzz_head_dim(fuzz_input *input)
{
    const int byte = fuzz_byte(input), others = byte - (256 - TEST_ALL_HEAD_DIMS);
    return others >= 0 ? test_all_head_dims[others] : test_head_dims[byte % 6];
}

static inline bool fuzz_is_finite(float x) { return x - x == 0.0f; }

/* A cheaper data_row value: one random number each, so that the time goes to the library. */
static inline float fuzz_gaussian(data_random *random)
{
    uint64_t bits = data_bits(random);
    int sum = (int)(bits & 0xffff) + (int)(bits >> 16 & 0xffff) + (int)(bits >> 32 & 0xffff) + (int)(bits >> 48);
    return (float)(sum - 2 * 65535) * (1.0f / 37837.0f); /* variance 1 */
}

/* rows: [n_rows][head_dim]. The seed and the kind decide every bit. */
static inline void fuzz_data(uint64_t seed, data_kind kind, float *rows, int n_rows, int head_dim)
{
    data_random random = {seed * UINT64_C(0x2545f4914f6cdd1d) + (uint64_t)kind};
    for (int r = 0; r < n_rows; r++) {
        float scale = data_row_scale(&random, kind), constant = fuzz_gaussian(&random);
        int hot = data_below(&random, head_dim);
        for (int i = 0; i < head_dim; i++, rows++) {
            float x = kind == DATA_CONSTANT || kind == DATA_ONE_HOT ? constant : fuzz_gaussian(&random) * scale;
            if (kind == DATA_STUDENT) x *= x * x;
            if (kind == DATA_OUTLIERS) x *= data_outlier_factor(i);
            *rows = kind == DATA_ZEROS || (kind == DATA_ONE_HOT && i != hot) ? 0.0f : x;
        }
    }
}

/* rows: [n_rows][head_dim], of one of fuzz_data's kinds or of the input's bit patterns, repeated to fill the rows. */
static inline void fuzz_rows(fuzz_input *input, float *rows, int n_rows, int head_dim)
{
    int kind = fuzz_range(input, 0, DATA_KINDS + 1);
    size_t n = (size_t)n_rows * (size_t)head_dim, period = (size_t)fuzz_range(input, 1, 64);
    if (kind < DATA_KINDS) {
        fuzz_data(period, (data_kind)kind, rows, n_rows, head_dim);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        rows[i] = i < period ? fuzz_float(input) : rows[i - period];
        if (kind == DATA_KINDS && !fuzz_is_finite(rows[i])) rows[i] = 1.0f;
    }
}

/* Rounds values to a type and returns them in it: memory of the exact size. Finite values beyond the type's become 1,
 * so that NaN and infinity are where they were. */
static inline void *fuzz_typed(tqkv_type type, float *values, size_t n)
{
    uint16_t *typed = (uint16_t *)test_alloc(n * (type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t)));
    if (type == TQKV_TYPE_F32 && n) memcpy(typed, values, n * sizeof *values);
    for (size_t i = 0; type != TQKV_TYPE_F32 && i < n; i++) {
        if (values[i] != values[i]) {
            typed[i] = 0x7fff;
            continue;
        }
        typed[i] = reference_narrow(type, values[i]);
        if (fuzz_is_finite(values[i]) && !fuzz_is_finite((float)reference_wide(type, typed[i])))
            typed[i] = reference_narrow(type, 1.0f);
        values[i] = (float)reference_wide(type, typed[i]);
    }
    return typed;
}

/* Are the typed values the rounded floats? NaN stays NaN. */
static inline bool fuzz_is_rounded(tqkv_type type, const void *typed, const float *floats, size_t n)
{
    const uint16_t *halves = (const uint16_t *)typed;
    const uint16_t infinity = type == TQKV_TYPE_F16 ? 0x7c00 : 0x7f80;
    if (type == TQKV_TYPE_F32) return !memcmp(typed, floats, n * sizeof *floats);
    for (size_t i = 0; i < n; i++) {
        const bool nan = floats[i] != floats[i];
        if (nan ? (halves[i] & 0x7fff) <= infinity : halves[i] != reference_narrow(type, floats[i])) return false;
    }
    return true;
}

/* Memory of the exact size: the sanitizer reports an access one past the end. */
static inline float *fuzz_new_floats(int a, int b, int c)
{
    return (float *)test_alloc_filled((size_t)a * (size_t)b * (size_t)c * sizeof(float), 0xff);
}

/* Forces the chosen instruction set if this processor has it; TQKV_ISA in the environment takes precedence. */
static inline void fuzz_choose_isa(uint8_t choice)
{
    static const char *const names[4] = {"scalar", "avx2", "avx512", "neon"};
    if (getenv("TQKV_ISA") || tqkv_isa_force(names[choice % 4]) != TQKV_OK) tqkv_isa_force(NULL);
}

#endif

/* Codes of single values and of rows at the limits, lengths, rotations, names. test_codec_history.c has rows at random.
   */
#include "data.h"
#include "reference.h"
#include "runner.h"

#include <fenv.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

/* Equal bits, or both NaN. */
static bool is_same_float(float a, float b) { return !memcmp(&a, &b, sizeof a) || (isnan(a) && isnan(b)); }

static void check_row(const tqkv_store *store, const float *source, int token, int head)
{
    uint8_t codes[2 * REFERENCE_MAX_DIM];
    float norms[8] = {0}, scaled[REFERENCE_MAX_DIM], probed[REFERENCE_MAX_DIM];
    int64_t position = 1 + token;
    tqkv_store one_head = *store;
    one_head.n_kv_heads = 1;
    one_head.center = reference_center(store, head);
    one_head.channel_scale = reference_scale(store, head);
    reference_encode_row(store, head, source, codes, norms, scaled);
    const uint8_t *stored = reference_codes_at(store, head, position);
    for (size_t i = 0; i < reference_row_bytes(store->format, store->head_dim); i++)
        CHECK(stored[i] == codes[i], "token %d head %d byte %d is %d, not %d", token, head, (int)i, stored[i],
              codes[i]);
    for (int i = 0; i < reference_norms_per_row(store->format, store->head_dim); i++) {
        float norm = reference_norms_at(store, head, position)[i];
        CHECK(is_same_float(norm, norms[i]), "token %d head %d norm %d is %.9g, not %.9g", token, head, i, (double)norm,
              (double)norms[i]);
    }
    CHECK_RESULT(tqkv_probe(&one_head, source, 1, probed), TQKV_OK);
    for (int i = 0; i < store->head_dim; i++)
        CHECK(is_same_float(probed[i], scaled[i]), "token %d head %d probe %d is %.9g, not %.9g", token, head, i,
              (double)probed[i], (double)scaled[i]);
}

typedef struct format_row {
    tqkv_format format;
    int head_dim;
    bool unrotated;
    float block_scale;
} format_row;

/* ---- Sizes and names ---- */

static void check_sizes(const void *parameters)
{
    const format_row *row = (const format_row *)parameters;
    size_t bytes = reference_row_bytes(row->format, row->head_dim);
    int norms = reference_norms_per_row(row->format, row->head_dim);
    tqkv_store store;
    memset(&store, 0, sizeof store);
    store.format = row->format;
    store.head_dim = row->head_dim;
    store.n_kv_heads = 3;
    store.capacity = 11;
    CHECK(test_row_bytes(row->format, row->head_dim) == bytes, "row of %d bytes, not %d",
          (int)test_row_bytes(row->format, row->head_dim), (int)bytes);
    CHECK(test_norms_per_row(row->format, row->head_dim) == norms, "%d norms a row, not %d",
          test_norms_per_row(row->format, row->head_dim), norms);
    CHECK(tqkv_codes_size(&store) == 33 * bytes, "codes of %d bytes", (int)tqkv_codes_size(&store));
    CHECK(tqkv_norms_size(&store) == 33 * sizeof(float) * (size_t)norms, "norms of %d bytes",
          (int)tqkv_norms_size(&store));
}

static void check_names(const void *parameters)
{
    (void)parameters;
    static const char *const names[TEST_FORMATS] = {"f16",       "tq4",       "tq5", "tq6", "tq8",
                                                    "tq5_bytes", "tq6_bytes", "i8",  "tq3", "tq2"};
    for (int i = 0; i < TEST_FORMATS; i++) {
        const char *name = tqkv_format_name(test_formats[i]);
        CHECK(!strcmp(name, names[i]), "format %d is named %s, not %s", (int)test_formats[i], name, names[i]);
        CHECK(tqkv_format_from_name(names[i]) == test_formats[i], "%s is format %d", names[i],
              (int)tqkv_format_from_name(names[i]));
    }
    static const char *const unknown[6] = {"", "tq", "tq55", "TQ4", "i8 ", "q4_0"};
    for (int i = 0; i < 6; i++)
        CHECK(tqkv_format_from_name(unknown[i]) == TQKV_FORMAT_DEFAULT, "'%s' is a format", unknown[i]);
    CHECK(tqkv_format_from_name(NULL) == TQKV_FORMAT_DEFAULT, "NULL is a format");
    CHECK(tqkv_format_name(test_no_format(99)) != NULL, "no text for an unknown format");
}

static void check_result_strings(const void *parameters)
{
    (void)parameters;
    for (int i = 0; i <= (int)TQKV_METAL_ERROR; i++) {
        const char *text = tqkv_result_string((tqkv_result)i);
        REQUIRE(text && strlen(text) > 1, "result %d has no text", i);
        for (int j = 0; j < i; j++)
            CHECK(strcmp(text, tqkv_result_string((tqkv_result)j)), "results %d and %d share '%s'", i, j, text);
    }
    CHECK(tqkv_result_string(test_no_result(99)) != NULL, "no text for an unknown result");
}

/* ---- Rotation ---- */

static void check_rotate(const void *parameters)
{
    int d = *(const int *)parameters, n_rows = 6;
    float *source = test_rows(3, DATA_STUDENT, n_rows, d), *rows = test_rows(3, DATA_STUDENT, n_rows, d);
    float expected[REFERENCE_MAX_DIM];
    CHECK_RESULT(tqkv_rotate(rows, n_rows, d, TQKV_ROTATED), TQKV_OK);
    for (int r = 0; r < n_rows; r++) {
        memcpy(expected, source + r * d, (size_t)d * sizeof(float));
        reference_rotate_row(expected, d);
        CHECK(!memcmp(rows + r * d, expected, (size_t)d * sizeof(float)), "row %d differs from the reference", r);
    }
    CHECK_RESULT(tqkv_rotate(rows, n_rows, d, TQKV_ORIGINAL), TQKV_OK);
    for (int r = 0; r < n_rows; r++) {
        double original[REFERENCE_MAX_DIM];
        for (int i = 0; i < d; i++) original[i] = (double)source[r * d + i];
        double error = reference_relative_error(rows + r * d, original, (size_t)d);
        CHECK(error < 1e-6, "row %d comes back with relative error %.3g", r, error);
    }
    free(rows);
    free(source);
}

static double dot(const double *x, const double *y, int n)
{
    double sum = 0.0;
    for (int i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* The rotation of some unit vectors and a long row: orthogonal, and as long as before; in double to 1e-13, and the
   library's floats follow it. */
static void check_orthogonal(const void *parameters)
{
    const int d = *(const int *)parameters;
    enum { ROWS = 9 };
    float *rows = test_rows((uint64_t)d, DATA_STUDENT, ROWS, d);
    double *wide = (double *)test_alloc(sizeof(double) * (size_t)(ROWS * d)), before = 0.0;
    memset(rows, 0, sizeof(float) * (size_t)((ROWS - 1) * d));
    for (int r = 0; r < ROWS - 1; r++) rows[r * d + (r * 31 + r / 4 * 16) % d] = 1.0f;
    for (int i = 0; i < ROWS * d; i++) wide[i] = (double)rows[i];
    before = dot(wide + (ROWS - 1) * d, wide + (ROWS - 1) * d, d);
    CHECK_RESULT(tqkv_rotate(rows, ROWS, d, TQKV_ROTATED), TQKV_OK);
    for (int r = 0; r < ROWS; r++) {
        reference_rotate_double(wide + r * d, d);
        const double error = reference_relative_error(rows + r * d, wide + r * d, (size_t)d);
        CHECK(error < 1e-6, "row %d: relative error %.3g", r, error);
    }
    for (int r = 0; r < ROWS - 1; r++)
        for (int other = 0; other <= r; other++) {
            const double product = dot(wide + r * d, wide + other * d, d);
            CHECK(fabs(product - (r == other)) < 1e-13, "unit vectors %d and %d: product %.3g", r, other, product);
        }
    const double after = dot(wide + (ROWS - 1) * d, wide + (ROWS - 1) * d, d);
    CHECK(fabs(after - before) < 1e-13 * before, "a square of %.17g becomes %.17g", before, after);
    free(wide);
    free(rows);
}

static void check_same_bytes(const tqkv_store *a, const tqkv_store *b)
{
    CHECK(!memcmp(a->codes, b->codes, a->codes_size), "codes differ");
    CHECK(!a->norms_size || !memcmp(a->norms, b->norms, a->norms_size), "norms differ");
}

/* ---- Single values ---- */

/* Encodes a row of alternating 1 and -1, or what rotates to it: with a root mean square of exactly 1 the block scale is
   the size of the scaled values. */
static void check_alternating(tqkv_store *store, const float *source, float first, float size)
{
    const int bits = reference_bits(store->format), d = store->head_dim;
    float scaled[256], centroids[256];
    uint8_t codes[256];
    store->block_scale = size;
    CHECK_RESULT(tqkv_encode(store, source, 1, 0), TQKV_OK);
    for (int i = 0; i < 256; i++) scaled[i] = i % 2 ? -first * size : first * size;
    reference_search(bits, scaled, 0, 256, codes, centroids);
    for (int i = 0; i < d; i++) {
        const int code = reference_code_at((const uint8_t *)store->codes, store->format, d, i);
        CHECK(code == codes[i % 256], "value %d, %.9g: code %d, not %d", i, (double)scaled[i % 256], code,
              codes[i % 256]);
    }
}

/* Calls check_alternating with sizes that a factor brings to `at`, and with their neighbours. */
static void check_around(tqkv_store *store, const float *source, float first, float at)
{
    int n;
    const float *factors = reference_factors(reference_bits(store->format), &n);
    for (int f = 0; f < n; f++)
        for (int step = -2; step <= 2; step++) {
            float size = at / factors[f];
            for (int i = 0; i < abs(step); i++) size = nextafterf(size, step < 0 ? 0.0f : INFINITY);
            check_alternating(store, source, first, size);
        }
}

/* A value equal to a boundary gets the lower code, also after it is multiplied by a factor: rows without rotation, with
   all positive boundaries and their negatives. */
static void check_ties(const void *parameters)
{
    tqkv_format format = *(const tqkv_format *)parameters;
    int bits = reference_bits(format), d = 512;
    float source[512];
    for (int i = 0; i < d; i++) source[i] = i % 2 ? -1.0f : 1.0f;
    tqkv_store store = test_store(format, d, 1, 1, false);
    store.rotation = TQKV_ROTATION_OFF;
    for (int b = (1 << bits) / 2; b < (1 << bits) - 1; b++)
        check_around(&store, source, 1.0f, test_boundaries(bits)[b]);
    test_store_free(&store);
}

/* Floats at and around every positive boundary, and around every edge of the 2^bits cells of equal width that fast
   encoders start with; also their negatives. A row of 1024 with a single 32 rotates to values of exactly +-1 with
   alternating signs. */
static void check_neighbours(const void *parameters)
{
    tqkv_format format = *(const tqkv_format *)parameters;
    int bits = reference_bits(format), cells = 1 << bits;
    const float *boundaries = test_boundaries(bits);
    float source[1024] = {0}, rotated[1024];
    tqkv_store store = test_store(format, 1024, 1, 1, false);
    source[1] = 32.0f;
    CHECK_RESULT(tqkv_probe(&store, source, 1, rotated), TQKV_OK);
    for (int i = 0; i < 1024; i++)
        CHECK(fabsf(rotated[i]) == 1.0f && rotated[i] == (i % 2 ? -rotated[0] : rotated[0]), "rotated to %.9g",
              (double)rotated[i]);
    for (int point = 1; point < cells + cells / 2 - 1; point++)
        check_around(&store, source, rotated[0],
                     point < cells ? boundaries[cells - 2] * (float)point / (float)(cells - 1)
                                   : boundaries[point - cells / 2]);
    test_store_free(&store);
}

/* The first n halves of an F16 store. */
static void read_halves(const tqkv_store *store, uint16_t *halves, int n)
{
    const uint8_t *bytes = (const uint8_t *)store->codes;
    for (int i = 0; i < n; i++) halves[i] = (uint16_t)(bytes[2 * i] | bytes[2 * i + 1] << 8);
}

/* Every finite half encodes to itself. The midpoint of two neighbours encodes to the even one. */
static void check_halves(const void *parameters)
{
    int first = *(const int *)parameters, d = 1024;
    tqkv_store store = test_store(TQKV_F16, d, 1, 1, false);
    float source[1024], decoded[1024];
    uint16_t stored[1024];
    for (int i = 0; i < d; i++) source[i] = (float)reference_half_value((uint16_t)(first + i));
    CHECK_RESULT(tqkv_encode(&store, source, 1, 0), TQKV_OK);
    read_halves(&store, stored, d);
    CHECK_RESULT(tqkv_decode(&store, 0, 1, TQKV_ORIGINAL, decoded), TQKV_OK);
    for (int i = 0; i < d; i++) {
        CHECK(stored[i] == first + i, "half %04x becomes %04x", (unsigned)(first + i), (unsigned)stored[i]);
        CHECK(!memcmp(&decoded[i], &source[i], sizeof *source), "half %04x decodes to %.9g", (unsigned)(first + i),
              (double)decoded[i]);
    }
    for (int i = 0; i + 1 < d; i++)
        source[i] = (float)((reference_half_value((uint16_t)(first + i)) + (double)source[i + 1]) / 2.0);
    CHECK_RESULT(tqkv_encode(&store, source, 1, 0), TQKV_OK);
    read_halves(&store, stored, d);
    for (int i = 0; i + 1 < d; i++) {
        int even = (first + i) % 2 ? first + i + 1 : first + i;
        CHECK(stored[i] == even, "%.9g becomes %04x, not %04x", (double)source[i], (unsigned)stored[i], (unsigned)even);
    }
    test_store_free(&store);
}

static void check_half_limits(const void *parameters)
{
    (void)parameters;
    static const float values[8] = {65504.0f, 65519.996f,     65520.0f,      1e30f,
                                    3.4e38f,  2.98023224e-8f, 2.9802326e-8f, 1e-40f};
    static const uint16_t halves[8] = {0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7bff, 0, 1, 0};
    float source[32] = {0};
    uint16_t stored[32];
    tqkv_store store = test_store(TQKV_F16, 32, 1, 1, false);
    for (int i = 0; i < 8; i++) {
        source[2 * i] = values[i];
        source[2 * i + 1] = -values[i];
    }
    CHECK_RESULT(tqkv_encode(&store, source, 1, 0), TQKV_OK);
    read_halves(&store, stored, 32);
    for (int i = 0; i < 8; i++) {
        CHECK(stored[2 * i] == halves[i], "%.9g becomes %04x", (double)values[i], (unsigned)stored[2 * i]);
        CHECK(stored[2 * i + 1] == (halves[i] | 0x8000), "%.9g becomes %04x", -(double)values[i],
              (unsigned)stored[2 * i + 1]);
    }
    test_store_free(&store);
}

/* ---- The length of a decoded row ---- */

static double length_of(const double *row, int head_dim)
{
    double sum = 0.0;
    for (int i = 0; i < head_dim; i++) sum += row[i] * row[i];
    return sqrt(sum);
}

/* The stored norm makes a decoded row as long as its source, whatever its codes. */
static void check_length(const void *parameters)
{
    const format_row *row = (const format_row *)parameters;
    static const data_kind kinds[4] = {DATA_GAUSSIAN, DATA_STUDENT, DATA_OUTLIERS, DATA_MAGNITUDES};
    enum { ROWS = 8 };
    int d = row->head_dim;
    tqkv_store store = test_store(row->format, d, 1, ROWS, false);
    store.rotation = row->unrotated ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    store.block_scale = row->block_scale;
    for (int kind = 0; kind < 4; kind++) {
        float *source = test_rows(3, kinds[kind], ROWS, d);
        CHECK_RESULT(tqkv_encode(&store, source, ROWS, 0), TQKV_OK);
        for (int i = 0; i < ROWS; i++) {
            double wanted[REFERENCE_MAX_DIM], decoded[REFERENCE_MAX_DIM];
            for (int j = 0; j < d; j++) wanted[j] = (double)source[i * d + j];
            reference_decode(&store, 0, i, decoded);
            double before = length_of(wanted, d), after = length_of(decoded, d);
            CHECK(fabs(after - before) < 1e-6 * before, "row %d of kind %d: length %.9g, not %.9g", i, kind, after,
                  before);
        }
        free(source);
    }
    test_store_free(&store);
}

/* A row, of I8 a block, that is not longer, or larger, than 1e-10 is stored with norm 0 and decodes to zeros. */
static void check_short(const void *parameters)
{
    const format_row *row = (const format_row *)parameters;
    int d = row->head_dim;
    float source[REFERENCE_MAX_DIM] = {0}, decoded[REFERENCE_MAX_DIM];
    tqkv_store store = test_store(row->format, d, 1, 2, false);
    /* A rotation gives all values the same magnitude. I8 has norms of largest values, the others of lengths. */
    const float unit = row->format == TQKV_I8 ? sqrtf((float)d) : 1.0f;
    source[d / 3] = 0.999e-10f * unit;
    for (int i = 0; i < 2; i++) {
        CHECK_RESULT(tqkv_encode(&store, source, 1, i), TQKV_OK);
        CHECK_RESULT(tqkv_decode(&store, i, 1, TQKV_ORIGINAL, decoded), TQKV_OK);
        /* Several norms of a codebook's format: root mean squares of 256 values. */
        const bool zero = i == 0 || (row->format != TQKV_I8 && !reference_has_one_norm(d));
        for (int b = 0; b < reference_norms_per_row(row->format, d); b++)
            CHECK((reference_norms_at(&store, 0, i)[b] == 0.0f) == zero, "row %d: norm %g", i,
                  (double)reference_norms_at(&store, 0, i)[b]);
        for (int j = 0; zero && j < d; j++) CHECK(decoded[j] == 0.0f, "element %d is %g", j, (double)decoded[j]);
        source[d / 3] = 1.01e-10f * unit;
    }
    test_store_free(&store);
}

/* Finite input whose rotation overflows: encode and decode return OK, and codes stay inside the codebook. */
static void check_overflow(const void *parameters)
{
    const format_row *row = (const format_row *)parameters;
    int d = row->head_dim;
    float source[REFERENCE_MAX_DIM], decoded[REFERENCE_MAX_DIM];
    tqkv_store store = test_store(row->format, d, 1, 1, false);
    for (int i = 0; i < d; i++) source[i] = reference_is_negative(i, d) ? -3e38f : 3e38f;
    CHECK_RESULT(tqkv_encode(&store, source, 1, 0), TQKV_OK);
    CHECK_RESULT(tqkv_decode(&store, 0, 1, TQKV_ROTATED, decoded), TQKV_OK);
    if (row->format == TQKV_F16) CHECK(fabsf(decoded[0]) == 65504.0f, "%g is not clamped", (double)decoded[0]);
    if (reference_is_codebook(row->format))
        for (int j = 0; j < d; j++) {
            int code = reference_code_at((const uint8_t *)store.codes, row->format, d, j);
            CHECK(code < 1 << reference_bits(row->format), "element %d has code %d", j, code);
        }
    /* inf - inf is a NaN whose sign depends on the processor. Stored norms have one NaN only. */
    for (size_t i = 0; reference_is_codebook(row->format) && i < store.norms_size / sizeof(float); i++) {
        uint32_t bits;
        memcpy(&bits, &store.norms[i], sizeof bits);
        CHECK(bits == 0x7fc00000u, "norm %d is %08x", (int)i, (unsigned)bits);
    }
    test_store_free(&store);
}

/* A block scale so large that the scaled values of a short block are infinite, or NaN where they were 0: they have the
   codes of large values, and their centroids count in the norm. */
static void check_infinite(const void *parameters)
{
    const format_row *row = (const format_row *)parameters;
    enum { TOKENS = 3 };
    const int d = row->head_dim;
    tqkv_store store = test_store(row->format, d, 1, 1 + TOKENS, false);
    store.rotation = row->unrotated ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    store.block_scale = 2e38f;
    float *source = test_rows(8, DATA_GAUSSIAN, TOKENS, d);
    for (int i = 0; i < TOKENS * d; i++) source[i] *= i < d ? 1e-9f : i < 2 * d ? 1.0f : 1e9f;
    for (int i = 0; i < d; i += 3) source[i] = 0.0f;
    for (int i = 0; row->format == TQKV_TQ4 && i < d; i++) /* rotates to zeros among equal values */
        source[i] = i < 2 ? 1e-9f : 0.0f;
    CHECK_RESULT(tqkv_encode(&store, source, TOKENS, 1), TQKV_OK);
    for (int token = 0; token < TOKENS; token++) check_row(&store, source + token * d, token, 0);
    free(source);
    test_store_free(&store);
}

/* ---- The caller's floating-point environment ---- */

static unsigned long long read_control(void)
{
#if defined(__SSE__)
    return _mm_getcsr() & ~0x3fu; /* without the sticky exception flags */
#elif defined(__aarch64__)
    unsigned long long control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control;
#else
    return 0;
#endif
}

/* Denormals as zero, in sources and results. */
static void set_flush_to_zero(void)
{
#if defined(__SSE__)
    _mm_setcsr(_mm_getcsr() | 0x8040u);
#elif defined(__aarch64__)
    unsigned long long control = read_control() | 1ull << 24;
    __asm__ volatile("msr fpcr, %0" : : "r"(control));
#endif
}

typedef struct environment_row {
    format_row format;
    int rounding;
    bool flush;
} environment_row;

static void encode_in(const environment_row *row, tqkv_store *store, const float *source, int n_tokens)
{
    fenv_t saved;
    fegetenv(&saved);
    fesetround(row->rounding);
    if (row->flush) set_flush_to_zero();
    unsigned long long before = read_control();
    tqkv_result result = tqkv_encode(store, source, n_tokens, 0);
    unsigned long long after = read_control();
    fesetenv(&saved);
    CHECK_RESULT(result, TQKV_OK);
    CHECK(before == after, "the control word was %llx, is %llx", before, after);
}

static void check_environment(const void *parameters)
{
    const environment_row *row = (const environment_row *)parameters;
    enum { TOKENS = 16 };
    int d = row->format.head_dim;
    tqkv_store usual = test_store(row->format.format, d, 1, TOKENS, false);
    tqkv_store other = test_store(row->format.format, d, 1, TOKENS, false);
    float *source = test_rows(5, DATA_EXTREMES, TOKENS, d);
    CHECK_RESULT(tqkv_encode(&usual, source, TOKENS, 0), TQKV_OK);
    encode_in(row, &other, source, TOKENS);
    check_same_bytes(&usual, &other);
    free(source);
    test_store_free(&usual);
    test_store_free(&other);
}

static void add_environment_cases(const format_row *format)
{
    static const int roundings[4] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    static const char *const names[4] = {"nearest", "up", "down", "zero"};
    for (int i = 0; i < 8; i++) {
        environment_row row;
        row.format = *format;
        row.rounding = roundings[i % 4];
        row.flush = i >= 4;
        test_add(check_environment, &row, sizeof row, "codec/environment/%s/%d/%s%s", tqkv_format_name(format->format),
                 format->head_dim, names[i % 4], row.flush ? "/flush" : "");
    }
}

static void add_format_cases(tqkv_format format, int head_dim)
{
    format_row row = {format, head_dim, false, 0.0f};
    const char *name = tqkv_format_name(format);
    test_add(check_sizes, &row, sizeof row, "codec/sizes/%s/%d", name, head_dim);
    if ((head_dim & (head_dim - 1)) && (head_dim / 16 + (int)format) % 3) return; /* the goldens have them all */
    test_add(check_overflow, &row, sizeof row, "codec/overflow/%s/%d", name, head_dim);
    if (head_dim == 128 || head_dim == 512) add_environment_cases(&row);
    if (reference_is_codebook(format)) test_add(check_length, &row, sizeof row, "codec/length/%s/%d", name, head_dim);
    if (format != TQKV_F16) test_add(check_short, &row, sizeof row, "codec/short/%s/%d", name, head_dim);
    if (reference_is_codebook(format) && head_dim == 1024)
        test_add(check_neighbours, &format, sizeof format, "codec/neighbours/%s", name);
    if (reference_is_codebook(format) && !reference_has_one_norm(head_dim)) {
        row.unrotated = reference_can_be_unrotated(format);
        test_add(check_infinite, &row, sizeof row, "codec/infinite/%s/%d", name, head_dim);
        row.unrotated = false;
    }
    if (reference_can_be_unrotated(format) && head_dim == 512)
        test_add(check_ties, &format, sizeof format, "codec/ties/%s", name);
}

void test_codec_cases(void)
{
    for (int f = 0; f < TEST_FORMATS; f++)
        for (int d = 0; d < TEST_ALL_HEAD_DIMS; d++) add_format_cases(test_formats[f], test_all_head_dims[d]);
    for (int d = 0; d < TEST_ALL_HEAD_DIMS; d++) {
        const int *head_dim = &test_all_head_dims[d];
        test_add(check_rotate, head_dim, sizeof *head_dim, "codec/rotate/%d", *head_dim);
        test_add(check_orthogonal, head_dim, sizeof *head_dim, "codec/orthogonal/%d", *head_dim);
    }
    for (int first = 0; first < 0x7c00; first += 1024) /* exponents 0 to 30, both signs */
        test_add(check_halves, &first, sizeof first, "codec/halves/%04x", (unsigned)first);
    for (int first = 0x8000; first < 0xfc00; first += 1024)
        test_add(check_halves, &first, sizeof first, "codec/halves/%04x", (unsigned)first);
    test_add(check_half_limits, NULL, 0, "codec/half_limits");
    test_add(check_names, NULL, 0, "codec/names");
    test_add(check_result_strings, NULL, 0, "codec/result_strings");
}

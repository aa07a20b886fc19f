/* Codes of single values at the limits, halves, rounding, names. test_codec_history.c has rows and rotations at
 * random. */
#include "data.h"
#include "reference.h"
#include "runner.h"

typedef struct format_row {
    tqkv_format format;
    int head_dim;
    tqkv_type type;
} format_row;

/* ---- Names ---- */

static void check_names(NO_ROW)
{
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

static void check_result_strings(NO_ROW)
{
    for (int i = 0; i <= (int)TQKV_METAL_ERROR; i++) {
        const char *text = tqkv_result_string((tqkv_result)i);
        REQUIRE(text && strlen(text) > 1, "result %d has no text", i);
        for (int j = 0; j < i; j++)
            CHECK(strcmp(text, tqkv_result_string((tqkv_result)j)), "results %d and %d share '%s'", i, j, text);
    }
    CHECK(tqkv_result_string(test_no_result(99)) != NULL, "no text for an unknown result");
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

/* Floats at every positive boundary, which get the lower code, and around it, also multiplied by a factor; and around
   every edge of the 2^bits cells of equal width that fast encoders start with; also their negatives. A row of 1024 with
   a single 32 rotates to values of exactly +-1 with alternating signs. */
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

static void check_half_limits(NO_ROW)
{
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

/* ---- Rows of half and bfloat16 ---- */

/* What decode writes of a zero is its centre: floats of any bits, rounded. floats: [n], finite;
 * n: a multiple of 1024 */
static void check_decoded_center(tqkv_type type, const float *floats, int n)
{
    enum { D = 1024 };
    tqkv_store s = test_store(TQKV_F16, D, n / D, 1, false);
    uint16_t *out = (uint16_t *)test_alloc_filled((size_t)n * sizeof *out, 0xff);
    memset(s.codes, 0, s.codes_size);
    s.type = type;
    s.center = floats;
    CHECK_RESULT(tqkv_decode(&s, 0, 1, TQKV_ORIGINAL, out), TQKV_OK);
    for (int i = 0; i < n; i++)
        CHECK(out[i] == reference_narrow(type, floats[i]), "%.9g became %04x, not %04x", (double)floats[i], out[i],
              reference_narrow(type, floats[i]));
    test_store_free(&s);
    free(out);
}

/* All values of the type, all midpoints of neighbours, and the floats beside each. */
static void check_rounding(const void *parameters)
{
    enum { N = 65536 };
    const tqkv_type type = *(const tqkv_type *)parameters;
    const uint16_t infinity = type == TQKV_TYPE_F16 ? 0x7c00 : 0x7f80;
    float *floats = (float *)test_alloc(N * sizeof(float));
    for (int step = -2; step <= 2; step++) {
        for (int i = 0; i < N; i++) {
            const uint16_t magnitude = (uint16_t)(i & 0x7fff), below = magnitude < infinity ? magnitude : 0;
            const double low = reference_wide(type, below);
            double high = reference_wide(type, (uint16_t)(below + 1));
            if (below + 1 == infinity) high = type == TQKV_TYPE_F16 ? 65536.0 : ldexp(1.0, 128);
            const float middle = step == -2 ? (float)low : (float)((low + high) / 2);
            const float beside = step == -1  ? nextafterf(middle, 0.0f)
                                 : step == 1 ? nextafterf(middle, INFINITY)
                                 : step == 2 ? middle * 1.5f
                                             : middle;
            floats[i] = i & 0x8000 ? -beside : beside;
            if (!isfinite(floats[i]) || floats[i] == 0.0f) floats[i] = 1e5f; /* a centre is finite; 0 - 0 is 0 */
        }
        check_decoded_center(type, floats, N);
    }
    free(floats);
}

/* NaN and infinity at each place of the rows; the largest value is neither. */
static void check_not_finite(const void *parameters)
{
    const format_row *row = (const format_row *)parameters;
    const int n = 3 * 2 * row->head_dim;
    const uint16_t infinity = row->type == TQKV_TYPE_F16 ? 0x7c00 : 0x7f80;
    const uint16_t bad[] = {infinity, (uint16_t)(infinity | 0x8000), (uint16_t)(infinity + 1), 0xffff};
    const uint16_t good[] = {(uint16_t)(infinity - 1), (uint16_t)((infinity - 1) | 0x8000)};
    uint16_t *src = (uint16_t *)test_alloc_filled((size_t)n * sizeof *src, 0);
    tqkv_store s = test_store(row->format, row->head_dim, 2, 3, false);
    s.type = row->type;
    for (int i = 0; i < n; i++) {
        src[i] = bad[i % 4];
        CHECK_RESULT(tqkv_encode(&s, src, 3, 0), TQKV_NOT_FINITE);
        src[i] = good[i % 2];
    }
    CHECK_RESULT(tqkv_encode(&s, src, 3, 0), TQKV_OK);
    test_store_free(&s);
    free(src);
}

/* A run that is longer than a ring, by the tasks of a hook and by one thread: the same bytes. */
static void check_tasks(NO_ROW)
{
    enum { TOKENS = 700, HEADS = 2, DIM = 128 };
    float *src = test_rows(7, DATA_GAUSSIAN, TOKENS * HEADS, DIM);
    tqkv_store stores[2];
    for (int i = 0; i < 2; i++) {
        stores[i] = test_store(TQKV_TQ4, DIM, HEADS, 300, true);
        if (i) stores[i].parallel.run = test_run_backwards;
        CHECK_RESULT(tqkv_encode(&stores[i], src, TOKENS, 50), TQKV_OK);
    }
    CHECK(!memcmp(stores[0].codes, stores[1].codes, stores[0].codes_size), "other codes");
    CHECK(!memcmp(stores[0].norms, stores[1].norms, stores[0].norms_size), "other norms");
    for (int i = 0; i < 2; i++) test_store_free(&stores[i]);
    free(src);
}

void test_codec_cases(void)
{
    for (int i = 0; i < TEST_FORMATS; i++) {
        const tqkv_format *format = &test_formats[i];
        if (reference_is_codebook(*format))
            test_add(check_neighbours, format, sizeof *format, "codec/neighbours/%s", tqkv_format_name(*format));
    }
    for (int first = 0; first < 0x7c00; first += 1024) /* exponents 0 to 30, both signs */
        test_add(check_halves, &first, sizeof first, "codec/halves/%04x", (unsigned)first);
    for (int first = 0x8000; first < 0xfc00; first += 1024)
        test_add(check_halves, &first, sizeof first, "codec/halves/%04x", (unsigned)first);
    test_add(check_half_limits, NULL, 0, "codec/half_limits");
    for (int i = 0; i < 2; i++) {
        const tqkv_type type = i ? TQKV_TYPE_BF16 : TQKV_TYPE_F16;
        const format_row rows[2] = {{TQKV_F16, 48, type}, {TQKV_TQ2, 64, type}};
        test_add(check_rounding, &type, sizeof type, "types/rounding/%s", i ? "bf16" : "f16");
        for (int j = 0; j < 2; j++)
            test_add(check_not_finite, &rows[j], sizeof rows[j], "types/not_finite/%s/%d", i ? "bf16" : "f16",
                     rows[j].head_dim);
    }
    test_add(check_tasks, NULL, 0, "codec/tasks");
    test_add(check_names, NULL, 0, "codec/names");
    test_add(check_result_strings, NULL, 0, "codec/result_strings");
}

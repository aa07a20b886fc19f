/* The mean error of encoding and decoding, against the known error of each format. */
#include "data.h"
#include "reference.h"
#include "runner.h"

enum { ERROR_ROWS = 20480, ERROR_CHUNK = 512 };

typedef struct error_row {
    const char *name;
    tqkv_format format;
    int head_dim;
    data_kind kind;
    bool unrotated;
    double expected, saved, tolerance; /* relMSE without a search, the share that it takes away, relative tolerance */
} error_row;

/* The sum over rows of |x - x^|^2 / |x|^2. source, decoded: [n_rows][head_dim] */
static double sum_of_errors(const float *source, const float *decoded, int n_rows, int head_dim)
{
    double total = 0.0;
    for (int r = 0; r < n_rows; r++) {
        double error = 0.0, size = 0.0;
        for (int i = r * head_dim; i < (r + 1) * head_dim; i++) {
            double difference = (double)source[i] - (double)decoded[i];
            error += difference * difference;
            size += (double)source[i] * (double)source[i];
        }
        total += error / size;
    }
    return total;
}

static double round_trip_error(const error_row *row)
{
    int d = row->head_dim;
    tqkv_store store = test_store(row->format, d, 1, ERROR_CHUNK, false);
    store.rotation = row->unrotated ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
    float *source = (float *)test_alloc(sizeof(float) * (size_t)(ERROR_CHUNK * d));
    float *decoded = (float *)test_alloc(sizeof(float) * (size_t)(ERROR_CHUNK * d));
    double total = 0.0;
    for (int chunk = 0; chunk < ERROR_ROWS / ERROR_CHUNK; chunk++) {
        data_rows(1000 + (uint64_t)chunk, row->kind, source, ERROR_CHUNK, d);
        CHECK_RESULT(tqkv_encode(&store, source, ERROR_CHUNK, 0), TQKV_OK);
        CHECK_RESULT(tqkv_decode(&store, 0, ERROR_CHUNK, TQKV_ORIGINAL, decoded), TQKV_OK);
        total += sum_of_errors(source, decoded, ERROR_CHUNK, d);
    }
    free(source);
    free(decoded);
    test_store_free(&store);
    return total / (double)(int)ERROR_ROWS;
}

static void check_error(const void *parameters)
{
    const error_row *row = (const error_row *)parameters;
    double error = round_trip_error(row);
    const double expected = (1.0 - row->saved) * row->expected;
    CHECK(fabs(error - expected) <= row->tolerance * expected, "relMSE %.4g, not within %.0f%% of %.4g", error,
          100.0 * row->tolerance, expected);
}

/* The expected values are those of the formats before step 9, rounded by up to 0.5%; TQ3 and TQ2: of the quantiser (J.
 * Max, "Quantizing for minimum distortion", 1960). Step 9 takes up to 2% of them, and adds 3% at 2 bits. The error of
 * outlier rows depends on which channels are large, so their tolerance is 15%. What the search saves is known in whole
 * percents. It has no factor for TQ8 below 1.125, and so clips unrotated outliers more. */
static const error_row error_rows[] = {
    {"gaussian/tq4/128", TQKV_TQ4, 128, DATA_GAUSSIAN, false, 9.32e-3, 0.13, 0.025},
    {"gaussian/tq5/128", TQKV_TQ5, 128, DATA_GAUSSIAN, false, 2.45e-3, 0.17, 0.025},
    {"gaussian/tq6/128", TQKV_TQ6, 128, DATA_GAUSSIAN, false, 6.33e-4, 0.17, 0.025},
    {"gaussian/tq8/128", TQKV_TQ8, 128, DATA_GAUSSIAN, false, 6.26e-5, 0.46, 0.03},
    {"gaussian/tq5_bytes/128", TQKV_TQ5_BYTES, 128, DATA_GAUSSIAN, false, 2.45e-3, 0.17, 0.025},
    {"gaussian/tq6_bytes/128", TQKV_TQ6_BYTES, 128, DATA_GAUSSIAN, false, 6.33e-4, 0.17, 0.025},
    {"gaussian/i8/128", TQKV_I8, 128, DATA_GAUSSIAN, false, 4.18e-5, 0.00, 0.01},
    {"gaussian/tq8/128/unrotated", TQKV_TQ8, 128, DATA_GAUSSIAN, true, 6.26e-5, 0.46, 0.03},
    {"gaussian/tq3/128", TQKV_TQ3, 128, DATA_GAUSSIAN, false, 3.454e-2, 0.05, 0.025},
    {"gaussian/tq2/128", TQKV_TQ2, 128, DATA_GAUSSIAN, false, 1.175e-1, 0.00, 0.035},
    {"outliers/tq4/256", TQKV_TQ4, 256, DATA_OUTLIERS, false, 8.22e-3, 0.07, 0.15},
    {"outliers/tq5/256", TQKV_TQ5, 256, DATA_OUTLIERS, false, 2.19e-3, 0.12, 0.15},
    {"outliers/tq6/256", TQKV_TQ6, 256, DATA_OUTLIERS, false, 5.52e-4, 0.13, 0.15},
    {"outliers/tq8/256", TQKV_TQ8, 256, DATA_OUTLIERS, false, 6.18e-5, 0.54, 0.15},
    {"outliers/i8/256", TQKV_I8, 256, DATA_OUTLIERS, false, 2.3e-5, 0.00, 0.15},
    {"outliers/tq8/256/unrotated", TQKV_TQ8, 256, DATA_OUTLIERS, true, 0.138, -0.24, 0.15},
};

void test_codec_error_cases(void)
{
    for (size_t i = 0; i < sizeof error_rows / sizeof *error_rows; i++)
        test_add(check_error, &error_rows[i], sizeof *error_rows, "codec_error/%s", error_rows[i].name);
}

/* Scales of channels: what encoding and decoding make of them, scales of 1, rows that a scale makes alike, slices of
 * stores with other scales. attend_options.h, golden.h and input_changes.h have scales in attention,
 * in encoding and in bad input. */
#include "data.h"
#include "reference.h"
#include "runner.h"

enum { HEADS = 3, TOKENS = 9, D = 64 };

typedef struct scale_row {
    tqkv_format format;
    int head_dim;
    bool center, unrotated, rotated; /* rotated: F16 */
} scale_row;

static tqkv_store make_store(const scale_row *row)
{
    tqkv_store s = test_store(row->format, row->head_dim, HEADS, TOKENS, false);
    s.rotation = row->unrotated ? TQKV_ROTATION_OFF : row->rotated ? TQKV_ROTATION_ON : TQKV_ROTATION_DEFAULT;
    return s;
}

/* The error of rows with large channels: as good as that of the rows without them. */
static void check_measure(const void *parameters)
{
    const scale_row *row = (const scale_row *)parameters;
    const int each = HEADS * row->head_dim, n = TOKENS * each;
    float *rows = test_rows(1, DATA_GAUSSIAN, TOKENS * HEADS, row->head_dim);
    float *scales = test_scales(2, HEADS, row->head_dim, 20.0), mean[HEADS * REFERENCE_MAX_DIM];
    float plain_mean[HEADS * REFERENCE_MAX_DIM], *decoded = (float *)test_alloc(sizeof(float) * (size_t)n);
    tqkv_store s = make_store(row);
    tqkv_quality out[HEADS];
    for (int i = 0; i < n; i++) rows[i] *= scales[i % each];
    CHECK_RESULT(tqkv_calibrate(&s, rows, TOKENS, NULL, 0, 0, TQKV_PAIRS_NONE, plain_mean, NULL), TQKV_OK);
    s.center = plain_mean;
    s.channel_scale = scales;
    CHECK_RESULT(tqkv_calibrate(&s, rows, TOKENS, NULL, 0, 0, TQKV_PAIRS_NONE, mean, NULL), TQKV_OK);
    CHECK(!memcmp(mean, plain_mean, sizeof(float) * (size_t)each), "the scale changes the mean");
    CHECK_RESULT(tqkv_measure(&s, rows, TOKENS, out), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&s, rows, TOKENS, 0), TQKV_OK);
    CHECK_RESULT(tqkv_decode(&s, 0, TOKENS, TQKV_ORIGINAL, decoded), TQKV_OK);
    for (int h = 0; h < HEADS; h++) {
        double noise = 0.0, differs = 0.0;
        for (int t = 0; t < TOKENS; t++)
            for (int j = 0; j < row->head_dim; j++) {
                const int at = t * each + h * row->head_dim + j;
                const double x = (double)rows[at];
                noise += (x - (double)decoded[at]) * (x - (double)decoded[at]);
                differs += pow(x - (double)mean[h * row->head_dim + j], 2.0);
            }
        CHECK(fabs(out[h].error - noise / differs) <= 1e-3 * out[h].error, "head %d: error %g, not %g", h, out[h].error,
              noise / differs);
    }
    test_store_free(&s);
    free(rows);
    free(scales);
    free(decoded);
}

/* ---- Slices ---- */

typedef struct merged {
    float out[HEADS * D], max[HEADS], sum[HEADS];
} merged;

/* Slices merge if the values' scales, and their centres, hold the same numbers, wherever they lie; otherwise nothing is
 * written. */
static void check_merge(const void *parameters)
{
    (void)parameters;
    float *rows = test_rows(7, DATA_GAUSSIAN, TOKENS * HEADS, D), *q = test_rows(8, DATA_GAUSSIAN, HEADS, D);
    float *scales[3] = {test_scales(9, HEADS, D, 8.0), test_scales(9, HEADS, D, 8.0), test_scales(9, HEADS, D, 8.0)};
    const scale_row row = {TQKV_TQ5, D, false, false, false}, halves = {TQKV_F16, D, false, false, false};
    float *center = test_rows(10, DATA_GAUSSIAN, HEADS, D);
    tqkv_store stores[5] = {make_store(&row), make_store(&halves), make_store(&row), make_store(&row),
                            make_store(&row)};
    merged to, from, kept;
    tqkv_attention a, other;
    scales[2][HEADS * D - 1] *= 2.0f;
    memset(&a, 0, sizeof a);
    memset(&to, 0, sizeof to);
    for (int i = 0; i < 5; i++) {
        stores[i].channel_scale = i < 3 ? scales[i] : i < 4 ? NULL : scales[0];
        stores[i].center = i < 4 ? NULL : center;
        CHECK_RESULT(tqkv_encode(&stores[i], rows, TOKENS, 0), TQKV_OK);
    }
    a.keys = a.values = &stores[0];
    a.n_heads = HEADS;
    a.n_queries = 1;
    a.end = TOKENS;
    CHECK_RESULT(tqkv_attend_partial(&a, q, 0, 4, to.out, to.max, to.sum), TQKV_OK);
    for (int i = 0; i < 5; i++) {
        other = a;
        other.keys = other.values = &stores[i];
        CHECK_RESULT(tqkv_attend_partial(&other, q, 4, 5, from.out, from.max, from.sum), TQKV_OK);
        kept = to;
        const tqkv_result r = tqkv_attend_merge(&a, kept.out, kept.max, kept.sum, &other, from.out, from.max, from.sum);
        CHECK(r == (i < 2 ? TQKV_OK : TQKV_INVALID_ARGUMENT), "slice %d: %s", i, tqkv_result_string(r));
        CHECK(i < 2 || !memcmp(&kept, &to, sizeof to), "slice %d: a refused merge wrote", i);
    }
    for (int i = 0; i < 5; i++) test_store_free(&stores[i]);
    for (int i = 0; i < 3; i++) free(scales[i]);
    free(rows);
    free(center);
    free(q);
}

/* The least and the largest scale, in each place of a row and of a few heads: nothing else is refused. */
static void check_range(const void *parameters)
{
    const int head_dim = *(const int *)parameters;
    tqkv_store s = test_store(TQKV_I8, head_dim, HEADS, 1, false);
    float *rows = test_rows(1, DATA_GAUSSIAN, HEADS, head_dim), *scales = test_scales(2, HEADS, head_dim, 4.0);
    static const float good[2] = {1.0f / 4294967296.0f, 4294967296.0f};
    const float bad[6] = {nextafterf(good[0], 0.0f), nextafterf(good[1], 1e30f), 0.0f, -1.0f, (float)NAN,
                          -(float)INFINITY};
    s.channel_scale = scales;
    for (int at = 0; at < HEADS * head_dim; at++) {
        const float kept = scales[at];
        for (int i = 0; i < 8; i++) {
            const tqkv_result wanted = i < 2 ? TQKV_OK : i < 6 ? TQKV_INVALID_ARGUMENT : TQKV_NOT_FINITE;
            scales[at] = i < 2 ? good[i] : bad[i - 2];
            CHECK_RESULT(tqkv_encode(&s, rows, 1, 0), wanted);
        }
        scales[at] = kept;
    }
    test_store_free(&s);
    free(rows);
    free(scales);
}

void test_scale_cases(void)
{
    for (int f = 0; f < TEST_FORMATS; f++)
        for (int i = 0; i < TEST_ALL_HEAD_DIMS; i += 1 + (f + i) % 3) {
            scale_row row = {test_formats[f], test_all_head_dims[i], (f + i) % 2 == 0, false, false};
            const char *name = tqkv_format_name(row.format);
            if (reference_can_be_unrotated(row.format)) row.unrotated = i % 4 == 3;
            row.rotated = row.format == TQKV_F16 && i % 3 == 1;
            test_add(check_measure, &row, sizeof row, "scale/measure/%s/%d", name, row.head_dim);
        }
    for (int d = 0; d < TEST_ALL_HEAD_DIMS; d += 3)
        test_add(check_range, &test_all_head_dims[d], sizeof(int), "scale/range/%d", test_all_head_dims[d]);
    test_add(check_merge, NULL, 0, "scale/merge");
}

/* tqkv_calibrate against exact float steps, and what it learns from pretrained models; tqkv_logit_noise. */
#include "captured_fixture.h"
#include "data.h"
#include "reference.h"
#include "runner.h"

#include <fenv.h>

enum { HEADS = 2, GROUP = 3, TOKENS = 45, QUERIES = 7 };

typedef struct calibrate_row {
    int head_dim, kind, n_tokens, n_queries;
    tqkv_pairs pairs;
    tqkv_type type;
} calibrate_row;

/* ---- One float operation after the other ---- */

/* The mean of the squares of x - center, or of x if it is NULL; x: n rows, `stride` values apart */
static float plain_mean(const float *x, int n, size_t stride, const float *center)
{
    float sum = 0.0f;
    for (int t = 0; t < n; t++) {
        const float value = x[(size_t)t * stride], less = center ? reference_add(value, -*center) : value;
        sum = reference_add(sum, center ? reference_multiply(less, less) : value);
    }
    return reference_divide(sum, (float)n);
}

/* Mean squares become deviations; zeros and pairs as tqkv_calibrate says. squares: [d] */
static void plain_deviations(tqkv_pairs pairs, int d, float *squares)
{
    float least = 0.0f; /* 0: all are */
    for (int i = 0; i < d; i++) {
        const int other = pairs == TQKV_PAIRS_NEIGHBOURS ? i ^ 1 : (i + d / 2) % d;
        if (pairs == TQKV_PAIRS_NONE || other < i) continue;
        squares[i] = squares[other] = reference_multiply(reference_add(squares[i], squares[other]), 0.5f);
    }
    for (int i = 0; i < d; i++) {
        squares[i] = reference_root(squares[i]);
        if (squares[i] > 0.0f && (least == 0.0f || squares[i] < least)) least = squares[i];
    }
    for (int i = 0; i < d; i++)
        if (squares[i] == 0.0f) squares[i] = least == 0.0f ? 1.0f : least;
}

/* rows: [n_tokens][HEADS][d], q: [n_queries][HEADS * GROUP][d] or NULL */
static void plain_calibration(const calibrate_row *row, const float *rows, const float *q, int head, float *center,
                              float *scale)
{
    const int d = row->head_dim;
    float s[REFERENCE_MAX_DIM], r[REFERENCE_MAX_DIM], sum = 0.0f;
    for (int i = 0; i < d; i++) {
        const float *x = rows + head * d + i;
        center[i] = plain_mean(x, row->n_tokens, (size_t)(HEADS * d), NULL);
        s[i] = plain_mean(x, row->n_tokens, (size_t)(HEADS * d), &center[i]);
        float squares = 0.0f;
        for (int t = 0; q && t < row->n_queries; t++)
            for (int h = head * GROUP; h < (head + 1) * GROUP; h++) {
                const float value = q[(t * HEADS * GROUP + h) * d + i];
                squares = reference_add(squares, reference_multiply(value, value));
            }
        r[i] = q ? reference_divide(squares, (float)(row->n_queries * GROUP)) : 1.0f;
    }
    plain_deviations(row->pairs, d, s);
    plain_deviations(row->pairs, d, r);
    for (int i = 0; i < d; i++) {
        scale[i] = reference_root(q ? reference_divide(s[i], r[i]) : s[i]);
        sum = reference_add(sum, reference_multiply(scale[i], scale[i]));
    }
    const float root = reference_root(reference_divide(sum, (float)d));
    for (int i = 0; i < d; i++) {
        scale[i] = reference_divide(scale[i], root);
        scale[i] = scale[i] < 1.0f / 1024.0f ? 1.0f / 1024.0f : scale[i] > 1024.0f ? 1024.0f : scale[i];
    }
}

/* Keys with a constant part and channels of many sizes; one is constant, one is zero,
 * one far larger than the clamp lets it be. */
static float *make_keys(const calibrate_row *row)
{
    const int d = row->head_dim, each = HEADS * d;
    float *rows = test_rows(3, (data_kind)row->kind, row->n_tokens * HEADS, d), *sizes = test_scales(4, HEADS, d, 12.0);
    for (int i = 0; i < row->n_tokens * each; i++) {
        const int channel = i % each;
        rows[i] = rows[i] * sizes[channel] + (float)(channel % 7) * 3.0f;
        if (channel % d == 3) rows[i] = 0.6875f;
        if (channel % d == 4) rows[i] = 0.0f;
        if (channel % d == 6) rows[i] *= 1e7f;
    }
    free(sizes);
    return rows;
}

/* Halves or bfloat16s, which `floats` then hold. Freed by the caller. */
static void *narrowed(tqkv_type type, float *floats, size_t n)
{
    uint16_t *typed = (uint16_t *)test_alloc(n * sizeof *typed + 1);
    for (size_t i = 0; i < n; i++) {
        typed[i] = reference_narrow(type, fabsf(floats[i]) < 60000.0f ? floats[i] : 60000.0f);
        floats[i] = (float)reference_wide(type, typed[i]);
    }
    return typed;
}

/* A call of tqkv_calibrate. */
typedef struct calibrate_call {
    const calibrate_row *row;
    tqkv_store shape;
    const void *src, *q;
} calibrate_call;

static void calibrate(const calibrate_call *call, float *center, float *scale)
{
    const calibrate_row *row = call->row;
    CHECK_RESULT(tqkv_calibrate(&call->shape, call->src, row->n_tokens, call->q, HEADS * GROUP, row->n_queries,
                                row->pairs, center, scale),
                 TQKV_OK);
}

static void compare_calls(const calibrate_call *call, const float *rows, const float *q)
{
    const int d = call->row->head_dim;
    const size_t size = sizeof(float) * (size_t)(HEADS * d);
    float center[HEADS * REFERENCE_MAX_DIM], scale[HEADS * REFERENCE_MAX_DIM], alone[HEADS * REFERENCE_MAX_DIM];
    float wanted[2][REFERENCE_MAX_DIM];
#ifdef FE_UPWARD
    fesetround(FE_UPWARD); /* the caller's rounding mode has no effect */
#endif
    calibrate(call, center, scale);
#ifdef FE_UPWARD
    fesetround(FE_TONEAREST);
#endif
    for (int h = 0; h < HEADS; h++) {
        plain_calibration(call->row, rows, call->q ? q : NULL, h, wanted[0], wanted[1]);
        for (int i = 0; i < d; i++) {
            CHECK(center[h * d + i] == wanted[0][i], "centre %d of head %d is %.9g, not %.9g", i, h,
                  (double)center[h * d + i], (double)wanted[0][i]);
            CHECK(scale[h * d + i] == wanted[1][i], "scale %d of head %d is %.9g, not %.9g", i, h,
                  (double)scale[h * d + i], (double)wanted[1][i]);
        }
    }
    calibrate(call, alone, NULL);
    CHECK(!memcmp(alone, center, size), "the centre alone is another one");
    calibrate(call, NULL, alone);
    CHECK(!memcmp(alone, scale, size), "the scale alone is another one");
}

static void check_exact(const void *parameters)
{
    const calibrate_row *row = (const calibrate_row *)parameters;
    const int d = row->head_dim;
    float *rows = make_keys(row), *q = test_rows(5, DATA_OUTLIERS, QUERIES * HEADS * GROUP, d);
    const size_t n = (size_t)(row->n_tokens * HEADS * d), n_q = (size_t)(QUERIES * HEADS * GROUP * d);
    for (size_t i = 0; i < n_q; i += (size_t)d) q[i + 1] = 0.0f; /* a channel that nothing reads */
    void *typed = row->type == TQKV_TYPE_F32 ? NULL : narrowed(row->type, rows, n);
    void *typed_q = row->type == TQKV_TYPE_F32 ? NULL : narrowed(row->type, q, n_q);
    calibrate_call call = {row, test_store(TQKV_TQ4, d, HEADS, 1, false), NULL, NULL};
    call.src = typed ? typed : (const void *)rows;
    call.q = !row->n_queries ? NULL : typed_q ? typed_q : (const void *)q;
    call.shape.type = row->type;
    call.shape.strides.token = (size_t)(HEADS * d); /* as without a stride: queries do not take it */
    compare_calls(&call, rows, q);
    free(typed);
    free(typed_q);
    free(rows);
    free(q);
    test_store_free(&call.shape);
}

/* ---- Edges ---- */

static void check_edges(NO_ROW)
{
    enum { D = 64, N = 3 * HEADS * D };
    tqkv_store shape = test_store(TQKV_TQ3, D, HEADS, 1, false);
    float rows[N], q[HEADS * D], center[HEADS * D], scale[HEADS * D];
    for (int i = 0; i < N; i++) rows[i] = 0.25f * (float)(i % (HEADS * D));
    for (int i = 0; i < HEADS * D; i++) q[i] = 0.0f;
    CHECK_RESULT(tqkv_calibrate(&shape, rows, 0, NULL, 0, 0, TQKV_PAIRS_NONE, center, scale), TQKV_OK);
    for (int i = 0; i < HEADS * D; i++)
        CHECK(center[i] == 0.0f && scale[i] == 1.0f, "of nothing: %g %g", (double)center[i], (double)scale[i]);
    for (int n = 1; n <= 3; n += 2) { /* one row, and equal rows: nothing differs, all channels are alike */
        CHECK_RESULT(tqkv_calibrate(&shape, rows, n, q, HEADS, 1, TQKV_PAIRS_HALVES, center, scale), TQKV_OK);
        for (int i = 0; i < HEADS * D; i++)
            CHECK(center[i] == rows[i] && scale[i] == 1.0f, "of %d: %g %g", n, (double)center[i], (double)scale[i]);
    }
    shape.channel_scale = scale;
    shape.center = center;
    CHECK_RESULT(tqkv_encode(&shape, rows, 1, 0), TQKV_OK);
    shape.channel_scale = shape.center = NULL;
    for (int i = 0; i < N; i++) rows[i] = i % 2 ? 1e12f : -1e12f; /* the largest that are calibrated */
    rows[5] = 1e-38f;
    CHECK_RESULT(tqkv_calibrate(&shape, rows, 3, rows, HEADS, 3, TQKV_PAIRS_NONE, center, scale), TQKV_OK);
    float large[HEADS * D];
    CHECK_RESULT(tqkv_calibrate(&shape, rows, 3, NULL, 0, 0, TQKV_PAIRS_NONE, large, scale), TQKV_OK);
    for (int i = 0; i < HEADS * D; i++)
        CHECK(scale[i] >= 1.0f / 1024.0f && scale[i] <= 1024.0f, "%g", (double)scale[i]);
    test_store_free(&shape);
}

/* ---- Noise ---- */

/* The noise of one head, from what encode and decode give. */
static double plain_noise(const tqkv_store *store, const float *rows, const float *q, int head, int n_tokens,
                          int n_queries, int group)
{
    const int d = store->head_dim, heads = store->n_kv_heads;
    double total = 0.0, *noise = (double *)test_alloc((size_t)n_tokens * sizeof *noise);
    double *errors = (double *)test_alloc((size_t)(n_tokens * d) * sizeof *errors);
    for (int t = 0; t < n_tokens; t++) {
        reference_decode(store, head, t, errors + t * d);
        for (int i = 0; i < d; i++) errors[t * d + i] -= (double)rows[(t * heads + head) * d + i];
    }
    for (int i = 0; i < n_queries * group; i++) {
        const float *query = q + ((i / group) * heads * group + head * group + i % group) * d;
        double mean = 0.0;
        for (int t = 0; t < n_tokens; t++) {
            noise[t] = 0.0;
            for (int j = 0; j < d; j++) noise[t] += errors[t * d + j] * (double)query[j] / sqrt((double)d);
            mean += noise[t] / n_tokens;
        }
        for (int t = 0; t < n_tokens; t++) total += (noise[t] - mean) * (noise[t] - mean);
    }
    free(noise);
    free(errors);
    return sqrt(total / n_tokens / (n_queries * group));
}

static void check_noise(const void *parameters)
{
    const calibrate_row *row = (const calibrate_row *)parameters;
    const tqkv_format format = test_formats[row->kind];
    const int d = row->head_dim, n_queries = 50; /* more rows than have their sums at a time */
    float *rows = test_rows(6, DATA_STUDENT, TOKENS * HEADS, d);
    float *q = test_rows(7, DATA_GAUSSIAN, n_queries * HEADS * GROUP, d), *scales = test_scales(8, HEADS, d, 6.0);
    double noise[HEADS];
    tqkv_store store = test_store(format, d, HEADS, TOKENS, false);
    store.channel_scale = d % 3 ? scales : NULL;
    store.center = d % 5 ? scales : NULL;
    CHECK_RESULT(tqkv_encode(&store, rows, TOKENS, 0), TQKV_OK);
    CHECK_RESULT(tqkv_logit_noise(&store, rows, TOKENS, q, HEADS * GROUP, n_queries, noise), TQKV_OK);
    for (int h = 0; h < HEADS; h++) {
        const double wanted = plain_noise(&store, rows, q, h, TOKENS, n_queries, GROUP);
        CHECK(fabs(noise[h] - wanted) <= 2e-3 * wanted, "head %d: %.6g, not %.6g", h, noise[h], wanted);
    }
    CHECK_RESULT(tqkv_logit_noise(&store, rows, TOKENS, q, HEADS * GROUP, 0, noise), TQKV_OK);
    CHECK(noise[0] == 0.0 && noise[HEADS - 1] == 0.0, "noise without queries");
    CHECK_RESULT(tqkv_logit_noise(&store, rows, 0, q, HEADS * GROUP, 1, noise), TQKV_OK);
    CHECK(noise[0] == 0.0 && noise[HEADS - 1] == 0.0, "noise of nothing");
    free(rows);
    free(q);
    free(scales);
    test_store_free(&store);
}

/* Doubles lie in a struct as a machine's compilers put them there: on 32-bit x86 at multiples of 4. */
static void check_alignment(NO_ROW)
{
    struct packed {
        float before;
        double noise[HEADS], after;
        tqkv_quality quality[HEADS];
    } place, odd[2];
    tqkv_store shape = test_store(TQKV_TQ3, 64, HEADS, 1, false);
    float *rows = test_rows(1, DATA_GAUSSIAN, HEADS, 64);
    CHECK_RESULT(tqkv_logit_noise(&shape, rows, 1, rows, HEADS, 1, place.noise), TQKV_OK);
    for (int i = 0; i < 2; i++) {
        CHECK_RESULT(tqkv_logit_noise(&shape, rows, 1, rows, HEADS, 1, odd[i].noise), TQKV_OK);
        CHECK_RESULT(tqkv_measure(&shape, rows, 1, odd[i].quality), TQKV_OK);
    }
    free(rows);
    test_store_free(&shape);
}

/* ---- The measure ---- */

/* Rows that are all equal, rows of zeros, rows that overflow: no division by zero, no NaN. */
static void check_measure_edges(NO_ROW)
{
    enum { D = 64 };
    float rows[3 * D] = {0};
    tqkv_store shape = test_store(TQKV_TQ2, D, 1, 1, false);
    tqkv_quality out;
    CHECK_RESULT(tqkv_measure(&shape, rows, 3, &out), TQKV_OK);
    CHECK(out.mean_share == 0.0 && out.error == 0.0 && out.kurtosis == 0.0, "zeros measure %g %g %g", out.mean_share,
          out.error, out.kurtosis);
    for (int i = 0; i < 3 * D; i++) rows[i] = 0.125f * (float)(i % D);
    CHECK_RESULT(tqkv_measure(&shape, rows, 3, &out), TQKV_OK);
    CHECK(out.mean_share == 1.0 && isinf(out.error), "equal rows measure %g %g", out.mean_share, out.error);
    for (int i = 0; i < 3 * D; i++) rows[i] = 1e20f * (float)(i * 37 % 101 - 50); /* norms overflow */
    CHECK_RESULT(tqkv_measure(&shape, rows, 3, &out), TQKV_OK);
    CHECK(isinf(out.error), "rows that decode to NaN have an error of %g", out.error);
    test_store_free(&shape);
    float center[D];
    for (int i = 0; i < 3 * D; i++) rows[i] = 3e38f;
    for (int i = 0; i < D; i++) center[i] = -3e38f; /* what is left overflows */
    for (int i = 0; i < TEST_FORMATS; i++) {
        shape = test_store(test_formats[i], D, 1, 1, false);
        shape.center = center;
        CHECK_RESULT(tqkv_measure(&shape, rows, 3, &out), TQKV_OK);
        CHECK(fabs(out.mean_share - 1.0) < 1e-12 && isinf(out.error) && out.kurtosis >= 0.0 && out.beyond >= 0.0,
              "%s: rows that overflow measure %g %g %g %g", tqkv_format_name(shape.format), out.mean_share, out.error,
              out.kurtosis, out.beyond);
        test_store_free(&shape);
    }
}

typedef struct captured_noise {
    int layer;
    double without,
        most; /* of TQ4, with neither at least, with centre and scale at most: root mean square over the heads */
} captured_noise;

/* The noise of the layer's keys by a store of that description. */
static double rms_noise(const tqkv_store *shape, const captured *layer)
{
    double noise[64], squares = 0.0;
    CHECK_RESULT(tqkv_logit_noise(shape, layer->keys, layer->n_positions, layer->queries, layer->n_heads,
                                  layer->n_queries, noise),
                 TQKV_OK);
    for (int h = 0; h < layer->n_kv_heads; h++) squares += noise[h] * noise[h] / layer->n_kv_heads;
    return sqrt(squares);
}

/* The same with the centre and a scale that these keys teach. */
static double learned_noise(const tqkv_store *shape, const captured *layer, const float *q, tqkv_pairs pairs,
                            const float *center)
{
    tqkv_store with = *shape;
    float *scale = (float *)test_alloc(sizeof(float) * (size_t)(layer->n_kv_heads * layer->head_dim));
    CHECK_RESULT(tqkv_calibrate(shape, layer->keys, layer->n_positions, q, layer->n_heads, q ? layer->n_queries : 0,
                                pairs, NULL, scale),
                 TQKV_OK);
    with.center = center;
    with.channel_scale = scale;
    const double noise = rms_noise(&with, layer);
    free(scale);
    return noise;
}

/* Keys of pretrained models: what four bits add to the logits, and what centre and scale take away. */
static void check_captured(const void *parameters)
{
    const captured_noise *row = (const captured_noise *)parameters;
    captured layer;
    if (!captured_load(row->layer, &layer)) return;
    float *center = (float *)test_alloc(sizeof(float) * (size_t)(layer.n_kv_heads * layer.head_dim));
    tqkv_store shape = test_store(TQKV_TQ4, layer.head_dim, layer.n_kv_heads, 1, false), centered = shape;
    CHECK_RESULT(tqkv_calibrate(&shape, layer.keys, layer.n_positions, NULL, 0, 0, TQKV_PAIRS_NONE, center, NULL),
                 TQKV_OK);
    centered.center = center;
    const double plain = rms_noise(&shape, &layer), less = rms_noise(&centered, &layer),
                 both = learned_noise(&shape, &layer, NULL, TQKV_PAIRS_NONE, center),
                 with_queries = learned_noise(&shape, &layer, layer.queries, TQKV_PAIRS_NONE, center),
                 tied = learned_noise(&shape, &layer, NULL, TQKV_PAIRS_HALVES, center);
    CHECK(plain >= row->without, "without either %.3g, expected at least %g", plain, row->without);
    CHECK(both <= row->most && both <= 1.1 * less, "with both %.3g, with the centre %.3g, expected at most %g", both,
          less, row->most);
    CHECK(with_queries <= 1.02 * both, "with queries %.3g, without %.3g", with_queries, both);
    CHECK(tied <= 1.4 * both, "pairs tied %.3g, free %.3g", tied, both);
    captured_free(&layer);
    test_store_free(&shape);
    free(center);
}

/* Of models that turn a part of each head the channels of a pair have one scale: keys that are divided by it and turned
 * are those that are turned and divided. Those behind keep their own. */
static void check_rotary_dim(const void *parameters)
{
    enum { D = 256, ROTARY = 64, N = 200, AT = 100 };
    const tqkv_pairs pairs = *(const int *)parameters ? TQKV_PAIRS_HALVES : TQKV_PAIRS_NEIGHBOURS;
    const bool halves = pairs == TQKV_PAIRS_HALVES;
    tqkv_store shape = test_store(TQKV_TQ4, D, 1, 1, false);
    float *rows = test_rows(3, DATA_GAUSSIAN, N, D), center[D], scale[D], free_scale[D];
    for (int i = 0; i < N * D; i++) rows[i] *= 1.0f + (float)(i * 37 % D % 11);
    shape.rotary_dim = ROTARY;
    CHECK_RESULT(tqkv_calibrate(&shape, rows, N, NULL, 0, 0, TQKV_PAIRS_NONE, center, free_scale), TQKV_OK);
    CHECK_RESULT(tqkv_calibrate(&shape, rows, N, NULL, 0, 0, pairs, center, scale), TQKV_OK);
    double wrong = 0.0, all = 0.0;
    for (int i = 0; i < ROTARY / 2; i++) {
        const int low = halves ? i : 2 * i, high = halves ? i + ROTARY / 2 : 2 * i + 1;
        const double angle = (double)AT * pow(1e4, -2.0 * i / (double)ROTARY), a = (double)rows[low],
                     b = (double)rows[high];
        const double g = (double)scale[low], h = (double)scale[high];
        const double turned = a * cos(angle) - b * sin(angle), inside = (a / g * cos(angle) - b / h * sin(angle)) * g;
        CHECK(scale[low] == scale[high], "pair %d: %g and %g", i, g, h);
        wrong += (turned - inside) * (turned - inside);
        all += turned * turned;
    }
    CHECK(sqrt(wrong / all) < 1e-6, "a shift in the scaled basis is off by %g", sqrt(wrong / all));
    int tied = 0;
    for (int i = ROTARY; i + ROTARY / 2 < D; i++) tied += scale[i] == scale[i + (halves ? ROTARY / 2 : 1)];
    CHECK(tied < 20, "%d channels behind are tied", tied);
    for (int i = ROTARY; i < D; i++) /* but for the length of all: the same shares */
        CHECK(fabs((double)(scale[i] / scale[ROTARY] / (free_scale[i] / free_scale[ROTARY])) - 1.0) < 1e-5,
              "channel %d", i);
    test_store_free(&shape);
    free(rows);
}

void test_calibrate_cases(void)
{
    for (int i = 0; i < 2; i++)
        test_add(check_rotary_dim, &i, sizeof i, "calibrate/rotary_dim/%s", i ? "halves" : "neighbours");
    for (int d = 0; d < TEST_ALL_HEAD_DIMS; d++)
        for (int i = 0; i < 4; i++) {
            const calibrate_row row = {test_all_head_dims[d],     i == 3 ? DATA_OUTLIERS : DATA_STUDENT,
                                       i == 1 ? 1 : TOKENS,       i % 2 ? QUERIES : 0,
                                       (tqkv_pairs)((d + i) % 3), i == 2 ? (tqkv_type)(1 + d % 2) : TQKV_TYPE_F32};
            test_add(check_exact, &row, sizeof row, "calibrate/exact/%d/%d", row.head_dim, i);
        }
    for (int f = 0; f < TEST_FORMATS; f++) {
        const calibrate_row row = {
            test_all_head_dims[(5 * f) % TEST_ALL_HEAD_DIMS], f, 0, 0, TQKV_PAIRS_NONE, TQKV_TYPE_F32};
        test_add(check_noise, &row, sizeof row, "calibrate/noise/%s/%d", tqkv_format_name(test_formats[f]),
                 row.head_dim);
    }
    static const captured_noise layers[CAPTURED_LAYERS] = {
        {0, 20.0, 0.75}, {1, 4.0, 0.45}, {2, 10.0, 0.55}, {3, 0.3, 0.22}};
    for (int i = 0; i < CAPTURED_LAYERS; i++)
        test_add(check_captured, &layers[i], sizeof layers[i], "calibrate/captured/%d", i);
    test_add(check_edges, NULL, 0, "calibrate/edges");
    test_add(check_measure_edges, NULL, 0, "calibrate/measure_edges");
    test_add(check_alignment, NULL, 0, "calibrate/alignment");
}

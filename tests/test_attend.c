/* Attention: one position exactly, slices over stores of different formats, what a slice holds. test_attend_history.c
 * has all other shapes and options at random. */
#include "attend_checks.h"

/* ---- Slices over stores of different formats: a prompt in one pair, what follows in another ---- */

typedef struct bases_row {
    tqkv_format first, second; /* of the values; the keys are I8 */
    bool second_unrotated;
    int head_dim;
} bases_row;

static void check_merge_bases(const void *parameters)
{
    const bases_row *row = (const bases_row *)parameters;
    attend_row shape = attend_default_row(TQKV_I8, TQKV_F16, row->head_dim); /* the answer: all values as halves */
    shape.n_queries = 3;
    shape.sinks = SINKS_SOME;
    attend_problem problem;
    attend_set_up(&problem, &shape);
    const int cut = 21, end = (int)shape.end, n_kv_heads = shape.n_kv_heads;
    float *rows = (float *)test_alloc((size_t)(end * n_kv_heads * row->head_dim) * sizeof(float));
    CHECK_RESULT(tqkv_decode(&problem.values, 0, end, TQKV_ORIGINAL, rows), TQKV_OK);
    tqkv_store values[2];
    tqkv_attention a[2];
    attend_slice slices[2];
    for (int i = 0; i < 2; i++) {
        values[i] = test_store(i ? row->second : row->first, row->head_dim, n_kv_heads, end, false);
        values[i].rotation = (i && row->second_unrotated) ? TQKV_ROTATION_OFF : TQKV_ROTATION_DEFAULT;
        CHECK_RESULT(tqkv_encode(&values[i], rows, end, 0), TQKV_OK);
        a[i] = problem.attention;
        a[i].values = &values[i];
        slices[i] = attend_new_slice(&problem);
        CHECK_RESULT(tqkv_attend_partial(&a[i], problem.q, i ? cut : 0, i ? end - cut : cut, slices[i].out,
                                         slices[i].max, slices[i].sum),
                     TQKV_OK);
    }
    CHECK_RESULT(tqkv_attend_merge(&a[0], slices[0].out, slices[0].max, slices[0].sum, &a[1], slices[1].out,
                                   slices[1].max, slices[1].sum),
                 TQKV_OK);
    CHECK_RESULT(tqkv_attend_finish(&a[0], slices[0].out, slices[0].max, slices[0].sum), TQKV_OK);
    const double limit = row->second_unrotated ? 0.5 : 0.02; /* of a sum in the wrong basis: more than 1 */
    for (size_t i = 0; i < problem.n_rows; i++) {
        const double error =
            reference_relative_error(slices[0].out + i * (size_t)row->head_dim,
                                     problem.expected + i * (size_t)row->head_dim, (size_t)row->head_dim);
        CHECK(error < limit, "row %d: relative error %.3g", (int)i, error);
    }
    for (int i = 0; i < 2; i++) {
        attend_free_slice(&slices[i]);
        test_store_free(&values[i]);
    }
    free(rows);
    attend_tear_down(&problem);
}

static void add_merge_bases(void)
{
    static const bases_row rows[] = {{TQKV_F16, TQKV_I8, false, 64},  {TQKV_I8, TQKV_F16, false, 128},
                                     {TQKV_TQ8, TQKV_TQ8, true, 256}, {TQKV_I8, TQKV_TQ8, false, 32},
                                     {TQKV_F16, TQKV_TQ8, true, 512}, {TQKV_TQ8, TQKV_F16, false, 1024}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        test_add(check_merge_bases, &rows[i], sizeof *rows, "attend/merge_bases/%s-%s%s/%d",
                 tqkv_format_name(rows[i].first), tqkv_format_name(rows[i].second),
                 rows[i].second_unrotated ? "_unrotated" : "", rows[i].head_dim);
}

typedef struct merged {
    float out[3 * 64], max[3], sum[3];
} merged;

/* Slices merge if they are of the same shape and the values' scales, and their centres, hold the same numbers, wherever
 * they lie; otherwise nothing is written. */
static void check_merge_scales(NO_ROW)
{
    float *rows = test_rows(7, DATA_GAUSSIAN, 9 * 3, 64), *q = test_rows(8, DATA_GAUSSIAN, 3, 64);
    float *scales[3] = {test_scales(9, 3, 64, 8.0), test_scales(9, 3, 64, 8.0), test_scales(9, 3, 64, 8.0)};
    float *center = test_rows(10, DATA_GAUSSIAN, 3, 64);
    tqkv_store stores[5];
    merged to, from, kept;
    tqkv_attention a = test_attention(&stores[0], &stores[0], 3, 1, 9), other;
    scales[2][3 * 64 - 1] *= 2.0f;
    memset(&to, 0, sizeof to);
    for (int i = 0; i < 5; i++) {
        stores[i] = test_store(i == 1 ? TQKV_F16 : TQKV_TQ5, 64, 3, 9, false);
        stores[i].channel_scale = i < 3 ? scales[i] : i < 4 ? NULL : scales[0];
        stores[i].center = i < 4 ? NULL : center;
        CHECK_RESULT(tqkv_encode(&stores[i], rows, 9, 0), TQKV_OK);
    }
    CHECK_RESULT(tqkv_attend_partial(&a, q, 0, 4, to.out, to.max, to.sum), TQKV_OK);
    for (int i = 0; i < 8; i++) {
        tqkv_store narrow = stores[0];
        narrow.head_dim = 32;
        other = a;
        if (i < 5) other.keys = other.values = &stores[i];
        CHECK_RESULT(tqkv_attend_partial(&other, q, 4, 5, from.out, from.max, from.sum), TQKV_OK);
        if (i == 5) other.values = &narrow;
        if (i == 6) other.n_queries++;
        if (i == 7) other.n_heads *= 2;
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

/* The parts that tqkv_attend_partial gives: max is the largest score, sum is the sum of exp(score - max). */
static void check_partial_parts(const void *parameters)
{
    int d = *(const int *)parameters;
    attend_row row = attend_default_row(TQKV_TQ6, TQKV_F16, d);
    row.n_queries = 3;
    row.softcap = 3.0f;
    attend_problem problem;
    attend_set_up(&problem, &row);
    attend_slice s = attend_new_slice(&problem);
    CHECK_RESULT(tqkv_attend_partial(&problem.attention, problem.q, 8, 20, s.out, s.max, s.sum), TQKV_OK);
    for (size_t i = 0; i < problem.n_rows; i++) {
        double largest = -INFINITY, sum = 0.0, scores[20], query[REFERENCE_MAX_DIM], key[REFERENCE_MAX_DIM];
        for (int j = 0; j < d; j++) query[j] = (double)problem.q[i * (size_t)d + (size_t)j];
        for (int p = 0; p < 20; p++) {
            reference_decode_as(REFERENCE_INTEGERS, &problem.keys, (int)(i % 4) / 2, 8 + p, key);
            scores[p] = reference_score(&problem.attention, query, key, 1.0 / sqrt((double)d));
            largest = scores[p] > largest ? scores[p] : largest;
        }
        for (int p = 0; p < 20; p++) sum += exp(scores[p] - largest);
        /* sum is relative to max: compare their product sum * exp(max). */
        double held = (double)s.sum[i] * exp((double)s.max[i]), expected = sum * exp(largest);
        CHECK(fabs(held - expected) <= problem.tolerance * expected, "row %d: sum * exp(max) is %g, not %g", (int)i,
              held, expected);
        CHECK(fabs((double)s.max[i] - largest) <= problem.tolerance, "row %d: max %g, not %g", (int)i, (double)s.max[i],
              largest);
    }
    attend_free_slice(&s);
    attend_tear_down(&problem);
}

/* ---- One position, exactly ---- */

typedef struct exact_row {
    tqkv_format format;
    int head_dim, group;
} exact_row;

/* Any bytes are codes; the norms differ by block. */
static void fill_position(tqkv_store *s, data_random *random)
{
    uint8_t *codes = (uint8_t *)s->codes;
    for (size_t i = 0; i < s->codes_size; i++) codes[i] = (uint8_t)data_bits(random);
    for (size_t i = 0; i < s->norms_size / sizeof(float); i++) s->norms[i] = 0.7f + (float)data_below(random, 1000);
}

/* A query with a single 1 gives one element of the key as its score. A single position gives its value the weight 1. So
   attention must return the decoded row, in whatever way and order it looks codes up. */
static void check_exact(const void *parameters)
{
    const exact_row *row = (const exact_row *)parameters;
    const int d = row->head_dim, group = row->group;
    const size_t size = sizeof(float) * (size_t)(group * d);
    data_random random = {(uint64_t)(d + group)};
    tqkv_store store = test_store(row->format, d, 1, 1, false);
    tqkv_attention a = test_attention(&store, &store, group, 1, 1);
    a.scale = 1.0f;
    a.query_basis = a.output_basis = TQKV_ROTATED;
    float *q = (float *)test_alloc(size), *out = (float *)test_alloc(size);
    tqkv_store stored = store; /* which the reference leaves as it is */
    double decoded[REFERENCE_MAX_DIM];
    stored.rotation = TQKV_ROTATION_OFF;
    for (int first = 0; first < d; first += group) {
        float max[8], sum[8];
        fill_position(&store, &random);
        reference_decode_as(REFERENCE_INTEGERS, &stored, 0, 0, decoded);
        memset(q, 0, size);
        for (int g = 0; g < group; g++) q[g * d + (first + g) % d] = 1.0f;
        CHECK_RESULT(tqkv_attend_partial(&a, q, 0, 1, out, max, sum), TQKV_OK);
        for (int g = 0; g < group; g++) {
            const double key = decoded[(first + g) % d];
            CHECK(fabs((double)max[g] - key) <= 1e-6 * fabs(key), "element %d of the key", (first + g) % d);
            for (int i = 0; i < d; i++)
                CHECK(fabs((double)out[g * d + i] - decoded[i]) <= 1e-6 * fabs(decoded[i]), "element %d of the value",
                      i);
        }
    }
    test_store_free(&store);
    free(q);
    free(out);
}

static void add_exact(void)
{
    for (int f = 0; f < TEST_FORMATS; f++)
        for (int i = 0; i < TEST_ALL_HEAD_DIMS * 5; i++) {
            const int head_dim = test_all_head_dims[i % TEST_ALL_HEAD_DIMS];
            const exact_row row = {test_formats[f], head_dim, 1 + i / TEST_ALL_HEAD_DIMS};
            const bool power = (head_dim & (head_dim - 1)) == 0; /* of the other sizes two groups each */
            if (!power && (row.group + f + head_dim / 16) % 5 > 1) continue;
            if (row.format == TQKV_F16) continue; /* random bytes may be NaN */
            test_add(check_exact, &row, sizeof row, "attend/exact/%s/%d/%d", tqkv_format_name(row.format), row.head_dim,
                     row.group);
        }
}

void test_attend_cases(void)
{
    add_merge_bases();
    test_add(check_merge_scales, NULL, 0, "attend/merge_scales");
    add_exact();
    for (int d = 0; d < 6; d++)
        test_add(check_partial_parts, &test_head_dims[d], sizeof(int), "attend/partial_parts/%d", test_head_dims[d]);
}

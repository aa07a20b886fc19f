/* Keys and values of different head_dim: attention and its slices. Caches: test_history.c. */
#include "attend_fixture.h"
#include "cache_fixture.h"

#include <math.h>

void test_check_attend(const void *parameters);

/* Slices over values in other formats merge, and those of another head_dim do not. */
static void check_merge(const void *parameters)
{
    (void)parameters;
    attend_row row = attend_default_row(TQKV_I8, TQKV_TQ8, 48), other = row;
    attend_problem a, b;
    row.value_dim = 80;
    other.value_dim = 80;
    other.value_format = TQKV_F16;
    attend_set_up(&a, &row);
    attend_set_up(&b, &other);
    const size_t n = a.n_rows * a.value_dim;
    float *second = (float *)test_alloc(n * sizeof(float)), sums[4][REFERENCE_MAX_DIM];
    REQUIRE(a.n_rows <= REFERENCE_MAX_DIM, "too many rows");
    CHECK_RESULT(tqkv_attend_partial(&a.attention, a.q, 0, 23, a.out, sums[0], sums[1]), TQKV_OK);
    CHECK_RESULT(tqkv_attend_partial(&b.attention, a.q, 23, 17, second, sums[2], sums[3]), TQKV_OK);
    b.values.head_dim = 64;
    CHECK_RESULT(tqkv_attend_merge(&a.attention, a.out, sums[0], sums[1], &b.attention, second, sums[2], sums[3]),
                 TQKV_INVALID_ARGUMENT);
    b.values.head_dim = 80;
    b.attention.n_queries++;
    CHECK_RESULT(tqkv_attend_merge(&a.attention, a.out, sums[0], sums[1], &b.attention, second, sums[2], sums[3]),
                 TQKV_INVALID_ARGUMENT);
    b.attention.n_queries--;
    b.attention.n_heads *= 2;
    CHECK_RESULT(tqkv_attend_merge(&a.attention, a.out, sums[0], sums[1], &b.attention, second, sums[2], sums[3]),
                 TQKV_INVALID_ARGUMENT);
    b.attention.n_heads /= 2;
    CHECK_RESULT(tqkv_attend_merge(&a.attention, a.out, sums[0], sums[1], &b.attention, second, sums[2], sums[3]),
                 TQKV_OK);
    CHECK_RESULT(tqkv_attend_finish(&a.attention, a.out, sums[0], sums[1]), TQKV_OK);
    const double error = reference_relative_error(a.out, a.expected, n);
    CHECK(error < 0.02, "relative error %.3g", error); /* half of the values lack the error of TQ8 */
    free(second);
    attend_tear_down(&a);
    attend_tear_down(&b);
}

/* Each size of keys with three of values; formats and options vary with them. */
static void add_attention(void)
{
    static const attend_way ways[] = {WAY_WHOLE, WAY_SLICES, WAY_PARALLEL, WAY_REVERSED};
    for (int i = 0; i < 3 * TEST_ALL_HEAD_DIMS; i++) {
        attend_row row = attend_default_row(test_formats[i % TEST_FORMATS], test_formats[(3 * i + 2) % TEST_FORMATS],
                                            test_all_head_dims[i / 3]);
        row.value_dim = test_all_head_dims[(7 * i + 1) % TEST_ALL_HEAD_DIMS];
        row.way = ways[i % 4];
        row.n_queries = 1 + i % 5;
        row.group = 1 + i % 3;
        row.window = i % 6 == 5 ? 9 : 0;
        row.sinks = i % 4 == 2 ? SINKS_SOME : SINKS_NONE;
        row.softcap = i % 7 == 3 ? 4.0f : 0.0f;
        row.key_center = i % 3 == 1 ? 1.0f : 0.0f;
        row.value_center = i % 5 == 1 ? 1.0f : 0.0f;
        row.query_basis = row.output_basis = i % 8 == 6 ? TQKV_ROTATED : TQKV_ORIGINAL;
        test_add(test_check_attend, &row, sizeof row, "value_dim/attend/%s-%s/%d-%d", tqkv_format_name(row.key_format),
                 tqkv_format_name(row.value_format), row.head_dim, row.value_dim);
    }
    static const int dims[2][2] = {{192, 128}, {48, 128}};
    for (int i = 0; i < 2; i++) { /* two stretches, spread over tasks */
        attend_row deep = attend_default_row(TQKV_I8, TQKV_TQ4, dims[i][0]);
        deep.value_dim = dims[i][1];
        deep.end = deep.key_capacity = deep.value_capacity = 2100;
        deep.way = WAY_PARALLEL;
        test_add(test_check_attend, &deep, sizeof deep, "value_dim/attend/long/%d-%d", dims[i][0], dims[i][1]);
    }
}

void test_value_dim_cases(void)
{
    add_attention();
    test_add(check_merge, NULL, 0, "value_dim/merge");
}

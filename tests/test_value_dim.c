/* Keys and values of different head_dim: attention, its slices, caches and snapshots. */
#include "attend_fixture.h"
#include "cache_fixture.h"

#include <math.h>

void test_check_attend(const void *parameters);

typedef struct dims_row {
    int head_dim, value_dim;
    bool ring, centered;
} dims_row;

/* Attends and compares with the reference over the cache's stores. out: [3 queries][heads][value_dim] */
static void check_answer(tqkv_cache *cache, const tqkv_cache_desc *desc, const float *q, float *out)
{
    const size_t n = (size_t)(3 * desc->n_heads * desc->value_dim);
    const tqkv_attention a = cache_attention(cache, desc, 3, 0);
    double *expected = (double *)test_alloc(n * sizeof(double));
    CHECK_RESULT(tqkv_cache_attend(cache, q, 3, out), TQKV_OK);
    reference_attend(&a, q, expected);
    const double error = reference_relative_error(out, expected, n);
    CHECK(error <= reference_attention_tolerance(&a, 1.0), "relative error %.3g", error);
    free(expected);
}

/* A desc's value_dim must be the snapshot's, if it is not 0; the loaded cache has the first one's bytes and answers. */
static void check_snapshot(const tqkv_cache *cache, const tqkv_cache_desc *desc, const float *q, const float *out)
{
    const size_t size = (size_t)(3 * desc->n_heads * desc->value_dim) * sizeof(float);
    float *again = (float *)test_alloc(size);
    for (int value_dim = 0; value_dim <= 1024; value_dim += 16) {
        stream saved = stream_of_cache(cache);
        tqkv_cache *loaded = NULL;
        tqkv_cache_desc other = *desc;
        other.value_dim = value_dim;
        const bool fits = value_dim == 0 || value_dim == desc->value_dim;
        CHECK_RESULT(tqkv_cache_load(&other, stream_read, &saved, &loaded), fits ? TQKV_OK : TQKV_INVALID_ARGUMENT);
        if (loaded) {
            stream second = stream_of_cache(loaded);
            CHECK(stream_is_equal(&saved, &second), "saving after loading gives other bytes");
            CHECK(test_values(loaded)->head_dim == desc->value_dim, "values of another head_dim");
            CHECK_RESULT(tqkv_cache_attend(loaded, q, 3, again), TQKV_OK);
            CHECK(!memcmp(out, again, size), "the loaded cache answers differently");
            stream_free(&second);
        }
        stream_free(&saved);
        tqkv_cache_destroy(loaded);
    }
    free(again);
}

static void check_cache(const void *parameters)
{
    const dims_row *row = (const dims_row *)parameters;
    const int d = row->head_dim, value_dim = row->value_dim, n_tokens = row->ring ? 30 : 20;
    const cache_row shape = {TQKV_TQ5, TQKV_I8, d, 20, row->ring, 0, -1};
    counting counter = {0, 0, 0, 0, 0};
    tqkv_cache_desc desc = cache_desc(&shape, &counter);
    desc.value_dim = value_dim;
    float *k = cache_data(1, n_tokens, d), *v = cache_data(2, n_tokens, value_dim);
    float *centers[2] = {cache_data(3, 1, d), cache_data(4, 1, value_dim)};
    float *q = test_rows(5, DATA_GAUSSIAN, 3 * desc.n_heads, d);
    float *out = (float *)test_alloc(sizeof(float) * (size_t)(3 * desc.n_heads * value_dim));
    tqkv_cache *cache =
        cache_given(&desc, row->centered ? centers[0] : NULL, NULL, row->centered ? centers[1] : NULL, NULL);
    REQUIRE(cache, "no cache");
    CHECK_RESULT(tqkv_cache_append(cache, k, v, n_tokens), TQKV_OK);
    check_answer(cache, &desc, q, out);
    check_snapshot(cache, &desc, q, out);
    tqkv_cache_destroy(cache);
    CHECK_NO_LEAK(&counter);
    free(k);
    free(v);
    free(centers[0]);
    free(centers[1]);
    free(q);
    free(out);
}

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
    static const dims_row rows[] = {{192, 128, false, true}, {576, 512, true, true},  {48, 1024, false, false},
                                    {1024, 32, true, false}, {64, 80, false, true},   {96, 64, true, true},
                                    {32, 48, false, true},   {128, 256, false, false}};
    add_attention();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        test_add(check_cache, &rows[i], sizeof *rows, "value_dim/cache/%d-%d", rows[i].head_dim, rows[i].value_dim);
    test_add(check_merge, NULL, 0, "value_dim/merge");
}

/* make test-large: attention over more than 2^31 values and more than 2^32 bytes, in 5.1 GiB. Positions that
   32 bits do not hold: history/attend. */
#include "tests/data.h"
#include "tests/reference.h"
#include "tests/runner.h"

enum { PATTERN = 512, DIM = 1024 };

typedef struct large_row {
    tqkv_format key_format, value_format;
    int n_kv_heads, capacity;
} large_row;

/* PATTERN encoded rows, repeated to the end of each head; the last position is one of its own. */
static tqkv_store make_store(tqkv_format format, const large_row *row, uint64_t seed, tqkv_store *pattern)
{
    tqkv_store s = test_store(format, DIM, row->n_kv_heads, row->capacity, false);
    *pattern = test_store(format, DIM, row->n_kv_heads, PATTERN + 1, false);
    float *source = (float *)test_alloc(sizeof(float) * (size_t)(PATTERN + 1) * (size_t)row->n_kv_heads * DIM);
    data_rows(seed, DATA_GAUSSIAN, source, (PATTERN + 1) * row->n_kv_heads, DIM);
    CHECK_RESULT(tqkv_encode(pattern, source, PATTERN + 1, 0), TQKV_OK);
    size_t bytes = reference_row_bytes(format, DIM), norms = (size_t)reference_norms_per_row(format, DIM);
    for (int head = 0; head < row->n_kv_heads; head++) {
        for (int p = 0; p < row->capacity - 1; p++) {
            memcpy((void *)(uintptr_t)reference_codes_at(&s, head, p), reference_codes_at(pattern, head, p % PATTERN),
                   bytes);
            if (norms)
                memcpy((void *)(uintptr_t)reference_norms_at(&s, head, p),
                       reference_norms_at(pattern, head, p % PATTERN), norms * sizeof(float));
        }
    }
    CHECK_RESULT(tqkv_encode(&s, source + (size_t)PATTERN * (size_t)row->n_kv_heads * DIM, 1, row->capacity - 1),
                 TQKV_OK);
    free(source);
    return s;
}

/* Pattern row i stands in the store this often; row PATTERN is the last position. */
static double times_stored(int i, int capacity)
{
    if (i == PATTERN) return 1.0;
    const int times = (capacity - 1) / PATTERN + (i < (capacity - 1) % PATTERN);
    return times;
}

/* The softmax over all positions, from the pattern alone. query, out: [DIM] */
static void expect_row(const tqkv_attention *a, const tqkv_store *keys, const tqkv_store *values, int kv_head,
                       const float *query, double *out)
{
    double row[DIM], scores[PATTERN + 1], largest = -INFINITY, sum = 0.0;
    for (int i = 0; i <= PATTERN; i++) {
        scores[i] = 0.0;
        reference_decode_as(REFERENCE_INTEGERS, keys, kv_head, i, row);
        for (int d = 0; d < DIM; d++) scores[i] += (double)query[d] * row[d] * (double)a->scale;
        if (scores[i] > largest) largest = scores[i];
    }
    memset(out, 0, DIM * sizeof *out);
    for (int i = 0; i <= PATTERN; i++) {
        double weight = exp(scores[i] - largest) * times_stored(i, a->keys->capacity);
        reference_decode_as(REFERENCE_INTEGERS, values, kv_head, i, row);
        for (int d = 0; d < DIM; d++) out[d] += weight * row[d];
        sum += weight;
    }
    for (int d = 0; d < DIM; d++) out[d] /= sum;
}

/* A query along the last key, so that the last position, at the far end of the memory, weighs as much as the rest. */
static void make_query(const tqkv_store *keys, int kv_head, int capacity, float scale, float *query)
{
    double row[DIM], length = 0.0;
    reference_decode_as(REFERENCE_INTEGERS, keys, kv_head, PATTERN, row);
    for (int d = 0; d < DIM; d++) length += row[d] * row[d];
    for (int d = 0; d < DIM; d++) query[d] = (float)(row[d] / length * log((double)capacity) / (double)scale);
}

static void check_attend(const void *parameters)
{
    const large_row *row = (const large_row *)parameters;
    tqkv_store key_pattern, value_pattern, keys = make_store(row->key_format, row, 1, &key_pattern);
    tqkv_store values = make_store(row->value_format, row, 2, &value_pattern);
    tqkv_attention a;
    memset(&a, 0, sizeof a);
    a.keys = &keys;
    a.values = &values;
    a.end = row->capacity;
    a.scale = 0.03125f;
    float *q = (float *)test_alloc(sizeof(float) * (size_t)row->n_kv_heads * DIM);
    float *out = (float *)test_alloc(sizeof(float) * (size_t)row->n_kv_heads * DIM);
    for (int head = 0; head < row->n_kv_heads; head++)
        make_query(&key_pattern, head, row->capacity, a.scale, q + (size_t)head * DIM);
    printf("%.2f billion values a stream, codes of %.2f and %.2f GiB\n",
           (double)row->n_kv_heads * row->capacity * DIM / 1e9, (double)keys.codes_size / 1073741824.0,
           (double)values.codes_size / 1073741824.0);
    CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
    for (int head = 0; head < row->n_kv_heads; head++) {
        double expected[DIM];
        expect_row(&a, &key_pattern, &value_pattern, head, q + (size_t)head * DIM, expected);
        double error = reference_relative_error(out + (size_t)head * DIM, expected, DIM);
        CHECK(error <= reference_attention_tolerance(&a, 1.0), "head %d: relative error %.3g", head, error);
    }
    free(q);
    free(out);
    test_store_free(&keys);
    test_store_free(&values);
    test_store_free(&key_pattern);
    test_store_free(&value_pattern);
}

int main(int argc, char **argv)
{
    static const large_row rows[3] = {{TQKV_TQ8, TQKV_I8, 1, (1 << 21) + 5000},
                                      {TQKV_TQ4, TQKV_TQ6, 3, (1 << 20) + 777},
                                      {TQKV_F16, TQKV_TQ4, 1, (1 << 21) + 4321}};
    for (int i = 0; i < 3; i++)
        test_add(check_attend, &rows[i], sizeof *rows, "large/attend/%s-%s/%d", tqkv_format_name(rows[i].key_format),
                 tqkv_format_name(rows[i].value_format), rows[i].n_kv_heads);
    return test_run_selected(false, argc - 1, argv + 1);
}

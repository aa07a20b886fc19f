/* Defects known from other systems, one case each. tests/metal/defect_cases.cpp has those of shaders. */
#define _DEFAULT_SOURCE /* for MAP_ANONYMOUS */
#define _DARWIN_C_SOURCE
#include "attend_checks.h"

#if defined(__linux__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

/* Defect: all norms of a row are the sum over the whole row. The blocks here differ in size by powers of two. */
static void check_block_norms(const void *parameters)
{
    tqkv_format format = *(const tqkv_format *)parameters;
    for (int d = 512; d <= 1024; d *= 2) {
        tqkv_store store = test_store(format, d, 1, 1, false);
        float source[REFERENCE_MAX_DIM];
        data_rows(1, DATA_GAUSSIAN, source, 1, d);
        for (int i = 0; i < d; i++) source[i] *= (float)(1 << i / 256);
        store.rotation = reference_can_be_unrotated(format)
                             ? TQKV_ROTATION_OFF
                             : TQKV_ROTATION_DEFAULT; /* without the rotation each block keeps its size */
        CHECK_RESULT(tqkv_encode(&store, source, 1, 0), TQKV_OK);
        for (int block = 0; block < d / 256 && store.rotation == TQKV_ROTATION_OFF; block++) {
            double row[REFERENCE_MAX_DIM], sum = 0.0, decoded = 0.0;
            reference_decode(&store, 0, 0, row);
            for (int i = 256 * block; i < 256 * block + 256; i++) {
                sum += (double)source[i] * (double)source[i];
                decoded += row[i] * row[i];
            }
            CHECK(fabs(decoded - sum) < 1e-6 * sum, "D=%d block %d has length^2 %g, not %g", d, block, decoded, sum);
        }
        store.rotation = TQKV_ROTATION_DEFAULT;
        CHECK_RESULT(tqkv_encode(&store, source, 1, 0), TQKV_OK);
        uint8_t codes[REFERENCE_MAX_DIM];
        float norms[4], scaled[REFERENCE_MAX_DIM];
        reference_encode_row(&store, 0, source, codes, norms, scaled);
        CHECK(!memcmp(store.norms, norms, sizeof(float) * (size_t)(d / 256)), "D=%d: norms are not bit-equal", d);
        test_store_free(&store);
    }
}

/* Defect: 5- and 6-bit codes are decoded with the 8-bit codebook. */
static void check_own_codebook(const void *parameters)
{
    tqkv_format format = *(const tqkv_format *)parameters;
    int bits = reference_bits(format), d = 1024; /* norm 1 and block_scale 1: decoding gives centroids */
    tqkv_store store = test_store(format, d, 1, 1, false);
    uint8_t *codes = (uint8_t *)store.codes;
    float decoded[1024];
    memset(codes, 0, store.codes_size);
    for (int j = 0; j < d; j++) reference_put_code(codes, format, d, j, j % (1 << bits));
    for (int i = 0; i < 4; i++) store.norms[i] = 1.0f;
    CHECK_RESULT(tqkv_decode(&store, 0, 1, TQKV_ROTATED, decoded), TQKV_OK);
    for (int j = 0; j < d; j++) {
        float centroid = test_codebook(bits)[j % (1 << bits)];
        CHECK(decoded[j] == centroid, "code %d decodes to %.9g, not %.9g", j % (1 << bits), (double)decoded[j],
              (double)centroid);
    }
    test_store_free(&store);
}

/* Defect: softcap is a parameter that is never applied. With a softcap of 1, scores of +-1000 weigh like +-1. */
static void check_softcap_applied(NO_ROW)
{
    enum { DIM = 64 };
    float keys[2 * DIM], values[2 * DIM] = {0}, q[DIM], out[DIM];
    tqkv_store stores[2] = {test_store(TQKV_F16, DIM, 1, 2, false), test_store(TQKV_F16, DIM, 1, 2, false)};
    tqkv_attention a = test_attention(&stores[0], &stores[1], 1, 1, 2);
    for (int i = 0; i < DIM; i++) {
        keys[i] = -1.0f;
        keys[DIM + i] = values[DIM + i] = 1.0f;
        q[i] = 125.0f; /* scores +-1000 */
    }
    CHECK_RESULT(tqkv_encode(&stores[0], keys, 2, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&stores[1], values, 2, 0), TQKV_OK);
    a.softcap = 1.0f;
    CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
    const double expected = exp(1.0) / (exp(1.0) + exp(-1.0));
    CHECK(fabs((double)out[0] - expected) < 1e-5, "weight %g, not %g", (double)out[0], expected);
    for (int i = 0; i < 2; i++) test_store_free(&stores[i]);
}

/* Defects: only the first query is read; outputs overlap. Each query alone must give the bits of its row in a batch. */
static void check_all_queries(const void *parameters)
{
    int d = *(const int *)parameters;
    attend_row row = attend_default_row(TQKV_TQ8, TQKV_TQ6, d);
    attend_problem problem;
    row.n_queries = 7;
    row.group = 3;
    row.end = 140;
    row.key_capacity = row.value_capacity = 140;
    row.window = 90; /* the first visible position of a query differs from that of its batch */
    attend_set_up(&problem, &row);
    const size_t per_query = (size_t)problem.attention.n_heads * problem.head_dim;
    float alone[3 * 2 * REFERENCE_MAX_DIM];
    CHECK_RESULT(tqkv_attend(&problem.attention, problem.q, problem.out), TQKV_OK);
    for (int i = 0; i < row.n_queries; i++) {
        const float *of_query = problem.out + (size_t)i * per_query;
        tqkv_attention one;
        CHECK(attend_query_alone(&problem, i, &one), "query %d sees nothing", i);
        CHECK_RESULT(tqkv_attend(&one, problem.q + (size_t)i * per_query, alone), TQKV_OK);
        CHECK(!memcmp(alone, of_query, per_query * sizeof *alone), "query %d alone has other bits", i);
        for (int k = 0; k < i; k++)
            CHECK(memcmp(of_query, problem.out + (size_t)k * per_query, per_query * sizeof *alone),
                  "queries %d and %d have one answer", i, k);
    }
    attend_tear_down(&problem);
}

/* Defect: -65504 stands for minus infinity in masked positions. Visible scores far below it must still count. */
static void check_masked_is_not_finite(const void *parameters)
{
    int d = *(const int *)parameters;
    attend_row row = attend_default_row(TQKV_F16, TQKV_F16, d);
    attend_problem problem;
    row.n_queries = 3;
    row.window = 5;
    attend_set_up(&problem, &row);
    size_t count = (size_t)(row.end * row.n_kv_heads * d);
    float *ones = (float *)test_alloc(count * sizeof(float));
    for (size_t i = 0; i < count; i++) ones[i] = 1.0f;
    CHECK_RESULT(tqkv_encode(&problem.values, ones, (int)row.end, 0), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&problem.keys, ones, (int)row.end, 0), TQKV_OK);
    problem.attention.scale = 1.0f;
    for (size_t i = 0; i < problem.n_rows * problem.head_dim; i++)
        problem.q[i] = -1e6f / (float)d; /* every visible score is -1e6 */
    CHECK_RESULT(tqkv_attend(&problem.attention, problem.q, problem.out), TQKV_OK);
    for (size_t i = 0; i < problem.n_rows * problem.head_dim; i++)
        CHECK(fabsf(problem.out[i] - 1.0f) < 1e-5f, "element %d is %g", (int)i, (double)problem.out[i]);
    free(ones);
    attend_tear_down(&problem);
}

/* Defect: sizes wrap at 2^64. A size that does not fit must be refused. */
static void check_size_overflow(const void *parameters)
{
    tqkv_format format = *(const tqkv_format *)parameters;
    tqkv_store store = test_shape(format, 1024);
    float source[1024] = {0};
    unsigned char bytes[4096];
    store.n_kv_heads = INT32_MAX;
    store.capacity = INT32_MAX;
    store.codes = bytes;
    store.codes_size = sizeof bytes;
    store.norms = source;
    store.norms_size = sizeof source;
    CHECK(tqkv_codes_size(&store) == 0, "codes of 2^72 bytes have size %zu", tqkv_codes_size(&store));
    CHECK_RESULT(tqkv_encode(&store, source, 1, 0), TQKV_INVALID_ARGUMENT);
    store.n_kv_heads = 1 << 24; /* 2^24 * 2^30 rows of 2^9 to 2^11 bytes: 2^63 to 2^65 bytes */
    store.capacity = 1 << 30;
    size_t size = tqkv_codes_size(&store);
    CHECK(size == 0 || (double)size == ldexp((double)reference_row_bytes(format, 1024), 54), "size %zu", size);
    CHECK_RESULT(tqkv_encode(&store, source, 1, 0), TQKV_INVALID_ARGUMENT);
}

/* Defect: 32-bit indices wrap at 2^32. Uses the end of a store of 5 GiB; the rest is address space without memory. */
static void check_far_rows(NO_ROW)
{
#if (defined(__linux__) || defined(__APPLE__)) && SIZE_MAX > 0xffffffffu
    enum { D = 1024, CAPACITY = 5 << 19 }; /* times 2048 bytes */
    tqkv_store store = test_shape(TQKV_F16, D);
    store.capacity = CAPACITY;
    store.codes_size = tqkv_codes_size(&store);
    REQUIRE(store.codes_size == (size_t)5 << 30, "size %zu", store.codes_size);
    void *memory =
        mmap(NULL, store.codes_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(memory != MAP_FAILED, "no address space");
    store.codes = memory;
    float source[2 * D], decoded[2 * D], out[D];
    for (int i = 0; i < 2 * D; i++) source[i] = (float)(i % 100);
    CHECK_RESULT(tqkv_encode(&store, source, 2, CAPACITY - 2), TQKV_OK);
    CHECK_RESULT(tqkv_decode(&store, CAPACITY - 2, 2, TQKV_ORIGINAL, decoded), TQKV_OK);
    CHECK(!memcmp(source, decoded, sizeof source), "the last rows of 5 GiB do not come back");
    CHECK(((const uint8_t *)store.codes)[((size_t)1 << 30) - 1] == 0, "the write wrapped");
    tqkv_attention a = test_attention(&store, &store, 1, 1, CAPACITY);
    a.kv_len = 1;
    CHECK_RESULT(tqkv_attend(&a, source, out), TQKV_OK);
    CHECK(!memcmp(out, source + D, sizeof out), "one resident position does not give its value");
    munmap(memory, store.codes_size);
#endif
}

/* Defect: a probe writes more than its documentation says. It must write n_tokens * n_kv_heads * head_dim floats. */
static void check_probe_size(const void *parameters)
{
    tqkv_format format = *(const tqkv_format *)parameters;
    for (int d = 0; d < 6; d++) {
        int head_dim = test_head_dims[d];
        size_t count = (size_t)(3 * 2 * head_dim);
        tqkv_store store = test_shape(format, head_dim); /* of fewer than the probed tokens: a probe stores nothing */
        store.n_kv_heads = 2;
        float *source = test_rows(1, DATA_GAUSSIAN, 6, head_dim);
        float *scaled = (float *)test_alloc_filled((count + 1) * sizeof(float), 0xff);
        CHECK_RESULT(tqkv_probe(&store, source, 3, scaled), TQKV_OK);
        for (size_t i = 0; i < count; i++)
            CHECK(isfinite(scaled[i]), "element %d of %d was not written", (int)i, (int)count);
        CHECK(isnan(scaled[count]), "one element too many was written");
        free(source);
        free(scaled);
    }
}

/* Defect: codes of 5 and 6 bits take 8 bits of memory. */
static void check_packed(NO_ROW)
{
    for (int i = 0; i < 6; i++) {
        size_t d = (size_t)test_head_dims[i];
        CHECK(8 * test_row_bytes(TQKV_TQ5, (int)d) == 5 * d, "TQ5 row of %zu bytes", test_row_bytes(TQKV_TQ5, (int)d));
        CHECK(8 * test_row_bytes(TQKV_TQ6, (int)d) == 6 * d, "TQ6 row of %zu bytes", test_row_bytes(TQKV_TQ6, (int)d));
    }
}

/* Defect: the codebook of 8 bits is 52% above the optimum's error, and above that of I8, which needs none. The search
 * of factors makes up for that: TQ8 must be more accurate than I8 on Gaussian rows. */
static void check_tq8_beats_i8(const void *parameters)
{
    int d = *(const int *)parameters;
    enum { ROWS = 64 };
    float *source = test_rows(6, DATA_GAUSSIAN, ROWS, d);
    float *decoded = (float *)test_alloc(sizeof(float) * (size_t)(ROWS * d));
    double errors[2];
    for (int i = 0; i < 2; i++) {
        tqkv_store store = test_store(i ? TQKV_TQ8 : TQKV_I8, d, 1, ROWS, false);
        CHECK_RESULT(tqkv_encode(&store, source, ROWS, 0), TQKV_OK);
        CHECK_RESULT(tqkv_decode(&store, 0, ROWS, TQKV_ORIGINAL, decoded), TQKV_OK);
        errors[i] = 0.0;
        for (int j = 0; j < ROWS * d; j++)
            errors[i] += ((double)source[j] - (double)decoded[j]) * ((double)source[j] - (double)decoded[j]);
        test_store_free(&store);
    }
    CHECK(errors[1] < errors[0], "I8 %g, TQ8 %g", errors[0], errors[1]);
    free(source);
    free(decoded);
}

/* Defect: upper bits of a damaged code index memory behind the codebook, in formats with 5 or 6 bits in a byte. */
static void check_upper_bits(const void *parameters)
{
    tqkv_format format = *(const tqkv_format *)parameters;
    tqkv_store store = test_store(format, 128, 1, 3, false);
    float decoded[3 * 128], out[128], q[128] = {0};
    for (int i = 0; i < 3; i++) store.norms[i] = 1.0f; /* the codes stay 0xff */
    CHECK_RESULT(tqkv_decode(&store, 0, 3, TQKV_ROTATED, decoded), TQKV_OK);
    for (int i = 0; i < 3 * 128; i++)
        CHECK(fabsf(decoded[i]) <= 1.0f, "element %d decodes to %g", i, (double)decoded[i]);
    tqkv_attention a = test_attention(&store, &store, 1, 1, 3);
    CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
    for (int i = 0; i < 128; i++) CHECK(isfinite(out[i]), "element %d is %g", i, (double)out[i]);
    test_store_free(&store);
}

/* Of one head. */
static tqkv_cache_desc desc_of(int head_dim, int capacity)
{
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.head_dim = head_dim;
    desc.n_kv_heads = desc.n_heads = 1;
    desc.capacity = capacity;
    return desc;
}

/* A NaN among halves at a position whose weight underflows to 0: the same bits alone and beside a query that does not
   see the newest position. */
static void check_poison_alone(NO_ROW)
{
    enum { N = 64, DIM = 64 };
    static float k[N * DIM], v[N * DIM], q[2 * DIM], alone[DIM], both[2 * DIM];
    tqkv_cache *cache;
    tqkv_cache_desc desc = desc_of(DIM, N);
    desc.key_format = desc.value_format = TQKV_F16;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    for (int i = 0; i < N * DIM; i++) v[i] = 1.0f;
    k[0] = -1000.0f;
    q[0] = q[DIM] = 8.0f;
    CHECK_RESULT(tqkv_cache_append(cache, k, v, N), TQKV_OK);
    ((unsigned char *)test_values(cache)->codes)[7] = 0x7e; /* a NaN in element 3 of position 0 */
    CHECK_RESULT(tqkv_cache_attend(cache, q + DIM, 1, alone), TQKV_OK);
    CHECK_RESULT(tqkv_cache_attend(cache, q, 2, both), TQKV_OK);
    for (int i = 0; i < DIM; i++)
        CHECK((alone[i] != alone[i]) == (both[DIM + i] != both[DIM + i]),
              "element %d is %g alone and %g beside another", i, (double)alone[i], (double)both[DIM + i]);
    tqkv_cache_destroy(cache);
}

/* A centre whose product with the query is beyond the range of float: NaN where it counts, never a wrong number. */
static void check_center_overflow(NO_ROW)
{
    enum { N = 4, DIM = 64 };
    static float k[N * DIM], v[N * DIM], q[DIM], out[DIM];
    float max, sum, sink = 0.0f;
    tqkv_cache *cache;
    tqkv_cache_desc desc = desc_of(DIM, N);
    for (int i = 0; i < N * DIM; i++) {
        k[i] = 1e37f;
        v[i] = 1.0f;
    }
    desc.key_center = k;
    CHECK_RESULT(tqkv_cache_create(&desc, &cache), TQKV_OK);
    CHECK_RESULT(tqkv_cache_append(cache, k, v, N), TQKV_OK);
    tqkv_attention a = test_view(cache, 1);
    for (int sign = -1; sign < 2; sign += 2) {
        for (int i = 0; i < DIM; i++) q[i] = (float)sign * 100.0f;
        a.sinks = &sink;
        CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
        CHECK(out[0] != out[0], "with a sink %g", (double)out[0]);
        a.sinks = NULL;
        CHECK_RESULT(tqkv_attend_partial(&a, q, 0, N, out, &max, &sum), TQKV_OK);
        CHECK_RESULT(tqkv_attend_finish(&a, out, &max, &sum), TQKV_OK);
        CHECK(out[0] != out[0], "of a slice %g", (double)out[0]);
    }
    tqkv_cache_destroy(cache);
}

/* Zeros of a query that sees nothing are +0 in every type: rotated back, half of them were -0. */
static void check_nothing_seen(const void *parameters)
{
    enum { DIM = 48, QUERIES = 3 };
    const tqkv_format format = *(const tqkv_format *)parameters;
    static float q[QUERIES * DIM];
    unsigned char out[QUERIES * DIM * sizeof(float)];
    float sums[QUERIES * DIM], max[QUERIES], sum[QUERIES], sink = 1.0f;
    tqkv_store store = test_store(format, DIM, 1, 4, false);
    tqkv_attention a = test_attention(&store, &store, 1, QUERIES, 0);
    data_rows(3, DATA_GAUSSIAN, q, QUERIES, DIM);
    a.sinks = &sink;
    for (int type = 0; type < 3; type++) {
        size_t set = 0;
        a.output_type = (tqkv_type)type;
        memset(out, 0, sizeof out);
        CHECK_RESULT(tqkv_attend(&a, q, out), TQKV_OK);
        for (size_t i = 0; i < sizeof out; i++) set += out[i] != 0;
        CHECK(set == 0, "type %d: %d bytes are not 0", type, (int)set);
    }
    CHECK_RESULT(tqkv_attend_partial(&a, q, 0, 0, sums, max, sum), TQKV_OK);
    CHECK_RESULT(tqkv_attend_finish(&a, sums, max, sum), TQKV_OK);
    for (int i = 0; i < QUERIES * DIM; i++) CHECK(sums[i] == 0.0f && !signbit(sums[i]), "element %d", i);
    test_store_free(&store);
}

void test_defects_cases(void)
{
    test_add(check_poison_alone, NULL, 0, "defect/poison_alone");
    test_add(check_center_overflow, NULL, 0, "defect/center_overflow");
    for (int i = 0; i < TEST_FORMATS; i++) {
        const char *name = tqkv_format_name(test_formats[i]);
        test_add(check_nothing_seen, &test_formats[i], sizeof test_formats[i], "defect/nothing_seen/%s", name);
        if (reference_is_codebook(test_formats[i])) {
            test_add(check_block_norms, &test_formats[i], sizeof *test_formats, "defect/block_norms/%s", name);
            test_add(check_own_codebook, &test_formats[i], sizeof *test_formats, "defect/own_codebook/%s", name);
        }
        test_add(check_size_overflow, &test_formats[i], sizeof *test_formats, "defect/size_overflow/%s", name);
        test_add(check_probe_size, &test_formats[i], sizeof *test_formats, "defect/probe_size/%s", name);
    }
    for (int i = 0; i < 6; i++) {
        int d = test_head_dims[i];
        test_add(check_all_queries, &d, sizeof d, "defect/all_queries/%d", d);
        test_add(check_masked_is_not_finite, &d, sizeof d, "defect/masked_is_not_finite/%d", d);
        test_add(check_tq8_beats_i8, &d, sizeof d, "defect/tq8_beats_i8/%d", d);
    }
    test_add(check_upper_bits, &test_formats[5], sizeof *test_formats, "defect/upper_bits/tq5_bytes");
    test_add(check_upper_bits, &test_formats[6], sizeof *test_formats, "defect/upper_bits/tq6_bytes");
    test_add(check_softcap_applied, NULL, 0, "defect/softcap_applied");
    test_add(check_packed, NULL, 0, "defect/packed");
    test_add(check_far_rows, NULL, 0, "defect/far_rows");
}

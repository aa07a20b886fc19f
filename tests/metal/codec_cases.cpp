// encode, encode_kv, probe, decode, rotate and tables write the same bytes as the C code of tqkv.h.
#include "shader_cases.h"
#include "../golden.h"
#include "../goldens.h"
#include <math.h>

namespace
{

struct codec_row {
    tqkv_format format, value_format;
    int head_dim, n_kv_heads, capacity, n_tokens;
    int64_t position;
    bool ring, unrotated;
    float block_scale;
    data_kind kind;
    bool centered;
};

// Stores of a row, and their centres: [n_kv_heads][head_dim].
std::vector<float> make_center(const codec_row *row, uint64_t seed)
{
    std::vector<float> center((size_t)row->n_kv_heads * (size_t)row->head_dim);
    data_rows(seed, DATA_GAUSSIAN, center.data(), row->n_kv_heads, row->head_dim);
    return center;
}

tqkv_store make_store(const codec_row *row, tqkv_format format, const std::vector<float> &center)
{
    tqkv_store s = test_store(format, row->head_dim, row->n_kv_heads, row->capacity, row->ring);
    s.center = row->centered ? center.data() : nullptr;
    s.unrotated = row->unrotated;
    s.block_scale = row->block_scale;
    return s;
}

std::vector<float> make_source(const codec_row *row, uint64_t seed)
{
    std::vector<float> source((size_t)row->n_tokens * (size_t)row->n_kv_heads * (size_t)row->head_dim);
    data_rows(seed, row->kind, source.data(), row->n_tokens * row->n_kv_heads, row->head_dim);
    return source;
}

// A machine that flushes subnormals loses squares below 1.2e-38. Up to 1024 lost squares change the norm of a row by
// more than its rounding only if the norm is below 1.5e-14. Such a row is stored as zeros and that norm.
const float flushed_norm = 1.5e-14f;

// True if the bits are equal. With any_nan, two NaNs are equal: rows that overflow give NaN, and the processor chooses
// its sign. Where subnormals are flushed, two values of rows with a norm below flushed_norm are equal.
bool same_floats(const float *a, const float *b, size_t n, bool any_nan)
{
    for (size_t i = 0; i < n; i++) {
        bool tiny = gpu_schedules[0].flush_subnormals && fabsf(a[i]) < flushed_norm && fabsf(b[i]) < flushed_norm;
        if (memcmp(&a[i], &b[i], sizeof a[i]) && !(any_nan && isnan(a[i]) && isnan(b[i])) && !tiny) return false;
    }
    return true;
}

bool same_floats(const std::vector<float> &a, const std::vector<float> &b)
{
    return a.size() == b.size() && same_floats(a.data(), b.data(), a.size(), true);
}

void check_same_store(const tqkv_store &a, const tqkv_store &b)
{
    CHECK(!memcmp(a.codes, b.codes, a.codes_size), "codes differ");
    CHECK(same_floats(a.norms, b.norms, a.norms_size / sizeof *a.norms, false), "norms differ");
}

void check_decode(const tqkv_store &s, int64_t position, int n)
{
    size_t count = (size_t)n * (size_t)s.n_kv_heads * (size_t)s.head_dim;
    for (tqkv_basis basis : {TQKV_ROTATED, TQKV_ORIGINAL}) {
        std::vector<float> expected(count), got(count, NAN);
        CHECK_RESULT(tqkv_decode(&s, position, n, basis, expected.data()), TQKV_OK);
        CHECK_RUN(gpu_decode(&s, position, n, basis, got.data()));
        CHECK(same_floats(expected, got), "decoded values differ, basis %d", (int)basis);
    }
}

void check_probe(const tqkv_store &s, const std::vector<float> &source, int n_tokens)
{
    std::vector<float> expected(source.size()), got(source.size(), NAN);
    CHECK_RESULT(tqkv_probe(&s, source.data(), n_tokens, expected.data()), TQKV_OK);
    CHECK_RUN(gpu_probe(&s, source.data(), n_tokens, got.data(), nullptr));
    CHECK(same_floats(expected, got), "probed values differ");
}

// Encoding, decoding and the probe against C. All bytes of the stores are 0xff at first: slots outside the run must
// stay so.
void run_codec(const void *parameters)
{
    const codec_row *row = (const codec_row *)parameters;
    std::vector<float> source = make_source(row, 3), center = make_center(row, 8);
    tqkv_store expected = make_store(row, row->format, center), got = make_store(row, row->format, center);
    uint32_t flag = 1;
    CHECK_RESULT(tqkv_encode(&expected, source.data(), row->n_tokens, row->position), TQKV_OK);
    CHECK_RUN(gpu_encode(&got, source.data(), row->n_tokens, row->position, &flag));
    CHECK(flag == 0, "finite rows raised the flag");
    check_same_store(expected, got);
    int stored = row->n_tokens < row->capacity ? row->n_tokens : row->capacity;
    check_decode(expected, row->position + row->n_tokens - stored, stored);
    check_probe(expected, source, row->n_tokens);
    test_store_free(&expected);
    test_store_free(&got);
}

// One dispatch for keys and values against two calls in C.
void run_encode_kv(const void *parameters)
{
    const codec_row *row = (const codec_row *)parameters;
    std::vector<float> k = make_source(row, 4), v = make_source(row, 5);
    std::vector<float> kc = make_center(row, 8), vc = make_center(row, 9);
    tqkv_store keys = make_store(row, row->format, kc), values = make_store(row, row->value_format, vc);
    tqkv_store got_keys = make_store(row, row->format, kc), got_values = make_store(row, row->value_format, vc);
    CHECK_RESULT(tqkv_encode(&keys, k.data(), row->n_tokens, row->position), TQKV_OK);
    CHECK_RESULT(tqkv_encode(&values, v.data(), row->n_tokens, row->position), TQKV_OK);
    CHECK_RUN(gpu_encode_kv(&got_keys, &got_values, k.data(), v.data(), row->n_tokens, row->position, nullptr));
    check_same_store(keys, got_keys);
    check_same_store(values, got_values);
    for (tqkv_store *s : {&keys, &values, &got_keys, &got_values}) test_store_free(s);
}

// A row with NaN or Inf is stored like a row of zeros, with norms of 0, and raises the flag. The rows beside it do not
// change.
void run_not_finite(const void *parameters)
{
    const codec_row *row = (const codec_row *)parameters;
    std::vector<float> source = make_source(row, 6), center = make_center(row, 8);
    size_t d = (size_t)row->head_dim, bad_rows[] = {1, 4};
    tqkv_store expected = make_store(row, row->format, center), got = make_store(row, row->format, center);
    for (size_t bad : bad_rows)
        for (size_t i = 0; i < d; i++) source[bad * d + i] = row->centered ? center[bad % 3 * d + i] : 0.0f;
    CHECK_RESULT(tqkv_encode(&expected, source.data(), row->n_tokens, row->position), TQKV_OK);
    source[bad_rows[0] * d + d - 1] = NAN;
    source[bad_rows[1] * d] = -INFINITY;
    uint32_t flag = 0;
    CHECK_RUN(gpu_encode(&got, source.data(), row->n_tokens, row->position, &flag));
    CHECK(flag == 1, "flag is %u", flag);
    check_same_store(expected, got);
    test_store_free(&expected);
    test_store_free(&got);
}

void run_rotate(const void *parameters)
{
    const codec_row *row = (const codec_row *)parameters;
    std::vector<float> expected = make_source(row, 7), got = expected;
    CHECK_RESULT(tqkv_rotate(expected.data(), row->n_tokens, row->head_dim), TQKV_OK);
    CHECK_RUN(gpu_rotate(got.data(), row->n_tokens, row->head_dim, false));
    CHECK(same_floats(expected, got), "rotated rows differ");
    CHECK_RESULT(tqkv_unrotate(expected.data(), row->n_tokens, row->head_dim), TQKV_OK);
    CHECK_RUN(gpu_rotate(got.data(), row->n_tokens, row->head_dim, true));
    CHECK(same_floats(expected, got), "un-rotated rows differ");
}

// Codes and norms must have the hashes of the C tests.
void run_golden(const void *parameters)
{
    int index = *(const int *)parameters;
    golden_case c;
    REQUIRE(golden_find(index, &c), "no golden %d", index);
    tqkv_store s = golden_store(&c);
    std::vector<char> codes(s.codes_size, (char)0xa5), norms(s.norms_size, (char)0xa5);
    std::vector<float> source((size_t)(GOLDEN_TOKENS * GOLDEN_HEADS * c.head_dim));
    data_rows((uint64_t)c.head_dim, (data_kind)c.kind, source.data(), GOLDEN_TOKENS * GOLDEN_HEADS, c.head_dim);
    std::vector<float> center((size_t)(GOLDEN_HEADS * c.head_dim));
    golden_center(&c, center.data());
    if (c.option == GOLDEN_CENTER) s.center = center.data();
    s.codes = codes.data();
    s.norms = (float *)(void *)norms.data();
    CHECK_RUN(gpu_encode(&s, source.data(), GOLDEN_TOKENS, GOLDEN_POSITION, nullptr));
    CHECK(XXH3_64bits(codes.data(), codes.size()) == goldens[index].codes, "codes");
    CHECK(XXH3_64bits(norms.data(), norms.size()) == goldens[index].norms, "norms");
}

void run_tables(const void *)
{
    tqkv__table_report report;
    memset(&report, 0xa5, sizeof report);
    CHECK_RUN(gpu_tables(&report));
    const char *stale = tqkv__stale_table(&report);
    CHECK(!stale, "stale: %s", stale);
    CHECK(XXH3_64bits(&report.tables, sizeof report.tables) == TQKV_HASH_TABLES, "stale: some table");
}

codec_row default_row(tqkv_format format, int head_dim)
{
    codec_row row = {};
    row.format = row.value_format = format;
    row.head_dim = head_dim;
    row.n_kv_heads = 3;
    row.capacity = 9;
    row.n_tokens = 7;
    row.position = 1;
    return row;
}

void add_codec_rows(tqkv_format format, int head_dim)
{
    const char *name = tqkv_format_name(format);
    codec_row row = default_row(format, head_dim);
    for (data_kind kind : {DATA_GAUSSIAN, DATA_EXTREMES}) { // the goldens have all kinds
        row.kind = kind;
        test_add(run_codec, &row, sizeof row, "encode/%s/d%d/%s", name, head_dim, data_kind_name(kind));
    }
    row.kind = DATA_STUDENT;
    test_add(run_not_finite, &row, sizeof row, "encode/%s/d%d/not_finite", name, head_dim);
    row.ring = true;
    row.position = 1000000000007;
    test_add(run_codec, &row, sizeof row, "encode/%s/d%d/ring_wrap", name, head_dim);
    row.n_tokens = 23;
    test_add(run_codec, &row, sizeof row, "encode/%s/d%d/longer_than_ring", name, head_dim);
    row.n_tokens = 7;
    row.centered = true;
    test_add(run_codec, &row, sizeof row, "encode/%s/d%d/center", name, head_dim);
    test_add(run_not_finite, &row, sizeof row, "encode/%s/d%d/center_not_finite", name, head_dim);
    row.centered = false;
    if (head_dim >= 512) {
        row.block_scale = 1.25f;
        test_add(run_codec, &row, sizeof row, "encode/%s/d%d/block_scale", name, head_dim);
        row.block_scale = 0.0f;
    }
    if (!reference_can_be_unrotated(format)) return;
    row.unrotated = true;
    test_add(run_codec, &row, sizeof row, "encode/%s/d%d/unrotated", name, head_dim);
}

} // namespace

void codec_shader_cases()
{
    test_add(run_tables, nullptr, 0, "tables");
    for (int i = 0; !gpu_schedules[0].flush_subnormals && i < (int)(sizeof goldens / sizeof *goldens); i++)
        test_add(run_golden, &i, sizeof i, "golden/%s", goldens[i].name);
    for (int head_dim : gpu_head_dims) {
        codec_row row = default_row(TQKV_F16, head_dim);
        test_add(run_rotate, &row, sizeof row, "rotate/d%d", head_dim);
        for (tqkv_format format : test_formats) add_codec_rows(format, head_dim);
    }
    for (tqkv_format keys : test_formats)
        for (tqkv_format values : test_formats) {
            codec_row row = default_row(keys, 64);
            row.value_format = values;
            row.ring = true;
            row.position = 5;
            test_add(run_encode_kv, &row, sizeof row, "encode_kv/%s_%s/d64", tqkv_format_name(keys),
                     tqkv_format_name(values));
            row.head_dim = 512;
            row.n_tokens = 2;
            row.centered = true;
            test_add(run_encode_kv, &row, sizeof row, "encode_kv/%s_%s/d512", tqkv_format_name(keys),
                     tqkv_format_name(values));
        }
}

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
    bool ring, unrotated, rotated; // rotated: of F16
    float block_scale;
    data_kind kind;
    bool centered;
    tqkv_type type, value_type, decoded_type;
    int value_dim; // 0 = head_dim
};

size_t size_of(tqkv_type type) { return type == TQKV_TYPE_F32 ? sizeof(float) : sizeof(uint16_t); }

// Rows in one of the types, at an address with the alignment of a value and no more.
struct typed_rows {
    tqkv_type type;
    size_t n; // values
    std::vector<char> bytes;
    typed_rows(tqkv_type t, size_t count) : type(t), n(count), bytes((count + 1) * size_of(t), (char)0xff) {}
    void *data() { return bytes.data() + size_of(type); }
    const void *data() const { return bytes.data() + size_of(type); }
};

// Stores of a row, and their centres: [n_kv_heads][head_dim].
std::vector<float> make_center(const codec_row *row, uint64_t seed)
{
    std::vector<float> center((size_t)row->n_kv_heads * (size_t)row->head_dim);
    data_rows(seed, DATA_GAUSSIAN, center.data(), row->n_kv_heads, row->head_dim);
    return center;
}

// The values of a pair of streams.
codec_row values_of(const codec_row *row)
{
    codec_row values = *row;
    values.format = row->value_format;
    values.type = row->value_type;
    values.head_dim = row->value_dim ? row->value_dim : row->head_dim;
    return values;
}

tqkv_store make_store(const codec_row *row, const std::vector<float> &center)
{
    tqkv_store s = test_store(row->format, row->head_dim, row->n_kv_heads, row->capacity, row->ring);
    s.type = row->type;
    s.center = row->centered ? center.data() : nullptr;
    s.rotation = row->unrotated                              ? TQKV_ROTATION_OFF
                 : (row->rotated && row->format == TQKV_F16) ? TQKV_ROTATION_ON
                                                             : TQKV_ROTATION_DEFAULT;
    s.block_scale = row->block_scale;
    return s;
}

std::vector<float> make_source(const codec_row *row, uint64_t seed)
{
    std::vector<float> source((size_t)row->n_tokens * (size_t)row->n_kv_heads * (size_t)row->head_dim);
    data_rows(seed, row->kind, source.data(), row->n_tokens * row->n_kv_heads, row->head_dim);
    for (float &x : source) // a half beyond these would be infinite, and refused
        if (row->type == TQKV_TYPE_F16 && fabsf(x) > 65504.0f) x = copysignf(65504.0f, x);
    return source;
}

// Floats, rounded to the type.
typed_rows in_type(tqkv_type type, const std::vector<float> &floats)
{
    typed_rows rows(type, floats.size());
    if (type == TQKV_TYPE_F32) memcpy(rows.data(), floats.data(), floats.size() * sizeof(float));
    for (size_t i = 0; type != TQKV_TYPE_F32 && i < floats.size(); i++) {
        const uint16_t half = isnan(floats[i]) ? 0x7fff : reference_narrow(type, floats[i]);
        memcpy((uint16_t *)rows.data() + i, &half, sizeof half);
    }
    return rows;
}

// A machine that flushes subnormals loses squares below 1.2e-38. Up to 1024 lost squares change the norm of a row by
// more than its rounding only if the norm is below 1.5e-14. Such a row is stored as zeros.
const float flushed_norm = 1.5e-14f;

// True if the bits are equal, or both are NaN: rows that overflow give NaN, and the processor chooses its sign. Where
// subnormals are flushed, two values below flushed_norm are equal.
bool same_floats(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bool tiny = gpu_schedules[0].flush_subnormals && fabsf(a[i]) < flushed_norm && fabsf(b[i]) < flushed_norm;
        if (memcmp(&a[i], &b[i], sizeof a[i]) && !(isnan(a[i]) && isnan(b[i])) && !tiny) return false;
    }
    return true;
}

bool same_floats(const std::vector<float> &a, const std::vector<float> &b)
{
    return a.size() == b.size() && same_floats(a.data(), b.data(), a.size());
}

bool same_rows(const typed_rows &a, const typed_rows &b)
{
    if (a.type != TQKV_TYPE_F32) return !memcmp(a.data(), b.data(), a.n * size_of(a.type));
    return same_floats((const float *)a.data(), (const float *)b.data(), a.n);
}

void check_same_store(const tqkv_store &a, const tqkv_store &b)
{
    CHECK(!memcmp(a.codes, b.codes, a.codes_size), "codes differ");
    CHECK(a.norms_size == 0 || !memcmp(a.norms, b.norms, a.norms_size), "norms differ");
}

void check_decode(tqkv_store s, tqkv_type type, int64_t position, int n)
{
    s.type = type;
    for (tqkv_basis basis : {TQKV_ROTATED, TQKV_ORIGINAL}) {
        typed_rows expected(type, (size_t)n * (size_t)s.n_kv_heads * (size_t)s.head_dim), got = expected;
        CHECK_RESULT(tqkv_decode(&s, position, n, basis, expected.data()), TQKV_OK);
        CHECK_RUN(gpu_decode(&s, position, n, basis, got.data()));
        CHECK(same_rows(expected, got), "decoded values differ, basis %d", (int)basis);
    }
}

void check_probe(const tqkv_store &s, const typed_rows &source, int n_tokens)
{
    std::vector<float> expected(source.n), got(source.n, NAN);
    CHECK_RESULT(tqkv_probe(&s, source.data(), n_tokens, expected.data()), TQKV_OK);
    CHECK_RUN(gpu_probe(&s, source.data(), n_tokens, got.data(), nullptr));
    CHECK(same_floats(expected, got), "probed values differ");
}

// Encoding, decoding and the probe against C. All bytes of the stores are 0xff at first: slots outside the run must
// stay so.
void run_codec(const void *parameters)
{
    const codec_row *row = (const codec_row *)parameters;
    const typed_rows source = in_type(row->type, make_source(row, 3));
    const std::vector<float> center = make_center(row, 8);
    tqkv_store expected = make_store(row, center), got = make_store(row, center);
    uint32_t flag = 1;
    CHECK_RESULT(tqkv_encode(&expected, source.data(), row->n_tokens, row->position), TQKV_OK);
    CHECK_RUN(gpu_encode(&got, source.data(), row->n_tokens, row->position, &flag));
    CHECK(flag == 0, "finite rows raised the flag");
    check_same_store(expected, got);
    int stored = row->n_tokens < row->capacity ? row->n_tokens : row->capacity;
    check_decode(expected, row->decoded_type, row->position + row->n_tokens - stored, stored);
    check_probe(expected, source, row->n_tokens);
    test_store_free(&expected);
    test_store_free(&got);
}

// Rows of which several factors make the same codes, or codes that fit nearly as well: small whole numbers, and few
// that are not 0. With a scale, and without.
void run_ties(const void *parameters)
{
    codec_row row = *(const codec_row *)parameters;
    const size_t n = (size_t)(row.n_tokens * row.n_kv_heads * row.head_dim);
    float *scale = test_scales(9, row.n_kv_heads, row.head_dim, 8.0);
    for (int kind = 0; kind < 4; kind++) {
        data_random random = {(uint64_t)(row.head_dim + kind)};
        std::vector<float> source(n);
        for (float &x : source)
            x = kind < 2 ? (float)(data_below(&random, 5) - 2) : (float)(data_below(&random, 12) / 11);
        tqkv_store expected = make_store(&row, source), got = make_store(&row, source);
        expected.channel_scale = got.channel_scale = kind % 2 ? scale : nullptr;
        CHECK_RESULT(tqkv_encode(&expected, source.data(), row.n_tokens, 0), TQKV_OK);
        CHECK_RUN(gpu_encode(&got, source.data(), row.n_tokens, 0, nullptr));
        check_same_store(expected, got);
        test_store_free(&expected);
        test_store_free(&got);
    }
    free(scale);
}

// What encode relies on where it looks a value's neighbours up once for several factors.
void run_crossings(const void *)
{
    for (int bits : {3, 4}) {
        const float *boundaries = TQKV__BOUNDARIES(bits), *factors = TQKV__FACTORS(bits);
        float largest = 0.0f;
        for (int f = 0; f < TQKV__N_FACTORS(bits); f++) largest = fmaxf(largest, factors[f]);
        for (int i = 1 << (bits - 1); i + 1 < (1 << bits) - 1; i++)
            CHECK(boundaries[i + 1] * TQKV__LEAST_CROSSING(bits) > boundaries[i] * largest * 1.00001f,
                  "%d bits: a value may cross boundaries %d and %d", bits, i, i + 1);
    }
}

// One dispatch for keys and values against two calls in C.
void run_encode_kv(const void *parameters)
{
    const codec_row *row = (const codec_row *)parameters, value_row = values_of(row);
    const typed_rows k = in_type(row->type, make_source(row, 4)),
                     v = in_type(value_row.type, make_source(&value_row, 5));
    const std::vector<float> kc = make_center(row, 8), vc = make_center(&value_row, 9);
    tqkv_store keys = make_store(row, kc), values = make_store(&value_row, vc);
    tqkv_store got_keys = make_store(row, kc), got_values = make_store(&value_row, vc);
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
    tqkv_store expected = make_store(row, center), got = make_store(row, center);
    for (size_t bad : bad_rows)
        for (size_t i = 0; i < d; i++) source[bad * d + i] = row->centered ? center[bad % 3 * d + i] : 0.0f;
    const typed_rows zeros = in_type(row->type, source);
    CHECK_RESULT(tqkv_encode(&expected, zeros.data(), row->n_tokens, row->position), TQKV_OK);
    source[bad_rows[0] * d + d - 1] = NAN;
    source[bad_rows[1] * d] = -INFINITY;
    const typed_rows bad_source = in_type(row->type, source);
    uint32_t flag = 0;
    CHECK_RUN(gpu_encode(&got, bad_source.data(), row->n_tokens, row->position, &flag));
    CHECK(flag == 1, "flag is %u", flag);
    check_same_store(expected, got);
    test_store_free(&expected);
    test_store_free(&got);
}

void run_rotate(const void *parameters)
{
    const codec_row *row = (const codec_row *)parameters;
    std::vector<float> expected = make_source(row, 7), got = expected;
    CHECK_RESULT(tqkv_rotate(expected.data(), row->n_tokens, row->head_dim, TQKV_ROTATED), TQKV_OK);
    CHECK_RUN(gpu_rotate(got.data(), row->n_tokens, row->head_dim, false));
    CHECK(same_floats(expected, got), "rotated rows differ");
    CHECK_RESULT(tqkv_rotate(expected.data(), row->n_tokens, row->head_dim, TQKV_ORIGINAL), TQKV_OK);
    CHECK_RUN(gpu_rotate(got.data(), row->n_tokens, row->head_dim, true));
    CHECK(same_floats(expected, got), "un-rotated rows differ");
}

struct golden_row {
    golden_case encoded;
    uint32_t word;
};

// Codes and norms must have the hashes of the C tests.
void run_golden(const void *parameters)
{
    const golden_row *row = (const golden_row *)parameters;
    const golden_case c = row->encoded;
    tqkv_store s = golden_store(&c);
    std::vector<char> codes(s.codes_size, (char)0xa5), norms(s.norms_size, (char)0xa5);
    std::vector<float> source((size_t)(GOLDEN_TOKENS * GOLDEN_HEADS * c.head_dim));
    data_rows((uint64_t)c.head_dim, (data_kind)c.kind, source.data(), GOLDEN_TOKENS * GOLDEN_HEADS, c.head_dim);
    std::vector<float> center((size_t)(GOLDEN_HEADS * c.head_dim));
    std::vector<float> scale(center.size());
    golden_center(&c, center.data());
    golden_scale(&c, scale.data());
    if (c.option == GOLDEN_CENTER || c.option == GOLDEN_SCALE) s.center = center.data();
    if (c.option == GOLDEN_SCALE) s.channel_scale = scale.data();
    s.codes = codes.data();
    s.norms = (float *)(void *)norms.data();
    CHECK_RUN(gpu_encode(&s, source.data(), GOLDEN_TOKENS, GOLDEN_POSITION, nullptr));
    const golden made = {XXH3_64bits(codes.data(), codes.size()), XXH3_64bits(norms.data(), norms.size())};
    CHECK(golden_word(&made) == row->word, "codes or norms");
}

// Centre and scales that rows teach, and queries perhaps, must be the processor's, bit for bit.
struct calibrate_row {
    tqkv_type type;
    int head_dim, n_tokens, n_queries, group;
    tqkv_pairs pairs;
};

void run_calibrate(const void *parameters)
{
    const calibrate_row *row = (const calibrate_row *)parameters;
    const int n_kv_heads = 3, heads = n_kv_heads * row->group, dim = row->head_dim;
    const size_t channels = (size_t)(n_kv_heads * dim);
    tqkv_store s = test_store(TQKV_TQ4, dim, n_kv_heads, 128, false);
    s.type = row->type;
    s.rotary_dim = row->n_tokens % 2 ? dim / 2 : 0;
    std::vector<float> rows_wide((size_t)(row->n_tokens * n_kv_heads * dim)),
        q_wide((size_t)((row->n_queries + 1) * heads * dim)); // one more: a buffer is never empty
    data_rows(61, DATA_STUDENT, rows_wide.data(), row->n_tokens * n_kv_heads, dim);
    data_rows(62, DATA_GAUSSIAN, q_wide.data(), row->n_queries * heads, dim);
    for (int t = 0; t < row->n_tokens; t++) rows_wide[(size_t)(t * n_kv_heads * dim + 5)] = 0.0f; // a channel of zeros
    const typed_rows rows = in_type(row->type, rows_wide), q = in_type(row->type, q_wide);
    std::vector<float> center(channels), scale(channels), got_center(channels, NAN), got_scale(channels, NAN);
    CHECK_RESULT(tqkv_calibrate(&s, rows.data(), row->n_tokens, row->n_queries ? q.data() : nullptr, heads,
                                row->n_queries, row->pairs, center.data(), scale.data()),
                 TQKV_OK);
    CHECK_RUN(gpu_calibrate(&s, rows.data(), row->n_tokens, row->n_queries ? q.data() : nullptr, heads, row->n_queries,
                            row->pairs, got_center.data(), got_scale.data()));
    CHECK(same_floats(center, got_center), "centres differ");
    CHECK(same_floats(scale, got_scale), "scales differ");
    test_store_free(&s);
}

void run_tables(const void *)
{
    tqkv__table_report report;
    memset(&report, 0xa5, sizeof report);
    CHECK_RUN(gpu_tables(&report));
    const char *stale = tqkv_metal_stale_table(&report);
    CHECK(!stale, "stale: %s", stale);
    CHECK(XXH3_64bits(&report.tables, sizeof report.tables) == TQKV_HASH_TABLES, "stale: some table");
}

void add_calibrations()
{
    const tqkv_type types[] = {TQKV_TYPE_F32, TQKV_TYPE_F16, TQKV_TYPE_BF16};
    const tqkv_pairs pairs[] = {TQKV_PAIRS_NONE, TQKV_PAIRS_NEIGHBOURS, TQKV_PAIRS_HALVES};
    const int dims[] = {64, 80, 128, 32};
    for (int i = 0; i < 12; i++) {
        const calibrate_row row = {types[i % 3],      dims[i % 4], i == 7 ? 1 : 16 + 7 * i,
                                   i % 2 ? 3 + i : 0, 1 + i % 4,   pairs[i / 2 % 3]};
        test_add(run_calibrate, &row, sizeof row, "calibrate/%d", i);
    }
}

void add_goldens()
{
    golden_row row = {golden_first, 0};
    char name[GOLDEN_NAME_SIZE];
    for (int i = 0; golden_next(&row.encoded); i++) {
        row.word = goldens[i];
        golden_name(&row.encoded, name);
        if (TQKV__HAS_KERNELS(row.encoded.head_dim)) test_add(run_golden, &row, sizeof row, "golden/%s", name);
    }
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
    if (format == TQKV_F16) {
        row.rotated = row.centered = true;
        test_add(run_codec, &row, sizeof row, "encode/f16/d%d/rotated", head_dim);
        test_add(run_not_finite, &row, sizeof row, "encode/f16/d%d/rotated_not_finite", head_dim);
        test_add(run_encode_kv, &row, sizeof row, "encode_kv/f16_f16/d%d/rotated", head_dim);
    }
    if (!reference_can_be_unrotated(format)) return;
    row.unrotated = true;
    test_add(run_codec, &row, sizeof row, "encode/%s/d%d/unrotated", name, head_dim);
}

// Each type in, another one out. Magnitudes go beyond those of normal halves, on both sides.
void add_types()
{
    const int head_dims[] = {48, 64, 80, 192, 1024};
    const tqkv_format formats[] = {TQKV_TQ5, TQKV_F16, TQKV_TQ3, TQKV_I8, TQKV_TQ8};
    for (int i = 0; i < 10; i++) {
        codec_row row = default_row(formats[i % 5], head_dims[i % 5]);
        row.type = i < 5 ? TQKV_TYPE_F16 : TQKV_TYPE_BF16;
        row.decoded_type = i < 5 ? TQKV_TYPE_BF16 : TQKV_TYPE_F16; // many halves lie between two bfloat16s
        const char *name = i < 5 ? "f16" : "bf16";
        test_add(run_not_finite, &row, sizeof row, "encode/%s/d%d/%s/not_finite", tqkv_format_name(row.format),
                 row.head_dim, name);
        row.centered = i % 4 == 3;
        test_add(run_codec, &row, sizeof row, "encode/%s/d%d/%s", tqkv_format_name(row.format), row.head_dim, name);
        row.ring = true; // the source begins at an odd multiple of 2 bytes
        row.n_tokens = 23;
        row.value_format = TQKV_TQ4;
        row.value_type = i < 5 ? TQKV_TYPE_BF16 : TQKV_TYPE_F32;
        row.value_dim = row.head_dim == 192 ? 128 : 0;
        test_add(run_encode_kv, &row, sizeof row, "encode_kv/%s_tq4/d%d/%s", tqkv_format_name(row.format), row.head_dim,
                 name);
    }
    for (tqkv_format format : {TQKV_F16, TQKV_TQ8})
        for (tqkv_type type : {TQKV_TYPE_F16, TQKV_TYPE_BF16}) {
            codec_row row = default_row(format, 96);
            row.kind = DATA_MAGNITUDES;
            row.type = type;
            row.decoded_type = TQKV_TYPE_F16;
            row.n_tokens = row.capacity;
            row.position = 0;
            test_add(run_codec, &row, sizeof row, "encode/%s/d96/magnitudes/%s", tqkv_format_name(format),
                     type == TQKV_TYPE_F16 ? "f16" : "bf16");
        }
}

// Keys and values of different head_dim in one dispatch.
void add_value_dims()
{
    for (tqkv_format keys : test_formats) {
        codec_row row = default_row(keys, 192);
        row.value_format = test_formats[(int)keys % TEST_FORMATS];
        row.value_dim = 128;
        row.centered = (int)keys % 2 != 0;
        test_add(run_encode_kv, &row, sizeof row, "encode_kv/%s_%s/d192_128", tqkv_format_name(keys),
                 tqkv_format_name(row.value_format));
        row.head_dim = (int)keys % 2 ? 512 : 448; // the tail in the values' place
        row.value_dim = 64;
        row.n_tokens = 5;
        test_add(run_encode_kv, &row, sizeof row, "encode_kv/%s_%s/d%d_64", tqkv_format_name(keys),
                 tqkv_format_name(row.value_format), row.head_dim);
    }
}

} // namespace

void codec_shader_cases()
{
    test_add(run_tables, nullptr, 0, "tables");
    if (!gpu_schedules[0].flush_subnormals) add_goldens();
    for (int head_dim : gpu_head_dims) {
        codec_row row = default_row(TQKV_F16, head_dim);
        test_add(run_rotate, &row, sizeof row, "rotate/d%d", head_dim);
        for (tqkv_format format : test_formats) add_codec_rows(format, head_dim);
        for (tqkv_format format : {TQKV_TQ3, TQKV_TQ4}) {
            row = default_row(format, head_dim);
            row.n_tokens = row.capacity = 60;
            test_add(run_ties, &row, sizeof row, "encode/%s/d%d/ties", tqkv_format_name(format), head_dim);
        }
    }
    if (!gpu_on_device) test_add(run_crossings, nullptr, 0, "encode/crossings");
    if (!gpu_schedules[0].flush_subnormals) add_types();
    add_value_dims();
    add_calibrations();
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

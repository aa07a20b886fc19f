// encode, probe, decode, rotate, calibrate and tables write the same bytes as the C code of tqkv.h: rows at random,
// from the seed in a case's name.
#include "forms.h"
#include "shader_cases.h"
#include "../golden.h"
#include "../goldens.h"
#include <algorithm>
#include <math.h>
#include <memory>

namespace
{

enum { HEADS = 3 };

struct codec_row {
    int seed;
    tqkv_format format;
    int head_dim;
};

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

bool same_rows(const typed_rows &a, const typed_rows &b)
{
    std::vector<float> wide[2];
    for (size_t i = 0; i < a.at.end; i++) {
        wide[0].push_back(a.value(a.bytes, i));
        wide[1].push_back(b.value(b.bytes, i));
    }
    return same_floats(wide[0].data(), wide[1].data(), a.at.end);
}

void check_same_store(const tqkv_store &a, const tqkv_store &b)
{
    CHECK(!memcmp(a.codes, b.codes, a.codes_size), "codes differ");
    CHECK(a.norms_size == 0 || !memcmp(a.norms, b.norms, a.norms_size), "norms differ");
}

// ---- Rows at random: linear stores, rings, pages and slots; types, strides, centres, scales; rows that are not finite
// ----

// Where the tokens go, of keys and of values alike: to a linear store, a ring or a table.
struct place {
    bool ring, paged;
    int64_t position;
    explicit place(data_random *random)
    {
        const int kind = data_below(random, 4);
        ring = kind == 1;
        paged = kind > 1;
        position = data_below(random, 9);
        if (ring) position = data_below(random, 2) ? 1000000000007 : data_below(random, 50);
    }
};

// Keys or values: the store that C writes and that of the GPU, filled with 0xff: other slots must stay so.
struct stream {
    tqkv_store expected, got;
    std::vector<float> center;
    std::vector<int32_t> table;
    float *scale;
    std::unique_ptr<typed_rows> rows, source; // as C takes them, and as the GPU does
    stream(tqkv_format format, int head_dim, int n_tokens, const place &at, data_random *random);
    ~stream()
    {
        test_store_free(&expected);
        test_store_free(&got);
        free(scale);
    }
    stream(const stream &) = delete;
    int make_table(int n_positions, data_random *random);
    bool spoil(data_random *random);
};

tqkv_type random_type(data_random *random)
{
    const tqkv_type types[] = {TQKV_TYPE_F32, TQKV_TYPE_F32, TQKV_TYPE_F16, TQKV_TYPE_BF16};
    return gpu_schedules[0].flush_subnormals ? TQKV_TYPE_F32 : types[data_below(random, 4)];
}

// Pages in any order, of which some tokens have none. Returns the size of a page.
int stream::make_table(int n_positions, data_random *random)
{
    const int sizes[] = {64, 1, 16, 7, 192}, size = sizes[data_below(random, 5)], n = (n_positions + size - 1) / size;
    for (int i = 0; i < n; i++) {
        table.push_back(i + 3);
        std::swap(table[(size_t)data_below(random, i + 1)], table.back());
    }
    for (int32_t &entry : table)
        if (data_below(random, 6) == 0) entry = -1;
    return size;
}

stream::stream(tqkv_format format, int head_dim, int n_tokens, const place &at, data_random *random)
    : center(), scale(nullptr)
{
    const bool off = reference_can_be_unrotated(format) && data_below(random, 3) == 0,
               on = format == TQKV_F16 && data_below(random, 2);
    const int positions = (int)at.position + n_tokens, page_size = at.paged ? make_table(positions, random) : 0,
              capacity = at.ring    ? 1 + data_below(random, n_tokens + 5)
                         : at.paged ? ((int)table.size() + 3) * page_size
                                    : positions + data_below(random, 9);
    expected = test_store(format, head_dim, HEADS, capacity, at.ring);
    if (at.paged) expected.pages = table.data();
    expected.n_pages = (int)table.size();
    expected.page_size = page_size;
    expected.rotation = off ? TQKV_ROTATION_OFF : on ? TQKV_ROTATION_ON : TQKV_ROTATION_DEFAULT;
    expected.block_scale = head_dim >= 512 && data_below(random, 2) ? 1.25f : 0.0f;
    expected.type = random_type(random);
    rows.reset(new typed_rows(expected.type, n_tokens, HEADS, head_dim, data_below(random, READ_LAYOUTS)));
    const bool narrow = expected.type != TQKV_TYPE_F32;
    const data_kind kind = (data_kind)data_below(random, DATA_KINDS);
    rows->fill((uint64_t)head_dim + (uint64_t)n_tokens, narrow && kind == DATA_EXTREMES ? DATA_STUDENT : kind, 1.0f);
    expected.strides = rows->at.strides;
    if (data_below(random, 3) == 0) scale = test_scales(9, HEADS, head_dim, 8.0);
    center.resize((size_t)(HEADS * head_dim));
    data_rows(8, DATA_GAUSSIAN, center.data(), HEADS, head_dim);
    expected.channel_scale = scale;
    expected.center = data_below(random, 2) ? center.data() : nullptr;
    got = expected;
    got.codes = test_alloc_filled(got.codes_size, 0xff);
    got.norms = got.norms_size ? (float *)test_alloc_filled(got.norms_size, 0xff) : nullptr;
}

// A row with NaN or Inf is stored like one of zeros beside no centre: C gets such a row. False: there is none.
bool stream::spoil(data_random *random)
{
    const float bad[] = {NAN, INFINITY, -INFINITY};
    const int stored = std::min(rows->n, expected.capacity),
              row = rows->n * HEADS - 1 - data_below(random, stored * HEADS);
    const bool shared = rows->at.name == std::string("shared");
    const size_t at = (size_t)data_below(random, rows->dim), size = size_of(rows->type);
    source.reset(new typed_rows(*rows));
    if (shared || (rows->type != TQKV_TYPE_F32 && expected.center) || data_below(random, 2)) return false;
    const float *const own = expected.center ? expected.center + row % HEADS * rows->dim : nullptr;
    for (size_t i = 0; i < (size_t)rows->dim; i++) rows->set(rows->row(row) + i * size, own ? own[i] : 0.0f);
    source->set(source->row(row) + at * size, bad[data_below(random, 3)]);
    return true;
}

void check_decode(tqkv_store s, int64_t position, int n, data_random *random)
{
    for (int i = 0; i < 4; i++) {
        const tqkv_basis basis = i % 2 ? TQKV_ROTATED : TQKV_ORIGINAL;
        s.type = i < 2 && !gpu_schedules[0].flush_subnormals ? TQKV_TYPE_BF16 : random_type(random);
        typed_rows expected(s.type, n, HEADS, s.head_dim, data_below(random, LAYOUTS)), got = expected;
        s.strides = expected.at.strides;
        CHECK_RESULT(tqkv_decode(&s, position, n, basis, expected.first()), TQKV_OK);
        CHECK_RUN(gpu_call(tqkv_metal_plan_decode, &s, position, n, basis, got.first()));
        CHECK(same_rows(expected, got), "decoded values differ, basis %d", (int)basis);
    }
}

void check_probe(stream &s, int n)
{
    std::vector<float> expected((size_t)(n * HEADS * s.got.head_dim)), got(expected.size(), NAN);
    CHECK_RESULT(tqkv_probe(&s.expected, s.rows->first(), n, expected.data()), TQKV_OK);
    CHECK_RUN(gpu_call(tqkv_metal_plan_probe, &s.expected, s.rows->first(), n, got.data(), nullptr));
    CHECK(same_floats(expected.data(), got.data(), got.size()), "probed values differ");
}

// Keys alone, then keys and values in one dispatch, in threadgroups of 1 to 4 simdgroups. Of a table the processor
// knows all, or nothing.
void run_codec(const void *parameters)
{
    const codec_row *row = (const codec_row *)parameters;
    data_random random = {(uint64_t)(row->seed * 100 + row->head_dim)};
    const int d = row->head_dim;
    const bool many = row->seed % 8 == 1 && d <= 128; // tokens of a head, for several simdgroups
    const int n = (many ? 70 : 1) + data_below(&random, 2 + 1000 / d),
              value_dim = d == 192 && row->seed % 2                 ? 128
                          : (d == 448 || d == 512) && row->seed % 2 ? 64
                                                                    : d;
    const tqkv_format value_format = test_formats[(row->format * 3 + row->seed) % TEST_FORMATS];
    const place at(&random);
    stream streams[2] = {{row->format, d, n, at, &random}, {value_format, value_dim, n, at, &random}};
    stream &keys = streams[0], &values = streams[1];
    const bool bad_keys = keys.spoil(&random), bad = values.spoil(&random) || bad_keys;
    for (stream &s : streams) CHECK_RESULT(tqkv_encode(&s.expected, s.rows->first(), n, at.position), TQKV_OK);
    uint32_t flags[2] = {0, 0};
    gpu_known_tables = row->seed % 2 == 0;
    gpu_most_threads = (unsigned)(1 + row->seed % 4) * simt::simd_width;
    CHECK_RUN(
        gpu_call(tqkv_metal_plan_encode, &keys.got, nullptr, keys.source->first(), nullptr, n, at.position, &flags[0]));
    check_same_store(keys.expected, keys.got);
    memset(keys.got.codes, 0xff, keys.got.codes_size);
    CHECK_RUN(gpu_call(tqkv_metal_plan_encode, &keys.got, &values.got, keys.source->first(), values.source->first(), n,
                       at.position, &flags[1]));
    for (const stream &s : streams) check_same_store(s.expected, s.got);
    CHECK(flags[0] == bad_keys && flags[1] == bad, "flags are %u and %u", flags[0], flags[1]);
    const int stored = keys.got.ring && n > keys.got.capacity ? keys.got.capacity : n;
    const bool whole = std::find(keys.table.begin(), keys.table.end(), -1) == keys.table.end();
    if (whole) check_decode(keys.expected, at.position + n - stored, stored, &random);
    check_probe(keys, n);
    gpu_known_tables = true;
    gpu_most_threads = simt::max_threads;
}

// Entries that the processor does not know leave their tokens out, and decoding reads some row of the store. 64 times
// the largest ones wraps to a slot of the store.
void run_bad_entries(const void *)
{
    enum { N = 130 };
    const int32_t bad[][2] = {{-1, 6}, {INT32_MIN, 1 << 26}}; // of 4 to 6 pages
    typed_rows rows(TQKV_TYPE_F32, N, HEADS, 64, 0);
    rows.fill(3, DATA_GAUSSIAN, 1.0f);
    std::vector<float> decoded(N * HEADS * 64);
    for (const int32_t *entries : bad) {
        data_random random = {9};
        tqkv_store shape = test_store(TQKV_TQ4, 64, HEADS, 1, false);
        pool paged(shape, 64, 192, &random), expected(shape, 64, 192, &random, &paged);
        CHECK_RESULT(tqkv_encode(&expected.store, rows.row((N - 2) * HEADS), 2, 128), TQKV_OK);
        gpu_known_tables = false;
        paged.table[0] = entries[0];
        paged.table[1] = entries[1];
        CHECK_RUN(gpu_call(tqkv_metal_plan_encode, &paged.store, nullptr, rows.first(), nullptr, N, 0, nullptr));
        CHECK(!memcmp(paged.store.codes, expected.store.codes, expected.store.codes_size), "a bad entry was followed");
        CHECK_RUN(gpu_call(tqkv_metal_plan_decode, &paged.store, 0, N, TQKV_ORIGINAL, decoded.data()));
        gpu_known_tables = true;
        test_store_free(&shape);
    }
}

// ---- What has a test of its own ----

// Rows of which several factors make the same codes, or codes that fit nearly as well: small whole numbers, and few
// that are not 0. With a scale, and without.
void run_ties(const void *parameters)
{
    enum { N = 60 };
    const codec_row row = *(const codec_row *)parameters;
    float *scale = test_scales(9, HEADS, row.head_dim, 8.0);
    for (int kind = 0; kind < 4; kind++) {
        data_random random = {(uint64_t)(row.head_dim + kind)};
        std::vector<float> source((size_t)(N * HEADS * row.head_dim));
        for (float &x : source)
            x = kind < 2 ? (float)(data_below(&random, 5) - 2) : (float)(data_below(&random, 12) / 11);
        tqkv_store expected = test_store(row.format, row.head_dim, HEADS, N, false),
                   got = test_store(row.format, row.head_dim, HEADS, N, false);
        expected.channel_scale = got.channel_scale = kind % 2 ? scale : nullptr;
        CHECK_RESULT(tqkv_encode(&expected, source.data(), N, 0), TQKV_OK);
        CHECK_RUN(gpu_call(tqkv_metal_plan_encode, &got, nullptr, source.data(), nullptr, N, 0, nullptr));
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

void run_rotate(const void *parameters)
{
    const int head_dim = *(const int *)parameters, n = 21;
    std::vector<float> expected((size_t)(n * head_dim));
    data_rows(7, DATA_GAUSSIAN, expected.data(), n, head_dim);
    std::vector<float> got = expected;
    for (tqkv_basis basis : {TQKV_ROTATED, TQKV_ORIGINAL}) {
        CHECK_RESULT(tqkv_rotate(expected.data(), n, head_dim, basis), TQKV_OK);
        CHECK_RUN(gpu_call(tqkv_metal_plan_rotate, got.data(), n, head_dim, basis));
        CHECK(same_floats(expected.data(), got.data(), got.size()), "rotated rows differ, basis %d", (int)basis);
    }
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
    std::vector<char> codes(s.codes_size), norms(s.norms_size);
    std::vector<float> source((size_t)(GOLDEN_TOKENS * GOLDEN_HEADS * c.head_dim));
    std::vector<float> center((size_t)(GOLDEN_HEADS * c.head_dim));
    std::vector<float> scale(center.size());
    golden_center(&c, center.data());
    golden_scale(&c, scale.data());
    if (c.option == GOLDEN_CENTER || c.option == GOLDEN_SCALE) s.center = center.data();
    if (c.option == GOLDEN_SCALE) s.channel_scale = scale.data();
    s.codes = codes.data();
    s.norms = (float *)(void *)norms.data();
    uint64_t hash = 0;
    for (int kind = 0; kind < DATA_KINDS; kind++) {
        if (!golden_has(&c, kind)) continue;
        std::fill(codes.begin(), codes.end(), (char)0xa5);
        std::fill(norms.begin(), norms.end(), (char)0xa5);
        data_rows((uint64_t)c.head_dim, (data_kind)kind, source.data(), GOLDEN_TOKENS * GOLDEN_HEADS, c.head_dim);
        CHECK_RUN(gpu_call(tqkv_metal_plan_encode, &s, nullptr, source.data(), nullptr, GOLDEN_TOKENS, GOLDEN_POSITION,
                           nullptr));
        hash = golden_hash(&s, hash);
    }
    CHECK(golden_word(hash) == row->word, "codes or norms");
}

// Centre and scales that rows teach, and queries perhaps, must be the processor's, bit for bit.
void run_calibrate(const void *parameters)
{
    const int seed = *(const int *)parameters, dims[] = {64, 80, 128, 32}, dim = dims[seed % 4];
    data_random random = {(uint64_t)seed + 60};
    const int n = seed == 7 ? 1 : 16 + 7 * seed, n_queries = seed % 2 ? 3 + seed : 0, heads = HEADS * (1 + seed % 4);
    const tqkv_pairs pairs[] = {TQKV_PAIRS_NONE, TQKV_PAIRS_NEIGHBOURS, TQKV_PAIRS_HALVES}, pair = pairs[seed / 2 % 3];
    tqkv_store s = test_store(TQKV_TQ4, dim, HEADS, 128, false);
    s.type = random_type(&random);
    s.rotary_dim = n % 2 ? dim / 2 : 0;
    typed_rows rows(s.type, n, HEADS, dim, 0), q(s.type, n_queries + 1, heads, dim, 0); // a buffer is never empty
    rows.fill(61, DATA_STUDENT, 1.0f);
    q.fill(62, DATA_GAUSSIAN, 1.0f);
    for (int t = 0; t < n; t++) rows.set(rows.row(t * HEADS) + 5 * size_of(s.type), 0.0f); // a channel of zeros
    const void *const queries = n_queries ? q.first() : nullptr;
    std::vector<float> learned[4];
    for (std::vector<float> &one : learned) one.assign((size_t)(HEADS * dim), NAN);
    CHECK_RESULT(
        tqkv_calibrate(&s, rows.first(), n, queries, heads, n_queries, pair, learned[0].data(), learned[1].data()),
        TQKV_OK);
    CHECK_RUN(gpu_call(tqkv_metal_plan_calibrate, &s, rows.first(), n, queries, heads, n_queries, pair,
                       learned[2].data(), learned[3].data()));
    CHECK(same_floats(learned[0].data(), learned[2].data(), learned[0].size()), "centres differ");
    CHECK(same_floats(learned[1].data(), learned[3].data(), learned[0].size()), "scales differ");
    test_store_free(&s);
}

void run_tables(const void *)
{
    tqkv__table_report report;
    memset(&report, 0xa5, sizeof report);
    CHECK_RUN(gpu_call(tqkv_metal_plan_tables, &report));
    const char *stale = tqkv_metal_stale_table(&report);
    CHECK(!stale, "stale: %s", stale);
    CHECK(!memcmp(&report.tables, &tqkv__tables, sizeof report.tables), "stale: some table");
}

void add_goldens()
{
    golden_row row;
    char name[GOLDEN_NAME_SIZE];
    for (int i = 0; golden_find(i, &row.encoded); i++) {
        row.word = goldens[i];
        golden_name(&row.encoded, name);
        if (TQKV__HAS_KERNELS(row.encoded.head_dim)) test_add(run_golden, &row, sizeof row, "golden/%s", name);
    }
}

} // namespace

void codec_shader_cases()
{
    test_add(run_tables, nullptr, 0, "tables");
    if (!gpu_schedules[0].flush_subnormals) add_goldens();
    for (int head_dim : gpu_head_dims) {
        test_add(run_rotate, &head_dim, sizeof head_dim, "rotate/d%d", head_dim);
        for (tqkv_format format : test_formats)
            for (int seed = 0; seed < (gpu_on_device ? 2 : 8); seed++) {
                const codec_row row = {seed + 8 * (int)format, format, head_dim};
                test_add(run_codec, &row, sizeof row, "encode/%s/d%d/%d", tqkv_format_name(format), head_dim, seed);
            }
        for (tqkv_format format : {TQKV_TQ3, TQKV_TQ4}) {
            const codec_row row = {0, format, head_dim};
            test_add(run_ties, &row, sizeof row, "ties/%s/d%d", tqkv_format_name(format), head_dim);
        }
    }
    test_add(run_bad_entries, nullptr, 0, "encode/bad_entries");
    if (!gpu_on_device) test_add(run_crossings, nullptr, 0, "encode/crossings");
    for (int i = 0; i < 12; i++) test_add(run_calibrate, &i, sizeof i, "calibrate/%d", i);
}

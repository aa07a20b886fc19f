// The index: scores within a bound of double precision, the choice of blocks exactly the processor's.
#include "shader_cases.h"
#include <algorithm>
#include <math.h>

namespace
{

// ---- Scores ----

struct score_row {
    tqkv_format format;
    int head_dim, n_heads, n_queries, capacity;
    int64_t end;
    int kv_len, ratio, block;
    tqkv_pool pool;
    bool relu, weights, ring;
    float center;
    int page_size;
    tqkv_type type;
};

// An index with its arrays. Keys that no query sees are NaN.
struct scored {
    tqkv_store keys;
    tqkv_index x;
    std::vector<float> weights, center, q;
    std::vector<uint16_t> narrow;
    std::vector<int32_t> table;
    explicit scored(const score_row &row);
    ~scored() { test_store_free(&keys); }
    scored(const scored &) = delete;
    const void *queries() const { return x.query_type == TQKV_TYPE_F32 ? (const void *)q.data() : narrow.data(); }
};

scored::scored(const score_row &row) : keys(test_store(row.format, row.head_dim, 1, row.capacity, row.ring)), x()
{
    const int n = row.n_heads * row.n_queries, first = row.ring ? std::max((int)row.end - row.capacity, 0) : 0;
    const int count = (int)row.end - first;
    std::vector<float> rows((size_t)(count * row.head_dim));
    data_rows(41, DATA_GAUSSIAN, rows.data(), count, row.head_dim);
    q.resize((size_t)(n * row.head_dim));
    data_rows(42, DATA_STUDENT, q.data(), n, row.head_dim);
    for (size_t i = 0; i < q.size(); i++) q[i] *= i % 5 ? 1.0f : 3.0f;
    if (row.type == TQKV_TYPE_BF16)
        for (float &f : q) {
            uint32_t word;
            memcpy(&word, &f, 4);
            narrow.push_back((uint16_t)(word >> 16));
            word &= 0xffff0000u;
            memcpy(&f, &word, 4);
        }
    for (int i = 0; i < n && row.weights; i++) weights.push_back(0.1f * (float)(i % 13) - 0.4f);
    for (int i = 0; i < row.head_dim && row.center != 0.0f; i++) center.push_back(row.center * (float)(i % 7 - 3));
    keys.center = center.empty() ? nullptr : center.data();
    for (size_t i = 0; i < rows.size() && keys.center; i++) rows[i] += center[i % center.size()];
    for (int p = 0; row.page_size && p < row.capacity / row.page_size; p++)
        table.push_back(row.capacity / row.page_size - 1 - p);
    if (row.page_size) {
        keys.pages = table.data();
        keys.n_pages = (int)table.size();
        keys.page_size = row.page_size;
    }
    CHECK_RESULT(tqkv_encode(&keys, rows.data(), count, first), TQKV_OK);
    for (int64_t p = first; row.kv_len && p < row.end - row.kv_len; p++) attend_poison_position(&keys, p, true);
    x.keys = &keys;
    x.n_heads = row.n_heads;
    x.n_queries = row.n_queries;
    x.end = row.end;
    x.kv_len = row.kv_len;
    x.ratio = row.ratio;
    x.weights = row.weights ? weights.data() : nullptr;
    x.relu = row.relu;
    x.block = row.block;
    x.pool = row.pool;
    x.query_type = row.type;
}

void run_scores(const void *parameters)
{
    const score_row &row = *(const score_row *)parameters;
    const scored s(row);
    const size_t n = (size_t)((row.end + row.block - 1) / row.block), all = n * (size_t)row.n_queries;
    std::vector<float> got(all, NAN), alone(n, NAN);
    std::vector<double> expected(n), allowed(n);
    gpu_known_tables = row.head_dim == 64;
    CHECK_RUN(gpu_index_scores(&s.x, s.queries(), got.data()));
    const int64_t first = row.end - (row.kv_len ? row.kv_len : std::min<int64_t>(row.end, row.capacity));
    double *keys = reference_decode_all(&s.keys, 0, first, row.end, REFERENCE_FLOATS);
    for (int i = 0; i < row.n_queries; i++) {
        reference_index_scores(REFERENCE_FLOATS, &s.x, i, s.q.data(), keys, first, expected.data(), allowed.data());
        for (size_t b = 0; b < n; b++) {
            const double score = (double)got[(size_t)i * n + b];
            CHECK(score == expected[b] || fabs(score - expected[b]) <= allowed[b], "query %d, block %zu: %g, not %g", i,
                  b, score, expected[b]);
        }
    }
    free(keys);
    tqkv_index last = s.x; // the same bits alone
    last.n_queries = 1;
    if (row.weights) last.weights += (row.n_queries - 1) * row.n_heads;
    const size_t width = row.type == TQKV_TYPE_F32 ? 4 : 2;
    CHECK_RUN(gpu_index_scores(
        &last, (const char *)s.queries() + (size_t)((row.n_queries - 1) * row.n_heads * row.head_dim) * width,
        alone.data()));
    CHECK(!memcmp(&got[all - n], alone.data(), n * sizeof(float)), "other bits alone");
    gpu_known_tables = true;
}

void add_scores()
{
    const tqkv_type f32 = TQKV_TYPE_F32;
    const score_row rows[] = {
        {TQKV_TQ4, 128, 64, 2, 300, 300, 0, 1, 1, TQKV_POOL_MAX, true, true, false, 0.0f, 0, f32},
        {TQKV_TQ4, 64, 3, 4, 300, 290, 0, 1, 1, TQKV_POOL_MAX, false, false, false, 0.0f, 0, f32},
        {TQKV_I8, 128, 40, 3, 320, 310, 0, 4, 16, TQKV_POOL_MEAN, true, true, false, 0.0f, 64, f32},
        {TQKV_F16, 64, 16, 2, 200, 500, 0, 1, 64, TQKV_POOL_MAX, true, true, true, 0.0f, 0, f32},
        {TQKV_TQ6, 64, 9, 5, 333, 333, 100, 2, 7, TQKV_POOL_MEAN, false, true, false, 0.5f, 0, f32},
        {TQKV_TQ8, 128, 8, 1, 1200, 1200, 0, 1, 1100, TQKV_POOL_MEAN, true, false, false, 0.0f, 0, f32},
        {TQKV_TQ2, 64, 65, 1, 640, 640, 0, 128, 40, TQKV_POOL_MAX, true, true, false, 0.0f, 64, f32},
        {TQKV_TQ3, 128, 1, 12, 20, 5, 0, 1, 1, TQKV_POOL_MAX, true, true, false, 0.3f, 0, f32},
        {TQKV_TQ5, 128, 32, 2, 2300, 2300, 2100, 1, 2300, TQKV_POOL_MAX, false, true, false, 0.0f, 0, TQKV_TYPE_BF16},
        {TQKV_TQ5_BYTES, 64, 17, 2, 90, 90, 0, 1, 3, TQKV_POOL_MEAN, true, true, false, 0.0f, 0, f32}};
    for (const score_row &row : rows)
        test_add(run_scores, &row, sizeof row, "index/scores/%s/d%d/heads%d_block%d", tqkv_format_name(row.format),
                 row.head_dim, row.n_heads, row.block);
}

// ---- The choice ----

struct choose_row {
    int n_queries, end, kv_len, ratio, block, first, newest, k,
        values; // values: of different scores; 0: all differ; -2: zeros
};

float score_at_random(const choose_row &row, data_random *random)
{
    const float special[] = {INFINITY, -INFINITY, 0.0f, -0.0f, 1e-40f, -1e-40f, 3.0e38f, -3.0e38f};
    if (row.values == -2) return data_below(random, 2) ? 0.0f : -0.0f;
    if (row.values < 0 && data_below(random, 4) == 0) return special[data_below(random, 8)];
    if (row.values > 0) return (float)(data_below(random, row.values) - row.values / 2);
    return ((float)data_below(random, 1 << 24) - 8e6f) * (data_below(random, 2) ? 1e-3f : 1e3f);
}

// Blocks that no query sees have scores, too.
void run_choose(const void *parameters)
{
    const choose_row row = *(const choose_row *)parameters;
    data_random random = {(uint64_t)(row.end + row.k)};
    tqkv_store keys = test_store(TQKV_TQ4, 64, 1, std::max(row.end, 1), false);
    tqkv_index x = {};
    x.keys = &keys;
    x.n_heads = 1;
    x.n_queries = row.n_queries;
    x.end = row.end;
    x.kv_len = row.kv_len;
    x.ratio = row.ratio;
    x.block = row.block;
    x.first = row.first;
    x.newest = row.newest;
    x.positions = row.end * row.ratio + (row.n_queries > 1 ? row.ratio / 2 : 0);
    const size_t n = (size_t)((row.end + row.block - 1) / row.block), k = (size_t)row.k;
    std::vector<float> scores(n * (size_t)row.n_queries + 1);
    std::vector<int32_t> list(k * (size_t)row.n_queries, 77), expected(list);
    for (float &score : scores) score = score_at_random(row, &random);
    CHECK_RESULT(tqkv_index_choose(&x, scores.data(), row.k, expected.data()), TQKV_OK);
    CHECK_RUN(gpu_index_choose(&x, scores.data(), row.k, list.data()));
    for (size_t i = 0; i < list.size(); i++)
        CHECK(list[i] == expected[i], "query %zu, entry %zu: %d, not %d", i / k, i % k, list[i], expected[i]);
    test_store_free(&keys);
}

void add_choose()
{
    const choose_row rows[] = {{1, 1, 0, 1, 1, 0, 0, 1, 0},
                               {1, 300, 0, 1, 1, 0, 0, 40, 0},
                               {1, 300, 0, 1, 1, 0, 0, 300, 0},
                               {1, 300, 9, 1, 1, 0, 0, 400, 0},
                               {3, 700, 0, 1, 1, 4, 9, 100, 3},
                               {5, 500, 0, 4, 1, 1, 2, 60, -1},
                               {2, 900, 300, 1, 7, 99, 3, 50, 2},
                               {9, 6, 0, 1, 1, 2, 2, 5, 0},
                               {1, 1000, 0, 1, 1, 0, 0, 999, 1},
                               {1, 2000, 0, 1, 1, 30, 40, 64, 0},
                               {1, 640, 0, 1, 64, 9, 9, 4, 0},
                               {40, 200, 0, 128, 1, 0, 1, 17, -1},
                               {2, 4096, 0, 1, 1, 0, 0, 512, 5},
                               {1, 17000, 0, 1, 1, 1, 1, 700, 0},
                               {2, 20000, 19000, 1, 1, 3, 2, 9000, 4},
                               {1, 33000, 30000, 2, 1, 0, 5, 64, -1},
                               {1, 0, 0, 1, 1, 1, 1, 4, 0},
                               {1, 200, 0, 1, 1, 0, 0, 90, -2}};
    for (const choose_row &row : rows)
        test_add(run_choose, &row, sizeof row, "index/choose/%d_of_%d_by_%d_values%d", row.k, row.end, row.block,
                 row.values);
}

// NaN is chosen only where the block always is; nothing is read or written outside.
void run_nan(const void *)
{
    tqkv_store keys = test_store(TQKV_TQ4, 64, 1, 200, false);
    tqkv_index x = {};
    x.keys = &keys;
    x.n_heads = x.n_queries = 1;
    x.end = 200;
    x.newest = 1;
    std::vector<float> scores(200, NAN);
    std::vector<int32_t> list(4, 7);
    scores[31] = -5.0f;
    scores[99] = INFINITY;
    CHECK_RUN(gpu_index_choose(&x, scores.data(), 4, list.data()));
    CHECK(list[0] == 31 && list[1] == 99 && list[2] == 199 && list[3] == -1, "%d %d %d %d", list[0], list[1], list[2],
          list[3]);
    test_store_free(&keys);
}

} // namespace

void index_shader_cases()
{
    add_scores();
    add_choose();
    test_add(run_nan, nullptr, 0, "index/choose/nan");
}

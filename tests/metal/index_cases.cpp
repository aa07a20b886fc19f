// The index: scores within a bound of double precision, the choice of blocks exactly the processor's.
#include "shader_cases.h"
#include "../index_fixture.h"
#include <algorithm>
#include <math.h>

namespace
{

void run_scores(const void *parameters)
{
    const int seed = *(const int *)parameters;
    index_problem p;
    index_set_up(&p, seed, seed % 2 ? 64 : 128);
    const tqkv_index *x = &p.index;
    const size_t n = (size_t)p.n_blocks, all = n * (size_t)x->n_queries, width = x->query_type == TQKV_TYPE_F32 ? 4 : 2;
    std::vector<float> got(all, NAN), alone(n, NAN);
    std::vector<double> expected(n), allowed(n);
    for (int64_t at = p.first - 1; at >= 0 && !p.keys.ring; at--) attend_poison_position(&p.keys, at, true);
    gpu_known_tables = seed % 4 < 2;
    CHECK_RUN(gpu_call(tqkv_metal_plan_index_scores, x, index_queries(&p), got.data()));
    double *keys = reference_decode_all(&p.keys, 0, p.first, x->end, REFERENCE_FLOATS);
    for (int i = 0; i < x->n_queries; i++) {
        reference_index_scores(REFERENCE_FLOATS, x, i, p.q, keys, p.first, expected.data(), allowed.data());
        for (size_t b = 0; b < n; b++) {
            const double score = (double)got[(size_t)i * n + b];
            CHECK(score == expected[b] || fabs(score - expected[b]) <= allowed[b], "query %d, block %zu: %g, not %g", i,
                  b, score, expected[b]);
        }
    }
    free(keys);
    tqkv_index last = *x; // the same bits alone
    const int row = (x->n_queries - 1) * x->n_heads;
    last.n_queries = 1;
    if (last.weights) last.weights += row;
    CHECK_RUN(gpu_call(tqkv_metal_plan_index_scores, &last,
                       (const char *)index_queries(&p) + (size_t)(row * p.keys.head_dim) * width, alone.data()));
    CHECK(!memcmp(&got[all - n], alone.data(), n * sizeof(float)), "other bits alone");
    gpu_known_tables = true;
    index_tear_down(&p);
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

std::string choose(const tqkv_index &x, const std::vector<float> &scores, int k, std::vector<int32_t> &list)
{
    tqkv_metal_plan plan;
    const std::vector<uint32_t> memory = gpu_plan_in_scratch(plan, [&](const void *scratch, tqkv_metal_plan *to) {
        gpu_plan(tqkv_metal_plan_index_choose, &x, scores.data(), k, scratch, list.data(), to);
    });
    return gpu_run(plan);
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
    CHECK_RUN(choose(x, scores, row.k, list));
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
    CHECK_RUN(choose(x, scores, 4, list));
    CHECK(list[0] == 31 && list[1] == 99 && list[2] == 199 && list[3] == -1, "%d %d %d %d", list[0], list[1], list[2],
          list[3]);
    test_store_free(&keys);
}

} // namespace

void index_shader_cases()
{
    for (int seed = 0; seed < (gpu_on_device ? 8 : 30); seed++)
        test_add(run_scores, &seed, sizeof seed, "index/scores/d%d/%d", seed % 2 ? 64 : 128, seed);
    add_choose();
    test_add(run_nan, nullptr, 0, "index/choose/nan");
}

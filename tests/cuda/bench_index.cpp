// Times an index: the scores of one query, and the choice of the best keys.
#include "bench.h"

namespace
{

enum { INDEX_KEYS = 262144, INDEX_HEADS = 64, CHOSEN = 2048 };

// The index's arrays on the device.
struct index_memory {
    std::vector<tqkv_store> keys; // copies
    float *q, *weights, *scores;
    uint32_t *scratch;
    int32_t *list;
};

tqkv_index index_of(const tqkv_store &keys, const float *weights)
{
    tqkv_index x = {};
    x.keys = &keys;
    x.n_heads = INDEX_HEADS;
    x.n_queries = 1;
    x.end = INDEX_KEYS;
    x.relu = true;
    x.weights = weights;
    return x;
}

void score_index(const index_memory &m, size_t copy)
{
    tqkv_metal_plan plan;
    static float not_read; // NULL would be no weights
    const tqkv_index x = index_of(m.keys[copy], opt.list ? &not_read : m.weights);
    check_plan(gpu_plan(tqkv_metal_plan_index_scores, &x, m.q, m.scores, &plan));
    launch(plan);
}

void choose_index(const index_memory &m)
{
    tqkv_metal_plan plan;
    const tqkv_index x = index_of(m.keys[0], nullptr);
    check_plan(gpu_plan(tqkv_metal_plan_index_choose, &x, m.scores, CHOSEN, m.scratch, m.list, &plan));
    launch(plan);
}

index_memory make_index(tqkv_format format)
{
    index_memory m = {};
    for (double bytes = 0.0; needs_copies(bytes, m.keys.size()); bytes += stored_bytes(m.keys.back()))
        m.keys.push_back(make_stream(format, 128, INDEX_KEYS, 1, 51 + (uint32_t)m.keys.size()));
    m.q = gaussian_array(INDEX_HEADS * 128, 79);
    m.weights = gaussian_array(INDEX_HEADS, 80);
    m.scores = device_array<float>(INDEX_KEYS);
    m.scratch = device_array<uint32_t>((size_t)TQKV__CHOOSE_SCRATCH(64, INDEX_KEYS));
    m.list = device_array<int32_t>(CHOSEN);
    return m;
}

// The scores are those of C, and the choice among them is C's.
void check_index(const std::string &name, const index_memory &m)
{
    score_index(m, 0);
    choose_index(m);
    const std::vector<float> q = on_host(m.q, INDEX_HEADS * 128), weights = on_host(m.weights, INDEX_HEADS),
                             scores = on_host(m.scores, INDEX_KEYS);
    const std::vector<int32_t> list = on_host(m.list, CHOSEN);
    std::vector<float> expected(INDEX_KEYS);
    std::vector<int32_t> chosen(CHOSEN);
    const host_head keys(m.keys[0]);
    const tqkv_index x = index_of(keys.store, weights.data());
    check_plan(tqkv_index_scores(&x, q.data(), expected.data()));
    check_plan(tqkv_index_choose(&x, scores.data(), CHOSEN, chosen.data()));
    double most = 0.0, largest = 0.0;
    for (size_t i = 0; i < scores.size(); i++) {
        most = std::max(most, fabs((double)scores[i] - expected[i]));
        largest = std::max(largest, fabs((double)expected[i]));
    }
    if (list != chosen) printf("another choice\n");
    report_right(name, most <= (has_integers(&m.keys[0]) ? 0.035 : 4e-5) * largest && list == chosen, most / largest);
}

} // namespace

void bench_index(tqkv_format format)
{
    const std::string name = std::string("index/") + tqkv_format_name(format) + "/d128/h64/262144";
    if (!is_wanted(name)) return;
    const device_scope scope;
    const index_memory m = make_index(format);
    run_bench((int)m.keys.size(), [&] { check_index(name, m); },
              {{name + "/scores", [&](int i) { score_index(m, (size_t)i); }},
               {name + "/choose", [&](int) { choose_index(m); }}});
}

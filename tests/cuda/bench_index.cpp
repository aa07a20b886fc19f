// Times an index, the choice of its best keys, and attention over lists of blocks.
#include "bench.h"

// ---- An index ----

namespace
{

enum { INDEX_KEYS = 262144, INDEX_HEADS = 64, CHOSEN = 2048, CHOICE_STEPS = 3 };

// The index's arrays on the device.
struct index_memory {
    std::vector<tqkv_store> keys;
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

void force_index(tqkv_metal_dispatch *d)
{
    tqkv__index_args args;
    memcpy(&args, d->arguments[0].bytes, sizeof args);
    if (opt.columns) {
        d->kernel.constants[TQKV_FC_COLUMNS] = (uint8_t)(std::min(opt.columns, (int)INDEX_HEADS) + 1);
        const int matrices = TQKV__MATRICES(d->kernel.constants[TQKV_FC_COLUMNS] - 1);
        d->memory[1] = (size_t)TQKV__MATRIX_QUERY_BYTES(128) * (size_t)matrices;
        d->memory[3] = (size_t)TQKV__COLUMN_BYTES(8 * matrices);
    }
    if (opt.n_simdgroups) d->n_simdgroups = opt.n_simdgroups;
    if (!opt.index_keys) return;
    args.blocks_each = opt.index_keys / args.block;
    d->grid[0] = (size_t)((args.n_blocks + args.blocks_each - 1) / args.blocks_each);
    memcpy(d->arguments[0].bytes, &args, sizeof args);
}

void score_index(const index_memory &m, size_t copy)
{
    tqkv_metal_plan plan;
    static float not_read; // NULL would be no weights
    const gpu_index x(index_of(m.keys[copy], opt.list ? &not_read : m.weights));
    check_plan(tqkv_metal_plan_index_scores(&x.metal, gpu_buffer(m.q), gpu_buffer(m.scores), &plan));
    force_index(&plan.d[0]);
    launch(plan.d[0]);
}

// only: one of the dispatches alone; -1: all
void choose_index(const index_memory &m, int only = -1)
{
    tqkv_metal_plan plan;
    const gpu_index x(index_of(m.keys[0], nullptr));
    check_plan(tqkv_metal_plan_index_choose(&x.metal, gpu_buffer(m.scores), CHOSEN, gpu_buffer(m.scratch),
                                            gpu_buffer(m.list), &plan));
    for (int i = 0; i < plan.n; i++)
        if (only < 0 || i == only) launch(plan.d[i]);
}

index_memory make_index(tqkv_format format)
{
    index_memory m = {};
    double bytes = 0.0;
    while (needs_copies(bytes, m.keys.size())) {
        m.keys.push_back(make_stream(format, 128, INDEX_KEYS, 1));
        fill_stream(m.keys.back(), 50 + (uint32_t)m.keys.size());
        bytes += stored_bytes(m.keys.back());
    }
    m.q = device_array<float>(INDEX_HEADS * 128);
    m.weights = device_array<float>(INDEX_HEADS);
    m.scores = device_array<float>(INDEX_KEYS);
    m.scratch = device_array<uint32_t>((size_t)TQKV__CHOOSE_SCRATCH(64, INDEX_KEYS));
    m.list = device_array<int32_t>(CHOSEN);
    if (opt.list) return m;
    bench_fill(m.q, INDEX_HEADS * 128, 79, stream);
    bench_fill(m.weights, INDEX_HEADS, 80, stream);
    return m;
}

// The scores are those of C, and the choice among them is C's.
void check_index(const std::string &name, const index_memory &m)
{
    std::vector<char> codes;
    score_index(m, 0);
    choose_index(m);
    const std::vector<float> q = on_host(m.q, INDEX_HEADS * 128), weights = on_host(m.weights, INDEX_HEADS),
                             scores = on_host(m.scores, INDEX_KEYS);
    const std::vector<int32_t> list = on_host(m.list, CHOSEN);
    std::vector<float> norms, expected(INDEX_KEYS);
    std::vector<int32_t> chosen(CHOSEN);
    const tqkv_store keys = head_on_host(m.keys[0], codes, norms);
    const tqkv_index x = index_of(keys, weights.data());
    check_plan(tqkv_index_scores(&x, q.data(), expected.data()));
    check_plan(tqkv_index_choose(&x, scores.data(), CHOSEN, chosen.data()));
    double most = 0.0, largest = 0.0;
    for (size_t i = 0; i < scores.size(); i++) {
        most = std::max(most, fabs((double)scores[i] - expected[i]));
        largest = std::max(largest, fabs((double)expected[i]));
    }
    const bool right = most <= 4e-5 * largest && list == chosen;
    printf("error %s %.2g%s\n", name.c_str(), most / largest, list == chosen ? "" : ", another choice");
    if (!right) printf("WRONG %s\n", name.c_str());
    n_wrong += !right;
}

} // namespace

// Scores of one query, and the choice of the best keys.
void bench_index(tqkv_format format)
{
    const std::string name = std::string("index/") + tqkv_format_name(format) + "/d128/h64/262144";
    if (!is_wanted(name)) return;
    const index_memory m = make_index(format);
    if (opt.list) {
        score_index(m, 0);
        return choose_index(m);
    }
    check_index(name, m);
    if (!opt.check) {
        report(name + "/scores", time_calls((int)m.keys.size(), [&](int i) { score_index(m, (size_t)i); }));
        report(name + "/choose", time_calls(1, [&](int) { choose_index(m); }));
        for (int i = 0; i < CHOICE_STEPS; i++)
            report(name + "/choose/" + std::to_string(i), time_calls(1, [&](int) { choose_index(m, i); }));
        report_ratio(name + "/scores/read", stored_bytes(m.keys[0]) / copy_bandwidth * 2e6 / times[name + "/scores"]);
        report_ratio(name + "/choose/scores", times[name + "/choose"] / times[name + "/scores"]);
        CUDA(cudaMemset(m.scores, 0, (size_t)INDEX_KEYS * sizeof(float)));
        report(name + "/choose/equal", time_calls(1, [&](int) { choose_index(m); }));
    }
    for (const tqkv_store &s : m.keys) free_stream(s);
    for (void *pointer : {(void *)m.q, (void *)m.weights, (void *)m.scores, (void *)m.scratch, (void *)m.list})
        CUDA(cudaFree(pointer));
}

// ---- Lists ----

namespace
{

struct list_memory {
    std::vector<tqkv_store> keys, values;
    float *q, *out, *scratch;
    int32_t *list;
    int n_kv_heads, positions, group, block, length;
};

enum { LISTED = 2048 };
enum list_part { LIST_ALL = 1, LIST_CLEAN = 2, LIST_ATTEND = 4, LIST_MERGE = 8 }; // LIST_ALL: no list

tqkv_attention list_call(const list_memory &m, const tqkv_store &keys, const tqkv_store &values, int n_heads)
{
    tqkv_attention call = attention_over(keys, values, n_heads, 1);
    call.end = m.positions;
    call.list.length = m.length;
    call.list.block = m.block;
    return call;
}

// As tqkv.h plans it for any GPU.
void attend_list(const list_memory &m, size_t copy, int parts)
{
    tqkv_metal_plan plan;
    static int32_t not_read; // NULL would be no list
    const bool listed = !(parts & LIST_ALL);
    tqkv_attention call = list_call(m, m.keys[copy], m.values[copy], m.group * m.n_kv_heads);
    gpu_attention planned(call);
    if (listed) planned.metal.list = gpu_buffer(opt.list ? &not_read : m.list);
    check_plan(
        tqkv_metal_plan_attend(&planned.metal, gpu_buffer(m.q), gpu_buffer(m.scratch), gpu_buffer(m.out), &plan));
    if (parts & LIST_CLEAN) launch(plan.d[0]);
    if (parts & LIST_ATTEND) launch(plan.d[plan.n - 2]);
    if (parts & LIST_MERGE) launch(plan.d[plan.n - 1]);
}

std::vector<int32_t> list_at_random(int positions, int block)
{
    std::vector<int32_t> list;
    const int every = positions / LISTED;
    for (int i = 0; i < LISTED / block; i++) list.push_back(i * every + i * 7919 % every);
    return list;
}

void check_list(const std::string &name, const list_memory &m, const std::vector<int32_t> &list)
{
    std::vector<char> key_codes, value_codes;
    std::vector<float> key_norms, value_norms;
    const tqkv_store k = head_on_host(m.keys[0], key_codes, key_norms),
                     v = head_on_host(m.values[0], value_codes, value_norms);
    const size_t n = (size_t)(m.group * 128), first = n * CHECKED_HEAD;
    attend_list(m, 0, LIST_CLEAN | LIST_ATTEND | LIST_MERGE);
    const std::vector<float> q = on_host(m.q + first, n), got = on_host(m.out + first, n);
    std::vector<float> expected(n);
    tqkv_attention c = list_call(m, k, v, m.group);
    c.list.rows = list.data();
    check_plan(tqkv_attend(&c, q.data(), expected.data()));
    report_error(name, got, expected, 128, c);
}

list_memory make_list(tqkv_format format, int n_kv_heads, int positions, int group)
{
    list_memory m = {};
    double bytes = 0.0;
    while (needs_copies(bytes, m.keys.size())) {
        m.keys.push_back(make_stream(format, 128, positions, n_kv_heads));
        m.values.push_back(make_stream(format, 128, positions, n_kv_heads));
        fill_stream(m.keys.back(), 90 + (uint32_t)m.keys.size());
        fill_stream(m.values.back(), 190 + (uint32_t)m.keys.size());
        bytes += 2.0 * stored_bytes(m.keys.back());
    }
    const size_t n = (size_t)(group * n_kv_heads * 128);
    m.q = device_array<float>(n);
    m.out = device_array<float>(n);
    m.scratch = device_array<float>((size_t)64 << 20);
    m.list = device_array<int32_t>(LISTED);
    m.n_kv_heads = n_kv_heads;
    m.positions = positions;
    m.group = group;
    if (!opt.list) bench_fill(m.q, n, 81, stream);
    return m;
}

} // namespace

// Times attention over the positions that there are, without a list.
static void time_without_list(const std::string &name, const list_memory &m)
{
    const auto call = [&](int i) { attend_list(m, (size_t)i, LIST_ALL | LIST_ATTEND | LIST_MERGE); };
    if (opt.list)
        call(0);
    else if (!opt.check)
        report(name, time_calls((int)m.keys.size(), call));
}

// 2,048 positions in blocks of 1 and 64, against all of them.
void bench_list(tqkv_format format, int n_kv_heads, int positions, int group)
{
    const std::string name = std::string("list/") + tqkv_format_name(format) + "/d128/kv" + std::to_string(n_kv_heads) +
                             "/g" + std::to_string(group) + "/" + std::to_string(positions);
    if (!is_wanted(name)) return;
    list_memory m = make_list(format, n_kv_heads, positions, group);
    time_without_list(name, m);
    list_memory few = m;
    few.positions = LISTED;
    time_without_list(name + "/first" + std::to_string((int)LISTED), few);
    for (int block : {1, 64}) {
        const std::string own = name + "/block" + std::to_string(block);
        const std::vector<int32_t> list = list_at_random(positions, block);
        m.block = block;
        m.length = (int)list.size();
        if (!opt.list) CUDA(cudaMemcpy(m.list, list.data(), list.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
        if (opt.list) {
            attend_list(m, 0, LIST_CLEAN | LIST_ATTEND | LIST_MERGE);
            continue;
        }
        check_list(own, m, list);
        if (opt.check) continue;
        const std::pair<const char *, int> parts[] = {{"", LIST_CLEAN | LIST_ATTEND | LIST_MERGE},
                                                      {"/clean", LIST_CLEAN},
                                                      {"/attend", LIST_ATTEND},
                                                      {"/merge", LIST_MERGE}};
        for (const std::pair<const char *, int> &part : parts)
            report(own + part.first,
                   time_calls((int)m.keys.size(), [&](int i) { attend_list(m, (size_t)i, part.second); }));
        report_ratio(own + "/all", times[own] / times[name]);
    }
    if (opt.list) return;
    for (const tqkv_store &s : m.keys) free_stream(s);
    for (const tqkv_store &s : m.values) free_stream(s);
    for (void *pointer : {(void *)m.q, (void *)m.out, (void *)m.scratch, (void *)m.list}) CUDA(cudaFree(pointer));
}

// Times attention, and batches of sequences over one pool of pages.
#include "bench.h"

namespace
{

// ---- Attention ----

struct attend_shape {
    tqkv_format keys, values;
    int head_dim, group, n_queries, positions;
    bool scaled;
};

std::string shape_name(const attend_shape &s)
{
    std::string formats = tqkv_format_name(s.keys);
    if (s.values != s.keys) formats += std::string("_") + tqkv_format_name(s.values);
    return "attend/" + formats + "/d" + std::to_string(s.head_dim) + "/g" + std::to_string(s.group) + "/q" +
           std::to_string(s.n_queries) + "/" + std::to_string(s.positions) + (s.scaled ? "/scaled" : "");
}

struct attention {
    attend_shape shape;
    gpu_split split;
    int n_rows;
    float *q, *out, *sums, *state;
};

// Whether narrow groups multiply matrices on this GPU (tqkv__choose_matrix has the times).
bool gains_at_two(const tqkv_store &s) { return (s.format == TQKV_TQ4 || s.format == TQKV_I8) && s.head_dim <= 256; }

void plan_attention(const attention &a, const tqkv_store &keys, const tqkv_store &values, tqkv_metal_dispatch d[2])
{
    gpu_attention planned(attention_over(keys, values, a.shape.group * N_KV_HEADS, a.shape.n_queries));
    planned.metal.matrix_group = gains_at_two(keys) && gains_at_two(values) ? 2 : 0;
    tqkv_metal_plan plan;
    check_plan(tqkv_metal_plan_attend(&planned.metal, gpu_buffer(a.q), gpu_buffer(nullptr), gpu_buffer(a.out), &plan));
    std::copy(plan.d, plan.d + 2, d);
    gpu_force(d, a.split);
    gpu_set_scratch(d, a.sums, a.state);
}

// The plan of tqkv.h is for Apple's GPUs, whose number of cores it does not know. Here the stretches fill all
// multiprocessors of this GPU once. Where rows alone do that, the plan stays, and for short contexts.
gpu_split choose_split(attention a, const tqkv_store &keys, const tqkv_store &values)
{
    tqkv_metal_dispatch d[2];
    if (opt.planned || (a.shape.positions <= SHORT_CONTEXT && a.shape.n_queries <= 8)) return {0, 0, 0, 0, opt.kernel};
    a.split.kernel = opt.kernel;
    plan_attention(a, keys, values, d);
    if (d[0].kernel.family == TQKV_METAL_ATTEND_MATRIX) { // this GPU has registers for more than the plan's
        a.split.columns = std::min(a.shape.n_queries * a.shape.group, opt.columns ? opt.columns : MATRIX_ROWS);
        plan_attention(a, keys, values, d);
    }
    const int columns = d[0].kernel.constants[TQKV_FC_COLUMNS] - 1;
    const bool few = columns <= 2 && a.shape.head_dim <= 128 && d[0].kernel.family == TQKV_METAL_ATTEND;
    const int n_simdgroups = opt.n_simdgroups ? opt.n_simdgroups : few ? 8 : 4;
    a.split = {columns, n_simdgroups, 0, 0, opt.kernel};
    plan_attention(a, keys, values, d);
    const int wave = threadgroups_at_once(d[0]);
    if (opt.stretches) return {columns, n_simdgroups, opt.stretches, GPU_EVERYTHING, opt.kernel};
    const int tiles = (a.shape.positions + TQKV__SIMD_WIDTH - 1) / TQKV__SIMD_WIDTH;
    const int wanted = wave / (int)(d[0].grid[0] * d[0].grid[1]), allowed = tiles / (2 * n_simdgroups);
    // A product rounds its sum towards 0: a simdgroup adds up at most 64 tiles. Else the errors of a million positions
    // add up to 4e-5.
    const int least = d[0].kernel.family == TQKV_METAL_ATTEND_MATRIX ? tiles / (64 * n_simdgroups) : 1;
    const int n = std::max(least, std::min(wanted, allowed));
    return {columns, n_simdgroups, wanted > 1 ? std::max(1, n) : 0, 0, opt.kernel};
}

attention make_attention(const attend_shape &shape, const tqkv_store &keys, const tqkv_store &values)
{
    attention a = {};
    tqkv_metal_dispatch d[2];
    a.shape = shape;
    a.split = choose_split(a, keys, values);
    a.n_rows = shape.n_queries * shape.group * N_KV_HEADS;
    plan_attention(a, keys, values, d);
    const size_t n = (size_t)a.n_rows * (size_t)shape.head_dim;
    a.q = device_array<float>(n);
    a.out = device_array<float>(n);
    a.sums = device_array<float>(gpu_find(&d[0], 6)->size / sizeof(float));
    a.state = device_array<float>(gpu_find(&d[0], 7)->size / sizeof(float));
    if (!opt.list) bench_fill(a.q, n, 77, stream);
    return a;
}

void free_attention(const attention &a)
{
    for (float *pointer : {a.q, a.out, a.sums, a.state}) CUDA(cudaFree(pointer));
}

void attend(const attention &a, const tqkv_store &keys, const tqkv_store &values)
{
    tqkv_metal_dispatch d[2];
    plan_attention(a, keys, values, d);
    launch(d[0]);
    launch(d[1]);
}

// From [n_queries][n_heads][D] on the device, [n_queries][group][D] of the checked head.
std::vector<float> rows_of_head(const attention &a, const float *from)
{
    const size_t d = (size_t)a.shape.head_dim, group = (size_t)a.shape.group;
    const std::vector<float> all = on_host(from, (size_t)a.n_rows * d);
    std::vector<float> rows;
    for (size_t query = 0; query < (size_t)a.shape.n_queries; query++) {
        const float *row = &all[(query * N_KV_HEADS + CHECKED_HEAD) * group * d];
        rows.insert(rows.end(), row, row + group * d);
    }
    return rows;
}

// Compares one KV head with C.
void check_attention(const attention &a, const tqkv_store &keys, const tqkv_store &values)
{
    std::vector<char> key_codes, value_codes;
    std::vector<float> key_norms, value_norms;
    tqkv_store k = head_on_host(keys, key_codes, key_norms), v = head_on_host(values, value_codes, value_norms);
    const tqkv_attention c = attention_over(k, v, a.shape.group, a.shape.n_queries);
    attend(a, keys, values);
    std::vector<float> q = rows_of_head(a, a.q), got = rows_of_head(a, a.out), expected(q.size());
    check_plan(tqkv_attend(&c, q.data(), expected.data()));
    report_error(shape_name(a.shape), got, expected, (size_t)a.shape.head_dim, c);
}

double attend_limit(const attention &a, const tqkv_store &keys, const tqkv_store &values)
{
    const double multiply_adds = 2.0 * a.n_rows * (double)a.shape.positions * a.shape.head_dim;
    return 1e6 *
           std::max((stored_bytes(keys) + stored_bytes(values)) / copy_bandwidth, multiply_adds / multiply_add_rate);
}

void report_attention(const attention &a, const std::vector<tqkv_store> &keys, const std::vector<tqkv_store> &values)
{
    const std::string name = shape_name(a.shape);
    double found = time_calls((int)keys.size(), [&](int i) { attend(a, keys[(size_t)i], values[(size_t)i]); });
    report(name, found);
    const double bytes = stored_bytes(keys[0]) + stored_bytes(values[0]);
    report_ratio(name + "/limit", attend_limit(a, keys[0], values[0]) / found);
    report_ratio(name + "/copy", bytes / copy_bandwidth * 1e6 / found);
    attend_shape halves = a.shape;
    halves.keys = halves.values = TQKV_F16;
    if (times.count(shape_name(halves))) report_ratio(name + "/f16", times[shape_name(halves)] / found);
    attend_shape plain = a.shape;
    plain.scaled = false;
    if (a.shape.scaled) report_ratio(name + "/plain", times[shape_name(plain)] / found);
    printf("cut %s columns %d simdgroups %d stretches %d\n", name.c_str(), a.split.columns, a.split.n_simdgroups,
           a.split.n_stretches);
}

} // namespace

void bench_attention(tqkv_format key_format, tqkv_format value_format, int head_dim, int positions,
                     const std::vector<std::pair<int, int>> &groups_and_queries, bool scaled)
{
    std::vector<attend_shape> shapes;
    for (const auto &g : groups_and_queries) {
        attend_shape s = {key_format, value_format, head_dim, g.first, g.second, positions, scaled};
        if (is_wanted(shape_name(s))) shapes.push_back(s);
    }
    if (shapes.empty()) return;
    std::vector<tqkv_store> keys, values;
    double bytes = 0.0;
    while (needs_copies(bytes, keys.size())) {
        keys.push_back(make_stream(key_format, head_dim, positions));
        values.push_back(make_stream(value_format, head_dim, positions));
        if (scaled) scale_stream(keys.back());
        if (scaled) scale_stream(values.back());
        fill_stream(keys.back(), 1 + (uint32_t)keys.size());
        fill_stream(values.back(), 1000 + (uint32_t)keys.size());
        bytes += stored_bytes(keys.back()) + stored_bytes(values.back());
    }
    for (const attend_shape &s : shapes) {
        const attention a = make_attention(s, keys[0], values[0]);
        if (opt.list) {
            attend(a, keys[0], values[0]);
            continue;
        }
        check_attention(a, keys[0], values[0]);
        if (!opt.check) report_attention(a, keys, values);
        free_attention(a);
    }
    if (opt.list) return;
    for (const tqkv_store &s : keys) free_stream(s);
    for (const tqkv_store &s : values) free_stream(s);
}

// ---- Batches ----

namespace
{

enum { SEQUENCES = 16, LONGEST = 8000, PAGE_SIZE = 64, ALL_PAGES = SEQUENCES, LINEAR, CALLS };

// Sequences over one pool, whose pages lie there in no order.
struct sequences {
    tqkv_store keys, values;
    int32_t *pages;                          // of all sequences, on the device
    std::vector<int> first, length;          // of each table, of each sequence
    std::vector<tqkv_metal_store> streams;   // [CALLS][2]
    std::vector<tqkv_metal_attention> calls; // then one over all pages, and one over the pool as a linear store
};

void place_pages(sequences &s, int n_pages)
{
    std::vector<int32_t> pages;
    for (int i = 0; i < SEQUENCES; i++) {
        s.length.push_back(LONGEST / SEQUENCES * (i + 1));
        s.first.push_back((int)pages.size());
        for (int p = 0; p < (s.length.back() + PAGE_SIZE - 1) / PAGE_SIZE; p++) pages.push_back(0);
    }
    for (size_t i = 0; i < pages.size(); i++) pages[i] = (int32_t)(i * 7919 % pages.size()); // a prime: all of them
    for (int i = ALL_PAGES; i < CALLS; i++) {
        s.first.push_back(0);
        s.length.push_back(n_pages * PAGE_SIZE);
    }
    static int32_t not_read; // NULL would be no table
    s.pages = opt.list ? &not_read : device_array<int32_t>(pages.size());
    if (!opt.list) CUDA(cudaMemcpy(s.pages, pages.data(), pages.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
}

int pages_of_sequences()
{
    int n = 0;
    for (int i = 1; i <= SEQUENCES; i++) n += (LONGEST / SEQUENCES * i + PAGE_SIZE - 1) / PAGE_SIZE;
    return n;
}

void make_sequences(tqkv_format key_format, tqkv_format value_format, int group, uint32_t seed, sequences &s)
{
    const int n_pages = pages_of_sequences();
    s.keys = make_stream(key_format, 128, n_pages * PAGE_SIZE);
    s.values = make_stream(value_format, 128, n_pages * PAGE_SIZE);
    fill_stream(s.keys, seed);
    fill_stream(s.values, seed + 500);
    place_pages(s, n_pages);
    for (int i = 0; i < CALLS; i++)
        for (const tqkv_store *from : {&s.keys, &s.values}) {
            s.streams.push_back(gpu_store(from));
            if (i == LINEAR) continue;
            s.streams.back().shape.page_size = PAGE_SIZE;
            s.streams.back().shape.n_pages = (s.length[(size_t)i] + PAGE_SIZE - 1) / PAGE_SIZE;
            s.streams.back().pages = {s.pages, (size_t)s.first[(size_t)i] * sizeof(int32_t)};
        }
    for (size_t i = 0; i < CALLS; i++) {
        tqkv_metal_attention a = {};
        a.keys = &s.streams[2 * i];
        a.values = &s.streams[2 * i + 1];
        a.attention.n_heads = group * N_KV_HEADS;
        a.attention.n_queries = 1;
        a.attention.end = s.length[i];
        a.matrix_group = opt.kernel == GPU_MATRICES ? 1 : 0;
        s.calls.push_back(a);
    }
}

// Queries, outputs, scratch and arguments for the calls over some sequences.
struct batch_memory {
    float *q, *out, *scratch;
    tqkv__batch_item *items;
    std::vector<tqkv__batch_item> planned;
    std::vector<tqkv_metal_buffer> qs, outs;
    size_t row;
};

batch_memory make_batch_memory(const sequences &s, int group)
{
    batch_memory m = {};
    tqkv_metal_plan plan;
    m.row = (size_t)(group * N_KV_HEADS * 128);
    check_plan(tqkv_metal_plan_attend_batch(s.calls.data(), SEQUENCES, nullptr, gpu_buffer(nullptr), nullptr,
                                            gpu_buffer(nullptr), nullptr, &plan));
    const size_t bytes = plan.scratch_size;
    check_plan(tqkv_metal_plan_attend(&s.calls[ALL_PAGES], gpu_buffer(nullptr), gpu_buffer(nullptr),
                                      gpu_buffer(nullptr), &plan));
    const size_t own = plan.scratch_size;
    m.q = device_array<float>(m.row * SEQUENCES);
    m.out = device_array<float>(m.row * SEQUENCES);
    m.scratch = device_array<float>(std::max(bytes, own) / sizeof(float));
    m.items = device_array<tqkv__batch_item>(SEQUENCES);
    m.planned.resize(SEQUENCES);
    for (size_t i = 0; i < SEQUENCES; i++) {
        m.qs.push_back({m.q, i * m.row * sizeof(float)});
        m.outs.push_back({m.out, i * m.row * sizeof(float)});
    }
    if (!opt.list) bench_fill(m.q, m.row * SEQUENCES, 78, stream);
    return m;
}

void plan_batch(const sequences &s, batch_memory &m, tqkv_metal_dispatch d[2])
{
    tqkv_metal_plan plan;
    check_plan(tqkv_metal_plan_attend_batch(s.calls.data(), SEQUENCES, m.qs.data(), gpu_buffer(m.items),
                                            m.planned.data(), gpu_buffer(m.scratch), m.outs.data(), &plan));
    std::copy(plan.d, plan.d + 2, d);
}

void attend_sequence(const sequences &s, const batch_memory &m, size_t i)
{
    tqkv_metal_plan plan;
    const size_t at = i < SEQUENCES ? i : 0;
    check_plan(tqkv_metal_plan_attend(&s.calls[i], m.qs[at], gpu_buffer(m.scratch), m.outs[at], &plan));
    for (int n = 0; n < plan.n; n++) launch(plan.d[n]);
}

// Both ways must write the same bits.
void check_batch(const std::string &name, const batch_memory &m, const std::function<void()> &loop,
                 const std::function<void()> &all)
{
    const size_t n = m.row * SEQUENCES;
    loop();
    const std::vector<float> alone = on_host(m.out, n);
    CUDA(cudaMemset(m.out, 0xff, n * sizeof(float)));
    all();
    const std::vector<float> together = on_host(m.out, n);
    const bool same = !memcmp(alone.data(), together.data(), n * sizeof(float));
    printf("%s %s\n", same ? "same_bits" : "WRONG", name.c_str());
    n_wrong += !same;
}

void report_batch(const std::string &name)
{
    report_ratio(name + "/loop", times[name + "/loop"] / times[name]);
    report_ratio(name + "/one_sequence", times[name + "/one_sequence"] / times[name]);
    report_ratio(name + "/linear", times[name + "/one_sequence/linear"] / times[name + "/one_sequence"]);
}

void free_batch(const sequences &s, const batch_memory &m)
{
    free_stream(s.keys);
    free_stream(s.values);
    for (void *pointer : {(void *)s.pages, (void *)m.q, (void *)m.out, (void *)m.scratch, (void *)m.items})
        CUDA(cudaFree(pointer));
}

} // namespace

// One query of each of 16 sequences of 500 to 8000 positions, over one pool: all in one call, one call each, and one
// sequence of as many positions.
void bench_batch(tqkv_format key_format, tqkv_format value_format, int group)
{
    const std::string name = std::string("batch/") + tqkv_format_name(key_format) + "_" +
                             tqkv_format_name(value_format) + "/d128/g" + std::to_string(group) + "/16";
    std::vector<sequences> copies(opt.list || opt.check ? 1 : 4); // together several times the L2
    if (!is_wanted(name)) return;
    for (size_t i = 0; i < copies.size(); i++)
        make_sequences(key_format, value_format, group, 10 + (uint32_t)i, copies[i]);
    std::vector<std::vector<tqkv_metal_dispatch>> plans;
    std::vector<batch_memory> memory;
    for (sequences &s : copies) {
        tqkv_metal_dispatch d[2];
        memory.push_back(make_batch_memory(s, group));
        plan_batch(s, memory.back(), d);
        if (!opt.list)
            CUDA(cudaMemcpy(memory.back().items, memory.back().planned.data(), SEQUENCES * sizeof(tqkv__batch_item),
                            cudaMemcpyHostToDevice));
        plans.push_back({d[0], d[1]});
    }
    const auto all = [&](int i) {
        for (const tqkv_metal_dispatch &d : plans[(size_t)i]) launch(d);
    };
    const auto loop = [&](int i) {
        for (size_t j = 0; j < SEQUENCES; j++) attend_sequence(copies[(size_t)i], memory[(size_t)i], j);
    };
    const auto one = [&](int i) { attend_sequence(copies[(size_t)i], memory[(size_t)i], ALL_PAGES); };
    const auto linear = [&](int i) { attend_sequence(copies[(size_t)i], memory[(size_t)i], LINEAR); };
    if (opt.list) {
        all(0);
        loop(0);
        one(0);
        return linear(0);
    }
    check_batch(
        name, memory[0], [&] { loop(0); }, [&] { all(0); });
    if (opt.check) return;
    report(name, time_calls((int)copies.size(), all));
    report(name + "/loop", time_calls((int)copies.size(), loop));
    report(name + "/one_sequence", time_calls((int)copies.size(), one));
    report(name + "/one_sequence/linear", time_calls((int)copies.size(), linear));
    report_batch(name);
    for (size_t i = 0; i < copies.size(); i++) free_batch(copies[i], memory[i]);
}

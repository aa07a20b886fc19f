// Times attention: of groups, over latent caches, over lists of blocks.
#include "bench.h"

namespace
{

enum { MATRIX_ROWS = 32, SHORT_CONTEXT = 4096, LISTED = 2048, TAIL_DIM = 64 };

std::string shape_name(const attend_shape &s)
{
    const std::string formats = tqkv_format_name(s.keys), positions = std::to_string(s.positions);
    const std::string dim = "/d" + std::to_string(s.head_dim), group = "/g" + std::to_string(s.group) + "/";
    if (s.latent)
        return "latent/" + formats + (s.tail ? std::string("_") + tqkv_format_name(s.tail) : "") + dim + "/h" +
               std::to_string(s.group) + "/" + positions;
    if (s.listed)
        return "list/" + formats + dim + "/kv" + std::to_string(s.n_kv_heads) + group + positions +
               (s.block ? "/block" + std::to_string(s.block) : "");
    return "attend/" + formats + (s.values != s.keys ? std::string("_") + tqkv_format_name(s.values) : "") + dim +
           group + "q" + std::to_string(s.n_queries) + "/" + positions;
}

// One copy of what is read. A tail of format 0 is none.
struct streams {
    tqkv_store keys, values, tail;
};

std::vector<streams> make_streams(const attend_shape &shape)
{
    std::vector<streams> copies;
    for (double bytes = 0.0; needs_copies(bytes, copies.size());) {
        const uint32_t n = (uint32_t)copies.size() + 1;
        streams s = {make_stream(shape.keys, shape.head_dim, shape.positions, shape.n_kv_heads, n), {}, {}};
        s.values = shape.latent
                       ? s.keys
                       : make_stream(shape.values, shape.head_dim, shape.positions, shape.n_kv_heads, 1000 + n);
        if (shape.tail) s.tail = make_stream(shape.tail, TAIL_DIM, shape.positions, shape.n_kv_heads, 500 + n);
        copies.push_back(s);
        bytes += stored_bytes(s.keys) + stored_bytes(s.values) + stored_bytes(s.tail);
    }
    return copies;
}

double bytes_read(const attend_shape &shape, const streams &s)
{
    return stored_bytes(s.keys) + (shape.latent ? stored_bytes(s.tail) : stored_bytes(s.values));
}

struct attention {
    attend_shape shape;
    gpu_split split;
    size_t n_rows, key_dim, value_dim;
    std::vector<int32_t> listed;
    int32_t *list;
    float *q, *out, *scratch, *sums, *state;
};

tqkv_attention call_over(const attention &a, const tqkv_store &keys, const tqkv_store &values, const tqkv_store &tail)
{
    tqkv_attention call = {};
    call.keys = &keys;
    call.values = &values;
    call.tail = tail.format ? &tail : nullptr;
    call.n_heads = a.shape.group * keys.n_kv_heads;
    call.n_queries = a.shape.n_queries;
    call.end = a.shape.positions;
    call.list.block = a.shape.block;
    call.list.length = (int)a.listed.size();
    return call;
}

// Whether narrow groups multiply matrices on this GPU (tqkv__choose_split has the times).
bool gains_at_two(const tqkv_store &s) { return (s.format == TQKV_TQ4 || s.format == TQKV_I8) && s.head_dim <= 256; }

tqkv_metal_plan plan_attention(const attention &a, const streams &s)
{
    gpu_attention planned(call_over(a, s.keys, s.values, s.tail));
    tqkv_metal_plan plan;
    planned.metal.matrix_group = !a.shape.listed && gains_at_two(s.keys) && gains_at_two(s.values) ? 2 : 0;
    if (a.shape.block) planned.metal.list = gpu_buffer(a.list);
    check_plan(
        tqkv_metal_plan_attend(&planned.metal, gpu_buffer(a.q), gpu_buffer(a.scratch), gpu_buffer(a.out), &plan));
    if (a.shape.listed) return plan;
    gpu_force(plan.d, a.split);
    gpu_set_scratch(plan.d, a.sums, a.state);
    return plan;
}

// The plan of tqkv.h is for Apple's GPUs, whose number of cores it does not know. Here the stretches fill all
// multiprocessors of this GPU once. Where rows alone do that, the plan stays, and for short contexts.
gpu_split choose_split(attention a, const streams &s)
{
    if (a.shape.listed || (a.shape.positions <= SHORT_CONTEXT && a.shape.n_queries <= 8)) return {};
    tqkv_metal_plan plan = plan_attention(a, s);
    const bool matrices = plan.d[0].kernel.family == TQKV_METAL_ATTEND_MATRIX;
    if (matrices) { // this GPU has registers for more than the plan's
        a.split.columns = std::min(a.shape.n_queries * a.shape.group, (int)MATRIX_ROWS);
        plan = plan_attention(a, s);
    }
    const int columns = plan.d[0].kernel.constants[TQKV_FC_COLUMNS] - 1;
    const int n_simdgroups = columns <= 2 && a.shape.head_dim <= 128 && !matrices ? 8 : 4;
    a.split = {columns, n_simdgroups, 0};
    plan = plan_attention(a, s);
    const int wave = threadgroups_at_once(plan.d[0]);
    const int tiles = (a.shape.positions + TQKV__SIMD_WIDTH - 1) / TQKV__SIMD_WIDTH;
    const int wanted = wave / (int)(plan.d[0].grid[0] * plan.d[0].grid[1]), allowed = tiles / (2 * n_simdgroups);
    // A product rounds its sum towards 0: a simdgroup adds up at most 64 tiles. Else the errors of a million positions
    // add up to 4e-5.
    const int least = matrices ? tiles / (64 * n_simdgroups) : 1;
    return {columns, n_simdgroups, wanted > 1 ? std::max({1, least, std::min(wanted, allowed)}) : 0};
}

std::vector<int32_t> list_at_random(int positions, int block)
{
    std::vector<int32_t> list;
    const int every = positions / LISTED;
    for (int i = 0; block && i < LISTED / block; i++) list.push_back(i * every + i * 7919 % every);
    return list;
}

attention make_attention(const attend_shape &shape, const streams &s)
{
    attention a = {};
    a.shape = shape;
    a.listed = list_at_random(shape.positions, shape.block);
    a.list = device_copy(a.listed);
    a.split = choose_split(a, s);
    a.n_rows = (size_t)(shape.n_queries * shape.group * shape.n_kv_heads);
    a.value_dim = (size_t)shape.head_dim;
    a.key_dim = a.value_dim + (shape.tail ? TAIL_DIM : 0);
    tqkv_metal_plan plan = plan_attention(a, s);
    a.q = gaussian_array(a.n_rows * a.key_dim, 77);
    a.out = device_array<float>(a.n_rows * a.value_dim);
    if (shape.listed) {
        a.scratch = device_array<float>(plan.scratch_size / sizeof(float));
    } else {
        a.sums = device_array<float>(gpu_find(&plan.d[0], 6)->size / sizeof(float));
        a.state = device_array<float>(gpu_find(&plan.d[0], 7)->size / sizeof(float));
    }
    return a;
}

// From [n_queries][n_heads][dim] on the device, [n_queries][group][dim] of the checked head.
std::vector<float> rows_of_head(const attention &a, const float *from, size_t dim)
{
    const size_t heads = (size_t)a.shape.n_kv_heads, size = (size_t)a.shape.group * dim;
    const std::vector<float> all = on_host(from, a.n_rows * dim);
    std::vector<float> rows;
    for (size_t query = 0; query < (size_t)a.shape.n_queries; query++) {
        const float *row = &all[(query * heads + (size_t)checked_head(a.shape.n_kv_heads)) * size];
        rows.insert(rows.end(), row, row + size);
    }
    return rows;
}

// Compares one KV head with C.
void check_attention(const attention &a, const streams &s)
{
    const host_head k(s.keys), v(s.values), tail(s.tail);
    tqkv_attention call = call_over(a, k.store, v.store, tail.store);
    if (a.shape.block) call.list.rows = a.listed.data();
    launch(plan_attention(a, s));
    const std::vector<float> q = rows_of_head(a, a.q, a.key_dim), got = rows_of_head(a, a.out, a.value_dim);
    std::vector<float> expected(got.size());
    check_plan(tqkv_attend(&call, q.data(), expected.data()));
    report_error(shape_name(a.shape), got, expected, a.value_dim, call);
}

// What a latent stream's codes take to copy.
void copy_latent(const streams &s, char *to)
{
    bench_copy(to, (const char *)s.keys.codes, s.keys.codes_size, stream);
    if (s.tail.format) bench_copy(to + s.keys.codes_size, (const char *)s.tail.codes, s.tail.codes_size, stream);
}

void time_attention(const attention &a, const std::vector<streams> &copies)
{
    const std::string name = shape_name(a.shape);
    const double bytes = bytes_read(a.shape, copies[0]),
                 multiply_adds = 2.0 * (double)(a.n_rows * a.value_dim) * a.shape.positions;
    std::vector<std::pair<std::string, bench_call>> calls = {
        {name, [&](int i) { launch(plan_attention(a, copies[(size_t)i])); }}};
    char *to = a.shape.latent ? device_array<char>((size_t)bytes) : nullptr;
    if (a.shape.latent && !opt.list)
        calls.push_back({name + "/copy", [&](int i) { copy_latent(copies[(size_t)i], to); }});
    run_bench((int)copies.size(), [&] { check_attention(a, copies[0]); }, calls);
    report_ratio(name + "/times_the_copy", name, name + "/copy");
    attend_shape all = a.shape;
    all.block = 0;
    if (a.shape.block) report_ratio(name + "/all", name, shape_name(all));
    if (a.shape.listed) return;
    report_share(name + "/limit", name, 1e6 * std::max(bytes / copy_bandwidth, multiply_adds / multiply_add_rate));
}

} // namespace

void bench_attention(const std::vector<attend_shape> &all)
{
    std::vector<attend_shape> shapes;
    for (const attend_shape &s : all)
        if (is_wanted(shape_name(s))) shapes.push_back(s);
    if (shapes.empty()) return;
    const device_scope scope;
    const std::vector<streams> copies = make_streams(shapes[0]);
    for (const attend_shape &s : shapes) {
        const device_scope own;
        time_attention(make_attention(s, copies[0]), copies);
    }
}

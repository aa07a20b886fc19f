// Times attention over latent caches: 64 heads read one stream as keys and as values, and a tail of the keys.
#include "bench.h"

namespace
{

enum { LATENT_DIM = 512, LATENT_TAIL = 64, LATENT_HEADS = 64 };

// One stream that 64 heads read as keys and as values, and a tail of the keys.
struct latent {
    tqkv_store rows, tail;
};

struct latent_memory {
    float *q, *out, *sums, *state;
    gpu_split split;
};

// A tail of format 0 is none.
std::vector<latent> make_latents(tqkv_format format, tqkv_format tail, int positions, double *bytes)
{
    std::vector<latent> copies;
    double all = 0.0;
    while (needs_copies(all, copies.size())) {
        latent l = {make_stream(format, LATENT_DIM, positions, 1), {}};
        fill_stream(l.rows, 1 + (uint32_t)copies.size());
        if (tail) {
            l.tail = make_stream(tail, LATENT_TAIL, positions, 1);
            fill_stream(l.tail, 500 + (uint32_t)copies.size());
        }
        *bytes = stored_bytes(l.rows) + (tail ? stored_bytes(l.tail) : 0.0);
        all += *bytes;
        copies.push_back(l);
    }
    return copies;
}

tqkv_attention latent_call(const tqkv_store &rows, const tqkv_store &tail)
{
    tqkv_attention call = attention_over(rows, rows, LATENT_HEADS, 1);
    call.tail = tail.format ? &tail : nullptr;
    return call;
}

void plan_latent(const latent &l, const latent_memory &m, tqkv_metal_dispatch d[2])
{
    const gpu_attention planned(latent_call(l.rows, l.tail));
    tqkv_metal_plan plan;
    check_plan(tqkv_metal_plan_attend(&planned.metal, gpu_buffer(m.q), gpu_buffer(nullptr), gpu_buffer(m.out), &plan));
    std::copy(plan.d, plan.d + 2, d);
    gpu_force(d, m.split);
    gpu_set_scratch(d, m.sums, m.state);
}

void attend_latent(const latent &l, const latent_memory &m)
{
    tqkv_metal_dispatch d[2];
    plan_latent(l, m, d);
    launch(d[0]);
    launch(d[1]);
}

// As choose_split: the stretches fill all multiprocessors once, and no simdgroup adds up more than 64 tiles.
latent_memory make_latent_memory(const latent &l)
{
    latent_memory m = {};
    tqkv_metal_dispatch d[2];
    const int kernel = opt.kernel ? opt.kernel : GPU_MATRICES;
    const int columns = kernel == GPU_LANES ? GPU_MOST : opt.columns ? opt.columns : MATRIX_ROWS;
    const int tiles = (l.rows.capacity + TQKV__SIMD_WIDTH - 1) / TQKV__SIMD_WIDTH;
    if (!opt.planned) m.split = {columns, 8, 0, 0, kernel};
    plan_latent(l, m, d);
    const int wave = threadgroups_at_once(d[0]);
    if (!opt.planned) m.split.n_stretches = std::max(tiles / 64, wave / (int)(d[0].grid[0] * d[0].grid[1]));
    plan_latent(l, m, d);
    m.q = device_array<float>(LATENT_HEADS * (LATENT_DIM + LATENT_TAIL));
    m.out = device_array<float>(LATENT_HEADS * LATENT_DIM);
    m.sums = device_array<float>(gpu_find(&d[0], 6)->size / sizeof(float));
    m.state = device_array<float>(gpu_find(&d[0], 7)->size / sizeof(float));
    if (!opt.list) bench_fill(m.q, LATENT_HEADS * (LATENT_DIM + LATENT_TAIL), 77, stream);
    return m;
}

// Compares with C, head for head.
void check_latent(const std::string &name, const latent &l, const latent_memory &m)
{
    std::vector<char> rows_bytes, tail_bytes;
    const tqkv_store rows = stream_on_host(l.rows, rows_bytes), tail = stream_on_host(l.tail, tail_bytes);
    const tqkv_attention call = latent_call(rows, tail);
    attend_latent(l, m);
    const std::vector<float> q = on_host(m.q, LATENT_HEADS * (LATENT_DIM + LATENT_TAIL)),
                             got = on_host(m.out, LATENT_HEADS * LATENT_DIM);
    std::vector<float> expected(got);
    check_plan(tqkv_attend(&call, q.data(), expected.data()));
    report_error(name, got, expected, LATENT_DIM, call);
}

void report_latent(const std::string &name, const std::vector<latent> &copies, const latent_memory &m, double bytes)
{
    const int n = (int)copies.size();
    const size_t room = (size_t)bytes;
    char *to = device_array<char>(room);
    report(name, time_calls(n, [&](int i) { attend_latent(copies[(size_t)i], m); }));
    report(name + "/copy", time_calls(n, [&](int i) {
               const latent &l = copies[(size_t)i];
               bench_copy(to, (const char *)l.rows.codes, l.rows.codes_size, stream);
               if (l.tail.format)
                   bench_copy(to + l.rows.codes_size, (const char *)l.tail.codes, l.tail.codes_size, stream);
           }));
    report_ratio(name + "/times_the_copy", times[name] / times[name + "/copy"]);
    report_ratio(name + "/limit", bytes / copy_bandwidth * 1e6 / times[name]);
    printf("cut %s columns %d stretches %d\n", name.c_str(), m.split.columns, m.split.n_stretches);
    CUDA(cudaFree(to));
}

} // namespace

void bench_latent(tqkv_format format, tqkv_format tail, int positions)
{
    const std::string name = std::string("latent/") + tqkv_format_name(format) +
                             (tail ? std::string("_") + tqkv_format_name(tail) : "") + "/d512/h64/" +
                             std::to_string(positions);
    if (!is_wanted(name)) return;
    double bytes = 0.0;
    const std::vector<latent> copies = make_latents(format, tail, positions, &bytes);
    const latent_memory m = make_latent_memory(copies[0]);
    if (opt.list) return attend_latent(copies[0], m);
    check_latent(name, copies[0], m);
    if (!opt.check) report_latent(name, copies, m, bytes);
    for (const latent &l : copies) {
        free_stream(l.rows);
        if (l.tail.format) free_stream(l.tail);
    }
    for (float *p : {m.q, m.out, m.sums, m.state}) CUDA(cudaFree(p));
}

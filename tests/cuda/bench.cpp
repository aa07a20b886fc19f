// Times the shaders on an NVIDIA GPU: bench FOLDER [--list] [--quick] [--check] [--planned] [--simdgroups N]
// [--threadgroups N] [--lanes] [--matrices] [--columns N] [part of a name]...
//
// FOLDER holds the pipelines. --list prints the names of the pipelines that the benchmark needs. --check compares
// attention with the CPU and times nothing, for compute-sanitizer. --planned times what tqkv.h plans for any GPU. One
// measurement is a graph of several calls, over copies of the data that together exceed the L2 several times. A time
// is the median over replays of the graph, divided by the number of calls. Prints lines `time NAME microseconds` and
// `ratio NAME/OF value`. OF is limit, f16 (the same kernel on halves) or, for encoding and decoding, copy.
#include "bench_kernels.h"
#include "pipelines.h"
#include "../metal/gpu.h"
#include <algorithm>
#include <functional>
#include <map>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <vector>

#define CUDA(call) check_cuda((call), #call, __LINE__)

namespace
{

enum { N_KV_HEADS = 8, MATRIX_ROWS = 32, CHECKED_HEAD = 3, REPLAYS = 9, SEVERAL_CACHES = 400 << 20 };

struct options {
    std::string folder;
    bool list, quick, check;
    int n_simdgroups, threadgroups; // 0: choose_split chooses
    bool planned;                   // as tqkv.h plans it
    int stretches;                  // of the store, each threadgroup adds up all; 0: choose_split chooses
    int kernel;                     // GPU_LANES or GPU_MATRICES; 0: as planned
    int columns;                    // most of the kernel; 0: as planned
    int index_keys;                 // of a threadgroup of index_scores; 0: as planned
    std::vector<std::string> filters;
};
options opt;
std::map<std::string, double> times;      // microseconds by name
double copy_bandwidth, multiply_add_rate; // per second
cudaStream_t stream;
int n_wrong;

void check_cuda(cudaError_t result, const char *call, int line)
{
    if (result == cudaSuccess) return;
    fprintf(stderr, "bench.cpp:%d: %s: %s\n", line, call, cudaGetErrorString(result));
    exit(1);
}

bool is_wanted(const std::string &name)
{
    for (const std::string &f : opt.filters)
        if (name.find(f) != std::string::npos) return true;
    return opt.filters.empty();
}

// ---- Kernels of the library ----

void check_plan(tqkv_result r)
{
    if (r == TQKV_OK) return;
    fprintf(stderr, "bench.cpp: %s\n", tqkv_result_string(r));
    exit(1);
}

// NULL with --list, which prints the name.
const void *find_pipeline(const device_dispatch &d)
{
    const std::string name = cuda_pipeline_name(d);
    if (opt.list) {
        printf("pipeline %s\n", name.c_str());
        return nullptr;
    }
    std::string error;
    const void *kernel = cuda_pipeline(opt.folder, name, &error);
    if (kernel) return kernel;
    fprintf(stderr, "%s\n", error.c_str());
    exit(1);
}

// The buffers of the plan are pointers to the device's memory.
void launch(const tqkv_metal_dispatch &planned)
{
    const gpu_dispatch d = gpu_planned(planned);
    const void *kernel = find_pipeline(d);
    if (!opt.list) CUDA(cuda_launch(kernel, d, d.buffers, stream));
}

template <class T>
T *device_array(size_t n)
{
    void *pointer = nullptr;
    if (!opt.list) CUDA(cudaMalloc(&pointer, n * sizeof(T) + 16)); // never empty
    return (T *)pointer;
}

// ---- Time ----

// The median time of `work` on the stream, in microseconds.
double time_stream(const std::function<void()> &work)
{
    std::vector<double> found;
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    for (int i = 0; i < REPLAYS + 2; i++) {
        CUDA(cudaEventRecord(begin, stream));
        work();
        CUDA(cudaEventRecord(end, stream));
        CUDA(cudaEventSynchronize(end));
        float milliseconds;
        CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
        if (i >= 2) found.push_back(milliseconds * 1e3); // the first two warm up
    }
    CUDA(cudaEventDestroy(begin));
    CUDA(cudaEventDestroy(end));
    std::sort(found.begin(), found.end());
    return found[found.size() / 2];
}

// Microseconds of one call. call(i) uses copy i of the data.
double time_calls(int n_copies, const std::function<void(int)> &call)
{
    const int n_calls = (std::max(n_copies, 8) + n_copies - 1) / n_copies * n_copies;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < n_calls; i++) call(i % n_copies);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&executable, graph, 0));
    const double found = time_stream([&] { CUDA(cudaGraphLaunch(executable, stream)); }) / n_calls;
    CUDA(cudaGraphExecDestroy(executable));
    CUDA(cudaGraphDestroy(graph));
    return found;
}

void report(const std::string &name, double microseconds)
{
    times[name] = microseconds;
    printf("time %s %.2f\n", name.c_str(), microseconds);
    fflush(stdout);
}

void report_ratio(const std::string &name, double ratio)
{
    printf("ratio %s %.3f\n", name.c_str(), ratio);
    fflush(stdout);
}

void measure_limits()
{
    const size_t n = (size_t)4 << 30;
    char *a = device_array<char>(n), *b = device_array<char>(n);
    CUDA(cudaMemset(a, 1, n));
    CUDA(cudaMemset(b, 1, n));
    // The faster of two: the driver's copy, outside a graph because a graph slows it down, and a plain kernel.
    double copy = time_stream([&] { CUDA(cudaMemcpyAsync(b, a, n, cudaMemcpyDeviceToDevice, stream)); });
    copy = std::min(copy, time_stream([&] { bench_copy(b, a, n, stream); }));
    const int rounds = 200;
    double adds = time_calls(1, [&](int) { bench_run_multiply_adds(rounds, (float *)a, stream); });
    copy_bandwidth = 2.0 * (double)n / (copy * 1e-6);
    multiply_add_rate = bench_multiply_adds(rounds) / (adds * 1e-6);
    printf("limit copy_bandwidth %.4g bytes/s\nlimit multiply_adds %.4g 1/s\n", copy_bandwidth, multiply_add_rate);
    CUDA(cudaFree(a));
    CUDA(cudaFree(b));
}

// ---- Streams ----

// Codes and norms are on the device.
tqkv_store make_stream(tqkv_format format, int head_dim, int positions, int n_kv_heads = N_KV_HEADS)
{
    tqkv_store s = {};
    s.format = format;
    s.head_dim = head_dim;
    s.n_kv_heads = n_kv_heads;
    s.capacity = positions;
    s.codes_size = tqkv_codes_size(&s);
    s.norms_size = tqkv_norms_size(&s);
    s.codes = device_array<char>(s.codes_size);
    s.norms = device_array<float>(s.norms_size / sizeof(float));
    return s;
}

double stored_bytes(const tqkv_store &s) { return (double)(s.codes_size + s.norms_size); }

void free_stream(const tqkv_store &s)
{
    CUDA(cudaFree(s.codes));
    CUDA(cudaFree(s.norms));
}

void encode(const tqkv_store &s, const void *source, int n_tokens, int position)
{
    const tqkv_metal_store store = gpu_store(&s);
    tqkv_metal_dispatch d;
    check_plan(tqkv_metal_plan_encode(&store, gpu_buffer(source), n_tokens, position, gpu_buffer(nullptr), &d));
    launch(d);
}

// Gaussian rows, encoded by the shaders, one piece after the other.
void fill_stream(const tqkv_store &s, uint32_t seed)
{
    const int piece = std::min(s.capacity, (1 << 18) / s.n_kv_heads);
    const size_t n = (size_t)piece * (size_t)s.n_kv_heads * (size_t)s.head_dim;
    float *source = device_array<float>(n);
    for (int first = 0; first < (opt.list ? 1 : s.capacity); first += piece) {
        if (!opt.list) bench_fill(source, n, seed + (uint32_t)first, stream);
        encode(s, source, std::min(piece, s.capacity - first), first);
    }
    if (opt.list) return;
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaFree(source));
}

// ---- Attention ----

struct attend_shape {
    tqkv_format keys, values;
    int head_dim, group, n_queries, positions;
};

std::string shape_name(const attend_shape &s)
{
    std::string formats = tqkv_format_name(s.keys);
    if (s.values != s.keys) formats += std::string("_") + tqkv_format_name(s.values);
    return "attend/" + formats + "/d" + std::to_string(s.head_dim) + "/g" + std::to_string(s.group) + "/q" +
           std::to_string(s.n_queries) + "/" + std::to_string(s.positions);
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
    tqkv_attention call = {};
    call.keys = &keys;
    call.values = &values;
    call.n_heads = a.shape.group * N_KV_HEADS;
    call.n_queries = a.shape.n_queries;
    call.end = a.shape.positions;
    gpu_attention planned(call);
    planned.metal.matrix_group = gains_at_two(keys) && gains_at_two(values) ? 2 : 0;
    check_plan(tqkv_metal_plan_attend(&planned.metal, gpu_buffer(a.q), gpu_buffer(nullptr), gpu_buffer(a.out), d));
    gpu_force(d, a.split);
    gpu_set_scratch(d, a.sums, a.state);
}

// The plan of tqkv.h is for Apple's GPUs, whose number of cores it does not know. Here the stretches fill all
// multiprocessors of this GPU once. Where rows alone do that, the plan stays.
gpu_split choose_split(attention a, const tqkv_store &keys, const tqkv_store &values)
{
    tqkv_metal_dispatch d[2];
    if (opt.planned) return {0, 0, 0, 0, opt.kernel};
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
    const gpu_dispatch planned = gpu_planned(d[0]);
    int per_processor = 1, processors = 132;
    if (!opt.list) {
        CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
        CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, find_pipeline(planned), (int)planned.threads,
                                                           cuda_shared_bytes(planned)));
    }
    if (opt.stretches) return {columns, n_simdgroups, opt.stretches, GPU_EVERYTHING, opt.kernel};
    const int wave = opt.threadgroups ? opt.threadgroups : processors * per_processor;
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

// The rows of one KV head, copied to the host.
tqkv_store head_on_host(const tqkv_store &s, std::vector<char> &codes, std::vector<float> &norms)
{
    const size_t heads = (size_t)s.n_kv_heads, head = heads > 1 ? CHECKED_HEAD : 0;
    tqkv_store store = s;
    codes.resize(s.codes_size / heads);
    norms.resize(s.norms_size / sizeof(float) / heads);
    store.n_kv_heads = 1;
    store.codes = codes.data();
    store.codes_size = codes.size();
    store.norms = norms.data();
    store.norms_size = norms.size() * sizeof(float);
    CUDA(
        cudaMemcpy(store.codes, (const char *)s.codes + codes.size() * head, store.codes_size, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(store.norms, s.norms + norms.size() * head, store.norms_size, cudaMemcpyDeviceToHost));
    return store;
}

// From [n_queries][n_heads][D] on the device, [n_queries][group][D] of the checked head.
std::vector<float> rows_of_head(const attention &a, const float *from)
{
    const size_t d = (size_t)a.shape.head_dim, group = (size_t)a.shape.group;
    std::vector<float> all((size_t)a.n_rows * d), rows;
    CUDA(cudaMemcpy(all.data(), from, all.size() * sizeof(float), cudaMemcpyDeviceToHost));
    for (size_t query = 0; query < (size_t)a.shape.n_queries; query++) {
        const float *row = &all[(query * N_KV_HEADS + CHECKED_HEAD) * group * d];
        rows.insert(rows.end(), row, row + group * d);
    }
    return rows;
}

// Compares one KV head with C. Each side may differ from double precision by 2e-5.
void check_attention(const attention &a, const tqkv_store &keys, const tqkv_store &values)
{
    std::vector<char> key_codes, value_codes;
    std::vector<float> key_norms, value_norms;
    tqkv_store k = head_on_host(keys, key_codes, key_norms), v = head_on_host(values, value_codes, value_norms);
    tqkv_attention c = {};
    c.keys = &k;
    c.values = &v;
    c.n_heads = a.shape.group;
    c.n_queries = a.shape.n_queries;
    c.end = a.shape.positions;
    attend(a, keys, values);
    CUDA(cudaStreamSynchronize(stream));
    std::vector<float> q = rows_of_head(a, a.q), got = rows_of_head(a, a.out), expected(q.size());
    tqkv_result r = tqkv_attend(&c, q.data(), expected.data());
    double most = r == TQKV_OK ? 0.0 : 1.0;
    for (size_t row = 0, d = (size_t)a.shape.head_dim; row < q.size() / d; row++) {
        double error = 0.0, size = 0.0;
        for (size_t i = row * d; i < (row + 1) * d; i++) {
            error += ((double)got[i] - expected[i]) * ((double)got[i] - expected[i]);
            size += (double)expected[i] * expected[i];
        }
        const double relative = sqrt(error / size);
        if (!(relative <= most)) most = relative;
    }
    printf("error %s %.2g\n", shape_name(a.shape).c_str(), most);
    if (most <= 4e-5) return;
    printf("WRONG %s\n", shape_name(a.shape).c_str());
    n_wrong++;
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
    printf("cut %s columns %d simdgroups %d stretches %d\n", name.c_str(), a.split.columns, a.split.n_simdgroups,
           a.split.n_stretches);
}

// All groups and numbers of queries over the same data.
void bench_attention(tqkv_format key_format, tqkv_format value_format, int head_dim, int positions,
                     const std::vector<std::pair<int, int>> &groups_and_queries)
{
    std::vector<attend_shape> shapes;
    for (const auto &g : groups_and_queries) {
        attend_shape s = {key_format, value_format, head_dim, g.first, g.second, positions};
        if (is_wanted(shape_name(s))) shapes.push_back(s);
    }
    if (shapes.empty()) return;
    std::vector<tqkv_store> keys, values;
    double bytes = 0.0;
    while (bytes < (double)SEVERAL_CACHES && keys.size() < (opt.list || opt.check ? 1 : 64)) {
        keys.push_back(make_stream(key_format, head_dim, positions));
        values.push_back(make_stream(value_format, head_dim, positions));
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

// ---- Encoding and decoding ----

void bench_encode(tqkv_format format, int head_dim, int n_tokens, tqkv_type type = TQKV_TYPE_F32)
{
    const std::string name = std::string("encode/") + tqkv_format_name(format) + "/d" + std::to_string(head_dim) + "/" +
                             std::to_string(n_tokens) + (type == TQKV_TYPE_BF16 ? "/bf16" : "");
    if (opt.check || !is_wanted(name)) return;
    const size_t n = (size_t)n_tokens * N_KV_HEADS * (size_t)head_dim;
    float *source = device_array<float>(n);
    tqkv_store s = make_stream(format, head_dim, n_tokens);
    s.type = type;
    if (opt.list) return encode(s, source, n_tokens, 0);
    if (type == TQKV_TYPE_BF16)
        bench_fill_bf16((uint16_t *)(void *)source, n, 5, stream);
    else
        bench_fill(source, n, 5, stream);
    // One copy: source and store are larger than the L2.
    report(name, time_calls(1, [&](int) { encode(s, source, n_tokens, 0); }));
    const double input = (double)(n * (type == TQKV_TYPE_F32 ? 4 : 2)), all = input + stored_bytes(s);
    report_ratio(name + "/copy_of_input", input / copy_bandwidth * 1e6 / times[name]);
    report_ratio(name + "/copy", all / copy_bandwidth * 1e6 / times[name]);
    free_stream(s);
    CUDA(cudaFree(source));
}

void bench_decode(tqkv_format format, int head_dim, int positions)
{
    const std::string name = std::string("decode/") + tqkv_format_name(format) + "/d" + std::to_string(head_dim) + "/" +
                             std::to_string(positions);
    if (opt.check || !is_wanted(name)) return;
    const size_t elements = (size_t)positions * N_KV_HEADS * (size_t)head_dim;
    const tqkv_store s = make_stream(format, head_dim, positions);
    float *out = device_array<float>(elements);
    fill_stream(s, 3);
    const tqkv_metal_store store = gpu_store(&s);
    tqkv_metal_dispatch d;
    check_plan(tqkv_metal_plan_decode(&store, 0, positions, TQKV_ORIGINAL, gpu_buffer(out), &d));
    if (opt.list) return launch(d);
    report(name, time_calls(1, [&](int) { launch(d); }));
    report_ratio(name + "/copy", (stored_bytes(s) + (double)elements * 4) / copy_bandwidth * 1e6 / times[name]);
    CUDA(cudaFree(out));
    free_stream(s);
}

// ---- Batches ----

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
    size_t arguments, bytes = 0, own;
    m.row = (size_t)(group * N_KV_HEADS * 128);
    check_plan(tqkv_metal_plan_attend_batch_sizes(s.calls.data(), SEQUENCES, &arguments, &bytes));
    check_plan(tqkv_metal_plan_attend_scratch(&s.calls[ALL_PAGES], &own));
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
    check_plan(tqkv_metal_plan_attend_batch(s.calls.data(), SEQUENCES, m.qs.data(), gpu_buffer(m.items),
                                            m.planned.data(), gpu_buffer(m.scratch), m.outs.data(),
                                            opt.kernel != GPU_LANES, d));
}

void attend_sequence(const sequences &s, const batch_memory &m, size_t i)
{
    tqkv_metal_dispatch d[2];
    const size_t at = i < SEQUENCES ? i : 0;
    check_plan(tqkv_metal_plan_attend(&s.calls[i], m.qs[at], gpu_buffer(m.scratch), m.outs[at], d));
    for (const tqkv_metal_dispatch &one : d) launch(one);
}

// Both ways must write the same bits.
void check_batch(const std::string &name, const batch_memory &m, const std::function<void()> &loop,
                 const std::function<void()> &all)
{
    const size_t n = m.row * SEQUENCES;
    std::vector<float> alone(n), together(n);
    loop();
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(alone.data(), m.out, n * sizeof(float), cudaMemcpyDeviceToHost));
    CUDA(cudaMemset(m.out, 0xff, n * sizeof(float)));
    all();
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(together.data(), m.out, n * sizeof(float), cudaMemcpyDeviceToHost));
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

// ---- Latent caches ----

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
    while (all < (double)SEVERAL_CACHES && copies.size() < (opt.list || opt.check ? 1 : 64)) {
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
    tqkv_attention call = {};
    call.keys = call.values = &rows;
    call.tail = tail.format ? &tail : nullptr;
    call.n_heads = LATENT_HEADS;
    call.end = rows.capacity;
    return call;
}

void plan_latent(const latent &l, const latent_memory &m, tqkv_metal_dispatch d[2])
{
    const gpu_attention planned(latent_call(l.rows, l.tail));
    check_plan(tqkv_metal_plan_attend(&planned.metal, gpu_buffer(m.q), gpu_buffer(nullptr), gpu_buffer(m.out), d));
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
    const gpu_dispatch planned = gpu_planned(d[0]);
    int per_processor = 1, processors = 132;
    if (!opt.list) {
        CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
        CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, find_pipeline(planned), (int)planned.threads,
                                                           cuda_shared_bytes(planned)));
    }
    const int wave = opt.threadgroups ? opt.threadgroups : processors * per_processor;
    if (!opt.planned) m.split.n_stretches = std::max(tiles / 64, wave / (int)(d[0].grid[0] * d[0].grid[1]));
    plan_latent(l, m, d);
    m.q = device_array<float>(LATENT_HEADS * (LATENT_DIM + LATENT_TAIL));
    m.out = device_array<float>(LATENT_HEADS * LATENT_DIM);
    m.sums = device_array<float>(gpu_find(&d[0], 6)->size / sizeof(float));
    m.state = device_array<float>(gpu_find(&d[0], 7)->size / sizeof(float));
    if (!opt.list) bench_fill(m.q, LATENT_HEADS * (LATENT_DIM + LATENT_TAIL), 77, stream);
    return m;
}

tqkv_store stream_on_host(const tqkv_store &s, std::vector<char> &bytes)
{
    tqkv_store store = s;
    bytes.resize(s.codes_size + s.norms_size + 16);
    store.codes = bytes.data();
    store.norms = (float *)(void *)(bytes.data() + (s.codes_size + 15) / 16 * 16);
    if (!s.codes_size) return store;
    CUDA(cudaMemcpy(store.codes, s.codes, s.codes_size, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(store.norms, s.norms, s.norms_size, cudaMemcpyDeviceToHost));
    return store;
}

// Compares with C, head for head.
void check_latent(const std::string &name, const latent &l, const latent_memory &m)
{
    std::vector<char> rows_bytes, tail_bytes;
    const tqkv_store rows = stream_on_host(l.rows, rows_bytes), tail = stream_on_host(l.tail, tail_bytes);
    const tqkv_attention call = latent_call(rows, tail);
    std::vector<float> q(LATENT_HEADS * (LATENT_DIM + LATENT_TAIL)), got(LATENT_HEADS * LATENT_DIM), expected(got);
    attend_latent(l, m);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(q.data(), m.q, q.size() * sizeof(float), cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(got.data(), m.out, got.size() * sizeof(float), cudaMemcpyDeviceToHost));
    double most = tqkv_attend(&call, q.data(), expected.data()) == TQKV_OK ? 0.0 : 1.0;
    for (size_t row = 0; row < LATENT_HEADS; row++) {
        double error = 0.0, size = 0.0;
        for (size_t i = row * LATENT_DIM; i < (row + 1) * LATENT_DIM; i++) {
            error += ((double)got[i] - expected[i]) * ((double)got[i] - expected[i]);
            size += (double)expected[i] * expected[i];
        }
        if (!(sqrt(error / size) <= most)) most = sqrt(error / size);
    }
    printf("error %s %.2g\n", name.c_str(), most);
    if (most <= 4e-5) return;
    printf("WRONG %s\n", name.c_str());
    n_wrong++;
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

// ---- An index, and lists of blocks ----

enum { INDEX_KEYS = 262144, INDEX_HEADS = 64, CHOSEN = 2048 };

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
        d->memory[3] = (size_t)TQKV__MATRIX_KEPT_BYTES(matrices);
    }
    if (opt.n_simdgroups) d->n_simdgroups = opt.n_simdgroups;
    if (!opt.index_keys) return;
    args.blocks_each = opt.index_keys / args.block;
    d->grid[0] = (size_t)((args.n_blocks + args.blocks_each - 1) / args.blocks_each);
    memcpy(d->arguments[0].bytes, &args, sizeof args);
}

void score_index(const index_memory &m, size_t copy)
{
    tqkv_metal_dispatch d;
    static float not_read; // NULL would be no weights
    const gpu_index x(index_of(m.keys[copy], opt.list ? &not_read : m.weights));
    check_plan(tqkv_metal_plan_index_scores(&x.metal, gpu_buffer(m.q), gpu_buffer(m.scores), &d));
    force_index(&d);
    launch(d);
}

// only: one of the dispatches alone; -1: all
void choose_index(const index_memory &m, int only = -1)
{
    tqkv_metal_dispatch d[TQKV_METAL_CHOOSE_DISPATCHES];
    int n;
    const gpu_index x(index_of(m.keys[0], nullptr));
    check_plan(tqkv_metal_plan_index_choose(&x.metal, gpu_buffer(m.scores), CHOSEN, gpu_buffer(m.scratch),
                                            gpu_buffer(m.list), d, &n));
    for (int i = 0; i < n; i++)
        if (only < 0 || i == only) launch(d[i]);
}

index_memory make_index(tqkv_format format)
{
    index_memory m = {};
    double bytes = 0.0;
    while (bytes < (double)SEVERAL_CACHES && m.keys.size() < (opt.list || opt.check ? 1 : 64)) {
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
    std::vector<float> norms, q(INDEX_HEADS * 128), weights(INDEX_HEADS), scores(INDEX_KEYS), expected(INDEX_KEYS);
    std::vector<int32_t> list(CHOSEN), chosen(CHOSEN);
    score_index(m, 0);
    choose_index(m);
    CUDA(cudaStreamSynchronize(stream));
    const tqkv_store keys = head_on_host(m.keys[0], codes, norms);
    CUDA(cudaMemcpy(q.data(), m.q, q.size() * sizeof(float), cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(weights.data(), m.weights, weights.size() * sizeof(float), cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(scores.data(), m.scores, scores.size() * sizeof(float), cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(list.data(), m.list, list.size() * sizeof(int32_t), cudaMemcpyDeviceToHost));
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
        for (int i = 0; i < TQKV_METAL_CHOOSE_DISPATCHES; i++)
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

struct list_memory {
    std::vector<tqkv_store> keys, values;
    float *q, *out, *scratch;
    int32_t *list;
    int n_kv_heads, positions, group, block, length;
};

enum { LISTED = 2048 };
enum list_part { LIST_ALL = 1, LIST_CLEAN = 2, LIST_ATTEND = 4, LIST_MERGE = 8 }; // LIST_ALL: no list

// As tqkv.h plans it for any GPU.
void attend_list(const list_memory &m, size_t copy, int parts)
{
    tqkv_metal_dispatch d[3];
    static int32_t not_read; // NULL would be no list
    const bool listed = !(parts & LIST_ALL);
    tqkv_attention call = {};
    call.keys = &m.keys[copy];
    call.values = &m.values[copy];
    call.n_heads = m.group * m.n_kv_heads;
    call.end = m.positions;
    call.list_length = m.length;
    call.list_block = m.block;
    gpu_attention planned(call);
    if (listed) planned.metal.list = gpu_buffer(opt.list ? &not_read : m.list);
    if (listed) check_plan(tqkv_metal_plan_attend_list(&planned.metal, gpu_buffer(m.scratch), &d[2]));
    check_plan(tqkv_metal_plan_attend(&planned.metal, gpu_buffer(m.q), gpu_buffer(m.scratch), gpu_buffer(m.out), d));
    if (parts & LIST_CLEAN) launch(d[2]);
    if (parts & LIST_ATTEND) launch(d[0]);
    if (parts & LIST_MERGE) launch(d[1]);
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
    std::vector<float> q(n), got(n), expected(n);
    attend_list(m, 0, LIST_CLEAN | LIST_ATTEND | LIST_MERGE);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(q.data(), m.q + first, n * sizeof(float), cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(got.data(), m.out + first, n * sizeof(float), cudaMemcpyDeviceToHost));
    tqkv_attention c = {};
    c.keys = &k;
    c.values = &v;
    c.n_heads = m.group;
    c.end = m.positions;
    c.list = list.data();
    c.list_length = m.length;
    c.list_block = m.block;
    check_plan(tqkv_attend(&c, q.data(), expected.data()));
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < n; i++) {
        error += ((double)got[i] - expected[i]) * ((double)got[i] - expected[i]);
        size += (double)expected[i] * expected[i];
    }
    const bool right = sqrt(error / size) <= 4e-5;
    printf("error %s %.2g\n", name.c_str(), sqrt(error / size));
    if (!right) printf("WRONG %s\n", name.c_str());
    n_wrong += !right;
}

list_memory make_list(tqkv_format format, int n_kv_heads, int positions, int group)
{
    list_memory m = {};
    double bytes = 0.0;
    while (bytes < (double)SEVERAL_CACHES && m.keys.size() < (opt.list || opt.check ? 1 : 64)) {
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

// 2,048 positions in blocks of 1 and 64, against all of them.
void bench_list(tqkv_format format, int n_kv_heads, int positions, int group)
{
    const std::string name = std::string("list/") + tqkv_format_name(format) + "/d128/kv" + std::to_string(n_kv_heads) +
                             "/g" + std::to_string(group) + "/" + std::to_string(positions);
    if (!is_wanted(name)) return;
    list_memory m = make_list(format, n_kv_heads, positions, group);
    const auto all = [&](int i) { attend_list(m, (size_t)i, LIST_ALL | LIST_ATTEND | LIST_MERGE); };
    if (opt.list)
        all(0);
    else if (!opt.check)
        report(name, time_calls((int)m.keys.size(), all));
    list_memory few = m;
    few.positions = LISTED;
    const auto as_many = [&](int i) { attend_list(few, (size_t)i, LIST_ALL | LIST_ATTEND | LIST_MERGE); };
    if (opt.list)
        as_many(0);
    else if (!opt.check)
        report(name + "/first" + std::to_string((int)LISTED), time_calls((int)m.keys.size(), as_many));
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

// A dispatch that does nothing, in a graph of such: less time than this no dispatch takes.
void bench_nothing()
{
    if (!opt.list && !opt.check && is_wanted("launch/nothing"))
        report("launch/nothing", time_calls(1, [&](int) { bench_launch_nothing(stream); }));
}

void bench_all()
{
    for (tqkv_format f : {TQKV_TQ4, TQKV_I8, TQKV_F16}) bench_index(f);
    bench_nothing();
    for (int group : {2, 8, 16}) bench_list(TQKV_TQ4, N_KV_HEADS, 32768, group);
    bench_list(TQKV_TQ4, N_KV_HEADS, 262144, 8);
    bench_list(TQKV_TQ4, 64, 32768, 8);
    const tqkv_format formats[] = {TQKV_F16, TQKV_I8, TQKV_TQ8, TQKV_TQ6, TQKV_TQ5, TQKV_TQ4, TQKV_TQ3, TQKV_TQ2};
    const std::vector<std::pair<int, int>> groups = {{1, 1}, {2, 1}, {4, 1}, {8, 1}, {16, 1}, {2, 8}};
    for (tqkv_format f : {TQKV_F16, TQKV_I8, TQKV_TQ8, TQKV_TQ6, TQKV_TQ5, TQKV_TQ4, TQKV_TQ3, TQKV_TQ2})
        bench_encode(f, 128, 131072);
    for (int head_dim : {64, 80, 96, 192, 256, 512}) bench_encode(TQKV_TQ4, head_dim, 131072);
    for (tqkv_format f : {TQKV_I8, TQKV_TQ4}) bench_encode(f, 128, 131072, TQKV_TYPE_BF16);
    for (tqkv_format f : formats)
        for (int positions : {131072, 1048576}) bench_attention(f, f, 128, positions, groups);
    bench_attention(TQKV_I8, TQKV_TQ4, 128, 131072, groups);
    for (int group : {2, 4}) bench_batch(TQKV_I8, TQKV_TQ4, group);
    for (int positions : {32768, 131072}) {
        bench_latent(TQKV_TQ4, TQKV_F16, positions);
        bench_latent(TQKV_I8, TQKV_F16, positions);
        bench_latent(TQKV_F16, TQKV_F16, positions);
        bench_latent(TQKV_TQ4, TQKV_FORMAT_DEFAULT, positions);
    }
    for (int head_dim : {80, 96, 192})
        for (tqkv_format f : {TQKV_F16, TQKV_I8, TQKV_TQ4}) bench_attention(f, f, head_dim, 131072, groups);
    for (tqkv_format f : {TQKV_F16, TQKV_I8, TQKV_TQ4}) {
        bench_attention(f, f, 128, 8192, {{2, 512}});
        bench_attention(f, f, 128, 4096, {{4, 4096}});
        bench_decode(f, 128, 8192);
    }
    if (opt.quick) return;
    for (tqkv_format f : formats) {
        for (int positions : {8192, 32768}) bench_attention(f, f, 128, positions, groups);
        for (int head_dim : {64, 256, 512})
            for (int positions : {8192, 32768, 131072, 1048576}) bench_attention(f, f, head_dim, positions, groups);
    }
}

void read_options(int argc, char **argv)
{
    opt.folder = argc > 1 ? argv[1] : "";
    for (int i = 2; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument == "--list")
            opt.list = true;
        else if (argument == "--quick")
            opt.quick = true;
        else if (argument == "--check")
            opt.check = true;
        else if (argument == "--lanes")
            opt.kernel = GPU_LANES;
        else if (argument == "--matrices")
            opt.kernel = GPU_MATRICES;
        else if (argument == "--planned")
            opt.planned = true;
        else if (argument == "--simdgroups" && i + 1 < argc)
            opt.n_simdgroups = atoi(argv[++i]);
        else if (argument == "--stretches" && i + 1 < argc)
            opt.stretches = atoi(argv[++i]);
        else if (argument == "--columns" && i + 1 < argc)
            opt.columns = atoi(argv[++i]);
        else if (argument == "--index-keys" && i + 1 < argc)
            opt.index_keys = atoi(argv[++i]);
        else if (argument == "--threadgroups" && i + 1 < argc)
            opt.threadgroups = atoi(argv[++i]);
        else
            opt.filters.push_back(argument);
    }
}

} // namespace

int main(int argc, char **argv)
{
    read_options(argc, argv);
    if (!opt.list) {
        CUDA(cudaStreamCreate(&stream));
        if (!opt.check) measure_limits();
    }
    bench_all();
    return n_wrong != 0;
}

// Times the shaders on an NVIDIA GPU: bench FOLDER [--list] [--quick] [--check] [part of a name]...
//
// FOLDER holds the pipelines; --list prints the names of those that are wanted. --check: attention is
// compared with the processor and not timed, for compute-sanitizer. Every call is in a graph of several, over
// copies of the data that together exceed the L2 several times; a time is the median of replays over the calls in one.
// Prints `time NAME microseconds` and `ratio NAME/OF value` lines: OF is limit, f16 (the same kernel on halves) or, for
// encoding, copy.
#define TQKV_SHARED
#include "tqkv.h"
#include "bench_kernels.h"
#include "pipelines.h"
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

enum { N_KV_HEADS = 8, CHECKED_HEAD = 3, REPLAYS = 9, SEVERAL_CACHES = 400 << 20 };

struct options {
    std::string folder;
    bool list, quick, check;
    int n_simdgroups, threadgroups; // 0: chosen
    std::vector<std::string> filters;
};
options opt;
std::map<std::string, double> times;      // by name, microseconds
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

struct dispatch {
    const void *kernel;
    std::string name;
    dim3 grid;
    unsigned threads;
    size_t shared;
    simt_arguments arguments;
};

// constants: index and value, in pairs
dispatch make_dispatch(const char *family, int head_dim, const std::vector<std::pair<int, int>> &constants,
                       const std::vector<size_t> &memory)
{
    dispatch d = {};
    bool set[cuda_n_constants] = {};
    uint32_t values[cuda_n_constants] = {};
    for (const auto &c : constants) {
        set[c.first] = true;
        values[c.first] = (uint32_t)c.second;
    }
    d.name = cuda_pipeline_name((std::string("tqkv_") + family + "_d" + std::to_string(head_dim)).c_str(), set, values);
    d.shared = cuda_lay_out(memory.data(), (int)memory.size(), d.arguments.threadgroup_offsets);
    if (opt.list) {
        printf("pipeline %s\n", d.name.c_str());
        return d;
    }
    std::string error;
    d.kernel = cuda_pipeline(opt.folder, d.name, &error);
    if (!d.kernel) {
        fprintf(stderr, "%s\n", error.c_str());
        exit(1);
    }
    return d;
}

void launch(const dispatch &d)
{
    void *parameters[] = {(void *)&d.arguments};
    CUDA(cudaLaunchKernel(d.kernel, d.grid, dim3(d.threads), parameters, d.shared, stream));
}

template <class T>
T *device_array(size_t n)
{
    void *pointer = nullptr;
    if (!opt.list) CUDA(cudaMalloc(&pointer, n * sizeof(T) + 16)); // never empty
    return (T *)pointer;
}

template <class T>
T *device_copy(const T &value)
{
    T *pointer = device_array<T>(1);
    if (!opt.list) CUDA(cudaMemcpy(pointer, &value, sizeof value, cudaMemcpyHostToDevice));
    return pointer;
}

// ---- Time ----

// Median of what `work` takes on the stream, in microseconds.
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
        if (i >= 2) found.push_back(milliseconds * 1e3); // the first ones warm up
    }
    CUDA(cudaEventDestroy(begin));
    CUDA(cudaEventDestroy(end));
    std::sort(found.begin(), found.end());
    return found[found.size() / 2];
}

// Microseconds of one call; call(i) is for copy i of the data.
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
    // The better of the driver's copy, which is slower in a graph, and a plain kernel.
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

struct stream_data {
    tqkv_store shape; // without buffers
    char *codes;
    float *norms;
};

stream_data make_stream(tqkv_format format, int head_dim, int positions)
{
    stream_data s = {};
    s.shape.format = format;
    s.shape.head_dim = head_dim;
    s.shape.n_kv_heads = N_KV_HEADS;
    s.shape.capacity = positions;
    s.shape.codes_size = tqkv_codes_size(&s.shape);
    s.shape.norms_size = tqkv_norms_size(&s.shape);
    s.codes = device_array<char>(s.shape.codes_size);
    s.norms = device_array<float>(s.shape.norms_size / sizeof(float));
    return s;
}

double stored_bytes(const stream_data &s) { return (double)(s.shape.codes_size + s.shape.norms_size); }

void free_stream(stream_data &s)
{
    CUDA(cudaFree(s.codes));
    CUDA(cudaFree(s.norms));
}

struct encoder {
    dispatch d;
    uint32_t *flag;
};

// Encodes n_tokens from slot `first` on.
encoder make_encoder(const stream_data &s, const float *source, int n_tokens, int first)
{
    const int n = 4, head_dim = s.shape.head_dim;
    encoder e = {};
    e.d = make_dispatch("encode", head_dim,
                        {{TQKV_FC_FORMAT, s.shape.format}, {TQKV_FC_ROTATED, s.shape.format != TQKV_F16}},
                        {TQKV__CELL_BYTES, (size_t)TQKV__SIGN_BYTES(head_dim)});
    const tqkv__rows_args args = {n_tokens, N_KV_HEADS, s.shape.capacity, first, 1.0f};
    cuda_set_value(&e.d.arguments, 0, &args, sizeof args);
    e.flag = device_copy((uint32_t)0);
    void *buffers[] = {nullptr, (void *)source, s.codes, s.norms, e.flag};
    memcpy(e.d.arguments.buffers, buffers, sizeof buffers);
    e.d.threads = 32 * n;
    const int64_t rows = (int64_t)n * TQKV__ENCODE_ROWS(head_dim);
    e.d.grid = dim3((unsigned)(((int64_t)n_tokens * N_KV_HEADS + rows - 1) / rows));
    return e;
}

void free_encoder(encoder &e) { CUDA(cudaFree(e.flag)); }

// Gaussian rows through the library's own encoder, a piece at a time.
void fill_stream(const stream_data &s, uint32_t seed)
{
    const int piece = std::min(s.shape.capacity, 1 << 15);
    const size_t row = (size_t)N_KV_HEADS * (size_t)s.shape.head_dim;
    float *source = device_array<float>(row * (size_t)piece);
    for (int first = 0; first < s.shape.capacity; first += piece) {
        encoder e = make_encoder(s, source, piece, first);
        if (opt.list) break;
        bench_fill(source, row * (size_t)piece, seed + (uint32_t)first, stream);
        launch(e.d);
        CUDA(cudaStreamSynchronize(stream));
        free_encoder(e);
    }
    if (!opt.list) CUDA(cudaFree(source));
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
    tqkv__attend_args args;
    int columns, n_simdgroups, n_rows;
    dispatch attend, merge;
    float *q, *out, *partial_out, *partial_state;
};

// As tqkv_metal.m cuts the work, but for one full wave of this GPU's multiprocessors.
void choose_split(attention *a)
{
    const int rows = a->shape.n_queries * a->shape.group, most = TQKV__MAX_COLUMNS(a->shape.head_dim);
    const int blocks = (rows + most - 1) / most;
    a->columns = (rows + blocks - 1) / blocks;
    a->n_simdgroups = opt.n_simdgroups ? opt.n_simdgroups : a->columns <= 2 && a->shape.head_dim <= 128 ? 8 : 4;
}

void choose_splits(attention *a)
{
    const int rows = a->shape.n_queries * a->shape.group, blocks = (rows + a->columns - 1) / a->columns;
    int per_processor = 1, processors = 132, tiles = (a->shape.positions + 31) / 32;
    if (!opt.list) {
        CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
        CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, a->attend.kernel, 32 * a->n_simdgroups,
                                                           a->attend.shared));
    }
    const int wave = opt.threadgroups ? opt.threadgroups : processors * per_processor;
    const int wanted = std::max(1, wave / (blocks * N_KV_HEADS)), allowed = std::max(1, tiles / (2 * a->n_simdgroups));
    a->args.n_splits = std::min(wanted, allowed);
}

attention make_attention(const attend_shape &shape)
{
    attention a = {};
    a.shape = shape;
    choose_split(&a);
    const int d = shape.head_dim;
    a.attend = make_dispatch("attend", d,
                             {{TQKV_FC_FORMAT, shape.keys},
                              {TQKV_FC_VALUE_FORMAT, shape.values},
                              {TQKV_FC_ROTATE_QUERIES, shape.keys != TQKV_F16},
                              {TQKV_FC_COLUMNS, a.columns},
                              {TQKV_FC_MANY_QUERIES, shape.n_queries > 1},
                              {TQKV_FC_SOFTCAP, 0},
                              {TQKV_FC_SAME_SLOTS, 1},
                              {TQKV_FC_SHORT_STORE, 0}},
                             {TQKV__ATTEND_TABLE_BYTES, (size_t)TQKV__ATTEND_QUERY_BYTES(d),
                              (size_t)TQKV__ATTEND_WEIGHT_BYTES(d, a.n_simdgroups),
                              (size_t)TQKV__ATTEND_STATE_BYTES(d, a.n_simdgroups)});
    a.merge = make_dispatch("attend_merge", d, {{TQKV_FC_UNROTATE, shape.values != TQKV_F16}, {TQKV_FC_SINKS, 0}}, {});
    tqkv__attend_args args = {shape.n_queries,
                              N_KV_HEADS,
                              shape.group,
                              shape.positions,
                              0,
                              1,
                              shape.positions,
                              0,
                              shape.positions,
                              0,
                              TQKV__INV_SQRT(d),
                              0.0f,
                              1.0f,
                              1.0f};
    a.args = args;
    choose_splits(&a);
    a.n_rows = shape.n_queries * shape.group * N_KV_HEADS;
    const size_t rows = (size_t)a.n_rows, n_splits = (size_t)a.args.n_splits;
    a.q = device_array<float>(rows * (size_t)d);
    a.out = device_array<float>(rows * (size_t)d);
    a.partial_out = device_array<float>(rows * (size_t)d * n_splits);
    a.partial_state = device_array<float>(rows * 2 * n_splits);
    return a;
}

void bind_attention(attention *a)
{
    tqkv__merge_args merge = {a->n_rows, N_KV_HEADS * a->shape.group, a->args.n_splits};
    const int rows = a->shape.n_queries * a->shape.group;
    void *attend_buffers[] = {nullptr, a->q, nullptr, nullptr, nullptr, nullptr, a->partial_out, a->partial_state};
    void *merge_buffers[] = {nullptr, a->partial_out, a->partial_state, a->q, a->out};
    cuda_set_value(&a->attend.arguments, 0, &a->args, sizeof a->args);
    cuda_set_value(&a->merge.arguments, 0, &merge, sizeof merge);
    memcpy(a->attend.arguments.buffers, attend_buffers, sizeof attend_buffers);
    memcpy(a->merge.arguments.buffers, merge_buffers, sizeof merge_buffers);
    a->attend.threads = (unsigned)(32 * a->n_simdgroups);
    a->attend.grid = dim3(N_KV_HEADS, (unsigned)((rows + a->columns - 1) / a->columns), (unsigned)a->args.n_splits);
    const int n = std::min(a->args.n_splits, TQKV__MERGE_SIMDGROUPS(a->shape.head_dim));
    a->merge.threads = (unsigned)(32 * n);
    a->merge.shared = (size_t)TQKV__MERGE_BYTES(a->shape.head_dim, n);
    a->merge.grid = dim3((unsigned)a->n_rows);
    bench_fill(a->q, (size_t)a->n_rows * (size_t)a->shape.head_dim, 77, stream);
}

void free_attention(attention *a)
{
    for (float *pointer : {a->q, a->out, a->partial_out, a->partial_state}) CUDA(cudaFree(pointer));
}

void attend(const attention &a, const stream_data &keys, const stream_data &values)
{
    dispatch d = a.attend;
    void *buffers[] = {keys.codes, keys.norms, values.codes, values.norms};
    memcpy(d.arguments.buffers + 2, buffers, sizeof buffers);
    launch(d);
    launch(a.merge);
}

// The rows of one KV head on the host.
tqkv_store head_on_host(const stream_data &s, std::vector<char> &codes, std::vector<float> &norms)
{
    tqkv_store store = s.shape;
    codes.resize(s.shape.codes_size / N_KV_HEADS);
    norms.resize(s.shape.norms_size / sizeof(float) / N_KV_HEADS);
    CUDA(cudaMemcpy(codes.data(), s.codes + codes.size() * CHECKED_HEAD, codes.size(), cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(norms.data(), s.norms + norms.size() * CHECKED_HEAD, norms.size() * sizeof(float),
                    cudaMemcpyDeviceToHost));
    store.n_kv_heads = 1;
    store.codes = codes.data();
    store.codes_size = codes.size();
    store.norms = norms.data();
    store.norms_size = norms.size() * sizeof(float);
    return store;
}

// [n_queries][n_heads][D] on the device to [n_queries][group][D] of the checked head.
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

// What was timed must also be right: one KV head against C, both within 2e-5 of double precision.
void check_attention(const attention &a, const stream_data &keys, const stream_data &values)
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

double attend_limit(const attention &a, const stream_data &keys, const stream_data &values)
{
    const double multiply_adds = 2.0 * a.n_rows * (double)a.shape.positions * a.shape.head_dim;
    return 1e6 *
           std::max((stored_bytes(keys) + stored_bytes(values)) / copy_bandwidth, multiply_adds / multiply_add_rate);
}

void report_attention(const attention &a, const std::vector<stream_data> &keys, const std::vector<stream_data> &values)
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
    printf("cut %s columns %d simdgroups %d splits %d\n", name.c_str(), a.columns, a.n_simdgroups, a.args.n_splits);
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
    std::vector<stream_data> keys, values;
    double bytes = 0.0;
    while (bytes < SEVERAL_CACHES && keys.size() < (opt.list || opt.check ? 1 : 64)) {
        keys.push_back(make_stream(key_format, head_dim, positions));
        values.push_back(make_stream(value_format, head_dim, positions));
        fill_stream(keys.back(), 1 + (uint32_t)keys.size());
        fill_stream(values.back(), 1000 + (uint32_t)keys.size());
        bytes += stored_bytes(keys.back()) + stored_bytes(values.back());
    }
    for (const attend_shape &s : shapes) {
        attention a = make_attention(s);
        if (opt.list) continue;
        bind_attention(&a);
        check_attention(a, keys[0], values[0]);
        if (!opt.check) report_attention(a, keys, values);
        free_attention(&a);
    }
    if (opt.list) return;
    for (stream_data &s : keys) free_stream(s);
    for (stream_data &s : values) free_stream(s);
}

// ---- Encoding and decoding ----

void bench_encode(tqkv_format format, int head_dim, int n_tokens)
{
    const std::string name = std::string("encode/") + tqkv_format_name(format) + "/d" + std::to_string(head_dim) + "/" +
                             std::to_string(n_tokens);
    if (opt.check || !is_wanted(name)) return;
    const size_t n = (size_t)n_tokens * N_KV_HEADS * (size_t)head_dim;
    float *source = device_array<float>(n);
    stream_data s = make_stream(format, head_dim, n_tokens);
    encoder e = make_encoder(s, source, n_tokens, 0);
    if (opt.list) return;
    bench_fill(source, n, 5, stream);
    report(name, time_calls(1, [&](int) { launch(e.d); })); // source and store exceed the L2 by themselves
    const double input = (double)(n * sizeof(float)), all = input + stored_bytes(s);
    report_ratio(name + "/copy_of_input", input / copy_bandwidth * 1e6 / times[name]);
    report_ratio(name + "/copy", all / copy_bandwidth * 1e6 / times[name]);
    free_encoder(e);
    free_stream(s);
    CUDA(cudaFree(source));
}

void bench_decode(tqkv_format format, int head_dim, int positions)
{
    const std::string name = std::string("decode/") + tqkv_format_name(format) + "/d" + std::to_string(head_dim) + "/" +
                             std::to_string(positions);
    if (opt.check || !is_wanted(name)) return;
    const int n = 4;
    const size_t elements = (size_t)positions * N_KV_HEADS * (size_t)head_dim;
    stream_data s = make_stream(format, head_dim, positions);
    fill_stream(s, 3);
    dispatch d = make_dispatch("decode", head_dim, {{TQKV_FC_FORMAT, format}, {TQKV_FC_UNROTATE, format != TQKV_F16}},
                               {TQKV__TABLE_BYTES});
    if (opt.list) return;
    float *out = device_array<float>(elements);
    const tqkv__rows_args args = {positions, N_KV_HEADS, positions, 0, 1.0f};
    void *buffers[] = {nullptr, s.codes, s.norms, out};
    cuda_set_value(&d.arguments, 0, &args, sizeof args);
    memcpy(d.arguments.buffers, buffers, sizeof buffers);
    d.threads = 32 * n;
    d.grid = dim3((unsigned)(((int64_t)positions * N_KV_HEADS + n - 1) / n));
    report(name, time_calls(1, [&](int) { launch(d); }));
    report_ratio(name + "/copy", (stored_bytes(s) + (double)elements * 4) / copy_bandwidth * 1e6 / times[name]);
    CUDA(cudaFree(out));
    free_stream(s);
}

void bench_all()
{
    const tqkv_format formats[] = {TQKV_F16, TQKV_I8, TQKV_TQ8, TQKV_TQ5, TQKV_TQ4};
    const std::vector<std::pair<int, int>> groups = {{2, 1}, {4, 1}, {8, 1}};
    for (tqkv_format f : {TQKV_F16, TQKV_I8, TQKV_TQ8, TQKV_TQ6, TQKV_TQ5, TQKV_TQ4}) bench_encode(f, 128, 131072);
    for (int head_dim : {64, 256, 512}) bench_encode(TQKV_TQ4, head_dim, 131072);
    for (tqkv_format f : formats)
        for (int positions : {131072, 1048576}) bench_attention(f, f, 128, positions, groups);
    bench_attention(TQKV_I8, TQKV_TQ4, 128, 131072, groups);
    for (tqkv_format f : {TQKV_F16, TQKV_I8, TQKV_TQ4}) {
        bench_attention(f, f, 128, 8192, {{2, 512}});
        bench_decode(f, 128, 8192);
    }
    if (opt.quick) return;
    for (tqkv_format f : formats) {
        for (int positions : {8192, 32768}) bench_attention(f, f, 128, positions, groups);
        for (int head_dim : {64, 256, 512})
            for (int positions : {8192, 32768, 131072, 1048576}) bench_attention(f, f, head_dim, positions, groups);
        for (int positions : {8192, 131072}) bench_attention(f, f, 128, positions, {{2, 8}});
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
        else if (argument == "--simdgroups" && i + 1 < argc)
            opt.n_simdgroups = atoi(argv[++i]);
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

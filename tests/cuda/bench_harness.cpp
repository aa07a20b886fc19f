// The benchmark's harness: launching, timing, reporting, and stores on the GPU.
#include "bench.h"
#include "../reference.h"

enum { REPLAYS = 9 };

options opt;
std::map<std::string, double> times;
double copy_bandwidth, multiply_add_rate;
cudaStream_t stream;
int n_wrong;

void check_cuda(cudaError_t result, const char *file, int line, const char *call)
{
    if (result == cudaSuccess) return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(result));
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
    fprintf(stderr, "bench: %s\n", tqkv_result_string(r));
    exit(1);
}

// NULL with --list, which prints the name.
static const void *find_pipeline(const device_dispatch &d)
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

int threadgroups_at_once(const tqkv_metal_dispatch &planned)
{
    const gpu_dispatch d = gpu_planned(planned);
    int per_processor = 1, processors = 132;
    if (!opt.list) {
        CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
        CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, find_pipeline(d), (int)d.threads,
                                                           cuda_shared_bytes(d)));
    }
    return processors * per_processor;
}

// The buffers of the plan are pointers to the device's memory.
void launch(const tqkv_metal_dispatch &planned)
{
    const gpu_dispatch d = gpu_planned(planned);
    const void *kernel = find_pipeline(d);
    if (!opt.list) CUDA(cuda_launch(kernel, d, d.buffers, stream));
}

void launch(const tqkv_metal_plan &plan)
{
    for (int i = 0; i < plan.n; i++) launch(plan.d[i]);
}

// ---- Memory ----

static std::vector<void *> allocated;

device_scope::device_scope() : n_before(allocated.size()) {}

device_scope::~device_scope()
{
    if (!opt.list) CUDA(cudaStreamSynchronize(stream));
    for (; allocated.size() > n_before; allocated.pop_back()) CUDA(cudaFree(allocated.back()));
}

void *device_memory(size_t bytes)
{
    void *pointer = nullptr;
    if (opt.list) return pointer;
    CUDA(cudaMalloc(&pointer, bytes));
    allocated.push_back(pointer);
    return pointer;
}

float *gaussian_array(size_t n, uint32_t seed)
{
    float *array = device_array<float>(n);
    if (!opt.list) bench_fill(array, n, seed, stream);
    return array;
}

// ---- Time ----

// The median time of `work` on the stream, in microseconds.
static double time_stream(const std::function<void()> &work)
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

// Microseconds of one call.
static double time_calls(int n_copies, const bench_call &call)
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

void run_bench(int n_copies, const std::function<void()> &check,
               const std::vector<std::pair<std::string, bench_call>> &calls)
{
    if (!opt.list) check();
    for (const auto &call : calls) {
        if (opt.list) call.second(0);
        if (opt.list || opt.check) continue;
        times[call.first] = time_calls(n_copies, call.second);
        printf("time %s %.2f\n", call.first.c_str(), times[call.first]);
        fflush(stdout);
    }
}

void report_share(const std::string &ratio, const std::string &name, double microseconds)
{
    if (times.count(name)) printf("ratio %s %.3f\n", ratio.c_str(), microseconds / times[name]);
}

void report_ratio(const std::string &ratio, const std::string &name, const std::string &of)
{
    if (times.count(name)) report_share(ratio, of, times[name]);
}

void measure_limits()
{
    const device_scope scope;
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
}

// ---- Errors ----

void report_right(const std::string &name, bool right, double error)
{
    printf("error %s %.2g\n", name.c_str(), error);
    if (!right) printf("WRONG %s\n", name.c_str());
    n_wrong += !right;
}

bool has_integers(const tqkv_store *s)
{
    return s && s->format != TQKV_F16 && s->format != TQKV_I8 && s->format != TQKV_TQ8;
}

// Against C, which multiplies integers. D: of an output
void report_error(const std::string &name, const std::vector<float> &got, const std::vector<float> &expected, size_t D,
                  const tqkv_attention &call)
{
    const std::vector<double> reference(expected.begin(), expected.end());
    double most = 0.0;
    for (size_t at = 0; at < got.size(); at += D) // of NaN infinity
        most = std::max(most, reference_relative_error(&got[at], &reference[at], D));
    const bool integers = has_integers(call.keys) || has_integers(call.values) || has_integers(call.tail);
    report_right(name, most <= (integers ? 0.035 : 3.5e-4), most);
}

// ---- Streams ----

double stored_bytes(const tqkv_store &s) { return (double)(s.codes_size + s.norms_size); }

void encode(const tqkv_store &s, const float *source, int n_tokens, int position)
{
    tqkv_metal_plan plan;
    check_plan(gpu_plan(tqkv_metal_plan_encode, &s, nullptr, source, nullptr, n_tokens, position, nullptr, &plan));
    launch(plan);
}

// Encoded by the shaders, one piece after the other.
static void fill_stream(const tqkv_store &s, uint32_t seed)
{
    const device_scope scope;
    const int piece = std::min(s.capacity, (1 << 18) / s.n_kv_heads);
    const size_t n = (size_t)piece * (size_t)s.n_kv_heads * (size_t)s.head_dim;
    float *source = device_array<float>(n);
    for (int first = 0; first < (opt.list ? 1 : s.capacity); first += piece) {
        if (!opt.list) bench_fill(source, n, seed + (uint32_t)first, stream);
        encode(s, source, std::min(piece, s.capacity - first), first);
    }
}

// Codes and norms are on the device.
tqkv_store make_stream(tqkv_format format, int head_dim, int positions, int n_kv_heads, uint32_t seed)
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
    fill_stream(s, seed);
    return s;
}

int checked_head(int n_kv_heads) { return n_kv_heads > 3 ? 3 : 0; }

// A store of format 0 is none.
host_head::host_head(const tqkv_store &s) : store(s)
{
    if (!s.format) return;
    const size_t heads = (size_t)s.n_kv_heads, head = (size_t)checked_head(s.n_kv_heads);
    const size_t n_codes = s.codes_size / heads, n_norms = s.norms_size / sizeof(float) / heads;
    codes = on_host((const char *)s.codes + n_codes * head, n_codes);
    norms = on_host(s.norms + n_norms * head, n_norms);
    store.n_kv_heads = 1;
    store.codes = codes.data();
    store.codes_size = codes.size();
    store.norms = norms.data();
    store.norms_size = norms.size() * sizeof(float);
}

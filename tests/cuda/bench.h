// What the files of the benchmark share: its options, launching and timing, lines of the report, and stores on the GPU.
#ifndef TQKV_TESTS_CUDA_BENCH_H
#define TQKV_TESTS_CUDA_BENCH_H
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

enum { N_KV_HEADS = 8, SEVERAL_CACHES = 400 << 20 };

struct options {
    std::string folder;
    bool list, quick, check;
    std::vector<std::string> filters;
};
extern options opt;
extern std::map<std::string, double> times;      // microseconds by name
extern double copy_bandwidth, multiply_add_rate; // per second
extern cudaStream_t stream;
extern int n_wrong;

bool is_wanted(const std::string &name);

// ---- Calls ----

#define CUDA(call) check_cuda((call), __FILE__, __LINE__, #call)
void check_cuda(cudaError_t result, const char *file, int line, const char *call);
void check_plan(tqkv_result r);

// With --list it is only named.
void launch(const tqkv_metal_dispatch &planned);
void launch(const tqkv_metal_plan &plan);

// Threadgroups of this kind that the GPU has room for.
int threadgroups_at_once(const tqkv_metal_dispatch &planned);

// What device_memory gives while it lives is freed at its end.
struct device_scope {
    const size_t n_before;
    device_scope();
    ~device_scope();
};

void *device_memory(size_t bytes); // NULL with --list
template <class T>
T *device_array(size_t n)
{
    return (T *)device_memory(n * sizeof(T) + 16); // never empty
}

template <class T>
T *device_copy(const std::vector<T> &from)
{
    static T not_read; // NULL would be no array
    T *array = opt.list ? &not_read : device_array<T>(from.size());
    if (!opt.list) CUDA(cudaMemcpy(array, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
    return array;
}

float *gaussian_array(size_t n, uint32_t seed);

// The array on the host, after all work.
template <class T>
std::vector<T> on_host(const T *array, size_t n)
{
    std::vector<T> copy(n);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(copy.data(), array, n * sizeof(T), cudaMemcpyDeviceToHost));
    return copy;
}

// Whether so many copies, of so many bytes together, are too few: one call's must not be in the L2 for the next.
inline bool needs_copies(double bytes, size_t copies)
{
    return bytes < (double)SEVERAL_CACHES && copies < (opt.list || opt.check ? 1 : 64);
}

// ---- One benchmark ----

typedef std::function<void(int)> bench_call; // over copy i of the data

// Checks, and times each call under its name. With --list the calls only name their pipelines.
void run_bench(int n_copies, const std::function<void()> &check,
               const std::vector<std::pair<std::string, bench_call>> &calls);

// Nothing if the name was not timed.
void report_share(const std::string &ratio, const std::string &name, double microseconds);
void report_ratio(const std::string &ratio, const std::string &name, const std::string &of);
bool has_integers(const tqkv_store *s); // whether the processor's attention has other centroids
void report_right(const std::string &name, bool right, double error);

// The largest error of a row of D values, relative to the row. Each side may differ from double precision by 2e-5.
void report_error(const std::string &name, const std::vector<float> &got, const std::vector<float> &expected, size_t D,
                  const tqkv_attention &call);

void measure_limits();

// ---- Stores on the GPU ----

tqkv_store make_stream(tqkv_format format, int head_dim, int positions, int n_kv_heads, uint32_t seed); // Gaussian rows
double stored_bytes(const tqkv_store &s);
void encode(const tqkv_store &s, const float *source, int n_tokens, int position);

// The rows of one KV head, copied to the host.
int checked_head(int n_kv_heads);
struct host_head {
    std::vector<char> codes;
    std::vector<float> norms;
    tqkv_store store;
    explicit host_head(const tqkv_store &s);
};

// ---- What is timed ----

struct attend_shape {
    tqkv_format keys, values;
    int head_dim, group, n_queries, positions, n_kv_heads = N_KV_HEADS;
    // Latent: the values are the keys, which have a tail of this format or none.
    bool latent = false;
    tqkv_format tail = TQKV_FORMAT_DEFAULT;
    // Listed: as tqkv.h plans it for any GPU, over a list of 2,048 positions in blocks, or over all positions (0).
    bool listed = false;
    int block = 0;
};

// All of them over the data of the first.
void bench_attention(const std::vector<attend_shape> &shapes);
void bench_batch(tqkv_format key_format, tqkv_format value_format, int group);
void bench_index(tqkv_format format);

#endif

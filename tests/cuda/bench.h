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

enum { N_KV_HEADS = 8, MATRIX_ROWS = 32, CHECKED_HEAD = 3, SEVERAL_CACHES = 400 << 20, SHORT_CONTEXT = 4096 };

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

// Threadgroups of this kind that the GPU has room for.
int threadgroups_at_once(const tqkv_metal_dispatch &planned);

void *device_memory(size_t bytes); // NULL with --list
template <class T>
T *device_array(size_t n)
{
    return (T *)device_memory(n * sizeof(T) + 16); // never empty
}

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

inline tqkv_attention attention_over(const tqkv_store &keys, const tqkv_store &values, int n_heads, int n_queries)
{
    tqkv_attention a = {};
    a.keys = &keys;
    a.values = &values;
    a.n_heads = n_heads;
    a.n_queries = n_queries;
    a.end = keys.capacity;
    return a;
}

// ---- Time and errors ----

// Microseconds of one call. call(i) uses copy i of the data.
double time_calls(int n_copies, const std::function<void(int)> &call);
void measure_limits();
void report(const std::string &name, double microseconds);
void report_ratio(const std::string &name, double ratio);

// The largest error of a row of D values, relative to the row. Each side may differ from double precision by 2e-5.
void report_error(const std::string &name, const std::vector<float> &got, const std::vector<float> &expected, size_t D,
                  const tqkv_attention &call);

// ---- Stores on the GPU ----

tqkv_store make_stream(tqkv_format format, int head_dim, int positions, int n_kv_heads = N_KV_HEADS);
double stored_bytes(const tqkv_store &s);
void scale_stream(tqkv_store &s); // gives its channels scales
void free_stream(const tqkv_store &s);
void encode(const tqkv_store &s, const void *source, int n_tokens, int position);
void fill_stream(const tqkv_store &s, uint32_t seed); // Gaussian rows, encoded by the shaders

// Copies on the host: all of a store, and the rows of one KV head.
tqkv_store stream_on_host(const tqkv_store &s, std::vector<char> &bytes);
tqkv_store head_on_host(const tqkv_store &s, std::vector<char> &codes, std::vector<float> &norms);

// ---- What is timed ----

// All groups and numbers of queries over the same data.
void bench_attention(tqkv_format key_format, tqkv_format value_format, int head_dim, int positions,
                     const std::vector<std::pair<int, int>> &groups_and_queries, bool scaled = false);
void bench_batch(tqkv_format key_format, tqkv_format value_format, int group);
void bench_latent(tqkv_format format, tqkv_format tail, int positions);
void bench_index(tqkv_format format);
void bench_list(tqkv_format format, int n_kv_heads, int positions, int group);

#endif

// The library's calls made on the machine of simt.h: what a Metal host does to dispatch each kernel, on stores in plain
// memory. Every call runs the kernel under all schedules asked for and compares what it wrote.
#ifndef TQKV_TESTS_GPU_H
#define TQKV_TESTS_GPU_H
#define TQKV_SHARED
#include "tqkv.h"
#include "simt.h"
#include <string>
#include <vector>

// The schedules under which every dispatch runs: orders of the lanes, and what fresh threadgroup memory holds.
extern std::vector<simt::schedule> gpu_schedules;

// Dispatches go to a real device instead, once; only in a driver built with GPU_DEVICE.
extern bool gpu_on_device;

// Simdgroups of a threadgroup in the kernels that take one row a simdgroup.
extern unsigned gpu_row_simdgroups;

// One dispatch of tqkv_<family>_d<head_dim>, built up and then run.
class gpu_dispatch
{
  public:
    gpu_dispatch(const char *family, int head_dim);
    gpu_dispatch &constant(int index, int64_t value);
    gpu_dispatch &input(int index, const void *bytes, size_t size);
    gpu_dispatch &output(int index, void *bytes, size_t size);
    gpu_dispatch &memory(int index, size_t bytes); // threadgroup memory
    // Empty string, or what the machine or the comparison of schedules found wrong.
    std::string run(simt::extent threadgroups, unsigned n_simdgroups);

  private:
    std::string run_once(const simt::schedule &s) const;
    struct bound {
        int index;
        void *bytes;
        size_t size;
        bool written;
    };
    std::string name;
    simt::launch launch;
    std::vector<bound> buffers;
};

// How attention is cut: columns 0 is the most a threadgroup can take.
struct gpu_split {
    int columns, n_simdgroups, n_splits;
};

// Each returns an empty string or what went wrong. not_finite, if given, receives the flag word.
std::string gpu_encode(const tqkv_store *s, const float *src, int n_tokens, int64_t position, uint32_t *not_finite);
std::string gpu_encode_kv(const tqkv_store *keys, const tqkv_store *values, const float *k, const float *v,
                          int n_tokens, int64_t position, uint32_t *not_finite);
std::string gpu_probe(const tqkv_store *s, const float *src, int n_tokens, float *scaled, uint32_t *not_finite);
std::string gpu_decode(const tqkv_store *s, int64_t position, int n_positions, tqkv_basis basis, float *dst);
std::string gpu_rotate(float *rows, int n_rows, int head_dim, bool unrotate);
std::string gpu_attend(const tqkv_attention *a, const float *q, float *out, gpu_split split);
std::string gpu_tables(tqkv__table_report *report);

#endif

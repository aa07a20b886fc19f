// The library's GPU calls on the machine of simt.h or on a real device. tqkv_metal_plan_* of tqkv.h plans every
// dispatch, as it does for tqkv_metal.m; the code here only runs what was planned.
// A Metal buffer is a pointer to plain memory here.
#ifndef TQKV_TESTS_GPU_H
#define TQKV_TESTS_GPU_H
#include "sizes.h"
#include "device.h"
#include "simt.h"
#include <math.h>
#include <string.h>
#include <string>
#include <vector>

// Every dispatch runs under each of these schedules, and must write the same bytes under all. A schedule is an order of
// the lanes and the bytes that fresh threadgroup memory holds.
extern std::vector<simt::schedule> gpu_schedules;

// The values of head_dim that have kernels.
extern const int gpu_head_dims[TQKV__KERNEL_DIMS];

// Runs every dispatch once: on a real device, in a driver built with GPU_DEVICE, or by gpu_record.
extern bool gpu_on_device;

// NULL, or what runs plans in place of the machine: tqkv_metal.m, which records them. An array is plain memory, as in
// all plans here. False and a text in error on failure.
typedef bool (*gpu_recorder)(tqkv_metal_plan *plan, char *error, size_t error_size);
extern gpu_recorder gpu_record;
extern tqkv_metal *gpu_context; // of caches whose calls wait; NULL: a machine takes its place

// ---- Dispatches ----

// One dispatch of tqkv_<family>_d<head_dim>, of tqkv_<family> where head_dim is 0, or with _<value_dim> behind it.
struct gpu_dispatch : device_dispatch {
    explicit gpu_dispatch(const tqkv_metal_kernel &planned);
    gpu_dispatch(const char *family, int head_dim, int value_dim);
    gpu_dispatch &constant(int index, int value);
    gpu_dispatch &input(int index, const void *bytes, size_t size);
    gpu_dispatch &output(int index, void *bytes, size_t size);
    gpu_dispatch &memory(int index, size_t bytes); // threadgroup memory
    gpu_dispatch &grid(simt::extent groups, unsigned n_simdgroups);
    // Empty string, or what the machine or the comparison of schedules found wrong.
    std::string run() const;
    std::string run(simt::extent groups, unsigned n_simdgroups) { return grid(groups, n_simdgroups).run(); }
};

// A planned dispatch, as tqkv_metal.m would record it. Refers to `planned` for its argument structs.
gpu_dispatch gpu_planned(const tqkv_metal_dispatch &planned);
// Runs all its dispatches; what was wrong with one, or with the plan.
std::string gpu_run(const tqkv_metal_plan &plan);
// The arguments of a planned dispatch.
template <typename T>
T gpu_args(const tqkv_metal_dispatch &planned)
{
    T args;
    memcpy(&args, planned.arguments[0].bytes, sizeof args);
    return args;
}

// ---- Arguments of tqkv_metal_plan_* ----

tqkv_metal_buffer gpu_buffer(const void *bytes);
tqkv_metal_store gpu_store(const tqkv_store *s);
// The most that a pipeline allows a threadgroup.
extern unsigned gpu_most_threads;
// Whether stores with pages pass the processor's copy of the table, too.
extern bool gpu_known_tables;

// The arguments of tqkv_metal_plan_attend for an attention on the CPU.
struct gpu_attention {
    explicit gpu_attention(const tqkv_attention &a);
    gpu_attention(const gpu_attention &) = delete;
    gpu_attention &operator=(const gpu_attention &) = delete;
    enum { STREAMS = 8 };
    tqkv_metal_store stores[STREAMS]; // those of the call
    tqkv_metal_attention metal;
};

enum { GPU_MOST = -1 }; // columns: the most that a threadgroup can take
enum {
    GPU_EACH = 1,
    GPU_SECTIONS,
    GPU_EVERYTHING,
    GPU_STRANDS
}; // share: what a threadgroup adds up. A strand: by lanes, of
    // up to 16 stretches of 16 tiles
// How attention is divided; 0 leaves what tqkv.h planned. n_stretches: about so many in the keys' store. With share
// those after the 16th are longer. kernel: where head_dim has both.
enum { GPU_LANES = 1, GPU_MATRICES };
struct gpu_split {
    int columns, n_simdgroups, n_stretches;
    int share = 0; // with n_stretches: GPU_EACH
    int kernel = 0;
};
bool gpu_has_matrices(int head_dim);

extern "C" void test_plan_columns(tqkv_metal_dispatch *d, bool matrix, int columns); // of runner.h
// Divides a planned attention in another way. The two buffers of scratch change their sizes: gpu_set_scratch must
// follow.
void gpu_force(tqkv_metal_dispatch d[2], gpu_split split);
tqkv_metal_binding *gpu_find(tqkv_metal_dispatch *d, int index);           // NULL if the index is not bound
void gpu_set_scratch(tqkv_metal_dispatch d[2], float *sums, float *state); // bindings 6 and 7 of attend

// ---- Calls ----

// What tqkv_metal_plan_* takes in place of an argument of the processor's call. It lives as long as that call.
template <typename T>
struct gpu_argument {
    T value;
    operator T() const { return value; }
};
template <>
struct gpu_argument<tqkv_metal_buffer> {
    const void *bytes;
    operator tqkv_metal_buffer() const { return gpu_buffer(bytes); }
};
template <>
struct gpu_argument<const tqkv_metal_store *> {
    const tqkv_metal_store store;
    const bool is_null;
    gpu_argument(const tqkv_store *s) : store(s ? gpu_store(s) : tqkv_metal_store()), is_null(!s) {}
    operator const tqkv_metal_store *() const { return is_null ? nullptr : &store; }
};
template <>
struct gpu_argument<const tqkv_metal_attention *> {
    const gpu_attention own;
    gpu_argument(const tqkv_attention *a) : own(*a) {}
    operator const tqkv_metal_attention *() const { return &own.metal; }
};
template <>
struct gpu_argument<const tqkv_metal_index *> {
    const tqkv_metal_store keys;
    const tqkv_metal_index own;
    gpu_argument(const tqkv_index *x) : keys(gpu_store(x->keys)), own{*x, &keys, gpu_buffer(x->weights)} {}
    operator const tqkv_metal_index *() const { return &own; }
};
template <typename... P, typename... A>
tqkv_result gpu_plan(tqkv_result (*call)(P...), const A &...arguments)
{
    return call(gpu_argument<P>{arguments}...);
}

// Plans by plan_with(scratch, &plan), first without scratch. Returns the scratch, of NaN.
template <typename F>
std::vector<uint32_t> gpu_plan_in_scratch(tqkv_metal_plan &plan, F plan_with)
{
    plan_with(nullptr, &plan);
    std::vector<uint32_t> scratch(plan.scratch_size / sizeof(uint32_t) + !plan.scratch_size, 0xffffffffu);
    plan_with(scratch.data(), &plan);
    return scratch;
}

// Each of the following returns an empty string, or what went wrong. This one: a call but for its plan.
template <typename F, typename... A>
std::string gpu_call(F call, const A &...arguments)
{
    tqkv_metal_plan plan;
    gpu_plan(call, arguments..., &plan);
    return gpu_run(plan);
}
std::string gpu_attend(const tqkv_attention *a, const void *q, void *out, gpu_split split);
// Slices. out: [n_queries][n_heads][head_dim of the values], max, sum: [n_queries][n_heads]
struct gpu_slice {
    std::vector<float> out, max, sum;
    explicit gpu_slice(size_t n_rows, size_t value_dim) : out(n_rows * value_dim, NAN), max(n_rows, NAN), sum(max) {}
};
std::string gpu_attend_partial(const tqkv_attention *a, const void *q, int64_t first, int count, gpu_slice &to,
                               gpu_split split);
// Copies what the items read, but for queries, into one block of memory; queries and outputs lie in one array each, the
// first ones first. With lanes attend takes the place of attend_matrix.
std::string gpu_attend_batch(const std::vector<tqkv_attention> &items, const std::vector<const void *> &q,
                             const std::vector<void *> &out, bool lanes);

#endif

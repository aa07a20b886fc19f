// The shaders' pipelines on an NVIDIA GPU: one file NAME.cubin each, made by pipelines.py. A name is the kernel's and the
// values of all function constants by index, 'x' where one is not set: attend_d128-2_2_x_x_x_1_2_0_0_1_0_x.
#ifndef TQKV_TESTS_CUDA_PIPELINES_H
#define TQKV_TESTS_CUDA_PIPELINES_H
#include <cuda_runtime.h>
#include <stdint.h>
#include <string>

// As in the shim.
struct simt_arguments {
    void *buffers[16];
    uint32_t threadgroup_offsets[8];
    uint64_t values[2][8];
};

enum { cuda_n_constants = 12 };

// constants: [cuda_n_constants]
std::string cuda_pipeline_name(const char *kernel, const bool *set, const uint32_t *constants);

// The kernel out of folder/name.cubin, loaded once; NULL and a text in *error if there is none.
const void *cuda_pipeline(const std::string &folder, const std::string &name, std::string *error);

// The bytes of buffer 0 or 4, where that is an argument struct.
void cuda_set_value(simt_arguments *arguments, int index, const void *bytes, size_t size);

// Where each threadgroup argument starts in shared memory, from their sizes; returns the whole size.
size_t cuda_lay_out(const size_t *sizes, int n, uint32_t *offsets);

#endif

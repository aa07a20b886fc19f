// The shaders' pipelines on an NVIDIA GPU. pipelines.py compiles each into one file NAME.cubin. NAME holds the kernel
// and the values of all function constants by index, 'x' for one that is not set: attend_d128-2_2_x_x_x_1_2_0_0_1_0_x.
#ifndef TQKV_TESTS_CUDA_PIPELINES_H
#define TQKV_TESTS_CUDA_PIPELINES_H
#include "../metal/device.h"
#include <cuda_runtime.h>
#include <string>

std::string cuda_pipeline_name(const device_dispatch &d);

// The kernel of folder/NAME.cubin, which is loaded once; NULL and a text in *error if there is none.
const void *cuda_pipeline(const std::string &folder, const std::string &name, std::string *error);

size_t cuda_shared_bytes(const device_dispatch &d);

// buffers: [DEVICE_BUFFERS] on the device. Argument structs and everything else come from d.
cudaError_t cuda_launch(const void *kernel, const device_dispatch &d, void *const *buffers, cudaStream_t stream);

#endif

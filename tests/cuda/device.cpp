// The shader tests' dispatches on an NVIDIA GPU: buffers of the exact size, so that compute-sanitizer sees their ends.
#include "../metal/device.h"
#include "pipelines.h"
#include <set>
#include <stdio.h>
#include <string.h>

static std::string folder;

static bool fail(char *error, size_t size, const char *what, const char *why)
{
    snprintf(error, size, "%s: %s", what, why);
    return false;
}

bool device_open(const char *library, char *error, size_t error_size)
{
    folder = library;
    if (folder == "list") return true;
    cudaDeviceProp properties;
    cudaError_t result = cudaGetDeviceProperties(&properties, 0);
    if (result != cudaSuccess) return fail(error, error_size, "CUDA", cudaGetErrorString(result));
    printf("CUDA device: %s\n", properties.name);
    return true;
}

static void list_pipeline(const std::string &name)
{
    static std::set<std::string> listed;
    if (listed.insert(name).second) printf("pipeline %s\n", name.c_str());
}

static cudaError_t copy_in(const device_dispatch *d, simt_arguments *arguments)
{
    for (int i = 0; i < DEVICE_BUFFERS; i++) {
        if (!d->buffers[i]) continue;
        cuda_set_value(arguments, i, d->buffers[i], d->buffer_sizes[i]);
        cudaError_t result = cudaMalloc(&arguments->buffers[i], d->buffer_sizes[i] ? d->buffer_sizes[i] : 1);
        if (result == cudaSuccess)
            result = cudaMemcpy(arguments->buffers[i], d->buffers[i], d->buffer_sizes[i], cudaMemcpyHostToDevice);
        if (result != cudaSuccess) return result;
    }
    return cudaSuccess;
}

static cudaError_t copy_out(const device_dispatch *d, const simt_arguments *arguments)
{
    for (int i = 0; i < DEVICE_BUFFERS; i++) {
        if (!d->written[i]) continue;
        cudaError_t result =
            cudaMemcpy(d->buffers[i], arguments->buffers[i], d->buffer_sizes[i], cudaMemcpyDeviceToHost);
        if (result != cudaSuccess) return result;
    }
    return cudaSuccess;
}

static cudaError_t launch(const device_dispatch *d, const void *kernel, simt_arguments *arguments)
{
    size_t shared = cuda_lay_out(d->threadgroup_bytes, DEVICE_MEMORIES, arguments->threadgroup_offsets);
    void *parameters[] = {arguments};
    cudaError_t result = copy_in(d, arguments);
    if (result == cudaSuccess)
        result = cudaLaunchKernel(kernel, dim3(d->threadgroups[0], d->threadgroups[1], d->threadgroups[2]),
                                  dim3(d->threads), parameters, shared, nullptr);
    if (result == cudaSuccess) result = cudaDeviceSynchronize();
    return result == cudaSuccess ? copy_out(d, arguments) : result;
}

bool device_run(const device_dispatch *d, char *error, size_t error_size)
{
    const std::string name = cuda_pipeline_name(d->kernel, d->constant_set, d->constants);
    if (folder == "list") {
        list_pipeline(name);
        return true;
    }
    std::string why;
    const void *kernel = cuda_pipeline(folder, name, &why);
    if (!kernel) return fail(error, error_size, d->kernel, why.c_str());
    simt_arguments arguments = {};
    cudaError_t result = launch(d, kernel, &arguments);
    for (void *buffer : arguments.buffers) cudaFree(buffer);
    return result == cudaSuccess || fail(error, error_size, name.c_str(), cudaGetErrorString(result));
}

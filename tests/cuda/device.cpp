// device.h on an NVIDIA GPU. Device buffers have the exact size, so that compute-sanitizer sees their ends.
#include "pipelines.h"
#include <algorithm>
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

// Nothing runs. But a call after the one that learns scales is refused, and lists nothing, if they are none: so they
// are 1.
static void list_pipeline(const device_dispatch *d, const std::string &name)
{
    static std::set<std::string> listed;
    if (listed.insert(name).second) printf("pipeline %s\n", name.c_str());
    for (int i = 0; i < DEVICE_BUFFERS && strstr(d->kernel, "learn_scales"); i++)
        if (d->written[i]) std::fill_n((float *)d->buffers[i], d->buffer_sizes[i] / sizeof(float), 1.0f);
}

static cudaError_t copy_in(const device_dispatch *d, void **buffers)
{
    for (int i = 0; i < DEVICE_BUFFERS; i++) {
        if (!d->buffer_sizes[i] || d->by_value[i]) continue;
        cudaError_t result = cudaMalloc(&buffers[i], d->buffer_sizes[i]);
        if (result == cudaSuccess)
            result = cudaMemcpy(buffers[i], d->buffers[i], d->buffer_sizes[i], cudaMemcpyHostToDevice);
        if (result != cudaSuccess) return result;
    }
    return cudaSuccess;
}

static cudaError_t copy_out(const device_dispatch *d, void *const *buffers)
{
    for (int i = 0; i < DEVICE_BUFFERS; i++) {
        if (!d->written[i]) continue;
        cudaError_t result = cudaMemcpy(d->buffers[i], buffers[i], d->buffer_sizes[i], cudaMemcpyDeviceToHost);
        if (result != cudaSuccess) return result;
    }
    return cudaSuccess;
}

bool device_run(const device_dispatch *d, char *error, size_t error_size)
{
    const std::string name = cuda_pipeline_name(*d);
    if (folder == "list") {
        list_pipeline(d, name);
        return true;
    }
    std::string why;
    const void *kernel = cuda_pipeline(folder, name, &why);
    if (!kernel) return fail(error, error_size, d->kernel, why.c_str());
    void *buffers[DEVICE_BUFFERS] = {};
    cudaError_t result = copy_in(d, buffers);
    if (result == cudaSuccess) result = cuda_launch(kernel, *d, buffers, nullptr);
    if (result == cudaSuccess) result = cudaDeviceSynchronize();
    if (result == cudaSuccess) result = copy_out(d, buffers);
    for (void *buffer : buffers) cudaFree(buffer);
    return result == cudaSuccess || fail(error, error_size, name.c_str(), cudaGetErrorString(result));
}

/* One dispatch on a real Metal device, for the shader tests on a Mac: what simt::run is on the CPU. */
#ifndef TQKV_TESTS_METAL_GPU_H
#define TQKV_TESTS_METAL_GPU_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { METAL_GPU_BUFFERS = 16, METAL_GPU_MEMORIES = 4, METAL_GPU_CONSTANTS = 32 };

typedef struct metal_gpu_dispatch {
    const char *kernel;
    unsigned threadgroups[3], threads;
    void *buffers[METAL_GPU_BUFFERS]; /* NULL: not bound. Copied to the device, and back if written. */
    size_t buffer_sizes[METAL_GPU_BUFFERS];
    bool written[METAL_GPU_BUFFERS];
    size_t threadgroup_bytes[METAL_GPU_MEMORIES];
    bool constant_set[METAL_GPU_CONSTANTS], constant_is_bool[METAL_GPU_CONSTANTS];
    uint32_t constants[METAL_GPU_CONSTANTS];
} metal_gpu_dispatch;

/* Opens the default device and the library at the path. False and a text in error if that fails. */
bool metal_gpu_open(const char *library, char *error, size_t error_size);
bool metal_gpu_run(const metal_gpu_dispatch *dispatch, char *error, size_t error_size);

#ifdef __cplusplus
}
#endif
#endif

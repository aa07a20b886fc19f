/* One dispatch on a real device, for the shader tests: what simt::run is on the CPU. metal_gpu.m on a Mac, tests/cuda on an
   NVIDIA GPU. */
#ifndef TQKV_TESTS_DEVICE_H
#define TQKV_TESTS_DEVICE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { DEVICE_BUFFERS = 16, DEVICE_MEMORIES = 4, DEVICE_CONSTANTS = 32 };

typedef struct device_dispatch {
    const char *kernel;
    unsigned threadgroups[3], threads;
    void *buffers[DEVICE_BUFFERS]; /* NULL: not bound. Copied to the device, and back if written. */
    size_t buffer_sizes[DEVICE_BUFFERS];
    bool written[DEVICE_BUFFERS];
    size_t threadgroup_bytes[DEVICE_MEMORIES];
    bool constant_set[DEVICE_CONSTANTS], constant_is_bool[DEVICE_CONSTANTS];
    uint32_t constants[DEVICE_CONSTANTS];
} device_dispatch;

/* Opens the default device and the library at the path (for CUDA the folder of pipelines, or "list", which runs nothing
   and prints a line "pipeline NAME" for each that is asked for). False and a text in error if that fails. */
bool device_open(const char *library, char *error, size_t error_size);
bool device_run(const device_dispatch *dispatch, char *error, size_t error_size);

#ifdef __cplusplus
}
#endif
#endif

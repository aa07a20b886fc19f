// One dispatch, as the shader tests hand it to an NVIDIA GPU (tests/cuda). On the CPU gpu.cpp hands it to simt::run.
#ifndef TQKV_TESTS_DEVICE_H
#define TQKV_TESTS_DEVICE_H
#include <stddef.h>
#include <stdint.h>

enum { DEVICE_NAME_SIZE = 48, DEVICE_BUFFERS = 20, DEVICE_MEMORIES = 4, DEVICE_CONSTANTS = 40 };

struct device_dispatch {
    char kernel[DEVICE_NAME_SIZE];
    unsigned threadgroups[3], threads; // threads: of a threadgroup
    void *buffers[DEVICE_BUFFERS];     // NULL: not bound
    size_t buffer_sizes[DEVICE_BUFFERS];
    bool written[DEVICE_BUFFERS];
    bool by_value[DEVICE_BUFFERS]; // an argument struct
    size_t threadgroup_bytes[DEVICE_MEMORIES];
    bool constant_set[DEVICE_CONSTANTS];
    uint32_t constants[DEVICE_CONSTANTS];
};

// Opens the device and a folder of pipelines, or "list": then nothing runs, and a line "pipeline NAME" appears for each
// pipeline that the dispatches need. False and a text in error on failure.
bool device_open(const char *folder, char *error, size_t error_size);
// Copies the buffers to the device, runs the dispatch, and copies back those that it writes.
bool device_run(const device_dispatch *dispatch, char *error, size_t error_size);
#endif

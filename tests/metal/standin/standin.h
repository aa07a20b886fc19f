/* What the stand-in offers to tests beyond Metal's API. */
#ifndef STANDIN_H
#define STANDIN_H
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sets the device that programs find from now on. STANDIN_APPLE5 in the environment: one before Apple7. */
typedef struct standin_device {
    bool missing, before_apple7;
    unsigned simd_width, max_threads; /* 0 = 32, 1024 */
} standin_device;
void standin_set_device(standin_device device);

/* Starts to count the calls that may fail in Metal; call number fail_at fails, from 1 on; 0: none. */
void standin_fail_at(int fail_at);
int standin_calls(void);
/* Counted too: tqkv_metal.m is compiled with these in place of calloc and pthread_mutex_init. */
void *standin_calloc(size_t n, size_t size);
int standin_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes);
/* Dispatch n from now on, from 1, writes wrong values where a kernel of its family writes; 0: none. */
void standin_spoil(int n);
/* From now on dispatches do nothing, and their command buffers complete. */
void standin_idle(bool idle);
/* Libraries that are no compiled source have no pipeline for kernels whose names, with a space and function constant 4
   behind them, contain this; NULL: all have. everywhere: nor have compiled sources. */
void standin_refuse(const char *part, bool everywhere);
/* Pipelines built without a limit of threads, or without the promise of whole simdgroups, since the program started. */
int standin_unlimited(void);
/* The text of an injected failure. */
#define STANDIN_WORDS "injected failure"

int standin_live_objects(void);
#ifdef __OBJC__
/* The same device behind another object, as capture and validation show it. */
@protocol MTLDevice;
id<MTLDevice> standin_wrapped(id<MTLDevice> device) __attribute__((ns_returns_retained));
#endif
/* There is no compiler: a source with shaders becomes this library. NULL:
 * that of the environment's STANDIN_COMPILED. */
void standin_set_compiled(const char *library);

/* A library, as the stand-in loads it: these 8 bytes, the size of the rest (uint64_t, little-endian), and a shared
   object with the shaders, simt.cpp and library.cpp. */
#define STANDIN_MAGIC "STANDINL"

/* The shared object's three functions: standin_find, standin_run and standin_name. */
enum { STANDIN_BUFFERS = 31, STANDIN_MEMORIES = 8, STANDIN_CONSTANTS = 40 };
typedef struct standin_launch {
    unsigned threadgroups[3], threads[3];
    void *buffers[STANDIN_BUFFERS];
    size_t threadgroup_bytes[STANDIN_MEMORIES];
    bool set[STANDIN_CONSTANTS];
    int64_t value[STANDIN_CONSTANTS];
} standin_launch;
/* Whether the kernel exists, the function constants that it needs, and the sizes of structs that its buffers must hold
   at least one of. */
typedef struct standin_kernel {
    uint64_t constants;
    size_t sizes[STANDIN_BUFFERS];
} standin_kernel;
typedef bool (*standin_find_function)(const char *name, standin_kernel *found);
/* The name of kernel i; NULL beyond the last. */
typedef const char *(*standin_name_function)(int i);
/* An empty error means success. */
typedef void (*standin_run_function)(const char *name, const standin_launch *launch, char *error, size_t error_size);

#ifdef __cplusplus
}
#endif
#endif

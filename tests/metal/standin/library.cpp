// The functions by which the stand-in runs the shaders; part of their shared object.
#include "standin.h"
#include "simt.h"
#include <stdio.h>

extern "C" __attribute__((visibility("default"))) bool standin_find(const char *name, uint32_t *constants)
{
    const simt::kernel *kernel = simt::find_kernel(name);
    if (kernel) *constants = kernel->constants;
    return kernel != nullptr;
}

extern "C" __attribute__((visibility("default"))) void standin_run(const char *name, const standin_launch *l,
                                                                   char *error, size_t error_size)
{
    simt::launch launch = {};
    launch.threadgroups = {l->threadgroups[0], l->threadgroups[1], l->threadgroups[2]};
    launch.threads = {l->threads[0], l->threads[1], l->threads[2]};
    for (int i = 0; i < STANDIN_BUFFERS; i++) launch.buffers[i] = l->buffers[i];
    for (int i = 0; i < STANDIN_MEMORIES; i++) launch.threadgroup_bytes[i] = l->threadgroup_bytes[i];
    for (int i = 0; i < STANDIN_CONSTANTS; i++) {
        launch.constants.set[i] = l->set[i];
        launch.constants.value[i] = l->value[i];
    }
    simt::schedule schedule = {};
    schedule.order = simt::ascending;
    schedule.poison = 0xff;
    snprintf(error, error_size, "%s", simt::run(*simt::find_kernel(name), launch, schedule).c_str());
}

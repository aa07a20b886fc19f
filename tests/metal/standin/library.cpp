// The functions by which the stand-in runs the shaders; part of their shared object.
#include "standin.h"
#include "simt.h"
#include "tests/metal/sizes.h"
#include <stdio.h>
#include <string.h>

extern "C" __attribute__((visibility("default"))) bool standin_find(const char *name, standin_kernel *found)
{
    const simt::kernel *kernel = simt::find_kernel(name);
    memset(found, 0, sizeof *found);
    if (!kernel) return false;
    found->constants = kernel->constants;
    const bool merge = !strncmp(name, "tqkv_attend_merge", 17), list = !strcmp(name, "tqkv_attend_list");
    const int items = merge ? TQKV__ITEMS_OF_MERGE : list ? TQKV__ITEMS_OF_LIST : TQKV__ITEMS_OF_ATTEND;
    if (!strncmp(name, "tqkv_attend", 11)) found->sizes[items] = sizeof(tqkv__batch_item);
    return true;
}

extern "C" __attribute__((visibility("default"))) const char *standin_name(int i)
{
    const simt::kernel *kernel = simt::first_kernel();
    for (; kernel && i > 0; i--) kernel = kernel->next;
    return kernel ? kernel->name : nullptr;
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

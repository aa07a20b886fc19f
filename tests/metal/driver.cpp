// Runs the shaders: driver [--one-schedule | --flush | --device LIBRARY] [--list] [part of a name]...
#include "shader_cases.h"

static void add_cases()
{
    codec_shader_cases();
    attend_shader_cases();
    index_shader_cases();
    learn_shader_cases();
    defect_shader_cases();
}

#ifdef GPU_HOST
// Another program's cases: record runs their plans.
extern "C" void add_shader_cases(gpu_recorder record, tqkv_metal *context);
void add_shader_cases(gpu_recorder record, tqkv_metal *context)
{
    gpu_record = record;
    gpu_context = context;
    gpu_on_device = true;
    gpu_schedules.resize(1);
    add_cases();
}
#else

// Sanitizers need only one schedule. Flushing subnormals gives other bytes, so it is not compared with the other
// schedules.
static void choose_schedules(bool one, bool flush)
{
    gpu_schedules = {{simt::ascending, 1, 0xff, flush}};
    if (one || flush) return;
    gpu_schedules.push_back({simt::descending, 1, 0x00, false});
    gpu_schedules.push_back({simt::shuffled, 12345, 0x7f, false});
}

static bool open_device(const char *library)
{
    char error[500] = "this driver has no device";
    bool opened = false;
#ifdef GPU_DEVICE
    opened = device_open(library, error, sizeof error);
#endif
    if (!opened) fprintf(stderr, "%s: %s\n", library, error);
    return opened;
}

int main(int argc, char **argv)
{
    gpu_on_device = argc > 2 && !strcmp(argv[1], "--device");
    const char *library = gpu_on_device ? argv[2] : "";
    if (gpu_on_device && !open_device(library)) return 1;
    bool flush = argc > 1 && !strcmp(argv[1], "--flush");
    bool one = gpu_on_device || (argc > 1 && !strcmp(argv[1], "--one-schedule"));
    choose_schedules(one, flush);
    argc -= one + flush + gpu_on_device;
    argv += one + flush + gpu_on_device;
    bool list = argc > 1 && !strcmp(argv[1], "--list");
    add_cases();
#ifdef GPU_DEVICE
    cuda_shader_cases(gpu_on_device && !strcmp(library, "list"));
#else
    if (!gpu_on_device) machine_cases();
#endif
    return test_run_selected(list, argc - 1 - list, argv + 1 + list);
}
#endif

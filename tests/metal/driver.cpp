// Runs the shaders: driver [--one-schedule | --flush | --metal LIBRARY] [--list] [part of a name]...
#include "shader_cases.h"
#ifdef GPU_METAL
#include "metal_gpu.h"
#endif

// Sanitizers need one schedule only; the flush of subnormals is another machine.
static void choose_schedules(bool one, bool flush)
{
    gpu_schedules = {{simt::ascending, 1, 0xff, flush}};
    if (one || flush) return;
    gpu_schedules.push_back({simt::descending, 1, 0x00, false});
    gpu_schedules.push_back({simt::shuffled, 12345, 0x7f, false});
}

static bool open_metal(const char *library)
{
    char error[500] = "this driver is built without Metal";
    bool opened = false;
#ifdef GPU_METAL
    opened = metal_gpu_open(library, error, sizeof error);
#endif
    if (!opened) fprintf(stderr, "%s: %s\n", library, error);
    return opened;
}

int main(int argc, char **argv)
{
    gpu_on_metal = argc > 2 && !strcmp(argv[1], "--metal");
    if (gpu_on_metal && !open_metal(argv[2])) return 1;
    bool flush = argc > 1 && !strcmp(argv[1], "--flush");
    bool one = gpu_on_metal || (argc > 1 && !strcmp(argv[1], "--one-schedule"));
    choose_schedules(one, flush);
    argc -= one + flush + gpu_on_metal;
    argv += one + flush + gpu_on_metal;
    bool list = argc > 1 && !strcmp(argv[1], "--list");
    codec_shader_cases();
    attend_shader_cases();
    defect_shader_cases();
    if (!gpu_on_metal) machine_cases();
    return test_run_selected(list, argc - 1 - list, argv + 1 + list);
}

// Runs the shaders: driver [--one-schedule] [--list] [part of a name]...
#include "shader_cases.h"

int main(int argc, char **argv)
{
    bool one = argc > 1 && !strcmp(argv[1], "--one-schedule"); // sanitizers need one only
    argc -= one;
    argv += one;
    gpu_schedules = {{simt::ascending, 1, 0xff}};
    if (!one) {
        gpu_schedules.push_back({simt::descending, 1, 0x00});
        gpu_schedules.push_back({simt::shuffled, 12345, 0x7f});
    }
    bool list = argc > 1 && !strcmp(argv[1], "--list");
    codec_shader_cases();
    attend_shader_cases();
    defect_shader_cases();
    machine_cases();
    return test_run_selected(list, argc - 1 - list, argv + 1 + list);
}

/* The tests of tqkv_metal.m: runner --library FILE [--stale FOLDER | --embedded | --bits] [--list] [part of a name]...
   FILE: a library, or for the shaders' cases also a source. */
#include "host.h"

int main(int argc, char **argv)
{
    if (argc < 3 || strcmp(argv[1], "--library")) return 2;
    test_host.library = argv[2];
    int i = 3;
    if (argc > i + 1 && !strcmp(argv[i], "--stale")) test_host.stale = argv[i + 1], i += 2;
    if (argc > i && !strcmp(argv[i], "--embedded")) test_host.embedded = true, i++;
    if (argc > i && !strcmp(argv[i], "--bits")) test_behind = host_print_bits, i++;
    NSAutoreleasePool *pool = [[NSAutoreleasePool alloc] init];
#ifdef STANDIN
    standin_set_compiled(test_host.library);
#endif
    if (!host_open()) return 1;
    const bool list = argc > i && !strcmp(argv[i], "--list");
    add_shader_cases(host_run, test_host.metal);
    refusal_host_cases();
    cache_host_cases();
    library_host_cases();
    context_host_cases();
    pipeline_host_cases();
    int status = test_run_selected(list, argc - i - list, argv + i + list);
    host_close();
    [pool release];
#ifdef STANDIN
    if (standin_live_objects()) {
        printf("%d objects of Metal leaked\n", standin_live_objects());
        status = 1;
    }
    if (standin_unlimited()) { /* Metal's compiler must learn how many threads there will be */
        printf("%d pipelines without a limit of threads\n", standin_unlimited());
        status = 1;
    }
#endif
    return status;
}

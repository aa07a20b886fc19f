/* The C tests: runner [--list] [--save FILE | --load FILE] [part of a name]... */
#include "runner.h"

static void add_all_cases(void)
{
    test_tables_cases();
    test_golden_cases();
    test_codec_cases();
    test_codec_error_cases();
    test_captured_cases();
    test_attend_cases();
    test_attend_options_cases();
    test_defect_cases();
    test_cache_cases();
    test_snapshot_cases();
    test_input_cases();
    test_fault_cases();
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "--save")) return test_snapshot_save_file(argv[2]);
    if (argc == 3 && !strcmp(argv[1], "--load")) return test_snapshot_load_file(argv[2]);
    bool list = argc > 1 && !strcmp(argv[1], "--list");
    add_all_cases();
    return test_run_selected(list, argc - 1 - list, argv + 1 + list);
}

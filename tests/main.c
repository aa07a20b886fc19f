/* The C tests: runner [--list | --isa NAME] [[-]part of a name]..., or runner --save FILE | --load FILE | --best, which names
 * the instruction set that the runs without --isa use */
#include "runner.h"

static void add_all_cases(void)
{
    test_tables_cases();
    test_golden_cases();
    test_codec_cases();
    test_codec_error_cases();
    test_convert_cases();
    test_captured_cases();
    test_attend_cases();
    test_attend_options_cases();
    test_length_cases();
    test_integer_cases();
    test_latent_cases();
    test_latent_cache_cases();
    test_index_cases();
    test_list_cases();
    test_defect_cases();
    test_pages_cases();
    test_batch_cases();
    test_cache_cases();
    test_ends_cases();
    test_center_cases();
    test_types_cases();
    test_value_dim_cases();
    test_plan_cases();
    test_plan_pages_cases();
    test_plan_batch_cases();
    test_plan_split_cases();
    test_plan_index_cases();
    test_snapshot_cases();
    test_store_snapshot_cases();
    test_input_cases();
    test_fault_cases();
    test_file_cases();
    test_isa_cases();
    test_strides_cases();
    test_threads_cases();
}

/* Runs the cases with one instruction set, or none if this processor or this build lacks it. */
static int run_on_isa(const char *name, int n_filters, char **filters)
{
    if (tqkv_isa_force(name) != TQKV_OK) {
        printf("no %s here\n", name);
        return 0;
    }
    if (strcmp(tqkv_isa_name(), name) != 0) {
        printf("FAIL isa: %s in use, not %s\n0 passed, 1 failed\n", tqkv_isa_name(), name);
        return 1;
    }
    printf("%s\n", name);
    return test_run_selected(false, n_filters, filters);
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "--save")) return test_snapshot_save_file(argv[2]);
    if (argc == 3 && !strcmp(argv[1], "--load")) return test_snapshot_load_file(argv[2]);
    if (argc == 2 && !strcmp(argv[1], "--best")) return puts(tqkv_isa_name()) < 0;
    if (argc > 2 && !strcmp(argv[1], "--isa")) {
        add_all_cases();
        return run_on_isa(argv[2], argc - 3, argv + 3);
    }
    bool list = argc > 1 && !strcmp(argv[1], "--list");
    add_all_cases();
    return test_run_selected(list, argc - 1 - list, argv + 1 + list);
}

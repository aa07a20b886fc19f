/* The C tests: runner [--list | --isa NAME] [[-]part of a name]..., or runner --best, which names the instruction set
 * that the runs without --isa use */
#include "runner.h"

static void add_all_cases(void)
{
#define X(stem) test_##stem##_cases();
    TEST_STEMS
#undef X
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
    if (argc == 2 && !strcmp(argv[1], "--best")) return puts(tqkv_isa_name()) < 0;
    if (argc > 2 && !strcmp(argv[1], "--isa")) {
        add_all_cases();
        return run_on_isa(argv[2], argc - 3, argv + 3);
    }
    bool list = argc > 1 && !strcmp(argv[1], "--list");
    add_all_cases();
    return test_run_selected(list, argc - 1 - list, argv + 1 + list);
}

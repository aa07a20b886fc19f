/* Prints tests/goldens.h or, given an argument, tests/attend_goldens.h; `make goldens` runs it. */
#define TQKV_IMPLEMENTATION
#include "attend_golden.h"

static int print_codes(void)
{
    golden_case c;
    printf("/* Made by tests/make_goldens.c (make goldens): hashes of the codes and norms of every case in golden.h. "
           "*/\n");
    printf("// clang-format off\nstatic const golden goldens[] = {\n");
    for (int i = 0; golden_find(i, &c); i++) {
        char name[GOLDEN_NAME_SIZE];
        golden made;
        if (!golden_make(&c, &made)) return 1;
        golden_name(&c, name);
        printf("    {\"%s\", UINT64_C(0x%016llx), UINT64_C(0x%016llx)},\n", name, (unsigned long long)made.codes,
               (unsigned long long)made.norms);
    }
    printf("};\n");
    return 0;
}

static int print_outputs(void)
{
    attend_golden_case c;
    printf("/* Made by tests/make_goldens.c (make goldens): hashes of the outputs in integers of every case in "
           "attend_golden.h. */\n");
    printf("// clang-format off\nstatic const attend_golden attend_goldens[] = {\n");
    for (int i = 0; attend_golden_find(i, &c); i++) {
        char name[GOLDEN_NAME_SIZE];
        uint64_t hash;
        if (!attend_golden_make(&c, &hash)) return 1;
        attend_golden_name(&c, name);
        printf("    {\"%s\", UINT64_C(0x%016llx)},\n", name, (unsigned long long)hash);
    }
    printf("};\n");
    return 0;
}

int main(int argc, char **argv)
{
    (void)argv;
    return argc > 1 ? print_outputs() : print_codes();
}

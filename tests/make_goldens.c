/* Prints tests/goldens.h or, given an argument, tests/attend_goldens.h; `make goldens` runs it. */
#define TQKV_IMPLEMENTATION
#include "attend_golden.h"

static void print_golden(const char *name, const golden *made)
{
    printf("    {\"%s\", UINT64_C(0x%016llx), UINT64_C(0x%016llx)},\n", name, (unsigned long long)made->codes,
           (unsigned long long)made->norms);
}

static int print_conversions(void)
{
    golden_pair p;
    printf("\n/* What tqkv_store_convert writes. */\nstatic const golden conversion_goldens[] = {\n");
    for (int i = 0; golden_pair_find(i, &p); i++) {
        char name[GOLDEN_NAME_SIZE];
        golden made;
        if (!golden_pair_make(&p, &made)) return 1;
        golden_pair_name(&p, name);
        print_golden(name, &made);
    }
    printf("};\n");
    return 0;
}

static int print_calibrations(void)
{
    golden_calibration c;
    printf("\n/* Centre and scale of tqkv_calibrate. */\nstatic const golden calibration_goldens[] = {\n");
    for (int i = 0; golden_calibration_find(i, &c); i++) {
        char name[GOLDEN_NAME_SIZE];
        golden made;
        if (!golden_calibration_make(&c, &made)) return 1;
        golden_calibration_name(&c, name);
        print_golden(name, &made);
    }
    printf("};\n");
    return 0;
}

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
        print_golden(name, &made);
    }
    printf("};\n");
    return print_conversions() || print_calibrations();
}

static int print_outputs(void)
{
    attend_golden_case c;
    printf("/* Made by tests/make_goldens.c (make goldens): hashes of the outputs of every case in "
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

/* Prints tests/goldens.h; `make goldens` runs it. */
#define TQKV_IMPLEMENTATION
#include "golden.h"

int main(void)
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

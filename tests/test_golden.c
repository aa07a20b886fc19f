/* In every build codes and norms hash to the values of goldens.h. */
#include "golden.h"
#include "goldens.h"
#include "runner.h"

static void check_golden(const void *parameters)
{
    int index = *(const int *)parameters;
    golden_case c;
    golden made;
    char name[GOLDEN_NAME_SIZE];
    REQUIRE(golden_find(index, &c), "no case %d", index);
    golden_name(&c, name);
    REQUIRE(!strcmp(name, goldens[index].name), "goldens.h has %s at %d", goldens[index].name, index);
    REQUIRE(golden_make(&c, &made), "encode failed");
    CHECK(made.codes == goldens[index].codes, "codes hash to %016llx, not %016llx", (unsigned long long)made.codes,
          (unsigned long long)goldens[index].codes);
    CHECK(made.norms == goldens[index].norms, "norms hash to %016llx, not %016llx", (unsigned long long)made.norms,
          (unsigned long long)goldens[index].norms);
}

static void check_complete(const void *parameters)
{
    (void)parameters;
    int n_goldens = (int)(sizeof goldens / sizeof *goldens);
    golden_case c;
    CHECK(golden_find(n_goldens - 1, &c) && !golden_find(n_goldens, &c), "%d goldens are not the cases of golden.h",
          n_goldens);
}

void test_golden_cases(void)
{
    int n_goldens = (int)(sizeof goldens / sizeof *goldens);
    for (int i = 0; i < n_goldens; i++) test_add(check_golden, &i, sizeof i, "golden/%s", goldens[i].name);
    test_add(check_complete, NULL, 0, "golden/complete");
}

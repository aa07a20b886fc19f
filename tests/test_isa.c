/* The choice of an instruction set by name and by the environment. */
#include "runner.h"

/* Unknown names are refused; known ones can be set, and set back. */
static void check_force(NO_ROW)
{
    const char *before = tqkv_isa_name();
    CHECK_RESULT(tqkv_isa_force("sse9"), TQKV_INVALID_ARGUMENT);
    CHECK_RESULT(tqkv_isa_force(""), TQKV_INVALID_ARGUMENT);
    CHECK(!strcmp(tqkv_isa_name(), before), "a refused name changed %s to %s", before, tqkv_isa_name());
    CHECK_RESULT(tqkv_isa_force("scalar"), TQKV_OK);
    CHECK(!strcmp(tqkv_isa_name(), "scalar"), "%s", tqkv_isa_name());
    CHECK_RESULT(tqkv_isa_force(NULL), TQKV_OK);
    CHECK(tqkv_isa_name() != NULL, "no set was chosen anew");
    CHECK_RESULT(tqkv_isa_force(before), TQKV_OK);
    CHECK(!strcmp(tqkv_isa_name(), before), "%s, not %s", tqkv_isa_name(), before);
}

/* TQKV_ISA counts when the set is chosen. A set that is not there leaves the best one, and TQKV_EXPLAIN hears so. */
static void check_environment(NO_ROW)
{
    const char *before = tqkv_isa_name(), *set = getenv("TQKV_ISA");
    char kept[32];
    snprintf(kept, sizeof kept, "%s", set ? set : "");
    unsetenv("TQKV_ISA");
    tqkv_isa_force(NULL);
    const char *best = tqkv_isa_name();
    setenv("TQKV_ISA", "scalar", 1);
    test_explained = NULL;
    CHECK(!strcmp(tqkv_isa_name(), best), "the environment changed a choice that was made");
    tqkv_isa_force(NULL);
    CHECK(!strcmp(tqkv_isa_name(), "scalar"), "TQKV_ISA=scalar chose %s", tqkv_isa_name());
    CHECK(!test_explained, "TQKV_ISA=scalar is explained: %s", test_explained);
    setenv("TQKV_ISA", "nonsense", 1);
    tqkv_isa_force(NULL);
    CHECK(!strcmp(tqkv_isa_name(), best), "TQKV_ISA=nonsense chose %s, not %s", tqkv_isa_name(), best);
    CHECK(test_explained && strstr(test_explained, "TQKV_ISA"), "TQKV_ISA=nonsense has no explanation");
    if (set)
        setenv("TQKV_ISA", kept, 1);
    else
        unsetenv("TQKV_ISA");
    CHECK_RESULT(tqkv_isa_force(before), TQKV_OK);
}

void test_isa_cases(void)
{
    test_add(check_force, NULL, 0, "isa/force");
    test_add(check_environment, NULL, 0, "isa/environment");
}

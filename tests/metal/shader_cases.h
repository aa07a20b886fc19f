// The groups of cases of the shader tests, for the table in tests/runner.c.
#ifndef TQKV_TESTS_SHADER_CASES_H
#define TQKV_TESTS_SHADER_CASES_H
#include "../runner.h"
#include "gpu.h"

void codec_shader_cases();
void attend_shader_cases();
void defect_shader_cases();
void machine_cases();

// The dispatch must be free of complaints.
#define CHECK_RUN(call)                                                                                                \
    do {                                                                                                               \
        std::string check_run_ = (call);                                                                               \
        CHECK(check_run_.empty(), "%s", check_run_.c_str());                                                           \
    } while (0)

#endif

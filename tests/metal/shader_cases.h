// The groups of cases of the shader tests, for the table in tests/runner.c.
#ifndef TQKV_TESTS_SHADER_CASES_H
#define TQKV_TESTS_SHADER_CASES_H
#include "../attend_fixture.h"
#include "../runner.h"
#include "gpu.h"

void codec_shader_cases();
void attend_shader_cases();
void index_shader_cases();
void learn_shader_cases();
void defect_shader_cases();
void machine_cases();
// Of tests/cuda. listing: small sizes, to find out which pipelines the cases need.
void cuda_shader_cases(bool listing);

// Runs the attention divided in each of these ways, and once more by the other kernel where head_dim has both, and
// compares every output with the double-precision reference. Returns the number of runs.
size_t check_attend(const attend_row &row, const std::vector<gpu_split> &splits);
const gpu_split as_planned = {0, 0, 0};

// A problem, and how it is divided, besides as it is planned.
struct shape_row {
    attend_row problem;
    gpu_split split;
};
void run_shape(const void *row);

// Attention over values with a mean of 1: its error does not grow with the context, and a query has the same bits
// alone.
struct length_row {
    tqkv_format keys, values;
    int head_dim, n_kv_heads, group, n_queries, positions, share; // share: of gpu_split
};
// A call over two linear stores of `positions` positions, all of them appended. The stores are made and freed with it.
struct full_context {
    tqkv_store keys, values;
    tqkv_attention call;
    explicit full_context(const length_row &row);
    ~full_context();
    full_context(const full_context &) = delete;
};
void add_length(const length_row &row);

// The call must report nothing.
#define CHECK_RUN(call) \
    do { \
        std::string check_run_ = (call); \
        CHECK(check_run_.empty(), "%s", check_run_.c_str()); \
    } while (0)

#endif

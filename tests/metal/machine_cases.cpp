// The machine of simt.h itself: the launches that it refuses, and the kernels that exist.
#include "shader_cases.h"
#include <math.h>
#include <metal_stdlib> // the shim's; its words are those of shaders
#undef device
#undef constant
#undef threadgroup
#undef thread
#undef kernel

namespace
{

// No kernels but those that the other cases run by name: of each family and head_dim, of pairs of head_dims, and single
// ones.
void run_entry_points(const void *)
{
    enum { FAMILIES = 7, PAIRS = 4, INDEX_SCORES = 2, SINGLE = 4 };
    int found = 0, expected = FAMILIES * TQKV__KERNEL_DIMS + PAIRS + INDEX_SCORES + SINGLE;
    for (const simt::kernel *k = simt::first_kernel(); k; k = k->next) found++;
    for (int head_dim : gpu_head_dims) expected += gpu_has_matrices(head_dim);
    CHECK(found == expected, "%d kernels, not %d", found, expected);
}

// Runs a valid dispatch of rotate after one change.
std::string rotate_after(void (*change)(simt::launch &))
{
    float rows[2 * 64] = {};
    tqkv__rotate_args args = {2};
    simt::launch l = {};
    l.threadgroups = {1, 1, 1};
    l.threads = {64, 1, 1};
    l.buffers[0] = &args;
    l.buffers[1] = rows;
    l.constants.set[TQKV_FC_UNROTATE] = true;
    change(l);
    return simt::run(*simt::find_kernel("tqkv_rotate_d64"), l, gpu_schedules[0]);
}

void check_refusal(const std::string &message, const char *expected)
{
    CHECK(message.find(expected) != std::string::npos, "'%s' does not say '%s'", message.c_str(), expected);
}

void run_refusals(const void *)
{
    CHECK(rotate_after([](simt::launch &) {}).empty(), "a valid dispatch is refused");
    check_refusal(rotate_after([](simt::launch &l) { l.buffers[1] = nullptr; }), "buffer 1 is not bound");
    check_refusal(rotate_after([](simt::launch &l) { l.threads.x = 33; }), "not a multiple of 32");
    check_refusal(rotate_after([](simt::launch &l) { l.threads.x = 1056; }), "not a multiple of 32 up to 1024");
    check_refusal(rotate_after([](simt::launch &l) { l.threadgroup_bytes[0] = 40; }), "not a multiple of 16");
    check_refusal(rotate_after([](simt::launch &l) { l.threadgroup_bytes[0] = 32784; }), "more than 32 KiB");
    check_refusal(rotate_after([](simt::launch &l) { l.constants.set[TQKV_FC_UNROTATE] = false; }), "is not set");
}

// ---- Matrices ----

typedef metal::simdgroup_matrix<float, 8, 8> matrix;

// Runs a kernel over buffers of 100 floats on one simdgroup.
std::string run_matrix_kernel(void (*body)(simt::thread_state &), float *left, float *right, float *sum)
{
    const simt::kernel k = {"matrix_test", 7, 0, 0, body, nullptr};
    simt::launch l = {};
    l.threadgroups = {1, 1, 1};
    l.threads = {32, 1, 1};
    l.buffers[0] = left;
    l.buffers[1] = right;
    l.buffers[2] = sum;
    return simt::run(k, l, gpu_schedules[0]);
}

void multiply_matrices(simt::thread_state &t)
{
    matrix a, b, c = metal::make_filled_simdgroup_matrix<float, 8, 8>(2.0f);
    metal::simdgroup_load(a, (const float *)t.buffers[0], 8);
    metal::simdgroup_load(b, (const float *)t.buffers[1], 11);
    b.thread_elements()[1] += 1.0f;
    metal::simdgroup_multiply_accumulate(c, a, b, c);
    metal::simdgroup_store(c, (float *)t.buffers[2], 9);
}

// Small integers, so that every order of the sums is exact. Rows of 8, 11 and 9 numbers.
void run_matrices(const void *)
{
    float a[100], b[100], c[100];
    for (int i = 0; i < 100; i++) {
        a[i] = (float)(i * 7 % 23);
        b[i] = (float)(i * 5 % 19);
        c[i] = -1.0f;
    }
    CHECK_RUN(run_matrix_kernel(multiply_matrices, a, b, c));
    for (int row = 0; row < 8; row++) {
        CHECK(c[row * 9 + 8] == -1.0f, "the store wrote behind row %d", row);
        for (int column = 0; column < 8; column++) {
            float expected = 2.0f;
            for (int k = 0; k < 8; k++) expected += a[row * 8 + k] * (b[k * 11 + column] + (float)(column % 2));
            const float got = c[row * 9 + column];
            CHECK(got == expected, "row %d, column %d: %g, not %g", row, column, (double)got, (double)expected);
        }
    }
}

void multiply_unset(simt::thread_state &t)
{
    matrix a = metal::make_filled_simdgroup_matrix<float, 8, 8>(1.0f), unset, c = a;
    metal::simdgroup_multiply_accumulate(c, a, unset, c);
    metal::simdgroup_store(c, (float *)t.buffers[2], 8);
}

void multiply_in_half_the_lanes(simt::thread_state &t)
{
    matrix a = metal::make_filled_simdgroup_matrix<float, 8, 8>(1.0f), c = a;
    if (t.thread_index_in_simdgroup < 16) metal::simdgroup_multiply_accumulate(c, a, a, c);
}

void run_wrong_matrices(const void *)
{
    float numbers[100] = {};
    CHECK_RUN(run_matrix_kernel(multiply_unset, numbers, numbers, numbers));
    CHECK(isnan(numbers[0]) && isnan(numbers[63]), "elements that were never set were multiplied");
    check_refusal(run_matrix_kernel(multiply_in_half_the_lanes, numbers, numbers, numbers), "divergent");
}

// On a machine whose matrices lie otherwise, `tables` reports another product.
void run_matrix_places(const void *)
{
    tqkv__table_report report;
    CHECK_RUN(gpu_call(tqkv_metal_plan_tables, &report));
    CHECK(tqkv_metal_has_matrices(&report), "elements lie as expected, and the check says they do not");
    for (int other = 0; other < 2; other++) {
        simt::matrix_place kept[simt::simd_width];
        memcpy(kept, simt::matrix_places, sizeof kept);
        for (int lane = 0; lane < simt::simd_width; lane++) { // rows of four lanes; two lanes exchanged
            simt::matrix_place &place = simt::matrix_places[lane];
            if (other == 0) place = {(unsigned)lane / 4, (unsigned)lane % 4 * 2};
            if (other == 1 && (lane == 0 || lane == 16)) place = kept[16 - lane];
        }
        CHECK_RUN(gpu_call(tqkv_metal_plan_tables, &report));
        memcpy(simt::matrix_places, kept, sizeof kept);
        CHECK(!tqkv_metal_has_matrices(&report), "elements lie otherwise, and nothing shows it");
    }
}

} // namespace

void machine_cases()
{
    test_add(run_matrices, nullptr, 0, "machine/matrices");
    test_add(run_wrong_matrices, nullptr, 0, "machine/wrong_matrices");
    test_add(run_matrix_places, nullptr, 0, "machine/matrix_places");
    test_add(run_entry_points, nullptr, 0, "machine/entry_points");
    test_add(run_refusals, nullptr, 0, "machine/refusals");
}

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
enum { ELEMENTS = 64 };

// The lane's two elements of a matrix in a buffer.
float *elements_of(const simt::thread_state &t, int buffer)
{
    const simt::matrix_place place = simt::matrix_places[t.thread_index_in_simdgroup];
    return (float *)t.buffers[buffer] + place.row * 8 + place.column;
}

matrix load(const simt::thread_state &t, int buffer)
{
    matrix m;
    for (int i = 0; i < 2; i++) m.thread_elements()[i] = elements_of(t, buffer)[i];
    return m;
}

// Runs a kernel over two factors and a sum on one simdgroup.
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

void multiply(const simt::thread_state &t, const matrix &right)
{
    matrix sum = load(t, 2);
    metal::simdgroup_multiply_accumulate(sum, load(t, 0), right, sum);
    for (int i = 0; i < 2; i++) elements_of(t, 2)[i] = sum.thread_elements()[i];
}

// Small integers, so that every order of the sums is exact.
void run_matrices(const void *)
{
    float a[ELEMENTS], b[ELEMENTS], c[ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++) {
        a[i] = (float)(i * 7 % 23);
        b[i] = (float)(i * 5 % 19);
        c[i] = (float)(i % 3);
    }
    CHECK_RUN(run_matrix_kernel([](simt::thread_state &t) { multiply(t, load(t, 1)); }, a, b, c));
    for (int i = 0; i < ELEMENTS; i++) {
        float expected = (float)(i % 3);
        for (int k = 0; k < 8; k++) expected += a[i / 8 * 8 + k] * b[k * 8 + i % 8];
        CHECK(c[i] == expected, "element %d: %g, not %g", i, (double)c[i], (double)expected);
    }
}

void run_wrong_matrices(const void *)
{
    float numbers[ELEMENTS] = {};
    CHECK_RUN(run_matrix_kernel([](simt::thread_state &t) { multiply(t, matrix()); }, numbers, numbers, numbers));
    CHECK(isnan(numbers[0]) && isnan(numbers[63]), "elements that were never set were multiplied");
    const auto in_half_the_lanes = [](simt::thread_state &t) {
        if (t.thread_index_in_simdgroup < 16) multiply(t, load(t, 1));
    };
    check_refusal(run_matrix_kernel(in_half_the_lanes, numbers, numbers, numbers), "divergent");
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

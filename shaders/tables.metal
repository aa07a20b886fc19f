// tables: reports the shaders' codebooks, boundaries, signs, version and argument sizes. The host compares them with
// its own, and so refuses a library that was built from another version of tqkv.h. Or, in a pipeline of its own, which
// may fail, it multiplies two matrices: that tells whether their elements lie as expected. One simdgroup.
#include "fragments.h"

constant bool multiplies [[function_constant(TQKV_FC_UNROTATE)]];

inline float test_element(uint row, uint column, uint seed) { return float(TQKV__MATRIX_TEST(row, column, seed)); }

// The lane's elements of the product of the test's matrices.
inline void multiply_test(uint lane, thread sum_matrix &product)
{
    uint row = TQKV__MATRIX_ROW(lane), column = TQKV__MATRIX_COLUMN(lane);
    float x = test_element(row, column, 3u), y = test_element(row, column + 1u, 3u);
    float z = test_element(TQKV_RIGHT_ROW(lane, 0), TQKV_RIGHT_COLUMN(lane, 0), 5u);
    float w = test_element(TQKV_RIGHT_ROW(lane, 1), TQKV_RIGHT_COLUMN(lane, 1), 5u);
    code_value zero = code_value_of(0.0f, false);
    left_block left[1];
    right_pair right[1] = {right_of(z, w, 0.0f, 0.0f, false)};
    sum_matrix sums[2][1];
    for (int r = 0; r < 2; r++) {
        left[0].parts[0][r] = left_of_values(code_value_of(x, false), code_value_of(y, false), false);
        left[0].parts[1][r] = left_of_values(zero, zero, false);
        clear_matrix(sums[r][0]);
    }
    multiply<1, 1>(left, right, false, false, false, sums);
    product = sums[0][0];
}

// clang-format off
#define STORE_SIZE(name) report->struct_sizes[n_structs++] = uint(sizeof(tqkv__##name));
// clang-format on

kernel void tqkv_tables(device tqkv__table_report *report [[buffer(0)]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    if (multiplies) {
        if (thread_index >= 32u) return;
        sum_matrix product;
        multiply_test(thread_index, product);
        report->matrix_product[thread_index][0] = product.elements[0];
        report->matrix_product[thread_index][1] = product.elements[1];
        return;
    }
    if (thread_index == 0) {
        int n_structs = 0;
        report->table_version = TQKV_TABLE_VERSION;
        TQKV__SHARED_STRUCTS(STORE_SIZE)
    }
    if (thread_index < uint(TQKV__KERNEL_DIMS)) {
        const int head_dim = TQKV__KERNEL_DIM(int(thread_index));
        const int sizes[] = {TQKV__KERNEL_SIZES(head_dim)};
        for (int i = 0; i < TQKV__N_KERNEL_SIZES; i++) report->kernel_sizes[thread_index][i] = sizes[i];
    }
    device uchar *to = (device uchar *)&report->tables;
    constant uchar *from = (constant uchar *)&tqkv__tables;
    for (uint i = thread_index; i < uint(sizeof(tqkv__table_set)); i += n_simdgroups * 32u) to[i] = from[i];
}

// tables: reports the shaders' codebooks, boundaries, signs, version and argument sizes. The host compares them with
// its own, and so refuses a library that was built from another version of tqkv.h. One threadgroup.
#include "common.h"

// clang-format off
#define STORE_SIZE(name) report->struct_sizes[n_structs++] = uint(sizeof(tqkv__##name));
// clang-format on

kernel void tqkv_tables(device tqkv__table_report *report [[buffer(0)]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint n_simdgroups [[simdgroups_per_threadgroup]])
{
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

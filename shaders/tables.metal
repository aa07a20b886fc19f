// tables: reports the shaders' codebooks, boundaries, signs, version and argument sizes. The host compares them with
// its own, and so refuses a library that was built from another version of tqkv.h. One threadgroup.
#include "common.h"

kernel void tqkv_tables(device tqkv__table_report *report [[buffer(0)]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    if (thread_index == 0) {
        report->table_version = TQKV_TABLE_VERSION;
        report->table_set_size = uint(sizeof(tqkv__table_set));
        report->rows_args_size = uint(sizeof(tqkv__rows_args));
        report->rotate_args_size = uint(sizeof(tqkv__rotate_args));
        report->attend_args_size = uint(sizeof(tqkv__attend_args));
        report->merge_args_size = uint(sizeof(tqkv__merge_args));
        report->dispatch = TQKV__DISPATCH;
    }
    device uchar *to = (device uchar *)&report->tables;
    constant uchar *from = (constant uchar *)&tqkv__tables;
    for (uint i = thread_index; i < uint(sizeof(tqkv__table_set)); i += n_simdgroups * 32u) to[i] = from[i];
}

// attend: partial attention of stretches of the context; attend_merge makes one result of them. Threadgroups: x KV
// heads, y blocks of query rows, z splits of the context.
#include "attend.h"

// D: of the keys, V: of the values. NAME: D, or D_V where V differs
// clang-format off
#define ATTEND(NAME, D, V) \
    kernel void tqkv_attend_d##NAME(threadgroup float *weights [[threadgroup(2)]], ATTEND_ARGUMENTS) \
    { \
        ATTEND_TASK(D, V) \
        task.tail_queries = queries + TQKV__QUERY_FLOATS(D) * int(columns); \
        task.weights = weights; \
        task.tail_table = tables + 512; \
        task.states = states + TQKV__COLUMN_BYTES(TQKV__MAX_COLUMNS(V)) / 4; \
        open_slots(uint(TQKV__MAX_COLUMNS(V)), task); \
        TQKV_LONG_CALL(attend<D, V>(args, task)); \
    }
// clang-format on

ATTEND(32, 32, 32)
ATTEND(48, 48, 48)
ATTEND(64, 64, 64)
ATTEND(80, 80, 80)
ATTEND(96, 96, 96)
ATTEND(128, 128, 128)
ATTEND(192, 192, 192)
ATTEND(256, 256, 256)
ATTEND(448, 448, 448)
ATTEND(512, 512, 512)
ATTEND(1024, 1024, 1024)
ATTEND(192_128, 192, 128)

// What every shader starts with. Metal 3.0; also compiled as C++ and CUDA by tests/metal, hence a few habits: every
// helper is inline, every pointer names its address space, and kernels are plain functions over templates.
#ifndef TQKV_COMMON_H
#define TQKV_COMMON_H
#include <metal_stdlib>
using namespace metal;
#include "../tqkv.h"

// Codes and norms are the same bytes everywhere only if products are rounded before they are added. The compiler fuses
// them by default, also with -fno-fast-math. Where a fused multiply-add is wanted, it is written fma.
#pragma METAL fp contract(off)

// Loops over registers: left rolled, their arrays would live in memory.
#ifndef TQKV_UNROLL
#define TQKV_UNROLL _Pragma("clang loop unroll(full)")
#endif
// Loops long enough to fill the instruction cache: a few rounds at a time keep several loads on their way.
#ifndef TQKV_UNROLL_4
#define TQKV_UNROLL_4 _Pragma("clang loop unroll_count(4)")
#endif

// A lane number in the low bits of x. Metal leaves other numbers undefined; a shim for hardware that looks at five bits
// only may save the operation.
#ifndef TQKV_LANE_NUMBER
#define TQKV_LANE_NUMBER(x) ushort((x)&31u)
#endif

// A simdgroup handles a row of D values; lane l owns the values l*E .. l*E+E-1.
#define TQKV_LANE_VALUES(D) ((D) / 32)

// Rows are counted from the start of a buffer that may be beyond 4 GiB.
inline ulong row_offset(uint row, uint values) { return ulong(row) * ulong(values); }

// Slot of token t: at most one turn around the ring.
inline uint slot_of(constant tqkv__rows_args &args, uint token)
{
    uint slot = uint(args.first_slot) + token;
    return slot < uint(args.capacity) ? slot : slot - uint(args.capacity);
}

// Where row r, of token r / n_kv_heads and head r % n_kv_heads, lies in a store [n_kv_heads][capacity].
inline ulong store_row(constant tqkv__rows_args &args, uint row)
{
    uint token = row / uint(args.n_kv_heads), head = row % uint(args.n_kv_heads);
    return ulong(head) * ulong(args.capacity) + ulong(slot_of(args, token));
}

template <int D>
inline void load_row(device const float *row, uint lane, thread float *x)
{
    const int E = TQKV_LANE_VALUES(D);
    TQKV_UNROLL
    for (int i = 0; i < E; i++) x[i] = row[int(lane) * E + i];
}

template <int D>
inline void store_row_values(thread const float *x, uint lane, device float *row)
{
    const int E = TQKV_LANE_VALUES(D);
    TQKV_UNROLL
    for (int i = 0; i < E; i++) row[int(lane) * E + i] = x[i];
}

#endif

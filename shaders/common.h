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

// Whether a simd_shuffle whose lane number differs from lane to lane costs no more than a read of threadgroup memory. On
// Apple's GPUs such a shuffle was measured at 32 cycles, one by a fixed distance at 2 (github.com/philipturner/
// metal-benchmarks, commit dc2adc6). A shim for hardware with a full crossbar sets it.
#ifndef TQKV_CHEAP_SHUFFLE
#define TQKV_CHEAP_SHUFFLE false
#endif

// How a row of D values lies over lanes: L lanes own C neighbouring values each, and again further on in the row, until
// it is used up. Lane l of these has the values (j*L + l)*C .. +C-1, for j = 0, 1 .., at x[j*C].
#define TQKV_PIECES(D, L, C) ((D) / ((L) * (C)))

// A simdgroup that handles one row: lane l owns the values l*E .. l*E+E-1.
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

// N neighbouring floats; the caller's buffers promise no more than a float's alignment.
template <int N>
inline void load_floats(device const float *from, thread float *x)
{
    if (N % 4 == 0) {
        TQKV_UNROLL
        for (int i = 0; i < N / 4; i++) {
            packed_float4 four = ((device const packed_float4 *)from)[i];
            x[4 * i] = four.x;
            x[4 * i + 1] = four.y;
            x[4 * i + 2] = four.z;
            x[4 * i + 3] = four.w;
        }
    } else {
        TQKV_UNROLL
        for (int i = 0; i < N; i++) x[i] = from[i];
    }
}

template <int D>
inline void load_row(device const float *row, uint lane, thread float *x)
{
    load_floats<TQKV_LANE_VALUES(D)>(row + lane * uint(TQKV_LANE_VALUES(D)), x);
}

template <int D>
inline void store_row_values(thread const float *x, uint lane, device float *row)
{
    const int E = TQKV_LANE_VALUES(D);
    TQKV_UNROLL
    for (int i = 0; i < E; i++) row[int(lane) * E + i] = x[i];
}

#endif

// Every shader begins with this file. The language is Metal 3.0. tests/metal also compiles the shaders as C++ and CUDA,
// so every helper is inline, every pointer names its address space, and kernels are plain functions over templates.
#ifndef TQKV_COMMON_H
#define TQKV_COMMON_H
#include <metal_stdlib>
using namespace metal;
#include "../src/api/types.h"
#include "../src/base/tables.h"
#include "../src/gpu/sizes.h"

// Codes and norms are the same bytes on every machine only if a product is rounded before it is added. By default the
// compiler fuses the two, also with -fno-fast-math. Where a fused multiply-add is wanted, the code says fma.
#pragma METAL fp contract(off)

// For loops over arrays in registers. A loop that stays rolled puts its array into memory, and so does an element of it
// that is chosen while the kernel runs: read both elements, then choose.
#ifndef TQKV_UNROLL
#define TQKV_UNROLL _Pragma("clang loop unroll(full)")
#endif

// The lane number in the low bits of x. In Metal a lane number above 31 is undefined. A shim for hardware that reads
// only five bits may leave the operation out.
#ifndef TQKV_LANE_NUMBER
#define TQKV_LANE_NUMBER(x) ushort((x)&31u)
#endif

// True where a simd_shuffle costs no more than a read of threadgroup memory even if each lane asks for another lane. On
// Apple's GPUs such a shuffle takes 32 cycles, and one by a fixed distance 2 (measured by github.com/philipturner/
// metal-benchmarks, commit dc2adc6). A shim for hardware with a full crossbar sets it.
#ifndef TQKV_CHEAP_SHUFFLE
#define TQKV_CHEAP_SHUFFLE false
#endif

// Whether attend_matrix reads the slots of rows that lie apart from threadgroup memory, as attend does. Else its lanes
// ask each other by shuffles.
#ifndef TQKV_SHARED_MATRIX_SLOTS
#define TQKV_SHARED_MATRIX_SLOTS true
#endif

// Byte i of a word, with its sign. Metal's compiler is shown the conversion of a byte, which Apple's GPUs make from
// where it lies in a word, while shifts take turns of a unit that conversions need, too.
// A shim for hardware that has no such conversion shifts.
#ifndef TQKV_SIGNED_BYTE
#define TQKV_SIGNED_BYTE(word, i) float(int8_t((word) >> (8 * (i))))
#endif

// Whether loops load ahead without a condition. A load under one keeps Metal's compiler from unrolling loops over what
// it loads. nvcc unrolls them, and then a condition is faster.
#ifndef TQKV_PLAIN_LOADS
#define TQKV_PLAIN_LOADS true
#endif

// Loads of keys that a lane starts before it uses the first of them; with more than one it also has the norms of the
// next tile of attend_matrix. A lane of Apple's GPUs has 128 registers, and hides the latency of loads by other
// simdgroups, of which there are the fewer the more registers each takes.
#ifndef TQKV_LOADS_AHEAD
#define TQKV_LOADS_AHEAD 1
#endif

// Words of codes of values, W bits each, that a lane loads before it uses the first of them, where it keeps so many
// sums of rows of D, and how often the loop over them is unrolled. Batches of half the size make loops of half the
// length: nvcc's were longer than the caches of instructions.
#ifndef TQKV_VALUE_WORDS
#define TQKV_VALUE_WORDS(D, W, sums) 8
#define TQKV_UNROLL_VALUES(D, W, sums)
#endif

// Words of codes of values that a lane loads before it uses the first of them, where a threadgroup has a strand.
#ifndef TQKV_STRAND_WORDS
#define TQKV_STRAND_WORDS 32
#endif

// Floats of partial results that a lane of attend_merge loads at a time.
#ifndef TQKV_MERGE_FLOATS
#define TQKV_MERGE_FLOATS 32
#endif

// A kernel's call of its long function. The CUDA shim repeats the call under conditions,
// of which one is true: it says why.
#ifndef TQKV_LONG_CALL
#define TQKV_LONG_CALL(...) __VA_ARGS__
#endif

// Layout of a row of D values over L lanes. A piece of the row is L*C values: each lane owns C neighbouring ones. Lane
// l has the values (j*L + l)*C .. +C-1 of the row at x[j*C], for each piece j.
#define TQKV_PIECES(D, L, C) ((D) / ((L) * (C)))

// Layout of the rows of a simdgroup. Without a matrix one row: lane l owns the values l*D/32 .. of it. With a matrix,
// TQKV_ROWS rows side by side: a lane owns one value of each subrow, so the matrix across them stays in the lane.
#define TQKV_ROWS(D)        (32 / TQKV__ROW_LANES(D))
#define TQKV_ROW_PIECE(D)   (TQKV__HAS_MATRIX(D) ? 1 : (D) / 32)
#define TQKV_LANE_VALUES(D) ((D) / TQKV__ROW_LANES(D))

// A lane's number among the lanes of its row.
template <int D>
inline uint lane_of_row(uint lane)
{
    return TQKV__HAS_MATRIX(D) ? lane % uint(TQKV__ROW_LANES(D)) : lane;
}

// Start of a row. In 64 bits: a buffer may be larger than 4 GiB.
inline ulong row_offset(uint row, uint values) { return ulong(row) * ulong(values); }

// The item of a batch that has threadgroup `number` of attend, or that query row or row of lists: the last one that
// begins there or before.
enum { TQKV_BY_GROUP, TQKV_BY_ROW, TQKV_BY_LIST };
inline int first_of_item(constant tqkv__batch_item &item, int by)
{
    return by == TQKV_BY_LIST ? item.first_list : by == TQKV_BY_ROW ? item.first_row : item.first_group;
}

inline uint item_of(constant tqkv__batch_item *items, uint number, int by)
{
    uint low = 0, high = uint(items[0].n_items);
    while (high - low > 1u) {
        uint middle = (low + high) / 2u;
        uint first = uint(first_of_item(items[middle], by));
        low = first <= number ? middle : low;
        high = first <= number ? high : middle;
    }
    return low;
}

// Where the newest halves begin that a query reads whose newest position is `newest`:
// what is before comes from its codes.
inline int halves_begin(constant tqkv__attend_args &args, int newest)
{
    return max(newest - args.exact_last + 1, args.exact_from);
}

// Start of the caller's row of a token and head, in values.
inline ulong source_offset(constant tqkv__rows_args &args, uint token, uint head)
{
    return row_offset(token, args.token_stride) + row_offset(head, args.head_stride);
}

// Slot of token t of the call. Slots wrap at most once.
inline uint slot_of(constant tqkv__rows_args &args, uint token)
{
    uint slot = uint(args.first_slot) + token;
    return slot < uint(args.capacity) ? slot : slot - uint(args.capacity);
}

// The same through a page table; `capacity` where the entry is none of the store's pages.
inline uint paged_slot_of(constant tqkv__rows_args &args, device const int *pages, uint token)
{
    uint position = uint(args.first_slot) + token, size = uint(args.page_size), page = uint(pages[position / size]);
    return page < uint(args.n_pages) ? page * size + position % size : uint(args.capacity);
}

// Row of a slot and head in a store, [n_kv_heads][capacity].
inline ulong row_in_store(constant tqkv__rows_args &args, uint slot, uint head)
{
    return ulong(head) * ulong(args.capacity) + ulong(slot);
}

#endif

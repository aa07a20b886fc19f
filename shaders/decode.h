// One simdgroup decodes one row.
#ifndef TQKV_DECODE_H
#define TQKV_DECODE_H
#include "codec.h"
#include "rotate.h"

template <int D, int W>
inline void decode_values(uint format, device const uchar *row, uint lane, thread const codebook &book, thread float *x)
{
    const int E = TQKV_LANE_VALUES(D);
    raw_codes<W, E> raw;
    load_codes<D, W, E>(format, row, lane * uint(E), raw);
    TQKV_UNROLL
    for (int i = 0; i < E; i++) x[i] = value_at<W, E>(format, raw, i, book);
}

// What is decoded, and where to.
struct decode_task {
    uint format;
    bool unrotate;              // from the rotated basis to the original one
    bool centered, rotated;     // there is a centre, and it is rotated before it is added
    device const uchar *codes;  // [n_kv_heads][capacity][row_bytes]
    device const float *norms;  // [n_kv_heads][capacity][norms of a row]
    device float *out;          // [n_tokens][n_kv_heads][D]
    device const float *center; // [n_kv_heads][D]
    codebook book;
};

// Row `row` of the output.
template <int D>
inline void decode_row(constant tqkv__rows_args &args, thread const decode_task &task, uint row, uint lane)
{
    uint n_heads = uint(args.n_kv_heads), format = task.format;
    if (row >= uint(args.n_tokens) * n_heads) return;
    ulong from = row_in_store(args, row / n_heads, row % n_heads);
    device const uchar *stored = task.codes + from * ulong(row_bytes<D>(format));
    float x[TQKV_LANE_VALUES(D)];
    if (code_width(format) == 4) decode_values<D, 4>(format, stored, lane, task.book, x);
    if (code_width(format) == 8) decode_values<D, 8>(format, stored, lane, task.book, x);
    if (code_width(format) == 16) decode_values<D, 16>(format, stored, lane, task.book, x);
    if (has_norms(format)) {
        uint block = norm_block<D>(format);
        float norm = task.norms[from * ulong(uint(D) / block) + lane * uint(TQKV_LANE_VALUES(D)) / block];
        scale_values<TQKV_LANE_VALUES(D)>(x, code_scale<D>(format, norm, args.block_scale));
    }
    if (task.unrotate) unrotate_row<D>(x, lane);
    if (task.centered) add_center<D>(task.center, row % n_heads, task.rotated, 1.0f, lane, x);
    store_row<D>(x, lane, task.out + row_offset(row, D));
}

#endif

// Decoding of one row by one simdgroup.
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

// Row `row` of [n_tokens][n_kv_heads] out of the store, in the original basis if `unrotate`.
template <int D>
inline void decode_row(uint format, bool unrotate, constant tqkv__rows_args &args, device const uchar *codes,
                       device const float *norms, uint row, device float *out, thread const codebook &book, uint lane)
{
    if (row >= uint(args.n_tokens) * uint(args.n_kv_heads)) return;
    ulong from = store_row(args, row);
    device const uchar *stored = codes + from * ulong(row_bytes<D>(format));
    float x[TQKV_LANE_VALUES(D)];
    if (main_bits(format) == 4) decode_values<D, 4>(format, stored, lane, book, x);
    if (main_bits(format) == 8) decode_values<D, 8>(format, stored, lane, book, x);
    if (main_bits(format) == 16) decode_values<D, 16>(format, stored, lane, book, x);
    if (!is_half(format)) {
        uint block = norm_block<D>(format);
        float norm = norms[from * ulong(uint(D) / block) + lane * uint(TQKV_LANE_VALUES(D)) / block];
        scale_values<TQKV_LANE_VALUES(D)>(x, code_scale<D>(format, norm, args.block_scale));
    }
    if (unrotate) unrotate_row<D>(x, lane);
    store_row_values<D>(x, lane, out + row_offset(row, D));
}

#endif

// A simdgroup decodes TQKV_ROWS(D) rows.
#ifndef TQKV_DECODE_H
#define TQKV_DECODE_H
#include "codec.h"
#include "rotate.h"

template <int D, int W>
inline void decode_values(uint format, device const uchar *row, uint lane, thread const codebook &book, thread float *x)
{
    const int L = TQKV__ROW_LANES(D), C = TQKV_ROW_PIECE(D);
    TQKV_UNROLL
    for (int j = 0; j < TQKV_PIECES(D, L, C); j++) {
        raw_codes<W, C> raw;
        load_codes<D, W, C>(format, row, (uint(j * L) + lane) * uint(C), raw);
        TQKV_UNROLL
        for (int i = 0; i < C; i++) x[j * C + i] = value_at<W, C>(format, raw, i, book);
    }
}

// What is decoded, and where to.
struct decode_task {
    uint format, type;          // type: of the output
    bool unrotate;              // from the rotated basis to the original one
    bool scaled;                // rows are multiplied by the channels' scales
    bool centered, rotated;     // there is a centre, and it is rotated before it is added
    bool center_scaled;         // and divided by the scales before that
    device const uchar *codes;  // [n_kv_heads][capacity][row_bytes]
    device const float *norms;  // [n_kv_heads][capacity][norms of a row]
    device uchar *out;          // [n_tokens][n_kv_heads][D], with strides
    device const float *center; // [n_kv_heads][D]
    device const float *scale;  // the same, of the channels
    bool paged;
    device const int *pages; // [n_pages]
    codebook book;
};

// Norms: of the row.
template <int D>
inline void scale_codes(uint format, device const float *norms, float block_scale, uint lane, thread float *x)
{
    const int L = TQKV__ROW_LANES(D), C = TQKV_ROW_PIECE(D);
    uint block = norm_block<D>(format);
    TQKV_UNROLL
    for (int j = 0; j < TQKV_PIECES(D, L, C); j++) {
        uint number = block == uint(D) ? 0u : (uint(j * L) + lane) * uint(C) / block;
        scale_values<C>(x + j * C, code_scale<D>(format, norms[number], block_scale));
    }
}

// Rows `first_row` .. of the output. Lanes without a row repeat the last one and store nothing.
template <int D>
inline void decode_rows(constant tqkv__rows_args &args, thread const decode_task &task, uint first_row, uint lane)
{
    uint n_heads = uint(args.n_kv_heads), n_rows = uint(args.n_tokens) * n_heads, format = task.format;
    uint own = first_row + lane / uint(TQKV__ROW_LANES(D)), row = min(own, n_rows - 1u), part = lane_of_row<D>(lane);
    if (first_row >= n_rows) return;
    uint slot = task.paged ? paged_slot_of(args, task.pages, row / n_heads) : slot_of(args, row / n_heads);
    ulong from = row_in_store(args, min(slot, uint(args.capacity) - 1u), row % n_heads);
    device const uchar *stored = task.codes + from * ulong(row_bytes<D>(format));
    float x[TQKV_LANE_VALUES(D)];
    if (code_width(format) == 4)
        decode_values<D, 4>(format, stored, part, task.book, x);
    else if (code_width(format) == 8)
        decode_values<D, 8>(format, stored, part, task.book, x);
    else
        decode_values<D, 16>(format, stored, part, task.book, x);
    if (has_norms(format))
        scale_codes<D>(format, task.norms + from * ulong(uint(D) / norm_block<D>(format)), args.block_scale, part, x);
    if (task.unrotate) unrotate_row<D>(x, part, signs_of_row<D>(part));
    if (task.scaled) multiply_channels<D>(task.scale, row % n_heads, part, x);
    if (task.centered)
        add_center<D>(task.center, task.scale, row % n_heads, task.center_scaled, task.rotated, 1.0f, part, x);
    if (own < n_rows)
        store_typed_row<D>(task.type, x, part, task.out, source_offset(args, row / n_heads, row % n_heads));
}

#endif

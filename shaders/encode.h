// Encoding: a simdgroup takes 32/L rows at a time, with L lanes a row. The order of every rounded operation is that of
// tqkv_encode, so codes and norms are the same bytes. A "part" below is the values that tqkv_encode sums first, D/32 of
// them, or D/16 where 32 does not divide D.
#ifndef TQKV_ENCODE_H
#define TQKV_ENCODE_H
#include "codec.h"
#include "rotate.h"

inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }

// A lane takes 16 values, or 32 from head_dim 256 on: most stages of the transform then stay in the lane. A lane's
// piece has at least 16 bytes. Measured on an H200, 2^20 rows to TQ4, with 16 and with 32 values: 188 and 198
// microseconds at head_dim 128, 427 and 389 at head_dim 256. With a matrix a lane takes one value of each run for the
// rotation; then threadgroup memory gives it as many neighbours: whole parts, one piece.
#define ENCODE_LANES(D)  (TQKV__RUNS(D) > 1 ? TQKV__ROW_LANES(D) : (D) <= 128 ? (D) / 16 : (D) / 32)
#define ENCODE_PIECE(D)  (TQKV__RUNS(D) > 1 ? TQKV__RUNS(D) : (D) <= 128 ? 4 : (D) / 32)
#define ENCODE_VALUES(D) ((D) / ENCODE_LANES(D))
#define ENCODE_PIECES(D) TQKV_PIECES(D, ENCODE_LANES(D), ENCODE_PIECE(D))
#define ROTATED_PIECE(D) (TQKV__RUNS(D) > 1 ? 1 : ENCODE_PIECE(D))

// A row with a NaN or Inf becomes a row of zeros; true for such a row. Only NaN and Inf times 0 are not 0.
template <int D>
inline bool clear_if_not_finite(thread float *x)
{
    float zero = 0.0f;
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i++) zero = fma(x[i], 0.0f, zero);
    uint not_finite = zero == 0.0f ? 0u : 1u;
    TQKV_UNROLL
    for (int distance = 1; distance < ENCODE_LANES(D); distance *= 2)
        not_finite |= simd_shuffle_xor(not_finite, ushort(distance));
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i++) x[i] = not_finite != 0 ? 0.0f : x[i];
    return not_finite != 0;
}

// A block of values that share a norm spans this many pieces of this many lanes. NORM_BLOCK: the block of formats with
// a codebook, whose norm is a root of squares. MAXIMUM_BLOCK: that of the 8-bit grid, whose norm is a maximum.
#define BLOCK_PIECES(D, BLOCK)                                                                                         \
    ((BLOCK) > ENCODE_LANES(D) * ENCODE_PIECE(D) ? (BLOCK) / (ENCODE_LANES(D) * ENCODE_PIECE(D)) : 1)
#define BLOCK_LANES(D, BLOCK) ((BLOCK) / (ENCODE_PIECE(D) * BLOCK_PIECES(D, BLOCK)))
#define NORM_BLOCK(D)         TQKV__NORM_BLOCK(TQKV__BOOK, D)
#define MAXIMUM_BLOCK(D)      TQKV__NORM_BLOCK(TQKV__GRID, D)

// Sum of one piece over the lanes of the block: within each part in order, then parts in pairs of distance 1, 2, 4 ..
template <int D>
inline float piece_sum(thread const float *squares)
{
    const int E = D / TQKV__NORM_LANES(D), PARTS = ENCODE_PIECE(D) / E, LANES = BLOCK_LANES(D, NORM_BLOCK(D));
    float sum[PARTS];
    TQKV_UNROLL
    for (int p = 0; p < PARTS; p++) {
        sum[p] = squares[p * E];
        TQKV_UNROLL
        for (int i = 1; i < E; i++) sum[p] = sum[p] + squares[p * E + i];
    }
    TQKV_UNROLL
    for (int distance = 1; distance < PARTS; distance *= 2) {
        TQKV_UNROLL
        for (int p = 0; p + distance < PARTS; p += 2 * distance) sum[p] = sum[p] + sum[p + distance];
    }
    TQKV_UNROLL
    for (int distance = 1; distance < LANES; distance *= 2)
        sum[0] = sum[0] + simd_shuffle_xor(sum[0], ushort(distance));
    return sum[0];
}

// length[j] of the block that begins at piece j, from the sums of squares of the pieces: the length of the block, or if
// the row has several blocks the root mean square.
template <int D>
inline void block_lengths(thread float *length)
{
    const int J = ENCODE_PIECES(D), P = BLOCK_PIECES(D, NORM_BLOCK(D));
    TQKV_UNROLL
    for (int distance = 1; distance < P; distance *= 2) {
        TQKV_UNROLL
        for (int j = 0; j + distance < J; j += 2 * distance) length[j] = length[j] + length[j + distance];
    }
    TQKV_UNROLL
    for (int j = 0; j < J; j += P)
        length[j] = precise::sqrt(NORM_BLOCK(D) == D ? length[j] : length[j] / float(NORM_BLOCK(D)));
}

// norm[j] of the block of x that begins at piece j.
template <int D>
inline void block_norms(thread const float *x, thread float *norm)
{
    const int J = ENCODE_PIECES(D), C = ENCODE_PIECE(D);
    TQKV_UNROLL
    for (int j = 0; j < J; j++) {
        float squares[C];
        TQKV_UNROLL
        for (int i = 0; i < C; i++) squares[i] = x[j * C + i] * x[j * C + i];
        norm[j] = piece_sum<D>(squares);
    }
    block_lengths<D>(norm);
}

// Quantising shortens a row by its error. The stored norm makes the decoded row as long as the row was. squares: of the
// centroids of the lane's codes
template <int D>
inline void correct_norms(float block_scale, thread const float *squares, thread float *norm)
{
    const int J = ENCODE_PIECES(D), C = ENCODE_PIECE(D), P = BLOCK_PIECES(D, NORM_BLOCK(D));
    float length[J];
    TQKV_UNROLL
    for (int j = 0; j < J; j++) length[j] = piece_sum<D>(squares + j * C);
    block_lengths<D>(length);
    TQKV_UNROLL
    for (int j = 0; j < J; j += P) {
        float factor = (NORM_BLOCK(D) == D ? TQKV__SQRT(D) : block_scale) / length[j];
        norm[j] = norm[j] <= TQKV__MIN_NORM ? 0.0f : norm[j] * factor;
        // The rotation may overflow to NaN. Which of all NaNs differs between machines: store always the same.
        if ((as_type<uint>(norm[j]) & 0x7fffffffu) > 0x7f800000u) norm[j] = as_type<float>(0x7fc00000u);
    }
}

// largest[j]: the maximum magnitude in the block that begins at piece j.
template <int D>
inline void block_maxima(thread const float *x, thread float *largest)
{
    const int J = ENCODE_PIECES(D), C = ENCODE_PIECE(D), P = BLOCK_PIECES(D, MAXIMUM_BLOCK(D));
    TQKV_UNROLL
    for (int j = 0; j < J; j += P) {
        largest[j] = 0.0f;
        TQKV_UNROLL
        for (int i = 0; i < P * C; i++) largest[j] = fmax(largest[j], fabs(x[j * C + i]));
        TQKV_UNROLL
        for (int distance = 1; distance < BLOCK_LANES(D, MAXIMUM_BLOCK(D)); distance *= 2)
            largest[j] = fmax(largest[j], simd_shuffle_xor(largest[j], ushort(distance)));
    }
}

// Scales the lane's values to units of the codebook or of the grid. norm[j] is of the block that begins at piece j; 0
// for a format without norms.
template <int D>
inline void normalise(uint format, float block_scale, thread float *x, thread float *norm)
{
    const int C = ENCODE_PIECE(D), P = BLOCK_PIECES(D, NORM_BLOCK(D)), M = BLOCK_PIECES(D, MAXIMUM_BLOCK(D));
    float scale = 0.0f;
    TQKV_UNROLL
    for (int j = 0; j < ENCODE_PIECES(D); j++) norm[j] = 0.0f;
    if (!has_norms(format)) return;
    if (has_codebook(format))
        block_norms<D>(x, norm);
    else
        block_maxima<D>(x, norm);
    TQKV_UNROLL
    for (int j = 0; j < ENCODE_PIECES(D); j++) {
        if (!has_codebook(format) && j % M == 0) {
            scale = norm[j] > TQKV__MIN_NORM ? 127.0f / norm[j] : 0.0f;
            norm[j] = norm[j] / 127.0f;
        }
        if (has_codebook(format) && j % P == 0) {
            float inverse = norm[j] > TQKV__MIN_NORM ? 1.0f / norm[j] : 0.0f;
            scale = inverse * (NORM_BLOCK(D) == D ? TQKV__SQRT(D) : block_scale);
        }
        scale_values<C>(x + j * C, scale);
    }
}

// Stores the lowest BITS bits of words, a multiple of 8, by the widest units that divide BITS.
template <int BITS>
inline void store_bits(device uchar *to, thread const uint *words)
{
    if (BITS % 32 == 0) {
        TQKV_UNROLL
        for (int i = 0; i < BITS / 32; i++) ((device uint *)to)[i] = words[i];
    } else if (BITS % 16 == 0) {
        TQKV_UNROLL
        for (int i = 0; i < BITS / 16; i++) ((device ushort *)to)[i] = ushort(words[i / 2] >> (i % 2 * 16));
    } else {
        TQKV_UNROLL
        for (int i = 0; i < BITS / 8; i++) to[i] = uchar(words[i / 4] >> (i % 4 * 8));
    }
}

// The row that a lane encodes, and the lane's number among the lanes of the row.
struct encode_place {
    uint lane, row, token, head;
    bool exists; // the row
};

// The lane's row of the first pass. first_row: the simdgroup's first.
template <int D>
inline encode_place first_place(constant tqkv__rows_args &args, uint first_row, uint lane)
{
    encode_place at;
    at.lane = lane % uint(ENCODE_LANES(D));
    at.row = first_row + lane / uint(ENCODE_LANES(D));
    at.token = at.row / uint(args.n_kv_heads);
    at.head = at.row % uint(args.n_kv_heads);
    at.exists = at.token < uint(args.n_tokens);
    return at;
}

// The lane's row of the next pass, without another division.
template <int D>
inline void next_place(constant tqkv__rows_args &args, uint step_tokens, uint step_heads, thread encode_place &at)
{
    at.row += uint(32 / ENCODE_LANES(D));
    at.token += step_tokens;
    at.head += step_heads;
    bool wrap = at.head >= uint(args.n_kv_heads);
    at.token += wrap ? 1u : 0u;
    at.head -= wrap ? uint(args.n_kv_heads) : 0u;
    at.exists = at.token < uint(args.n_tokens);
}

// Packs BITS bits, from bit `low` on, of each code of a piece into the field of the row. first: the piece's first
// value. whole: the codes have no other bits, so nothing is masked.
template <int D, int BITS>
inline void store_field(thread const uint *codes, uint low, bool whole, uint first, thread const encode_place &at,
                        device uchar *field)
{
    const int C = ENCODE_PIECE(D), N = C * BITS, STORED = N % 8 == 0 ? N : 2 * N;
    bool stores = at.exists;
    uint words[(STORED + 31) / 32];
    TQKV_UNROLL
    for (int i = 0; i < (STORED + 31) / 32; i++) words[i] = 0;
    TQKV_UNROLL
    for (int i = 0; i < C; i++)
        words[i * BITS / 32] += (whole ? codes[i] : (codes[i] >> low) & ((1u << BITS) - 1u)) << (i * BITS % 32);
    if (STORED > N) { // half a byte is left, or all there is: the next lane has the other half
        uint other = simd_shuffle_xor(words[0], ushort(1));
        words[0] |= other << (N % 32);
        if (STORED > 32) words[STORED / 32] = other >> (-N & 31);
        stores = stores && (at.lane & 1u) == 0;
    }
    if (stores) store_bits<STORED>(field + first * uint(BITS) / 8u, words);
}

// Where the codes go, and the cells to find them.
struct encode_target {
    device uchar *codes; // [n_kv_heads][capacity][row_bytes]
    device float *norms; // [n_kv_heads][capacity][norms of a row]
    threadgroup uint2 *cells;
    threadgroup const float *squares; // of the centroids
    bool paged;
    device const int *pages; // [n_pages]
};

// The codes of a piece of values, which become the squares of their centroids. All lanes come here together; those
// whose row does not exist store nothing.
template <int D>
inline void store_piece(uint format, thread const encode_target &target, uint first, thread const encode_place &at,
                        device uchar *row, thread float *x)
{
    const int C = ENCODE_PIECE(D);
    if (main_bits(format) == 16) {
        uint words[C / 2];
        TQKV_UNROLL
        for (int i = 0; i < C / 2; i++) words[i] = half_bits(x[2 * i]) | half_bits(x[2 * i + 1]) << 16;
        if (at.exists) store_bits<16 * C>(row + first * 2u, words);
        return;
    }
    uint codes[C];
    TQKV_UNROLL
    for (int i = 0; i < C; i++)
        codes[i] = has_codebook(format) ? quantise(x[i], codebook_bits(format), target.cells) : quantise_grid(x[i]);
    TQKV_UNROLL
    for (int i = 0; i < C; i++) x[i] = has_codebook(format) ? target.squares[codes[i]] : 0.0f;
    bool whole = upper_bits(format) == 0;
    if (main_bits(format) == 2) store_field<D, 2>(codes, 0u, whole, first, at, row);
    if (main_bits(format) == 4) store_field<D, 4>(codes, 0u, whole, first, at, row);
    if (main_bits(format) == 8) store_field<D, 8>(codes, 0u, whole, first, at, row);
    device uchar *upper = row + upper_offset<D>(format);
    if (upper_bits(format) == 1) store_field<D, 1>(codes, main_bits(format), false, first, at, upper);
    if (upper_bits(format) == 2) store_field<D, 2>(codes, main_bits(format), false, first, at, upper);
}

// The sign of each value of a row, +-1; with a matrix none. A barrier must follow.
template <int D>
inline void load_signs(threadgroup float *signs, uint thread_index, uint n_threads)
{
    for (uint i = TQKV__RUNS(D) > 1 ? uint(D) : thread_index; i < uint(D); i += n_threads)
        signs[i] = (tqkv__tables.signs[(i & 511u) >> 3] >> (i & 7u)) & 1u ? -1.0f : 1.0f;
}

// rotate_values with signs from threadgroup memory. A product with a sign is exact, and half of the products are part
// of the first stage of the transform.
template <int D>
inline void rotate_with_signs(thread float *x, uint lane, threadgroup const float *signs)
{
    const int L = ENCODE_LANES(D), C = ROTATED_PIECE(D);
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i += 4) {
        float4 sign = *(threadgroup const float4 *)(signs + ((uint(i / C * L) + lane) * uint(C) + uint(i % C)));
        float a = x[i] * sign.x, b = x[i + 2] * sign.z;
        x[i] = fma(x[i + 1], sign.y, a);
        x[i + 1] = fma(x[i + 1], -sign.y, a);
        x[i + 2] = fma(x[i + 3], sign.w, b);
        x[i + 3] = fma(x[i + 3], -sign.w, b);
    }
    hadamard_from<D, L, C>(x, lane, 2);
    scale_values<ENCODE_VALUES(D)>(x, TQKV__INV_SQRT(D));
}

// From a value of each run to neighbours, through `rows`: the rows of the simdgroup, L floats apart, so that few of
// their values share a bank. lane: of the simdgroup
template <int D>
inline void gather_neighbours(uint lane, threadgroup float *rows, thread float *x)
{
    const int L = ENCODE_LANES(D), N = ENCODE_VALUES(D);
    uint part = lane % uint(L);
    threadgroup float *row = rows + lane / uint(L) * uint(D + L);
    TQKV_UNROLL
    for (int i = 0; i < N; i++) row[uint(i * L) + part] = x[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    TQKV_UNROLL
    for (int i = 0; i + 3 < N; i += 4) {
        float4 four = *(threadgroup const float4 *)(row + part * uint(N) + uint(i));
        x[i] = four.x;
        x[i + 1] = four.y;
        x[i + 2] = four.z;
        x[i + 3] = four.w;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup); // before the next row overwrites this one
}

// What a kernel of these passes to the functions here as `space`: the signs or, with a matrix, the simdgroup's rows.
template <int D>
inline threadgroup float *space_of_simdgroup(threadgroup float *space, uint simdgroup)
{
    return space + (TQKV__RUNS(D) > 1 ? simdgroup * uint(TQKV__ROW_BYTES(D, 1) / 4) : 0u);
}

// The rows of one stream, and what prepares them.
struct encode_source {
    uint format, type;
    bool rotated, centered;
    device const uchar *rows;       // [n_tokens][n_kv_heads][D]
    device const float *center;     // [n_kv_heads][D]
    threadgroup float *space;       // space_of_simdgroup
    device atomic_uint *not_finite; // becomes 1 if a row has a NaN or Inf
};

// The lane's part of a row: before the rotation, if there is one.
template <int D>
inline void load_source(thread const encode_source &source, uint row, uint lane, thread float *x)
{
    const int L = ENCODE_LANES(D);
    if (source.rotated)
        load_typed_pieces<D, L, ROTATED_PIECE(D)>(source.type, source.rows, row_offset(row, D), lane, x);
    else
        load_typed_pieces<D, L, ENCODE_PIECE(D)>(source.type, source.rows, row_offset(row, D), lane, x);
}

template <int D>
inline void subtract_center(thread const encode_source &source, uint head, uint lane, thread float *x)
{
    const int L = ENCODE_LANES(D);
    float center[ENCODE_VALUES(D)];
    device const float *from = source.center + row_offset(head, D);
    if (source.rotated)
        load_pieces<D, L, ROTATED_PIECE(D)>(from, lane, center);
    else
        load_pieces<D, L, ENCODE_PIECE(D)>(from, lane, center);
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i++) x[i] = x[i] - center[i];
}

template <int D>
inline void rotate_source(thread const encode_source &source, uint lane, thread float *x)
{
    const int L = ENCODE_LANES(D), C = ROTATED_PIECE(D);
    if (TQKV__RUNS(D) > 1)
        rotate_values<D, L, C>(x, lane, lane_signs<D, L, C>(lane));
    else
        rotate_with_signs<D>(x, lane, source.space);
}

// All steps before the codes: loads the lane's part of its row, raises the flag, centres, rotates and scales. Every
// value of a rotated row is a sum over the row, so one value shows that there may be a NaN or Inf. Then the row is
// checked itself. head: of the row; lane: of the simdgroup
template <int D>
inline void prepare_row(thread const encode_source &source, float block_scale, uint row, uint head, uint lane,
                        thread float *x, thread float *norm)
{
    uint part = lane % uint(ENCODE_LANES(D));
    load_source<D>(source, row, part, x);
    if (source.rotated) {
        if (source.centered) subtract_center<D>(source, head, part, x);
        rotate_source<D>(source, part, x);
    }
    if (!source.rotated || simd_any(!is_finite(x[0]))) {
        if (source.rotated) load_source<D>(source, row, part, x);
        bool cleared = clear_if_not_finite<D>(x);
        if (cleared && part == 0) atomic_store_explicit(source.not_finite, 1u, memory_order_relaxed);
        if (source.centered && !cleared) subtract_center<D>(source, head, part, x);
        if (source.rotated) rotate_source<D>(source, part, x);
    }
    if (source.rotated && TQKV__RUNS(D) > 1) gather_neighbours<D>(lane, source.space, x);
    normalise<D>(source.format, block_scale, x, norm);
}

// A simdgroup encodes up to TQKV__ENCODE_ROWS(D) rows from `first_row` on. Lanes without a row repeat the last one and
// store nothing.
template <int D>
inline void encode_rows(constant tqkv__rows_args &args, thread const encode_source &source,
                        thread const encode_target &target, uint first_row, uint lane)
{
    const int L = ENCODE_LANES(D), C = ENCODE_PIECE(D), ROWS = 32 / L;
    const uint format = source.format, block = norm_block<D>(format);
    uint n_heads = uint(args.n_kv_heads), n_rows = uint(args.n_tokens) * n_heads;
    uint step_tokens = uint(ROWS) / n_heads, step_heads = uint(ROWS) % n_heads;
    encode_place at = first_place<D>(args, first_row, lane);
    for (uint row = first_row; row < min(first_row + uint(TQKV__ENCODE_ROWS(D)), n_rows); row += uint(ROWS)) {
        float x[ENCODE_VALUES(D)], norm[ENCODE_PIECES(D)];
        prepare_row<D>(source, args.block_scale, min(at.row, n_rows - 1u), at.head, lane, x, norm);
        uint slot = target.paged ? paged_slot_of(args, target.pages, min(at.token, uint(args.n_tokens) - 1u))
                                 : slot_of(args, at.token);
        if (target.paged) at.exists = at.exists && slot < uint(args.capacity);
        ulong to = row_in_store(args, slot, at.head);
        device uchar *codes = target.codes + to * ulong(row_bytes<D>(format));
        TQKV_UNROLL
        for (int j = 0; j < ENCODE_PIECES(D); j++)
            store_piece<D>(format, target, (uint(j * L) + at.lane) * uint(C), at, codes, x + j * C);
        if (has_codebook(format)) correct_norms<D>(args.block_scale, x, norm);
        TQKV_UNROLL
        for (int j = 0; j < ENCODE_PIECES(D); j++) {
            uint first = (uint(j * L) + at.lane) * uint(C);
            if (at.exists && has_norms(format) && first % block == 0)
                target.norms[to * ulong(uint(D) / block) + first / block] = norm[j];
        }
        next_place<D>(args, step_tokens, step_heads, at);
    }
}

// The same rows as values that encode_rows would make codes of. scaled: [n_tokens][n_kv_heads][D]
template <int D>
inline void probe_rows(constant tqkv__rows_args &args, thread const encode_source &source, uint first_row, uint lane,
                       device float *scaled)
{
    const int L = ENCODE_LANES(D), C = ENCODE_PIECE(D), ROWS = 32 / L;
    uint n_rows = uint(args.n_tokens) * uint(args.n_kv_heads), part = lane % uint(L);
    for (uint row = first_row; row < min(first_row + uint(TQKV__ENCODE_ROWS(D)), n_rows); row += uint(ROWS)) {
        float x[ENCODE_VALUES(D)], norm[ENCODE_PIECES(D)];
        uint own = row + lane / uint(L), existing = min(own, n_rows - 1u);
        uint head = source.centered ? existing % uint(args.n_kv_heads) : 0u;
        prepare_row<D>(source, args.block_scale, existing, head, lane, x, norm);
        TQKV_UNROLL
        for (int i = 0; i < ENCODE_VALUES(D); i++)
            if (own < n_rows) scaled[row_offset(own, D) + value_of_lane<L, C>(part, i)] = x[i];
    }
}

#endif

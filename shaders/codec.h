// The codec, once for all kernels: how a format lies in memory, how values become codes and codes become values.
// `format` is a function constant wherever it is passed, so a pipeline keeps one side of every branch on it.
#ifndef TQKV_CODEC_H
#define TQKV_CODEC_H
#include "types.h"

// ---- The shape of a row: a field of main bits a value, then a field of upper bits a value (TQKV__FORMATS) ----

// The columns of TQKV__FORMATS as words with a field a format. A pipeline has a constant, and until then a shift is
// shorter than a chain of comparisons, of which LLVM makes branches. Of the main bits 2, 4, 8
// and 16 the power of two, less 1.
#define KIND_FIELD(x, format, name, kind, main, upper, book, plain)  | uint(kind) << (2 * (format))
#define MAIN_FIELD(x, format, name, kind, main, upper, book, plain)  | uint((main) / 8 + ((main) > 2)) << (2 * (format))
#define UPPER_FIELD(x, format, name, kind, main, upper, book, plain) | uint(upper) << (2 * (format))
#define BOOK_FIELD(x, format, name, kind, main, upper, book, plain)  | ulong(book) << (4 * (format))

inline uint kind_of(uint format) { return (0u TQKV__FORMATS(KIND_FIELD, )) >> (2u * format) & 3u; }
inline uint main_bits(uint format) { return 2u << ((2u TQKV__FORMATS(MAIN_FIELD, )) >> (2u * format) & 3u); }
inline uint upper_bits(uint format) { return (0u TQKV__FORMATS(UPPER_FIELD, )) >> (2u * format) & 3u; }

// The bits that code is written for. Fields of 2 bits take the code of 4, and load half as many words. Not by max: that
// may be a call that stays a call, and a pipeline would keep the code of all widths.
inline uint code_width(uint format) { return main_bits(format) < 4u ? 4u : main_bits(format); }

// A macro of head_dim and width, for the width of a format's codes.
#define BY_CODE_WIDTH(format, SIZE, D) \
    (code_width(format) == 4 ? SIZE(D, 4) : code_width(format) == 8 ? SIZE(D, 8) : SIZE(D, 16))

// A statement with W, the width of a format's codes, and `codes`, what a struct has for that width: of_4, of_8 or
// of_16. One of the three members and statements is used, and the others disappear when the pipeline is built.
#define WITH_CODES(format, any, ...) \
    if (code_width(format) == 4) { \
        const int W = 4; \
        thread auto &codes = (any).of_4; \
        __VA_ARGS__; \
    } \
    if (code_width(format) == 8) { \
        const int W = 8; \
        thread auto &codes = (any).of_8; \
        __VA_ARGS__; \
    } \
    if (code_width(format) == 16) { \
        const int W = 16; \
        thread auto &codes = (any).of_16; \
        __VA_ARGS__; \
    }

// log2 of the number of centroids; 0 without a codebook.
inline uint codebook_bits(uint format) { return uint((ulong(0) TQKV__FORMATS(BOOK_FIELD, )) >> (4u * format)) & 15u; }

// F16 stores values, not codes: it has no norms.
inline bool has_norms(uint format) { return kind_of(format) != TQKV__HALF; }

// Codes are numbers of centroids; without a codebook they are integers of 8 bits.
inline bool has_codebook(uint format) { return kind_of(format) == TQKV__BOOK; }

template <int D>
inline uint row_bytes(uint format)
{
    return uint(D) * (main_bits(format) + upper_bits(format)) / 8u;
}

// Values that share one norm; D for halves, which have none.
template <int D>
inline uint norm_block(uint format)
{
    return uint(TQKV__NORM_DIM(kind_of(format), D));
}

// Factor of a decoded code, from its block's norm.
template <int D>
inline float code_scale(uint format, float norm, float block_scale)
{
    if (!has_codebook(format)) return norm;
    return norm_block<D>(format) == uint(D) ? norm * TQKV__INV_SQRT(D) : norm / block_scale;
}

// The first byte of a row's upper bits, behind its main bits.
template <int D>
inline uint upper_offset(uint format)
{
    return uint(D) * main_bits(format) / 8u;
}

// ---- Values to codes ----

// Whether look-ups in a table of this many bits are shuffles.
inline bool is_shuffled(uint bits) { return TQKV_CHEAP_SHUFFLE && bits <= 5u; }

// A barrier must follow.
inline void copy_table(constant float *source, uint n, threadgroup float *table, uint thread_index, uint n_threads)
{
    for (uint i = thread_index; i < n; i += n_threads) table[i] = source[i];
}

// A first guess narrows the codes of a value down to two, and one comparison with the boundary between them decides.
//
// Up to 4 bits the guess is a line: so near the boundaries that it is right or one too low.
inline bool guessed_by_line(uint bits) { return bits <= 4; }
inline float slope_of_line(uint bits) { return bits <= 2 ? 1.0f : bits == 3 ? 1.875f : 3.375f; }
inline float last_guess(uint bits) { return bits <= 2 ? 2.0f : bits == 3 ? 6.0f : 14.0f; }

// The guess is the lowest bits of this float: near 1.5 * 2^23 its unit is 1. 0 for NaN.
inline float guess_of(float v, uint bits)
{
    float last = last_guess(bits);
    return fma(saturate(fma(v, slope_of_line(bits) / last, 0.5f)), last, 12582912.0f);
}

// With more bits, cells of equal width divide the codebook's range. They are so narrow that none holds two boundaries.
// There are 2n+1 cells: cell i is centred on (i - n)/density. No boundary is near the edge of a cell.
template <class T>
inline T cells_per_side(uint bits)
{
    return bits == 5 ? T(25) : bits == 6 ? T(57) : T(194);
}
inline float cell_density(uint bits) { return bits == 5 ? 8.5f : bits == 6 ? 16.5f : 39.75f; }

// Offset of the cell of v, in bytes; of cell 0 for NaN. A float near 1.5 * 2^20 has units of 1/8 in its lowest bits. A
// cell has 8 bytes, so these bits are the offset and need no shift.
inline uint cell_of(float v, uint bits)
{
    float n = 2.0f * cells_per_side<float>(bits);
    float inside = saturate(fma(v, cell_density(bits) / n, 0.5f));
    return as_type<uint>(fma(inside, n, 1572864.5f)) & 0xff8u;
}

inline threadgroup uint2 *cell_at(threadgroup uint2 *cells, uint byte)
{
    return (threadgroup uint2 *)((threadgroup uchar *)cells + byte);
}

// Around a value whose code may be one of two neighbours: what decides between them, and their centroids.
struct crossing {
    float boundary, low, high;
};

// In threadgroup memory, behind the boundaries of a codebook of up to 4 bits: entry i for codes i - 1 and i. The first
// and the last code have no other beyond them.
inline threadgroup float4 *crossing_at(threadgroup uint2 *cells, uint i)
{
    return (threadgroup float4 *)cells + 4u + i;
}

// A barrier must follow.
inline void load_crossings(uint bits, threadgroup uint2 *cells, uint thread_index, uint n_threads)
{
    uint last = (1u << bits) - 1u;
    constant float *boundaries = TQKV__BOUNDARIES(bits), *centroids = TQKV__CODEBOOK(bits);
    for (uint i = thread_index; i <= last + 1u; i += n_threads) {
        float4 entry;
        entry.x = i == 0 ? -INFINITY : i > last ? INFINITY : boundaries[i - 1u];
        entry.y = centroids[max(i, 1u) - 1u];
        entry.z = centroids[min(i, last)];
        entry.w = 0.0f;
        *crossing_at(cells, i) = entry;
    }
}

// x of a cell: the bits of its boundary, or of the next boundary above it. y: the number of boundaries below that one.
// For guesses by a line all boundaries. A barrier must follow.
inline void load_cells(uint format, threadgroup uint2 *cells, uint thread_index, uint n_threads)
{
    uint bits = codebook_bits(format), n = (1u << bits) - 1u;
    if (bits == 0) return;
    constant float *boundaries = TQKV__BOUNDARIES(bits);
    if (guessed_by_line(bits)) {
        copy_table(boundaries, n, (threadgroup float *)cells, thread_index, n_threads);
        return;
    }
    for (uint i = thread_index; i <= n; i += n_threads) {
        uint first = i == 0 ? 0u : cell_of(boundaries[i - 1u], bits) + 8u;
        uint last = i == n ? 16u * cells_per_side<uint>(bits) : cell_of(boundaries[i], bits);
        uint2 cell;
        cell.x = as_type<uint>(i == n ? INFINITY : boundaries[i]);
        cell.y = i;
        for (uint c = first; c <= last; c += 8u) *cell_at(cells, c) = cell;
    }
}

// What quantise adds to a code: all its bits are above the code's. Whoever packs the code takes it away.
inline uint code_offset(uint bits) { return guessed_by_line(bits) ? 0x4b400000u : 0u; }

// What load_cells and load_codebook have made and, where shuffles are cheap, each lane's part of up to 32 numbers.
struct quantiser {
    threadgroup uint2 *cells;
    threadgroup const float *boundaries; // in their place
    threadgroup const float *centroids;
    float boundary, centroid; // of this lane
    crossing around;          // likewise, after open_crossings: the lane's number is that of the entry
};

// Call it after load_cells, load_codebook and a barrier.
inline quantiser open_quantiser(uint format, threadgroup uint2 *cells, threadgroup const float *centroids, uint lane)
{
    quantiser result = {cells, (threadgroup const float *)cells, centroids, 0.0f, 0.0f, {0.0f, 0.0f, 0.0f}};
    uint bits = codebook_bits(format), code = lane & ((1u << bits) - 1u);
    if (bits == 0 || !is_shuffled(bits)) return result;
    result.centroid = centroids[code];
    if (!guessed_by_line(bits)) return result;
    result.boundary = result.boundaries[min(code, (1u << bits) - 2u)];
    return result;
}

// The number of boundaries strictly below v, 0 for NaN, plus code_offset. All lanes of the simdgroup must come here
// together.
inline uint quantise(float v, uint bits, thread const quantiser &book)
{
    if (guessed_by_line(bits)) {
        float guess = guess_of(v, bits), boundary;
        if (is_shuffled(bits))
            boundary = simd_shuffle(book.boundary, TQKV_LANE_NUMBER(as_type<uint>(guess)));
        else
            boundary = book.boundaries[as_type<uint>(guess) & ((1u << bits) - 1u)];
        return as_type<uint>(guess + (boundary < v ? 1.0f : 0.0f));
    }
    uint2 cell = *cell_at(book.cells, cell_of(v, bits));
    return cell.y + (as_type<float>(cell.x) < v ? 1u : 0u);
}

// The centroid of a code as quantise returns it. All lanes of the simdgroup must come here together.
inline float centroid_of_code(uint code, uint bits, thread const quantiser &book)
{
    if (is_shuffled(bits)) return simd_shuffle(book.centroid, TQKV_LANE_NUMBER(code));
    return book.centroids[code & ((1u << bits) - 1u)];
}

// The centroid of a value's code. All lanes of the simdgroup must come here together.
inline float centroid_of_value(float v, uint bits, thread const quantiser &book)
{
    return centroid_of_code(quantise(v, bits, book), bits, book);
}

inline crossing crossing_of_entry(threadgroup const float4 *at)
{
    float4 entry = *at;
    crossing result = {entry.x, entry.y, entry.z};
    return result;
}

// Call it after load_crossings and a barrier.
inline void open_crossings(uint bits, uint lane, thread quantiser &book)
{
    if (is_shuffled(bits)) book.around = crossing_of_entry(crossing_at(book.cells, min(lane, 1u << bits)));
}

// The two codes that v, with a factor that makes it larger than v * factor but beyond one boundary at most, may have;
// for a codebook of up to 4 bits. All lanes of the simdgroup must come here together.
inline crossing crossing_of(float v, float factor, uint bits, thread const quantiser &book)
{
    uint code = quantise(v * factor, bits, book);
    uint i = as_type<uint>(as_type<float>(code) + (v > 0.0f ? 1.0f : 0.0f)); // away from 0
    if (is_shuffled(bits)) {
        crossing result = {simd_shuffle(book.around.boundary, TQKV_LANE_NUMBER(i)),
                           simd_shuffle(book.around.low, TQKV_LANE_NUMBER(i)),
                           simd_shuffle(book.around.high, TQKV_LANE_NUMBER(i))};
        return result;
    }
    return crossing_of_entry(crossing_at(book.cells, i & 31u));
}

// Round half to even, clamped to +-127. NaN, which only an overflow makes, becomes 127.
inline uint quantise_grid(float v)
{
    float q = rint(v);
    q = q < 127.0f ? q : 127.0f;
    q = q > -127.0f ? q : -127.0f;
    return uint(int(q)) & 255u;
}

// ---- Codes to values ----

// N neighbouring codes of a row as they are in memory. W is code_width(format).
template <int W, int N>
struct raw_codes {
    uint main[(W * N + 31) / 32];
    uint upper[(2 * N + 31) / 32];
};

// load_field where rows begin at even bytes: D=48 and D=80 with an odd number of bits.
template <int BITS, int N>
inline void load_field_by_halves(device const ushort *field, uint first, thread uint *words)
{
    const int n = BITS * N / 16;
    device const ushort *at = field + first * uint(BITS) / 16u;
    if (n == 0) words[0] = uint(at[0]) >> (first * uint(BITS) % 16u);
    TQKV_UNROLL
    for (int i = 0; i < n; i++) words[i / 2] = i % 2 == 0 ? uint(at[i]) : words[i / 2] | uint(at[i]) << 16;
}

// Loads BITS bits for each of N values, from value `first` on, a multiple of N. Fewer than 32 bits are shifted to the
// bottom of one word. Rows begin at multiples of `alignment` bytes: it decides how wide a load may be.
template <int BITS, int N>
inline void load_field(device const uint *field, uint first, uint alignment, thread uint *words)
{
    const int n = BITS * N / 32;
    if (alignment % 4u != 0) {
        load_field_by_halves<BITS, N>((device const ushort *)field, first, words);
        return;
    }
    device const uint *at = field + first * uint(BITS) / 32u;
    if (n == 0) {
        words[0] = at[0] >> (first * uint(BITS) % 32u);
    } else if (n % 4 == 0 && alignment % 16u == 0) {
        TQKV_UNROLL
        for (int i = 0; i < n / 4; i++) {
            uint4 four = ((device const uint4 *)at)[i];
            words[4 * i] = four.x;
            words[4 * i + 1] = four.y;
            words[4 * i + 2] = four.z;
            words[4 * i + 3] = four.w;
        }
    } else if (n % 2 == 0 && alignment % 8u == 0) {
        TQKV_UNROLL
        for (int i = 0; i < n / 2; i++) {
            uint2 two = ((device const uint2 *)at)[i];
            words[2 * i] = two.x;
            words[2 * i + 1] = two.y;
        }
    } else {
        TQKV_UNROLL
        for (int i = 0; i < n; i++) words[i] = at[i];
    }
}

template <int D, int W, int N>
inline void load_codes(uint format, device const uchar *row, uint first, thread raw_codes<W, N> &raw)
{
    uint alignment = row_bytes<D>(format);
    TQKV_UNROLL
    for (int i = 0; i < (2 * N + 31) / 32; i++) raw.upper[i] = 0;
    if (W == 4 && main_bits(format) == 2)
        load_field<2, N>((device const uint *)row, first, alignment, raw.main);
    else
        load_field<W, N>((device const uint *)row, first, alignment, raw.main);
    device const uint *upper = (device const uint *)(row + upper_offset<D>(format));
    if (W < 8 && upper_bits(format) == 1) load_field<1, N>(upper, first, alignment, raw.upper);
    if (W < 8 && upper_bits(format) == 2) load_field<2, N>(upper, first, alignment, raw.upper);
}

// A codebook in threadgroup memory. Constant memory serves one address at a time: in the innermost loop of attention,
// lanes that look up different codes would wait for each other. Where shuffles are cheap, each lane also holds one of
// up to 32 centroids.
struct codebook {
    float centroid; // of this lane
    threadgroup const float *table;
};

inline void load_codebook(uint format, threadgroup float *table, uint thread_index, uint n_threads)
{
    uint bits = codebook_bits(format);
    if (bits == 0) return;
    copy_table(TQKV__CODEBOOK(bits), 1u << bits, table, thread_index, n_threads);
}

// Call it after load_codebook and a barrier.
inline codebook open_codebook(uint format, threadgroup const float *table, uint lane)
{
    codebook book;
    uint bits = codebook_bits(format);
    book.centroid = bits != 0 && is_shuffled(bits) ? table[lane & ((1u << bits) - 1u)] : 0.0f;
    book.table = table;
    return book;
}

// Bit `from` of word at bit 0; if negative, bit 0 at bit -from.
inline uint shift_down(uint word, int from) { return from >= 0 ? word >> from : word << -from; }

// Code i of a format with a codebook. The bits above it are not cleared.
template <int W, int N>
inline uint code_at(uint format, thread const raw_codes<W, N> &raw, int i)
{
    bool pairs = W == 4 && main_bits(format) == 2;
    int main = pairs ? 2 : W;
    uint word = pairs ? raw.main[i / 16] : raw.main[i * W / 32], shift = uint(i * main % 32);
    uint code = word >> shift, main_mask = (1u << main) - 1u;
    if (W < 8 && upper_bits(format) == 1)
        code = (code & main_mask) | (shift_down(raw.upper[i / 32], i % 32 - main) & (1u << main));
    if (W < 8 && upper_bits(format) == 2)
        code = (code & main_mask) | (shift_down(raw.upper[i / 16], i % 16 * 2 - main) & (3u << main));
    return code;
}

// The centroid of a code; the bits above the code may be anything. All lanes of the simdgroup must come here together:
// it may shuffle.
inline float centroid_of(uint code, uint bits, thread const codebook &book)
{
    // The lanes repeat a codebook of fewer than 32 centroids: bits above the code may stay in the lane number.
    if (is_shuffled(bits)) return simd_shuffle(book.centroid, TQKV_LANE_NUMBER(code));
    return book.table[code & ((1u << bits) - 1u)];
}

// Value i of the raw codes, before its scale. All lanes of the simdgroup must come here together.
template <int W, int N>
inline float value_at(uint format, thread const raw_codes<W, N> &raw, int i, thread const codebook &book)
{
    uint word = raw.main[i * W / 32], shift = uint(i * W % 32);
    if (W == 16) return float(as_type<half>(ushort((word >> shift) & 0xffffu)));
    if (W == 8 && !has_codebook(format)) return TQKV_SIGNED_BYTE(word, i % 4);
    return centroid_of(code_at<W, N>(format, raw, i), codebook_bits(format), book);
}

// The codes of four values in the bytes of a word: of values i, i+2, i+4 and i+6 of a format with 4 main bits and some
// upper bits. i: a multiple of 8, or one more. The bits above a code are not cleared.
template <int W, int N>
inline uint every_second_code(uint format, thread const raw_codes<W, N> &raw, int i)
{
    int odd = i % 2;
    uint main = raw.main[i * W / 32] >> (4 * odd), upper;
    if (upper_bits(format) == 1) {
        // Bit 2k moves up by 6k + 4. The product has other bits, too, and carries: they end elsewhere.
        upper = (raw.upper[i / 32] >> (i % 32 / 8 * 8)) & (odd ? 0xaau : 0x55u);
        upper *= odd ? 0x00208208u : 0x00410410u;
    } else {
        // Bits 4k and 4k+1 move up by 4k + 4: two of four pairs by 8, then every second one by 4 more.
        upper = (raw.upper[i / 16] >> (i % 16 / 8 * 16)) & (odd ? 0xccccu : 0x3333u);
        upper = (upper | upper << 8) & (odd ? 0x00cc00ccu : 0x00330033u);
        upper *= odd ? 0x44u : 0x110u;
    }
    return (main & 0x0f0f0f0fu) | (upper & 0xf0f0f0f0u);
}

// M values from value i on, a multiple of M, which is 2, 4 or 8.
template <int W, int N, int M>
inline void values_at(uint format, thread const raw_codes<W, N> &raw, int i, thread const codebook &book,
                      thread float *x)
{
    if (M > 2 && W == 4 && main_bits(format) == 4 && upper_bits(format) != 0) {
        // Each word is computed once, by name: else the compiler moves the shift below into it, four times.
        uint even = every_second_code<W, N>(format, raw, i / 8 * 8);
        uint odd = every_second_code<W, N>(format, raw, i / 8 * 8 + 1);
        TQKV_UNROLL
        for (int k = 0; k < M; k++)
            x[k] = centroid_of((k % 2 ? odd : even) >> ((i + k) % 8 / 2 * 8), codebook_bits(format), book);
        return;
    }
    TQKV_UNROLL
    for (int k = 0; k < M; k++) x[k] = value_at<W, N>(format, raw, i + k, book);
}

#endif

// Products of 8x8 matrices that are spread over a simdgroup. Each lane has two elements of a matrix, side by side in
// one row: TQKV__MATRIX_ROW and TQKV__MATRIX_COLUMN of tqkv.h say which.
//
// Letters: a product adds left * right to sums. Its left factor is made of codes, its right one of floats.
#ifndef TQKV_FRAGMENTS_H
#define TQKV_FRAGMENTS_H
#include "codec.h"

// A shim for hardware without products of floats defines these itself: sums, factors, where elements of a right one
// lie, and whether both codes of a byte are looked up at once.
#ifndef TQKV_STORED_RIGHTS
#define TQKV_STORED_RIGHTS false
#endif
#ifndef TQKV_SHIM_FACTORS
#define TQKV_SHIM_PAIRS false

// A lane's part of a matrix of sums. Matrices of Metal are made of it where they are multiplied and nowhere else: they
// need not lie in arrays then.
struct sum_matrix {
    float elements[2];
};

inline void clear_matrix(thread sum_matrix &m) { m.elements[0] = m.elements[1] = 0.0f; }

typedef float2 left_part;  // a lane's two elements of a left factor
typedef float4 right_pair; // and of two right factors
typedef float code_value;  // the value of a code, before two of them become a left_part
#define TQKV_RIGHT_ROW(lane, i)    TQKV__MATRIX_ROW(lane)
#define TQKV_RIGHT_COLUMN(lane, i) (TQKV__MATRIX_COLUMN(lane) + uint(i))

inline float2 part_of(float x, float y)
{
    float2 part;
    part.x = x;
    part.y = y;
    return part;
}

// `wide`, here and below: the right factor of the product may have any size. If not, its numbers are at most 2^12.
inline code_value code_value_of(float x, bool) { return x; }
inline left_part left_of_values(code_value x, code_value y, bool) { return part_of(x, y); }

// Bytes i and i + 1 of a word, with signs; bytes i of two words.
inline left_part left_of_bytes(uint word, int i, bool)
{
    return part_of(TQKV_SIGNED_BYTE(word, i), TQKV_SIGNED_BYTE(word, i + 1));
}
inline left_part left_of_bytes(uint a, uint b, int i, bool)
{
    return part_of(TQKV_SIGNED_BYTE(a, i), TQKV_SIGNED_BYTE(b, i));
}

// Only shims have pairs. `pairs`: their table
inline void load_pairs(threadgroup const code_value *, bool, uint, uint, threadgroup uchar *) {}
inline left_part left_of_pair(uint, int, bool, int, uint, threadgroup const uchar *) { return part_of(0.0f, 0.0f); }

// Half i of word a and half k of word b.
inline left_part left_of_halves(uint a, int i, uint b, int k)
{
    return part_of(float(as_type<half>(ushort(a >> (16 * i) & 0xffffu))),
                   float(as_type<half>(ushort(b >> (16 * k) & 0xffffu))));
}

// Elements 0 and 1 of the first and of the second factor.
inline right_pair right_of(float x0, float x1, float y0, float y1, bool)
{
    right_pair pair;
    pair.x = x0;
    pair.y = x1;
    pair.z = y0;
    pair.w = y1;
    return pair;
}

// Elements k and k + 1 of column c of a right factor: of the first or the second of the pairs at `pairs`, one a lane.
inline void store_right(threadgroup right_pair *pairs, uint k, uint c, uint second, float x, float y)
{
    uint lane = (k >> 2) << 4 | (k & 3u) << 1 | (c >> 2) << 3 | (c >> 1 & 1u), at = second * 2u + (c & 1u);
    threadgroup float *own = (threadgroup float *)(pairs + lane);
    own[at] = x;
    own[8u + at] = y; // two lanes on
}

// The elements of two matrices of sums as those of right factors.
inline right_pair right_of_sums(float x0, float x1, float y0, float y1, bool wide)
{
    return right_of(x0, x1, y0, y1, wide);
}

inline simdgroup_matrix<float, 8, 8> matrix_of(float x, float y)
{
    simdgroup_matrix<float, 8, 8> m;
    m.thread_elements()[0] = x;
    m.thread_elements()[1] = y;
    return m;
}

inline void multiply_one(left_part left, float x, float y, thread sum_matrix &sum)
{
    simdgroup_matrix<float, 8, 8> m = matrix_of(sum.elements[0], sum.elements[1]);
    simdgroup_multiply_accumulate(m, matrix_of(left.x, left.y), matrix_of(x, y), m);
    sum.elements[0] = m.thread_elements()[0];
    sum.elements[1] = m.thread_elements()[1];
}

// Four left factors: parts[i][r] is multiplied by right factor i of a pair and added to sum r.
struct left_block {
    left_part parts[2][2];
};

// G blocks by F pairs of right factors: sums[2 * g + r][f] += left[g].parts[0][r] * first factor of right[f], and
// likewise the second. `exact`: the left factors hold small integers or halves. `pairs`: they are of pairs of codes.
template <int G, int F>
inline void multiply(thread const left_block (&left)[G], thread const right_pair (&right)[F], bool, bool, bool,
                     thread sum_matrix (*sums)[F])
{
    TQKV_UNROLL
    for (int i = 0; i < 2; i++) {
        TQKV_UNROLL
        for (int m = 0; m < 2 * G * F; m++) {
            int row = m / F, f = m % F;
            multiply_one(left[row / 2].parts[i][row % 2], i == 0 ? right[f].x : right[f].z,
                         i == 0 ? right[f].y : right[f].w, sums[row][f]);
        }
    }
}

// Right factors in threadgroup memory, a pair of them in 32 right_pairs: where TQKV_STORED_RIGHTS, a shim multiplies by
// them there. publish_rights comes before the barrier. Those of neighbouring columns lie `step` pairs of factors apart.
// The sums are ready after finish_products.
inline void store_right(threadgroup right_pair *to, uint lane, right_pair x) { to[lane] = x; }
inline void publish_rights() {}

template <int G, int F>
inline void multiply_stored(thread const left_block (&left)[G], threadgroup const right_pair *right, uint step,
                            uint lane, bool wide, bool exact, bool pairs, thread sum_matrix (*sums)[F])
{
    right_pair own[F];
    TQKV_UNROLL
    for (int f = 0; f < F; f++) own[f] = right[uint(f) * step * 32u + lane];
    multiply<G, F>(left, own, wide, exact, pairs, sums);
}

template <int F>
inline void finish_products(thread sum_matrix (*)[F], int)
{
}
#endif

// The sum or maximum of a number over the lanes that have the same columns of a matrix. Every lane gets it.
inline float sum_of_column(float x)
{
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2)
        if (TQKV__MATRIX_ROW(distance) != 0) x += simd_shuffle_xor(x, ushort(distance));
    return x;
}

inline float max_of_column(float x)
{
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2)
        if (TQKV__MATRIX_ROW(distance) != 0) x = max(x, simd_shuffle_xor(x, ushort(distance)));
    return x;
}

// ---- Codes as left factors ----

// Whether neighbouring codes are looked up as a pair: fields of 4 bits and nothing else.
inline bool has_pairs(uint format)
{
    return TQKV_SHIM_PAIRS && has_codebook(format) && main_bits(format) == 4 && upper_bits(format) == 0;
}

// A codebook as codec.h has it, of values that are ready for a product.
struct value_book {
    code_value own; // of this lane
    threadgroup const code_value *table;
    threadgroup const uchar *pairs; // if it has any
    uint lane;
};

// A barrier must follow.
inline void load_value_book(uint format, bool wide, threadgroup code_value *table, uint thread_index, uint n_threads)
{
    uint bits = codebook_bits(format);
    if (bits == 0) return;
    constant float *centroids = TQKV__CODEBOOK(bits);
    for (uint i = thread_index; i < 1u << bits; i += n_threads) table[i] = code_value_of(centroids[i], wide);
}

inline value_book open_value_book(uint format, threadgroup const code_value *table, threadgroup const uchar *pairs,
                                  uint lane)
{
    value_book book;
    uint bits = codebook_bits(format);
    book.own = bits != 0 && is_shuffled(bits) ? table[lane & ((1u << bits) - 1u)] : code_value(0);
    book.table = table;
    book.pairs = pairs;
    book.lane = lane;
    return book;
}

template <int W, int N>
inline code_value book_value_at(uint format, thread const raw_codes<W, N> &raw, int i, thread const value_book &book)
{
    uint bits = codebook_bits(format), code = code_at<W, N>(format, raw, i);
    if (is_shuffled(bits)) return simd_shuffle(book.own, TQKV_LANE_NUMBER(code));
    return book.table[code & ((1u << bits) - 1u)];
}

// Values i and i + 1, i even, before their scales, for products with F right factors. All lanes of the simdgroup must
// come here together.
template <int W, int N, int F>
inline left_part left_of_neighbours(uint format, thread const raw_codes<W, N> &raw, int i, bool wide,
                                    thread const value_book &book)
{
    if (has_pairs(format)) return left_of_pair(raw.main[i * W / 32], i / 2 % 4, wide, F, book.lane, book.pairs);
    if (W == 16) return left_of_halves(raw.main[i / 2], 0, raw.main[i / 2], 1);
    if (W == 8 && !has_codebook(format)) return left_of_bytes(raw.main[i / 4], i % 4, wide);
    code_value x = book_value_at<W, N>(format, raw, i, book);
    return left_of_values(x, book_value_at<W, N>(format, raw, i + 1, book), wide);
}

// Values i of two rows, likewise.
template <int W, int N>
inline left_part left_of_rows(uint format, thread const raw_codes<W, N> &a, thread const raw_codes<W, N> &b, int i,
                              bool wide, thread const value_book &book)
{
    if (W == 16) return left_of_halves(a.main[i / 2], i % 2, b.main[i / 2], i % 2);
    if (W == 8 && !has_codebook(format)) return left_of_bytes(a.main[i / 4], b.main[i / 4], i % 4, wide);
    code_value x = book_value_at<W, N>(format, a, i, book);
    return left_of_values(x, book_value_at<W, N>(format, b, i, book), wide);
}

#endif

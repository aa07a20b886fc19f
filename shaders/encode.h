// Encoding: a simdgroup takes 32/L rows at a time, with L lanes a row. The order of every rounded operation is that of
// tqkv_encode, so codes and norms are the same bytes.
//
// A row lies over its lanes in pieces. With D = 128 a row has 8 lanes, a lane 4 pieces, a piece 4 values:
//
//             lane 0     lane 1     lane 2     lane 3     lane 4     ..  lane 7
//   piece 0   0 .. 3     4 .. 7     8 .. 11    12 .. 15   16 .. 19   ..  28 .. 31
//   piece 1   32 .. 35   36 .. 39   40 .. 43   44 .. 47   48 .. 51   ..  60 .. 63
//   piece 2   64 .. 67   68 .. 71   72 .. 75   76 .. 79   80 .. 83   ..  92 .. 95
//   piece 3   96 .. 99   100 ..     104 ..     108 ..     112 ..     ..  124 .. 127
//
// Sums take every 16th value, in order, from each of the first 16. The rotation leaves a row *strided*: a lane has all
// values of its sums. Lanes 0 and 4 have traded: values 0, 1, 16, 17, 32, 33 .. are in lane 0, and 2, 3, 18, 19, 34 ..
// in lane 4. Value n of a lane belongs to sum n % S of those that the lane has, S = 16/L or 1. Of rows with a matrix,
// the rotation has one value of each subrow in a lane, and they are strided as they are. Codes are found in strided
// rows and put back into pieces, which lie dense in memory.
//
// Letters: L lanes of a row, J pieces of a lane, C values of a piece, N values of a lane, S sums of a lane, T values of
// each sum, B blocks with a norm in a lane.
#ifndef TQKV_ENCODE_H
#define TQKV_ENCODE_H
#include "codec.h"
#include "rotate.h"

inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }

// A lane takes 16 values, or 32 from head_dim 256 on: most stages of the transform then stay in the lane. In pieces of
// four values the loads are dense. With a matrix a piece is all that threadgroup memory gives a lane after the
// rotation.
#define ENCODE_LANES(D)  (TQKV__HAS_MATRIX(D) ? TQKV__ROW_LANES(D) : (D) <= 128 ? (D) / 16 : (D) / 32)
#define ENCODE_PIECE(D)  (TQKV__HAS_MATRIX(D) ? TQKV__MATRIX_ORDER(D) : 4)
#define ENCODE_VALUES(D) ((D) / ENCODE_LANES(D))
#define ENCODE_PIECES(D) TQKV_PIECES(D, ENCODE_LANES(D), ENCODE_PIECE(D))
#define ROTATED_PIECE(D) (TQKV__HAS_MATRIX(D) ? 1 : ENCODE_PIECE(D))

// Whether a lane has registers for its part of the next row, and of the centre, besides that of a row.
#define HOLDS_ROWS(D) (ENCODE_VALUES(D) <= 20)

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

// Whether halves, which are kept besides codes, do not hold a row that is ready for them: tqkv_cache_append refuses
// such rows. All lanes of the row come here.
template <int D>
inline bool beyond_halves(bool centered, thread const float *x)
{
    const uint BEYOND = 1, ENOUGH = 2, ANY = 4;
    uint found = centered ? ENOUGH : 0u;
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i++) {
        float size = fabs(x[i]);
        found |= (size < TQKV__BEYOND_HALVES ? 0u : BEYOND) | (size >= TQKV__LEAST_HALF ? ENOUGH : 0u) |
                 (size > 0.0f ? ANY : 0u);
    }
    TQKV_UNROLL
    for (int distance = 1; distance < ENCODE_LANES(D); distance *= 2)
        found |= simd_shuffle_xor(found, ushort(distance));
    return (found & BEYOND) != 0 || (found & (ENOUGH | ANY)) == ANY;
}

// ---- Norms ----

// Values that share a norm: of formats with a codebook, where it is a root of squares, and of the 8-bit grid, where it
// is a maximum.
#define NORM_BLOCK(D)    TQKV__NORM_DIM(TQKV__BOOK, D)
#define MAXIMUM_BLOCK(D) TQKV__NORM_DIM(TQKV__GRID, D)

// Strided rows: sums of a lane, values of each, and blocks of which the lane has such sums.
#define ENCODE_SUMS(D) (ENCODE_LANES(D) < 16 ? 16 / ENCODE_LANES(D) : 1)
#define SUM_VALUES(D)  (NORM_BLOCK(D) / 16)
#define LANE_BLOCKS(D) (ENCODE_VALUES(D) / (ENCODE_SUMS(D) * SUM_VALUES(D)))

// Which value of the lane is number t of sum s of block b. Lanes of D=1024 trade once more after the rotation, 16
// apart.
template <int D>
inline int value_of_sum(int b, int t, int s)
{
    const int order = ENCODE_LANES(D) == 32 ? (t & 3) | (t & 4) << 1 | (t & 8) >> 1 : t;
    return (b * SUM_VALUES(D) + order) * ENCODE_SUMS(D) + s;
}

// Trades from pieces to a strided row. Only D=1024 has the last one; in place_values all of them are undone.
template <int D, class T>
inline void trade_last(thread T *x, uint lane)
{
    if (ENCODE_LANES(D) == 32) trade_values<ENCODE_VALUES(D)>(x, lane, 16u, 8);
}

template <int D, class T>
inline void trade_all(thread T *x, uint lane)
{
    const int L = ENCODE_LANES(D);
    TQKV_UNROLL
    for (uint distance = 4; distance < 16u && distance < uint(L); distance *= 2)
        trade_values<ENCODE_VALUES(D)>(x, lane, distance, traded_bit<L>(distance));
    trade_last<D>(x, lane);
}

// The distance of the lanes that have sums `apart` of each other, 0 if a lane has both.
template <int D>
inline uint lanes_apart(int apart)
{
    const int L = ENCODE_LANES(D);
    if (TQKV__HAS_MATRIX(D)) return apart < L ? uint(apart) : 0u;
    if (apart >= 4) return apart == 4 ? 1u : L > 2 ? 2u : 0u;
    return L >= 16 ? uint(4 * apart) : L == 8 && apart == 2 ? 4u : 0u;
}

// Adds 16 sums by halves, those that are 8, 4, 2 and 1 apart: all lanes of the row have the result.
template <int D>
inline float add_sums(thread float *sums)
{
    int n = ENCODE_SUMS(D);
    TQKV_UNROLL
    for (int apart = 8; apart >= 1; apart /= 2) {
        uint distance = lanes_apart<D>(apart);
        if (distance == 0) n /= 2;
        TQKV_UNROLL
        for (int s = 0; s < ENCODE_SUMS(D); s++)
            if (s < n) sums[s] = sums[s] + (distance == 0 ? sums[s + n] : simd_shuffle_xor(sums[s], ushort(distance)));
    }
    return sums[0];
}

// The sum of the squares of block b of a strided row.
template <int D>
inline float sum_of_squares(int b, thread const float *x)
{
    float sums[ENCODE_SUMS(D)];
    TQKV_UNROLL
    for (int s = 0; s < ENCODE_SUMS(D); s++) {
        sums[s] = 0.0f;
        TQKV_UNROLL
        for (int t = 0; t < SUM_VALUES(D); t++) {
            float v = x[value_of_sum<D>(b, t, s)];
            sums[s] = sums[s] + v * v;
        }
    }
    return add_sums<D>(sums);
}

// The length of a block of that sum of squares or, if the row has several, its root mean square.
template <int D>
inline float block_length(float squares)
{
    return precise::sqrt(NORM_BLOCK(D) == D ? squares : squares / float(NORM_BLOCK(D)));
}

// Lanes that share the block of a maximum, and such blocks of a lane.
#define MAXIMUM_LANES(D) \
    (MAXIMUM_BLOCK(D) > ENCODE_LANES(D) * ENCODE_PIECE(D) ? ENCODE_LANES(D) : MAXIMUM_BLOCK(D) / ENCODE_PIECE(D))
#define MAXIMUM_BLOCKS(D) (D / ENCODE_LANES(D) * MAXIMUM_LANES(D) / MAXIMUM_BLOCK(D))

// The largest magnitude in block b of a row in pieces.
template <int D>
inline float block_maximum(int b, thread const float *x)
{
    const int N = ENCODE_VALUES(D) / MAXIMUM_BLOCKS(D);
    float largest = 0.0f;
    TQKV_UNROLL
    for (int i = 0; i < N; i++) largest = fmax(largest, fabs(x[b * N + i]));
    TQKV_UNROLL
    for (int distance = 1; distance < MAXIMUM_LANES(D); distance *= 2)
        largest = fmax(largest, simd_shuffle_xor(largest, ushort(distance)));
    return largest;
}

// Scales the lane's values to units of the codebook, in a strided row, or of the grid, in pieces. norms: of the lane's
// blocks; a format without norms has none
template <int D>
inline void normalise(uint format, float block_scale, thread float *x, thread float *norms)
{
    const int B = LANE_BLOCKS(D), M = MAXIMUM_BLOCKS(D);
    if (!has_norms(format)) return;
    if (has_codebook(format)) {
        TQKV_UNROLL
        for (int b = 0; b < B; b++) {
            norms[b] = block_length<D>(sum_of_squares<D>(b, x));
            float inverse = norms[b] > TQKV__MIN_NORM ? 1.0f / norms[b] : 0.0f;
            scale_values<ENCODE_VALUES(D) / B>(x + b * (ENCODE_VALUES(D) / B),
                                               inverse * (NORM_BLOCK(D) == D ? TQKV__SQRT(D) : block_scale));
        }
        return;
    }
    TQKV_UNROLL
    for (int b = 0; b < M; b++) {
        float largest = block_maximum<D>(b, x);
        bool zero = !(largest > TQKV__MIN_NORM);
        scale_values<ENCODE_VALUES(D) / M>(x + b * (ENCODE_VALUES(D) / M), zero ? 0.0f : 127.0f / largest);
        norms[b] = zero ? 0.0f : largest / 127.0f;
    }
}

// Quantising shortens a row by its error. The stored norm makes the decoded row as long as the row was. squares: the
// sum of those of the block's centroids
template <int D>
inline float corrected_norm(float block_scale, float squares, float norm)
{
    float factor = (NORM_BLOCK(D) == D ? TQKV__SQRT(D) : block_scale) / block_length<D>(squares);
    norm = norm <= TQKV__MIN_NORM ? 0.0f : norm * factor;
    // The rotation may overflow to NaN. Which of all NaNs differs between machines: store always the same.
    return (as_type<uint>(norm) & 0x7fffffffu) > 0x7f800000u ? as_type<float>(0x7fc00000u) : norm;
}

// Stores the norms of a lane's B blocks, of which SHARED lanes have the same. norms: of the lane, to: of the row
template <int B, int SHARED>
inline void store_blocks(thread const float *norms, uint lane, uint n_lanes, device float *to)
{
    TQKV_UNROLL
    for (int b = 0; b < B; b++)
        if (lane % uint(SHARED) == 0) to[uint(b) * (n_lanes / uint(SHARED)) + lane / uint(SHARED)] = norms[b];
}

// ---- Codes ----

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

// The rows of a simdgroup: TQKV__ENCODE_ROWS(D) tokens of one head, whose centre and scales it loads once. Neighbouring
// simdgroups have neighbouring heads.
struct encode_range {
    uint head, begin, end; // tokens
};

template <int D>
inline encode_range range_of_simdgroup(constant tqkv__rows_args &args, uint number)
{
    const uint each = uint(TQKV__ENCODE_ROWS(D));
    encode_range range;
    range.head = number % uint(args.n_kv_heads);
    range.begin = number / uint(args.n_kv_heads) * each;
    range.end = min(range.begin + each, uint(args.n_tokens));
    return range;
}

// The row that a lane encodes, and the lane's number among the lanes of the row.
struct encode_place {
    uint lane, token;
    bool exists; // the row
};

// The number of one of L lanes, its lowest bit moved to the top. Of four lanes by a table, 0, 2, 1, 3: of shifts LLVM
// makes a reversal of two bits, which the builder of the library refuses.
template <int L>
inline uint lowest_bit_up(uint lane)
{
    return L == 4 ? 0xd8u >> lane * 2u & 3u : (lane & 1u) * uint(L / 2) + lane / 2u;
}

// Stores the lower 16 bits of each word, those of a piece, 32 bits at a time: of two pieces a lane has one from its
// neighbour and gives away the other.
template <int D>
inline void store_pairs(thread uint *words, thread const encode_place &at, device uchar *field)
{
    const int J = ENCODE_PIECES(D);
    uint odd = at.lane & 1u;
    TQKV_UNROLL
    for (int j = 0; j + 1 < J; j += 2) {
        uint own = (words[j] & 0xffffu) | words[j + 1] << 16, other = simd_shuffle_xor(own, ushort(1));
        words[j] = odd ? other >> 16 | (own & 0xffff0000u) : (own & 0xffffu) | other << 16;
    }
    if (!at.exists) return;
    TQKV_UNROLL
    for (int j = 0; j + 1 < J; j += 2)
        ((device uint *)field)[uint(j * ENCODE_LANES(D) / 2) + lowest_bit_up<ENCODE_LANES(D)>(at.lane)] = words[j];
}

// Packs BITS bits, from bit `low` on, of each code into a field of the row. whole: the codes have no other bits but
// those of `offset` above them, so nothing is masked.
template <int D, int BITS>
inline void store_field(thread const uint *codes, uint low, bool whole, uint offset, thread const encode_place &at,
                        device uchar *field)
{
    const int C = ENCODE_PIECE(D), J = ENCODE_PIECES(D), N = C * BITS, STORED = N % 8 == 0 ? N : 2 * N;
    const int WORDS = (STORED + 31) / 32;
    bool stores = at.exists;
    uint words[J * WORDS];
    TQKV_UNROLL
    for (int i = 0; i < J * WORDS; i++) words[i] = 0;
    TQKV_UNROLL
    for (int i = 0; i < J * C; i++) {
        uint code = whole ? codes[i] - offset : (codes[i] >> low) & ((1u << BITS) - 1u);
        words[i / C * WORDS + i % C * BITS / 32] += code << (i % C * BITS % 32);
    }
    if (STORED > N) { // half a byte is left, or all there is: the next lane has the other half
        TQKV_UNROLL
        for (int j = 0; j < J; j++) {
            uint other = simd_shuffle_xor(words[j * WORDS], ushort(1));
            words[j * WORDS] |= other << (N % 32);
            if (STORED > 32) words[j * WORDS + STORED / 32] = other >> (-N & 31);
        }
        stores = stores && (at.lane & 1u) == 0;
    }
    if (STORED == 16 && J % 2 == 0) {
        store_pairs<D>(words, at, field);
        return;
    }
    if (!stores) return;
    TQKV_UNROLL
    for (int j = 0; j < J; j++) {
        uint first = (uint(j * ENCODE_LANES(D)) + at.lane) * uint(C);
        store_bits<STORED>(field + first * uint(BITS) / 8u, words + j * WORDS);
    }
}

// Where the codes go, and what finds them.
struct encode_target {
    device uchar *codes; // [n_kv_heads][capacity][row_bytes]
    device float *norms; // [n_kv_heads][capacity][norms of a row]
    quantiser book;
    bool paged;
    device const int *pages; // [n_pages]
};

// Halves of the lane's values.
template <int D>
inline void store_halves(thread const encode_place &at, thread const float *x, device uchar *row)
{
    const int C = ENCODE_PIECE(D);
    if (!at.exists) return;
    TQKV_UNROLL
    for (int j = 0; j < ENCODE_PIECES(D); j++) {
        uint words[C / 2];
        TQKV_UNROLL
        for (int i = 0; i < C / 2; i++) words[i] = half_bits(x[j * C + 2 * i]) | half_bits(x[j * C + 2 * i + 1]) << 16;
        store_bits<16 * C>(row + (uint(j * ENCODE_LANES(D)) + at.lane) * uint(2 * C), words);
    }
}

// Sums over a block of a strided row: of the squares of the codes' centroids, and of value times centroid.
struct block_fit {
    float squares, products;
};

// Those of the codes that block b has under a factor. All lanes come here together.
template <int D>
inline block_fit fit_of(uint bits, float factor, thread const quantiser &book, int b, thread const float *x)
{
    float squares[ENCODE_SUMS(D)], products[ENCODE_SUMS(D)];
    TQKV_UNROLL
    for (int s = 0; s < ENCODE_SUMS(D); s++) {
        squares[s] = products[s] = 0.0f;
        TQKV_UNROLL
        for (int t = 0; t < SUM_VALUES(D); t++) {
            float v = x[value_of_sum<D>(b, t, s)], centroid = centroid_of_value(v * factor, bits, book);
            squares[s] = squares[s] + centroid * centroid;
            products[s] = products[s] + v * centroid;
        }
    }
    block_fit fit;
    fit.squares = add_sums<D>(squares);
    fit.products = add_sums<D>(products);
    return fit;
}

// Whether sums in another order, which take fewer instructions, show first which factors may be the best. With more
// bits look-ups take most of the time, and factors are so close to each other that few are ruled out. With many values
// a lane the loop is too long.
template <int D>
inline bool tries_roughly(uint bits)
{
    return (bits == 3 || bits == 4) && HOLDS_ROWS(D);
}

// After load_cells. A barrier must follow.
template <int D>
inline void load_crossings(uint format, threadgroup uint2 *cells, uint thread_index, uint n_threads)
{
    uint bits = codebook_bits(format);
    if (tries_roughly<D>(bits)) load_crossings(bits, cells, thread_index, n_threads);
}

// Call it after load_cells, load_codebook, load_crossings and a barrier.
template <int D>
inline quantiser open_encoder(uint format, threadgroup uint2 *cells, threadgroup const float *centroids, uint lane)
{
    quantiser book = open_quantiser(format, cells, centroids, lane);
    if (tries_roughly<D>(codebook_bits(format))) open_crossings(codebook_bits(format), lane, book);
    return book;
}

// Both sums of all lanes for a factor, as they come out of fused additions.
struct rough_fit {
    float squares[TQKV__MOST_FACTORS], products[TQKV__MOST_FACTORS];
};

template <int D>
inline void add_rough_fits(uint bits, thread const quantiser &book, thread const float *x, thread rough_fit &fit)
{
    constant float *factors = TQKV__FACTORS(bits);
    TQKV_UNROLL
    for (int f = 0; f < TQKV__MOST_FACTORS; f++) fit.squares[f] = fit.products[f] = 0.0f;
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i++) {
        crossing around = crossing_of(x[i], TQKV__LEAST_CROSSING(bits), bits, book);
        TQKV_UNROLL
        for (int f = 0; f < TQKV__MOST_FACTORS; f++) {
            float v = x[i] * factors[f], centroid;
            if (factors[f] >= TQKV__LEAST_CROSSING(bits))
                centroid = around.boundary < v ? around.high : around.low;
            else
                centroid = centroid_of_value(v, bits, book);
            fit.squares[f] = fma(centroid, centroid, fit.squares[f]);
            fit.products[f] = fma(x[i], centroid, fit.products[f]);
        }
    }
    TQKV_UNROLL
    for (int f = 0; f < TQKV__MOST_FACTORS; f++) {
        TQKV_UNROLL
        for (int distance = 1; distance < ENCODE_LANES(D); distance *= 2) {
            fit.squares[f] += simd_shuffle_xor(fit.squares[f], ushort(distance));
            fit.products[f] += simd_shuffle_xor(fit.products[f], ushort(distance));
        }
    }
}

// By how much, in units of 2^-24, rough sums and those of the format may together mistake the shares of two factors.
// All terms are positive, so each sum errs by as many units as a term is rounded, and a share is a square by a sum.
#define ROUGH_UNITS(D) (6 * (ENCODE_VALUES(D) + SUM_VALUES(D) + 10) + 16)

// Bit f: factor f may be the best.
template <int D>
inline uint possible_factors(uint bits, thread const quantiser &book, thread const float *x)
{
    const float least = 1.0f - float(ROUGH_UNITS(D)) / 16777216.0f;
    rough_fit fit;
    add_rough_fits<D>(bits, book, x, fit);
    float square = fit.products[0] * fit.products[0], squares = fit.squares[0]; // of the best
    TQKV_UNROLL
    for (int f = 1; f < TQKV__MOST_FACTORS; f++) {
        float own = fit.products[f] * fit.products[f];
        bool better = own * squares > square * fit.squares[f];
        square = better ? own : square;
        squares = better ? fit.squares[f] : squares;
    }
    bool ordinary = square > 1e-15f && square < 1e15f; // no product of these overflows, and none is of denormal numbers
    uint possible = 0;
    TQKV_UNROLL
    for (int f = 0; f < TQKV__MOST_FACTORS; f++) {
        bool worse = fit.products[f] * fit.products[f] * squares < square * least * fit.squares[f];
        possible |= ordinary && worse ? 0u : 1u << f;
    }
    return possible;
}

// Of the format's factors the one whose codes fit block b best: the part of the block's length that lies along them is
// the largest. The first of equal ones, and the first of all if there is a NaN. squares: of the best codes, unless
// factors are tried roughly
template <int D>
inline float best_factor(uint bits, thread const quantiser &book, int b, thread const float *x, thread float &squares)
{
    constant float *factors = TQKV__FACTORS(bits);
    uint possible = (1u << TQKV__N_FACTORS(bits)) - 1u;
    float best = factors[0], most = 0.0f;
    bool began = false;
    if (tries_roughly<D>(bits)) {
        possible = possible_factors<D>(bits, book, x);
        bool several = true;
        TQKV_UNROLL
        for (int f = 0; f < TQKV__MOST_FACTORS; f++) {
            bool alone = possible == 1u << f;
            best = alone ? factors[f] : best;
            several = several && !alone;
        }
        possible = several ? possible : 0u; // of one there is nothing to try
    }
    for (uint i = 0; i < uint(TQKV__N_FACTORS(bits)); i++) {
        bool own = (possible >> i & 1u) != 0;
        float factor = factors[i];
        if (tries_roughly<D>(bits) && !simd_any(own)) continue;
        block_fit fit = fit_of<D>(bits, factor, book, b, x);
        float share = fit.products * fit.products / fit.squares;
        bool better = own && (!began || share > most);
        best = better ? factor : best;
        most = better ? share : most;
        squares = better ? fit.squares : squares;
        began = began || own;
    }
    return best;
}

// The codes of a strided row with a codebook, and the sums of the squares of their centroids, one a block of the lane.
// All lanes come here together.
template <int D>
inline void find_codes(uint bits, thread const quantiser &book, thread float *x, thread uint *codes,
                       thread float *squares)
{
    const int B = LANE_BLOCKS(D), N = ENCODE_VALUES(D) / B;
    bool searches = TQKV__N_FACTORS(bits) > 1; // else the one factor is 1
    TQKV_UNROLL
    for (int b = 0; b < B; b++) {
        if (searches) scale_values<N>(x + b * N, best_factor<D>(bits, book, b, x, squares[b]));
        TQKV_UNROLL
        for (int i = b * N; i < (b + 1) * N; i++) codes[i] = quantise(x[i], bits, book);
        if (searches && !tries_roughly<D>(bits)) continue;
        float centroids[ENCODE_VALUES(D)];
        TQKV_UNROLL
        for (int i = b * N; i < (b + 1) * N; i++) centroids[i] = centroid_of_code(codes[i], bits, book);
        squares[b] = sum_of_squares<D>(b, centroids);
    }
}

// Stores the codes of a row in pieces. All lanes come here together; those whose row does not exist store nothing.
// row: in the store
template <int D>
inline void store_codes(uint format, thread const encode_place &at, thread const uint *codes, device uchar *row)
{
    bool whole = upper_bits(format) == 0;
    uint offset = has_codebook(format) ? code_offset(codebook_bits(format)) : 0u;
    if (main_bits(format) == 2) store_field<D, 2>(codes, 0u, whole, offset, at, row);
    if (main_bits(format) == 4) store_field<D, 4>(codes, 0u, whole, offset, at, row);
    if (main_bits(format) == 8) store_field<D, 8>(codes, 0u, whole, offset, at, row);
    device uchar *upper = row + upper_offset<D>(format);
    if (upper_bits(format) == 1) store_field<D, 1>(codes, main_bits(format), false, 0u, at, upper);
    if (upper_bits(format) == 2) store_field<D, 2>(codes, main_bits(format), false, 0u, at, upper);
}

// The signs of the lane's values in every row: bits and, where a lane has few values, +-1.
#define HAS_SIGN_FACTORS(D) (!TQKV__HAS_MATRIX(D) && ENCODE_VALUES(D) <= 16)
template <int D>
struct row_signs {
    uint bits;
    float factor[16];
};

// lane: of the row
template <int D>
inline row_signs<D> open_signs(uint lane)
{
    row_signs<D> signs;
    signs.bits = lane_signs<D, ENCODE_LANES(D), ROTATED_PIECE(D), ROTATED_PIECE(D)>(lane);
    TQKV_UNROLL
    for (int i = 0; i < 16; i++) signs.factor[i] = as_type<float>(0x3f800000u | (signs.bits >> i & 1u) << 31);
    return signs;
}

// rotate_values by factors. A product with a sign is exact, and half of the products are part of the first stage of the
// transform.
template <int D>
inline void rotate_by_factors(thread float *x, uint lane, bool strided, thread const float *sign)
{
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i += 2) {
        float a = x[i] * sign[i];
        x[i] = fma(x[i + 1], sign[i + 1], a);
        x[i + 1] = fma(x[i + 1], -sign[i + 1], a);
    }
    hadamard_from<D, ENCODE_LANES(D), ROTATED_PIECE(D)>(x, lane, 2, strided);
}

// From a value of each subrow to neighbours, through `rows`: the rows of the simdgroup, L words apart, so that few of
// their values share a bank. lane: of the simdgroup
template <int D>
inline void gather_neighbours(uint lane, threadgroup uint *rows, thread uint *x)
{
    const int L = ENCODE_LANES(D), N = ENCODE_VALUES(D);
    uint part = lane % uint(L);
    threadgroup uint *row = rows + lane / uint(L) * uint(D + L);
    TQKV_UNROLL
    for (int i = 0; i < N; i++) row[uint(i * L) + part] = x[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    TQKV_UNROLL
    for (int i = 0; i + 3 < N; i += 4) {
        uint4 four = *(threadgroup const uint4 *)(row + part * uint(N) + uint(i));
        x[i] = four.x;
        x[i + 1] = four.y;
        x[i + 2] = four.z;
        x[i + 3] = four.w;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup); // before the next row overwrites this one
}

// From a strided row to pieces. lane: of the simdgroup, space: space_of_simdgroup
template <int D>
inline void place_values(uint lane, threadgroup float *space, thread uint *x)
{
    if (TQKV__HAS_MATRIX(D))
        gather_neighbours<D>(lane, (threadgroup uint *)space, x);
    else
        trade_all<D>(x, lane);
}

template <int D>
inline void place_floats(uint lane, threadgroup float *space, thread float *x)
{
    uint bits[ENCODE_VALUES(D)];
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i++) bits[i] = as_type<uint>(x[i]);
    place_values<D>(lane, space, bits);
    TQKV_UNROLL
    for (int i = 0; i < ENCODE_VALUES(D); i++) x[i] = as_type<float>(bits[i]);
}

// The simdgroup's rows in threadgroup memory, with a matrix.
template <int D>
inline threadgroup float *space_of_simdgroup(threadgroup float *space, uint simdgroup)
{
    return space + simdgroup * uint(TQKV__ROW_BYTES(D, 1) / 4);
}

// The rows of one stream, and what prepares them.
struct encode_source {
    uint format, type;
    bool rotated, centered, scaled, has_flag;
    device const uchar *rows;       // [n_tokens][n_kv_heads][D], with strides
    device const float *center;     // [n_kv_heads][D]
    device const float *scale;      // the same, of the channels
    threadgroup float *space;       // space_of_simdgroup
    device atomic_uint *not_finite; // becomes 1 if a row has a NaN or Inf, with has_flag; see beyond_halves, too
};

// Whether the rotation, or a codebook, leaves or needs a value of each subrow in a lane.
template <int D>
inline bool has_subrows(thread const encode_source &source)
{
    return TQKV__HAS_MATRIX(D) && (source.rotated || has_codebook(source.format));
}

// The lane's part of the row that begins at value `from`: before the rotation, if there is one.
template <int D>
inline void load_source(thread const encode_source &source, ulong from, uint lane, thread float *x)
{
    const int L = ENCODE_LANES(D);
    if (!TQKV__HAS_MATRIX(D) || has_subrows<D>(source)) // else pieces are the same
        load_typed_pieces<D, L, ROTATED_PIECE(D)>(source.type, source.rows, from, lane, x);
    else
        load_typed_pieces<D, L, ENCODE_PIECE(D)>(source.type, source.rows, from, lane, x);
}

// The lane's part of what a head's channels have, [n_kv_heads][D], likewise.
template <int D>
inline void load_channels(thread const encode_source &source, device const float *channels, uint head, uint lane,
                          thread float *x)
{
    const int L = ENCODE_LANES(D);
    device const float *from = channels + row_offset(head, D);
    if (!TQKV__HAS_MATRIX(D) || has_subrows<D>(source))
        load_pieces<D, L, ROTATED_PIECE(D)>(from, lane, x);
    else
        load_pieces<D, L, ENCODE_PIECE(D)>(from, lane, x);
}

// The centre of the lane's values, and what they are then multiplied by: as in tqkv_encode a rounded reciprocal, here
// with the sign that the rotation gives the value.
template <int D>
struct row_channels {
    float center[ENCODE_VALUES(D)], factor[ENCODE_VALUES(D)];
};

template <int D>
inline void open_center(thread const encode_source &source, uint head, uint lane, thread row_channels<D> &channels)
{
    if (source.centered) load_channels<D>(source, source.center, head, lane % uint(ENCODE_LANES(D)), channels.center);
}

// Divisions are long. Rows that lie side by side have the same channels: where shuffles are cheap, their lanes share
// the divisions out. lane: of the simdgroup
template <int D>
inline void open_factors(thread const encode_source &source, thread const row_signs<D> &signs, uint head, uint lane,
                         thread row_channels<D> &channels)
{
    const int L = ENCODE_LANES(D), N = ENCODE_VALUES(D), ROWS = 32 / L, OWN = (N + ROWS - 1) / ROWS;
    const uint C = !TQKV__HAS_MATRIX(D) || has_subrows<D>(source) ? uint(ROTATED_PIECE(D)) : uint(ENCODE_PIECE(D));
    uint part = lane % uint(L), row = lane / uint(L);
    if (!source.scaled) return;
    if (TQKV_CHEAP_SHUFFLE) {
        float own[OWN];
        TQKV_UNROLL
        for (int i = 0; i < OWN; i++) {
            uint n = min(uint(i * ROWS) + row, uint(N - 1));
            own[i] = 1.0f / source.scale[row_offset(head, D) + ulong((n / C * uint(L) + part) * C + n % C)];
        }
        TQKV_UNROLL
        for (int i = 0; i < N; i++) channels.factor[i] = simd_shuffle(own[i / ROWS], ushort(uint(i % ROWS * L) + part));
    } else {
        load_channels<D>(source, source.scale, head, part, channels.factor);
        TQKV_UNROLL
        for (int i = 0; i < N; i++) channels.factor[i] = 1.0f / channels.factor[i];
    }
    if (source.rotated) flip_signs<N>(channels.factor, signs.bits);
}

// Rotates a row; factors of channels have given x its signs. With a codebook it ends strided.
template <int D>
inline void rotate_source(thread const encode_source &source, thread const row_signs<D> &signs, uint lane,
                          thread float *x)
{
    const int L = ENCODE_LANES(D), C = ROTATED_PIECE(D);
    bool strided = has_codebook(source.format);
    if (!source.scaled && HAS_SIGN_FACTORS(D)) {
        rotate_by_factors<D>(x, lane, strided, signs.factor);
    } else {
        if (!source.scaled) flip_signs<ENCODE_VALUES(D)>(x, signs.bits);
        hadamard_from<D, L, C>(x, lane, 1, strided);
    }
    scale_values<ENCODE_VALUES(D)>(x, TQKV__INV_SQRT(D));
}

// The first steps: centres, scales and rotates. Every value of a rotated row is a sum over the row, so one value shows
// that there may be a NaN or Inf. Then the row is loaded again, checked itself, which raises the flag, and rotated: by
// the same code, which is long. With a codebook the row ends strided, else in pieces. x: as load_source has loaded it;
// lane: of the simdgroup
template <int D>
inline void prepare_row(thread const encode_source &source, thread const row_signs<D> &signs, ulong from, uint head,
                        uint lane, thread row_channels<D> &channels, thread float *x)
{
    uint part = lane % uint(ENCODE_LANES(D));
    bool checks = !source.rotated, again = true;
    while (again) {
        bool cleared = false;
        if (checks) {
            if (source.rotated) load_source<D>(source, from, part, x);
            cleared = clear_if_not_finite<D>(x);
            if (cleared && source.has_flag && part == 0)
                atomic_store_explicit(source.not_finite, 1u, memory_order_relaxed);
        }
        if (!HOLDS_ROWS(D)) open_center<D>(source, head, lane, channels);
        TQKV_UNROLL
        for (int i = 0; i < ENCODE_VALUES(D); i++) {
            if (source.centered) x[i] = cleared ? x[i] : x[i] - channels.center[i];
            if (source.scaled) x[i] = x[i] * channels.factor[i];
        }
        if (source.rotated) rotate_source<D>(source, signs, part, x);
        again = !checks && simd_any(!is_finite(x[0]));
        checks = true;
    }
    if (has_codebook(source.format)) {
        if (source.rotated)
            trade_last<D>(x, part);
        else if (!TQKV__HAS_MATRIX(D))
            trade_all<D>(x, part);
    } else if (has_subrows<D>(source)) {
        place_floats<D>(lane, source.space, x);
    }
}

// Finds the codes and norms of a row that prepare_row has left, and stores them. to: the row in the store; lane: of the
// simdgroup
template <int D>
inline void store_row(uint format, float block_scale, thread const encode_source &source,
                      thread const encode_target &target, thread const encode_place &at, ulong to, uint lane,
                      thread float *x)
{
    const int N = ENCODE_VALUES(D), L = ENCODE_LANES(D), B = LANE_BLOCKS(D), M = MAXIMUM_BLOCKS(D);
    device uchar *row = target.codes + to * ulong(row_bytes<D>(format));
    device float *row_norms = target.norms + to * ulong(uint(D) / norm_block<D>(format));
    uint codes[N];
    float norms[M > B ? M : B], squares[B];
    if (!has_norms(format)) {
        store_halves<D>(at, x, row);
        return;
    }
    normalise<D>(format, block_scale, x, norms);
    if (has_codebook(format)) {
        find_codes<D>(codebook_bits(format), target.book, x, codes, squares);
        TQKV_UNROLL
        for (int b = 0; b < B; b++) norms[b] = corrected_norm<D>(block_scale, squares[b], norms[b]);
        place_values<D>(lane, source.space, codes);
    } else {
        TQKV_UNROLL
        for (int i = 0; i < N; i++) codes[i] = quantise_grid(x[i]);
    }
    store_codes<D>(format, at, codes, row);
    if (!at.exists) return;
    if (has_codebook(format))
        store_blocks<B, (L < 16 ? L : 16)>(norms, at.lane, uint(L), row_norms);
    else
        store_blocks<M, MAXIMUM_LANES(D)>(norms, at.lane, uint(L), row_norms);
}

// A simdgroup encodes its rows, 32 / L at a time. Lanes without a row repeat the last one and store nothing. A lane
// asks for its part of the next row as soon as it has registers for it: after the rotation or after the codes. number:
// of the simdgroup
template <int D>
inline void encode_rows(constant tqkv__rows_args &args, thread const encode_source &source,
                        thread const encode_target &target, uint number, uint lane)
{
    const int ROWS = 32 / ENCODE_LANES(D), N = ENCODE_VALUES(D);
    const uint format = source.format, last = uint(args.n_tokens) - 1u;
    encode_range range = range_of_simdgroup<D>(args, number);
    encode_place at = {lane % uint(ENCODE_LANES(D)), range.begin + lane / uint(ENCODE_LANES(D)), true};
    row_signs<D> signs = open_signs<D>(at.lane);
    row_channels<D> channels;
    float next[N];
    if (range.begin >= range.end) return;
    ulong from = source_offset(args, min(at.token, last), range.head);
    load_source<D>(source, from, at.lane, next);
    if (HOLDS_ROWS(D)) open_center<D>(source, range.head, lane, channels);
    open_factors<D>(source, signs, range.head, lane, channels);
    for (uint first = range.begin; first < range.end; first += uint(ROWS)) {
        ulong own = from;
        float x[N];
        TQKV_UNROLL
        for (int i = 0; i < N; i++) x[i] = next[i];
        prepare_row<D>(source, signs, own, range.head, lane, channels, x);
        if (!has_norms(format) && args.has_flag == 2 && beyond_halves<D>(source.centered, x) && at.lane == 0)
            atomic_store_explicit(source.not_finite, 1u, memory_order_relaxed);
        from = source_offset(args, min(at.token + uint(ROWS), last), range.head);
        if (HOLDS_ROWS(D)) load_source<D>(source, from, at.lane, next);
        uint slot = target.paged ? paged_slot_of(args, target.pages, min(at.token, last)) : slot_of(args, at.token);
        at.exists = at.token < range.end && (!target.paged || slot < uint(args.capacity));
        ulong to = row_in_store(args, slot, range.head);
        store_row<D>(format, args.block_scale, source, target, at, to, lane, x);
        if (!HOLDS_ROWS(D)) load_source<D>(source, from, at.lane, next);
        at.token += uint(ROWS);
    }
}

// The same rows as values that encode_rows would make codes of. scaled: [n_tokens][n_kv_heads][D]
template <int D>
inline void probe_rows(constant tqkv__rows_args &args, thread const encode_source &source, uint number, uint lane,
                       device float *scaled)
{
    const int L = ENCODE_LANES(D), C = ENCODE_PIECE(D), ROWS = 32 / L;
    encode_range range = range_of_simdgroup<D>(args, number);
    uint part = lane % uint(L);
    row_signs<D> signs = open_signs<D>(part);
    row_channels<D> channels;
    if (range.begin >= range.end) return;
    if (HOLDS_ROWS(D)) open_center<D>(source, range.head, lane, channels);
    open_factors<D>(source, signs, range.head, lane, channels);
    for (uint first = range.begin; first < range.end; first += uint(ROWS)) {
        float x[ENCODE_VALUES(D)];
        uint own = first + lane / uint(L), existing = min(own, uint(args.n_tokens) - 1u);
        ulong from = source_offset(args, existing, range.head);
        load_source<D>(source, from, part, x);
        prepare_row<D>(source, signs, from, range.head, lane, channels, x);
        float norms[MAXIMUM_BLOCKS(D) > LANE_BLOCKS(D) ? MAXIMUM_BLOCKS(D) : LANE_BLOCKS(D)];
        normalise<D>(source.format, args.block_scale, x, norms);
        if (has_codebook(source.format)) place_floats<D>(lane, source.space, x);
        device float *to = scaled + row_offset(own * uint(args.n_kv_heads) + range.head, D);
        TQKV_UNROLL
        for (int i = 0; i < ENCODE_VALUES(D); i++)
            if (own < range.end) to[value_of_lane<L, C>(part, i)] = x[i];
    }
}

#endif

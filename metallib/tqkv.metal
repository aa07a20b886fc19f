// All shaders of tqkv in one file, written by `make metallib`: do not edit. MIT licence, as tqkv.h. Compile it without
// fast math: fastMathEnabled NO in MTLCompileOptions.
#include <metal_stdlib>
using namespace metal;

// ---- src/api/types.h ----

#define TQKV_VERSION_MAJOR 0
#define TQKV_VERSION_MINOR 1
#define TQKV_VERSION_PATCH 0

/* >>formats
   Bits count the stored code alone. Norms (float32) add 32 bits a row; from head_dim 512 on, 32 bits per 256 values;
   for I8, 32 bits per 128 values.

     format      bits  code of a value               row of D values, in bytes
     F16           16  IEEE half; rotated if asked   2*D, little-endian; beyond +-65504 clamped to it
     TQ4            4  index into 16 centroids       D/2; element 2i in the low nibble of byte i
     TQ5            5  index into 32 centroids       D/2 low nibbles, then D/8 of fifth bits
     TQ6            6  index into 64 centroids       D/2 low nibbles, then D/4 of upper bit pairs
     TQ8            8  index into 256 centroids      D
     TQ5_BYTES   5->8  as TQ5                        D, upper bits zero (the layout of existing caches)
     TQ6_BYTES   6->8  as TQ6                        D, upper bits zero
     I8             8  signed byte, uniform grid     D; more accurate than TQ8 at the same size
     TQ3            3  index into 8 centroids        D/4 low bit pairs, then D/8 of third bits
     TQ2            2  index into 4 centroids        D/4; element 4i in the lowest pair of bits of byte i             */
typedef enum tqkv_format {
    TQKV_FORMAT_DEFAULT = 0, /* keys: I8, values: TQ4 */
    TQKV_F16 = 1,
    TQKV_TQ4,
    TQKV_TQ5,
    TQKV_TQ6,
    TQKV_TQ8,
    TQKV_TQ5_BYTES,
    TQKV_TQ6_BYTES,
    TQKV_I8,
    TQKV_TQ3,
    TQKV_TQ2
} tqkv_format;

#define TQKV_MAX_HEAD_DIM 1024

/* The type of rows that calls read and write. */
typedef enum tqkv_type {
    TQKV_TYPE_F32 = 0, /* float */
    TQKV_TYPE_F16,     /* IEEE half */
    TQKV_TYPE_BF16     /* bfloat16: the upper half of a float */
} tqkv_type;

// ---- src/base/tables.h ----

/* >>tables: one row a format, and tables: one source for C, Objective-C and the Metal shaders. TQKV_SHARED makes it
   visible without the implementation. */
#define TQKV_TABLE_VERSION 9 /* changes with the tables, the argument structs, or their meaning in the kernels */

#ifndef TQKV_TABLE
#ifdef __METAL_VERSION__
#define TQKV_TABLE constant
#else
#define TQKV_TABLE static const
#endif
#endif

/* One row a head_dim D = m * n, n a power of two.

   m          order of the Hadamard matrix that the rotation applies across its m subrows of n values; 1: none
   grid       values that share a norm of I8: the largest multiple of 16, at most 128, that divides D
   root       sqrt(D) and 1/sqrt(D), rounded to float: all digits, for machines that compute in wider registers */
// clang-format off
#define TQKV__SIZES(row, x)                                                           \
    /*        D   m grid root                       1/root */                         \
    row(x,   32,  1,  32, 5.656854152679443359375f,  0.17677669227123260498046875f  ) \
    row(x,   48, 12,  48, 6.928203105926513671875f,  0.1443375647068023681640625f   ) \
    row(x,   64,  1,  64, 8.0f,                      0.125f                         ) \
    row(x,   80, 20,  80, 8.94427204132080078125f,   0.11180339753627777099609375f  ) \
    row(x,   96, 12,  96, 9.79795932769775390625f,   0.1020620763301849365234375f   ) \
    row(x,  112, 28, 112, 10.58300495147705078125f,  0.094491116702556610107421875f ) \
    row(x,  128,  1, 128, 11.31370830535888671875f,  0.088388346135616302490234375f ) \
    row(x,  144, 36,  48, 12.0f,                     0.083333335816860198974609375f ) \
    row(x,  160, 20,  80, 12.6491107940673828125f,   0.079056940972805023193359375f ) \
    row(x,  192, 12,  96, 13.85640621185302734375f,  0.07216878235340118408203125f  ) \
    row(x,  224, 28, 112, 14.96662998199462890625f,  0.066815309226512908935546875f ) \
    row(x,  256,  1, 128, 16.0f,                     0.0625f                        ) \
    row(x,  288, 36,  96, 16.970561981201171875f,    0.0589255653321743011474609375f) \
    row(x,  320, 20,  80, 17.8885440826416015625f,   0.055901698768138885498046875f ) \
    row(x,  384, 12, 128, 19.5959186553955078125f,   0.05103103816509246826171875f  ) \
    row(x,  448, 28, 112, 21.1660099029541015625f,   0.0472455583512783050537109375f) \
    row(x,  512,  1, 128, 22.6274166107177734375f,   0.0441941730678081512451171875f) \
    row(x,  576, 36,  96, 24.0f,                     0.0416666679084300994873046875f) \
    row(x,  640, 20, 128, 25.298221588134765625f,    0.0395284704864025115966796875f) \
    row(x,  768, 12, 128, 27.7128124237060546875f,   0.036084391176700592041015625f ) \
    row(x,  896, 28, 128, 29.9332599639892578125f,   0.0334076546132564544677734375f) \
    row(x, 1024,  1, 128, 32.0f,                     0.03125f                       )
// clang-format on

/* One column of the row of D; without a row 0. A constant D gives a constant. */
#define TQKV__MATRIX_ORDER(D)                              (TQKV__SIZES(TQKV__ORDER_OF, D) 0)
#define TQKV__GRID_DIM(D)                                  (TQKV__SIZES(TQKV__GRID_DIM_OF, D) 0)
#define TQKV__SQRT(D)                                      (TQKV__SIZES(TQKV__SQRT_OF, D) 0.0f)
#define TQKV__INV_SQRT(D)                                  (TQKV__SIZES(TQKV__INV_SQRT_OF, D) 0.0f)
#define TQKV__ORDER_OF(D, size, m, grid, root, inverse)    (D) == size ? m:
#define TQKV__GRID_DIM_OF(D, size, m, grid, root, inverse) (D) == size ? grid:
#define TQKV__SQRT_OF(D, size, m, grid, root, inverse)     (D) == size ? root:
#define TQKV__INV_SQRT_OF(D, size, m, grid, root, inverse) (D) == size ? inverse:
/* Whether R has a matrix across its subrows. A library for Metal has no instruction that counts bits, which the short
   form is. */
#ifdef __METAL_VERSION__
#define TQKV__HAS_MATRIX(D) (TQKV__MATRIX_ORDER(D) > 1)
#else
#define TQKV__HAS_MATRIX(D) (((D) & ((D)-1)) != 0)
#endif

/* 1e-10 as a float. A row whose norm is not above this is stored as zeros. */
#define TQKV__MIN_NORM 1.00000001335143196001808973960578441619873046875e-10f
/* Halves kept besides of codes: a value of this size is beyond them, and a row of which all are below the least, about
   where a half loses more than the codes of 8 bits, is better off in codes. */
#define TQKV__BEYOND_HALVES 65520.0f
#define TQKV__LEAST_HALF    (1.0f / 131072.0f)
#define TQKV__NEXT_NORM     1.00000008274037092e-10f /* the next float: the least norm that is above */

/* One row a format, in the order of tqkv_format. C, the kernels and the shaders derive everything else from these rows.

   kind       HALF: IEEE halves, no norms, never rotated. BOOK: indices into a codebook. GRID: integers times a norm.
   main       bits of a code in the first field of a stored row
   upper      the highest bits of a code, in the second field, directly behind the first
   book       bits of the codebook; if main + upper is larger, the bits above are zero
   plain      1: a store may omit the rotation (`unrotated`)                                                         */
// clang-format off
#define TQKV__FORMATS(row, x)                                                  \
    /*     format          name         kind        main upper book plain */   \
    row(x, TQKV_F16,       "f16",       TQKV__HALF, 16,  0,    0,   0)         \
    row(x, TQKV_TQ4,       "tq4",       TQKV__BOOK,  4,  0,    4,   0)         \
    row(x, TQKV_TQ5,       "tq5",       TQKV__BOOK,  4,  1,    5,   1)         \
    row(x, TQKV_TQ6,       "tq6",       TQKV__BOOK,  4,  2,    6,   1)         \
    row(x, TQKV_TQ8,       "tq8",       TQKV__BOOK,  8,  0,    8,   1)         \
    row(x, TQKV_TQ5_BYTES, "tq5_bytes", TQKV__BOOK,  8,  0,    5,   1)         \
    row(x, TQKV_TQ6_BYTES, "tq6_bytes", TQKV__BOOK,  8,  0,    6,   1)         \
    row(x, TQKV_I8,        "i8",        TQKV__GRID,  8,  0,    0,   0)         \
    row(x, TQKV_TQ3,       "tq3",       TQKV__BOOK,  2,  1,    3,   0)         \
    row(x, TQKV_TQ2,       "tq2",       TQKV__BOOK,  2,  0,    2,   0)
// clang-format on

enum { TQKV__HALF = 1, TQKV__BOOK, TQKV__GRID };

/* One column of the row of f; without a row 8 main bits, else 0. A constant f gives a constant. */
#define TQKV__KIND(f)                                                   (TQKV__FORMATS(TQKV__KIND_OF, f) 0)
#define TQKV__MAIN_BITS(f)                                              (TQKV__FORMATS(TQKV__MAIN_OF, f) 8)
#define TQKV__UPPER_BITS(f)                                             (TQKV__FORMATS(TQKV__UPPER_OF, f) 0)
#define TQKV__BOOK_BITS(f)                                              (TQKV__FORMATS(TQKV__BOOK_OF, f) 0)
#define TQKV__PLAIN(f)                                                  (TQKV__FORMATS(TQKV__PLAIN_OF, f) 0)
#define TQKV__KIND_OF(f, format, name, kind, main, upper, book, plain)  (f) == format ? kind:
#define TQKV__MAIN_OF(f, format, name, kind, main, upper, book, plain)  (f) == format ? main:
#define TQKV__UPPER_OF(f, format, name, kind, main, upper, book, plain) (f) == format ? upper:
#define TQKV__BOOK_OF(f, format, name, kind, main, upper, book, plain)  (f) == format ? book:
#define TQKV__PLAIN_OF(f, format, name, kind, main, upper, book, plain) (f) == format ? plain:

/* Values that share a norm, in a row of D values. */
#define TQKV__NORM_DIM(kind, D) \
    ((kind) == TQKV__GRID ? TQKV__GRID_DIM(D) : (kind) == TQKV__BOOK && ((D) == 512 || (D) == 1024) ? 256 : (D))

/* One row a codebook: its bits, which are also part of the names of its tables. */
#define TQKV__BOOKS(row, x) row(x, 2) row(x, 3) row(x, 4) row(x, 5) row(x, 6) row(x, 8)
/* The codebook with that many bits, and its boundaries; TQ8's for any other number. */
#define TQKV__CODEBOOK(bits)              (TQKV__BOOKS(TQKV__CODEBOOK_OF, bits) tqkv__tables.codebook_8)
#define TQKV__BOUNDARIES(bits)            (TQKV__BOOKS(TQKV__BOUNDARIES_OF, bits) tqkv__tables.boundaries_8)
#define TQKV__CODEBOOK_OF(bits, number)   (bits) == number ? tqkv__tables.codebook_##number:
#define TQKV__BOUNDARIES_OF(bits, number) (bits) == number ? tqkv__tables.boundaries_##number:

/* What encoding tries on the scale of a row, in this order, and their number; see >>codec. */
#define TQKV__FACTORS(bits)              (TQKV__BOOKS(TQKV__FACTORS_OF, bits) tqkv__tables.factors_8)
#define TQKV__N_FACTORS(bits)            (TQKV__BOOKS(TQKV__N_FACTORS_OF, bits) 0)
#define TQKV__FACTORS_OF(bits, number)   (bits) == number ? tqkv__tables.factors_##number:
#define TQKV__N_FACTORS_OF(bits, number) (bits) == number ? (int)(sizeof tqkv__tables.factors_##number / sizeof(float)):
enum { TQKV__MOST_FACTORS = 5 };
/* Of 3 or 4 bits: from this factor to the largest a value crosses one boundary at most, the next being further away. */
#define TQKV__LEAST_CROSSING(bits) ((bits) == 3 ? 0.82f : 1.0f)

typedef struct tqkv__table_set {
    float codebook_2[4], codebook_3[8], codebook_4[16], codebook_5[32], codebook_6[64],
        codebook_8[256]; /* increasing */
    float boundaries_2[3], boundaries_3[7], boundaries_4[15], boundaries_5[31], boundaries_6[63], boundaries_8[255];
    float factors_2[1], factors_3[5], factors_4[5], factors_5[5], factors_6[5], factors_8[5];
    uint8_t signs[64]; /* bit j = (signs[j>>3] >> (j&7)) & 1: 1 flips element j modulo 512 */
    uint8_t hadamard_12[12][2], hadamard_20[20][3], hadamard_28[28][4],
        hadamard_36[36][5]; /* symmetric; bits of a row as those of signs: 1 is -1, 0 is 1 */
} tqkv__table_set;

/* Lloyd-Max quantisers of N(0,1). Float midpoints of the centroids differ from these boundaries in the last place.
   The factors leave the least error in Gaussian rows of 64 to 256 values. */
// clang-format off
TQKV_TABLE tqkv__table_set tqkv__tables = {
    {-1.5104176f, -0.4527800f, 0.4527800f, 1.5104176f},
    {-2.1519457f, -1.3439093f, -0.7560053f, -0.2450942f, 0.2450942f, 0.7560053f, 1.3439093f, 2.1519457f},
    {-2.7325896f, -2.0690172f, -1.6180464f, -1.2562312f, -0.9423405f, -0.6567591f, -0.3880483f, -0.1283950f, 0.1283950f, 0.3880483f,
     0.6567591f, 0.9423405f, 1.2562312f, 1.6180464f, 2.0690172f, 2.7325896f},
    {-3.2606790f, -2.6910589f, -2.3176743f, -2.0286608f, -1.7871646f, -1.5761599f, -1.3862739f, -1.2117410f, -1.0487242f, -0.8945114f,
     -0.7470884f, -0.6048936f, -0.4666676f, -0.3313550f, -0.1980377f, -0.0658849f, 0.0658849f, 0.1980377f, 0.3313550f, 0.4666676f,
     0.6048936f, 0.7470884f, 0.8945114f, 1.0487242f, 1.2117410f, 1.3862739f, 1.5761599f, 1.7871646f, 2.0286608f, 2.3176743f,
     2.6910589f, 3.2606790f},
    {-3.6996161f, -3.1907215f, -2.8640626f, -2.6161277f, -2.4129324f, -2.2388464f, -2.0853192f, -1.9471373f, -1.8208742f, -1.7041502f,
     -1.5952401f, -1.4928497f, -1.3959804f, -1.3038428f, -1.2157998f, -1.1313277f, -1.0499889f, -0.9714118f, -0.8952766f, -0.8213046f,
     -0.7492492f, -0.6788902f, -0.6100285f, -0.5424819f, -0.4760822f, -0.4106724f, -0.3461048f, -0.2822386f, -0.2189392f, -0.1560761f,
     -0.0935225f, -0.0311537f, 0.0311537f, 0.0935225f, 0.1560761f, 0.2189392f, 0.2822386f, 0.3461048f, 0.4106724f, 0.4760822f,
     0.5424819f, 0.6100285f, 0.6788902f, 0.7492492f, 0.8213046f, 0.8952766f, 0.9714118f, 1.0499889f, 1.1313277f, 1.2157998f,
     1.3038428f, 1.3959804f, 1.4928497f, 1.5952401f, 1.7041502f, 1.8208742f, 1.9471373f, 2.0853192f, 2.2388464f, 2.4129324f,
     2.6161277f, 2.8640626f, 3.1907215f, 3.6996161f},
    {-5.0652659f, -4.6836997f, -4.4467193f, -4.2715508f, -4.1311907f, -4.0132856f, -3.9111092f, -3.8205780f, -3.7390194f, -3.6645851f,
     -3.5959415f, -3.5320936f, -3.4722785f, -3.4158977f, -3.3624729f, -3.3116156f, -3.2630056f, -3.2163758f, -3.1715011f, -3.1281899f,
     -3.0862780f, -3.0456229f, -3.0061011f, -2.9676040f, -2.9300362f, -2.8933131f, -2.8573596f, -2.8221086f, -2.7874999f, -2.7534795f,
     -2.7199985f, -2.6870129f, -2.6544825f, -2.6223710f, -2.5906452f, -2.5592748f, -2.5282321f, -2.4974918f, -2.4670306f, -2.4368270f,
     -2.4068614f, -2.3771157f, -2.3475732f, -2.3182184f, -2.2890372f, -2.2600165f, -2.2311440f, -2.2024086f, -2.1737998f, -2.1453081f,
     -2.1169245f, -2.0886408f, -2.0604493f, -2.0323430f, -2.0043154f, -1.9763603f, -1.9484722f, -1.9206458f, -1.8928763f, -1.8651592f,
     -1.8374904f, -1.8098662f, -1.7822828f, -1.7547372f, -1.7272261f, -1.6997469f, -1.6722970f, -1.6448739f, -1.6174755f, -1.5900996f,
     -1.5627445f, -1.5354084f, -1.5080897f, -1.4807869f, -1.4534986f, -1.4262237f, -1.3989610f, -1.3717093f, -1.3444678f, -1.3172356f,
     -1.2900118f, -1.2627956f, -1.2355865f, -1.2083838f, -1.1811868f, -1.1539951f, -1.1268081f, -1.0996255f, -1.0724469f, -1.0452718f,
     -1.0180999f, -0.9909310f, -0.9637647f, -0.9366008f, -0.9094390f, -0.8822793f, -0.8551212f, -0.8279648f, -0.8008098f, -0.7736561f,
     -0.7465035f, -0.7193520f, -0.6922014f, -0.6650517f, -0.6379027f, -0.6107544f, -0.5836067f, -0.5564596f, -0.5293129f, -0.5021667f,
     -0.4750208f, -0.4478753f, -0.4207301f, -0.3935852f, -0.3664405f, -0.3392960f, -0.3121517f, -0.2850076f, -0.2578636f, -0.2307198f,
     -0.2035761f, -0.1764324f, -0.1492888f, -0.1221453f, -0.0950019f, -0.0678584f, -0.0407151f, -0.0135717f, 0.0135717f, 0.0407151f,
     0.0678584f, 0.0950019f, 0.1221453f, 0.1492888f, 0.1764324f, 0.2035761f, 0.2307198f, 0.2578636f, 0.2850076f, 0.3121517f,
     0.3392960f, 0.3664405f, 0.3935852f, 0.4207301f, 0.4478753f, 0.4750208f, 0.5021667f, 0.5293129f, 0.5564596f, 0.5836067f,
     0.6107544f, 0.6379027f, 0.6650517f, 0.6922014f, 0.7193520f, 0.7465035f, 0.7736561f, 0.8008098f, 0.8279648f, 0.8551212f,
     0.8822793f, 0.9094390f, 0.9366008f, 0.9637647f, 0.9909310f, 1.0180999f, 1.0452718f, 1.0724469f, 1.0996255f, 1.1268081f,
     1.1539951f, 1.1811868f, 1.2083838f, 1.2355865f, 1.2627956f, 1.2900118f, 1.3172356f, 1.3444678f, 1.3717093f, 1.3989610f,
     1.4262237f, 1.4534986f, 1.4807869f, 1.5080897f, 1.5354084f, 1.5627445f, 1.5900996f, 1.6174755f, 1.6448739f, 1.6722970f,
     1.6997469f, 1.7272261f, 1.7547372f, 1.7822828f, 1.8098662f, 1.8374904f, 1.8651592f, 1.8928763f, 1.9206458f, 1.9484722f,
     1.9763603f, 2.0043154f, 2.0323430f, 2.0604493f, 2.0886408f, 2.1169245f, 2.1453081f, 2.1737998f, 2.2024086f, 2.2311440f,
     2.2600165f, 2.2890372f, 2.3182184f, 2.3475732f, 2.3771157f, 2.4068614f, 2.4368270f, 2.4670306f, 2.4974918f, 2.5282321f,
     2.5592748f, 2.5906452f, 2.6223710f, 2.6544825f, 2.6870129f, 2.7199985f, 2.7534795f, 2.7874999f, 2.8221086f, 2.8573596f,
     2.8933131f, 2.9300362f, 2.9676040f, 3.0061011f, 3.0456229f, 3.0862780f, 3.1281899f, 3.1715011f, 3.2163758f, 3.2630056f,
     3.3116156f, 3.3624729f, 3.4158977f, 3.4722785f, 3.5320936f, 3.5959415f, 3.6645851f, 3.7390194f, 3.8205780f, 3.9111092f,
     4.0132856f, 4.1311907f, 4.2715508f, 4.4467193f, 4.6836997f, 5.0652659f},
    {-0.9815988f, 0.0000000f, 0.9815988f},
    {-1.7479275f, -1.0499573f, -0.5005497f, 0.0000000f, 0.5005497f, 1.0499573f, 1.7479275f},
    {-2.4008034f, -1.8435318f, -1.4371388f, -1.0992859f, -0.7995498f, -0.5224037f, -0.2582217f, 0.0000000f, 0.2582217f, 0.5224037f,
     0.7995498f, 1.0992859f, 1.4371388f, 1.8435318f, 2.4008034f},
    {-2.9758689f, -2.5043666f, -2.1731675f, -1.9079127f, -1.6816622f, -1.4812169f, -1.2990074f, -1.1302326f, -0.9716178f, -0.8207999f,
     -0.6759910f, -0.5357806f, -0.3990113f, -0.2646964f, -0.1319613f, 0.0000000f, 0.1319613f, 0.2646964f, 0.3990113f, 0.5357806f,
     0.6759910f, 0.8207999f, 0.9716178f, 1.1302326f, 1.2990074f, 1.4812169f, 1.6816622f, 1.9079127f, 2.1731675f, 2.5043666f,
     2.9758689f},
    {-3.4451688f, -3.0273920f, -2.7400952f, -2.5145300f, -2.3258894f, -2.1620828f, -2.0162282f, -1.8840057f, -1.7625122f, -1.6496952f,
     -1.5440449f, -1.4444151f, -1.3499116f, -1.2598213f, -1.1735638f, -1.0906583f, -1.0107003f, -0.9333442f, -0.8582906f, -0.7852769f,
     -0.7140697f, -0.6444593f, -0.5762552f, -0.5092820f, -0.4433773f, -0.3783886f, -0.3141717f, -0.2505889f, -0.1875076f, -0.1247993f,
     -0.0623381f, 0.0000000f, 0.0623381f, 0.1247993f, 0.1875076f, 0.2505889f, 0.3141717f, 0.3783886f, 0.4433773f, 0.5092820f,
     0.5762552f, 0.6444593f, 0.7140697f, 0.7852769f, 0.8582906f, 0.9333442f, 1.0107003f, 1.0906583f, 1.1735638f, 1.2598213f,
     1.3499116f, 1.4444151f, 1.5440449f, 1.6496952f, 1.7625122f, 1.8840057f, 2.0162282f, 2.1620828f, 2.3258894f, 2.5145300f,
     2.7400952f, 3.0273920f, 3.4451688f},
    {-4.8744828f, -4.5652095f, -4.3591350f, -4.2013707f, -4.0722382f, -3.9621974f, -3.8658436f, -3.7797987f, -3.7018022f, -3.6302633f,
     -3.5640175f, -3.5021860f, -3.4440881f, -3.3891853f, -3.3370443f, -3.2873106f, -3.2396907f, -3.1939384f, -3.1498455f, -3.1072339f,
     -3.0659504f, -3.0258620f, -2.9868525f, -2.9488201f, -2.9116746f, -2.8753363f, -2.8397341f, -2.8048042f, -2.7704897f, -2.7367390f,
     -2.7035057f, -2.6707477f, -2.6384267f, -2.6065081f, -2.5749600f, -2.5437535f, -2.5128620f, -2.4822612f, -2.4519288f, -2.4218442f,
     -2.3919885f, -2.3623444f, -2.3328958f, -2.3036278f, -2.2745269f, -2.2455802f, -2.2167763f, -2.1881042f, -2.1595539f, -2.1311163f,
     -2.1027826f, -2.0745450f, -2.0463962f, -2.0183292f, -1.9903379f, -1.9624162f, -1.9345590f, -1.9067610f, -1.8790177f, -1.8513248f,
     -1.8236783f, -1.7960745f, -1.7685100f, -1.7409817f, -1.7134865f, -1.6860220f, -1.6585855f, -1.6311747f, -1.6037875f, -1.5764221f,
     -1.5490764f, -1.5217490f, -1.4944383f, -1.4671427f, -1.4398612f, -1.4125923f, -1.3853351f, -1.3580886f, -1.3308517f, -1.3036237f,
     -1.2764037f, -1.2491911f, -1.2219851f, -1.1947853f, -1.1675909f, -1.1404016f, -1.1132168f, -1.0860362f, -1.0588593f, -1.0316859f,
     -1.0045155f, -0.9773478f, -0.9501827f, -0.9230199f, -0.8958592f, -0.8687003f, -0.8415430f, -0.8143873f, -0.7872329f, -0.7600798f,
     -0.7329278f, -0.7057767f, -0.6786266f, -0.6514772f, -0.6243286f, -0.5971806f, -0.5700331f, -0.5428862f, -0.5157398f, -0.4885937f,
     -0.4614481f, -0.4343027f, -0.4071577f, -0.3800128f, -0.3528683f, -0.3257239f, -0.2985797f, -0.2714356f, -0.2442917f, -0.2171479f,
     -0.1900042f, -0.1628606f, -0.1357171f, -0.1085736f, -0.0814302f, -0.0542868f, -0.0271434f, 0.0000000f, 0.0271434f, 0.0542868f,
     0.0814302f, 0.1085736f, 0.1357171f, 0.1628606f, 0.1900042f, 0.2171479f, 0.2442917f, 0.2714356f, 0.2985797f, 0.3257239f,
     0.3528683f, 0.3800128f, 0.4071577f, 0.4343027f, 0.4614481f, 0.4885937f, 0.5157398f, 0.5428862f, 0.5700331f, 0.5971806f,
     0.6243286f, 0.6514772f, 0.6786266f, 0.7057767f, 0.7329278f, 0.7600798f, 0.7872329f, 0.8143873f, 0.8415430f, 0.8687003f,
     0.8958592f, 0.9230199f, 0.9501827f, 0.9773478f, 1.0045155f, 1.0316859f, 1.0588593f, 1.0860362f, 1.1132168f, 1.1404016f,
     1.1675909f, 1.1947853f, 1.2219851f, 1.2491911f, 1.2764037f, 1.3036237f, 1.3308517f, 1.3580886f, 1.3853351f, 1.4125923f,
     1.4398612f, 1.4671427f, 1.4944383f, 1.5217490f, 1.5490764f, 1.5764221f, 1.6037875f, 1.6311747f, 1.6585855f, 1.6860220f,
     1.7134865f, 1.7409817f, 1.7685100f, 1.7960745f, 1.8236783f, 1.8513248f, 1.8790177f, 1.9067610f, 1.9345590f, 1.9624162f,
     1.9903379f, 2.0183292f, 2.0463962f, 2.0745450f, 2.1027826f, 2.1311163f, 2.1595539f, 2.1881042f, 2.2167763f, 2.2455802f,
     2.2745269f, 2.3036278f, 2.3328958f, 2.3623444f, 2.3919885f, 2.4218442f, 2.4519288f, 2.4822612f, 2.5128620f, 2.5437535f,
     2.5749600f, 2.6065081f, 2.6384267f, 2.6707477f, 2.7035057f, 2.7367390f, 2.7704897f, 2.8048042f, 2.8397341f, 2.8753363f,
     2.9116746f, 2.9488201f, 2.9868525f, 3.0258620f, 3.0659504f, 3.1072339f, 3.1498455f, 3.1939384f, 3.2396907f, 3.2873106f,
     3.3370443f, 3.3891853f, 3.4440881f, 3.5021860f, 3.5640175f, 3.6302633f, 3.7018022f, 3.7797987f, 3.8658436f, 3.9621974f,
     4.0722382f, 4.2013707f, 4.3591350f, 4.5652095f, 4.8744828f},
    {1.0f},
    {1.0f, 0.92f, 1.08f, 0.82f, 1.18f},
    {1.0f, 0.88f, 1.06f, 1.14f, 1.24f},
    {1.0f, 0.9f, 1.1f, 1.18f, 1.24f},
    {0.95f, 1.05f, 1.1f, 1.15f, 1.2f},
    {1.125f, 1.45f, 1.475f, 1.5f, 1.525f},
    {0xa7, 0x3b, 0x91, 0xf4, 0x6d, 0xc2, 0x58, 0x0e, 0xb3, 0x7f, 0x24, 0xd6, 0x89, 0x45, 0xea, 0x1c,
     0x63, 0xaf, 0xd8, 0x52, 0x97, 0x0b, 0xe1, 0x3d, 0x76, 0xc4, 0x19, 0xfe, 0x4a, 0x85, 0x2c, 0xdb,
     0xd3, 0x4e, 0xa8, 0x17, 0x9c, 0x5b, 0xe6, 0x31, 0x72, 0xb9, 0x0d, 0xf5, 0x43, 0x8a, 0x6e, 0xc7,
     0x58, 0x2f, 0x94, 0xe1, 0xb6, 0x3d, 0x0a, 0x7c, 0xc5, 0x61, 0xd8, 0x4f, 0xa3, 0x97, 0x1e, 0x85},
    {{0x02, 0x00}, {0xab, 0x0a}, {0xc8, 0x03}, {0x6e, 0x09}, {0x20, 0x0f}, {0xba, 0x05}, {0x8c, 0x0c}, {0xe6, 0x06},
     {0x3c, 0x02}, {0x96, 0x0b}, {0xf0, 0x08}, {0x5a, 0x0e}},
    {{0x02, 0x00, 0x00}, {0xab, 0xaa, 0x0a}, {0x08, 0x3c, 0x0f}, {0xae, 0x96, 0x05}, {0x20, 0xf3, 0x0c}, {0xba, 0x59, 0x06},
     {0x80, 0xcf, 0x03}, {0xea, 0x65, 0x09}, {0xf0, 0x02, 0x0f}, {0x5a, 0xab, 0x05}, {0xcc, 0xc8, 0x0c}, {0x66, 0x6e, 0x06},
     {0x3c, 0xe0, 0x03}, {0x96, 0x7a, 0x09}, {0xf0, 0xbc, 0x00}, {0x5a, 0xd6, 0x0a}, {0xcc, 0x33, 0x02}, {0x66, 0x99, 0x0b},
     {0x3c, 0x0f, 0x08}, {0x96, 0xa5, 0x0e}},
    {{0x02, 0x00, 0x00, 0x00}, {0xab, 0xaa, 0xaa, 0x0a}, {0xc8, 0xf0, 0x0f, 0x03}, {0x6e, 0x5a, 0xa5, 0x09}, {0x20, 0xc3, 0x3f, 0x0c},
     {0xba, 0x69, 0x95, 0x06}, {0x8c, 0x0c, 0xff, 0x00}, {0xe6, 0xa6, 0x55, 0x0a}, {0x30, 0x32, 0xfc, 0x03}, {0x9a, 0x9b, 0x56, 0x09},
     {0xc0, 0xc8, 0xf0, 0x0f}, {0x6a, 0x6e, 0x5a, 0x05}, {0x0c, 0x23, 0xc3, 0x0f}, {0xa6, 0xb9, 0x69, 0x05}, {0x3c, 0x8c, 0x0c, 0x0f},
     {0x96, 0xe6, 0xa6, 0x05}, {0xfc, 0x30, 0x32, 0x0c}, {0x56, 0x9a, 0x9b, 0x06}, {0xfc, 0xc3, 0xc8, 0x00}, {0x56, 0x69, 0x6e, 0x0a},
     {0xf0, 0x0f, 0x23, 0x03}, {0x5a, 0xa5, 0xb9, 0x09}, {0xc0, 0x3f, 0x8c, 0x0c}, {0x6a, 0x95, 0xe6, 0x06}, {0x0c, 0xff, 0x30, 0x02},
     {0xa6, 0x55, 0x9a, 0x0b}, {0x30, 0xfc, 0xc3, 0x08}, {0x9a, 0x56, 0x69, 0x0e}},
    {{0x02, 0x00, 0x00, 0x00, 0x00}, {0xab, 0xaa, 0xaa, 0xaa, 0x0a}, {0x08, 0xf3, 0xc3, 0xcf, 0x00}, {0xae, 0x59, 0x69, 0x65, 0x0a},
     {0x20, 0xcc, 0x0f, 0x3f, 0x03}, {0xba, 0x66, 0xa5, 0x95, 0x09}, {0x80, 0x30, 0x3f, 0xfc, 0x0c}, {0xea, 0x9a, 0x95, 0x56, 0x06},
     {0x0c, 0xc2, 0xfc, 0xf0, 0x03}, {0xa6, 0x6b, 0x56, 0x5a, 0x09}, {0x30, 0x08, 0xf3, 0xc3, 0x0f}, {0x9a, 0xae, 0x59, 0x69, 0x05},
     {0xcc, 0x20, 0xcc, 0x0f, 0x0f}, {0x66, 0xba, 0x66, 0xa5, 0x05}, {0x3c, 0x83, 0x30, 0x3f, 0x0c}, {0x96, 0xe9, 0x9a, 0x95, 0x06},
     {0xfc, 0x0c, 0xc2, 0xfc, 0x00}, {0x56, 0xa6, 0x6b, 0x56, 0x0a}, {0xf0, 0x33, 0x08, 0xf3, 0x03}, {0x5a, 0x99, 0xae, 0x59, 0x09},
     {0xc0, 0xcf, 0x20, 0xcc, 0x0f}, {0x6a, 0x65, 0xba, 0x66, 0x05}, {0x0c, 0x3f, 0x83, 0x30, 0x0f}, {0xa6, 0x95, 0xe9, 0x9a, 0x05},
     {0x3c, 0xfc, 0x0c, 0xc2, 0x0c}, {0x96, 0x56, 0xa6, 0x6b, 0x06}, {0xfc, 0xf0, 0x33, 0x08, 0x03}, {0x56, 0x5a, 0x99, 0xae, 0x09},
     {0xf0, 0xc3, 0xcf, 0x20, 0x0c}, {0x5a, 0x69, 0x65, 0xba, 0x06}, {0xcc, 0x0f, 0x3f, 0x83, 0x00}, {0x66, 0xa5, 0x95, 0xe9, 0x0a},
     {0x30, 0x3f, 0xfc, 0x0c, 0x02}, {0x9a, 0x95, 0x56, 0xa6, 0x0b}, {0xc0, 0xfc, 0xf0, 0x33, 0x08}, {0x6a, 0x56, 0x5a, 0x99, 0x0e}}};
// clang-format on

#ifdef __cplusplus
#define TQKV__ASSERT_SIZE(type, bytes) static_assert(sizeof(type) == (bytes), "size of " #type)
#else
#define TQKV__ASSERT_SIZE(type, bytes) typedef char type##_has_its_size[sizeof(type) == (bytes) ? 1 : -1]
#endif
TQKV__ASSERT_SIZE(tqkv__table_set, 3560);

// ---- src/gpu/sizes.h ----

/* >>metal-sizes: function constants, sizes of dispatches and argument structs; the shaders include it, too */
/* The Metal kernels, tqkv_<family>_d<head_dim>; tqkv_<family>_d<head_dim>_<value_dim> for keys and values that differ.
   A kernel and its function constants make a pipeline. */
#define TQKV_FC_FORMAT       0    /* uint: encode, probe, decode: tqkv_format; encode_kv, attend: that of the keys */
#define TQKV_FC_VALUE_FORMAT 1    /* uint: encode_kv, attend: that of the values */
#define TQKV_FC_ROTATED      2    /* bool: encode, probe: rotate (not for F16 and unrotated); encode_kv: the keys */
                                  /* decode, attend: rotate the centre before it is used */
                                  /* attend_merge that makes a slice: rotate its sums */
#define TQKV_FC_VALUE_ROTATED  3  /* bool: encode_kv: rotate the values; attend_merge: rotate their centre */
#define TQKV_FC_UNROTATE       4  /* bool: decode, rotate, attend_merge: rotate rows back; tables: multiply matrices */
#define TQKV_FC_ROTATE_QUERIES 5  /* bool: attend: keys are rotated, queries are not */
#define TQKV_FC_COLUMNS        6  /* uint: attend: query rows of one KV head in a threadgroup */
#define TQKV_FC_MANY_QUERIES   7  /* bool: attend: n_queries > 1, so columns see different positions */
#define TQKV_FC_SOFTCAP        8  /* bool: attend: scores are capped */
#define TQKV_FC_SAME_SLOTS     9  /* bool: attend: a position has the same slot in keys and values */
#define TQKV_FC_SHORT_STORE    10 /* bool: attend: the keys' capacity is below 32 */
#define TQKV_FC_SINKS          11 /* bool: attend_merge: there are sinks */
#define TQKV_FC_CENTER         12 /* bool: encode, probe, decode: rows have a centre; encode_kv: keys have one */
                                  /* attend, attend_merge: keys have one, and it changes the result */
#define TQKV_FC_VALUE_CENTER 13   /* bool: encode_kv, attend_merge: values have a centre */
#define TQKV_FC_TYPE         14   /* uint: tqkv_type of the rows that encode, probe, attend read; encode_kv: the keys */
                                  /* decode, attend_merge: of the rows that they write */
#define TQKV_FC_VALUE_TYPE 15     /* uint: encode_kv: that of the values */
#define TQKV_FC_PAGES      16     /* bool: encode, decode: slots come from a page table; encode_kv: the keys' */
                                  /* attend: the slots of keys and values */
#define TQKV_FC_VALUE_PAGES  17   /* bool: encode_kv: the values' slots */
#define TQKV_FC_TREE         18   /* bool: attend, attend_list: a tree hides some of the newest n_queries positions */
#define TQKV_FC_BATCH        19   /* bool: attend, attend_merge, attend_list: arguments and offsets come from items */
#define TQKV_FC_FROM_SLICE   20   /* bool: attend_merge: of partial results there is one, a slice: out, max and sum */
#define TQKV_FC_TO_SLICE     21   /* bool: attend_merge: makes a slice; from one: adds it to the one that is there */
#define TQKV_FC_TAIL_FORMAT  22   /* uint: attend: that of the keys' tail; 0: there is none */
#define TQKV_FC_ROTATE_TAIL  23   /* bool: attend: the tail is rotated, queries are not */
#define TQKV_FC_TAIL_CENTER  24   /* bool: attend: as TQKV_FC_CENTER, of the tail */
#define TQKV_FC_TAIL_ROTATED 25   /* bool: attend: rotate the tail's centre before it is used */
#define TQKV_FC_LIST         26   /* bool: attend: queries see listed blocks alone */

#define TQKV_FC_SMALL_PAGES    27 /* bool: attend: some pages end within tiles */
#define TQKV_FC_TAIL_ELSEWHERE 28 /* bool: attend: a position has another slot in the tail than in the keys */

#define TQKV_FC_SCALED 29 /* bool: encode, probe: channels of rows have scales; encode_kv: those of keys */
                          /* decode: rows are multiplied by them; attend: queries are, by those of the keys */
#define TQKV_FC_VALUE_SCALED       30 /* bool: encode_kv: values have scales; attend_merge: the output is multiplied */
#define TQKV_FC_CENTER_SCALED      31 /* bool: decode, attend, attend_merge: divide the centre before it is rotated */
#define TQKV_FC_TAIL_SCALED        32 /* bool: attend: as TQKV_FC_SCALED, of the tail */
#define TQKV_FC_TAIL_CENTER_SCALED 33 /* bool: attend: as TQKV_FC_CENTER_SCALED, of the tail */
#define TQKV_FC_HALVES             34 /* uint: attend: which positions a query sees, TQKV__ALL_POSITIONS or: */
#define TQKV__ALL_POSITIONS        0
#define TQKV__BEFORE_HALVES        1 /* those before its newest halves, or */
#define TQKV__NEWEST_HALVES        2 /* these alone */

#define TQKV_FC_STRANDS 35 /* bool: attend: threadgroups may have strands of stretches */

#define TQKV__CONSTANTS 36 /* of them */
/* Whether a function constant is a uint. */
#define TQKV__IS_NUMBER(constant) \
    ((constant) == TQKV_FC_FORMAT || (constant) == TQKV_FC_VALUE_FORMAT || (constant) == TQKV_FC_COLUMNS || \
     (constant) == TQKV_FC_TYPE || (constant) == TQKV_FC_VALUE_TYPE || (constant) == TQKV_FC_TAIL_FORMAT || \
     (constant) == TQKV_FC_HALVES)

/* Most query rows of a threadgroup of attend: their sums take 64 registers, 8 a lane and row up to D=256. */
#define TQKV__MAX_COLUMNS(D) ((D) <= 256 ? 8 : (D) <= 512 ? 4 : 2)

/* head_dim of the tail that keys of head_dim D may have; 0: none */
#define TQKV__TAIL_DIM(D) ((D) == 448 || (D) == 512 ? 64 : 0)

/* Lanes of a simdgroup that share a row: a lane has its values from all subrows, for the matrix across them. */
#define TQKV__ROW_LANES(D) (TQKV__HAS_MATRIX(D) ? (D) / TQKV__MATRIX_ORDER(D) : 32)

/* Attention by products of 8x8 matrices. Element 0 or 1 of what a lane has of a matrix, Metal's thread_elements(), is
   in this row, and in this column plus 0 or 1. Metal does not promise it: the kernel `tables` multiplies two matrices
   that are set so, and the host leaves attend_matrix alone where their product is another. A shim of a machine with
   another order defines both. Each bit of the lane number changes either the row or the column. */
#ifndef TQKV__MATRIX_ROW
#define TQKV__MATRIX_ROW(lane)    (((lane) >> 4 << 2) | ((lane) >> 1 & 3))
#define TQKV__MATRIX_COLUMN(lane) (((lane) >> 3 & 1) << 2 | ((lane)&1) << 1)
#endif
/* An element of a matrix for that test: below 64, and any two are different. */
#define TQKV__MATRIX_TEST(row, column, seed) (((row)*8 + (column)) * (seed) % 64)

/* Most query rows of a threadgroup of attend_matrix: their sums take 128 registers, 64 at D=256. Of longer rows, whose
   sums TQKV__LONG_SIMDGROUPS share, threadgroup memory holds the queries of 8; a shim may have more. */
#ifndef TQKV__LONG_COLUMNS
#define TQKV__LONG_COLUMNS 8
#endif
#define TQKV__MOST_MATRIX_COLUMNS(D) ((D) <= 128 ? 32 : (D) <= 256 ? 8 : TQKV__LONG_COLUMNS)
#define TQKV__LONG_SIMDGROUPS        8
#define TQKV__LONG_WEIGHT_BYTES(n)   (8192 * (n)) /* of (1): a tile's weights of each simdgroup, or */
#define TQKV__LONG_ROW_BYTES(D)      (16 * (D))   /*     four queries */
#define TQKV__LONG_VALUES            64           /* values of a row a simdgroup */
#define TQKV__MATRIX_SIMDGROUPS      4            /* at most, of a threadgroup */
#define TQKV__MATRICES(columns) \
    ((columns) <= 8 ? 1 : (columns) <= 16 ? 2 : (columns) <= 32 ? 4 : 8) /* that hold them */

/* Threadgroup memory, in bytes. Attend takes all four. */
#define TQKV__CELL_BYTES 3120 /* (0) of encode: cells of the codebook */
                              /* (1) of encode, (0) of probe: with a matrix */
                              /*     the rows of n simdgroups */
#define TQKV__ROW_BYTES(D, n) (TQKV__HAS_MATRIX(D) ? (n)*128 * (TQKV__MATRIX_ORDER(D) + 1) : 0)
#define TQKV__TABLE_BYTES     1024 /* (0) of decode: a codebook */
                                   /* (2) of encode: squares of its centroids */
#define TQKV__ATTEND_TABLE_BYTES \
    (2 * TQKV__TABLE_BYTES)                       /* (0) codebooks of keys and values; TABLE_BYTES for a tail's */
#define TQKV__QUERY_FLOATS(D)       (3 * (D) / 2) /* (1) of attend: a padded query */
#define TQKV__ATTEND_PASS_FLOATS(D) ((D) <= 256 ? 512 : 256) /* (2) of a simdgroup: a tile's weights, then sums */
#define TQKV__ATTEND_SUM_BYTES(D, columns) \
    ((columns) * (D) <= 256 && (columns) <= 4 \
         ? 1024 \
         : 4 * TQKV__ATTEND_PASS_FLOATS(D))          /* of a pass, or of all columns; of a strand weights and shares */
#define TQKV__MATRIX_QUERY_BYTES(D) (32 * (D))       /* (1) of attend_matrix: 8 queries, and */
#define TQKV__MATRIX_SUM_BYTES(D)   (64 * ((D) + 4)) /*     padded sums of 4 simdgroups and columns */
#define TQKV__COLUMN_BYTES(columns) (56 * (columns)) /* (3) of attend and attend_matrix: 14 numbers a column, and */
#define TQKV__STRAND_BLOCKS(D) \
    ((D) <= 128 ? 1 : 2) /* norms of a row of values, at most, where attend_matrix has strands */
#define TQKV__MATRIX_STRAND_BYTES(D, n) \
    ((D) <= 128 ? 8192 * (n) : 12288 * (n))        /* (1): factors and weights of four tiles */
#define TQKV__STATE_BYTES(columns) (8 * (columns)) /*     maximum and sum of a simdgroup */
#define TQKV__SLOT_BYTES(lists)    (256 * (lists)) /*     slots of a tile and the next one, in so many lists: */
#define TQKV__SLOT_LISTS(apart, same_slots, tail_elsewhere) \
    (((apart) ? (same_slots) ? 1 : 2 : 0) + ((tail_elsewhere) ? 1 : 0)) /* keys, values, tail, where rows lie apart */
#define TQKV__MERGE_BYTES(D, n) ((n) * ((D) + 4) * 4)                   /* (0) a row and its sum, n simdgroups */

/* Attention cuts the context at fixed slots of the keys into stretches with sums of their own: the first n_short have
   `length` tiles of 32 slots, the others TQKV__STRETCH_GROWTH times as many. TQKV__SECTION of them, counted from slot
   0, are a section. The stretches of a section are added in order, then the sections. */
#define TQKV__STRETCH_GROWTH      4
#define TQKV__SECTION             16
#define TQKV__MOST_STRAND_COLUMNS 16 /* by matrices */
#define TQKV__STRANDS             4  /* of a stretch of `length` tiles: what the simdgroups of attend add up */
#define TQKV__STRETCH_OF_TILE(tile, length, n_short) \
    ((tile) / (length) < (n_short) ? (tile) / (length) \
                                   : (n_short) + ((tile) - (n_short) * (length)) / (TQKV__STRETCH_GROWTH * (length)))

/* Counts of a digit in index_choice, and sums of neighbouring ones. Scratch of a query, in words, where it has chunks:
   the counts and sums of each, a header, and two words a block. */
#define TQKV__CHOOSE_COUNTS 4096
#define TQKV__CHOOSE_SUMS   64
#define TQKV__CHOOSE_HEADER 4
#define TQKV__CHOOSE_SCRATCH(chunks, blocks) \
    ((chunks) * (TQKV__CHOOSE_COUNTS + TQKV__CHOOSE_SUMS) + TQKV__CHOOSE_HEADER + 2 * (blocks))
/* Steps: a chunk counts, a chunk gathers, the choice among the gathered blocks, the choice among all. */
#define TQKV__CHOOSE_COUNT  0
#define TQKV__CHOOSE_GATHER 1
#define TQKV__CHOOSE_AMONG  2
#define TQKV__CHOOSE_ALONE  3

/* Rows of a simdgroup in encode, encode_kv and probe: 4 passes over the rows that fit side by side, 8 up to D=128. */
#define TQKV__ENCODE_ROWS(D) (TQKV__HAS_MATRIX(D) ? 128 / TQKV__ROW_LANES(D) : (D) == 32 ? 64 : 4096 / (D))

/* Simdgroups that share a row's sections in attend_merge: 8 KiB of threadgroup memory; a shim may have more. */
#ifndef TQKV__MERGE_VALUES
#define TQKV__MERGE_VALUES 2048
#endif
#define TQKV__MERGE_SIMDGROUPS(D) ((D) <= TQKV__MERGE_VALUES / 8 ? 8 : TQKV__MERGE_VALUES / (D))

/* The sizes above for kernels of head_dim D. The host refuses a library with other sizes. */
#define TQKV__KERNEL_SIZES(D) \
    TQKV__MAX_COLUMNS(D), TQKV__ENCODE_ROWS(D), TQKV__MERGE_SIMDGROUPS(D), TQKV__CELL_BYTES, TQKV__TABLE_BYTES, \
        TQKV__ROW_BYTES(D, 1), TQKV__QUERY_FLOATS(D), TQKV__ATTEND_PASS_FLOATS(D), TQKV__ATTEND_SUM_BYTES(D, 1), \
        TQKV__MERGE_BYTES(D, 1), TQKV__TAIL_DIM(D), TQKV__STRETCH_GROWTH, TQKV__SECTION, TQKV__MOST_MATRIX_COLUMNS(D), \
        TQKV__MATRIX_QUERY_BYTES(D), TQKV__MATRIX_SUM_BYTES(D), TQKV__COLUMN_BYTES(1), TQKV__STATE_BYTES(1), \
        TQKV__LONG_WEIGHT_BYTES(1), TQKV__SLOT_BYTES(1)
enum { TQKV__KERNEL_DIMS = 11, TQKV__N_KERNEL_SIZES = 20 };

/* The values of head_dim that have kernels, as row(x, number, D). Besides, keys of TQKV__WIDE_KEYS take values of
   TQKV__NARROW_VALUES in encode_kv and attend, and keys of D a tail of TQKV__TAIL_DIM(D): encode_kv takes it for
   values. */
#define TQKV__KERNELS(row, x) \
    row(x, 0, 32) row(x, 1, 48) row(x, 2, 64) row(x, 3, 80) row(x, 4, 96) row(x, 5, 128) row(x, 6, 192) row(x, 7, 256) \
        row(x, 8, 448) row(x, 9, 512) row(x, 10, 1024)
#define TQKV__WIDE_KEYS     192
#define TQKV__NARROW_VALUES 128
/* head_dim number i of the kernels, or 0; whether D has kernels */
#define TQKV__KERNEL_DIM(i)              (TQKV__KERNELS(TQKV__KERNEL_DIM_OF, i) 0)
#define TQKV__HAS_KERNELS(D)             (TQKV__KERNELS(TQKV__HAS_KERNELS_OF, D) false)
#define TQKV__KERNEL_DIM_OF(i, n, size)  (i) == n ? size:
#define TQKV__HAS_KERNELS_OF(D, n, size) (D) == size ||

/* Rows of one stream. Token t is at slot first_slot + t, minus capacity if that is beyond the store. The host resolves
   positions; it passes at most `capacity` tokens and fewer than 2^32 rows. With a page table first_slot is a position,
   and an entry that is none of the store's pages leaves its tokens out. */
typedef struct tqkv__rows_args {
    int32_t n_tokens; /* source or destination is [n_tokens][n_kv_heads][head_dim] */
    int32_t n_kv_heads;
    int32_t capacity;   /* positions of the store */
    int32_t first_slot; /* in [0, capacity) */
    float block_scale;  /* not 0 */
    int32_t page_size;  /* read if TQKV_FC_PAGES, and n_pages: of the store */
    int32_t n_pages;
    uint32_t token_stride, head_stride; /* of source or destination, in values */
    int32_t
        has_flag; /* not_finite is there to be written: by rows that are not finite, or (2) that halves do not hold */
} tqkv__rows_args;

typedef struct tqkv__rotate_args {
    int32_t n_rows; /* of head_dim values */
} tqkv__rotate_args;

/* attend, over kv_len resident positions counted from the oldest, which is at oldest_slot; slots wrap at capacity. With
   page tables the slots here are positions, and a table says where their pages lie. */
typedef struct tqkv__attend_args {
    int32_t n_queries;
    int32_t n_kv_heads;
    int32_t group; /* query heads a KV head */
    int32_t kv_len;
    int32_t window;                 /* a query sees the last `window` positions up to its newest; 0: all up to it */
    int32_t slice_end;              /* positions from here on are not seen; kv_len, or less in a slice */
    int32_t first_stretch;          /* that a query sees */
    int32_t stretch_tiles, n_short; /* TQKV__STRETCH_OF_TILE */
    int32_t n_splits;               /* threadgroups along the context */
    int32_t sections_each;          /* of a threadgroup; 0: that of split i has only stretch first_stretch + i */
    int32_t strands; /* 1, or of a stretch: that of split i has only strand i % strands of stretch i / strands */
    int32_t key_capacity, key_oldest_slot;
    int32_t value_capacity, value_oldest_slot;
    float scale;                              /* not 0 */
    float softcap;                            /* read if TQKV_FC_SOFTCAP */
    float key_block_scale, value_block_scale; /* not 0 */
    int32_t key_slots, value_slots;       /* of a KV head in memory: the capacity or, with pages, that of the pool */
    int32_t key_page_size, key_last_page; /* read if TQKV_FC_PAGES; the last page of the pool */
    int32_t value_page_size, value_last_page;
    uint32_t key_page_factor, value_page_factor; /* page of a tile: the upper word of the product of tile and factor, */
    int32_t key_page_shift, value_page_shift;    /* shifted to the right */
    int32_t first_of_tree; /* read if TQKV_FC_TREE: position kv_len - n_queries, or INT_MAX without a tree */
    /* Of lists: read if TQKV_FC_LIST, and by attend_list. Blocks count from that of the oldest resident position. */
    int32_t list_heads, list_row;    /* integers of a row that attend_list wrote */
    int32_t list_shift, list_inside; /* a block is 1 << shift positions, and that position is number `inside` of its */
    int32_t list_base, list_slots;   /* slot of that block's first position; from list_slots on there is none */
    int32_t list_newest, list_first_block;          /* positions that are seen beside the list; number of that block */
    int32_t first_newest;                           /* the newest position of query i is first_newest + i */
    uint32_t query_token_stride, query_head_stride; /* in values */
    int32_t tail_slots;                             /* of a KV head in memory, as key_slots */
    int32_t tail_capacity, tail_oldest_slot;        /* read if TQKV_FC_TAIL_ELSEWHERE */
    /* Read if TQKV_FC_HALVES: a query's newest halves begin exact_last positions before the one behind its newest, but
       not before exact_from. */
    int32_t exact_last, exact_from;
} tqkv__attend_args;

/* attend_list has the arguments of attend. A row of a list has list_row - TQKV__LIST_HEADER entries. A row that it
   writes: how many ranks there are, how many entries come before the newest blocks, the first of these, the position
   before which they are not seen, the position of rank 0 in blocks, times their size; then the entries. */
#define TQKV__LIST_HEADER 8

typedef struct tqkv__merge_args {
    int32_t n_rows;  /* n_queries * n_heads */
    int32_t n_heads; /* row r is of head r modulo n_heads */
    int32_t group;   /* query heads a KV head */
    int32_t n_partials;
    int32_t section;         /* partial results of a section: TQKV__SECTION or, if they are sections, 1; or strands */
    int32_t strands;         /* 1, or of a stretch: all stretches are of one section */
    int32_t before;          /* those of the first section that are left out */
    int32_t n_first, n_last; /* partial results of the first and last positions, before and behind the others */
    uint32_t out_token_stride, out_head_stride; /* in values */
} tqkv__merge_args;

/* index_choice: a query sees the keys before seen + (seen_rest + its number) / ratio. */
typedef struct tqkv__choose_args {
    int32_t seen, seen_rest, ratio;
    int32_t end;             /* keys */
    int32_t block, n_blocks; /* keys a block; blocks of a row of scores */
    int32_t from;            /* the block of the first resident key */
    int32_t k, first, newest;
    int32_t chunk, n_chunks; /* blocks of a threadgroup, from `from` on; chunks of a row */
    int32_t step;            /* TQKV__CHOOSE_COUNT to TQKV__CHOOSE_ALONE */
} tqkv__choose_args;

/* index_scores. `keys` is that of a call whose heads are those of the index; its resident positions are the keys from
   number first_key on. */
#define TQKV__INDEX_KEYS 1024 /* whose scores are in threadgroup memory at a time */
#ifndef TQKV__INDEX_COLUMNS   /* heads of a pass: threadgroup memory holds their queries. A shim may have more */
#define TQKV__INDEX_COLUMNS 32
#endif
#define TQKV__POOL_MEAN 1 /* tqkv_pool */
typedef struct tqkv__index_args {
    tqkv__attend_args keys;
    int32_t seen, seen_rest, ratio, end, block, n_blocks; /* as in tqkv__choose_args */
    int32_t first_key;
    int32_t blocks_each; /* of a threadgroup: TQKV__INDEX_KEYS keys at most, or one block */
    int32_t pool, relu, has_weights;
} tqkv__index_args;

/* One call of a batch. The threadgroups of attend number groups of query rows first, then splits, then items. Offsets
   are from where the buffer is bound, in units of: */
#define TQKV__ROWS_UNIT  2  /* bytes: q and out */
#define TQKV__CODES_UNIT 16 /* codes; all others 4 */
typedef struct tqkv__batch_item {
    tqkv__attend_args attend;
    tqkv__merge_args merge;
    int32_t n_items, first_group, first_row,
        first_list; /* of the batch; threadgroups, query rows and rows of lists of the */
                    /* items before */
    uint32_t q, key_codes, key_norms, value_codes, value_norms, partial_out, partial_state, key_center;
    uint32_t key_pages, value_pages, tree, out, value_center, tail_codes, tail_norms, tail_center;
    uint32_t list, list_rows; /* list_rows: in the buffer of partial_out */
    uint32_t key_scale, tail_scale, value_scale;
} tqkv__batch_item;

/* learn_scales: centre and scales of the channels of a KV head, from rows and, if there are any, queries. */
typedef struct tqkv__calibrate_args {
    int32_t head_dim, n_tokens, n_queries, n_kv_heads;
    int32_t group;                                                             /* query heads a KV head */
    int32_t pairs;                                                             /* tqkv_pairs, of the first */
    int32_t rotary_dim;                                                        /* channels */
    uint32_t token_stride, head_stride, query_token_stride, query_head_stride; /* in values */
    /* Of a cache that learns: it takes the rows of new positions, which its values show. value_dim 0: all rows */
    int32_t value_dim;
    int32_t n_exact, least_rest; /* the first n_exact are left out if at least least_rest new ones remain */
    int32_t least_new;           /* with fewer all rows count, for scales in [1/2, 3/2] */
    uint32_t value_token_stride, value_head_stride;
} tqkv__calibrate_args;

/* The structs that C and the shaders share. */
#define TQKV__SHARED_STRUCTS(row) \
    row(table_set) row(rows_args) row(rotate_args) row(attend_args) row(merge_args) row(batch_item) row(choose_args) \
        row(index_args) row(calibrate_args)
enum { TQKV__N_SHARED_STRUCTS = 9 };

/* Output of the kernel `tables`: the tables and sizes that the shaders were compiled with. */
typedef struct tqkv__table_report {
    uint32_t table_version;
    uint32_t struct_sizes[TQKV__N_SHARED_STRUCTS];
    tqkv__table_set tables;
    int32_t kernel_sizes[TQKV__KERNEL_DIMS][TQKV__N_KERNEL_SIZES];
    float matrix_product[32][2]; /* each lane's elements of TQKV__MATRIX_TEST with seed 3, times that with seed 5 */
} tqkv__table_report;

TQKV__ASSERT_SIZE(tqkv__rows_args, 40);
TQKV__ASSERT_SIZE(tqkv__rotate_args, 4);
TQKV__ASSERT_SIZE(tqkv__attend_args, 188);
TQKV__ASSERT_SIZE(tqkv__merge_args, 44);
TQKV__ASSERT_SIZE(tqkv__batch_item, 332);
TQKV__ASSERT_SIZE(tqkv__choose_args, 52);
TQKV__ASSERT_SIZE(tqkv__index_args, 232);
TQKV__ASSERT_SIZE(tqkv__calibrate_args, 68);
TQKV__ASSERT_SIZE(tqkv__table_report, 4736);

// ---- shaders/common.h ----

// Every shader begins with this file. The language is Metal 3.0. tests/metal also compiles the shaders as C++ and CUDA,
// so every helper is inline, every pointer names its address space, and kernels are plain functions over templates.
#ifndef TQKV_COMMON_H
#define TQKV_COMMON_H
#include <metal_stdlib>
using namespace metal;

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

// ---- shaders/types.h ----

// The caller's rows: their three types, and how a row lies over the lanes of a simdgroup. Everything in integers: a
// GPU's own conversions may round differently or flush small halves.
#ifndef TQKV_TYPES_H
#define TQKV_TYPES_H

// ---- Types ----

// The value of a half or a bfloat16. `type` is a function constant wherever it is passed.
inline float widened(uint type, uint bits)
{
    if (type == TQKV_TYPE_BF16) return as_type<float>(bits << 16);
    uint sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    uint subnormal = as_type<uint>(float(magnitude) * (1.0f / 16777216.0f)); // a multiple of 2^-24
    uint normal = (magnitude << 13) + (magnitude < 0x7c00u ? 0x38000000u : 0x70000000u);
    return as_type<float>(sign | (magnitude < 0x400u ? subnormal : normal));
}

// The nearest IEEE half, ties to even, clamped to +-65504.
inline uint half_bits(float x)
{
    uint word = as_type<uint>(x), sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
    if (magnitude >= 0x477fe000u) return sign | 0x7bffu;
    bool subnormal = magnitude < 0x38800000u; // below 2^-14: a multiple of 2^-24
    uint bits = subnormal ? (magnitude & 0x7fffffu) | 0x800000u : magnitude - 0x38000000u;
    uint shift = subnormal ? min(126u - (magnitude >> 23), 25u) : 13u;
    return sign | ((bits + (1u << (shift - 1u)) - 1u + ((bits >> shift) & 1u)) >> shift);
}

// The nearest half or bfloat16, ties to even; beyond the largest one infinity. NaN keeps its upper bits and is quiet.
inline uint narrowed(uint type, float x)
{
    uint word = as_type<uint>(x), sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
    bool nan = magnitude > 0x7f800000u;
    if (type == TQKV_TYPE_BF16) return nan ? (word >> 16) | 0x40u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    if (nan) return sign | 0x7e00u | ((word >> 13) & 0x3ffu);
    return magnitude >= 0x477ff000u ? sign | 0x7c00u : half_bits(x);
}

// ---- Neighbouring values. The caller's buffers have the alignment of one value ----

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

template <int N>
inline void load_narrow(uint type, device const ushort *from, thread float *x)
{
    uint bits[N];
    if (N % 4 == 0) {
        TQKV_UNROLL
        for (int i = 0; i < N / 4; i++) {
            packed_ushort4 four = ((device const packed_ushort4 *)from)[i];
            bits[4 * i] = uint(four.x);
            bits[4 * i + 1] = uint(four.y);
            bits[4 * i + 2] = uint(four.z);
            bits[4 * i + 3] = uint(four.w);
        }
    } else {
        TQKV_UNROLL
        for (int i = 0; i < N; i++) bits[i] = uint(from[i]);
    }
    TQKV_UNROLL
    for (int i = 0; i < N; i++) x[i] = widened(type, bits[i]);
}

// ---- A row over lanes: L lanes, pieces of C values a lane. lane: among the row's lanes ----

// The place in the row of the lane's value i.
template <int L, int C>
inline uint value_of_lane(uint lane, int i)
{
    return (uint(i / C * L) + lane) * uint(C) + uint(i % C);
}

template <int D, int L, int C>
inline void load_pieces(device const float *row, uint lane, thread float *x)
{
    TQKV_UNROLL
    for (int j = 0; j < TQKV_PIECES(D, L, C); j++) load_floats<C>(row + (uint(j * L) + lane) * uint(C), x + j * C);
}

// first: the row's first value in rows
template <int D, int L, int C>
inline void load_typed_pieces(uint type, device const uchar *rows, ulong first, uint lane, thread float *x)
{
    if (type == TQKV_TYPE_F32) {
        load_pieces<D, L, C>((device const float *)rows + first, lane, x);
    } else {
        device const ushort *row = (device const ushort *)rows + first;
        TQKV_UNROLL
        for (int j = 0; j < TQKV_PIECES(D, L, C); j++)
            load_narrow<C>(type, row + (uint(j * L) + lane) * uint(C), x + j * C);
    }
}

template <int D>
inline void load_row(device const float *row, uint lane, thread float *x)
{
    load_pieces<D, TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D)>(row, lane, x);
}

template <int D>
inline void load_typed_row(uint type, device const uchar *rows, ulong first, uint lane, thread float *x)
{
    load_typed_pieces<D, TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D)>(type, rows, first, lane, x);
}

template <int D>
inline void store_typed_row(uint type, thread const float *x, uint lane, device uchar *rows, ulong first)
{
    device float *row = (device float *)rows + first;
    device ushort *narrow_row = (device ushort *)rows + first;
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) {
        uint at = value_of_lane<TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D)>(lane, i);
        if (type == TQKV_TYPE_F32)
            row[at] = x[i];
        else
            narrow_row[at] = ushort(narrowed(type, x[i]));
    }
}

#endif

// ---- shaders/codec.h ----

// The codec, once for all kernels: how a format lies in memory, how values become codes and codes become values.
// `format` is a function constant wherever it is passed, so a pipeline keeps one side of every branch on it.
#ifndef TQKV_CODEC_H
#define TQKV_CODEC_H

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

// ---- shaders/tiles.h ----

// Which query rows and which tiles of the context a threadgroup of attend works on. Positions are counted from the
// oldest resident one. A tile is a range of 32 slots, not of positions, so a ring does not wrap inside a tile. Only the
// mask knows positions. With page tables a slot here is what it would be in a linear store, and a tile lies in one
// page: only tile_memory knows where. Pages that end within tiles, and lists, make rows lie anywhere: then each lane
// finds where one row of the tile is, and all read its slot from threadgroup memory, or ask the lane. With a list of
// blocks the positions of the blocks have ranks 0, 1, 2 .., and take the slots from list_base on, one after the other:
// a tile is 32 of these slots, whose rows may lie anywhere. A list of all blocks gives the tiles that there are without
// one.
#ifndef TQKV_TILES_H
#define TQKV_TILES_H

constant uint columns [[function_constant(TQKV_FC_COLUMNS)]];
constant bool many_queries [[function_constant(TQKV_FC_MANY_QUERIES)]];
constant bool same_slots [[function_constant(TQKV_FC_SAME_SLOTS)]];
constant bool short_store [[function_constant(TQKV_FC_SHORT_STORE)]];
constant bool paged [[function_constant(TQKV_FC_PAGES)]];
constant bool has_tree [[function_constant(TQKV_FC_TREE)]];
constant bool batch [[function_constant(TQKV_FC_BATCH)]];
constant bool has_list [[function_constant(TQKV_FC_LIST)]];
constant bool small_pages [[function_constant(TQKV_FC_SMALL_PAGES)]];
constant bool tail_elsewhere [[function_constant(TQKV_FC_TAIL_ELSEWHERE)]];
constant uint halves [[function_constant(TQKV_FC_HALVES)]];
constant bool has_strands [[function_constant(TQKV_FC_STRANDS)]];

// Whether rows of a tile lie anywhere: of the keys and values, and of the tail.
inline bool rows_apart() { return has_list || small_pages; }
inline bool tail_rows_apart() { return rows_apart() || tail_elsewhere; }

inline int position_of_slot(constant tqkv__attend_args &args, uint slot)
{
    int position = int(slot) - args.key_oldest_slot;
    return position < 0 ? position + args.key_capacity : position;
}

// Row r of a tile, or the last row of a store that is shorter than a tile.
inline uint existing_row(constant tqkv__attend_args &args, uint r)
{
    return short_store ? min(r, uint(args.key_capacity) - 1u) : r;
}

// The values' slot of the position at this slot of the keys. Where the slot has no position: any slot of the store.
inline uint value_slot_of(constant tqkv__attend_args &args, uint slot)
{
    if (same_slots || paged) return slot;
    int at = args.value_oldest_slot + max(min(position_of_slot(args, slot), args.slice_end - 1), 0);
    return uint(at < args.value_capacity ? at : at - args.value_capacity);
}

// The tail's slot of a position. Of one that no query sees: any slot of the store.
inline uint tail_slot_of(constant tqkv__attend_args &args, int position)
{
    int at = args.tail_oldest_slot + max(min(position, args.slice_end - 1), 0);
    return uint(at < args.tail_capacity ? at : at - args.tail_capacity);
}

// The query row of a column. A column beyond the last row repeats the last row, and is not written.
struct query_row {
    int query, head; // head of the group
};

inline query_row row_of_column(constant tqkv__attend_args &args, uint column)
{
    uint row = min(column, uint(args.n_queries) * uint(args.group) - 1u);
    query_row result;
    result.query = many_queries ? int(row / uint(args.group)) : 0;
    result.head = many_queries ? int(row % uint(args.group)) : int(row);
    return result;
}

inline query_row next_row(constant tqkv__attend_args &args, query_row row)
{
    row.head++;
    if (row.head < args.group) return row;
    row.head = 0;
    row.query++;
    return row;
}

// The newest position that a query sees; negative if it sees none.
inline int newest_seen(constant tqkv__attend_args &args, int query) { return args.first_newest + query; }

// Whether a query that sees up to `newest` reads a position in this part of the context: of the newest halves those of
// its own, of the codes those before. So what it reads does not depend on the other queries of the call.
inline bool reads_here(constant tqkv__attend_args &args, int newest, int position)
{
    if (halves == TQKV__ALL_POSITIONS) return true;
    bool before = position < halves_begin(args, newest);
    return halves == TQKV__BEFORE_HALVES ? before : !before;
}

// Whether the tree shows a position to the query that sees up to `newest`. tree: [n_queries][2], lower words first
inline bool tree_shows(constant tqkv__attend_args &args, device const uint *tree, int newest, int position)
{
    if (position < args.first_of_tree) return true;
    uint query = uint(newest - args.first_of_tree), bit = uint(position - args.first_of_tree);
    return (tree[query * 2u + bit / 32u] >> (bit % 32u) & 1u) != 0;
}

// A row that attend_list wrote, of the query of a threadgroup.
struct listed_blocks {
    device const int *blocks; // [n_before], then all from `recent` on, whose positions before `hidden` are not seen
    int n_ranks, n_before, recent, hidden;
    int base; // slot of rank 0
};

inline void open_list(constant tqkv__attend_args &args, device const int *rows, uint query, uint kv_head,
                      thread listed_blocks &list)
{
    uint heads = uint(args.list_heads), head = heads > 1u ? kv_head : 0u;
    device const int *row = rows + row_offset(query * heads + head, uint(args.list_row));
    list.blocks = row + TQKV__LIST_HEADER;
    list.n_ranks = row[0];
    list.n_before = row[1];
    list.recent = row[2];
    list.hidden = row[3];
    list.base = args.list_base + row[4];
}

// The position of row `row` of a tile; newer than all queries if it is not seen, or in another tile.
inline int listed_position(constant tqkv__attend_args &args, thread const listed_blocks &list, uint tile, uint row)
{
    uint slots = uint(args.list_slots), slot = (slots < 32u ? 0u : min(tile * 32u, slots - 32u)) + row;
    int rank = int(slot) - list.base;
    if (slot < tile * 32u || rank < 0 || rank >= list.n_ranks) return 0x7fffffff;
    int entry = rank >> args.list_shift, from = entry - list.n_before;
    int block = from < 0 ? list.blocks[entry] : list.recent + from;
    int position = (block << args.list_shift) + (rank & ((1 << args.list_shift) - 1)) - args.list_inside;
    return position < 0 || (from >= 0 && position < list.hidden) ? 0x7fffffff : position;
}

// The tiles of the store that some of the threadgroup's columns sees: [begin, end) without [gap_begin, gap_end). A ring
// that wraps has a gap if its newest positions, in the first slots, do not meet the oldest ones.
struct tile_range {
    uint begin, end, gap_begin, gap_end;
};

inline tile_range tiles_seen(constant tqkv__attend_args &args, uint first_column, thread const listed_blocks &list)
{
    if (has_list) {
        uint first = uint(list.base);
        tile_range listed = {first / 32u, (first + uint(list.n_ranks) + 31u) / 32u, 0u, 0u};
        return listed;
    }
    int last = newest_seen(args, row_of_column(args, first_column + columns - 1u).query);
    int first = newest_seen(args, row_of_column(args, first_column).query), newest = min(last, args.slice_end - 1);
    int oldest = args.window == 0 ? 0 : max(first - args.window + 1, 0);
    if (halves == TQKV__BEFORE_HALVES) newest = min(newest, halves_begin(args, last) - 1);
    if (halves == TQKV__NEWEST_HALVES) oldest = max(oldest, halves_begin(args, first));
    uint capacity = uint(args.key_capacity), slot = uint(args.key_oldest_slot) + uint(oldest);
    slot = slot < capacity ? slot : slot - capacity;
    uint before_end = capacity - slot, n = newest < oldest ? 0u : uint(newest - oldest) + 1u;
    bool wraps = n > before_end;
    tile_range seen;
    seen.begin = wraps ? 0u : slot / 32u;
    seen.end = n == 0 ? seen.begin : ((wraps ? capacity : slot + n) + 31u) / 32u;
    seen.gap_begin = wraps ? (n - before_end + 31u) / 32u : 0u;
    seen.gap_end = wraps ? max(slot / 32u, seen.gap_begin) : 0u;
    return seen;
}

// The first tile from `tile` on that is the simdgroup's. The number of a tile decides that alone, so a row's sums do
// not depend on what the threadgroup's other columns see.
inline uint own_tile(uint tile, uint simdgroup, uint n_simdgroups)
{
    return tile + (simdgroup + n_simdgroups - tile % n_simdgroups) % n_simdgroups;
}

inline uint stretch_of_tile(constant tqkv__attend_args &args, uint tile)
{
    return TQKV__STRETCH_OF_TILE(tile, uint(args.stretch_tiles), uint(args.n_short));
}

inline uint first_tile_of_stretch(constant tqkv__attend_args &args, uint stretch)
{
    uint n_short = min(stretch, uint(args.n_short));
    return (n_short + (stretch - n_short) * TQKV__STRETCH_GROWTH) * uint(args.stretch_tiles);
}

// The stretches that a threadgroup sums up, [begin, end): at least one, perhaps without a tile that it sees.
struct stretch_range {
    uint begin, end;
};

inline stretch_range stretches_of_threadgroup(constant tqkv__attend_args &args, tile_range seen, uint split)
{
    stretch_range own;
    own.begin = uint(args.first_stretch) + split;
    own.end = own.begin + 1u;
    if (args.sections_each == 0) return own;
    own.begin = (uint(args.first_stretch) / TQKV__SECTION + split * uint(args.sections_each)) * TQKV__SECTION;
    own.end = own.begin + 1u;
    uint limit = own.begin + uint(args.sections_each) * TQKV__SECTION, first = stretch_of_tile(args, seen.begin);
    uint end = seen.begin < seen.end ? stretch_of_tile(args, seen.end - 1u) + 1u : 0u;
    if (first >= limit || end <= own.begin) return own;
    own.begin = max(own.begin, first);
    own.end = min(limit, end);
    return own;
}

// A tile always loads 32 rows. The last tile of the store is moved back to end with it: its first rows then belong to
// the tile before. The rows that a short store lacks belong to no tile.
inline uint first_slot_of_tile(constant tqkv__attend_args &args, uint number)
{
    return short_store && args.key_capacity < 32 ? 0u : min(number * 32u, uint(args.key_capacity) - 32u);
}

// The position of a tile's row; newer than all queries if the row belongs to another tile or slice.
inline int position_in_tile(constant tqkv__attend_args &args, uint number, uint row)
{
    uint first = first_slot_of_tile(args, number);
    int position = position_of_slot(args, first + existing_row(args, row));
    bool own = first + row >= number * 32u && first + row < uint(args.key_capacity) && position < args.slice_end;
    return own ? position : 0x7fffffff;
}

// The tiles of one simdgroup, one after another.
struct tile_steps {
    uint tile;                 // the next one
    uint gap_begin, after_gap; // from gap_begin on it goes on with tile after_gap
};

inline uint step_over(uint tile, uint gap_begin, uint after_gap)
{
    return tile < gap_begin ? tile : max(tile, after_gap);
}

// From the first tile of the stretches on.
inline tile_steps open_steps(constant tqkv__attend_args &args, tile_range seen, stretch_range own, uint simdgroup,
                             uint n_simdgroups)
{
    tile_steps steps;
    uint first = own_tile(max(seen.begin, first_tile_of_stretch(args, own.begin)), simdgroup, n_simdgroups);
    steps.gap_begin = seen.gap_begin;
    steps.after_gap = own_tile(seen.gap_end, simdgroup, n_simdgroups);
    steps.tile = step_over(first, steps.gap_begin, steps.after_gap);
    return steps;
}

inline void next_tile(thread tile_steps &steps, uint n_simdgroups)
{
    steps.tile = step_over(steps.tile + n_simdgroups, steps.gap_begin, steps.after_gap);
}

// The sums of a stretch go to the partial result of its section and, at the section's end, with those to the result of
// all, partial result 0. So every way to share the stretches among threadgroups does the same additions in the same
// order.
inline uint partial_of_section(constant tqkv__attend_args &args, uint split)
{
    return args.sections_each > 1 ? 1u : split;
}

// Then the sums are copied, not added.
inline bool begins_section(stretch_range own, uint stretch)
{
    return stretch == own.begin || stretch % TQKV__SECTION == 0;
}

// Whether the section ends and is not itself the result of all.
inline bool ends_section(constant tqkv__attend_args &args, stretch_range own, uint stretch)
{
    bool last = stretch + 1u == own.end || (stretch + 1u) % TQKV__SECTION == 0;
    return args.sections_each > 1 && last;
}

// Then the section is copied to the result of all, not added.
inline bool in_first_section(stretch_range own, uint stretch)
{
    return stretch / TQKV__SECTION == own.begin / TQKV__SECTION;
}

// Lists of slots that a tile has where its rows lie apart: of keys and, if they differ, of values and of the tail.
inline uint slot_lists() { return uint(TQKV__SLOT_LISTS(rows_apart(), same_slots, tail_elsewhere)); }

struct page_tables {
    device const int *keys, *values; // [n_pages]
    listed_blocks list;
    uint lane, simdgroup;
    bool shared, shared_values; // slots go through `slots`: shuffles by differing lanes are slow on Apple's GPUs
    threadgroup uint *slots;    // [n_simdgroups][2][slot_lists()][32]: of two tiles of each, one after the other
};

// Slots in memory of a tile's row 0. That of the values is theirs only where value_slot_of gives the slot itself. Where
// rows lie apart those of the row with the lane's number, or after share_slots where their list begins; with a list of
// blocks also the row's position. The tail's: that of the keys or, if it lies elsewhere, likewise.
struct tile_memory {
    uint keys, values;
    int position;
    uint tail;
};

// Where rows lie apart, the slot of one. All lanes of the simdgroup must come here together.
inline uint slot_apart(thread const page_tables &pages, bool shared, uint base, uint row)
{
    return shared ? pages.slots[base + row] : simd_shuffle(base, ushort(row));
}

// Slots in memory of a row of a tile. apart: rows_apart() or, of a tail, tail_rows_apart(). As slot_apart.
inline uint key_slot(constant tqkv__attend_args &args, thread const page_tables &pages, bool apart, uint base, uint row)
{
    return apart ? slot_apart(pages, pages.shared, base, row) : base + existing_row(args, row);
}

inline uint value_slot(constant tqkv__attend_args &args, thread const page_tables &pages, uint base, uint row)
{
    if (rows_apart()) return slot_apart(pages, pages.shared_values, base, row);
    return value_slot_of(args, base + existing_row(args, row));
}

// Codes of such a row, of `bytes` each. As one sum, so that the part of all rows is computed once.
inline device const uchar *key_codes(constant tqkv__attend_args &args, thread const page_tables &pages, bool apart,
                                     device const uchar *codes, uint bytes, uint base, uint row)
{
    if (apart) return codes + ulong(slot_apart(pages, pages.shared, base, row)) * ulong(bytes);
    return codes + ulong(base) * ulong(bytes) + existing_row(args, row) * bytes;
}

inline device const uchar *value_codes(constant tqkv__attend_args &args, thread const page_tables &pages,
                                       device const uchar *codes, uint bytes, uint base, uint row)
{
    if (rows_apart() || !(same_slots || paged)) return codes + ulong(value_slot(args, pages, base, row)) * ulong(bytes);
    return codes + ulong(base) * ulong(bytes) + existing_row(args, row) * bytes;
}

// A tile is opened before it is known whether some query sees it: its entry may be anything.
inline uint slot_in_pages(device const int *pages, int page_size, uint factor, int shift, int last_page, uint tile)
{
    uint at = uint((ulong(tile) * ulong(factor)) >> 32) >> uint(shift);
    uint page = min(uint(pages[at]), uint(last_page));
    return (page - at) * uint(page_size) + tile * 32u;
}

// Through the tables: where the rows of the tile with slot `first` begin.
inline tile_memory find_in_pages(constant tqkv__attend_args &args, thread const page_tables &pages, uint first)
{
    tile_memory result = {0u, 0u, 0, 0u};
    result.keys = slot_in_pages(pages.keys, args.key_page_size, args.key_page_factor, args.key_page_shift,
                                args.key_last_page, first / 32u);
    first = min(first, uint(args.value_capacity) - 32u); // a longer table of the keys
    result.values = same_slots ? result.keys
                               : slot_in_pages(pages.values, args.value_page_size, args.value_page_factor,
                                               args.value_page_shift, args.value_last_page, first / 32u);
    return result;
}

// The slot in memory of one slot of a linear store.
inline uint slot_of_row(device const int *pages, int page_size, int last_page, uint slot)
{
    uint size = uint(page_size), page = min(uint(pages[slot / size]), uint(last_page));
    return page * size + slot % size;
}

// Through the tables: where a row lies. row: of its tile
inline tile_memory find_row(constant tqkv__attend_args &args, thread const page_tables &pages, uint slot, uint row)
{
    tile_memory result = {0u, 0u, 0, 0u};
    if (small_pages) {
        result.keys = slot_of_row(pages.keys, args.key_page_size, args.key_last_page, slot);
        slot = min(slot, uint(args.value_capacity) - 1u);
        result.values =
            same_slots ? result.keys : slot_of_row(pages.values, args.value_page_size, args.value_last_page, slot);
    } else {
        result = find_in_pages(args, pages, slot - row);
        result.keys += row;
        result.values += row;
    }
    return result;
}

// The keys' slot of a position in a list. One that is not seen lies where the oldest position does.
inline uint listed_slot(constant tqkv__attend_args &args, int position)
{
    uint slot = uint(args.key_oldest_slot) + (position == 0x7fffffff ? 0u : uint(position));
    return slot < uint(args.key_capacity) ? slot : slot - uint(args.key_capacity);
}

// Without the tail. Where rows lie apart, of the row with the lane's number.
inline tile_memory find_keys(constant tqkv__attend_args &args, thread const page_tables &pages, uint number)
{
    int position = has_list ? listed_position(args, pages.list, number, pages.lane) : 0;
    uint slot = has_list ? listed_slot(args, position) : first_slot_of_tile(args, number);
    if (small_pages && !has_list) slot += existing_row(args, pages.lane);
    tile_memory result = {slot, slot, 0, 0u};
    if (paged)
        result = find_row(args, pages, slot, has_list ? slot % 32u : 0u);
    else if (has_list)
        result.values = value_slot_of(args, slot);
    result.position = position;
    return result;
}

inline tile_memory find_tile(constant tqkv__attend_args &args, thread const page_tables &pages, uint number)
{
    tile_memory result = find_keys(args, pages, number);
    result.tail = result.keys;
    if (!tail_elsewhere) return result;
    uint slot = first_slot_of_tile(args, number) + existing_row(args, pages.lane);
    result.tail = tail_slot_of(args, has_list ? result.position : position_of_slot(args, slot));
    return result;
}

// The tiles of a simdgroup one after another, where their slots are shared: what lanes found of the one behind the
// next. So nothing waits for tables and lists when it is stored.
struct tile_search {
    tile_memory ahead;
    uint parity; // of the next tile's memory of slots
};

inline bool shares_slots(thread const page_tables &pages) { return pages.shared && tail_rows_apart(); }

// Stores what the lanes found of a tile for all to read. parity: 0 or 1, another one than that of the tile before,
// which may be in use still.
inline tile_memory share_slots(thread const page_tables &pages, tile_memory found, uint parity)
{
    const uint first = (pages.simdgroup * 2u + parity) * slot_lists() * 32u, last = first + (slot_lists() - 1u) * 32u;
    tile_memory result = found;
    simdgroup_barrier(mem_flags::mem_threadgroup); // the tile before that one is done
    if (rows_apart()) {
        result.keys = result.tail = first;
        result.values = same_slots ? first : first + 32u;
        pages.slots[result.keys + pages.lane] = found.keys;
        if (!same_slots) pages.slots[result.values + pages.lane] = found.values;
    }
    if (tail_elsewhere) {
        result.tail = last;
        pages.slots[last + pages.lane] = found.tail;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    return result;
}

// The memory of the only tile of a simdgroup.
inline tile_memory find_one(constant tqkv__attend_args &args, thread const page_tables &pages, uint tile)
{
    tile_memory found = find_tile(args, pages, tile);
    return shares_slots(pages) ? share_slots(pages, found, 0u) : found;
}

// The memory of the next tile.
inline tile_memory find_next(constant tqkv__attend_args &args, thread const page_tables &pages, tile_steps steps,
                             uint n_simdgroups, thread tile_search &search)
{
    if (!shares_slots(pages)) return find_tile(args, pages, steps.tile);
    search.parity = 1u - search.parity;
    tile_memory result = share_slots(pages, search.ahead, search.parity);
    next_tile(steps, n_simdgroups);
    search.ahead = find_tile(args, pages, steps.tile);
    return result;
}

// Likewise, of the first one.
inline tile_memory find_first(constant tqkv__attend_args &args, thread const page_tables &pages, tile_steps steps,
                              uint n_simdgroups, thread tile_search &search)
{
    search.parity = 1u;
    if (shares_slots(pages)) search.ahead = find_tile(args, pages, steps.tile);
    return find_next(args, pages, steps, n_simdgroups, search);
}

// The position of row `row` of a tile that was found; newer than all queries if it belongs to another tile.
inline int position_of_row(constant tqkv__attend_args &args, tile_memory base, uint number, uint row)
{
    return has_list ? int(simd_shuffle(uint(base.position), ushort(row))) : position_in_tile(args, number, row);
}

struct tile_place {
    tile_memory base;
    uint row;     // of this lane
    int position; // of the lane's row
};

// base: of tile `number`
inline tile_place open_tile(constant tqkv__attend_args &args, tile_memory base, uint number, uint row)
{
    tile_place result;
    result.base = base;
    result.row = row;
    result.position = position_of_row(args, base, number, row);
    return result;
}

#endif

// ---- shaders/attend_task.h ----

// What a threadgroup of attention works on: function constants, the arrays of its KV head and its part of the call,
// norms of stored rows, and what a lane keeps of each column. Letters: as in attend.h.
#ifndef TQKV_ATTEND_TASK_H
#define TQKV_ATTEND_TASK_H

constant uint key_format [[function_constant(TQKV_FC_FORMAT)]];
constant uint value_format [[function_constant(TQKV_FC_VALUE_FORMAT)]];
constant bool rotate_queries [[function_constant(TQKV_FC_ROTATE_QUERIES)]];
constant bool softcap [[function_constant(TQKV_FC_SOFTCAP)]];
constant bool key_centered [[function_constant(TQKV_FC_CENTER)]];
constant bool key_scaled [[function_constant(TQKV_FC_SCALED)]];
constant bool center_scaled [[function_constant(TQKV_FC_CENTER_SCALED)]];
constant bool rotate_center [[function_constant(TQKV_FC_ROTATED)]];
constant uint row_type [[function_constant(TQKV_FC_TYPE)]];
constant uint tail_format [[function_constant(TQKV_FC_TAIL_FORMAT)]];
constant bool rotate_tail [[function_constant(TQKV_FC_ROTATE_TAIL)]];
constant bool tail_centered [[function_constant(TQKV_FC_TAIL_CENTER)]];
constant bool tail_scaled [[function_constant(TQKV_FC_TAIL_SCALED)]];
constant bool scale_tail_center [[function_constant(TQKV_FC_TAIL_CENTER_SCALED)]];
constant bool rotate_tail_center [[function_constant(TQKV_FC_TAIL_ROTATED)]];

// A loop over columns runs to the constant maximum and tests inside. It unrolls into registers, and the iterations
// beyond `columns` disappear when the pipeline is built.
#define FOR_COLUMNS(c) \
    TQKV_UNROLL \
    for (int c = 0; c < C; c++) \
        if (uint(c) < columns)

// The running maximum starts here, below every score. It is finite, so a masked score minus it is -INFINITY, not NaN.
#define NOTHING_SEEN (-3.0e38f)

// Output values of a column that a lane keeps: pieces of 8 values, several where 32 lanes do not span the row. Pieces
// lie LANE_SPAN(D) * 8 values apart: so many lanes have values.
#define LANE_SUMS(D) ((D) <= 256 ? 8 : ((D) + 511) / 512 * 16)
#define LANE_SPAN(D) ((D) / LANE_SUMS(D))

// Whether all scores of a query lack the same number, in column_memory.
inline bool has_shifts() { return key_centered || tail_centered; }

// The codes and norms of one KV head.
struct stream_rows {
    device const uchar *codes;
    device const float *norms;
};

// What a threadgroup works on, and the place of this thread in it. n_heads is n_kv_heads * group.
struct attend_task {
    device const uchar *q;          // [n_queries][n_heads][KD + T], with strides
    stream_rows keys, values, tail; // of the KV head; tail: if there is one
    device float *partial_out;      // [n_partials][n_queries][n_heads][VD]: sum of weight * value
    // [1 + n_partials][n_queries][n_heads][2]: the centre's score, unused; then maximum (in powers of two), sum of the
    // weights
    device float *partial_state;
    device const float *center, *tail_center; // [n_kv_heads][KD]: of the keys; [n_kv_heads][T]
    device const float *scale, *tail_scale;   // the same, of the channels
    page_tables pages;
    device const int *list_rows;     // [n_queries][list_heads][list_row]: of attend_list
    device const uint *tree;         // [n_queries][2]
    threadgroup float *tables;       // [2][256]: codebooks of keys and values
    threadgroup float *tail_table;   // [256]: of the tail
    threadgroup float *queries;      // [columns][padded KD]
    threadgroup float *tail_queries; // [columns][padded T]
    threadgroup float *sums;         // of attend_matrix, for a pass of columns
    threadgroup float *weights; // a tile's weights and, for a pass of columns, sums: [n_simdgroups][ATTEND_SUM_FLOATS]
    threadgroup float *kept;    // of columns.h
    threadgroup float *states;  // [n_simdgroups][C][2]: maximum and sum
    uint kv_head, first_column, split;
    uint end_column; // of those columns that there are
    uint lane, simdgroup, n_simdgroups;
};

// What a lane keeps of each column. D: of the values
template <int D>
struct column_state {
    float shift[TQKV__MAX_COLUMNS(D)];             // of scores, under softcap: the centre's score
    int newest[TQKV__MAX_COLUMNS(D)];              // position that the column's query sees; negative: none
    float maximum[TQKV__MAX_COLUMNS(D)];           // subtracted from scores: weigh_tile says how it is raised
    float sum[TQKV__MAX_COLUMNS(D)];               // of the weights
    float out[TQKV__MAX_COLUMNS(D)][LANE_SUMS(D)]; // sum of weight * value
};

inline uint blocks_of_rows(constant tqkv__attend_args &args)
{
    uint each = max(uint(columns), 1u); // 0 where shaders are only checked
    if (has_list) return uint(args.n_queries) * ((uint(args.group) + each - 1u) / each); // of one query each
    return (uint(args.n_queries) * uint(args.group) + each - 1u) / each;
}

// Gives the simdgroups their memory of slots, behind the states of C columns each.
inline void open_slots(uint C, thread attend_task &task)
{
    threadgroup float *behind = task.states + task.n_simdgroups * uint(TQKV__STATE_BYTES(C) / 4);
    task.pages.shared = task.pages.shared_values = true;
    task.pages.slots = (threadgroup uint *)behind;
}

// Blocks of rows and splits count from the last. Those have the most to do, and none begins when the others are done.
inline void open_place(constant tqkv__attend_args &args, uint block, uint split, thread attend_task &task)
{
    uint number = blocks_of_rows(args) - 1u - block, group = uint(args.group);
    task.first_column = number * columns;
    task.end_column = uint(args.n_queries) * group;
    task.split = uint(args.n_splits) - 1u - split;
    if (!has_list) return;
    uint blocks = blocks_of_rows(args) / uint(args.n_queries), query = number / blocks;
    task.first_column = query * group + number % blocks * columns;
    task.end_column = (query + 1u) * group;
    open_list(args, task.list_rows, query, task.kv_head, task.pages.list);
}

// The arrays of an item of a batch, and its threadgroup `number` of the batch.
inline void open_item(constant tqkv__batch_item &item, uint number, thread attend_task &task)
{
    uint own = number - uint(item.first_group), blocks = blocks_of_rows(item.attend);
    device const float *scratch = task.partial_out;
    if (has_list) task.list_rows = (device const int *)scratch + item.list_rows;
    open_place(item.attend, own % blocks, own / blocks, task);
    task.q += row_offset(item.q, TQKV__ROWS_UNIT);
    task.keys.codes += row_offset(item.key_codes, TQKV__CODES_UNIT);
    task.keys.norms += item.key_norms;
    task.values.codes += row_offset(item.value_codes, TQKV__CODES_UNIT);
    task.values.norms += item.value_norms;
    task.partial_state = task.partial_out + item.partial_state;
    task.partial_out += item.partial_out;
    task.center += item.key_center;
    task.tail.codes += row_offset(item.tail_codes, TQKV__CODES_UNIT);
    task.tail.norms += item.tail_norms;
    task.tail_center += item.tail_center;
    task.scale += item.key_scale;
    task.tail_scale += item.tail_scale;
    task.pages.keys += item.key_pages;
    task.pages.values += item.value_pages;
    task.tree += item.tree;
}

template <int D>
inline stream_rows stream_of_head(uint format, device const uchar *codes, device const float *norms, int slots,
                                  uint kv_head)
{
    ulong first = ulong(kv_head) * ulong(slots);
    stream_rows rows;
    rows.codes = codes + first * ulong(row_bytes<D>(format));
    rows.norms = norms + first * ulong(uint(D) / norm_block<D>(format));
    return rows;
}

// Norm of block `block` at a slot, and the factor of its codes.
template <int D>
inline float stored_norm(uint format, stream_rows rows, uint slot, uint block)
{
    return rows.norms[ulong(slot) * ulong(uint(D) / norm_block<D>(format)) + block];
}

template <int D>
inline float stored_scale(uint format, stream_rows rows, uint slot, uint block, float block_scale)
{
    if (!has_norms(format)) return 1.0f;
    return code_scale<D>(format, stored_norm<D>(format, rows, slot, block), block_scale);
}

template <int D>
inline bool one_norm(uint format)
{
    return norm_block<D>(format) == uint(D);
}

// Factor of the codes at a slot; 1 where a row has several norms.
template <int D>
inline float row_scale(uint format, stream_rows rows, uint slot, float block_scale)
{
    return one_norm<D>(format) ? stored_scale<D>(format, rows, slot, 0u, block_scale) : 1.0f;
}

#endif

// ---- shaders/attend_values.h ----

// Sums of weight * value over a tile, for attend.h: the lanes lie across the row, and the weights come from threadgroup
// memory. Letters: as in attend.h.
#ifndef TQKV_ATTEND_VALUES_H
#define TQKV_ATTEND_VALUES_H

// ---- Weights ----

// Weights of a tile in threadgroup memory: [32][2] for 1 or 2 columns, else [C/4][32][4].
template <int C>
inline void store_weights(threadgroup float *weights, uint row, thread const float *weight)
{
    if (columns <= 2) {
        float2 two;
        two.x = weight[0];
        two.y = weight[1];
        *(threadgroup float2 *)(weights + row * 2u) = two;
    } else {
        TQKV_UNROLL
        for (int c = 0; c + 3 < C; c += 4) {
            if (uint(c) >= columns) continue;
            float4 four;
            four.x = weight[c];
            four.y = weight[c + 1];
            four.z = weight[c + 2];
            four.w = weight[c + 3];
            *(threadgroup float4 *)(weights + uint(c) * 32u + row * 4u) = four;
        }
    }
}

template <int C>
inline void load_weights(threadgroup const float *weights, uint row, thread float *weight)
{
    if (columns <= 2) {
        float2 two = *(threadgroup const float2 *)(weights + row * 2u);
        weight[0] = two.x;
        weight[1] = two.y;
    } else {
        TQKV_UNROLL
        for (int c = 0; c + 3 < C; c += 4) {
            if (uint(c) >= columns) continue;
            float4 four = *(threadgroup const float4 *)(weights + uint(c) * 32u + row * 4u);
            weight[c] = four.x;
            weight[c + 1] = four.y;
            weight[c + 2] = four.z;
            weight[c + 3] = four.w;
        }
    }
}

// ---- Values ----

// The lanes lie across a row of values: L lanes, 8 values each, in J pieces of the row. A step takes 32/L rows. With a
// matrix the last of the L lanes have no values: they repeat others, and their sums go nowhere.
#define VALUE_LANES(D)  ((D) <= 32 ? 4 : (D) <= 64 ? 8 : (D) <= 128 ? 16 : 32)
#define VALUE_PIECES(D) (LANE_SUMS(D) / 8)

// Steps that a lane loads before it uses the first of them.
#define VALUE_WORDS(D, W) (VALUE_PIECES(D) * ((8 * (W) + 31) / 32))
#define VALUE_ROOM(D, W)  TQKV_VALUE_WORDS(D, W, LANE_SUMS(D) * int(columns))
#define VALUE_STEPS(D, W) (VALUE_ROOM(D, W) < VALUE_WORDS(D, W) ? 1 : VALUE_ROOM(D, W) / VALUE_WORDS(D, W))
#define VALUE_BATCH(D, W) (VALUE_STEPS(D, W) < VALUE_LANES(D) ? VALUE_STEPS(D, W) : VALUE_LANES(D))

template <int D>
inline uint value_row_of_lane(uint step, uint lane)
{
    return step * uint(32 / VALUE_LANES(D)) + lane / uint(VALUE_LANES(D));
}

// The first of the 8 values that a lane has of a row's first piece.
template <int D>
inline uint first_value_of_lane(uint lane)
{
    return min(lane % uint(VALUE_LANES(D)), uint(LANE_SPAN(D)) - 1u) * 8u;
}

// The codes of a step, N a piece, and for rows of several norms the factors.
template <int D, int W, int N = 8>
struct value_step {
    raw_codes<W, N> raw[VALUE_PIECES(D)];
    float scale[VALUE_PIECES(D)];
};

// value: the lane's first one
template <int D, int W, int N>
inline void load_value_step(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint number,
                            uint value, thread value_step<D, W, N> &step)
{
    const uint block = norm_block<D>(value_format), bytes = row_bytes<D>(value_format);
    stream_rows values = task.values;
    uint row = value_row_of_lane<D>(number, task.lane);
    device const uchar *codes = value_codes(args, task.pages, values.codes, bytes, base, row);
    TQKV_UNROLL
    for (int j = 0; j < VALUE_PIECES(D); j++) {
        uint first = value + uint(j * LANE_SPAN(D)) * 8u;
        load_codes<D, W, N>(value_format, codes, first, step.raw[j]);
        step.scale[j] = 1.0f;
        if (!one_norm<D>(value_format))
            step.scale[j] = stored_scale<D>(value_format, values, value_slot(args, task.pages, base, row),
                                            first / block, args.value_block_scale);
    }
}

// out[c] += weight * value, over the rows of step `number`.
template <int D, int W, int N, int S>
inline void add_value_step(thread const value_step<D, W, N> &step, uint number, uint lane, thread const codebook &book,
                           threadgroup const float *weights, thread float (&out)[TQKV__MAX_COLUMNS(D)][S])
{
    const int C = TQKV__MAX_COLUMNS(D);
    float weight[C];
    load_weights<C>(weights, value_row_of_lane<D>(number, lane), weight);
    TQKV_UNROLL
    for (int j = 0; j < VALUE_PIECES(D); j++) {
        float x[N];
        values_at<W, N, N>(value_format, step.raw[j], 0, book, x);
        FOR_COLUMNS(c)
        {
            // A masked slot may hold halves or norms that are NaN, and 0 * NaN is not 0.
            if ((W == 16 || !one_norm<D>(value_format)) && weight[c] == 0.0f) continue;
            float factor = one_norm<D>(value_format) ? weight[c] : weight[c] * step.scale[j];
            TQKV_UNROLL
            for (int i = 0; i < N; i++) out[c][j * N + i] = fma(factor, x[i], out[c][j * N + i]);
        }
    }
}

// `steps` holds the first steps of the tile at slot `base`. A later step is loaded when an earlier one makes room. With
// plain loads the last steps stand apart.
template <int D, int W>
inline void add_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                       thread const codebook &book, thread value_step<D, W> (&steps)[VALUE_BATCH(D, W)],
                       threadgroup const float *weights, thread column_state<D> &state)
{
    const int L = VALUE_LANES(D), B = VALUE_BATCH(D, W);
    const uint value = first_value_of_lane<D>(task.lane);
    const uint end = TQKV_PLAIN_LOADS ? uint(L - B) : uint(L);
    TQKV_UNROLL_VALUES(D, W, LANE_SUMS(D) * int(columns))
    for (uint first = 0; first < end; first += uint(B)) {
        TQKV_UNROLL
        for (int b = 0; b < B; b++) {
            add_value_step(steps[b], first + uint(b), task.lane, book, weights, state.out);
            if (TQKV_PLAIN_LOADS || first + uint(B) < uint(L))
                load_value_step(args, task, base, first + uint(B + b), value, steps[b]);
        }
    }
    if (!TQKV_PLAIN_LOADS) return;
    TQKV_UNROLL
    for (int b = 0; b < B; b++) add_value_step(steps[b], uint(L - B + b), task.lane, book, weights, state.out);
}

// As any_keys.
template <int D>
struct any_values {
    value_step<D, 4> of_4[VALUE_BATCH(D, 4)];
    value_step<D, 8> of_8[VALUE_BATCH(D, 8)];
    value_step<D, 16> of_16[VALUE_BATCH(D, 16)];
};

template <int D, int W>
inline void load_first_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                              thread value_step<D, W> (&steps)[VALUE_BATCH(D, W)])
{
    TQKV_UNROLL
    for (int b = 0; b < VALUE_BATCH(D, W); b++)
        load_value_step(args, task, base, uint(b), first_value_of_lane<D>(task.lane), steps[b]);
}

template <int D>
inline void open_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                        thread any_values<D> &values)
{
    WITH_CODES(value_format, values, load_first_values<D, W>(args, task, base, codes));
}

template <int D>
inline void add_any_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                           thread const codebook &book, thread any_values<D> &values, threadgroup const float *weights,
                           thread column_state<D> &state)
{
    WITH_CODES(value_format, values, add_values<D, W>(args, task, base, book, codes, weights, state));
}

#endif

// ---- shaders/softmax.h ----

// Shares of maxima in the online softmax. Scores are in powers of two, because a GPU's exponential takes these.
#ifndef TQKV_SOFTMAX_H
#define TQKV_SOFTMAX_H

#define TQKV_LOG2E 1.44269504f
#define TQKV_LN2   0.693147181f

// A maximum of a slice, in powers of e as on the processor. Maxima here are whole numbers, in powers of two: rounding
// to powers of e and back is undone, so slices have the bits of the whole call.
// A processor's maximum is as close as it was.
inline float maximum_of_slice(float max)
{
    float maximum = max * TQKV_LOG2E, whole = rint(maximum);
    return fabs(maximum - whole) <= fabs(maximum) * (1.0f / 4194304.0f) ? whole : maximum;
}

// 2^(own - largest), and exactly 1 where the two are equal: then adding nothing changes no bit. The maximum of nothing
// is -INFINITY and its share is 0. Both are selected, because -INFINITY minus -INFINITY is NaN. The fast exponential
// errs by a few units in the last place; the result may err by 2e-5.
inline float share_of(float own, float largest)
{
    return own == largest ? 1.0f : own == -INFINITY ? 0.0f : fast::exp2(own - largest);
}

// The factors of two sums of weights with these maxima, kept and added, under the larger one.
struct shares {
    float largest, kept, added;
};

inline shares shares_of(float kept, float added)
{
    shares result;
    result.largest = max(kept, added);
    result.kept = share_of(kept, result.largest);
    result.added = share_of(added, result.largest);
    return result;
}

#endif

// ---- shaders/columns.h ----

// The columns of a threadgroup of attention: what it keeps of them in threadgroup memory, and how the sums of its
// simdgroups become one at the end of a stretch. attend.h and matrix_columns.h have what depends on how a
// lane holds them.
#ifndef TQKV_COLUMNS_H
#define TQKV_COLUMNS_H

// Threadgroup memory of columns: TQKV__COLUMN_BYTES.
struct column_memory {
    uint n;                              // columns that there is room for
    threadgroup float *kept;             // [2][n][2]: maximum and sum of the section so far, and of all before it
    threadgroup float *shares;           // [n][4]: what the sums of the section so far are multiplied by, those of the
                                         // stretch, of the earlier sections and of the section
    threadgroup float *shifts, *factors; // [n]: of the queries. attend has no factors
    threadgroup float *tails;            // [n]: what products of the tail are multiplied by, over `factors`
    threadgroup float *totals;           // [n][2]: maximum and sum
    threadgroup uint *rows;              // [n]: row in a partial result
};

inline column_memory column_memory_of(threadgroup float *numbers, uint n)
{
    column_memory memory;
    memory.n = n;
    memory.kept = numbers;
    memory.shares = memory.kept + 4u * n;
    memory.shifts = memory.shares + 4u * n;
    memory.factors = memory.shifts + n;
    memory.tails = memory.factors + n;
    memory.totals = memory.tails + n;
    threadgroup float *rows = memory.totals + 2u * n;
    memory.rows = (threadgroup uint *)rows;
    return memory;
}

// Where the row of a query row is in a partial result.
inline uint partial_row(constant tqkv__attend_args &args, query_row row, uint head)
{
    return uint(row.query) * uint(args.n_kv_heads) * uint(args.group) + head;
}

// The end of the columns that there are. Without a list it is computed where it is needed: nvcc keeps task.end_column
// in a register over all tiles, and spills others.
inline uint end_of_columns(constant tqkv__attend_args &args, thread const attend_task &task)
{
    return has_list ? task.end_column : uint(args.n_queries) * uint(args.group);
}

// Where the sums of a stretch's columns go.
struct column_end {
    uint used;                    // columns
    ulong section;                // distance of the section's partial result from the first
    bool copy;                    // the section begins
    bool to_total, copy_to_total; // it ends, and is added or copied to the first
};

inline column_end open_end(constant tqkv__attend_args &args, thread const attend_task &task, stretch_range own,
                           uint stretch, uint D)
{
    uint rows = uint(args.n_queries) * uint(args.group);
    column_end how;
    how.used = min(uint(columns), end_of_columns(args, task) - task.first_column);
    how.section = row_offset(partial_of_section(args, task.split), rows * uint(args.n_kv_heads)) * ulong(D);
    how.copy = begins_section(own, stretch);
    how.to_total = ends_section(args, own, stretch);
    how.copy_to_total = in_first_section(own, stretch);
    return how;
}

// Adds maximum and sum of a column to those of the kept ones, [2].
// The two factors of the columns' sums go to `factors`.
inline void add_column(bool copy, threadgroup float *kept, threadgroup float *total, threadgroup float *factors)
{
    shares both = shares_of(copy ? -INFINITY : kept[0], total[0]);
    float sum = fma(both.added, total[1], copy ? 0.0f : both.kept * kept[1]);
    factors[0] = both.kept;
    factors[1] = both.added;
    total[0] = kept[0] = both.largest;
    total[1] = kept[1] = sum;
}

// Simdgroups whose states or sums are loaded together, so that one load does not wait for another.
#define STATES_LOADED 4

// Maxima and sums of a column in the simdgroups from `first` on; those of one that there is not are nothing.
struct loaded_states {
    float maxima[STATES_LOADED], sums[STATES_LOADED];
};

inline loaded_states load_states(thread const attend_task &task, uint c, uint n, uint first)
{
    loaded_states states;
    TQKV_UNROLL
    for (uint i = 0; i < uint(STATES_LOADED); i++) {
        threadgroup const float *from = task.states + (min(first + i, task.n_simdgroups - 1u) * n + c) * 2u;
        bool exists = first + i < task.n_simdgroups;
        states.maxima[i] = exists ? from[0] : -INFINITY;
        states.sums[i] = exists ? from[1] : 0.0f;
    }
    return states;
}

// Maximum and sum of a column, and all factors of its sums. task.states has those of the simdgroups,
// [n_simdgroups][n][2]; what their sums are multiplied by takes the place of the maxima. S: most simdgroups
template <int S>
inline void combine_states(thread const attend_task &task, uint c, column_memory memory, column_end how)
{
    const uint n = memory.n, B = uint(STATES_LOADED);
    threadgroup float *total = memory.totals + c * 2u, *factors = memory.shares + c * 4u;
    float largest = -INFINITY, sum = 0.0f;
    for (uint first = 0; first < uint(S) && first < task.n_simdgroups; first += B) {
        loaded_states states = load_states(task, c, n, first);
        TQKV_UNROLL
        for (uint i = 0; i < B; i++) largest = max(largest, states.maxima[i]);
    }
    for (uint first = 0; first < uint(S) && first < task.n_simdgroups; first += B) {
        loaded_states states = load_states(task, c, n, first);
        TQKV_UNROLL
        for (uint i = 0; i < B; i++) {
            float share = share_of(states.maxima[i], largest);
            sum = fma(share, states.sums[i], sum);
            if (first + i < task.n_simdgroups) task.states[((first + i) * n + c) * 2u] = share;
        }
    }
    total[0] = largest;
    total[1] = sum;
    add_column(how.copy, memory.kept + c * 2u, total, factors);
    if (how.to_total) add_column(how.copy_to_total, memory.kept + (n + c) * 2u, total, factors + 2);
}

inline void store_four(thread const float *x, device float *to)
{
    device packed_float4 *four = (device packed_float4 *)to;
    four->x = x[0];
    four->y = x[1];
    four->z = x[2];
    four->w = x[3];
}

// x = factor * x + other * y
template <int M>
inline void add_floats(float factor, thread float *x, float other, thread const float *y)
{
    TQKV_UNROLL
    for (int i = 0; i < M; i++) x[i] = fma(other, y[i], factor * x[i]);
}

// Four neighbouring values of a column.
struct four_sums {
    uint column;
    bool used;
    threadgroup const float *from; // of the first simdgroup
    device float *to;              // in the first partial result
    float kept[4];                 // of the section so far
};

// value: of the column's row
inline void open_four(thread const attend_task &task, uint D, uint column, uint value, threadgroup const float *from,
                      column_memory memory, column_end how, thread four_sums &own)
{
    own.column = column;
    own.used = column < how.used;
    own.from = from;
    own.to = task.partial_out + (row_offset(memory.rows[own.used ? column : 0u], D) + ulong(value));
    TQKV_UNROLL
    for (int i = 0; i < 4; i++) own.kept[i] = 0.0f;
    if (own.used && !how.copy) load_floats<4>(own.to + how.section, own.kept);
}

// Adds them up, simdgroup after simdgroup: a fixed order. each: from one to the next in memory
template <int S>
inline void combine_four(thread const attend_task &task, uint each, column_memory memory, column_end how,
                         thread four_sums &own)
{
    const uint B = uint(STATES_LOADED);
    float4 shares = *(threadgroup const float4 *)(memory.shares + own.column * 4u);
    threadgroup const float *from = own.from;
    float sum[4], total[4];
    TQKV_UNROLL
    for (int i = 0; i < 4; i++) sum[i] = total[i] = 0.0f;
    for (uint first = 0; first < uint(S) && first < task.n_simdgroups; first += B) {
        float4 four[B];
        float part[B];
        TQKV_UNROLL
        for (uint i = 0; i < B; i++) {
            uint s = min(first + i, task.n_simdgroups - 1u);
            part[i] = task.states[(s * memory.n + own.column) * 2u];
            four[i] = *(threadgroup const float4 *)(from + s * each);
        }
        TQKV_UNROLL
        for (uint i = 0; i < B; i++) {
            if (first + i >= task.n_simdgroups) continue;
            sum[0] = fma(part[i], four[i].x, sum[0]);
            sum[1] = fma(part[i], four[i].y, sum[1]);
            sum[2] = fma(part[i], four[i].z, sum[2]);
            sum[3] = fma(part[i], four[i].w, sum[3]);
        }
    }
    add_floats<4>(shares.x, own.kept, shares.y, sum);
    store_four(own.kept, own.to + how.section);
    if (!how.to_total) return;
    if (!how.copy_to_total) load_floats<4>(own.to, total);
    add_floats<4>(shares.z, total, shares.w, own.kept);
    store_four(total, own.to);
}

// Maximum, sum and the score of the centre of a column, for attend_merge.
inline void store_column(constant tqkv__attend_args &args, thread const attend_task &task, uint partial, uint c,
                         column_memory memory, float maximum, float sum)
{
    uint n_rows = uint(args.n_queries) * uint(args.n_kv_heads) * uint(args.group);
    ulong to = (row_offset(partial + 1u, n_rows) + ulong(memory.rows[c])) * 2u; // the first are the shifts
    task.partial_state[to] = maximum;
    task.partial_state[to + 1u] = sum;
    if (has_shifts() && task.split == 0) task.partial_state[ulong(memory.rows[c]) * 2u] = memory.shifts[c];
}

// Those of all columns. The lane of combine_states stores its column.
inline void store_columns(constant tqkv__attend_args &args, thread const attend_task &task, uint partial,
                          column_memory memory)
{
    uint c = task.lane;
    if (task.simdgroup != 0 || c >= columns || task.first_column + c >= end_of_columns(args, task)) return;
    store_column(args, task, partial, c, memory, memory.totals[c * 2u], memory.totals[c * 2u + 1u]);
}

#endif

// ---- shaders/rotate.h ----

// The rotation y = R(s*x)/sqrt(D) of a row: random signs s, then R: the Walsh-Hadamard transform H or, where D is no
// power of two, H of each subrow and a Hadamard matrix across the subrows. common.h has the layout of the row over L
// lanes in pieces of C values a lane. With a matrix a piece of all lanes is a subrow, and C is 1.
#ifndef TQKV_ROTATE_H
#define TQKV_ROTATE_H

// (a, b) -> (a+b, a-b) between the values of a lane that are `distance` apart in x.
template <int N>
inline void butterflies(thread float *x, int distance)
{
    TQKV_UNROLL
    for (int i = 0; i < N; i++) {
        if (i & distance) continue;
        float a = x[i], b = x[i + distance];
        x[i] = a + b;
        x[i + distance] = a - b;
    }
}

// Row `row` of the Hadamard matrix of order M, 12, 20 or 28: bit j is set where value j is subtracted.
template <int M>
inline uint matrix_row(int row)
{
    uint bits = 0;
    TQKV_UNROLL
    for (int i = 0; i < (M + 7) / 8; i++)
        bits |= uint(M == 12   ? tqkv__tables.hadamard_12[row][i]
                     : M == 20 ? tqkv__tables.hadamard_20[row][i]
                               : tqkv__tables.hadamard_28[row][i])
                << (8 * i);
    return bits;
}

// The matrix times x, [M]. A row's terms are added one after the other, in the order of tqkv_encode.
template <int M>
inline void multiply_matrix(thread float *x)
{
    float product[M];
    TQKV_UNROLL
    for (int row = 0; row < M; row++) {
        uint bits = matrix_row<M>(row);
        float sum = as_type<float>(as_type<uint>(x[0]) ^ (bits << 31));
        TQKV_UNROLL
        for (int i = 1; i < M; i++)
            sum = sum + as_type<float>(as_type<uint>(x[i]) ^ ((bits << (31 - i)) & 0x80000000u));
        product[row] = sum;
    }
    TQKV_UNROLL
    for (int i = 0; i < M; i++) x[i] = product[i];
}

// Lanes `distance` apart trade halves of their values: the lane that has the bit `distance` in its number gives those
// without the bit `bit` in theirs, and takes the others. Twice leaves all as it was.
template <int N, class T>
inline void trade_values(thread T *x, uint lane, uint distance, int bit)
{
    bool upper = (lane & distance) != 0;
    TQKV_UNROLL
    for (int i = 0; i < N; i++) {
        if (i & bit) continue;
        T low = x[i], high = x[i + bit], other = simd_shuffle_xor(upper ? low : high, ushort(distance));
        x[i] = upper ? other : low;
        x[i + bit] = upper ? high : other;
    }
}

// The bit of a value's number that lanes `distance` apart trade for a strided row (see encode.h), 0 if none.
template <int L>
inline int traded_bit(uint distance)
{
    return distance == 4u ? (L == 8 ? 2 : 1) : distance == 8u ? 2 : 0;
}

// R without the stages before `start`, which lies within a piece. H has the stages of distance start, 2*start .. in
// this order: within a lane's piece, across lanes, then across pieces. strided: lanes trade values, once for a stage,
// where both need all of each other's otherwise. lane: among the row's lanes.
template <int D, int L, int C>
inline void hadamard_from(thread float *x, uint lane, int start, bool strided)
{
    const int N = D / L;
    TQKV_UNROLL
    for (int distance = start; distance < C; distance *= 2) butterflies<N>(x, distance);
    TQKV_UNROLL
    for (uint distance = 1; distance < uint(L); distance *= 2) {
        if (!TQKV__HAS_MATRIX(D) && strided && traded_bit<L>(distance) != 0) {
            trade_values<N>(x, lane, distance, traded_bit<L>(distance));
            butterflies<N>(x, traded_bit<L>(distance));
            continue;
        }
        float sign = (lane & distance) ? -1.0f : 1.0f; // other - x or other + x, rounded once
        TQKV_UNROLL
        for (int i = 0; i < N; i++) x[i] = fma(x[i], sign, simd_shuffle_xor(x[i], ushort(distance)));
    }
    if (TQKV__HAS_MATRIX(D)) {
        multiply_matrix<TQKV__MATRIX_ORDER(D)>(x);
    } else {
        TQKV_UNROLL
        for (int distance = C; distance < N; distance *= 2) butterflies<N>(x, distance);
    }
}

template <int D, int L, int C>
inline void hadamard(thread float *x, uint lane)
{
    hadamard_from<D, L, C>(x, lane, 1, false);
}

// Bit i is set if x[i] changes its sign. RUN: values whose signs come of one read, a divisor of C and of 8.
template <int D, int L, int C, int RUN>
inline uint lane_signs(uint lane)
{
    uint signs = 0;
    TQKV_UNROLL
    for (int i = 0; i < D / L; i += RUN) {
        uint at = value_of_lane<L, C>(lane, i);
        signs |= ((uint(tqkv__tables.signs[(at & 511u) >> 3]) >> (at & 7u)) & ((1u << RUN) - 1u)) << i;
    }
    return signs;
}

template <int N>
inline void flip_signs(thread float *x, uint signs)
{
    TQKV_UNROLL
    for (int i = 0; i < N; i++) x[i] = as_type<float>(as_type<uint>(x[i]) ^ ((signs << (31 - i)) & 0x80000000u));
}

template <int N>
inline void scale_values(thread float *x, float factor)
{
    TQKV_UNROLL
    for (int i = 0; i < N; i++) x[i] = x[i] * factor;
}

// signs: lane_signs of the lane.
template <int D, int L, int C>
inline void rotate_values(thread float *x, uint lane, uint signs)
{
    flip_signs<D / L>(x, signs);
    hadamard<D, L, C>(x, lane);
    scale_values<D / L>(x, TQKV__INV_SQRT(D));
}

// The inverse: x = s * R(y)/sqrt(D).
template <int D, int L, int C>
inline void unrotate_values(thread float *x, uint lane, uint signs)
{
    hadamard<D, L, C>(x, lane);
    scale_values<D / L>(x, TQKV__INV_SQRT(D));
    flip_signs<D / L>(x, signs);
}

// Rows as load_row loads them.
template <int D>
inline uint signs_of_row(uint lane)
{
    return lane_signs<D, TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D), 1>(lane);
}

template <int D>
inline void rotate_row(thread float *x, uint lane)
{
    rotate_values<D, TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D)>(x, lane, signs_of_row<D>(lane));
}

template <int D>
inline void unrotate_row(thread float *x, uint lane, uint signs)
{
    unrotate_values<D, TQKV__ROW_LANES(D), TQKV_ROW_PIECE(D)>(x, lane, signs);
}

// x times the scales of a head's channels. scale: [n_kv_heads][D]
template <int D>
inline void multiply_channels(device const float *scale, uint kv_head, uint lane, thread float *x)
{
    float g[TQKV_LANE_VALUES(D)];
    load_row<D>(scale + row_offset(kv_head, D), lane, g);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = x[i] * g[i];
}

// The centre of a head, [n_kv_heads][D], as rows in the store have it: scaled and rotated, if asked.
template <int D>
inline void load_center(device const float *center, device const float *scale, uint kv_head, bool scaled, bool rotated,
                        uint lane, thread float *x)
{
    load_row<D>(center + row_offset(kv_head, D), lane, x);
    if (scaled) {
        float g[TQKV_LANE_VALUES(D)];
        load_row<D>(scale + row_offset(kv_head, D), lane, g);
        TQKV_UNROLL
        for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = x[i] * (1.0f / g[i]);
    }
    if (rotated) rotate_row<D>(x, lane);
}

// x += weight * that centre.
template <int D>
inline void add_center(device const float *center, device const float *scale, uint kv_head, bool scaled, bool rotated,
                       float weight, uint lane, thread float *x)
{
    float c[TQKV_LANE_VALUES(D)];
    load_center<D>(center, scale, kv_head, scaled, rotated, lane, c);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = x[i] + weight * c[i];
}

#endif

// ---- shaders/attend.h ----

// Attention straight from the codes. A threadgroup serves one KV head, one or several stretches of the context, and up
// to `columns` query rows. A column is one query head of the group for one query; the heads of a query come first.
// Each simdgroup takes its own tiles of 32 slots and keeps its own softmax. The simdgroups combine their results at
// the end of a stretch. A key or value is decoded once for all columns: that decides the speed.
//
// Within a tile
//   keys     up to 4 lanes share a row and load 16 bytes at a time; a reduction leaves each lane the score of one row;
//            likewise the tail, a second part of each key, whose scores are added
//   softmax  one row a lane
//   values   the lanes lie across the row; the weights come from threadgroup memory (attend_values.h)
//
// Letters: D head_dim, W code width of a stored value, K and V before either: of keys and of values; T that of a tail.
// C most columns, the same for all head_dims. N values that a lane loads at a time, R lanes that share a row of keys, V
// output values of a column that a lane keeps.
#ifndef TQKV_ATTEND_H
#define TQKV_ATTEND_H

// ---- Parts of a key: its stream, and its tail ----

// Values of a tail behind each of D values of a query.
template <int D>
inline uint tail_values()
{
    return TQKV__TAIL_DIM(D) != 0 && tail_format != 0 ? uint(TQKV__TAIL_DIM(D)) : 0u;
}

// One part of the keys, and of the queries. `format` and all bools are function constants.
struct key_part {
    uint format;
    stream_rows rows; // of the KV head
    float block_scale;
    threadgroup float *queries;
    bool rotate, scaled, with_center, rotate_center, scale_center;
    device const float *center, *scale; // of the channels
    uint first;                         // value of a query
    bool apart;                         // of rows of a tile
};

inline key_part first_part(constant tqkv__attend_args &args, thread const attend_task &task)
{
    key_part part = {key_format, task.keys,    args.key_block_scale, task.queries,  rotate_queries,
                     key_scaled, key_centered, rotate_center,        center_scaled, task.center,
                     task.scale, 0u,           rows_apart()};
    return part;
}

template <int D>
inline key_part tail_part(thread const attend_task &task)
{
    key_part part = {tail_format,       task.tail,          1.0f,
                     task.tail_queries, rotate_tail,        tail_scaled,
                     tail_centered,     rotate_tail_center, scale_tail_center,
                     task.tail_center,  task.tail_scale,    uint(D),
                     tail_rows_apart()};
    return part;
}

// ---- Keys: layout over the lanes ----

// Values of a row that a lane loads at a time: 16 bytes of codes, 8 where 16 do not divide the row, or the whole row.
#define KEY_VALUES(D, W) ((D) < 128 / (W) ? (D) : (D) % (128 / (W)) ? 64 / (W) : 128 / (W))

// Lanes that share a row of keys, as many of 4 as divide what has one norm: all values or, in 8 bits, perhaps a block.
// They share R rows: lanes l*R .. l*R+R-1 have rows l, l + 32/R, l + 2*32/R ..
#define KEY_BLOCK(D, W) ((W) == 8 ? TQKV__GRID_DIM(D) : (D))
#define KEY_LANES(D, W) \
    (KEY_BLOCK(D, W) % (4 * KEY_VALUES(D, W)) == 0 ? 4 : KEY_BLOCK(D, W) % (2 * KEY_VALUES(D, W)) == 0 ? 2 : 1)

// Loads of a row that a lane starts before it uses the first of them; an odd number of loads all at once, if they fit
// into 40 registers. Or one at a time: see TQKV_LOADS_AHEAD.
#define KEY_STEPS(D, W) ((D) / KEY_VALUES(D, W) / KEY_LANES(D, W))
#define KEY_BATCH(D, W) \
    (TQKV_LOADS_AHEAD == 1 ? 1 : KEY_STEPS(D, W) % 2 == 0 ? 2 : (D) * (W) / 32 <= 40 ? KEY_STEPS(D, W) : 1)

// The row of a tile whose score a lane ends with.
template <int D>
inline uint row_of_lane(uint format, uint lane)
{
    const uint R = uint(BY_CODE_WIDTH(format, KEY_LANES, D));
    return lane % R * (32u / R) + lane / R;
}

// And the lane that ends with the score of a row.
template <int D>
inline uint lane_of_tile_row(uint format, uint row)
{
    const uint R = uint(BY_CODE_WIDTH(format, KEY_LANES, D));
    return row % (32u / R) * R + row / (32u / R);
}

// Codes of the next steps of a lane's R rows, and for rows of several norms the factors of the next block.
template <int D, int W>
struct key_steps {
    raw_codes<W, KEY_VALUES(D, W)> raw[KEY_BATCH(D, W)][KEY_LANES(D, W)];
    float scale[KEY_LANES(D, W)];
};

// ---- Queries ----

// A query in threadgroup memory has 4 floats of padding after every N values. Lanes that share a row of keys then read
// different banks.
template <int D>
inline uint padded(uint format, uint value)
{
    return value + value / uint(BY_CODE_WIDTH(format, KEY_VALUES, D)) * 4u;
}

// The score of the centre of a part of the keys: all scores of the query lack it. Every lane of the row has the result.
// x: the lane's values of the query
template <int D>
inline float score_of_center(constant tqkv__attend_args &args, thread const attend_task &task,
                             thread const key_part &keys, thread const float *x)
{
    float center[TQKV_LANE_VALUES(D)], dot = 0.0f;
    uint part = lane_of_row<D>(task.lane);
    load_center<D>(keys.center, keys.scale, task.kv_head, keys.scale_center, keys.rotate_center, part, center);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) dot = fma(x[i], center[i], dot);
    TQKV_UNROLL
    for (int distance = 1; distance < TQKV__ROW_LANES(D); distance *= 2) dot += simd_shuffle_xor(dot, ushort(distance));
    return dot * (args.scale * TQKV_LOG2E);
}

// The values of a query that belong to a part of the keys. head: of all query heads
template <int D>
inline void load_query(constant tqkv__attend_args &args, thread const attend_task &task, thread const key_part &keys,
                       uint query, uint head, thread float *x)
{
    ulong first = row_offset(query, args.query_token_stride) + row_offset(head, args.query_head_stride);
    load_typed_row<D>(row_type, task.q, first + ulong(keys.first), lane_of_row<D>(task.lane), x);
}

// To the basis of the keys, after score_of_center: that takes the query as it came.
template <int D>
inline void turn_query(thread const attend_task &task, thread const key_part &keys, thread float *x)
{
    uint part = lane_of_row<D>(task.lane);
    if (keys.scaled) multiply_channels<D>(keys.scale, task.kv_head, part, x);
    if (keys.rotate) rotate_row<D>(x, part);
}

// TQKV_ROWS(D) columns at a time. Lanes beyond the last column repeat it and store nothing.
template <int D>
inline void load_query_part(constant tqkv__attend_args &args, thread const attend_task &task,
                            thread const key_part &keys, column_memory memory)
{
    const int L = TQKV__ROW_LANES(D), C = TQKV_ROW_PIECE(D);
    const uint length = padded<D>(keys.format, D);
    uint part = lane_of_row<D>(task.lane);
    for (uint c = task.simdgroup * uint(TQKV_ROWS(D)); c < columns; c += task.n_simdgroups * uint(TQKV_ROWS(D))) {
        uint own = c + task.lane / uint(L), column = min(own, columns - 1u);
        query_row row = row_of_column(args, task.first_column + column);
        uint head = task.kv_head * uint(args.group) + uint(row.head);
        float x[TQKV_LANE_VALUES(D)];
        load_query<D>(args, task, keys, uint(row.query), head, x);
        float shift = keys.with_center ? score_of_center<D>(args, task, keys, x) : 0.0f;
        if (part == 0 && own < columns) {
            if (has_shifts()) memory.shifts[column] = keys.first == 0 ? shift : memory.shifts[column] + shift;
            if (keys.first == 0) memory.rows[column] = partial_row(args, row, head);
        }
        turn_query<D>(task, keys, x);
        TQKV_UNROLL
        for (int i = 0; i < TQKV_LANE_VALUES(D); i++)
            if (own < columns)
                keys.queries[column * length + padded<D>(keys.format, value_of_lane<L, C>(part, i))] = x[i];
    }
}

template <int D>
inline void load_queries(constant tqkv__attend_args &args, thread const attend_task &task, column_memory memory)
{
    const int T = TQKV__TAIL_DIM(D) != 0 ? TQKV__TAIL_DIM(D) : 64;
    load_query_part<D>(args, task, first_part(args, task), memory);
    if (tail_values<D>() == 0) return;
    if (has_shifts()) threadgroup_barrier(mem_flags::mem_threadgroup);
    load_query_part<T>(args, task, tail_part<D>(task), memory);
}

// ---- Keys: one tile ----

// Codes of the batch that begins with step `step`, of the tile at slot `base`.
template <int D, int W>
inline void load_key_codes(constant tqkv__attend_args &args, thread const attend_task &task,
                           thread const key_part &part, uint base, uint step, thread key_steps<D, W> &keys)
{
    const int N = KEY_VALUES(D, W), R = KEY_LANES(D, W);
    TQKV_UNROLL
    for (int b = 0; b < KEY_BATCH(D, W); b++) {
        TQKV_UNROLL
        for (int r = 0; r < R; r++) {
            uint row = uint(r * (32 / R)) + task.lane / uint(R);
            load_codes<D, W, N>(
                part.format,
                key_codes(args, task.pages, part.apart, part.rows.codes, row_bytes<D>(part.format), base, row),
                ((step + uint(b)) * uint(R) + task.lane % uint(R)) * uint(N), keys.raw[b][r]);
        }
    }
}

// Factors of block `block` of the lane's rows in the tile at slot `base`.
template <int D, int W>
inline void load_key_scales(constant tqkv__attend_args &args, thread const attend_task &task,
                            thread const key_part &part, uint base, uint block, thread key_steps<D, W> &keys)
{
    const int R = KEY_LANES(D, W);
    TQKV_UNROLL
    for (int r = 0; r < R; r++) {
        uint slot = key_slot(args, task.pages, part.apart, base, uint(r * (32 / R)) + task.lane / uint(R));
        keys.scale[r] = stored_scale<D>(part.format, part.rows, slot, block, part.block_scale);
    }
}

// dot[r][c] += q_c . k over N values of each of the lane's R rows, from value `first` on.
template <int D, int W, int R, int C>
inline void multiply_keys(thread const key_part &part, thread const raw_codes<W, KEY_VALUES(D, W)> (&raw)[R],
                          uint first, thread const codebook &book, thread float (&dot)[R][C])
{
    const int N = KEY_VALUES(D, W);
    threadgroup const float *own = part.queries + padded<D>(part.format, first);
    TQKV_UNROLL
    for (int i = 0; i < N; i += 4) {
        float x[R][4];
        TQKV_UNROLL
        for (int r = 0; r < R; r++) values_at<W, N, 4>(part.format, raw[r], i, book, x[r]);
        FOR_COLUMNS(c)
        {
            float4 q = *(threadgroup const float4 *)(own + (uint(c) * padded<D>(part.format, D) + uint(i)));
            TQKV_UNROLL
            for (int r = 0; r < R; r++)
                dot[r][c] = fma(x[r][3], q.w, fma(x[r][2], q.z, fma(x[r][1], q.y, fma(x[r][0], q.x, dot[r][c]))));
        }
    }
}

// A reduce-scatter over the R lanes that share rows: each step of the tree halves the rows that a lane holds, until
// total[0] is the sum of one whole row. This takes fewer shuffles than one sum a row.
template <int R, int C>
inline void reduce_scatter(uint part, thread float (&total)[R][C])
{
    TQKV_UNROLL
    for (int distance = R / 2; distance > 0; distance /= 2) {
        bool upper = (part & uint(distance)) != 0;
        TQKV_UNROLL
        for (int r = 0; r < R / 2; r++) {
            if (r >= distance) continue;
            FOR_COLUMNS(c)
            {
                float low = total[r][c], high = total[r + distance][c];
                float keep = upper ? high : low, give = upper ? low : high;
                total[r][c] = keep + simd_shuffle_xor(give, ushort(distance));
            }
        }
    }
}

// At the end of a block: total += scale * dot, and dot starts again.
template <int R, int C>
inline void add_block(thread const float (&scale)[R], thread float (&dot)[R][C], thread float (&total)[R][C])
{
    TQKV_UNROLL
    for (int r = 0; r < R; r++) {
        FOR_COLUMNS(c)
        {
            total[r][c] = fma(scale[r], dot[r][c], total[r][c]);
            dot[r][c] = 0.0f;
        }
    }
}

// score[c] = q_c . k of the lane's row, without the factor of rows that have one norm. `keys` holds the first codes and
// factors of the tile at slot `base`; at the end it holds those of the tile at `next_base`.
template <int D, int W, int C>
inline void score_tile(constant tqkv__attend_args &args, thread const attend_task &task, thread const key_part &part,
                       uint base, uint next_base, thread const codebook &book, thread key_steps<D, W> &keys,
                       thread float *score)
{
    const int N = KEY_VALUES(D, W), R = KEY_LANES(D, W), B = KEY_BATCH(D, W);
    const uint steps = uint(D / (N * R)), block_steps = steps / (uint(D) / norm_block<D>(part.format));
    uint own = task.lane % uint(R);
    float dot[R][C], total[R][C];
    TQKV_UNROLL
    for (int r = 0; r < R; r++) {
        TQKV_UNROLL
        for (int c = 0; c < C; c++) dot[r][c] = total[r][c] = 0.0f;
    }
    for (uint batch = 0; batch < steps; batch += uint(B)) {
        TQKV_UNROLL
        for (int b = 0; b < B; b++) {
            uint step = batch + uint(b), next = step + 1u;
            multiply_keys<D, W, R, C>(part, keys.raw[b], (step * uint(R) + own) * uint(N), book, dot);
            if (one_norm<D>(part.format) || next % block_steps != 0) continue;
            add_block<R, C>(keys.scale, dot, total);
            bool last = next == steps;
            load_key_scales<D, W>(args, task, part, last ? next_base : base, last ? 0u : next / block_steps, keys);
        }
        bool last = batch + uint(B) >= steps;
        load_key_codes<D, W>(args, task, part, last ? next_base : base, last ? 0u : batch + uint(B), keys);
    }
    if (one_norm<D>(part.format))
        reduce_scatter<R, C>(own, dot);
    else
        reduce_scatter<R, C>(own, total);
    FOR_COLUMNS(c) score[c] = one_norm<D>(part.format) ? dot[0][c] : total[0][c];
}

// The width of the keys' codes is known when the pipeline is built: one member is used, and the others disappear.
template <int D>
struct any_keys {
    key_steps<D, 4> of_4;
    key_steps<D, 8> of_8;
    key_steps<D, 16> of_16;
};

// Without a tail.
template <>
struct any_keys<0> {
};

// The first codes and factors of the tile at slot `base`.
template <int D, int W>
inline void load_first_keys(constant tqkv__attend_args &args, thread const attend_task &task,
                            thread const key_part &part, uint base, thread key_steps<D, W> &keys)
{
    load_key_codes<D, W>(args, task, part, base, 0u, keys);
    if (!one_norm<D>(part.format)) load_key_scales<D, W>(args, task, part, base, 0u, keys);
}

template <int D>
inline void open_keys(constant tqkv__attend_args &args, thread const attend_task &task, thread const key_part &part,
                      uint base, thread any_keys<D> &keys)
{
    WITH_CODES(part.format, keys, load_first_keys<D, W>(args, task, part, base, codes));
}

template <int D, int C>
inline void score_any_tile(constant tqkv__attend_args &args, thread const attend_task &task,
                           thread const key_part &part, uint base, uint next_base, thread const codebook &book,
                           thread any_keys<D> &keys, thread float *score)
{
    WITH_CODES(part.format, keys, score_tile<D, W, C>(args, task, part, base, next_base, book, codes, score));
}

// ---- The tail of one tile ----

template <int D, int T>
inline void open_tail(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                      thread any_keys<T> &keys)
{
    if (tail_format != 0) open_keys<T>(args, task, tail_part<D>(task), base, keys);
}

template <int D, int T>
inline void open_tail(constant tqkv__attend_args &, thread const attend_task &, uint, thread any_keys<0> &)
{
}

// Adds the scores of the tail to those of the keys. The two leave a row's score with different lanes: `row` is that of
// the keys' lane. key_scale becomes the factor of the sum.
template <int D, int T, int C>
inline void add_tail(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint next_base,
                     uint row, thread const codebook &book, thread any_keys<T> &keys, thread float &key_scale,
                     thread float *score)
{
    if (tail_format == 0) return;
    float tail[C];
    score_any_tile<T, C>(args, task, tail_part<D>(task), base, next_base, book, keys, tail);
    uint slot = key_slot(args, task.pages, tail_rows_apart(), base, row);
    float scale = row_scale<T>(tail_format, task.tail, slot, 1.0f);
    const bool same = BY_CODE_WIDTH(key_format, KEY_LANES, D) == BY_CODE_WIDTH(tail_format, KEY_LANES, T);
    FOR_COLUMNS(c)
    {
        float own = same ? tail[c] : simd_shuffle(tail[c], ushort(lane_of_tile_row<T>(tail_format, row)));
        score[c] = fma(own, scale, score[c] * key_scale);
    }
    key_scale = 1.0f;
}

template <int D, int T, int C>
inline void add_tail(constant tqkv__attend_args &, thread const attend_task &, uint, uint, uint,
                     thread const codebook &, thread any_keys<0> &, thread float &, thread float *)
{
}

// ---- Softmax of one tile ----

// A dot product as a score in powers of two: 2^score is e^(scale * dot).
inline float score_of(constant tqkv__attend_args &args, float dot, float factor, float shift)
{
    if (!softcap) return dot * factor;
    float score = has_shifts() ? fma(dot, factor, shift) : dot * factor;
    return args.softcap * TQKV_LOG2E * precise::tanh(score / (args.softcap * TQKV_LOG2E));
}

// Dot products to scores. A masked position scores -INFINITY by selection, never by arithmetic: nothing that its slot
// holds can spread. Returns whether a maximum is to be raised.
template <int D>
inline bool mask_scores(constant tqkv__attend_args &args, thread const attend_task &task, tile_place at,
                        float key_scale, thread const column_state<D> &state, thread float *score, thread bool *seen)
{
    const int C = TQKV__MAX_COLUMNS(D);
    float factor = key_scale * (args.scale * TQKV_LOG2E);
    bool raise = false;
    FOR_COLUMNS(c)
    {
        int newest = state.newest[c];
        seen[c] = at.position <= newest && (args.window == 0 || at.position > newest - args.window);
        seen[c] = seen[c] && reads_here(args, newest, at.position);
        if (has_tree) seen[c] = seen[c] && tree_shows(args, task.tree, newest, at.position);
        score[c] = seen[c] ? score_of(args, score[c], factor, state.shift[c]) : -INFINITY;
        raise = raise || score[c] > state.maximum[c] + 11.0f;
    }
    return raise;
}

// The maximum of a column, raised where the largest score of a tile exceeds it by 11. Weights stay below 2^11.5, and
// most tiles skip the rescaling. It is a whole number: see maximum_of_slice. Each column decides for itself: its bits
// do not depend on the others.
inline float raised_maximum(float maximum, float largest) { return largest > maximum + 11.0f ? largest : maximum; }

// Scores to weights of the online softmax.
template <int D>
inline void store_tile_weights(uint row, float value_scale, thread const float *score, thread const bool *seen,
                               thread column_state<D> &state, threadgroup float *weights)
{
    const int C = TQKV__MAX_COLUMNS(D);
    float weight[C];
    TQKV_UNROLL
    for (int c = 0; c < C; c++) weight[c] = 0.0f;
    FOR_COLUMNS(c)
    {
        float share = fast::exp2(score[c] - state.maximum[c]);
        state.sum[c] += share;
        weight[c] = share * (seen[c] ? value_scale : 0.0f); // a masked norm may be NaN
    }
    store_weights<C>(weights, row, weight);
}

template <int D>
inline void weigh_tile(constant tqkv__attend_args &args, thread const attend_task &task, tile_place at, float key_scale,
                       float value_scale, thread float *score, thread column_state<D> &state,
                       threadgroup float *weights)
{
    const int C = TQKV__MAX_COLUMNS(D), V = LANE_SUMS(D);
    bool seen[C];
    if (simd_any(mask_scores(args, task, at, key_scale, state, score, seen))) {
        FOR_COLUMNS(c)
        {
            float largest = raised_maximum(state.maximum[c], rint(simd_max(score[c])));
            float shrink = share_of(state.maximum[c], largest);
            state.maximum[c] = largest;
            state.sum[c] *= shrink;
            TQKV_UNROLL
            for (int i = 0; i < V; i++) state.out[c][i] *= shrink;
        }
    }
    store_tile_weights(at.row, value_scale, score, seen, state, weights);
}

// ---- The simdgroups' results as one ----

// Maxima and sums of the simdgroup's columns.
template <int D>
inline void store_states(thread const attend_task &task, thread const column_state<D> &state)
{
    const int C = TQKV__MAX_COLUMNS(D);
    threadgroup float *own = task.states + task.simdgroup * uint(2 * C);
    FOR_COLUMNS(c)
    {
        float sum = simd_sum(state.sum[c]);
        if (task.lane != 0) continue;
        own[c * 2] = state.maximum[c] == NOTHING_SEEN ? -INFINITY : state.maximum[c];
        own[c * 2 + 1] = sum;
    }
}

// Sums of values that lie next to each other in a row: a lane's of a piece, 8, over 32 lanes of which VALUE_LANES lie
// across the row. Each keeps KEPT_SUMS of the row's sums from value kept_sum on: as in reduce_scatter.
#define KEPT_SUMS(D) (VALUE_LANES(D) / 4)
template <int D>
inline uint kept_sum(uint lane)
{
    uint number = lane / uint(VALUE_LANES(D)), first = (number & 1u) * 4u + (number & 2u) + number / 4u;
    return lane % uint(VALUE_LANES(D)) * 8u + first;
}

template <int D>
inline void add_lanes(uint lane, thread const float *from, thread float *x)
{
    TQKV_UNROLL
    for (int i = 0; i < 8; i++) x[i] = from[i];
    TQKV_UNROLL
    for (int step = 0; step < 3; step++) {
        const int distance = VALUE_LANES(D) << step, kept = 4 >> step;
        if (distance >= 32) continue;
        bool upper = (lane & uint(distance)) != 0;
        TQKV_UNROLL
        for (int i = 0; i < 4; i++) {
            if (i >= kept) continue;
            float low = x[i], high = x[i + kept];
            x[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, ushort(distance));
        }
    }
}

// A pass takes as many pieces of columns as the memory of their sums holds, piece after piece of each column.
#define PIECE_VALUES(D)      (LANE_SPAN(D) * 8)
#define PASS_PIECES(D)       (TQKV__ATTEND_PASS_FLOATS(D) / PIECE_VALUES(D))
#define ATTEND_SUM_FLOATS(D) uint(TQKV__ATTEND_SUM_BYTES(D, int(columns)) / 4)

// Stores the simdgroup's sums of the pass that begins with piece `first`.
template <int D>
inline void store_sums(thread const attend_task &task, int first, thread const column_state<D> &state)
{
    const int C = TQKV__MAX_COLUMNS(D), J = VALUE_PIECES(D), N = KEPT_SUMS(D);
    threadgroup float *own = task.weights + task.simdgroup * ATTEND_SUM_FLOATS(D) + kept_sum<D>(task.lane);
    bool has_values = task.lane % uint(VALUE_LANES(D)) < uint(LANE_SPAN(D));
    TQKV_UNROLL
    for (int p = 0; p < PASS_PIECES(D); p++) {
        const int c = (first + p) / J < C ? (first + p) / J : C - 1;
        if (first + p >= C * J || uint(c) >= columns) continue;
        float x[8];
        add_lanes<D>(task.lane, state.out[c] + (first + p) % J * 8, x);
        if (!has_values) continue;
        threadgroup float *to = own + p * PIECE_VALUES(D);
        if (N == 1) to[0] = x[0];
        if (N == 2) {
            float2 two;
            two.x = x[0];
            two.y = x[1];
            *(threadgroup float2 *)to = two;
        }
        TQKV_UNROLL
        for (int i = 0; i + 3 < N; i += 4) {
            float4 four;
            four.x = x[i];
            four.y = x[i + 1];
            four.z = x[i + 2];
            four.w = x[i + 3];
            *(threadgroup float4 *)(to + i) = four;
        }
    }
}

// Number `at` of the pass.
template <int D>
inline void open_four_of_pass(thread const attend_task &task, int first, uint at, column_memory memory, column_end how,
                              thread four_sums &own)
{
    const uint J = uint(VALUE_PIECES(D)), E = uint(PIECE_VALUES(D));
    uint piece = at / (E / 4u), value = at % (E / 4u) * 4u, number = uint(first) + piece;
    open_four(task, uint(D), piece < uint(PASS_PIECES(D)) ? number / J : memory.n, number % J * E + value,
              task.weights + piece * E + value, memory, how, own);
}

// Adds the pass up, four values of a column a thread. The first pass also adds the columns up.
template <int D>
inline void combine_pass(thread const attend_task &task, int first, column_memory memory, column_end how,
                         thread const column_state<D> &state)
{
    uint thread_index = task.simdgroup * 32u + task.lane, n_threads = task.n_simdgroups * 32u;
    four_sums own;
    open_four_of_pass<D>(task, first, thread_index, memory, how, own); // its loads are under way before the barriers
    store_sums<D>(task, first, state);
    if (first == 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (task.simdgroup == 0 && task.lane < columns) combine_states<32>(task, task.lane, memory, how);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint at = thread_index; at < uint(PASS_PIECES(D) * PIECE_VALUES(D) / 4); at += n_threads) {
        if (at != thread_index) open_four_of_pass<D>(task, first, at, memory, how, own);
        if (own.used) combine_four<32>(task, ATTEND_SUM_FLOATS(D), memory, how, own);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); // before the next sums, or weights, overwrite these
}

// Adds a stretch to the partial results: that of its section and, at the section's end, that of all. Returns the number
// of the one that has the total.
template <int D>
inline uint keep_stretch(constant tqkv__attend_args &args, thread const attend_task &task, stretch_range own,
                         uint stretch, column_memory memory, thread const column_state<D> &state)
{
    const int J = VALUE_PIECES(D);
    column_end how = open_end(args, task, own, stretch, uint(D));
    store_states(task, state);
    TQKV_UNROLL
    for (int first = 0; first < TQKV__MAX_COLUMNS(D) * J; first += PASS_PIECES(D))
        if (uint(first / J) < columns) combine_pass<D>(task, first, memory, how, state);
    return how.to_total ? 0u : partial_of_section(args, task.split);
}

// ---- The kernel ----

template <int D>
inline void find_newest(constant tqkv__attend_args &args, uint first_column, thread column_state<D> &state)
{
    TQKV_UNROLL
    for (int c = 0; c < TQKV__MAX_COLUMNS(D); c++)
        state.newest[c] = newest_seen(args, many_queries ? row_of_column(args, first_column + uint(c)).query : 0);
}

template <int D>
inline void clear_sums(thread column_state<D> &state)
{
    TQKV_UNROLL
    for (int c = 0; c < TQKV__MAX_COLUMNS(D); c++) {
        state.maximum[c] = NOTHING_SEEN;
        state.sum[c] = 0.0f;
        TQKV_UNROLL
        for (int i = 0; i < LANE_SUMS(D); i++) state.out[c][i] = 0.0f;
    }
}

// What a simdgroup carries from tile to tile. D: of the keys
template <int D>
struct tile_walk {
    tile_steps steps;
    tile_search search;
    tile_place next; // the place of the next tile
    any_keys<D> keys;
    any_keys<TQKV__TAIL_DIM(D)> tail;
};

struct codebooks {
    codebook keys, values, tail;
};

// A barrier must precede.
inline codebooks open_codebooks(thread const attend_task &task)
{
    codebooks books;
    books.keys = open_codebook(key_format, task.tables, task.lane);
    books.values = open_codebook(value_format, task.tables + 256, task.lane);
    books.tail = open_codebook(tail_format, task.tail_table, task.lane);
    return books;
}

// The simdgroup's tiles before tile `end`.
template <int KD, int VD>
inline void add_tiles(constant tqkv__attend_args &args, thread const attend_task &task, uint end,
                      thread const codebooks &books, thread tile_walk<KD> &walk, thread column_state<VD> &state)
{
    threadgroup float *weights = task.weights + task.simdgroup * ATTEND_SUM_FLOATS(VD);
    while (walk.steps.tile < end) {
        tile_place at = walk.next;
        next_tile(walk.steps, task.n_simdgroups);
        tile_memory base = find_next(args, task.pages, walk.steps, task.n_simdgroups, walk.search);
        walk.next = open_tile(args, base, walk.steps.tile, at.row);
        const int C = TQKV__MAX_COLUMNS(KD), T = TQKV__TAIL_DIM(KD);
        float score[C];
        uint key = key_slot(args, task.pages, rows_apart(), at.base.keys, at.row);
        uint value = value_slot(args, task.pages, at.base.values, at.row);
        float key_scale = row_scale<KD>(key_format, task.keys, key, args.key_block_scale);
        float value_scale = row_scale<VD>(value_format, task.values, value, args.value_block_scale);
        any_values<VD> values;
        open_values<VD>(args, task, at.base.values, values);
        score_any_tile<KD, C>(args, task, first_part(args, task), at.base.keys, walk.next.base.keys, books.keys,
                              walk.keys, score);
        add_tail<KD, T, C>(args, task, at.base.tail, walk.next.base.tail, at.row, books.tail, walk.tail, key_scale,
                           score);
        weigh_tile<VD>(args, task, at, key_scale, value_scale, score, state, weights);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        add_any_values<VD>(args, task, at.base.values, books.values, values, weights, state);
        simdgroup_barrier(mem_flags::mem_threadgroup); // before the next tile overwrites the weights
    }
}

// The arguments of attend and attend_matrix. codes: [n_kv_heads][capacity][row_bytes], norms:
// [n_kv_heads][capacity][norms of a row]
// clang-format off
#define ATTEND_ARGUMENTS \
    constant tqkv__attend_args &call [[buffer(0)]], \
    device const uchar *q [[buffer(1)]], \
    device const uchar *key_codes [[buffer(2)]], \
    device const float *key_norms [[buffer(3)]], \
    device const uchar *value_codes [[buffer(4)]], \
    device const float *value_norms [[buffer(5)]], \
    device float *partial_out [[buffer(6)]], \
    device float *partial_state [[buffer(7)]], \
    device const float *key_center [[buffer(8)]], \
    device const int *key_pages [[buffer(9)]], \
    device const int *value_pages [[buffer(10)]], \
    device const uint *tree [[buffer(11)]], \
    constant tqkv__batch_item *items [[buffer(12)]], \
    device const uchar *tail_codes [[buffer(13)]], \
    device const float *tail_norms [[buffer(14)]], \
    device const float *tail_center [[buffer(15)]], \
    device const int *list_rows [[buffer(16)]], \
    device const float *key_scale [[buffer(17)]], \
    device const float *tail_scale [[buffer(18)]], \
    threadgroup float *tables [[threadgroup(0)]], \
    threadgroup float *queries [[threadgroup(1)]], \
    threadgroup float *states [[threadgroup(3)]], \
    uint3 group [[threadgroup_position_in_grid]], \
    uint lane [[thread_index_in_simdgroup]], \
    uint simdgroup [[simdgroup_index_in_threadgroup]], \
    uint n_simdgroups [[simdgroups_per_threadgroup]]

// `args` and `task` of these arguments, but for threadgroup memory that the two kernels share out in their own ways. D:
// of the keys, V: of the values
#define ATTEND_TASK(D, V) \
    uint item = batch ? item_of(items, group.z, TQKV_BY_GROUP) : 0u; \
    constant tqkv__attend_args &args = batch ? items[item].attend : call; \
    if (batch && args.kv_len == 0) return; \
    attend_task task; \
    task.q = q; \
    task.keys = stream_of_head<D>(key_format, key_codes, key_norms, args.key_slots, group.x); \
    task.values = stream_of_head<V>(value_format, value_codes, value_norms, args.value_slots, group.x); \
    task.tail = stream_of_head<64>(tail_format, tail_codes, tail_norms, args.tail_slots, group.x); \
    task.partial_out = partial_out; \
    task.partial_state = partial_state; \
    task.center = key_center; \
    task.tail_center = tail_center; \
    task.scale = key_scale; \
    task.tail_scale = tail_scale; \
    task.pages.keys = key_pages; \
    task.pages.values = value_pages; \
    task.pages.lane = lane; \
    task.pages.simdgroup = simdgroup; \
    task.pages.shared = task.pages.shared_values = false; \
    task.list_rows = list_rows; \
    task.tree = tree; \
    task.tables = tables; \
    task.queries = queries; \
    task.kept = states; \
    task.kv_head = group.x; \
    task.lane = lane; \
    task.simdgroup = simdgroup; \
    task.n_simdgroups = n_simdgroups; \
    if (batch) \
        open_item(items[item], group.z, task); \
    else \
        open_place(args, group.y, group.z, task);
// clang-format on

#endif

// ---- shaders/strand.h ----

// Strands, for short contexts, whose stretches alone leave most of a GPU idle. A strand is what one simdgroup of a
// stretch's threadgroup adds up: the tiles whose numbers have the same rest, four of them. A threadgroup that has only
// a strand gives each simdgroup one of its tiles to score. Then they agree on the maxima, leave the weights in
// threadgroup memory, and each adds up its part of the values over all tiles, one after another. So its sums have the
// bits that one simdgroup gives them, and attend_merge adds strands up as the end of a stretch does: how a call is
// divided changes no bit.
#ifndef TQKV_STRAND_H
#define TQKV_STRAND_H

// The tiles of a strand, `first` and each n_simdgroups behind it, without those that no column sees.
struct strand_tiles {
    uint first;
    tile_range seen;
};

inline bool has_tile(strand_tiles tiles, uint tile)
{
    bool inside = tile >= tiles.seen.begin && tile < tiles.seen.end;
    return inside && (tile < tiles.seen.gap_begin || tile >= tiles.seen.gap_end);
}

inline strand_tiles open_strand(constant tqkv__attend_args &args, tile_range seen, stretch_range own, uint strand)
{
    strand_tiles tiles;
    tiles.first = first_tile_of_stretch(args, own.begin) + strand;
    tiles.seen = seen;
    return tiles;
}

// What a threadgroup adds up: stretches or, if it is `alone` with it, a strand of one. A pipeline that has fewer
// simdgroups than a stretch has strands adds up other tiles in each: then the threadgroup of the first strand has the
// whole stretch, and the others are `idle`: they add nothing. Likewise where it is not `able` to have strands.
struct threadgroup_tiles {
    stretch_range own;
    strand_tiles strand;
    bool alone, idle;
};

inline threadgroup_tiles open_threadgroup(constant tqkv__attend_args &args, thread const attend_task &task,
                                          tile_range seen, bool able)
{
    const bool shared = has_strands && args.strands > 1;
    const uint number = shared ? task.split % uint(TQKV__STRANDS) : 0u;
    threadgroup_tiles tiles;
    tiles.own = stretches_of_threadgroup(args, seen, shared ? task.split / uint(TQKV__STRANDS) : task.split);
    tiles.strand = open_strand(args, seen, tiles.own, number);
    tiles.alone = able && shared && task.n_simdgroups == uint(TQKV__STRANDS);
    tiles.idle = number != 0u && !tiles.alone;
    return tiles;
}

// Finds the simdgroup's first tile.
inline tile_memory find_begin(constant tqkv__attend_args &args, thread const attend_task &task, tile_range seen,
                              thread const threadgroup_tiles &tiles, thread tile_steps &steps,
                              thread tile_search &search)
{
    if (tiles.alone) {
        steps.tile = tiles.strand.first + task.simdgroup * uint(TQKV__STRANDS);
        return find_one(args, task.pages, steps.tile);
    }
    steps = open_steps(args, seen, tiles.own, task.simdgroup, task.n_simdgroups);
    return find_first(args, task.pages, steps, task.n_simdgroups, search);
}

// ---- Maxima: raised by the tiles one after another, as if one simdgroup had them all ----

// The largest scores of a column in the tiles, `step` numbers apart.
struct tile_maxima {
    threadgroup const float *largest;
    uint step;
};

// The maximum of the column once the first n tiles have raised it.
inline float maximum_after(tile_maxima maxima, uint n)
{
    float maximum = NOTHING_SEEN;
    TQKV_UNROLL
    for (uint i = 0; i < uint(TQKV__STRANDS); i++) {
        float raised = raised_maximum(maximum, maxima.largest[i * maxima.step]);
        maximum = i < n ? raised : maximum;
    }
    return maximum;
}

// What the sums of the tiles before tile i are multiplied by.
inline float shrink_before(tile_maxima maxima, int i)
{
    float before = maximum_after(maxima, uint(i));
    return i == 0 ? 1.0f : share_of(before, raised_maximum(before, maxima.largest[uint(i) * maxima.step]));
}

// ---- Values ----

// Where the values of the tiles are: slots as in tile_memory. Shared ones each simdgroup has stored of its own tile: a
// barrier must precede what reads them.
struct strand_slots {
    uint base[TQKV__STRANDS];
};

inline strand_slots find_strand(constant tqkv__attend_args &args, thread const attend_task &task,
                                thread const strand_tiles &tiles)
{
    strand_slots slots;
    TQKV_UNROLL
    for (uint i = 0; i < uint(TQKV__STRANDS); i++)
        slots.base[i] = task.pages.shared && rows_apart()
                            ? (2u * i * slot_lists() + (same_slots ? 0u : 1u)) * 32u
                            : find_tile(args, task.pages, tiles.first + i * uint(TQKV__STRANDS)).values;
    return slots;
}

#endif

// ---- shaders/attend_strand.h ----

// A strand of a stretch by lanes: strand.h says what it is. Each simdgroup has the scores of one tile as in attend.h,
// and adds up its part of the values of all four. Then the kernel attend, of strands and of stretches.
//
// Letters: as in attend.h.
#ifndef TQKV_ATTEND_STRAND_H
#define TQKV_ATTEND_STRAND_H

// ---- Softmax: the maxima of the tiles, one after another, as if one simdgroup had them all ----

// The largest score of each column in the simdgroup's tile: [C][TQKV__STRANDS]. A barrier must follow.
template <int C>
inline void store_tile_maxima(thread const attend_task &task, thread const float *score)
{
    FOR_COLUMNS(c)
    {
        float largest = rint(simd_max(score[c]));
        if (task.lane == 0) task.states[uint(c * TQKV__STRANDS) + task.simdgroup] = largest;
    }
}

inline tile_maxima maxima_of_column(thread const attend_task &task, uint c)
{
    tile_maxima maxima = {task.states + c * uint(TQKV__STRANDS), 1u};
    return maxima;
}

// ---- Weights of the tiles, and their sums: behind a tile's weights what its lanes add to the sums, [C][32] ----

template <int D>
inline threadgroup float *weights_of_tile(thread const attend_task &task, uint number)
{
    return task.weights + number * ATTEND_SUM_FLOATS(D);
}

inline uint shares_after_weights() { return columns <= 2 ? 64u : (columns + 3u) / 4u * 128u; }

template <int D>
inline void weigh_strand_tile(thread const attend_task &task, uint row, float value_scale, thread const float *score,
                              thread const bool *seen, thread column_state<D> &state)
{
    const int C = TQKV__MAX_COLUMNS(D);
    threadgroup float *weights = weights_of_tile<D>(task, task.simdgroup), *shares = weights + shares_after_weights();
    FOR_COLUMNS(c) { state.maximum[c] = maximum_after(maxima_of_column(task, uint(c)), task.simdgroup + 1u); }
    store_tile_weights(row, value_scale, score, seen, state, weights);
    FOR_COLUMNS(c) shares[uint(c) * 32u + task.lane] = state.sum[c];
}

// Maximum and sum of a strand's columns, for attend_merge: each simdgroup has its own columns.
template <int D>
inline void store_strand_states(constant tqkv__attend_args &args, thread const attend_task &task, uint used,
                                column_memory memory)
{
    for (uint c = task.simdgroup; c < used; c += uint(TQKV__STRANDS)) {
        tile_maxima maxima = maxima_of_column(task, c);
        float sum = 0.0f, maximum = maximum_after(maxima, uint(TQKV__STRANDS));
        TQKV_UNROLL
        for (int i = 0; i < TQKV__STRANDS; i++) {
            float own = weights_of_tile<D>(task, uint(i))[shares_after_weights() + c * 32u + task.lane];
            sum = sum * shrink_before(maxima, i) + own;
        }
        sum = simd_sum(sum);
        if (task.lane == 0)
            store_column(args, task, task.split, c, memory, maximum == NOTHING_SEEN ? -INFINITY : maximum, sum);
    }
}

// ---- Values: the lanes lie across a row as in attend_values.h, but four of them have the 8 values of one there ----

#define STRAND_VALUES   2                                // a lane has of a piece
#define STRAND_STEPS(D) (TQKV__STRANDS * VALUE_LANES(D)) // of all tiles
#define STRAND_BATCH(D) \
    (TQKV_STRAND_WORDS / VALUE_PIECES(D) < 2 * VALUE_LANES(D) ? TQKV_STRAND_WORDS / VALUE_PIECES(D) \
                                                              : 2 * VALUE_LANES(D))
#define STRAND_SUMS(D)  (STRAND_VALUES * VALUE_PIECES(D))
#define STRAND_QUADS(D) uint(VALUE_LANES(D) / TQKV__STRANDS) // of four lanes, of a simdgroup and row

// The lane of attend_values.h whose values the lane has a part of: it may have none.
template <int D>
inline uint strand_part(thread const attend_task &task)
{
    return task.simdgroup * STRAND_QUADS(D) + task.lane / 4u % STRAND_QUADS(D);
}

template <int D, int W>
struct strand_steps {
    value_step<D, W, STRAND_VALUES> step[STRAND_BATCH(D)];
};

template <int D>
struct any_strand_steps {
    strand_steps<D, 4> of_4;
    strand_steps<D, 8> of_8;
    strand_steps<D, 16> of_16;
};

// Steps count through all tiles.
template <int D, int W>
inline void load_strand_step(constant tqkv__attend_args &args, thread const attend_task &task,
                             thread const strand_slots &slots, int number, uint value,
                             thread value_step<D, W, STRAND_VALUES> &step)
{
    const int L = VALUE_LANES(D);
    load_value_step(args, task, slots.base[number / L], uint(number % L), value, step);
}

template <int D, int W>
inline void load_strand_steps(constant tqkv__attend_args &args, thread const attend_task &task,
                              thread const strand_slots &slots, uint value, thread strand_steps<D, W> &steps)
{
    TQKV_UNROLL
    for (int b = 0; b < STRAND_BATCH(D); b++) load_strand_step(args, task, slots, b, value, steps.step[b]);
}

// The sums of the tiles before tile i, brought to its maxima.
template <int D>
inline void shrink_sums(thread const attend_task &task, int i,
                        thread float (&out)[TQKV__MAX_COLUMNS(D)][STRAND_SUMS(D)])
{
    const int C = TQKV__MAX_COLUMNS(D);
    FOR_COLUMNS(c)
    {
        float shrink = shrink_before(maxima_of_column(task, uint(c)), i);
        TQKV_UNROLL
        for (int v = 0; v < STRAND_SUMS(D); v++) out[c][v] *= shrink;
    }
}

// `steps` holds the first ones. Each later one is loaded as soon as an earlier one makes room.
template <int D, int W>
inline void add_strand_values(constant tqkv__attend_args &args, thread const attend_task &task,
                              thread const strand_slots &slots, uint value, thread const codebook &book,
                              thread strand_steps<D, W> &steps,
                              thread float (&out)[TQKV__MAX_COLUMNS(D)][STRAND_SUMS(D)])
{
    const int L = VALUE_LANES(D), B = STRAND_BATCH(D);
    TQKV_UNROLL
    for (int i = 0; i < TQKV__STRANDS; i++) {
        if (i > 0) shrink_sums<D>(task, i, out);
        TQKV_UNROLL
        for (int s = 0; s < L; s++) {
            const int number = i * L + s;
            add_value_step(steps.step[number % B], uint(s), task.lane, book, weights_of_tile<D>(task, uint(i)), out);
            if (number + B < STRAND_STEPS(D))
                load_strand_step(args, task, slots, number + B, value, steps.step[number % B]);
        }
    }
}

// The sums over the lanes whose rows differ, in the order of add_lanes.
template <int D>
inline void store_strand_sums(constant tqkv__attend_args &args, thread const attend_task &task, uint used, uint value,
                              column_memory memory, thread float (&out)[TQKV__MAX_COLUMNS(D)][STRAND_SUMS(D)])
{
    const int C = TQKV__MAX_COLUMNS(D);
    const uint n_rows = uint(args.n_queries) * uint(args.n_kv_heads) * uint(args.group);
    const bool own = task.lane < uint(VALUE_LANES(D)) && strand_part<D>(task) < uint(LANE_SPAN(D));
    FOR_COLUMNS(c)
    {
        TQKV_UNROLL
        for (int v = 0; v < STRAND_SUMS(D); v++) {
            TQKV_UNROLL
            for (int distance = VALUE_LANES(D); distance < 32; distance *= 2)
                out[c][v] += simd_shuffle_xor(out[c][v], ushort(distance));
        }
        if (!own || uint(c) >= used) continue;
        ulong row = row_offset(task.split, n_rows) + ulong(memory.rows[c]);
        device float *to = task.partial_out + (row * ulong(D) + ulong(value));
        TQKV_UNROLL
        for (int v = 0; v < STRAND_SUMS(D); v++)
            to[v / STRAND_VALUES * LANE_SPAN(D) * 8 + v % STRAND_VALUES] = out[c][v];
    }
}

// ---- The strand ----

template <int KD, int VD>
inline void attend_strand(constant tqkv__attend_args &args, thread const attend_task &task,
                          thread const strand_tiles &tiles, thread const codebooks &books, column_memory memory,
                          thread tile_walk<KD> &walk, thread column_state<VD> &state)
{
    const int C = TQKV__MAX_COLUMNS(VD), T = TQKV__TAIL_DIM(KD);
    const uint used = min(uint(columns), end_of_columns(args, task) - task.first_column);
    const uint value = min(strand_part<VD>(task), uint(LANE_SPAN(VD)) - 1u) * 8u + task.lane % 4u * uint(STRAND_VALUES);
    const strand_slots slots = find_strand(args, task, tiles);
    tile_place at = walk.next;
    float score[C], out[C][STRAND_SUMS(VD)];
    bool seen[C];
    clear_sums(state);
    if (!has_tile(tiles, walk.steps.tile)) at.position = 0x7fffffff;
    float key_scale = row_scale<KD>(
        key_format, task.keys, key_slot(args, task.pages, rows_apart(), at.base.keys, at.row), args.key_block_scale);
    float value_scale = row_scale<VD>(value_format, task.values, value_slot(args, task.pages, at.base.values, at.row),
                                      args.value_block_scale);
    any_strand_steps<VD> steps;
    WITH_CODES(value_format, steps, load_strand_steps<VD, W>(args, task, slots, value, codes));
    score_any_tile<KD, C>(args, task, first_part(args, task), at.base.keys, at.base.keys, books.keys, walk.keys, score);
    add_tail<KD, T, C>(args, task, at.base.tail, at.base.tail, at.row, books.tail, walk.tail, key_scale, score);
    mask_scores(args, task, at, key_scale, state, score, seen);
    store_tile_maxima<C>(task, score);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    weigh_strand_tile(task, at.row, value_scale, score, seen, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    TQKV_UNROLL
    for (int c = 0; c < C; c++) {
        TQKV_UNROLL
        for (int v = 0; v < STRAND_SUMS(VD); v++) out[c][v] = 0.0f;
    }
    WITH_CODES(value_format, steps, add_strand_values<VD, W>(args, task, slots, value, books.values, codes, out));
    store_strand_sums<VD>(args, task, used, value, memory, out);
    store_strand_states<VD>(args, task, used, memory);
}

// ---- The kernel ----

template <int KD, int VD>
inline void attend(constant tqkv__attend_args &args, thread const attend_task &task)
{
    const int C = TQKV__MAX_COLUMNS(VD);
    const uint n_threads = task.n_simdgroups * 32u;
    uint thread_index = task.simdgroup * 32u + task.lane, partial = 0u;
    column_memory memory = column_memory_of(task.kept, uint(C));
    tile_range seen = tiles_seen(args, task.first_column, task.pages.list);
    threadgroup_tiles tiles = open_threadgroup(args, task, seen, true);
    column_state<VD> state;
    tile_walk<KD> walk;
    tile_memory base = find_begin(args, task, seen, tiles, walk.steps, walk.search);
    walk.next = open_tile(args, base, walk.steps.tile, row_of_lane<KD>(key_format, task.lane));
    open_keys<KD>(args, task, first_part(args, task), walk.next.base.keys, walk.keys);
    open_tail<KD, TQKV__TAIL_DIM(KD)>(args, task, walk.next.base.tail, walk.tail);
    load_codebook(key_format, task.tables, thread_index, n_threads);
    load_codebook(value_format, task.tables + 256, thread_index, n_threads);
    if (tail_values<KD>() != 0) load_codebook(tail_format, task.tail_table, thread_index, n_threads);
    load_queries<KD>(args, task, memory);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    codebooks books = open_codebooks(task);
    find_newest<VD>(args, task.first_column, state);
    FOR_COLUMNS(c) state.shift[c] = has_shifts() ? memory.shifts[c] : 0.0f;
    if (tiles.alone) {
        attend_strand<KD, VD>(args, task, tiles.strand, books, memory, walk, state);
        return;
    }
    for (uint stretch = tiles.own.begin; stretch < tiles.own.end; stretch++) {
        clear_sums<VD>(state);
        uint end = min(seen.end, first_tile_of_stretch(args, stretch + 1u));
        add_tiles<KD, VD>(args, task, tiles.idle ? 0u : end, books, walk, state);
        partial = keep_stretch<VD>(args, task, tiles.own, stretch, memory, state);
    }
    store_columns(args, task, partial, memory);
}

#endif

// ---- shaders/attend.metal ----

// attend: partial attention of stretches of the context; attend_merge makes one result of them. Threadgroups: x KV
// heads, y blocks of query rows, z splits of the context.

// D: of the keys, V: of the values. NAME: D, or D_V where V differs
// clang-format off
#define ATTEND(NAME, D, V) \
    kernel void tqkv_attend_d##NAME(threadgroup float *weights [[threadgroup(2)]], ATTEND_ARGUMENTS) \
    { \
        ATTEND_TASK(D, V) \
        task.tail_queries = queries + TQKV__QUERY_FLOATS(D) * int(columns); \
        task.weights = weights; \
        task.tail_table = tables + 512; \
        task.states = states + TQKV__COLUMN_BYTES(TQKV__MAX_COLUMNS(V)) / 4; \
        open_slots(uint(TQKV__MAX_COLUMNS(V)), task); \
        TQKV_LONG_CALL(attend<D, V>(args, task)); \
    }
// clang-format on

#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d32)
ATTEND(32, 32, 32)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d48)
ATTEND(48, 48, 48)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d64)
ATTEND(64, 64, 64)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d80)
ATTEND(80, 80, 80)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d96)
ATTEND(96, 96, 96)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d128)
ATTEND(128, 128, 128)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d192)
ATTEND(192, 192, 192)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d256)
ATTEND(256, 256, 256)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d448)
ATTEND(448, 448, 448)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d512)
ATTEND(512, 512, 512)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d1024)
ATTEND(1024, 1024, 1024)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_d192_128)
ATTEND(192_128, 192, 128)
#endif

// ---- shaders/scan.h ----

// Sums and maxima over the threads up to one, in a fixed order.
#ifndef TQKV_SCAN_H
#define TQKV_SCAN_H

// The sum over this lane and those before it.
inline uint sum_to_lane(uint x, uint lane)
{
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2) {
        uint other = simd_shuffle(x, ushort(lane >= distance ? lane - distance : lane));
        x += lane >= distance ? other : 0u;
    }
    return x;
}

inline uint max_to_lane(uint x, uint lane)
{
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2)
        x = max(x, simd_shuffle(x, ushort(lane >= distance ? lane - distance : lane)));
    return x;
}

inline uint sum_of_lanes(uint x)
{
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2) x += simd_shuffle_xor(x, ushort(distance));
    return x;
}

// A thread among those of its threadgroup, and memory for a number of each simdgroup.
struct scan_place {
    uint lane, simdgroup, n_simdgroups;
    threadgroup uint *shared; // [32]
};

// Over all threads before this one, and over all.
struct scanned {
    uint before, all;
};

inline scanned sum_to_thread(thread const scan_place &at, uint x)
{
    scanned result = {0u, 0u};
    uint to_lane = sum_to_lane(x, at.lane);
    if (at.lane == 31u) at.shared[at.simdgroup] = to_lane;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint sum = at.lane < at.n_simdgroups ? at.shared[at.lane] : 0u, to_simdgroup = sum_to_lane(sum, at.lane);
    result.all = simd_shuffle(to_simdgroup, ushort(31));
    result.before = simd_shuffle(to_simdgroup - sum, ushort(at.simdgroup)) + to_lane - x;
    threadgroup_barrier(mem_flags::mem_threadgroup); // before others are stored
    return result;
}

// The largest; 0 before the first.
inline scanned max_to_thread(thread const scan_place &at, uint x)
{
    scanned result = {0u, 0u};
    uint to_lane = max_to_lane(x, at.lane);
    uint before_lane = simd_shuffle(to_lane, ushort(at.lane > 0u ? at.lane - 1u : 0u));
    if (at.lane == 31u) at.shared[at.simdgroup] = to_lane;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint to_simdgroup = max_to_lane(at.lane < at.n_simdgroups ? at.shared[at.lane] : 0u, at.lane);
    uint before = simd_shuffle(to_simdgroup, ushort(at.simdgroup > 0u ? at.simdgroup - 1u : 0u));
    result.all = simd_shuffle(to_simdgroup, ushort(31));
    result.before = at.simdgroup > 0u ? before : 0u;
    result.before = at.lane > 0u ? max(result.before, before_lane) : result.before;
    threadgroup_barrier(mem_flags::mem_threadgroup); // likewise
    return result;
}

#endif

// ---- shaders/attend_list.metal ----

// attend_list: the caller's lists of blocks as attention takes them: without bad entries, and without blocks that the
// query does not see. Nothing else reads the caller's lists. Threadgroups: x rows of the lists.

// has_tree: declared above
// batch: declared above
// halves: declared above

inline uint entries_of(constant tqkv__attend_args &args) { return uint(args.list_row) - uint(TQKV__LIST_HEADER); }

// Positions count from the oldest resident one, and blocks from its block: `inside` positions of that are gone.
struct list_range {
    int from, to; // positions that the query looks at, and their blocks [first, last]
    int first, last;
    int recent; // all blocks from here on are seen,
    int newest; // and without a list none before this position
};

// Where the newest positions begin that the query sees whatever its list. They end before `to`.
inline int newest_from(constant tqkv__attend_args &args, device const uint *tree, uint query, int from, int to)
{
    int left = args.list_newest;
    while (has_tree && left > 0 && to > from && to > args.first_of_tree) {
        to--;
        uint bit = uint(to - args.first_of_tree);
        left -= int(tree[query * 2u + bit / 32u] >> (bit % 32u) & 1u);
    }
    return to - from < left ? from : to - left;
}

inline list_range range_of_query(constant tqkv__attend_args &args, device const uint *tree, uint query)
{
    list_range range;
    int end = args.first_newest + int(query) + 1, to = max(min(end, args.kv_len), 0);
    range.from = args.window != 0 ? max(end - args.window, 0) : 0;
    int begin =
        min(halves_begin(args, end - 1), to); // what the query reads here ends or begins with its own newest halves
    if (halves == TQKV__NEWEST_HALVES) range.from = max(range.from, begin);
    range.newest = newest_from(args, tree, query, range.from, to);
    int begins =
        range.newest < to ? range.newest + args.list_inside : to + args.list_inside + (1 << args.list_shift) - 1;
    range.recent = begins >> args.list_shift;
    range.to = min(to, args.slice_end);
    if (halves == TQKV__BEFORE_HALVES) range.to = min(range.to, begin);
    range.to = max(range.to, range.from);
    range.first = (range.from + args.list_inside) >> args.list_shift;
    range.last = (range.to + args.list_inside - 1) >> args.list_shift;
    return range;
}

// An entry so that what comes later and is not larger is bad: -1 ends a row.
inline uint order_of_entry(int entry) { return entry == -1 ? 0x80000000u : entry < 0 ? 0u : uint(entry) + 1u; }

// Copies the good entries of a row that are before `recent`. row: as in tqkv.h, without its header
inline void clean_row(constant tqkv__attend_args &args, thread const scan_place &at, device const int *list,
                      thread const list_range &range, thread uint &n_before, thread bool &has_last,
                      thread bool &has_recent, device int *row)
{
    uint n_threads = at.n_simdgroups * 32u, largest = 0u, last = 0u, recent = 0u;
    for (uint first = 0; first < entries_of(args); first += n_threads) {
        uint i = first + at.simdgroup * 32u + at.lane;
        int entry = i < entries_of(args) ? list[i] : -2;
        uint order = order_of_entry(entry);
        scanned before = max_to_thread(at, order);
        bool good = entry >= 0 && order > max(largest, before.before) && entry >= args.list_first_block;
        int block = good ? entry - args.list_first_block : -1;
        bool kept = good && block >= range.first && block <= range.last && block < range.recent;
        uint counts = (kept ? 1u : 0u) + (kept && block == range.last ? 1u << 16 : 0u); // each at most once in a row
        counts += good && block == range.recent ? 1u << 24 : 0u;
        scanned place = sum_to_thread(at, counts);
        if (kept) row[n_before + (place.before & 0xffffu)] = block;
        n_before += place.all & 0xffffu;
        last += (place.all >> 16) & 0xffu;
        recent += place.all >> 24;
        largest = max(largest, before.all);
    }
    has_last = last != 0;
    has_recent = recent != 0;
}

// list: [n_queries][list_heads][entries], rows: [n_queries][list_heads][list_row], tree: [n_queries][2]
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_list)
kernel void tqkv_attend_list(constant tqkv__attend_args &call [[buffer(0)]], device const int *list [[buffer(1)]],
                             device int *rows [[buffer(2)]], device const uint *tree [[buffer(3)]],
                             constant tqkv__batch_item *items [[buffer(4)]],
                             threadgroup uint *shared [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    uint item = batch ? item_of(items, group.x, TQKV_BY_LIST) : 0u, number = group.x;
    constant tqkv__attend_args &args = batch ? items[item].attend : call;
    if (batch) {
        number -= uint(items[item].first_list);
        list += items[item].list;
        rows += items[item].list_rows;
        tree += items[item].tree;
    }
    scan_place at = {lane, simdgroup, n_simdgroups, shared};
    list_range range = range_of_query(args, tree, number / uint(args.list_heads));
    device int *row = rows + row_offset(number, uint(args.list_row));
    uint n_before = 0u;
    bool has_last = false, has_recent = false;
    clean_row(args, at, list + row_offset(number, entries_of(args)), range, n_before, has_last, has_recent,
              row + TQKV__LIST_HEADER);
    if (simdgroup != 0 || lane != 0) return;
    int size = 1 << args.list_shift, in_last = ((range.to + args.list_inside - 1) & (size - 1)) + 1;
    int n = int(n_before) * size;
    if (range.last >= range.recent)
        n += (range.last - range.recent) * size + in_last;
    else if (has_last)
        n += in_last - size;
    row[0] = range.to > range.from ? n : 0;
    row[1] = int(n_before);
    row[2] = range.recent;
    row[3] = has_recent ? 0 : range.newest;
    row[4] = range.first * size;
}
#endif

// ---- shaders/fragments.h ----

// Products of 8x8 matrices that are spread over a simdgroup. Each lane has two elements of a matrix, side by side in
// one row: TQKV__MATRIX_ROW and TQKV__MATRIX_COLUMN of tqkv.h say which.
//
// Letters: a product adds left * right to sums. Its left factor is made of codes, its right one of floats.
#ifndef TQKV_FRAGMENTS_H
#define TQKV_FRAGMENTS_H

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

// ---- shaders/matrix_columns.h ----

// The columns of attend_matrix: what a lane keeps of them, and how it hands them over at the end of a stretch.
//
// Letters: D head_dim, W code width of a stored value, F matrices side by side that hold the columns, P values of a row
// that a simdgroup has sums of.
#ifndef TQKV_MATRIX_COLUMNS_H
#define TQKV_MATRIX_COLUMNS_H

// Values of a row that lie between two changes of the factor of its codes, for any format of this width.
#define MATRIX_BLOCK(D, W)     ((W) == 16 ? (D) : (W) == 8 ? TQKV__NORM_DIM(TQKV__GRID, D) : TQKV__NORM_DIM(TQKV__BOOK, D))
#define MATRIX_POWER_OF_TWO(n) ((n) & -(n)) // the largest that divides n
#define MATRIX_VALUES(n, W)    (MATRIX_POWER_OF_TWO(n) < 128 / (W) ? MATRIX_POWER_OF_TWO(n) : 128 / (W))
// A row of keys: chunks of 4*N values. Lanes with the elements of column 2t of a left factor have
// values t*N .. of each.
// With stored right factors two short chunks are loaded ahead, not a long one.
#define MATRIX_WHOLE_KEY(D, W)  MATRIX_VALUES(MATRIX_BLOCK(D, W) / 4, W)
#define MATRIX_KEY_VALUES(D, W) (TQKV_STORED_RIGHTS ? MATRIX_WHOLE_KEY(D, W) / 2 : MATRIX_WHOLE_KEY(D, W))
// A row of values: chunks of 8*N. Lanes with row r of a left factor have values r*N .. of each. Where simdgroups share
// a row, chunks are not longer than their parts.
#define MATRIX_WHOLE_OUT(D, W)  MATRIX_VALUES(MATRIX_BLOCK(D, W) / 8, W)
#define MATRIX_OUT_VALUES(D, W) ((D) <= 256 || MATRIX_WHOLE_OUT(D, W) <= 8 ? MATRIX_WHOLE_OUT(D, W) : 8)

// What a lane keeps of the columns of its elements.
template <int P, int F>
struct matrix_state {
    int newest[F][2];    // position that the column's query sees; negative: none
    float factor[F][2];  // of products of keys and the query: then they are scores in powers of two
    float shift[F][2];   // as in attend.h
    float maximum[F][2]; // as in attend.h
    float sum[F][2];     // of the weights of the lane's rows
    sum_matrix out[P / 8][F];
};

// ---- The simdgroups' results as one ----

// Maxima and sums of the simdgroup's columns.
template <int P, int F>
inline void store_states(thread const attend_task &task, thread const matrix_state<P, F> &state)
{
    threadgroup float *own = task.states + task.simdgroup * uint(16 * F);
    float sum[F][2];
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) sum[f][i] = sum_of_column(state.sum[f][i]);
    }
    if (TQKV__MATRIX_ROW(task.lane) != 0) return;
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            own[c * 2u] = state.maximum[f][i] == NOTHING_SEEN ? -INFINITY : state.maximum[f][i];
            own[c * 2u + 1u] = sum[f][i];
        }
    }
}

// Columns of a pass, one of two neighbours of each lane, are in the memory of the sums: [simdgroup][column][D + 4].
// Lanes that store together use different banks.
#define MATRIX_SUM_COLUMNS 4

// Stores the simdgroup's sums of element i of matrix f.
template <int D, int F>
inline void store_sums(thread const attend_task &task, int f, int i, thread const matrix_state<D, F> &state)
{
    const int N = BY_CODE_WIDTH(value_format, MATRIX_OUT_VALUES, D);
    uint k = task.simdgroup * uint(MATRIX_SUM_COLUMNS) + TQKV__MATRIX_COLUMN(task.lane) / 2u;
    threadgroup float *row = task.sums + k * uint(D + 4) + TQKV__MATRIX_ROW(task.lane) * uint(N);
    TQKV_UNROLL
    for (int b = 0; b < D / 8; b += 4) {
        float4 four;
        four.x = state.out[b][f].elements[i];
        four.y = state.out[b + 1][f].elements[i];
        four.z = state.out[b + 2][f].elements[i];
        four.w = state.out[b + 3][f].elements[i];
        *(threadgroup float4 *)(row + b / N * 8 * N + b % N) = four;
    }
}

// Number `at` of a pass.
inline void open_four_of_pass(thread const attend_task &task, uint D, uint first, uint at, column_memory memory,
                              column_end how, thread four_sums &own)
{
    uint k = at / (D / 4u), value = at % (D / 4u) * 4u, column = at < D ? first + k * 2u : memory.n;
    open_four(task, D, column, value, task.sums + k * (D + 4u) + value, memory, how, own);
}

// Adds the sums of element i of matrix f up, four values of a column a thread.
template <int D, int F>
inline void combine_sums(thread const attend_task &task, int f, int i, column_memory memory, column_end how,
                         thread const matrix_state<D, F> &state)
{
    uint thread_index = task.simdgroup * 32u + task.lane, n_threads = task.n_simdgroups * 32u, first = uint(f * 8 + i);
    four_sums own;
    open_four_of_pass(task, uint(D), first, thread_index, memory, how,
                      own); // its loads are under way before the barrier
    store_sums<D, F>(task, f, i, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint at = thread_index; at < uint(D); at += n_threads) {
        if (at != thread_index) open_four_of_pass(task, uint(D), first, at, memory, how, own);
        if (own.used) combine_four<TQKV__MATRIX_SIMDGROUPS>(task, uint(MATRIX_SUM_COLUMNS * (D + 4)), memory, how, own);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// As keep_stretch of attend.h.
template <int D, int F>
inline uint keep_columns(constant tqkv__attend_args &args, thread const attend_task &task, stretch_range own,
                         uint stretch, column_memory memory, thread matrix_state<D, F> &state)
{
    column_end how = open_end(args, task, own, stretch, uint(D));
    store_states(task, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (task.simdgroup == 0 && task.lane < uint(F * 8))
        combine_states<TQKV__MATRIX_SIMDGROUPS>(task, task.lane, memory, how);
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) combine_sums<D, F>(task, f, i, memory, how, state);
    }
    return how.to_total ? 0u : partial_of_section(args, task.split);
}

#endif

// ---- shaders/attend_matrix.h ----

// Attention as attend.h, by products of 8x8 matrices: for groups of query heads that fill their columns. A product has
// a matrix unit of its own on some hardware, and shares its operands among the lanes on all. What a threadgroup works
// on and how it adds up is as in attend.h. Each simdgroup takes its own tiles of 32 slots.
//
// Within a tile
//   scores   S^T = K Q^T, [32 slots][columns]: a key is decoded into the lanes' elements of left factors
//   softmax  on the elements of S^T: a lane has the same columns in all matrices, and its own rows
//   values   O^T += V^T P^T, [D][columns]: the weights are where the scores were
// The values of a key may come in any order if those of the queries do, and so may the rows of O^T. So a lane takes
// neighbouring codes of a row, and loads up to 16 bytes at a time.
//
// Letters: D head_dim, W code width of a stored value, F matrices side by side that hold the columns, N values that a
// lane loads at a time, P values of a row that a simdgroup has sums of: all, but of long rows a part (attend_long.h).
#ifndef TQKV_ATTEND_MATRIX_H
#define TQKV_ATTEND_MATRIX_H

// Columns whose queries are loaded at a time: of long rows as many as the memory of weights holds.
#define MATRIX_PASS(D, F) ((D) <= 256 ? 16 : 4 * (F))

// Row of a tile that is row or column k of matrix p. Lanes with column 2t of a left factor load the codes of row t for
// one element and of row t + 4 for the other: those of one load lie together.
inline uint tile_row(int p, uint k) { return uint(p) * 8u + k / 2u + k % 2u * 4u; }

// Norms of the lane's rows of a tile, where a row has one. They are loaded long before they are used: nothing is
// computed from them before that.
struct tile_norms {
    float keys[4], values[4];
};

template <int D>
inline void load_norms(constant tqkv__attend_args &args, thread const page_tables &pages, uint format, bool apart,
                       stream_rows rows, uint first, thread float (&norms)[4])
{
    if (!has_norms(format) || !one_norm<D>(format)) return;
    uint row = TQKV__MATRIX_ROW(pages.lane);
    device const float *at = rows.norms + (ulong(first) + ulong(tile_row(0, row)));
    TQKV_UNROLL
    for (int p = 0; p < 4; p++)
        norms[p] = short_store || apart ? rows.norms[key_slot(args, pages, apart, first, tile_row(p, row))] : at[8 * p];
}

template <int D>
inline void load_tile_norms(constant tqkv__attend_args &args, thread const attend_task &task, tile_memory base,
                            thread tile_norms &norms)
{
    load_norms<D>(args, task.pages, key_format, rows_apart(), task.keys, base.keys, norms.keys);
    if (same_slots || paged || has_list) {
        load_norms<D>(args, task.pages, value_format, rows_apart(), task.values, base.values, norms.values);
        return;
    }
    if (!has_norms(value_format) || !one_norm<D>(value_format)) return;
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        uint row = tile_row(p, TQKV__MATRIX_ROW(task.lane));
        norms.values[p] = task.values.norms[value_slot(args, task.pages, base.values, row)];
    }
}

// Factor of the codes of such a row; 1 where a row has several norms.
template <int D>
inline float scale_of_norm(uint format, float norm, float block_scale)
{
    return has_norms(format) && one_norm<D>(format) ? code_scale<D>(format, norm, block_scale) : 1.0f;
}

// Whether a walk holds the norms of its next tile.
#define HOLDS_NORMS(F) (TQKV_LOADS_AHEAD > 1 && (F) <= 2)

// The norms of the tile at slot `base`. If so the walk holds them, and loads those of the tile at `next_base`.
template <int D, int F>
inline void next_tile_norms(constant tqkv__attend_args &args, thread const attend_task &task, tile_memory base,
                            tile_memory next_base, thread tile_norms &held, thread tile_norms &norms)
{
    if (!HOLDS_NORMS(F)) {
        load_tile_norms<D>(args, task, base, norms);
        return;
    }
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        norms.keys[p] = held.keys[p];
        norms.values[p] = held.values[p];
    }
    load_tile_norms<D>(args, task, next_base, held);
}

// ---- Queries ----

// A power of two near the largest |x| of the simdgroup. Divided by it, all are below 2.
template <int D>
inline float size_of_row(thread const float *x)
{
    float largest = 0.0f;
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) largest = max(largest, fabs(x[i]));
    uint exponent = as_type<uint>(simd_max(largest)) & 0x7f800000u;
    return exponent == 0 || exponent > 0x7e800000u ? 1.0f : as_type<float>(exponent);
}

// Place of a value in row `row` of a pass. Lanes that store neighbours of one row, or load one value in 16 or 32 of
// several rows, meet in few banks.
inline uint staged_value(uint row, uint D, uint value)
{
    return row * D + (value ^ (((value >> 5) & 3u) << 3 ^ ((value >> 7) & 3u) << 1 ^ (row & 7u)));
}

// Rows of a pass as floats: [columns][D], in task.weights: there are no weights in memory here.
template <int D, int F>
inline void load_query_rows(constant tqkv__attend_args &args, thread const attend_task &task,
                            thread const key_part &keys, uint first, column_memory memory)
{
    const int L = TQKV__ROW_LANES(D), C = TQKV_ROW_PIECE(D);
    uint end = min(first + uint(MATRIX_PASS(D, F)), uint(columns)), part = lane_of_row<D>(task.lane);
    for (uint c = first + task.simdgroup; c < end; c += task.n_simdgroups) {
        query_row row = row_of_column(args, min(task.first_column + c, end_of_columns(args, task) - 1u));
        uint head = task.kv_head * uint(args.group) + uint(row.head);
        float x[TQKV_LANE_VALUES(D)];
        load_query<D>(args, task, keys, uint(row.query), head, x);
        float shift = keys.with_center ? score_of_center<D>(args, task, keys, x) : 0.0f;
        turn_query<D>(task, keys, x);
        float size = size_of_row<D>(x), inverse = 1.0f / size; // powers of two: both products are exact
        TQKV_UNROLL
        for (int i = 0; i < TQKV_LANE_VALUES(D); i++)
            if (task.lane < uint(L))
                task.weights[staged_value(c - first, uint(D), value_of_lane<L, C>(part, i))] = x[i] * inverse;
        if (task.lane != 0) continue;
        if (keys.first == 0) {
            memory.shifts[c] = shift;
            memory.factors[c] = size;
            memory.rows[c] = partial_row(args, row, head);
        } else {
            memory.shifts[c] += shift;
            memory.tails[c] = size / memory.factors[c];
        }
    }
}

// Number of the value of a query at row k of right factor s.
template <int D>
inline uint query_value(uint format, uint s, uint k)
{
    const uint N = uint(BY_CODE_WIDTH(format, MATRIX_KEY_VALUES, D));
    return s / (N / 2u) * (4u * N) + k / 2u * N + s % (N / 2u) * 2u + k % 2u;
}

inline threadgroup right_pair *query_at(thread const key_part &keys, uint number, uint lane)
{
    threadgroup float *queries = keys.queries;
    return (threadgroup right_pair *)queries + number * 32u + lane;
}

// The rows of a pass as pairs of right factors: [F][D / 16][32 lanes]. A column that is not used repeats the last one.
// A barrier must precede it, and follow.
template <int D, int F>
inline void arrange_queries(thread const attend_task &task, thread const key_part &keys, uint first)
{
    const uint pass = uint(MATRIX_PASS(D, F)), n = uint(D / 16);
    uint begin = first / 8u, end = min((first + pass + 7u) / 8u, uint(F));
    for (uint number = begin * n + task.simdgroup; number < end * n; number += task.n_simdgroups) {
        float x[4];
        bool own = true; // both columns of a lane belong to one pass
        TQKV_UNROLL
        for (int i = 0; i < 4; i++) {
            uint c = min(number / n * 8u + TQKV_RIGHT_COLUMN(task.lane, i % 2), columns - 1u), s = number % n * 2u;
            uint value = query_value<D>(keys.format, s + uint(i / 2), TQKV_RIGHT_ROW(task.lane, i % 2));
            if (pass < 8u) own = own && c >= first && c < first + pass;
            uint row = pass < 8u ? min(c - first, pass - 1u) : c - first; // a load under a condition stays in its loop
            x[i] = task.weights[staged_value(row, uint(D), value)];
        }
        right_pair right = right_of(x[0], x[1], x[2], x[3], false);
        if (own && TQKV_STORED_RIGHTS)
            store_right(query_at(keys, number, 0u), task.lane, right);
        else if (own)
            *query_at(keys, number, task.lane) = right;
    }
}

// A barrier must precede and follow it.
template <int D, int F>
inline void load_matrix_queries(constant tqkv__attend_args &args, thread const attend_task &task,
                                thread const key_part &keys, column_memory memory)
{
    for (uint first = 0; first < columns; first += uint(MATRIX_PASS(D, F))) {
        if (first != 0) threadgroup_barrier(mem_flags::mem_threadgroup);
        load_query_rows<D, F>(args, task, keys, first, memory);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        arrange_queries<D, F>(task, keys, first);
    }
    publish_rights();
}

// ---- Scores of one tile ----

// The lane's codes of one chunk: those of 4 rows, 8 apart.
template <int D, int W>
struct key_chunk {
    raw_codes<W, MATRIX_KEY_VALUES(D, W)> raw[4];
};

template <int D, int W>
inline void load_key_chunk(constant tqkv__attend_args &args, thread const attend_task &task,
                           thread const key_part &part, uint base, uint chunk, thread key_chunk<D, W> &keys)
{
    const int N = MATRIX_KEY_VALUES(D, W);
    const uint bytes = row_bytes<D>(part.format);
    uint first = (chunk * 4u + TQKV__MATRIX_COLUMN(task.lane) / 2u) * uint(N);
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        uint row = tile_row(p, TQKV__MATRIX_ROW(task.lane));
        device const uchar *codes = key_codes(args, task.pages, part.apart, part.rows.codes, bytes, base, row);
        load_codes<D, W, N>(part.format, codes, first, keys.raw[p]);
    }
}

// Chunks that a lane loads before it uses the first of them: two, or one where the sums leave no registers for more.
#define MATRIX_KEY_BATCH(D, W, F) \
    (TQKV_LOADS_AHEAD == 1 || ((F) > 2 && !TQKV_STORED_RIGHTS) || (D) / (4 * MATRIX_KEY_VALUES(D, W)) % 2 != 0 ? 1 : 2)

template <int D, int W, int F>
struct key_batch {
    key_chunk<D, W> chunks[MATRIX_KEY_BATCH(D, W, F)];
};

// Values i .. i + 3 of the lane's rows as left factors.
template <int D, int W, int F>
inline void decode_keys(uint format, thread const key_chunk<D, W> &keys, int i, thread const value_book &book,
                        thread left_block (&left)[2])
{
    const int N = MATRIX_KEY_VALUES(D, W);
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int k = 0; k < 2; k++)
            left[p / 2].parts[k][p % 2] = left_of_neighbours<W, N, F>(format, keys.raw[p], i + 2 * k, false, book);
    }
}

template <int F>
inline void clear_scores(thread sum_matrix (&score)[4][F])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) clear_matrix(score[p][f]);
    }
}

// score[p] += K Q^T over a chunk.
template <int D, int W, int F>
inline void multiply_chunk(thread const attend_task &task, thread const key_part &part, uint chunk,
                           thread const key_chunk<D, W> &keys, thread const value_book &book,
                           thread sum_matrix (&score)[4][F])
{
    const int N = MATRIX_KEY_VALUES(D, W);
    bool exact = !has_codebook(part.format);
    TQKV_UNROLL
    for (int i = 0; i < N; i += 4) {
        left_block left[2];
        right_pair right[F];
        if (TQKV_STORED_RIGHTS) {
            decode_keys<D, W, F>(part.format, keys, i, book, left);
            multiply_stored<2, F>(left, query_at(part, chunk * uint(N / 4) + uint(i / 4), 0u), uint(D / 16), task.lane,
                                  false, exact, has_pairs(part.format), score);
            continue;
        }
        TQKV_UNROLL
        for (int f = 0; f < F; f++)
            right[f] = *query_at(part, uint(f * D / 16) + chunk * uint(N / 4) + uint(i / 4), task.lane);
        decode_keys<D, W, F>(part.format, keys, i, book, left);
        multiply<2, F>(left, right, false, exact, has_pairs(part.format), score);
    }
}

// Norms of a block in the lane's rows, where a row has several. They are loaded before the block is multiplied.
template <int D>
inline void load_key_norms(constant tqkv__attend_args &args, thread const attend_task &task,
                           thread const key_part &part, uint base, uint block, thread float (&norms)[4])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        uint slot = key_slot(args, task.pages, part.apart, base, tile_row(p, TQKV__MATRIX_ROW(task.lane)));
        norms[p] = one_norm<D>(part.format) ? 1.0f : stored_norm<D>(part.format, part.rows, slot, block);
    }
}

// At the end of a block or a part of it: total += scale * score, and score starts again.
template <int D, int F>
inline void add_key_block(thread const key_part &part, thread const float (&norms)[4], thread sum_matrix (&score)[4][F],
                          thread sum_matrix (&total)[4][F])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        float scale = one_norm<D>(part.format) ? 1.0f : code_scale<D>(part.format, norms[p], part.block_scale);
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++)
                total[p][f].elements[i] = fma(scale, score[p][f].elements[i], total[p][f].elements[i]);
        }
    }
    clear_scores<F>(score);
}

// score = q . k, without the factor of rows that have one norm. `keys` holds the first chunks of the tile at slot
// `base`; at the end it holds those of the tile at `next_base`.
template <int D, int W, int F>
inline void score_matrix_tile(constant tqkv__attend_args &args, thread const attend_task &task,
                              thread const key_part &part, uint base, uint next_base, thread const value_book &book,
                              thread key_batch<D, W, F> &keys, thread sum_matrix (&score)[4][F])
{
    const int N = MATRIX_KEY_VALUES(D, W), chunks = D / (4 * N), B = MATRIX_KEY_BATCH(D, W, F);
    // Some hardware rounds sums of products towards 0: those of long rows are added up chunk by chunk, or there 128
    // values at a time.
    const bool in_one = one_norm<D>(part.format) && D <= 128;
    const uint block_chunks = one_norm<D>(part.format) ? uint(chunks) : norm_block<D>(part.format) / uint(4 * N);
    const uint least = one_norm<D>(part.format) ? 1u : block_chunks;
    const uint sum_chunks = TQKV_STORED_RIGHTS ? min(block_chunks, uint(128 / (4 * N))) : least;
    sum_matrix total[4][F];
    float norms[4];
    clear_scores<F>(score);
    if (!in_one) clear_scores<F>(total);
    TQKV_UNROLL
    for (int j = 0; j < chunks; j++) {
        if (!in_one && uint(j) % block_chunks == 0)
            load_key_norms<D>(args, task, part, base, uint(j) / block_chunks, norms);
        multiply_chunk<D, W, F>(task, part, uint(j), keys.chunks[j % B], book, score);
        load_key_chunk<D, W>(args, task, part, j + B < chunks ? base : next_base, uint((j + B) % chunks),
                             keys.chunks[j % B]);
        if (in_one || uint(j + 1) % sum_chunks != 0) continue;
        finish_products<F>(score, 4);
        add_key_block<D, F>(part, norms, score, total);
    }
    if (in_one) {
        finish_products<F>(score, 4);
        return;
    }
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) score[p][f] = total[p][f];
    }
}

// As any_keys of attend.h.
template <int D, int F>
struct any_key_batch {
    key_batch<D, 4, F> of_4;
    key_batch<D, 8, F> of_8;
    key_batch<D, 16, F> of_16;
};

template <int D, int W, int F>
inline void load_first_batch(constant tqkv__attend_args &args, thread const attend_task &task,
                             thread const key_part &part, uint base, thread key_batch<D, W, F> &keys)
{
    TQKV_UNROLL
    for (int b = 0; b < MATRIX_KEY_BATCH(D, W, F); b++)
        load_key_chunk<D, W>(args, task, part, base, uint(b), keys.chunks[b]);
}

template <int D, int F>
inline void open_key_batch(constant tqkv__attend_args &args, thread const attend_task &task,
                           thread const key_part &part, uint base, thread any_key_batch<D, F> &keys)
{
    WITH_CODES(part.format, keys, load_first_batch<D, W, F>(args, task, part, base, codes));
}

template <int D, int F>
inline void score_any_matrix_tile(constant tqkv__attend_args &args, thread const attend_task &task,
                                  thread const key_part &part, uint base, uint next_base, thread const value_book &book,
                                  thread any_key_batch<D, F> &keys, thread sum_matrix (&score)[4][F])
{
    WITH_CODES(part.format, keys, score_matrix_tile<D, W, F>(args, task, part, base, next_base, book, codes, score));
}

// ---- Softmax of one tile ----

// The oldest and the newest of the columns' newest positions.
struct newest_range {
    int least, most;
};

inline newest_range newest_of_columns(constant tqkv__attend_args &args, uint first_column)
{
    newest_range newest;
    newest.least = newest_seen(args, row_of_column(args, first_column).query);
    newest.most = newest_seen(args, row_of_column(args, first_column + columns - 1u).query);
    return newest;
}

// What a simdgroup carries from tile to tile.
template <int D, int F>
struct matrix_walk {
    tile_steps steps;
    tile_search search;
    tile_memory base; // of the next tile
    newest_range newest;
    any_key_batch<D, F> keys; // of that tile
    tile_norms norms;         // likewise, with few columns
};

// Whether all columns of the threadgroup see all slots of a tile, and no slot belongs to another tile.
inline bool sees_whole_tile(constant tqkv__attend_args &args, uint tile, newest_range newest)
{
    if (has_list) return false;
    uint slot = first_slot_of_tile(args, tile);
    int first = position_of_slot(args, slot), last = position_of_slot(args, slot + 31u);
    if (has_tree && last >= args.first_of_tree) return false;
    if (halves == TQKV__BEFORE_HALVES && last >= halves_begin(args, newest.least)) return false;
    if (halves == TQKV__NEWEST_HALVES && first < halves_begin(args, newest.most)) return false;
    return !short_store && slot == tile * 32u && last - first == 31 && last <= min(newest.least, args.slice_end - 1) &&
           (args.window == 0 || first > newest.most - args.window);
}

// A masked position scores -INFINITY by selection, as in attend.h. The value's norm of a row that some column does not
// see may be NaN: then the scores of those that see it are, and the norm becomes 0.
template <int D, int P, int F>
inline void mask_tile(constant tqkv__attend_args &args, thread const attend_task &task, uint tile, tile_memory base,
                      thread const matrix_state<P, F> &state, thread tile_norms &norms,
                      thread sum_matrix (&score)[4][F])
{
    const bool has_norm = has_norms(value_format) && one_norm<D>(value_format);
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        int position = position_of_row(args, base, tile, tile_row(p, TQKV__MATRIX_ROW(task.lane)));
        bool finite = !has_norm || fabs(norms.values[p]) < INFINITY;
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) {
                float own = score[p][f].elements[i];
                own = finite ? own : as_type<float>(0x7fc00000u);
                int newest = state.newest[f][i];
                bool seen = position <= newest && (args.window == 0 || position > newest - args.window) &&
                            reads_here(args, newest, position);
                if (has_tree) seen = seen && tree_shows(args, task.tree, newest, position);
                score[p][f].elements[i] = seen ? own : -INFINITY;
            }
        }
        norms.values[p] = finite ? norms.values[p] : 0.0f;
    }
}

// Products to scores in powers of two. With a tail they have the factor of the keys already.
template <int D, int P, int F>
inline void finish_scores(constant tqkv__attend_args &args, thread const attend_task &task, uint tile, tile_memory base,
                          bool whole, thread const matrix_state<P, F> &state, thread tile_norms &norms,
                          thread sum_matrix (&score)[4][F])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        float scale = tail_format != 0 ? 1.0f : scale_of_norm<D>(key_format, norms.keys[p], args.key_block_scale);
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++)
                score[p][f].elements[i] =
                    score_of(args, score[p][f].elements[i], scale * state.factor[f][i], state.shift[f][i]);
        }
    }
    if (!whole) mask_tile<D>(args, task, tile, base, state, norms, score);
}

// The scores of a tile that does not exist.
template <int F>
inline void clear_to_nothing(thread sum_matrix (&score)[4][F])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) score[p][f].elements[0] = score[p][f].elements[1] = -INFINITY;
    }
}

// Raises the maxima as attend.h does it. Sums of nothing need no factor.
template <int D, int F>
inline void raise_maxima(thread sum_matrix (&score)[4][F], thread matrix_state<D, F> &state)
{
    bool began = false;
    float before[F][2];
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            float largest = -INFINITY;
            TQKV_UNROLL
            for (int p = 0; p < 4; p++) largest = max(largest, score[p][f].elements[i]);
            largest = rint(max_of_column(largest));
            before[f][i] = state.maximum[f][i];
            began = began || before[f][i] != NOTHING_SEEN;
            state.maximum[f][i] = largest > before[f][i] + 11.0f ? largest : before[f][i];
        }
    }
    if (!simd_any(began)) return;
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            float shrink = share_of(before[f][i], state.maximum[f][i]);
            state.sum[f][i] *= shrink;
            TQKV_UNROLL
            for (int b = 0; b < D / 8; b++) state.out[b][f].elements[i] *= shrink;
        }
    }
}

// Scores to weights, without the values' scales.
template <int P, int F>
inline void weigh_scores(thread sum_matrix (&score)[4][F], thread matrix_state<P, F> &state)
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) {
                float share = fast::exp2(score[p][f].elements[i] - state.maximum[f][i]);
                score[p][f].elements[i] = share;
                state.sum[f][i] += share;
            }
        }
    }
}

// Products to weights.
template <int D, int F>
inline void weigh_matrix_tile(constant tqkv__attend_args &args, thread const attend_task &task, uint tile,
                              tile_memory base, bool whole, thread tile_norms &norms, thread sum_matrix (&score)[4][F],
                              thread matrix_state<D, F> &state)
{
    bool raise = false;
    finish_scores<D>(args, task, tile, base, whole, state, norms, score);
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) raise = raise || score[p][f].elements[i] > state.maximum[f][i] + 11.0f;
        }
    }
    if (simd_any(raise)) raise_maxima<D, F>(score, state);
    weigh_scores(score, state);
}

// ---- Maxima and weights of simdgroups that share the values of their tiles ----

// The largest score of each column in the simdgroup's tile: [simdgroups][columns]. A barrier must follow.
template <int F>
inline void store_maxima(thread const attend_task &task, thread const sum_matrix (&score)[4][F])
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            float largest = -INFINITY;
            TQKV_UNROLL
            for (int p = 0; p < 4; p++) largest = max(largest, score[p][f].elements[i]);
            largest = rint(max_of_column(largest));
            if (TQKV__MATRIX_ROW(task.lane) == 0)
                task.states[task.simdgroup * uint(8 * F) + uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane)] = largest;
        }
    }
}

// The weights of a tile in threadgroup memory, as the lanes have them: [simdgroups][4][F][32][2]
template <int F>
inline threadgroup float2 *weights_at(threadgroup float *weights, uint lane, uint simdgroup, int p, int f)
{
    return (threadgroup float2 *)weights + (((simdgroup * 4u + uint(p)) * uint(F) + uint(f)) * 32u + lane);
}

template <int F>
inline void store_tile_weights(thread const attend_task &task, threadgroup float *weights,
                               thread const sum_matrix (&weight)[4][F])
{
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            float2 two;
            two.x = weight[p][f].elements[0];
            two.y = weight[p][f].elements[1];
            *weights_at<F>(weights, task.lane, task.simdgroup, p, f) = two;
        }
    }
}

// ---- Values of one tile ----

// The lane's codes of one chunk and two matrices of slots: those of 4 rows.
template <int D, int W, int N = MATRIX_OUT_VALUES(D, W)>
struct value_chunk {
    raw_codes<W, N> raw[4];
};

// `half_tile`: 0 for rows 0 .. 15, 1 for the others.
template <int D, int W, int N>
inline void load_value_chunk(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint chunk,
                             uint half_tile, thread value_chunk<D, W, N> &values)
{
    const uint bytes = row_bytes<D>(value_format);
    uint first = (chunk * 8u + TQKV__MATRIX_ROW(task.lane)) * uint(N);
    TQKV_UNROLL
    for (int i = 0; i < 4; i++) {
        uint k = TQKV__MATRIX_COLUMN(task.lane) + uint(i % 2), row = tile_row(2 * int(half_tile) + i / 2, k);
        device const uchar *codes = value_codes(args, task.pages, task.values.codes, bytes, base, row);
        load_codes<D, W, N>(value_format, codes, first, values.raw[i]);
    }
}

// Halves that are no numbers become 0: 0 * NaN is not 0. Only slots that some query does not see may hold such halves.
template <int W, int N>
inline void clear_not_finite(thread raw_codes<W, N> (&raw)[4])
{
    TQKV_UNROLL
    for (int i = 0; i < 4; i++) {
        TQKV_UNROLL
        for (int w = 0; w < (W * N + 31) / 32; w++) {
            uint word = raw[i].main[w];
            if ((word & 0x7c00u) == 0x7c00u) word &= 0xffff0000u;
            if ((word & 0x7c000000u) == 0x7c000000u) word &= 0xffffu;
            raw[i].main[w] = word;
        }
    }
}

// Values i .. of the lane's rows, G blocks of left factors. A pair of codes is of two rows of a factor and one of its
// columns; the columns take turns.
template <int G, int F, int D, int W, int N>
inline void decode_values(thread const value_chunk<D, W, N> &values, int i, thread const value_book &book,
                          thread left_block (&left)[G])
{
    bool wide = has_norms(value_format);
    TQKV_UNROLL
    for (int g = 0; g < 2 * G; g++) {
        TQKV_UNROLL
        for (int k = 0; k < 2; k++)
            left[g / 2].parts[k][g % 2] =
                has_pairs(value_format)
                    ? left_of_neighbours<W, N, F>(value_format, values.raw[2 * k + g % 2], i + g / 2 * 2, wide, book)
                    : left_of_rows<W, N>(value_format, values.raw[2 * k], values.raw[2 * k + 1], i + g, wide, book);
    }
}

// out += V^T P^T over a chunk and half of the tile.
template <int D, int W, int N, int P, int F>
inline void multiply_values(int chunk, thread const value_chunk<D, W, N> &values, thread const value_book &book,
                            thread const right_pair (&right)[F], thread matrix_state<P, F> &state)
{
    const int G = N % 4 == 0 ? 2 : 1; // blocks that take turns
    bool exact = !has_codebook(value_format), wide = has_norms(value_format);
    TQKV_UNROLL
    for (int i = 0; i < N; i += 2 * G) {
        left_block left[G];
        decode_values<G, F>(values, i, book, left);
        multiply<G, F>(left, right, wide, exact, has_pairs(value_format), &state.out[chunk * N + i]);
    }
}

// Weights with the values' scales of a block, as right factors. Of several norms a row, a masked one may be NaN.
template <int D, int F>
inline void scale_weights(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint block,
                          thread const tile_norms &norms, thread sum_matrix (&weight)[4][F],
                          thread right_pair (&right)[2][F])
{
    float scaled[4][F][2];
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        float scale = scale_of_norm<D>(value_format, norms.values[p], args.value_block_scale);
        if (!one_norm<D>(value_format))
            scale = stored_scale<D>(value_format, task.values,
                                    value_slot(args, task.pages, base, tile_row(p, TQKV__MATRIX_ROW(task.lane))), block,
                                    args.value_block_scale);
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) {
                float x = weight[p][f].elements[i];
                scaled[p][f][i] = x * (one_norm<D>(value_format) || x > 0.0f ? scale : 0.0f);
            }
        }
    }
    TQKV_UNROLL
    for (int h = 0; h < 2; h++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++)
            right[h][f] = right_of_sums(scaled[2 * h][f][0], scaled[2 * h][f][1], scaled[2 * h + 1][f][0],
                                        scaled[2 * h + 1][f][1], has_norms(value_format));
    }
}

// `values` holds the first chunk of the tile at slot `base`.
template <int D, int W, int F>
inline void add_matrix_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base, bool whole,
                              thread const tile_norms &norms, thread const value_book &book,
                              thread value_chunk<D, W> (&values)[2], thread sum_matrix (&weight)[4][F],
                              thread matrix_state<D, F> &state)
{
    const int N = MATRIX_OUT_VALUES(D, W), chunks = D / (8 * N);
    const uint block_chunks = norm_block<D>(value_format) / uint(8 * N);
    right_pair right[2][F];
    TQKV_UNROLL
    for (int j = 0; j < chunks; j++) {
        if (uint(j) % block_chunks == 0)
            scale_weights<D, F>(args, task, base, uint(j) / block_chunks, norms, weight, right);
        TQKV_UNROLL
        for (int h = 0; h < 2; h++) {
            if (W == 16 && !whole) clear_not_finite<W, N>(values[h].raw);
            multiply_values(j, values[h], book, right[h], state);
            if (TQKV_PLAIN_LOADS || j + 1 < chunks)
                load_value_chunk<D, W>(args, task, base, uint((j + 1) % chunks), uint(h), values[h]);
        }
    }
}

// As any_keys of attend.h: the first chunk of a tile.
template <int D>
struct any_value_chunks {
    value_chunk<D, 4> of_4[2];
    value_chunk<D, 8> of_8[2];
    value_chunk<D, 16> of_16[2];
};

template <int D, int W>
inline void load_first_chunks(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                              thread value_chunk<D, W> (&values)[2])
{
    TQKV_UNROLL
    for (int h = 0; h < 2; h++) load_value_chunk<D, W>(args, task, base, 0u, uint(h), values[h]);
}

template <int D>
inline void open_value_chunks(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                              thread any_value_chunks<D> &values)
{
    WITH_CODES(value_format, values, load_first_chunks<D, W>(args, task, base, codes));
}

template <int D, int F>
inline void add_any_matrix_values(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                                  bool whole, thread const tile_norms &norms, thread const value_book &book,
                                  thread any_value_chunks<D> &values, thread sum_matrix (&weight)[4][F],
                                  thread matrix_state<D, F> &state)
{
    WITH_CODES(value_format, values,
               add_matrix_values<D, W, F>(args, task, base, whole, norms, book, codes, weight, state));
}

// ---- The kernel ----

template <int P, int F>
inline void open_columns(constant tqkv__attend_args &args, thread const attend_task &task, column_memory memory,
                         thread matrix_state<P, F> &state)
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = min(uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane), columns - 1u);
            state.newest[f][i] = newest_seen(args, row_of_column(args, task.first_column + c).query);
            state.factor[f][i] = memory.factors[c] * (args.scale * TQKV_LOG2E);
            state.shift[f][i] = has_shifts() ? memory.shifts[c] : 0.0f;
        }
    }
}

template <int P, int F>
inline void clear_matrices(thread matrix_state<P, F> &state)
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            state.maximum[f][i] = NOTHING_SEEN;
            state.sum[f][i] = 0.0f;
        }
        TQKV_UNROLL
        for (int b = 0; b < P / 8; b++) clear_matrix(state.out[b][f]);
    }
}

// The simdgroup's tiles before tile `end`.
template <int D, int F>
inline void add_matrix_tiles(constant tqkv__attend_args &args, thread const attend_task &task, uint end,
                             thread const value_book &key_book, thread const value_book &out_book,
                             thread matrix_walk<D, F> &walk, thread matrix_state<D, F> &state)
{
    while (walk.steps.tile < end) {
        uint tile = walk.steps.tile;
        tile_memory base = walk.base;
        next_tile(walk.steps, task.n_simdgroups);
        walk.base = find_next(args, task.pages, walk.steps, task.n_simdgroups, walk.search);
        bool whole = sees_whole_tile(args, tile, walk.newest);
        tile_norms norms;
        next_tile_norms<D, F>(args, task, base, walk.base, walk.norms, norms);
        any_value_chunks<D> values;
        open_value_chunks<D>(args, task, base.values, values);
        sum_matrix score[4][F];
        score_any_matrix_tile<D, F>(args, task, first_part(args, task), base.keys, walk.base.keys, key_book, walk.keys,
                                    score);
        weigh_matrix_tile<D, F>(args, task, tile, base, whole, norms, score, state);
        add_any_matrix_values<D, F>(args, task, base.values, whole, norms, out_book, values, score, state);
    }
}

#endif

// ---- shaders/attend_long.h ----

// attend_matrix for rows too long for the sums of one simdgroup: head_dim 448 and 512, which latent caches have. The
// simdgroups of a threadgroup go through the context together, in rounds of one tile each.
//
// Within a round
//   scores   each simdgroup has those of its own tile, as in attend_matrix.h, and adds those of the tail
//   softmax  they agree on the maxima of the columns; each turns its own scores into weights, in threadgroup memory
//   values   each simdgroup adds up its own part of the rows, over all tiles of the round
// So a threadgroup fetches a row once, and a simdgroup has registers for the sums of its part.
//
// Letters: as in attend_matrix.h; T head_dim of a tail.
#ifndef TQKV_ATTEND_LONG_H
#define TQKV_ATTEND_LONG_H

// The rounds of a stretch: `tiles` of them from tile `first` on. Tiles outside [begin, end) and in the gap are left
// out.
struct long_rounds {
    uint first, begin, end, gap_begin, gap_end;
};

inline long_rounds open_rounds(constant tqkv__attend_args &args, tile_range seen, uint stretch)
{
    long_rounds rounds;
    rounds.first = first_tile_of_stretch(args, stretch);
    rounds.begin = max(seen.begin, rounds.first);
    rounds.end = min(seen.end, first_tile_of_stretch(args, stretch + 1u));
    rounds.gap_begin = seen.gap_begin;
    rounds.gap_end = seen.gap_end;
    return rounds;
}

inline bool has_tile(long_rounds rounds, uint tile)
{
    return tile >= rounds.begin && tile < rounds.end && (tile < rounds.gap_begin || tile >= rounds.gap_end);
}

// The first tile of the round that has a tile.
inline uint round_of(long_rounds rounds, uint tile)
{
    const uint n = uint(TQKV__LONG_SIMDGROUPS);
    return tile - (tile - rounds.first) % n;
}

inline uint next_round(long_rounds rounds, uint round)
{
    uint next = round + uint(TQKV__LONG_SIMDGROUPS);
    bool inside = next >= rounds.gap_begin && next + uint(TQKV__LONG_SIMDGROUPS) <= rounds.gap_end;
    return inside ? round_of(rounds, rounds.gap_end) : next;
}

// ---- Slots: where rows lie apart, those of all values of a round, which each simdgroup reads ----

// Behind the states: [n_simdgroups][2][32], of two rounds in turns.
inline void open_round_slots(uint C, thread attend_task &task)
{
    threadgroup float *behind = task.states + task.n_simdgroups * uint(TQKV__STATE_BYTES(C) / 4);
    task.pages.slots = (threadgroup uint *)behind;
    task.pages.shared_values = rows_apart();
}

inline uint shared_slots(uint number, uint parity) { return (number * 2u + parity) * 32u; }

// Stores what the lanes found of the simdgroup's own tile. A barrier must follow, and one precede so that the round
// before that one is done.
inline void share_round(thread const attend_task &task, tile_memory found, uint parity)
{
    if (task.pages.shared_values) task.pages.slots[shared_slots(task.simdgroup, parity) + task.lane] = found.values;
}

// Where the values of tile number `number` of a round are, as in tile_memory: of the last one also behind it.
inline uint values_of_tile(constant tqkv__attend_args &args, thread const attend_task &task, uint round, uint parity,
                           uint number)
{
    if (task.pages.shared_values) return shared_slots(min(number, uint(TQKV__LONG_SIMDGROUPS) - 1u), parity);
    return find_tile(args, task.pages, round + number).values;
}

// ---- Scores ----

struct value_books {
    value_book keys, values, tail;
};

// What a lane loads of a tile's tail before it is used: its first codes, and its norms.
template <int T, int F>
struct tail_codes {
    any_key_batch<T, F> codes;
    float norms[4];
};

template <int D, int T, int F>
inline void open_tail(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                      thread tail_codes<T, F> &keys)
{
    open_key_batch<T, F>(args, task, tail_part<D>(task), base, keys.codes);
    load_norms<T>(args, task.pages, tail_format, tail_rows_apart(), task.tail, base, keys.norms);
}

// Scores of the tail, times what makes them as large as those of the keys, which get their own factors.
template <int D, int T, int F>
inline void add_matrix_tail(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                            thread const value_book &book, column_memory memory, thread float (&norms)[4],
                            thread tail_codes<T, F> &keys, thread sum_matrix (&score)[4][F])
{
    sum_matrix tail[4][F];
    score_any_matrix_tile<T, F>(args, task, tail_part<D>(task), base, base, book, keys.codes, tail);
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = min(uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane), columns - 1u);
            float factor = memory.tails[c];
            TQKV_UNROLL
            for (int p = 0; p < 4; p++) {
                float own = tail[p][f].elements[i] * (factor * scale_of_norm<T>(tail_format, keys.norms[p], 1.0f));
                float scale = scale_of_norm<D>(key_format, norms[p], args.key_block_scale);
                score[p][f].elements[i] = fma(score[p][f].elements[i], scale, own);
            }
        }
    }
}

// What a simdgroup carries from round to round: the first codes of its next tile.
template <int D, int F>
struct long_walk {
    newest_range newest;
    tile_memory base;
    any_key_batch<D, F> keys;
};

template <int D, int F>
inline void open_walk(constant tqkv__attend_args &args, thread const attend_task &task, uint round,
                      thread long_walk<D, F> &walk)
{
    walk.base = find_tile(args, task.pages, round + task.simdgroup);
    open_key_batch<D, F>(args, task, first_part(args, task), walk.base.keys, walk.keys);
}

// Scores in powers of two of the simdgroup's tile of a round; next: the next round.
template <int D, int F>
inline void score_long_tile(constant tqkv__attend_args &args, thread const attend_task &task, long_rounds rounds,
                            uint round, uint next, thread const value_books &books, column_memory memory,
                            thread const matrix_state<TQKV__LONG_VALUES, F> &state, thread long_walk<D, F> &walk,
                            thread sum_matrix (&score)[4][F])
{
    const int T = TQKV__TAIL_DIM(D);
    const uint tile = round + task.simdgroup;
    const bool exists = has_tile(rounds, tile), whole = sees_whole_tile(args, tile, walk.newest);
    tile_memory base = walk.base;
    tile_norms norms; // none of the values: their scales come with the weights
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) norms.keys[p] = norms.values[p] = 0.0f;
    load_norms<D>(args, task.pages, key_format, rows_apart(), task.keys, base.keys, norms.keys);
    tail_codes<T, F> tail;
    if (tail_format != 0) open_tail<D, T, F>(args, task, base.tail, tail);
    walk.base = find_tile(args, task.pages, next + task.simdgroup);
    score_any_matrix_tile<D, F>(args, task, first_part(args, task), base.keys, walk.base.keys, books.keys, walk.keys,
                                score);
    if (tail_format != 0) add_matrix_tail<D, T, F>(args, task, base.tail, books.tail, memory, norms.keys, tail, score);
    finish_scores<D>(args, task, tile, base, whole, state, norms, score);
    if (!exists) clear_to_nothing(score);
}

// ---- Softmax ----

// Raises the maxima as attend.h does it, by the scores of all tiles of the round: all simdgroups to the same.
template <int P, int F>
inline void raise_to_round(thread const attend_task &task, thread matrix_state<P, F> &state)
{
    bool raised = false;
    float shrink[F][2];
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            threadgroup const float *maxima = task.states + uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            float largest = -INFINITY, before = state.maximum[f][i];
            TQKV_UNROLL
            for (int s = 0; s < TQKV__LONG_SIMDGROUPS; s++) largest = max(largest, maxima[s * 8 * F]);
            largest = largest > before + 11.0f ? largest : before;
            shrink[f][i] = share_of(before, largest);
            state.maximum[f][i] = largest;
            raised = raised || largest != before;
        }
    }
    if (!simd_any(raised)) return;
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            state.sum[f][i] *= shrink[f][i];
            TQKV_UNROLL
            for (int b = 0; b < P / 8; b++) state.out[b][f].elements[i] *= shrink[f][i];
        }
    }
}

// ---- Values ----

// The values' norms of a block in the lane's rows of a tile. They are loaded a tile ahead: nothing is computed from
// them before.
template <int D>
inline void load_part_norms(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint block,
                            thread float (&norms)[4])
{
    if (!has_norms(value_format)) return;
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        uint slot = value_slot(args, task.pages, base, tile_row(p, TQKV__MATRIX_ROW(task.lane)));
        norms[p] = task.values.norms[ulong(slot) * ulong(uint(D) / norm_block<D>(value_format)) + block];
    }
}

// Weights of tile number `number` of the round with these norms, as right factors. Where no weight is, a norm may be
// NaN.
template <int D, int F>
inline void scale_long_weights(constant tqkv__attend_args &args, thread const attend_task &task, uint number,
                               thread const float (&norms)[4], thread right_pair (&right)[2][F])
{
    float scaled[4][F][2];
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        float scale = has_norms(value_format) ? code_scale<D>(value_format, norms[p], args.value_block_scale) : 1.0f;
        TQKV_UNROLL
        for (int f = 0; f < F; f++) {
            float2 two = *weights_at<F>(task.weights, task.lane, number, p, f);
            scaled[p][f][0] = two.x * (two.x > 0.0f ? scale : 0.0f);
            scaled[p][f][1] = two.y * (two.y > 0.0f ? scale : 0.0f);
        }
    }
    TQKV_UNROLL
    for (int h = 0; h < 2; h++) {
        TQKV_UNROLL
        for (int f = 0; f < F; f++)
            right[h][f] = right_of_sums(scaled[2 * h][f][0], scaled[2 * h][f][1], scaled[2 * h + 1][f][0],
                                        scaled[2 * h + 1][f][1], has_norms(value_format));
    }
}

// ---- Weights that are right factors already ----

// Where products take right factors from threadgroup memory, the simdgroup of a tile makes them of its weights, one set
// for each norm of a row. Simdgroups that multiply together must have the same norm.
template <int D>
inline bool shares_rights()
{
    return TQKV_STORED_RIGHTS && norm_block<D>(value_format) % uint(4 * TQKV__LONG_VALUES) == 0;
}

// Those of half h of a tile: [blocks][simdgroups][2][F]
template <int F>
inline threadgroup right_pair *rights_at(thread const attend_task &task, uint block, uint simdgroup, uint h)
{
    threadgroup float *weights = task.weights;
    return (threadgroup right_pair *)weights + ((block * task.n_simdgroups + simdgroup) * 2u + h) * uint(F * 32);
}

template <int D, int F>
inline void load_weight_norms(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                              thread float (&norms)[2][4])
{
    if (!has_norms(value_format)) return;
    TQKV_UNROLL
    for (int b = 0; b < 2; b++)
        if (uint(b) < uint(D) / norm_block<D>(value_format)) load_part_norms<D>(args, task, base, uint(b), norms[b]);
}

template <int D, int F>
inline void store_rights(constant tqkv__attend_args &args, thread const attend_task &task,
                         thread const float (&norms)[2][4], thread const sum_matrix (&weight)[4][F])
{
    TQKV_UNROLL
    for (int b = 0; b < 2; b++) {
        if (uint(b) >= uint(D) / norm_block<D>(value_format)) continue;
        float scaled[4][F][2];
        TQKV_UNROLL
        for (int p = 0; p < 4; p++) {
            float scale =
                has_norms(value_format) ? code_scale<D>(value_format, norms[b][p], args.value_block_scale) : 1.0f;
            TQKV_UNROLL
            for (int f = 0; f < F; f++) {
                TQKV_UNROLL
                for (int i = 0; i < 2; i++) {
                    float x = weight[p][f].elements[i];
                    scaled[p][f][i] = x * (x > 0.0f ? scale : 0.0f);
                }
            }
        }
        TQKV_UNROLL
        for (int h = 0; h < 2; h++) {
            TQKV_UNROLL
            for (int f = 0; f < F; f++)
                store_right(rights_at<F>(task, uint(b), task.simdgroup, uint(h)) + f * 32, task.lane,
                            right_of_sums(scaled[2 * h][f][0], scaled[2 * h][f][1], scaled[2 * h + 1][f][0],
                                          scaled[2 * h + 1][f][1], has_norms(value_format)));
        }
    }
    publish_rights();
}

// As multiply_values.
template <int D, int W, int P, int F>
inline void multiply_by_rights(int chunk, thread const value_chunk<D, W> &values, thread const value_book &book,
                               threadgroup const right_pair *right, uint lane, thread matrix_state<P, F> &state)
{
    const int N = MATRIX_OUT_VALUES(D, W);
    const int G = N % 4 == 0 ? 2 : 1;
    bool exact = !has_codebook(value_format), wide = has_norms(value_format);
    TQKV_UNROLL
    for (int i = 0; i < N; i += 2 * G) {
        left_block left[G];
        decode_values<G, F>(values, i, book, left);
        multiply_stored<G, F>(left, right, 1u, lane, wide, exact, has_pairs(value_format), &state.out[chunk * N + i]);
    }
}

// Chunks of a simdgroup's part of a row.
#define LONG_CHUNKS(D, W) (TQKV__LONG_VALUES / (8 * MATRIX_OUT_VALUES(D, W)))

template <int D, int W>
inline void load_part(constant tqkv__attend_args &args, thread const attend_task &task, uint base, uint chunk,
                      thread value_chunk<D, W> (&values)[2])
{
    TQKV_UNROLL
    for (int h = 0; h < 2; h++)
        load_value_chunk<D, W>(args, task, base, task.simdgroup * uint(LONG_CHUNKS(D, W)) + chunk, uint(h), values[h]);
}

// What a lane loads ahead of a tile's values: the first chunk of the simdgroup's part, and its norms.
template <int D, int W>
struct part_values {
    value_chunk<D, W> chunk[2];
    float norms[4];
};

// The first block of the simdgroup's part of a row; of halves 0.
template <int D>
inline uint block_of_part(uint simdgroup)
{
    return simdgroup * uint(TQKV__LONG_VALUES) / norm_block<D>(value_format);
}

template <int D, int W>
inline void open_part(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                      thread part_values<D, W> &values)
{
    load_part<D, W>(args, task, base, 0u, values.chunk);
    if (!shares_rights<D>()) load_part_norms<D>(args, task, base, block_of_part<D>(task.simdgroup), values.norms);
}

// Adds the simdgroup's part of the values of a tile, which `values` was opened for.
template <int D, int W, int F>
inline void add_part(constant tqkv__attend_args &args, thread const attend_task &task, uint number, uint base,
                     bool whole, thread const value_book &book, thread part_values<D, W> &values,
                     thread matrix_state<TQKV__LONG_VALUES, F> &state)
{
    const int N = MATRIX_OUT_VALUES(D, W), chunks = LONG_CHUNKS(D, W);
    const uint block_chunks = norm_block<D>(value_format) / uint(8 * N), first = task.simdgroup * uint(chunks);
    right_pair right[2][F];
    TQKV_UNROLL
    for (int j = 0; j < chunks; j++) {
        uint chunk = first + uint(j);
        bool begins = !shares_rights<D>() && j != 0 && chunk % block_chunks == 0; // a block
        if (begins) load_part_norms<D>(args, task, base, chunk / block_chunks, values.norms);
        if (!shares_rights<D>() && (begins || j == 0))
            scale_long_weights<D, F>(args, task, number, values.norms, right);
        TQKV_UNROLL
        for (int h = 0; h < 2; h++) {
            if (W == 16 && !whole) clear_not_finite<W, N>(values.chunk[h].raw);
            if (shares_rights<D>())
                multiply_by_rights(j, values.chunk[h], book,
                                   rights_at<F>(task, block_of_part<D>(task.simdgroup), number, uint(h)), task.lane,
                                   state);
            else
                multiply_values(j, values.chunk[h], book, right[h], state);
        }
        if (j + 1 < chunks) load_part<D, W>(args, task, base, uint(j + 1), values.chunk);
    }
    // Not once a round: ptxas serialises all products of warpgroups where some are under way over a loop or a branch.
    finish_products<F>(state.out, TQKV__LONG_VALUES / 8);
}

// Word by word: Apple's modules copy no structs by a call.
template <int D, int W>
inline void copy_part(thread const part_values<D, W> &from, thread part_values<D, W> &to)
{
    const int N = MATRIX_OUT_VALUES(D, W);
    TQKV_UNROLL
    for (int i = 0; i < 8; i++) {
        TQKV_UNROLL
        for (int w = 0; w < (W * N + 31) / 32; w++)
            to.chunk[i / 4].raw[i % 4].main[w] = from.chunk[i / 4].raw[i % 4].main[w];
        TQKV_UNROLL
        for (int w = 0; w < (2 * N + 31) / 32; w++)
            to.chunk[i / 4].raw[i % 4].upper[w] = from.chunk[i / 4].raw[i % 4].upper[w];
    }
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) to.norms[p] = from.norms[p];
}

// The same for all tiles of a round.
template <int D, int W, int F>
inline void add_parts(constant tqkv__attend_args &args, thread const attend_task &task, long_rounds rounds, uint round,
                      uint parity, newest_range newest, thread const value_book &book, thread part_values<D, W> &values,
                      thread matrix_state<TQKV__LONG_VALUES, F> &state)
{
    uint base = values_of_tile(args, task, round, parity, 0u);
    for (uint s = 0; s < uint(TQKV__LONG_SIMDGROUPS); s++) {
        uint tile = round + s, next_base = values_of_tile(args, task, round, parity, s + 1u);
        part_values<D, W> next;
        open_part<D, W>(args, task, next_base, next);
        if (has_tile(rounds, tile))
            add_part<D, W, F>(args, task, s, base, sees_whole_tile(args, tile, newest), book, values, state);
        copy_part<D, W>(next, values);
        base = next_base;
    }
}

template <int D>
struct any_part_values {
    part_values<D, 4> of_4;
    part_values<D, 8> of_8;
    part_values<D, 16> of_16;
};

// The values of the first tile of a round.
template <int D>
inline void open_parts(constant tqkv__attend_args &args, thread const attend_task &task, uint round, uint parity,
                       thread any_part_values<D> &values)
{
    uint base = values_of_tile(args, task, round, parity, 0u);
    if (task.simdgroup * uint(TQKV__LONG_VALUES) >= uint(D)) return;
    WITH_CODES(value_format, values, open_part<D, W>(args, task, base, codes));
}

// ---- The end of a stretch ----

// M: 2 or 4
template <int M>
inline void store_floats(thread const float *x, device float *to)
{
    if (M == 4) return store_four(x, to);
    to[0] = x[0];
    to[1] = x[1];
}

// Adds the simdgroup's part of the sums to a partial result and, at the end of a section, to the first.
template <int D, int N, int F>
inline void store_part(thread const attend_task &task, column_memory memory, column_end how,
                       thread const matrix_state<TQKV__LONG_VALUES, F> &state)
{
    const int M = N % 4 == 0 ? 4 : 2;
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            if (c >= how.used) continue;
            float4 shares = *(threadgroup const float4 *)(memory.shares + c * 4u);
            device float *to = task.partial_out + row_offset(memory.rows[c], D) +
                               (task.simdgroup * uint(TQKV__LONG_VALUES) + TQKV__MATRIX_ROW(task.lane) * uint(N));
            TQKV_UNROLL
            for (int b = 0; b < TQKV__LONG_VALUES / 8; b += M) {
                device float *total = to + (b / N * 8 * N + b % N), *section = total + how.section;
                float own[M], kept[M], all[M];
                TQKV_UNROLL
                for (int j = 0; j < M; j++) {
                    own[j] = state.out[b + j][f].elements[i];
                    kept[j] = all[j] = 0.0f;
                }
                if (!how.copy) load_floats<M>(section, kept);
                add_floats<M>(shares.x, kept, shares.y, own);
                store_floats<M>(kept, section);
                if (!how.to_total) continue;
                if (!how.copy_to_total) load_floats<M>(total, all);
                add_floats<M>(shares.z, all, shares.w, kept);
                store_floats<M>(all, total);
            }
        }
    }
}

// As keep_stretch of attend.h.
template <int D, int F>
inline uint keep_parts(constant tqkv__attend_args &args, thread const attend_task &task, stretch_range own,
                       uint stretch, column_memory memory, thread matrix_state<TQKV__LONG_VALUES, F> &state)
{
    column_end how = open_end(args, task, own, stretch, uint(D));
    threadgroup_barrier(mem_flags::mem_threadgroup); // the states' memory holds maxima
    store_states(task, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (task.simdgroup == 0 && task.lane < uint(F * 8))
        combine_states<TQKV__LONG_SIMDGROUPS>(task, task.lane, memory, how);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (task.simdgroup * uint(TQKV__LONG_VALUES) < uint(D)) {
        if (code_width(value_format) == 4) store_part<D, MATRIX_OUT_VALUES(D, 4), F>(task, memory, how, state);
        if (code_width(value_format) == 8) store_part<D, MATRIX_OUT_VALUES(D, 8), F>(task, memory, how, state);
        if (code_width(value_format) == 16) store_part<D, MATRIX_OUT_VALUES(D, 16), F>(task, memory, how, state);
    }
    return how.to_total ? 0u : partial_of_section(args, task.split);
}

// ---- The kernel ----

template <int D, int F>
inline void add_rounds(constant tqkv__attend_args &args, thread const attend_task &task, long_rounds rounds,
                       thread const value_books &books, column_memory memory,
                       thread matrix_state<TQKV__LONG_VALUES, F> &state)
{
    long_walk<D, F> walk;
    walk.newest = newest_of_columns(args, task.first_column);
    uint round = round_of(rounds, rounds.begin), parity = 0u;
    open_walk<D, F>(args, task, round, walk);
    share_round(task, walk.base, parity);
    if (task.pages.shared_values) threadgroup_barrier(mem_flags::mem_threadgroup);
    while (round < rounds.end) {
        uint next = next_round(rounds, round);
        sum_matrix score[4][F];
        any_part_values<D> values;
        float norms[2][4];
        uint base = task.pages.shared_values ? shared_slots(task.simdgroup, parity) : walk.base.values;
        score_long_tile<D, F>(args, task, rounds, round, next, books, memory, state, walk, score);
        open_parts<D>(args, task, round, parity, values);
        if (shares_rights<D>()) load_weight_norms<D, F>(args, task, base, norms);
        store_maxima<F>(task, score);
        threadgroup_barrier(mem_flags::mem_threadgroup); // and weights and slots of the round before are used
        share_round(task, walk.base, 1u - parity);
        raise_to_round(task, state);
        weigh_scores(score, state);
        if (shares_rights<D>())
            store_rights<D, F>(args, task, norms, score);
        else
            store_tile_weights<F>(task, task.weights, score);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (task.simdgroup * uint(TQKV__LONG_VALUES) < uint(D)) {
            WITH_CODES(value_format, values,
                       add_parts<D, W, F>(args, task, rounds, round, parity, walk.newest, books.values, codes, state));
        }
        round = next;
        parity = 1u - parity;
    }
}

// The codebooks of all streams. A barrier must precede what looks values up, and the first half of it precede `pairs`.
inline void load_books(thread const attend_task &task, uint thread_index, uint n_threads)
{
    threadgroup float *tables = task.tables, *tail = task.tail_table;
    load_value_book(key_format, false, (threadgroup code_value *)tables, thread_index, n_threads);
    load_value_book(value_format, true, (threadgroup code_value *)tables + 256, thread_index, n_threads);
    if (tail_format != 0) load_value_book(tail_format, false, (threadgroup code_value *)tail, thread_index, n_threads);
}

inline value_books open_books(thread const attend_task &task, uint thread_index, uint n_threads)
{
    threadgroup float *memory = task.tables, *tail_memory = task.tail_table;
    threadgroup code_value *tables = (threadgroup code_value *)memory, *tail = (threadgroup code_value *)tail_memory;
    threadgroup uchar *pairs = (threadgroup uchar *)(memory + 256 + max(1u << codebook_bits(value_format), 4u));
    value_books books;
    books.keys = open_value_book(key_format, tables, pairs, task.lane);
    books.values = open_value_book(value_format, tables + 256, pairs, task.lane);
    books.tail = open_value_book(tail_format, tail, pairs, task.lane);
    if (has_pairs(key_format))
        load_pairs(tables, false, thread_index, n_threads, pairs);
    else if (has_pairs(tail_format)) // of the same codebook, if both are
        load_pairs(tail, false, thread_index, n_threads, pairs);
    if (has_pairs(value_format)) load_pairs(tables + 256, true, thread_index, n_threads, pairs);
    return books;
}

template <int D, int F>
inline void attend_rounds(constant tqkv__attend_args &args, thread const attend_task &task)
{
    const int T = TQKV__TAIL_DIM(D);
    uint thread_index = task.simdgroup * 32u + task.lane, n_threads = task.n_simdgroups * 32u, partial = 0u;
    column_memory memory = column_memory_of(task.kept, uint(8 * F));
    tile_range seen = tiles_seen(args, task.first_column, task.pages.list);
    stretch_range own = stretches_of_threadgroup(args, seen, task.split);
    matrix_state<TQKV__LONG_VALUES, F> state;
    load_books(task, thread_index, n_threads);
    load_matrix_queries<D, F>(args, task, first_part(args, task), memory);
    if (tail_format != 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_matrix_queries<T, F>(args, task, tail_part<D>(task), memory);
    }
    value_books books = open_books(task, thread_index, n_threads);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    open_columns(args, task, memory, state);
    for (uint stretch = own.begin; stretch < own.end; stretch++) {
        clear_matrices(state);
        add_rounds<D, F>(args, task, open_rounds(args, seen, stretch), books, memory, state);
        partial = keep_parts<D, F>(args, task, own, stretch, memory, state);
    }
    store_columns(args, task, partial, memory);
}

// As attend_with_matrices.
template <int D>
inline void attend_long_rows(constant tqkv__attend_args &args, thread const attend_task &task)
{
    const int most = TQKV__MOST_MATRIX_COLUMNS(D) / 8;
    if (most == 1 || columns <= 8)
        attend_rounds<D, 1>(args, task);
    else if (most == 2 || columns <= 16)
        attend_rounds < D, most<2 ? 1 : 2>(args, task);
    else
        attend_rounds<D, most>(args, task);
}

#endif

// ---- shaders/matrix_strand.h ----

// A strand of a stretch by matrices: strand.h says what it is. Each simdgroup has the scores of one tile as in
// attend_matrix.h, makes right factors of its weights, and multiplies its part of the values of all four tiles by them.
// Then the kernel attend_matrix, of strands and of stretches.
//
// Letters: as in attend_matrix.h; P values of a row that a simdgroup has sums of, N of each lane.
#ifndef TQKV_MATRIX_STRAND_H
#define TQKV_MATRIX_STRAND_H

// ---- Threadgroup memory, in the place of queries: TQKV__MATRIX_STRAND_BYTES ----

// Right factors of half h of a tile, for the values of a norm: [blocks][tiles][2][F][32]
template <int F>
inline threadgroup right_pair *strand_rights(thread const attend_task &task, uint block, uint number, uint h, int f)
{
    threadgroup float *memory = task.sums;
    uint at = ((block * uint(TQKV__STRANDS) + number) * 2u + h) * uint(F) + uint(f);
    return (threadgroup right_pair *)memory + (at * 32u + task.lane);
}

// Behind them the weights without norms: weights_at.
template <int D, int F>
inline threadgroup float *strand_weights(thread const attend_task &task)
{
    return task.sums + TQKV__STRAND_BLOCKS(D) * TQKV__STRANDS * 2 * F * 32 * 4;
}

// ---- Softmax ----

// Of element i of matrix f. A barrier must follow store_maxima.
template <int F>
inline tile_maxima maxima_of_column(thread const attend_task &task, int f, int i)
{
    tile_maxima maxima = {task.states + (uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane)), uint(8 * F)};
    return maxima;
}

// Scores to weights, and these to right factors in threadgroup memory. A barrier must follow.
template <int D, int P, int F>
inline void store_strand_weights(constant tqkv__attend_args &args, thread const attend_task &task, uint base,
                                 thread const tile_norms &norms, thread sum_matrix (&score)[4][F],
                                 thread matrix_state<P, F> &state)
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            state.maximum[f][i] = maximum_after(maxima_of_column<F>(task, f, i), task.simdgroup + 1u);
        }
    }
    weigh_scores(score, state);
    store_tile_weights<F>(task, strand_weights<D, F>(task), score);
    TQKV_UNROLL
    for (int b = 0; b < TQKV__STRAND_BLOCKS(D); b++) {
        if (uint(b) >= uint(D) / norm_block<D>(value_format)) continue;
        right_pair right[2][F];
        scale_weights<D, F>(args, task, base, uint(b), norms, score, right);
        TQKV_UNROLL
        for (int i = 0; i < 2 * F; i++)
            *strand_rights<F>(task, uint(b), task.simdgroup, uint(i / F), i % F) = right[i / F][i % F];
    }
}

// Maxima and sums of the columns, which simdgroup f has of matrix f, in attend_matrix's order.
template <int D, int F>
inline void store_strand_sums(constant tqkv__attend_args &args, thread const attend_task &task, uint used,
                              column_memory memory)
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        if (task.simdgroup != uint(f)) continue;
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            const uint c = uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            tile_maxima maxima = maxima_of_column<F>(task, f, i);
            float sum = 0.0f, maximum = maximum_after(maxima, uint(TQKV__STRANDS));
            TQKV_UNROLL
            for (int t = 0; t < TQKV__STRANDS; t++) {
                sum *= shrink_before(maxima, t);
                TQKV_UNROLL
                for (int p = 0; p < 4; p++) {
                    float2 two = *weights_at<F>(strand_weights<D, F>(task), task.lane, uint(t), p, f);
                    sum += i == 0 ? two.x : two.y;
                }
            }
            sum = sum_of_column(sum);
            if (TQKV__MATRIX_ROW(task.lane) == 0 && c < used)
                store_column(args, task, task.split, c, memory, maximum == NOTHING_SEEN ? -INFINITY : maximum, sum);
        }
    }
}

// ---- Values ----

#define STRAND_PART(D)    ((D) / TQKV__STRANDS)                     // values of a simdgroup
#define STRAND_NUMBERS(D) (STRAND_PART(D) / 8)                      // and of a lane
#define STRAND_TILE(D, W) (8 * (((W)*STRAND_NUMBERS(D) + 31) / 32)) // words of a tile that a lane loads
#define STRAND_AHEAD(D, W) \
    (4 * STRAND_TILE(D, W) <= TQKV_STRAND_WORDS ? 4 : 2 * STRAND_TILE(D, W) <= TQKV_STRAND_WORDS ? 2 : 1)

// The codes of a simdgroup's part of the next tiles, two halves each.
template <int D, int W>
struct strand_chunks {
    value_chunk<D, W, STRAND_NUMBERS(D)> half_tile[STRAND_AHEAD(D, W)][2];
};

template <int D>
struct any_strand_chunks {
    strand_chunks<D, 4> of_4;
    strand_chunks<D, 8> of_8;
    strand_chunks<D, 16> of_16;
};

template <int D, int W>
inline void load_strand_chunks(constant tqkv__attend_args &args, thread const attend_task &task,
                               thread const strand_slots &slots, thread strand_chunks<D, W> &values)
{
    TQKV_UNROLL
    for (int i = 0; i < 2 * STRAND_AHEAD(D, W); i++)
        load_value_chunk(args, task, slots.base[i / 2], task.simdgroup, uint(i % 2), values.half_tile[i / 2][i % 2]);
}

template <int P, int F>
inline void shrink_matrices(thread const attend_task &task, int tile, thread matrix_state<P, F> &state)
{
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            float shrink = shrink_before(maxima_of_column<F>(task, f, i), tile);
            TQKV_UNROLL
            for (int b = 0; b < P / 8; b++) state.out[b][f].elements[i] *= shrink;
        }
    }
}

// The simdgroup's part of all tiles. Of a tile that does not exist norms, and so right factors, may be NaN.
template <int D, int W, int F>
inline void add_strand_chunks(constant tqkv__attend_args &args, thread const attend_task &task,
                              thread const strand_tiles &tiles, thread const strand_slots &slots, newest_range newest,
                              thread const value_book &book, thread strand_chunks<D, W> &values,
                              thread matrix_state<STRAND_PART(D), F> &state)
{
    const int ahead = STRAND_AHEAD(D, W);
    const uint block = task.simdgroup * uint(STRAND_PART(D)) / norm_block<D>(value_format);
    TQKV_UNROLL
    for (int t = 0; t < TQKV__STRANDS; t++) {
        uint tile = tiles.first + uint(t * TQKV__STRANDS);
        bool exists = has_tile(tiles, tile), whole = sees_whole_tile(args, tile, newest);
        if (t > 0) shrink_matrices(task, t, state);
        TQKV_UNROLL
        for (int h = 0; h < 2; h++) {
            thread value_chunk<D, W, STRAND_NUMBERS(D)> &own = values.half_tile[t % ahead][h];
            right_pair right[F];
            TQKV_UNROLL
            for (int f = 0; f < F; f++) right[f] = *strand_rights<F>(task, block, uint(t), uint(h), f);
            if (W == 16 && !whole) clear_not_finite<W, STRAND_NUMBERS(D)>(own.raw);
            if (exists) multiply_values(0, own, book, right, state);
            if (t + ahead < TQKV__STRANDS)
                load_value_chunk(args, task, slots.base[t + ahead], task.simdgroup, uint(h), own);
        }
    }
}

template <int D, int F>
inline void store_strand_parts(constant tqkv__attend_args &args, thread const attend_task &task, uint used,
                               column_memory memory, thread const matrix_state<STRAND_PART(D), F> &state)
{
    const uint n_rows = uint(args.n_queries) * uint(args.n_kv_heads) * uint(args.group);
    const uint value = task.simdgroup * uint(STRAND_PART(D)) + TQKV__MATRIX_ROW(task.lane) * uint(STRAND_NUMBERS(D));
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            if (c >= used) continue;
            ulong row = row_offset(task.split, n_rows) + ulong(memory.rows[c]);
            device float *to = task.partial_out + (row * ulong(D) + ulong(value));
            TQKV_UNROLL
            for (int b = 0; b < STRAND_NUMBERS(D); b++) to[b] = state.out[b][f].elements[i];
        }
    }
}

// ---- The strand ----

template <int D, int F>
inline void attend_matrix_strand(constant tqkv__attend_args &args, thread const attend_task &task,
                                 thread const strand_tiles &tiles, thread const value_book &key_book,
                                 thread const value_book &out_book, column_memory memory,
                                 thread matrix_walk<D, F> &walk)
{
    const uint tile = walk.steps.tile, used = min(uint(columns), end_of_columns(args, task) - task.first_column);
    const bool exists = has_tile(tiles, tile), whole = sees_whole_tile(args, tile, walk.newest);
    const strand_slots slots = find_strand(args, task, tiles);
    tile_memory base = walk.base;
    matrix_state<STRAND_PART(D), F> state;
    tile_norms norms;
    any_strand_chunks<D> values;
    sum_matrix score[4][F];
    load_tile_norms<D>(args, task, base, norms);
    WITH_CODES(value_format, values, load_strand_chunks<D, W>(args, task, slots, codes));
    open_columns(args, task, memory, state);
    clear_matrices(state);
    score_any_matrix_tile<D, F>(args, task, first_part(args, task), base.keys, base.keys, key_book, walk.keys, score);
    finish_scores<D>(args, task, tile, base, whole, state, norms, score);
    if (!exists) clear_to_nothing(score);
    store_maxima<F>(task, score);
    threadgroup_barrier(mem_flags::mem_threadgroup); // and the queries are used
    store_strand_weights<D>(args, task, base.values, norms, score, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    WITH_CODES(value_format, values,
               add_strand_chunks<D, W, F>(args, task, tiles, slots, walk.newest, out_book, codes, state));
    store_strand_parts<D, F>(args, task, used, memory, state);
    store_strand_sums<D, F>(args, task, used, memory);
}

// ---- The kernel ----

template <int D, int F>
inline void attend_by_matrices(constant tqkv__attend_args &args, thread const attend_task &task)
{
    uint thread_index = task.simdgroup * 32u + task.lane, n_threads = task.n_simdgroups * 32u, partial = 0u;
    threadgroup float *table_memory = task.tables;
    threadgroup code_value *tables = (threadgroup code_value *)table_memory;
    column_memory memory = column_memory_of(task.kept, uint(8 * F));
    tile_range seen = tiles_seen(args, task.first_column, task.pages.list);
    threadgroup_tiles tiles = open_threadgroup(args, task, seen, F <= 2);
    matrix_state<D, F> state;
    matrix_walk<D, F> walk;
    walk.base = find_begin(args, task, seen, tiles, walk.steps, walk.search);
    walk.newest = newest_of_columns(args, task.first_column);
    open_key_batch<D, F>(args, task, first_part(args, task), walk.base.keys, walk.keys);
    if (HOLDS_NORMS(F)) load_tile_norms<D>(args, task, walk.base, walk.norms);
    load_value_book(key_format, false, tables, thread_index, n_threads);
    load_value_book(value_format, true, tables + 256, thread_index, n_threads);
    load_matrix_queries<D, F>(args, task, first_part(args, task), memory);
    threadgroup uchar *pairs = (threadgroup uchar *)(table_memory + 256 + max(1u << codebook_bits(value_format), 4u));
    value_book key_book = open_value_book(key_format, tables, pairs, task.lane);
    value_book out_book = open_value_book(value_format, tables + 256, pairs, task.lane);
    if (has_pairs(key_format)) load_pairs(tables, false, thread_index, n_threads, pairs);
    if (has_pairs(value_format)) load_pairs(tables + 256, true, thread_index, n_threads, pairs);
    open_columns(args, task, memory, state);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tiles.alone) {
        attend_matrix_strand<D, F>(args, task, tiles.strand, key_book, out_book, memory, walk);
        return;
    }
    for (uint stretch = tiles.own.begin; stretch < tiles.own.end; stretch++) {
        clear_matrices(state);
        uint end = min(seen.end, first_tile_of_stretch(args, stretch + 1u));
        add_matrix_tiles<D, F>(args, task, tiles.idle ? 0u : end, key_book, out_book, walk, state);
        partial = keep_columns<D, F>(args, task, tiles.own, stretch, memory, state);
    }
    store_columns(args, task, partial, memory);
}

// How many columns there are chooses the code here and nowhere else.
template <int D>
inline void attend_with_matrices(constant tqkv__attend_args &args, thread const attend_task &task)
{
    const int most = TQKV__MOST_MATRIX_COLUMNS(D) / 8;
    if (most == 1 || columns <= 8)
        attend_by_matrices<D, 1>(args, task);
    else if (most == 2 || columns <= 16)
        attend_by_matrices<D, 2>(args, task);
    else
        attend_by_matrices<D, most>(args, task);
}

#endif

// ---- shaders/attend_matrix.metal ----

// attend_matrix: what attend does, by products of matrices. Threadgroups: x KV heads, y blocks of query rows, z splits
// of the context.

// clang-format off
#define ATTEND_MATRIX(D) \
    kernel void tqkv_attend_matrix_d##D(ATTEND_ARGUMENTS) \
    { \
        ATTEND_TASK(D, D) \
        task.weights = queries + TQKV__MATRIX_QUERY_BYTES(D) / 4 * TQKV__MATRICES(int(columns)); \
        task.sums = args.sections_each == 0 ? queries : task.weights; \
        task.states = states + TQKV__COLUMN_BYTES(8 * TQKV__MATRICES(int(columns))) / 4; \
        if (TQKV_SHARED_MATRIX_SLOTS) open_slots(8u * uint(TQKV__MATRICES(int(columns))), task); \
        TQKV_LONG_CALL(attend_with_matrices<D>(args, task)); \
    }
// Rows whose sums several simdgroups share: TQKV__LONG_SIMDGROUPS a threadgroup, no more and no fewer.
#define ATTEND_LONG_MATRIX(D) \
    kernel void tqkv_attend_matrix_d##D(ATTEND_ARGUMENTS) \
    { \
        ATTEND_TASK(D, D) \
        task.tail_queries = queries + TQKV__MATRIX_QUERY_BYTES(D) / 4 * TQKV__MATRICES(int(columns)); \
        task.weights = queries + TQKV__MATRIX_QUERY_BYTES(D + int(tail_values<D>())) / 4 * TQKV__MATRICES(int(columns)); \
        task.tail_table = states + TQKV__COLUMN_BYTES(8 * TQKV__MATRICES(int(columns))) / 4; \
        task.states = task.tail_table + (tail_values<D>() != 0 ? TQKV__TABLE_BYTES / 4 : 0); \
        if (TQKV_SHARED_MATRIX_SLOTS) open_round_slots(8u * uint(TQKV__MATRICES(int(columns))), task); \
        TQKV_LONG_CALL(attend_long_rows<D>(args, task)); \
    }
// clang-format on

#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_matrix_d64)
ATTEND_MATRIX(64)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_matrix_d128)
ATTEND_MATRIX(128)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_matrix_d256)
ATTEND_MATRIX(256)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_matrix_d448)
ATTEND_LONG_MATRIX(448)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_matrix_d512)
ATTEND_LONG_MATRIX(512)
#endif

// ---- shaders/merge.h ----

// The end of attention for one query row: brings the sums of the partial results to one maximum, adds them and the
// sink, divides, and turns the result back from the rotated basis. One threadgroup a row: its simdgroups share the
// sections. The same in parts, with slices of the caller: partial results to a slice, a slice to another, a slice to
// the result.
#ifndef TQKV_MERGE_H
#define TQKV_MERGE_H

// What a threadgroup works on, and the place of this thread in it.
struct merge_task {
    device const float *partial_out;   // [n_partials][n_rows][D], or [n_rows][D]: of the slice that is read
    device const float *partial_state; // [1 + n_partials][n_rows][2]: shift of all scores, unused; then maximum (in
                                       // powers of two), sum of the weights. Parts of the context: one after another
    device uchar *out;                 // [n_queries][n_heads][D], with strides
    device float *max, *sum;           // [n_rows]: of the slice that is written
    device const float *src_max, *src_sum; // [n_rows]: of the slice that is read
    threadgroup float *shared;  // [n_simdgroups][D + 4]: the sums of a section, then maximum and sum of weights
    uint row, type;             // type: of the output
    float sink;                 // in powers of two; -INFINITY: none. It is added to the denominator only
    bool from_slice, to_slice;  // from one to another: it is added
    bool rotate;                // the sums, for a slice: the values are not
    bool unrotate;              // the result
    bool shifted;               // the keys have a centre, which adds partial_state of the row to all scores
    bool scaled;                // the output is multiplied by the scales of the values' channels
    bool centered, rotated;     // the values' centre is added, and rotated before that
    bool center_scaled;         // and divided by the scales before that
    device const float *center; // [n_kv_heads][D]
    device const float *scale;  // the same, of the channels
    uint lane, part, simdgroup, n_simdgroups; // part: which neighbours the lane has
};

// The arrays of an item of a batch.
inline void open_merge_item(constant tqkv__batch_item &item, thread merge_task &task)
{
    task.row -= uint(item.first_row);
    task.partial_state = task.partial_out + item.partial_state;
    task.partial_out += item.partial_out;
    task.out += row_offset(item.out, TQKV__ROWS_UNIT);
    task.center += item.value_center;
    task.scale += item.value_scale;
}

// The sums of a row over some positions, the values across the lanes: E neighbours a lane. Where 32 does not divide D
// the upper lanes repeat the lower ones. Only the rotation needs the layout of load_row.
#define MERGE_LANES(D)  ((D) % 32 == 0 ? 32 : 16)
#define MERGE_VALUES(D) ((D) / MERGE_LANES(D))
template <int D>
struct row_sums {
    float maximum, sum, out[MERGE_VALUES(D)];
};

template <int D>
inline void clear_row(thread row_sums<D> &row)
{
    row.maximum = -INFINITY;
    row.sum = 0.0f;
    TQKV_UNROLL
    for (int i = 0; i < MERGE_VALUES(D); i++) row.out[i] = 0.0f;
}

// Adds sums to a row, as attend does it.
template <int D>
inline void add_sums(float maximum, float sum, thread const float *out, thread row_sums<D> &row)
{
    shares both = shares_of(row.maximum, maximum);
    row.maximum = both.largest;
    row.sum = fma(both.added, sum, both.kept * row.sum);
    TQKV_UNROLL
    for (int i = 0; i < MERGE_VALUES(D); i++) row.out[i] = fma(both.added, out[i], both.kept * row.out[i]);
}

// Adds a row to sums that come before it.
template <int D>
inline void add_before(float maximum, float sum, thread const float *out, thread row_sums<D> &row)
{
    shares both = shares_of(maximum, row.maximum);
    row.maximum = both.largest;
    row.sum = fma(both.added, row.sum, both.kept * sum);
    TQKV_UNROLL
    for (int i = 0; i < MERGE_VALUES(D); i++) row.out[i] = fma(both.added, row.out[i], both.kept * out[i]);
}

// Partial results that a simdgroup loads at a time: several loads are under way.
#define MERGE_BATCH(D) (MERGE_VALUES(D) <= TQKV_MERGE_FLOATS / 8 ? 8 : TQKV_MERGE_FLOATS / MERGE_VALUES(D))

// The partial results of a section, [first, end). part: parts of the context before theirs, each with a row of shifts
struct section_range {
    uint first, end, part;
};

// The partial results of the first positions are the first section, those of the last ones the last. In memory both lie
// before the others.
inline uint count_sections(constant tqkv__merge_args &args)
{
    uint n = (uint(args.before) + uint(args.n_partials) + uint(args.section) - 1u) / uint(args.section);
    return n + (args.n_first > 0 ? 1u : 0u) + (args.n_last > 0 ? 1u : 0u);
}

// Strands are added up by stretches, in the place of sections.
inline section_range range_of_section(constant tqkv__merge_args &args, uint section)
{
    uint length = uint(args.section), before = uint(args.before), n_ends = uint(args.n_first) + uint(args.n_last);
    section_range range = {0u, uint(args.n_first), 0u};
    if (args.n_first > 0) {
        if (section == 0u) return range;
        section--;
        range.part++;
    }
    uint first = max(section * length, before) - before;
    bool last = first >= uint(args.n_partials);
    if (!last && args.n_last > 0) range.part++;
    range.first = last ? uint(args.n_first) : n_ends + first;
    range.end = last ? n_ends : n_ends + min((section + 1u) * length - before, uint(args.n_partials));
    return range;
}

// With strands the first positions come behind the only section that there is: its stretches are sections here.
inline uint section_in_turn(constant tqkv__merge_args &args, uint turn)
{
    if (args.strands == 1 || args.n_first == 0) return turn;
    uint n = uint(args.n_partials) / uint(args.section);
    return turn < n ? turn + 1u : turn == n ? 0u : turn;
}

// The maximum of a stretch of which the partial results are strands: attend brings their sums to it before it adds
// them.
inline float maximum_of_strands(constant tqkv__merge_args &args, thread const merge_task &task, section_range range)
{
    float maximum = -INFINITY;
    TQKV_UNROLL
    for (uint i = 0; i < uint(TQKV__STRANDS); i++) {
        ulong at = row_offset(range.first + i + range.part + 1u, uint(args.n_rows)) + task.row;
        maximum = max(maximum, task.partial_state[at * 2u]);
    }
    return maximum;
}

// Adds the partial results of a section. A load beyond the last one repeats it.
template <int D>
inline void add_partials(constant tqkv__merge_args &args, thread const merge_task &task, section_range range,
                         thread row_sums<D> &row)
{
    const int E = MERGE_VALUES(D), B = MERGE_BATCH(D);
    uint end = range.end;
    ulong states = ulong(uint(args.n_rows)) * ulong(range.part + 1u);
    for (uint first = range.first; first < end; first += uint(B)) {
        float out[B][E], state[B][2];
        TQKV_UNROLL
        for (int i = 0; i < B; i++) {
            ulong at = row_offset(min(first + uint(i), end - 1u), uint(args.n_rows)) + task.row;
            load_floats<E>(task.partial_out + at * ulong(D) + task.part * uint(E), out[i]);
            state[i][0] = task.partial_state[(at + states) * 2u];
            state[i][1] = task.partial_state[(at + states) * 2u + 1u];
        }
        TQKV_UNROLL
        for (int i = 0; i < B; i++)
            if (first + uint(i) < end) add_sums<D>(state[i][0], state[i][1], out[i], row);
    }
}

// Adds up to n_simdgroups sections, from number `first` on, to the total of simdgroup 0: each simdgroup adds up one.
template <int D>
inline void add_sections(constant tqkv__merge_args &args, thread const merge_task &task, uint first, uint n_sections,
                         thread row_sums<D> &total)
{
    const int E = MERGE_VALUES(D);
    uint turn = first + task.simdgroup, section = section_in_turn(args, turn);
    row_sums<D> row;
    clear_row<D>(row);
    if (turn < n_sections) {
        section_range range = range_of_section(args, section);
        bool ends = (section == 0u && args.n_first > 0) || (turn + 1u == n_sections && args.n_last > 0);
        if (args.strands > 1 && !ends) row.maximum = maximum_of_strands(args, task, range);
        add_partials<D>(args, task, range, row);
    }
    threadgroup float *own = task.shared + task.simdgroup * uint(D + 4);
    if (task.lane < uint(MERGE_LANES(D))) {
        TQKV_UNROLL
        for (int i = 0; i < E; i++) own[int(task.lane) * E + i] = row.out[i];
    }
    if (task.lane == 0) {
        own[D] = row.maximum;
        own[D + 1] = row.sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint s = 0; s < min(task.n_simdgroups, n_sections - first) && task.simdgroup == 0; s++) {
        threadgroup const float *other = task.shared + s * uint(D + 4);
        float out[E];
        TQKV_UNROLL
        for (int i = 0; i < E; i++) out[i] = other[int(task.part) * E + i];
        if (args.strands > 1 && args.n_first > 0 && section_in_turn(args, first + s) == 0u)
            add_before<D>(other[D], other[D + 1], out, total);
        else
            add_sums<D>(other[D], other[D + 1], out, total);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); // before the next sections overwrite these
}

// The sums of a row as load_row would load them.
template <int D>
struct spread_sums {
    float maximum, sum, x[TQKV_LANE_VALUES(D)];
};

// The simdgroup's sums. Without a matrix they are where they are to be.
template <int D>
inline void spread_row(thread const merge_task &task, thread const row_sums<D> &row, thread spread_sums<D> &to)
{
    const int L = TQKV__ROW_LANES(D), C = TQKV_ROW_PIECE(D), E = MERGE_VALUES(D);
    to.maximum = row.maximum;
    to.sum = row.sum;
    if (TQKV__HAS_MATRIX(D) && task.lane < uint(MERGE_LANES(D))) {
        TQKV_UNROLL
        for (int i = 0; i < E; i++) task.shared[int(task.lane) * E + i] = row.out[i];
    }
    if (TQKV__HAS_MATRIX(D)) simdgroup_barrier(mem_flags::mem_threadgroup);
    uint part = lane_of_row<D>(task.lane);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++)
        to.x[i] = TQKV__HAS_MATRIX(D) ? task.shared[value_of_lane<L, C>(part, i)] : row.out[i % E];
}

// The slice that is read or, added to the one that is written, both. Additions are those of add_sums.
template <int D>
inline void add_slice(thread const merge_task &task, uint part, thread spread_sums<D> &row)
{
    ulong first = row_offset(task.row, D);
    row.maximum = maximum_of_slice(task.src_max[task.row]);
    row.sum = task.src_sum[task.row];
    load_row<D>(task.partial_out + first, part, row.x);
    if (!task.to_slice) return;
    float before = maximum_of_slice(task.max[task.row]), sum = task.sum[task.row], x[TQKV_LANE_VALUES(D)];
    load_typed_row<D>(uint(TQKV_TYPE_F32), task.out, first, part, x);
    simdgroup_barrier(mem_flags::mem_device); // before some lane overwrites what another has yet to load
    shares both = shares_of(before, row.maximum);
    row.maximum = both.largest;
    row.sum = fma(both.added, row.sum, both.kept * sum);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) row.x[i] = fma(both.added, row.x[i], both.kept * x[i]);
}

// Adds the sink and divides. Returns the share of the values' weights.
template <int D>
inline float divide_row(thread const merge_task &task, thread spread_sums<D> &row)
{
    shares both = shares_of(row.maximum, task.sink);
    float sum = both.kept * row.sum + (task.sink == -INFINITY ? 0.0f : both.added);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) row.x[i] = sum == 0.0f ? 0.0f : both.kept * row.x[i] / sum;
    return sum == 0.0f ? 0.0f : both.kept * row.sum / sum;
}

// Where the row's output begins.
inline ulong output_offset(constant tqkv__merge_args &args, uint row)
{
    uint n_heads = uint(args.n_heads);
    return row_offset(row / n_heads, args.out_token_stride) + row_offset(row % n_heads, args.out_head_stride);
}

template <int D>
inline void merge_row(constant tqkv__merge_args &args, thread const merge_task &task)
{
    uint n_sections = count_sections(args);
    uint part = lane_of_row<D>(task.lane), signs = task.unrotate ? signs_of_row<D>(part) : 0u;
    spread_sums<D> row;
    if (task.from_slice) {
        add_slice<D>(task, part, row);
    } else {
        row_sums<D> total;
        clear_row<D>(total);
        for (uint first = 0; first < n_sections; first += task.n_simdgroups)
            add_sections<D>(args, task, first, n_sections, total);
        if (task.simdgroup != 0) return;
        spread_row<D>(task, total, row);
        if (task.shifted && n_sections > 0u) row.maximum += task.partial_state[ulong(task.row) * 2u];
    }
    float weight = task.to_slice ? row.sum : divide_row<D>(task, row);
    uint kv_head = task.row % uint(args.n_heads) / uint(args.group);
    if (task.rotate && row.sum != 0.0f) rotate_row<D>(row.x, part); // rotated, half of the zeros would be negative
    if (task.unrotate) unrotate_row<D>(row.x, part, signs);
    if (task.scaled) multiply_channels<D>(task.scale, kv_head, part, row.x);
    if (task.centered)
        add_center<D>(task.center, task.scale, kv_head, task.center_scaled, task.rotated, weight, part, row.x);
    if (task.lane < uint(TQKV__ROW_LANES(D)))
        store_typed_row<D>(task.type, row.x, part, task.out, output_offset(args, task.row));
    if (!task.to_slice || task.lane != 0) return;
    task.max[task.row] = row.maximum * TQKV_LN2;
    task.sum[task.row] = row.sum;
}

#endif

// ---- shaders/attend_merge.metal ----

// attend_merge: one result of attention from partial ones, or slices. One threadgroup a query row, along x.

constant bool unrotate [[function_constant(TQKV_FC_UNROTATE)]];
constant bool has_sinks [[function_constant(TQKV_FC_SINKS)]];
// key_centered: declared above
constant bool value_centered [[function_constant(TQKV_FC_VALUE_CENTER)]];
constant bool value_scaled [[function_constant(TQKV_FC_VALUE_SCALED)]];
// center_scaled: declared above
constant bool value_rotated [[function_constant(TQKV_FC_VALUE_ROTATED)]];
// row_type: declared above
// batch: declared above
// rotate_center: declared above
constant bool from_slice [[function_constant(TQKV_FC_FROM_SLICE)]];
constant bool to_slice [[function_constant(TQKV_FC_TO_SLICE)]];

// partial_out: [n_partials][n_rows][D], partial_state: [1 + n_partials][n_rows][2], sinks: [n_heads],
// out: [n_queries][n_heads][D], with strides, max to src_sum: [n_rows]
// clang-format off
#define ATTEND_MERGE(D) \
    kernel void tqkv_attend_merge_d##D( \
        constant tqkv__merge_args &call [[buffer(0)]], \
        device const float *partial_out [[buffer(1)]], \
        device const float *partial_state [[buffer(2)]], \
        device const float *sinks [[buffer(3)]], \
        device uchar *out [[buffer(4)]], \
        device const float *center [[buffer(5)]], \
        constant tqkv__batch_item *items [[buffer(6)]], \
        device float *max [[buffer(7)]], \
        device float *sum [[buffer(8)]], \
        device const float *src_max [[buffer(9)]], \
        device const float *src_sum [[buffer(10)]], \
        device const float *scale [[buffer(11)]], \
        threadgroup float *shared [[threadgroup(0)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        uint item = batch ? item_of(items, group.x, TQKV_BY_ROW) : 0u; \
        constant tqkv__merge_args &args = batch ? items[item].merge : call; \
        merge_task task; \
        task.partial_out = partial_out; \
        task.partial_state = partial_state; \
        task.out = out; \
        task.shared = shared; \
        task.row = group.x; \
        task.type = row_type; \
        task.max = max; \
        task.sum = sum; \
        task.src_max = src_max; \
        task.src_sum = src_sum; \
        task.from_slice = from_slice; \
        task.to_slice = to_slice; \
        task.rotate = rotate_center; \
        task.unrotate = unrotate; \
        task.shifted = key_centered; \
        task.centered = value_centered; \
        task.scaled = value_scaled; \
        task.rotated = value_rotated; \
        task.center_scaled = center_scaled; \
        task.scale = scale; \
        task.center = center; \
        task.lane = lane; \
        task.part = lane % uint(MERGE_LANES(D)); \
        task.simdgroup = simdgroup; \
        task.n_simdgroups = n_simdgroups; \
        if (batch) open_merge_item(items[item], task); \
        task.sink = has_sinks ? sinks[task.row % uint(args.n_heads)] * TQKV_LOG2E : -INFINITY; \
        merge_row<D>(args, task); \
    }
// clang-format on

#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_merge_d32)
ATTEND_MERGE(32)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_merge_d48)
ATTEND_MERGE(48)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_merge_d64)
ATTEND_MERGE(64)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_merge_d80)
ATTEND_MERGE(80)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_merge_d96)
ATTEND_MERGE(96)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_merge_d128)
ATTEND_MERGE(128)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_merge_d192)
ATTEND_MERGE(192)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_merge_d256)
ATTEND_MERGE(256)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_merge_d448)
ATTEND_MERGE(448)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_merge_d512)
ATTEND_MERGE(512)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_attend_merge_d1024)
ATTEND_MERGE(1024)
#endif

// ---- shaders/decode.h ----

// A simdgroup decodes TQKV_ROWS(D) rows.
#ifndef TQKV_DECODE_H
#define TQKV_DECODE_H

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

// ---- shaders/decode.metal ----

// decode: a range of positions to rows, in the stored basis or in the original one. TQKV_ROWS(D) rows a simdgroup.

#define stream_format key_format // the same function constant
// unrotate: declared above
#define centered key_centered // the same function constant
#define with_scale key_scaled // the same function constant
// center_scaled: declared above
// rotate_center: declared above
// row_type: declared above
// paged: declared above

// clang-format off
#define DECODE(D) \
    kernel void tqkv_decode_d##D( \
        constant tqkv__rows_args &args [[buffer(0)]], \
        device const uchar *codes [[buffer(1)]], \
        device const float *norms [[buffer(2)]], \
        device uchar *out [[buffer(3)]], \
        device const float *center [[buffer(4)]], \
        device const int *pages [[buffer(5)]], \
        device const float *scale [[buffer(6)]], \
        threadgroup float *table [[threadgroup(0)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint thread_index [[thread_index_in_threadgroup]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        load_codebook(stream_format, table, thread_index, n_simdgroups * 32u); \
        threadgroup_barrier(mem_flags::mem_threadgroup); \
        decode_task task = {stream_format, row_type, unrotate, with_scale, centered, rotate_center, center_scaled, codes, norms, \
                            out, center, scale, paged, pages, open_codebook(stream_format, table, lane)}; \
        decode_rows<D>(args, task, (group.x * n_simdgroups + simdgroup) * uint(TQKV_ROWS(D)), lane); \
    }
// clang-format on

#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_decode_d32)
DECODE(32)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_decode_d48)
DECODE(48)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_decode_d64)
DECODE(64)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_decode_d80)
DECODE(80)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_decode_d96)
DECODE(96)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_decode_d128)
DECODE(128)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_decode_d192)
DECODE(192)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_decode_d256)
DECODE(256)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_decode_d448)
DECODE(448)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_decode_d512)
DECODE(512)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_decode_d1024)
DECODE(1024)
#endif

// ---- shaders/encode.h ----

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

// ---- shaders/encode.metal ----

// encode: rows of one stream into its store. Threadgroups along x, TQKV__ENCODE_ROWS(D) rows a simdgroup.

// stream_format: declared above
#define rotated rotate_center // the same function constant
// centered: declared above
// with_scale: declared above
// row_type: declared above
// paged: declared above

// clang-format off
#define ENCODE(D) \
    kernel void tqkv_encode_d##D( \
        constant tqkv__rows_args &args [[buffer(0)]], \
        device const uchar *rows [[buffer(1)]], \
        device uchar *codes [[buffer(2)]], \
        device float *norms [[buffer(3)]], \
        device atomic_uint *not_finite [[buffer(4)]], \
        device const float *center [[buffer(5)]], \
        device const int *pages [[buffer(6)]], \
        device const float *scale [[buffer(7)]], \
        threadgroup uint2 *cells [[threadgroup(0)]], \
        threadgroup float *space [[threadgroup(1)]], \
        threadgroup float *centroids [[threadgroup(2)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint thread_index [[thread_index_in_threadgroup]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        load_cells(stream_format, cells, thread_index, n_simdgroups * 32u); \
        load_codebook(stream_format, centroids, thread_index, n_simdgroups * 32u); \
        load_crossings<D>(stream_format, cells, thread_index, n_simdgroups * 32u); \
        threadgroup_barrier(mem_flags::mem_threadgroup); \
        encode_source source = {stream_format, row_type, rotated, centered, with_scale, args.has_flag != 0, rows, center, \
                                scale, space_of_simdgroup<D>(space, simdgroup), not_finite}; \
        encode_target target = {codes, norms, open_encoder<D>(stream_format, cells, centroids, lane), paged, pages}; \
        encode_rows<D>(args, source, target, group.x * n_simdgroups + simdgroup, lane); \
    }
// clang-format on

#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_d32)
ENCODE(32)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_d48)
ENCODE(48)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_d64)
ENCODE(64)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_d80)
ENCODE(80)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_d96)
ENCODE(96)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_d128)
ENCODE(128)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_d192)
ENCODE(192)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_d256)
ENCODE(256)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_d448)
ENCODE(448)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_d512)
ENCODE(512)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_d1024)
ENCODE(1024)
#endif

// ---- shaders/encode_kv.metal ----

// encode_kv: keys and values, or keys and their tail, of the same tokens in one dispatch, each with its own format and
// type. Threadgroups along x for the rows as in encode; z = 0 for keys and 1 for values.

// key_format: declared above
// value_format: declared above
#define key_rotated rotate_center // the same function constant
// value_rotated: declared above
// key_centered: declared above
// value_centered: declared above
// key_scaled: declared above
// value_scaled: declared above
// row_type: declared above
constant uint value_type [[function_constant(TQKV_FC_VALUE_TYPE)]];
// paged: declared above
constant bool value_paged [[function_constant(TQKV_FC_VALUE_PAGES)]];

// keys: [n_tokens][n_kv_heads][D], values: [n_tokens][n_kv_heads][V]. NAME: D, or D_V where V differs
// clang-format off
#define ENCODE_KV(NAME, D, V) \
    kernel void tqkv_encode_kv_d##NAME( \
        constant tqkv__rows_args &key_args [[buffer(0)]], \
        device const uchar *keys [[buffer(1)]], \
        device uchar *key_codes [[buffer(2)]], \
        device float *key_norms [[buffer(3)]], \
        constant tqkv__rows_args &value_args [[buffer(4)]], \
        device const uchar *values [[buffer(5)]], \
        device uchar *value_codes [[buffer(6)]], \
        device float *value_norms [[buffer(7)]], \
        device atomic_uint *not_finite [[buffer(8)]], \
        device const float *key_center [[buffer(9)]], \
        device const float *value_center [[buffer(10)]], \
        device const int *key_pages [[buffer(11)]], \
        device const int *value_pages [[buffer(12)]], \
        device const float *key_scale [[buffer(13)]], \
        device const float *value_scale [[buffer(14)]], \
        threadgroup uint2 *cells [[threadgroup(0)]], \
        threadgroup float *space [[threadgroup(1)]], \
        threadgroup float *centroids [[threadgroup(2)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint thread_index [[thread_index_in_threadgroup]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        uint number = group.x * n_simdgroups + simdgroup; \
        load_cells(group.z == 0 ? key_format : value_format, cells, thread_index, n_simdgroups * 32u); \
        load_codebook(group.z == 0 ? key_format : value_format, centroids, thread_index, n_simdgroups * 32u); \
        if (group.z == 0) load_crossings<D>(key_format, cells, thread_index, n_simdgroups * 32u); \
        else load_crossings<V>(value_format, cells, thread_index, n_simdgroups * 32u); \
        threadgroup_barrier(mem_flags::mem_threadgroup); \
        if (group.z == 0) { \
            encode_source source = {key_format, row_type, key_rotated, key_centered, key_scaled, key_args.has_flag != 0, keys, \
                                    key_center, key_scale, space_of_simdgroup<D>(space, simdgroup), not_finite}; \
            encode_target target = {key_codes, key_norms, open_encoder<D>(key_format, cells, centroids, lane), paged, key_pages}; \
            encode_rows<D>(key_args, source, target, number, lane); \
        } else { \
            encode_source source = {value_format, value_type, value_rotated, value_centered, value_scaled, value_args.has_flag != 0, \
                                    values, value_center, value_scale, space_of_simdgroup<V>(space, simdgroup), not_finite}; \
            encode_target target = {value_codes, value_norms, open_encoder<V>(value_format, cells, centroids, lane), value_paged, value_pages}; \
            encode_rows<V>(value_args, source, target, number, lane); \
        } \
    }
// clang-format on

#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d32)
ENCODE_KV(32, 32, 32)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d48)
ENCODE_KV(48, 48, 48)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d64)
ENCODE_KV(64, 64, 64)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d80)
ENCODE_KV(80, 80, 80)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d96)
ENCODE_KV(96, 96, 96)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d128)
ENCODE_KV(128, 128, 128)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d192)
ENCODE_KV(192, 192, 192)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d256)
ENCODE_KV(256, 256, 256)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d448)
ENCODE_KV(448, 448, 448)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d512)
ENCODE_KV(512, 512, 512)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d1024)
ENCODE_KV(1024, 1024, 1024)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d192_128)
ENCODE_KV(192_128, 192, 128)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d448_64)
ENCODE_KV(448_64, 448, 64)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_encode_kv_d512_64)
ENCODE_KV(512_64, 512, 64)
#endif

// ---- shaders/index.h ----

// What a query of an index sees.
#ifndef TQKV_INDEX_H
#define TQKV_INDEX_H

// How many keys from key 0 on query `query` sees, resident or not.
inline uint keys_seen(int seen, int rest, int ratio, int end, uint query)
{
    uint more = uint(rest) + query; // a division takes tens of instructions
    long keys = long(seen) + long(ratio == 1 ? more : more / uint(ratio));
    return keys < 0 ? 0u : keys < long(end) ? uint(keys) : uint(end);
}

inline uint blocks_seen(uint keys, uint block)
{
    return block == 1u ? keys : keys / block + (keys % block != 0u ? 1u : 0u);
}

#endif

// ---- shaders/index_choice.h ----

// The choice of blocks by their scores: exact, by digits of the scores' bits from the highest on. Each says more of the
// k-th best score. One threadgroup does it alone where a row is short. Else there are three dispatches: chunks of the
// row count the first digits of their blocks; each gathers its blocks whose digit is that of the k-th best or a better
// one; one threadgroup chooses among those.
#ifndef TQKV_INDEX_CHOICE_H
#define TQKV_INDEX_CHOICE_H

#define CHOOSE_DIGITS 3
#define CHOOSE_BLOCKS 4 // that a thread takes at a time

// What the digits so far say of the k-th best score: its upper bits, and how many with these bits are to be chosen.
struct choice {
    uint bits, wanted;
};

// What a threadgroup works on, and the place of this thread in it.
struct choose_task {
    device const float *scores; // [n_blocks], of the query
    device uint *counts;        // [n_chunks][TQKV__CHOOSE_COUNTS] of the query
    device uint *sums;          // [n_chunks][TQKV__CHOOSE_SUMS]: of as many neighbouring counts each
    device uint *header;        // gathered blocks, bits and wanted
    device uint *gathered;      // [TQKV__CHOOSE_ROOM][2]: a block and its key
    device int *list;           // [k]
    threadgroup uint *bins;     // [TQKV__CHOOSE_COUNTS]
    threadgroup uint *shared;   // [2][TQKV__CHOOSE_SUMS]
    uint chunk, seen;           // seen: blocks up to the last that the query sees some key of
    uint first, n;              // blocks of the threadgroup, or gathered ones
    scan_place at;              // its memory has room for four more numbers
};

inline uint thread_of(thread const choose_task &task) { return task.at.simdgroup * 32u + task.at.lane; }
inline uint threads_of(thread const choose_task &task) { return task.at.n_simdgroups * 32u; }

// Digits of 12, 12 and 8 bits: the lowest bit of one, and what keeps the bits above it.
inline uint digit_shift(uint digit) { return digit == 0 ? 20u : digit == 1 ? 8u : 0u; }
inline uint bits_before(uint digit) { return digit == 0 ? 0u : ~0u << digit_shift(digit - 1u); }

// A score as a number that ascends with it; 0 is never chosen. Zeros of both signs are equal.
inline uint key_of_block(constant tqkv__choose_args &args, thread const choose_task &task, uint block)
{
    uint bits = as_type<uint>(task.scores[block]);
    bool always = block < uint(args.first) || block + uint(args.newest) >= task.seen;
    if (bits == 0xff800000u || block < uint(args.from) || block >= task.seen) return 0u; // -INFINITY
    if (always) return ~0u;
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0u;
    if (bits == 0x80000000u) bits = 0u;
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

// Key of number i of the threadgroup's blocks; 0 behind the last.
inline uint key_at(constant tqkv__choose_args &args, thread const choose_task &task, uint i)
{
    if (i >= task.n) return 0u;
    return args.step == TQKV__CHOOSE_AMONG ? task.gathered[2u * i + 1u] : key_of_block(args, task, task.first + i);
}

// Counts a digit of the blocks whose upper bits are those so far. A barrier follows.
inline void count_digits(constant tqkv__choose_args &args, thread const choose_task &task, uint digit, choice made)
{
    threadgroup uint *bins = task.bins;
    threadgroup atomic_uint *counters = (threadgroup atomic_uint *)bins;
    uint n_threads = threads_of(task), mask = digit + 1u == uint(CHOOSE_DIGITS) ? 255u : 4095u;
    for (uint i = thread_of(task); i < uint(TQKV__CHOOSE_COUNTS); i += n_threads) bins[i] = 0u;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint first = thread_of(task); first < task.n; first += n_threads * uint(CHOOSE_BLOCKS)) {
        uint keys[CHOOSE_BLOCKS];
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++) keys[i] = key_at(args, task, first + uint(i) * n_threads);
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++)
            if (keys[i] != 0u && ((keys[i] ^ made.bits) & bits_before(digit)) == 0u)
                atomic_fetch_add_explicit(&counters[(keys[i] >> digit_shift(digit)) & mask], 1u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Sums of neighbouring bins, to `shared`. A barrier follows.
inline void sum_bins(thread const choose_task &task)
{
    const uint each = uint(TQKV__CHOOSE_COUNTS / TQKV__CHOOSE_SUMS);
    for (uint s = task.at.simdgroup; s < uint(TQKV__CHOOSE_SUMS); s += task.at.n_simdgroups) {
        uint sum = sum_of_lanes(task.bins[s * each + task.at.lane] + task.bins[s * each + 32u + task.at.lane]);
        if (task.at.lane == 0) task.shared[s] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A number, and the sum before it.
struct reached {
    uint number, before;
};

// The number at which a sum over the TQKV__CHOOSE_SUMS numbers from the last one on, which begins with `before`,
// reaches `wanted`; number 0 if it never does. All lanes of the simdgroup must come here together.
inline reached find_number(threadgroup const uint *numbers, uint lane, uint before, uint wanted)
{
    uint last = 63u - 2u * lane, upper = numbers[last], both = upper + numbers[last - 1u];
    uint to_lane = before + sum_to_lane(both, lane), to_upper = to_lane - both + upper;
    bool here = to_lane - both < wanted && (to_lane >= wanted || lane == 31u), in_upper = to_upper >= wanted;
    reached found;
    found.number = sum_of_lanes(here ? last - (in_upper ? 0u : 1u) : 0u);
    found.before = sum_of_lanes(here ? (in_upper ? to_lane - both : to_upper) : 0u);
    return found;
}

// What the bins say. Every thread has the result.
inline choice narrow(thread const choose_task &task, uint digit, choice made)
{
    threadgroup uint *result = task.at.shared + 32;
    sum_bins(task);
    if (task.at.simdgroup == 0) {
        reached group = find_number(task.shared, task.at.lane, 0u, made.wanted);
        reached found = find_number(task.bins + group.number * 64u, task.at.lane, group.before, made.wanted);
        if (task.at.lane == 0) {
            result[0] = group.number * 64u + found.number;
            result[1] = found.before;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    made.bits |= result[0] << digit_shift(digit);
    made.wanted -= result[1];
    threadgroup_barrier(mem_flags::mem_threadgroup); // before the bins and the result are overwritten
    return made;
}

// ---- Chunks ----

inline void count_chunk(constant tqkv__choose_args &args, thread const choose_task &task)
{
    choice made = {0u, uint(args.k)};
    count_digits(args, task, 0u, made);
    sum_bins(task);
    device uint *counts = task.counts + task.chunk * uint(TQKV__CHOOSE_COUNTS),
                *sums = task.sums + task.chunk * uint(TQKV__CHOOSE_SUMS);
    for (uint i = thread_of(task); i < uint(TQKV__CHOOSE_COUNTS); i += threads_of(task)) counts[i] = task.bins[i];
    for (uint i = thread_of(task); i < uint(TQKV__CHOOSE_SUMS); i += threads_of(task)) sums[i] = task.shared[i];
}

// TQKV__CHOOSE_SUMS numbers of each chunk, `stride` apart, added up over all chunks and over those before the
// threadgroup's:
// to `shared`. A barrier follows.
inline void sum_chunks(constant tqkv__choose_args &args, thread const choose_task &task, device const uint *numbers,
                       uint stride)
{
    threadgroup uint *shared = task.shared;
    threadgroup atomic_uint *sums = (threadgroup atomic_uint *)shared;
    uint lane = task.at.lane, n_chunks = uint(args.n_chunks), all[2], before[2];
    for (uint i = thread_of(task); i < 2u * uint(TQKV__CHOOSE_SUMS); i += threads_of(task)) shared[i] = 0u;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    TQKV_UNROLL
    for (int i = 0; i < 2; i++) all[i] = before[i] = 0u;
    for (uint first = task.at.simdgroup; first < n_chunks; first += task.at.n_simdgroups * 4u) {
        uint x[4][2];
        TQKV_UNROLL
        for (int c = 0; c < 4; c++) {
            uint chunk = first + uint(c) * task.at.n_simdgroups, row = min(chunk, n_chunks - 1u) * stride + lane;
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) x[c][i] = chunk < n_chunks ? numbers[row + uint(i) * 32u] : 0u;
        }
        TQKV_UNROLL
        for (int c = 0; c < 4; c++) {
            TQKV_UNROLL
            for (int i = 0; i < 2; i++) {
                all[i] += x[c][i];
                before[i] += first + uint(c) * task.at.n_simdgroups < task.chunk ? x[c][i] : 0u;
            }
        }
    }
    TQKV_UNROLL
    for (int i = 0; i < 2; i++) {
        atomic_fetch_add_explicit(&sums[lane + uint(i) * 32u], all[i], memory_order_relaxed);
        atomic_fetch_add_explicit(&sums[uint(TQKV__CHOOSE_SUMS) + lane + uint(i) * 32u], before[i],
                                  memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The sum of those numbers from number `first` on.
inline uint sum_from(threadgroup const uint *numbers, uint lane, uint first)
{
    return sum_of_lanes((lane >= first ? numbers[lane] : 0u) + (lane + 32u >= first ? numbers[lane + 32u] : 0u));
}

// What the chunks' counts say of the first digit. To `shared` of `at`: digit, blocks with better ones, blocks that are
// gathered by the chunks before and by all. A barrier follows.
inline void find_digit_of_chunks(constant tqkv__choose_args &args, thread const choose_task &task)
{
    threadgroup uint *result = task.at.shared + 32, *all = task.shared, *early = all + TQKV__CHOOSE_SUMS;
    reached group = {0u, 0u};
    uint gathered = 0u, before = 0u;
    for (int level = 0; level < 2; level++) {
        bool fine = level == 1;
        uint first = fine ? result[0] * uint(TQKV__CHOOSE_SUMS) : 0u;
        sum_chunks(args, task, fine ? task.counts + first : task.sums,
                   uint(fine ? TQKV__CHOOSE_COUNTS : TQKV__CHOOSE_SUMS));
        if (task.at.simdgroup == 0) {
            uint from = fine ? 0u : 1u;
            group = find_number(all, task.at.lane, group.before, uint(args.k));
            gathered += sum_from(all, task.at.lane, group.number + from);
            before += sum_from(early, task.at.lane, group.number + from);
            if (task.at.lane == 0) {
                result[0] = first + group.number;
                result[1] = group.before;
                result[2] = before;
                result[3] = gathered;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

inline void load_keys(constant tqkv__choose_args &args, thread const choose_task &task, uint first,
                      thread uint (&keys)[CHOOSE_BLOCKS])
{
    TQKV_UNROLL
    for (int i = 0; i < CHOOSE_BLOCKS; i++) keys[i] = key_at(args, task, first + uint(i));
}

// Gathers the chunk's blocks that may be chosen, ascending, where those of the chunks before end.
inline void gather_chunk(constant tqkv__choose_args &args, thread const choose_task &task)
{
    uint own = thread_of(task) * uint(CHOOSE_BLOCKS), keys[CHOOSE_BLOCKS];
    load_keys(args, task, own, keys); // under way while the digit is looked for
    find_digit_of_chunks(args, task);
    threadgroup const uint *result = task.at.shared + 32;
    uint least = max(result[0] << digit_shift(0u), 1u), to = result[2];
    if (task.chunk == 0 && thread_of(task) == 0) {
        task.header[0] = result[3];
        task.header[1] = result[0] << digit_shift(0u);
        task.header[2] = uint(args.k) - result[1];
    }
    for (uint first = own; first - own < task.n; first += threads_of(task) * uint(CHOOSE_BLOCKS)) {
        uint n = 0u;
        if (first != own) load_keys(args, task, first, keys);
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++) n += keys[i] >= least ? 1u : 0u;
        scanned place = sum_to_thread(task.at, n);
        uint at = to + place.before;
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++) {
            if (keys[i] < least) continue;
            task.gathered[2u * at] = task.first + first + uint(i);
            task.gathered[2u * at + 1u] = keys[i];
            at++;
        }
        to += place.all;
    }
}

// ---- The choice by one threadgroup ----

// Writes those blocks that are chosen, and -1 behind them.
inline void write_list(constant tqkv__choose_args &args, thread const choose_task &task, choice made)
{
    uint2 before;
    before.x = before.y = 0u;
    for (uint first = 0; first < task.n; first += threads_of(task) * uint(CHOOSE_BLOCKS)) {
        uint keys[CHOOSE_BLOCKS], counts = 0u; // better ones, and equal ones in the upper half
        uint own = first + thread_of(task) * uint(CHOOSE_BLOCKS);
        load_keys(args, task, own, keys);
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++)
            counts += keys[i] > made.bits ? 1u : keys[i] == made.bits && keys[i] != 0u ? 0x10000u : 0u;
        scanned sums = sum_to_thread(task.at, counts);
        uint better = before.x + (sums.before & 0xffffu), equal = before.y + (sums.before >> 16);
        TQKV_UNROLL
        for (int i = 0; i < CHOOSE_BLOCKS; i++) {
            bool is_equal = keys[i] == made.bits && keys[i] != 0u;
            uint to = better + min(equal, made.wanted), number = own + uint(i);
            if (keys[i] > made.bits || (is_equal && equal < made.wanted))
                task.list[to] = int(args.step == TQKV__CHOOSE_AMONG ? task.gathered[2u * number] : task.first + number);
            better += keys[i] > made.bits ? 1u : 0u;
            equal += is_equal ? 1u : 0u;
        }
        before.x += sums.all & 0xffffu;
        before.y += sums.all >> 16;
    }
    for (uint i = before.x + min(before.y, made.wanted) + thread_of(task); i < uint(args.k); i += threads_of(task))
        task.list[i] = -1;
}

inline void choose_alone(constant tqkv__choose_args &args, thread const choose_task &task, uint digit, choice made)
{
    for (; digit < uint(CHOOSE_DIGITS); digit++) {
        count_digits(args, task, digit, made);
        made = narrow(task, digit, made);
    }
    write_list(args, task, made);
}

inline void choose_blocks(constant tqkv__choose_args &args, thread choose_task &task)
{
    choice made = {0u, uint(args.k)};
    task.first = uint(args.from) + task.chunk * uint(args.chunk);
    task.n = min(uint(args.chunk), uint(args.n_blocks) - task.first);
    if (args.step == TQKV__CHOOSE_COUNT) return count_chunk(args, task);
    if (args.step == TQKV__CHOOSE_GATHER) return gather_chunk(args, task);
    if (args.step == TQKV__CHOOSE_AMONG) {
        task.n = task.header[0];
        made.bits = task.header[1];
        made.wanted = task.header[2];
    }
    choose_alone(args, task, args.step == TQKV__CHOOSE_AMONG ? 1u : 0u, made);
}

#endif

// ---- shaders/index_choice.metal ----

// index_choice: the blocks with the best scores, ascending. Threadgroups: x chunks of a row of scores, y queries.

// scores: [n_queries][n_blocks], list: [n_queries][k]
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_index_choice)
kernel void tqkv_index_choice(constant tqkv__choose_args &args [[buffer(0)]], device const float *scores [[buffer(1)]],
                              device uint *scratch [[buffer(2)]], device int *list [[buffer(3)]],
                              threadgroup uint *bins [[threadgroup(0)]], threadgroup uint *shared [[threadgroup(1)]],
                              uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    choose_task task;
    task.scores = scores + row_offset(group.y, uint(args.n_blocks));
    uint n_chunks = args.step == TQKV__CHOOSE_ALONE ? 0u : uint(args.n_chunks);
    task.counts = scratch + ulong(group.y) * TQKV__CHOOSE_SCRATCH(ulong(n_chunks), ulong(args.n_blocks - args.from));
    task.sums = task.counts + n_chunks * uint(TQKV__CHOOSE_COUNTS);
    task.header = task.sums + n_chunks * uint(TQKV__CHOOSE_SUMS);
    task.gathered = task.header + TQKV__CHOOSE_HEADER;
    task.list = list + row_offset(group.y, uint(args.k));
    task.bins = bins;
    task.chunk = group.x;
    task.seen = blocks_seen(keys_seen(args.seen, args.seen_rest, args.ratio, args.end, group.y), uint(args.block));
    task.first = task.n = 0u;
    task.at.lane = lane;
    task.at.simdgroup = simdgroup;
    task.at.n_simdgroups = n_simdgroups;
    task.shared = shared;
    task.at.shared = shared + 2 * TQKV__CHOOSE_SUMS;
    choose_blocks(args, task);
}
#endif

// ---- shaders/index_scores.h ----

// Scores of an index: the heads of a query over one key are the columns of a product of matrices, whose elements are
// weighted and added up in place. Keys are decoded as in attend_matrix.h,
// each tile 32 neighbouring keys whose slots the lanes look up.
//
// Letters: D head_dim, F matrices side by side that hold the heads of a pass.
#ifndef TQKV_INDEX_SCORES_H
#define TQKV_INDEX_SCORES_H

// What a threadgroup works on besides its attend_task: some blocks of one query, with the keys [from, to) that it sees.
struct index_task {
    device const float *weights; // [n_heads] or, without, unused
    device float *out;           // [n_blocks]
    threadgroup float *scores;   // [TQKV__INDEX_KEYS]
    uint query, first_block, end_block, from, to;
};

inline void open_index(constant tqkv__index_args &call, uint range, uint query, device const float *weights,
                       device float *out, threadgroup float *scores, thread index_task &index)
{
    uint each = uint(call.blocks_each), seen = keys_seen(call.seen, call.seen_rest, call.ratio, call.end, query);
    index.weights = weights + row_offset(query, uint(call.keys.group));
    index.out = out + row_offset(query, uint(call.n_blocks));
    index.scores = scores;
    index.query = query;
    index.first_block = range * each;
    index.end_block = min(index.first_block + each, uint(call.n_blocks));
    index.from = max(index.first_block * uint(call.block), uint(call.first_key));
    index.to = min(index.end_block * uint(call.block), seen);
}

// Memory of the key with the lane's number in a tile that begins with key `first`; of some key where there is none.
inline uint slot_of_key(constant tqkv__index_args &call, thread const attend_task &task, uint first)
{
    constant tqkv__attend_args &args = call.keys;
    uint key = min(first + task.lane - uint(call.first_key), uint(args.kv_len) - 1u);
    uint slot = uint(args.key_oldest_slot) + key;
    slot = slot < uint(args.key_capacity) ? slot : slot - uint(args.key_capacity);
    return paged ? find_row(args, task.pages, slot, slot % 32u).keys : slot;
}

// The sum over the lanes that have the same row of a matrix. Every lane gets it.
inline float sum_of_row(float x)
{
    TQKV_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2)
        if (TQKV__MATRIX_ROW(distance) == 0) x += simd_shuffle_xor(x, ushort(distance));
    return x;
}

// Heads whose queries a simdgroup loads at a time.
#define INDEX_ROWS 4

// The heads of a pass: their queries as pairs of right factors, [F][D / 16][32 lanes], their factors, shifts and
// weights. Columns that are not used are 0. A barrier must precede and follow it.
template <int D, int F>
inline void load_heads(constant tqkv__index_args &call, thread const attend_task &task, thread const index_task &index,
                       uint head, column_memory memory)
{
    const int C = TQKV_LANE_VALUES(D);
    const uint N = uint(BY_CODE_WIDTH(key_format, MATRIX_KEY_VALUES, D));
    key_part part = first_part(call.keys, task);
    uint n_used = min(uint(columns), uint(call.keys.group) - head);
    threadgroup float *queries = part.queries;
    threadgroup right_pair *pairs = (threadgroup right_pair *)queries;
    for (uint c = task.simdgroup * 32u + task.lane; c < uint(8 * F); c += task.n_simdgroups * 32u)
        memory.totals[c] = c >= n_used ? 0.0f : call.has_weights != 0 ? index.weights[head + c] : 1.0f;
    for (uint first = task.simdgroup * uint(INDEX_ROWS); first < uint(8 * F);
         first += task.n_simdgroups * uint(INDEX_ROWS)) {
        float x[INDEX_ROWS][C];
        TQKV_UNROLL
        for (int r = 0; r < INDEX_ROWS; r++)
            load_query<D>(call.keys, task, part, index.query, head + min(first + uint(r), n_used - 1u), x[r]);
        TQKV_UNROLL
        for (int r = 0; r < INDEX_ROWS; r++) {
            uint c = first + uint(r);
            float shift = part.with_center ? score_of_center<D>(call.keys, task, part, x[r]) : 0.0f;
            turn_query<D>(task, part, x[r]);
            float size = size_of_row<D>(x[r]), inverse = c < n_used ? 1.0f / size : 0.0f;
            TQKV_UNROLL
            for (int i = 0; i < C; i += 2) { // neighbours, as in query_value
                uint value = task.lane * uint(C) + uint(i), s = value / (4u * N) * (N / 2u) + value % N / 2u;
                store_right(pairs + (c / 8u * uint(D / 16) + s / 2u) * 32u, value % (4u * N) / N * 2u, c % 8u, s % 2u,
                            x[r][i] * inverse, x[r][i + 1] * inverse);
            }
            if (task.lane != 0) continue;
            memory.shifts[c] = shift * (1.0f / TQKV_LOG2E);
            memory.factors[c] = size;
        }
    }
}

// Adds the weighted scores of a pass to those of the tile's keys, in threadgroup memory.
template <int D, int F>
inline void add_heads(constant tqkv__index_args &call, thread const attend_task &task, bool first_pass,
                      thread const float (&norms)[4], column_memory memory, thread const sum_matrix (&score)[4][F],
                      threadgroup float *scores)
{
    float least = call.relu != 0 ? 0.0f : -INFINITY, sum[4], scale[4];
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        scale[p] = scale_of_norm<D>(key_format, norms[p], call.keys.key_block_scale);
        sum[p] = 0.0f;
    }
    TQKV_UNROLL
    for (int f = 0; f < F; f++) {
        TQKV_UNROLL
        for (int i = 0; i < 2; i++) {
            uint c = uint(f * 8 + i) + TQKV__MATRIX_COLUMN(task.lane);
            float factor = memory.factors[c], shift = key_centered ? memory.shifts[c] : 0.0f;
            float weight = key_centered ? memory.totals[c] : memory.totals[c] * factor;
            TQKV_UNROLL
            for (int p = 0; p < 4; p++) {
                float own = score[p][f].elements[i] * scale[p];
                if (key_centered) own = fma(own, factor, shift);
                sum[p] = fma(weight, max(own, least), sum[p]);
            }
        }
    }
    TQKV_UNROLL
    for (int p = 0; p < 4; p++) {
        float all = sum_of_row(sum[p]);
        uint row = tile_row(p, TQKV__MATRIX_ROW(task.lane));
        if (TQKV__MATRIX_COLUMN(task.lane) == 0) scores[row] = first_pass ? all : scores[row] + all;
    }
}

// Codes that a lane loads ahead: two chunks, of two tiles where a row is one chunk.
#define INDEX_CHUNKS(D, W) ((D) / (4 * MATRIX_KEY_VALUES(D, W)))
template <int D, int W>
struct ahead {
    key_chunk<D, W> chunks[2];
};
struct tile_slots {
    uint now, next, second; // of the keys of this tile, of the simdgroup's next and the one after it
};

template <int D, int W>
inline void load_ahead(constant tqkv__index_args &call, thread const attend_task &task, tile_slots slots,
                       thread ahead<D, W> &keys)
{
    const bool one = INDEX_CHUNKS(D, W) == 1;
    load_key_chunk<D, W>(call.keys, task, first_part(call.keys, task), slots.now, 0u, keys.chunks[0]);
    load_key_chunk<D, W>(call.keys, task, first_part(call.keys, task), one ? slots.next : slots.now, one ? 0u : 1u,
                         keys.chunks[1]);
}

// score = q . k of a tile without the factor of rows: at these head sizes each has one norm. `turn`: which chunk is
// first, if a row has but one.
template <int D, int W, int F>
inline void score_index_tile(constant tqkv__index_args &call, thread const attend_task &task, tile_slots slots,
                             thread const value_book &book, int turn, thread ahead<D, W> &keys,
                             thread sum_matrix (&score)[4][F])
{
    const int chunks = INDEX_CHUNKS(D, W);
    key_part part = first_part(call.keys, task);
    clear_scores<F>(score);
    TQKV_UNROLL
    for (int j = 0; j < chunks; j++) {
        int own = chunks == 1 ? turn : j % 2;
        multiply_chunk<D, W, F>(task, part, uint(j), keys.chunks[own], book, score);
        uint slot = chunks == 1 ? slots.second : j + 2 < chunks ? slots.now : slots.next;
        load_key_chunk<D, W>(call.keys, task, part, slot, uint((j + 2) % chunks), keys.chunks[own]);
    }
}

template <int D, int W, int F>
inline void score_tiles(constant tqkv__index_args &call, thread const attend_task &task, bool first_pass, uint first,
                        uint tiles, thread const value_book &book, column_memory memory, tile_slots slots,
                        thread ahead<D, W> &keys, threadgroup float *scores)
{
    const int turns = INDEX_CHUNKS(D, W) == 1 ? 2 : 1;
    uint step = task.n_simdgroups;
    for (uint round = task.simdgroup; round < tiles; round += uint(turns) * step) {
        TQKV_UNROLL
        for (int turn = 0; turn < turns; turn++) {
            uint tile = round + uint(turn) * step;
            if (tile >= tiles) continue;
            sum_matrix score[4][F];
            float norms[4];
            load_norms<D>(call.keys, task.pages, key_format, rows_apart(), task.keys, slots.now, norms);
            score_index_tile<D, W, F>(call, task, slots, book, turn, keys, score);
            add_heads<D, F>(call, task, first_pass, norms, memory, score, scores + tile * 32u);
            slots.now = slots.next;
            slots.next = slots.second;
            slots.second = slot_of_key(call, task, first + (tile + 3u * step) * 32u);
        }
    }
}

// As any_keys of attend.h.
template <int D>
struct any_ahead {
    ahead<D, 4> of_4;
    ahead<D, 8> of_8;
    ahead<D, 16> of_16;
};

template <int D>
inline void open_ahead(constant tqkv__index_args &call, thread const attend_task &task, tile_slots slots,
                       thread any_ahead<D> &keys)
{
    WITH_CODES(key_format, keys, load_ahead<D, W>(call, task, slots, codes));
}

template <int D, int F>
inline void score_any_tiles(constant tqkv__index_args &call, thread const attend_task &task, bool first_pass,
                            uint first, uint tiles, thread const value_book &book, column_memory memory,
                            tile_slots slots, thread any_ahead<D> &keys, threadgroup float *scores)
{
    WITH_CODES(key_format, keys,
               score_tiles<D, W, F>(call, task, first_pass, first, tiles, book, memory, slots, codes, scores));
}

// Scores of the n keys from key `first` on.
template <int D, int F>
inline void score_keys(constant tqkv__index_args &call, thread attend_task &task, thread const index_task &index,
                       column_memory memory, thread const value_book &book, uint first, uint n)
{
    uint n_heads = uint(call.keys.group), tiles = (n + 31u) / 32u;
    for (uint head = 0; head < n_heads; head += columns) {
        any_ahead<D> keys;
        tile_slots slots;
        slots.now = slot_of_key(call, task, first + task.simdgroup * 32u);
        slots.next = slot_of_key(call, task, first + (task.simdgroup + task.n_simdgroups) * 32u);
        slots.second = slot_of_key(call, task, first + (task.simdgroup + 2u * task.n_simdgroups) * 32u);
        open_ahead<D>(call, task, slots, keys);
        if (n_heads > columns || first == index.from) {
            threadgroup_barrier(mem_flags::mem_threadgroup); // before the queries of the last pass are overwritten
            load_heads<D, F>(call, task, index, head, memory);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        score_any_tiles<D, F>(call, task, head == 0, first, tiles, book, memory, slots, keys, index.scores);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The largest score and the sum of scores of a block.
struct pooled {
    float largest, sum;
};

inline float larger_score(float x, float y) { return y > x || y != y ? y : x; }

inline void add_score(float x, thread pooled &block)
{
    block.largest = larger_score(block.largest, x);
    block.sum += x;
}

inline void store_block(constant tqkv__index_args &call, thread const index_task &index, uint block,
                        thread const pooled &found)
{
    uint begin = block * uint(call.block), first = max(begin, index.from),
         end = min(begin + uint(call.block), index.to);
    index.out[block] = call.pool == TQKV__POOL_MEAN ? found.sum / float(end - first) : found.largest;
}

// Pools the n keys from key `first` on: small blocks a thread each, others a simdgroup each, whose lanes take turns. A
// block of more keys than TQKV__INDEX_KEYS comes in pieces, and `found` stays from one to the next.
inline void pool_keys(constant tqkv__index_args &call, thread const attend_task &task, thread const index_task &index,
                      uint first, uint n, thread pooled &found)
{
    uint size = uint(call.block), end = first + n;
    bool narrow = size <= 32u;
    uint number = narrow ? task.simdgroup * 32u + task.lane : task.simdgroup, lane = narrow ? 0u : task.lane;
    uint n_workers = narrow ? task.n_simdgroups * 32u : task.n_simdgroups, n_lanes = narrow ? 1u : 32u;
    for (uint block = index.first_block + number; block < index.end_block; block += n_workers) {
        uint begin = block * size, last = min(begin + size, end);
        if (begin >= first || first == index.from) {
            found.largest = -INFINITY;
            found.sum = 0.0f;
        }
        if (begin >= end || begin + size <= first) {
            if (lane == 0u) index.out[block] = -INFINITY;
            continue;
        }
        uint skipped = begin < first ? (first - begin + n_lanes - 1u - lane) / n_lanes : 0u;
        for (uint key = begin + lane + skipped * n_lanes; key < last; key += n_lanes)
            add_score(index.scores[key - first], found);
        if (begin + size > end && end < index.to) continue; // the next piece goes on
        pooled all = found;
        TQKV_UNROLL
        for (uint distance = 1; distance < 32; distance *= 2) {
            if (narrow) continue;
            all.largest = larger_score(all.largest, simd_shuffle_xor(all.largest, ushort(distance)));
            all.sum += simd_shuffle_xor(all.sum, ushort(distance));
        }
        if (lane == 0u) store_block(call, index, block, all);
    }
}

template <int D, int F>
inline void score_index(constant tqkv__index_args &call, thread attend_task &task, thread const index_task &index)
{
    uint thread_index = task.simdgroup * 32u + task.lane, n_threads = task.n_simdgroups * 32u;
    threadgroup float *table_memory = task.tables;
    threadgroup code_value *table = (threadgroup code_value *)table_memory;
    threadgroup uchar *pairs = (threadgroup uchar *)(table_memory + 256);
    column_memory memory = column_memory_of(task.kept, uint(8 * F));
    pooled found = {-INFINITY, 0.0f};
    if (index.from >= index.to) {
        for (uint b = index.first_block + thread_index; b < index.end_block; b += n_threads) index.out[b] = -INFINITY;
        return;
    }
    load_value_book(key_format, false, table, thread_index, n_threads);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value_book book = open_value_book(key_format, table, pairs, task.lane);
    if (has_pairs(key_format)) load_pairs(table, false, thread_index, n_threads, pairs);
    for (uint first = index.from; first < index.to; first += uint(TQKV__INDEX_KEYS)) {
        uint n = min(index.to - first, uint(TQKV__INDEX_KEYS));
        score_keys<D, F>(call, task, index, memory, book, first, n);
        pool_keys(call, task, index, first, n, found);
        threadgroup_barrier(mem_flags::mem_threadgroup); // before the scores are overwritten
    }
}

// How many heads there are chooses the code here and nowhere else.
template <int D>
inline void score_index_blocks(constant tqkv__index_args &call, thread attend_task &task,
                               thread const index_task &index)
{
    if (columns <= 8)
        score_index<D, 1>(call, task, index);
    else if (columns <= 16)
        score_index<D, 2>(call, task, index);
    else if (TQKV__INDEX_COLUMNS <= 32 || columns <= 32)
        score_index<D, 4>(call, task, index);
    else
        score_index<D, 8>(call, task, index);
}

#endif

// ---- shaders/index_scores.metal ----

// index_scores: what index_choice takes. Threadgroups: x ranges of blocks, y queries.

// q: [n_queries][n_heads][D], codes: [capacity][row_bytes], norms: [capacity], weights: [n_queries][n_heads], out:
// [n_queries][n_blocks], center, scale: [D]
// clang-format off
#define INDEX_SCORES(D) \
    kernel void tqkv_index_scores_d##D( \
        constant tqkv__index_args &call [[buffer(0)]], \
        device const uchar *q [[buffer(1)]], \
        device const uchar *codes [[buffer(2)]], \
        device const float *norms [[buffer(3)]], \
        device const float *weights [[buffer(4)]], \
        device float *out [[buffer(5)]], \
        device const float *center [[buffer(6)]], \
        device const int *pages [[buffer(7)]], \
        device const float *scale [[buffer(8)]], \
        threadgroup float *tables [[threadgroup(0)]], \
        threadgroup float *queries [[threadgroup(1)]], \
        threadgroup float *scores [[threadgroup(2)]], \
        threadgroup float *states [[threadgroup(3)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        attend_task task; \
        index_task index; \
        task.q = q; \
        task.keys.codes = codes; \
        task.keys.norms = norms; \
        task.center = center; \
        task.scale = scale; \
        task.pages.keys = pages; \
        task.pages.lane = lane; \
        task.pages.shared = task.pages.shared_values = false; \
        task.tables = tables; \
        task.queries = queries; \
        task.kept = states; \
        task.kv_head = 0u; \
        task.end_column = (group.y + 1u) * uint(call.keys.group); \
        task.lane = lane; \
        task.simdgroup = simdgroup; \
        task.n_simdgroups = n_simdgroups; \
        open_index(call, group.x, group.y, weights, out, scores, index); \
        score_index_blocks<D>(call, task, index); \
    }
// clang-format on

#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_index_scores_d64)
INDEX_SCORES(64)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_index_scores_d128)
INDEX_SCORES(128)
#endif

// ---- shaders/learn_scales.metal ----

// learn_scales: centre and scales of the channels of a KV head, learnt from its rows and, if there are any, from the
// queries that read them. The operations and their order are those of tqkv_calibrate, so the bits are the same.
// Threadgroups: x KV heads. A thread takes a channel, and perhaps more.

// row_type: declared above
#define query_type value_type // the same function constant

// The rows of one KV head, or of all heads of the queries that read it: token after token,
// within a token head after head.
struct channel_rows {
    device const uchar *rows;
    uint type, n_tokens, n_heads, token_stride, head_stride;
    ulong first; // value of the first row
    uint begin;  // the first row that counts
    bool judged; // only those that are new
    device const uchar *is_new;
    uint n; // tokens that count
};

inline channel_rows open_rows(device const uchar *rows, uint type, uint n_tokens, uint n_heads, uint token_stride,
                              uint head_stride, uint kv_head)
{
    channel_rows from;
    from.rows = rows;
    from.type = type;
    from.n_tokens = from.n = n_tokens;
    from.n_heads = n_heads;
    from.token_stride = token_stride;
    from.head_stride = head_stride;
    from.first = row_offset(kv_head * n_heads, head_stride);
    from.begin = 0;
    from.judged = false;
    from.is_new = rows; // not read before rows are judged
    return from;
}

inline float value_of_row(thread const channel_rows &from, uint row, uint channel)
{
    ulong at = from.first + row_offset(row / from.n_heads, from.token_stride) +
               row_offset(row % from.n_heads, from.head_stride) + ulong(channel);
    device const uchar *rows = from.rows;
    if (from.type == TQKV_TYPE_F32) return ((device const float *)rows)[at];
    return widened(from.type, uint(((device const ushort *)rows)[at]));
}

// Whether the values of a position, of all KV heads, differ from those of the one before by more than a quarter of
// their squared length: the sums are those of tqkv_cache_append.
inline bool is_new_position(constant tqkv__calibrate_args &args, device const ushort *values, uint position)
{
    float apart[16], length[16];
    if (position == 0u) return true;
    TQKV_UNROLL
    for (int k = 0; k < 16; k++) apart[k] = length[k] = 0.0f;
    for (uint h = 0; h < uint(args.n_kv_heads); h++) {
        device const ushort *row =
            values + row_offset(position, args.value_token_stride) + row_offset(h, args.value_head_stride);
        for (uint d = 0; d < uint(args.value_dim); d += 16u) {
            TQKV_UNROLL
            for (int k = 0; k < 16; k++) {
                float v = widened(TQKV_TYPE_F16, uint(row[d + uint(k)]));
                float x = v - widened(TQKV_TYPE_F16, uint((row - args.value_token_stride)[d + uint(k)]));
                apart[k] = apart[k] + x * x;
                length[k] = length[k] + v * v;
            }
        }
    }
    TQKV_UNROLL
    for (int n = 8; n > 0; n /= 2) {
        TQKV_UNROLL
        for (int k = 0; k < n; k++) {
            apart[k] = apart[k] + apart[k + n];
            length[k] = length[k] + length[k + n];
        }
    }
    return apart[0] > length[0] * 0.25f;
}

// Chooses the rows that a cache learns from: the new ones, or all if these are too few, which it returns. Every thread
// of the group comes here.
inline bool choose_rows(constant tqkv__calibrate_args &args, device const uchar *values, device uchar *is_new,
                        uint thread_index, uint n_threads, thread channel_rows &rows)
{
    uint n = uint(args.n_tokens), all = 0, rest = 0;
    if (args.value_dim == 0) return false;
    for (uint p = thread_index; p < n; p += n_threads)
        is_new[p] = is_new_position(args, (device const ushort *)values, p) ? uchar(1) : uchar(0);
    threadgroup_barrier(mem_flags::mem_device);
    for (uint p = 0; p < n; p++) {
        all += uint(is_new[p]);
        if (p >= uint(args.n_exact)) rest += uint(is_new[p]);
    }
    bool few = all < uint(args.least_new);
    if (few) {
        all = n;
        rest = n > uint(args.n_exact) ? n - uint(args.n_exact) : 0u;
    }
    rows.begin = rest >= uint(args.least_rest) ? uint(args.n_exact) : 0u;
    rows.n = rest >= uint(args.least_rest) ? rest : all;
    rows.judged = !few;
    rows.is_new = is_new;
    return few;
}

// The mean of a channel over the rows that count, in their order, or that of the squared distances from its centre;
// 0 without rows.
inline float mean_of_channel(thread const channel_rows &from, uint channel, bool squared, float center)
{
    const int ROWS = 8; // whose loads are under way at a time
    uint n_rows = from.n_tokens * from.n_heads;
    float sum = 0.0f, n = float(from.n) * float(from.n_heads);
    for (uint first = from.begin; first < n_rows; first += uint(ROWS)) {
        float x[ROWS];
        TQKV_UNROLL
        for (int i = 0; i < ROWS; i++) x[i] = value_of_row(from, min(first + uint(i), n_rows - 1u), channel) - center;
        TQKV_UNROLL
        for (int i = 0; i < ROWS; i++)
            if (first + uint(i) < n_rows && (!from.judged || from.is_new[first + uint(i)] != 0))
                sum = sum + (squared ? x[i] * x[i] : x[i]);
    }
    return sum / (n > 0.0f ? n : 1.0f);
}

// The largest distance of a channel's rows from its centre: of all rows, new or not.
inline float largest_of_channel(thread const channel_rows &from, uint channel, float center)
{
    float largest = 0.0f;
    for (uint row = 0; row < from.n_tokens; row++)
        largest = max(largest, fabs(value_of_row(from, row, channel) - center));
    return largest;
}

// Gives the two channels of each rotary pair the mean of theirs. values: [head_dim]. A barrier must precede and follow.
inline void share_pairs(constant tqkv__calibrate_args &args, threadgroup float *values, uint thread_index,
                        uint n_threads)
{
    uint n = uint(args.rotary_dim) / 2u;
    for (uint i = thread_index; i < n; i += n_threads) {
        uint low = args.pairs == 2 ? i : 2u * i, high = args.pairs == 2 ? i + n : 2u * i + 1u;
        values[low] = values[high] = (values[low] + values[high]) * 0.5f;
    }
}

// The smallest positive of [head_dim] values; 1 if there is none. Every thread has it.
inline float least_positive(threadgroup const float *values, uint n)
{
    float least = INFINITY;
    for (uint d = 0; d < n; d++) least = values[d] > 0.0f ? min(least, values[d]) : least;
    return least == INFINITY ? 1.0f : least;
}

// Mean squares to deviations; zeros become the smallest that is none. values: [head_dim].
// A barrier must precede and follow.
inline void find_deviations(constant tqkv__calibrate_args &args, threadgroup float *values, uint thread_index,
                            uint n_threads)
{
    uint n = uint(args.head_dim);
    if (args.pairs != 0) share_pairs(args, values, thread_index, n_threads);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = thread_index; d < n; d += n_threads) values[d] = precise::sqrt(values[d]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float least = least_positive(values, n);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = thread_index; d < n; d += n_threads) values[d] = values[d] > 0.0f ? values[d] : least;
}

// Deviations to scales: g = sqrt(s / r), divided by its root mean square. values: [2][head_dim], s and r.
// A barrier must precede.
inline void store_scales(constant tqkv__calibrate_args &args, threadgroup float *values, uint thread_index,
                         uint n_threads, bool few, device float *scale)
{
    uint n = uint(args.head_dim);
    float sum = 0.0f;
    for (uint d = thread_index; d < n; d += n_threads)
        values[d] = precise::sqrt(args.n_queries != 0 ? values[d] / values[n + d] : values[d]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = 0; d < n; d++) sum = sum + values[d] * values[d];
    float root = precise::sqrt(sum / float(n));
    for (uint d = thread_index; d < n; d += n_threads) {
        float g = values[d] / root;
        scale[d] = few ? max(0.5f, min(g, 1.5f)) : max(1.0f / 1024.0f, min(g, 1024.0f));
    }
}

// Multiplies the scales by the largest of [head_dim] factors, if that is above 1: then halves hold all rows less the
// centre, however they are rotated.
inline void enlarge_scales(threadgroup const float *factors, uint thread_index, uint n_threads, uint n,
                           device float *scale)
{
    float factor = 1.0f;
    for (uint d = 0; d < n; d++) factor = max(factor, factors[d]);
    for (uint d = thread_index; d < n; d += n_threads) scale[d] = scale[d] * factor;
}

// rows: [n_tokens][n_kv_heads][head_dim] and q: [n_queries][n_kv_heads * group][head_dim], with strides;
// center, channel_scale: [n_kv_heads][head_dim]; value_rows: halves [n_tokens][n_kv_heads][value_dim], with strides;
// is_new: [n_kv_heads][n_tokens]; values: [2][head_dim]
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_learn_scales)
kernel void tqkv_learn_scales(constant tqkv__calibrate_args &args [[buffer(0)]], device const uchar *rows [[buffer(1)]],
                              device const uchar *q [[buffer(2)]], device float *center [[buffer(3)]],
                              device float *channel_scale [[buffer(4)]], device const uchar *value_rows [[buffer(5)]],
                              device uchar *is_new [[buffer(6)]], threadgroup float *values [[threadgroup(0)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    uint n = uint(args.head_dim), n_threads = n_simdgroups * 32u, heads = uint(args.group);
    device uchar *own_new = is_new + row_offset(group.x, uint(args.n_tokens));
    channel_rows keys =
        open_rows(rows, row_type, uint(args.n_tokens), 1u, args.token_stride, args.head_stride, group.x);
    channel_rows queries =
        open_rows(q, query_type, uint(args.n_queries), heads, args.query_token_stride, args.query_head_stride, group.x);
    bool few = choose_rows(args, value_rows, own_new, thread_index, n_threads, keys);
    center += row_offset(group.x, n);
    for (uint d = thread_index; d < n; d += n_threads) {
        float mean = mean_of_channel(keys, d, false, 0.0f);
        center[d] = mean;
        values[d] = mean_of_channel(keys, d, true, mean);
        if (args.n_queries != 0) values[n + d] = mean_of_channel(queries, d, true, 0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    find_deviations(args, values, thread_index, n_threads);
    if (args.n_queries != 0) find_deviations(args, values + n, thread_index, n_threads);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    channel_scale += row_offset(group.x, n);
    store_scales(args, values, thread_index, n_threads, few, channel_scale);
    if (args.value_dim == 0) return;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = thread_index; d < n; d += n_threads)
        values[d] = largest_of_channel(keys, d, center[d]) * (1.0f / 1024.0f) / channel_scale[d];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    enlarge_scales(values, thread_index, n_threads, n, channel_scale);
}
#endif

// ---- shaders/probe.metal ----

// probe: the rotated and scaled values that encode compares with the codebook. Threadgroups along x,
// TQKV__ENCODE_ROWS(D) rows a simdgroup.

// stream_format: declared above
// rotated: declared above
// centered: declared above
// with_scale: declared above
// row_type: declared above

// clang-format off
#define PROBE(D) \
    kernel void tqkv_probe_d##D( \
        constant tqkv__rows_args &args [[buffer(0)]], \
        device const uchar *rows [[buffer(1)]], \
        device float *scaled [[buffer(2)]], \
        device atomic_uint *not_finite [[buffer(3)]], \
        device const float *center [[buffer(4)]], \
        device const float *scale [[buffer(5)]], \
        threadgroup float *space [[threadgroup(0)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        encode_source source = {stream_format, row_type, rotated, centered, with_scale, args.has_flag != 0, rows, center, \
                                scale, space_of_simdgroup<D>(space, simdgroup), not_finite}; \
        probe_rows<D>(args, source, group.x * n_simdgroups + simdgroup, lane, scaled); \
    }
// clang-format on

#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_probe_d32)
PROBE(32)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_probe_d48)
PROBE(48)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_probe_d64)
PROBE(64)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_probe_d80)
PROBE(80)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_probe_d96)
PROBE(96)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_probe_d128)
PROBE(128)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_probe_d192)
PROBE(192)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_probe_d256)
PROBE(256)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_probe_d448)
PROBE(448)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_probe_d512)
PROBE(512)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_probe_d1024)
PROBE(1024)
#endif

// ---- shaders/rotate.metal ----

// rotate: turns rows of queries or outputs into the rotated basis or back, in place. TQKV_ROWS(D) rows a simdgroup.

// unrotate: declared above

template <int D>
inline void rotate_in_place(constant tqkv__rotate_args &args, device uchar *rows, uint first_row, uint lane)
{
    float x[TQKV_LANE_VALUES(D)];
    uint n_rows = uint(args.n_rows), own = first_row + lane / uint(TQKV__ROW_LANES(D)), part = lane_of_row<D>(lane);
    if (first_row >= n_rows) return;
    ulong first = row_offset(own, D);
    TQKV_UNROLL
    for (int i = 0; i < TQKV_LANE_VALUES(D); i++) x[i] = 0.0f;
    if (own < n_rows) load_typed_row<D>(TQKV_TYPE_F32, rows, first, part, x);
    if (unrotate)
        unrotate_row<D>(x, part, signs_of_row<D>(part));
    else
        rotate_row<D>(x, part);
    if (own < n_rows) store_typed_row<D>(TQKV_TYPE_F32, x, part, rows, first);
}

// rows: [n_rows][D]
// clang-format off
#define ROTATE(D) \
    kernel void tqkv_rotate_d##D( \
        constant tqkv__rotate_args &args [[buffer(0)]], \
        device uchar *rows [[buffer(1)]], \
        uint3 group [[threadgroup_position_in_grid]], \
        uint lane [[thread_index_in_simdgroup]], \
        uint simdgroup [[simdgroup_index_in_threadgroup]], \
        uint n_simdgroups [[simdgroups_per_threadgroup]]) \
    { \
        rotate_in_place<D>(args, rows, (group.x * n_simdgroups + simdgroup) * uint(TQKV_ROWS(D)), lane); \
    }
// clang-format on

#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_rotate_d32)
ROTATE(32)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_rotate_d48)
ROTATE(48)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_rotate_d64)
ROTATE(64)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_rotate_d80)
ROTATE(80)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_rotate_d96)
ROTATE(96)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_rotate_d128)
ROTATE(128)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_rotate_d192)
ROTATE(192)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_rotate_d256)
ROTATE(256)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_rotate_d448)
ROTATE(448)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_rotate_d512)
ROTATE(512)
#endif
#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_rotate_d1024)
ROTATE(1024)
#endif

// ---- shaders/tables.metal ----

// tables: reports the shaders' codebooks, boundaries, signs, version and argument sizes. The host compares them with
// its own, and so refuses a library that was built from another version of tqkv.h. Or, in a pipeline of its own, which
// may fail, it multiplies two matrices: that tells whether their elements lie as expected. One simdgroup.

#define multiplies unrotate // the same function constant

inline float test_element(uint row, uint column, uint seed) { return float(TQKV__MATRIX_TEST(row, column, seed)); }

// The lane's elements of the product of the test's matrices.
inline void multiply_test(uint lane, thread sum_matrix &product)
{
    uint row = TQKV__MATRIX_ROW(lane), column = TQKV__MATRIX_COLUMN(lane);
    float x = test_element(row, column, 3u), y = test_element(row, column + 1u, 3u);
    float z = test_element(TQKV_RIGHT_ROW(lane, 0), TQKV_RIGHT_COLUMN(lane, 0), 5u);
    float w = test_element(TQKV_RIGHT_ROW(lane, 1), TQKV_RIGHT_COLUMN(lane, 1), 5u);
    code_value zero = code_value_of(0.0f, false);
    left_block left[1];
    right_pair right[1] = {right_of(z, w, 0.0f, 0.0f, false)};
    sum_matrix sums[2][1];
    for (int r = 0; r < 2; r++) {
        left[0].parts[0][r] = left_of_values(code_value_of(x, false), code_value_of(y, false), false);
        left[0].parts[1][r] = left_of_values(zero, zero, false);
        clear_matrix(sums[r][0]);
    }
    multiply<1, 1>(left, right, false, false, false, sums);
    product = sums[0][0];
}

// clang-format off
#define STORE_SIZE(name) report->struct_sizes[n_structs++] = uint(sizeof(tqkv__##name));
// clang-format on

#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_tqkv_tables)
kernel void tqkv_tables(device tqkv__table_report *report [[buffer(0)]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint n_simdgroups [[simdgroups_per_threadgroup]])
{
    if (multiplies) {
        if (thread_index >= 32u) return;
        sum_matrix product;
        multiply_test(thread_index, product);
        report->matrix_product[thread_index][0] = product.elements[0];
        report->matrix_product[thread_index][1] = product.elements[1];
        return;
    }
    if (thread_index == 0) {
        int n_structs = 0;
        report->table_version = TQKV_TABLE_VERSION;
        TQKV__SHARED_STRUCTS(STORE_SIZE)
    }
    if (thread_index < uint(TQKV__KERNEL_DIMS)) {
        const int head_dim = TQKV__KERNEL_DIM(int(thread_index));
        const int sizes[] = {TQKV__KERNEL_SIZES(head_dim)};
        for (int i = 0; i < TQKV__N_KERNEL_SIZES; i++) report->kernel_sizes[thread_index][i] = sizes[i];
    }
    device uchar *to = (device uchar *)&report->tables;
    constant uchar *from = (constant uchar *)&tqkv__tables;
    for (uint i = thread_index; i < uint(sizeof(tqkv__table_set)); i += n_simdgroups * 32u) to[i] = from[i];
}
#endif

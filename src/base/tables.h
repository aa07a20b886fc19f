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

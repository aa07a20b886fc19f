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

/* >>plan-numbers: numbers that plans, contexts and tests share */
/* tqkv_metal_kernel.family */
typedef enum tqkv__family {
    TQKV_METAL_TABLES,
    TQKV_METAL_ENCODE,
    TQKV_METAL_ENCODE_KV,
    TQKV_METAL_PROBE,
    TQKV_METAL_DECODE,
    TQKV_METAL_ROTATE,
    TQKV_METAL_ATTEND,
    TQKV_METAL_ATTEND_MERGE,
    TQKV_METAL_ATTEND_MATRIX,
    TQKV_METAL_INDEX_CHOICE,
    TQKV_METAL_ATTEND_LIST,
    TQKV_METAL_INDEX_SCORES,
    TQKV_METAL_CALIBRATE
} tqkv__family;

enum {
    TQKV__SIMD_WIDTH = 32,
    TQKV__ITEMS_OF_ATTEND = 12, /* index of a batch's items */
    TQKV__ITEMS_OF_MERGE = 6,
    TQKV__ITEMS_OF_LIST = 4,
    TQKV__UNUSED_BYTES = 512,        /* of the buffer in the place of arrays that a call lacks */
    TQKV__ARGUMENTS_ALIGNMENT = 256, /* of a batch's items, which kernels see as constant memory: what Macs document */
    TQKV__SECOND_ARGS = 4,           /* index of the values' arguments in encode_kv; every kernel's first are at 0 */
    TQKV__DIM_UNIT = 16              /* of a kernel's head_dim and value_dim */
};

#define TQKV__KERNEL_DIM_TEXT(x, n, size) #size ", "
#define TQKV__KERNELS_TEXT \
    "a GPU takes head_dim " TQKV__KERNELS( \
        TQKV__KERNEL_DIM_TEXT, ) "and keys of 192 with values of 128, of 448 or 512 with a tail of 64"

/* Whether there are kernels for rows of these sizes. value_dim: in calls of both streams, else head_dim; tail_dim: 0
   without a tail */
static inline bool tqkv__has_kernels(int head_dim, int value_dim, int tail_dim)
{
    const bool wide = head_dim == TQKV__WIDE_KEYS && value_dim == TQKV__NARROW_VALUES;
    return (wide || (head_dim == value_dim && TQKV__HAS_KERNELS(head_dim))) &&
           (!tail_dim || tail_dim == TQKV__TAIL_DIM(head_dim));
}

/* >>metal-host: numbers that tqkv_metal.m and the tests share with >>metal-code, visible with TQKV_SHARED */
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
#define TQKV__KERNELS_TEXT                                                                                             \
    "a GPU takes head_dim " TQKV__KERNELS(                                                                             \
        TQKV__KERNEL_DIM_TEXT, ) "and keys of 192 with values of 128, of 448 or 512 with a tail of 64"

/* >>metal-host: what tqkv_metal.m and the tests take from >>metal-code beside >>metal-plan, visible with TQKV_SHARED */
#ifdef __cplusplus
extern "C" {
#endif

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

/* The arguments of a dispatch of attend, of attend_merge, and number i of one that encodes or decodes. */
TQKV_API tqkv__attend_args tqkv__attend_args_of(const tqkv_metal_dispatch *d);
TQKV_API tqkv__merge_args tqkv__merge_args_of(const tqkv_metal_dispatch *d);
TQKV_API tqkv__rows_args tqkv__rows_args_of(const tqkv_metal_dispatch *d, int i);
/* Puts others in their place. */
TQKV_API void tqkv__replace_args(tqkv_metal_dispatch *d, const void *args);
/* Attention with all options: for each part of the context (first positions, codes, newest positions) its lists, then for each
   attend, then the merge. */
enum { TQKV__MOST_DISPATCHES = 7 };
TQKV_API tqkv_result tqkv__plan_attend_parts(const tqkv_metal_attention *a, tqkv_metal_buffer q,
                                             tqkv_metal_buffer scratch, tqkv_metal_buffer out, tqkv_metal_dispatch *d,
                                             int *n);
TQKV_API tqkv_result tqkv__plan_partial_parts(const tqkv_metal_attention *a, tqkv_metal_buffer q, int64_t first,
                                              int count, tqkv_metal_buffer scratch, tqkv_metal_buffer out,
                                              tqkv_metal_buffer max, tqkv_metal_buffer sum, tqkv_metal_dispatch *d,
                                              int *n);
TQKV_API tqkv_result tqkv__plan_batch_parts(const tqkv_metal_attention *items, int n_items, const tqkv_metal_buffer *q,
                                            tqkv_metal_buffer arguments, void *contents, tqkv_metal_buffer scratch,
                                            const tqkv_metal_buffer *out, bool matrices, tqkv_metal_dispatch *d,
                                            int *n);
/* Bytes of a batch's arguments. n_items: not negative */
TQKV_API tqkv_result tqkv__batch_arguments(const tqkv_metal_attention *items, int n_items, size_t *bytes);
/* Gives an attention positions in every part that its context can have, as far as the stores go: what is planned of it names
   all pipelines. */
TQKV_API void tqkv__take_all_parts(tqkv_attention *a, const tqkv_store *keys, const tqkv_store *values);
/* Gives a planned attend or attend_matrix this kernel and so many columns a threadgroup, at most as many as it takes. */
TQKV_API void tqkv__plan_columns(tqkv_metal_dispatch *d, bool matrix, int columns);

/* One value of a row. */
TQKV_API float tqkv__value_to_float(tqkv_type type, const void *value);
TQKV_API void tqkv__value_from_float(tqkv_type type, float x, void *value);
/* The strides of tqkv_cache_append and tqkv_cache_attend, with their defaults. */
TQKV_API tqkv_cache_layout tqkv__cache_layout_of(const tqkv_cache *c);
/* For a cache that lies at `memory`. packed: rows without gaps, whatever its layout. some: its lists and tree, or NULL.
   rows_sizes: bytes of q and output without gaps. */
TQKV_API tqkv_result tqkv__plan_cache_append(const tqkv_cache *c, tqkv_metal_buffer memory, bool packed,
                                             tqkv_metal_buffer k, tqkv_metal_buffer v, int n_tokens,
                                             tqkv_metal_buffer not_finite, tqkv_metal_dispatch *d, int *n);
TQKV_API tqkv_result tqkv__plan_cache_sizes(const tqkv_cache *c, const tqkv_metal_attention *some, int n_queries,
                                            size_t rows_sizes[2], size_t *scratch_size);
TQKV_API tqkv_result tqkv__plan_cache_attend(const tqkv_cache *c, tqkv_metal_buffer memory, bool packed,
                                             const tqkv_metal_attention *some, tqkv_metal_buffer q, int n_queries,
                                             tqkv_metal_buffer scratch, tqkv_metal_buffer out, tqkv_metal_dispatch *d,
                                             int *n);
/* The same with positions in all parts, for the pipelines. */
TQKV_API tqkv_result tqkv__plan_cache_all_parts(const tqkv_cache *c, tqkv_metal_buffer memory, int n_queries,
                                                tqkv_metal_dispatch *d, int *n);

#ifdef __cplusplus
}
#endif

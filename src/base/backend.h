/* >>backend: what a cache and the context of a GPU know of each other, visible with TQKV_SHARED. */
#ifdef __cplusplus
extern "C" {
#endif
/* What a cache uses of a context; struct tqkv_metal begins with it. */
typedef struct tqkv__backend {
    tqkv_allocator memory; /* of codes, norms and the cache itself */
    bool (*has_kernels)(int head_dim, int value_dim, int tail_dim);
    tqkv_result (*append)(tqkv_metal *m, const tqkv_cache *c, const void *k, const void *v, int n_tokens);
    tqkv_result (*attend)(tqkv_metal *m, const tqkv_cache *c, const void *q, int n_queries, void *out);
} tqkv__backend;
#ifdef __cplusplus
}
#endif

/* >>backend: what a cache and the context of a GPU know of each other, visible with TQKV_SHARED. */
#ifdef __cplusplus
extern "C" {
#endif
/* The part of a context that a cache uses; struct tqkv_metal begins with it. */
typedef struct tqkv__backend {
    tqkv_allocator memory; /* of codes, norms and the cache itself */
    tqkv_result (*append)(tqkv_metal *m, const tqkv_cache *c, const void *k, const void *v, int n_tokens);
    /* some: with the list and the tree, or NULL */
    tqkv_result (*attend)(tqkv_metal *m, const tqkv_cache *c, const tqkv_attention *some, const void *q, int n_queries,
                          void *out);
} tqkv__backend;

/* What tqkv_metal.m takes from >>common and >>cache-code; without it they are no part of an object's interface. rows_size:
   bytes of the caller's rows of so many tokens */
#ifdef TQKV_METAL
#define TQKV__FOR_HOST TQKV_API
TQKV__FOR_HOST size_t tqkv__rows_size(const tqkv_store *s, int n_tokens);
TQKV__FOR_HOST void tqkv__cache_advance(tqkv_cache *c, int n_tokens);
#else
#define TQKV__FOR_HOST static
#endif
#ifdef __cplusplus
}
#endif

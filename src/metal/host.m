/* >>host: what a context is made of */

/* Each object that the context keeps is retained once and released once. Under ARC assignments to variables do both. */
#if __has_feature(objc_arc)
#define TQKV__RETAIN(object)  (object)
#define TQKV__RELEASE(object) ((object) = nil)
#else
#define TQKV__RETAIN(object)  [(object) retain]
#define TQKV__RELEASE(object) ([(object) release], (object) = nil)
#endif

/* What the context keeps of a kernel: its pipeline or, of a kernel without constants, the library compiled from its
   source. */
typedef struct tqkv__kept {
    tqkv_metal_kernel kernel;
    id object;
    NSUInteger max_threads; /* of a pipeline */
    struct tqkv__kept *next;
} tqkv__kept;

/* A block of shared memory that the context has lent. */
typedef struct tqkv__memory {
    id<MTLBuffer> buffer;
    char *begin;
    size_t size;
    struct tqkv__memory *next;
} tqkv__memory;

struct tqkv_metal {
    tqkv__backend backend; /* first: tqkv.h finds it there */
    id<MTLDevice> device;
    id<MTLCommandQueue> queue;
    id<MTLLibrary> library; /* nil: all kernels come from the source */
    NSString *source;       /* for kernels that the library lacks or Metal refuses; nil: none */
    id<MTLBuffer> unused;   /* bound to kernel arguments that a call lacks */
    pthread_mutex_t lock;   /* of all fields below */
    bool matrices;          /* the GPU's matrices are as attend_matrix expects, and its pipelines were built so far */
    tqkv__kept *pipelines, *compiled;
    tqkv__memory *memory;
    tqkv__memory *staging; /* one of them, which waits for the next blocking call of a cache; NULL while in use */
    char error[400];
};

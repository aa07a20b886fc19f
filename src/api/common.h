/* "f16", "tq4", "tq5", "tq6", "tq8", "tq5_bytes", "tq6_bytes", "i8", "tq3", "tq2"; "default" for TQKV_FORMAT_DEFAULT,
   else "?" */
TQKV_API const char *tqkv_format_name(tqkv_format f);
/* The format of that name; TQKV_FORMAT_DEFAULT for NULL and for an unknown name. */
TQKV_API tqkv_format tqkv_format_from_name(const char *name);
/* >>result
   A call that does not return TQKV_OK has written nothing, unless its comment says otherwise. */
typedef enum tqkv_result {
    TQKV_OK = 0,
    TQKV_INVALID_ARGUMENT, /* null pointer, negative count, n_heads not a multiple of n_kv_heads, buffer too small,
                              misaligned or overlapping another ... */
    TQKV_UNSUPPORTED,      /* head_dim, format or option this build has no code for */
    TQKV_OUT_OF_RANGE,     /* a position outside the store */
    TQKV_OUT_OF_MEMORY,
    TQKV_NOT_FINITE,     /* NaN or Inf in the source */
    TQKV_CORRUPT,        /* snapshot: bad magic, version, size or checksum, or missing bytes */
    TQKV_IO,             /* the caller's read or write function failed */
    TQKV_TABLE_MISMATCH, /* metallib and header disagree */
    TQKV_METAL_ERROR     /* Metal failed; the context's error text has its message */
} tqkv_result;
/* One sentence in English, never NULL. */
TQKV_API const char *tqkv_result_string(tqkv_result r);

/* >>common
   The row of token (or position, or query) t and head h begins at value t * token + h * head. 0 stands for
   [token][head][dim] without gaps: dim for head and n_heads * dim for token. For [head][token][dim]: token = dim,
   head = n_tokens * dim; for a third of fused projections: token = 3 * n_heads * dim. Rows that are read may share
   values, rows that are written may not. Between the rows of an output another output of the same strides may lie;
   checks of overlaps count all other memory there as written, though calls leave it alone. On a GPU below 2^32. */
typedef struct tqkv_strides {
    size_t token, head;
} tqkv_strides;

/* Channels of the rotary embedding that share a scale. A shared scale commutes with the rotation of positions, so an
   engine may fold it into its projections, and may shift contexts. If the embedding turns a part of each head, that
   part is rotary_dim; later channels have scales of their own. */
typedef enum tqkv_pairs {
    TQKV_PAIRS_NONE = 0,
    TQKV_PAIRS_NEIGHBOURS, /* channels 2i and 2i + 1 */
    TQKV_PAIRS_HALVES      /* channels i and i + rotary_dim / 2 */
} tqkv_pairs;

/* Memory for caches and scratch. All zero: malloc and free. alloc returns NULL or memory aligned like malloc's; free
   receives the size that alloc received. */
typedef struct tqkv_allocator {
    void *(*alloc)(void *user, size_t size);
    void (*free)(void *user, void *pointer, size_t size);
    void *user;
} tqkv_allocator;

/* Threads. `run` calls task(context, i) once for each i in [0, count), in any order, on any threads, and returns after
   all tasks have ended. All zero: the calling thread alone. `run` must allow calls from several threads that share a
   cache or a store, and, in a pool whose other tasks call tqkv, calls inside a task. tqkv never calls `run` from its
   own tasks. Neither `run` nor a task may throw or longjmp through tqkv: the call's scratch would leak, and its tasks
   might go on. */
typedef void (*tqkv_task)(void *context, int index);
typedef struct tqkv_parallel {
    void (*run)(void *user, int count, tqkv_task task, void *context);
    void *user;
} tqkv_parallel;

/* >>metal
   The same calls on Apple's GPUs. Compile tqkv_metal.m, in place of the file with TQKV_IMPLEMENTATION, and link with
   -framework Metal -framework Foundation. The interface is plain C: a Metal object has its own type in Objective-C, and
   is a void * elsewhere. Needs a GPU of family Apple7 (M1, A14) or later.

   Every call is a plan (>>metal-plan), which tqkv_metal_record writes into the caller's
   id<MTLComputeCommandEncoder>. That neither commits, waits nor allocates; only the first plan of a kind builds its
   pipelines (tqkv_metal_prepare). A failed call has recorded nothing.
   In a concurrent encoder each call orders its own dispatches. The caller adds barriers between two calls if one reads
   or overwrites what the other writes (stores, sources, outputs, scratch, flags). Untracked resources need fences.

   Threads. Many threads may use one context at once, each with its own encoder.

   Sizes. head_dim 32, 48, 64, 80, 96, 128, 192, 256, 448, 512 or 1024, keys of 192 with values of 128, and a tail of 64
   for keys of 448 or 512; others are TQKV_UNSUPPORTED. */
#ifdef TQKV_STATIC
#define TQKV_METAL_API extern /* defined in their own file */
#else
#define TQKV_METAL_API TQKV_API
#endif

#if defined(__OBJC__) && !defined(__swift__)
typedef __unsafe_unretained id tqkv_metal_object; /* not retained: the caller keeps it alive during a call */
#else
typedef void *tqkv_metal_object; /* in Swift, too, which would take any value for an id and pass a box around it */
#endif

typedef struct tqkv_metal_desc {
    tqkv_metal_object device; /* id<MTLDevice>; NULL = the system's default. Retained. */
    /* The compiled shaders, in one of these forms. All zero: the one embedded in tqkv_metal.m (TQKV_METALLIB_EMBED),
       else library_source, else TQKV_INVALID_ARGUMENT. No folder is searched. */
    const char *library_path;  /* of default.metallib, UTF-8 */
    const void *library_bytes; /* its content; copied */
    size_t library_size;
    tqkv_metal_object library; /* id<MTLLibrary> of that device. Retained. */
    /* The content of metallib/tqkv.metal, UTF-8, or NULL; copied. The system compiles from it, each on its first use,
       the kernels that it refuses from the library, or all if there is no library or it is refused. */
    const char *library_source;
    char *error; /* [error_size] or NULL: on failure the reason, in Metal's words if it has any */
    size_t error_size;
} tqkv_metal_desc;

/* Runs one small kernel and waits for it. TQKV_UNSUPPORTED: no Metal device, or one without family Apple7 or
   simdgroups of 32. TQKV_TABLE_MISMATCH: the library is of another version; the text names the table. *out is NULL on
   failure. Texts beside TQKV_OK: "library refused: ...; compiled from source", now or at a kernel's first use, and
   "...; attention without matrices", if Metal refuses only the kernels that multiply them. */
TQKV_METAL_API tqkv_result tqkv_metal_create(const tqkv_metal_desc *desc, tqkv_metal **out);
/* Call it after all calls have returned, recorded work has completed, and the context's caches and memory are gone. */
TQKV_METAL_API void tqkv_metal_destroy(tqkv_metal *m); /* NULL is fine */
/* The text of the context's last failure in any thread, or of its creation; "" if there is none. */
TQKV_METAL_API void tqkv_metal_error(tqkv_metal *m, char *text, size_t size);

/* Whether the GPU computes what the processor does, for such caches: of desc all but the capacity and ring count.
   Codes, norms and decoded rows must have the processor's bits, attention and an index its values, but for what
   integers change. Each version of the system has its own compiler of shaders: call it once after an update.
   TQKV_METAL_ERROR: something differs; the text says what, and by how much. */
TQKV_METAL_API tqkv_result tqkv_metal_self_test(tqkv_metal *m, const tqkv_cache_desc *desc);

/* The bytes of a buffer from an offset on. Offsets of codes are multiples of 16, others of 4, of halves and bfloat16s
   of 2. */
typedef struct tqkv_metal_buffer {
    tqkv_metal_object buffer; /* id<MTLBuffer> */
    size_t offset;
} tqkv_metal_buffer;

/* A tqkv_store in buffers. The pointers and sizes in shape are not read, but for pages. norms may be zero for F16. */
typedef struct tqkv_metal_store {
    tqkv_store shape;
    tqkv_metal_buffer codes, norms;
    tqkv_metal_buffer center;        /* as tqkv_store's; zero = none. Its values are not checked. */
    tqkv_metal_buffer channel_scale; /* the same */
    /* int32_t [shape.n_pages]; zero = not paged. Kernels read it when they run. shape.pages, if it is not NULL, is what
       it will hold then: a bad entry is refused, as on the processor. Without it a bad entry leaves its tokens out in
       encoding, and elsewhere stands for another page. Attention takes keys and values both with pages or without. */
    tqkv_metal_buffer pages;
} tqkv_metal_store;

/* The stores of a tqkv_ends. */
typedef struct tqkv_metal_ends {
    const tqkv_metal_store *keys, *values, *tail;
} tqkv_metal_ends;

/* tqkv_attention with buffers. NaN and Inf in q or sinks are not detected; they spread. */
typedef struct tqkv_metal_attention {
    tqkv_attention attention; /* its keys, values, tail, sinks, parallel and allocator are not read */
    const tqkv_metal_store *keys, *values;
    tqkv_metal_buffer sinks; /* float [n_heads]; zero = none */
    /* uint64_t [n_queries], at most 64; zero = none. attention.tree, if it is not NULL, is what it will hold when the
       kernels run. It is read only to know which entries of pages are seen. */
    tqkv_metal_buffer tree;
    /* Groups of at least so many query heads multiply 8x8 matrices, at head_dim 64, 128, 256, 448 and 512; 0 = 8. It
       decides bits: keep it the same for a sequence. */
    int matrix_group;
    const tqkv_metal_store *tail; /* as tqkv_attention's; NULL = none. With the keys' page table in the same buffer. */
    /* attention.list.rows in a buffer; zero = none. Kernels read it when they run; attention.list.rows, if it
       is not NULL, is what it will hold then. Without that what follows the first -1 of a row, and a bad entry
       (negative, or not larger than all before it) is left out. A list of all blocks gives the bits that there are
       without, but not in a ring that has wrapped. */
    tqkv_metal_buffer list;
    /* Their counts are those of attention.first and attention.last. Without pages and, where keys have a tail, not
       beside codes in pages. */
    tqkv_metal_ends first, last;
} tqkv_metal_attention;

/* tqkv_index with buffers. NaN and Inf in q, weights or scores are not detected. */
typedef struct tqkv_metal_index {
    tqkv_index index; /* its keys, weights, parallel and allocator are not read */
    const tqkv_metal_store *keys;
    tqkv_metal_buffer weights; /* float [n_queries][n_heads]; zero = 1 */
} tqkv_metal_index;

/* For programs without an encoder: calls record(user, encoder), commits to the context's queue and waits. If record
   fails, nothing runs and its result is returned. */
typedef tqkv_result (*tqkv_metal_work)(void *user, tqkv_metal_object encoder);
TQKV_METAL_API tqkv_result tqkv_metal_run(tqkv_metal *m, tqkv_metal_work record, void *user);
/* Memory shared by processor and GPU: buffers of storage mode shared, addressed by their contents. */
TQKV_METAL_API tqkv_allocator tqkv_metal_allocator(tqkv_metal *m);
/* The buffer behind a pointer into such memory; TQKV_INVALID_ARGUMENT for any other. */
TQKV_METAL_API tqkv_result tqkv_metal_find(tqkv_metal *m, const void *pointer, tqkv_metal_buffer *out);

/* A cache whose desc has `metal` lies in shared memory. tqkv_cache_append and tqkv_cache_attend run on the GPU and
   wait; all other calls, and attention to a tqkv_cache_view, run on the processor. Those that read or move codes
   (remove, keep, fork, save) need recorded appends to have completed, and remove and keep all work. After
   TQKV_METAL_ERROR an append has not happened, but a ring may have lost its oldest positions.
   The two calls below record tqkv_metal_plan_cache_append and _attend of such a cache, for programs with an encoder of
   their own. An append counts at once, and attention can be recorded after it; the processor sees its codes, and what a
   cache learns, after the buffer has completed. not_finite is raised by rows that tqkv_cache_append refuses, too: then,
   and if the buffer fails, tqkv_metal_cache_failed takes the append back. */
TQKV_METAL_API tqkv_result tqkv_metal_cache_append(tqkv_metal *m, tqkv_metal_object encoder, tqkv_cache *c,
                                                   tqkv_metal_buffer k, tqkv_metal_buffer v, int n_tokens,
                                                   tqkv_metal_buffer not_finite);
TQKV_METAL_API tqkv_result tqkv_metal_cache_attend(tqkv_metal *m, tqkv_metal_object encoder, const tqkv_cache *c,
                                                   tqkv_metal_buffer q, int n_queries, tqkv_metal_buffer scratch,
                                                   tqkv_metal_buffer out);

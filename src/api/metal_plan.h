/* >>metal-plan
   The same calls for engines that encode their own dispatches: Metal 4, MLX, ggml-metal. tqkv_metal_plan_X says what
   tqkv_metal_X records. It needs TQKV_METAL beside TQKV_IMPLEMENTATION, but neither tqkv_metal.m nor Metal: buffers are
   only compared, so `buffer` may be any pointer that stands for one.
   For each dispatch of a plan, unless launch.threadgroups[0] is 0: take the pipeline of `kernel`, give it arguments and
   bindings, wait for the dispatch before if there is a barrier, and run what tqkv_metal_plan_launch says. docs/metal.md
   has the steps for Metal, examples/metal_plan.cpp is such an engine. */
enum {
    TQKV_METAL_NAME = 48,       /* bytes of a kernel's name, with the zero */
    TQKV_METAL_TEXT = 256,      /* of tqkv_metal_kernel_text */
    TQKV_METAL_CONSTANTS = 40,  /* function constants have indices below */
    TQKV_METAL_ARGUMENTS = 256, /* most bytes of an argument struct */
    TQKV_METAL_BINDINGS = 28,
    TQKV_METAL_MEMORIES = 4,
    TQKV_METAL_DISPATCHES = 13,  /* most of a plan */
    TQKV_METAL_ONLY_CHECKED = -1 /* in place of a binding's index */
};

typedef enum tqkv_metal_family {
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
} tqkv_metal_family;

/* Identifies a pipeline. Only bytes, without padding: a program keeps its pipelines by them and compares with
   memcmp. */
typedef struct tqkv_metal_kernel {
    uint8_t family, head_dim, value_dim; /* in units of 16, 0 = none; value_dim: if it differs */
    uint8_t constants[TQKV_METAL_CONSTANTS];
} tqkv_metal_kernel;

/* The name of its function in the library. */
TQKV_API void tqkv_metal_kernel_name(const tqkv_metal_kernel *kernel, char name[TQKV_METAL_NAME]);
/* The same and its constants, "x" for one that is not set: a name of the pipeline, for engines that keep them by
   strings. */
TQKV_API void tqkv_metal_kernel_text(const tqkv_metal_kernel *kernel, char text[TQKV_METAL_TEXT]);
/* The most threads of a threadgroup that plans give it, a multiple of 32: maxTotalThreadsPerThreadgroup of its
   pipeline's descriptor. Otherwise compilers plan for 1024, with fewer registers for each. */
TQKV_API int tqkv_metal_kernel_threads(const tqkv_metal_kernel *kernel);
typedef enum tqkv_metal_constant { TQKV_METAL_UNSET, TQKV_METAL_BOOL, TQKV_METAL_UINT } tqkv_metal_constant;
/* The type of function constant `index` and, unless it is not set, its value: 0 or 1 of a bool. */
TQKV_API tqkv_metal_constant tqkv_metal_kernel_constant(const tqkv_metal_kernel *kernel, int index, uint32_t *value);

/* A struct in constant memory: Metal's setBytes, or a copy in a buffer at a multiple of 256. */
typedef struct tqkv_metal_arguments {
    int index;
    size_t size;
    unsigned char bytes[TQKV_METAL_ARGUMENTS];
} tqkv_metal_arguments;

/* Bytes [at.offset, at.offset + size) of at.buffer, for buffer argument `index`, or TQKV_METAL_ONLY_CHECKED: another
   dispatch of the call takes them. size 0: the call has no such array; any buffer of 512 bytes goes there, not read or
   written. The caller checks that the buffer is long enough, and that the offset is a multiple of alignment. */
typedef struct tqkv_metal_binding {
    const char *name; /* for error texts */
    int index;
    tqkv_metal_buffer at;
    size_t size, alignment;
    bool written;
} tqkv_metal_binding;

typedef struct tqkv_metal_dispatch {
    tqkv_metal_kernel kernel;
    int n_arguments, n_bindings;
    tqkv_metal_arguments arguments[2];
    tqkv_metal_binding bindings[TQKV_METAL_BINDINGS];
    tqkv_metal_object barrier; /* a buffer that the dispatch before writes and this one reads, or NULL */
    /* Of a threadgroup and of each of its simdgroups, in bytes; sizes: tqkv_metal_plan_launch reads these. */
    size_t memory[TQKV_METAL_MEMORIES], memory_each[TQKV_METAL_MEMORIES];
    size_t grid[3];
    bool rows;        /* grid[0] counts simdgroups, each for one or several rows, else threadgroups */
    int n_simdgroups; /* of a threadgroup, or as many as the pipeline allows */
} tqkv_metal_dispatch;

/* The dispatches of a call, which run one after another. */
typedef struct tqkv_metal_plan {
    const char *call;   /* its name, for error texts */
    tqkv_result result; /* of the function that made the plan. After a failure there are no dispatches. */
    int n;
    tqkv_metal_dispatch d[TQKV_METAL_DISPATCHES];
} tqkv_metal_plan;

/* Records a plan as tqkv_metal_X does it: checked, with pipelines and barriers. If the plan was refused, says so. Where
   the context multiplies no matrices: tqkv_metal_plan_lanes. */
TQKV_METAL_API tqkv_result tqkv_metal_record(tqkv_metal *m, tqkv_metal_object encoder, tqkv_metal_plan *plan);

/* What a pipeline runs. max_threads: the most that it allows a threadgroup, at least 32 */
typedef struct tqkv_metal_launch {
    size_t threadgroups[3];             /* nothing to do if the first is 0 */
    size_t threads;                     /* of a threadgroup: simdgroups of 32, in a row */
    size_t memory[TQKV_METAL_MEMORIES]; /* bytes at each index of threadgroup memory; 16 where the kernel takes none */
} tqkv_metal_launch;
TQKV_API tqkv_result tqkv_metal_plan_launch(const tqkv_metal_dispatch *d, size_t max_threads, tqkv_metal_launch *out);
/* A binding before binding i that overlaps it while one of the two is written, or NULL. Such a call must not run. */
TQKV_API const tqkv_metal_binding *tqkv_metal_overlapping(const tqkv_metal_dispatch *d, int i);

/* Once a library: whether it was built from this header. Both dispatches write `report`, of so many bytes, zero before.
   The first holds the tables, the second the product of two matrices, which a system may refuse. */
TQKV_API size_t tqkv_metal_report_size(void);
TQKV_API tqkv_result tqkv_metal_plan_tables(tqkv_metal_buffer report, tqkv_metal_plan *plan);
/* The first difference between the library's tables and sizes and this header's; NULL if there is none. */
TQKV_API const char *tqkv_metal_stale_table(const void *report);
/* Whether the GPU's matrices lie as attend_matrix needs them. If not, or if the system refuses that kernel:
   tqkv_metal_plan_lanes. */
TQKV_API bool tqkv_metal_has_matrices(const void *report);
/* Puts attend in the place of attend_matrix; buffers and arguments stay. False for a batch, which has to be planned
   without matrices. */
TQKV_API bool tqkv_metal_plan_lanes(tqkv_metal_plan *plan);

/* Shapes, units and results are those of tqkv_metal_X. */
TQKV_API tqkv_result tqkv_metal_plan_encode(const tqkv_metal_store *s, tqkv_metal_buffer src, int n_tokens,
                                            int64_t position, tqkv_metal_buffer not_finite, tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_encode_kv(const tqkv_metal_store *keys, const tqkv_metal_store *values,
                                               tqkv_metal_buffer k, tqkv_metal_buffer v, int n_tokens, int64_t position,
                                               tqkv_metal_buffer not_finite, tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_encode_slots(const tqkv_metal_store *s, tqkv_metal_buffer src, int n_tokens,
                                                  tqkv_metal_buffer slots, const int32_t *known,
                                                  tqkv_metal_buffer not_finite, tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_encode_kv_slots(const tqkv_metal_store *keys, const tqkv_metal_store *values,
                                                     tqkv_metal_buffer k, tqkv_metal_buffer v, int n_tokens,
                                                     tqkv_metal_buffer slots, const int32_t *known,
                                                     tqkv_metal_buffer not_finite, tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_probe(const tqkv_metal_store *store, tqkv_metal_buffer src, int n_tokens,
                                           tqkv_metal_buffer scaled, tqkv_metal_buffer not_finite,
                                           tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_decode(const tqkv_metal_store *s, int64_t position, int n_positions,
                                            tqkv_basis basis, tqkv_metal_buffer dst, tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_rotate(tqkv_metal_buffer rows, int n_rows, int head_dim, bool unrotate,
                                            tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_calibrate(const tqkv_metal_store *shape, tqkv_metal_buffer src, int n_tokens,
                                               tqkv_metal_buffer q, int n_heads, int n_queries, tqkv_pairs pairs,
                                               tqkv_metal_buffer center, tqkv_metal_buffer channel_scale,
                                               tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_attend_scratch(const tqkv_metal_attention *a, size_t *bytes);
TQKV_API tqkv_result tqkv_metal_plan_attend(const tqkv_metal_attention *a, tqkv_metal_buffer q,
                                            tqkv_metal_buffer scratch, tqkv_metal_buffer out, tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_attend_partial(const tqkv_metal_attention *a, tqkv_metal_buffer q, int64_t first,
                                                    int count, tqkv_metal_buffer scratch, tqkv_metal_buffer out,
                                                    tqkv_metal_buffer max, tqkv_metal_buffer sum,
                                                    tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_attend_merge(const tqkv_metal_attention *a, tqkv_metal_buffer out,
                                                  tqkv_metal_buffer max, tqkv_metal_buffer sum,
                                                  const tqkv_metal_attention *src, tqkv_metal_buffer src_out,
                                                  tqkv_metal_buffer src_max, tqkv_metal_buffer src_sum,
                                                  tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_attend_finish(const tqkv_metal_attention *a, tqkv_metal_buffer src_out,
                                                   tqkv_metal_buffer src_max, tqkv_metal_buffer src_sum,
                                                   tqkv_metal_buffer out, tqkv_metal_plan *plan);
/* Either size may be NULL. */
TQKV_API tqkv_result tqkv_metal_plan_attend_batch_sizes(const tqkv_metal_attention *items, int n_items,
                                                        size_t *arguments, size_t *scratch);
/* contents: where the processor writes the bytes of arguments. matrices: whether attend_matrix may be used */
TQKV_API tqkv_result tqkv_metal_plan_attend_batch(const tqkv_metal_attention *items, int n_items,
                                                  const tqkv_metal_buffer *q, tqkv_metal_buffer arguments,
                                                  void *contents, tqkv_metal_buffer scratch,
                                                  const tqkv_metal_buffer *out, bool matrices, tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_index_scores(const tqkv_metal_index *x, tqkv_metal_buffer q,
                                                  tqkv_metal_buffer scores, tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_index_choose_scratch(const tqkv_metal_index *x, size_t *bytes);
TQKV_API tqkv_result tqkv_metal_plan_index_choose(const tqkv_metal_index *x, tqkv_metal_buffer scores, int k,
                                                  tqkv_metal_buffer scratch, tqkv_metal_buffer list,
                                                  tqkv_metal_plan *plan);

/* Of a cache at the beginning of `memory`. layout: strides of the rows, or NULL: those of the cache. some: as
   tqkv_metal_cache_attend_some's, or NULL. An append counts when tqkv_metal_cache_appended is called. */
TQKV_API tqkv_result tqkv_metal_plan_cache_append(const tqkv_cache *c, tqkv_metal_buffer memory,
                                                  const tqkv_cache_strides *layout, tqkv_metal_buffer k,
                                                  tqkv_metal_buffer v, int n_tokens, tqkv_metal_buffer not_finite,
                                                  tqkv_metal_plan *plan);
TQKV_API void tqkv_metal_cache_appended(tqkv_cache *c, int n_tokens);
/* For appends that did not run, because a command buffer failed: as tqkv_cache_truncate, and if one of them was to
   learn centre and scale (calibrate), the cache learns again. Before any other edit, and when nothing is under way. */
TQKV_API tqkv_result tqkv_metal_cache_failed(tqkv_cache *c, int64_t end);
TQKV_API tqkv_result tqkv_metal_plan_cache_scratch(const tqkv_cache *c, const tqkv_metal_attention *some, int n_queries,
                                                   size_t *bytes);
TQKV_API tqkv_result tqkv_metal_plan_cache_attend(const tqkv_cache *c, tqkv_metal_buffer memory,
                                                  const tqkv_cache_strides *layout, const tqkv_metal_attention *some,
                                                  tqkv_metal_buffer q, int n_queries, tqkv_metal_buffer scratch,
                                                  tqkv_metal_buffer out, tqkv_metal_plan *plan);

/* Plans whose kernels are all that such calls will need: as tqkv_metal_prepare, tqkv_metal_index_prepare and
   tqkv_metal_cache_prepare. `visit` sees each plan, and must build its pipelines and not run it; its failure ends the
   call. */
typedef tqkv_result (*tqkv_metal_visit)(void *user, tqkv_metal_plan *plan);
TQKV_API tqkv_result tqkv_metal_plan_prepare(const tqkv_metal_attention *a, int max_queries, int also,
                                             tqkv_metal_visit visit, void *user);
TQKV_API tqkv_result tqkv_metal_plan_index_prepare(const tqkv_metal_index *x, int max_queries, tqkv_metal_visit visit,
                                                   void *user);
TQKV_API tqkv_result tqkv_metal_plan_cache_prepare(const tqkv_cache *c, tqkv_metal_buffer memory, int max_queries,
                                                   tqkv_metal_visit visit, void *user);

/* >>metal-plan
   What a call dispatches: tqkv_metal_plan_X does on a GPU what tqkv_X does on the processor. tqkv_metal_record runs a
   plan through a context. An engine that encodes its own dispatches (Metal 4, MLX, ggml-metal) needs no context and no
   Metal: buffers are only compared, so `buffer` may be any pointer that stands for one. For each dispatch, unless
   launch.threadgroups[0] is 0, it takes the pipeline of `kernel`, gives it arguments and bindings, waits for the
   dispatch before if there is a barrier, and runs what tqkv_metal_plan_launch says. docs/metal.md has the steps for
   Metal, examples/metal_plan.cpp is such an engine. */
enum {
    TQKV_METAL_NAME = 48,       /* bytes of a kernel's name, with the zero */
    TQKV_METAL_CONSTANTS = 40,  /* function constants have indices below */
    TQKV_METAL_ARGUMENTS = 256, /* most bytes of an argument struct */
    TQKV_METAL_BINDINGS = 28,
    TQKV_METAL_MEMORIES = 4,
    TQKV_METAL_DISPATCHES = 13,  /* most of a plan */
    TQKV_METAL_REPORT = 4736,    /* bytes of tqkv_metal_plan_tables's report */
    TQKV_METAL_ONLY_CHECKED = -1 /* in place of a binding's index */
};

/* Identifies a pipeline. Only bytes, without padding: a program keeps its pipelines by them and compares with
   memcmp. */
typedef struct tqkv_metal_kernel {
    uint8_t family, head_dim, value_dim; /* in units of 16, 0 = none; value_dim: if it differs */
    /* The most simdgroups of a threadgroup: 32 times as many is maxTotalThreadsPerThreadgroup of its pipeline's
       descriptor. Otherwise compilers plan for 1024 threads, with fewer registers for each. */
    uint8_t most_simdgroups;
    uint8_t constants[TQKV_METAL_CONSTANTS]; /* the value of each function constant and 1; 0: it is not set */
    char name[TQKV_METAL_NAME];              /* of its function in the library, filled up with zeros */
} tqkv_metal_kernel;
/* Whether function constant `index` is a uint, not a bool. */
#define TQKV_METAL_IS_UINT(index) ((0x40040c043u >> (index)&1) != 0)

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
    /* Of a call that takes scratch, planned with none (NULL): the bytes that it needs at most, wherever the context
       then stands (`end` and kv_len may be 0). Of a batch that is planned without contents: those of its arguments,
       too. */
    size_t scratch_size, arguments_size;
    int n;
    tqkv_metal_dispatch d[TQKV_METAL_DISPATCHES];
} tqkv_metal_plan;

/* Writes a plan into an encoder: checked, with pipelines and barriers. A plan that was refused is refused again, with a
   text. Where the context multiplies no matrices it takes tqkv_metal_plan_lanes. */
TQKV_METAL_API tqkv_result tqkv_metal_record(tqkv_metal *m, tqkv_metal_object encoder, tqkv_metal_plan *plan);
/* Builds the pipelines of a plan now, which its first recording would do, each in up to a second; any thread may, while
   others record. Of buffers only those count that say what there is, as centres and the memory of a cache. Pipelines
   depend on the number of queries (1, and each power of two), on whether the context is short or long, and on what
   there is of halves, lists, trees, pages, sinks and centres: plan those that will come. For a cache plan an append and
   attention of another one of the same desc, whose appends tqkv_metal_cache_appended counts, though none has run. */
TQKV_METAL_API tqkv_result tqkv_metal_prepare(tqkv_metal *m, tqkv_metal_plan *plan);

/* What a pipeline runs. max_threads: the most that it allows a threadgroup, at least 32 */
typedef struct tqkv_metal_launch {
    size_t threadgroups[3];             /* nothing to do if the first is 0 */
    size_t threads;                     /* of a threadgroup: simdgroups of 32, in a row */
    size_t memory[TQKV_METAL_MEMORIES]; /* bytes at each index of threadgroup memory; 16 where the kernel takes none */
} tqkv_metal_launch;
TQKV_METAL_API tqkv_result tqkv_metal_plan_launch(const tqkv_metal_dispatch *d, size_t max_threads,
                                                  tqkv_metal_launch *out);
/* A binding before binding i that overlaps it while one of the two is written, or NULL. Such a call must not run. */
TQKV_METAL_API const tqkv_metal_binding *tqkv_metal_overlapping(const tqkv_metal_dispatch *d, int i);

/* Once a library: whether it was built from this header. Both dispatches write `report`, zero before. The first holds
   the tables, the second the product of two matrices, which a system may refuse. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_tables(tqkv_metal_buffer report, tqkv_metal_plan *plan);
/* The first difference between the library's tables and sizes and this header's; NULL if there is none. */
TQKV_METAL_API const char *tqkv_metal_stale_table(const void *report);
/* Whether the GPU's matrices lie as attend_matrix needs them. If not, or if the system refuses that kernel:
   tqkv_metal_plan_lanes. */
TQKV_METAL_API bool tqkv_metal_has_matrices(const void *report);
/* Puts attend in the place of attend_matrix; buffers and arguments stay. False for a batch, which has to be planned
   with a matrix_group of INT_MAX. */
TQKV_METAL_API bool tqkv_metal_plan_lanes(tqkv_metal_plan *plan);

/* As tqkv_encode, of keys and values, or of keys and their tail, in one dispatch; stores of the same n_kv_heads.
   values: NULL for one stream. A source row with NaN or Inf is stored as zeros and sets not_finite, a uint32_t cleared
   by the caller, to 1. not_finite may be zero. To slots: stores with pages of one position, from position 0 on. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_encode(const tqkv_metal_store *keys, const tqkv_metal_store *values,
                                                  tqkv_metal_buffer k, tqkv_metal_buffer v, int n_tokens,
                                                  int64_t position, tqkv_metal_buffer not_finite,
                                                  tqkv_metal_plan *plan);
/* As tqkv_probe, to see how well rows fit the codebook: codes and norms of s may be zero. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_probe(const tqkv_metal_store *s, tqkv_metal_buffer src, int n_tokens,
                                                 tqkv_metal_buffer scaled, tqkv_metal_buffer not_finite,
                                                 tqkv_metal_plan *plan);
/* As tqkv_decode, for an engine that needs rows again. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_decode(const tqkv_metal_store *s, int64_t position, int n_positions,
                                                  tqkv_basis basis, tqkv_metal_buffer dst, tqkv_metal_plan *plan);
/* As tqkv_rotate, for queries and outputs in the basis of the codes. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_rotate(tqkv_metal_buffer rows, int n_rows, int head_dim, tqkv_basis to,
                                                  tqkv_metal_plan *plan);
/* As tqkv_calibrate, to the same bits, for stores that are not a cache's; but both results are written, and NaN,
   infinity and large magnitudes are not detected. q: zero for none. Of shape no buffer is read. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_calibrate(const tqkv_metal_store *shape, tqkv_metal_buffer src, int n_tokens,
                                                     tqkv_metal_buffer q, int n_heads, int n_queries, tqkv_pairs pairs,
                                                     tqkv_metal_buffer center, tqkv_metal_buffer channel_scale,
                                                     tqkv_metal_plan *plan);
/* As tqkv_attend. scratch: for this call alone. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_attend(const tqkv_metal_attention *a, tqkv_metal_buffer q,
                                                  tqkv_metal_buffer scratch, tqkv_metal_buffer out,
                                                  tqkv_metal_plan *plan);
/* As tqkv_attend_partial, tqkv_attend_merge and tqkv_attend_finish, for contexts in several stores or on several
   devices; slices of GPU and processor may be merged. But max is only within 8 of the largest score, and finish writes
   out, another buffer, in output_type and with output_strides. Sinks and the values' centre are read by finish alone; a
   merge looks at no buffers of the stores, and so not at the numbers of scales and centres.
   Merged in order, slices of linear or paged stores of rotated values, and keys without a centre, have the bits of
   tqkv_metal_plan_attend if each but the first is one section of the context: [0, 8192), then 32,768 positions each,
   under a window 8,192; in place of the first section also its stretches of 512. The last may be shorter. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_partial(const tqkv_metal_attention *a, tqkv_metal_buffer q,
                                                          int64_t first, int count, tqkv_metal_buffer scratch,
                                                          tqkv_metal_buffer out, tqkv_metal_buffer max,
                                                          tqkv_metal_buffer sum, tqkv_metal_plan *plan);
TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_merge(const tqkv_metal_attention *a, tqkv_metal_buffer out,
                                                        tqkv_metal_buffer max, tqkv_metal_buffer sum,
                                                        const tqkv_metal_attention *src, tqkv_metal_buffer src_out,
                                                        tqkv_metal_buffer src_max, tqkv_metal_buffer src_sum,
                                                        tqkv_metal_plan *plan);
TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_finish(const tqkv_metal_attention *a, tqkv_metal_buffer src_out,
                                                         tqkv_metal_buffer src_max, tqkv_metal_buffer src_sum,
                                                         tqkv_metal_buffer out, tqkv_metal_plan *plan);
/* As tqkv_attend_batch, for a server: each item as tqkv_metal_plan_attend does it, to the same bits, in as many
   dispatches as one item alone takes, cut evenly over the sequences. q, out: [n_items]. The items agree in heads,
   head_dim, formats, types, bases, sinks and matrix_group, in which of the stores of halves they have, and all or none
   have a softcap, centres, lists and pages; window, scale, softcap's size, tree, blocks of the lists, first.n, last.n,
   n_queries and what is resident may differ. Each array of all items (their keys' codes, their q and so on) lies in one
   buffer, at any offsets; nothing that the call reads lies between the outputs. TQKV_UNSUPPORTED otherwise, or where
   the context multiplies no matrices: then with a matrix_group of INT_MAX. arguments: memory that the processor can
   write, at a multiple of 256, for this call alone until it has completed; contents: where the processor sees them, or
   NULL for a plan that only tells sizes and pipelines. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_batch(const tqkv_metal_attention *items, int n_items,
                                                        const tqkv_metal_buffer *q, tqkv_metal_buffer arguments,
                                                        void *contents, tqkv_metal_buffer scratch,
                                                        const tqkv_metal_buffer *out, tqkv_metal_plan *plan);
/* As tqkv_index_scores. head_dim 64 or 128, and a GPU whose matrices lie as attention needs them; else
   TQKV_UNSUPPORTED, by the plan or by tqkv_metal_record. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_index_scores(const tqkv_metal_index *x, tqkv_metal_buffer q,
                                                        tqkv_metal_buffer scores, tqkv_metal_plan *plan);
/* As tqkv_index_choose: the same list for the same scores, but a block whose score is NaN is chosen only as one of
   `first` and `newest`. scores: float [n_queries][number of blocks up to end], list: int32_t [n_queries][k]. Of keys
   only the shape is read. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_index_choose(const tqkv_metal_index *x, tqkv_metal_buffer scores, int k,
                                                        tqkv_metal_buffer scratch, tqkv_metal_buffer list,
                                                        tqkv_metal_plan *plan);

/* Of a cache at the beginning of `memory`. layout: strides of the rows, or NULL: those of the cache. Rows of a tail lie
   apart from those of the keys: a shared cache takes them as v, and nothing without a tail, others behind all rows of
   the keys. At most 512 tokens where positions are kept as halves (exact_last), 64 in a cache without a context. An
   append counts when tqkv_metal_cache_appended is called. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_cache_append(const tqkv_cache *c, tqkv_metal_buffer memory,
                                                        const tqkv_cache_strides *layout, tqkv_metal_buffer k,
                                                        tqkv_metal_buffer v, int n_tokens, tqkv_metal_buffer not_finite,
                                                        tqkv_metal_plan *plan);
TQKV_METAL_API void tqkv_metal_cache_appended(tqkv_cache *c, int n_tokens);
/* For appends that did not run, because a command buffer failed: as tqkv_cache_truncate, and if one of them was to
   learn centre and scale (calibrate), the cache learns again. Before any other edit, and when nothing is under way. */
TQKV_METAL_API tqkv_result tqkv_metal_cache_failed(tqkv_cache *c, int64_t end);
/* some: NULL, or an attention whose list and tree, in buffers, are taken; its other fields are ignored. */
TQKV_METAL_API tqkv_result tqkv_metal_plan_cache_attend(const tqkv_cache *c, tqkv_metal_buffer memory,
                                                        const tqkv_cache_strides *layout,
                                                        const tqkv_metal_attention *some, tqkv_metal_buffer q,
                                                        int n_queries, tqkv_metal_buffer scratch, tqkv_metal_buffer out,
                                                        tqkv_metal_plan *plan);

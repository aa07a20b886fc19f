/* "f16", "tq4", "tq5", "tq6", "tq8", "tq5_bytes", "tq6_bytes", "i8", "tq3", "tq2"; "default" for TQKV_FORMAT_DEFAULT,
   else "?" */
TQKV_API const char *tqkv_format_name(tqkv_format f);
/* The format of that name; TQKV_FORMAT_DEFAULT for NULL and for an unknown name. */
TQKV_API tqkv_format tqkv_format_from_name(const char *name);
/* Bytes of the codes of one row (one position of one head); 0 for an unsupported format or head_dim. */
TQKV_API size_t tqkv_row_bytes(tqkv_format f, int head_dim);
/* Norms of one row; 0 for F16 and for an unsupported format or head_dim. */
TQKV_API int tqkv_norms_per_row(tqkv_format f, int head_dim);
/* The scaled value (tqkv_probe) where a format saturates: its last boundary, 127 for I8, 65504 for F16, else 0. */
TQKV_API float tqkv_last_boundary(tqkv_format f);

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

/* Memory for caches and scratch. All zero: malloc and free. alloc returns NULL or memory aligned like malloc's; free
   receives the size that alloc received. */
typedef struct tqkv_allocator {
    void *(*alloc)(void *user, size_t size);
    void (*free)(void *user, void *pointer, size_t size);
    void *user;
} tqkv_allocator;

/* >>isa
   The instruction set in use: "avx512" (with VBMI), "avx2" (with FMA), "neon" or "scalar". The first call chooses the
   best set of the processor, or the one named by the environment variable TQKV_ISA. Codes and norms are the same in all
   sets; attention differs in the last bits. */
TQKV_API const char *tqkv_isa_name(void);
/* For tests: uses that set from now on, in all threads. NULL: chooses again. TQKV_INVALID_ARGUMENT for an unknown name,
   TQKV_UNSUPPORTED if the processor lacks the set. */
TQKV_API tqkv_result tqkv_isa_force(const char *name);

/* >>threads
   Runs task(context, i) once for each i in [0, count), in any order, on any threads; returns after all have ended.
   Threads that share a cache or a store may call `run` at once; it must allow that. tqkv never calls `run` from its own
   tasks; a pool whose other tasks call tqkv must allow `run` inside a task. Neither `run` nor a task may throw or
   longjmp through tqkv: the call's scratch would leak, and its tasks might go on. */
typedef void (*tqkv_task)(void *context, int index);
typedef struct tqkv_parallel {
    void (*run)(void *user, int count, tqkv_task task, void *context);
    void *user;
} tqkv_parallel;

/* A hook for threads that are there already: of an engine that calls each operation on all its threads at once, as ggml
   does, and has no pool to lend. All call tqkv_team_begin. It returns true in thread 0, whose calls to tqkv the others then
   help with; in these it returns false after tqkv_team_end, when there is nothing left to do. Example:

     void attend_layer(layer *l, int thread, int n_threads)          // on all threads, with one l
     {
         if (!tqkv_team_begin(l->team, thread, n_threads)) return;
         l->result = tqkv_encode(&l->keys, l->k, 1, l->position);    // l->keys.parallel = tqkv_team_parallel(l->team)
         if (l->result == TQKV_OK) l->result = tqkv_encode(&l->values, l->v, 1, l->position);
         l->attention.end = l->position + 1;                         // l->attention.parallel: the same
         if (l->result == TQKV_OK) l->result = tqkv_attend(&l->attention, l->q, l->out);
         tqkv_team_end(l->team);
     }

   Both calls wait until all n_threads threads have come to tqkv_team_begin. The next begin may follow at once; another number of
   threads only after all have returned. Waiting threads spin, and after a while give way to others. One team serves all
   layers; two operations at once need two. */
typedef struct tqkv_team tqkv_team;
/* allocator: NULL = malloc, free. *out is NULL on failure. */
TQKV_API tqkv_result tqkv_team_create(const tqkv_allocator *allocator, tqkv_team **out);
TQKV_API void tqkv_team_destroy(tqkv_team *team); /* NULL is fine. No thread may be between begin and end. */
TQKV_API bool tqkv_team_begin(tqkv_team *team, int thread, int n_threads);
TQKV_API void tqkv_team_end(tqkv_team *team); /* by thread 0 */
/* The hook, for calls of thread 0 between begin and end. Elsewhere the calling thread, one at a time, runs all tasks. */
TQKV_API tqkv_parallel tqkv_team_parallel(tqkv_team *team);
/* Scratch for the same calls, and caches, which must be destroyed before the team. The team keeps what is freed, so that
   after the first calls nothing is allocated. */
TQKV_API tqkv_allocator tqkv_team_allocator(tqkv_team *team);

/* >>store
   Where the caller's rows lie: that of a token (or position, or query) t and a head h begins at value t * token + h * head.
   0: as in [token][head][dim] without gaps, that is dim for head and n_heads * dim for token. For [head][token][dim]: token =
   dim, head = n_tokens * dim; for a third of fused projections: token = 3 * n_heads * dim. Rows that are read may share
   values, rows that are written may not. What lies between the rows of an output may be another output of the same strides;
   for all else it counts as written in the checks of what overlaps, but is not touched. On a GPU below 2^32. */
typedef struct tqkv_strides {
    size_t token, head;
} tqkv_strides;

/* One stream (keys or values) of one layer in the caller's memory:
   codes [n_kv_heads][capacity][row_bytes], norms [n_kv_heads][capacity][norms_per_row], nothing else.
   Linear: position p is slot p. Ring: slot p mod capacity. Paged: a pool of `capacity` slots for many sequences, each with
   a store of its own over the same codes and norms; position p is slot pages[p / page_size] * page_size + p % page_size.
   Tables may share pages, as for a common prompt. Entries of positions that nothing sees or writes are not looked at. */
typedef struct tqkv_store {
    tqkv_format format; /* not TQKV_FORMAT_DEFAULT: a store alone does not know whether it holds keys or values */
    int head_dim; /* 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 288, 320, 384, 448, 512, 576, 640, 768, 896
                     or 1024 */
    int n_kv_heads;
    int capacity; /* positions */
    bool ring;
    bool unrotated; /* for caches written without the rotation; TQ5, TQ6, TQ8 and their _BYTES forms only. The rotation
                       spreads the heavy tails of real values: without it the error grows by up to four digits. */
    float block_scale; /* TQ formats, head_dim 512 and 1024: a factor of encoded values; 0 = 1 */
    void *codes;       /* any alignment; a multiple of 64 reads fastest */
    size_t codes_size; /* bytes */
    float *norms;      /* may be NULL for F16 */
    size_t norms_size; /* bytes */
    /* [n_kv_heads][head_dim], finite, or NULL. Encoding subtracts it from each row; decoding and attention add it back,
       exactly. For keys with a large constant part, which models with a bias in the key projection have. The same for
       all positions: set it before the first row is encoded, and keep it as long as the store. */
    const float *center;
    tqkv_type type; /* of rows given to encode, probe, mean and measure, and written by decode. The codes of a half or a
                       bfloat16 are those of the same value as a float. Attention does not look at it. */
    const int32_t *pages; /* [n_pages], or NULL: not paged. Not with ring. */
    int n_pages;
    int page_size; /* in positions, any that divides capacity; multiples of 64 are quickest. 1: pages is the slot of each
                      position. */
    tqkv_parallel parallel; /* for encode, encode_slots and convert, of many rows; zero = the calling thread alone */
    tqkv_strides strides;   /* of rows given to encode, probe, mean and measure, and written by decode */
    bool rotated; /* F16 alone: halves of the rotated row, less the centre, in the basis of other formats' codes */
    /* [n_kv_heads][head_dim], in [2^-32, 2^32], or NULL: a scale for each channel, by which encoding divides what is left of a
       row without its centre (it multiplies by 1 / channel_scale), and by which decoding and attention multiply. For keys with
       channels far larger than others, whose error the rotation would spread over all. TQKV_ROTATED rows, queries and outputs
       are those of the scaled basis. The same for all positions, as the centre. */
    const float *channel_scale;
} tqkv_store;

/* Bytes of the codes and of the norms; 0 if the store's shape is invalid or its size overflows. F16 has no norms. */
TQKV_API size_t tqkv_codes_size(const tqkv_store *s);
TQKV_API size_t tqkv_norms_size(const tqkv_store *s);

/* Encodes tokens at position, position+1 ...; src: [n_tokens][n_kv_heads][head_dim]. A ring keeps only the last
   `capacity` tokens. A page may not occur twice among those written. TQKV_NOT_FINITE if src holds NaN or Inf, even in
   tokens that a ring drops. Values near 1e19, whose squared length overflows, give an infinite norm. What shares a norm becomes
   zeros where all is at most 1e-10: the length of a row, or of I8 its largest value. */
TQKV_API tqkv_result tqkv_encode(const tqkv_store *s, const void *src, int n_tokens, int64_t position);
/* Token t goes to slot slots[t] of the pool, a token with slot -1 nowhere; no slot twice. For tokens of many sequences at
   once: pages and ring are not looked at. NaN and Inf are refused in all rows, left-out ones too. slots: [n_tokens] */
TQKV_API tqkv_result tqkv_encode_slots(const tqkv_store *s, const void *src, int n_tokens, const int32_t *slots);

/* Shows how well activations fit the codebook: writes the values that encode compares with the boundaries. They are
   rotated, divided by the norm, and scaled to unit variance; I8: in steps of the grid; F16: what is rounded. src, scaled:
   [n_tokens][n_kv_heads][head_dim]. Writes no store; codes and norms may be NULL. */
TQKV_API tqkv_result tqkv_probe(const tqkv_store *s, const void *src, int n_tokens, float *scaled);

/* The basis of a vector. Streams without rotation (F16, unrotated) and without a scale have one basis. */
typedef enum tqkv_basis {
    TQKV_ORIGINAL = 0,
    /* The basis of the codes: after scale and rotation. Rows have the centre in them, scaled and rotated: a caller's query q is
       R(q * channel_scale), an output is R(v / channel_scale) of the original one. */
    TQKV_ROTATED
} tqkv_basis;

/* Decodes [position, position + n_positions), of a ring at most `capacity`; dst: [n_positions][n_kv_heads][head_dim]. */
TQKV_API tqkv_result tqkv_decode(const tqkv_store *s, int64_t position, int n_positions, tqkv_basis basis, void *dst);

/* Writes the positions [position, position + n_positions) of `from` into `to`, which may have another format, block_scale,
   capacity and page table: decoded in the basis of the codes and encoded there, the same bytes on every machine. Rows of
   F16 that are not rotated are on the way, rows of the same format and block_scale are copied. TQKV_INVALID_ARGUMENT unless
   n_kv_heads, head_dim, unrotated (F16 goes with either), the centre and the scale are the same. A page may not occur twice
   among those written. TQKV_NOT_FINITE if a row to encode holds NaN, infinity or a norm of 1e30 or more.
   Many rows go to tasks of to->parallel.
   Two page tables of one pool, with rows of as many bytes: a copy of a sequence, if the pages that have these positions are
   others in `to` than in `from`. In place: codes, norms or both may begin where those of `from` begin, if capacity and ring are the same, neither store
   has pages, and the row of `to` (row_bytes, norms_per_row) is no longer. Rows move down in ascending order, each
   after it was read; what these stores held at other positions is lost. Memory that overlaps otherwise is refused. All
   checks come before the first write: a conversion never ends halfway. */
TQKV_API tqkv_result tqkv_store_convert(const tqkv_store *to, const tqkv_store *from, int64_t position,
                                        int n_positions);

/* The mean of the rows of each head, a centre for such rows; mean: [n_kv_heads][head_dim], zeros for no tokens. Sums in
   double. shape and src as for tqkv_probe; the centre, the scale and the format of shape do not matter. */
TQKV_API tqkv_result tqkv_mean(const tqkv_store *shape, const void *src, int n_tokens, float *mean);

/* How well a store of this format, centre and scale keeps the rows of one head. */
typedef struct tqkv_quality {
    double mean_share; /* |mean of the rows|^2 / mean |row|^2 of the source: what a centre would take away */
    double error;    /* mean |x - x'|^2 / mean |x - mean of the rows|^2, x' decoded: noise against what differs between
                          positions. INFINITY if nothing differs but there is noise */
    double kurtosis; /* of the values that tqkv_probe shows: fourth moment over squared second; 3: Gaussian. INFINITY if
                        one is infinite: a value of F16 that overflows when the centre is subtracted */
    double beyond;   /* share of these values beyond the last boundary */
} tqkv_quality;
/* Encodes and decodes the rows, without a store; out: [n_kv_heads], zeros for no tokens. codes and norms may be NULL. A stream
   that is keys and values has one error, which outputs meet twice, in the weights and in what they weigh: the two
   effects add up. A tail is a stream of its own, which strides find in rows of whole keys; scores meet its error by the share
   that its products have of them. */
TQKV_API tqkv_result tqkv_measure(const tqkv_store *shape, const void *src, int n_tokens, tqkv_quality *out);

/* Channels of the rotary embedding that share a scale. Such a scale commutes with the rotation of positions: an engine may fold
   it into its projections, and may shift contexts. */
typedef enum tqkv_pairs {
    TQKV_PAIRS_NONE = 0,
    TQKV_PAIRS_NEIGHBOURS, /* channels 2i and 2i + 1 */
    TQKV_PAIRS_HALVES      /* channels i and i + head_dim / 2 */
} tqkv_pairs;
/* Learns centre and scale of keys from rows and, if given, from queries, which say what reads a channel's error:

     center = mean,  s = deviation from it,  channel_scale = sqrt(s), or sqrt(s / r) with r = root mean square of the queries,

   then divided by its root mean square over the head's channels and kept in [2^-10, 2^10]. A channel of deviation 0 counts as that
   of the smallest other. The same bits on every machine. Values need neither.
   src: [n_tokens][n_kv_heads][head_dim], of the shape's type and strides; q: [n_queries][n_heads][head_dim] of its type, without
   gaps, or NULL; n_heads: 0 = n_kv_heads. center, channel_scale: [n_kv_heads][head_dim], one may be NULL. No tokens: 0 and 1. The
   shape's format, centre and scale do not matter. TQKV_NOT_FINITE: NaN, infinity or a magnitude beyond 1e12. */
TQKV_API tqkv_result tqkv_calibrate(const tqkv_store *shape, const void *src, int n_tokens, const void *q, int n_heads,
                                    int n_queries, tqkv_pairs pairs, float *center, float *channel_scale);
/* What the shape's format, centre and scale would add to the logits: the standard deviation of q.(k' - k)/sqrt(head_dim) over
   the rows k, root mean square over the queries that read the head. With 20 in its first layer Qwen2.5-Coder-0.5B is ruined,
   with 5 it loses 0.25 nats, with 0.7 it loses 0.03, or with exact ends 0.003. Rows and queries as tqkv_calibrate's, q not NULL;
   noise: [n_kv_heads], zeros for no tokens or queries, INFINITY if rows decode to NaN. */
TQKV_API tqkv_result tqkv_logit_noise(const tqkv_store *shape, const void *src, int n_tokens, const void *q,
                                      int n_heads, int n_queries, double *noise);

/* >>rotate
   y = R(s*x)/sqrt(D) and its inverse x = s*R(y)/sqrt(D), in place; rows: [n_rows][head_dim]. NaN and Inf spread. */
TQKV_API tqkv_result tqkv_rotate(float *rows, int n_rows, int head_dim);
TQKV_API tqkv_result tqkv_unrotate(float *rows, int n_rows, int head_dim);

/* >>attention
   How the processor multiplies. TQKV_INTEGER: rotated queries and weights as integers of 16 bits, codes as integers of 8
   bits, with exact sums: the same bits on every processor, compiler and number of threads, and less time where arithmetic
   binds. F16 streams stay floats. Not for TQ8 or on a GPU: TQKV_UNSUPPORTED. */
typedef enum tqkv_arithmetic { TQKV_FLOAT = 0, TQKV_INTEGER } tqkv_arithmetic;

/* out = sum_j softmax_j( cap( scale * q.k_j ) ) v_j,   cap(x) = softcap > 0 ? softcap * tanh(x/softcap) : x
   Query head h reads KV head h / (n_heads/n_kv_heads). Query i is at position end - n_queries + i. It sees the resident
   positions up to its own; a window limits them to the newest `window`. A query that sees nothing gives zeros.
   With non_causal it sees those behind it, too: all resident ones or, under a window, those of which it is at most
   window - 1 positions away in either direction. Without a window its own position then does not matter, and may not be
   resident: for cross-attention. To let a part of a prompt see itself, attend with `end` behind that part.
   Slots that no query sees change nothing, whatever they hold.
   On the processor the relative L2 error against double precision on the same codes is at most 2e-5 at any length, for
   scores with a standard deviation up to 10; beyond, 2e-6 times the deviation: a float score s is rounded by up to
   2^-24 |s|, and exp turns that into a share of its weight. TQKV_INTEGER: against double precision with the integer
   centroids, at most 2e-4 plus 5e-5 times the deviation of the scores, for any query; a NaN is 0x7fc00000. */
typedef struct tqkv_attention {
    /* same n_kv_heads; head_dim may differ. One stream may be both, as in a latent cache: the same store, or two that
       describe the same bytes in the same way. Its rows are fetched once for scores and sums, and its centre is added back to
       both, as both are scaled. */
    const tqkv_store *keys, *values;
    int n_heads;   /* query heads; 0 = n_kv_heads */
    int n_queries; /* 0 = 1 */
    int64_t end;   /* positions appended so far */
    int kv_len;    /* resident positions, the newest; 0 = min(end, capacity), paged: min(end, n_pages * page_size) */
    int window;    /* 0 = no window */
    float scale;   /* 0 = 1/sqrt(head_dim of the keys, with that of the tail) */
    float softcap; /* 0 = off */
    const float *sinks;       /* [n_heads] or NULL: adds exp(sink) to the softmax's denominator; -INFINITY: no sink */
    tqkv_basis query_basis;   /* TQKV_ROTATED: q is rotated already */
    tqkv_basis output_basis;  /* TQKV_ROTATED: leave the output rotated */
    tqkv_parallel parallel;   /* zero = the calling thread alone */
    tqkv_allocator allocator; /* scratch; zero = malloc, free */
    tqkv_type query_type, output_type; /* of q and out. Outputs are rounded once, at the end; too large for a half:
                                          infinity. Sums of slices are always float. */
    tqkv_strides query_strides, output_strides; /* of q and out; sums of slices have no gaps */
    /* [n_queries], at most 64, or NULL. Of the newest n_queries positions query i sees position j of them only if bit j
       of tree[i] is set and j <= i: for drafts with several branches. Higher bits are ignored. */
    const uint64_t *tree;
    tqkv_arithmetic arithmetic;
    bool non_causal; /* not with a tree */
    /* More dimensions of each key, or NULL: a stream with a format, rotation, centre and scale of its own, and n_kv_heads,
       capacity, ring and page table of the keys. A row of q is the keys' part, then the tail's; query_basis is that of
       each part. */
    const tqkv_store *tail;
    /* [n_queries][list_heads][list_length], or NULL: all positions. Ascending numbers of blocks, the first -1 ends a row; block
       b is the positions from b * list_block on. A query sees what it would see without a list, if it is in a block of its row
       or among the newest list_newest positions that it would see. Blocks beyond the end, and positions that are gone, are
       nothing. A list that names all blocks gives the result without a list, bit for bit. */
    const int32_t *list;
    int list_length, list_heads; /* list_heads: 0 = 1, or n_kv_heads: a row for each */
    int list_block, list_newest; /* list_block: 1, 4, 16, 64 or 128 positions */
    /* Some positions as halves, too: a query at position p reads those below exact_first from first_keys and first_values, and
       those above p - exact_last, but none below exact_from, from last_keys and last_values; all others, and those of a stream
       whose store here is NULL or that is F16 itself, from keys and values. It gets the same bits alone and in a batch. With
       a tree, too, p is where a query stands, and not its depth. Stores of F16 with n_kv_heads, head_dim, centre and scale of
       the codes, and rotated if these are; linear, rings (multiples of 64 read fastest) or paged, as long as they hold these
       positions, of last_keys and last_values the newest exact_last + n_queries - 1 up to `end`: else TQKV_OUT_OF_RANGE. If
       the keys are the values, so are their halves. A resident position's tail is read from its own store. On a GPU the
       stores of halves have no pages, and keys with a tail have none beside them. */
    const tqkv_store *first_keys, *first_values, *last_keys, *last_values;
    int exact_first, exact_last;
    int64_t exact_from; /* what a truncation, for example, has left as codes; 0: nothing */
    /* Positions below exact_first that are no longer resident are seen, as if they were, where first_keys, first_values and, with
       a tail, first_tail have them: streams of F16 need theirs for that, too. They are added apart from the others: a query whose
       window reaches back to one that is gone has other last bits than before. first_tail: a store of the tail's kind. A slice
       has them if it begins with the oldest resident position. */
    const tqkv_store *first_tail;
    bool whole_window; /* TQKV_OUT_OF_RANGE if a position of a query's window is gone; else it sees what is there */
} tqkv_attention;

/* q: [n_queries][n_heads][head_dim of the keys, then of the tail], out: [n_queries][n_heads][head_dim of the values].
   TQKV_NOT_FINITE if q holds NaN or Inf, or a sink is NaN or +Inf. A score, or a sum of values, beyond the range of float makes a
   result NaN or infinite. */
TQKV_API tqkv_result tqkv_attend(const tqkv_attention *a, const void *q, void *out);

/* Each item as tqkv_attend does it, to the same bits, in one use of the hook that is cut evenly: for many sequences, of
   different lengths and numbers of queries. q, out: [n_items]. parallel and allocator are those of items[0]. Outputs
   may not overlap. One bad item fails the call, and nothing is written. */
TQKV_API tqkv_result tqkv_attend_batch(const tqkv_attention *items, int n_items, const void *const *q,
                                       void *const *out);

/* Attends one slice [first, first + count) of the resident positions, without sinks, for tqkv_attend_merge;
   TQKV_OUT_OF_RANGE if it leaves them. max, sum: [n_queries][n_heads]: the largest score, and the sum of
   exp(score - max). out: as tqkv_attend's, but float: the sum of exp(score - max) * value, in the basis of the values' codes.
   A query without positions: -INFINITY, 0, zeros. */
TQKV_API tqkv_result tqkv_attend_partial(const tqkv_attention *a, const void *q, int64_t first, int count, float *out,
                                         float *max, float *sum);
/* Merges the slice src into dst. Both slices must have values in the same basis, which this call cannot check: its sums
   are wrong if one is rotated (TQ, I8) and the other not (F16, unrotated), or if their scales differ. For the former use
   tqkv_attend_merge_slice. This call and the two below read only the shapes of a->keys and a->values, and the values' scale. */
TQKV_API tqkv_result tqkv_attend_merge(const tqkv_attention *a, float *out, float *max, float *sum,
                                       const float *src_out, const float *src_max, const float *src_sum);
/* As tqkv_attend_merge, for a slice attended with `slice`, over stores of other formats: converts its sums to the basis
   of a->values. n_heads, n_queries, the values' head_dim and their scale are the same in both. */
TQKV_API tqkv_result tqkv_attend_merge_slice(const tqkv_attention *a, float *out, float *max, float *sum,
                                             const tqkv_attention *slice, const float *src_out, const float *src_max,
                                             const float *src_sum);
/* Adds the sinks, divides, rotates back and scales: out becomes the output of tqkv_attend. */
TQKV_API tqkv_result tqkv_attend_finish(const tqkv_attention *a, float *out, const float *max, const float *sum);

/* >>index
   What a query attends to may be chosen by a small index: keys of their own, one for each `ratio` positions of the
   context, which some heads score.

       s(i, j) = sum_h weights[i][h] * f( q(i, h).k(j) ),   f(x) = max(x, 0) with relu, else x

   The score of a block of keys is the largest or the mean of its keys' scores that the query sees; the same bits alone and
   among other queries. Against double precision on the same codes a key's score is within 2e-5 of
   sum_h |weights[i][h] f(q.k)|, and 1e-4 in integers with their centroids; where the products of a few heads nearly vanish, one
   adds 2e-7, and 2e-5 in integers, of sum_h |weights[i][h]| |q(i, h)| |k(j)|. */
typedef enum tqkv_pool { TQKV_POOL_MAX = 0, TQKV_POOL_MEAN } tqkv_pool;
typedef struct tqkv_index {
    const tqkv_store *keys; /* n_kv_heads 1, any format */
    int n_heads, n_queries; /* query heads of the index; 0 = 1 */
    int64_t end;            /* keys appended so far */
    int kv_len;             /* resident keys, as tqkv_attention's */
    int ratio;            /* positions of the context that a key stands for: key j for those from j * ratio on. 0 = 1 */
    const float *weights; /* [n_queries][n_heads] or NULL: 1 */
    bool relu;
    int block; /* keys a block; 0 = 1 */
    tqkv_pool pool;
    int first, newest; /* so many of the first blocks, and of the newest that a query sees, are always chosen */
    tqkv_type query_type;
    tqkv_basis query_basis;
    tqkv_parallel parallel;
    tqkv_allocator allocator; /* scratch, for some heads and queries at a time */
    tqkv_arithmetic arithmetic;
    int64_t positions; /* of the context so far; 0 = end * ratio. Query i is at positions - n_queries + i. It sees the
                          resident keys whose positions are all at or before its own */
} tqkv_index;

/* q: [n_queries][n_heads][head_dim]; scores: [n_queries][number of blocks up to end], -INFINITY where a query sees no key
   of a block. TQKV_NOT_FINITE if q or weights hold NaN or Inf. */
TQKV_API tqkv_result tqkv_index_scores(const tqkv_index *x, const void *q, float *scores);
/* The k best blocks of each query, ascending, of equal ones the lower; -1 after the last. scores as above; a block with
   -INFINITY is never chosen. The blocks of `first` and `newest` come before all others, lower ones first. list: [n_queries][k].
   Reads only the shape of keys. TQKV_NOT_FINITE if the score of a block that its query sees is NaN. */
TQKV_API tqkv_result tqkv_index_choose(const tqkv_index *x, const float *scores, int k, int32_t *list);

/* >>cache
   A cache that owns its memory: one layer's keys and values, and their positions. */
typedef struct tqkv_cache tqkv_cache;
typedef struct tqkv_metal tqkv_metal; /* see >>metal */
typedef struct tqkv_cache_desc {
    int head_dim, n_kv_heads, n_heads, capacity; /* n_heads: 0 = n_kv_heads */
    tqkv_format key_format, value_format;
    bool ring; /* keep the newest `capacity` positions */
    int window;
    float scale, softcap;
    const float *sinks; /* [n_heads] or NULL; copied */
    tqkv_parallel parallel;
    tqkv_allocator allocator; /* for the cache and its scratch */
    tqkv_metal *metal;        /* a context that holds the cache and runs append and attend; NULL = the processor */
    int value_dim;            /* head_dim of the values; 0 = head_dim */
    tqkv_type type;           /* of k, v, q and out */
    int matrix_group;         /* on a GPU: as that of tqkv_metal_attention */
    tqkv_arithmetic arithmetic;
    bool non_causal; /* every query sees all resident positions: for cross-attention; see tqkv_attention */
    bool shared;     /* a latent cache: the keys are the values. value_format and value_dim: those of the keys, or 0 */
    int tail_dim;    /* further dimensions of each key, in a stream of their own; 0: none */
    tqkv_format tail_format; /* 0 = F16 */
    /* So many of the first positions, and of the newest before each query, are kept as halves, too, and read as these: most of
       the weight is there. Their sum is at most the capacity; F16 streams and the tail need none. The halves of the newest are
       room for 64 queries of one call; an append of more tokens makes more room, for as many. After truncate, remove and
       keep the newest may be left as codes until new ones come. */
    int exact_first, exact_last;
    int exact_batch; /* make room for the halves of one append of so many tokens at once. On a GPU, which cannot make more, 0 = 512 */
    /* The cache learns centre and scale of its keys (tqkv_calibrate) from the first so many positions, without the exact_first: at
       least 16, and of a smaller cache a quarter of the capacity. 0: not. Until the append that reaches them keys and values are
       halves as they came, and attention is exact. That append encodes them; queries at these positions still read the halves,
       until the next append gives their memory back (with non_causal, until this one). The same codes however positions came. What
       it has learned is in tqkv_cache_keys. On a GPU the halves' memory stays as long as the cache, because work under way may
       read it: a copy by tqkv_cache_fork, made when the cache has learned, has none. */
    int calibrate;
    uint64_t tag; /* the caller's name for the model, 0: none; a snapshot or a fork of another is refused */
} tqkv_cache_desc;

/* A desc with formats, calibrate 512, exact_first 4 and exact_last 128 filled in; the caller adds the shape. Bits a value, with norms,
   at head_dim 64 / 128 / 256. */
typedef enum tqkv_preset {
    TQKV_SAFE = 0, /* I8 keys, TQ4 values: 6.5 / 6.25 / 6.19 */
    TQKV_SMALL, /* TQ4, TQ4: 4.5 / 4.25 / 4.13. TQ5 keys with TQ3 values lose a third less at as many bits, and take up to a fifth
                      more time */
    TQKV_TINY /* TQ3, TQ2: 3 / 2.75 / 2.63 */
} tqkv_preset;
TQKV_API tqkv_cache_desc tqkv_cache_preset(tqkv_preset preset); /* zeros for an unknown one */

/* *out is NULL on failure. */
TQKV_API tqkv_result tqkv_cache_create(const tqkv_cache_desc *desc, tqkv_cache **out);
TQKV_API void tqkv_cache_destroy(tqkv_cache *c); /* NULL is fine */

/* k: [n_tokens][n_kv_heads][head_dim, then tail_dim], v: [n_tokens][n_kv_heads][value_dim], or NULL if the keys are the
   values; at positions end, end + 1 ...; outside of the cache's memory.
   Tasks of `parallel` encode long runs, to the same bytes. All or nothing: TQKV_OUT_OF_RANGE if a linear cache would
   overflow. To prefill a ring, append and attend in pieces of at most capacity - window + 1 tokens: then every query
   still finds its whole window. */
TQKV_API tqkv_result tqkv_cache_append(tqkv_cache *c, const void *k, const void *v, int n_tokens);
/* The newest n_queries positions attend; q: [n_queries][n_heads][head_dim, then tail_dim], out: with value_dim. Nothing to
   do for 0. TQKV_OUT_OF_RANGE, and nothing is written, where a query's window, or a half that it reads, is gone. */
TQKV_API tqkv_result tqkv_cache_attend(tqkv_cache *c, const void *q, int n_queries, void *out);
/* The same with a list of blocks, a tree or both: those of `a`, whose other fields are ignored. */
TQKV_API tqkv_result tqkv_cache_attend_some(tqkv_cache *c, const tqkv_attention *a, const void *q, int n_queries,
                                            void *out);
/* What tqkv_cache_attend attends to, as it is now, for one query: for slices and batches of caches. kv_len is 0 if nothing is
   resident; do not attend then. All zeros for NULL. */
TQKV_API tqkv_attention tqkv_cache_view(const tqkv_cache *c);
TQKV_API int64_t tqkv_cache_end(const tqkv_cache *c); /* positions appended; 0 for NULL */
/* The oldest resident position; 0 for NULL. After truncate, keep, fork or load a ring may hold fewer positions than its
   capacity: tqkv_attend over its stores then needs kv_len = end - first, which is not its default. */
TQKV_API int64_t tqkv_cache_first(const tqkv_cache *c);
/* Codes and norms of all streams, and the halves kept besides, now; 0 for NULL. */
TQKV_API size_t tqkv_cache_bytes(const tqkv_cache *c);
/* Centres and scales as tqkv_store's, copied; NULL: none. keys: [n_kv_heads][head_dim, then tail_dim]; values:
   [n_kv_heads][value_dim], NULL if the keys are the values, which then have those of the keys. Only while end is 0, else
   TQKV_INVALID_ARGUMENT. Snapshots keep them; tqkv_cache_bytes does not count them. The cache then does not learn its own. */
TQKV_API tqkv_result tqkv_cache_set_center(tqkv_cache *c, const float *keys, const float *values);
TQKV_API tqkv_result tqkv_cache_set_scale(tqkv_cache *c, const float *keys, const float *values);
/* Strides of the rows that later calls take and give; NULL, and at first: none. Copies and snapshots have none. */
typedef struct tqkv_cache_layout {
    tqkv_strides k, v, q, out;
} tqkv_cache_layout;
TQKV_API tqkv_result tqkv_cache_set_layout(tqkv_cache *c, const tqkv_cache_layout *layout);
/* Forgets the positions from `end` on. A ring cannot restore overwritten positions: TQKV_OUT_OF_RANGE for an end before
   the oldest resident position. 0 is always valid and empties the cache. With a window the next query that is answered
   stands at tqkv_cache_first + window - 1 or behind. */
TQKV_API tqkv_result tqkv_cache_truncate(tqkv_cache *c, int64_t end);
/* Removes the positions [first, first + count); those behind move down, with their codes as they are: a key keeps the
   rotary embedding of its old position. For linear caches; TQKV_UNSUPPORTED for a ring. */
TQKV_API tqkv_result tqkv_cache_remove(tqkv_cache *c, int64_t first, int64_t count);
/* Of the newest n positions, numbered 0 to n - 1 from the oldest, keeps those named and forgets the others. kept:
   [n_kept], ascending. For a tree of drafts after its verification. TQKV_OUT_OF_RANGE if n positions are not resident.
   Windows as after tqkv_cache_truncate. */
TQKV_API tqkv_result tqkv_cache_keep(tqkv_cache *c, int n, const int *kept, int n_kept);
/* A copy with the resident positions at their places. desc: NULL, or nonzero fields for what the copy has otherwise:
   capacity (TQKV_OUT_OF_RANGE if too small for them), ring, formats of the streams (as tqkv_store_convert, on the hook's
   threads), type, sinks, parallel, allocator, metal, matrix_group, arithmetic, non_causal, exact_batch, a tag. Its other nonzero fields
   must match. So a full linear cache grows, or with ring = true goes on as a ring, and one that needs less memory goes
   on in fewer bits. *out is NULL on failure. */
TQKV_API tqkv_result tqkv_cache_fork(const tqkv_cache *c, const tqkv_cache_desc *desc, tqkv_cache **out);
TQKV_API const tqkv_store *tqkv_cache_keys(const tqkv_cache *c);   /* the stores behind it; NULL for NULL */
TQKV_API const tqkv_store *tqkv_cache_values(const tqkv_cache *c); /* the keys if they are the values */
TQKV_API const tqkv_store *tqkv_cache_tail(const tqkv_cache *c);   /* NULL without one */

/* Both return the bytes moved, fewer at the end of a file or on failure; tqkv calls again until all or 0 bytes move. */
typedef size_t (*tqkv_write)(void *user, const void *bytes, size_t n);
typedef size_t (*tqkv_read)(void *user, void *bytes, size_t n);

/* Writes the resident positions. The bytes depend only on the content, not on machine, allocator or threads. After
   TQKV_IO the output is no snapshot: write to a temporary file, then rename it. */
TQKV_API tqkv_result tqkv_cache_save(const tqkv_cache *c, tqkv_write write, void *user);
/* desc, never NULL, supplies what a snapshot lacks: parallel, allocator, metal, matrix_group, arithmetic, non_causal, and sinks for the
   snapshot's n_heads, or a tag. Its other nonzero fields must match, else TQKV_INVALID_ARGUMENT; the tags, too, unless one is 0.
   TQKV_CORRUPT: a missing or changed byte, or a newer version of tqkv, which TQKV_EXPLAIN tells apart. *out is NULL on
   failure. */
TQKV_API tqkv_result tqkv_cache_load(const tqkv_cache_desc *desc, tqkv_read read, void *user, tqkv_cache **out);

/* The same for the positions [position, position + n_positions) of one store, in the caller's memory: a sequence leaves a
   pool of pages and comes back, or moves to another machine. The bytes depend on what these positions hold, not on where
   it lies: a snapshot of a paged store loads into other pages, a linear store or a ring. */
TQKV_API tqkv_result tqkv_store_save(const tqkv_store *s, int64_t position, int n_positions, tqkv_write write,
                                     void *user);
/* The snapshot must be of as many positions, of a store with the same format, head_dim, n_kv_heads, unrotated, block_scale,
   centre and scale, else TQKV_INVALID_ARGUMENT. They may have been other positions: rows come back in their order, to where there
   is room. A page may not occur twice among those written. TQKV_CORRUPT: a missing or changed byte. After TQKV_CORRUPT or
   TQKV_IO these positions may hold anything; all others are as they were. */
TQKV_API tqkv_result tqkv_store_load(const tqkv_store *s, int64_t position, int n_positions, tqkv_read read,
                                     void *user);

/* >>store
   One stream (keys or values) of one layer in the caller's memory:
   codes [n_kv_heads][capacity][row_bytes], norms [n_kv_heads][capacity][norms_per_row], nothing else.
   Linear: position p is slot p. Ring: slot p mod capacity. Paged: a pool of `capacity` slots for many sequences, each
   with a store of its own over the same codes and norms; position p is slot pages[p / page_size] * page_size +
   p % page_size. Tables may share pages, as for a common prompt. Entries of positions that nothing sees or
   writes are not looked at. */
/* Whether rows are rotated before they are stored. */
typedef enum tqkv_rotation {
    TQKV_ROTATION_DEFAULT = 0, /* as the format has it: F16 is not rotated, all other formats are */
    /* For caches written without the rotation: TQ5, TQ6, TQ8, their _BYTES forms and F16. The rotation spreads the
       heavy tails of real values: without it the error of codes grows by up to four digits. */
    TQKV_ROTATION_OFF,
    TQKV_ROTATION_ON /* of F16: halves of the rotated row, less the centre, in the basis of other formats' codes */
} tqkv_rotation;
struct tqkv_store {
    tqkv_format format; /* not TQKV_FORMAT_DEFAULT: a store alone does not know whether it holds keys or values */
    int head_dim; /* 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 288, 320, 384, 448, 512, 576, 640, 768, 896
                     or 1024 */
    int n_kv_heads;

    /* Positions. */
    int capacity; /* in positions */
    bool ring;
    const int32_t *pages; /* [n_pages], or NULL: not paged. Not with ring. */
    int n_pages;
    int page_size; /* in positions, any that divides capacity; multiples of 64 are quickest. 1: pages is the slot of
                      each position */

    /* Memory. */
    void *codes;       /* any alignment; a multiple of 64 reads fastest */
    size_t codes_size; /* bytes */
    float *norms;      /* may be NULL for F16 */
    size_t norms_size; /* bytes */

    /* Rows given to encode, probe, measure and calibrate, and written by decode. The codes of a half or a bfloat16
       are those of the same value as a float. Attention looks at neither. */
    tqkv_type type;
    tqkv_strides strides;
    tqkv_parallel parallel; /* for encode and convert, of many rows; zero = the calling thread alone */

    /* From rows to codes. The same for all positions: set these before the first row is encoded, and keep the arrays as
       long as the store. */
    /* A mean for each channel, [n_kv_heads][head_dim], finite, or NULL. Encoding subtracts it from each row; decoding
       and attention add it back, exactly. For keys with a large constant part, which models with a bias in the key
       projection have. */
    const float *center;
    /* A scale for each channel, [n_kv_heads][head_dim], in [2^-32, 2^32], or NULL. Encoding subtracts the centre, then
       divides by the scale (as a product with 1 / channel_scale); decoding and attention multiply. For keys with
       channels far larger than others, whose error the rotation would spread over all channels. TQKV_ROTATED rows,
       queries and outputs are those of the scaled basis. */
    const float *channel_scale;
    float block_scale; /* TQ formats, head_dim 512 and 1024: a factor of encoded values; 0 = 1 */
    int rotary_dim;    /* the rotary embedding turns channels [0, rotary_dim); for tqkv_pairs alone; 0 = head_dim */
    tqkv_rotation rotation;
};

/* Bytes of the codes and of the norms; 0 if the store's shape is invalid or its size overflows. F16 has no norms. */
TQKV_API size_t tqkv_codes_size(const tqkv_store *s);
TQKV_API size_t tqkv_norms_size(const tqkv_store *s);

/* Encodes tokens at position, position+1 ...; src: [n_tokens][n_kv_heads][head_dim]. A ring keeps only the last
   `capacity` tokens. A page may not occur twice among those written; a page of -1 leaves its tokens out. To slots of a
   pool, for many sequences at once: pages = the slot of each token, page_size 1, position 0. TQKV_NOT_FINITE if src
   holds NaN or Inf, even in tokens that are left out. Values near 1e19, whose squared length overflows, give an
   infinite norm. What shares a norm becomes zeros where all is at most 1e-10: the length of a row, or of I8 its largest
   value. */
TQKV_API tqkv_result tqkv_encode(const tqkv_store *s, const void *src, int n_tokens, int64_t position);

/* Shows how well activations fit the codebook: writes the values that encode compares with the boundaries, rotated,
   divided by the norm, and scaled to unit variance. For I8 the values are in steps of the grid, for F16 they are what
   is rounded. src, scaled: [n_tokens][n_kv_heads][head_dim]. Writes no store; codes and norms may be NULL. */
TQKV_API tqkv_result tqkv_probe(const tqkv_store *s, const void *src, int n_tokens, float *scaled);

/* The basis of a vector. Streams without rotation and without a scale have one basis. */
typedef enum tqkv_basis {
    TQKV_ORIGINAL = 0,
    /* The basis of the codes: after scale and rotation. Rows have the centre in them, scaled and rotated: a caller's
       query q is R(q * channel_scale), an output is R(v / channel_scale) of the original one. */
    TQKV_ROTATED
} tqkv_basis;

/* Decodes [position, position + n_positions), of a ring at most `capacity`; dst:
   [n_positions][n_kv_heads][head_dim]. */
TQKV_API tqkv_result tqkv_decode(const tqkv_store *s, int64_t position, int n_positions, tqkv_basis basis, void *dst);

/* Writes the positions [position, position + n_positions) of `from` into `to`, which may have another format,
   block_scale, capacity and page table: decoded in the basis of the codes and encoded there, the same bytes on every
   machine. Rows of F16 that are not rotated are on the way, rows of the same format and block_scale are copied.
   TQKV_INVALID_ARGUMENT unless n_kv_heads, head_dim, the rotation (F16 goes with either), the centre and the scale
   are the same. A page may not occur twice among those written. TQKV_NOT_FINITE if a row to encode holds NaN,
   infinity or a norm of 1e30 or more. Many rows go to tasks of to->parallel. Two page tables of one pool, with rows
   of as many bytes: a copy of a sequence, if the pages that have these positions are others in `to` than in `from`.
   In place: codes, norms or both may begin where those of `from` begin, if capacity and ring are the same, neither
   store has pages, and the row of `to` (row_bytes, norms_per_row) is no longer. Rows move down in ascending order,
   each after it was read; what these stores held at other positions is lost. Memory that overlaps otherwise is
   refused. All checks come before the first write: a conversion never ends halfway. */
TQKV_API tqkv_result tqkv_store_convert(const tqkv_store *to, const tqkv_store *from, int64_t position,
                                        int n_positions);

/* How well a store of this format, centre and scale keeps the rows of one head. */
typedef struct tqkv_quality {
    double mean_share; /* |mean of the rows|^2 / mean |row|^2 of the source: what a centre would take away */
    double error;    /* mean |x - x'|^2 / mean |x - mean of the rows|^2, x' decoded: noise against what differs between
                          positions. INFINITY if nothing differs but there is noise */
    double kurtosis; /* of the values that tqkv_probe shows: fourth moment over squared second; 3: Gaussian. INFINITY if
                        one is infinite: a value of F16 that overflows when the centre is subtracted */
    double beyond;   /* share of these values beyond the last boundary */
} tqkv_quality;
/* Encodes and decodes the rows, without a store; out: [n_kv_heads], zeros for no tokens. codes and norms may be NULL.
   If a stream is keys and values, its error enters the output twice, by the weights and by the values, and the two
   effects add up. Measure a tail as a stream of its own, with strides that find it in the rows of whole keys. */
TQKV_API tqkv_result tqkv_measure(const tqkv_store *shape, const void *src, int n_tokens, tqkv_quality *out);

/* Learns centre and scale of keys from rows and, if given, from queries, which weigh the error of a channel:

     center = mean,  s = deviation from it,  channel_scale = sqrt(s), or sqrt(s / r), r = root mean square of queries,

   then divided by its root mean square over the head's channels and kept in [2^-10, 2^10]. A channel of deviation 0
   counts as that of the smallest other. The same bits on every machine. Values need neither.
   src: [n_tokens][n_kv_heads][head_dim], of the shape's type and strides; q: [n_queries][n_heads][head_dim] of its
   type, without gaps, or NULL, when n_heads does not matter. center, channel_scale: [n_kv_heads][head_dim], one may be
   NULL. No tokens: 0 and 1. The shape's format, centre and scale do not matter. TQKV_NOT_FINITE: NaN, infinity or a
   magnitude beyond 1e12. */
TQKV_API tqkv_result tqkv_calibrate(const tqkv_store *shape, const void *src, int n_tokens, const void *q, int n_heads,
                                    int n_queries, tqkv_pairs pairs, float *center, float *channel_scale);
/* Measures what the shape's format, centre and scale would add to the logits: the standard deviation of q.(k' -
   k)/sqrt(head_dim) over the rows k, root mean square over the queries that read the head. 20 in the first layer ruins
   Qwen2.5-Coder-0.5B, 5 costs 0.25 nats, 0.7 costs 0.03, or 0.003 with exact ends. Rows and
   queries as tqkv_calibrate's, q not NULL; noise: [n_kv_heads], zeros for no tokens or queries, INFINITY if rows decode
   to NaN or q.(k' - k) is beyond a float. */
TQKV_API tqkv_result tqkv_logit_noise(const tqkv_store *shape, const void *src, int n_tokens, const void *q,
                                      int n_heads, int n_queries, double *noise);

/* As tqkv_cache_save and tqkv_cache_load, for the positions [position, position + n_positions) of one store, in the
   caller's memory: a sequence leaves a pool of pages and comes back, or moves to another machine. The bytes depend on
   what these positions hold, not on where it lies: a snapshot of a paged store loads into other pages, a linear store
   or a ring. */
TQKV_API tqkv_result tqkv_store_save(const tqkv_store *s, int64_t position, int n_positions, tqkv_write write,
                                     void *user);
/* The snapshot must be of as many positions, of a store with the same format, head_dim, n_kv_heads, rotation,
   block_scale, centre and scale, else TQKV_INVALID_ARGUMENT. They may have been other positions: rows come back in
   their order, to where there is room. A page may not occur twice among those written. TQKV_CORRUPT: a missing or
   changed byte. After TQKV_CORRUPT or TQKV_IO these positions may hold anything; all others are as they were. */
TQKV_API tqkv_result tqkv_store_load(const tqkv_store *s, int64_t position, int n_positions, tqkv_read read,
                                     void *user);

/* >>rotate
   y = R(s*x)/sqrt(D) to TQKV_ROTATED, and its inverse x = s*R(y)/sqrt(D) to TQKV_ORIGINAL, in place; rows:
   [n_rows][head_dim]. NaN and Inf spread. For an engine that passes queries or takes outputs in the basis of the codes,
   or folds the rotation into its weights. */
TQKV_API tqkv_result tqkv_rotate(float *rows, int n_rows, int head_dim, tqkv_basis to);

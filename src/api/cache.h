/* >>cache
   A cache that owns its memory: one layer's keys and values, and their positions. */
typedef struct tqkv_cache tqkv_cache;
typedef struct tqkv_store tqkv_store; /* see >>store */
typedef struct tqkv_metal tqkv_metal; /* see >>metal */
typedef struct tqkv_cache_strides {
    tqkv_strides k, v, q, out;
} tqkv_cache_strides;
typedef struct tqkv_cache_desc {
    /* The shape, and how many positions it holds. */
    int head_dim, n_kv_heads, n_heads, capacity;
    int value_dim; /* head_dim of the values; 0 = head_dim */
    bool ring;     /* keep the newest `capacity` positions */
    bool shared;  /* the keys are the values, as MLA's latent is. value_format and value_dim: those of the keys, or 0 */
    int tail_dim; /* further dimensions of each key, in a stream of their own, as the RoPE part of MLA; 0: none */

    /* How positions are kept. */
    tqkv_format key_format, value_format, tail_format; /* tail_format: 0 = F16 */
    /* Exact ends: so many of the first positions (a model's attention sinks), and of the newest before each query (its
       recent window), are kept in fp16, too, and read from there: most of the weight is there. More than the capacity
       counts as the capacity; F16 streams and the tail need none. There are halves of the newest for 64 queries of one
       call; an append of more tokens makes room for as many, on a GPU for 512 at most. After truncate, remove and keep
       the newest may be left as codes until new ones come.
       Halves hold no value beyond 65504, and of a row that is all below 2^-17 less than codes do: here and while a
       cache learns (see calibrate) an append of such a row is TQKV_NOT_FINITE, and nothing is appended. */
    int exact_first, exact_last;
    /* Calibration: the cache learns centre (mean) and scale of the channels of its keys (tqkv_calibrate) from so many
       of its first positions, without the exact_first. 0: not; else at least 16. No more than a quarter of the
       capacity, or 16; a ring refuses more. Only new positions count, whose values (of a shared stream the row) differ
       from those of the position before by more than a quarter of their squared length: one token again and again,
       padding and blanks would teach scales that ruin what follows. With fewer than 64 new ones (of a `calibrate` below
       128, fewer than half, or 16) all positions count, for scales in [1/2, 3/2]. Until the append that learns, keys
       and values are halves as they came, and attention is exact. That append encodes them; queries at positions before
       still read the halves, until the next append frees them (with non_causal, until this one). What it has learned
       counts from that append on: tqkv_cache_truncate, or tqkv_cache_keep with no more than 64 positions behind that
       point, to a position before it brings the halves back, as if what is taken had never come. The codes are the same
       however positions came. The stores of tqkv_cache_view have what it learned. On a GPU the halves' memory stays as
       long as the cache, because work under way may read it: a copy by tqkv_cache_fork, made when the cache has
       learned, has none. */
    int calibrate;
    tqkv_pairs pairs; /* of the rotary embedding: share a scale in what it learns */
    int rotary_dim;   /* as tqkv_store's */

    /* Centres (means) and scales of channels as tqkv_store's, copied; NULL: none. Of keys: [n_kv_heads][head_dim, then
       tail_dim]; of values: [n_kv_heads][value_dim], NULL if the keys are the values, which then have those of the
       keys. A cache that is given one of them does not learn. Snapshots keep them; tqkv_cache_bytes does not count
       them. */
    const float *key_center, *key_scale, *value_center, *value_scale;

    /* Attention, as the fields of tqkv_attention. */
    int window;
    float scale, softcap;
    const float *sinks;         /* [n_heads] or NULL; copied */
    bool non_causal;            /* every query sees all resident positions: for cross-attention */
    tqkv_type type;             /* of k, v, q and out */
    tqkv_cache_strides strides; /* of the same rows */

    /* Resources. */
    tqkv_parallel parallel;
    tqkv_allocator allocator; /* for the cache and its scratch */
    tqkv_metal *metal;        /* a context that holds the cache and runs append and attend; NULL = the processor */
    int matrix_group;         /* on a GPU: as that of tqkv_metal_attention */
    uint64_t tag;             /* the caller's name for the model, 0: none; a snapshot or a fork of another is refused */
} tqkv_cache_desc;

/* A desc with formats, calibrate 512, exact_first 4 and exact_last 128 filled in; the caller adds the shape, of 16
   positions or more. Bits a value, with norms, at head_dim 64 / 128 / 256. */
typedef enum tqkv_preset {
    TQKV_SAFE = 0, /* I8 keys, TQ4 values: 6.5 / 6.25 / 6.19 */
    TQKV_SMALL,    /* TQ5, TQ3: 4.5 / 4.25 / 4.13. TQ4 for both: 1.5 to 2.1 times the loss, 0.8 to 0.9 of the time */
    TQKV_TINY      /* TQ3, TQ2: 3 / 2.75 / 2.63 */
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
/* The newest n_queries positions attend; q: [n_queries][n_heads][head_dim, then tail_dim], out: with value_dim. Nothing
   to do for 0. TQKV_OUT_OF_RANGE, and nothing is written, where a query's window, or a half that it reads, is gone. */
TQKV_API tqkv_result tqkv_cache_attend(tqkv_cache *c, const void *q, int n_queries, void *out);
TQKV_API int64_t tqkv_cache_end(const tqkv_cache *c); /* positions appended; 0 for NULL */
typedef struct tqkv_attention tqkv_attention;         /* see >>attention */
/* What tqkv_cache_attend with so many queries attends to, as it is now: for tqkv_attend with a tree or a list, for
   slices and batches of caches. Its positions are [end - kv_len, end); it holds until the next append or edit. Refuses
   what that call refuses for the halves that it needs, and TQKV_OUT_OF_RANGE, too, if nothing is resident, or if the
   queries stand on both sides of the position at which the cache learned: then they read different stores. A view of
   the newest query with a larger n_queries reads codes for all of them. With 0 queries it refuses nothing and has the
   stores of the codes, with centre and scale, learned or given. */
TQKV_API tqkv_result tqkv_cache_view(const tqkv_cache *c, int n_queries, tqkv_attention *out);
/* Codes and norms of all streams, and the halves kept besides, now; 0 for NULL. */
TQKV_API size_t tqkv_cache_bytes(const tqkv_cache *c);
/* Forgets the positions from `end` on. A ring cannot restore overwritten positions: TQKV_OUT_OF_RANGE for an end before
   the oldest resident position. 0 is always valid and empties the cache, which forgets what it has learned itself and
   learns anew; a copy keeps what it was made with. With a window the next query that is answered
   stands at the oldest resident position + window - 1 or behind. */
TQKV_API tqkv_result tqkv_cache_truncate(tqkv_cache *c, int64_t end);
/* Removes the positions [first, first + count); those behind move down, with their codes as they are: a key keeps the
   rotary embedding of its old position. For linear caches; TQKV_UNSUPPORTED for a ring. */
TQKV_API tqkv_result tqkv_cache_remove(tqkv_cache *c, int64_t first, int64_t count);
/* Of the newest n positions, numbered 0 to n - 1 from the oldest, keeps those named and forgets the others. kept:
   [n_kept], ascending. For a tree of drafts after its verification. TQKV_OUT_OF_RANGE if n positions are not resident.
   Windows as after tqkv_cache_truncate. */
TQKV_API tqkv_result tqkv_cache_keep(tqkv_cache *c, int n, const int *kept, int n_kept);
/* A copy with the resident positions at their places. One that is made between an append that learns and the next
   refuses queries that need the halves (TQKV_OUT_OF_RANGE), as a snapshot does. One that still learns does so from no
   fewer positions than the cache. desc: NULL, or nonzero fields for what the copy has otherwise: capacity
   (TQKV_OUT_OF_RANGE if too small for them), ring, formats of the streams (as tqkv_store_convert, on the hook's
   threads), type (not back to TQKV_TYPE_F32, which is 0), strides, sinks, parallel, allocator, metal, matrix_group,
   non_causal, a tag. Its other nonzero fields must match. So a full linear cache grows, or with ring = true goes on
   as a ring, and one that needs less memory goes on in fewer bits. *out is NULL on failure. */
TQKV_API tqkv_result tqkv_cache_fork(const tqkv_cache *c, const tqkv_cache_desc *desc, tqkv_cache **out);

/* Both return the bytes moved, fewer at the end of a file or on failure; tqkv calls again until all or 0 bytes move. */
typedef size_t (*tqkv_write)(void *user, const void *bytes, size_t n);
typedef size_t (*tqkv_read)(void *user, void *bytes, size_t n);

/* Writes the resident positions. The bytes depend only on the content, not on machine, allocator or threads. After
   TQKV_IO the output is no snapshot: write to a temporary file, then rename it. */
TQKV_API tqkv_result tqkv_cache_save(const tqkv_cache *c, tqkv_write write, void *user);
/* desc, never NULL, supplies what a snapshot lacks: type (zero is TQKV_TYPE_F32), strides, parallel, allocator, metal,
   matrix_group, non_causal, and sinks for the snapshot's n_heads, or a tag. Its other nonzero fields must
   match, else TQKV_INVALID_ARGUMENT; the tags, too, unless one is 0. TQKV_CORRUPT: a missing or changed byte, or
   another version of tqkv; TQKV_EXPLAIN says which. *out is NULL on failure. */
TQKV_API tqkv_result tqkv_cache_load(const tqkv_cache_desc *desc, tqkv_read read, void *user, tqkv_cache **out);

/* tqkv.h - v0.1.0 - a quantised KV cache and attention straight from its codes. MIT licence, see the end of this file.

   An LLM's KV cache holds a key and a value vector per past token and KV head. tqkv stores them in 2 to 8 bits a value
   and computes attention from the stored codes, without unpacking the cache first.

   DO THIS TO USE IT

     In exactly one C or C++ file, before the include:

         #define TQKV_IMPLEMENTATION
         #include "tqkv.h"

     Everywhere else, the include alone. Keep the name tqkv.h: the file includes itself. That one file needs xxhash.h
     0.8.0 or later (Debian libxxhash-dev, Homebrew xxhash, or a copy beside tqkv.h), and the program links with -lm:

         cc -O2 app.c -lm

   EXAMPLE

         tqkv_cache_desc desc = tqkv_cache_preset(TQKV_SAFE); // or TQKV_SMALL, TQKV_TINY; {0}: all defaults
         desc.head_dim = 128;
         desc.n_kv_heads = 8;
         desc.n_heads = 32;
         desc.capacity = 4096;                    // positions
         tqkv_cache *cache;
         if (tqkv_cache_create(&desc, &cache) != TQKV_OK) return 1;
         tqkv_cache_append(cache, k, v, 1);       // k, v: [1 token][8 KV heads][128]
         tqkv_cache_attend(cache, q, 1, out);     // q, out: [1 query][32 heads][128]
         tqkv_cache_destroy(cache);

   CONTENTS (search for the tag; those of the implementation stand at its beginning)

     >>formats        formats and their sizes
     >>result         result codes
     >>common         strides, hooks for memory and threads
     >>cache          a cache that owns its memory; save and load
     >>store          one stream in the caller's memory: encode, decode, probe, calibrate, convert; save and load
     >>rotate         the rotation alone
     >>attention      attention over two stores, whole or in slices
     >>index          scores of an index, and the choice of blocks by them
     >>isa            the instruction set in use
     >>metal          all of it on Apple's GPUs, with tqkv_metal.m
     >>metal-plan     the same as plans, for engines that dispatch kernels themselves

   BUILD OPTIONS (define before the include that has TQKV_IMPLEMENTATION)

     TQKV_STATIC            every function is static: private to the including file
     TQKV_API               linkage of the public functions, by default `extern`. In a shared library compiled with
                            -fvisibility=hidden `__attribute__((visibility("default")))` shows them alone
     TQKV_EXPLAIN(text)     receives the reason of a refused call, a string that names the argument, as in
                            fprintf(stderr, "tqkv: %s\n", text). Default: nothing
     TQKV_NO_AVX512         leaves AVX-512 out: half the code, half the time to compile it (see docs/building.md)
     TQKV_NO_AVX2           leaves both out, because AVX-512 takes short rows from AVX2: a quarter of the code
     TQKV_WINDOWS_AVX       puts both in with gcc on Windows, whose stack does not suit its AVX code (GCC bug 54412):
                            with a patched gcc, as Debian's and MSYS2's, or -Wa,-muse-unaligned-vector-move
     TQKV_METAL             declares the calls of tqkv_metal.m. On Apple's systems it is there, unless TQKV_NO_METAL is
                            defined
     TQKV_NO_IMPLEMENTATION makes TQKV_IMPLEMENTATION void: for a build that compiles files which define it, and links
                            them with one object
     TQKV_ALLOW_FAST_MATH   compiles despite -ffast-math or a part of it. Codes and norms may then differ from other
                            builds and backends. NaN or Inf in attention is undefined.

     Codes and norms are the same bytes on every backend, compiler and optimisation level. The caller's floating-point
     mode has no effect: encoding sets round-to-nearest without flush-to-zero, then restores the mode.

   THREADS

     Calls that only read an object (attend, decode, save, the getters) may run at once. A call that writes a cache
     (append, truncate, destroy) needs exclusive access to it. Different objects are independent.
     A store is the memory of its slots: calls on one store, or on stores over the same pool, may run at once if none
     writes a slot that another writes or sees. So two threads may encode into different slots, and one may encode a
     position while others attend to those before it.
     The only hidden state is the choice of an instruction set, made once. The hook tqkv_parallel runs tasks of one call
     on the caller's threads, whose number changes no bit. A call takes at most 64 KiB of stack.

   MATHEMATICS

     Rotation: y = R(s*x)/sqrt(D), with random signs s and a symmetric Hadamard matrix R: the Walsh-Hadamard transform
     or, where D is no power of two, its product with a matrix of order 12, 20, 28 or 36. It makes each coordinate of a
     vector close to Gaussian. Quantiser: Lloyd-Max codebooks for N(0,1) (S. Lloyd, "Least squares quantization in PCM",
     1982), or a uniform grid for I8. TurboQuant (A. Zandieh et al., 2025) pairs the two in this way. Rotated keys and
     rotated queries keep their dot product. Attention sums rotated values and rotates the result back once a head.
     Attention: one-pass softmax with a running maximum (M. Milakov and N. Gimelshein, 2018).
*/

#ifndef TQKV_H
#define TQKV_H

#define TQKV_VERSION_MAJOR 0
#define TQKV_VERSION_MINOR 1
#define TQKV_VERSION_PATCH 0

/* >>formats
   Bits count the stored code alone. Norms (float32) add 32 bits a row; from head_dim 512 on, 32 bits per 256 values;
   for I8, 32 bits per 128 values.

     format      bits  code of a value               row of D values, in bytes
     F16           16  IEEE half; rotated if asked   2*D, little-endian; beyond +-65504 clamped to it
     TQ4            4  index into 16 centroids       D/2; element 2i in the low nibble of byte i
     TQ5            5  index into 32 centroids       D/2 low nibbles, then D/8 of fifth bits
     TQ6            6  index into 64 centroids       D/2 low nibbles, then D/4 of upper bit pairs
     TQ8            8  index into 256 centroids      D
     TQ5_BYTES   5->8  as TQ5                        D, upper bits zero (the layout of existing caches)
     TQ6_BYTES   6->8  as TQ6                        D, upper bits zero
     I8             8  signed byte, uniform grid     D; more accurate than TQ8 at the same size
     TQ3            3  index into 8 centroids        D/4 low bit pairs, then D/8 of third bits
     TQ2            2  index into 4 centroids        D/4; element 4i in the lowest pair of bits of byte i             */
typedef enum tqkv_format {
    TQKV_FORMAT_DEFAULT = 0, /* keys: I8, values: TQ4 */
    TQKV_F16 = 1,
    TQKV_TQ4,
    TQKV_TQ5,
    TQKV_TQ6,
    TQKV_TQ8,
    TQKV_TQ5_BYTES,
    TQKV_TQ6_BYTES,
    TQKV_I8,
    TQKV_TQ3,
    TQKV_TQ2
} tqkv_format;

#define TQKV_MAX_HEAD_DIM 1024

/* The type of rows that calls read and write. */
typedef enum tqkv_type {
    TQKV_TYPE_F32 = 0, /* float */
    TQKV_TYPE_F16,     /* IEEE half */
    TQKV_TYPE_BF16     /* bfloat16: the upper half of a float */
} tqkv_type;

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__APPLE__) && !defined(TQKV_METAL) && !defined(TQKV_NO_METAL)
#define TQKV_METAL
#endif

#ifndef TQKV_API
#ifdef TQKV_STATIC
#define TQKV_API static __attribute__((unused))
#else
#define TQKV_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

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

/* >>attention
   out = sum_j softmax_j( cap( scale * q.k_j ) ) v_j,   cap(x) = softcap > 0 ? softcap * tanh(x/softcap) : x

   Query head h reads KV head h / (n_heads/n_kv_heads): MHA, GQA and MQA. Query i is at position end - n_queries + i. It
   sees the resident positions up to its own (a causal mask); a window limits them to the newest `window`. A query that
   sees nothing gives zeros.
   With non_causal it sees those behind it, too: all resident ones or, under a window, those of which it is at most
   window - 1 positions away in either direction. Without a window its own position then does not matter, and may not be
   resident: for cross-attention. To let a part of a prompt see itself, attend with `end` behind that part.
   Slots that no query sees change nothing, whatever they hold.
   A query gets the same bits on every processor, with any compiler, any number of threads, alone and beside any others,
   in a call and in a batch (batch invariance). Queries and weights are integers of 16 bits, codes integers of 8
   bits, with exact sums; F16 and TQ8 are multiplied as floats in a fixed order. A NaN is 0x7fc00000.
   The relative L2 error against double precision with the integer centroids (docs/formats.md) is at most 2e-4 plus 5e-5
   times the standard deviation of the scores, at any length. For F16 and TQ8, and on a GPU against what tqkv_decode
   gives, it is at most 2e-5; beyond a deviation of 10, 2e-6 times that. */

/* Block-sparse attention: the blocks that a query sees. */
typedef struct tqkv_list {
    /* [n_queries][heads][length], or NULL: all positions. Ascending numbers of blocks, the first -1 ends a row; block b
       is the positions from b * block on. A query sees what it would see without a list, if it is in a block of its row
       or among the `newest` positions that it would see. Blocks beyond the end, and positions that are gone, are
       nothing. A list that names all blocks gives the result without a list, bit for bit. */
    const int32_t *rows;
    int length;
    int heads;  /* 0 = 1, or n_kv_heads: a row for each */
    int block;  /* 1, 4, 16, 64 or 128 positions */
    int newest; /* so many of the newest are seen besides */
} tqkv_list;

/* Positions that are kept in fp16 besides their codes, at one end of the context. */
typedef struct tqkv_ends {
    const tqkv_store *keys, *values;
    const tqkv_store *tail; /* of the first positions alone */
    int n;                  /* so many of the first positions, or of the newest before each query */
    int64_t from;           /* of the newest: none below it, as after a truncation; 0: none missing */
} tqkv_ends;

struct tqkv_attention {
    /* The streams. Same n_kv_heads; head_dim may differ. One stream may be both, as MLA's latent is: the same store, or
       two that describe the same bytes in the same way. Its rows are fetched once for scores and sums, and its centre
       is added back to both, as both are scaled. */
    const tqkv_store *keys, *values;
    /* More dimensions of each key, as MLA's RoPE part, or NULL: a stream with a format, rotation, centre and scale of
       its own, and n_kv_heads, capacity, ring and page table of the keys. A row of q is the keys' part, then the
       tail's; query_basis is that of each part. */
    const tqkv_store *tail;

    /* The queries, and where they stand. */
    int n_heads;   /* query heads, at least one */
    int n_queries; /* 0: the call reads and writes nothing */
    int64_t end;   /* positions appended so far */
    int kv_len;    /* resident positions, the newest; 0 = min(end, capacity), paged: min(end, n_pages * page_size) */

    /* What a query sees. */
    int window;        /* 0 = no window */
    bool whole_window; /* TQKV_OUT_OF_RANGE if a position of a query's window is gone; else it sees what is there */
    bool non_causal;   /* not with a tree */
    /* [n_queries], at most 64, or NULL. Of the newest n_queries positions query i sees position j of them only if bit j
       of tree[i] is set and j <= i: for drafts with several branches (a tree mask). Higher bits are ignored. */
    const uint64_t *tree;
    tqkv_list list;

    /* Scores. */
    float scale;   /* 0 = 1/sqrt(head_dim of the keys, with that of the tail) */
    float softcap; /* 0 = off */
    /* Learned attention sinks, [n_heads], or NULL: adds exp(sink) to the softmax's denominator; -INFINITY: no sink. */
    const float *sinks;

    /* Rows of q and out. Outputs are rounded once, at the end; too large for a half: infinity. Sums of slices are
       always float. */
    tqkv_type query_type, output_type;
    tqkv_strides query_strides, output_strides; /* sums of slices have no gaps */
    tqkv_basis query_basis;                     /* TQKV_ROTATED: q is rotated already */
    tqkv_basis output_basis;                    /* TQKV_ROTATED: leave the output rotated */

    /* Resources. */
    tqkv_parallel parallel;   /* zero = the calling thread alone */
    tqkv_allocator allocator; /* scratch; zero = malloc, free */

    /* Exact ends: the first positions (a model's attention sinks) and the newest (the recent window) in fp16 in place
       of their codes. A query at position p reads position j from

         first.keys, first.values    where j < first.n
         last.keys, last.values      else where j > p - last.n and j >= last.from
         keys, values                else

       A NULL store is passed over, as are all of a stream that is F16 itself.
       p is where the query stands in the sequence, also with a tree; with non_causal and no window, end - 1. All four
       are stores of F16: linear, paged or rings (multiples of 64 read fastest), with n_kv_heads, head_dim, centre and
       scale of the codes, and rotated if these are. Those of `first` hold the positions below first.n, those of `last`
       the newest last.n + n_queries - 1 of those up to `end`, else TQKV_OUT_OF_RANGE. If the keys are the values,
       first.keys and last.keys serve both. The tail is read from its own store. On a GPU these stores have no pages,
       and keys with a tail have none beside them.
       A ring forgets its first positions, but first.keys, first.values and, with a tail, first.tail (a store of the
       tail's kind) keep them: where all of these are given, those below first.n are seen as if they were resident.
       Streams of F16 need theirs for that, too. They are added apart from the others, before and after they are gone. A
       slice that begins with the oldest resident position has those that are gone. */
    tqkv_ends first, last;
};

/* q: [n_queries][n_heads][head_dim of the keys, then of the tail], out: [n_queries][n_heads][head_dim of the values].
   TQKV_NOT_FINITE if q holds NaN or Inf, or a sink is NaN or +Inf. A score, or a sum of values, beyond the range of
   float makes a result NaN or infinite. */
TQKV_API tqkv_result tqkv_attend(const tqkv_attention *a, const void *q, void *out);

/* Each item as tqkv_attend does it, to the same bits, in one use of the hook that is cut evenly: for many sequences, of
   different lengths and numbers of queries. q, out: [n_items]. parallel and allocator are those of items[0]. Outputs
   may not overlap. One bad item fails the call, and nothing is written. */
TQKV_API tqkv_result tqkv_attend_batch(const tqkv_attention *items, int n_items, const void *const *q,
                                       void *const *out);

/* Slices: the context cut into ranges that are attended apart (flash decoding, split-K; on other machines, in other
   formats, a prompt that many sequences share), merged in any order, and finished once:

     tqkv_attend_partial(&a, q, 0, 4096, out, max, sum);             // one slice
     tqkv_attend_partial(&b, q, 4096, 4096, out_2, max_2, sum_2);    // another
     tqkv_attend_merge(&a, out, max, sum, &b, out_2, max_2, sum_2);  // the first becomes both
     tqkv_attend_finish(&a, out, max, sum);                          // out: as tqkv_attend's, but for the last bits

   A slice is three arrays of floats without gaps. For each query and head: max, the largest score; sum, the sum of
   exp(score - max); out, the sum of exp(score - max) * value. Of a query that sees nothing in it: -INFINITY, 0, zeros.
   max, sum: [n_queries][n_heads]; out: with the values' head_dim behind. The values are those of the rotated basis,
   whatever the format: scaled, without their centre, rotated. So slices of all formats merge, of a cache that still
   learns and of one that has learned, too. */

/* Attends positions [first, first + count), all resident, else TQKV_OUT_OF_RANGE. Leaves the sinks and the values'
   centre to tqkv_attend_finish. */
TQKV_API tqkv_result tqkv_attend_partial(const tqkv_attention *a, const void *q, int64_t first, int count, float *out,
                                         float *max, float *sum);
/* out, max and sum, attended with `a`, become both slices. src: what src_out, src_max and src_sum were attended with.
   TQKV_INVALID_ARGUMENT where the two differ in n_queries, n_heads, n_kv_heads or the values' head_dim, scale or
   centre. This call and the next read only the shapes of keys and values, and the values' scale and centre. */
TQKV_API tqkv_result tqkv_attend_merge(const tqkv_attention *a, float *out, float *max, float *sum,
                                       const tqkv_attention *src, const float *src_out, const float *src_max,
                                       const float *src_sum);
/* Adds the sinks, divides, rotates back, scales, and adds the values' centre, as tqkv_attend with `a` does. */
TQKV_API tqkv_result tqkv_attend_finish(const tqkv_attention *a, float *out, const float *max, const float *sum);

/* >>index
   An index chooses the positions that a query attends to. It has keys of its own, one for each `ratio` positions of the
   context, and a few heads score them:

       s(i, j) = sum_h weights[i][h] * f( q(i, h).k(j) ),   f(x) = max(x, 0) with relu, else x

   The score of a block is the largest, or the mean, of the scores of its keys that the query sees. Scores have the same
   bits on every processor, alone and among other queries. The error of a key's score against double precision with the
   integer centroids is at most 1e-4 of sum_h |weights[i][h] f(q.k)|, plus 2e-5 of sum_h |weights[i][h]| |q(i, h)|
   |k(j)| if the products of a few heads nearly vanish. For F16, TQ8, and any format on a GPU: 2e-5 and 2e-7. */
typedef enum tqkv_pool { TQKV_POOL_MAX = 0, TQKV_POOL_MEAN } tqkv_pool;
typedef struct tqkv_index {
    const tqkv_store *keys; /* n_kv_heads 1, any format */
    int n_heads, n_queries; /* query heads of the index, at least one; without queries a call does nothing */
    int64_t end;            /* keys appended so far */
    int kv_len;             /* resident keys, as tqkv_attention's */
    int ratio;              /* key j stands for the `ratio` positions from j * ratio on. 0 = 1 */
    int64_t positions; /* of the context so far; 0 = end * ratio. Query i is at positions - n_queries + i and sees the
                          resident keys whose positions are all at or before its own */
    const float *weights; /* [n_queries][n_heads] or NULL: 1 */
    bool relu;
    int block; /* keys a block; 0 = 1 */
    tqkv_pool pool;
    int first, newest; /* the number of first blocks, and of newest ones that a query sees, that are always chosen */
    tqkv_type query_type;
    tqkv_basis query_basis;
    tqkv_parallel parallel;
    tqkv_allocator allocator; /* scratch, for some heads and queries at a time */
} tqkv_index;

/* q: [n_queries][n_heads][head_dim]; scores: [n_queries][number of blocks up to end], -INFINITY where a query sees no
   key of a block. TQKV_NOT_FINITE if q or weights hold NaN or Inf. */
TQKV_API tqkv_result tqkv_index_scores(const tqkv_index *x, const void *q, float *scores);
/* Writes the k best blocks of each query in ascending order, then -1. Of blocks with equal scores the lower is better;
   a block with -INFINITY is never chosen. If `first` and `newest` name more than k blocks, the lower ones are chosen.
   scores: as above, list: [n_queries][k]. Reads only the shape of keys. TQKV_NOT_FINITE if the score of a block that
   its query sees is NaN. */
TQKV_API tqkv_result tqkv_index_choose(const tqkv_index *x, const float *scores, int k, int32_t *list);

/* >>isa
   The instruction set in use: "avx512" (with VBMI and VNNI), "avx2" (with FMA), "neon" or "scalar". The first call
   chooses the best set of the processor, or the one named by the environment variable TQKV_ISA: where that one is not
   there, TQKV_EXPLAIN gets a sentence. The bits of all results are the same in all sets. */
TQKV_API const char *tqkv_isa_name(void);
/* For tests: uses that set from now on, in all threads. NULL: chooses again. TQKV_INVALID_ARGUMENT for an unknown name,
   TQKV_UNSUPPORTED if the processor lacks the set. */
TQKV_API tqkv_result tqkv_isa_force(const char *name);

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

#ifdef TQKV_METAL
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

#endif /* TQKV_METAL */

#ifdef __cplusplus
}
#endif
#endif /* TQKV_H */

/* ---- The implementation starts here: stop reading if you only want the API. ----

   It is joined from the files of src/, one a tag: store.h >>store-code. Each uses what
   stands above it, and begins by saying what it is for. Each instruction set compiles the loops again.

     >>tables, >>backend, >>needs, >>exact, >>store-code, >>set
     >>rotate-code, >>codec, >>encode
     >>attend, >>plain
     >>kernels, >>k-softmax, >>k-widen, >>k-rotate, >>k-norms, >>k-search, >>k-quantise, >>k-halves, >>k-rows
     >>set-avx2, >>set-avx512, >>set-neon, >>integer-avx512, >>integer-avx2, >>integer-neon, >>isa-code
     >>attention-code, >>visible, >>tile, >>walk, >>gather, >>query, >>job
     >>convert, >>measure, >>calibrate, >>attend-calls, >>index-code
     >>cache-code, >>cache-calibrate, >>cache-calls, >>cache-edit, >>snapshot
     >>licence                                                                                                        */

#ifdef TQKV_NO_IMPLEMENTATION
#undef TQKV_IMPLEMENTATION
#endif

#if (defined(TQKV_IMPLEMENTATION) || defined(TQKV_SHARED)) && !defined(TQKV__SHARED)
#define TQKV__SHARED

/* >>tables: one row a format, and tables: one source for C, Objective-C and the Metal shaders. TQKV_SHARED makes it
   visible without the implementation. */
#define TQKV_TABLE_VERSION 9 /* changes with the tables, the argument structs, or their meaning in the kernels */

#ifndef TQKV_TABLE
#ifdef __METAL_VERSION__
#define TQKV_TABLE constant
#else
#define TQKV_TABLE static const
#endif
#endif

/* One row a head_dim D = m * n, n a power of two.

   m          order of the Hadamard matrix that the rotation applies across its m subrows of n values; 1: none
   grid       values that share a norm of I8: the largest multiple of 16, at most 128, that divides D
   root       sqrt(D) and 1/sqrt(D), rounded to float: all digits, for machines that compute in wider registers */
// clang-format off
#define TQKV__SIZES(row, x)                                                           \
    /*        D   m grid root                       1/root */                         \
    row(x,   32,  1,  32, 5.656854152679443359375f,  0.17677669227123260498046875f  ) \
    row(x,   48, 12,  48, 6.928203105926513671875f,  0.1443375647068023681640625f   ) \
    row(x,   64,  1,  64, 8.0f,                      0.125f                         ) \
    row(x,   80, 20,  80, 8.94427204132080078125f,   0.11180339753627777099609375f  ) \
    row(x,   96, 12,  96, 9.79795932769775390625f,   0.1020620763301849365234375f   ) \
    row(x,  112, 28, 112, 10.58300495147705078125f,  0.094491116702556610107421875f ) \
    row(x,  128,  1, 128, 11.31370830535888671875f,  0.088388346135616302490234375f ) \
    row(x,  144, 36,  48, 12.0f,                     0.083333335816860198974609375f ) \
    row(x,  160, 20,  80, 12.6491107940673828125f,   0.079056940972805023193359375f ) \
    row(x,  192, 12,  96, 13.85640621185302734375f,  0.07216878235340118408203125f  ) \
    row(x,  224, 28, 112, 14.96662998199462890625f,  0.066815309226512908935546875f ) \
    row(x,  256,  1, 128, 16.0f,                     0.0625f                        ) \
    row(x,  288, 36,  96, 16.970561981201171875f,    0.0589255653321743011474609375f) \
    row(x,  320, 20,  80, 17.8885440826416015625f,   0.055901698768138885498046875f ) \
    row(x,  384, 12, 128, 19.5959186553955078125f,   0.05103103816509246826171875f  ) \
    row(x,  448, 28, 112, 21.1660099029541015625f,   0.0472455583512783050537109375f) \
    row(x,  512,  1, 128, 22.6274166107177734375f,   0.0441941730678081512451171875f) \
    row(x,  576, 36,  96, 24.0f,                     0.0416666679084300994873046875f) \
    row(x,  640, 20, 128, 25.298221588134765625f,    0.0395284704864025115966796875f) \
    row(x,  768, 12, 128, 27.7128124237060546875f,   0.036084391176700592041015625f ) \
    row(x,  896, 28, 128, 29.9332599639892578125f,   0.0334076546132564544677734375f) \
    row(x, 1024,  1, 128, 32.0f,                     0.03125f                       )
// clang-format on

/* One column of the row of D; without a row 0. A constant D gives a constant. */
#define TQKV__MATRIX_ORDER(D)                              (TQKV__SIZES(TQKV__ORDER_OF, D) 0)
#define TQKV__GRID_DIM(D)                                  (TQKV__SIZES(TQKV__GRID_DIM_OF, D) 0)
#define TQKV__SQRT(D)                                      (TQKV__SIZES(TQKV__SQRT_OF, D) 0.0f)
#define TQKV__INV_SQRT(D)                                  (TQKV__SIZES(TQKV__INV_SQRT_OF, D) 0.0f)
#define TQKV__ORDER_OF(D, size, m, grid, root, inverse)    (D) == size ? m:
#define TQKV__GRID_DIM_OF(D, size, m, grid, root, inverse) (D) == size ? grid:
#define TQKV__SQRT_OF(D, size, m, grid, root, inverse)     (D) == size ? root:
#define TQKV__INV_SQRT_OF(D, size, m, grid, root, inverse) (D) == size ? inverse:
/* Whether R has a matrix across its subrows. A library for Metal has no instruction that counts bits, which the short
   form is. */
#ifdef __METAL_VERSION__
#define TQKV__HAS_MATRIX(D) (TQKV__MATRIX_ORDER(D) > 1)
#else
#define TQKV__HAS_MATRIX(D) (((D) & ((D)-1)) != 0)
#endif

/* 1e-10 as a float. A row whose norm is not above this is stored as zeros. */
#define TQKV__MIN_NORM 1.00000001335143196001808973960578441619873046875e-10f
/* Halves kept besides of codes: a value of this size is beyond them, and a row of which all are below the least, about
   where a half loses more than the codes of 8 bits, is better off in codes. */
#define TQKV__BEYOND_HALVES 65520.0f
#define TQKV__LEAST_HALF    (1.0f / 131072.0f)
#define TQKV__NEXT_NORM     1.00000008274037092e-10f /* the next float: the least norm that is above */

/* One row a format, in the order of tqkv_format. C, the kernels and the shaders derive everything else from these rows.

   kind       HALF: IEEE halves, no norms, never rotated. BOOK: indices into a codebook. GRID: integers times a norm.
   main       bits of a code in the first field of a stored row
   upper      the highest bits of a code, in the second field, directly behind the first
   book       bits of the codebook; if main + upper is larger, the bits above are zero
   plain      1: a store may omit the rotation (`unrotated`)                                                         */
// clang-format off
#define TQKV__FORMATS(row, x)                                                  \
    /*     format          name         kind        main upper book plain */   \
    row(x, TQKV_F16,       "f16",       TQKV__HALF, 16,  0,    0,   0)         \
    row(x, TQKV_TQ4,       "tq4",       TQKV__BOOK,  4,  0,    4,   0)         \
    row(x, TQKV_TQ5,       "tq5",       TQKV__BOOK,  4,  1,    5,   1)         \
    row(x, TQKV_TQ6,       "tq6",       TQKV__BOOK,  4,  2,    6,   1)         \
    row(x, TQKV_TQ8,       "tq8",       TQKV__BOOK,  8,  0,    8,   1)         \
    row(x, TQKV_TQ5_BYTES, "tq5_bytes", TQKV__BOOK,  8,  0,    5,   1)         \
    row(x, TQKV_TQ6_BYTES, "tq6_bytes", TQKV__BOOK,  8,  0,    6,   1)         \
    row(x, TQKV_I8,        "i8",        TQKV__GRID,  8,  0,    0,   0)         \
    row(x, TQKV_TQ3,       "tq3",       TQKV__BOOK,  2,  1,    3,   0)         \
    row(x, TQKV_TQ2,       "tq2",       TQKV__BOOK,  2,  0,    2,   0)
// clang-format on

enum { TQKV__HALF = 1, TQKV__BOOK, TQKV__GRID };

/* One column of the row of f; without a row 8 main bits, else 0. A constant f gives a constant. */
#define TQKV__KIND(f)                                                   (TQKV__FORMATS(TQKV__KIND_OF, f) 0)
#define TQKV__MAIN_BITS(f)                                              (TQKV__FORMATS(TQKV__MAIN_OF, f) 8)
#define TQKV__UPPER_BITS(f)                                             (TQKV__FORMATS(TQKV__UPPER_OF, f) 0)
#define TQKV__BOOK_BITS(f)                                              (TQKV__FORMATS(TQKV__BOOK_OF, f) 0)
#define TQKV__PLAIN(f)                                                  (TQKV__FORMATS(TQKV__PLAIN_OF, f) 0)
#define TQKV__KIND_OF(f, format, name, kind, main, upper, book, plain)  (f) == format ? kind:
#define TQKV__MAIN_OF(f, format, name, kind, main, upper, book, plain)  (f) == format ? main:
#define TQKV__UPPER_OF(f, format, name, kind, main, upper, book, plain) (f) == format ? upper:
#define TQKV__BOOK_OF(f, format, name, kind, main, upper, book, plain)  (f) == format ? book:
#define TQKV__PLAIN_OF(f, format, name, kind, main, upper, book, plain) (f) == format ? plain:

/* Values that share a norm, in a row of D values. */
#define TQKV__NORM_DIM(kind, D) \
    ((kind) == TQKV__GRID ? TQKV__GRID_DIM(D) : (kind) == TQKV__BOOK && ((D) == 512 || (D) == 1024) ? 256 : (D))

/* One row a codebook: its bits, which are also part of the names of its tables. */
#define TQKV__BOOKS(row, x) row(x, 2) row(x, 3) row(x, 4) row(x, 5) row(x, 6) row(x, 8)
/* The codebook with that many bits, and its boundaries; TQ8's for any other number. */
#define TQKV__CODEBOOK(bits)              (TQKV__BOOKS(TQKV__CODEBOOK_OF, bits) tqkv__tables.codebook_8)
#define TQKV__BOUNDARIES(bits)            (TQKV__BOOKS(TQKV__BOUNDARIES_OF, bits) tqkv__tables.boundaries_8)
#define TQKV__CODEBOOK_OF(bits, number)   (bits) == number ? tqkv__tables.codebook_##number:
#define TQKV__BOUNDARIES_OF(bits, number) (bits) == number ? tqkv__tables.boundaries_##number:

/* What encoding tries on the scale of a row, in this order, and their number; see >>codec. */
#define TQKV__FACTORS(bits)              (TQKV__BOOKS(TQKV__FACTORS_OF, bits) tqkv__tables.factors_8)
#define TQKV__N_FACTORS(bits)            (TQKV__BOOKS(TQKV__N_FACTORS_OF, bits) 0)
#define TQKV__FACTORS_OF(bits, number)   (bits) == number ? tqkv__tables.factors_##number:
#define TQKV__N_FACTORS_OF(bits, number) (bits) == number ? (int)(sizeof tqkv__tables.factors_##number / sizeof(float)):
enum { TQKV__MOST_FACTORS = 5 };
/* Of 3 or 4 bits: from this factor to the largest a value crosses one boundary at most, the next being further away. */
#define TQKV__LEAST_CROSSING(bits) ((bits) == 3 ? 0.82f : 1.0f)

typedef struct tqkv__table_set {
    float codebook_2[4], codebook_3[8], codebook_4[16], codebook_5[32], codebook_6[64],
        codebook_8[256]; /* increasing */
    float boundaries_2[3], boundaries_3[7], boundaries_4[15], boundaries_5[31], boundaries_6[63], boundaries_8[255];
    float factors_2[1], factors_3[5], factors_4[5], factors_5[5], factors_6[5], factors_8[5];
    uint8_t signs[64]; /* bit j = (signs[j>>3] >> (j&7)) & 1: 1 flips element j modulo 512 */
    uint8_t hadamard_12[12][2], hadamard_20[20][3], hadamard_28[28][4],
        hadamard_36[36][5]; /* symmetric; bits of a row as those of signs: 1 is -1, 0 is 1 */
} tqkv__table_set;

/* Lloyd-Max quantisers of N(0,1). Float midpoints of the centroids differ from these boundaries in the last place.
   The factors leave the least error in Gaussian rows of 64 to 256 values. */
// clang-format off
TQKV_TABLE tqkv__table_set tqkv__tables = {
    {-1.5104176f, -0.4527800f, 0.4527800f, 1.5104176f},
    {-2.1519457f, -1.3439093f, -0.7560053f, -0.2450942f, 0.2450942f, 0.7560053f, 1.3439093f, 2.1519457f},
    {-2.7325896f, -2.0690172f, -1.6180464f, -1.2562312f, -0.9423405f, -0.6567591f, -0.3880483f, -0.1283950f, 0.1283950f, 0.3880483f,
     0.6567591f, 0.9423405f, 1.2562312f, 1.6180464f, 2.0690172f, 2.7325896f},
    {-3.2606790f, -2.6910589f, -2.3176743f, -2.0286608f, -1.7871646f, -1.5761599f, -1.3862739f, -1.2117410f, -1.0487242f, -0.8945114f,
     -0.7470884f, -0.6048936f, -0.4666676f, -0.3313550f, -0.1980377f, -0.0658849f, 0.0658849f, 0.1980377f, 0.3313550f, 0.4666676f,
     0.6048936f, 0.7470884f, 0.8945114f, 1.0487242f, 1.2117410f, 1.3862739f, 1.5761599f, 1.7871646f, 2.0286608f, 2.3176743f,
     2.6910589f, 3.2606790f},
    {-3.6996161f, -3.1907215f, -2.8640626f, -2.6161277f, -2.4129324f, -2.2388464f, -2.0853192f, -1.9471373f, -1.8208742f, -1.7041502f,
     -1.5952401f, -1.4928497f, -1.3959804f, -1.3038428f, -1.2157998f, -1.1313277f, -1.0499889f, -0.9714118f, -0.8952766f, -0.8213046f,
     -0.7492492f, -0.6788902f, -0.6100285f, -0.5424819f, -0.4760822f, -0.4106724f, -0.3461048f, -0.2822386f, -0.2189392f, -0.1560761f,
     -0.0935225f, -0.0311537f, 0.0311537f, 0.0935225f, 0.1560761f, 0.2189392f, 0.2822386f, 0.3461048f, 0.4106724f, 0.4760822f,
     0.5424819f, 0.6100285f, 0.6788902f, 0.7492492f, 0.8213046f, 0.8952766f, 0.9714118f, 1.0499889f, 1.1313277f, 1.2157998f,
     1.3038428f, 1.3959804f, 1.4928497f, 1.5952401f, 1.7041502f, 1.8208742f, 1.9471373f, 2.0853192f, 2.2388464f, 2.4129324f,
     2.6161277f, 2.8640626f, 3.1907215f, 3.6996161f},
    {-5.0652659f, -4.6836997f, -4.4467193f, -4.2715508f, -4.1311907f, -4.0132856f, -3.9111092f, -3.8205780f, -3.7390194f, -3.6645851f,
     -3.5959415f, -3.5320936f, -3.4722785f, -3.4158977f, -3.3624729f, -3.3116156f, -3.2630056f, -3.2163758f, -3.1715011f, -3.1281899f,
     -3.0862780f, -3.0456229f, -3.0061011f, -2.9676040f, -2.9300362f, -2.8933131f, -2.8573596f, -2.8221086f, -2.7874999f, -2.7534795f,
     -2.7199985f, -2.6870129f, -2.6544825f, -2.6223710f, -2.5906452f, -2.5592748f, -2.5282321f, -2.4974918f, -2.4670306f, -2.4368270f,
     -2.4068614f, -2.3771157f, -2.3475732f, -2.3182184f, -2.2890372f, -2.2600165f, -2.2311440f, -2.2024086f, -2.1737998f, -2.1453081f,
     -2.1169245f, -2.0886408f, -2.0604493f, -2.0323430f, -2.0043154f, -1.9763603f, -1.9484722f, -1.9206458f, -1.8928763f, -1.8651592f,
     -1.8374904f, -1.8098662f, -1.7822828f, -1.7547372f, -1.7272261f, -1.6997469f, -1.6722970f, -1.6448739f, -1.6174755f, -1.5900996f,
     -1.5627445f, -1.5354084f, -1.5080897f, -1.4807869f, -1.4534986f, -1.4262237f, -1.3989610f, -1.3717093f, -1.3444678f, -1.3172356f,
     -1.2900118f, -1.2627956f, -1.2355865f, -1.2083838f, -1.1811868f, -1.1539951f, -1.1268081f, -1.0996255f, -1.0724469f, -1.0452718f,
     -1.0180999f, -0.9909310f, -0.9637647f, -0.9366008f, -0.9094390f, -0.8822793f, -0.8551212f, -0.8279648f, -0.8008098f, -0.7736561f,
     -0.7465035f, -0.7193520f, -0.6922014f, -0.6650517f, -0.6379027f, -0.6107544f, -0.5836067f, -0.5564596f, -0.5293129f, -0.5021667f,
     -0.4750208f, -0.4478753f, -0.4207301f, -0.3935852f, -0.3664405f, -0.3392960f, -0.3121517f, -0.2850076f, -0.2578636f, -0.2307198f,
     -0.2035761f, -0.1764324f, -0.1492888f, -0.1221453f, -0.0950019f, -0.0678584f, -0.0407151f, -0.0135717f, 0.0135717f, 0.0407151f,
     0.0678584f, 0.0950019f, 0.1221453f, 0.1492888f, 0.1764324f, 0.2035761f, 0.2307198f, 0.2578636f, 0.2850076f, 0.3121517f,
     0.3392960f, 0.3664405f, 0.3935852f, 0.4207301f, 0.4478753f, 0.4750208f, 0.5021667f, 0.5293129f, 0.5564596f, 0.5836067f,
     0.6107544f, 0.6379027f, 0.6650517f, 0.6922014f, 0.7193520f, 0.7465035f, 0.7736561f, 0.8008098f, 0.8279648f, 0.8551212f,
     0.8822793f, 0.9094390f, 0.9366008f, 0.9637647f, 0.9909310f, 1.0180999f, 1.0452718f, 1.0724469f, 1.0996255f, 1.1268081f,
     1.1539951f, 1.1811868f, 1.2083838f, 1.2355865f, 1.2627956f, 1.2900118f, 1.3172356f, 1.3444678f, 1.3717093f, 1.3989610f,
     1.4262237f, 1.4534986f, 1.4807869f, 1.5080897f, 1.5354084f, 1.5627445f, 1.5900996f, 1.6174755f, 1.6448739f, 1.6722970f,
     1.6997469f, 1.7272261f, 1.7547372f, 1.7822828f, 1.8098662f, 1.8374904f, 1.8651592f, 1.8928763f, 1.9206458f, 1.9484722f,
     1.9763603f, 2.0043154f, 2.0323430f, 2.0604493f, 2.0886408f, 2.1169245f, 2.1453081f, 2.1737998f, 2.2024086f, 2.2311440f,
     2.2600165f, 2.2890372f, 2.3182184f, 2.3475732f, 2.3771157f, 2.4068614f, 2.4368270f, 2.4670306f, 2.4974918f, 2.5282321f,
     2.5592748f, 2.5906452f, 2.6223710f, 2.6544825f, 2.6870129f, 2.7199985f, 2.7534795f, 2.7874999f, 2.8221086f, 2.8573596f,
     2.8933131f, 2.9300362f, 2.9676040f, 3.0061011f, 3.0456229f, 3.0862780f, 3.1281899f, 3.1715011f, 3.2163758f, 3.2630056f,
     3.3116156f, 3.3624729f, 3.4158977f, 3.4722785f, 3.5320936f, 3.5959415f, 3.6645851f, 3.7390194f, 3.8205780f, 3.9111092f,
     4.0132856f, 4.1311907f, 4.2715508f, 4.4467193f, 4.6836997f, 5.0652659f},
    {-0.9815988f, 0.0000000f, 0.9815988f},
    {-1.7479275f, -1.0499573f, -0.5005497f, 0.0000000f, 0.5005497f, 1.0499573f, 1.7479275f},
    {-2.4008034f, -1.8435318f, -1.4371388f, -1.0992859f, -0.7995498f, -0.5224037f, -0.2582217f, 0.0000000f, 0.2582217f, 0.5224037f,
     0.7995498f, 1.0992859f, 1.4371388f, 1.8435318f, 2.4008034f},
    {-2.9758689f, -2.5043666f, -2.1731675f, -1.9079127f, -1.6816622f, -1.4812169f, -1.2990074f, -1.1302326f, -0.9716178f, -0.8207999f,
     -0.6759910f, -0.5357806f, -0.3990113f, -0.2646964f, -0.1319613f, 0.0000000f, 0.1319613f, 0.2646964f, 0.3990113f, 0.5357806f,
     0.6759910f, 0.8207999f, 0.9716178f, 1.1302326f, 1.2990074f, 1.4812169f, 1.6816622f, 1.9079127f, 2.1731675f, 2.5043666f,
     2.9758689f},
    {-3.4451688f, -3.0273920f, -2.7400952f, -2.5145300f, -2.3258894f, -2.1620828f, -2.0162282f, -1.8840057f, -1.7625122f, -1.6496952f,
     -1.5440449f, -1.4444151f, -1.3499116f, -1.2598213f, -1.1735638f, -1.0906583f, -1.0107003f, -0.9333442f, -0.8582906f, -0.7852769f,
     -0.7140697f, -0.6444593f, -0.5762552f, -0.5092820f, -0.4433773f, -0.3783886f, -0.3141717f, -0.2505889f, -0.1875076f, -0.1247993f,
     -0.0623381f, 0.0000000f, 0.0623381f, 0.1247993f, 0.1875076f, 0.2505889f, 0.3141717f, 0.3783886f, 0.4433773f, 0.5092820f,
     0.5762552f, 0.6444593f, 0.7140697f, 0.7852769f, 0.8582906f, 0.9333442f, 1.0107003f, 1.0906583f, 1.1735638f, 1.2598213f,
     1.3499116f, 1.4444151f, 1.5440449f, 1.6496952f, 1.7625122f, 1.8840057f, 2.0162282f, 2.1620828f, 2.3258894f, 2.5145300f,
     2.7400952f, 3.0273920f, 3.4451688f},
    {-4.8744828f, -4.5652095f, -4.3591350f, -4.2013707f, -4.0722382f, -3.9621974f, -3.8658436f, -3.7797987f, -3.7018022f, -3.6302633f,
     -3.5640175f, -3.5021860f, -3.4440881f, -3.3891853f, -3.3370443f, -3.2873106f, -3.2396907f, -3.1939384f, -3.1498455f, -3.1072339f,
     -3.0659504f, -3.0258620f, -2.9868525f, -2.9488201f, -2.9116746f, -2.8753363f, -2.8397341f, -2.8048042f, -2.7704897f, -2.7367390f,
     -2.7035057f, -2.6707477f, -2.6384267f, -2.6065081f, -2.5749600f, -2.5437535f, -2.5128620f, -2.4822612f, -2.4519288f, -2.4218442f,
     -2.3919885f, -2.3623444f, -2.3328958f, -2.3036278f, -2.2745269f, -2.2455802f, -2.2167763f, -2.1881042f, -2.1595539f, -2.1311163f,
     -2.1027826f, -2.0745450f, -2.0463962f, -2.0183292f, -1.9903379f, -1.9624162f, -1.9345590f, -1.9067610f, -1.8790177f, -1.8513248f,
     -1.8236783f, -1.7960745f, -1.7685100f, -1.7409817f, -1.7134865f, -1.6860220f, -1.6585855f, -1.6311747f, -1.6037875f, -1.5764221f,
     -1.5490764f, -1.5217490f, -1.4944383f, -1.4671427f, -1.4398612f, -1.4125923f, -1.3853351f, -1.3580886f, -1.3308517f, -1.3036237f,
     -1.2764037f, -1.2491911f, -1.2219851f, -1.1947853f, -1.1675909f, -1.1404016f, -1.1132168f, -1.0860362f, -1.0588593f, -1.0316859f,
     -1.0045155f, -0.9773478f, -0.9501827f, -0.9230199f, -0.8958592f, -0.8687003f, -0.8415430f, -0.8143873f, -0.7872329f, -0.7600798f,
     -0.7329278f, -0.7057767f, -0.6786266f, -0.6514772f, -0.6243286f, -0.5971806f, -0.5700331f, -0.5428862f, -0.5157398f, -0.4885937f,
     -0.4614481f, -0.4343027f, -0.4071577f, -0.3800128f, -0.3528683f, -0.3257239f, -0.2985797f, -0.2714356f, -0.2442917f, -0.2171479f,
     -0.1900042f, -0.1628606f, -0.1357171f, -0.1085736f, -0.0814302f, -0.0542868f, -0.0271434f, 0.0000000f, 0.0271434f, 0.0542868f,
     0.0814302f, 0.1085736f, 0.1357171f, 0.1628606f, 0.1900042f, 0.2171479f, 0.2442917f, 0.2714356f, 0.2985797f, 0.3257239f,
     0.3528683f, 0.3800128f, 0.4071577f, 0.4343027f, 0.4614481f, 0.4885937f, 0.5157398f, 0.5428862f, 0.5700331f, 0.5971806f,
     0.6243286f, 0.6514772f, 0.6786266f, 0.7057767f, 0.7329278f, 0.7600798f, 0.7872329f, 0.8143873f, 0.8415430f, 0.8687003f,
     0.8958592f, 0.9230199f, 0.9501827f, 0.9773478f, 1.0045155f, 1.0316859f, 1.0588593f, 1.0860362f, 1.1132168f, 1.1404016f,
     1.1675909f, 1.1947853f, 1.2219851f, 1.2491911f, 1.2764037f, 1.3036237f, 1.3308517f, 1.3580886f, 1.3853351f, 1.4125923f,
     1.4398612f, 1.4671427f, 1.4944383f, 1.5217490f, 1.5490764f, 1.5764221f, 1.6037875f, 1.6311747f, 1.6585855f, 1.6860220f,
     1.7134865f, 1.7409817f, 1.7685100f, 1.7960745f, 1.8236783f, 1.8513248f, 1.8790177f, 1.9067610f, 1.9345590f, 1.9624162f,
     1.9903379f, 2.0183292f, 2.0463962f, 2.0745450f, 2.1027826f, 2.1311163f, 2.1595539f, 2.1881042f, 2.2167763f, 2.2455802f,
     2.2745269f, 2.3036278f, 2.3328958f, 2.3623444f, 2.3919885f, 2.4218442f, 2.4519288f, 2.4822612f, 2.5128620f, 2.5437535f,
     2.5749600f, 2.6065081f, 2.6384267f, 2.6707477f, 2.7035057f, 2.7367390f, 2.7704897f, 2.8048042f, 2.8397341f, 2.8753363f,
     2.9116746f, 2.9488201f, 2.9868525f, 3.0258620f, 3.0659504f, 3.1072339f, 3.1498455f, 3.1939384f, 3.2396907f, 3.2873106f,
     3.3370443f, 3.3891853f, 3.4440881f, 3.5021860f, 3.5640175f, 3.6302633f, 3.7018022f, 3.7797987f, 3.8658436f, 3.9621974f,
     4.0722382f, 4.2013707f, 4.3591350f, 4.5652095f, 4.8744828f},
    {1.0f},
    {1.0f, 0.92f, 1.08f, 0.82f, 1.18f},
    {1.0f, 0.88f, 1.06f, 1.14f, 1.24f},
    {1.0f, 0.9f, 1.1f, 1.18f, 1.24f},
    {0.95f, 1.05f, 1.1f, 1.15f, 1.2f},
    {1.125f, 1.45f, 1.475f, 1.5f, 1.525f},
    {0xa7, 0x3b, 0x91, 0xf4, 0x6d, 0xc2, 0x58, 0x0e, 0xb3, 0x7f, 0x24, 0xd6, 0x89, 0x45, 0xea, 0x1c,
     0x63, 0xaf, 0xd8, 0x52, 0x97, 0x0b, 0xe1, 0x3d, 0x76, 0xc4, 0x19, 0xfe, 0x4a, 0x85, 0x2c, 0xdb,
     0xd3, 0x4e, 0xa8, 0x17, 0x9c, 0x5b, 0xe6, 0x31, 0x72, 0xb9, 0x0d, 0xf5, 0x43, 0x8a, 0x6e, 0xc7,
     0x58, 0x2f, 0x94, 0xe1, 0xb6, 0x3d, 0x0a, 0x7c, 0xc5, 0x61, 0xd8, 0x4f, 0xa3, 0x97, 0x1e, 0x85},
    {{0x02, 0x00}, {0xab, 0x0a}, {0xc8, 0x03}, {0x6e, 0x09}, {0x20, 0x0f}, {0xba, 0x05}, {0x8c, 0x0c}, {0xe6, 0x06},
     {0x3c, 0x02}, {0x96, 0x0b}, {0xf0, 0x08}, {0x5a, 0x0e}},
    {{0x02, 0x00, 0x00}, {0xab, 0xaa, 0x0a}, {0x08, 0x3c, 0x0f}, {0xae, 0x96, 0x05}, {0x20, 0xf3, 0x0c}, {0xba, 0x59, 0x06},
     {0x80, 0xcf, 0x03}, {0xea, 0x65, 0x09}, {0xf0, 0x02, 0x0f}, {0x5a, 0xab, 0x05}, {0xcc, 0xc8, 0x0c}, {0x66, 0x6e, 0x06},
     {0x3c, 0xe0, 0x03}, {0x96, 0x7a, 0x09}, {0xf0, 0xbc, 0x00}, {0x5a, 0xd6, 0x0a}, {0xcc, 0x33, 0x02}, {0x66, 0x99, 0x0b},
     {0x3c, 0x0f, 0x08}, {0x96, 0xa5, 0x0e}},
    {{0x02, 0x00, 0x00, 0x00}, {0xab, 0xaa, 0xaa, 0x0a}, {0xc8, 0xf0, 0x0f, 0x03}, {0x6e, 0x5a, 0xa5, 0x09}, {0x20, 0xc3, 0x3f, 0x0c},
     {0xba, 0x69, 0x95, 0x06}, {0x8c, 0x0c, 0xff, 0x00}, {0xe6, 0xa6, 0x55, 0x0a}, {0x30, 0x32, 0xfc, 0x03}, {0x9a, 0x9b, 0x56, 0x09},
     {0xc0, 0xc8, 0xf0, 0x0f}, {0x6a, 0x6e, 0x5a, 0x05}, {0x0c, 0x23, 0xc3, 0x0f}, {0xa6, 0xb9, 0x69, 0x05}, {0x3c, 0x8c, 0x0c, 0x0f},
     {0x96, 0xe6, 0xa6, 0x05}, {0xfc, 0x30, 0x32, 0x0c}, {0x56, 0x9a, 0x9b, 0x06}, {0xfc, 0xc3, 0xc8, 0x00}, {0x56, 0x69, 0x6e, 0x0a},
     {0xf0, 0x0f, 0x23, 0x03}, {0x5a, 0xa5, 0xb9, 0x09}, {0xc0, 0x3f, 0x8c, 0x0c}, {0x6a, 0x95, 0xe6, 0x06}, {0x0c, 0xff, 0x30, 0x02},
     {0xa6, 0x55, 0x9a, 0x0b}, {0x30, 0xfc, 0xc3, 0x08}, {0x9a, 0x56, 0x69, 0x0e}},
    {{0x02, 0x00, 0x00, 0x00, 0x00}, {0xab, 0xaa, 0xaa, 0xaa, 0x0a}, {0x08, 0xf3, 0xc3, 0xcf, 0x00}, {0xae, 0x59, 0x69, 0x65, 0x0a},
     {0x20, 0xcc, 0x0f, 0x3f, 0x03}, {0xba, 0x66, 0xa5, 0x95, 0x09}, {0x80, 0x30, 0x3f, 0xfc, 0x0c}, {0xea, 0x9a, 0x95, 0x56, 0x06},
     {0x0c, 0xc2, 0xfc, 0xf0, 0x03}, {0xa6, 0x6b, 0x56, 0x5a, 0x09}, {0x30, 0x08, 0xf3, 0xc3, 0x0f}, {0x9a, 0xae, 0x59, 0x69, 0x05},
     {0xcc, 0x20, 0xcc, 0x0f, 0x0f}, {0x66, 0xba, 0x66, 0xa5, 0x05}, {0x3c, 0x83, 0x30, 0x3f, 0x0c}, {0x96, 0xe9, 0x9a, 0x95, 0x06},
     {0xfc, 0x0c, 0xc2, 0xfc, 0x00}, {0x56, 0xa6, 0x6b, 0x56, 0x0a}, {0xf0, 0x33, 0x08, 0xf3, 0x03}, {0x5a, 0x99, 0xae, 0x59, 0x09},
     {0xc0, 0xcf, 0x20, 0xcc, 0x0f}, {0x6a, 0x65, 0xba, 0x66, 0x05}, {0x0c, 0x3f, 0x83, 0x30, 0x0f}, {0xa6, 0x95, 0xe9, 0x9a, 0x05},
     {0x3c, 0xfc, 0x0c, 0xc2, 0x0c}, {0x96, 0x56, 0xa6, 0x6b, 0x06}, {0xfc, 0xf0, 0x33, 0x08, 0x03}, {0x56, 0x5a, 0x99, 0xae, 0x09},
     {0xf0, 0xc3, 0xcf, 0x20, 0x0c}, {0x5a, 0x69, 0x65, 0xba, 0x06}, {0xcc, 0x0f, 0x3f, 0x83, 0x00}, {0x66, 0xa5, 0x95, 0xe9, 0x0a},
     {0x30, 0x3f, 0xfc, 0x0c, 0x02}, {0x9a, 0x95, 0x56, 0xa6, 0x0b}, {0xc0, 0xfc, 0xf0, 0x33, 0x08}, {0x6a, 0x56, 0x5a, 0x99, 0x0e}}};
// clang-format on

#ifdef __cplusplus
#define TQKV__ASSERT_SIZE(type, bytes) static_assert(sizeof(type) == (bytes), "size of " #type)
#else
#define TQKV__ASSERT_SIZE(type, bytes) typedef char type##_has_its_size[sizeof(type) == (bytes) ? 1 : -1]
#endif
TQKV__ASSERT_SIZE(tqkv__table_set, 3560);

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

#endif

#if defined(TQKV_IMPLEMENTATION) && !defined(TQKV__IMPLEMENTED)
#define TQKV__IMPLEMENTED

/* >>needs: what the implementation needs of the compiler, and xxHash */

#if defined(_MSC_VER) && !defined(__clang__)
#error "tqkv.h: MSVC cannot compile the implementation; compile this file with clang-cl, or use MinGW"
#endif
#if !defined(TQKV_ALLOW_FAST_MATH) && \
    (defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
     (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__))
#error "tqkv.h: -ffast-math changes stored bytes; compile this file without it, or define TQKV_ALLOW_FAST_MATH"
#endif

/* clang announces -fassociative-math, -freciprocal-math and -funsafe-math-optimizations by no macro; they would change
   norms. On arm64 clang 14 does not know the pragma, and reorders no sum that counts. */
#if defined(__clang__) && !defined(TQKV_ALLOW_FAST_MATH) && \
    (defined(__x86_64__) || (defined(__aarch64__) && __clang_major__ > 14))
#define TQKV__PRECISE
#pragma float_control(precise, on, push)
#endif

#include <fenv.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef __has_include
#if !__has_include("xxhash.h")
#error "tqkv.h: xxhash.h 0.8.0 or later is missing: Debian libxxhash-dev, Homebrew xxhash, or a copy beside tqkv.h"
#endif
#endif
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
/* gcc 12 -Og rejects the forced inlining of xxHash 0.8.1 (Debian 12). xxhash.h evaluates this macro after it defines
   its version. */
#if !defined(XXH_NO_INLINE_HINTS) && defined(__GNUC__) && !defined(__clang__) && !defined(__NO_INLINE__) && \
    !defined(__OPTIMIZE_SIZE__)
#define XXH_NO_INLINE_HINTS (XXH_VERSION_NUMBER == 801)
#endif
#include "xxhash.h"
#if defined(XXH_NO_XXH3) || defined(XXH_NO_LONG_LONG)
#error "tqkv.h needs XXH3: xxhash.h was included with XXH_NO_XXH3 or XXH_NO_LONG_LONG"
#endif
#if defined(XXH_VERSION_NUMBER) && XXH_VERSION_NUMBER < 800
#define TQKV__STRING(x) #x
#define TQKV__EXPAND(x) TQKV__STRING(x)
#define TQKV__XXH_FOUND \
    TQKV__EXPAND(XXH_VERSION_MAJOR) "." TQKV__EXPAND(XXH_VERSION_MINOR) "." TQKV__EXPAND(XXH_VERSION_RELEASE)
#pragma message("tqkv.h: found xxhash.h " TQKV__XXH_FOUND)
#error "tqkv.h: xxhash.h is too old, 0.8.0 is needed: Debian libxxhash-dev, Homebrew xxhash, or a copy beside tqkv.h"
#endif

/* -fshort-enums or -fpack-struct for this file alone would give what callers pass another layout. 32-bit ARM has short
   enums in some systems, and says so. */
enum tqkv__smallest { TQKV__SMALLEST };
struct tqkv__gap {
    char before;
    void *behind;
};
#ifdef __ARM_SIZEOF_MINIMAL_ENUM
#define TQKV__WHOLE_ENUMS true
#else
#define TQKV__WHOLE_ENUMS (sizeof(enum tqkv__smallest) == sizeof(int))
#endif
typedef char tqkv__compiled_with_fshort_enums_or_fpack_struct
    [TQKV__WHOLE_ENUMS && sizeof(struct tqkv__gap) > 1 + sizeof(void *) ? 1 : -1];

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#ifndef TQKV_EXPLAIN
#define TQKV_EXPLAIN(text) ((void)0)
#endif
/* Passes text to TQKV_EXPLAIN and evaluates to the result. */
#define TQKV__REFUSE(result, text) (TQKV_EXPLAIN(text), TQKV_##result)
#define TQKV__INVALID(text)        TQKV__REFUSE(INVALID_ARGUMENT, text)

/* Checks of what private functions take for granted; for tests. */
#ifndef TQKV_ASSERT
#define TQKV_ASSERT(condition) ((void)0)
#endif

#define TQKV__NOINLINE __attribute__((noinline))
#define TQKV__COLD     __attribute__((cold))        /* for size: calls that are rare beside appending and attending */
#define TQKV__ALIGNED  __attribute__((aligned(64))) /* a vector that crosses cache lines is loaded twice */
#define TQKV__INLINE   inline __attribute__((always_inline))
#define TQKV__OP       TQKV__TARGET static TQKV__INLINE   /* a step of a loop, in the current instruction set */
#define TQKV__LOOP     TQKV__TARGET static TQKV__NOINLINE /* a loop there, which is called */
#ifdef __clang__
#define TQKV__UNROLL _Pragma("clang loop unroll(full)")
#define TQKV__ROLLED _Pragma("clang loop unroll(disable)")
#else
#define TQKV__UNROLL _Pragma("GCC unroll 16")
#define TQKV__ROLLED _Pragma("GCC unroll 1")
#endif

/* >>exact: arithmetic that gives the same bits for every compiler, flag and floating-point mode of the caller */

/* Rounds x to float at this point. Compilers may fuse a product with a following sum, and not all obey pragmas: an
   empty asm that may change the value prevents it. */
static inline float tqkv__rounded(float x)
{
#if defined(__SSE2_MATH__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#else
    __asm__("" : "+m"(x));
#endif
    return x;
}

/* Rounds results that no sum follows: they are floats already, except in wider registers (x87). */
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ == 0
#define TQKV__AS_FLOAT(x) (x)
#else
#define TQKV__AS_FLOAT(x) tqkv__rounded(x)
#endif

static inline double tqkv__rounded_double(double x)
{
    __asm__("" : "+m"(x));
    return x;
}

/* Returns a*b + c, rounded once. The product is exact in double; its sum with c is rounded to odd (if it is not exact,
   the last bit is set), so the rounding to float cannot see a tie that is none. clang 14 to 19 optimise this function
   wrongly for s390x. */
#if defined(__clang__) && defined(__s390x__)
__attribute__((noinline, optnone)) static float tqkv__fma(float a, float b, float c)
#else
static inline float tqkv__fma(float a, float b, float c)
#endif
{
#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    const double product = tqkv__rounded_double((double)a * (double)b), addend = (double)c;
    const bool first = fabs(product) > fabs(addend);
    double sum = tqkv__rounded_double(product + addend);
    const double large = first ? product : addend, smaller = first ? addend : product;
    const double error = tqkv__rounded_double(smaller - tqkv__rounded_double(sum - large));
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if (error != 0.0 && !(bits & 1) && fabs(sum) < (double)INFINITY)
        bits += (error > 0.0) == (sum > 0.0) ? 1u : ~(uint64_t)0;
    memcpy(&sum, &bits, sizeof sum);
    return TQKV__AS_FLOAT((float)sum);
#endif
}

/* Sets round-to-nearest and keeps denormals; returns the caller's mode for tqkv__fp_restore. Programs linked with
   -ffast-math start with flush-to-zero. Functions that are not inlined keep the arithmetic inside this mode. */
static uint64_t tqkv__fp_exact(void)
{
    uint64_t mode = 0;
#if !defined(__SSE2_MATH__) && !defined(__aarch64__) && defined(FE_TONEAREST)
    mode = (uint64_t)fegetround() << 32;
    fesetround(FE_TONEAREST);
#endif
#if defined(__SSE2__)
    mode |= _mm_getcsr();
    _mm_setcsr(0x1f80); /* all exceptions masked */
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
#endif
    return mode;
}

static void tqkv__fp_restore(uint64_t mode)
{
#if !defined(__SSE2_MATH__) && !defined(__aarch64__) && defined(FE_TONEAREST)
    fesetround((int)(mode >> 32));
#endif
#if defined(__SSE2__)
    _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#endif
    (void)mode;
}

static uint32_t tqkv__bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float tqkv__float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns the bits of the largest magnitude of n floats: an exponent of all ones shows NaN or infinity. */
static uint32_t tqkv__largest_bits(const float *x, size_t n)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = tqkv__bits(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Tests bits, because -ffinite-math-only would remove a test of values. */
static bool tqkv__all_finite(const float *x, size_t n) { return tqkv__largest_bits(x, n) < 0x7f800000u; }

/* Returns the i-th half or bfloat16, whatever type the caller's compiler has for it. */
static uint16_t tqkv__half_at(const void *halves, size_t i)
{
    uint16_t half;
    memcpy(&half, (const uint8_t *)halves + 2 * i, sizeof half);
    return half;
}

static bool tqkv__values_finite(tqkv_type type, const void *x, size_t n)
{
    const uint32_t exponent = type == TQKV_TYPE_F16 ? 0x7c00u : 0x7f80u;
    uint32_t bad = 0;
    if (type == TQKV_TYPE_F32) return tqkv__all_finite((const float *)x, n);
    for (size_t i = 0; i < n; i++) bad |= (tqkv__half_at(x, i) & exponent) == exponent;
    return !bad;
}

/* Adds 16 lanes by halves: lane i and i + 8, then i + 4, i + 2, i + 1. */
static float tqkv__sum_16(float *lanes)
{
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] = TQKV__AS_FLOAT(lanes[i] + lanes[i + n]);
    return lanes[0];
}

/* Rounds to the nearest integer, ties to even; |x| < 2^22 */
static inline float tqkv__round(float x) { return TQKV__AS_FLOAT(tqkv__rounded(x + 12582912.0f) - 12582912.0f); }

/* Of e^r - 1, from the highest term on. Tables hold constants, because these may be wider than a float. */
static const float tqkv__series[7] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f};

/* These are exp_terms, exp and tanh of the kernels, step by step. */
static void tqkv__exp_terms(float x, float *power, float *tail)
{
    static const float reduce[3] = {1.44269504f, -0.693359375f, 2.12194440e-4f};
    const float n = tqkv__round(tqkv__rounded(x * reduce[0]));
    const float r = tqkv__fma(n, reduce[2], tqkv__fma(n, reduce[1], x));
    float p = tqkv__series[0];
    for (int i = 1; i < 7; i++) p = tqkv__fma(p, r, tqkv__series[i]);
    *tail = TQKV__AS_FLOAT(p * r);
    *power = tqkv__float((uint32_t)((int)n + 127) << 23);
}

/* Returns e^x for x up to 87; 0 below -87. NaN stays NaN. */
static TQKV__NOINLINE float tqkv__exp(float x)
{
    float power, tail;
    if (x != x) return x;
    if (x == 0.0f) return 1.0f; /* of two maxima the larger one gives it */
    if (x < -87.0f) return 0.0f;
    tqkv__exp_terms(x < 87.0f ? x : 87.0f, &power, &tail);
    return tqkv__fma(power, tail, power);
}

/* Returns a*b + c*d, each product rounded. */
static inline float tqkv__sum_of_products(float a, float b, float c, float d)
{
    return TQKV__AS_FLOAT(tqkv__rounded(a * b) + tqkv__rounded(c * d));
}

static float tqkv__tanh(float x)
{
    float power, tail;
    const float doubled = TQKV__AS_FLOAT(fabsf(x) * -2.0f);
    if (x != x) return x;
    tqkv__exp_terms(doubled > -40.0f ? doubled : -40.0f, &power, &tail);
    const float m = tqkv__fma(power, tail, TQKV__AS_FLOAT(power - 1.0f));
    return copysignf(TQKV__AS_FLOAT(fabsf(m) / TQKV__AS_FLOAT(2.0f + m)), x);
}

/* >>store-code: sizes, formats, the checks of a store, of its positions and of rows */

static bool tqkv__size_multiply(size_t a, size_t b, size_t *product)
{
    if (b != 0 && a > SIZE_MAX / b) return false;
    *product = a * b;
    return true;
}

/* a*b*c elements of `size` bytes; false on overflow. */
static bool tqkv__array_size(int a, int b, int c, size_t size, size_t *bytes)
{
    return tqkv__size_multiply((size_t)a, (size_t)b, bytes) && tqkv__size_multiply(*bytes, (size_t)c, bytes) &&
           tqkv__size_multiply(*bytes, size, bytes);
}

static TQKV__NOINLINE bool tqkv__overlap(const void *a, size_t a_size, const void *b, size_t b_size)
{
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return a && b && a_size && b_size && (x < y ? y - x < a_size : x - y < b_size);
}

/* Whether p is neither NULL nor misaligned. alignment: a power of two */
static bool tqkv__aligned_at(const void *p, size_t alignment) { return p && ((uintptr_t)p & (alignment - 1)) == 0; }
static bool tqkv__floats_at(const void *p) { return tqkv__aligned_at(p, sizeof(float)); }

/* A row of TQKV__FORMATS for a format that the compiler does not know; zeros for what is none. */
typedef struct tqkv__format {
    uint8_t kind, main_bits, upper_bits, book_bits;
} tqkv__format;

static const tqkv__format *tqkv__format_of(tqkv_format f)
{
#define TQKV__FORMAT_ROW(x, format, name, kind, main, upper, book, plain) {kind, main, upper, book},
    static const tqkv__format rows[] = {{0, 0, 0, 0}, TQKV__FORMATS(TQKV__FORMAT_ROW, )};
    return &rows[(unsigned)f < sizeof rows / sizeof *rows ? (unsigned)f : 0];
}
static bool tqkv__format_known(tqkv_format f) { return tqkv__format_of(f)->kind != 0; }

/* Returns the bytes of a value; 0: no tqkv_type. */
static size_t tqkv__type_size(tqkv_type type)
{
    return type == TQKV_TYPE_F32 ? sizeof(float) : type == TQKV_TYPE_F16 || type == TQKV_TYPE_BF16 ? 2 : 0;
}
#define TQKV__ROWS_SHARED "strides: rows that are written share values"
#define TQKV__NO_TYPE     "type, query_type or output_type: no tqkv_type"

#define TQKV__SIZE_TEXT(x, dim, ...) #dim ", "
#define TQKV__HEAD_DIMS \
    "head_dim, value_dim or tail_dim: none of " TQKV__SIZES( \
        TQKV__SIZE_TEXT, ) "to which rows can be padded with zeros; set scale then"

/* A row of TQKV__SIZES for a head_dim that the compiler does not know, where its columns would be half a KB of
   comparisons each; zeros without a row. */
typedef struct tqkv__size {
    int order, subrow, grid; /* subrow: values in each of `order` subrows */
    float root, inverse_root;
} tqkv__size;

static inline const tqkv__size *tqkv__size_of(int head_dim)
{
#define TQKV__SIZE_ROW(x, dim, m, grid, root, inverse) {m, (dim) / (m), grid, root, inverse},
#define TQKV__SIZE_NAME(x, dim, ...)                   TQKV__SIZE_##dim,
#define TQKV__SIZE_CASE(x, dim, ...) \
    case (dim) / 16: \
        row = TQKV__SIZE_##dim; \
        break;
    enum { no_row, TQKV__SIZES(TQKV__SIZE_NAME, ) n_rows };
    static const tqkv__size rows[n_rows] = {{0, 0, 0, 0.0f, 0.0f}, TQKV__SIZES(TQKV__SIZE_ROW, )};
    int row = no_row;
    switch (head_dim / 16) {
        TQKV__SIZES(TQKV__SIZE_CASE, )
    }
    return &rows[head_dim % 16 ? no_row : row];
}
static bool tqkv__head_dim_known(int head_dim) { return tqkv__size_of(head_dim)->order != 0; }

#define TQKV__PANEL 256

/* A store with its defaults resolved and its sizes derived. */
typedef struct tqkv__stream {
    tqkv_format format;
    int kind, main_bits, upper_bits, book_bits; /* the format's row in TQKV__FORMATS */
    const float *codebook, *boundaries;         /* [1 << book_bits], [(1 << book_bits) - 1]; BOOK only */
    const float *factors;                       /* [n_factors], which encoding tries; BOOK only */
    int n_factors;
    int head_dim, n_kv_heads, capacity;
    bool ring, rotated;
    float block_scale;
    size_t row_bytes;
    int norms_per_row, norm_dim; /* values that share a norm */
    int panel_dim;               /* values that attention decodes at a time, all of one norm, at most TQKV__PANEL */
    uint8_t *codes;
    float *norms;
    size_t codes_size, norms_size; /* bytes in use */
    tqkv_type type;                /* of the caller's rows; tqkv__check_rows checks it */
    tqkv_strides strides;
    const float *center;            /* [n_kv_heads][head_dim] or NULL */
    const float *channel_scale;     /* likewise */
    const float *inverses;          /* 1 / channel_scale, where they are kept; else NULL, see tqkv__inverses_of */
    const int32_t *pages;           /* [n_pages] or NULL: no table, or one that the processor does not know */
    int n_pages, page_size;         /* 0 without a table */
    int8_t centroids[64];           /* integers, and their step; see tqkv__fill_integers */
    float step, root, inverse_root; /* root: of head_dim */
} tqkv__stream;

/* Strides with their defaults. n_heads * dim does not overflow. */
static tqkv_strides tqkv__strides_of(tqkv_strides strides, int n_heads, int dim)
{
    if (!strides.head) strides.head = (size_t)dim;
    if (!strides.token) strides.token = (size_t)n_heads * (size_t)dim;
    return strides;
}

/* Finds the bytes from the first of [n][n_heads] rows to the end of the last one; false on overflow. */
static bool tqkv__rows_extent(tqkv_strides strides, int n, int n_heads, int dim, size_t value_size, size_t *bytes)
{
    size_t token, head;
    *bytes = 0;
    if (strides.token > SIZE_MAX / 64 || strides.head > SIZE_MAX / 64) return false;
    if (n <= 0 || n_heads <= 0) return true;
    if (!tqkv__size_multiply((size_t)n - 1, strides.token, &token) ||
        !tqkv__size_multiply((size_t)n_heads - 1, strides.head, &head) || token > SIZE_MAX - head ||
        token + head > SIZE_MAX - (size_t)dim)
        return false;
    return tqkv__size_multiply(token + head + (size_t)dim, value_size, bytes) && *bytes <= SIZE_MAX / 8;
}

/* Whether no two of [n][n_heads] rows share a value; follows tqkv__rows_extent. */
static bool tqkv__rows_distinct(tqkv_strides strides, int n, int n_heads, int dim)
{
    const size_t row = (size_t)dim, heads = n_heads > 1 ? (size_t)(n_heads - 1) * strides.head + row : row;
    const size_t tokens = n > 1 ? (size_t)(n - 1) * strides.token + row : row;
    if (n <= 1) return n_heads <= 1 || strides.head >= row;
    if (n_heads <= 1) return strides.token >= row;
    return (strides.head >= row && strides.token >= heads) || (strides.token >= row && strides.head >= tokens);
}

static tqkv_result tqkv__table_shape(const tqkv_store *store, tqkv__stream *s)
{
    if (store->ring) return TQKV__INVALID("pages: the store is a ring");
    if (store->n_pages < 0) return TQKV__INVALID("n_pages is negative");
    if (store->page_size <= 0 || store->capacity % store->page_size)
        return TQKV__INVALID("page_size: not positive, or does not divide capacity");
    if ((uintptr_t)store->pages % sizeof(int32_t)) return TQKV__INVALID("pages: not aligned as int32_t");
    s->pages = store->pages;
    s->n_pages = store->n_pages;
    s->page_size = store->page_size;
    return TQKV_OK;
}

static void tqkv__take_format(tqkv_format format, tqkv__stream *s)
{
    const tqkv__format *row = tqkv__format_of(format);
    s->format = format;
    s->kind = row->kind;
    s->main_bits = row->main_bits;
    s->upper_bits = row->upper_bits;
    s->book_bits = row->book_bits;
    s->codebook = s->book_bits ? TQKV__CODEBOOK(s->book_bits) : NULL;
    s->boundaries = s->book_bits ? TQKV__BOUNDARIES(s->book_bits) : NULL;
    s->factors = s->book_bits ? TQKV__FACTORS(s->book_bits) : NULL;
    s->n_factors = TQKV__N_FACTORS(s->book_bits);
}

static tqkv_result tqkv__stream_shape(const tqkv_store *store, tqkv__stream *s)
{
    memset(s, 0, sizeof *s);
    if (!store) return TQKV__INVALID("a store is NULL");
    if (!tqkv__format_known(store->format))
        return TQKV__REFUSE(UNSUPPORTED, "format, key_format, value_format or tail_format: not a stored format");
    if (!tqkv__head_dim_known(store->head_dim)) return TQKV__REFUSE(UNSUPPORTED, TQKV__HEAD_DIMS);
    if ((unsigned)store->rotation > TQKV_ROTATION_ON) return TQKV__INVALID("rotation: no tqkv_rotation");
    if (store->rotation == TQKV_ROTATION_OFF && store->format != TQKV_F16 && !TQKV__PLAIN(store->format))
        return TQKV__REFUSE(UNSUPPORTED, "rotation: TQ2, TQ3, TQ4 and I8 have it always");
    if (store->n_kv_heads <= 0) return TQKV__INVALID("n_kv_heads is not positive");
    if (store->capacity <= 0) return TQKV__INVALID("capacity is not positive");
    if (!(store->block_scale >= 0.0f && store->block_scale <= 3.0e38f))
        return TQKV__INVALID("block_scale: negative, NaN or infinite");
    tqkv__take_format(store->format, s);
    s->head_dim = store->head_dim;
    s->root = tqkv__size_of(s->head_dim)->root;
    s->inverse_root = tqkv__size_of(s->head_dim)->inverse_root;
    s->n_kv_heads = store->n_kv_heads;
    s->capacity = store->capacity;
    s->type = store->type;
    s->strides = tqkv__strides_of(store->strides, store->n_kv_heads, store->head_dim);
    s->ring = store->ring;
    s->rotated = store->rotation ? store->rotation == TQKV_ROTATION_ON : s->kind != TQKV__HALF;
    s->block_scale = store->block_scale > 0.0f ? store->block_scale : 1.0f;
    s->row_bytes = (size_t)(s->head_dim * (s->main_bits + s->upper_bits) / 8);
    s->norm_dim = s->kind == TQKV__GRID ? tqkv__size_of(s->head_dim)->grid : TQKV__NORM_DIM(s->kind, s->head_dim);
    s->norms_per_row = s->kind == TQKV__HALF ? 0 : s->head_dim / s->norm_dim;
    int panels = (s->norm_dim + TQKV__PANEL - 1) / TQKV__PANEL;
    while (s->norm_dim % panels) panels++;
    s->panel_dim = s->norm_dim / panels;
    if (!tqkv__array_size(s->n_kv_heads, s->capacity, 1, s->row_bytes, &s->codes_size) ||
        !tqkv__array_size(s->n_kv_heads, s->capacity, s->norms_per_row, sizeof(float), &s->norms_size))
        return TQKV__INVALID("a store of more than SIZE_MAX bytes");
    return store->pages ? tqkv__table_shape(store, s) : TQKV_OK;
}

/* Whether a value of each channel, x: [n_kv_heads][head_dim], is finite, by the set in use. */
static bool tqkv__channels_finite(const tqkv__stream *s, const float *x);
static bool tqkv__scales_valid(const float *x, size_t n);

static tqkv_result tqkv__stream_channels(const tqkv_store *store, tqkv__stream *s)
{
    const float *scale = store->channel_scale;
    if ((uintptr_t)store->center % sizeof(float)) return TQKV__INVALID("center: not aligned as floats");
    if (store->center && !tqkv__channels_finite(s, store->center))
        return TQKV__REFUSE(NOT_FINITE, "center holds NaN or infinity");
    if ((uintptr_t)scale % sizeof(float)) return TQKV__INVALID("channel_scale: not aligned as floats");
    if (scale && !tqkv__scales_valid(scale, (size_t)s->n_kv_heads * (size_t)s->head_dim)) {
        if (!tqkv__channels_finite(s, scale)) return TQKV__REFUSE(NOT_FINITE, "channel_scale holds NaN or infinity");
        return TQKV__INVALID("channel_scale: not in [2^-32, 2^32]");
    }
    s->center = store->center;
    s->channel_scale = scale;
    return TQKV_OK;
}

/* Returns the bytes of a centre, or of a scale; with 32 bits it may overflow where neither can exist. */
static size_t tqkv__center_size(const tqkv__stream *s)
{
    return (size_t)s->n_kv_heads * (size_t)s->head_dim * sizeof(float);
}

static const float *tqkv__of_head(const tqkv__stream *s, const float *channels, int kv_head)
{
    return channels ? channels + (size_t)kv_head * (size_t)s->head_dim : NULL;
}

static const float *tqkv__center_of(const tqkv__stream *s, int kv_head) { return tqkv__of_head(s, s->center, kv_head); }

static const float *tqkv__scale_of(const tqkv__stream *s, int kv_head)
{
    return tqkv__of_head(s, s->channel_scale, kv_head);
}

static size_t tqkv__table_size(const tqkv__stream *s) { return (size_t)s->n_pages * sizeof(int32_t); }

static bool tqkv__encoding_overlaps(const tqkv__stream *s, const void *p, size_t size)
{
    return tqkv__overlap(s->codes, s->codes_size, p, size) || tqkv__overlap(s->norms, s->norms_size, p, size);
}

static tqkv_result tqkv__stream_memory(const tqkv_store *store, tqkv__stream *s)
{
    const tqkv_result r = tqkv__stream_channels(store, s);
    if (r != TQKV_OK) return r;
    if (!store->codes || store->codes_size < s->codes_size) return TQKV__INVALID("codes: NULL or too small");
    if (s->norms_size && (!store->norms || store->norms_size < s->norms_size))
        return TQKV__INVALID("norms: NULL or too small");
    if ((uintptr_t)store->norms % sizeof(float)) return TQKV__INVALID("norms: not aligned as floats");
    if (tqkv__overlap(store->codes, s->codes_size, store->norms, s->norms_size))
        return TQKV__INVALID("codes and norms overlap");
    s->codes = (uint8_t *)store->codes;
    s->norms = store->norms;
    if (tqkv__encoding_overlaps(s, s->center, tqkv__center_size(s)))
        return TQKV__INVALID("center overlaps codes or norms");
    if (tqkv__encoding_overlaps(s, s->channel_scale, tqkv__center_size(s)))
        return TQKV__INVALID("channel_scale overlaps codes or norms");
    if (tqkv__encoding_overlaps(s, s->pages, tqkv__table_size(s))) return TQKV__INVALID("pages overlap codes or norms");
    return TQKV_OK;
}

static bool tqkv__same_channels(const tqkv__stream *s, const float *a, const float *b)
{
    return a == b || (a && b && memcmp(a, b, tqkv__center_size(s)) == 0);
}

static tqkv_result tqkv__check_channels_match(const tqkv__stream *a, const tqkv__stream *b)
{
    if (!tqkv__same_channels(a, a->center, b->center))
        return TQKV__INVALID("center: that of a store or slice is not that of the other");
    if (!tqkv__same_channels(a, a->channel_scale, b->channel_scale))
        return TQKV__INVALID("channel_scale: that of a store or slice is not that of the other");
    return TQKV_OK;
}

static tqkv_result tqkv__stream_open(const tqkv_store *store, tqkv__stream *s)
{
    const tqkv_result r = tqkv__stream_shape(store, s);
    return r == TQKV_OK ? tqkv__stream_memory(store, s) : r;
}

static bool tqkv__channels_overlap(const tqkv__stream *s, const void *p, size_t size)
{
    return tqkv__overlap(s->center, tqkv__center_size(s), p, size) ||
           tqkv__overlap(s->channel_scale, tqkv__center_size(s), p, size);
}

static bool tqkv__stream_overlaps(const tqkv__stream *s, const void *p, size_t size)
{
    return tqkv__encoding_overlaps(s, p, size) || tqkv__channels_overlap(s, p, size) ||
           tqkv__overlap(s->pages, tqkv__table_size(s), p, size);
}

/* Returns the positions that a store without a ring can have. */
static int64_t tqkv__room(const tqkv__stream *s)
{
    return s->page_size ? (int64_t)s->n_pages * s->page_size : s->capacity;
}

static int tqkv__slot(const tqkv__stream *s, int64_t position)
{
    TQKV_ASSERT(position >= 0 && (s->ring || position < tqkv__room(s)));
    if (s->pages) return s->pages[position / s->page_size] * s->page_size + (int)(position % s->page_size);
    return (int)(s->ring ? position % s->capacity : position);
}

/* Returns how many slots from that of a position on hold the positions behind it, in order. */
static int tqkv__slots_left(const tqkv__stream *s, int64_t position)
{
    if (s->pages) return s->page_size - (int)(position % s->page_size);
    return s->capacity - tqkv__slot(s, position);
}

static uint8_t *tqkv__codes_at(const tqkv__stream *s, int kv_head, int slot)
{
    TQKV_ASSERT(kv_head >= 0 && kv_head < s->n_kv_heads && slot >= 0 && slot < s->capacity);
    return s->codes + ((size_t)kv_head * (size_t)s->capacity + (size_t)slot) * s->row_bytes;
}

static float *tqkv__norms_at(const tqkv__stream *s, int kv_head, int slot)
{
    if (!s->norms_per_row) return NULL;
    return s->norms + ((size_t)kv_head * (size_t)s->capacity + (size_t)slot) * (size_t)s->norms_per_row;
}

TQKV_API const char *tqkv_result_string(tqkv_result r)
{
    static const char *const strings[] = {"no error",
                                          "an argument is invalid",
                                          "this head_dim, format or option is not supported",
                                          "a position lies outside the store",
                                          "out of memory",
                                          "the source holds NaN or infinity",
                                          "the snapshot is damaged or not a snapshot",
                                          "reading or writing failed",
                                          "the metallib was built from another version of tqkv.h",
                                          "Metal reported an error"};
    return (unsigned)r < sizeof strings / sizeof *strings ? strings[r] : "unknown result";
}

TQKV_API const char *tqkv_format_name(tqkv_format f)
{
#define TQKV__NAME_OF(unused, format, name, ...) name,
    static const char *const names[] = {"default", TQKV__FORMATS(TQKV__NAME_OF, )};
    return (unsigned)f < sizeof names / sizeof *names ? names[f] : "?";
}

TQKV_API tqkv_format tqkv_format_from_name(const char *name)
{
    for (int f = TQKV_F16; name && tqkv__format_known((tqkv_format)f); f++)
        if (strcmp(name, tqkv_format_name((tqkv_format)f)) == 0) return (tqkv_format)f;
    return TQKV_FORMAT_DEFAULT;
}

TQKV_API size_t tqkv_codes_size(const tqkv_store *store)
{
    tqkv__stream s;
    return tqkv__stream_shape(store, &s) == TQKV_OK ? s.codes_size : 0;
}

TQKV_API size_t tqkv_norms_size(const tqkv_store *store)
{
    tqkv__stream s;
    return tqkv__stream_shape(store, &s) == TQKV_OK ? s.norms_size : 0;
}

static bool tqkv__basis_known(tqkv_basis basis) { return basis == TQKV_ORIGINAL || basis == TQKV_ROTATED; }

/* Checks the entries of the positions [first, end), which the table has. lowest: -1 where such a page is left out */
static tqkv_result tqkv__check_pages(const tqkv__stream *s, int64_t first, int64_t end, int lowest)
{
    if (!s->pages || first >= end) return TQKV_OK;
    for (int64_t i = first / s->page_size; i <= (end - 1) / s->page_size; i++)
        if (s->pages[i] < lowest || s->pages[i] >= s->capacity / s->page_size)
            return TQKV__REFUSE(OUT_OF_RANGE,
                                "pages: the entry of a position that is seen or written lies outside the pool");
    return TQKV_OK;
}

/* Whether no number of ids, [n], occurs twice or among others, [n_others] or NULL; negative ones do not count. Marks
   32768 numbers at a time in 4 KiB of stack. */
static bool tqkv__all_distinct(const int32_t *ids, int64_t n, const int32_t *others, int64_t n_others)
{
    enum { at_a_time = 32768 };
    uint8_t marks[at_a_time / 8];
    const int64_t all = others ? n + n_others : n;
    int64_t low = all > 1 ? INT32_MAX : 0, high = -1;
    for (int64_t i = 0; i < n && all > 1; i++) {
        if (ids[i] >= 0 && ids[i] < low) low = ids[i];
        if (ids[i] > high) high = ids[i];
    }
    for (; low <= high; low += at_a_time) {
        memset(marks, 0, sizeof marks);
        for (int64_t i = 0; i < all; i++) {
            const int32_t id = i < n || !others ? ids[i] : others[i - n];
            const int64_t at = id - low;
            if (id < 0 || at < 0 || at >= at_a_time) continue;
            if (marks[at / 8] >> (at % 8) & 1) return false;
            if (i < n) marks[at / 8] = (uint8_t)(marks[at / 8] | 1 << (at % 8));
        }
    }
    return true;
}

static tqkv_result tqkv__check_positions(const tqkv__stream *s, int n, int64_t position, int lowest)
{
    if (position < 0 || position > INT64_MAX - n) return TQKV__REFUSE(OUT_OF_RANGE, "position: negative or too large");
    if (!s->ring && position + n > tqkv__room(s))
        return TQKV__REFUSE(OUT_OF_RANGE,
                            "positions beyond the capacity, of a full cache say, or beyond the page table");
    return tqkv__check_pages(s, position, position + n, lowest);
}

/* Refuses a table that names a page twice among those to write; follows tqkv__check_positions. */
static tqkv_result tqkv__check_written(const tqkv__stream *s, int n, int64_t position)
{
    if (!s->pages || n == 0) return TQKV_OK;
    const int64_t page = position / s->page_size, last = (position + n - 1) / s->page_size;
    if (tqkv__all_distinct(s->pages + page, last - page + 1, NULL, 0)) return TQKV_OK;
    return TQKV__INVALID("pages: a page twice among those to write");
}

static tqkv_result tqkv__open_positions(const tqkv_store *store, int n, int64_t position, tqkv__stream *s)
{
    const tqkv_result r = tqkv__stream_open(store, s);
    if (r != TQKV_OK) return r;
    if (n < 0) return TQKV__INVALID("n_positions is negative");
    if (s->ring && n > s->capacity) return TQKV__REFUSE(OUT_OF_RANGE, "n_positions is above the capacity");
    return tqkv__check_positions(s, n, position, 0);
}

static size_t tqkv__row_offset(const tqkv__stream *s, size_t token, size_t head)
{
    return (token * s->strides.token + head * s->strides.head) * tqkv__type_size(s->type);
}

static const void *tqkv__source_row(const tqkv__stream *s, const void *src, size_t token, size_t head)
{
    return (const uint8_t *)src + tqkv__row_offset(s, token, head);
}

/* Checks p: [n][n_kv_heads] rows; *bytes: their size, with gaps. */
static tqkv_result tqkv__check_rows(const tqkv__stream *s, const void *p, int n, size_t *bytes)
{
    const size_t size = tqkv__type_size(s->type);
    if (!size) return TQKV__REFUSE(UNSUPPORTED, TQKV__NO_TYPE);
    if (!p) return TQKV__INVALID("the rows are NULL: src, k, v or dst");
    if (n < 0) return TQKV__INVALID("the number of tokens or positions is negative");
    if ((uintptr_t)p % size) return TQKV__INVALID("the rows are not aligned as their type");
    if (!tqkv__array_size(n, s->n_kv_heads, s->head_dim, sizeof(float), bytes) ||
        !tqkv__rows_extent(s->strides, n, s->n_kv_heads, s->head_dim, size, bytes))
        return TQKV__INVALID("rows of more than SIZE_MAX bytes");
    return TQKV_OK;
}

static void *tqkv__malloc(void *user, size_t size)
{
    (void)user;
    return malloc(size);
}

static void tqkv__mfree(void *user, void *pointer, size_t size)
{
    (void)user;
    (void)size;
    free(pointer);
}

/* Returns the first cache line in memory, of which up to 63 bytes are lost. */
static uint8_t *tqkv__first_line(void *memory) { return (uint8_t *)memory + (64 - (uintptr_t)memory % 64) % 64; }

static bool tqkv__resolve_allocator(tqkv_allocator *allocator)
{
    if (!allocator->alloc != !allocator->free) return false;
    if (allocator->alloc) return true;
    allocator->alloc = tqkv__malloc;
    allocator->free = tqkv__mfree;
    return true;
}

static void tqkv__run_serial(void *user, int count, tqkv_task task, void *context)
{
    (void)user;
    for (int i = 0; i < count; i++) task(context, i);
}

/* >>set: what an instruction set provides, in plain C or by vectors. Which one is in use >>isa-code decides. */

struct tqkv__attention;
struct tqkv__quantiser;
struct tqkv__row;

/* The encoding functions of an instruction set; every set gives the same bytes. */
typedef struct tqkv__codec {
    bool (*rows_finite)(tqkv_type type, const void *x, size_t n); /* n: a multiple of head_dim */
    uint32_t (*largest_bits)(const float *x, size_t n);           /* likewise: of the largest magnitude */
    void (*invert)(const float *scales, int n, float *inverses);  /* likewise: 1 / scale, rounded once */
    void (*widen)(tqkv_type type, const void *src, const float *center, const float *inverses, int n, float *row);
    void (*narrow)(tqkv_type type, const float *row, int n, void *dst);
    void (*rotate)(float *x, int head_dim);
    void (*unrotate)(float *y, int head_dim);
    void (*encode_rows)(const tqkv__stream *s, const struct tqkv__quantiser *q, const struct tqkv__row *rows,
                        int n_rows);
} tqkv__codec;

/* Finds the codes of a row. scales: of its norms, then the factors of a search; squares: of the codes' centroids, for
   tqkv__correct_norms. y: [head_dim], scales, squares: [norms_per_row], codes: [head_dim] and room for 64 */
typedef void tqkv__code_row(const tqkv__stream *s, const struct tqkv__quantiser *q, const float *y, float *scales,
                            float *squares, uint8_t *codes);

static const tqkv__codec *tqkv__codec_for(int head_dim);

static bool tqkv__channels_finite(const tqkv__stream *s, const float *x)
{
    return tqkv__codec_for(s->head_dim)->rows_finite(TQKV_TYPE_F32, x, (size_t)s->n_kv_heads * (size_t)s->head_dim);
}

/* Returns the inverses by which encoding multiplies the channels of the heads [first, first + n): those that the stream
   keeps, or in room: [n][head_dim]. NULL without a scale */
static const float *tqkv__inverses_of(const tqkv__stream *s, int first, int n, float *room)
{
    if (s->inverses || !s->channel_scale) return tqkv__of_head(s, s->inverses, first);
    tqkv__codec_for(s->head_dim)->invert(tqkv__scale_of(s, first), n * s->head_dim, room);
    return room;
}

/* Slots of a tile in one stream: [slot, slot + n). The codes `ahead` slots further on will be read next. */
typedef struct tqkv__segment {
    int slot, n, ahead;
} tqkv__segment;

/* The positions of a tile that a row sees: [from, to) without those whose bits are set. */
typedef struct tqkv__span {
    int from, to;
    uint64_t hidden;
} tqkv__span;

/* Unnormalised attention of some rows. out: [n_rows][value_dim], max, sum: [n_rows] */
typedef struct tqkv__sums {
    float *out, *max, *sum;
} tqkv__sums;

/* The functions of attention; every set gives the same bits. */
typedef struct tqkv__kernels {
    /* Makes integers of a query, in an order of the set's own, with their unit. query, to: [head_dim] */
    void (*round_query)(const tqkv__stream *s, const float *query, float *to);
    /* scores[row][j] (+)= q[row] . key[slot + j] for j < n, with the segment's slot and n; add: to the scores of
       another part of the keys. q: [n_rows][head_dim], scores: [n_rows][TQKV__TILE] */
    void (*score_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, const float *q, int n_rows,
                       bool add, float *scores);
    /* Turns the scores in each row's span into weights exp(score - max) and the others into 0; scales the row's sums to
       the new maximum. offsets are added to the scores before a softcap. spans, offsets, max, sum: [n_rows], scores:
       [n_rows][TQKV__TILE], out: [n_rows][value_dim] */
    void (*softmax_tile)(const struct tqkv__attention *a, const tqkv__span *spans, const float *offsets, int n_rows,
                         float *scores, float *max, float *sum, float *out);
    /* Adds the sums of a piece to those of its stretch, each rounded once, and clears them for the next piece, whose
       maximum goes on from here. */
    void (*end_piece)(int n_rows, int value_dim, const tqkv__sums *piece, const tqkv__sums *sums);
    /* out[row] += sum_j weights[row][j] * value[slot + j] for j < n. A weight of 0 adds nothing to integers, even
       beside a NaN norm; for floats see tqkv__add_values. weights, scaled (scratch): [n_rows][TQKV__TILE] */
    void (*value_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, const float *weights,
                       int n_rows, float *scaled, float *out);
    /* sums[j] += weights[row] * f(scores[row][j] + offsets[row]), row after row, each rounded once; f: see >>index.
       weights, offsets: [n_rows], scores: [n_rows][TQKV__TILE], sums: [TQKV__TILE] */
    void (*sum_heads)(const float *scores, const float *weights, const float *offsets, bool relu, int n_rows,
                      float *sums);
} tqkv__kernels;

typedef struct tqkv__isa {
    const char *name;
    int lanes; /* floats in a vector */
    const tqkv__codec *codec;
    const tqkv__kernels *kernels; /* NULL: by the products that the processor has */
} tqkv__isa;

static const tqkv__isa *tqkv__isa_for(int head_dim);

/* >>rotate-code: the rotation, in plain C */

/* Row `row` of the Hadamard matrix of order m: bit j = (p[j>>3] >> (j&7)) & 1, 1 is -1 */
static const uint8_t *tqkv__matrix_row(int m, int row)
{
    switch (m) {
    case 12:
        return tqkv__tables.hadamard_12[row];
    case 20:
        return tqkv__tables.hadamard_20[row];
    case 28:
        return tqkv__tables.hadamard_28[row];
    default:
        return tqkv__tables.hadamard_36[row];
    }
}

/* Mixes subrows: out[b] = sum over c = 0 .. m-1 of P[b][c] * x[c], in that order, for each column of x as [m][n]; P is
   of order m > 1. */
static void tqkv__mix_subrows(float *x, int m, int n)
{
    float column[36];
    for (int a = 0; a < n; a++) {
        for (int c = 0; c < m; c++) column[c] = x[c * n + a];
        for (int b = 0; b < m; b++) {
            const uint8_t *row = tqkv__matrix_row(m, b);
            float sum = row[0] & 1 ? -column[0] : column[0];
            for (int c = 1; c < m; c++)
                sum = TQKV__AS_FLOAT((row[c / 8] >> (c % 8)) & 1 ? sum - column[c] : sum + column[c]);
            x[b * n + a] = sum;
        }
    }
}

/* Applies the Walsh-Hadamard transform to each subrow in natural order, then the matrix across the subrows;
   unnormalised. x: [head_dim] */
static void tqkv__hadamard(float *x, int head_dim)
{
    const int m = tqkv__size_of(head_dim)->order, n = tqkv__size_of(head_dim)->subrow;
    for (int h = 1; h < n; h *= 2)
        for (int i = 0; i < head_dim; i += 2 * h)
            for (int j = i; j < i + h; j++) {
                float a = x[j], b = x[j + h];
                x[j] = TQKV__AS_FLOAT(a + b);
                x[j + h] = TQKV__AS_FLOAT(a - b);
            }
    if (m > 1) tqkv__mix_subrows(x, m, n);
}

static void tqkv__flip_signs(float *x, int head_dim)
{
    for (int j = 0; j < head_dim; j++)
        if ((tqkv__tables.signs[j % 512 / 8] >> (j % 8)) & 1) x[j] = -x[j];
}

/* Rotates, y = R(s*x)/sqrt(D), in double, for sums of far larger terms. */
static void tqkv__rotate_double(double *x, int head_dim)
{
    const int m = tqkv__size_of(head_dim)->order, n = tqkv__size_of(head_dim)->subrow;
    double y[36]; /* of each subrow one value at a time: a row would take 8 KB more of the stack */
    for (int j = 0; j < head_dim; j++)
        if ((tqkv__tables.signs[j % 512 / 8] >> (j % 8)) & 1) x[j] = -x[j];
    for (int h = 1; h < n; h *= 2)
        for (int i = 0; i < head_dim; i++) {
            if (i & h) continue;
            const double a = x[i], b = x[i | h];
            x[i] = a + b;
            x[i | h] = a - b;
        }
    for (int i = 0; m > 1 && i < n; i++) {
        for (int b = 0; b < m; b++) {
            y[b] = 0.0;
            for (int c = 0; c < m; c++)
                y[b] += (tqkv__matrix_row(m, b)[c / 8] >> (c % 8)) & 1 ? -x[c * n + i] : x[c * n + i];
        }
        for (int b = 0; b < m; b++) x[b * n + i] = y[b];
    }
    for (int j = 0; j < head_dim; j++) x[j] = x[j] / sqrt((double)head_dim);
}

static void tqkv__scale(float *x, int n, float factor)
{
    for (int i = 0; i < n; i++) x[i] = TQKV__AS_FLOAT(x[i] * factor);
}

/* y = R(s*x)/sqrt(D) */
static TQKV__NOINLINE void tqkv__rotate_row(float *x, int head_dim)
{
    tqkv__flip_signs(x, head_dim);
    tqkv__hadamard(x, head_dim);
    tqkv__scale(x, head_dim, tqkv__size_of(head_dim)->inverse_root);
}

/* x = s*R(y)/sqrt(D) */
static TQKV__NOINLINE void tqkv__unrotate_row(float *y, int head_dim)
{
    tqkv__hadamard(y, head_dim);
    tqkv__scale(y, head_dim, tqkv__size_of(head_dim)->inverse_root);
    tqkv__flip_signs(y, head_dim);
}

/* >>codec: norms, quantising, packing, and back, in plain C: the specification */

/* Returns the norm of a TQ row, or of 256 of its values, from the sum of their squares; scale brings them to variance
   1. fabsf clears the sign of a NaN, which depends on the machine. */
static float tqkv__norm_tq(const tqkv__stream *s, float sum, float *scale)
{
    const bool one = s->norms_per_row == 1;
    const float norm = fabsf(TQKV__AS_FLOAT(sqrtf(one ? sum : TQKV__AS_FLOAT(sum / 256.0f))));
    const float inverse = norm > TQKV__MIN_NORM ? TQKV__AS_FLOAT(1.0f / norm) : 0.0f;
    *scale = TQKV__AS_FLOAT(inverse * (one ? s->root : s->block_scale));
    return norm;
}

/* Returns the norm of the I8 values that share it, the largest magnitude / 127; scale: 1 / step of the grid. Both are 0
   for values near 0. -freciprocal-math would multiply by 1/127 if the compiler knew the divisor. */
static float tqkv__norm_i8(float largest, float *scale)
{
    const volatile float steps = 127.0f;
    *scale = 0.0f;
    if (!(largest > TQKV__MIN_NORM)) return 0.0f;
    *scale = TQKV__AS_FLOAT(steps / largest);
    return TQKV__AS_FLOAT(largest / steps);
}

/* Returns the sum of the products of x and y in 16 strided lanes: product d is added to lane d % 16, in order, then the
   lanes are added by halves. x, y: [n], n a multiple of 16 */
static float tqkv__strided_dot(const float *x, const float *y, int n)
{
    float lanes[16] = {0};
    for (int d = 0; d < n; d++) lanes[d % 16] = TQKV__AS_FLOAT(lanes[d % 16] + tqkv__rounded(x[d] * y[d]));
    return tqkv__sum_16(lanes);
}

/* The stored norm makes the decoded row as long as the row was: norm * sqrt(D)/|c|, c being the codes' centroids; of
   several, norm * block_scale / RMS of c. sums: of the squares of c */
static void tqkv__correct_norms(const tqkv__stream *s, const float *sums, float *norms)
{
    const bool one = s->norms_per_row == 1;
    const float root = one ? s->root : s->block_scale;
    for (int b = 0; b < s->norms_per_row; b++) {
        const float length = TQKV__AS_FLOAT(sqrtf(one ? sums[b] : TQKV__AS_FLOAT(sums[b] / 256.0f)));
        const float factor = tqkv__rounded(root / length);
        norms[b] = norms[b] <= TQKV__MIN_NORM ? 0.0f : TQKV__AS_FLOAT(norms[b] * factor);
    }
}

/* Rotates a centred row, finds its norms and scales it, in place: all of encoding before the comparison with the
   boundaries. F16 is not scaled. row: [head_dim], norms: [norms_per_row]. */
static TQKV__NOINLINE void tqkv__scale_row(const tqkv__stream *s, float *row, float *norms)
{
    const int n = s->norm_dim;
    if (s->rotated) tqkv__rotate_row(row, s->head_dim);
    for (int b = 0; b < s->norms_per_row; b++, row += n) {
        float scale, largest = 0.0f;
        for (int i = 0; i < n; i++) largest = fabsf(row[i]) > largest ? fabsf(row[i]) : largest;
        norms[b] = s->kind == TQKV__GRID ? tqkv__norm_i8(largest, &scale)
                                         : tqkv__norm_tq(s, tqkv__strided_dot(row, row, n), &scale);
        tqkv__scale(row, n, scale);
    }
}

/* Returns the number of boundaries below v, by bisection; boundaries: [(1 << bits) - 1]. NaN gives 0. */
static unsigned tqkv__quantise(const float *boundaries, int bits, float v)
{
    unsigned code = 0;
    for (unsigned half = 1u << (bits - 1); half; half >>= 1)
        if (boundaries[code + half - 1] < v) code += half;
    return code;
}

/* Returns round-half-even(v), clamped to +-127; NaN gives 127. The sum with 1.5*2^23 has no bits below 1. */
static uint8_t tqkv__quantise_i8(float v)
{
    const float magic = 12582912.0f;
    v = v < 127.0f ? v : 127.0f;
    v = v > -127.0f ? v : -127.0f;
    return (uint8_t)(int8_t)(tqkv__rounded(TQKV__AS_FLOAT(v) + magic) - magic);
}

/* Rounds to nearest even, and clamps beyond 65504. Integer arithmetic does not depend on the rounding mode. */
static uint16_t tqkv__half_from_float(float x)
{
    const uint32_t bits = tqkv__bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude >= 0x477ff000u) { /* 65520: would round to infinity */
        half = 0x7bffu;
    } else if (magnitude >= 0x38800000u) { /* 2^-14: a normal half */
        half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    } else { /* a multiple of 2^-24 */
        const uint32_t shift = 126u - (magnitude >> 23), mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        half = shift > 24u ? 0u : (mantissa + (1u << (shift - 1)) - 1u + ((mantissa >> shift) & 1u)) >> shift;
    }
    return (uint16_t)(sign | half);
}

static float tqkv__float_from_half(uint16_t half)
{
    const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude < 0x400u) {
        const float x = (float)magnitude * (1.0f / 16777216.0f);
        return sign ? -x : x;
    }
    return tqkv__float(sign | ((magnitude << 13) + (magnitude < 0x7c00u ? 0x38000000u : 0x70000000u)));
}

/* Scales are in [2^-32, 2^32]: their bits, those of positive floats, are ordered as they are. */
#define TQKV__LEAST_SCALE  0x2f800000u
#define TQKV__SCALES_RANGE 0x20000000u
static bool tqkv__scales_valid(const float *x, size_t n)
{
    uint32_t bad[16] = {0}; /* lanes: n is a multiple of 16 */
    for (; n; n -= 16, x += 16)
        for (int k = 0; k < 16; k++) bad[k] |= tqkv__bits(x[k]) - TQKV__LEAST_SCALE > TQKV__SCALES_RANGE;
    for (int k = 1; k < 16; k++) bad[0] |= bad[k];
    return !bad[0];
}

/* Compilers may replace a division by a constant; see tqkv__norm_i8. */
static TQKV__NOINLINE void tqkv__invert(const float *scales, int n, float *inverses)
{
    const volatile float one = 1.0f;
    const float dividend = one;
    for (int i = 0; i < n; i++) inverses[i] = TQKV__AS_FLOAT(dividend / scales[i]);
}

/* Makes floats of a row, less its centre and times its inverses, unless these are NULL. All arrays: [n] */
static void tqkv__widen_row(tqkv_type type, const void *src, const float *center, const float *inverses, int n,
                            float *row)
{
    if (type == TQKV_TYPE_F32)
        memcpy(row, src, (size_t)n * sizeof(float));
    else if (type == TQKV_TYPE_F16)
        for (int i = 0; i < n; i++) row[i] = tqkv__float_from_half(tqkv__half_at(src, (size_t)i));
    else
        for (int i = 0; i < n; i++) row[i] = tqkv__float((uint32_t)tqkv__half_at(src, (size_t)i) << 16);
    if (center)
        for (int i = 0; i < n; i++) row[i] = TQKV__AS_FLOAT(row[i] - center[i]);
    if (inverses)
        for (int i = 0; i < n; i++) row[i] = tqkv__rounded(row[i] * inverses[i]);
}

/* Rounds to nearest even, beyond the largest half to infinity. NaN stays NaN: it keeps its upper bits and becomes
   quiet, as by the processors' instructions. */
static uint16_t tqkv__half_rounded(float x)
{
    const uint32_t bits = tqkv__bits(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    if (magnitude < 0x477ff000u) return tqkv__half_from_float(x);
    return (uint16_t)(sign | 0x7c00u | (magnitude > 0x7f800000u ? 0x200u | (magnitude >> 13 & 0x3ffu) : 0u));
}

static uint16_t tqkv__bfloat16_rounded(float x)
{
    const uint32_t bits = tqkv__bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static void tqkv__narrow_row(tqkv_type type, const float *row, int n, void *dst)
{
    uint8_t *to = (uint8_t *)dst;
    if (type == TQKV_TYPE_F32) memcpy(dst, row, (size_t)n * sizeof(float));
    if (type != TQKV_TYPE_F32)
        for (int i = 0; i < n; i++, to += 2) {
            const uint16_t half = type == TQKV_TYPE_F16 ? tqkv__half_rounded(row[i]) : tqkv__bfloat16_rounded(row[i]);
            memcpy(to, &half, sizeof half);
        }
}

/* Packs codes: [head_dim] -> row: [row_bytes]: the field of main bits, then the field of upper bits */
static void tqkv__pack(const tqkv__stream *s, const uint8_t *codes, uint8_t *row)
{
    const int main_bits = s->main_bits, upper_bits = s->upper_bits, mask = (1 << main_bits) - 1;
    uint8_t *upper = row + s->head_dim * main_bits / 8;
    memset(row, 0, s->row_bytes);
    for (int i = 0; i < s->head_dim; i++) {
        row[i * main_bits / 8] |= (uint8_t)((codes[i] & mask) << (i * main_bits % 8));
        if (upper_bits) upper[i * upper_bits / 8] |= (uint8_t)(codes[i] >> main_bits << (i * upper_bits % 8));
    }
}

/* Unpacks n codes of a row from number `first` on. Every byte is valid: bits above a code are ignored. codes: [n] */
static void tqkv__unpack(const tqkv__stream *s, const uint8_t *row, int first, int n, uint8_t *codes)
{
    const int main_bits = s->main_bits, upper_bits = s->upper_bits;
    const int main_mask = (1 << main_bits) - 1, code_mask = s->book_bits ? (1 << s->book_bits) - 1 : main_mask;
    const uint8_t *upper = row + s->head_dim * main_bits / 8;
    for (int i = first; i < first + n; i++) {
        int code = (row[i * main_bits / 8] >> (i * main_bits % 8)) & main_mask;
        if (upper_bits) code |= upper[i * upper_bits / 8] >> (i * upper_bits % 8) << main_bits;
        *codes++ = (uint8_t)(code & code_mask);
    }
}

/* A value beyond every boundary: max(v, -TQKV__FAR) has the code of v and is never NaN. */
#define TQKV__FAR 100.0f

/* Quantising without bisection. Boundaries are symmetric; the positive ones suffice. Each of 2^bits cells of equal
   width holds at most one, away from the cell's ends, so a rounding into the next cell changes nothing. One comparison
   remains, with the boundary in the value's cell or, if it has none, the next one. */
#define TQKV__CELL_MARGIN 0.004f /* of a cell's width; a value's cell is off by 0.0001 at most */
typedef struct tqkv__cell {
    float bound, below, above; /* what a value there is compared with, and the centroids on both sides of that */
    uint32_t n_below;          /* boundaries below the value, but for this one */
} tqkv__cell;

typedef struct tqkv__quantiser {
    TQKV__ALIGNED tqkv__cell cells[256];
    /* Of codebooks of up to 6 bits, for look-ups in registers: n_below of each cell, and the positive boundaries, then
       infinity, and centroids */
    uint8_t n_below[64];
    float bounds[32], centroids[32];
    float squares[8]; /* TQ2: of its centroids, repeated */
    float slope, top; /* cell of a magnitude w: the whole part of min(w * slope, top) */
    int half;         /* the codes of one sign */
} tqkv__quantiser;

static void tqkv__quantiser_open(const tqkv__stream *s, tqkv__quantiser *q)
{
    const int bits = s->book_bits, n = (1 << (bits - 1)) - 1;
    const float *positive = s->boundaries + n + 1, *centroids = s->codebook + n + 1; /* boundaries[n] is 0 */
    int i = 0;
    q->half = n + 1;
    q->top = (float)((1 << bits) - 1);
    q->slope = (q->top + 0.45f) / positive[n - 1];
    for (int c = 0; c < 1 << bits; c++) {
        const tqkv__cell cell = {i < n ? positive[i] : INFINITY, centroids[i], centroids[i < n ? i + 1 : n],
                                 (uint32_t)i};
        const float at = i < n ? positive[i] * q->slope : INFINITY;
        TQKV_ASSERT(i == n || (at - floorf(at) > TQKV__CELL_MARGIN && at - floorf(at) < 1.0f - TQKV__CELL_MARGIN));
        q->cells[c] = cell;
        if (c < 64) q->n_below[c] = (uint8_t)i;
        i += at < (float)(c + 1) || (i < n && c == (1 << bits) - 1);
    }
    for (i = 0; i < 32; i++) {
        q->bounds[i] = i < n ? positive[i] : INFINITY;
        q->centroids[i] = centroids[i < n ? i : n];
    }
    for (i = 0; i < 8; i++) q->squares[i] = TQKV__AS_FLOAT(s->codebook[i & 3] * s->codebook[i & 3]);
}

/* Source and destination of a row. src, center and inverses (or NULL): [head_dim], codes: [row_bytes], norms, and
   factors of a search (or NULL): [norms_per_row]; half: [2 * head_dim] or NULL, takes the rotated row as halves */
typedef struct tqkv__row {
    const void *src;
    const float *center, *inverses;
    uint8_t *codes;
    float *norms, *factors;
    uint8_t *half;
} tqkv__row;

static void tqkv__store_halves(const float *x, int n, uint8_t *to)
{
    for (int i = 0; i < n; i++) {
        const uint16_t half = tqkv__half_from_float(x[i]);
        to[2 * i] = (uint8_t)(half & 255);
        to[2 * i + 1] = (uint8_t)(half >> 8);
    }
}

/* The norm of a row is not the scale that its values are best coded with. Tries the format's factors on n scaled values
   that share a norm, and takes the first with the largest (sum of v*c)^2 / (sum of c*c), c being the codes' centroids;
   the first of all if that is NaN. v: [n] -> codes: [n]; returns the sum of c*c */
static TQKV__NOINLINE float tqkv__search_block(const tqkv__stream *s, const float *v, int n, uint8_t *codes,
                                               float *factor)
{
    float centroids[TQKV_MAX_HEAD_DIM], best = 0.0f, squares = 0.0f;
    uint8_t tried[TQKV_MAX_HEAD_DIM];
    for (int f = 0; f < s->n_factors; f++) {
        for (int i = 0; i < n; i++) {
            tried[i] = (uint8_t)tqkv__quantise(s->boundaries, s->book_bits, TQKV__AS_FLOAT(v[i] * s->factors[f]));
            centroids[i] = s->codebook[tried[i]];
        }
        const float product = tqkv__strided_dot(v, centroids, n), sum = tqkv__strided_dot(centroids, centroids, n);
        const float share = TQKV__AS_FLOAT(tqkv__rounded(product * product) / sum);
        if (f > 0 && !(share > best)) continue;
        best = share;
        squares = sum;
        *factor = s->factors[f];
        memcpy(codes, tried, (size_t)n);
    }
    return squares;
}

static TQKV__NOINLINE void tqkv__encode_row(const tqkv__stream *s, const tqkv__row *row)
{
    float x[TQKV_MAX_HEAD_DIM], squares[TQKV_MAX_HEAD_DIM / 256], factors[TQKV_MAX_HEAD_DIM / 256];
    uint8_t codes[TQKV_MAX_HEAD_DIM];
    tqkv__widen_row(s->type, row->src, row->center, row->inverses, s->head_dim, x);
    if (row->half) {
        float rotated[TQKV_MAX_HEAD_DIM];
        memcpy(rotated, x, (size_t)s->head_dim * sizeof(float));
        if (s->rotated) tqkv__rotate_row(rotated, s->head_dim);
        tqkv__store_halves(rotated, s->head_dim, row->half);
    }
    tqkv__scale_row(s, x, row->norms);
    if (s->kind == TQKV__HALF) {
        tqkv__store_halves(x, s->head_dim, row->codes);
        return;
    }
    for (int i = 0; i < s->head_dim && s->kind == TQKV__GRID; i++) codes[i] = tqkv__quantise_i8(x[i]);
    if (s->kind == TQKV__BOOK) {
        float *factor = row->factors ? row->factors : factors;
        for (int b = 0; b < s->norms_per_row; b++)
            squares[b] = tqkv__search_block(s, x + b * s->norm_dim, s->norm_dim, codes + b * s->norm_dim, &factor[b]);
        tqkv__correct_norms(s, squares, row->norms);
    }
    tqkv__pack(s, codes, row->codes);
}

static void tqkv__encode_rows(const tqkv__stream *s, const tqkv__quantiser *q, const tqkv__row *rows, int n_rows)
{
    (void)q; /* bisection needs no tables */
    for (int i = 0; i < n_rows; i++) tqkv__encode_row(s, &rows[i]);
}

static const tqkv__codec tqkv__codec_scalar = {tqkv__values_finite, tqkv__largest_bits, tqkv__invert,
                                               tqkv__widen_row,     tqkv__narrow_row,   tqkv__rotate_row,
                                               tqkv__unrotate_row,  tqkv__encode_rows};

static float tqkv__factor(const tqkv__stream *s, float norm)
{
    if (s->kind == TQKV__GRID) return norm;
    return TQKV__AS_FLOAT(s->norms_per_row == 1 ? norm * s->inverse_root : norm / s->block_scale);
}

/* dst: [head_dim], in the basis of the stream */
static TQKV__NOINLINE void tqkv__decode_row(const tqkv__stream *s, const uint8_t *row, const float *norms, float *dst)
{
    uint8_t codes[TQKV_MAX_HEAD_DIM];
    if (s->kind == TQKV__HALF) {
        for (int i = 0; i < s->head_dim; i++)
            dst[i] = tqkv__float_from_half((uint16_t)(row[2 * i] | row[2 * i + 1] << 8));
        return;
    }
    tqkv__unpack(s, row, 0, s->head_dim, codes);
    for (int b = 0; b < s->norms_per_row; b++) {
        const float factor = tqkv__factor(s, norms[b]);
        for (int i = b * s->norm_dim; i < (b + 1) * s->norm_dim; i++)
            dst[i] = TQKV__AS_FLOAT((s->kind == TQKV__GRID ? (float)(int8_t)codes[i] : s->codebook[codes[i]]) * factor);
    }
}

/* Multiplies: dst *= scale of the head; dst: [head_dim], in the original basis */
static TQKV__NOINLINE void tqkv__apply_scale(const tqkv__stream *s, int kv_head, float *dst)
{
    const float *scale = tqkv__scale_of(s, kv_head);
    for (int d = 0; scale && d < s->head_dim; d++) dst[d] = TQKV__AS_FLOAT(dst[d] * scale[d]);
}

/* Adds: dst += centre of the head, or, in the basis of the codes, what encoding makes of it; dst: [head_dim] */
static TQKV__NOINLINE void tqkv__add_center(const tqkv__stream *s, int kv_head, bool coded, float *dst)
{
    float center[TQKV_MAX_HEAD_DIM], room[TQKV_MAX_HEAD_DIM];
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    if (!s->center) return;
    const float *inverses = coded ? tqkv__inverses_of(s, kv_head, 1, room) : NULL;
    codec->widen(TQKV_TYPE_F32, tqkv__center_of(s, kv_head), NULL, inverses, s->head_dim, center);
    if (coded && s->rotated) codec->rotate(center, s->head_dim);
    for (int d = 0; d < s->head_dim; d++) dst[d] = TQKV__AS_FLOAT(dst[d] + center[d]);
}

/* Decodes row and norms of a head -> dst: [head_dim], in a basis of the caller's, with the centre. */
static TQKV__NOINLINE void tqkv__decode_in(const tqkv__stream *s, int kv_head, const uint8_t *row, const float *norms,
                                           tqkv_basis basis, float *dst)
{
    tqkv__decode_row(s, row, norms, dst);
    if (s->rotated && basis == TQKV_ORIGINAL) tqkv__codec_for(s->head_dim)->unrotate(dst, s->head_dim);
    if (s->channel_scale && basis == TQKV_ORIGINAL) tqkv__apply_scale(s, kv_head, dst);
    if (s->center) tqkv__add_center(s, kv_head, basis == TQKV_ROTATED, dst);
}

/* >>encode: rows into a store and out of it; how they lie on the scale */

/* Opens a store to encode at `position`; *bytes: of src, with gaps. The checks that encode and append share, except for
   NaN and infinity. */
static tqkv_result tqkv__encode_open(const tqkv_store *store, const void *src, int n_tokens, int64_t position,
                                     tqkv__stream *s, size_t *bytes)
{
    tqkv_result r = tqkv__stream_open(store, s);
    if (r == TQKV_OK) r = tqkv__check_rows(s, src, n_tokens, bytes);
    if (r != TQKV_OK) return r;
    if (tqkv__encoding_overlaps(s, src, *bytes))
        return TQKV__INVALID("src overlaps the store"); /* it may overlap the centre, which is only read */
    r = tqkv__check_positions(s, n_tokens, position, -1);
    return r == TQKV_OK ? tqkv__check_written(s, n_tokens, position) : r;
}

/* Whether [n][n_heads] rows hold neither NaN nor infinity: in one go, or token by token, or row by row. */
static bool tqkv__all_rows_finite(const tqkv__codec *codec, tqkv_type type, const void *p, tqkv_strides strides, int n,
                                  int n_heads, int dim)
{
    const size_t size = tqkv__type_size(type), row = (size_t)dim, heads = (size_t)n_heads;
    if (strides.head == row && strides.token == heads * row)
        return codec->rows_finite(type, p, (size_t)n * heads * row);
    const size_t each = strides.head == row ? 1 : heads, length = heads / each * row; /* each: rows of a token */
    for (size_t t = 0; t < (size_t)n; t++)
        for (size_t h = 0; h < each; h++)
            if (!codec->rows_finite(type, (const uint8_t *)p + (t * strides.token + h * strides.head) * size, length))
                return false;
    return true;
}

static bool tqkv__rows_finite(const tqkv__stream *s, const void *src, int n_tokens)
{
    return tqkv__all_rows_finite(tqkv__codec_for(s->head_dim), s->type, src, s->strides, n_tokens, s->n_kv_heads,
                                 s->head_dim);
}

static tqkv_result tqkv__check_source(const tqkv__stream *s, const void *src, int n_tokens, const void *to,
                                      size_t alignment, size_t size)
{
    size_t bytes;
    const tqkv_result r = tqkv__check_rows(s, src, n_tokens, &bytes);
    if (r != TQKV_OK) return r;
    if (!tqkv__aligned_at(to, alignment) || tqkv__overlap(src, bytes, to, size) || tqkv__channels_overlap(s, to, size))
        return TQKV__INVALID(
            "scaled, mean or out: NULL, not aligned as its type, or overlaps src, the centre or the scale");
    return tqkv__rows_finite(s, src, n_tokens) ? TQKV_OK : TQKV__REFUSE(NOT_FINITE, "src holds NaN or infinity");
}

/* Returns the first token to write: of more than a ring holds only the last ones, so that none is overwritten. */
static int tqkv__first_kept(const tqkv__stream *s, int n_tokens)
{
    return s->ring && n_tokens > s->capacity ? n_tokens - s->capacity : 0;
}

/* Tokens [from, to) of src; src[0] is for `position`. halves: a ring of halves that takes what remains in it of the
   tokens up to `end`, too, or NULL */
typedef struct tqkv__tokens {
    const tqkv__stream *halves;
    const void *src;
    int from, to;
    int64_t position, end;
} tqkv__tokens;

/* Encodes tokens of the heads [first, first + n_heads); inverses: theirs, [n_heads][head_dim], or NULL */
static void tqkv__encode_heads(const tqkv__stream *s, const tqkv__quantiser *q, int first, int n_heads,
                               const float *inverses, const tqkv__tokens *tokens)
{
    enum { batch = 32 };
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    tqkv__row rows[batch];
    const tqkv__stream *halves = tokens->halves;
    int n = 0;
    for (int t = tokens->from; t < tokens->to; t++) {
        const int64_t position = tokens->position + t;
        const int slot = tqkv__slot(s, position);
        const bool half = halves && tokens->end - position <= halves->capacity;
        const int half_slot = half ? tqkv__slot(halves, position) : 0;
        if (slot >= 0)
            for (int i = 0; i < n_heads; i++) {
                const int h = first + i;
                const void *src = tqkv__source_row(s, tokens->src, (size_t)t, (size_t)h);
                const tqkv__row row = {src,
                                       tqkv__center_of(s, h),
                                       tqkv__of_head(s, inverses, i),
                                       tqkv__codes_at(s, h, slot),
                                       tqkv__norms_at(s, h, slot),
                                       NULL,
                                       half ? tqkv__codes_at(halves, h, half_slot) : NULL};
                rows[n] = row;
                if (++n == batch) codec->encode_rows(s, q, rows, n);
                n %= batch;
            }
    }
    if (n) codec->encode_rows(s, q, rows, n);
}

/* Encodes tokens after tqkv__encode_open. With a scale as many heads at a time as have their inverses in 4 KiB, so that
   each inverse is found once. */
static void tqkv__encode_tokens(const tqkv__stream *s, const tqkv__tokens *tokens)
{
    float room[TQKV_MAX_HEAD_DIM];
    const uint64_t mode = tqkv__fp_exact();
    const int most = s->channel_scale && !s->inverses ? TQKV_MAX_HEAD_DIM / s->head_dim : s->n_kv_heads;
    tqkv__quantiser q;
    if (s->kind == TQKV__BOOK) tqkv__quantiser_open(s, &q);
    for (int h = 0; h < s->n_kv_heads; h += most) {
        const int n = s->n_kv_heads - h < most ? s->n_kv_heads - h : most;
        tqkv__encode_heads(s, &q, h, n, tqkv__inverses_of(s, h, n, room), tokens);
    }
    tqkv__fp_restore(mode);
}

/* How a stream's rows are kept as halves besides: as they came, or as its codes' rows are before they are scaled. */
enum { TQKV__RAW_HALVES = 1, TQKV__ROTATED_HALVES = 2 };

/* Whether halves hold a row; see TQKV__LEAST_HALF. Less a centre all values may be small. Tests bits, as
   tqkv__all_finite does. */
static bool tqkv__in_halves(const float *row, int n, bool centered)
{
    const uint32_t largest = tqkv__largest_bits(row, (size_t)n);
    return largest < tqkv__bits(TQKV__BEYOND_HALVES) &&
           (centered || largest == 0 || largest >= tqkv__bits(TQKV__LEAST_HALF));
}

/* Whether halves hold n tokens: in any rotation if the largest value is not near their ends, because a rotation of 1024
   values changes it by a factor of 32 at most. False for NaN and infinity. */
static TQKV__NOINLINE bool tqkv__rows_in_halves(const tqkv__stream *s, int halves, const void *src, int n)
{
    TQKV__ALIGNED float own[TQKV_MAX_HEAD_DIM];
    float room[TQKV_MAX_HEAD_DIM];
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    const uint32_t least = tqkv__bits(TQKV__LEAST_HALF * 32.0f), beyond = tqkv__bits(TQKV__BEYOND_HALVES / 32.0f);
    const uint64_t mode = tqkv__fp_exact();
    const bool widens = s->type != TQKV_TYPE_F32 || s->center || s->channel_scale;
    bool fit = true;
    for (int h = 0; h < s->n_kv_heads && fit; h++) {
        const float *center = tqkv__center_of(s, h), *inverses = tqkv__inverses_of(s, h, 1, room);
        for (int t = 0; t < n && fit; t++) {
            const void *row = tqkv__source_row(s, src, (size_t)t, (size_t)h);
            if (widens) codec->widen(s->type, row, center, inverses, s->head_dim, own);
            const uint32_t largest = codec->largest_bits(widens ? own : (const float *)row, (size_t)s->head_dim);
            if (largest - least < beyond - least) continue;
            if (!widens) memcpy(own, row, (size_t)s->head_dim * sizeof(float));
            if (halves & TQKV__RAW_HALVES) fit = tqkv__in_halves(own, s->head_dim, center != NULL);
            if (!(halves & TQKV__ROTATED_HALVES) || !fit) continue;
            codec->rotate(own, s->head_dim);
            fit = tqkv__in_halves(own, s->head_dim, center != NULL);
        }
    }
    tqkv__fp_restore(mode);
    return fit;
}

/* Encodes the same tokens into some streams, each from its own source: tasks for some tokens of one of them. The hook
   runs them twice: first they test for NaN and Inf, and for what halves do not hold, then they encode. */
enum { TQKV__ENCODE_STREAMS = 3, TQKV__ENCODE_TASKS = 16 };
typedef struct tqkv__encode_job {
    const tqkv__stream *streams[TQKV__ENCODE_STREAMS], *halves[TQKV__ENCODE_STREAMS];
    const void *src[TQKV__ENCODE_STREAMS];
    int as_halves[TQKV__ENCODE_STREAMS];
    tqkv_parallel parallel;
    int n_streams, n_tokens, n_tasks; /* n_tasks: of each stream */
    int64_t position;
    bool encode;
    bool bad[TQKV__ENCODE_STREAMS * TQKV__ENCODE_TASKS], unfit[TQKV__ENCODE_STREAMS * TQKV__ENCODE_TASKS];
} tqkv__encode_job;

static void tqkv__encode_task(void *context, int index)
{
    tqkv__encode_job *job = (tqkv__encode_job *)context;
    const int stream = index / job->n_tasks, share = index % job->n_tasks;
    const tqkv__stream *s = job->streams[stream];
    const void *src = job->src[stream];
    const int first = job->encode ? tqkv__first_kept(s, job->n_tokens) : 0;
    const int from = first + (int)((int64_t)(job->n_tokens - first) * share / job->n_tasks);
    const int to = first + (int)((int64_t)(job->n_tokens - first) * (share + 1) / job->n_tasks);
    const tqkv__tokens tokens = {job->halves[stream], src, from, to, job->position, job->position + job->n_tokens};
    if (job->encode) {
        tqkv__encode_tokens(s, &tokens);
        return;
    }
    const void *rows = tqkv__source_row(s, src, (size_t)from, 0);
    if (job->as_halves[stream] && tqkv__rows_in_halves(s, job->as_halves[stream], rows, to - from)) return;
    job->bad[index] = !tqkv__rows_finite(s, rows, to - from);
    job->unfit[index] = job->as_halves[stream] && !job->bad[index];
}

static void tqkv__encode_job_open(tqkv__encode_job *job, const tqkv_parallel *parallel, int n_tokens, int64_t position)
{
    memset(job, 0, sizeof *job);
    job->parallel = *parallel;
    job->n_tokens = n_tokens;
    job->position = position;
}

static void tqkv__add_stream(tqkv__encode_job *job, const tqkv__stream *s, const void *src)
{
    TQKV_ASSERT(job->n_streams < TQKV__ENCODE_STREAMS);
    job->streams[job->n_streams] = s;
    job->src[job->n_streams++] = src;
}

/* Returns the number of tasks for tokens of a stream: one or, with a hook, one for each 64 KiB of floats, which take
   about ten microseconds. */
static int tqkv__tasks_for(const tqkv_parallel *parallel, const tqkv__stream *s, int n_tokens)
{
    const int64_t wanted = (int64_t)n_tokens * s->n_kv_heads * s->head_dim / 16384;
    const bool serial = !parallel->run || parallel->run == tqkv__run_serial;
    return serial || wanted < 1 ? 1 : wanted < TQKV__ENCODE_TASKS ? (int)wanted : TQKV__ENCODE_TASKS;
}

static void tqkv__run_encode_tasks(tqkv__encode_job *job)
{
    job->n_tasks = job->n_streams ? tqkv__tasks_for(&job->parallel, job->streams[0], job->n_tokens) : 1;
    if (job->n_tasks > 1)
        job->parallel.run(job->parallel.user, job->n_streams * job->n_tasks, tqkv__encode_task, job);
    else
        tqkv__run_serial(NULL, job->n_streams, tqkv__encode_task, job);
}

/* Refuses sources that hold NaN or infinity, or what halves do not hold; in rows that are left out, too. */
static tqkv_result tqkv__check_sources(tqkv__encode_job *job)
{
    bool bad = false, unfit = false;
    job->encode = false;
    tqkv__run_encode_tasks(job);
    for (int i = 0; i < job->n_streams * job->n_tasks; i++) {
        bad = bad || job->bad[i];
        unfit = unfit || job->unfit[i];
    }
    if (bad) return TQKV__REFUSE(NOT_FINITE, "the rows to encode hold NaN or infinity");
    if (unfit)
        return TQKV__REFUSE(NOT_FINITE, "k or v: a row beyond 65504, or all of it below 2^-17 but not 0: the halves of "
                                        "calibrate, exact_first and exact_last do not hold it, codes alone do");
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_encode(const tqkv_store *store, const void *src, int n_tokens, int64_t position)
{
    tqkv__stream s;
    tqkv__encode_job job;
    size_t bytes;
    tqkv_result r = tqkv__encode_open(store, src, n_tokens, position, &s, &bytes);
    if (r != TQKV_OK) return r;
    tqkv__encode_job_open(&job, &store->parallel, n_tokens, position);
    tqkv__add_stream(&job, &s, src);
    r = tqkv__check_sources(&job);
    if (r != TQKV_OK) return r;
    job.encode = true;
    tqkv__run_encode_tasks(&job);
    return TQKV_OK;
}

TQKV__COLD TQKV_API tqkv_result tqkv_probe(const tqkv_store *store, const void *src, int n_tokens, float *scaled)
{
    tqkv__stream s;
    float norms[TQKV_MAX_HEAD_DIM / 128], room[TQKV_MAX_HEAD_DIM];
    tqkv_result r = tqkv__stream_shape(store, &s);
    if (r == TQKV_OK) r = tqkv__stream_channels(store, &s);
    const size_t size = (size_t)n_tokens * tqkv__center_size(&s); /* overflows only if the rows do */
    if (r == TQKV_OK) r = tqkv__check_source(&s, src, n_tokens, scaled, sizeof(float), size);
    if (r != TQKV_OK) return r;
    const tqkv__codec *codec = tqkv__codec_for(s.head_dim);
    const uint64_t mode = tqkv__fp_exact();
    for (size_t h = 0; h < (size_t)s.n_kv_heads; h++) {
        const float *inverses = tqkv__inverses_of(&s, (int)h, 1, room);
        for (size_t i = 0; i < (size_t)n_tokens; i++) {
            float *row = scaled + (i * (size_t)s.n_kv_heads + h) * (size_t)s.head_dim;
            codec->widen(s.type, tqkv__source_row(&s, src, i, h), tqkv__center_of(&s, (int)h), inverses, s.head_dim,
                         row);
            tqkv__scale_row(&s, row, norms);
        }
    }
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

TQKV__COLD TQKV_API tqkv_result tqkv_decode(const tqkv_store *store, int64_t position, int n_positions,
                                            tqkv_basis basis, void *dst)
{
    tqkv__stream s;
    size_t bytes;
    tqkv_result r = tqkv__open_positions(store, n_positions, position, &s);
    if (r != TQKV_OK) return r;
    if ((r = tqkv__check_rows(&s, dst, n_positions, &bytes)) != TQKV_OK) return r;
    if (!tqkv__basis_known(basis)) return TQKV__INVALID("basis: no tqkv_basis");
    if (tqkv__stream_overlaps(&s, dst, bytes)) return TQKV__INVALID("dst overlaps the store");
    if (!tqkv__rows_distinct(s.strides, n_positions, s.n_kv_heads, s.head_dim)) return TQKV__INVALID(TQKV__ROWS_SHARED);
    const tqkv__codec *codec = tqkv__codec_for(s.head_dim);
    const uint64_t mode = tqkv__fp_exact();
    float wide[TQKV_MAX_HEAD_DIM];
    for (int p = 0; p < n_positions; p++) {
        const int slot = tqkv__slot(&s, position + p);
        for (int h = 0; h < s.n_kv_heads; h++) {
            void *to = (uint8_t *)dst + tqkv__row_offset(&s, (size_t)p, (size_t)h);
            float *row = s.type == TQKV_TYPE_F32 ? (float *)to : wide;
            tqkv__decode_in(&s, h, tqkv__codes_at(&s, h, slot), tqkv__norms_at(&s, h, slot), basis, row);
            if (row == wide) codec->narrow(s.type, row, s.head_dim, to);
        }
    }
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

/* >>attend: softmax(q.k) v in one pass over tiles of positions; a decoded key or value serves all its queries */

/* Positions in a tile, which attention scores, weights and sums together. Their scores stay in the L1 cache. */
#define TQKV__TILE 64
/* Query rows (queries x heads of a group) that share a decoded tile. The limit keeps their sums in the L2 cache. */
#define TQKV__CHUNK_ROWS 64

/* The streams of an attention and, with raw ones, a cache's stores, in the order of its memory and of snapshots. */
enum {
    TQKV__KEYS,
    TQKV__VALUES,
    TQKV__TAIL,
    TQKV__CACHE_STREAMS,
    /* What is kept of the first positions besides: halves, and of a tail, which only a ring keeps, rows as they are. */
    TQKV__FIRST_KEYS = TQKV__CACHE_STREAMS,
    TQKV__FIRST_VALUES,
    TQKV__FIRST_TAIL,
    TQKV__LAST_KEYS, /* halves of the newest positions */
    TQKV__LAST_VALUES,
    TQKV__STREAMS,
    TQKV__RAW = TQKV__STREAMS, /* rows as they came while a cache learns: keys, values, tail */
    TQKV__CACHE_STORES = TQKV__RAW + 3
};

/* A stream has a side (keys, values or tail) and an end: the first or the last positions, or neither. */
typedef struct tqkv__stream_kind {
    uint8_t side, end;
} tqkv__stream_kind;
enum { TQKV__FIRST_END, TQKV__LAST_END, TQKV__NO_END };
static const tqkv__stream_kind tqkv__stream_kinds[TQKV__CACHE_STORES] = {
    {TQKV__KEYS, TQKV__NO_END},    {TQKV__VALUES, TQKV__NO_END},    {TQKV__TAIL, TQKV__NO_END},
    {TQKV__KEYS, TQKV__FIRST_END}, {TQKV__VALUES, TQKV__FIRST_END}, {TQKV__TAIL, TQKV__FIRST_END},
    {TQKV__KEYS, TQKV__LAST_END},  {TQKV__VALUES, TQKV__LAST_END},  {TQKV__KEYS, TQKV__NO_END},
    {TQKV__VALUES, TQKV__NO_END},  {TQKV__TAIL, TQKV__NO_END}};

/* Positions, or ranks of a list: [from, to) */
typedef struct tqkv__range {
    int64_t from, to;
} tqkv__range;

/* A checked tqkv_attention. A row is one query of one head: row = query * group + (head within the group). */
typedef struct tqkv__attention {
    tqkv_attention call;                       /* defaults resolved */
    tqkv__stream keys, values, tail;           /* tail: if call.tail is set */
    int n_kv_heads, group, key_dim, value_dim; /* dims: of a query with that of the tail, of an output */
    int64_t first;                             /* resident positions [first, call.end) */
    bool rotate_queries, unrotate_output;      /* rotate_queries: but for the tail's part */
    bool shared;                               /* keys and values are one stream */
    size_t n_rows, q_elements, out_elements;   /* n_queries * n_heads, and times key_dim or value_dim */
    size_t q_size, out_size;                   /* bytes of the caller's rows, with gaps */
    const tqkv__isa *isa;
    const tqkv__kernels *kernels; /* those of the set, or of a narrower one */
    int matrix_group;             /* on a GPU; 0 = the default */
    bool reads[TQKV__STREAMS];    /* which streams there are */
    int64_t
        exact_below;    /* positions below are read from the first halves, those from tqkv__exact_at on from the last */
    bool newest_halves; /* on a GPU: this is the region that queries read from halves of the newest */
    bool small_pages, odd_rings; /* pages, or rings, may end within a tile, whose rows are then gathered */
    int64_t kept; /* positions below are seen, resident or not, from what is kept of the first, apart from the others */
    tqkv__stream ends[TQKV__STREAMS - TQKV__FIRST_KEYS]; /* not cleared if unused: as long as a few positions take */
} tqkv__attention;

#define TQKV__STREAM_AT(a, i) \
    ((i) >= TQKV__FIRST_KEYS ? &(a)->ends[(i)-TQKV__FIRST_KEYS] \
     : (i) == TQKV__KEYS     ? &(a)->keys \
     : (i) == TQKV__VALUES   ? &(a)->values \
                             : &(a)->tail)

static const tqkv__stream *tqkv__stream_read(const tqkv__attention *a, int i)
{
    return a->reads[i] ? TQKV__STREAM_AT(a, i) : NULL;
}

/* Prefetches the codes of the next tile while this one is computed. Streams go to the L2 cache, because few lines can
   be on their way to the L1. cache: constant */
enum { TQKV__L1 = 1, TQKV__L2 };
static TQKV__INLINE void tqkv__prefetch(const int cache, const uint8_t *codes, size_t size)
{
    for (size_t i = 0; i < size; i += 64) {
        if (cache == TQKV__L1)
            __builtin_prefetch((const void *)((uintptr_t)codes + i), 0, 3);
        else
            __builtin_prefetch((const void *)((uintptr_t)codes + i), 0, 2);
    }
}

/* >>plain: attention in plain C, the specification of what every instruction set computes, bit for bit

   A rotated query becomes integers of 16 bits against its largest value, and the weights of a tile, times the norms,
   integers of 15 bits against the largest. Codes stand for integer centroids of 8 bits, I8's for themselves. T = 32639:

     q_d = round(query_d T/Q),  Q = max_d |query_d|
     s_j = sum over panels b of (sum_d q_d c_jd) * (f_jb * (step Q/T))     f: the factor of a norm, see tqkv__factor
     p_j = exp(s_j - max),  W = max_j |p_j f_j|,  w_j = round(p_j f_j T/W)
     out_d += (sum_j w_j c_jd) * (step W/T)                                in each tile

   The sums in brackets are exact, so their order is free. Floats have one order everywhere: a product that a sum
   follows is an fma or is rounded first, a quotient is a division, exp and tanh are those of >>exact.

   F16 and TQ8 are multiplied as floats: the products of each 512 dimensions with fma in 16 sums, dimension d in sum
   d % 16, which are added by halves; values by one fma after the other, in the order of positions. */

/* 127*256 + 127, so that a set may split an integer into two signed bytes. Sums stay within 32 bits: |c| <= 128 keeps a
   score of 256 dimensions below 1.07e9, and 64 positions below 2.7e8. */
#define TQKV__INTEGER_TOP 32639
/* Smaller largest values count as this one, 2^-100: T over it is a float. */
#define TQKV__INTEGER_LEAST 7.888609052210118e-31f

/* Whether a stream is multiplied as floats. The centroids of TQ8 do not fit 8 bits. */
static bool tqkv__in_floats(const tqkv__stream *s) { return s->kind == TQKV__HALF || s->book_bits == 8; }

/* Finds the stream's integer centroids, repeated to 64, and their step. These are the upper halves of symmetric books,
   each with the step that adds the least distortion; docs/formats.md has the figures. */
static void tqkv__fill_integers(tqkv__stream *s)
{
    static const float steps[5] = {0.0251706206f, 0.0244347833f, 0.0261686062f, 0.0276549527f, 0.0319480885f};
    static const int8_t books[5][32] = {{18, 60},
                                        {10, 31, 55, 88},
                                        {5, 15, 25, 36, 48, 62, 79, 104},
                                        {2, 7, 12, 17, 22, 27, 32, 38, 44, 50, 57, 65, 73, 84, 97, 118},
                                        {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 26, 28, 30,  33,
                                         35, 38, 41, 44, 47, 50, 53, 57, 61, 65, 70, 76, 82, 90, 100, 116}};
    s->step = 1.0f;
    if (s->kind != TQKV__BOOK || tqkv__in_floats(s)) return;
    const int half = 1 << (s->book_bits - 1);
    s->step = steps[s->book_bits - 2];
    for (int i = 0; i < 64; i++) {
        const int code = i & (2 * half - 1);
        const int8_t *book = books[s->book_bits - 2];
        s->centroids[i] = (int8_t)(code >= half ? book[code - half] : -book[half - 1 - code]);
    }
}

static void tqkv__integers_at(const tqkv__stream *s, const uint8_t *row, int first, int n, int8_t *integers)
{
    uint8_t codes[TQKV_MAX_HEAD_DIM];
    tqkv__unpack(s, row, first, n, codes);
    for (int i = 0; i < n; i++) integers[i] = (int8_t)(s->kind == TQKV__GRID ? codes[i] : s->centroids[codes[i]]);
}

/* Returns what multiplies integers against the value whose bits are `largest`: step * value / T. NaN if it is not
   finite. */
static float tqkv__integer_unit(uint32_t largest, float step)
{
    const volatile float top = (float)TQKV__INTEGER_TOP;
    if (largest >= 0x7f800000u) return tqkv__float(0x7fc00000u);
    const float value = tqkv__float(largest) > TQKV__INTEGER_LEAST ? tqkv__float(largest) : TQKV__INTEGER_LEAST;
    return TQKV__AS_FLOAT(TQKV__AS_FLOAT(value / top) * step);
}

static float tqkv__integer_scale(uint32_t largest)
{
    if (largest >= 0x7f800000u) return 0.0f;
    const float value = tqkv__float(largest) > TQKV__INTEGER_LEAST ? tqkv__float(largest) : TQKV__INTEGER_LEAST;
    return TQKV__AS_FLOAT((float)TQKV__INTEGER_TOP / value);
}

static float tqkv__to_integers(const float *x, int n, float step, int16_t *to)
{
    const uint32_t largest = tqkv__largest_bits(x, (size_t)n);
    const float scale = tqkv__integer_scale(largest);
    for (int i = 0; i < n; i++) to[i] = (int16_t)(scale > 0.0f ? tqkv__round(tqkv__rounded(x[i] * scale)) : 0.0f);
    return tqkv__integer_unit(largest, step);
}

/* Rounds a query to integers, whose unit takes the place of the last float. query, to: [head_dim] */
static void tqkv__round_query_scalar(const tqkv__stream *s, const float *query, float *to)
{
    int16_t integers[TQKV_MAX_HEAD_DIM];
    to[s->head_dim - 1] = tqkv__to_integers(query, s->head_dim, s->step, integers);
    memcpy(to, integers, (size_t)s->head_dim * sizeof *integers);
}

/* Replaces a query by what its integers leave of it. Returns whether that deserves a second digit: fewer than 19 of 32
   values reach an eighth of the largest, as in one Gaussian row of 400. */
static bool tqkv__round_rest(float *query, int n)
{
    const uint32_t largest = tqkv__largest_bits(query, (size_t)n);
    int high = 0;
    if (largest >= 0x7f800000u || tqkv__float(largest) <= TQKV__INTEGER_LEAST) return false;
    const uint32_t eighth = largest - (3u << 23);
    for (int d = 0; d < n; d++) high += (tqkv__bits(query[d]) & 0x7fffffffu) >= eighth;
    if (32 * high >= 19 * n) return false;
    const float scale = tqkv__integer_scale(largest), unit = tqkv__integer_unit(largest, 1.0f);
    for (int d = 0; d < n; d++) query[d] = tqkv__fma(-tqkv__round(tqkv__rounded(query[d] * scale)), unit, query[d]);
    return true;
}

/* Gives NaN one pattern of bits: processors differ in those that they make. */
static float tqkv__one_nan(float x) { return x != x ? tqkv__float(0x7fc00000u) : x; }

static float tqkv__panel_factor(const tqkv__stream *s, const float *norms, int panel)
{
    return tqkv__factor(s, norms[panel * s->panel_dim / s->norm_dim]);
}

/* An infinite norm of a key counts as NaN: its score could be -infinity, which would leave the position out. */
static float tqkv__norm_of_key(float norm) { return norm + norm * 0.0f; }

/* Products that 16 sums take: 1024 equal ones, all rounded to one side, would give keys of constant halves an error of
   3.4e-5. */
#define TQKV__MOST_PRODUCTS 512

static float tqkv__score_floats(const tqkv__stream *s, const float *key, const float *query, float score)
{
    for (int first = 0; first < s->head_dim; first += TQKV__MOST_PRODUCTS) {
        const int left = s->head_dim - first, end = first + (left < TQKV__MOST_PRODUCTS ? left : TQKV__MOST_PRODUCTS);
        float lanes[16] = {0};
        for (int d = first; d < end; d++) lanes[d % 16] = tqkv__fma(query[d], key[d], lanes[d % 16]);
        score = TQKV__AS_FLOAT(score + tqkv__sum_16(lanes));
    }
    return score;
}

static float tqkv__score_integers(const tqkv__stream *s, const int8_t *key, const float *norms, const float *query,
                                  float score)
{
    const int16_t *q = (const int16_t *)(const void *)query;
    for (int b = 0; b < s->head_dim / s->panel_dim; b++) {
        const float norm = tqkv__norm_of_key(tqkv__panel_factor(s, norms, b));
        const float factor = TQKV__AS_FLOAT(norm * query[s->head_dim - 1]);
        int32_t sum = 0;
        for (int d = b * s->panel_dim; d < (b + 1) * s->panel_dim; d++) sum += q[d] * key[d];
        score = tqkv__fma(TQKV__AS_FLOAT((float)sum), factor, score);
    }
    return score;
}

static void tqkv__score_tile_scalar(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, const float *q,
                                    int n_rows, bool add, float *scores)
{
    float key[TQKV_MAX_HEAD_DIM];
    int8_t integers[TQKV_MAX_HEAD_DIM];
    float checked[TQKV_MAX_HEAD_DIM / 256];
    const bool in_floats = tqkv__in_floats(s);
    for (int j = 0; j < segment->n; j++) {
        const uint8_t *codes = tqkv__codes_at(s, kv_head, segment->slot + j);
        const float *norms = tqkv__norms_at(s, kv_head, segment->slot + j);
        for (int b = 0; in_floats && b < s->norms_per_row; b++) checked[b] = tqkv__norm_of_key(norms[b]);
        if (in_floats)
            tqkv__decode_row(s, codes, checked, key);
        else
            tqkv__integers_at(s, codes, 0, s->head_dim, integers);
        for (int row = 0; row < n_rows; row++) {
            const float *query = q + (size_t)row * (size_t)s->head_dim;
            float *score = &scores[row * TQKV__TILE + j];
            const float before = add ? *score : 0.0f;
            *score = in_floats ? tqkv__score_floats(s, key, query, before)
                               : tqkv__score_integers(s, integers, norms, query, before);
        }
    }
}

static bool tqkv__span_has(const tqkv__span *span, int j)
{
    return j >= span->from && j < span->to && !(span->hidden >> j & 1);
}

static void tqkv__softmax_tile_scalar(const tqkv__attention *a, const tqkv__span *span, const float *offsets,
                                      int n_rows, float *scores, float *max, float *sum, float *out)
{
    const float softcap = a->call.softcap;
    for (int row = 0; row < n_rows; row++, span++, scores += TQKV__TILE, max++, sum++, out += a->value_dim) {
        float largest = *max, lanes[16] = {0};
        const bool seen = span->to > span->from;
        for (int j = 0; j < TQKV__TILE; j++) {
            if (!seen || !tqkv__span_has(span, j)) {
                scores[j] = seen ? -INFINITY : 0.0f;
                continue;
            }
            const float capped =
                softcap > 0.0f ? TQKV__AS_FLOAT(TQKV__AS_FLOAT(scores[j] + offsets[row]) / softcap) : 0.0f;
            if (softcap > 0.0f) scores[j] = tqkv__fma(tqkv__tanh(capped), softcap, 0.0f);
            if (scores[j] > largest) largest = scores[j];
        }
        if (!seen) continue;
        if (largest > *max) {
            const float shrink = tqkv__exp(TQKV__AS_FLOAT(*max - largest));
            tqkv__scale(out, a->value_dim, shrink);
            *sum = TQKV__AS_FLOAT(*sum * shrink);
            *max = largest;
        }
        for (int j = 0; j < TQKV__TILE; j++) {
            scores[j] = tqkv__exp(TQKV__AS_FLOAT(scores[j] - largest));
            lanes[j % 16] = TQKV__AS_FLOAT(lanes[j % 16] + scores[j]);
        }
        *sum = TQKV__AS_FLOAT(*sum + tqkv__sum_16(lanes));
    }
}

static void tqkv__add_integers(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, int panel,
                               const int8_t *integers, const float *weights, float *out)
{
    float scaled[TQKV__TILE];
    int16_t w[TQKV__TILE];
    int32_t sums[TQKV__PANEL] = {0};
    for (int j = 0; j < segment->n; j++) {
        const float *norms = tqkv__norms_at(s, kv_head, segment->slot + j);
        scaled[j] = weights[j] == 0.0f ? 0.0f : TQKV__AS_FLOAT(weights[j] * tqkv__panel_factor(s, norms, panel));
    }
    const float unit = tqkv__to_integers(scaled, segment->n, s->step, w);
    for (int j = 0; j < segment->n; j++, integers += s->panel_dim)
        for (int d = 0; d < s->panel_dim; d++) sums[d] += w[j] * integers[d];
    for (int d = 0; d < s->panel_dim; d++) out[d] = tqkv__fma(TQKV__AS_FLOAT((float)sums[d]), unit, out[d]);
}

static void tqkv__value_tile_scalar(const tqkv__stream *s, int kv_head, const tqkv__segment *segment,
                                    const float *weights, int n_rows, float *scaled, float *out)
{
    int8_t integers[TQKV__TILE * TQKV__PANEL];
    (void)scaled; /* for vectors */
    for (int j = 0; tqkv__in_floats(s) && j < segment->n; j++) {
        float value[TQKV_MAX_HEAD_DIM];
        tqkv__decode_row(s, tqkv__codes_at(s, kv_head, segment->slot + j),
                         tqkv__norms_at(s, kv_head, segment->slot + j), value);
        for (int i = 0; i < n_rows * s->head_dim; i++)
            out[i] = tqkv__fma(weights[i / s->head_dim * TQKV__TILE + j], value[i % s->head_dim], out[i]);
    }
    if (tqkv__in_floats(s)) return;
    for (int b = 0; b < s->head_dim / s->panel_dim; b++) {
        for (int j = 0; j < segment->n; j++)
            tqkv__integers_at(s, tqkv__codes_at(s, kv_head, segment->slot + j), b * s->panel_dim, s->panel_dim,
                              integers + j * s->panel_dim);
        for (int row = 0; row < n_rows; row++)
            tqkv__add_integers(s, kv_head, segment, b, integers, weights + row * TQKV__TILE,
                               out + (size_t)row * (size_t)s->head_dim + b * s->panel_dim);
    }
}

/* Returns what the sum of a stretch loses to the maximum of a piece of it, as the exponent of a factor. */
static inline float tqkv__loss(float max, float piece_max)
{
    return piece_max > max ? TQKV__AS_FLOAT(max - piece_max) : 0.0f;
}

static void tqkv__end_piece_scalar(int n_rows, int value_dim, const tqkv__sums *piece, const tqkv__sums *sums)
{
    for (int row = 0; row < n_rows; row++) {
        if (piece->sum[row] == 0.0f) continue;
        const float factor = tqkv__exp(tqkv__loss(sums->max[row], piece->max[row]));
        float *added = piece->out + (size_t)row * (size_t)value_dim, *to = sums->out + (size_t)row * (size_t)value_dim;
        for (int d = 0; d < value_dim; d++) to[d] = tqkv__fma(to[d], factor, added[d]);
        memset(added, 0, (size_t)value_dim * sizeof(float));
        sums->sum[row] = tqkv__fma(sums->sum[row], factor, piece->sum[row]);
        sums->max[row] = piece->max[row];
        piece->sum[row] = 0.0f;
    }
}

static void tqkv__sum_heads_scalar(const float *scores, const float *weights, const float *offsets, bool relu,
                                   int n_rows, float *sums)
{
    for (int row = 0; row < n_rows; row++, scores += TQKV__TILE)
        for (int j = 0; j < TQKV__TILE; j++) {
            const float score = TQKV__AS_FLOAT(scores[j] + offsets[row]);
            sums[j] = tqkv__fma(weights[row], relu && score < 0.0f ? 0.0f : score, sums[j]);
        }
}

static const tqkv__kernels tqkv__kernels_scalar = {tqkv__round_query_scalar,  tqkv__score_tile_scalar,
                                                   tqkv__softmax_tile_scalar, tqkv__end_piece_scalar,
                                                   tqkv__value_tile_scalar,   tqkv__sum_heads_scalar};

#endif /* TQKV_IMPLEMENTATION, to be continued */

/* The loops of attention and of encoding. The implementation includes this file again for each instruction set.
   TQKV__(name) is that set's version of name, TQKV__LANES the number of floats in its vector, TQKV__TARGET the
   attribute that enables it in the compiler. */
#ifdef TQKV__LANES

/* >>kernels: what the loops of attention and of encoding share */

#define TQKV__VECTOR TQKV__(vector)
typedef uint32_t TQKV__(words) __attribute__((vector_size(4 * TQKV__LANES)));

TQKV__OP TQKV__VECTOR TQKV__(load)(const float *p)
{
    TQKV__VECTOR x;
    memcpy(&x, p, sizeof x);
    return x;
}

TQKV__OP void TQKV__(store)(float *p, TQKV__VECTOR x) { memcpy(p, &x, sizeof x); }

TQKV__OP TQKV__VECTOR TQKV__(abs)(TQKV__VECTOR x) { return (TQKV__VECTOR)((TQKV__(words))x & 0x7fffffffu); }

TQKV__OP TQKV__VECTOR TQKV__(copysign)(TQKV__VECTOR magnitude, TQKV__VECTOR sign)
{
    return (TQKV__VECTOR)((TQKV__(words))magnitude | ((TQKV__(words))sign & 0x80000000u));
}

/* >>k-softmax: exp and tanh, weights out of scores, and sums of heads. */

/* Terms of e^x - 1 = power * tail + (power - 1) for x in [-87, 0]: x = n ln2 + r, power = 2^n, tail = e^r - 1 by
   Taylor's series to r^7. The rest of the series is below float's last bit for |r| <= ln2/2. */
TQKV__OP void TQKV__(exp_terms)(TQKV__VECTOR x, TQKV__VECTOR *power, TQKV__VECTOR *tail)
{
    const TQKV__VECTOR n = TQKV__(round)(x * TQKV__(set1)(1.44269504f));
    TQKV__VECTOR r = TQKV__(fma)(n, TQKV__(set1)(-0.693359375f), x); /* ln2 as a sum; n times the first is exact */
    r = TQKV__(fma)(n, TQKV__(set1)(2.12194440e-4f), r);
    TQKV__VECTOR p = TQKV__(set1)(tqkv__series[0]);
    TQKV__UNROLL
    for (int i = 1; i < 7; i++) p = TQKV__(fma)(p, r, TQKV__(set1)(tqkv__series[i]));
    *tail = p * r;
    *power = TQKV__(exp2)(n);
}

/* e^x for x <= 0; 0 below -87, where 2^n leaves the normal floats. */
TQKV__OP TQKV__VECTOR TQKV__(exp)(TQKV__VECTOR x)
{
    TQKV__VECTOR power, tail;
    TQKV__(exp_terms)(TQKV__(max)(TQKV__(set1)(-87.0f), x), &power, &tail); /* NaN stays NaN */
    return TQKV__(zero_below)(TQKV__(set1)(-87.0f), x, TQKV__(fma)(power, tail, power));
}

/* tanh(x) = -m/(2 + m) with m = e^(-2|x|) - 1, which keeps its precision near 0. */
TQKV__TARGET static TQKV__VECTOR TQKV__(tanh)(TQKV__VECTOR x)
{
    TQKV__VECTOR power, tail;
    const TQKV__VECTOR doubled = TQKV__(abs)(x) * TQKV__(set1)(-2.0f);
    TQKV__(exp_terms)(TQKV__(max)(TQKV__(set1)(-40.0f), doubled), &power, &tail);
    const TQKV__VECTOR m = TQKV__(fma)(power, tail, power - TQKV__(set1)(1.0f));
    return TQKV__(copysign)(TQKV__(abs)(m) / (TQKV__(set1)(2.0f) + m), x);
}

/* Turns a row's scores into weights and returns their sum; -infinity gives 0. x: [TQKV__TILE] */
TQKV__TARGET static float TQKV__(weigh)(float *x, float max)
{
    const TQKV__VECTOR peak = TQKV__(set1)(max);
    TQKV__VECTOR total[16 / TQKV__LANES]; /* 16 sums in every set: see >>integer */
    TQKV__UNROLL
    for (int i = 0; i < 16 / TQKV__LANES; i++) total[i] = TQKV__(set1)(0.0f);
    TQKV__UNROLL
    for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
        const TQKV__VECTOR weight = TQKV__(exp)(TQKV__(load)(x + j) - peak);
        TQKV__(store)(x + j, weight);
        total[j / TQKV__LANES % (16 / TQKV__LANES)] += weight;
    }
    return TQKV__(sum_16)(total);
}

/* Sets the scores outside the span to `value`; some of them were never computed. */
TQKV__OP void TQKV__(mask)(float *x, tqkv__span span, float value)
{
    static const uint32_t first[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint32_t from = (uint32_t)span.from, size = (uint32_t)(span.to - span.from), bits = tqkv__bits(value);
    TQKV__(words) places, scores;
    memcpy(&places, first, sizeof places);
    places -= from;
    for (int j = 0; j < TQKV__TILE && size < TQKV__TILE; j += TQKV__LANES, places += TQKV__LANES) {
        const TQKV__(words) inside = (TQKV__(words))(places < size); /* all ones, or 0 */
        memcpy(&scores, x + j, sizeof scores);
        scores = (scores & inside) | (bits & ~inside);
        memcpy(x + j, &scores, sizeof scores);
    }
    for (uint64_t left = span.hidden; left; left &= left - 1) x[__builtin_ctzll(left)] = value;
}

/* Three passes over the rows, without dependencies from row to row. Rows that see nothing skip the arithmetic, because
   their maximum may be -infinity. */
TQKV__TARGET static void TQKV__(softmax_tile)(const tqkv__attention *a, const tqkv__span *spans, const float *offsets,
                                              int n_rows, float *scores, float *max, float *sum, float *out)
{
    float shrink[TQKV__CHUNK_ROWS];
    const float softcap = a->call.softcap;
    for (int row = 0; row < n_rows; row++) {
        float *x = scores + row * TQKV__TILE;
        const bool seen = spans[row].to > spans[row].from;
        TQKV__VECTOR largest = TQKV__(set1)(max[row]);
        TQKV__(mask)(x, spans[row], seen && softcap == 0.0f ? -INFINITY : 0.0f);
        shrink[row] = 0.0f;
        if (!seen) continue;
        if (softcap > 0.0f)
            for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
                const TQKV__VECTOR ratio = (TQKV__(load)(x + j) + TQKV__(set1)(offsets[row])) / TQKV__(set1)(softcap);
                TQKV__(store)(x + j, TQKV__(fma)(TQKV__(tanh)(ratio), TQKV__(set1)(softcap), TQKV__(set1)(0.0f)));
            }
        if (softcap > 0.0f) TQKV__(mask)(x, spans[row], -INFINITY);
        TQKV__UNROLL
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) largest = TQKV__(max)(TQKV__(load)(x + j), largest);
        const float peak = TQKV__(largest_lane)(largest);
        shrink[row] = max[row] - peak;
        max[row] = peak;
    }
    for (int row = 0; row < n_rows; row++) {
        if (!(shrink[row] < 0.0f)) continue;
        const TQKV__VECTOR factor = TQKV__(exp)(TQKV__(set1)(shrink[row]));
        float *sums = out + (size_t)row * (size_t)a->value_dim;
        for (int d = 0; d < a->value_dim; d += TQKV__LANES) TQKV__(store)(sums + d, TQKV__(load)(sums + d) * factor);
        sum[row] *= factor[0];
    }
    for (int row = 0; row < n_rows; row++)
        if (spans[row].to > spans[row].from) sum[row] += TQKV__(weigh)(scores + row * TQKV__TILE, max[row]);
}

TQKV__TARGET static void TQKV__(end_piece)(int n_rows, int value_dim, const tqkv__sums *piece, const tqkv__sums *sums)
{
    const TQKV__VECTOR zero = TQKV__(set1)(0.0f);
    for (int row = 0; row < n_rows; row++) {
        float *added = piece->out + (size_t)row * (size_t)value_dim, *to = sums->out + (size_t)row * (size_t)value_dim;
        const TQKV__VECTOR sum = TQKV__(set1)(piece->sum[row]);
        if (piece->sum[row] == 0.0f) continue;
        const TQKV__VECTOR factor = TQKV__(exp)(TQKV__(set1)(tqkv__loss(sums->max[row], piece->max[row])));
        for (int d = 0; d < value_dim; d += TQKV__LANES) {
            TQKV__(store)(to + d, TQKV__(fma)(TQKV__(load)(to + d), factor, TQKV__(load)(added + d)));
            TQKV__(store)(added + d, zero);
        }
        sums->sum[row] = TQKV__(fma)(TQKV__(set1)(sums->sum[row]), factor, sum)[0];
        sums->max[row] = piece->max[row];
        piece->sum[row] = 0.0f;
    }
}

TQKV__TARGET static void TQKV__(sum_heads)(const float *scores, const float *weights, const float *offsets, bool relu,
                                           int n_rows, float *sums)
{
    const TQKV__VECTOR least = TQKV__(set1)(relu ? 0.0f : -INFINITY);
    for (int row = 0; row < n_rows; row++, scores += TQKV__TILE) {
        const TQKV__VECTOR weight = TQKV__(set1)(weights[row]), offset = TQKV__(set1)(offsets[row]);
        TQKV__UNROLL
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
            const TQKV__VECTOR score = TQKV__(max)(least, TQKV__(load)(scores + j) + offset);
            TQKV__(store)(sums + j, TQKV__(fma)(weight, score, TQKV__(load)(sums + j)));
        }
    }
}

/* Finds the factors of a tile's codes, per panel and position; see tqkv__norm_of_key. factors: [n_panels][TQKV__TILE],
   zero beyond n */
TQKV__TARGET static void TQKV__(factors)(const tqkv__stream *s, const float *norms, const tqkv__segment *segment,
                                         bool keys, float *factors)
{
    const TQKV__VECTOR zero = TQKV__(set1)(0.0f);
    const int dim = s->head_dim, per_row = s->norms_per_row, n = segment->n;
    const bool divided = per_row > 1 && s->kind == TQKV__BOOK && s->block_scale != 1.0f;
    const TQKV__VECTOR factor = TQKV__(set1)(divided ? 1.0f : tqkv__factor(s, 1.0f));
    for (int d = 0; d < dim; d += s->panel_dim, factors += TQKV__TILE) {
        const float *norm = per_row > 1 ? norms + d / s->norm_dim : norms;
        if (per_row > 1 || n < TQKV__TILE) {
            for (int j = 0; j < n; j++, norm += per_row) factors[j] = *norm;
            for (int j = n; j < TQKV__TILE; j++) factors[j] = 0.0f;
            norm = factors;
        }
        for (int j = 0; divided && j < TQKV__TILE; j += TQKV__LANES)
            TQKV__(store)(factors + j, TQKV__(load)(factors + j) / TQKV__(set1)(s->block_scale));
        for (int j = 0; j < TQKV__TILE; j += TQKV__LANES) {
            TQKV__VECTOR x = TQKV__(load)(norm + j) * factor;
            if (keys) x = x + x * zero;
            TQKV__(store)(factors + j, x);
        }
    }
}

#ifdef TQKV__ENCODES
/* >>k-widen: rows of any type as floats, and back; whether their numbers are valid */

TQKV__OP TQKV__VECTOR TQKV__(load_bf16)(const uint8_t *p)
{
    uint16_t __attribute__((vector_size(2 * TQKV__LANES))) upper;
    memcpy(&upper, p, sizeof upper);
    return (TQKV__VECTOR)(__builtin_convertvector(upper, TQKV__(words)) << 16);
}

/* Loads LANES values from number i on as floats; type is a constant. */
TQKV__OP TQKV__VECTOR TQKV__(load_as)(const tqkv_type type, const void *values, int i)
{
    const uint8_t *halves = (const uint8_t *)values + 2 * (size_t)i;
    if (type == TQKV_TYPE_F16) return TQKV__(load_f16)(halves);
    if (type == TQKV_TYPE_BF16) return TQKV__(load_bf16)(halves);
    return TQKV__(load)((const float *)values + i);
}

/* These do what tqkv__widen_row and tqkv__narrow_row do. */
TQKV__OP void TQKV__(widen_as)(const tqkv_type type, const void *src, const float *center, const float *inverses, int n,
                               float *row)
{
    for (int i = 0; i < n; i += TQKV__LANES) {
        TQKV__VECTOR x = TQKV__(load_as)(type, src, i);
        if (center) x -= TQKV__(load)(center + i);
        if (inverses) x = TQKV__(rounded)(x * TQKV__(load)(inverses + i));
        TQKV__(store)(row + i, x);
    }
}

TQKV__TARGET static void TQKV__(widen)(tqkv_type type, const void *src, const float *center, const float *inverses,
                                       int n, float *row)
{
    if (type == TQKV_TYPE_F16)
        TQKV__(widen_as)(TQKV_TYPE_F16, src, center, inverses, n, row);
    else if (type == TQKV_TYPE_BF16)
        TQKV__(widen_as)(TQKV_TYPE_BF16, src, center, inverses, n, row);
    else
        TQKV__(widen_as)(TQKV_TYPE_F32, src, center, inverses, n, row);
}

/* Does what tqkv__invert does, for whole rows. */
TQKV__TARGET static void TQKV__(invert)(const float *scales, int n, float *inverses)
{
    for (int i = 0; i < n; i += TQKV__LANES) TQKV__(store)(inverses + i, TQKV__(set1)(1.0f) / TQKV__(load)(scales + i));
}

TQKV__TARGET static void TQKV__(narrow_row)(tqkv_type type, const float *row, int n, void *dst)
{
    uint8_t *p = (uint8_t *)dst;
    if (type == TQKV_TYPE_F32) memcpy(dst, row, (size_t)n * sizeof(float));
    if (type == TQKV_TYPE_F16)
        for (int i = 0; i < n; i += TQKV__LANES, p += 2 * TQKV__LANES) TQKV__(store_half)(p, TQKV__(load)(row + i));
    if (type == TQKV_TYPE_BF16)
        for (int i = 0; i < n; i += TQKV__LANES, p += 2 * TQKV__LANES) {
            TQKV__(words) bits, nan;
            TQKV__(codes) words;
            memcpy(&bits, row + i, sizeof bits);
            nan = (TQKV__(words))((bits & 0x7fffffffu) > 0x7f800000u); /* all ones, or 0 */
            bits = (((bits + 0x7fffu + ((bits >> 16) & 1u)) & ~nan) | ((bits | 0x400000u) & nan)) >> 16;
            memcpy(&words, &bits, sizeof words);
            TQKV__(store_words)(p, words);
        }
}

/* Does what tqkv__largest_bits does for whole rows. */
TQKV__TARGET static uint32_t TQKV__(largest_of)(const float *x, size_t n)
{
    TQKV__(codes) largest[4];
    uint32_t lanes[4 * TQKV__LANES], all = 0;
    memset(largest, 0, sizeof largest);
    size_t i = 0;
    for (; i + 4 * TQKV__LANES <= n; i += 4 * TQKV__LANES) {
        TQKV__UNROLL
        for (int j = 0; j < 4; j++) largest[j] = TQKV__(larger_bits)(largest[j], TQKV__(load)(x + i + j * TQKV__LANES));
    }
    for (; i < n; i += TQKV__LANES) largest[0] = TQKV__(larger_bits)(largest[0], TQKV__(load)(x + i));
    memcpy(lanes, largest, sizeof lanes);
    for (int j = 0; j < 4 * TQKV__LANES; j++) all = lanes[j] > all ? lanes[j] : all;
    return all;
}

/* Does what tqkv__values_finite does for whole rows. Two halves, or bfloat16s, in a word: a 1 added at the lowest bit
   of an exponent carries into the sign bit only from an exponent of all ones. */
TQKV__TARGET static bool TQKV__(rows_finite)(tqkv_type type, const void *x, size_t n)
{
    const uint32_t one = type == TQKV_TYPE_F16 ? 0x04000400u : 0x00800080u;
    const uint8_t *p = (const uint8_t *)x;
    TQKV__(words) carries, pairs;
    uint32_t lanes[TQKV__LANES], all = 0;
    if (type == TQKV_TYPE_F32) return TQKV__(largest_of)((const float *)x, n) < 0x7f800000u;
    memset(&carries, 0, sizeof carries);
    for (size_t left = 2 * n, size = sizeof pairs; left; left -= size, p += size) {
        if (left < size) {
            size = left;
            memset(&pairs, 0, sizeof pairs);
            memcpy(&pairs, p, left);
        } else {
            memcpy(&pairs, p, sizeof pairs);
        }
        carries |= (pairs & 0x7fff7fffu) + one;
    }
    memcpy(lanes, &carries, sizeof lanes);
    for (int i = 0; i < TQKV__LANES; i++) all |= lanes[i];
    return !(all & 0x80008000u);
}

/* >>k-rotate: the rotation by vectors, with the sums of >>codec in their order: the same bytes. */

/* Butterflies (a, b) -> (a + b, a - b) between vectors 1, 2, 4 .. count/2 apart; count is a constant. */
TQKV__OP void TQKV__(butterflies)(const int count, TQKV__VECTOR *x)
{
    TQKV__UNROLL
    for (int stage = 0; stage < 4; stage++) {
        if (1 << stage >= count) continue;
        TQKV__UNROLL
        for (int i = 0; i < count / 2; i++) {
            const int low = (i >> stage << (stage + 1)) + (i & ((1 << stage) - 1)), high = low + (1 << stage);
            const TQKV__VECTOR a = x[low], b = x[high];
            x[low] = a + b;
            x[high] = a - b;
        }
    }
}

TQKV__OP void TQKV__(load_vectors)(const int count, tqkv_type type, const void *in, int i, TQKV__VECTOR *x)
{
    if (type == TQKV_TYPE_F16) {
        TQKV__UNROLL
        for (int v = 0; v < count; v++) x[v] = TQKV__(load_as)(TQKV_TYPE_F16, in, i + v * TQKV__LANES);
    } else if (type == TQKV_TYPE_BF16) {
        TQKV__UNROLL
        for (int v = 0; v < count; v++) x[v] = TQKV__(load_as)(TQKV_TYPE_BF16, in, i + v * TQKV__LANES);
    } else {
        TQKV__UNROLL
        for (int v = 0; v < count; v++) x[v] = TQKV__(load_as)(TQKV_TYPE_F32, in, i + v * TQKV__LANES);
    }
}

/* Flips signs if asked, then subrows the stages below `length`, at most count * LANES, on count vectors in registers.
   count and length are constants. in, of the type: [head_dim], out: [head_dim] */
TQKV__OP void TQKV__(hadamard_subrows)(const int count, const int length, tqkv_type type, const void *in, int head_dim,
                                       bool flip, float *out)
{
    const TQKV__VECTOR factor = TQKV__(set1)(count * TQKV__LANES == head_dim ? TQKV__INV_SQRT(head_dim) : 1.0f);
    for (int first = 0; first < head_dim; first += count * TQKV__LANES) {
        TQKV__VECTOR x[16];
        TQKV__(load_vectors)(count, type, in, first, x);
        if (flip) {
            const uint8_t *signs = &tqkv__tables.signs[first % 512 / 8];
            TQKV__UNROLL
            for (int i = 0; i < count; i++)
                x[i] = TQKV__(flip)(x[i], signs, i * TQKV__LANES + (TQKV__LANES < 8 ? first % 8 : 0));
        }
        TQKV__UNROLL
        for (int stage = 0; stage < 4; stage++)
            if (1 << stage < TQKV__LANES && 1 << stage < length) {
                TQKV__UNROLL
                for (int i = 0; i < count; i++) x[i] = TQKV__(butterfly)(stage, x[i]);
            }
        TQKV__(butterflies)(count, x);
        TQKV__UNROLL
        for (int i = 0; i < count; i++) TQKV__(store)(out + first + i * TQKV__LANES, x[i] * factor);
    }
}

/* Does stages h to h * count / 2, in place; count is a constant. */
TQKV__OP void TQKV__(hadamard_across)(const int count, int h, int head_dim, float *x)
{
    const TQKV__VECTOR factor = TQKV__(set1)(h * count == head_dim ? tqkv__size_of(head_dim)->inverse_root : 1.0f);
    for (int first = 0; first < head_dim; first += h * count)
        for (int j = first; j < first + h; j += TQKV__LANES) {
            TQKV__VECTOR v[4];
            TQKV__UNROLL
            for (int i = 0; i < count; i++) v[i] = TQKV__(load)(x + j + i * h);
            TQKV__(butterflies)(count, v);
            TQKV__UNROLL
            for (int i = 0; i < count; i++) TQKV__(store)(x + j + i * h, v[i] * factor);
        }
}

/* Where a column of a row's subrows begins: of LANES values or, if subrows are shorter, of two rows, a half each. */
typedef struct TQKV__(column) {
    float *low, *high;
} TQKV__(column);

/* Writes the matrix as floats, +-1: signs: [m / 4][m][4], four sums' by column */
TQKV__OP void TQKV__(open_signs)(int m, float *signs)
{
    for (int b = 0; b < m; b += 4)
        for (int c = 0; c < m; c++, signs += 4) {
            const unsigned bits = (unsigned)tqkv__matrix_row(m, c)[b / 8] >> (b % 8); /* symmetric */
            for (int i = 0; i < 4; i++) signs[i] = (bits >> i) & 1 ? -1.0f : 1.0f;
        }
}

/* Applies the matrix of order m to two columns of subrows n floats apart, in place: four sums of each in registers.
   pair is a constant: true where subrows are shorter than a vector. */
TQKV__OP void TQKV__(mix)(const bool pair, int m, int n, const float *signs, float factor,
                          const TQKV__(column) * columns)
{
    TQKV__VECTOR x[36][2];
    for (int c = 0; c < m; c++)
        for (int k = 0; k < 2; k++) {
            const float *low = columns[k].low + c * n, *high = columns[k].high + c * n;
            x[c][k] = pair ? TQKV__(load_two)(low, high) : TQKV__(load)(low);
        }
    for (int b = 0; b < m; b += 4) {
        TQKV__VECTOR sums[4][2];
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) {
            const TQKV__VECTOR sign = TQKV__(set1)(signs[i]);
            for (int k = 0; k < 2; k++) sums[i][k] = x[0][k] * sign;
        }
        signs += 4;
        for (int c = 1; c < m; c++, signs += 4) {
            TQKV__UNROLL
            for (int i = 0; i < 4; i++) {
                const TQKV__VECTOR sign = TQKV__(set1)(signs[i]);
                TQKV__UNROLL
                for (int k = 0; k < 2; k++) sums[i][k] = TQKV__(fma)(x[c][k], sign, sums[i][k]);
            }
        }
        TQKV__UNROLL
        for (int i = 0; i < 8; i++) {
            const TQKV__VECTOR sum = sums[i / 2][i % 2] * TQKV__(set1)(factor);
            float *low = columns[i % 2].low + (b + i / 2) * n, *high = columns[i % 2].high + (b + i / 2) * n;
            if (pair)
                TQKV__(store_two)(low, high, sum);
            else
                TQKV__(store)(low, sum);
        }
    }
}

/* Returns column i of some rows. A last row that has no next one is both halves. */
TQKV__OP TQKV__(column) TQKV__(column_at)(int head_dim, int n, float *rows, int n_rows, int i)
{
    const int per_row = n < TQKV__LANES ? 1 : n / TQKV__LANES, row = n < TQKV__LANES ? 2 * i : i / per_row;
    const TQKV__(column) column = {rows + row * head_dim + i % per_row * TQKV__LANES,
                                   rows + (row + 1 < n_rows ? row + 1 : row) * head_dim};
    return column;
}

/* Ends the rotation of rows of head_dim = m * n, m > 1, with the matrix across the subrows: of a few rows, because the
   signs take as long as one. The last of an odd number of columns is mixed twice. rows: [n_rows][head_dim] */
TQKV__LOOP void TQKV__(mix_rows)(int head_dim, float *rows, int n_rows)
{
    const tqkv__size *size = tqkv__size_of(head_dim);
    const int m = size->order, n = size->subrow;
    const int count = n < TQKV__LANES ? (n_rows + 1) / 2 : n_rows * (n / TQKV__LANES);
    TQKV__ALIGNED float signs[36 * 36];
    TQKV__(open_signs)(m, signs);
    for (int i = 0; i < count; i += 2) {
        const TQKV__(column) columns[2] = {TQKV__(column_at)(head_dim, n, rows, n_rows, i),
                                           TQKV__(column_at)(head_dim, n, rows, n_rows, i + 1 < count ? i + 1 : i)};
        if (n < TQKV__LANES)
            TQKV__(mix)(true, m, n, signs, size->inverse_root, columns);
        else
            TQKV__(mix)(false, m, n, signs, size->inverse_root, columns);
    }
}

/* Rotates: out = R(in)/sqrt(D), after flipping signs if asked, but for mix_rows; floats in and out may be the same. */
TQKV__LOOP void TQKV__(hadamard)(tqkv_type type, const void *in, int head_dim, bool flip, float *out)
{
    const bool whole = !TQKV__HAS_MATRIX(head_dim);
    int h = tqkv__size_of(head_dim)->subrow; /* 4 to 64, or all of the row */
    if (whole && h > TQKV__LANES * TQKV__WIDTH) h = TQKV__LANES * TQKV__WIDTH;
    if (h == 4 && TQKV__LANES > 4)
        TQKV__(hadamard_subrows)(1, 4, type, in, head_dim, flip, out);
    else if (h == TQKV__LANES)
        TQKV__(hadamard_subrows)(1, TQKV__LANES, type, in, head_dim, flip, out);
    else if (h == 2 * TQKV__LANES)
        TQKV__(hadamard_subrows)(2, 2 * TQKV__LANES, type, in, head_dim, flip, out);
    else if (h == 4 * TQKV__LANES)
        TQKV__(hadamard_subrows)(4, 4 * TQKV__LANES, type, in, head_dim, flip, out);
    else if (h == 8 * TQKV__LANES)
        TQKV__(hadamard_subrows)(8, 8 * TQKV__LANES, type, in, head_dim, flip, out);
    else if (TQKV__LANES < 8)
        TQKV__(hadamard_subrows)(16, 16 * TQKV__LANES, type, in, head_dim, flip, out);
    for (; whole && h * 4 <= head_dim; h *= 4) TQKV__(hadamard_across)(4, h, head_dim, out);
    if (whole && h < head_dim) TQKV__(hadamard_across)(2, h, head_dim, out);
}

TQKV__TARGET static void TQKV__(rotate)(float *x, int head_dim)
{
    TQKV__(hadamard)(TQKV_TYPE_F32, x, head_dim, true, x);
    if (TQKV__HAS_MATRIX(head_dim)) TQKV__(mix_rows)(head_dim, x, 1);
}

TQKV__TARGET static void TQKV__(unrotate)(float *y, int head_dim)
{
    TQKV__(hadamard)(TQKV_TYPE_F32, y, head_dim, false, y);
    if (TQKV__HAS_MATRIX(head_dim)) TQKV__(mix_rows)(head_dim, y, 1);
    for (int d = 0; d < head_dim; d += TQKV__LANES)
        TQKV__(store)(y + d, TQKV__(flip)(TQKV__(load)(y + d), tqkv__tables.signs, d % 512));
}

/* >>k-norms: sums of squares in 16 strided lanes, as in >>codec, and the norms of rows. */

/* Returns magnitudes, and the next float below where v is positive: then a boundary is below v if it is at most that.
   side: 1 less than the codes of one sign, or as many */
TQKV__OP TQKV__VECTOR TQKV__(fold)(const int half, TQKV__VECTOR v, TQKV__(codes) * side)
{
    v = TQKV__(max)(v, TQKV__(set1)(-TQKV__FAR));
    const TQKV__(words) positive = (TQKV__(words))(v > TQKV__(set1)(0.0f));
    *side = (TQKV__(codes))((uint32_t)(half - 1) - positive);
    return (TQKV__VECTOR)((TQKV__(words))TQKV__(abs)(v) + positive);
}

TQKV__OP TQKV__(codes) TQKV__(code_from)(TQKV__(codes) count, TQKV__VECTOR bound, TQKV__VECTOR w, TQKV__(codes) side)
{
    return (TQKV__(codes))(((TQKV__(words))count - (TQKV__(words))(bound <= w)) ^ (TQKV__(words))side);
}

TQKV__OP float TQKV__(sum_of_squares)(const float *x, int n)
{
    TQKV__VECTOR lanes[16 / TQKV__LANES];
    TQKV__UNROLL
    for (int k = 0; k < 16 / TQKV__LANES; k++) lanes[k] = TQKV__(set1)(0.0f);
    for (int d = 0; d < n; d += 16) {
        TQKV__UNROLL
        for (int k = 0; k < 16 / TQKV__LANES; k++) {
            const TQKV__VECTOR v = TQKV__(load)(x + d + k * TQKV__LANES);
            lanes[k] += TQKV__(rounded)(v * v);
        }
    }
    return TQKV__(sum_16)(lanes);
}

/* Returns the sum of the squares of the centroids of codes of TQ2, the one format that is not searched; codes: [n] */
TQKV__OP float TQKV__(squares_of_codes)(const tqkv__quantiser *q, const uint8_t *codes, int n)
{
    TQKV__VECTOR lanes[16 / TQKV__LANES], table[8 / TQKV__LANES];
    TQKV__UNROLL
    for (int k = 0; k < 16 / TQKV__LANES; k++) lanes[k] = TQKV__(set1)(0.0f);
    TQKV__UNROLL
    for (int k = 0; k < 8 / TQKV__LANES; k++) table[k] = TQKV__(load)(q->squares + k * TQKV__LANES);
    for (int d = 0; d < n; d += 16) {
        TQKV__UNROLL
        for (int k = 0; k < 16 / TQKV__LANES; k++)
            lanes[k] += TQKV__(look_up_8)(table, TQKV__(widen_bytes)(codes + d + k * TQKV__LANES));
    }
    return TQKV__(sum_16)(lanes);
}

TQKV__OP float TQKV__(largest_size)(const float *x, int n)
{
    TQKV__VECTOR even = TQKV__(set1)(0.0f), odd = even;
    for (int d = 0; d < n; d += 2 * TQKV__LANES) {
        even = TQKV__(max)(TQKV__(abs)(TQKV__(load)(x + d)), even);
        odd = TQKV__(max)(TQKV__(abs)(TQKV__(load)(x + d + TQKV__LANES)), odd);
    }
    return TQKV__(largest_lane)(TQKV__(max)(even, odd));
}

TQKV__OP void TQKV__(norms)(const tqkv__stream *s, const float *y, float *norms, float *scales)
{
    for (int b = 0; b < s->norms_per_row; b++, y += s->norm_dim)
        norms[b] = s->kind == TQKV__GRID ? tqkv__norm_i8(TQKV__(largest_size)(y, s->norm_dim), &scales[b])
                                         : tqkv__norm_tq(s, TQKV__(sum_of_squares)(y, s->norm_dim), &scales[b]);
}

/* >>k-search: the factors of a row's norms, by vectors: does what tqkv__search_block does. */

/* The scaled values of a row. Magnitudes are enough: codebooks are symmetric, a value has the sign of its centroid, and
   a product of 0 adds nothing. */
typedef struct TQKV__(sizes) {
    TQKV__ALIGNED float sizes[TQKV_MAX_HEAD_DIM];
    TQKV__ALIGNED int32_t less[TQKV_MAX_HEAD_DIM + 32]; /* -1 for positive values, see TQKV__(fold) */
    TQKV__ALIGNED uint32_t cells[TQKV_MAX_HEAD_DIM];    /* of a codebook whose tables do not fit registers */
} TQKV__(sizes);

/* Returns sizes times a factor, and the next float below where the value is positive: see TQKV__(fold). */
TQKV__OP TQKV__VECTOR TQKV__(sizes_times)(const TQKV__(sizes) * t, int at, TQKV__VECTOR factor)
{
    const TQKV__VECTOR size = TQKV__(load)(t->sizes + at) * factor;
    TQKV__VECTOR w;
    TQKV__(words) bits, less;
    memcpy(&bits, &size, sizeof bits);
    memcpy(&less, t->less + at, sizeof less);
    bits += less;
    memcpy(&w, &bits, sizeof w);
    return w;
}

/* The tables of a codebook of up to 4 bits, in registers */
typedef struct TQKV__(book) {
    TQKV__VECTOR top, bounds[8 / TQKV__LANES], centroids[8 / TQKV__LANES];
    TQKV__(codes) n_below;
} TQKV__(book);

/* Returns the cells of sizes times a factor. slope: that of cells, times the factor */
TQKV__OP TQKV__(codes) TQKV__(cells)(const TQKV__(sizes) * t, int at, TQKV__VECTOR slope, TQKV__VECTOR top)
{
    return TQKV__(truncate)(TQKV__(min)(TQKV__(load)(t->sizes + at) * slope, top));
}

/* Returns the centroids of sizes_times; bits is a constant: 4 for at most as many, else 8. Of a large codebook one load
   has all of a cell. */
TQKV__OP TQKV__VECTOR TQKV__(nearest)(const int bits, const tqkv__quantiser *q, const TQKV__(book) * book,
                                      const TQKV__(sizes) * t, int at, TQKV__VECTOR factor, TQKV__VECTOR slope)
{
    const TQKV__VECTOR w = TQKV__(sizes_times)(t, at, factor);
    TQKV__(codes) none;
    TQKV__VECTOR cell[4];
    if (bits == 8) {
        TQKV__(load_cells)(q->cells, t->cells + at, cell);
        return TQKV__(choose)(cell[0], w, cell[1], cell[2]);
    }
    memset(&none, 0, sizeof none);
    const TQKV__(codes) below = TQKV__(look_up_16)(book->n_below, TQKV__(cells)(t, at, slope, book->top));
    const TQKV__VECTOR bound = TQKV__(look_up_8)(book->bounds, below);
    return TQKV__(look_up_8)(book->centroids, TQKV__(code_from)(below, bound, w, none));
}

/* Finds the sums of v*c and of c*c over values [from, to) under factor f. */
TQKV__OP void TQKV__(try_factor)(const int bits, const tqkv__stream *s, const tqkv__quantiser *q,
                                 const TQKV__(book) * book, int f, int from, int to, TQKV__(sizes) * t, float *sums)
{
    const TQKV__VECTOR factor = TQKV__(set1)(s->factors[f]), slope = TQKV__(set1)(s->factors[f] * q->slope);
    TQKV__VECTOR products[16 / TQKV__LANES], squares[16 / TQKV__LANES];
    for (int at = from; bits == 8 && at < to; at += TQKV__LANES) { /* a load soon after would wait for the store */
        const TQKV__(codes) cells = TQKV__(cells)(t, at, slope, book->top);
        memcpy(t->cells + at, &cells, sizeof cells);
    }
    TQKV__UNROLL
    for (int k = 0; k < 16 / TQKV__LANES; k++) products[k] = squares[k] = TQKV__(set1)(0.0f);
    for (int at = from; at < to; at += 16) {
        TQKV__UNROLL
        for (int k = 0; k < 16 / TQKV__LANES; k++) {
            const int i = at + k * TQKV__LANES;
            const TQKV__VECTOR c = TQKV__(nearest)(bits, q, book, t, i, factor, slope);
            products[k] += TQKV__(rounded)(TQKV__(load)(t->sizes + i) * c);
            squares[k] += TQKV__(rounded)(c * c);
        }
    }
    sums[0] = TQKV__(sum_16)(products);
    sums[1] = TQKV__(sum_16)(squares);
}

/* Finds the best factor of each norm, the first of the largest (sum of v*c)^2 / (sum of c*c), and its sum of c*c. All
   lanes have the same numbers: a comparison of floats would be a branch. */
TQKV__OP void TQKV__(search_as)(const int bits, const tqkv__stream *s, const tqkv__quantiser *q, TQKV__(sizes) * t,
                                float *factors, float *squares)
{
    TQKV__(book) book;
    book.top = TQKV__(set1)(q->top);
    book.n_below = TQKV__(load_16)(q->n_below);
    for (int i = 0; i < 8 / TQKV__LANES; i++) {
        book.bounds[i] = TQKV__(load)(q->bounds + i * TQKV__LANES);
        book.centroids[i] = TQKV__(load)(q->centroids + i * TQKV__LANES);
    }
    for (int b = 0; b < s->norms_per_row; b++) {
        TQKV__VECTOR best = TQKV__(set1)(-1.0f), factor = best, square = best;
        for (int f = 0; f < TQKV__MOST_FACTORS; f++) {
            float sums[2];
            TQKV__(try_factor)(bits, s, q, &book, f, b * s->norm_dim, (b + 1) * s->norm_dim, t, sums);
            const TQKV__VECTOR u = TQKV__(set1)(sums[0]), c = TQKV__(set1)(sums[1]);
            /* Hidden, or clang multiplies by the reciprocal of a scalar under -freciprocal-math. */
            const TQKV__VECTOR share = TQKV__(rounded)(u * u) / TQKV__(rounded)(c);
            factor = TQKV__(choose)(share, best, TQKV__(set1)(s->factors[f]), factor);
            square = TQKV__(choose)(share, best, c, square);
            best = TQKV__(choose)(share, best, share, best);
        }
        factors[b] = factor[0];
        squares[b] = square[0];
    }
}

/* Scales a row, y to v: [head_dim]. Its scales become the factors of the search. NaN becomes infinity, which is no
   larger with any factor either. scales, squares: [norms_per_row] */
TQKV__LOOP void TQKV__(search_row)(const tqkv__stream *s, const tqkv__quantiser *q, const float *y, float *v,
                                   float *scales, float *squares)
{
    TQKV__(sizes) t;
    for (int d = 0; d < s->head_dim; d += TQKV__LANES) {
        const TQKV__VECTOR x = TQKV__(load)(y + d) * TQKV__(set1)(scales[d / s->norm_dim]);
        const TQKV__(words) positive = (TQKV__(words))(x > TQKV__(set1)(0.0f));
        TQKV__(store)(v + d, x);
        TQKV__(store)(t.sizes + d, TQKV__(abs)(TQKV__(max)(x, TQKV__(set1)(-INFINITY))));
        memcpy(t.less + d, &positive, sizeof positive);
    }
    if (s->book_bits <= 4)
        TQKV__(search_as)(4, s, q, &t, scales, squares);
    else
        TQKV__(search_as)(8, s, q, &t, scales, squares);
}

/* >>k-quantise: codes, packed, of whole rows. */

/* Quantises n values by one scale. bits is a constant, 0: the grid of I8, 4: a codebook of up to 4 bits. Codes are
   written in whole groups of four vectors, but y is not read behind n. y, codes: [n] */
TQKV__OP void TQKV__(quantise_short)(const int bits, const tqkv__quantiser *q, const float *y, int n, float scale,
                                     uint8_t *codes)
{
    TQKV__(codes) four[4], side;
    TQKV__VECTOR bounds[8 / TQKV__LANES];
    const TQKV__(codes) n_below = TQKV__(load_16)(q->n_below);
    for (int i = 0; i < 8 / TQKV__LANES; i++) bounds[i] = TQKV__(load)(q->bounds + i * TQKV__LANES);
    for (int d = 0; d < n; d += 4 * TQKV__LANES) {
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) {
            const int at = d + i * TQKV__LANES;
            const TQKV__VECTOR v = TQKV__(load)(y + (at < n ? at : d)) * TQKV__(set1)(scale);
            if (!bits) {
                four[i] = TQKV__(quantise_i8)(v);
                continue;
            }
            const TQKV__VECTOR w = TQKV__(fold)(q->half, v, &side);
            const TQKV__VECTOR cell = TQKV__(min)(w * TQKV__(set1)(q->slope), TQKV__(set1)(q->top));
            const TQKV__(codes) count = TQKV__(look_up_16)(n_below, TQKV__(truncate)(cell));
            four[i] = TQKV__(code_from)(count, TQKV__(look_up_8)(bounds, count), w, side);
        }
        const TQKV__(codes) bytes = TQKV__(narrow)(four);
        memcpy(codes + d, &bytes, sizeof bytes);
    }
}

/* Likewise for a codebook of up to 256 values, whose tables do not fit registers: one loop stores the cells, because a
   load soon after would wait for the store. */
TQKV__LOOP void TQKV__(quantise_large)(const tqkv__quantiser *q, const float *y, int n, float scale, uint8_t *codes)
{
    TQKV__ALIGNED uint32_t cells[TQKV_MAX_HEAD_DIM];
    TQKV__(codes) side, four[4];
    for (int d = 0; d < n; d += TQKV__LANES) {
        const TQKV__VECTOR w = TQKV__(fold)(q->half, TQKV__(load)(y + d) * TQKV__(set1)(scale), &side);
        four[0] = TQKV__(truncate)(TQKV__(min)(w * TQKV__(set1)(q->slope), TQKV__(set1)(q->top)));
        memcpy(cells + d, &four[0], sizeof four[0]);
    }
    for (int d = 0; d < n; d += 4 * TQKV__LANES) {
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) {
            TQKV__VECTOR cell[4];
            const int next = d + i * TQKV__LANES, at = next < n ? next : d;
            const TQKV__VECTOR w = TQKV__(fold)(q->half, TQKV__(load)(y + at) * TQKV__(set1)(scale), &side);
            TQKV__(load_cells)(q->cells, cells + at, cell);
            memcpy(&four[i], &cell[3], sizeof four[i]);
            four[i] = TQKV__(code_from)(four[i], cell[0], w, side);
        }
        const TQKV__(codes) bytes = TQKV__(narrow)(four);
        memcpy(codes + d, &bytes, sizeof bytes);
    }
}

/* Quantises a row. y: [head_dim], scales: [norms_per_row] -> codes: [head_dim] and room for four vectors */
TQKV__TARGET static void TQKV__(quantise_row)(const tqkv__stream *s, const tqkv__quantiser *q, const float *y,
                                              const float *scales, uint8_t *codes)
{
    for (int d = 0; d < s->head_dim; d += s->norm_dim, scales++)
        if (s->kind == TQKV__GRID)
            TQKV__(quantise_short)(0, q, y + d, s->norm_dim, *scales, codes + d);
        else if (s->book_bits <= 4)
            TQKV__(quantise_short)(4, q, y + d, s->norm_dim, *scales, codes + d);
        else
            TQKV__(quantise_large)(q, y + d, s->norm_dim, *scales, codes + d);
}

/* Packs the `bits` bits from bit `low` on of each code; both are constants. codes: [head_dim] and room for a vector */
TQKV__OP void TQKV__(pack_field)(const int bits, const int low, int head_dim, const uint8_t *codes, uint8_t *to)
{
    enum { step = 4 * TQKV__LANES };
    uint8_t last[step];
    for (int left = head_dim; left > 0; left -= step, codes += step, to += step * bits / 8) {
        TQKV__(codes) bytes;
        memcpy(&bytes, codes, sizeof bytes);
        TQKV__(pack)(bits, low, bytes, left < step ? last : to);
        if (left < step) memcpy(to, last, (size_t)(left * bits / 8));
    }
}

/* Packs codes: [head_dim] and room for a vector -> row: [row_bytes] */
TQKV__TARGET static void TQKV__(pack_row)(const tqkv__stream *s, const uint8_t *codes, uint8_t *row)
{
    uint8_t *upper = row + s->head_dim * s->main_bits / 8;
    for (int d = 0; s->main_bits == 8 && d < s->head_dim; d += 16) memcpy(row + d, codes + d, 16);
    if (s->main_bits == 4) TQKV__(pack_field)(4, 0, s->head_dim, codes, row);
    if (s->main_bits == 4 && s->upper_bits == 1) TQKV__(pack_field)(1, 4, s->head_dim, codes, upper);
    if (s->main_bits == 4 && s->upper_bits == 2) TQKV__(pack_field)(2, 4, s->head_dim, codes, upper);
    if (s->main_bits == 2) TQKV__(pack_field)(2, 0, s->head_dim, codes, row);
    if (s->main_bits == 2 && s->upper_bits == 1) TQKV__(pack_field)(1, 2, s->head_dim, codes, upper);
}

/* Stores a row of floats, or of halves, as halves. */
TQKV__TARGET static void TQKV__(store_f16_row)(tqkv_type type, const void *src, int head_dim, uint8_t *row)
{
    const TQKV__VECTOR most = TQKV__(set1)(65504.0f);
    if (type == TQKV_TYPE_F16) {
        memcpy(row, src, 2 * (size_t)head_dim);
        return;
    }
    for (int d = 0; d < head_dim; d += 16) {
        TQKV__UNROLL
        for (int k = d; k < d + 16; k += TQKV__LANES) {
            const TQKV__VECTOR x = TQKV__(load)((const float *)src + k);
            TQKV__(store_half)(row + 2 * k, TQKV__(max)(TQKV__(min)(x, most), -most));
        }
    }
}

/* Returns the values of a row that are to be quantised, rotated but for mix_rows: in row, [head_dim], or, where nothing
   is to be done, in the source. Halves are not widened first: that pass would cost a tenth. */
TQKV__TARGET static const void *TQKV__(open_row)(const tqkv__stream *s, const tqkv__row *source, float *row)
{
    const void *src = source->src;
    tqkv_type type = s->type;
    const bool kept = type == TQKV_TYPE_F32 || (s->kind == TQKV__HALF && type == TQKV_TYPE_F16);
    if (source->center || source->inverses || !(s->rotated || kept)) {
        TQKV__(widen)(type, src, source->center, source->inverses, s->head_dim, row);
        type = TQKV_TYPE_F32;
        src = row;
    }
    if (!s->rotated) return src;
    TQKV__(hadamard)(type, src, s->head_dim, true, row);
    return row;
}

TQKV__LOOP void TQKV__(code_row)(const tqkv__stream *s, const tqkv__quantiser *q, const float *y, float *scales,
                                 float *squares, uint8_t *codes)
{
    TQKV__ALIGNED float scaled[TQKV_MAX_HEAD_DIM];
    if (s->n_factors > 1) {
        TQKV__(search_row)(s, q, y, scaled, scales, squares);
        y = scaled;
    }
    TQKV__(quantise_row)(s, q, y, scales, codes);
    for (int b = 0; b < s->norms_per_row && s->n_factors == 1; b++) /* TQ2 */
        squares[b] = TQKV__(squares_of_codes)(q, codes + b * s->norm_dim, s->norm_dim);
}

/* Takes a few rows through each step: steps of one row depend on each other, rows do not. */
TQKV__LOOP void TQKV__(encode_rows_by)(tqkv__code_row *code_row, const tqkv__stream *s, const tqkv__quantiser *q,
                                       const tqkv__row *rows, int n_rows)
{
    enum { buffer = 1536, most_norms = buffer / 32 }; /* 6 KiB: a fraction of an L1 cache, and of the stack */
    TQKV__ALIGNED float rotated[buffer];
    float norms[most_norms], scales[most_norms], squares[TQKV_MAX_HEAD_DIM / 128];
    TQKV__ALIGNED uint8_t codes[TQKV_MAX_HEAD_DIM + 4 * TQKV__LANES];
    const void *values[most_norms];
    const int batch = buffer / s->head_dim, per_row = s->norms_per_row;
    for (int first = 0; first < n_rows; first += batch, rows += batch) {
        const int n = n_rows - first < batch ? n_rows - first : batch;
        for (int i = 0; i < n; i++) values[i] = TQKV__(open_row)(s, &rows[i], rotated + i * s->head_dim);
        if (s->rotated && TQKV__HAS_MATRIX(s->head_dim)) TQKV__(mix_rows)(s->head_dim, rotated, n);
        for (int i = 0; i < n; i++) {
            const tqkv_type type = values[i] == rows[i].src ? s->type : TQKV_TYPE_F32;
            if (rows[i].half) TQKV__(store_f16_row)(type, values[i], s->head_dim, rows[i].half);
            if (s->kind == TQKV__HALF) TQKV__(store_f16_row)(type, values[i], s->head_dim, rows[i].codes);
        }
        if (s->kind == TQKV__HALF) continue;
        for (int i = 0; i < n; i++)
            TQKV__(norms)(s, (const float *)values[i], norms + i * per_row, scales + i * per_row);
        for (int i = 0; i < n; i++) {
            float *norm = norms + i * per_row, *scale = scales + i * per_row;
            code_row(s, q, (const float *)values[i], scale, squares, codes);
            TQKV__(pack_row)(s, codes, rows[i].codes);
            if (s->kind == TQKV__BOOK) tqkv__correct_norms(s, squares, norm);
            for (int b = 0; b < per_row; b++) rows[i].norms[b] = norm[b];
            for (int b = 0; b < per_row && s->n_factors > 1 && rows[i].factors; b++) rows[i].factors[b] = scale[b];
        }
    }
}

TQKV__TARGET static void TQKV__(encode_rows)(const tqkv__stream *s, const tqkv__quantiser *q, const tqkv__row *rows,
                                             int n_rows)
{
    TQKV__(encode_rows_by)(TQKV__(code_row), s, q, rows, n_rows);
}

static const tqkv__codec TQKV__(codec) = {TQKV__(rows_finite), TQKV__(largest_of), TQKV__(invert),
                                          TQKV__(widen),       TQKV__(narrow_row), TQKV__(rotate),
                                          TQKV__(unrotate),    TQKV__(encode_rows)};

#endif

#endif /* TQKV__LANES */

#ifdef TQKV__INTEGER_LANES

/* >>k-halves: keys and values that are multiplied as floats, see >>plain. Halves are read where they lie; rows of TQ8
   become floats first. */

/* Calls a loop for 1, 2 or `most` rows, which is a constant there. */
#define TQKV__WITH_ROWS(rows, most, loop, ...) \
    ((rows) == 1 ? loop(1, __VA_ARGS__) : (rows) == 2 ? loop(2, __VA_ARGS__) : loop(most, __VA_ARGS__))
#define TQKV__ROWS_OF(left, most) ((left) >= (most) ? (most) : (left) >= 2 ? 2 : 1)

#ifndef TQKV__DECODED /* true: another set of the same name has these */

/* Query rows that share a key, and a value: enough sums in progress to hide their latency, and few enough for the
   registers. */
#define TQKV__HALF_KEY_ROWS (TQKV__INTEGER_LANES == 16 ? 4 : 3)
#define TQKV__HALF_ROWS     4

/* Floats that are decoded together: 16 KiB, a fraction of an L1 cache */
#define TQKV__DECODED_FLOATS 4096

/* Decodes n rows of TQ8. keys: see tqkv__norm_of_key; to: [n][head_dim] */
TQKV__OP void TQKV__(decode_floats)(const tqkv__stream *s, const uint8_t *codes, const float *norms, int n, bool keys,
                                    float *to)
{
    for (int d = 0, end = s->norm_dim; d < n * s->head_dim; end += s->norm_dim, norms++) {
        const float factor = tqkv__factor(s, keys ? tqkv__norm_of_key(*norms) : *norms);
        for (; d < end; d += TQKV__INTEGER_LANES) {
            TQKV__UNROLL
            for (int i = 0; i < TQKV__INTEGER_LANES; i++) to[d + i] = s->codebook[codes[d + i]];
            TQKV__(store)(to + d, TQKV__(load)(to + d) * TQKV__(set1)(factor));
        }
    }
}

/* Finds scores[row][j] (+)= query[row] . key j over the dimensions [begin, end), for four keys, which are halves or
   floats; rows and halves are constants. ahead: bytes to the keys that are read next, whose lines are prefetched one by
   one, or 0 */
TQKV__OP void TQKV__(score_four_halves)(const int rows, const bool halves, int dim, int begin, int end,
                                        const uint8_t *const *keys, ptrdiff_t ahead, const float *q, bool add,
                                        float *scores)
{
    enum { ALL = 16 / TQKV__INTEGER_LANES, NOW = TQKV__INTEGER_LANES == 4 ? 2 : 1 };
    TQKV__VECTOR sums[TQKV__HALF_KEY_ROWS][4][ALL];
    TQKV__UNROLL
    for (int first = 0; first < ALL; first += NOW) {
        TQKV__VECTOR now[TQKV__HALF_KEY_ROWS][4][NOW];
        TQKV__UNROLL
        for (int i = 0; i < rows * 4 * NOW; i++) now[i / NOW / 4][i / NOW % 4][i % NOW] = TQKV__(set1)(0.0f);
        for (int d = begin + first * TQKV__INTEGER_LANES; d < end; d += 16) {
            if (halves && ahead && first == 0 && d % 32 == 0) {
                TQKV__UNROLL
                for (int j = 0; j < 4; j++) tqkv__prefetch(TQKV__L2, keys[j] + 2 * d + ahead, 1);
            }
            TQKV__UNROLL
            for (int i = 0; i < NOW; i++) {
                const int at = d + i * TQKV__INTEGER_LANES;
                TQKV__VECTOR x[TQKV__HALF_KEY_ROWS];
                TQKV__UNROLL
                for (int r = 0; r < rows; r++) x[r] = TQKV__(load)(q + r * dim + at);
                TQKV__UNROLL
                for (int j = 0; j < 4; j++) {
                    const TQKV__VECTOR key = halves ? TQKV__(load_f16)(keys[j] + 2 * at)
                                                    : TQKV__(load)((const float *)(const void *)keys[j] + at);
                    TQKV__UNROLL
                    for (int r = 0; r < rows; r++) now[r][j][i] = TQKV__(fma)(x[r], key, now[r][j][i]);
                }
            }
        }
        TQKV__UNROLL
        for (int i = 0; i < rows * 4 * NOW; i++)
            sums[i / NOW / 4][i / NOW % 4][first + i % NOW] = now[i / NOW / 4][i / NOW % 4][i % NOW];
    }
    TQKV__UNROLL
    for (int r = 0; r < rows; r++) TQKV__(add_sums_of_16)(&sums[r][0][0], add, scores + r * TQKV__TILE);
}

/* Does the same for n keys, `stride` bytes apart; past the end the last one again. */
TQKV__OP void TQKV__(score_half_rows)(const int rows, const bool halves, int dim, const uint8_t *codes, size_t stride,
                                      int n, ptrdiff_t ahead, const float *q, bool add, float *scores)
{
    for (int j = 0; j < n; j += 4) {
        const uint8_t *keys[4];
        TQKV__UNROLL
        for (int i = 0; i < 4; i++) keys[i] = codes + (size_t)(j + i < n ? j + i : n - 1) * stride;
        for (int d = 0; d < dim; d += TQKV__MOST_PRODUCTS) {
            const int end = dim - d < TQKV__MOST_PRODUCTS ? dim : d + TQKV__MOST_PRODUCTS;
            TQKV__(score_four_halves)(rows, halves, dim, d, end, keys, ahead, q, add || d > 0, scores + j);
        }
    }
}

TQKV__OP void TQKV__(score_all)(const bool halves, int dim, const uint8_t *codes, size_t stride, int n, ptrdiff_t ahead,
                                const float *q, int n_rows, bool add, float *scores)
{
    for (int left = n_rows, now; left > 0; left -= now, q += now * dim, scores += now * TQKV__TILE) {
        now = TQKV__ROWS_OF(left, TQKV__HALF_KEY_ROWS);
        TQKV__WITH_ROWS(now, TQKV__HALF_KEY_ROWS, TQKV__(score_half_rows), halves, dim, codes, stride, n, ahead, q, add,
                        scores);
        ahead = 0;
    }
}

/* keys: [n][dim] */
TQKV__LOOP void TQKV__(score_decoded)(const float *keys, int dim, int n, const float *q, int n_rows, bool add,
                                      float *scores)
{
    TQKV__(score_all)
    (false, dim, (const uint8_t *)(const void *)keys, (size_t)dim * sizeof *keys, n, 0, q, n_rows, add, scores);
}

/* Adds: out[row][d] += weights[row][j] * value j, for `width` vectors of dimensions; rows, width and halves are
   constants. */
TQKV__OP void TQKV__(add_half_vectors)(const int rows, const int width, const bool halves, int dim,
                                       const uint8_t *codes, size_t stride, int n, ptrdiff_t ahead,
                                       const float *weights, float *out)
{
    TQKV__VECTOR sums[TQKV__HALF_ROWS][8];
    TQKV__UNROLL
    for (int i = 0; i < rows * width; i++)
        sums[i / width][i % width] = TQKV__(load)(out + i / width * dim + i % width * TQKV__INTEGER_LANES);
    for (int j = 0; j < n; j++, codes += stride) {
        TQKV__VECTOR x[8];
        if (halves && ahead) tqkv__prefetch(TQKV__L2, codes + ahead, (size_t)(2 * width * TQKV__INTEGER_LANES));
        TQKV__UNROLL
        for (int i = 0; i < width; i++)
            x[i] = halves ? TQKV__(load_f16)(codes + 2 * i * TQKV__INTEGER_LANES)
                          : TQKV__(load)((const float *)(const void *)codes + i * TQKV__INTEGER_LANES);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) {
            const TQKV__VECTOR weight = TQKV__(set1)(weights[r * TQKV__TILE + j]);
            TQKV__UNROLL
            for (int i = 0; i < width; i++) sums[r][i] = TQKV__(fma)(weight, x[i], sums[r][i]);
        }
    }
    TQKV__UNROLL
    for (int i = 0; i < rows * width; i++)
        TQKV__(store)(out + i / width * dim + i % width * TQKV__INTEGER_LANES, sums[i / width][i % width]);
}

/* Does the same for all dimensions, 32 or, for few rows on wide vectors, 64 at a time. */
TQKV__OP void TQKV__(add_half_rows)(const int rows, const bool halves, int dim, const uint8_t *codes, size_t stride,
                                    int n, ptrdiff_t ahead, const float *weights, float *out)
{
    const int sixteen = 16 / TQKV__INTEGER_LANES, most = TQKV__INTEGER_LANES == 16 ? 4 : 2;
    const int bytes = halves ? 2 : 4; /* of a value */
    const bool wide = TQKV__INTEGER_LANES == 16 || rows <= 2;
    int d = 0;
    for (; wide && d + 16 * most <= dim; d += 16 * most) {
        const uint8_t *from = codes + bytes * d;
        TQKV__(add_half_vectors)(rows, most * sixteen, halves, dim, from, stride, n, ahead, weights, out + d);
    }
    for (; d < dim; d += 16) {
        const uint8_t *from = codes + bytes * d;
        TQKV__(add_half_vectors)(rows, sixteen, halves, dim, from, stride, n, ahead, weights, out + d);
    }
}

TQKV__OP void TQKV__(add_to_all)(const bool halves, int dim, const uint8_t *codes, size_t stride, int n,
                                 ptrdiff_t ahead, const float *weights, int n_rows, float *out)
{
    for (int left = n_rows, now; left > 0; left -= now, weights += now * TQKV__TILE, out += now * dim) {
        now = TQKV__ROWS_OF(left, TQKV__HALF_ROWS);
        TQKV__WITH_ROWS(now, TQKV__HALF_ROWS, TQKV__(add_half_rows), halves, dim, codes, stride, n, ahead, weights,
                        out);
        ahead = 0;
    }
}

TQKV__LOOP void TQKV__(add_decoded)(const float *values, int dim, int n, const float *weights, int n_rows, float *out)
{
    TQKV__(add_to_all)
    (false, dim, (const uint8_t *)(const void *)values, (size_t)dim * sizeof *values, n, 0, weights, n_rows, out);
}

/* A tile's products of halves, or of TQ8 decoded to floats. of: weights if these are values, else queries; to: outputs,
   or scores, which keys add to or not */
TQKV__LOOP void TQKV__(floats_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment, bool values,
                                    const float *of, int n_rows, bool add, float *to)
{
    TQKV__ALIGNED float rows[TQKV__DECODED_FLOATS];
    const uint8_t *codes = tqkv__codes_at(s, kv_head, segment->slot);
    const float *norms = tqkv__norms_at(s, kv_head, segment->slot);
    const int dim = s->head_dim, n = segment->n, fit = TQKV__DECODED_FLOATS / dim / 4 * 4, most = fit > 16 ? 16 : fit;
    const ptrdiff_t ahead = (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes;
    if (s->kind == TQKV__HALF && values)
        TQKV__(add_to_all)(true, dim, codes, s->row_bytes, n, ahead, of, n_rows, to);
    else if (s->kind == TQKV__HALF)
        TQKV__(score_all)(true, dim, codes, s->row_bytes, n, ahead, of, n_rows, add, to);
    for (int j = 0; s->kind != TQKV__HALF && j < n; j += most) {
        const int now = n - j < most ? n - j : most;
        tqkv__prefetch(TQKV__L2, codes + (size_t)j * s->row_bytes + ahead, (size_t)now * s->row_bytes);
        TQKV__(decode_floats)
        (s, codes + (size_t)j * s->row_bytes, norms + j * s->norms_per_row, now, !values, rows);
        if (values)
            TQKV__(add_decoded)(rows, dim, now, of + j, n_rows, to);
        else
            TQKV__(score_decoded)(rows, dim, now, of, n_rows, add, to + j);
    }
}
#endif

/* >>k-rows: the loops of >>integer. A vector of codes is bytes: 16 dimensions, in their order, of each of
   TQKV__POSITIONS positions. A lane of 32 bits adds up TQKV__PRODUCTS products, either of words or of bytes; bytes are
   multiplied with the high and with the low byte of an integer. What a set brings, as TQKV__(name) if it has nothing
   to do with products, else as TQKV__I(name):

     open, look_up        the codes of up to 64 dimensions; sixteen k of them, plus TQKV__CODE_OFFSET, as a vector
     load_row, dot        16 integers of a row, in each 16 bytes; their products with a vector, added to a sum
     key_lanes            16 bytes of each position to lanes of TQKV__PRODUCTS dimensions
     value_lanes          vectors of TQKV__PRODUCTS positions to lanes of a dimension each
     repeat, dot_lanes    TQKV__PRODUCTS integers of a row in each lane; their products with lanes, added to a sum
     store_integers       lanes to integers as products find them
     whole, whole_lanes   a sum in one integer a lane                                                              */

#define TQKV__VECTOR        TQKV__(vector)
#define TQKV__BYTES         (4 * TQKV__INTEGER_LANES)
#define TQKV__POSITIONS     (TQKV__INTEGER_LANES / 4)
#define TQKV__CHUNK         64 /* dimensions that are opened together */
#define TQKV__LANE_BYTES    ((int)sizeof(TQKV__I(lanes)))
#define TQKV__KEY_LANES     (16 / TQKV__PRODUCTS)      /* vectors of lanes for 16 dimensions: of keys, */
#define TQKV__DIM_LANES     (16 / TQKV__INTEGER_LANES) /* and of values */
#define TQKV__MANY_SIXTEENS TQKV__SIXTEENS(TQKV__FEW_ROWS)
#define TQKV__UNITS         (TQKV__PRODUCTS > TQKV__POSITIONS ? TQKV__PRODUCTS / TQKV__POSITIONS : 1)
/* By the registers that a set has: rows of keys whose sums fit, sixteens of dimensions of one row of sums, and from how
   many rows on vectors of a codebook are turned. */
#define TQKV__MANY_ROWS           4
#define TQKV__MOST_SIXTEENS       (TQKV__INTEGER_LANES == 16 ? 4 : 2)
#define TQKV__LANES_ROWS_OF_BOOKS (TQKV__INTEGER_LANES == 16 ? 5 : 3)
/* Where a row of integers has what multiplies it, and -TQKV__CODE_OFFSET times its sum: in floats. */
#define TQKV__QUERY_OFFSET(head_dim) ((head_dim) / 2)
#define TQKV__QUERY_UNIT(head_dim)   ((head_dim)-1)
#define TQKV__WEIGHTS_OFFSET         (TQKV__TILE / 2)
#define TQKV__WEIGHTS_UNIT           (TQKV__TILE / 2 + 1)

/* The format of what is decoded already; no store has it. */
#define TQKV__READY TQKV_FORMAT_DEFAULT

#ifndef TQKV__DECODED /* true: another set of the same name has what does not depend on products */

/* The codes of a panel of a tile. Rows from `whole` on lie at `rest`: loops take 16 of them at a time. */
typedef struct TQKV__(panel) {
    const uint8_t *fields[2], *rest[2]; /* main ones, upper ones */
    size_t stride;
    const uint8_t *next; /* the rows that will be read next, or NULL */
    int first;           /* of the row's dimensions */
    const int8_t *centroids;
    tqkv_format format;
    int n, whole, dim;
} TQKV__(panel);

/* Copies the last rows of a tile, less than 16. room: [16][row_bytes] */
static void TQKV__(copy_rest)(const tqkv__stream *s, const uint8_t *row, int n, uint8_t *room)
{
    const size_t whole = (size_t)(n / 16 * 16), size = (size_t)(n % 16) * s->row_bytes;
    if (!size) return;
    memcpy(room, row + whole * s->row_bytes, size);
    memset(room + size, 0, 16 * s->row_bytes - size);
}

/* Opens the panel of the dimensions from `first` on; row: of the tile's first position */
static TQKV__(panel) TQKV__(open_panel)(const tqkv__stream *s, const uint8_t *row, const tqkv__segment *segment,
                                        int first, const uint8_t *room)
{
    const int main_at = first * s->main_bits / 8, upper_at = (s->head_dim * s->main_bits + first * s->upper_bits) / 8;
    const TQKV__(panel) panel = {{row + main_at, row + upper_at},
                                 {room + main_at, room + upper_at},
                                 s->row_bytes,
                                 segment->ahead ? row + (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes : NULL,
                                 first,
                                 s->centroids,
                                 s->format == TQKV_TQ5_BYTES ? TQKV_TQ6_BYTES : s->format,
                                 (segment->n + 15) / 16 * 16,
                                 segment->n / 16 * 16,
                                 s->panel_dim};
    return panel;
}

typedef struct TQKV__(cursor) {
    const uint8_t *fields[2];
} TQKV__(cursor);

/* Returns where the positions from j on are, up to 16, from the panel's dimension d on. */
TQKV__OP TQKV__(cursor) TQKV__(cursor_at)(const tqkv_format format, const TQKV__(panel) * a, int j, int d)
{
    const uint8_t *const *fields = j < a->whole ? a->fields : a->rest;
    const size_t at = (size_t)(j < a->whole ? j : j - a->whole) * a->stride;
    const TQKV__(cursor) cursor = {
        {fields[0] + at + d * TQKV__MAIN_BITS(format) / 8, fields[1] + at + d * TQKV__UPPER_BITS(format) / 8}};
    return cursor;
}

/* What a pass asks for of the rows that will be read next, with each `step` bytes of this tile's */
typedef struct TQKV__(request) {
    const uint8_t *next; /* or NULL */
    size_t step, size;
} TQKV__(request);

/* Opens the share of a pass over the dimensions [d, d + dims): prefetches are spread, because many at once wait for
   each other. */
TQKV__OP TQKV__(request)
    TQKV__(open_request)(const tqkv_format format, const TQKV__(panel) * a, int positions, int j, int d, int dims)
{
    const int bits = TQKV__MAIN_BITS(format) + TQKV__UPPER_BITS(format); /* of a dimension of the next rows */
    TQKV__(request) request = {NULL, (size_t)positions * a->stride, (size_t)(positions * dims * bits / 8)};
    if (a->next) request.next = a->next + (size_t)j * a->stride + positions * (a->first + d) * bits / 8;
    return request;
}

TQKV__OP void TQKV__(ask)(TQKV__(request) * request)
{
    if (!request->next) return;
    tqkv__prefetch(TQKV__L2, request->next, request->size);
    request->next += request->step;
}

TQKV__OP void TQKV__(move)(const TQKV__(panel) * a, int positions, TQKV__(cursor) * cursor)
{
    cursor->fields[0] += (size_t)positions * a->stride;
    cursor->fields[1] += (size_t)positions * a->stride;
}

TQKV__OP uint32_t TQKV__(largest_bits)(const float *x, int n)
{
    TQKV__(codes) largest;
    memset(&largest, 0, sizeof largest);
    for (int i = 0; i < n; i += TQKV__INTEGER_LANES) largest = TQKV__(larger_bits)(largest, TQKV__(load)(x + i));
    return TQKV__(largest_code)(largest);
}
#endif

/* Rounds n floats to integers against the one whose bits are `largest`, and returns -TQKV__CODE_OFFSET times their sum.
   Without a finite one all are 0. to: [n] */
TQKV__OP int32_t TQKV__I(round_floats)(const float *x, int n, uint32_t largest, void *to)
{
    const float scale = tqkv__integer_scale(largest);
    TQKV__(codes) sum;
    memset(&sum, 0, sizeof sum);
    if (!(scale > 0.0f)) memset(to, 0, (size_t)n * sizeof(int16_t));
    if (!(scale > 0.0f)) return 0;
    for (int i = 0; i < n; i += TQKV__INTEGER_LANES) {
        const TQKV__(codes) rounded = TQKV__(round_codes)(TQKV__(load)(x + i) * TQKV__(set1)(scale));
        TQKV__I(store_integers)(to, i, n, rounded);
        if (TQKV__CODE_OFFSET) sum = TQKV__(add_codes)(sum, rounded);
    }
    return TQKV__CODE_OFFSET ? -TQKV__CODE_OFFSET * TQKV__(sum_codes)(sum) : 0;
}

TQKV__TARGET static void TQKV__I(round_query)(const tqkv__stream *s, const float *query, float *to)
{
    const int dim = s->panel_dim;
    const uint32_t largest = TQKV__(largest_bits)(query, s->head_dim);
    int16_t *integers = (int16_t *)(void *)to;
    int32_t *offset = (int32_t *)(void *)(to + TQKV__QUERY_OFFSET(s->head_dim));
    for (int d = 0; d < s->head_dim; d += dim) *offset++ = TQKV__I(round_floats)(query + d, dim, largest, integers + d);
    to[TQKV__QUERY_UNIT(s->head_dim)] = tqkv__integer_unit(largest, s->step);
}

/* Rounds the weights of a row times the norms of a panel. Weights from n on are another row's. */
TQKV__LOOP void TQKV__I(round_weights)(const tqkv__stream *s, const float *weights, const float *factors, int n,
                                       float *to)
{
    TQKV__ALIGNED float x[TQKV__TILE];
    enum { VECTORS = TQKV__TILE / TQKV__INTEGER_LANES };
    TQKV__VECTOR scaled[VECTORS];
    TQKV__(codes) rounded[VECTORS], largest_of, sum;
    memset(&largest_of, 0, sizeof largest_of);
    memset(&sum, 0, sizeof sum);
    if (n < TQKV__TILE) {
        memset(x, 0, sizeof x);
        memcpy(x, weights, (size_t)n * sizeof *x);
        weights = x;
    }
    TQKV__UNROLL
    for (int i = 0; i < VECTORS; i++) {
        const int j = i * TQKV__INTEGER_LANES;
        scaled[i] = TQKV__(mul_nonzero)(TQKV__(load)(weights + j), TQKV__(load)(factors + j));
        largest_of = TQKV__(larger_bits)(largest_of, scaled[i]);
    }
    const uint32_t largest = TQKV__(largest_code)(largest_of);
    const float scale = tqkv__integer_scale(largest);
    TQKV__UNROLL
    for (int i = 0; i < VECTORS; i++) {
        rounded[i] = TQKV__(round_codes)(scaled[i] * TQKV__(set1)(scale));
        if (TQKV__CODE_OFFSET) sum = TQKV__(add_codes)(sum, rounded[i]);
    }
    int32_t offset = TQKV__CODE_OFFSET ? -TQKV__CODE_OFFSET * TQKV__(sum_codes)(sum) : 0;
    if (scale > 0.0f) {
        TQKV__UNROLL
        for (int i = 0; i < VECTORS; i++) TQKV__I(store_integers)(to, i * TQKV__INTEGER_LANES, TQKV__TILE, rounded[i]);
    } else {
        memset(to, 0, TQKV__TILE * sizeof(int16_t));
        offset = 0;
    }
    memcpy(to + TQKV__WEIGHTS_OFFSET, &offset, sizeof offset);
    to[TQKV__WEIGHTS_UNIT] = tqkv__integer_unit(largest, s->step);
}

typedef struct TQKV__I(product) {
    const int8_t *rows; /* of the first row; the next ones are row_floats floats on, like their units and offsets */
    const float *units, *offsets;
    int row_floats;
    float *results; /* scores or sums, result_floats apart */
    int result_floats;
    const float *factors; /* of positions, scores only */
    bool add;             /* to the scores */
} TQKV__I(product);

TQKV__OP void TQKV__I(advance)(TQKV__I(product) * p, int rows)
{
    p->rows += rows * p->row_floats * (int)sizeof(float);
    p->units += rows * p->row_floats;
    p->offsets += rows * p->row_floats;
    p->results += rows * p->result_floats;
}

TQKV__OP TQKV__I(sum) TQKV__I(no_sum)(void)
{
    TQKV__I(sum) zero;
    memset(&zero, 0, sizeof zero);
    return zero;
}

/* Returns the sums as floats, less what TQKV__CODE_OFFSET added to them. */
TQKV__OP TQKV__VECTOR TQKV__I(sum_of_row)(const TQKV__I(product) * p, int r, TQKV__(codes) sum)
{
    int32_t offset;
    memcpy(&offset, p->offsets + r * p->row_floats, sizeof offset);
    return TQKV__(to_floats)(TQKV__CODE_OFFSET ? TQKV__(add_codes)(sum, TQKV__(set_codes)(offset)) : sum);
}

TQKV__OP void TQKV__I(add_scores)(const TQKV__I(product) * p, int r, int j, TQKV__(codes) sum)
{
    float *to = p->results + r * p->result_floats + j;
    const TQKV__VECTOR factor = TQKV__(load)(p->factors + j) * TQKV__(set1)(p->units[r * p->row_floats]);
    const TQKV__VECTOR before = p->add ? TQKV__(load)(to) : TQKV__(set1)(0.0f);
    TQKV__(store)(to, TQKV__(fma)(TQKV__I(sum_of_row)(p, r, sum), factor, before));
}

/* -- Codes to vectors, 64 dimensions at a time. A tile is in units of TQKV__POSITIONS positions: for scores LANES
   positions are four units, where lane i of unit v has position v + 4 i; for sums lane i of a unit has its position i.
   -- */

#define TQKV__MOST_UNITS (TQKV__TILE / TQKV__POSITIONS)

#ifndef TQKV__DECODED
/* Looks up n positions from `first` on, in units. room: [units][left / 16][TQKV__BYTES] */
TQKV__OP void TQKV__(decode)(const tqkv_format format, const TQKV__(panel) * a, const bool keys, int d, int left,
                             int first, int n, int8_t *room)
{
    const TQKV__(chunk) chunk = TQKV__(open_chunk)(format, left, a->centroids);
    TQKV__(request) request = TQKV__(open_request)(format, a, TQKV__POSITIONS, first, d, left);
    for (int j = first; j < first + n; j += TQKV__INTEGER_LANES) {
        TQKV__(cursor) cursor = TQKV__(cursor_at)(format, a, j, d);
        TQKV__ROLLED
        for (int v = 0; v < 4; v++, TQKV__(move)(a, keys ? 1 : TQKV__POSITIONS, &cursor)) {
            const TQKV__(raw) raw =
                TQKV__(open)(format, &chunk, cursor.fields[0], cursor.fields[1], (keys ? 4 : 1) * a->stride);
            TQKV__(ask)(&request);
            TQKV__UNROLL
            for (int k = 0; k < 4; k++) {
                if (k && 16 * k >= left) continue;
                const TQKV__(codes) x = TQKV__(look_up)(format, k, &chunk, &raw);
                memcpy(room + k * TQKV__BYTES, &x, sizeof x);
            }
            room += left / 16 * TQKV__BYTES;
        }
    }
}

/* Codes of 5 bits in bytes are decoded as those of 6: the codebook is repeated. */
#define TQKV__DECODED_APART(format, kind, book) \
    ((kind) == TQKV__GRID || ((kind) == TQKV__BOOK && (book) <= 6 && (format) != TQKV_TQ5_BYTES))
#define TQKV__DECODER(unused, format, name, kind, main, upper, book, plain) \
    TQKV__LOOP void TQKV__(decode_##format)(const TQKV__(panel) * panel, bool keys, int d, int left, int first, int n, \
                                            int8_t *room) \
    { \
        const TQKV__(panel) a = *panel; \
        if (TQKV__DECODED_APART(format, kind, book)) TQKV__(decode)(format, &a, keys, d, left, first, n, room); \
    }
TQKV__FORMATS(TQKV__DECODER, )
#define TQKV__DECODER_OF(unused, format, ...) TQKV__(decode_##format),
static void (*const TQKV__(decoders)[])(const TQKV__(panel) *, bool, int, int, int, int,
                                        int8_t *) = {NULL, TQKV__FORMATS(TQKV__DECODER_OF, )};
#endif

/* -- Scores of few rows -- */

/* Sixteens of dimensions whose integers registers keep for so many rows */
#define TQKV__KEPT(rows) (TQKV__INTEGER_LANES == 16 && (rows) > 2 ? 2 : 4)

/* Adds the products of a unit of positions with the dimensions of a pass. format and rows are constants. */
TQKV__OP void TQKV__I(dot_unit)(const tqkv_format format, const int rows, const TQKV__(chunk) * chunk,
                                const TQKV__(raw) * raw, int left, TQKV__I(row) (*q)[4], TQKV__I(sum) * sums)
{
    const int kept = TQKV__KEPT(rows);
    TQKV__UNROLL
    for (int k = 0; k < kept; k++) {
        if (k && 16 * k >= left) continue;
        const TQKV__(codes) x = TQKV__(look_up)(format, k, chunk, raw);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) sums[r] = TQKV__I(dot)(sums[r], x, q[r][k]);
    }
}

/* Adds the products of a pass from d on: sums[row][u] for each unit. Four units are LANES positions; lane
   i of unit v has position v + 4 i. */
TQKV__OP void TQKV__I(score_chunk)(const tqkv_format format, const int rows, const TQKV__(panel) * a, int d,
                                   const TQKV__I(product) * p, TQKV__(codes) (*sums)[TQKV__MOST_UNITS])
{
    const int kept = TQKV__KEPT(rows), left = a->dim - d < 16 * kept ? a->dim - d : 16 * kept;
    const TQKV__(chunk) chunk = TQKV__(open_chunk)(format, left, a->centroids);
    TQKV__I(row) q[TQKV__FEW_ROWS][4];
    TQKV__(request) request = TQKV__(open_request)(format, a, TQKV__POSITIONS, 0, d, left);
    TQKV__UNROLL
    for (int i = 0; i < rows * kept; i++) {
        const int r = i / kept, k = i % kept;
        q[r][k] = TQKV__I(load_row)(p->rows + (size_t)(r * p->row_floats) * sizeof(float), a->dim, d + 16 * k);
    }
    for (int j = 0, u = 0; j < a->n; j += TQKV__INTEGER_LANES) {
        TQKV__(cursor) cursor = TQKV__(cursor_at)(format, a, j, d);
        TQKV__ROLLED
        for (int v = 0; v < 4; v++, u++, TQKV__(move)(a, 1, &cursor)) {
            const TQKV__(raw) raw = TQKV__(open)(format, &chunk, cursor.fields[0], cursor.fields[1], 4 * a->stride);
            TQKV__I(sum) now[TQKV__FEW_ROWS];
            TQKV__(ask)(&request);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++) now[r] = TQKV__I(no_sum)();
            TQKV__I(dot_unit)(format, rows, &chunk, &raw, left, q, now);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++) {
                const TQKV__(codes) whole = TQKV__I(whole)(now[r]);
                sums[r][u] = d ? TQKV__(add_codes)(sums[r][u], whole) : whole;
            }
        }
    }
}

/* results[row][j] (+)= (sum_d rows[row][d] * codes[j][d]) * factors[j] * unit of the row */
TQKV__LOOP void TQKV__I(finish_scores)(const TQKV__I(product) * p, int rows, int n,
                                       TQKV__(codes) (*sums)[TQKV__MOST_UNITS])
{
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < n; j += TQKV__INTEGER_LANES)
            TQKV__I(add_scores)(p, r, j, TQKV__(sum_four_codes)(sums[r] + j / TQKV__POSITIONS));
}

TQKV__OP void TQKV__I(score_rows)(const tqkv_format format, const int rows, const TQKV__(panel) * panel, int end,
                                  const TQKV__I(product) * p)
{
    TQKV__(codes) sums[TQKV__FEW_ROWS][TQKV__MOST_UNITS];
    const TQKV__(panel) a = *panel; /* sums lie elsewhere */
    for (int d = 0; d < end; d += 16 * TQKV__KEPT(rows)) TQKV__I(score_chunk)(format, rows, &a, d, p, sums);
    TQKV__I(finish_scores)(p, rows, a.n, sums);
}

/* -- Scores of many rows: a lane is a position. -- */

/* Turns two vectors of lanes of positions from j on. tile: [dim / TQKV__PRODUCTS][2][TQKV__LANE_BYTES] */
TQKV__LOOP void TQKV__I(turn_keys)(const TQKV__(panel) * a, int j, int8_t *tile)
{
    TQKV__ALIGNED int8_t room[2 * TQKV__INTEGER_LANES * TQKV__CHUNK];
    const int n = a->n - j > TQKV__INTEGER_LANES ? 2 : 1; /* vectors */
    for (int d = 0; d < a->dim; d += TQKV__CHUNK) {
        const int left = a->dim - d < TQKV__CHUNK ? a->dim - d : TQKV__CHUNK, sixteens = left / 16;
        TQKV__(decoders)[a->format](a, true, d, left, j, n * TQKV__INTEGER_LANES, room);
        for (int k = 0; k < sixteens; k++, tile += 2 * TQKV__KEY_LANES * TQKV__LANE_BYTES)
            for (int lanes = 0; lanes < n; lanes++) {
                TQKV__(codes) x[4];
                TQKV__I(lanes) y[TQKV__KEY_LANES];
                TQKV__UNROLL
                for (int v = 0; v < 4; v++)
                    memcpy(&x[v], room + ((4 * lanes + v) * sixteens + k) * TQKV__BYTES, sizeof x[v]);
                TQKV__I(key_lanes)(x, y);
                TQKV__UNROLL
                for (int i = 0; i < TQKV__KEY_LANES; i++)
                    memcpy(tile + (2 * i + lanes) * TQKV__LANE_BYTES, &y[i], sizeof y[i]);
            }
    }
}

/* Does what score_rows does for the positions of the tile, from j on. rows is a constant. */
TQKV__OP void TQKV__I(score_lanes_of)(const int rows, const TQKV__I(product) * p, int dim, int j, const int8_t *tile)
{
    const int8_t *q = p->rows;
    const int size = p->row_floats * (int)sizeof(float);
    TQKV__I(sum) sums[TQKV__MANY_ROWS][2];
    TQKV__UNROLL
    for (int i = 0; i < 2 * rows; i++) sums[i / 2][i % 2] = TQKV__I(no_sum)();
    for (int d = 0; d < dim; d += TQKV__PRODUCTS, tile += 2 * TQKV__LANE_BYTES) {
        TQKV__I(lanes) x[2];
        memcpy(x, tile, sizeof x);
        TQKV__UNROLL
        for (int r = 0; r < rows; r++) {
            const TQKV__I(repeated) y = TQKV__I(repeat)(q + (ptrdiff_t)r * size, dim, d);
            sums[r][0] = TQKV__I(dot_lanes)(sums[r][0], x[0], y);
            sums[r][1] = TQKV__I(dot_lanes)(sums[r][1], x[1], y);
        }
    }
    TQKV__UNROLL
    for (int i = 0; i < 2 * rows; i++)
        TQKV__I(add_scores)(p, i / 2, j + i % 2 * TQKV__INTEGER_LANES, TQKV__I(whole_lanes)(sums[i / 2][i % 2]));
}

TQKV__LOOP void TQKV__I(score_lanes)(TQKV__I(product) p, int dim, int j, const int8_t *tile, int n_rows)
{
    for (int left = n_rows, rows; left > 0; left -= rows, TQKV__I(advance)(&p, rows)) {
        rows = TQKV__ROWS_OF(left, TQKV__MANY_ROWS);
        TQKV__WITH_ROWS(rows, TQKV__MANY_ROWS, TQKV__I(score_lanes_of), &p, dim, j, tile);
    }
}

/* -- Sums of values: a lane is a dimension. -- */

/* Sixteens of dimensions whose sums fit in registers */
#define TQKV__SIXTEENS(rows) \
    ((rows)*TQKV__MOST_SIXTEENS <= TQKV__SUM_SIXTEENS ? TQKV__MOST_SIXTEENS : TQKV__SUM_SIXTEENS / (rows))

/* Whether a pass may have less than its sixteens. */
#define TQKV__ARE_PARTIAL(rows) (TQKV__INTEGER_LANES == 16 && (rows) < 4)

/* Adds n of the sums of a pass, sums: [rows][vectors], to results[row][d] and on. */
TQKV__OP void TQKV__I(add_sums_of)(const TQKV__I(product) * p, int rows, int vectors, int n, int d,
                                   const TQKV__(codes) * sums)
{
    for (int r = 0; r < rows; r++, sums += vectors) {
        float *to = p->results + r * p->result_floats + d;
        const TQKV__VECTOR unit = TQKV__(set1)(p->units[r * p->row_floats]);
        for (int i = 0; i < n; i++, to += TQKV__INTEGER_LANES)
            TQKV__(store)(to, TQKV__(fma)(TQKV__I(sum_of_row)(p, r, sums[i]), unit, TQKV__(load)(to)));
    }
}

/* The same for all loops of few rows, whose code would be half as long again with it */
TQKV__LOOP void TQKV__I(add_sums)(const TQKV__I(product) * p, int rows, int vectors, int n, int d,
                                  const TQKV__(codes) * sums)
{
    TQKV__I(add_sums_of)(p, rows, vectors, n, d, sums);
}

/* Adds the products of TQKV__PRODUCTS positions, from the cursor or from lanes in tile. */
TQKV__OP void TQKV__I(add_positions)(const tqkv_format format, const int rows, const int sixteens, int left,
                                     const TQKV__(panel) * a, const TQKV__(chunk) * chunk,
                                     const TQKV__(cursor) * cursor, const int8_t *tile, const TQKV__I(repeated) * y,
                                     TQKV__I(sum) (*sums)[4 * TQKV__DIM_LANES])
{
    TQKV__(raw) raw[TQKV__UNITS];
    const ptrdiff_t plane = (ptrdiff_t)(a->n / TQKV__PRODUCTS) * (TQKV__DIM_LANES * TQKV__LANE_BYTES);
    TQKV__UNROLL
    for (int i = 0; i < TQKV__UNITS; i++) {
        if (format == TQKV__READY) break;
        const size_t at = (size_t)(i * TQKV__POSITIONS) * a->stride;
        raw[i] = TQKV__(open)(format, chunk, cursor->fields[0] + at, cursor->fields[1] + at, a->stride);
    }
    TQKV__UNROLL
    for (int k = 0; k < sixteens; k++) {
        TQKV__(codes) x[TQKV__UNITS];
        TQKV__I(lanes) lanes[TQKV__DIM_LANES];
        if (TQKV__ARE_PARTIAL(rows) && k && 16 * k >= left) continue;
        if (format == TQKV__READY) {
            memcpy(lanes, tile + k * plane, sizeof lanes);
        } else {
            TQKV__UNROLL
            for (int i = 0; i < TQKV__UNITS; i++) x[i] = TQKV__(look_up)(format, k, chunk, &raw[i]);
            TQKV__I(value_lanes)(x, lanes);
        }
        TQKV__UNROLL
        for (int i = 0; i < rows * TQKV__DIM_LANES; i++) {
            TQKV__I(sum) *sum = &sums[i / TQKV__DIM_LANES][k * TQKV__DIM_LANES + i % TQKV__DIM_LANES];
            *sum = TQKV__I(dot_lanes)(*sum, lanes[i % TQKV__DIM_LANES], y[i / TQKV__DIM_LANES]);
        }
    }
}

/* Adds: results[row][d] += (sum_j rows[row][d] * codes[j][d]) * unit of the row, for 16 * sixteens dimensions from d
   on, straight from the codes or from lanes in tile. format, rows and sixteens are constants. */
TQKV__OP void TQKV__I(add_chunk)(const int rows, const tqkv_format format, const int sixteens, const TQKV__(panel) * a,
                                 int d, const TQKV__I(product) * p, const int8_t *tile)
{
    const int all = sixteens * TQKV__DIM_LANES, step = format == TQKV__READY ? a->n : 16;
    const int left = TQKV__ARE_PARTIAL(rows) && a->dim - d < 16 * sixteens ? a->dim - d : 16 * sixteens;
    const TQKV__(chunk) chunk = TQKV__(open_chunk)(format, left, a->centroids);
    TQKV__(request) request = TQKV__(open_request)(format, a, TQKV__PRODUCTS, 0, d, left);
    TQKV__I(sum) sums[TQKV__FEW_ROWS][4 * TQKV__DIM_LANES];
    const int8_t *w = p->rows;
    TQKV__UNROLL
    for (int i = 0; i < rows * all; i++) sums[i / all][i % all] = TQKV__I(no_sum)();
    for (int first = 0; first < a->n; first += step) {
        TQKV__(cursor) cursor = TQKV__(cursor_at)(format, a, first, d);
        TQKV__ROLLED
        for (int j = first; j < first + step; j += TQKV__PRODUCTS, tile += TQKV__DIM_LANES * TQKV__LANE_BYTES) {
            TQKV__I(repeated) y[TQKV__FEW_ROWS];
            if (format != TQKV__READY) TQKV__(ask)(&request);
            TQKV__UNROLL
            for (int r = 0; r < rows; r++)
                y[r] = TQKV__I(repeat)(w + (size_t)(r * p->row_floats) * sizeof(float), TQKV__TILE, j);
            TQKV__I(add_positions)(format, rows, sixteens, left, a, &chunk, &cursor, tile, y, sums);
            TQKV__(move)(a, TQKV__PRODUCTS, &cursor);
        }
    }
    TQKV__(codes) whole[TQKV__FEW_ROWS * 4 * TQKV__DIM_LANES];
    TQKV__UNROLL
    for (int i = 0; i < rows * all; i++) whole[i] = TQKV__I(whole_lanes)(sums[i / all][i % all]);
    if (format == TQKV__READY)
        TQKV__I(add_sums_of)(p, rows, all, all, d, whole);
    else
        TQKV__I(add_sums)(p, rows, all, left / 16 * TQKV__DIM_LANES, d, whole);
}

TQKV__OP void TQKV__I(add_rows)(const tqkv_format format, const int rows, const TQKV__(panel) * panel, int end,
                                const TQKV__I(product) * p)
{
    TQKV__(panel) a = *panel; /* results lie elsewhere */
    a.dim = end;
    for (int d = 0; d < end; d += 16 * TQKV__SIXTEENS(rows))
        TQKV__I(add_chunk)(rows, format, TQKV__SIXTEENS(rows), &a, d, p, NULL);
}

/* Finds the lanes of the dimensions [d, d + left) for all positions. tile: as add_chunk has it */
TQKV__LOOP void TQKV__I(turn_values)(const TQKV__(panel) * a, int d, int left, int8_t *tile)
{
    TQKV__ALIGNED int8_t room[TQKV__TILE * TQKV__CHUNK];
    const int sixteens = left / 16, units = a->n / TQKV__POSITIONS;
    TQKV__(decoders)[a->format](a, false, d, left, 0, a->n, room);
    for (int k = 0; k < sixteens; k++)
        for (int u = 0; u < units; u += TQKV__UNITS, tile += TQKV__DIM_LANES * TQKV__LANE_BYTES) {
            TQKV__(codes) x[TQKV__UNITS];
            TQKV__I(lanes) lanes[TQKV__DIM_LANES];
            TQKV__UNROLL
            for (int i = 0; i < TQKV__UNITS; i++)
                memcpy(&x[i], room + ((u + i) * sixteens + k) * TQKV__BYTES, sizeof x[i]);
            TQKV__I(value_lanes)(x, lanes);
            memcpy(tile, lanes, sizeof lanes);
        }
}

TQKV__LOOP void TQKV__I(add_lanes)(const TQKV__(panel) * panel, TQKV__I(product) p, int d, bool whole,
                                   const int8_t *tile, int n_rows)
{
    const TQKV__(panel) a = *panel;
    for (int rows; n_rows > 0; n_rows -= rows, TQKV__I(advance)(&p, rows)) {
        rows = TQKV__ROWS_OF(n_rows, TQKV__FEW_ROWS);
        if (whole)
            TQKV__WITH_ROWS(rows, TQKV__FEW_ROWS, TQKV__I(add_chunk), TQKV__READY, TQKV__MANY_SIXTEENS, &a, d, &p,
                            tile);
        else
            TQKV__WITH_ROWS(rows, TQKV__FEW_ROWS, TQKV__I(add_chunk), TQKV__READY, 1, &a, d, &p, tile);
    }
}

/* -- The loops of each format, for one and two rows -- */

typedef struct TQKV__I(loops) {
    void (*score)(const TQKV__(panel) *, int end, const TQKV__I(product) *, int rows);
    void (*add)(const TQKV__(panel) *, int end, const TQKV__I(product) *, int rows);
} TQKV__I(loops);

/* Whether a format has such loops: I8 and packed codes, of 6 bits where these gain 15%. */
#define TQKV__FEW_LOOPS(kind, main, book) \
    ((kind) == TQKV__GRID || ((kind) == TQKV__BOOK && (main) < 8 && (book) < (TQKV__INTEGER_LANES == 16 ? 7 : 6)))
#define TQKV__LOOPS_OF_FORMAT(unused, format, name, kind, main, upper, book, plain) \
    TQKV__LOOP void TQKV__I(score_##format)(const TQKV__(panel) * a, int end, const TQKV__I(product) * p, int rows) \
    { \
        if (TQKV__FEW_LOOPS(kind, main, book)) TQKV__BY_ROWS(score_rows, format, kind, book); \
    } \
    TQKV__LOOP void TQKV__I(add_##format)(const TQKV__(panel) * a, int end, const TQKV__I(product) * p, int rows) \
    { \
        if (TQKV__FEW_LOOPS(kind, main, book)) TQKV__BY_ROWS(add_rows, format, kind, book); \
    }
#define TQKV__BY_ROWS(loop, format, kind, book) \
    (rows == 1   ? TQKV__I(loop)(format, 1, a, end, p) \
     : rows == 2 ? TQKV__I(loop)(format, 2, a, end, p) \
     : TQKV__FEW_ROWS > 2 && ((kind) == TQKV__GRID || (TQKV__LANES_ROWS_OF_BOOKS > 3 && (book) < 6)) \
         ? TQKV__I(loop)(format, TQKV__FEW_ROWS, a, end, p) \
         : (void)0)
TQKV__FORMATS(TQKV__LOOPS_OF_FORMAT, )

#define TQKV__LOOPS_ENTRY(unused, format, ...) {TQKV__I(score_##format), TQKV__I(add_##format)},
static const TQKV__I(loops) TQKV__I(loops_by_format)[] = {{NULL, NULL}, TQKV__FORMATS(TQKV__LOOPS_ENTRY, )};

/* Whether so many rows are multiplied straight from the codes, which have no loop of four rows for 6 bits. */
static bool TQKV__I(are_few)(tqkv_format format, int n_rows)
{
    const tqkv__format *f = tqkv__format_of(format);
    const int most = f->kind == TQKV__GRID ? TQKV__LANES_ROWS : f->book_bits == 6 ? 3 : TQKV__LANES_ROWS_OF_BOOKS;
    return TQKV__FEW_LOOPS(f->kind, f->main_bits, f->book_bits) && n_rows < most;
}

TQKV__OP void TQKV__I(few_rows)(void (*loop)(const TQKV__(panel) *, int, const TQKV__I(product) *, int),
                                const TQKV__(panel) * panel, int end, TQKV__I(product) p, int n_rows)
{
    for (int left = n_rows, rows; left > 0; left -= rows, TQKV__I(advance)(&p, rows)) {
        rows = TQKV__ROWS_OF(left, TQKV__FEW_ROWS);
        loop(panel, end, &p, rows);
    }
}

/* -- A tile -- */

TQKV__TARGET static void TQKV__I(score_panel)(const TQKV__(panel) * panel, const TQKV__I(product) * p, int n_rows)
{
    TQKV__ALIGNED int8_t tile[TQKV__PANEL / TQKV__PRODUCTS * 2 * TQKV__LANE_BYTES];
    if (TQKV__I(are_few)(panel->format, n_rows)) {
        TQKV__I(few_rows)(TQKV__I(loops_by_format)[panel->format].score, panel, panel->dim, *p, n_rows);
        return;
    }
    for (int j = 0; j < panel->n; j += 2 * TQKV__INTEGER_LANES) {
        TQKV__I(turn_keys)(panel, j, tile);
        TQKV__I(score_lanes)(*p, panel->dim, j, tile, n_rows);
    }
}

TQKV__TARGET static void TQKV__I(score_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment,
                                             const float *q, int n_rows, bool add, float *scores)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    TQKV__ALIGNED uint8_t room[16 * TQKV_MAX_HEAD_DIM];
    const uint8_t *row = tqkv__codes_at(s, kv_head, segment->slot);
    if (tqkv__in_floats(s)) {
        TQKV__(floats_tile)(s, kv_head, segment, false, q, n_rows, add, scores);
        return;
    }
    TQKV__(factors)(s, tqkv__norms_at(s, kv_head, segment->slot), segment, true, factors);
    TQKV__(copy_rest)(s, row, segment->n, room);
    for (int d = 0, b = 0; d < s->head_dim; d += s->panel_dim, b++) {
        const TQKV__(panel) panel = TQKV__(open_panel)(s, row, segment, d, room);
        const TQKV__I(product) p = {(const int8_t *)(q) + 2 * d,
                                    q + TQKV__QUERY_UNIT(s->head_dim),
                                    q + TQKV__QUERY_OFFSET(s->head_dim) + b,
                                    s->head_dim,
                                    scores,
                                    TQKV__TILE,
                                    factors + b * TQKV__TILE,
                                    add || b > 0};
        TQKV__I(score_panel)(&panel, &p, n_rows);
    }
}

TQKV__TARGET static void TQKV__I(add_panel)(const TQKV__(panel) * panel, const TQKV__I(product) * p, int n_rows)
{
    enum { STEP = 16 * TQKV__MANY_SIXTEENS, PLANE = TQKV__TILE / TQKV__PRODUCTS * TQKV__DIM_LANES * TQKV__LANE_BYTES };
    TQKV__ALIGNED int8_t tile[TQKV__CHUNK / 16 * PLANE];
    const int plane = panel->n / TQKV__PRODUCTS * TQKV__DIM_LANES * TQKV__LANE_BYTES;
    const bool few = TQKV__I(are_few)(panel->format, n_rows);
    const int all = TQKV__ARE_PARTIAL(n_rows) ? panel->dim : panel->dim / 32 * 32; /* or whole passes of 32 */
    const int end = few ? all : 0; /* of the dimensions that few rows add straight from the codes */
    if (few) TQKV__I(few_rows)(TQKV__I(loops_by_format)[panel->format].add, panel, end, *p, n_rows);
    for (int d = end, left; d < panel->dim; d += left) {
        left = panel->dim - d < TQKV__CHUNK ? panel->dim - d : TQKV__CHUNK;
        TQKV__I(turn_values)(panel, d, left, tile);
        for (int e = 0; e < left; e += STEP)
            TQKV__I(add_lanes)(panel, *p, d + e, left - e >= STEP, tile + e / 16 * plane, n_rows);
    }
}

TQKV__TARGET static void TQKV__I(value_tile)(const tqkv__stream *s, int kv_head, const tqkv__segment *segment,
                                             const float *weights, int n_rows, float *scaled, float *out)
{
    TQKV__ALIGNED float factors[TQKV_MAX_HEAD_DIM / 128 * TQKV__TILE];
    TQKV__ALIGNED uint8_t room[16 * TQKV_MAX_HEAD_DIM];
    const uint8_t *row = tqkv__codes_at(s, kv_head, segment->slot);
    if (tqkv__in_floats(s)) {
        TQKV__(floats_tile)(s, kv_head, segment, true, weights, n_rows, true, out);
        return;
    }
    TQKV__(factors)(s, tqkv__norms_at(s, kv_head, segment->slot), segment, false, factors);
    TQKV__(copy_rest)(s, row, segment->n, room);
    for (int d = 0, b = 0; d < s->head_dim; d += s->panel_dim, b++) {
        const TQKV__(panel) panel = TQKV__(open_panel)(s, row, segment, d, room);
        const TQKV__I(product) p = {(const int8_t *)(scaled),
                                    scaled + TQKV__WEIGHTS_UNIT,
                                    scaled + TQKV__WEIGHTS_OFFSET,
                                    TQKV__TILE,
                                    out + d,
                                    s->head_dim,
                                    NULL,
                                    true};
        if (d % s->norm_dim == 0)
            for (int at = 0; at < n_rows * TQKV__TILE; at += TQKV__TILE)
                TQKV__I(round_weights)(s, weights + at, factors + b * TQKV__TILE, segment->n, scaled + at);
        TQKV__I(add_panel)(&panel, &p, n_rows);
    }
}

static const tqkv__kernels TQKV__I(kernels) = {TQKV__I(round_query), TQKV__I(score_tile), TQKV__(softmax_tile),
                                               TQKV__(end_piece),    TQKV__I(value_tile), TQKV__(sum_heads)};

#endif /* TQKV__INTEGER_LANES */

#if defined(TQKV__LANES) || defined(TQKV__INTEGER_LANES)
/* The macros that a set defines. Those of the loops are the same for all. */
#undef TQKV__
#undef TQKV__CODE_OFFSET
#undef TQKV__DECODED
#undef TQKV__ENCODES
#undef TQKV__FEW_ROWS
#undef TQKV__I
#undef TQKV__INTEGER_LANES
#undef TQKV__LANES
#undef TQKV__LANES_ROWS
#undef TQKV__PRODUCTS
#undef TQKV__SUM_SIXTEENS
#undef TQKV__TARGET
#undef TQKV__WIDTH

#endif

#if defined(TQKV_IMPLEMENTATION) && !defined(TQKV__SETS)
#define TQKV__SETS
#define TQKV__NESTED /* the file that a set includes is tqkv.h again */

/* Loops that are not optimised take twenty times the space and up to 130 times the time. gcc optimises them, whatever
   the rest of the file is compiled with. clang has no such pragma: it leaves the sets out, and plain C takes a fifth of
   the time. */
#if defined(__OPTIMIZE__) || !defined(__clang__)
#if defined(__x86_64__) && !defined(TQKV_NO_AVX2) && defined(_WIN32) && !defined(__clang__) && \
    !defined(TQKV_WINDOWS_AVX)
#pragma message("tqkv.h: without AVX, see TQKV_WINDOWS_AVX")
#elif defined(__x86_64__) && !defined(TQKV_NO_AVX2)
#define TQKV__AVX2
#ifndef TQKV_NO_AVX512
#define TQKV__AVX512
#endif
#elif defined(__aarch64__) && !defined(__AARCH64EB__)
#define TQKV__NEON
#endif
#endif
#if !defined(__OPTIMIZE__) && !defined(__clang__)
#define TQKV__OPTIMISED
#pragma GCC push_options
#pragma GCC optimize("O2")
#endif

#if defined(TQKV__AVX2)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push /* GCC 12 sees its own _mm512_undefined_epi32() as an uninitialised variable */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

static inline __m128i tqkv__load_64(const uint8_t *p) { return _mm_loadl_epi64((const __m128i *)(const void *)p); }
static inline __m128i tqkv__load_128(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)(const void *)p); }

/* >>set-avx2: with FMA and F16C */

#define TQKV__TARGET __attribute__((target("avx2,fma,f16c")))
typedef __m256 tqkv__vector_avx2;
typedef __m256i tqkv__codes_avx2;

TQKV__OP __m256 tqkv__set1_avx2(float x) { return _mm256_set1_ps(x); }
TQKV__OP __m256 tqkv__fma_avx2(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
TQKV__OP __m256 tqkv__max_avx2(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
TQKV__OP __m256 tqkv__zero_below_avx2(__m256 least, __m256 x, __m256 value)
{
    return _mm256_and_ps(_mm256_cmp_ps(x, least, _CMP_NLT_UQ), value);
}
TQKV__OP __m256 tqkv__mul_nonzero_avx2(__m256 a, __m256 b)
{
    return _mm256_and_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ), _mm256_mul_ps(a, b));
}
TQKV__OP __m256 tqkv__round_avx2(__m256 x) { return _mm256_round_ps(x, 8); }
TQKV__OP __m256 tqkv__exp2_avx2(__m256 n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
TQKV__OP float tqkv__largest_lane_avx2(__m256 x)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
TQKV__OP float tqkv__sum_16_avx2(const __m256 *x)
{
    const __m256 half = _mm256_add_ps(x[0], x[1]);
    __m128 m = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    m = _mm_add_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}
/* to[m] (+)= sum_16 of the vectors 2 m and 2 m + 1, m < 4 */
TQKV__OP void tqkv__add_sums_of_16_avx2(const __m256 *x, bool add, float *to)
{
    const __m256 a = _mm256_add_ps(x[0], x[1]), b = _mm256_add_ps(x[2], x[3]), c = _mm256_add_ps(x[4], x[5]),
                 d = _mm256_add_ps(x[6], x[7]);
    const __m256 ac = _mm256_add_ps(_mm256_permute2f128_ps(a, c, 0x20), _mm256_permute2f128_ps(a, c, 0x31));
    const __m256 bd = _mm256_add_ps(_mm256_permute2f128_ps(b, d, 0x20), _mm256_permute2f128_ps(b, d, 0x31));
    const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ac, bd, 0x44), _mm256_shuffle_ps(ac, bd, 0xee));
    const __m128 ab = _mm256_castps256_ps128(all), cd = _mm256_extractf128_ps(all, 1);
    const __m128 sums = _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
    _mm_storeu_ps(to, _mm_add_ps(add ? _mm_loadu_ps(to) : _mm_setzero_ps(), sums));
}
TQKV__OP __m256 tqkv__load_f16_avx2(const uint8_t *p) { return _mm256_cvtph_ps(tqkv__load_128(p)); }

TQKV__OP __m256 tqkv__rounded_avx2(__m256 x)
{
    __asm__("" : "+x"(x));
    return x;
}
TQKV__OP __m256 tqkv__min_avx2(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
/* Flips the signs whose bits are set, from bit i on. */
TQKV__OP __m256 tqkv__flip_avx2(__m256 x, const uint8_t *signs, int i)
{
    const __m256i bits = _mm256_set1_epi8((char)signs[i / 8]);
    const __m256i moved = _mm256_sllv_epi32(bits, _mm256_set_epi32(24, 25, 26, 27, 28, 29, 30, 31));
    return _mm256_xor_ps(x, _mm256_and_ps(_mm256_castsi256_ps(moved), _mm256_set1_ps(-0.0f)));
}
TQKV__OP __m256 tqkv__load_two_avx2(const float *low, const float *high)
{
    return _mm256_set_m128(_mm_loadu_ps(high), _mm_loadu_ps(low));
}
TQKV__OP void tqkv__store_two_avx2(float *low, float *high, __m256 x)
{
    _mm_storeu_ps(low, _mm256_castps256_ps128(x));
    _mm_storeu_ps(high, _mm256_extractf128_ps(x, 1));
}
TQKV__OP __m256i tqkv__widen_bytes_avx2(const uint8_t *p) { return _mm256_cvtepu8_epi32(tqkv__load_64(p)); }
TQKV__OP __m256 tqkv__butterfly_avx2(const int stage, __m256 x)
{
    const __m256 plus = _mm256_set1_ps(1.0f), minus = _mm256_set1_ps(-1.0f);
    const __m256 sign = stage == 0   ? _mm256_blend_ps(plus, minus, 0xaa)
                        : stage == 1 ? _mm256_blend_ps(plus, minus, 0xcc)
                                     : _mm256_blend_ps(plus, minus, 0xf0);
    const __m256 swapped = stage == 0   ? _mm256_permute_ps(x, 0xb1)
                           : stage == 1 ? _mm256_permute_ps(x, 0x4e)
                                        : _mm256_permute2f128_ps(x, x, 0x01);
    return _mm256_fmadd_ps(x, sign, swapped);
}
TQKV__OP __m256i tqkv__larger_bits_avx2(__m256i largest, __m256 x)
{
    return _mm256_max_epu32(largest, _mm256_andnot_si256(_mm256_set1_epi32((int)0x80000000), _mm256_castps_si256(x)));
}
TQKV__OP __m256i tqkv__truncate_avx2(__m256 x) { return _mm256_cvttps_epi32(x); }
/* Loads a table of 16 bytes, the same in either half of a register, and looks up: the upper three bytes of each lane
   are 0 and find the first entry, which is 0. */
TQKV__OP __m256i tqkv__load_16_avx2(const uint8_t *table) { return _mm256_broadcastsi128_si256(tqkv__load_128(table)); }
TQKV__OP __m256i tqkv__look_up_16_avx2(__m256i table, __m256i index) { return _mm256_shuffle_epi8(table, index); }
TQKV__OP __m256 tqkv__look_up_8_avx2(const __m256 *table, __m256i index)
{
    return _mm256_permutevar8x32_ps(*table, index);
}
TQKV__OP __m256 tqkv__choose_avx2(__m256 bound, __m256 w, __m256 below, __m256 above)
{
    return _mm256_blendv_ps(below, above, _mm256_cmp_ps(bound, w, _CMP_LE_OQ));
}
/* Loads eight cells: x[0] their bounds, x[1] and x[2] the centroids, x[3] the bits of n_below. Shufps runs on more
   ports than unpck. */
TQKV__OP void tqkv__load_cells_avx2(const tqkv__cell *cells, const uint32_t *at, __m256 *x)
{
    __m256 four[4];
    TQKV__UNROLL
    for (int i = 0; i < 4; i++)
        four[i] = _mm256_set_m128(_mm_load_ps(&cells[at[i + 4]].bound), _mm_load_ps(&cells[at[i]].bound));
    const __m256 a = _mm256_shuffle_ps(four[0], four[1], 0x44), b = _mm256_shuffle_ps(four[2], four[3], 0x44);
    const __m256 c = _mm256_shuffle_ps(four[0], four[1], 0xee), d = _mm256_shuffle_ps(four[2], four[3], 0xee);
    x[0] = _mm256_shuffle_ps(a, b, 0x88);
    x[1] = _mm256_shuffle_ps(a, b, 0xdd);
    x[2] = _mm256_shuffle_ps(c, d, 0x88);
    x[3] = _mm256_shuffle_ps(c, d, 0xdd);
}
TQKV__OP __m256i tqkv__quantise_i8_avx2(__m256 v)
{
    v = _mm256_max_ps(_mm256_min_ps(v, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-127.0f));
    return _mm256_and_si256(_mm256_cvtps_epi32(v), _mm256_set1_epi32(255));
}
TQKV__OP __m256i tqkv__narrow_avx2(const __m256i *four)
{
    const __m256i mixed =
        _mm256_packus_epi16(_mm256_packus_epi32(four[0], four[1]), _mm256_packus_epi32(four[2], four[3]));
    return _mm256_permutevar8x32_epi32(mixed, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));
}
TQKV__OP void tqkv__pack_avx2(const int bits, const int low, __m256i codes, uint8_t *p)
{
    if (bits == 1) {
        const int set = _mm256_movemask_epi8(_mm256_slli_epi16(codes, 7 - low));
        memcpy(p, &set, sizeof set);
        return;
    }
    const __m256i field = _mm256_and_si256(_mm256_srli_epi16(codes, low), _mm256_set1_epi8((char)((1 << bits) - 1)));
    if (bits == 4) {
        const __m256i joined = _mm256_maddubs_epi16(field, _mm256_set1_epi16(0x1001));
        _mm_storeu_si128((__m128i *)(void *)p,
                         _mm_packus_epi16(_mm256_castsi256_si128(joined), _mm256_extracti128_si256(joined, 1)));
        return;
    }
    const __m256i pairs = _mm256_maddubs_epi16(field, _mm256_set1_epi16(0x0401));
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packus_epi16(words, words));
}
TQKV__OP void tqkv__store_half_avx2(uint8_t *p, __m256 x)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
TQKV__OP void tqkv__store_words_avx2(uint8_t *p, __m256i words)
{
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128((__m128i *)(void *)p, _mm_packus_epi32(low, high));
}

#define TQKV__(name) tqkv__##name##_avx2
#define TQKV__ENCODES
#define TQKV__WIDTH 8 /* vectors of the rotation in registers */
#define TQKV__LANES 8
#include "tqkv.h"

/* >>set-avx512: with the byte permutes of VBMI. A function has the same name in all sets, except for the suffix. */

#ifdef TQKV__AVX512

#define TQKV__TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")))
typedef __m512 tqkv__vector_avx512;
typedef __m512i tqkv__codes_avx512;

TQKV__OP __m512 tqkv__set1_avx512(float x) { return _mm512_set1_ps(x); }
TQKV__OP __m512 tqkv__fma_avx512(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
/* Returns a > b ? a : b; gives b if either is NaN, in every set */
TQKV__OP __m512 tqkv__max_avx512(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored \
    "-Wsign-conversion" /* without optimisation GCC's intrinsic is a macro with a cast of -1 */
TQKV__OP __m512 tqkv__round_avx512(__m512 x) { return _mm512_roundscale_ps(x, 8); }
#pragma GCC diagnostic pop
TQKV__OP __m512 tqkv__exp2_avx512(__m512 n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n); }
TQKV__OP float tqkv__largest_lane_avx512(__m512 x) { return _mm512_reduce_max_ps(x); }
TQKV__OP float tqkv__sum_16_avx512(const __m512 *x)
{
    const __m256 halves[2] = {_mm512_castps512_ps256(*x), _mm512_extractf32x8_ps(*x, 1)};
    return tqkv__sum_16_avx2(halves);
}

TQKV__OP void tqkv__add_sums_of_16_avx512(const __m512 *x, bool add, float *to)
{
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x44), _mm512_shuffle_f32x4(x[0], x[1], 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x44), _mm512_shuffle_f32x4(x[2], x[3], 0xee));
    __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
    const __m128 sums = _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all));
    _mm_storeu_ps(to, _mm_add_ps(add ? _mm_loadu_ps(to) : _mm_setzero_ps(), sums));
}

/* Returns value where x >= least or x is NaN, else 0 */
TQKV__OP __m512 tqkv__zero_below_avx512(__m512 least, __m512 x, __m512 value)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), value);
}
/* Returns a * b; 0 where a is 0, even if b is infinite or NaN */
TQKV__OP __m512 tqkv__mul_nonzero_avx512(__m512 a, __m512 b)
{
    return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ), a, b);
}

TQKV__OP __m512 tqkv__load_f16_avx512(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

TQKV__OP __m512i tqkv__larger_bits_avx512(__m512i largest, __m512 x)
{
    return _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(x)));
}

/* -- Rows are encoded by the narrower set, but for the search of up to 6 bits, whose tables fit registers here. -- */

TQKV__OP __m512 tqkv__rounded_avx512(__m512 x)
{
    __asm__("" : "+v"(x));
    return x;
}

/* The tables of a codebook: positive boundaries, then infinity, the centroids above 0, and what >>k-search says of
   cells */
typedef struct tqkv__book_avx512 {
    __m512 bounds[2], centroids[2], top;
    __m512i n_below;
    float slope;
} tqkv__book_avx512;

/* large is a constant: a table of 32, not 16 */
TQKV__OP __m512 tqkv__look_up_in_avx512(const bool large, const __m512 *table, __m512i index)
{
    return large ? _mm512_permutex2var_ps(table[0], index, table[1]) : _mm512_permutexvar_ps(index, table[0]);
}

/* Returns how many positive boundaries are below each size times a factor or, of negative values, at it. */
TQKV__OP __m512i tqkv__count_avx512(const bool large, const tqkv__book_avx512 *book, const float *sizes,
                                    const int32_t *less, float factor)
{
    const __m512 size = _mm512_loadu_ps(sizes);
    const __m512i w = _mm512_add_epi32(_mm512_castps_si512(size * _mm512_set1_ps(factor)), _mm512_loadu_si512(less));
    const __m512 cell = _mm512_min_ps(size * _mm512_set1_ps(factor * book->slope), book->top);
    const __m512i count = _mm512_permutexvar_epi8(_mm512_cvttps_epi32(cell), book->n_below);
    const __m512 bound = tqkv__look_up_in_avx512(large, book->bounds, count);
    const __mmask16 above = _mm512_cmp_ps_mask(bound, _mm512_castsi512_ps(w), _CMP_LE_OQ);
    return _mm512_mask_sub_epi32(count, above, count, _mm512_set1_epi32(-1));
}

/* Does what >>k-search does for n values of one norm, and finds their codes. sizes, less: as TQKV__(sizes) has them */
TQKV__OP void tqkv__search_avx512(const bool large, const tqkv__stream *s, const tqkv__book_avx512 *book,
                                  const float *sizes, const int32_t *less, int n, float *factor, float *square,
                                  uint8_t *codes)
{
    const __m512i half = _mm512_set1_epi32((1 << (s->book_bits - 1)) - 1);
    float best = 0.0f;
    for (int f = 0; f < TQKV__MOST_FACTORS; f++) {
        __m512 products = _mm512_setzero_ps(), squares = products;
        for (int d = 0; d < n; d += 16) {
            const __m512i count = tqkv__count_avx512(large, book, sizes + d, less + d, s->factors[f]);
            const __m512 c = tqkv__look_up_in_avx512(large, book->centroids, count);
            products += tqkv__rounded_avx512(_mm512_loadu_ps(sizes + d) * c);
            squares += tqkv__rounded_avx512(c * c);
        }
        const float u = tqkv__sum_16_avx512(&products), c = tqkv__sum_16_avx512(&squares);
        const float share = TQKV__AS_FLOAT(tqkv__rounded(u * u) / tqkv__rounded(c)); /* hidden: see >>k-search */
        if (f > 0 && !(share > best)) continue;
        best = share;
        *square = c;
        *factor = s->factors[f];
    }
    for (int d = 0; d < n; d += 16) {
        const __m512i count = tqkv__count_avx512(large, book, sizes + d, less + d, *factor);
        const __m512i side = _mm512_sub_epi32(half, _mm512_loadu_si512(less + d));
        _mm_storeu_si128((__m128i *)(void *)(codes + d), _mm512_cvtepi32_epi8(_mm512_xor_si512(count, side)));
    }
}

TQKV__TARGET static void tqkv__code_row_avx512(const tqkv__stream *s, const tqkv__quantiser *q, const float *y,
                                               float *scales, float *squares, uint8_t *codes)
{
    TQKV__ALIGNED float sizes[TQKV_MAX_HEAD_DIM];
    TQKV__ALIGNED int32_t less[TQKV_MAX_HEAD_DIM];
    tqkv__book_avx512 book;
    for (int i = 0; i < 2; i++) {
        book.bounds[i] = _mm512_loadu_ps(q->bounds + 16 * i);
        book.centroids[i] = _mm512_loadu_ps(q->centroids + 16 * i);
    }
    book.n_below = _mm512_loadu_si512(q->n_below);
    book.top = _mm512_set1_ps(q->top);
    book.slope = q->slope;
    for (int d = 0; d < s->head_dim; d += 16) {
        const __m512 v = _mm512_loadu_ps(y + d) * _mm512_set1_ps(scales[d / s->norm_dim]), zero = _mm512_setzero_ps();
        _mm512_storeu_ps(sizes + d, _mm512_abs_ps(_mm512_max_ps(v, _mm512_set1_ps(-INFINITY)))); /* NaN: infinity */
        _mm512_storeu_si512(less + d, _mm512_movm_epi32(_mm512_cmp_ps_mask(v, zero, _CMP_GT_OQ)));
    }
    for (int b = 0, d = 0; b < s->norms_per_row; b++, d += s->norm_dim) {
        if (s->book_bits < 6)
            tqkv__search_avx512(false, s, &book, sizes + d, less + d, s->norm_dim, &scales[b], &squares[b], codes + d);
        else
            tqkv__search_avx512(true, s, &book, sizes + d, less + d, s->norm_dim, &scales[b], &squares[b], codes + d);
    }
}

static void tqkv__encode_rows_avx512(const tqkv__stream *s, const tqkv__quantiser *q, const tqkv__row *rows, int n_rows)
{
    const bool wide = s->n_factors > 1 && s->book_bits <= 6;
    tqkv__encode_rows_by_avx2(wide ? tqkv__code_row_avx512 : tqkv__code_row_avx2, s, q, rows, n_rows);
}

static const tqkv__codec tqkv__codec_avx512 = {tqkv__rows_finite_avx2, tqkv__largest_of_avx2,   tqkv__invert_avx2,
                                               tqkv__widen_avx2,       tqkv__narrow_row_avx2,   tqkv__rotate_avx2,
                                               tqkv__unrotate_avx2,    tqkv__encode_rows_avx512};

#define TQKV__(name) tqkv__##name##_avx512
#define TQKV__LANES  16
#include "tqkv.h"

#endif /* TQKV__AVX512 */

#elif defined(TQKV__NEON)
#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#elif defined(__APPLE__) /* the system's header does not compile with _POSIX_C_SOURCE */
#ifdef __cplusplus
extern "C" {
#endif
int sysctlbyname(const char *name, void *value, size_t *size, void *to, size_t to_size);
#ifdef __cplusplus
}
#endif
#endif

/* >>set-neon: part of every AArch64 */

#define TQKV__TARGET
typedef float32x4_t tqkv__vector_neon;
typedef uint32x4_t tqkv__codes_neon;

TQKV__OP float32x4_t tqkv__set1_neon(float x) { return vdupq_n_f32(x); }
TQKV__OP float32x4_t tqkv__fma_neon(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
TQKV__OP float32x4_t tqkv__max_neon(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
TQKV__OP float32x4_t tqkv__round_neon(float32x4_t x) { return vrndnq_f32(x); }
TQKV__OP float32x4_t tqkv__exp2_neon(float32x4_t n)
{
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
TQKV__OP float tqkv__largest_lane_neon(float32x4_t x) { return vmaxvq_f32(x); }
TQKV__OP float tqkv__sum_16_neon(const float32x4_t *x)
{
    const float32x4_t four = vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
TQKV__OP float32x4_t tqkv__zero_below_neon(float32x4_t least, float32x4_t x, float32x4_t value)
{
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, least)));
}
TQKV__OP float32x4_t tqkv__mul_nonzero_neon(float32x4_t a, float32x4_t b)
{
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(vmulq_f32(a, b)), vceqzq_f32(a)));
}
/* to[m] (+)= sum_16 of the vectors from 4 m on, m < 4 */
TQKV__OP void tqkv__add_sums_of_16_neon(const float32x4_t *x, bool add, float *to)
{
    float32x4_t fours[4], pairs[2];
    TQKV__UNROLL
    for (int m = 0; m < 4; m++)
        fours[m] = vaddq_f32(vaddq_f32(x[4 * m], x[4 * m + 2]), vaddq_f32(x[4 * m + 1], x[4 * m + 3]));
    TQKV__UNROLL
    for (int m = 0; m < 2; m++) {
        const float64x2_t a = vreinterpretq_f64_f32(fours[2 * m]), b = vreinterpretq_f64_f32(fours[2 * m + 1]);
        pairs[m] = vaddq_f32(vreinterpretq_f32_f64(vtrn1q_f64(a, b)), vreinterpretq_f32_f64(vtrn2q_f64(a, b)));
    }
    vst1q_f32(to, vaddq_f32(add ? vld1q_f32(to) : vdupq_n_f32(0.0f), vpaddq_f32(pairs[0], pairs[1])));
}
TQKV__OP float32x4_t tqkv__load_f16_neon(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }

TQKV__OP float32x4_t tqkv__rounded_neon(float32x4_t x)
{
    __asm__("" : "+w"(x));
    return x;
}
TQKV__OP float32x4_t tqkv__min_neon(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
TQKV__OP float32x4_t tqkv__flip_neon(float32x4_t x, const uint8_t *signs, int i)
{
    const int32_t shifts[4] = {31, 30, 29, 28};
    const uint32x4_t bits = vdupq_n_u32((uint32_t)signs[i / 8] >> (i % 8));
    const uint32x4_t moved = vandq_u32(vshlq_u32(bits, vld1q_s32(shifts)), vdupq_n_u32(0x80000000u));
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(x), moved));
}
/* A vector is no longer than a subrow: high is behind low. */
TQKV__OP float32x4_t tqkv__load_two_neon(const float *low, const float *high)
{
    (void)high;
    return vld1q_f32(low);
}
TQKV__OP void tqkv__store_two_neon(float *low, float *high, float32x4_t x)
{
    (void)high;
    vst1q_f32(low, x);
}
TQKV__OP uint32x4_t tqkv__widen_bytes_neon(const uint8_t *p)
{
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
TQKV__OP float32x4_t tqkv__butterfly_neon(const int stage, float32x4_t x)
{
    const float signs[2][4] = {{1.0f, -1.0f, 1.0f, -1.0f}, {1.0f, 1.0f, -1.0f, -1.0f}};
    return vfmaq_f32(stage == 0 ? vrev64q_f32(x) : vextq_f32(x, x, 2), x, vld1q_f32(signs[stage]));
}
TQKV__OP uint32x4_t tqkv__larger_bits_neon(uint32x4_t largest, float32x4_t x)
{
    return vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(x)));
}
TQKV__OP uint32x4_t tqkv__truncate_neon(float32x4_t x) { return vcvtq_u32_f32(x); }
TQKV__OP uint32x4_t tqkv__load_16_neon(const uint8_t *table) { return vreinterpretq_u32_u8(vld1q_u8(table)); }
TQKV__OP uint32x4_t tqkv__look_up_16_neon(uint32x4_t table, uint32x4_t index)
{
    return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), vreinterpretq_u8_u32(index)));
}
TQKV__OP float32x4_t tqkv__look_up_8_neon(const float32x4_t *table, uint32x4_t index)
{
    const uint8x16x2_t entries = {{vreinterpretq_u8_f32(table[0]), vreinterpretq_u8_f32(table[1])}};
    const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100u), index, 0x04040404u);
    return vreinterpretq_f32_u8(vqtbl2q_u8(entries, vreinterpretq_u8_u32(bytes)));
}
TQKV__OP float32x4_t tqkv__choose_neon(float32x4_t bound, float32x4_t w, float32x4_t below, float32x4_t above)
{
    return vbslq_f32(vcleq_f32(bound, w), above, below);
}
TQKV__OP void tqkv__load_cells_neon(const tqkv__cell *cells, const uint32_t *at, float32x4_t *x)
{
    float32x4_t four[4];
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) four[i] = vld1q_f32(&cells[at[i]].bound);
    const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(four[0], four[1]));
    const float64x2_t b = vreinterpretq_f64_f32(vtrn1q_f32(four[2], four[3]));
    const float64x2_t c = vreinterpretq_f64_f32(vtrn2q_f32(four[0], four[1]));
    const float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(four[2], four[3]));
    x[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, b));
    x[1] = vreinterpretq_f32_f64(vtrn1q_f64(c, d));
    x[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, b));
    x[3] = vreinterpretq_f32_f64(vtrn2q_f64(c, d));
}
TQKV__OP uint32x4_t tqkv__quantise_i8_neon(float32x4_t v)
{
    v = tqkv__max_neon(tqkv__min_neon(v, vdupq_n_f32(127.0f)), vdupq_n_f32(-127.0f));
    return vreinterpretq_u32_s32(vcvtnq_s32_f32(v));
}
TQKV__OP uint32x4_t tqkv__narrow_neon(const uint32x4_t *four)
{
    const uint16x8_t low = vcombine_u16(vmovn_u32(four[0]), vmovn_u32(four[1]));
    const uint16x8_t high = vcombine_u16(vmovn_u32(four[2]), vmovn_u32(four[3]));
    return vreinterpretq_u32_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
}
/* Stores the `bits` bits from bit `low` on of each byte, packed: 1, 2 or 4 bits. */
TQKV__OP void tqkv__pack_neon(const int bits, const int low, uint32x4_t codes, uint8_t *p)
{
    const int8_t shifts[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint8x16_t mask = vdupq_n_u8((uint8_t)((1 << bits) - 1));
    const uint8x16_t field = vandq_u8(vshlq_u8(vreinterpretq_u8_u32(codes), vdupq_n_s8((int8_t)-low)), mask);
    if (bits == 4) {
        vst1_u8(p, vget_low_u8(vsliq_n_u8(vuzp1q_u8(field, field), vuzp2q_u8(field, field), 4)));
        return;
    }
    if (bits == 1) {
        p[0] = vaddv_u8(vshl_u8(vget_low_u8(field), vld1_s8(shifts)));
        p[1] = vaddv_u8(vshl_u8(vget_high_u8(field), vld1_s8(shifts)));
        return;
    }
    const uint16x8_t words = vreinterpretq_u16_u8(field);
    const uint32x4_t pairs = vreinterpretq_u32_u16(vandq_u16(vorrq_u16(words, vshrq_n_u16(words, 6)), vdupq_n_u16(15)));
    const uint16x4_t fours = vmovn_u32(vorrq_u32(pairs, vshrq_n_u32(pairs, 12)));
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(fours, fours))), 0);
    memcpy(p, &bytes, sizeof bytes);
}
TQKV__OP void tqkv__store_half_neon(uint8_t *p, float32x4_t x) { vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32(x))); }
TQKV__OP void tqkv__store_words_neon(uint8_t *p, uint32x4_t words)
{
    vst1_u8(p, vreinterpret_u8_u16(vmovn_u32(words)));
}
#define TQKV__(name) tqkv__##name##_neon
#define TQKV__ENCODES
#define TQKV__WIDTH 16 /* vectors of the rotation in registers */
#define TQKV__LANES 4
#include "tqkv.h"

#endif

/* >>integer-avx512: what AVX-512 brings to >>k-rows, with the products of VNNI. A product wants one factor unsigned:
   codes are 128 more than they are. An integer is 256 times its high byte plus its low one, both signed. */

#ifdef TQKV__AVX512

#define TQKV__TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")))

/* Codes of four positions, in 16 bytes of each: up to two vectors of main fields and one of upper ones. Codes of a byte
   are loaded where they are looked up, from `at`. */
typedef struct tqkv__raw_avx512 {
    __m512i main[2], upper;
    const uint8_t *at;
    size_t stride;
} tqkv__raw_avx512;
typedef struct tqkv__chunk_avx512 {
    __mmask16 main[2], upper;
    __m512i book;
} tqkv__chunk_avx512;
typedef struct tqkv__i_bytes_avx512 {
    __m512i high, low;
} tqkv__i_sum_avx512, tqkv__i_row_avx512, tqkv__i_repeated_avx512;
typedef __m512i tqkv__i_lanes_avx512;

TQKV__OP uint64_t tqkv__i_lowest_avx512(int bits) { return ((uint64_t)1 << bits) - 1; }
TQKV__OP tqkv__chunk_avx512 tqkv__open_chunk_avx512(const tqkv_format format, int left, const int8_t *centroids)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format);
    tqkv__chunk_avx512 chunk;
    if (left > 64) left = 64;
    const uint64_t bytes = main < 8 ? tqkv__i_lowest_avx512(left * main / 8) : 0;
    chunk.main[0] = (__mmask16)bytes;
    chunk.main[1] = (__mmask16)(bytes >> 16);
    chunk.upper = (__mmask16)tqkv__i_lowest_avx512(left * upper_bits / 8);
    chunk.book = _mm512_set1_epi8(-128);
    if (TQKV__KIND(format) == TQKV__BOOK)
        chunk.book = _mm512_xor_si512(_mm512_loadu_si512((const void *)centroids), chunk.book);
    return chunk;
}
TQKV__OP __m512i tqkv__i_load_four_avx512(__mmask16 mask, const uint8_t *p, size_t stride)
{
    __m256i a = _mm256_castsi128_si256(_mm_maskz_loadu_epi8(mask, (const void *)p));
    __m256i b = _mm256_castsi128_si256(_mm_maskz_loadu_epi8(mask, (const void *)(p + 2 * stride)));
    a = _mm256_inserti128_si256(a, _mm_maskz_loadu_epi8(mask, (const void *)(p + stride)), 1);
    b = _mm256_inserti128_si256(b, _mm_maskz_loadu_epi8(mask, (const void *)(p + 3 * stride)), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}
/* Orders 16 bytes of a field so that the half h of a sixteen is in its 64-bit word h, `bits` bytes from bits * k on. */
TQKV__OP __m512i tqkv__i_order_avx512(const int bits, __m512i x)
{
    if (bits == 1) x = _mm512_unpacklo_epi64(x, _mm512_srli_epi64(x, 8));
    if (bits == 1) return x;
    const __m512i halves = _mm512_set4_epi64(0x0f0e0b0a07060302, 0x0d0c090805040100, 0x0f0e0b0a07060302,
                                             0x0d0c090805040100); /* of 2 bits */
    return _mm512_shuffle_epi8(x, halves);
}
TQKV__OP tqkv__raw_avx512 tqkv__open_avx512(const tqkv_format format, const tqkv__chunk_avx512 *chunk, const uint8_t *p,
                                            const uint8_t *upper, size_t stride)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format);
    tqkv__raw_avx512 raw;
    raw.at = p;
    raw.stride = stride;
    TQKV__UNROLL
    for (int i = 0; i < 2; i++)
        if (main < 8 && i < main / 2) raw.main[i] = tqkv__i_load_four_avx512(chunk->main[i], p + 16 * i, stride);
    if (main == 2) raw.main[0] = tqkv__i_order_avx512(2, raw.main[0]);
    if (upper_bits) raw.upper = tqkv__i_order_avx512(upper_bits, tqkv__i_load_four_avx512(chunk->upper, upper, stride));
    return raw;
}
/* Takes eight bits a code of a sixteen from ordered fields of 1 or 2 bits; its first bit comes to bit `low`. */
TQKV__OP __m512i tqkv__i_take_avx512(const int bits, const int low, const int sixteen, __m512i x)
{
    const uint64_t first = (uint64_t)((16 * sixteen + 64 - low) % 64);
    const uint64_t at = (uint64_t)bits * 0x0706050403020100u + first * 0x0101010101010101u;
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64((long long)at), x);
}
/* Bits above a code find its copy in the table. */
TQKV__OP __m512i tqkv__look_up_avx512(const tqkv_format format, const int k, const tqkv__chunk_avx512 *chunk,
                                      const tqkv__raw_avx512 *raw)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format);
    const __m512i x =
        main == 8 ? tqkv__i_load_four_avx512(0xffff, raw->at + 16 * k, raw->stride) : raw->main[k * main / 8 % 2];
    __m512i index = x;
    if (TQKV__KIND(format) == TQKV__GRID) return _mm512_xor_si512(x, chunk->book);
    if (main == 4) {
        const __m512i next = _mm512_srli_epi16(x, 4);
        index = k % 2 ? _mm512_unpackhi_epi8(x, next) : _mm512_unpacklo_epi8(x, next);
    }
    if (main == 2) index = tqkv__i_take_avx512(2, 0, k, x);
    if (upper_bits)
        index = _mm512_ternarylogic_epi64(_mm512_set1_epi8((char)((1 << main) - 1)), index,
                                          tqkv__i_take_avx512(upper_bits, main, k, raw->upper), 0xca);
    return _mm512_permutexvar_epi8(index, chunk->book);
}
/* GCC 12 copies the sums of the intrinsic, and spills them. */
TQKV__OP __m512i tqkv__i_dot_bytes_avx512(__m512i sums, __m512i codes, __m512i bytes)
{
#ifdef __clang__
    return _mm512_dpbusd_epi32(sums, codes, bytes);
#else
    __asm__("vpdpbusd\t{%2, %1, %0|%0, %1, %2}" : "+v"(sums) : "v"(codes), "vm"(bytes));
    return sums;
#endif
}
TQKV__OP tqkv__i_sum_avx512 tqkv__i_dot_lanes_avx512(tqkv__i_sum_avx512 sums, __m512i codes, tqkv__i_row_avx512 row)
{
    sums.high = tqkv__i_dot_bytes_avx512(sums.high, codes, row.high);
    sums.low = tqkv__i_dot_bytes_avx512(sums.low, codes, row.low);
    return sums;
}
#define tqkv__i_dot_avx512 tqkv__i_dot_lanes_avx512
TQKV__OP __m512i tqkv__i_whole_lanes_avx512(tqkv__i_sum_avx512 sum)
{
    return _mm512_add_epi32(_mm512_slli_epi32(sum.high, 8), sum.low);
}
#define tqkv__i_whole_avx512 tqkv__i_whole_lanes_avx512
/* A register, for loads that repeat 16 bytes are slow. */
TQKV__OP __m512i tqkv__i_repeat_16_avx512(const int8_t *p)
{
    __m512i x = _mm512_broadcast_i32x4(tqkv__load_128((const uint8_t *)p));
    __asm__("" : "+v"(x));
    return x;
}
TQKV__OP tqkv__i_row_avx512 tqkv__i_load_row_avx512(const int8_t *p, int plane, int i)
{
    const tqkv__i_row_avx512 row = {tqkv__i_repeat_16_avx512(p + i), tqkv__i_repeat_16_avx512(p + plane + i)};
    return row;
}
TQKV__OP tqkv__i_repeated_avx512 tqkv__i_repeat_avx512(const int8_t *p, int plane, int i)
{
    int32_t high, low;
    memcpy(&high, p + i, sizeof high);
    memcpy(&low, p + plane + i, sizeof low);
    const tqkv__i_repeated_avx512 repeated = {_mm512_set1_epi32(high), _mm512_set1_epi32(low)};
    return repeated;
}
TQKV__OP void tqkv__i_key_lanes_avx512(const __m512i *x, __m512i *lanes)
{
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    lanes[0] = _mm512_unpacklo_epi64(a, c);
    lanes[1] = _mm512_unpackhi_epi64(a, c);
    lanes[2] = _mm512_unpacklo_epi64(b, d);
    lanes[3] = _mm512_unpackhi_epi64(b, d);
}
TQKV__OP void tqkv__i_value_lanes_avx512(const __m512i *x, __m512i *lanes)
{
    const __m512i at = _mm512_set_epi32(0x3f2f1f0f, 0x3e2e1e0e, 0x3d2d1d0d, 0x3c2c1c0c, 0x3b2b1b0b, 0x3a2a1a0a,
                                        0x39291909, 0x38281808, 0x37271707, 0x36261606, 0x35251505, 0x34241404,
                                        0x33231303, 0x32221202, 0x31211101, 0x30201000);
    lanes[0] = _mm512_permutexvar_epi8(at, x[0]);
}
/* Adds up the lanes of four vectors in each quarter: lane i of it is vector i's. */
TQKV__OP __m512i tqkv__sum_four_codes_avx512(const __m512i *x)
{
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
TQKV__OP __m512 tqkv__to_floats_avx512(__m512i x) { return _mm512_cvtepi32_ps(x); }
TQKV__OP __m512i tqkv__round_codes_avx512(__m512 x) { return _mm512_cvtps_epi32(x); }
TQKV__OP void tqkv__i_store_integers_avx512(void *to, int i, int n, __m512i x)
{
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128((__m128i *)(void *)((int8_t *)to + i), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i *)(void *)((int8_t *)to + n + i), _mm512_cvtepi32_epi8(x));
}
TQKV__OP uint32_t tqkv__largest_code_avx512(__m512i x) { return _mm512_reduce_max_epu32(x); }
TQKV__OP __m512i tqkv__add_codes_avx512(__m512i x, __m512i y) { return _mm512_add_epi32(x, y); }
TQKV__OP __m512i tqkv__set_codes_avx512(int32_t x) { return _mm512_set1_epi32(x); }
TQKV__OP int32_t tqkv__sum_codes_avx512(__m512i x) { return _mm512_reduce_add_epi32(x); }

#define TQKV__(name)        tqkv__##name##_avx512
#define TQKV__I(name)       tqkv__i_##name##_avx512
#define TQKV__INTEGER_LANES 16
#define TQKV__PRODUCTS      4
#define TQKV__CODE_OFFSET   128
#define TQKV__FEW_ROWS      4 /* rows of loops straight from the codes, at most */
#define TQKV__LANES_ROWS    5 /* from so many rows on, tiles are turned */
#define TQKV__SUM_SIXTEENS  8 /* sixteens of dimensions, over all rows, whose sums fit in registers */
#include "tqkv.h"
#endif

/* >>integer-avx2: what AVX2 brings to >>k-rows. Products are of words. Bytes are widened with zeros: codes are 128 more
   than they are. */

#ifdef TQKV__AVX2

#define TQKV__TARGET __attribute__((target("avx2,fma,f16c")))

typedef struct tqkv__raw_avx2 {
    __m256i main[2], upper;
    const uint8_t *at;
    size_t stride;
} tqkv__raw_avx2;
typedef struct tqkv__chunk_avx2 {
    __m128i main[2], upper;
    int unfilled;
    __m256i books[4];
} tqkv__chunk_avx2;
/* The halves of 16 words, twice */
typedef struct tqkv__i_row_avx2 {
    __m256i first, last;
} tqkv__i_row_avx2;
typedef __m256i tqkv__i_sum_avx2, tqkv__i_lanes_avx2, tqkv__i_repeated_avx2;

TQKV__OP __m128i tqkv__i_lanes_left_avx2(int bytes)
{
    return _mm_cmpgt_epi32(_mm_set1_epi32(bytes), _mm_set_epi32(12, 8, 4, 0));
}
TQKV__OP tqkv__chunk_avx2 tqkv__open_chunk_avx2(const tqkv_format format, int left, const int8_t *centroids)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format), bits = TQKV__BOOK_BITS(format);
    tqkv__chunk_avx2 chunk;
    if (left > 64) left = 64;
    TQKV__UNROLL
    for (int i = 0; i < 2; i++) chunk.main[i] = tqkv__i_lanes_left_avx2(left * main / 8 - 16 * i);
    chunk.upper = tqkv__i_lanes_left_avx2(left * upper_bits / 8);
    chunk.unfilled = 8 - left / 8;
    TQKV__UNROLL
    for (int i = 0; i < 4; i++)
        if (bits && (i == 0 || i < (1 << bits) / 16))
            chunk.books[i] =
                _mm256_xor_si256(_mm256_set1_epi8(-128),
                                 _mm256_broadcastsi128_si256(tqkv__load_128((const uint8_t *)centroids + 16 * i)));
    return chunk;
}
TQKV__OP __m256i tqkv__i_load_two_avx2(__m128i mask, const uint8_t *p, size_t stride)
{
    const __m128i a = _mm_maskload_epi32((const int *)(const void *)p, mask);
    return _mm256_set_m128i(_mm_maskload_epi32((const int *)(const void *)(p + stride), mask), a);
}
/* Loads the upper bits of 64 dimensions. Of fewer the last 8 bytes of the row, which begin in its main field. */
TQKV__OP __m256i tqkv__i_load_bits_avx2(int unfilled, const uint8_t *p, size_t stride)
{
    const __m256i x = _mm256_set_m128i(tqkv__load_64(p + stride - unfilled), tqkv__load_64(p - unfilled));
    return _mm256_srl_epi64(x, _mm_cvtsi32_si128(8 * unfilled));
}
TQKV__OP tqkv__raw_avx2 tqkv__open_avx2(const tqkv_format format, const tqkv__chunk_avx2 *chunk, const uint8_t *p,
                                        const uint8_t *upper, size_t stride)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format);
    tqkv__raw_avx2 raw;
    raw.at = p;
    raw.stride = stride;
    TQKV__UNROLL
    for (int i = 0; i < 2; i++)
        if (main < 8 && i < main / 2) raw.main[i] = tqkv__i_load_two_avx2(chunk->main[i], p + 16 * i, stride);
    if (upper_bits == 1) raw.upper = tqkv__i_load_bits_avx2(chunk->unfilled, upper, stride);
    if (upper_bits == 2) raw.upper = tqkv__i_load_two_avx2(chunk->upper, upper, stride);
    return raw;
}
/* Spreads the fields of half a vector's bytes, low ones or high ones: each byte becomes two of `bits` bits. */
TQKV__OP __m256i tqkv__i_spread_avx2(const int bits, const int half, __m256i x)
{
    const __m256i mask = _mm256_set1_epi8((char)((1 << bits) - 1));
    const __m256i low = _mm256_and_si256(x, mask), high = _mm256_and_si256(_mm256_srli_epi16(x, bits), mask);
    return half ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
}
TQKV__OP __m256i tqkv__i_take_pairs_avx2(const int k, __m256i x)
{
    return tqkv__i_spread_avx2(2, k % 2, tqkv__i_spread_avx2(4, k / 2, x));
}
TQKV__OP __m256i tqkv__i_take_bits_avx2(const int k, __m256i x)
{
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    const long long first = 0x0202020202020202 * k, last = first + 0x0101010101010101;
    const __m256i bytes = _mm256_shuffle_epi8(x, _mm256_setr_epi64x(first, last, first, last));
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}
/* Look-ups take the lowest four bits of an index; fifth, sixth: the highest bit of a byte says which half */
TQKV__OP __m256i tqkv__i_centroids_avx2(const int bits, const __m256i *books, __m256i index, __m256i fifth,
                                        __m256i sixth)
{
    const __m256i first = _mm256_shuffle_epi8(books[0], index);
    if (bits < 5) return first;
    const __m256i low = _mm256_blendv_epi8(first, _mm256_shuffle_epi8(books[1], index), fifth);
    if (bits == 5) return low;
    const __m256i high =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(books[2], index), _mm256_shuffle_epi8(books[3], index), fifth);
    return _mm256_blendv_epi8(low, high, sixth);
}
TQKV__OP __m256i tqkv__look_up_avx2(const tqkv_format format, const int k, const tqkv__chunk_avx2 *chunk,
                                    const tqkv__raw_avx2 *raw)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format), bits = TQKV__BOOK_BITS(format);
    __m256i x, upper = _mm256_setzero_si256();
    if (main == 8) {
        x = _mm256_set_m128i(tqkv__load_128(raw->at + 16 * k + raw->stride), tqkv__load_128(raw->at + 16 * k));
        if (!bits) return _mm256_xor_si256(x, _mm256_set1_epi8(-128));
        upper = _mm256_srli_epi16(x, 4);
        x = _mm256_and_si256(x, _mm256_set1_epi8(15));
    }
    if (main == 4) x = tqkv__i_spread_avx2(4, k % 2, raw->main[k / 2]);
    if (main == 2) x = tqkv__i_take_pairs_avx2(k, raw->main[0]);
    if (upper_bits == 1) upper = tqkv__i_take_bits_avx2(k, raw->upper);
    if (upper_bits == 2) upper = tqkv__i_take_pairs_avx2(k, raw->upper);
    if (bits == 3) x = _mm256_or_si256(x, _mm256_and_si256(upper, _mm256_set1_epi8(4)));
    return tqkv__i_centroids_avx2(bits, chunk->books, x, _mm256_slli_epi16(upper, 7), _mm256_slli_epi16(upper, 6));
}
TQKV__OP tqkv__i_row_avx2 tqkv__i_load_row_avx2(const int8_t *p, int plane, int i)
{
    const uint8_t *words = (const uint8_t *)p + 2 * i;
    const tqkv__i_row_avx2 row = {_mm256_broadcastsi128_si256(tqkv__load_128(words)),
                                  _mm256_broadcastsi128_si256(tqkv__load_128(words + 16))};
    (void)plane; /* of bytes */
    return row;
}
/* GCC 12 copies the sums of the intrinsic, and spills them. */
TQKV__OP __m256i tqkv__i_dot_lanes_avx2(__m256i sums, __m256i words, __m256i integers)
{
    const __m256i products = _mm256_madd_epi16(words, integers);
#ifdef __clang__
    return _mm256_add_epi32(sums, products);
#else
    __asm__("vpaddd\t{%1, %0, %0|%0, %0, %1}" : "+x"(sums) : "x"(products));
    return sums;
#endif
}
TQKV__OP __m256i tqkv__i_dot_avx2(__m256i sums, __m256i x, tqkv__i_row_avx2 row)
{
    const __m256i zero = _mm256_setzero_si256();
    sums = tqkv__i_dot_lanes_avx2(sums, _mm256_unpacklo_epi8(x, zero), row.first);
    return tqkv__i_dot_lanes_avx2(sums, _mm256_unpackhi_epi8(x, zero), row.last);
}
TQKV__OP __m256i tqkv__i_whole_avx2(__m256i sum) { return sum; }
TQKV__OP __m256i tqkv__i_whole_lanes_avx2(__m256i sum) { return sum; }
TQKV__OP __m256i tqkv__i_repeat_avx2(const int8_t *p, int plane, int i)
{
    int32_t lane;
    (void)plane;
    memcpy(&lane, p + 2 * i, sizeof lane);
    return _mm256_set1_epi32(lane);
}
TQKV__OP void tqkv__i_key_lanes_avx2(const __m256i *x, __m256i *lanes)
{
    const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
    const __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    const __m256i turned[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d),
                               _mm256_unpackhi_epi64(b, d)};
    const __m256i at = _mm256_setr_epi32((int)0x80018000, (int)0x80058004, (int)0x80098008, (int)0x800d800c,
                                         (int)0x80018000, (int)0x80058004, (int)0x80098008, (int)0x800d800c);
    TQKV__UNROLL
    for (int i = 0; i < 8; i++)
        lanes[i] = _mm256_shuffle_epi8(turned[i / 2], i % 2 ? _mm256_add_epi8(at, _mm256_set1_epi16(2)) : at);
}
TQKV__OP void tqkv__i_value_lanes_avx2(const __m256i *x, __m256i *lanes)
{
    const __m256i fours = _mm256_permutevar8x32_epi32(x[0], _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
    const __m256i at = _mm256_setr_epi32((int)0x80048000, (int)0x80058001, (int)0x80068002, (int)0x80078003,
                                         (int)0x80048000, (int)0x80058001, (int)0x80068002, (int)0x80078003);
    lanes[0] = _mm256_shuffle_epi8(fours, at);
    lanes[1] = _mm256_shuffle_epi8(fours, _mm256_add_epi8(at, _mm256_set1_epi16(8)));
}
TQKV__OP __m256i tqkv__sum_four_codes_avx2(const __m256i *x)
{
    return _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
}
TQKV__OP __m256 tqkv__to_floats_avx2(__m256i x) { return _mm256_cvtepi32_ps(x); }
TQKV__OP __m256i tqkv__round_codes_avx2(__m256 x) { return _mm256_cvtps_epi32(x); }
TQKV__OP void tqkv__i_store_integers_avx2(void *to, int i, int n, __m256i x)
{
    (void)n;
    _mm_storeu_si128((__m128i *)(void *)((int16_t *)to + i),
                     _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
TQKV__OP uint32_t tqkv__largest_code_avx2(__m256i x)
{
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1)));
}
TQKV__OP __m256i tqkv__add_codes_avx2(__m256i x, __m256i y) { return _mm256_add_epi32(x, y); }
TQKV__OP __m256i tqkv__set_codes_avx2(int32_t x) { return _mm256_set1_epi32(x); }
TQKV__OP int32_t tqkv__sum_codes_avx2(__m256i x)
{
    const __m128i m = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i two = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

#define TQKV__(name)        tqkv__##name##_avx2
#define TQKV__I(name)       tqkv__i_##name##_avx2
#define TQKV__INTEGER_LANES 8
#define TQKV__PRODUCTS      2
#define TQKV__CODE_OFFSET   128
#define TQKV__FEW_ROWS      4
#define TQKV__LANES_ROWS    8
#define TQKV__SUM_SIXTEENS  4 /* sixteens of dimensions, over all rows, whose sums fit in registers */
#include "tqkv.h"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

/* >>integer-neon: what NEON brings to >>k-integer */

#ifdef TQKV__NEON

#define TQKV__TARGET

/* Codes are looked up where they lie. */
typedef struct tqkv__raw_neon {
    const uint8_t *at, *upper;
} tqkv__raw_neon;
typedef struct tqkv__chunk_neon {
    uint32x4_t books[4];
} tqkv__chunk_neon;
typedef struct tqkv__i_row_neon {
    int16x8_t first, last;
} tqkv__i_row_neon;
typedef uint32x4_t tqkv__i_sum_neon, tqkv__i_lanes_neon, tqkv__i_repeated_neon;

TQKV__OP tqkv__chunk_neon tqkv__open_chunk_neon(const tqkv_format format, int left, const int8_t *centroids)
{
    tqkv__chunk_neon chunk;
    (void)left;
    TQKV__UNROLL
    for (int i = 0; i < 4; i++)
        if (TQKV__KIND(format) == TQKV__BOOK && (i == 0 || i < (1 << TQKV__BOOK_BITS(format)) / 16))
            chunk.books[i] = vreinterpretq_u32_s8(vld1q_s8(centroids + 16 * i));
    return chunk;
}
TQKV__OP tqkv__raw_neon tqkv__open_neon(const tqkv_format format, const tqkv__chunk_neon *chunk, const uint8_t *p,
                                        const uint8_t *upper, size_t stride)
{
    const tqkv__raw_neon raw = {p, upper};
    (void)format, (void)chunk, (void)stride; /* of one position */
    return raw;
}
/* The next 16 codes of a field, a byte each, from bit `to` of it on; other bits may be set. */
TQKV__OP uint8x16_t tqkv__i_field_neon(const int bits, const int to, const uint8_t *p)
{
    uint8_t at[16];
    int8_t shift[16];
    uint64_t bytes = 0;
    if (bits == 8) return vld1q_u8(p);
    TQKV__UNROLL
    for (int i = 0; i < 16; i++) {
        at[i] = (uint8_t)(i * bits / 8);
        shift[i] = (int8_t)(to - i * bits % 8);
    }
    memcpy(&bytes, p, 2 * (size_t)bits);
    const uint8x16_t spread = vqtbl1q_u8(vcombine_u8(vcreate_u8(bytes), vdup_n_u8(0)), vld1q_u8(at));
    return vshlq_u8(spread, vld1q_s8(shift));
}
TQKV__OP uint32x4_t tqkv__look_up_neon(const tqkv_format format, const int k, const tqkv__chunk_neon *chunk,
                                       const tqkv__raw_neon *raw)
{
    const int main = TQKV__MAIN_BITS(format), upper_bits = TQKV__UPPER_BITS(format), bits = TQKV__BOOK_BITS(format);
    uint8x16_t index = tqkv__i_field_neon(main, 0, raw->at + 2 * k * main), found;
    uint8x16x4_t book;
    if (TQKV__KIND(format) == TQKV__GRID) return vreinterpretq_u32_u8(index);
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) book.val[i] = vreinterpretq_u8_u32(chunk->books[i < (1 << bits) / 16 ? i : 0]);
    const uint8x16x2_t half = {{book.val[0], book.val[1]}};
    if (upper_bits)
        index = vbslq_u8(vdupq_n_u8((uint8_t)((1 << main) - 1)), index,
                         tqkv__i_field_neon(upper_bits, main, raw->upper + 2 * k * upper_bits));
    index = vandq_u8(index, vdupq_n_u8((uint8_t)((1 << bits) - 1)));
    if (bits == 6)
        found = vqtbl4q_u8(book, index);
    else if (bits == 5)
        found = vqtbl2q_u8(half, index);
    else
        found = vqtbl1q_u8(book.val[0], index);
    return vreinterpretq_u32_u8(found);
}
TQKV__OP tqkv__i_row_neon tqkv__i_load_row_neon(const int8_t *p, int plane, int i)
{
    const int16_t *words = (const int16_t *)(const void *)p + i;
    const tqkv__i_row_neon row = {vld1q_s16(words), vld1q_s16(words + 8)};
    (void)plane; /* of bytes */
    return row;
}
/* Lane i adds up the products of words i and i + 4. */
TQKV__OP uint32x4_t tqkv__i_dot_words_neon(uint32x4_t sums, int16x8_t x, int16x8_t y)
{
    const int32x4_t low = vmlal_s16(vreinterpretq_s32_u32(sums), vget_low_s16(x), vget_low_s16(y));
    return vreinterpretq_u32_s32(vmlal_high_s16(low, x, y));
}
TQKV__OP uint32x4_t tqkv__i_dot_neon(uint32x4_t sums, uint32x4_t codes, tqkv__i_row_neon row)
{
    const int8x16_t x = vreinterpretq_s8_u32(codes);
    sums = tqkv__i_dot_words_neon(sums, vmovl_s8(vget_low_s8(x)), row.first);
    return tqkv__i_dot_words_neon(sums, vmovl_high_s8(x), row.last);
}
TQKV__OP uint32x4_t tqkv__i_dot_lanes_neon(uint32x4_t sums, uint32x4_t lanes, uint32x4_t integers)
{
    return tqkv__i_dot_words_neon(sums, vreinterpretq_s16_u32(lanes), vreinterpretq_s16_u32(integers));
}
TQKV__OP uint32x4_t tqkv__i_whole_neon(uint32x4_t sum) { return sum; }
TQKV__OP uint32x4_t tqkv__i_whole_lanes_neon(uint32x4_t sum) { return sum; }
TQKV__OP uint32x4_t tqkv__i_repeat_neon(const int8_t *p, int plane, int i)
{
    const int16_t *words = (const int16_t *)(const void *)p + i;
    (void)plane;
    return vreinterpretq_u32_s16(vcombine_s16(vld1_dup_s16(words), vld1_dup_s16(words + 1)));
}
TQKV__OP void tqkv__i_transpose_neon(const uint32x4_t *x, uint32x4_t *four)
{
    TQKV__UNROLL
    for (int half = 0; half < 2; half++) {
        const uint32x4_t a = half ? vzip2q_u32(x[0], x[2]) : vzip1q_u32(x[0], x[2]);
        const uint32x4_t b = half ? vzip2q_u32(x[1], x[3]) : vzip1q_u32(x[1], x[3]);
        four[2 * half] = vzip1q_u32(a, b);
        four[2 * half + 1] = vzip2q_u32(a, b);
    }
}
/* Four positions of a dimension, then of the next one */
TQKV__OP void tqkv__i_key_lanes_neon(const uint32x4_t *x, uint32x4_t *lanes)
{
    uint32x4_t four[4];
    tqkv__i_transpose_neon(x, four);
    const uint32_t columns[4] = {0x0c080400, 0x0d090501, 0x0e0a0602, 0x0f0b0703};
    const uint8x16_t at = vreinterpretq_u8_u32(vld1q_u32(columns));
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) {
        const int8x16_t ordered = vreinterpretq_s8_u8(vqtbl1q_u8(vreinterpretq_u8_u32(four[i]), at));
        lanes[2 * i] = vreinterpretq_u32_s16(vmovl_s8(vget_low_s8(ordered)));
        lanes[2 * i + 1] = vreinterpretq_u32_s16(vmovl_high_s8(ordered));
    }
}
/* Four dimensions of a position, then of the next one */
TQKV__OP void tqkv__i_value_lanes_neon(const uint32x4_t *x, uint32x4_t *lanes)
{
    const int8x16_t low = vreinterpretq_s8_u32(vzip1q_u32(x[0], x[1]));
    const int8x16_t high = vreinterpretq_s8_u32(vzip2q_u32(x[0], x[1]));
    lanes[0] = vreinterpretq_u32_s16(vmovl_s8(vget_low_s8(low)));
    lanes[1] = vreinterpretq_u32_s16(vmovl_high_s8(low));
    lanes[2] = vreinterpretq_u32_s16(vmovl_s8(vget_low_s8(high)));
    lanes[3] = vreinterpretq_u32_s16(vmovl_high_s8(high));
}
TQKV__OP uint32x4_t tqkv__sum_four_codes_neon(const uint32x4_t *x)
{
    return vpaddq_u32(vpaddq_u32(x[0], x[1]), vpaddq_u32(x[2], x[3]));
}
TQKV__OP float32x4_t tqkv__to_floats_neon(uint32x4_t x) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x)); }
TQKV__OP uint32x4_t tqkv__round_codes_neon(float32x4_t x) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(x)); }
TQKV__OP void tqkv__i_store_integers_neon(void *to, int i, int n, uint32x4_t x)
{
    (void)n;
    vst1_s16((int16_t *)to + i, vmovn_s32(vreinterpretq_s32_u32(x)));
}
TQKV__OP uint32x4_t tqkv__add_codes_neon(uint32x4_t x, uint32x4_t y) { return vaddq_u32(x, y); }
TQKV__OP uint32x4_t tqkv__set_codes_neon(int32_t x) { return vdupq_n_u32((uint32_t)x); }
TQKV__OP int32_t tqkv__sum_codes_neon(uint32x4_t x) { return vaddvq_s32(vreinterpretq_s32_u32(x)); }
TQKV__OP uint32_t tqkv__largest_code_neon(uint32x4_t x) { return vmaxvq_u32(x); }

#define TQKV__(name)        tqkv__##name##_neon
#define TQKV__I(name)       tqkv__i_##name##_neon
#define TQKV__INTEGER_LANES 4
#define TQKV__PRODUCTS      2
#define TQKV__CODE_OFFSET   0
#define TQKV__FEW_ROWS      4
#define TQKV__LANES_ROWS    8
#define TQKV__SUM_SIXTEENS  4
#include "tqkv.h"

/* -- NEON, with products of four bytes: DotProd. An integer is 256 high + low, both signed bytes. -- */

/* gcc inlines a function into another only if that has all features of its target. DotProd wants ARMv8.2 there, which
   all that come with one of the first four have. */
#ifdef __clang__
#define TQKV__TARGET __attribute__((target("dotprod")))
#elif defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC) || defined(__ARM_FEATURE_SVE) || \
    defined(__ARM_FEATURE_COMPLEX)
#define TQKV__ARM_BASE ""
#elif defined(__ARM_FEATURE_CRYPTO)
#define TQKV__ARM_BASE "arch=armv8.2-a+crypto"
#else
#define TQKV__ARM_BASE "arch=armv8.2-a"
#endif
#ifndef __clang__
#define TQKV__TARGET __attribute__((target(TQKV__ARM_BASE "+dotprod")))
#endif

typedef struct tqkv__i_bytes {
    uint32x4_t high, low;
} tqkv__i_sum_dotprod, tqkv__i_row_dotprod, tqkv__i_repeated_dotprod;
typedef uint32x4_t tqkv__i_lanes_dotprod;

/* sums + the products of each lane's four bytes. Compilers hide the intrinsic where the file is for an older target. */
TQKV__OP uint32x4_t tqkv__i_dot_bytes(uint32x4_t sums, uint32x4_t x, uint32x4_t y)
{
    __asm__("sdot\t%0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(x), "w"(y));
    return sums;
}
TQKV__OP tqkv__i_sum_dotprod tqkv__i_dot_lanes_dotprod(tqkv__i_sum_dotprod sums, uint32x4_t codes,
                                                       tqkv__i_row_dotprod row)
{
    sums.high = tqkv__i_dot_bytes(sums.high, codes, row.high);
    sums.low = tqkv__i_dot_bytes(sums.low, codes, row.low);
    return sums;
}
#define tqkv__i_dot_dotprod tqkv__i_dot_lanes_dotprod
TQKV__OP uint32x4_t tqkv__i_whole_lanes_dotprod(tqkv__i_sum_dotprod sums)
{
    return vaddq_u32(vshlq_n_u32(sums.high, 8), sums.low);
}
#define tqkv__i_whole_dotprod tqkv__i_whole_lanes_dotprod
/* The high bytes of n integers, then their low ones */
TQKV__OP void tqkv__i_store_integers_dotprod(void *to, int i, int n, uint32x4_t x)
{
    const int16x4_t words = vmovn_s32(vreinterpretq_s32_u32(x));
    const uint32x2_t bytes = vreinterpret_u32_s8(vmovn_s16(vcombine_s16(vrshr_n_s16(words, 8), words)));
    vst1_lane_u32((uint32_t *)(void *)((int8_t *)to + i), bytes, 0);
    vst1_lane_u32((uint32_t *)(void *)((int8_t *)to + n + i), bytes, 1);
}
TQKV__OP tqkv__i_row_dotprod tqkv__i_load_row_dotprod(const int8_t *p, int plane, int i)
{
    const tqkv__i_row_dotprod row = {vreinterpretq_u32_s8(vld1q_s8(p + i)),
                                     vreinterpretq_u32_s8(vld1q_s8(p + plane + i))};
    return row;
}
TQKV__OP tqkv__i_row_dotprod tqkv__i_repeat_dotprod(const int8_t *p, int plane, int i)
{
    const tqkv__i_row_dotprod row = {vld1q_dup_u32((const uint32_t *)(const void *)(p + i)),
                                     vld1q_dup_u32((const uint32_t *)(const void *)(p + plane + i))};
    return row;
}
#define tqkv__i_key_lanes_dotprod tqkv__i_transpose_neon
TQKV__OP void tqkv__i_value_lanes_dotprod(const uint32x4_t *units, uint32x4_t *x)
{
    const int8x16_t a = vreinterpretq_s8_u32(units[0]), b = vreinterpretq_s8_u32(units[1]),
                    c = vreinterpretq_s8_u32(units[2]), d = vreinterpretq_s8_u32(units[3]);
    const uint16x8_t ab = vreinterpretq_u16_s8(vzip1q_s8(a, b)), cd = vreinterpretq_u16_s8(vzip1q_s8(c, d));
    const uint16x8_t ab_high = vreinterpretq_u16_s8(vzip2q_s8(a, b)), cd_high = vreinterpretq_u16_s8(vzip2q_s8(c, d));
    x[0] = vreinterpretq_u32_u16(vzip1q_u16(ab, cd));
    x[1] = vreinterpretq_u32_u16(vzip2q_u16(ab, cd));
    x[2] = vreinterpretq_u32_u16(vzip1q_u16(ab_high, cd_high));
    x[3] = vreinterpretq_u32_u16(vzip2q_u16(ab_high, cd_high));
}

#define TQKV__(name)        tqkv__##name##_neon
#define TQKV__I(name)       tqkv__i_##name##_dotprod
#define TQKV__INTEGER_LANES 4
#define TQKV__PRODUCTS      4
#define TQKV__DECODED       1
#define TQKV__CODE_OFFSET   0
#define TQKV__FEW_ROWS      2
#define TQKV__LANES_ROWS    8
#define TQKV__SUM_SIXTEENS  2
#include "tqkv.h"

#if defined(__clang__) ? __clang_major__ >= 13 : __GNUC__ >= 10
#define TQKV__I8MM
/* -- NEON, with products of matrices of 2 by 8 bytes: I8MM. One is of two positions, or two dimensions of eight
   positions; the other is the high bytes of eight integers and their low ones, which lie side by side. Keys of few rows
   take DotProd. -- */

#ifdef __clang__
#define TQKV__TARGET __attribute__((target("dotprod,i8mm")))
#else
#define TQKV__TARGET __attribute__((target(TQKV__ARM_BASE "+dotprod+i8mm")))
#endif

typedef tqkv__i_sum_dotprod tqkv__i_sum_i8mm; /* of lanes: the first two, high and low in turns; the others */
typedef tqkv__i_row_dotprod tqkv__i_row_i8mm;
typedef uint32x4_t tqkv__i_repeated_i8mm;
typedef struct tqkv__i_lanes_i8mm {
    uint32x4_t first, last;
} tqkv__i_lanes_i8mm;

/* Returns sums + x times y transposed. */
TQKV__OP uint32x4_t tqkv__i_multiply_matrices(uint32x4_t sums, uint32x4_t x, uint32x4_t y)
{
    __asm__("smmla\t%0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(x), "w"(y));
    return sums;
}
TQKV__OP tqkv__i_sum_i8mm tqkv__i_dot_lanes_i8mm(tqkv__i_sum_i8mm sums, tqkv__i_lanes_i8mm x, uint32x4_t y)
{
    sums.high = tqkv__i_multiply_matrices(sums.high, x.first, y);
    sums.low = tqkv__i_multiply_matrices(sums.low, x.last, y);
    return sums;
}
TQKV__OP uint32x4_t tqkv__i_whole_lanes_i8mm(tqkv__i_sum_i8mm sums)
{
    return vaddq_u32(vshlq_n_u32(vuzp1q_u32(sums.high, sums.low), 8), vuzp2q_u32(sums.high, sums.low));
}
#define tqkv__i_store_integers_i8mm tqkv__i_store_integers_dotprod
#define tqkv__i_load_row_i8mm       tqkv__i_load_row_dotprod
#define tqkv__i_dot_i8mm            tqkv__i_dot_dotprod
#define tqkv__i_whole_i8mm          tqkv__i_whole_dotprod
TQKV__OP uint32x4_t tqkv__i_repeat_i8mm(const int8_t *p, int plane, int i)
{
    return vreinterpretq_u32_s8(vcombine_s8(vld1_s8(p + i), vld1_s8(p + plane + i)));
}
TQKV__OP void tqkv__i_key_lanes_i8mm(const uint32x4_t *units, tqkv__i_lanes_i8mm *x)
{
    uint64x2_t rows[4];
    TQKV__UNROLL
    for (int i = 0; i < 4; i++) rows[i] = vreinterpretq_u64_u32(units[i]);
    x[0].first = vreinterpretq_u32_u64(vzip1q_u64(rows[0], rows[1]));
    x[0].last = vreinterpretq_u32_u64(vzip1q_u64(rows[2], rows[3]));
    x[1].first = vreinterpretq_u32_u64(vzip2q_u64(rows[0], rows[1]));
    x[1].last = vreinterpretq_u32_u64(vzip2q_u64(rows[2], rows[3]));
}
/* Each round makes the highest bit of a register's number the lowest of a byte's. */
TQKV__OP void tqkv__i_value_lanes_i8mm(const uint32x4_t *units, tqkv__i_lanes_i8mm *x)
{
    int8x16_t from[8], to[8];
    TQKV__UNROLL
    for (int i = 0; i < 8; i++) to[i] = vreinterpretq_s8_u32(units[i]);
    TQKV__UNROLL
    for (int round = 0; round < 3; round++) {
        TQKV__UNROLL
        for (int i = 0; i < 8; i++) from[i] = to[i];
        TQKV__UNROLL
        for (int i = 0; i < 8; i++)
            to[i] = i % 2 ? vzip2q_s8(from[i / 2], from[i / 2 + 4]) : vzip1q_s8(from[i / 2], from[i / 2 + 4]);
    }
    TQKV__UNROLL
    for (int v = 0; v < 4; v++) {
        x[v].first = vreinterpretq_u32_s8(to[2 * v]);
        x[v].last = vreinterpretq_u32_s8(to[2 * v + 1]);
    }
}

#define TQKV__(name)        tqkv__##name##_neon
#define TQKV__I(name)       tqkv__i_##name##_i8mm
#define TQKV__INTEGER_LANES 4
#define TQKV__PRODUCTS      8
#define TQKV__DECODED       1
#define TQKV__CODE_OFFSET   0
#define TQKV__FEW_ROWS      2
#define TQKV__LANES_ROWS    4
#define TQKV__SUM_SIXTEENS  2
#include "tqkv.h"
#endif
#endif

#undef TQKV__NESTED
#ifdef TQKV__OPTIMISED
#undef TQKV__OPTIMISED
#pragma GCC pop_options
#endif

/* >>isa-code: which instruction set is in use */

/* Best first; the choice is among those that the processor has. */
static const tqkv__isa tqkv__isas[] = {
#ifdef TQKV__AVX512
    {"avx512", 16, &tqkv__codec_avx512, &tqkv__i_kernels_avx512},
#endif
#ifdef TQKV__AVX2
    {"avx2", 8, &tqkv__codec_avx2, &tqkv__i_kernels_avx2},
#endif
#ifdef TQKV__NEON
    {"neon", 4, &tqkv__codec_neon, NULL},
#endif
    {"scalar", 1, &tqkv__codec_scalar, &tqkv__kernels_scalar}};
#define TQKV__ISAS (sizeof tqkv__isas / sizeof tqkv__isas[0])

#ifdef TQKV__AVX2
/* Asks the processor and the system: __builtin_cpu_supports is the word of the compiler's runtime library, which clang
   for Windows lacks and in which zig answers 0. */
static bool tqkv__x86_present(bool avx512)
{
    const unsigned basic = bit_OSXSAVE | bit_FMA | bit_F16C, vectors = 0x06, wide_vectors = 0xe0;
    unsigned eax, ebx, ecx, edx, saved;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & basic) != basic) return false;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0)); /* the registers that the system saves */
    if ((saved & vectors) != vectors || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    if (!avx512) return (ebx & bit_AVX2) != 0;
#ifdef __APPLE__ /* from their first use on */
    saved |= wide_vectors;
#endif
    const unsigned b = bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    const unsigned c = bit_AVX512VBMI | bit_AVX512VNNI;
    return (saved & wide_vectors) == wide_vectors && (ebx & b) == b && (ecx & c) == c;
}
#endif

static bool tqkv__isa_present(const tqkv__isa *isa)
{
#ifdef TQKV__AVX2
    return isa && (isa->lanes == 1 || tqkv__x86_present(isa->lanes == 16));
#else
    return isa != NULL;
#endif
}

/* The library's only variable beside tqkv__products of NEON: set once, or by tqkv_isa_force */
static const tqkv__isa *tqkv__isa_chosen;

static const tqkv__isa *tqkv__isa_named(const char *name)
{
    for (size_t i = 0; i < TQKV__ISAS; i++)
        if (strcmp(name, tqkv__isas[i].name) == 0) return &tqkv__isas[i];
    return NULL;
}

static const tqkv__isa *tqkv__isa_now(void)
{
    const tqkv__isa *isa = __atomic_load_n(&tqkv__isa_chosen, __ATOMIC_ACQUIRE);
    if (isa) return isa;
    const char *wanted = getenv("TQKV_ISA");
    isa = wanted ? tqkv__isa_named(wanted) : NULL;
    if (wanted && !tqkv__isa_present(isa))
        TQKV_EXPLAIN(isa ? "TQKV_ISA: the processor lacks this instruction set; the best one that it has is in use"
                         : "TQKV_ISA: no instruction set of this build; the best one is in use");
    for (size_t i = 0; i < TQKV__ISAS && (!isa || !tqkv__isa_present(isa)); i++) isa = &tqkv__isas[i];
    const tqkv__isa *now = NULL; /* or what another thread has chosen in the meantime */
    const bool first =
        __atomic_compare_exchange_n(&tqkv__isa_chosen, &now, isa, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return first ? isa : now;
}

/* Returns the chosen set, or the next narrower one that has three vectors in a row of head_dim. A processor has the
   narrower ones, too: asking again takes microseconds in a virtual machine. */
static const tqkv__isa *tqkv__isa_for(int head_dim)
{
    const tqkv__isa *isa = tqkv__isa_now();
    for (size_t i = 0; i < TQKV__ISAS; i++)
        if (isa->lanes * 3 > head_dim && tqkv__isas[i].lanes < isa->lanes) isa = &tqkv__isas[i];
    return isa;
}

static const tqkv__isa *tqkv__narrower(const tqkv__isa *a, const tqkv__isa *b) { return a->lanes < b->lanes ? a : b; }

static const tqkv__codec *tqkv__codec_for(int head_dim) { return tqkv__isa_for(head_dim)->codec; }

#ifdef TQKV__NEON
static char tqkv__products; /* set once. 1: what every processor of a set has, 2: DotProd, 3: I8MM */

#ifdef __APPLE__
static bool tqkv__processor_has(const char *name)
{
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value != 0;
}
#endif

static int tqkv__find_products(void)
{
    bool bytes = false, matrices = false;
#if defined(__APPLE__)
    bytes = tqkv__processor_has("hw.optional.arm.FEAT_DotProd");
    matrices = tqkv__processor_has("hw.optional.arm.FEAT_I8MM");
#elif defined(__linux__)
    bytes = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#ifdef HWCAP2_I8MM
    matrices = (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#endif
#endif
#ifdef __ARM_FEATURE_DOTPROD
    bytes = true;
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
    matrices = true;
#endif
    return bytes ? matrices ? 3 : 2 : 1;
}

/* Returns the functions of attention by the best products of the processor, which is asked once. */
static const tqkv__kernels *tqkv__kernels_of_neon(void)
{
    char products = __atomic_load_n(&tqkv__products, __ATOMIC_RELAXED);
    if (!products) products = (char)tqkv__find_products();
    __atomic_store_n(&tqkv__products, products, __ATOMIC_RELAXED);
#ifdef TQKV__I8MM
    if (products > 2) return &tqkv__i_kernels_i8mm;
#endif
    return products > 1 ? &tqkv__i_kernels_dotprod : &tqkv__i_kernels_neon;
}
#endif

static const tqkv__kernels *tqkv__kernels_for(const tqkv__isa *isa)
{
#ifdef TQKV__NEON
    if (!isa->kernels) return tqkv__kernels_of_neon();
#endif
    return isa->kernels;
}

TQKV_API const char *tqkv_isa_name(void) { return tqkv__isa_now()->name; }

TQKV_API tqkv_result tqkv_isa_force(const char *name)
{
    const tqkv__isa *isa = name ? tqkv__isa_named(name) : NULL;
    if (name && !isa) return TQKV__INVALID("name: no instruction set");
    if (name && !tqkv__isa_present(isa)) return TQKV__REFUSE(UNSUPPORTED, "the processor lacks this instruction set");
    __atomic_store_n(&tqkv__isa_chosen, isa, __ATOMIC_RELEASE);
    return TQKV_OK;
}

/* >>attention-code: opening a tqkv_attention: every default resolved, every field checked */

/* Its offset is the alignment of a uint64_t in a struct: 4 on 32-bit x86, where it is 8 by itself. */
struct tqkv__mask_gap {
    char before;
    uint64_t mask;
};

static tqkv_result tqkv__check_tree_and_sinks(const tqkv_attention *a)
{
    if (a->tree && a->non_causal) return TQKV__INVALID("tree: not with non_causal");
    if (a->tree && (a->n_queries > 64 || (uintptr_t)a->tree % offsetof(struct tqkv__mask_gap, mask)))
        return TQKV__INVALID("tree: more than 64 queries, or not aligned as uint64_t");
    if ((uintptr_t)a->sinks % sizeof(float)) return TQKV__INVALID("sinks: not aligned as floats");
    for (int h = 0; a->sinks && h < a->n_heads; h++) {
        const float negated = -a->sinks[h]; /* -INFINITY is no sink */
        if (!tqkv__all_finite(&a->sinks[h], 1) && !(negated > 0.0f))
            return TQKV__REFUSE(NOT_FINITE, "a sink is NaN or +infinity");
    }
    return TQKV_OK;
}

static tqkv_result tqkv__take_tail(tqkv__attention *a)
{
    const tqkv__stream *keys = &a->keys, *tail = &a->tail;
    if (!a->call.tail) return TQKV_OK;
    const tqkv_result r = tqkv__stream_shape(a->call.tail, &a->tail);
    if (r != TQKV_OK) return r;
    if (tail->n_kv_heads != keys->n_kv_heads) return TQKV__INVALID("tail: n_kv_heads is not that of the keys");
    if (tail->capacity != keys->capacity || tail->ring != keys->ring)
        return TQKV__INVALID("tail: capacity or ring is not that of the keys");
    if (tail->pages != keys->pages || tail->n_pages != keys->n_pages || tail->page_size != keys->page_size)
        return TQKV__INVALID("tail: the page table is not that of the keys");
    a->key_dim += tail->head_dim;
    a->isa = tqkv__narrower(a->isa, tqkv__isa_for(tail->head_dim));
    return TQKV_OK;
}

/* Returns 1/sqrt(n), rounded by the bits of the double whatever the caller's mode. For sums of two sizes double is
   enough: no 1/sqrt(n) lies so near to the middle of two floats. */
static float tqkv__inverse_root(int n)
{
    double root = 1.0 / sqrt((double)n);
    uint64_t bits;
    if (tqkv__head_dim_known(n)) return tqkv__size_of(n)->inverse_root;
    memcpy(&bits, &root, sizeof bits);
    bits = (bits + (UINT64_C(1) << 28)) >> 29 << 29; /* a float has 29 bits less */
    memcpy(&root, &bits, sizeof root);
    return (float)root;
}

static tqkv_result tqkv__take_strides(tqkv__attention *a)
{
    tqkv_attention *call = &a->call;
    const int n = call->n_queries, n_heads = call->n_heads;
    call->query_strides = tqkv__strides_of(call->query_strides, n_heads, a->key_dim);
    call->output_strides = tqkv__strides_of(call->output_strides, n_heads, a->value_dim);
    const size_t q_type = tqkv__type_size(call->query_type), out_type = tqkv__type_size(call->output_type);
    if (!tqkv__rows_extent(call->query_strides, n, n_heads, a->key_dim, q_type, &a->q_size) ||
        !tqkv__rows_extent(call->output_strides, n, n_heads, a->value_dim, out_type, &a->out_size))
        return TQKV__INVALID("query_strides or output_strides: rows of more than SIZE_MAX bytes");
    if (tqkv__rows_distinct(call->output_strides, n, n_heads, a->value_dim)) return TQKV_OK;
    return TQKV__INVALID(TQKV__ROWS_SHARED);
}

static tqkv_result tqkv__check_options(const tqkv_attention *a)
{
    if (a->first.n < 0 || a->last.n < 0 || a->last.from < 0)
        return TQKV__INVALID("first.n, last.n or last.from is negative");
    if (!tqkv__all_finite(&a->scale, 1) || !tqkv__all_finite(&a->softcap, 1))
        return TQKV__INVALID("scale or softcap is NaN or infinite");
    if (!tqkv__basis_known(a->query_basis) || !tqkv__basis_known(a->output_basis))
        return TQKV__INVALID("query_basis or output_basis: no tqkv_basis");
    if (!tqkv__type_size(a->query_type) || !tqkv__type_size(a->output_type))
        return TQKV__REFUSE(UNSUPPORTED, TQKV__NO_TYPE);
    return TQKV_OK;
}

/* Resolves and checks everything except the stores' buffers and the resident range. */
static tqkv_result tqkv__attention_shape(const tqkv_attention *a, tqkv__attention *r)
{
    tqkv_result result;
    tqkv_attention *call = &r->call;
    memset(r, 0, offsetof(tqkv__attention, ends));
    if (!a) return TQKV__INVALID("the attention is NULL");
    if ((result = tqkv__stream_shape(a->keys, &r->keys)) != TQKV_OK) return result;
    if ((result = tqkv__stream_shape(a->values, &r->values)) != TQKV_OK) return result;
    *call = *a;
    r->key_dim = r->keys.head_dim;
    r->value_dim = r->values.head_dim;
    r->n_kv_heads = r->keys.n_kv_heads;
    r->reads[TQKV__KEYS] = r->reads[TQKV__VALUES] = true;
    r->reads[TQKV__TAIL] = a->tail != NULL;
    r->isa = tqkv__narrower(tqkv__isa_for(r->key_dim), tqkv__isa_for(r->value_dim));
    if ((result = tqkv__take_tail(r)) != TQKV_OK) return result;
    if (call->scale == 0.0f) call->scale = tqkv__inverse_root(r->key_dim);
    if (!(call->softcap > 0.0f)) call->softcap = 0.0f;
    if (!call->parallel.run) call->parallel.run = tqkv__run_serial;
    r->group = call->n_heads / r->n_kv_heads;
    r->rotate_queries = r->keys.rotated && a->query_basis == TQKV_ORIGINAL;
    r->unrotate_output = r->values.rotated && a->output_basis == TQKV_ORIGINAL;
    if (r->values.n_kv_heads != r->n_kv_heads) return TQKV__INVALID("keys and values differ in n_kv_heads");
    if (call->n_heads <= 0 || call->n_heads % r->n_kv_heads != 0)
        return TQKV__INVALID("n_heads: 0, or not a multiple of n_kv_heads");
    if (call->n_queries < 0 || call->window < 0) return TQKV__INVALID("n_queries or window is negative");
    if ((result = tqkv__check_options(a)) != TQKV_OK) return result;
    if (!tqkv__resolve_allocator(&call->allocator)) return TQKV__INVALID("allocator: one of alloc and free is missing");
    if (!tqkv__array_size(call->n_queries, call->n_heads, 1, 1, &r->n_rows) ||
        !tqkv__size_multiply(r->n_rows, (size_t)r->key_dim, &r->q_elements) || r->q_elements > SIZE_MAX / 64 ||
        !tqkv__size_multiply(r->n_rows, (size_t)r->value_dim, &r->out_elements) || r->out_elements > SIZE_MAX / 64 ||
        r->n_rows > (size_t)INT_MAX)
        return TQKV__INVALID("n_queries * n_heads * head_dim is too large");
    if ((result = tqkv__take_strides(r)) != TQKV_OK) return result;
    r->kernels = tqkv__kernels_for(r->isa);
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++)
        if (r->reads[i]) tqkv__fill_integers(TQKV__STREAM_AT(r, i));
    return tqkv__check_tree_and_sinks(call);
}

static tqkv_result tqkv__attention_range(const tqkv_attention *a, tqkv__attention *r)
{
    if (a->end < 0 || a->kv_len < 0) return TQKV__INVALID("end or kv_len is negative");
    const int64_t key_room = tqkv__room(&r->keys), value_room = tqkv__room(&r->values);
    const int64_t capacity = key_room < value_room ? key_room : value_room;
    const int64_t kv_len = a->kv_len ? a->kv_len : a->end < capacity ? a->end : capacity;
    if (kv_len > capacity || kv_len > a->end) return TQKV__REFUSE(OUT_OF_RANGE, "kv_len is above capacity or end");
    if ((!r->keys.ring && a->end > key_room) || (!r->values.ring && a->end > value_room))
        return TQKV__REFUSE(OUT_OF_RANGE, "end: beyond a linear store or a page table");
    r->first = a->end - kv_len;
    return TQKV_OK;
}

static bool tqkv__share_bytes(const tqkv__stream *a, const tqkv__stream *b)
{
    return tqkv__encoding_overlaps(a, b->codes, b->codes_size) || tqkv__encoding_overlaps(a, b->norms, b->norms_size);
}

/* Refuses streams that share bytes, but for keys and values that are one stream and for page tables over one pool.
   Finds whether keys and values are one. */
static tqkv_result tqkv__check_streams(tqkv__attention *a)
{
    const tqkv__stream *k = &a->keys, *v = &a->values;
    const bool alike = k->codes == v->codes && (k->norms == v->norms || !k->norms_size) && k->format == v->format &&
                       k->head_dim == v->head_dim && k->n_kv_heads == v->n_kv_heads && k->capacity == v->capacity &&
                       k->rotated == v->rotated && k->block_scale == v->block_scale; /* rows in the same bytes */
    const bool one_table = k->pages == v->pages && k->n_pages == v->n_pages;
    a->shared = alike && one_table && k->page_size == v->page_size && k->ring == v->ring && k->center == v->center &&
                k->channel_scale == v->channel_scale;
    if (a->call.tail && (tqkv__share_bytes(k, &a->tail) || tqkv__share_bytes(v, &a->tail)))
        return TQKV__INVALID("tail: overlaps the keys or the values");
    if (a->shared || (alike && k->pages && v->pages && !one_table) || !tqkv__share_bytes(k, v)) return TQKV_OK;
    return TQKV__INVALID("keys and values share bytes, but are not described in the same way");
}

/* Returns where a query's newest positions begin. One whose own position does not matter stands at the end. */
static int64_t tqkv__newest_of(const tqkv_attention *call, int query)
{
    const bool at_end = call->non_causal && !call->window;
    const int64_t back = (int64_t)call->last.n + (at_end ? 0 : call->n_queries - 1 - query);
    const int64_t from = back < 0 ? call->end : call->end - back;
    return from > call->last.from ? from : call->last.from;
}

/* Whether keys or values are kept besides: TQKV__FIRST_KEYS, or TQKV__LAST_KEYS. */
static bool tqkv__has_end(const tqkv__attention *a, int keys) { return a->reads[keys] || a->reads[keys + 1]; }

/* Returns the first position that a query reads from the halves of the newest, 0 where these are codes. */
static int64_t tqkv__exact_at(const tqkv__attention *a, int query)
{
    return tqkv__has_end(a, TQKV__LAST_KEYS) ? tqkv__newest_of(&a->call, query) : 0;
}

/* Returns the oldest position that some query reads from the halves of the newest. */
static int64_t tqkv__exact_oldest(const tqkv_attention *call, int64_t first)
{
    const int64_t newest = tqkv__newest_of(call, 0), from = newest > first ? newest : first;
    return from < call->end ? from : call->end;
}

/* Checks the store of the positions that are kept of a stream besides: halves, or of a tail rows as they are. */
static tqkv_result tqkv__check_end(const tqkv__attention *a, int i, int64_t low, int64_t high)
{
    const int side = tqkv__stream_kinds[i].side;
    const tqkv__stream *s = TQKV__STREAM_AT(a, i), *codes = TQKV__STREAM_AT(a, side);
    if (side == TQKV__TAIL) {
        if (s->format != codes->format || s->rotated != codes->rotated || s->block_scale != codes->block_scale)
            return TQKV__INVALID("first.tail: a store of another format or basis than the tail");
        if (s->ring || a->call.first.n > tqkv__room(s))
            return TQKV__REFUSE(OUT_OF_RANGE, "first.tail: a store that does not hold so many positions");
    } else {
        if (s->kind != TQKV__HALF || s->rotated != codes->rotated)
            return TQKV__INVALID("first, last: a store that is not F16, or rotated otherwise than the codes");
        if (s->ring ? a->call.end - low > s->capacity : high > tqkv__room(s))
            return TQKV__REFUSE(OUT_OF_RANGE, "first, last: a store that does not hold so many positions");
    }
    if (s->head_dim != codes->head_dim || s->n_kv_heads != codes->n_kv_heads)
        return TQKV__INVALID("first, last: a store of other head_dim or n_kv_heads than its stream");
    return tqkv__check_channels_match(s, codes);
}

/* Takes what is kept of the first and of the newest positions, from stores opened by `open`: of codes, and of all
   streams if first positions are no longer resident and all have them. Those of a ring are added apart from the start,
   so that no bit depends on when they go. */
static tqkv_result tqkv__take_ends(tqkv__attention *a, tqkv_result (*open)(const tqkv_store *, tqkv__stream *))
{
    const tqkv_attention *call = &a->call;
    const tqkv_store *const stores[TQKV__STREAMS - TQKV__FIRST_KEYS] = {
        call->first.keys, a->shared ? call->first.keys : call->first.values, call->tail ? call->first.tail : NULL,
        call->last.keys, a->shared ? call->last.keys : call->last.values};
    const int64_t below = call->first.n < call->end ? call->first.n : call->end;
    const bool kept = below && (a->first || a->keys.ring) && stores[0] && stores[1] && (!call->tail || stores[2]);
    for (int i = TQKV__FIRST_KEYS; i < TQKV__STREAMS; i++) {
        const bool last = tqkv__stream_kinds[i].end == TQKV__LAST_END, tail = i == TQKV__FIRST_TAIL;
        const bool halves = !tail && TQKV__STREAM_AT(a, tqkv__stream_kinds[i].side)->kind != TQKV__HALF;
        const tqkv_store *store = stores[i - TQKV__FIRST_KEYS];
        if (!store || (last ? !halves || !call->last.n : !below || !(halves || kept))) continue;
        tqkv_result r = open(store, TQKV__STREAM_AT(a, i));
        if (r == TQKV_OK && last) r = tqkv__check_end(a, i, tqkv__exact_oldest(call, a->first), call->end);
        if (r == TQKV_OK && !last) r = tqkv__check_end(a, i, 0, below);
        if (r != TQKV_OK) return r;
        if (tail) tqkv__fill_integers(TQKV__STREAM_AT(a, i));
        a->reads[i] = true;
        if (!last) a->exact_below = below;
    }
    if (kept) a->kept = a->keys.ring || below < a->first ? below : a->first;
    return TQKV_OK;
}

/* Positions that are read from the same streams. A query reads what is no longer resident, then [0, b), then [b, end),
   where b is tqkv__exact_at. Each query of an item looks only at its own positions of a pass, so its sums have the same
   order alone and in a batch. */
enum { TQKV__GONE, TQKV__OLDER, TQKV__NEWEST, TQKV__PASSES };
typedef struct tqkv__region {
    int number; /* tells regions apart: 2 * pass, plus 1 for the first positions */
    const tqkv__stream *streams[TQKV__CACHE_STREAMS]; /* keys, values, and a tail or NULL */
    int64_t end;                                      /* the first position behind them */
} tqkv__region;

static tqkv__region tqkv__region_at(const tqkv__attention *a, int64_t position, int pass)
{
    tqkv__region region;
    const bool first = position < a->exact_below;
    for (int side = 0; side < TQKV__CACHE_STREAMS; side++) {
        int i = side;
        if (side == TQKV__TAIL)
            i = pass == TQKV__GONE ? TQKV__FIRST_TAIL : side;
        else if (first && a->reads[TQKV__FIRST_KEYS + side])
            i = TQKV__FIRST_KEYS + side;
        else if (pass == TQKV__NEWEST && a->reads[TQKV__LAST_KEYS + side])
            i = TQKV__LAST_KEYS + side;
        region.streams[side] = tqkv__stream_read(a, i);
    }
    region.number = 2 * pass + first;
    region.end = first ? a->exact_below : INT64_MAX;
    return region;
}

/* Returns the resident positions of a range that a query, or one behind it, may read from stream i. */
static tqkv__range tqkv__positions_read(const tqkv__attention *a, int i, tqkv__range range, int query)
{
    const bool first = tqkv__stream_kinds[i].end == TQKV__FIRST_END, last = tqkv__stream_kinds[i].end == TQKV__LAST_END;
    if (last && tqkv__exact_at(a, query) > range.from) range.from = tqkv__exact_at(a, query);
    if (first && a->exact_below < range.to) range.to = a->exact_below;
    if (i == TQKV__FIRST_TAIL) range.to = range.from;
    return range;
}

static const int32_t *tqkv__list_row(const tqkv__attention *a, int query, int kv_head)
{
    const size_t heads = (size_t)a->call.list.heads, head = heads > 1 ? (size_t)kv_head : 0;
    return a->call.list.rows + ((size_t)query * heads + head) * (size_t)a->call.list.length;
}

static int tqkv__list_shift(int block)
{
    for (int shift = 0; shift <= 7; shift++)
        if (block == 1 << shift && (0xd5 >> shift & 1)) return shift; /* 1, 4, 16, 64, 128 */
    return -1;
}

static tqkv_result tqkv__list_shape(tqkv__attention *a)
{
    tqkv_attention *call = &a->call;
    size_t size;
    if (!call->list.rows) return TQKV_OK;
    if (!call->list.heads) call->list.heads = 1;
    if (call->list.length < 0 || call->list.newest < 0) return TQKV__INVALID("list: length or newest is negative");
    if (call->list.heads != 1 && call->list.heads != a->n_kv_heads)
        return TQKV__INVALID("list.heads: neither 1 nor n_kv_heads");
    if (tqkv__list_shift(call->list.block) < 0) return TQKV__INVALID("list.block: none of 1, 4, 16, 64 and 128");
    if (!tqkv__array_size(call->n_queries, call->list.heads, call->list.length, sizeof *call->list.rows, &size))
        return TQKV__INVALID("a list of more than SIZE_MAX bytes");
    return TQKV_OK;
}

static tqkv_result tqkv__check_list(tqkv__attention *a)
{
    const tqkv_attention *call = &a->call;
    const tqkv_result r = tqkv__list_shape(a);
    if (!call->list.rows || r != TQKV_OK) return r;
    if (!tqkv__aligned_at(call->list.rows, sizeof *call->list.rows))
        return TQKV__INVALID("list: not aligned as int32_t");
    for (int64_t i = 0; i < (int64_t)call->n_queries * call->list.heads; i++) {
        const int32_t *row = call->list.rows + i * call->list.length;
        int32_t before = -1;
        for (int j = 0; j < call->list.length && row[j] != -1; before = row[j++])
            if (row[j] <= before) return TQKV__INVALID("list: a row is not ascending, or has a negative number but -1");
    }
    return TQKV_OK;
}

/* Whether a query's list, or its newest positions, have some of those that are gone. */
static bool tqkv__list_meets(const tqkv__attention *a, int query, int kv_head, tqkv__range gone)
{
    const int32_t *row = tqkv__list_row(a, query, kv_head);
    const int shift = tqkv__list_shift(a->call.list.block);
    const int64_t position = a->call.end - a->call.n_queries + query;
    const int64_t resident = (a->call.non_causal ? a->call.end : position + 1) - a->first;
    for (int i = 0; i < a->call.list.length && row[i] >= 0; i++)
        if (((int64_t)row[i] + 1) << shift > gone.from && (int64_t)row[i] << shift < gone.to) return true;
    return a->call.list.newest > resident;
}

/* Refuses queries whose window was longer than what is there. What a list leaves out, nobody misses. */
static tqkv_result tqkv__check_window(const tqkv__attention *a)
{
    const tqkv_attention *call = &a->call;
    if (!call->window || !call->whole_window) return TQKV_OK;
    for (int i = 0; i < call->n_queries; i++) {
        const int64_t oldest = call->end - call->n_queries + i - call->window + 1;
        const tqkv__range gone = {oldest > a->kept ? oldest : a->kept, a->first}; /* of the query's window */
        bool missed = gone.from < gone.to && !call->list.rows;
        for (int h = 0; h < call->list.heads && call->list.rows && gone.from < gone.to && !missed; h++)
            missed = tqkv__list_meets(a, i, h, gone);
        if (missed) return TQKV__REFUSE(OUT_OF_RANGE, "a query's window begins before the oldest resident position");
        if (gone.from >= gone.to) break; /* nor do those behind it */
    }
    return TQKV_OK;
}

static tqkv_result tqkv__attention_streams(const tqkv_attention *a, tqkv__attention *r)
{
    tqkv_result result = tqkv__attention_shape(a, r);
    if (result == TQKV_OK) result = tqkv__stream_memory(a->keys, &r->keys);
    if (result == TQKV_OK) result = tqkv__stream_memory(a->values, &r->values);
    if (result == TQKV_OK && a->tail) result = tqkv__stream_memory(a->tail, &r->tail);
    if (result == TQKV_OK) result = tqkv__check_streams(r);
    if (result == TQKV_OK) result = tqkv__attention_range(a, r);
    return result == TQKV_OK ? tqkv__check_list(r) : result;
}

static tqkv_result tqkv__attention_ends(tqkv__attention *a)
{
    tqkv_result r = TQKV_OK;
    if (a->call.first.n || a->call.last.n) r = tqkv__take_ends(a, tqkv__stream_open);
    for (int i = 0; i < TQKV__STREAMS; i++) {
        const tqkv__stream *s = tqkv__stream_read(a, i);
        a->small_pages = a->small_pages || (s && s->page_size % TQKV__TILE);
        a->odd_rings = a->odd_rings || (s && s->ring && s->capacity % TQKV__TILE);
    }
    return r == TQKV_OK ? tqkv__check_window(a) : r;
}

static tqkv_result tqkv__attention_open(const tqkv_attention *a, tqkv__attention *r)
{
    const tqkv_result result = tqkv__attention_streams(a, r);
    return result == TQKV_OK ? tqkv__attention_ends(r) : result;
}

/* >>visible: which positions a query sees: windows, trees, lists */

static tqkv__range tqkv__visible(const tqkv__attention *a, int query, tqkv__range range)
{
    const int64_t position = a->call.end - a->call.n_queries + query;
    const int64_t ahead = !a->call.non_causal ? 1 : a->call.window ? a->call.window : INT64_MAX;
    const int64_t oldest = a->call.window ? position - a->call.window + 1 : range.from, end = range.to;
    if (end - position > ahead) range.to = position + ahead;
    if (oldest > range.from) range.from = oldest;
    if (range.from > end) range.from = end;
    if (range.to < range.from) range.to = range.from;
    return range;
}

static tqkv__range tqkv__visible_to(const tqkv__attention *a, int first, int last, tqkv__range range)
{
    const tqkv__range seen = {tqkv__visible(a, first, range).from, tqkv__visible(a, last, range).to};
    return seen;
}

static bool tqkv__tree_has(const tqkv__attention *a, int j)
{
    for (int i = j; i < a->call.n_queries; i++)
        if (a->call.tree[i] >> j & 1 && (!a->call.window || i - j < a->call.window)) return true;
    return false;
}

/* What a query sees of a context by its list: the blocks entries[0 .. n_before), then all blocks from `recent` on. The
   positions of these blocks, visible or not, have the ranks base, base + 1 ..., as positions without a list. The first
   visible block has its positions as ranks: a list of all blocks changes no bit. */
typedef struct tqkv__list {
    const int32_t *entries; /* from the first visible block on */
    int shift;              /* a block is 1 << shift positions */
    int64_t n_before, recent;
    int64_t recent_from; /* positions of block `recent` before this one are not seen; 0: all are */
    int64_t base;
    tqkv__range seen; /* ranks */
    /* Of the positions that are added apart those in the blocks row[0 .. n_row), and those from kept_from on.
       They have no ranks. */
    const int32_t *row;
    int64_t n_row, kept_from;
} tqkv__list;

/* Returns the number of the first of n ascending entries that is not below `block`. */
static int64_t tqkv__entry_at(const int32_t *entries, int64_t n, int64_t block)
{
    int64_t low = 0;
    while (low < n) {
        const int64_t middle = low + (n - low) / 2;
        if (entries[middle] < block)
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

static int64_t tqkv__rank_of(const tqkv__list *l, int64_t position)
{
    const int64_t block = position >> l->shift, inside = position & (((int64_t)1 << l->shift) - 1);
    if (block >= l->recent) return l->base + ((l->n_before + block - l->recent) << l->shift) + inside;
    const int64_t at = tqkv__entry_at(l->entries, l->n_before, block);
    return l->base + (at << l->shift) + (at < l->n_before && l->entries[at] == block ? inside : 0);
}

/* Returns the position of a rank; without a list it is the rank. */
static int64_t tqkv__position_of(const tqkv__list *l, int64_t rank)
{
    if (!l) return rank;
    const int64_t at = (rank - l->base) >> l->shift;
    const int64_t block = at < l->n_before ? l->entries[at] : l->recent + at - l->n_before;
    return (block << l->shift) + (rank & (((int64_t)1 << l->shift) - 1));
}

static bool tqkv__tree_hides(const tqkv__attention *a, int query, int64_t position)
{
    const int64_t j = position - (a->call.end - a->call.n_queries);
    return a->call.tree && j >= 0 && !(a->call.tree[query] >> j & 1);
}

/* Returns where the newest `left` positions of a range begin that a query sees; takes their number from `left`. */
static int64_t tqkv__newest_from(const tqkv__attention *a, int query, tqkv__range range, int *left)
{
    while (a->call.tree && *left > 0 && range.to > range.from && range.to > a->call.end - a->call.n_queries)
        *left -= !tqkv__tree_hides(a, query, --range.to);
    const int n = range.to - range.from < *left ? (int)(range.to - range.from) : *left;
    *left -= n;
    return range.to - n;
}

static tqkv__list tqkv__open_list(const tqkv__attention *a, int query, int kv_head, tqkv__range range)
{
    tqkv__list l;
    const tqkv__range resident = {a->first > a->kept ? a->first : a->kept, a->call.end},
                      all = tqkv__visible(a, query, resident), kept = {0, a->kept};
    int newest = a->call.list.newest;
    l.entries = l.row = tqkv__list_row(a, query, kv_head);
    l.shift = tqkv__list_shift(a->call.list.block);
    int64_t n = 0;
    while (n < a->call.list.length && l.row[n] >= 0) n++;
    l.n_row = n;
    const int64_t gone = tqkv__entry_at(l.entries, n, all.from >> l.shift);
    l.entries += gone;
    n -= gone;
    l.base = all.from >> l.shift << l.shift;
    const int64_t newest_from = tqkv__newest_from(a, query, all, &newest), inside = ((int64_t)1 << l.shift) - 1;
    l.kept_from = tqkv__newest_from(a, query, tqkv__visible(a, query, kept), &newest);
    /* Without newest positions `recent` is the first block behind all that the query sees. */
    l.recent = newest_from < all.to ? newest_from >> l.shift : (all.to >> l.shift) + ((all.to & inside) > 0);
    l.n_before = tqkv__entry_at(l.entries, n, l.recent);
    const bool listed = l.n_before < n && l.entries[l.n_before] == l.recent; /* then all of it is seen */
    l.recent_from = newest_from < all.to && !listed ? newest_from : 0;
    range = tqkv__visible(a, query, range);
    l.seen.from = tqkv__rank_of(&l, range.from);
    l.seen.to = tqkv__rank_of(&l, range.to);
    return l;
}

/* Returns as bits those of the ranks [rank, rank + n), n <= 64, whose positions a query does not see. */
static uint64_t tqkv__hidden_ranks(const tqkv__attention *a, int query, const tqkv__list *l, int64_t rank, int n)
{
    uint64_t hidden = 0;
    if (!l) return 0; /* see tqkv__find_spans */
    const int64_t last = tqkv__position_of(l, rank + n - 1);
    const bool tree = a->call.tree && last >= a->call.end - a->call.n_queries;
    if (!tree && (l->recent_from == 0 || rank + n <= l->base + (l->n_before << l->shift))) return 0;
    for (int j = 0; j < n; j++) {
        const int64_t position = tqkv__position_of(l, rank + j);
        const bool before = position < l->recent_from && position >> l->shift >= l->recent;
        if (before || tqkv__tree_hides(a, query, position)) hidden |= (uint64_t)1 << j;
    }
    return hidden;
}

static tqkv__range tqkv__listed_to(const tqkv__attention *a, tqkv__range range)
{
    tqkv__range all = {INT64_MAX, 0};
    for (int i = 0; i < a->call.n_queries; i++)
        for (int h = 0; h < a->call.list.heads; h++) {
            const tqkv__range seen = tqkv__open_list(a, i, h, range).seen;
            if (seen.from < all.from) all.from = seen.from;
            if (seen.to > all.to) all.to = seen.to;
        }
    if (all.from > all.to) all.from = all.to;
    return all;
}

static tqkv_result tqkv__check_listed(const tqkv__attention *a, int i, tqkv__range range, int query,
                                      const tqkv__list *l)
{
    const tqkv__stream *s = tqkv__stream_read(a, i);
    tqkv_result r = TQKV_OK;
    if (!s || !s->pages) return r;
    range = tqkv__positions_read(a, i, range, query);
    for (int64_t rank = l->seen.from; r == TQKV_OK && rank < l->seen.to; rank++) {
        const int64_t position = tqkv__position_of(l, rank);
        if (position < range.from || position >= range.to || tqkv__hidden_ranks(a, query, l, rank, 1)) continue;
        r = tqkv__check_pages(s, position, position + 1, 0);
        range.from = (position / s->page_size + 1) * s->page_size; /* its page has been checked */
    }
    return r;
}

static tqkv_result tqkv__check_lists_seen(const tqkv__attention *a, tqkv__range range)
{
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < a->call.n_queries; i++)
        for (int h = 0; r == TQKV_OK && h < a->call.list.heads; h++) {
            const tqkv__list l = tqkv__open_list(a, i, h, range);
            for (int j = 0; r == TQKV_OK && j < TQKV__STREAMS; j++) r = tqkv__check_listed(a, j, range, i, &l);
        }
    return r;
}

static tqkv_result tqkv__check_entries(const tqkv__attention *a, int64_t first, int64_t end)
{
    tqkv_result r = TQKV_OK;
    for (int i = 0; r == TQKV_OK && i < TQKV__STREAMS; i++) {
        const tqkv__range all = {first, end}, range = tqkv__positions_read(a, i, all, 0);
        if (tqkv__stream_read(a, i)) r = tqkv__check_pages(tqkv__stream_read(a, i), range.from, range.to, 0);
    }
    return r;
}

static tqkv_result tqkv__check_seen(const tqkv__attention *a, tqkv__range range)
{
    const int64_t first = a->call.end - a->call.n_queries; /* of the tree */
    const tqkv__range all_kept = {0, a->kept}, kept = tqkv__visible_to(a, 0, a->call.n_queries - 1, all_kept);
    tqkv_result r = TQKV_OK;
    for (int i = TQKV__FIRST_KEYS; r == TQKV_OK && a->kept && i <= TQKV__FIRST_TAIL; i++)
        if (a->reads[i]) r = tqkv__check_pages(TQKV__STREAM_AT(a, i), kept.from, kept.to, 0);
    if (r == TQKV_OK && a->call.list.rows) r = tqkv__check_lists_seen(a, range);
    if (r != TQKV_OK || a->call.list.rows) return r;
    const tqkv__range seen = tqkv__visible_to(a, 0, a->call.n_queries - 1, range);
    const int64_t base = a->call.tree && first < seen.to ? first : seen.to;
    r = tqkv__check_entries(a, seen.from, base);
    for (int64_t at = base < seen.from ? seen.from : base; r == TQKV_OK && at < seen.to; at++)
        if (tqkv__tree_has(a, (int)(at - first))) r = tqkv__check_entries(a, at, at + 1);
    return r;
}

/* >>tile: tiles, and the sums of a tile, of a piece and of a stretch */

static int tqkv__clamp(int64_t x, int low, int high) { return x < low ? low : x > high ? high : (int)x; }

/* Whether a ring ends within n positions. */
static bool tqkv__wraps(const tqkv__region *region, int64_t position, int64_t n)
{
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv__stream *s = region->streams[i];
        if (s && s->ring && tqkv__slots_left(s, position) < n) return true;
    }
    return false;
}

/* Returns the length of a tile, which is contiguous in all its streams, or gathered. It ends where a large page ends,
   or another region begins, and at multiples of TQKV__TILE; its scores are at the position modulo TQKV__TILE. So a
   query's sums are the same bits alone, in a batch, and in any store, and prefill and decode do not drift apart. */
static int tqkv__tile_length(const tqkv__region *region, int64_t position, int64_t end)
{
    const int64_t aligned = TQKV__TILE - position % TQKV__TILE, border = region->end - position;
    int64_t n = end - position < aligned ? end - position : aligned;
    if (n > border) n = border;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv__stream *s = region->streams[i];
        if (!s || s->page_size % TQKV__TILE || s->ring) continue; /* rows are gathered there if need be */
        if (n > tqkv__slots_left(s, position)) n = tqkv__slots_left(s, position);
    }
    return (int)n;
}

/* Where the ranks [rank, rank + n) of a tile lie. */
typedef struct tqkv__ranks {
    int64_t rank;
    int n;
    bool together;   /* in all streams one row after the other */
    uint64_t hidden; /* ranks that the query does not see, as bits */
    tqkv__region region;
    int32_t slot_lists[TQKV__CACHE_STREAMS][TQKV__TILE]; /* -1: hidden, or no page */
} tqkv__ranks;

/* A tile in progress: n positions from `position` on. Its scores, later weights, begin at scores[row][begin]. */
typedef struct tqkv__tile {
    int64_t position;
    int n, begin;
    tqkv__region region;
    tqkv__segment segments[TQKV__CACHE_STREAMS];
    const tqkv__ranks *ranks;       /* of a list or of gathered rows, or NULL */
    const tqkv__attention *streams; /* that hold it: the caller's, or gathered ones */
    int kv_head;                    /* there */
    bool whole;                     /* every row sees all of it */
    tqkv__span spans[TQKV__CHUNK_ROWS];
    TQKV__ALIGNED float scores[(TQKV__CHUNK_ROWS + 1) * TQKV__TILE]; /* room for whole vectors at a tile's end */
    TQKV__ALIGNED float scaled[TQKV__CHUNK_ROWS * TQKV__TILE];       /* for value_tile */
} tqkv__tile;

/* Finds the slots of a tile of n positions, and where the next tile of [.., end) lies, for the prefetch. */
static void tqkv__open_segment(const tqkv__stream *s, int64_t position, int n, int64_t end, tqkv__segment *segment)
{
    const int64_t next = position + n;
    segment->slot = tqkv__slot(s, position);
    segment->n = n;
    segment->ahead = TQKV__TILE;
    if (!s->pages || next >= end || next % s->page_size) return;
    const int32_t page = s->pages[next / s->page_size]; /* not checked if a tree hides it */
    if (page >= 0 && page < s->capacity / s->page_size) segment->ahead = page * s->page_size - segment->slot;
}

/* Prefetches a line of each 4 KiB of the next tile, and its norms: the loops prefetch the rest, but late where the
   memory page is not known yet. Short rows that go on behind this tile need none. */
static void tqkv__touch_next(const tqkv__stream *s, int kv_head, const tqkv__segment *segment)
{
    const size_t size = TQKV__TILE * s->row_bytes, norms_size = (size_t)(TQKV__TILE * s->norms_per_row) * sizeof(float);
    const uint8_t *codes =
        tqkv__codes_at(s, kv_head, segment->slot) + (ptrdiff_t)segment->ahead * (ptrdiff_t)s->row_bytes;
    if (segment->ahead != TQKV__TILE || s->row_bytes >= 128) {
        for (size_t i = 0; i < size; i += 4096) tqkv__prefetch(TQKV__L1, codes + i, 1);
        tqkv__prefetch(TQKV__L1, codes + size - 1, 1);
    }
    if (!norms_size) return;
    const float *norms = tqkv__norms_at(s, kv_head, segment->slot) + (ptrdiff_t)segment->ahead * s->norms_per_row;
    tqkv__prefetch(TQKV__L1, (const uint8_t *)norms, norms_size + 63); /* they may begin within a line */
}

/* Whether no value of a segment is infinite or NaN, so that a weight of 0 adds nothing. */
static bool tqkv__segment_finite(const tqkv__attention *a, const tqkv__stream *s, int kv_head,
                                 const tqkv__segment *segment)
{
    const size_t n = (size_t)segment->n;
    if (!tqkv__in_floats(s)) return true;
    if (s->kind == TQKV__HALF)
        return a->isa->codec->rows_finite(TQKV_TYPE_F16, tqkv__codes_at(s, kv_head, segment->slot),
                                          n * (size_t)s->head_dim);
    const float *norms = tqkv__norms_at(s, kv_head, segment->slot);
    for (size_t i = 0; i < n * (size_t)s->norms_per_row; i++) {
        const float most = tqkv__factor(s, norms[i]) * s->codebook[255];
        if (!tqkv__all_finite(&most, 1)) return false;
    }
    return true;
}

/* Does what value_tile does, safe for floats: where a tile holds NaN or infinity and some row does not see all of it,
   each position is added alone, to the rows that see it. */
static void tqkv__add_values(tqkv__tile *tile, int n_rows, float *out)
{
    const tqkv__attention *a = tile->streams;
    const tqkv__stream *s = tile->region.streams[TQKV__VALUES];
    const tqkv__segment *segment = &tile->segments[TQKV__VALUES];
    const int kv_head = tile->kv_head;
    const float *weights = tile->scores + tile->begin;
    if (tile->whole || tqkv__segment_finite(a, s, kv_head, segment)) {
        a->kernels->value_tile(s, kv_head, segment, weights, n_rows, tile->scaled, out);
        return;
    }
    for (int row = 0; row < n_rows; row++)
        for (int j = 0; j < segment->n; j++) {
            const tqkv__segment one = {segment->slot + j, 1, segment->ahead};
            float alone[TQKV__TILE] = {0};
            alone[0] = weights[row * TQKV__TILE + j];
            if (!tqkv__span_has(&tile->spans[row], tile->begin + j)) continue;
            a->kernels->value_tile(s, kv_head, &one, alone, 1, tile->scaled, out + (size_t)row * (size_t)s->head_dim);
        }
}

static uint64_t tqkv__bits_below(int n) { return n < 64 ? ((uint64_t)1 << n) - 1 : UINT64_MAX; }

static tqkv__span tqkv__span_of(const tqkv__attention *a, int query, const tqkv__tile *tile, tqkv__range range)
{
    const tqkv__range seen = tqkv__visible(a, query, range);
    tqkv__span span = {tile->begin + tqkv__clamp(seen.from - tile->position, 0, tile->n),
                       tile->begin + tqkv__clamp(seen.to - tile->position, 0, tile->n), 0};
    if (!a->call.tree) return span;
    const uint64_t hidden = ~a->call.tree[query];
    const int64_t shift = a->call.end - a->call.n_queries - (tile->position - tile->begin); /* of bit 0 */
    const uint64_t inside = tqkv__bits_below(span.to) & ~tqkv__bits_below(span.from);
    if (shift >= 0 && shift < 64) span.hidden = hidden << shift & inside;
    if (shift < 0 && shift > -64) span.hidden = hidden >> -shift & inside;
    if (span.hidden == inside) span.to = span.from;
    return span;
}

/* Query rows of one KV head that share decoded tiles. */
typedef struct tqkv__item {
    int kv_head, first_row, n_rows;
} tqkv__item;

/* Adds the slice (source, source_max, source_sum) of one row to (out, max, sum). */
static TQKV__NOINLINE void tqkv__merge_row(int value_dim, float *out, float *max, float *sum, const float *source,
                                           float source_max, float source_sum)
{
    if (source_sum == 0.0f) return;
    const float largest = source_max > *max ? source_max : *max;
    const float keep = *sum == 0.0f ? 0.0f : tqkv__exp(TQKV__AS_FLOAT(*max - largest));
    const float add = tqkv__exp(TQKV__AS_FLOAT(source_max - largest));
    for (int d = 0; d < value_dim; d++) out[d] = tqkv__sum_of_products(out[d], keep, source[d], add);
    *sum = tqkv__sum_of_products(*sum, keep, source_sum, add);
    *max = largest;
}

static void tqkv__clear_sums(const tqkv__sums *sums, size_t n_rows, int value_dim)
{
    memset(sums->out, 0, n_rows * (size_t)value_dim * sizeof(float));
    memset(sums->sum, 0, n_rows * sizeof(float));
    for (size_t i = 0; i < n_rows; i++) sums->max[i] = -INFINITY;
}

static TQKV__NOINLINE void tqkv__merge_sums(const tqkv__sums *into, const tqkv__sums *from, size_t n_rows,
                                            int value_dim)
{
    for (size_t i = 0; i < n_rows; i++)
        tqkv__merge_row(value_dim, into->out + i * (size_t)value_dim, &into->max[i], &into->sum[i],
                        from->out + i * (size_t)value_dim, from->max[i], from->sum[i]);
}

/* The context is cut into stretches at multiples of 2048 positions, and these into pieces, each with its own softmax
   and float sums, merged in order: the error does not grow with the context, and a query's bits depend only on its
   positions. */
#define TQKV__STRETCH 2048
#define TQKV__PIECE   256

static bool tqkv__has_exact_keys(const tqkv__attention *a)
{
    return a->reads[TQKV__FIRST_KEYS] || a->reads[TQKV__LAST_KEYS];
}

/* Returns the floats of an arranged query, without its second digits. */
static size_t tqkv__first_floats(const tqkv__attention *a)
{
    return (size_t)(a->key_dim + (tqkv__has_exact_keys(a) ? a->keys.head_dim : 0));
}

/* Adds the scores of the second digits: few rows have any, and their units say which. digits: [n_rows][head_dim] */
static void tqkv__score_digits(const tqkv__attention *a, const tqkv__stream *s, int kv_head,
                               const tqkv__segment *segment, const float *digits, int n_rows, float *scores)
{
    const size_t dim = (size_t)s->head_dim;
    for (int row = 0, n; row<n_rows; row += n> 0 ? n : 1) {
        for (n = 0; row + n < n_rows && digits[(size_t)(row + n + 1) * dim - 1] != 0.0f;) n++;
        if (n > 0)
            a->kernels->score_tile(s, kv_head, segment, digits + (size_t)row * dim, n, true, scores + row * TQKV__TILE);
    }
}

/* Finds the scores of a tile: the sum of those of the parts of the keys, in their order, and of the second digits. q,
   digits: as tqkv__arrange_queries gives them */
static void tqkv__score_tile(tqkv__tile *tile, const float *q, int digits, int n_rows)
{
    const tqkv__attention *a = tile->streams;
    const tqkv__stream *keys = tile->region.streams[TQKV__KEYS], *tail = tile->region.streams[TQKV__TAIL];
    const tqkv__segment *segments = tile->segments;
    float *scores = tile->scores + tile->begin;
    const bool codes = keys == &a->keys;
    const size_t all = (size_t)n_rows, of_keys = all * (size_t)a->keys.head_dim;
    const float *rest = q + all * tqkv__first_floats(a);
    a->kernels->score_tile(keys, tile->kv_head, &segments[TQKV__KEYS], codes ? q : q + all * (size_t)a->key_dim, n_rows,
                           false, scores);
    if (tail) a->kernels->score_tile(tail, tile->kv_head, &segments[TQKV__TAIL], q + of_keys, n_rows, true, scores);
    if ((digits & 1) && codes) tqkv__score_digits(a, keys, tile->kv_head, &segments[TQKV__KEYS], rest, n_rows, scores);
    if (digits & 2) tqkv__score_digits(a, tail, tile->kv_head, &segments[TQKV__TAIL], rest + of_keys, n_rows, scores);
}

/* >>walk: an item from tile to tile */

/* An item at work: its queries, what centres add to its scores, and its sums. A tile's values are added after the next
   tile's scores: these steps are independent, so the processor overlaps them. */
typedef struct tqkv__work {
    const tqkv__attention *a;
    const tqkv__item *item;
    const float *q, *offsets;
    int digits;        /* of the queries: see tqkv__arrange_queries */
    tqkv__tile *tiles; /* [2] */
    tqkv__tile *before;
    tqkv__sums piece, sums;
    const tqkv__list *list; /* or NULL: ranks are positions */
    tqkv__range kept;
    int first_query, last_query;      /* those of the first and of the last row */
    tqkv__range passes[TQKV__PASSES]; /* of ranks, in a stretch */
    tqkv__range common[TQKV__PASSES]; /* what all rows see of these, without a list */
    const tqkv__attention *gathered;  /* streams in scratch, for rows that do not lie together */
    tqkv__ranks ranks[3];             /* likewise: of the tile before, of this one and of the next */
} tqkv__work;

static tqkv__range tqkv__common_range(const tqkv__work *w, tqkv__range range)
{
    const int64_t tree = w->a->call.end - w->a->call.n_queries; /* where it begins */
    tqkv__range all = {tqkv__visible(w->a, w->last_query, range).from, tqkv__visible(w->a, w->first_query, range).to};
    if (w->a->call.tree && all.to > tree) all.to = tree;
    return all;
}

/* Divides a range into what is older than `to`, and what is read as newest halves. */
static void tqkv__divide_passes(tqkv__range *passes, tqkv__range range, int64_t to, int64_t from)
{
    passes[TQKV__OLDER] = passes[TQKV__NEWEST] = range;
    if (range.to > to) passes[TQKV__OLDER].to = to;
    if (range.from < from) passes[TQKV__NEWEST].from = from;
}

/* Finds the passes through a range of positions or ranks or, for `kept`, through those that are added apart, and what
   all rows see of them. */
static void tqkv__find_passes(tqkv__work *w, tqkv__range range, bool kept)
{
    const tqkv__range none = {0, 0}, before = w->kept;
    for (int pass = 0; pass < TQKV__PASSES; pass++) w->passes[pass] = w->common[pass] = none;
    if (kept) {
        w->passes[TQKV__GONE] = tqkv__visible_to(w->a, w->first_query, w->last_query, before);
        if (!w->list) w->common[TQKV__GONE] = tqkv__common_range(w, before);
        return;
    }
    int64_t low = tqkv__exact_at(w->a, w->first_query), high = tqkv__exact_at(w->a, w->last_query);
    tqkv__range seen = w->list ? w->list->seen : tqkv__visible_to(w->a, w->first_query, w->last_query, range);
    if (w->list) {
        low = tqkv__rank_of(w->list, low);
        high = tqkv__rank_of(w->list, high);
        if (seen.from < range.from) seen.from = range.from;
        if (seen.to > range.to) seen.to = range.to;
    }
    tqkv__divide_passes(w->passes, seen, high, low);
    if (!w->list) tqkv__divide_passes(w->common, tqkv__common_range(w, range), low, high);
}

static tqkv__range tqkv__range_in_pass(const tqkv__work *w, int pass, int query, tqkv__range range)
{
    const int64_t exact = tqkv__exact_at(w->a, query);
    if (pass == TQKV__GONE) return w->kept;
    if (pass == TQKV__OLDER && range.to > exact) range.to = exact;
    if (pass == TQKV__NEWEST && range.from < exact) range.from = exact;
    return range;
}

/* Hides from a span of a tile what its query's list does not name of the positions that are no longer resident. */
static void tqkv__hide_kept(const tqkv__list *l, const tqkv__tile *tile, tqkv__span *span)
{
    bool seen = false;
    for (int j = span->from; j < span->to; j++) {
        const int64_t position = tile->position + (j - tile->begin), block = position >> l->shift;
        const int64_t at = tqkv__entry_at(l->row, l->n_row, block);
        if (position < l->kept_from && (at == l->n_row || l->row[at] != block)) span->hidden |= (uint64_t)1 << j;
        seen = seen || !(span->hidden >> j & 1);
    }
    if (!seen) span->to = span->from;
}

/* Finds what each row sees of a tile; false: none sees any of it. */
static bool tqkv__find_spans(const tqkv__work *w, tqkv__range range, tqkv__tile *tile)
{
    const int pass = tile->region.number / 2, group = w->a->group;
    const tqkv__range *common = &w->common[pass];
    const tqkv__item *item = w->item;
    const bool listed = w->list && pass != TQKV__GONE;
    tqkv__span span = {tile->begin, tile->begin + tile->n, listed ? tile->ranks->hidden << tile->begin : 0};
    bool seen = false;
    tile->whole = !span.hidden;
    if (listed || (tile->position >= common->from && tile->position + tile->n <= common->to)) {
        for (int row = 0; row < item->n_rows; row++) tile->spans[row] = span;
        return true;
    }
    for (int row = 0; row < item->n_rows;) {
        const int query = (item->first_row + row) / group, next = (query + 1) * group - item->first_row;
        span = tqkv__span_of(w->a, query, tile, tqkv__range_in_pass(w, pass, query, range));
        if (w->list) tqkv__hide_kept(w->list, tile, &span);
        for (; row < next && row < item->n_rows; row++) tile->spans[row] = span;
        seen = seen || span.to > span.from;
        tile->whole = tile->whole && span.to - span.from == tile->n && !span.hidden;
    }
    return seen;
}

/* Copies a row. Rows are short: a call of memcpy for each would take longer than the copy. */
static inline void tqkv__copy_row(uint8_t *to, const uint8_t *from, size_t size)
{
    for (; size >= 64; size -= 64, to += 64, from += 64) memcpy(to, from, 64);
    for (; size >= 16; size -= 16, to += 16, from += 16) memcpy(to, from, 16);
    if (size) memcpy(to, from, size);
}

typedef struct tqkv__source {
    const uint8_t *codes;
    const float *of_rows;
    size_t size, norms; /* bytes and floats a row */
} tqkv__source;

static tqkv__source tqkv__source_of(const tqkv__stream *s, int kv_head)
{
    const tqkv__source source = {tqkv__codes_at(s, kv_head, 0), tqkv__norms_at(s, kv_head, 0), s->row_bytes,
                                 (size_t)s->norms_per_row};
    return source;
}

/* Prefetches a row to the L1 cache, because requests to the L2 take longer from memory. The last line of a row that is
   not aligned to lines is left out: it costs more than it brings. */
static TQKV__INLINE void tqkv__ask_row(const tqkv__source *s, int32_t slot)
{
    const uint8_t *row = s->codes + (size_t)slot * s->size;
    tqkv__prefetch(TQKV__L1, row, 1); /* by the line, which takes less time than a loop over a size */
    for (size_t i = 64; i < s->size; i += 64) tqkv__prefetch(TQKV__L1, row + i, 1);
    if (s->norms) tqkv__prefetch(TQKV__L1, (const uint8_t *)(s->of_rows + (size_t)slot * s->norms), 1);
}

/* Copies the rows of a tile and their norms from one of its streams to slots of another one, from `slot` on; what is
   hidden becomes zeros, because it may be NaN. Prefetches the next tile's rows, or NULL: one a row, since a burst would
   wait. */
static void tqkv__gather(int stream, int kv_head, const tqkv__ranks *ranks, const tqkv__ranks *next,
                         const tqkv__stream *to, int slot)
{
    const tqkv__source s = tqkv__source_of(ranks->region.streams[stream], kv_head);
    const int32_t *slot_list = ranks->slot_lists[stream], *asked = next ? next->slot_lists[stream] : NULL;
    const int n_next = next ? next->n : 0;
    uint8_t *row = tqkv__codes_at(to, 0, slot);
    float *norm = tqkv__norms_at(to, 0, slot);
    for (int j = 0; j < ranks->n; j++, row += s.size) {
        const size_t at = slot_list[j] < 0 ? 0 : (size_t)slot_list[j];
        if (j < n_next && asked[j] >= 0) tqkv__ask_row(&s, asked[j]);
        if (slot_list[j] < 0)
            memset(row, 0, s.size);
        else
            tqkv__copy_row(row, s.codes + at * s.size, s.size);
        for (size_t i = 0; i < s.norms; i++) *norm++ = slot_list[j] < 0 ? 0.0f : s.of_rows[at * s.norms + i];
    }
    for (int j = ranks->n; j < n_next; j++)
        if (asked[j] >= 0) tqkv__ask_row(&s, asked[j]);
}

/* Prefetches the rows of a tile: those of the values, or of the keys and their tail. */
static void tqkv__ask(int kv_head, const tqkv__ranks *ranks, bool values)
{
    for (int i = 0; i < TQKV__CACHE_STREAMS && ranks->n; i++) {
        if ((i == TQKV__VALUES) != values || !ranks->region.streams[i]) continue;
        const tqkv__source source = tqkv__source_of(ranks->region.streams[i], kv_head);
        for (int j = 0; j < ranks->n; j++)
            if (ranks->slot_lists[i][j] >= 0) tqkv__ask_row(&source, ranks->slot_lists[i][j]);
    }
}

/* Whether the rows of a tile are gathered while the next tile's are prefetched. */
static bool tqkv__asks_meanwhile(const tqkv__ranks *ranks, const tqkv__ranks *next)
{
    return next->n && !ranks->together && !next->together && ranks->region.number == next->region.number;
}

static tqkv__tile *tqkv__next_tile(const tqkv__work *w, int64_t position, int n)
{
    tqkv__tile *tile = &w->tiles[w->before == &w->tiles[0]];
    tile->position = position;
    tile->n = n;
    tile->begin = (int)(position % TQKV__TILE);
    tile->streams = w->a;
    tile->kv_head = w->item->kv_head;
    tile->ranks = NULL;
    return tile;
}

/* Adds the values of the tile before. next: where those of the tile in progress lie, to prefetch them; or NULL */
static void tqkv__add_before(tqkv__work *w, const tqkv__ranks *next)
{
    tqkv__tile *tile = w->before;
    const tqkv__ranks *ranks = tile ? tile->ranks : NULL;
    const int kv_head = w->item->kv_head;
    const bool asks = next && ranks && tqkv__asks_meanwhile(ranks, next);
    if (next && !asks && !w->a->shared) tqkv__ask(kv_head, next, true);
    if (ranks && !ranks->together && !w->a->shared)
        tqkv__gather(TQKV__VALUES, kv_head, ranks, asks ? next : NULL, tile->region.streams[TQKV__VALUES],
                     tile->segments[TQKV__VALUES].slot);
    if (tile) tqkv__add_values(tile, w->item->n_rows, w->piece.out);
}

static void tqkv__attend_tile(tqkv__work *w, tqkv__tile *tile)
{
    const int n_rows = w->item->n_rows;
    const tqkv__tile *before = w->before;
    tqkv__score_tile(tile, w->q, w->digits, n_rows);
    tqkv__add_before(w, tile->ranks);
    if (before && (before->region.number != tile->region.number ||
                   before->position / TQKV__PIECE != tile->position / TQKV__PIECE))
        w->a->kernels->end_piece(n_rows, w->a->value_dim, &w->piece, &w->sums);
    w->a->kernels->softmax_tile(w->a, tile->spans, w->offsets, n_rows, tile->scores, w->piece.max, w->piece.sum,
                                w->piece.out);
    w->before = tile;
}

static void tqkv__touch_streams(const tqkv__tile *tile)
{
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        if (!tile->region.streams[i] || (i == TQKV__VALUES && tile->streams->shared)) continue;
        tqkv__touch_next(tile->region.streams[i], tile->kv_head, &tile->segments[i]);
    }
}

/* >>gather: lists, small pages and the ends of rings: tiles of ranks. Scattered rows are gathered into scratch, where
   they are a tile as others are. */

/* Bytes of the scratch of a stream: rows of two tiles, then their norms. */
static size_t tqkv__gathered_codes(const tqkv__stream *s) { return (2 * TQKV__TILE * s->row_bytes + 63) / 64 * 64; }
static size_t tqkv__gathered_size(const tqkv__stream *s)
{
    return tqkv__gathered_codes(s) + 2 * TQKV__TILE * (size_t)s->norms_per_row * sizeof(float);
}

static size_t tqkv__gathered_floats(const tqkv__attention *a)
{
    size_t size = 64;
    if (!a->call.list.rows && !a->small_pages && !a->odd_rings) return 0;
    for (int i = 0; i < TQKV__STREAMS; i++)
        if (tqkv__stream_read(a, i)) size += tqkv__gathered_size(tqkv__stream_read(a, i));
    return size / sizeof(float);
}

/* Puts a stream of two tiles at `memory`; returns what is behind it. */
static uint8_t *tqkv__put_stream(tqkv__stream *s, uint8_t *memory)
{
    s->codes = memory;
    s->norms = (float *)(void *)(memory + tqkv__gathered_codes(s));
    s->n_kv_heads = 1;
    s->capacity = 2 * TQKV__TILE;
    s->ring = false;
    s->pages = NULL;
    s->n_pages = s->page_size = 0;
    return memory + tqkv__gathered_size(s);
}

/* Opens the attention over gathered tiles; tile i of a work has the slots from TQKV__TILE * i on. */
static void tqkv__open_gathered(const tqkv__attention *a, float *scratch, tqkv__attention *gathered)
{
    uint8_t *memory = tqkv__first_line(scratch);
    *gathered = *a;
    for (int i = 0; i < TQKV__STREAMS; i++) {
        tqkv__stream *s = TQKV__STREAM_AT(gathered, i);
        if (a->reads[i]) memory = tqkv__put_stream(s, memory);
        if (a->reads[i] && a->shared && tqkv__stream_kinds[i].side == TQKV__VALUES)
            *s = *TQKV__STREAM_AT(gathered, i - 1);
    }
}

/* Finds the slots of n positions; -1 where a page is none: nothing sees it, for it would have been refused. */
static void tqkv__slots_of(const tqkv__stream *s, int64_t position, int n, int32_t *slot_list)
{
    const int size = s->pages ? s->page_size : n, n_pages = s->pages ? s->capacity / size : 0;
    const int32_t *page = s->pages ? s->pages + position / size : NULL;
    int at = s->pages ? (int)(position % size) : tqkv__slot(s, position);
    for (int j = 0, end; j < n; at = 0) {
        const bool known = !page || (*page >= 0 && *page < n_pages);
        int slot = page ? *page++ * (known ? size : 0) + at : at;
        const int room = page ? size - at : s->capacity - at;
        for (end = n - j < room ? n : j + room; j < end; j++) slot_list[j] = known ? slot++ : -1;
    }
}

static void tqkv__find_slots(const tqkv__stream *s, const tqkv__list *l, const tqkv__ranks *ranks, int32_t *slot_list)
{
    const bool hidden = ranks->hidden && !ranks->together;
    if (!l) {
        tqkv__slots_of(s, ranks->rank, ranks->n, slot_list);
        return;
    }
    if (!s->pages && !s->ring && !hidden && l->shift == 0 && ranks->rank + ranks->n <= l->base + l->n_before) {
        /* The entries are the slots. */
        memcpy(slot_list, l->entries + (ranks->rank - l->base), (size_t)ranks->n * sizeof *slot_list);
        return;
    }
    for (int j = 0, left; j < ranks->n;) { /* block after block */
        int64_t position = tqkv__position_of(l, ranks->rank + j);
        left = (1 << l->shift) - (int)((ranks->rank + j - l->base) & ((1 << l->shift) - 1));
        for (; left > 0 && j < ranks->n; left--, j++, position++)
            slot_list[j] = hidden && ranks->hidden >> j & 1 ? -1 : tqkv__slot(s, position);
    }
}

/* Finds the slots in all streams. Returns whether in each of them rows lie one after the other. */
static bool tqkv__find_slots_of(const tqkv__list *l, tqkv__ranks *ranks)
{
    bool in_order = true;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv__stream *s = ranks->region.streams[i], *k = ranks->region.streams[TQKV__KEYS];
        int32_t *slot_list = ranks->slot_lists[i], differs = 0;
        if (!s) continue;
        if (i && k->pages == s->pages && k->page_size == s->page_size && k->ring == s->ring &&
            k->capacity == s->capacity)
            memcpy(slot_list, ranks->slot_lists[TQKV__KEYS], (size_t)ranks->n * sizeof *slot_list);
        else
            tqkv__find_slots(s, l, ranks, slot_list);
        for (int j = 0; j < ranks->n; j++) differs |= slot_list[j] ^ (slot_list[0] + j);
        in_order = in_order && !differs && slot_list[0] >= 0;
    }
    return in_order;
}

static const tqkv__list *tqkv__list_in_pass(const tqkv__work *w, int pass)
{
    return pass == TQKV__GONE ? NULL : w->list;
}

/* Finds the tile of the ranks from `rank` to at most `end`, n 0 if a list hides all; returns the rank behind. */
static int64_t tqkv__find_ranks_at(const tqkv__work *w, int pass, int64_t rank, int64_t end, tqkv__ranks *ranks)
{
    const tqkv__attention *a = w->a;
    const tqkv__list *l = tqkv__list_in_pass(w, pass);
    const bool scattered = a->small_pages || a->odd_rings;
    int64_t n = TQKV__TILE - rank % TQKV__TILE;
    if (n > end - rank) n = end - rank;
    const int64_t position = tqkv__position_of(l, rank), last = tqkv__position_of(l, rank + n - 1);
    const bool together = last - position == n - 1;
    ranks->n = 0;
    ranks->region = tqkv__region_at(a, position, pass);
    if (together)
        n = tqkv__tile_length(&ranks->region, position, last + 1); /* as without a list */
    else if (last >= ranks->region.end)
        n = tqkv__rank_of(l, ranks->region.end) - rank;
    ranks->together = together && !scattered; /* then nothing is hidden in the slots */
    ranks->hidden = tqkv__hidden_ranks(a, w->item->first_row / a->group, l, rank, (int)n);
    if (ranks->hidden == tqkv__bits_below((int)n)) return rank + n;
    ranks->rank = rank;
    ranks->n = (int)n;
    const bool in_order = tqkv__find_slots_of(l, ranks);
    ranks->together = ranks->together || (scattered && in_order);
    return rank + n;
}

/* Finds the next tile of ranks from `rank` of a pass on; n is 0 if there is none. */
static void tqkv__find_ranks(const tqkv__work *w, int pass, int64_t rank, tqkv__ranks *ranks)
{
    ranks->n = 0;
    for (;;) {
        while (rank < w->passes[pass].to && !ranks->n)
            rank = tqkv__find_ranks_at(w, pass, rank, w->passes[pass].to, ranks);
        if (ranks->n || ++pass == TQKV__PASSES) return;
        rank = w->passes[pass].from;
    }
}

/* Makes a tile of ranks; scattered ones get the keys in scratch now, and the values before they are added. */
static tqkv__tile *tqkv__tile_of_ranks(const tqkv__work *w, const tqkv__ranks *ranks, const tqkv__ranks *next)
{
    const tqkv__attention *a = w->a, *streams = ranks->together ? a : w->gathered;
    tqkv__tile *tile = tqkv__next_tile(w, ranks->rank, ranks->n);
    const int kv_head = tile->kv_head, slot = tile == w->tiles ? 0 : TQKV__TILE;
    const bool ahead = ranks->together && next->n && next->together && /* the loops ask for the next tile */
                       memcmp(ranks->region.streams, next->region.streams, sizeof next->region.streams) == 0;
    const int pass = ranks->region.number / 2;
    tile->region = tqkv__region_at(streams, tqkv__position_of(tqkv__list_in_pass(w, pass), ranks->rank), pass);
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) { /* in scratch, or where the rows are */
        if (!ranks->region.streams[i]) continue;
        const int first = ranks->slot_lists[i][0], at = ranks->together ? first : slot;
        const tqkv__segment segment = {at, ranks->n, ahead ? next->slot_lists[i][0] - first : 0};
        tile->segments[i] = segment;
    }
    const bool asks = tqkv__asks_meanwhile(ranks, next);
    if (ahead)
        tqkv__touch_streams(tile);
    else if (!asks)
        tqkv__ask(kv_head, next, false);
    tile->ranks = ranks;
    if (ranks->together) return tile;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++)
        if (i != TQKV__VALUES && ranks->region.streams[i])
            tqkv__gather(i, kv_head, ranks, asks ? next : NULL, tile->region.streams[i], slot);
    tile->streams = streams;
    tile->kv_head = 0;
    return tile;
}

static tqkv__tile *tqkv__wrapped_tile(tqkv__work *w, int pass, int64_t position)
{
    tqkv__ranks *ranks = &w->ranks[w->before == &w->tiles[0]]; /* those of the tile before are in use */
    w->ranks[2].n = 0;                                         /* no tile to ask for */
    tqkv__find_ranks(w, pass, position, ranks);
    return tqkv__tile_of_ranks(w, ranks, &w->ranks[2]);
}

static void tqkv__attend_rows(tqkv__work *w, int pass, tqkv__range range)
{
    const tqkv__attention *a = w->a;
    const tqkv__range seen = w->passes[pass];
    tqkv__region region = tqkv__region_at(a, seen.from, pass);
    for (int64_t position = seen.from, n; position < seen.to; position += n) {
        if (position >= region.end) region = tqkv__region_at(a, position, pass);
        n = tqkv__tile_length(&region, position, seen.to);
        const bool wraps = a->odd_rings && tqkv__wraps(&region, position, n);
        tqkv__tile *tile = wraps ? tqkv__wrapped_tile(w, pass, position) : tqkv__next_tile(w, position, (int)n);
        if (!wraps) tile->region = region;
        if (!tqkv__find_spans(w, range, tile)) continue; /* a tree hides it */
        for (int i = 0; i < TQKV__CACHE_STREAMS && !wraps; i++)
            if (region.streams[i]) tqkv__open_segment(region.streams[i], position, (int)n, seen.to, &tile->segments[i]);
        if (!wraps && position + n < seen.to) tqkv__touch_streams(tile);
        tqkv__attend_tile(w, tile);
    }
}

/* Does what tqkv__attend_rows does, for lists and small pages; range: of ranks */
static void tqkv__attend_ranks(tqkv__work *w, tqkv__range range)
{
    tqkv__find_ranks(w, 0, w->passes[0].from, &w->ranks[0]);
    tqkv__ask(w->item->kv_head, &w->ranks[0], false);
    for (int now = 0; w->ranks[now].n; now = (now + 1) % 3) {
        const tqkv__ranks *ranks = &w->ranks[now];
        tqkv__ranks *next = &w->ranks[(now + 1) % 3];
        tqkv__find_ranks(w, ranks->region.number / 2, ranks->rank + ranks->n, next);
        tqkv__tile *tile = tqkv__tile_of_ranks(w, ranks, next);
        tqkv__find_spans(w, range, tile);
        tqkv__attend_tile(w, tile);
    }
}

/* >>query: a row of a call: its query, its centres, its result. */

typedef struct tqkv__request {
    const tqkv__attention *a;
    const void *q; /* the caller's, as out, max and sum */
    void *out;
    float *max, *sum;             /* NULL: finish the rows */
    tqkv__range slice;            /* the positions looked at */
    tqkv__range seen;             /* by some query; of lists: ranks */
    int64_t stretch, n_stretches; /* the first stretch, and their number */
    tqkv__range kept;             /* positions of the first stretch, apart from the others; empty: there is none */
    int n_rows; /* of a KV head that may share an item: all of them, or with a list those of a query */
    int rows_each, n_items;
    int first_unit;       /* units of the requests before, in this wave */
    int64_t wave, n_wave; /* spread: the first stretch in this wave, and their number */
    size_t sums_floats;   /* sums of all rows */
    float *total, *now;   /* spread: sums of all earlier waves; [n_wave]: of the stretches in this wave */
} tqkv__request;

static size_t tqkv__caller_row(const tqkv__attention *a, const tqkv__item *item, int i)
{
    const int row = item->first_row + i;
    return (size_t)(row / a->group) * (size_t)a->call.n_heads + (size_t)(item->kv_head * a->group + row % a->group);
}

static size_t tqkv__row_begin(const tqkv__attention *a, tqkv_strides strides, size_t row)
{
    const size_t n_heads = (size_t)a->call.n_heads;
    return row / n_heads * strides.token + row % n_heads * strides.head;
}

static const void *tqkv__query_at(const tqkv__attention *a, const void *q, size_t row)
{
    return (const uint8_t *)q + tqkv__row_begin(a, a->call.query_strides, row) * tqkv__type_size(a->call.query_type);
}

/* Returns a part of the caller's query: [head_dim] of part 0 or 1 of the keys */
static const void *tqkv__query_part(const tqkv__attention *a, const void *query, int part)
{
    return (const uint8_t *)query + (part ? (size_t)a->keys.head_dim * tqkv__type_size(a->call.query_type) : 0);
}

/* Brings part 0 or 1 of an item's queries into the basis of a stream, times scale, as floats or integers; returns
   whether there are second digits. arranged, halves (as floats, or NULL), rest: [n_rows][head_dim] */
static bool tqkv__arrange_part(const tqkv__attention *a, const tqkv__item *item, const void *q, int part,
                               const tqkv__stream *s, float *arranged, float *halves, float *rest)
{
    TQKV__ALIGNED float natural[TQKV_MAX_HEAD_DIM];
    bool digits = false;
    for (int i = 0; i < item->n_rows; i++, arranged += s->head_dim) {
        const void *query = tqkv__query_at(a, q, tqkv__caller_row(a, item, i));
        const bool original = a->call.query_basis == TQKV_ORIGINAL;
        const float *scale = original ? tqkv__scale_of(s, item->kv_head) : NULL;
        a->isa->codec->widen(a->call.query_type, tqkv__query_part(a, query, part), NULL, scale, s->head_dim, natural);
        if (s->rotated && original) a->isa->codec->rotate(natural, s->head_dim);
        tqkv__scale(natural, s->head_dim, a->call.scale);
        if (halves) memcpy(halves + (size_t)i * (size_t)s->head_dim, natural, (size_t)s->head_dim * sizeof(float));
        if (tqkv__in_floats(s)) {
            memcpy(arranged, natural, (size_t)s->head_dim * sizeof(float));
            continue;
        }
        a->kernels->round_query(s, natural, arranged);
        float *second = rest + (size_t)i * (size_t)s->head_dim;
        if (tqkv__round_rest(natural, s->head_dim)) {
            a->kernels->round_query(s, natural, second);
            digits = true;
        } else {
            memset(second, 0, (size_t)s->head_dim * sizeof(float));
        }
    }
    return digits;
}

static size_t tqkv__query_floats(const tqkv__attention *a) { return tqkv__first_floats(a) + (size_t)a->key_dim; }

/* Returns which parts have second digits: 1 for the keys, 2 for the tail. arranged: [n_rows][head_dim] of the keys, of
   the tail and, if some keys are halves, of the keys for these; then the second digits */
static int tqkv__arrange_queries(const tqkv__attention *a, const tqkv__item *item, const void *q, float *arranged)
{
    const size_t n_rows = (size_t)item->n_rows, of_keys = n_rows * (size_t)a->keys.head_dim;
    float *rest = arranged + n_rows * tqkv__first_floats(a);
    float *halves = tqkv__has_exact_keys(a) ? arranged + n_rows * (size_t)a->key_dim : NULL;
    int digits = tqkv__arrange_part(a, item, q, 0, &a->keys, arranged, halves, rest) ? 1 : 0;
    if (a->call.tail && tqkv__arrange_part(a, item, q, 1, &a->tail, arranged + of_keys, NULL, rest + of_keys))
        digits |= 2;
    return digits;
}

/* Returns q.c, for the centre c of part 0 or 1 of the keys, in the query's basis. query: [key_dim], the caller's */
static TQKV__NOINLINE double tqkv__center_product(const tqkv__attention *a, int kv_head, int part, const void *query)
{
    float q[TQKV_MAX_HEAD_DIM]; /* first room for the inverses */
    double c[TQKV_MAX_HEAD_DIM], sum = 0.0;
    const bool coded = a->call.query_basis == TQKV_ROTATED;
    const tqkv__stream *s = part ? &a->tail : &a->keys;
    const float *center = tqkv__center_of(s, kv_head);
    if (!center) return 0.0;
    const float *inverses = coded ? tqkv__inverses_of(s, kv_head, 1, q) : NULL;
    for (int d = 0; d < s->head_dim; d++)
        c[d] = (double)(inverses ? tqkv__rounded(center[d] * inverses[d]) : center[d]);
    if (coded && s->rotated) tqkv__rotate_double(c, s->head_dim);
    a->isa->codec->widen(a->call.query_type, tqkv__query_part(a, query, part), NULL, NULL, s->head_dim, q);
    for (int d = 0; d < s->head_dim; d++) sum += tqkv__rounded_double(c[d] * (double)q[d]);
    return sum;
}

/* Returns scale * q.c of all parts: what is missing in all scores of a row. In double: it may be a thousand times what
   differs between scores. query: [key_dim] */
static double tqkv__center_score(const tqkv__attention *a, int kv_head, const void *query)
{
    const double tail = a->call.tail ? tqkv__center_product(a, kv_head, 1, query) : 0.0;
    return (tqkv__center_product(a, kv_head, 0, query) + tail) * (double)a->call.scale;
}

/* Finds what centres add to an item's scores; offsets: [n_rows], read if there is a softcap */
static void tqkv__find_offsets(const tqkv__attention *a, const tqkv__item *item, const void *q, float *offsets)
{
    for (int i = 0; i < item->n_rows; i++) {
        const void *row = tqkv__query_at(a, q, tqkv__caller_row(a, item, i));
        offsets[i] = a->call.softcap > 0.0f ? (float)tqkv__center_score(a, item->kv_head, row) : 0.0f;
    }
}

/* Adds what the keys' centre adds to all scores of a row. It belongs to the maximum, where a float has lost the last
   bits of the sum; they go into the weights. out: [value_dim] */
static void tqkv__shift_scores(const tqkv__attention *a, double score, float *out, float *max, float *sum)
{
    if (*sum == 0.0f) return;
    const double exact = (double)*max + score;
    const float rounded = TQKV__AS_FLOAT((float)exact), rest = (float)(exact - (double)rounded);
    const float factor = tqkv__exp(rest - rest == 0.0f ? rest : NAN); /* the score is beyond the range of float */
    *sum = TQKV__AS_FLOAT(*sum * factor);
    tqkv__scale(out, a->value_dim, factor);
    *max = rounded;
}

/* Finishes a row: out = out / (sum + exp(sink - max)) in the basis of outputs, plus the values' centre; zeros if the
   row saw nothing. unrotate: the basis changes. center: in the basis of outputs, or NULL; out: [value_dim] */
static TQKV__NOINLINE void tqkv__finish_row(const tqkv__attention *a, int head, bool unrotate, const float *center,
                                            float *out, float max, float sum)
{
    if (sum == 0.0f) { /* rotated back, half of the zeros would be negative */
        memset(out, 0, (size_t)a->value_dim * sizeof(float));
        return;
    }
    const float sink = a->call.sinks ? a->call.sinks[head] : -INFINITY;
    const float largest = sink > max ? sink : max, keep = tqkv__exp(TQKV__AS_FLOAT(max - largest));
    const float of_sink = tqkv__exp(TQKV__AS_FLOAT(sink - largest));
    const float all = tqkv__sum_of_products(sum, keep, of_sink, 1.0f);
    tqkv__scale(out, a->value_dim, TQKV__AS_FLOAT(keep / all));
    if (unrotate) a->isa->codec->unrotate(out, a->value_dim);
    if (a->call.output_basis == TQKV_ORIGINAL) tqkv__apply_scale(&a->values, head / a->group, out);
    const float share = TQKV__AS_FLOAT(tqkv__rounded(sum * keep) / all); /* of the positions in all weights */
    for (int d = 0; center && d < a->value_dim; d++) out[d] = TQKV__AS_FLOAT(out[d] + tqkv__rounded(share * center[d]));
}

/* Returns the values' centre of a head in the basis of outputs, behind the scale, or NULL; room: [TQKV_MAX_HEAD_DIM] */
static const float *tqkv__output_center(const tqkv__attention *a, int kv_head, float *room)
{
    if (!a->values.center || a->call.output_basis == TQKV_ORIGINAL) return tqkv__center_of(&a->values, kv_head);
    memset(room, 0, (size_t)a->value_dim * sizeof(float));
    tqkv__add_center(&a->values, kv_head, true, room);
    return room;
}

/* Makes a row the same on all processors, see tqkv__one_nan. out: [value_dim] */
static void tqkv__settle_row(const tqkv__attention *a, float *out, float *max, float *sum)
{
    for (int d = 0; d < a->value_dim; d++) out[d] = tqkv__one_nan(out[d]);
    *max = tqkv__one_nan(TQKV__AS_FLOAT(*max + 0.0f)); /* second digits of other rows turn -0 into 0 */
    *sum = tqkv__one_nan(*sum);
}

/* Writes an item's sums to the caller: finished and rounded, or as those of a slice, which are rotated whatever the
   values' format. */
static TQKV__NOINLINE void tqkv__deliver(const tqkv__request *request, const tqkv__item *item, const tqkv__sums *sums)
{
    const tqkv__attention *a = request->a;
    float room[TQKV_MAX_HEAD_DIM];
    const float *center = tqkv__output_center(a, item->kv_head, room);
    TQKV__ALIGNED float wide[TQKV_MAX_HEAD_DIM];
    const tqkv_type type = request->max ? TQKV_TYPE_F32 : a->call.output_type;
    const tqkv_strides strides = {(size_t)a->call.n_heads * (size_t)a->value_dim, (size_t)a->value_dim}; /* of slices */
    const bool scored =
        (a->keys.center || a->tail.center) && a->call.softcap == 0.0f && (request->max || a->call.sinks);
    for (int i = 0; i < item->n_rows; i++) {
        const size_t row = tqkv__caller_row(a, item, i);
        const size_t begin = tqkv__row_begin(a, request->max ? strides : a->call.output_strides, row);
        void *to = (uint8_t *)request->out + begin * tqkv__type_size(type);
        float *out = type == TQKV_TYPE_F32 ? (float *)to : wide, max = sums->max[i], sum = sums->sum[i];
        const double score = scored ? tqkv__center_score(a, item->kv_head, tqkv__query_at(a, request->q, row)) : 0.0;
        const float *from = sums->out + (size_t)i * (size_t)a->value_dim;
        /* Codes of masked slots have the weight 0, and leave their signs in sums that underflow: -0 becomes 0. */
        for (int d = 0; d < a->value_dim; d++) out[d] = TQKV__AS_FLOAT(from[d] + 0.0f);
        if (scored) tqkv__shift_scores(a, score, out, &max, &sum);
        if (!request->max)
            tqkv__finish_row(a, (int)(row % (size_t)a->call.n_heads), a->unrotate_output, center, out, max, sum);
        else if (!a->values.rotated && sum != 0.0f)
            a->isa->codec->rotate(out, a->value_dim);
        tqkv__settle_row(a, out, &max, &sum);
        if (request->max) {
            request->max[row] = max;
            request->sum[row] = sum;
        }
        if (out == wide) a->isa->codec->narrow(type, wide, a->value_dim, to);
    }
}

/* >>job: what a call computes, cut into tasks. */

/* Units of work. Tasks take one after the other, so none waits for a longer one; each task has scratch of its own. */
enum { TQKV__TASKS = 32 };
typedef struct tqkv__queue {
    int n_units, n_tasks;
    int next; /* unit; atomic */
    size_t scratch_floats;
    float *scratch; /* [n_tasks][scratch_floats], each on cache lines of its own */
    float *memory;  /* that holds them */
    size_t size;
} tqkv__queue;

static bool tqkv__queue_open(tqkv__queue *queue, const tqkv_allocator *allocator, size_t more)
{
    queue->scratch_floats = (queue->scratch_floats + 15) / 16 * 16;
    if (queue->scratch_floats > (SIZE_MAX / 8 - more) / (size_t)queue->n_tasks) return false;
    queue->size = ((size_t)queue->n_tasks * queue->scratch_floats + more + 16) * sizeof(float);
    queue->memory = (float *)allocator->alloc(allocator->user, queue->size);
    if (!queue->memory) return false;
    queue->scratch = (float *)(void *)tqkv__first_line(queue->memory);
    return true;
}

/* Takes the next unit; -1 when all are taken. */
static int tqkv__queue_take(tqkv__queue *queue)
{
    const int unit = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
    return unit < queue->n_units ? unit : -1;
}

/* A job is one call or many. A unit of its work is an item over all stretches or, if some item alone is much of the
   work ("spread"), an item over one stretch of a wave. Both ways do the same additions in the same order. */
enum { TQKV__WAVE_FLOATS = 1 << 20 };

typedef struct tqkv__job {
    tqkv__queue queue; /* scratch: tiles, queries, gathered rows, sums of a piece, of all stretches, of one */
    tqkv__request *requests;
    int n_requests;
    bool spread;
    size_t wave_floats;
    float *waves; /* [wave_floats] */
} tqkv__job;

/* The KV heads of rows come one after the other where they share a list. Queries with lists of their own take one KV
   head after the other: neighbours share most entries, whose rows the L2 cache still has. */
static tqkv__item tqkv__item_of(const tqkv__request *request, int index)
{
    TQKV_ASSERT(index >= 0 && index < request->n_items);
    const int n_kv_heads = request->a->n_kv_heads, each = (request->n_rows - 1) / request->rows_each + 1;
    const tqkv_attention *call = &request->a->call;
    const bool follow = !call->list.rows || (call->n_queries == 1 && call->list.heads == 1);
    const int of_head = request->n_items / n_kv_heads; /* items */
    const int kv_head = follow ? index % n_kv_heads : index / of_head,
              i = follow ? index / n_kv_heads : index % of_head;
    const int before = i % each * request->rows_each, left = request->n_rows - before;
    const tqkv__item item = {kv_head, i / each * request->n_rows + before,
                             left < request->rows_each ? left : request->rows_each};
    return item;
}

/* Finds the sums of one stretch; that before the first is of positions that are no longer resident. */
static void tqkv__attend_stretch(const tqkv__request *request, tqkv__work *w, int64_t stretch, const tqkv__sums *sums)
{
    const int64_t begin = stretch * TQKV__STRETCH;
    tqkv__range range = request->seen;
    if (range.from < begin) range.from = begin;
    if (range.to - begin > TQKV__STRETCH) range.to = begin + TQKV__STRETCH;
    const int n_rows = w->item->n_rows;
    w->before = NULL;
    w->sums = *sums;
    tqkv__find_passes(w, range, request->kept.from < request->kept.to && stretch == request->stretch);
    tqkv__clear_sums(&w->piece, (size_t)n_rows, request->a->value_dim);
    tqkv__clear_sums(sums, (size_t)n_rows, request->a->value_dim);
    for (int i = 0; i < 2; i++) /* value_tile reads whole vectors behind the last row: no NaN or Inf of old scratch */
        memset(w->tiles[i].scores + n_rows * TQKV__TILE, 0, TQKV__TILE * sizeof(float));
    if (w->list || w->a->small_pages)
        tqkv__attend_ranks(w, range);
    else
        for (int pass = 0; pass < TQKV__PASSES; pass++) tqkv__attend_rows(w, pass, range);
    tqkv__add_before(w, NULL);
    w->a->kernels->end_piece(n_rows, w->a->value_dim, &w->piece, sums);
}

static tqkv__sums tqkv__sums_at(float *memory, size_t n_rows, int value_dim)
{
    const size_t elements = n_rows * (size_t)value_dim;
    const tqkv__sums sums = {memory, memory + elements, memory + elements + n_rows};
    return sums;
}

/* Returns an item's sums within those of all rows, which are ordered by KV head. */
static tqkv__sums tqkv__sums_of_item(const tqkv__request *request, const tqkv__item *item, float *memory)
{
    const tqkv__attention *a = request->a;
    const tqkv__sums all = tqkv__sums_at(memory, a->n_rows, a->value_dim);
    const size_t row = (size_t)item->kv_head * (size_t)(a->call.n_queries * a->group) + (size_t)item->first_row;
    const tqkv__sums own = {all.out + row * (size_t)a->value_dim, all.max + row, all.sum + row};
    return own;
}

static TQKV__NOINLINE void tqkv__attend_unit(const tqkv__job *job, const tqkv__request *request, int unit,
                                             float *scratch)
{
    const tqkv__attention *a = request->a;
    const tqkv__item item = tqkv__item_of(request, unit % request->n_items);
    const size_t rows = (size_t)request->rows_each, floats = rows * (size_t)(a->value_dim + 2);
    float *q = scratch + 2 * sizeof(tqkv__tile) / sizeof(float), *next = q + rows * tqkv__query_floats(a);
    float offsets[TQKV__CHUNK_ROWS];
    tqkv__attention gathered;
    tqkv__list list;
    tqkv__work w;
    w.a = a;
    w.item = &item;
    w.q = q;
    w.offsets = offsets;
    w.tiles = (tqkv__tile *)(void *)scratch;
    w.piece = tqkv__sums_at(next, rows, a->value_dim);
    w.list = a->call.list.rows ? &list : NULL;
    w.gathered = &gathered;
    if (w.list) list = tqkv__open_list(a, item.first_row / a->group, item.kv_head, request->slice);
    if (w.list || a->small_pages || a->odd_rings) tqkv__open_gathered(a, next + floats, &gathered);
    next += floats + tqkv__gathered_floats(a);
    w.kept = request->kept;
    w.first_query = item.first_row / a->group;
    w.last_query = (item.first_row + item.n_rows - 1) / a->group;
    w.digits = tqkv__arrange_queries(a, &item, request->q, q);
    tqkv__find_offsets(a, &item, request->q, offsets);
    if (job->spread) {
        const int64_t stretch = unit / request->n_items;
        const tqkv__sums to = tqkv__sums_of_item(request, &item, request->now + (size_t)stretch * request->sums_floats);
        tqkv__attend_stretch(request, &w, request->wave + stretch, &to);
        return;
    }
    const tqkv__sums all = tqkv__sums_at(next, rows, a->value_dim);
    const tqkv__sums one = tqkv__sums_at(next + floats, rows, a->value_dim);
    tqkv__attend_stretch(request, &w, request->stretch, &all);
    for (int64_t i = 1; i < request->n_stretches; i++) {
        tqkv__attend_stretch(request, &w, request->stretch + i, &one);
        tqkv__merge_sums(&all, &one, (size_t)item.n_rows, a->value_dim);
    }
    tqkv__deliver(request, &item, &all);
}

static void tqkv__attend_task(void *context, int index)
{
    tqkv__job *job = (tqkv__job *)context;
    float *scratch = job->queue.scratch + (size_t)index * job->queue.scratch_floats;
    const uint64_t mode = tqkv__fp_exact();
    const tqkv__request *request = job->requests, *last = request + job->n_requests - 1;
    for (int unit; (unit = tqkv__queue_take(&job->queue)) >= 0;) { /* a task's units ascend */
        while (request < last && request[1].first_unit <= unit) request++;
        tqkv__attend_unit(job, request, unit - request->first_unit, scratch);
    }
    tqkv__fp_restore(mode);
}

/* Returns the number of rows whose vectors take 32 KiB. */
static int tqkv__chunk_rows(int head_dim)
{
    return 8192 / head_dim < TQKV__CHUNK_ROWS ? 8192 / head_dim : TQKV__CHUNK_ROWS;
}

/* Returns the query rows of an item, of `all`: up to 144 KiB of sums, which the L2 cache holds, or 32 KiB where tasks
   would be left without work. others: how often the work of these rows exists */
static int tqkv__item_rows(const tqkv__attention *a, int all, int64_t others)
{
    const int dim = a->key_dim > a->value_dim ? a->key_dim : a->value_dim;
    const int most = 36864 / dim < TQKV__CHUNK_ROWS ? 36864 / dim : TQKV__CHUNK_ROWS;
    int n = (all - 1) / most + 1;
    if (a->call.parallel.run != tqkv__run_serial)
        while (n * 2 * tqkv__chunk_rows(dim) <= all && others * n < TQKV__TASKS) n *= 2;
    return (all - 1) / n + 1;
}

/* Finds the stretches and items of a call over a slice. max and sum NULL: finishes the rows. */
static void tqkv__cut(const tqkv__attention *a, tqkv__range slice, const void *q, void *out, float *max, float *sum,
                      tqkv__request *request)
{
    const bool begins = slice.from == a->first && (slice.from < slice.to || slice.to == a->call.end);
    const tqkv__range kept = {begins ? 0 : slice.from, slice.to < a->kept ? slice.to : a->kept};
    if (slice.from < kept.to) slice.from = kept.to;
    const tqkv__range seen =
        a->call.list.rows ? tqkv__listed_to(a, slice) : tqkv__visible_to(a, 0, a->call.n_queries - 1, slice);
    const int each = a->n_kv_heads * (a->call.list.rows ? a->call.n_queries : 1);
    memset(request, 0, sizeof *request);
    request->a = a;
    request->q = q;
    request->out = out;
    request->max = max;
    request->sum = sum;
    request->slice = slice;
    request->seen = seen;
    request->stretch = seen.from / TQKV__STRETCH;
    request->n_stretches = seen.to > seen.from ? (seen.to - 1) / TQKV__STRETCH - request->stretch + 1 : 1;
    request->kept = kept;
    request->stretch -= kept.from < kept.to;
    request->n_stretches += kept.from < kept.to;
    request->wave = request->stretch;
    request->n_rows = a->call.list.rows ? a->group : a->call.n_queries * a->group;
    request->rows_each = tqkv__item_rows(a, request->n_rows, request->n_stretches * each);
    request->n_items = each * ((request->n_rows - 1) / request->rows_each + 1);
    request->sums_floats = a->n_rows * ((size_t)a->value_dim + 2);
}

/* Chooses how to divide the work, and how much memory that takes. Returns the floats of all totals. */
static size_t tqkv__divide(tqkv__job *job)
{
    const bool hook = job->requests[0].a->call.parallel.run != tqkv__run_serial;
    double longest = 0.0, all = 0.0; /* in stretches of an item */
    const size_t limit = TQKV__WAVE_FLOATS;
    size_t most = 0, totals = 0, waves = 0;
    for (int i = 0; i < job->n_requests; i++) {
        const tqkv__request *request = &job->requests[i];
        const int64_t left = (int64_t)(limit - waves), each = (int64_t)request->sums_floats;
        if ((double)request->n_stretches > longest) longest = (double)request->n_stretches;
        all += (double)request->n_stretches * request->n_items;
        waves = request->n_stretches > left / each ? limit : waves + (size_t)(request->n_stretches * each);
        if (request->sums_floats > most) most = request->sums_floats;
        if (totals <= SIZE_MAX / 64) totals += request->sums_floats; /* each is below, see tqkv__attention_shape */
    }
    const int most_tasks = TQKV__TASKS;
    job->queue.n_tasks = !hook ? 1 : all < (double)most_tasks ? (int)all : most_tasks;
    job->spread = hook && longest > 1.0 && 4.0 * longest * (double)most_tasks > all && totals <= SIZE_MAX / 64;
    job->wave_floats = !job->spread ? 0 : waves > most ? waves : most;
    return job->spread ? totals : 0;
}

/* Gives each request as many of its next stretches as the memory of a wave holds, and counts the units. */
static void tqkv__next_wave(tqkv__job *job)
{
    size_t used = 0;
    job->queue.n_units = job->queue.next = 0;
    for (int i = 0; i < job->n_requests; i++) {
        tqkv__request *request = &job->requests[i];
        request->wave += request->n_wave;
        const int64_t left = request->stretch + request->n_stretches - request->wave;
        const int64_t fit = (int64_t)((job->wave_floats - used) / request->sums_floats);
        request->n_wave = left < fit ? left : fit;
        request->now = job->waves + used;
        request->first_unit = job->queue.n_units;
        used += (size_t)request->n_wave * request->sums_floats;
        job->queue.n_units += (int)request->n_wave * request->n_items;
    }
}

static void tqkv__merge_wave(const tqkv__request *request)
{
    const size_t n_rows = request->a->n_rows;
    const int value_dim = request->a->value_dim;
    const tqkv__sums total = tqkv__sums_at(request->total, n_rows, value_dim);
    if (request->wave == request->stretch) tqkv__clear_sums(&total, n_rows, value_dim);
    for (int64_t w = 0; w < request->n_wave; w++) {
        const tqkv__sums now = tqkv__sums_at(request->now + (size_t)w * request->sums_floats, n_rows, value_dim);
        tqkv__merge_sums(&total, &now, n_rows, value_dim);
    }
}

/* Runs the waves of a spread job and merges each request's stretches in order. totals: sums of all its rows */
static void tqkv__run_waves(tqkv__job *job, const tqkv_parallel *parallel, float *totals)
{
    for (int i = 0; i < job->n_requests; totals += job->requests[i++].sums_floats) job->requests[i].total = totals;
    for (tqkv__next_wave(job); job->queue.n_units > 0; tqkv__next_wave(job)) {
        parallel->run(parallel->user, job->queue.n_tasks, tqkv__attend_task, job);
        const uint64_t mode = tqkv__fp_exact();
        for (int i = 0; i < job->n_requests; i++) tqkv__merge_wave(&job->requests[i]);
        tqkv__fp_restore(mode);
    }
    const uint64_t mode = tqkv__fp_exact();
    for (int i = 0; i < job->n_requests; i++)
        for (int j = 0; j < job->requests[i].n_items; j++) {
            const tqkv__item item = tqkv__item_of(&job->requests[i], j);
            const tqkv__sums sums = tqkv__sums_of_item(&job->requests[i], &item, job->requests[i].total);
            tqkv__deliver(&job->requests[i], &item, &sums);
        }
    tqkv__fp_restore(mode);
}

static tqkv_result tqkv__run_job(tqkv__request *requests, int n_requests)
{
    tqkv__job job;
    tqkv__queue *queue = &job.queue;
    const tqkv_allocator *allocator = &requests[0].a->call.allocator;
    const tqkv_parallel *parallel = &requests[0].a->call.parallel;
    memset(&job, 0, sizeof job);
    job.requests = requests;
    job.n_requests = n_requests;
    const size_t totals = tqkv__divide(&job);
    int64_t n_units = 0;
    for (int i = 0; i < n_requests; i++) {
        const size_t rows = (size_t)requests[i].rows_each, sums = rows * (size_t)(requests[i].a->value_dim + 2);
        const size_t scratch = 2 * sizeof(tqkv__tile) / sizeof(float) + rows * tqkv__query_floats(requests[i].a) +
                               (job.spread ? 1 : 3) * sums + tqkv__gathered_floats(requests[i].a);
        if (scratch > queue->scratch_floats) queue->scratch_floats = scratch;
        requests[i].first_unit = (int)n_units;
        n_units += requests[i].n_items;
        if (n_units > INT_MAX - TQKV__TASKS) return TQKV__INVALID("more query rows than an int counts");
    }
    queue->n_units = (int)n_units;
    if (!job.spread && queue->n_tasks > queue->n_units) queue->n_tasks = queue->n_units;
    if (!tqkv__queue_open(queue, allocator, job.wave_floats + totals)) return TQKV_OUT_OF_MEMORY;
    job.waves = queue->scratch + (size_t)queue->n_tasks * queue->scratch_floats;
    if (job.spread)
        tqkv__run_waves(&job, parallel, job.waves + job.wave_floats);
    else
        parallel->run(parallel->user, queue->n_tasks, tqkv__attend_task, &job);
    allocator->free(allocator->user, queue->memory, queue->size);
    return TQKV_OK;
}

/* What is called once a token, or less often, is made small: the pragma is gcc's alone. */
#if defined(__OPTIMIZE__) && defined(__GNUC__) && !defined(__clang__)
#define TQKV__SMALL
#pragma GCC push_options
#pragma GCC optimize("Os")
#endif

/* >>convert: rows moved, and stores in another format */

/* Moves the rows of n positions from `source` on to `target` on, downwards in one stream or to another one. In
   ascending order no row is overwritten before it has moved, in a ring too. */
static void tqkv__move_rows(const tqkv__stream *from, int64_t source, const tqkv__stream *to, int64_t target, int64_t n)
{
    while (n > 0) {
        const int source_slot = tqkv__slot(from, source), target_slot = tqkv__slot(to, target);
        const int source_room = tqkv__slots_left(from, source), target_room = tqkv__slots_left(to, target);
        int64_t now = n < source_room ? n : source_room;
        if (now > target_room) now = target_room;
        for (int h = 0; h < from->n_kv_heads; h++) {
            memmove(tqkv__codes_at(to, h, target_slot), tqkv__codes_at(from, h, source_slot),
                    (size_t)now * from->row_bytes);
            if (from->norms_per_row)
                memmove(tqkv__norms_at(to, h, target_slot), tqkv__norms_at(from, h, source_slot),
                        (size_t)now * (size_t)from->norms_per_row * sizeof(float));
        }
        source += now;
        target += now;
        n -= now;
    }
}

/* Decodes a row in the basis of its codes; dst: [head_dim]. Codes are little-endian on any machine; where there are
   vectors, so are halves. */
static void tqkv__read_row(const tqkv__stream *s, int kv_head, int slot, float *dst)
{
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    const uint8_t *codes = tqkv__codes_at(s, kv_head, slot);
    if (s->kind == TQKV__HALF && codec != &tqkv__codec_scalar)
        codec->widen(TQKV_TYPE_F16, codes, NULL, NULL, s->head_dim, dst);
    else
        tqkv__decode_row(s, codes, tqkv__norms_at(s, kv_head, slot), dst);
}

/* Whether decoding and rotating a row gives floats. The bound leaves room for sums of TQKV_MAX_HEAD_DIM products. */
static bool tqkv__row_converts(const tqkv__stream *s, int kv_head, int slot)
{
    float row[TQKV_MAX_HEAD_DIM];
    const float *norms = tqkv__norms_at(s, kv_head, slot);
    if (s->kind == TQKV__HALF) tqkv__read_row(s, kv_head, slot, row);
    if (s->kind == TQKV__HALF) return tqkv__all_finite(row, (size_t)s->head_dim);
    for (int b = 0; b < s->norms_per_row; b++)
        if (!(fabsf(tqkv__factor(s, norms[b])) < 1.0e30f)) return false;
    return true;
}

/* Whether both stores are tables over one pool, and those pages of `to` that have n > 0 positions are none of those of
   `from`. */
static bool tqkv__other_pages(const tqkv__stream *to, const tqkv__stream *from, int64_t position, int n)
{
    if (!to->pages || !from->pages || to->codes != from->codes || to->norms != from->norms) return false;
    if (to->capacity != from->capacity || to->page_size != from->page_size) return false;
    if (to->row_bytes != from->row_bytes || to->norms_per_row != from->norms_per_row) return false;
    const int64_t first = position / to->page_size, count = (position + n - 1) / to->page_size - first + 1;
    return tqkv__all_distinct(to->pages + first, count, from->pages + first, count);
}

/* Whether n > 0 positions can be converted without writing what is still to be read. Rows that begin where longer rows
   begin can be written over them in ascending order. */
static bool tqkv__stays_apart(const tqkv__stream *to, const tqkv__stream *from, int64_t position, int n)
{
    const bool aligned = to->capacity == from->capacity && to->ring == from->ring && !to->pages && !from->pages;
    const bool others = tqkv__other_pages(to, from, position, n);
    const bool codes_stay = others || (to->codes == from->codes && aligned && to->row_bytes <= from->row_bytes);
    const bool norms_stay = others || (to->norms == from->norms && aligned && to->norms_per_row <= from->norms_per_row);
    return (codes_stay || !tqkv__overlap(to->codes, to->codes_size, from->codes, from->codes_size)) &&
           (norms_stay || !tqkv__overlap(to->norms, to->norms_size, from->norms, from->norms_size)) &&
           !tqkv__overlap(to->codes, to->codes_size, from->norms, from->norms_size) &&
           !tqkv__overlap(to->norms, to->norms_size, from->codes, from->codes_size) &&
           !tqkv__encoding_overlaps(to, from->center, tqkv__center_size(from)) &&
           !tqkv__encoding_overlaps(to, from->channel_scale, tqkv__center_size(from)) &&
           !tqkv__encoding_overlaps(to, from->pages, tqkv__table_size(from));
}

/* Whether rows are copied rather than encoded again. */
static bool tqkv__same_rows(const tqkv__stream *a, const tqkv__stream *b)
{
    return a->format == b->format && a->rotated == b->rotated && !a->center == !b->center &&
           !a->channel_scale == !b->channel_scale &&
           (a->block_scale == b->block_scale || a->kind != TQKV__BOOK || a->norms_per_row == 1);
}

TQKV__COLD static tqkv_result tqkv__convert_open(const tqkv_store *to_store, const tqkv_store *from_store,
                                                 int64_t position, int n, tqkv__stream *to, tqkv__stream *from)
{
    tqkv_result r = tqkv__open_positions(to_store, n, position, to);
    if (r == TQKV_OK) r = tqkv__open_positions(from_store, n, position, from);
    if (r == TQKV_OK) r = tqkv__check_written(to, n, position);
    if (r != TQKV_OK) return r;
    if (to->head_dim != from->head_dim || to->n_kv_heads != from->n_kv_heads)
        return TQKV__INVALID("the stores differ in head_dim or n_kv_heads");
    if (to->rotated != from->rotated && to->kind != TQKV__HALF && from->kind != TQKV__HALF)
        return TQKV__INVALID("rotation: the stores differ in it");
    if ((r = tqkv__check_channels_match(to, from)) != TQKV_OK) return r;
    if (n && !tqkv__stays_apart(to, from, position, n))
        return TQKV__INVALID("`to` overlaps `from`, other than in pages of its own or with shorter rows in place");
    for (int p = 0; p < n && !tqkv__same_rows(to, from); p++)
        for (int h = 0; h < from->n_kv_heads; h++)
            if (!tqkv__row_converts(from, h, tqkv__slot(from, position + p)))
                return TQKV__REFUSE(NOT_FINITE, "a row of `from` holds NaN, infinity or a norm of 1e30 or more");
    return TQKV_OK;
}

/* Converts the rows of n positions of a head, in their order, a few at a time: all of these are read, then written. Of
   rows as they came, `from` lacks the centre and the scale of `to`. */
static TQKV__NOINLINE void tqkv__convert_rows(const tqkv__stream *from, const tqkv__stream *to,
                                              const tqkv__quantiser *q, int kv_head, int64_t position, int64_t n)
{
    enum { buffer = 1024 };
    TQKV__ALIGNED float values[buffer + 16]; /* encoding loads whole vectors */
    float room[TQKV_MAX_HEAD_DIM];
    tqkv__row rows[buffer / 32];
    tqkv__stream decoded = *to; /* how the decoded rows are encoded */
    const tqkv__codec *codec = tqkv__codec_for(to->head_dim);
    const int batch = buffer / to->head_dim;
    const float *center = from->center ? NULL : tqkv__center_of(to, kv_head),
                *inverses = from->channel_scale ? NULL : tqkv__inverses_of(to, kv_head, 1, room);
    decoded.type = TQKV_TYPE_F32;
    decoded.rotated = to->rotated && !from->rotated;
    for (; n > 0; position += batch, n -= batch) {
        const int now = n < batch ? (int)n : batch;
        for (int i = 0; i < now; i++) {
            const int target = tqkv__slot(to, position + i);
            float *row = values + i * to->head_dim;
            tqkv__read_row(from, kv_head, tqkv__slot(from, position + i), row);
            if (from->rotated && !to->rotated) codec->unrotate(row, to->head_dim);
            const tqkv__row encoded = {
                row,  center, inverses, tqkv__codes_at(to, kv_head, target), tqkv__norms_at(to, kv_head, target),
                NULL, NULL};
            rows[i] = encoded;
        }
        codec->encode_rows(&decoded, q, rows, now);
    }
}

typedef struct tqkv__convert_job {
    const tqkv__stream *from, *to;
    int64_t position;
    int n, n_tasks;
} tqkv__convert_job;

/* Converts a share of the positions in ascending order of their slots, so that it can be done in place: of a ring that
   wraps, the newer ones first. */
static void tqkv__convert_task(void *context, int index)
{
    const tqkv__convert_job *job = (const tqkv__convert_job *)context;
    const tqkv__stream *from = job->from, *to = job->to;
    const int64_t first = (int64_t)job->n * index / job->n_tasks, end = (int64_t)job->n * (index + 1) / job->n_tasks;
    const int64_t position = job->position + first, n = end - first;
    const int64_t room = from->ring ? tqkv__slots_left(from, position) : n, before = n < room ? n : room;
    const uint64_t mode = tqkv__fp_exact();
    tqkv__quantiser q;
    if (to->kind == TQKV__BOOK) tqkv__quantiser_open(to, &q);
    for (int h = 0; h < from->n_kv_heads; h++) {
        tqkv__convert_rows(from, to, &q, h, position + before, n - before);
        tqkv__convert_rows(from, to, &q, h, position, before);
    }
    tqkv__fp_restore(mode);
}

/* Converts the positions [position, position + n) on the threads of a hook or, in place, in order. */
static void tqkv__convert_streams(const tqkv__stream *to, const tqkv__stream *from, int64_t position, int n,
                                  const tqkv_parallel *parallel)
{
    const bool in_place = to->codes == from->codes || (to->norms_size && to->norms == from->norms);
    tqkv__convert_job job = {from, to, position, n, in_place ? 1 : tqkv__tasks_for(parallel, to, n)};
    if (tqkv__same_rows(to, from))
        tqkv__move_rows(from, position, to, position, n);
    else if (job.n_tasks > 1)
        parallel->run(parallel->user, job.n_tasks, tqkv__convert_task, &job);
    else
        tqkv__convert_task(&job, 0);
}

static tqkv_result tqkv__convert(const tqkv_store *to_store, const tqkv_store *from_store, int64_t position, int n,
                                 const tqkv_parallel *parallel)
{
    tqkv__stream to, from;
    const tqkv_result r = tqkv__convert_open(to_store, from_store, position, n, &to, &from);
    if (r == TQKV_OK) tqkv__convert_streams(&to, &from, position, n, parallel);
    return r;
}

TQKV_API tqkv_result tqkv_store_convert(const tqkv_store *to, const tqkv_store *from, int64_t position, int n_positions)
{
    const tqkv_parallel serial = {NULL, NULL};
    return tqkv__convert(to, from, position, n_positions, to ? &to->parallel : &serial);
}

/* >>measure: errors, and the rotation of rows alone */

typedef struct tqkv__moments {
    const void *first;              /* one of the rows, of the source: what differs may be far smaller than a row */
    double row[TQKV_MAX_HEAD_DIM];  /* of the rows less the first */
    double squares, differs, noise; /* |x|^2, |x - first|^2, |x - x'|^2 */
    double second, fourth, beyond;  /* of the scaled values */
} tqkv__moments;

static TQKV__NOINLINE void tqkv__add_moments(const tqkv__stream *s, int kv_head, const tqkv__row *row, tqkv__moments *m)
{
    float source[TQKV_MAX_HEAD_DIM], first[TQKV_MAX_HEAD_DIM], x[TQKV_MAX_HEAD_DIM], norms[TQKV_MAX_HEAD_DIM / 128];
    const float last = s->kind == TQKV__BOOK   ? s->boundaries[(1 << s->book_bits) - 2]
                       : s->kind == TQKV__HALF ? 65504.0f
                                               : 127.5f; /* where the format saturates */
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    codec->widen(s->type, row->src, row->center, row->inverses, s->head_dim, x);
    tqkv__scale_row(s, x, norms);
    for (int d = 0; d < s->head_dim; d++) {
        const double square = (double)x[d] * (double)x[d];
        m->second += square;
        m->fourth += square * square;
        m->beyond += fabsf(tqkv__rounded(x[d] * (row->factors ? row->factors[d / s->norm_dim] : 1.0f))) > last;
    }
    tqkv__decode_in(s, kv_head, row->codes, row->norms, TQKV_ORIGINAL, x);
    codec->widen(s->type, row->src, NULL, NULL, s->head_dim, source);
    codec->widen(s->type, m->first, NULL, NULL, s->head_dim, first);
    for (int d = 0; d < s->head_dim; d++) {
        const double value = (double)source[d], noise = value - (double)x[d], less = value - (double)first[d];
        m->row[d] += less;
        m->squares += value * value;
        m->differs += less * less;
        m->noise += noise * noise;
    }
}

TQKV__COLD static TQKV__NOINLINE void tqkv__quality_of(const tqkv__stream *s, const tqkv__moments *m, int n_tokens,
                                                       tqkv_quality *out)
{
    float first[TQKV_MAX_HEAD_DIM] = {0};
    double mean = 0.0, differs = m->differs;
    const double n = n_tokens ? n_tokens : 1, values = n * s->head_dim;
    memset(out, 0, sizeof *out);
    if (n_tokens) tqkv__codec_for(s->head_dim)->widen(s->type, m->first, NULL, NULL, s->head_dim, first);
    for (int d = 0; d < s->head_dim; d++) {
        const double less = m->row[d] / n, value = (double)first[d] + less;
        mean += value * value;
        differs -= n * less * less;
    }
    if (m->squares > 0.0) out->mean_share = n * mean / m->squares;
    if (!(m->noise == 0.0)) out->error = differs > 0.0 && m->noise >= 0.0 ? m->noise / differs : (double)INFINITY;
    const bool finite = m->second - m->second == 0.0; /* halves less a centre may overflow */
    if (m->second > 0.0) out->kurtosis = finite ? values * m->fourth / (m->second * m->second) : (double)INFINITY;
    out->beyond = m->beyond / values;
}

TQKV_API tqkv_result tqkv_measure(const tqkv_store *shape, const void *src, int n_tokens, tqkv_quality *out)
{
    tqkv__stream s;
    tqkv__quantiser q;
    tqkv__moments m;
    uint8_t codes[2 * TQKV_MAX_HEAD_DIM];
    float norms[TQKV_MAX_HEAD_DIM / 128], factors[TQKV_MAX_HEAD_DIM / 256], room[TQKV_MAX_HEAD_DIM];
    tqkv_result r = tqkv__stream_shape(shape, &s);
    if (r == TQKV_OK) r = tqkv__stream_channels(shape, &s);
    const size_t out_size = (size_t)s.n_kv_heads * sizeof *out;
    if (r == TQKV_OK) r = tqkv__check_source(&s, src, n_tokens, out, __alignof__(tqkv_quality), out_size);
    if (r != TQKV_OK) return r;
    const uint64_t mode = tqkv__fp_exact();
    if (s.kind == TQKV__BOOK) tqkv__quantiser_open(&s, &q);
    const tqkv__codec *codec = tqkv__codec_for(s.head_dim);
    for (int h = 0; h < s.n_kv_heads; h++) {
        memset(&m, 0, sizeof m);
        m.first = tqkv__source_row(&s, src, 0, (size_t)h);
        const float *inverses = tqkv__inverses_of(&s, h, 1, room);
        for (int t = 0; t < n_tokens; t++) {
            const void *at = tqkv__source_row(&s, src, (size_t)t, (size_t)h);
            const tqkv__row row = {at,    tqkv__center_of(&s, h),           inverses, codes,
                                   norms, s.n_factors > 1 ? factors : NULL, NULL};
            codec->encode_rows(&s, &q, &row, 1);
            tqkv__add_moments(&s, h, &row, &m);
        }
        tqkv__quality_of(&s, &m, n_tokens, &out[h]);
    }
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_rotate(float *rows, int n_rows, int head_dim, tqkv_basis to)
{
    size_t bytes;
    if (!tqkv__head_dim_known(head_dim)) return TQKV__REFUSE(UNSUPPORTED, TQKV__HEAD_DIMS);
    if (!tqkv__basis_known(to)) return TQKV__INVALID("to: no tqkv_basis");
    if (!tqkv__floats_at(rows) || n_rows < 0 || !tqkv__array_size(n_rows, head_dim, 1, sizeof(float), &bytes))
        return TQKV__INVALID("rows: NULL or not aligned as floats, or n_rows negative or too large");
    const tqkv__codec *codec = tqkv__codec_for(head_dim);
    const uint64_t mode = tqkv__fp_exact();
    for (int i = 0; i < n_rows; i++)
        (to == TQKV_ROTATED ? codec->rotate : codec->unrotate)(rows + (size_t)i * (size_t)head_dim, head_dim);
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

/* >>calibrate: tqkv_calibrate, tqkv_logit_noise */

/* Magnitudes to which no sum of squares leaves the range of float. */
#define TQKV__LARGEST_CALIBRATED 1.0e12f
#define TQKV__LEAST_LEARNT       (1.0f / 1024.0f)
#define TQKV__LARGEST_LEARNT     1024.0f

/* Queries as rows of a stream, whose heads are those of the queries. */
typedef struct tqkv__queries {
    tqkv__stream rows;
    const void *q;
    int n, group;
} tqkv__queries;

/* Finds the mean over rows of n positions, or that of the squares, of the differences from a centre, unless that is
   NULL: one float a channel, rows in order; zeros of none. src: the caller's rows, or NULL: those of a store; counted:
   [n], or NULL: all; means: [head_dim] */
static TQKV__NOINLINE void tqkv__channel_means(const tqkv__stream *s, const void *src, const uint8_t *counted, int n,
                                               int first_head, int n_heads, const float *center, bool squared,
                                               float *means)
{
    float row[TQKV_MAX_HEAD_DIM];
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    int n_counted = 0;
    memset(means, 0, (size_t)s->head_dim * sizeof(float));
    for (int t = 0; t < n; t++) {
        if (counted && !counted[t]) continue;
        n_counted++;
        for (int h = first_head; h < first_head + n_heads; h++) {
            const void *at = src ? tqkv__source_row(s, src, (size_t)t, (size_t)h) : NULL;
            if (at)
                codec->widen(s->type, at, NULL, NULL, s->head_dim, row);
            else
                tqkv__read_row(s, h, t, row);
            for (int d = 0; d < s->head_dim; d++) {
                const float x = center ? TQKV__AS_FLOAT(row[d] - center[d]) : row[d];
                means[d] = TQKV__AS_FLOAT(means[d] + (squared ? tqkv__rounded(x * x) : x));
            }
        }
    }
    const volatile float by = n_counted ? (float)n_counted * (float)n_heads : 1.0f; /* see tqkv__norm_i8 */
    for (int d = 0; d < s->head_dim; d++) means[d] = TQKV__AS_FLOAT(means[d] / by);
}

/* Channels that share a scale in pairs: of the first `dim` ones */
typedef struct tqkv__tied {
    tqkv_pairs pairs;
    int dim;
} tqkv__tied;

static tqkv_result tqkv__take_pairs(tqkv_pairs pairs, int rotary_dim, int head_dim, tqkv__tied *tied)
{
    if (pairs != TQKV_PAIRS_NONE && pairs != TQKV_PAIRS_NEIGHBOURS && pairs != TQKV_PAIRS_HALVES)
        return TQKV__INVALID("pairs: no tqkv_pairs");
    if (rotary_dim < 0 || rotary_dim > head_dim || rotary_dim % 2)
        return TQKV__INVALID("rotary_dim: negative, odd, or above head_dim");
    tied->pairs = pairs;
    tied->dim = rotary_dim ? rotary_dim : head_dim;
    return TQKV_OK;
}

/* Turns mean squares into deviations; channels of a pair share theirs, zeros become the smallest that is none. */
static TQKV__NOINLINE void tqkv__deviations(const tqkv__tied *tied, int head_dim, float *squares)
{
    float least = 1.0f;
    bool any = false;
    for (int i = 0; tied->pairs != TQKV_PAIRS_NONE && i < tied->dim / 2; i++) {
        const bool halves = tied->pairs == TQKV_PAIRS_HALVES;
        const int low = halves ? i : 2 * i, high = halves ? i + tied->dim / 2 : 2 * i + 1;
        squares[low] = squares[high] = tqkv__rounded(squares[low] + squares[high]) * 0.5f;
    }
    for (int d = 0; d < head_dim; d++) {
        squares[d] = TQKV__AS_FLOAT(sqrtf(squares[d]));
        if (squares[d] > 0.0f && (!any || squares[d] < least)) least = squares[d];
        any = any || squares[d] > 0.0f;
    }
    for (int d = 0; d < head_dim; d++) squares[d] = squares[d] > 0.0f ? squares[d] : least;
}

/* g = sqrt(s / r), divided by its root mean square. r: NULL: 1. scales may be s. */
static TQKV__NOINLINE void tqkv__scales_of(const float *s, const float *r, int head_dim, float *scales)
{
    float sum = 0.0f;
    for (int d = 0; d < head_dim; d++) {
        scales[d] = TQKV__AS_FLOAT(sqrtf(r ? TQKV__AS_FLOAT(s[d] / r[d]) : s[d]));
        sum = TQKV__AS_FLOAT(sum + tqkv__rounded(scales[d] * scales[d]));
    }
    const volatile float n = (float)head_dim;
    const volatile float root = TQKV__AS_FLOAT(sqrtf(TQKV__AS_FLOAT(sum / n)));
    for (int d = 0; d < head_dim; d++) {
        const float g = TQKV__AS_FLOAT(scales[d] / root);
        scales[d] = g < TQKV__LEAST_LEARNT ? TQKV__LEAST_LEARNT : g > TQKV__LARGEST_LEARNT ? TQKV__LARGEST_LEARNT : g;
    }
}

/* Finds centre and scale of a head from rows as tqkv__channel_means takes them. center, scale: [head_dim], either may
   be NULL, and so may queries */
static TQKV__NOINLINE void tqkv__calibrate_head(const tqkv__stream *s, const void *src, const uint8_t *counted,
                                                int n_tokens, int kv_head, const tqkv__queries *queries,
                                                const tqkv__tied *tied, float *center, float *scale)
{
    float mean[TQKV_MAX_HEAD_DIM], squares[TQKV_MAX_HEAD_DIM];
    tqkv__channel_means(s, src, counted, n_tokens, kv_head, 1, NULL, false, mean);
    if (center) memcpy(center, mean, (size_t)s->head_dim * sizeof(float));
    if (!scale) return;
    tqkv__channel_means(s, src, counted, n_tokens, kv_head, 1, mean, true, scale);
    tqkv__deviations(tied, s->head_dim, scale);
    if (queries) {
        tqkv__channel_means(&queries->rows, queries->q, NULL, queries->n, kv_head * queries->group, queries->group,
                            NULL, true, squares);
        tqkv__deviations(tied, s->head_dim, squares);
    }
    tqkv__scales_of(scale, queries ? squares : NULL, s->head_dim, scale);
}

/* Takes queries of the stream's type, [n_queries][n_heads][head_dim], or none; *bytes: their size. */
static tqkv_result tqkv__take_queries(const tqkv__stream *s, const void *q, int n_heads, int n_queries,
                                      tqkv__queries *queries, size_t *bytes)
{
    if (!q) n_heads = s->n_kv_heads;
    if (n_heads <= 0 || n_heads % s->n_kv_heads) return TQKV__INVALID("n_heads: 0, or not a multiple of n_kv_heads");
    if (n_queries < 0) return TQKV__INVALID("n_queries is negative");
    *bytes = 0;
    queries->rows = *s;
    queries->rows.n_kv_heads = n_heads;
    queries->rows.strides.token = queries->rows.strides.head = 0;
    queries->rows.strides = tqkv__strides_of(queries->rows.strides, n_heads, s->head_dim);
    queries->q = q;
    queries->n = n_queries;
    queries->group = n_heads / s->n_kv_heads;
    if (!q) return TQKV_OK;
    const tqkv_result r = tqkv__check_rows(&queries->rows, q, n_queries, bytes);
    if (r != TQKV_OK) return r;
    return tqkv__rows_finite(&queries->rows, q, n_queries) ? TQKV_OK
                                                           : TQKV__REFUSE(NOT_FINITE, "q holds NaN or infinity");
}

/* Whether no value is so large that its square may leave the range of float, summed up; rows are finite. */
static bool tqkv__rows_moderate(const tqkv__stream *s, const void *src, int n)
{
    float row[TQKV_MAX_HEAD_DIM];
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    if (s->type == TQKV_TYPE_F16) return true;
    for (size_t t = 0; t < (size_t)n; t++)
        for (size_t h = 0; h < (size_t)s->n_kv_heads; h++) {
            codec->widen(s->type, tqkv__source_row(s, src, t, h), NULL, NULL, s->head_dim, row);
            if (codec->largest_bits(row, (size_t)s->head_dim) > tqkv__bits(TQKV__LARGEST_CALIBRATED)) return false;
        }
    return true;
}

/* Whether an output may be written: floats, apart from what is read. */
static bool tqkv__may_write(const float *to, size_t size, const void *src, size_t src_bytes, const void *q,
                            size_t q_bytes)
{
    return !to ||
           (tqkv__floats_at(to) && !tqkv__overlap(to, size, src, src_bytes) && !tqkv__overlap(to, size, q, q_bytes));
}

static tqkv_result tqkv__check_calibration(const tqkv__stream *s, const void *src, int n_tokens,
                                           const tqkv__queries *queries, size_t q_bytes, const float *center,
                                           const float *scale)
{
    size_t bytes;
    const size_t size = tqkv__center_size(s);
    const tqkv_result r = tqkv__check_rows(s, src, n_tokens, &bytes);
    if (r != TQKV_OK) return r;
    if (!center && !scale) return TQKV__INVALID("center and channel_scale are NULL: nothing to find");
    if (!tqkv__may_write(center, size, src, bytes, queries->q, q_bytes) ||
        !tqkv__may_write(scale, size, src, bytes, queries->q, q_bytes) || tqkv__overlap(center, size, scale, size))
        return TQKV__INVALID("center or channel_scale: not aligned as floats, or overlaps src, q or the other");
    if (!tqkv__rows_finite(s, src, n_tokens)) return TQKV__REFUSE(NOT_FINITE, "src holds NaN or infinity");
    if (!tqkv__rows_moderate(s, src, n_tokens)) return TQKV__REFUSE(NOT_FINITE, "src holds values beyond 1e12");
    if (queries->q && !tqkv__rows_moderate(&queries->rows, queries->q, queries->n))
        return TQKV__REFUSE(NOT_FINITE, "q holds values beyond 1e12");
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_calibrate(const tqkv_store *shape, const void *src, int n_tokens, const void *q, int n_heads,
                                    int n_queries, tqkv_pairs pairs, float *center, float *channel_scale)
{
    tqkv__stream s;
    tqkv__queries queries;
    tqkv__tied tied;
    size_t q_bytes;
    tqkv_result r = tqkv__stream_shape(shape, &s);
    if (r != TQKV_OK) return r;
    if ((r = tqkv__take_pairs(pairs, shape->rotary_dim, s.head_dim, &tied)) != TQKV_OK) return r;
    if ((r = tqkv__take_queries(&s, q, n_heads, n_queries, &queries, &q_bytes)) != TQKV_OK) return r;
    if ((r = tqkv__check_calibration(&s, src, n_tokens, &queries, q_bytes, center, channel_scale)) != TQKV_OK) return r;
    const uint64_t mode = tqkv__fp_exact();
    for (int h = 0; h < s.n_kv_heads; h++)
        tqkv__calibrate_head(&s, src, NULL, n_tokens, h, q && n_queries ? &queries : NULL, &tied,
                             center ? center + (size_t)h * (size_t)s.head_dim : NULL,
                             channel_scale ? channel_scale + (size_t)h * (size_t)s.head_dim : NULL);
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

/* -- The noise of the logits -- */

/* Queries at work, as many as have their sums on the stack; sums of q.e and of its square over the rows */
enum { TQKV__NOISE_ROWS = 128 };
typedef struct tqkv__noises {
    double first[TQKV__NOISE_ROWS], second[TQKV__NOISE_ROWS];
} tqkv__noises;

static void tqkv__add_noise(const tqkv__queries *queries, int kv_head, size_t first, int n, const float *error,
                            tqkv__noises *sums)
{
    float q[TQKV_MAX_HEAD_DIM];
    const tqkv__stream *s = &queries->rows;
    const size_t group = (size_t)queries->group;
    for (int i = 0; i < n; i++) {
        const size_t row = first + (size_t)i, head = (size_t)kv_head * group + row % group;
        const void *at = tqkv__source_row(s, queries->q, row / group, head);
        float a = 0.0f, b = 0.0f, c = 0.0f, e = 0.0f;
        tqkv__codec_for(s->head_dim)->widen(s->type, at, NULL, NULL, s->head_dim, q);
        for (int d = 0; d < s->head_dim; d += 4) {
            a += q[d] * error[d];
            b += q[d + 1] * error[d + 1];
            c += q[d + 2] * error[d + 2];
            e += q[d + 3] * error[d + 3];
        }
        const double noise = (double)((a + b) + (c + e));
        sums->first[i] += noise;
        sums->second[i] += noise * noise;
    }
}

/* Returns the variance over the rows of what a head's rows add to scores, mean over its queries. */
static TQKV__NOINLINE double tqkv__head_noise(const tqkv__stream *s, const tqkv__quantiser *q, const void *src,
                                              int n_tokens, int kv_head, const tqkv__queries *queries)
{
    uint8_t codes[2 * TQKV_MAX_HEAD_DIM];
    float norms[TQKV_MAX_HEAD_DIM / 128], room[TQKV_MAX_HEAD_DIM], error[TQKV_MAX_HEAD_DIM], source[TQKV_MAX_HEAD_DIM];
    const tqkv__codec *codec = tqkv__codec_for(s->head_dim);
    const float *inverses = tqkv__inverses_of(s, kv_head, 1, room), *center = tqkv__center_of(s, kv_head);
    const int64_t n_rows = (int64_t)queries->n * queries->group;
    double total = 0.0;
    for (int64_t first = 0; first < n_rows && n_tokens; first += TQKV__NOISE_ROWS) {
        const int n = n_rows - first < TQKV__NOISE_ROWS ? (int)(n_rows - first) : TQKV__NOISE_ROWS;
        tqkv__noises sums = {{0.0}, {0.0}};
        for (int t = 0; t < n_tokens; t++) {
            const void *at = tqkv__source_row(s, src, (size_t)t, (size_t)kv_head);
            const tqkv__row row = {at, center, inverses, codes, norms, NULL, NULL};
            codec->encode_rows(s, q, &row, 1);
            tqkv__decode_in(s, kv_head, codes, norms, TQKV_ORIGINAL, error);
            codec->widen(s->type, at, NULL, NULL, s->head_dim, source);
            for (int d = 0; d < s->head_dim; d++) error[d] -= source[d];
            tqkv__add_noise(queries, kv_head, (size_t)first, n, error, &sums);
        }
        for (int i = 0; i < n; i++) {
            const double mean = sums.first[i] / n_tokens;
            total += sums.second[i] / n_tokens - mean * mean;
        }
    }
    return total > 0.0 ? total / (double)n_rows : total == 0.0 || total < 0.0 ? 0.0 : (double)INFINITY;
}

TQKV_API tqkv_result tqkv_logit_noise(const tqkv_store *shape, const void *src, int n_tokens, const void *q,
                                      int n_heads, int n_queries, double *noise)
{
    tqkv__stream s;
    tqkv__quantiser quantiser;
    tqkv__queries queries;
    size_t q_bytes;
    tqkv_result r = tqkv__stream_shape(shape, &s);
    if (r == TQKV_OK) r = tqkv__stream_channels(shape, &s);
    if (r == TQKV_OK) r = tqkv__take_queries(&s, q, n_heads, n_queries, &queries, &q_bytes);
    if (r != TQKV_OK) return r;
    if (!q) return TQKV__INVALID("q is NULL");
    const size_t size = (size_t)s.n_kv_heads * sizeof *noise;
    const size_t alignment = __alignof__(tqkv_quality); /* of a double in a struct: 4 on 32-bit x86 */
    if (tqkv__overlap(noise, size, q, q_bytes)) return TQKV__INVALID("noise overlaps q");
    if ((r = tqkv__check_source(&s, src, n_tokens, noise, alignment, size)) != TQKV_OK) return r;
    const uint64_t mode = tqkv__fp_exact();
    if (s.kind == TQKV__BOOK) tqkv__quantiser_open(&s, &quantiser);
    for (int h = 0; h < s.n_kv_heads; h++)
        noise[h] = sqrt(tqkv__head_noise(&s, &quantiser, src, n_tokens, h, &queries) / s.head_dim);
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

/* >>attend-calls: the arrays of a call, checked, and the public calls of attention */

/* The arrays of one call. No written array may overlap another one. */
typedef struct tqkv__arrays {
    const void *at[8];
    size_t size[8];
    int n;
    size_t alignment;
} tqkv__arrays;

static void tqkv__add_array(tqkv__arrays *arrays, const void *at, size_t size)
{
    TQKV_ASSERT(arrays->n < 8);
    arrays->at[arrays->n] = at;
    arrays->size[arrays->n++] = size;
}

static void tqkv__add_slice(tqkv__arrays *arrays, const tqkv__attention *a, const void *out, const void *max,
                            const void *sum)
{
    tqkv__add_array(arrays, out, a->out_elements * sizeof(float));
    tqkv__add_array(arrays, max, a->n_rows * sizeof(float));
    tqkv__add_array(arrays, sum, a->n_rows * sizeof(float));
}

static tqkv_result tqkv__check_arrays(const tqkv__arrays *arrays, int n_written)
{
    for (int i = 0; i < arrays->n; i++)
        if (!tqkv__aligned_at(arrays->at[i], arrays->alignment))
            return TQKV__INVALID("an array is NULL or not aligned as its type: out, max or sum");
    for (int i = 0; i < n_written; i++)
        for (int j = i + 1; j < arrays->n; j++)
            if (tqkv__overlap(arrays->at[i], arrays->size[i], arrays->at[j], arrays->size[j]))
                return TQKV__INVALID("an output overlaps another array or the sinks");
    return TQKV_OK;
}

static bool tqkv__reads(const tqkv__attention *a, const void *q, const void *p, size_t size)
{
    const size_t n_queries = (size_t)a->call.n_queries,
                 list_size = n_queries * (size_t)a->call.list.heads * (size_t)a->call.list.length * sizeof(int32_t);
    for (int i = 0; i < TQKV__STREAMS; i++) {
        const tqkv__stream *s = tqkv__stream_read(a, i);
        if (s && tqkv__stream_overlaps(s, p, size)) return true;
    }
    return tqkv__overlap(q, a->q_size, p, size) ||
           tqkv__overlap(a->call.sinks, (size_t)a->call.n_heads * sizeof(float), p, size) ||
           tqkv__overlap(a->call.tree, n_queries * sizeof(uint64_t), p, size) ||
           tqkv__overlap(a->call.list.rows, list_size, p, size);
}

/* Checks the outputs in arrays against what the call reads, and q for NaN and infinity. */
static tqkv_result tqkv__check_attend(const tqkv__attention *a, const void *q, const tqkv__arrays *arrays)
{
    if (!tqkv__aligned_at(q, tqkv__type_size(a->call.query_type)))
        return TQKV__INVALID("q: NULL or not aligned as its type");
    for (int i = 0; i < arrays->n; i++)
        if (tqkv__reads(a, q, arrays->at[i], arrays->size[i]))
            return TQKV__INVALID("an output overlaps q, a store, the sinks, the tree or the list");
    const tqkv_result r = tqkv__check_arrays(arrays, arrays->n);
    if (r != TQKV_OK || tqkv__all_rows_finite(a->isa->codec, a->call.query_type, q, a->call.query_strides,
                                              a->call.n_queries, a->call.n_heads, a->key_dim))
        return r;
    return TQKV__REFUSE(NOT_FINITE, "q holds NaN or infinity");
}

static tqkv_result tqkv__check_q_out(const tqkv__attention *a, const void *q, const void *out)
{
    const size_t size = tqkv__type_size(a->call.output_type);
    const tqkv__arrays arrays = {{out}, {a->out_size}, 1, size};
    return tqkv__check_attend(a, q, &arrays);
}

static tqkv_result tqkv__cut_whole(const tqkv__attention *a, const void *q, void *out, tqkv__request *request)
{
    const tqkv__range all = {a->first, a->call.end};
    tqkv_result r = tqkv__check_q_out(a, q, out);
    if (r == TQKV_OK) r = tqkv__check_seen(a, all);
    if (r == TQKV_OK) tqkv__cut(a, all, q, out, NULL, NULL, request);
    return r;
}

TQKV_API tqkv_result tqkv_attend(const tqkv_attention *attention, const void *q, void *out)
{
    tqkv__attention a;
    tqkv__request request;
    tqkv_result r = tqkv__attention_open(attention, &a);
    if (r != TQKV_OK || !a.call.n_queries) return r;
    r = tqkv__cut_whole(&a, q, out, &request);
    return r == TQKV_OK ? tqkv__run_job(&request, 1) : r;
}

typedef struct tqkv__output {
    uint64_t begin, token_stride, head_stride, row;
    size_t n_tokens, n_heads;
} tqkv__output;

static tqkv__output tqkv__output_of(const tqkv__request *request)
{
    const tqkv__attention *a = request->a;
    const size_t size = tqkv__type_size(a->call.output_type);
    const tqkv__output output = {
        (uintptr_t)request->out,     a->call.output_strides.token * size, a->call.output_strides.head * size,
        (size_t)a->value_dim * size, (size_t)a->call.n_queries,           (size_t)a->call.n_heads};
    return output;
}

/* What a batch writes, in extents of memory. */
typedef struct tqkv__extent {
    uint64_t begin, end;
} tqkv__extent;
typedef struct tqkv__writes {
    tqkv__extent *extents; /* [n]; NULL while they are counted */
    size_t n;
} tqkv__writes;

/* Adds the rows of an output; those that touch are one extent. */
static void tqkv__add_output(tqkv__writes *writes, tqkv__output output)
{
    if (output.head_stride == output.row) output.row *= output.n_heads, output.n_heads = 1;
    if (output.token_stride == output.row) output.row *= output.n_tokens, output.n_tokens = 1;
    for (size_t i = 0; i < output.n_tokens * output.n_heads; i++, writes->n++) {
        const uint64_t at = i / output.n_heads * output.token_stride + i % output.n_heads * output.head_stride;
        const tqkv__extent extent = {output.begin + at, output.begin + at + output.row};
        if (writes->extents) writes->extents[writes->n] = extent;
    }
}

static bool tqkv__open_writes(tqkv__writes *writes, const tqkv_allocator *allocator, size_t *size)
{
    if (!tqkv__size_multiply(writes->n, sizeof *writes->extents, size)) return false;
    writes->extents = (tqkv__extent *)allocator->alloc(allocator->user, *size);
    writes->n = 0;
    return writes->extents != NULL;
}

/* Sorts by `begin`, with a shell sort: qsort may allocate, and not by the caller's allocator. */
static void tqkv__sort_extents(tqkv__extent *extents, size_t n)
{
    size_t gap = 1;
    while (gap < n / 3) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (size_t i = gap, at; i < n; i++) {
            const tqkv__extent moved = extents[i];
            for (at = i; at >= gap && extents[at - gap].begin > moved.begin; at -= gap) extents[at] = extents[at - gap];
            extents[at] = moved;
        }
}

static bool tqkv__writes_overlap(const tqkv__writes *writes)
{
    tqkv__sort_extents(writes->extents, writes->n);
    for (size_t i = 1; i < writes->n; i++)
        if (writes->extents[i].begin < writes->extents[i - 1].end) return true;
    return false;
}

/* Whether an item reads one of n > 0 sorted extents, by halves. */
static bool tqkv__reads_extent(const tqkv__request *request, const tqkv__extent *extents, size_t n)
{
    const uint8_t *low = (const uint8_t *)(uintptr_t)extents[0].begin;
    const uint8_t *end = (const uint8_t *)(uintptr_t)extents[n - 1].end;
    if (!tqkv__reads(request->a, request->q, low, (size_t)(end - low))) return false;
    return n == 1 || tqkv__reads_extent(request, extents, n / 2) ||
           tqkv__reads_extent(request, extents + n / 2, n - n / 2);
}

static tqkv_result tqkv__check_outputs(const tqkv__request *requests, int n_requests, const tqkv_allocator *allocator)
{
    size_t size;
    tqkv__writes writes = {NULL, 0};
    for (int i = 0; i < n_requests; i++) tqkv__add_output(&writes, tqkv__output_of(&requests[i]));
    if (!tqkv__open_writes(&writes, allocator, &size)) return TQKV_OUT_OF_MEMORY;
    for (int i = 0; i < n_requests; i++) tqkv__add_output(&writes, tqkv__output_of(&requests[i]));
    bool overlap = tqkv__writes_overlap(&writes);
    for (int i = 0; i < n_requests && !overlap; i++)
        overlap = tqkv__reads_extent(&requests[i], writes.extents, writes.n);
    allocator->free(allocator->user, writes.extents, size);
    return overlap ? TQKV__INVALID("the output of an item overlaps an array of another") : TQKV_OK;
}

TQKV_API tqkv_result tqkv_attend_batch(const tqkv_attention *items, int n_items, const void *const *q, void *const *out)
{
    size_t size;
    int n_requests = 0;
    if (!items || !q || !out) return TQKV__INVALID("items, q or out is NULL");
    if (n_items < 0) return TQKV__INVALID("n_items is negative");
    if (n_items == 0) return TQKV_OK;
    tqkv_allocator allocator = items[0].allocator;
    if (!tqkv__resolve_allocator(&allocator)) return TQKV__INVALID("allocator: one of alloc and free is missing");
    if (!tqkv__size_multiply((size_t)n_items, sizeof(tqkv__attention) + sizeof(tqkv__request), &size))
        return TQKV__INVALID("n_items is too large");
    tqkv__attention *opened = (tqkv__attention *)allocator.alloc(allocator.user, size);
    if (!opened) return TQKV_OUT_OF_MEMORY;
    tqkv__request *requests = (tqkv__request *)(void *)(opened + n_items);
    tqkv_result r = TQKV_OK;
    for (int i = 0; r == TQKV_OK && i < n_items; i++) {
        tqkv_attention item = items[i];
        item.parallel = items[0].parallel;
        item.allocator = items[0].allocator;
        r = tqkv__attention_open(&item, &opened[i]);
        if (r == TQKV_OK && item.n_queries) r = tqkv__cut_whole(&opened[i], q[i], out[i], &requests[n_requests++]);
    }
    if (r == TQKV_OK && n_requests) r = tqkv__check_outputs(requests, n_requests, &allocator);
    if (r == TQKV_OK && n_requests) r = tqkv__run_job(requests, n_requests);
    allocator.free(allocator.user, opened, size);
    return r;
}

static tqkv_result tqkv__check_slice_range(const tqkv__attention *a, int64_t first, int count)
{
    if (count < 0) return TQKV__INVALID("count is negative");
    if (first < a->first || first > a->call.end || count > a->call.end - first)
        return TQKV__REFUSE(OUT_OF_RANGE, "the slice leaves the resident positions");
    return TQKV_OK;
}

static tqkv_result tqkv__check_slices_match(const tqkv__attention *a, const tqkv__attention *src)
{
    if (src->value_dim != a->value_dim || src->call.n_heads != a->call.n_heads ||
        src->call.n_queries != a->call.n_queries)
        return TQKV__INVALID("the slices differ in the values' head_dim, n_heads or n_queries");
    if (src->n_kv_heads != a->n_kv_heads) return TQKV__INVALID("the slices differ in n_kv_heads");
    return tqkv__check_channels_match(&a->values, &src->values);
}

static tqkv_result tqkv__slice_shape(const tqkv_attention *attention, tqkv__attention *a)
{
    const tqkv_result r = tqkv__attention_shape(attention, a);
    return r == TQKV_OK ? tqkv__stream_channels(attention->values, &a->values) : r;
}

TQKV_API tqkv_result tqkv_attend_partial(const tqkv_attention *attention, const void *q, int64_t first, int count,
                                         float *out, float *max, float *sum)
{
    tqkv__attention a;
    tqkv__request request;
    tqkv__arrays arrays = {{NULL}, {0}, 0, sizeof(float)};
    tqkv_result r = tqkv__attention_open(attention, &a);
    if (r == TQKV_OK) r = tqkv__check_slice_range(&a, first, count);
    if (r != TQKV_OK || !a.call.n_queries) return r;
    const tqkv__range slice = {first, first + count};
    if ((r = tqkv__check_seen(&a, slice)) != TQKV_OK) return r;
    tqkv__add_slice(&arrays, &a, out, max, sum);
    if ((r = tqkv__check_attend(&a, q, &arrays)) != TQKV_OK) return r;
    tqkv__cut(&a, slice, q, out, max, sum, &request);
    return tqkv__run_job(&request, 1);
}

TQKV_API tqkv_result tqkv_attend_merge(const tqkv_attention *attention, float *out, float *max, float *sum,
                                       const tqkv_attention *src, const float *src_out, const float *src_max,
                                       const float *src_sum)
{
    tqkv__attention a, from;
    tqkv__arrays arrays = {{NULL}, {0}, 0, sizeof(float)};
    tqkv_result r = tqkv__slice_shape(attention, &a);
    if (r == TQKV_OK) r = tqkv__slice_shape(src, &from);
    if (r == TQKV_OK) r = tqkv__check_slices_match(&a, &from);
    if (r != TQKV_OK || !a.call.n_queries) return r;
    tqkv__add_slice(&arrays, &a, out, max, sum);
    tqkv__add_slice(&arrays, &a, src_out, src_max, src_sum);
    if ((r = tqkv__check_arrays(&arrays, 3)) != TQKV_OK) return r;
    const size_t value_dim = (size_t)a.value_dim;
    const uint64_t mode = tqkv__fp_exact();
    for (size_t row = 0; row < a.n_rows; row++) {
        float *at = out + row * value_dim;
        tqkv__merge_row(a.value_dim, at, &max[row], &sum[row], src_out + row * value_dim, src_max[row], src_sum[row]);
        tqkv__settle_row(&a, at, &max[row], &sum[row]);
    }
    tqkv__fp_restore(mode);
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_attend_finish(const tqkv_attention *attention, float *out, const float *max, const float *sum)
{
    tqkv__attention a;
    float room[TQKV_MAX_HEAD_DIM];
    tqkv__arrays arrays = {{NULL}, {0}, 0, sizeof(float)};
    tqkv_result r = tqkv__slice_shape(attention, &a);
    if (r != TQKV_OK || !a.call.n_queries) return r;
    tqkv__add_slice(&arrays, &a, out, max, sum);
    if (a.call.sinks) tqkv__add_array(&arrays, a.call.sinks, (size_t)a.call.n_heads * sizeof(float));
    if (a.values.channel_scale) tqkv__add_array(&arrays, a.values.channel_scale, tqkv__center_size(&a.values));
    if (a.values.center) tqkv__add_array(&arrays, a.values.center, tqkv__center_size(&a.values));
    if ((r = tqkv__check_arrays(&arrays, 1)) != TQKV_OK) return r;
    const uint64_t mode = tqkv__fp_exact();
    const bool unrotate = !a.values.rotated || a.unrotate_output;
    for (size_t row = 0; row < a.n_rows; row++) {
        float *at = out + row * (size_t)a.value_dim, of[2] = {max[row], sum[row]};
        const int head = (int)(row % (size_t)a.call.n_heads);
        const float *center = tqkv__output_center(&a, head / a.group, room);
        tqkv__finish_row(&a, head, unrotate, center, at, of[0], of[1]);
        tqkv__settle_row(&a, at, &of[0], &of[1]);
    }
    tqkv__fp_restore(mode);
    return r;
}

/* >>index-code: scores of an index of keys, and the choice of blocks by them */

/* A checked tqkv_index. A row of `a` is one query of one head; its values are the keys again. */
typedef struct tqkv__index {
    tqkv__attention a;
    tqkv_index call; /* defaults resolved */
    int64_t blocks;  /* up to end */
    size_t size;     /* bytes of the scores */
} tqkv__index;

static tqkv_result tqkv__index_shape(const tqkv_index *index, tqkv__index *x)
{
    tqkv_attention a;
    tqkv_result r;
    if (!index) return TQKV__INVALID("the index is NULL");
    x->call = *index;
    if (index->ratio < 0 || index->block < 0 || index->first < 0 || index->newest < 0 || index->positions < 0)
        return TQKV__INVALID("ratio, block, first, newest or positions is negative");
    if (index->pool != TQKV_POOL_MAX && index->pool != TQKV_POOL_MEAN) return TQKV__INVALID("pool: no tqkv_pool");
    memset(&a, 0, sizeof a);
    a.keys = a.values = index->keys;
    a.n_heads = index->n_heads;
    a.n_queries = index->n_queries;
    a.end = index->end;
    a.kv_len = index->kv_len;
    a.scale = 1.0f;
    a.query_basis = index->query_basis;
    a.parallel = index->parallel;
    a.allocator = index->allocator;
    a.query_type = index->query_type;
    if ((r = tqkv__attention_shape(&a, &x->a)) != TQKV_OK) return r;
    if (x->a.n_kv_heads != 1) return TQKV__INVALID("keys of an index: n_kv_heads is not 1");
    if ((r = tqkv__attention_range(&a, &x->a)) != TQKV_OK) return r;
    if (!x->call.ratio) x->call.ratio = 1;
    if (!x->call.block) x->call.block = 1;
    if (index->end > INT64_MAX / x->call.ratio) return TQKV__INVALID("end * ratio is too large");
    if (!index->positions) x->call.positions = index->end * x->call.ratio;
    x->blocks = index->end / x->call.block + (index->end % x->call.block > 0);
    if (x->blocks > INT32_MAX) return TQKV__INVALID("more blocks than an int32_t counts");
    if (!tqkv__array_size(index->n_queries, (int)x->blocks, 1, sizeof(float), &x->size))
        return TQKV__INVALID("scores of more than SIZE_MAX bytes");
    return TQKV_OK;
}

/* Returns where the keys that a query sees end; they begin at the first resident one. */
static int64_t tqkv__index_end(const tqkv__index *x, int query)
{
    const int64_t end = (x->call.positions - x->a.call.n_queries + query + 1) / x->call.ratio;
    return end < x->a.first ? x->a.first : end < x->a.call.end ? end : x->a.call.end;
}

#define TQKV__NO_SCORES "scores: NULL or not aligned as floats"

/* -- Scores. A unit of work is an item, as many queries as share decoded keys, over a range of blocks. -- */

typedef struct tqkv__scoring {
    const tqkv__index *x;
    const void *q;
    float *scores;
    int queries_each, n_items; /* queries of an item */
    int64_t blocks_each;       /* of a range */
    tqkv__queue queue;
} tqkv__scoring;

/* An item at work; its arrays lie in the task's scratch. */
typedef struct tqkv__scored {
    int first_query, n_queries;
    double *totals;           /* [n_queries], of the block in progress: TQKV_POOL_MEAN */
    float *tile, *sums;       /* [rows of a tile][TQKV__TILE], [n_queries][TQKV__TILE] */
    float *q, *rest;          /* arranged, and second digits: [n_queries][n_heads][head_dim] */
    int digits;               /* whether there are any */
    float *weights, *offsets; /* [n_queries][n_heads] */
} tqkv__scored;

static int tqkv__tile_rows(const tqkv__index *x)
{
    const int rows = x->a.call.n_heads * x->a.call.n_queries, most = tqkv__chunk_rows(x->a.key_dim);
    return rows < most ? rows : most;
}

/* Takes the queries of an item, and arranges them in scratch. */
static tqkv__scored tqkv__open_scored(const tqkv__scoring *job, int number, float *scratch)
{
    const tqkv__index *x = job->x;
    const int n_heads = x->a.call.n_heads;
    const size_t each = (size_t)job->queries_each, rows = each * (size_t)n_heads;
    tqkv__scored s;
    s.first_query = number * job->queries_each;
    s.n_queries = x->a.call.n_queries - s.first_query;
    if (s.n_queries > job->queries_each) s.n_queries = job->queries_each;
    s.tile = scratch;
    s.sums = s.tile + tqkv__tile_rows(x) * TQKV__TILE;
    s.q = s.sums + each * TQKV__TILE;
    s.totals = (double *)(void *)(s.q + rows * tqkv__query_floats(&x->a));
    s.weights = (float *)(void *)(s.totals + each);
    s.offsets = s.weights + rows;
    const tqkv__item item = {0, s.first_query * n_heads, s.n_queries * n_heads};
    s.rest = s.q + (size_t)item.n_rows * tqkv__first_floats(&x->a);
    s.digits = tqkv__arrange_queries(&x->a, &item, job->q, s.q);
    for (int i = 0; i < item.n_rows; i++) {
        const size_t row = (size_t)item.first_row + (size_t)i;
        s.weights[i] = x->call.weights ? x->call.weights[row] : 1.0f;
        s.offsets[i] = (float)tqkv__center_score(&x->a, 0, tqkv__query_at(&x->a, job->q, row));
    }
    return s;
}

/* Finds sums[query][j]: the score of each key of the segment */
static void tqkv__score_keys(const tqkv__index *x, const tqkv__scored *s, const tqkv__segment *segment)
{
    const int n_heads = x->a.call.n_heads, n_rows = s->n_queries * n_heads, most = tqkv__tile_rows(x);
    memset(s->sums, 0, (size_t)s->n_queries * TQKV__TILE * sizeof(float));
    for (int row = 0, n; row < n_rows; row += n) {
        n = n_rows - row < most ? n_rows - row : most;
        const int heads = n < n_heads ? n : n_heads; /* whole queries, or some heads of one */
        const size_t at = (size_t)row * (size_t)x->a.key_dim;
        x->a.kernels->score_tile(&x->a.keys, 0, segment, s->q + at, n, false, s->tile);
        if (s->digits) tqkv__score_digits(&x->a, &x->a.keys, 0, segment, s->rest + at, n, s->tile);
        for (int i = 0; i < n; i += heads)
            x->a.kernels->sum_heads(s->tile + i * TQKV__TILE, s->weights + row + i, s->offsets + row + i, x->call.relu,
                                    heads, s->sums + (row + i) / n_heads * TQKV__TILE);
    }
}

/* Pools the scores of the keys [position, position + n), which a query sees up to `end`. out: of block 0 */
static void tqkv__pool(const tqkv__index *x, const float *sums, int64_t position, int n, int64_t end, double *total,
                       float *out)
{
    const int size = x->call.block;
    if (size == 1) {
        memcpy(out + position, sums, (size_t)n * sizeof(float));
        return;
    }
    for (int j = 0, left; j < n; j += left) {
        const int64_t block = (position + j) / size, first = block * size,
                      last = end - first < size ? end : first + size;
        left = last - (position + j) < n - j ? (int)(last - (position + j)) : n - j;
        if (x->call.pool == TQKV_POOL_MAX) {
            for (int i = j; i < j + left; i++)
                if (sums[i] > out[block] || sums[i] != sums[i]) out[block] = sums[i];
            continue;
        }
        for (int i = j; i < j + left; i++) *total += (double)sums[i];
        *total = tqkv__rounded_double(*total);
        if (position + j + left < last) return;
        const int64_t seen = last - (first > x->a.first ? first : x->a.first);
        out[block] = (float)tqkv__rounded_double(*total / (double)seen);
        *total = 0.0;
    }
}

static TQKV__NOINLINE void tqkv__score_unit(const tqkv__scoring *job, int unit, float *scratch)
{
    const tqkv__index *x = job->x;
    const tqkv__stream *keys = &x->a.keys;
    tqkv__scored s = tqkv__open_scored(job, unit % job->n_items, scratch);
    const int64_t block = unit / job->n_items * job->blocks_each;
    const int64_t n_blocks = x->blocks - block < job->blocks_each ? x->blocks - block : job->blocks_each;
    int64_t from = block * x->call.block, to = tqkv__index_end(x, s.first_query + s.n_queries - 1);
    if (to > from && to - from > n_blocks * x->call.block) to = from + n_blocks * x->call.block;
    if (from < x->a.first) from = x->a.first;
    for (int i = 0; i < s.n_queries; i++) {
        float *out = job->scores + (int64_t)(s.first_query + i) * x->blocks + block;
        for (int64_t b = 0; b < n_blocks; b++) out[b] = -INFINITY;
        s.totals[i] = 0.0;
    }
    for (int64_t position = from, n; position < to; position += n) {
        const int room = tqkv__slots_left(keys, position);
        n = TQKV__TILE - position % TQKV__TILE;
        if (n > room) n = room;
        if (n > to - position) n = to - position;
        tqkv__segment segment;
        tqkv__open_segment(keys, position, (int)n, to, &segment);
        if (position + n < to) tqkv__touch_next(keys, 0, &segment);
        tqkv__score_keys(x, &s, &segment);
        for (int i = 0; i < s.n_queries; i++) {
            const int64_t end = tqkv__index_end(x, s.first_query + i), seen = end - position < n ? end - position : n;
            float *out = job->scores + (int64_t)(s.first_query + i) * x->blocks;
            if (seen > 0) tqkv__pool(x, s.sums + i * TQKV__TILE, position, (int)seen, end, &s.totals[i], out);
        }
    }
    for (int i = 0; i < s.n_queries; i++) {
        float *out = job->scores + (int64_t)(s.first_query + i) * x->blocks + block;
        for (int64_t b = 0; b < n_blocks; b++) out[b] = tqkv__one_nan(out[b]);
    }
}

static void tqkv__score_task(void *context, int index)
{
    tqkv__scoring *job = (tqkv__scoring *)context;
    float *scratch = job->queue.scratch + (size_t)index * job->queue.scratch_floats;
    const uint64_t mode = tqkv__fp_exact();
    for (int unit; (unit = tqkv__queue_take(&job->queue)) >= 0;) tqkv__score_unit(job, unit, scratch);
    tqkv__fp_restore(mode);
}

/* Cuts the work. Arranging the queries of a unit costs as much as 40 keys. */
static tqkv_result tqkv__divide_scoring(tqkv__scoring *job)
{
    enum { keys_each = 4096 };
    const tqkv__index *x = job->x;
    const bool hook = x->a.call.parallel.run != tqkv__run_serial;
    const int rows = tqkv__tile_rows(x), n_heads = x->a.call.n_heads;
    job->queries_each = rows > n_heads ? rows / n_heads : 1;
    job->n_items = (x->a.call.n_queries - 1) / job->queries_each + 1;
    job->blocks_each = !hook ? x->blocks : x->call.block < keys_each ? keys_each / x->call.block : 1;
    if (job->blocks_each < 1) job->blocks_each = 1;
    const int64_t ranges = (x->blocks + job->blocks_each - 1) / job->blocks_each;
    if (ranges > (INT_MAX - TQKV__TASKS) / job->n_items) return TQKV__INVALID("more units of work than an int counts");
    job->queue.n_units = (int)ranges * job->n_items;
    job->queue.n_tasks = !hook ? 1 : job->queue.n_units < TQKV__TASKS ? job->queue.n_units : (int)TQKV__TASKS;
    const size_t each = (size_t)job->queries_each, all = each * (size_t)n_heads;
    job->queue.scratch_floats = ((size_t)rows + each) * TQKV__TILE + all * (tqkv__query_floats(&x->a) + 2) + 2 * each;
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_index_scores(const tqkv_index *index, const void *q, float *scores)
{
    tqkv__index x;
    tqkv__scoring job;
    tqkv_result r = tqkv__index_shape(index, &x);
    if (r == TQKV_OK) r = tqkv__stream_memory(index->keys, &x.a.keys);
    if (r != TQKV_OK || !x.a.call.n_queries) return r;
    if (!tqkv__floats_at(scores)) return TQKV__INVALID(TQKV__NO_SCORES);
    const tqkv__arrays arrays = {{scores}, {x.size}, 1, sizeof(float)};
    r = tqkv__check_attend(&x.a, q, &arrays);
    if (r == TQKV_OK) r = tqkv__check_pages(&x.a.keys, x.a.first, tqkv__index_end(&x, x.a.call.n_queries - 1), 0);
    if (r != TQKV_OK) return r;
    if ((uintptr_t)index->weights % sizeof(float)) return TQKV__INVALID("weights: not aligned as floats");
    if (tqkv__overlap(index->weights, x.a.n_rows * sizeof(float), scores, x.size))
        return TQKV__INVALID("scores overlap the weights");
    if (index->weights && !tqkv__all_finite(index->weights, x.a.n_rows))
        return TQKV__REFUSE(NOT_FINITE, "weights hold NaN or infinity");
    memset(&job, 0, sizeof job);
    job.x = &x;
    job.q = q;
    job.scores = scores;
    if ((r = tqkv__divide_scoring(&job)) != TQKV_OK || job.queue.n_units == 0) return r;
    const tqkv_attention *call = &x.a.call;
    if (!tqkv__queue_open(&job.queue, &call->allocator, 0)) return TQKV_OUT_OF_MEMORY;
    memset(job.queue.memory, 0, job.queue.size); /* scores behind a segment's end are read */
    call->parallel.run(call->parallel.user, job.queue.n_tasks, tqkv__score_task, &job);
    call->allocator.free(call->allocator.user, job.queue.memory, job.queue.size);
    return TQKV_OK;
}

/* -- The choice -- */

/* Blocks that a query sees, by number: [from, old) and [recent, to) come before all others. */
typedef struct tqkv__seen_blocks {
    int64_t from, old, recent, to;
} tqkv__seen_blocks;

static tqkv__seen_blocks tqkv__blocks_of(const tqkv__index *x, int query)
{
    tqkv__seen_blocks seen = {0, 0, 0, 0};
    const int64_t size = x->call.block, end = tqkv__index_end(x, query);
    if (end <= x->a.first) return seen;
    seen.from = x->a.first / size;
    seen.to = (end - 1) / size + 1;
    seen.old = x->call.first > seen.from ? x->call.first : seen.from;
    if (seen.old > seen.to) seen.old = seen.to;
    seen.recent = seen.to - x->call.newest > seen.old ? seen.to - x->call.newest : seen.old;
    return seen;
}

/* Orders scores as floats do; 0 for -infinity, which is no block. */
static uint32_t tqkv__score_key(float score)
{
    const uint32_t bits = tqkv__bits(score), sign = 0x80000000u;
    const uint32_t positive = bits | sign, ordered = bits >> 31 ? ~bits : positive;
    if (bits == 0xff800000u) return 0;
    return bits == sign ? sign : ordered; /* -0 is 0 */
}

/* Returns the n-th largest key of n_scores scores, and how many equal ones are among those n; 0 < n <= n_scores. Each
   pass counts the next bits of the keys that agree with it so far. */
static uint32_t tqkv__nth_key(const float *scores, int64_t n_scores, int64_t n, int64_t *equal)
{
    static const uint8_t widths[3] = {11, 11, 10};
    uint32_t counts[1 << 11], key = 0;
    for (int pass = 0, above = 32; pass < 3; pass++) {
        const int width = widths[pass], shift = above - width;
        uint32_t at = (1u << width) - 1;
        memset(counts, 0, sizeof counts);
        for (int64_t i = 0; i < n_scores; i++) {
            const uint32_t x = tqkv__score_key(scores[i]);
            if ((uint64_t)x >> above == key) counts[x >> shift & ((1u << width) - 1)]++;
        }
        for (; counts[at] < n; at--) n -= counts[at];
        key = key << width | at;
        above = shift;
    }
    *equal = n;
    return key;
}

typedef struct tqkv__choice {
    const float *scores;
    int32_t *list;
    int64_t n, k; /* chosen so far, and at most */
} tqkv__choice;

/* Takes the blocks of [from, to) with larger keys, and the first `equal` ones with that key. */
static void tqkv__take_blocks(tqkv__choice *c, int64_t from, int64_t to, uint32_t key, int64_t equal)
{
    for (int64_t b = from; b < to && c->n < c->k; b++) {
        const uint32_t x = tqkv__score_key(c->scores[b]);
        if (x == 0 || x < key || (x == key && equal-- <= 0)) continue;
        c->list[c->n++] = (int32_t)b;
    }
}

static int64_t tqkv__count_blocks(const float *scores, int64_t from, int64_t to)
{
    int64_t n = 0;
    for (int64_t b = from; b < to; b++) n += tqkv__score_key(scores[b]) != 0;
    return n;
}

typedef struct tqkv__choosing {
    const tqkv__index *x;
    const float *scores;
    int k;
    int32_t *list;
} tqkv__choosing;

static void tqkv__choose_task(void *context, int query)
{
    const tqkv__choosing *job = (const tqkv__choosing *)context;
    const tqkv__seen_blocks seen = tqkv__blocks_of(job->x, query);
    tqkv__choice c = {job->scores + query * job->x->blocks, job->list + (int64_t)query * job->k, 0, job->k};
    int64_t left = c.k - tqkv__count_blocks(c.scores, seen.from, seen.old), equal = 0;
    left -= tqkv__count_blocks(c.scores, seen.recent, seen.to);
    tqkv__take_blocks(&c, seen.from, seen.old, 0, 0);
    if (left >= seen.recent - seen.old) {
        tqkv__take_blocks(&c, seen.old, seen.recent, 0, 0);
    } else if (left > 0) {
        const uint32_t key = tqkv__nth_key(c.scores + seen.old, seen.recent - seen.old, left, &equal);
        tqkv__take_blocks(&c, seen.old, seen.recent, key, equal);
    }
    tqkv__take_blocks(&c, seen.recent, seen.to, 0, 0);
    while (c.n < c.k) c.list[c.n++] = -1;
}

static bool tqkv__scores_nan(const tqkv__index *x, const float *scores)
{
    uint32_t bad = 0;
    for (int i = 0; i < x->a.call.n_queries; i++, scores += x->blocks) {
        const tqkv__seen_blocks seen = tqkv__blocks_of(x, i);
        for (int64_t b = seen.from; b < seen.to; b++) bad |= (tqkv__bits(scores[b]) & 0x7fffffffu) > 0x7f800000u;
    }
    return bad != 0;
}

TQKV_API tqkv_result tqkv_index_choose(const tqkv_index *index, const float *scores, int k, int32_t *list)
{
    tqkv__index x;
    size_t list_size;
    tqkv_result r = tqkv__index_shape(index, &x);
    if (r == TQKV_OK && k < 0) r = TQKV__INVALID("k is negative");
    if (r != TQKV_OK || !x.a.call.n_queries) return r;
    if (!tqkv__floats_at(scores)) return TQKV__INVALID(TQKV__NO_SCORES);
    if (!tqkv__aligned_at(list, sizeof *list)) return TQKV__INVALID("list: NULL or not aligned as int32_t");
    if (!tqkv__array_size(x.a.call.n_queries, k, 1, sizeof *list, &list_size))
        return TQKV__INVALID("a list of more than SIZE_MAX bytes");
    if (tqkv__overlap(scores, x.size, list, list_size)) return TQKV__INVALID("the list overlaps the scores");
    if (tqkv__scores_nan(&x, scores)) return TQKV__REFUSE(NOT_FINITE, "scores hold NaN");
    tqkv__choosing job = {&x, scores, k, list};
    const tqkv_parallel *parallel = &x.a.call.parallel;
    if (x.a.call.n_queries == 1)
        tqkv__choose_task(&job, 0);
    else
        parallel->run(parallel->user, x.a.call.n_queries, tqkv__choose_task, &job);
    return TQKV_OK;
}

/* >>cache-code: tqkv_cache, its stores and its memory */

struct tqkv_cache {
    tqkv_attention
        attention; /* one query over all appended positions; defaults resolved, sinks in the cache's memory */
    tqkv_store keys, values, tail; /* values: only their shape if the keys are the values; tail: zeros without one */
    bool shared;                   /* the keys are the values */
    /* What is kept besides of the first and of the newest positions, of keys, values and tail; zeros without. Halves;
       in a ring the first ones' rows of F16 streams and of the tail as they are. */
    tqkv_store ends[2][3];
    int exact_first, exact_last; /* at most the capacity */
    int asked_first, asked_last; /* as in the desc */
    int64_t exact_below;         /* positions below it are among the first ones kept */
    int64_t exact_from;          /* positions below it are read as codes since an edit */
    int64_t exact_held;          /* the newest halves are there from it on */
    void *own[2];                /* codes of the newest halves' rings in the cache's memory, of keys and values */
    int own_room;                /* their capacity */
    void *grown;                 /* memory of newest halves for which that has no room, or NULL */
    size_t grown_size;
    float *channels;  /* room for centres, scales and inverses, stream after stream: [n_kv_heads][head_dim] */
    int64_t first;    /* resident positions [first, attention.end) */
    tqkv_pairs pairs; /* as in the desc */
    int calibrate;
    uint64_t tag;
    bool learning;     /* positions are in `raw` alone */
    int learn_from;    /* so many positions */
    int64_t raw_below; /* queries at positions below it read `raw`; INT64_MAX while the cache learns */
    int64_t raw_end;   /* the rows there, when it has learned */
    tqkv_store raw[3]; /* rows as they came of keys and values, as halves, and of the tail; zeros if it never learns */
    uint8_t *is_new; /* [learn_from]: whether a position is new; on a GPU for each KV head, where the kernel needs it */
    void *raw_memory; /* that holds them, or NULL: on a GPU they lie in the cache's memory, as long as that */
    size_t raw_size;
    int64_t learnt_at; /* on a GPU the end before the append that learned; -1: none, or positions were edited since */
    tqkv_metal *metal;
    int matrix_group;
    tqkv_allocator memory;
    size_t size; /* of the cache's memory: the struct, the sinks, the codes and the norms */
};

enum { TQKV__APPENDED_ON_GPU = 512 }; /* tokens at once: memory for the newest halves does not grow there */

/* The fields of a desc, and where a cache has them: those that a snapshot holds as numbers, with the number of their
   field in its header; what it holds otherwise; then what it does not hold. */
// clang-format off
#define TQKV__CACHE_NUMBERS(row)                                                                                       \
    row(head_dim,      keys.head_dim,     1, int)         row(value_dim,    values.head_dim,  2, int)                  \
    row(tail_dim,      tail.head_dim,     3, int)         row(n_kv_heads,   keys.n_kv_heads,  4, int)                  \
    row(n_heads,       attention.n_heads, 5, int)         row(capacity,     keys.capacity,    6, int)                  \
    row(key_format,    keys.format,       7, tqkv_format) row(value_format, values.format,    8, tqkv_format)          \
    row(tail_format,   tail.format,       9, tqkv_format) row(window,       attention.window, 12, int)                 \
    row(calibrate,     calibrate,        15, int)         row(exact_first,  asked_first,      16, int)                 \
    row(exact_last,    asked_last,       17, int)         row(pairs,        pairs,            22, tqkv_pairs)          \
    row(rotary_dim,    keys.rotary_dim,  23, int)
#define TQKV__CACHE_SHAPE(row)                                                                                         \
    row(ring,         keys.ring,)          row(shared,     shared,)                                                    \
    row(scale,        attention.scale,)    row(softcap,    attention.softcap,)
#define TQKV__CACHE_USE(row)                                                                                           \
    row(type,         keys.type,)          row(sinks,      attention.sinks,)     row(metal,    metal,)                 \
    row(parallel,     attention.parallel,) row(allocator,  attention.allocator,)                                       \
    row(matrix_group, matrix_group,)       row(non_causal, attention.non_causal,)                                      \
    row(tag,          tag,)
// clang-format on

/* This is where a cache has store i, whether there is one or not. */
#define TQKV__STORE_AT(c, i) \
    ((i) >= TQKV__RAW      ? &(c)->raw[(i)-TQKV__RAW] \
     : (i) == TQKV__KEYS   ? &(c)->keys \
     : (i) == TQKV__VALUES ? &(c)->values \
     : (i) == TQKV__TAIL   ? &(c)->tail \
                           : &(c)->ends[tqkv__stream_kinds[i].end][tqkv__stream_kinds[i].side])

static bool tqkv__has_store(const tqkv_cache *c, int i)
{
    return (i != TQKV__VALUES || !c->shared) && TQKV__STORE_AT(c, i)->head_dim > 0;
}

static const tqkv_store *tqkv__store_of(const tqkv_cache *c, int i)
{
    return tqkv__has_store(c, i) ? TQKV__STORE_AT(c, i) : NULL;
}

/* Stores of the cache's memory: what is raw lies there only on a GPU, where work under way may read it at any time. */
static int tqkv__stores_within(const tqkv_cache *c) { return c->metal ? TQKV__CACHE_STORES : TQKV__RAW; }

/* Returns the positions of a ring of halves that serves so many queries: whole tiles, none of which wraps. */
static int64_t tqkv__end_room(int64_t exact_last, int64_t n_queries)
{
    return exact_last ? (exact_last + n_queries - 1 + TQKV__TILE - 1) / TQKV__TILE * TQKV__TILE : 0;
}

/* Returns the oldest position that an edit leaves as halves: as if the ring had room for a tile of queries, so that no
   bit depends on how positions came. */
static int64_t tqkv__exact_kept(const tqkv_cache *c)
{
    const int64_t oldest = c->attention.end - tqkv__end_room(c->exact_last, TQKV__TILE);
    return oldest > c->exact_from ? oldest : c->exact_from;
}

/* Returns the positions for which the rings of the newest halves have room; 0 without. */
static int64_t tqkv__newest_room(const tqkv_cache *c)
{
    return c->ends[1][0].capacity ? c->ends[1][0].capacity : c->ends[1][1].capacity;
}

/* Returns the positions that store i holds: of the newest halves those that an edit leaves. These may be more than
   exact_last: a truncation takes from them first. */
static tqkv__range tqkv__range_of(const tqkv_cache *c, int i)
{
    const tqkv__range all = {c->first, c->attention.end}, first = {0, c->exact_below}, none = {0, 0};
    tqkv__range newest = all;
    if (i >= TQKV__RAW || c->learning) return i >= TQKV__RAW && c->learning ? all : none;
    if (tqkv__exact_kept(c) > newest.from) newest.from = tqkv__exact_kept(c);
    return i < TQKV__FIRST_KEYS ? all : i < TQKV__LAST_KEYS ? first : newest;
}

/* What a stream has a value a channel of. */
typedef enum tqkv__channels {
    TQKV__CENTERS,
    TQKV__SCALES,
    TQKV__INVERSES, /* of the scales: what encoding multiplies by */
    TQKV__CHANNELS
} tqkv__channels;

/* Counts the channels of the streams before number n; false if their room overflows. */
static bool tqkv__count_channels(const tqkv_cache *c, int n, size_t *channels)
{
    size_t dims = 0;
    for (int i = 0; i < n; i++)
        if (tqkv__has_store(c, i)) dims += (size_t)TQKV__STORE_AT(c, i)->head_dim;
    return tqkv__size_multiply(dims, (size_t)c->keys.n_kv_heads, channels) &&
           *channels <= SIZE_MAX / sizeof(float) / TQKV__CHANNELS;
}

/* Starts each array in memory on a cache line: attention to codes that straddle two takes a tenth longer. 63 bytes more
   than *end still have a size. */
static bool tqkv__reserve(size_t *end, size_t size, size_t *begin)
{
    const size_t most = SIZE_MAX - 2 * 63;
    if (*end > most || size > most - *end) return false;
    *begin = (*end + 63) / 64 * 64;
    *end = *begin + size;
    return true;
}

#define TQKV__LARGE_CACHE "a cache of more than SIZE_MAX bytes"

/* Where arrays lie in memory. */
typedef struct tqkv__cache_memory {
    size_t sinks, channels, is_new, size;
    size_t codes[TQKV__CACHE_STORES], norms[TQKV__CACHE_STORES];
} tqkv__cache_memory;

/* Reserves memory for the stores [first, end) and, with raw ones, for is_new: on a GPU for each KV head. */
static bool tqkv__reserve_stores(const tqkv_cache *c, int first, int end, tqkv__cache_memory *at)
{
    const size_t new_rows = (size_t)c->learn_from * (size_t)(c->metal ? c->keys.n_kv_heads : 1);
    bool fits = end <= TQKV__RAW || tqkv__reserve(&at->size, new_rows, &at->is_new);
    for (int i = first; fits && i < end; i++) {
        if (!tqkv__has_store(c, i)) continue;
        const size_t codes = tqkv_codes_size(TQKV__STORE_AT(c, i)); /* 0: more than SIZE_MAX bytes */
        fits = codes && tqkv__reserve(&at->size, codes, &at->codes[i]) &&
               tqkv__reserve(&at->size, tqkv_norms_size(TQKV__STORE_AT(c, i)), &at->norms[i]);
    }
    return fits;
}

static void tqkv__place_stores(tqkv_cache *c, int first, int end, const tqkv__cache_memory *at, uint8_t *memory)
{
    if (end > TQKV__RAW) c->is_new = memory + at->is_new;
    for (int i = first; i < end; i++) {
        tqkv_store *s = TQKV__STORE_AT(c, i);
        if (!tqkv__has_store(c, i)) continue;
        s->codes_size = tqkv_codes_size(s);
        s->norms_size = tqkv_norms_size(s);
        s->codes = memory + at->codes[i];
        s->norms = (float *)(void *)(memory + at->norms[i]);
    }
}

static const tqkv__backend *tqkv__backend_of(const tqkv_metal *m) { return (const tqkv__backend *)(const void *)m; }

static float *tqkv__channel_room(const tqkv_cache *c, int i, tqkv__channels kind)
{
    size_t before = 0, all = 0; /* of a cache that exists */
    (void)tqkv__count_channels(c, i, &before);
    (void)tqkv__count_channels(c, TQKV__CACHE_STREAMS, &all);
    return c->channels + (size_t)kind * all + before;
}

/* Stream i, and what is kept of it besides, has the centres or the scales that lie in their room, or none. */
static void tqkv__name_channels(tqkv_cache *c, int i, tqkv__channels kind, bool has)
{
    tqkv_store *s = TQKV__STORE_AT(c, i);
    *(kind == TQKV__CENTERS ? &s->center : &s->channel_scale) = has ? tqkv__channel_room(c, i, kind) : NULL;
    for (int last = 0; last < 2; last++) {
        c->ends[last][i].center = s->center;
        c->ends[last][i].channel_scale = s->channel_scale;
    }
}

/* Takes values, or NULL, as centres or scales of stream i and of its halves; heads are `stride` floats apart. */
static void tqkv__cache_channels(tqkv_cache *c, int i, tqkv__channels kind, const float *values, size_t stride)
{
    const tqkv_store *s = tqkv__store_of(c, i);
    if (!s) return;
    const size_t dim = (size_t)s->head_dim, n_kv_heads = (size_t)s->n_kv_heads;
    float *own = tqkv__channel_room(c, i, kind), *inverses = tqkv__channel_room(c, i, TQKV__INVERSES);
    const uint64_t mode = tqkv__fp_exact();
    for (size_t h = 0; values && h < n_kv_heads; h++) {
        memmove(own + h * dim, values + h * stride, dim * sizeof(float));
        if (kind == TQKV__SCALES) tqkv__invert(own + h * dim, s->head_dim, inverses + h * dim);
    }
    tqkv__fp_restore(mode);
    tqkv__name_channels(c, i, kind, values != NULL);
}

static void tqkv__cache_advance(tqkv_cache *c, int n_tokens)
{
    const int64_t end = c->attention.end + n_tokens;
    if (c->attention.end <= c->exact_below) c->exact_below = end < c->exact_first ? end : c->exact_first;
    if (c->exact_held < end - tqkv__newest_room(c)) c->exact_held = end - tqkv__newest_room(c);
    c->attention.end = end;
    if (end - c->first > c->keys.capacity) c->first = end - c->keys.capacity;
}

/* What an append encodes: the streams, and the first positions that are kept besides. */
typedef struct tqkv__append {
    tqkv__encode_job job, first_job;
    tqkv__stream streams[TQKV__CACHE_STREAMS], newest[2], first[TQKV__CACHE_STREAMS];
} tqkv__append;

/* Whether store i keeps rows as halves besides codes. */
static bool tqkv__keeps_halves(const tqkv_cache *c, int i)
{
    const int side = tqkv__stream_kinds[i].side;
    return i >= TQKV__FIRST_KEYS && side != TQKV__TAIL && tqkv__has_store(c, i) &&
           TQKV__STORE_AT(c, side)->format != TQKV_F16;
}

static void tqkv__append_rows(const tqkv_cache *c, tqkv__append *append)
{
    for (int side = 0; side < 2; side++) {
        const tqkv_store *newest = tqkv__store_of(c, TQKV__LAST_KEYS + side);
        if (!newest || tqkv__stream_open(newest, &append->newest[side]) != TQKV_OK) continue;
        append->job.halves[side] = &append->newest[side];
    }
    append->job.encode = append->first_job.encode = true;
    tqkv__run_encode_tasks(&append->job);
    if (append->first_job.n_streams) tqkv__run_encode_tasks(&append->first_job);
}

/* >>cache-calibrate: a cache that learns centre and scale of its keys from its first positions, and presets. Until then
   keys and values are halves of the rows as they came, `raw`; the append that brings the last of these positions
   encodes all. A position is `new` if its values differ from those of the position before. */

/* Positions from which a scale can be learned, and the new ones that are enough of any number. */
#define TQKV__LEAST_POSITIONS 16
#define TQKV__LEAST_NEW       64
/* Bounds of the scales that fewer teach: a key that is one vector again and again tells little of a channel. */
#define TQKV__LEAST_OF_FEW   0.5f
#define TQKV__LARGEST_OF_FEW 1.5f

/* Returns the new positions without which a cache learns from all. */
static int tqkv__least_new(const tqkv_cache *c)
{
    const int half = c->learn_from / 2;
    return half > TQKV__LEAST_NEW ? TQKV__LEAST_NEW : half > TQKV__LEAST_POSITIONS ? half : TQKV__LEAST_POSITIONS;
}

/* Lets a cache learn from n positions. It keeps a tile more of them raw: a tree of drafts may be cut there. */
static void tqkv__learn_from(tqkv_cache *c, int n)
{
    c->learn_from = n < c->keys.capacity ? n : c->keys.capacity;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) c->raw[i].capacity = c->learn_from + TQKV__TILE;
}

/* Finds from how many positions a cache learns, and the shapes of its raw halves; follows tqkv__cache_shapes. */
static tqkv_result tqkv__raw_shapes(const tqkv_cache_desc *desc, tqkv_cache *c)
{
    const int quarter = desc->capacity / 4, least = TQKV__LEAST_POSITIONS, most = quarter > least ? quarter : least;
    tqkv__tied tied;
    const tqkv_result r = tqkv__take_pairs(desc->pairs, desc->rotary_dim, desc->head_dim, &tied);
    if (r != TQKV_OK) return r;
    if (desc->calibrate < 0) return TQKV__INVALID("calibrate is negative");
    if (desc->calibrate == 0) return TQKV_OK;
    if (desc->calibrate < least) return TQKV__INVALID("calibrate: fewer than 16 positions");
    if (desc->capacity > 0 && desc->capacity < least) return TQKV__INVALID("calibrate: the capacity is less than 16");
    if (desc->ring && desc->calibrate > most)
        return TQKV__INVALID("calibrate: a ring learns from no more than a quarter of its capacity, or 16 positions");
    if (desc->key_center || desc->key_scale || desc->value_center || desc->value_scale) return TQKV_OK;
    c->learning = true;
    c->raw_below = INT64_MAX;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv_store *s = tqkv__store_of(c, i);
        if (!s) continue;
        c->raw[i] = *s;
        if (i < 2) c->raw[i].format = TQKV_F16;
        c->raw[i].ring = false;
    }
    tqkv__learn_from(c, desc->calibrate < most ? desc->calibrate : most);
    return TQKV_OK;
}

/* Finds where what is raw lies in memory of its own; false if that has no size. */
static bool tqkv__divide_raw(const tqkv_cache *c, tqkv__cache_memory *at)
{
    at->size = 0;
    return c->metal || !c->learning || tqkv__reserve_stores(c, TQKV__RAW, TQKV__CACHE_STORES, at);
}

/* Gets memory for what is raw, unless there is some. On a GPU there always is. */
static tqkv_result tqkv__get_raw(tqkv_cache *c)
{
    tqkv__cache_memory at;
    if (c->metal || c->raw_memory) return TQKV_OK;
    if (!tqkv__divide_raw(c, &at)) return TQKV_OUT_OF_MEMORY;
    c->raw_memory = c->memory.alloc(c->memory.user, at.size + 63);
    if (!c->raw_memory) return TQKV_OUT_OF_MEMORY;
    c->raw_size = at.size + 63;
    tqkv__place_stores(c, TQKV__RAW, TQKV__CACHE_STORES, &at, tqkv__first_line(c->raw_memory));
    return TQKV_OK;
}

/* Gives the raw halves back; on a GPU their memory stays, but no later query reads it. */
static void tqkv__drop_raw(tqkv_cache *c)
{
    if (c->raw_memory) c->memory.free(c->memory.user, c->raw_memory, c->raw_size);
    c->raw_memory = NULL;
    c->learning = false;
    c->raw_below = c->raw_end = 0;
    for (int i = 0; i < TQKV__CACHE_STREAMS && !c->metal; i++) { /* their shapes stay: an empty cache learns again */
        c->raw[i].codes = c->raw[i].norms = NULL;
        c->raw[i].codes_size = c->raw[i].norms_size = 0;
    }
}

/* -- Learning -- */

/* Whether |v - v'|^2 > |v|^2 / 4, for the values v of a position and v' of the one before, over all heads, in 16 sums
   that are added by halves. */
static TQKV__NOINLINE bool tqkv__judge(const tqkv__stream *raw, int slot)
{
    float row[TQKV_MAX_HEAD_DIM], before[TQKV_MAX_HEAD_DIM], sums[2][16];
    if (slot == 0) return true;
    memset(sums, 0, sizeof sums);
    for (int h = 0; h < raw->n_kv_heads; h++) {
        tqkv__read_row(raw, h, slot, row);
        tqkv__read_row(raw, h, slot - 1, before);
        for (int d = 0; d < raw->head_dim; d++) {
            const float x = TQKV__AS_FLOAT(row[d] - before[d]);
            sums[0][d % 16] = TQKV__AS_FLOAT(sums[0][d % 16] + tqkv__rounded(x * x));
            sums[1][d % 16] = TQKV__AS_FLOAT(sums[1][d % 16] + tqkv__rounded(row[d] * row[d]));
        }
    }
    return tqkv__sum_16(sums[0]) > tqkv__sum_16(sums[1]) * 0.25f;
}

static int tqkv__count_new(const tqkv_cache *c, int first)
{
    int n = 0;
    for (int p = first; p < c->learn_from; p++) n += c->is_new[p];
    return n;
}

/* Makes the scales of a head so large, all by one factor, that halves hold its raw rows however they are rotated. */
static TQKV__NOINLINE void tqkv__limit_scales(const tqkv_cache *c, const tqkv__stream *raw, int kv_head,
                                              const float *center, float *largest, float *scale)
{
    float row[TQKV_MAX_HEAD_DIM], factor = 1.0f;
    memset(largest, 0, (size_t)raw->head_dim * sizeof(float));
    for (int slot = 0; slot < c->learn_from; slot++) {
        tqkv__read_row(raw, kv_head, slot, row);
        for (int d = 0; d < raw->head_dim; d++) {
            const float size = fabsf(TQKV__AS_FLOAT(row[d] - center[d]));
            largest[d] = size > largest[d] ? size : largest[d];
        }
    }
    for (int d = 0; d < raw->head_dim; d++) {
        const float wanted = TQKV__AS_FLOAT(largest[d] * TQKV__LEAST_LEARNT / scale[d]);
        factor = wanted > factor ? wanted : factor;
    }
    for (int d = 0; d < raw->head_dim; d++) scale[d] = TQKV__AS_FLOAT(scale[d] * factor);
}

/* Learns centre and scale of the keys from the new positions, without those that stay exact, if enough remain. Too few
   new ones: it learns from all, because a model's biases show in any text, but bounds the scales. */
static TQKV__NOINLINE void tqkv__learn(tqkv_cache *c)
{
    float room[TQKV_MAX_HEAD_DIM];
    tqkv__stream raw, values;
    const uint64_t mode = tqkv__fp_exact();
    (void)tqkv__stream_open(&c->raw[0], &raw);
    (void)tqkv__stream_open(&c->raw[c->shared ? 0 : 1], &values);
    for (int p = 0; p < c->learn_from; p++) c->is_new[p] = tqkv__judge(&values, p);
    const bool few = tqkv__count_new(c, 0) < tqkv__least_new(c);
    if (few) memset(c->is_new, true, (size_t)c->learn_from);
    if (tqkv__count_new(c, c->exact_first) >= TQKV__LEAST_POSITIONS) memset(c->is_new, false, (size_t)c->exact_first);
    const size_t dim = (size_t)raw.head_dim;
    const tqkv__tied tied = {c->pairs, c->keys.rotary_dim ? c->keys.rotary_dim : raw.head_dim};
    float *center = tqkv__channel_room(c, TQKV__KEYS, TQKV__CENTERS),
          *scale = tqkv__channel_room(c, TQKV__KEYS, TQKV__SCALES);
    for (size_t h = 0; h < (size_t)raw.n_kv_heads; h++, center += dim, scale += dim) {
        tqkv__calibrate_head(&raw, NULL, c->is_new, c->learn_from, (int)h, NULL, &tied, center, scale);
        for (size_t d = 0; few && d < dim; d++) {
            const float g = scale[d] < TQKV__LARGEST_OF_FEW ? scale[d] : TQKV__LARGEST_OF_FEW;
            scale[d] = g > TQKV__LEAST_OF_FEW ? g : TQKV__LEAST_OF_FEW;
        }
        tqkv__limit_scales(c, &raw, (int)h, center, room, scale);
    }
    tqkv__fp_restore(mode);
    tqkv__name_channels(c, TQKV__KEYS, TQKV__CENTERS, true);
    tqkv__cache_channels(c, TQKV__KEYS, TQKV__SCALES, tqkv__channel_room(c, TQKV__KEYS, TQKV__SCALES), dim);
}

/* -- Encoding what was raw -- */

/* Encodes n raw positions of its stream to store i, or what it holds of them at `end`; halves are copied. */
static void tqkv__settle_store(const tqkv_cache *c, int i, int64_t n, int64_t end)
{
    const tqkv__stream_kind kind = tqkv__stream_kinds[i];
    const int64_t room = kind.end == TQKV__LAST_END ? tqkv__newest_room(c) : c->keys.capacity;
    const int64_t from = kind.end == TQKV__FIRST_END || end < room ? 0 : end - room;
    tqkv__stream raw, to;
    if (kind.end == TQKV__FIRST_END && n > c->exact_first) n = c->exact_first;
    if (from >= n || !tqkv__has_store(c, i) || tqkv__stream_open(&c->raw[kind.side], &raw) != TQKV_OK ||
        tqkv__stream_open(TQKV__STORE_AT(c, i), &to) != TQKV_OK)
        return;
    tqkv__convert_streams(&to, &raw, from, (int)(n - from), &c->attention.parallel);
}

static void tqkv__count_settled(tqkv_cache *c, int64_t n, int64_t end)
{
    c->learning = false;
    c->raw_below = c->learn_from;
    c->raw_end = n;
    c->exact_below = n < c->exact_first ? n : c->exact_first;
    c->exact_from = c->exact_held = 0;
    if (end > tqkv__newest_room(c)) c->exact_held = end - tqkv__newest_room(c) < n ? end - tqkv__newest_room(c) : n;
}

/* Learns, and encodes n raw positions, with what is kept besides of them at `end`. */
static void tqkv__settle(tqkv_cache *c, int64_t n, int64_t end)
{
    tqkv__learn(c);
    for (int i = 0; i < TQKV__RAW; i++) tqkv__settle_store(c, i, n, end);
    tqkv__count_settled(c, n, end);
}

/* Learns if all that the cache holds is enough: after an edit, or of fewer positions than another cache. */
static void tqkv__settle_all(tqkv_cache *c)
{
    const int64_t end = c->attention.end;
    if (!c->learning || end < c->learn_from) return;
    tqkv__settle(c, end, end);
    tqkv__cache_advance(c, 0); /* a ring may hold less */
}

/* -- Appending -- */

static void tqkv__skip_tokens(tqkv__encode_job *job, int n)
{
    if (n > job->n_tokens) n = job->n_tokens < 0 ? 0 : job->n_tokens;
    for (int i = 0; i < job->n_streams; i++) job->src[i] = tqkv__source_row(job->streams[i], job->src[i], (size_t)n, 0);
    job->n_tokens -= n;
    job->position += n;
    if (job->n_tokens <= 0) job->n_streams = 0;
}

static void tqkv__append_raw(const tqkv_cache *c, const tqkv__append *append, int n)
{
    tqkv__stream raw[TQKV__CACHE_STREAMS];
    tqkv__encode_job job = append->job;
    if (job.n_tokens > n) job.n_tokens = n;
    for (int i = 0; i < job.n_streams; i++) {
        const int stream = (int)(job.streams[i] - append->streams);
        (void)tqkv__stream_open(&c->raw[stream], &raw[i]);
        raw[i].strides = job.streams[i]->strides;
        job.streams[i] = &raw[i];
    }
    job.encode = true;
    tqkv__run_encode_tasks(&job);
}

/* Appends to a cache that learns: raw halves as far as it learns from them, then codes. A failure changes nothing. */
static tqkv_result tqkv__append_learning(tqkv_cache *c, tqkv__append *append)
{
    const int64_t end = c->attention.end + append->job.n_tokens, at = end < c->learn_from ? end : c->learn_from;
    const tqkv_result r = tqkv__get_raw(c);
    if (r != TQKV_OK) return r;
    const int n = (int)(at - c->attention.end);
    tqkv__append_raw(c, append, n);
    tqkv__skip_tokens(&append->job, n);
    tqkv__skip_tokens(&append->first_job, n);
    if (at < c->learn_from) return TQKV_OK;
    tqkv__settle(c, at, end);
    if (append->job.n_tokens) tqkv__append_raw(c, append, TQKV__TILE);
    c->raw_end = end - at < TQKV__TILE ? end : at + TQKV__TILE;
    if (c->attention.non_causal) tqkv__drop_raw(c); /* all queries see what is encoded */
    tqkv__stream *const keys[2] = {&append->streams[TQKV__KEYS], &append->first[TQKV__KEYS]};
    for (int i = 0; i < 2; i++) { /* for what is left */
        keys[i]->center = c->keys.center;
        keys[i]->channel_scale = c->keys.channel_scale;
        keys[i]->inverses = tqkv__channel_room(c, TQKV__KEYS, TQKV__INVERSES);
    }
    if (append->job.n_tokens) tqkv__append_rows(c, append);
    return TQKV_OK;
}

/* Counts what a GPU has appended, or will have when what is recorded has run: the cache then has centre and scale,
   whose numbers the processor does not know yet. */
static void tqkv__count_append(tqkv_cache *c, int n_tokens)
{
    const int64_t end = c->attention.end + n_tokens;
    if (!c->learning && n_tokens) tqkv__drop_raw(c);
    if (c->learning && end >= c->learn_from) {
        c->learnt_at = c->attention.end;
        tqkv__count_settled(c, c->learn_from, end);
        c->raw_end = end < c->learn_from + TQKV__TILE ? end : c->learn_from + TQKV__TILE;
        tqkv__name_channels(c, TQKV__KEYS, TQKV__CENTERS, true);
        tqkv__name_channels(c, TQKV__KEYS, TQKV__SCALES, true);
        if (c->attention.non_causal) tqkv__drop_raw(c);
    }
    tqkv__cache_advance(c, n_tokens);
}

/* On a GPU a tail is encoded to its stream while the cache learns, too; after raw rows moved or came, the stream
   follows. */
static void tqkv__follow_tail(const tqkv_cache *c)
{
    const int64_t end = c->attention.end;
    if (!c->metal || !c->learning) return;
    tqkv__settle_store(c, TQKV__TAIL, end, end);
    tqkv__settle_store(c, TQKV__FIRST_TAIL, end, end);
}

/* -- Attending -- */

/* Returns how many of the newest n_queries queries stand at positions that are read raw. */
static int tqkv__raw_queries(const tqkv_cache *c, int n_queries)
{
    const int64_t first = c->attention.end - n_queries, n = c->raw_below;
    if (!n || first >= n || !c->attention.end) return 0; /* of nothing there is nothing raw */
    return c->attention.end <= n ? n_queries : (int)(n - first);
}

/* Returns the attention of n_queries queries, the last of which stands before `end`, to what is raw. */
static tqkv_attention tqkv__raw_attention(const tqkv_cache *c, int64_t end, int n_queries)
{
    tqkv_attention a = c->attention;
    a.keys = &c->raw[0];
    a.values = &c->raw[c->shared ? 0 : 1];
    a.tail = c->tail.head_dim ? &c->raw[2] : NULL;
    a.first.keys = a.first.values = a.first.tail = a.last.keys = a.last.values = NULL;
    a.end = end;
    a.kv_len = (int)end;
    a.n_queries = n_queries;
    return a;
}

/* -- Presets -- */

TQKV_API tqkv_cache_desc tqkv_cache_preset(tqkv_preset preset)
{
    static const tqkv_format formats[3][2] = {{TQKV_I8, TQKV_TQ4}, {TQKV_TQ5, TQKV_TQ3}, {TQKV_TQ3, TQKV_TQ2}};
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    if (preset != TQKV_SAFE && preset != TQKV_SMALL && preset != TQKV_TINY) return desc;
    desc.key_format = formats[preset][0];
    desc.value_format = formats[preset][1];
    desc.calibrate = 512;
    desc.exact_first = 4;
    desc.exact_last = 128;
    return desc;
}

/* >>cache-calls: a cache made, appended to and attended to */

/* Finds the shapes of what is kept besides; follows tqkv__cache_shapes. */
static tqkv_result tqkv__end_shapes(tqkv_cache *c)
{
    const int capacity = c->keys.capacity;
    if (c->asked_first < 0 || c->asked_last < 0) return TQKV__INVALID("exact_first or exact_last is negative");
    c->exact_first = c->asked_first < capacity ? c->asked_first : capacity;
    c->exact_last = c->asked_last < capacity ? c->asked_last : capacity;
    if (tqkv__end_room(c->exact_last, TQKV__APPENDED_ON_GPU) > INT_MAX) return TQKV__INVALID("exact_last is too large");
    const int64_t room = tqkv__end_room(c->exact_last, c->metal ? TQKV__APPENDED_ON_GPU : TQKV__TILE);
    for (int i = TQKV__FIRST_KEYS; i < TQKV__STREAMS; i++) {
        const bool last = tqkv__stream_kinds[i].end == TQKV__LAST_END;
        const tqkv_store *stream = tqkv__store_of(c, tqkv__stream_kinds[i].side);
        tqkv_store *s = TQKV__STORE_AT(c, i);
        if (!stream || !(last ? c->exact_last : c->exact_first)) continue;
        const bool halves = tqkv__stream_kinds[i].side != TQKV__TAIL && stream->format != TQKV_F16;
        if (!halves && (last || !c->keys.ring)) continue;
        *s = *stream;
        if (halves) s->format = TQKV_F16;
        if (halves) s->rotation = TQKV_ROTATION_ON;
        s->ring = last;
        s->capacity = last ? (int)room : c->exact_first;
    }
    return TQKV_OK;
}

static tqkv_result tqkv__cache_shapes(const tqkv_cache_desc *desc, tqkv_cache *c)
{
#define TQKV__FIELD_TAKEN(field, member, ...) c->member = desc->field;
    TQKV__CACHE_NUMBERS(TQKV__FIELD_TAKEN)
    TQKV__CACHE_SHAPE(TQKV__FIELD_TAKEN)
    TQKV__CACHE_USE(TQKV__FIELD_TAKEN)
    if (!desc->key_format) c->keys.format = TQKV_I8;
    c->values = c->keys;
    if (!c->shared) c->values.format = desc->value_format ? desc->value_format : TQKV_TQ4;
    if (desc->value_dim) c->values.head_dim = desc->value_dim;
    if (desc->ring && desc->window > desc->capacity)
        return TQKV__INVALID("window: longer than the ring's capacity, which no query would find");
    if (c->shared &&
        (c->values.head_dim != desc->head_dim || (desc->value_format && desc->value_format != c->keys.format)))
        return TQKV__INVALID("shared: value_format or value_dim is not that of the keys");
    if (!desc->tail_dim && desc->tail_format) return TQKV__INVALID("tail_format: there is no tail_dim");
    if (!desc->tail_dim) return TQKV_OK;
    c->tail = c->keys;
    c->tail.format = desc->tail_format ? desc->tail_format : TQKV_F16;
    c->tail.head_dim = desc->tail_dim;
    return TQKV_OK;
}

static void tqkv__cache_attach(tqkv_attention *a, const tqkv_cache *c)
{
    a->keys = &c->keys;
    a->values = c->shared ? &c->keys : &c->values;
    a->tail = c->tail.head_dim ? &c->tail : NULL;
    a->first.keys = tqkv__store_of(c, TQKV__FIRST_KEYS);
    a->first.values = tqkv__store_of(c, c->shared ? TQKV__FIRST_KEYS : TQKV__FIRST_VALUES);
    a->first.tail = tqkv__store_of(c, TQKV__FIRST_TAIL);
    a->last.keys = tqkv__store_of(c, TQKV__LAST_KEYS);
    a->last.values = tqkv__store_of(c, c->shared ? TQKV__LAST_KEYS : TQKV__LAST_VALUES);
}

static tqkv_result tqkv__cache_resolve(const tqkv_cache_desc *desc, tqkv_cache *c)
{
    tqkv__attention resolved;
    memset(c, 0, sizeof *c);
    c->learnt_at = -1;
    tqkv_result r = tqkv__cache_shapes(desc, c);
    if (r == TQKV_OK) r = tqkv__end_shapes(c);
    if (r == TQKV_OK) r = tqkv__raw_shapes(desc, c);
    if (r != TQKV_OK) return r;
    c->keys.strides = desc->strides.k;
    c->values.strides = desc->strides.v;
    c->attention.query_strides = desc->strides.q;
    c->attention.output_strides = desc->strides.out;
    c->attention.query_type = c->attention.output_type = desc->type;
    tqkv__cache_attach(&c->attention, c);
    c->attention.n_queries = 1;
    c->attention.whole_window = true;
    r = tqkv__attention_shape(&c->attention, &resolved);
    if (r != TQKV_OK) return r;
    c->attention = resolved.call;
    if (desc->matrix_group < 0) return TQKV__INVALID("matrix_group is negative");
    if (c->metal && !tqkv__backend_of(c->metal)->has_kernels(c->keys.head_dim, c->values.head_dim, c->tail.head_dim))
        return TQKV__REFUSE(UNSUPPORTED, "metal: the GPU has no kernels for this head_dim, value_dim and tail_dim");
    c->memory = c->metal ? tqkv__backend_of(c->metal)->memory : c->attention.allocator;
    return TQKV_OK;
}

static bool tqkv__divide_memory(const tqkv_cache *c, size_t sinks_size, tqkv__cache_memory *at)
{
    size_t channels;
    memset(at, 0, sizeof *at);
    at->size = sizeof *c;
    return tqkv__count_channels(c, TQKV__CACHE_STREAMS, &channels) &&
           tqkv__reserve(&at->size, sinks_size, &at->sinks) &&
           tqkv__reserve(&at->size, TQKV__CHANNELS * channels * sizeof(float), &at->channels) &&
           tqkv__reserve_stores(c, 0, tqkv__stores_within(c), at);
}

static const float *tqkv__given(const tqkv_cache_desc *desc, const tqkv_cache *c, int i, tqkv__channels kind,
                                size_t *stride)
{
    const float *keys = kind == TQKV__CENTERS ? desc->key_center : desc->key_scale;
    const bool value = i == TQKV__VALUES;
    *stride = (size_t)(value ? c->values.head_dim : c->keys.head_dim + c->tail.head_dim);
    if (value) return kind == TQKV__CENTERS ? desc->value_center : desc->value_scale;
    return keys && i == TQKV__TAIL ? keys + c->keys.head_dim : keys;
}

static tqkv_result tqkv__check_given(const tqkv_cache_desc *desc, const tqkv_cache *c)
{
    if (c->shared && (desc->value_center || desc->value_scale))
        return TQKV__INVALID("value_center, value_scale: the values have those of the keys");
    for (int i = TQKV__KEYS; i <= TQKV__VALUES; i++)
        for (int kind = TQKV__CENTERS; kind <= TQKV__SCALES; kind++) {
            size_t stride;
            const float *values = tqkv__given(desc, c, i, (tqkv__channels)kind, &stride);
            const size_t n = (size_t)c->keys.n_kv_heads * stride;
            if ((uintptr_t)values % sizeof(float)) return TQKV__INVALID("a centre or a scale is not aligned as floats");
            if (values && !tqkv__all_finite(values, n))
                return TQKV__REFUSE(NOT_FINITE, "a centre or a scale holds NaN or infinity");
            if (values && kind == TQKV__SCALES && !tqkv__scales_valid(values, n))
                return TQKV__INVALID("a scale is not in [2^-32, 2^32]");
        }
    return TQKV_OK;
}

/* Creates a cache that, if it learns, does so from at least as many positions as one that it is made of. */
static tqkv_result tqkv__create(const tqkv_cache_desc *desc, int learn_from, tqkv_cache **out)
{
    tqkv_cache c;
    tqkv__cache_memory at, raw;
    size_t stride;
    if (!out) return TQKV__INVALID("out is NULL");
    *out = NULL;
    if (!desc) return TQKV__INVALID("desc is NULL");
    tqkv_result r = tqkv__cache_resolve(desc, &c);
    if (r == TQKV_OK) r = tqkv__check_given(desc, &c);
    if (r != TQKV_OK) return r;
    if (c.learning && learn_from > c.learn_from) tqkv__learn_from(&c, learn_from);
    const size_t sinks_size = desc->sinks ? (size_t)c.attention.n_heads * sizeof(float) : 0;
    if (!tqkv__divide_memory(&c, sinks_size, &at) || !tqkv__divide_raw(&c, &raw))
        return TQKV__INVALID(TQKV__LARGE_CACHE);
    c.size = at.size + 63;
    void *memory = c.memory.alloc(c.memory.user, c.size);
    if (!memory) return TQKV_OUT_OF_MEMORY;
    uint8_t *lines = tqkv__first_line(memory);
    c.channels = (float *)(void *)(lines + at.channels);
    tqkv__place_stores(&c, 0, tqkv__stores_within(&c), &at, lines);
    if (sinks_size) {
        memcpy(lines + at.sinks, desc->sinks, sinks_size);
        c.attention.sinks = (const float *)(const void *)(lines + at.sinks);
    }
    for (int side = 0; side < 2; side++) c.own[side] = c.ends[1][side].codes;
    c.own_room = (int)tqkv__newest_room(&c);
    *out = (tqkv_cache *)memcpy(memory, &c, sizeof c);
    tqkv__cache_attach(&(*out)->attention, *out);
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++)
        for (int k = TQKV__CENTERS; k <= TQKV__SCALES; k++) {
            const float *values = tqkv__given(desc, *out, i, (tqkv__channels)k, &stride);
            tqkv__cache_channels(*out, i, (tqkv__channels)k, values, stride);
        }
    return TQKV_OK;
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_create(const tqkv_cache_desc *desc, tqkv_cache **out)
{
    return tqkv__create(desc, 0, out);
}

TQKV__COLD TQKV_API void tqkv_cache_destroy(tqkv_cache *c)
{
    if (!c) return;
    const tqkv_allocator memory = c->memory;
    if (c->grown) memory.free(memory.user, c->grown, c->grown_size);
    tqkv__drop_raw(c);
    memory.free(memory.user, c, c->size);
}

static bool tqkv__in_cache(const tqkv_cache *c, const void *p, size_t size)
{
    return tqkv__overlap(c, c->size, p, size) || tqkv__overlap(c->grown, c->grown_size, p, size) ||
           tqkv__overlap(c->raw_memory, c->raw_size, p, size);
}

/* Opens stream i for its share of the caller's rows. Rows of k hold those of the tail, too. */
static tqkv_result tqkv__append_open(const tqkv_cache *c, int i, const void *k, const void *v, int n_tokens,
                                     tqkv__append *append)
{
    const int key_dim = c->keys.head_dim + c->tail.head_dim;
    const int64_t left = c->exact_first - c->attention.end;
    const void *src = i == TQKV__VALUES ? v : k;
    tqkv_store store = *TQKV__STORE_AT(c, i);
    store.strides =
        i == TQKV__VALUES ? c->values.strides : tqkv__strides_of(c->keys.strides, store.n_kv_heads, key_dim);
    if (i == TQKV__TAIL && k) src = (const uint8_t *)k + (size_t)c->keys.head_dim * tqkv__type_size(store.type);
    size_t bytes;
    tqkv_result r = tqkv__encode_open(&store, src, n_tokens, c->attention.end, &append->streams[i], &bytes);
    if (r != TQKV_OK) return r;
    if (tqkv__in_cache(c, src, bytes)) return TQKV__INVALID("k or v overlaps the cache");
    if (store.channel_scale) append->streams[i].inverses = tqkv__channel_room(c, i, TQKV__INVERSES);
    if (i != TQKV__TAIL && !c->metal) {
        const bool first = left > 0 && tqkv__keeps_halves(c, TQKV__FIRST_KEYS + i);
        append->job.as_halves[append->job.n_streams] =
            (c->learning && tqkv__keeps_halves(c, TQKV__RAW + i) ? TQKV__RAW_HALVES : 0) |
            (first || tqkv__keeps_halves(c, TQKV__LAST_KEYS + i) ? TQKV__ROTATED_HALVES : 0);
    }
    tqkv__add_stream(&append->job, &append->streams[i], src);
    if (!tqkv__has_store(c, TQKV__FIRST_KEYS + i) || left <= 0) return TQKV_OK;
    tqkv_store first = *TQKV__STORE_AT(c, TQKV__FIRST_KEYS + i);
    first.strides = store.strides;
    r = tqkv__stream_open(&first, &append->first[i]);
    tqkv__add_stream(&append->first_job, &append->first[i], src);
    return r;
}

/* Gets memory for rings of `room` positions, or the cache's own, and NULL, where that is enough. */
static tqkv_result tqkv__get_newest(const tqkv_cache *c, int64_t room, tqkv_store rings[2], void **memory, size_t *size)
{
    size_t at[2] = {0, 0};
    for (int side = 0; side < 2; side++) {
        if (!rings[side].head_dim) continue;
        rings[side].capacity = (int)room;
        rings[side].codes = c->own[side];
        rings[side].codes_size = tqkv_codes_size(&rings[side]);
        if (room > c->own_room && (!rings[side].codes_size || !tqkv__reserve(size, rings[side].codes_size, &at[side])))
            return TQKV_OUT_OF_MEMORY;
    }
    if (!*size) return TQKV_OK;
    *size += 63;
    *memory = c->memory.alloc(c->memory.user, *size);
    if (!*memory) return TQKV_OUT_OF_MEMORY;
    for (int side = 0; side < 2; side++)
        if (rings[side].head_dim) rings[side].codes = tqkv__first_line(*memory) + at[side];
    return TQKV_OK;
}

/* Makes the rings of the newest halves large enough for n_tokens more, or small again: then in the cache's memory. */
static tqkv_result tqkv__fit_newest(tqkv_cache *c, int n_tokens)
{
    const int64_t most = (int64_t)c->keys.capacity - c->exact_last + 1; /* of a ring no query sees more */
    int64_t room = tqkv__end_room(c->exact_last, n_tokens < most ? n_tokens : most), from = c->exact_held;
    tqkv_store rings[2] = {c->ends[1][0], c->ends[1][1]};
    void *memory = NULL;
    size_t size = 0;
    if (room < c->own_room) room = c->own_room;
    if (!n_tokens || !tqkv__newest_room(c) || room == tqkv__newest_room(c)) return TQKV_OK;
    if (c->metal) return TQKV__REFUSE(OUT_OF_RANGE, "n_tokens: a GPU has room for the halves of 512");
    if (room > INT_MAX) return TQKV_OUT_OF_MEMORY;
    const tqkv_result r = tqkv__get_newest(c, room, rings, &memory, &size);
    if (r != TQKV_OK) return r;
    if (from < c->attention.end + n_tokens - room) from = c->attention.end + n_tokens - room;
    for (int side = 0; side < 2; side++) {
        tqkv__stream old, ring;
        if (!rings[side].head_dim || tqkv__stream_open(&c->ends[1][side], &old) != TQKV_OK ||
            tqkv__stream_open(&rings[side], &ring) != TQKV_OK)
            continue;
        tqkv__move_rows(&old, from, &ring, from, c->attention.end - from);
        c->ends[1][side] = rings[side];
    }
    if (c->grown) c->memory.free(c->memory.user, c->grown, c->grown_size);
    c->grown = memory;
    c->grown_size = size;
    c->exact_held = from < c->attention.end ? from : c->attention.end;
    return TQKV_OK;
}

TQKV_API tqkv_result tqkv_cache_append(tqkv_cache *c, const void *k, const void *v, int n_tokens)
{
    tqkv__append append;
    tqkv_result r = TQKV_OK;
    if (!c) return TQKV__INVALID("the cache is NULL");
    if (c->shared && v) return TQKV__INVALID("v: the keys are the values");
    const int64_t left = c->exact_first - c->attention.end;
    tqkv__encode_job_open(&append.job, &c->attention.parallel, n_tokens, c->attention.end);
    tqkv__encode_job_open(&append.first_job, &c->attention.parallel, left < n_tokens ? (int)left : n_tokens,
                          c->attention.end);
    for (int i = 0; r == TQKV_OK && i < TQKV__CACHE_STREAMS; i++)
        if (tqkv__has_store(c, i)) r = tqkv__append_open(c, i, k, v, n_tokens, &append);
    if (r == TQKV_OK) r = tqkv__check_sources(&append.job);
    if (r == TQKV_OK) r = tqkv__fit_newest(c, n_tokens);
    if (r != TQKV_OK) return r;
    if (c->metal) {
        r = tqkv__backend_of(c->metal)->append(c->metal, c, k, v, n_tokens);
        if (r == TQKV_OK) tqkv__count_append(c, n_tokens);
        return r;
    }
    if (!c->learning && n_tokens) tqkv__drop_raw(c); /* the queries that read them have come */
    if (c->learning)
        r = tqkv__append_learning(c, &append);
    else
        tqkv__append_rows(c, &append);
    if (r == TQKV_OK) tqkv__cache_advance(c, n_tokens);
    return r;
}

static void tqkv__count_ends(const tqkv_cache *c, tqkv_attention *a)
{
    const tqkv__range newest = tqkv__range_of(c, TQKV__LAST_KEYS);
    a->first.n = (int)c->exact_below;
    a->last.n = newest.to - newest.from < c->exact_last ? (int)(newest.to - newest.from) : c->exact_last;
    a->last.from = c->exact_from;
}

static tqkv_attention tqkv__view_codes(const tqkv_cache *c)
{
    tqkv_attention view = c->attention;
    view.kv_len = (int)(c->attention.end - c->first);
    tqkv__count_ends(c, &view);
    const bool full = c->exact_held <= c->attention.end - tqkv__newest_room(c); /* of halves that came */
    if (!full && view.last.from < c->exact_held) view.last.from = c->exact_held;
    return view;
}

#define TQKV__NO_RAW "a copy has no halves for queries at positions that its cache has learned from"

static tqkv_result tqkv__check_newest(const tqkv_cache *c, const tqkv_attention *call)
{
    if (!tqkv__newest_room(c) || tqkv__exact_oldest(call, c->first) >= c->exact_held) return TQKV_OK;
    return TQKV__REFUSE(OUT_OF_RANGE,
                        "n_queries: above 64 and what the last append brought; exact_last has halves for no more");
}

TQKV_API tqkv_result tqkv_cache_view(const tqkv_cache *c, int n_queries, tqkv_attention *out)
{
    if (!c || !out || n_queries < 0) return TQKV__INVALID("the cache or out is NULL, or n_queries negative");
    const int n_raw = tqkv__raw_queries(c, n_queries);
    if (n_raw && n_raw < n_queries)
        return TQKV__REFUSE(OUT_OF_RANGE,
                            "n_queries: they stand on both sides of the position at which the cache learned");
    if (n_raw && !c->raw[0].codes) return TQKV__REFUSE(OUT_OF_RANGE, TQKV__NO_RAW);
    tqkv_attention view = n_raw ? tqkv__raw_attention(c, c->attention.end, n_queries) : tqkv__view_codes(c);
    view.n_queries = n_queries;
    if (n_queries && view.end && !view.kv_len) return TQKV__REFUSE(OUT_OF_RANGE, "no position is resident");
    const tqkv_result r = n_queries && !n_raw ? tqkv__check_newest(c, &view) : TQKV_OK;
    if (r == TQKV_OK) *out = view;
    return r;
}

/* Opens the attention of the queries at some positions to codes, or to what is raw, and its request. first: the
   position of the first row of q and out */
static tqkv_result tqkv__cut_queries(const tqkv_cache *c, bool raw, tqkv__range positions, int64_t first, const void *q,
                                     void *out, tqkv__attention *a, tqkv__request *request)
{
    const int n_queries = (int)(positions.to - positions.from);
    tqkv_attention call = raw ? tqkv__raw_attention(c, positions.to, n_queries) : c->attention;
    call.n_queries = n_queries;
    if (!raw) tqkv__count_ends(c, &call);
    tqkv_result r = tqkv__attention_streams(&call, a);
    a->first = raw ? 0 : c->first; /* after a truncation fewer positions than kv_len's default, or none */
    a->matrix_group = c->matrix_group;
    if (r == TQKV_OK && !raw) r = tqkv__check_newest(c, &a->call);
    if (r == TQKV_OK) r = tqkv__attention_ends(a);
    if (r != TQKV_OK) return r;
    const size_t row = (size_t)(positions.from - first) * (size_t)call.n_heads,
                 wide = tqkv__type_size(call.output_type);
    void *to = (uint8_t *)out + tqkv__row_begin(a, a->call.output_strides, row) * wide;
    if (tqkv__in_cache(c, to, a->out_size)) return TQKV__INVALID("out overlaps the cache");
    return tqkv__cut_whole(a, tqkv__query_at(a, q, row), to, request);
}

/* Checks the arrays of all queries: a request looks at its own alone. */
static TQKV__NOINLINE tqkv_result tqkv__check_all_queries(const tqkv_cache *c, const void *q, int n_queries, void *out)
{
    tqkv__attention a;
    tqkv_attention call = c->attention;
    call.n_queries = n_queries;
    const tqkv_result r = tqkv__attention_shape(&call, &a);
    return r == TQKV_OK ? tqkv__check_q_out(&a, q, out) : r;
}

/* Queries at positions that are read raw and the others have a request each. */
TQKV_API tqkv_result tqkv_cache_attend(tqkv_cache *c, const void *q, int n_queries, void *out)
{
    tqkv__attention a[2];
    tqkv__request requests[2];
    if (!c || n_queries < 0) return TQKV__INVALID("the cache is NULL or n_queries negative");
    if (n_queries == 0) return TQKV_OK;
    const int n_raw = tqkv__raw_queries(c, n_queries);
    const int64_t first = c->attention.end - n_queries;
    const tqkv__range raw = {first, first + n_raw}, coded = {raw.to, c->attention.end};
    const bool both = n_raw && n_raw < n_queries;
    tqkv_result r = both ? tqkv__check_all_queries(c, q, n_queries, out) : TQKV_OK;
    if (r == TQKV_OK && n_raw && !c->raw[0].codes) r = TQKV__REFUSE(OUT_OF_RANGE, TQKV__NO_RAW);
    if (r == TQKV_OK && n_raw) r = tqkv__cut_queries(c, true, raw, first, q, out, &a[0], &requests[0]);
    if (r == TQKV_OK && n_raw < n_queries)
        r = tqkv__cut_queries(c, false, coded, first, q, out, &a[both], &requests[both]);
    if (r != TQKV_OK) return r;
    return c->metal ? tqkv__backend_of(c->metal)->attend(c->metal, c, q, n_queries, out)
                    : tqkv__run_job(requests, both ? 2 : 1);
}

TQKV_API int64_t tqkv_cache_end(const tqkv_cache *c) { return c ? c->attention.end : 0; }

TQKV_API size_t tqkv_cache_bytes(const tqkv_cache *c)
{
    size_t bytes = 0;
    for (int i = 0; c && i < TQKV__CACHE_STORES; i++) {
        const tqkv_store *s = tqkv__store_of(c, i);
        if (s) bytes += s->codes_size + s->norms_size;
    }
    for (int side = 0; c && c->grown && side < 2; side++)
        if (c->own[side])
            bytes += c->ends[1][side].codes_size / (size_t)c->ends[1][side].capacity * (size_t)c->own_room;
    return bytes;
}

/* >>cache-edit: truncate, remove, keep, fork. */

/* Lets positions below `from` be read as codes after an edit. */
static void tqkv__exact_begins(tqkv_cache *c, int64_t from)
{
    c->exact_from = c->exact_last && !c->learning ? from : 0;
}

/* Forgets what the cache has learned: it is raw again, and learns. */
static void tqkv__unlearn(tqkv_cache *c)
{
    tqkv__name_channels(c, TQKV__KEYS, TQKV__CENTERS, false);
    tqkv__name_channels(c, TQKV__KEYS, TQKV__SCALES, false);
    c->learning = true;
    c->raw_below = INT64_MAX;
    c->first = c->exact_below = c->exact_from = c->exact_held = 0;
}

/* Whether an edit that takes positions back from `end` on takes some that the last append has learned from. The cache
   then is as if they had never come. */
static bool tqkv__takes_learnt(const tqkv_cache *c, int64_t end)
{
    return !c->learning && end < c->raw_below && c->raw[0].codes;
}

/* After an edit from `first` on, which may move positions down, what was raw is no longer what the cache holds. */
static void tqkv__begin_edit(tqkv_cache *c, int64_t first)
{
    c->learnt_at = -1;
    if (!c->learning && first < c->raw_below) tqkv__drop_raw(c);
    if (c->raw_end > first) c->raw_end = first;
}

TQKV_API tqkv_result tqkv_cache_truncate(tqkv_cache *c, int64_t end)
{
    if (!c) return TQKV__INVALID("the cache is NULL");
    if (end < 0 || end > c->attention.end || (end < c->first && end != 0))
        return TQKV__REFUSE(OUT_OF_RANGE, "end: negative, behind the cache's end, or gone from its ring");
    if (end < c->attention.end) c->learnt_at = -1;
    if (tqkv__takes_learnt(c, end) || (end == 0 && c->raw[0].head_dim && !c->learning)) tqkv__unlearn(c);
    if (c->raw_end > end) c->raw_end = end;
    if (end == 0) c->first = 0;
    if (c->exact_below > end) c->exact_below = end;
    if (end < c->attention.end) tqkv__exact_begins(c, tqkv__exact_kept(c) < end ? tqkv__exact_kept(c) : end);
    if (c->exact_held > end) c->exact_held = end;
    c->attention.end = end;
    return TQKV_OK;
}

/* Moves n positions down: halves of the first ones as far as there are any, of the newest if all have them. */
static void tqkv__move_positions(const tqkv_cache *c, int64_t source, int64_t target, int64_t n)
{
    const int64_t below = c->exact_below - source < n ? c->exact_below - source : n;
    for (int i = 0; i < TQKV__CACHE_STORES; i++) {
        tqkv__stream s;
        const tqkv_store *store = tqkv__store_of(c, i);
        const bool first = tqkv__stream_kinds[i].end == TQKV__FIRST_END;
        const bool newest = tqkv__stream_kinds[i].end == TQKV__LAST_END;
        if (!store || (newest && target < c->exact_held) || c->learning != (i >= TQKV__RAW)) continue;
        if (tqkv__stream_open(store, &s) == TQKV_OK) tqkv__move_rows(&s, source, &s, target, first ? below : n);
    }
}

static void tqkv__reverse_rows(uint8_t *rows, int n, size_t size)
{
    uint8_t row[2 * TQKV_MAX_HEAD_DIM];
    for (uint8_t *last = rows + (size_t)n * size; rows + size < last; rows += size) {
        last -= size;
        memcpy(row, rows, size);
        memcpy(rows, last, size);
        memcpy(last, row, size);
    }
}

/* Turns the rings of halves: position p + by becomes position p. */
static void tqkv__turn_rings(const tqkv_cache *c, int64_t by)
{
    for (int i = TQKV__LAST_KEYS; i <= TQKV__LAST_VALUES; i++) {
        tqkv__stream s;
        if (!tqkv__has_store(c, i) || tqkv__stream_open(TQKV__STORE_AT(c, i), &s) != TQKV_OK) continue;
        const int n = (int)(by % s.capacity);
        for (int h = 0; h < s.n_kv_heads; h++) {
            uint8_t *rows = tqkv__codes_at(&s, h, 0);
            tqkv__reverse_rows(rows, n, s.row_bytes);
            tqkv__reverse_rows(rows + (size_t)n * s.row_bytes, s.capacity - n, s.row_bytes);
            tqkv__reverse_rows(rows, s.capacity, s.row_bytes);
        }
    }
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_remove(tqkv_cache *c, int64_t first, int64_t count)
{
    if (!c) return TQKV__INVALID("the cache is NULL");
    if (c->keys.ring) return TQKV__REFUSE(UNSUPPORTED, "remove: the cache is a ring");
    if (count < 0) return TQKV__INVALID("count is negative");
    if (first < 0 || first > c->attention.end || count > c->attention.end - first)
        return TQKV__REFUSE(OUT_OF_RANGE, "first, count: not among the resident positions");
    if (count) tqkv__begin_edit(c, first);
    const int64_t behind = first + count, n = c->attention.end - behind;
    tqkv__move_positions(c, behind, first, n);
    const int64_t kept = tqkv__exact_kept(c);
    if (first < c->exact_held) {
        tqkv__turn_rings(c, count);
        c->exact_held = (behind > c->exact_held ? behind : c->exact_held) - count;
    }
    if (count) tqkv__exact_begins(c, first < kept ? (behind > kept ? behind : kept) - count : kept);
    if (first < c->exact_below) c->exact_below = c->exact_below > behind ? c->exact_below - count : first;
    c->attention.end -= count;
    tqkv__follow_tail(c);
    return TQKV_OK;
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_keep(tqkv_cache *c, int n, const int *kept, int n_kept)
{
    if (!c) return TQKV__INVALID("the cache is NULL");
    if (n < 0 || n_kept < 0 || (n_kept > 0 && !kept)) return TQKV__INVALID("n or n_kept is negative, or kept is NULL");
    if (n > c->attention.end - c->first) return TQKV__REFUSE(OUT_OF_RANGE, "n: more positions than are resident");
    if ((uintptr_t)kept % sizeof(int) || tqkv__in_cache(c, kept, (size_t)n_kept * sizeof(int)))
        return TQKV__INVALID("kept: not aligned as int, or in the cache");
    for (int i = 0; i < n_kept; i++) {
        if (kept[i] < 0 || kept[i] >= n) return TQKV__REFUSE(OUT_OF_RANGE, "kept: not one of the newest n positions");
        if (i && kept[i] <= kept[i - 1]) return TQKV__INVALID("kept: not ascending");
    }
    const int64_t first = c->attention.end - n;
    int64_t same = first; /* positions below do not move */
    for (int i = 0; i < n_kept && kept[i] == i; i++) same++;
    if (n_kept < n && tqkv__takes_learnt(c, same) && c->raw_end == c->attention.end) tqkv__unlearn(c);
    if (n_kept < n) tqkv__begin_edit(c, same);
    const int64_t kept_from = tqkv__exact_kept(c);
    int64_t below = first;
    for (int i = 0, next; i < n_kept; i = next) {
        for (next = i + 1; next < n_kept && kept[next] == kept[next - 1] + 1;) next++;
        tqkv__move_positions(c, first + kept[i], first + i, next - i);
        for (int j = i; j < next && first + kept[j] < c->exact_below;) below = first + ++j;
    }
    c->attention.end = first + n_kept;
    if (c->exact_below > below) c->exact_below = below;
    if (same < c->exact_held) c->exact_held = c->attention.end; /* their rows did not move */
    if (n_kept < n) tqkv__exact_begins(c, same < kept_from ? c->attention.end : kept_from);
    tqkv__settle_all(c);
    tqkv__follow_tail(c);
    return TQKV_OK;
}

static tqkv_cache_desc tqkv__desc_of(const tqkv_cache *c)
{
#define TQKV__FIELD_OF(field, member, ...) desc.field = c->member;
    tqkv_cache_desc desc;
    memset(&desc, 0, sizeof desc);
    TQKV__CACHE_NUMBERS(TQKV__FIELD_OF)
    TQKV__CACHE_SHAPE(TQKV__FIELD_OF)
    TQKV__CACHE_USE(TQKV__FIELD_OF)
    desc.strides.k = c->keys.strides;
    desc.strides.v = c->values.strides;
    desc.strides.q = c->attention.query_strides;
    desc.strides.out = c->attention.output_strides;
    return desc;
}

static void tqkv__take_use(const tqkv_cache_desc *from, tqkv_cache_desc *to)
{
    if (from->type) to->type = from->type;
    if (from->sinks) to->sinks = from->sinks;
    if (from->parallel.run) to->parallel = from->parallel;
    if (from->allocator.alloc || from->allocator.free) to->allocator = from->allocator;
    if (from->metal) to->metal = from->metal;
    if (from->matrix_group) to->matrix_group = from->matrix_group;
    if (from->tag) to->tag = from->tag;
    to->non_causal = to->non_causal || from->non_causal;
    const tqkv_strides all[] = {from->strides.k, from->strides.v, from->strides.q, from->strides.out};
    bool has = false;
    for (int i = 0; i < 4; i++) has = has || all[i].token || all[i].head;
    if (has) to->strides = from->strides;
}

static tqkv_result tqkv__check_same_given(const tqkv_cache_desc *desc, const tqkv_cache *c)
{
    tqkv_result r = tqkv__check_given(desc, c);
    for (int i = 0; r == TQKV_OK && i < TQKV__CACHE_STREAMS; i++)
        for (int k = TQKV__CENTERS; k <= TQKV__SCALES; k++) {
            size_t stride;
            const tqkv_store *s = tqkv__store_of(c, i);
            const float *given = s ? tqkv__given(desc, c, i, (tqkv__channels)k, &stride) : NULL;
            if (!given) continue;
            const float *own = k == TQKV__CENTERS ? s->center : s->channel_scale;
            const size_t dim = (size_t)s->head_dim;
            for (size_t h = 0; h < (size_t)s->n_kv_heads; h++)
                if (!own || memcmp(given + h * stride, own + h * dim, dim * sizeof(float)) != 0)
                    return TQKV__INVALID("desc: a centre or a scale is neither NULL nor that of the cache or snapshot");
        }
    return r;
}

static tqkv_result tqkv__check_match(const tqkv_cache_desc *wanted, const tqkv_cache_desc *found)
{
#define TQKV__FIELD_MATCHES(field, ...) \
    if (meant.field != 0 && meant.field != found->field) \
        return TQKV__INVALID("desc: " #field " is neither 0 nor that of the cache or snapshot");
    tqkv_cache_desc meant = *wanted;
    if (meant.softcap < 0.0f && found->softcap == 0.0f) meant.softcap = 0.0f; /* off in both */
    TQKV__CACHE_NUMBERS(TQKV__FIELD_MATCHES)
    TQKV__CACHE_SHAPE(TQKV__FIELD_MATCHES)
    if (meant.tag && found->tag && meant.tag != found->tag)
        return TQKV__INVALID("desc: tag is neither 0 nor that of the cache or snapshot: another model's");
    return TQKV_OK;
}

/* Copies a store, or makes halves of a stream that was F16. */
static tqkv_result tqkv__fork_store(const tqkv_cache *c, int i, const tqkv_cache *copy, const tqkv_parallel *parallel)
{
    const tqkv_store *to = tqkv__store_of(copy, i), *from = tqkv__store_of(c, i);
    const tqkv__range range = tqkv__range_of(c, i);
    if (!to || range.from >= range.to) return TQKV_OK;
    if (!from) { /* a ring would have kept what is gone */
        TQKV_ASSERT(range.from >= c->first);
        from = tqkv__store_of(c, tqkv__stream_kinds[i].side);
    }
    return tqkv__convert(to, from, range.from, (int)(range.to - range.from), parallel);
}

static tqkv_result tqkv__copy_cache(const tqkv_cache *c, tqkv_cache *copy, const tqkv_parallel *parallel)
{
    tqkv_result r = c->learning && c->attention.end ? tqkv__get_raw(copy) : TQKV_OK;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv_store *from = tqkv__store_of(c, i);
        if (!from) continue;
        tqkv__cache_channels(copy, i, TQKV__CENTERS, from->center, (size_t)from->head_dim);
        tqkv__cache_channels(copy, i, TQKV__SCALES, from->channel_scale, (size_t)from->head_dim);
    }
    for (int i = 0; r == TQKV_OK && i < TQKV__CACHE_STORES; i++) r = tqkv__fork_store(c, i, copy, parallel);
    copy->calibrate = c->calibrate;
    copy->raw_below = c->raw_below;
    copy->first = c->first;
    copy->exact_below = c->exact_below;
    copy->exact_from = c->exact_from;
    copy->exact_held = tqkv__range_of(c, TQKV__LAST_KEYS).from;
    copy->attention.end = c->attention.end;
    if (r == TQKV_OK) tqkv__settle_all(copy);
    if (r == TQKV_OK) tqkv__follow_tail(copy);
    return r;
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_fork(const tqkv_cache *c, const tqkv_cache_desc *desc, tqkv_cache **out)
{
    if (!out) return TQKV__INVALID("out is NULL");
    *out = NULL;
    if (!c) return TQKV__INVALID("the cache is NULL");
    tqkv_cache_desc copied = tqkv__desc_of(c);
    tqkv_cache *copy;
    if (desc) {
        if (desc->capacity) copied.capacity = desc->capacity;
        if (desc->key_format) copied.key_format = desc->key_format;
        if (desc->value_format || c->shared)
            copied.value_format = desc->value_format ? desc->value_format : copied.key_format;
        if (desc->tail_format) copied.tail_format = desc->tail_format;
        copied.ring = copied.ring || desc->ring;
        tqkv_result match = tqkv__check_match(desc, &copied);
        if (match == TQKV_OK) match = tqkv__check_same_given(desc, c);
        if (match != TQKV_OK) return match;
        tqkv__take_use(desc, &copied);
    }
    const int64_t resident = c->attention.end - c->first, least = resident > c->exact_below ? resident : c->exact_below;
    if (copied.capacity > 0 && copied.capacity < least)
        return TQKV__REFUSE(OUT_OF_RANGE, "capacity: too small for the resident or for the first positions");
    if (!c->learning) copied.calibrate = 0;
    tqkv_result r = tqkv__create(&copied, c->learn_from, &copy);
    if (r != TQKV_OK) return r;
    if ((r = tqkv__copy_cache(c, copy, &copied.parallel)) == TQKV_OK)
        *out = copy;
    else
        tqkv_cache_destroy(copy);
    return r;
}

/* >>snapshot: caches and stores as bytes, all little-endian

   A cache:
     offset  bytes  field                                 offset  bytes  field
          0      8  "tqkv" CR LF SUB LF                        80      4  softcap (float32)
          8      4  snapshot version                           84      4  calibrate
         12      4  bytes of the header, with its hash         88      4  exact_first
         16      8  tag                                        92      4  exact_last
         24      4  version of the codes                       96      4  first positions that are kept besides
         28      4  head_dim                                  100      4  positions whose queries need halves that
         32      4  head_dim of the values                                are not here
         36      4  head_dim of the tail, or 0                104      4  while it learns: new positions to learn from
         40      4  n_kv_heads                                108      4  and the positions after which it learns
         44      4  n_heads                                   112      4  pairs
         48      4  capacity                                  116      4  rotary_dim
         52      4  key format                                120      8  oldest resident position
         56      4  value format                              128      8  end
         60      4  tail format, or 0                         136      8  exact_from
         64      4  0                                         144      8  XXH3-64 of the bytes before
         68      4  bit 0: ring; 1: shared; 2: the          then, for each stream (keys, values unless shared, tail):
                    cache has not learned yet; 8 to 10:               centre, then scale [n_kv_heads][head_dim], if any
                    keys, values and tail have a                      codes [n_kv_heads][positions][row_bytes]
                    centre; 16 to 18: a scale                         norms [n_kv_heads][positions][norms_per_row]
         72      4  window                                         8  XXH3-64 of these
         76      4  scale (float32)

   Behind the streams come, likewise but without centre and scale, what is kept of the first positions' keys, values and
   tail, then the halves of the newest keys and values, as far as the cache has these stores. The newest halves are
   those of the positions from exact_from on, but no more than an edit leaves, see tqkv__exact_kept. In a cache that has
   not learned yet all these have no positions; behind them come the rows as they came, of keys and values as halves,
   and of the tail.

   Positions of a store:
     offset  bytes  field                                 offset  bytes  field
          0      8  "tqks" CR LF SUB LF                        32      4  block_scale (float32); 1 without effect
          8      4  snapshot version                           36      4  0
         12      4  bytes of the header, with its hash         40      8  first position
         16      4  format                                     48      8  number of positions
         20      4  head_dim                                   56      8  XXH3-64 of centre and scale, as there are,
         24      4  n_kv_heads                                            [n_kv_heads][head_dim] each; 0 without
         28      4  bit 0: unrotated; 1: has a centre;         64      8  XXH3-64 of the bytes before
                    2: F16, rotated; 3: has a scale         then codes, norms and their hash, as above

   All versions begin with magic, version and size, so that a build knows an older or newer snapshot from a damaged
   one. */

#define TQKV__SNAPSHOT_VERSION  7  /* of both kinds */
#define TQKV__CODES_VERSION     3  /* changes with the bytes that encoding gives */
#define TQKV__NAME_SIZE         16 /* magic, version, size */
#define TQKV__HEADER_FIELDS     24
#define TQKV__HEADER_SIZE       144 /* without its hash */
#define TQKV__STORE_HEADER_SIZE 64
#define TQKV__HASH_SIZE         8

static void tqkv__put(uint8_t *bytes, int n, uint64_t x)
{
    for (int i = 0; i < n; i++) bytes[i] = (uint8_t)(x >> (8 * i));
}

static uint64_t tqkv__get(const uint8_t *bytes, int n)
{
    uint64_t x = 0;
    for (int i = 0; i < n; i++) x |= (uint64_t)bytes[i] << (8 * i);
    return x;
}

#define TQKV__CUT     "the snapshot is cut short"
#define TQKV__NEWER   "the snapshot was written by a newer version of tqkv"
#define TQKV__OLDER   "the snapshot was written by an older version of tqkv, whose codes are others: make it anew"
#define TQKV__DAMAGED "the snapshot is damaged: a checksum differs"

/* A snapshot being written or read: one of `write` and `read` is set. Hashes every byte. */
typedef struct tqkv__pipe {
    tqkv_write write;
    tqkv_read read;
    void *user;
    XXH3_state_t hash;
} tqkv__pipe;

static tqkv_result tqkv__move(tqkv__pipe *pipe, uint8_t *bytes, size_t n)
{
    for (size_t done = 0; done < n;) {
        const size_t left = n - done;
        const size_t moved =
            pipe->write ? pipe->write(pipe->user, bytes + done, left) : pipe->read(pipe->user, bytes + done, left);
        if (moved > left) return TQKV__REFUSE(IO, "read or write: more bytes than were asked for");
        if (moved == 0) return pipe->write ? TQKV__REFUSE(IO, "write: no byte") : TQKV__REFUSE(CORRUPT, TQKV__CUT);
        done += moved;
    }
    XXH3_64bits_update(&pipe->hash, bytes, n);
    return TQKV_OK;
}

/* Writes the hash of the bytes since the last hash, or compares it with the next eight bytes. */
static tqkv_result tqkv__move_hash(tqkv__pipe *pipe)
{
    uint8_t expected[8], bytes[8];
    tqkv__put(expected, 8, XXH3_64bits_digest(&pipe->hash));
    memcpy(bytes, expected, sizeof bytes);
    const tqkv_result r = tqkv__move(pipe, bytes, sizeof bytes);
    XXH3_64bits_reset(&pipe->hash);
    if (r != TQKV_OK) return r;
    return memcmp(bytes, expected, sizeof bytes) == 0 ? TQKV_OK : TQKV__REFUSE(CORRUPT, TQKV__DAMAGED);
}

static tqkv_result tqkv__move_floats(tqkv__pipe *pipe, const float *from, float *to, size_t n)
{
    uint8_t bytes[1024];
    for (size_t done = 0; done < n;) {
        const size_t count = n - done < sizeof bytes / 4 ? n - done : sizeof bytes / 4;
        if (pipe->write)
            for (size_t i = 0; i < count; i++) tqkv__put(bytes + 4 * i, 4, tqkv__bits(from[done + i]));
        const tqkv_result r = tqkv__move(pipe, bytes, 4 * count);
        if (r != TQKV_OK) return r;
        if (pipe->read)
            for (size_t i = 0; i < count; i++) to[done + i] = tqkv__float((uint32_t)tqkv__get(bytes + 4 * i, 4));
        done += count;
    }
    return TQKV_OK;
}

static tqkv_result tqkv__move_stored(tqkv__pipe *pipe, const tqkv__stream *s, tqkv__range range)
{
    tqkv_result r = TQKV_OK;
    for (int norms = 0; norms < 2; norms++)
        for (int h = 0; h < s->n_kv_heads; h++)
            for (int64_t position = range.from, n; position < range.to; position += n) {
                const int slot = tqkv__slot(s, position), room = tqkv__slots_left(s, position);
                n = range.to - position < room ? range.to - position : room;
                float *of_rows = tqkv__norms_at(s, h, slot);
                if (!norms)
                    r = tqkv__move(pipe, tqkv__codes_at(s, h, slot), (size_t)n * s->row_bytes);
                else
                    r = tqkv__move_floats(pipe, of_rows, of_rows, (size_t)n * (size_t)s->norms_per_row);
                if (r != TQKV_OK) return r;
            }
    return tqkv__move_hash(pipe);
}

/* Moves centre and scale. to_center, to_scale: the same in the cache's memory; NULL where nothing is read */
static tqkv_result tqkv__move_channels(tqkv__pipe *pipe, const tqkv__stream *s, float *to_center, float *to_scale)
{
    const size_t n = tqkv__center_size(s) / sizeof(float);
    tqkv_result r = s->center ? tqkv__move_floats(pipe, s->center, to_center, n) : TQKV_OK;
    if (r == TQKV_OK && s->channel_scale) r = tqkv__move_floats(pipe, s->channel_scale, to_scale, n);
    const bool valid = (!s->center || tqkv__all_finite(s->center, n)) &&
                       (!s->channel_scale || tqkv__scales_valid(s->channel_scale, n));
    if (r == TQKV_OK && !valid) return TQKV__REFUSE(CORRUPT, "the snapshot has a centre or a scale that none can be");
    return r;
}

static tqkv_result tqkv__move_stores(tqkv__pipe *pipe, const tqkv_cache *c)
{
    tqkv_result r = TQKV_OK;
    for (int i = 0; r == TQKV_OK && i < TQKV__CACHE_STORES; i++) {
        tqkv__stream s;
        const tqkv_store *store = tqkv__store_of(c, i);
        if (!store || (i >= TQKV__RAW && !c->learning)) continue;
        r = store->codes ? tqkv__stream_open(store, &s) : tqkv__stream_shape(store, &s); /* nothing is raw yet */
        if (r == TQKV_OK && i < TQKV__CACHE_STREAMS)
            r = tqkv__move_channels(pipe, &s, tqkv__channel_room(c, i, TQKV__CENTERS),
                                    tqkv__channel_room(c, i, TQKV__SCALES));
        if (r == TQKV_OK) r = tqkv__move_stored(pipe, &s, tqkv__range_of(c, i));
    }
    return r;
}

static void tqkv__pipe_open(tqkv__pipe *pipe, tqkv_write write, tqkv_read read, void *user)
{
    pipe->write = write;
    pipe->read = read;
    pipe->user = user;
    XXH3_INITSTATE(&pipe->hash);
    XXH3_64bits_reset(&pipe->hash);
}

static const char tqkv__magic[9] = "tqkv\r\n\x1a\n", tqkv__store_magic[9] = "tqks\r\n\x1a\n";

static void tqkv__put_name(const char *magic, size_t size, uint8_t *header)
{
    memcpy(header, magic, 8);
    tqkv__put(header + 8, 4, TQKV__SNAPSHOT_VERSION);
    tqkv__put(header + 12, 4, size + TQKV__HASH_SIZE);
}

static tqkv_result tqkv__read_header(tqkv__pipe *pipe, const char *magic, size_t size, uint8_t *header)
{
    uint8_t name[TQKV__NAME_SIZE];
    tqkv_result r = tqkv__move(pipe, header, TQKV__NAME_SIZE);
    if (r != TQKV_OK) return r;
    tqkv__put_name(magic, size, name);
    if (memcmp(header, magic, 8) != 0) return TQKV__REFUSE(CORRUPT, "no snapshot of this kind: its first bytes differ");
    const uint64_t version = tqkv__get(header + 8, 4);
    if (version > TQKV__SNAPSHOT_VERSION) return TQKV__REFUSE(CORRUPT, TQKV__NEWER);
    if (version < TQKV__SNAPSHOT_VERSION) return TQKV__REFUSE(CORRUPT, TQKV__OLDER);
    if (memcmp(header, name, sizeof name) != 0) return TQKV__REFUSE(CORRUPT, "the snapshot's header has another size");
    r = tqkv__move(pipe, header + sizeof name, size - sizeof name);
    return r == TQKV_OK ? tqkv__move_hash(pipe) : r;
}

static uint32_t tqkv__streams_with(const tqkv_cache *c, tqkv__channels kind)
{
    uint32_t bits = 0;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv_store *s = tqkv__store_of(c, i);
        if (s && (kind == TQKV__SCALES ? s->channel_scale : s->center)) bits |= 1u << i;
    }
    return bits;
}

static void tqkv__cache_header(const tqkv_cache *c, uint8_t *header)
{
#define TQKV__FIELD_TO_HEADER(field, member, number, type) fields[number] = (uint32_t)c->member;
    uint32_t fields[TQKV__HEADER_FIELDS] = {TQKV__CODES_VERSION};
    TQKV__CACHE_NUMBERS(TQKV__FIELD_TO_HEADER)
    fields[11] = (c->keys.ring ? 1u : 0u) | (c->shared ? 2u : 0u) | (c->learning ? 4u : 0u) |
                 tqkv__streams_with(c, TQKV__CENTERS) << 8 | tqkv__streams_with(c, TQKV__SCALES) << 16;
    fields[13] = tqkv__bits(c->attention.scale);
    fields[14] = tqkv__bits(c->attention.softcap);
    fields[18] = (uint32_t)tqkv__range_of(c, TQKV__FIRST_KEYS).to;
    fields[c->learning ? 20 : 19] = (uint32_t)(c->learning ? c->learn_from : c->raw_below);
    tqkv__put_name(tqkv__magic, TQKV__HEADER_SIZE, header);
    tqkv__put(header + 16, 8, c->tag);
    for (int i = 0; i < TQKV__HEADER_FIELDS; i++) tqkv__put(header + 24 + 4 * i, 4, fields[i]);
    tqkv__put(header + 120, 8, (uint64_t)c->first);
    tqkv__put(header + 128, 8, (uint64_t)c->attention.end);
    tqkv__put(header + 136, 8, (uint64_t)c->exact_from);
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_save(const tqkv_cache *c, tqkv_write write, void *user)
{
    tqkv__pipe pipe;
    uint8_t header[TQKV__HEADER_SIZE];
    if (!c || !write) return TQKV__INVALID("the cache or write is NULL");
    tqkv__cache_header(c, header);
    tqkv__pipe_open(&pipe, write, NULL, user);
    tqkv_result r = tqkv__move(&pipe, header, sizeof header);
    if (r == TQKV_OK) r = tqkv__move_hash(&pipe);
    return r == TQKV_OK ? tqkv__move_stores(&pipe, c) : r;
}

/* What a header says. */
typedef struct tqkv__header {
    tqkv_cache_desc desc;
    uint32_t has[2]; /* a bit a stream: TQKV__CENTERS, TQKV__SCALES */
    bool learning;
    int learn_from;    /* 0 unless it learns */
    int64_t raw_below; /* 0 while it does */
    int64_t first, end, exact_below, exact_from;
} tqkv__header;

/* Takes the shape that a header's fields describe; false if no cache has it. */
static bool tqkv__parse_shape(const uint32_t fields[TQKV__HEADER_FIELDS], tqkv_cache_desc *d)
{
#define TQKV__FIELD_FROM_HEADER(field, member, number, type) d->field = (type)fields[number];
    for (int i = 1; i < TQKV__HEADER_FIELDS; i++)
        if (fields[i] > (uint32_t)INT_MAX && i != 13 && i != 14) return false; /* scale and softcap are floats */
    for (int i = 7; i < 10; i++) /* formats; in C++ the enum takes 4 bits */
        if (fields[i] > 15 || (!tqkv__format_known((tqkv_format)fields[i]) && (i < 9 || fields[i]))) return false;
    if (fields[10] || fields[21] || !fields[2] || !fields[5] || !fields[3] != !fields[9] || fields[22] > 2)
        return false;
    TQKV__CACHE_NUMBERS(TQKV__FIELD_FROM_HEADER)
    d->ring = fields[11] & 1;
    d->shared = fields[11] & 2;
    d->scale = tqkv__float(fields[13]);
    d->softcap = tqkv__float(fields[14]);
    if (fields[14] >> 31 || d->scale == 0.0f) return false; /* no cache has a negative softcap */
    return !d->shared || (d->value_format == d->key_format && d->value_dim == d->head_dim);
}

/* Whether a cache can be where a header says. One that learns holds its first positions, and nothing else. */
static bool tqkv__check_positions_of(const tqkv__header *h)
{
    const tqkv_cache_desc *d = &h->desc;
    if (h->first < 0 || h->first > h->end || h->end - h->first > d->capacity || (!d->ring && h->first)) return false;
    if (h->exact_from < 0 || h->exact_from > h->end || (h->exact_from && !d->exact_last)) return false;
    if (h->exact_below > h->end || h->exact_below > d->exact_first || h->exact_below > d->capacity) return false;
    if (h->raw_below > d->calibrate || (d->calibrate && d->calibrate < TQKV__LEAST_POSITIONS)) return false;
    if (!h->learning) return !h->learn_from;
    return d->calibrate && !h->has[0] && !h->has[1] && !h->exact_below && !h->exact_from && !h->first &&
           !h->raw_below && h->learn_from >= TQKV__LEAST_POSITIONS && h->learn_from <= d->calibrate &&
           h->learn_from <= d->capacity && h->learn_from <= INT_MAX / 4 && h->end < h->learn_from;
}

/* Takes what a header says, and the shape of that cache. */
static bool tqkv__parse_header(const uint8_t *header, tqkv__header *h, tqkv_cache *checked)
{
    uint32_t fields[TQKV__HEADER_FIELDS];
    tqkv_cache_desc *d = &h->desc;
    memset(h, 0, sizeof *h);
    for (int i = 0; i < TQKV__HEADER_FIELDS; i++) fields[i] = (uint32_t)tqkv__get(header + 24 + 4 * i, 4);
    if (!tqkv__parse_shape(fields, d)) return false;
    const uint32_t streams = 1u | (d->shared ? 0u : 2u) | (d->tail_dim ? 4u : 0u);
    d->tag = tqkv__get(header + 16, 8);
    h->has[TQKV__CENTERS] = fields[11] >> 8 & streams;
    h->has[TQKV__SCALES] = fields[11] >> 16 & streams;
    h->learning = fields[11] & 4;
    if (fields[11] != ((fields[11] & 7) | h->has[TQKV__CENTERS] << 8 | h->has[TQKV__SCALES] << 16)) return false;
    h->exact_below = fields[18];
    h->raw_below = fields[19];
    h->learn_from = (int)fields[20];
    h->first = (int64_t)tqkv__get(header + 120, 8);
    h->end = (int64_t)tqkv__get(header + 128, 8);
    h->exact_from = (int64_t)tqkv__get(header + 136, 8);
    tqkv_cache_desc desc = *d;
    if (!h->learning) desc.calibrate = 0;
    return tqkv__check_positions_of(h) && tqkv__cache_resolve(&desc, checked) == TQKV_OK;
}

static void tqkv__set_range(tqkv_cache *c, const tqkv__header *h)
{
    c->first = h->first;
    c->attention.end = h->end;
    c->exact_below = h->exact_below;
    c->exact_from = h->exact_from;
    c->learning = h->learning;
    c->raw_below = h->learning ? INT64_MAX : h->raw_below;
    c->exact_held = tqkv__range_of(c, TQKV__LAST_KEYS).from;
}

/* A reader that holds the first `filled` bytes and has passed on `taken` of them. */
typedef struct tqkv__read_ahead {
    tqkv_read read;
    void *user;
    tqkv_allocator memory;
    uint8_t *bytes;
    size_t size, filled, taken;
} tqkv__read_ahead;

static size_t tqkv__read_held(void *user, void *bytes, size_t n)
{
    tqkv__read_ahead *a = (tqkv__read_ahead *)user;
    const size_t held = a->filled - a->taken;
    if (!held) return a->read(a->user, bytes, n);
    n = n < held ? n : held;
    memcpy(bytes, a->bytes + a->taken, n);
    a->taken += n;
    return n;
}

static void tqkv__drop_held(tqkv__read_ahead *a)
{
    if (a->bytes) a->memory.free(a->memory.user, a->bytes, a->size);
}

/* Reads until `wanted` bytes are held. The buffer is at most 64 KiB or twice the bytes that have arrived. */
static tqkv_result tqkv__hold(tqkv__read_ahead *a, size_t wanted)
{
    while (a->filled < wanted) {
        if (a->filled == a->size) {
            const size_t size = a->size ? 2 * a->size : 65536;
            uint8_t *bytes = (uint8_t *)a->memory.alloc(a->memory.user, size);
            if (!bytes) return TQKV_OUT_OF_MEMORY;
            if (a->filled) memcpy(bytes, a->bytes, a->filled);
            tqkv__drop_held(a);
            a->bytes = bytes;
            a->size = size;
        }
        const size_t end = a->size < wanted ? a->size : wanted,
                     room = end - a->filled; /* never reads past the snapshot */
        const size_t n = a->read(a->user, a->bytes + a->filled, room);
        if (n > room) return TQKV__REFUSE(IO, "read: more bytes than were asked for");
        if (n == 0) return TQKV__REFUSE(CORRUPT, TQKV__CUT);
        a->filled += n;
    }
    return TQKV_OK;
}

/* Returns the bytes to read before the cache is created: none up to 1 MiB, then a sixteenth of the cache's size, or all
   that the header announces. So a file that was cut short cannot make load allocate much. */
static size_t tqkv__wanted_ahead(const tqkv_cache *c, const uint32_t has[2])
{
    size_t all = 0, announced = 0;
    for (int i = 0; i < TQKV__CACHE_STORES; i++) {
        const tqkv_store *s = tqkv__store_of(c, i); /* has no memory yet */
        const tqkv__range range = tqkv__range_of(c, i);
        if (!s || (i >= TQKV__RAW && !c->learning)) continue;
        const size_t rows = tqkv_codes_size(s) + tqkv_norms_size(s);
        const size_t center = i < TQKV__CACHE_STREAMS ? (size_t)s->n_kv_heads * (size_t)s->head_dim * sizeof(float) : 0;
        all += rows + TQKV__CHANNELS * center; /* there is always room for them */
        announced += rows / (size_t)s->capacity * (size_t)(range.to - range.from) + 8; /* and a hash */
        announced += center * ((has[TQKV__CENTERS] >> i & 1) + (has[TQKV__SCALES] >> i & 1));
    }
    return all <= 1048576 ? 0 : announced < all / 16 ? announced : all / 16;
}

/* Takes centres, or scales, of the streams whose bits are set: before they are read, scales also after it. */
static void tqkv__take_channels(tqkv_cache *c, tqkv__channels kind, uint32_t has)
{
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++)
        if (has >> i & 1)
            tqkv__cache_channels(c, i, kind, tqkv__channel_room(c, i, kind), (size_t)TQKV__STORE_AT(c, i)->head_dim);
}

/* Creates a cache to read into. One that has learned needs no raw memory. */
static tqkv_result tqkv__create_found(const tqkv__header *found, tqkv_cache **out)
{
    tqkv_cache_desc desc = found->desc;
    size_t channels = 0;
    if (!found->learning) desc.calibrate = 0;
    tqkv_result r = tqkv__create(&desc, found->learn_from, out);
    if (r != TQKV_OK) return r;
    (*out)->calibrate = found->desc.calibrate;
    tqkv__set_range(*out, found);
    (void)tqkv__count_channels(*out, TQKV__CACHE_STREAMS, &channels);
    for (size_t i = 0; i < TQKV__CHANNELS * channels; i++) (*out)->channels[i] = 1.0f; /* until they are read */
    tqkv__take_channels(*out, TQKV__CENTERS, found->has[TQKV__CENTERS]);
    tqkv__take_channels(*out, TQKV__SCALES, found->has[TQKV__SCALES]);
    if (found->learning && found->end) r = tqkv__get_raw(*out);
    if (r != TQKV_OK) tqkv_cache_destroy(*out);
    return r;
}

TQKV__COLD TQKV_API tqkv_result tqkv_cache_load(const tqkv_cache_desc *desc, tqkv_read read, void *user,
                                                tqkv_cache **out)
{
    tqkv__pipe pipe;
    tqkv__read_ahead ahead = {read, user, {NULL, NULL, NULL}, NULL, 0, 0, 0};
    tqkv__header found;
    uint8_t header[TQKV__HEADER_SIZE];
    tqkv__cache_memory at, raw;
    tqkv_cache *c, checked;
    if (!out) return TQKV__INVALID("out is NULL");
    *out = NULL;
    if (!desc || !read) return TQKV__INVALID("desc or read is NULL");
    if (!tqkv__type_size(desc->type)) return TQKV__REFUSE(UNSUPPORTED, TQKV__NO_TYPE);
    tqkv__pipe_open(&pipe, NULL, tqkv__read_held, &ahead);
    tqkv_result r = tqkv__read_header(&pipe, tqkv__magic, sizeof header, header);
    if (r != TQKV_OK) return r;
    if (tqkv__get(header + 24, 4) != TQKV__CODES_VERSION)
        return TQKV__REFUSE(CORRUPT, tqkv__get(header + 24, 4) > TQKV__CODES_VERSION ? TQKV__NEWER : TQKV__OLDER);
    if (!tqkv__parse_header(header, &found, &checked) || !tqkv__divide_memory(&checked, 0, &at) ||
        !tqkv__divide_raw(&checked, &raw))
        return TQKV__REFUSE(CORRUPT, "the snapshot's header is one that no cache writes");
    if ((r = tqkv__check_match(desc, &found.desc)) != TQKV_OK) return r;
    found.desc.type = desc->type;
    tqkv__take_use(desc, &found.desc);
    ahead.memory = found.desc.allocator;
    if (!tqkv__resolve_allocator(&ahead.memory)) return TQKV__INVALID("allocator: one of alloc and free is missing");
    tqkv__set_range(&checked, &found);
    r = tqkv__hold(&ahead, tqkv__wanted_ahead(&checked, found.has));
    if (r == TQKV_OK) r = tqkv__create_found(&found, &c);
    if (r != TQKV_OK) {
        tqkv__drop_held(&ahead);
        return r;
    }
    r = tqkv__move_stores(&pipe, c);
    if (r == TQKV_OK) tqkv__follow_tail(c);
    if (r == TQKV_OK) tqkv__take_channels(c, TQKV__SCALES, found.has[TQKV__SCALES]);
    if (r == TQKV_OK) r = tqkv__check_same_given(desc, c);
    tqkv__drop_held(&ahead);
    if (r == TQKV_OK)
        *out = c;
    else
        tqkv_cache_destroy(c);
    return r;
}

static size_t tqkv__write_nowhere(void *user, const void *bytes, size_t n)
{
    (void)user, (void)bytes;
    return n;
}

/* Returns the hash of the bytes of centre and scale in a snapshot; 0 without. */
static uint64_t tqkv__channels_hash(const tqkv__stream *s)
{
    tqkv__pipe pipe;
    if (!s->center && !s->channel_scale) return 0;
    tqkv__pipe_open(&pipe, tqkv__write_nowhere, NULL, NULL);
    (void)tqkv__move_channels(&pipe, s, NULL, NULL);
    return XXH3_64bits_digest(&pipe.hash);
}

static void tqkv__store_header(const tqkv__stream *s, int64_t position, int n, uint8_t *header)
{
    const bool half = s->kind == TQKV__HALF, scaled = s->kind == TQKV__BOOK && s->norms_per_row > 1;
    const uint32_t other_basis = s->rotated == half ? half ? 4u : 1u : 0u;
    const uint32_t fields[6] = {(uint32_t)s->format,
                                (uint32_t)s->head_dim,
                                (uint32_t)s->n_kv_heads,
                                other_basis | (s->center ? 2u : 0u) | (s->channel_scale ? 8u : 0u),
                                tqkv__bits(scaled ? s->block_scale : 1.0f),
                                0};
    tqkv__put_name(tqkv__store_magic, TQKV__STORE_HEADER_SIZE, header);
    for (int i = 0; i < 6; i++) tqkv__put(header + 16 + 4 * i, 4, fields[i]);
    tqkv__put(header + 40, 8, (uint64_t)position);
    tqkv__put(header + 48, 8, (uint64_t)n);
    tqkv__put(header + 56, 8, tqkv__channels_hash(s));
}

TQKV_API tqkv_result tqkv_store_save(const tqkv_store *store, int64_t position, int n_positions, tqkv_write write,
                                     void *user)
{
    tqkv__stream s;
    tqkv__pipe pipe;
    uint8_t header[TQKV__STORE_HEADER_SIZE];
    if (!write) return TQKV__INVALID("write is NULL");
    tqkv_result r = tqkv__open_positions(store, n_positions, position, &s);
    if (r != TQKV_OK) return r;
    tqkv__store_header(&s, position, n_positions, header);
    tqkv__pipe_open(&pipe, write, NULL, user);
    r = tqkv__move(&pipe, header, sizeof header);
    if (r == TQKV_OK) r = tqkv__move_hash(&pipe);
    const tqkv__range range = {position, position + n_positions};
    return r == TQKV_OK ? tqkv__move_stored(&pipe, &s, range) : r;
}

/* A header that differs from the one that this store writes is refused, but for the first position. */
TQKV_API tqkv_result tqkv_store_load(const tqkv_store *store, int64_t position, int n_positions, tqkv_read read,
                                     void *user)
{
    enum { position_at = 40 }; /* in the header; where the positions were is not compared */
    tqkv__stream s;
    tqkv__pipe pipe;
    uint8_t header[TQKV__STORE_HEADER_SIZE], expected[TQKV__STORE_HEADER_SIZE];
    if (!read) return TQKV__INVALID("read is NULL");
    tqkv_result r = tqkv__open_positions(store, n_positions, position, &s);
    if (r == TQKV_OK) r = tqkv__check_written(&s, n_positions, position);
    if (r != TQKV_OK) return r;
    tqkv__store_header(&s, position, n_positions, expected);
    tqkv__pipe_open(&pipe, NULL, read, user);
    r = tqkv__read_header(&pipe, tqkv__store_magic, sizeof header, header);
    if (r != TQKV_OK) return r;
    if (tqkv__get(header + position_at, 8) > (uint64_t)INT64_MAX)
        return TQKV__REFUSE(CORRUPT, "the snapshot's first position is negative");
    memcpy(expected + position_at, header + position_at, 8);
    if (memcmp(header, expected, sizeof header) != 0)
        return TQKV__INVALID("the snapshot is of another store or of another number of positions");
    const tqkv__range range = {position, position + n_positions};
    return tqkv__move_stored(&pipe, &s, range);
}

#ifdef TQKV__SMALL
#undef TQKV__SMALL
#pragma GCC pop_options
#endif

#endif /* TQKV_IMPLEMENTATION */

#if defined(TQKV__PRECISE) && !defined(TQKV__NESTED)
#undef TQKV__PRECISE
#pragma float_control(pop)
#endif

/* >>licence

   MIT License

   Copyright (c) 2026 the tqkv authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
   documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
   rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
   permit persons to whom the Software is furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
   Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
   WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
   COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
   OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */

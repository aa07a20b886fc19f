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

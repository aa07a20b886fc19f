/* >>index
   What a query attends to may be chosen by a small index: keys of their own, one for each `ratio` positions of the
   context, which some heads score.

       s(i, j) = sum_h weights[i][h] * f( q(i, h).k(j) ),   f(x) = max(x, 0) with relu, else x

   The score of a block of keys is the largest or the mean of its keys' scores that the query sees; the same bits on
   every processor, alone and among other queries. Against double precision with the integer centroids a key's score is
   within 1e-4 of sum_h |weights[i][h] f(q.k)|; where the products of a few heads nearly vanish, one adds 2e-5 of sum_h
   |weights[i][h]| |q(i, h)| |k(j)|. F16, TQ8, and any format on a GPU: 2e-5 and 2e-7. */
typedef enum tqkv_pool { TQKV_POOL_MAX = 0, TQKV_POOL_MEAN } tqkv_pool;
typedef struct tqkv_index {
    const tqkv_store *keys; /* n_kv_heads 1, any format */
    int n_heads, n_queries; /* query heads of the index, at least one; without queries a call does nothing */
    int64_t end;            /* keys appended so far */
    int kv_len;             /* resident keys, as tqkv_attention's */
    int ratio;         /* positions of the context that a key stands for: key j for those from j * ratio on. 0 = 1 */
    int64_t positions; /* of the context so far; 0 = end * ratio. Query i is at positions - n_queries + i. It sees the
                          resident keys whose positions are all at or before its own */
    const float *weights; /* [n_queries][n_heads] or NULL: 1 */
    bool relu;
    int block; /* keys a block; 0 = 1 */
    tqkv_pool pool;
    int first, newest; /* so many of the first blocks, and of the newest that a query sees, are always chosen */
    tqkv_type query_type;
    tqkv_basis query_basis;
    tqkv_parallel parallel;
    tqkv_allocator allocator; /* scratch, for some heads and queries at a time */
} tqkv_index;

/* q: [n_queries][n_heads][head_dim]; scores: [n_queries][number of blocks up to end], -INFINITY where a query sees no
   key of a block. TQKV_NOT_FINITE if q or weights hold NaN or Inf. */
TQKV_API tqkv_result tqkv_index_scores(const tqkv_index *x, const void *q, float *scores);
/* The k best blocks of each query, ascending, of equal ones the lower; -1 after the last. scores as above; a block with
   -INFINITY is never chosen. The blocks of `first` and `newest` come before all others, lower ones first. list:
   [n_queries][k]. Reads only the shape of keys. TQKV_NOT_FINITE if the score of a block that its query sees is NaN. */
TQKV_API tqkv_result tqkv_index_choose(const tqkv_index *x, const float *scores, int k, int32_t *list);

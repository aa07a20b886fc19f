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

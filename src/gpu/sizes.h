/* >>metal-sizes: function constants, sizes of dispatches and argument structs; the shaders include it, too */
/* The Metal kernels, tqkv_<family>_d<head_dim>; tqkv_<family>_d<head_dim>_<value_dim> for keys and values that differ.
   A kernel and its function constants make a pipeline. */
#define TQKV_FC_FORMAT       0    /* uint: encode, probe, decode: tqkv_format; encode_kv, attend: that of the keys */
#define TQKV_FC_VALUE_FORMAT 1    /* uint: encode_kv, attend: that of the values */
#define TQKV_FC_ROTATED      2    /* bool: encode, probe: rotate (not for F16 and unrotated); encode_kv: the keys */
                                  /* decode, attend: rotate the centre before it is used */
                                  /* attend_merge that makes a slice: rotate its sums */
#define TQKV_FC_VALUE_ROTATED  3  /* bool: encode_kv: rotate the values; attend_merge: rotate their centre */
#define TQKV_FC_UNROTATE       4  /* bool: decode, rotate, attend_merge: rotate rows back; tables: multiply matrices */
#define TQKV_FC_ROTATE_QUERIES 5  /* bool: attend: keys are rotated, queries are not */
#define TQKV_FC_COLUMNS        6  /* uint: attend: query rows of one KV head in a threadgroup */
#define TQKV_FC_MANY_QUERIES   7  /* bool: attend: n_queries > 1, so columns see different positions */
#define TQKV_FC_SOFTCAP        8  /* bool: attend: scores are capped */
#define TQKV_FC_SAME_SLOTS     9  /* bool: attend: a position has the same slot in keys and values */
#define TQKV_FC_SHORT_STORE    10 /* bool: attend: the keys' capacity is below 32 */
#define TQKV_FC_SINKS          11 /* bool: attend_merge: there are sinks */
#define TQKV_FC_CENTER         12 /* bool: encode, probe, decode: rows have a centre; encode_kv: keys have one */
                                  /* attend, attend_merge: keys have one, and it changes the result */
#define TQKV_FC_VALUE_CENTER 13   /* bool: encode_kv, attend_merge: values have a centre */
#define TQKV_FC_TYPE         14   /* uint: tqkv_type of the rows that encode, probe, attend read; encode_kv: the keys */
                                  /* decode, attend_merge: of the rows that they write */
#define TQKV_FC_VALUE_TYPE 15     /* uint: encode_kv: that of the values */
#define TQKV_FC_PAGES      16     /* bool: encode, decode: slots come from a page table; encode_kv: the keys' */
                                  /* attend: the slots of keys and values */
#define TQKV_FC_VALUE_PAGES  17   /* bool: encode_kv: the values' slots */
#define TQKV_FC_TREE         18   /* bool: attend, attend_list: a tree hides some of the newest n_queries positions */
#define TQKV_FC_BATCH        19   /* bool: attend, attend_merge, attend_list: arguments and offsets come from items */
#define TQKV_FC_FROM_SLICE   20   /* bool: attend_merge: of partial results there is one, a slice: out, max and sum */
#define TQKV_FC_TO_SLICE     21   /* bool: attend_merge: makes a slice; from one: adds it to the one that is there */
#define TQKV_FC_TAIL_FORMAT  22   /* uint: attend: that of the keys' tail; 0: there is none */
#define TQKV_FC_ROTATE_TAIL  23   /* bool: attend: the tail is rotated, queries are not */
#define TQKV_FC_TAIL_CENTER  24   /* bool: attend: as TQKV_FC_CENTER, of the tail */
#define TQKV_FC_TAIL_ROTATED 25   /* bool: attend: rotate the tail's centre before it is used */
#define TQKV_FC_LIST         26   /* bool: attend: queries see listed blocks alone */

#define TQKV_FC_SMALL_PAGES    27 /* bool: attend: some pages end within tiles */
#define TQKV_FC_TAIL_ELSEWHERE 28 /* bool: attend: a position has another slot in the tail than in the keys */

#define TQKV_FC_SCALED 29 /* bool: encode, probe: channels of rows have scales; encode_kv: those of keys */
                          /* decode: rows are multiplied by them; attend: queries are, by those of the keys */
#define TQKV_FC_VALUE_SCALED       30 /* bool: encode_kv: values have scales; attend_merge: the output is multiplied */
#define TQKV_FC_CENTER_SCALED      31 /* bool: decode, attend, attend_merge: divide the centre before it is rotated */
#define TQKV_FC_TAIL_SCALED        32 /* bool: attend: as TQKV_FC_SCALED, of the tail */
#define TQKV_FC_TAIL_CENTER_SCALED 33 /* bool: attend: as TQKV_FC_CENTER_SCALED, of the tail */
#define TQKV_FC_HALVES             34 /* uint: attend: which positions a query sees, TQKV__ALL_POSITIONS or: */
#define TQKV__ALL_POSITIONS        0
#define TQKV__BEFORE_HALVES        1 /* those before its newest halves, or */
#define TQKV__NEWEST_HALVES        2 /* these alone */

#define TQKV_FC_STRANDS 35 /* bool: attend: threadgroups may have strands of stretches */

#define TQKV__CONSTANTS 36 /* of them */
/* Whether a function constant is a uint. */
#define TQKV__IS_NUMBER(constant) \
    ((constant) == TQKV_FC_FORMAT || (constant) == TQKV_FC_VALUE_FORMAT || (constant) == TQKV_FC_COLUMNS || \
     (constant) == TQKV_FC_TYPE || (constant) == TQKV_FC_VALUE_TYPE || (constant) == TQKV_FC_TAIL_FORMAT || \
     (constant) == TQKV_FC_HALVES)

/* Most query rows of a threadgroup of attend: their sums take 64 registers, 8 a lane and row up to D=256. */
#define TQKV__MAX_COLUMNS(D) ((D) <= 256 ? 8 : (D) <= 512 ? 4 : 2)

/* head_dim of the tail that keys of head_dim D may have; 0: none */
#define TQKV__TAIL_DIM(D) ((D) == 448 || (D) == 512 ? 64 : 0)

/* Lanes of a simdgroup that share a row: a lane has its values from all subrows, for the matrix across them. */
#define TQKV__ROW_LANES(D) (TQKV__HAS_MATRIX(D) ? (D) / TQKV__MATRIX_ORDER(D) : 32)

/* Attention by products of 8x8 matrices. Element 0 or 1 of what a lane has of a matrix, Metal's thread_elements(), is
   in this row, and in this column plus 0 or 1. Metal does not promise it: the kernel `tables` multiplies two matrices
   that are set so, and the host leaves attend_matrix alone where their product is another. A shim of a machine with
   another order defines both. Each bit of the lane number changes either the row or the column. */
#ifndef TQKV__MATRIX_ROW
#define TQKV__MATRIX_ROW(lane)    (((lane) >> 4 << 2) | ((lane) >> 1 & 3))
#define TQKV__MATRIX_COLUMN(lane) (((lane) >> 3 & 1) << 2 | ((lane)&1) << 1)
#endif
/* An element of a matrix for that test: below 64, and any two are different. */
#define TQKV__MATRIX_TEST(row, column, seed) (((row)*8 + (column)) * (seed) % 64)

/* Most query rows of a threadgroup of attend_matrix: their sums take 128 registers, 64 at D=256. Of longer rows, whose
   sums TQKV__LONG_SIMDGROUPS share, threadgroup memory holds the queries of 8; a shim may have more. */
#ifndef TQKV__LONG_COLUMNS
#define TQKV__LONG_COLUMNS 8
#endif
#define TQKV__MOST_MATRIX_COLUMNS(D) ((D) <= 128 ? 32 : (D) <= 256 ? 8 : TQKV__LONG_COLUMNS)
#define TQKV__LONG_SIMDGROUPS        8
#define TQKV__LONG_WEIGHT_BYTES(n)   (8192 * (n)) /* of (1): a tile's weights of each simdgroup, or */
#define TQKV__LONG_ROW_BYTES(D)      (16 * (D))   /*     four queries */
#define TQKV__LONG_VALUES            64           /* values of a row a simdgroup */
#define TQKV__MATRIX_SIMDGROUPS      4            /* at most, of a threadgroup */
#define TQKV__MATRICES(columns) \
    ((columns) <= 8 ? 1 : (columns) <= 16 ? 2 : (columns) <= 32 ? 4 : 8) /* that hold them */

/* Threadgroup memory, in bytes. Attend takes all four. */
#define TQKV__CELL_BYTES 3120 /* (0) of encode: cells of the codebook */
                              /* (1) of encode, (0) of probe: with a matrix */
                              /*     the rows of n simdgroups */
#define TQKV__ROW_BYTES(D, n) (TQKV__HAS_MATRIX(D) ? (n)*128 * (TQKV__MATRIX_ORDER(D) + 1) : 0)
#define TQKV__TABLE_BYTES     1024 /* (0) of decode: a codebook */
                                   /* (2) of encode: squares of its centroids */
#define TQKV__ATTEND_TABLE_BYTES \
    (2 * TQKV__TABLE_BYTES)                       /* (0) codebooks of keys and values; TABLE_BYTES for a tail's */
#define TQKV__QUERY_FLOATS(D)       (3 * (D) / 2) /* (1) of attend: a padded query */
#define TQKV__ATTEND_PASS_FLOATS(D) ((D) <= 256 ? 512 : 256) /* (2) of a simdgroup: a tile's weights, then sums */
#define TQKV__ATTEND_SUM_BYTES(D, columns) \
    ((columns) * (D) <= 256 && (columns) <= 4 \
         ? 1024 \
         : 4 * TQKV__ATTEND_PASS_FLOATS(D))          /* of a pass, or of all columns; of a strand weights and shares */
#define TQKV__MATRIX_QUERY_BYTES(D) (32 * (D))       /* (1) of attend_matrix: 8 queries, and */
#define TQKV__MATRIX_SUM_BYTES(D)   (64 * ((D) + 4)) /*     padded sums of 4 simdgroups and columns */
#define TQKV__COLUMN_BYTES(columns) (56 * (columns)) /* (3) of attend and attend_matrix: 14 numbers a column, and */
#define TQKV__STRAND_BLOCKS(D) \
    ((D) <= 128 ? 1 : 2) /* norms of a row of values, at most, where attend_matrix has strands */
#define TQKV__MATRIX_STRAND_BYTES(D, n) \
    ((D) <= 128 ? 8192 * (n) : 12288 * (n))        /* (1): factors and weights of four tiles */
#define TQKV__STATE_BYTES(columns) (8 * (columns)) /*     maximum and sum of a simdgroup */
#define TQKV__SLOT_BYTES(lists)    (256 * (lists)) /*     slots of a tile and the next one, in so many lists: */
#define TQKV__SLOT_LISTS(apart, same_slots, tail_elsewhere) \
    (((apart) ? (same_slots) ? 1 : 2 : 0) + ((tail_elsewhere) ? 1 : 0)) /* keys, values, tail, where rows lie apart */
#define TQKV__MERGE_BYTES(D, n) ((n) * ((D) + 4) * 4)                   /* (0) a row and its sum, n simdgroups */

/* Attention cuts the context at fixed slots of the keys into stretches with sums of their own: the first n_short have
   `length` tiles of 32 slots, the others TQKV__STRETCH_GROWTH times as many. TQKV__SECTION of them, counted from slot
   0, are a section. The stretches of a section are added in order, then the sections. */
#define TQKV__STRETCH_GROWTH      4
#define TQKV__SECTION             16
#define TQKV__MOST_STRAND_COLUMNS 16 /* by matrices */
#define TQKV__STRANDS             4  /* of a stretch of `length` tiles: what the simdgroups of attend add up */
#define TQKV__STRETCH_OF_TILE(tile, length, n_short) \
    ((tile) / (length) < (n_short) ? (tile) / (length) \
                                   : (n_short) + ((tile) - (n_short) * (length)) / (TQKV__STRETCH_GROWTH * (length)))

/* Counts of a digit in index_choice, and sums of neighbouring ones. Scratch of a query, in words, where it has chunks:
   the counts and sums of each, a header, and two words a block. */
#define TQKV__CHOOSE_COUNTS 4096
#define TQKV__CHOOSE_SUMS   64
#define TQKV__CHOOSE_HEADER 4
#define TQKV__CHOOSE_SCRATCH(chunks, blocks) \
    ((chunks) * (TQKV__CHOOSE_COUNTS + TQKV__CHOOSE_SUMS) + TQKV__CHOOSE_HEADER + 2 * (blocks))
/* Steps: a chunk counts, a chunk gathers, the choice among the gathered blocks, the choice among all. */
#define TQKV__CHOOSE_COUNT  0
#define TQKV__CHOOSE_GATHER 1
#define TQKV__CHOOSE_AMONG  2
#define TQKV__CHOOSE_ALONE  3

/* Rows of a simdgroup in encode, encode_kv and probe: 4 passes over the rows that fit side by side, 8 up to D=128. */
#define TQKV__ENCODE_ROWS(D) (TQKV__HAS_MATRIX(D) ? 128 / TQKV__ROW_LANES(D) : (D) == 32 ? 64 : 4096 / (D))

/* Simdgroups that share a row's sections in attend_merge: 8 KiB of threadgroup memory; a shim may have more. */
#ifndef TQKV__MERGE_VALUES
#define TQKV__MERGE_VALUES 2048
#endif
#define TQKV__MERGE_SIMDGROUPS(D) ((D) <= TQKV__MERGE_VALUES / 8 ? 8 : TQKV__MERGE_VALUES / (D))

/* The sizes above for kernels of head_dim D. The host refuses a library with other sizes. */
#define TQKV__KERNEL_SIZES(D) \
    TQKV__MAX_COLUMNS(D), TQKV__ENCODE_ROWS(D), TQKV__MERGE_SIMDGROUPS(D), TQKV__CELL_BYTES, TQKV__TABLE_BYTES, \
        TQKV__ROW_BYTES(D, 1), TQKV__QUERY_FLOATS(D), TQKV__ATTEND_PASS_FLOATS(D), TQKV__ATTEND_SUM_BYTES(D, 1), \
        TQKV__MERGE_BYTES(D, 1), TQKV__TAIL_DIM(D), TQKV__STRETCH_GROWTH, TQKV__SECTION, TQKV__MOST_MATRIX_COLUMNS(D), \
        TQKV__MATRIX_QUERY_BYTES(D), TQKV__MATRIX_SUM_BYTES(D), TQKV__COLUMN_BYTES(1), TQKV__STATE_BYTES(1), \
        TQKV__LONG_WEIGHT_BYTES(1), TQKV__SLOT_BYTES(1)
enum { TQKV__KERNEL_DIMS = 11, TQKV__N_KERNEL_SIZES = 20 };

/* The values of head_dim that have kernels, as row(x, number, D). Besides, keys of TQKV__WIDE_KEYS take values of
   TQKV__NARROW_VALUES in encode_kv and attend, and keys of D a tail of TQKV__TAIL_DIM(D): encode_kv takes it for
   values. */
#define TQKV__KERNELS(row, x) \
    row(x, 0, 32) row(x, 1, 48) row(x, 2, 64) row(x, 3, 80) row(x, 4, 96) row(x, 5, 128) row(x, 6, 192) row(x, 7, 256) \
        row(x, 8, 448) row(x, 9, 512) row(x, 10, 1024)
#define TQKV__WIDE_KEYS     192
#define TQKV__NARROW_VALUES 128
/* head_dim number i of the kernels, or 0; whether D has kernels */
#define TQKV__KERNEL_DIM(i)              (TQKV__KERNELS(TQKV__KERNEL_DIM_OF, i) 0)
#define TQKV__HAS_KERNELS(D)             (TQKV__KERNELS(TQKV__HAS_KERNELS_OF, D) false)
#define TQKV__KERNEL_DIM_OF(i, n, size)  (i) == n ? size:
#define TQKV__HAS_KERNELS_OF(D, n, size) (D) == size ||

/* Rows of one stream. Token t is at slot first_slot + t, minus capacity if that is beyond the store. The host resolves
   positions; it passes at most `capacity` tokens and fewer than 2^32 rows. With a page table first_slot is a position,
   and an entry that is none of the store's pages leaves its tokens out. */
typedef struct tqkv__rows_args {
    int32_t n_tokens; /* source or destination is [n_tokens][n_kv_heads][head_dim] */
    int32_t n_kv_heads;
    int32_t capacity;   /* positions of the store */
    int32_t first_slot; /* in [0, capacity) */
    float block_scale;  /* not 0 */
    int32_t page_size;  /* read if TQKV_FC_PAGES, and n_pages: of the store */
    int32_t n_pages;
    uint32_t token_stride, head_stride; /* of source or destination, in values */
    int32_t
        has_flag; /* not_finite is there to be written: by rows that are not finite, or (2) that halves do not hold */
} tqkv__rows_args;

typedef struct tqkv__rotate_args {
    int32_t n_rows; /* of head_dim values */
} tqkv__rotate_args;

/* attend, over kv_len resident positions counted from the oldest, which is at oldest_slot; slots wrap at capacity. With
   page tables the slots here are positions, and a table says where their pages lie. */
typedef struct tqkv__attend_args {
    int32_t n_queries;
    int32_t n_kv_heads;
    int32_t group; /* query heads a KV head */
    int32_t kv_len;
    int32_t window;                 /* a query sees the last `window` positions up to its newest; 0: all up to it */
    int32_t slice_end;              /* positions from here on are not seen; kv_len, or less in a slice */
    int32_t first_stretch;          /* that a query sees */
    int32_t stretch_tiles, n_short; /* TQKV__STRETCH_OF_TILE */
    int32_t n_splits;               /* threadgroups along the context */
    int32_t sections_each;          /* of a threadgroup; 0: that of split i has only stretch first_stretch + i */
    int32_t strands; /* 1, or of a stretch: that of split i has only strand i % strands of stretch i / strands */
    int32_t key_capacity, key_oldest_slot;
    int32_t value_capacity, value_oldest_slot;
    float scale;                              /* not 0 */
    float softcap;                            /* read if TQKV_FC_SOFTCAP */
    float key_block_scale, value_block_scale; /* not 0 */
    int32_t key_slots, value_slots;       /* of a KV head in memory: the capacity or, with pages, that of the pool */
    int32_t key_page_size, key_last_page; /* read if TQKV_FC_PAGES; the last page of the pool */
    int32_t value_page_size, value_last_page;
    uint32_t key_page_factor, value_page_factor; /* page of a tile: the upper word of the product of tile and factor, */
    int32_t key_page_shift, value_page_shift;    /* shifted to the right */
    int32_t first_of_tree; /* read if TQKV_FC_TREE: position kv_len - n_queries, or INT_MAX without a tree */
    /* Of lists: read if TQKV_FC_LIST, and by attend_list. Blocks count from that of the oldest resident position. */
    int32_t list_heads, list_row;    /* integers of a row that attend_list wrote */
    int32_t list_shift, list_inside; /* a block is 1 << shift positions, and that position is number `inside` of its */
    int32_t list_base, list_slots;   /* slot of that block's first position; from list_slots on there is none */
    int32_t list_newest, list_first_block;          /* positions that are seen beside the list; number of that block */
    int32_t first_newest;                           /* the newest position of query i is first_newest + i */
    uint32_t query_token_stride, query_head_stride; /* in values */
    int32_t tail_slots;                             /* of a KV head in memory, as key_slots */
    int32_t tail_capacity, tail_oldest_slot;        /* read if TQKV_FC_TAIL_ELSEWHERE */
    /* Read if TQKV_FC_HALVES: a query's newest halves begin exact_last positions before the one behind its newest, but
       not before exact_from. */
    int32_t exact_last, exact_from;
} tqkv__attend_args;

/* attend_list has the arguments of attend. A row of a list has list_row - TQKV__LIST_HEADER entries. A row that it
   writes: how many ranks there are, how many entries come before the newest blocks, the first of these, the position
   before which they are not seen, the position of rank 0 in blocks, times their size; then the entries. */
#define TQKV__LIST_HEADER 8

typedef struct tqkv__merge_args {
    int32_t n_rows;  /* n_queries * n_heads */
    int32_t n_heads; /* row r is of head r modulo n_heads */
    int32_t group;   /* query heads a KV head */
    int32_t n_partials;
    int32_t section;         /* partial results of a section: TQKV__SECTION or, if they are sections, 1; or strands */
    int32_t strands;         /* 1, or of a stretch: all stretches are of one section */
    int32_t before;          /* those of the first section that are left out */
    int32_t n_first, n_last; /* partial results of the first and last positions, before and behind the others */
    uint32_t out_token_stride, out_head_stride; /* in values */
} tqkv__merge_args;

/* index_choice: a query sees the keys before seen + (seen_rest + its number) / ratio. */
typedef struct tqkv__choose_args {
    int32_t seen, seen_rest, ratio;
    int32_t end;             /* keys */
    int32_t block, n_blocks; /* keys a block; blocks of a row of scores */
    int32_t from;            /* the block of the first resident key */
    int32_t k, first, newest;
    int32_t chunk, n_chunks; /* blocks of a threadgroup, from `from` on; chunks of a row */
    int32_t step;            /* TQKV__CHOOSE_COUNT to TQKV__CHOOSE_ALONE */
} tqkv__choose_args;

/* index_scores. `keys` is that of a call whose heads are those of the index; its resident positions are the keys from
   number first_key on. */
#define TQKV__INDEX_KEYS 1024 /* whose scores are in threadgroup memory at a time */
#ifndef TQKV__INDEX_COLUMNS   /* heads of a pass: threadgroup memory holds their queries. A shim may have more */
#define TQKV__INDEX_COLUMNS 32
#endif
#define TQKV__POOL_MEAN 1 /* tqkv_pool */
typedef struct tqkv__index_args {
    tqkv__attend_args keys;
    int32_t seen, seen_rest, ratio, end, block, n_blocks; /* as in tqkv__choose_args */
    int32_t first_key;
    int32_t blocks_each; /* of a threadgroup: TQKV__INDEX_KEYS keys at most, or one block */
    int32_t pool, relu, has_weights;
} tqkv__index_args;

/* One call of a batch. The threadgroups of attend number groups of query rows first, then splits, then items. Offsets
   are from where the buffer is bound, in units of: */
#define TQKV__ROWS_UNIT  2  /* bytes: q and out */
#define TQKV__CODES_UNIT 16 /* codes; all others 4 */
typedef struct tqkv__batch_item {
    tqkv__attend_args attend;
    tqkv__merge_args merge;
    int32_t n_items, first_group, first_row,
        first_list; /* of the batch; threadgroups, query rows and rows of lists of the */
                    /* items before */
    uint32_t q, key_codes, key_norms, value_codes, value_norms, partial_out, partial_state, key_center;
    uint32_t key_pages, value_pages, tree, out, value_center, tail_codes, tail_norms, tail_center;
    uint32_t list, list_rows; /* list_rows: in the buffer of partial_out */
    uint32_t key_scale, tail_scale, value_scale;
} tqkv__batch_item;

/* learn_scales: centre and scales of the channels of a KV head, from rows and, if there are any, queries. */
typedef struct tqkv__calibrate_args {
    int32_t head_dim, n_tokens, n_queries, n_kv_heads;
    int32_t group;                                                             /* query heads a KV head */
    int32_t pairs;                                                             /* tqkv_pairs, of the first */
    int32_t rotary_dim;                                                        /* channels */
    uint32_t token_stride, head_stride, query_token_stride, query_head_stride; /* in values */
    /* Of a cache that learns: it takes the rows of new positions, which its values show. value_dim 0: all rows */
    int32_t value_dim;
    int32_t n_exact, least_rest; /* the first n_exact are left out if at least least_rest new ones remain */
    int32_t least_new;           /* with fewer all rows count, for scales in [1/2, 3/2] */
    uint32_t value_token_stride, value_head_stride;
} tqkv__calibrate_args;

/* The structs that C and the shaders share. */
#define TQKV__SHARED_STRUCTS(row) \
    row(table_set) row(rows_args) row(rotate_args) row(attend_args) row(merge_args) row(batch_item) row(choose_args) \
        row(index_args) row(calibrate_args)
enum { TQKV__N_SHARED_STRUCTS = 9 };

/* Output of the kernel `tables`: the tables and sizes that the shaders were compiled with. */
typedef struct tqkv__table_report {
    uint32_t table_version;
    uint32_t struct_sizes[TQKV__N_SHARED_STRUCTS];
    tqkv__table_set tables;
    int32_t kernel_sizes[TQKV__KERNEL_DIMS][TQKV__N_KERNEL_SIZES];
    float matrix_product[32][2]; /* each lane's elements of TQKV__MATRIX_TEST with seed 3, times that with seed 5 */
} tqkv__table_report;

TQKV__ASSERT_SIZE(tqkv__rows_args, 40);
TQKV__ASSERT_SIZE(tqkv__rotate_args, 4);
TQKV__ASSERT_SIZE(tqkv__attend_args, 188);
TQKV__ASSERT_SIZE(tqkv__merge_args, 44);
TQKV__ASSERT_SIZE(tqkv__batch_item, 332);
TQKV__ASSERT_SIZE(tqkv__choose_args, 52);
TQKV__ASSERT_SIZE(tqkv__index_args, 232);
TQKV__ASSERT_SIZE(tqkv__calibrate_args, 68);
TQKV__ASSERT_SIZE(tqkv__table_report, 4736);

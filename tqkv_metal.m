/* tqkv_metal.m - the GPU calls of tqkv.h, where they are documented (>>metal, >>metal-plan). MIT licence, as tqkv.h.

     clang -O2 -c tqkv_metal.m              on a Mac, with or without -fobjc-arc
     ... -framework Metal -framework Foundation

   The file is an implementation of tqkv.h, too: no other file of the program defines TQKV_IMPLEMENTATION, unless this
   one is compiled with TQKV_STATIC, and so has a copy of its own.
   An engine that dispatches kernels itself needs the plans alone. Any compiler of C99 or C++11 takes the file for that
   (gcc -x c -O2 -c tqkv_metal.m); what needs Objective-C is left out. With TQKV_NO_IMPLEMENTATION that part is all
   there is, for a program that has the rest in such an object.
   -DTQKV_METALLIB_EMBED='"default.metallib"' puts the compiled shaders into the object.

   CONTENTS (search for the tag)

     >>metal-sizes    function constants, sizes, argument structs; the shaders include it, too
     >>plan-numbers   further numbers of plans and contexts
     >>plan-rows      plans: bindings; encode, probe, decode, rotate
     >>plan-split     how threadgroups share attention
     >>plan-list      which tiles lists name
     >>plan-attend    the dispatches of an attention
     >>plan-shape     an attention over buffers as one over stores
     >>plan-calls     the calls of attention
     >>plan-batch     batches
     >>plan-index     an index
     >>plan-cache     a cache
     >>plan-report    what the shaders say that they were compiled with

     in Objective-C
     >>host           what a context is made of
     >>errors         what went wrong, in words
     >>pipelines      built on first use, kept as long as the context
     >>recording      a plan handed to an encoder; command buffers of our own
     >>memory         what processor and GPU share: tqkv_metal_allocator, tqkv_metal_find
     >>caches         tqkv_metal_cache_append and tqkv_metal_cache_attend
     >>waiting        the calls of tqkv_cache, which wait for the GPU
     >>self-test      one cache on the GPU, one on the processor
     >>context        libraries, the device, create and destroy */
#ifdef __OBJC__
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <dispatch/dispatch.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#endif

#ifndef TQKV_METAL
#define TQKV_METAL
#endif
#ifndef TQKV_SHARED
#define TQKV_SHARED
#endif
#ifndef TQKV_IMPLEMENTATION
#define TQKV_IMPLEMENTATION
#endif
#include "tqkv.h"

#ifndef TQKV__METAL_SIZES
#define TQKV__METAL_SIZES
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

/* >>plan-numbers: numbers that plans, contexts and tests share */
/* tqkv_metal_kernel.family */
typedef enum tqkv__family {
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
} tqkv__family;

enum {
    TQKV__SIMD_WIDTH = 32,
    TQKV__ITEMS_OF_ATTEND = 12, /* index of a batch's items */
    TQKV__ITEMS_OF_MERGE = 6,
    TQKV__ITEMS_OF_LIST = 4,
    TQKV__UNUSED_BYTES = 512,        /* of the buffer in the place of arrays that a call lacks */
    TQKV__ARGUMENTS_ALIGNMENT = 256, /* of a batch's items, which kernels see as constant memory: what Macs document */
    TQKV__SECOND_ARGS = 4,           /* index of the values' arguments in encode_kv; every kernel's first are at 0 */
    TQKV__DIM_UNIT = 16              /* of a kernel's head_dim and value_dim */
};

#define TQKV__KERNEL_DIM_TEXT(x, n, size) #size ", "
#define TQKV__KERNELS_TEXT \
    "a GPU takes head_dim " TQKV__KERNELS( \
        TQKV__KERNEL_DIM_TEXT, ) "and keys of 192 with values of 128, of 448 or 512 with a tail of 64"

/* Whether there are kernels for rows of these sizes. value_dim: in calls of both streams, else head_dim; tail_dim: 0
   without a tail */
static inline bool tqkv__has_kernels(int head_dim, int value_dim, int tail_dim)
{
    const bool wide = head_dim == TQKV__WIDE_KEYS && value_dim == TQKV__NARROW_VALUES;
    return (wide || (head_dim == value_dim && TQKV__HAS_KERNELS(head_dim))) &&
           (!tail_dim || tail_dim == TQKV__TAIL_DIM(head_dim));
}

#endif

#ifdef TQKV_IMPLEMENTATION
#define TQKV__NO_PLAN          "plan: NULL"
#define TQKV__NO_CACHE_QUERIES "the cache is NULL or n_queries not positive"
#define TQKV__LARGE_SCRATCH    "more scratch than a size_t can count"

/* >>plan-rows: bindings; encode, probe, decode, rotate */

/* Checks whether there are kernels; follows tqkv__stream_shape and tqkv__attention_shape. */
static tqkv_result tqkv__check_kernels(int head_dim, int value_dim, int tail_dim)
{
    return tqkv__has_kernels(head_dim, value_dim, tail_dim) ? TQKV_OK : TQKV__REFUSE(UNSUPPORTED, TQKV__KERNELS_TEXT);
}

/* Whether attend_matrix has sums of such rows in several simdgroups, TQKV__LONG_SIMDGROUPS a threadgroup. */
static bool tqkv__is_long(int head_dim) { return head_dim == 448 || head_dim == 512; }

/* The regions of a context that attention takes in dispatches of their own: first positions that are kept as halves,
   the codes, last positions that are. */
enum { TQKV__FIRST_REGION, TQKV__CODES_REGION, TQKV__LAST_REGION, TQKV__REGIONS };

/* What an attention dispatches, of those regions that there are. */
typedef struct tqkv__attend_plan {
    bool empty; /* there are no queries: all else is unset */
    bool has[TQKV__REGIONS], listed;
    size_t scratch_size;
    tqkv_metal_dispatch lists[TQKV__REGIONS], attends[TQKV__REGIONS], merge;
} tqkv__attend_plan;

static bool tqkv__bytes_meet(tqkv_metal_buffer a, size_t a_size, tqkv_metal_buffer b, size_t b_size)
{
    if (!a_size || !b_size || a.buffer != b.buffer) return false;
    return a.offset < b.offset ? b.offset - a.offset < a_size : a.offset - b.offset < b_size;
}

/* Whether the simdgroups of a threadgroup share rows: it needs all of them. */
static bool tqkv__shares_rows(const tqkv_metal_kernel *kernel)
{
    return kernel->family == TQKV_METAL_ATTEND_MATRIX && tqkv__is_long(kernel->head_dim * TQKV__DIM_UNIT);
}

TQKV_METAL_API const tqkv_metal_binding *tqkv_metal_overlapping(const tqkv_metal_dispatch *d, int i)
{
    for (int j = 0; d && i < d->n_bindings && j < i; j++) {
        const tqkv_metal_binding *a = &d->bindings[i], *b = &d->bindings[j];
        if ((a->written || b->written) && tqkv__bytes_meet(a->at, a->size, b->at, b->size)) return b;
    }
    return NULL;
}

/* Writes the name of a kernel's function. */
static void tqkv__name_kernel(tqkv_metal_kernel *kernel)
{
    static const char *const families[] = {"tables",        "encode",       "encode_kv",   "probe",
                                           "decode",        "rotate",       "attend",      "attend_merge",
                                           "attend_matrix", "index_choice", "attend_list", "index_scores",
                                           "learn_scales"}; /* tqkv__family */
    const int dims[] = {kernel->head_dim * TQKV__DIM_UNIT, kernel->value_dim * TQKV__DIM_UNIT};
    const char *family = families[kernel->family];
    char *at = kernel->name + 5 + strlen(family);
    memset(kernel->name, 0, sizeof kernel->name);
    memcpy(kernel->name, "tqkv_", 5);
    memcpy(kernel->name + 5, family, strlen(family));
    for (int i = 0; i < 2 && dims[i]; i++) {
        int unit = 1;
        *at++ = '_';
        if (i == 0) *at++ = 'd';
        while (dims[i] / unit >= 10) unit *= 10;
        for (; unit; unit /= 10) *at++ = (char)('0' + dims[i] / unit % 10);
    }
}

/* Returns the most simdgroups that plans give a threadgroup of a kernel. */
static int tqkv__most_simdgroups(const tqkv_metal_kernel *kernel)
{
    switch (kernel->family) {
    case TQKV_METAL_TABLES:
        return 1;
    case TQKV_METAL_CALIBRATE:
    case TQKV_METAL_INDEX_CHOICE:
    case TQKV_METAL_ATTEND_LIST:
        return 1024 / TQKV__SIMD_WIDTH;
    case TQKV_METAL_ATTEND_MERGE:
        return TQKV__MERGE_SIMDGROUPS(kernel->head_dim * TQKV__DIM_UNIT);
    default:
        return tqkv__shares_rows(kernel) ? TQKV__LONG_SIMDGROUPS : 4;
    }
}

/* Gives a dispatch its kernel, for rows of its sizes. */
static void tqkv__plan_family(tqkv_metal_dispatch *d, tqkv__family family)
{
    d->kernel.family = (uint8_t)family;
    d->kernel.most_simdgroups = (uint8_t)tqkv__most_simdgroups(&d->kernel);
    tqkv__name_kernel(&d->kernel);
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_launch(const tqkv_metal_dispatch *d, size_t max_threads,
                                                  tqkv_metal_launch *out)
{
    if (!d || !out || max_threads < TQKV__SIMD_WIDTH) return TQKV__INVALID("d or out is NULL, or max_threads below 32");
    const size_t most = max_threads / TQKV__SIMD_WIDTH, planned = (size_t)d->n_simdgroups,
                 n = planned < most ? planned : most;
    if (n < planned && tqkv__shares_rows(&d->kernel))
        return TQKV__REFUSE(UNSUPPORTED, "max_threads is below the 256 of this kernel: see tqkv_metal_plan_lanes");
    out->threadgroups[0] = d->rows ? d->grid[0] / n + (d->grid[0] % n != 0) : d->grid[0];
    out->threadgroups[1] = d->grid[1];
    out->threadgroups[2] = d->grid[2];
    out->threads = n * TQKV__SIMD_WIDTH;
    for (int i = 0; i < TQKV_METAL_MEMORIES; i++) {
        const size_t size = d->memory[i] + n * d->memory_each[i];
        out->memory[i] = size ? size : 16; /* the least: a length would stay set for later dispatches */
    }
    return TQKV_OK;
}

static tqkv__attend_args tqkv__attend_args_of(const tqkv_metal_dispatch *d)
{
    tqkv__attend_args args;
    memcpy(&args, d->arguments[0].bytes, sizeof args);
    return args;
}

static void tqkv__replace_args(tqkv_metal_dispatch *d, const void *args)
{
    memcpy(d->arguments[0].bytes, args, d->arguments[0].size);
}

/* The largest structs fit a dispatch, and the buffer that is bound for arrays that a call lacks. */
typedef char tqkv__args_fit[sizeof(tqkv__attend_args) <= TQKV_METAL_ARGUMENTS ? 1 : -1];
typedef char tqkv__item_fits[sizeof(tqkv__batch_item) <= TQKV__UNUSED_BYTES ? 1 : -1];

/* Begins the plan of a call, without dispatches. False for NULL. */
static bool tqkv__open_plan(tqkv_metal_plan *plan, const char *call)
{
    if (!plan) return false;
    plan->call = call;
    plan->n = 0;
    plan->scratch_size = plan->arguments_size = 0;
    return true;
}

/* Ends a plan with the result of its call. */
static tqkv_result tqkv__close_plan(tqkv_metal_plan *plan, tqkv_result r)
{
    plan->result = r;
    if (r != TQKV_OK) plan->n = 0;
    return r;
}

/* Returns the next dispatch of a plan. */
static tqkv_metal_dispatch *tqkv__add_dispatch(tqkv_metal_plan *plan)
{
    TQKV_ASSERT(plan->n < TQKV_METAL_DISPATCHES);
    return &plan->d[plan->n++];
}

/* Adds arguments. What plans are made of is called, not inlined: a fifth of their code. */
static TQKV__NOINLINE void tqkv__plan_args(tqkv_metal_dispatch *d, const void *args, size_t size)
{
    TQKV_ASSERT(d->n_arguments < 2 && size <= TQKV_METAL_ARGUMENTS);
    tqkv_metal_arguments *to = &d->arguments[d->n_arguments];
    to->index = d->n_arguments++ ? TQKV__SECOND_ARGS : 0;
    to->size = size;
    memcpy(to->bytes, args, size);
}

static TQKV__NOINLINE void tqkv__plan_begin(tqkv_metal_dispatch *d, tqkv__family family, int head_dim, int value_dim)
{
    memset(d, 0, sizeof *d);
    d->kernel.head_dim = (uint8_t)(head_dim / TQKV__DIM_UNIT);
    d->kernel.value_dim = (uint8_t)(value_dim == head_dim ? 0 : value_dim / TQKV__DIM_UNIT);
    tqkv__plan_family(d, family);
    d->grid[1] = d->grid[2] = 1;
}

static void tqkv__plan_constant(tqkv_metal_dispatch *d, int constant, int value)
{
    d->kernel.constants[constant] = (uint8_t)(value + 1);
}

static TQKV__NOINLINE void tqkv__plan_bind(tqkv_metal_dispatch *d, const char *name, int index, tqkv_metal_buffer at,
                                           size_t size, bool written)
{
    const tqkv_metal_binding binding = {name, index, at, size, 4, written};
    TQKV_ASSERT(d->n_bindings < TQKV_METAL_BINDINGS);
    d->bindings[d->n_bindings++] = binding;
}

/* Binds what a row with NaN or infinity sets, if there is a buffer. */
static void tqkv__plan_bind_flag(tqkv_metal_dispatch *d, int index, tqkv_metal_buffer not_finite)
{
    tqkv__plan_bind(d, "not_finite", index, not_finite, not_finite.buffer ? sizeof(uint32_t) : 0, true);
}

/* Binds rows of the caller's type, which the kernel learns from the constant. */
static TQKV__NOINLINE void tqkv__plan_bind_rows(tqkv_metal_dispatch *d, const char *name, int index,
                                                tqkv_metal_buffer at, int constant, tqkv_type type, size_t bytes,
                                                bool written)
{
    tqkv__plan_bind(d, name, index, at, bytes, written);
    d->bindings[d->n_bindings - 1].alignment = tqkv__type_size(type);
    if (index != TQKV_METAL_ONLY_CHECKED) tqkv__plan_constant(d, constant, (int)type);
}

/* Binds codes and norms at index and index + 1. Kernels load 16 bytes of codes at a time. */
static TQKV__NOINLINE void tqkv__plan_bind_store(tqkv_metal_dispatch *d, const char *codes, const char *norms,
                                                 int index, const tqkv_metal_store *store, const tqkv__stream *s,
                                                 bool written)
{
    tqkv__plan_bind(d, codes, index, store->codes, s->codes_size, written);
    d->bindings[d->n_bindings - 1].alignment = 16;
    tqkv__plan_bind(d, norms, index + 1, store->norms, s->norms_size, written);
}

/* Binds the centre or the scales of a stream's channels at index, if the call uses them. Returns whether it does. */
static TQKV__NOINLINE bool tqkv__plan_bind_channels(tqkv_metal_dispatch *d, const char *name, int index,
                                                    tqkv_metal_buffer channels, const tqkv__stream *s, bool used)
{
    const size_t size = (size_t)s->n_kv_heads * (size_t)s->head_dim * sizeof(float);
    used = used && channels.buffer;
    tqkv__plan_bind(d, name, index, channels, used ? size : 0, false);
    return used;
}

/* Takes the page table of a store in buffers; its entries are known to the processor if shape.pages is set. */
static tqkv_result tqkv__plan_table(const tqkv_metal_store *store, tqkv__stream *s)
{
    if (store->pages.buffer) return tqkv__table_shape(&store->shape, s);
    return store->shape.pages ? TQKV__INVALID("pages: no buffer") : TQKV_OK;
}

/* Takes the shape of a store in buffers, without its table. */
static tqkv_result tqkv__plan_store(const tqkv_metal_store *store, tqkv_store *shape)
{
    if (!store) return TQKV__INVALID("a store is NULL");
    *shape = store->shape;
    shape->pages = NULL;
    return TQKV_OK;
}

static tqkv_result tqkv__plan_open(const tqkv_metal_store *store, tqkv__stream *s)
{
    tqkv_store shape;
    tqkv_result r = tqkv__plan_store(store, &shape);
    if (r == TQKV_OK) r = tqkv__stream_shape(&shape, s);
    return r == TQKV_OK ? tqkv__plan_table(store, s) : r;
}

/* Lets positions take the place of slots: only the kernel looks at the table. */
static tqkv_result tqkv__plan_positions(tqkv__stream *s)
{
    const int64_t room = (int64_t)s->n_pages * s->page_size;
    if (room > INT_MAX) return TQKV__REFUSE(UNSUPPORTED, "n_pages * page_size: 2^31 or more on a GPU");
    s->pages = NULL;
    if (s->page_size) s->capacity = (int)room;
    return TQKV_OK;
}

/* Binds the page table at index, if there is one, and names the constant that says so. */
static TQKV__NOINLINE void tqkv__plan_bind_pages(tqkv_metal_dispatch *d, const char *name, int index,
                                                 tqkv_metal_buffer at, const tqkv__stream *s, int constant)
{
    tqkv__plan_bind(d, name, index, at, tqkv__table_size(s), false);
    tqkv__plan_constant(d, constant, s->n_pages > 0);
}

/* Returns the buffer `bytes` further on. An offset that would wrap becomes one beyond the end of any buffer. */
static tqkv_metal_buffer tqkv__buffer_after(tqkv_metal_buffer at, size_t bytes)
{
    const size_t last = SIZE_MAX - 15;
    at.offset = at.offset > last || bytes > last - at.offset ? last : at.offset + bytes;
    return at;
}

/* Plans `each` of n_units, rows or lanes, a simdgroup, and 4 simdgroups a threadgroup, which share the codebook's cells
   (up to 3 KiB). */
static TQKV__NOINLINE void tqkv__plan_simdgroups(tqkv_metal_dispatch *d, size_t n_units, size_t each)
{
    const size_t n = n_units / each + (n_units % each != 0);
    d->rows = true;
    d->n_simdgroups = 4;
    if (n > d->grid[0]) d->grid[0] = n; /* two rings may keep different numbers of rows */
}

static tqkv_result tqkv__check_strides(tqkv_strides strides)
{
    if (strides.token <= UINT32_MAX && strides.head <= UINT32_MAX) return TQKV_OK;
    return TQKV__REFUSE(UNSUPPORTED, "strides of 2^32 values or more: not on a GPU");
}

/* Finds the bytes of the caller's rows of so many tokens, with gaps. As floats without gaps they have a size, too. */
static TQKV__NOINLINE tqkv_result tqkv__plan_extent(const tqkv__stream *s, int n_tokens, size_t *bytes)
{
    const size_t size = tqkv__type_size(s->type);
    if (!size) return TQKV__REFUSE(UNSUPPORTED, TQKV__NO_TYPE);
    if (n_tokens < 0 || !tqkv__array_size(n_tokens, s->n_kv_heads, s->head_dim, sizeof(float), bytes) ||
        !tqkv__rows_extent(s->strides, n_tokens, s->n_kv_heads, s->head_dim, size, bytes))
        return TQKV__INVALID("the number of tokens or positions is negative or too large");
    return tqkv__check_strides(s->strides);
}

/* Adds arguments for the rows of tokens from `position` on. slots: of a KV head in memory. What encodes has bound its
   flag before, as its first buffer; besides: rows that halves do not hold raise it, too. */
static tqkv_result tqkv__plan_rows(tqkv_metal_dispatch *d, const tqkv__stream *s, int slot_list, int n_tokens,
                                   int64_t position, bool besides)
{
    if (n_tokens > INT_MAX / s->n_kv_heads) return TQKV__INVALID("2^31 rows or more");
    const size_t tokens = (size_t)n_tokens, heads = (size_t)s->n_kv_heads,
                 each = (size_t)TQKV__ENCODE_ROWS(s->head_dim);
    tqkv__rows_args args;
    args.n_tokens = n_tokens;
    args.n_kv_heads = s->n_kv_heads;
    args.capacity = slot_list;
    args.first_slot = n_tokens ? tqkv__slot(s, position) : 0;
    args.block_scale = s->block_scale;
    args.page_size = s->n_pages ? s->page_size : 0;
    args.n_pages = s->n_pages ? slot_list / s->page_size : 0;
    args.token_stride = (uint32_t)s->strides.token;
    args.head_stride = (uint32_t)s->strides.head;
    args.has_flag = d->n_bindings > 0 && d->bindings[0].size > 0 ? besides ? 2 : 1 : 0;
    tqkv__plan_args(d, &args, sizeof args);
    if (d->kernel.family == TQKV_METAL_DECODE)
        tqkv__plan_simdgroups(d, tokens * heads * (size_t)TQKV__ROW_LANES(s->head_dim), TQKV__SIMD_WIDTH);
    else
        tqkv__plan_simdgroups(d, (tokens / each + (tokens % each != 0)) * heads, 1); /* each has tokens of one head */
    return TQKV_OK;
}

/* The tokens of an encode call. */
typedef struct tqkv__mapping {
    int n_tokens;
    int64_t position;
    bool besides[2]; /* each stream has halves that are kept besides codes */
} tqkv__mapping;

/* Where an encode kernel takes what belongs to a stream: names of source, codes, norms, centre, pages and scales of
   channels, and indices of the last three. */
typedef struct tqkv__encode_stream {
    const char *names[6];
    int center, pages, scale;
} tqkv__encode_stream;

/* Plans memory at `index` for the rows of each simdgroup. Metal takes no empty memory. */
static void tqkv__plan_encode_memory(tqkv_metal_dispatch *d, int index, int head_dim)
{
    const size_t rows = (size_t)TQKV__ROW_BYTES(head_dim, 1);
    d->memory[index] = 16;
    if (d->memory_each[index] < rows) d->memory_each[index] = rows;
}

/* Adds a stream to encode: arguments at index 0 or 4, then source, codes and norms; the others where e says. */
static tqkv_result tqkv__plan_stream(tqkv_metal_dispatch *d, const tqkv__encode_stream *e,
                                     const tqkv_metal_store *store, tqkv_metal_buffer src, const tqkv__mapping *mapping,
                                     tqkv__stream *s)
{
    size_t all, kept;
    const int index = d->n_arguments ? TQKV__SECOND_ARGS : 0, slot_list = s->capacity, n_tokens = mapping->n_tokens;
    tqkv_result r = tqkv__plan_extent(s, n_tokens, &all);
    if (r == TQKV_OK) r = tqkv__check_positions(s, n_tokens, mapping->position, -1);
    if (r == TQKV_OK) r = tqkv__check_written(s, n_tokens, mapping->position);
    if (r == TQKV_OK) r = tqkv__plan_positions(s);
    if (r != TQKV_OK) return r;
    const int skipped = tqkv__first_kept(s, n_tokens);
    r = tqkv__plan_extent(s, n_tokens - skipped, &kept);
    if (r == TQKV_OK)
        r = tqkv__plan_rows(d, s, slot_list, n_tokens - skipped, mapping->position + skipped,
                            mapping->besides[index > 0]);
    if (r != TQKV_OK) return r;
    tqkv__plan_constant(d, index ? TQKV_FC_VALUE_FORMAT : TQKV_FC_FORMAT, (int)s->format);
    tqkv__plan_constant(d, index ? TQKV_FC_VALUE_ROTATED : TQKV_FC_ROTATED, s->rotated);
    tqkv__plan_bind_rows(d, e->names[0], index + 1, tqkv__buffer_after(src, all - kept),
                         index ? TQKV_FC_VALUE_TYPE : TQKV_FC_TYPE, s->type, kept, false);
    tqkv__plan_bind_store(d, e->names[1], e->names[2], index + 2, store, s, true);
    tqkv__plan_constant(d, index ? TQKV_FC_VALUE_CENTER : TQKV_FC_CENTER,
                        tqkv__plan_bind_channels(d, e->names[3], e->center, store->center, s, true));
    tqkv__plan_constant(d, index ? TQKV_FC_VALUE_SCALED : TQKV_FC_SCALED,
                        tqkv__plan_bind_channels(d, e->names[5], e->scale, store->channel_scale, s, true));
    tqkv__plan_bind_pages(d, e->names[4], e->pages, store->pages, s, index ? TQKV_FC_VALUE_PAGES : TQKV_FC_PAGES);
    d->memory[0] = TQKV__CELL_BYTES;
    tqkv__plan_encode_memory(d, 1, s->head_dim);
    d->memory[2] = TQKV__TABLE_BYTES;
    return TQKV_OK;
}

typedef char tqkv__report_fits[sizeof(tqkv__table_report) == TQKV_METAL_REPORT ? 1 : -1];

TQKV_METAL_API tqkv_result tqkv_metal_plan_tables(tqkv_metal_buffer report, tqkv_metal_plan *plan)
{
    if (!tqkv__open_plan(plan, "tables")) return TQKV__INVALID(TQKV__NO_PLAN);
    for (int i = 0; i < 2; i++) {
        tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
        tqkv__plan_begin(d, TQKV_METAL_TABLES, 0, 0);
        tqkv__plan_constant(d, TQKV_FC_UNROTATE, i);
        tqkv__plan_bind(d, "report", 0, report, sizeof(tqkv__table_report), true);
        d->grid[0] = 1;
        d->n_simdgroups = 1;
    }
    return tqkv__close_plan(plan, TQKV_OK);
}

/* Encodes rows of one stream or, if there is a second store, of two. */
static tqkv_result tqkv__add_encode(const tqkv_metal_store *const stores[2], const tqkv_metal_buffer sources[2],
                                    const tqkv__mapping *mapping, tqkv_metal_buffer not_finite, tqkv_metal_plan *plan)
{
    static const tqkv__encode_stream rows[] = {
        {{"src", "codes", "norms", "center", "pages", "channel_scale"}, 5, 6, 7},
        {{"k", "keys' codes", "keys' norms", "keys' center", "keys' pages", "keys' channel_scale"}, 9, 11, 13},
        {{"v", "values' codes", "values' norms", "values' center", "values' pages", "values' channel_scale"},
         10,
         12,
         14}};
    tqkv__stream s[2];
    const int n = stores[1] ? 2 : 1;
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < n && r == TQKV_OK; i++) r = tqkv__plan_open(stores[i], &s[i]);
    if (r != TQKV_OK) return r;
    const int head_dim = s[0].head_dim, other = s[n - 1].head_dim;
    if (s[0].n_kv_heads != s[n - 1].n_kv_heads) return TQKV__INVALID("keys and values differ in n_kv_heads");
    if (other != TQKV__TAIL_DIM(head_dim)) r = tqkv__check_kernels(head_dim, other, 0);
    if (r != TQKV_OK) return r;
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_begin(d, n > 1 ? TQKV_METAL_ENCODE_KV : TQKV_METAL_ENCODE, head_dim, other);
    tqkv__plan_bind_flag(d, 4 * n, not_finite);
    d->grid[2] = (size_t)n;
    for (int i = 0; i < n && r == TQKV_OK; i++)
        r = tqkv__plan_stream(d, &rows[n - 1 + i], stores[i], sources[i], mapping, &s[i]);
    return r;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_encode(const tqkv_metal_store *keys, const tqkv_metal_store *values,
                                                  tqkv_metal_buffer k, tqkv_metal_buffer v, int n_tokens,
                                                  int64_t position, tqkv_metal_buffer not_finite, tqkv_metal_plan *plan)
{
    const tqkv__mapping mapping = {n_tokens, position, {false, false}};
    const tqkv_metal_store *const stores[2] = {keys, values};
    const tqkv_metal_buffer sources[2] = {k, v};
    if (!tqkv__open_plan(plan, "encode")) return TQKV__INVALID(TQKV__NO_PLAN);
    return tqkv__close_plan(plan, tqkv__add_encode(stores, sources, &mapping, not_finite, plan));
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_probe(const tqkv_metal_store *store, tqkv_metal_buffer src, int n_tokens,
                                                 tqkv_metal_buffer scaled, tqkv_metal_buffer not_finite,
                                                 tqkv_metal_plan *plan)
{
    tqkv__stream s;
    size_t bytes;
    if (!tqkv__open_plan(plan, "probe")) return TQKV__INVALID(TQKV__NO_PLAN);
    tqkv_result r = tqkv__stream_shape(store ? &store->shape : NULL, &s);
    if (r == TQKV_OK) r = tqkv__check_kernels(s.head_dim, s.head_dim, 0);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_begin(d, TQKV_METAL_PROBE, s.head_dim, s.head_dim);
    tqkv__plan_bind_flag(d, 3, not_finite);
    r = tqkv__plan_extent(&s, n_tokens, &bytes);
    if (r == TQKV_OK) r = tqkv__plan_rows(d, &s, s.capacity, n_tokens, 0, false);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    tqkv__plan_constant(d, TQKV_FC_FORMAT, (int)s.format);
    tqkv__plan_constant(d, TQKV_FC_ROTATED, s.rotated);
    tqkv__plan_encode_memory(d, 0, s.head_dim);
    tqkv__plan_bind_rows(d, "src", 1, src, TQKV_FC_TYPE, s.type, bytes, false);
    tqkv__plan_bind(d, "scaled", 2, scaled, (size_t)n_tokens * tqkv__center_size(&s), true);
    tqkv__plan_constant(d, TQKV_FC_CENTER, tqkv__plan_bind_channels(d, "center", 4, store->center, &s, true));
    tqkv__plan_constant(d, TQKV_FC_SCALED,
                        tqkv__plan_bind_channels(d, "channel_scale", 5, store->channel_scale, &s, true));
    return tqkv__close_plan(plan, TQKV_OK);
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_decode(const tqkv_metal_store *store, int64_t position, int n_positions,
                                                  tqkv_basis basis, tqkv_metal_buffer dst, tqkv_metal_plan *plan)
{
    tqkv__stream s;
    size_t bytes;
    if (!tqkv__open_plan(plan, "decode")) return TQKV__INVALID(TQKV__NO_PLAN);
    tqkv_result r = tqkv__plan_open(store, &s);
    if (r == TQKV_OK) r = tqkv__check_kernels(s.head_dim, s.head_dim, 0);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    const int slot_list = s.capacity;
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_begin(d, TQKV_METAL_DECODE, s.head_dim, s.head_dim);
    if (n_positions < 0 || !tqkv__basis_known(basis))
        r = TQKV__INVALID("n_positions is negative, or basis no tqkv_basis");
    if (r == TQKV_OK && n_positions > slot_list) r = TQKV__REFUSE(OUT_OF_RANGE, "n_positions is above the capacity");
    if (r == TQKV_OK) r = tqkv__check_positions(&s, n_positions, position, 0);
    if (r == TQKV_OK) r = tqkv__plan_positions(&s);
    if (r == TQKV_OK) r = tqkv__plan_extent(&s, n_positions, &bytes);
    if (r == TQKV_OK) r = tqkv__plan_rows(d, &s, slot_list, n_positions, position, false);
    if (r == TQKV_OK && !tqkv__rows_distinct(s.strides, n_positions, s.n_kv_heads, s.head_dim))
        r = TQKV__INVALID(TQKV__ROWS_SHARED);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    tqkv__plan_constant(d, TQKV_FC_FORMAT, (int)s.format);
    tqkv__plan_constant(d, TQKV_FC_UNROTATE, s.rotated && basis == TQKV_ORIGINAL);
    tqkv__plan_bind_store(d, "codes", "norms", 1, store, &s, false);
    tqkv__plan_bind_rows(d, "dst", 3, dst, TQKV_FC_TYPE, s.type, bytes, true);
    const bool center = tqkv__plan_bind_channels(d, "center", 4, store->center, &s, true),
               original = basis == TQKV_ORIGINAL;
    tqkv__plan_constant(d, TQKV_FC_CENTER, center);
    tqkv__plan_constant(d, TQKV_FC_ROTATED, s.rotated && !original);
    tqkv__plan_bind_pages(d, "pages", 5, store->pages, &s, TQKV_FC_PAGES);
    const bool scale = tqkv__plan_bind_channels(d, "channel_scale", 6, store->channel_scale, &s, original || center);
    tqkv__plan_constant(d, TQKV_FC_SCALED, scale && original);
    tqkv__plan_constant(d, TQKV_FC_CENTER_SCALED, scale && !original);
    d->memory[0] = TQKV__TABLE_BYTES;
    return tqkv__close_plan(plan, TQKV_OK);
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_rotate(tqkv_metal_buffer rows, int n_rows, int head_dim, tqkv_basis to,
                                                  tqkv_metal_plan *plan)
{
    size_t size;
    if (!tqkv__open_plan(plan, "rotate")) return TQKV__INVALID(TQKV__NO_PLAN);
    tqkv_result r = tqkv__check_kernels(head_dim, head_dim, 0);
    if (r == TQKV_OK && !tqkv__basis_known(to)) r = TQKV__INVALID("to: no tqkv_basis");
    if (r == TQKV_OK && (n_rows < 0 || !tqkv__array_size(n_rows, head_dim, 1, sizeof(float), &size)))
        r = TQKV__INVALID("n_rows is negative or too large");
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    const tqkv__rotate_args args = {n_rows};
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_begin(d, TQKV_METAL_ROTATE, head_dim, head_dim);
    tqkv__plan_constant(d, TQKV_FC_UNROTATE, to == TQKV_ORIGINAL);
    tqkv__plan_args(d, &args, sizeof args);
    tqkv__plan_bind(d, "rows", 1, rows, size, true);
    tqkv__plan_simdgroups(d, (size_t)n_rows * (size_t)TQKV__ROW_LANES(head_dim), TQKV__SIMD_WIDTH);
    return tqkv__close_plan(plan, TQKV_OK);
}

/* How a cache tells which of its rows are new; zeros: all rows count. */
typedef struct tqkv__judged_rows {
    tqkv_metal_buffer values, is_new; /* halves; room for a byte a KV head and position */
    size_t values_size, is_new_size;
    tqkv__calibrate_args args; /* from value_dim on */
} tqkv__judged_rows;

static void tqkv__plan_calibrate_args(tqkv_metal_dispatch *d, const tqkv__stream *s, int n_tokens, int n_heads,
                                      int n_queries, const tqkv__tied *tied, const tqkv__judged_rows *judged)
{
    const uint32_t dim = (uint32_t)s->head_dim;
    tqkv__calibrate_args args = judged->args;
    args.head_dim = s->head_dim;
    args.n_tokens = n_tokens;
    args.n_queries = n_queries;
    args.n_kv_heads = s->n_kv_heads;
    args.group = n_heads / s->n_kv_heads;
    args.pairs = (int32_t)tied->pairs;
    args.rotary_dim = tied->dim;
    args.token_stride = (uint32_t)s->strides.token;
    args.head_stride = (uint32_t)s->strides.head;
    args.query_token_stride = (uint32_t)n_heads * dim;
    args.query_head_stride = dim;
    tqkv__plan_args(d, &args, sizeof args);
}

/* Adds the kernel that learns. */
static tqkv_result tqkv__add_calibration(const tqkv_metal_store *shape, tqkv_metal_buffer src, int n_tokens,
                                         tqkv_metal_buffer q, int n_heads, int n_queries, tqkv_pairs pairs,
                                         const tqkv__judged_rows *judged, const tqkv_metal_buffer results[2],
                                         tqkv_metal_plan *plan)
{
    tqkv__stream s;
    tqkv__tied tied;
    size_t bytes, q_bytes;
    const tqkv_strides none = {0, 0};
    if (!shape) return TQKV__INVALID("a store is NULL");
    tqkv_result r = tqkv__stream_shape(&shape->shape, &s);
    if (r == TQKV_OK) r = tqkv__plan_extent(&s, n_tokens, &bytes);
    if (r != TQKV_OK) return r;
    if ((r = tqkv__take_pairs(pairs, shape->shape.rotary_dim, s.head_dim, &tied)) != TQKV_OK) return r;
    if (!q.buffer) n_heads = s.n_kv_heads, n_queries = 0;
    if (n_heads <= 0 || n_heads % s.n_kv_heads || n_queries < 0)
        return TQKV__INVALID("n_heads is 0 or no multiple of n_kv_heads, or n_queries negative");
    const tqkv_strides strides = tqkv__strides_of(none, n_heads, s.head_dim);
    if (!tqkv__array_size(n_queries, n_heads, s.head_dim, sizeof(float), &q_bytes))
        return TQKV__INVALID("q: too large");
    if ((r = tqkv__check_strides(strides)) != TQKV_OK) return r;
    const size_t value = tqkv__type_size(s.type), size = (size_t)s.n_kv_heads * (size_t)s.head_dim * sizeof(float);
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_begin(d, TQKV_METAL_CALIBRATE, 0, 0);
    tqkv__plan_calibrate_args(d, &s, n_tokens, n_heads, n_queries, &tied, judged);
    tqkv__plan_bind_rows(d, "src", 1, src, TQKV_FC_TYPE, s.type, bytes, false);
    tqkv__plan_bind_rows(d, "q", 2, q, TQKV_FC_VALUE_TYPE, s.type, q_bytes / sizeof(float) * value, false);
    tqkv__plan_bind(d, "center", 3, results[0], size, true);
    tqkv__plan_bind(d, "channel_scale", 4, results[1], size, true);
    tqkv__plan_bind(d, "values", 5, judged->values, judged->values_size, false);
    tqkv__plan_bind(d, "is_new", 6, judged->is_new, judged->is_new_size, true);
    d->memory[0] = 2 * (size_t)s.head_dim * sizeof(float);
    d->grid[0] = (size_t)s.n_kv_heads;
    d->n_simdgroups = (s.head_dim + TQKV__SIMD_WIDTH - 1) / TQKV__SIMD_WIDTH;
    return TQKV_OK;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_calibrate(const tqkv_metal_store *shape, tqkv_metal_buffer src, int n_tokens,
                                                     tqkv_metal_buffer q, int n_heads, int n_queries, tqkv_pairs pairs,
                                                     tqkv_metal_buffer center, tqkv_metal_buffer channel_scale,
                                                     tqkv_metal_plan *plan)
{
    const tqkv_metal_buffer results[2] = {center, channel_scale};
    tqkv__judged_rows all;
    memset(&all, 0, sizeof all);
    if (!tqkv__open_plan(plan, "calibrate")) return TQKV__INVALID(TQKV__NO_PLAN);
    return tqkv__close_plan(
        plan, tqkv__add_calibration(shape, src, n_tokens, q, n_heads, n_queries, pairs, &all, results, plan));
}

/* >>plan-split: how the threadgroups share attention. */

/* How the threadgroups share attention. Metal does not report a GPU's number of cores (7 to 80): only the shape
   decides. docs/notes/attention-gpu.md has what was measured on an H200.

   columns       Query rows of a KV head in a threadgroup, as many as registers hold: each key and value is decoded once
                 for all of them. The rows of one query are divided evenly: 9 rows are 5 + 4, not 8 + 1.
   n_simdgroups  4, or as many as the pipeline allows. Each walks its own tiles, and together they hide the latency of
                 loads.
   stretches     512 slots up to slot 8192, 2048 beyond, so that float sums do not lose digits at any length. The bounds
                 depend on slots alone: what stands beside a query changes no bit of its result. A window sees few
                 stretches wherever it stands, so there all are short.
   strands       Threadgroups that share a stretch: where they are at most TQKV__FEW otherwise, a simdgroup's part
                 of a stretch has one of its own, whose simdgroups share its four tiles. The bits are the same.
   splits        Threadgroups along the context, each with one stretch until the stretches' sums take 32 MiB of scratch,
                 with one section of 16 stretches beyond that, or with everything if heads and rows make 256 of them
                 already. All three do the same additions in the same order. */
enum {
    TQKV__STRETCH_TILES = 16,
    TQKV__SHORT_STRETCHES = 16,
    TQKV__MOST_SUMS = 32 << 20,
    TQKV__FULL = 256,
    TQKV__FEW = 64
};

typedef struct tqkv__split {
    int columns, n_simdgroups, n_splits, strands, first_stretch, n_short, sections_each, n_partials;
    bool matrix;
    size_t n_groups;                /* threadgroups of a stretch */
    size_t sums_size, scratch_size; /* [n_partials][n_rows][head_dim]; scratch: also [1 + n_partials][n_rows][2] */
    size_t sums_at, states_at;      /* of the two, in scratch */
    size_t list_at;                 /* rows of attend_list, in their range of scratch */
} tqkv__split;

static int tqkv__stretch_of(int64_t tile, int n_short)
{
    const int64_t length = TQKV__STRETCH_TILES, n = n_short;
    return (int)TQKV__STRETCH_OF_TILE(tile, length, n);
}

/* Finds the slots of the keys before slice_end that some query sees, as tiles [*first, *end): all of a ring that
   wraps. */
static void tqkv__tiles_seen(const tqkv__attention *a, int64_t slice_end, int64_t *first, int64_t *end)
{
    const tqkv__range slice = {a->first, slice_end}, visible = tqkv__visible_to(a, 0, a->call.n_queries - 1, slice);
    const int64_t seen = visible.to - visible.from, slot = seen > 0 ? tqkv__slot(&a->keys, visible.from) : 0;
    const bool wraps = seen > a->keys.capacity - slot;
    *first = wraps ? 0 : slot / TQKV__SIMD_WIDTH;
    *end = ((wraps ? a->keys.capacity : slot + seen) + TQKV__SIMD_WIDTH - 1) / TQKV__SIMD_WIDTH;
}

/* Returns the query rows of a threadgroup that multiplies matrices: 64 registers of sums. The benchmark's GPU, with 255
   registers a thread, takes 32 up to D=128. */
static int tqkv__matrix_rows(int head_dim) { return head_dim <= 64 ? 32 : head_dim <= 128 ? 16 : 8; }

/* Returns the columns of a threadgroup. A number of columns has a pipeline of its own, and Metal takes up to a second
   for one. One query has always the same rows: they are its columns. For several they are a power of two, so that a
   server, whose calls differ in their numbers of queries, does not wait for Metal's compiler while it serves. */
static int tqkv__choose_columns(int64_t rows, int n_queries)
{
    int columns = 1;
    if (n_queries == 1) return (int)rows;
    while (columns < rows) columns *= 2;
    return columns;
}

/* Returns how many stretches may be divided into strands: so many as are few threadgroups, in their part of a batch. */
static size_t tqkv__most_stranded(const tqkv__split *split, int head_dim, int64_t end, size_t most_sums)
{
    const bool has_strands = !split->matrix || (head_dim <= 256 && split->columns <= TQKV__MOST_STRAND_COLUMNS);
    if (!has_strands || end <= TQKV__STRANDS || most_sums == SIZE_MAX || !split->n_groups) return 0;
    return most_sums / (TQKV__MOST_SUMS / TQKV__FEW) / split->n_groups;
}

/* Whether stretches are divided into strands: where all are short and of one section. */
static bool tqkv__choose_strands(const tqkv__split *split, int head_dim, int64_t end, size_t most_sums)
{
    const int last = split->first_stretch + split->n_splits - 1;
    const bool short_ones = last < split->n_short && last / TQKV__SECTION == split->first_stretch / TQKV__SECTION;
    return short_ones && !split->sections_each &&
           (size_t)split->n_splits <= tqkv__most_stranded(split, head_dim, end, most_sums);
}

/* Divides query rows and the tiles [first, end) of the keys. A query must have the same bits alone and in company, so
   the number of queries does not decide whether matrices are multiplied. By counted operations narrow groups lose up to
   half of their speed on Apple's GPUs: hence 8. most_sums: bytes of the stretches' sums; SIZE_MAX: each stretch has its
   own, and all are short */
static tqkv_result tqkv__choose_split(const tqkv__attention *a, int64_t first, int64_t end, size_t most_sums,
                                      tqkv__split *split)
{
    const int head_dim = a->keys.head_dim, least = a->matrix_group ? a->matrix_group : 8;
    split->matrix = a->group >= least && head_dim == a->value_dim &&
                    (head_dim == 64 || head_dim == 128 || head_dim == 256 || tqkv__is_long(head_dim));
    const int64_t each =
        a->call.list.rows ? a->group : (int64_t)a->call.n_queries * a->group; /* rows that share tiles */
    const int64_t most = split->matrix ? tqkv__matrix_rows(head_dim) : TQKV__MAX_COLUMNS(head_dim);
    const int64_t shares = (each + most - 1) / most, section = TQKV__SECTION;
    const int64_t groups = a->call.list.rows ? shares * a->call.n_queries : shares;
    const size_t row = ((size_t)a->value_dim + 2) * sizeof(float);
    split->n_short = a->call.window || most_sums == SIZE_MAX ? INT_MAX : TQKV__SHORT_STRETCHES;
    split->first_stretch = tqkv__stretch_of(first, split->n_short);
    const int last = tqkv__stretch_of(end > first ? end - 1 : first, split->n_short);
    const int n_stretches = last - split->first_stretch + 1;
    const int n_sections = (int)(last / section - split->first_stretch / section) + 1;
    const bool full = groups * a->n_kv_heads >= TQKV__FULL && most_sums != SIZE_MAX;
    const bool stretches = !full && a->n_rows <= most_sums / row / (size_t)n_stretches;
    split->n_splits = full ? 1 : stretches ? n_stretches : n_sections;
    split->sections_each = full ? n_sections : stretches ? 0 : 1;
    split->n_groups = (size_t)(groups * a->n_kv_heads);
    split->n_partials = full && n_sections > 1 ? 2 : split->n_splits;
    split->columns = tqkv__choose_columns((each + shares - 1) / shares, a->call.list.rows ? 1 : a->call.n_queries);
    split->strands = tqkv__choose_strands(split, head_dim, end, most_sums) ? TQKV__STRANDS : 1;
    split->n_splits *= split->strands;
    split->n_partials *= split->strands;
    const bool shared = split->matrix && tqkv__is_long(head_dim); /* rows by all simdgroups of a threadgroup */
    split->n_simdgroups = shared ? TQKV__LONG_SIMDGROUPS : end > 4 ? 4 : end > 1 ? (int)end : 1;
    const size_t n = (size_t)split->n_partials;
    if (a->n_rows > SIZE_MAX / 8 / row / (n + 1)) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
    split->sums_size = a->out_elements * sizeof(float) * n;
    split->scratch_size = a->n_rows * (row * n + 2 * sizeof(float));
    split->sums_at = 0;
    split->states_at = split->sums_size;
    return TQKV_OK;
}

/* Returns the number of positions from the oldest one of a region of the context on. Only the first ones of a ring,
   which end long before the queries' own, have more behind them than an int counts. */
static int tqkv__positions_behind(const tqkv__attention *a)
{
    const int64_t n = a->call.end - a->first;
    return n < INT_MAX ? (int)n : 1 << 30;
}

/* Finds what a query sees, counted from the oldest resident position: the positions up to first_newest and its number,
   and of those the last `window`, or all. Without causality it looks as far ahead as back. */
static void tqkv__plan_seen(const tqkv__attention *a, int32_t *first_newest, int32_t *window)
{
    const int kv_len = tqkv__positions_behind(a), n = a->call.n_queries, own = a->call.window;
    *first_newest = kv_len - n;
    *window = own < kv_len ? own : 0;
    if (!a->call.non_causal) return;
    const bool all = !own || own >= kv_len + n;
    *first_newest = all ? kv_len - 1 : kv_len - n + own - 1;
    *window = all ? 0 : 2 * own - 1;
}

/* >>plan-list: which tiles lists of blocks name. */

static tqkv_result tqkv__check_list_rows(const tqkv__attention *a)
{
    const tqkv_attention *c = &a->call;
    size_t size;
    if (c->list.length <= INT_MAX - TQKV__LIST_HEADER && c->n_queries <= INT_MAX / c->list.heads &&
        tqkv__array_size(c->n_queries, c->list.heads, c->list.length + TQKV__LIST_HEADER, 8 * sizeof(int32_t), &size))
        return TQKV_OK;
    return TQKV__INVALID("list: too large for a GPU");
}

static size_t tqkv__list_rows_size(const tqkv__attention *a)
{
    const size_t row = ((size_t)a->call.list.length + TQKV__LIST_HEADER) * sizeof(int32_t);
    return a->call.list.rows ? ((size_t)a->call.n_queries * (size_t)a->call.list.heads * row + 15) / 16 * 16 : 0;
}

/* Returns the positions of its block before the oldest resident one. */
static int tqkv__list_inside(const tqkv__attention *a) { return (int)(a->first % a->call.list.block); }

/* Whether positions up to slice_end have ascending slots, and enough before them, so that ranks can take slots. */
static bool tqkv__list_in_order(const tqkv__attention *a, int64_t slice_end)
{
    const int64_t slot = slice_end > a->first ? tqkv__slot(&a->keys, a->first) : 0;
    if (a->newest_halves) return false;
    return slot >= tqkv__list_inside(a) && slot + (slice_end - a->first) <= a->keys.capacity;
}

/* Returns the slot of the first position of the block of the oldest resident one. Of newest halves, whose ring is short
   and whose oldest position depends on all queries of the call: its slot in a stretch, so that a query's ranks are
   divided as if it were alone. */
static int64_t tqkv__list_base(const tqkv__attention *a, int64_t slice_end)
{
    const int64_t length = TQKV__STRETCH_TILES * TQKV__SIMD_WIDTH;
    if (a->newest_halves) return (a->first - tqkv__list_inside(a)) % length;
    if (!tqkv__list_in_order(a, slice_end) || slice_end == a->first) return 0;
    return tqkv__slot(&a->keys, a->first) - tqkv__list_inside(a);
}

/* Returns the first position, counted from the oldest resident one, of the block where the window of a query begins, or
   its newest halves. */
static int64_t tqkv__window_block(const tqkv__attention *a, int query)
{
    int32_t newest, window;
    tqkv__plan_seen(a, &newest, &window);
    const int64_t end = (int64_t)newest + query + 1, own = tqkv__exact_at(a, query) - a->first;
    int64_t from = window && end > window ? end - window : 0;
    if (a->newest_halves && own > from) from = own;
    return (from + tqkv__list_inside(a)) / a->call.list.block * a->call.list.block;
}

/* Finds the tiles of ranks: from that of the first query's on, and before *end; with ascending slots not beyond the
   *end that there was. */
static void tqkv__listed_tiles(const tqkv__attention *a, int64_t slice_end, int64_t *first, int64_t *end)
{
    const tqkv_attention *c = &a->call;
    const int64_t size = c->list.block, width = TQKV__SIMD_WIDTH, base = tqkv__list_base(a, slice_end);
    const int64_t most = c->list.newest + (c->tree ? 64 : 0),
                  newest = c->list.newest ? (most + 2 * size - 2) / size : 0;
    const int64_t all = (tqkv__list_inside(a) + slice_end - a->first + size - 1) / size * size,
                  listed = tqkv__window_block(a, c->n_queries - 1) + (c->list.length + newest) * size;
    const int64_t tiles = (base + (listed < all ? listed : all) + width - 1) / width;
    const int64_t begin = (base + tqkv__window_block(a, 0)) / width;
    if (begin < *first) *first = begin;
    if (tiles < *end || !tqkv__list_in_order(a, slice_end)) *end = tiles;
}

/* Whether some pages may end within tiles, which are then looked up row by row. */
static bool tqkv__has_small_pages(const tqkv__attention *a)
{
    return a->keys.page_size % 64 || a->values.page_size % 64;
}

/* Plans a division by the tiles of a page, d: a GPU takes tens of instructions for one. With 2^shift < d <= 2^(shift+1)
   the factor 2^(32+shift) / d, rounded up, is at most d / 2^(32+shift) of itself too large: that is exact for tiles
   below 2^26. */
static void tqkv__plan_division(int page_size, uint32_t *factor, int32_t *shift)
{
    const int tiles = page_size / TQKV__SIMD_WIDTH;
    *shift = 0;
    while (((int64_t)2 << *shift) < tiles) ++*shift;
    *factor = (uint32_t)((((uint64_t)1 << (32 + *shift)) + (uint64_t)tiles - 1) / (uint64_t)tiles);
}

/* >>plan-attend: the dispatches of an attention. */

/* max and sum: of a slice, which also says so. The two of a slice that is read */
typedef struct tqkv__slice_buffers {
    bool from, to;
    tqkv_metal_buffer max, sum, src_max, src_sum;
} tqkv__slice_buffers;

typedef struct tqkv__attend_buffers {
    tqkv_metal_attention of; /* of a region: with the stores that it reads */
    tqkv_metal_buffer q, scratch, out;
    tqkv__slice_buffers slice;   /* zero: attends to all positions */
    int64_t slice_end;           /* of the positions to attend to */
    int halves;                  /* TQKV_FC_HALVES */
    tqkv_metal_buffer list_rows; /* what attend_list makes of the caller's list */
} tqkv__attend_buffers;

static void tqkv__plan_list_args(const tqkv__attention *a, int64_t slice_end, tqkv__attend_args *args)
{
    const int64_t first_block = a->first / a->call.list.block;
    args->list_heads = a->call.list.heads;
    args->list_row = TQKV__LIST_HEADER + (first_block <= INT_MAX ? a->call.list.length : 0); /* or none can be named */
    args->list_shift = tqkv__list_shift(a->call.list.block);
    args->list_inside = tqkv__list_inside(a);
    args->list_base = (int)tqkv__list_base(a, slice_end);
    args->list_slots = tqkv__list_in_order(a, slice_end) ? args->key_capacity : INT_MAX;
    args->list_newest = a->call.list.newest;
    args->list_first_block = first_block <= INT_MAX ? (int32_t)first_block : 0;
}

/* Takes what attention and index_scores have in common. slots: of a KV head in memory */
static TQKV__NOINLINE void tqkv__plan_key_args(const tqkv__attention *a, int slot_list, tqkv__attend_args *args)
{
    memset(args, 0, sizeof *args);
    args->n_queries = a->call.n_queries;
    args->n_kv_heads = a->n_kv_heads;
    args->group = a->group;
    args->kv_len = tqkv__positions_behind(a);
    args->query_token_stride = (uint32_t)a->call.query_strides.token;
    args->query_head_stride = (uint32_t)a->call.query_strides.head;
    args->scale = a->call.scale;
    args->key_capacity = a->keys.capacity;
    args->key_oldest_slot = args->kv_len ? tqkv__slot(&a->keys, a->first) : 0;
    args->key_block_scale = a->keys.block_scale;
    args->key_slots = slot_list;
    if (!a->keys.n_pages) return;
    args->key_page_size = a->keys.page_size;
    args->key_last_page = slot_list / a->keys.page_size - 1;
    if (!tqkv__has_small_pages(a))
        tqkv__plan_division(a->keys.page_size, &args->key_page_factor, &args->key_page_shift);
}

/* Finds where the newest halves of each query begin, counted from the newest position that it sees; without halves that
   is behind all of them. Numbers go as far as it matters, so that no sum is too large. */
static void tqkv__plan_boundary(const tqkv__attention *a, tqkv__attend_args *args)
{
    const int own = args->kv_len - a->call.n_queries,
              most = args->kv_len + a->call.n_queries; /* own: the first query's */
    const bool one = a->call.non_causal && !a->call.window;
    const int64_t from = (one ? tqkv__exact_at(a, 0) : a->call.last.from) - a->first;
    if (!tqkv__has_end(a, TQKV__LAST_KEYS)) {
        args->exact_from = INT_MAX;
        return;
    }
    args->exact_last = one || a->call.last.n > most ? most : a->call.last.n;
    args->exact_last += args->first_newest - own;
    args->exact_from = from < 0 ? 0 : from < INT_MAX ? (int)from : INT_MAX;
}

static void tqkv__plan_attend_args(const tqkv__attention *a, const tqkv__attend_buffers *b, const tqkv__split *split,
                                   tqkv__attend_args *args)
{
    tqkv__plan_key_args(a, b->of.keys->shape.capacity, args);
    tqkv__plan_seen(a, &args->first_newest, &args->window);
    args->slice_end = (int)(b->slice_end - a->first);
    tqkv__plan_boundary(a, args);
    args->first_stretch = split->first_stretch;
    args->stretch_tiles = TQKV__STRETCH_TILES;
    args->n_short = split->n_short;
    args->n_splits = split->n_splits;
    args->sections_each = split->sections_each;
    args->strands = split->strands;
    args->value_capacity = a->values.capacity;
    args->value_oldest_slot = args->kv_len ? tqkv__slot(&a->values, a->first) : 0;
    args->softcap = a->call.softcap;
    args->value_block_scale = a->values.block_scale;
    args->first_of_tree = a->call.tree ? args->kv_len - a->call.n_queries : INT_MAX;
    args->value_slots = b->of.values->shape.capacity;
    if (b->of.tail) args->tail_slots = b->of.tail->shape.capacity;
    args->tail_capacity = a->tail.capacity;
    args->tail_oldest_slot = b->of.tail && args->kv_len ? tqkv__slot(&a->tail, a->first) : 0;
    if (a->call.list.rows) tqkv__plan_list_args(a, b->slice_end, args);
    if (!a->keys.n_pages) return;
    args->value_page_size = a->values.page_size;
    args->value_last_page = args->value_slots / args->value_page_size - 1;
    if (!tqkv__has_small_pages(a))
        tqkv__plan_division(args->value_page_size, &args->value_page_factor, &args->value_page_shift);
}

/* Names the constants of attention and index_scores. center, tail_center: whether those of the keys and of their tail
   are used */
static void tqkv__plan_key_constants(tqkv_metal_dispatch *d, const tqkv__attention *a, bool center, bool tail_center)
{
    const bool rotate = a->call.query_basis == TQKV_ORIGINAL;
    tqkv__plan_constant(d, TQKV_FC_FORMAT, (int)a->keys.format);
    tqkv__plan_constant(d, TQKV_FC_VALUE_FORMAT, (int)a->values.format);
    tqkv__plan_constant(d, TQKV_FC_ROTATE_QUERIES, a->rotate_queries);
    tqkv__plan_constant(d, TQKV_FC_MANY_QUERIES, a->call.n_queries > 1);
    tqkv__plan_constant(d, TQKV_FC_SOFTCAP, a->call.softcap > 0.0f);
    tqkv__plan_constant(d, TQKV_FC_CENTER, center);
    tqkv__plan_constant(d, TQKV_FC_ROTATED, center && a->keys.rotated && !rotate);
    tqkv__plan_constant(d, TQKV_FC_TREE, a->call.tree != NULL);
    tqkv__plan_constant(d, TQKV_FC_BATCH, false);
    tqkv__plan_constant(d, TQKV_FC_SMALL_PAGES, tqkv__has_small_pages(a));
    tqkv__plan_constant(d, TQKV_FC_TAIL_FORMAT, (int)a->tail.format);
    tqkv__plan_constant(d, TQKV_FC_ROTATE_TAIL, a->tail.rotated && rotate);
    tqkv__plan_constant(d, TQKV_FC_TAIL_CENTER, tail_center);
    tqkv__plan_constant(d, TQKV_FC_TAIL_ROTATED, tail_center && a->tail.rotated && !rotate);
}

/* Binds scales of the channels of the keys, or of their tail, which are of queries in the original basis or, beside
   others, of the centre. */
static void tqkv__plan_bind_key_scale(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv_metal_store *store,
                                      bool tail, int index, bool center)
{
    const tqkv__stream *s = tail ? &a->tail : &a->keys;
    const bool original = a->call.query_basis == TQKV_ORIGINAL, used = s->head_dim > 0 && (original || center);
    const bool scaled = tqkv__plan_bind_channels(d, tail ? "tail's channel_scale" : "keys' channel_scale", index,
                                                 store->channel_scale, s, used);
    tqkv__plan_constant(d, tail ? TQKV_FC_TAIL_SCALED : TQKV_FC_SCALED, scaled && original);
    tqkv__plan_constant(d, tail ? TQKV_FC_TAIL_CENTER_SCALED : TQKV_FC_CENTER_SCALED, scaled && !original);
}

/* Names the constants that say which streams have a position in the same slot. */
static void tqkv__plan_slot_constants(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                      const tqkv__attend_args *args)
{
    const tqkv_metal_buffer pages = b->of.keys->pages, value_pages = b->of.values->pages;
    const bool same_pages = pages.buffer == value_pages.buffer && pages.offset == value_pages.offset &&
                            args->key_page_size == args->value_page_size &&
                            args->key_last_page == args->value_last_page && args->key_capacity == args->value_capacity;
    const bool values = args->key_capacity == args->value_capacity && args->key_oldest_slot == args->value_oldest_slot,
               tail = args->key_capacity == args->tail_capacity && args->key_oldest_slot == args->tail_oldest_slot;
    tqkv__plan_constant(d, TQKV_FC_SAME_SLOTS, a->keys.n_pages ? same_pages : values);
    tqkv__plan_constant(d, TQKV_FC_SHORT_STORE, args->key_capacity < TQKV__SIMD_WIDTH);
    tqkv__plan_constant(d, TQKV_FC_TAIL_ELSEWHERE, b->of.tail && !a->keys.n_pages && !tail);
}

/* Binds partial results: sums at `index`, their states behind it. */
static TQKV__NOINLINE void tqkv__plan_bind_partials(tqkv_metal_dispatch *d, int index, tqkv_metal_buffer scratch,
                                                    const tqkv__split *split, bool written)
{
    tqkv__plan_bind(d, "scratch", index, tqkv__buffer_after(scratch, split->sums_at), split->sums_size, written);
    tqkv__plan_bind(d, "scratch", index + 1, tqkv__buffer_after(scratch, split->states_at),
                    split->scratch_size - split->sums_size, written);
}

static int tqkv__planned_tail(const tqkv_metal_dispatch *d)
{
    return d->kernel.constants[TQKV_FC_TAIL_FORMAT] > 1 ? TQKV__TAIL_DIM(d->kernel.head_dim * TQKV__DIM_UNIT) : 0;
}

/* Whether a centre of keys or of their tail counts. It adds the same to all scores of a query. That shows under
   softcap, beside sinks and in a slice. */
static bool tqkv__center_counts(const tqkv__attention *a, const tqkv__attend_buffers *b, const tqkv_metal_store *keys)
{
    return keys && keys->center.buffer && (a->call.softcap > 0.0f || b->of.sinks.buffer || b->slice.to);
}

/* Binds slices of attend_merge, from index 7 on, and of attend, which does not use them. */
static void tqkv__plan_bind_slices(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__slice_buffers *slice)
{
    const bool merge = d->kernel.family == TQKV_METAL_ATTEND_MERGE;
    const size_t size = a->n_rows * sizeof(float), written = slice->to ? size : 0, read = slice->from ? size : 0;
    tqkv__plan_bind(d, "max", merge ? 7 : TQKV_METAL_ONLY_CHECKED, slice->max, written, true);
    tqkv__plan_bind(d, "sum", merge ? 8 : TQKV_METAL_ONLY_CHECKED, slice->sum, written, true);
    if (!merge) return;
    tqkv__plan_bind(d, "src_max", 9, slice->src_max, read, false);
    tqkv__plan_bind(d, "src_sum", 10, slice->src_sum, read, false);
    tqkv__plan_constant(d, TQKV_FC_FROM_SLICE, slice->from);
    tqkv__plan_constant(d, TQKV_FC_TO_SLICE, slice->to);
}

/* Returns the bytes of the output with its gaps, or of the sums of a slice, which have none. */
static size_t tqkv__plan_out_size(const tqkv__attention *a, const tqkv__attend_buffers *b)
{
    return b->slice.to ? a->out_elements * sizeof(float) : a->out_size;
}

/* Of a simdgroup: where rows lie apart, all lanes read their slots from it; of rows that several simdgroups share those
   of the values alone. */
static size_t tqkv__planned_slots(const tqkv_metal_dispatch *d, bool is_long)
{
    const uint8_t *constants = d->kernel.constants;
    const bool apart = constants[TQKV_FC_LIST] == 1 + true || constants[TQKV_FC_SMALL_PAGES] == 1 + true,
               same_slots = constants[TQKV_FC_SAME_SLOTS] == 1 + true,
               tail_elsewhere = constants[TQKV_FC_TAIL_ELSEWHERE] == 1 + true;
    return TQKV__SLOT_BYTES((size_t)(is_long ? apart : TQKV__SLOT_LISTS(apart, same_slots, tail_elsewhere)));
}

/* The memory of queries holds only the columns in use: memory limits the threadgroups on a core. */
static void tqkv__plan_attend_memory(tqkv_metal_dispatch *d, size_t key_dim, size_t value_dim, int columns)
{
    const size_t tail = (size_t)tqkv__planned_tail(d), query = TQKV__QUERY_FLOATS(key_dim) + TQKV__QUERY_FLOATS(tail);
    d->memory[0] = TQKV__ATTEND_TABLE_BYTES + (tail ? TQKV__TABLE_BYTES : 0);
    d->memory[1] = query * sizeof(float) * (size_t)columns;
    d->memory[2] = 0;
    d->memory[3] = TQKV__COLUMN_BYTES(TQKV__MAX_COLUMNS(value_dim));
    d->memory_each[2] = TQKV__ATTEND_SUM_BYTES(value_dim, (size_t)columns);
    d->memory_each[3] = (size_t)TQKV__STATE_BYTES(TQKV__MAX_COLUMNS(value_dim)) + tqkv__planned_slots(d, false);
}

/* Matrices come whole: 8, 16 or 32 columns. The sums take turns, and after the only stretch the queries' memory. Of
   rows that several simdgroups share, some queries and then the weights lie behind. */
static void tqkv__plan_matrix_memory(tqkv_metal_dispatch *d, size_t head_dim, int columns)
{
    const size_t matrices = TQKV__MATRICES(columns), tail = (size_t)tqkv__planned_tail(d),
                 queries = TQKV__MATRIX_QUERY_BYTES(head_dim + tail) * matrices;
    const bool is_long = tqkv__is_long((int)head_dim);
    const size_t rows = is_long ? TQKV__LONG_ROW_BYTES(head_dim)
                                : TQKV__MATRIX_QUERY_BYTES(head_dim) * (columns <= 8 ? 1 : 2),
                 sums = TQKV__MATRIX_SUM_BYTES(head_dim) + (tqkv__attend_args_of(d).sections_each ? queries : 0),
                 strands = tqkv__attend_args_of(d).strands > 1 && columns <= TQKV__MOST_STRAND_COLUMNS
                               ? TQKV__MATRIX_STRAND_BYTES(head_dim, matrices)
                               : 0,
                 ends = sums > strands ? sums : strands,
                 others = is_long ? queries + TQKV__LONG_WEIGHT_BYTES(matrices) : ends;
    d->memory[0] = TQKV__ATTEND_TABLE_BYTES;
    d->memory[1] = queries + rows > others ? queries + rows : others;
    d->memory[2] = d->memory_each[2] = 0;
    d->memory[3] = TQKV__COLUMN_BYTES(8 * matrices) + (tail ? TQKV__TABLE_BYTES : 0);
    d->memory_each[3] = TQKV__STATE_BYTES(8 * matrices) + tqkv__planned_slots(d, is_long);
}

/* Returns the threadgroups of a KV head and split. */
static size_t tqkv__row_groups(const tqkv_metal_dispatch *d, const tqkv__attend_args *args, size_t columns)
{
    const bool list = d->kernel.constants[TQKV_FC_LIST] == 1 + true; /* then each query has threadgroups of its own */
    const size_t n_queries = (size_t)args->n_queries, rows = (list ? 1 : n_queries) * (size_t)args->group;
    return (rows + columns - 1) / columns * (list ? n_queries : 1);
}

static void tqkv__plan_columns(tqkv_metal_dispatch *d, bool matrix, int columns)
{
    const int head_dim = d->kernel.head_dim * TQKV__DIM_UNIT, value_dim = d->kernel.value_dim * TQKV__DIM_UNIT;
    const int most = matrix ? TQKV__MOST_MATRIX_COLUMNS(head_dim) : TQKV__MAX_COLUMNS(head_dim);
    const tqkv__attend_args args = tqkv__attend_args_of(d);
    if (columns > most) columns = most;
    if (matrix != (d->kernel.family == TQKV_METAL_ATTEND_MATRIX))
        tqkv__plan_family(d, matrix ? TQKV_METAL_ATTEND_MATRIX : TQKV_METAL_ATTEND);
    tqkv__plan_constant(d, TQKV_FC_COLUMNS, columns);
    if (matrix)
        tqkv__plan_matrix_memory(d, (size_t)head_dim, columns);
    else
        tqkv__plan_attend_memory(d, (size_t)head_dim, (size_t)(value_dim ? value_dim : head_dim), columns);
    d->grid[1] = tqkv__row_groups(d, &args, (size_t)columns);
}

TQKV_METAL_API bool tqkv_metal_plan_lanes(tqkv_metal_plan *plan)
{
    for (int i = 0; i < plan->n; i++) {
        tqkv_metal_dispatch *d = &plan->d[i];
        if (d->kernel.family != TQKV_METAL_ATTEND_MATRIX) continue;
        if (d->kernel.constants[TQKV_FC_BATCH] == 1 + true) return false;
        tqkv__plan_columns(d, false, d->kernel.constants[TQKV_FC_COLUMNS] - 1);
        if (d->n_simdgroups > 4) d->n_simdgroups = 4;
    }
    return true;
}

static void tqkv__plan_attend_splits(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                     const tqkv__split *split)
{
    const bool center = tqkv__center_counts(a, b, b->of.keys), tail_center = tqkv__center_counts(a, b, b->of.tail);
    const tqkv_metal_store *tail = b->of.tail ? b->of.tail : b->of.keys; /* then nothing of it is bound */
    tqkv__plan_begin(d, TQKV_METAL_ATTEND, a->keys.head_dim, a->value_dim);
    tqkv__attend_args args;
    tqkv__plan_attend_args(a, b, split, &args);
    tqkv__plan_args(d, &args, sizeof args);
    tqkv__plan_key_constants(d, a, center, tail_center);
    tqkv__plan_slot_constants(d, a, b, &args);
    tqkv__plan_constant(d, TQKV_FC_LIST, a->call.list.rows != NULL);
    tqkv__plan_bind_rows(d, "q", 1, b->q, TQKV_FC_TYPE, a->call.query_type, a->q_size, false);
    tqkv__plan_bind_store(d, "keys' codes", "keys' norms", 2, b->of.keys, &a->keys, false);
    tqkv__plan_bind_store(d, "values' codes", "values' norms", 4, b->of.values, &a->values, false);
    tqkv__plan_bind(d, "sinks", TQKV_METAL_ONLY_CHECKED, b->of.sinks,
                    b->of.sinks.buffer ? (size_t)a->call.n_heads * sizeof(float) : 0, false);
    tqkv__plan_bind_partials(d, 6, b->scratch, split, true);
    tqkv__plan_bind_channels(d, "keys' center", 8, b->of.keys->center, &a->keys, center);
    tqkv__plan_bind_channels(d, "values' center", TQKV_METAL_ONLY_CHECKED, b->of.values->center, &a->values, true);
    tqkv__plan_bind_channels(d, "values' channel_scale", TQKV_METAL_ONLY_CHECKED, b->of.values->channel_scale,
                             &a->values, true);
    tqkv__plan_bind_pages(d, "keys' pages", 9, b->of.keys->pages, &a->keys, TQKV_FC_PAGES);
    tqkv__plan_bind_pages(d, "values' pages", 10, b->of.values->pages, &a->values, TQKV_FC_PAGES);
    tqkv__plan_bind(d, "tree", 11, b->of.tree, a->call.tree ? (size_t)a->call.n_queries * sizeof(uint64_t) : 0, false);
    tqkv__plan_bind(d, "arguments", TQKV__ITEMS_OF_ATTEND, b->of.tree, 0, false);
    tqkv__plan_bind_store(d, "tail's codes", "tail's norms", 13, tail, &a->tail, false);
    tqkv__plan_bind_channels(d, "tail's center", 15, tail->center, &a->tail, tail_center);
    tqkv__plan_bind_key_scale(d, a, b->of.keys, false, 17, center);
    tqkv__plan_bind_key_scale(d, a, tail, true, 18, tail_center);
    tqkv__plan_constant(d, TQKV_FC_HALVES, b->halves);
    tqkv__plan_constant(d, TQKV_FC_STRANDS, split->strands > 1);
    tqkv__plan_bind(d, "lists", 16, b->list_rows, tqkv__list_rows_size(a), false);
    if (a->call.list.rows) d->barrier = b->list_rows.buffer;
    tqkv__plan_bind_rows(d, "out", TQKV_METAL_ONLY_CHECKED, b->out, TQKV_FC_TYPE, a->call.output_type,
                         tqkv__plan_out_size(a, b), true);
    tqkv__plan_bind_slices(d, a, &b->slice);
    tqkv__plan_columns(d, split->matrix, split->columns);
    d->grid[0] = (size_t)a->n_kv_heads;
    d->grid[2] = (size_t)split->n_splits;
    d->n_simdgroups = split->n_simdgroups;
}

/* Plans attend_list for a planned attend, whose arguments it has. */
static void tqkv__plan_list(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                            const tqkv_metal_dispatch *attend)
{
    const size_t n_queries = (size_t)a->call.n_queries, n_rows = n_queries * (size_t)a->call.list.heads,
                 length = (size_t)a->call.list.length;
    tqkv__plan_begin(d, TQKV_METAL_ATTEND_LIST, 0, 0);
    tqkv__plan_args(d, attend->arguments[0].bytes, attend->arguments[0].size);
    tqkv__plan_bind(d, "list", 1, b->of.list, n_rows * length * sizeof(int32_t), false);
    tqkv__plan_bind(d, "scratch", 2, b->list_rows, tqkv__list_rows_size(a), true);
    tqkv__plan_bind(d, "tree", 3, b->of.tree, a->call.tree ? n_queries * sizeof(uint64_t) : 0, false);
    tqkv__plan_bind(d, "arguments", TQKV__ITEMS_OF_LIST, b->of.tree, 0, false);
    tqkv__plan_constant(d, TQKV_FC_TREE, a->call.tree != NULL);
    tqkv__plan_constant(d, TQKV_FC_BATCH, false);
    tqkv__plan_constant(d, TQKV_FC_HALVES, b->halves);
    d->memory[0] = TQKV__SIMD_WIDTH * sizeof(uint32_t);
    d->grid[0] = n_rows;
    d->n_simdgroups = length / 32 < 31 ? (int)length / 32 + 1 : 32;
}

/* Begins a call of attend_merge: all but what is read, and the centres. */
static void tqkv__plan_merge_begin(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                   tqkv__merge_args args, bool unrotate)
{
    const bool sinks = b->of.sinks.buffer != NULL;
    const size_t dim = (size_t)a->value_dim;
    args.n_rows = (int32_t)a->n_rows;
    args.n_heads = a->call.n_heads;
    args.group = a->group;
    args.out_token_stride = (uint32_t)(b->slice.to ? (size_t)args.n_heads * dim : a->call.output_strides.token);
    args.out_head_stride = (uint32_t)(b->slice.to ? dim : a->call.output_strides.head);
    tqkv__plan_begin(d, TQKV_METAL_ATTEND_MERGE, a->value_dim, a->value_dim);
    tqkv__plan_args(d, &args, sizeof args);
    tqkv__plan_constant(d, TQKV_FC_UNROTATE, unrotate);
    tqkv__plan_constant(d, TQKV_FC_ROTATED, false);
    tqkv__plan_constant(d, TQKV_FC_SINKS, sinks);
    tqkv__plan_bind(d, "sinks", 3, b->of.sinks, sinks ? (size_t)a->call.n_heads * sizeof(float) : 0, false);
    tqkv__plan_bind_rows(d, "out", 4, b->out, TQKV_FC_TYPE, b->slice.to ? TQKV_TYPE_F32 : a->call.output_type,
                         tqkv__plan_out_size(a, b), true);
    tqkv__plan_bind(d, "arguments", TQKV__ITEMS_OF_MERGE, b->of.tree, 0, false);
    tqkv__plan_constant(d, TQKV_FC_BATCH, false);
    tqkv__plan_bind_slices(d, a, &b->slice);
    d->memory_each[0] = TQKV__MERGE_BYTES((size_t)a->value_dim, 1);
    d->grid[0] = a->n_rows;
    d->n_simdgroups = 1;
}

/* Binds centre and scales of the values. Scales are of an output in the original basis or, in the other one, of the
   centre. Sums of slices have neither. */
static void tqkv__plan_bind_values(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                   bool unrotate)
{
    const bool finish = !b->slice.to, original = a->call.output_basis == TQKV_ORIGINAL,
               center = tqkv__plan_bind_channels(d, "values' center", 5, b->of.values->center, &a->values, finish),
               scaled = tqkv__plan_bind_channels(d, "values' channel_scale", 11, b->of.values->channel_scale,
                                                 &a->values, finish && (original || center));
    tqkv__plan_constant(d, TQKV_FC_VALUE_SCALED, scaled && original);
    tqkv__plan_constant(d, TQKV_FC_CENTER_SCALED, scaled && !original);
    tqkv__plan_constant(d, TQKV_FC_VALUE_CENTER, center);
    tqkv__plan_constant(d, TQKV_FC_VALUE_ROTATED, center && a->values.rotated && !unrotate);
}

/* Merges all regions of the context: splits [first positions, others, last positions], of those that there are. */
static void tqkv__plan_attend_merge(tqkv_metal_dispatch *d, const tqkv__attention *a, const tqkv__attend_buffers *b,
                                    const tqkv__split splits[3], const tqkv__split *all)
{
    const tqkv__split *split = &splits[1];
    const int length = split->sections_each ? 1
                       : split->strands > 1 ? split->strands
                                            : TQKV__SECTION,
              before = split->strands > 1 ? 0 : split->first_stretch % length;
    const int n_results = split->sections_each > 1 ? 1 : split->n_partials, most = TQKV__MERGE_SIMDGROUPS(a->value_dim);
    const int n_sections =
        (before + n_results + length - 1) / length + (splits[0].n_partials > 0) + (splits[2].n_partials > 0);
    const bool slice = b->slice.to, unrotate = a->unrotate_output && !slice;
    const tqkv__merge_args args = {
        0, 0, 0, n_results, length, split->strands, before, splits[0].n_partials, splits[2].n_partials, 0, 0};
    tqkv__plan_merge_begin(d, a, b, args, unrotate);
    tqkv__plan_bind_partials(d, 1, b->scratch, all, false);
    tqkv__plan_constant(d, TQKV_FC_ROTATED, slice && !a->values.rotated);
    tqkv__plan_bind_values(d, a, b, unrotate);
    const bool shifted = tqkv__center_counts(a, b, b->of.keys) || tqkv__center_counts(a, b, b->of.tail);
    tqkv__plan_constant(d, TQKV_FC_CENTER, shifted && !(a->call.softcap > 0.0f));
    d->n_simdgroups = most < n_sections ? most : n_sections;
    d->barrier = b->scratch.buffer;
}

/* Finds the positions of each region of the context up to slice_end. First and last are read as halves where stores
   hold them so. What a query reads as newest halves depends on its own position: where several begin the last region
   and the codes overlap. */
static void tqkv__find_regions(const tqkv__attention *a, int64_t slice_end, tqkv__range regions[TQKV__REGIONS])
{
    const int64_t low = tqkv__exact_at(a, 0), high = tqkv__exact_at(a, a->call.n_queries - 1);
    tqkv__range *codes = &regions[TQKV__CODES_REGION], *newest = &regions[TQKV__LAST_REGION];
    for (int i = 0; i < TQKV__REGIONS; i++)
        regions[i].from = regions[i].to = i == TQKV__LAST_REGION ? slice_end : a->first;
    codes->to = slice_end;
    if (tqkv__has_end(a, TQKV__FIRST_KEYS) && a->exact_below > a->first)
        codes->from = a->exact_below < slice_end ? a->exact_below : slice_end;
    regions[TQKV__FIRST_REGION].to = codes->from;
    if (a->kept) {
        regions[TQKV__FIRST_REGION].from = 0;
        regions[TQKV__FIRST_REGION].to = a->exact_below < slice_end ? a->exact_below : slice_end;
    }
    if (!tqkv__has_end(a, TQKV__LAST_KEYS)) return;
    if (low < slice_end) newest->from = low > codes->from ? low : codes->from;
    if (high < slice_end) codes->to = high > codes->from ? high : codes->from;
}

/* Takes the attention to region i alone, and its streams. */
static void tqkv__take_region(const tqkv__attention *a, const tqkv__attend_buffers *b, int i, tqkv__range positions,
                              tqkv__attention *own, tqkv__attend_buffers *buffers)
{
    const int last = i == TQKV__LAST_REGION;
    const int64_t gone =
        a->first > a->kept ? a->first - a->kept : 0; /* between the first positions and the oldest resident one */
    const int ends = last ? TQKV__LAST_KEYS : TQKV__FIRST_KEYS;
    const tqkv_metal_ends *kept = last ? &b->of.last : &b->of.first;
    *own = *a;
    *buffers = *b;
    own->first = positions.from;
    own->newest_halves = last;
    buffers->slice_end = positions.to;
    buffers->halves = last                                                           ? TQKV__NEWEST_HALVES
                      : i == TQKV__CODES_REGION && tqkv__has_end(a, TQKV__LAST_KEYS) ? TQKV__BEFORE_HALVES
                                                                                     : TQKV__ALL_POSITIONS;
    if (i == TQKV__CODES_REGION) return;
    if (a->reads[ends]) {
        own->keys = *TQKV__STREAM_AT(a, ends);
        buffers->of.keys = kept->keys;
    }
    if (a->reads[ends + 1]) {
        own->values = *TQKV__STREAM_AT(a, ends + 1);
        buffers->of.values = a->shared ? kept->keys : kept->values;
    }
    if (last || !a->kept) return;
    if (a->call.tail) {
        own->tail = *TQKV__STREAM_AT(a, TQKV__FIRST_TAIL);
        buffers->of.tail = kept->tail;
    }
    if (a->call.list.newest) /* counts what there is */
        own->call.list.newest = gone < INT_MAX - a->call.list.newest ? a->call.list.newest + (int)gone : INT_MAX;
}

/* Divides each region, and scratch: rows of lists, then sums, then states. Those of the first and last region lie
   before the others, whose number may be more than the merge reads. *all: of all regions */
static tqkv_result tqkv__split_regions(const tqkv__attention *a, const tqkv__attend_buffers *b,
                                       const tqkv__range regions[TQKV__REGIONS], size_t most_sums,
                                       tqkv__split splits[TQKV__REGIONS], tqkv__split *all)
{
    static const int order[] = {TQKV__FIRST_REGION, TQKV__LAST_REGION, TQKV__CODES_REGION};
    const tqkv__range *first_region = &regions[TQKV__FIRST_REGION], *last_region = &regions[TQKV__LAST_REGION];
    const bool halves = first_region->from < first_region->to || last_region->from < last_region->to;
    tqkv__attention alone;
    tqkv__attend_buffers buffers;
    int64_t first, end;
    memset(splits, 0, TQKV__REGIONS * sizeof *splits);
    memset(all, 0, sizeof *all);
    for (int i = 0; i < TQKV__REGIONS; i++) {
        const int p = order[i];
        tqkv__split *own = &splits[p];
        if (regions[p].from == regions[p].to && (p != TQKV__CODES_REGION || halves)) continue;
        tqkv__take_region(a, b, p, regions[p], &alone, &buffers);
        tqkv__tiles_seen(&alone, buffers.slice_end, &first, &end);
        if (a->call.list.rows) tqkv__listed_tiles(&alone, buffers.slice_end, &first, &end);
        const tqkv_result r =
            tqkv__choose_split(&alone, first, end, p == TQKV__CODES_REGION ? most_sums : SIZE_MAX, own);
        if (r != TQKV_OK) return r;

        own->sums_at = all->sums_size;
        own->states_at = all->scratch_size - all->sums_size;
        own->list_at = all->list_at;
        all->list_at += tqkv__list_rows_size(a);
        all->sums_size += own->sums_size;
        all->scratch_size += own->scratch_size;
    }
    all->states_at = all->sums_size;
    return TQKV_OK;
}

/* Plans lists and attend for each region of the context, then the merge. */
static tqkv_result tqkv__plan_attention(const tqkv__attention *a, const tqkv__attend_buffers *b, size_t most_sums,
                                        tqkv__attend_plan *plan)
{
    tqkv__split splits[TQKV__REGIONS], all;
    tqkv__attention own;
    tqkv__attend_buffers behind = *b, buffers;
    tqkv__range regions[TQKV__REGIONS];
    tqkv__find_regions(a, b->slice_end, regions);
    if (a->call.non_causal && a->call.end - a->first + a->call.n_queries > INT_MAX / 2)
        return TQKV__REFUSE(UNSUPPORTED, "non_causal with 2^30 positions and queries: not on a GPU");
    const tqkv_result r = tqkv__split_regions(a, b, regions, most_sums, splits, &all);
    if (r != TQKV_OK) return r;
    behind.scratch = tqkv__buffer_after(b->scratch, all.list_at);
    plan->listed = a->call.list.rows != NULL;
    plan->scratch_size = all.list_at + all.scratch_size;
    for (int p = 0; p < TQKV__REGIONS; p++) {
        plan->has[p] = splits[p].n_partials > 0;
        if (!plan->has[p]) continue;
        splits[p].states_at += all.sums_size;
        tqkv__take_region(a, &behind, p, regions[p], &own, &buffers);
        buffers.list_rows = tqkv__buffer_after(b->scratch, splits[p].list_at);
        tqkv__plan_attend_splits(&plan->attends[p], &own, &buffers, &splits[p]);
        if (plan->listed) tqkv__plan_list(&plan->lists[p], &own, &buffers, &plan->attends[p]);
    }
    tqkv__plan_attend_merge(&plan->merge, a, &behind, splits, &all);
    return TQKV_OK;
}

/* Adds all dispatches, in their order. */
static void tqkv__order_dispatches(const tqkv__attend_plan *from, tqkv_metal_plan *plan)
{
    if (from->empty) return;
    for (int p = 0; p < TQKV__REGIONS; p++)
        if (from->has[p] && from->listed) *tqkv__add_dispatch(plan) = from->lists[p];
    for (int p = 0; p < TQKV__REGIONS; p++)
        if (from->has[p]) *tqkv__add_dispatch(plan) = from->attends[p];
    *tqkv__add_dispatch(plan) = from->merge;
}

/* >>plan-shape: an attention over buffers as one over stores, checked. */

/* An attention over buffers as one over stores. */
typedef struct tqkv__plan_call {
    tqkv_attention attention;
    tqkv_store keys, values, tail, ends[TQKV__STREAMS - TQKV__FIRST_KEYS];
} tqkv__plan_call;

static bool tqkv__same_buffer(tqkv_metal_buffer a, tqkv_metal_buffer b)
{
    return a.buffer == b.buffer && (a.offset == b.offset || !a.buffer);
}

/* Whether two stores have the same page table, or none. */
static bool tqkv__same_table(const tqkv_metal_store *a, const tqkv_metal_store *b)
{
    const tqkv_store *x = &a->shape, *y = &b->shape;
    return tqkv__same_buffer(a->pages, b->pages) &&
           (!a->pages.buffer || (x->n_pages == y->n_pages && x->page_size == y->page_size && x->pages == y->pages));
}

/* Whether some of the bytes that a store takes from a buffer on belong to another store. */
static bool tqkv__stores_overlap(const tqkv_metal_store *a, const tqkv__stream *s, const tqkv_metal_store *b,
                                 const tqkv__stream *t)
{
    return a->codes.buffer && (tqkv__bytes_meet(a->codes, s->codes_size, b->codes, t->codes_size) ||
                               tqkv__bytes_meet(a->codes, s->codes_size, b->norms, t->norms_size) ||
                               tqkv__bytes_meet(a->norms, s->norms_size, b->codes, t->codes_size) ||
                               tqkv__bytes_meet(a->norms, s->norms_size, b->norms, t->norms_size));
}

/* Whether keys and values lie in the same bytes in the same way. */
static bool tqkv__plan_alike(const tqkv_metal_attention *from, const tqkv__attention *a)
{
    const tqkv__stream *k = &a->keys, *v = &a->values;
    return tqkv__same_buffer(from->keys->codes, from->values->codes) && k->format == v->format &&
           (!k->norms_size || tqkv__same_buffer(from->keys->norms, from->values->norms)) &&
           k->head_dim == v->head_dim && from->keys->shape.capacity == from->values->shape.capacity &&
           k->rotated == v->rotated && k->block_scale == v->block_scale;
}

/* Whether they are one stream. */
static bool tqkv__plan_shared(const tqkv_metal_attention *from, const tqkv__attention *a)
{
    return tqkv__plan_alike(from, a) && from->keys->codes.buffer && tqkv__same_table(from->keys, from->values) &&
           a->keys.ring == a->values.ring && tqkv__same_buffer(from->keys->center, from->values->center) &&
           tqkv__same_buffer(from->keys->channel_scale, from->values->channel_scale);
}

/* Checks streams: those that share bytes must be one stream, or by their page tables two in one pool. The tail lies in
   the keys' slots. */
static tqkv_result tqkv__plan_check_streams(const tqkv_metal_attention *from, const tqkv__attention *a)
{
    const tqkv__stream *k = &a->keys, *v = &a->values;
    /* tqkv__plan_shape has seen that there is one. NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    const bool paged = from->keys->pages.buffer && from->values->pages.buffer;
    if (!(tqkv__plan_alike(from, a) && paged) && !tqkv__plan_shared(from, a) &&
        tqkv__stores_overlap(from->keys, k, from->values, v))
        return TQKV__INVALID("keys and values share bytes, but are not described in the same way");
    if (!from->tail) return TQKV_OK;
    if (!tqkv__same_table(from->keys, from->tail)) return TQKV__INVALID("tail: the page table is not that of the keys");
    if (!tqkv__stores_overlap(from->keys, k, from->tail, &a->tail) &&
        !tqkv__stores_overlap(from->values, v, from->tail, &a->tail))
        return TQKV_OK;
    return TQKV__INVALID("tail: overlaps the keys or the values");
}

/* Takes the stores of the positions that are kept besides. Their centres are buffers, too. */
static tqkv_result tqkv__plan_end_shapes(const tqkv_metal_attention *from, tqkv__plan_call *call)
{
    tqkv_ends *first = &call->attention.first, *last = &call->attention.last;
    const tqkv_metal_store *const streams[3] = {from->keys, from->values, from->tail};
    const tqkv_metal_store *const ends[] = {from->first.keys, from->first.values, from->first.tail, from->last.keys,
                                            from->last.values};
    const tqkv_store **const shapes[] = {&first->keys, &first->values, &first->tail, &last->keys, &last->values};
    for (int i = 0; i < TQKV__STREAMS - TQKV__FIRST_KEYS; i++) {
        const int side = tqkv__stream_kinds[TQKV__FIRST_KEYS + i].side, n = i < 3 ? first->n : last->n;
        const tqkv_metal_store *end = ends[i], *codes = streams[side];
        tqkv_store *shape = &call->ends[i];
        *shapes[i] = end && codes && (n || side != TQKV__TAIL) ? shape : NULL;
        if (!*shapes[i] || !n) continue;
        tqkv__plan_store(end, shape);
        shape->center = codes->shape.center;
        shape->channel_scale = codes->shape.channel_scale;
        if (!tqkv__same_buffer(end->center, codes->center) ||
            !tqkv__same_buffer(end->channel_scale, codes->channel_scale))
            return TQKV__INVALID("first or last: a store with another centre or scale than the codes");
        if (end->pages.buffer || shape->n_pages)
            return TQKV__REFUSE(UNSUPPORTED, "first or last with pages of their own: not on a GPU");
    }
    return TQKV_OK;
}

/* These stand for what the processor does not know. A tree of as many queries as one has: none sees any of its
   positions. */
static const uint64_t tqkv__unknown_tree[64] = {0};
static const int32_t tqkv__unknown_list[1] = {0};

/* Does what tqkv__attention_shape does, for `from`. */
static tqkv_result tqkv__plan_shape(const tqkv_metal_attention *from, tqkv__plan_call *call, tqkv__attention *a)
{
    const tqkv_strides none = {0, 0};
    tqkv_attention *to = &call->attention;
    if (!from) return TQKV__INVALID("the attention is NULL");
    if (from->attention.tree && !from->tree.buffer) return TQKV__INVALID("tree: no buffer");
    if (from->attention.list.rows && !from->list.buffer) return TQKV__INVALID("list: no buffer");
    if (from->matrix_group < 0) return TQKV__INVALID("matrix_group is negative");
    tqkv_result r = tqkv__plan_store(from->keys, &call->keys);
    if (r == TQKV_OK) r = tqkv__plan_store(from->values, &call->values);
    if (r == TQKV_OK && from->tail) r = tqkv__plan_store(from->tail, &call->tail);
    if (r != TQKV_OK) return r;
    *to = from->attention;
    to->keys = &call->keys;
    to->values = &call->values;
    to->tail = from->tail ? &call->tail : NULL;
    if ((r = tqkv__plan_end_shapes(from, call)) != TQKV_OK) return r;
    if (from->tree.buffer && !to->tree) to->tree = tqkv__unknown_tree;
    if (from->list.buffer && !to->list.rows) to->list.rows = tqkv__unknown_list;
    to->sinks = NULL;
    memset(&to->parallel, 0, sizeof to->parallel);
    memset(&to->allocator, 0, sizeof to->allocator);
    r = tqkv__attention_shape(to, a);
    if (r == TQKV_OK) r = tqkv__plan_table(from->keys, &a->keys);
    if (r == TQKV_OK) r = tqkv__plan_table(from->values, &a->values);
    if (r == TQKV_OK) r = tqkv__check_kernels(a->keys.head_dim, a->value_dim, a->tail.head_dim);
    if (r == TQKV_OK) r = from->attention.list.rows ? tqkv__check_list(a) : tqkv__list_shape(a);
    if (r == TQKV_OK && a->call.list.rows) r = tqkv__check_list_rows(a);
    if (r == TQKV_OK) r = tqkv__check_strides(a->call.query_strides);
    if (r == TQKV_OK) r = tqkv__check_strides(a->call.output_strides);
    if (r == TQKV_OK) r = tqkv__check_strides(tqkv__strides_of(none, a->call.n_heads, a->value_dim)); /* of slices */
    a->matrix_group = from->matrix_group;
    if (r != TQKV_OK || !a->keys.page_size == !a->values.page_size) return r;
    return TQKV__REFUSE(UNSUPPORTED, "one of keys and values has pages: not on a GPU");
}

/* Lets positions take the place of slots. If a table is empty there are none, and the kernel reads neither table. */
static tqkv_result tqkv__plan_attention_positions(tqkv__attention *a)
{
    if (!a->keys.n_pages || !a->values.n_pages)
        a->keys.n_pages = a->values.n_pages = a->keys.page_size = a->values.page_size = 0;
    const tqkv_result r = tqkv__plan_positions(&a->keys);
    return r == TQKV_OK ? tqkv__plan_positions(&a->values) : r;
}

/* Takes the positions that are kept as halves; slots of positions follow. */
static tqkv_result tqkv__plan_ends(const tqkv_metal_attention *from, tqkv__attention *a)
{
    if (!a->call.first.n && !a->call.last.n) return TQKV_OK;
    a->shared = tqkv__plan_shared(from, a);
    tqkv_result r = tqkv__take_ends(a, tqkv__stream_shape);
    if (r != TQKV_OK) return r;
    if (a->kept && a->call.window && a->call.end > 1 << 30)
        return TQKV__REFUSE(UNSUPPORTED, "first, of a ring behind 2^30 positions, and a window: not on a GPU");
    const bool *first = &a->reads[TQKV__FIRST_KEYS], *last = &a->reads[TQKV__LAST_KEYS];
    if (a->keys.page_size && (first[0] != first[1] || last[0] != last[1]))
        return TQKV__REFUSE(UNSUPPORTED, "one of keys and values has pages: not on a GPU");
    if (a->keys.page_size && (first[0] || last[0]) && from->tail)
        return TQKV__REFUSE(UNSUPPORTED, "first or last of keys with a tail in pages: not on a GPU");
    const bool meet = (last[0] || last[1]) && tqkv__exact_at(a, 0) < a->exact_below;
    if (!meet || ((first[0] || !last[0]) && (first[1] || !last[1]))) return TQKV_OK;
    return TQKV__REFUSE(UNSUPPORTED, "first and last meet, and are of different streams: not on a GPU");
}

/* Takes [first, first + count) if b says slice, else all resident positions, and checks the pages that the processor
   knows. */
static tqkv_result tqkv__plan_range(const tqkv_metal_attention *from, int64_t first, int count, tqkv__attention *a,
                                    tqkv__attend_buffers *b)
{
    const bool known = !a->call.list.rows || from->attention.list.rows, slice = b->slice.to;
    tqkv_result r = slice ? tqkv__check_slice_range(a, first, count) : TQKV_OK;
    if (r != TQKV_OK) return r;
    if (slice) memset(&b->of.sinks, 0, sizeof b->of.sinks);
    const tqkv__range range = {slice ? first : a->first, slice ? first + count : a->call.end};
    const bool begins = range.from == a->first && (range.from < range.to || range.to == a->call.end);
    if (known) r = tqkv__check_seen(a, range);
    if (!begins) a->kept = 0;
    a->first = range.from;
    b->slice_end = range.to;
    return r;
}

/* Attends to [first, first + count) if b says slice, else to all resident positions. */
static tqkv_result tqkv__plan_call_of(const tqkv_metal_attention *from, int64_t first, int count, size_t most_sums,
                                      tqkv__attend_buffers *b, tqkv__attend_plan *plan)
{
    tqkv__plan_call call;
    tqkv__attention a;
    tqkv_result r = tqkv__plan_shape(from, &call, &a);
    if (r == TQKV_OK) b->of = *from;
    if (r == TQKV_OK) r = tqkv__plan_check_streams(from, &a);
    if (r == TQKV_OK) r = tqkv__attention_range(&call.attention, &a);
    if (r == TQKV_OK) r = tqkv__plan_ends(from, &a);
    if (r == TQKV_OK) r = tqkv__check_window(&a);
    plan->empty = r == TQKV_OK && !a.call.n_queries;
    if (plan->empty) return b->slice.to ? tqkv__check_slice_range(&a, first, count) : r;
    if (r == TQKV_OK) r = tqkv__plan_range(from, first, count, &a, b);
    if (r == TQKV_OK) r = tqkv__plan_attention_positions(&a);
    if (r != TQKV_OK) return r;
    return tqkv__plan_attention(&a, b, most_sums, plan);
}

/* >>plan-calls: the calls of attention on a GPU. */

/* Adds the most scratch for positions that are kept as halves: a stretch more than they fill, or all of a ring. */
static tqkv_result tqkv__add_scratch_of_end(const tqkv__attention *a, int last, size_t *bytes)
{
    const tqkv_attention *call = &a->call;
    const tqkv_store *keys = last ? call->last.keys : call->first.keys,
                     *values = last ? call->last.values : call->first.values;
    const int64_t newest = call->last.n ? (int64_t)call->last.n + call->n_queries : 0,
                  n = last ? newest : call->first.n, length = TQKV__STRETCH_TILES * TQKV__SIMD_WIDTH;
    if (!n || (!keys && !values)) return TQKV_OK;
    const bool ring = keys ? keys->ring : a->keys.ring;
    const int64_t room = !ring ? 0 : keys ? keys->capacity : a->keys.capacity;
    const size_t stretches = (size_t)((n > room ? n : room) / length + 2),
                 row = sizeof(float) * (stretches * ((size_t)a->value_dim + 2) + 2);
    if (a->n_rows > (SIZE_MAX - *bytes) / row) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
    *bytes += a->n_rows * row;
    return TQKV_OK;
}

/* Returns the most scratch of a context before tile `end` whose stretches are in strands: longer ones may take less. */
static size_t tqkv__scratch_of_strands(const tqkv__attention *a, const tqkv__split *split, int64_t end,
                                       size_t most_sums)
{
    const size_t few = tqkv__most_stranded(split, a->keys.head_dim, end, most_sums),
                 all = (size_t)(tqkv__stretch_of(end > 0 ? end - 1 : 0, split->n_short) - split->first_stretch + 1);
    const size_t stretches = few < all ? few : all, most = stretches < TQKV__SECTION ? stretches : TQKV__SECTION,
                 row = ((size_t)a->value_dim + 2) * sizeof(float);
    return most ? a->n_rows * (row * TQKV__STRANDS * most + 2 * sizeof(float)) : 0;
}

/* Finds the most scratch for any `end`. A window takes most stretches and sections where it begins with the last slot
   of a section. If the whole store takes sections, a slice of it may take stretches, up to their limit. */
static tqkv_result tqkv__plan_most_scratch(tqkv__attention *a, size_t most_sums, size_t *bytes)
{
    tqkv__split split;
    const int64_t section = (int64_t)TQKV__SECTION * TQKV__STRETCH_TILES, width = TQKV__SIMD_WIDTH;
    const int64_t seen = (int64_t)a->call.window - 1 + a->call.n_queries,
                  all = (a->keys.capacity + width - 1) / width + (a->call.list.rows ? 8 : 0);
    const bool bounded = a->call.window && !a->keys.ring && seen / width + 2 < all;
    const int64_t first = bounded ? section - 1 : 0, end = bounded ? section + (seen + width - 2) / width : all;
    tqkv_result r = tqkv__choose_split(a, first, end, most_sums, &split);
    if (r != TQKV_OK) return r;
    const size_t stretches = most_sums + a->n_rows * 2 * sizeof(float);
    *bytes = split.scratch_size;
    const size_t strands = tqkv__scratch_of_strands(a, &split, end, most_sums);
    if (split.sections_each == 1 && *bytes < stretches) *bytes = stretches;
    if (*bytes < strands) *bytes = strands;
    *bytes += tqkv__list_rows_size(a) * (a->call.first.n || a->call.last.n ? TQKV__REGIONS : 1);
    for (int last = 0; last < 2 && r == TQKV_OK; last++) r = tqkv__add_scratch_of_end(a, last, bytes);
    return r;
}

static tqkv_result tqkv__plan_scratch_within(const tqkv_metal_attention *from, size_t most_sums, size_t *bytes)
{
    tqkv__plan_call call;
    tqkv__attention a;
    tqkv_result r = tqkv__plan_shape(from, &call, &a);
    if (r == TQKV_OK) r = tqkv__plan_attention_positions(&a);
    if (r == TQKV_OK && !a.call.n_queries) *bytes = 0;
    return r == TQKV_OK && a.call.n_queries ? tqkv__plan_most_scratch(&a, most_sums, bytes) : r;
}

/* Adds all dispatches of an attention. Without scratch the plan says how much there has to be. */
static tqkv_result tqkv__add_attention(const tqkv_metal_attention *from, int64_t first, int count,
                                       tqkv__attend_buffers *b, tqkv_metal_plan *plan)
{
    tqkv__attend_plan dispatches;
    tqkv_result r = TQKV_OK;
    if (!b->scratch.buffer) r = tqkv__plan_scratch_within(from, TQKV__MOST_SUMS, &plan->scratch_size);
    if (r == TQKV_OK) r = tqkv__plan_call_of(from, first, count, TQKV__MOST_SUMS, b, &dispatches);
    if (r == TQKV_OK) tqkv__order_dispatches(&dispatches, plan);
    return r;
}

static tqkv__attend_buffers tqkv__buffers_of_call(tqkv_metal_buffer q, tqkv_metal_buffer scratch, tqkv_metal_buffer out)
{
    tqkv__attend_buffers b;
    memset(&b, 0, sizeof b);
    b.q = q;
    b.scratch = scratch;
    b.out = out;
    return b;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_attend(const tqkv_metal_attention *from, tqkv_metal_buffer q,
                                                  tqkv_metal_buffer scratch, tqkv_metal_buffer out,
                                                  tqkv_metal_plan *plan)
{
    tqkv__attend_buffers b = tqkv__buffers_of_call(q, scratch, out);
    if (!tqkv__open_plan(plan, "attend")) return TQKV__INVALID(TQKV__NO_PLAN);
    return tqkv__close_plan(plan, tqkv__add_attention(from, 0, 0, &b, plan));
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_partial(const tqkv_metal_attention *from, tqkv_metal_buffer q,
                                                          int64_t first, int count, tqkv_metal_buffer scratch,
                                                          tqkv_metal_buffer out, tqkv_metal_buffer max,
                                                          tqkv_metal_buffer sum, tqkv_metal_plan *plan)
{
    tqkv__attend_buffers b = tqkv__buffers_of_call(q, scratch, out);
    const tqkv__slice_buffers slice = {false, true, max, sum, {NULL, 0}, {NULL, 0}};
    b.slice = slice;
    if (!tqkv__open_plan(plan, "attend_partial")) return TQKV__INVALID(TQKV__NO_PLAN);
    return tqkv__close_plan(plan, tqkv__add_attention(from, first, count, &b, plan));
}

/* Adds the kernel that finishes a slice or, with another attention, adds it to that one's. */
static tqkv_result tqkv__add_merge(const tqkv_metal_attention *from, const tqkv_metal_attention *src,
                                   tqkv_metal_buffer src_out, tqkv__attend_buffers *b, tqkv_metal_plan *plan)
{
    tqkv__plan_call call;
    tqkv__attention a, other;
    tqkv_result r = tqkv__plan_shape(from, &call, &a);
    if (r == TQKV_OK && src) r = tqkv__plan_shape(src, &call, &other);
    if (r == TQKV_OK && src) r = tqkv__check_slices_match(&a, &other);
    if (r != TQKV_OK) return r;
    /* The numbers are in buffers, and are not compared. */
    if (src && (!from->values->channel_scale.buffer != !src->values->channel_scale.buffer ||
                !from->values->center.buffer != !src->values->center.buffer))
        return TQKV__INVALID("slices of values with and without a scale of their channels, or a centre");
    b->of = *from;
    if (src) memset(&b->of.sinks, 0, sizeof b->of.sinks); /* which finish reads */
    if (!a.call.n_queries) return TQKV_OK;
    const bool unrotate = !b->slice.to && (!a.values.rotated || a.unrotate_output);
    const tqkv__merge_args args = {0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0};
    tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
    tqkv__plan_merge_begin(d, &a, b, args, unrotate);
    tqkv__plan_bind(d, "src_out", 1, src_out, a.out_elements * sizeof(float), false);
    tqkv__plan_bind(d, "scratch", 2, src_out, 0, false);
    tqkv__plan_bind_values(d, &a, b, unrotate);
    tqkv__plan_constant(d, TQKV_FC_CENTER, false); /* the slices have what the keys' centres add */
    return TQKV_OK;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_merge(const tqkv_metal_attention *from, tqkv_metal_buffer out,
                                                        tqkv_metal_buffer max, tqkv_metal_buffer sum,
                                                        const tqkv_metal_attention *src, tqkv_metal_buffer src_out,
                                                        tqkv_metal_buffer src_max, tqkv_metal_buffer src_sum,
                                                        tqkv_metal_plan *plan)
{
    tqkv__attend_buffers b = tqkv__buffers_of_call(src_out, src_out, out);
    const tqkv__slice_buffers slice = {true, true, max, sum, src_max, src_sum};
    b.slice = slice;
    if (!tqkv__open_plan(plan, "attend_merge")) return TQKV__INVALID(TQKV__NO_PLAN);
    if (!src) return tqkv__close_plan(plan, TQKV__INVALID("the attention of the other slice is NULL"));
    return tqkv__close_plan(plan, tqkv__add_merge(from, src, src_out, &b, plan));
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_finish(const tqkv_metal_attention *from, tqkv_metal_buffer src_out,
                                                         tqkv_metal_buffer src_max, tqkv_metal_buffer src_sum,
                                                         tqkv_metal_buffer out, tqkv_metal_plan *plan)
{
    tqkv__attend_buffers b = tqkv__buffers_of_call(src_out, src_out, out);
    const tqkv__slice_buffers slice = {true, false, {NULL, 0}, {NULL, 0}, src_max, src_sum};
    b.slice = slice;
    if (!tqkv__open_plan(plan, "attend_finish")) return TQKV__INVALID(TQKV__NO_PLAN);
    return tqkv__close_plan(plan, tqkv__add_merge(from, NULL, src_out, &b, plan));
}

/* >>plan-batch: batches. Each item is planned as a call of its own, and the plans are joined. */

static tqkv_metal_binding *tqkv__binding_at(tqkv_metal_dispatch *d, int index)
{
    int i = 0;
    while (d->bindings[i].index != index) i++;
    return &d->bindings[i];
}

/* Whether a constant may differ between items. */
static bool tqkv__joins(int constant)
{
    return constant == TQKV_FC_COLUMNS || constant == TQKV_FC_MANY_QUERIES || constant == TQKV_FC_SAME_SLOTS ||
           constant == TQKV_FC_SHORT_STORE || constant == TQKV_FC_PAGES || constant == TQKV_FC_SMALL_PAGES ||
           constant == TQKV_FC_TREE || constant == TQKV_FC_TAIL_ELSEWHERE || constant == TQKV_FC_HALVES ||
           constant == TQKV_FC_STRANDS;
}

static bool tqkv__sees_nothing(const tqkv_metal_dispatch *attend) { return tqkv__attend_args_of(attend).kv_len == 0; }

typedef struct tqkv__batch {
    const tqkv_metal_attention *items;
    int n_items, n; /* n: those with queries; the tables have no others */
    int tables; /* of items. One is described once for each region and once for the merge, which look for other numbers
                       of threadgroups and other bytes of scratch; without halves once for all */
    const tqkv_metal_buffer *q, *out;
    tqkv_metal_buffer arguments, scratch;
} tqkv__batch;

/* Plans item i alone, with the scratch from *used on. An item without positions has no partial results. */
static tqkv_result tqkv__plan_batch_item(const tqkv__batch *b, int i, size_t *used, tqkv__attend_plan *own)
{
    const tqkv_metal_buffer none = {NULL, 0}, q = b->q ? b->q[i] : none, out = b->out ? b->out[i] : none;
    tqkv__attend_buffers buffers = tqkv__buffers_of_call(q, tqkv__buffer_after(b->scratch, *used), out);
    const tqkv_result r =
        tqkv__plan_call_of(&b->items[i], 0, 0, (size_t)TQKV__MOST_SUMS / (size_t)(b->n ? b->n : 1), &buffers, own);
    if (r != TQKV_OK || own->empty) return r;
    if (own->has[TQKV__CODES_REGION] && tqkv__sees_nothing(&own->attends[TQKV__CODES_REGION])) {
        tqkv__merge_args merge;
        memcpy(&merge, own->merge.arguments[0].bytes, sizeof merge);
        merge.n_partials = merge.before = 0;
        tqkv__replace_args(&own->merge, &merge);
    }
    if (own->scratch_size > SIZE_MAX / 2 - *used) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
    *used += own->scratch_size;
    return TQKV_OK;
}

/* Adds the range of an item to that of all. */
static tqkv_result tqkv__join_binding(tqkv_metal_binding *all, const tqkv_metal_binding *one)
{
    if (!one->size) return TQKV_OK;
    if (one->at.offset % one->alignment || one->at.offset > SIZE_MAX / 2 || one->size > SIZE_MAX / 2)
        return TQKV__INVALID("an offset of a batch's item is not aligned, or beyond any buffer");
    if (!all->size) {
        *all = *one;
        return TQKV_OK;
    }
    if (all->at.buffer != one->at.buffer)
        return TQKV__REFUSE(UNSUPPORTED, "the same array of a batch's items lies in different buffers");
    const size_t end = all->at.offset + all->size, own_end = one->at.offset + one->size;
    if (one->at.offset < all->at.offset) all->at.offset = one->at.offset;
    all->size = (end > own_end ? end : own_end) - all->at.offset;
    return TQKV_OK;
}

/* Adds a dispatch of an item to that of the items before it. */
static tqkv_result tqkv__join(tqkv_metal_dispatch *all, const tqkv_metal_dispatch *one)
{
    const bool merge = one->kernel.family == TQKV_METAL_ATTEND_MERGE,
               attend = !merge && one->kernel.family != TQKV_METAL_ATTEND_LIST;
    const tqkv__attend_args args = tqkv__attend_args_of(one);
    tqkv__attend_args all_args = tqkv__attend_args_of(all);
    uint8_t *constants = all->kernel.constants;
    bool same = all->kernel.family == one->kernel.family && all->kernel.head_dim == one->kernel.head_dim &&
                all->kernel.value_dim == one->kernel.value_dim;
    if (attend) same = same && all->grid[0] == one->grid[0] && all_args.group == args.group;
    for (int i = 0; i < TQKV_METAL_CONSTANTS; i++) {
        const uint8_t own = one->kernel.constants[i];
        const bool joins = !merge && tqkv__joins(i);
        if (!joins) same = same && constants[i] == own;
        if (joins && (i == TQKV_FC_SAME_SLOTS ? own < constants[i] : own > constants[i])) constants[i] = own;
    }
    if (!same) return TQKV__REFUSE(UNSUPPORTED, "items of a batch differ in heads, formats, types or options");
    tqkv_result r = TQKV_OK;
    for (int i = 0; r == TQKV_OK && i < one->n_bindings; i++)
        r = tqkv__join_binding(&all->bindings[i], &one->bindings[i]);
    if (one->n_simdgroups > all->n_simdgroups) all->n_simdgroups = one->n_simdgroups;
    if (!attend) return r;
    if (args.sections_each > all_args.sections_each) all_args.sections_each = args.sections_each;
    if (args.strands > all_args.strands) all_args.strands = args.strands;
    tqkv__replace_args(all, &all_args); /* which say how much memory columns take */
    return r;
}

/* Adds the regions of an item. */
static tqkv_result tqkv__join_regions(tqkv__attend_plan *all, const tqkv__attend_plan *own)
{
    tqkv_result r = tqkv__join(&all->merge, &own->merge);
    if (all->listed != own->listed) return TQKV__REFUSE(UNSUPPORTED, "some items of a batch have lists, others none");
    for (int p = 0; p < TQKV__REGIONS && r == TQKV_OK; p++) {
        if (!own->has[p]) continue;
        if (!all->has[p]) {
            all->attends[p] = own->attends[p];
            all->lists[p] = own->lists[p];
            all->has[p] = true;
        }
        r = tqkv__join(&all->attends[p], &own->attends[p]);
        if (r == TQKV_OK && own->listed) r = tqkv__join(&all->lists[p], &own->lists[p]);
    }
    return r;
}

/* Joins all items' plans in one, and counts the bytes of scratch. */
static tqkv_result tqkv__join_items(const tqkv__batch *b, size_t *used, tqkv__attend_plan *all)
{
    bool paged = false, unpaged = false;
    tqkv_result r = TQKV_OK;
    const tqkv_metal_attention *first = NULL; /* with queries */
    for (int i = 0; r == TQKV_OK && i < b->n_items; i++) {
        tqkv__attend_plan own;
        if ((r = tqkv__plan_batch_item(b, i, used, &own)) != TQKV_OK) return r;
        if (own.empty) continue;
        if (!first) *all = own;
        first = first ? first : &b->items[i];
        if (!tqkv__same_buffer(b->items[i].sinks, first->sinks))
            return TQKV__REFUSE(UNSUPPORTED, "items of a batch differ in their sinks");
        if (own.has[TQKV__CODES_REGION]) {
            const tqkv_metal_dispatch *codes = &own.attends[TQKV__CODES_REGION];
            const bool has_pages = codes->kernel.constants[TQKV_FC_PAGES] > 1;
            paged = paged || has_pages;
            unpaged = unpaged || (!has_pages && !tqkv__sees_nothing(codes));
        }
        r = tqkv__join_regions(all, &own);
    }
    if (r != TQKV_OK || !paged) return r;
    if (unpaged) return TQKV__REFUSE(UNSUPPORTED, "some items of a batch have pages, others have none");
    tqkv_metal_dispatch *codes = &all->attends[TQKV__CODES_REGION];
    if (codes->kernel.constants[TQKV_FC_SMALL_PAGES] != 1 + true)
        tqkv__plan_constant(codes, TQKV_FC_SHORT_STORE, false); /* items without positions look at no slot */
    return TQKV_OK;
}

/* Where an array of an item is: its number in what is bound for all, and in the item's plan; and its offset in the
   item. */
typedef struct tqkv__batch_array {
    int bound, index;
    size_t unit, to;
} tqkv__batch_array;
#define TQKV__OFFSET(name) offsetof(tqkv__batch_item, name)

/* Writes the offset of an item's array in what is bound for all; 0 if it has none. */
static tqkv_result tqkv__write_offsets(tqkv_metal_dispatch *all, tqkv_metal_dispatch *one,
                                       const tqkv__batch_array *arrays, size_t n, tqkv__batch_item *to)
{
    for (size_t i = 0; i < n; i++) {
        const tqkv_metal_binding *bound = tqkv__binding_at(all, arrays[i].bound),
                                 *own = tqkv__binding_at(one, arrays[i].index);
        const size_t at = own->size ? (own->at.offset - bound->at.offset) / arrays[i].unit : 0;
        if (at > UINT32_MAX) return TQKV__REFUSE(UNSUPPORTED, "arrays of a batch's items lie too far apart");
        const uint32_t offset = (uint32_t)at;
        memcpy((char *)to + arrays[i].to, &offset, sizeof offset);
    }
    return TQKV_OK;
}

/* Writes region p of an item. */
static tqkv_result tqkv__write_region(tqkv__attend_plan *all, tqkv__attend_plan *own, int p, tqkv__batch_item *to)
{
    static const tqkv__batch_array arrays[] = {
        {1, 1, TQKV__ROWS_UNIT, TQKV__OFFSET(q)}, {2, 2, TQKV__CODES_UNIT, TQKV__OFFSET(key_codes)},
        {3, 3, 4, TQKV__OFFSET(key_norms)},       {4, 4, TQKV__CODES_UNIT, TQKV__OFFSET(value_codes)},
        {5, 5, 4, TQKV__OFFSET(value_norms)},     {6, 6, 4, TQKV__OFFSET(partial_out)},
        {6, 7, 4, TQKV__OFFSET(partial_state)},   {8, 8, 4, TQKV__OFFSET(key_center)},
        {9, 9, 4, TQKV__OFFSET(key_pages)},       {10, 10, 4, TQKV__OFFSET(value_pages)},
        {11, 11, 4, TQKV__OFFSET(tree)},          {13, 13, TQKV__CODES_UNIT, TQKV__OFFSET(tail_codes)},
        {14, 14, 4, TQKV__OFFSET(tail_norms)},    {15, 15, 4, TQKV__OFFSET(tail_center)},
        {6, 16, 4, TQKV__OFFSET(list_rows)},      {17, 17, 4, TQKV__OFFSET(key_scale)},
        {18, 18, 4, TQKV__OFFSET(tail_scale)}};
    static const tqkv__batch_array list = {1, 1, 4, TQKV__OFFSET(list)};
    to->attend = tqkv__attend_args_of(&own->attends[p]);
    const tqkv_result r =
        tqkv__write_offsets(&all->attends[p], &own->attends[p], arrays, sizeof arrays / sizeof *arrays, to);
    return r == TQKV_OK && own->listed ? tqkv__write_offsets(&all->lists[p], &own->lists[p], &list, 1, to) : r;
}

/* Writes the merge of an item. */
static tqkv_result tqkv__write_merge(tqkv__attend_plan *all, tqkv__attend_plan *own, tqkv__batch_item *to)
{
    static const tqkv__batch_array arrays[] = {{1, 1, 4, TQKV__OFFSET(partial_out)},
                                               {1, 2, 4, TQKV__OFFSET(partial_state)},
                                               {4, 4, TQKV__ROWS_UNIT, TQKV__OFFSET(out)},
                                               {5, 5, 4, TQKV__OFFSET(value_center)},
                                               {11, 11, 4, TQKV__OFFSET(value_scale)}};
    memcpy(&to->merge, own->merge.arguments[0].bytes, sizeof to->merge);
    return tqkv__write_offsets(&all->merge, &own->merge, arrays, sizeof arrays / sizeof *arrays, to);
}

static size_t tqkv__batch_table_size(int n)
{
    const size_t unit = TQKV__ARGUMENTS_ALIGNMENT;
    return ((size_t)n * sizeof(tqkv__batch_item) + unit - 1) / unit * unit;
}

/* Returns table number `number` of b->tables, or the only one. */
static tqkv__batch_item *tqkv__batch_table(const tqkv__batch *b, void *contents, int number)
{
    char *first = (char *)contents;
    return (tqkv__batch_item *)(void *)(first + (b->tables > 1 ? (size_t)number * tqkv__batch_table_size(b->n) : 0));
}

/* Threadgroups and rows of the items so far. */
typedef struct tqkv__batch_counts {
    size_t groups[TQKV__REGIONS], lists[TQKV__REGIONS], rows;
} tqkv__batch_counts;

/* Writes an item into place i of all tables. */
static tqkv_result tqkv__write_item(const tqkv__batch *b, int i, void *contents, tqkv__attend_plan *own,
                                    tqkv__attend_plan *all, tqkv__batch_counts *counts)
{
    tqkv_result r = TQKV_OK;
    for (int t = 0; t < b->tables; t++) {
        tqkv__batch_item *to = tqkv__batch_table(b, contents, t) + i;
        memset(to, 0, sizeof *to);
        to->n_items = b->n;
        to->first_row = (int32_t)counts->rows;
    }
    for (int p = 0; p < TQKV__REGIONS && r == TQKV_OK; p++) {
        const tqkv_metal_dispatch *attend = &all->attends[p];
        tqkv__batch_item *to = tqkv__batch_table(b, contents, p) + i;
        if (b->tables > 1 || p == TQKV__CODES_REGION) { /* a single table is that of the codes */
            to->first_group = (int32_t)counts->groups[p];
            to->first_list = (int32_t)counts->lists[p];
        }
        if (!own->has[p]) continue;
        r = tqkv__write_region(all, own, p, to);
        counts->groups[p] +=
            tqkv__row_groups(attend, &to->attend, (size_t)attend->kernel.constants[TQKV_FC_COLUMNS] - 1) *
            own->attends[p].grid[2];
        if (own->listed) counts->lists[p] += own->lists[p].grid[0];
        if (counts->groups[p] > INT_MAX || counts->lists[p] > INT_MAX)
            return TQKV__INVALID("a batch of 2^31 rows or threadgroups");
    }
    counts->rows += own->merge.grid[0];
    if (counts->rows > INT_MAX) return TQKV__INVALID("a batch of 2^31 rows or threadgroups");
    return r == TQKV_OK ? tqkv__write_merge(all, own, tqkv__batch_table(b, contents, TQKV__REGIONS) + i) : r;
}

/* Writes the items, and counts their threadgroups and rows. */
static tqkv_result tqkv__write_items(const tqkv__batch *b, void *contents, tqkv__attend_plan *all)
{
    tqkv__batch_counts counts;
    size_t used = 0;
    memset(&counts, 0, sizeof counts);
    for (int i = 0, at = 0; i < b->n_items; i++) {
        tqkv__attend_plan own;
        tqkv_result r = tqkv__plan_batch_item(b, i, &used, &own);
        if (r == TQKV_OK && !own.empty) r = tqkv__write_item(b, at++, contents, &own, all, &counts);
        if (r != TQKV_OK) return r;
    }
    for (int p = 0; p < TQKV__REGIONS; p++) {
        all->attends[p].grid[1] = 1;
        all->attends[p].grid[2] = counts.groups[p];
        all->lists[p].grid[0] = counts.lists[p];
    }
    all->merge.grid[0] = counts.rows;
    return TQKV_OK;
}

/* Returns the rows that an item writes; value: bytes of one, dim: values of a row. */
static tqkv__output tqkv__output_of_item(const tqkv__batch_item *item, size_t value, int dim)
{
    const tqkv__merge_args *merge = &item->merge;
    const tqkv__output output = {(uint64_t)item->out * TQKV__ROWS_UNIT,    (uint64_t)merge->out_token_stride * value,
                                 (uint64_t)merge->out_head_stride * value, (uint64_t)dim * value,
                                 (size_t)(merge->n_rows / merge->n_heads), (size_t)merge->n_heads};
    return output;
}

/* Checks that no two items of a batch write the same bytes. */
static tqkv_result tqkv__check_item_outputs(const tqkv__batch *b, const tqkv__batch_item *merges, size_t value, int dim)
{
    size_t size;
    tqkv__writes writes = {NULL, 0};
    tqkv_allocator allocator = {NULL, NULL, NULL}; /* malloc: that of a cache's memory may make buffers of the GPU */
    (void)tqkv__resolve_allocator(&allocator);
    for (int i = 0; i < b->n; i++) tqkv__add_output(&writes, tqkv__output_of_item(&merges[i], value, dim));
    if (!tqkv__open_writes(&writes, &allocator, &size)) return TQKV_OUT_OF_MEMORY;
    for (int i = 0; i < b->n; i++) tqkv__add_output(&writes, tqkv__output_of_item(&merges[i], value, dim));
    const bool overlap = tqkv__writes_overlap(&writes);
    allocator.free(allocator.user, writes.extents, size);
    return overlap ? TQKV__INVALID("outputs of a batch overlap") : TQKV_OK;
}

/* Gives one dispatch for all items what it has in place of an item's: the items and all scratch. scratch: index of
   partial results, or of rows of lists */
static void tqkv__plan_joined(const tqkv__batch *b, int table, size_t used, int items, int scratch,
                              tqkv_metal_dispatch *d)
{
    tqkv_metal_binding *sums = tqkv__binding_at(d, scratch), *at = tqkv__binding_at(d, items);
    sums->at = b->scratch;
    sums->size = used;
    at->at = tqkv__buffer_after(b->arguments, b->tables > 1 ? (size_t)table * tqkv__batch_table_size(b->n) : 0);
    at->size = (size_t)b->n * sizeof(tqkv__batch_item);
    at->alignment = TQKV__ARGUMENTS_ALIGNMENT;
    tqkv__plan_constant(d, TQKV_FC_BATCH, true);
}

/* Joins all dispatches. The items say where states and rows of lists are in scratch. */
static void tqkv__plan_all_joined(const tqkv__batch *b, size_t used, tqkv__attend_plan *all)
{
    for (int p = 0; p < TQKV__REGIONS; p++) {
        tqkv_metal_dispatch *d = &all->attends[p];
        if (!all->has[p]) continue;
        tqkv__plan_joined(b, p, used, TQKV__ITEMS_OF_ATTEND, 6, d);
        tqkv__binding_at(d, 7)->size = tqkv__binding_at(d, 16)->size = 0;
        tqkv__plan_columns(d, d->kernel.family == TQKV_METAL_ATTEND_MATRIX, d->kernel.constants[TQKV_FC_COLUMNS] - 1);
        if (all->listed) tqkv__plan_joined(b, p, used, TQKV__ITEMS_OF_LIST, 2, &all->lists[p]);
    }
    tqkv__plan_joined(b, TQKV__REGIONS, used, TQKV__ITEMS_OF_MERGE, 1, &all->merge);
    tqkv__binding_at(&all->merge, 2)->size = 0;
}

/* Plans a batch. Without queries nothing is set; without contents no arguments are written. */
static tqkv_result tqkv__plan_batch(const tqkv__batch *b, void *contents, tqkv__attend_plan *all)
{
    size_t used = 0;
    if (contents && (!b->q || !b->out)) return TQKV__INVALID("q or out is NULL");
    tqkv_result r = tqkv__join_items(b, &used, all);
    all->empty = !b->n;
    if (r != TQKV_OK || all->empty) return r;
    tqkv__plan_all_joined(b, used, all);
    if (!contents) return TQKV_OK;
    if ((r = tqkv__write_items(b, contents, all)) != TQKV_OK) return r;
    const int head_dim = all->merge.kernel.head_dim * TQKV__DIM_UNIT,
              type = all->merge.kernel.constants[TQKV_FC_TYPE] - 1;
    const size_t value = tqkv__type_size((tqkv_type)type);
    const tqkv__batch_item *merges = tqkv__batch_table(b, contents, TQKV__REGIONS);
    return tqkv__check_item_outputs(b, merges, value, head_dim);
}

/* Finds the bytes of a batch's arguments, and its most scratch. */
static tqkv_result tqkv__batch_sizes(const tqkv__batch *b, tqkv_metal_plan *plan)
{
    const size_t n_items = (size_t)b->n_items;
    size_t own = 0;
    tqkv_result r = TQKV_OK;
    if (n_items > SIZE_MAX / 8 / sizeof(tqkv__batch_item)) return TQKV__INVALID("n_items is too large");
    plan->arguments_size =
        b->tables > 1 ? (size_t)b->tables * tqkv__batch_table_size(b->n_items) : n_items * sizeof(tqkv__batch_item);
    for (int i = 0; i < b->n_items && r == TQKV_OK; i++) {
        r = tqkv__plan_scratch_within(&b->items[i], TQKV__MOST_SUMS / (size_t)(b->n ? b->n : 1), &own);
        if (r == TQKV_OK && own > SIZE_MAX - plan->scratch_size) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
        plan->scratch_size += own;
    }
    return r;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_attend_batch(const tqkv_metal_attention *items, int n_items,
                                                        const tqkv_metal_buffer *q, tqkv_metal_buffer arguments,
                                                        void *contents, tqkv_metal_buffer scratch,
                                                        const tqkv_metal_buffer *out, tqkv_metal_plan *plan)
{
    tqkv__attend_plan all;
    if (!tqkv__open_plan(plan, "attend_batch")) return TQKV__INVALID(TQKV__NO_PLAN);
    if (n_items < 0 || (n_items && !items))
        return tqkv__close_plan(plan, TQKV__INVALID("n_items is negative, or items is NULL"));
    if (n_items == 0) return tqkv__close_plan(plan, TQKV_OK);
    if (!contents) arguments.buffer = NULL; /* nothing is written there, so it must not run */
    tqkv__batch b = {items, n_items, 0, 1, q, out, arguments, scratch};
    for (int i = 0; i < n_items; i++) {
        b.n += items[i].attention.n_queries != 0;
        if (items[i].attention.first.n || items[i].attention.last.n) b.tables = TQKV__REGIONS + 1;
    }
    tqkv_result r = contents ? TQKV_OK : tqkv__batch_sizes(&b, plan);
    if (r == TQKV_OK) r = tqkv__plan_batch(&b, contents, &all);
    if (r == TQKV_OK) tqkv__order_dispatches(&all, plan);
    return tqkv__close_plan(plan, r);
}

/* >>plan-index: the scores of an index and the choice of blocks */

/* Does what tqkv__index_shape does, for `from`. */
static tqkv_result tqkv__plan_index_open(const tqkv_metal_index *from, tqkv__index *x)
{
    static const int32_t not_known[1] = {0};
    if (!from || !from->keys) return TQKV__INVALID("the index or its keys are NULL");
    tqkv_store keys = from->keys->shape;
    tqkv_index call = from->index;
    if (keys.pages && !from->keys->pages.buffer) return TQKV__INVALID("pages: no buffer");
    if (!keys.pages && from->keys->pages.buffer) keys.pages = not_known;
    call.keys = &keys;
    call.weights = NULL;
    memset(&call.parallel, 0, sizeof call.parallel);
    memset(&call.allocator, 0, sizeof call.allocator);
    const tqkv_result r = tqkv__index_shape(&call, x);
    if (r != TQKV_OK) return r;
    return call.end > INT_MAX ? TQKV__REFUSE(UNSUPPORTED, "an index of 2^31 keys: not on a GPU") : TQKV_OK;
}

/* Finds `seen` and `rest`: the keys before seen + (rest + i) / ratio are at positions that query i sees. */
static void tqkv__plan_keys_seen(const tqkv__index *x, int32_t *seen, int32_t *rest)
{
    const int64_t first = x->call.positions - x->a.call.n_queries + 1, ratio = x->call.ratio, end = x->a.call.end;
    const int64_t whole = first < 0 ? (first + 1) / ratio - 1 : first / ratio;
    *seen = (int32_t)(whole < end ? whole : end);
    *rest = (int32_t)(first - whole * ratio);
}

static void tqkv__plan_index_args(const tqkv__index *x, const tqkv_metal_index *from, tqkv__index_args *args)
{
    const tqkv__attention *a = &x->a;
    /* 256 threadgroups if that gives each 128 keys, and most 1024 */
    const int64_t keys = (a->call.end - a->first) * a->call.n_queries / 256 / 128 * 128;
    const int64_t each = keys < 128 ? 128 : keys < TQKV__INDEX_KEYS ? keys : TQKV__INDEX_KEYS;
    memset(args, 0, sizeof *args);
    tqkv__plan_key_args(a, from->keys->shape.capacity, &args->keys);
    args->keys.value_capacity = args->keys.key_capacity;
    tqkv__plan_keys_seen(x, &args->seen, &args->seen_rest);
    args->ratio = x->call.ratio;
    args->end = (int32_t)a->call.end;
    args->block = x->call.block;
    args->n_blocks = (int32_t)x->blocks;
    args->first_key = (int32_t)a->first;
    args->blocks_each = each > x->call.block ? (int)(each / x->call.block) : 1;
    args->pool = (int32_t)x->call.pool;
    args->relu = x->call.relu;
    args->has_weights = from->weights.buffer != NULL;
}

static void tqkv__plan_score(const tqkv__index *x, const tqkv__index_args *args, const tqkv_metal_index *from,
                             tqkv_metal_buffer q, tqkv_metal_buffer scores, tqkv_metal_dispatch *d)
{
    static const uint8_t absent[] = {TQKV_FC_TAIL_SCALED, TQKV_FC_TAIL_CENTER_SCALED, TQKV_FC_HALVES,
                                     TQKV_FC_SHORT_STORE, TQKV_FC_TAIL_ELSEWHERE,     TQKV_FC_STRANDS};
    const tqkv__attention *a = &x->a;
    const size_t n_queries = (size_t)a->call.n_queries, head_dim = (size_t)a->key_dim;
    const int columns = a->call.n_heads < TQKV__INDEX_COLUMNS ? a->call.n_heads : TQKV__INDEX_COLUMNS;
    const size_t matrices = TQKV__MATRICES(columns);
    tqkv__plan_begin(d, TQKV_METAL_INDEX_SCORES, a->key_dim, a->key_dim);
    tqkv__plan_args(d, args, sizeof *args);
    tqkv__plan_bind_rows(d, "q", 1, q, TQKV_FC_TYPE, a->call.query_type, a->q_size, false);
    tqkv__plan_bind_store(d, "keys' codes", "keys' norms", 2, from->keys, &a->keys, false);
    tqkv__plan_bind(d, "weights", 4, from->weights, from->weights.buffer ? a->n_rows * sizeof(float) : 0, false);
    tqkv__plan_bind(d, "scores", 5, scores, x->size, true);
    const bool center = tqkv__plan_bind_channels(d, "keys' center", 6, from->keys->center, &a->keys, true);
    tqkv__plan_bind_pages(d, "keys' pages", 7, from->keys->pages, &a->keys, TQKV_FC_PAGES);
    tqkv__plan_key_constants(d, a, center, false);
    tqkv__plan_bind_key_scale(d, a, from->keys, false, 8, center);
    for (size_t i = 0; i < sizeof absent; i++) tqkv__plan_constant(d, absent[i], 0);
    tqkv__plan_constant(d, TQKV_FC_COLUMNS, columns);
    tqkv__plan_constant(d, TQKV_FC_SAME_SLOTS, true);
    tqkv__plan_constant(d, TQKV_FC_LIST, true);
    d->memory[0] = TQKV__TABLE_BYTES;
    d->memory[1] = TQKV__MATRIX_QUERY_BYTES(head_dim) * matrices;
    d->memory[2] = TQKV__INDEX_KEYS * sizeof(float);
    d->memory[3] = TQKV__COLUMN_BYTES(8 * matrices);
    d->grid[0] = (size_t)((x->blocks + args->blocks_each - 1) / args->blocks_each);
    d->grid[1] = n_queries;
    d->n_simdgroups = TQKV__MATRIX_SIMDGROUPS;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_index_scores(const tqkv_metal_index *from, tqkv_metal_buffer q,
                                                        tqkv_metal_buffer scores, tqkv_metal_plan *plan)
{
    tqkv__index_args args;
    tqkv__index x;
    if (!tqkv__open_plan(plan, "index_scores")) return TQKV__INVALID(TQKV__NO_PLAN);
    tqkv_result r = tqkv__plan_index_open(from, &x);
    if (r == TQKV_OK && x.a.key_dim != 64 && x.a.key_dim != 128)
        r = TQKV__REFUSE(UNSUPPORTED, "an index on a GPU has a head_dim of 64 or 128");
    if (r != TQKV_OK || !x.a.call.n_queries) return tqkv__close_plan(plan, r);
    if (from->keys->shape.pages)
        r = tqkv__check_pages(&x.a.keys, x.a.first, tqkv__index_end(&x, x.a.call.n_queries - 1), 0);
    if (r == TQKV_OK) r = tqkv__plan_positions(&x.a.keys);
    if (r == TQKV_OK) r = tqkv__check_strides(x.a.call.query_strides);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    tqkv__plan_index_args(&x, from, &args);
    tqkv__plan_score(&x, &args, from, q, scores, tqkv__add_dispatch(plan));
    return tqkv__close_plan(plan, TQKV_OK);
}

/* How the resident blocks of a row are divided: one threadgroup up to 16384, or where many queries fill the GPU. Else
   at most 64 chunks of a multiple of 4096 blocks, four a thread. */
enum { TQKV__CHOOSE_BLOCKS = 4096, TQKV__CHOOSE_CHUNKS = 64, TQKV__CHOOSE_QUERIES = 16 };

static bool tqkv__chooses_alone(int64_t n_blocks, int n_queries)
{
    return n_blocks <= 4 * TQKV__CHOOSE_BLOCKS || n_queries >= TQKV__CHOOSE_QUERIES;
}

static void tqkv__plan_choose_args(const tqkv__index *x, int k, tqkv__choose_args *args)
{
    const int from = (int)(x->a.first / x->call.block);
    const int64_t n_blocks = x->blocks - from, most = (int64_t)TQKV__CHOOSE_BLOCKS * TQKV__CHOOSE_CHUNKS;
    const bool alone = tqkv__chooses_alone(n_blocks, x->a.call.n_queries);
    memset(args, 0, sizeof *args);
    tqkv__plan_keys_seen(x, &args->seen, &args->seen_rest);
    args->ratio = x->call.ratio;
    args->end = (int32_t)x->a.call.end;
    args->block = x->call.block;
    args->n_blocks = (int32_t)x->blocks;
    args->from = from;
    args->k = k;
    args->first = x->call.first;
    args->newest = x->call.newest;
    args->chunk = (int32_t)(alone ? n_blocks : (n_blocks + most - 1) / most * TQKV__CHOOSE_BLOCKS);
    args->n_chunks = (int32_t)(alone ? 1 : (n_blocks + args->chunk - 1) / args->chunk);
}

/* Returns the words of scratch of a query. That of fewer blocks is not larger. */
static size_t tqkv__choose_words(int64_t n_blocks, int n_queries)
{
    const size_t chunks = TQKV__CHOOSE_CHUNKS, blocks = (size_t)n_blocks;
    return tqkv__chooses_alone(n_blocks, n_queries) ? 0 : TQKV__CHOOSE_SCRATCH(chunks, blocks);
}

static void tqkv__plan_choose(const tqkv__choose_args *args, size_t n_queries, const tqkv_metal_buffer buffers[3],
                              tqkv_metal_dispatch *d)
{
    const int most = 1024 / TQKV__SIMD_WIDTH, each = TQKV__CHOOSE_BLOCKS / most; /* simdgroups, and blocks of one */
    const bool chunks = args->step == TQKV__CHOOSE_COUNT || args->step == TQKV__CHOOSE_GATHER;
    const int64_t n_blocks = (int64_t)args->n_blocks - args->from;
    tqkv__plan_begin(d, TQKV_METAL_INDEX_CHOICE, 0, 0);
    tqkv__plan_args(d, args, sizeof *args);
    tqkv__plan_bind(d, "scores", 1, buffers[0], n_queries * (size_t)args->n_blocks * sizeof(float), false);
    tqkv__plan_bind(d, "scratch", 2, buffers[1],
                    n_queries * tqkv__choose_words(n_blocks, (int)n_queries) * sizeof(uint32_t), true);
    tqkv__plan_bind(d, "list", 3, buffers[2], n_queries * (size_t)args->k * sizeof(int32_t), true);
    d->memory[0] = TQKV__CHOOSE_COUNTS * sizeof(uint32_t);
    d->memory[1] = (2 * TQKV__CHOOSE_SUMS + TQKV__SIMD_WIDTH + 4) * sizeof(uint32_t);
    d->grid[0] = !args->k ? 0 : chunks ? (size_t)args->n_chunks : 1;
    d->grid[1] = n_queries;
    d->n_simdgroups = args->chunk / each < most ? args->chunk / each + 1 : most;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_index_choose(const tqkv_metal_index *from, tqkv_metal_buffer scores, int k,
                                                        tqkv_metal_buffer scratch, tqkv_metal_buffer list,
                                                        tqkv_metal_plan *plan)
{
    const tqkv_metal_buffer buffers[3] = {scores, scratch, list};
    tqkv__choose_args args;
    tqkv__index x;
    size_t size;
    if (!tqkv__open_plan(plan, "index_choose")) return TQKV__INVALID(TQKV__NO_PLAN);
    tqkv_result r = tqkv__plan_index_open(from, &x);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    const int n_queries = x.a.call.n_queries;
    if (!scratch.buffer) /* of the whole store, whose first and last block may be cut */
        plan->scratch_size = (size_t)n_queries * sizeof(uint32_t) *
                             tqkv__choose_words(tqkv__room(&x.a.keys) / x.call.block + 2, n_queries);
    if (k < 0 || !tqkv__array_size(n_queries, k, 1, sizeof(int32_t), &size))
        r = TQKV__INVALID("k is negative, or the list too large");
    if (r != TQKV_OK || !n_queries) return tqkv__close_plan(plan, r);
    tqkv__plan_choose_args(&x, k, &args);
    for (int i = 0; i < (args.n_chunks > 1 ? 3 : 1); i++) {
        tqkv_metal_dispatch *d = tqkv__add_dispatch(plan);
        args.step = args.n_chunks > 1 ? i : TQKV__CHOOSE_ALONE;
        tqkv__plan_choose(&args, (size_t)n_queries, buffers, d);
        if (i) d->barrier = scratch.buffer;
    }
    return tqkv__close_plan(plan, TQKV_OK);
}

/* >>plan-cache: appending to a cache and attending to it */

/* A call of a cache at the beginning of `memory`. */
typedef struct tqkv__cache_plan {
    const tqkv_cache *c;
    tqkv_metal_buffer memory;
    tqkv_metal_plan *plan;
} tqkv__cache_plan;

static tqkv_metal_buffer tqkv__buffer_within(const tqkv__cache_plan *p, const void *at)
{
    tqkv_metal_buffer found = p->memory;
    found.offset += (size_t)((const char *)at - (const char *)p->c);
    return found;
}

static tqkv_metal_store tqkv__store_in_buffer(const tqkv__cache_plan *p, const tqkv_store *s)
{
    tqkv_metal_store store;
    memset(&store, 0, sizeof store);
    store.shape = *s;
    store.codes = tqkv__buffer_within(p, s->codes);
    store.norms = tqkv__buffer_within(p, s->norms);
    if (s->center) store.center = tqkv__buffer_within(p, s->center);
    if (s->channel_scale) store.channel_scale = tqkv__buffer_within(p, s->channel_scale);
    return store;
}

/* Returns the strides of a call: those that are given, or the cache's. */
static tqkv_cache_strides tqkv__layout_of_call(const tqkv_cache *c, const tqkv_cache_strides *given)
{
    const tqkv_cache_strides own = {c->keys.strides, c->values.strides, c->attention.query_strides,
                                    c->attention.output_strides};
    return given ? *given : own;
}

/* Rows that an append takes, of keys, values and tail: tokens from `position` on. */
typedef struct tqkv__rows_in_buffers {
    tqkv_metal_buffer at[TQKV__CACHE_STREAMS], not_finite;
    tqkv_strides strides[TQKV__CACHE_STREAMS];
    tqkv_type type;
    int n_tokens;
    int64_t position;
    bool learnt; /* keys have the centre and the scale that the kernels before learn */
} tqkv__rows_in_buffers;

/* Returns a store of the cache, for rows of the caller's type. */
static tqkv_metal_store tqkv__target_of_rows(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows, int i)
{
    const int side = tqkv__stream_kinds[i].side;
    tqkv_metal_store store = tqkv__store_in_buffer(p, TQKV__STORE_AT(p->c, i));
    store.shape.type = rows->type;
    store.shape.strides = rows->strides[side];
    if (!rows->learnt || side != TQKV__KEYS) return store;
    store.center = tqkv__buffer_within(p, tqkv__channel_room(p->c, TQKV__KEYS, TQKV__CENTERS));
    store.channel_scale = tqkv__buffer_within(p, tqkv__channel_room(p->c, TQKV__KEYS, TQKV__SCALES));
    return store;
}

/* Encodes rows to stores `one` and `other` of a cache, as far as it has them. */
static tqkv_result tqkv__add_rows(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows, int one, int other)
{
    tqkv__mapping mapping = {rows->n_tokens, rows->n_tokens ? rows->position : 0, {false, false}};
    tqkv_metal_store stores[2];
    const tqkv_metal_store *to[2] = {NULL, NULL};
    tqkv_metal_buffer from[2] = {{NULL, 0}, {NULL, 0}};
    const int which[] = {one, other};
    int n = 0;
    for (int i = one == other; i < 2; i++) {
        if (!tqkv__has_store(p->c, which[i])) continue;
        stores[n] = tqkv__target_of_rows(p, rows, which[i]);
        from[n] = rows->at[tqkv__stream_kinds[which[i]].side];
        mapping.besides[n] = tqkv__keeps_halves(p->c, which[i]);
        to[n] = &stores[n];
        n++;
    }
    return n ? tqkv__add_encode(to, from, &mapping, rows->not_finite, p->plan) : TQKV_OK;
}

/* Returns the first n tokens of rows, or as many as there are. */
static tqkv__rows_in_buffers tqkv__rows_until(const tqkv__rows_in_buffers *rows, int64_t n)
{
    tqkv__rows_in_buffers some = *rows;
    if (n < some.n_tokens) some.n_tokens = n > 0 ? (int)n : 0;
    return some;
}

/* Returns rows without the first n tokens, of which there are more. */
static tqkv__rows_in_buffers tqkv__rows_after(const tqkv_cache *c, const tqkv__rows_in_buffers *rows, int n)
{
    tqkv__rows_in_buffers some = *rows;
    for (int i = 0; i < TQKV__CACHE_STREAMS; i++) {
        const tqkv_store *s = tqkv__store_of(c, i);
        if (!s) continue;
        const size_t token = tqkv__strides_of(rows->strides[i], s->n_kv_heads, s->head_dim).token;
        some.at[i] = tqkv__buffer_after(some.at[i], (size_t)n * token * tqkv__type_size(rows->type));
    }
    some.n_tokens -= n;
    some.position += n;
    return some;
}

/* Encodes rows to the cache's streams (0), or to what is raw of them (TQKV__RAW). A tail lies apart from keys that are
   not the values. */
static tqkv_result tqkv__add_streams(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows, int first)
{
    const int keys = first + TQKV__KEYS, tail = first + TQKV__TAIL;
    const tqkv_result r = tqkv__add_rows(p, rows, keys, p->c->shared ? tail : first + TQKV__VALUES);
    return r == TQKV_OK && !p->c->shared ? tqkv__add_rows(p, rows, tail, tail) : r;
}

/* Encodes rows of the first positions to what is kept of them besides: of the tail, or of keys and values. None: the
   kernels of all. */
static tqkv_result tqkv__add_first(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows, bool tail)
{
    const tqkv__rows_in_buffers some = tqkv__rows_until(rows, p->c->exact_first - rows->position);
    if (rows->n_tokens && !some.n_tokens) return TQKV_OK;
    return tail ? tqkv__add_rows(p, &some, TQKV__FIRST_TAIL, TQKV__FIRST_TAIL)
                : tqkv__add_rows(p, &some, TQKV__FIRST_KEYS, TQKV__FIRST_VALUES);
}

/* Encodes rows of a cache that does not learn, or no longer. */
static tqkv_result tqkv__add_coded(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows)
{
    tqkv_result r = tqkv__add_streams(p, rows, 0);
    if (r == TQKV_OK) r = tqkv__add_first(p, rows, true);
    if (r == TQKV_OK) r = tqkv__add_first(p, rows, false);
    return r == TQKV_OK ? tqkv__add_rows(p, rows, TQKV__LAST_KEYS, TQKV__LAST_VALUES) : r;
}

/* Returns the raw halves of keys and values as rows to encode. */
static tqkv__rows_in_buffers tqkv__raw_rows(const tqkv__cache_plan *p, tqkv_metal_buffer not_finite)
{
    tqkv__rows_in_buffers rows;
    memset(&rows, 0, sizeof rows);
    rows.not_finite = not_finite;
    rows.type = TQKV_TYPE_F16;
    rows.n_tokens = p->c->learn_from;
    rows.learnt = true;
    for (int i = TQKV__KEYS; i <= TQKV__VALUES; i++) {
        const tqkv_store *raw = &p->c->raw[i];
        if (!raw->head_dim) continue;
        rows.at[i] = tqkv__buffer_within(p, raw->codes);
        rows.strides[i].token = (size_t)raw->head_dim;
        rows.strides[i].head = (size_t)raw->capacity * (size_t)raw->head_dim;
    }
    return rows;
}

/* Learns centre and scale of the keys from what is raw, as tqkv__learn does. */
static tqkv_result tqkv__add_learning(const tqkv__cache_plan *p)
{
    const tqkv_metal_buffer none = {NULL, 0};
    const int side = p->c->shared ? TQKV__KEYS : TQKV__VALUES;
    const tqkv__rows_in_buffers rows = tqkv__raw_rows(p, none);
    tqkv_metal_store keys = tqkv__target_of_rows(p, &rows, TQKV__KEYS);
    const tqkv_metal_buffer results[2] = {keys.center, keys.channel_scale};
    tqkv__judged_rows judged;
    memset(&judged, 0, sizeof judged);
    judged.values = rows.at[side];
    judged.values_size = p->c->raw[side].codes_size;
    judged.is_new = tqkv__buffer_within(p, p->c->is_new);
    judged.is_new_size = (size_t)keys.shape.n_kv_heads * (size_t)rows.n_tokens;
    judged.args.value_dim = p->c->raw[side].head_dim;
    judged.args.n_exact = p->c->exact_first < rows.n_tokens ? p->c->exact_first : rows.n_tokens;
    judged.args.least_rest = TQKV__LEAST_POSITIONS;
    judged.args.least_new = tqkv__least_new(p->c);
    judged.args.value_token_stride = (uint32_t)rows.strides[side].token;
    judged.args.value_head_stride = (uint32_t)rows.strides[side].head;
    return tqkv__add_calibration(&keys, rows.at[TQKV__KEYS], rows.n_tokens, none, 0, 0, p->c->pairs, &judged, results,
                                 p->plan);
}

/* Encodes the raw halves, and of the newest those that their rings hold at `end`: as tqkv__settle. */
static tqkv_result tqkv__add_settling(const tqkv__cache_plan *p, int64_t end, tqkv_metal_buffer not_finite)
{
    const tqkv__rows_in_buffers rows = tqkv__raw_rows(p, not_finite);
    const int64_t oldest = end - tqkv__newest_room(p->c);
    tqkv_metal_dispatch *learns = &p->plan->d[p->plan->n];
    tqkv_result r = tqkv__add_learning(p);
    if (r == TQKV_OK) learns->barrier = p->memory.buffer;
    tqkv_metal_dispatch *reads = &p->plan->d[p->plan->n];
    if (r == TQKV_OK) r = tqkv__add_rows(p, &rows, TQKV__KEYS, TQKV__VALUES);
    if (r != TQKV_OK) return r;
    reads->barrier = p->memory.buffer;
    r = tqkv__add_first(p, &rows, false);
    if (r != TQKV_OK || oldest >= rows.n_tokens) return r;
    const tqkv__rows_in_buffers newest = tqkv__rows_after(p->c, &rows, oldest > 0 ? (int)oldest : 0);
    return tqkv__add_rows(p, &newest, TQKV__LAST_KEYS, TQKV__LAST_VALUES);
}

/* Does what a cache that learns does with rows: those before its last raw position become halves, and their tails what
   they will be. When it has that position it learns, encodes the halves and goes on. */
static tqkv_result tqkv__add_raw(const tqkv__cache_plan *p, const tqkv__rows_in_buffers *rows)
{
    const int left = (int)(p->c->learn_from - rows->position);
    const tqkv__rows_in_buffers now = tqkv__rows_until(rows, left),
                                raw = tqkv__rows_until(rows, left + TQKV__TILE); /* see tqkv__learn_from */
    tqkv_result r = tqkv__add_streams(p, &raw, TQKV__RAW);
    if (r == TQKV_OK) r = tqkv__add_rows(p, &now, TQKV__TAIL, TQKV__TAIL);
    if (r == TQKV_OK) r = tqkv__add_first(p, &now, true);
    if (r != TQKV_OK || now.n_tokens < left) return r;
    r = tqkv__add_settling(p, rows->position + rows->n_tokens, rows->not_finite);
    if (r != TQKV_OK || rows->n_tokens == left) return r;
    tqkv__rows_in_buffers rest = tqkv__rows_after(p->c, rows, left);
    rest.learnt = true;
    return tqkv__add_coded(p, &rest);
}

/* Whether a GPU can append n_tokens to a cache in its memory, or attend with n_raw queries that read rows as they came:
   that is one allocation, of all that kernels read and write. */
static tqkv_result tqkv__check_on_gpu(const tqkv_cache *c, int n_tokens, int n_raw)
{
    const int64_t wanted = (int64_t)c->exact_last + n_tokens - 1;
    if (!c->metal && (c->learning || n_raw))
        return TQKV__REFUSE(UNSUPPORTED, "calibrate: its halves lie apart in a cache without a context (metal)");
    if (c->grown) return TQKV__REFUSE(UNSUPPORTED, "the processor has appended more tokens at once than a GPU can");
    if (tqkv__newest_room(c) && n_tokens &&
        (wanted < c->keys.capacity ? wanted : c->keys.capacity) > tqkv__newest_room(c))
        return TQKV__REFUSE(OUT_OF_RANGE,
                            "n_tokens: there is room for the halves of 512, without a context (metal) of 64");
    return TQKV_OK;
}

/* Returns the caller's rows, from the cache's end on, if it has room for them. Those of a tail come as v, or behind all
   of the keys'. */
static tqkv_result tqkv__open_rows(const tqkv_cache *c, const tqkv_cache_strides *layout, tqkv_metal_buffer k,
                                   tqkv_metal_buffer v, int n_tokens, tqkv_metal_buffer not_finite,
                                   tqkv__rows_in_buffers *rows)
{
    const tqkv_cache_strides own = tqkv__layout_of_call(c, layout);
    tqkv__stream keys;
    size_t bytes;
    tqkv_store shape = c->keys;
    shape.strides = own.k;
    if (n_tokens < 0) return TQKV__INVALID("n_tokens is negative");
    tqkv_result r = tqkv__stream_shape(&shape, &keys);
    if (r == TQKV_OK) r = tqkv__check_positions(&keys, n_tokens, c->attention.end, -1);
    if (r != TQKV_OK) return r;
    memset(rows, 0, sizeof *rows);
    rows->at[TQKV__KEYS] = k;
    rows->at[TQKV__VALUES] = rows->at[TQKV__TAIL] = v;
    rows->strides[TQKV__KEYS] = own.k;
    rows->strides[TQKV__VALUES] = rows->strides[TQKV__TAIL] = own.v;
    rows->type = c->keys.type;
    rows->n_tokens = n_tokens;
    rows->position = c->attention.end;
    rows->not_finite = not_finite;
    if (c->shared || !c->tail.head_dim) return TQKV_OK;
    if ((r = tqkv__plan_extent(&keys, n_tokens, &bytes)) != TQKV_OK) return r;
    rows->at[TQKV__TAIL] = tqkv__buffer_after(k, bytes);
    memset(&rows->strides[TQKV__TAIL], 0, sizeof rows->strides[TQKV__TAIL]);
    return TQKV_OK;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_cache_append(const tqkv_cache *c, tqkv_metal_buffer memory,
                                                        const tqkv_cache_strides *layout, tqkv_metal_buffer k,
                                                        tqkv_metal_buffer v, int n_tokens, tqkv_metal_buffer not_finite,
                                                        tqkv_metal_plan *plan)
{
    const tqkv__cache_plan p = {c, memory, plan};
    tqkv__rows_in_buffers rows;
    if (!tqkv__open_plan(plan, "cache_append")) return TQKV__INVALID(TQKV__NO_PLAN);
    if (!c) return tqkv__close_plan(plan, TQKV__INVALID("the cache is NULL"));
    tqkv_result r = tqkv__check_on_gpu(c, n_tokens, 0);
    if (r == TQKV_OK) r = tqkv__open_rows(c, layout, k, v, n_tokens, not_finite, &rows);
    if (r == TQKV_OK) r = c->learning ? tqkv__add_raw(&p, &rows) : tqkv__add_coded(&p, &rows);
    return tqkv__close_plan(plan, r);
}

TQKV_METAL_API void tqkv_metal_cache_appended(tqkv_cache *c, int n_tokens) { tqkv__count_append(c, n_tokens); }

TQKV_METAL_API tqkv_result tqkv_metal_cache_failed(tqkv_cache *c, int64_t end)
{
    if (!c) return TQKV__INVALID("the cache is NULL");
    const bool unlearns = !c->learning && end >= 0 && end <= c->learnt_at;
    const tqkv_result r = tqkv_cache_truncate(c, end);
    if (r == TQKV_OK && unlearns) tqkv__unlearn(c);
    return r;
}

/* The attention of a view of a cache, in the order of the streams. */
typedef struct tqkv__cache_call {
    tqkv_metal_attention attention;
    tqkv_metal_store stores[TQKV__STREAMS];
} tqkv__cache_call;

/* Takes the lists and the tree of queries from number `first` on; some: or NULL */
static void tqkv__take_some_buffers(const tqkv_metal_attention *some, int first, tqkv_metal_attention *a)
{
    if (!some) return;
    const tqkv_list *list = &some->attention.list;
    const size_t heads = (size_t)(list->heads > 0 ? list->heads : 1),
                 skipped = (size_t)first * heads * (size_t)(list->length > 0 ? list->length : 0);
    a->tree = some->tree;
    a->list = some->list;
    if (skipped) a->list = tqkv__buffer_after(some->list, skipped * sizeof(int32_t));
    a->attention.tree = some->attention.tree;
    a->attention.list = *list;
    if (list->rows) a->attention.list.rows += skipped;
}

static void tqkv__open_cache_call(const tqkv__cache_plan *p, const tqkv_attention *view, tqkv__cache_call *call)
{
    tqkv_metal_attention *a = &call->attention;
    const tqkv_store *const shapes[TQKV__STREAMS] = {view->keys,       view->values,       view->tail,
                                                     view->first.keys, view->first.values, view->first.tail,
                                                     view->last.keys,  view->last.values};
    const tqkv_metal_store **const stores[TQKV__STREAMS] = {&a->keys,       &a->values,       &a->tail,
                                                            &a->first.keys, &a->first.values, &a->first.tail,
                                                            &a->last.keys,  &a->last.values};
    memset(call, 0, sizeof *call);
    for (int i = 0; i < TQKV__STREAMS; i++) {
        if (!shapes[i]) continue;
        call->stores[i] = tqkv__store_in_buffer(p, shapes[i]);
        *stores[i] = &call->stores[i];
    }
    a->attention = *view;
    if (!a->attention.kv_len) a->attention.end = 0; /* nothing is resident; kv_len alone would be its default */
    a->matrix_group = p->c->matrix_group;
    if (p->c->attention.sinks) a->sinks = tqkv__buffer_within(p, p->c->attention.sinks);
}

/* Finds the scratch of both kinds of queries, which may run at once. coded: the bytes of those that read codes */
static tqkv_result tqkv__scratch_of_cache(const tqkv_cache *c, const tqkv_metal_attention *some, int n_queries,
                                          size_t *coded, size_t *bytes)
{
    const tqkv__cache_plan p = {c, {NULL, 0}, NULL};
    const tqkv_attention codes = tqkv__view_codes(c), halves = tqkv__raw_attention(c, 0, n_queries);
    tqkv__cache_call call;
    size_t raw = 0;
    tqkv__open_cache_call(&p, &codes, &call);
    tqkv__take_some_buffers(some, 0, &call.attention);
    call.attention.attention.n_queries = n_queries;
    call.attention.attention.first.n = c->exact_first; /* as many as there will ever be */
    call.attention.attention.last.n = c->exact_last;
    tqkv_result r = tqkv__plan_scratch_within(&call.attention, TQKV__MOST_SUMS, coded);
    *coded = (*coded + 15) / 16 * 16;
    if (r == TQKV_OK && c->raw_below && c->raw[0].codes && c->metal) {
        tqkv__open_cache_call(&p, &halves, &call);
        tqkv__take_some_buffers(some, 0, &call.attention);
        r = tqkv__plan_scratch_within(&call.attention, TQKV__MOST_SUMS, &raw);
    }
    if (r != TQKV_OK) return r;
    if (raw > SIZE_MAX - *coded) return TQKV__INVALID(TQKV__LARGE_SCRATCH);
    *bytes = *coded + raw;
    return TQKV_OK;
}

/* The queries of a call, their buffers, and where the outputs go. */
typedef struct tqkv__queries_in_buffers {
    const tqkv_metal_attention *some; /* or NULL */
    tqkv_metal_buffer q, scratch, out;
    tqkv_strides q_strides, out_strides;
    int n_queries;
} tqkv__queries_in_buffers;

/* Adds the attention of n queries from number `first` on to a view of the cache. */
static tqkv_result tqkv__add_cache_call(const tqkv__cache_plan *p, const tqkv__queries_in_buffers *from, int first,
                                        int n, tqkv_attention view)
{
    tqkv__cache_call call;
    tqkv_metal_buffer q = from->q, out = from->out;
    view.n_queries = n;
    view.query_strides = from->q_strides;
    view.output_strides = from->out_strides;
    tqkv__open_cache_call(p, &view, &call);
    tqkv__take_some_buffers(from->some, first, &call.attention);
    if (first) {
        q = tqkv__buffer_after(q, (size_t)first * from->q_strides.token * tqkv__type_size(view.query_type));
        out = tqkv__buffer_after(out, (size_t)first * from->out_strides.token * tqkv__type_size(view.output_type));
    }
    tqkv__attend_buffers b = tqkv__buffers_of_call(q, from->scratch, out);
    return tqkv__add_attention(&call.attention, 0, 0, &b, p->plan);
}

/* Checks the rows of all queries together, because a dispatch shows its own alone, and finds their strides. */
static tqkv_result tqkv__check_cut_rows(const tqkv__cache_plan *p, tqkv__queries_in_buffers *from)
{
    tqkv__attention a;
    tqkv_attention whole = p->c->attention;
    whole.n_queries = from->n_queries;
    whole.query_strides = from->q_strides;
    whole.output_strides = from->out_strides;
    const tqkv_result r = tqkv__attention_shape(&whole, &a);
    if (r != TQKV_OK) return r;
    from->q_strides = a.call.query_strides;
    from->out_strides = a.call.output_strides;
    if (!from->out.buffer || (!tqkv__bytes_meet(from->q, a.q_size, from->out, a.out_size) &&
                              !tqkv__bytes_meet(p->memory, p->c->size, from->out, a.out_size)))
        return TQKV_OK;
    return TQKV__INVALID("out overlaps q or the cache");
}

/* Attends for all queries. The first n_raw queries stand where rows are read raw. With a tree, which counts from the
   first query of a call, all the others' call has them, too, and theirs comes after it. */
static tqkv_result tqkv__add_cut_call(const tqkv__cache_plan *p, tqkv__queries_in_buffers *from, int n_raw)
{
    size_t coded = 0, bytes;
    const int n = from->n_queries;
    const bool whole = n_raw && n_raw < n && from->some && from->some->tree.buffer;
    const int first = whole ? 0 : n_raw; /* that reads codes */
    tqkv_result r = tqkv__check_cut_rows(p, from);
    if (r == TQKV_OK && n_raw < n) r = tqkv__add_cache_call(p, from, first, n - first, tqkv__view_codes(p->c));
    if (r == TQKV_OK && n_raw && n_raw < n) r = tqkv__scratch_of_cache(p->c, from->some, n, &coded, &bytes);
    if (r != TQKV_OK || !n_raw) return r;
    const int before = p->plan->n;
    from->scratch = tqkv__buffer_after(from->scratch, coded);
    r = tqkv__add_cache_call(p, from, 0, n_raw, tqkv__raw_attention(p->c, p->c->attention.end - (n - n_raw), n_raw));
    if (r == TQKV_OK && whole) p->plan->d[before].barrier = from->out.buffer;
    return r;
}

TQKV_METAL_API tqkv_result tqkv_metal_plan_cache_attend(const tqkv_cache *c, tqkv_metal_buffer memory,
                                                        const tqkv_cache_strides *layout,
                                                        const tqkv_metal_attention *some, tqkv_metal_buffer q,
                                                        int n_queries, tqkv_metal_buffer scratch, tqkv_metal_buffer out,
                                                        tqkv_metal_plan *plan)
{
    const tqkv__cache_plan p = {c, memory, plan};
    if (!tqkv__open_plan(plan, "attend")) return TQKV__INVALID(TQKV__NO_PLAN);
    if (!c || n_queries < 0) return tqkv__close_plan(plan, TQKV__INVALID(TQKV__NO_CACHE_QUERIES));
    if (!n_queries) return tqkv__close_plan(plan, TQKV_OK);
    const int n_raw = tqkv__raw_queries(c, n_queries);
    size_t coded = 0;
    tqkv_result r = tqkv__check_on_gpu(c, 0, n_raw);
    if (r != TQKV_OK) return tqkv__close_plan(plan, r);
    const tqkv_cache_strides own = tqkv__layout_of_call(c, layout);
    tqkv__queries_in_buffers from = {some, q, scratch, out, own.q, own.out, n_queries};
    r = tqkv__add_cut_call(&p, &from, n_raw);
    if (r == TQKV_OK && !scratch.buffer) r = tqkv__scratch_of_cache(c, some, n_queries, &coded, &plan->scratch_size);
    return tqkv__close_plan(plan, r);
}

/* >>plan-report: what the kernel `tables` reports, compared with what the host has */

TQKV_METAL_API bool tqkv_metal_has_matrices(const void *bytes)
{
    const tqkv__table_report *report = (const tqkv__table_report *)bytes;
    for (int lane = 0; lane < TQKV__SIMD_WIDTH; lane++)
        for (int i = 0; i < 2; i++) {
            const int row = TQKV__MATRIX_ROW(lane), column = TQKV__MATRIX_COLUMN(lane) + i;
            int product = 0;
            for (int k = 0; k < 8; k++) product += TQKV__MATRIX_TEST(row, k, 3) * TQKV__MATRIX_TEST(k, column, 5);
            if (report->matrix_product[lane][i] != (float)product) return false;
        }
    return true;
}

/* Compares the sizes first, because the offsets of the tables depend on them. */
TQKV_METAL_API const char *tqkv_metal_stale_table(const void *bytes)
{
    const tqkv__table_report *report = (const tqkv__table_report *)bytes;
#define TQKV__STRUCT_NAME(name) "size of tqkv__" #name,
#define TQKV__STRUCT_SIZE(name) sizeof(tqkv__##name),
#define TQKV__SIZES_OF(x, i, D) {TQKV__KERNEL_SIZES(D)},
#define TQKV__DIFFERS(member)   memcmp(report->tables.member, tqkv__tables.member, sizeof report->tables.member) != 0
#define TQKV__CHECK_BOOK(report, bits) \
    if (TQKV__DIFFERS(codebook_##bits)) return "table codebook_" #bits; \
    if (TQKV__DIFFERS(boundaries_##bits)) return "table boundaries_" #bits; \
    if (TQKV__DIFFERS(factors_##bits)) return "table factors_" #bits;
    static const char *const names[] = {TQKV__SHARED_STRUCTS(TQKV__STRUCT_NAME)};
    static const size_t sizes[] = {TQKV__SHARED_STRUCTS(TQKV__STRUCT_SIZE)};
    static const int32_t kernels[TQKV__KERNEL_DIMS][TQKV__N_KERNEL_SIZES] = {TQKV__KERNELS(TQKV__SIZES_OF, )};
    if (report->table_version != TQKV_TABLE_VERSION) return "table version";
    for (int i = 0; i < TQKV__N_SHARED_STRUCTS; i++)
        if (report->struct_sizes[i] != sizes[i]) return names[i];
    TQKV__BOOKS(TQKV__CHECK_BOOK, report)
    if (TQKV__DIFFERS(signs)) return "table signs";
    if (TQKV__DIFFERS(hadamard_12)) return "table hadamard_12";
    if (TQKV__DIFFERS(hadamard_20)) return "table hadamard_20";
    if (TQKV__DIFFERS(hadamard_28)) return "table hadamard_28";
    if (TQKV__DIFFERS(hadamard_36)) return "table hadamard_36";
    return memcmp(report->kernel_sizes, kernels, sizeof kernels) != 0 ? "dispatch of its kernels" : NULL;
}

#endif /* TQKV_IMPLEMENTATION */

#ifdef __OBJC__
/* >>host: what a context is made of */

/* Each object that the context keeps is retained once and released once. Under ARC assignments to variables do both. */
#if __has_feature(objc_arc)
#define TQKV__RETAIN(object)  (object)
#define TQKV__RELEASE(object) ((object) = nil)
#else
#define TQKV__RETAIN(object)  [(object) retain]
#define TQKV__RELEASE(object) ([(object) release], (object) = nil)
#endif

/* What the context keeps of a kernel: its pipeline or, of a kernel without constants, the library compiled from its
   source. */
typedef struct tqkv__kept {
    tqkv_metal_kernel kernel;
    id object;
    NSUInteger max_threads; /* of a pipeline */
    struct tqkv__kept *next;
} tqkv__kept;

/* A block of shared memory that the context has lent. */
typedef struct tqkv__memory {
    id<MTLBuffer> buffer;
    char *begin;
    size_t size;
    struct tqkv__memory *next;
} tqkv__memory;

struct tqkv_metal {
    tqkv__backend backend; /* first: tqkv.h finds it there */
    id<MTLDevice> device;
    id<MTLCommandQueue> queue;
    id<MTLLibrary> library; /* nil: all kernels come from the source */
    NSString *source;       /* for kernels that the library lacks or Metal refuses; nil: none */
    id<MTLBuffer> unused;   /* bound to kernel arguments that a call lacks */
    pthread_mutex_t lock;   /* of all fields below */
    bool matrices;          /* the GPU's matrices are as attend_matrix expects, and its pipelines were built so far */
    tqkv__kept *pipelines, *compiled;
    tqkv__memory *memory;
    tqkv__memory *staging; /* one of them, which waits for the next blocking call of a cache; NULL while in use */
    char error[400];
};

/* >>errors: what went wrong, in words */

static tqkv_result tqkv__fail(tqkv_metal *m, tqkv_result result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static tqkv_result tqkv__fail(tqkv_metal *m, tqkv_result result, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&m->lock);
    vsnprintf(m->error, sizeof m->error, format, arguments);
    pthread_mutex_unlock(&m->lock);
    va_end(arguments);
    return result;
}

static const char *tqkv__error_text(NSError *error)
{
    const char *text = [[error localizedDescription] UTF8String];
    return text ? text : "Metal gave no reason";
}

void tqkv_metal_error(tqkv_metal *m, char *text, size_t size)
{
    if (!text || !size) return;
    text[0] = 0;
    if (!m) return;
    pthread_mutex_lock(&m->lock);
    snprintf(text, size, "%s", m->error);
    pthread_mutex_unlock(&m->lock);
}

/* >>pipelines: built on first use, kept as long as the context */

/* The caller holds the lock. A list is enough: a program has one pipeline a format pair, head_dim and column count. */
static const tqkv__kept *tqkv__find_kept(const tqkv__kept *list, const tqkv_metal_kernel *kernel)
{
    while (list && memcmp(&list->kernel, kernel, sizeof *kernel) != 0) list = list->next;
    return list;
}

static void tqkv__free_kept(tqkv__kept *k)
{
    TQKV__RELEASE(k->object);
    free(k);
}

/* Keeps `made` and returns it. If another thread was faster: frees `made` and returns the other's. */
static const tqkv__kept *tqkv__keep(tqkv_metal *m, tqkv__kept **list, tqkv__kept *made)
{
    pthread_mutex_lock(&m->lock);
    const tqkv__kept *k = tqkv__find_kept(*list, &made->kernel);
    if (!k) {
        made->next = *list;
        *list = made;
    }
    pthread_mutex_unlock(&m->lock);
    if (k) tqkv__free_kept(made);
    return k ? k : made;
}

/* Finds a kernel, or makes and keeps it: outside the lock, because that takes up to a second. */
static tqkv_result tqkv__get_kept(tqkv_metal *m, tqkv__kept **list, const tqkv_metal_kernel *kernel,
                                  tqkv_result (*make)(tqkv_metal *, tqkv__kept *), const tqkv__kept **out)
{
    tqkv_result r;
    pthread_mutex_lock(&m->lock);
    *out = tqkv__find_kept(*list, kernel);
    pthread_mutex_unlock(&m->lock);
    if (*out) return TQKV_OK;
    tqkv__kept *made = (tqkv__kept *)calloc(1, sizeof *made);
    if (!made) return tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no memory for a pipeline");
    made->kernel = *kernel;
    @autoreleasepool {
        r = make(m, made);
    }
    if (r == TQKV_OK)
        *out = tqkv__keep(m, list, made);
    else
        tqkv__free_kept(made);
    return r;
}

static NSString *tqkv__function_name(const tqkv_metal_kernel *kernel)
{
    return [NSString stringWithUTF8String:kernel->name];
}

static void tqkv__set_values(const tqkv_metal_kernel *kernel, MTLFunctionConstantValues *values)
{
    for (int i = 0; i < TQKV_METAL_CONSTANTS; i++) {
        const uint32_t value = kernel->constants[i] - 1u;
        const bool flag = value != 0;
        if (!kernel->constants[i]) continue;
        if (TQKV_METAL_IS_UINT(i))
            [values setConstantValue:&value type:MTLDataTypeUInt atIndex:(NSUInteger)i];
        else
            [values setConstantValue:&flag type:MTLDataTypeBool atIndex:(NSUInteger)i];
    }
}

/* Fast math off: codes and norms must be the same bytes as those of tqkv.h. Of the source only that kernel: all of them
   take minutes. */
static tqkv_result tqkv__compile(tqkv_metal *m, tqkv__kept *made)
{
    NSError *error = nil;
    NSString *name = tqkv__function_name(&made->kernel);
    MTLCompileOptions *options = [[MTLCompileOptions alloc] init];
    NSString *only = [@"TQKV_ONLY_" stringByAppendingString:name];
    [options setPreprocessorMacros:[NSDictionary dictionaryWithObjectsAndKeys:@"1", @"TQKV_ONLY", @"1", only, nil]];
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations" /* its successor is of macOS 15 */
    [options setFastMathEnabled:NO];
#pragma clang diagnostic pop
    made->object = [m->device newLibraryWithSource:m->source options:options error:&error];
    TQKV__RELEASE(options);
    if (made->object) return TQKV_OK;
    return tqkv__fail(m, TQKV_METAL_ERROR, "library_source: %s: %s", [name UTF8String], tqkv__error_text(error));
}

/* The threads that a kernel cannot do without. */
static NSUInteger tqkv__needs_threads(const tqkv_metal_kernel *kernel)
{
    const bool shared = kernel->family == TQKV_METAL_ATTEND_MATRIX && kernel->head_dim * TQKV__DIM_UNIT > 256;
    return shared ? TQKV__LONG_SIMDGROUPS * TQKV__SIMD_WIDTH : 0;
}

/* Metal's compiler gives a thread the more registers the fewer threads it is told of. */
static id<MTLComputePipelineState> tqkv__new_state(tqkv_metal *m, const tqkv_metal_kernel *kernel,
                                                   id<MTLFunction> function, NSError **error)
{
    MTLComputePipelineDescriptor *descriptor = [[MTLComputePipelineDescriptor alloc] init];
    [descriptor setComputeFunction:function];
    [descriptor setMaxTotalThreadsPerThreadgroup:(NSUInteger)kernel->most_simdgroups * TQKV__SIMD_WIDTH];
    [descriptor setThreadGroupSizeIsMultipleOfThreadExecutionWidth:YES];
    id<MTLComputePipelineState> state = [m->device newComputePipelineStateWithDescriptor:descriptor
                                                                                 options:MTLPipelineOptionNone
                                                                              reflection:nil
                                                                                   error:error];
    TQKV__RELEASE(descriptor);
    return state;
}

/* Makes p's pipeline, if its simdgroups are of 32 threads, and enough of them. */
static tqkv_result tqkv__build_from(tqkv_metal *m, id<MTLLibrary> library, tqkv__kept *p)
{
    NSError *error = nil;
    NSString *name = tqkv__function_name(&p->kernel);
    const char *text = [name UTF8String];
    MTLFunctionConstantValues *values = [[MTLFunctionConstantValues alloc] init];
    tqkv__set_values(&p->kernel, values);
    id<MTLFunction> function = [library newFunctionWithName:name constantValues:values error:&error];
    TQKV__RELEASE(values);
    id<MTLComputePipelineState> state = function ? tqkv__new_state(m, &p->kernel, function, &error) : nil;
    TQKV__RELEASE(function);
    if (!state) return tqkv__fail(m, TQKV_METAL_ERROR, "%s: %s", text, tqkv__error_text(error));
    p->max_threads = [state maxTotalThreadsPerThreadgroup];
    const int threads = (int)p->max_threads, width = (int)[state threadExecutionWidth];
    const bool few = tqkv__needs_threads(&p->kernel) > p->max_threads;
    if (!few && width == TQKV__SIMD_WIDTH && threads >= TQKV__SIMD_WIDTH) {
        p->object = state;
        return TQKV_OK;
    }
    TQKV__RELEASE(state);
    if (few) return tqkv__fail(m, TQKV_METAL_ERROR, "%s: %d threads a threadgroup are too few", text, threads);
    return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: simdgroups of %d threads, not 32", text, width);
}

/* The text of what came from the source, or failed there too, after the library was refused with another text. */
static tqkv_result tqkv__fell_back(tqkv_metal *m, tqkv_result r, const char *library_text)
{
    char source_text[180];
    if (r == TQKV_OK) return tqkv__fail(m, r, "library refused: %s; compiled from source", library_text);
    tqkv_metal_error(m, source_text, sizeof source_text);
    return tqkv__fail(m, r, "library refused: %s; then: %s", library_text, source_text);
}

/* From the library, or from the source where Metal refuses the library's kernel or there is no library. */
static tqkv_result tqkv__build_pipeline(tqkv_metal *m, tqkv__kept *p)
{
    char library_text[180];
    const tqkv__kept *compiled = NULL;
    tqkv_metal_kernel any = p->kernel;
    tqkv_result r = m->library ? tqkv__build_from(m, m->library, p) : TQKV_METAL_ERROR;
    if (r != TQKV_METAL_ERROR || !m->source) return r;
    tqkv_metal_error(m, library_text, sizeof library_text);
    memset(any.constants, 0, sizeof any.constants);
    r = tqkv__get_kept(m, &m->compiled, &any, tqkv__compile, &compiled);
    if (r == TQKV_OK) r = tqkv__build_from(m, compiled->object, p);
    return m->library ? tqkv__fell_back(m, r, library_text) : r;
}

static tqkv_result tqkv__get_pipeline(tqkv_metal *m, const tqkv_metal_kernel *kernel, const tqkv__kept **out)
{
    return tqkv__get_kept(m, &m->pipelines, kernel, tqkv__build_pipeline, out);
}

static bool tqkv__has_matrices(tqkv_metal *m)
{
    pthread_mutex_lock(&m->lock);
    const bool has = m->matrices;
    pthread_mutex_unlock(&m->lock);
    return has;
}

static bool tqkv__is_built(tqkv_metal *m, const tqkv_metal_kernel *kernel)
{
    pthread_mutex_lock(&m->lock);
    const bool built = tqkv__find_kept(m->pipelines, kernel) != NULL;
    pthread_mutex_unlock(&m->lock);
    return built;
}

/* Whether pipelines of a plan could not be built because Metal refuses attend_matrix, twice: its compiler may have been
   restarted. Then the context does without from now on, and its text says so. */
static bool tqkv__lost_matrices(tqkv_metal *m, tqkv_result r, const tqkv_metal_plan *plan)
{
    char text[300];
    const tqkv__kept *attend;
    const tqkv_metal_dispatch *missing = NULL;
    if (r != TQKV_METAL_ERROR) return false;
    for (int i = 0; i < plan->n && !missing; i++)
        if (!tqkv__is_built(m, &plan->d[i].kernel)) missing = &plan->d[i];
    if (!missing || missing->kernel.family != TQKV_METAL_ATTEND_MATRIX) return false; /* something else failed */
    if (tqkv__get_pipeline(m, &missing->kernel, &attend) == TQKV_OK) return true;
    tqkv_metal_plan lanes;
    tqkv_metal_kernel *kernel = &lanes.d[0].kernel;
    lanes.n = 1;
    lanes.d[0] = *missing;
    kernel->constants[TQKV_FC_BATCH] = 1 + false;
    tqkv_metal_plan_lanes(&lanes);
    kernel->constants[TQKV_FC_BATCH] = missing->kernel.constants[TQKV_FC_BATCH];
    tqkv_metal_error(m, text, sizeof text);
    if (tqkv__get_pipeline(m, kernel, &attend) != TQKV_OK) {
        tqkv__fail(m, TQKV_METAL_ERROR, "%s", text);
        return false;
    }
    pthread_mutex_lock(&m->lock);
    m->matrices = false;
    pthread_mutex_unlock(&m->lock);
    tqkv__fail(m, TQKV_OK, "%s; attention without matrices", text);
    return true;
}

/* Without matrices attend takes the place of attend_matrix, but not in a batch, which the caller plans anew. */
static tqkv_result tqkv__avoid_matrices(tqkv_metal *m, tqkv_metal_plan *plan)
{
    if (plan->n && plan->d[0].kernel.family == TQKV_METAL_INDEX_SCORES)
        return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: this GPU's matrices lie otherwise, or Metal refuses them",
                          plan->call);
    if (tqkv_metal_plan_lanes(plan)) return TQKV_OK;
    return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: planned with matrices, without which the context goes on", plan->call);
}

static tqkv_result tqkv__try_pipelines(tqkv_metal *m, tqkv_metal_plan *plan, const tqkv__kept **out)
{
    tqkv_result r = tqkv__has_matrices(m) ? TQKV_OK : tqkv__avoid_matrices(m, plan);
    for (int i = 0; i < plan->n && r == TQKV_OK; i++) r = tqkv__get_pipeline(m, &plan->d[i].kernel, &out[i]);
    return r;
}

/* All pipelines of a plan. */
static tqkv_result tqkv__get_pipelines(tqkv_metal *m, tqkv_metal_plan *plan, const tqkv__kept **out)
{
    const tqkv_result r = tqkv__try_pipelines(m, plan, out);
    return tqkv__lost_matrices(m, r, plan) ? tqkv__try_pipelines(m, plan, out) : r;
}

/* >>recording: a plan, checked against Metal's objects and handed to an encoder; command buffers of our own */

/* Metal's capture and validation put objects of their own around a device. */
static bool tqkv__is_device(const tqkv_metal *m, id<MTLDevice> device)
{
    if (device == m->device || [device isEqual:m->device]) return true;
    NSObject *one = (NSObject *)device, *other = (NSObject *)m->device;
    SEL number = @selector(registryID); /* not in every system's headers */
    return [one respondsToSelector:number] && [other respondsToSelector:number] &&
           [[one valueForKey:@"registryID"] isEqual:[other valueForKey:@"registryID"]];
}

static tqkv_result tqkv__check_binding(tqkv_metal *m, const tqkv_metal_binding *b)
{
    if (!b->size) return TQKV_OK;
    id<MTLBuffer> buffer = b->at.buffer;
    if (!buffer) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: no buffer", b->name);
    const size_t length = [buffer length];
    if (!tqkv__is_device(m, [buffer device]))
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: a buffer of another device", b->name);
    if (b->at.offset % b->alignment)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: offset %zu is not a multiple of %zu", b->name, b->at.offset,
                          b->alignment);
    if (b->at.offset > length || b->size > length - b->at.offset)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: needs %zu bytes from %zu on of a buffer of %zu", b->name,
                          b->size, b->at.offset, length);
    return TQKV_OK;
}

static tqkv_result tqkv__check_bindings(tqkv_metal *m, const tqkv_metal_dispatch *d)
{
    for (int i = 0; i < d->n_bindings; i++) {
        const tqkv_metal_binding *other = tqkv_metal_overlapping(d, i);
        const tqkv_result r = tqkv__check_binding(m, &d->bindings[i]);
        if (r != TQKV_OK) return r;
        if (other) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s and %s overlap", other->name, d->bindings[i].name);
    }
    return TQKV_OK;
}

/* Metal 4's encoders, and those of render passes, lack what a plan needs. */
static tqkv_result tqkv__check_encoder(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const char *call)
{
    if (!encoder) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: no encoder", call);
    if ([encoder respondsToSelector:@selector(setBytes:length:atIndex:)]) return TQKV_OK;
    return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "%s: no MTLComputeCommandEncoder; for Metal 4 see docs/metal.md", call);
}

static void tqkv__bind_all(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const tqkv_metal_dispatch *d)
{
    for (int i = 0; i < d->n_arguments; i++)
        [encoder setBytes:d->arguments[i].bytes length:d->arguments[i].size atIndex:(NSUInteger)d->arguments[i].index];
    for (int i = 0; i < d->n_bindings; i++) {
        const tqkv_metal_binding *b = &d->bindings[i];
        if (b->index == TQKV_METAL_ONLY_CHECKED) continue;
        [encoder setBuffer:b->size ? (id<MTLBuffer>)b->at.buffer : m->unused
                    offset:b->size ? b->at.offset : 0
                   atIndex:(NSUInteger)b->index];
    }
}

static tqkv_result tqkv__record_dispatch(tqkv_metal *m, id<MTLComputeCommandEncoder> encoder, const tqkv__kept *p,
                                         const tqkv_metal_dispatch *d)
{
    tqkv_metal_launch launch;
    const tqkv_result r = tqkv_metal_plan_launch(d, p->max_threads, &launch);
    if (r != TQKV_OK) return tqkv__fail(m, r, "a pipeline allows too few threads"); /* seen when it was built */
    if (d->barrier) {
        const id<MTLResource> written[] = {d->barrier};
        [encoder memoryBarrierWithResources:written count:1];
    }
    [encoder setComputePipelineState:p->object];
    tqkv__bind_all(m, encoder, d);
    for (NSUInteger i = 0; i < TQKV_METAL_MEMORIES; i++)
        [encoder setThreadgroupMemoryLength:launch.memory[i] atIndex:i];
    [encoder dispatchThreadgroups:MTLSizeMake(launch.threadgroups[0], launch.threadgroups[1], launch.threadgroups[2])
            threadsPerThreadgroup:MTLSizeMake(launch.threads, 1, 1)];
    return TQKV_OK;
}

/* What tqkv.h says to a call, with a text if it refuses it. */
static tqkv_result tqkv__planned(tqkv_metal *m, tqkv_result r, const char *call)
{
    if (r == TQKV_OK) return r;
    return tqkv__fail(m, r, "%s: %s%s", call, tqkv_result_string(r),
                      r == TQKV_UNSUPPORTED ? "; " TQKV__KERNELS_TEXT : "");
}

/* Looks at what made a plan. */
static tqkv_result tqkv__check_plan(tqkv_metal *m, const tqkv_metal_plan *plan)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    return plan ? tqkv__planned(m, plan->result, plan->call) : tqkv__planned(m, TQKV_INVALID_ARGUMENT, "plan");
}

tqkv_result tqkv_metal_prepare(tqkv_metal *m, tqkv_metal_plan *plan)
{
    const tqkv__kept *pipelines[TQKV_METAL_DISPATCHES];
    const tqkv_result r = tqkv__check_plan(m, plan);
    return r == TQKV_OK ? tqkv__get_pipelines(m, plan, pipelines) : r;
}

tqkv_result tqkv_metal_record(tqkv_metal *m, tqkv_metal_object encoder, tqkv_metal_plan *plan)
{
    const tqkv__kept *pipelines[TQKV_METAL_DISPATCHES];
    tqkv_result r = tqkv__check_plan(m, plan);
    if (r != TQKV_OK) return r;
    r = tqkv__check_encoder(m, encoder, plan->call);
    for (int i = 0; i < plan->n && r == TQKV_OK; i++) r = tqkv__check_bindings(m, &plan->d[i]);
    if (r != TQKV_OK || !plan->n || !plan->d[0].grid[0]) return r;
    r = tqkv__get_pipelines(m, plan, pipelines);
    for (int i = 0; i < plan->n && r == TQKV_OK; i++) r = tqkv__record_dispatch(m, encoder, pipelines[i], &plan->d[i]);
    return r;
}

/* With the state of each encoder among its errors. */
static id<MTLCommandBuffer> tqkv__new_commands(tqkv_metal *m)
{
    MTLCommandBufferDescriptor *descriptor = [[MTLCommandBufferDescriptor alloc] init];
    [descriptor setErrorOptions:MTLCommandBufferErrorOptionEncoderExecutionStatus];
    id<MTLCommandBuffer> commands = [m->queue commandBufferWithDescriptor:descriptor];
    TQKV__RELEASE(descriptor);
    return commands;
}

static tqkv_result tqkv__commands_failed(tqkv_metal *m, NSError *error)
{
    const char *state = "";
    NSString *label = nil;
    for (id<MTLCommandBufferEncoderInfo> info in [[error userInfo] objectForKey:MTLCommandBufferEncoderInfoErrorKey]) {
        label = [info label];
        state = [info errorState] == MTLCommandEncoderErrorStateFaulted ? " faulted" : " did not complete";
    }
    return tqkv__fail(m, TQKV_METAL_ERROR, "the command buffer failed: %s%s%s%s", tqkv__error_text(error),
                      label ? "; " : "", label ? [label UTF8String] : "", label ? state : "");
}

/* tqkv_metal_run. label: of the encoder, for Metal's tools and for the text of a failure */
static tqkv_result tqkv__run_as(tqkv_metal *m, const char *label, tqkv_metal_work record, void *user)
{
    @autoreleasepool {
        id<MTLCommandBuffer> commands = tqkv__new_commands(m);
        id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
        if (!encoder)
            return tqkv__fail(m, TQKV_METAL_ERROR, "Metal gave no command %s", commands ? "encoder" : "buffer");
        [encoder setLabel:[NSString stringWithFormat:@"tqkv %s", label]];
        const tqkv_result r = record(user, encoder);
        [encoder endEncoding];
        if (r != TQKV_OK) return r;
        [commands commit];
        [commands waitUntilCompleted];
        if ([commands status] == MTLCommandBufferStatusCompleted) return TQKV_OK;
        return tqkv__commands_failed(m, [commands error]);
    }
}

tqkv_result tqkv_metal_run(tqkv_metal *m, tqkv_metal_work record, void *user)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    return record ? tqkv__run_as(m, "run", record, user) : tqkv__planned(m, TQKV_INVALID_ARGUMENT, "run");
}

/* A plan that runs in its own command buffer. */
typedef struct tqkv__call {
    tqkv_metal *m;
    tqkv_metal_plan *plan;
} tqkv__call;

static tqkv_result tqkv__record_call(void *user, tqkv_metal_object encoder)
{
    const tqkv__call *c = (const tqkv__call *)user;
    return tqkv_metal_record(c->m, encoder, c->plan);
}

static tqkv_result tqkv__run_plan(tqkv_metal *m, tqkv_metal_plan *plan)
{
    tqkv__call call = {m, plan};
    return tqkv__run_as(m, plan->call, tqkv__record_call, &call);
}

/* >>memory: what processor and GPU share */

static tqkv__memory *tqkv__lend(tqkv_metal *m, size_t size)
{
    tqkv__memory *block = (tqkv__memory *)calloc(1, sizeof *block);
    if (!block) return NULL;
    block->size = size ? size : 1; /* Metal has no empty buffers */
    block->buffer = [m->device newBufferWithLength:block->size options:MTLResourceStorageModeShared];
    block->begin = (char *)[block->buffer contents];
    if (!block->begin) {
        TQKV__RELEASE(block->buffer);
        free(block);
        return NULL;
    }
    pthread_mutex_lock(&m->lock);
    block->next = m->memory;
    m->memory = block;
    pthread_mutex_unlock(&m->lock);
    return block;
}

static void *tqkv__memory_alloc(void *user, size_t size)
{
    const tqkv__memory *block = tqkv__lend((tqkv_metal *)user, size);
    return block ? block->begin : NULL;
}

static void tqkv__memory_free(void *user, void *pointer, size_t size)
{
    tqkv_metal *m = (tqkv_metal *)user;
    tqkv__memory **at = &m->memory, *block;
    (void)size;
    pthread_mutex_lock(&m->lock);
    while (*at && (*at)->begin != pointer) at = &(*at)->next;
    block = *at;
    if (block) *at = block->next;
    pthread_mutex_unlock(&m->lock);
    if (!block) return;
    TQKV__RELEASE(block->buffer);
    free(block);
}

tqkv_allocator tqkv_metal_allocator(tqkv_metal *m)
{
    const tqkv_allocator none = {NULL, NULL, NULL};
    return m ? m->backend.memory : none;
}

tqkv_result tqkv_metal_find(tqkv_metal *m, const void *pointer, tqkv_metal_buffer *out)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    if (!pointer || !out) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "a pointer or a cache is NULL");
    const uintptr_t address = (uintptr_t)pointer;
    pthread_mutex_lock(&m->lock);
    const tqkv__memory *block = m->memory;
    while (block && address - (uintptr_t)block->begin >= block->size) block = block->next; /* unsigned: below it, too */
    if (block) {
        out->buffer = block->buffer;
        out->offset = address - (uintptr_t)block->begin;
    }
    pthread_mutex_unlock(&m->lock);
    return block ? TQKV_OK : tqkv__fail(m, TQKV_INVALID_ARGUMENT, "a pointer outside the context's memory");
}

/* >>caches: each is one block of shared memory */

tqkv_result tqkv_metal_cache_append(tqkv_metal *m, tqkv_metal_object encoder, tqkv_cache *c, tqkv_metal_buffer k,
                                    tqkv_metal_buffer v, int n_tokens, tqkv_metal_buffer not_finite)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer memory;
    tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    tqkv_metal_plan_cache_append(c, memory, NULL, k, v, n_tokens, not_finite, &plan);
    if ((r = tqkv_metal_record(m, encoder, &plan)) == TQKV_OK) tqkv_metal_cache_appended(c, n_tokens);
    return r;
}

tqkv_result tqkv_metal_cache_attend(tqkv_metal *m, tqkv_metal_object encoder, const tqkv_cache *c, tqkv_metal_buffer q,
                                    int n_queries, tqkv_metal_buffer scratch, tqkv_metal_buffer out)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer memory;
    const tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    tqkv_metal_plan_cache_attend(c, memory, NULL, NULL, q, n_queries, scratch, out, &plan);
    return tqkv_metal_record(m, encoder, &plan);
}

/* >>waiting: the calls of tqkv_cache, which wait for the GPU. What they hand to it lies in a block of shared memory;
   one such block waits for the next call, of any cache. */

enum { TQKV__MOST_STAGING = 64 << 20 }; /* bytes of it: a long prefill's is given back at once */

static void tqkv__drop_staging(tqkv_metal *m, const tqkv__memory *block)
{
    if (block) tqkv__memory_free(m, block->begin, block->size);
}

/* Divides a block among n arrays. NULL and a text, or a block for tqkv__give_back. */
static tqkv__memory *tqkv__take_staging(tqkv_metal *m, int n, const size_t *sizes, tqkv_metal_buffer *out)
{
    size_t size = 0;
    for (int i = 0; i < n; i++) {
        out[i].offset = size;
        size += (sizes[i] + 15) / 16 * 16;
    }
    pthread_mutex_lock(&m->lock);
    tqkv__memory *block = m->staging;
    m->staging = NULL;
    pthread_mutex_unlock(&m->lock);
    if (block && block->size < size) {
        tqkv__drop_staging(m, block);
        block = NULL;
    }
    if (!block) block = tqkv__lend(m, size);
    if (!block) {
        tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no buffer of %zu bytes", size);
        return NULL;
    }
    for (int i = 0; i < n; i++) out[i].buffer = block->buffer;
    return block;
}

/* Of two blocks the larger one waits. */
static void tqkv__give_back(tqkv_metal *m, tqkv__memory *block)
{
    pthread_mutex_lock(&m->lock);
    if (block->size <= TQKV__MOST_STAGING && (!m->staging || m->staging->size < block->size)) {
        tqkv__memory *other = m->staging;
        m->staging = block;
        block = other;
    }
    pthread_mutex_unlock(&m->lock);
    tqkv__drop_staging(m, block);
}

/* Rows [n][n_heads] of the caller, or parts of them, without gaps: `size` bytes each. */
typedef struct tqkv__rows_copy {
    const tqkv_strides *strides;
    size_t value, size; /* bytes of a value, and of what is copied of a row */
    int n, n_heads;
} tqkv__rows_copy;

static size_t tqkv__row_of_copy(const tqkv__rows_copy *c, size_t i)
{
    const size_t n_heads = (size_t)c->n_heads;
    return (i / n_heads * c->strides->token + i % n_heads * c->strides->head) * c->value;
}

static size_t tqkv__copied_rows(const tqkv__rows_copy *c) { return (size_t)c->n * (size_t)c->n_heads; }

static void tqkv__copy_in(const tqkv__rows_copy *c, const void *rows, char *to)
{
    for (size_t i = 0; i < tqkv__copied_rows(c); i++)
        memcpy(to + i * c->size, (const char *)rows + tqkv__row_of_copy(c, i), c->size);
}

static void tqkv__copy_out(const tqkv__rows_copy *c, const char *from, void *rows)
{
    for (size_t i = 0; i < tqkv__copied_rows(c); i++)
        memcpy((char *)rows + tqkv__row_of_copy(c, i), from + i * c->size, c->size);
}

static size_t tqkv__value_size(tqkv_type type) { return type == TQKV_TYPE_F32 ? 4 : 2; }

/* Strides with their defaults. */
static tqkv_strides tqkv__strides_with(tqkv_strides strides, int n_heads, int head_dim)
{
    if (!strides.token) strides.token = (size_t)n_heads * (size_t)head_dim;
    if (!strides.head) strides.head = (size_t)head_dim;
    return strides;
}

static const tqkv_cache_strides tqkv__no_gaps = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};

/* The stores of a cache's codes, and the strides of its rows. */
static tqkv_attention tqkv__stores_of(const tqkv_cache *c)
{
    tqkv_attention view;
    memset(&view, 0, sizeof view);
    tqkv_cache_view(c, 0, &view);
    return view;
}

static int tqkv__key_dim(const tqkv_attention *view)
{
    return view->keys->head_dim + (view->tail ? view->tail->head_dim : 0);
}

/* The blocking calls of a cache copy their rows into a block of shared memory, and the result out of it. */
static tqkv_result tqkv__cache_append(tqkv_metal *m, const tqkv_cache *c, const void *k, const void *v, int n_tokens)
{
    tqkv_metal_plan plan;
    const tqkv_attention view = tqkv__stores_of(c);
    const tqkv_store *keys = view.keys, *tail = view.tail, *values = view.values;
    const tqkv_strides of_k = tqkv__strides_with(keys->strides, keys->n_kv_heads, tqkv__key_dim(&view)),
                       of_v = tqkv__strides_with(values->strides, keys->n_kv_heads, values->head_dim);
    const size_t value = tqkv__value_size(keys->type), key_row = (size_t)keys->head_dim * value,
                 tail_row = tail ? (size_t)tail->head_dim * value : 0,
                 value_row = v ? (size_t)values->head_dim * value : 0;
    const tqkv__rows_copy first = {&of_k, value, key_row, n_tokens, keys->n_kv_heads},
                          second = {&of_k, value, tail_row, n_tokens, keys->n_kv_heads},
                          third = {&of_v, value, value_row, n_tokens, keys->n_kv_heads};
    const size_t rows = tqkv__copied_rows(&first), k_size = rows * key_row,
                 sizes[] = {k_size + rows * tail_row, rows * value_row, sizeof(uint32_t)};
    tqkv_metal_buffer memory, staged[3];
    if (!n_tokens) return TQKV_OK;
    tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    tqkv__memory *block = tqkv__take_staging(m, 3, sizes, staged);
    if (!block) return TQKV_OUT_OF_MEMORY;
    uint32_t *unfit = (uint32_t *)(void *)(block->begin + staged[2].offset);
    *unfit = 0;
    tqkv__copy_in(&first, k, block->begin);
    if (tail) tqkv__copy_in(&second, (const char *)k + key_row, block->begin + k_size);
    if (v) tqkv__copy_in(&third, v, block->begin + staged[1].offset);
    if (!v) staged[1].offset = k_size; /* a shared cache takes the tail as v */
    tqkv_metal_plan_cache_append(c, memory, &tqkv__no_gaps, staged[0], staged[1], n_tokens, staged[2], &plan);
    r = tqkv__run_plan(m, &plan);
    if (r == TQKV_OK && *unfit) /* of NaN and infinity tqkv_cache_append has looked */
        r = tqkv__fail(m, TQKV_NOT_FINITE, "append: halves, which calibrate and exact ends keep, do not hold a row");
    tqkv__give_back(m, block);
    return r;
}

/* What a blocking attention has in one block of shared memory. */
enum { TQKV__CALL_Q, TQKV__CALL_OUT, TQKV__CALL_SCRATCH, TQKV__CALL_PARTS };

static tqkv_result tqkv__attend_cache(tqkv_metal *m, const tqkv_cache *c, const void *q, int n_queries, void *out)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer memory, parts[TQKV__CALL_PARTS];
    const tqkv_attention view = tqkv__stores_of(c);
    const int n_heads = view.n_heads, key_dim = tqkv__key_dim(&view), value_dim = view.values->head_dim;
    const size_t value = tqkv__value_size(view.keys->type), rows = (size_t)n_queries * (size_t)n_heads,
                 q_row = (size_t)key_dim * value, out_row = (size_t)value_dim * value;
    size_t sizes[TQKV__CALL_PARTS] = {rows * q_row, rows * out_row, 0};
    tqkv_result r = tqkv_metal_find(m, c, &memory);
    if (r != TQKV_OK) return r;
    memset(parts, 0, sizeof parts);
    r = tqkv_metal_plan_cache_attend(c, memory, &tqkv__no_gaps, NULL, parts[TQKV__CALL_Q], n_queries,
                                     parts[TQKV__CALL_SCRATCH], parts[TQKV__CALL_OUT], &plan);
    if (tqkv__planned(m, r, "attend") != TQKV_OK) return r;
    sizes[TQKV__CALL_SCRATCH] = plan.scratch_size;
    tqkv__memory *block = tqkv__take_staging(m, TQKV__CALL_PARTS, sizes, parts);
    if (!block) return TQKV_OUT_OF_MEMORY;
    const tqkv_strides of_q = tqkv__strides_with(view.query_strides, n_heads, key_dim),
                       of_out = tqkv__strides_with(view.output_strides, n_heads, value_dim);
    const tqkv__rows_copy queries = {&of_q, value, q_row, n_queries, n_heads},
                          outputs = {&of_out, value, out_row, n_queries, n_heads};
    tqkv__copy_in(&queries, q, block->begin + parts[TQKV__CALL_Q].offset);
    tqkv_metal_plan_cache_attend(c, memory, &tqkv__no_gaps, NULL, parts[TQKV__CALL_Q], n_queries,
                                 parts[TQKV__CALL_SCRATCH], parts[TQKV__CALL_OUT], &plan);
    r = tqkv__run_plan(m, &plan);
    if (r == TQKV_OK) tqkv__copy_out(&outputs, block->begin + parts[TQKV__CALL_OUT].offset, out);
    tqkv__give_back(m, block);
    return r;
}

/* >>self-test: one cache on the GPU, one on the processor */

enum {
    TQKV__TRIAL_TOKENS = 48,
    TQKV__TRIAL_RAW = 12,
    TQKV__TRIAL_QUERIES = 3,
    TQKV__TRIAL_BLOCK = 4,
    TQKV__TRIAL_LISTED = 5
};
enum { TQKV__TRIAL_BLOCKS = TQKV__TRIAL_TOKENS / TQKV__TRIAL_BLOCK };
enum { TQKV__TRIAL_K, TQKV__TRIAL_V, TQKV__TRIAL_Q, TQKV__TRIAL_OUT, TQKV__TRIAL_EXPECTED, TQKV__TRIAL_PARTS };

typedef struct tqkv__trial {
    tqkv_metal *m;
    tqkv_cache_desc desc;
    tqkv_cache *gpu, *own;
    char *parts[TQKV__TRIAL_PARTS]; /* rows of desc.type, in one block */
    size_t sizes[TQKV__TRIAL_PARTS];
    tqkv_metal_store store; /* that the GPU decodes, to these rows */
    tqkv_metal_buffer rows;
} tqkv__trial;

/* A value of a row. Halves are of whatever size: their exponents lie 112 lower. */
static float tqkv__trial_value(tqkv_type type, const char *at)
{
    uint32_t bits = 0;
    float value;
    memcpy(&bits, at, tqkv__value_size(type)); /* as GPU and processor, little-endian */
    if (type == TQKV_TYPE_BF16) bits <<= 16;
    if (type == TQKV_TYPE_F16) bits = (bits & 0x8000u) << 16 | (bits & 0x7fffu) << 13;
    memcpy(&value, &bits, sizeof value);
    return type == TQKV_TYPE_F16 ? value * 5.192296858534828e33f : value;
}

/* Values from -2 to 2 of seven bits, which all types have; none is 0. */
static void tqkv__trial_fill(tqkv_type type, size_t size, uint32_t seed, char *rows)
{
    for (size_t i = 0; i < size; i += tqkv__value_size(type)) {
        seed = seed * 1664525u + 1013904223u;
        const float value = (float)(seed >> 25) / 32.0f - 127.0f / 64.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (type == TQKV_TYPE_BF16) bits >>= 16;
        if (type == TQKV_TYPE_F16) bits = (bits >> 16 & 0x8000u) | ((bits >> 13 & 0x3ffffu) - (112u << 10));
        memcpy(rows + i, &bits, tqkv__value_size(type));
    }
}

static tqkv_result tqkv__trial_differs(const tqkv__trial *t, const char *what, double by, const char *unit)
{
    const tqkv_attention view = tqkv__stores_of(t->own);
    const tqkv_store *tail = view.tail;
    return tqkv__fail(t->m, TQKV_METAL_ERROR,
                      "self-test: %s of head_dim %d, %s/%s%s%s differ from the processor's by %.3g%s", what,
                      t->desc.head_dim, tqkv_format_name(view.keys->format), tqkv_format_name(view.values->format),
                      tail ? " and " : "", tail ? tqkv_format_name(tail->format) : "", by, unit);
}

static tqkv_result tqkv__trial_bytes(const tqkv__trial *t, const char *what, const void *gpu, const void *own,
                                     size_t size)
{
    size_t n = 0;
    for (size_t i = 0; i < size; i++) n += ((const char *)gpu)[i] != ((const char *)own)[i];
    return n ? tqkv__trial_differs(t, what, 100.0 * (double)n / (double)size, "% of their bytes") : TQKV_OK;
}

/* Whether the processor's attention has other centroids for a stream than the GPU's. */
static bool tqkv__trial_rounds(const tqkv_store *s)
{
    return s && s->format != TQKV_F16 && s->format != TQKV_I8 && s->format != TQKV_TQ8;
}

/* Returns what outputs may differ by: the processor multiplies integers, and each is rounded to the type of rows. */
static double tqkv__trial_limit(const tqkv__trial *t, tqkv_type type)
{
    const tqkv_attention view = tqkv__stores_of(t->own);
    const tqkv_store *keys = view.keys, *tail = view.tail;
    const double root = sqrt((double)(keys->head_dim + (tail ? tail->head_dim : 0)));
    const double deviation = t->desc.scale != 0.0f ? 1.4 * fabs((double)t->desc.scale) * root : 1.4; /* of scores */
    const bool rounds = tqkv__trial_rounds(keys) || tqkv__trial_rounds(view.values) || tqkv__trial_rounds(tail);
    const double of_type = type == TQKV_TYPE_F32 ? 0.0 : type == TQKV_TYPE_F16 ? 1e-3 : 8e-3;
    return of_type + (rounds ? 0.015 : 3e-4) * (1.0 + deviation);
}

static tqkv_result tqkv__trial_values(const tqkv__trial *t, const char *what, tqkv_type type, size_t n, const void *gpu,
                                      const void *own)
{
    const double limit = tqkv__trial_limit(t, type);
    const size_t size = n * tqkv__value_size(type);
    double wrong = 0, all = 0;
    for (size_t i = 0; i < size; i += tqkv__value_size(type)) {
        const double expected = (double)tqkv__trial_value(type, (const char *)own + i),
                     difference = (double)tqkv__trial_value(type, (const char *)gpu + i) - expected;
        wrong += difference * difference;
        all += expected * expected;
    }
    return wrong <= limit * limit * all ? TQKV_OK : tqkv__trial_differs(t, what, sqrt(wrong / all), " of their length");
}

/* A store of a cache of the context. */
static tqkv_result tqkv__trial_store(tqkv_metal *m, const tqkv_store *s, tqkv_metal_store *out)
{
    memset(out, 0, sizeof *out);
    out->shape = *s;
    tqkv_result r = tqkv_metal_find(m, s->codes, &out->codes);
    if (r == TQKV_OK && s->norms_size) r = tqkv_metal_find(m, s->norms, &out->norms);
    if (r == TQKV_OK && s->center) r = tqkv_metal_find(m, s->center, &out->center);
    return r == TQKV_OK && s->channel_scale ? tqkv_metal_find(m, s->channel_scale, &out->channel_scale) : r;
}

static tqkv_result tqkv__record_trial(void *user, tqkv_metal_object encoder)
{
    const tqkv__trial *t = (const tqkv__trial *)user;
    tqkv_metal_plan plan;
    tqkv_metal_plan_decode(&t->store, 0, TQKV__TRIAL_TOKENS, TQKV_ORIGINAL, t->rows, &plan);
    return tqkv_metal_record(t->m, encoder, &plan);
}

/* names: of the codes and of the decoded rows. The source is not needed any more. */
static tqkv_result tqkv__try_store(tqkv__trial *t, const tqkv_store *gpu, const tqkv_store *own,
                                   const char *const names[2])
{
    char *decoded = t->parts[TQKV__TRIAL_K];
    const size_t size =
        (size_t)TQKV__TRIAL_TOKENS * (size_t)own->n_kv_heads * (size_t)own->head_dim * tqkv__value_size(t->desc.type);
    tqkv_result r = tqkv__trial_bytes(t, names[0], gpu->codes, own->codes, own->codes_size);
    if (r == TQKV_OK) r = tqkv__trial_bytes(t, names[0], gpu->norms, own->norms, own->norms_size);
    if (r == TQKV_OK) r = tqkv__trial_store(t->m, gpu, &t->store);
    if (r != TQKV_OK) return r;
    tqkv__memory *block = tqkv__take_staging(t->m, 1, &size, &t->rows);
    if (!block) return TQKV_OUT_OF_MEMORY;
    r = tqkv__run_as(t->m, "self-test", tqkv__record_trial, t);
    if (r == TQKV_OK) r = tqkv_decode(own, 0, TQKV__TRIAL_TOKENS, TQKV_ORIGINAL, decoded);
    if (r == TQKV_OK) r = tqkv__trial_bytes(t, names[1], block->begin, decoded, size);
    tqkv__give_back(t->m, block);
    return r;
}

static tqkv_result tqkv__try_stores(tqkv__trial *t)
{
    static const char *const names[3][2] = {
        {"keys", "decoded keys"}, {"values", "decoded values"}, {"tails", "decoded tails"}};
    const tqkv_attention of_gpu = tqkv__stores_of(t->gpu), of_own = tqkv__stores_of(t->own);
    const tqkv_store *const gpu[] = {of_gpu.keys, of_gpu.values, of_gpu.tail}, *const own[] = {of_own.keys,
                                                                                               of_own.values,
                                                                                               of_own.tail};
    tqkv_result r = TQKV_OK;
    for (int i = 0; i < 3 && r == TQKV_OK; i++)
        if (own[i] && (i != 1 || !t->desc.shared)) r = tqkv__try_store(t, gpu[i], own[i], names[i]);
    return r;
}

static tqkv_result tqkv__try_attention(const tqkv__trial *t, int n_queries)
{
    const size_t n = t->sizes[TQKV__TRIAL_OUT] / TQKV__TRIAL_QUERIES / tqkv__value_size(t->desc.type);
    char *out = t->parts[TQKV__TRIAL_OUT], *expected = t->parts[TQKV__TRIAL_EXPECTED];
    tqkv_result r = tqkv_cache_attend(t->gpu, t->parts[TQKV__TRIAL_Q], n_queries, out);
    if (r == TQKV_OK) r = tqkv_cache_attend(t->own, t->parts[TQKV__TRIAL_Q], n_queries, expected);
    if (r != TQKV_OK) return r;
    return tqkv__trial_values(t, n_queries > 1 ? "outputs of three queries" : "outputs of one query", t->desc.type,
                              n * (size_t)n_queries, out, expected);
}

/* The keys of the first KV head as those of an index, its choice, and attention to the blocks that it chose. Where an
   index cannot be, the list is the processor's. Arrays lie one behind the other in a block of shared memory. */
typedef struct tqkv__trial_list {
    const tqkv__trial *t;
    bool indexed;
    tqkv_metal_store keys, values, tail, index_keys;
    tqkv_metal_attention a;
    tqkv_metal_index x;
    tqkv_metal_buffer q, scores, list, scratch, out;
    tqkv__memory *block;
} tqkv__trial_list;

static tqkv_result tqkv__record_trial_list(void *user, tqkv_metal_object encoder)
{
    const tqkv__trial_list *l = (const tqkv__trial_list *)user;
    tqkv_metal *m = l->t->m;
    tqkv_metal_plan plan;
    tqkv_result r = TQKV_OK;
    if (l->indexed) {
        tqkv_metal_plan_index_scores(&l->x, l->q, l->scores, &plan);
        r = tqkv_metal_record(m, encoder, &plan);
        tqkv_metal_plan_index_choose(&l->x, l->scores, TQKV__TRIAL_LISTED, l->scratch, l->list, &plan);
        if (r == TQKV_OK) r = tqkv_metal_record(m, encoder, &plan);
    }
    tqkv_metal_plan_attend(&l->a, l->q, l->scratch, l->out, &plan);
    return r == TQKV_OK ? tqkv_metal_record(m, encoder, &plan) : r;
}

/* An attention to a list, as the processor takes it. */
static tqkv_attention tqkv__trial_view(const tqkv_cache *c, const int32_t *list)
{
    tqkv_attention a = tqkv__stores_of(c);
    a.n_queries = TQKV__TRIAL_QUERIES;
    a.first.n = a.last.n = 0;
    a.list.rows = list;
    a.list.length = TQKV__TRIAL_LISTED;
    a.list.block = TQKV__TRIAL_BLOCK;
    return a;
}

static tqkv_result tqkv__open_trial_list(const tqkv__trial *t, tqkv__trial_list *l)
{
    const tqkv_attention view = tqkv__stores_of(t->gpu);
    const tqkv_store *keys = view.keys, *values = view.values, *tail = view.tail;
    memset(l, 0, sizeof *l);
    l->t = t;
    l->indexed = (keys->head_dim == 64 || keys->head_dim == 128) && tqkv__has_matrices(t->m);
    tqkv_result r = tqkv__trial_store(t->m, keys, &l->keys);
    if (r == TQKV_OK) r = tqkv__trial_store(t->m, values, &l->values);
    if (r == TQKV_OK && tail) r = tqkv__trial_store(t->m, tail, &l->tail);
    l->a.attention = tqkv__trial_view(t->gpu, NULL);
    if (r == TQKV_OK && l->a.attention.sinks) r = tqkv_metal_find(t->m, l->a.attention.sinks, &l->a.sinks);
    l->a.keys = &l->keys;
    l->a.values = &l->values;
    l->a.tail = tail ? &l->tail : NULL;
    l->a.matrix_group = t->desc.matrix_group;
    l->index_keys = l->keys;
    l->index_keys.shape.n_kv_heads = 1;
    l->x.keys = &l->index_keys;
    l->x.index.n_heads = l->a.attention.n_heads;
    l->x.index.n_queries = TQKV__TRIAL_QUERIES;
    l->x.index.end = TQKV__TRIAL_TOKENS;
    l->x.index.block = TQKV__TRIAL_BLOCK;
    l->x.index.relu = true;
    l->x.index.query_type = t->desc.type;
    return r;
}

/* Divides a block, and writes q and a list into it. */
static tqkv_result tqkv__fill_trial_list(tqkv__trial_list *l)
{
    const tqkv__trial *t = l->t;
    tqkv_metal_buffer staged[5];
    size_t sizes[] = {t->sizes[TQKV__TRIAL_Q], sizeof(float) * TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS,
                      sizeof(int32_t) * TQKV__TRIAL_QUERIES * TQKV__TRIAL_LISTED, 0, t->sizes[TQKV__TRIAL_OUT]};
    tqkv_metal_plan plan;
    l->a.list.buffer = t->m->unused; /* for now */
    tqkv_result r = tqkv_metal_plan_attend(&l->a, l->q, l->scratch, l->out, &plan);
    if (tqkv__planned(t->m, r, "self-test") != TQKV_OK) return r;
    sizes[3] = plan.scratch_size;
    l->block = tqkv__take_staging(t->m, 5, sizes, staged);
    if (!l->block) return TQKV_OUT_OF_MEMORY;
    l->q = staged[0];
    l->scores = staged[1];
    l->list = staged[2];
    l->scratch = staged[3];
    l->out = staged[4];
    memcpy(l->block->begin, t->parts[TQKV__TRIAL_Q], t->sizes[TQKV__TRIAL_Q]);
    for (int i = 0; i < TQKV__TRIAL_QUERIES; i++) {
        const int32_t row[TQKV__TRIAL_LISTED] = {0, 3 + i, 7, TQKV__TRIAL_BLOCKS - 1, -1};
        memcpy(l->block->begin + l->list.offset + (size_t)i * sizeof row, row, sizeof row);
    }
    l->a.list = l->list;
    return TQKV_OK;
}

/* The choice must be the same of the same scores. */
static tqkv_result tqkv__check_trial_index(const tqkv__trial_list *l)
{
    float expected[TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS], scores[TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS];
    int32_t list[TQKV__TRIAL_QUERIES * TQKV__TRIAL_LISTED];
    const tqkv__trial *t = l->t;
    tqkv_store keys = *tqkv__stores_of(t->own).keys;
    tqkv_index x = l->x.index;
    keys.n_kv_heads = 1;
    x.keys = &keys;
    memcpy(scores, l->block->begin + l->scores.offset, sizeof scores);
    tqkv_result r = tqkv_index_scores(&x, t->parts[TQKV__TRIAL_Q], expected);
    if (r == TQKV_OK)
        r = tqkv__trial_values(t, "scores of an index", TQKV_TYPE_F32, TQKV__TRIAL_QUERIES * TQKV__TRIAL_BLOCKS, scores,
                               expected);
    if (r == TQKV_OK) r = tqkv_index_choose(&x, scores, TQKV__TRIAL_LISTED, list);
    return r == TQKV_OK ? tqkv__trial_bytes(t, "chosen blocks", l->block->begin + l->list.offset, list, sizeof list)
                        : r;
}

static tqkv_result tqkv__try_list(const tqkv__trial *t)
{
    tqkv__trial_list l;
    char *expected = t->parts[TQKV__TRIAL_EXPECTED];
    tqkv_result r = tqkv__open_trial_list(t, &l);
    if (r == TQKV_OK) r = tqkv__fill_trial_list(&l);
    if (r == TQKV_OK) r = tqkv__run_as(t->m, "self-test", tqkv__record_trial_list, &l);
    if (r == TQKV_OK && l.indexed) r = tqkv__check_trial_index(&l);
    if (r == TQKV_OK) {
        const tqkv_attention a = tqkv__trial_view(t->own, (int32_t *)(void *)(l.block->begin + l.list.offset));
        r = tqkv_attend(&a, t->parts[TQKV__TRIAL_Q], expected);
    }
    if (r == TQKV_OK)
        r = tqkv__trial_values(t, "outputs of a list", t->desc.type,
                               t->sizes[TQKV__TRIAL_OUT] / tqkv__value_size(t->desc.type),
                               l.block->begin + l.out.offset, expected);
    if (l.block) tqkv__give_back(t->m, l.block);
    return r;
}

static tqkv_result tqkv__open_trial(tqkv__trial *t)
{
    const tqkv_cache_desc *d = &t->desc;
    t->desc.metal = t->m;
    tqkv_result r = tqkv_cache_create(d, &t->gpu);
    t->desc.metal = NULL;
    if (r == TQKV_OK) r = tqkv_cache_create(d, &t->own);
    if (tqkv__planned(t->m, r, "self-test") != TQKV_OK) return r;
    const size_t width = tqkv__value_size(d->type), n_heads = (size_t)d->n_heads,
                 key_dim = (size_t)(d->head_dim + d->tail_dim),
                 value_dim = (size_t)(d->value_dim ? d->value_dim : d->head_dim);
    const size_t tokens = TQKV__TRIAL_TOKENS * (size_t)d->n_kv_heads * width,
                 queries = TQKV__TRIAL_QUERIES * n_heads * width;
    const size_t sizes[] = {tokens * key_dim, tokens * value_dim, queries * key_dim, queries * value_dim,
                            queries * value_dim};
    size_t all = 0;
    memcpy(t->sizes, sizes, sizeof sizes);
    for (int i = 0; i < TQKV__TRIAL_PARTS; i++) all += sizes[i];
    t->parts[0] = (char *)calloc(all, 1);
    if (!t->parts[0]) return tqkv__fail(t->m, TQKV_OUT_OF_MEMORY, "no memory for a self-test");
    for (int i = 1; i < TQKV__TRIAL_PARTS; i++) t->parts[i] = t->parts[i - 1] + sizes[i - 1];
    for (int i = TQKV__TRIAL_K; i <= TQKV__TRIAL_Q; i++)
        tqkv__trial_fill(d->type, sizes[i], 1u + (uint32_t)i, t->parts[i]);
    return TQKV_OK;
}

/* Both caches append `n` tokens from number `first` on. */
static tqkv_result tqkv__append_trial(const tqkv__trial *t, int first, int n)
{
    const size_t at = (size_t)first, all = TQKV__TRIAL_TOKENS;
    const char *k = t->parts[TQKV__TRIAL_K] + at * (t->sizes[TQKV__TRIAL_K] / all),
               *v = t->desc.shared ? NULL : t->parts[TQKV__TRIAL_V] + at * (t->sizes[TQKV__TRIAL_V] / all);
    const tqkv_result r = tqkv_cache_append(t->gpu, k, v, n);
    return r == TQKV_OK ? tqkv_cache_append(t->own, k, v, n) : r;
}

/* A cache that learns attends to its rows as they came before it encodes them. */
static tqkv_result tqkv__try_raw(const tqkv__trial *t)
{
    const tqkv_result r = tqkv__append_trial(t, 0, TQKV__TRIAL_RAW);
    return r == TQKV_OK ? tqkv__try_attention(t, TQKV__TRIAL_QUERIES) : r;
}

tqkv_result tqkv_metal_self_test(tqkv_metal *m, const tqkv_cache_desc *desc)
{
    if (!m) return TQKV_INVALID_ARGUMENT;
    if (!desc) return tqkv__planned(m, TQKV_INVALID_ARGUMENT, "self-test");
    tqkv__trial t = {.m = m, .desc = *desc};
    t.desc.capacity = TQKV__TRIAL_TOKENS;
    t.desc.ring = false;
    t.desc.window = desc->window ? TQKV__TRIAL_TOKENS / 2 : 0;
    t.desc.exact_first = desc->exact_first ? 5 : 0;
    t.desc.exact_last = desc->exact_last ? 9 : 0;
    tqkv_result r = tqkv__open_trial(&t);
    const int raw = desc->calibrate ? TQKV__TRIAL_RAW : 0;
    if (r == TQKV_OK && raw) r = tqkv__try_raw(&t);
    if (r == TQKV_OK) r = tqkv__append_trial(&t, raw, TQKV__TRIAL_TOKENS - raw);
    if (r == TQKV_OK) r = tqkv__try_stores(&t);
    if (r == TQKV_OK) r = tqkv__try_attention(&t, 1);
    if (r == TQKV_OK) r = tqkv__try_attention(&t, TQKV__TRIAL_QUERIES);
    if (r == TQKV_OK) r = tqkv__try_list(&t);
    free(t.parts[0]);
    tqkv_cache_destroy(t.gpu);
    tqkv_cache_destroy(t.own);
    return r;
}

/* >>context: libraries, the device, create and destroy */

#ifdef TQKV_METALLIB_EMBED
/* The size, and 16 bytes on the library. Labels that start with L make no symbols, where a linker could split them. */
__asm__(
#ifdef __APPLE__
    ".pushsection __TEXT,__const\n"
    ".balign 16\n_tqkv__embedded:\n"
#else
    ".pushsection .rodata\n"
    ".balign 16\ntqkv__embedded:\n"
#endif
    ".quad Ltqkv_end - Ltqkv_begin\n.quad 0\n"
    "Ltqkv_begin:\n.incbin \"" TQKV_METALLIB_EMBED "\"\nLtqkv_end:\n"
    ".popsection\n");
extern const struct {
    uint64_t size, zero;
    unsigned char bytes[];
} tqkv__embedded;
#endif

static tqkv_result tqkv__load_bytes(tqkv_metal *m, const void *bytes, size_t size)
{
    NSError *error = nil;
    dispatch_data_t data = dispatch_data_create(bytes, size, NULL, DISPATCH_DATA_DESTRUCTOR_DEFAULT); /* a copy */
    m->library = [m->device newLibraryWithData:data error:&error];
#if !(__has_feature(objc_arc) && OS_OBJECT_USE_OBJC)
    dispatch_release(data); /* not an object of Objective-C, or one without ARC */
#endif
    return m->library ? TQKV_OK : tqkv__fail(m, TQKV_METAL_ERROR, "library in memory: %s", tqkv__error_text(error));
}

static tqkv_result tqkv__load_path(tqkv_metal *m, const char *path)
{
    NSError *error = nil;
    NSString *name = [NSString stringWithUTF8String:path];
    if (!name || !path[0]) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "library_path is empty or not UTF-8");
    m->library = [m->device newLibraryWithURL:[NSURL fileURLWithPath:name] error:&error];
    return m->library ? TQKV_OK : tqkv__fail(m, TQKV_METAL_ERROR, "%s: %s", path, tqkv__error_text(error));
}

/* Kernels are compiled when they are needed. */
static tqkv_result tqkv__load_source(tqkv_metal *m, const char *source)
{
    NSString *text = [NSString stringWithUTF8String:source];
    if (!text || !source[0]) return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "library_source is empty or not UTF-8");
    m->source = TQKV__RETAIN(text);
    return TQKV_OK;
}

static bool tqkv__has_library(const tqkv_metal_desc *desc)
{
#ifdef TQKV_METALLIB_EMBED
    (void)desc;
    return true;
#else
    return desc->library_path || desc->library_bytes || desc->library;
#endif
}

static tqkv_result tqkv__load_library(tqkv_metal *m, const tqkv_metal_desc *desc)
{
    id<MTLLibrary> library = desc->library;
    if ((desc->library_path != NULL) + (desc->library_bytes != NULL) + (library != nil) > 1)
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "more than one library");
    if (desc->library_path) return tqkv__load_path(m, desc->library_path);
    if (desc->library_bytes) return tqkv__load_bytes(m, desc->library_bytes, desc->library_size);
    if (library && !tqkv__is_device(m, [library device]))
        return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "the library is of another device");
    if (library) {
        m->library = TQKV__RETAIN(library);
        return TQKV_OK;
    }
#ifdef TQKV_METALLIB_EMBED
    return tqkv__load_bytes(m, tqkv__embedded.bytes, (size_t)tqkv__embedded.size);
#else
    if (desc->library_source) return tqkv__load_source(m, desc->library_source);
    return tqkv__fail(m, TQKV_INVALID_ARGUMENT, "no library: none given, and built without TQKV_METALLIB_EMBED");
#endif
}

static tqkv_result tqkv__open_device(tqkv_metal *m, const tqkv_metal_desc *desc)
{
    id<MTLDevice> given = desc->device;
    m->device = given ? TQKV__RETAIN(given) : MTLCreateSystemDefaultDevice();
    if (!m->device) return tqkv__fail(m, TQKV_UNSUPPORTED, "there is no Metal device");
#ifndef TQKV_METAL_ANY_FAMILY /* for tests on virtual machines, whose GPU calls itself Apple5 */
    if (![m->device supportsFamily:MTLGPUFamilyApple7])
        return tqkv__fail(m, TQKV_UNSUPPORTED, "%s: not of the GPU family Apple7 or later",
                          [[m->device name] UTF8String]);
#endif
    m->queue = [m->device newCommandQueue];
    if (!m->queue) return tqkv__fail(m, TQKV_METAL_ERROR, "Metal gave no command queue");
    /* As long as the largest struct of an argument: Metal's validation compares the two, also for arguments that a
       pipeline does not read. Untracked: Metal must not order dispatches because they share this buffer. */
    m->unused = [m->device newBufferWithLength:sizeof(tqkv__batch_item)
                                       options:MTLResourceStorageModePrivate | MTLResourceHazardTrackingModeUntracked];
    return m->unused ? TQKV_OK : tqkv__fail(m, TQKV_OUT_OF_MEMORY, "no buffer");
}

static bool tqkv__all_zero(const char *bytes, size_t size)
{
    size_t n = 0;
    while (n < size && !bytes[n]) n++;
    return n == size;
}

/* Runs the product of two matrices. A failure may be of the moment: it is tried again. Matrices that lie otherwise, or
   a kernel that Metal refuses twice, cost the context its matrices; one that was built and did not run is a failure. */
static tqkv_result tqkv__check_product(tqkv_metal *m, tqkv_metal_plan *plan, const void *report)
{
    char text[300];
    tqkv_result r = tqkv__run_plan(m, plan);
    if (r == TQKV_METAL_ERROR && (r = tqkv__run_plan(m, plan)) == TQKV_OK) tqkv__fail(m, r, "%s", "");
    if (r != TQKV_OK && (r != TQKV_METAL_ERROR || tqkv__is_built(m, &plan->d[0].kernel))) return r;
    m->matrices = r == TQKV_OK && tqkv_metal_has_matrices(report);
    tqkv_metal_error(m, text, sizeof text);
    if (!m->matrices)
        tqkv__fail(m, r, "%s; attention without matrices", r == TQKV_OK ? "this GPU's matrices lie otherwise" : text);
    return TQKV_OK;
}

/* Compares the shaders' tables with those of tqkv.h. Then it looks where the GPU's matrices lie: attention can do
   without them, so a failure there is only a text. */
static tqkv_result tqkv__check_tables(tqkv_metal *m)
{
    tqkv_metal_plan plan;
    tqkv_metal_buffer buffer;
    const size_t size = TQKV_METAL_REPORT;
    tqkv__memory *block = tqkv__take_staging(m, 1, &size, &buffer);
    if (!block) return TQKV_OUT_OF_MEMORY;
    memset(block->begin, 0, size);
    tqkv_metal_plan_tables(buffer, &plan);
    plan.n = 1; /* the other one may fail */
    tqkv_result r = tqkv__run_plan(m, &plan);
    const char *stale = r == TQKV_OK ? tqkv_metal_stale_table(block->begin) : NULL;
    if (stale && tqkv__all_zero(block->begin, size))
        r = tqkv__fail(m, TQKV_METAL_ERROR, "tables: the kernel wrote nothing");
    else if (stale)
        r = tqkv__fail(m, TQKV_TABLE_MISMATCH, "the library's %s differs from that of tqkv.h", stale);
    if (r == TQKV_OK) {
        plan.call = "matrices";
        plan.d[0] = plan.d[1];
        r = tqkv__check_product(m, &plan, block->begin);
    }
    tqkv__give_back(m, block);
    return r;
}

static void tqkv__drop_kept(tqkv__kept **list)
{
    while (*list) {
        tqkv__kept *k = *list;
        *list = k->next;
        tqkv__free_kept(k);
    }
}

static void tqkv__drop_library(tqkv_metal *m)
{
    tqkv__drop_kept(&m->pipelines);
    tqkv__drop_kept(&m->compiled);
    TQKV__RELEASE(m->library);
    TQKV__RELEASE(m->source);
}

/* The library, or the source if there is one and Metal refuses the library. A wrong argument is refused either way.
   With both, single kernels that Metal refuses come from the source, too. */
static tqkv_result tqkv__open_library(tqkv_metal *m, const tqkv_metal_desc *desc)
{
    char library_text[180];
    const bool may_fall_back = desc->library_source && tqkv__has_library(desc);
    tqkv_result r = tqkv__load_library(m, desc);
    if (r == TQKV_OK) r = tqkv__check_tables(m);
    if (r == TQKV_OK && may_fall_back) return tqkv__load_source(m, desc->library_source);
    if (!may_fall_back || (r != TQKV_METAL_ERROR && r != TQKV_TABLE_MISMATCH)) return r;
    tqkv_metal_error(m, library_text, sizeof library_text);
    tqkv__drop_library(m);
    r = tqkv__load_source(m, desc->library_source);
    if (r == TQKV_OK) r = tqkv__check_tables(m);
    return tqkv__fell_back(m, r, library_text);
}

tqkv_result tqkv_metal_create(const tqkv_metal_desc *desc, tqkv_metal **out)
{
    if (!out) return TQKV_INVALID_ARGUMENT;
    *out = NULL;
    if (!desc) return TQKV_INVALID_ARGUMENT;
    if (desc->error && desc->error_size) snprintf(desc->error, desc->error_size, "out of memory");
    tqkv_metal *m = (tqkv_metal *)calloc(1, sizeof *m);
    if (!m) return TQKV_OUT_OF_MEMORY;
    if (pthread_mutex_init(&m->lock, NULL)) {
        free(m);
        return TQKV_OUT_OF_MEMORY;
    }
    m->backend.memory.alloc = tqkv__memory_alloc;
    m->backend.memory.free = tqkv__memory_free;
    m->backend.memory.user = m;
    m->backend.has_kernels = tqkv__has_kernels;
    m->backend.append = tqkv__cache_append;
    m->backend.attend = tqkv__attend_cache;
    tqkv_result r;
    @autoreleasepool {
        r = tqkv__open_device(m, desc);
        if (r == TQKV_OK) r = tqkv__open_library(m, desc);
    }
    tqkv_metal_error(m, desc->error, desc->error_size);
    if (r == TQKV_OK)
        *out = m;
    else
        tqkv_metal_destroy(m);
    return r;
}

void tqkv_metal_destroy(tqkv_metal *m)
{
    if (!m) return;
    tqkv__drop_library(m);
    while (m->memory) tqkv__memory_free(m, m->memory->begin, m->memory->size);
    TQKV__RELEASE(m->unused);
    TQKV__RELEASE(m->queue);
    TQKV__RELEASE(m->device);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

#endif /* __OBJC__ */

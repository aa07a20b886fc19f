/* ---- The implementation starts here: stop reading if you only want the API. ----

   It is joined from the files of src/, one a tag: plan_rows.h is >>plan-rows, store.h >>store-code. Each uses what
   stands above it.

     >>tables         one row a format, one row a head_dim, codebooks; the shaders include it, too
     >>backend        what a cache and the context of a GPU know of each other
     >>needs          what the implementation needs of the compiler, and xxHash
     >>exact          arithmetic whose bits depend on nothing but its operands
     >>store-code     sizes, names, what a valid store is, which positions and rows are valid
     >>set            what an instruction set provides
     >>rotate-code    the rotation
     >>codec          norms, quantising, packing, and back: the specification
     >>encode         tqkv_encode, tqkv_probe, tqkv_decode
     >>convert        tqkv_store_convert, and rows that move
     >>measure        tqkv_measure, tqkv_rotate
     >>calibrate      tqkv_calibrate, tqkv_logit_noise
     >>attend         types of attention
     >>plain          attention of a tile in plain C: the specification

     compiled once for each instruction set
     >>kernels        what the loops share
     >>k-softmax      exp, tanh, weights out of scores
     >>k-widen        rows to floats and back
     >>k-rotate       the rotation
     >>k-norms        sums of squares, norms
     >>k-search       the factor whose codes are best for a row
     >>k-quantise     codes, packed, of whole rows
     >>k-table        all of these as a table of functions
     >>k-halves       F16 and TQ8, which are multiplied as floats
     >>k-rows         scores and sums of all other formats, in integers
     >>set-avx2, >>set-avx512, >>set-neon
                      what a set brings to the loops
     >>integer-avx512, >>integer-avx2, >>integer-neon
                      what it brings to those of integers

     >>isa-code       which set is in use
     >>attention-code a tqkv_attention, opened and checked
     >>visible        which positions a query sees
     >>tile           tiles and their sums
     >>walk           from tile to tile
     >>gather         tiles of scattered rows
     >>query          a row of a call: its query, its centres, its result
     >>job            a call cut into tasks
     >>attend-calls   tqkv_attend and its slices
     >>index-code     tqkv_index_scores, tqkv_index_choose
     >>cache-code     tqkv_cache
     >>cache-calibrate  a cache that learns from its first positions; tqkv_cache_preset
     >>cache-edit     tqkv_cache_truncate, remove, keep, fork
     >>snapshot       save and load

     >>licence                                                                                                        */

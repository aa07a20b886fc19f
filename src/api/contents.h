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

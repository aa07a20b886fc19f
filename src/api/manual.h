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

#include "manual.h"
#ifndef TQKV_H
#define TQKV_H

#include "types.h"

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

#include "api_common.h"

#include "api_cache.h"

#include "api_store.h"

#include "api_attention.h"

#include "api_index.h"

#include "api_threads.h"

#include "api_metal.h"

#ifdef TQKV_METAL
#include "api_metal_plan.h"
#endif /* TQKV_METAL */

#ifdef __cplusplus
}
#endif
#endif /* TQKV_H */

#include "contents.h"

#ifdef TQKV_NO_IMPLEMENTATION
#undef TQKV_IMPLEMENTATION
#endif

#if (defined(TQKV_IMPLEMENTATION) || defined(TQKV_SHARED)) && !defined(TQKV__SHARED)
#define TQKV__SHARED

#include "tables.h"

#include "backend.h"
#endif

#if defined(TQKV_IMPLEMENTATION) && !defined(TQKV__IMPLEMENTED)
#define TQKV__IMPLEMENTED

#include "needs.h"

#include "exact.h"

#include "store.h"

#include "team.h"

#include "set.h"

#include "rotate.h"

#include "codec.h"

#include "encode.h"

/* What is called once a token, or less often, is made small: the pragma is gcc's alone. */
#if defined(__OPTIMIZE__) && defined(__GNUC__) && !defined(__clang__)
#define TQKV__SMALL
#pragma GCC push_options
#pragma GCC optimize("Os")
#endif

#include "convert.h"

#include "measure.h"

#include "calibrate.h"

#ifdef TQKV__SMALL
#undef TQKV__SMALL
#pragma GCC pop_options
#endif

#include "attend.h"

#include "integer.h"

#endif /* TQKV_IMPLEMENTATION, to be continued */

/* The loops of attention and of encoding follow. The implementation includes this file again for each instruction set,
   and compiles the sections from here to >>set-avx512 for it. TQKV__(name) is that set's version of name, TQKV__LANES
   the number of floats in its vector, and TQKV__TARGET the attribute that enables it in the compiler. */
#ifdef TQKV__LANES

#include "kernels.h"

#include "k_softmax.h"

#include "k_decode.h"

#include "k_dot.h"

#include "k_accumulate.h"

#include "k_tiles.h"

#include "k_rotate.h"

#include "k_norms.h"

#include "k_search.h"

#include "k_quantise.h"

#include "k_table.h"

#endif /* TQKV__LANES */

#ifdef TQKV__INTEGER_LANES

#include "k_integer.h"

#include "k_halves.h"

#include "k_integer_few.h"

#include "k_integer_tiles.h"

#endif /* TQKV__INTEGER_LANES */

#if defined(TQKV__LANES) || defined(TQKV__INTEGER_LANES)
#include "kernels_end.h"
#endif

#if defined(TQKV_IMPLEMENTATION) && !defined(TQKV__SETS)
#define TQKV__SETS
#define TQKV__NESTED /* the file that a set includes is tqkv.h again */

/* Loops that are not optimised take twenty times the space and up to 130 times the time. gcc optimises them, whatever
   the rest of the file is compiled with. clang has no such pragma: it leaves the sets out, and plain C takes a fifth of
   the time. */
#if defined(__OPTIMIZE__) || !defined(__clang__)
#if defined(__x86_64__) && !defined(TQKV_NO_AVX2)
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

#include "set_avx512.h"

#include "set_avx2.h"

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

#include "set_neon.h"
#endif

#ifndef TQKV_NO_INTEGER
#include "integer_avx512.h"

#include "integer_avx2.h"

#include "integer_neon.h"
#endif

#undef TQKV__NESTED
#ifdef TQKV__OPTIMISED
#undef TQKV__OPTIMISED
#pragma GCC pop_options
#endif

#include "isa.h"

#include "attention.h"

#include "visible.h"

#include "tile.h"

#include "walk.h"

#include "gather.h"

#include "query.h"

#include "job.h"

/* As before >>convert. */
#if defined(__OPTIMIZE__) && defined(__GNUC__) && !defined(__clang__)
#define TQKV__SMALL
#pragma GCC push_options
#pragma GCC optimize("Os")
#endif

#include "attend_calls.h"

#include "index.h"

#include "cache.h"

#include "cache_calibrate.h"

#include "cache_edit.h"

#include "snapshot.h"

#ifdef TQKV__SMALL
#undef TQKV__SMALL
#pragma GCC pop_options
#endif

#endif /* TQKV_IMPLEMENTATION, to be continued */

/* ---- From here on all is for GPUs: stop reading if the processor is enough for you. ---- */

#if defined(TQKV_METAL) && defined(TQKV__SHARED) && !defined(TQKV__NESTED) && !defined(TQKV__METAL_SIZES)
#define TQKV__METAL_SIZES

#include "metal_sizes.h"

#include "metal_host.h"
#endif

#if defined(TQKV_IMPLEMENTATION) && defined(TQKV_METAL) && !defined(TQKV__NESTED) && !defined(TQKV__METAL_CODE)
#define TQKV__METAL_CODE
#define TQKV__NO_PLAN          "plan: NULL"
#define TQKV__NO_CACHE_QUERIES "the cache is NULL or n_queries not positive"
#define TQKV__LARGE_SCRATCH    "more scratch than a size_t can count"

#include "plan_rows.h"

#include "plan_split.h"

#include "plan_list.h"

#include "plan_attend.h"

#include "plan_shape.h"

#include "plan_calls.h"

#include "plan_batch.h"

#include "plan_index.h"

#include "plan_cache.h"

#include "plan_prepare.h"

#include "plan_report.h"

#endif /* TQKV_METAL */

#if defined(TQKV__PRECISE) && !defined(TQKV__NESTED)
#undef TQKV__PRECISE
#pragma float_control(pop)
#endif

#include "licence.h"

#include "api/manual.h"
#ifndef TQKV_H
#define TQKV_H

#include "api/types.h"

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

#include "api/common.h"
#include "api/cache.h"
#include "api/store.h"
#include "api/attention.h"
#include "api/index.h"
#include "api/isa.h"
#include "api/metal.h"

#ifdef TQKV_METAL
#include "api/metal_plan.h"
#endif /* TQKV_METAL */

#ifdef __cplusplus
}
#endif
#endif /* TQKV_H */

#include "api/contents.h"

#ifdef TQKV_NO_IMPLEMENTATION
#undef TQKV_IMPLEMENTATION
#endif

#if (defined(TQKV_IMPLEMENTATION) || defined(TQKV_SHARED)) && !defined(TQKV__SHARED)
#define TQKV__SHARED

#include "base/tables.h"
#include "base/backend.h"
#endif

#if defined(TQKV_IMPLEMENTATION) && !defined(TQKV__IMPLEMENTED)
#define TQKV__IMPLEMENTED

#include "base/needs.h"
#include "base/exact.h"
#include "base/store.h"
#include "vectors/set.h"
#include "codec/rotate.h"
#include "codec/codec.h"
#include "codec/encode.h"
#include "attention/attend.h"
#include "attention/plain.h"

#endif /* TQKV_IMPLEMENTATION, to be continued */

#include "vectors/loops.h"

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

#include "vectors/avx2.h"
#include "vectors/avx512.h"

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

#include "vectors/neon.h"
#endif

#include "vectors/integer_avx512.h"
#include "vectors/integer_avx2.h"
#include "vectors/integer_neon.h"

#undef TQKV__NESTED
#ifdef TQKV__OPTIMISED
#undef TQKV__OPTIMISED
#pragma GCC pop_options
#endif

#include "vectors/isa.h"
#include "attention/open.h"
#include "attention/visible.h"
#include "attention/tile.h"
#include "attention/walk.h"
#include "attention/gather.h"
#include "attention/query.h"
#include "attention/job.h"

/* What is called once a token, or less often, is made small: the pragma is gcc's alone. */
#if defined(__OPTIMIZE__) && defined(__GNUC__) && !defined(__clang__)
#define TQKV__SMALL
#pragma GCC push_options
#pragma GCC optimize("Os")
#endif

#include "codec/convert.h"
#include "codec/measure.h"
#include "codec/calibrate.h"
#include "attention/calls.h"
#include "attention/index.h"
#include "cache/cache.h"
#include "cache/calibrate.h"
#include "cache/calls.h"
#include "cache/edit.h"
#include "cache/snapshot.h"

#ifdef TQKV__SMALL
#undef TQKV__SMALL
#pragma GCC pop_options
#endif

#endif /* TQKV_IMPLEMENTATION */

#if defined(TQKV__PRECISE) && !defined(TQKV__NESTED)
#undef TQKV__PRECISE
#pragma float_control(pop)
#endif

#include "api/licence.h"

/* >>needs: what the implementation needs of the compiler, and xxHash */

#if defined(_MSC_VER) && !defined(__clang__)
#error "tqkv.h: MSVC cannot compile the implementation; compile this file with clang-cl, or use MinGW"
#endif
#if !defined(TQKV_ALLOW_FAST_MATH) && \
    (defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
     (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__))
#error "tqkv.h: -ffast-math changes stored bytes; compile this file without it, or define TQKV_ALLOW_FAST_MATH"
#endif

/* clang announces -fassociative-math, -freciprocal-math and -funsafe-math-optimizations by no macro; they would change
   norms. On arm64 clang 14 does not know the pragma, and reorders no sum that counts. */
#if defined(__clang__) && !defined(TQKV_ALLOW_FAST_MATH) && \
    (defined(__x86_64__) || (defined(__aarch64__) && __clang_major__ > 14))
#define TQKV__PRECISE
#pragma float_control(precise, on, push)
#endif

#include <fenv.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef __has_include
#if !__has_include("xxhash.h")
#error "tqkv.h: xxhash.h 0.8.0 or later is missing: Debian libxxhash-dev, Homebrew xxhash, or a copy beside tqkv.h"
#endif
#endif
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
/* gcc 12 -Og rejects the forced inlining of xxHash 0.8.1 (Debian 12). xxhash.h evaluates this macro after it defines
   its version. */
#if !defined(XXH_NO_INLINE_HINTS) && defined(__GNUC__) && !defined(__clang__) && !defined(__NO_INLINE__) && \
    !defined(__OPTIMIZE_SIZE__)
#define XXH_NO_INLINE_HINTS (XXH_VERSION_NUMBER == 801)
#endif
#include "xxhash.h"
#if defined(XXH_NO_XXH3) || defined(XXH_NO_LONG_LONG)
#error "tqkv.h needs XXH3: xxhash.h was included with XXH_NO_XXH3 or XXH_NO_LONG_LONG"
#endif
#if defined(XXH_VERSION_NUMBER) && XXH_VERSION_NUMBER < 800
#define TQKV__STRING(x) #x
#define TQKV__EXPAND(x) TQKV__STRING(x)
#define TQKV__XXH_FOUND \
    TQKV__EXPAND(XXH_VERSION_MAJOR) "." TQKV__EXPAND(XXH_VERSION_MINOR) "." TQKV__EXPAND(XXH_VERSION_RELEASE)
#pragma message("tqkv.h: found xxhash.h " TQKV__XXH_FOUND)
#error "tqkv.h: xxhash.h is too old, 0.8.0 is needed: Debian libxxhash-dev, Homebrew xxhash, or a copy beside tqkv.h"
#endif

/* -fshort-enums or -fpack-struct for this file alone would give what callers pass another layout. 32-bit ARM has short
   enums in some systems, and says so. */
enum tqkv__smallest { TQKV__SMALLEST };
struct tqkv__gap {
    char before;
    void *behind;
};
#ifdef __ARM_SIZEOF_MINIMAL_ENUM
#define TQKV__WHOLE_ENUMS true
#else
#define TQKV__WHOLE_ENUMS (sizeof(enum tqkv__smallest) == sizeof(int))
#endif
typedef char tqkv__compiled_with_fshort_enums_or_fpack_struct
    [TQKV__WHOLE_ENUMS && sizeof(struct tqkv__gap) > 1 + sizeof(void *) ? 1 : -1];

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#ifndef TQKV_EXPLAIN
#define TQKV_EXPLAIN(text) ((void)0)
#endif
/* Passes text to TQKV_EXPLAIN and evaluates to the result. */
#define TQKV__REFUSE(result, text) (TQKV_EXPLAIN(text), TQKV_##result)
#define TQKV__INVALID(text)        TQKV__REFUSE(INVALID_ARGUMENT, text)

/* Checks of what private functions take for granted; for tests. */
#ifndef TQKV_ASSERT
#define TQKV_ASSERT(condition) ((void)0)
#endif

#define TQKV__NOINLINE __attribute__((noinline))
#define TQKV__COLD     __attribute__((cold))        /* for size: calls that are rare beside appending and attending */
#define TQKV__ALIGNED  __attribute__((aligned(64))) /* a vector that crosses cache lines is loaded twice */
#define TQKV__INLINE   inline __attribute__((always_inline))
#define TQKV__OP       TQKV__TARGET static TQKV__INLINE   /* a step of a loop, in the current instruction set */
#define TQKV__LOOP     TQKV__TARGET static TQKV__NOINLINE /* a loop there, which is called */
#ifdef __clang__
#define TQKV__UNROLL _Pragma("clang loop unroll(full)")
#define TQKV__ROLLED _Pragma("clang loop unroll(disable)")
#else
#define TQKV__UNROLL _Pragma("GCC unroll 16")
#define TQKV__ROLLED _Pragma("GCC unroll 1")
#endif

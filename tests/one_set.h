/* With `-include`: tqkv.h finds a processor without vector sets, and gcc compiles it in a sixth of the time, without
 * optimisation in a twentieth. For tests of what surrounds tqkv.h. System headers must know the processor: all that a
 * program includes stand here. */
#ifndef TQKV_TESTS_ONE_SET_H
#define TQKV_TESTS_ONE_SET_H

#include <assert.h>
#include <fenv.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

#undef __x86_64__
#undef __aarch64__

#endif

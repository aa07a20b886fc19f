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
#include "gpu/sizes.h"
#include "gpu/numbers.h"
#endif

#ifdef TQKV_IMPLEMENTATION
#define TQKV__NO_PLAN          "plan: NULL"
#define TQKV__NO_CACHE_QUERIES "the cache is NULL or n_queries not positive"
#define TQKV__LARGE_SCRATCH    "more scratch than a size_t can count"

#include "gpu/rows.h"
#include "gpu/split.h"
#include "gpu/list.h"
#include "gpu/attend.h"
#include "gpu/shape.h"
#include "gpu/calls.h"
#include "gpu/batch.h"
#include "gpu/index.h"
#include "gpu/cache.h"
#include "gpu/report.h"

#endif /* TQKV_IMPLEMENTATION */

#ifdef __OBJC__
#include "metal/host.m"
#include "metal/errors.m"
#include "metal/pipelines.m"
#include "metal/recording.m"
#include "metal/memory.m"
#include "metal/caches.m"
#include "metal/waiting.m"
#include "metal/self_test.m"
#include "metal/context.m"
#endif /* __OBJC__ */

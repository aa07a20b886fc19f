/* What plans and shaders share: tables, sizes, argument structs. Only tqkv_metal.m has it otherwise. */
#ifndef TQKV_SHARED
#define TQKV_SHARED
#endif
#include "tqkv.h"
#ifndef TQKV__METAL_SIZES
#define TQKV__METAL_SIZES
#include "src/gpu/sizes.h"
#include "src/gpu/numbers.h"
#endif

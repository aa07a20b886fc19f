/* With the plans of GPU calls where there may be a GPU; CTqkvMetal has the rest of that file, which is in Objective-C. */
#ifdef __APPLE__
#include "../../../tqkv_metal.m"
#else
#define TQKV_IMPLEMENTATION
#include "../../../tqkv.h"
#endif

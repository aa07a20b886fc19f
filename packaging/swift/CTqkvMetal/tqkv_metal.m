/* The Objective-C of the file: the rest is in CTqkv. Linux has no Metal: there the target is empty. */
#if __has_include(<Metal/Metal.h>)
#define TQKV_NO_IMPLEMENTATION
#include "../../../tqkv_metal.m"
#endif

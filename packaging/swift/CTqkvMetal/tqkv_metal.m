/* Linux has no Metal: there the target is empty. */
#if __has_include(<Metal/Metal.h>)
#include "../../../tqkv_metal.m"
#endif

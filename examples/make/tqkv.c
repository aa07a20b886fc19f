/* The one file with the implementation. */
#define TQKV_IMPLEMENTATION
#include "tqkv.h"

/* The implementation, with its reasons for a refused call on stderr. */
#include <stdio.h>
#define TQKV_EXPLAIN(text) fprintf(stderr, "tqkv: %s\n", text)
#define TQKV_IMPLEMENTATION
#include "tqkv.h"

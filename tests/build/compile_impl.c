/* The implementation, after the header was included plainly and twice. */
#include "tqkv.h"
#include "tqkv.h"

#define TQKV_IMPLEMENTATION
#include "tqkv.h"

#ifdef TQKV_STATIC
int main(void) { return tqkv_rotate(NULL, 0, 0, TQKV_ROTATED) == TQKV_OK; }
#endif

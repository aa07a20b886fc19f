/* The implementation, whose reasons for a refused call are said as the backend's own lines. */
void tqkv_llama_explain(const char *text); /* options.cpp */
#define TQKV_EXPLAIN(text) tqkv_llama_explain(text)
#define TQKV_IMPLEMENTATION
#include "tqkv.h"

/* Histories of caches against a model that takes every position alone and keeps it: the fuzzer's text. */
#define LLVMFuzzerTestOneInput run_cache_history
#include "fuzz/fuzz_cache.c"

#include "history.h"

void test_history_cases(void) { history_add(run_cache_history, "cache", 8, 120); }

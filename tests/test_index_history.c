/* Indices at random: the fuzzer's text. */
#define LLVMFuzzerTestOneInput run_index
#include "fuzz/fuzz_index.c"

#include "history.h"

void test_index_history_cases(void) { history_add(run_index, "index", 6, 30); }

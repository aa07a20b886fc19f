/* Histories of caches that learn against one that gets one position after the other: the fuzzer's text. */
#define LLVMFuzzerTestOneInput run_learn_history
#include "fuzz/fuzz_learn.c"

#include "history.h"

void test_learn_history_cases(void) { history_add(run_learn_history, "learn", 8, 30); }

/* Histories of caches that learn against one that gets one position after the other: the fuzzer's text. */
#define LLVMFuzzerTestOneInput run_learn_history
#include "fuzz/fuzz_learn.c"

#include "history.h"

void test_learn_history_cases(void)
{
    enum { CASES = 8, SEEDS = 30 };
    for (int i = 0; i < CASES; i++) {
        const history_row row = {run_learn_history, i * SEEDS, SEEDS};
        test_add(check_history, &row, sizeof row, "history/learn/%d", i);
    }
}

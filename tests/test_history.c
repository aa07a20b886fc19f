/* Histories of caches against a model that keeps every position and attends in double precision: the fuzzer's text. */
#define LLVMFuzzerTestOneInput run_cache_history
#include "fuzz/fuzz_cache.c"

#include "history.h"

void test_history_cases(void)
{
    enum { CASES = 8, SEEDS = 100 };
    for (int i = 0; i < CASES; i++) {
        const history_row row = {run_cache_history, i * SEEDS, SEEDS};
        test_add(check_history, &row, sizeof row, "history/cache/%d", i);
    }
}

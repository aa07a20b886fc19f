/* Attentions at random: the fuzzer's text. */
#define LLVMFuzzerTestOneInput run_attention
#include "fuzz/fuzz_attend.c"

#include "history.h"

void test_attend_history_cases(void)
{
    enum { CASES = 10, SEEDS = 100, FEW = 20 };
    const history_row few = {run_attention, -FEW, FEW}; /* for emulators */
    test_add(check_history, &few, sizeof few, "history/attend/few");
    for (int i = 0; i < CASES; i++) {
        const history_row row = {run_attention, i * SEEDS, SEEDS};
        test_add(check_history, &row, sizeof row, "history/attend/%d", i);
    }
}

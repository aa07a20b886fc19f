/* Attentions at random: the fuzzer's text. */
#define LLVMFuzzerTestOneInput run_attention
#include "fuzz/fuzz_attend.c"

#include "history.h"

void test_attend_history_cases(void)
{
    enum { FEW = 20 };
    const history_row few = {run_attention, -FEW, FEW}; /* for emulators */
    test_add(check_history, &few, sizeof few, "history/attend/few");
    history_add(run_attention, "attend", 10, 100);
}

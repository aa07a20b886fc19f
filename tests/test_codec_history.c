/* Rows of any bits in any shape: the fuzzer's text. */
#define LLVMFuzzerTestOneInput run_codec
#include "fuzz/fuzz_codec.c"

#include "history.h"

void test_codec_history_cases(void)
{
    enum { CASES = 8, SEEDS = 100 };
    for (int i = 0; i < CASES; i++) {
        const history_row row = {run_codec, i * SEEDS, SEEDS};
        test_add(check_history, &row, sizeof row, "history/codec/%d", i);
    }
}

/* Rows of any bits in any shape: the fuzzer's text. */
#define LLVMFuzzerTestOneInput run_codec
#include "fuzz/fuzz_codec.c"

#include "history.h"

void test_codec_history_cases(void) { history_add(run_codec, "codec", 8, 100); }

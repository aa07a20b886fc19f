/* Snapshots of caches and stores at random: the fuzzer's text. */
#define LLVMFuzzerTestOneInput run_snapshot
#include "fuzz/fuzz_snapshot.c"

#include "history.h"

void test_snapshot_history_cases(void) { history_add(run_snapshot, "snapshot", 8, 1000); }

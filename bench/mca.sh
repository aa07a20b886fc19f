#!/bin/sh
# Predicts the speed of attention's inner loops on an Apple core: llvm-mca's model of the core reads clang's NEON code.
# Usage: mca.sh INCLUDE-FOLDER WORK-FOLDER, from the top folder. INCLUDE-FOLDER holds xxhash.h.
include=$1
work=$2
core=apple-m1
kernels="score_TQKV_TQ4 score_TQKV_TQ6 score_TQKV_I8 score_TQKV_F16 accumulate_TQKV_TQ4 accumulate_TQKV_TQ6 accumulate_TQKV_I8
    accumulate_TQKV_F16"
mca=
for name in llvm-mca llvm-mca-19 llvm-mca-18 llvm-mca-17 llvm-mca-16 llvm-mca-15 llvm-mca-14; do
    if command -v $name >/dev/null; then mca=$name && break; fi
done
if [ -z "$mca" ] || ! command -v clang >/dev/null || [ ! -d /usr/aarch64-linux-gnu ]; then
    echo "bench-mca needs Linux with clang, llvm-mca and the aarch64 C library (Debian: clang llvm libc6-dev-arm64-cross)"
    exit 1
fi
mkdir -p "$work"
printf '#define TQKV_IMPLEMENTATION\n#include "tqkv.h"\n' |
    clang --target=aarch64-linux-gnu -O2 -mcpu=$core -Isrc -isystem "$include" -x c -S -o "$work/tqkv.s" - || exit 1

echo "$(clang --version | head -n 1); $mca -mcpu=$core"
printf '%-22s %5s %7s %13s %8s %16s %15s\n' "loop" "rows" "values" "instructions" "cycles" "values a cycle" "fmla a cycle"
for kernel in $kernels; do
    loops=$(awk -v function_name="tqkv__${kernel}_neon" -v prefix="$work/$kernel" -f bench/mca.awk "$work/tqkv.s")
    if [ -z "$loops" ]; then
        echo "bench-mca: no loop found in tqkv__${kernel}_neon" >&2
        exit 1
    fi
    rows=1 # the loops for 1, 2 and 4 query rows stand in this order; the last may come in parts
    for loop in $loops; do
        $mca -march=aarch64 -mcpu=$core -iterations=200 "$loop" >"$work/report" || exit 1
        awk -v kernel="$kernel" -v rows=$rows -v fmla="$(grep -c fmla "$loop")" '
            /^Instructions:/ { instructions = $2 / 200 }
            /^Total Cycles:/ { cycles = $3 / 200 }
            END {
                values = 4 * fmla / rows
                printf "%-22s %5d %7d %13d %8.1f %16.1f %15.2f\n", kernel, rows, values, instructions, cycles,
                       values / cycles, fmla / cycles
            }' "$work/report"
        rows=$((rows < 4 ? rows * 2 : 4))
    done
done

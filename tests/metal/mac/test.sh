#!/bin/sh
# report.sh over the stand-in: test.sh HOST_BUILD LIBRARY. It must compare, and notice a library that is refused.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export REPORT_OPTIONS=--quick REPORT_CASES=rotate/d64 STANDIN_COMPILED="$2"
failed() { cat "$1"; echo "0 passed, 1 failed"; exit 1; }

sh tests/metal/mac/report.sh "$1" none "$2" metallib/tqkv.metal >"$folder/good" 2>&1 || failed "$folder/good"
grep -q 'metallib/tqkv.metal: *2 results, *0 with other bits' "$folder/good" || failed "$folder/good"
head -c 1000 "$2" >"$folder/short.metallib"
sh tests/metal/mac/report.sh "$1" none "$folder/short.metallib" metallib/tqkv.metal >"$folder/bad" 2>&1 && failed "$folder/bad"
grep -q 'NOT AS EXPECTED' "$folder/bad" && grep -q 'truncated' "$folder/bad" || failed "$folder/bad"
echo "2 passed, 0 failed"

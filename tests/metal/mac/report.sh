#!/bin/sh
# The report of a Mac: report.sh HOST_BUILD DRIVER LIBRARY SOURCE [LIBRARY_BY_XCRUN]
# For each library and the source: every pipeline built, every kernel compared with the processor, times; for libraries
# the shader tests and the host's tests. Then which results have other bits than those of the first.
# Status 1 if the library in the box is refused, or anything is wrong.
host=$1 driver=$2
shift 2
status=0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

echo "tqkv $(git describe --always --dirty 2>/dev/null)"
sw_vers 2>/dev/null || uname -a
sysctl -n machdep.cpu.brand_string hw.model 2>/dev/null
system_profiler SPDisplaysDataType 2>/dev/null | grep -E 'Chipset|Cores|Metal'
clang --version | head -n 1
echo "Metal compiler: $(xcrun metal --version 2>/dev/null | head -n 1)"

n=0
for library in "$@"; do
    n=$((n + 1))
    echo "== $library: every kernel, compared with the processor"
    "$host/report" "$library" ${REPORT_OPTIONS:---time} >"$folder/$n" 2>&1 || { echo "NOT AS EXPECTED"; status=1; }
    grep -v '^result .* ok' "$folder/$n"
    grep '^result' "$folder/$n" | cut -d' ' -f2,3 | sort >"$folder/$n.bits"
    case $library in *.metal) continue ;; esac
    if [ -x "$driver" ]; then
        echo "== $library: shader tests"
        "$driver" --device "$library" 2>&1 | tail -n 40
    fi
    echo "== $library: tests of tqkv_metal.m"
    "$host/runner" --library "$library" $REPORT_CASES 2>&1 | tail -n 40
done

i=1
for library in "$@"; do
    echo "$library: $(wc -l <"$folder/$i.bits") results, $(comm -13 "$folder/1.bits" "$folder/$i.bits" | wc -l) with other bits than $1"
    comm -13 "$folder/1.bits" "$folder/$i.bits" | head -n 20
    i=$((i + 1))
done
exit $status

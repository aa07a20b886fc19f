#!/bin/sh
# The report of a Mac: report.sh BUILD FILE LIBRARY SOURCE. Writes what it prints to FILE, too.
# BUILD: the folder of programs. LIBRARY: the one in the box. SOURCE: all shaders in one file. Environment: MAKE builds the
# programs and, where Xcode's Metal compiler works, a library by it (XCRUN_LIBRARY). FULL=1: every pair of formats and every
# test, which takes hours. REPORT_LIMIT: seconds after which a step is ended, 300, with FULL=1 ten hours. For the test of
# this file: REPORT_CASES and REPORT_SPEED in place of the programs' options.
# What is wanted most comes first: which kernels Metal takes, then whether they are right, then how fast they are. A step that
# fails is a line of text. Status 1 if one did.
build=$1 file=$2 library=$3 source=$4

if [ -z "$REPORT_INSIDE" ]; then
    mkdir -p "$(dirname "$file")"
    { REPORT_INSIDE=1 sh "$0" "$@"; echo "$?" >"$file.status"; } 2>&1 | tee "$file"
    status=$(cat "$file.status")
    rm -f "$file.status"
    echo "The report is $file: please send it."
    exit "$status"
fi

status=0
[ -n "$FULL" ] && REPORT_LIMIT=${REPORT_LIMIT:-36000}
# Some 230 pipelines and 20, of every head_dim, format and family, and of 64; all cases but those of a library.
usual=${REPORT_CASES:-rotate/ encode/tq4/ /d128/0 attend/divided attend/shape}
few=${REPORT_CASES:-encode/tq4/d64/0 attend/divided/d64/0 attend/shape}
[ -n "$FULL" ] && usual='' few=-context/
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
touch "$folder/begin"

title() { echo "== $*"; }

failed() { # what
    echo "NOT AS EXPECTED: $*"
    status=1
}

made() { # target
    ${MAKE:-make} -s "$1" >"$folder/make" 2>&1 && return
    failed "$1 was not built:"
    tail -n 20 "$folder/make"
    return 1
}

# A Mac has no timeout(1). Virtual GPUs have hung.
limited() { perl -e 'alarm shift; exec @ARGV or exit 127' "${REPORT_LIMIT:-300}" "$@"; }

run() { # program and arguments: its lines appear as they come
    rm -f "$folder/status"
    { limited "$@" 2>&1; echo "$?" >"$folder/status"; } | tee "$folder/lines"
    code=$(cat "$folder/status")
    [ "$code" = 0 ] || failed "$* ended with status $code"
}

kept() { # library or source, name, cases: run, and the bits of what they computed
    run "$build/mac/runner" --library "$1" --bits $3
    sed -n 's/^result //p' "$folder/lines" | sort >"$folder/$2.bits"
}

title machine
echo "tqkv $(git describe --always --dirty 2>/dev/null)"
sw_vers 2>/dev/null || uname -a
sysctl -n machdep.cpu.brand_string hw.model hw.memsize 2>/dev/null
system_profiler SPDisplaysDataType 2>/dev/null | grep -E 'Chipset|Cores|Metal'
clang --version | head -n 1
echo "developer tools: $(xcode-select -p 2>/dev/null || echo none)"
# A fresh Xcode 26 has a program of this name that only says what to download.
if xcrun --sdk macosx metal --version >"$folder/metal" 2>&1; then has_metal=yes; else has_metal=; fi
echo "Metal compiler: $(head -n 1 "$folder/metal")"

title "each pipeline of $library alone"
made "$build/mac/pipelines" && run "$build/mac/pipelines" "$library"
title 'reports of crashes of the Metal compiler since'
find "$HOME/Library/Logs/DiagnosticReports" /Library/Logs/DiagnosticReports -name 'MTLCompilerService*' \
    -newer "$folder/begin" 2>/dev/null

title "$library, compared with the processor"
made "$build/mac/runner" && kept "$library" box "$usual"
title "$library, under Metal's validation"
run env MTL_DEBUG_LAYER=1 MTL_SHADER_VALIDATION=1 "$build/mac/runner" --library "$library" $few
title "speed of $library"
made "$build/mac/speed" && run "$build/mac/speed" "$library" $REPORT_SPEED
title 'look-ups of codes'
made "$build/mac/lookup" && run "$build/mac/lookup" "$build/mac/lookup.metal" $REPORT_SPEED

title "$source, compiled by the system"
kept "$source" source "$few"
if [ -n "$has_metal" ] && [ -n "$XCRUN_LIBRARY" ] && made "$XCRUN_LIBRARY"; then
    title "$XCRUN_LIBRARY, by Xcode's compiler"
    kept "$XCRUN_LIBRARY" xcrun "$usual"
fi
for other in source xcrun; do
    [ -f "$folder/$other.bits" ] || continue
    echo "$other: $(wc -l <"$folder/$other.bits") results, $(comm -13 "$folder/box.bits" "$folder/$other.bits" | wc -l) with other bits than $library"
    comm -13 "$folder/box.bits" "$folder/$other.bits" | head -n 20
done
if [ -z "$FULL" ]; then
    title 'more tests of tqkv_metal.m and of the shaders'
    run "$build/mac/runner" --library "$library" ${REPORT_CASES:-cache/ context/ refusals/ attend/ batch/ index/ encode/ golden/tq4/ golden/i8/}
fi

title "$(if [ "$status" = 0 ]; then echo 'all as expected'; else echo 'not all as expected:'; fi)"
exit "$status"

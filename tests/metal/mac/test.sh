#!/bin/sh
# report.sh over the stand-in, as on Macs of several kinds: test.sh HOST_BUILD LIBRARY. The Mac's commands are stubs. The report
# must go through without Xcode's Metal compiler, with it, and where Xcode 26 lacks its toolchain; it must compare, and notice
# what does not build and a library that is refused. Then make reads its rules for a Mac.
build=$1 library=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export REPORT_CASES='rotate/d64 attend/shape/group8_queries1' REPORT_SPEED=--tiny STANDIN_COMPILED="$library" STANDIN_APPLE5=1
export XCRUN_LIBRARY="$folder/xcrun.metallib" HOME="$folder"
passed=0

mkdir "$folder/bin"
stub() { printf '#!/bin/sh\n%s\n' "$2" >"$folder/bin/$1"; chmod +x "$folder/bin/$1"; }
stub uname 'case $1 in -m) echo arm64 ;; *) echo Darwin ;; esac'
stub sw_vers 'echo "ProductVersion: 26.0"'
stub brew 'exit 127'
stub xcode-select 'echo /Library/Developer/CommandLineTools'
stub xcrun 'case $XCODE:$* in
    none:*) echo "xcrun: error: unable to find utility \"metal\", not a developer tool or in PATH" >&2; exit 72 ;;
    26:*--find*) echo /Applications/Xcode.app/Contents/Developer/usr/bin/metal ;;
    26:*) echo "error: cannot execute tool metal due to missing Metal Toolchain" >&2; exit 1 ;;
    *--version*) echo "Apple metal version 32023.830" ;;
esac'
stub make 'case $2 in
    *"$UNMADE"*) echo "clang: error"; exit 1 ;;
    *xcrun.metallib) cp "$STANDIN_COMPILED" "$XCRUN_LIBRARY" ;;
esac'
MAKE="$folder/bin/make"
PATH="$folder/bin:$PATH"
export MAKE PATH UNMADE=nothing XCODE

report() { sh tests/metal/mac/report.sh "$build" "$folder/report.txt" "$1" metallib/tqkv.metal >"$folder/printed" 2>&1; }
failed() { echo "$1:"; cat "$folder/report.txt"; echo "$passed passed, 1 failed"; exit 1; }
said() { grep -q "$2" "$folder/report.txt" || failed "$1: no '$2'"; }
unsaid() { ! grep -q "$2" "$folder/report.txt" || failed "$1: '$2'"; }

for XCODE in none 16 26 26-toolchain; do
    report "$library" || failed "Xcode $XCODE"
    cmp -s "$folder/printed" "$folder/report.txt" || grep -qv '^The report is' "$folder/printed" || failed "the terminal"
    said "Xcode $XCODE" '^pipeline tqkv_attend_matrix_d128, i8/tq4, 16 columns: ok'
    said "Xcode $XCODE" '^result attend/shape/group8_queries1 '
    said "Xcode $XCODE" '^2 passed, 0 failed'
    said "Xcode $XCODE" '^self-test of d64, group 1: ok'
    said "Xcode $XCODE" '^token 64/8 of 64, tq4/tq4'
    said "Xcode $XCODE" '^only reading: not measured'
    said "Xcode $XCODE" '^look-up'
    said "Xcode $XCODE" '^source: *2 results, *0 with other bits'
    said "Xcode $XCODE" 'all as expected'
    case $XCODE in
        16 | 26-toolchain) said "Xcode $XCODE" '^xcrun: *2 results, *0 with other bits' ;;
        *) unsaid "Xcode $XCODE" '^xcrun: *2' ;;
    esac
    passed=$((passed + 1))
done

UNMADE=speed
report "$library" && failed 'a program that does not build'
said unbuilt 'speed was not built'
said unbuilt '^source: *2 results'
UNMADE=nothing
REPORT_LIMIT=1 && export REPORT_LIMIT
mkdir -p "$folder/slow/mac" && printf '#!/bin/sh\nexec sleep 30\n' >"$folder/slow/mac/runner" && chmod +x "$folder/slow/mac/runner"
(build="$folder/slow" && report "$library") && failed 'a program that hangs'
said hangs 'mac/runner .* ended with status'
unset REPORT_LIMIT
passed=$((passed + 1))
head -c 1000 "$library" >"$folder/short.metallib"
report "$folder/short.metallib" && failed 'a refused library'
said refused '^library .*short.metallib: FAILED: the library is truncated'
said refused 'not all as expected'
passed=$((passed + 2))

unset MAKE MAKEFLAGS MFLAGS MAKELEVEL
rm "$folder/bin/make"
XCODE=26
make -n mac-report demo-metal test-metal metallib >"$folder/report.txt" 2>&1 || failed 'the rules for a Mac'
said make 'report.sh'
unsaid make 'xcrun --sdk macosx metal -std'
said make 'isystem packaging/swift/CTqkv/xxhash'
echo "$((passed + 1)) passed, 0 failed"

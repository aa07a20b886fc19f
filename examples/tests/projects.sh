#!/bin/sh
# Builds and runs the example projects as their users would. Usage: projects.sh FOLDER, from the top folder.
out=$1
passed=0
failed=0

# check NAME COMMAND...: passes when the command succeeds; shows its output when not
check() {
    name=$1
    shift
    if "$@" >"$out/log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $name"
        cat "$out/log"
    fi
}

mkdir -p "$out"
check "cmake configures" cmake -S examples/cmake -B "$out/cmake"
check "cmake builds" cmake --build "$out/cmake"
check "cmake program runs" "$out/cmake/sliding_window"
check "make builds and runs" env MAKEFLAGS= make -C examples/make OUT="$out/make" run
echo "$passed passed, $failed failed"
test "$failed" -eq 0

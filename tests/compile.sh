#!/bin/sh
# Compiles the header as its users do: compile.sh FOLDER, with CPPFLAGS and WARNINGS set. Prints 'N passed, N failed'.
folder=$1
mkdir -p "$folder"
passed=0
failed=0

# report NAME STATUS: counts one case
report() {
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL compile/$1"
        cat "$folder/log"
    fi
}

# accepts NAME COMMAND...: the command must succeed
accepts() {
    name=$1
    shift
    "$@" >"$folder/log" 2>&1
    report "$name" $?
}

# refuses NAME TEXT COMMAND...: the command must fail with the text
refuses() {
    name=$1
    text=$2
    shift 2
    "$@" >"$folder/log" 2>&1
    status=$?
    test $status -ne 0 && grep -q -e "$text" "$folder/log"
    report "$name" $?
}

# in_language COMPILER STANDARD: one and two translation units, and TQKV_STATIC
in_language() {
    compiler=$1
    standard=$2
    case $standard in c++*) language=c++ ;; *) language=c ;; esac
    compile="$compiler -x $language -std=$standard -O1 $WARNINGS $CPPFLAGS -I."
    tag=$compiler-$standard
    accepts "$tag/implementation" $compile -c tests/compile_impl.c -o "$folder/$tag-impl.o"
    for level in -O0 -O3; do # intrinsics are macros in one and inlined in the other: other warnings
        accepts "$tag/implementation$level" $compile $level -c tests/compile_impl.c -o "$folder/$tag-level.o"
    done
    accepts "$tag/user" $compile -c tests/compile_user.c -o "$folder/$tag-user.o"
    accepts "$tag/link" "$compiler" "$folder/$tag-impl.o" "$folder/$tag-user.o" -o "$folder/$tag" -lm
    accepts "$tag/run" "$folder/$tag"
    accepts "$tag/static" $compile -DTQKV_STATIC tests/compile_impl.c -o "$folder/$tag-static" -lm
    accepts "$tag/static-run" "$folder/$tag-static"
    for flag in -ffast-math -ffinite-math-only; do
        refuses "$tag/refuses$flag" 'error:.*fast-math' $compile $flag -c tests/compile_impl.c -o "$folder/refused.o"
        accepts "$tag/allows$flag" $compile $flag -DTQKV_ALLOW_FAST_MATH -c tests/compile_impl.c -o "$folder/allowed.o"
    done
}

for compiler in gcc clang; do
    in_language $compiler c99
    in_language $compiler c11
done
in_language g++ c++11
in_language clang++ c++11
# Private means private: a second program may hold its own static copy beside the extern one.
nm "$folder/gcc-c99-static" | grep -q ' T tqkv_' && status=1 || status=0
echo "TQKV_STATIC leaves public symbols" >"$folder/log"
report static-symbols $status

echo "$passed passed, $failed failed"
test "$failed" -eq 0

#!/bin/sh
# Compiles the header as its users do: compile.sh FOLDER, with CPPFLAGS and WARNINGS set. Prints 'N passed, N failed'.
folder=$1
mkdir -p "$folder"
. tests/build/report.sh

# The runners compile the vector sets in each language and at each level of optimisation.
one_set=-DTQKV_NO_AVX2

# in_language COMPILER STANDARD: one and two translation units
in_language() {
    compiler=$1
    standard=$2
    case $standard in c++*) language=c++ ;; *) language=c ;; esac
    compile="$compiler -x $language -std=$standard $WARNINGS $CPPFLAGS -I. $one_set"
    tag=$compiler-$standard
    accepts "$tag/implementation" $compile -c tests/build/compile_impl.c -o "$folder/$tag-impl.o"
    accepts "$tag/user" $compile -c tests/build/compile_user.c -o "$folder/$tag-user.o"
    accepts "$tag/metal_user" $compile -DTQKV_METAL -fsyntax-only tests/build/compile_user.c
    accepts "$tag/link" "$compiler" "$folder/$tag-impl.o" "$folder/$tag-user.o" -o "$folder/$tag" -lm
    accepts "$tag/run" "$folder/$tag"
    for flag in -ffast-math -ffinite-math-only; do
        refuses "$tag/refuses$flag" 'error:.*fast-math' $compile $flag -Wfatal-errors -fsyntax-only tests/build/compile_impl.c
    done
    accepts "$tag/allows-ffast-math" $compile -ffast-math -DTQKV_ALLOW_FAST_MATH -fsyntax-only tests/build/compile_impl.c
}

for compiler in gcc clang; do
    in_language $compiler c99
    accepts "$compiler-c11" $compiler -std=c11 $WARNINGS $CPPFLAGS -I. -fsyntax-only tests/build/compile_impl.c
    # The declarations alone. clang reports the bool of stdbool.h as an extension.
    accepts "$compiler-c89/user" $compiler -std=c89 $WARNINGS -Wno-c99-extensions -I. -fsyntax-only tests/build/compile_user.c
done
in_language g++ c++11
in_language clang++ c++11
accepts gcc-c99/static-sets gcc -std=c99 $WARNINGS $CPPFLAGS -I. -DTQKV_STATIC -fsyntax-only tests/build/compile_impl.c
accepts gcc-c99/static gcc -std=c99 -Og $one_set $WARNINGS $CPPFLAGS -I. -DTQKV_STATIC tests/build/compile_impl.c -o "$folder/static" -lm
accepts gcc-c99/static-run "$folder/static"
# Flags that change the order of sums, of which clang says nothing to the preprocessor, change no stored byte. Sets may be left
# out: the programs say which one they use. TQKV_STATIC leaves what they do not call, attention, to no optimiser.
bytes() { "$folder/$1" >"$folder/$1.txt" 2>"$folder/log"; }
accepts bytes/plain gcc -std=c99 -O2 -DTQKV_STATIC $one_set $WARNINGS $CPPFLAGS -I. tests/build/compile_bytes.c -o "$folder/bytes" -lm
bytes bytes && grep -qx 'scalar\|neon' "$folder/log"
report sets/no-avx2 $?
accepts bytes/reordered clang -std=c99 -O1 -DTQKV_STATIC -DTQKV_NO_AVX512 -fassociative-math -freciprocal-math -fno-signed-zeros -fno-trapping-math \
    $WARNINGS $CPPFLAGS -I. tests/build/compile_bytes.c -o "$folder/bytes-reordered" -lm
bytes bytes-reordered && grep -qx 'avx2\|scalar\|neon' "$folder/log"
report sets/no-avx512 $?
accepts bytes/equal cmp "$folder/bytes.txt" "$folder/bytes-reordered.txt"

# With what only a GPU needs, and without. clang compiles no sets where it does not optimise; gcc optimises them.
# sets NAME SETS COMMAND...: the compiled program finds one of the sets
sets() {
    name=$1
    expected=$2
    shift 2
    accepts "sets/$name" "$@" $WARNINGS $CPPFLAGS -I. tests/build/compile_sets.c -o "$folder/sets" -lm
    "$folder/sets" >"$folder/log" 2>&1 && grep -qx "$expected" "$folder/log"
    report "sets/$name/run" $?
}
sets metal 'scalar\|neon' gcc -std=c99 -O0 -DTQKV_NO_AVX2 -DTQKV_METAL

# tqkv_metal.m without Objective-C: the plans, alone or beside another implementation.
for metal in "gcc -x c -std=c99" "clang -x c -std=c11" "g++ -x c++ -std=c++11"; do
    accepts "metal/$metal" $metal $WARNINGS $CPPFLAGS -I. -DTQKV_NO_AVX2 -c tqkv_metal.m -o "$folder/metal.o"
done
if nm -g "$folder/metal.o" | grep 'tqkv__' >"$folder/log"; then status=1; else status=0; fi
report metal/private-symbols $status
accepts metal/static gcc -x c -std=c99 $WARNINGS $CPPFLAGS -I. -DTQKV_NO_AVX2 -DTQKV_STATIC -c tqkv_metal.m -o "$folder/metal.o"
accepts metal/static-link gcc "$folder/gcc-c99-impl.o" "$folder/gcc-c99-user.o" "$folder/metal.o" -o "$folder/metal" -lm
sets clang-O0 scalar clang -std=c99 -O0

# The interface of an object is what the API declares.
if nm -g "$folder/gcc-c99-impl.o" | grep 'tqkv__' >"$folder/log"; then status=1; else status=0; fi
report private-symbols $status

# Memory comes from the caller's allocator: of the C library's functions only the malloc of the default one allocates, and no
# other than these is called. Names with two underscores are the compiler's.
nm -u "$folder/gcc-c99-impl.o" | sed 's/^ *\(U *\)\{0,1\}_\{0,1\}//' | grep -v '^_' >"$folder/symbols"
if grep -vxE 'malloc|free|mem(cmp|cpy|move|set)|strcmp|getenv|sched_yield|(copysign|exp|fabs|fma|sqrt|tanh)f?' \
    "$folder/symbols" >"$folder/log"; then status=1; else status=0; fi
report library-symbols $status

# A shared library that hides what TQKV_API does not show.
accepts shared/library gcc -std=c99 $one_set $WARNINGS $CPPFLAGS -I. -fPIC -shared -fvisibility=hidden \
    '-DTQKV_API=__attribute__((visibility("default")))' tests/build/compile_impl.c -o "$folder/libtqkv.so" -lm
nm -g "$folder/libtqkv.so" | grep ' T ' >"$folder/log"
grep -q ' T _*tqkv_cache_create$' "$folder/log" && ! grep -v ' T _*tqkv_[a-z]' "$folder/log"
report shared/symbols $?

# Private means private: a second program may hold its own static copy beside the extern one.
nm "$folder/static" | grep -q ' T tqkv_' && status=1 || status=0
echo "TQKV_STATIC leaves public symbols" >"$folder/log"
report static-symbols $status

# xxhash.h: one beside tqkv.h comes first, the user's options of it stay, and an old one is named.
xxhash=$(echo '#include <xxhash.h>' | gcc $CPPFLAGS -M -x c - | tr ' ' '\n' | grep '/xxhash\.h$')
mkdir -p "$folder/beside" "$folder/old"
cp tqkv.h "$folder/beside"
{ cat "$xxhash" && echo '#define BESIDE'; } >"$folder/beside/xxhash.h"
cat >"$folder/beside.c" <<'END'
#define TQKV_IMPLEMENTATION
#include "beside/tqkv.h"
#ifndef BESIDE
#error "another xxhash.h"
#endif
END
cat >"$folder/old/xxhash.h" <<'END'
#define XXH_VERSION_MAJOR 0
#define XXH_VERSION_MINOR 7
#define XXH_VERSION_RELEASE 4
#define XXH_VERSION_NUMBER 704
END
check="gcc -std=c99 -fsyntax-only -Wfatal-errors $one_set -I."
accepts xxhash/beside gcc -std=c99 -fsyntax-only $one_set "$folder/beside.c"
accepts xxhash/options $check $WARNINGS $CPPFLAGS -DXXH_INLINE_ALL -DXXH_NO_INLINE_HINTS=0 tests/build/compile_impl.c
refuses xxhash/old 'error:.*too old.*0\.8\.0.*libxxhash-dev.*Homebrew xxhash' $check -I"$folder/old" tests/build/compile_impl.c
refuses xxhash/old-version 'found xxhash.h 0\.7\.4' $check -I"$folder/old" tests/build/compile_impl.c

# Before the include, in this file or another one: what leaves the implementation without the functions that it needs.
for missing in XXH_NO_XXH3 XXH_NO_LONG_LONG; do
    refuses xxhash/$missing "error:.*xxhash\.h.*$missing" $check $CPPFLAGS -D$missing -include xxhash.h tests/build/compile_impl.c
done

# Flags of this file alone would give its structs and enums another layout than those of its callers.
for flag in -fshort-enums -fpack-struct; do
    refuses layout/$flag 'error:.*compiled_with_fshort_enums_or_fpack_struct' $check $CPPFLAGS $flag tests/build/compile_impl.c
done

# Names that other headers define as macros. POSIX is for sched.h.
for compiler in "gcc -std=c99" "clang -std=c99" "g++ -x c++ -std=c++11"; do
    accepts "macros/${compiler%% *}" $compiler -D_POSIX_C_SOURCE=200809L $CPPFLAGS -I. -fsyntax-only tests/build/compile_macros.c
done

refuses msvc 'error:.*MSVC.*clang-cl.*MinGW' $check $CPPFLAGS -D_MSC_VER=1930 tests/build/compile_impl.c

# Another libc and another system. Their compilers do not find the xxhash.h of this one.
if [ "$(uname -s)" = Linux ]; then
    accepts g++-c++11/useless-cast g++ -x c++ -std=c++11 $WARNINGS -Wuseless-cast -I. -fsyntax-only tests/build/compile_impl.c

    mkdir -p "$folder/xxhash"
    cp "$xxhash" "$folder/xxhash"
    options="-std=c99 $WARNINGS -isystem $folder/xxhash -I. tests/build/compile_impl.c"
    accepts musl/sets musl-gcc $options -fsyntax-only
    accepts musl/link musl-gcc $options $one_set tests/build/compile_user.c -lm -o "$folder/musl"
    accepts musl/run "$folder/musl"

    # gcc's AVX code for Windows is left out unless asked for.
    mingw=x86_64-w64-mingw32-gcc
    if command -v $mingw >/dev/null; then
        for sets in '' $one_set -DTQKV_WINDOWS_AVX; do
            accepts mingw/sets$sets $mingw $options $sets -fsyntax-only
            grep -q 'message:.*without AVX, see TQKV_WINDOWS_AVX' "$folder/log" && said=' said' || said=
            test "$sets$said" = ' said' || test -n "$sets" -a -z "$said"
            report mingw/message$sets $?
        done
        accepts mingw/link $mingw $options tests/build/compile_user.c -o "$folder/mingw.exe"
        if command -v wine >/dev/null; then accepts mingw/run wine "$folder/mingw.exe"; fi
        # clang-cl also defines _MSC_VER; these are MinGW's headers, which it can preprocess but not parse.
        accepts clang-cl clang --target=x86_64-pc-windows-msvc -O2 -isystem /usr/x86_64-w64-mingw32/include \
            -isystem "$folder/xxhash" -I. -E tests/build/compile_impl.c -o "$folder/clang-cl.i"
        grep -q 'tqkv__x86_present' "$folder/clang-cl.i" && ! grep -q '__builtin_cpu_' "$folder/clang-cl.i"
        report clang-cl/sets $?
    else
        echo "skipped: no gcc for Windows, make deps-more installs it"
    fi

    # All parts of fast math, and the bytes of the run above, on arm64.
    accepts bytes/arm64 clang --target=aarch64-linux-gnu -std=c99 -O2 -DTQKV_STATIC -funsafe-math-optimizations \
        $WARNINGS -isystem "$folder/xxhash" -I. tests/build/compile_bytes.c -o "$folder/bytes-arm64" -lm
    qemu-aarch64 -L /usr/aarch64-linux-gnu "$folder/bytes-arm64" >"$folder/bytes-arm64.txt" 2>"$folder/log"
    accepts bytes/arm64-equal cmp "$folder/bytes.txt" "$folder/bytes-arm64.txt"

    refuses xxhash/missing 'error:.*0\.8\.0.*missing.*libxxhash-dev.*Homebrew xxhash.*beside tqkv\.h' \
        musl-gcc -std=c99 -fsyntax-only -Wfatal-errors -I. tests/build/compile_impl.c
fi

finish

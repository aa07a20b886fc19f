#!/bin/sh
# Builds for other systems by zig cc, and runs what this machine can: zig.sh FOLDER ZIG SET, with WARNINGS set. SET: the set that
# gcc's build chooses here. Prints 'N passed, N failed'.
folder=$1
zig=$2
best=$3
mkdir -p "$folder"
. tests/build/report.sh

export ZIG_GLOBAL_CACHE_DIR="$folder/cache" ZIG_LOCAL_CACHE_DIR="$folder/cache"
mkdir -p "$folder/xxhash"
cp "$(echo '#include <xxhash.h>' | cc -M -x c - | tr ' ' '\n' | grep '/xxhash\.h$')" "$folder/xxhash"

# build TARGET PROGRAM OPTION...: folder/PROGRAM-TARGET
build() {
    target=$1
    program=$2
    shift 2
    accepts "$target/$program" "$zig" cc -target "$target" -std=c99 -O2 $WARNINGS -isystem "$folder/xxhash" -I. \
        "tests/build/compile_$program.c" "$@" -o "$folder/$program-$target"
}
# runs TARGET PROGRAM SETS COMMAND...: the program ends well, and its last line names one of the sets
runs() {
    name=$1/$2/run
    output=$folder/$2-$1.txt
    sets=$3
    shift 3
    if ! command -v "$1" >/dev/null; then
        echo "skipped: $name, no $1"
        return
    fi
    "$@" >"$output" 2>"$folder/log" && cat "$output" "$folder/log" | tr -d '\r' | tail -1 | grep -qx "$sets"
    report "$name" $?
}
# The bytes of codes and norms are those of the first system.
same_bytes() {
    tr -d '\r' <"$folder/bytes-$1.txt" | cmp - "$folder/bytes-x86_64-linux-gnu.txt" >"$folder/log" 2>&1
    report "$1/bytes" $?
}

case $best in avx512) narrower=avx2 ;; *) narrower=$best ;; esac
one_set=-DTQKV_NO_AVX2

build x86_64-linux-gnu sets -lm
runs x86_64-linux-gnu sets "$best" "$folder/sets-x86_64-linux-gnu"
build x86_64-linux-gnu bytes -DTQKV_STATIC $one_set -lm
runs x86_64-linux-gnu bytes scalar "$folder/bytes-x86_64-linux-gnu"

build x86_64-linux-musl sets -DTQKV_NO_AVX512 -lm
runs x86_64-linux-musl sets "$narrower" "$folder/sets-x86_64-linux-musl"

build x86_64-windows-gnu sets -DTQKV_NO_AVX512
runs x86_64-windows-gnu sets "$narrower" wine "$folder/sets-x86_64-windows-gnu"

build riscv64-linux-musl sets -lm
runs riscv64-linux-musl sets scalar qemu-riscv64 "$folder/sets-riscv64-linux-musl"
build riscv64-linux-musl bytes -DTQKV_STATIC -lm
runs riscv64-linux-musl bytes scalar qemu-riscv64 "$folder/bytes-riscv64-linux-musl" && same_bytes riscv64-linux-musl

cat >"$folder/wasi.mjs" <<'END'
import { readFile } from "node:fs/promises";
import { WASI } from "node:wasi";
const wasi = new WASI({ version: "preview1", returnOnExit: true });
const module = await WebAssembly.compile(await readFile(process.argv[2]));
process.exitCode = wasi.start(await WebAssembly.instantiate(module, wasi.getImportObject()));
END
for program in sets bytes; do
    build wasm32-wasi $program -DTQKV_STATIC -Wl,-z,stack-size=65536
    runs wasm32-wasi $program scalar node --no-warnings "$folder/wasi.mjs" "$folder/$program-wasm32-wasi"
done
same_bytes wasm32-wasi

# Nothing here runs or links these.
for target in aarch64-macos x86_64-macos; do build $target sets -DTQKV_NO_AVX512 -c; done

finish

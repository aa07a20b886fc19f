#!/bin/sh
# What the build options cost: compiles the implementation with each, three rounds in turns, and prints lines
# `build NAME TEXT_BYTES SECONDS`: code and constants by `size`, the median of the processor time that the compiler took.
# Usage: build.sh FOLDER [compiler and flags...]: FOLDER is for objects.
set -e
folder=$1
shift
[ $# -gt 0 ] || set -- cc -std=c99 -O2
mkdir -p "$folder"
printf '#define TQKV_IMPLEMENTATION\n#include "tqkv.h"\n' >"$folder/tqkv.c"

# name and flags of each build
builds='default
TQKV_NO_AVX512 -DTQKV_NO_AVX512
TQKV_NO_AVX2 -DTQKV_NO_AVX2
TQKV_METAL -include tqkv_metal.m
debug -O0'

rm -f "$folder"/*.seconds
for _ in 1 2 3; do
    echo "$builds" | while read -r name flags; do
        # shellcheck disable=SC2086
        { LC_ALL=C sh -c 'time -p "$@"' sh "$@" $flags -Isrc -I. -c "$folder/tqkv.c" -o "$folder/$name.o"; } 2>"$folder/time"
        awk '/^(user|sys)/ { seconds += $2 } END { print seconds }' "$folder/time" >>"$folder/$name.seconds"
    done
done
echo "$builds" | while read -r name flags; do
    text=$(size "$folder/$name.o" | awk 'NR == 2 { print $1 }')
    echo "build $name $text $(sort -n "$folder/$name.seconds" | sed -n 2p)"
done

#!/bin/sh
# Compiles and runs the C code of README.md, the guides and tqkv.h's comments. Usage: snippets.sh FOLDER OBJECT..., from the
# top folder, with CC and CFLAGS set. The objects hold the implementation of tqkv.h. A block that starts with "```c NAME"
# becomes FOLDER/NAME.h; examples/tests/snippets.c includes it.
out=$1
shift
rm -rf "$out"
mkdir -p "$out"

awk -v out="$out" '
    FNR == 1 { file = "" }
    /^ *```c$/ { print "FAIL " FILENAME ":" FNR ": a block of C without a name"; bad = 1 }
    function begin(name) { file = out "/" name ".h"; print "#line " FNR + 1 " \"" FILENAME "\"" > file }
    /^ *```c / { begin($2); next }
    /^ *```/ { file = "" }
    FILENAME == "tqkv.h" && /^   EXAMPLE$/ { begin("header_example"); next }
    FILENAME == "tqkv.h" && /^   CONTENTS/ { file = "" }
    FILENAME == "tqkv.h" && /TQKV_IMPLEMENTATION starts|^#define TQKV_TABLE_VERSION/ { exit bad }
    file { print > file }
    END { exit bad }' README.md docs/integrating.md docs/special.md docs/slices.md docs/llama.md tqkv.h || exit 1

for block in "$out"/*.h; do
    grep -q "#include \"$(basename "$block")\"" examples/tests/snippets.c && continue
    echo "FAIL $(basename "$block" .h): not included by examples/tests/snippets.c"
    exit 1
done

# shellcheck disable=SC2086
$CC $CFLAGS -I. -I"$out" examples/tests/snippets.c "$@" -o "$out/snippets" -lm -pthread && "$out/snippets"

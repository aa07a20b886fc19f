#!/bin/sh
# Checks the Swift package as far as that goes without Swift: clang reads the module as Swift's importer would, and
# compiles the sources as SwiftPM does. Usage: test.sh FOLDER, from the top folder. FOLDER is an absolute path.
folder=$1
. tests/build/report.sh

rm -rf "$folder"
mkdir -p "$folder"
package=packaging/swift
modules="-fmodules -fmodules-cache-path=$folder/modules -fmodule-map-file=$package/CTqkv/include/module.modulemap
    -I$package/CTqkv/include"
# Of the importer: Objective-C on Apple's systems, and this macro.
importer="-x objective-c $modules -D__swift__=60000"
# The library is compiled without its sets here; its speed is not looked at.
compiled="-O0 -DTQKV_NO_AVX2"

# What the manifest names is there, and nothing beside it is unnamed.
paths=$(sed -n 's/.* path: "\([^"]*\)".*/\1/p' Package.swift)
for path in $paths; do accepts "path: $path" test -d "$path"; done
for file in metallib/*.*; do accepts "file: $file" grep -q "\"${file#metallib/}\"" Package.swift; done

# The copy of xxhash.h: as it was released, with its notice, and alone used.
copy=$package/CTqkv/xxhash/xxhash.h
hash='import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())'
released=d4f2b91b547c79061649186721a6b331609f2bf8595485a21ea631c82ec3ef93 # of version 0.8.1
accepts "xxhash.h is that of its release" test "$(python3 -c "$hash" $copy)" = $released
accepts "xxhash.h has its notice" grep -q "BSD 2-Clause License" $copy
version() { grep -E '^#define XXH_VERSION_(MAJOR|MINOR|RELEASE) ' "$1"; }
installed=$(echo '#include <xxhash.h>' | clang $CPPFLAGS -M -x c - 2>/dev/null | tr ' ' '\n' | grep '/xxhash\.h$')
if [ -z "$installed" ] || [ "$(version $copy)" != "$(version "$installed")" ]; then
    echo "skipped: no other xxhash.h of the copy's version"
else
    accepts "xxhash.h is the installed one" cmp $copy "$installed"
fi
clang -I$package/CTqkv/xxhash -M $package/CTqkv/tqkv.c | tr ' ' '\n' | grep '/xxhash\.h$' >"$folder/found"
accepts "no other xxhash.h is used" test "$(cat "$folder/found")" = $copy

# A program over the module.
cat >"$folder/user.m" <<'END'
@import CTqkv;
int main(void)
{
    tqkv_cache_desc desc = {.head_dim = 128, .n_kv_heads = 8, .n_heads = 32, .capacity = 64};
    tqkv_cache *cache = 0;
    tqkv_metal_desc metal = {.library_path = "default.metallib"};
    const tqkv_result result = tqkv_cache_create(&desc, &cache);
    tqkv_cache_destroy(cache);
    return result != TQKV_OK || metal.error_size;
}
END
accepts "the module compiles" clang $modules -I$package/CTqkv/xxhash $compiled -c $package/CTqkv/tqkv.c -o "$folder/tqkv.o"
for metal in TQKV_METAL TQKV_NO_METAL; do
    accepts "a program imports the module, $metal" clang $importer -Werror -D$metal -c "$folder/user.m" -o "$folder/user.o"
done
accepts "the program links" clang "$folder/user.o" "$folder/tqkv.o" -o "$folder/user" -lm
accepts "the program runs" "$folder/user"

# In Swift a dropped result is a warning, and a Metal object a raw pointer.
cat >"$folder/dropped.m" <<'END'
@import CTqkv;
void f(tqkv_cache *cache) { tqkv_cache_truncate(cache, 0); }
END
refuses "a dropped result" "ignoring return value" clang $importer -Werror -fsyntax-only "$folder/dropped.m"
cat >"$folder/object.m" <<'END'
@import CTqkv;
_Static_assert(_Generic((tqkv_metal_object)0, void *: 1, default: 0), "an object of Metal");
END
accepts "raw pointers" clang $importer -fsyntax-only "$folder/object.m"

# The notes on NULL: those of this header, and, where there is a clang that reads notes, what they say of a call.
accepts "CTqkv.apinotes" python3 $package/apinotes.py --check
cat >"$folder/load.m" <<'END'
@import CTqkv;
tqkv_result load(tqkv_cache_desc *desc, tqkv_read read, tqkv_cache **cache) { return tqkv_cache_load(desc, read, 0, cache); }
END
sed 's/(desc,/(0,/' "$folder/load.m" >"$folder/null.m"
if command -v clang-19 >/dev/null; then
    notes="clang-19 $importer -fapinotes-modules -Werror -fsyntax-only"
    accepts "NULL where it may be" $notes "$folder/load.m"
    refuses "NULL where it may not be" "requires a non-null argument" $notes "$folder/null.m"
else
    echo "skipped: no clang-19, make deps-more installs it"
fi

if command -v swift >/dev/null; then accepts "Swift reads the manifest" swift package describe; fi

finish

#!/bin/sh
# Builds and runs the example projects as their users would. Usage: projects.sh FOLDER, from the top folder. FOLDER is an
# absolute path.
out=$1
passed=0
failed=0

# report NAME STATUS: counts one check; shows the log of one that failed
report() {
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $1"
        cat "$out/log"
    fi
}

# check NAME COMMAND...: passes when the command succeeds
check() {
    name=$1
    shift
    "$@" >"$out/log" 2>&1
    report "$name" $?
}

# refused NAME WORDS COMMAND...: passes when the command fails and says WORDS. CMake breaks its lines.
refused() {
    name=$1
    words=$2
    shift 2
    "$@" >"$out/log" 2>&1
    status=$?
    test $status -ne 0 && tr -s '\n ' ' ' <"$out/log" | grep -q -e "$words"
    report "$name" $?
}

rm -rf "$out"
mkdir -p "$out/vendored" "$out/empty"
# The library is compiled several times here; its speed is not looked at.
export CFLAGS="-O0 -DTQKV_NO_AVX2"
packages='libxxhash-dev.*Homebrew.s xxhash'

# tqkv fetched into a project that has -ffast-math everywhere.
check "cmake configures" cmake -S examples/cmake -B "$out/fetched" -DCMAKE_C_FLAGS="-ffast-math $CFLAGS"
check "cmake builds" cmake --build "$out/fetched"
check "cmake program runs" "$out/fetched/sliding_window"

# With CMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY, CMake sees no header outside CMAKE_FIND_ROOT_PATH.
refused "fetched without xxhash.h" "$packages" cmake -S examples/cmake -B "$out/refused" \
    -DCMAKE_FIND_ROOT_PATH="$out/empty" -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY
cp CMakeLists.txt tqkv.h "$out/vendored"
touch "$out/vendored/xxhash.h"
check "fetched with xxhash.h beside tqkv.h" cmake -S examples/cmake -B "$out/beside" \
    -DFETCHCONTENT_SOURCE_DIR_TQKV="$out/vendored" \
    -DCMAKE_FIND_ROOT_PATH="$out/vendored" -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY

# tqkv installed by CMake, in another place than the one it was configured for.
tree=$out/by-cmake/opt/tqkv
check "tqkv configures" cmake -S . -B "$out/tqkv"
check "cmake installs" env DESTDIR="$out/by-cmake" cmake --install "$out/tqkv" --prefix /opt/tqkv
check "find_package configures" cmake -S examples/cmake -B "$out/found" -DTQKV_INSTALLED=ON -DCMAKE_PREFIX_PATH="$tree"
check "find_package builds" cmake --build "$out/found"
check "find_package program runs" "$out/found/sliding_window"
mkdir "$out/metal"
cat >"$out/metal/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.14)
project(metal LANGUAGES NONE)
find_package(tqkv REQUIRED)
if(NOT EXISTS "${TQKV_METAL_DIR}/tqkv_metal.m")
  message(FATAL_ERROR "no tqkv_metal.m in '${TQKV_METAL_DIR}'")
endif()
END
check "find_package names the Metal half" cmake -S "$out/metal" -B "$out/metal/build" -DCMAKE_PREFIX_PATH="$tree"
refused "find_package without xxhash.h" "$packages" cmake -S examples/cmake -B "$out/refused" -DTQKV_INSTALLED=ON \
    -DCMAKE_PREFIX_PATH="$tree" -DCMAKE_FIND_ROOT_PATH="$out/empty" -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY

# tqkv installed by make: the same files, apart from CMake's own.
tree=$out/by-make/opt/tqkv
check "make installs" env MAKEFLAGS= make install PREFIX=/opt/tqkv DESTDIR="$out/by-make"
check "make installs what cmake does" diff -r -x cmake "$out/by-cmake" "$out/by-make"
check "pkg-config program runs" env MAKEFLAGS= PKG_CONFIG_PATH="$tree/share/pkgconfig" \
    make -C examples/make OUT="$out/make-installed" INSTALLED=1 run
check "pkg-config names the Metal half" test -f \
    "$(PKG_CONFIG_PATH=$tree/share/pkgconfig pkg-config --variable=metaldir tqkv)/tqkv_metal.m"
refused "pkg-config without xxhash" "libxxhash" env PKG_CONFIG_LIBDIR="$tree/share/pkgconfig" pkg-config --cflags tqkv
check "make uninstalls" env MAKEFLAGS= make uninstall PREFIX=/opt/tqkv DESTDIR="$out/by-make"
check "nothing is left" test -z "$(find "$out/by-make" ! -type d)"

check "make builds and runs" env MAKEFLAGS= make -C examples/make OUT="$out/make" run

# Meson: as a subproject, and installed: the files of `make install`.
if command -v meson >/dev/null; then
    mkdir -p "$out/meson/meson/subprojects"
    cp -r examples/make examples/meson "$out/meson"
    ln -s "$PWD" "$out/meson/meson/subprojects/tqkv"
    tree=$out/by-meson
    check "meson configures" meson setup "$out/meson/build" "$out/meson/meson"
    check "meson builds and runs" meson test -C "$out/meson/build"
    check "tqkv configures with meson" meson setup --prefix /opt/tqkv "$out/meson/tqkv" .
    check "meson installs" env DESTDIR="$tree" meson install --no-rebuild -C "$out/meson/tqkv"
    check "meson installs what cmake does" diff -r -x cmake "$out/by-cmake" "$tree"
else
    echo "skipped: no meson"
fi

# The Swift package, without Swift: what its manifest names is there, nothing beside it is unnamed, and clang reads the
# modules, as Swift's importer would, and the sources with the flags of SwiftPM.
package=packaging/swift
modules="-fmodules -fmodules-cache-path=$out/modules -fmodule-map-file=$package/CTqkv/include/module.modulemap
    -fmodule-map-file=$package/CXxhash/module.modulemap -I$package/CTqkv/include
    $(pkg-config --cflags libxxhash)"
paths=$(sed -n 's/.* path: "\([^"]*\)".*/\1/p' Package.swift)
for path in $paths; do check "Package.swift: $path" test -d "$path"; done
for file in metallib/*; do check "Package.swift: $file" grep -q "\"${file#metallib/}\"" Package.swift; done
cat >"$out/user.m" <<'END'
@import CTqkv;
@import CXxhash;
int main(void)
{
    tqkv_cache_desc desc = {.head_dim = 128, .n_kv_heads = 8, .n_heads = 32, .capacity = 64};
    tqkv_cache *cache = 0;
    tqkv_metal_desc metal = {.library_path = "default.metallib"};
    const tqkv_result result = tqkv_cache_create(&desc, &cache);
    tqkv_cache_destroy(cache);
    return result != TQKV_OK || metal.error_size || XXH_VERSION_NUMBER < 800;
}
END
check "the module compiles" clang $modules $CFLAGS -c $package/CTqkv/tqkv.c -o "$out/swift_tqkv.o"
for metal in TQKV_METAL TQKV_NO_METAL; do
    check "clang imports the module, $metal" clang -x objective-c $modules -D$metal -c "$out/user.m" -o "$out/user.o"
done
check "the module's program links" clang "$out/user.o" "$out/swift_tqkv.o" -o "$out/user" -lm
check "the module's program runs" "$out/user"
if command -v swift >/dev/null; then check "Swift reads the manifest" swift package describe; fi

echo "$passed passed, $failed failed"
test "$failed" -eq 0

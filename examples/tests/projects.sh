#!/bin/sh
# Builds and runs the example projects as their users would. Usage: projects.sh FOLDER, from the top folder. FOLDER is an
# absolute path.
folder=$1
. tests/build/report.sh
# CMake breaks its lines.
unfold() { tr -s '\n ' ' '; }

rm -rf "$folder"
mkdir -p "$folder/vendored" "$folder/empty"
# The library is compiled several times here; its speed is not looked at.
export CFLAGS="-O0 -DTQKV_NO_AVX2"
packages='libxxhash-dev.*Homebrew.s xxhash'

# tqkv fetched into a project that has -ffast-math everywhere.
accepts "cmake configures" cmake -S examples/cmake -B "$folder/fetched" -DCMAKE_C_FLAGS="-ffast-math $CFLAGS"
accepts "cmake builds" cmake --build "$folder/fetched"
accepts "cmake programs run" cmake -E chdir "$folder/fetched" ctest

# With CMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY, CMake sees no header outside CMAKE_FIND_ROOT_PATH.
refuses "fetched without xxhash.h" "$packages" cmake -S examples/cmake -B "$folder/refused" \
    -DCMAKE_FIND_ROOT_PATH="$folder/empty" -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY
cp -r CMakeLists.txt tqkv.h packaging "$folder/vendored"
touch "$folder/vendored/xxhash.h"
accepts "fetched with xxhash.h beside tqkv.h" cmake -S examples/cmake -B "$folder/beside" \
    -DFETCHCONTENT_SOURCE_DIR_TQKV="$folder/vendored" \
    -DCMAKE_FIND_ROOT_PATH="$folder/vendored" -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY

# tqkv installed by CMake, in another place than the one it was configured for.
tree=$folder/by-cmake/opt/tqkv
accepts "tqkv configures" cmake -S . -B "$folder/tqkv"
accepts "cmake installs" env DESTDIR="$folder/by-cmake" cmake --install "$folder/tqkv" --prefix /opt/tqkv
accepts "find_package configures" cmake -S examples/cmake -B "$folder/found" -DTQKV_INSTALLED=ON -DCMAKE_PREFIX_PATH="$tree"
accepts "find_package builds" cmake --build "$folder/found"
accepts "find_package programs run" cmake -E chdir "$folder/found" ctest
mkdir "$folder/metal"
cat >"$folder/metal/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.14)
project(metal LANGUAGES NONE)
find_package(tqkv REQUIRED)
if(NOT EXISTS "${TQKV_METAL_DIR}/tqkv_metal.m")
  message(FATAL_ERROR "no tqkv_metal.m in '${TQKV_METAL_DIR}'")
endif()
END
accepts "find_package names the Metal half" cmake -S "$folder/metal" -B "$folder/metal/build" -DCMAKE_PREFIX_PATH="$tree"
refuses "find_package without xxhash.h" "$packages" cmake -S examples/cmake -B "$folder/refused" -DTQKV_INSTALLED=ON \
    -DCMAKE_PREFIX_PATH="$tree" -DCMAKE_FIND_ROOT_PATH="$folder/empty" -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY

# tqkv installed by make: the same files, apart from CMake's own.
tree=$folder/by-make/opt/tqkv
accepts "make installs" env MAKEFLAGS= make install PREFIX=/opt/tqkv DESTDIR="$folder/by-make"
accepts "make installs what cmake does" diff -r -x cmake "$folder/by-cmake" "$folder/by-make"
accepts "pkg-config program runs" env MAKEFLAGS= PKG_CONFIG_PATH="$tree/share/pkgconfig" \
    make -C examples/make OUT="$folder/make-installed" INSTALLED=1 run
accepts "pkg-config names the Metal half" test -f \
    "$(PKG_CONFIG_PATH=$tree/share/pkgconfig pkg-config --variable=metaldir tqkv)/tqkv_metal.m"
refuses "pkg-config without xxhash" "libxxhash" env PKG_CONFIG_LIBDIR="$tree/share/pkgconfig" pkg-config --cflags tqkv
accepts "make uninstalls" env MAKEFLAGS= make uninstall PREFIX=/opt/tqkv DESTDIR="$folder/by-make"
accepts "nothing is left" test -z "$(find "$folder/by-make" ! -type d)"

accepts "make builds and runs" env MAKEFLAGS= make -C examples/make OUT="$folder/make" run

# Meson: as a subproject, and installed: the files of `make install`.
if command -v meson >/dev/null; then
    mkdir -p "$folder/meson/meson/subprojects"
    cp -r examples/make examples/meson "$folder/meson"
    # Of a repository with what the subproject reads, by the wrap file.
    repository=$folder/meson/repository
    mkdir -p "$repository/examples/make"
    cp -r meson.build tqkv.h tqkv.pc.in tqkv_metal.m metallib "$repository"
    cp examples/make/tqkv.c "$repository/examples/make"
    (cd "$repository" && git init -q -b main && git add -A && git -c user.name=tests -c user.email= commit -q -m tests)
    sed -i.url "s|^url = .*|url = file://$repository|" "$folder/meson/meson/subprojects/tqkv.wrap"
    tree=$folder/by-meson
    accepts "meson configures" meson setup "$folder/meson/build" "$folder/meson/meson"
    accepts "meson builds and runs" meson test -C "$folder/meson/build"
    accepts "tqkv configures with meson" meson setup --prefix /opt/tqkv "$folder/meson/tqkv" .
    accepts "meson installs" env DESTDIR="$tree" meson install --no-rebuild -C "$folder/meson/tqkv"
    accepts "meson installs what cmake does" diff -r -x cmake "$folder/by-cmake" "$tree"

    # What CMake has installed, without pkg-config: sinf in main.c needs -lm.
    mkdir "$folder/meson/found"
    cp examples/make/main.c examples/make/tqkv.c "$folder/meson/found"
    cat >"$folder/meson/found/meson.build" <<'END'
project('found', 'c', default_options: ['c_std=c99'])
tqkv = dependency('tqkv', method: 'cmake', modules: ['tqkv::tqkv'])
test('found', executable('found', 'main.c', 'tqkv.c', dependencies: tqkv))
END
    accepts "meson finds what cmake installed" meson setup --cmake-prefix-path "$folder/by-cmake/opt/tqkv" \
        "$folder/meson/found/build" "$folder/meson/found"
    accepts "meson links what cmake installed" meson test -C "$folder/meson/found/build"
else
    echo "skipped: no meson"
fi

finish

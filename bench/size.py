#!/usr/bin/env python3
"""Prints how large the project is, and fails where a size is above its limit.

usage: size.py FOLDER OBJECT [LIMITS]

OBJECT: the implementation without Metal, compiled from FOLDER, the source, by gcc -O2. LIMITS: a file of lines `NAME LIMIT
REASON`; a limit of text counts for gcc 12 on x86-64 alone. Without it each file of FOLDER has a line: its lines, its code in
bytes. That takes an OBJECT with -g: `nm -l` knows the file of each function. Loops that every set compiles again count where
they are written.
"""
import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = {".c", ".h", ".cpp", ".cu", ".m", ".metal", ".py", ".sh", ".mk", ".txt", ".awk"}


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def lines(paths):
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def sources(folder):
    return [path for path in folder.rglob("*") if path.is_file() and (path.suffix in SOURCES or path.name == "metal_stdlib")]


def documents():
    return [path for path in ROOT.rglob("*.md") if not {"build", ".build", ".git"} & set(path.relative_to(ROOT).parts)]


def is_reference(compiled):
    """Whether the compiler is the one that the limit of text is for."""
    notes = output("readelf", "-p", ".comment", compiled)
    return " 12." in notes and "X86-64" in output("readelf", "-h", compiled)


def measured(folder, compiled):
    rooms = sorted({path.parent for path in folder.rglob("*.h")})
    sizes = {f"src/{room.relative_to(folder)}" if room != folder else "src/.": lines(room.glob("*.h")) for room in rooms}
    sizes["src_lines"] = sum(sizes.values())
    sizes["metal_lines"] = lines((folder / "metal").glob("*.m"))  # in Objective-C
    sizes["kernel_lines"] = lines((folder / "vectors").rglob("*.h"))
    sizes["shader_lines"] = lines(sources(ROOT / "shaders"))
    sizes["test_lines"] = lines(sources(ROOT / "tests"))
    sizes["document_words"] = sum(len(path.read_text(encoding="utf-8").split()) for path in documents())
    sizes["header_bytes"] = (ROOT / "tqkv.h").stat().st_size
    sizes["text_bytes"] = int(output("size", compiled).split("\n")[1].split()[0])
    return sizes


def print_files(folder, compiled):
    code = collections.Counter()
    for size, file in re.findall(r"^\w+ (\w+) [tT] \S+\s+(\S+):\d+$", output("nm", "-S", "-l", compiled), re.M):
        path = pathlib.Path(file)
        code[path.relative_to(folder) if folder in path.parents else "xxhash.h"] += int(size, 16)
    for path in sorted(folder.rglob("*.h")):
        print(f"file {path.relative_to(folder)} {lines([path])} {code[path.relative_to(folder)]}")
    print(f"file xxhash.h 0 {code['xxhash.h']}")


def compare(sizes, limits, reference):
    passed = failed = 0
    for line in limits.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        name, limit, reason = line.split(maxsplit=2)
        if name == "text_bytes" and not reference:
            print("text_bytes: not compared, its limit is for gcc 12 on x86-64")
        elif sizes[name] > int(limit):
            print(f"{name} is {sizes[name]}, above its limit of {limit} in {limits} ({reason})")
            failed += 1
        else:
            passed += 1
    print(f"{passed} passed, {failed} failed")
    return failed > 0


def main():
    folder, compiled = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]
    if len(sys.argv) < 4:
        print_files(folder, compiled)
    sizes = measured(folder, compiled)
    for name, size in sizes.items():
        print(f"size {name} {size}")
    return len(sys.argv) > 3 and compare(sizes, pathlib.Path(sys.argv[3]), is_reference(compiled))


if __name__ == "__main__":
    sys.exit(main())

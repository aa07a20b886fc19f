#!/usr/bin/env python3
"""Prints the lines and the code of each file of src/.

usage: sections.py FOLDER OBJECT

OBJECT: the implementation, compiled from FOLDER with -g, so that `nm -l` knows the file of each function. The loops that every
set compiles again count where they are written.
"""
import collections
import os
import pathlib
import re
import subprocess
import sys


def main():
    folder, compiled = sys.argv[1:]
    code = collections.Counter()
    listed = subprocess.run(["nm", "-S", "-l", compiled], capture_output=True, text=True, check=True).stdout
    for size, file in re.findall(r"^\w+ (\w+) [tT] \S+\s+(\S+):\d+$", listed, re.M):
        name = os.path.relpath(file, folder)
        code["xxhash.h" if name.startswith("..") else name] += int(size, 16)
    for path in sorted(pathlib.Path(folder).rglob("*.h")):
        name = str(path.relative_to(folder))
        print(f"file {name} {len(path.read_text(encoding='utf-8').splitlines())} {code[name]}")
    print(f"file xxhash.h 0 {code['xxhash.h']}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Prints the lines and the code of each section of tqkv.h.

usage: sections.py HEADER OBJECT

OBJECT: the implementation, compiled with -g, so that `nm -l` knows the line of each function. The loops that every set
compiles again count where they are written.
"""
import collections
import re
import subprocess
import sys


def main():
    header, compiled = sys.argv[1:]
    with open(header, encoding="utf-8") as f:
        text = f.read().split("\n")
    section, of_line, lines, code = "banner", [], collections.Counter(), collections.Counter()
    for line in text:
        tag = re.match(r"/[/*] >>([a-z0-9-]+)", line)
        section = tag.group(1) if tag else section
        of_line.append(section)
        lines[section] += 1
    listed = subprocess.run(["nm", "-S", "-l", compiled], capture_output=True, text=True, check=True).stdout
    for size, file, line in re.findall(r"^\w+ (\w+) [tT] \S+\s+(\S+):(\d+)$", listed, re.M):
        code[of_line[int(line) - 1] if file.endswith("/tqkv.h") else "xxhash.h"] += int(size, 16)
    for name in list(lines) + ["xxhash.h"]:
        print(f"section {name} {lines[name]} {code[name]}")


if __name__ == "__main__":
    main()

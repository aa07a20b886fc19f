#!/usr/bin/env python3
"""Prints what the kernels of a library take, as the table of metallib/README.md.

usage: sizes.py LIBRARY
"""
import collections
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import reader  # noqa: E402


def main():
    families = collections.defaultdict(list)
    for function in reader.read(sys.argv[1]).functions:
        families[re.sub(r"^tqkv_|_d[\d_]+$", "", function.name)].append(len(function.bitcode))
    total = os.path.getsize(sys.argv[1])
    print("| family | kernels | bytes | of all | largest |\n|---|---|---|---|---|")
    for name, sizes in sorted(families.items(), key=lambda item: -sum(item[1])):
        print(f"| `{name}` | {len(sizes)} | {sum(sizes):,} | {100 * sum(sizes) / total:.0f}% | {max(sizes):,} |")
    print(f"| the file | {sum(map(len, families.values()))} | {total:,} | | |")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes all shaders as one source, for the compiler that is part of the operating system.

usage: amalgamate.py OUTPUT SHADER.metal...

Headers stand in front of the files that include them. A function constant is declared once; files that give it another name
get that name as a macro.
"""
import os
import re
import sys

import msl

TITLE = """// All shaders of tqkv in one file, written by `make metallib`: do not edit. MIT licence, as tqkv.h. Compile it without
// fast math: fastMathEnabled NO in MTLCompileOptions.
#include <metal_stdlib>
using namespace metal;
"""


def one_by_one(text):
    """Each kernel under a condition of its own: TQKV_ONLY and TQKV_ONLY_NAME leave the others out."""
    def under(match):
        return f"#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_{match.group('name')})\n{match.group(0)}\n#endif"

    macros = dict(re.findall(r"(?m)^#define (\w+)\(\w+(?:, \w+)*\)(?: \\\n|\s)\s*kernel void (\w+)##", text))
    for macro, prefix in macros.items():
        text = re.sub(rf"(?m)^{macro}\((\w+)(?:, \w+)*\)$",
                      lambda m: f"#if !defined(TQKV_ONLY) || defined(TQKV_ONLY_{prefix}{m.group(1)})\n{m.group(0)}\n#endif", text)
    return re.sub(r"(?ms)^kernel void (?P<name>\w+)\(.*?^}$", under, text)


class Amalgam:
    def __init__(self):
        self.seen, self.constants, self.folder = set(), {}, os.path.dirname(sys.argv[2])

    def declare(self, match):
        """The first declaration of a function constant, or a macro for its other name, or nothing."""
        _, name, index = match.groups()
        known = self.constants.setdefault(index, [name])
        if name == known[0] and len(known) == 1 and index not in self.seen:
            self.seen.add(index)
            return match.group(0)
        if name in known:
            return f"// {name}: declared above"
        known.append(name)
        return f"#define {name} {known[0]} // the same function constant"

    def expand(self, path):
        """The file behind its headers, each once."""
        path = os.path.normpath(path)
        if not os.path.exists(path):  # of a file outside shaders/, which includes as if it were there
            path = os.path.normpath(os.path.join("shaders", os.path.relpath(path, self.folder)))
        if path in self.seen:
            return ""
        self.seen.add(path)
        text = msl.read(path)
        include = r'(?m)^#include "([^"]+)".*\n'
        headers = [self.expand(os.path.join(os.path.dirname(path), name)) for name in re.findall(include, text)]
        text = msl.FUNCTION_CONSTANT.sub(self.declare, re.sub(include, "", text))
        text = one_by_one(text)
        return "".join(headers) + f"\n// ---- {path} ----\n\n" + text.rstrip() + "\n"


def main():
    amalgam = Amalgam()
    text = TITLE + "".join(amalgam.expand(path) for path in sys.argv[2:])
    with open(sys.argv[1], "w", encoding="utf-8") as f:
        f.write(re.sub(r"\n{3,}", "\n\n", text))


if __name__ == "__main__":
    main()

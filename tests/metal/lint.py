#!/usr/bin/env python3
"""Finds in Metal shaders what a C++ compiler with a shim lets pass and Metal or this project does not.

usage: lint.py SHADER...            one line a finding, status 1 if there is any
       lint.py --expect SHADER...   every line marked '// lint: RULE' must give that finding, and no other line any
"""
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "metallib"))
from msl import ATTRIBUTE, argument_lists, arguments_at, closing, without_comments  # noqa: E402

SPACES = ("device", "constant", "threadgroup", "thread")
TYPE = (r"(?:float|half|bool|int|uint|uchar|ushort|ulong|char|short|long|void|size_t|u?int\d+_t|float[234]|uint[234]|"
        r"half[234]|int[234]|atomic_uint|simdgroup_matrix|sum_matrix|left_part|right_part|code_value|T|tqkv__\w+|STRUCTS)(?:<[^<>]*>)?")
# What a kernel may ask for of a thread's place, those that shaders use, and the types that it may have.
POSITIONS = {
    "threadgroup_position_in_grid": ("uint", "uint2", "uint3", "ushort", "ushort2", "ushort3"),
    **dict.fromkeys(("thread_index_in_threadgroup", "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup",
                     "simdgroups_per_threadgroup"), ("uint", "ushort")),
}
# Rules that one pattern tells: what MSL lacks (MSL 1.5.4), and what this project's subset leaves out.
PATTERNS = {
    "double": r"\bdouble\b|(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=e))(?:e[-+]?\d+)?(?![\w.])",
    "half-literal": r"(?<![\w.])\d+\.?\d*h\b",
    "forbidden-word": r"\b(?:new|delete|try|catch|throw|goto|virtual|dynamic_cast|typeid|thread_local|register|noexcept|"
                      r"asm|volatile|union|std(?=\s*::))\b",
    "lambda": r"\[[&=]?\]\s*\(",
    "inheritance": r"^\s*(?:struct|class)\s+\w+\s*:",
    "include": r"^\s*#\s*include\s+<(?!metal_)",
    "swizzle": r"\.[xyzw]{2,4}\b",
    "unnamed-precision": r"(?<!precise::)(?<!fast::)(?<!\w)(?:sqrt|rsqrt|exp|exp2|log|log2|tanh|pow|sin|cos)\s*\(",
    "rsqrt": r"\brsqrt\b",
    "host-name": r"host_name",
    "static": r"^\s*static\b",
    "local-threadgroup-memory": r"^\s+threadgroup\s+(?:const\s+)?" + TYPE + r"\s+\w+\s*\[",
    "struct-copy": r"(?:^|[;{(,])\s*tqkv__\w+\s+\w+\s*[=;,)]",
    "reserved-name": r"\b(?:float|int|uint|auto|half|bool)\s+(?:device|constant|threadgroup|thread|kernel|vertex|fragment)"
                     r"\b",
    "half-as-name": r"\bhalf\s*[=;,\]<+/-]",
    "raw-constant-index": r"function_constant\(\s*\d",
    "table-in-shader": r"^constant\b(?![^=;]*\[\[)",
    "shuffle-index-type": r"\bsimd_shuffle(?:_xor)?\((?:[^()]|\([^()]*\))*,(?!\s*(?:ushort|TQKV_LANE_NUMBER)\()",
}
FUNCTION = re.compile(r"(?m)^(?!inline\b|kernel\b|constant\b|template\b|struct\b|typedef\b|using\b|enum\b|namespace\b)"
                      r"[A-Za-z_][\w<>:, ]*[ *&]\w+\([^;]*?\)\s*\{")
KERNEL = re.compile(r"\bkernel\s+(\w+)\s+([\w#]+)\s*\(")


class Shader:
    def __init__(self, path, structs):
        with open(path, encoding="utf-8") as f:
            self.source = f.read()
        self.path = path
        self.lists = argument_lists(path)
        self.text = without_comments(self.source).replace("\\\n", " \n")
        self.type = TYPE.replace("STRUCTS", "|".join(sorted(structs)) or "float")
        self.findings = []

    def report(self, at, rule):
        self.findings.append((self.text.count("\n", 0, at) + 1, rule))

    def declaration_start(self, at):
        """Start of the parameter, cast or statement that holds position `at`."""
        while at > 0 and self.text[at - 1] not in "(,;{}":
            at -= 1
        return at

    def check_patterns(self):
        for rule, pattern in PATTERNS.items():
            for match in re.finditer(pattern.replace("STRUCTS", "float"), self.text, re.M):
                word = re.search(r"\w", match.group(0))
                self.report(match.start() + (word.start() if word else 0), rule)

    def check_address_spaces(self):
        """Every pointer and reference names where it points."""
        for match in re.finditer(r"\b" + self.type + r"\s*(?:const\s*)?(?:\(\s*)?[*&](?!&|=)\s*(?=\w|\)|,)", self.text):
            declared = self.text[self.declaration_start(match.start()):match.start()]
            if not re.search(r"\b(?:" + "|".join(SPACES) + r")\b", declared):
                self.report(match.start(), "address-space")

    def space_of(self, name, before):
        """Address space of the nearest declaration of a name before a position; None if it is no pointer."""
        found = None
        for match in re.finditer(r"\b(" + "|".join(SPACES) + r")\s+(?:const\s+)?" + self.type +
                                 r"\s*(?:const\s*)?[*&]\s*" + name + r"\b|\b" + self.type + r"\s+" + name + r"\b",
                                 self.text[:before]):
            found = match.group(1)
        return found

    def check_casts(self):
        """A C-style cast must not move a pointer to another address space: C++ compilers allow it."""
        for match in re.finditer(r"\((" + "|".join(SPACES) + r")\s[^()]*\*\s*\)\s*[&(]*\s*(\w+)", self.text):
            space = "constant" if match.group(2).startswith("tqkv__") else self.space_of(match.group(2), match.start())
            if space is not None and space != match.group(1):
                self.report(match.start(), "cast-between-address-spaces")

    def check_functions(self):
        for match in FUNCTION.finditer(self.text):
            self.report(match.start(), "not-inline")

    def check_kernels(self):
        for match in KERNEL.finditer(self.text):
            if match.group(1) != "void":
                self.report(match.start(), "kernel-returns")
            used = set()
            start = match.end()
            for offset, argument in arguments_at(self.text[start:closing(self.text, match.end() - 1)]):
                at = start + offset + len(argument) - len(argument.lstrip())
                for _, listed in arguments_at(self.lists.get(argument.strip(), argument)):
                    self.check_argument(at, listed, used)

    def check_argument(self, at, argument, used):
        attributes = ATTRIBUTE.findall(argument)
        if len(attributes) != 1:
            self.report(at, "one-attribute")
            return
        name, index = attributes[0]
        kind = " ".join(ATTRIBUTE.sub("", argument).split())
        if (name, index) in used:
            self.report(at, "attribute-twice")
        used.add((name, index))
        if name == "buffer":
            right = re.match(r"(device|constant) .*[*&]\s*\w+$", kind) and index.isdigit() and int(index) <= 30
        elif name == "threadgroup":
            right = re.match(r"threadgroup .*\*\s*\w+$", kind) and index.isdigit()
        else:
            right = kind.split()[0] in POSITIONS.get(name, ())
        if not right:
            self.report(at, "argument-type")

    def check(self):
        self.check_patterns()
        self.check_address_spaces()
        self.check_casts()
        self.check_functions()
        self.check_kernels()
        return sorted(set(self.findings))


def struct_names(paths):
    names = set()
    for path in paths:
        with open(path, encoding="utf-8") as f:
            names.update(re.findall(r"\bstruct\s+(\w+)", without_comments(f.read())))
    return names


def expected_findings(shader):
    return sorted((i + 1, rule) for i, line in enumerate(shader.source.split("\n"))
                  for rule in re.findall(r"// lint: ([\w-]+)", line))


def main():
    expect = sys.argv[1] == "--expect"
    paths = sys.argv[1 + expect:]
    structs = struct_names(paths)
    passed = failed = 0
    for path in paths:
        shader = Shader(path, structs)
        found, wanted = shader.check(), expected_findings(shader) if expect else []
        for line, rule in sorted(set(found) - set(wanted)):
            print(f"{path}:{line}: {rule}")
            failed += 1
        for line, rule in sorted(set(wanted) - set(found)):
            print(f"{path}:{line}: {rule} is not found")
            failed += 1
        passed += len(set(wanted) & set(found)) if expect else not found
    print(f"{passed} passed, {failed} failed")
    return failed != 0 or passed == 0


if __name__ == "__main__":
    sys.exit(main())

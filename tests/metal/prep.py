#!/usr/bin/env python3
"""Rewrites Metal shaders, line for line, so that stock C++ compilers take them, and adds a launcher for every kernel.

usage: prep.py clang|cpu|cuda OUTPUT_FOLDER SHADER...

clang: for a type check with address spaces. cpu: for tests/metal/simt.cpp. cuda: for nvcc; with SIMT_HEAD_DIM only the
kernels of that head_dim, for two of them the digits of both.
Each SHADER (.metal or .h) is written under its own name; a .metal gets a .cpp (or .cu) ending. Error messages keep the
shader's name and line numbers. The words device, constant, threadgroup, thread and kernel are macros of the shim, except
for CUDA, whose own attributes are spelled with two of them; there they are replaced here.
"""
import os
import re
import sys

ATTRIBUTE = re.compile(r"\[\[\s*(\w+)\s*(?:\(\s*(\w+)\s*\))?\s*\]\]")
FUNCTION_CONSTANT = re.compile(r"(?m)^constant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\(\s*(\w+)\s*\)\s*\]\]\s*;")
KERNEL = re.compile(r"\bkernel\s+void\s+([\w#]+)\s*\(")
DEFINE = re.compile(r"(?m)^#define\s+(\w+)\((\w+(?:, \w+)*)\)((?:[^\n]*\\\n)*[^\n]*)")
CUDA_WORDS = {"device": "", "constant": "const", "threadgroup": "", "thread": "", "kernel": "__device__",
              "inline": "__device__ __forceinline__"}
POSITIONS = {"threadgroup_position_in_grid", "thread_position_in_threadgroup", "threads_per_threadgroup",
             "threadgroups_per_grid", "thread_index_in_threadgroup", "thread_index_in_simdgroup",
             "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup"}


def blank(match):
    """The matched text as spaces; lines stay lines."""
    return re.sub(r"[^\n\\]", " ", match.group(0))


def without_comments(source):
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, source, flags=re.S)


def closing(source, start):
    """Index of the parenthesis that closes the one at start."""
    depth = 0
    for i in range(start, len(source)):
        depth += {"(": 1, ")": -1}.get(source[i], 0)
        if depth == 0:
            return i
    raise SystemExit("unbalanced parentheses")


def split_arguments(text):
    """Splits at commas outside of all brackets."""
    depth, parts, last = 0, [], 0
    for i, c in enumerate(text):
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    return [p.strip() for p in parts + [text[last:]] if p.strip()]


def expand_kernel_macros(source):
    """Source followed by every use at column 0 of a macro whose body defines kernels, expanded."""
    source = without_comments(source)
    expanded = DEFINE.sub(blank, source)
    for name, parameters, body in DEFINE.findall(source):
        if not KERNEL.search(body):
            continue
        for values in re.findall(r"(?m)^" + name + r"\((\w+(?:, \w+)*)\)", source):
            text = body.replace("\\\n", "\n")
            for parameter, value in zip(parameters.split(", "), values.split(", ")):
                text = re.sub(r"##\s*" + parameter + r"\b", value, text)
                text = re.sub(r"\b" + parameter + r"\b", value, text)
            expanded += "\n" + text
    return expanded


def kernels(source):
    """[(name, [(type, argument name, [(attribute, index)])])] of all kernels."""
    found = []
    text = expand_kernel_macros(source)
    for match in KERNEL.finditer(text):
        arguments = []
        for argument in split_arguments(text[match.end():closing(text, match.end() - 1)]):
            attributes = ATTRIBUTE.findall(argument)
            kind, name = re.match(r"(.*?)(\w+)$", ATTRIBUTE.sub("", argument).strip(), re.S).groups()
            arguments.append((" ".join(kind.split()), name, attributes))
        found.append((match.group(1), arguments))
    return found


def strip_words(text):
    for word, replacement in CUDA_WORDS.items():
        text = re.sub(r"(?<![\w:])" + word + r"(?!\w)", replacement, text)
    return text


def rewrite(source, mode):
    if mode == "clang":
        source = FUNCTION_CONSTANT.sub(r"constant \1 \2 = \1(0);", source)
    elif mode == "cpu":
        source = FUNCTION_CONSTANT.sub(r'static const simt::function_constant<\1> \2 = {\3, "\2"};', source)
    else:
        source = FUNCTION_CONSTANT.sub(r"SIMT_FUNCTION_CONSTANT(\1, \2, \3);", source)
    source = ATTRIBUTE.sub(blank, source)
    return strip_words(without_comments(source)) if mode == "cuda" else source


def constant_mask(paths):
    """A C expression with one bit for each function constant declared in these files."""
    names = []
    for path in paths:
        names += [c[2] for c in FUNCTION_CONSTANT.findall(read(path))]
    return " | ".join(["0u"] + ["1u << " + n for n in sorted(set(names))])


def included(path, seen):
    """The file and every shader header it includes by quotes, headers first."""
    for name in re.findall(r'(?m)^#include "([^"]+)"', read(path)):
        other = os.path.normpath(os.path.join(os.path.dirname(path), name))
        if other not in seen and os.path.basename(other) != "tqkv.h" and os.path.exists(other):
            included(other, seen)
    seen.append(path)
    return seen


def launcher(name, arguments, mode, mask):
    values, masks = [], {"buffer": 0, "threadgroup": 0}
    for kind, argument, attributes in arguments:
        if len(attributes) != 1:
            raise SystemExit(f"{name}: {argument} must have one attribute")
        attribute, index = attributes[0]
        kind = strip_words(kind) if mode == "cuda" else kind
        if attribute in masks:
            masks[attribute] |= 1 << int(index)
            by_value = mode == "cuda" and kind.endswith("&")
            access = f"SIMT_CONSTANT({index})" if by_value else f"SIMT_{attribute.upper()}({index})"
            values.append(f"*({kind[:-1]}*){access}" if kind.endswith("&") else f"({kind}){access}")
        elif attribute in POSITIONS:
            values.append(f"simt_position<{kind}>(SIMT_POSITION({attribute}))")
        else:
            raise SystemExit(f"{name}: unknown attribute {attribute}")
    call = f"SIMT_KERNEL({name}, {masks['buffer']}u, {masks['threadgroup']}u, ({mask}), ({', '.join(values)}))\n"
    head_dim = re.search(r"_d([\d_]+)$", name)
    if mode != "cuda" or not head_dim:
        return call
    number = head_dim.group(1).replace("_", "")
    return f"#if !defined(SIMT_HEAD_DIM) || SIMT_HEAD_DIM == {number}\n{call}#endif\n"


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def main():
    mode, folder, shaders = sys.argv[1], sys.argv[2], sys.argv[3:]
    os.makedirs(folder, exist_ok=True)
    for path in shaders:
        source = read(path)
        text = f'#line 1 "{path}"\n' + rewrite(source, mode)
        name = os.path.join(folder, os.path.basename(path))
        if path.endswith(".metal"):
            name += ".cu" if mode == "cuda" else ".cpp"
            if mode != "clang":
                mask = constant_mask(included(path, []))
                text += '\n#line 1 "launchers"\n' + "".join(launcher(k, a, mode, mask) for k, a in kernels(source))
        with open(name, "w", encoding="utf-8") as f:
            f.write(text)


if __name__ == "__main__":
    main()

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

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "metallib"))
from msl import ATTRIBUTE, FUNCTION_CONSTANT, blank, included, kernels, read, without_comments  # noqa: E402

CUDA_WORDS = {"device": "", "constant": "const", "threadgroup": "", "thread": "", "kernel": "__device__",
              "inline": "__device__ __forceinline__"}
POSITIONS = {"threadgroup_position_in_grid", "thread_index_in_threadgroup", "thread_index_in_simdgroup",
             "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup"}


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
    return " | ".join(["0ull"] + ["1ull << " + n for n in sorted(set(names))])


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
                mask = constant_mask(included(path))
                text += '\n#line 1 "launchers"\n' + "".join(launcher(k, a, mode, mask) for k, a in kernels(path))
        with open(name, "w", encoding="utf-8") as f:
            f.write(text)


if __name__ == "__main__":
    main()

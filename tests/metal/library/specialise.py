#!/usr/bin/env python3
"""Makes pipelines of a library's modules, as far as stock LLVM can: function constants become constants, then opt -O3.

usage: specialise.py LIBRARY [--all] [--list] [part of a name]...

A case is KERNEL/FORMATS/COLUMNS/OPTION. Without --all: one or a few of each kernel, and not of the head_dims whose loops are
those of others; with it every format, number of columns and option, and every pair of formats at head_dim 128. Of what is left
of a kernel there must be no array in thread memory, no pointer to thread memory that is chosen while it runs, no loop that was
to be unrolled, and no calculation of constants; as many products of matrices as its columns need.

LLVM 14 unrolls a loop of more than 16384 instructions so late that it leaves the loop's arrays in memory: sroa once more
shows whether they have to be there.
"""
import collections
import concurrent.futures
import functools
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "..", "..", "metallib")]
import launch  # noqa: E402
import msl  # noqa: E402
import reader  # noqa: E402

OPT = ["opt-14", "-passes=default<O3>,sroa", "-S", "-o", "-"]
SOURCES = os.path.join(HERE, "..", "..", "..", "src")
TABLES, SIZES = (msl.read(os.path.join(SOURCES, name)) for name in ("base/tables.h", "gpu/sizes.h"))
# Values that a context may pass: formats count from 1, in the order of the rows.
FORMATS = {name: 1 + i for i, name in enumerate(re.findall(r'row\(x, TQKV_\w+, +"(\w+)", +TQKV__', TABLES))}
NUMBERS = {name: int(n) for name, n in re.findall(r"(?m)^#define TQKV_FC_(\w+)\s+(\d+)", SIZES)}
DEFAULTS = {**dict.fromkeys(NUMBERS, 0), "ROTATED": 1, "VALUE_ROTATED": 1, "UNROTATE": 1, "ROTATE_QUERIES": 1, "SAME_SLOTS": 1}
PAIR = ("i8", "tq4")
LIKE_OTHERS = r"_d(32|48|64|96|192|256)$|^tqkv_(?!attend_d|attend_matrix)\w+_d(80|448|1024)$"
# What a pipeline may have besides. Names of function constants: those that change.
EVERYTHING = ("MANY_QUERIES", "SOFTCAP", "SHORT_STORE", "SINKS", "CENTER", "VALUE_CENTER", "PAGES", "VALUE_PAGES", "TREE", "BATCH", "LIST")
OPTIONS = {"": {}, "everything": dict.fromkeys(EVERYTHING, 1),
           **{name.lower(): {name: 1 - DEFAULTS[name]} for name in NUMBERS
              if name not in ("FORMAT", "VALUE_FORMAT", "COLUMNS", "TYPE", "VALUE_TYPE")},
           "f16": {"TYPE": 1, "VALUE_TYPE": 1}, "bf16": {"TYPE": 2, "VALUE_TYPE": 2}}
MINUS_INFINITY = "0xFFF0000000000000" # the maximum of nothing, twice, where a path is of a context without positions
Case = collections.namedtuple("Case", "kernel formats columns option")
Found = collections.namedtuple("Found", "arrays pointers rolled calls products")


def most_columns(kernel):
    head_dim = int(kernel.rsplit("_d", 1)[1].split("_")[0])
    if "attend_matrix" in kernel or "index_scores" in kernel:
        return 32 if head_dim <= 128 else 8
    return 8 if head_dim <= 256 else 2048 // head_dim


def cases(kernel, constants, everything):
    """The pipelines of a kernel that are looked at."""
    used = {number for _, _, number in constants}
    options = [name for name, changed in OPTIONS.items() if not changed or {NUMBERS[n] for n in changed} & used]
    names = list(FORMATS)
    pairs = list(zip(names, names[3:] + names[:3]))
    if NUMBERS["FORMAT"] not in used or NUMBERS["VALUE_FORMAT"] not in used:
        pairs = [(f,) for f in names] if NUMBERS["FORMAT"] in used else [()]
    elif kernel.endswith("_d128"):
        pairs = [(f, g) for f in names for g in names]
    usual = PAIR[:len(pairs[0])]
    if NUMBERS["COLUMNS"] not in used:
        columns, middle = [0], 0
    else:
        most = most_columns(kernel)
        columns = [n for n in (1, 2, 4, 8, 16, 32) if n <= most and (n >= 8 or "matrix" not in kernel and "scores" not in kernel)]
        middle = columns[len(columns) // 2]
    if not everything:
        if re.search(LIKE_OTHERS, kernel):
            return []
        found = [Case(kernel, usual, middle, "")]
        if kernel.endswith("_d128"):
            found += [Case(kernel, ("f16", "f16")[:len(usual)], columns[-1], ""), Case(kernel, usual, columns[0], "everything")]
        if kernel == "tqkv_attend_d128":
            found += [Case(kernel, usual, n, "") for n in columns if n != middle]
        if re.search(r"attend(_matrix)?_d128$", kernel):
            found += [Case(kernel, usual, n, "strands") for n in columns if n <= 16]
        if re.search(r"attend(_matrix)?_d(448|512)$", kernel):
            found.append(Case(kernel, ("tq4", "tq4"), columns[-1], "tail_format"))
        return found
    found = [Case(kernel, pair, middle, "") for pair in pairs]
    found += [Case(kernel, (f, f)[:len(usual)], n, "") for f in names for n in columns]
    found += [Case(kernel, pair, middle, option) for option in options for pair in (usual, ("f16", "tq5")[:len(usual)])]
    return list(dict.fromkeys(found))


def name_of(case):
    return "/".join(filter(None, (case.kernel[5:], "-".join(case.formats), str(case.columns or ""), case.option)))


def fixed(text, constants, values):
    """The module with its function constants as constants."""
    text = launch.portable(text, "spir64-unknown-unknown")
    for name, _, number in constants:
        own = re.escape(f"@_ZL{len(name)}{name}")
        text, n = re.subn(rf"(?m)^({own} = internal unnamed_addr addrspace\(2\)) global (\S+) undef",
                          rf"\1 constant \2 {values[number]}", text)
        reader.expect(n == 1, f"no global of {name}")
    return text


def is_of_thread(kind):
    return kind.endswith("*") and not re.search(r"addrspace\(\d\)\*$", kind)


def specialise(text, constants, case):
    values = {NUMBERS[name]: value for name, value in {**DEFAULTS, **OPTIONS[case.option]}.items()}
    formats = [FORMATS[f] for f in case.formats] + [0, 0]
    values.update({NUMBERS["FORMAT"]: formats[0], NUMBERS["VALUE_FORMAT"]: formats[1], NUMBERS["COLUMNS"]: case.columns})
    done = subprocess.run(OPT, input=fixed(text, constants, values), capture_output=True, text=True, check=False)
    reader.expect(done.returncode == 0, done.stderr[:300])
    body = re.search(rf"(?ms)^define .*@{case.kernel}\(.*?^}}$", done.stdout).group(0)
    chosen = re.findall(r"= (?:phi (.*?) \[|select i1 [^,]+, (\S.*?) [%@\w]+,)", body)
    calls = re.findall(r"call [^@\n]*@(air\.[\w.]+)\((.*)\)", body)
    return Found(re.findall(r"= alloca (.*?), align", body), [kind for kind in map("".join, chosen) if is_of_thread(kind)],
                 done.stderr.count("loop not unrolled"),
                 [call for call, operands in calls if "%" not in operands and "barrier" not in call
                  and set(operands.split(", ")) != {"float " + MINUS_INFINITY}], len(re.findall(r"call .*multiply_accumulate", body)))


def check(found, case):
    reader.expect(not found.arrays, f"in thread memory: {', '.join(found.arrays)}")
    reader.expect(not found.pointers, f"pointers to thread memory that are chosen: {', '.join(found.pointers)}")
    reader.expect(not found.rolled, f"{found.rolled} loops are not unrolled")
    reader.expect(not found.calls, f"constants that are not calculated: {', '.join(found.calls)}")
    if "attend_matrix" in case.kernel or "index_scores" in case.kernel:
        head_dim = int(case.kernel.rsplit("_d", 1)[1])
        matrices = 1 if case.columns <= 8 else 2 if case.columns <= 16 else 4
        wanted = head_dim * matrices
        if "index_scores" in case.kernel: # values are the other half; where a lane loads its part of a row at once, two tiles
            width = 16 if case.formats[0] == "f16" else 8 if case.formats[0] in ("i8", "tq8") or "bytes" in case.formats[0] else 4
            wanted = wanted // 2 * (2 if head_dim * width <= 512 else 1)
        if head_dim > 256: # scores of a whole row, and of a tail; values of a part
            wanted = (head_dim // 2 + 32 + 32 * (case.option == "tail_format")) * matrices
        elif case.option == "strands" and "index_scores" not in case.kernel and case.columns <= 16: # of a strand, and of a stretch
            wanted *= 2
        reader.expect(found.products == wanted, f"{found.products} products, not {wanted}")


def main():
    path, *rest = sys.argv[1:]
    flags, parts = [r for r in rest if r.startswith("--")], [r for r in rest if not r.startswith("--")]
    work = []
    for function in reader.read(path).functions:
        listed = [c for c in cases(function.name, function.constants, "--all" in flags)
                  if not parts or any(part in name_of(c) for part in parts)]
        text = reader.disassemble(function.bitcode, 14) if listed and "--list" not in flags else ""
        work += [(text, function.constants, case) for case in listed]
    if "--list" in flags:
        print("\n".join(name_of(case) for _, _, case in work))
        return 0
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool: # a process runs one optimiser at a time
        return reader.run_cases((name_of(case), functools.partial(check, found, case))
                                for (_, _, case), found in zip(work, pool.map(specialise, *zip(*work))))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Compares a library with libraries made by Apple's compiler, and prints what of it none of them has.

usage: compare.py LIBRARY FOLDER     FOLDER: of .metallib files, of any target

Compared are the shapes of metadata nodes, kinds of bitcode records and how long they are, numbers and names of
attributes, kinds of instructions, and functions with their signatures. Numbers and names inside nodes are left out.
"""
import collections
import glob
import os
import pathlib
import re
import struct
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from module import READ_OF, arguments  # noqa: E402
from reader import attributes  # noqa: E402

# Kinds of records whose length says which version of LLVM reads them.
MEASURED = ("IDENTIFICATION_BLOCK_ID", "MODULE_BLOCK", "TYPE_BLOCK_ID")


def bitcodes(path):
    """The wrapped modules in a library, wherever its tags say: Apple's have tags that reader.py does not take."""
    data = pathlib.Path(path).read_bytes()
    start, size = struct.unpack_from("<2Q", data, 72)
    at = data.find(b"\xde\xc0\x17\x0b", start)
    while 0 <= at < start + size:
        _, _, offset, length, _ = struct.unpack_from("<5I", data, at)
        yield data[at:at + offset + length]
        at = data.find(b"\xde\xc0\x17\x0b", at + offset + length)


def run(command, bitcode):
    done = subprocess.run(command, input=bitcode, capture_output=True, check=False)
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def shape(node):
    """A metadata node without its numbers and names."""
    node = re.sub(r'!"air\.(arg_name|arg_type_name)", !"[^"]*"', r'!"air.\1", NAME', node)
    node = re.sub(r', !"air\.arg_unused"', "", node)
    node = re.sub(r"\bi32 -?\d+", "i32", re.sub(r"(?<!\w)!\d+", "!N", node))
    return re.sub(r"@[\w.$]+", "@G", node)


def metadata(text):
    nodes = dict(re.findall(r"(?m)^!(\d+) = (?:distinct )?!\{(.*)\}$", text))
    for name, content in re.findall(r"(?m)^!([a-z][\w.]+) = !\{(.*)\}$", text):
        if not name.startswith("air.") and name != "llvm.module.flags":
            continue
        for n in re.findall(r"!(\d+)", content):
            if name != "air.kernel":
                yield name, re.sub(r'^(i32|i8|i16|float|i64) addrspace|(?<=@G, )!"\w+", !"\w+"', "T", shape(nodes[n]))
                continue
            for argument in re.findall(r"!(\d+)", nodes.get(nodes[n].rsplit("!", 1)[1], "")):
                node = nodes[argument]
                yield "argument", shape(node)
                info = re.search(r'"air\.struct_type_info", !(\d+)', node)
                fields = arguments(nodes[info.group(1)]) if info else []
                yield from (("field", shape(re.sub(r'^!"(?!air\.).*"$', "S", field))) for field in fields)


def functions(text):
    for result, name, parameters in re.findall(r"(?m)^declare (?:\S+ )*?(\S+) @((?:air|llvm)\.[\w.]+)\((.*?)\)(?: |$)", text):
        parameters = re.sub(r" (?:nocapture|noundef|readonly|writeonly|readnone|immarg|zeroext|signext|nonnull)\b", "", parameters)
        yield "function", f"{result} {name}({parameters})"


def instructions(text):
    for line in re.findall(r"(?m)^  (?:%\S+ = )?(?:tail |musttail )?(\w+)", text):
        yield "instruction", line
    yield from (("global", re.sub(r"@[\w.$]+|i\d+|float|half|align \d+|local_|\d+", "", g)[:90])
                for g in re.findall(r"(?m)^@\S+ = .*(?:fc_initializer|global_ctors).*$", text))


def records(bitcode):
    """Kinds of records of each block, for some with the number of operands; attributes."""
    blocks = []
    for line in run(["llvm-bcanalyzer-14", "-dump"], bitcode).splitlines():
        line = line.strip()
        if re.match(r"<[\w ]+ NumWords=", line):
            blocks.append(line[1:].split()[0])
        elif line.startswith("</"):
            blocks and blocks.pop()
        else:
            match = re.match(r"<(\w+)\b([^>]*)", line)
            block = blocks[-1] if blocks else ""
            if not match or "METADATA_STRINGS" in line:
                continue
            operands = [int(n) for n in re.findall(r"\bop\d+=(-?\d+)", match.group(2))]
            yield "record", f"{block} {match.group(1)}"
            if block in MEASURED and match.group(1) in ("FUNCTION", "GLOBALVAR", "VERSION", "EPOCH"):
                yield "length", (f"{block} {match.group(1)}", len(operands))
            if block == "PARAMATTR_GROUP_BLOCK_ID":
                yield from (("attribute", a) for a in attributes(operands))


def facts(path):
    found, n = collections.defaultdict(set), 0
    for bitcode in bitcodes(path):
        text = next(filter(None, (run([f"llvm-dis-{v}", "-o", "-", *more], bitcode)
                                  for v, more in ((14, ()), (15, ("-opaque-pointers=0",)), (16, ("-opaque-pointers=0",))))), "")
        if not text:
            continue
        n += 1
        for kind, what in [*metadata(text), *functions(text), *instructions(text), *records(bitcode)]:
            found[kind].add(what)
    return found, n


def main():
    ours, n_ours = facts(sys.argv[1])
    theirs, n_theirs = collections.defaultdict(set), 0
    paths = sorted(glob.glob(os.path.join(sys.argv[2], "**", "*.metallib"), recursive=True))
    for path in paths:
        found, n = facts(path)
        n_theirs += n
        for kind, what in found.items():
            theirs[kind] |= what
    if not n_theirs or not n_ours:
        sys.exit("no module could be read")
    print(f"{n_ours} modules of {sys.argv[1]}, {n_theirs} of {len(paths)} libraries in {sys.argv[2]}")
    longest = {}
    for name, length in theirs.pop("length", ()):
        longest[name] = max(length, longest.get(name, 0))
    for name, length in sorted(ours.pop("length", ())):
        if length > longest.get(name, 0):
            print(f"only ours: {name} of {length} operands, theirs up to {longest.get(name, 0)}")
    known = {line for line in READ_OF.split("\n") if line}
    for kind in sorted(ours):
        only = sorted(ours[kind] - theirs[kind], key=str)
        print(f"{kind}: {len(ours[kind])} kinds, {len(only)} of them only ours")
        for what in only:
            print(f"only ours: {kind} {what}{' (from published text, see module.py)' if what in known else ''}")


if __name__ == "__main__":
    main()

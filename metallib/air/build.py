#!/usr/bin/env python3
"""Builds a Metal library of the shaders with stock clang and LLVM 14, for machines without Apple's compiler.

usage: build.py [--target macos13] [--llvm 14] [--keep FOLDER] [--only REGULAR_EXPRESSION] -o OUTPUT SHADER.metal...

clang makes LLVM IR of the shaders over shim/metal_stdlib. opt optimises each kernel in a module of its own under AIR's
data layout. lower.py and metadata.py give it AIR's conventions, container.py puts the bitcode into Apple's container.
Whatever they were not made for is refused, with its line in the shader. The same input gives the same bytes.
"""
import argparse
import collections
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..")]
import container  # noqa: E402
import lower  # noqa: E402
import metadata  # noqa: E402
import msl  # noqa: E402

Target = collections.namedtuple("Target", "system version triple air metal sdk frame_pointer format")
TARGETS = {
    "macos13": Target("macosx", 13, "air64-apple-macosx13.0.0", (2, 5), (3, 0), (13, 3), False, 7),
    "macos14": Target("macosx", 14, "air64-apple-macosx14.0.0", (2, 6), (3, 1), (14, 4), True, 7),
    "macos15": Target("macosx", 15, "air64-apple-macosx15.0.0", (2, 7), (3, 2), (15, 5), True, 8),
    "macos26": Target("macosx", 26, "air64_v28-apple-macosx26.0.0", (2, 8), (4, 0), (26, 2), True, 9),
    "ios16": Target("ios", 16, "air64-apple-ios16.0.0", (2, 5), (3, 0), (16, 4), False, 7)}
# spir64: clang leaves structs in arguments alone there. No line of the standard headers is read.
CLANG = ["-x", "c++", "-std=c++17", "-target", "spir64-unknown-unknown", "-nostdinc", "-nostdinc++", "-isystem",
         os.path.join(HERE, "shim"), "-O2", "-Xclang", "-disable-llvm-passes", "-ffp-contract=off", "-fno-jump-tables",
         "-fno-strict-aliasing", "-fno-exceptions", "-fno-rtti", "-fno-ident", "-Wall", "-Wextra", "-Werror",
         "-Wno-unknown-pragmas", "-emit-llvm", "-c", "-Xclang", "-fdump-record-layouts"]
# As Apple's: a loop to be unrolled stays a loop with its metadata. The back end unrolls it when it knows the function
# constants, unless jump threading has given it a second way back to its start. A vector that is loaded stays one load.
# Functions are inlined first, so that convergent calls are seen.
OPT = ["-data-layout=" + lower.LAYOUT, "-pragma-unroll-threshold=0", "-unroll-threshold=0", "-unroll-full-max-count=0",
       "-jump-threading-threshold=0", "-vectorize-loops=false", "-vectorize-slp=false", "-disable-vector-combine",
       "-disable-loop-idiom-memcpy", "-S", "-o", "-",
       "-passes=internalize,globaldce,always-inline,globaldce,default<O2>,globaldce,instnamer"]
Source = collections.namedtuple("Source", "path bitcode structs declared kernels")
Built = collections.namedtuple("Built", "name bitcode constants refusal")


def run(command):
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.decode().splitlines() if "loop not unrolled" not in line]
        raise metadata.Refusal("\n".join(errors[:20]) or " ".join(command)[:300])
    return done.stdout


class Builder:
    def __init__(self, args, lines=False):
        self.args, self.target, self.folder = args, TARGETS[args.target], args.keep
        self.lines = ["-gline-tables-only"] if lines else []
        # As Apple's compilers of the time wrote it: a reader takes what it knew.
        scope = 4 if self.target.system == "macosx" and self.target.version >= 15 else 1
        metal = "{}{}0".format(*self.target.metal)
        self.defines = [f"-D__METAL_VERSION__={metal}", f"-DAIR_SIMDGROUP_SCOPE={scope}"]

    def prepare(self):
        """Copies of the shaders without attributes; lines stay lines. Function constants are external."""
        for path in self.args.shaders:
            for part in msl.included(path):
                text = msl.FUNCTION_CONSTANT.sub(r"extern constant \1 \2;", msl.read(part))
                with open(os.path.join(self.folder, os.path.basename(part)), "w", encoding="utf-8") as f:
                    f.write(f'#line 1 "{part}"\n' + msl.ATTRIBUTE.sub(msl.blank, text))

    def compile(self, path):
        """The bitcode of one file, what it declares, and its kernels."""
        base = os.path.join(self.folder, os.path.basename(path))
        dump = run([f"clang-{self.args.llvm}", *CLANG, *self.lines, *self.defines, "-I" + (os.path.dirname(path) or "."), base, "-o",
                    base + ".bc"]).decode()
        parts = msl.included(path)
        numbers = msl.constant_numbers(path)
        declared = [(kind, name, numbers[index]) for part in parts
                    for kind, name, index in msl.FUNCTION_CONSTANT.findall(msl.read(part))]
        kernels = [k for k in msl.kernels(path) if re.fullmatch(self.args.only, k[0])]
        return Source(path, base + ".bc", metadata.layouts(dump), declared, kernels)

    def assemble(self, name, text):
        """llvm-as would give LLVM's own functions attributes that readers before macOS 14 do not know, so their names are
        put in afterwards."""
        base = os.path.join(self.folder, name)
        with open(base + ".ll", "w", encoding="utf-8") as f:
            f.write(text)
        bitcode = run([f"llvm-as-{self.args.llvm}", "-preserve-bc-uselistorder=false", base + ".ll", "-o", "-"])
        bitcode = bitcode.replace(b"llwm.", b"llvm.")
        with open(base + ".bc", "wb") as f:
            f.write(bitcode)
        return bitcode

    def kernel(self, source, name, arguments):
        raw = run([f"opt-{self.args.llvm}", *OPT, f"-internalize-public-api-list={name}", source.bitcode]).decode()
        module = lower.Kernel(name, raw)
        module.lower()
        module.split_tables()
        module.set_constants(source.declared, os.path.basename(source.path))
        text = module.text(self.target, arguments, source.structs)
        return Built(name, b"" if self.lines else self.assemble(name, text), module.listed, "")


def build_kernel(task):
    builder, source, name, arguments = task
    try:
        return builder.kernel(source, name, arguments)
    except metadata.Refusal as refusal:
        return Built(name, b"", [], str(refusal))


def build(args, lines=False):
    """[Built], in the order of the sources."""
    builder = Builder(args, lines)
    builder.prepare()
    with multiprocessing.Pool() as pool:
        sources = pool.map(builder.compile, args.shaders)
        tasks = [(builder, s, *k) for s in sources for k in s.kernels]
        largest_first = sorted(tasks, key=lambda t: -os.path.getsize(t[1].bitcode))
        built = {b.name: b for b in pool.imap_unordered(build_kernel, largest_first)}
    return [built[t[2]] for t in tasks]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="macos13", choices=TARGETS)
    parser.add_argument("--llvm", default="14")
    parser.add_argument("--keep", help="a folder for what lies between")
    parser.add_argument("--only", default=".*", help="the kernels whose names match")
    parser.add_argument("-o", required=True)
    parser.add_argument("shaders", nargs="+")
    args = parser.parse_args()
    temporary = None if args.keep else tempfile.mkdtemp()
    args.keep = args.keep or temporary
    os.makedirs(args.keep, exist_ok=True)
    try:
        functions = build(args)
        if any(f.refusal for f in functions):
            with_lines = {f.name: f.refusal for f in build(args, lines=True)}
            raise metadata.Refusal("\n".join(f"{f.name}: {with_lines[f.name] or f.refusal}" for f in functions if f.refusal))
        library = container.library([f[:3] for f in functions], TARGETS[args.target], os.path.basename(args.o))
    except metadata.Refusal as refusal:
        sys.exit(f"no library is written:\n{refusal}")
    finally:
        if temporary:
            shutil.rmtree(temporary)
    with open(args.o + ".part", "wb") as f:
        f.write(library)
    os.replace(args.o + ".part", args.o)
    print(f"{args.o}: {len(functions)} kernels, {len(library)} bytes, {args.target}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Checks a Metal library, the reader that checks it, and what the builder refuses.

usage: check.py LIBRARY TQKV.METAL BUILD_FOLDER [--list] [part of a name]...

library/: the container; each module compared with its shader; every version of LLVM that is installed reads them.
damage/: changed libraries are refused. refusals/: shaders that the builder must refuse, with their line. source/: the
amalgamated source has the same kernels.
"""
import ctypes
import functools
import glob
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..", "..")
sys.path[:0] = [HERE, os.path.join(ROOT, "metallib"), os.path.join(ROOT, "metallib", "air")]
import compare  # noqa: E402
import container  # noqa: E402
import launch  # noqa: E402
import msl  # noqa: E402
import reader  # noqa: E402
import samples  # noqa: E402
from build import TARGETS  # noqa: E402
from module import Module  # noqa: E402

READERS = (14, 15, 16, 19)
TRIPLES = {("macos", 13): "air64-apple-macosx13.0.0", ("macos", 14): "air64-apple-macosx14.0.0",
           ("macos", 15): "air64-apple-macosx15.0.0", ("macos", 26): "air64_v28-apple-macosx26.0.0",
           ("ios", 16): "air64-apple-ios16.0.0"}
# Numbers of attributes in bitcode: nounwind, convergent, readnone; of parameters nocapture, readonly, dereferenceable.
ATTRIBUTES = {18, 43, 20, 11, 21, 41}


@functools.lru_cache(None)
def shaders():
    """{kernel: (file, arguments)} of shaders/"""
    found = {}
    for path in sorted(glob.glob(os.path.join(ROOT, "shaders", "*.metal"))):
        found.update({name: (path, arguments) for name, arguments in msl.kernels(path)})
    return found


@functools.lru_cache(None)
def declared(path):
    """{name: (type, index)} of the function constants that a shader sees."""
    numbers = msl.constant_numbers(path)
    parts = "".join(msl.read(part) for part in msl.included(path))
    return {name: (kind, numbers[index]) for kind, name, index in msl.FUNCTION_CONSTANT.findall(parts)}


def check_module(library, function, text=None):
    path, arguments = shaders()[function.name]
    known = declared(path)
    for name, kind, index in function.constants:
        reader.expect(known.get(name) == (kind, index), f"{function.name}: function constant {name}, {kind}, {index}")
    module = Module(function.name, text or reader.disassemble(function.bitcode, 14))
    module.check(arguments, function.constants, library, TRIPLES[library.system, library.version])


def refused(action, words):
    """The action must end with a Damage that has these words."""
    try:
        action()
    except reader.Damage as damage:
        reader.expect(re.search(words, str(damage)), f"refused with \"{damage}\", without \"{words}\"")
        return
    raise reader.Damage("nothing was reported")


def assembled(text, llvm=14):
    done = subprocess.run([f"llvm-as-{llvm}", "-o", "-"], input=text.encode(), capture_output=True, check=False)
    reader.expect(done.returncode == 0, done.stderr.decode()[:300])
    return done.stdout


def attributes(bitcode):
    """Numbers of all attributes in the bitcode. LLVM adds to them when it reads a module, so they are looked up in its
    records."""
    return {what for kind, what in compare.records(bitcode) if kind == "attribute" and isinstance(what, int)}


class Tests:
    QUICK = r"tqkv_(?!attend_d)\w+_d32|tqkv_tables"  # of the amalgamated source; the rest takes seconds

    def __init__(self, path, source, folder):
        self.library, self.source, self.folder = reader.read(path), source, folder
        self.functions = {f.name: f for f in self.library.functions}
        self.refused = ""
        self.small = self.functions["tqkv_tables"], self.functions["tqkv_decode_d32"]

    def packed(self, *functions):
        """A library of these functions alone; (name, constants, bitcode)."""
        kinds = {name: number for number, name in reader.CONSTANT_TYPES.items()}
        items = [(name, bitcode, [(n, kinds[k], i) for n, k, i in constants]) for name, constants, bitcode in functions]
        return container.library(items, TARGETS[f"{self.library.system}{self.library.version}"], "packed.metallib")

    def cases(self):
        yield "library/kernels", self.kernels
        for name, function in self.functions.items():
            yield f"library/module/{name}", lambda f=function: check_module(self.library, f)
        yield "library/attributes", self.attributes
        for llvm in READERS:
            if shutil.which(f"llvm-dis-{llvm}"):
                yield f"library/read_by_llvm_{llvm}", lambda v=llvm: self.read_by(v)
        for part in ("header", "functions", "extension", "public", "private", "code"):
            yield f"damage/flipped_byte/{part}", lambda p=part: self.flipped(p)
        yield "damage/truncated", self.truncated
        yield "damage/unknown_function", self.unknown_function
        yield "damage/opaque_pointer", self.opaque_pointer
        for name, (_, line, said) in samples.refused().items():
            yield f"refusals/{name}", lambda n=name, i=line, s=said: self.refusal(n, i, s)
        yield "lowering", self.lowering
        yield "targets", self.targets
        yield "source/same_kernels", self.same_kernels

    def kernels(self):
        reader.expect(sorted(self.functions) == sorted(shaders()), "the kernels are not those of shaders/")
        one = [name for name in self.functions  # the others: of two head_dims or of none; by matrices only some have kernels
               if re.search(r"(?<!_matrix)(?<!_scores)_d\d+$", name)]
        dims = {int(d) for d in re.findall(r"_d(\d+)\b", " ".join(one))}
        families = {re.sub(r"_d\d+$", "", name) for name in one}
        reader.expect(len(one) == len(dims) * len(families), "a family lacks a head_dim")

    def attributes(self):
        for name, function in self.functions.items():
            if name.endswith("_d32") or name == "tqkv_tables":
                found = attributes(function.bitcode)
                reader.expect({18, 43} <= found <= ATTRIBUTES, f"{name}: attributes {sorted(found)}")

    def read_by(self, llvm):
        for function in self.functions.values():
            text = reader.disassemble(function.bitcode, llvm)
            reader.expect(f"@{function.name}(" in text, f"{function.name}: another module")

    def complete(self, data):
        """Everything that a reader can compare with the shaders and with the modules."""
        library = reader.Library(data)
        reader.expect([f.name for f in library.functions] == [f.name for f in self.small], "names")
        for function, text in zip(library.functions, self.texts):
            check_module(library, function, text)

    def flipped(self, part):
        data = bytearray(self.packed(*((f.name, f.constants, f.bitcode) for f in self.small)))
        self.texts = [reader.disassemble(f.bitcode, 14) for f in self.small]
        self.complete(data)
        public, private, code = (int.from_bytes(data[at:at + 8], "little") for at in (40, 56, 72))
        listed = 88 + int.from_bytes(data[32:40], "little") + 4
        start, end = {"header": (0, 88), "functions": (88, listed), "extension": (listed, public),
                      "public": (public, private), "private": (private, code), "code": (code, len(data))}[part]
        for at in range(start, end, max(1, (end - start) // 120)):
            data[at] ^= 1 << at % 8
            refused(lambda: self.complete(data), "")
            data[at] ^= 1 << at % 8

    def truncated(self):
        data = self.packed(*((f.name, f.constants, f.bitcode) for f in self.small))
        for size in [*range(0, 600, 7), *range(600, len(data), len(data) // 50), len(data) - 1]:
            refused(lambda n=size: reader.Library(data[:n]), "no Metal library|header: ")
        refused(lambda: reader.Library(data + b"\0"), "header: ")

    def changed(self, function, text, words, llvm=14):
        """A library with this text as the module is refused with these words."""
        data = self.packed((function.name, function.constants, assembled(text, llvm)))
        library = reader.Library(data)
        refused(lambda: check_module(library, library.functions[0]), words)

    def unknown_function(self):
        for function in self.small:
            text = reader.disassemble(function.bitcode, 14)
            text = re.sub(rf"(?m)^define void @{function.name}.*$", r"\g<0>\n  %of = call float @air.cos.f32(float 1.0)", text)
            self.changed(function, text + "declare float @air.cos.f32(float)\n", r"unknown function air\.cos\.f32")

    def opaque_pointer(self):
        text = reader.disassemble(self.small[0].bitcode, 14)
        opaque = re.sub(r"(?:%[\w.]+|\[[^][]*\]|i\d+|float|void \([^()]*\))(?: (addrspace\(\d\)))?\*+",
                        lambda m: "ptr" + (" " + m.group(1) if m.group(1) else ""), text)
        refused(lambda: Module(self.small[0].name, opaque).check([], [], self.library, ""), "opaque pointer")
        if shutil.which("llvm-as-19"):
            self.opaque_bitcode()

    def opaque_bitcode(self):
        """Bitcode of LLVM 19, which has no other pointers: LLVM 14 does not read it, or reads opaque ones."""
        function = self.small[0]
        text = reader.disassemble(function.bitcode, 19)
        reader.expect(" ptr addrspace(1)" in text, "LLVM 19 shows typed pointers")
        self.changed(function, text, "opaque pointer|LLVM 14: ", llvm=19)

    def build(self, output, *arguments):
        return subprocess.run([sys.executable, os.path.join(ROOT, "metallib", "air", "build.py"), *arguments, "-o", output],
                              capture_output=True, text=True, check=False)

    def built(self, output, *arguments):
        done = self.build(output, *arguments)
        reader.expect(done.returncode == 0, done.stderr[:600])
        return reader.read(output)

    def refuse(self, names):
        """What the builder says of these samples in one run; it must write no library."""
        folder = os.path.join(self.folder, "refusals")
        os.makedirs(folder + "/shaders", exist_ok=True)
        paths, output = [f"{folder}/shaders/{name}.metal" for name in names], f"{folder}/refused.metallib"
        for name, path in zip(names, paths):
            pathlib.Path(path).write_text(samples.refused()[name][0], encoding="utf-8")
        done = self.build(output, *paths)
        reader.expect(done.returncode == 1 and not glob.glob(output + "*"), "a library was written")
        return done.stderr

    def refusal(self, name, line, said):
        """clang's refusals end a run at once; the others come together."""
        if name in samples.BY_CLANG:
            text = self.refuse([name])
        else:
            if not self.refused:
                self.refused = self.refuse([n for n in samples.refused() if n not in samples.BY_CLANG])
            text = self.refused
        found = [t for t in text.splitlines() if f"{name}.metal:" in t]
        reader.expect(any(re.search(rf"{name}\.metal:{line}:.*(?:{said})", t) for t in found), f"line {line}: {found[:4]}")

    def lowering(self):
        """A kernel in older forms gives what it should: its bitcode, called from here."""
        folder = os.path.join(self.folder, "lowering", "shaders")
        os.makedirs(folder, exist_ok=True)
        base = os.path.join(folder, "lowered")
        pathlib.Path(base + ".metal").write_text(samples.LOWERED, encoding="utf-8")
        text = reader.disassemble(self.built(base + ".metallib", base + ".metal").functions[0].bitcode, 14)
        reader.expect(not re.search(r"@llvm\.|fneg|itofp|fpto[su]i|poison|freeze", text), "a newer form")
        pathlib.Path(base + ".ll").write_text(launch.native(text, []), encoding="utf-8")
        pathlib.Path(base + ".c").write_text(samples.CONVERSIONS, encoding="utf-8")
        for command in (["llc-14", "-relocation-model=pic", "-filetype=obj", base + ".ll", "-o", base + ".o"],
                        ["clang", "-shared", "-fPIC", base + ".o", base + ".c", "-o", base + ".so"]):
            subprocess.run(command, check=True)
        number = lambda x: struct.unpack("<I", struct.pack("<f", x))[0]
        x, out = [2**32 - 5, 3, number(2.5), number(9.75)], (ctypes.c_uint32 * 16)()
        ctypes.CDLL(os.path.abspath(base + ".so")).tqkv_lowered(out, (ctypes.c_uint32 * 4)(*x), bytes(range(16)))
        words, memory = samples.lowered(x, number)
        reader.expect(list(out)[:12] == words, f"words {list(out)[:12]}, not {words}")
        reader.expect(bytes(out)[48:] == memory, f"bytes {bytes(out)[48:].hex()}, not {memory.hex()}")

    def targets(self):
        """Each target's library: container, versions, one module."""
        for target in TARGETS:
            output = os.path.join(self.folder, f"{target}.metallib")
            shader = os.path.join(ROOT, "shaders", "tables.metal")
            library = self.built(output, "--target", target, "--only", "tqkv_tables", shader)
            reader.expect(f"{library.system}{library.version}" == target, f"{target}: made for {library.system} {library.version}")
            check_module(library, library.functions[0])

    def same_kernels(self):
        """The amalgamated source compiles to kernels with the same arguments and function constants."""
        output = os.path.join(self.folder, "source.metallib")
        folder = os.path.join(self.folder, "source", "shaders")
        os.makedirs(folder, exist_ok=True)
        shutil.copy(self.source, folder)
        library = self.built(output, "--only", self.QUICK, os.path.join(folder, os.path.basename(self.source)))
        expected = sorted(name for name in self.functions if re.fullmatch(self.QUICK, name))
        reader.expect(sorted(f.name for f in library.functions) == expected, "other kernels")
        for function in library.functions:
            pair = (function, self.functions[function.name])
            constants = [[c[1:] for c in f.constants] for f in pair]
            reader.expect(constants[0] == constants[1], f"{function.name}: other function constants")
            facts = [Module(f.name, reader.disassemble(f.bitcode, 14)).arguments for f in pair]
            for fact in facts[0] + facts[1]:
                fact.pop("struct_type_info", None)  # the number of a node
            reader.expect(facts[0] == facts[1], f"{function.name}: other arguments")


def main():
    path, source, folder, *rest = sys.argv[1:]
    list_only = rest[:1] == ["--list"]
    filters = rest[list_only:]
    os.makedirs(folder, exist_ok=True)
    chosen = [(name, test) for name, test in Tests(path, source, folder).cases()
              if not filters or any(part in name for part in filters)]
    if list_only:
        print(*(name for name, _ in chosen), sep="\n")
        return 0
    return reader.run_cases(chosen)


if __name__ == "__main__":
    sys.exit(main())

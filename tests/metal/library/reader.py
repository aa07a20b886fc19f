"""Reads Metal libraries without anything of the builder: the container, and what its modules declare.

Offsets, sizes and tags are those of metallib/README.md. Whatever does not fit is a Damage with the place in its text.
"""
import hashlib
import pathlib
import re
import struct
import subprocess

MAGIC, WRAPPER, BITCODE, KERNEL = b"MTLB", 0x0B17C0DE, b"BC\xc0\xde", 2
PLATFORMS = {(0x8001, 0x81): "macos", (0x0001, 0x82): "ios"}
# Version of the system: AIR, Metal, container.
VERSIONS = {("macos", 13): ((2, 5), (3, 0), 7), ("macos", 14): ((2, 6), (3, 1), 7), ("macos", 15): ((2, 7), (3, 2), 8),
            ("macos", 26): ((2, 8), (4, 0), 9), ("ios", 16): ((2, 5), (3, 0), 7)}
CONSTANT_TYPES = {3: "float", 29: "int", 33: "uint", 41: "ushort", 49: "uchar", 53: "bool"}


class Damage(Exception):
    pass


def expect(true, what):
    if not true:
        raise Damage(what)


def tags(data, at, end, where):
    """{tag: payload} and the offset behind ENDT."""
    found = {}
    while True:
        name = data[at:at + 4]
        expect(at + 4 <= end and len(name) == 4, f"{where}: no ENDT before its end")
        at += 4
        if name == b"ENDT":
            return found, at
        expect(re.fullmatch(rb"[A-Z]{4}", name), f"{where}: a tag {name!r}")
        expect(at + 2 <= end, f"{where}: ends inside {name.decode()}")
        size = struct.unpack_from("<I" if name == b"RBUF" else "<H", data, at)[0]
        at += 4 if name == b"RBUF" else 2
        expect(at + size <= end, f"{where}: {name.decode()} ends behind it")
        expect(name not in found, f"{where}: two {name.decode()}")
        found[name] = data[at:at + size]
        at += size


def sized_tags(data, at, end, where):
    expect(at + 4 <= end, f"{where}: ends inside its size")
    size, = struct.unpack_from("<I", data, at)
    expect(8 <= size <= end - at, f"{where}: a size of {size}")
    found, behind = tags(data, at + 4, at + size, where)
    expect(behind == at + size, f"{where}: {at + size - behind} bytes behind its ENDT")
    return found, behind


def constants(payload, where):
    """[(name, type, index)]"""
    count, = struct.unpack_from("<H", payload)
    at, found = 2, []
    for _ in range(count):
        end = payload.find(b"\0", at)
        expect(0 < end <= len(payload) - 5, f"{where}: CNST ends early")
        kind, index, active = struct.unpack_from("<BHB", payload, end + 1)
        expect(kind in CONSTANT_TYPES and active == 1, f"{where}: a constant of type {kind}, active {active}")
        found.append((payload[at:end].decode(), CONSTANT_TYPES[kind], index))
        at = end + 5
    expect(at == len(payload), f"{where}: {len(payload) - at} bytes behind CNST's constants")
    expect([c[2] for c in found] == sorted({c[2] for c in found}), f"{where}: constants out of order")
    return found


def check_bitcode(blob, where):
    expect(len(blob) >= 24, f"{where}: bitcode of {len(blob)} bytes")
    magic, version, offset, size, processor = struct.unpack_from("<5I", blob)
    expect((magic, version, offset, processor) == (WRAPPER, 0, 20, 0xFFFFFFFF), f"{where}: not in LLVM's wrapper for Darwin")
    expect(blob[20:24] == BITCODE, f"{where}: no bitcode in the wrapper")
    expect(len(blob) % 16 == 0 and 0 <= len(blob) - 20 - size < 16, f"{where}: a wrapper of {size} bytes in {len(blob)}")
    expect(not any(blob[20 + size:]), f"{where}: padding that is not zero")


class Function:
    def __init__(self, name, constant_list, blob):
        self.name, self.constants, self.bitcode = name, constant_list, blob


class Library:
    def __init__(self, data):
        try:
            self.parse(bytes(data))
        except (struct.error, UnicodeDecodeError) as error:
            raise Damage(f"a field of another size: {error}") from None

    def parse(self, data):
        expect(len(data) >= 88 and data[:4] == MAGIC, "no Metal library")
        platform, major, self.format, kind, system, self.version, minor = struct.unpack_from("<HHHBBHH", data, 4)
        size, functions, functions_size, *rest = struct.unpack_from("<9Q", data, 16)
        expect(size == len(data), f"header: {size} bytes, not {len(data)}")
        expect((platform, system) in PLATFORMS, f"header: platform {platform:#x}, system {system:#x}")
        self.system = PLATFORMS[platform, system]
        expect(major == 2 and kind == 0 and minor == 0, f"header: format {major}, kind {kind}, minor version {minor}")
        expect((self.system, self.version) in VERSIONS, f"header: {self.system} {self.version}")
        self.air, self.metal, number = VERSIONS[self.system, self.version]
        expect(self.format == number, f"header: format 2.{self.format} for {self.system} {self.version}")
        sections = dict(zip(("public", "private", "code"), zip(rest[::2], rest[1::2])))
        at = functions + functions_size + 4
        expect(functions == 88 and at <= sections["public"][0], "header: the function list is not behind it")
        end = sections["public"][0]
        for name, (start, length) in sections.items():
            expect(start == end and start + length <= size, f"header: the {name} section at {start} is not at {end}")
            end = start + length
        extension, behind = tags(data, at, sections["public"][0], "extension")
        expect(behind == sections["public"][0], "extension: not up to the public section")
        if b"HDYN" in extension:
            start, length = struct.unpack("<2Q", extension[b"HDYN"])
            expect(start == end, "extension: HDYN is not behind the bitcode")
            dynamic, end = tags(data, start, start + length, "dynamic header")
            expect(b"NAME" in dynamic, "dynamic header: no NAME")
        expect((b"HDYN" in extension) == (self.format >= 9), "extension: HDYN does not go with the format")
        expect(end == size, f"header: {size - end} bytes behind the last section")
        expect(len(extension.get(b"UUID", b"")) == 16, "extension: no UUID")
        self.functions = self.read_functions(data, functions, at, sections)
        identity = bytearray(hashlib.sha256(b"".join(f.bitcode for f in self.functions)).digest()[:16])
        identity[6], identity[8] = identity[6] & 0x0F | 0x40, identity[8] & 0x3F | 0x80
        expect(extension[b"UUID"] == identity, "extension: UUID is not that of the bitcode")

    def read_functions(self, data, at, end, sections):
        count, = struct.unpack_from("<I", data, at)
        at, found = at + 4, []
        places = [sections[name][0] for name in ("public", "private", "code")]
        for i in range(count):
            entry, at = sized_tags(data, at, end, f"function {i}")
            name = entry.get(b"NAME", b"\0")[:-1].decode("latin1")
            expect(entry.get(b"NAME", b"")[-1:] == b"\0", f"function {i}: no NAME that ends with 0")
            expect(set(entry) == {b"NAME", b"TYPE", b"HASH", b"OFFT", b"VERS", b"MDSZ"}, f"{name}: tags {sorted(entry)}")
            expect(entry[b"TYPE"] == bytes([KERNEL]), f"{name}: not a kernel")
            expect(struct.unpack("<4H", entry[b"VERS"]) == (*self.air, *self.metal), f"{name}: VERS")
            offsets = [place - sections[section][0] for place, section in zip(places, sections)]
            expect(list(struct.unpack("<3Q", entry[b"OFFT"])) == offsets, f"{name}: OFFT")
            size, = struct.unpack("<Q", entry[b"MDSZ"])
            blob = data[places[2]:places[2] + size]
            expect(hashlib.sha256(blob).digest() == entry[b"HASH"], f"{name}: HASH is not that of the bitcode")
            check_bitcode(blob, name)
            public, places[0] = sized_tags(data, places[0], sum(sections["public"]), f"{name}: public metadata")
            private, places[1] = sized_tags(data, places[1], sum(sections["private"]), f"{name}: private metadata")
            expect(set(public) <= {b"CNST"} and not private, f"{name}: metadata {sorted(public)} {sorted(private)}")
            found.append(Function(name, constants(public[b"CNST"], name) if public else [], blob))
            places[2] += size
        expect(at == end, f"functions: {end - at} bytes behind the list")
        expect(places == [sum(s) for s in sections.values()], "functions: not up to the ends of their sections")
        expect(len({f.name for f in found}) == len(found), "functions: two of one name")
        return found


def read(path):
    return Library(pathlib.Path(path).read_bytes())


def disassemble(bitcode, llvm):
    """Text by that version of LLVM, with typed pointers where it can."""
    typed = ["-opaque-pointers=0"] if llvm in (15, 16) else []
    done = subprocess.run([f"llvm-dis-{llvm}", *typed, "-o", "-"], input=bitcode, capture_output=True, check=False)
    expect(done.returncode == 0, f"LLVM {llvm}: {done.stderr.decode(errors='replace').strip()[:200]}")
    return done.stdout.decode()


def run_cases(cases):
    """cases: (name, function), which ends with a Damage if it fails. Returns the exit status."""
    passed = failed = 0
    for name, test in cases:
        try:
            test()
            passed += 1
        except Damage as damage:
            failed += 1
            print(f"FAIL {name}: {damage}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return failed != 0 or passed == 0


def attributes(operands):
    """Numbers and names of the attributes that a record has behind two operands: (0, number), (1, number, value), (3, text, 0) or
    (4, text, 0, text, 0)."""
    at = 2
    while at < len(operands):
        kind = operands[at]
        if kind < 2:
            yield operands[at + 1]
            at += 2 + kind
        elif kind < 5:
            end = operands.index(0, at + 1)
            yield "".join(map(chr, operands[at + 1:end]))
            at = (end if kind == 3 else operands.index(0, end + 1)) + 1
        else:
            at += 3

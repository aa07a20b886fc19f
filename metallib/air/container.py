"""Writes Apple's MetalLib container around modules of AIR bitcode, one a kernel. All integers are little-endian."""
import hashlib
import struct

PLATFORMS = {"macosx": (0x8001, 0x81), "ios": (0x0001, 0x82)}
HEADER_SIZE = 88
KERNEL = b"\2"


def tag(name, payload):
    return name + struct.pack("<H", len(payload)) + payload


def group(tags):
    """Tags with the size of them all in front, which counts itself."""
    content = b"".join(tags) + b"ENDT"
    return struct.pack("<I", len(content) + 4) + content


def checked(bitcode):
    """Bitcode in LLVM's wrapper for Darwin, padded to 16 bytes, as llvm-as writes it for Apple's triples."""
    magic, version, offset, size, processor = struct.unpack_from("<5I", bitcode)
    if (magic, version, offset, processor) != (0x0B17C0DE, 0, 20, 0xFFFFFFFF) or bitcode[20:24] != b"BC\xc0\xde" or \
            len(bitcode) % 16 or not 0 <= len(bitcode) - 20 - size < 16:
        raise SystemExit("llvm-as has not wrapped the bitcode as Apple's is")
    return bitcode


def constant_list(constants):
    """constants: [(name, MTLDataType, index)], by index."""
    items = [name.encode() + b"\0" + struct.pack("<BHB", kind, index, 1) for name, kind, index in constants]
    return tag(b"CNST", struct.pack("<H", len(items)) + b"".join(items)) if items else b""


def library(functions, target, name):
    """functions: [(name, bitcode, constants)]"""
    entries, public, private, code = [], b"", b"", b""
    for function, bitcode, constants in functions:
        entries.append(group([
            tag(b"NAME", function.encode() + b"\0"), tag(b"TYPE", KERNEL),
            tag(b"HASH", hashlib.sha256(checked(bitcode)).digest()),
            tag(b"OFFT", struct.pack("<3Q", len(public), len(private), len(code))),
            tag(b"VERS", struct.pack("<4H", *target.air, *target.metal)), tag(b"MDSZ", struct.pack("<Q", len(bitcode)))]))
        public += group([constant_list(constants)])
        private += group([])
        code += bitcode
    listed = struct.pack("<I", len(entries)) + b"".join(entries)
    identity = bytearray(hashlib.sha256(code).digest()[:16])  # a UUID of version 4 has these bits set
    identity[6], identity[8] = identity[6] & 0x0F | 0x40, identity[8] & 0x3F | 0x80
    extension = tag(b"UUID", bytes(identity)) + b"ENDT"
    # From format 2.9 on a dynamic header, at the end, has the library's name.
    dynamic = tag(b"NAME", name.encode() + b"\0") + b"ENDT" if target.format >= 9 else b""
    at_public = HEADER_SIZE + len(listed) + len(extension) + (len(tag(b"HDYN", bytes(16))) if dynamic else 0)
    at_private = at_public + len(public)
    at_code = at_private + len(private)
    at_end = at_code + len(code)
    if dynamic:
        extension = tag(b"HDYN", struct.pack("<2Q", at_end, len(dynamic))) + extension
    platform, system = PLATFORMS[target.system]
    # The size of the function list does not count its last ENDT.
    header = struct.pack("<4sHHHBBHH9Q", b"MTLB", platform, 2, target.format, 0, system, target.version, 0,
                         at_end + len(dynamic), HEADER_SIZE, len(listed) - 4, at_public, len(public), at_private,
                         len(private), at_code, len(code))
    return header + listed + extension + public + private + code + dynamic

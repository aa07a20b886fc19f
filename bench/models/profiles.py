"""Writes a profile of a model, the file that examples/profile.h reads and describes."""
import struct

import gguf

from forward import Unfit

VERSION = 1
UINT64 = struct.pack("<I", gguf.GGUFValueType.UINT64)


def write(path, name, layers, hash_of, plan=None):
    """layers: centre and scale of each, arrays [n_kv_heads][head_dim]; hash_of(content): XXH3; plan: {layer: (format of keys,
    format of values)}, or none."""
    try:
        writer = gguf.GGUFWriter(path, "tqkv")
        writer.add_name(name)
        writer.add_uint32("tqkv.version", VERSION)
        writer.add_uint32("tqkv.layer_count", len(layers))
        writer.add_uint64("tqkv.hash", 0)
        for index, kind in enumerate(("key", "value") if plan else ()):
            writer.add_array(f"tqkv.{kind}_formats", [plan[layer][index] for layer in range(len(layers))])
        for index, (center, scale) in enumerate(layers):
            writer.add_tensor(f"blk.{index}.key_center", center)
            writer.add_tensor(f"blk.{index}.key_scale", scale)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        sign(path, hash_of)
    except OSError as error:
        raise Unfit(f"{path}: {error.strerror}") from None


def sign(path, hash_of):
    """Puts the hash of the whole file, in which it is zero so far, to its place."""
    with open(path, "r+b") as file:
        content = file.read()
        file.seek(content.index(b"tqkv.hash" + UINT64) + len(b"tqkv.hash" + UINT64))
        file.write(struct.pack("<Q", hash_of(content)))

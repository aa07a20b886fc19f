"""Caches by name: the library's, and the formats of other systems by their formulas.

    KEYS/VALUES   tq4/tq4, i8/tq4 ...: formats of tqkv
    PRESET        safe, small, tiny: formats, exact ends and calibration as tqkv_cache_preset has them
    PEER          q8_0, q5_0, q4_0 or two of them as q8_0/q4_0: ggml's blocks of 32 values, as llama.cpp stores them
                  kivi4, kivi2: keys quantised by channel in groups of 128 positions (the last positions stay as they
                  are until their group is full), values by position in groups of 32 channels; two halves a group

Options follow, each after a colon:

    exact=4+128   the first 4 positions, and the newest 128 of each query, are exact
    calibrate=512 the cache learns centre and scale of its keys from its first 512 positions (at most a quarter of all)
    integer       tqkv multiplies integers
    plain         without what a profile learned
    rotated       of q8_0, q5_0, q4_0: rows rotated as llama.cpp does it where a head has a multiple of 64 dimensions
"""
import dataclasses
import re

import gguf
import numpy as np

import library
from forward import Unfit

FORMATS = ("f16", "i8", "tq8", "tq6", "tq5", "tq4", "tq3", "tq2")
PRESETS = ("safe", "small", "tiny")
BLOCKS = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("q8_0", "q5_0", "q4_0")}
KIVI = {"kivi4": 4, "kivi2": 2}
KIVI_POSITIONS, KIVI_CHANNELS = 128, 32
ROTATED = 64  # llama.cpp's rotation of values; that of keys is the largest power of two that divides head_dim
QUERIES = 512  # of floats, attended at a time


@dataclasses.dataclass(frozen=True)
class Shape:
    n_tokens: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    window: int
    scale: float


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a name says."""
    name: str
    keys: str
    values: str
    exact: tuple = (-1, -1)
    calibrate: int = -1
    integer: bool = False
    plain: bool = False
    rotated: bool = False
    part: str = ""  # "keys" or "values": the others are exact, or halves in a cache of the library

    def attend(self, lib, shape, learned, rows, chunk):
        """rows: queries, keys and values. The output, and the bits a value that the cache has."""
        if self.keys in FORMATS + PRESETS:
            return self.attend_codes(lib, shape, learned, rows, chunk)
        q, k, v = rows
        kept, bits = self.stored(k, v)
        kept = (k if self.part == "values" else kept[0], v if self.part == "keys" else kept[1])
        return attend_floats(q, k, v, shape, kept, tuple(max(0, n) for n in self.exact)), bits

    def attend_codes(self, lib, shape, learned, rows, chunk):
        with self.open(lib, shape) as cache:
            if learned is not None and not self.plain:
                cache.set_learned(*learned)
            return cache.run(*rows, chunk), cache.bits()

    def open(self, lib, shape):
        halves = {"": "", "keys": "values", "values": "keys"}[self.part]
        return library.Cache(lib, shape, self.keys, self.values, self.exact, self.calibrate, self.integer, halves)

    def check(self, lib, shape):
        """Does such a cache exist for that shape? Unfit if not."""
        if self.keys in FORMATS + PRESETS:
            with self.open(lib, shape):
                return
        self.stored(np.zeros((1, 1, shape.head_dim), np.float32), np.zeros((1, 1, shape.value_dim), np.float32))

    def stored(self, k, v):
        """Keys and values as the peer gives them back, and bits a value."""
        if self.keys in KIVI:
            n = KIVI[self.keys]
            bits = [n + 32 / KIVI_POSITIONS, n + 32 / KIVI_CHANNELS]
            kept = by_channel(k, n), by_position(v, n)
        else:
            types = BLOCKS[self.keys], BLOCKS[self.values]
            bits = [8 * size / count for count, size in (gguf.GGML_QUANT_SIZES[t] for t in types)]
            sizes = (largest_power(k.shape[-1]), ROTATED) if self.rotated else (1, 1)
            kept = [blocks(x, t, size) for x, t, size in zip((k, v), types, sizes)]
        return kept, float(np.average(bits, weights=[k[0].size, v[0].size]))


def parse(name):
    """The Kind of a name; what is wrong with it as Unfit."""
    pair, *options = name.split(":")
    keys, _, values = pair.partition("/")
    both = {keys, values or keys}
    own = both <= set(FORMATS) or pair in PRESETS
    if not (pair in PRESETS or both <= set(FORMATS) and values or both <= set(BLOCKS) or pair in KIVI):
        raise Unfit(f"{name}: a cache is KEYS/VALUES of {', '.join(FORMATS)}; {', '.join(PRESETS)}; {', '.join(BLOCKS)} or two of these; "
                    f"or {', '.join(KIVI)}")
    chosen = {}
    for option in options:
        if exact := re.fullmatch(r"exact=(\d{1,6})\+(\d{1,6})", option):
            chosen["exact"] = (int(exact[1]), int(exact[2]))
        elif own and (calibrate := re.fullmatch(r"calibrate=(\d{1,6})", option)):
            chosen["calibrate"] = int(calibrate[1])
        elif option in ("integer", "plain") and own or option == "rotated" and keys in BLOCKS:
            chosen[option] = True
        else:
            raise Unfit(f"{name}: {option} is no option of such a cache")
    return Kind(name, keys, "" if pair in PRESETS else values or keys, **chosen)


def attend_floats(q, k, v, shape, kept=None, exact=(0, 0)):
    """Causal attention in float32. kept: keys and values that are read in place of k and v, but where the first
    exact[0] positions, or the newest exact[1] of a query, are exact."""
    group = shape.n_heads // shape.n_kv_heads
    out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
    for at in range(0, len(q), QUERIES):
        end = min(at + QUERIES, len(q))
        begin = max(0, at - shape.window + 1) if shape.window else 0
        i, j = np.arange(at, end)[:, None], np.arange(begin, end)[None]
        seen = (j <= i) & (j > i - shape.window) if shape.window else j <= i
        whole = None if kept is None or exact == (0, 0) else (j < exact[0]) | (j > i - exact[1])
        for h in range(shape.n_heads):
            parts = [(x[begin:end, h // group], y[begin:end, h // group]) for x, y in [(k, v)] + ([kept] if kept else [])]
            out[at:end, h] = attend_head(q[at:end, h] * np.float32(shape.scale), parts, seen, whole)
    return out


def attend_head(q, parts, seen, whole):
    """parts: keys and values, exact and, where there is a cache, as it gives them back; whole: which are read exactly."""
    keys, values = parts[-1]
    scores = q @ keys.T
    if whole is not None:
        scores = np.where(whole, q @ parts[0][0].T, scores)
    scores[~seen] = -np.inf
    scores -= scores.max(-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    total = weights.sum(-1, keepdims=True)
    if whole is None:
        return weights @ values / total
    return (np.where(whole, 0, weights) @ values + np.where(whole, weights, 0) @ parts[0][1]) / total


def largest_power(n):
    return n & -n


def hadamard(n):
    """The orthonormal Walsh-Hadamard matrix of a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(n)).astype(np.float32)


def blocks(rows, kind, size):
    """What rows [n][heads][dim] are after ggml's blocks of that kind, rotated in pieces of `size` values and back."""
    dim = rows.shape[-1]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if dim % block:
        raise Unfit(f"{kind.name.lower()} needs heads of a multiple of {block} dimensions, not {dim}")
    rotation = hadamard(size if dim % ROTATED == 0 else 1)
    turned = rows.reshape(-1, len(rotation)) @ rotation
    stored = gguf.quants.quantize(np.ascontiguousarray(turned, np.float32).reshape(-1, dim), kind)
    return (gguf.quants.dequantize(stored, kind).reshape(-1, len(rotation)) @ rotation).reshape(rows.shape)


def grid(x, bits, axis):
    """x on 2^bits evenly spaced values between its least and its largest along the axis, both kept as halves."""
    low = x.min(axis, keepdims=True).astype(np.float16).astype(np.float32)
    step = ((x.max(axis, keepdims=True) - low) / ((1 << bits) - 1)).astype(np.float16).astype(np.float32)
    step = np.maximum(step, np.float32(2**-24))
    return np.clip(np.rint((x - low) / step), 0, (1 << bits) - 1) * step + low


def by_channel(rows, bits):
    """KIVI's keys."""
    full = len(rows) // KIVI_POSITIONS * KIVI_POSITIONS
    groups = rows[:full].reshape(-1, KIVI_POSITIONS, *rows.shape[1:])
    return np.concatenate([grid(groups, bits, 1).reshape(-1, *rows.shape[1:]), rows[full:]]).astype(np.float32)


def by_position(rows, bits):
    """KIVI's values."""
    if rows.shape[-1] % KIVI_CHANNELS:
        raise Unfit(f"kivi needs heads of a multiple of {KIVI_CHANNELS} dimensions, not {rows.shape[-1]}")
    return grid(rows.reshape(-1, KIVI_CHANNELS), bits, -1).reshape(rows.shape)

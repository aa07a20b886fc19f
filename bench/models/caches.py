"""Caches by name: the library's, and the formats of other systems by their formulas.

    KEYS/VALUES   tq4/tq4, i8/tq4 ...: formats of tqkv
    PRESET        safe, small, tiny: formats, exact ends and calibration as tqkv_cache_preset has them
    plan          formats by layer: those that --plan chose, or the profile of --use has; else as a preset
    PEER          q8_0, q5_0, q4_0: llama.cpp's; kivi4, kivi2; kvarn2 ... kvarn6; trellis3, trellis2; all but kivi's also two
                  of them as q8_0/q4_0: peers.py has the formulas

Options follow, each after a colon:

    exact=4+128   the first 4 positions, and the newest 128 of each query, are exact
    calibrate=512 the cache learns centre and scale of its keys from its first 512 positions (at most a quarter of all)
    plain         without what a profile learned
    rotated       of q8_0, q5_0, q4_0: rows rotated as llama.cpp does it where a head has a multiple of 64 dimensions
"""
import dataclasses
import re

import numpy as np

import library
import peers
from forward import Unfit

FORMATS = ("f16", "i8", "tq8", "tq6", "tq5", "tq4", "tq3", "tq2")
PRESETS = ("safe", "small", "tiny")
PLAN = "plan"
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
        return library.Cache(lib, shape, self.keys, self.values, self.exact, self.calibrate, halves)

    def check(self, lib, shape):
        """Does such a cache exist for that shape? Unfit if not."""
        if self.keys in FORMATS + PRESETS:
            with self.open(lib, shape):
                return
        self.stored(np.zeros((1, 1, shape.head_dim), np.float32), np.zeros((1, 1, shape.value_dim), np.float32))

    def stored(self, k, v):
        """Keys and values as the peer gives them back, and bits a value."""
        return peers.stored(self.keys, self.values, self.rotated, k, v)


def is_pair(pair, both):
    """Whether a cache may have these formats."""
    foreign = set(peers.names()) - set(peers.KIVI)
    return pair in (*PRESETS, PLAN) or pair in peers.KIVI or both <= set(FORMATS) and "/" in pair or both <= foreign


def parse(name):
    """The Kind of a name; what is wrong with it as Unfit."""
    pair, *options = name.split(":")
    keys, _, values = pair.partition("/")
    both = {keys, values or keys}
    own = both <= set(FORMATS) or pair in (*PRESETS, PLAN)
    if not is_pair(pair, both):
        raise Unfit(f"{name}: a cache is KEYS/VALUES of {', '.join(FORMATS)}; {', '.join(PRESETS)}; {PLAN}; or one or two of "
                    f"{', '.join(peers.names())}")
    chosen = {"exact": (4, 128), "calibrate": 512} if pair == PLAN else {}
    for option in options:
        if exact := re.fullmatch(r"exact=(\d{1,6})\+(\d{1,6})", option):
            chosen["exact"] = (int(exact[1]), int(exact[2]))
        elif own and (calibrate := re.fullmatch(r"calibrate=(\d{1,6})", option)):
            chosen["calibrate"] = int(calibrate[1])
        elif option == "plain" and own or option == "rotated" and both <= set(peers.BLOCKS):
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

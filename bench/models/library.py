"""tqkv by ctypes: the functions of cache.c in a shared object that make builds."""
import ctypes
import itertools
import pathlib

import numpy as np

from forward import Unfit

FLOATS = np.ctypeslib.ndpointer(np.float32, flags="C_CONTIGUOUS")
DOUBLES = np.ctypeslib.ndpointer(np.float64, flags="C_CONTIGUOUS")
INTS = np.ctypeslib.ndpointer(np.intc, flags="C_CONTIGUOUS")
NAME, COUNT, REASON, CACHE = ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p
FUNCTIONS = {
    "models_cache_create": (REASON, NAME, NAME, *[COUNT] * 6, ctypes.c_float, *[COUNT] * 4, *[ctypes.c_void_p] * 2, ctypes.POINTER(CACHE)),
    "models_cache_destroy": (None, CACHE),
    "models_cache_run": (REASON, CACHE, FLOATS, FLOATS, FLOATS, COUNT, FLOATS),
    "models_cache_bits": (ctypes.c_double, CACHE),
    "models_cache_bytes": (ctypes.c_double, CACHE),
    "models_learn": (REASON, FLOATS, FLOATS, *[COUNT] * 4, FLOATS, FLOATS),
    "models_profile_open": (REASON, NAME, ctypes.POINTER(CACHE)),
    "models_profile_layers": (COUNT, CACHE),
    "models_profile_layer": (COUNT, CACHE, *[COUNT] * 3, FLOATS, FLOATS),
    "models_profile_format": (REASON, CACHE, COUNT, COUNT),
    "models_format_bits": (ctypes.c_double, NAME, COUNT),
    "models_error": (REASON, NAME, FLOATS, *[COUNT] * 3, *[ctypes.c_void_p] * 2, ctypes.POINTER(ctypes.c_double)),
    "models_profile_close": (None, CACHE),
    "models_plan_format": (REASON, COUNT),
    "models_plan": (COUNT, DOUBLES, DOUBLES, COUNT, ctypes.c_double, INTS),
    "models_plan_bytes": (REASON, *[COUNT] * 6, DOUBLES, DOUBLES),
    "models_hash": (ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t),
}


class Library:
    def __init__(self, path):
        try:
            shared = ctypes.CDLL(str(pathlib.Path(path).resolve()))
        except OSError as error:
            raise Unfit(f"the library: {error}; `make models` builds it") from None
        for name, (result, *arguments) in FUNCTIONS.items():
            function = getattr(shared, name)
            function.restype, function.argtypes = result, arguments
        self.shared = shared

    def check(self, reason):
        if reason is not None:
            raise Unfit(f"tqkv: {reason.decode()}")

    def learn(self, queries, keys):
        """Centre and scale, each [n_kv_heads][head_dim], of keys [n][n_kv_heads][head_dim] that such queries read."""
        center, scale = (np.empty(keys.shape[1:], np.float32) for _ in range(2))
        self.check(self.shared.models_learn(np.ascontiguousarray(keys), np.ascontiguousarray(queries), len(keys),
                                            keys.shape[1], queries.shape[1], keys.shape[2], center, scale))
        return center, scale

    def format_bits(self, name, head_dim):
        """Bits of a value, norms included."""
        return self.shared.models_format_bits(name.encode(), head_dim)

    def error(self, name, rows, learned=(None, None)):
        """What a format adds to rows [n][n_kv_heads][head_dim] with such a centre and scale, against what differs between them."""
        found = ctypes.c_double()
        self.check(self.shared.models_error(name.encode(), np.ascontiguousarray(rows), *rows.shape,
                                            *(None if x is None else x.ctypes.data for x in learned), ctypes.byref(found)))
        return found.value

    def plan_formats(self):
        """The formats that plans have, by bits."""
        names = map(self.shared.models_plan_format, itertools.count())
        return [name.decode() for name in itertools.takewhile(lambda name: name is not None, names)]

    def plan(self, losses, sizes, room):
        """A format for each stream, of so many bytes at most; None where even the shortest take more. losses, sizes: a list for
        each stream, of plan_formats."""
        chosen = np.zeros(len(losses), np.intc)
        fits = self.shared.models_plan(np.array(losses, np.float64), np.array(sizes, np.float64), len(losses), room, chosen)
        formats = self.plan_formats()
        return [formats[i] for i in chosen] if fits else None

    def plan_bytes(self, shape, context, chunk):
        """What keys, and values, of a layer take with each format: {part: {name: bytes}}"""
        formats = self.plan_formats()
        sizes = np.zeros((2, len(formats)))
        self.check(self.shared.models_plan_bytes(shape.head_dim, shape.value_dim, shape.n_kv_heads, context, shape.window,
                                                 chunk, sizes[0], sizes[1]))
        return {part: dict(zip(formats, row)) for part, row in zip(("keys", "values"), sizes)}

    def read_profile(self, path, n_layers, n_kv_heads, head_dim):
        """Centre and scale of each layer, as examples/profile.h reads them, and its formats: the names of keys' and values', or
        None."""
        handle = ctypes.c_void_p()
        reason = self.shared.models_profile_open(str(path).encode(), ctypes.byref(handle))
        if reason is not None:
            raise Unfit(f"{path}: no profile that can be read: {reason.decode()}")
        try:
            n, layers = self.shared.models_profile_layers(handle), []
            for index in range(n):
                center, scale = (np.empty((n_kv_heads, head_dim), np.float32) for _ in range(2))
                if n != n_layers or not self.shared.models_profile_layer(handle, index, n_kv_heads, head_dim, center, scale):
                    raise Unfit(f"{path}: the profile is of a model of another shape")
                keys, values = (self.shared.models_profile_format(handle, index, is_key) for is_key in (1, 0))
                layers.append((center, scale, keys and (keys.decode(), values.decode())))
            return layers
        finally:
            self.shared.models_profile_close(handle)

    def hash(self, content):
        return self.shared.models_hash(content, len(content))


class Cache:
    """A tqkv_cache of one layer; to be used in a with statement."""

    def __init__(self, library, shape, keys, values, exact, calibrate, halves=""):
        """shape: a Shape; keys, values: names of formats; exact: positions at the
        beginning and at the end; calibrate: positions to learn from; -1: as a preset has it, else 0. halves: "keys" or
        "values" keeps these as halves."""
        self.library, self.shape, self.handle = library, shape, ctypes.c_void_p()
        self.wanted = (
            keys.encode(), values.encode(), shape.head_dim, shape.value_dim, shape.n_kv_heads, shape.n_heads,
            shape.n_tokens, shape.window, shape.scale, *exact, calibrate, ("", "keys", "values").index(halves))
        self.create(None, None)

    def create(self, center, scale):
        self.library.check(self.library.shared.models_cache_create(
            *self.wanted, center, scale, ctypes.byref(self.handle)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.library.shared.models_cache_destroy(self.handle)

    def set_learned(self, center, scale):
        """Before the first positions: a new cache, which learns nothing."""
        center, scale = (np.ascontiguousarray(values, np.float32) for values in (center, scale))
        self.library.shared.models_cache_destroy(self.handle)
        self.create(center.ctypes.data, scale.ctypes.data)

    def run(self, q, k, v, chunk):
        """Attention of all queries, chunk by chunk, as an engine reads a prompt: [n_tokens][n_heads][value_dim]"""
        out = np.empty((*q.shape[:2], self.shape.value_dim), np.float32)
        q, k, v = (np.ascontiguousarray(rows) for rows in (q, k, v))
        for at in range(0, len(q), chunk):
            part = slice(at, at + chunk)
            self.library.check(self.library.shared.models_cache_run(self.handle, k[part], v[part], q[part],
                                                                    len(q[part]), out[part]))
        return out

    def bits(self):
        """Bits of a value: codes and norms."""
        return self.library.shared.models_cache_bits(self.handle)

    def bytes(self):
        return self.library.shared.models_cache_bytes(self.handle)

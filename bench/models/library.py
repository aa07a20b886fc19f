"""tqkv by ctypes: the functions of cache.c in a shared object that make builds."""
import ctypes
import pathlib

import numpy as np

from forward import Unfit

FLOATS = np.ctypeslib.ndpointer(np.float32, flags="C_CONTIGUOUS")
NAME, COUNT, REASON, CACHE = ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p
FUNCTIONS = {
    "models_cache_create": (REASON, NAME, NAME, *[COUNT] * 6, ctypes.c_float, *[COUNT] * 3, ctypes.POINTER(CACHE)),
    "models_cache_destroy": (None, CACHE),
    "models_cache_learned": (REASON, CACHE, FLOATS),
    "models_cache_run": (REASON, CACHE, FLOATS, FLOATS, FLOATS, COUNT, FLOATS),
    "models_cache_bits": (ctypes.c_double, CACHE),
    "models_cache_bytes": (ctypes.c_double, CACHE),
    "models_learn": (REASON, FLOATS, *[COUNT] * 3, FLOATS),
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

    def learn(self, keys):
        """The centre [n_kv_heads][head_dim] of keys [n][n_kv_heads][head_dim]."""
        center = np.empty(keys.shape[1:], np.float32)
        self.check(self.shared.models_learn(np.ascontiguousarray(keys), *keys.shape, center))
        return center

    def hash(self, content):
        return self.shared.models_hash(content, len(content))


class Cache:
    """A tqkv_cache of one layer; to be used in a with statement."""

    def __init__(self, library, shape, keys, values, exact, integers):
        """shape: a Shape; keys, values: names of formats; exact: positions at the beginning and at the end."""
        self.library, self.shape, self.handle = library, shape, ctypes.c_void_p()
        library.check(library.shared.models_cache_create(
            keys.encode(), values.encode(), shape.head_dim, shape.value_dim, shape.n_kv_heads, shape.n_heads,
            shape.n_tokens, shape.window, shape.scale, *exact, integers, ctypes.byref(self.handle)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.library.shared.models_cache_destroy(self.handle)

    def set_learned(self, center):
        self.library.check(self.library.shared.models_cache_learned(self.handle, np.ascontiguousarray(center)))

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

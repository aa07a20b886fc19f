"""Other systems' caches by their formulas: what rows are after they have been stored and read back, and bits a value.

    q8_0, q5_0, q4_0   ggml's blocks of 32 values, as llama.cpp stores them
    kivi4, kivi2       keys quantised by channel in groups of 128 positions, values by position in groups of 32 channels,
                       two halves a group (arXiv 2402.02750)
    kvarn2 ... kvarn6  rotated rows in tiles of 128 positions, whose channels and positions both get scales that even out
                       their deviations (Sinkhorn), then a grid with a least value: keys by channel, values by position
                       (arXiv 2606.03458). Its authors keep the first 128 and the newest 128 positions: exact=128+128
    trellis3, trellis2 rotated rows of one norm, whose values are read from a window of 9 or 8 bits that moves by 3 or 2
                       bits a value, through a book of 512 or 256 values trained on Gaussian rows (the bitshift trellis of
                       arXiv 2406.11235)

The last positions of kivi and kvarn stay as they are until their group is full.
"""
import functools

import gguf
import numpy as np

from forward import Unfit

BLOCKS = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("q8_0", "q5_0", "q4_0")}
KIVI = {"kivi4": 4, "kivi2": 2}
KVARN = {f"kvarn{bits}": bits for bits in range(2, 7)}
TRELLIS = {"trellis3": (3, 9), "trellis2": (2, 8)}  # bits a value, bits of the window
GROUP, KIVI_CHANNELS = 128, 32
ROTATED = 64  # llama.cpp's rotation of values; that of keys is the largest power of two that divides head_dim
SINKHORN_STEPS = 16
PATH_ROWS = 256  # whose costs stay in a core's cache
TRAINING_ROWS, TRAINING_VALUES, TRAINING_STEPS = 64, 1024, 16


def names():
    return [*BLOCKS, *KIVI, *KVARN, *TRELLIS]


def stored(keys, values, rotated, k, v):
    """Keys and values as the peers named `keys` and `values` give them back, and bits a value."""
    if keys in KIVI:
        n = KIVI[keys]
        return (by_channel(k, n), by_position(v, n)), mean_bits((n + 32 / GROUP, n + 32 / KIVI_CHANNELS), k, v)
    kept, bits = zip(stream(keys, rotated, k, True), stream(values, rotated, v, False))
    return kept, mean_bits(bits, k, v)


def mean_bits(bits, k, v):
    return float(np.average(bits, weights=[k[0].size, v[0].size]))


def stream(name, rotated, rows, is_keys):
    """One stream of a peer that may be named for keys and values apart."""
    dim = rows.shape[-1]
    if name in KVARN:
        # Halves: two a channel and tile and one a position, or the other way round.
        own, other = (32 / GROUP, 16 / dim) if is_keys else (32 / dim, 16 / GROUP)
        return by_tile(rows, KVARN[name], is_keys), KVARN[name] + own + other
    if name in TRELLIS:
        return by_window(rows, *TRELLIS[name]), TRELLIS[name][0] + 32 / dim
    count, size = gguf.GGML_QUANT_SIZES[BLOCKS[name]]
    pieces = (largest_power(dim) if is_keys else ROTATED) if rotated else 1
    return blocks(rows, BLOCKS[name], pieces), 8 * size / count


def as_half(x):
    return x.astype(np.float16).astype(np.float32)


# ---- Rotation ----

def largest_power(n):
    return n & -n


@functools.lru_cache(None)
def hadamard(n):
    """The orthonormal Walsh-Hadamard matrix of a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(n)).astype(np.float32)


def rotate(rows):
    """Rows in pieces of the largest power of two that divides them; twice is nothing."""
    rotation = hadamard(largest_power(rows.shape[-1]))
    return (rows.reshape(-1, len(rotation)) @ rotation).reshape(rows.shape)


# ---- ggml ----

def blocks(rows, kind, size):
    """What rows [n][heads][dim] are after ggml's blocks of that kind, rotated in pieces of `size` values and back."""
    dim = rows.shape[-1]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if dim % block:
        raise Unfit(f"{kind.name.lower()} needs heads of a multiple of {block} dimensions, not {dim}")
    rotation = hadamard(size if dim % ROTATED == 0 else 1)
    turned = rows.reshape(-1, len(rotation)) @ rotation
    kept = gguf.quants.quantize(np.ascontiguousarray(turned, np.float32).reshape(-1, dim), kind)
    return (gguf.quants.dequantize(kept, kind).reshape(-1, len(rotation)) @ rotation).reshape(rows.shape)


# ---- KIVI ----

def grid(x, bits, axis):
    """x on 2^bits evenly spaced values between its least and its largest along the axis, both kept as halves."""
    low = as_half(x.min(axis, keepdims=True))
    step = as_half((x.max(axis, keepdims=True) - low) / ((1 << bits) - 1))
    step = np.maximum(step, np.float32(2**-24))
    return np.clip(np.rint((x - low) / step), 0, (1 << bits) - 1) * step + low


def by_channel(rows, bits):
    """KIVI's keys."""
    full = len(rows) // GROUP * GROUP
    groups = rows[:full].reshape(-1, GROUP, *rows.shape[1:])
    return np.concatenate([grid(groups, bits, 1).reshape(-1, *rows.shape[1:]), rows[full:]]).astype(np.float32)


def by_position(rows, bits):
    """KIVI's values."""
    if rows.shape[-1] % KIVI_CHANNELS:
        raise Unfit(f"kivi needs heads of a multiple of {KIVI_CHANNELS} dimensions, not {rows.shape[-1]}")
    return grid(rows.reshape(-1, KIVI_CHANNELS), bits, -1).reshape(rows.shape)


# ---- KVarN ----

def imbalance(tiles):
    """Largest over least deviation, of columns and of rows: 2 where all are equal."""
    return sum(d.max(-1) / np.maximum(d.min(-1), 1e-8) for d in (tiles.std(-2, ddof=1), tiles.std(-1, ddof=1)))


def even_out(tiles):
    """Scales of the columns and of the rows of tiles [...][rows][columns] by which both have even deviations: of the steps of
    Sinkhorn's iteration those with the least imbalance."""
    columns, rows = np.zeros_like(tiles[..., :1, :]), np.zeros_like(tiles[..., :, :1])  # logarithms
    best, least = [np.exp(columns), np.exp(rows)], imbalance(tiles)
    for _ in range(SINKHORN_STEPS):
        for logs, axis in ((columns, -2), (rows, -1)):
            deviation = (tiles / np.exp(columns) / np.exp(rows)).std(axis, ddof=1, keepdims=True)
            logs += np.log(np.clip(deviation, 1e-3, 1e3))
            np.clip(logs, -0.3, 10, out=logs)
        left = imbalance(tiles / np.exp(columns) / np.exp(rows))
        better = (left <= least)[..., None, None]
        best = [np.where(better, np.exp(logs), kept) for logs, kept in zip((columns, rows), best)]
        least = np.minimum(left, least)
    return best


def by_tile(rows, bits, is_keys):
    """KVarN's keys or values [n][heads][dim]."""
    full = len(rows) // GROUP * GROUP
    tiles = rotate(rows[:full]).reshape(-1, GROUP, *rows.shape[1:]).transpose(0, 2, 1, 3)  # [tiles][heads][GROUP][dim]
    kept = quantise_tiles(tiles.swapaxes(-1, -2), bits).swapaxes(-1, -2) if is_keys else quantise_tiles(tiles, bits)
    kept = rotate(np.ascontiguousarray(kept.transpose(0, 2, 1, 3)).reshape(full, *rows.shape[1:]))
    return np.concatenate([kept, rows[full:]]).astype(np.float32)


def quantise_tiles(tiles, bits):
    """A grid of its own for each row of a tile, whose columns share scales; all three numbers are halves."""
    columns, scale = even_out(tiles)
    evened = tiles / columns / scale
    low = evened.min(-1, keepdims=True)
    step = np.maximum((evened.max(-1, keepdims=True) - low) / ((1 << bits) - 1), 1e-8)
    codes = np.clip(np.rint((evened - low) / step), 0, (1 << bits) - 1)
    return (codes * as_half(step * scale) + as_half(low * scale)) * as_half(columns)


# ---- Trellis ----

def best_path(x, book, bits):
    """Codes of rows x [n][dim]: the windows whose values in the book are nearest to x (Viterbi). The first window begins with
    zeros. A window follows one whose lower bits are its upper ones."""
    parts = [find_path(np.ascontiguousarray(x[at:at + PATH_ROWS].T, np.float32), book, bits) for at in range(0, len(x), PATH_ROWS)]
    return np.concatenate(parts)


def find_path(x, book, bits):
    """x: [dim][n]. The lowest bits of a cost say from which window it came: one minimum finds both."""
    dim, n = x.shape
    n_codes, n_kept = 1 << bits, len(book) >> bits  # n_kept: upper parts of a window, which the next one keeps
    values, codes = book.astype(np.float32)[:, None], np.arange(n_codes, dtype=np.uint32)[:, None, None]
    cost = np.full((len(book), n), np.inf, np.float32)
    cost[0] = 0
    came_from, added = np.empty((dim, n_kept, n), np.uint8), np.empty_like(cost)
    for d in range(dim):
        before = cost.view(np.uint32).reshape(n_codes, n_kept, n)
        before &= ~np.uint32(n_codes - 1)
        before |= codes
        least = before.min(0)
        np.bitwise_and(least, n_codes - 1, out=came_from[d], casting="unsafe")
        np.square(np.subtract(x[d], values, out=added), out=added)
        np.add(least.view(np.float32)[:, None], added.reshape(n_kept, n_codes, n), out=cost.reshape(n_kept, n_codes, n))
    windows, row, window = np.empty((n, dim), np.int64), np.arange(n), cost.argmin(0)
    for d in range(dim - 1, -1, -1):
        windows[:, d] = window
        kept = window >> bits
        window = kept | came_from[d, kept, row].astype(np.int64) * n_kept
    return windows


@functools.lru_cache(None)
def trained_book(bits, window):
    """The book of a window, by generalised Lloyd steps on Gaussian rows."""
    random = np.random.default_rng(bits)
    book = random.standard_normal(1 << window).astype(np.float32)
    x = random.standard_normal((TRAINING_ROWS, TRAINING_VALUES)).astype(np.float32)
    for _ in range(TRAINING_STEPS):
        chosen = best_path(x, book, bits)
        count = np.bincount(chosen.ravel(), minlength=len(book))
        total = np.bincount(chosen.ravel(), x.ravel(), len(book))
        book = np.where(count > 0, total / np.maximum(count, 1), book).astype(np.float32)
    return book


def by_window(rows, bits, window):
    """Rows [n][heads][dim] through the trellis; the norm keeps the row's length."""
    book = trained_book(bits, window)
    turned = rotate(rows).reshape(-1, rows.shape[-1])
    norms = np.linalg.norm(turned, axis=-1, keepdims=True)
    scaled = turned / np.maximum(norms, 1e-30) * np.float32(np.sqrt(turned.shape[-1]))
    kept = book[best_path(scaled, book, bits)]
    kept *= norms / np.maximum(np.linalg.norm(kept, axis=-1, keepdims=True), 1e-30)
    return rotate(kept.reshape(rows.shape)).astype(np.float32)

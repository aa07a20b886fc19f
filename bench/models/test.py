#!/usr/bin/env python3
"""Tests of measure.py without a download: tiny models against a plain computation, other systems' formulas against bytes
worked out by hand, what is refused.

usage: test.py SHARED_OBJECT
"""
import contextlib
import io
import itertools
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings

import numpy as np

import caches
import forward
import library
import peers
import plans
import recall
import run
import tiny
import tokens as tokeniser

HERE = pathlib.Path(__file__).resolve().parent
TEXT = "the king is nothing then: the thing in the other inn; they sing in the thin thicket, and nothing is hidden. "
failed = passed = 0


def check(holds, what):
    global failed, passed
    passed, failed = passed + bool(holds), failed + (not holds)
    if not holds:
        print(f"FAIL {what}")


def near(a, b, tolerance):
    return np.abs(np.asarray(a, np.float64) - b).max() <= tolerance


# ---- The forward pass, and caches in it ----

def divergence(base, other, tokens, every=1):
    """As the tool defines it, in float64: mean, median, 99th and 99.9th percentile, perplexity, share of other likeliest tokens."""
    base, other, following = (x[every - 1::every] for x in (base[:-1], other[:-1], tokens[1:]))
    kl = (np.exp(base) * (base - other)).sum(-1)
    said = other[np.arange(len(following)), following]
    flips = (base.argmax(-1) != other.argmax(-1)).mean()
    return np.array([kl.mean(), np.median(kl), np.quantile(kl, 0.99), np.quantile(kl, 0.999), np.exp(-said.mean()), flips])


def half(row, *_):
    return row.astype(np.float16).astype(np.float64)


def coarse(row, *_):
    """q4_0 of a row of 32: one scale from the value of the largest magnitude."""
    largest = row[np.abs(row).argmax()].astype(np.float32)
    scale = np.float64(np.float16(largest / np.float32(-8)))
    codes = np.minimum(np.floor(row.astype(np.float32) * (np.float32(1) / (largest / np.float32(-8))) + np.float32(8.5)), 15)
    return (codes - 8) * scale


def test_architecture(lib, folder, arch):
    model = tiny.Tiny(arch, seed=3, bias=1.0)
    path = folder / f"{arch}.gguf"
    model.write(path)
    loaded = forward.Model(path)
    tokens = np.array(tokeniser.tokenize(loaded.fields, TEXT)[:40])
    plain = model.log_probabilities(tokens)
    names, every = ["f16/f16", "q4_0"], 1 + (arch == "llama")
    perplexity, scores = run.Run(loaded, tokens, lib, chunk=7, judged=np.arange(every - 1, 39, every)).measure(
        [run.everywhere(caches.parse(n), loaded.n_layers) for n in names])
    expected = divergence(plain, plain, tokens, every)[4]
    check(abs(perplexity / expected - 1) < 1e-5, f"{arch}: perplexity {perplexity}, not {expected}")
    for name, score, store in zip(names, scores, (half, coarse)):
        other = divergence(plain, model.log_probabilities(tokens, store), tokens, every)
        # Float32 adds noise of about 1e-6 to a log-probability; a rounding at a boundary is another code in a few rows.
        close = np.abs(np.array(score) - other) <= 2e-6 + 0.03 * np.abs(other)
        check(close.all(), f"{arch}, {name}: {score}, not {other}")


def test_layers(lib, shared, folder):
    """Of one layer's keys, or values, against a plain computation; the command's lines."""
    source, path, text = tiny.Tiny("llama", seed=4, n_layers=3), folder / "layers.gguf", folder / "text.txt"
    source.write(path)
    text.write_text(TEXT * 4, encoding="utf-8")
    result = command(shared, path, "--text", text, "--tokens", "40", "--caches", "q4_0", "--layers", "q4_0")
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("layer ")]
    check([line[:5] for line in lines] == [["layer", str(i), p, "cache", "q4_0"] for i in range(3) for p in ("keys", "values")],
          f"lines of layers: {result.stdout} {result.stderr}")
    check(abs(sum(float(line[8]) for line in lines) - 1) < 1e-3, "shares")
    tokens = np.array(tokeniser.tokenize(forward.Model(path).fields, TEXT)[:40])
    plain = source.log_probabilities(tokens)
    for line in lines:
        one = lambda row, layer, part, here=(int(line[1]), line[2]): coarse(row) if (layer, part) == here else row
        expected = divergence(plain, source.log_probabilities(tokens, one), tokens)[0]
        check(abs(float(line[6]) - expected) <= 2e-6 + 0.03 * expected, f"{line}, not {expected}")
    tokens, both = tokens.tolist() * 2, caches.parse("tq2/tq2:exact=2+4")
    variants = run.layer_by_layer(both, 3) + [run.Variant("both", {1: both})]
    kls = [s.kl for s in run.Run(forward.Model(path), tokens, lib).measure(variants)[1]]
    check(min(kls) > 1e-5 and abs((kls[2] + kls[3]) / kls[6] - 1) < 0.5, f"keys, values and both of layer 1: {kls}")


def score(lib, model, tokens, name, **options):
    return run.Run(model, tokens, lib, **options).measure([run.everywhere(caches.parse(name), model.n_layers)])[1][0]


def test_caches(lib, folder):
    tiny.Tiny("llama", seed=5).write(folder / "caches.gguf")
    model = forward.Model(folder / "caches.gguf")
    tokens = tokeniser.tokenize(model.fields, TEXT * 4)[:150]
    losses = [score(lib, model, tokens, f"{f}/{f}").kl for f in ("f16", "i8", "tq6", "tq5", "tq4", "tq3", "tq2")]
    check(all(a < b for a, b in zip(losses, losses[1:])), f"fewer bits lose more: {losses}")
    check(score(lib, model, tokens, "tq4/tq4", chunk=1) == score(lib, model, tokens, "tq4/tq4"), "chunks change nothing")
    whole = score(lib, model, tokens, "tq2/tq2:exact=20+130")
    check(whole.kl < 1e-5, f"exact ends that meet leave nothing to codes: {whole}")
    some = score(lib, model, tokens, "tq2/tq2:exact=4+16")
    check(whole.kl < some.kl < losses[-1], f"some exact ends: {some}")
    for name in ("q4_0", "kivi2", "kvarn2", "trellis2/q4_0"):
        losses = [score(lib, model, tokens, name + end).kl for end in ("", ":exact=4+16", ":exact=20+130")]
        check(losses[0] > losses[1] > losses[2] and losses[2] < 1e-6, f"exact ends of {name}: {losses}")
    one = run.Variant("one", {1: caches.parse("tq2/tq2")})
    both = run.everywhere(caches.parse("tq2/tq2"), 2)
    scores = run.Run(model, tokens, lib).measure([one, both])[1]
    check(0 < scores[0].kl < scores[1].kl and len(one.bits) == 1, f"one layer of two: {scores}")


# ---- Other systems' formulas ----

def rows_of(values):
    return np.array(values, np.float32).reshape(1, 1, -1)


def test_blocks():
    """By hand: q4_0 takes -8/d of the value of the largest magnitude; q5_0 -16/d; q8_0 127/d."""
    x = [-8.0, 7.0, 0.6, -0.4] + [0.0] * 28  # d = 1
    check(near(peers.blocks(rows_of(x), peers.BLOCKS["q4_0"], 1), rows_of([-8, 7, 1, 0] + [0] * 28), 0), "q4_0")
    x = [8.0, -7.0, -7.6, 0.4] + [0.0] * 28  # d = -1: the code of -7.6 would be 16 and is clamped to 15
    check(near(peers.blocks(rows_of(x), peers.BLOCKS["q4_0"], 1), rows_of([8, -7, -7, 0] + [0] * 28), 0), "q4_0, clamped")
    x = [-16.0, 15.0, 0.6, -0.4] + [0.0] * 28
    check(near(peers.blocks(rows_of(x), peers.BLOCKS["q5_0"], 1), rows_of([-16, 15, 1, 0] + [0] * 28), 0), "q5_0")
    x = [127.0, -126.6, 0.5, 0.4] + [0.0] * 28
    check(near(peers.blocks(rows_of(x), peers.BLOCKS["q8_0"], 1), rows_of([127, -127, 1, 0] + [0] * 28), 0), "q8_0")
    x = [0.0] * 32
    check(near(peers.blocks(rows_of(x), peers.BLOCKS["q4_0"], 1), rows_of(x), 0), "q4_0 of zeros")
    x = [0.1] + [0.0] * 31  # d = -0.0125, as a half -1638/131072
    check(near(peers.blocks(rows_of(x), peers.BLOCKS["q4_0"], 1), rows_of([8 * 1638 / 131072] + [0] * 31), 0), "q4_0: a half")


def test_stored_bytes():
    """The bytes themselves, as ggml lays them out."""
    import gguf
    x = np.array([-8, 7, 1, 0] + [0] * 12 + [3, -2] + [0] * 14, np.float32)
    block = gguf.quants.quantize(x.reshape(1, -1), peers.BLOCKS["q4_0"])[0].tolist()
    # d = 1.0 is 0x3c00; value i in the low nibble of byte i, value i + 16 in the high one, each plus 8
    check(block == [0x00, 0x3c, 0xb0, 0x6f, 0x89] + [0x88] * 13, f"bytes of q4_0: {block}")
    block = gguf.quants.quantize(2 * x.reshape(1, -1), peers.BLOCKS["q5_0"])[0].tolist()
    # each plus 16: 0, 30, 18, 16 ..., 22, 12: the fifth bits of all but values 0 and 17
    check(block == [0x00, 0x3c, 0xfe, 0xff, 0xfd, 0xff, 0x60, 0xce, 0x02] + [0x00] * 13, f"bytes of q5_0: {block}")
    block = gguf.quants.quantize(np.array([[127, -127, 2, -1] + [0] * 28], np.float32), peers.BLOCKS["q8_0"])[0].tolist()
    check(block == [0x00, 0x3c, 127, 129, 2, 255] + [0] * 28, f"bytes of q8_0: {block}")


def test_rotation():
    check(near(peers.hadamard(2) * 2**0.5, [[1, 1], [1, -1]], 1e-7), "the matrix of two")
    row = np.zeros((1, 1, 64), np.float32)
    row[0, 0, 0] = 8 * 127.0  # rotated: 64 times 127, which q8_0 keeps
    check(near(peers.blocks(row, peers.BLOCKS["q8_0"], 64), row, 1e-3), "a rotation of 64")
    row = np.random.default_rng(1).normal(size=(50, 2, 128)).astype(np.float32)
    row[..., 5] *= 50
    loss = [((peers.blocks(row, peers.BLOCKS["q4_0"], size) - row)**2).mean() for size in (1, 64)]
    check(loss[0] > 2 * loss[1], f"an outlier, rotated or not: {loss}")
    row = np.random.default_rng(1).normal(size=(9, 1, 96)).astype(np.float32)
    check((peers.blocks(row, peers.BLOCKS["q4_0"], 64) == peers.blocks(row, peers.BLOCKS["q4_0"], 1)).all(),
          "heads of 96 are not rotated")


def test_kivi():
    """By hand: four values a group's ends, 2 bits: steps of a third."""
    rows = np.zeros((130, 1, 32), np.float32)
    rows[:128, 0, 0] = np.linspace(0, 3, 128)
    rows[128:, 0, 0] = [0.4, 9.7]
    kept = peers.by_channel(rows, 2)
    check(near(kept[:128, 0, 0], np.rint(np.linspace(0, 3, 128)), 1e-6), "kivi2's keys: 0, 1, 2, 3")
    check(near(kept[128:, 0, 0], [0.4, 9.7], 1e-6), "a group that is not full")
    rows = np.array([-1.0, 2.0, 0.4, 0.6] + [0.0] * 28, np.float32).reshape(1, 1, 32)
    check(near(peers.by_position(rows, 2), np.array([-1, 2, 0, 1] + [0] * 28).reshape(1, 1, 32), 0), "kivi2's values")
    check(near(peers.by_position(np.full((2, 1, 32), 0.5, np.float32), 4), 0.5, 0), "a constant group")
    for name, bits in (("kivi4", 4.625), ("kivi2", 2.625), ("q8_0", 8.5), ("q5_0", 5.5), ("q8_0/q4_0", 6.5)):
        got = caches.parse(name).stored(np.ones((4, 1, 32), np.float32), np.ones((4, 1, 32), np.float32))[1]
        check(got == bits, f"bits of {name}: {got}")


def plain_kvarn(tile, bits):
    """A tile [rows][columns] as the paper has it, in float64 and one number after the other."""
    n, m = len(tile), len(tile[0])
    deviation = lambda x: (sum((y - sum(x) / len(x))**2 for y in x) / (len(x) - 1))**0.5
    logs = [[0.0] * m, [0.0] * n]
    best, least = None, float("inf")
    for step in range(peers.SINKHORN_STEPS + 1):
        for axis in (0, 1) if step else ():
            now = [[tile[i][j] / np.exp(logs[0][j] + logs[1][i]) for j in range(m)] for i in range(n)]
            for at, x in enumerate(zip(*now) if axis == 0 else now):
                logs[axis][at] = min(10, max(-0.3, logs[axis][at] + np.log(min(1e3, max(1e-3, deviation(x))))))
        now = [[tile[i][j] / np.exp(logs[0][j] + logs[1][i]) for j in range(m)] for i in range(n)]
        left = sum(max(d) / min(d) for d in ([deviation(x) for x in zip(*now)], [deviation(x) for x in now]))
        if left <= least:
            least, best = left, (now, list(logs[0]), list(logs[1]))
    now, columns, rows = best
    half = lambda x: float(np.float16(x))
    kept = []
    for i, row in enumerate(now):
        low, step = min(row), (max(row) - min(row)) / (2**bits - 1)
        codes = [round((x - low) / step) for x in row]
        kept.append([(c * half(step * np.exp(rows[i])) + half(low * np.exp(rows[i]))) * half(np.exp(columns[j]))
                     for j, c in enumerate(codes)])
    return np.array(kept)


def test_kvarn():
    """Four levels in every row and column are their own grid; against plain sums; which stream has which grid."""
    levels = np.add.outer(np.arange(128), np.arange(32)) % 4.0
    kept = peers.quantise_tiles(levels[None, None].astype(np.float32), 2)
    check(near(kept[0, 0], levels, 3e-3), f"kvarn2 of four levels: off by {np.abs(kept - levels).max()}")
    random = np.random.default_rng(5)
    tile = random.normal(size=(24, 16)) * random.uniform(0.2, 5, 16) * random.uniform(0.5, 2, (24, 1))
    kept = peers.quantise_tiles(tile.astype(np.float32)[None, None], 3)[0, 0]
    check(np.median(np.abs(kept - plain_kvarn(tile.tolist(), 3))) < 1e-3 * np.abs(tile).mean(), "kvarn3 of a tile")
    rows = random.normal(size=(200, 2, 64)).astype(np.float32) * np.linspace(0.1, 4, 200, dtype=np.float32)[:, None, None]
    for is_keys in (True, False):
        kept = peers.by_tile(rows, 4, is_keys)
        check((kept[128:] == rows[128:]).all() and 0 < np.abs(kept[:128] - rows[:128]).max() < 1, "a tile that is not full")
    for name, bits in (("kvarn4", 4.5625), ("kvarn5/kvarn3", 4.5625), ("kvarn2", 2.5625)):
        got = caches.parse(name).stored(rows[:4, :, :64], rows[:4, :, :64])[1]
        check(got == bits, f"bits of {name}: {got}")


def test_trellis():
    """The path against all paths; what the book is worth."""
    random = np.random.default_rng(6)
    book, x = random.normal(size=16).astype(np.float32), random.normal(size=(20, 5)).astype(np.float32)
    def walk(codes):
        window, found = 0, []
        for code in codes:
            window = (window << 2 | code) & 15
            found.append(window)
        return found
    paths = np.array([walk(codes) for codes in itertools.product(range(4), repeat=5)])
    errors = ((book[paths][None] - x[:, None])**2).sum(-1)
    check((peers.best_path(x, book, 2) == paths[errors.argmin(-1)]).all(), "the nearest of all paths")
    rows = random.normal(size=(300, 1, 128)).astype(np.float32)
    for name, least, most in (("trellis3", 0.0156, 0.0250), ("trellis2", 0.0625, 0.0900)):  # Shannon's, near a scalar code's 3/4
        kept = peers.by_window(rows, *peers.TRELLIS[name])
        error = float(((kept - rows)**2).mean())
        check(least < error < most, f"error of {name}: {error}")
        check(near(np.linalg.norm(kept, axis=-1), np.linalg.norm(rows, axis=-1), 1e-3), f"lengths of {name}")
        got = caches.parse(name).stored(rows[:2], rows[:2])[1]
        check(got == peers.TRELLIS[name][0] + 0.25, f"bits of {name}: {got}")


def test_plans(lib, shared, folder):
    """By hand: bits go where they take most away; then a plan through files and back."""
    formats = lib.plan_formats()
    check(formats == ["tq2", "tq3", "tq4", "tq5", "tq6", "i8", "f16"], f"formats of plans: {formats}")
    errors, bits = dict(zip(formats, (16, 8, 4, 2, 1, 0.5, 0))), dict(zip(formats, (2, 3, 4, 5, 6, 8, 16)))
    streams = [plans.Stream(i, "keys", x, errors, bits) for i, x in enumerate((4.0, 1.5, 0.0))]
    choose = lambda room: plans.choose(lib, streams, room)
    check(choose(5.9) is None, "too few bytes")
    check(choose(6) == ["tq2"] * 3, "no bit to give")
    check(choose(9) == ["tq4", "tq3", "tq2"], f"three bits: {choose(9)}")
    check(choose(48) == ["f16"] * 3, "all bits, with caution also where nothing is lost")
    check(plans.bytes_of(streams, ["tq4", "tq3", "tq2"]) == 9, "bytes of a plan")
    values = {name: lib.error(name, np.random.default_rng(7).normal(size=(200, 2, 64)).astype(np.float32)) for name in formats}
    check(all(a > b for a, b in zip(list(values.values()), list(values.values())[1:])), f"errors of formats: {values}")
    check([lib.format_bits(n, 64) for n in ("tq4", "i8", "f16")] == [4.5, 8.5, 16], "bits of formats")
    check([plans.read_bytes(text) for text in ("2G", "1.5K", "77")] == [2**31, 1536, 77], "numbers of bytes")
    model, text, out = folder / "planned.gguf", folder / "text.txt", folder / "plan.gguf"
    text.write_text(TEXT * 9, encoding="utf-8")
    tiny.Tiny("llama", seed=9, n_layers=3).write(model)
    options = ("--text", text, "--tokens", "300", "--caches", "plan,tq2/tq2,plan:exact=4+16")
    result = command(shared, model, *options, "--plan", "4.5", "--profile", out)
    lines = [line.split() for line in result.stdout.splitlines()]
    chosen = {int(l[2]): (l[4], l[6]) for l in lines if l[:2] == ["plan", "layer"]}
    check(sorted(chosen) == [0, 1, 2], f"a plan: {result.stdout} {result.stderr}")
    loss = {l[1]: float(l[5]) for l in lines if l[:1] == ["cache"]}
    check(loss["plan"] < loss["tq2/tq2"], f"a plan's loss: {loss}")
    check([layer[2] for layer in lib.read_profile(out, 3, 2, 32)] == [chosen[i] for i in range(3)], "the profile's formats")
    again = command(shared, model, *options, "--use", out)
    check(again.returncode == 0 and "cache plan bits" in again.stdout, f"a plan from a file: {again.stderr}")
    refused(command(shared, model, *options), "--plan", "a plan that nobody made")
    result = command(shared, model, *options[:-1], "plan:exact=4+16", "--plan", "3.5,5", "--layers-tokens", "600")
    bits = [line.split()[1:4] for line in result.stdout.splitlines() if line.startswith("cache ")]
    check([b[0] for b in bits] == ["plan3.5:exact=4+16", "plan5:exact=4+16"] and float(bits[0][2]) <= 3.5 < float(bits[1][2]) <= 5,
          f"two plans: {result.stdout} {result.stderr}")
    losses = folder / "losses.json"
    first, again = (command(shared, model, *options, "--plan", bits, "--losses", losses) for bits in ("4.5", "4.5"))
    check(losses.exists() and first.stdout == again.stdout and len(again.stderr) < len(first.stderr), f"losses from a file: {again.stderr}")
    losses.write_text(losses.read_text().replace("values", "keys"), encoding="utf-8")
    refused(command(shared, model, *options, "--plan", "4.5", "--losses", losses), "another shape", "losses of another model")
    losses.write_text("[1]", encoding="utf-8")
    refused(command(shared, model, *options, "--plan", "4.5", "--losses", losses), "no losses", "a file without losses")
    refused(command(shared, model, *options, "--plan", "3.5,5", "--profile", out), "one plan", "two plans for one profile")
    refused(command(shared, model, *options, "--plan", "4,x"), "numbers of bits", "no number")
    refused(command(shared, model, *options, "--plan", "1"), "tq2", "too few bits")
    test_plan_of_bytes(lib, shared, model, options)
    refused(command(shared, model, *options[:3], "100", "--plan", "4"), "256", "a text that exact ends cover")


def test_plan_of_bytes(lib, shared, model, options):
    """Three layers of two KV heads of 32 at 1,000 positions: a plan takes what caches of its formats take, and no more."""
    sizes = lib.plan_bytes(caches.Shape(0, 0, 2, 32, 32, 0, 1.0), 1000, 512)
    # by hand: a code of 4 bits a value and a norm of 4 bytes a row, and 4 + 128 + 64 halves of each stream beside them
    check(sizes["keys"]["tq4"] == sizes["values"]["tq4"] == 1000 * 2 * (16 + 4) + 196 * 2 * 64, f"bytes of tq4: {sizes}")
    check(sizes["keys"]["f16"] == 1000 * 2 * 64, "bytes of halves")
    ring = lib.plan_bytes(caches.Shape(0, 0, 2, 32, 32, 300, 1.0), 100000, 100)["keys"]
    check(ring["f16"] == 400 * 2 * 64, f"a layer with a window of 300: {ring}")
    least = sum(3 * sizes[part]["tq2"] for part in sizes)
    room = int(least * 1.4)
    result = command(shared, model, *options, "--bytes", str(room), "--context", "1000")
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith(("plan layer", "plan bytes"))]
    total = sum(sizes[l[at]][l[at + 1]] for l in lines if l[1] == "layer" for at in (3, 5))
    check(lines and lines[-1][2] == f"{total:.0f}" and least < total <= room, f"a plan of bytes: {result.stdout} {result.stderr}")
    refused(command(shared, model, *options, "--bytes", str(int(least) - 1), "--context", "1000"), "not even tq2 fits", "too few bytes")
    refused(command(shared, model, *options, "--bytes", "1G"), "--context", "no context")
    refused(command(shared, model, *options, "--bytes", "2 pounds", "--context", "9"), "2G or 512M", "no number")


def text_of(fields, tokens):
    names = fields["tokenizer.ggml.tokens"]
    return "".join(names[t] for t in tokens).replace("\u0120", " ").replace("\u010a", "\n")


def test_recall(lib, shared, folder):
    """Each number stands once at its depth and once behind its question; what is right, the same and lost is counted by hand."""
    path, text = folder / "recall.gguf", folder / "lines.txt"
    text.write_text("".join(f"line {i} of the thing\n" for i in range(400)), encoding="utf-8")
    tiny.Tiny("llama", seed=6).write(path)
    model = forward.Model(path)
    task = recall.make(model.fields, text.read_text(encoding="utf-8"), 1500, 6)
    told = text_of(model.fields, task.tokens)
    found = re.findall(r"The access code of the (\w+ \w+) is (\d{5})\.\n", told)
    check(len(task.tokens) == 1500 and len(found) == 12 and len(set(found)) == 6, f"each number twice: {found}")
    check(sorted(found[:6]) == sorted(found[6:]) and found[:6] != found[6:], "questions in another order")
    places = [told.index(f"{name} is") / told.rindex(f"{found[6][0]} is") for name, _ in found[:6]]
    check(near(places, task.depths, 0.06), f"depths: {places}")
    for item in range(6):
        answer = [task.tokens[i + 1] for i, owner in zip(task.judged, task.items) if owner == item]
        check(text_of(model.fields, answer) == " " + found[item][1], f"the answer of item {item}")
    truth, other = np.array([5, 6, 7, 8, 9, 9]), np.array([5, 6, 7, 8, 9, 1])
    hand = recall.Task([0, *truth], np.arange(6), np.array([0, 0, 1, 1, 2, 2]), np.array([0.1, 0.3, 0.3]))
    rows = recall.bins(hand, truth, (None, None, other), (None, np.full(6, -0.5), np.array([5, 6, 7, 1, 9, 1])))
    check(rows == [(1, 1, 1, 0.5), (2, 0, 1, 0.5), (0, 0, 0, 0.0), (0, 0, 0, 0.0)], f"by hand: {rows}")
    options = ("--text", text, "--tokens", "900", "--caches", "f16/f16,tq2/tq2")
    result = command(shared, path, *options, "--recall", "4")
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("recall ")]
    check([l[1] for l in lines] == ["floats"] * 4 + ["f16/f16"] * 4 + ["tq2/tq2"] * 4, f"lines: {result.stdout} {result.stderr}")
    same = {name: sum(int(l[9]) for l in lines if l[1] == name) for name in ("floats", "f16/f16", "tq2/tq2")}
    check(same["floats"] == same["f16/f16"] == 4 and same["tq2/tq2"] < 4, f"same answers: {same}")
    refused(command(shared, path, *options, "--recall", "0"), "items are possible", "no items")
    refused(command(shared, path, *options, "--recall", "40"), "no room", "too many items")
    refused(command(shared, path, *options[:3], "20000", "--recall", "4"), "20000", "a short text for items")


# ---- Tokenisers ----

def test_tokenisers(folder):
    tiny.Tiny("llama").write(folder / "bytes.gguf")
    fields = forward.read_file(folder / "bytes.gguf")[0]
    names = fields["tokenizer.ggml.tokens"]
    got = [names[i] for i in tokeniser.tokenize(fields, "the thing\u00e9")]
    check(got == ["the", "\u0120", "th", "ing", "\u00c3", "\u00a9"], f"merged bytes: {got}")
    tiny.Tiny("gemma3").write(folder / "scores.gguf")
    fields = forward.read_file(folder / "scores.gguf")[0]
    names = fields["tokenizer.ggml.tokens"]
    got = [names[i] for i in tokeniser.tokenize(fields, "the thing!")]
    check(got == ["<s>", "the", "\u2581", "th", "ing", "<0x21>"], f"pieces by their scores: {got}")


# ---- The command ----

def command(shared, model, *options):
    """Runs the program in this process: a Python that loads numpy takes longer to start than what most calls do."""
    sys.argv = [str(x) for x in (HERE / "measure.py", model, "--library", shared, *options)]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            err.write(ended.code + "\n" if isinstance(ended.code, str) else "")
        except Exception:  # as Python ends a program
            code = 1
            traceback.print_exc(file=err)
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


def refused(result, reason, what):
    lines = result.stderr.strip().splitlines()
    check(result.returncode == 1 and not result.stdout and len(lines) == 1 and lines[0].startswith("measure.py: ") and
          reason in lines[0], f"{what}: {result.returncode} {result.stdout} {result.stderr}")


def test_output(shared, folder):
    text = folder / "text.txt"
    text.write_text(TEXT * 4, encoding="utf-8")
    model = folder / "a model.gguf"
    tiny.Tiny("qwen2", bias=30.0).write(model)
    result = command(shared, model, "--text", text, "--tokens", "100", "--caches", "tq4/tq4,i8/tq4:exact=4+16,kivi4")
    number = r"[0-9]+(\.[0-9]+)?(e-?[0-9]+)?"
    lines = result.stdout.splitlines()
    check(result.returncode == 0 and re.fullmatch(rf"model a_model layers 2 heads 4/2 of 32 ppl {number}", lines[0]),
          f"the model's line: {result.stdout} {result.stderr}")
    for name, bits, line in zip(("tq4/tq4", "i8/tq4:exact=4+16", "kivi4"), ("5", "7", "4.625"), lines[1:]):
        check(re.fullmatch(rf"cache {re.escape(name)} bits {bits} kl {number} median {number} p99 {number} p999 {number} ppl {number} "
                           rf"flips {number}", line), f"a cache's line: {line}")
    check(len([line for line in lines[4:] if line.startswith("tq4/tq4 ")]) == 1, "the table")
    check(result.stderr.split()[-1] == "100%", f"progress: {result.stderr}")
    behind = command(shared, model, "--text", text, "--tokens", "60", "--behind", "30", "--caches", "safe,tq4/tq4")
    check(behind.returncode == 0 and "cache safe bits" in behind.stdout and "cache tq4/tq4 bits" in behind.stdout,
          f"a text behind one token: {behind.stdout} {behind.stderr}")


def test_profile(lib, shared, folder):
    """Keys with a large constant part: what a profile of another text takes away."""
    text, other, model, out = (folder / n for n in ("text.txt", "other.txt", "biased.gguf", "profile.gguf"))
    text.write_text(TEXT * 4, encoding="utf-8")
    other.write_text("an ox eats in the tin hut, then hides in ashes; " * 8, encoding="utf-8")
    tiny.Tiny("qwen2", seed=8, bias=20.0).write(model)
    result = command(shared, model, "--text", other, "--tokens", "100", "--profile", out)
    check(result.returncode == 0 and out.exists(), f"a profile was written: {result.stderr}")
    layers = lib.read_profile(out, 2, 2, 32)
    for center, scale, _ in layers:
        check(np.abs(center).max() > 10 and near((scale.astype(np.float64)**2).mean(-1), 1, 1e-5), "centre and scale")
    options = ("--text", text, "--tokens", "100", "--caches", "tq4/tq4,tq4/tq4:plain,small", "--use", out)
    lines = [line.split() for line in command(shared, model, *options).stdout.splitlines() if line.startswith("cache ")]
    used, plain, small = (float(line[5]) for line in lines)
    check(used < plain / 2 and small < used, f"KL with a profile, without, small with it: {used}, {plain}, {small}")
    content = bytearray(out.read_bytes())
    content[-1] ^= 1
    (folder / "bad.gguf").write_bytes(content)
    refused(command(shared, model, *options[:-1], folder / "bad.gguf"), "damaged", "a damaged profile")
    refused(command(shared, model, *options[:-1], model), "damaged", "a model as a profile")
    tiny.Tiny("llama", n_layers=3).write(folder / "three.gguf")
    refused(command(shared, folder / "three.gguf", *options), "another shape", "another model's profile")


def damaged_tokenisers(shared, folder, options):
    """Pairs that are none, or of pieces that are not there; a piece twice, so that numbers are missing."""
    for more in (["t"], ["t h e"], ["zz qq"], ["\x00", "t h"], ["th e", "t h"] * 2):
        source = tiny.Tiny("llama")
        source.pieces = (source.pieces[0], more)
        source.write(folder / "changed.gguf")
        result = command(shared, folder / "changed.gguf", *options)
        check("Traceback" not in result.stderr and (result.returncode == 0) == bool(result.stdout), f"pairs {more}: {result.stderr}")
        if more[0] != "th e":
            refused(result, "tokeniser is damaged", f"pairs {more}")
    source = tiny.Tiny("gemma3")
    source.pieces = (source.pieces[0], source.pieces[1][:5])
    source.write(folder / "changed.gguf")
    refused(command(shared, folder / "changed.gguf", *options), "tokeniser is damaged", "too few scores")


def test_refusals(shared, folder):
    text, model = folder / "text.txt", folder / "refused.gguf"
    options = ("--text", text, "--tokens", "50", "--caches", "tq4/tq4")
    source = tiny.Tiny("llama")
    source.write(model)
    refused(command(shared, model, "--text", text, "--tokens", "5000"), "has", "a short text")
    refused(command(shared, model, "--text", folder / "none.txt"), "No such file", "no text")
    refused(command(shared, model, *options[:2], "--tokens", "1"), "at least 2", "one token")
    refused(command(shared, model, *options, "--behind", "-1"), "--behind", "a negative number of tokens")
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    refused(command(shared, model, "--text", folder / "binary.txt"), "UTF-8", "a text that is none")
    refused(command(folder / "no.so", model, *options), "the library", "no library")
    for name in ("tq9/tq4", "tq4", "tq4/q4_0", "tq4/tq4:rotated", "q4_0:plain", "tq4/tq4:exact=4", "kivi4/kivi4", "/"):
        refused(command(shared, model, *options[:4], "--caches", name), name, name)
    refused(command(shared, model, *options[:4], "--caches", "tq8/tq8:calibrate=7"), "tqkv: ", "what the library refuses")
    whole = model.read_bytes()
    for size in (0, 3, 20, 200, len(whole) // 2, len(whole) - 4):
        (folder / "cut.gguf").write_bytes(whole[:size])
        refused(command(shared, folder / "cut.gguf", *options), "cut.gguf", f"{size} bytes of {len(whole)}")
    refused(command(shared, folder / "none.gguf", *options), "No such file", "no file")
    changed = {"arch": ("mamba", "mamba"), "without": (["blk.1.ffn_up.weight"], "blk.1.ffn_up.weight"),
               "tokeniser": (False, "no tokeniser")}
    for option, (value, reason) in changed.items():
        source.write(folder / "changed.gguf", **{option: value})
        refused(command(shared, folder / "changed.gguf", *options), reason, option)
    for base in (float("nan"), 0.0):
        source.write(folder / "changed.gguf", base=base)
        refused(command(shared, folder / "changed.gguf", *options), "rope.freq_base", f"a base of {base}")
    damaged_tokenisers(shared, folder, options)
    for weight, value in (("output_norm.weight", float("nan")), ("blk.1.ffn_down.weight", 3e38), ("blk.0.attn_k.weight", float("inf"))):
        broken = tiny.Tiny("llama")
        broken.weights[weight].flat[7] = value
        broken.write(folder / "changed.gguf")
        result = command(shared, folder / "changed.gguf", *options)
        result.stderr = result.stderr.splitlines()[-1]  # without the progress before it
        refused(result, "NaN" if "attn_k" in weight else "no numbers", f"{value} in {weight}")
    source.weights["blk.0.attn_q.weight"] = source.weights["blk.0.attn_q.weight"][:-1]
    source.write(folder / "changed.gguf")
    refused(command(shared, folder / "changed.gguf", *options), "(127, 48)", "a wrong shape")


def main():
    shared = pathlib.Path(sys.argv[1])
    lib = library.Library(shared)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for arch in forward.ARCHITECTURES:
            test_architecture(lib, folder, arch)
        test_caches(lib, folder)
        test_layers(lib, shared, folder)
        for test in (test_blocks, test_stored_bytes, test_rotation, test_kivi, test_kvarn, test_trellis):
            test()
        test_tokenisers(folder)
        test_output(shared, folder)
        test_profile(lib, shared, folder)
        test_plans(lib, shared, folder)
        test_recall(lib, shared, folder)
        test_refusals(shared, folder)
    print(f"{passed} passed, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""One table of caches in llama.cpp: what they lose, how fast they are, how much memory they take.

usage: demo.py BIN BACKEND MEASURE MODEL TEXT FOLDER [--depth 4096] [--threads 2] [--chunks 4]

The loss is the KL divergence that llama-perplexity prints against the same model with llama.cpp's F16 cache, in nats a
token over contexts of 512, with weights in F32: rounded ones hide what caches lose. Speeds and memory are of the model
as it is.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys

CACHES = ("f16", "q8_0", "q4_0", "safe", "small", "tiny")


def progress(text):
    print(f"llama-demo: {text}", file=sys.stderr, flush=True)


def run(command, environment, what, text=None):
    done = subprocess.run([str(c) for c in command], env={**os.environ, **environment}, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"llama-demo: {what} failed:\n{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def options_of(cache, backend):
    """The environment, and llama.cpp's options for a cache."""
    if cache in ("safe", "small", "tiny"):
        return {"GGML_BACKEND_PATH": str(backend), "TQKV": cache, "TQKV_LOG": "0"}, ["-dev", "TQKV"]
    return {}, ["-dev", "none", "-ctk", cache, "-ctv", cache]


def loss(a, cache, weights):
    base = a.folder / "base.kl"
    environment, options = options_of(cache, a.backend)
    command = [a.bin / "llama-perplexity", "-m", weights, "-f", a.text, "-c", "512", "-b", "512", "--chunks", a.chunks, "-t", a.threads,
               "-fa", "on", "--kl-divergence-base", base, *options]
    if cache == "f16":
        run(command, environment, "llama-perplexity")
        return "0"
    output = run(command + ["--kl-divergence"], environment, "llama-perplexity")
    return re.search(r"Mean +KLD: +([\d.e-]+)", output).group(1)


def speed(a, cache):
    environment, _ = options_of(cache, a.backend)
    kind = "tqkv" if environment else cache
    lines = run([a.measure, a.model, kind, a.depth], environment, "measure", f"0 {a.threads}\n{a.depth} {a.threads}\n").splitlines()
    return [float(x) for line in lines[:2] for x in line.split()]


def main():
    parser = argparse.ArgumentParser()
    for name in ("bin", "backend", "measure", "model", "text", "folder"):
        parser.add_argument(name, type=pathlib.Path)
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=4)
    a = parser.parse_args()
    weights = a.folder / "f32.gguf"
    if not weights.exists():
        progress("weights in F32")
        run([a.bin / "llama-quantize", "--allow-requantize", a.model, weights, "F32"], {}, "llama-quantize")
    print(f"{'cache':8} {'KL':>9}  {'prompt':>7} {'token':>6}  {'prompt':>7} {'token':>6}  {'MiB':>5}")
    print(f"{'':8} {'nats':>9}  {'tokens a second at 0':>14}  {'at ' + format(a.depth, ','):>14}")
    for number, cache in enumerate(CACHES):
        progress(f"{number + 1} of {len(CACHES)}: {cache}")
        kl, s = loss(a, cache, weights), speed(a, cache)
        print(f"{cache:8} {kl:>9}  {s[0]:7.1f} {s[1]:6.1f}  {s[3]:7.1f} {s[4]:6.1f}  {s[5]:5.0f}", flush=True)


main()

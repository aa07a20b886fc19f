#!/usr/bin/env python3
"""How many times as fast as with an F16 cache llama.cpp is with other caches, by turns in one run.

usage: speed.py BACKEND MEASURE MODEL [--depths 0,4096,8192] [--threads 1,2] [--rounds 3] [--caches q8_0,safe,small,tiny]

A line is `ratio KIND-DEPTH-tTHREADS-CACHE MEDIAN LOWEST HIGHEST`, over rounds in which each cache has a turn; the cache `limit`
is F16 behind no positions: attention that costs nothing. Tokens a second of F16 are lines `f16`.
"""
import argparse
import os
import statistics
import subprocess


def start(a, cache):
    ours = cache in ("safe", "small", "tiny") or "/" in cache
    own = {"GGML_BACKEND_PATH": a.backend, "TQKV": cache, "TQKV_LOG": "0"} if ours else {}
    command = [a.measure, a.model, "tqkv" if ours else cache, str(max(a.depths))]
    return subprocess.Popen(command, env={**os.environ, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(process, depth, threads):
    """Tokens a second of a prompt and of single tokens."""
    process.stdin.write(f"{depth} {threads}\n")
    process.stdin.flush()
    return dict(zip(("prompt", "token"), map(float, process.stdout.readline().split())))


def numbers(text):
    return [int(n) for n in text.split(",")]


def report(name, ratios):
    print(f"ratio {name} {statistics.median(ratios):.2f} {min(ratios):.2f} {max(ratios):.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    for name in ("backend", "measure", "model"):
        parser.add_argument(name)
    parser.add_argument("--depths", type=numbers, default=[0, 4096, 8192])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--caches", type=lambda text: text.split(","), default=["q8_0", "safe", "small", "tiny"])
    a = parser.parse_args()
    processes = {cache: start(a, cache) for cache in ["f16", *a.caches]}
    empty = {}
    for depth in sorted(a.depths):
        for process in processes.values():
            measure(process, depth, max(a.threads))
        for threads in a.threads:
            rounds = [{cache: measure(p, depth, threads) for cache, p in processes.items()} for _ in range(a.rounds)]
            for kind in ("prompt", "token"):
                name = f"{kind}-{depth}-t{threads}"
                speeds = [r["f16"][kind] for r in rounds]
                if depth == 0:
                    empty[kind, threads] = statistics.median(speeds)
                print(f"f16 {name} {statistics.median(speeds):.1f}", flush=True)
                for cache in a.caches:
                    report(f"{name}-{cache}", [r[cache][kind] / r["f16"][kind] for r in rounds])
                if (kind, threads) in empty:
                    report(f"{name}-limit", [empty[kind, threads] / speed for speed in speeds])
    for process in processes.values():
        process.stdin.close()
        process.wait()


main()

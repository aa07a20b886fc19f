#!/usr/bin/env python3
"""Writes docs/quality.md from what measure.py printed.

usage: page.py RESULTS OUTPUT

RESULTS: a folder with files MODEL-TEXT.txt, each the output of one run of measure.py; see TEXTS for what TEXT may be.
"""
import pathlib
import re
import sys

TEXTS = {"prose": "English prose, 4,096 tokens of the Debian handbook", "code": "code, 4,096 tokens of Python's library"}
LIMITS = {"safe": 0.0005, "small": 0.0035, "tiny": 0.025}  # nats, what the presets promise on prose
HEAD = """# Quality on pretrained models

Made by `make quality-page` from the runs in `bench/models/results`. Each run is a forward pass in float32 in which every
layer's keys and values go through caches of the library, appended and attended to in chunks of 512; nothing was learned
before. KL: nats a token, of the predictions from those with a float cache; other token: share of places whose likeliest
token changes. `make deps-models models` repeats a run, on any GGUF file of the kinds llama, qwen2, qwen3 and gemma3:

    make models MODEL=gemma3 TEXT=FILE TOKENS=4096 CACHES=safe,small,tiny,tq4/tq4,q4_0:rotated
"""
TAIL = """
`KEYS/VALUES` is a cache without a preset: no centre, no scale, no exact ends. `q8_0`, `q4_0` and kin are ggml's types by
their formulas, `:rotated` as llama.cpp rotates them.

Measured elsewhere by the same formulas, without the search for the best of five scales: TQ4 keys and values without a
preset raise the perplexity of Qwen2.5-Coder-1.5B-Instruct from 11.96 to 8,004 (KL 6.92) and of Qwen2.5-Coder-0.5B-Instruct
from 18.48 to 516 (3.70); with a centre and a scale a channel, 4 first and 128 newest positions exact, KL is 0.0009 and 0.0030.

Not measured: models above 270 million parameters with the library itself, contexts beyond 4,096 tokens, tasks.
"""


def table(path):
    """A run's table; its first line names the model."""
    text = path.read_text(encoding="utf-8")
    model = re.search(r"^model (\S+) layers (\d+) heads (\d+)/(\d+) of (\d+) ppl (\S+)$", text, re.M)
    if not model:
        raise SystemExit(f"{path}: no line of a model")
    name, layers, heads, kv_heads, dim, ppl = model.groups()
    rows = re.findall(r"^cache (\S+) bits (\S+) kl (\S+) median (\S+) p99 (\S+) ppl (\S+) flips (\S+)$", text, re.M)
    if not rows:
        raise SystemExit(f"{path}: no lines of caches")
    lines = [f"\n## {name}, {TEXTS[path.stem.split('-')[1]]}\n",
             f"{layers} layers, {heads} query heads, {kv_heads} KV heads of {dim}; perplexity {float(ppl):.2f} with floats.\n",
             "| cache | bits | KL, mean | median | 99th of 100 | perplexity | other token | promised |",
             "|---|---|---|---|---|---|---|---|"]
    for cache, bits, kl, median, p99, cache_ppl, flips in rows:
        limit = LIMITS.get(cache, "") if path.stem.endswith("prose") else ""
        lines.append(f"| `{cache}` | {float(bits):.2f} | {float(kl):.5f} | {float(median):.5f} | {float(p99):.4f} "
                     f"| {float(cache_ppl):.2f} | {100 * float(flips):.1f}% | {limit} |")
    return "\n".join(lines) + "\n"


def main():
    results, output = map(pathlib.Path, sys.argv[1:])
    output.write_text(HEAD + "".join(table(p) for p in sorted(results.glob("*-*.txt"))) + TAIL, encoding="utf-8")


if __name__ == "__main__":
    main()

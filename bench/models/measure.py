#!/usr/bin/env python3
"""What a KV cache does to a pretrained model: the divergence of its predictions from those with a cache of floats.

A forward pass in float32 over a text; the keys and values of every layer go through the caches named. One line each:

    model NAME layers N heads H/K of D ppl X
    cache NAME bits X kl X median X p99 X ppl X flips X

With --layers CACHE also what each layer loses where all others, and its own other stream, are exact:

    layer N keys|values cache NAME kl X share X flips X

share: of the sum of all these lines' kl.

bits: of a cached value, without what is kept exactly beside the codes; kl: KL(floats || cache), nats a token, mean over
the positions, then the median and the 99th percentile; ppl: perplexity; flips: the share of positions whose likeliest
token is another. A table for people comes last.
"""
import argparse
import os
import sys

# Each thread takes a cache of its own. Read when numpy is loaded.
for library in ("OPENBLAS", "OMP", "MKL", "VECLIB_MAXIMUM"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

import caches
import forward
import library
import profiles
import run
import tokens as tokeniser

DEFAULT_LIBRARY = "build/models/tqkv.so"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, epilog=caches.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file: " + ", ".join(forward.ARCHITECTURES))
    parser.add_argument("--text", required=True, help="a file of plain text")
    parser.add_argument("--tokens", type=int, default=1024, help="so many of its first tokens (default: 1024)")
    parser.add_argument("--caches", default="", help="names with commas between them; see below")
    parser.add_argument("--layers", metavar="CACHE", help="the keys, and the values, of one layer at a time through this cache")
    parser.add_argument("--profile", metavar="OUT.gguf", help="write centre and scale of each layer's keys, learned from the text")
    parser.add_argument("--use", metavar="PROFILE.gguf", help="give these to the caches, which then learn nothing themselves")
    parser.add_argument("--chunk", type=int, default=512, help="tokens appended and attended at a time (default: 512)")
    parser.add_argument("--library", default=DEFAULT_LIBRARY, help=f"the shared object (default: {DEFAULT_LIBRARY})")
    return parser.parse_args()


def read_tokens(model, path, n_tokens):
    if n_tokens < 2:
        raise forward.Unfit(f"--tokens {n_tokens}: at least 2 are needed")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise forward.Unfit(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise forward.Unfit(f"{path}: not a text in UTF-8") from None
    found = tokeniser.tokenize(model.fields, text[:16 * n_tokens + 4096])
    if len(found) < n_tokens:
        found = tokeniser.tokenize(model.fields, text)
    if len(found) < n_tokens:
        raise forward.Unfit(f"{path}: the text has {len(found)} tokens, not {n_tokens}")
    if max(found) >= model.vocabulary:
        raise forward.Unfit(f"{model.path}: the tokeniser has more tokens than the model")
    return found[:n_tokens]


class Progress:
    """A bar on the terminal; where the output goes elsewhere, a line for each tenth."""

    def __init__(self):
        self.is_terminal = sys.stderr.isatty()
        self.tenth = 0

    def __call__(self, done, all):
        if self.is_terminal:
            bar = "#" * (40 * done // all)
            print(f"\r[{bar:<40}] {100 * done // all:3d}%", end="\r\n"[done == all], file=sys.stderr, flush=True)
        elif 10 * done // all > self.tenth:
            self.tenth = 10 * done // all
            print(f"{10 * self.tenth}%", file=sys.stderr, flush=True)


def print_lines(model, perplexity, variants, scores):
    print(f"model {os.path.splitext(os.path.basename(model.path))[0].replace(' ', '_')} layers {model.n_layers} heads "
          f"{model.n_heads}/{model.n_kv_heads} of {model.head_dim} ppl {perplexity:.4f}")
    for v, s in zip(variants, scores):
        print(f"cache {v.name} bits {sum(v.bits) / len(v.bits):.4g} kl {s.kl:.4g} median {s.median:.4g} p99 {s.p99:.4g} "
              f"ppl {s.perplexity:.4f} flips {s.flips:.4f}")


def print_table(perplexity, variants, scores):
    width = max(len(v.name) for v in variants)
    print(f"\n{'':{width}}  bits  KL, mean    median   99th of 100  perplexity  other likeliest token")
    print(f"{'floats':{width}}  {'32':>4}  {'':33}{perplexity:10.3f}")
    for v, s in zip(variants, scores):
        print(f"{v.name:{width}}  {sum(v.bits) / len(v.bits):4.2f}  {s.kl:8.5f}  {s.median:8.5f}  {s.p99:11.5f}  "
              f"{s.perplexity:10.3f}  {100 * s.flips:.2f}%")


def print_layers(variants, scores):
    total = sum(max(s.kl, 0.0) for s in scores) or 1.0
    for v, s in zip(variants, scores):
        (layer, kind), = v.kinds.items()
        print(f"layer {layer} {kind.part} cache {v.name} kl {s.kl:.4g} share {max(s.kl, 0.0) / total:.4f} flips {s.flips:.4f}")


def main():
    options = arguments()
    apart = options.layers and caches.parse(options.layers)
    kinds = [caches.parse(name) for name in options.caches.split(",") if name]
    shared = library.Library(options.library)
    model = forward.Model(options.model)
    tokens = read_tokens(model, options.text, options.tokens)
    if options.chunk < 1:
        raise forward.Unfit(f"--chunk {options.chunk}: at least 1 is needed")
    variants = [run.everywhere(kind, model.n_layers) for kind in kinds]
    used = options.use and shared.read_profile(options.use, model.n_layers, model.n_kv_heads, model.head_dim)
    layers = run.layer_by_layer(apart, model.n_layers) if apart else []
    one = run.Run(model, tokens, shared, used, options.chunk, Progress())
    learned = {}
    perplexity, scores = one.measure(variants + layers, lambda layer, q, k: learned.update({layer: shared.learn(q, k)})
                                     if options.profile else None)
    if options.profile:
        profiles.write(options.profile, os.path.basename(model.path), [learned[i] for i in range(model.n_layers)],
                       shared.hash)
    print_lines(model, perplexity, variants, scores)
    print_layers(layers, scores[len(variants):])
    if variants:
        print_table(perplexity, variants, scores)


if __name__ == "__main__":
    try:
        main()
    except forward.Unfit as unfit:
        sys.exit(f"measure.py: {unfit}")

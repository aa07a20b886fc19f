#!/usr/bin/env python3
"""What a KV cache does to a pretrained model: the divergence of its predictions from those with a cache of floats.

A forward pass in float32 over a text; the keys and values of every layer go through the caches named. One line each:

    model NAME layers N heads H/K of D ppl X
    cache NAME bits X kl X median X p99 X p999 X ppl X flips X

With --plan BITS the formats of each layer's keys and values that lose least at so many bits a value, by what each loses alone:

    plan layer N keys FORMAT values FORMAT
    plan bits X kl X                          kl: by that calculation

With --bytes 2G --context N in their place, for all layers' keys and values with exact ends and norms; a layer with a window
keeps that and a chunk:

    plan bytes X of X context N kl X

The cache `plan` has them. With --layers CACHE also what each layer loses where all others, and its own other stream, are exact:

    layer N keys|values cache NAME kl X share X flips X

share: of the sum of all these lines' kl.

With --recall N in place of all these, by depth of the text in which the numbers stand (recall.py says more):

    recall NAME depth X-Y items N right N same N loss X

bits: of a cached value, without what is kept exactly beside the codes; kl: KL(floats || cache), nats a token, mean over
the positions, then the median, the 99th percentile and the 99.9th; ppl: perplexity; flips: the share of positions whose likeliest
token is another. A table for people comes last.
"""
import argparse
import os
import sys
import warnings

# Each thread takes a cache of its own. Read when numpy is loaded.
for library in ("OPENBLAS", "OMP", "MKL", "VECLIB_MAXIMUM"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

import numpy as np

import caches
import forward
import library
import plans
import profiles
import recall
import run
import tokens as tokeniser

DEFAULT_LIBRARY = "build/models/tqkv.so"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, epilog=caches.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file: " + ", ".join(forward.ARCHITECTURES))
    parser.add_argument("--text", required=True, help="a file of plain text")
    parser.add_argument("--tokens", type=int, default=1024, help="so many of its first tokens (default: 1024)")
    parser.add_argument("--behind", type=int, default=0, metavar="N",
                        help="put the first token N times before the text, as a warm-up or padding would; it is not judged")
    parser.add_argument("--caches", default="", help="names with commas between them; see below")
    parser.add_argument("--layers", metavar="CACHE", help="the keys, and the values, of one layer at a time through this cache")
    parser.add_argument("--plan", metavar="BITS", help="choose formats by layer, also 3,4.5 for several plans; --profile writes one, too")
    parser.add_argument("--bytes", metavar="2G", help="in place of --plan: so many bytes for all layers at --context positions")
    parser.add_argument("--context", type=int, metavar="N", help="of --bytes")
    parser.add_argument("--layers-of", metavar="TEXT", help="the text on which the plan is chosen (default: that of --text)")
    parser.add_argument("--layers-tokens", type=int, metavar="N", help="so many of its tokens (default: --tokens)")
    parser.add_argument("--losses", metavar="FILE", help="keep there what plans are chosen by; where the file is, it is read in place of measuring")
    parser.add_argument("--profile", metavar="OUT.gguf", help="write centre and scale of each layer's keys, learned from the text")
    parser.add_argument("--use", metavar="PROFILE.gguf", help="give these to the caches, which then learn nothing themselves")
    parser.add_argument("--chunk", type=int, default=512, help="tokens appended and attended at a time (default: 512)")
    parser.add_argument("--recall", type=int, metavar="N", help="ask at the end of the text for N numbers that stand in it")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="judge each Nth prediction only (default: 1)")
    parser.add_argument("--library", default=DEFAULT_LIBRARY, help=f"the shared object (default: {DEFAULT_LIBRARY})")
    return parser.parse_args()


def read_text(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise forward.Unfit(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise forward.Unfit(f"{path}: not a text in UTF-8") from None


def read_tokens(model, path, n_tokens, least=2):
    if n_tokens < least:
        raise forward.Unfit(f"--tokens {n_tokens}: at least {least} are needed")
    text = read_text(path)
    found = tokeniser.tokenize(model.fields, text[:16 * n_tokens + 4096])
    if len(found) < n_tokens:
        found = tokeniser.tokenize(model.fields, text)
    if len(found) < n_tokens:
        raise forward.Unfit(f"{path}: the text has {len(found)} tokens, not {n_tokens}")
    if max(found) >= model.vocabulary:
        raise forward.Unfit(f"{model.path}: the tokeniser has more tokens than the model")
    return found[:n_tokens]


def read_task(options, model):
    """The tokens, the places of those whose successor is judged, and with --recall what is asked."""
    for name in ("chunk", "every"):
        if getattr(options, name) < 1:
            raise forward.Unfit(f"--{name} {getattr(options, name)}: at least 1 is needed")
    if options.behind < 0 or (options.behind and options.recall is not None):
        raise forward.Unfit(f"--behind {options.behind}: negative, or beside --recall")
    if options.recall is not None:
        task = recall.make(model.fields, read_text(options.text), options.tokens, options.recall)
        return task.tokens, task.judged, task
    tokens = read_tokens(model, options.text, options.tokens, 1 + options.every)
    return [tokens[0]] * options.behind + list(tokens), np.arange(options.every - 1, options.tokens - 1, options.every) + options.behind, None


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
              f"p999 {s.p999:.4g} ppl {s.perplexity:.4f} flips {s.flips:.4f}")


def print_table(perplexity, variants, scores):
    width = max(len(v.name) for v in variants)
    print(f"\n{'':{width}}  bits  KL, mean    median   99th of 100  999th of 1000  perplexity  other likeliest token")
    print(f"{'floats':{width}}  {'32':>4}  {'':48}{perplexity:10.3f}")
    for v, s in zip(variants, scores):
        print(f"{v.name:{width}}  {sum(v.bits) / len(v.bits):4.2f}  {s.kl:8.5f}  {s.median:8.5f}  {s.p99:11.5f}  {s.p999:13.5f}  "
              f"{s.perplexity:10.3f}  {100 * s.flips:.2f}%")


def print_layers(variants, scores):
    total = sum(max(s.kl, 0.0) for s in scores) or 1.0
    for v, s in zip(variants, scores):
        (layer, kind), = v.kinds.items()
        print(f"layer {layer} {kind.part} cache {v.name} kl {s.kl:.4g} share {max(s.kl, 0.0) / total:.4f} flips {s.flips:.4f}")


def open_variants(options, n_layers, made):
    """The caches of --caches, and the layers of --layers. made: plans by their bits."""
    variants = []
    for kind in [caches.parse(name) for name in options.caches.split(",") if name]:
        if kind.keys != caches.PLAN:
            variants.append(run.everywhere(kind, n_layers))
            continue
        if not made:
            raise forward.Unfit("the cache plan needs --plan or --bytes, or --use with a profile that has one")
        for bits, plan in made.items():
            variants.append(run.planned(kind, plan, bits if len(made) > 1 else ""))
    return variants, run.layer_by_layer(caches.parse(options.layers), n_layers) if options.layers else []


def stream_bytes(options, model, shared, shape):
    """{part: {format: bytes}} of a layer: at --context positions as tqkv counts them, or of one position without ends."""
    if options.bytes:
        return shared.plan_bytes(shape, options.context, options.chunk)
    dims = {"keys": model.head_dim, "values": model.value_dim}
    return {part: {name: shared.format_bits(name, dim) * model.n_kv_heads * dim / 8 for name in shared.plan_formats()}
            for part, dim in dims.items()}


def plan_rooms(options, model):
    """What each plan may take: {its number in names: bytes}."""
    if options.bytes:
        return {"": plans.read_bytes(options.bytes)}
    values = model.n_layers * model.n_kv_heads * (model.head_dim + model.value_dim)
    return {f"{bits:g}": bits / 8 * values for bits in plans.read_bits(options.plan)}


def measure_losses(options, model, shared):
    """{(layer, part): (loss, {format: error})} of the text for plans."""
    formats, errors = shared.plan_formats(), {}
    tokens = read_tokens(model, options.layers_of or options.text, options.layers_tokens or options.tokens)

    def look(layer, rows):
        learned = shared.learn(rows[0], rows[1])
        errors[layer, "keys"] = {name: shared.error(name, rows[1], learned) for name in formats}
        errors[layer, "values"] = {name: shared.error(name, rows[2]) for name in formats}

    variants = run.layer_by_layer(caches.parse(plans.REFERENCE), model.n_layers)
    every = max(1, len(tokens) // plans.JUDGED)
    one = run.Run(model, tokens, shared, None, options.chunk, Progress(), np.arange(every - 1, len(tokens) - 1, every))
    _, scores = one.measure(variants, look)
    parts = [(layer, kind.part) for v in variants for layer, kind in v.kinds.items()]
    return {part: (s.kl, errors[part]) for part, s in zip(parts, scores)}


def find_streams(options, model, shared):
    """A plans.Stream for the keys and for the values of each layer."""
    if options.losses and os.path.exists(options.losses):
        losses = plans.read_losses(options.losses, model.n_layers, shared.plan_formats())
    else:
        losses = measure_losses(options, model, shared)
        if options.losses:
            plans.write_losses(options.losses, losses)
    one = run.Run(model, [0], shared)
    sizes = [stream_bytes(options, model, shared, one.shape(layer)) for layer in range(model.n_layers)]
    return [plans.Stream(layer, part, loss, errors, sizes[layer][part]) for (layer, part), (loss, errors) in losses.items()]


def check_plans(options, model, shared):
    """What the plans may take, if that is enough for them: before the long part."""
    if (options.layers_tokens or options.tokens) < plans.LEAST_TOKENS:
        raise forward.Unfit(f"--plan: at least {plans.LEAST_TOKENS} tokens are needed, not {options.layers_tokens or options.tokens}")
    shortest, rooms = shared.plan_formats()[0], plan_rooms(options, model)
    one = run.Run(model, [0], shared)
    least = sum(stream_bytes(options, model, shared, one.shape(i))[part][shortest]
                for i in range(model.n_layers) for part in ("keys", "values"))
    for bits, room in rooms.items():
        if room < least and options.bytes:
            raise forward.Unfit(f"--bytes {options.bytes}: not even {shortest} fits: {least:.0f} bytes for {options.context} positions")
        if room < least:
            raise forward.Unfit(f"--plan {bits}: {shortest} takes {least / room * float(bits):g} bits")
    return rooms


def make_plans(options, model, shared):
    """Formats by layer, {layer: (of keys, of values)}, for each number of bits."""
    rooms = check_plans(options, model, shared)
    streams = find_streams(options, model, shared)
    made = {}
    for bits, room in rooms.items():
        chosen = plans.choose(shared, streams, room)
        made[bits] = plans.by_layer(streams, chosen)
        for layer, (keys, values) in made[bits].items():
            print(f"plan layer {layer} keys {keys} values {values}")
        total, loss = plans.bytes_of(streams, chosen), sum(map(plans.loss, streams, chosen))
        if options.bytes:
            print(f"plan bytes {total:.0f} of {room:.0f} context {options.context} kl {loss:.4g}")
        else:
            print(f"plan bits {total / room * float(bits):.4g} kl {loss:.4g}")
    return made


def main():
    options = arguments()
    for name in [*options.caches.split(","), options.layers]:
        if name:
            caches.parse(name)
    if options.bytes and (options.plan or not options.context or options.context < 1):
        raise forward.Unfit("--bytes: a --context of at least 1 is needed, and no --plan")
    shared = library.Library(options.library)
    model = forward.Model(options.model)
    tokens, places, task = read_task(options, model)
    used = options.use and shared.read_profile(options.use, model.n_layers, model.n_kv_heads, model.head_dim)
    made = {"": {i: layer[2] for i, layer in enumerate(used)}} if used and used[0][2] else {}
    if options.plan or options.bytes:
        if options.profile and len(plan_rooms(options, model)) > 1:
            raise forward.Unfit("--profile: it holds one plan, --plan asks for several")
        made = make_plans(options, model, shared)
    variants, layers = open_variants(options, model.n_layers, made)
    one = run.Run(model, tokens, shared, used, options.chunk, Progress(), places)
    learned = {}
    perplexity, scores = one.measure(variants + layers, lambda layer, rows: learned.update({layer: shared.learn(*rows[:2])})
                                     if options.profile else None)
    if options.profile:
        profiles.write(options.profile, os.path.basename(model.path), [learned[i] for i in range(model.n_layers)],
                       shared.hash, next(iter(made.values()), None))
    if task is not None:
        recall.report(task, [v.name for v in variants], one.found)
        return
    print_lines(model, perplexity, variants, scores)
    print_layers(layers, scores[len(variants):])
    if variants:
        print_table(perplexity, variants, scores)


if __name__ == "__main__":
    # What overflows ends in figures that are no numbers, which have an error of their own.
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        main()
    except forward.Unfit as unfit:
        sys.exit(f"measure.py: {unfit}")

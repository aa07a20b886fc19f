"""Plans: formats of each layer's keys and values for a number of bits a value, or of bytes.

What a stream (the keys or the values of a layer) loses is measured for one format, with everything else exact. For another it
counts in proportion to the format's error on rows of that stream: the divergence grows with the square of the noise.
examples/plan.h then chooses.
"""
import collections
import json
import re

from forward import Unfit

REFERENCE = "tq4/tq4:exact=4+128:calibrate=512"  # with what a preset adds, since a plan has it, too
MEASURED = "tq4"
CAUTION = 0.3
JUDGED = 1024       # predictions, evenly from the tokens
LEAST_TOKENS = 256  # of which REFERENCE has some in codes
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

# loss: of MEASURED alone; errors, bytes: of each format
Stream = collections.namedtuple("Stream", "layer part loss errors bytes")


def write_losses(path, losses):
    """losses: {(layer, part): (loss, {format: error})}"""
    with open(path, "w", encoding="utf-8") as file:
        json.dump([[*part, *found] for part, found in losses.items()], file, indent=1)


def read_losses(path, n_layers, formats):
    """What write_losses wrote, of a model with so many layers."""
    try:
        with open(path, encoding="utf-8") as file:
            found = {(layer, part): (float(loss), {name: float(errors[name]) for name in formats}) for layer, part, loss, errors in json.load(file)}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Unfit(f"{path}: no losses that can be read: {error}") from None
    if list(found) != [(layer, part) for layer in range(n_layers) for part in ("keys", "values")]:
        raise Unfit(f"{path}: the losses are of a model of another shape")
    return found


def loss(stream, name):
    return 0.0 if name == "f16" else max(stream.loss, 0.0) * stream.errors[name] / stream.errors[MEASURED]


def choose(library, streams, room):
    """A format for each stream, of so many bytes at most; None where even the shortest take more. Each counts as if it lost
    three tenths of the mean more: what a stream does not lose on one text it may on another."""
    formats = library.plan_formats()
    more = CAUTION * sum(max(s.loss, 0.0) for s in streams) / len(streams)
    return library.plan([[loss(s._replace(loss=max(s.loss, 0.0) + more), name) for name in formats] for s in streams],
                        [[s.bytes[name] for name in formats] for s in streams], room)


def bytes_of(streams, chosen):
    return sum(s.bytes[name] for s, name in zip(streams, chosen))


def by_layer(streams, chosen):
    """{layer: (format of keys, format of values)}"""
    found = collections.defaultdict(dict)
    for s, name in zip(streams, chosen):
        found[s.layer][s.part] = name
    return {layer: (parts["keys"], parts["values"]) for layer, parts in found.items()}


def read_bytes(text):
    """2G, 512M or a number of bytes."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([KMGT]?)", text)
    if not found or not float(found[1]):
        raise Unfit(f"--bytes {text}: a number of bytes is needed, as 2G or 512M")
    return float(found[1]) * UNITS[found[2]]


def read_bits(text):
    """Numbers of bits with commas between them."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise Unfit(f"--plan {text}: numbers of bits are needed, as 4.5 or 3,4.5") from None

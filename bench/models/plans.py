"""Plans: formats of each layer's keys and values for a number of bits a value.

What a stream (the keys or the values of a layer) loses is measured for one format, with everything else exact. For another it
counts in proportion to the format's error on rows of that stream: the divergence grows with the square of the noise. Starting
from the shortest formats, the bits go where each takes most away (greedily; losses of streams add up).
"""
import collections

FORMATS = ("tq2", "tq3", "tq4", "tq5", "tq6", "i8", "f16")  # by bits; TQ8 has I8's and a larger error
REFERENCE = "tq4/tq4:exact=4+128:calibrate=512"             # with what a preset adds, since a plan has it, too
MEASURED = "tq4"
LEAST_TOKENS = 256                                          # of which REFERENCE has some in codes

# loss: of MEASURED alone; errors, bits: of each format; weight: values a position
Stream = collections.namedtuple("Stream", "layer part loss errors bits weight")


def loss(stream, name):
    return 0.0 if name == "f16" else max(stream.loss, 0.0) * stream.errors[name] / stream.errors[MEASURED]


def gain(stream, at, to):
    """What a step takes away, by the bits that it costs."""
    bits = stream.weight * (stream.bits[to] - stream.bits[at])
    return (loss(stream, at) - loss(stream, to)) / bits


def best_step(stream, at, room):
    """The step with the largest gain that there is room for, or None: a longer one may gain more a bit than the next."""
    later = FORMATS[FORMATS.index(at) + 1:]
    steps = [(gain(stream, at, to), to) for to in later if stream.weight * (stream.bits[to] - stream.bits[at]) <= room]
    return max(steps, default=None)


def choose(streams, bits):
    """A format for each stream, at most so many bits a value on average."""
    chosen = [FORMATS[0]] * len(streams)
    total = sum(s.weight for s in streams)
    room = bits * total - sum(s.weight * s.bits[FORMATS[0]] for s in streams)
    while True:
        steps = [(step, i) for i, s in enumerate(streams) if (step := best_step(s, chosen[i], room))]
        if not steps:
            return chosen
        (_, to), index = max(steps)
        room -= streams[index].weight * (streams[index].bits[to] - streams[index].bits[chosen[index]])
        chosen[index] = to


def bits_of(streams, chosen):
    return sum(s.weight * s.bits[f] for s, f in zip(streams, chosen)) / sum(s.weight for s in streams)


def by_layer(streams, chosen):
    """{layer: (format of keys, format of values)}"""
    found = collections.defaultdict(dict)
    for s, name in zip(streams, chosen):
        found[s.layer][s.part] = name
    return {layer: (parts["keys"], parts["values"]) for layer, parts in found.items()}

"""One text through a model, with each cache beside floats: all of them layer by layer, on the threads that there are."""
import collections
import concurrent.futures
import dataclasses
import os

import numpy as np

import caches
import forward

LOGITS = 1 << 24  # of one block of positions: 64 MiB


class Variant:
    """The model with a cache in some of its layers."""

    def __init__(self, name, kinds):
        """kinds: {layer: Kind}; the other layers attend to floats."""
        self.name, self.kinds = name, kinds
        self.first = min(kinds, default=0)
        self.hidden = None  # that of floats up to the first layer with a cache
        self.bits = []      # of each of these layers


Score = collections.namedtuple("Score", "kl median p99 p999 perplexity flips")


class Run:
    def __init__(self, model, tokens, library, profile=None, chunk=512, progress=lambda done, all: None, judged=None):
        """profile: centre and scale of each layer's keys, and, with a plan, its formats; or None. progress(done, all) hears of each
        step. judged: the tokens whose successor's prediction is judged; None: all."""
        self.model, self.tokens, self.library, self.profile = model, np.asarray(tokens), library, profile
        self.chunk, self.progress = chunk, progress
        self.judged = np.arange(len(self.tokens) - 1) if judged is None else judged
        self.found = []  # of floats, then of each variant: divergence, log-probability of the next token and likeliest token
        self.n_done = self.n_steps = 0

    def shape(self, layer):
        m = self.model
        return caches.Shape(len(self.tokens), m.n_heads, m.n_kv_heads, m.head_dim, m.value_dim, m.window_of(layer), m.scale)

    def step(self, result):
        self.n_done += 1
        self.progress(self.n_done, self.n_steps)
        return result

    def measure(self, variants, learn=None):
        """The perplexity of floats and the variants' scores. learn(layer, rows): sees the queries, keys
        and values that floats have there."""
        for v in variants:
            for layer, kind in v.kinds.items():
                kind.check(self.library, self.shape(layer))
        block = max(1, LOGITS // self.model.vocabulary)
        starts = range(0, len(self.judged), block)
        self.n_steps = sum(self.model.n_layers - v.first for v in variants) + self.model.n_layers + len(starts)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            base = Variant("floats", {})
            base.hidden = self.model.embed(self.tokens)
            for index in range(self.model.n_layers):
                self.pass_layer(pool, base, variants, index, learn)
            rows = pool.map(lambda at: self.step(self.compare(base, variants, self.judged[at:at + block])), starts)
            return self.scores(variants, rows)

    def pass_layer(self, pool, base, variants, index, learn):
        layer = forward.Layer(self.model, index, len(self.tokens))
        for v in variants:
            if v.first == index:
                v.hidden = base.hidden
        present = [base] + [v for v in variants if v.first <= index]
        work = [pool.submit(self.advance, v, layer, learn if v is base else None) for v in present]
        for done in work:
            self.step(done.result())

    def advance(self, variant, layer, learn):
        rows, shape = layer.project(variant.hidden), self.shape(layer.index)
        if learn:
            learn(layer.index, rows)
        kind = variant.kinds.get(layer.index)
        if kind is None:
            attended = caches.attend_floats(*rows, shape)
        else:
            learned = self.profile[layer.index][:2] if self.profile else None
            attended, bits = kind.attend(self.library, shape, learned, rows, self.chunk)
            variant.bits.append(bits)
        variant.hidden = layer.finish(variant.hidden, attended)

    def compare(self, base, variants, part):
        """Of the positions of a part, for floats and for each variant: the KL divergence, the log-probability of the next token,
        and the likeliest token."""
        following = self.tokens[part + 1, None]
        exact = log_softmax(self.model.logits(base.hidden[part]))
        shares = np.exp(exact)
        found = [(np.zeros(len(part)), np.take_along_axis(exact, following, 1)[:, 0], exact.argmax(-1))]
        for v in variants:
            other = log_softmax(self.model.logits(v.hidden[part]))
            said = np.take_along_axis(other, following, 1)[:, 0]
            likeliest = other.argmax(-1)
            np.subtract(exact, other, out=other)
            found.append((np.einsum("ij,ij->i", shares, other), said, likeliest))
        return found

    def scores(self, variants, parts):
        self.found = [[np.concatenate(x) for x in zip(*blocks)] for blocks in zip(*parts)]
        scores = []
        for kl, said, likeliest in self.found[1:]:
            kl, flips = kl.astype(np.float64), likeliest != self.found[0][2]
            scores.append(Score(kl.mean(), np.median(kl), np.quantile(kl, 0.99), np.quantile(kl, 0.999), perplexity(said), flips.mean()))
        of_floats = perplexity(self.found[0][1])
        if not np.isfinite(of_floats):
            raise forward.Unfit(f"{self.model.path}: its predictions are no numbers, so weights are damaged")
        for v, score in zip(variants, scores):
            if not np.isfinite(score).all():
                raise forward.Unfit(f"{v.name}: the predictions with this cache are no numbers")
        return of_floats, scores


def perplexity(log_probabilities):
    return float(np.exp(-log_probabilities.astype(np.float64).mean()))


def log_softmax(logits):
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return logits


def everywhere(kind, n_layers):
    return Variant(kind.name, dict.fromkeys(range(n_layers), kind))


def planned(kind, plan, bits=""):
    """Each layer with its formats: plan: {layer: (of keys, of values)}. bits: in its name, as plan4.5."""
    return Variant(kind.keys + bits + kind.name[len(kind.keys):], {layer: dataclasses.replace(kind, keys=keys, values=values) for layer, (keys, values) in plan.items()})


def layer_by_layer(kind, n_layers):
    """The cache in the keys of one layer alone, then in its values alone, layer after layer."""
    return [Variant(kind.name, {layer: dataclasses.replace(kind, part=part)})
            for layer in range(n_layers) for part in ("keys", "values")]

"""Recall: numbers that stand somewhere in a long text and are asked for at its end.

A sentence `The access code of the copper falcon is 48213.` stands at each of some depths of the text; the questions follow in
another order, each with its answer, so that a model sees the form. An item is right if each token of its answer is the likeliest
one behind what stands before it, and the same if these tokens are the ones that the model with floats gives.
"""
import collections
import random

import numpy as np

import tokens as tokeniser
from forward import Unfit

KINDS = "copper silver amber crimson violet golden frozen hollow silent broken wooden hidden".split()
THINGS = "falcon lantern harbour orchard compass bridge garden mirror castle engine window anchor".split()
SENTENCE = "The access code of the {} {} is"
DIGITS, BINS = 5, 4

# judged: the tokens before those of answers; items: to which item each of them belongs; depths: of items, 0 to 1
Task = collections.namedtuple("Task", "tokens judged items depths")


def make(fields, text, n_tokens, n_items):
    """n_tokens of the text with n_items sentences in it, and the questions behind."""
    if not 1 <= n_items <= len(KINDS) * len(THINGS):
        raise Unfit(f"--recall {n_items}: 1 to {len(KINDS) * len(THINGS)} items are possible")
    chance = random.Random(1)
    names = chance.sample([SENTENCE.format(kind, thing) for kind in KINDS for thing in THINGS], n_items)
    codes = [f" {chance.randrange(10**(DIGITS - 1), 10**DIGITS)}" for _ in names]
    lines = text[:8 * n_tokens].splitlines(keepends=True)
    parts = tokeniser.tokenize_all(fields, ["\n", "\n", ".\n", *names, *codes, *lines])
    begin, end, stop = parts[:3]
    names, codes, lines = parts[3:3 + n_items], parts[3 + n_items:3 + 2 * n_items], parts[3 + 2 * n_items:]
    sentences = [name + code + stop for name, code in zip(names, codes)]
    tail, judged, items = ask(names, codes, stop, chance)
    room = n_tokens - len(begin) - len(end) - len(tail) - sum(map(len, sentences))
    if room < n_items or sum(map(len, lines)) < room:
        raise Unfit(f"{n_items} items in {n_tokens} tokens: " + ("there is no room for them" if room < n_items else "the text is too short"))
    depths = (np.arange(n_items) + 0.5) / n_items
    body = begin + place(lines, room, sentences, depths) + end
    return Task(body + tail, np.array(judged) + len(body), np.array(items), depths)


def ask(names, codes, stop, chance):
    """The questions and answers in another order: tokens, places of those before an answer's, and their items."""
    tail, judged, items = [], [], []
    for item in chance.sample(range(len(names)), len(names)):
        tail += names[item]
        judged += range(len(tail) - 1, len(tail) + len(codes[item]) - 1)
        items += [item] * len(codes[item])
        tail += codes[item] + stop
    return tail, judged, items


def place(lines, room, sentences, depths):
    """So many tokens of the lines; each sentence comes behind the line that reaches its depth."""
    out, used, waiting = [], 0, list(zip(depths, sentences))
    for line in lines:
        line = line[:room - used]
        out += line
        used += len(line)
        while waiting and used >= waiting[0][0] * room:
            out += waiting.pop(0)[1]
        if used == room:
            return out
    return out


def bins(task, answers, floats, found):
    """For each quarter of the depths: items, how many are right, how many are the same, and the loss of a token in nats.
    answers: the true tokens; floats, found: (kl, log-probability, likeliest token) of each of them."""
    right, same = found[2] == answers, found[2] == floats[2]
    at = np.minimum((task.depths * BINS).astype(int), BINS - 1)
    rows = []
    for b in range(BINS):
        chosen = [task.items == item for item in np.flatnonzero(at == b)]
        mine = np.any(chosen, axis=0) if chosen else np.zeros(len(answers), bool)
        rows.append((len(chosen), sum(right[c].all() for c in chosen), sum(same[c].all() for c in chosen),
                     float(-found[1][mine].mean()) if chosen else 0.0))
    return rows


def report(task, names, found):
    """Lines, then a table. found: as Run.found has them, of floats first."""
    answers = np.asarray(task.tokens)[task.judged + 1]
    tables = [bins(task, answers, found[0], f) for f in found]
    for name, rows in zip(["floats", *names], tables):
        for b, (n, right, same, loss) in enumerate(rows):
            print(f"recall {name} depth {b / BINS:g}-{(b + 1) / BINS:g} items {n} right {right} same {same} loss {loss:.4g}")
    width = max(map(len, ["floats", *names]))
    print(f"\n{'right of ' + str(len(task.depths)):{width}}  " + "  ".join(f"{b / BINS:4.2f}-{(b + 1) / BINS:4.2f}" for b in range(BINS)) +
          "    all   same   loss")
    for name, rows in zip(["floats", *names], tables):
        n, right, same = (sum(r[i] for r in rows) for i in range(3))
        loss = sum(r[3] * r[0] for r in rows) / n
        print(f"{name:{width}}  " + "  ".join(f"{r[1]:4d}/{r[0]:<4d}" for r in rows) + f"  {right:4d}  {same:5d}  {loss:.4f}")

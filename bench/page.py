#!/usr/bin/env python3
"""Makes BENCHMARKS.md, and the marked parts of other documents, from bench/results/*.txt.

usage: page.py [--check]

--check writes nothing, and fails if a document is not what the results give. A marked part stands between the lines
`<!-- bench NAME -->` and `<!-- /bench -->`; it takes the processor's results that come first by name. Results of different
commits are told on the page.
"""
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = {"f16": "F16", "i8": "I8", "tq8": "TQ8", "tq6": "TQ6", "tq5": "TQ5", "tq4": "TQ4", "tq3": "TQ3", "tq2": "TQ2",
         "tq6_bytes": "TQ6_BYTES", "tq5_bytes": "TQ5_BYTES", "default": "I8 keys, TQ4 values",
         "i8_tq4": "I8 keys, TQ4 values", "default_bf16": "the same, bfloat16 queries", "i8_of_f16": "I8 of halves",
         "i8_of_bf16": "I8 of bfloat16", "tq4_of_f16": "TQ4 of halves", "tq4_of_bf16": "TQ4 of bfloat16"}
SETS = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "scalar": "plain C"}
DECODE, EIGHT, MANY = (128, 32768, 2, 1), (128, 4096, 2, 8), (128, 4096, 2, 128)
LONG, SHORT = 131072, 8192  # positions on a GPU


def name_of(entry):
    return NAMES.get(entry, entry)


# ---- Reading ----

class Set:
    """One instruction set of a processor: times of encoding by head_dim, of attention by shape, and peaks."""

    def __init__(self):
        self.peak, self.attend, self.encode, self.ratios, self.threads, self.others = "", {}, {}, {}, {}, {}


class Result:
    def __init__(self, path):
        self.name, self.facts, self.sets, self.times, self.limits, self.builds = path.stem, {}, {}, {}, {}, []
        self.ratios = {}
        self.torch = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            self.read(line)
        if "commit" not in self.facts or "seconds" not in self.facts:
            sys.exit(f"{path}: not a whole result of bench/measure.sh")

    def read(self, line):
        words = line.split()
        fact = re.match(r"# ([a-z ]+): (.*)", line)
        isa = re.match(r"instruction set (\w+)", line)
        encode = re.match(r"encode: head_dim (\d+)", line)
        threads = re.match(r"(\d+) threads: .*read ([\d.]+) GB/s", line)
        attend = re.match(r"attention: head_dim (\d+), (\d+) positions, group (\d+), (\d+) quer", line)
        other = re.match(r"(latent|index|lists\w*): ", line)
        if fact:
            self.facts[fact[1]] = fact[2]
        elif isa:
            self.set = self.sets.setdefault(isa[1], Set())
            self.isa, self.table = isa[1], {}
        elif line.startswith("peak: "):
            self.set.peak = self.set.peak or line[6:]
        elif encode:
            self.table = self.set.encode.setdefault(int(encode[1]), {})
        elif attend:
            self.table = self.set.attend.setdefault(tuple(int(x) for x in attend.groups()), {})
        elif other:
            self.table = self.set.others.setdefault(other[1], {})
        elif threads:
            self.table = self.set.threads.setdefault((threads[1], threads[2]), {})
        elif line.startswith("  ") and self.sets and len(words) >= 4 and re.fullmatch(r"[\d.]+", words[1]):
            self.table[words[0]] = words[1:]
        elif line.startswith("build ") and len(words) == 4:
            self.builds.append((words[1], int(words[2]), float(words[3])))
        elif line.startswith("limit "):
            self.limits[words[1]] = float(words[2])
        elif line.startswith("torch "):
            self.torch = " ".join(words[1:2])
        elif line.startswith("time "):
            self.times[words[1]] = float(words[2])
        elif line.startswith("ratio ") and len(words) == 3:
            into, name = (self.set.ratios, words[1]) if self.sets else (self.ratios, words[1])
            into[name[:-len(self.isa) - 1] if self.sets and name.endswith("_" + self.isa) else name] = float(words[2])


NARROW_LISTS = ((128, 1), (128, 8), (64, 1), (64, 2), (64, 8))  # head_dim, group


def microseconds(row):
    value = float(row[0])
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def gigabytes(row):
    return f"{float(row[4]):.1f}"


def wrapped(text):
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def paragraphs(parts):
    """Text is wrapped; tables and headings are as they are."""
    return "\n\n".join(p if re.search(r"^[|#]", p, re.M) else wrapped(p) for p in parts)


# ---- A processor ----

def is_peer(name):
    return "ggml_" in name


def best_peers(shape):
    """[(name, row)]: the fastest way of each peer to read each of its types."""
    best = {}
    for entry, row in shape.items():
        match = re.match(r"(ik_ggml|ggml)_(?:flash_)?(f16|q8_0|q4_0|q8_KV)_", entry) if is_peer(entry) else None
        if match and (match.groups() not in best or float(row[0]) < float(best[match.groups()][0])):
            best[match.groups()] = row
    return [({"ggml": "ggml", "ik_ggml": "ik_llama.cpp"}[peer] + " " + kind, row) for (peer, kind), row in best.items()]


def share(row):
    return f"{row[6]} {row[5][0]}"


def is_shown(entry):
    """Without the variants whose times follow from the others: bytes, and rows of other types."""
    return not is_peer(entry) and not re.search("memcpy|_bytes|_of_", entry)


def all_threads(one, entry):
    return next((rows[entry] for rows in one.threads.values() if entry in rows), None)


def main_row(one, entry):
    """One token, share, x F16, x ggml, 8 queries, 128 queries, all threads, encode"""
    decode, of_peer = one.attend[DECODE].get(entry), one.ratios.get(f"decode_{entry}_d128_n32768_g2_peers_best_f16")
    row = [microseconds(decode), share(decode), "-" if entry == "f16" else decode[7]] if decode else ["-"] * 3
    row.append(f"{of_peer:.1f}" if of_peer else "-")
    for shape in (EIGHT, MANY):
        found = one.attend.get(shape, {}).get(entry)
        row.append(f"{microseconds(found)} ({found[6]})" if found else "-")
    threads, encode = all_threads(one, entry), one.encode.get(128, {}).get(entry)
    return row + [microseconds(threads) if threads else "-", gigabytes(encode) if encode else "-"]


def peer_row(one, name):
    """As main_row, of a peer's fastest way."""
    cells = [dict(best_peers(one.attend.get(shape, {}))).get(name) for shape in (DECODE, EIGHT, MANY)]
    label = {"ggml": "ggml", "ik_llama.cpp": "ik_ggml"}[name.split()[0]] + "_" + name.split()[-1]
    encode = one.encode.get(128, {}).get(label)
    token, eight, many = [microseconds(c) if c else "-" for c in cells]
    return [token, "", "", "", eight, many, "", gigabytes(encode) if encode else "-"]


def joined(cells):
    """The cells of each set as one; nothing where no set has anything."""
    return (" / " if any(" " in c for c in cells) else "/").join(cells) if any(cells) else ""


def main_table(result):
    sets = list(result.sets.values())
    entries = [e for e in dict.fromkeys(e for one in sets for e in one.attend.get(DECODE, {})) if is_shown(e)]
    peers = list(dict.fromkeys(name for one in sets for name, _ in best_peers(one.attend.get(DECODE, {}))))
    threads = sorted({n for one in sets for n, _ in one.threads})
    head = ["", "1 query", "share", "× F16", "× ggml", "8 queries (share)", "128 queries (share)",
            "1 query, " + ("/".join(threads) or "all") + " threads", "encode, GB/s"]
    rows = [[name_of(e)] + [joined(c) for c in zip(*(main_row(one, e) for one in sets))] for e in entries]
    return table(head, rows + [[p] + [joined(c) for c in zip(*(peer_row(one, p) for one in sets))] for p in peers])


def limits_of(result):
    """Each set's peaks, and the bandwidth of all threads."""
    return ". ".join(f"{SETS[isa]}: {one.peak}" + "".join(f", by {n} threads {read} GB/s" for n, read in one.threads)
                     for isa, one in result.sets.items()) + "."


def by_column(result, first, columns):
    """Rows of formats; a cell has a number for each set. columns: [(title, values)], values(one): {entry: text}"""
    sets = list(result.sets.values())
    found = [(title, [values(one) for one in sets]) for title, values in columns]
    entries = [e for e in dict.fromkeys(e for _, cells in found for c in cells for e in c)
               if is_shown(e) and "bf16" not in e]
    rows = [[name_of(e)] + [joined([c.get(e, "-") for c in cells]) for _, cells in found] for e in entries]
    return table([first] + [title for title, _ in found], rows)


def pages_table(result):
    """Speed over pages, of a linear store's; of a batch, of a loop of calls; of two threads that append, of one."""
    rows, head = [], []
    for isa, one in result.sets.items():
        paged = {m[1]: v for name, v in one.ratios.items()
                 for m in [re.match(r"paged_(\w+?)_d\d+_n\d+_g\d+_linear", name)] if m}
        others = [one.ratios.get(n) for n in ("batch_default_s16_loop", "append_tq4_d128_t2_t1")]
        head = [name_of(e) for e in paged] + ["batch of 16", "two threads append"]
        rows.append([SETS[isa]] + [f"{v:.2f}" if v else "-" for v in [*paged.values(), *others]])
    return table([""] + head, rows) if len(head) > 2 else ""


def latent_table(result):
    """Milliseconds for all heads over one latent stream, and the share of the multiply-add peak."""
    rows = {}
    for i, one in enumerate(result.sets.values()):
        for entry, row in one.others.get("latent", {}).items():
            base, tail = re.match(r"(\w+?)_d\d+(_t\d+)?$", entry).groups()
            cells = rows.setdefault(name_of(base) + (", tail of halves" if tail else ""), ["-"] * len(result.sets))
            cells[i] = f"{float(row[0]) / 1e3:.0f} ({row[4]})"
    return table([""] + [SETS[isa] for isa in result.sets], [[name] + cells for name, cells in rows.items()]) if rows else ""


def sparse_table(result):
    """[text, table]: lists, index scores and the choice of each set."""
    rows = []
    for isa, one in result.sets.items():
        index, ratios = one.others.get("index", {}), one.ratios
        if not index:
            continue
        lists = [[ratios.get(f"list_tq4_d128_n32768_blocks_of_{b}{threads}_all") for b in (1, 16, 64)] for threads in ("", "_t2")]
        narrow = [ratios.get(f"list_tq4_d{d}_n32768_g{g}_blocks_of_1_all") for d, g in NARROW_LISTS]
        rows.append([SETS[isa]] + [", ".join(f"{v:.1f}" if v else "-" for v in found) for found in [*lists, narrow]] +
                    [f"{float(index['scores'][0]) / 1e3:.0f} ({ratios['index_tq4_d128_n262144_scores_fma']:.2f})",
                     f"{float(index['choice'][0]) / 1e3:.2f}"])
    shapes = ", ".join(f"{d}/{g}" for d, g in NARROW_LISTS)
    return [f"Attention over a list of 2,048 of 32,768 positions, TQ4, in blocks of 1, 16, 64, and in blocks of 1 by head_dim/group "
            f"{shapes}: so many times as fast as over all positions. Index scores of 64 heads of 128 over 262,144 TQ4 keys, "
            "milliseconds (share of the multiply-add peak), and the choice of 2,048:",
            table(["", "blocks of 1, 16, 64", "by two threads", "by shape", "index scores", "choice"], rows)] if rows else []


def build_table(result):
    names = {"default": "all sets", "TQKV_NO_AVX512": "`TQKV_NO_AVX512`", "TQKV_METAL": "`tqkv_metal.m` as C",
             "TQKV_NO_AVX2": "`TQKV_NO_AVX2`: plain C alone", "debug": "all sets, -O0"}
    rows = [[names[n], f"{size / 1e3:.0f}", f"{seconds:.1f}"] for n, size, seconds in result.builds]
    return table(["build", "KB of code", "seconds of processor time"], rows)


def facts_lines(result):
    f = result.facts
    minutes = round(int(f["seconds"]) / 60)
    return (f"Commit {f['commit']}; measured on {f['date']} in {minutes} minutes; load {f['load before']} before and "
            f"{f['load after']} after; {f['system']}, {f['compiler']}.")


def processor_section(result):
    sets = " / ".join(SETS[isa] for isa in result.sets)
    dims = sorted({d for one in result.sets.values() for d in one.encode})
    wide = {"8 heads of 64": (64, 4096, 8, 1), "6 of 256": (256, 4096, 6, 1), "64 of 512": (512, 4096, 64, 1)}
    shapes = [(str(d), (d, 4096, 2, 1)) for d in dims]
    shapes += [(name, shape) for name, shape in wide.items() if any(shape in one.attend for one in result.sets.values())]

    def attend(shape):
        return lambda one: {e: microseconds(row) for e, row in one.attend.get(shape, {}).items()}

    def encode(d):
        return lambda one: {e: gigabytes(row) for e, row in one.encode.get(d, {}).items()}

    parts = [f"## {result.facts['machine']}", facts_lines(result), limits_of(result),
             "head_dim 128, 16 query heads over 8 KV heads, one thread but where the column says more. 1 query: over 32,768 "
             f"positions. 8 and 128: over 4,096. Microseconds, {sets}.", main_table(result),
             f"One query over 4,096 positions, by head_dim with 2 query heads a KV head, then with more; microseconds, {sets}:",
             by_column(result, "head_dim", [(title, attend(shape)) for title, shape in shapes]),
             f"Encoding, GB/s of float32 input, {sets}:", by_column(result, "head_dim", [(str(d), encode(d)) for d in dims])]
    pages = pages_table(result)
    if pages:
        parts += ["Speed over pages of 64 in random order, of a linear store's; of a batch, of a loop of calls; of two "
                  "threads, of one:", pages]
    latent = latent_table(result)
    if latent:
        parts += ["64 heads over one latent stream of 512 that is keys and values, 32,768 positions, milliseconds (share of "
                  "the float multiply-add peak):", latent]
    return paragraphs(parts + sparse_table(result))


# ---- A GPU ----

def gpu_cell(result, name, to="limit"):
    if name not in result.times:
        return "-"
    ratio = result.ratios.get(f"{name}/{to}")
    return f"{result.times[name]:,.0f}" + (f" ({ratio:.2f})" if ratio else "")


def gpu_row(result, entry):
    names = [f"attend/{entry}/d128/g{g}/q1/{LONG}" for g in (1, 2, 4, 8, 16)]
    names += [f"attend/{entry}/d128/g2/q8/{LONG}", f"attend/{entry}/d128/g2/q512/{SHORT}"]
    return [name_of(entry)] + [gpu_cell(result, n) for n in names] + \
        [gpu_cell(result, f"encode/{entry}/d128/{LONG}", "copy_of_input")]


def torch_row(result):
    shapes = [f"g{g}/q1/{LONG}" for g in (1, 2, 4, 8, 16)] + [f"g2/q8/{LONG}", f"g2/q512/{SHORT}"]
    times = [result.times.get(f"torch/f16/d128/{s}") for s in shapes]
    cells = [f"{t:,.0f}" if t else "-" for t in times]
    return [["PyTorch " + result.torch + ", f16"] + cells + ["-"]] if any(times) else []


def gpu_sizes(result, entries):
    dims = sorted({int(m[1]) for n in result.times for m in [re.match(rf"attend/\w+/d(\d+)/g2/q1/{LONG}$", n)] if m})

    def cell(entry, d):
        found = [result.times.get(f"attend/{entry}/d{d}/g{g}/q1/{LONG}") for g in (2, 8)]
        return "/".join(f"{t:,.0f}" if t else "-" for t in found) if any(found) else "-"

    return table(["head_dim"] + [str(d) for d in dims], [[name_of(e)] + [cell(e, d) for d in dims] for e in entries])


def gpu_latent(result):
    """[text, table]: one query of 64 heads over a latent stream."""
    names = {"tq4_f16": "TQ4, tail of halves", "i8_f16": "I8, tail of halves", "f16_f16": "F16, tail of halves", "tq4": "TQ4"}
    lengths = 32768, LONG

    def cell(entry, n):
        name = f"latent/{entry}/d512/h64/{n}"
        copy, of_torch = result.ratios.get(f"{name}/times_the_copy"), result.ratios.get(f"{name}/torch")
        return f"{result.times[name]:,.0f} ({copy:.1f}; {of_torch:.2f})" if name in result.times else "-"

    if f"latent/tq4/d512/h64/{LONG}" not in result.times:
        return []
    torch = ["PyTorch, bfloat16, its fastest way"] + [f"{result.times[f'torch/bf16/latent/h64/{n}']:,.0f}" for n in lengths]
    return ["64 heads over one latent stream of 512, microseconds (times what copying its bytes takes; speed, of PyTorch's):",
            table([""] + [f"{n:,} positions" for n in lengths],
                  [[names[e]] + [cell(e, n) for n in lengths] for e in names] + [torch])]


def gpu_sparse(result):
    """[text]: lists, index scores and the choice."""
    lists = [f"{1 / result.ratios[f'{at}/block1/all']:.1f} and {1 / result.ratios[f'{at}/block64/all']:.1f} at a group of {g}"
             for g in (2, 8, 16) for at in [f"list/tq4/d128/kv8/g{g}/32768"] if f"{at}/block1/all" in result.ratios]
    index = [f"{name_of(e)} {result.times[at + '/scores']:.0f} and {result.times[at + '/choose']:.0f}"
             for e in ("tq4", "i8", "f16") for at in [f"index/{e}/d128/h64/262144"] if at + "/scores" in result.times]
    if not lists or not index:
        return []
    return ["A list of 2,048 of 32,768 positions, in blocks of 1 and of 64, is so many times as fast as all positions of TQ4: " +
            "; ".join(lists) + ". Index scores of 64 heads of 128 over 262,144 keys and the choice of 2,048, microseconds: " +
            "; ".join(index) + "."]


def gpu_section(result):
    entries = list(dict.fromkeys(m[1] for n in result.times for m in [re.match(r"attend/(\w+)/d128/", n)] if m))
    copy, adds = result.limits["copy_bandwidth"], result.limits["multiply_adds"]
    head = ["", "group 1", "2", "4", "8", "16", "8 queries, group 2", "512 queries over 8k, group 2",
            "encode 128k tokens"]
    parts = [f"## {result.facts['machine']}", facts_lines(result),
             "The Metal shaders as CUDA (`tests/cuda/shim`): no hardware of Apple's, and no kernels made for this GPU. "
             f"Limits: copying {copy / 1e12:.2f} TB/s, {adds / 1e12:.1f} T float multiply-adds/s. Groups of 4 and more "
             "multiply matrices by default, TQ4 and I8 here from 2 on; these may pass the limit of multiply-adds.",
             "head_dim 128, 8 KV heads, one query over 128k positions unless the column says otherwise; microseconds "
             "(share of the limit; of encoding, input over copy bandwidth).",
             table(head, [gpu_row(result, e) for e in entries] + torch_row(result)),
             "One query over 128k positions, groups of 2 / 8, microseconds:", gpu_sizes(result, entries)]
    batches = [f"{name_of(m[1])} at a group of {m[2]}: {result.times[n]:.0f} microseconds, "
               f"{result.ratios[n + '/loop']:.1f} times as fast as a loop of calls"
               for n in result.times for m in [re.match(r"batch/(\w+)/d128/g(\d+)/16$", n)] if m]
    if batches:
        parts.append("16 sequences of 500 to 8,000 positions in one call: " + "; ".join(batches) + ".")
    return paragraphs(parts + gpu_latent(result) + gpu_sparse(result))


# ---- The page ----

INTRODUCTION = """# Benchmarks

Made by `make bench-page` from `bench/results`; `bench/page.py` has the words.
{commits}

## How to read it

- **Share** is of the limit, the larger of two times: multiply-adds over this core's float multiply-add peak for that instruction set
  (`f`), and stored bytes over its DRAM read bandwidth (`b`), both measured in the same rounds. Codes are multiplied as integers, of which
  a core does more, so `f` may pass 1; `b` may pass 1 where a large cache still holds some bytes. 8 and 128 queries always have `f`.
- **× F16** and **× ggml** say how many times as fast a row is as tqkv's F16, and as the fastest of ggml's four ways over halves (flash or
  not, its own order of memory or tqkv's): medians of the ratios of rounds in which all take turns. "-" was not measured.
- Caches are cold: keys and values of several layers, 128 MiB for each format, are attended in turn. Encoding reads from the L2.
- Microseconds are processor time of one thread, medians of 3 to 15 rounds. Shares and ratios are roughly portable, times are not.
- "I8 keys, TQ4 values" is the default.

## Make it anew

    make bench-results NAME=zen4          # six minutes; GGML_PREFIX=... GGML_AVX2_PREFIX=... IK_PREFIX=...: peers
    make bench-results-gpu NAME=h200      # on a machine with an NVIDIA GPU
    make bench-page                       # this page, and the tables of README, formats.md and building.md

A prefix is a folder with `include` and `lib` of ggml, built as Release without OpenMP, with `GGML_LLAMAFILE=ON`: for this processor, and
for AVX2 with `GGML_NATIVE=OFF`. `make bench` measures every shape.
[docs/notes](docs/notes/README.md) says what was tried. Nothing was measured on Apple's hardware; [docs/mac.md](docs/mac.md)
says what a Mac measures first."""


def commits_line(results):
    commits = list(dict.fromkeys(r.facts["commit"] for r in results))
    if len(commits) == 1:
        return f"All of it is of commit {commits[0]}."
    told = ", ".join(f"{r.name} of {r.facts['commit']}" for r in results)
    return f"**The results are of different commits**: {told}."


def page(results):
    sections = [gpu_section(r) if r.facts["kind"] == "gpu" else processor_section(r)
                for r in sorted(results, key=lambda r: r.facts["kind"])]
    chart = "![One token over 32,768 positions, by format](docs/speed.svg)"  # of `make charts`
    return "\n\n".join([INTRODUCTION.format(commits=commits_line(results)), chart] + sections) + "\n"


# ---- Parts of other documents ----

def milliseconds(one, entry):
    row = one.attend[DECODE].get(entry)
    return f"{float(row[0]) / 1e3:.1f}" if row else "-"


def part_number(result):
    isa, one = next(iter(result.sets.items()))
    peers = dict(best_peers(one.attend[DECODE]))
    ggml = ""
    if "ggml f16" in peers:
        ggml = f"; ggml's fastest f16 way takes {float(peers['ggml f16'][0]) / 1e3:.1f} ms there"
    return wrapped("One token over 32,768 positions (head_dim 128, 16 query heads, 8 KV heads) takes "
                   f"{milliseconds(one, 'tq4')} ms from TQ4 and {milliseconds(one, 'f16')} ms from F16 on one core with "
                   f"{SETS[isa]}{ggml} ([BENCHMARKS.md](BENCHMARKS.md)).")


def part_speed(result):
    entries = ["tq2", "tq3", "tq4", "tq5", "tq6", "i8", "default", "f16"]
    rows = []
    for isa, one in result.sets.items():
        peers = dict(best_peers(one.attend[DECODE]))
        ggml = [f"{float(peers['ggml f16'][0]) / 1e3:.1f}" if "ggml f16" in peers else "-"]
        rows.append([SETS[isa]] + [milliseconds(one, e) for e in entries] + ggml)
    slower = ["with " + SETS[isa] + " " + join([NAMES[e] for e in entries if is_slower(one, e)])
              for isa, one in result.sets.items() if any(is_slower(one, e) for e in entries)]
    return (wrapped("One token over 32,768 positions, head_dim 128, 16 query heads over 8 KV heads, one thread, "
                    f"{result.facts['machine']} (commit {result.facts['commit']}), milliseconds:") + "\n\n" +
            table([""] + [NAMES[e] for e in entries] + ["ggml's best f16"], rows) +
            ("\n\nSlower than F16 there: " + "; ".join(slower) + "." if slower else ""))


def is_slower(one, entry):
    row = one.attend[DECODE].get(entry)
    return bool(row) and entry != "f16" and float(row[7]) < 0.97  # less is within what runs differ by


def join(words):
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def part_default(processor, gpus):
    rows = []
    for name, entry, gpu in (("I8, TQ4", "default", "i8_tq4"), ("TQ4, TQ4", "tq4", "tq4"), ("TQ5, TQ5", "tq5", "tq5"),
                             ("TQ6, TQ6", "tq6", "tq6"), ("I8, I8", "i8", "i8"), ("F16, F16", "f16", "f16")):
        row = [microseconds(one.attend[DECODE][entry]) if entry in one.attend[DECODE] else "-"
               for one in processor.sets.values()]
        row += [f"{g.times[n]:.0f}" if (n := f"attend/{gpu}/d128/g2/q1/{LONG}") in g.times else "-" for g in gpus]
        rows.append([name] + row)
    head = ["keys, values"] + [SETS[isa] for isa in processor.sets] + [g.facts["machine"].split(",")[0] for g in gpus]
    return table(head, rows)


def fill(text, parts):
    def one(match):
        return f"<!-- bench {match[1]} -->\n{parts[match[1]]}\n<!-- /bench -->"
    return re.sub(r"<!-- bench (\w+) -->\n.*?<!-- /bench -->", one, text, flags=re.S)


def documents():
    """{path: text} of all documents that the results give."""
    results = [Result(p) for p in sorted((ROOT / "bench/results").glob("*.txt"))]
    processors = [r for r in results if r.facts["kind"] == "cpu"]
    first = processors[0]
    parts = {"number": part_number(first), "speed": part_speed(first), "build": build_table(first),
             "default": part_default(first, [r for r in results if r.facts["kind"] == "gpu"])}
    made = {ROOT / "BENCHMARKS.md": page(results)}
    for path in (ROOT / "README.md", ROOT / "docs/formats.md", ROOT / "docs/building.md"):
        made[path] = fill(path.read_text(encoding="utf-8"), parts)
    return made


def main():
    made = documents()
    stale = [p for p, text in made.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    if sys.argv[1:] == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(ROOT)}: not what bench/results give; make bench-page")
        print(f"{len(made) - len(stale)} passed, {len(stale)} failed")
        return bool(stale)
    for path in stale:
        path.write_text(made[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

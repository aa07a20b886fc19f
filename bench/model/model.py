#!/usr/bin/env python3
"""A model of Apple's GPUs: predicts the time of a decode step of attention and of encoding from counted operations and
published figures. Nothing was measured on Apple's hardware.

usage: model.py BUILD_FOLDER             tables, as they stand in docs/apple-model.md, and lines `ratio NAME VALUE`
       model.py BUILD_FOLDER --models    the table of models' shapes alone
       model.py BUILD_FOLDER --check     a few pipelines: what must hold of the counts
Takes the command that compiles a shader to LLVM's code, and the objects to link it with, from the environment: MODEL_COMPILE,
MODEL_OBJECTS.
"""
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import chips
import count

FORMATS = {"F16": 1, "TQ4": 2, "TQ5": 3, "TQ6": 4, "TQ8": 5, "I8": 8}
BITS = {"F16": 16, "TQ4": 4, "TQ5": 5, "TQ6": 6, "TQ8": 8, "I8": 8}
GROUPS = (2, 4, 8)
WIDE_GROUPS = (4, 8, 16)  # of the kernel that multiplies matrices
POSITIONS = 32768
SIMDGROUPS = 4  # of a counted threadgroup
LANES, MATRICES = 1, 2  # the kernels, as in tests/metal/gpu.h
COUNTED = 512  # positions of a counted threadgroup
SMALL_PAGE = 8  # positions: a tile of 32 has rows of several
LOOKUPS = {"simd_shuffle": 0, "threadgroup table": 1, "constant table": 2, "arithmetic": 3, "quad_shuffle": 4,
           "selections": 5, "threadgroup table of pairs": 6}
BYTE_WAYS = {"shifts": 7, "a byte": 8, "char4": 9}  # of tests/metal/mac/lookup.m; as floats
ARRANGEMENTS = {"lanes across the dimension": 0, "a lane a position": 1, "four lanes a row": 2}
SHOWN = ("M1", "M2 Pro", "M4", "M4 Max", "M5", "M5 Max")  # where a table has not all chips
KERNELS = {LANES: "Lanes", MATRICES: "Matrices"}
LETTERS = {"bandwidth": "B", "threadgroup": "T", "issue": "I", "complex": "C", "data cache": "D"}


class Shape(NamedTuple):
    """Query heads are left out: a group says how many a KV head has."""
    kv_heads: int = 8
    head_dim: int = 128

    def values(self):
        """Keys and values of all positions."""
        return 2 * self.kv_heads * POSITIONS * self.head_dim


BASE = Shape()
MODELS = ((32, Shape(8, 128)), (32, Shape(4, 128)), (24, Shape(4, 256)), (64, Shape(8, 64)), (64, Shape(1, 512)))
MODEL_FORMATS = ("TQ4", "I8", "F16")
VALUES = BASE.values()


class Machine:
    """Builds a pipeline of a prepared shader, runs it, and gives its counts."""

    def __init__(self, build):
        self.build = build
        self.planned = False
        self.objects = os.environ["MODEL_OBJECTS"].split()

    def source(self, shader, head_dim):
        """The prepared shader with the kernels of this head_dim alone, to save compile time."""
        with open(f"{self.build}/model/source/{shader}.metal.cpp", encoding="utf-8") as f:
            text = f.read()
        text = re.sub(r"(?m)^[A-Z_]+\((?!%d[,)])\d[\d_]*(?:, \d+)*\)$" % head_dim, "", text)
        return re.sub(r"(?m)^SIMT_KERNEL\(\w+_d(?!%d,)\d[\d_]*,.*$" % head_dim, "", text)

    def run(self, shader, kernel, constants, arguments, head_dim=BASE.head_dim):
        name = f"{self.build}/model/{shader}_" + "_".join(str(a) for a in arguments)
        values = ",".join(str(constants.get(i, 0)) for i in range(35))  # options are off; the run checks each
        code = subprocess.run(os.environ["MODEL_COMPILE"].split() +
                              ["-iquote", f"{self.build}/model/source", f"-DMODEL_CONSTANTS={values}", "-", "-o", "-"],
                              input=self.source(shader, head_dim), check=True, stdout=subprocess.PIPE, text=True).stdout
        classes, instrumented = count.instrument(code, kernel)
        with open(name + ".ll", "w", encoding="utf-8") as f:
            f.write(instrumented)
        subprocess.run(["clang", "-O1", "-c", name + ".ll", "-o", name + ".o"], check=True)
        subprocess.run(["clang++", name + ".o"] + self.objects + ["-o", name, "-lm"], check=True)
        output = subprocess.run([name] + [str(a) for a in arguments], check=True, stdout=subprocess.PIPE, text=True)
        return count.total(classes, output.stdout)

    def attend(self, format_name, group, kernel=LANES, positions=COUNTED, head_dim=BASE.head_dim, columns=None, page=0):
        """Operations for 32 values of keys and values, of the threadgroups that share a stretch of a KV head. columns:
        query rows of each, by default all; page: positions of a page, 0: none"""
        number, family = FORMATS[format_name], {LANES: "attend", MATRICES: "attend_matrix"}[kernel]
        columns = columns or group
        constants = {0: number, 1: number, 5: int(format_name != "F16"), 6: columns, 9: 1, 16: int(page > 0),
                     27: int(page > 0)}
        counts = self.run(family, f"tqkv_{family}_d{head_dim}", constants,
                          ["attend", number, group, positions, kernel, head_dim, columns, page], head_dim)
        return scaled(counts, 32.0 / (2 * positions * head_dim))

    def plan(self, group, kernel, shape=BASE):
        """How tqkv.h divides a token of this many heads a group, the same for all formats. kernel: 0 for the planned"""
        program = f"{self.build}/model/plan"
        if not self.planned:
            subprocess.run(["clang++", *self.objects, "-o", program, "-lm"], check=True)
            self.planned = True
        output = subprocess.run([program, "plan", str(FORMATS["TQ4"]), str(group), str(POSITIONS), str(kernel),
                                 str(shape.head_dim), str(shape.kv_heads)], check=True, stdout=subprocess.PIPE,
                                text=True).stdout
        return {line.split()[0]: int(line.split()[1]) for line in output.splitlines()}

    def encode(self, format_name, tokens=256):
        number = FORMATS[format_name]
        constants = {0: number, 2: int(format_name != "F16")}
        counts = self.run("encode", f"tqkv_encode_d{BASE.head_dim}", constants, ["encode", number, tokens])
        return scaled(counts, 32.0 / (tokens * BASE.head_dim))

    def lookup(self, way, rounds=64):
        """Operations to look up 32 values: those of the loop without its multiply-adds and loads."""
        counts = self.run("lookup", "tqkv_lookup", {0: LOOKUPS[way]}, ["lookup", LOOKUPS[way], rounds])
        less = self.run("lookup", "tqkv_lookup", {0: LOOKUPS[way]}, ["lookup", LOOKUPS[way], 2 * rounds])
        per_value = scaled(Counter({k: less[k] - counts[k] for k in less}), 1.0 / (rounds * 32 * SIMDGROUPS))
        per_value["multiply-add"] -= 1
        for name in ("device access", "device bytes"):
            per_value.pop(name, None)
        return per_value

    def scores(self, way, rows=1024):
        """Operations for 32 values of keys."""
        few = self.run("scores", "tqkv_scores", {0: ARRANGEMENTS[way]}, ["scores", ARRANGEMENTS[way], rows])
        many = self.run("scores", "tqkv_scores", {0: ARRANGEMENTS[way]}, ["scores", ARRANGEMENTS[way], 2 * rows])
        return scaled(Counter({k: many[k] - few[k] for k in many}), 32.0 / (rows * BASE.head_dim))


def scaled(counts, factor):
    return Counter({name: n * factor for name, n in counts.items()})


# ---- From counts to time ----

def core_cycles(counts, banks):
    """Cycles of a core for 32 values, by resource."""
    cycles = {"issue": 0.0, "complex": 0.0}
    for name, n in counts.items():
        if name.endswith("bytes") or name.startswith("cycles of"):
            continue
        turns, units, _ = chips.OPERATIONS[name]
        cycles["issue"] += n * turns / chips.SCHEDULERS
        for unit, busy in units.items():
            cycles[unit] += n * busy / chips.SCHEDULERS
    cycles["threadgroup"] = counts[f"cycles of {banks} banks"]
    cycles["data cache"] = counts["device bytes"] * 32 / chips.DATA_CACHE_BYTES
    return cycles


def stored_bytes(format_name, shape=BASE):
    """Of keys, values, and their norms: one for 256 values at most, of I8 for 128."""
    n_values = shape.values()
    norm = min(shape.head_dim, 128 if format_name == "I8" else 256)
    return n_values * BITS[format_name] // 8 + (0 if format_name == "F16" else 4 * n_values // norm)


def partial_bytes(plan, shape=BASE):
    """The stretches' sums, written and read again by the merge."""
    return 2 * plan["threadgroups"] * plan["columns"] * (shape.head_dim + 2) * 4


def times(chip, counts, n_values, n_bytes, banks, simdgroups):
    """Seconds by resource."""
    cores, clock, bandwidth, _, _ = chips.CHIPS[chip]
    seconds = {name: cycles * n_values / 32 / cores / (clock * 1e9)
               for name, cycles in core_cycles(counts, banks).items()}
    seconds["issue"] *= chips.stretch(simdgroups)
    seconds["bandwidth"] = n_bytes / (bandwidth * 1e9)
    return seconds


def unevenness(plan, cores, shape=BASE):
    """How much longer the busiest core works than if all worked alike. Each threadgroup goes to the core that is free
    first. The first stretches are short."""
    each = shape.kv_heads * plan["blocks"]
    work = [1 if i < plan["short"] else plan["growth"] for i in range(plan["threadgroups"] // each) for _ in range(each)]
    load = [0] * cores
    for job in work:
        load[load.index(min(load))] += job
    return max(load) * cores / sum(work)


def attend_times(chip, counts, format_name, plan, banks=16, shape=BASE):
    """A core runs whole threadgroups, as many at a time as its threadgroup memory holds. Those that read the same codes
    for other query rows are taken to find them in a cache."""
    share = plan["threadgroups"] / chips.CHIPS[chip][0]
    resident = min(share, chips.THREADGROUP_MEMORY // plan["memory"])
    seconds = times(chip, counts, shape.values(), stored_bytes(format_name, shape) + partial_bytes(plan, shape), banks,
                    resident * plan["simdgroups"])
    longer = unevenness(plan, chips.CHIPS[chip][0], shape)
    return {name: t if name == "bandwidth" else t * longer for name, t in seconds.items()}


def verdict(seconds):
    """(time, limiting resource, share of the bandwidth)"""
    limit = max(seconds, key=seconds.get)
    return seconds[limit], limit, seconds["bandwidth"] / seconds[limit]


# ---- Tables ----

COLUMNS = ("multiply-add", "matrix product", "float", "integer", "selection", "shift", "product", "conversion",
           "lookup shuffle", "quad shuffle", "shuffle", "64-bit sum", "64-bit product", "threadgroup access",
           "threadgroup bytes", "device access", "device bytes", "constant look-up", "branch")


def print_counts(title, rows):
    """rows: {name: counts for 32 values}; printed a value, which is the same as an operation of a simdgroup each 32."""
    names = [c for c in COLUMNS if any(counts[c] >= 0.005 for counts in rows.values())]
    print(f"\n{title}\n\n| | " + " | ".join(names) + " |\n|---" * 1 + "|---" * len(names) + "|")
    for row, counts in rows.items():
        print(f"| {row} | " + " | ".join(f"{counts[n]:.2f}" if counts[n] >= 0.005 else "-" for n in names) + " |")


def print_decode_once(counts):
    """A key or value is decoded once for its group: only work for each query head grows with the group."""
    print("\nLanes: per value of keys and values, and what each query head more adds (from group 2 to 8):\n")
    names = ["threadgroup access", "threadgroup bytes", "lookup shuffle", "conversion", "shift", "integer",
             "device bytes", "multiply-add"]
    names = [n for n in names if any(counts[f, 2, LANES][n] >= 0.005 for f in FORMATS)]
    print("| format | " + " | ".join(names) + " |\n|---" + "|---" * len(names) + "|")
    for name in FORMATS:
        few, many = counts[name, 2, LANES], counts[name, 8, LANES]
        cells = []
        for n in names:
            slope = (many[n] - few[n]) / 6
            cells.append(f"{few[n] - 2 * slope:.2f} + {slope:.2f}" if few[n] >= 0.005 else "-")
        print(f"| {name} | " + " | ".join(cells) + " |")


def print_cycles(counts, kernel, groups):
    """Cycles that the formats need of a core."""
    print(f"\n{KERNELS[kernel]}: cycles of a core for 32 values of keys and values at group "
          f"{', '.join(map(str, groups))}, before waiting:\n")
    print("| | issue | complex | threadgroup, 16 banks | 32 banks | data cache |\n|---|---|---|---|---|---|")
    for name in FORMATS:
        cells = []
        for unit, banks in (("issue", 16), ("complex", 16), ("threadgroup", 16), ("threadgroup", 32),
                            ("data cache", 16)):
            cells.append(", ".join(f"{core_cycles(counts[name, g, kernel], banks)[unit]:.2f}" for g in groups))
        print(f"| {name} | " + " | ".join(cells) + " |")


def shuffles_of_tile(counts, head_dim=BASE.head_dim):
    """By differing lanes."""
    return counts["lookup shuffle"] * 2 * head_dim  # of 32 values of the 32 rows of keys and values


def print_apart(machine):
    """What rows that lie apart cost."""
    print(f"\nTQ4, rows side by side and in pages of {SMALL_PAGE}: shuffles by differing lanes a tile, then cycles of a "
          "core for 32 values:\n")
    print("| kernel, group, head_dim | rows | shuffles | issue | threadgroup, 16 banks | 32 banks |\n" + "|---" * 6 + "|")
    for kernel, group, dim in ((LANES, 2, 128), (LANES, 4, 128), (MATRICES, 8, 128), (MATRICES, 8, 512)):
        for page, rows in ((0, "side by side"), (SMALL_PAGE, "apart")):
            counts = machine.attend("TQ4", group, kernel, head_dim=dim, page=page)
            cycles = [core_cycles(counts, banks) for banks in chips.THREADGROUP_BANKS]
            cells = [f"{x:.2f}" for x in (cycles[0]["issue"], cycles[0]["threadgroup"], cycles[1]["threadgroup"])]
            print(f"| {KERNELS[kernel].lower()}, {group}, {dim} | {rows} | {shuffles_of_tile(counts, dim):.0f} | " +
                  " | ".join(cells) + " |")


def print_brought():
    """Cycles that a chip's bandwidth leaves the formats."""
    print("\nCycles of a core in which the memory brings 32 values:\n")
    print("| | " + " | ".join(FORMATS) + " |\n|---" + "|---" * len(FORMATS) + "|")
    for chip, (cores, clock, bandwidth, _, _) in chips.CHIPS.items():
        cells = [f"{32 * stored_bytes(n) / VALUES / bandwidth * cores * clock:.2f}" for n in FORMATS]
        print(f"| {chip} | " + " | ".join(cells) + " |")


def cell(seconds):
    time, limit, share = verdict(seconds)
    return f"{time * 1e6:,.0f} {LETTERS[limit]} {share:.2f}"


def attend_cell(chip, counts, name, group, plans, kernel):
    """With 16 banks and, if that is another figure, with 32."""
    cells = [cell(attend_times(chip, counts[name, group, kernel], name, plans[group, kernel], banks))
             for banks in chips.THREADGROUP_BANKS]
    return cells[0] if cells[0] == cells[1] else " to ".join(cells)


def print_formats(counts, plans):
    print(f"\nAttention at {POSITIONS} positions, {BASE.kv_heads} KV heads, head_dim {BASE.head_dim}, by the planned kernel: "
          "microseconds, what limits, share of the bandwidth; if two, with 16 and 32 banks:\n")
    for names, shown in ((("TQ4", "I8", "F16"), list(chips.CHIPS)), (("TQ8", "TQ6", "TQ5"), SHOWN)):
        heads = [f"{n}, {g}" for n in names for g in GROUPS]
        print("| format, group | " + " | ".join(heads) + " |\n|---" + "|---" * len(heads) + "|")
        for chip in shown:
            cells = [attend_cell(chip, counts, n, g, plans, plans[g]["kernel"]) for n in names for g in GROUPS]
            print(f"| {chip} | " + " | ".join(cells) + " |")
        print()


def print_kernels(counts, plans):
    print("\nBoth kernels:\n")
    columns = [(n, g, k) for n in ("TQ4", "I8") for g in WIDE_GROUPS for k in (LANES, MATRICES) if (n, g, k) in counts]
    heads = [f"{n}, {g}, {KERNELS[k].lower()}" for n, g, k in columns]
    print("| format, group | " + " | ".join(heads) + " |\n|---" + "|---" * len(heads) + "|")
    for chip in SHOWN:
        print(f"| {chip} | " + " | ".join(attend_cell(chip, counts, n, g, plans, k) for n, g, k in columns) + " |")


def print_models(machine):
    """The shapes of today's models, each by its planned kernel."""
    print(f"\nOne token over {POSITIONS} positions at the shapes of models (query heads/KV heads of head_dim), by the "
          "planned kernel: microseconds, what limits, time over that of F16; if two, with 16 and 32 banks:\n")
    print("| shape, kernel | format | " + " | ".join(SHOWN) + " |\n|---|---" + "|---" * len(SHOWN) + "|")
    for heads, shape in MODELS:
        group = heads // shape.kv_heads
        plan = machine.plan(group, 0, shape)
        counts = {name: machine.attend(name, group, plan["kernel"], COUNTED, shape.head_dim, plan["columns"])
                  for name in MODEL_FORMATS}
        label = f"{heads}/{shape.kv_heads} of {shape.head_dim}, {KERNELS[plan['kernel']].lower()}"
        for name in MODEL_FORMATS:
            cells = []
            for chip in SHOWN:
                pairs = []
                for banks in chips.THREADGROUP_BANKS:
                    time, limit, _ = verdict(attend_times(chip, counts[name], name, plan, banks, shape))
                    half, _, _ = verdict(attend_times(chip, counts["F16"], "F16", plan, banks, shape))
                    pairs.append(f"{time * 1e6:,.0f} {LETTERS[limit]} {time / half:.2f}")
                cells.append(pairs[0] if pairs[0] == pairs[1] else " to ".join(pairs))
            print(f"| {label} | {name} | " + " | ".join(cells) + " |")


def with_lookup(counts, old, new):
    """Counts of attention with another way to look up."""
    result = Counter(counts)
    for name, n in new.items():
        result[name] += n
    for name, n in old.items():
        result[name] -= n
    return result


def print_lookups(ways, counts, plans, current):
    print("\nWays to look up a 4-bit code: cycles of a core for 32 values, then TQ4 attention by lanes with each:\n")
    shown = ("M1", "M4 Max")
    heads = " | ".join(f"{c}, group {g}" for c in shown for g in (2, 8))
    print(f"| way | issue | complex | threadgroup, 16 banks | 32 banks | {heads} |")
    print("|---" * (5 + 2 * len(shown)) + "|")
    for way, new in ways.items():
        cycles = [core_cycles(new, banks) for banks in chips.THREADGROUP_BANKS]
        merged = {("TQ4", g, LANES): with_lookup(counts["TQ4", g, LANES], ways[current], new) for g in (2, 8)}
        cells = [f"{cycles[0][unit]:.2f}" for unit in ("issue", "complex", "threadgroup")]
        cells += [f"{cycles[1]['threadgroup']:.2f}"]
        cells += [attend_cell(chip, merged, "TQ4", g, plans, LANES) for chip in shown for g in (2, 8)]
        print(f"| {way} | " + " | ".join(cells) + " |")


def print_arrangements(machine):
    print("\nWays to share the scores of four query heads among lanes, operations a value of keys; then cycles of a "
          "core for 32 values, and the bytes of the lines of 128 that a load touches over the bytes it takes:\n")
    names = ("multiply-add", "shuffle", "reduction", "threadgroup access", "threadgroup bytes", "device access")
    print("| way | " + " | ".join(names) + " | issue | threadgroup, 16 banks | 32 banks | lines |")
    print("|---" * (len(names) + 5) + "|")
    for way in ARRANGEMENTS:
        counts = machine.scores(way)
        lines = counts["lines bytes"] / counts["loaded bytes"]
        cycles = [core_cycles(counts, banks) for banks in chips.THREADGROUP_BANKS]
        cells = [f"{counts[n]:.2f}" if counts[n] >= 0.005 else "-" for n in names]
        cells += [f"{x:.2f}" for x in (cycles[0]["issue"], cycles[0]["threadgroup"], cycles[1]["threadgroup"], lines)]
        print(f"| {way} | " + " | ".join(cells) + " |")


def print_encode(machine):
    rows = {name: machine.encode(name) for name in FORMATS}
    print_counts("Encoding, operations a value:", rows)
    print("\nEncoding of a long prefill: GB/s of float32 input, what limits, share of the bandwidth; then the share of "
          "the time that issuing takes:\n")
    print("| | " + " | ".join(FORMATS) + " |\n|---" + "|---" * len(FORMATS) + "|")
    for chip in SHOWN:
        cells = []
        for name, counts in rows.items():
            seconds = times(chip, counts, VALUES, VALUES * 4 + stored_bytes(name), 16, 24)
            time, limit, share = verdict(seconds)
            cells.append(f"{VALUES * 4 / time / 1e9:,.0f} {LETTERS[limit]} {share:.2f}, {seconds['issue'] / time:.2f}")
        print(f"| {chip} | " + " | ".join(cells) + " |")


def print_ratios(counts, plans):
    for chip in chips.CHIPS:
        for group in GROUPS:
            for banks in chips.THREADGROUP_BANKS:
                planned = counts["TQ4", group, plans[group]["kernel"]]
                _, limit, share = verdict(attend_times(chip, planned, "TQ4", plans[group], banks))
                name = f"{chip.lower().replace(' ', '_')}_group{group}_banks{banks}"
                print(f"ratio apple_model_tq4_share_{name} {share:.3f} {limit}")


def current_lookup(counts):
    """How the shaders look up TQ4, by their operations."""
    return "simd_shuffle" if counts["lookup shuffle"] > 0.9 else "threadgroup table"


def planned_dispatches(machine):
    """By group; and by group and kernel: where the other kernel is planned, its cut with the memory of this one."""
    plans = {}
    for group in sorted(set(GROUPS + WIDE_GROUPS)):
        plans[group] = machine.plan(group, 0)
        for kernel in (LANES, MATRICES):
            plans[group, kernel] = machine.plan(group, kernel)
    return plans


def report(machine):
    ways = {way: machine.lookup(way) for way in LOOKUPS}
    shapes = [(name, group, kernel) for kernel, groups in ((LANES, GROUPS), (MATRICES, WIDE_GROUPS))
              for name in FORMATS for group in groups]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counts = dict(zip(shapes, pool.map(lambda shape: machine.attend(*shape), shapes)))
    plans = planned_dispatches(machine)
    print_formats(counts, plans)
    print_models(machine)
    print_kernels(counts, plans)
    print_cycles(counts, LANES, GROUPS)
    print_cycles(counts, MATRICES, WIDE_GROUPS)
    print_apart(machine)
    print_brought()
    print_counts("Attention by lanes at group 2, operations a value:", {n: counts[n, 2, LANES] for n in FORMATS})
    print_counts("Attention by matrices at group 8, operations a value:",
                 {n: counts[n, 8, MATRICES] for n in FORMATS})
    print_decode_once(counts)
    print_counts("Ways to look a 4-bit code up, operations a value:", ways)
    print_lookups(ways, counts, plans, current_lookup(counts["TQ4", 2, LANES]))
    print_arrangements(machine)
    print_encode(machine)
    print_ratios(counts, plans)


# ---- What must hold ----

def check(machine):
    """Decoded once for the whole group: from group 1 to 8, look-ups and stored bytes stay, multiply-adds follow."""
    failed = passed = 0
    for name in ("TQ4", "TQ8", "I8"):
        one, eight = machine.attend(name, 1, LANES, 256), machine.attend(name, 8, LANES, 256)
        decoding = {"TQ4": "shift", "TQ8": "shift", "I8": "conversion"}[name]
        # Decoded for each head it would be eight times as many; queries and masks of eight heads are some of it.
        expected = [(f"{decoding} stay", eight[decoding] <= one[decoding] * 1.5 and one[decoding] > 0.5),
                    ("look-ups stay", eight["threadgroup access"] - one["threadgroup access"] < 0.7),
                    ("look-ups are in threadgroup memory", one["lookup shuffle"] == eight["lookup shuffle"] == 0 and
                     one["threadgroup access"] > (1 if name != "I8" else 0)),
                    ("device bytes stay", eight["device bytes"] < one["device bytes"] * 1.25),
                    ("a multiply-add a query head", 8 <= eight["multiply-add"] < 9 and 1 <= one["multiply-add"] < 1.3),
                    ("nothing spilled", one["private access"] < 0.05 and eight["private access"] < 0.05)]
        for what, holds in expected:
            passed, failed = passed + holds, failed + (not holds)
            if not holds:
                print(f"FAIL model/{name}: {what}: {dict(one)} {dict(eight)}")
    four, eight = machine.attend("TQ4", 4, MATRICES, 256), machine.attend("TQ4", 8, MATRICES, 256)
    products = 32 / 64  # a matrix of codes holds 64 values, for 32 values
    for what, holds in (("as many products for 4 heads as for 8", four["matrix product"] == eight["matrix product"]),
                        ("a product for 64 values", abs(eight["matrix product"] - products) < 0.01),
                        ("look-ups stay", four["threadgroup access"] > 1 and
                         eight["threadgroup access"] - four["threadgroup access"] < 0.2)):
        passed, failed = passed + holds, failed + (not holds)
        if not holds:
            print(f"FAIL model/matrices: {what}: {dict(four)} {dict(eight)}")
    for kernel in (LANES, MATRICES):
        holds = shuffles_of_tile(machine.attend("TQ4", 4, kernel, 256, page=SMALL_PAGE)) < 1
        passed, failed = passed + holds, failed + (not holds)
        if not holds:
            print(f"FAIL model/{KERNELS[kernel].lower()}: slots of rows that lie apart are shuffled")
    for way in BYTE_WAYS.values():  # fails by itself where sums are wrong
        machine.run("lookup", "tqkv_lookup", {0: way}, ["lookup", way, 2])
        passed += 1
    print(f"{passed} passed, {failed} failed")
    return failed == 0


def main():
    machine = Machine(sys.argv[1])
    if sys.argv[2:] == ["--check"]:
        sys.exit(0 if check(machine) else 1)
    (print_models if sys.argv[2:] == ["--models"] else report)(machine)


if __name__ == "__main__":
    main()

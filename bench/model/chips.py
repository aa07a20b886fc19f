"""Published figures of Apple's GPUs, each with its source. This project measured none of them."""

SOURCES = {
    "MB": "github.com/philipturner/metal-benchmarks, README.md of commit dc2adc6 (M1 Max, A14 and A15 measured)",
    "AGI": "github.com/philipturner/applegpuinfo, commit 1203849: README.md, and the rules in AppleGPUInfo.swift",
    "DJ": "github.com/dougallj/applegpu, commit 4c5bae6: applegpu.py, simd_shuffle",
    "MR4P": "macrumors.com/2024/10/29/apple-announces-m4-pro-chip",
    "MR4M": "macrumors.com/2024/10/30/apple-announces-m4-max-chip",
    "MRG": "macrumors.com/2024/11/01/m4-pro-m4-max-graphics-benchmarks (76 cores of M2 Ultra)",
    "NW": "neowin.net/news/apple-launches-new-m4-pro-and-m4-max-processors",
    "EN": "eenewseurope.com/en/apple-unveils-m3-processor-threeseome-for-mac-computers",
    "TP": "techpowerup.com, news of the Mac Studio with M3 Ultra and M4 Max",
    "HMC": "hmc-tech.com/gpu/apple-10-core-m4-vs-apple-24-core-m1-max",
    "TD": "the-decoder.com/apples-m5-chip-brings-faster-ai-to-macbook-ipad-and-vision-pro (10 cores, 153 GB/s)",
    "PN": "pepelac.news, id30875: Apple M5 Pro and M5 Max (20 and 40 cores, 307 and 614 GB/s)",
    "MS": "michaelstinkerings.org/apple-m5-gpu-roofline-analysis (M5: 1578 MHz by powermetrics, 122 GB/s reached)",
    "HO": "Howard Oakley, M4 Pro full on, 22 January 2025 (by powermetrics), read at macmegasite.com/?p=118175",
}

# name: GPU cores, clock in GHz, memory bandwidth in GB/s (theoretical), family, (source of each of the three)
CHIPS = {
    "M1": (8, 1.278, 68.3, "Apple7", ("MB", "MB", "AGI")),
    "M1 Pro": (16, 1.296, 204.8, "Apple7", ("MB", "MB", "AGI")),
    "M1 Max": (32, 1.296, 409.6, "Apple7", ("MB", "MB", "AGI")),
    "M1 Ultra": (64, 1.296, 819.2, "Apple7", ("MB", "MB", "AGI")),
    "M2": (10, 1.398, 102.4, "Apple8", ("MB", "MB", "AGI")),
    "M2 Pro": (19, 1.398, 204.8, "Apple8", ("MB", "MB", "AGI")),
    "M2 Max": (38, 1.398, 409.6, "Apple8", ("MB", "MB", "AGI")),
    "M2 Ultra": (76, 1.398, 819.2, "Apple8", ("MRG", "AGI", "AGI")),
    "M3": (10, 1.380, 102.4, "Apple9", ("EN", "AGI", "AGI")),
    "M3 Pro": (18, 1.380, 153.6, "Apple9", ("EN", "AGI", "AGI")),
    "M3 Max": (40, 1.380, 409.6, "Apple9", ("EN", "AGI", "AGI")),
    "M3 Ultra": (80, 1.380, 819.2, "Apple9", ("TP", "AGI", "AGI")),
    "M4": (10, 1.470, 120.0, "Apple9", ("NW", "HMC", "NW")),
    "M4 Pro": (20, 1.578, 273.0, "Apple9", ("MR4P", "HO", "MR4P")),
    "M4 Max": (40, 1.578, 546.0, "Apple9", ("MR4M", "HO", "MR4M")),  # the clock is the M4 Pro's
    "M5": (10, 1.578, 153.0, "Apple10", ("TD", "MS", "TD")),
    "M5 Pro": (20, 1.578, 307.0, "Apple10", ("PN", "MS", "PN")),  # the clock is the M5's
    "M5 Max": (40, 1.578, 614.0, "Apple10", ("PN", "MS", "PN")),  # likewise
}

SCHEDULERS = 4  # a core, each with one operation of 32 lanes a cycle: MB, "ALU Layout"

# An operation of a simdgroup: cycles of its scheduler's turn to issue, and of the unit it keeps busy, by name. MB gives
# throughputs in cycles; for what runs in the unit for integers and functions ("complex") it also gives mixtures with
# simple operations (IMUL32 + 3 FMUL32 5.20, IMAD16 + 4 IADD16 5.88, IMUL16 + 3 FADD16 4.84), from which such an
# operation of 4 cycles takes about 2 turns. Nothing is published of a shuffle's mixtures: it takes its whole time.
OPERATIONS = {
    "multiply-add": (1, {}, "MB FFMA32 1"),
    "float": (1, {}, "MB FADD32, FMUL32 1"),
    "selection": (1, {}, "MB FCMPSEL32, ICMPSEL32 1"),
    "integer": (1, {}, "MB IADD32 1, BITWISE32 1.06"),
    "branch": (1, {}, "no figure: as a selection"),
    "64-bit sum": (4.68, {}, "MB IADD(64+64=64) 4.68"),
    "shift": (2, {"complex": 4}, "MB LSHIFT32 4.01, BITEXTRACT32 4.01"),
    "rotation": (4, {"complex": 8}, "MB BITROTATE32 8.20"),
    "product": (2, {"complex": 4}, "MB IMUL32 4"),
    "64-bit product": (4, {"complex": 8}, "MB IMUL(32x32=64) 8.01"),
    "conversion": (2, {"complex": 4}, "MB CONVERT(F->I32), RINT32 4"),
    "exponential": (2, {"complex": 4}, "MB EXP2_32 4.00"),
    "square root": (7.5, {"complex": 15}, "MB Precise SQRT32 15.03"),
    "division": (15, {"complex": 30.65}, "MB Precise DIV32 30.65"),
    "integer division": (15, {"complex": 30.65}, "no figure: as a precise division"),
    "shuffle": (2.04, {}, "MB SHUFFLE_ROTATE32, BROADCAST32 2.04"),
    "quad shuffle": (2.01, {}, "MB quad SHUFFLE_RANDOM_DIFF32 2.01"),
    "lookup shuffle": (32.32, {}, "MB SHUFFLE_RANDOM_DIFF32 32.32; DJ says why"),
    "reduction": (14.54, {}, "MB SUM<F32> 14.54; no figure for a maximum"),
    # As long as 18 multiply-adds for the 16 that it replaces: it has no unit of its own on an M1. The M5's units for
    # matrices take halves and bytes, by Metal 4's tensors; of its products of floats there is no figure.
    "matrix product": (18, {}, "MB MATMUL<8x8xF32> ~18"),
    "vote": (2.04, {}, "MB ICMP_BALLOT 2.04"),
    "barrier": (1, {}, "no figure"),
    "threadgroup access": (1, {}, "its turn only; its time is by bytes and banks"),
    "device access": (1, {}, "its turn only; its time is by bytes"),
    "private access": (1, {}, "its turn only"),
    "constant look-up": (1, {}, "its turn only: no figure for lanes that differ, see the text"),
}

# DJ: the hardware's shuffle takes one lane of each quad; a simd_shuffle by any number is made of four of them, 8.16
# cycles, and selections. 32.32 was measured for the whole.
LOOKUP_SHUFFLE_AT_LEAST = 4 * 2.04

# MB listed 64 B a cycle and 16 banks of 4 B until its commit c83b63f (2024-06-12) and "TBD" since. 128 B and 32 banks
# are the other makers' figure in the same table.
THREADGROUP_BANKS = (16, 32)
DATA_CACHE_BYTES = 64  # a core and cycle, MB "On-Core Data BW/Cycle"

# Cycles of a multiply-add with 4 independent ones in flight, by simdgroups of a core: MB, FFMA FP32, "ILP 4"; "ALU
# utilization maxes out at 24 simds/core".
OCCUPANCY = ((4, 2.75), (8, 1.60), (24, 1.02))


THREADGROUP_MEMORY = 60 * 1024  # of a core: MB "Shared Memory ~60 KB"


def stretch(simdgroups):
    """How much longer issuing takes with so many simdgroups on a core; between published points by straight lines."""
    points = OCCUPANCY
    if simdgroups <= points[0][0]:
        return points[0][1] * points[0][0] / max(simdgroups, 1)
    for (a, slow), (b, fast) in zip(points, points[1:]):
        if simdgroups <= b:
            return slow + (fast - slow) * (simdgroups - a) / (b - a)
    return points[-1][1]

"""Minimises the fuzzers' corpora: minimise.py BUILD_FOLDER FUZZER...

Candidates are tests/fuzz/corpus/FUZZER and what `make fuzz` has left in build/fuzz/corpus/FUZZER. These stay:
1. Inputs with a name of their own. libFuzzer names an input by its SHA-1.
2. The fewest others that reach every line and every function of src/ that the candidates reach. Each format's and each
   instruction set's copy of a kernel is a function.
3. While there are fewer than INPUTS: those that add most branches.
4. Those without which `make fuzz-coverage` would report fewer lines.
Run it where AVX-512 is present: functions for instruction sets that this processor lacks do not count.
"""
import os
import re
import shutil
import subprocess
import sys

INPUTS = 20


def report(program, paths):
    """llvm-cov's report, in lcov's format, on src/ and the example that is fuzzed, in one run over the inputs."""
    raw, profile = program + ".raw", program + ".profile"
    environment = dict(os.environ, LLVM_PROFILE_FILE=raw)
    subprocess.run([program] + paths, env=environment, stdout=subprocess.DEVNULL, check=True)
    subprocess.run(["llvm-profdata", "merge", raw, "-o", profile], check=True)
    return subprocess.run(["llvm-cov", "export", program, "-instr-profile", profile, "-format", "lcov",
                           os.path.abspath("src"), os.path.abspath("examples/profile.h")], stdout=subprocess.PIPE,
                          text=True, check=True).stdout


def reached(program, path):
    """Lines and functions of src/ that one input reaches, and branches, as two sets."""
    places, branches = set(), set()
    for file in report(program, [path]).split("end_of_record"):
        name = re.search(r"^SF:(.*)", file, re.M)
        places.update((name.group(1), line) for line in re.findall(r"^DA:(\d+),[1-9]", file, re.M))
        places.update(re.findall(r"^FNDA:[1-9]\d*,(.+)", file, re.M))
        branches.update((name.group(1), branch) for branch in re.findall(r"^BRDA:(.+),[1-9]\d*$", file, re.M))
    return places, branches


def lines_hit(program, paths):
    """What `make fuzz-coverage` prints: of a function with several copies, the lines of the copy that has most."""
    return sum(int(hit) for hit in re.findall(r"^LH:(\d+)", report(program, paths), re.M))


def union(inputs, reach):
    return set().union(*(reach[name] for name in inputs))


def add_best(kept, reach, limit=None):
    """Adds the input that reaches most of what `kept` does not, until nothing is left or `limit` inputs are kept."""
    missing = union(reach, reach) - union(kept, reach)
    while missing and (limit is None or len(kept) < limit):
        best = max(sorted(reach), key=lambda name: len(reach[name] & missing))
        kept.append(best)
        missing -= reach[best]


def minimise(build, fuzzer):
    corpus = f"tests/fuzz/corpus/{fuzzer}"
    paths = {}
    for folder in (f"{build}/corpus/{fuzzer}", corpus):
        if os.path.isdir(folder):
            paths.update((name, f"{folder}/{name}") for name in os.listdir(folder))
    program, places, branches = f"{build}/coverage/fuzz_{fuzzer}", {}, {}
    for name, path in paths.items():
        places[name], branches[name] = reached(program, path)
    kept = sorted(name for name in paths if not re.fullmatch("[0-9a-f]{40}", name))
    add_best(kept, places)
    add_best(kept, branches, INPUTS)
    goal = lines_hit(program, list(paths.values()))
    while lines_hit(program, [paths[name] for name in kept]) < goal:
        rest = sorted(set(paths) - set(kept))
        kept.append(max(rest, key=lambda name: lines_hit(program, [paths[n] for n in kept + [name]])))
    for name in kept:
        if not os.path.exists(f"{corpus}/{name}"):
            shutil.copyfile(paths[name], f"{corpus}/{name}")
    for name in set(os.listdir(corpus)) - set(kept):
        os.remove(f"{corpus}/{name}")
    print(f"{fuzzer}: {len(paths)} inputs to {len(kept)}; {goal} lines as before; branches {len(union(paths, branches))} to "
          f"{len(union(kept, branches))}", flush=True)


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        minimise(sys.argv[1], argument)

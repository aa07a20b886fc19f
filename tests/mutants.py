#!/usr/bin/env python3
"""Changes src/ in one place at a time and asks whether the tests notice.

usage: mutants.py RUNNER_FOLDER BUILD [--count 150] [--seed 1] [--only src/cache] [--jobs 1] [--list] [--groups NAMES]

RUNNER_FOLDER has the objects of a build of the C tests, as build/tests/gcc: of them only that of tqkv.h is compiled anew.
A mutant counts if it compiles to other code. It is caught if a case fails, or the program dies or takes too long. Lines:
`mutant caught|missed FILE:LINE OLD -> NEW (CASE)`, then `N caught, N missed`. A mutant that is missed may be none: one
that changes a size of scratch memory upwards, or a bound that nothing reaches. With --groups only cases with one of these
names run, all of them, and all groups with a case that fails are printed: what a group shows that no other does.
"""
import argparse
import concurrent.futures
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECONDS = 400
NO_STACK = "-attend/stack"  # which -O1 and a change that is none for the results may exceed
SWAPS = [(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" == ", " != "), (" != ", " == "), (" && ", " || "),
         (" || ", " && "), (" + ", " - "), (" - ", " + "), (" * ", " + "), (" += ", " -= "), (" % ", " / "), (" ? ", " ? !")]


def code_lines(path):
    """(number, text) of the lines inside functions, without comments and macros."""
    inside = comment = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        stripped = line.strip()
        if stripped.startswith("/*"):
            comment = "*/" not in stripped
            continue
        if comment:
            comment = "*/" not in stripped
            continue
        inside = (inside or line == "{") and line != "}"
        if inside and stripped and not line.endswith("\\") and not stripped.startswith("#"):
            yield number, line.split("/*")[0].rstrip()


def changes_of(line):
    """Every line that one change makes of this one."""
    for old, new in SWAPS:
        for found in re.finditer(re.escape(old), line):
            yield line[: found.start()] + new + line[found.end():]
    for found in re.finditer(r"(?<![\w.])(\d+)(?![\w.])", line):
        yield line[: found.start()] + str(int(found.group()) + 1) + line[found.end():]
    if re.fullmatch(r" +[\w>.\[\]*()-]+( [-+*|]?= .*|\(.*\));", line) and "const " not in line:
        yield re.match(" *", line).group() + ";"


def candidates(only):
    for path in sorted((ROOT / "src").rglob("*.h")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("src/api") or name == "src/vectors/neon.h" or "neon" in name or not name.startswith(only):
            continue
        for number, line in code_lines(path):
            yield from ((name, number, line, new) for new in changes_of(line))


def compile_command(objects):
    """That of the makefile for tqkv.h's own object, with fewer optimisations."""
    target = objects.relative_to(ROOT) / "test_tables.o"
    lines = subprocess.run(["make", "-n", "-W", "src/tqkv.h", str(target)], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    words = shlex.split(next(line for line in lines.splitlines() if " -c tests/test_tables.c" in line))
    return ["-O1" if w == "-O2" else w for w in words if not w.startswith("-W")] + ["-w"]


def compile_object(command, source, target):
    words = [f"-I{source}" if w == "-Isrc" else w for w in command]
    words[words.index("-o") + 1] = str(target)
    return subprocess.run(words, capture_output=True, check=False, cwd=ROOT).returncode == 0


def text_of(path):
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text*", str(path), f"{path}.text"], check=True)
    return pathlib.Path(f"{path}.text").read_bytes()


def failure_of(command):
    """The first case that fails, or what ended the program, or None."""
    with subprocess.Popen(["timeout", str(SECONDS), "stdbuf", "-oL", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True, errors="replace") as running:
        for line in running.stdout:
            if line.startswith("FAIL "):
                running.kill()
                return line.split()[1]
    return None if running.returncode == 0 else f"ended with {running.returncode}"


def failed_groups(program, names):
    """STEM/WHAT of all cases that fail, or what ended the program, by names: each in a process of its own."""
    found = set()
    for name in names:
        run = subprocess.run(["timeout", str(SECONDS), str(program), name, NO_STACK], capture_output=True, check=False)
        found |= {"/".join(case.split("/")[:2]) for case in re.findall(r"^FAIL (\S+)", run.stdout.decode(errors="replace"), re.M)}
        if run.returncode not in (0, 1):
            found.add(f"{name} ended with {run.returncode}")
    return ", ".join(sorted(found)) or None


def first_failure(program):
    """With the best set of instructions, then with each other, which a change may concern alone."""
    return next(filter(None, (failure_of([str(program), *isa, NO_STACK]) for isa in ([], ["--isa", "avx2"], ["--isa", "scalar"]))), None)


def link(folder, objects):
    subprocess.run(["gcc", str(folder / "tqkv.o"), *objects, "-o", str(folder / "runner"), "-lm", "-pthread"], check=True)


def try_mutant(job):
    (name, number, old, new), folder, command, objects, original, groups = job
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "src", folder / "src")
    path = folder / name
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[number] = lines[number].replace(old, new)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    verdict, case = "same", None
    if not compile_object(command, folder / "src", folder / "tqkv.o"):
        verdict = "broken"
    elif text_of(folder / "tqkv.o") != original:
        link(folder, objects)
        case = failed_groups(folder / "runner", groups) if groups else first_failure(folder / "runner")
        verdict = "caught" if case else "missed"
    shutil.rmtree(folder)
    return verdict, f"{name}:{number + 1} {old.strip()} -> {new.strip()} ({case or 'no case'})"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("objects", type=pathlib.Path)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="src/")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--groups", default="", help="names with commas between them, as cache/,learn/")
    a = parser.parse_args()
    a.objects, a.build = a.objects.resolve(), a.build.resolve()
    found = list(candidates(a.only))
    random.Random(a.seed).shuffle(found)
    if a.list:
        return print("\n".join(f"{name}:{number + 1} {old.strip()} -> {new.strip()}" for name, number, old, new in found[: a.count]))
    a.build.mkdir(parents=True, exist_ok=True)
    command = compile_command(a.objects)
    objects = [str(o) for o in sorted(a.objects.glob("**/*.o")) if o.name != "test_tables.o"]
    if not objects or not compile_object(command, ROOT / "src", a.build / "tqkv.o"):
        sys.exit(f"{a.objects} has no objects, or src/ does not compile")
    original = text_of(a.build / "tqkv.o")
    link(a.build, objects)
    groups = [name for name in a.groups.split(",") if name]
    if failed_groups(a.build / "runner", groups) if groups else first_failure(a.build / "runner"):
        sys.exit("the tests fail without a change")
    counts = {"caught": 0, "missed": 0}
    jobs = ((m, a.build / str(i % (4 * a.jobs)), command, objects, original, groups) for i, m in enumerate(found))
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        while sum(counts.values()) < a.count:
            some = [job for job, _ in zip(jobs, range(a.jobs))]
            if not some:
                break
            for verdict, text in pool.map(try_mutant, some):
                if verdict in counts:
                    counts[verdict] += 1
                    print(f"mutant {verdict} {text}", flush=True)
    print(f"{counts['caught']} caught, {counts['missed']} missed")
    return None


main()

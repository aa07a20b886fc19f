#!/usr/bin/env python3
"""Checks the documents: relative links and their anchors, targets of make, and that architecture.md and the notes name what
exists.

usage: check.py

In architecture.md, and in the cells of the notes that say what was kept or dropped, a word in backticks that looks like a tag, a name
of C or a path must be one: `>>tag` a section of tqkv.h, `tqkv__name` or `some_name` a word of the sources, `folder/file` a file.
Words with NAME, `*` or `...` are patterns. The lists of contents in tqkv.h and tqkv_metal.m name their tags, each once, in their order.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OMITTED = {"build", ".git"}
SOURCES = ("tqkv.h", "src/**/*.h", "tqkv_metal.m", "Makefile", "shaders/*", "tests/*.[ch]", "tests/*.mk", "tests/metal/*.*",
           "tests/metal/host/*.*", "bench/*.[ch]", "metallib/*.mk")


def documents():
    return sorted(p for p in ROOT.rglob("*.md") if not OMITTED & set(p.relative_to(ROOT).parts))


def without_code(text):
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.S | re.M)


def anchors(path):
    """As GitHub makes them: lower case, spaces to hyphens, other punctuation left out."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ +(.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists():
            yield f"{target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{target}: no such heading"


def make_targets():
    """All targets, and those of a Mac."""
    database = subprocess.run(["make", "-qpRr", "help"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    named = "".join(p.read_text(encoding="utf-8") for p in ROOT.rglob("*.mk") if not OMITTED & set(p.relative_to(ROOT).parts))
    return set(re.findall(r"^([a-z][\w.-]*):", database + named, re.M))


def unknown_targets(path, targets):
    """Words of the commands `make ...`, in code, that are neither targets nor options nor variables."""
    text = path.read_text(encoding="utf-8")
    for words in re.findall(r"(?:`|^ {4}|^)make ((?:[^\s`#]+ *)+)", text, re.M):
        for word in words.split():
            if re.fullmatch(r"[a-z][a-z0-9-]*", word) and word not in targets:
                yield f"make {word}: no such target"


def kept_cells(text):
    """The last cells of rows about what was kept or dropped."""
    return "\n".join(re.findall(r"\| ((?:kept|dropped)[^|\n]*) \|$", text, re.M))


def unknown_names(text):
    texts = [p.read_text(encoding="utf-8") for pattern in SOURCES for p in ROOT.glob(pattern) if p.is_file()]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    tags = set(re.findall(r"^/\* (>>[\w-]+)", texts[0], re.M))
    for quoted in sorted(set(re.findall(r"`([^`\n]+)`", text))):
        word = quoted.split("(")[0]
        if re.search(r"NAME|\*|\.\.\.", quoted):
            continue
        if quoted.startswith(">>"):
            known = quoted in tags
        elif re.fullmatch(r"[\w.-]+(/[\w.-]*)+", quoted):
            known = (ROOT / quoted).exists() or quoted.split("/")[0] in known_stems(texts)
        elif re.fullmatch(r"\w*_\w*|[a-z]+", word):
            known = word in words
        else:
            continue
        if not known:
            yield f"`{quoted}`: nothing has this name"


def contents(name):
    """What is wrong with the contents of a joined file."""
    text = (ROOT / name).read_text(encoding="utf-8")
    tags = re.findall(r"^/\* (>>[\w-]+)", text, re.M)
    listed = [tag for line in re.findall(r"^     ((?:>>[\w-]+(?:, )?)+)", text, re.M) for tag in re.findall(r">>[\w-]+", line)]
    for tag, other in zip(tags + [""], listed + [""]):
        if tag != other:
            yield f"the contents have {other or 'nothing'}, the file {tag or 'nothing'} in this place"
            return


def known_stems(texts):
    """First parts of test cases' names."""
    return set(re.findall(r'"([a-z_]+)/', "\n".join(texts)))


def main():
    targets = make_targets()
    found = [(p, text) for p in documents() for text in [*broken_links(p), *unknown_targets(p, targets)]]
    found += [(p, text) for p in [ROOT / "docs/architecture.md"] for text in unknown_names(p.read_text(encoding="utf-8"))]
    found += [(p, text) for p in sorted((ROOT / "docs/notes").glob("[a-z]*.md"))
              for text in unknown_names(kept_cells(p.read_text(encoding="utf-8")))]
    found += [(ROOT / name, text) for name in ("tqkv.h", "tqkv_metal.m") for text in contents(name)]
    for path, text in found:
        print(f"{path.relative_to(ROOT)}: {text}")
    bad = len({p for p, _ in found})
    print(f"{len(documents()) + 1 - bad} passed, {bad} failed")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

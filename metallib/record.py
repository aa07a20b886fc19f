#!/usr/bin/env python3
"""The table of metallib/README.md: what the library in the repository is.

usage: record.py write README LIBRARY SOURCE COMPILER...   COMPILER: as `clang-14`
       record.py check README LIBRARY SOURCE               the table is that of these files
       record.py made-by README COMPILER...                the versions are those of these programs
       record.py builder README                            the builder is air/ as it is
Ends with status 1 and says what differs.
"""
import ctypes
import ctypes.util
import glob
import os
import re
import subprocess
import sys

START, END = "<!-- made by make metallib -->\n", "<!-- end -->\n"
HERE = os.path.dirname(os.path.abspath(__file__))


def xxh3(*paths):
    for name in (ctypes.util.find_library("xxhash"), "/opt/homebrew/lib/libxxhash.dylib", "/usr/local/lib/libxxhash.dylib"):
        try:
            hash_64 = ctypes.CDLL(name).XXH3_64bits if name else None
        except OSError:
            continue
        if hash_64:
            data = b""
            for path in paths:
                with open(path, "rb") as f:
                    data += f.read()
            hash_64.restype, hash_64.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
            return f"{hash_64(data, len(data)):016x}"
    raise SystemExit("record.py needs libxxhash: make deps")


def hashes(library, source):
    return {f"XXH3 of `{path.rsplit('/', 1)[-1]}`": f"`{xxh3(path)}`" for path in (library, source)}


def builder():
    files = sorted(glob.glob(f"{HERE}/air/*.py")) + [f"{HERE}/air/shim/metal_stdlib", f"{HERE}/msl.py"]
    return {"XXH3 of `air/` and `msl.py`": f"`{xxh3(*files)}`"}


def versions(compilers):
    lines = (subprocess.run([c, "--version"], capture_output=True, text=True, check=True).stdout for c in compilers)
    return {"made by": ", ".join(f"{c} {re.search(r'version ([0-9.]+)', text).group(1)}" for c, text in zip(compilers, lines))}


def read(readme):
    with open(readme, encoding="utf-8") as f:
        return f.read()


def recorded(readme):
    table = read(readme).split(START)[1].split(END)[0]
    return dict(re.findall(r"(?m)^\| (.*?) \| (.*?) \|$", table))


def differences(readme, facts):
    known = recorded(readme)
    return [f"{readme}: {what} is {known.get(what)}, not {now}" for what, now in facts.items() if known.get(what) != now]


def write(readme, library, source, *compilers):
    facts = {**hashes(library, source), **builder(), **versions(compilers)}
    table = "| | |\n|---|---|\n" + "".join(f"| {what} | {value} |\n" for what, value in facts.items())
    before, rest = read(readme).split(START)
    text = before + START + table + END + rest.split(END)[1]
    with open(readme, "w", encoding="utf-8") as f:
        f.write(text)
    return []


def main():
    action, readme, *rest = sys.argv[1:]
    if action == "write":
        found = write(readme, *rest)
    elif action == "check":
        found = differences(readme, hashes(*rest))
    elif action == "builder":
        found = differences(readme, builder())
    else:
        found = differences(readme, versions(rest))
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

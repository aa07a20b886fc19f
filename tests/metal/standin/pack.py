#!/usr/bin/env python3
"""Makes the stand-in's libraries, and versions of what shaders see of src/ that must be refused as stale or find other matrices.

usage: pack.py library SHARED_OBJECT...   X.so becomes the library X
       pack.py stale SRC FOLDER WHAT...   writes the headers of the folder SRC to FOLDER/WHAT/src; WHAT: a table of
                                          tqkv__table_set, `version`, `dispatch`, `matrices`, an argument struct;
                                          `tables_alone` changes nothing
"""
import pathlib
import re
import shutil
import struct
import sys

TABLES = [f"{table}_{bits}" for table in ("codebook", "boundaries", "factors") for bits in (2, 3, 4, 5, 6, 8)] + ["signs"]


def pack(*shared_objects):
    for path in shared_objects:
        content = pathlib.Path(path).read_bytes()
        pathlib.Path(path.removesuffix(".so")).write_bytes(b"STANDINL" + struct.pack("<Q", len(content)) + content)


def changed_for(what, text):
    if what == "tables_alone":
        return text
    if what == "version":
        changed = re.sub(r"(#define TQKV_TABLE_VERSION) \d+", r"\1 999", text)
    elif what == "dispatch":
        changed = re.sub(r"(#define TQKV__MAX_COLUMNS\(D\)) ", r"\1 2 * ", text)
    elif what == "matrices":
        changed = re.sub(r"(#define TQKV__MATRIX_ROW\(lane\)) .*", r"\1 ((lane) >> 2)", text)
    elif what in TABLES:
        start = text.index("TQKV_TABLE tqkv__table_set tqkv__tables = {")
        lists = [m.end() for m in re.finditer(r"\n    \{", text[start:])]
        at = start + lists[TABLES.index(what)]
        changed = text[:at] + re.sub(r"\A[^,}]+", "0x00" if what == "signs" else "-9.5f", text[at:])
    else:
        changed = re.sub(r"(\n} tqkv__%s;)" % what, r"\n    int32_t another;\1", text)
        changed = re.sub(r"(?m)^TQKV__ASSERT_SIZE\(.*\n", "", changed)
    if changed == text:
        raise SystemExit(f"nothing to change for {what}")
    return changed


def stale(source, folder, *names):
    for what in names:
        copy = pathlib.Path(folder, what, "src")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        path = copy / ("base/tables.h" if what in TABLES + ["tables_alone", "version"] else "gpu/sizes.h")
        path.write_text(changed_for(what, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    {"library": pack, "stale": stale}[sys.argv[1]](*sys.argv[2:])

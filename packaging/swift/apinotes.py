#!/usr/bin/env python3
"""Writes CTqkv.apinotes: which pointers of tqkv.h's functions may be nil in Swift.

usage: apinotes.py [--check]     from the top folder; it needs clang

The functions and the types of their parameters are those that clang reads; which of the pointers may be NULL, as the
comments of tqkv.h say, is in the two tables below. --check compares instead of writing.
"""
import json
import os
import subprocess
import sys

NOTES = "packaging/swift/CTqkv/include/CTqkv.apinotes"

# Parameters that may be NULL: `user` everywhere.
EVERYWHERE = {"user"}
OPTIONAL = {
    "tqkv_format_from_name": {"name"},
    "tqkv_isa_force": {"name"},
    "tqkv_calibrate": {"q", "center", "channel_scale"},
    "tqkv_cache_destroy": {"c"},
    "tqkv_cache_append": {"v"},
    "tqkv_cache_end": {"c"},
    "tqkv_cache_bytes": {"c"},
    "tqkv_cache_fork": {"desc"},
    "tqkv_metal_destroy": {"m"},
    "tqkv_metal_plan_encode": {"values"},
    "tqkv_metal_plan_attend_batch": {"q", "contents", "out"},
    "tqkv_metal_plan_cache_append": {"layout"},
    "tqkv_metal_plan_cache_attend": {"layout", "some"},
}
# Results that are never NULL.
NEVER = {"tqkv_format_name", "tqkv_result_string", "tqkv_isa_name"}


def is_pointer(type_of):
    """Through typedefs: of functions, and of Metal's objects."""
    return "*" in type_of.get("desugaredQualType", type_of["qualType"])


def functions():
    """Yields (name, whether it returns a pointer, [(name, whether it is one) of each parameter])."""
    command = ["clang", "-x", "c", "-std=c99", "-DTQKV_METAL", "-fsyntax-only", "-Xclang", "-ast-dump=json", "tqkv.h"]
    clang = subprocess.run(command, stdout=subprocess.PIPE)
    if clang.returncode:
        sys.exit("apinotes.py: clang does not read tqkv.h")
    for node in json.loads(clang.stdout)["inner"]:
        if node["kind"] == "FunctionDecl" and node["name"].startswith("tqkv_"):
            parameters = [p for p in node.get("inner", []) if p["kind"] == "ParmVarDecl"]
            returned = node["type"]["qualType"].split("(")[0]
            yield node["name"], "*" in returned, [(p["name"], is_pointer(p["type"])) for p in parameters]


def notes():
    unused = {(name, parameter) for name in OPTIONAL for parameter in OPTIONAL[name]} | {(name, "") for name in NEVER}
    lines = ["# Written by apinotes.py (`make apinotes`): N: never NULL, O: may be.", "---", "Name: CTqkv", "Functions:"]
    for name, returns_pointer, parameters in functions():
        rows = []
        if returns_pointer:
            unused.discard((name, ""))
            rows.append(f"  NullabilityOfRet: {'N' if name in NEVER else 'O'}")
        if any(pointer for _, pointer in parameters):
            rows.append("  Parameters:")
        for position, (parameter, pointer) in enumerate(parameters):
            if not pointer:
                continue
            optional = parameter in EVERYWHERE | OPTIONAL.get(name, set())
            unused.discard((name, parameter))
            rows += [f"  - Position: {position}", f"    Nullability: {'O' if optional else 'N'}"]
        if rows:
            lines += [f"- Name: {name}"] + rows
    if unused:
        sys.exit(f"apinotes.py: tqkv.h has no such pointers: {sorted(unused)}")
    return "\n".join(lines) + "\n"


def main():
    text = notes()
    if sys.argv[1:] != ["--check"]:
        with open(NOTES, "w", encoding="utf-8") as file:
            file.write(text)
    elif not os.path.exists(NOTES) or open(NOTES, encoding="utf-8").read() != text:
        sys.exit(f"{NOTES} is not what tqkv.h gives: make apinotes")


main()

#!/usr/bin/env python3
"""Plants bugs in copies of the builder, and in a shader, one at a time, and checks that the library's tests catch each.

usage: bugs.py BUILD_FOLDER [part of a name]...

Takes LLC, CPP and LINK from the environment: what compiles the modules and launchers, and links the driver; LIBRARY and
LIBRARY_SOURCE: a library without bugs. Each bug
builds a library of one kernel. Then either check.py's comparison with the shader reports it, or specialise.py, or the driver
that runs the library's bitcode.
"""
import os
import re
import shutil
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import check  # noqa: E402
import reader  # noqa: E402
from planted import edit, run_all, shell  # noqa: E402

# name: (file, text, replacement, kernel, cases to run on its bitcode, SPECIALISE or nothing, what the report must say). The first
# three may be tuples: several edits.
SPECIALISE = "specialise"
BUGS = {
    "address_space_of_metadata": (
        "metallib/air/metadata.py", '"constant": 2', '"constant": 1', "rotate_d32", "",
        "argument args: address space 1 in metadata"),
    "address_space_of_types": (
        "metallib/air/shim/metal_stdlib", "threadgroup __attribute__((address_space(3)))",
        "threadgroup __attribute__((address_space(1)))", "probe_d32", "",
        r"argument space: address space of float addrspace\(1\)\*, not 3"),
    "signature": (
        "metallib/air/shim/metal_stdlib", 'wg_barrier, "wg.barrier", int, int', 'wg_barrier, "wg.barrier", int, short',
        "decode_d32", "", r"common\.h|metal_stdlib:\d+: call of air\.wg\.barrier"),
    "signature_that_the_builder_takes": (
        ("metallib/air/shim/metal_stdlib", "metallib/air/lower.py"),
        ('wg_barrier, "wg.barrier", int, int', '"air.wg.barrier": ("void", "i32, i32"'),
        ('wg_barrier, "wg.barrier", int, short', '"air.wg.barrier": ("void", "i32, i16"'), "decode_d32", "",
        r"signature void air\.wg\.barrier\(i32, i16\), not void air\.wg\.barrier\(i32, i32\)"),
    "argument_index": (
        "metallib/air/metadata.py", 'f"i32 {index}", "i32 1"', 'f"i32 {int(index) + 1}", "i32 1"', "rotate_d32", "",
        "argument args: index 1, not 0"),
    "argument_index_by_running": (
        "metallib/air/metadata.py", 'f"i32 {index}", "i32 1"',
        'f"i32 {int(index) ^ 3 if space == \'device\' and int(index) in (1, 2) else index}", "i32 1"',
        "(encode|encode_kv|decode|probe)_d64", "encode/tq4/d64", "FAIL encode/tq4/d64"),
    "argument_order": (
        "metallib/air/metadata.py", "for i, a in enumerate(arguments)]", "for i, a in enumerate(arguments[::-1])]",
        "rotate_d32", "", "argument args: named n_simdgroups"),
    "no_convergent_attribute": (
        "metallib/air/lower.py", 'GROUPS = ("nounwind", "convergent nounwind"', 'GROUPS = ("nounwind", "nounwind"',
        "rotate_d32", "", r"convergent of air\.simd_shuffle_xor\.f32"),
    "no_convergent_function": (
        "metallib/air/lower.py", '"air.simd_shuffle_xor.f32": ("float", "float, i16", TOGETHER)',
        '"air.simd_shuffle_xor.f32": ("float", "float, i16", CONST)', "rotate_d32", "",
        r"convergent of air\.simd_shuffle_xor\.f32"),
    "no_convergent_kernel": (
        "metallib/air/lower.py", "'convergent nounwind \"frame", "'nounwind \"frame", "rotate_d32", "",
        "kernel without convergent"),
    "barriers_without_effect": (
        "metallib/air/shim/metal_stdlib", "__attribute__((convergent))", "__attribute__((const))", "(encode|encode_kv|decode|probe)_d64",
        "encode/tq4/d64", "FAIL encode/tq4/d64"),
    "constant_index": (
        "metallib/air/lower.py", "self.listed.append((name, SCALARS[kind][3], index))",
        "self.listed.append((name, SCALARS[kind][3], index + 1))", "rotate_d32", "", "function constant unrotate, bool, 5"),
    "constant_type": (
        "metallib/air/metadata.py", '"bool": (1, 1, "b", 53)', '"bool": (1, 1, "b", 33)', "rotate_d32", "",
        "function constant unrotate, uint, 4"),
    "constant_not_copied": (
        "metallib/air/lower.py", 'externally_initialized constant {of} undef', 'constant {of} undef', "rotate_d32", "",
        "global of unrotate"),
    "hash": (
        "metallib/air/container.py", "hashlib.sha256(checked(bitcode))", "hashlib.sha256(checked(bitcode)[20:])",
        "rotate_d32", "", "HASH is not that of the bitcode"),
    "size_of_the_list": (
        "metallib/air/container.py", "len(listed) - 4, at_public", "len(listed), at_public", "rotate_d32", "",
        "extension|header"),
    "fast_math": (
        "metallib/air/metadata.py", '"fast_math_disable"', '"fast_math_enable"', "rotate_d32", "", "fast math"),
    "contraction": (
        "metallib/air/build.py", '"-ffp-contract=off"', '"-ffp-contract=fast", "-ffast-math"', "decode_d32", "",
        "the word fast|instruction|call of"),
    "smaller_for_larger": (
        "metallib/air/lower.py", '"umin": "ult"', '"umin": "ugt"', "rotate_d32", "lowering", "FAIL lowering: words"),
    "negative_as_is": (
        "metallib/air/lower.py", "fsub {kind} -0.000000e+00, {value}", "fadd {kind} -0.000000e+00, {value}", "rotate_d32",
        "lowering", "FAIL lowering: words"),
    "chain_of_bytes_cut": (
        "metallib/air/lower.py", "add i64 {before}, {offset}", "add i64 {offset}, 0", "rotate_d32", "lowering",
        "FAIL lowering: (words|bytes)"),
    "conversion_of_the_other_sign": (
        "metallib/air/lower.py", '"sitofp": "f.{1}.s.{0}"', '"sitofp": "f.{1}.u.{0}"', "(encode|encode_kv|decode|probe)_d64",
        "encode/i8/d64", "FAIL encode/i8/d64"),
    "vector_element_swapped": (
        "metallib/air/shim/metal_stdlib", "packed_float4 &v) : x(v.x), y(v.y)",
        "packed_float4 &v) : x(v.y), y(v.x)", "rotate_d128", "rotate/d128", "FAIL rotate/d128"),
    # Pipelines that would be slow.
    "width_by_a_call": (
        ("shaders/codec.h", *("metallib/air/shim/metal_stdlib",) * 2, "metallib/air/lower.py"),
        ("return main_bits(format) < 4u ? 4u : main_bits(format);", "AIR(float, sqrt,", "return a > b ? a : b;", "CALLS = {"),
        ("return max(main_bits(format), 4u);", 'AIR(uint, max, "max.u.i32", uint, uint);\nAIR(float, sqrt,',
         "return T(air::max(uint(a), uint(b)));", 'CALLS = {"air.max.u.i32": ("i32", "i32, i32", CONST),'),
        "attend_d80", SPECIALISE, r"constants that are not calculated: air\.max\.u\.i32"),
    "computed_index": (
        "shaders/attend.h", "float keep = upper ? high : low, give = upper ? low : high;",
        "float keep = total[r + int(upper) * distance][c], give = upper ? low : high;", "attend_d128", SPECIALISE,
        r"FAIL attend_d128/i8-tq4/4: in thread memory: \[4 x \[8 x float\]\]"),
    "load_under_a_condition": (
        ("shaders/attend_matrix.h", "metallib/air/build.py"),
        ("if (TQKV_PLAIN_LOADS || j + 1 < chunks)", '"-jump-threading-threshold=0", '),
        ("if (j + 1 < chunks)", ""), "attend_matrix_d128",
        SPECIALISE, "FAIL attend_matrix_d128/f16-f16/32: in thread memory"),
    "rolled_loop": (
        "shaders/attend.h", "        TQKV_UNROLL\n        for (int i = 0; i < TQKV_LANE_VALUES(D); i++)\n            if (own",
        "        for (int i = 0; i < TQKV_LANE_VALUES(D); i++)\n            if (own", "attend_d1024", SPECIALISE,
        r"in thread memory: \[32 x float\]"),
    # The library's bitcode finds a shader's bug.
    "shader": (
        "shaders/rotate.h", "x[i + distance] = a - b;", "x[i + distance] = b - a;", "rotate_d64", "rotate/d64", "FAIL rotate/d64"),
    "shader_divergent": (
        "shaders/rotate.h", "simd_shuffle_xor(x[i], ushort(distance))",
        "lane < 16 ? simd_shuffle_xor(x[i], ushort(distance)) : 0.0f", "rotate_d64", "rotate/d64", "divergent"),
}


def plant(bug, folder):
    edits = zip(*((e,) if isinstance(e, str) else e for e in BUGS[bug][:3]))
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("shaders", "src", "metallib", "tests/metal"):
        shutil.copytree(part, f"{folder}/{part}", ignore=shutil.ignore_patterns("__pycache__"))
    return "".join(edit(f"{folder}/{file}", text, replacement) for file, text, replacement in edits)


def inspect(library):
    """What reader.py and module.py report, or nothing."""
    try:
        read = reader.read(library)
        for function in read.functions:
            check.check_module(read, function)
    except reader.Damage as damage:
        return str(damage)
    return ""


def execute(folder, cases):
    """What the driver reports that runs the library's bitcode; nothing if all cases pass."""
    llc, cpp, link = (os.environ[name] for name in ("LLC", "CPP", "LINK"))
    status, output = shell(f"""set -e; cd {os.getcwd()}; python3 {HERE}/launch.py {folder}/out.metallib {folder}/run
        for module in {folder}/run/*.ll; do {llc} -filetype=obj $module -o $module.o; done
        {cpp} -c {folder}/run/launchers.cpp -o {folder}/run/launchers.o; {link} {folder}/run/*.o -o {folder}/driver -lm""")
    if status:
        return output
    status, output = shell(f"{folder}/driver {cases}")
    return output if status else ""


def check_copy(folder, case):
    """A case of check.py over the copy of the builder."""
    status, output = shell(f"python3 {folder}/tests/metal/library/check.py {os.environ['LIBRARY']} "
                           f"{os.environ['LIBRARY_SOURCE']} {folder}/check {case}")
    return output if status else ""


def specialise(library):
    status, output = shell(f"python3 {HERE}/specialise.py {library}")
    return output if status else ""


def run_bug(bug, build):
    """Empty string if the bug is caught, else what happened instead."""
    kernel, cases, expected = BUGS[bug][3:]
    folder = f"{build}/bugs/library_{bug}"
    wrong = plant(bug, folder)
    if wrong:
        return wrong
    status, report = shell(f"python3 {folder}/metallib/air/build.py --only 'tqkv_{kernel}' -o {folder}/out.metallib "
                           f"{folder}/shaders/*.metal")
    if not status:
        library = f"{folder}/out.metallib"
        report = check_copy(folder, cases) if cases == "lowering" else specialise(library) if cases == SPECIALISE else \
            execute(folder, cases) if cases else inspect(library)
    if not report:
        return "nothing was reported"
    if "no such kernel" in report:
        return "the cases need another kernel: bugs.py is out of date"
    return "" if re.search(expected, report) else f"'{expected}' was not reported, but:\n{report[:2000]}"


if __name__ == "__main__":
    sys.exit(run_all(BUGS, plant, run_bug, lambda bug: BUGS[bug][5]))

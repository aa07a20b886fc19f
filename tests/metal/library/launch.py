#!/usr/bin/env python3
"""Makes a Metal library's own bitcode run on the machine of simt.h.

usage: launch.py LIBRARY FOLDER

For each kernel FOLDER/NAME.ll: the module as LLVM IR of this machine, for llc. FOLDER/launchers.cpp hands the kernels
their arguments, as the library's metadata describes them: indices and types come from nowhere else.
"""
import os
import pathlib
import platform
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import reader  # noqa: E402
from module import Module, arguments  # noqa: E402

TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
TYPES = {"uint": ("i32", "uint32_t"), "bool": ("i8", "uint8_t"), "int": ("i32", "int32_t"), "float": ("float", "float")}
PRELUDE = """#include "simt.h"
typedef uint32_t uint3 __attribute__((ext_vector_type(3)));
typedef uint32_t uint;
static uint3 position(simt::extent e) { return uint3{e.x, e.y, e.z}; }
static uint position(unsigned x) { return x; }
"""


def without_lines(text, pattern):
    return re.sub(rf"(?m)^{pattern}.*\n", "", text)


MULTIPLY = r"(?m)^  (%\S+) = .*call .*@air\.simdgroup_matrix_8x8_multiply_accumulate[.\w]*\((.*)\)[^()\n]*$"
MULTIPLY_NATIVE = "declare <2 x float> @air_multiply_accumulate(float, float, float, float, float, float)\n"


def multiply(match):
    """A product of matrices as a call with the lane's two elements of each: no vectors of 64 floats are passed."""
    name, values, lines, operands = match.group(1), arguments(match.group(2)), [], []
    for number, value in enumerate(values):
        for element in range(2):
            operands.append(f"%m{name[1:]}.{number}{element}")
            lines.append(f"  {operands[-1]} = extractelement {value}, i64 {element}")
    made = f"%m{name[1:]}"
    lines.append(f"  {made} = call <2 x float> @air_multiply_accumulate({', '.join('float ' + o for o in operands)})")
    lines += [f"  {made}.x = extractelement <2 x float> {made}, i64 0", f"  {made}.y = extractelement <2 x float> {made}, i64 1",
              f"  {made}.z = insertelement <64 x float> undef, float {made}.x, i64 0",
              f"  {name} = insertelement <64 x float> {made}.z, float {made}.y, i64 1"]
    return "\n".join(lines)


def portable(text, triple):
    """The module without what Metal alone reads, for a target that LLVM 14 knows."""
    text = re.sub(r"(?m)^target triple.*$", f'target triple = "{triple}"', text)
    text = re.sub(r"(?ms)^define internal void @_GLOBAL__sub_I.*?^\}\n", "", text)
    return without_lines(text, r"(?:@llvm\.global_ctors|!air\.|.*MTL_FC_INIT)")


def native(text, constants):
    """The module for this machine. A function constant is a global that the launcher sets."""
    text = without_lines(portable(text, TRIPLES[platform.machine()]), "target datalayout")
    text, n_products = re.subn(MULTIPLY, multiply, text)
    text = without_lines(text, r"declare <64 x float> @air\.simdgroup_matrix") + MULTIPLY_NATIVE * bool(n_products)
    for name, kind, index in constants:
        own = f"@_ZL{len(name)}{name}"
        reader.expect(re.search(rf"(?m)^{own} = internal unnamed_addr addrspace\(2\) global", text), f"no {own}")
        text = without_lines(text, re.escape(own) + " = ")
        text = re.sub(re.escape(own) + r"\b", f"@air_constant_{kind}_{index}", text)
        text += f"@air_constant_{kind}_{index} = external addrspace(2) global {TYPES[kind][0]}\n"
    return text


def launcher(module, constants):
    types, values, masks = [], [], {"1": 0, "2": 0, "3": 0}
    for fact in module.arguments:
        if fact["is"] == "air.buffer":
            index, space = int(fact["location_index"]), fact["address_space"]
            masks[space] |= 1 << index
            types.append("void *")
            values.append(f"t.{'threadgroup_arguments' if space == '3' else 'buffers'}[{index}]")
        else:
            types.append(fact["arg_type_name"])
            values.append(f"position(t.{fact['is'][4:]})")
    used = sum(1 << index for _, _, index in constants)
    sets = "".join(f'    if (!simt::constants->set[{i}]) simt::unset_constant("{n}", {i});\n'
                   f"    air_constant_{k}_{i} = ({TYPES[k][1]})simt::constants->value[{i}];\n" for n, k, i in constants)
    return (f'extern "C" void kernel_{module.name}({", ".join(types)});\nstatic void run_{module.name}(simt::thread_state &t)\n{{\n'
            f'{sets}    kernel_{module.name}({", ".join(values)});\n}}\nstatic simt::registration r_{module.name}("{module.name}", '
            f'{masks["1"] | masks["2"]}u, {masks["3"]}u, {used}ull, run_{module.name});\n')


def main():
    folder = pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    launchers, constants = [], set()
    for function in reader.read(sys.argv[1]).functions:
        text = reader.disassemble(function.bitcode, 14)
        constants |= {(kind, index) for _, kind, index in function.constants}
        launchers.append(launcher(Module(function.name, text), function.constants))
        own = re.sub(rf"@{function.name}\b", f"@kernel_{function.name}", native(text, function.constants))
        (folder / f"{function.name}.ll").write_text(own, encoding="utf-8")  # tqkv.h has functions of some kernels' names
    made = "".join(f'extern "C" {{ {TYPES[k][1]} air_constant_{k}_{i}; }}\n' for k, i in sorted(constants))
    (folder / "launchers.cpp").write_text(PRELUDE + made + "".join(launchers), encoding="utf-8")


if __name__ == "__main__":
    main()

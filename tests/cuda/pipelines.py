#!/usr/bin/env python3
"""Compiles the shaders' pipelines for an NVIDIA GPU, several at a time.

usage: pipelines.py SOURCES OUTPUT LIST NVCC FLAG...

SOURCES is the folder of the CUDA files that prep.py writes. LIST is a file with a line "pipeline NAME" for each pipeline;
pipelines.h explains the names. Makes each OUTPUT/NAME.cubin that does not exist. A kernel whose format is not set must not
compile.
"""
import concurrent.futures
import os
import re
import subprocess
import sys


def registers(family, head_dim, constants):
    """Flags of a family, and those that limit the registers where this lets one more threadgroup run on a multiprocessor."""
    columns, batch = constants.split("_")[6], constants.split("_")[19]
    head_dim = int(head_dim.split("_")[0]) if head_dim else 0
    if family == "index_scores":  # no product of it is wide
        return ["-DSIMT_NARROW"]
    if constants.split("_")[26] == "1":  # lists: few threadgroups, and more to keep
        return []
    if family == "attend_matrix" and int(columns) <= 8 and head_dim <= 128:
        return ["-maxrregcount=168"]
    if family != "attend" or head_dim > 512 or int(columns) > 4:
        return []
    if int(columns) > 2 or head_dim > 256:
        return ["-maxrregcount=168"]
    return ["-maxrregcount=" + ("96" if batch == "1" and head_dim <= 128 else "128")]


def compile_pipeline(name, sources, output, nvcc):
    """Returns the compiler's message, or an empty string on success."""
    kernel, constants = name.split("-")
    family, head_dim = re.match(r"(.*?)(?:_d([\d_]+))?$", kernel).groups()
    cubin = os.path.join(output, name + ".cubin")
    if os.path.exists(cubin):
        return ""
    pipeline = os.path.join(output, name + ".h")
    with open(pipeline, "w", encoding="utf-8") as f:
        f.write("#define SIMT_CONSTANTS " + constants.replace("x", "-1").replace("_", ", ") + "\n")
        f.write(f"#define SIMT_HEAD_DIM {head_dim.replace('_', '')}\n" if head_dim else "")
    command = nvcc + registers(family, head_dim, constants)
    result = subprocess.run(command + ["-include", pipeline, "-cubin", os.path.join(sources, family + ".metal.cu"), "-o", cubin],
                            capture_output=True, text=True, check=False)
    os.remove(pipeline)
    refused = constants.startswith("x_") and "a function constant is not set" in result.stderr
    return "" if result.returncode == 0 or refused else f"{name}: {result.stderr}"


def main():
    sources, output, listed, nvcc = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
    os.makedirs(output, exist_ok=True)
    with open(listed, encoding="utf-8") as f:
        names = [line.split()[1] for line in f if line.startswith("pipeline ")]
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
        complaints = [c for c in pool.map(lambda n: compile_pipeline(n, sources, output, nvcc), names) if c]
    for complaint in complaints:
        print(complaint)
    print(f"{len(names) - len(complaints)} pipelines compiled, {len(complaints)} failed")
    return bool(complaints) or not names


if __name__ == "__main__":
    sys.exit(main())

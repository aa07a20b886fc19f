#!/usr/bin/env python3
"""tqkv in llama-cpp-python: `load_backend` before the model is loaded is all.

usage: load.py BACKEND MODEL    TQKV chooses the formats
"""
import ctypes
import sys

import llama_cpp
from llama_cpp._ggml import libggml


def load_backend(path):
    """False where the file was built for another version of ggml, which it says."""
    libggml.ggml_backend_load.argtypes, libggml.ggml_backend_load.restype = [ctypes.c_char_p], ctypes.c_void_p
    return bool(libggml.ggml_backend_load(path.encode()))


def main():
    backend, model = sys.argv[1:]
    if not load_backend(backend):
        sys.exit(f"{backend} was not loaded")
    llama = llama_cpp.Llama(model, n_gpu_layers=-1, n_ctx=1024, flash_attn=True, verbose=False)
    print(llama("The capital of France is", max_tokens=12)["choices"][0]["text"])


main()

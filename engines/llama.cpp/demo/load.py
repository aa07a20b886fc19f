#!/usr/bin/env python3
"""tqkv in llama.cpp from Python, by ctypes as llama-cpp-python does it: `load_backend` before the model is loaded is all.

usage: load.py BIN BACKEND MODEL
"""
import ctypes
import sys


def load_backend(ggml, path):
    """ggml: the library that the engine has loaded, as llama_cpp._ggml.libggml. The name of the device, or None."""
    ggml.ggml_backend_load.argtypes, ggml.ggml_backend_load.restype = [ctypes.c_char_p], ctypes.c_void_p
    ggml.ggml_backend_reg_name.argtypes, ggml.ggml_backend_reg_name.restype = [ctypes.c_void_p], ctypes.c_char_p
    registry = ggml.ggml_backend_load(path.encode())
    return registry and ggml.ggml_backend_reg_name(registry).decode()


def main():
    folder, backend, model = sys.argv[1:]
    llama, ggml = ctypes.CDLL(f"{folder}/libllama.so"), ctypes.CDLL(f"{folder}/libggml.so")
    name = load_backend(ggml, backend)
    if name != "TQKV":
        sys.exit(f"{backend} was not loaded")
    llama.llama_supports_gpu_offload.restype = ctypes.c_bool
    print(f"loaded from Python: {name}, offload {llama.llama_supports_gpu_offload()}")


main()

#!/usr/bin/env python3
"""Writes models that are small enough for the tests: llama, the same with a large bias of its keys, gemma3 with windows.

usage: tiny_models.py FOLDER
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "bench" / "models"))
import tiny  # noqa: E402


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("llama", "biased", "gemma3"):
        model = tiny.Tiny("gemma3" if name == "gemma3" else "llama", seed=3, n_layers=3)
        if name != "gemma3":
            model.weights["output_norm.weight"] *= np.float32(0.08)
        for layer in range(model.n_layers):
            # Scores and logits as a model has them: with those of random weights the last bits decide which one wins.
            model.weights[f"blk.{layer}.attn_q.weight"] *= np.float32(0.2)
            if name == "biased":
                model.weights[f"blk.{layer}.attn_k.bias"] = (model.random.normal(size=64) * 10).astype(np.float32)
        model.write(folder / f"{name}.gguf")


main()

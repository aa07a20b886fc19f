#!/usr/bin/env python3
"""llama-server with four slots, stock and with the backend: requests at once, a prompt that begins like an earlier one, a slot
saved and restored. The likeliest tokens' logarithms have to agree.

usage: server_test.py BIN BACKEND MODEL FORMATS TOLERANCE
"""
import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

SLOTS = 4
# Tokens of the tiny model that are a part of a letter: the server keeps them back.
NO_PARTS = [[token, False] for token in range(94, 261)]
passed = failed = 0


def check(holds, what):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok    ' if holds else 'FAILED'} {what}")


def text(number, n):
    return [3 + (number * 7919 + i * i * 31 + i * 17) % 240 for i in range(n)]


class Server:
    def __init__(self, folder, command, environment):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log = open(folder / f"server-{self.port}.log", "w", encoding="utf-8")
        options = ["--port", str(self.port), "-np", str(SLOTS), "-c", "8192", "-t", "1", "-cb", "--slot-save-path", f"{folder}/",
                   "--no-warmup"]
        self.process = subprocess.Popen(command + options, env={**os.environ, **environment}, stdout=self.log, stderr=self.log)
        for _ in range(600):
            try:
                self.call("/health")
                return
            except OSError:
                time.sleep(0.1)
                if self.process.poll() is not None:
                    break
        sys.exit(f"server_test: {command[0]} did not start: {pathlib.Path(self.log.name).read_text(encoding='utf-8')[-2000:]}")

    def call(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def complete(self, prompt, slot=-1, n=8):
        """Of each token the logarithms of the likeliest."""
        answer = self.call("/completion", {"prompt": prompt, "n_predict": n, "temperature": 0, "n_probs": 5, "id_slot": slot,
                                           "cache_prompt": True, "ignore_eos": True, "logit_bias": NO_PARTS})
        return [{p["id"]: p["logprob"] for p in t["top_logprobs"]} for t in answer["completion_probabilities"]]

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


def steps(server):
    """What people do; the answers by name."""
    answers = {}
    with concurrent.futures.ThreadPoolExecutor(SLOTS) as pool:
        runs = [pool.submit(server.complete, text(i, 200 + 90 * i), i) for i in range(SLOTS)]
        for i, done in enumerate(runs):
            answers[f"slot {i} beside the others"] = done.result()
    answers["prompt reused"] = server.complete(text(3, 400) + text(9, 50), 3)
    server.call("/slots/3?action=save", {"filename": "state"})
    server.call("/slots/3?action=erase", {})
    answers["another text"] = server.complete(text(12, 700), 3)
    server.call("/slots/3?action=restore", {"filename": "state"})
    answers["restored"] = server.complete(text(3, 400) + text(9, 50) + text(10, 20), 3)
    for i in range(6):
        answers[f"more prompts than slots, {i}"] = server.complete(text(20 + i, 300))
    return answers


def difference(x, y):
    """Of the first token: later ones may follow another choice. The largest difference of a logarithm that both name."""
    shared = x[0].keys() & y[0].keys()
    return max(abs(x[0][t] - y[0][t]) for t in shared) if len(shared) >= 3 else float("inf")


def main():
    binaries, backend, model, formats, tolerance = sys.argv[1:]
    command = [f"{binaries}/llama-server", "-m", model]
    with tempfile.TemporaryDirectory() as folder:
        answers = []
        for environment, device in (({}, "none"), ({"GGML_BACKEND_PATH": backend, "TQKV": formats}, "TQKV")):
            server = Server(pathlib.Path(folder), command + ["-dev", device], environment)
            try:
                answers.append(steps(server))
            finally:
                server.close()
        for name, answer in answers[0].items():
            d = difference(answer, answers[1][name])
            check(d <= float(tolerance), f"server/{name}: {d:.2g}")
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed != 0)


main()

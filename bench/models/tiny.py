"""Tiny models with random weights as GGUF files, and what they compute, written down plainly: one position after the other,
in float64, without a line of forward.py."""
import math

import gguf
import numpy as np

# Heads of 32: the smallest that the library takes, and a block of the peers.
SHAPE = {"width": 48, "heads": 4, "kv_heads": 2, "head_dim": 32, "ff": 80}
GEMMA_LAYERS, WINDOW = 7, 16
EPS = 1e-5
WORDS = ["th", "he", "the", "in", "ing"]


def gpt2_pieces():
    """Of bytes: the letters that stand for them, a few pairs."""
    from tokenizers import pre_tokenizers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return letters + WORDS, ["t h", "h e", "th e", "i n", "in g"]


def sentence_pieces():
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["\u2581", "\u2581the"] + WORDS
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + letters
    scores = [0.0] * 259 + [-100.0] * len(letters)
    for rank, word in enumerate(["the", "ing", "th", "he", "in"]):
        scores[pieces.index(word)] = -1.0 - rank
    scores[pieces.index("\u2581the")] = -0.5
    return pieces, scores


class Tiny:
    """weights: {name: array}, as the file has them."""

    def __init__(self, arch, seed=1, n_layers=2, bias=0.0):
        self.arch, self.n_layers = arch, GEMMA_LAYERS if arch == "gemma3" else n_layers
        self.pieces = sentence_pieces() if arch == "gemma3" else gpt2_pieces()
        self.random = np.random.default_rng(seed)
        s = SHAPE
        self.weights = {"token_embd.weight": self.matrix(len(self.pieces[0]), s["width"], 1.0),
                        "output_norm.weight": self.gains(s["width"])}
        if arch == "qwen3":
            self.weights["output.weight"] = self.matrix(len(self.pieces[0]), s["width"])
        for layer in range(self.n_layers):
            self.add_layer(f"blk.{layer}.", s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"], bias)

    def matrix(self, rows, columns, size=None):
        return (self.random.normal(size=(rows, columns)) * (size or 1.5 / math.sqrt(columns))).astype(np.float32)

    def gains(self, n):
        return self.random.uniform(0.5, 1.5, n).astype(np.float32)

    def add_layer(self, name, q, k, bias):
        width, w = SHAPE["width"], self.weights
        w[name + "attn_q.weight"], w[name + "attn_k.weight"] = self.matrix(q, width), self.matrix(k, width)
        w[name + "attn_v.weight"], w[name + "attn_output.weight"] = self.matrix(k, width), self.matrix(width, q)
        for part, rows, columns in (("gate", SHAPE["ff"], width), ("up", SHAPE["ff"], width), ("down", width, SHAPE["ff"])):
            w[f"{name}ffn_{part}.weight"] = self.matrix(rows, columns)
        norms = ["attn_norm", "ffn_norm"] + (["post_attention_norm", "post_ffw_norm"] if self.arch == "gemma3" else [])
        for norm in norms:
            w[f"{name}{norm}.weight"] = self.gains(width)
        if self.arch in ("qwen3", "gemma3"):
            for norm in ("attn_q_norm", "attn_k_norm"):
                w[f"{name}{norm}.weight"] = self.gains(SHAPE["head_dim"])
        if self.arch == "qwen2":
            for part, n in (("q", q), ("k", k), ("v", k)):
                w[f"{name}attn_{part}.bias"] = (self.random.normal(size=n) * (bias if part == "k" else 0.5)).astype(np.float32)

    def write(self, path, arch=None, without=(), tokeniser=True, base=None):
        arch = arch or self.arch
        writer = gguf.GGUFWriter(path, arch)
        s = SHAPE
        for key, value in (("block_count", self.n_layers), ("context_length", 8192), ("embedding_length", s["width"]), ("feed_forward_length", s["ff"]),
                           ("attention.head_count", s["heads"]), ("attention.head_count_kv", s["kv_heads"]),
                           ("attention.key_length", s["head_dim"]), ("attention.value_length", s["head_dim"])):
            writer.add_uint32(f"{arch}.{key}", value)
        writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", EPS)
        if self.arch == "gemma3":
            writer.add_uint32(f"{arch}.attention.sliding_window", WINDOW)
        writer.add_float32(f"{arch}.rope.freq_base", self.base if base is None else base)
        if tokeniser:
            self.write_tokeniser(writer)
        for name, values in self.weights.items():
            if name not in without:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def write_tokeniser(self, writer):
        names, more = self.pieces
        writer.add_tokenizer_model("llama" if self.arch == "gemma3" else "gpt2")
        writer.add_token_list(names)
        if self.arch == "gemma3":
            writer.add_token_scores(more)
            writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(names) - 259))
            writer.add_bos_token_id(1)
            writer.add_unk_token_id(0)
            writer.add_add_space_prefix(False)
        else:
            writer.add_token_merges(more)
            writer.add_tokenizer_pre("gpt-2")

    @property
    def base(self):
        return 5000.0

    # ---- What it computes ----

    def wide(self, name):
        found = self.weights.get(name)
        return None if found is None else found.astype(np.float64)

    def norm(self, x, name):
        return x / math.sqrt(sum(x * x) / len(x) + EPS) * self.wide(name)

    def sees(self, layer, query):
        """The first position that a query sees."""
        local = self.arch == "gemma3" and layer % 6 != 5
        return max(0, query - WINDOW + 1) if local else 0

    def turn(self, x, layer, position):
        local = self.arch == "gemma3" and layer % 6 != 5
        out, n = x.copy(), len(x)
        for i in range(n // 2):
            angle = position * (10000.0 if local else self.base) ** (-2 * i / n)
            a, b = (2 * i, 2 * i + 1) if self.arch == "llama" else (i, i + n // 2)
            out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
            out[b] = x[a] * math.sin(angle) + x[b] * math.cos(angle)
        return out

    def heads(self, x, layer, part, position):
        """The rows of all heads of a position: queries, keys or values."""
        name = f"blk.{layer}.attn_{part}"
        y, bias = self.wide(name + ".weight") @ x, self.wide(name + ".bias")
        rows = list((y if bias is None else y + bias).reshape(-1, SHAPE["head_dim"]))
        if self.wide(name + "_norm.weight") is not None:
            rows = [self.norm(r, name + "_norm.weight") for r in rows]
        return rows if part == "v" else [self.turn(r, layer, position) for r in rows]

    def attend(self, layer, query, position, keys, values):
        """keys, values: [position][head] as stored."""
        out = []
        for h, q in enumerate(query):
            own = h * SHAPE["kv_heads"] // SHAPE["heads"]
            places = range(self.sees(layer, position), position + 1)
            weights = [math.exp(q @ keys[j][own] / math.sqrt(SHAPE["head_dim"])) for j in places]
            out.append(sum(w * values[j][own] for w, j in zip(weights, places)) / sum(weights))
        return np.concatenate(out)

    def activate(self, x):
        if self.arch != "gemma3":
            return np.array([v / (1 + math.exp(-v)) for v in x])
        return np.array([0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x])

    def step(self, x, layer, position, keys, values, store):
        name = f"blk.{layer}."
        h = self.norm(x, name + "attn_norm.weight")
        keys.append([store(r, layer, "keys") for r in self.heads(h, layer, "k", position)])
        values.append([store(r, layer, "values") for r in self.heads(h, layer, "v", position)])
        change = self.wide(name + "attn_output.weight") @ self.attend(layer, self.heads(h, layer, "q", position), position,
                                                                      keys, values)
        x = x + (self.norm(change, name + "post_attention_norm.weight") if self.arch == "gemma3" else change)
        h = self.norm(x, name + "ffn_norm.weight")
        change = self.wide(name + "ffn_down.weight") @ (self.activate(self.wide(name + "ffn_gate.weight") @ h) *
                                                        (self.wide(name + "ffn_up.weight") @ h))
        return x + (self.norm(change, name + "post_ffw_norm.weight") if self.arch == "gemma3" else change)

    def log_probabilities(self, tokens, store=lambda row, layer, part: row):
        """[n_tokens][vocabulary]; store: what a cache makes of a row of a layer's keys or values."""
        seen = [([], []) for _ in range(self.n_layers)]
        output = self.wide("output.weight" if "output.weight" in self.weights else "token_embd.weight")
        out = []
        for position, token in enumerate(tokens):
            x = self.wide("token_embd.weight")[token]
            x = x * math.sqrt(len(x)) if self.arch == "gemma3" else x
            for layer, (keys, values) in enumerate(seen):
                x = self.step(x, layer, position, keys, values, store)
            logits = output @ self.norm(x, "output_norm.weight")
            out.append(logits - logits.max() - math.log(sum(np.exp(logits - logits.max()))))
        return np.array(out)

"""Forward passes of pretrained models out of their GGUF files, in float32, with attention left to the caller.

Architectures: llama (SmolLM2, Llama, Mistral without a window), qwen2, qwen3, gemma3. Weights are dequantised a layer at
a time, so that a pass needs the memory of one layer and of the vocabulary.
"""
import gguf
import numpy as np

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
# Layers of Gemma 3 that see the whole context: each sixth. Its other layers turn positions by this base.
GLOBAL_LAYERS = 6
LOCAL_BASE = 10000.0
# The one size of Gemma 3 whose scores are scaled by the width of a head in the model, not by the size of a key.
SCALED_BY_WIDTH = 62


class Unfit(Exception):
    """What the user gave cannot be measured; the text says why."""


def read_file(path):
    """The metadata of a GGUF file, {name: value}, and its tensors, {name: ReaderTensor}."""
    try:
        reader = gguf.GGUFReader(path)
        fields = {f.name: f.contents() for f in reader.fields.values()}
        return fields, {t.name: t for t in reader.tensors}
    except OSError as error:
        raise Unfit(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # the package checks little: a damaged file ends anywhere in it
        raise Unfit(f"{path}: not a GGUF file, or a damaged one: {error}") from None


class Model:
    def __init__(self, path):
        self.path = path
        self.fields, self.tensors = read_file(path)
        self.arch = self.fields.get("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise Unfit(f"{path}: the architecture is {self.arch}, not one of {', '.join(ARCHITECTURES)}")
        self.n_layers = self.count("block_count")
        self.width = self.count("embedding_length")
        self.n_heads = self.count("attention.head_count")
        self.n_kv_heads = self.count("attention.head_count_kv", self.n_heads)
        self.head_dim = self.count("attention.key_length", self.width // self.n_heads)
        self.value_dim = self.count("attention.value_length", self.head_dim)
        if self.n_heads % self.n_kv_heads:
            raise Unfit(f"{path}: {self.n_heads} query heads do not go into {self.n_kv_heads} KV heads")
        self.eps = np.float32(self.field("attention.layer_norm_rms_epsilon", 1e-6))
        self.window = self.field("attention.sliding_window", 0)
        self.read_embedding()
        self.read_rotary()
        self.scale = (self.width / self.n_heads if self.gemma and self.n_layers == SCALED_BY_WIDTH
                      else self.head_dim) ** -0.5

    @property
    def gemma(self):
        return self.arch == "gemma3"

    def field(self, name, default=None):
        return self.fields.get(f"{self.arch}.{name}", default)

    def count(self, name, default=None):
        value = self.field(name, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or not 0 < value < 1 << 24:
            raise Unfit(f"{self.path}: {self.arch}.{name} is {value}: a positive number that holds for all layers is needed")
        return value

    def read_embedding(self):
        if self.field("expert_count"):
            raise Unfit(f"{self.path}: mixtures of experts are not supported")
        if self.window and not self.gemma:
            raise Unfit(f"{self.path}: a sliding window is supported for gemma3 alone")
        tokens = self.tensors.get("token_embd.weight")
        self.vocabulary = int(tokens.shape[1]) if tokens is not None and len(tokens.shape) == 2 else 0
        self.embedding = self.tensor("token_embd.weight", self.vocabulary, self.width)
        self.output = self.embedding
        if "output.weight" in self.tensors:
            self.output = self.tensor("output.weight", self.vocabulary, self.width)
        self.output_norm = self.tensor("output_norm.weight", self.width)

    def read_rotary(self):
        self.turned = self.count("rope.dimension_count", self.head_dim)
        self.base = self.field("rope.freq_base", 10000.0)
        self.local_base = self.field("rope.freq_base_swa", LOCAL_BASE)
        kind = self.field("rope.scaling.type", "none")
        if kind not in ("none", "linear") or self.turned % 2 or self.turned > self.head_dim:
            raise Unfit(f"{self.path}: rotary embeddings of kind {kind}, {self.turned} of {self.head_dim} dimensions, "
                        "are not supported")
        self.stretch = self.field("rope.scaling.factor", 1.0) if kind == "linear" else 1.0
        self.divisors = 1.0
        if "rope_freqs.weight" in self.tensors:
            self.divisors = self.tensor("rope_freqs.weight", self.turned // 2).astype(np.float64)

    def tensor(self, name, *shape):
        """A weight as float32 of that shape."""
        found = self.tensors.get(name)
        if found is None:
            raise Unfit(f"{self.path}: there is no tensor {name}")
        stored = tuple(int(n) for n in found.shape[::-1])
        if stored != shape:
            raise Unfit(f"{self.path}: {name} has the shape {stored}, not {shape}")
        try:
            values = gguf.quants.dequantize(found.data, found.tensor_type)
        except NotImplementedError:
            raise Unfit(f"{self.path}: {name} is of type {found.tensor_type.name}, which gguf cannot read") from None
        return np.ascontiguousarray(values, np.float32).reshape(shape)

    def is_local(self, layer):
        """Does the layer see a window of positions only?"""
        return bool(self.window) and (layer + 1) % GLOBAL_LAYERS != 0

    def window_of(self, layer):
        """0: the layer sees all positions."""
        return self.window if self.is_local(layer) else 0

    def angles(self, layer, n_tokens):
        """Cosines and sines of the rotary embedding, each [n_tokens][1][turned / 2]."""
        local = self.is_local(layer)
        exponents = np.arange(0, self.turned, 2, dtype=np.float64) / self.turned
        frequencies = (self.local_base if local else self.base) ** -exponents / self.divisors
        angles = np.arange(n_tokens)[:, None] * frequencies / (1.0 if local else self.stretch)
        return np.cos(angles).astype(np.float32)[:, None], np.sin(angles).astype(np.float32)[:, None]

    def embed(self, tokens):
        """[n_tokens][width]"""
        rows = self.embedding[tokens]
        return rows * np.float32(self.width**0.5) if self.gemma else rows

    def logits(self, hidden):
        """hidden: [n_tokens][width], what the last layer gave; [n_tokens][vocabulary]"""
        return norm(hidden, self.output_norm, self.eps) @ self.output.T


def norm(x, gain, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * gain


def turn(x, angles, in_halves):
    """The rotary embedding of rows [n_tokens][heads][dim]; of pairs of neighbours, or of the two halves."""
    cosine, sine = angles
    n = 2 * cosine.shape[-1]
    first, second = (slice(0, n // 2), slice(n // 2, n)) if in_halves else (slice(0, n, 2), slice(1, n, 2))
    a, b = x[..., first], x[..., second]
    turned = x.copy()
    turned[..., first] = a * cosine - b * sine
    turned[..., second] = a * sine + b * cosine
    return turned


def silu(x):
    with np.errstate(over="ignore"):  # exp(-x) of a large negative x: the quotient is then the 0 that it should be
        return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)))


class Layer:
    """One layer's weights, and what it does before and after attention."""

    def __init__(self, model, index, n_tokens):
        self.model = model
        self.index = index
        self.angles = model.angles(index, n_tokens)
        width, n_ff = model.width, model.count("feed_forward_length")
        rows = {"q": model.n_heads * model.head_dim, "k": model.n_kv_heads * model.head_dim,
                "v": model.n_kv_heads * model.value_dim}
        self.attention_norm = self.weight("attn_norm", width)
        self.projections = [self.weight(f"attn_{n}", size, width) for n, size in rows.items()]
        self.biases = [self.optional(f"attn_{n}.bias", size) for n, size in rows.items()]
        self.head_norms = [self.optional(f"attn_{n}_norm.weight", model.head_dim) for n in "qk"]
        self.out = self.weight("attn_output", width, model.n_heads * model.value_dim)
        self.out_bias = self.optional("attn_output.bias", width)
        self.ffn_norm = self.weight("ffn_norm", width)
        self.gate, self.up = self.weight("ffn_gate", n_ff, width), self.weight("ffn_up", n_ff, width)
        self.down = self.weight("ffn_down", width, n_ff)
        self.after = [self.weight(n, width) if model.gemma else None for n in ("post_attention_norm", "post_ffw_norm")]

    def weight(self, name, *shape):
        return self.model.tensor(f"blk.{self.index}.{name}.weight", *shape)

    def optional(self, name, *shape):
        name = f"blk.{self.index}.{name}"
        return self.model.tensor(name, *shape) if name in self.model.tensors else None

    def project(self, x):
        """x: [n_tokens][width]. Queries [n_tokens][n_heads][head_dim], keys and values [n_tokens][n_kv_heads][...]."""
        model, h = self.model, norm(x, self.attention_norm, self.model.eps)
        q, k, v = (h @ w.T if b is None else h @ w.T + b for w, b in zip(self.projections, self.biases))
        q, k = q.reshape(len(x), model.n_heads, -1), k.reshape(len(x), model.n_kv_heads, -1)
        q, k = (r if gain is None else norm(r, gain, model.eps) for r, gain in zip((q, k), self.head_norms))
        q, k = (turn(r, self.angles, model.arch != "llama") for r in (q, k))
        return q, k, v.reshape(len(x), model.n_kv_heads, -1)

    def finish(self, x, attended):
        """What the next layer gets, from what attention gave: [n_tokens][n_heads][value_dim]."""
        eps = self.model.eps
        change = attended.reshape(len(x), -1) @ self.out.T
        if self.out_bias is not None:
            change += self.out_bias
        x = x + (change if self.after[0] is None else norm(change, self.after[0], eps))
        h = norm(x, self.ffn_norm, eps)
        change = ((gelu if self.model.gemma else silu)(h @ self.gate.T) * (h @ self.up.T)) @ self.down.T
        return x + (change if self.after[1] is None else norm(change, self.after[1], eps))

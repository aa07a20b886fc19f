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
        self.eps = np.float32(self.number("attention.layer_norm_rms_epsilon", 1e-6))
        self.window = self.number("attention.sliding_window", 0)
        self.read_embedding()
        self.read_rotary()
        self.check_layers()
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

    def number(self, name, default, least=0):
        value = self.field(name, default)
        if not isinstance(value, (int, float)) or not least <= value < float("inf"):
            raise Unfit(f"{self.path}: {self.arch}.{name} is {value}: a number of at least {least} is needed")
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
        self.base = self.number("rope.freq_base", 10000.0, least=1)
        self.local_base = self.number("rope.freq_base_swa", LOCAL_BASE, least=1)
        kind = self.field("rope.scaling.type", "none")
        if kind not in ("none", "linear") or self.turned % 2 or self.turned > self.head_dim:
            raise Unfit(f"{self.path}: rotary embeddings of kind {kind}, {self.turned} of {self.head_dim} dimensions, "
                        "are not supported")
        self.stretch = self.number("rope.scaling.factor", 1.0, least=1) if kind == "linear" else 1.0
        self.divisors = 1.0
        if "rope_freqs.weight" in self.tensors:
            self.divisors = self.tensor("rope_freqs.weight", self.turned // 2).astype(np.float64)

    def layer_shapes(self, index):
        """{name: shape} of a layer's weights."""
        width, n_ff = self.width, self.count("feed_forward_length")
        q, k, v = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim, self.n_kv_heads * self.value_dim
        attended = self.n_heads * self.value_dim
        shapes = {"attn_norm.weight": (width,), "attn_q.weight": (q, width), "attn_k.weight": (k, width),
                  "attn_v.weight": (v, width), "attn_output.weight": (width, attended), "ffn_norm.weight": (width,),
                  "ffn_gate.weight": (n_ff, width), "ffn_up.weight": (n_ff, width), "ffn_down.weight": (width, n_ff)}
        if self.gemma:
            shapes.update({"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)})
        if self.arch in ("qwen3", "gemma3"):
            shapes.update({"attn_q_norm.weight": (self.head_dim,), "attn_k_norm.weight": (self.head_dim,)})
        biases = {"attn_q.bias": (q,), "attn_k.bias": (k,), "attn_v.bias": (v,), "attn_output.bias": (width,)}
        return shapes | {name: shape for name, shape in biases.items() if f"blk.{index}.{name}" in self.tensors}

    def check_layers(self):
        for index in range(self.n_layers):
            for name, shape in self.layer_shapes(index).items():
                self.find(f"blk.{index}.{name}", *shape)

    def find(self, name, *shape):
        found = self.tensors.get(name)
        if found is None:
            raise Unfit(f"{self.path}: there is no tensor {name}")
        stored = tuple(int(n) for n in found.shape[::-1])
        if stored != shape:
            raise Unfit(f"{self.path}: {name} has the shape {stored}, not {shape}")
        return found

    def tensor(self, name, *shape):
        """A weight as float32 of that shape."""
        found = self.find(name, *shape)
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
        self.model, self.index = model, index
        self.angles = model.angles(index, n_tokens)
        self.weights = {name: model.tensor(f"blk.{index}.{name}", *shape)
                        for name, shape in model.layer_shapes(index).items()}

    def linear(self, name, x):
        y = x @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return y if bias is None else y + bias

    def norm(self, name, x):
        """Normalised by RMS where the model has gains of that name."""
        gains = self.weights.get(name + ".weight")
        return x if gains is None else norm(x, gains, self.model.eps)

    def project(self, x):
        """x: [n_tokens][width]. Queries [n_tokens][n_heads][head_dim], keys and values [n_tokens][n_kv_heads][...]."""
        model, h = self.model, self.norm("attn_norm", x)
        q = self.linear("attn_q", h).reshape(len(x), model.n_heads, -1)
        k = self.linear("attn_k", h).reshape(len(x), model.n_kv_heads, -1)
        v = self.linear("attn_v", h).reshape(len(x), model.n_kv_heads, -1)
        q, k = self.norm("attn_q_norm", q), self.norm("attn_k_norm", k)
        in_halves = model.arch != "llama"
        return turn(q, self.angles, in_halves), turn(k, self.angles, in_halves), v

    def finish(self, x, attended):
        """What the next layer gets, from what attention gave: [n_tokens][n_heads][value_dim]."""
        x = x + self.norm("post_attention_norm", self.linear("attn_output", attended.reshape(len(x), -1)))
        h = self.norm("ffn_norm", x)
        gate = (gelu if self.model.gemma else silu)(self.linear("ffn_gate", h))
        return x + self.norm("post_ffw_norm", self.linear("ffn_down", gate * self.linear("ffn_up", h)))

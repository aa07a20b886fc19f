"""A text's tokens, by the tokeniser that the GGUF file of a model holds."""
from forward import Unfit

# How texts are cut before pairs are merged, by the file's `tokenizer.ggml.pre`.
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
CUTS = {"qwen2": QWEN2, "deepseek-r1-qwen": QWEN2, "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3,
        "smollm": "digits", "gpt-2": None}
USER_DEFINED = 4  # of tokenizer.ggml.token_type: found in the text before anything else


def field(fields, name):
    value = fields.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise Unfit(f"the file has no tokeniser: no tokenizer.ggml.{name}")
    return value


def bytes_tokenizer(fields, pieces):
    """GPT-2's kind: merged pairs of bytes."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    kind = fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind not in CUTS:
        raise Unfit(f"tokenisers of kind {kind} are not supported, but {', '.join(CUTS)}")
    merges = [tuple(m.split(" ")) for m in field(fields, "merges")]
    tokenizer = Tokenizer(models.BPE(pieces, merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=CUTS[kind] in (None, "digits"))
    first = [] if CUTS[kind] is None else [pre_tokenizers.Digits(individual_digits=True)] if CUTS[kind] == "digits" else [
        pre_tokenizers.Split(Regex(CUTS[kind]), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(first + [level])
    return tokenizer


def scores_tokenizer(fields, pieces):
    """SentencePiece's kind: of all pairs that make a piece the one of the best score is merged first."""
    from tokenizers import Tokenizer, models, normalizers
    scores = field(fields, "scores")
    merges = [(scores[i], piece[:at], piece[at:]) for piece, i in pieces.items()
              for at in range(1, len(piece)) if piece[:at] in pieces and piece[at:] in pieces]
    merges.sort(key=lambda m: -m[0])
    unknown = next((p for p, i in pieces.items() if i == fields.get("tokenizer.ggml.unknown_token_id")), None)
    tokenizer = Tokenizer(models.BPE(pieces, [m[1:] for m in merges], byte_fallback=True, fuse_unk=True,
                                     unk_token=unknown))
    steps = [normalizers.Replace(" ", "\u2581")]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(" "))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def tokenize(fields, text):
    """The text's token numbers, with the first one that the model expects before any text."""
    return tokenize_all(fields, [text])[0]


def tokenize_all(fields, texts):
    """The same of texts that follow each other."""
    try:
        return all_tokens(fields, texts)
    except (Unfit, KeyboardInterrupt):
        raise
    except BaseException as error:  # the package checks little, and its panics are no Exception
        raise Unfit(f"the file's tokeniser is damaged: {' '.join(str(error).split()) or type(error).__name__}") from None


def all_tokens(fields, texts):
    from tokenizers import AddedToken
    kind, names = field(fields, "model"), field(fields, "tokens")
    pieces = {piece: i for i, piece in enumerate(names)}
    if kind not in ("gpt2", "llama"):
        raise Unfit(f"tokenisers of kind {kind} are not supported, but gpt2 and llama")
    tokenizer = (bytes_tokenizer if kind == "gpt2" else scores_tokenizer)(fields, pieces)
    types = fields.get("tokenizer.ggml.token_type", [])
    own = [piece for piece, t in zip(names, types) if t == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in own])
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    first = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and first is not None:
        ids[0].insert(0, first)
    return ids

"""Builds a `tokenizers` tokenizer from the vocabulary that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

# tokenizer.ggml.pre -> the way text is cut before merging.
_FAMILIES = {
    **dict.fromkeys(("gpt-2", "default", "mpt", "olmo", "jais", "phi-2"), "gpt-2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3"), "llama-3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), "qwen2"),
}
_ADD_BOS_UNLESS_TOLD = ("llama-bpe", "llama3", "llama-v3", "falcon3")


@dataclass(frozen=True, kw_only=True)
class GGUFTokenizer:
    """What a GGUF file says about its tokenizer.

    special_tokens: {"bos_token": "<s>", ...}. chat_template: one template, several by name, or None.
    end_ids: the end-of-sequence, end-of-turn and end-of-message ids.
    """

    backend: Tokenizer
    bos_id: int | None
    end_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    chat_template: str | dict[str, str] | None
    add_bos: bool


class _Vocabulary:
    """The tokenizer.ggml.* entries, with their types checked."""

    def __init__(self, path: Path, metadata: Mapping[str, object]) -> None:
        self.path = path
        self.metadata = metadata
        self.tokens = self.strings("tokens")
        kinds = self.get("token_type")
        self.kinds = kinds if isinstance(kinds, list) else [1] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise ValueError(f"{path}: {len(self.tokens)} tokens but {len(self.kinds)} token types")

    def get(self, key: str) -> object:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{self.path}: GGUF key tokenizer.ggml.{key} must be a list of strings")
        return value

    def flag(self, key: str, missing: bool) -> bool:
        value = self.get(key)
        return missing if value is None else bool(value)

    def token_id(self, name: str, missing: int | None = None) -> int | None:
        value = self.get(f"{name}_token_id")
        index = value if isinstance(value, int) else missing
        if index is not None and not 0 <= index < len(self.tokens):
            raise ValueError(f"{self.path}: {name} token id {index} lies outside the {len(self.tokens)} tokens")
        return index

    def ids(self) -> dict[str, int]:
        """Token -> id, without the [PAD7]-like fillers that converters put at ids the tokenizer does not have."""
        pairs = enumerate(zip(self.tokens, self.kinds, strict=True))
        return {token: i for i, (token, kind) in pairs if kind != _UNUSED or token != f"[PAD{i}]"}

    def merges(self) -> list[tuple[str, str]]:
        """Merge rules, written as "left right" or as pairs. A space inside a piece is never at its start."""
        value = self.get("merges")
        if not isinstance(value, list):
            raise ValueError(f"{self.path}: GGUF key tokenizer.ggml.merges is missing or no list")
        return [self._pair(rule) for rule in value]

    def _pair(self, rule: object) -> tuple[str, str]:
        parts: Sequence[object] = rule.split(" ") if isinstance(rule, str) else rule if isinstance(rule, list) else ()
        if len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{self.path}: merge rule {rule!r} is neither 'left right' nor a pair")
        return str(parts[0]), str(parts[1])


def _merges_from_scores(ids: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merge rules that rebuild a sentencepiece vocabulary: every split of a piece into two, best piece first."""
    rules = []
    for piece, score in scores.items():
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in splits if left in ids and right in ids]
        rules += [(score, left, right) for left, right in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    rules.sort(key=lambda rule: (rule[0], len(rule[1]), len(rule[2])), reverse=True)
    return [(left, right) for _, left, right in rules]


def _byte_level(vocabulary: _Vocabulary, pre: str) -> Tokenizer:
    family = _FAMILIES.get(pre)
    if family is None:
        known = ", ".join(_FAMILIES)
        raise ValueError(f"{vocabulary.path}: pre-tokenizer {pre!r} is not supported (supported: {known})")
    ids = vocabulary.ids()
    model = models.BPE(vocab=ids, merges=vocabulary.merges(), fuse_unk=False, ignore_merges=family == "llama-3")
    backend = Tokenizer(model)
    prefix = vocabulary.flag("add_space_prefix", missing=False)
    split = {"llama-3": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}.get(family)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if family == "digits":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if family == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    ids = vocabulary.ids()
    unknown = vocabulary.token_id("unknown", missing=0)
    if vocabulary.get("merges") is not None:
        merges = vocabulary.merges()
    else:
        scores = vocabulary.get("scores")
        if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
            raise ValueError(f"{vocabulary.path}: a sentencepiece vocabulary needs one score for each token")
        merges = _merges_from_scores(ids, {token: scores[index] for token, index in ids.items()})
    assert unknown is not None
    model = models.BPE(
        vocab=ids, merges=merges, unk_token=vocabulary.tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    prefix = vocabulary.flag("add_space_prefix", missing=True)
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _add_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Marks control tokens (hidden by skip_special_tokens) and user-defined ones; both are matched before merging."""
    kinds = list(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    control = (_CONTROL, _UNKNOWN)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind in control]
    plain = [AddedToken(token, special=False, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _frame(backend: Tokenizer, begin: tuple[str, int] | None, end: tuple[str, int] | None) -> None:
    """Makes encode(add_special_tokens=True) put the begin and end tokens round the text."""
    tokens = [token for token in (begin, end) if token is not None]
    if tokens:
        template = [begin[0] if begin else None, "$A", end[0] if end else None]
        single = [part for part in template if part is not None]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)


def _chat_template(metadata: Mapping[str, object]) -> str | dict[str, str] | None:
    default, names = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_templates")
    named = (
        {str(name): metadata.get(f"tokenizer.chat_template.{name}") for name in names or () if name != "default"}
        if isinstance(names, list)
        else {}
    )
    templates = {name: text for name, text in {"default": default, **named}.items() if isinstance(text, str)}
    return templates if len(templates) > 1 else templates.get("default")


def build_tokenizer(path: Path, metadata: Mapping[str, object]) -> GGUFTokenizer:
    """The tokenizer of a GGUF file with this metadata; path is for error messages.

    ValueError for a tokenizer model or pre-tokenizer that is not supported, or entries that contradict each other.
    """
    vocabulary = _Vocabulary(path, metadata)
    kind, pre = vocabulary.get("model"), str(vocabulary.get("pre") or "default")
    if kind == "gpt2":
        backend, missing_bos, missing_eos = _byte_level(vocabulary, pre), None, None
    elif kind == "llama":
        backend, missing_bos, missing_eos = _sentencepiece(vocabulary), 1, 2
    else:
        raise ValueError(f"{path}: tokenizer model {kind!r} is not supported (supported: gpt2, llama)")
    _add_tokens(backend, vocabulary)
    tokens = vocabulary.tokens
    bos, eos = vocabulary.token_id("bos", missing_bos), vocabulary.token_id("eos", missing_eos)
    add_bos = vocabulary.flag("add_bos_token", missing=kind == "llama" or pre in _ADD_BOS_UNLESS_TOLD)
    add_eos = vocabulary.flag("add_eos_token", missing=False)
    begin = (tokens[bos], bos) if add_bos and bos is not None else None
    _frame(backend, begin, (tokens[eos], eos) if add_eos and eos is not None else None)
    named = {"bos": bos, "eos": eos, "unk": vocabulary.token_id("unknown"), "pad": vocabulary.token_id("padding")}
    ends = {eos, vocabulary.token_id("eot"), vocabulary.token_id("eom")}
    return GGUFTokenizer(
        backend=backend,
        bos_id=bos,
        end_ids=frozenset(index for index in ends if index is not None),
        special_tokens={f"{name}_token": tokens[index] for name, index in named.items() if index is not None},
        chat_template=_chat_template(metadata),
        add_bos=begin is not None,
    )

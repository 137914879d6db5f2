"""Vocabularies of the families that GGUF files hold: as Hugging Face tokenizers, and written as GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.gguf_files import add_metadata, finish

_CORPUS = [
    "the quick brown fox jumps over the lazy dog and says hello world 12345 times, it's what they'll do",
    "Hello world! naïve café Привет мир 日本語 텍스트 def f(x): return x**2 3.14159 10,000",
    "1234567890 12345 1234 123 12 10,000 000 00 007 3.14159 141 59",
    "the sky is the end of the world; and the bad ending isn't what we'd hoped for, they're saying",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
_LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
_QWEN2 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """As the families' own tokenizer.json files have it."""
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre in ("llama-bpe", "qwen2"):
        return _split({"llama-bpe": _LLAMA3, "qwen2": _QWEN2}[pre])
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


@cache
def _byte_level_json(pre: str) -> str:
    """A byte-level BPE tokenizer trained on a few sentences, as JSON.

    It learns from GPT-2's words, so that it has merges (of digits) that only the family's own cutting prevents, and
    has a word that no merge leads to, which only a model that ignores merges finds.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer("gpt-2")
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"]["Ġinside"] = len(content["model"]["vocab"])
    content["model"]["ignore_merges"] = pre == "llama-bpe"
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens([AddedToken("<tag>", normalized=False)])
    return tokenizer.to_str()


def _converter_merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The rules that a converter derives from sentencepiece's scores, as written in Hugging Face's tokenizer.json."""
    rules = []
    for piece in vocab:
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
        rules += sorted(cuts, key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
    return sorted(rules, key=lambda cut: (scores[cut[0] + cut[1]], len(cut[0]), len(cut[1])), reverse=True)


@cache
def _sentencepiece_json() -> tuple[str, tuple[float, ...]]:
    """A sentencepiece-style BPE tokenizer as converters make it from piece scores, and the scores by id."""
    pieces = tokenizers.Tokenizer(models.BPE())
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = [piece for piece, _ in sorted(pieces.get_vocab().items(), key=lambda item: item[1])]
    learned.sort(key=len)  # characters last in a real model; their score never matters
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *learned,
        "<|im_start|>",
        "<|im_end|>",
    ]
    scores = {name: -float(index) for index, name in enumerate(names)}
    vocab = {name: index for index, name in enumerate(names)}
    model = models.BPE(
        vocab=vocab, merges=_converter_merges(vocab, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = pieces.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tag>", normalized=False)])
    return tokenizer.to_str(), (*scores.values(), 0.0)


def family_tokenizer(kind: str, *, add_bos: bool) -> tokenizers.Tokenizer:
    """A tokenizer of the family "gpt-2", "smollm", "llama-bpe", "qwen2" or "spm" (sentencepiece)."""
    text = _sentencepiece_json()[0] if kind == "spm" else _byte_level_json(kind)
    tokenizer = tokenizers.Tokenizer.from_str(text)
    if add_bos:
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def write_vocabulary(
    path: Path, kind: str, source: tokenizers.Tokenizer, *, pairs: bool = False, metadata: Mapping[str, Any]
) -> Path:
    """A GGUF file that holds a tokenizer alone, written as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, {**vocabulary_metadata(kind, source, pairs=pairs), **metadata})
    return finish(writer)


def vocabulary_metadata(kind: str, source: tokenizers.Tokenizer, *, pairs: bool = False) -> dict[str, Any]:
    """The keys by which a GGUF file describes a tokenizer; pairs: merges as pairs instead of strings."""
    by_id = {index: token for token, index in source.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(max(by_id) + 1)]
    added = source.get_added_tokens_decoder()
    kinds = [
        (3 if added[index].special else 4) if index in added else 1 if index in by_id else 5
        for index in range(len(tokens))
    ]
    keys: dict[str, Any] = {"model": "llama" if kind == "spm" else "gpt2", "tokens": tokens}
    if kind == "spm":
        keys["scores"] = list(_sentencepiece_json()[1])
        kinds = [6 if token.startswith("<0x") else known for token, known in zip(tokens, kinds, strict=True)]
    else:
        merges: Sequence[Any] = json.loads(source.to_str())["model"]["merges"]
        keys |= {"pre": kind, "merges": merges if pairs else [" ".join(pair) for pair in merges]}
    keys["token_type"] = kinds
    for name, token in (("bos", "<s>"), ("eos", "</s>"), ("unknown", "<unk>")):
        keys[f"{name}_token_id"] = source.token_to_id(token)
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}

"""Tokenizers of every family, trained on a few sentences, each with a special and an added token."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

import jaxpaged.tokenizer
from tests.support.tokenizers import wrapped

SENTENCES = [
    "The quick brown fox doesn't jump over the lazy dog, it's said.",
    "  Two spaces,\n\ta tab  and an end. ",
    "Přílišžluťoučký kůň úpěl ďábelské ódy!",
    "한국어 문장, 日本語の文。 😀👍🏽 é",
    "f(x) = [1, 2, 3] ... and so on: I'm, you've, don't ?",
]
SPECIAL, ADDED = "<|end|>", "<tool>"


def _with_added(backend: tokenizers.Tokenizer) -> jaxpaged.tokenizer.Tokenizer:
    backend.add_special_tokens([AddedToken(SPECIAL, normalized=False)])
    backend.add_tokens([AddedToken(ADDED, normalized=False, special=False)])
    return wrapped(backend, bos_id=None, eos_id=None)


def byte_level() -> jaxpaged.tokenizer.Tokenizer:
    """Byte-level BPE, as GPT-2's: any text is bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return _with_added(backend)


def byte_fallback() -> jaxpaged.tokenizer.Tokenizer:
    """Sentencepiece unigrams with byte pieces, as Llama's or Gemma's: what has no piece is spelled in bytes."""
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    latin = [sentence for sentence in SENTENCES if sentence.isascii()]
    trained.train_from_iterator(
        latin, trainers.UnigramTrainer(vocab_size=80, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    )
    pieces = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_added(backend)


def metaspace() -> jaxpaged.tokenizer.Tokenizer:
    """Sentencepiece unigrams without byte pieces, as T5's."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        SENTENCES,
        trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False),
    )
    return _with_added(backend)


def word_piece(*, cleanup: bool) -> jaxpaged.tokenizer.Tokenizer:
    """Pieces of words, as BERT's: a space before every token that does not begin with "##"."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=cleanup)
    backend.train_from_iterator(
        SENTENCES, trainers.WordPieceTrainer(vocab_size=250, special_tokens=["[UNK]"], show_progress=False)
    )
    return _with_added(backend)


def word_ends() -> jaxpaged.tokenizer.Tokenizer:
    """BPE whose pieces say where a word ends, as GPT's first one."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder()
    backend.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False),
    )
    return _with_added(backend)


def words() -> jaxpaged.tokenizer.Tokenizer:
    """Whole words and no decoder: all tokens are joined with spaces."""
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return _with_added(backend)

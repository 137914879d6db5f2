"""Two small tokenizers whose every id is known: byte-level BPE (TOK-BYTE) and sentencepiece style (TOK-SP)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import jaxpaged.tokenizer

# TOK-BYTE: ids 0..255 are the bytes, 256..299 the merges (or unused names), then these added tokens.
BYTE_END = 300  # "<|end|>", special
BYTE_BOS = 301  # "<s>", special
BYTE_EOS = 302  # "</s>", special
BYTE_TAG = 303  # "<t>", added but not special: shown even when special tokens are skipped
BYTE_SIZE = 320  # 304..319 are reserved special tokens "<r0>".."<r15>"

# TOK-SP: unknown, begin, end, the 256 byte pieces, then words; then the added tokens.
SP_UNK, SP_BOS, SP_EOS = 0, 1, 2
SP_FIRST_BYTE = 3  # "<0x00>"
SP_SIZE = 320

# Pairs merged by TOK-BYTE in order, written as text; "\x9c" is the byte, the last one of "한".
_MERGES = [
    ("t", "h"), ("th", "e"), (" ", "the"), ("i", "n"), ("in", "g"), ("e", "n"), ("en", "d"), ("end", "!"),
    ("end!", "ing"), ("?", "\n"), ("s", "k"), ("sk", "y"), ("a", "d"), (" ", "b"), (" b", "ad"), ("h", "e"),
    ("l", "l"), ("he", "ll"), ("hell", "o"), (".", " "), ("I", "t"), (" ", "It"), ("i", "s"), (" ", "is"),
    (" ", " "), ("a", " "), ("\x9c", " "), ("w", "o"), ("wo", "r"), ("l", "d"), ("wor", "ld"), (" ", "w"),
]  # fmt: skip

_PIECES = [
    "▁", "▁▁", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s", "t", "u",
    "v", "w", "x", "y", "z", "H", "I", ".", "!", "?", "ll", "el", "He", "Hell", "▁Hello", "▁Hell", "Hello", "▁I",
    "▁It", "▁i", "▁is", "▁l", "▁b", "a▁", "\n", "<t>", "<|end|>", "▁x", "▁y", "▁z", "한", "é", "ad", "▁bad", "e▁b",
    "▁▁▁", "x▁", ".▁",
]  # fmt: skip


def byte_tokenizer(*, adds_bos: bool) -> Tokenizer:
    """TOK-BYTE. Byte b has id b; any text is encodable; text is not split into words before merging."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    merges = []
    for pair in _MERGES:
        left, right = map(_as_characters, pair)
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    for unused in range(len(vocab), BYTE_END):
        vocab[f"unused{unused}"] = unused
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<|end|>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<t>", normalized=False, special=False)])
    tokenizer.add_special_tokens([AddedToken(f"<r{i}>", normalized=False) for i in range(BYTE_SIZE - BYTE_TAG - 1)])
    if adds_bos:
        tokenizer.post_processor = _bos_template(BYTE_BOS)
    return tokenizer


def sentencepiece_tokenizer(*, adds_bos: bool) -> Tokenizer:
    """TOK-SP. "▁" marks a space; one is put before the text and one stripped when decoding; has byte pieces."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    vocab = {name: index for index, name in enumerate(names)}
    merges = [(piece[:cut], piece[cut:]) for piece in _PIECES for cut in range(1, len(piece))]
    merges = [pair for pair in merges if pair[0] in vocab and pair[1] in vocab and "<" not in pair[0] + pair[1]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>", "<|end|>")])
    tokenizer.add_tokens([AddedToken("<t>", normalized=False, special=False)])
    if adds_bos:
        tokenizer.post_processor = _bos_template(SP_BOS)
    assert tokenizer.get_vocab_size() == SP_SIZE
    return tokenizer


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of the one token spelled `text` (spaces and bytes written plainly, "한" as its UTF-8 bytes)."""
    spellings = [text, text.replace(" ", "▁"), "".join(_byte_characters()[byte] for byte in text.encode())]
    for spelling in spellings:
        found = tokenizer.token_to_id(spelling)
        if found is not None:
            return found
    raise ValueError(f"no token spells {text!r}")


def spelled(tokenizer: Tokenizer, pieces: Iterable[str | int]) -> list[int]:
    """Ids of tokens given by their text or as ids."""
    return [piece if isinstance(piece, int) else token_id(tokenizer, piece) for piece in pieces]


def multibyte_script(tokenizer: Tokenizer) -> list[int]:
    """Ids that spell "a ď 한 😀 b", wide characters as single bytes; no id occurs twice, as CHAIN needs it."""
    if tokenizer.token_to_id("<0x00>") is None:
        last_of_han = token_id_of_bytes(tokenizer, b"\x9c ")
        bytes_before, bytes_after = list("ď".encode()), [*"😀".encode()]
        han = list("한".encode())[:2]
        return [
            *spelled(tokenizer, ["a "]), *bytes_before, ord(" "), *han, last_of_han, *bytes_after,
            *spelled(tokenizer, [" b"]),
        ]  # fmt: skip
    before, han, after = ([SP_FIRST_BYTE + byte for byte in character.encode()] for character in "ď한😀")
    space_byte = SP_FIRST_BYTE + ord(" ")
    return [
        *spelled(tokenizer, ["a▁"]), *before, *spelled(tokenizer, ["▁"]), *han, space_byte, *after,
        *spelled(tokenizer, ["▁b"]),
    ]  # fmt: skip


def token_id_of_bytes(tokenizer: Tokenizer, raw: bytes) -> int:
    """The id of the TOK-BYTE token that stands for exactly these bytes."""
    found = tokenizer.token_to_id("".join(_byte_characters()[byte] for byte in raw))
    if found is None:
        raise ValueError(f"no token stands for {raw!r}")
    return found


def save_tokenizer(
    path: Path,
    tokenizer: Tokenizer,
    *,
    bos_token: str | None = "<s>",
    eos_token: str | None = "</s>",
    chat_template: str | None = None,
) -> Path:
    """Write tokenizer.json and tokenizer_config.json as a Hugging Face model directory has them; returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "chat_template": chat_template,
    }
    kept = {key: value for key, value in config.items() if value is not None}
    (path / "tokenizer_config.json").write_text(json.dumps(kept, indent=1))
    return path


def _as_characters(text: str) -> str:
    """Bytes written as Latin-1 text, in the byte-level alphabet."""
    return "".join(_byte_characters()[byte] for byte in text.encode("latin-1"))


def _byte_characters() -> list[str]:
    """The byte-level alphabet: printable Latin-1 stands for itself, other bytes are shifted to U+0100 and on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def _bos_template(bos: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)])


def wrapped(backend: Tokenizer, *, bos_id: int | None, eos_id: int | None) -> jaxpaged.tokenizer.Tokenizer:
    """The project's tokenizer around a backend, without a directory and without a chat template."""
    return jaxpaged.tokenizer.Tokenizer(
        backend=backend,
        bos_id=bos_id,
        eos_ids=frozenset() if eos_id is None else frozenset([eos_id]),
        special_tokens={},
        chat_template=None,
        chat_tokenizer=None,
    )

"""What callers may give as prompts, and its token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from jaxpaged.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
ChatMessage = Mapping[str, Any]

WANTED = 'wanted text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """A prompt's ids, and its text where it was given as text."""

    text: str | None
    ids: list[int]


def prompts_of(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    if isinstance(given, str | Mapping):
        return [given]
    if not _is_list(given):
        raise ValueError(f"prompts: {WANTED}, or a list of these, got {type(given).__name__}")
    if given and all(_is_id(item) for item in given):
        return [given]  # type: ignore[list-item]
    return list(given)  # type: ignore[arg-type]


def is_conversation(given: Prompt | Sequence[ChatMessage]) -> bool:
    """Whether this is a list of messages and not a prompt."""
    return _is_list(given) and len(given) > 0 and isinstance(next(iter(given)), Mapping)


def conversations_of(given: Sequence[Any]) -> list[Sequence[ChatMessage]]:
    """One conversation or several, as a list of lists of messages."""
    if not _is_list(given) or not given:
        raise ValueError(f"messages: wanted a list of messages or a list of such lists, got {given!r}")
    conversations = [given] if isinstance(given[0], Mapping) else list(given)
    for conversation in conversations:
        if not _is_list(conversation) or not conversation:
            raise ValueError(f"messages: wanted a non-empty list of messages, got {conversation!r}")
        for message in conversation:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f'messages: wanted {{"role": …, "content": …}}, got {message!r}')
    return conversations


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None) -> Tokenized:
    """A prompt's ids. Text gets the tokenizer's own special tokens (such as a beginning-of-sequence token).

    Text that already begins with that token, as from a chat template, does not get it twice.
    Raises: ValueError for anything else than a prompt, and for text without a tokenizer.
    """
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() & {"prompt", "prompt_token_ids"}:
            raise ValueError(f"prompt: {WANTED}, got the keys {list(prompt)}")
        ((key, prompt),) = prompt.items()
        if isinstance(prompt, str) != (key == "prompt"):
            raise ValueError(f"prompt: {WANTED}, got {type(prompt).__name__} under {key!r}")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, and this engine has none; give token ids")
        return Tokenized(text=prompt, ids=_encode(prompt, tokenizer))
    if not _is_list(prompt) or not all(_is_id(item) for item in prompt):
        raise ValueError(f"prompt: {WANTED}, got {prompt!r}")
    return Tokenized(text=None, ids=[int(item) for item in prompt])


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=True)
    bos = tokenizer.bos_id
    if bos is not None and ids[:2] == [bos, bos] and tokenizer.encode(text, add_special_tokens=False)[:1] == [bos]:
        return ids[1:]
    return ids


def _is_list(item: object) -> bool:
    return isinstance(item, Sequence) and not isinstance(item, str | bytes | bytearray)


def _is_id(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)

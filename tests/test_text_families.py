"""Every family of tokenizers: the deltas join to the tokenizer's own one-shot text, whatever the tokens and stops."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from jaxpaged.tokenizer import Tokenizer
from tests.support import text_tokenizers as families
from tests.support.text import both_modes, cut, run, stop_of

TOKENIZERS = {
    "byte-level": families.byte_level(),
    "byte-fallback": families.byte_fallback(),
    "metaspace": families.metaspace(),
    "word-piece": families.word_piece(cleanup=False),
    "word-piece-cleanup": families.word_piece(cleanup=True),
    "word-ends": families.word_ends(),
    "words": families.words(),
}
ENCODED = {
    name: [tokenizer.encode(sentence, add_special_tokens=False) for sentence in families.SENTENCES]
    for name, tokenizer in TOKENIZERS.items()
}
EACH = pytest.mark.parametrize("name", TOKENIZERS)
JOINING = pytest.mark.parametrize("name", ["word-piece", "word-piece-cleanup", "words"])


def one_shot(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool, spaces: bool) -> str:
    """The tokenizer's text; without spaces it is taken apart between two added tokens that follow each other."""
    hidden = tokenizer.special_ids if skip else frozenset[int]()
    shown = [one for one in ids if one not in hidden and tokenizer.backend.id_to_token(one) is not None]
    groups: list[list[int]] = [[]]
    for index, one in enumerate(shown):
        if not (spaces or skip) and {one, shown[index - 1]} <= tokenizer.added_tokens.keys() and index:
            groups.append([])
        groups[-1].append(one)
    return "".join(tokenizer.decode(group, skip_special_tokens=False) for group in groups)


def random_ids(rng: random.Random, name: str) -> list[int]:
    """Pieces of real text, any ids, added tokens and unknown ids."""
    tokenizer, ids = TOKENIZERS[name], []
    for _ in range(rng.randrange(7)):
        kind = rng.randrange(4)
        if kind == 0:
            ids.append(rng.choice(sorted(tokenizer.added_tokens)))
        elif kind == 1:
            ids.append(rng.randrange(tokenizer.vocab_size + 4))
        else:
            encoded = rng.choice(ENCODED[name])
            start = rng.randrange(len(encoded))
            ids += encoded[start : start + rng.randrange(1, 9)]
    return ids


def random_stops(rng: random.Random, tokenizer: Tokenizer, text: str) -> list[str]:
    """Parts of the text, over token borders, and some that end otherwise than the text goes on."""
    stops: list[str] = []
    for _ in range(rng.randrange(4) if text else 0):
        start = rng.randrange(len(text))
        stop = text[start : start + rng.randrange(1, 7)]
        stops.append(stop if rng.randrange(2) else stop[:-1] + "~")
    return [stop for stop in stops if tokenizer.backend.token_to_id(stop) not in tokenizer.special_ids]


@EACH
def test_deltas_join_to_the_one_shot_text(name: str) -> None:
    """Streams lost, doubled or moved spaces, showed half characters, or cut elsewhere than the whole text."""
    rng, tokenizer = random.Random(name), TOKENIZERS[name]
    for _ in range(200):
        ids, skip, spaces, keep = random_ids(rng, name), *(rng.random() < 0.5 for _ in range(3))
        text = one_shot(tokenizer, ids, skip=skip, spaces=spaces)
        stops = random_stops(rng, tokenizer, text)
        options = {
            "stop": stops,
            "skip_special_tokens": skip,
            "spaces_between_special_tokens": spaces,
            "include_stop_str_in_output": keep,
        }
        results = [run(tokenizer, ids, chunk=chunk, **options) for chunk in (1, rng.randrange(2, 6), None)]
        assert len({(result.text, stop_of(result), result.num_tokens) for result in results}) == 1, (ids, options)
        if "\ufffd" in text and name == "byte-fallback":
            continue  # invalid bytes: the tokenizer takes back what was shown
        assert (results[0].text, stop_of(results[0])) == cut(text, stops, keep), (ids, options)


@EACH
@pytest.mark.parametrize("sentence", families.SENTENCES)
def test_real_text(name: str, sentence: str) -> None:
    """Token by token, with nothing shown that is not whole: what reading the text back at once gives."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(sentence, add_special_tokens=False)
    result = both_modes(tokenizer, ids)
    assert result.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in result.text
    assert name not in ("byte-level", "byte-fallback") or result.text == sentence


@JOINING
def test_spaces_between_added_tokens(name: str) -> None:
    """The parameter was read by nobody."""
    tokenizer = TOKENIZERS[name]
    by_text = {text: one for one, text in tokenizer.added_tokens.items()}
    end, tool = by_text[families.SPECIAL], by_text[families.ADDED]
    (fox,) = tokenizer.encode("a", add_special_tokens=False)
    ids = [fox, tool, end, end, fox, tool]
    plain = tokenizer.decode([fox], skip_special_tokens=False)
    spaced = both_modes(tokenizer, ids, skip_special_tokens=False)
    assert spaced.text == f"{plain} <tool> <|end|> <|end|> {plain} <tool>"
    glued = both_modes(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert glued.text == f"{plain} <tool><|end|><|end|> {plain} <tool>"
    stopped = both_modes(
        tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False, stop=["><|end|><"]
    )
    assert (stopped.text, stopped.num_tokens) == (f"{plain} <tool", 4)
    skipped = both_modes(tokenizer, [fox, tool, end, tool], spaces_between_special_tokens=False)
    assert skipped.text == f"{plain} <tool> <tool>"

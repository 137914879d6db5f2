"""Structured outputs on the host: every text that the masks allow has its form, and only where it ends it may end."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from jaxpaged.structured_outputs import StructuredOutputs
from jaxpaged.structured_params import StructuredOutputsParams
from jaxpaged.structured_vocabulary import StructuredVocabulary
from jaxpaged.tokenizer import Tokenizer
from tests.support.structures import PERSON, STRUCTURES, allowed, constraint_of, wander
from tests.support.text import BYTE, SP, run
from tests.support.tokenizers import BYTE_END, BYTE_EOS, SP_EOS, spelled, wrapped
from tests.support.vocabularies import family_tokenizer

GPT2 = wrapped(family_tokenizer("gpt-2", add_bos=True), bos_id=1, eos_id=2)
VOCABULARIES = {"byte": (BYTE, BYTE_EOS), "sentencepiece": (SP, SP_EOS), "trained": (GPT2, 2)}
ENDS = frozenset({BYTE_EOS, BYTE_END})


@pytest.mark.parametrize("vocab_size", [1024, 1001])  # whole words of the mask, and not; more than the tokenizer has
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("kind", STRUCTURES)
def test_every_text_that_is_allowed_has_its_form(kind: str, vocabulary: str, vocab_size: int) -> None:
    tokenizer, eos = VOCABULARIES[vocabulary]
    structure, check = STRUCTURES[kind]
    structures, rng = StructuredOutputs(tokenizer, vocab_size), random.Random(0)
    for _ in range(8):
        constraint = structures.constraint(StructuredOutputsParams(**structure), frozenset({eos}))
        ids = wander(constraint, vocab_size, frozenset({eos}), rng)
        assert eos in allowed(constraint, vocab_size)
        constraint.accept(eos)
        assert constraint.finished and constraint.failure is None
        assert check(run(tokenizer, ids, chunk=None).text), ids
    assert structures.num_compiled == 1


def test_an_end_is_allowed_where_the_structure_may_end_and_nowhere_else() -> None:
    """A choice that begins another one can end, or go on; after the longer one only the ends are left."""
    constraint = constraint_of(BYTE, 320, ENDS, choice=["hell", "hello"])
    assert not ENDS.intersection(allowed(constraint, 320))
    (hell,) = spelled(BYTE.backend, ["hell"])
    longer = constraint.fork()
    constraint.accept(hell)
    assert {ord("o"), *ENDS} == set(allowed(constraint, 320)) and not constraint.finished
    longer.accept(hell)
    longer.accept(ord("o"))
    assert set(allowed(longer, 320)) == ENDS and longer.finished
    assert not constraint.finished, "the fork's steps moved the other one"


def test_without_ids_that_end_a_complete_structure_allows_nothing() -> None:
    constraint = constraint_of(BYTE, 320, regex="ab")
    for token in (ord("a"), ord("b")):
        assert allowed(constraint, 320) == [token] and not constraint.finished
        constraint.accept(token)
    assert constraint.finished and constraint.failure is None and allowed(constraint, 320) == []


def test_special_tokens_are_no_text() -> None:
    """ "</s>" as text is spelled in characters: the token would end the output, and is hidden."""
    constraint = constraint_of(BYTE, 320, regex="</s>|.*")
    assert not BYTE.special_ids.intersection(allowed(constraint, 320))
    assert constraint_of(BYTE, 320, choice=["</s>"]).forced() == [ord(character) for character in "</s>"]


def test_a_stripped_space_may_come_first() -> None:
    """Sentencepiece models begin words with a space, which decoding takes off the beginning: both spellings serve."""
    both = allowed(constraint_of(SP, 320, choice=["Hello"]), 320)
    assert {*spelled(SP.backend, ["Hello", "▁Hello"])} <= {*both}
    assert allowed(constraint_of(SP, 320, choice=[" Hello"]), 320) == spelled(SP.backend, ["▁▁"])


def test_forced_tokens_are_the_tokenizers_spelling() -> None:
    """What must come is spelled by merges, where single bytes would fit as well, and the mask asks for just that."""
    constraint = constraint_of(BYTE, 320, ENDS, json=PERSON, disable_any_whitespace=True)
    prefix = BYTE.encode('{"name":"', add_special_tokens=False)
    assert constraint.forced() == prefix
    for token in prefix:
        assert allowed(constraint, 320) == [token]
        constraint.accept(token)
    assert constraint.forced() == [] and len(allowed(constraint, 320)) > 100


def test_a_token_that_does_not_fit_is_a_failure_and_stays_one() -> None:
    constraint = constraint_of(BYTE, 320, ENDS, regex="ab")
    constraint.accept(ord("x"))
    assert constraint.failure is not None and not constraint.finished
    assert allowed(constraint, 320) == [] and constraint.forced() == []
    constraint.accept(ord("a"))
    assert allowed(constraint.fork(), 320) == []


@pytest.mark.parametrize(
    ("structure", "said"),
    [
        ({"json": {"type": "objekt"}}, "json cannot be compiled: .*objekt"),
        ({"json": {"type": "array", "uniqueItems": True}}, "json cannot be compiled: .*uniqueItems"),
        ({"json": {"$ref": "#/definitions/x"}}, "json cannot be compiled: .*definitions/x"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "json cannot be compiled: Unsatisfiable"),
        ({"json_object": True, "whitespace_pattern": "("}, "json_object cannot be compiled: regex parse error"),
        ({"regex": "(a"}, "regex cannot be compiled: .*unclosed group"),
        ({"regex": "(?=a)b"}, "regex cannot be compiled: .*look-ahead"),
        ({"grammar": "start: foo"}, 'grammar cannot be compiled: .*unknown name: "foo"'),
        ({"grammar": "hello"}, "grammar cannot be compiled: the EBNF grammar could not be read"),
        ({"grammar": 'root ::= "a'}, "grammar cannot be compiled: the EBNF grammar could not be read"),
    ],
)
def test_what_cannot_be_compiled_is_refused(structure: dict[str, Any], said: str) -> None:
    structures = StructuredOutputs(BYTE, 320)
    with pytest.raises(ValueError, match=f"(?s)structured_outputs: {said}"):
        structures.constraint(StructuredOutputsParams(**structure), ENDS)
    assert structures.num_compiled == 0


def test_complaints_are_short() -> None:
    with pytest.raises(ValueError, match="unclosed group") as refused:
        constraint_of(BYTE, 320, regex="(" + "a" * 100_000)
    assert len(str(refused.value)) < 2000


def test_grammars_are_kept_by_content_and_only_so_many() -> None:
    structures = StructuredOutputs(BYTE, 320)
    for schema in (PERSON, dict(PERSON)):
        structures.constraint(StructuredOutputsParams(json=schema), ENDS)
    assert structures.num_compiled == 1
    for count in range(100):
        structures.constraint(StructuredOutputsParams(regex=f"a{{{count}}}"), ENDS)
    assert structures.num_compiled == 64


def test_tokenizers_without_bytes_are_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(
        backend=backend,
        bos_id=None,
        eos_ids=frozenset(),
        special_tokens={},
        chat_template=None,
        chat_tokenizer=None,
    )
    with pytest.raises(ValueError, match="need a byte-level or a sentencepiece tokenizer"):
        constraint_of(tokenizer, 3, regex="a")
    with pytest.raises(ValueError, match="structured_outputs need a tokenizer"):
        StructuredOutputs(None, 3).constraint(StructuredOutputsParams(regex="a"), ENDS)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_text_is_encoded_to_tokens_of_exactly_its_bytes(vocabulary: str) -> None:
    """Sentencepiece tokenizers put a space before a text, and after an added token inside it: a forced text had more
    spaces than the structure."""
    tokenizer, _ = VOCABULARIES[vocabulary]
    view = StructuredVocabulary(tokenizer, 1024).tokenizer
    for text in ("Hello world", " is it", "a</s>b", "a <t> b", "é한😀\n", '{"a": 1}', ""):
        assert view.decode_bytes(view.tokenize_str(text)) == text.encode()

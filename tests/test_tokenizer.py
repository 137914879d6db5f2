"""Tokenizers from directories and GGUF files give the ids, texts and chat prompts that transformers gives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer

from jaxpaged.tokenizer import Tokenizer
from tests.support.gguf_files import add_metadata, finish
from tests.support.tokenizers import BYTE_BOS, BYTE_TAG, byte_tokenizer, save_tokenizer, sentencepiece_tokenizer
from tests.support.vocabularies import SPECIAL, family_tokenizer, write_vocabulary

STRINGS = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces and   three inside ",
    "line one\nline two\r\n\r\n\tindented\n\n\n",
    "It's we'll they'RE I'm don't",
    "1234567890 and 3.14159, 10,000 and 007",
    "naïve café, Zürich — “quotes”… ½",
    "Cafe\u0301 decomposed and caf\u00e9 composed",
    "日本語のテキスト と 한국어 텍스트",
    "Привет, мир! Γειά σου Κόσμε",
    "😀👍🏽 family: 👨‍👩‍👧‍👦",
    "def f(x):\n    return x**2  # comment\n",
    "https://example.org/path?query=1&b=%20#frag",
    "<|im_start|>user\nhi<|im_end|>",
    "text<s>inside</s> more <tag> and <tag>again",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "\x00\x01\x7f control",
    "MixedCASE snake_case kebab-case camelCase",
    "مرحبا بالعالم שלום",
    "the the the sky and the bad end",
    "e\u200bzero width \u00a0nbsp",
]  # fmt: skip
_WITH_BOS = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
_WITHOUT_BOS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi <there> "}]


def _same_text_and_ids(got: Tokenizer, wanted: Any) -> None:
    for text in STRINGS:
        for special in (True, False):
            ids = wanted(text, add_special_tokens=special)["input_ids"]
            assert got.encode(text, special) == ids, text
            for skip in (True, False):
                assert got.decode(ids, skip) == wanted.decode(ids, skip_special_tokens=skip), text


def _chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    defaults: dict[str, Any] = {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template": None,
        "tools": None,
    }
    return tokenizer.apply_chat_template(messages, **defaults | options)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "qwen2", "spm"])
def test_gguf_vocabulary_equals_itsfamily_tokenizer(tmp_path: Path, kind: str, add_bos: bool):
    """The add-BOS flag, the added tokens and the pre-tokenizer's name in the metadata must all count."""
    source = family_tokenizer(kind, add_bos=add_bos)
    wanted = AutoTokenizer.from_pretrained(str(save_tokenizer(tmp_path / "hf", source)))
    metadata = {"tokenizer.ggml.add_bos_token": add_bos}
    got = Tokenizer.from_gguf(write_vocabulary(tmp_path / "t.gguf", kind, source, metadata=metadata))
    _same_text_and_ids(got, wanted)
    assert got.adds_bos == add_bos
    assert got.bos_id == wanted.bos_token_id
    assert got.eos_ids == {wanted.eos_token_id}
    assert got.vocab_size == len(wanted)
    assert got.special_ids == {source.token_to_id(token) for token in SPECIAL}


def test_merges_as_pairs(tmp_path: Path):
    """Newer files write a merge rule as a pair, so that a piece may hold a space."""
    source = family_tokenizer("gpt-2", add_bos=False)
    path = write_vocabulary(tmp_path / "t.gguf", "gpt-2", source, pairs=True, metadata={})
    got = Tokenizer.from_gguf(path)
    for text in STRINGS:
        assert got.encode(text, True) == source.encode(text).ids


@pytest.mark.parametrize(("kind", "adds"), [("spm", True), ("llama-bpe", True), ("gpt-2", False), ("qwen2", False)])
def test_add_bos_where_the_file_does_not_say(tmp_path: Path, kind: str, adds: bool):
    path = write_vocabulary(tmp_path / "t.gguf", kind, family_tokenizer(kind, add_bos=False), metadata={})
    assert Tokenizer.from_gguf(path).adds_bos == adds


def test_add_eos_and_end_of_turn(tmp_path: Path):
    source = family_tokenizer("gpt-2", add_bos=False)
    end_of_turn = source.token_to_id("<|im_end|>")
    metadata = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eot_token_id": end_of_turn}
    got = Tokenizer.from_gguf(write_vocabulary(tmp_path / "t.gguf", "gpt-2", source, metadata=metadata))
    assert got.encode("the", True) == [*source.encode("the").ids, source.token_to_id("</s>")]
    assert got.eos_ids == {source.token_to_id("</s>"), end_of_turn}


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [_WITH_BOS, _WITHOUT_BOS])
def test_chat_prompt_has_the_templates_tokens_only(tmp_path: Path, template: str, add_bos: bool):
    """The template writes BOS and the tokenizer adds another: quality drops silently. Encoding the rendered prompt
    without added tokens gives one where the template writes it and none where it does not."""
    source = family_tokenizer("gpt-2", add_bos=add_bos)
    directory = save_tokenizer(tmp_path / "hf", source, chat_template=template)
    metadata = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.chat_template": template}
    path = write_vocabulary(tmp_path / "t.gguf", "gpt-2", source, metadata=metadata)
    wanted = AutoTokenizer.from_pretrained(str(directory))
    for prompt in (True, False):
        ids = wanted.apply_chat_template(_CHAT, add_generation_prompt=prompt)["input_ids"]
        text = wanted.apply_chat_template(_CHAT, add_generation_prompt=prompt, tokenize=False)
        for got in (Tokenizer.from_gguf(path), Tokenizer.from_directory(directory)):
            rendered = _chat(got, _CHAT, add_generation_prompt=prompt)
            assert rendered == text
            assert got.encode(rendered, False) == ids
            assert ids.count(got.bos_id) == (template == _WITH_BOS)


def test_chat_options_reach_the_template(tmp_path: Path):
    """Tools, named templates, a template of the caller's, further variables, an open last message."""
    source = family_tokenizer("gpt-2", add_bos=False)
    metadata = {
        "tokenizer.chat_template": _WITHOUT_BOS,
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools | tojson(indent=2) }}{{ mood }}{{ unk_token }}",
    }
    got = Tokenizer.from_gguf(write_vocabulary(tmp_path / "t.gguf", "gpt-2", source, metadata=metadata))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert _chat(got, _CHAT, tools=tools, mood="!") == json.dumps(tools, indent=2) + "!<unk>"
    assert _chat(got, _CHAT, chat_template="tool_use", mood="") == "null<unk>"
    assert _chat(got, _CHAT, chat_template="{{ bos_token }}{{ messages | length }}") == "<s>2"
    last = [*_CHAT, {"role": "assistant", "content": "Well,"}]
    text = _chat(got, last, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\nWell,")


def test_chat_refusals_are_value_errors(tmp_path: Path):
    """A template that refuses the messages must not look like a failure of the engine."""
    source = family_tokenizer("gpt-2", add_bos=False)
    got = Tokenizer.from_gguf(write_vocabulary(tmp_path / "t.gguf", "gpt-2", source, metadata={}))
    with pytest.raises(ValueError, match="chat_template"):
        _chat(got, _CHAT)
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="refused the messages: roles must alternate"):
        _chat(got, _CHAT, chat_template=refusing)
    with pytest.raises(ValueError, match="refused the messages"):
        _chat(got, [{"role": "user", "content": ["a list"]}], chat_template=_WITHOUT_BOS)
    with pytest.raises(ValueError, match="refused the messages"):
        _chat(got, _CHAT, chat_template="{% for %}")
    with pytest.raises(ValueError, match="empty conversation"):
        _chat(got, [], chat_template=_WITHOUT_BOS)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("build", [byte_tokenizer, sentencepiece_tokenizer])
def test_directory_equals_transformers(tmp_path: Path, build: Any, adds_bos: bool):
    directory = save_tokenizer(tmp_path, build(adds_bos=adds_bos))
    wanted = AutoTokenizer.from_pretrained(str(directory))
    got = Tokenizer.from_directory(directory)
    _same_text_and_ids(got, wanted)
    assert (got.adds_bos, got.bos_id, got.eos_ids) == (adds_bos, wanted.bos_token_id, {wanted.eos_token_id})
    assert got.special_ids == set(wanted.all_special_ids) | {
        index for index, token in wanted.added_tokens_decoder.items() if token.special
    }


def test_truncation_in_the_files_is_ignored(tmp_path: Path):
    """tokenizer.json may carry the training run's truncation and padding; prompts were cut to it without a word."""
    source = byte_tokenizer(adds_bos=False)
    source.enable_truncation(4)
    source.enable_padding(length=9)
    got = Tokenizer.from_directory(save_tokenizer(tmp_path, source))
    assert got.encode("a longer text", False) == byte_tokenizer(adds_bos=False).encode("a longer text").ids


def test_ids_without_an_entry_have_no_text(tmp_path: Path):
    """The output layer is often wider than the tokenizer; sampling such an id once killed the request."""
    got = Tokenizer.from_directory(save_tokenizer(tmp_path, byte_tokenizer(adds_bos=False)))
    ids = got.encode("the sky", False)
    assert got.token_text(got.vocab_size + 10) == ""
    assert got.decode([ids[0], got.vocab_size + 10, *ids[1:]], True) == "the sky"
    assert got.token_text(BYTE_BOS) == "<s>"
    assert got.decode([BYTE_BOS, BYTE_TAG], True) == "<t>"


def test_directory_without_special_tokens(tmp_path: Path):
    directory = save_tokenizer(tmp_path, byte_tokenizer(adds_bos=False), bos_token=None, eos_token=None)
    got = Tokenizer.from_directory(directory)
    assert (got.bos_id, got.eos_ids, got.adds_bos) == (None, frozenset(), False)


def test_directory_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"tokenizer.json"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(ValueError, match="is not a directory"):
        Tokenizer.from_directory(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merge rule 'a b c' is neither"),
        ({"tokenizer.ggml.bos_token_id": 99}, "bos token id 99 lies outside the 3 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "3 tokens but 1 token types"),
    ],
)
def test_unusable_vocabularies_are_refused_with_the_reason(tmp_path: Path, change: dict[str, Any], message: str):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
        **change,
    }
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    add_metadata(writer, {key: value for key, value in metadata.items() if value is not None})
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(finish(writer))


def test_plain_use_of_a_gguf_tokenizer_does_not_import_transformers(tmp_path: Path):
    """Importing it takes about a second, which the first token would wait for."""
    path = write_vocabulary(tmp_path / "t.gguf", "gpt-2", family_tokenizer("gpt-2", add_bos=False), metadata={})
    script = (
        "import sys\nfrom jaxpaged.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer.from_gguf({str(path)!r})\n"
        "assert tokenizer.decode(tokenizer.encode('the sky', True), True) == 'the sky'\n"
        "sys.exit('transformers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

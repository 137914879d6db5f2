"""Prompt ids of chats and of text: the reference's, with one begin-of-sequence token."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

import jaxpaged
from tests.support.bigram import chain_checkpoint
from tests.support.driving import greedy
from tests.support.engines import small_llm
from tests.support.tokenizers import BYTE_BOS, BYTE_EOS, byte_tokenizer

_BODY = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WRITES_BOS = "{{ bos_token }}" + _BODY
WRITES_NONE = _BODY

CONVERSATION = [
    {"role": "system", "content": "the sky"},
    {"role": "user", "content": "hello world"},
    {"role": "assistant", "content": "It is 한."},
    {"role": "user", "content": "end!ing?\n"},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return chain_checkpoint(
        tmp_path_factory.mktemp("chat") / "model",
        [*range(200, 210)],
        320,
        tokenizer=byte_tokenizer(adds_bos=True),
        eos=BYTE_EOS,
        tokenizer_options={"chat_template": WRITES_BOS},
    )


@pytest.fixture(scope="module")
def llm(path) -> jaxpaged.LLM:
    return small_llm(path)


@pytest.fixture(scope="module")
def reference(path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(path)


def reference_ids(reference: Any, **options: Any) -> list[int]:
    return reference.apply_chat_template(CONVERSATION, tokenize=True, return_dict=False, **options)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(("template", "num_bos"), [(WRITES_BOS, 1), (WRITES_NONE, 0), (None, 1)])
def test_chat_ids_are_the_references(
    llm: jaxpaged.LLM, reference: Any, template: str | None, num_bos: int, add_generation_prompt: bool
):
    """The template wrote a begin token and the tokenizer added another; never adding one broke other templates."""
    options: dict[str, Any] = {"chat_template": template, "add_generation_prompt": add_generation_prompt}
    (output,) = llm.chat(CONVERSATION, greedy(max_tokens=1), use_tqdm=False, **options)
    assert output.prompt_token_ids == reference_ids(reference, **options)
    assert output.prompt_token_ids.count(BYTE_BOS) == num_bos


def test_a_final_message_continued(llm: jaxpaged.LLM, reference: Any):
    """A conversation that ends in the assistant's own words goes on from there, without the end of the turn."""
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    (output,) = llm.chat(CONVERSATION, greedy(max_tokens=1), use_tqdm=False, **options)
    assert output.prompt_token_ids == reference_ids(reference, **options)
    assert llm.get_tokenizer().decode(output.prompt_token_ids[-1:], skip_special_tokens=False) != "<|end|>"


def test_several_conversations_and_a_stream(llm: jaxpaged.LLM, reference: Any):
    """One way in was right while another added a second begin token."""
    wanted = reference_ids(reference, add_generation_prompt=True)
    outputs = llm.chat([CONVERSATION, CONVERSATION], greedy(max_tokens=1), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [wanted] * 2
    (streamed,) = llm.generate_stream(CONVERSATION, greedy(max_tokens=1))
    assert streamed.prompt_token_ids == wanted


@pytest.mark.parametrize("text", ["hello world", "", " leading", "한 😀\n", "It is<|end|>the end"])
def test_plain_text_ids_are_the_references(llm: jaxpaged.LLM, reference: Any, text: str):
    """Text given to generate() gets what the tokenizer adds, once."""
    (output,) = llm.generate([text], greedy(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == reference(text).input_ids
    assert output.prompt_token_ids[0] == BYTE_BOS
    (streamed,) = llm.generate_stream(text, greedy(max_tokens=1))
    assert streamed.prompt_token_ids == output.prompt_token_ids


@pytest.mark.parametrize("template", [WRITES_BOS, WRITES_NONE])
def test_templated_text_given_to_generate_begins_once(llm: jaxpaged.LLM, reference: Any, template: str):
    """Text that a template had rendered, begin token included, got a second one when it was given to generate()."""
    text = reference.apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=True, chat_template=template
    )
    (output,) = llm.generate([text], greedy(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == reference_ids(reference, chat_template=WRITES_BOS, add_generation_prompt=True)
    assert output.prompt_token_ids.count(BYTE_BOS) == 1


def test_given_token_ids_are_left_as_they_are(llm: jaxpaged.LLM):
    """A caller who tokenises by himself gets his ids, with no, one or two begin tokens."""
    prompts = [[5, 6], [BYTE_BOS, 5, 6], [BYTE_BOS, BYTE_BOS, 5]]
    outputs = llm.generate(prompts, greedy(max_tokens=1), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts

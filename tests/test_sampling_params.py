"""Sampling parameters: what is accepted, how it is stored, and what an error says."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

BAD_VALUES = [
    ("n", [0, -1, 16385, 1.0, "2", True, None]),
    ("temperature", [-0.1, float("nan"), float("inf"), 1e39, "hot", None, True]),
    ("top_p", [0, 0.0, -0.5, 1.01, float("nan"), "x", None]),
    ("top_k", [-2, 1.5, "3", None]),
    ("min_p", [-0.1, 1.1, float("nan"), None]),
    ("seed", [1.5, "1", 2**64, -(2**63) - 1, True]),
    ("stop", ["", [""], ["a", ""], [1], 3, [None], {"a"}]),
    ("stop_token_ids", [[-1], [1.0], "12", 7, [True], [None]]),
    ("ignore_eos", [1, None, "yes"]),
    ("max_tokens", [0, -5, 1.5, "5", True]),
    ("min_tokens", [-1, None, 0.5]),
    ("logprobs", [-2, 2.0, "1"]),
    ("prompt_logprobs", [-2, 1.5]),
    ("logprob_token_ids", [[], [-1], "12", 7]),
    ("presence_penalty", [-2.1, 2.1, float("nan"), None]),
    ("frequency_penalty", [-2.1, 2.1, "x"]),
    ("repetition_penalty", [0.0, -1.0, float("inf"), None]),
    ("logit_bias", [5, "12"]),
    ("allowed_token_ids", [[], [-1], [1.0], "12", 7]),
    ("bad_words", ["word", [""], [1], 3]),
    ("structured_outputs", [{"regex": "a"}, "json"]),
    ("logits_processor", [3, "f"]),
    ("truncate_prompt_tokens", [0, -2, 1.5, True]),
    ("skip_reading_prefix_cache", [1, "no"]),
    ("spaces_between_special_tokens", [None]),
    ("detokenize", [0]),
    ("skip_special_tokens", [None]),
    ("include_stop_str_in_output", ["no"]),
    ("output_kind", [0, "delta", None]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES for value in values])
def test_bad_value_is_refused_by_name_with_the_value(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    shown = value[-1] if isinstance(value, list) and value else value
    assert repr(shown) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("logit_bias", {-1: 1.0}, "got -1"),
        ("logit_bias", {1: float("nan")}, "got nan"),
        ("logit_bias", {1: "x"}, "got 'x'"),
        ("logit_bias", {"a": 1.0}, "got 'a'"),
        ("logit_bias", [1], "mapping"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024 token ids, got 1025"),
        ("logprob_token_ids", range(129), "at most 128 token ids, got 129"),
        ("bad_words", ["a"] * 129, "at most 128 words, got 129"),
    ],
)
def test_bad_collections_are_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} .*{said}"):
        SamplingParams(**{name: value})


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.seed, params.stop, params.stop_token_ids, params.max_tokens) == (None, (), (), 16)
    assert (params.min_tokens, params.logprobs, params.ignore_eos, params.detokenize) == (0, None, False, True)
    assert params.skip_special_tokens
    assert not params.include_stop_str_in_output
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.bad_words == ()
    off = ("logit_bias", "allowed_token_ids", "prompt_logprobs", "logprob_token_ids", "structured_outputs")
    off += ("logits_processor", "truncate_prompt_tokens", "skip_reading_prefix_cache")
    assert [getattr(params, name) for name in off] == [None] * len(off)
    assert not params.penalised and not params.wants_logprobs
    assert params.spaces_between_special_tokens and params.reads_prefix_cache


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("stop", "ab", ("ab",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", (), ()),
        ("stop_token_ids", [np.int32(3), 5], (3, 5)),
        ("top_k", -1, 0),
        ("top_k", 10**9, 10**9),
        ("seed", -1, None),
        ("seed", 0, 0),
        ("seed", -2, 2**64 - 2),
        ("logprobs", True, 1),
        ("logprobs", False, None),
        ("logprobs", 0, 0),
        ("logprobs", -1, -1),
        ("logit_bias", {3: 1, np.int64(5): -200}, ((3, 1.0), (5, -100.0))),
        ("logit_bias", ((3, 1.0), (3, 2.0)), ((3, 2.0),)),
        ("logit_bias", {}, ()),
        ("allowed_token_ids", [np.int32(3), 5], (3, 5)),
        ("bad_words", ["a", "b c"], ("a", "b c")),
        ("truncate_prompt_tokens", -1, -1),
        ("skip_reading_prefix_cache", True, True),
        ("max_tokens", None, None),
        ("max_tokens", np.int64(7), 7),
        ("temperature", 1, 1.0),
        ("temperature", 1e30, 1e30),
        ("temperature", np.float32(0.5), 0.5),
    ],
)
def test_stored_form(name: str, given: object, stored: object) -> None:
    value = getattr(SamplingParams(**{name: given}), name)
    assert value == stored
    assert type(value) is type(stored)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-30, True), (9e-6, True), (1e-5, False), (1, False)])
def test_greedy_below_a_threshold(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    ("keywords", "names"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens=5", "max_tokens=4"]),
        ({"min_tokens": 17}, ["min_tokens=17", "max_tokens=16"]),
        ({"n": 2, "temperature": 0.0}, ["n=2", "temperature=0.0"]),
        ({"stop": "a", "detokenize": False}, ["detokenize"]),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, ["2", "logprobs=3"]),
    ],
)
def test_contradictions_are_refused(keywords: dict[str, object], names: list[str]) -> None:
    with pytest.raises(ValueError, match="must|need") as caught:
        SamplingParams(**keywords)
    assert all(name in str(caught.value) for name in names)


def test_min_tokens_may_equal_max_tokens_or_have_no_limit() -> None:
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=1000, max_tokens=None).min_tokens == 1000


def test_unknown_keyword_names_near_matches() -> None:
    """Other engines drop unknown keywords without a word: a misspelt stop or top_k then simply does nothing."""
    with pytest.raises(TypeError, match=r"unknown keyword 'max_token'; did you mean 'max_tokens'"):
        SamplingParams(max_token=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="unknown keyword 'beam_width'; known keywords: .*temperature"):
        SamplingParams(beam_width=3)  # pyright: ignore[reportCallIssue]


def test_is_a_value() -> None:
    params = SamplingParams(stop=["a"], seed=3, top_p=0.5)
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == dataclasses.replace(params)
    assert hash(params) == hash(copy.copy(params))
    assert dataclasses.replace(params, n=3).n == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params, top_p=2)


def test_verify_knows_the_model() -> None:
    SamplingParams(stop_token_ids=[99], logprobs=20).verify(vocab_size=100, max_logprobs=20)
    with pytest.raises(ValueError, match=r"stop_token_ids .* 100, got 100"):
        SamplingParams(stop_token_ids=[5, 100]).verify(vocab_size=100, max_logprobs=20)
    with pytest.raises(ValueError, match=r"logprobs .* 20 .*, got 21"):
        SamplingParams(logprobs=21).verify(vocab_size=100, max_logprobs=20)
    with pytest.raises(ValueError, match=r"logprobs .* 8 .*, got 9"):
        SamplingParams(logprobs=9).verify(vocab_size=8, max_logprobs=20)
    with pytest.raises(ValueError, match=r"prompt_logprobs .* 20 .*, got -1"):
        SamplingParams(prompt_logprobs=-1).verify(vocab_size=100, max_logprobs=20)
    SamplingParams(logprobs=-1, prompt_logprobs=100).verify(vocab_size=100, max_logprobs=-1)
    SamplingParams(logprob_token_ids=range(30)).verify(vocab_size=100, max_logprobs=20)
    for options in ({"allowed_token_ids": [8]}, {"logit_bias": {8: 1.0}}, {"logprob_token_ids": [8]}):
        with pytest.raises(ValueError, match=rf"{next(iter(options))} .* 8, got 8"):
            SamplingParams(**options).verify(vocab_size=8, max_logprobs=20)

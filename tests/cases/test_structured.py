"""Structured outputs in the engine: always of their form, whatever else happens to their requests or beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import jaxpaged
from jaxpaged.outputs import CompletionOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.structured_outputs import GrammarConstraint
from jaxpaged.structured_params import StructuredOutputsParams
from tests.support.driving import Arrival, answers, run_arrivals
from tests.support.engines import small_llm
from tests.support.structures import STRUCTURES
from tests.support.tiny import tiny_checkpoint
from tests.support.tokenizers import BYTE_EOS, SP_EOS, byte_tokenizer, sentencepiece_tokenizer

PROMPTS = [[base + step for step in range(6)] for base in (10, 100, 200, 300, 400, 500, 600)]
OPTIONS = {"max_model_len": 320, "num_gpu_blocks_override": 700}


def structured(kind: str, **options: Any) -> SamplingParams:
    """Sampling parameters for a structure of that kind, long enough for any output of it."""
    structure = StructuredOutputsParams(**STRUCTURES[kind][0])
    return SamplingParams(**{"max_tokens": 250, **options}, structured_outputs=structure)


def mixed() -> list[SamplingParams]:
    """One request for each structure: greedy and sampled ones, in turns."""
    return [
        structured(kind, temperature=0.8 * (index % 2), seed=index, top_k=40) for index, kind in enumerate(STRUCTURES)
    ]


def check_forms(found: Sequence[CompletionOutput]) -> None:
    """Outputs of mixed(), in order."""
    for (kind, (_, check)), completion in zip(STRUCTURES.items(), found, strict=True):
        assert completion.finish_reason == "stop", (kind, completion)
        assert check(completion.text), (kind, completion.text)


def facts(found: Sequence[CompletionOutput]) -> list[tuple[list[int], str, str | None, object]]:
    return [(list(each.token_ids), each.text, each.finish_reason, each.stop_reason) for each in found]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Its embedding has many more rows than the tokenizer has tokens."""
    directory = tmp_path_factory.mktemp("tiny") / "model"
    return tiny_checkpoint(directory, tokenizer=byte_tokenizer(adds_bos=False), eos_token_id=BYTE_EOS)


@pytest.fixture(scope="module")
def llm(path: Path) -> jaxpaged.LLM:
    return small_llm(path, **OPTIONS)


@pytest.fixture(scope="module")
def solo(llm: jaxpaged.LLM) -> list[CompletionOutput]:
    """The answers of mixed(), each alone."""
    found = [answers(llm, [prompt], params)[0] for prompt, params in zip(PROMPTS, mixed(), strict=True)]
    check_forms(found)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 5},  # prompts and forced runs in chunks
        {"num_gpu_blocks_override": 24, "max_model_len": 90},
        {"enable_prefix_caching": False, "block_size": 16},
    ],
    ids=["together", "no run-ahead", "chunks", "preempted", "large blocks"],
)
def test_answers_are_those_of_requests_alone(path: Path, solo: list[CompletionOutput], options: dict[str, Any]) -> None:
    llm = small_llm(path, **{**OPTIONS, **options})
    found = answers(llm, PROMPTS * 2, mixed() * 2)
    assert facts(found) == facts(solo) * 2
    stats = llm.engine.stats()
    assert stats["forced_tokens"] > 0 and stats["blocks_used"] == 0
    assert (stats["preemptions"] > 0) == ("max_model_len" in options)
    llm.engine.check_invariants()


def test_answers_are_streamed_the_same_and_in_any_company(llm: jaxpaged.LLM, solo: list[CompletionOutput]) -> None:
    """Neighbours without a structure get what they get alone, and so do late comers."""
    plain = [SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=30) for index in range(3)]
    alone = [answers(llm, [PROMPTS[index]], params)[0] for index, params in enumerate(plain)]
    arrivals = [
        Arrival(step=3 * index, name=f"structured {index}", prompt=prompt, params=params)
        for index, (prompt, params) in enumerate(zip(PROMPTS, mixed(), strict=True))
    ]
    arrivals += [
        Arrival(step=5 * index, name=f"plain {index}", prompt=PROMPTS[index], params=params)
        for index, params in enumerate(plain)
    ]
    streams = run_arrivals(llm, arrivals)
    for name, wanted in (("structured", solo), ("plain", alone)):
        for index, completion in enumerate(wanted):
            stream = streams[f"{name} {index}"]
            assert (stream.token_ids, stream.text, stream.finish_reason) == (
                list(completion.token_ids),
                completion.text,
                completion.finish_reason,
            )


@pytest.mark.parametrize("kind", ["json", "choice", "ebnf"])
def test_each_of_several_samples_has_the_form(llm: jaxpaged.LLM, kind: str) -> None:
    """Samples shared one state: the second one's tokens had to fit after the first one's."""
    params = structured(kind, n=4, seed=5)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert all(STRUCTURES[kind][1](sample.text) for sample in output.outputs)
    for index, sample in enumerate(output.outputs):
        (single,) = answers(llm, [PROMPTS[0]], structured(kind, seed=5 + index))
        assert single.token_ids == sample.token_ids


def test_jumping_ahead_changes_nothing_but_the_number_of_steps(llm: jaxpaged.LLM) -> None:
    """Requests with log-probabilities do not jump; the mask then forces the same tokens one at a time."""
    counts = []
    for logprobs in (None, 0):
        before = llm.engine.stats()
        found = answers(llm, [PROMPTS[0]], structured("json text", temperature=0.0, logprobs=logprobs))
        after = llm.engine.stats()
        counts.append(
            (facts(found), after["steps"] - before["steps"], after["forced_tokens"] - before["forced_tokens"])
        )
    (jumped, few, forced), (plain, many, none) = counts
    assert jumped == plain and none == 0
    assert forced > 10 and few < many - forced / 2


def test_max_tokens_and_stop_strings_count_inside_a_structure(llm: jaxpaged.LLM) -> None:
    """Also inside a run of forced tokens: those behind the end do not count."""
    (whole,) = answers(llm, [PROMPTS[0]], structured("json text", temperature=0.0))
    assert whole.text.startswith('{"name":"')
    for count in (1, 3, 7, 20):
        (cut,) = answers(llm, [PROMPTS[0]], structured("json text", temperature=0.0, max_tokens=count))
        assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:count], "length")
    stop = "am"
    (stopped,) = answers(llm, [PROMPTS[0]], structured("json text", temperature=0.0, stop=[stop]))
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ('{"n', "stop", stop)
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    (ended,) = answers(llm, [PROMPTS[0]], structured("json text", temperature=0.0, stop_token_ids=[ord("m")]))
    assert (ended.text, ended.stop_reason) == ('{"na', ord("m"))


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 100}, {"stop_token_ids": [7]}, {}])
def test_a_complete_structure_ends_the_output(llm: jaxpaged.LLM, options: dict[str, Any]) -> None:
    """With no end-of-sequence token allowed nothing was left to sample, and the request ended with an error."""
    (found,) = answers(llm, [PROMPTS[1]], structured("regex", **options))
    assert STRUCTURES["regex"][1](found.text)
    assert (found.finish_reason, found.stop_reason) == ("stop", None)


def test_a_structure_without_end_goes_on_when_ends_are_ignored(llm: jaxpaged.LLM) -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[ab]*"), max_tokens=20, ignore_eos=True, seed=0
    )
    (found,) = answers(llm, [PROMPTS[0]], params)
    assert found.finish_reason == "length" and set(found.text) <= {"a", "b"} and len(found.text) >= 20


def test_a_dead_end_is_the_requests_own(llm: jaxpaged.LLM, solo: list[CompletionOutput]) -> None:
    """allowed_token_ids leave no token that the structure allows after "5"."""
    dead = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"), allowed_token_ids=[ord("x")], max_tokens=5
    )
    found = answers(llm, [PROMPTS[0], *PROMPTS], [dead, *mixed()])
    assert (found[0].finish_reason, list(found[0].token_ids)) == ("error", [])
    assert facts(found[1:]) == facts(solo)


def test_looking_ahead_that_raises_is_the_requests_own(
    llm: jaxpaged.LLM, solo: list[CompletionOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended all requests of the step."""
    marked = structured("regex", seed=1)
    original = GrammarConstraint.forced
    calls = iter(range(100_000))

    def forced(self: GrammarConstraint) -> list[int]:
        if next(calls) == 3:
            raise RuntimeError("no way ahead")
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(GrammarConstraint, "forced", forced)
        found = answers(llm, [PROMPTS[0], *PROMPTS], [marked, *mixed()])
    failed = [index for index, each in enumerate(found) if each.finish_reason == "error"]
    assert [found[index].error for index in failed] == ["RuntimeError: no way ahead"]
    others = [
        (one, other) for index, (one, other) in enumerate(zip(solo, found[1:], strict=True), 1) if index not in failed
    ]
    assert facts([one for one, _ in others]) == facts([other for _, other in others])


def test_what_cannot_be_compiled_is_refused_and_nothing_is_queued(llm: jaxpaged.LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    with pytest.raises(ValueError, match="regex cannot be compiled"):
        llm.generate(PROMPTS[:2], [structured("choice"), bad], use_tqdm=False)
    assert llm.engine.num_unfinished == 0


def test_without_a_tokenizer_structures_are_refused(path: Path) -> None:
    llm = small_llm(path, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="structured_outputs need a tokenizer"):
        llm.generate(PROMPTS[0], structured("choice"), use_tqdm=False)


def test_sentencepiece_models(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", tokenizer=sentencepiece_tokenizer(adds_bos=True), eos_token_id=SP_EOS)
    llm = small_llm(path, **OPTIONS)
    check_forms(answers(llm, PROMPTS, mixed()))
    assert llm.engine.stats()["forced_tokens"] > 0


def test_a_model_without_end_tokens(tmp_path: Path) -> None:
    """Where a structure could end nothing could be sampled."""
    path = tiny_checkpoint(tmp_path / "model", tokenizer=byte_tokenizer(adds_bos=False))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    llm = small_llm(path, **OPTIONS)
    check_forms(answers(llm, PROMPTS, mixed()))


def test_penalties_and_biases_do_not_break_the_form(llm: jaxpaged.LLM) -> None:
    options = {"presence_penalty": 2.0, "repetition_penalty": 1.5, "logit_bias": {ord("{"): -100.0}, "seed": 3}
    found = answers(llm, PROMPTS, [structured(kind, **options) for kind in STRUCTURES])
    check_forms(found)

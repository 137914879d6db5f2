"""The model for lm-evaluation-harness: a local task of each kind, and what the harness asks of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jaxpaged
from jaxpaged import SamplingParams
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint
from tests.support.tokenizers import BYTE_EOS, BYTE_SIZE, byte_tokenizer

pytest.importorskip("lm_eval", reason="the harness is not there: pip install 'jaxpaged[lm-eval]'")

DOCUMENTS = [
    {"question": "The sky is", "choices": [" blue", " a fish", " two"], "answer": 0},
    {"question": "Two and two are", "choices": [" four", " red"], "answer": 0},
    {"question": "", "choices": ["yes", "no"], "answer": 1},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> jaxpaged.LLM:
    path = tiny_checkpoint(
        tmp_path_factory.mktemp("harness"),
        vocab_size=BYTE_SIZE,
        eos_token_id=BYTE_EOS,
        tokenizer=byte_tokenizer(adds_bos=False),
    )
    return small_llm(path, max_model_len=64)


@pytest.fixture(scope="module")
def model(llm: jaxpaged.LLM) -> Any:
    from jaxpaged.harness import HarnessLM

    return HarnessLM(llm, use_tqdm=False)


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.mark.filterwarnings("default")  # the harness' own
def test_a_local_task_is_evaluated(model: Any, llm: jaxpaged.LLM, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import lm_eval

    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choose = data | {
        "task": "choose",
        "output_type": "multiple_choice",
        "target_delimiter": "",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    write = data | {
        "task": "write",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match"}],
    }
    evaluate: Any = lm_eval.simple_evaluate
    results = evaluate(model=model, tasks=[choose, write], bootstrap_iters=0, cache_requests=False)
    wanted = 0
    for row in DOCUMENTS[:2]:
        scores = llm.score_continuations(row["question"], row["choices"], use_tqdm=False)
        wanted += max(range(len(scores)), key=lambda i: scores[i].logprob) == row["answer"]
    assert results["results"]["choose"]["acc,none"] * 3 - wanted in (pytest.approx(0), pytest.approx(1))
    assert results["results"]["write"]["exact_match,none"] == 0
    assert len(results["samples"]["write"]) == 3


def test_log_likelihoods_are_sums_over_the_continuation(model: Any, llm: jaxpaged.LLM) -> None:
    (found, _), (empty, _) = model.loglikelihood(
        instances("loglikelihood", ("ab ", "cd"), ("", "cd")), disable_tqdm=True
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    tokenizer = llm.get_tokenizer()
    for ids, count, value in ((tokenizer.encode("ab cd", False), 3, found), ([BYTE_EOS, 99, 100], 2, empty)):
        if count == 2:
            ids = [model.prefix_token_id, *tokenizer.encode("cd", False)]
        rows = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs
        assert rows is not None
        told = [row[token].logprob for token, row in zip(ids, rows, strict=True) if row is not None]
        assert value == pytest.approx(sum(told[-count:]), abs=1e-4)


def test_long_texts_are_scored_in_windows_and_long_contexts_cut(model: Any) -> None:
    text = "abcdefg " * 20  # 160 tokens, of which 64 fit
    (rolling,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)), disable_tqdm=True)
    (short,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", (text[:60],)), disable_tqdm=True)
    assert rolling < short < 0
    pairs = instances("loglikelihood", (text, "xy"), (text[-62:], "xy"))
    cut, fitting = model.loglikelihood(pairs, disable_tqdm=True)
    assert cut == pytest.approx(fitting)


def test_generation_ends_before_a_stop_string(model: Any) -> None:
    options = {"until": [], "max_gen_toks": 12}
    (whole,) = model.generate_until(instances("generate_until", ("abc", options)), disable_tqdm=True)
    stop = next(c for c in whole[3:] if c != "\N{REPLACEMENT CHARACTER}" and not c.isspace())
    cut = model.generate_until(instances("generate_until", ("abc", options | {"until": stop})), disable_tqdm=True)
    assert cut == [whole[: whole.index(stop)]]


def test_an_engine_without_tokenizer_is_refused(tmp_path: Path) -> None:
    from jaxpaged.harness import HarnessLM

    bare = small_llm(tiny_checkpoint(tmp_path / "bare"), skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="tokenizer"):
        HarnessLM(bare)

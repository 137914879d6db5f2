"""After warm-up nothing is compiled any more, whatever requests ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpaged import LLM, SamplingParams
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """One entry for each program that XLA is given while the test runs, a read from the persistent cache included."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == COMPILED:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Two token buckets, two sampling buckets; a pool so small that requests are preempted."""
    path: Path = tiny_checkpoint(tmp_path_factory.mktemp("warmup") / "tiny", num_hidden_layers=1)
    llm = small_llm(
        path,
        warmup=True,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=64,
        num_gpu_blocks_override=14,
        skip_tokenizer_init=True,
    )
    llm.engine.finish_warm_up()  # where an earlier run has left the programs on disk, they are still being read
    return llm


def test_the_listener_hears_compilations(compilations: list[str]) -> None:
    jax.jit(lambda x: x * 3.25 + 1)(1.5)
    assert compilations


def test_nothing_is_compiled_after_warm_up(llm: LLM, compilations: list[str]) -> None:
    """Each late compilation stops everybody for seconds."""
    one, two = list(range(30, 45)), [5, 6]
    requests = [
        (one, SamplingParams(temperature=0, max_tokens=20)),
        (two, SamplingParams(temperature=0.8, seed=1, max_tokens=3)),
        (two, SamplingParams(temperature=0, logprobs=5, max_tokens=3)),
        (one, SamplingParams(temperature=0.8, top_k=5, top_p=0.5, min_p=0.1, max_tokens=20)),
        (two, SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[7], max_tokens=4)),
        (two, SamplingParams(temperature=0.8, min_tokens=2, stop_token_ids=range(100), max_tokens=4)),
        ([*one, 9], SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=5)),
        ([1] * 40, SamplingParams(temperature=0, max_tokens=10)),
        ([1] * 30, SamplingParams(temperature=0, max_tokens=20)),
    ]
    for prompt, params in requests:
        llm.generate(prompt, params, use_tqdm=False)
    llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    list(llm.generate_stream(one, SamplingParams(temperature=0)))
    stats = llm.stats()
    assert stats["preemptions"] > 0
    assert stats["blocks_shared_peak"] > 0
    assert compilations == []
    assert stats["late_compilations"] == 0


def test_the_copying_of_blocks_is_warm_too(llm: LLM, compilations: list[str]) -> None:
    """Two samples share the prompt's last, partly filled block until one of them writes."""
    steps = llm.stats()["steps"]
    (output,) = llm.generate([11, 12, 13, 14, 15, 16], SamplingParams(n=2, seed=9, max_tokens=8), use_tqdm=False)
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    assert llm.stats()["steps"] > steps
    assert compilations == []
    assert llm.stats()["late_compilations"] == 0


def test_without_warm_up_they_are_counted(tmp_path: Path) -> None:
    llm = small_llm(
        tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=1),
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=64,
        num_gpu_blocks_override=14,
        skip_tokenizer_init=True,
    )
    llm.generate([5], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert llm.stats()["late_compilations"] == 2

"""A request's own function on the logits: the history it sees is right, whatever the engine is doing meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged
from jaxpaged.sampling_adjust import TokenHistory
from tests.support.bigram import bigram_checkpoint
from tests.support.driving import Arrival, answer, greedy, run_arrivals
from tests.support.engines import WAYS_TO_STEP, small_llm

VOCAB = 64


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return np.random.default_rng(11).normal(0.0, 2.0, (VOCAB, VOCAB)).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory, table: np.ndarray) -> Path:
    rows = {last: {j: float(value) for j, value in enumerate(row)} for last, row in enumerate(table)}
    return bigram_checkpoint(tmp_path_factory.mktemp("random") / "model", rows, VOCAB)


@pytest.fixture(scope="module")
def llm(path: Path) -> jaxpaged.LLM:
    return small_llm(path, skip_tokenizer_init=True)


def fading(history: TokenHistory, logits: jax.Array) -> jax.Array:
    """Uses all of the history: counts, the prompt, both lengths, the newest token."""
    logits = logits - 3.0 * history.output_counts - jnp.where(history.in_prompt, 2.0, 0.0)
    favoured = (history.last_token + history.num_outputs + history.num_prompt) % VOCAB
    return logits.at[favoured].add(3.0)


def descending(history: TokenHistory, logits: jax.Array) -> jax.Array:
    """Only ids below the newest token; any, when there is none."""
    below = jnp.arange(VOCAB) < history.last_token
    return jnp.where(below | (history.last_token == 0), logits, -jnp.inf)


def expected(table: np.ndarray, prompt: list[int], count: int, processor: Callable[..., Any] | None) -> list[int]:
    """The greedy answer by a plain loop."""
    outputs: list[int] = []
    for _ in range(count):
        last = (prompt + outputs)[-1]
        logits = jnp.asarray(table[last])
        if processor is not None:
            history = TokenHistory(
                output_counts=jnp.asarray(np.bincount(outputs, minlength=VOCAB) if outputs else np.zeros(VOCAB, int)),
                in_prompt=jnp.asarray(np.isin(np.arange(VOCAB), prompt)),
                num_prompt=jnp.asarray(len(prompt)),
                num_outputs=jnp.asarray(len(outputs)),
                last_token=jnp.asarray(last),
            )
            logits = processor(history, logits)
        outputs.append(int(jnp.argmax(logits)))
    return outputs


@pytest.mark.parametrize("options", WAYS_TO_STEP.values(), ids=WAYS_TO_STEP.keys())
def test_answers_equal_a_plain_loop(path: Path, table: np.ndarray, options: dict[str, Any]):
    """The newest token is on the device alone when steps run ahead; after a preemption the history begins anew."""
    llm = small_llm(path, skip_tokenizer_init=True, **options)
    processors = (fading, None, descending, fading, descending)
    arrivals = [
        Arrival(
            step=2 * index,
            name=str(index),
            prompt=[(13 * index + 5 * place) % VOCAB for place in range(3 + 2 * index)],
            params=greedy(max_tokens=20, logits_processor=processor),
        )
        for index, processor in enumerate(processors)
    ]
    streams = run_arrivals(llm, arrivals)
    for arrival, processor in zip(arrivals, processors, strict=True):
        wanted = expected(table, list(arrival.prompt), 20, processor)
        assert streams[arrival.name].token_ids == wanted, arrival.name
    assert (llm.stats()["preemptions"] > 0) == ("num_gpu_blocks_override" in options)


@pytest.mark.parametrize(
    ("processor", "match"),
    [
        (lambda history, logits: logits[:-1], "must return float logits of shape"),
        (lambda history, logits: logits > 0, "must return float logits of shape"),
        (lambda history, logits: None, "must return float logits of shape"),
        (lambda history, logits: logits if logits[0] > 0 else -logits, "that JAX can trace"),
        (lambda logits: logits, "that JAX can trace"),
    ],
)
def test_functions_that_cannot_be_used_are_refused(llm: jaxpaged.LLM, processor: Callable[..., Any], match: str):
    """A function that fails inside a step would take its neighbours along."""
    with pytest.raises(ValueError, match=match):
        llm.generate([[1]], greedy(logits_processor=processor), use_tqdm=False)
    assert llm.engine.num_unfinished == 0


def test_a_function_that_leaves_no_token_ends_its_own_request(llm: jaxpaged.LLM, table: np.ndarray):
    """Nothing can be sampled from NaN: that request ends with an error, its neighbours are untouched."""

    def nothing(history: TokenHistory, logits: jax.Array) -> jax.Array:
        return jnp.where(history.num_outputs < 2, logits, jnp.nan)

    params = [greedy(max_tokens=5), greedy(max_tokens=5, logits_processor=nothing)]
    good, bad = (output.outputs[0] for output in llm.generate([[3], [3]], params, use_tqdm=False))
    assert (good.finish_reason, good.token_ids) == ("length", expected(table, [3], 5, None))
    assert (bad.finish_reason, bad.token_ids) == ("error", good.token_ids[:2])
    assert answer(llm, [3], max_tokens=5).token_ids == good.token_ids

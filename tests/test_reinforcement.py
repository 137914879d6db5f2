"""Training next to the engine: log-probabilities of generation, of scoring and of training agree."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxpaged
from jaxpaged import SamplingParams
from jaxpaged.training import token_logprobs
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint

PROMPTS = [[5, 9, 12, 700, 31, 8, 77], [3], [900, 2, 2, 2, 61]]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> jaxpaged.LLM:
    path = tiny_checkpoint(tmp_path_factory.mktemp("reinforcement"))
    return small_llm(path, skip_tokenizer_init=True, max_num_batched_tokens=8)


def sampled(llm: jaxpaged.LLM) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, sampled tokens and their log-probabilities as generation tells them."""
    params = SamplingParams(max_tokens=12, temperature=1.0, logprobs=0, seed=3, detokenize=False)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    found = []
    for output in outputs:
        answer = output.outputs[0]
        assert answer.logprobs is not None
        values = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
        found.append((list(output.prompt_token_ids), list(answer.token_ids), values))
    return found


def test_scoring_agrees_with_generation(llm: jaxpaged.LLM) -> None:
    """Other log-probabilities than the sampler's make every importance ratio wrong."""
    found = sampled(llm)
    llm.reset_prefix_cache()
    scores = llm.score_continuations([p for p, _, _ in found], [ids for _, ids, _ in found], use_tqdm=False)
    for (_, _, values), score in zip(found, scores, strict=True):
        np.testing.assert_allclose(score.logprobs, values, rtol=0, atol=TOLERANCE)


def test_training_agrees_with_generation_also_behind_padding(llm: jaxpaged.LLM) -> None:
    found = sampled(llm)
    ids = np.zeros((len(found), 24), np.int32)
    for row, (prompt, tokens, _) in zip(ids, found, strict=True):
        row[: len(prompt) + len(tokens)] = prompt + tokens
    graphdef, state = llm.model_state()
    told = np.asarray(jax.jit(token_logprobs, static_argnums=0)(graphdef, state, ids))
    for row, (prompt, tokens, values) in zip(told, found, strict=True):
        np.testing.assert_allclose(row[len(prompt) - 1 :][: len(tokens)], values, rtol=0, atol=TOLERANCE)


def test_gradients_are_those_of_the_differences(llm: jaxpaged.LLM) -> None:
    """Along its own direction, so that every weight counts."""
    graphdef, state = llm.model_state()
    ids = np.array([PROMPTS[0]], np.int32)

    def total(weights: object) -> jax.Array:
        return token_logprobs(graphdef, weights, ids).sum()

    gradient = jax.grad(total)(state)
    norm = float(np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient))))
    assert all(float(abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))
    size = 1e-2 / norm

    def moved(sign: int) -> float:
        return float(total(jax.tree.map(lambda x, d: x + sign * size * d, state, gradient)))

    assert (moved(1) - moved(-1)) / (2 * size) == pytest.approx(norm**2, rel=1e-2)


def test_dynamic_rope_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "dynamic", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    model = small_llm(path, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="dynamic"):
        token_logprobs(*model.model_state(), np.array([[1, 2, 3]], np.int32))

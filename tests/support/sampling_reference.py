"""The whole order of sampling in plain numpy, in float64, one row at a time: what the sampler is tested against."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxpaged.sampling_params import SamplingParams


def adjusted_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    outputs: Sequence[int],
    *,
    banned: Collection[int] = (),
    process: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Logits as the filters see them: bias, repetition, frequency, presence, masks, the request's own function."""
    values = np.array(logits, np.float64)
    for token, bias in params.logit_bias or ():
        values[token] += bias
    for token in {*prompt, *outputs}:
        penalty = np.float64(np.float32(params.repetition_penalty))
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in outputs:
        values[token] -= np.float64(np.float32(params.frequency_penalty))
    for token in set(outputs):
        values[token] -= np.float64(np.float32(params.presence_penalty))
    forbidden = set(banned)
    if params.allowed_token_ids is not None:
        forbidden |= set(range(len(values))) - set(params.allowed_token_ids)
    values[list(forbidden)] = -np.inf
    if process is not None:
        values = np.array(process(values), np.float64)
        values[list(forbidden)] = -np.inf
    return values


def greedy_tokens(
    table: np.ndarray, prompt: Sequence[int], params: SamplingParams, *, sequences: Sequence[tuple[int, ...]] = ()
) -> list[int]:
    """The greedy answer of a model whose logits after token t are table[t], up to max_tokens.

    sequences: token sequences whose last id is banned where the ones before it have just been generated.
    AssertionError where two tokens are too near to tell: choose another table.
    """
    outputs: list[int] = []
    for _ in range(params.max_tokens or 0):
        last = (outputs or prompt)[-1]
        banned = [ids[-1] for ids in sequences if len(ids) == 1 or tuple(outputs[-(len(ids) - 1) :]) == ids[:-1]]
        values = adjusted_logits(table[last], params, prompt, outputs, banned=banned)
        second, first = np.sort(values)[-2:]
        assert first - second > 1e-3, "two tokens are too near to tell"
        outputs.append(int(np.argmax(values)))
    return outputs

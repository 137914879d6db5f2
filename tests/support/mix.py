"""A mix of requests whose results must not depend on how the engine schedules, stores or pads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpaged import LLM, RequestOutput, SamplingParams

# Of log-probabilities. Batches of other shapes add float32 numbers up in another order: against float64 each setting
# errs by up to 9e-6 on the tiny checkpoint (99% of the values by at most 5e-6), so two can be twice that apart.
TOLERANCE = 2e-5


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request: prompt ids and what is asked of sampling."""

    ids: list[int]
    params: SamplingParams


def mixed_asks(*, vocab_size: int = 1024, max_tokens: int = 20) -> list[Ask]:
    """Prompts below, at and above multiples of 4, 8 and 16; equal ones, shared beginnings; greedy and sampled rows.

    The longest sequence has 33 + max_tokens tokens.
    """
    rng = np.random.default_rng(7)
    long = rng.integers(0, vocab_size, 33).tolist()
    nine = rng.integers(0, vocab_size, 9).tolist()
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=3)
    plain = SamplingParams(temperature=0, max_tokens=max_tokens)
    sampled = SamplingParams(temperature=0.8, seed=11, max_tokens=max_tokens, logprobs=2)
    filtered = SamplingParams(temperature=0.8, seed=12, top_p=0.9, top_k=40, min_p=0.01, max_tokens=max_tokens)
    several = SamplingParams(temperature=0.8, seed=13, n=3, max_tokens=max_tokens // 2, logprobs=0)
    return [
        Ask(ids=long[:1], params=greedy),
        Ask(ids=long, params=greedy),
        Ask(ids=nine, params=plain),
        Ask(ids=nine, params=sampled),
        Ask(ids=nine, params=plain),
        Ask(ids=long[:16], params=filtered),
        Ask(ids=[*long[:16], 5], params=greedy),
        Ask(ids=[*long[:8], 6, 7], params=several),
        Ask(ids=rng.integers(0, vocab_size, 3).tolist(), params=sampled),
        Ask(ids=rng.integers(0, vocab_size, 15).tolist(), params=greedy),
        Ask(ids=[*long[4:12], 3], params=greedy),  # begins with what others have in their second block
    ]


def alone(llm: LLM, asks: Sequence[Ask]) -> list[RequestOutput]:
    """Each request in a call of its own."""
    return [llm.generate(ask.ids, ask.params, use_tqdm=False)[0] for ask in asks]


def together(llm: LLM, asks: Sequence[Ask]) -> list[RequestOutput]:
    """All requests in one call."""
    return llm.generate([ask.ids for ask in asks], [ask.params for ask in asks], use_tqdm=False)


def assert_same(wanted: Sequence[RequestOutput], got: Sequence[RequestOutput]) -> None:
    """Equal ids and reasons for every sample of every request; log-probabilities equal up to TOLERANCE."""
    assert len(wanted) == len(got)
    for request, (one, other) in enumerate(zip(wanted, got, strict=True)):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert other.finished
        for a, b in zip(one.outputs, other.outputs, strict=True):
            where = f"request {request}, sample {a.index}"
            assert list(a.token_ids) == list(b.token_ids), where
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason), where
            assert (a.logprobs is None) == (b.logprobs is None), where
            for step, (x, y) in enumerate(zip(a.logprobs or [], b.logprobs or [], strict=True)):
                assert {t: e.rank for t, e in x.items()} == {t: e.rank for t, e in y.items()}, f"{where}, step {step}"
                worst = max(abs(x[token].logprob - y[token].logprob) for token in x)
                assert worst <= TOLERANCE, f"{where}, step {step}: log-probabilities differ by {worst:.1e}"

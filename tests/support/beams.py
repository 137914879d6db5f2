"""Beam searches to compare with: every sequence tried, or transformers' rules written out, over any token table."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.beam_search import BeamSearch
from jaxpaged.plan import TokenLogprobs
from jaxpaged.request import FinishReason

GOLDENS = Path(__file__).parent.parent / "goldens" / "beams.json"

type Model = Callable[[Sequence[int]], np.ndarray]  # log-probabilities f64[V] of what follows the generated tokens


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A whole sequence and its score."""

    token_ids: tuple[int, ...]
    score: float


def load_beam_goldens() -> dict[str, Any]:
    """What scripts/make_beam_goldens.py wrote: tiny checkpoints with their searches, and the demo model's.

    A search holds beam_width, max_tokens, length_penalty, early_stopping, ending_ids (of end-of-sequence tokens),
    prompt_ids, and of every hypothesis token_ids and score, best first.
    """
    return json.loads(GOLDENS.read_text())


def markov(rng: np.random.Generator, vocab_size: int, *, spread: float = 2.0) -> Model:
    """What follows depends on the last token alone; the row V is for the beginning."""
    logits = spread * rng.standard_normal((vocab_size + 1, vocab_size))
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return lambda tokens: logprobs[tokens[-1] if tokens else vocab_size]


def every_sequence(model: Model, params: BeamSearchParams, ends: Container[int]) -> list[Scored]:
    """All sequences up to the first token that ends them, or max_tokens, best first."""
    done: list[Scored] = []
    open_: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for length in range(1, params.max_tokens + 1):
        longer = []
        for tokens, total in open_:
            for token, logprob in enumerate(model(tokens)):
                one = (*tokens, token), total + float(logprob)
                if token in ends or length == params.max_tokens:
                    done.append(Scored(token_ids=one[0], score=params.score(one[1], length)))
                else:
                    longer.append(one)
        open_ = longer
    return sorted(done, key=lambda scored: -scored.score)


def transformers_search(model: Model, params: BeamSearchParams, eos: int) -> list[Scored]:
    """transformers' loop, with its fixed arrays, its marks of -1e9 and its float comparisons, for one end token."""
    width, low = params.beam_width, -1.0e9
    running = [((), 0.0)] + [((), low)] * (width - 1)
    done: list[tuple[tuple[int, ...], float, bool]] = [((), low, False)] * width
    improvable = True
    for length in range(1, params.max_tokens + 1):
        every = [
            ((*tokens, token), total + float(logprob))
            for tokens, total in running
            for token, logprob in enumerate(model(tokens))
        ]
        top = sorted(every, key=lambda one: -one[1])[: 2 * width]
        hits = [tokens[-1] == eos or length == params.max_tokens for tokens, _ in top]
        full = all(finished for *_, finished in done) and params.early_stopping is True
        new = []
        for place, ((tokens, total), hit) in enumerate(zip(top, hits, strict=True)):
            counts = hit and place < width
            off = full + (not improvable) + (not counts)
            new.append((tokens, total / length**params.length_penalty + off * low, counts))
        done = sorted([*done, *new], key=lambda one: -one[1])[:width]
        going_on = [(tokens, total + hit * low) for (tokens, total), hit in zip(top, hits, strict=True)]
        running = sorted(going_on, key=lambda one: -one[1])[:width]
        hopeful = params.early_stopping == "never" and params.length_penalty > 0
        best = running[0][1] / (params.max_tokens if hopeful else length) ** params.length_penalty
        worst = min(score for _, score, _ in done)
        improvable &= any(best > (worst if finished else low) for *_, finished in done)
        if not improvable or (all(finished for *_, finished in done) and params.early_stopping is True) or all(hits):
            break
    return [Scored(token_ids=tokens, score=score) for tokens, score, _ in done]


def our_search(model: Model, params: BeamSearchParams, eos: int) -> list[Scored]:
    """BeamSearch, given the candidates that the engine would give it."""
    search = BeamSearch(params, params.max_tokens)
    while not search.over:
        count = params.num_candidates(1, len(model(())))
        paths = [[node.token for node in beam.path()] for beam in search.beams]
        answers = [answer_of(model(path), count) for path in paths]
        search.advance(answers, lambda beam, token: (FinishReason.STOP, None) if token == eos else None)
    return [
        Scored(token_ids=tuple(node.token for node in found.hypothesis.path()), score=found.score)
        for found in search.finished
    ]


def answer_of(logprobs: np.ndarray, count: int) -> TokenLogprobs:
    """The best `count`, as the sampler reports them."""
    ids = np.argsort(-logprobs, kind="stable")[:count]
    return TokenLogprobs(
        top_ids=ids, top_logprobs=logprobs[ids], ranked=True, sampled_logprob=float(logprobs[ids[0]]), sampled_rank=1
    )


def asks_of(search: Mapping[str, Any], **options: Any) -> BeamSearchParams:
    """A golden search's parameters, its ending ids as stop ids."""
    names = ("beam_width", "max_tokens", "length_penalty", "early_stopping")
    return BeamSearchParams(
        **{name: search[name] for name in names}, stop_token_ids=search["ending_ids"], ignore_eos=True, **options
    )

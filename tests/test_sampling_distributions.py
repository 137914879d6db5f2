"""How often each token comes where bias, penalties, bans and filters meet: against exact probabilities."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from jaxpaged.sampling_params import SamplingParams
from tests.support.adjusted import Ask, drawn
from tests.support.sampler import chi_square, plausible

LOGITS = np.random.default_rng(4).normal(0.3, 1.4, 13).astype(np.float32)
VOCAB = len(LOGITS)
PROMPT, OUTPUTS = (1, 2, 5, 5, 11), (0, 2, 2, 7, 2)  # a token in both, in the prompt twice, in the output three times
SWITCHES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {3: 1.5, 0: -1.0, 2: 2.0}},
    "allowed": {"allowed_token_ids": [token for token in range(VOCAB) if token not in (6, 10)]},
    "bad words": {"masked": (8, 1)},
    "min_tokens": {"banned": (4, 12)},
    "min_p": {"min_p": 0.07},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.83},
}


def ask(names: tuple[str, ...], seed: int) -> Ask:
    """Everything switched on that is named; the temperature changes from one to the next."""
    options: dict[str, Any] = {"temperature": (0.6, 1.0, 1.7)[seed % 3]}
    for name in names:
        options |= SWITCHES[name]
    bans = {name: options.pop(name) for name in ("masked", "banned") if name in options}
    return Ask(params=SamplingParams(**options), prompt=PROMPT, outputs=OUTPUTS, seed=seed, **bans)


def test_frequencies_of_every_combination() -> None:
    """All 1,024 combinations in one batch. A wrong order, base or divisor shows in one; a slight bias in their sum."""
    names = [tuple(itertools.compress(SWITCHES, on)) for on in itertools.product((0, 1), repeat=len(SWITCHES))]
    asks = [ask(each, seed) for seed, each in enumerate(names)]
    tokens = drawn(LOGITS, asks, 1000)
    total, total_freedom = 0.0, 0
    for index, each in enumerate(asks):
        counts = np.bincount(tokens[:, index], minlength=VOCAB)
        statistic, freedom = chi_square(counts, each.chances(LOGITS))
        assert plausible(statistic, freedom, 5.0), (names[index], statistic, freedom)
        total, total_freedom = total + statistic, total_freedom + freedom
    assert plausible(total, total_freedom, 4.0), (total, total_freedom)

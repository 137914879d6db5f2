"""Rows with bias, penalties, masks and processors on a large vocabulary, beside rows without."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.sampling import sample
from jaxpaged.sampling_adjust import TokenHistory
from jaxpaged.sampling_params import SamplingParams
from tests.support.adjusted import Ask, adjusting, drawn, prepare
from tests.support.sampler import WIDE, chi_square_fits, mode, run, winner

SAMPLE = jax.jit(sample, static_argnames="mode")
SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 1.7, 30.0]),
        "top_k": st.sampled_from([0, 0, 2, 129, 700]),
        "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.5]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.3, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4, -1.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.6, 0.7]),
    }
)


def random_ask(generator: np.random.Generator, options: dict[str, float], logits: np.ndarray) -> Ask:
    """An ask whose prompt, output, bias and bans are among the row's greatest logits, where they matter."""
    best = np.argsort(-logits)[:60]

    def some(count: int) -> tuple[int, ...]:
        return tuple(generator.choice(best, count).tolist())

    more: dict[str, Any] = {}
    if generator.random() < 0.4:
        more["logit_bias"] = dict(zip(some(20), generator.normal(0.0, 4.0, 20).tolist(), strict=True))
    if generator.random() < 0.3:
        more["allowed_token_ids"] = sorted({*some(10), *generator.choice(WIDE, 1500).tolist()})
    masked, banned = (some(4) if generator.random() < 0.4 else () for _ in range(2))
    return Ask(
        params=SamplingParams(**options, **more),
        prompt=some(30),
        outputs=some(int(generator.integers(0, 40))),
        masked=masked,
        banned=banned,
        seed=int(generator.integers(0, 2**63)),
    )


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.5, 2.0, 6.0]),
    choices=st.lists(SETTINGS, min_size=8, max_size=8),
)
def test_same_token_as_the_reference(seed: int, spread: float, choices: list[dict[str, float]]) -> None:
    """Candidate blocks are found by maxima, which the adjustments move: old maxima would hide what was raised."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0.0, spread, (8, WIDE)).astype(np.float32)
    asks = [random_ask(generator, choice, logits[row]) for row, choice in enumerate(choices)]
    inputs, state = prepare(asks, WIDE)
    tokens = np.asarray(SAMPLE(jnp.asarray(logits), inputs, mode=adjusting(3), state=state).token)
    for row, ask in enumerate(asks):
        expected = winner(ask.expected(logits[row]), ask.seed, len(ask.prompt) + len(ask.outputs))
        assert expected is None or expected == tokens[row], (row, ask)


def test_rows_without_adjustments_are_those_of_the_plain_program() -> None:
    """A penalised neighbour brings another program: it must not change what a plain row samples."""
    generator = np.random.default_rng(2)
    logits = generator.normal(0.0, 1.0, (4, WIDE)).astype(np.float32)
    plain = [{}, {"top_p": 0.9}, {"temperature": 0.0}, {"top_k": 40, "min_p": 0.1}]
    asks = [Ask(params=SamplingParams(**each), prompt=(1, 2), outputs=(3,), seed=row) for row, each in enumerate(plain)]
    odd = Ask(params=SamplingParams(presence_penalty=2.0), prompt=(1,), outputs=(5,), seed=9)
    inputs, state = prepare([*asks, odd], WIDE)
    mixed = SAMPLE(jnp.asarray(logits[[0, 1, 2, 3, 0]]), inputs, mode=adjusting(2), state=state).token
    alone = run(logits, [(ask.params, ask.seed, 3, ()) for ask in asks], mode()).token
    assert np.asarray(mixed)[:4].tolist() == alone.tolist()


def test_processors_see_their_own_rows_and_come_before_the_masks() -> None:
    """Each row's function gets the row's own history; what it returns cannot bring a forbidden token back."""

    def unseen(history: TokenHistory, logits: jax.Array) -> jax.Array:
        return jnp.where(history.in_prompt | (history.output_counts > 1), -1e9, 100.0)

    def successor(history: TokenHistory, logits: jax.Array) -> jax.Array:
        following = history.last_token + history.num_prompt + 10 * history.num_outputs
        return jnp.where(jnp.arange(logits.shape[0]) == following, 50.0, logits)

    greedy = SamplingParams(temperature=0.0)
    logits = np.zeros((4, 64), np.float32)
    logits[:, 60] = 9.0
    asks = [
        Ask(params=greedy, prompt=(0, 1, 1), outputs=(2, 3, 3), processor=1),  # unseen: 2 came once
        Ask(
            params=greedy, prompt=(0, 1, 1), outputs=(2, 2, 3), masked=(3, 4), processor=1
        ),  # unseen: 3 and 4 are forbidden
        Ask(params=greedy, prompt=(7, 8), outputs=(4,), processor=2),  # successor: 4 + 2 + 10
        Ask(params=greedy, prompt=(7, 8), outputs=(4,)),  # none
    ]
    inputs, state = prepare(asks, 64)
    found = SAMPLE(jnp.asarray(logits), inputs, mode=adjusting(2, (unseen, successor)), state=state).token
    assert np.asarray(found).tolist() == [2, 5, 16, 60]


@pytest.mark.parametrize("banned", [(), (5999,)])
def test_top_p_is_of_the_whole_changed_row(banned: tuple[int, ...]) -> None:
    """40 peaks hold a third of the mass after the bias, so 0.3 keeps 32: of half the mass it would keep fewer."""
    logits = np.zeros(6001, np.float32)
    peaks = np.random.default_rng(2).choice(5900, 40, replace=False)
    logits[peaks] = np.log(100.0 - np.arange(40)) - 2.0
    params = SamplingParams(top_p=0.3, logit_bias={int(peak): 2.0 for peak in peaks})
    ask = Ask(params=params, prompt=(1,), outputs=(5950,), banned=banned, seed=4)
    tokens = drawn(logits, [ask], 2000)[:, 0]
    assert chi_square_fits(np.bincount(tokens, minlength=6001), ask.chances(logits))

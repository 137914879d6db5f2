"""Picking tokens from logits: min_p / top_k / top_p as thresholds, and the sampling noise.

Every filter keeps an upper set of the row's logits, {logit >= t}, so a filter is a threshold, found by bisection
instead of a sort. Tie rule: tokens whose logits equal the threshold are all kept, so top_k may keep more than k
and top_p more than a sort would; there is no other difference from the sort-based definition.

Letters: S sampled rows, V vocabulary, N entries looked at per row (the vocabulary, or a part of it that is known to
hold every kept token).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Real, UInt32

from jaxpaged.sampling_params import GREEDY_BELOW


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowRules:
    """What the rows ask of sampling, one entry per row."""

    temperature: jax.Array  # f32[S]
    top_k: jax.Array  # int32[S]; 0: off
    top_p: jax.Array  # f32[S]; 1: off
    min_p: jax.Array  # f32[S]; 0: off
    key: jax.Array  # uint32[S, 2]: the noise of (seed, position)

    def take(self, rows: jax.Array) -> RowRules:
        """The rules of some rows, int32[C]."""
        return jax.tree.map(lambda field: field[rows], self)


# ---- noise


def _mix(word: jax.Array) -> jax.Array:
    """A bijection of uint32 in which each input bit changes about half the output bits."""
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)


def noise_keys(seed: UInt32[Array, "S 2"], position: Int[Array, " S"]) -> UInt32[Array, "S 2"]:
    """The rows' noise keys: a hash of (seed, position) and of nothing else, so never of the row's place."""
    place = position.astype(jnp.uint32) * np.uint32(0x9E3779B9)
    first = _mix(_mix(_mix(seed[:, 0] + np.uint32(0x243F6A88)) ^ seed[:, 1]) + place)
    second = _mix(_mix(_mix(seed[:, 1] + np.uint32(0x85A308D3)) ^ seed[:, 0]) ^ place)
    return jnp.stack([first, second], 1)


def noise_words(key: UInt32[Array, "S 2"], ids: Int[Array, "S N"]) -> Int[Array, "S N"]:
    """31 random bits, a function of (key, id) only.

    The second key word enters between the two multiplications: rows whose first words differ in few bits would
    otherwise draw from each other's noise.
    """
    word = ids.astype(jnp.uint32) * np.uint32(0x9E3779B9) + key[:, :1]
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) + key[:, 1:]
    word = (word ^ (word >> 16)) * np.uint32(0x846CA68B)
    word = word ^ (word >> 15)
    return (word >> 1).astype(jnp.int32)


def gumbel(words: Real[Array, "S N"]) -> Float[Array, "S N"]:
    """Standard Gumbel noise out of 31 random bits, in [-3.1, 22.2]; never greater for a greater word.

    Small words, whose noise wins, are told apart to the last bit; f32 rounds the others.
    """
    uniform = (words.astype(jnp.float32) + 0.5) * np.float32(2.0**-31)
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, np.float32(1 - 2.0**-24))))


# ---- thresholds


def _order(value: jax.Array) -> jax.Array:
    """f32 to int32, keeping the order."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def _value(order: jax.Array) -> jax.Array:
    """The inverse of _order, which is its own inverse on the bits."""
    return lax.bitcast_convert_type(order ^ ((order >> 31) & np.int32(0x7FFFFFFF)), jnp.float32)


def upper_threshold(
    values: Float[Array, "S N"],
    weights: Float[Array, "S N"],
    target: Float[Array, " S"],
    enough: Float[Array, " S"],
    best: Float[Array, " S"],
    active: Bool[Array, " S"],
) -> Float[Array, " S"]:
    """The greatest t for which the entries >= t weigh at least target; -inf in rows that are not active.

    best is the greatest value; entries of weight 0 do not count. All entries together must weigh at least target in
    active rows. A row whose weight is exactly `enough` at some t stops there (inf: never).
    Example: values 3, 2, 2, 1, weights 1, target 2 gives t = 2, which keeps three entries.
    """
    low = _order(jnp.min(jnp.where(weights > 0, values, jnp.inf), 1))
    # Invariant: the entries >= low weigh at least target, the entries >= high less (or nothing at all).
    high = jnp.where(active, _order(best) + 1, low)

    def unfinished(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        low, high = state
        return jnp.any(high > low + 1)

    def halve(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state
        middle = (low & high) + ((low ^ high) >> 1)  # the mean without overflow
        weight = jnp.sum(jnp.where(values >= _value(middle)[:, None], weights, 0.0), 1)
        up = weight >= target
        done = up & (weight == enough)
        return jnp.where(up, middle, low), jnp.where(up & ~done, high, middle)

    low, _ = lax.while_loop(unfinished, halve, (low, high))
    return jnp.where(active, _value(low), -jnp.inf)


def scaled(
    values: Float[Array, "S N"], best: Float[Array, " S"], temperature: Float[Array, " S"]
) -> Float[Array, "S N"]:
    """(value - best) / temperature: at most 0, so no temperature overflows it to inf or NaN. Greedy rows: by 1."""
    best = jnp.maximum(best, np.finfo(np.float32).min)  # rows with nothing to pick: -inf - -inf is NaN
    divisor = jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)
    return (values - best[:, None]) / divisor[:, None]


def pick(
    values: Float[Array, "S N"],
    ids: Int[Array, "S N"],
    best: Float[Array, " S"],
    total: Float[Array, " S"],
    rules: RowRules,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Samples a token per row and tells how far down the filters looked.

    best is the greatest of the row's values. total is what the kept entries of the vocabulary weigh before top_p, for
    rows where min_p and top_k leave entries outside `values`; 0 for rows where `values` holds all of them.
    Returns (token; threshold: entries below it are not kept, -inf if top_k and top_p set none).
    Greedy rows take the least id of the greatest values, untouched by temperature and noise.
    """
    greedy = rules.temperature < GREEDY_BELOW
    logits = scaled(values, best, rules.temperature)
    alive = (logits >= jnp.log(rules.min_p)[:, None]) & (values > -jnp.inf)
    limit = rules.top_k.astype(jnp.float32)

    def narrow(stage: jax.Array, threshold: jax.Array) -> jax.Array:
        """Stage 0 is top_k, where every entry weighs 1; stage 1 is top_p on what top_k left."""
        by_count = stage == 0
        weights = jnp.where(by_count, 1.0, jnp.exp(logits))
        weights = jnp.where(alive & (values >= threshold[:, None]), weights, 0.0)
        mass = jnp.sum(weights, 1)
        target = jnp.where(by_count, limit, rules.top_p * jnp.maximum(mass, total))
        active = ~greedy & jnp.where(by_count, (limit > 0) & (limit < mass), (rules.top_p < 1) & (target <= mass))
        enough = jnp.where(by_count, limit, jnp.inf)
        return jnp.maximum(threshold, upper_threshold(values, weights, target, enough, best, active))

    needed = ~greedy & ((rules.top_k > 0) | (rules.top_p < 1.0))
    stages = jnp.where(jnp.any(needed), 2, 0)
    threshold = lax.fori_loop(0, stages, narrow, jnp.full_like(best, -jnp.inf))
    scores = jnp.where(values >= threshold[:, None], noisy(values, ids, best, rules), -jnp.inf)
    return id_of_greatest(jnp.where(greedy[:, None], values, scores), ids), threshold


def noisy(
    values: Float[Array, "S N"], ids: Int[Array, "S N"], best: Float[Array, " S"], rules: RowRules
) -> Float[Array, "S N"]:
    """The scaled logits with their noise; -inf where min_p drops them. The greatest of the kept ones is the sample."""
    logits = scaled(values, best, rules.temperature)
    alive = (logits >= jnp.log(rules.min_p)[:, None]) & (values > -jnp.inf)
    return jnp.where(alive, logits + gumbel(noise_words(rules.key, ids)), -jnp.inf)


def mass(values: Float[Array, "S N"], best: Float[Array, " S"], rules: RowRules) -> Float[Array, " S"]:
    """What the entries that min_p keeps weigh: the sum of exp((value - best) / temperature)."""
    logits = scaled(values, best, rules.temperature)
    return jnp.sum(jnp.where(logits >= jnp.log(rules.min_p)[:, None], jnp.exp(logits), 0.0), 1)


def id_of_greatest(values: Float[Array, "S N"], ids: Int[Array, "S N"]) -> Int[Array, " S"]:
    """The least id among the greatest values; on the CPU several times as fast as jnp.argmax."""
    best = jnp.max(values, 1)
    return jnp.min(jnp.where(values == best[:, None], ids, np.iinfo(np.int32).max), 1)

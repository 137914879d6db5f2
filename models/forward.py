"""What every model's backbone takes: one step's tokens and the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, no_type_check, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpaged.models.config import ModelConfig
from jaxpaged.pallas_kernels import AttentionBatch

KVPair = tuple[Array, Array]  # one layer's keys and values, each [N, K, B, H]


@jax.tree_util.register_dataclass
@no_type_check  # holds numpy arrays, traced ones or abstract ones
@dataclass(frozen=True, kw_only=True)
class ForwardInput:
    """What the backbone reads of a step; padding tokens are token 0 at position 0, written to the trash block."""

    tokens: Int[Array | np.ndarray, " T"]
    positions: Int[Array | np.ndarray, " T"]
    rope_lens: Int[Array | np.ndarray, " T"]  # max(prompt length, position + 1): for dynamic rope
    slot_mapping: Int[Array | np.ndarray, " T"]
    attention: AttentionBatch


@dataclass(frozen=True, kw_only=True)
class Backends:
    """Which implementation of each op a model calls: names that the op takes."""

    attention: str  # of paged_attention
    matmul: str  # of dense_matmul


@runtime_checkable
class CausalLM(Protocol):
    """The interface of a model: a Flax NNX module with these methods, compiled apart (see jaxpaged.programs)."""

    config: ModelConfig

    def backbone(
        self, step: ForwardInput, cache: tuple[KVPair, ...], backends: Backends
    ) -> tuple[Float[Array, "T D"], tuple[KVPair, ...]]:
        """Hidden states before the final norm, and the cache with this step's keys and values."""
        ...

    def final_states(self, hidden: Float[Array, "S D"]) -> Float[Array, "S D"]:
        """The backbone's hidden states after the final norm: what embeddings are made of."""
        ...

    def logits(self, hidden: Float[Array, "S D"], backends: Backends) -> Float[Array, "S V"]:
        """Float32 logits of hidden states taken from the backbone."""
        ...

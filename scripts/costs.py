"""What a workload costs by arithmetic: floating-point operations, and weights read per decode step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Sizes of a Llama-family model that costs follow from. Weights are numbers of elements of the matrices."""

    layer_weights: int  # of all layers together
    head_weights: int  # vocabulary x hidden; read once per step, multiplied for sampled tokens only
    attention_width: int  # layers x query heads x head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelCosts:
        """From a Hugging Face config.json's content."""
        hidden, mlp, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        per_layer = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + 3 * hidden * mlp
        return cls(
            layer_weights=layers * per_layer,
            head_weights=config["vocab_size"] * hidden,
            attention_width=layers * heads * head_dim,
        )

    def flops(self, requests: Sequence[tuple[int, int]]) -> float:
        """Operations for requests of (prompt, output) tokens: all but a request's last token pass through the layers.

        Example: prompt 3, output 2: positions 0 to 3 are computed, with 1, 2, 3 and 4 keys; two rows of logits.
        """
        total = 0.0
        for prompt, output in requests:
            tokens = prompt + output - 1
            total += 2.0 * self.layer_weights * tokens + 2.0 * self.head_weights * output
            total += 4.0 * self.attention_width * tokens * (tokens + 1) / 2
        return total

    def step_bytes(self, bytes_per_weight: float) -> float:
        """Bytes of weights that a decode step reads."""
        return (self.layer_weights + self.head_weights) * bytes_per_weight

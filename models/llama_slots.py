"""Which checkpoint tensors each parameter of the Llama module is made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.weights.load import Slot


def _stack_heads(config: ModelConfig, parts: Sequence[np.ndarray]) -> np.ndarray:
    """q [K·G·H, …], k [K·H, …], v [K·H, …] → [K, G + 2, H, …]."""
    k, h = config.num_kv_heads, config.head_dim
    rest = parts[0].shape[1:]
    return np.concatenate([part.reshape(k, -1, h, *rest) for part in parts], axis=1)


def llama_slots(config: ModelConfig) -> list[Slot]:
    """Which checkpoint tensors each parameter is made of."""
    d, f, n, k, h = config.hidden_size, config.mlp_dim, config.num_heads, config.num_kv_heads, config.head_dim
    slots: list[Slot] = []

    def slot(path, names, expected, build=lambda parts: parts[0]):
        slots.append(Slot(path=path, names=names, expected=expected, build=build))

    slot(("embed_vd",), ("model.embed_tokens.weight",), ((config.vocab_size, d),))
    for i in range(config.num_layers):
        layer, at = f"model.layers.{i}", ("layers", i)
        qkv = tuple(f"{layer}.self_attn.{p}_proj" for p in "qkv")
        heads = (n * h, k * h, k * h)

        def stack(parts: Sequence[np.ndarray]) -> np.ndarray:
            return _stack_heads(config, parts)

        slot((*at, "attention_norm", "scale_d"), (f"{layer}.input_layernorm.weight",), ((d,),))
        slot((*at, "attention", "qkv_kghd"), tuple(f"{p}.weight" for p in qkv), tuple((o, d) for o in heads), stack)
        if config.attention_bias:
            slot((*at, "attention", "qkv_bias_kgh"), tuple(f"{p}.bias" for p in qkv), tuple((o,) for o in heads), stack)
        out = f"{layer}.self_attn.o_proj"
        slot(
            (*at, "attention", "out_dkgh"),
            (f"{out}.weight",),
            ((d, n * h),),
            lambda parts: parts[0].reshape(d, k, n // k, h),
        )
        if config.attention_out_bias:
            slot((*at, "attention", "out_bias_d"), (f"{out}.bias",), ((d,),))
        slot((*at, "mlp_norm", "scale_d"), (f"{layer}.post_attention_layernorm.weight",), ((d,),))
        both = tuple(f"{layer}.mlp.{p}_proj" for p in ("gate", "up"))
        slot((*at, "mlp", "gate_up_2fd"), tuple(f"{p}.weight" for p in both), ((f, d), (f, d)), np.stack)
        slot((*at, "mlp", "down_df"), (f"{layer}.mlp.down_proj.weight",), ((d, f),))
        if config.mlp_bias:
            slot((*at, "mlp", "gate_up_bias_2f"), tuple(f"{p}.bias" for p in both), ((f,), (f,)), np.stack)
            slot((*at, "mlp", "down_bias_d"), (f"{layer}.mlp.down_proj.bias",), ((d,),))
    slot(("final_norm", "scale_d"), ("model.norm.weight",), ((d,),))
    if not config.tie_word_embeddings:
        slot(("head_vd",), ("lm_head.weight",), ((config.vocab_size, d),))
    return slots
